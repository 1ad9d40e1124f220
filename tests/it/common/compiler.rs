//! A C compiler that writes down what it compiles.

use super::Place;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// A compiler that writes down what it compiles before it does, after a rest.
pub(crate) struct LoggedCompiler {
    program: PathBuf,
    log: PathBuf,
    held: PathBuf,
}

impl LoggedCompiler {
    /// One that rests for so many seconds before it compiles. What others wrote down here is forgotten.
    pub(crate) fn new(place: &Place, rest: f64) -> Self {
        let [log, held] = ["compiled", "held"].map(|name| place.path(name));
        let cc = std::env::var("CC").ok().filter(|cc| !cc.is_empty()).unwrap_or_else(|| "cc".into());
        let script = format!(
            "#!/bin/sh\n[ \"$1\" = --version ] && exec {cc} --version\n\
             for last; do case $last in *.c) grep -m 1 'schedule ' \"$last\" >> '{}' ;; esac; done\n\
             sleep {rest}\n\
             while [ -s '{held}' ] && grep -q -f '{held}' \"$last\"; do sleep 0.05; done\nexec {cc} \"$@\"\n",
            log.display(),
            held = held.display(),
        );
        for file in [&log, &held] {
            let _ = std::fs::remove_file(file);
        }
        Self { program: place.program("logged-cc", &script), log, held }
    }

    /// Kernels with this text in their source are written down and then wait, until [`LoggedCompiler::release`].
    pub(crate) fn hold(&self, text: &str) {
        std::fs::write(&self.held, format!("{text}\n")).unwrap();
    }

    /// Nothing waits any more.
    pub(crate) fn release(&self) {
        std::fs::remove_file(&self.held).unwrap();
    }

    /// The schedules that were compiled, in order.
    pub(crate) fn compiled(&self) -> Vec<String> {
        std::fs::read_to_string(&self.log).unwrap_or_default().lines().map(str::to_owned).collect()
    }

    /// The compiler, for `CC`.
    pub(crate) fn program(&self) -> &Path {
        &self.program
    }

    /// The command on the cpu, with this compiler.
    pub(crate) fn command(&self, place: &Place, args: &[&str]) -> Command {
        let mut command = Command::new(assert_cmd::cargo::cargo_bin("flashtune"));
        command.args(["--device", "cpu", "--json", "--cache"]).arg(place.cache()).args(args);
        command.env("CC", &self.program).env_remove("FLASHTUNE_TEMPLATES");
        command
    }

    pub(crate) fn start(&self, place: &Place, args: &[&str]) -> Child {
        self.command(place, args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }
}

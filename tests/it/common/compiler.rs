//! A C compiler that writes down what it compiles.

use super::Place;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

/// A compiler that writes down what it compiles before it does, after a rest.
pub struct LoggedCompiler {
    program: PathBuf,
    log: PathBuf,
}

impl LoggedCompiler {
    /// One that rests for so many seconds before it compiles. What others wrote down here is forgotten.
    pub fn new(place: &Place, rest: f64) -> Self {
        let log = place.path("compiled");
        let cc = std::env::var("CC").unwrap_or_else(|_| "cc".into());
        let script = format!(
            "#!/bin/sh\n[ \"$1\" = --version ] && exec {cc} --version\n\
             for last; do case $last in *.c) grep -m 1 'schedule ' \"$last\" >> '{}' ;; esac; done\n\
             sleep {rest}\nexec {cc} \"$@\"\n",
            log.display()
        );
        let _ = std::fs::remove_file(&log);
        Self { program: place.program("logged-cc", &script), log }
    }

    /// The schedules that were compiled, in order.
    pub fn compiled(&self) -> Vec<String> {
        std::fs::read_to_string(&self.log).unwrap_or_default().lines().map(str::to_owned).collect()
    }

    /// The command on the cpu, with this compiler.
    pub fn command(&self, place: &Place, args: &[&str]) -> Command {
        let mut command = Command::new(assert_cmd::cargo::cargo_bin("flashtune"));
        command.args(["--device", "cpu", "--json", "--cache"]).arg(place.cache()).args(args);
        command.env("CC", &self.program).env_remove("FLASHTUNE_TEMPLATES");
        command
    }

    pub fn start(&self, place: &Place, args: &[&str]) -> Child {
        self.command(place, args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }
}

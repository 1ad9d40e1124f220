//! C compilers of the tests: one that remembers, and one that writes down what it compiles.

use super::Place;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::LazyLock;

/// The C compiler with a memory: four of five kernels that the tests need are some other test's as well, and the same
/// source and options give the same bytes. It is called as the compiler is, whose name and version are part of what is
/// kept.
pub(crate) fn remembering() -> &'static Path {
    static PROGRAM: LazyLock<PathBuf> = LazyLock::new(|| {
        let cc = std::env::var("CC").ok().filter(|cc| !cc.is_empty()).unwrap_or_else(|| "cc".into());
        let version = Command::new(&cc).arg("--version").output().map(|out| out.stdout);
        // Arguments of a compiler would be part of the name as well.
        let (Ok(version), Some(name)) = (version, Path::new(&cc).file_name()) else { return cc.into() };
        let [memory, bin] = ["kernels", "bin"].map(|name| Path::new(env!("CARGO_TARGET_TMPDIR")).join(name));
        for folder in [&memory, &bin] {
            std::fs::create_dir_all(folder).expect("a folder in target/");
        }
        let script = format!(
            "#!/bin/sh\n[ -f kernel.c ] || exec {cc} \"$@\"\n\
             kept='{}'/$( {{ echo '{cc}' '{}' \"$*\"; cat kernel.c; }} | sha256sum | cut -c 1-64)\n\
             [ -f \"$kept\" ] && exec cp \"$kept\" kernel.so\n\
             {cc} \"$@\" || exit\ncp kernel.so \"$kept.$$\" && mv \"$kept.$$\" \"$kept\"\nexit 0\n",
            memory.display(),
            String::from_utf8_lossy(&version).lines().next().unwrap_or_default().replace('\'', ""),
        );
        let program = bin.join(name);
        super::write_program(&program, &script);
        program
    });
    &PROGRAM
}

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
        let cc = remembering().display();
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

//! File systems that fail: a small library, preloaded into the command, that makes operations on one folder fail
//! (`tests/data/faults.c`).

use super::{Place, ROOT};
use flashtune_cache::{CacheDir, Layers, Record, RecordKey, Validity};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;

/// Read-only, full, no permission, too many files, defective, gone stale, busy.
pub(crate) const ERRORS: [(&str, i32); 7] =
    [("EROFS", 30), ("ENOSPC", 28), ("EACCES", 13), ("EMFILE", 24), ("EIO", 5), ("ESTALE", 116), ("EBUSY", 16)];

/// What sled says of itself when it cannot write while it is closed; that is caught.
pub(crate) const CLOSED_IN_DISORDER: &str = "could not be closed in order";

/// The library, and the cache on whose folder operations fail.
pub(crate) struct Faults {
    pub library: PathBuf,
    pub cache: PathBuf,
    log: PathBuf,
}

/// What came of a command.
pub(crate) struct Told {
    pub output: Output,
    /// Operations on the cache, and how many of them failed.
    pub operations: u64,
    pub failures: u64,
}

impl Faults {
    /// Compiles the library.
    pub(crate) fn new(place: &Place, cache: PathBuf) -> Self {
        let library = place.path("faults.so");
        let source = Path::new(ROOT).join("tests/data/faults.c");
        let mut cc = Command::new("cc");
        cc.args(["-shared", "-fPIC", "-O1", "-o"]).arg(&library).arg(source).arg("-ldl");
        let out = cc.output().expect("a C compiler");
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        Self { library, cache, log: place.path("operations") }
    }

    /// What the cache serves to readers: every record, with its kernel loaded and checked.
    pub(crate) fn served(&self) -> BTreeSet<RecordKey> {
        let layers = Layers::open(&CacheDir::at(&self.cache), &[], None).expect("the cache is there");
        let with_kernel = |(_, record, _): &(String, Arc<Record>, Validity)| {
            assert!(layers.artifact(&record.artifact).is_some(), "the kernel is lost of {record:?}");
            record.key.clone()
        };
        layers.records().iter().map(with_kernel).collect()
    }

    /// The command, with nothing that fails.
    pub(crate) fn unharmed(&self, args: &[&str]) -> Command {
        let mut command = Command::new(assert_cmd::cargo::cargo_bin("flashtune"));
        command.args(["--device", "cpu", "--allow-unsigned", "--cache"]).arg(&self.cache).args(args);
        command
    }

    /// Runs a command with these settings of the library.
    pub(crate) fn run(&self, command: &mut Command, settings: &[(&str, String)]) -> Told {
        let _ = std::fs::remove_file(&self.log);
        command.env("LD_PRELOAD", &self.library).env("FAULT_PATH", &self.cache).env("FAULT_LOG", &self.log);
        let output = command.envs(settings.iter().map(|(n, v)| (n, v))).output().expect("the command starts");
        let log = std::fs::read_to_string(&self.log).unwrap_or_default();
        let mut numbers = log.split_whitespace().map(|n| n.parse().unwrap_or(0));
        let mut next = || numbers.next().unwrap_or(0);
        Told { output, operations: next(), failures: next() }
    }

    /// Runs the command with operations `at..at + count` on the cache failing.
    pub(crate) fn fail(&self, args: &[&str], at: u64, count: u64, errno: i32) -> Told {
        let settings = [("FAULT_AT", at.to_string()), ("FAULT_COUNT", count.to_string())];
        let settings = [&settings[..], &[("FAULT_ERRNO", errno.to_string())]].concat();
        self.run(&mut self.unharmed(args), &settings)
    }
}

impl Told {
    pub(crate) fn stderr(&self) -> String {
        stderr(&self.output)
    }

    /// What was printed by a command that must succeed.
    #[track_caller]
    pub(crate) fn answers(&self, what: &str) -> serde_json::Value {
        answers(&self.output, what)
    }

    /// A command that may have failed did so in order.
    #[track_caller]
    pub(crate) fn ended_in_order(&self, what: &str) {
        let told = self.stderr();
        assert!(matches!(self.output.status.code(), Some(0..=3)), "{what}: {}\n{told}", self.output.status);
        // sled panics where it cannot open or close its files; that is caught, and said in other words.
        let mut panics = told.lines().filter(|l| l.contains("panicked at"));
        assert!(told.contains(CLOSED_IN_DISORDER) || panics.all(|l| l.contains("/sled-")), "{what}: {told}");
        assert!(self.output.status.success() || told.contains("error: "), "{what}: {told}");
    }
}

pub(crate) fn stderr(out: &Output) -> String {
    String::from_utf8_lossy(&out.stderr).into_owned()
}

#[track_caller]
pub(crate) fn answers(out: &Output, what: &str) -> serde_json::Value {
    let told = stderr(out);
    assert!(out.status.success(), "{what}: {}\n{told}", out.status);
    assert!(!told.contains("panicked"), "{what}: {told}");
    serde_json::from_slice(&out.stdout).unwrap_or_else(|e| panic!("{what}: {e}\n{told}"))
}

/// All files of a folder, copied.
pub(crate) fn copy(from: &Path, to: &Path) {
    use std::os::unix::fs::DirBuilderExt;
    if !to.exists() {
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(to).unwrap();
    }
    for entry in std::fs::read_dir(from).unwrap().flatten() {
        let target = to.join(entry.file_name());
        match entry.file_type().unwrap().is_dir() {
            true => copy(&entry.path(), &target),
            false => drop(std::fs::copy(entry.path(), &target).unwrap()),
        }
    }
}

/// A count that the environment may raise beyond what CI has time for.
pub(crate) fn count_of(variable: &str, usually: u64) -> u64 {
    std::env::var(variable).ok().and_then(|n| n.parse().ok()).unwrap_or(usually)
}

/// Of so many operations, as many as there is time for, evenly, the first and the last among them;
/// `FLASHTUNE_CRASH_POINTS` says how many, up to all of them, and `FLASHTUNE_CRASH_FROM` from which one on.
pub(crate) fn points(operations: u64, usually: u64) -> BTreeSet<u64> {
    let first = count_of("FLASHTUNE_CRASH_FROM", 1).clamp(1, operations - 1);
    let count = count_of("FLASHTUNE_CRASH_POINTS", usually).clamp(2, operations - first + 1);
    (0..count).map(|i| first + i * (operations - first) / (count - 1)).collect()
}

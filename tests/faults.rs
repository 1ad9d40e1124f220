//! File systems that fail: every operation on the cache folder, with every kind of error, in the real program.
//!
//! A small library is preloaded that makes chosen file operations below the cache folder fail (`data/faults.c`).

mod common;

use common::{Place, SMALL};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Read-only, full, no permission, too many files, defective, gone stale, busy.
const ERRORS: [(&str, i32); 7] =
    [("EROFS", 30), ("ENOSPC", 28), ("EACCES", 13), ("EMFILE", 24), ("EIO", 5), ("ESTALE", 116), ("EBUSY", 16)];

/// Compiles the library that makes operations fail.
fn faults(place: &Place) -> PathBuf {
    let library = place.path("faults.so");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/faults.c");
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-O1", "-o"]).arg(&library).arg(source).arg("-ldl");
    let out = cc.output().expect("a C compiler");
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    library
}

struct Faults<'a> {
    place: &'a Place,
    library: PathBuf,
    cache: PathBuf,
}

impl Faults<'_> {
    /// Runs the command with operations `at..at + count` on the cache failing. Gives how many there were.
    fn run(&self, args: &[&str], at: u64, count: u64, errno: i32) -> (Output, u64) {
        let log = self.place.path("operations");
        let _ = std::fs::remove_file(&log);
        let out = on_cpu(&self.cache)
            .args(args)
            .env("LD_PRELOAD", &self.library)
            .env("FAULT_PATH", &self.cache)
            .env("FAULT_AT", at.to_string())
            .env("FAULT_COUNT", count.to_string())
            .env("FAULT_ERRNO", errno.to_string())
            .env("FAULT_LOG", &log)
            .output()
            .expect("the command starts");
        let operations = std::fs::read_to_string(&log).ok().and_then(|n| n.trim().parse().ok()).unwrap_or(0);
        (out, operations)
    }
}

/// The command with another cache than the place's own.
fn on_cpu(cache: &Path) -> Command {
    let mut command = Command::new(assert_cmd::cargo::cargo_bin("flashtune"));
    command.args(["--device", "cpu", "--allow-unsigned", "--cache"]).arg(cache);
    command
}

fn stderr(out: &Output) -> String {
    String::from_utf8_lossy(&out.stderr).into_owned()
}

#[track_caller]
fn answers(out: &Output, what: &str) -> serde_json::Value {
    let told = stderr(out);
    assert!(out.status.success(), "{what}: {}\n{told}", out.status);
    assert!(!told.contains("panicked"), "{what}: {told}");
    serde_json::from_slice(&out.stdout).unwrap_or_else(|e| panic!("{what}: {e}\n{told}"))
}

#[test]
fn a_dispatch_is_answered_whatever_fails_in_the_cache() {
    let place = Place::new();
    place.tune_small();
    let faults = Faults { library: faults(&place), cache: place.cache(), place: &place };
    let explain = [&["explain", "--json"], SMALL].concat();
    let (out, operations) = faults.run(&explain, 0, 0, 0);
    assert_eq!(answers(&out, "no fault")[0]["status"]["kind"], "tuned");
    assert!(operations > 0, "the library is not in effect");

    for (name, errno) in ERRORS {
        // Everything fails: the model's choice serves, and one warning each for reading and for keeping.
        let (out, _) = faults.run(&explain, 1, u64::MAX >> 1, errno);
        assert_eq!(answers(&out, name)[0]["status"]["kind"], "default", "{name}");
        let told = stderr(&out);
        let warnings = |word: &str| told.lines().filter(|l| l.contains("WARN") && l.contains(word)).count();
        assert!(warnings("snapshot") == 1 && warnings("cannot be kept") == 1, "{name}: {told}");
        // One operation fails, whichever it is.
        for at in 1..=operations {
            let (out, _) = faults.run(&explain, at, 1, errno);
            answers(&out, &format!("{name} at {at}"));
        }
    }
    // A file system that takes its time.
    let mut slow = on_cpu(&faults.cache);
    slow.args(&explain)
        .env("LD_PRELOAD", &faults.library)
        .env("FAULT_PATH", &faults.cache)
        .env("FAULT_DELAY_MS", "100");
    assert_eq!(answers(&slow.output().unwrap(), "delays")[0]["status"]["kind"], "tuned");
    // All of that changed nothing.
    assert_eq!(place.json(&[&["explain"], SMALL].concat())[0]["status"]["kind"], "tuned");
}

/// All files of a folder, copied.
fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap().flatten() {
        let target = to.join(entry.file_name());
        match entry.file_type().unwrap().is_dir() {
            true => copy(&entry.path(), &target),
            false => drop(std::fs::copy(entry.path(), &target).unwrap()),
        }
    }
}

#[test]
fn an_import_that_fails_midway_loses_nothing_and_can_be_repeated() {
    let place = Place::new();
    place.tune_small();
    let bundle = place.path("more.ftb");
    let arch = common::host_arch().to_string();
    let other = ["--dtype", "f32", "--head-dim", "16", "--mask", "full", "--heads", "1", "--q-len", "64"];
    place.json(&[&["build"], &other[..], &["--arch", &arch, "--out", bundle.to_str().unwrap()]].concat());

    let faults = Faults { library: faults(&place), cache: place.path("copy"), place: &place };
    let import = ["import", bundle.to_str().unwrap()];
    let records = || {
        let out = on_cpu(&faults.cache).args(["list", "--json"]).output().unwrap();
        answers(&out, "list").as_array().unwrap().len()
    };
    copy(&place.cache(), &faults.cache);
    let (out, operations) = faults.run(&import, 0, 0, 0);
    assert!(out.status.success() && records() == 2, "{}", stderr(&out));
    assert!(operations > 20, "{operations} operations");
    for at in 1..=operations {
        std::fs::remove_dir_all(&faults.cache).unwrap();
        copy(&place.cache(), &faults.cache);
        let (name, errno) = ERRORS[at as usize % ERRORS.len()];
        let (out, _) = faults.run(&import, at, 1, errno);
        let (what, told) = (format!("{name} at {at} of {operations}"), stderr(&out));
        // sled panics when it cannot write while it is closed; that is caught.
        assert!(matches!(out.status.code(), Some(0..=3)), "{what}: {told}");
        assert!(!told.contains("panicked") || told.contains("could not be closed in order"), "{what}: {told}");
        assert!(out.status.success() || told.contains("error: "), "{what}: {told}");
        // What was published is there, whether or not the new record made it.
        let there = records();
        assert!(there == 2 || (there == 1 && !out.status.success()), "{what}: {there} records\n{told}");
        let again = on_cpu(&faults.cache).args(import).output().unwrap();
        assert!(again.status.success() && records() == 2, "{what}: {}", stderr(&again));
    }
}

#[test]
fn a_clock_that_is_years_off_changes_no_answer() {
    const YEARS: i64 = 20 * 365 * 24 * 3600;
    let place = Place::new();
    let library = faults(&place);
    let at = |seconds: i64, args: &[&str]| {
        let mut command = on_cpu(&place.cache());
        command.args(args).env("LD_PRELOAD", &library).env("FAULT_CLOCK_S", seconds.to_string());
        answers(&command.output().expect("the command starts"), &format!("{seconds} s, {args:?}"))
    };
    let tune = [&["tune", "--json", "--trials", "3", "--budget-s", "10"], SMALL].concat();
    let explain = [&["explain", "--story", "--json"], SMALL].concat();
    let made = place.tune_small()["tuned"][0]["schedule"].clone();
    let bundle = place.path("all.ftb");
    let bundle = bundle.to_str().unwrap();
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs() as i64;
    // Behind the files' times and before the record was made; ahead of all of them; a machine that has just begun to count.
    for clock in [-YEARS, YEARS, 1000 - now] {
        let told = &at(clock, &explain)[0];
        assert_eq!((&told["status"]["kind"], &told["schedule"]), (&"tuned".into(), &made), "{clock}");
        assert!(told["story"]["age_s"].as_u64().unwrap() <= YEARS as u64 + 3600, "{told}");
        // Nothing is measured again, nothing in use is evicted or taken for a dead process's.
        let again = &at(clock, &tune)["tuned"][0];
        assert_eq!((&again["cached"], &again["schedule"]), (&true.into(), &made), "{clock}");
        at(clock, &["export", bundle, "--json"]);
        at(clock, &["import", bundle, "--json"]);
    }
    // Before the epoch the journal cannot be opened; what is published serves.
    let before = -now - 1000;
    assert_eq!(at(before, &[&["explain", "--json"], SMALL].concat())[0]["status"]["kind"], "tuned");
    let mut forced = on_cpu(&place.cache());
    forced.args(["tune", "--force"]).args(SMALL).env("LD_PRELOAD", &library).env("FAULT_CLOCK_S", before.to_string());
    let told = stderr(&forced.output().expect("the command starts"));
    assert!(told.contains("before 1970") && !told.contains("panicked"), "{told}");
}

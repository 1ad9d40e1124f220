//! Processes that are killed: what they leave behind does not stay.

use crate::common::{Place, SMALL};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

/// Folders of compilations in a folder for temporary files.
fn left(folder: &Path) -> Vec<std::path::PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path());
    entries.filter(|p| p.file_name().unwrap().to_str().unwrap().starts_with("flashtune-cc-")).collect()
}

/// A host that compiles with a compiler of the test's.
fn compiling_host(place: &Place, compiler: &Path) -> Command {
    let mut host = Command::new(assert_cmd::cargo::cargo_bin("flashtune"));
    host.args(["--device", "cpu", "--cache"]).arg(place.cache()).arg("explain").args(SMALL);
    host.env("CC", compiler).stdout(Stdio::null());
    host
}

/// Waits for a sign that the compilation has started.
fn started<T>(sign: impl Fn() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = sign() {
            return found;
        }
        assert!(start.elapsed() < Duration::from_secs(30), "the compilation did not start");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_compilation_that_was_killed_is_cleared_away_by_a_later_process() {
    let place = Place::new();
    let temporary = place.path("tmp");
    std::fs::create_dir(&temporary).unwrap();
    // A compiler that answers to --version and then takes its time.
    let slow = "#!/bin/sh\n[ \"$1\" = --version ] && exec echo slow 1\nexec sleep 20\n";
    let slow = place.program("slow-cc", slow);
    let mut child = compiling_host(&place, &slow).env("TMPDIR", &temporary).spawn().unwrap();
    started(|| left(&temporary).pop());
    child.kill().unwrap();
    child.wait().unwrap();
    let [orphan] = left(&temporary).try_into().expect("one compilation");

    // Another process may be about to use what is young, whoever made it.
    let explain = [&["explain"], SMALL].concat();
    let explain_with_cache = |cache: &str| {
        let mut command = crate::common::command();
        command.args(["--device", "cpu", "--cache"]).arg(place.path(cache)).args(&explain).env("TMPDIR", &temporary);
        assert!(command.output().unwrap().status.success());
    };
    explain_with_cache("one");
    assert!(orphan.exists());
    let then = std::fs::FileTimes::new().set_modified(SystemTime::now() - Duration::from_secs(2 * 3600));
    std::fs::File::open(&orphan).unwrap().set_times(then).unwrap();
    explain_with_cache("two");
    assert!(left(&temporary).is_empty());
}

#[test]
fn a_compiler_and_what_it_started_end_with_a_killed_host() {
    let place = Place::new();
    let pids = place.path("pids");
    // A driver that starts the compiler proper and waits for it, as compilers do.
    let driver = format!(
        "#!/bin/sh\n[ \"$1\" = --version ] && exec echo slow 1\nsleep 60 &\n\
         echo $$ $! > {0}.new; mv {0}.new {0}\nwait\n",
        pids.display()
    );
    let driver = place.program("driver-cc", &driver);
    let mut host = compiling_host(&place, &driver).spawn().unwrap();
    let pids = started(|| std::fs::read_to_string(&pids).ok());
    let pids: Vec<u32> = pids.split_whitespace().map(|pid| pid.parse().unwrap()).collect();
    // A zombie that nobody has waited for yet does nothing any more.
    let runs =
        |pid: &u32| std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "));
    assert!(pids.len() == 2 && pids.iter().all(runs), "{pids:?}");
    host.kill().unwrap();
    host.wait().unwrap();
    let killed = Instant::now();
    while pids.iter().any(runs) {
        assert!(killed.elapsed() < Duration::from_secs(10), "{pids:?} go on");
        std::thread::sleep(Duration::from_millis(5));
    }
    println!("gone after {:?}", killed.elapsed());
}

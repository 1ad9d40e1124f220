//! Processes that are killed in any file operation on the cache, writes after their first half: what was published is
//! there, and whoever comes next finishes the work without doing it again.
//!
//! A test run has time for some of the operations; `FLASHTUNE_CRASH_POINTS` says for how many, up to all of them, and
//! `FLASHTUNE_CRASH_FROM` from which one on.

use crate::common::compiler::LoggedCompiler;
use crate::common::faults::{Faults, answers, copy, points};
use crate::common::{self, Place, SMALL};
use std::collections::BTreeSet;
use std::os::unix::process::ExitStatusExt;

/// A small problem that a bundle has.
const OTHER: [&str; 10] = ["--dtype", "f32", "--head-dim", "16", "--mask", "full", "--heads", "1", "--q-len", "64"];

/// A bundle of that problem.
fn bundle(place: &Place) -> String {
    let path = place.path("other.ftb").to_str().unwrap().to_owned();
    let arch = common::host_arch().to_string();
    place.json(&[&["build"], &OTHER[..], &["--arch", &arch, "--out", &path]].concat());
    path
}

fn records(faults: &Faults) -> usize {
    faults.served().len()
}

#[test]
fn an_import_that_is_killed_in_any_operation_loses_nothing_and_can_be_repeated() {
    let place = Place::new();
    place.tune_small();
    let bundle = bundle(&place);
    let faults = Faults::new(&place, place.path("copy"));
    let import = ["import", bundle.as_str()];
    copy(&place.cache(), &faults.cache);
    let operations = faults.run(&mut faults.unharmed(&import), &[]).operations;
    assert!(operations > 20, "{operations} operations");
    let (mut kills, mut published) = (0, 0);
    for at in points(operations, 6) {
        std::fs::remove_dir_all(&faults.cache).unwrap();
        copy(&place.cache(), &faults.cache);
        let killed = faults.run(&mut faults.unharmed(&import), &[("FAULT_KILL_AT", at.to_string())]);
        // The journal writes when it likes: the last operations are not always there.
        let status = killed.output.status;
        assert!(status.signal() == Some(9) || status.success(), "{at} of {operations}: {}", killed.stderr());
        kills += usize::from(status.signal().is_some());
        let there = records(&faults);
        assert!((1..=2).contains(&there), "{at} of {operations}: {there} records");
        published += there - 1;
        let again = faults.unharmed(&import).output().unwrap();
        assert!(
            again.status.success() && records(&faults) == 2,
            "{at} of {operations}: {}",
            common::faults::stderr(&again)
        );
    }
    assert!(kills > 1, "{kills} were killed");
    println!("{kills} were killed in one of {operations} operations; of {published} the record was out");
}

#[test]
fn a_tuner_that_is_killed_in_any_operation_is_followed_by_one_that_repeats_nothing() {
    let place = Place::new();
    let faults = Faults::new(&place, place.cache());
    // Something else was published before.
    let bundle = bundle(&place);
    place.json(&["import", &bundle]);
    let before = place.path("before");
    copy(&place.cache(), &before);
    let tune = [&["tune"], SMALL, &["--trials", "2", "--budget-s", "20"]].concat();
    let compiler = LoggedCompiler::new(&place, 0.0);
    let calm = faults.run(&mut compiler.command(&place, &tune), &[]);
    let operations = calm.operations;
    assert!(operations > 100, "{operations} operations: {}", calm.stderr());
    let cores = std::thread::available_parallelism().unwrap().get();
    let mut killed = 0;
    for at in points(operations, 3) {
        std::fs::remove_dir_all(place.cache()).unwrap();
        copy(&before, &place.cache());
        let compiler = LoggedCompiler::new(&place, 0.0);
        let first = faults.run(&mut compiler.command(&place, &tune), &[("FAULT_KILL_AT", at.to_string())]);
        let what = format!("{at} of {operations}");
        // How many rounds there are is a matter of noise, and so is how many operations.
        let status = first.output.status;
        assert!(status.signal() == Some(9) || status.code().is_some_and(|code| code < 4), "{what}: {}", first.stderr());
        killed += usize::from(status.signal().is_some());
        println!("{what}: {status}");
        assert!(records(&faults) >= 1, "{what}: what was published before is lost");
        // The machine may be too busy for a result, which is another test's matter.
        let report = (0..4).find_map(|_| {
            let out = compiler.command(&place, &tune).output().unwrap();
            let said = common::faults::stderr(&out);
            assert!(!said.contains("panicked"), "{what}: {said}");
            assert!(out.status.success() || said.contains("nothing was stored"), "{what}: {said}");
            out.status.success().then(|| answers(&out, &what))
        });
        let report = report.expect("the machine is too busy to tune");
        assert!(report["tuned"][0]["median_us"].as_f64().unwrap() > 0.0, "{what}: {report}");
        assert_eq!(records(&faults), 2, "{what}");
        // Compiled twice is what was being compiled, on each core, when it was killed.
        let compiled = compiler.compiled();
        let distinct: BTreeSet<_> = compiled.iter().collect();
        assert!(compiled.len() <= distinct.len() + cores && distinct.len() <= 2, "{what}: {compiled:?}");
        // Who comes after the publication is answered by it, and has no work to clear away.
        if report["tuned"][0]["cached"] == true {
            continue;
        }
        let left = |folder: &str| std::fs::read_dir(place.cache().join("v7").join(folder)).map_or(0, |d| d.count());
        assert_eq!((left("claims"), left("jobs")), (0, 0), "{what}");
    }
    assert!(killed > 1, "{killed} were killed");
    println!("{killed} were killed in one of {operations} operations");
}

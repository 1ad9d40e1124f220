//! File systems that fail: every operation on the cache folder, with every kind of error, in the real program.

use crate::common::faults::{ERRORS, Faults, copy, points, stderr};
use crate::common::{self, Place, SMALL};

#[test]
fn a_dispatch_is_answered_whatever_fails_in_the_cache() {
    let place = Place::new();
    place.tune_small();
    let faults = Faults::new(&place, place.cache());
    let explain = [&["explain", "--json"], SMALL].concat();
    let calm = faults.fail(&explain, 0, 0, 0);
    assert_eq!(calm.answers("no fault")[0]["status"]["kind"], "tuned");
    assert!(calm.operations > 0, "the library is not in effect");

    for (name, errno) in ERRORS {
        // Everything fails: the default schedule serves, and one warning each for reading and for keeping.
        let all = faults.fail(&explain, 1, u64::MAX >> 1, errno);
        assert_eq!(all.answers(name)[0]["status"]["kind"], "default", "{name}");
        let told = all.stderr();
        let warnings = |word: &str| told.lines().filter(|l| l.contains("WARN") && l.contains(word)).count();
        assert!(warnings("snapshot") == 1 && warnings("cannot be kept") == 1, "{name}: {told}");
        // One operation fails, whichever it is.
        for at in 1..=calm.operations {
            faults.fail(&explain, at, 1, errno).answers(&format!("{name} at {at}"));
        }
    }
    // All of that changed nothing.
    assert_eq!(place.json(&[&["explain"], SMALL].concat())[0]["status"]["kind"], "tuned");
}

/// What takes a minute each time is waited for as often as it is asked for: nobody asks again because it took long, and
/// the rest of an answer takes as long as ever.
#[test]
fn a_slow_file_system_is_asked_a_few_times_and_no_more_for_being_slow() {
    /// The most that a dispatch asks for: of what is tuned; of what is not, and is compiled and kept; of what was kept.
    const MOST: [u64; 3] = [5, 25, 11];
    let place = Place::new();
    place.tune_small();
    let faults = Faults::new(&place, place.cache());
    let tuned = [&["explain", "--json"], SMALL].concat();
    let other = ["explain", "--json", "--dtype", "f32", "--head-dim", "16", "--heads", "1", "--q-len", "64"];
    let before = place.path("before");
    copy(&place.cache(), &before);
    let asked = |delay_ms: u64, seconds: &mut f64| {
        std::fs::remove_dir_all(place.cache()).unwrap();
        copy(&before, &place.cache());
        [(&tuned[..], "tuned"), (&other, "default"), (&other, "default")].map(|(command, status)| {
            let start = std::time::Instant::now();
            let told = faults.run(&mut faults.unharmed(command), &[("FAULT_DELAY_MS", delay_ms.to_string())]);
            *seconds += start.elapsed().as_secs_f64();
            assert_eq!(told.answers("slow")[0]["status"]["kind"], status);
            assert!(delay_ms == 0 || *seconds > told.operations as f64 * delay_ms as f64 / 1e3, "it was not slow");
            told.operations
        })
    };
    let (mut calm, mut slow) = (0.0, 0.0);
    let (at_once, slowly) = (asked(0, &mut calm), asked(100, &mut slow));
    println!("{at_once:?} operations; {calm:.1} s become {slow:.1} s at 0.1 s each");
    assert_eq!(at_once, slowly);
    assert!(at_once.iter().zip(MOST).all(|(asked, most)| *asked <= most), "{at_once:?}");
}

/// A file that gets its name before its content is on the disk is empty after a loss of power.
#[test]
fn what_gets_its_name_is_on_the_disk_before() {
    let place = Place::new();
    let faults = Faults::new(&place, place.cache());
    let bundle = place.path("more.ftb");
    let arch = common::host_arch().to_string();
    let other = ["--dtype", "f32", "--head-dim", "16", "--mask", "full", "--heads", "1", "--q-len", "64"];
    place.json(&[&["build"], &other[..], &["--arch", &arch, "--out", bundle.to_str().unwrap()]].concat());
    let tune = [&["tune"], SMALL, &["--trials", "2", "--budget-s", "10"]].concat();
    let (kept, export) = ([&["explain", "--json"], SMALL].concat(), place.path("cache/out.ftb"));
    let exported = ["export", export.to_str().unwrap()];
    let commands = [&kept[..], &tune, &["import", bundle.to_str().unwrap()], &exported];
    for command in commands {
        // The machine may be too busy for a result, which is another test's matter.
        let done = (0..4).any(|_| {
            let told = faults.run(&mut faults.unharmed(command), &[("FAULT_POWER", "1".to_owned())]);
            assert!(told.operations > 3, "{command:?}: {} operations", told.operations);
            assert!(told.output.status.success() || told.stderr().contains("nothing was stored"), "{}", told.stderr());
            told.output.status.success()
        });
        assert!(done, "the machine is too busy to tune");
        // Nothing that has a name is empty.
        let mut folders = vec![place.cache()];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).unwrap().flatten() {
                let name = entry.file_name().to_string_lossy().into_owned();
                match entry.file_type().unwrap().is_dir() {
                    true => folders.push(entry.path()),
                    false if !name.ends_with(".art") && !name.ends_with(".ftb") => {}
                    false => assert!(entry.metadata().unwrap().len() > 0, "{command:?}: {name} is empty"),
                }
            }
        }
    }
    assert_eq!(faults.served().len(), 2);
}

#[test]
fn an_import_that_fails_midway_loses_nothing_and_can_be_repeated() {
    let place = Place::new();
    place.tune_small();
    let bundle = place.path("more.ftb");
    let arch = common::host_arch().to_string();
    let other = ["--dtype", "f32", "--head-dim", "16", "--mask", "full", "--heads", "1", "--q-len", "64"];
    place.json(&[&["build"], &other[..], &["--arch", &arch, "--out", bundle.to_str().unwrap()]].concat());

    let faults = Faults::new(&place, place.path("copy"));
    let import = ["import", bundle.to_str().unwrap()];
    let records = || faults.served().len();
    copy(&place.cache(), &faults.cache);
    let calm = faults.fail(&import, 0, 0, 0);
    let operations = calm.operations;
    assert!(calm.output.status.success() && records() == 2, "{}", calm.stderr());
    assert!(operations > 20, "{operations} operations");
    for at in points(operations, 40) {
        std::fs::remove_dir_all(&faults.cache).unwrap();
        copy(&place.cache(), &faults.cache);
        let (name, errno) = ERRORS[at as usize % ERRORS.len()];
        let failed = faults.fail(&import, at, 1, errno);
        let (what, told) = (format!("{name} at {at} of {operations}"), failed.stderr());
        failed.ended_in_order(&what);
        // What was published is there, whether or not the new record made it.
        let there = records();
        assert!(there == 2 || (there == 1 && !failed.output.status.success()), "{what}: {there} records\n{told}");
        let again = faults.unharmed(&import).output().unwrap();
        assert!(again.status.success() && records() == 2, "{what}: {}", stderr(&again));
    }
}

#[test]
fn a_clock_that_is_years_off_changes_no_answer() {
    const YEARS: i64 = 20 * 365 * 24 * 3600;
    let place = Place::new();
    let faults = Faults::new(&place, place.cache());
    let at = |seconds: i64, args: &[&str]| {
        let told = faults.run(&mut faults.unharmed(args), &[("FAULT_CLOCK_S", seconds.to_string())]);
        told.answers(&format!("{seconds} s, {args:?}"))
    };
    let tune = [&["tune", "--json", "--trials", "3", "--budget-s", "10"], SMALL].concat();
    let explain = [&["explain", "--story", "--json"], SMALL].concat();
    let made = place.tune_small()["tuned"][0]["schedule"].clone();
    let bundle = place.path("all.ftb");
    let bundle = bundle.to_str().unwrap();
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs() as i64;
    // Behind the files' times and before the record was made; ahead of all of them; a machine that has just begun to
    // count.
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
    let forced = [&["tune", "--force"], SMALL].concat();
    let told = faults.run(&mut faults.unharmed(&forced), &[("FAULT_CLOCK_S", before.to_string())]).stderr();
    assert!(told.contains("before 1970") && !told.contains("panicked"), "{told}");
}

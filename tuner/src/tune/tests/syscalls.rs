//! A tuner that is killed before or after any of its system calls, on any of its threads.
//!
//! A test run has time for some of them; `FLASHTUNE_CRASH_POINTS` says for how many.

use super::paper::PaperDevice;
use super::traced::{self, End};
use super::*;
use std::fs::OpenOptions;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Where the traced process finds the cache, and the file in which it notes compilations and launches.
const PLACE: &str = "FLASHTUNE_TRACED_PLACE";
/// How many of the calls there is time for, others in each run.
const POINTS: u64 = 10;

/// A device on which times depend on nothing but the schedule.
fn exact() -> Arc<PaperDevice> {
    let special =
        [(2, Behaviour::DoesNotCompile), (3, Behaviour::Wrong { by: 0.1 }), (4, Behaviour::Right { us: 80.0 })];
    let (device, _) = paper(&special);
    device.exact.store(true, Ordering::Relaxed);
    device
}

fn tuned(device: &Arc<PaperDevice>, place: &Path, job: &Job) -> Outcome {
    tune(&mut Runner::in_this_process(device.clone()), templates(), &CacheDir::at(place.join("cache")), job, &())
        .unwrap()
}

/// What is published before: another size.
fn before() -> Job {
    Job { max_trials: 3, shape: Shape { kv_len: 100, ..job().shape }, ..job() }
}

#[test]
#[ignore = "the next test starts it"]
fn a_tuner_that_is_traced() {
    let place = PathBuf::from(std::env::var_os(PLACE).expect("it is started by the test below"));
    let device = exact();
    *device.compiler.notes.lock().unwrap() =
        Some(OpenOptions::new().append(true).create(true).open(place.join("notes")).unwrap());
    traced::mark();
    tuned(&device, &place, &job());
    traced::mark();
}

fn traced_tuner(place: &Path, kill_at: Option<u64>) -> std::io::Result<traced::Traced> {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["tune::tests::syscalls::a_tuner_that_is_traced", "--exact", "--ignored"]).env(PLACE, place);
    traced::run(command.stdout(Stdio::null()).stderr(Stdio::null()), kill_at)
}

/// Compilations and launches of the process that was killed.
fn noted(place: &Path) -> [usize; 2] {
    let notes = std::fs::read(place.join("notes")).unwrap_or_default();
    [b'c', b'l'].map(|what| notes.iter().filter(|note| **note == what).count())
}

fn copy(from: &Path, to: &Path) {
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap().flatten() {
        let target = to.join(entry.file_name());
        match entry.file_type().unwrap().is_dir() {
            true => copy(&entry.path(), &target),
            false => drop(std::fs::copy(entry.path(), &target).unwrap()),
        }
    }
}

/// The records that readers find, with their kernels.
fn served(place: &Path) -> usize {
    let layers = Layers::open(&CacheDir::at(place.join("cache")), &[], None).unwrap();
    let records = layers.records();
    assert!(records.iter().all(|(_, r, _)| layers.artifact(&r.artifact).is_some()), "a kernel is lost");
    records.len()
}

#[test]
fn a_tuner_that_is_killed_at_any_system_call_loses_the_running_measurement_at_most() {
    let tmp = tempfile::tempdir().unwrap();
    let [start, place] = ["start", "place"].map(|name| tmp.path().join(name));
    tuned(&exact(), &start, &before());
    let anew = || {
        let _ = std::fs::remove_dir_all(&place);
        copy(&start, &place);
    };
    anew();
    let whole = exact();
    let expected = tuned(&whole, &place, &job());
    let counts =
        |device: &PaperDevice| [&device.compiler.compiled, &device.launches].map(|n| n.load(Ordering::Relaxed));
    let [compiled, launched] = counts(&whole);
    // The launches of one candidate, of which the one that was measured may have had all.
    let (cores, of_one) = (Runner::in_this_process(whole.clone()).cores(), launched / schedules().len());
    anew();
    let calm = match traced_tuner(&place, None) {
        Err(e) if e.kind() == std::io::ErrorKind::PermissionDenied => {
            println!("skipped: processes may not be traced here ({e})");
            return;
        }
        traced => traced.unwrap(),
    };
    assert_eq!((calm.end, noted(&place)), (End::Ended(0), [compiled, launched]));
    let points = std::env::var("FLASHTUNE_CRASH_POINTS").ok().and_then(|n| n.parse().ok()).unwrap_or(POINTS);
    let points = points.clamp(2, calm.stops);
    let (mut killed, mut lost) = (0, 0);
    // One in each of so many parts.
    let part = |i: u64| 1 + i * calm.stops / points..1 + (i + 1) * calm.stops / points;
    for at in (0..points).map(|i| rand::random_range(part(i))) {
        anew();
        let traced = traced_tuner(&place, Some(at)).unwrap();
        let what = format!("{at} of {} stops", calm.stops);
        assert!(matches!(traced.end, End::Killed | End::Ended(0)), "{what}: {traced:?}");
        killed += u64::from(traced.end == End::Killed);
        assert!(served(&place) >= 1, "{what}: what was published before is lost");
        let ([compiled_then, launched_then], next) = (noted(&place), exact());
        let outcome = tuned(&next, &place, &job());
        assert_eq!(outcome.record.schedule, expected.record.schedule, "{what}");
        assert_eq!(served(&place), 2, "{what}");
        let [compiled_now, launched_now] = counts(&next);
        let again = (launched_then + launched_now).saturating_sub(launched);
        lost = lost.max(again);
        assert!(again <= of_one, "{what}: {launched_then} launches and {launched_now}, {launched} at once");
        // What was being compiled on each core, and the one that does not compile, whose verdict was on its way.
        let most = compiled + cores + 1;
        assert!(
            compiled_then + compiled_now <= most,
            "{what}: {compiled_then} and {compiled_now} of {compiled} compiled"
        );
    }
    println!("killed at {killed} of {} stops; {lost} of {launched} launches repeated at most", calm.stops);
    // Threads that wait for each other make more calls at one time than at another: the last points are not always met.
    assert!(killed * 2 >= points, "{killed} of {points}");
}

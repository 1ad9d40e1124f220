//! Whole jobs on a device of paper.

mod launches;
mod overlap;
mod paper;
mod syscalls;
mod traced;

use super::measure::noise;
use super::*;
use crate::decide::Rounds;
use flashtune_cache::{CacheDir, Conditions, Layers, MatchQuality, Needed, Reading};
use flashtune_codegen::{Family, Mask, Schedule, Shape};
use flashtune_runtime::Device;
use paper::{ARCH, Behaviour, PaperDevice, device, job, paper, schedules, templates};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

struct Fixture {
    _tmp: tempfile::TempDir,
    dir: CacheDir,
}

fn fixture() -> Fixture {
    let tmp = tempfile::tempdir().unwrap();
    let dir = CacheDir::at(tmp.path());
    Fixture { dir, _tmp: tmp }
}

impl Fixture {
    fn tune(&self, device: &Arc<dyn Device>, job: &Job) -> Result<Outcome> {
        tune(&mut Runner::in_this_process(device.clone()), templates(), &self.dir, job, &())
    }

    fn store(&self) -> Store {
        Store::open_within(&self.dir, Duration::from_secs(9)).unwrap()
    }
}

fn key_of(device: &dyn Device, job: &Job) -> RecordKey {
    let device = device.fingerprint().clone();
    let bucket = job.bucket(&device);
    RecordKey { device, problem: job.problem, bucket, launches: job.launches }
}

fn failure(outcome: &Outcome, schedule: Schedule) -> Option<(Stage, String)> {
    match &outcome.trials.iter().find(|t| t.schedule == schedule)?.result {
        TrialResult::Failed { stage, reason } => Some((*stage, reason.clone())),
        TrialResult::Timed { .. } => None,
    }
}

#[test]
fn the_fastest_right_schedule_wins_over_faster_wrong_ones() {
    let special = [
        (1, Behaviour::Wrong { by: 0.01 }),
        (2, Behaviour::SkipsTheLastRow),
        (3, Behaviour::WrongWhenLarge),
        (4, Behaviour::Unrepeatable),
        (5, Behaviour::DoesNotCompile),
        (6, Behaviour::DoesNotLoad),
        (7, Behaviour::DoesNotLaunch),
        (8, Behaviour::Right { us: 80.0 }),
    ];
    let (device, _) = device(&special);
    let f = fixture();
    let outcome = f.tune(&device, &job()).unwrap();
    let all = schedules();
    assert_eq!(outcome.record.schedule, all[8]);
    let stages: Vec<_> = (1..8).map(|i| failure(&outcome, all[i]).map(|(stage, _)| stage)).collect();
    let check = Some(Stage::Check);
    assert_eq!(stages, [check, check, check, check, Some(Stage::Compile), Some(Stage::Load), check]);
    assert_eq!(outcome.trials.len(), all.len());
    let record = &outcome.record;
    assert!((1.2..1.3).contains(&record.gain_over_default().unwrap()), "{record:?}");
    assert!(record.finalists.len() == 3 && record.winner().unwrap().samples > 10);
    // The times of the final are kept, round by round.
    for finalist in &record.finalists {
        assert!(finalist.rounds_ns.len() >= 7 && finalist.rounds_ns.len() == record.finalists[0].rounds_ns.len());
        let middle = finalist.median_us * 1e3;
        assert!(
            finalist.rounds_ns.iter().all(|ns| (0.9 * middle..1.1 * middle).contains(&(*ns as f64))),
            "{finalist:?}"
        );
    }
    assert_eq!((record.provenance.space as usize, record.provenance.timed as usize), (all.len(), all.len() - 7));
    assert!(record.provenance.unfused_us.is_some());
    // What was found is in the journal, and readers see it.
    let trials = f.store().trials(&record.key).unwrap();
    assert_eq!(trials.len(), all.len());
    // Those who left the race have the times by which they left, and no others.
    for trial in &trials {
        let TrialResult::Timed { median_us, samples, race_ns, .. } = &trial.result else { continue };
        let finalist = record.finalists.iter().find(|f| f.schedule == trial.schedule);
        assert_eq!(race_ns.len() + finalist.map_or(0, |f| f.rounds_ns.len()), *samples as usize);
        assert!(finalist.is_some() || (race_ns.contains(&((median_us * 1e3).round() as u64)) || samples % 2 == 0));
        assert!((1..=24).contains(&race_ns.len()), "{trial:?}");
    }
    let layers = Layers::open(&f.dir, &[], None).unwrap();
    let needed = Needed::new(ARCH, templates());
    let found = layers.find(&needed, &record.key);
    assert_eq!((found.matches[0].quality, &*found.matches[0].record), (MatchQuality::Exact, record));
    assert_eq!(layers.artifact(&record.artifact).unwrap().0.recipe.kernel.schedule, all[8]);
}

/// How often one schedule was timed.
struct TimesOf {
    schedule: Schedule,
    count: AtomicUsize,
}

impl Observer for TimesOf {
    fn event(&self, event: &Event<'_>) {
        if matches!(event, Event::Timed { schedule, .. } if **schedule == self.schedule) {
            self.count.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Kernels whose threads race passed a check of two launches every other time.
#[test]
fn a_winner_whose_answer_moves_is_none() {
    let moving = Behaviour::UnrepeatableAfter { launches: 40, us: 50.0 };
    let (device, _) = device(&[(3, moving), (5, Behaviour::Right { us: 80.0 })]);
    let (f, timed) = (fixture(), TimesOf { schedule: schedules()[3], count: AtomicUsize::new(0) });
    let mut runner = Runner::in_this_process(device);
    let outcome = tune(&mut runner, templates(), &f.dir, &job(), &timed).unwrap();
    assert!(timed.count.into_inner() > 10, "it was to pass its checks and to reach the final");
    assert_eq!(outcome.record.schedule, schedules()[5]);
    assert!(outcome.record.finalists.iter().all(|finalist| finalist.schedule != schedules()[3]));
    let (stage, reason) = failure(&outcome, schedules()[3]).unwrap();
    assert!(stage == Stage::Check && reason.contains("gave different bytes"), "{stage:?} {reason}");
    assert!(outcome.record.winner().unwrap().rounds_ns.len() >= 7);
}

#[test]
fn when_no_answer_of_the_final_stays_the_next_best_are_tried() {
    let moving = Behaviour::UnrepeatableAfter { launches: 40, us: 50.0 };
    let (device, _) = device(&[(0, moving), (1, moving), (2, moving), (3, moving), (6, Behaviour::Right { us: 90.0 })]);
    let outcome = fixture().tune(&device, &job()).unwrap();
    assert_eq!(outcome.record.schedule, schedules()[6]);
}

#[test]
fn an_advantage_within_the_noise_leaves_the_default() {
    let (device, _) = device(&[(3, Behaviour::Right { us: 99.6 })]);
    let outcome = fixture().tune(&device, &job()).unwrap();
    assert_eq!(outcome.record.schedule, schedules()[0]);
    assert!(outcome.record.winner().unwrap().is_default);
}

#[test]
fn when_noise_hides_who_is_faster_nothing_is_stored_and_the_reason_is_told() {
    // Some of them: one whose first runs are all slow is out of the race, as it should be.
    let noisy: Vec<(usize, Behaviour)> = (2..8).map(|i| (i, Behaviour::Noisy)).collect();
    let (device, _) = device(&noisy);
    let f = fixture();
    let e = f.tune(&device, &job()).unwrap_err();
    let text = e.to_string();
    assert!(matches!(e, Error::Noise { .. }), "{text}");
    assert!(text.contains("300 rounds") && text.contains('%') && text.contains("nothing was stored"), "{text}");
    assert!(f.store().records().unwrap().is_empty() && !f.store().snapshot_path().exists());
    // What was measured is known all the same.
    let key = key_of(&*device, &job());
    assert_eq!(f.store().trials(&key).unwrap().len(), schedules().len());
}

#[test]
fn what_else_goes_on_is_kept_and_ends_a_job_only_where_the_times_show_it() {
    let hot = Reading {
        sm_mhz: Some(1200),
        temperature_c: Some(91),
        throttling: vec!["thermal slowdown".into()],
        foreign_processes: Some(1),
        ..Reading::default()
    };
    let run = |winner: Behaviour, reading: Reading| {
        let (paper, _) = paper(&[(3, winner)]);
        *paper.reading.lock().unwrap() = reading;
        let (f, device): (_, Arc<dyn Device>) = (fixture(), paper);
        (f.tune(&device, &job()), f)
    };
    let (unsteady, steady) = (Behaviour::Unsteady { us: 50.0 }, Behaviour::Right { us: 50.0 });
    // Faster beyond doubt, and by times that differ: that is trusted as long as nothing disturbs the device.
    let (calm, _) = run(unsteady, Reading::default());
    assert_eq!(calm.unwrap().record.schedule, schedules()[3]);
    let (disturbed, f) = run(unsteady, hot.clone());
    let text = disturbed.unwrap_err().to_string();
    assert!(text.contains("thermal slowdown") && text.contains("1 other process on the device"), "{text}");
    assert!(f.store().records().unwrap().is_empty() && !f.store().snapshot_path().exists());
    // Steady times are believed, and the record says what went on.
    let (kept, _) = run(steady, hot);
    let record = kept.unwrap().record;
    let seen = &record.provenance.conditions;
    assert_eq!((record.schedule, seen.sm_mhz, seen.temperature_c), (schedules()[3], Some((1200, 1200)), Some(91)));
    assert_eq!((&seen.throttling[..], seen.foreign_processes), (&["thermal slowdown".to_owned()][..], Some(1)));
}

#[test]
fn a_disturbed_device_is_trusted_only_where_the_times_are_steady() {
    let rounds = |spread: f64| Rounds((0..20).map(|i| vec![100.0, 60.0 + spread * (i % 7) as f64]).collect());
    let foreign = Conditions { foreign_processes: Some(1), ..Conditions::default() };
    let hot = Conditions { throttling: vec!["thermal slowdown".into()], ..Conditions::default() };
    let why = |rounds: &Rounds, conditions: &Conditions| noise(rounds, 2, 0, 1, conditions);
    for disturbed in [&foreign, &hot] {
        assert_eq!(why(&rounds(0.1), disturbed), None);
        let reason = why(&rounds(3.0), disturbed).unwrap();
        assert!(reason.contains(&disturbed.disturbance().unwrap()), "{reason}");
    }
    assert_eq!(why(&rounds(3.0), &Conditions::default()), None, "a clear winner");
    // Cut short by the budget: the default has won, and that is no noise.
    assert_eq!(noise(&Rounds(vec![vec![100.0, 30.0]; 3]), 2, 0, 0, &Conditions::default()), None);
}

#[test]
fn a_job_is_answered_from_the_store_until_something_that_matters_changes() {
    let (paper, compiler) = device(&[]);
    let f = fixture();
    let first = f.tune(&paper, &job()).unwrap();
    let compiled = compiler.compiled.load(Ordering::Relaxed);
    assert!(!first.cached && compiled > 0);
    let again = f.tune(&paper, &job()).unwrap();
    assert!(again.cached && again.trials.is_empty());
    assert_eq!(again.record, first.record);
    // Another shape of the same bucket is the same question.
    let mut near = job();
    near.shape.kv_len = 440;
    assert!(f.tune(&paper, &near).unwrap().cached);
    // Forced: measured again, but nothing is compiled again.
    let forced = f.tune(&paper, &Job { force: true, ..job() }).unwrap();
    assert!(!forced.cached && compiler.compiled.load(Ordering::Relaxed) == compiled);
    // Other templates.
    let text = "// @{ header }@ @{ block_q }@\n".to_owned();
    let other = TemplateSet::from_files([(Family::ForwardCpu.template().to_owned(), text)].into()).unwrap();
    assert!(!tune(&mut Runner::in_this_process(paper.clone()), &other, &f.dir, &job(), &()).unwrap().cached);
}

#[test]
fn a_lost_snapshot_and_a_lost_kernel_are_restored_without_tuning() {
    let (paper, compiler) = device(&[]);
    let f = fixture();
    let first = f.tune(&paper, &job()).unwrap();
    std::fs::remove_file(&first.snapshot).unwrap();
    std::fs::remove_dir_all(f.dir.artifacts_path()).unwrap();
    let compiled = compiler.compiled.load(Ordering::Relaxed);
    let again = f.tune(&paper, &job()).unwrap();
    assert!(again.cached && compiler.compiled.load(Ordering::Relaxed) == compiled + 1);
    let layers = Layers::open(&f.dir, &[], None).unwrap();
    assert!(layers.artifact(&again.record.artifact).is_some());
}

#[test]
fn when_the_default_fails_another_wins() {
    let (device, _) = device(&[(0, Behaviour::Wrong { by: 1.0 }), (2, Behaviour::Right { us: 90.0 })]);
    let outcome = fixture().tune(&device, &job()).unwrap();
    assert_eq!(outcome.record.schedule, schedules()[2]);
    assert_eq!(outcome.record.gain_over_default(), None);
}

#[test]
fn when_nothing_works_the_first_reasons_are_told_and_nothing_is_stored() {
    let all: Vec<_> = (0..schedules().len()).map(|i| (i, Behaviour::DoesNotLaunch)).collect();
    let (device, _) = device(&all);
    let f = fixture();
    let e = f.tune(&device, &job()).unwrap_err();
    let text = e.to_string();
    assert!(matches!(e, Error::NothingWorks { .. }) && text.contains("prescribed"), "{text}");
    assert_eq!(text.matches("(check)").count(), REASONS);
    assert!(f.store().records().unwrap().is_empty());
    let key = key_of(&*device, &job());
    assert_eq!(f.store().trials(&key).unwrap().len(), all.len());
}

#[test]
fn without_any_time_the_default_is_still_tuned() {
    let (device, _) = device(&[(1, Behaviour::Right { us: 10.0 })]);
    let outcome = fixture().tune(&device, &Job { budget: std::time::Duration::ZERO, ..job() }).unwrap();
    assert_eq!(outcome.record.schedule, schedules()[0]);
    assert!(outcome.trials.iter().filter(|t| matches!(t.result, TrialResult::Timed { .. })).count() == 1);
}

#[test]
fn a_winner_whose_kernel_cannot_be_kept_is_an_error() {
    let f = fixture();
    f.dir.create().unwrap();
    // A file where the folder of kernels should be.
    std::fs::write(f.dir.artifacts_path(), b"").unwrap();
    let e = f.tune(&device(&[]).0, &job()).unwrap_err();
    assert!(matches!(e, Error::Cache(flashtune_cache::Error::Io { .. })), "{e}");
    assert!(!f.dir.snapshot_path().exists());
}

#[test]
fn jobs_that_cannot_be_timed_are_refused() {
    let (device, _) = device(&[]);
    let f = fixture();
    let refused = |change: fn(&mut Job)| {
        let mut job = job();
        change(&mut job);
        f.tune(&device, &job).unwrap_err().to_string()
    };
    assert!(refused(|j| j.shape.q_len = 0).contains("nothing to compute"));
    assert!(refused(|j| j.shape.kv_len = 0).contains("nothing to compute"));
    assert!(refused(|j| j.shape.mask = Mask::Full).contains("mask"));
    assert!(refused(|j| (j.shape.heads, j.shape.kv_heads) = (3, 2)).contains("heads = 3"));
    assert!(refused(|j| j.problem.head_dim_v = 264).contains("head_dim_v"));
}

#[test]
fn the_observer_sees_the_phases_in_order_and_every_failure() {
    #[derive(Default)]
    struct Log(Mutex<(Vec<Phase>, usize, usize)>);
    impl Observer for Log {
        fn event(&self, event: &Event<'_>) {
            let mut log = self.0.lock().unwrap();
            match event {
                Event::Phase { phase, .. } => log.0.push(*phase),
                Event::Failed { .. } => log.1 += 1,
                Event::Winner(_) => log.2 += 1,
                _ => {}
            }
        }
    }
    let (device, _) = device(&[(1, Behaviour::DoesNotCompile), (2, Behaviour::Wrong { by: 1.0 })]);
    let f = fixture();
    let log = Log::default();
    tune(&mut Runner::in_this_process(device.clone()), templates(), &f.dir, &job(), &log).unwrap();
    let (phases, failures, winners) = log.0.into_inner().unwrap();
    let expected = [Phase::Space, Phase::Compile, Phase::Check, Phase::Race, Phase::Final, Phase::Publish];
    assert_eq!((phases.as_slice(), failures, winners), (&expected[..], 2, 1));
}

/// Ends the job at an event, as abruptly as a process can end itself from within.
struct Kill(AtomicUsize);

impl Observer for Kill {
    fn event(&self, _: &Event<'_>) {
        if self.0.fetch_sub(1, Ordering::SeqCst) == 1 {
            panic!("killed");
        }
    }
}

#[test]
fn a_job_that_was_killed_anywhere_repeats_nothing() {
    killed_anywhere(23, |device| Runner::in_this_process(device));
}

/// Kills jobs at every so many events, and has others go on with them.
fn killed_anywhere(every: usize, runner: impl Fn(Arc<PaperDevice>) -> Runner) {
    let special =
        [(2, Behaviour::DoesNotCompile), (3, Behaviour::Wrong { by: 0.1 }), (4, Behaviour::Right { us: 80.0 })];
    let launches = |device: &Arc<PaperDevice>| device.launches.load(Ordering::Relaxed);
    let run = |device: &Arc<PaperDevice>, f: &Fixture, observer: &dyn Observer| {
        let mut runner = runner(device.clone());
        let tuned = || tune(&mut runner, templates(), &f.dir, &job(), observer);
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(tuned))
    };
    let (whole, compiler) = paper(&special);
    let cores = runner(whole.clone()).cores();
    let outcome = run(&whole, &fixture(), &()).unwrap().unwrap();
    let compiled = compiler.compiled.load(Ordering::Relaxed);
    // One candidate's launches: what can be lost at most, and what is seen of the unfused.
    let of_one = launches(&whole) / schedules().len();
    for at in (3..400).step_by(every) {
        let (device, compiler) = paper(&special);
        let f = fixture();
        if let Ok(finished) = run(&device, &f, &Kill(AtomicUsize::new(at))) {
            finished.unwrap();
            break;
        }
        let resumed = run(&device, &f, &()).unwrap().unwrap();
        assert_eq!(resumed.record.schedule, outcome.record.schedule, "killed at {at}");
        assert_eq!(resumed.trials.len(), outcome.trials.len());
        let total = launches(&device);
        assert!(total <= launches(&whole) + of_one, "killed at {at}: {total} launches, {} at once", launches(&whole));
        // On every core one compilation may have been lost.
        let again = compiler.compiled.load(Ordering::Relaxed) - compiled;
        assert!(again <= cores, "killed at {at}: {again} compiled again");
    }
}

#[test]
fn what_neighbours_found_is_tried_first_and_what_never_compiled_is_not_tried_again() {
    let count = schedules().len();
    let special = [(count - 1, Behaviour::Right { us: 60.0 }), (1, Behaviour::DoesNotCompile)];
    let (device, _) = device(&special);
    let f = fixture();
    assert_eq!(f.tune(&device, &job()).unwrap().record.schedule, schedules()[count - 1]);
    let mut near = Job { max_trials: count / 2, ..job() };
    near.shape.kv_len = 250;
    let outcome = f.tune(&device, &near).unwrap();
    let tried: Vec<Schedule> = outcome.trials.iter().map(|t| t.schedule).collect();
    // The default, then the neighbour's winner; it is measured like all others.
    assert_eq!(tried[..2], [schedules()[0], schedules()[count - 1]]);
    assert_eq!(outcome.record.schedule, schedules()[count - 1]);
    assert!(!tried.contains(&schedules()[1]), "it never compiled");
    // Whoever forces a job may have repaired it.
    let forced = f.tune(&device, &Job { force: true, max_trials: count, ..near }).unwrap();
    assert_eq!(failure(&forced, schedules()[1]).map(|(stage, _)| stage), Some(Stage::Compile));
}

#[test]
fn a_neighbouring_size_is_tuned_with_fewer_trials_and_kernels_that_are_there() {
    let best = schedules().len() - 1;
    let (device, compiler) = device(&[(best, Behaviour::Right { us: 60.0 })]);
    let f = fixture();
    let first = f.tune(&device, &job()).unwrap();
    let compiled = compiler.compiled.load(Ordering::Relaxed);
    let mut near = job();
    near.shape.kv_len = 250;
    let led = f.tune(&device, &near).unwrap();
    assert_eq!(led.record.schedule, schedules()[best]);
    assert!(
        led.trials.len() <= near.max_trials / 3 && led.trials.len() < first.trials.len(),
        "{} after {}",
        led.trials.len(),
        first.trials.len()
    );
    assert_eq!(compiler.compiled.load(Ordering::Relaxed), compiled, "kernels serve all sizes");
    // Whoever forces a job wants it searched anew.
    let forced = f.tune(&device, &Job { force: true, ..near }).unwrap();
    assert_eq!(forced.trials.len(), first.trials.len());
}

#[test]
fn a_job_takes_little_more_of_the_devices_memory_than_its_tensors() {
    let (device, _) = paper(&[]);
    let any: Arc<dyn Device> = device.clone();
    let mut large = job();
    large.shape = Shape { batch: 1, heads: 2, kv_heads: 1, q_len: 4, kv_len: 60_000, mask: Mask::Causal };
    fixture().tune(&any, &Job { max_trials: 4, ..large.clone() }).unwrap();
    let (most, tensors) = (device.most_in_use.load(Ordering::Relaxed) as u64, Inputs::of(&large).bytes());
    println!("{most} bytes for tensors of {tensors}");
    assert!(most >= tensors && most * 2 <= tensors * 3, "{most} bytes for tensors of {tensors}");
}

/// As on a card of sm_75 whose user has allowed what no card had run.
#[test]
fn a_path_that_was_raced_is_raised_unless_a_candidate_of_it_was_wrong() {
    let device = flashtune_cache::DeviceFingerprint {
        arch: "sm_75".parse().unwrap(),
        name: "Tesla T4".into(),
        ..device(&[]).0.fingerprint().clone()
    };
    let problem = flashtune_codegen::Problem::forward(flashtune_codegen::DType::F16, 64, Mask::Full.kind()).unwrap();
    let job = Job { problem, shape: Shape { mask: Mask::Full, ..job().shape }, ..job() };
    let needed = Needed::new(device.arch, &TemplateSet::embedded());
    let path: InstructionPath = "forward/sm80:f16-m16n8k8".parse().unwrap();
    let spaced = |paths: &Paths| space(&problem, &job.sizes(), &device, paths, &[]).unwrap().kernels;
    let of_sm80 = |kernels: &[flashtune_codegen::Kernel]| {
        kernels.iter().filter(|k| k.schedule.family() == Family::ForwardSm80).copied().collect::<Vec<_>>()
    };
    assert!(of_sm80(&spaced(&Paths::default())).is_empty(), "nobody has allowed it");
    let allowed = Paths::allowing([path]);
    let kernels = of_sm80(&spaced(&allowed));
    assert!(kernels.len() > 10);

    let mut candidates: Vec<Candidate> =
        kernels[..3].iter().enumerate().map(|(i, k)| Candidate::new(*k, i, i == 0)).collect();
    let other = fixture().tune(&self::device(&[]).0, &self::job()).unwrap().record;
    let mut finalists = other.finalists.clone();
    finalists.truncate(1);
    finalists[0].schedule = candidates[0].kernel.schedule;
    let key = RecordKey { device: device.clone(), problem, bucket: job.bucket(&device), launches: job.launches };
    let record = Record { key, finalists, schedule: candidates[0].kernel.schedule, ..other };
    let levels = raised(&candidates, &record, &allowed, &needed);
    let [level] = &levels[..] else { panic!("{levels:?}") };
    assert_eq!((level.path, level.level, level.device.as_str()), (path, Level::Raced, "Tesla T4"));
    // Kept, it is no news any more, and needs no name.
    let f = fixture();
    let kept = Levels::new(&f.dir);
    assert!(kept.raise(level).unwrap());
    let known = kept.apply(Paths::default(), &needed);
    assert!(raised(&candidates, &record, &known, &needed).is_empty());
    assert!(!of_sm80(&spaced(&known)).is_empty());
    // One that does not compile says nothing of the others; one that is wrong does.
    candidates[1].failure = Some((Stage::Compile, "no".into()));
    assert_eq!(raised(&candidates, &record, &allowed, &needed).len(), 1);
    candidates[2].failure = Some((Stage::Check, "wrong".into()));
    assert!(raised(&candidates, &record, &allowed, &needed).is_empty());
}

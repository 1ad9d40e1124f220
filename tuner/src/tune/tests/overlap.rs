//! Compiling and measuring beside each other, and in turn.

use super::*;
use std::sync::atomic::AtomicBool;

/// Cores of a host on paper.
const CORES: usize = 8;

/// Whether anything was checked or timed while something was compiled.
struct Overlap {
    compiler: Arc<paper::PaperCompiler>,
    seen: AtomicBool,
}

impl Observer for Overlap {
    fn event(&self, event: &Event<'_>) {
        let measured = matches!(event, Event::Checked { .. } | Event::Timed { .. });
        if measured && self.compiler.going_on.load(Ordering::Relaxed) > 0 {
            self.seen.store(true, Ordering::Relaxed);
        }
    }
}

/// Milliseconds of a compilation, and of loading what it made.
type Takes = (usize, usize);

/// Tunes on a device that is measured beside compilers, on a host with so many cores, or not.
fn tuned(cores: Option<usize>, takes: Takes, special: &[(usize, Behaviour)], job: &Job) -> (Outcome, bool) {
    let (device, compiler) = paper(special);
    compiler.takes_ms.store(takes.0, Ordering::Relaxed);
    device.loads_ms.store(takes.1, Ordering::Relaxed);
    device.exact.store(true, Ordering::Relaxed);
    let runner = Runner::in_this_process(device);
    let mut runner = match cores {
        Some(cores) => runner.beside_compilers(cores),
        None => runner,
    };
    let overlap = Overlap { compiler, seen: AtomicBool::new(false) };
    let outcome = tune(&mut runner, templates(), &fixture().dir, job, &overlap).unwrap();
    (outcome, overlap.seen.into_inner())
}

#[test]
fn a_device_of_its_own_measures_while_the_host_compiles_and_the_cpu_does_not() {
    let best = schedules().len() - 1;
    let special =
        [(best, Behaviour::Right { us: 60.0 }), (1, Behaviour::DoesNotCompile), (2, Behaviour::Wrong { by: 1.0 })];
    // One compiler: whatever the checks take, it has not done by then. The device's part is a third of the compiler's,
    // so that the sum tells the two cases apart on a host that other work slows down, too.
    for (cores, beside) in [(Some(2), true), (None, false)] {
        let (outcome, seen) = tuned(cores, (60, 30), &special, &job());
        assert_eq!(seen, beside);
        assert_eq!((outcome.record.schedule, outcome.trials.len()), (schedules()[best], schedules().len()));
        assert_eq!(failure(&outcome, schedules()[1]).map(|(stage, _)| stage), Some(Stage::Compile));
        assert_eq!(failure(&outcome, schedules()[2]).map(|(stage, _)| stage), Some(Stage::Check));
        let p = &outcome.record.provenance;
        let together = p.compile_seconds + p.device_seconds;
        // What happens at the same time counts twice in the sum.
        assert_eq!(together > p.seconds * 1.02, beside, "{p:?}");
        assert!(p.device_seconds + p.waited_seconds < p.seconds && p.device_seconds > 0.0, "{p:?}");
    }
}

#[test]
fn what_is_tried_depends_on_times_and_not_on_who_was_compiled_first() {
    // Half of the space, so that the search has to choose.
    let job = Job { max_trials: schedules().len() / 2, ..job() };
    let special =
        [(5, Behaviour::Right { us: 80.0 }), (9, Behaviour::DoesNotCompile), (11, Behaviour::Wrong { by: 1.0 })];
    let tried = |takes_ms: usize| -> Vec<Schedule> {
        let (outcome, _) = tuned(Some(CORES), (takes_ms, 0), &special, &job);
        outcome.trials.iter().map(|t| t.schedule).collect()
    };
    let at_once = tried(0);
    assert!(at_once.len() <= job.max_trials && at_once.len() > 8);
    for takes_ms in [3, 25] {
        assert_eq!(tried(takes_ms), at_once, "{takes_ms} ms");
    }
}

#[test]
fn a_job_that_was_killed_beside_its_compilers_repeats_nothing() {
    killed_anywhere(61, |device| Runner::in_this_process(device).beside_compilers(CORES));
}

#[test]
fn without_threads_there_are_results_all_the_same() {
    let (_, compiler) = paper(&[]);
    let f = fixture();
    f.dir.create().unwrap();
    let builder = crate::build::Builder::new(&*compiler, templates(), ArtifactFiles::new(&f.dir), &(), 1);
    std::thread::scope(|scope| {
        let mut compilation = builder.start(scope, 0);
        assert!(compilation.wait().is_none());
        for (candidate, schedule) in schedules().into_iter().enumerate().take(3) {
            let kernel = flashtune_codegen::Kernel { problem: job().problem, schedule, arch: ARCH };
            compilation.order(crate::build::Order { candidate, kernel, deadline: None });
        }
        let done: Vec<usize> = std::iter::from_fn(|| compilation.wait()).map(|b| b.candidate).collect();
        assert_eq!(done, [0, 1, 2]);
    });
}

#[test]
fn hosts_of_all_sizes_have_compilers_and_no_more_than_they_need_ahead() {
    use crate::tune::Pace;
    for cores in 0..=256 {
        let pace = Pace::of(cores, true);
        assert!(pace.compilers >= 1 && pace.compilers <= cores.max(1), "{pace:?}");
        assert!(pace.ahead >= 1 && pace.batch >= 6 && pace.batch * pace.ahead <= 16, "{pace:?}");
        assert_eq!(Pace::of(cores, false).ahead, 0);
    }
    assert_eq!(Pace::of(16, true), Pace { cores: 16, compilers: 15, batch: 8, ahead: 2 });
}

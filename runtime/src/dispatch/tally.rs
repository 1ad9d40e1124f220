//! What is counted of a dispatcher's calls, for whoever watches it.

use super::Status;
use super::metrics::{CompileTimes, join};
use flashtune_cache::troubles;
use flashtune_codegen::omitted::is_default;
use flashtune_codegen::{CallSizes, PageClass, Problem, Shape};
use serde::Serialize;
use std::fmt::Write;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering::Relaxed};

/// The calls of one class of sizes, kept as long as the dispatcher. Counting is one addition to a number that the
/// callers of a class share.
pub(super) struct Tally {
    problem: Problem,
    /// The sizes of the first call.
    sizes: CallSizes,
    /// Calls by the status of what they ran on.
    calls: [AtomicU64; Status::ALL.len()],
    /// Index of the present plan's status.
    status: AtomicU8,
    /// Doublings between the class and the one that its kernel was tuned for, in thousandths.
    distance: AtomicU32,
    /// Whether a tuning of the class could be used.
    tunable: bool,
}

impl Tally {
    pub(crate) fn new(problem: Problem, sizes: CallSizes, tunable: bool) -> Self {
        let tunable = tunable && !sizes.shape.is_empty() && sizes.shape.kv_len > 0;
        let status = AtomicU8::new(Status::Default.index() as u8);
        Self { problem, sizes, calls: Default::default(), status, distance: AtomicU32::new(0), tunable }
    }

    /// A plan for the class was made.
    pub(crate) fn planned(&self, status: Status, distance: f64) {
        self.status.store(status.index() as u8, Relaxed);
        self.distance.store((distance * 1000.0) as u32, Relaxed);
    }

    /// A call ran on a plan of this status.
    pub(crate) fn call(&self, status: Status) {
        self.calls[status.index()].fetch_add(1, Relaxed);
    }

    fn status(&self) -> Status {
        Status::ALL[self.status.load(Relaxed) as usize]
    }

    /// The class, if it could be tuned and is not.
    pub(crate) fn untuned(&self) -> Option<Untuned> {
        let status = self.status();
        let calls = self.calls.iter().map(|n| n.load(Relaxed)).sum();
        let open = self.tunable && status != Status::Tuned;
        let CallSizes { shape, pages } = self.sizes;
        open.then_some(Untuned { problem: self.problem, shape, pages, calls, status: status.name() })
    }

    /// What is computed.
    pub(crate) fn problem(&self) -> Problem {
        self.problem
    }

    pub(crate) fn add_calls(&self, calls: &mut Calls) {
        for (sum, n) in calls.by_status().into_iter().zip(&self.calls) {
            *sum += n.load(Relaxed);
        }
    }

    pub(crate) fn add_to(&self, counters: &mut Counters) {
        self.add_calls(&mut counters.calls);
        let distance = self.distance.load(Relaxed) as f64 / 1000.0;
        let nearest = self.calls[Status::NearestShape.index()].load(Relaxed);
        counters.nearest_distance_sum += distance * nearest as f64;
        if self.status() == Status::NearestShape {
            counters.nearest_distance_max = counters.nearest_distance_max.max(distance);
        }
        counters.classes += 1;
    }
}

/// A class of calls that no record of its own serves.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Untuned {
    /// What is computed.
    pub problem: Problem,
    /// The sizes of its first call; of a ragged batch those of a usual sequence.
    pub shape: Shape,
    /// How keys lie, where the batch is ragged.
    #[serde(skip_serializing_if = "is_default")]
    pub pages: PageClass,
    /// Calls so far.
    pub calls: u64,
    /// What they run on: nearest shape, provisional, untuned, default, quick.
    pub status: &'static str,
}

/// What a dispatcher is asked to do beside answering.
#[derive(Debug, Default)]
pub(super) struct Work {
    pub refused: AtomicU64,
    pub compiled: AtomicU64,
    pub compile_us: AtomicU64,
    pub compile_times: CompileTimes,
    pub loaded: AtomicU64,
    pub load_us: AtomicU64,
}

/// The numbers of one dispatcher since it was made; all but `sealed` and `nearest_distance_max` only grow.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Counters {
    /// Calls that were launched, by what they ran on.
    pub calls: Calls,
    /// Doublings between the sizes of a call and those that its kernel was tuned for, summed over the calls that ran on
    /// the nearest shape.
    pub nearest_distance_sum: f64,
    /// The largest of these distances among the present classes.
    pub nearest_distance_max: f64,
    /// Calls that were refused because nothing stored serves them and nothing may be compiled.
    pub refused: u64,
    /// Classes of sizes that were met.
    pub classes: u64,
    /// Kernels that were compiled.
    pub compiled: u64,
    /// Milliseconds that compiling them took.
    pub compile_ms: f64,
    /// Kernels that were loaded.
    pub loaded: u64,
    /// Milliseconds that loading them took.
    pub load_ms: f64,
    /// Stored files, records and kernels that failed their verification and were left out (of this process).
    pub verify_failures: u64,
    /// Stored files that could not be read (of this process).
    pub unreadable: u64,
    /// Kernels that could not be kept (of this process).
    pub unkept: u64,
    /// Stored entries that only another build of flashtune understands ([`flashtune_cache::Troubles`]).
    pub foreign: u64,
    /// Whether no compiler runs any more.
    pub sealed: bool,
}

/// Calls by what they ran on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Calls {
    /// A record of this device and these sizes.
    pub tuned: u64,
    /// A record of this device and other sizes.
    pub nearest_shape: u64,
    /// A record of another device.
    pub provisional: u64,
    /// A kernel that was compiled ahead of time and never measured.
    pub untuned: u64,
    /// The default schedule.
    pub default: u64,
    /// A schedule that compiles quickly, while another was being compiled.
    pub quick: u64,
}

impl Calls {
    /// Each with the value that its label `status` has.
    pub(super) fn named(&self) -> [(&'static str, u64); Status::ALL.len()] {
        let Self { tuned, nearest_shape, provisional, untuned, default, quick } = *self;
        [
            ("tuned", tuned),
            ("nearest_shape", nearest_shape),
            ("provisional", provisional),
            ("untuned", untuned),
            ("default", default),
            ("quick", quick),
        ]
    }

    /// In the order of [`Status::ALL`].
    fn by_status(&mut self) -> [&mut u64; Status::ALL.len()] {
        let Self { tuned, nearest_shape, provisional, untuned, default, quick } = self;
        [tuned, nearest_shape, provisional, untuned, default, quick]
    }
}

impl Counters {
    pub(super) fn of(work: &Work, sealed: bool) -> Self {
        let ms = |us: &AtomicU64| us.load(Relaxed) as f64 / 1e3;
        let troubles = troubles();
        Self {
            refused: work.refused.load(Relaxed),
            compiled: work.compiled.load(Relaxed),
            compile_ms: ms(&work.compile_us),
            loaded: work.loaded.load(Relaxed),
            load_ms: ms(&work.load_us),
            verify_failures: troubles.damaged,
            unreadable: troubles.unreadable,
            unkept: troubles.unkept,
            foreign: troubles.foreign,
            sealed,
            ..Self::default()
        }
    }

    /// The text that Prometheus scrapes, `device` being a label of every number.
    pub fn prometheus(&self, device: &str) -> String {
        self.text(&join(&[("device", device)]))
    }

    /// The same with these labels.
    pub(super) fn text(&self, labels: &str) -> String {
        let mut text = String::new();
        let mut family = |name: &str, kind: &str, help: &str, values: &[(String, f64)]| {
            let _ = writeln!(text, "# HELP flashtune_{name} {help}\n# TYPE flashtune_{name} {kind}");
            for (label, value) in values {
                let _ = writeln!(text, "flashtune_{name}{{{labels}{label}}} {value}");
            }
        };
        let calls = self.calls.named().map(|(status, n)| (format!(",status=\"{status}\""), n as f64));
        family("calls_total", "counter", "Calls by what they ran on.", &calls);
        let counters = [
            (
                "nearest_distance_sum",
                "Doublings to the tuned sizes, over calls on the nearest.",
                self.nearest_distance_sum,
            ),
            ("refused_total", "Calls that nothing stored serves.", self.refused as f64),
            ("classes_total", "Classes of sizes that were met.", self.classes as f64),
            ("compiled_total", "Kernels that were compiled.", self.compiled as f64),
            ("compile_seconds_total", "Time spent compiling.", self.compile_ms / 1e3),
            ("loaded_total", "Kernels that were loaded.", self.loaded as f64),
            ("load_seconds_total", "Time spent loading.", self.load_ms / 1e3),
            ("verify_failures_total", "Stored entries that failed verification.", self.verify_failures as f64),
            ("unreadable_total", "Stored files that could not be read.", self.unreadable as f64),
            ("unkept_total", "Kernels that could not be kept.", self.unkept as f64),
            ("foreign_total", "Stored entries that only another build understands.", self.foreign as f64),
        ];
        for (name, help, value) in counters {
            family(name, "counter", help, &[(String::new(), value)]);
        }
        let help = "Doublings to the tuned sizes, the worst class.";
        family("nearest_distance_max", "gauge", help, &[(String::new(), self.nearest_distance_max)]);
        let sealed = [(String::new(), f64::from(u8::from(self.sealed)))];
        family("sealed", "gauge", "1 when no compiler runs any more.", &sealed);
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashtune_codegen::{DType, Mask, MaskKind};

    fn tally(tunable: bool, kv_len: u32) -> Tally {
        let shape = Shape { batch: 1, heads: 2, kv_heads: 2, q_len: 8, kv_len, mask: Mask::Causal };
        Tally::new(Problem::forward(DType::F16, 64, MaskKind::CAUSAL).unwrap(), CallSizes::from(&shape), tunable)
    }

    #[test]
    fn calls_are_summed_by_what_they_ran_on() {
        let (a, b) = (tally(true, 8), tally(true, 64));
        a.planned(Status::NearestShape, 2.5);
        a.call(Status::NearestShape);
        a.call(Status::NearestShape);
        // Tuned meanwhile.
        a.planned(Status::Tuned, 0.0);
        a.call(Status::Tuned);
        b.planned(Status::NearestShape, 1.0);
        b.call(Status::NearestShape);
        let mut c = Counters::default();
        a.add_to(&mut c);
        b.add_to(&mut c);
        assert_eq!(c.calls, Calls { tuned: 1, nearest_shape: 3, ..Calls::default() });
        assert_eq!((c.nearest_distance_max, c.classes), (1.0, 2));
        assert!(a.untuned().is_none());
        assert_eq!(b.untuned().map(|u| (u.calls, u.status)), Some((1, "nearest shape")));
        assert!(tally(false, 8).untuned().is_none() && tally(true, 0).untuned().is_none());
    }

    #[test]
    fn every_number_has_a_type_and_odd_device_names_stay_inside_their_quotes() {
        let c = Counters { refused: 3, sealed: true, ..Default::default() };
        let text = c.prometheus("a \"b\\\nc");
        let names: Vec<_> = text.lines().filter_map(|l| l.strip_prefix("# TYPE ")?.split(' ').next()).collect();
        for line in text.lines().filter(|l| !l.starts_with('#')) {
            let (name, rest) = line.split_once('{').unwrap();
            assert!(names.contains(&name), "{line}");
            assert!(rest.starts_with("device=\"a \\\"b\\\\\\nc\""), "{line}");
            rest.rsplit_once("} ").unwrap().1.parse::<f64>().unwrap();
        }
        assert!(text.contains("flashtune_refused_total{device=\"a \\\"b\\\\\\nc\"} 3\n"), "{text}");
        assert!(text.lines().any(|l| l.starts_with("flashtune_sealed{") && l.ends_with(" 1")));
    }
}

//! The kernel chosen for one class of calls.

use super::job::Job;
use super::tally::Tally;
use super::{Explanation, Policy, Refusal, Status};
use crate::{Module, Result};
use flashtune_cache::{DeviceFingerprint, Key, Record};
use flashtune_codegen::{CallSizes, InstructionPath, Kernel, LaunchPlan, Level, Paths, Shape, ShapeBucket};
use std::fmt;
use std::sync::Arc;

/// A loaded kernel for a problem and a class of sizes, with the account of how it was chosen.
pub struct Plan {
    pub(crate) module: Arc<dyn Module>,
    /// Recipe key of its binary.
    pub(super) artifact: Key,
    pub(crate) bucket: ShapeBucket,
    /// The sizes of the call that the plan was made for.
    pub(crate) shape: Shape,
    pub(crate) device: Arc<DeviceFingerprint>,
    pub(crate) policy: Policy,
    pub(crate) templates: Arc<str>,
    /// What was known of instruction paths when it was made.
    pub(crate) paths: Arc<Paths>,
    pub(crate) choice: Choice,
    /// Where the binary comes from.
    pub(crate) binary: Arc<str>,
    pub(crate) refusals: Vec<Refusal>,
    /// Where the calls of the class are counted.
    pub(super) tally: Arc<Tally>,
    /// What it stands in for, while that is compiled.
    pub(super) awaited: Option<Arc<Job>>,
}

/// A schedule with its origin.
#[derive(Debug, Clone)]
pub(crate) struct Choice {
    pub kernel: Kernel,
    pub status: Status,
    /// What the status rests on, in words.
    pub because: Because,
    pub layer: Arc<str>,
    /// Doublings from the sizes that it was made for.
    pub distance: f64,
    /// The record, unless the schedule is the default schedule.
    pub record: Option<Arc<Record>>,
}

/// What a status rests on. The words are put together when somebody reads them: a sealed call does not wait for them.
#[derive(Debug, Clone)]
pub(crate) struct Because {
    said: Arc<str>,
    /// The class whose plan serves another one, and how many doublings away that is.
    serves_from: Option<(ShapeBucket, f64)>,
}

impl Because {
    /// The same, said of a class that is served from another's plan.
    pub(crate) fn served_from(&self, bucket: ShapeBucket, distance: f64) -> Self {
        Self { said: self.said.clone(), serves_from: Some((bucket, distance)) }
    }
}

impl From<String> for Because {
    fn from(said: String) -> Self {
        Self { said: said.into(), serves_from: None }
    }
}

impl fmt::Display for Because {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some((bucket, distance)) = &self.serves_from {
            write!(f, "sealed; of {bucket}, {distance:.1} doublings away: ")?;
        }
        f.write_str(&self.said)
    }
}

/// A loaded kernel and where its binary came from.
#[derive(Clone)]
pub(super) struct Loaded {
    pub module: Arc<dyn Module>,
    /// Recipe key.
    pub artifact: Key,
    pub binary: Arc<str>,
}

impl Plan {
    /// Problem, schedule and arch.
    pub fn kernel(&self) -> &Kernel {
        &self.choice.kernel
    }

    /// The loaded kernel.
    pub fn module(&self) -> &dyn Module {
        &*self.module
    }

    /// How far the schedule is backed by measurement.
    pub fn status(&self) -> Status {
        self.choice.status
    }

    /// The class of sizes that the plan serves.
    pub fn bucket(&self) -> &ShapeBucket {
        &self.bucket
    }

    /// The record that the schedule comes from; none when it is the default schedule.
    pub fn record(&self) -> Option<&Record> {
        self.choice.record.as_deref()
    }

    /// Counts a call that runs on it.
    pub fn count_call(&self) {
        self.tally.call(self.choice.status);
    }

    /// Whether it does not stand in for another.
    pub(super) fn is_settled(&self) -> bool {
        self.awaited.is_none()
    }

    /// Whether what it stands in for is not there: not yet, or not at all.
    pub(super) fn is_awaiting(&self) -> bool {
        self.awaited.as_ref().is_some_and(|job| !job.is_ready())
    }

    /// What was looked at and not used.
    pub fn refusals(&self) -> &[Refusal] {
        &self.refusals
    }

    /// The stages of a launch for sizes of the plan's bucket.
    ///
    /// # Errors
    /// When a grid exceeds what one launch can hold.
    pub fn launch(&self, shape: &Shape) -> Result<LaunchPlan> {
        Ok(self.choice.kernel.plan(shape)?)
    }

    /// Which kernel runs, from which layer, and why no other does.
    pub fn explain(&self) -> Explanation {
        let Choice { kernel, status, because, layer, record, .. } = &self.choice;
        let family = kernel.schedule.family();
        let winner = record.as_deref().and_then(Record::winner);
        // By the sizes that the plan was made for: those of a usual sequence.
        let usual = CallSizes { shape: self.shape, pages: self.bucket.pages };
        let account = kernel.schedule.ragged_account(&kernel.problem, &usual, self.device.units);
        let [split, merge, pages] = match account {
            Some(account) => [account.split, account.merge, account.pages].map(Some),
            None => [None, None, None],
        };
        Explanation {
            problem: kernel.problem.to_string(),
            shape: self.shape.to_string(),
            bucket: self.bucket.to_string(),
            device: self.device.to_string(),
            arch: kernel.arch.to_string(),
            policy: self.policy.to_string(),
            family: family.name().to_owned(),
            schedule: kernel.schedule.to_string(),
            kernel: kernel.name(),
            status: *status,
            because: because.to_string(),
            layer: layer.to_string(),
            binary: self.binary.to_string(),
            templates: self.templates.to_string(),
            path: InstructionPath::of(family, &kernel.problem, kernel.arch).to_string(),
            level: self.level(),
            launches: winner.and(record.as_deref()).map(|r| r.key.launches),
            tuned_us: winner.map(|w| w.median_us),
            gain_over_default: record.as_deref().and_then(Record::gain_over_default),
            split,
            merge,
            pages,
            notes: self.notes(),
            refusals: self.refusals.clone(),
        }
    }
}

impl Plan {
    /// How sure we are of the kernel's instructions, in words.
    fn level(&self) -> String {
        let Kernel { problem, schedule, arch } = self.kernel();
        let family = schedule.family();
        let known = self.paths.level(family, problem, *arch);
        match self.record().filter(|record| known < Level::Ran && !record.finalists.is_empty()) {
            Some(record) => format!("raced on {} ({})", record.key.device.arch, record.key.device.name),
            None => self.paths.explain(family, problem, *arch),
        }
    }

    /// What a caller should know about the path that was taken.
    fn notes(&self) -> Vec<String> {
        let kernel = self.kernel();
        let of_family = kernel.schedule.family().notes(&kernel.problem);
        let mut notes: Vec<String> = of_family.map(str::to_owned).into_iter().collect();
        if !kernel.problem.kv.is_dense() {
            notes.push(
                "lengths are read on the device: the shape says their bounds, and the bucket goes by a usual sequence: \
                 (sequence, KV head) pairs, rows of a KV head, keys of a multiprocessor or core"
                    .to_owned(),
            );
        }
        if self.awaited.as_ref().is_some_and(|job| job.has_failed()) {
            notes.push(
                "the schedule that this one stands in for could not be compiled; the log has the reason".to_owned(),
            );
        }
        notes
    }
}

impl fmt::Debug for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Plan").field("choice", &self.choice).field("bucket", &self.bucket).finish_non_exhaustive()
    }
}

#[cfg(test)]
impl Plan {
    /// A plan that runs nothing.
    pub(super) fn for_tests(key: &super::key::PlanKey) -> Self {
        use flashtune_codegen::{Arch, CpuIsa, CpuSchedule, Schedule};
        let schedule = Schedule::Cpu(CpuSchedule::default_for(&key.problem, CpuIsa::Avx2, &key.bucket));
        Self::of_kernel(key, Kernel { problem: key.problem, schedule, arch: Arch::Cpu(CpuIsa::Avx2) })
    }

    /// A plan of this kernel, which nothing launches.
    #[cfg(test)]
    pub(super) fn of_kernel(key: &super::key::PlanKey, kernel: Kernel) -> Self {
        use flashtune_codegen::{Mask, Problem};
        struct Nothing(Kernel);
        impl Module for Nothing {
            fn as_any(&self) -> &dyn std::any::Any {
                self
            }
            fn kernel(&self) -> &Kernel {
                &self.0
            }
        }
        let Problem { mask, .. } = key.problem;
        let mask = if mask == Mask::Causal.kind() { Mask::Causal } else { Mask::Full };
        let shape = Shape { batch: 1, heads: 1, kv_heads: 1, q_len: key.bucket.q_len, kv_len: key.bucket.kv_len, mask };
        let device = DeviceFingerprint {
            arch: kernel.arch,
            name: "paper".into(),
            units: 1,
            memory_bytes: 0,
            cache_bytes: 0,
            driver: String::new(),
        };
        Self {
            module: Arc::new(Nothing(kernel)),
            artifact: Key([0; 32]),
            bucket: key.bucket,
            shape,
            device: Arc::new(device),
            policy: Policy::Sealed,
            templates: "".into(),
            paths: Default::default(),
            choice: Choice {
                kernel,
                status: Status::Tuned,
                because: String::new().into(),
                layer: "".into(),
                distance: 0.0,
                record: None,
            },
            binary: "".into(),
            refusals: Vec::new(),
            tally: Arc::new(Tally::new(key.problem, CallSizes::from(&shape), true)),
            awaited: None,
        }
    }
}

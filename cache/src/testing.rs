//! Records and artifacts for this crate's unit tests.

use crate::*;
use flashtune_codegen::{
    Arch, CpuIsa, CpuSchedule, DType, Family, Kernel, Mask, MaskKind, Problem, Schedule, Shape, ShapeBucket, abi,
};

pub(crate) const TEMPLATES: &str = "0123456789abcdef";

pub(crate) fn arch() -> Arch {
    Arch::Cpu(CpuIsa::Avx2)
}

pub(crate) fn validity() -> Validity {
    Validity { arch: arch(), family: Family::ForwardCpu, templates: TEMPLATES.into(), abi: abi::ABI_VERSION }
}

impl From<Validity> for Needed {
    /// The same of every family.
    fn from(v: Validity) -> Self {
        let templates = Family::ALL.into_iter().map(|family| (family, v.templates.clone())).collect();
        Self { arch: v.arch, templates, abi: v.abi }
    }
}

pub(crate) fn device() -> DeviceFingerprint {
    DeviceFingerprint {
        arch: arch(),
        name: "test processor".into(),
        units: 2,
        memory_bytes: 8 << 30,
        cache_bytes: 32 << 20,
        driver: "6.1".into(),
    }
}

pub(crate) fn problem() -> Problem {
    Problem::forward(DType::F32, 64, MaskKind::CAUSAL).unwrap()
}

pub(crate) fn shape(len: u32) -> Shape {
    Shape { batch: 1, heads: 4, kv_heads: 2, q_len: len, kv_len: len, mask: Mask::Causal }
}

pub(crate) fn schedule(n: u32) -> Schedule {
    let bucket = ShapeBucket::of(&shape(512));
    Schedule::Cpu(CpuSchedule { threads: n, ..CpuSchedule::default_for(&problem(), CpuIsa::Avx2, &bucket) })
}

/// An artifact that differs from those of other numbers.
pub(crate) fn artifact(n: u32) -> Artifact {
    Artifact {
        recipe: Recipe {
            kernel: Kernel { problem: problem(), schedule: schedule(n), arch: arch() },
            templates: TEMPLATES.into(),
            options: vec!["-O3".into()],
            compiler: CompilerId { name: "cc".into(), version: "1".into() },
            abi: abi::ABI_VERSION,
        },
        entry: "ft_tile".into(),
        args: abi::ArgsLayout::of(&Kernel { problem: problem(), schedule: schedule(n), arch: arch() }),
        facts: Facts::default(),
        bytes: (0..200 + n as usize).map(|i| (i * 7 + n as usize) as u8).collect(),
    }
}

/// A record of the bucket of `len`, won by `artifact(n)`.
pub(crate) fn record(len: u32, n: u32) -> Record {
    let bucket = ShapeBucket::of(&shape(len));
    let finalist = Finalist {
        schedule: schedule(n),
        median_us: 10.0 + n as f64,
        p10_us: 9.0,
        p90_us: 12.0,
        samples: 9,
        rounds_ns: vec![9_000, 10_000 + 1_000 * u64::from(n), 12_000],
        max_error: 1e-6,
        is_default: false,
    };
    Record {
        key: RecordKey { device: device(), problem: problem(), bucket, launches: Launches::Eager },
        schedule: schedule(n),
        artifact: artifact(n).recipe.key(),
        finalists: vec![finalist],
        provenance: Provenance {
            flashtune: "0.1.0".into(),
            templates: TEMPLATES.into(),
            compiler: "cc 1".into(),
            unix_time: 1_700_000_000,
            shape: shape(len),
            space: 20,
            compiled: 10,
            timed: 9,
            unfused_us: None,
            seconds: 3.5,
            compile_seconds: 1.5,
            device_seconds: 1.0,
            waited_seconds: 0.25,
            conditions: Conditions::default(),
        },
        rivals: Vec::new(),
        settled: Vec::new(),
    }
}

pub(crate) fn trial(n: u32) -> Trial {
    Trial {
        schedule: schedule(n),
        templates: TEMPLATES.into(),
        compiler: "cc 1".into(),
        artifact: Some(artifact(n).recipe.key()),
        result: TrialResult::Failed { stage: Stage::Check, reason: "wrong".into() },
        unix_time: 1,
    }
}

/// How many mutations of a kind are tried: `FLASHTUNE_FUZZ_CASES`, for more than a test run has time for.
pub(crate) fn mutations(usually: u32) -> u32 {
    std::env::var("FLASHTUNE_FUZZ_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(usually)
}

thread_local! {
    static UNREADABLE: std::cell::RefCell<Option<std::path::PathBuf>> = const { std::cell::RefCell::new(None) };
}

/// Makes the file system fail for one file, as long as this thread says no other.
pub(crate) fn make_unreadable(path: Option<&std::path::Path>) {
    UNREADABLE.set(path.map(std::path::Path::to_path_buf));
}

/// Whether the file system fails for this file.
pub(crate) fn is_unreadable(path: &std::path::Path) -> bool {
    UNREADABLE.with_borrow(|unreadable| unreadable.as_deref() == Some(path))
}

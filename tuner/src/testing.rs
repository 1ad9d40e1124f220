//! Candidates and artifacts for this crate's unit tests.

use crate::candidate::Candidate;
use flashtune_cache::{Artifact, CompilerId, Facts, Recipe};
use flashtune_codegen::{Arch, DType, Family, Kernel, MaskKind, Problem, Schedule, SmArch, abi};

/// Some candidates of the sm80 family; the first is the default.
pub(crate) fn candidates(count: usize) -> Vec<Candidate> {
    let arch = Arch::Sm(SmArch { number: 80, specific: false });
    let problem = Problem::forward(DType::F16, 64, MaskKind::FULL).unwrap();
    let space = Schedule::space(Family::ForwardSm80, &problem, arch);
    let kernels = space.into_iter().take(count).map(|schedule| Kernel { problem, schedule, arch });
    kernels.enumerate().map(|(i, kernel)| Candidate::new(kernel, i, i == 0)).collect()
}

/// An artifact of a kernel whose code depends on `body`.
pub(crate) fn artifact(kernel: &Kernel, body: u8) -> Artifact {
    Artifact {
        recipe: Recipe {
            kernel: *kernel,
            templates: "0123456789abcdef".into(),
            options: kernel.compile_options(),
            compiler: CompilerId { name: "paper".into(), version: "1".into() },
            abi: abi::ABI_VERSION,
        },
        entry: "entry".into(),
        args: abi::ArgsLayout::of(kernel),
        facts: Facts::default(),
        bytes: vec![body; 64],
    }
}

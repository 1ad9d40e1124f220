//! From an attention problem and a schedule to kernel source.
//!
//! The flow through this crate is one line:
//!
//! ```text
//! Problem + Arch + Schedule -> Kernel -> render(TemplateSet) -> Source
//!                                     -> resources()         -> what it will need on the device
//!                                     -> plan(Shape)         -> stages of a launch and their scratch memory
//! ```
//!
//! ```
//! use flashtune_codegen::{Arch, DType, Family, Kernel, Mask, Problem, Schedule, Shape, ShapeBucket, TemplateSet};
//!
//! # fn main() -> flashtune_codegen::Result<()> {
//! let arch: Arch = "sm_90a".parse()?;
//! let problem = Problem::forward(DType::Bf16, 128, Mask::Causal.kind())?;
//! let shape = Shape { batch: 1, heads: 32, kv_heads: 8, q_len: 4096, kv_len: 4096, mask: Mask::Causal };
//! let schedule = Schedule::default_for(Family::ForwardSm90, &problem, arch, &ShapeBucket::of(&shape))?;
//! let kernel = Kernel { problem, schedule, arch };
//! kernel.check()?;
//! let source = kernel.render(&TemplateSet::embedded())?; // CUDA C++ that includes nothing, for NVRTC
//! assert!(source.text.contains(&source.entry));
//! # Ok(())
//! # }
//! ```
//!
//! Architecture invariants: nothing here does I/O, knows a device, or depends on the machine it runs on. The same
//! inputs give the same bytes. Templates hold no policy: every decision that a template acts on is a field of
//! [`Problem`] or [`Schedule`], rendered as one block of constants at the top of the generated file.

pub mod abi;
mod arch;
mod constraints;
mod dropout;
mod dtype;
mod error;
mod family;
mod kernel;
mod kv;
mod launch;
mod level;
mod mask;
pub mod omitted;
mod packed_waves;
mod precision;
mod problem;
mod resources;
mod scales;
pub mod score;
mod seen;
mod shape;
mod sizes;
mod summation;
mod templates;
mod traffic;

pub use abi::Tiling;
pub use arch::{Arch, CpuIsa, SmArch, SmLimits, USUAL_UNITS};
pub use constraints::{Constraint, Constraints};
pub use dropout::{Dropout, DropoutMask, philox};
pub use dtype::DType;
pub use error::{Error, Result};
pub use family::{
    AppendCpuSchedule, AppendCudaSchedule, BackwardCpuSchedule, BackwardNaiveSchedule, BackwardSm80Schedule,
    BackwardSm90Schedule, CpuE4m3Schedule, CpuRaggedSchedule, CpuSchedule, Family, GradientCpuSchedule,
    GradientNaiveSchedule, NaiveRaggedSchedule, NaiveSchedule, PAD_ROWS, PadCudaSchedule, Place, Purpose,
    QuantiseCpuSchedule, QuantiseCudaSchedule, QuantiseScratch, RaggedAccount, RaggedUnaddressable, Schedule,
    Sm80F32Schedule, Sm80Instructions, Sm80RaggedSchedule, Sm80Schedule, Sm89Fp8Schedule, Sm90Fp8RaggedSchedule,
    Sm90Fp8Schedule, Sm90LookAhead, Sm90RaggedSchedule, Sm90Rescale, Sm90RowOrder, Sm90Schedule, Sm90Scheduler,
    Swizzle, TensorMapSpec, TileOrder, backward_unaddressable, has_loose_biases, is_addressable, ragged_unaddressable,
    unaddressable,
};
pub use kernel::{Kernel, Language, Source};
pub use kv::{KvElement, KvKind, KvScales, KvStore};
pub use launch::{
    Holds, LaunchPlan, MOST_MASK_BYTES, MetadataLayout, Region, SCRATCH_LIMIT, SPLIT_COUNTER_BYTES, Stage, StageEntry,
    StageRole, Waves,
};
pub use level::{Evidence, InstructionPath, Level, Paths, Raised};
pub use mask::{Mask, MaskKind};
pub use packed_waves::PackedWaves;
pub use precision::Precision;
pub use problem::{HEAD_DIM_MAX, HEAD_DIM_MIN, HEAD_DIM_STEP, Op, Problem, padded_head_dim};
pub use resources::Resources;
pub use scales::{ScaleUnit, ScaleUnits};
pub use shape::{BucketPlace, Shape, ShapeBucket};
pub use sizes::{CallSizes, PageClass};
pub use summation::Summation;
pub use templates::TemplateSet;
pub use traffic::{Traffic, Visits};

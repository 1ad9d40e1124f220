//! Fused attention kernels for Rust hosts: generated for one problem, compiled at run time, tuned on the device that is
//! there, kept, shipped and dispatched.
//!
//! ```no_run
//! use flashtune::{DType, Engine, HostTensor, Layout, Mask};
//!
//! # fn main() -> flashtune::Result<()> {
//! let engine = Engine::builder().build()?; // a GPU if there is one, else the CPU
//! let tensor = |seed| HostTensor::random(DType::Bf16, [1, 8, 1024, 128], Layout::Bhsd, seed, Default::default());
//! let out = engine.forward_host(&tensor(1), &tensor(2), &tensor(3), Mask::Causal, None)?;
//! println!("{}", out.plan.expect("the tensors are not empty").explain());
//! # Ok(())
//! # }
//! ```
//!
//! [`Engine::forward`] takes device pointers with shape and strides and launches on the caller's stream;
//! [`Engine::forward_host`] takes tensors in host memory. [`Engine::forward_ragged`] takes sequences of different
//! lengths beside a packed, paged or quantised KV cache. [`Engine::backward`] takes what a forward pass read and wrote,
//! and gives the gradients of Q, K and V. [`Engine::quantise`] makes `e4m3` operands with their scales. All say which
//! kernel ran and why ([`Plan::explain`]). The [`guide`] goes through all of it.
//!
//! What hosts use is exported here by name. The crates behind it, lowest first, are [`flashtune_codegen`] (problems,
//! schedules, rendering), [`flashtune_cache`] (records, artifacts, bundles), [`flashtune_runtime`] (devices, compilers,
//! dispatch) and [`flashtune_tuner`] (search and measurement). Programs that work on kernels themselves depend on
//! those, whose items change more often.

pub mod append;
mod awaited;
mod backward;
mod builder;
pub mod bundle;
mod call_log;
mod checked;
pub mod device;
mod engine;
mod error;
pub mod guide;
mod host;
mod manifest;
pub mod model;
mod overrides;
mod padding;
pub mod quantise;
pub mod ragged;
pub mod score;
mod serving;
pub mod tuning;

/// The variable that names the file to which an engine appends, when it is dropped, the shapes that it met untuned.
pub const UNTUNED_VARIABLE: &str = "FLASHTUNE_UNTUNED";

/// The variable that names the file to which every distinct call is appended as a line for `flashtune bench`.
pub const LOG_CALLS_VARIABLE: &str = "FLASHTUNE_LOG_CALLS";

/// The variable that names the `flashtune` program whose processes run candidates.
pub const WORKER_VARIABLE: &str = "FLASHTUNE_WORKER";

/// The variable that says how a host launches: `eager` or `graph`.
pub const LAUNCHES_VARIABLE: &str = "FLASHTUNE_LAUNCHES";

/// The variable that says whether a quick schedule answers calls while their own is being compiled: `1` or `0`.
pub const QUICK_FIRST_VARIABLE: &str = "FLASHTUNE_QUICK_FIRST";

/// The variable that names instruction paths which no card is known to have executed and which are taken all the same,
/// with commas between.
pub const ALLOW_PATHS_VARIABLE: &str = "FLASHTUNE_ALLOW_PATHS";

pub use backward::{Backward, Packed};
pub use builder::Builder;
#[doc(hidden)]
pub use builder::allowed_paths_from_env;
pub use engine::{Dispatch, Engine, Forward};
pub use error::{CacheError, CodegenError, Error, Result, RuntimeError, TunerError};
#[doc(inline)]
pub use flashtune_cache::{Launches, Trust};
#[doc(inline)]
pub use flashtune_codegen::score::{Elements, Program, ProgramRef, Scalar, SideData};
#[doc(inline)]
pub use flashtune_codegen::{
    CallSizes, DType, Dropout, InstructionPath, Level, Mask, MaskKind, Op, PageClass, Precision, Problem, ScaleUnits,
    Shape,
};
#[doc(inline)]
pub use flashtune_runtime::dispatch::{
    Calls, Counters, Explanation, OnMiss, Plan, Policy, Refusal, Seal, Status, Untuned,
};
#[doc(inline)]
pub use flashtune_runtime::{
    BlockMask, Descale, Descales, DeviceSpec, Distribution, HostTensor, Layout, MaskSizes, ParallelLoop, ScaleKind,
    SideInputs, SideView, Stream, TensorView, Threads,
};
pub use host::{HostForward, HostOutput};
pub use manifest::{ManifestEntry, read_manifest, write_manifest};
pub use overrides::{TEMPLATES_VARIABLE, read_templates};
pub use padding::Padding;
pub use ragged::Ragged;

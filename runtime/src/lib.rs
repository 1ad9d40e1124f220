//! Devices, compilers, tensors and the reference attention.
//!
//! ```text
//! open(DeviceSpec) -> Device      compile(Kernel, TemplateSet) -> Artifact
//! Device::load(Artifact) -> Module
//! forward_call(tensors, mask, scale) -> (Problem, Shape, ForwardArgs)
//! ragged_call(batch, mask, scale) -> (Problem, Shape, RaggedArgs)
//! append_call(append) -> (Problem, Shape, AppendArgs)
//! quantise_call(quantise) -> (Problem, Shape, QuantiseArgs)
//! backward_call(tensors, mask, scale) -> (Problem, Shape, BackwardArgs)
//! Device::launch(Module, LaunchPlan, Args, Stream)
//! ```
//!
//! ```no_run
//! use flashtune_codegen::TemplateSet;
//! use flashtune_runtime::{DeviceSpec, compile};
//! # fn of_codegen() -> flashtune_codegen::Kernel { unimplemented!() }
//!
//! # fn main() -> flashtune_runtime::Result<()> {
//! let device = flashtune_runtime::open(DeviceSpec::Auto)?; // the first GPU, else the host processor
//! let kernel = of_codegen(); // a problem with a schedule, for the device's arch
//! let artifact = compile::compile_with(&*device.compiler()?, &kernel, &TemplateSet::embedded())?;
//! println!("{}: {} registers on {}", kernel.name(), artifact.facts.registers, device.fingerprint());
//! # Ok(())
//! # }
//! ```
//!
//! Architecture invariants: `unsafe` lives in the device modules (`cuda/`, `cpu/`), in the binding of NVRTC's C
//! interface (`compile/nvrtc_lib.rs`), and where a launch passes on its caller's promise (`device.rs`, `check.rs`);
//! nowhere else. A missing library is an [`Error`], never a panic. A launch is asynchronous on the caller's stream,
//! allocates nothing and syncs nothing.

mod append;
mod backward;
mod block_mask;
pub mod ceilings;
pub mod check;
pub mod compile;
pub mod cpu;
pub mod cuda;
mod descale;
mod device;
pub mod dispatch;
mod dropout;
pub mod elf;
mod error;
mod gradient;
pub mod guarded;
mod library_search;
mod open;
mod pad;
mod quantise;
pub mod ragged;
pub mod reference;
mod residual;
mod side;
mod sync;
mod tensor;
mod typical;

pub use append::{
    Append, AppendCall, AppendCase, AppendQueries, Positions, Rotary, RowCount, Rows, Target, append_call, check_append,
};
pub use backward::{BackwardCall, BackwardTensors, Packed, backward_call};
pub use block_mask::{BlockMask, MaskSizes};
pub use ceilings::{Ceiling, Probe};
pub use check::{
    BackwardCase, CheckCase, CheckInputs, CheckReport, GradientCase, Poison, RaggedCase, check_kernel, check_pad,
    check_quantise,
};
pub use compile::{compile, compile_with, compiler_for};
pub use cpu::{CpuDevice, ParallelLoop, Threads};
pub use cuda::CudaDevice;
pub use descale::{Descale, Descales, ScaleKind};
pub use device::{Buffer, Compiler, Device, Findings, Graph, HostBytes, Module, Stream, no_graphs, require_room};
pub use dispatch::{Dispatcher, DispatcherConfig, Explanation, Plan, Policy, Status};
pub use error::{Error, Result};
pub use gradient::{GradientCall, gradient_call, gradient_of};
pub use open::{DeviceSpec, all_devices, open, open_to_compile};
pub use pad::RowCopies;
pub use quantise::{
    BLOCK_ROWS, KeyMean, Quantise, QuantiseCall, QuantiseOperand, QuantiseRotary, RowPositions, quantise_call,
};
pub use ragged::{RaggedBatch, RaggedCall, ragged_call};
pub use reference::{Distribution, HostTensor, Layout, Verdict};
pub use side::{SideBuffers, SideInputs, SideTable, SideView};
pub use tensor::{ForwardCall, ForwardTensors, TensorView, certainly_overlap, forward_call};
pub use typical::{typical_side, visible_part};

//! From an attention problem and a schedule to kernel source.
//!
//! The flow through this crate is one line:
//!
//! ```text
//! Problem + Arch + Schedule -> Kernel -> render(TemplateSet) -> Source
//!                                     -> resources()         -> what it will need on the device
//!                                     -> launch(Shape)       -> grid, block, shared memory
//! ```
//!
//! Architecture invariants: nothing here does I/O, knows a device, or depends on the machine it runs on. The same
//! inputs give the same bytes. Templates hold no policy: every decision that a template acts on is a field of
//! [`Problem`] or [`Schedule`], rendered as one block of constants at the top of the generated file.

pub mod abi;
mod arch;
mod dtype;
mod error;
mod kernel;
mod launch;
mod mask;
pub mod omitted;
mod prelude;
mod problem;
mod resources;
mod schedule;
pub mod score;
mod seen;
mod shape;
mod templates;
mod tensor_map;
mod traffic;
mod wgmma;

pub use abi::Tiling;
pub use arch::{Arch, CpuIsa, SmArch, SmLimits};
pub use dtype::DType;
pub use error::{Error, Result};
pub use kernel::{Kernel, Language, Source};
pub use launch::Launch;
pub use mask::{Mask, MaskKind};
pub use prelude::{FoundLayout, MOST_MASK_BYTES, Prelude};
pub use problem::{HEAD_DIM_MAX, HEAD_DIM_MIN, HEAD_DIM_STEP, Pass, Problem};
pub use resources::Resources;
pub use schedule::{
    CpuSchedule, Family, NaiveSchedule, Schedule, Sm80Schedule, Sm90Schedule, Sm90Scheduler, Swizzle, TileOrder,
};
pub use shape::{BucketPlace, Shape, ShapeBucket};
pub use templates::TemplateSet;
pub use tensor_map::{TensorMapSpec, has_loose_biases, unaddressable};
pub use traffic::{Traffic, Visits};

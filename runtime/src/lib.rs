//! Devices, compilers, tensors and the reference attention.
//!
//! Architecture invariants: `unsafe` lives in the device modules (`cuda/`, `cpu/`) and nowhere else; a missing library
//! is an [`Error`], never a panic; a launch is asynchronous on the caller's stream, allocates nothing and syncs nothing.

mod device;
mod error;

pub use device::{Buffer, Compiler, Device, Module, Stream};
pub use error::{Error, Result};

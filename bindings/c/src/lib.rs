//! The C ABI of flashtune: `libflashtune` and `include/flashtune.h`.
//!
//! ```text
//! C caller -> guard (fork, panics, last error) -> input (structs by size, strings) -> handle table -> Engine
//! ```
//!
//! The header is generated from the documented items of this crate (`cargo xtask header`); what is written there is for
//! readers of C. No type of a Rust crate or of CUDA appears in it.
//!
//! Architecture invariants: every function returns through [`error::guard`], so that no panic crosses the boundary (of
//! the one that Python calls by itself, all that can panic does);
//! handles are numbers looked up in a table, never addresses; structs of the caller are copied, by the size that they
//! state, before a field is read. `unsafe` here reads and writes memory that the caller named (`input.rs`,
//! `program.rs`, `block_mask.rs`, `dlpack.rs`, `repeated.rs`), gives memory away and takes it back
//! (`dlpack_results.rs`), registers the fork handler (`fork.rs`), and passes on the caller's promise about tensors
//! (`forward.rs`, `backward.rs`, `ragged.rs`, `repeated.rs`).

// What is `pub` is in the header, which cbindgen generates.
#![allow(unreachable_pub)]

mod append;
mod backward;
mod block_mask;
mod dlpack;
mod dlpack_results;
mod engine_handle;
mod error;
mod explain;
mod fork;
mod forward;
mod handles;
mod input;
mod log;
mod parallel;
mod prepared;
mod program;
mod quantise;
mod ragged;
mod repeated;
mod serving;
#[cfg(test)]
mod tests;
mod types;

pub use append::{
    APPEND_FINDS_SCALES, APPEND_INTERLEAVED, APPEND_LENGTHS_AFTER, APPEND_Q_ONE_POSITION, AppendArgs, flashtune_append,
    flashtune_prepare_append,
};
pub use backward::{BACKWARD_SCALE, BackwardArgs, flashtune_backward, flashtune_prepare_backward};
pub use block_mask::{
    BlockMaskArgs, flashtune_block_mask_bytes, flashtune_block_mask_create, flashtune_block_mask_destroy,
};
pub use dlpack::{DlManagedTensor, DlTensor, DlTensors, flashtune_forward_dl, flashtune_prepare_dl};
pub use dlpack_results::flashtune_empty_dl;
pub use engine_handle::{flashtune_engine_close, flashtune_engine_open, flashtune_synchronize};
pub use error::{flashtune_last_error, flashtune_status_name};
pub use explain::flashtune_explain;
pub use forward::{flashtune_forward, flashtune_prepare};
pub use quantise::{
    QUANTISE_HADAMARD, QUANTISE_INTERLEAVED, QUANTISE_K_WHOLE, QUANTISE_MEAN, QUANTISE_Q_WHOLE, QUANTISE_V_WHOLE,
    QuantiseArgs, flashtune_prepare_quantise, flashtune_quantise,
};
pub use ragged::{
    RAGGED_LSE_EMPTY_POSITIVE, RAGGED_LSE_LOG2, RAGGED_SCALE, RaggedArgs, flashtune_forward_ragged,
    flashtune_prepare_ragged,
};
pub use repeated::{
    CALL_IS_NOT_KNOWN, PythonFunctions, PythonRead, flashtune_python_functions, flashtune_remember_call,
    flashtune_repeat_call,
};
pub use serving::{
    flashtune_counters, flashtune_preload, flashtune_seal, flashtune_write_metrics, flashtune_write_untuned,
};
pub use types::*;

use std::ffi::c_char;

/// Version of this header's functions and structs. It grows when one of them changes; fields that are added at the end
/// of a struct do not change it (see `struct_size`).
pub const ABI_VERSION: u32 = 1;

/// The `FLASHTUNE_ABI_VERSION` that the library was built with. A program works with a library of the same number.
#[unsafe(no_mangle)]
pub extern "C" fn flashtune_abi_version() -> u32 {
    ABI_VERSION
}

/// Version of the library, e.g. "0.1.0".
#[unsafe(no_mangle)]
pub extern "C" fn flashtune_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

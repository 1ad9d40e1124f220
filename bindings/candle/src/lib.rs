//! Fused attention for candle on flashtune's kernels: the functions of candle-flash-attn, on the CPU, too, with
//! gradients, and any score program.
//!
//! ```no_run
//! use candle_core::{DType, Device, Tensor};
//!
//! # fn main() -> candle_core::Result<()> {
//! let q = Tensor::randn(0f32, 1., (1, 1024, 8, 64), &Device::Cpu)?.to_dtype(DType::BF16)?;
//! let kv = Tensor::randn(0f32, 1., (1, 1024, 2, 64), &Device::Cpu)?.to_dtype(DType::BF16)?;
//! let out = flashtune_candle::flash_attn(&q, &kv, &kv, 0.125, true)?;
//! assert_eq!(out.dims(), [1, 1024, 8, 64]);
//! # Ok(())
//! # }
//! ```
//!
//! Tensors on CUDA devices are computed on in candle's own context and stream, with the feature `cuda`. [`Attention`]
//! is the call with everything; [`engine_builder`] and [`set_engine`] say which engine computes.

mod attention;
mod dense;
mod engines;
mod error;
mod functions;
mod memory;
mod ragged;
mod side;
pub mod v3;
mod windows;

pub use attention::{Attention, Value, attention};
pub use engines::{engine, engine_builder, set_engine};
pub use error::{Error, error_of};
pub use flashtune;
pub use flashtune::{Explanation, Program};
pub use functions::*;

use candle_core::{Result, Tensor};

/// Which kernel computes [`flash_attn`] of these tensors, from where it comes, and why no other does; nothing where O
/// has no element. Reads no element of the tensors; compiles what is not there yet.
///
/// # Errors
/// As [`flash_attn`].
pub fn explain(q: &Tensor, k: &Tensor, v: &Tensor, softmax_scale: f32, causal: bool) -> Result<Option<Explanation>> {
    let call = Attention::new().scale(softmax_scale);
    if causal { call.causal() } else { call }.explain(q, k, v)
}

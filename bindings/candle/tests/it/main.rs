//! The crate's functions beside unfused attention in candle's own operations.
//!
//! On the CPU, or with the feature `cuda` and `FLASHTUNE_CANDLE_DEVICE=cuda` on the first GPU.

mod common;
mod errors;
mod fixed;
mod gradients;
mod packed;
mod ported;
mod programs;

//! Element types of Q, K, V and O.

use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Element type of Q, K, V and O: all four share it, but beside `e4m3` O is of any. Scores, softmax and accumulation
/// are always fp32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum DType {
    /// IEEE binary16.
    F16,
    /// bfloat16.
    Bf16,
    /// IEEE binary32.
    F32,
    /// OCP FP8 with 4 bits of exponent and 3 of mantissa, in forward passes: Q, K and V each with a scale per sequence
    /// and KV head or finer ones, and O with one for all.
    E4m3,
}

impl DType {
    /// The element types that every operation has, narrowest first.
    pub const ALL: [DType; 3] = [DType::F16, DType::Bf16, DType::F32];

    /// The element types of O beside `e4m3` operands.
    pub const OUTPUTS_OF_E4M3: [DType; 4] = [DType::F16, DType::Bf16, DType::F32, DType::E4m3];

    /// Size of one element in bytes.
    pub const fn bytes(self) -> usize {
        match self {
            DType::E4m3 => 1,
            DType::F16 | DType::Bf16 => 2,
            DType::F32 => 4,
        }
    }

    /// The name used in templates, file names and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F16 => "f16",
            DType::Bf16 => "bf16",
            DType::F32 => "f32",
            DType::E4m3 => "e4m3",
        }
    }

    /// Distance between 1 and the next representable number.
    pub const fn epsilon(self) -> f64 {
        match self {
            DType::F16 => 1.0 / 1024.0,
            DType::Bf16 => 1.0 / 128.0,
            DType::F32 => f32::EPSILON as f64,
            DType::E4m3 => 1.0 / 8.0,
        }
    }

    /// The largest finite number.
    pub const fn largest(self) -> f64 {
        match self {
            DType::F16 => 65504.0,
            // That of f32 with 8 bits of mantissa.
            DType::Bf16 => f32::from_bits(0x7f7f_0000) as f64,
            DType::F32 => f32::MAX as f64,
            DType::E4m3 => 448.0,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for DType {
    type Err = Error;
    fn from_str(s: &str) -> Result<Self> {
        match s.to_ascii_lowercase().as_str() {
            "f16" | "fp16" | "float16" | "half" => Ok(DType::F16),
            "bf16" | "bfloat16" => Ok(DType::Bf16),
            "f32" | "fp32" | "float32" | "float" => Ok(DType::F32),
            "e4m3" | "float8_e4m3fn" => Ok(DType::E4m3),
            _ => Err(Error::parse("dtype", s, "f16, bf16, f32 or e4m3")),
        }
    }
}

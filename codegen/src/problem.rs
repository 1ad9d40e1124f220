//! What is computed, independent of sizes: the thing that a kernel is specialised to.

use crate::omitted::is_default;
use crate::score::{Program, ProgramRef};
use crate::{DType, Error, KvKind, MaskKind, Result, Shape};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Smallest supported head dim.
pub const HEAD_DIM_MIN: u32 = 16;
/// Largest supported head dim.
pub const HEAD_DIM_MAX: u32 = 256;
/// Head dims are multiples of this, so that every row is made of whole 16-byte vectors of a 16-bit dtype.
pub const HEAD_DIM_STEP: u32 = 8;

/// What is computed of attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize)]
pub enum Op {
    /// O and optionally the log-sum-exp from Q, K, V. Decode is this, with a schedule that splits the keys.
    #[default]
    Forward,
    /// dQ, dK and dV from Q, K, V, O, dO and the log-sum-exp.
    Backward,
    /// New rows of K and V into a cache, rotated and quantised where asked for.
    Append,
    /// Low-precision operands with their scales, from 16-bit ones.
    Quantise,
}

impl Op {
    /// The word in names of problems and families.
    pub const fn name(self) -> &'static str {
        match self {
            Op::Forward => "forward",
            Op::Backward => "backward",
            Op::Append => "append",
            Op::Quantise => "quantise",
        }
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One attention problem: operation, dtype, head dims, the sides of the mask that are bounded, and the score program.
///
/// Numbers of heads, lengths, strides, window lengths, the scalars and tensors of the program, the softmax scale and
/// whether the LSE is wanted are run-time values ([`crate::Shape`], [`crate::abi::ForwardArgs`]): they do not change
/// the generated code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(from = "Stored", into = "Stored")]
pub struct Problem {
    /// What is computed.
    pub op: Op,
    /// Element type of Q, K, V and O.
    pub dtype: DType,
    /// Length of a row of Q and K.
    pub head_dim_qk: u32,
    /// Length of a row of V and O.
    pub head_dim_v: u32,
    /// Bounded sides of the mask.
    pub mask: MaskKind,
    /// What else masks and changes the scores; `None` for nothing. Its mask holds beside `mask`.
    pub program: Option<ProgramRef>,
    /// Where K and V are found.
    pub kv: KvKind,
}

/// A problem as it is stored: without what is at its default.
#[derive(Serialize, Deserialize)]
#[serde(rename = "Problem", deny_unknown_fields)]
struct Stored {
    #[serde(default, skip_serializing_if = "is_default")]
    op: Op,
    dtype: DType,
    head_dim_qk: u32,
    /// That of Q and K.
    #[serde(default, skip_serializing_if = "is_default")]
    head_dim_v: Option<u32>,
    #[serde(default, skip_serializing_if = "is_default")]
    mask: MaskKind,
    #[serde(default, skip_serializing_if = "is_default")]
    program: Option<ProgramRef>,
    #[serde(default, skip_serializing_if = "is_default")]
    kv: KvKind,
}

impl From<Problem> for Stored {
    fn from(Problem { op, dtype, head_dim_qk, head_dim_v, mask, program, kv }: Problem) -> Self {
        let head_dim_v = (head_dim_v != head_dim_qk).then_some(head_dim_v);
        Self { op, dtype, head_dim_qk, head_dim_v, mask, program, kv }
    }
}

impl From<Stored> for Problem {
    fn from(Stored { op, dtype, head_dim_qk, head_dim_v, mask, program, kv }: Stored) -> Self {
        Self { op, dtype, head_dim_qk, head_dim_v: head_dim_v.unwrap_or(head_dim_qk), mask, program, kv }
    }
}

impl Problem {
    /// A forward problem with equal head dims, checked.
    pub fn forward(dtype: DType, head_dim: u32, mask: MaskKind) -> Result<Self> {
        Self::forward_qk_v(dtype, head_dim, head_dim, mask)
    }

    /// A forward problem whose V rows differ in length from the Q and K rows, checked.
    pub fn forward_qk_v(dtype: DType, head_dim_qk: u32, head_dim_v: u32, mask: MaskKind) -> Result<Self> {
        let p = Self { op: Op::Forward, dtype, head_dim_qk, head_dim_v, mask, program: None, kv: KvKind::Dense };
        p.validate()?;
        Ok(p)
    }

    /// The same problem for K and V that are found another way.
    pub fn with_kv(self, kv: KvKind) -> Self {
        Self { kv, ..self }
    }

    /// The same problem with a score program; one that does nothing is left out.
    pub fn with_program(self, program: Program) -> Self {
        Self { program: (!program.is_plain()).then(|| ProgramRef::new(program)), ..self }
    }

    /// The same computation with as much of the program's mask in `mask` as fits there at these sizes, whose own mask
    /// is then `Shape::mask`: kernels know windows without a program. Of a ragged batch, whose sizes are bounds, what
    /// fits there at all lengths.
    pub fn with_windows(self, shape: Shape) -> (Self, Shape) {
        let mask_of = |p: ProgramRef| match self.kv {
            KvKind::Dense => p.window()?.at(&shape),
            KvKind::Ragged(_) => p.window()?.at_all_lengths(shape.mask),
        };
        let found = self.program.and_then(|p| Some((p, mask_of(p)?)));
        let Some((program, mask)) = found else { return (self, shape) };
        (Self { mask: mask.kind(), program: program.unmasked(), ..self }, Shape { mask, ..shape })
    }

    /// Whether the score program has a mask, beside the sides of `mask`.
    pub fn masks_by_program(&self) -> bool {
        self.program.is_some_and(|p| p.mask().is_some())
    }

    /// Whether nothing is to be written at these sizes: a backward pass without a query still writes zeros for every
    /// key.
    pub fn has_no_output(&self, shape: &Shape) -> bool {
        match self.op {
            Op::Backward => {
                let none = |heads: u32, rows: u32| heads == 0 || rows == 0;
                shape.batch == 0 || none(shape.heads, shape.q_len) && none(shape.kv_heads, shape.kv_len)
            }
            _ => shape.is_empty(),
        }
    }

    /// The gradients of the same problem.
    pub fn backward(self) -> Self {
        Self { op: Op::Backward, ..self }
    }

    /// Whether any key may be masked, by either.
    pub fn masks(&self) -> bool {
        self.mask.any() || self.masks_by_program()
    }

    /// Checks the head dims against what every family supports.
    pub fn validate(&self) -> Result<()> {
        for (field, d) in [("head_dim_qk", self.head_dim_qk), ("head_dim_v", self.head_dim_v)] {
            if !(HEAD_DIM_MIN..=HEAD_DIM_MAX).contains(&d) || d % HEAD_DIM_STEP != 0 {
                return Err(Error::unsupported(
                    field,
                    d,
                    format!("head dims are multiples of {HEAD_DIM_STEP} from {HEAD_DIM_MIN} to {HEAD_DIM_MAX}"),
                    "pad the last dimension of the tensor with zeros to the next supported length",
                ));
            }
        }
        Ok(())
    }

    /// The softmax scale that applies when the caller states none: `1 / sqrt(head_dim_qk)`.
    pub fn default_scale(&self) -> f32 {
        1.0 / (self.head_dim_qk as f32).sqrt()
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}-d{}", self.op, self.dtype, self.head_dim_qk)?;
        if self.head_dim_v != self.head_dim_qk {
            write!(f, "v{}", self.head_dim_v)?;
        }
        write!(f, "-{}", self.mask)?;
        if !self.kv.is_dense() {
            write!(f, "-{}", self.kv)?;
        }
        match self.program {
            Some(program) => write!(f, "-s{}", program.name()),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn head_dims_outside_the_range_name_the_field_and_the_remedy() {
        for d in [0, 8, 15, 17, 63, 260, 264] {
            let e = Problem::forward(DType::F16, d, MaskKind::FULL).unwrap_err().to_string();
            assert!(e.contains("head_dim_qk") && e.contains("pad"), "{e}");
        }
        assert!(Problem::forward_qk_v(DType::F16, 192, 128, MaskKind::FULL).is_ok());
    }

    #[test]
    fn display_is_unique_per_field() {
        let p = |d, v, m| Problem::forward_qk_v(DType::Bf16, d, v, m).unwrap().to_string();
        assert_eq!(p(128, 128, MaskKind::CAUSAL), "forward-bf16-d128-causal");
        assert_eq!(p(192, 128, MaskKind::FULL), "forward-bf16-d192v128-full");
        let ragged = Problem::forward(DType::F16, 64, MaskKind::FULL).unwrap().with_kv(KvKind::RAGGED);
        assert_eq!(ragged.to_string(), "forward-f16-d64-full-ragged");
        let with = |text: &str| {
            let problem = Problem::forward(DType::Bf16, 64, MaskKind::CAUSAL).unwrap();
            problem.with_program(Program::parse(text).unwrap()).to_string()
        };
        assert_eq!(with("score = score;"), "forward-bf16-d64-causal");
        assert!(with("score = score * 2.0;").starts_with("forward-bf16-d64-causal-s"));
        assert_ne!(with("score = score * 2.0;"), with("score = score * 3.0;"));
    }
}

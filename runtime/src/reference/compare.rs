//! Is a result right?
use super::{HostTensor, Rows};
use flashtune_codegen::DType;
use std::fmt;

/// How a result compares with the oracle.
#[derive(Debug, Clone, PartialEq)]
pub struct Verdict {
    /// Largest absolute error of O over finite elements.
    pub max_error: f64,
    /// What `max_error` may be: twice the error of unfused attention plus a floor.
    pub bound: f64,
    /// Largest absolute error of the LSE; 0 when it was not asked for.
    pub lse_error: f64,
    /// What `lse_error` may be.
    pub lse_bound: f64,
    /// Number of rows compared.
    pub rows: usize,
    /// What is wrong, if anything, in words.
    pub failure: Option<String>,
}

impl Verdict {
    /// Whether the result is right.
    pub fn passed(&self) -> bool {
        self.failure.is_none()
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, _f: &mut fmt::Formatter<'_>) -> fmt::Result {
        todo!()
    }
}

/// Compares O (and the LSE, contiguous `[batch, heads, q_len]`) with the oracle's rows.
pub fn compare(_o: &HostTensor, _lse: Option<&[f32]>, _oracle: &Rows, _unfused: &Rows, _dtype: DType) -> Verdict {
    todo!()
}

//! Sums of ints, the normal form of everything that `+`, `-` and products with constants are made of.

use crate::score::syntax::words::Id;

/// `sum of coefficient * node + constant`, in 64 bits that wrap around; nodes in the order of [`super::Graph::key`],
/// none twice, no coefficient 0.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub(crate) struct Linear {
    /// Coefficients and nodes.
    pub terms: Vec<(i64, Id)>,
    /// What is added.
    pub constant: i64,
}

impl Linear {
    /// Every coefficient and the constant times a factor.
    pub(crate) fn scaled(&self, factor: i64) -> Linear {
        let terms = self.terms.iter().map(|(c, t)| (c.wrapping_mul(factor), *t)).filter(|(c, _)| *c != 0);
        Linear { terms: terms.collect(), constant: self.constant.wrapping_mul(factor) }
    }
}

/// The greatest common divisor; of 0 and x, x.
pub(in crate::score) fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

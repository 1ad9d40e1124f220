//! Sums of ints, the normal form of everything that `+`, `-` and products with constants are made of.

use super::graph::{Graph, Id};

/// `sum of coefficient * node + constant`, in 64 bits that wrap around; nodes in the order of [`Graph::key`], none twice,
/// no coefficient 0.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Linear {
    /// Coefficients and nodes.
    pub terms: Vec<(i64, Id)>,
    /// What is added.
    pub constant: i64,
}

impl Linear {
    /// The sum of two.
    pub fn plus(&self, graph: &Graph, other: &Linear) -> Linear {
        let mut terms = Vec::with_capacity(self.terms.len() + other.terms.len());
        let (mut a, mut b) = (self.terms.iter().copied().peekable(), other.terms.iter().copied().peekable());
        loop {
            let term = match (a.peek(), b.peek()) {
                (None, None) => break,
                (Some((c, x)), Some((d, y))) if x == y => {
                    let both = (c.wrapping_add(*d), *x);
                    b.next();
                    a.next();
                    both
                }
                (Some((_, x)), Some((_, y))) if graph.key(*x) > graph.key(*y) => b.next().expect("peeked"),
                (Some(_), _) => a.next().expect("peeked"),
                (None, Some(_)) => b.next().expect("peeked"),
            };
            if term.0 != 0 {
                terms.push(term);
            }
        }
        Linear { terms, constant: self.constant.wrapping_add(other.constant) }
    }

    /// Every coefficient and the constant times a factor.
    pub fn scaled(&self, factor: i64) -> Linear {
        let terms = self.terms.iter().map(|(c, t)| (c.wrapping_mul(factor), *t)).filter(|(c, _)| *c != 0);
        Linear { terms: terms.collect(), constant: self.constant.wrapping_mul(factor) }
    }
}

/// The greatest common divisor; of 0 and x, x.
pub(super) fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

//! What a call demands of its kernel beyond problem and sizes: a set of facts that do not exclude each other.

use std::fmt;

/// One demand.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Constraint {
    /// The attention weights are wanted, beside O and the LSE.
    Weights,
    /// Rows start at addresses that are no multiples of 16 bytes.
    Unaligned,
    /// A tensor has strides that TMA does not take ([`crate::unaddressable`]).
    Strided,
    /// A bias of the score program cannot be loaded by TMA ([`crate::has_loose_biases`]).
    LooseBiases,
}

impl Constraint {
    /// All of them, those that leave the fewest families first.
    pub const ALL: [Constraint; 4] =
        [Constraint::Weights, Constraint::Unaligned, Constraint::Strided, Constraint::LooseBiases];

    /// A word for it.
    pub const fn name(self) -> &'static str {
        match self {
            Constraint::Weights => "weights",
            Constraint::Unaligned => "unaligned",
            Constraint::Strided => "strided",
            Constraint::LooseBiases => "loose biases",
        }
    }
}

/// A set of [`Constraint`]s; the empty one is that of usual calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Constraints(u8);

impl Constraints {
    /// Nothing beyond problem and sizes.
    pub const NONE: Constraints = Constraints(0);

    /// The set with one more.
    #[must_use]
    pub const fn with(self, constraint: Constraint) -> Self {
        Self(self.0 | 1 << constraint as u8)
    }

    /// The set with one more, if so.
    #[must_use]
    pub const fn with_if(self, constraint: Constraint, demanded: bool) -> Self {
        if demanded { self.with(constraint) } else { self }
    }

    /// Whether it is demanded.
    pub const fn has(self, constraint: Constraint) -> bool {
        self.0 & 1 << constraint as u8 != 0
    }

    /// Whether nothing is.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Those of both sets.
    #[must_use]
    pub const fn among(self, others: Constraints) -> Self {
        Self(self.0 & others.0)
    }

    /// The demands, those that leave the fewest families first.
    pub fn iter(self) -> impl Iterator<Item = Constraint> {
        Constraint::ALL.into_iter().filter(move |c| self.has(*c))
    }
}

impl From<Constraint> for Constraints {
    fn from(constraint: Constraint) -> Self {
        Self::NONE.with(constraint)
    }
}

impl fmt::Display for Constraints {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.iter().map(Constraint::name).collect();
        f.write_str(if names.is_empty() { "usual" } else { "" })?;
        f.write_str(&names.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_hold_what_was_put_in() {
        let both = Constraints::from(Constraint::Strided).with(Constraint::Weights);
        assert!(both.has(Constraint::Weights) && both.has(Constraint::Strided) && !both.has(Constraint::Unaligned));
        assert_eq!(both.to_string(), "weights, strided");
        assert_eq!(both.among(Constraint::Strided.into()), Constraint::Strided.into());
        assert_eq!(Constraints::NONE.with_if(Constraint::LooseBiases, false).to_string(), "usual");
    }
}

//! What a tuning result is filed by beside the lengths: how the keys of a ragged batch lie.

use crate::{Constraint, Constraints, Error, Result, Shape};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// The largest class of pages: a block of keys of every schedule lies in one page from here on.
const LARGEST: u32 = 256;

/// How the keys of a sequence lie, as far as results are filed by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize)]
pub enum PageClass {
    /// Side by side, in dense tensors.
    #[default]
    Dense,
    /// Of a ragged batch, in one piece for each sequence: packed, or in slots of a dense cache.
    Whole,
    /// Of a ragged batch, in pages of so many tokens: a power of two from 1 to 256.
    Tokens(u32),
}

impl PageClass {
    /// The class of pages of so many tokens: rounded up to a power of two, and large ones together.
    pub fn of_pages(tokens: u32) -> Self {
        PageClass::Tokens(tokens.clamp(1, LARGEST).next_power_of_two())
    }

    /// Whether it is the class of dense tensors.
    pub const fn is_dense(self) -> bool {
        matches!(self, PageClass::Dense)
    }

    /// Tokens of a page, where there are pages.
    pub const fn tokens(self) -> Option<u32> {
        match self {
            PageClass::Tokens(tokens) => Some(tokens),
            PageClass::Dense | PageClass::Whole => None,
        }
    }

    /// What pages of the class demand of a kernel: those of less than 16 tokens are not found by TMA.
    pub fn demands(self) -> Constraints {
        Constraints::NONE.with_if(Constraint::Strided, self.tokens().is_some_and(|tokens| tokens < 16))
    }

    /// How far two classes are apart, in doublings of a length: on an H200 all pages of 1 to 256 tokens and none took
    /// the same time within 1 %, so they decide among results that are otherwise as near.
    pub(crate) fn distance(self, other: Self) -> f64 {
        match (self, other) {
            (PageClass::Tokens(a), PageClass::Tokens(b)) => {
                let log = |n: u32| f64::from(n.max(1)).log2();
                0.1 * (log(a) - log(b)).abs()
            }
            (a, b) if a == b => 0.0,
            _ => 0.5,
        }
    }
}

impl fmt::Display for PageClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PageClass::Dense => f.write_str("dense"),
            PageClass::Whole => f.write_str("packed"),
            PageClass::Tokens(tokens) => write!(f, "pages of {tokens}"),
        }
    }
}

impl FromStr for PageClass {
    type Err = Error;

    /// `packed`, or the tokens of a page.
    fn from_str(s: &str) -> Result<Self> {
        let tokens = || s.bytes().all(|b| b.is_ascii_digit()).then(|| s.parse::<u32>().ok())?.filter(|n| *n > 0);
        match s {
            "packed" => Ok(PageClass::Whole),
            _ => tokens().map(Self::of_pages).ok_or_else(|| {
                Error::parse("page size", s, "the tokens of a page such as 16, or `packed` for sequences in one piece")
            }),
        }
    }
}

/// The sizes that a kernel is chosen by: those of the call, or of a usual sequence of a ragged batch, and its pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CallSizes {
    /// Lengths, heads and the mask's reach.
    pub shape: Shape,
    /// How keys lie.
    pub pages: PageClass,
}

impl CallSizes {
    /// Those of a ragged batch.
    pub const fn ragged(shape: Shape, pages: PageClass) -> Self {
        Self { shape, pages }
    }
}

impl From<&Shape> for CallSizes {
    fn from(shape: &Shape) -> Self {
        Self { shape: *shape, pages: PageClass::Dense }
    }
}

impl fmt::Display for CallSizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.pages {
            PageClass::Dense => self.shape.fmt(f),
            pages => write!(f, "{} {pages}", self.shape),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_classes_round_up_and_are_read_as_written() {
        let of = |tokens| PageClass::of_pages(tokens).tokens();
        assert_eq!([0, 1, 5, 16, 17, 256, 4096].map(of), [1, 1, 8, 16, 32, 256, 256].map(Some));
        assert_eq!("packed".parse(), Ok(PageClass::Whole));
        assert_eq!("48".parse(), Ok(PageClass::Tokens(64)));
        for bad in ["", "0", "-1", "+4", "dense", "16 tokens", "99999999999"] {
            assert!(bad.parse::<PageClass>().unwrap_err().to_string().contains("packed"), "{bad}");
        }
    }

    #[test]
    fn page_classes_weigh_less_than_any_length() {
        let all = [PageClass::Whole, PageClass::Tokens(1), PageClass::Tokens(16), PageClass::Tokens(256)];
        for (a, b) in all.into_iter().flat_map(|a| all.map(|b| (a, b))) {
            assert!((0.0..1.0).contains(&a.distance(b)) && (a.distance(b) == 0.0) == (a == b), "{a} {b}");
        }
    }
}

//! Which keys a query may attend to.
//!
//! Query row `i` of `q_len` sits at position `i + kv_len - q_len` among the keys (bottom-right alignment). A mask
//! bounds the distance to the left, to the right, or both. Which sides are bounded is compiled into the kernel
//! ([`MaskKind`]); how far they reach is a run-time size, so one kernel serves every window length.

use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// The mask as a caller states it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub enum Mask {
    /// Every query attends to every key.
    #[default]
    Full,
    /// Query `i` attends to keys up to its own position, aligned to the bottom right.
    Causal,
    /// Query at position `p` attends to keys in `[p - left, p + right]`; `None` leaves a side unbounded.
    Window {
        /// Keys visible before the query's position.
        #[serde(default, skip_serializing_if = "crate::omitted::is_default")]
        left: Option<u32>,
        /// Keys visible after the query's position.
        #[serde(default, skip_serializing_if = "crate::omitted::is_default")]
        right: Option<u32>,
    },
}

/// Which sides of the window are bounded: the part of a mask that a kernel is specialised to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MaskKind {
    /// Keys far before the query's position are masked.
    #[serde(default, skip_serializing_if = "crate::omitted::is_default")]
    pub left: bool,
    /// Keys after the query's position (plus `right`) are masked.
    #[serde(default, skip_serializing_if = "crate::omitted::is_default")]
    pub right: bool,
}

impl Mask {
    /// The sides that are bounded.
    pub fn kind(self) -> MaskKind {
        let (left, right) = self.window();
        MaskKind { left: left.is_some(), right: right.is_some() }
    }

    /// The reach to the left and right; causal is `(None, Some(0))`.
    pub fn window(self) -> (Option<u32>, Option<u32>) {
        match self {
            Mask::Full => (None, None),
            Mask::Causal => (None, Some(0)),
            Mask::Window { left, right } => (left, right),
        }
    }

    /// The keys `[begin, end)` that query `i` attends to. The single definition that every oracle uses.
    pub fn live(self, i: u64, q_len: u64, kv_len: u64) -> std::ops::Range<u64> {
        let (left, right) = self.window();
        let position = i as i128 + kv_len as i128 - q_len as i128;
        let end = right.map_or(kv_len as i128, |r| position + r as i128 + 1).clamp(0, kv_len as i128);
        let begin = left.map_or(0, |l| position - l as i128).clamp(0, end);
        begin as u64..end as u64
    }

    /// Number of (query, key) pairs that are attended: what FLOP counts are based on.
    pub fn live_pairs(self, q_len: u64, kv_len: u64) -> u128 {
        if self == Mask::Full {
            return q_len as u128 * kv_len as u128;
        }
        (0..q_len)
            .map(|i| {
                let r = self.live(i, q_len, kv_len);
                (r.end - r.start) as u128
            })
            .sum()
    }
}

impl MaskKind {
    /// No side is bounded.
    pub const FULL: MaskKind = MaskKind { left: false, right: false };
    /// Only the right side is bounded.
    pub const CAUSAL: MaskKind = MaskKind { left: false, right: true };
    /// All four kinds.
    pub const ALL: [MaskKind; 4] =
        [MaskKind::FULL, MaskKind::CAUSAL, MaskKind { left: true, right: false }, MaskKind { left: true, right: true }];

    /// Whether any side is bounded.
    pub fn any(self) -> bool {
        self.left || self.right
    }

    /// The name used in kernel names: `full`, `causal`, `left` or `window`.
    pub const fn name(self) -> &'static str {
        match (self.left, self.right) {
            (false, false) => "full",
            (false, true) => "causal",
            (true, false) => "left",
            (true, true) => "window",
        }
    }
}

impl fmt::Display for MaskKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for Mask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let side = |s: Option<u32>| s.map_or("-".to_owned(), |n| n.to_string());
        match *self {
            Mask::Full => f.write_str("full"),
            Mask::Causal => f.write_str("causal"),
            Mask::Window { left, right } => write!(f, "window:{},{}", side(left), side(right)),
        }
    }
}

impl FromStr for Mask {
    type Err = Error;
    fn from_str(s: &str) -> Result<Self> {
        let bad =
            || Error::parse("mask", s, "full, causal, or window:LEFT,RIGHT with a number or - for an unbounded side");
        match s {
            "full" | "none" => return Ok(Mask::Full),
            "causal" => return Ok(Mask::Causal),
            _ => {}
        }
        let (left, right) = s.strip_prefix("window:").and_then(|w| w.split_once(',')).ok_or_else(bad)?;
        let side = |t: &str| match t.trim() {
            "-" | "-1" => Ok(None),
            n => n.parse::<u32>().map(Some).map_err(|_| bad()),
        };
        Ok(Mask::Window { left: side(left)?, right: side(right)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for m in [Mask::Full, Mask::Causal, Mask::Window { left: Some(1024), right: None }] {
            assert_eq!(m.to_string().parse::<Mask>().unwrap(), m);
        }
        for bad in ["", "window", "window:", "window:1", "window:a,b", "window:-2,0", "casual"] {
            assert!(bad.parse::<Mask>().is_err(), "{bad}");
        }
    }

    #[test]
    fn causal_is_bottom_right_aligned() {
        assert_eq!(Mask::Causal.live(0, 2, 5), 0..4);
        assert_eq!(Mask::Causal.live(1, 2, 5), 0..5);
        // More queries than keys: the first rows have nothing to attend to.
        assert_eq!(Mask::Causal.live(2, 5, 2), 0..0);
        assert_eq!(Mask::Causal.live(3, 5, 2), 0..1);
    }

    #[test]
    fn live_pairs_of_a_square_causal_is_the_triangle() {
        assert_eq!(Mask::Causal.live_pairs(4, 4), 10);
        assert_eq!(Mask::Window { left: Some(1), right: Some(0) }.live_pairs(4, 4), 7);
        let huge = Mask::Window { left: Some(u32::MAX), right: Some(u32::MAX) };
        assert_eq!(huge.live_pairs(3, 5), 15);
    }
}

//! What is known of an int: the least and the greatest value that it can have.

/// Integers from `lo` to `hi`, both included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Range {
    /// The smallest.
    pub lo: i64,
    /// The largest.
    pub hi: i64,
}

impl Range {
    /// Every 64-bit integer.
    pub const FULL: Range = Range { lo: i64::MIN, hi: i64::MAX };
    /// Every 32-bit integer.
    pub const I32: Range = Range { lo: i32::MIN as i64, hi: i32::MAX as i64 };

    /// One value.
    pub const fn point(x: i64) -> Self {
        Range { lo: x, hi: x }
    }

    /// The range between two bounds computed without overflow; everything if one does not fit, since it would wrap.
    pub fn checked(lo: i128, hi: i128) -> Self {
        match (i64::try_from(lo), i64::try_from(hi)) {
            (Ok(lo), Ok(hi)) => Range { lo, hi },
            _ => Range::FULL,
        }
    }

    /// Whether the values fit in 32 bits.
    pub fn is_i32(self) -> bool {
        Range::I32.contains(self)
    }

    /// Whether every value of the other is one of these.
    pub fn contains(self, other: Range) -> bool {
        self.lo <= other.lo && other.hi <= self.hi
    }

    /// Whether it is one value.
    pub fn is_point(self) -> bool {
        self.lo == self.hi
    }

    /// The largest magnitude.
    pub fn magnitude(self) -> u64 {
        self.lo.unsigned_abs().max(self.hi.unsigned_abs())
    }
}

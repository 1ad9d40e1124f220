//! Run-time sizes, and the buckets that tuning results are filed under.

use crate::{CallSizes, Error, Mask, Op, PageClass, Problem, Result};
use serde::{Deserialize, Serialize};
use std::fmt;

/// The sizes of one call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shape {
    /// Number of sequences.
    pub batch: u32,
    /// Number of query heads; a multiple of `kv_heads`.
    pub heads: u32,
    /// Number of key/value heads.
    pub kv_heads: u32,
    /// Rows of Q and O per head.
    pub q_len: u32,
    /// Rows of K and V per head.
    pub kv_len: u32,
    /// The mask with its run-time reach.
    #[serde(default, skip_serializing_if = "crate::omitted::is_default")]
    pub mask: Mask,
}

impl Shape {
    /// Checks head counts and lengths. Zero sizes are legal: they mean an empty or all-masked output.
    pub fn validate(&self) -> Result<()> {
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Err(Error::unsupported(
                "heads",
                self.heads,
                format!("query heads must be a multiple of the {} KV heads", self.kv_heads),
                "check the heads axis of Q against that of K and V",
            ));
        }
        for (field, n) in [("batch", self.batch), ("heads", self.heads)] {
            if n > i32::MAX as u32 {
                return Err(Error::unsupported(field, n, "below 2^31", "split the batch"));
            }
        }
        // Kernels count rows in i32 and add a block to the last row.
        for (field, n) in [("q_len", self.q_len), ("kv_len", self.kv_len)] {
            if n > (1 << 30) {
                return Err(Error::unsupported(field, n, "at most 2^30 rows per head", "split the sequence"));
            }
        }
        Ok(())
    }

    /// Query heads per KV head (1 for MHA).
    pub fn group(&self) -> u32 {
        self.heads.checked_div(self.kv_heads).unwrap_or(1).max(1)
    }

    /// Whether there is nothing to compute (no output element exists).
    pub fn is_empty(&self) -> bool {
        self.batch == 0 || self.heads == 0 || self.q_len == 0
    }

    /// Floating-point operations of a forward pass, counted on live scores: `2 * pairs * (dqk + dv)` per head.
    pub fn forward_flops(&self, head_dim_qk: u32, head_dim_v: u32) -> f64 {
        let pairs = self.mask.live_pairs(self.q_len as u64, self.kv_len as u64) as f64;
        2.0 * pairs * (head_dim_qk + head_dim_v) as f64 * self.batch as f64 * self.heads as f64
    }

    /// The fewest bytes a forward pass can move: Q, K, V read once and O written once, of elements of so many bytes.
    pub fn forward_bytes(&self, head_dim_qk: u32, head_dim_v: u32, [operand, output]: [usize; 2]) -> f64 {
        let bytes = |dim: u32, element: usize| dim as f64 * element as f64;
        let rows = self.heads as f64 * self.q_len as f64 * (bytes(head_dim_qk, operand) + bytes(head_dim_v, output));
        let keys = self.kv_heads as f64 * self.kv_len as f64 * bytes(head_dim_qk + head_dim_v, operand);
        self.batch as f64 * (rows + keys)
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shape { batch, heads, kv_heads, q_len, kv_len, mask } = self;
        write!(f, "b{batch} h{heads}/{kv_heads} {q_len}x{kv_len} {mask}")
    }
}

/// The class of shapes that share one tuning result.
///
/// Lengths and the number of (batch, head) pairs are rounded up to powers of two: a schedule's merit changes with the
/// order of magnitude (waves over the device, blocks per row), not with the exact size.
///
/// Of a ragged batch the numbers are others, as its kernels share all keys among the multiprocessors and keep the rows
/// of a KV head's group together: (sequence, KV head) pairs, packed rows, and keys for each multiprocessor. Nothing of
/// it changes with the skew of the lengths, which is the device's own matter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShapeBucket {
    /// `batch * heads`, rounded up to a power of two; of a ragged batch `batch * kv_heads`.
    pub parallel: u32,
    /// Query heads per KV head, exact; 1 of a ragged batch, whose rows have them.
    #[serde(default = "crate::omitted::one", skip_serializing_if = "crate::omitted::is_one")]
    pub group: u32,
    /// `q_len`, rounded up to a power of two; of a ragged batch the rows of a KV head: `q_len * group`.
    pub q_len: u32,
    /// `kv_len`, rounded up to a power of two; of a ragged batch the keys of all sequences and KV heads for each
    /// multiprocessor (or core) of the device, as far as a window lets any row see them.
    pub kv_len: u32,
    /// Reach of a two-sided window (left + right + 1), rounded up to a power of two and capped at the keys of a
    /// sequence; 0 when the window does not bound the work.
    #[serde(default, skip_serializing_if = "crate::omitted::is_default")]
    pub window: u32,
    /// How keys lie, where the batch is ragged.
    #[serde(default, skip_serializing_if = "crate::omitted::is_default")]
    pub pages: PageClass,
}

fn round_up(n: u64) -> u32 {
    n.clamp(1, 1 << 31).next_power_of_two() as u32
}

impl ShapeBucket {
    /// The bucket of a shape of dense tensors.
    pub fn of(shape: &Shape) -> Self {
        let kv_len = round_up(shape.kv_len as u64);
        Self {
            parallel: round_up(shape.batch as u64 * shape.heads as u64),
            group: shape.group(),
            q_len: round_up(shape.q_len as u64),
            kv_len,
            window: window_of(shape, kv_len),
            pages: PageClass::Dense,
        }
    }

    /// The bucket of a call of a problem on a device of so many multiprocessors or cores: [`ShapeBucket::of`], unless
    /// it is the attention of a ragged batch, whose sizes are those of a usual sequence.
    pub fn of_call(problem: &Problem, sizes: &CallSizes, units: u32) -> Self {
        let CallSizes { shape, pages } = sizes;
        if problem.kv.is_dense() || problem.op != Op::Forward {
            return Self::of(shape);
        }
        let pairs = shape.batch as u64 * shape.kv_heads as u64;
        let kv_len = shape.kv_len as u64;
        let seen = match shape.mask.window() {
            (Some(left), Some(right)) => kv_len.min(left as u64 + right as u64 + shape.q_len as u64),
            _ => kv_len,
        };
        Self {
            parallel: round_up(pairs),
            group: 1,
            q_len: round_up(shape.q_len as u64 * shape.group() as u64),
            kv_len: round_up(pairs.saturating_mul(seen).div_ceil(units.max(1) as u64)),
            window: window_of(shape, round_up(kv_len)),
            pages: if pages.is_dense() { PageClass::Whole } else { *pages },
        }
    }

    /// How far two buckets are apart, in doublings; 0 means the same bucket. Lengths weigh more than parallelism,
    /// because the block sizes follow them.
    pub fn distance(&self, other: &Self) -> f64 {
        self.place().distance(&other.place())
    }

    /// Where the bucket lies, for whoever compares it with many.
    pub fn place(&self) -> BucketPlace {
        let log = |n: u32| f64::from(n.max(1)).log2();
        BucketPlace {
            q_len: log(self.q_len),
            kv_len: log(self.kv_len),
            parallel: log(self.parallel),
            group: log(self.group),
            window: (self.window != 0).then(|| log(self.window)),
            pages: self.pages,
        }
    }
}

fn window_of(shape: &Shape, kv_len: u32) -> u32 {
    match shape.mask.window() {
        (Some(l), Some(r)) => round_up(l as u64 + r as u64 + 1).min(kv_len),
        _ => 0,
    }
}

/// The logarithms of a bucket's sizes: its distance from another is then a few additions.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BucketPlace {
    q_len: f64,
    kv_len: f64,
    parallel: f64,
    group: f64,
    window: Option<f64>,
    pages: PageClass,
}

impl BucketPlace {
    /// As [`ShapeBucket::distance`].
    pub fn distance(&self, other: &Self) -> f64 {
        self.lengths_apart(other)
            + 0.5 * (self.parallel - other.parallel).abs()
            + 0.25 * (self.group - other.group).abs()
            + match (self.window, other.window) {
                (Some(own), Some(others)) => (own - others).abs(),
                (None, None) => 0.0,
                _ => 2.0,
            }
            + self.pages.distance(other.pages)
    }

    /// The part of the distance that the lengths make: it is never less.
    pub fn lengths_apart(&self, other: &Self) -> f64 {
        2.0 * (self.q_len - other.q_len).abs() + (self.kv_len - other.kv_len).abs()
    }
}

impl fmt::Display for ShapeBucket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { parallel, group, q_len, kv_len, window, pages } = self;
        match pages {
            PageClass::Dense => write!(f, "p{parallel}g{group}q{q_len}k{kv_len}")?,
            // Packed rows, and keys of a multiprocessor.
            _ => write!(f, "p{parallel}r{q_len}m{kv_len}")?,
        }
        if *window != 0 {
            write!(f, "w{window}")?;
        }
        pages.tokens().map_or(Ok(()), |tokens| write!(f, "pg{tokens}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, KvKind};

    fn shape(q: u32, kv: u32) -> Shape {
        Shape { batch: 2, heads: 12, kv_heads: 4, q_len: q, kv_len: kv, mask: Mask::Causal }
    }

    #[test]
    fn buckets_round_up_and_measure_distance() {
        let b = ShapeBucket::of(&shape(1000, 1025));
        assert_eq!(
            b,
            ShapeBucket { parallel: 32, group: 3, q_len: 1024, kv_len: 2048, window: 0, pages: PageClass::Dense }
        );
        assert_eq!(b.distance(&b), 0.0);
        assert!(b.distance(&ShapeBucket::of(&shape(4096, 4096))) > b.distance(&ShapeBucket::of(&shape(1024, 1024))));
    }

    #[test]
    fn ragged_classes_go_by_packed_rows_and_keys_of_a_multiprocessor() {
        let ragged = Problem::forward(DType::Bf16, 128, Mask::Causal.kind()).unwrap().with_kv(KvKind::RAGGED);
        let of = |shape: Shape, tokens, units| {
            ShapeBucket::of_call(&ragged, &CallSizes::ragged(shape, PageClass::of_pages(tokens)), units)
        };
        let decode = Shape { batch: 16, heads: 32, kv_heads: 8, q_len: 1, kv_len: 8192, mask: Mask::Causal };
        let class = of(decode, 16, 132);
        assert_eq!(class.to_string(), "p128r4m8192pg16");
        // As many keys in other sequences' shares, and as many rows in another group, are the same class.
        assert_eq!(of(Shape { heads: 16, q_len: 2, ..decode }, 13, 132), class);
        assert_eq!(of(Shape { kv_len: 7000, ..decode }, 16, 114), class);
        assert_ne!(of(Shape { kv_len: 4096, ..decode }, 16, 132), class);
        assert_ne!(of(decode, 64, 132), class);
        assert_ne!(of(decode, 16, 16), class);
        // What is in reach of a window counts, and not what lies before.
        let window = Mask::Window { left: Some(127), right: Some(0) };
        let windows = [8192, 32768].map(|kv_len| of(Shape { kv_len, mask: window, ..decode }, 16, 132));
        assert_eq!(windows[0], windows[1]);
        assert_eq!(windows[0].to_string(), "p128r4m128w128pg16");
        // Sequences in one piece need not say so; dense problems and appends have the classes of dense tensors.
        assert_eq!(ShapeBucket::of_call(&ragged, &(&decode).into(), 132).to_string(), "p128r4m8192");
        for problem in [Problem { kv: KvKind::Dense, ..ragged }, Problem { op: Op::Append, ..ragged }] {
            assert_eq!(ShapeBucket::of_call(&problem, &(&decode).into(), 132), ShapeBucket::of(&decode));
        }
        assert!((0.3..1.0).contains(&of(decode, 64, 132).distance(&ShapeBucket { pages: PageClass::Whole, ..class })));
    }

    #[test]
    fn zero_sizes_are_legal_and_bad_groups_are_not() {
        assert!(Shape { batch: 0, heads: 0, kv_heads: 0, ..shape(0, 0) }.validate().is_ok());
        assert!(Shape { heads: 10, ..shape(8, 8) }.validate().is_err());
        assert!(Shape { kv_heads: 0, ..shape(8, 8) }.validate().is_err());
        assert!(Shape { batch: 1 << 31, ..shape(8, 8) }.validate().unwrap_err().to_string().contains("batch"));
    }
}

//! The first launch of a candidate on the job's own tensors: a small part of the grid, so that one that hangs or strays
//! there is met while it has little of the device and a limit of its own.
//!
//! Same kernel, same addresses but for the first row, same strides, all of the keys: whole sequences and KV heads are
//! left out first, and where there are too few of them, the first rows of Q (masks are aligned at the last ones).

use flashtune_codegen::abi::ForwardArgs;
use flashtune_codegen::{DType, Shape};

/// The grid is divided by this at least, as far as it can be divided.
pub(super) const PARTS: u64 = 16;

/// A part of a job's grid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct GridPart {
    /// The sizes that are launched.
    pub shape: Shape,
    /// The first row of Q and O of every head that belongs to it; the others up to the last follow.
    pub first_row: u32,
}

impl GridPart {
    /// One part of [`PARTS`] of the rows of O, or the last row of one KV head.
    pub(crate) fn of(whole: &Shape) -> Self {
        let (heads, parts) = Self::with_all_rows(whole);
        let q_len = share(whole.q_len, parts);
        Self { shape: Shape { q_len, ..heads.shape }, first_row: whole.q_len - q_len }
    }

    /// The same for a ragged batch: with all rows of its sequences, whose places the device alone knows.
    pub(crate) fn of_heads(whole: &Shape) -> Self {
        Self::with_all_rows(whole).0
    }

    /// The first sequences and KV heads, and how much smaller it should still become.
    fn with_all_rows(whole: &Shape) -> (Self, u64) {
        let taken = |n: u32, kept: u32, parts: u64| (parts * u64::from(kept)).div_ceil(u64::from(n.max(1)));
        let batch = share(whole.batch, PARTS);
        let parts = taken(whole.batch, batch, PARTS);
        let kv_heads = share(whole.kv_heads, parts);
        let shape = Shape { batch, kv_heads, heads: kv_heads * whole.group(), ..*whole };
        (Self { shape, first_row: 0 }, taken(whole.kv_heads, kv_heads, parts))
    }

    /// The arguments of a launch of the part, from those of the whole.
    pub(crate) fn args(&self, whole: &ForwardArgs, dtype: DType, o_dtype: DType) -> ForwardArgs {
        let skipped = |stride: i64, dtype: DType| (i64::from(self.first_row) * stride * dtype.bytes() as i64) as u64;
        let Shape { batch, heads, kv_heads, q_len, .. } = self.shape;
        ForwardArgs {
            q: whole.q + skipped(whole.q_stride[2], dtype),
            o: whole.o + skipped(whole.o_stride[2], o_dtype),
            batch: batch as i32,
            heads: heads as i32,
            kv_heads: kv_heads as i32,
            q_len: q_len as i32,
            ..*whole
        }
    }

    /// Whether a row of O belongs to it.
    pub(crate) fn holds(&self, batch: usize, head: usize, row: usize) -> bool {
        let Shape { batch: batches, heads, .. } = self.shape;
        batch < batches as usize && head < heads as usize && row >= self.first_row as usize
    }
}

/// One of so many parts of a size, in whole units of it.
fn share(n: u32, parts: u64) -> u32 {
    ((u64::from(n) / parts.max(1)) as u32).clamp(1, n.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashtune_codegen::Mask;

    #[test]
    fn a_part_is_a_sixteenth_of_the_rows_at_most_or_as_few_as_there_can_be() {
        let mut tried = 0;
        for batch in [1, 2, 3, 15, 16, 17, 33, 64] {
            for kv_heads in [1, 2, 3, 8, 40] {
                for group in [1, 4, 5] {
                    for q_len in [1, 2, 17, 100, 4096] {
                        let mask = Mask::Causal;
                        let whole = Shape { batch, heads: kv_heads * group, kv_heads, q_len, kv_len: 77, mask };
                        let GridPart { shape, first_row } = GridPart::of(&whole);
                        let rows = |s: &Shape| u64::from(s.batch) * u64::from(s.heads) * u64::from(s.q_len);
                        let smallest = shape.batch == 1 && shape.kv_heads == 1 && shape.q_len == 1;
                        assert!(PARTS * rows(&shape) <= rows(&whole) || smallest, "{whole}: {shape}");
                        assert!(shape.validate().is_ok() && shape.group() == group && shape.kv_len == 77, "{shape}");
                        assert_eq!(first_row + shape.q_len, q_len);
                        // Not so little that it shows nothing.
                        assert!(2 * 3 * PARTS * rows(&shape) >= rows(&whole) || q_len > 1, "{whole}: {shape}");
                        tried += 1;
                    }
                }
            }
        }
        assert_eq!(tried, 600);
    }

    #[test]
    fn rows_are_left_out_only_where_heads_and_sequences_do_not_suffice() {
        let whole = Shape { batch: 16, heads: 8, kv_heads: 2, q_len: 64, kv_len: 64, mask: Mask::Causal };
        assert_eq!(GridPart::of(&whole).shape, Shape { batch: 1, ..whole });
        let whole = Shape { batch: 1, heads: 32, kv_heads: 8, ..whole };
        assert_eq!(
            GridPart::of(&whole),
            GridPart { shape: Shape { heads: 4, kv_heads: 1, q_len: 32, ..whole }, first_row: 32 }
        );
    }

    #[test]
    fn the_arguments_are_those_of_the_last_rows() {
        let whole = Shape { batch: 2, heads: 2, kv_heads: 1, q_len: 100, kv_len: 50, mask: Mask::Full };
        let part = GridPart::of(&whole);
        let mut args: ForwardArgs = bytemuck::Zeroable::zeroed();
        (args.q, args.o, args.kv_len) = (1 << 20, 1 << 30, 50);
        (args.q_stride, args.o_stride) = ([0, 0, 64], [0, 0, 32]);
        let own = part.args(&args, DType::Bf16, DType::Bf16);
        assert_eq!((own.batch, own.heads, own.kv_heads, own.q_len, own.kv_len), (1, 2, 1, 12, 50));
        assert_eq!((own.q, own.o), ((1 << 20) + 88 * 128, (1 << 30) + 88 * 64));
        assert!(part.holds(0, 1, 88) && !part.holds(0, 1, 87) && !part.holds(1, 0, 99));
    }
}

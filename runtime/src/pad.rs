//! Copies of rows into rows of another length and place, as one launch takes them.

use crate::tensor::{error, outer, same_shape};
use crate::{Result, TensorView};
use flashtune_codegen::abi::{PAD_TENSORS, PadArgs};
use flashtune_codegen::{Error as CodegenError, Mask, PAD_ROWS, Shape};

/// The tensors that one launch copies: at most as many as a backward pass reads.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RowCopies {
    args: PadArgs,
    tensors: usize,
    blocks: u32,
    bytes: u64,
}

impl Default for RowCopies {
    fn default() -> Self {
        Self { args: bytemuck::Zeroable::zeroed(), tensors: 0, blocks: 0, bytes: 0 }
    }
}

impl RowCopies {
    /// Adds the rows of `from`, which go to the same places of `to`: cut off, or with zeros behind them, where its rows
    /// have another length.
    ///
    /// # Errors
    /// Other sizes or another dtype ([`crate::Error::Tensor`]); more rows than one launch counts, or
    /// more tensors than it takes.
    pub fn push(&mut self, name: &'static str, from: &TensorView, to: &TensorView) -> Result<()> {
        let [batch, heads, rows, dim] = from.shape;
        same_shape(name, to, [batch, heads, rows, to.shape[3]], "the sizes of what is copied")?;
        if from.dtype != to.dtype {
            return Err(error(
                name,
                "dtype",
                to.dtype,
                "both sides have one dtype",
                "copy into rows of the same dtype",
            ));
        }
        // The kernel moves 16-bit words, whatever they mean: f32 has two to an element.
        let words = from.dtype.bytes() as u64 / 2;
        let strides = |t: &TensorView| outer(t).map(|stride| stride * words as i64);
        let count = batch.saturating_mul(heads).saturating_mul(rows);
        let blocks = count.div_ceil(PAD_ROWS.into()).saturating_add(self.blocks.into());
        if count > i32::MAX as u64 || blocks > i32::MAX as u64 || self.tensors == PAD_TENSORS {
            let limit = format!("{PAD_TENSORS} tensors of less than 2^31 rows are copied at a time");
            return Err(CodegenError::unsupported("rows to pad", count, limit, "split the batch").into());
        }
        if count == 0 {
            return Ok(());
        }
        let (n, args) = (self.tensors, &mut self.args);
        (args.from[n], args.to[n]) = (from.address, to.address);
        args.from_stride[3 * n..3 * n + 3].copy_from_slice(&strides(from));
        args.to_stride[3 * n..3 * n + 3].copy_from_slice(&strides(to));
        (args.heads[n], args.rows[n], args.count[n]) = (heads as i32, rows as i32, count as i32);
        (args.from_dim[n], args.to_dim[n]) = ((words * dim) as i32, (words * to.shape[3]) as i32);
        // Blocks behind the last tensor's are none of those that follow.
        args.blocks_end[n..].fill(blocks as i32);
        (self.tensors, self.blocks) = (n + 1, blocks as u32);
        self.bytes += 2 * words * count * (dim + to.shape[3]);
        Ok(())
    }

    /// Whether nothing is copied.
    pub fn is_empty(&self) -> bool {
        self.tensors == 0
    }

    /// Bytes that are read and written.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The sizes by which a launch goes.
    pub fn shape(&self) -> Shape {
        Shape { batch: 1, heads: 1, kv_heads: 1, q_len: self.blocks, kv_len: 0, mask: Mask::Full }
    }

    /// The kernel's arguments.
    pub fn args(&self) -> &PadArgs {
        &self.args
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashtune_codegen::DType;

    #[test]
    fn tensors_follow_each_other_in_whole_thread_blocks() {
        let t = |address, rows, dim| TensorView::bhsd(address, DType::Bf16, [2, 3, rows, dim]);
        let mut copies = RowCopies::default();
        copies.push("q", &t(2, 11, 59), &t(256, 11, 64)).unwrap();
        copies.push("k", &t(4, 0, 59), &t(512, 0, 64)).unwrap();
        copies.push("v", &t(6, 100, 33), &t(1024, 100, 40)).unwrap();
        let args = copies.args();
        assert_eq!(args.blocks_end, [2, 12, 12, 12, 12]);
        assert_eq!((args.from[..3].to_vec(), args.to[..2].to_vec()), (vec![2, 6, 0], vec![256, 1024]));
        assert_eq!((args.from_stride[3..6].to_vec(), args.to_dim[1]), (vec![9900, 3300, 33], 40));
        assert_eq!((copies.shape().q_len, copies.bytes()), (12, 2 * (66 * 123 + 600 * 73)));
        assert!(copies.push("q", &t(2, 5, 59), &t(2, 6, 64)).is_err());
        let f32 = |dim| TensorView::bhsd(8, DType::F32, [2, 3, 5, dim]);
        assert!(copies.push("q", &t(2, 5, 59), &f32(64)).is_err());
        copies.push("k", &f32(59), &f32(64)).unwrap();
        let args = copies.args();
        assert_eq!((args.from_stride[6..9].to_vec(), args.from_dim[2]), (vec![6 * 5 * 59, 2 * 5 * 59, 2 * 59], 118));
        assert_eq!((args.to_dim[2], copies.bytes()), (128, 2 * (66 * 123 + 600 * 73) + 4 * 30 * 123));
        for _ in 0..2 {
            copies.push("q", &t(2, 1, 8), &t(4, 1, 8)).unwrap();
        }
        assert!(copies.push("q", &t(2, 1, 8), &t(4, 1, 8)).is_err(), "five at most");
    }
}

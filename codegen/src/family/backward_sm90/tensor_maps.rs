//! The tensor maps of `backward/sm90`.

use super::block_kv;
use crate::abi::BackwardArgs;
use crate::family::forward_sm90::{Tensor, TensorMapSpec, spec, why_unaddressable};
use crate::{Kernel, Schedule};

/// Elements of one row of a box: 128 bytes.
const BOX: u32 = 64;

/// Rows of a pack at most.
const MOST_ROWS: i64 = 1 << 30;

/// What the copy engine moves: of queries Q, dO and dQ, of keys K, V, dK and dV. Packed sequences are one entry of the
/// batch, with the rows of all.
fn tensors(args: &BackwardArgs) -> [Tensor; 7] {
    let (heads, kv_heads) = (args.heads as u64, args.kv_heads as u64);
    let (batch, rows, keys) = match args.q_begin {
        0 => (args.batch as u64, args.q_len as u64, args.kv_len as u64),
        _ => (1, args.q_rows as u64, args.kv_rows as u64),
    };
    let (queries, keys) = ([batch, heads, rows], [batch, kv_heads, keys]);
    [
        ("Q", args.q, args.q_stride, queries),
        ("dO", args.dout, args.dout_stride, queries),
        ("K", args.k, args.k_stride, keys),
        ("V", args.v, args.v_stride, keys),
        ("dQ", args.dq, args.dq_stride, queries),
        ("dK", args.dk, args.dk_stride, keys),
        ("dV", args.dv, args.dv_stride, keys),
    ]
}

/// Why TMA cannot address the tensors of a backward call, if it cannot ([`crate::unaddressable`]).
pub fn backward_unaddressable(args: &BackwardArgs) -> Option<String> {
    let most = args.q_rows.max(args.kv_rows);
    if args.q_begin != 0 && most > MOST_ROWS {
        return Some(format!("a pack of {most} rows: TMA counts rows in 31 bits, and tiles may lie past the last"));
    }
    why_unaddressable(&tensors(args))
}

impl Kernel {
    /// The maps of [`crate::abi::BackwardMappedArgs`] for one launch of `backward/sm90`; none for other families.
    pub fn backward_tensor_maps(&self, args: &BackwardArgs) -> Option<[TensorMapSpec; 7]> {
        let Schedule::BackwardSm90(s) = self.schedule else { return None };
        let p = &self.problem;
        let (qk, v) = (p.head_dim_qk, p.head_dim_v);
        let widths = [qk, v, qk, v, qk, qk, v];
        let keys = block_kv(p);
        let rows = [s.block_q, s.block_q, keys, keys, 64, 64, 64];
        let mut columns = widths.into_iter().zip(rows);
        Some(tensors(args).map(|(_, address, [batch, head, row], dims)| {
            let (width, rows) = columns.next().expect("as many as tensors");
            let dims = [u64::from(width), dims[2], dims[1], dims[0], 1];
            // Of a tensor without rows nothing is ever loaded or stored; one that exists keeps the encoder content.
            let exists = if tensors(args)[0].3[2] > 0 { args.q } else { args.k };
            let (address, dims) = if dims[1] == 0 { (exists, [u64::from(width), 1, 1, 1, 1]) } else { (address, dims) };
            spec(p.dtype, address, 4, dims, [row, head, batch, 0], [BOX, rows, 1, 1, 1])
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{hopper, problem, schedule};
    use super::*;
    use bytemuck::Zeroable;

    fn args() -> BackwardArgs {
        let strides = |heads: i64, rows: i64, dim: i64| [rows * heads * dim, dim, heads * dim];
        BackwardArgs {
            q: 0x1000,
            dout: 0x2000,
            k: 0x3000,
            v: 0x4000,
            dq: 0x5000,
            dk: 0x6000,
            dv: 0x7000,
            q_stride: strides(6, 100, 96),
            dout_stride: strides(6, 100, 40),
            k_stride: strides(2, 300, 96),
            v_stride: strides(2, 300, 40),
            dq_stride: strides(6, 100, 96),
            dk_stride: strides(2, 300, 96),
            dv_stride: strides(2, 300, 40),
            batch: 2,
            heads: 6,
            kv_heads: 2,
            q_len: 100,
            kv_len: 300,
            ..BackwardArgs::zeroed()
        }
    }

    fn maps(args: &BackwardArgs) -> [TensorMapSpec; 7] {
        let (problem, schedule) = (problem(96, 40), Schedule::BackwardSm90(schedule(96, 40)));
        Kernel { problem, schedule, arch: hopper() }.backward_tensor_maps(args).unwrap()
    }

    #[test]
    fn every_tensor_has_its_rows_and_its_box() {
        let [q, dout, k, v, dq, dk, dv] = maps(&args());
        assert_eq!((q.address, q.dims, q.tile), (0x1000, [96, 100, 6, 2, 1], [64, 64, 1, 1, 1]));
        assert_eq!(q.strides[..3], [6 * 192, 192, 100 * 6 * 192]);
        assert_eq!((dout.address, dout.dims, dout.tile), (0x2000, [40, 100, 6, 2, 1], q.tile));
        assert_eq!((k.address, k.dims, k.tile), (0x3000, [96, 300, 2, 2, 1], [64, 128, 1, 1, 1]));
        assert_eq!((v.address, v.dims, v.tile), (0x4000, [40, 300, 2, 2, 1], k.tile));
        assert_eq!((dq.address, dq.dims, dq.tile), (0x5000, q.dims, [64, 64, 1, 1, 1]));
        assert_eq!((dk.address, dk.dims, dv.address, dv.dims), (0x6000, k.dims, 0x7000, v.dims));
        assert_eq!((dk.tile, dv.tile, dv.strides[0]), ([64, 64, 1, 1, 1], [64, 64, 1, 1, 1], 2 * 80));
    }

    #[test]
    fn packed_sequences_are_one_entry_with_all_rows() {
        let packed = BackwardArgs { q_begin: 0x100, kv_begin: 0x200, q_rows: 150, kv_rows: 500, ..args() };
        let [q, _, k, _, dq, dk, _] = maps(&packed);
        assert_eq!((q.dims, dq.dims, k.dims, dk.dims), ([96, 150, 6, 1, 1], q.dims, [96, 500, 2, 1, 1], k.dims));
        let e = backward_unaddressable(&BackwardArgs { kv_rows: (1 << 30) + 1, ..packed }).unwrap();
        assert!(e.contains("1073741825 rows"), "{e}");
        assert_eq!(backward_unaddressable(&BackwardArgs { q_stride: [0, 96, 576], ..packed }), None);
    }

    #[test]
    fn tensors_without_rows_lie_where_others_do() {
        let [q, _, k, _, dq, dk, _] = maps(&BackwardArgs { q_len: 0, q: 0, dout: 0, dq: 0, ..args() });
        assert_eq!((q.address, q.dims, dq.address), (0x3000, [96, 1, 1, 1, 1], 0x3000));
        assert_eq!((k.address, dk.address, dk.dims), (0x3000, 0x6000, k.dims));
        let [q, _, k, v, ..] = maps(&BackwardArgs { kv_len: 0, ..args() });
        assert_eq!((q.address, k.address, v.dims), (0x1000, 0x1000, [40, 1, 1, 1, 1]));
    }

    #[test]
    fn what_the_copy_engine_cannot_address_is_told() {
        assert_eq!(backward_unaddressable(&args()), None);
        let says = |a: BackwardArgs| backward_unaddressable(&a).unwrap();
        assert!(says(BackwardArgs { dv: 8, ..args() }).contains("dV"));
        assert!(says(BackwardArgs { dout_stride: [0, 40, 240], ..args() }).contains("batch stride of dO"));
        assert!(says(BackwardArgs { dk_stride: [1 << 39, 96, 192], ..args() }).contains("2^39"));
        // O is read by threads.
        assert_eq!(backward_unaddressable(&BackwardArgs { o_stride: [0, 0, 40], ..args() }), None);
    }
}

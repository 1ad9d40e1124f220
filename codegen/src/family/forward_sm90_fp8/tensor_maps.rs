//! The tensor maps of Q, K and V: bytes, in boxes of 128 with the 128-byte swizzle. O leaves by ordinary stores.

use super::Sm90Fp8Schedule;
use crate::abi::ForwardArgs;
use crate::family::forward_sm90::{TensorMapSpec, spec};
use crate::{DType, Problem, Tiling};

/// Bytes, and elements, of one row of a box.
const BOX: u32 = 128;

/// The maps of Q, K and V for one launch, and in O's place that of Q again.
pub(in crate::family) fn maps(
    problem: &Problem,
    s: &Sm90Fp8Schedule,
    tiling: &Tiling,
    args: &ForwardArgs,
) -> [TensorMapSpec; 4] {
    let (heads, batch) = (tiling.unit_heads as u64, args.batch as u64);
    let [of_batch, of_head, of_row] = args.q_stride;
    let dims = [problem.head_dim_qk as u64, 1, args.q_len as u64, heads, batch];
    let q = spec(DType::E4m3, args.q, 5, dims, [of_head, of_row, of_head, of_batch], [BOX, 1, 64, 1, 1]);
    let keys = |address: u64, head_dim: u32, [batch, head, row]: [i64; 3]| {
        let dims = [head_dim as u64, args.kv_len as u64, args.kv_heads as u64, args.batch as u64, 1];
        // With no keys nothing is ever loaded; something that exists keeps the encoder content.
        let (address, dims) = match args.kv_len {
            0 => (args.q, [head_dim as u64, 1, 1, 1, 1]),
            _ => (address, dims),
        };
        spec(DType::E4m3, address, 4, dims, [row, head, batch, 0], [BOX, s.block_kv, 1, 1, 1])
    };
    let (k, v) = (keys(args.k, problem.head_dim_qk, args.k_stride), keys(args.v, problem.head_dim_v, args.v_stride));
    [q, k, v, q]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Kernel, Mask, MaskKind, Schedule, Shape, ShapeBucket};
    use bytemuck::Zeroable;

    #[test]
    fn boxes_are_128_bytes_wide_and_strides_are_bytes() {
        // [batch 2, rows 100, heads 8, 96], two KV heads of 300 rows, and of V 64 columns.
        let args = ForwardArgs {
            q: 0x1000,
            k: 0x2000,
            v: 0x3000,
            q_stride: [76800, 96, 768],
            k_stride: [57600, 96, 192],
            v_stride: [38400, 64, 128],
            batch: 2,
            heads: 8,
            kv_heads: 2,
            q_len: 100,
            kv_len: 300,
            ..ForwardArgs::zeroed()
        };
        let problem = Problem::forward_qk_v(DType::E4m3, 96, 64, MaskKind::CAUSAL).unwrap();
        let shape = Shape { batch: 2, heads: 8, kv_heads: 2, q_len: 100, kv_len: 300, mask: Mask::Causal };
        let schedule = Schedule::Sm90Fp8(Sm90Fp8Schedule::default_for(&problem, &ShapeBucket::of(&shape)));
        let kernel = Kernel { problem, schedule, arch: "sm_90a".parse().unwrap() };
        let tiling = kernel.plan(&shape).unwrap().tiling.unwrap();
        let [q, k, v, _] = kernel.tensor_maps(&tiling, &args).unwrap();
        assert_eq!((q.rank, q.dims, q.tile), (5, [96, 1, 100, 8, 2], [128, 1, 64, 1, 1]));
        assert_eq!(q.strides[1..], [768, 96, 76800]);
        assert_eq!((k.rank, k.dims, k.strides[..3].to_vec()), (4, [96, 300, 2, 2, 1], vec![192, 96, 57600]));
        assert_eq!((v.address, v.dims, v.strides[..3].to_vec()), (0x3000, [64, 300, 2, 2, 1], vec![128, 64, 38400]));
        let none = kernel.tensor_maps(&tiling, &ForwardArgs { kv_len: 0, k: 1, ..args }).unwrap();
        assert_eq!((none[1].address, none[1].dims[1]), (0x1000, 1));
    }
}

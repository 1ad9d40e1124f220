//! The schedules of `forward/sm89_fp8`: the one that serves while nothing is tuned, and those that a search may try.

use super::Sm89Fp8Schedule;
use crate::family::{Swizzle, TileOrder};
use crate::{Problem, ShapeBucket};

impl Sm89Fp8Schedule {
    /// The schedule that serves while nothing is tuned. No card has timed it: 128 query rows to a thread block, since
    /// these GPUs are bound by their tensor cores and K and V then pass through L2 half as often as by 64, in the
    /// 99 KB that the least of them have, and without a spill.
    pub fn default_for(problem: &Problem, bucket: &ShapeBucket) -> Self {
        let (warps, rows_per_warp, block_kv, stages, q_in_registers) = match problem.head_dim_qk.max(problem.head_dim_v)
        {
            0..=128 => (8, 16, 64, 2, true),
            _ => (8, 16, 32, 2, false),
        };
        // Short query sequences: rows beyond q_len are wasted work.
        let (warps, rows_per_warp) = if bucket.q_len <= 64 { (4, 16) } else { (warps, rows_per_warp) };
        let order = if problem.mask.right { TileOrder::BlockMajor } else { TileOrder::HeadMajor };
        Self {
            warps,
            rows_per_warp,
            block_kv,
            stages,
            q_in_registers,
            swizzle: Swizzle::Xor,
            blocks_per_sm: 1,
            // Head dim 256 spills 160 to 220 bytes without, and none with.
            in_order: problem.head_dim_v > 128,
            order,
        }
    }

    /// The schedules worth trying.
    pub fn space(problem: &Problem) -> Vec<Self> {
        let orders: &[TileOrder] =
            if problem.mask.any() { &[TileOrder::BlockMajor, TileOrder::HeadMajor] } else { &[TileOrder::HeadMajor] };
        let in_orders: &[bool] = if problem.head_dim_v > 128 { &[true, false] } else { &[false] };
        let warp_splits =
            [(2, 32, 1), (4, 16, 1), (4, 16, 2), (4, 16, 3), (4, 32, 1), (4, 32, 2), (8, 16, 1), (8, 32, 1)];
        let mut space = Vec::new();
        for (warps, rows_per_warp, blocks_per_sm) in warp_splits {
            for block_kv in [32, 64, 96, 128] {
                for stages in 1..=3 {
                    for q_in_registers in [false, true] {
                        for swizzle in [Swizzle::Xor, Swizzle::Pad] {
                            for &in_order in in_orders {
                                space.extend(orders.iter().map(|&order| Self {
                                    warps,
                                    rows_per_warp,
                                    block_kv,
                                    stages,
                                    q_in_registers,
                                    swizzle,
                                    blocks_per_sm,
                                    in_order,
                                    order,
                                }));
                            }
                        }
                    }
                }
            }
        }
        space
    }
}

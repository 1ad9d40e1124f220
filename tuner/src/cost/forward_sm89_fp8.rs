//! The cost model of `forward/sm89_fp8`: that of `forward/sm80` with products of twice the rate, half the bytes, and
//! the sums of the second level. No card has timed what it ranks.

use super::forward_sm80::{SmRates, rates, registers_short, resident_blocks};
use super::{EXP2, SMEM_BYTES, balance};
use flashtune_codegen::{Arch, Kernel, ScaleUnit, Shape, Sm89Fp8Schedule, TileOrder, Visits};

/// Instructions of the softmax per score and lane, conversions among them, exponentials apart.
const SOFTMAX: f64 = 5.5;

/// Estimated cycles of one launch.
pub(super) fn cost(kernel: &Kernel, s: &Sm89Fp8Schedule, shape: &Shape, units: u32) -> f64 {
    let Arch::Sm(sm) = kernel.arch else { return f64::INFINITY };
    let p = &kernel.problem;
    let SmRates { mma, lanes, l2 } = rates(sm);
    let dims = f64::from(p.head_dim_qk + p.head_dim_v);
    let (block_q, block_kv, warps) = (f64::from(s.block_q()), f64::from(s.block_kv), f64::from(s.warps));

    // One step of the main loop of one block, in cycles of each unit.
    let product = 2.0 * block_q * block_kv * dims / (2.0 * mma);
    let q_again = if s.q_in_registers { 0.0 } else { block_q * f64::from(p.head_dim_qk) };
    let smem = (warps * block_kv * dims + q_again + block_kv * dims) / SMEM_BYTES;
    let exp = block_q * block_kv / EXP2;
    // V is permuted by every warp: four instructions to 512 bytes.
    let permuted = warps * block_kv * f64::from(p.head_dim_v) / 128.0 * 32.0;
    let second_level = block_q * f64::from(p.head_dim_v);
    // Scores times the scales of their keys: a product, and a load that the rows of a thread share.
    let by_key = match p.scales.k {
        ScaleUnit::Rows => 1.0 + 0.5 / f64::from(s.rows_per_warp / 16),
        _ => 0.0,
    };
    let scalar = (block_q * block_kv * (SOFTMAX + by_key) + second_level + permuted) / lanes;
    let traffic = block_kv * dims / l2;
    let busiest = product.max(smem).max(exp).max(traffic).max(scalar);
    let rest = product + smem + exp + scalar + traffic - busiest;

    // Resident warps hide what is not the bottleneck, and the latency of loads and barriers.
    let v = Visits::of(shape, s.block_q(), s.block_kv);
    let heads = f64::from(shape.batch) * f64::from(shape.heads);
    let resident = resident_blocks(kernel, s.blocks_per_sm, sm);
    let active = resident.min((heads * v.tiles / f64::from(units.max(1))).ceil().max(1.0));
    let exposed = 0.7 / (1.0 + warps * active / 4.0);
    let latency = if s.stages == 1 { 500.0 } else { 90.0 } / active;
    let spill_risk = registers_short(kernel, s.blocks_per_sm, sm) * 0.02 * busiest;
    let step = busiest + exposed * rest + latency + spill_risk;

    // Q comes in and O goes out once per block.
    let tile = 2.0 * block_q * dims / l2 + 600.0 / active;
    let uneven = v.longest * v.tiles > v.total;
    let total = heads * (v.total * step + v.tiles * tile);
    let by_blocks = s.order == TileOrder::BlockMajor;
    balance(total, v.longest * step + tile, heads * v.tiles, f64::from(units), by_blocks, uneven)
}

//! The cost model of `forward/sm80_f32`: that of `forward/sm80` with TF32 products, operands that are split where they
//! are used, and fragments of four bytes.

use super::forward_sm80::{rates, registers_short, resident_blocks};
use super::{EXP2, SMEM_BYTES, balance};
use flashtune_codegen::{Arch, Kernel, Precision, Shape, Sm80F32Schedule, TileOrder, Visits};

/// Estimated cycles of one launch.
pub(super) fn cost(kernel: &Kernel, s: &Sm80F32Schedule, shape: &Shape, units: u32) -> f64 {
    let Arch::Sm(sm) = kernel.arch else { return f64::INFINITY };
    let p = &kernel.problem;
    let rate = rates(sm);
    let products = if p.precision == Precision::Tf32 { 1.0 } else { 3.0 };
    let dims = (p.head_dim_qk + p.head_dim_v) as f64;
    let (block_q, block_kv, warps) = (s.block_q() as f64, s.block_kv as f64, s.warps as f64);

    // One step of the main loop of one block, in cycles of each unit. TF32 runs at half the rate of 16-bit products.
    let mma = products * 2.0 * block_q * block_kv * dims / (rate.mma / 2.0);
    // Every warp reads all fragments of K, V and its own of Q; cp.async writes K and V.
    let fragments = warps * block_kv * dims + block_q * p.head_dim_qk as f64;
    let smem = (fragments + block_kv * dims) * 4.0 / SMEM_BYTES;
    let exp = block_q * block_kv / EXP2;
    // Softmax, and the splitting of every fragment: three operations of which two are integer ones, at half the rate.
    let split = if products > 1.0 { 5.0 } else { 1.0 };
    let scalar = (block_q * block_kv * 6.0 + fragments * split) / rate.lanes;
    let l2 = block_kv * dims * 4.0 / rate.l2;
    let busiest = mma.max(smem).max(exp).max(l2);
    let rest = mma + smem + exp + scalar + l2 - busiest;

    // Resident warps hide what is not the bottleneck, and the latency of loads and barriers.
    let v = Visits::of(shape, s.block_q(), s.block_kv);
    let heads = shape.batch as f64 * shape.heads as f64;
    let active =
        resident_blocks(kernel, s.blocks_per_sm, sm).min((heads * v.tiles / units.max(1) as f64).ceil().max(1.0));
    let exposed = 0.7 / (1.0 + warps * active / 4.0);
    let latency = if s.stages == 1 { 500.0 } else { 90.0 } / active;
    let spill_risk = registers_short(kernel, s.blocks_per_sm, sm) * 0.02 * busiest;
    let step = busiest + exposed * rest + latency + spill_risk;

    // Q comes in and O goes out once per block.
    let tile = 4.0 * block_q * dims / rate.l2 + 600.0 / active;
    balance(
        heads * (v.total * step + v.tiles * tile),
        v.longest * step + tile,
        heads * v.tiles,
        units as f64,
        s.order == TileOrder::BlockMajor,
        v.longest * v.tiles > v.total,
    )
}

//! The cost model of `forward/sm90`: tensor cores, special functions, shared memory and L2, and how far the schedule
//! lets them work at the same time.

use super::{EXP2, SMEM_BYTES};
use flashtune_codegen::{Kernel, Shape, Sm90Schedule, Sm90Scheduler, Visits};

// Rates of one multiprocessor of Hopper, per cycle.

/// Floating-point operations of 16-bit wgmma.
const WGMMA: f64 = 4096.0;
/// Lanes of plain fp32.
const LANES: f64 = 128.0;
/// Bytes from L2.
const L2_BYTES: f64 = 60.0;

// What follows was fitted to 590 timings at 18 shapes of head dims 64, 128 and 256 on an H200: it is 3.6 % off in the
// mean, and its first choice was within 1.1 % of the fastest of those timed at 17 of the 18 (docs/measured).

/// Instructions of the softmax per score and lane, those of an exponential on the multiply-add units, and those of
/// a mask.
const SOFTMAX: f64 = 8.4;
const MULTIPLY_ADD_EXP2: f64 = 6.6;
const MASK: f64 = 7.8;
/// Those of a bias that the copy engine brings, and of one that each thread loads: as much as times at head dims 64 and
/// 128 show.
const BIAS_BROUGHT: f64 = 12.0;
const BIAS_LOADED: f64 = 21.0;
/// What of the special-function unit's and the other lanes' work shows beside the longer of both.
const MIX: f64 = 0.35;
/// Cycles of waiting in a step, and around a tile: for a thread block to start and end, or to take the next tile.
const STEP: f64 = 620.0;
const TILE_OF_ITS_OWN: f64 = 4700.0;
const TILE_OF_MANY: f64 = 3200.0;

/// Estimated cycles of one launch.
pub(super) fn cost(kernel: &Kernel, s: &Sm90Schedule, shape: &Shape, units: u32) -> f64 {
    let p = &kernel.problem;
    let (dqk, dv) = (p.head_dim_qk as f64, p.head_dim_v.next_multiple_of(16) as f64);
    let (block_q, block_kv, consumers) = (s.block_q() as f64, s.block_kv as f64, s.consumers as f64);
    let scores = block_q * block_kv;

    // One step of all consumers of a thread block, in cycles of each unit. Q is read from shared memory for every step
    // of 16 elements, K once per warpgroup; a narrow block makes those reads longer than the product.
    let steps_qk = (dqk / 16.0).ceil();
    let qk = consumers * steps_qk * (64.0 * block_kv * 32.0 / WGMMA).max((2048.0 + 32.0 * block_kv) / SMEM_BYTES);
    let pv = consumers * block_kv / 16.0 * (64.0 * dv * 32.0 / WGMMA).max(32.0 * dv / SMEM_BYTES);
    let elsewhere = s.exp2_eighths as f64 / 8.0;
    let exp = scores * (1.0 - elsewhere) / EXP2;
    let biases = p.program.map_or(0, |p| p.biases().len()) as f64;
    let of_biases = biases * if s.bias_stages > 0 { BIAS_BROUGHT } else { BIAS_LOADED };
    let scalar = scores * (SOFTMAX + MULTIPLY_ADD_EXP2 * elsewhere + of_biases) / LANES;
    let softmax = exp.max(scalar) + MIX * exp.min(scalar);
    let mma = qk + pv;

    // What of the shorter side stays visible beside the longer one. Two thread blocks fill each other's gaps.
    let blocks = s.blocks_per_sm as f64;
    let together = if s.blocks_per_sm > 1 { 0.92 } else { 1.0 };
    let exposed = together
        * match (s.overlap, s.take_turns) {
            (true, turns) if turns == Sm90Schedule::turns_pay(p, shape.kv_len) => 0.14,
            (true, _) => 0.15,
            (false, true) => 0.35,
            (false, false) if consumers * blocks > 1.0 => 0.3,
            (false, false) => 1.0,
        };
    let l2 = block_kv * (dqk + dv) * 2.0 / L2_BYTES;
    let step = (mma.max(softmax) + exposed * mma.min(softmax) + STEP / blocks).max(l2);

    // The first scores of a tile have nothing to hide behind, unless tiles are chained.
    let ramp = match (s.chain, s.overlap) {
        (true, true) => 0.38,
        (true, false) => 0.56,
        (false, _) => 1.0,
    };
    let apart = if s.scheduler.is_persistent() { TILE_OF_MANY } else { TILE_OF_ITS_OWN };
    let tile = (apart + ramp * (qk + softmax)) / if s.blocks_per_sm > 1 { 1.38 } else { 1.0 };

    let group = if s.pack_group && s.is_worth(shape) { shape.group() } else { 1 };
    // A tile of packed heads has fewer positions of Q, each with the rows of all heads of the group.
    let positions = (s.block_q() / group).max(1);
    let v = Visits::of(shape, positions, s.block_kv);
    let heads = shape.batch as f64 * shape.heads as f64 / group as f64;
    // Blocks that the mask cuts: on each bounded side as many as the diagonal crosses in a tile, or all of them. Runs
    // in memory, as of documents, are cut on both.
    let runs = p.program.is_some_and(|p| p.runs().is_some());
    let sides = if runs { 2 } else { u8::from(p.mask.left) + u8::from(p.mask.right) };
    let cut = f64::from(sides) * (positions as f64 / block_kv).ceil() * v.tiles;
    // A consumer that has no part in a block leaves the others the units, which they use half as well alone. What it
    // takes to know costs wide heads nothing, and others a hundredth where steps overlap.
    let left_out = if s.trim { f64::from(sides) * 16.0 * (consumers - 1.0) / block_kv * v.tiles } else { 0.0 };
    let knowing = if s.trim && s.overlap && p.head_dim_v <= 128 { 1.012 } else { 1.0 };
    let masked = if s.masked_loop { cut.min(v.total) } else { v.total } * scores * MASK / LANES;
    // Rows of a packed tile are found by division, and their keys differ less from row to row: a wash, unless rows fill
    // up.
    let packing = if group > 1 { 1.01 } else { 1.0 };
    // Registers that the producer keeps gain nothing by arithmetic: what has them comes after what does not.
    let spare = if s.producer_spare > 0 { 1.01 } else { 1.0 };
    let total = spare * packing * knowing * heads * ((v.total - left_out).max(0.0) * step + v.tiles * tile + masked);
    let uneven = v.longest * v.tiles > v.total;
    total / units.max(1) as f64 * imbalance(s, heads * v.tiles, units, uneven)
}

/// By how much the busiest multiprocessor has more than its share, and what order costs in L2.
fn imbalance(s: &Sm90Schedule, tiles: f64, units: u32, uneven: bool) -> f64 {
    let room = units.max(1) as f64 * s.blocks_per_sm as f64;
    let waves = (tiles / room).ceil() * room / tiles.max(1.0);
    if !uneven {
        return waves * if s.section_mib == 0 { 1.0 } else { 1.03 };
    }
    let order = match (s.scheduler, s.section_mib) {
        (Sm90Scheduler::Stride, 0) => 1.16,
        (Sm90Scheduler::Stride, _) => 1.09,
        _ if s.ending => 1.0,
        (_, 0) => 1.04,
        (_, Sm90Schedule::WALK_ALL) => 1.08,
        _ => 1.0,
    };
    // Fewer tiles than room leave some of it idle, whatever the order.
    order * (room / tiles.max(1.0)).max(1.0)
}

//! The cost model of `backward/sm90`: products by wgmma and what lies between them, dS on its way through L2, and what
//! two stages leave idle. Rates are those of the schedule's own notes (`codegen/src/family/backward_sm90`), which were
//! measured: it has few schedules, so that a search tries all of them, and this is their order.

use super::{EXP2, balance};
use flashtune_codegen::{BackwardSm90Schedule, Kernel, Shape, Visits};

/// Floating-point operations of 16-bit wgmma per cycle and multiprocessor.
const WGMMA: f64 = 4096.0;
/// Bytes to and from L2 per cycle and multiprocessor.
const L2_BYTES: f64 = 60.0;
/// Cycles of waiting in a step of `keys`, and around a key block whose K and V are not loaded ahead.
const STEP: f64 = 500.0;
const BLOCK: f64 = 5000.0;

/// Estimated cycles of one launch.
pub(super) fn cost(kernel: &Kernel, s: &BackwardSm90Schedule, shape: &Shape, units: u32) -> f64 {
    let p = &kernel.problem;
    let (dqk, dv) = (f64::from(p.head_dim_qk), f64::from(p.head_dim_v));
    // Above head dim 128 two warpgroups share 64 keys.
    let wide = p.head_dim_qk.max(p.head_dim_v) > 128;
    let keys = if wide { 64 } else { 128 };
    let (block_q, block_kv) = (f64::from(s.block_q), f64::from(keys));
    let scores = block_q * block_kv;
    let products = 2.0 * scores * 2.0 * (dqk + dv) / WGMMA;
    let between = scores * (1.0 / EXP2 + 12.0 / 128.0);
    let ds = scores * 2.0 / L2_BYTES;
    let brought = block_q * (dqk + dv) * 2.0 / L2_BYTES;
    let waits = STEP / f64::from(s.stages.clamp(2, 3) - 1);
    let step = (products + 0.35 * between + waits).max(ds + brought);
    let heads = f64::from(shape.batch) * f64::from(shape.heads);
    let visits = Visits::of(shape, s.block_q, keys);
    let tiles = f64::from(shape.kv_len.div_ceil(keys).max(1)) * f64::from(shape.batch) * f64::from(shape.kv_heads);
    let apart = if s.key_stages > 1 { 0.4 * BLOCK } else { BLOCK };
    let steps = visits.total * heads;
    let units = f64::from(units.max(1));
    // Key blocks of unequal length in strides are as uneven as they come; in a grid of their own the next one starts
    // where one ends.
    let uneven = p.mask.right;
    let first = balance(steps * step + tiles * apart, steps / tiles * step, tiles, units, s.key_stages == 1, uneven);
    // dQ reads each dS, and K by blocks of rows.
    let rows = 128.0 * f64::from(s.row_tiles);
    let row_blocks = (f64::from(shape.q_len) / rows).ceil() * heads;
    let row_step = |work: f64| work + STEP / f64::from(s.row_stages.max(1));
    let of_rows = row_step((2.0 * rows * 64.0 * dqk / WGMMA).max((rows * 128.0 + 128.0 * dqk) / L2_BYTES));
    let row_steps = visits.total * heads * scores / (rows * 64.0);
    let second = row_steps * of_rows / units + (row_blocks / units).ceil() * 3000.0;
    // Beside each other they fill a part of what either leaves idle, 2 to 12 % as measured below 16k.
    let joint = if s.dq_blocks > 0 && shape.q_len < 16_384 { 0.95 } else { 1.0 };
    (first + second) * joint
}

//! The cost model of `forward/sm90_fp8`: tensor cores, the softmax, shared memory with V's way through it, and how far
//! the schedule lets them work at the same time.

use super::{EXP2, SMEM_BYTES};
use flashtune_codegen::{Kernel, ScaleUnit, Shape, Sm90Fp8Schedule, Visits};

/// Floating-point operations of FP8 wgmma per cycle and multiprocessor.
const WGMMA: f64 = 8192.0;
/// Instructions of the softmax per score and lane, exponentials apart, and lanes per cycle.
const SOFTMAX: f64 = 5.0;
const LANES: f64 = 128.0;
/// Those of scales of keys: a product, and an eighth of a load.
const KEY_SCALES: f64 = 1.125;
/// Those of the second level per element of O.
const SECOND_LEVEL: f64 = 1.0;
/// Cycles of waiting in a step, and around a tile.
const STEP: f64 = 400.0;
const TILE: f64 = 3200.0;

/// Estimated cycles of one launch.
pub(super) fn cost(kernel: &Kernel, s: &Sm90Fp8Schedule, shape: &Shape, units: u32) -> f64 {
    let p = &kernel.problem;
    let (dqk, dv) = (f64::from(p.head_dim_qk), f64::from(p.head_dim_v.next_multiple_of(16)));
    let (block_q, block_kv) = (f64::from(s.block_q()), f64::from(s.block_kv));
    let scores = block_q * block_kv;
    let mma = 2.0 * scores * (dqk + dv) / WGMMA;
    let exp = scores / EXP2;
    let by_key = if p.scales.k == ScaleUnit::Rows { KEY_SCALES } else { 0.0 };
    let scalar = (scores * (SOFTMAX + by_key) + block_q * dv * SECOND_LEVEL) / LANES;
    let softmax = exp.max(scalar) + 0.35 * exp.min(scalar);
    // Operands of products, and V as it comes, is read, and is written by columns.
    let consumers = f64::from(s.consumers);
    let smem = (consumers * block_kv * (dqk + dv) + block_q * dqk + block_kv * (dqk + 4.0 * dv)) / SMEM_BYTES;
    let exposed = match (s.overlap, s.take_turns) {
        (true, _) => 0.2,
        (false, true) => 0.35,
        (false, false) if consumers * f64::from(s.blocks_per_sm) > 1.0 => 0.3,
        (false, false) => 1.0,
    };
    // What a part of a product waits for before the next one is issued.
    let parts = (dv / f64::from(s.part)).ceil() - 1.0;
    let wait = (STEP + 60.0 * parts) / f64::from(s.blocks_per_sm);
    let step = (mma.max(softmax) + exposed * mma.min(softmax) + wait).max(smem);
    let v = Visits::of(shape, s.block_q(), s.block_kv);
    let heads = f64::from(shape.batch) * f64::from(shape.heads);
    let total = heads * (v.total * step + v.tiles * (TILE + mma / 2.0 + softmax));
    let room = f64::from(units.max(1)) * f64::from(s.blocks_per_sm);
    let tiles = (heads * v.tiles).max(1.0);
    let uneven = v.longest * v.tiles > v.total;
    let waves = if uneven { (room / tiles).max(1.0) } else { (tiles / room).ceil() * room / tiles };
    // The walk makes a difference that is measured, not estimated.
    let order = if s.section_mib == 0 { 1.01 } else { 1.0 };
    total / f64::from(units.max(1)) * waves * order
}

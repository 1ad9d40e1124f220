//! The cost model of `backward/sm80`: seven products by mma.sync, of which the operands that move come from shared
//! memory.

use super::{EXP2, SMEM_BYTES, balance};
use flashtune_codegen::{BackwardSm80Schedule, Kernel, Shape, Visits};

/// Floating-point operations of 16-bit mma.sync per cycle and multiprocessor.
const MMA: f64 = 2048.0;
/// Cycles around a step: barriers, copies that are waited for; beside another thread block, or with a second buffer,
/// half.
const STEP: f64 = 900.0;
/// Cycles around a tile.
const TILE: f64 = 4000.0;

/// Estimated cycles of one launch.
pub(super) fn cost(kernel: &Kernel, s: &BackwardSm80Schedule, shape: &Shape, units: u32) -> f64 {
    let p = &kernel.problem;
    let (dqk, dv) = (f64::from(p.head_dim_qk), f64::from(p.head_dim_v));
    let [warps, parts, blocks] = [s.warps, s.parts, s.blocks_per_sm].map(f64::from);
    // One step of a thread block: rows that stay by rows that move, with so many products of QK's and V's dims, whose
    // moving operands each warp loads from shared memory.
    let step = |stay: f64, moves: f64, stages: u32, [of_qk, of_v]: [f64; 2]| {
        let products = 2.0 * stay * moves * (of_qk * dqk + of_v * dv) / MMA;
        let loads = warps * moves * 2.0 * (of_qk * dqk + of_v * dv) / SMEM_BYTES;
        let scores = stay * moves / EXP2 * 1.5;
        let waits = STEP / blocks / if stages > 1 { 2.0 } else { 1.0 };
        products.max(loads) + scores + waits
    };
    let keys = f64::from(s.block_keys());
    // Each part computes the scores of its keys anew, and a part of the columns of dK and dV.
    let of_keys = step(keys, f64::from(s.step_q), s.stages_q, [1.0 + 1.0 / parts, 1.0 + 1.0 / parts]);
    let of_queries = step(f64::from(s.block_queries()), f64::from(s.step_kv), s.stages_kv, [2.0, 1.0]);
    let heads = f64::from(shape.batch) * f64::from(shape.heads);
    let kv_heads = f64::from(shape.batch) * f64::from(shape.kv_heads);
    let by_keys = Visits::of(shape, s.step_q, s.block_keys());
    let by_queries = Visits::of(shape, s.block_queries(), s.step_kv);
    let tiles = f64::from(shape.kv_len.div_ceil(s.block_keys()).max(1)) * kv_heads * parts;
    let room = f64::from(units.max(1)) * blocks;
    let steps = by_keys.total * heads * parts;
    let first = balance(
        (steps * of_keys + tiles * TILE) / blocks,
        steps / tiles * of_keys / blocks,
        tiles,
        room / blocks,
        true,
        p.mask.right,
    );
    let steps = by_queries.total * heads;
    let rows = by_queries.tiles * heads;
    let second = balance(
        (steps * of_queries + rows * TILE) / blocks,
        by_queries.longest * of_queries / blocks,
        rows,
        room / blocks,
        true,
        p.mask.right,
    );
    // What a thread keeps beyond its registers goes to memory and back.
    let spilled = if kernel.resources().registers * s.warps * 32 * s.blocks_per_sm > 65536 { 2.0 } else { 1.0 };
    (first + second) * spilled
}

//! The model of `forward/sm90`: tensor cores, special functions, shared memory and L2, and how far the schedule lets
//! them work at the same time.

use super::{EXP2, SMEM_BYTES, balance};
use flashtune_codegen::{Kernel, Shape, Sm90Schedule, Visits};

/// Floating-point operations of 16-bit wgmma per cycle and multiprocessor.
const WGMMA: f64 = 4096.0;
/// Lanes of plain fp32 per cycle and multiprocessor.
const LANES: f64 = 128.0;
/// Bytes from L2 per cycle and multiprocessor.
const L2_BYTES: f64 = 40.0;

/// Estimated cycles of one launch.
pub(super) fn cost(kernel: &Kernel, s: &Sm90Schedule, shape: &Shape, units: u32) -> f64 {
    let p = &kernel.problem;
    let (dqk, dv) = (p.head_dim_qk as f64, p.head_dim_v.next_multiple_of(16) as f64);
    let (block_q, block_kv, consumers) = (s.block_q() as f64, s.block_kv as f64, s.consumers as f64);

    // One step of all consumers of a thread block, in cycles of each unit. Q is read from shared memory for every step of
    // 16 elements, K once per warpgroup; a narrow block makes those reads longer than the product.
    let steps_qk = (dqk / 16.0).ceil();
    let qk = consumers * steps_qk * (64.0 * block_kv * 32.0 / WGMMA).max((2048.0 + 32.0 * block_kv) / SMEM_BYTES);
    let p_bytes = if s.p_in_shared { 2.0 * 2048.0 } else { 0.0 };
    let pv = consumers * block_kv / 16.0 * (64.0 * dv * 32.0 / WGMMA).max((32.0 * dv + p_bytes) / SMEM_BYTES);
    let elsewhere = s.exp2_eighths as f64 / 8.0;
    let exp = block_q * block_kv * (1.0 - elsewhere) / EXP2;
    let scalar = block_q * (block_kv * (4.5 + 7.0 * elsewhere) + dv * 0.3) / LANES;
    let softmax = exp.max(scalar) + 0.3 * exp.min(scalar);
    let l2 = block_kv * (dqk + dv) * 2.0 / L2_BYTES;
    let mma = qk + pv;

    // What of the shorter side stays visible beside the longer one.
    let blocks = s.blocks_per_sm as f64;
    let independent = consumers * blocks;
    let exposed = match (s.overlap, s.take_turns) {
        (true, true) => 0.08,
        (true, false) => 0.16,
        (false, true) => 0.22,
        (false, false) if independent > 1.0 => 0.5 / independent,
        (false, false) => 1.0,
    };
    let barriers = 250.0 + if s.stages == 2 { 20.0 } else { 0.0 };
    // Two thread blocks share the units of a multiprocessor, and fill each other's gaps.
    let step = (mma.max(softmax) + exposed * mma.min(softmax) + barriers / blocks).max(l2);

    // Q comes in, the first scores have nothing to hide behind, and O goes out.
    let apart = match (s.persistent, s.o_apart) {
        (true, true) => 0.45,
        (true, false) => 0.7,
        _ => 1.0,
    } / blocks;
    let tile = (1200.0 + qk + softmax + block_q * (dqk + dv) * 2.0 / L2_BYTES) * apart;

    let group = if s.pack_group && s.is_worth(shape) { shape.group() } else { 1 };
    let v = Visits::of(&packed(shape, group), s.block_q(), s.block_kv);
    let heads = shape.batch as f64 * shape.heads as f64 / group as f64;
    // Rows of a packed tile are found by division, and their keys differ less from row to row: a wash, unless rows fill up.
    let packing = if group > 1 { 1.01 } else { 1.0 };
    let total = packing * heads * (v.total * step + v.tiles * tile);
    let uneven = v.longest * v.tiles > v.total;
    let longest_first = !s.persistent && s.section_mib != 0;
    balance(total, v.longest * step + tile, heads * v.tiles, units as f64, longest_first, uneven)
}

/// The shape as tiles see it when the heads of a group share one: their rows count together. The mask then covers the
/// same share of a longer matrix, which is close enough for a count of blocks.
fn packed(shape: &Shape, group: u32) -> Shape {
    if group == 1 {
        return *shape;
    }
    Shape { q_len: shape.q_len.saturating_mul(group), heads: shape.kv_heads, ..*shape }
}

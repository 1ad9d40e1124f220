//! The cost of a schedule of `forward/sm80_ragged`: what memory takes for the keys, what the warps take for them, and
//! what merging the pieces takes.

use flashtune_cache::DeviceFingerprint;
use flashtune_codegen::{Kernel, Shape, Sm80RaggedSchedule, Visits};

/// Bytes that one multiprocessor gets from memory in a cycle: 4.35 TB/s over 132 of them at 1.755 GHz.
const MEMORY_BYTES: f64 = 18.8;
/// Cycles of a merge: of its latencies, and of a row of 128 columns of one piece.
const MERGE: [f64; 2] = [3500.0, 12.0];

/// Cycles of the busiest multiprocessor.
pub(super) fn cost(kernel: &Kernel, s: &Sm80RaggedSchedule, shape: &Shape, device: &DeviceFingerprint) -> f64 {
    let p = &kernel.problem;
    let units = f64::from(device.units.max(1));
    let packed = shape.q_len * shape.group();
    let tiles = f64::from(packed.div_ceil(s.rows())) * f64::from(shape.batch) * f64::from(shape.kv_heads);
    let keys = Visits::of(shape, (s.rows() / shape.group()).max(1), s.block_kv);
    let of_tile = keys.total / keys.tiles * f64::from(s.block_kv);
    let element = p.kv.store().map_or(2, |store| store.element.bytes(p.dtype)) as f64;
    let dims = f64::from(p.head_dim_qk + p.head_dim_v);
    // Of one key: what it takes from memory, and the rows of the tile from the tensor cores and shared memory.
    let memory = dims * element / MEMORY_BYTES;
    let matrix = 3.2 * f64::from(s.rows()) / 16.0 * dims / 256.0;
    let shared = dims * element * f64::from(s.row_warps) / super::SMEM_BYTES;
    // Too few bytes under way do not fill the bus.
    let under_way = f64::from((s.stages - 1) * s.key_warps * s.block_kv * s.blocks_per_sm) * dims * element;
    let starved = (48.0 * 1024.0 / under_way).max(1.0);
    let key = (memory * starved).max(matrix).max(shared);
    let unit = f64::from(s.block_kv * s.key_warps);
    let shares =
        (tiles * (of_tile / unit).ceil() / units / f64::from(s.blocks_per_sm)).ceil() * f64::from(s.blocks_per_sm);
    let pieces = (units / tiles).max(1.0);
    shares * unit * key + MERGE[0] + MERGE[1] * pieces * f64::from(packed.min(s.rows()))
}

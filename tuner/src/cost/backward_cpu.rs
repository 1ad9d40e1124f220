//! The cost model of `backward/cpu`: seven products of floats, what is loaded anew for each pair of blocks, and what
//! stays in a core's cache.

use super::balance;
use flashtune_cache::DeviceFingerprint;
use flashtune_codegen::{BackwardCpuSchedule, Kernel, Shape, Visits};

/// Estimated cycles of one launch.
pub(super) fn cost(kernel: &Kernel, s: &BackwardCpuSchedule, shape: &Shape, device: &DeviceFingerprint) -> f64 {
    let p = &kernel.problem;
    let lanes = f64::from(s.isa.lanes());
    let padded = |dim: u32| f64::from(dim.next_multiple_of(s.isa.lanes()));
    let (dqk, dv) = (padded(p.head_dim_qk), padded(p.head_dim_v));
    let (block_q, block_kv) = (f64::from(s.block_q), f64::from(s.block_kv));
    // S, dP, dV and dK of a tile of keys; S, dP and dQ of a tile of queries: two multiply-adds to a cycle.
    let products = block_q * block_kv * (5.0 * dqk + 3.0 * dv) / lanes / 2.0;
    // Exponentials and what becomes of a score, twice.
    let scores = block_q * block_kv * 2.0 * 20.0 / lanes;
    // Keys' tiles load and transpose queries with their outputs and dO, queries' tiles load keys, for each pair.
    let rows = block_q * (dqk + 2.0 * dv) * 3.0 / lanes + block_kv * (dqk + dv) / lanes;
    let footprint = 4.0
        * (2.0 * block_q * (dqk + dv)
            + block_kv * (dqk + dv)
            + 3.0 * block_q * block_kv
            + block_q.max(block_kv) * dqk
            + block_kv * dv);
    // Second-level caches have a MiB or two, the first level 32 to 48 KiB, which the rows of a product should fit.
    let spill = 1.0 + 0.3 * (footprint / f64::from(1 << 20) - 1.0).clamp(0.0, 4.0);
    let step = (products + scores) * spill + rows;
    let queries = Visits::of(shape, s.block_q, s.block_kv);
    let (heads, kv_heads) = (f64::from(shape.batch * shape.heads), f64::from(shape.batch * shape.kv_heads));
    let keys = f64::from(shape.kv_len.div_ceil(s.block_kv).max(1)) * kv_heads;
    let tiles = queries.tiles * heads + keys;
    let total = heads * queries.total * step + tiles * 2000.0;
    // A tile of keys has the queries of its group.
    let longest = queries.total * heads / keys.max(1.0) * step * 0.6 + 2000.0;
    balance(total, longest, tiles, f64::from(device.units), true, true)
}

//! The cost model of `forward/cpu_ragged`: that of `forward/cpu` for tiles of many rows, and for few what the threads
//! do with blocks of keys that come from memory.

use super::forward_cpu;
use flashtune_cache::DeviceFingerprint;
use flashtune_codegen::{CpuRaggedSchedule, CpuSchedule, Kernel, KvKind, Mask, Problem, Schedule, Shape};

/// Estimated cycles of one launch, every sequence taken to be as long as the shape allows.
pub(super) fn cost(kernel: &Kernel, s: &CpuRaggedSchedule, shape: &Shape, device: &DeviceFingerprint) -> f64 {
    let group = (shape.heads / shape.kv_heads.max(1)).max(1);
    let rows = shape.q_len.saturating_mul(group);
    if rows > s.few_rows {
        // A KV head with the rows of its group, as one head. Of windows only the shape's keys are left to tell.
        let tile = CpuSchedule {
            isa: s.isa,
            block_q: s.block_q,
            block_kv: s.block_kv,
            unroll_q: s.unroll_q,
            unroll_kv: s.unroll_kv,
            threads: s.threads,
        };
        let problem = Problem { kv: KvKind::Dense, ..kernel.problem };
        let dense = Kernel { problem, schedule: Schedule::Cpu(tile), ..*kernel };
        let packed = Shape { heads: shape.kv_heads, q_len: rows, mask: Mask::Full, ..*shape };
        return forward_cpu::cost(&dense, &tile, &packed, device);
    }
    let p = &kernel.problem;
    let units = if s.threads == 0 { device.units } else { s.threads.min(device.units) }.max(1) as f64;
    let heads = shape.batch as f64 * shape.kv_heads as f64;
    let keys = shape.kv_len as f64;
    let columns = (p.head_dim_qk + p.head_dim_v) as f64;
    // Ranges as the kernel splits them, of several heads where each has keys enough, and their states, which are
    // written and read once.
    let share = heads * keys / s.split_tiles as f64;
    let most = (64 / rows.max(1)).clamp(1, shape.kv_heads.max(1));
    let together = (share / s.split_kv as f64).floor().clamp(1.0, most as f64);
    let fair = (share / together).max(s.split_kv as f64).min(keys.max(1.0));
    let ranges = (heads / together).ceil() * (keys / fair).round().max(1.0);
    let per_key = columns * (rows as f64).max(2.0) / s.isa.lanes() as f64;
    // A block's rows and the next one's are to stay in the second-level cache until they are used; between blocks there
    // are maxima to find and pointers to compute.
    let few_block = s.few_block as f64;
    let block = if together == 1.0 { few_block } else { (few_block / (2.0 * together)).max(16.0) };
    let footprint = 2.0 * block * together * columns * 4.0;
    let spill = 1.0 + 0.1 * (footprint / (1 << 19) as f64 - 1.0).clamp(0.0, 4.0);
    let head = fair * per_key * spill + fair / block * 150.0 + rows as f64 * p.head_dim_v as f64 / 2.0;
    let range = together * head + 2000.0;
    (ranges / units).ceil() * range
}

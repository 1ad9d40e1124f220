//! The cost of a schedule of `forward/sm80_ragged`: what memory takes for the keys, what the warps take for them, and
//! what merging the pieces takes.

use flashtune_cache::DeviceFingerprint;
use flashtune_codegen::{Kernel, Shape, Sm80RaggedSchedule, Visits};

/// Bytes that one multiprocessor gets from memory in a cycle: 4.35 TB/s over 132 of them at 1.755 GHz.
const MEMORY_BYTES: f64 = 18.8;
/// Cycles of a key for 16 rows of 128 columns, with eight warps on a multiprocessor: those of the key, and those of a
/// step of a team, which its keys share. From times on an H200 of steps of 16, 32 and 64 keys (8 x 8k with 4 and 16
/// queries, 512 x 8k): 26, 14.5 and 10.2 cycles.
const ISSUE_16_BIT: [f64; 2] = [5.0, 330.0];
/// The same beside 8-bit stores: 203 and 166 us for 64 x 4k by steps of 16 and 32 keys.
const ISSUE_8_BIT: [f64; 2] = [13.0, 130.0];
/// Warps that were measured: fewer issue as much less, since each waits for its own, and more have spilled.
const WARPS: f64 = 8.0;
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
    // Of one key: what it takes from memory, and the rows of the tile from the warps and from shared memory.
    let memory = dims * element / MEMORY_BYTES;
    let [of_key, of_step] = if element < 2.0 { ISSUE_8_BIT } else { ISSUE_16_BIT };
    let warps = f64::from(s.row_warps * s.key_warps * s.blocks_per_sm);
    let issue = (of_key + of_step / f64::from(s.block_kv)) * f64::from(s.rows()) / 16.0 * dims / 256.0;
    let issue = issue * (WARPS / warps).max(1.0);
    let shared = dims * element * f64::from(s.row_warps) / super::SMEM_BYTES;
    // Too few bytes under way do not fill the bus.
    let under_way = f64::from((s.stages - 1) * s.key_warps * s.block_kv * s.blocks_per_sm) * dims * element;
    let starved = (48.0 * 1024.0 / under_way).max(1.0);
    let key = (memory * starved).max(issue).max(shared);
    let unit = f64::from(s.block_kv * s.key_warps);
    let shares =
        (tiles * (of_tile / unit).ceil() / units / f64::from(s.blocks_per_sm)).ceil() * f64::from(s.blocks_per_sm);
    let pieces = (units * f64::from(s.blocks_per_sm) / tiles).max(1.0);
    shares * unit * key + MERGE[0] + MERGE[1] * pieces * f64::from(packed.min(s.rows()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashtune_codegen::{
        Arch, DType, Family, KvElement, KvKind, KvStore, Mask, Problem, Schedule, ShapeBucket, SmArch,
    };

    /// The default of an H200 for a call with bf16 queries over 8 KV heads, and its cost in microseconds.
    fn predicted(element: KvElement, shape: &Shape, block_kv: Option<u32>) -> f64 {
        let store = KvStore { element, ..KvStore::default() };
        let problem = Problem::forward(DType::Bf16, 128, shape.mask.kind()).unwrap().with_kv(KvKind::Ragged(store));
        let arch = Arch::Sm(SmArch { number: 90, specific: true });
        let bucket = ShapeBucket::of_call(&problem, &shape.into(), 132);
        let Ok(Schedule::Sm80Ragged(default)) =
            Schedule::default_for(Family::ForwardSm80Ragged, &problem, arch, &bucket)
        else {
            panic!("another family's schedule");
        };
        let s = Sm80RaggedSchedule { block_kv: block_kv.unwrap_or(default.block_kv), ..default };
        let kernel = Kernel { problem, schedule: Schedule::Sm80Ragged(s), arch };
        let device = DeviceFingerprint {
            arch,
            name: "NVIDIA H200".into(),
            units: 132,
            memory_bytes: 1 << 37,
            cache_bytes: 60 << 20,
            driver: "580".into(),
        };
        cost(&kernel, &s, shape, &device) / 1755.0
    }

    #[test]
    fn costs_are_those_measured_on_an_h200_but_for_the_launch() {
        let shape = |batch, q_len, kv_len| Shape { batch, heads: 32, kv_heads: 8, q_len, kv_len, mask: Mask::Causal };
        // What a launch takes of which the cost model knows nothing: 1 x 4k takes 17 us, of which its keys are 4.
        const LAUNCH: f64 = 11.0;
        let (same, e4m3) = (KvElement::Same, KvElement::E4m3);
        for (element, shape, block_kv, measured) in [
            (same, shape(1, 1, 4096), None, 17.3),
            (same, shape(1, 1, 32768), None, 49.0),
            (same, shape(8, 1, 4096), None, 48.8),
            (same, shape(16, 1, 8192), None, 146.2),
            (same, shape(64, 1, 4096), None, 277.2),
            (same, shape(8, 4, 8192), None, 89.6),
            (same, shape(8, 16, 8192), None, 144.6),
            (same, shape(1, 512, 8192), None, 382.8),
            (e4m3, shape(1, 1, 32768), None, 38.3),
            (e4m3, shape(64, 1, 4096), None, 166.0),
            (e4m3, shape(64, 1, 4096), Some(16), 203.0),
        ] {
            let us = predicted(element, &shape, block_kv) + LAUNCH;
            assert!(
                (us / measured - 1.0).abs() < 0.2,
                "{shape} {element:?} {block_kv:?}: {us:.1}, measured {measured}"
            );
        }
    }
}

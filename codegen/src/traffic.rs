//! What a schedule moves, by counting: the key blocks that query tiles visit, and the bytes that follow from them.

use crate::{Kernel, Shape};

/// Key blocks that the query tiles of one head visit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Visits {
    /// Number of query tiles.
    pub tiles: f64,
    /// Key blocks over all query tiles.
    pub total: f64,
    /// Key blocks of the query tile that visits most.
    pub longest: f64,
}

impl Visits {
    /// Counts by the mask's own definition, on at most 64 tiles that are spread evenly.
    pub fn of(shape: &Shape, block_q: u32, block_kv: u32) -> Visits {
        let (q_len, kv_len) = (shape.q_len as u64, shape.kv_len as u64);
        let tiles = q_len.div_ceil(block_q as u64).max(1);
        let step = tiles.div_ceil(64);
        let (mut sum, mut longest, mut seen) = (0.0, 0.0f64, 0.0);
        for tile in (0..tiles).step_by(step as usize) {
            let first = (tile * block_q as u64).min(q_len.saturating_sub(1));
            let last = ((tile + 1) * block_q as u64 - 1).min(q_len.saturating_sub(1));
            let begin = shape.mask.live(first, q_len, kv_len).start / block_kv as u64;
            let end = shape.mask.live(last, q_len, kv_len).end.div_ceil(block_kv as u64);
            let n = end.saturating_sub(begin) as f64;
            sum += n;
            longest = longest.max(n);
            seen += 1.0;
        }
        Visits { tiles: tiles as f64, total: sum / seen * tiles as f64, longest }
    }
}

/// Bytes that one launch moves, by estimate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Traffic {
    /// What the tiles load and store, wherever it comes from: Q and O once, K and V once per query tile that visits
    /// them.
    pub tile_bytes: f64,
    /// What reaches memory: as above, but K and V count once where those of all KV heads that are worked on at the same
    /// time fit the last-level cache together.
    pub memory_bytes: f64,
}

impl Kernel {
    /// The bytes that a launch of this kernel moves on a device of `units` multiprocessors (or cores) and a last-level
    /// cache of `cache_bytes`. The log-sum-exp is not counted.
    pub fn traffic(&self, shape: &Shape, units: u32, cache_bytes: u64) -> Traffic {
        let p = &self.problem;
        let walk = self.schedule.walk(p, shape);
        let [operand, output] = p.element_bytes().map(|bytes| bytes as f64);
        let row = f64::from(p.head_dim_qk + p.head_dim_v) * operand;
        let row_of_ends = f64::from(p.head_dim_qk) * operand + f64::from(p.head_dim_v) * output;
        let kv_heads = shape.batch as f64 * shape.kv_heads as f64;
        let visits = Visits::of(shape, walk.queries, walk.block_kv);
        let ends = shape.batch as f64 * shape.heads as f64 * shape.q_len as f64 * row_of_ends;
        // The last key block may be a part of one.
        let rows = (visits.total * walk.block_kv as f64).min(visits.tiles * shape.kv_len as f64);
        let loads = walk.heads * rows * row;
        let tile_bytes = ends + loads;

        // Rows that a query sees at all; with a window, those before the first one are never touched.
        let seen = if shape.q_len == 0 {
            0
        } else {
            let (q_len, kv_len) = (shape.q_len as u64, shape.kv_len as u64);
            shape.mask.live(q_len - 1, q_len, kv_len).end - shape.mask.live(0, q_len, kv_len).start
        };
        let pair = seen as f64 * row;
        // Tiles in flight, one per unit at least, and the KV heads that they belong to.
        let per_kv_head = visits.tiles * walk.heads / kv_heads.max(1.0);
        let in_flight = (units.max(1) as f64 / per_kv_head.max(1.0)).ceil();
        let at_once = walk.together.max(in_flight).min(kv_heads);
        let once = at_once * pair <= cache_bytes as f64;
        let kv = if once { (kv_heads * pair).min(loads) } else { loads };
        Traffic { tile_bytes, memory_bytes: ends + kv }
    }
}

/// The tiles of a launch, as far as they decide what is loaded.
pub(crate) struct Walk {
    /// Queries of one head in a tile.
    pub queries: u32,
    /// Keys of one step.
    pub block_kv: u32,
    /// Heads, or groups of heads, that load K and V each for themselves, over all sequences.
    pub heads: f64,
    /// KV heads whose tiles are walked side by side, by the order of the tiles.
    pub together: f64,
}

impl Walk {
    /// Tiles of one head, one KV head after the other.
    pub(crate) fn plain(queries: u32, block_kv: u32, shape: &Shape) -> Self {
        Self { queries, block_kv, heads: shape.batch as f64 * shape.heads as f64, together: 1.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Arch, DType, Mask, MaskKind, Problem, Schedule, ShapeBucket, Sm80Schedule, Sm90Schedule, SmArch, TileOrder,
    };

    fn shape(q_len: u32, kv_len: u32, mask: Mask) -> Shape {
        Shape { batch: 2, heads: 8, kv_heads: 2, q_len, kv_len, mask }
    }

    /// 128 queries and 64 keys per block.
    fn kernel(mask: MaskKind, order: TileOrder) -> Kernel {
        let sm = SmArch { number: 90, specific: true };
        let problem = Problem::forward(DType::Bf16, 128, mask).unwrap();
        let default = Sm80Schedule::default_for(&problem, sm, &ShapeBucket::of(&shape(4096, 4096, Mask::Full)));
        let schedule = Sm80Schedule { warps: 4, rows_per_warp: 32, block_kv: 64, order, ..default };
        Kernel { problem, schedule: Schedule::Sm80(schedule), arch: Arch::Sm(sm) }
    }

    #[test]
    fn without_a_mask_every_tile_loads_all_of_k_and_v() {
        let s = shape(1024, 1000, Mask::Full);
        let t = kernel(MaskKind::FULL, TileOrder::HeadMajor).traffic(&s, 132, 50 << 20);
        let row = 2.0 * 128.0 * 2.0;
        assert_eq!(t.tile_bytes, 16.0 * (1024.0 + 8.0 * 1000.0) * row);
        // K and V of four KV heads are 2 MB: they stay in the cache, and memory moves the ideal.
        assert_eq!(t.memory_bytes, s.forward_bytes(128, 128, [2; 2]));
    }

    #[test]
    fn what_does_not_fit_the_cache_is_loaded_again() {
        let s = shape(32768, 32768, Mask::Full);
        let of = |order, cache| kernel(MaskKind::FULL, order).traffic(&s, 132, cache);
        // One head at a time: 16 MB of K and V; all four: 64 MB.
        let ideal = s.forward_bytes(128, 128, [2; 2]);
        assert_eq!(of(TileOrder::HeadMajor, 20 << 20).memory_bytes, ideal);
        assert_eq!(of(TileOrder::BlockMajor, 80 << 20).memory_bytes, ideal);
        for (order, cache) in [(TileOrder::HeadMajor, 10 << 20), (TileOrder::BlockMajor, 20 << 20)] {
            let t = of(order, cache);
            assert_eq!(t.memory_bytes, t.tile_bytes, "{order:?}");
        }
    }

    #[test]
    fn masks_save_loads() {
        let full = kernel(MaskKind::FULL, TileOrder::HeadMajor).traffic(&shape(8192, 8192, Mask::Full), 132, 0);
        let causal = kernel(MaskKind::CAUSAL, TileOrder::HeadMajor).traffic(&shape(8192, 8192, Mask::Causal), 132, 0);
        let ratio = causal.tile_bytes / full.tile_bytes;
        assert!((0.5..0.55).contains(&ratio), "{ratio}");
        let window = Mask::Window { left: Some(100), right: Some(0) };
        let decode = kernel(window.kind(), TileOrder::HeadMajor).traffic(&shape(1, 8192, window), 132, 0);
        // Eight heads of two sequences look at two or three blocks of 64 keys of 512 bytes.
        assert!(decode.tile_bytes <= 16.0 * (3.0 * 64.0 + 1.0) * 512.0, "{decode:?}");
        assert!(decode.memory_bytes <= decode.tile_bytes);
    }

    #[test]
    fn heads_that_share_a_tile_load_k_and_v_once() {
        let sm = SmArch { number: 90, specific: true };
        let problem = Problem::forward(DType::Bf16, 128, MaskKind::FULL).unwrap();
        let decode = shape(1, 8192, Mask::Full);
        let default = Sm90Schedule::default_for(&problem, sm, &ShapeBucket::of(&decode));
        let of = |pack_group| {
            let schedule = Schedule::Sm90(Sm90Schedule { pack_group, ..default });
            Kernel { problem, schedule, arch: Arch::Sm(sm) }.traffic(&decode, 132, 0).tile_bytes
        };
        // Four query heads to a KV head.
        assert_eq!(of(true), decode.forward_bytes(128, 128, [2; 2]));
        assert!((3.9..4.1).contains(&(of(false) / of(true))));
    }

    #[test]
    fn memory_moves_the_live_rows_at_least_and_what_tiles_load_at_most() {
        for (q_len, kv_len) in [(1, 1), (1, 8192), (7, 300), (300, 7), (4096, 4096), (0, 5)] {
            for mask in [Mask::Full, Mask::Causal, Mask::Window { left: Some(64), right: Some(3) }] {
                for cache in [0, 1 << 20, 1 << 40] {
                    let t = kernel(mask.kind(), TileOrder::BlockMajor).traffic(&shape(q_len, kv_len, mask), 4, cache);
                    assert!(t.memory_bytes >= 0.0 && t.memory_bytes <= t.tile_bytes, "{q_len} {kv_len} {mask}: {t:?}");
                }
            }
        }
    }
}

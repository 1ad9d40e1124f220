//! The scratch memory of `backward/sm90`, and how many pairs of a sequence and a KV head have theirs at a time.

use super::BackwardSm90Schedule;
use crate::Shape;

/// How a launch is divided: `keys` and `queries` run for `pairs` at a time, the last time for what is left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Waves {
    /// Pairs of a sequence and a KV head in a wave; at least one, whatever the limit.
    pub pairs: u64,
    /// Waves.
    pub count: u64,
    /// Bytes of dS of a wave.
    pub ds_bytes: u64,
    /// Bytes of log-sum-exps and D of all heads.
    pub statistics_bytes: u64,
}

impl Waves {
    /// The waves whose dS takes at most `limit` bytes, or one pair at a time where one takes more. A function of the
    /// sizes and the limit alone: memory that happens to be free must not change which bytes come out.
    pub fn of(s: &BackwardSm90Schedule, shape: &Shape, limit: u64) -> Self {
        let all = u64::from(shape.batch) * u64::from(shape.kv_heads);
        let group = u64::from(shape.heads) / u64::from(shape.kv_heads).max(1);
        let pair = slots(s, shape) * u64::from(s.block_q) * u64::from(s.block_kv()) * 2 * group;
        let pairs = (limit / pair.max(1)).clamp(1, all.max(1));
        let rows = u64::from(shape.q_len.next_multiple_of(s.block_q));
        let statistics_bytes = u64::from(shape.batch) * u64::from(shape.heads) * rows * 8;
        Self { pairs, count: all.div_ceil(pairs), ds_bytes: pairs.min(all) * pair, statistics_bytes }
    }
}

/// Tiles of dS of a head, as `Visible::slots` in the template: of `block_q` queries by a key block.
fn slots(s: &BackwardSm90Schedule, shape: &Shape) -> u64 {
    let (q, kv) = (i64::from(s.block_q), i64::from(s.block_kv()));
    let tiles = i64::from(shape.q_len).div_ceil_of(q);
    let blocks = i64::from(shape.kv_len).div_ceil_of(kv);
    let count = match shape.mask.window() {
        (_, None) => blocks * tiles,
        (Some(left), Some(right)) => blocks * tiles.min((kv + q - 2 + i64::from(left) + i64::from(right)) / q + 1),
        (None, Some(right)) => {
            let before = i64::from(shape.kv_len) - i64::from(shape.q_len) + i64::from(right);
            (0..blocks).map(|block| tiles - (block * kv - before).div_euclid(q).clamp(0, tiles)).sum()
        }
    };
    count as u64
}

/// Division that rounds up, of numbers that are not negative.
trait DivCeil {
    fn div_ceil_of(self, by: Self) -> Self;
}

impl DivCeil for i64 {
    fn div_ceil_of(self, by: i64) -> i64 {
        (self + by - 1) / by
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::problem;
    use super::*;
    use crate::Mask;

    fn shape(batch: u32, heads: u32, kv_heads: u32, q_len: u32, kv_len: u32, mask: Mask) -> Shape {
        Shape { batch, heads, kv_heads, q_len, kv_len, mask }
    }

    #[test]
    fn waves_fill_the_limit_and_one_pair_always_fits() {
        let s = BackwardSm90Schedule::default_for(&problem(128, 128));
        let full = shape(4, 16, 16, 4096, 4096, Mask::Full);
        let waves = Waves::of(&s, &full, 1 << 30);
        assert_eq!((waves.pairs, waves.count, waves.ds_bytes, waves.statistics_bytes), (32, 2, 1 << 30, 2 << 20));
        let waves = Waves::of(&s, &full, 100 << 20);
        assert_eq!((waves.pairs, waves.count, waves.ds_bytes), (3, 22, 96 << 20));
        assert_eq!((Waves::of(&s, &full, 0).pairs, Waves::of(&s, &full, 0).count), (1, 64));
        // Causal: half of the tiles, and half a key block's on the diagonal.
        let causal = shape(1, 32, 8, 16384, 16384, Mask::Causal);
        let waves = Waves::of(&s, &causal, 1 << 30);
        assert_eq!((waves.pairs, waves.ds_bytes), (1, 128 * 129 * 128 * 128 * 4));
    }

    /// Every tile with a live pair has a slot; without a window on both sides no key block has more than it needs.
    #[test]
    fn slots_hold_every_tile_that_a_mask_leaves() {
        let s = BackwardSm90Schedule::default_for(&problem(128, 128));
        let (q, kv) = (u64::from(s.block_q), u64::from(s.block_kv()));
        for (q_len, kv_len) in [(200, 333), (333, 200), (64, 700), (700, 64), (512, 512)] {
            for mask in [
                Mask::Full,
                Mask::Causal,
                Mask::Window { left: None, right: Some(70) },
                Mask::Window { left: Some(100), right: None },
                Mask::Window { left: Some(100), right: Some(0) },
            ] {
                let shape = shape(1, 1, 1, q_len, kv_len, mask);
                let (q_len, kv_len) = (u64::from(q_len), u64::from(kv_len));
                let has = |tile: u64, block: u64| {
                    (tile * q..((tile + 1) * q).min(q_len)).any(|i| {
                        let live = mask.live(i, q_len, kv_len);
                        live.start < ((block + 1) * kv).min(kv_len) && live.end > block * kv && !live.is_empty()
                    })
                };
                let needed: u64 = (0..kv_len.div_ceil(kv))
                    .map(|b| (0..q_len.div_ceil(q)).filter(|&t| has(t, b)).count() as u64)
                    .sum();
                let slots = slots(&s, &shape);
                assert!(slots >= needed, "{mask:?} {q_len}x{kv_len}: {slots} of {needed}");
                if matches!(mask, Mask::Full | Mask::Causal) {
                    assert_eq!(slots, needed, "{mask:?} {q_len}x{kv_len}");
                }
            }
        }
    }
}

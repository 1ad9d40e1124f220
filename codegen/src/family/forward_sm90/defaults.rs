//! The schedule that serves while nothing is tuned, and the quick one that answers while it compiles: by timings on an
//! H200 (docs/measured/log/forward-sm90.md).

use super::resources::smem_bytes;
use super::{Sm90Schedule, Sm90Scheduler};
use crate::{Problem, ShapeBucket, SmArch, USUAL_UNITS};

/// A default where every multiprocessor has one tile, and all tiles walk about as many keys: the rest of the schedule
/// is the plainest, a thread block for each tile. By races of 45 such sizes on an H200
/// (docs/measured/log/2026-11-23-h200-few-rows.md).
struct FewRows {
    causal: bool,
    /// A tile of 64 rows for each multiprocessor; else 64 rows twice, as one tile of 128 or as two thread blocks.
    half: bool,
    /// Largest head dim and number of keys of the row; the first row that holds both counts.
    head_dim: u32,
    kv_len: u32,
    consumers: u32,
    block_kv: u32,
    stages: u32,
    blocks_per_sm: u32,
    take_turns: bool,
    exp2_eighths: u32,
}

const ANY: u32 = u32::MAX;

/// Before each row the sizes that it was raced at, with the microseconds of the default before and of this one.
const FEW_ROWS: [FewRows; 15] = {
    const fn row(
        causal: bool,
        half: bool,
        upto: (u32, u32),
        tile: (u32, u32, u32, u32),
        take_turns: bool,
        exp2_eighths: u32,
    ) -> FewRows {
        let ((head_dim, kv_len), (consumers, block_kv, stages, blocks_per_sm)) = (upto, tile);
        FewRows { causal, half, head_dim, kv_len, consumers, block_kv, stages, blocks_per_sm, take_turns, exp2_eighths }
    }
    [
        // 16 heads, 512 x 4k: 36.0, 30.5
        row(true, true, (64, 4096), (1, 128, 2, 1), false, 2),
        // 8/1 heads, 512 x 32k: 221, 178
        row(true, true, (64, ANY), (1, 160, 4, 1), false, 2),
        // 32 heads, 256 x 512: 13.6, 12.7; 8 heads, 1k x 2k: 25.3, 23.3
        row(true, true, (128, 2048), (1, 128, 2, 1), false, 0),
        // 8/1 heads, 512 x 8k: 68.6, 64.4; head dim 96: 65.9, 59.9
        row(true, true, (128, ANY), (1, 128, 3, 1), false, 0),
        // 16 heads, 512 x 8k: 100.3, 89.7
        row(true, true, (192, ANY), (1, 128, 2, 1), false, 0),
        // 32/8 heads, 512 x 2k: 33.5, 24.6
        row(true, false, (64, 4096), (1, 128, 2, 2), false, 0),
        // 32/8 heads, 512 x 8k: 114.4, 72.7
        row(true, false, (64, ANY), (1, 160, 2, 2), false, 0),
        // 32/8 heads, 512 x 8k: 121.4, 85.5
        row(true, false, (96, ANY), (2, 144, 2, 1), false, 0),
        // 32/8 heads, 512 x 2k: 40.9, 31.6; 32 heads, 512 x 1k: 26.4, 22.1
        row(true, false, (128, 2048), (2, 128, 2, 1), true, 0),
        // 32/8 heads, 512 x 4k: 70.6, 54.0; 8 heads, 2k x 4k: 68.5, 53.3
        row(true, false, (128, 4096), (2, 160, 2, 1), false, 0),
        // 28/4 heads, 512 x 8k, 32k: 132.9, 92.2; 541, 348
        row(true, false, (128, ANY), (2, 192, 2, 1), false, 0),
        // 32/8 heads, 512 x 8k: 179.7, 136.5
        row(true, false, (192, ANY), (2, 112, 2, 1), true, 0),
        // 32/8 heads, 512 x 8k: 221.3, 178.9
        row(true, false, (256, ANY), (2, 80, 2, 1), true, 0),
        // 32/8 heads, 512 x 8k: 76.5, 70.7
        row(false, false, (64, ANY), (1, 128, 2, 2), false, 0),
        // 32/8 heads, 512 x 8k: 99.1, 95.3
        row(false, false, (128, ANY), (2, 192, 2, 1), false, 0),
    ]
};

impl Sm90Schedule {
    /// The default schedule: what was the fastest on an H200 for head dims 64, 128 and 256 at most lengths, and the
    /// largest tile of that kind that fits for the others. For a device of [`USUAL_UNITS`].
    pub fn default_for(problem: &Problem, sm: SmArch, bucket: &ShapeBucket) -> Self {
        Self::default_of(problem, sm, bucket, true, USUAL_UNITS)
    }

    /// The same for a device of so many multiprocessors; biases come by TMA if it `brings` them, else threads load them
    /// for themselves.
    pub(super) fn default_of(problem: &Problem, sm: SmArch, bucket: &ShapeBucket, brings: bool, units: u32) -> Self {
        let units = u64::from(units);
        let d = problem.head_dim_qk.max(problem.head_dim_v);
        let changes = problem.program.is_some_and(|p| p.score().is_some());
        let long_causal = Self::is_long_causal(problem, bucket.kv_len);
        // Short queries fill a tile so; and the heads of a group find K and V in L2, which larger blocks ask for less
        // often.
        let widens = Self::rows_see_more_and_more(problem);
        let gains = d <= 64 || long_causal;
        let packs = bucket.q_len <= 256 || widens && gains && (2049..=8192).contains(&bucket.kv_len);
        let pack_group = bucket.group > 1 && packs && problem.program.is_none();
        let rows = bucket.q_len as u64 * if pack_group { bucket.group as u64 } else { 1 };
        let three = if problem.program.is_some() || problem.mask.any() { 64 } else { 96 };
        let walks = bucket.parallel as u64 / if pack_group { bucket.group as u64 } else { 1 };
        let tiles = walks * rows.div_ceil(64); // tiles of one consumer
        let consumers = match rows {
            0..=64 => 1,
            65..=128 => 2,
            // Larger tiles would leave multiprocessors idle: 12 to 18 % on an H200 at head dim 64.
            _ if tiles <= 4 * units && !problem.masks() => 2,
            // Beside three the warps that draw leave too few registers.
            _ if problem.dropout => 2,
            // Three leave the producer too few registers for a window.
            _ if d <= three && !problem.mask.left && Self::program_registers(problem) <= 16 && !changes => 3,
            _ => 2,
        };
        // What threads load along the keys wants what shared memory leaves of the L1 cache: 20 % on an H200.
        let has_biases = brings && problem.program.is_some_and(|p| !p.biases().is_empty());
        let loads = problem.program.is_some_and(|p| p.score_facts().halves_along_keys > 0);
        let runs = problem.program.is_some_and(|p| p.runs().is_some());
        // Beside the state of dropout two tiles spill: 280 bytes at head dim 128, and none without.
        let chain = !loads && !problem.dropout;
        let base = Self {
            consumers,
            block_kv: 128,
            stages: 2,
            overlap: true,
            take_turns: consumers > 1 && (loads || Self::turns_pay(problem, bucket.kv_len)),
            masked_loop: true,
            pack_group,
            scheduler: Sm90Scheduler::Queue,
            chain,
            // TFLOP/s of an H200 at 4096: head dim 64 with one 232, with two 252; 128 with one 382, with two, whose
            // blocks get smaller, 347; 192 with none 429, with one 470, causal 410 and 438. Each thread of a consumer
            // for itself: 215 (64), 343 (128).
            drawers: match d {
                _ if !problem.dropout => 0,
                0..=64 => 2,
                65..=128 => 1,
                // Packed sequences, not timed, would spill 1044 bytes for 604.
                129..=192 if problem.program.is_none() && problem.kv.is_dense() => 1,
                _ => 0,
            },
            blocks_per_sm: 1,
            // What a tile of documents reads, those of neighbouring rows in all heads do not read again: 8 % on an
            // H200.
            section_mib: match problem.mask.right || problem.masks_by_program() {
                _ if runs => Self::WALK_ALL,
                true => 32,
                false => 0,
            },
            // Wide heads fill few tiles with what L2 holds, so that the end of the walk is not even.
            ending: widens && !runs && (d <= 192 || bucket.kv_len <= 2048),
            ..Self::default()
        };
        if let Some(few) = base.for_few_tiles(problem, sm, bucket, [rows, tiles], units) {
            return few;
        }
        // Short rows under a mask leave large tiles half empty: two small blocks per multiprocessor fill each other's
        // gaps.
        if d <= 64 && problem.mask.any() && problem.program.is_none() && rows > 128 && bucket.kv_len <= 1024 {
            let small =
                Self { consumers: 2, block_kv: 64, overlap: false, take_turns: false, blocks_per_sm: 2, ..base };
            // Two blocks per multiprocessor mix lengths by themselves.
            let small = Self { ending: false, ..small };
            let small = Self { trim: small.trims(problem), ..small };
            if small.fits(problem, sm) {
                return small;
            }
        }
        let (masked, short) = (problem.masks(), bucket.kv_len <= 1024);
        let tanh = problem.program.is_some_and(|p| p.score_facts().tanhs > 0);
        let functions = problem.program.is_some_and(|p| p.score_facts().functions > 0);
        let most = match () {
            // With 128, head dim 128 spills 40 bytes for a sigmoid, a root and an exponential.
            _ if functions => 96,
            // Two ways to take it hold more registers than the larger blocks leave.
            _ if tanh => 128,
            _ if d > 192 && masked && bucket.kv_len <= 1024 => 64,
            // Larger ones spill 120 bytes.
            _ if problem.dropout && d > 192 => 64,
            _ if problem.dropout && d > 128 => 96,
            // Of whole words of bits.
            _ if problem.dropout => 128,
            // Larger ones spill what consumers keep of runs, and are no faster.
            _ if runs && d > 192 => 64,
            _ if runs && d > 128 => 96,
            _ if (masked && !long_causal) || short || d <= 96 => 128,
            _ => 160,
        };
        let largest = |chain, least: u32, room: u32, bias_stages| {
            let step = if bias_stages > 0 { 64 } else { 16 };
            let sized = |n| Self { block_kv: n * step, chain, bias_stages, ..base };
            let needed = |s: &Self| s.least_registers(problem) + s.registers_ahead(problem) + room;
            let roomy = |s: &Self| needed(s) <= s.consumer_registers(problem);
            (least / step..=most / step).rev().map(sized).find(|s| s.fits(problem, sm) && roomy(s))
        };
        // Where two buffers of Q leave too little for K and V, tiles are not chained. Programs take smaller blocks
        // first.
        let room = Self::program_registers(problem);
        let least = if room > 36 { 48 } else { 96 };
        let chained = |least, room| if chain { largest(true, least, room, 0) } else { None };
        let small = || if room > 0 { chained(least, room).or_else(|| largest(false, 16, room, 0)) } else { None };
        let plain = || chained(96, 0).or_else(|| largest(false, 16, 0, 0));
        // A chain where its second Q leaves room for large blocks, unless the product starts from biases: it is 3 %
        // slower then.
        let with_biases = Self { bias_stages: 1, ..base };
        let beside = with_biases.registers_beside(problem);
        let of_stages = |n| {
            let chained = if with_biases.seeds(problem) { None } else { largest(true, 128, beside, n) };
            chained.or_else(|| largest(false, 64, beside, n))
        };
        let brought = || if has_biases { [2, 1].into_iter().find_map(of_stages) } else { None };
        let found = brought().or_else(small).or_else(plain).unwrap_or(Self { block_kv: 16, chain: false, ..base });
        let found = Self { trim: d > 128 && !(found.chain && found.overlap) && found.trims(problem), ..found };
        // Chained tiles of few blocks wait for the Q after the next, whose place O leaves late: 2 to 4 % up to 1k, 1 %
        // for documents. Longer ones gain nothing, and other head dims lose a hundredth.
        let waits = !found.chain || (widens && short || runs) && (65..=128).contains(&d);
        let apart = Self { output_apart: waits && !loads, ..found };
        if apart.fits(problem, sm) { apart } else { found }
    }

    /// Few rows beside at least twice as many keys, so that a causal mask makes hardly a difference between tiles,
    /// which one wave holds: nothing is gained by thread blocks that stay, nor by an order of tiles, and one tile of
    /// 128 rows for each multiprocessor takes 1.35 times as long as one of 64, not twice.
    fn for_few_rows(self, problem: &Problem, sm: SmArch, bucket: &ShapeBucket, tiles: u64, units: u64) -> Option<Self> {
        let d = problem.head_dim_qk.max(problem.head_dim_v);
        let (causal, half) = (problem.mask.right, tiles <= units);
        // Without a mask only where it was raced: tiles are even at all lengths there, and the usual kind loses 4 to
        // 8 %.
        let measured = causal || bucket.kv_len > 4096 && (d <= 64 || d > 96);
        if bucket.kv_len < (2 * bucket.q_len).max(512) || tiles > 2 * units || !measured {
            return None;
        }
        let holds = |r: &&FewRows| (r.causal, r.half) == (causal, half) && d <= r.head_dim && bucket.kv_len <= r.kv_len;
        let row = FEW_ROWS.iter().find(holds)?;
        let found = Self {
            consumers: row.consumers,
            block_kv: row.block_kv,
            stages: row.stages,
            blocks_per_sm: row.blocks_per_sm,
            take_turns: row.take_turns,
            exp2_eighths: row.exp2_eighths,
            // Tiles are full without, and 0 to 10 % slower with it.
            pack_group: self.pack_group && bucket.q_len <= 256,
            scheduler: Sm90Scheduler::Single,
            chain: false,
            section_mib: 0,
            ending: false,
            ..self
        };
        found.fits(problem, sm).then_some(found)
    }

    /// Where there is hardly a tile of one consumer, of which there are `tiles`, for each multiprocessor, nothing fills
    /// the others, and what counts is how long one takes: 7 to 33 % on an H200. Under a causal mask the longest tile
    /// counts for twice as many.
    fn for_few_tiles(
        self,
        problem: &Problem,
        sm: SmArch,
        bucket: &ShapeBucket,
        [rows, tiles]: [u64; 2],
        units: u64,
    ) -> Option<Self> {
        let d = problem.head_dim_qk.max(problem.head_dim_v);
        let (causal, long) = (problem.mask.right, bucket.kv_len > 512);
        let most = if causal && (long || d > 128) { 2 * units } else { units };
        if problem.program.is_some() || problem.mask.left || rows <= 64 && bucket.kv_len > 256 {
            return None;
        }
        if let Some(found) = self.for_few_rows(problem, sm, bucket, tiles, units) {
            return Some(found);
        }
        if tiles > most {
            return None;
        }
        let alone = Self { consumers: 1, take_turns: false, ..self };
        let found = match (causal, d) {
            (false, 129..) => {
                Self { block_kv: 64, stages: if d <= 192 { 4 } else { 3 }, section_mib: 0, chain: false, ..alone }
            }
            // Larger blocks gain 2 % where all tiles are long (512 rows beside 8k keys, 16/4 heads).
            (true, 193..) if bucket.kv_len >= 2 * bucket.q_len && long => {
                Self { block_kv: 80, chain: false, output_apart: true, ending: false, ..alone }
            }
            (true, 129..) => Self { block_kv: 64, chain: false, output_apart: true, ending: false, ..alone },
            (false, _) => Self { chain: false, ..alone },
            (true, ..=64) => Self { block_kv: 64, stages: 3, exp2_eighths: 2, ending: false, ..alone },
            (true, _) => {
                Self { block_kv: if long { 80 } else { 64 }, stages: 4, section_mib: 0, ending: false, ..alone }
            }
        };
        found.fits(problem, sm).then_some(found)
    }

    /// The schedule that answers while this one is being compiled: the same tiles, sums in the same order, so the same
    /// bits, but one copy of a step where this one has several, and of finding the tile. It compiles in a quarter of
    /// the time, and is slower. None for a quick one.
    pub fn quick(&self) -> Option<Self> {
        if self.quick {
            return None;
        }
        Some(Self {
            quick: true,
            overlap: false,
            chain: false,
            output_apart: false,
            producer_spare: 0,
            take_turns: false,
            // Exponentials on the multiply-add units are for blocks without a mask alone, and have other bits.
            masked_loop: self.exp2_eighths > 0,
            scheduler: Sm90Scheduler::Single,
            trim: false,
            drawers: 0,
            ..*self
        })
    }

    /// Whether consumers had better take turns: by timings everywhere but where nothing is masked, the loop is long,
    /// and the products and the softmax of a step take about the same time.
    pub fn turns_pay(problem: &Problem, kv_len: u32) -> bool {
        let d = problem.head_dim_qk.max(problem.head_dim_v);
        let masked = problem.masks() && !Self::is_long_causal(problem, kv_len);
        // Drawers fill the gaps: 2 % faster without turns at 4096.
        if problem.dropout && d <= 64 {
            return false;
        }
        masked || kv_len <= 1024 || d <= 96 || d > 128
    }

    /// A causal mask so long that what it cuts counts less than what large blocks without turns gain: by timings from
    /// 4k keys on (1 %, 2 % from 16k on), at head dims of two chunks.
    fn is_long_causal(problem: &Problem, kv_len: u32) -> bool {
        let d = problem.head_dim_qk.max(problem.head_dim_v);
        let alone = problem.program.is_none_or(|p| p.score().is_none() && !problem.mask.any());
        alone && Self::rows_see_more_and_more(problem) && kv_len > 2048 && d > 96 && d <= 128
    }

    /// Whether each row sees what the one before sees, and more: under a causal mask, by name or as a program.
    fn rows_see_more_and_more(problem: &Problem) -> bool {
        match problem.program {
            Some(p) if p.mask().is_some() => !problem.mask.left && p.rows().is_some_and(|r| r.widens),
            _ => problem.mask.right && !problem.mask.left,
        }
    }

    fn fits(&self, problem: &Problem, sm: SmArch) -> bool {
        let bytes = smem_bytes(problem, self);
        bytes <= sm.limits().smem_per_block
            && self.blocks_per_sm * (bytes + 1024) <= sm.limits().smem_per_sm
            && self.check_registers(problem).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, Mask, MaskKind, Shape};

    fn default(d: u32, mask: Mask, heads: u32, len: u32) -> Sm90Schedule {
        let kind = if mask == Mask::Causal { MaskKind::CAUSAL } else { MaskKind::FULL };
        let problem = Problem::forward(DType::Bf16, d, kind).unwrap();
        let shape = Shape { batch: 1, heads, kv_heads: heads, q_len: len, kv_len: len, mask };
        let sm = SmArch { number: 90, specific: true };
        let schedule = Sm90Schedule::default_for(&problem, sm, &ShapeBucket::of(&shape));
        schedule.validate(&problem).unwrap();
        schedule
    }

    /// By timings of 80 sizes (docs/measured/log/2026-11-22-h200-whole-spaces.md).
    #[test]
    fn small_grids_get_small_tiles() {
        let cases = [
            (64, Mask::Full, [(8, 512, 1), (16, 1024, 2), (16, 2048, 2), (32, 2048, 3), (64, 2048, 3)]),
            (64, Mask::Causal, [(8, 512, 1), (8, 2048, 1), (16, 1024, 1), (16, 2048, 3), (64, 1024, 2)]),
            (128, Mask::Full, [(8, 1024, 1), (16, 512, 1), (8, 2048, 2), (32, 512, 2), (64, 2048, 2)]),
            (128, Mask::Causal, [(64, 128, 1), (8, 2048, 1), (16, 1024, 1), (32, 512, 2), (16, 2048, 2)]),
            (192, Mask::Full, [(8, 128, 1), (8, 1024, 1), (16, 512, 1), (16, 1024, 2), (32, 512, 2)]),
            (256, Mask::Causal, [(8, 128, 1), (8, 1024, 1), (16, 1024, 1), (32, 512, 1), (32, 1024, 2)]),
        ];
        for (d, mask, sizes) in cases {
            for (heads, len, consumers) in sizes {
                let found = default(d, mask, heads, len);
                assert_eq!(found.consumers, consumers, "head dim {d}, {mask}, {heads} heads, {len}: {found}");
            }
        }
        assert_eq!(default(128, Mask::Full, 8, 1024).to_string(), "c1-kv128-s2-overlap-queue-two-b1-l2x0");
        assert_eq!(default(128, Mask::Causal, 8, 512).to_string(), "c1-kv64-s4-overlap-queue-chain-two-b1-l2x0");
        assert_eq!(default(128, Mask::Causal, 8, 64).to_string(), "c1-kv64-s4-overlap-queue-chain-two-b1-l2x0");
        assert_eq!(default(192, Mask::Full, 8, 512).to_string(), "c1-kv64-s4-overlap-queue-two-b1-l2x0");
        assert_eq!(default(256, Mask::Full, 8, 512).to_string(), "c1-kv64-s3-overlap-queue-two-b1-l2x0");
        assert_eq!(default(192, Mask::Causal, 8, 512).to_string(), "c1-kv64-s2-overlap-queue-apart-two-b1-l2x32");
        assert_eq!(default(256, Mask::Causal, 8, 512).to_string(), "c1-kv64-s2-overlap-queue-apart-two-b1-l2x32");
        assert_eq!(default(64, Mask::Causal, 8, 2048).to_string(), "c1-kv64-s3-overlap-queue-chain-fma2-two-b1-l2x32");
    }

    /// By races of 45 sizes (docs/measured/log/2026-11-23-h200-few-rows.md).
    #[test]
    fn few_rows_beside_many_keys_get_one_tile_for_each_multiprocessor() {
        let of = |d, mask: Mask, (heads, kv_heads), (q_len, kv_len)| {
            let problem = Problem::forward(DType::Bf16, d, mask.kind()).unwrap();
            let shape = Shape { batch: 1, heads, kv_heads, q_len, kv_len, mask };
            let sm = SmArch { number: 90, specific: true };
            let schedule = Sm90Schedule::default_for(&problem, sm, &ShapeBucket::of(&shape));
            schedule.validate(&problem).unwrap();
            schedule.to_string()
        };
        const K: u32 = 1024;
        let causal = [
            // One tile of 128 rows for each.
            (128, (28, 4), (512, 8 * K), "c2-kv192-s2-overlap-two-b1-l2x0"),
            (128, (32, 8), (512, 8 * K), "c2-kv192-s2-overlap-two-b1-l2x0"),
            (128, (32, 8), (512, 32 * K), "c2-kv192-s2-overlap-two-b1-l2x0"),
            (128, (8, 1), (2 * K, 32 * K), "c2-kv192-s2-overlap-two-b1-l2x0"),
            (128, (32, 8), (512, 4 * K), "c2-kv160-s2-overlap-two-b1-l2x0"),
            (128, (8, 8), (2 * K, 4 * K), "c2-kv160-s2-overlap-two-b1-l2x0"),
            (128, (32, 8), (512, 2 * K), "c2-kv128-s2-overlap-turns-two-b1-l2x0"),
            (128, (32, 32), (512, K), "c2-kv128-s2-overlap-turns-two-b1-l2x0"),
            (96, (32, 8), (512, 8 * K), "c2-kv144-s2-overlap-two-b1-l2x0"),
            (192, (32, 8), (512, 8 * K), "c2-kv112-s2-overlap-turns-two-b1-l2x0"),
            (256, (32, 8), (512, 8 * K), "c2-kv80-s2-overlap-turns-two-b1-l2x0"),
            (64, (32, 8), (512, 8 * K), "c1-kv160-s2-overlap-two-b2-l2x0"),
            (64, (32, 8), (512, 2 * K), "c1-kv128-s2-overlap-two-b2-l2x0"),
            // One of 64 rows.
            (128, (8, 1), (512, 8 * K), "c1-kv128-s3-overlap-two-b1-l2x0"),
            (128, (8, 1), (512, 32 * K), "c1-kv128-s3-overlap-two-b1-l2x0"),
            (128, (32, 8), (128, 8 * K), "c1-kv128-s3-overlap-pack-two-b1-l2x0"),
            (128, (32, 8), (256, 8 * K), "c1-kv128-s3-overlap-pack-two-b1-l2x0"),
            (128, (8, 1), (K, 8 * K), "c1-kv128-s3-overlap-two-b1-l2x0"),
            (128, (32, 32), (256, 512), "c1-kv128-s2-overlap-two-b1-l2x0"),
            (96, (16, 16), (512, 8 * K), "c1-kv128-s3-overlap-two-b1-l2x0"),
            (192, (16, 16), (512, 8 * K), "c1-kv128-s2-overlap-two-b1-l2x0"),
            (256, (16, 4), (512, 8 * K), "c1-kv80-s2-overlap-queue-apart-two-b1-l2x32"),
            (64, (8, 1), (512, 32 * K), "c1-kv160-s4-overlap-fma2-two-b1-l2x0"),
            (64, (16, 16), (512, 4 * K), "c1-kv128-s2-overlap-fma2-two-b1-l2x0"),
            // Several waves, a token, and rows that see from none to all of the keys stay what they were.
            (128, (32, 8), (K, 8 * K), "c2-kv160-s2-overlap-pack-queue-chain-two-b1-end32"),
            (128, (32, 8), (2 * K, 32 * K), "c2-kv160-s2-overlap-queue-chain-two-b1-end32"),
            (128, (8, 8), (K, K), "c1-kv80-s4-overlap-queue-chain-two-b1-l2x0"),
            (64, (8, 8), (K, K), "c1-kv64-s3-overlap-queue-chain-fma2-two-b1-l2x32"),
        ];
        for (d, heads, lens, wanted) in causal {
            assert_eq!(of(d, Mask::Causal, heads, lens), wanted, "head dim {d}, {heads:?} heads, {lens:?}");
        }
        let full = [
            (128, (32, 8), (512, 8 * K), "c2-kv192-s2-overlap-two-b1-l2x0"),
            (64, (32, 8), (512, 8 * K), "c1-kv128-s2-overlap-two-b2-l2x0"),
            (128, (8, 1), (K, 8 * K), "c1-kv128-s2-overlap-queue-two-b1-l2x0"),
            (128, (16, 16), (K, K), "c2-kv128-s2-overlap-turns-queue-chain-two-b1-l2x0"),
        ];
        for (d, heads, lens, wanted) in full {
            assert_eq!(of(d, Mask::Full, heads, lens), wanted, "head dim {d}, {heads:?} heads, {lens:?}");
        }
    }

    /// 256 tiles of 64 rows fill 132 multiprocessors once with tiles of 128, and 114 or 78 not.
    #[test]
    fn few_rows_are_few_by_the_multiprocessors_of_the_device() {
        let problem = Problem::forward(DType::Bf16, 128, MaskKind::CAUSAL).unwrap();
        let shape = Shape { batch: 1, heads: 32, kv_heads: 8, q_len: 512, kv_len: 8192, mask: Mask::Causal };
        let (sm, bucket) = (SmArch { number: 90, specific: true }, ShapeBucket::of(&shape));
        let of = |units| Sm90Schedule::default_of(&problem, sm, &bucket, true, units);
        assert_eq!(of(USUAL_UNITS), Sm90Schedule::default_for(&problem, sm, &bucket));
        assert_eq!([132, 144].map(|units| of(units).scheduler), [Sm90Scheduler::Single; 2]);
        assert_eq!([78, 114].map(|units| of(units).scheduler), [Sm90Scheduler::Queue; 2]);
        for units in [1, 78, 114, 1000] {
            of(units).validate(&problem).unwrap();
        }
    }

    #[test]
    fn tiles_are_chained_beside_biases_unless_the_product_starts_from_them() {
        let bucket = ShapeBucket { parallel: 16, group: 1, q_len: 4096, kv_len: 4096, ..Default::default() };
        let of = |score: &str| {
            let program = crate::score::Program::parse(&format!("t: bf16[q_len, kv_len]; score = {score};")).unwrap();
            let problem = Problem::forward(DType::Bf16, 64, MaskKind::FULL).unwrap().with_program(program);
            Sm90Schedule::default_for(&problem, SmArch { number: 90, specific: true }, &bucket).to_string()
        };
        assert_eq!(of("score + t[q, kv]"), "c2-kv128-s2-overlap-turns-queue-bias2-two-b1-l2x0");
        assert_eq!(of("score * 0.5 + t[q, kv]"), "c2-kv128-s2-overlap-turns-queue-chain-bias2-two-b1-l2x0");
    }
}

//! `backward/sm90`: dK, dV and dQ by wgmma and TMA, dS written once to scratch memory, the same bytes in every run.

mod plan;
mod resources;
mod tensor_maps;

pub use tensor_maps::backward_unaddressable;

use crate::abi::ArgsLayout;
use crate::family::KernelFamily;
use crate::family::fields::{Constants, schedule};
use crate::family::forward_sm80::Sm80Schedule;
use crate::family::forward_sm90::wgmma;
use crate::family::program_length::{self, MostOperations};
use crate::launch::{LaunchPlan, SCRATCH_LIMIT, StageEntry};
use crate::packed_waves::SEQUENCE_BYTES;
use crate::traffic::Walk;
use crate::{Arch, Constraint, DType, Error, KvKind, Op, Problem, Resources, Result, Shape, ShapeBucket, USUAL_UNITS};

/// Head dim up to which the accumulators of dK and dV are registers of one warpgroup, beside S and dP.
const WIDEST_OF_BOTH: u32 = 128;
/// Head dim up to which those of one of them are.
const WIDEST: u32 = 256;
/// Operations of a score program above which a kernel compiles for over half a minute, as its derivative stands there
/// once for every score of a thread.
const LONGEST_PROGRAM: usize = 400;

/// Whether one warpgroup sums dV and the other dK, of the same 64 keys.
fn is_by_gradient(problem: &Problem) -> bool {
    problem.head_dim_qk.max(problem.head_dim_v) > WIDEST_OF_BOTH
}

/// Keys of a key block: 64 of each of two warpgroups, or the same 64.
fn block_kv(problem: &Problem) -> u32 {
    if is_by_gradient(problem) { 64 } else { 128 }
}

/// Queries and keys up to which dQ is summed beside dK and dV.
const MOST_ROWS_OF_JOINT: u32 = 4096;
/// Queries or keys from which dQ is reduced in turns, up to head dim 64.
const LEAST_ROWS_OF_TURNS: u32 = 512;
/// Most thread blocks of 128 that begin with dQ.
const MOST_DQ_BLOCKS: u32 = 64;

/// Whether there is a kernel that sums dQ beside dK and dV.
fn can_be_joint(problem: &Problem) -> bool {
    problem.program.is_none() && problem.kv == KvKind::Dense && !is_by_gradient(problem)
}

/// Whether there is a kernel that reduces dQ by key blocks in turns: each of two warpgroups forms half of it. Windows
/// above head dim 64 spill.
fn can_take_turns(problem: &Problem, block_q: u32) -> bool {
    let wide = problem.head_dim_qk > 64;
    can_be_joint(problem) && wide == (block_q == 64) && !(wide && problem.mask.left)
}

/// Bytes of dS of a pair of a sequence and a KV head, about.
fn ds_bytes(problem: &Problem, bucket: &ShapeBucket) -> u64 {
    let all = u64::from(bucket.q_len) * u64::from(bucket.kv_len) * 2 * u64::from(bucket.group.max(1));
    if problem.mask.right { all / 2 } else { all }
}

schedule! {
    /// Tiles of the stages of `backward/sm90`.
    pub struct BackwardSm90Schedule {
        /// Queries of a step of `keys`.
        pub block_q: u32 => code, number("q");
        /// Buffers of Q and of dO in `keys`.
        pub stages: u32 => code, number("s");
        /// Buffers of K and V in `keys`: with 2 those of the next key block are loaded ahead, and thread blocks are
        /// persistent.
        pub key_stages: u32 => code, number_unless(1, "ks");
        /// Tiles of 64 rows of a warpgroup of `queries`.
        pub row_tiles: u32 => code, number("rows");
        /// Buffers of K and dS in `queries`.
        pub row_stages: u32 => code, number("rs");
        /// MiB of Q and dO that are walked together under a causal mask.
        pub section_mib: u32 => launch, number("l2x");
        /// Of 128 thread blocks those that sum dQ while the others walk over key blocks, in one launch; with 0 dQ is a
        /// launch of its own.
        pub dq_blocks: u32 => code, number_unless(0, "dq");
        /// Whether dQ is reduced to fp32 sums in memory, key block by key block in one order, in place of dS.
        pub turns: bool => code, flag("turns");
        /// Whether key blocks are taken by tickets, and query heads that share a head of K walked by several thread
        /// blocks, which add their dK and dV to fp32 sums in memory in one order.
        pub walks: bool => code, flag("walks");
    }
}

impl BackwardSm90Schedule {
    /// By figures of an H200, TFLOP/s of the whole: persistent with K and V ahead 591 at head dim 128 and 4096 queries
    /// and keys, 414 at 512, against 546 and 391 with one buffer; at head dim 64 410 and 326 against 406 and 288. Steps
    /// of 64 queries at head dim 64 are 12 to 16 % slower. Under a causal mask key blocks of unequal length in strides
    /// lose where there are many: 477 against 512 at 4096.
    ///
    /// Of packed sequences, which are rarely of one length, the same: 8 of 2048 take 1569 us with one buffer and eight
    /// times as many thread blocks as run at a time, 2134 in strides; 256 of 8 to 512, of 12 heads of dim 64, take 611
    /// in strides and steps of 64 queries, 674 in steps of 128, 680 with more thread blocks.
    ///
    /// dQ beside dK and dV, head dim 128: 545 against 536 at 4096, 587 against 554 with 4 GiB of scratch memory, 426
    /// against 411 at 512; causal 267 against 240 at 512, 501 against 498 at 4096, and 481 against 410 with 8 of 32
    /// heads. At 16,384, where waves are of few pairs, 463 against 539: rows that are ready last wait for one another.
    ///
    /// dQ reduced in turns, us against the best of the others in the same run: head dim 64 843 against 883 at 1024,
    /// 2833 against 3068 at 4096, 11361 against 13835 at 16,384, causal 595 against 599, 1543 against 1730, 5571
    /// against 6702; head dim 128 738 against 656, 2336 against 2329, 9851 against 10958, causal 518 against 455, 1330
    /// against 1300, 4843 against 5488. A window of 1024 over 16,384: 1480 against 1438. Since steps that no mask cuts
    /// have a loop of their own also at 512, where head dim 64 takes 503 against 510, causal 398 against 410, head dim
    /// 32 664 against 900, causal 498 against 687.
    fn default_for(problem: &Problem, bucket: &ShapeBucket) -> Self {
        let s = Self::with_whole_groups(problem, bucket);
        Self { walks: problem.kv.is_dense() && s.is_better_in_walks(problem, bucket), ..s }
    }

    /// That whose thread blocks walk all heads of a group.
    fn with_whole_groups(problem: &Problem, bucket: &ShapeBucket) -> Self {
        if is_by_gradient(problem) {
            let [qk, v] = [problem.head_dim_qk, problem.head_dim_v].map(|dim| dim.div_ceil(64));
            let stages = if qk + v > 6 { 2 } else { 3 };
            return Self {
                block_q: 64,
                stages,
                key_stages: 1,
                row_tiles: 1,
                row_stages: 3,
                section_mib: 24,
                dq_blocks: 0,
                turns: false,
                walks: false,
            };
        }
        // A program's change of the score spills with 128 queries: each thread has 64 scores and as many of dP.
        let changes = problem.program.is_some_and(|p| p.cost_of_a_score()[1] > 0);
        let widest = problem.head_dim_qk.max(problem.head_dim_v);
        let packed = !problem.kv.is_dense();
        let short = packed && bucket.q_len <= 512;
        let narrow = !changes && widest <= 64 && !short;
        let longest = bucket.q_len.max(bucket.kv_len);
        let turns = can_take_turns(problem, if narrow { 128 } else { 64 })
            && !problem.mask.left
            // Dropout spills least in turns: nothing at head dim 128, beside 148 bytes where dQ is of the launch.
            && (problem.dropout
                || longest >= if narrow { LEAST_ROWS_OF_TURNS } else { 2 * MOST_ROWS_OF_JOINT }
                // dS of few pairs fills a wave: 4575 us against 5214 with 32/1 heads at 4 x 4096 (head dim 128).
                || (!narrow && bucket.group > 1 && ds_bytes(problem, bucket) >= SCRATCH_LIMIT / 2));
        if turns {
            return Self::in_turns(if narrow { 128 } else { 64 });
        }
        let joint = can_be_joint(problem) && !problem.mask.left && !problem.dropout && longest <= MOST_ROWS_OF_JOINT;
        let dq_blocks = match (joint, problem.mask.right) {
            (false, _) => 0,
            (true, false) => 21,
            (true, true) => 8,
        };
        let uneven = match packed {
            true => !short,
            false => problem.mask.right && !problem.mask.left && bucket.q_len > 1024 && !joint,
        };
        let key_stages = if uneven { 1 } else { 2 };
        let (block_q, stages) = match narrow {
            true => (128, if uneven { 3 } else { 2 }),
            false => (64, if short && widest <= 64 { 4 } else { 2 }),
        };
        Self {
            block_q,
            stages,
            key_stages,
            row_tiles: 2,
            row_stages: 2,
            section_mib: 24,
            dq_blocks,
            turns: false,
            walks: false,
        }
    }

    /// Whether heads of a group had better be walked apart, or key blocks of one head taken by tickets.
    ///
    /// By figures of an H200, us, whole groups and apart, causal unless others are given: too few key blocks in a wave,
    /// or the longest last, head dim 128 with 32/8 heads 2762, 2632 at 4 x 4096, with 32/4 1718, 1412 at 8 x 2048,
    /// with 32/1 1046, 835 at 16 x 1024 and 13,489, 2825 at 4 x 4096, with 64/8 257, 191 at 1024; where there are four
    /// for each multiprocessor 801, 809. Head dim 192 with 32/1 at 4096 11,055, 4252. A group's Q, dO and sums of dQ
    /// in turns more than L2: 11,845, 10,736 at 16,384 with 32/8 heads, full 19,898, 19,314. By tickets alone soft caps
    /// at head dim 64 10,746, 9190, full, documents 2912, 2494, and a window of 1024 over 16,384 1041, 1013; at head
    /// dim 192 1935, 2124.
    fn is_better_in_walks(&self, problem: &Problem, bucket: &ShapeBucket) -> bool {
        let (windowed, causal) = (problem.mask.left, problem.mask.right && !problem.mask.left);
        let narrow = self.block_q == 128;
        if !is_by_gradient(problem) && (problem.program.is_some() || (windowed && narrow && !problem.dropout)) {
            return true;
        }
        if bucket.group <= 1 {
            return false;
        }
        let pairs = u64::from((bucket.parallel / bucket.group).max(1));
        // Where dS lies in memory a wave has as many pairs as fit beside their statistics.
        let fit =
            if self.turns || windowed { pairs } else { SCRATCH_LIMIT * 63 / 64 / ds_bytes(problem, bucket).max(1) };
        let of_wave = pairs.div_ceil(pairs.div_ceil(fit.max(1)));
        let blocks = of_wave * u64::from(bucket.kv_len.div_ceil(block_kv(problem)));
        let rounds = blocks as f64 / f64::from(USUAL_UNITS);
        let beyond_l2 = self.turns && u64::from(bucket.q_len) >= plan::LEAST_QUERIES_OF_A_WALK && (causal || !narrow);
        beyond_l2 || rounds < if causal { 3.5 } else { 0.75 }
    }

    /// dQ reduced in turns, in steps of so many queries. Pairs that keep Q, dO and their sums in L2 run together: 8 MiB
    /// of Q and dO are 577 TFLOP/s at head dim 128 and 4096 queries, 24 are 451, one pair 512 (H100). 16 MiB are two
    /// pairs of 16,384 queries, 629 TFLOP/s (H200), where 8 are one, 584; under a causal mask and at 4096 they are the
    /// same. Up to head dim 64 there is room for two buffers of K and V: 2743 us against 2803 at 4096, 10,508 against
    /// 10,847 at 16,384.
    const fn in_turns(block_q: u32) -> Self {
        Self {
            block_q,
            stages: 2,
            key_stages: if block_q == 128 { 2 } else { 1 },
            row_tiles: 2,
            row_stages: 2,
            section_mib: 16,
            dq_blocks: 0,
            turns: true,
            walks: false,
        }
    }

    /// Whether thread blocks are persistent.
    const fn is_persistent(&self) -> bool {
        self.key_stages > 1
    }

    /// Whether dQ is summed in the launch of dK and dV.
    const fn is_joint(&self) -> bool {
        self.dq_blocks > 0
    }

    /// Query rows of a thread block of `queries`.
    const fn row_block(&self) -> u32 {
        128 * self.row_tiles
    }
}

impl KernelFamily for BackwardSm90Schedule {
    const NAME: &'static str = "backward/sm90";
    const TEMPLATE: &'static str = "backward/sm90.cu";
    const OP: Op = Op::Backward;
    const ARGS: ArgsLayout = ArgsLayout::BACKWARD_MAPPED;
    const PACKED: bool = true;

    fn runs_on(arch: Arch) -> Result<()> {
        let no = |limit: &str, remedy: &str| Err(Error::unsupported("family", Self::NAME, limit, remedy));
        match arch {
            Arch::Cpu(_) => no("runs on CUDA devices only", "use backward/cpu"),
            Arch::Sm(sm) if sm.number == 90 && sm.specific => Ok(()),
            Arch::Sm(_) => no("needs sm_90a: its instructions exist on Hopper alone", "use backward/naive"),
        }
    }

    fn supports(problem: &Problem, _: Arch) -> Result<()> {
        let no = |field, value: String, limit: &str, remedy: &str| Err(Error::unsupported(field, value, limit, remedy));
        if problem.dtype == DType::F32 {
            let limit = "backward/sm90 computes f16 and bf16 only";
            return no("dtype", problem.dtype.to_string(), limit, "backward/naive is the exact f32 path");
        }
        problem.check_vectors(Self::NAME)?;
        let widest = problem.head_dim_qk.max(problem.head_dim_v);
        if widest > WIDEST {
            let limit = "backward/sm90 takes head dims up to 256: dK or dV of more do not fit the registers";
            return no("head_dim", widest.to_string(), limit, "use backward/naive");
        }
        // Their statistics have a log-sum-exp of a row, times log2(e): what that rounds off is no small exponent then.
        if !problem.kv.is_dense() && problem.reaches_far() {
            let limit = "backward/sm90 takes no scores far from zero over packed sequences";
            return no("program", problem.to_string(), limit, "use backward/sm80");
        }
        let remedy = "use backward/naive";
        program_length::check(Self::NAME, problem, MostOperations::Together(LONGEST_PROGRAM), remedy)
    }

    fn unmet(constraint: Constraint) -> Option<&'static str> {
        match constraint {
            Constraint::Strided => {
                Some("TMA takes strides above zero and below 2^40 bytes, and a dimension of these tensors has another")
            }
            Constraint::LooseBiases => None,
            // The rest is as for the forward kernels on tensor cores.
            other => Sm80Schedule::unmet(other),
        }
    }

    fn default_for(problem: &Problem, _: Arch, bucket: &ShapeBucket) -> Self {
        Self::default_for(problem, bucket)
    }

    fn space(problem: &Problem, arch: Arch) -> Vec<Self> {
        let sizes = [256, 4096, 16384].map(|n| ShapeBucket { q_len: n, kv_len: n, ..Default::default() });
        let mut all = sizes.map(|bucket| Self::default_for(problem, &bucket)).to_vec();
        for s in all.clone() {
            all.extend([true, false].map(|walks| Self { walks, ..s }));
            if is_by_gradient(problem) {
                all.extend([Self { row_stages: 2, ..s }, Self { stages: 2, ..s }]);
                continue;
            }
            all.extend([
                Self { key_stages: 3 - s.key_stages, stages: 2, ..s },
                Self { block_q: 192 - s.block_q, stages: 2, key_stages: 1, row_tiles: 1, ..s },
                Self { dq_blocks: 0, ..s },
                Self::in_turns(s.block_q),
                Self { key_stages: 1, ..Self::in_turns(s.block_q) },
                Self { walks: true, ..Self::in_turns(s.block_q) },
            ]);
        }
        all.sort_unstable();
        all.dedup();
        all.retain(|s| KernelFamily::validate(s, problem, arch).is_ok());
        all
    }

    fn validate(&self, problem: &Problem, _: Arch) -> Result<()> {
        let no =
            |field, value: u32, limit: &str| Err(Error::unsupported(field, value, limit, "use the default schedule"));
        if !matches!(self.block_q, 64 | 128) {
            return no("block_q", self.block_q, "64 or 128");
        }
        for (field, value) in [("stages", self.stages), ("row_stages", self.row_stages)] {
            if value < 2 {
                return no(field, value, "at least two buffers");
            }
        }
        for (field, value) in [("key_stages", self.key_stages), ("row_tiles", self.row_tiles)] {
            if !(1..=2).contains(&value) {
                return no(field, value, "one or two");
            }
        }
        if self.dq_blocks > MOST_DQ_BLOCKS {
            return no("dq_blocks", self.dq_blocks, "at most 64 of 128 thread blocks");
        }
        if self.is_joint() && !can_be_joint(problem) {
            return no(
                "dq_blocks",
                self.dq_blocks,
                "0 with a score program, of packed sequences, and above head dim 128",
            );
        }
        let fits = self.stages == 2 && (self.key_stages == 1 || self.block_q == 128);
        if self.turns && (self.is_joint() || !fits || !can_take_turns(problem, self.block_q)) {
            let limit = "without dq_blocks, dense and without a score program, up to head dim 128, there without a \
                         window, with two buffers of Q, and steps of 64 queries and one buffer of K and V above head \
                         dim 64, else of 128";
            return Err(Error::unsupported("turns", "true", limit, "use the default schedule"));
        }
        if self.walks && !problem.kv.is_dense() {
            return Err(Error::unsupported("walks", "true", "dense tensors", "use the default schedule"));
        }
        if is_by_gradient(problem) && self.block_q != 64 {
            return no("block_q", self.block_q, "64 above head dim 128");
        }
        let live = resources::live_registers(problem, self);
        if live > resources::MOST_LIVE_REGISTERS {
            let limit =
                format!("{live} accumulators and operands of a thread, at most {}", resources::MOST_LIVE_REGISTERS);
            return no("block_q", self.block_q, &limit);
        }
        Ok(())
    }

    fn resources(&self, problem: &Problem) -> Resources {
        let queries = if self.turns { 0 } else { resources::queries_smem_bytes(problem, self) };
        let smem_bytes = resources::keys_smem_bytes(problem, self).max(queries);
        // Thread blocks start with equal shares of the registers and their warpgroups exchange them: `validate` checks
        // those.
        Resources { threads: plan::THREADS, smem_bytes, registers: 24 }
    }

    fn constants(&self, problem: &Problem, constants: &mut Constants) {
        // 1 to 3 % at head dims 64 and 96 to 192 (160: nothing), 5 to 6 % at 256; at 72 and 80 causal gains 1.5 % and
        // full loses 0.6; below 49 they cost up to 4 %.
        let double_calls = match problem.head_dim_qk.max(problem.head_dim_v) {
            ..=48 => 0,
            49..=64 | 113..=128 => 3,
            _ => 4,
        };
        let widths = [self.block_q, problem.head_dim_qk.next_multiple_of(16), problem.head_dim_v.next_multiple_of(16)];
        constants.extend([
            ("block_kv", block_kv(problem).to_string()),
            ("statistics_rows", plan::statistics_rows(problem).to_string()),
            ("sequences_threads", plan::SEQUENCES_THREADS.to_string()),
            ("sequences_smem_bytes", plan::SEQUENCES_SMEM_BYTES.to_string()),
            ("sequence_bytes", SEQUENCE_BYTES.to_string()),
            ("keys_smem_bytes", resources::keys_smem_bytes(problem, self).to_string()),
            ("queries_smem_bytes", resources::queries_smem_bytes(problem, self).to_string()),
            ("joint", u32::from(self.is_joint()).to_string()),
            ("turns", u32::from(self.turns).to_string()),
            ("walks", u32::from(self.walks).to_string()),
            ("double_calls", double_calls.to_string()),
            ("rows_threads", plan::ROWS_THREADS.to_string()),
            ("wgmma_instructions", wgmma::instructions_by_depth(problem.dtype, &widths)),
        ]);
    }

    fn entries(&self, problem: &Problem) -> &'static [StageEntry] {
        plan::entries(self, problem)
    }

    fn plan(&self, problem: &Problem, shape: &Shape) -> Result<LaunchPlan> {
        plan::plan(self, problem, shape)
    }

    fn walk(&self, problem: &Problem, shape: &Shape) -> Walk {
        Walk::plain(self.block_q, block_kv(problem), shape)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MaskKind;

    pub(super) fn problem(qk: u32, v: u32) -> Problem {
        Problem::forward_qk_v(DType::Bf16, qk, v, MaskKind::CAUSAL).unwrap().backward()
    }

    pub(super) fn hopper() -> Arch {
        "sm_90a".parse().unwrap()
    }

    /// With dQ in a launch of its own.
    pub(super) fn schedule(qk: u32, v: u32) -> BackwardSm90Schedule {
        let bucket = ShapeBucket { q_len: 256, kv_len: 256, ..Default::default() };
        let default = BackwardSm90Schedule::default_for(&problem(qk, v), &bucket);
        BackwardSm90Schedule { dq_blocks: 0, ..default }
    }

    /// What ptxas keeps in registers, and what it serialises products for.
    #[test]
    fn registers_are_those_that_the_compiler_finds() {
        let (narrow, wide) = (schedule(64, 64), schedule(128, 128));
        for (fits, s, dim) in [
            (true, wide, 128),
            (true, narrow, 64),
            (true, BackwardSm90Schedule { block_q: 64, ..narrow }, 64),
            (false, BackwardSm90Schedule { block_q: 128, ..wide }, 128),
            (true, schedule(256, 256), 256),
            (false, BackwardSm90Schedule { row_tiles: 2, ..schedule(256, 256) }, 256),
        ] {
            assert_eq!(KernelFamily::validate(&s, &problem(dim, dim), hopper()).is_ok(), fits, "{s}");
        }
    }

    #[test]
    fn names_say_what_differs_from_most() {
        assert_eq!(schedule(128, 128).to_string(), "q64-s2-ks2-rows2-rs2-l2x24");
        assert_eq!(BackwardSm90Schedule { key_stages: 1, ..schedule(64, 64) }.to_string(), "q128-s2-rows2-rs2-l2x24");
        let joint = BackwardSm90Schedule { dq_blocks: 21, ..schedule(128, 128) };
        assert_eq!(joint.to_string(), "q64-s2-ks2-rows2-rs2-l2x24-dq21");
    }

    #[test]
    fn only_what_has_a_joint_kernel_sums_dq_in_it() {
        let says = |dq_blocks, problem: Problem| {
            let s = BackwardSm90Schedule { dq_blocks, ..schedule(problem.head_dim_qk, problem.head_dim_v) };
            KernelFamily::validate(&s, &problem, hopper()).map_err(|e| e.to_string())
        };
        let program = crate::score::Program::parse("mask = kv <= q;").unwrap();
        for (most, problem) in [
            (64, problem(128, 128)),
            (64, problem(16, 72)),
            (0, problem(136, 128)),
            (0, problem(64, 64).with_program(program)),
            (0, problem(64, 64).with_kv(KvKind::RAGGED)),
        ] {
            says(most, problem).unwrap();
            assert!(says(most + 1, problem).unwrap_err().contains("dq_blocks"), "{problem}");
        }
    }

    #[test]
    fn heads_of_a_group_are_walked_apart_where_key_blocks_are_few() {
        let of = |dim, batch, heads, kv_heads, n| {
            let mask = crate::Mask::Causal;
            let shape = Shape { batch, heads, kv_heads, q_len: n, kv_len: n, mask };
            BackwardSm90Schedule::default_for(&problem(dim, dim), &ShapeBucket::of(&shape))
        };
        let is = |dim, batch, heads, kv_heads, n| {
            let s = of(dim, batch, heads, kv_heads, n);
            (s.walks, s.turns)
        };
        assert_eq!([is(128, 32, 32, 8, 512), is(128, 4, 32, 8, 4096)], [(false, false), (true, false)]);
        assert_eq!([is(128, 1, 32, 8, 16384), is(128, 1, 32, 32, 16384)], [(true, true), (false, true)]);
        assert_eq!([is(128, 16, 32, 1, 1024), is(128, 4, 32, 1, 4096)], [(true, false), (true, true)]);
        assert_eq!([is(192, 4, 32, 8, 4096), is(192, 4, 32, 1, 4096)], [(false, false), (true, false)]);
        assert_eq!([is(64, 4, 32, 8, 4096), is(64, 1, 64, 8, 4096)], [(false, true), (true, true)]);
        // By tickets, which programs and windows have without groups as well.
        let bucket = ShapeBucket { parallel: 128, group: 1, q_len: 4096, kv_len: 4096, ..Default::default() };
        let program = crate::score::Program::parse("score = 2.0 * tanh(score);").unwrap();
        let by_program =
            |dim| BackwardSm90Schedule::default_for(&problem(dim, dim).with_program(program.clone()), &bucket).walks;
        assert_eq!([by_program(64), by_program(128), by_program(192)], [true, true, false]);
        let packed = problem(64, 64).with_kv(KvKind::RAGGED);
        assert!(!BackwardSm90Schedule::default_for(&packed, &bucket).walks);
        let apart = BackwardSm90Schedule { walks: true, ..schedule(64, 64) };
        let e = KernelFamily::validate(&apart, &packed, hopper()).unwrap_err().to_string();
        assert!(e.contains("walks") && e.contains("dense"), "{e}");
    }

    #[test]
    fn packed_sequences_have_a_schedule_by_their_usual_length() {
        let of = |dim, n| {
            let bucket = ShapeBucket { q_len: n, kv_len: n, ..Default::default() };
            BackwardSm90Schedule::default_for(&problem(dim, dim).with_kv(crate::KvKind::RAGGED), &bucket).to_string()
        };
        assert_eq!([of(64, 512), of(64, 1024)], ["q64-s4-ks2-rows2-rs2-l2x24", "q128-s3-rows2-rs2-l2x24"]);
        assert_eq!([of(128, 512), of(128, 1024)], ["q64-s2-ks2-rows2-rs2-l2x24", "q64-s2-rows2-rs2-l2x24"]);
        assert_eq!(of(256, 512), of(256, 4096));
    }

    #[test]
    fn what_it_cannot_compute_is_refused_with_what_to_use() {
        let wrong = |problem: Problem| BackwardSm90Schedule::supports(&problem, hopper()).unwrap_err().to_string();
        let terms: String = (0..300).map(|i| format!(" + tanh(score * {i}.0)")).collect();
        let long = format!("score = score{terms};");
        let program = |text: &str| problem(64, 64).with_program(crate::score::Program::parse(text).unwrap());
        for (problem, field) in
            [(Problem { dtype: DType::F32, ..problem(64, 64) }, "dtype"), (program(&long), "compile for minutes")]
        {
            let e = wrong(problem);
            assert!(e.contains(field) && e.contains("backward/naive"), "{e}");
        }
        for problem in [problem(128, 24), problem(64, 192), problem(256, 256), program("score = score * 2.0;")] {
            BackwardSm90Schedule::supports(&problem, hopper()).unwrap();
        }
        assert!(BackwardSm90Schedule::runs_on("sm_80".parse().unwrap()).is_err());
    }

    #[test]
    fn packed_sequences_of_scores_far_from_zero_are_refused() {
        let of = |text: &str| problem(64, 64).with_program(crate::score::Program::parse(text).unwrap());
        let supports = |problem| BackwardSm90Schedule::supports(&problem, hopper());
        let (near, far) = (of("score = 2.0 * tanh(score);"), of("score = select(kv < 7, score, -3.0e38);"));
        assert!(far.reaches_far() && !near.reaches_far());
        supports(far).unwrap();
        supports(near.with_kv(crate::KvKind::RAGGED)).unwrap();
        let e = supports(far.with_kv(crate::KvKind::RAGGED)).unwrap_err().to_string();
        for part in ["program", "scores far from zero over packed sequences", "use backward/sm80"] {
            assert!(e.contains(part), "{e}");
        }
    }

    #[test]
    fn every_schedule_of_the_space_fits_the_device() {
        for (qk, v) in
            [(16, 16), (64, 64), (72, 24), (80, 128), (128, 128), (192, 128), (16, 256), (200, 184), (256, 256)]
        {
            let (dense, program) = (problem(qk, v), crate::score::Program::parse("score = score * 2.0;").unwrap());
            let packed = dense.with_kv(crate::KvKind::RAGGED);
            for problem in [dense, packed, packed.with_program(program)] {
                let space = BackwardSm90Schedule::space(&problem, hopper());
                assert!(space.len() >= 2, "{space:?}");
                for s in space {
                    s.resources(&problem).check(hopper(), 1).unwrap();
                }
            }
        }
    }
}

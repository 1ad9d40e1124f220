//! Schedule of `forward/sm90`: a producer warpgroup, consumer warpgroups, and what overlaps with what.

use crate::score::{Bias, OfScores};
use crate::{Error, Problem, Result};
use serde::{Deserialize, Serialize};
use std::fmt;

mod defaults;
mod space;

/// How a Hopper GPU computes one problem (FlashAttention-3, section 3).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sm90Schedule {
    /// Warpgroups that compute; each owns 64 query rows. One more brings the data.
    pub consumers: u32,
    /// Keys of one step of the main loop.
    pub block_kv: u32,
    /// Buffers of K and V each.
    pub stages: u32,
    /// Inside a warpgroup, the scores of a block are computed and exponentiated while the product of the block before
    /// with V still runs.
    #[serde(default, skip_serializing_if = "crate::omitted::is_default")]
    pub overlap: bool,
    /// Consumers take turns in issuing matrix work (ping-pong), so that the softmax of one hides behind the products of
    /// another.
    #[serde(default, skip_serializing_if = "crate::omitted::is_default")]
    pub take_turns: bool,
    /// P goes through shared memory instead of staying in registers: fewer registers, more traffic.
    #[serde(default, skip_serializing_if = "crate::omitted::is_default")]
    pub p_in_shared: bool,
    /// Blocks that need a mask run in a loop of their own.
    #[serde(default, skip_serializing_if = "crate::omitted::is_default")]
    pub masked_loop: bool,
    /// O is rescaled only when a row maximum has grown by more than 2^8: faster, and less exact where one score
    /// dominates its row.
    #[serde(default, skip_serializing_if = "crate::omitted::is_default")]
    pub lazy_rescale: bool,
    /// The query heads of a KV head share a tile, side by side: short queries then fill it. Used where their number is a
    /// power of two up to 64.
    #[serde(default, skip_serializing_if = "crate::omitted::is_default")]
    pub pack_group: bool,
    /// Each consumer leaves out the key blocks that only the rows of others visit, at the ends of what a mask leaves.
    #[serde(default, skip_serializing_if = "crate::omitted::is_default")]
    pub trim: bool,
    /// Which thread block computes which tile.
    #[serde(default, skip_serializing_if = "crate::omitted::is_default")]
    pub scheduler: Sm90Scheduler,
    /// Q of the next tile comes in while this one is computed (two buffers) and, with `overlap`, its first scores are
    /// computed beside this one's last product: the matrix units do not see where a tile ends. For thread blocks that stay.
    #[serde(default, skip_serializing_if = "crate::omitted::is_default")]
    pub chain: bool,
    /// O leaves from shared memory of its own: the next Q comes as soon as the last scores are there, and neither V nor the
    /// other consumers wait for O. For thread blocks that stay.
    #[serde(default, skip_serializing_if = "crate::omitted::is_default")]
    pub output_apart: bool,
    /// Buffers of the biases that a score program reads by query and key, a tile for each consumer, which the copy engine fills. 0: each
    /// thread reads its own elements from memory, ahead of their use.
    #[serde(default, skip_serializing_if = "crate::omitted::is_default")]
    pub bias_stages: u32,
    /// Registers that a thread of the producer keeps beyond those that it needs by rule, and that consumers then lack: for masks whose
    /// blocks take more to find than the rule says.
    #[serde(default, skip_serializing_if = "crate::omitted::is_default")]
    pub producer_spare: u32,
    /// Eighths of the exponentials that run on the multiply-add units: for small head dims, whose products take no longer
    /// than the exponentials of the special-function unit. Needs `masked_loop`, since masked scores must vanish.
    #[serde(default, skip_serializing_if = "crate::omitted::is_default")]
    pub exp2_eighths: u32,
    /// Thread blocks, 1 or 2, that take neighbouring tiles and share what is read of K and V: each brings half of every
    /// block to both.
    #[serde(default = "crate::omitted::one", skip_serializing_if = "crate::omitted::is_one")]
    pub cluster: u32,
    /// Thread blocks on one multiprocessor.
    #[serde(default = "crate::omitted::one", skip_serializing_if = "crate::omitted::is_one")]
    pub blocks_per_sm: u32,
    /// MiB of K and V whose tiles are walked together, block by block, so that they stay in L2: 0 is one KV head after
    /// the other, [`Sm90Schedule::WALK_ALL`] the same block of all heads. A decision of the launch, not of the code.
    #[serde(default, skip_serializing_if = "crate::omitted::is_default")]
    pub section_mib: u32,
    /// Only the end of the walk is such a section, and before it come single KV heads: tiles of all lengths run beside each other
    /// then, and the longest of the end first. For masks that make lengths differ.
    #[serde(default, skip_serializing_if = "crate::omitted::is_default")]
    pub ending: bool,
    /// What is quick for the compiler goes before what is quick on the device, and the bits stay the same
    /// ([`Sm90Schedule::quick`]). Not in the searched space.
    #[serde(default, skip_serializing_if = "crate::omitted::is_default")]
    pub quick: bool,
}

/// Which thread block computes which tile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize)]
pub enum Sm90Scheduler {
    /// Every tile has its own thread block, which the hardware starts where there is room.
    #[default]
    Single,
    /// Thread blocks stay, and each takes every so many-th tile.
    Stride,
    /// Thread blocks stay, and each takes the next tile that nobody has, by a counter in global memory.
    Queue,
}

impl Sm90Scheduler {
    /// Whether thread blocks stay.
    pub const fn stays(self) -> bool {
        !matches!(self, Self::Single)
    }
}

impl Sm90Schedule {
    /// A `section_mib` that holds everything.
    pub const WALK_ALL: u32 = u32::MAX;

    /// Query rows of one thread block.
    pub const fn block_q(&self) -> u32 {
        self.consumers * 64
    }

    /// Threads of one block.
    pub const fn threads(&self) -> u32 {
        (self.consumers + 1) * 128
    }

    /// Registers of a thread when the block starts: an equal share.
    const fn launch_registers(&self) -> u32 {
        65536 / (self.threads() * self.blocks_per_sm) / 8 * 8
    }

    /// Whether the producer gives registers to the consumers. A compiler that must keep to two limits takes longer, so a quick
    /// schedule moves none where an equal share suffices.
    fn registers_move(&self, problem: &Problem) -> bool {
        !self.quick || problem.program.is_some() || self.least_registers(problem) > self.launch_registers()
    }

    /// Registers of a thread of the producer, once it has given back what it does not need: the fewest that there can
    /// be or, where it also decides who computes what, as many as that takes, and those to spare.
    pub fn producer_registers(&self, problem: &Problem) -> u32 {
        match self.registers_move(problem) {
            true => self.producer_needs(problem) + self.producer_spare,
            false => self.launch_registers(),
        }
    }

    /// The rule. Many threads leave the producer 32.
    fn producer_needs(&self, problem: &Problem) -> u32 {
        // It copies the biases that the copy engine cannot address, and the consumers can spare no more.
        if !self.biases(problem).is_empty() {
            return 56;
        }
        // It finds the blocks that a program's mask leaves, which takes little where they lie in memory, or where that is much like a
        // causal one.
        if problem.masks_by_program() {
            return match () {
                _ if self.consumers == 3 || self.blocks_per_sm > 1 => 56,
                _ if problem.program.is_some_and(|p| p.runs().is_some()) => 40,
                _ if Self::is_like_causal(problem) => 40,
                _ => 72,
            };
        }
        match (self.consumers, self.scheduler.stays()) {
            (3, _) => 32,
            (2, true) if self.blocks_per_sm > 1 => 32,
            (_, true) => 40,
            (_, false) => 24,
        }
    }

    /// Registers of a thread of a consumer: what the producer gave back is shared out.
    pub fn consumer_registers(&self, problem: &Problem) -> u32 {
        let pool = self.launch_registers() * (self.consumers + 1) - self.producer_registers(problem);
        let share = pool / self.consumers / 8 * 8;
        let capped = if share > 240 { 240 } else { share };
        // Taking registers never lowers their number.
        if capped < self.launch_registers() { self.launch_registers() } else { capped }
    }

    /// Whether a program's mask is like a causal one, and the ends of rows cost no register.
    fn is_like_causal(problem: &Problem) -> bool {
        problem.program.is_some_and(|p| p.rows().is_some_and(|r| r.widens && r.is_cheap))
    }

    /// The biases that come by the copy engine.
    pub(crate) fn biases<'a>(&self, problem: &'a Problem) -> &'a [Bias] {
        match &problem.program {
            Some(program) if self.bias_stages > 0 => program.biases(),
            _ => &[],
        }
    }

    /// Whether the scores' product starts from what a program adds to them: biases that are there before.
    pub(crate) fn seeds(&self, problem: &Problem) -> bool {
        !self.biases(problem).is_empty() && problem.program.is_some_and(|p| p.of_scores().adds)
    }

    /// Registers that a consumer's thread needs: accumulators, P, and 32 for addresses and loop state, with which none of
    /// the schedules that were compiled to find the number spilled; with 24 nearly all did.
    pub(crate) fn least_registers(&self, problem: &Problem) -> u32 {
        let scores = self.block_kv / 2;
        let output = problem.head_dim_v.next_multiple_of(16) / 2;
        let p = if self.overlap && !self.p_in_shared { self.block_kv / 4 } else { 0 };
        // Work of a cluster is one more range of blocks to remember.
        scores + output + p + if self.cluster > 1 { 40 } else { 32 }
    }

    /// Registers beyond [`Sm90Schedule::least_registers`] with which none of the programs that were compiled to find the
    /// numbers spilled: elements that change with the key are loaded ahead of their use.
    fn program_registers(problem: &Problem) -> u32 {
        let Some(p) = problem.program else { return 0 };
        let OfScores { score, reads_along_keys, gathers, reads_of_halves, divides_at_run_time, .. } = p.of_scores();
        let kind = match reads_along_keys {
            true if gathers => 100,
            // What is read ahead comes on top (`registers_ahead`).
            true if reads_of_halves > 0 => 8,
            true => 72,
            false if divides_at_run_time => 52,
            false if score && problem.head_dim_v > 192 => 28,
            false if score => 16,
            false => 0,
        };
        // The ends of the rows' runs of keys; or where the list is, and the bits.
        let rows = p.rows().map_or(0, |_| if Self::is_like_causal(problem) { 0 } else { 12 });
        // A window beside a list, and a score that changes, are one more mask and its bounds.
        let lists = p.lists().map_or(0, |_| if score && problem.mask.any() { 32 } else { 12 });
        kind + rows + lists
    }

    /// ... of this schedule: of biases that are brought no address is kept.
    fn registers_beside(&self, problem: &Problem) -> u32 {
        match problem.program.filter(|_| self.bias_stages > 0) {
            None => Self::program_registers(problem),
            Some(p) if !p.of_scores().biases_alone => Self::program_registers(problem).max(32),
            // Two masks, each with its bounds.
            Some(_) if problem.mask.any() && problem.masks_by_program() => 36,
            Some(_) => 0,
        }
    }

    /// Registers of what a program reads along the keys ahead of its use: two rows, two elements in one.
    fn registers_ahead(&self, problem: &Problem) -> u32 {
        problem.program.map_or(0, |p| p.of_scores().reads_of_halves) * self.block_kv / 4
    }

    /// Whether consumers can have blocks of their own: of a mask whose ends are known for every row.
    fn trims(&self, problem: &Problem) -> bool {
        let masks = match problem.program {
            Some(p) if p.mask().is_some() => p.rows().is_some(),
            _ => problem.mask.any(),
        };
        self.consumers > 1 && self.cluster == 1 && self.bias_stages == 0 && masks
    }

    /// Checks the fields against what the template can generate.
    pub fn validate(&self, problem: &Problem) -> Result<()> {
        let bad = |field: &'static str, value: u32, limit: &str| {
            Err(Error::unsupported(field, value, limit, "use a schedule from the searched space"))
        };
        if !(1..=3).contains(&self.consumers) {
            return bad("consumers", self.consumers, "1 to 3 warpgroups");
        }
        if self.block_kv == 0 || !self.block_kv.is_multiple_of(16) || self.block_kv > 256 {
            return bad("block_kv", self.block_kv, "a multiple of 16 up to 256");
        }
        if !(1..=8).contains(&self.stages) {
            return bad("stages", self.stages, "1 to 8 stages");
        }
        if !(1..=2).contains(&self.blocks_per_sm) {
            return bad("blocks_per_sm", self.blocks_per_sm, "1 or 2 blocks");
        }
        if !(1..=2).contains(&self.cluster) {
            return bad("cluster", self.cluster, "1 or 2 thread blocks");
        }
        if self.trim && !self.trims(problem) {
            return bad(
                "trim",
                1,
                "several consumers of one thread block, under a mask that leaves each row one run of keys",
            );
        }
        if self.exp2_eighths > 4 {
            return bad("exp2_eighths", self.exp2_eighths, "at most 4: no more than half of the exponentials");
        }
        if self.exp2_eighths > 0 && !self.masked_loop {
            return bad("exp2_eighths", self.exp2_eighths, "0 unless masked blocks have a loop of their own");
        }
        if self.producer_spare > 0 {
            let most = self.launch_registers().saturating_sub(self.producer_needs(problem)) / 8 * 8;
            if !self.producer_spare.is_multiple_of(8) || self.producer_spare > most || !self.registers_move(problem) {
                return bad("producer_spare", self.producer_spare, "a multiple of 8, of what the producer gives back");
            }
        }
        if self.chain && !(self.scheduler.stays() && self.cluster == 1) {
            return bad("chain", 1, "thread blocks that stay, each alone");
        }
        if self.output_apart && (!self.scheduler.stays() || self.cluster > 1) {
            return bad("output_apart", 1, "thread blocks that stay, each alone");
        }
        if self.ending && self.section_mib == Self::WALK_ALL {
            return bad("ending", 1, "a section of a size, behind single heads");
        }
        if self.bias_stages > 0 {
            // Boxes of the copy engine are 64 keys wide.
            if !self.block_kv.is_multiple_of(64) || self.cluster > 1 || self.trim {
                return bad(
                    "bias_stages",
                    self.bias_stages,
                    "0 but for single thread blocks with blocks of whole 64 keys",
                );
            }
            if self.bias_stages > 4 || self.biases(problem).is_empty() {
                return bad(
                    "bias_stages",
                    self.bias_stages,
                    "at most 4, for score programs that read tensors by query and key",
                );
            }
        }
        if self.scheduler == Sm90Scheduler::Queue && self.cluster > 1 {
            return bad("cluster", self.cluster, "1: a queue deals to single thread blocks");
        }
        if let Some(program) = problem.program {
            if self.pack_group {
                return bad("pack_group", 1, "one head for each tile of a score program");
            }
            if self.cluster > 1 && problem.masks_by_program() {
                return bad("cluster", self.cluster, "1 for a score program's mask: each tile has blocks of its own");
            }
            if self.exp2_eighths > 0 && program.score().is_some() {
                return bad("exp2_eighths", self.exp2_eighths, "0 where a score program may make a score -inf");
            }
        }
        if self.quick && (self.overlap || self.scheduler.stays() || self.cluster > 1) {
            return bad("quick", 1, "one tile for each thread block, and no overlap");
        }
        if self.take_turns && self.consumers < 2 {
            return bad("consumers", self.consumers, "at least 2 warpgroups, to take turns");
        }
        self.check_registers(problem)
    }

    /// Whether a consumer's registers suffice, and whether the compiler can write the instructions at all: it refuses
    /// one whose operands exceed the registers that a thread starts with.
    fn check_registers(&self, problem: &Problem) -> Result<()> {
        let widest = self.block_kv.max(problem.head_dim_v.next_multiple_of(16)) / 2 + 30;
        for (least, registers) in
            [(self.least_registers(problem), self.consumer_registers(problem)), (widest, self.launch_registers())]
        {
            if least > registers {
                return Err(Error::unsupported(
                    "registers",
                    least,
                    format!("{registers} for a thread of a consumer"),
                    "use smaller blocks, or P in shared memory",
                ));
            }
        }
        Ok(())
    }
}

impl fmt::Display for Sm90Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "c{}-kv{}-s{}", self.consumers, self.block_kv, self.stages)?;
        write!(f, "-{}", if self.overlap { "overlap" } else { "serial" })?;
        for (on, name) in [
            (self.take_turns, "turns"),
            (self.p_in_shared, "psmem"),
            (self.lazy_rescale, "lazy"),
            (self.pack_group, "pack"),
            (self.trim, "trim"),
            (self.scheduler == Sm90Scheduler::Stride, "stride"),
            (self.scheduler == Sm90Scheduler::Queue, "queue"),
            (self.chain, "chain"),
            (self.output_apart, "apart"),
            (self.quick, "quick"),
        ] {
            if on {
                write!(f, "-{name}")?;
            }
        }
        if self.bias_stages > 0 {
            write!(f, "-bias{}", self.bias_stages)?;
        }
        if self.producer_spare > 0 {
            write!(f, "-spare{}", self.producer_spare)?;
        }
        if self.exp2_eighths > 0 {
            write!(f, "-fma{}", self.exp2_eighths)?;
        }
        if self.cluster > 1 {
            write!(f, "-cl{}", self.cluster)?;
        }
        write!(f, "-{}-b{}", if self.masked_loop { "two" } else { "one" }, self.blocks_per_sm)?;
        match self.section_mib {
            Self::WALK_ALL => f.write_str("-all"),
            n if self.ending => write!(f, "-end{n}"),
            n => write!(f, "-l2x{n}"),
        }
    }
}

//! Which schedules the template can generate.

use super::Sm90Schedule;
use crate::{Error, Problem, Result};

impl Sm90Schedule {
    /// Whether consumers can have blocks of their own: of a mask whose ends are known for every row.
    pub(super) fn trims(&self, problem: &Problem) -> bool {
        let masks = match problem.program {
            Some(p) if p.mask().is_some() => p.rows().is_some(),
            _ => problem.mask.any(),
        };
        self.consumers > 1 && self.bias_stages == 0 && masks
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
        if self.trim && !self.trims(problem) {
            return bad("trim", 1, "several consumers, under a mask that leaves each row one run of keys");
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
        if self.chain && !self.scheduler.is_persistent() {
            return bad("chain", 1, "thread blocks that stay");
        }
        if self.output_apart && !self.scheduler.is_persistent() {
            return bad("output_apart", 1, "thread blocks that stay");
        }
        if self.ending && self.section_mib == Self::WALK_ALL {
            return bad("ending", 1, "a section of a size, behind single heads");
        }
        if self.bias_stages > 0 {
            // Boxes of the copy engine are 64 keys wide.
            if !self.block_kv.is_multiple_of(64) || self.trim {
                return bad(
                    "bias_stages",
                    self.bias_stages,
                    "0 but for blocks of whole 64 keys that all consumers visit",
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
        if let Some(program) = problem.program {
            if self.pack_group {
                return bad("pack_group", 1, "one head for each tile of a score program");
            }
            if self.exp2_eighths > 0 && program.score().is_some() {
                return bad("exp2_eighths", self.exp2_eighths, "0 where a score program may make a score -inf");
            }
        }
        if self.drawers > 2 || (self.drawers > 0 && (!problem.dropout || self.quick)) {
            return bad("drawers", self.drawers, "0, or 1 or 2 with dropout where it is not quick to compile");
        }
        if self.lazy_rescale && problem.residual {
            return bad("lazy_rescale", 1, "eager where a residual is written: the largest probability is then exact");
        }
        if self.quick && (self.overlap || self.scheduler.is_persistent()) {
            return bad("quick", 1, "one tile for each thread block, and no overlap");
        }
        if self.take_turns && self.consumers < 2 {
            return bad("consumers", self.consumers, "at least 2 warpgroups, to take turns");
        }
        self.check_registers(problem)
    }
}

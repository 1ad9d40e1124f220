//! How the registers of a multiprocessor are shared between the producer and the consumers.

use super::Sm90Schedule;
use crate::score::ScoreFacts;
use crate::{Error, Problem, Result};

impl Sm90Schedule {
    /// Registers of a thread when the block starts: an equal share.
    pub(super) const fn launch_registers(&self) -> u32 {
        65536 / (self.threads() * self.blocks_per_sm) / 8 * 8
    }

    /// Whether the producer gives registers to the consumers. A compiler that must keep to two limits takes longer, so
    /// a quick schedule moves none where an equal share suffices.
    pub(super) fn registers_move(&self, problem: &Problem) -> bool {
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
    pub(super) fn producer_needs(&self, problem: &Problem) -> u32 {
        // It copies the biases that the copy engine cannot address, and the consumers can spare no more.
        if !self.biases(problem).is_empty() {
            return 56;
        }
        // It finds the blocks that a program's mask leaves, which takes little where they lie in memory, or where that
        // is much like a causal one.
        if problem.masks_by_program() {
            return match () {
                _ if self.consumers == 3 || self.blocks_per_sm > 1 => 56,
                _ if problem.program.is_some_and(|p| p.runs().is_some()) => 40,
                _ if Self::is_like_causal(problem) => 40,
                _ => 72,
            };
        }
        match (self.consumers, self.scheduler.is_persistent()) {
            (3, _) => 32,
            (2, true) if self.blocks_per_sm > 1 => 32,
            (_, true) => 40,
            (_, false) => 24,
        }
    }

    /// Registers of a thread that draws: four calls of Philox at a time.
    pub(super) const DRAWER_REGISTERS: u32 = 56;

    /// Registers of a thread of a consumer: what the producer gave back is shared out.
    pub fn consumer_registers(&self, problem: &Problem) -> u32 {
        let others = self.producer_registers(problem) + self.drawers * Self::DRAWER_REGISTERS;
        let pool = self.launch_registers() * (self.consumers + 1 + self.drawers) - others;
        let share = pool / self.consumers / 8 * 8;
        let capped = if share > 240 { 240 } else { share };
        // Taking registers never lowers their number.
        if capped < self.launch_registers() { self.launch_registers() } else { capped }
    }

    /// Whether a program's mask is like a causal one, and the ends of rows cost no register.
    pub(super) fn is_like_causal(problem: &Problem) -> bool {
        problem.program.is_some_and(|p| p.rows().is_some_and(|r| r.widens && r.is_cheap))
    }

    /// Registers that a consumer's thread needs: accumulators, P, and 32 for addresses and loop state, with which none
    /// of the schedules that were compiled to find the number spilled; with 24 nearly all did.
    pub(super) fn least_registers(&self, problem: &Problem) -> u32 {
        let scores = self.block_kv / 2;
        let output = problem.head_dim_v.next_multiple_of(16) / 2;
        let p = if self.overlap { self.block_kv / 4 } else { 0 };
        scores + output + p + 32
    }

    /// Registers beyond [`Sm90Schedule::least_registers`] with which none of the programs that were compiled to find
    /// the numbers spilled: elements that change with the key are loaded ahead of their use.
    pub(in crate::family) fn program_registers(problem: &Problem) -> u32 {
        let Some(p) = problem.program else { return 0 };
        let ScoreFacts { changes: score, loads_by_key, gathers, halves_along_keys, divisions, .. } = p.score_facts();
        let kind = match loads_by_key > 0 {
            true if gathers > 0 => 100,
            // What is read ahead comes on top (`registers_ahead`).
            true if halves_along_keys > 0 => 8,
            true => 72,
            false if divisions > 0 => 52,
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
    pub(super) fn registers_beside(&self, problem: &Problem) -> u32 {
        match problem.program.filter(|_| self.bias_stages > 0) {
            None => Self::program_registers(problem),
            Some(p) if !p.score_facts().biases_alone => Self::program_registers(problem).max(32),
            // Two masks, each with its bounds.
            Some(_) if problem.mask.any() && problem.masks_by_program() => 36,
            Some(_) => 0,
        }
    }

    /// Registers of what a program reads along the keys ahead of its use: two rows, two elements in one.
    pub(super) fn registers_ahead(&self, problem: &Problem) -> u32 {
        problem.program.map_or(0, |p| p.score_facts().halves_along_keys) * self.block_kv / 4
    }

    /// Whether a consumer's registers suffice, and whether the compiler can write the instructions at all: it refuses
    /// one whose operands exceed the registers that a thread starts with.
    pub(super) fn check_registers(&self, problem: &Problem) -> Result<()> {
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

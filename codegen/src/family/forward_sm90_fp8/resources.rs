//! Shared memory and registers of a kernel, and the schedules that these leave.

use super::Sm90Fp8Schedule;
use crate::family::Sm90Schedule;
use crate::{Error, Problem, Result, ScaleUnit};

impl Sm90Fp8Schedule {
    /// Bytes of dynamic shared memory, as `Layout` in the template: Q of every consumer, K, V as it lies in memory, V
    /// by columns, and the barriers; and what keys are multiplied by where rows of K have scales.
    pub(super) fn smem_bytes(&self, problem: &Problem) -> u32 {
        let plain = self.smem_bytes_of(problem, if problem.masks_by_program() { 32 } else { 16 });
        match problem.scales.k {
            ScaleUnit::Rows => plain.next_multiple_of(16) + self.stages * self.block_kv * 4,
            _ => plain,
        }
    }

    /// All of it but scales, with two slots of so many bytes each.
    pub(in crate::family) fn smem_bytes_of(&self, problem: &Problem, slot: u32) -> u32 {
        // Rows are stored in columns of 128 bytes.
        let (qk, v) = (problem.head_dim_qk.div_ceil(128) * 128, problem.head_dim_v.div_ceil(128) * 128);
        let q = self.consumers * 64 * qk;
        let loaded = self.block_kv * (self.stages * qk + self.raw_stages * v);
        let by_columns = self.stages * self.block_kv.div_ceil(128) * 128 * problem.head_dim_v.next_multiple_of(16);
        let barriers = 32 + 16 * self.consumers + 32 * self.stages + 16 * self.raw_stages;
        q + loaded + by_columns + 2 * slot + barriers + 8
    }

    /// Registers of a thread when the block starts: an equal share.
    const fn launch_registers(&self) -> u32 {
        65536 / (self.threads() * self.blocks_per_sm) / 8 * 8
    }

    /// Registers of a thread of the producer, once it has given back what it does not need. Its warps hold 16 columns
    /// of 32 keys while they transpose, twice. A program's mask is asked which blocks a tile visits: of documents,
    /// whose ends are searched for, 40 registers spill 324 bytes. Tiles of ragged batches are found in a table: there
    /// 32 spill 444 bytes.
    pub(super) fn producer_registers(&self, problem: &Problem) -> u32 {
        match (problem.masks_by_program() || !problem.kv.is_dense(), self.consumers) {
            (true, _) => 56,
            (false, 3) => 32,
            (false, _) => 40,
        }
    }

    /// Registers of a thread of a consumer: what the producer gave back is shared out.
    pub(super) fn consumer_registers(&self, problem: &Problem) -> u32 {
        let pool = self.launch_registers() * (self.consumers + 1) - self.producer_registers(problem);
        // Taking registers never lowers their number.
        (pool / self.consumers / 8 * 8).min(240).max(self.launch_registers())
    }

    /// Registers that a consumer's thread needs: scores, P, O, and the parts of a product that are there at once, with
    /// 24 to 26 for addresses and loop state, with which none that were compiled to find the numbers spilled by more
    /// than 28 bytes.
    pub(super) fn least_registers(&self, problem: &Problem) -> u32 {
        // Elements that change with the key are not read ahead here, and their addresses are kept.
        let by_key = problem.program.is_some_and(|p| p.score_facts().loads_by_key > 0);
        let program = Sm90Schedule::program_registers(problem) + if by_key { 24 } else { 0 };
        let (scores, output) = (self.block_kv / 2, problem.head_dim_v.next_multiple_of(16) / 2);
        let (p, part) = (self.block_kv / 8, self.part / 2);
        match self.overlap {
            true => scores + p + output + part + 26 + program,
            // P takes the place of the scores, and two parts are under way at once.
            false => output + scores.max(2 * part + p) + 24 + program,
        }
    }

    pub(in crate::family) fn validate(&self, problem: &Problem) -> Result<()> {
        let bad = |field: &'static str, value: u32, limit: &str| {
            Err(Error::unsupported(field, value, limit, "use a schedule from the searched space"))
        };
        if !(1..=3).contains(&self.consumers) {
            return bad("consumers", self.consumers, "1 to 3 warpgroups");
        }
        if !(1..=2).contains(&self.blocks_per_sm) {
            return bad("blocks_per_sm", self.blocks_per_sm, "1 or 2 blocks");
        }
        if self.block_kv == 0 || !self.block_kv.is_multiple_of(32) || self.block_kv > 256 {
            return bad("block_kv", self.block_kv, "a multiple of 32 up to 256");
        }
        if !(1..=4).contains(&self.stages) {
            return bad("stages", self.stages, "1 to 4 stages");
        }
        if !(1..=2).contains(&self.raw_stages) {
            return bad("raw_stages", self.raw_stages, "1 or 2 stages");
        }
        let columns = problem.head_dim_v.next_multiple_of(16);
        if self.part == 0 || !self.part.is_multiple_of(16) || self.part > columns {
            return bad("part", self.part, "a multiple of 16 up to the head dim of V");
        }
        if self.take_turns && self.consumers < 2 {
            return bad("consumers", self.consumers, "at least 2 warpgroups, to take turns");
        }
        if self.overlap && self.stages < 2 {
            return bad("stages", self.stages, "at least 2 stages with overlap: K is a block ahead of V");
        }
        let (needs, has) = (self.least_registers(problem), self.consumer_registers(problem));
        if needs > has {
            let limit = format!("{has} per thread of a consumer");
            return Err(Error::unsupported("registers", needs, limit, "use smaller blocks of keys, or smaller parts"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::score::Program;
    use crate::{DType, Kernel, MaskKind, ScaleUnits, Schedule, ShapeBucket};

    #[test]
    fn every_default_is_legal_and_the_space_has_legal_schedules() {
        let capped = Program::parse("s: float[heads]; score = 30.0 * tanh(score / 30.0); sink = s[h];").unwrap();
        for d in (16..=256).step_by(16) {
            for v in [d, 64, 128, 256] {
                for mask in MaskKind::ALL {
                    let finest = ScaleUnits { q: ScaleUnit::Rows, k: ScaleUnit::Rows, v: ScaleUnit::Channel };
                    let scales = if mask.left { finest } else { ScaleUnits::default() };
                    let problem = Problem::forward_qk_v(DType::E4m3, d, v, mask).unwrap().with_scales(scales);
                    let problem = if d % 32 == 0 { problem } else { problem.with_program(capped.clone()) };
                    for n in [1, 100, 1024, 16384] {
                        let bucket = ShapeBucket { parallel: 32, group: 1, q_len: n, kv_len: n, ..Default::default() };
                        let arch = "sm_90a".parse().unwrap();
                        let kernel = |s| Kernel { problem, schedule: Schedule::Sm90Fp8(s), arch };
                        kernel(Sm90Fp8Schedule::default_for(&problem, &bucket)).check().unwrap();
                        let legal = Sm90Fp8Schedule::space(&problem).into_iter().filter(|s| kernel(*s).check().is_ok());
                        assert!(legal.count() > 3, "{problem}");
                    }
                }
            }
        }
    }

    #[test]
    fn illegal_schedules_name_the_field() {
        let problem = Problem::forward(DType::E4m3, 128, MaskKind::FULL).unwrap();
        let legal = Sm90Fp8Schedule::default_for(&problem, &ShapeBucket::default());
        legal.validate(&problem).unwrap();
        for (bad, field) in [
            (Sm90Fp8Schedule { consumers: 4, ..legal }, "consumers"),
            (Sm90Fp8Schedule { block_kv: 48, ..legal }, "block_kv"),
            (Sm90Fp8Schedule { stages: 0, ..legal }, "stages"),
            (Sm90Fp8Schedule { stages: 1, overlap: true, ..legal }, "stages"),
            (Sm90Fp8Schedule { raw_stages: 3, ..legal }, "raw_stages"),
            (Sm90Fp8Schedule { part: 40, ..legal }, "part"),
            (Sm90Fp8Schedule { part: 144, ..legal }, "part"),
            (Sm90Fp8Schedule { consumers: 1, take_turns: true, ..legal }, "consumers"),
            (Sm90Fp8Schedule { blocks_per_sm: 3, ..legal }, "blocks_per_sm"),
            (Sm90Fp8Schedule { block_kv: 256, overlap: true, ..legal }, "registers"),
        ] {
            let e = bad.validate(&problem).unwrap_err().to_string();
            assert!(e.contains(field), "{bad}: {e}");
        }
    }
}

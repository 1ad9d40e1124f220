//! The estimate of resources: what a kernel will need, known before it is compiled.

use crate::{Arch, Error, Problem, Result};
use serde::{Deserialize, Serialize};

/// Device resources of one thread block (CUDA) or one worker (CPU).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Resources {
    /// Threads of one block.
    pub threads: u32,
    /// Dynamic shared memory of one block, in bytes. Exact.
    pub smem_bytes: u32,
    /// Lower bound of the registers of one thread: accumulators and fragments that live at the same time.
    pub registers: u32,
}

impl Resources {
    /// Whether the kernel fits the arch, and if not, which resource is short.
    pub fn check(&self, arch: Arch, blocks_per_sm: u32) -> Result<()> {
        let Arch::Sm(sm) = arch else { return Ok(()) };
        let limits = sm.limits();
        let short = |field, value: u32, limit: String| {
            Err(Error::unsupported(field, value, limit, "use smaller blocks or fewer stages"))
        };
        if self.smem_bytes > limits.smem_per_block {
            return short(
                "shared memory",
                self.smem_bytes,
                format!("{} bytes per block on {sm}", limits.smem_per_block),
            );
        }
        // 1 KiB of every resident block belongs to the driver.
        if blocks_per_sm * (self.smem_bytes + 1024) > limits.smem_per_sm {
            let limit = format!("{} bytes per multiprocessor on {sm} for {blocks_per_sm} blocks", limits.smem_per_sm);
            return short("shared memory", self.smem_bytes, limit);
        }
        if self.threads > limits.threads_per_block || self.threads * blocks_per_sm > limits.threads_per_sm {
            return short("threads", self.threads, format!("{} per block on {sm}", limits.threads_per_block));
        }
        let cap = limits.registers_per_thread.min(limits.registers_per_sm / (self.threads * blocks_per_sm).max(1));
        if self.registers > cap {
            return short("registers", self.registers, format!("{cap} per thread at this occupancy on {sm}"));
        }
        Ok(())
    }
}

/// Whether a program may make all scores of a row -inf; the kernels then remember which rows attend to nothing.
pub(crate) fn marks_empty_rows(problem: &Problem) -> bool {
    problem.program.is_some_and(|p| p.score().is_some() && p.sink().is_none())
}

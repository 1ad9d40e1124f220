//! The static model: what a kernel will need, known before it is compiled.

use crate::{Arch, Error, Problem, Result, Schedule, Sm80Schedule, Sm90Schedule, Swizzle};
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
    /// The model of a kernel.
    pub(crate) fn of(problem: &Problem, schedule: &Schedule) -> Self {
        match schedule {
            Schedule::Cpu(_) => Self::default(),
            Schedule::Naive(s) => Self { threads: s.threads, smem_bytes: s.smem_bytes(problem), registers: 32 },
            Schedule::Sm80(s) => {
                Self { threads: s.threads(), smem_bytes: sm80_smem(problem, s), registers: sm80_registers(problem, s) }
            }
            // The block starts with equal shares and its warpgroups exchange registers: the schedule checks those.
            Schedule::Sm90(s) => Self { threads: s.threads(), smem_bytes: sm90_smem(problem, s), registers: 24 },
        }
    }

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

/// 16-byte chunks of one row of `head_dim` 16-bit elements in shared memory.
fn row_chunks(head_dim: u32, swizzle: Swizzle) -> u32 {
    let chunks = head_dim.next_multiple_of(16) / 8;
    match swizzle {
        Swizzle::Xor => chunks,
        // An odd number of chunks puts eight consecutive rows on eight different bank groups.
        Swizzle::Pad => chunks + 1,
    }
}

/// Whether a program may make all scores of a row -inf; the kernels then remember which rows attend to nothing.
pub(crate) fn marks_empty_rows(problem: &Problem) -> bool {
    problem.program.is_some_and(|p| p.score().is_some() && p.sink().is_none())
}

fn sm80_smem(problem: &Problem, s: &Sm80Schedule) -> u32 {
    let row_qk = row_chunks(problem.head_dim_qk, s.swizzle) * 16;
    let row_v = row_chunks(problem.head_dim_v, s.swizzle) * 16;
    let q = s.block_q() * row_qk;
    let kv = s.stages * s.block_kv * (row_qk + row_v);
    let o = s.block_q() * row_v;
    // Q shares the space of K and V when it moves on to registers; O reuses whatever is there at the end.
    let live = if s.q_in_registers { q.max(kv) } else { q + kv };
    let empty = if marks_empty_rows(problem) { s.block_q() / 2 } else { 0 };
    live.max(o + empty)
}

/// As `Layout` in the template: Q or O of every consumer, K, V, biases, P, and the barriers.
pub(crate) fn sm90_smem(problem: &Problem, s: &Sm90Schedule) -> u32 {
    // Rows are stored in columns of 64 elements, 128 bytes.
    let (qk, v) = (problem.head_dim_qk.div_ceil(64) * 128, problem.head_dim_v.div_ceil(64) * 128);
    let q_buffers = if s.chain { 2 } else { 1 };
    let q = q_buffers * s.consumers * 64 * qk.max(v);
    let kv = s.stages * s.block_kv * (qk + v);
    let p = if s.p_in_shared { s.consumers * s.block_kv.div_ceil(64) * 64 * 128 } else { 0 };
    let slot = 64 + if s.trim { s.consumers * 16 } else { 0 };
    let work = if s.scheduler.stays() { 2 * slot } else { 0 };
    let work = work + if marks_empty_rows(problem) { s.consumers * 32 } else { 0 };
    let o = if s.output_apart { s.consumers * 64 * v } else { 0 };
    let biases = s.biases(problem).len() as u32 * s.block_kv * 128;
    let biases = if biases > 0 { s.bias_stages * s.consumers * (biases + 16) } else { 0 };
    // Tiles that may be computed again, of schedules whose O leaves from the place of V.
    let in_v = s.scheduler.stays()
        && !s.chain
        && s.cluster == 1
        && !s.output_apart
        && s.consumers * 64 <= s.stages * s.block_kv;
    let again = if in_v && problem.masks() && s.bias_stages == 0 { 24 } else { 0 };
    q + kv + p + o + work + again + biases + 32 + q_buffers * s.consumers * 16 + s.stages * 40 + 24
}

fn sm80_registers(problem: &Problem, s: &Sm80Schedule) -> u32 {
    let m_tiles = s.rows_per_warp / 16;
    let o = m_tiles * problem.head_dim_v.next_multiple_of(16) / 2;
    let scores = m_tiles * s.block_kv / 2;
    let q = if s.q_in_registers { m_tiles * problem.head_dim_qk.next_multiple_of(16) / 4 } else { m_tiles * 4 };
    // Row maxima and sums, addresses and loop state.
    o + scores + q + 4 * m_tiles + 14
}

impl Schedule {
    /// Thread blocks that the schedule wants on one multiprocessor.
    pub fn blocks_per_sm(&self) -> u32 {
        match self {
            Schedule::Sm80(s) => s.blocks_per_sm,
            Schedule::Sm90(s) => s.blocks_per_sm,
            _ => 1,
        }
    }
}

//! How a kernel is launched for a shape: pure arithmetic, shared by every caller.

use crate::{Error, Kernel, Result, Schedule, Shape};

/// Geometry of one launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Launch {
    /// Thread blocks, one-dimensional; 0 means that there is nothing to do.
    pub grid: u32,
    /// Threads of one block.
    pub threads: u32,
    /// Dynamic shared memory in bytes.
    pub smem_bytes: u32,
}

impl Kernel {
    /// The launch geometry for a shape. CPU kernels count their own tiles; for them the grid is 0.
    pub fn launch(&self, shape: &Shape) -> Result<Launch> {
        let block_q = match self.schedule {
            Schedule::Cpu(_) => return Ok(Launch { grid: 0, threads: 0, smem_bytes: 0 }),
            Schedule::Naive(s) => s.block_q,
            Schedule::Sm80(s) => s.block_q(),
        };
        let tiles = shape.q_len.div_ceil(block_q) as u64 * shape.heads as u64 * shape.batch as u64;
        let grid = i32::try_from(tiles).map_err(|_| {
            Error::unsupported(
                "batch * heads * q_len",
                tiles,
                format!("at most 2^31 - 1 blocks of {block_q} query rows in one launch"),
                "split the batch",
            )
        })? as u32;
        let r = self.resources();
        Ok(Launch { grid, threads: r.threads, smem_bytes: r.smem_bytes })
    }
}

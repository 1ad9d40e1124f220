//! Schedule of `forward/cpu`: cache blocks, register tile, threads.

use crate::{CpuIsa, DType, Error, Problem, Result, ShapeBucket};
use serde::{Deserialize, Serialize};
use std::fmt;

/// How the host processor computes one problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct CpuSchedule {
    /// Query rows of one work item.
    pub block_q: u32,
    /// Keys that are packed and multiplied together.
    pub block_kv: u32,
    /// Rows of the register tile of the matrix micro-kernels.
    pub unroll_q: u32,
    /// Vectors of the register tile of the matrix micro-kernels.
    pub unroll_kv: u32,
    /// Worker threads; 0 means one per core.
    pub threads: u32,
}

impl CpuSchedule {
    /// The model's choice.
    pub fn default_for(_problem: &Problem, isa: CpuIsa, bucket: &ShapeBucket) -> Self {
        let (unroll_q, unroll_kv) = match isa {
            CpuIsa::Generic => (4, 2),
            CpuIsa::Avx2 => (4, 2),
            _ => (6, 4),
        };
        let block_q = if bucket.q_len <= 64 { 48 } else { 96 };
        Self { block_q, block_kv: 128, unroll_q, unroll_kv, threads: 0 }
    }

    /// The schedules worth trying.
    pub fn space(problem: &Problem, isa: CpuIsa) -> Vec<Self> {
        let tiles: &[(u32, u32)] = match isa {
            CpuIsa::Generic | CpuIsa::Avx2 => &[(4, 2), (6, 2)],
            _ => &[(6, 4), (8, 3), (12, 2)],
        };
        let mut space = Vec::new();
        for &(unroll_q, unroll_kv) in tiles {
            for block_q in [48, 96, 192] {
                for block_kv in [64, 128, 256] {
                    let s = Self { block_q, block_kv, unroll_q, unroll_kv, threads: 0 };
                    if s.validate(problem, isa).is_ok() {
                        space.push(s);
                    }
                }
            }
        }
        space
    }

    /// Checks the fields against what the template can generate.
    pub fn validate(&self, problem: &Problem, isa: CpuIsa) -> Result<()> {
        let bad = |field: &'static str, value: u32, limit: String| {
            Err(Error::unsupported(field, value, limit, "use a schedule from the searched space"))
        };
        let _ = (problem, DType::F32);
        if self.unroll_q == 0 || self.unroll_kv == 0 {
            return bad("unroll_q", self.unroll_q, "the register tile has at least one row and one vector".into());
        }
        let width = isa.lanes() * self.unroll_kv;
        if self.block_kv == 0 || self.block_kv % width != 0 {
            return bad("block_kv", self.block_kv, format!("a multiple of the register tile's {width} keys"));
        }
        if self.block_q == 0 || self.block_q % self.unroll_q != 0 {
            return bad("block_q", self.block_q, format!("a multiple of the register tile's {} rows", self.unroll_q));
        }
        Ok(())
    }
}

impl fmt::Display for CpuSchedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { block_q, block_kv, unroll_q, unroll_kv, threads } = self;
        write!(f, "q{block_q}-kv{block_kv}-r{unroll_q}x{unroll_kv}")?;
        match threads {
            0 => Ok(()),
            n => write!(f, "-t{n}"),
        }
    }
}

//! `pad/cuda`: rows of 16-bit elements into rows of another length and place, on any GPU from sm_75 on.
//!
//! One kernel serves all sizes: head dims, lengths and strides are run-time values. It moves memory, and there is
//! nothing to search.

use crate::abi::ArgsLayout;
use crate::family::fields::{Constants, schedule};
use crate::family::{KernelFamily, Purpose};
use crate::launch::{LaunchPlan, Stage, StageEntry};
use crate::traffic::Walk;
use crate::{Arch, Constraint, DType, Error, Op, Precision, Problem, Resources, Result, Shape, ShapeBucket};

/// Rows that a thread block copies: eight of each warp.
pub const PAD_ROWS: u32 = 64;

schedule! {
    /// How rows are copied.
    pub struct PadCudaSchedule {
        /// Threads of one block.
        pub threads: u32 => code, number("t");
    }
}

impl KernelFamily for PadCudaSchedule {
    const NAME: &'static str = "pad/cuda";
    const TEMPLATE: &'static str = "pad/cuda.cu";
    const OP: Op = Op::Pad;
    const PURPOSE: Purpose = Purpose::Plain;
    const ARGS: ArgsLayout = ArgsLayout::PAD;

    fn runs_on(arch: Arch) -> Result<()> {
        let no = |limit: &str, remedy: &str| Err(Error::unsupported("family", Self::NAME, limit, remedy));
        match arch {
            Arch::Cpu(_) => no("runs on CUDA devices only", "leave rows as they are: families of the CPU take any"),
            Arch::Sm(sm) if sm.number < 75 => no("needs sm_75 or newer", "use a newer GPU"),
            Arch::Sm(_) => Ok(()),
        }
    }

    fn supports(problem: &Problem, _: Arch) -> Result<()> {
        if *problem == Problem::pad() {
            return Ok(());
        }
        let limit = format!("{} has one problem, {}, whatever is copied", Self::NAME, Problem::pad());
        Err(Error::unsupported("problem", problem, limit, "ask for that one"))
    }

    fn unmet(_: Constraint) -> Option<&'static str> {
        None
    }

    fn default_for(_: &Problem, _: Arch, _: &ShapeBucket) -> Self {
        Self { threads: 256 }
    }

    fn space(_: &Problem, _: Arch) -> Vec<Self> {
        vec![Self { threads: 256 }]
    }

    fn validate(&self, _: &Problem, _: Arch) -> Result<()> {
        match self.threads {
            256 => Ok(()),
            n => Err(Error::unsupported("threads", n, format!("{PAD_ROWS} rows of a block, 8 of a warp"), "use 256")),
        }
    }

    fn resources(&self, _: &Problem) -> Resources {
        Resources { threads: self.threads, smem_bytes: 0, registers: 56 }
    }

    fn constants(&self, _: &Problem, constants: &mut Constants) {
        constants.insert("pad_rows", PAD_ROWS.to_string());
    }

    /// The rows of the shape are thread blocks: how many follows from the tensors, which the arguments have.
    fn plan(&self, _: &Problem, shape: &Shape) -> Result<LaunchPlan> {
        let stage = Stage::of(StageEntry::MAIN, shape.q_len, self.threads, 0).starting_early();
        Ok(LaunchPlan::new([stage], [], None))
    }

    fn walk(&self, _: &Problem, shape: &Shape) -> Walk {
        Walk::plain(1, 1, shape)
    }
}

impl Problem {
    /// The problem of all copies of rows: the kernel does not depend on what they are.
    pub fn pad() -> Self {
        let (head_dim_qk, head_dim_v) = (crate::HEAD_DIM_MIN, crate::HEAD_DIM_MIN);
        let (mask, kv) = (crate::MaskKind::FULL, crate::KvKind::Dense);
        Self {
            op: Op::Pad,
            dtype: DType::F16,
            head_dim_qk,
            head_dim_v,
            mask,
            program: None,
            kv,
            by: None,
            precision: Precision::Exact,
            output: None,
            residual: false,
            dropout: false,
            scales: crate::ScaleUnits::default(),
        }
    }
}

//! How a problem is computed: one struct per kernel family, and the point that the tuner searches.

mod cpu;
mod naive;
mod sm80;
mod sm90;

pub use cpu::CpuSchedule;
pub use naive::NaiveSchedule;
pub use sm80::{Sm80Schedule, Swizzle, TileOrder};
pub use sm90::{Sm90Schedule, Sm90Scheduler};

use crate::{Arch, DType, Error, Problem, Result, Shape, ShapeBucket};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// A kernel family: one skeleton template, one schedule struct, one hardware generation and role.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Family {
    /// `forward/cpu`: C for the host processor.
    ForwardCpu,
    /// `forward/naive`: plain fp32 CUDA; the oracle on the GPU, and the exact path for f32.
    ForwardNaive,
    /// `forward/sm80`: mma.sync and cp.async, FA2-style.
    ForwardSm80,
    /// `forward/sm90`: wgmma and the bulk tensor copy engine, FA3-style.
    ForwardSm90,
}

/// Operations of a score program, as [`Program::cost_of_a_score`](crate::score::Program::cost_of_a_score) counts them, above which
/// a family leaves it to the next: the compiler sees them once for each score that a thread holds, and takes half a minute
/// by then, or a whole one for the last family.
const LONGEST_ON_SM90: usize = 256;
const LONGEST_ON_SM80: usize = 1500;
const LONGEST_ON_NAIVE: usize = 5000;

impl Family {
    /// Every family.
    pub const ALL: [Family; 4] = [Family::ForwardCpu, Family::ForwardNaive, Family::ForwardSm80, Family::ForwardSm90];

    /// The name used in templates, kernel names and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Family::ForwardCpu => "forward/cpu",
            Family::ForwardNaive => "forward/naive",
            Family::ForwardSm80 => "forward/sm80",
            Family::ForwardSm90 => "forward/sm90",
        }
    }

    /// The skeleton template of the family.
    pub const fn template(self) -> &'static str {
        match self {
            Family::ForwardCpu => "forward/cpu.c",
            Family::ForwardNaive => "forward/naive.cu",
            Family::ForwardSm80 => "forward/sm80.cu",
            Family::ForwardSm90 => "forward/sm90.cu",
        }
    }

    /// Whether the family can compute the problem on the arch, and if not, why.
    pub fn supports(self, problem: &Problem, arch: Arch) -> Result<()> {
        let no = |limit: &str, remedy: &str| Err(Error::unsupported("family", self.name(), limit, remedy));
        match (self, arch) {
            (Family::ForwardCpu, Arch::Cpu(_)) => Ok(()),
            (Family::ForwardCpu, _) => no("runs on cpu only", "use a CUDA family"),
            (_, Arch::Cpu(_)) => no("runs on CUDA devices only", "use forward/cpu"),
            (Family::ForwardNaive, Arch::Sm(sm)) if sm.number < 75 => no("needs sm_75 or newer", "use a newer GPU"),
            (Family::ForwardNaive, Arch::Sm(_)) => self.takes_length(problem),
            (Family::ForwardSm80, Arch::Sm(sm)) if sm.number < 80 => {
                no("needs sm_80 or newer (cp.async, bf16 mma.sync)", "use forward/naive")
            }
            (Family::ForwardSm80, Arch::Sm(_)) if problem.dtype == DType::F32 => {
                no("computes f16 and bf16 only", "forward/naive is the exact f32 path")
            }
            (Family::ForwardSm80, Arch::Sm(_)) => self.takes_length(problem),
            (Family::ForwardSm90, Arch::Sm(sm)) if !(sm.number == 90 && sm.specific) => {
                no("needs sm_90a: its instructions exist on Hopper alone", "use forward/sm80")
            }
            (Family::ForwardSm90, Arch::Sm(_)) if problem.dtype == DType::F32 => {
                no("computes f16 and bf16 only", "forward/naive is the exact f32 path")
            }
            (Family::ForwardSm90, Arch::Sm(_)) => match problem.program {
                Some(p) if p.of_scores().reads_along_keys && problem.head_dim_v > 192 => no(
                    "reads side tensors along the keys for scores up to a head dim of V of 192: more leaves no registers",
                    "use forward/sm80",
                ),
                _ => self.takes_length(problem),
            },
        }
    }

    /// Whether a program keeps the family's limits on the operations of a score.
    fn takes_length(self, problem: &Problem) -> Result<()> {
        let Some(program) = problem.program else { return Ok(()) };
        let [mask, change] = program.cost_of_a_score();
        let limit = |most: usize| (mask + change > most, format!("programs of up to {most} operations a score"));
        let ((exceeded, limit), remedy) = match self {
            Family::ForwardCpu => return Ok(()),
            Family::ForwardNaive => (limit(LONGEST_ON_NAIVE), "put tables into side tensors, or compute on the cpu"),
            Family::ForwardSm80 => (limit(LONGEST_ON_SM80), "use forward/naive"),
            Family::ForwardSm90 => {
                // The mask's are computed for one score at a time, the change's for each that a thread holds.
                let exceeded = mask > LONGEST_ON_SM80 || change > LONGEST_ON_SM90;
                let limits = format!(
                    "changes of the score of up to {LONGEST_ON_SM90} operations, and masks of up to {LONGEST_ON_SM80}"
                );
                ((exceeded, limits), "use forward/sm80 or forward/naive")
            }
        };
        if !exceeded {
            return Ok(());
        }
        Err(Error::unsupported("family", self.name(), format!("computes {limit}: more compile for minutes"), remedy))
    }

    /// The families that can compute the problem on the arch, best first.
    pub fn candidates(problem: &Problem, arch: Arch) -> Vec<Family> {
        [Family::ForwardSm90, Family::ForwardSm80, Family::ForwardCpu, Family::ForwardNaive]
            .into_iter()
            .filter(|f| f.supports(problem, arch).is_ok())
            .collect()
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Family {
    type Err = Error;
    fn from_str(s: &str) -> Result<Self> {
        let known = Family::ALL.into_iter().find(|family| family.name() == s);
        known.ok_or_else(|| Error::parse("family", s, Family::ALL.map(Family::name).join(", ")))
    }
}

/// A schedule of one of the families.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Schedule {
    /// For [`Family::ForwardCpu`].
    Cpu(CpuSchedule),
    /// For [`Family::ForwardNaive`].
    Naive(NaiveSchedule),
    /// For [`Family::ForwardSm80`].
    Sm80(Sm80Schedule),
    /// For [`Family::ForwardSm90`].
    Sm90(Sm90Schedule),
}

impl Schedule {
    /// The family that the schedule belongs to.
    pub fn family(&self) -> Family {
        match self {
            Schedule::Cpu(_) => Family::ForwardCpu,
            Schedule::Naive(_) => Family::ForwardNaive,
            Schedule::Sm80(_) => Family::ForwardSm80,
            Schedule::Sm90(_) => Family::ForwardSm90,
        }
    }

    /// The analytic model's choice: what runs when nothing is tuned, and always a contender when something is.
    pub fn default_for(family: Family, problem: &Problem, arch: Arch, bucket: &ShapeBucket) -> Result<Schedule> {
        family.supports(problem, arch)?;
        Ok(match (family, arch) {
            (Family::ForwardCpu, Arch::Cpu(isa)) => Schedule::Cpu(CpuSchedule::default_for(problem, isa, bucket)),
            (Family::ForwardNaive, Arch::Sm(sm)) => Schedule::Naive(NaiveSchedule::default_for(problem, sm)),
            (Family::ForwardSm80, Arch::Sm(sm)) => Schedule::Sm80(Sm80Schedule::default_for(problem, sm, bucket)),
            (Family::ForwardSm90, Arch::Sm(sm)) => Schedule::Sm90(Sm90Schedule::default_for(problem, sm, bucket)),
            _ => unreachable!("supports() admits only the pairs above"),
        })
    }

    /// The same among schedules that have no biases brought ([`Sm90Schedule::bias_stages`]): for calls whose biases the copy engine
    /// cannot bring, which threads load faster than they copy them.
    pub fn default_loading_biases(
        family: Family,
        problem: &Problem,
        arch: Arch,
        bucket: &ShapeBucket,
    ) -> Result<Schedule> {
        match (Self::default_for(family, problem, arch, bucket)?, arch) {
            (s, Arch::Sm(sm)) if s.brings_biases() => {
                Ok(Schedule::Sm90(Sm90Schedule::default_loading_biases(problem, sm, bucket)))
            }
            (s, _) => Ok(s),
        }
    }

    /// Whether biases of a score program come by the copy engine.
    pub fn brings_biases(&self) -> bool {
        matches!(self, Schedule::Sm90(s) if s.bias_stages > 0)
    }

    /// A schedule with the same result, to the bit, that compiles in a fraction of the time and serves meanwhile. None
    /// where the compiler is quick enough.
    pub fn quick(&self) -> Option<Schedule> {
        match self {
            Schedule::Sm90(s) => s.quick().map(Schedule::Sm90),
            Schedule::Cpu(_) | Schedule::Naive(_) | Schedule::Sm80(_) => None,
        }
    }

    /// The schedules worth trying, without the default's guarantee of being among them. Some may not fit the device:
    /// [`crate::Kernel::check`] says so.
    pub fn space(family: Family, problem: &Problem, arch: Arch) -> Vec<Schedule> {
        match (family, arch) {
            (Family::ForwardCpu, Arch::Cpu(isa)) => {
                CpuSchedule::space(problem, isa).into_iter().map(Schedule::Cpu).collect()
            }
            (Family::ForwardSm80, Arch::Sm(_)) => {
                Sm80Schedule::space(problem).into_iter().map(Schedule::Sm80).collect()
            }
            (Family::ForwardSm90, Arch::Sm(_)) => {
                Sm90Schedule::space(problem).into_iter().map(Schedule::Sm90).collect()
            }
            (Family::ForwardNaive, Arch::Sm(sm)) => vec![Schedule::Naive(NaiveSchedule::default_for(problem, sm))],
            _ => Vec::new(),
        }
    }
}

impl Schedule {
    /// Whether thread blocks take their tiles from a queue.
    pub fn takes_from_a_queue(&self) -> bool {
        matches!(self, Schedule::Sm90(s) if s.scheduler == Sm90Scheduler::Queue)
    }

    /// Whether it is what [`Schedule::quick`] gives.
    pub fn is_quick(&self) -> bool {
        matches!(self, Schedule::Sm90(s) if s.quick)
    }

    /// Whether it differs for this shape from a simpler schedule of the space; others need not be tried.
    pub fn is_worth(&self, shape: &Shape) -> bool {
        match self {
            Schedule::Sm90(s) => s.is_worth(shape),
            _ => true,
        }
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Schedule::Cpu(s) => s.fmt(f),
            Schedule::Naive(s) => s.fmt(f),
            Schedule::Sm80(s) => s.fmt(f),
            Schedule::Sm90(s) => s.fmt(f),
        }
    }
}

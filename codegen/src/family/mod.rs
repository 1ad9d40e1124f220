//! Kernel families: a folder each, one trait, one list.
//!
//! A family is a skeleton template with what decides how it is used: its schedule (the point that the tuner searches),
//! the space of schedules, the default one, the resources that it needs, the constants of its template, and the stages
//! of a launch. Several families may serve one problem on one arch: each says by [`KernelFamily::supports`] and
//! [`KernelFamily::unmet`] what it serves, and the tuner races across them.
//!
//! [`families!`] below is the only list; everything else asks [`Family`] or [`Schedule`]. `docs/adding-a-kernel.md` has
//! the steps for another one.

pub(crate) mod account;
pub(crate) mod append_cpu;
pub(crate) mod append_cuda;
pub(crate) mod backward_cpu;
pub(crate) mod backward_naive;
pub(crate) mod backward_sm80;
pub(crate) mod backward_sm90;
pub(crate) mod fields;
pub(crate) mod forward_cpu;
pub(crate) mod forward_cpu_e4m3;
pub(crate) mod forward_cpu_ragged;
pub(crate) mod forward_naive;
pub(crate) mod forward_naive_ragged;
pub(crate) mod forward_sm80;
pub(crate) mod forward_sm80_f32;
pub(crate) mod forward_sm80_ragged;
pub(crate) mod forward_sm89_fp8;
pub(crate) mod forward_sm90;
pub(crate) mod forward_sm90_fp8;
pub(crate) mod forward_sm90_fp8_ragged;
pub(crate) mod forward_sm90_ragged;
pub(crate) mod gradient_cpu;
pub(crate) mod gradient_naive;
pub(crate) mod pad_cuda;
mod program_length;
pub(crate) mod quantise;
pub(crate) mod quantise_cpu;
pub(crate) mod quantise_cuda;

pub use account::RaggedAccount;
pub use append_cpu::AppendCpuSchedule;
pub use append_cuda::AppendCudaSchedule;
pub use backward_cpu::BackwardCpuSchedule;
pub use backward_naive::BackwardNaiveSchedule;
pub use backward_sm80::BackwardSm80Schedule;
pub use backward_sm90::{BackwardSm90Schedule, backward_unaddressable};
pub use fields::Place;
pub use forward_cpu::CpuSchedule;
pub use forward_cpu_e4m3::CpuE4m3Schedule;
pub use forward_cpu_ragged::CpuRaggedSchedule;
pub use forward_naive::NaiveSchedule;
pub use forward_naive_ragged::NaiveRaggedSchedule;
pub use forward_sm80::{Sm80Instructions, Sm80Schedule, Swizzle, TileOrder};
pub use forward_sm80_f32::Sm80F32Schedule;
pub use forward_sm80_ragged::Sm80RaggedSchedule;
pub use forward_sm89_fp8::Sm89Fp8Schedule;
pub use forward_sm90::{
    Sm90LookAhead, Sm90Rescale, Sm90RowOrder, Sm90Schedule, Sm90Scheduler, TensorMapSpec, has_loose_biases,
    is_addressable, unaddressable,
};
pub use forward_sm90_fp8::Sm90Fp8Schedule;
pub use forward_sm90_fp8_ragged::Sm90Fp8RaggedSchedule;
pub use forward_sm90_ragged::{RaggedUnaddressable, Sm90RaggedSchedule, ragged_unaddressable};
pub use gradient_cpu::GradientCpuSchedule;
pub use gradient_naive::GradientNaiveSchedule;
pub use pad_cuda::{PAD_ROWS, PadCudaSchedule};
pub use quantise::QuantiseScratch;
pub use quantise_cpu::QuantiseCpuSchedule;
pub use quantise_cuda::QuantiseCudaSchedule;

use crate::abi::ArgsLayout;
use crate::launch::{LaunchPlan, StageEntry};
use crate::level::Evidence;
use crate::traffic::Walk;
use crate::{
    Arch, CallSizes, Constraint, Constraints, DType, Error, KvKind, Op, Problem, Resources, Result, Shape, ShapeBucket,
};
use account::Usual;
use fields::{Constants, Fields};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;

/// What a family is for, beside others that compute the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// To be fast: the tuner races its schedules with those of the other fast families.
    Fast,
    /// To be right: one fixed schedule, the oracle on its devices; it serves where no fast family can.
    Plain,
}

/// The dtypes of Q that a family computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dtypes {
    /// Those of 16 and 32 bits.
    Wide,
    /// `e4m3` alone.
    E4m3,
    /// All of them.
    Any,
}

/// What every family says of itself. Implemented by its schedule.
pub(crate) trait KernelFamily: Fields {
    /// `<op>/<arch>`, with `_<variant>` where there are several: in templates, kernel names and on the command line.
    const NAME: &'static str;
    /// The skeleton template.
    const TEMPLATE: &'static str;
    /// The operation that it computes.
    const OP: Op;
    /// What it is for.
    const PURPOSE: Purpose = Purpose::Fast;
    /// The argument that its kernels take.
    const ARGS: ArgsLayout = ArgsLayout::FORWARD;
    /// Whether its kernels read K and V from ragged batches, and not from dense tensors.
    const RAGGED: bool = false;
    /// Whether they read packed sequences too: ragged batches without pages, in the dtype of Q.
    const PACKED: bool = false;
    /// Which dtypes of Q its kernels compute.
    const QUERIES: Dtypes = Dtypes::Wide;
    /// Words of the instruction paths that compute a dtype by others than the family's usual instructions.
    const VARIANTS: &'static [&'static str] = &[];

    /// What is known of the instructions by which its kernels compute the problem on the arch.
    fn evidence(_problem: &Problem, _: Arch) -> Evidence {
        Evidence::of_hopper(Self::PURPOSE)
    }

    /// What callers should know who get a kernel of this family.
    fn notes(_problem: &Problem) -> Option<&'static str> {
        None
    }

    /// Whether the arch has the family's instructions.
    ///
    /// # Errors
    /// What is missing, and which family to use instead.
    fn runs_on(arch: Arch) -> Result<()>;

    /// Whether the family can compute a problem of its operation on an arch that it runs on.
    ///
    /// # Errors
    /// The limit, and which family to use instead.
    fn supports(problem: &Problem, arch: Arch) -> Result<()>;

    /// Why kernels of the family cannot meet what a call demands; `None` where they can.
    fn unmet(constraint: Constraint) -> Option<&'static str>;

    /// Demands that kernels of the family meet, but some schedules better than others ([`KernelFamily::unfit`]).
    const SWAYED_BY: Constraints = Constraints::NONE;

    /// Whether the family is worth its place in the list for a problem of such sizes. Where it is not, the fast
    /// families behind it serve before it while nothing is tuned.
    fn prefers(_problem: &Problem, _bucket: &ShapeBucket) -> bool {
        true
    }

    /// The schedule that serves while nothing is tuned, and always a contender when something is. Called for problems
    /// and archs that the family supports.
    fn default_for(problem: &Problem, arch: Arch, bucket: &ShapeBucket) -> Self;

    /// The default for calls with constraints that the family meets, on a device of so many multiprocessors, where it
    /// differs.
    fn default_within(problem: &Problem, arch: Arch, bucket: &ShapeBucket, _: Constraints, _units: u32) -> Self {
        Self::default_for(problem, arch, bucket)
    }

    /// Why this schedule should be left to calls without the constraint, though its kernels can meet it.
    fn unfit(&self, _: Constraint) -> Option<&'static str> {
        None
    }

    /// A schedule with the same result, to the bit, that compiles in a fraction of the time.
    fn quick(&self) -> Option<Self> {
        None
    }

    /// Whether it is what [`KernelFamily::quick`] gives.
    fn is_quick(&self) -> bool {
        false
    }

    /// The schedules worth trying. Some may not fit the device: [`crate::Kernel::check`] says so.
    fn space(problem: &Problem, arch: Arch) -> Vec<Self>;

    /// Whether it differs for this shape from a simpler schedule of the space; others need not be tried.
    fn is_worth(&self, _: &Shape) -> bool {
        true
    }

    /// Checks the fields against what the template can generate.
    ///
    /// # Errors
    /// The field, its limit, and the remedy.
    fn validate(&self, problem: &Problem, arch: Arch) -> Result<()>;

    /// What a kernel needs on the device, by estimate.
    fn resources(&self, problem: &Problem) -> Resources;

    /// Thread blocks that the schedule wants on one multiprocessor.
    fn blocks_per_sm(&self) -> u32 {
        1
    }

    /// Threads of the host that a launch runs on, where the schedule says.
    fn host_threads(&self) -> Option<NonZeroU32> {
        None
    }

    /// The template's constants that follow from the schedule, beyond those of its fields.
    fn constants(&self, _problem: &Problem, _: &mut Constants) {}

    /// Biases of a score program that come into shared memory by TMA.
    fn biases<'a>(&self, _problem: &'a Problem) -> &'a [crate::score::Bias] {
        &[]
    }

    /// The entry points of a kernel's module, in the order in which a launch runs them.
    fn entries(&self, _problem: &Problem) -> &'static [StageEntry] {
        &[StageEntry::MAIN]
    }

    /// The stages of a launch for a shape, and the scratch memory that they share.
    ///
    /// # Errors
    /// Sizes that exceed what one launch can hold.
    fn plan(&self, problem: &Problem, shape: &Shape) -> Result<LaunchPlan>;

    /// How its kernels take a ragged batch, where that is what they compute.
    fn ragged_account(&self, _: &Usual<'_>) -> Option<RaggedAccount> {
        None
    }

    /// In which tiles a kernel walks over a shape.
    fn walk(&self, problem: &Problem, shape: &Shape) -> Walk;
}

/// Writes down the families: their ids, their schedules as one type, and what is asked of either.
macro_rules! families {
    ($( $(#[$doc:meta])* $name:literal: $Family:ident = $Variant:ident($Type:ty); )*) => {
        /// A kernel family, by its id. Stored by its name.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        pub enum Family {
            $( $(#[$doc])* #[serde(rename = $name)] $Family, )*
        }

        /// A schedule of one of the families, whose name its stored form begins with.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        pub enum Schedule {
            $( #[doc = concat!("For [`Family::", stringify!($Family), "`].")] #[serde(rename = $name)] $Variant($Type), )*
        }

        /// Evaluates an expression for the schedule, whichever family's it is.
        macro_rules! of_schedule {
            ($schedule:expr, $s:ident => $value:expr) => {
                match $schedule { $( Schedule::$Variant($s) => $value, )* }
            };
            ($schedule:expr, $s:ident, $wrap:ident => $value:expr) => {
                match $schedule { $( Schedule::$Variant($s) => {
                    let $wrap = Schedule::$Variant;
                    $value
                } )* }
            };
        }

        /// Evaluates an expression with the family's schedule as the type `S` and its variant as the function `wrap`.
        macro_rules! of_family {
            ($family:expr, $S:ident, $wrap:ident => $value:expr) => {
                match $family {
                    $( Family::$Family => {
                        type $S = $Type;
                        let $wrap = Schedule::$Variant;
                        let _ = $wrap;
                        $value
                    } )*
                }
            };
        }

        impl Family {
            /// Every family.
            pub const ALL: [Family; [$(Family::$Family),*].len()] = [$(Family::$Family),*];
        }

        impl Schedule {
            /// The family that the schedule belongs to.
            pub fn family(&self) -> Family {
                match self { $( Schedule::$Variant(_) => Family::$Family, )* }
            }
        }
    };
}

// The fast ones of an arch before the slower ones: the first that supports a problem serves it while nothing is tuned.
families! {
    /// wgmma and TMA, FlashAttention-3.
    "forward/sm90": ForwardSm90 = Sm90(Sm90Schedule);
    /// `forward/sm90` for e4m3.
    "forward/sm90_fp8": ForwardSm90Fp8 = Sm90Fp8(Sm90Fp8Schedule);
    /// `forward/sm80` for e4m3, by mma.sync of sm_89.
    "forward/sm89_fp8": ForwardSm89Fp8 = Sm89Fp8(Sm89Fp8Schedule);
    /// `forward/sm90_fp8` for ragged batches.
    "forward/sm90_fp8_ragged": ForwardSm90Fp8Ragged = Sm90Fp8Ragged(Sm90Fp8RaggedSchedule);
    /// `forward/sm90` for ragged batches.
    "forward/sm90_ragged": ForwardSm90Ragged = Sm90Ragged(Sm90RaggedSchedule);
    /// mma.sync and cp.async, FlashAttention-2.
    "forward/sm80": ForwardSm80 = Sm80(Sm80Schedule);
    /// f32 by TF32 products of mma.sync.
    "forward/sm80_f32": ForwardSm80F32 = Sm80F32(Sm80F32Schedule);
    /// mma.sync and cp.async over ragged batches, keys split (Flash-Decoding).
    "forward/sm80_ragged": ForwardSm80Ragged = Sm80Ragged(Sm80RaggedSchedule);
    /// C for the host processor.
    "forward/cpu": ForwardCpu = Cpu(CpuSchedule);
    /// C for the host processor, for e4m3 and for tests.
    "forward/cpu_e4m3": ForwardCpuE4m3 = CpuE4m3(CpuE4m3Schedule);
    /// C for the host processor, for ragged batches.
    "forward/cpu_ragged": ForwardCpuRagged = CpuRagged(CpuRaggedSchedule);
    /// Plain fp32 CUDA: the oracle on the GPU, and f32 in precision `exact`.
    "forward/naive": ForwardNaive = Naive(NaiveSchedule);
    /// Plain fp32 CUDA for ragged batches: their oracle on the GPU, and the exact path for f32.
    "forward/naive_ragged": ForwardNaiveRagged = NaiveRagged(NaiveRaggedSchedule);
    /// New rows of K and V into a store, in plain CUDA.
    "append/cuda": AppendCuda = AppendCuda(AppendCudaSchedule);
    /// New rows of K and V into a store, in C.
    "append/cpu": AppendCpu = AppendCpu(AppendCpuSchedule);
    /// Gradients by wgmma and TMA, dS written once.
    "backward/sm90": BackwardSm90 = BackwardSm90(BackwardSm90Schedule);
    /// Gradients by mma.sync and cp.async.
    "backward/sm80": BackwardSm80 = BackwardSm80(BackwardSm80Schedule);
    /// Gradients in C for the host processor.
    "backward/cpu": BackwardCpu = BackwardCpu(BackwardCpuSchedule);
    /// Gradients in plain fp32 CUDA: the oracle on the GPU, and the exact path for f32.
    "backward/naive": BackwardNaive = BackwardNaive(BackwardNaiveSchedule);
    /// The gradient of what a score program reads, in C for the host processor.
    "gradient/cpu": GradientCpu = GradientCpu(GradientCpuSchedule);
    /// The gradient of what a score program reads, in plain fp32 CUDA.
    "gradient/naive": GradientNaive = GradientNaive(GradientNaiveSchedule);
    /// Rows into rows of another length, in plain CUDA.
    "pad/cuda": PadCuda = PadCuda(PadCudaSchedule);
    /// e4m3 operands with their scales, in plain CUDA.
    "quantise/cuda": QuantiseCuda = QuantiseCuda(QuantiseCudaSchedule);
    /// e4m3 operands with their scales, in C.
    "quantise/cpu": QuantiseCpu = QuantiseCpu(QuantiseCpuSchedule);
}

impl Family {
    /// `<op>/<arch>`: in templates, kernel names and on the command line.
    pub const fn name(self) -> &'static str {
        of_family!(self, S, wrap => <S as KernelFamily>::NAME)
    }

    /// The family with a name, or with its last part (`sm90`) where that is the forward pass's alone.
    pub fn by_name(name: &str) -> Option<Family> {
        let short = |f: &Family| f.op() == Op::Forward && f.name().rsplit_once('/').map(|(_, last)| last) == Some(name);
        let mut shorts = Self::ALL.into_iter().filter(short);
        let only = shorts.next().filter(|_| shorts.next().is_none());
        Self::ALL.into_iter().find(|f| f.name() == name).or(only)
    }

    /// The skeleton template.
    pub const fn template(self) -> &'static str {
        of_family!(self, S, wrap => <S as KernelFamily>::TEMPLATE)
    }

    /// The operation that it computes.
    pub const fn op(self) -> Op {
        of_family!(self, S, wrap => <S as KernelFamily>::OP)
    }

    /// What it is for.
    pub const fn purpose(self) -> Purpose {
        of_family!(self, S, wrap => <S as KernelFamily>::PURPOSE)
    }

    /// The argument that its kernels take, as this build has it.
    pub const fn args(self) -> ArgsLayout {
        of_family!(self, S, wrap => <S as KernelFamily>::ARGS)
    }

    /// Whether its kernels read K and V from ragged batches, and not from dense tensors.
    pub const fn is_ragged(self) -> bool {
        of_family!(self, S, wrap => <S as KernelFamily>::RAGGED)
    }

    /// Whether its kernels find K and V where these are.
    pub fn reads(self, kv: KvKind) -> bool {
        let packed = of_family!(self, S, wrap => <S as KernelFamily>::PACKED);
        kv.is_dense() != self.is_ragged() || packed && kv == KvKind::RAGGED
    }

    /// What is known of the instructions by which its kernels compute the problem on the arch.
    pub fn evidence(self, problem: &Problem, arch: Arch) -> Evidence {
        of_family!(self, S, wrap => <S as KernelFamily>::evidence(problem, arch))
    }

    /// Words of its instruction paths other than the usual ones.
    pub(crate) fn variants(self) -> &'static [&'static str] {
        of_family!(self, S, wrap => <S as KernelFamily>::VARIANTS)
    }

    /// What callers should know who get a kernel of this family for the problem.
    pub fn notes(self, problem: &Problem) -> Option<&'static str> {
        of_family!(self, S, wrap => <S as KernelFamily>::notes(problem))
    }

    /// Whether the family can compute the problem on the arch.
    ///
    /// # Errors
    /// The limit, and which family to use instead.
    pub fn supports(self, problem: &Problem, arch: Arch) -> Result<()> {
        if problem.op != self.op() {
            let limit = format!("computes {} problems", self.op());
            return Err(Error::unsupported("op", problem.op, format!("{self} {limit}"), "no family computes it yet"));
        }
        if !self.reads(problem.kv) {
            let packed = of_family!(self, S, wrap => <S as KernelFamily>::PACKED);
            let limit = match (self.is_ragged(), packed) {
                (true, _) => "ragged batches",
                (false, true) => "dense tensors and of packed sequences in the dtype of Q",
                (false, false) => "dense tensors",
            };
            let remedy = "use a family for such a batch: `forward/*_ragged`, or `backward/sm80` and `backward/naive`";
            return Err(Error::unsupported("kv", problem.kv, format!("{self} reads K and V of {limit} alone"), remedy));
        }
        let refused = match (of_family!(self, S, wrap => <S as KernelFamily>::QUERIES), problem.dtype) {
            (Dtypes::E4m3, DType::E4m3) | (Dtypes::Any, _) => None,
            (Dtypes::E4m3, _) => Some(("computes e4m3 only", "use forward/sm90 or forward/cpu")),
            (Dtypes::Wide, DType::E4m3) if problem.kv.is_dense() => Some((
                "does not compute e4m3",
                "forward/sm90_fp8, forward/sm89_fp8 and forward/cpu_e4m3 do; elsewhere use bf16 or f16",
            )),
            (Dtypes::Wide, DType::E4m3) => Some((
                "does not compute e4m3",
                "forward/sm90_fp8_ragged, forward/sm80_ragged and forward/cpu_ragged do",
            )),
            (Dtypes::Wide, _) => None,
        };
        if let Some((limit, remedy)) = refused {
            return Err(Error::unsupported("dtype", problem.dtype, format!("{self} {limit}"), remedy));
        }
        of_family!(self, S, wrap => {
            <S as KernelFamily>::runs_on(arch)?;
            <S as KernelFamily>::supports(problem, arch)
        })
    }

    /// Whether the arch has the family's instructions.
    pub fn runs_on(self, arch: Arch) -> bool {
        of_family!(self, S, wrap => <S as KernelFamily>::runs_on(arch).is_ok())
    }

    /// The families that can compute the problem on the arch, best first.
    pub fn candidates(problem: &Problem, arch: Arch) -> Vec<Family> {
        Self::ALL.into_iter().filter(|f| f.supports(problem, arch).is_ok()).collect()
    }

    /// The same for calls of some sizes: fast families that do not prefer these stand behind the other fast ones.
    pub fn candidates_for(problem: &Problem, arch: Arch, bucket: &ShapeBucket) -> Vec<Family> {
        let mut families = Self::candidates(problem, arch);
        families.sort_by_key(|f| (f.purpose() == Purpose::Plain, !f.prefers(problem, bucket)));
        families
    }

    /// Whether the family is worth its place among the others for such sizes.
    pub fn prefers(self, problem: &Problem, bucket: &ShapeBucket) -> bool {
        of_family!(self, S, wrap => <S as KernelFamily>::prefers(problem, bucket))
    }

    /// The first of a call's demands that kernels of the family cannot meet, and why not.
    pub fn unmet(self, demanded: Constraints) -> Option<(Constraint, &'static str)> {
        demanded.iter().find_map(|c| Some((c, of_family!(self, S, wrap => <S as KernelFamily>::unmet(c))?)))
    }
}

/// Which of a call's demands make a difference on an arch, and for which of them tuning helps.
impl Family {
    fn swayed_by(self) -> Constraints {
        of_family!(self, S, wrap => <S as KernelFamily>::SWAYED_BY)
    }

    /// The demands that some family of the arch cannot meet, or meets by another schedule. The others make no
    /// difference there.
    pub fn demands_of(arch: Arch) -> Constraints {
        let families: Vec<Family> = Self::ALL.into_iter().filter(|f| f.runs_on(arch)).collect();
        let matters = |c: &Constraint| families.iter().any(|f| f.unmet((*c).into()).is_some() || f.swayed_by().has(*c));
        Constraint::ALL.into_iter().filter(matters).fold(Constraints::NONE, Constraints::with)
    }

    /// Whether tuning helps calls with these demands: a fast family meets them, by the schedules that are tuned without
    /// them.
    pub fn is_tunable(demanded: Constraints, arch: Arch) -> bool {
        let meets = |f: &Family| f.runs_on(arch) && f.unmet(demanded).is_none();
        let fast = |f: Family| f.purpose() == Purpose::Fast;
        let swayed = |f: Family| demanded.iter().any(|c| f.swayed_by().has(c));
        let families = || Self::ALL.into_iter().filter(meets);
        demanded.is_empty() || families().any(fast) && !families().any(swayed)
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

impl Schedule {
    /// The schedule that serves while nothing is tuned, and always a contender when something is, where the device is
    /// not known: for one of [`crate::USUAL_UNITS`] multiprocessors.
    ///
    /// # Errors
    /// As [`Family::supports`].
    pub fn default_for(family: Family, problem: &Problem, arch: Arch, bucket: &ShapeBucket) -> Result<Schedule> {
        family.supports(problem, arch)?;
        Ok(of_family!(family, S, wrap => wrap(<S as KernelFamily>::default_for(problem, arch, bucket))))
    }

    /// The same on a device of so many multiprocessors, for calls with constraints, which the family meets.
    ///
    /// # Errors
    /// As [`Family::supports`].
    pub fn default_within(
        family: Family,
        problem: &Problem,
        arch: Arch,
        bucket: &ShapeBucket,
        demanded: Constraints,
        units: u32,
    ) -> Result<Schedule> {
        family.supports(problem, arch)?;
        Ok(of_family!(family, S, wrap => {
            wrap(<S as KernelFamily>::default_within(problem, arch, bucket, demanded, units))
        }))
    }

    /// The schedules worth trying, without the default's guarantee of being among them. Some may not fit the device:
    /// [`crate::Kernel::check`] says so.
    pub fn space(family: Family, problem: &Problem, arch: Arch) -> Vec<Schedule> {
        match family.supports(problem, arch) {
            Ok(()) => {
                of_family!(family, S, wrap => <S as KernelFamily>::space(problem, arch).into_iter().map(wrap).collect())
            }
            Err(_) => Vec::new(),
        }
    }

    /// A schedule with the same result, to the bit, that compiles in a fraction of the time and serves meanwhile. None
    /// where the compiler is quick enough.
    pub fn quick(&self) -> Option<Schedule> {
        of_schedule!(self, s, wrap => KernelFamily::quick(s).map(wrap))
    }

    /// Whether it is what [`Schedule::quick`] gives.
    pub fn is_quick(&self) -> bool {
        of_schedule!(self, s => KernelFamily::is_quick(s))
    }

    /// The first of a call's demands for which another schedule of the family is better, and why.
    pub fn unfit(&self, demanded: Constraints) -> Option<(Constraint, &'static str)> {
        demanded.iter().find_map(|c| Some((c, of_schedule!(self, s => KernelFamily::unfit(s, c))?)))
    }

    /// Whether it differs for this shape from a simpler schedule of the space; others need not be tried.
    pub fn is_worth(&self, shape: &Shape) -> bool {
        of_schedule!(self, s => KernelFamily::is_worth(s, shape))
    }

    /// Thread blocks that the schedule wants on one multiprocessor.
    pub fn blocks_per_sm(&self) -> u32 {
        of_schedule!(self, s => KernelFamily::blocks_per_sm(s))
    }

    /// Threads of the host that a launch runs on, where the schedule says; all of them otherwise.
    pub fn host_threads(&self) -> Option<NonZeroU32> {
        of_schedule!(self, s => KernelFamily::host_threads(s))
    }

    /// Every field by name, as a coordinate for the search.
    pub fn places(&self) -> Vec<(&'static str, Place)> {
        of_schedule!(self, s => Fields::places(s))
    }

    /// The fields that the machine code does not depend on, such as the order in which tiles are taken: schedules that
    /// differ in them alone compile to the same code and still run in different times.
    pub fn launch_places(&self) -> Vec<Place> {
        of_schedule!(self, s => Fields::launch_places(s))
    }

    /// How its kernel takes a ragged batch of a problem, by the sizes of a usual sequence on a device of so many
    /// multiprocessors or cores; none where it does not.
    pub fn ragged_account(&self, problem: &Problem, sizes: &CallSizes, units: u32) -> Option<RaggedAccount> {
        let usual = Usual { problem, sizes, units: units.max(1) };
        of_schedule!(self, s => KernelFamily::ragged_account(s, &usual))
    }

    pub(crate) fn validate(&self, problem: &Problem, arch: Arch) -> Result<()> {
        of_schedule!(self, s => KernelFamily::validate(s, problem, arch))
    }

    pub(crate) fn resources(&self, problem: &Problem) -> Resources {
        of_schedule!(self, s => KernelFamily::resources(s, problem))
    }

    pub(crate) fn constants(&self, problem: &Problem, constants: &mut Constants) {
        of_schedule!(self, s => {
            Fields::render(s, constants);
            KernelFamily::constants(s, problem, constants);
        });
    }

    pub(crate) fn biases<'a>(&self, problem: &'a Problem) -> &'a [crate::score::Bias] {
        of_schedule!(self, s => KernelFamily::biases(s, problem))
    }

    pub(crate) fn plan(&self, problem: &Problem, shape: &Shape) -> Result<LaunchPlan> {
        of_schedule!(self, s => KernelFamily::plan(s, problem, shape))
    }

    pub(crate) fn walk(&self, problem: &Problem, shape: &Shape) -> Walk {
        of_schedule!(self, s => KernelFamily::walk(s, problem, shape))
    }

    pub(crate) fn entries(&self, problem: &Problem) -> &'static [StageEntry] {
        of_schedule!(self, s => KernelFamily::entries(s, problem))
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        of_schedule!(self, s => s.fmt(f))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{KvElement, KvStore, MaskKind};

    fn arch(name: &str) -> Arch {
        name.parse().unwrap()
    }

    #[test]
    fn families_are_known_by_their_names_and_by_their_last_parts() {
        for family in Family::ALL {
            assert_eq!(Family::by_name(family.name()), Some(family));
            assert_eq!(serde_json::to_string(&family).unwrap(), format!("{:?}", family.name()));
            let (op, short) = family.name().split_once('/').unwrap();
            assert_eq!(op, family.op().name());
            assert_eq!(Family::by_name(short).filter(|_| op == "forward"), Some(family).filter(|_| op == "forward"));
            assert!(family.template().starts_with(family.name()), "{family}");
        }
        assert_eq!(Family::by_name("sm70"), None);
    }

    #[test]
    fn demands_count_where_they_make_a_difference() {
        let [weights, unaligned, strided, loose] = Constraint::ALL;
        let of = |name| Family::demands_of(arch(name));
        assert_eq!(of("cpu-avx2"), Constraints::NONE, "its kernels meet all of them");
        assert_eq!(of("sm_80"), Constraints::from(weights).with(unaligned));
        assert_eq!(of("sm_75"), Constraints::from(weights).with(unaligned));
        assert_eq!(of("sm_70"), Constraints::NONE, "no family runs there");
        assert_eq!(of("sm_90a"), Constraint::ALL.into_iter().fold(Constraints::NONE, Constraints::with));
        let tunable = |c: Constraint| Family::is_tunable(c.into(), arch("sm_90a"));
        assert_eq!([weights, unaligned, strided, loose].map(tunable), [false, false, true, false]);
        assert!(Family::is_tunable(Constraints::NONE, arch("sm_75")));
    }

    #[test]
    fn an_operation_without_a_family_is_refused_by_name() {
        let forward = Problem::forward(DType::Bf16, 64, MaskKind::FULL).unwrap();
        let problem = Problem { op: Op::Quantise, ..forward };
        for family in Family::ALL.into_iter().filter(|f| f.op() != Op::Quantise) {
            let e = family.supports(&problem, arch("sm_90a")).unwrap_err().to_string();
            assert!(e.contains("op") && e.contains("quantise"), "{e}");
        }
        assert_eq!(Family::candidates(&problem, arch("sm_90a")), [Family::QuantiseCuda]);
        assert_eq!(Family::candidates(&problem, arch("cpu-avx2")), [Family::QuantiseCpu]);
        let fast = [Family::BackwardSm90, Family::BackwardSm80, Family::BackwardNaive];
        assert_eq!(Family::candidates(&forward.backward(), arch("sm_90a")), fast);
        assert_eq!(Family::candidates(&forward.backward(), arch("sm_80")), fast[1..]);
        assert_eq!(Family::candidates(&forward.backward(), arch("cpu-avx2")), [Family::BackwardCpu]);
    }

    #[test]
    fn packed_gradients_are_those_of_families_that_take_packs_and_of_no_other_store() {
        let packed = Problem::forward(DType::Bf16, 64, MaskKind::FULL).unwrap().backward().with_kv(KvKind::RAGGED);
        let families = [Family::BackwardSm90, Family::BackwardSm80, Family::BackwardNaive];
        assert_eq!(Family::candidates(&packed, arch("sm_90a")), families);
        assert_eq!(Family::candidates(&packed, arch("sm_80")), families[1..]);
        assert_eq!(Family::candidates(&packed, arch("cpu-avx2")), [Family::BackwardCpu]);
        let store = KvStore { element: KvElement::E4m3, ..KvStore::default() };
        let quantised = packed.with_kv(KvKind::Ragged(store));
        assert!(Family::candidates(&quantised, arch("sm_90a")).is_empty());
        let e = Family::BackwardSm80.supports(&quantised, arch("sm_90a")).unwrap_err().to_string();
        assert!(e.contains("kv") && e.contains("packed sequences in the dtype of Q"), "{e}");
    }

    #[test]
    fn fields_are_named_once() {
        let bucket = ShapeBucket { parallel: 16, group: 1, q_len: 1024, kv_len: 1024, ..Default::default() };
        let problem = Problem::forward(DType::Bf16, 128, MaskKind::CAUSAL).unwrap();
        for (family, name) in
            [(Family::ForwardSm90, "sm_90a"), (Family::ForwardSm80, "sm_80"), (Family::ForwardCpu, "cpu-avx2")]
        {
            let schedule = Schedule::default_for(family, &problem, arch(name), &bucket).unwrap();
            let mut names: Vec<&str> = schedule.places().into_iter().map(|(name, _)| name).collect();
            let count = names.len();
            names.sort_unstable();
            names.dedup();
            assert_eq!(names.len(), count);
            assert!(schedule.launch_places().len() < count);
        }
    }
}

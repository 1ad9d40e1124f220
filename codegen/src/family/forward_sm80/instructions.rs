//! What kernels of `forward/sm80` are made of, by arch, and the default schedule of sm_75.

use super::{Sm80Schedule, Swizzle, TileOrder};
use crate::family::Place;
use crate::family::fields::{Constants, FieldValue};
use crate::{Error, Problem, Result, SmArch};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Which products and copies a kernel has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize)]
pub enum Sm80Instructions {
    /// mma.sync.m16n8k16 and cp.async, of sm_80 and newer.
    #[default]
    Ampere,
    /// mma.sync.m16n8k8 on f16, two to a product, and copies by loads and stores, of sm_75.
    Turing,
}

impl Sm80Instructions {
    /// The word of Turing's in the names of instruction paths.
    pub(super) const M16N8K8: &'static str = "m16n8k8";

    /// Those of an arch.
    pub const fn of(sm: SmArch) -> Self {
        if sm.number < 80 { Sm80Instructions::Turing } else { Sm80Instructions::Ampere }
    }

    const fn name(self) -> &'static str {
        match self {
            Sm80Instructions::Ampere => "",
            Sm80Instructions::Turing => "turing",
        }
    }

    /// Whether an arch has them, and as many stages go with them.
    pub(super) fn check(self, sm: SmArch, stages: u32) -> Result<()> {
        let (own, remedy) = (Self::of(sm), "use a schedule from the searched space");
        if self != own {
            let limit = format!("kernels for {sm} are made of those of {own:?}");
            return Err(Error::unsupported("instructions", format!("{self:?}"), limit, remedy));
        }
        if self == Sm80Instructions::Turing && stages != 1 {
            let limit = "1 stage without cp.async: what is copied waits in registers";
            return Err(Error::unsupported("stages", stages, limit, remedy));
        }
        Ok(())
    }
}

impl fmt::Display for Sm80Instructions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FieldValue for Sm80Instructions {
    fn place(&self) -> Place {
        Place::Word(self.name())
    }
    fn render(&self, _: &'static str, constants: &mut Constants) {
        let is_turing = *self == Sm80Instructions::Turing;
        constants.extend([("half_products", is_turing.to_string()), ("async_copies", (!is_turing).to_string())]);
    }
}

impl Sm80Schedule {
    /// The default of sm_75, which no card has timed: by count, two thread blocks to a multiprocessor, whose 64 KB they
    /// share, hide each other's latency; above head dim 128 one.
    pub(super) fn default_on_turing(problem: &Problem) -> Self {
        let (block_kv, q_in_registers, blocks_per_sm) = match problem.head_dim_qk.max(problem.head_dim_v) {
            0..=64 => (64, true, 2),
            65..=128 => (48, true, 2),
            129..=192 => (32, false, 1),
            _ => (16, false, 1),
        };
        let order = if problem.mask.right { TileOrder::BlockMajor } else { TileOrder::HeadMajor };
        Self {
            warps: 4,
            rows_per_warp: 16,
            block_kv,
            stages: 1,
            q_in_registers,
            swizzle: Swizzle::Xor,
            blocks_per_sm,
            lazy_rescale: true,
            masked_loop: false,
            order,
            instructions: Sm80Instructions::Turing,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Arch, DType, Family, InstructionPath, Kernel, Level, MaskKind, Paths, Schedule, ShapeBucket};

    fn arch(name: &str) -> Arch {
        name.parse().unwrap()
    }

    #[test]
    fn every_default_of_turing_is_legal_and_its_space_has_legal_schedules() {
        let sm75 = arch("sm_75");
        for d in (16..=256).step_by(8) {
            for mask in MaskKind::ALL {
                let problem = Problem::forward(DType::F16, d, mask).unwrap();
                let kernel = |schedule| Kernel { problem, schedule, arch: sm75 };
                for n in [1, 64, 4096] {
                    let bucket = ShapeBucket { parallel: 32, group: 1, q_len: n, kv_len: n, ..Default::default() };
                    kernel(Schedule::default_for(Family::ForwardSm80, &problem, sm75, &bucket).unwrap())
                        .check()
                        .unwrap();
                }
                let legal = Schedule::space(Family::ForwardSm80, &problem, sm75).into_iter();
                assert!(legal.filter(|s| kernel(*s).check().is_ok()).count() > 3, "{problem}");
            }
        }
    }

    #[test]
    fn turing_is_of_f16_by_name_and_its_schedules_are_of_sm_75_alone() {
        let (sm75, f16) = (arch("sm_75"), Problem::forward(DType::F16, 64, MaskKind::FULL).unwrap());
        let path: InstructionPath = "forward/sm80:f16-m16n8k8".parse().unwrap();
        assert_eq!(InstructionPath::of(Family::ForwardSm80, &f16, sm75), path);
        let e = Paths::default().admit(Family::ForwardSm80, &f16, sm75).unwrap_err().to_string();
        for words in ["forward/sm80:f16-m16n8k8", "emulated", "flashtune check --family forward/sm80", "--allow-path"] {
            assert!(e.contains(words), "{e}");
        }
        let allowed = Paths::allowing([path]);
        allowed.admit(Family::ForwardSm80, &f16, sm75).unwrap();
        assert_eq!(allowed.level(Family::ForwardSm80, &f16, sm75), Level::Emulated);
        let bf16 = Problem::forward(DType::Bf16, 64, MaskKind::FULL).unwrap();
        assert_eq!(Family::candidates(&f16, sm75), [Family::ForwardSm80, Family::ForwardNaive]);
        assert_eq!(Family::candidates(&bf16, sm75), [Family::ForwardNaive]);

        let turing = Sm80Schedule::default_on_turing(&f16);
        let check = |schedule, arch| Kernel { problem: f16, schedule: Schedule::Sm80(schedule), arch }.check();
        check(turing, sm75).unwrap();
        let ampere = Sm80Schedule { instructions: Sm80Instructions::Ampere, ..turing };
        check(ampere, arch("sm_80")).unwrap();
        for (schedule, on, field) in [
            (turing, "sm_80", "instructions"),
            (ampere, "sm_75", "instructions"),
            (Sm80Schedule { stages: 2, ..turing }, "sm_75", "stages"),
        ] {
            let e = check(schedule, arch(on)).unwrap_err().to_string();
            assert!(e.starts_with(field), "{e}");
        }
        // Keys of what there was before stay as they were.
        assert!(!serde_json::to_string(&ampere).unwrap().contains("instructions"));
        assert!(!ampere.to_string().contains("turing") && turing.to_string().ends_with("-turing"));
    }
}

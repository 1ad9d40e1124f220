//! How sure we are of a kernel. A level belongs to an instruction path, a family with a dtype and the instructions that
//! it computes it by, and not to a card: what a card has executed is dispatched on every arch that has the
//! instructions. A path whose instructions no card has executed is taken only by name, or where a check or a tuning has
//! raised its level.

use crate::{Arch, DType, Error, Family, Problem, Purpose, Result};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::str::FromStr;

/// What speaks for the instructions of a path, the least first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// NVRTC makes machine code of it.
    Compiled,
    /// The emulator runs it, and sees faults that are planted in it.
    Emulated,
    /// A card has executed it, with the right results.
    Ran,
    /// A card has timed it beside others.
    Raced,
}

impl Level {
    /// The word in what is said of it.
    pub const fn name(self) -> &'static str {
        match self {
            Level::Compiled => "compiled",
            Level::Emulated => "emulated",
            Level::Ran => "ran",
            Level::Raced => "raced",
        }
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A family with a dtype and the instructions that it computes it by: `forward/sm80:f16`,
/// `forward/sm80:f16-m16n8k8`. Stored by that text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InstructionPath {
    /// Whose kernels take it.
    pub family: Family,
    /// Of Q, K and V.
    pub dtype: DType,
    /// Which instructions, where the family has others for the dtype; else empty.
    pub variant: &'static str,
}

impl InstructionPath {
    /// The path of kernels of a family for a problem on an arch.
    pub fn of(family: Family, problem: &Problem, arch: Arch) -> Self {
        Self { family, dtype: problem.dtype, variant: family.evidence(problem, arch).variant }
    }
}

impl fmt::Display for InstructionPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.family, self.dtype)?;
        if self.variant.is_empty() { Ok(()) } else { write!(f, "-{}", self.variant) }
    }
}

impl FromStr for InstructionPath {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        let bad = || Error::parse("instruction path", s, "FAMILY:DTYPE, as `flashtune explain` names it");
        let (family, rest) = s.trim().split_once(':').ok_or_else(bad)?;
        let family: Family = family.parse()?;
        let (dtype, variant) = rest.split_once('-').unwrap_or((rest, ""));
        let variant = family.variants().iter().chain(&[""]).find(|known| **known == variant).ok_or_else(bad)?;
        Ok(Self { family, dtype: dtype.parse()?, variant })
    }
}

impl Serialize for InstructionPath {
    fn serialize<S: Serializer>(&self, s: S) -> std::result::Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for InstructionPath {
    fn deserialize<D: Deserializer<'de>>(d: D) -> std::result::Result<Self, D::Error> {
        let text = String::deserialize(d)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

/// What this build knows of a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Evidence {
    /// Which instructions, where the family has others for the dtype; else empty.
    pub variant: &'static str,
    /// What speaks for them.
    pub level: Level,
    /// The compute capabilities, times ten, of the cards that have executed them.
    pub on: &'static [u16],
}

impl Evidence {
    /// That of what cards of sm_90 race, or compute where it is what others are held against; of the CPU likewise.
    pub(crate) const fn of_hopper(purpose: Purpose) -> Self {
        let level = match purpose {
            Purpose::Fast => Level::Raced,
            Purpose::Plain => Level::Ran,
        };
        Self { variant: "", level, on: &[90] }
    }

    /// That of instructions which `flashtune check` has run on cards of sm_90, which have faster ones for the same.
    pub(crate) const fn checked_on_hopper() -> Self {
        Self { variant: "", level: Level::Ran, on: &[90] }
    }

    /// That of instructions which the emulator alone has executed.
    pub(crate) const fn emulated(variant: &'static str) -> Self {
        Self { variant, level: Level::Emulated, on: &[] }
    }
}

/// A level that a card of the user's has raised.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Raised {
    /// Ran or raced.
    pub level: Level,
    /// The card's name.
    pub device: String,
}

/// Which paths a process takes beside those that a card is known to have executed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Paths {
    allowed: BTreeSet<InstructionPath>,
    raised: BTreeMap<InstructionPath, Raised>,
}

impl Paths {
    /// Those that are allowed by name, whatever their level.
    pub fn allowing(paths: impl IntoIterator<Item = InstructionPath>) -> Self {
        Self { allowed: paths.into_iter().collect(), raised: BTreeMap::new() }
    }

    /// The same with levels that a card of the present arch has raised.
    pub fn with_raised(self, raised: impl IntoIterator<Item = (InstructionPath, Raised)>) -> Self {
        Self { raised: raised.into_iter().collect(), ..self }
    }

    /// The level of kernels of a family for a problem on the arch.
    pub fn level(&self, family: Family, problem: &Problem, arch: Arch) -> Level {
        let known = family.evidence(problem, arch).level;
        let raised = self.raised.get(&InstructionPath::of(family, problem, arch));
        raised.map_or(known, |raised| known.max(raised.level))
    }

    /// Whether kernels of a family are taken for a problem without a measurement of their own.
    ///
    /// # Errors
    /// The path, its level, and how to allow it.
    pub fn admit(&self, family: Family, problem: &Problem, arch: Arch) -> Result<()> {
        let path = InstructionPath::of(family, problem, arch);
        let level = self.level(family, problem, arch);
        if level >= Level::Ran || self.allowed.contains(&path) {
            return Ok(());
        }
        let limit = format!("it is {level}, and no card has executed its instructions that is known of");
        let remedy = format!(
            "run `flashtune check --family {family}` on this card, which raises its level here, or allow it by name \
             (--allow-path {path}, FLASHTUNE_ALLOW_PATHS, `allow_paths` of an engine)"
        );
        Err(Error::unsupported("path", path, limit, remedy))
    }

    /// The level and what it rests on, in words.
    pub fn explain(&self, family: Family, problem: &Problem, arch: Arch) -> String {
        let Evidence { level, on, .. } = family.evidence(problem, arch);
        let path = InstructionPath::of(family, problem, arch);
        let Arch::Sm(sm) = arch else { return format!("{level} on processors of this kind") };
        let (here, cards) = (format!("sm_{}", sm.number), on.iter().map(|n| format!("sm_{n}")).collect::<Vec<_>>());
        let is_known = on.contains(&sm.number);
        match self.raised.get(&path) {
            Some(raised) if !is_known || raised.level > level => {
                format!("{} on {here} ({})", raised.level, raised.device)
            }
            _ if is_known => format!("{level} on {here}"),
            _ if level >= Level::Ran => format!("{} on {}, never on {here}", Level::Ran, cards.join(", ")),
            _ if self.allowed.contains(&path) => format!("{level}, on no card yet; {path} is allowed by name"),
            _ => format!("{level}, on no card yet"),
        }
    }

    /// Whether a card that passes a check or a tuning of the path on the arch raises what is known of it there.
    pub fn would_raise(&self, path: &InstructionPath, evidence: &Evidence, arch: Arch, to: Level) -> bool {
        let Arch::Sm(sm) = arch else { return false };
        let known = if evidence.on.contains(&sm.number) { evidence.level } else { Level::Compiled };
        to > known.max(self.raised.get(path).map_or(Level::Compiled, |raised| raised.level))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MaskKind;

    fn arch(name: &str) -> Arch {
        name.parse().unwrap()
    }

    fn problem(dtype: DType) -> Problem {
        Problem::forward(dtype, 64, MaskKind::FULL).unwrap()
    }

    #[test]
    fn paths_are_known_by_their_texts_and_unknown_ones_are_refused() {
        for (family, dtype, name) in [
            (Family::ForwardSm80, DType::Bf16, "forward/sm80:bf16"),
            (Family::ForwardNaive, DType::F32, "forward/naive:f32"),
        ] {
            let path = InstructionPath { family, dtype, variant: "" };
            assert_eq!(path.to_string(), name);
            assert_eq!(name.parse::<InstructionPath>().unwrap(), path);
            assert_eq!(serde_json::to_string(&path).unwrap(), format!("{name:?}"));
            assert_eq!(serde_json::from_str::<InstructionPath>(&format!("{name:?}")).unwrap(), path);
        }
        for bad in ["", "forward/sm80", "forward/sm81:f16", "forward/sm80:f17", "forward/sm80:f16-m9", "sm80:f16"] {
            assert!(bad.parse::<InstructionPath>().is_err(), "{bad}");
        }
    }

    /// What was dispatched everywhere before there were levels still is.
    #[test]
    fn what_ran_on_a_card_is_taken_on_every_arch_that_has_its_instructions() {
        let paths = Paths::default();
        for name in ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"] {
            for dtype in DType::ALL {
                let problem = problem(dtype).in_default_precision(arch(name));
                for family in Family::candidates(&problem, arch(name)) {
                    paths.admit(family, &problem, arch(name)).unwrap();
                    assert!(paths.level(family, &problem, arch(name)) >= Level::Ran);
                }
            }
        }
        let explain = |name| paths.explain(Family::ForwardSm80, &problem(DType::F16), arch(name));
        assert_eq!(explain("sm_90a"), "raced on sm_90");
        assert_eq!(explain("sm_89"), "ran on sm_90, never on sm_89");
        let plain = |name| paths.explain(Family::ForwardNaive, &problem(DType::F32), arch(name));
        assert_eq!([plain("sm_90a"), plain("sm_75")], ["ran on sm_90", "ran on sm_90, never on sm_75"]);
    }

    #[test]
    fn what_no_card_has_run_is_refused_by_its_path_with_the_remedy() {
        let (family, sm75) = (Family::ForwardSm80, arch("sm_75"));
        let e = Paths::default().admit(family, &problem(DType::F16), sm75).unwrap_err();
        let text = e.to_string();
        assert!(matches!(e, Error::Unsupported { field: "path", .. }), "{text}");
        for words in ["forward/sm80:f16-m16n8k8", "emulated", "check --family forward/sm80", "--allow-path"] {
            assert!(text.contains(words), "{text}");
        }
        let path = InstructionPath::of(family, &problem(DType::F16), sm75);
        Paths::allowing([path]).admit(family, &problem(DType::F16), sm75).unwrap();
        let of = |name| Family::ForwardSm89Fp8.evidence(&problem(DType::E4m3), arch(name)).level;
        assert_eq!([of("sm_89"), of("sm_120a")], [Level::Ran; 2]);
    }

    #[test]
    fn a_raised_level_is_told_with_its_card_and_raised_once() {
        let (family, sm89) = (Family::ForwardSm80, arch("sm_89"));
        let path = InstructionPath::of(family, &problem(DType::F16), sm89);
        let evidence = family.evidence(&problem(DType::F16), sm89);
        let raised = |level| Paths::default().with_raised([(path, Raised { level, device: "NVIDIA L4".into() })]);
        let ran = raised(Level::Ran);
        assert_eq!(ran.explain(family, &problem(DType::F16), sm89), "ran on sm_89 (NVIDIA L4)");
        assert_eq!(ran.explain(family, &problem(DType::Bf16), sm89), "ran on sm_90, never on sm_89");
        let raises = |paths: &Paths, on, to| paths.would_raise(&path, &evidence, arch(on), to);
        assert!(raises(&Paths::default(), "sm_89", Level::Ran) && raises(&ran, "sm_89", Level::Raced));
        assert!(!raises(&ran, "sm_89", Level::Ran) && !raises(&raised(Level::Raced), "sm_89", Level::Ran));
        assert!(!raises(&Paths::default(), "sm_90a", Level::Raced), "it is known of this build");
        assert!(!raises(&Paths::default(), "cpu-avx2", Level::Raced));
    }
}

//! Code-generation targets and their limits.

use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// A code-generation target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Arch {
    /// The host processor, by the vector instructions that it has.
    Cpu(CpuIsa),
    /// An NVIDIA GPU.
    Sm(SmArch),
}

impl Arch {
    /// The GPU of an arch that a family for GPUs supports.
    ///
    /// # Panics
    /// On the CPU: callers ask `supports` first.
    pub(crate) fn gpu(self) -> SmArch {
        match self {
            Arch::Sm(sm) => sm,
            Arch::Cpu(_) => unreachable!("a family for GPUs supports no CPU"),
        }
    }
}

/// Vector instruction sets that `cpu` kernels are written for, in rising order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize)]
pub enum CpuIsa {
    /// Portable C with vector extensions; any processor.
    #[default]
    Generic,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// x86-64 with AVX-512 F, BW, VL and DQ.
    Avx512,
    /// AVX-512 plus the bf16 dot product.
    Avx512Bf16,
    /// AVX-512 bf16 plus AMX tiles for bf16.
    Amx,
}

/// An NVIDIA compute capability, as `sm_XX` with an optional architecture-specific suffix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SmArch {
    /// Compute capability times ten, e.g. 90.
    pub number: u16,
    /// Architecture-specific features (`sm_90a`): the cubin runs on this very capability only.
    #[serde(default, skip_serializing_if = "crate::omitted::is_default")]
    pub specific: bool,
}

/// Multiprocessors of a device where none is known, as of kernels that are built for another machine: those of an H100
/// SXM, an H200 and a GH200. An H100 PCIe has 114, an H20 78; what runs on a device goes by its fingerprint.
pub const USUAL_UNITS: u32 = 132;

/// What one multiprocessor and one thread block may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SmLimits {
    /// Largest dynamic shared memory of one block, in bytes.
    pub smem_per_block: u32,
    /// Shared memory of one multiprocessor, in bytes.
    pub smem_per_sm: u32,
    /// 32-bit registers of one multiprocessor.
    pub registers_per_sm: u32,
    /// Largest number of registers of one thread.
    pub registers_per_thread: u32,
    /// Largest number of threads of one block.
    pub threads_per_block: u32,
    /// Largest number of resident threads of one multiprocessor.
    pub threads_per_sm: u32,
}

impl CpuIsa {
    /// All instruction sets, lowest first.
    pub const ALL: [CpuIsa; 5] = [CpuIsa::Generic, CpuIsa::Avx2, CpuIsa::Avx512, CpuIsa::Avx512Bf16, CpuIsa::Amx];

    /// The name used in templates and arch names.
    pub const fn name(self) -> &'static str {
        match self {
            CpuIsa::Generic => "generic",
            CpuIsa::Avx2 => "avx2",
            CpuIsa::Avx512 => "avx512",
            CpuIsa::Avx512Bf16 => "avx512bf16",
            CpuIsa::Amx => "amx",
        }
    }

    /// fp32 lanes of one vector register.
    pub const fn lanes(self) -> u32 {
        match self {
            CpuIsa::Generic => 4,
            CpuIsa::Avx2 => 8,
            CpuIsa::Avx512 | CpuIsa::Avx512Bf16 | CpuIsa::Amx => 16,
        }
    }

    /// Compiler flags that allow the instructions.
    pub fn flags(self) -> Vec<&'static str> {
        const AVX2: [&str; 3] = ["-mavx2", "-mfma", "-mf16c"];
        const AVX512: [&str; 5] = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"];
        let mut flags = Vec::new();
        if self >= CpuIsa::Avx2 {
            flags.extend(AVX2);
        }
        if self >= CpuIsa::Avx512 {
            flags.extend(AVX512);
        }
        if self >= CpuIsa::Avx512Bf16 {
            flags.push("-mavx512bf16");
        }
        if self >= CpuIsa::Amx {
            flags.extend(["-mamx-tile", "-mamx-bf16"]);
        }
        flags
    }
}

impl SmArch {
    /// The target for a device of compute capability `major.minor`. Architecture-specific code generation is used where
    /// a family needs it (Hopper and newer).
    pub const fn of_capability(major: u16, minor: u16) -> Self {
        let number = major * 10 + minor;
        Self { number, specific: number >= 90 }
    }

    /// Limits of this architecture; those of the closest older one when it is not in the table.
    pub const fn limits(self) -> SmLimits {
        let (block_kib, sm_kib, threads_per_sm) = match self.number {
            0..=75 => (64, 64, 1024),
            76..=80 => (163, 164, 2048),
            81..=86 => (99, 100, 1536),
            87..=88 => (163, 164, 1536),
            89 => (99, 100, 1536),
            90..=119 => (227, 228, 2048),
            _ => (99, 100, 1536),
        };
        SmLimits {
            smem_per_block: block_kib * 1024,
            smem_per_sm: sm_kib * 1024,
            registers_per_sm: 65536,
            registers_per_thread: 255,
            threads_per_block: 1024,
            threads_per_sm,
        }
    }
}

impl fmt::Display for SmArch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sm_{}{}", self.number, if self.specific { "a" } else { "" })
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Arch::Cpu(isa) => write!(f, "cpu-{}", isa.name()),
            Arch::Sm(sm) => sm.fmt(f),
        }
    }
}

impl FromStr for Arch {
    type Err = Error;
    fn from_str(s: &str) -> Result<Self> {
        let bad = || {
            Error::parse(
                "arch",
                s,
                "cpu-generic, cpu-avx2, cpu-avx512, cpu-avx512bf16, cpu-amx, or sm_XX (sm_80, sm_90a)",
            )
        };
        if let Some(isa) = s.strip_prefix("cpu-") {
            return CpuIsa::ALL.into_iter().find(|i| i.name() == isa).map(Arch::Cpu).ok_or_else(bad);
        }
        let digits = s.strip_prefix("sm_").ok_or_else(bad)?;
        let (digits, specific) = match digits.strip_suffix('a') {
            Some(d) => (d, true),
            None => (digits, false),
        };
        let number: u16 = digits.parse().map_err(|_| bad())?;
        if !(70..=990).contains(&number) {
            return Err(bad());
        }
        Ok(Arch::Sm(SmArch { number, specific }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for name in ["cpu-generic", "cpu-avx512bf16", "sm_80", "sm_90a", "sm_120a"] {
            assert_eq!(name.parse::<Arch>().unwrap().to_string(), name);
        }
        for bad in ["cpu", "sm90", "sm_", "sm_9", "cpu-neon", "gpu"] {
            assert!(bad.parse::<Arch>().is_err(), "{bad}");
        }
    }
}

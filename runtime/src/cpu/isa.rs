//! Which vector instructions the host has.

use crate::{Error, Result};
use flashtune_codegen::{Arch, CpuIsa};
use std::sync::OnceLock;

/// Environment variable that lowers the instruction set, to test or to build for an older machine.
pub(super) const ENV: &str = "FLASHTUNE_CPU_ISA";

/// The highest instruction set of this host.
pub(super) fn host() -> CpuIsa {
    static HOST: OnceLock<CpuIsa> = OnceLock::new();
    *HOST.get_or_init(detect)
}

/// The host's instruction set, or the lower one that `wanted` names.
pub(super) fn choose(wanted: Option<&str>, host: CpuIsa) -> Result<CpuIsa> {
    let Some(wanted) = wanted.filter(|w| !w.is_empty()) else { return Ok(host) };
    let name = wanted.strip_prefix("cpu-").unwrap_or(wanted);
    let Arch::Cpu(isa) = format!("cpu-{name}").parse::<Arch>()? else { return Ok(host) };
    if isa > host {
        return Err(Error::Device {
            call: "choosing the instruction set",
            device: "cpu".to_owned(),
            message: format!("{ENV}={wanted}, but this processor goes up to {}", host.name()),
            remedy: "unset FLASHTUNE_CPU_ISA or name a lower instruction set",
        });
    }
    Ok(isa)
}

#[cfg(target_arch = "x86_64")]
fn detect() -> CpuIsa {
    use std::arch::is_x86_feature_detected as has;
    if !(has!("avx2") && has!("fma") && has!("f16c")) {
        return CpuIsa::Generic;
    }
    if !(has!("avx512f") && has!("avx512bw") && has!("avx512vl") && has!("avx512dq")) {
        return CpuIsa::Avx2;
    }
    if !has!("avx512bf16") {
        return CpuIsa::Avx512;
    }
    if has_amx() { CpuIsa::Amx } else { CpuIsa::Avx512Bf16 }
}

#[cfg(not(target_arch = "x86_64"))]
fn detect() -> CpuIsa {
    CpuIsa::Generic
}

/// Whether the processor and the kernel offer AMX tiles for bf16, and the kernel lets this process use them. The
/// permission covers every thread of the process, those of later modules included.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn has_amx() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_ulong = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_ulong = 18;
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let flags = info.lines().find(|l| l.starts_with("flags")).unwrap_or_default();
    let flag = |name| flags.split_ascii_whitespace().any(|f| f == name);
    if !(flag("amx_tile") && flag("amx_bf16")) {
        return false;
    }
    // SAFETY: this request takes two integers and changes nothing but the set of features that the process may use.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

#[cfg(all(target_arch = "x86_64", not(target_os = "linux")))]
fn has_amx() -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_lowers_but_never_raises() {
        assert_eq!(choose(None, CpuIsa::Avx512).unwrap(), CpuIsa::Avx512);
        assert_eq!(choose(Some(""), CpuIsa::Avx512).unwrap(), CpuIsa::Avx512);
        assert_eq!(choose(Some("avx2"), CpuIsa::Avx512).unwrap(), CpuIsa::Avx2);
        assert_eq!(choose(Some("cpu-generic"), CpuIsa::Avx512).unwrap(), CpuIsa::Generic);
        let e = choose(Some("amx"), CpuIsa::Avx2).unwrap_err().to_string();
        assert!(e.contains("avx2") && e.contains(ENV), "{e}");
        assert!(choose(Some("neon"), CpuIsa::Avx2).is_err());
    }
}

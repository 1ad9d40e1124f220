//! What the host processor is: name, cores, memory, cache.

use super::isa;
use crate::Result;
use flashtune_cache::DeviceFingerprint;
use flashtune_codegen::Arch;
use std::fs;

/// The fingerprint of this host.
pub(super) fn fingerprint() -> Result<DeviceFingerprint> {
    let wanted = std::env::var(isa::ENV).ok();
    let isa = isa::choose(wanted.as_deref(), isa::host())?;
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    Ok(DeviceFingerprint {
        arch: Arch::Cpu(isa),
        name: model_name(&read("/proc/cpuinfo")).unwrap_or_else(|| std::env::consts::ARCH.to_owned()),
        units: std::thread::available_parallelism().map_or(1, |n| n.get() as u32),
        memory_bytes: memory_bytes(&read("/proc/meminfo")).unwrap_or(0),
        cache_bytes: last_level_cache().unwrap_or(0),
        driver: match read("/proc/sys/kernel/osrelease").trim() {
            "" => std::env::consts::OS.to_owned(),
            release => format!("{} {release}", std::env::consts::OS),
        },
    })
}

/// The value of the first `model name` line.
fn model_name(cpuinfo: &str) -> Option<String> {
    let line = cpuinfo.lines().find(|l| l.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned()).filter(|n| !n.is_empty())
}

/// Installed memory, to the next GiB: what the kernel keeps for itself varies from boot to boot, and must not make the
/// host another device.
fn memory_bytes(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|l| l.strip_prefix("MemTotal:"))?;
    let kib = line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?;
    Some(kib.next_multiple_of(1 << 20) * 1024)
}

/// Size of the highest cache level that the first core sees.
fn last_level_cache() -> Option<u64> {
    let caches = fs::read_dir("/sys/devices/system/cpu/cpu0/cache").ok()?;
    caches
        .filter_map(|entry| {
            let folder = entry.ok()?.path();
            let level: u32 = fs::read_to_string(folder.join("level")).ok()?.trim().parse().ok()?;
            Some((level, size(fs::read_to_string(folder.join("size")).ok()?.trim())?))
        })
        .max()
        .map(|(_, bytes)| bytes)
}

/// `266240K`, `32M` or plain bytes.
fn size(text: &str) -> Option<u64> {
    let (digits, unit) = match text.as_bytes().last()? {
        b'K' => (&text[..text.len() - 1], 1 << 10),
        b'M' => (&text[..text.len() - 1], 1 << 20),
        b'G' => (&text[..text.len() - 1], 1 << 30),
        _ => (text, 1),
    };
    digits.parse::<u64>().ok()?.checked_mul(unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_kernels_texts() {
        let cpuinfo = "processor\t: 0\nmodel name\t: Some CPU @ 2.30GHz\nflags\t\t: fpu\nmodel name\t: other\n";
        assert_eq!(model_name(cpuinfo).as_deref(), Some("Some CPU @ 2.30GHz"));
        assert_eq!(model_name("processor: 0\n"), None);
        assert_eq!(memory_bytes("MemTotal:       24672056 kB\nMemFree: 1 kB\n"), Some(24 << 30));
        assert_eq!(
            (size("266240K"), size("32M"), size("512"), size("x")),
            (Some(266240 << 10), Some(32 << 20), Some(512), None)
        );
    }

    #[test]
    fn this_host_has_a_name_cores_and_memory() {
        let f = fingerprint().unwrap();
        assert!(!f.name.is_empty() && f.units > 0 && f.memory_bytes > 0 && !f.driver.is_empty(), "{f:?}");
    }
}

//! What the host processor is: name, cores, memory, cache.

use super::isa;
use crate::Result;
use flashtune_cache::{DeviceFingerprint, Reading};
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

/// Processor time of the machine and of this process, and the load.
pub(super) fn reading() -> Reading {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let busy = machine_ticks(&read("/proc/stat")).zip(process_ticks(&read("/proc/self/stat")));
    Reading {
        busy: busy.map(|(machine, own)| (machine as f64 / TICKS, own as f64 / TICKS)),
        at: read("/proc/uptime").split(' ').next().and_then(|s| s.parse().ok()).unwrap_or(0.0),
        load_average: read("/proc/loadavg").split(' ').next().and_then(|s| s.parse().ok()),
        ..Reading::default()
    }
}

/// Ticks of processor time in a second: USER_HZ, a constant of the kernel's interface.
const TICKS: f64 = 100.0;

/// Ticks in which the machine's processors were not idle: user, nice, system, irq, softirq, steal.
fn machine_ticks(stat: &str) -> Option<u64> {
    let fields: Vec<u64> =
        stat.strip_prefix("cpu ")?.lines().next()?.split_whitespace().map_while(|n| n.parse().ok()).collect();
    let busy = [0, 1, 2, 5, 6, 7].map(|i| fields.get(i).copied());
    busy.into_iter().sum()
}

/// Ticks of this process, in user and kernel. The name before them, in parentheses, may hold anything.
fn process_ticks(stat: &str) -> Option<u64> {
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    Some(fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?)
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
    fn processor_time_is_read_from_the_kernels_tables() {
        assert_eq!(machine_ticks("cpu  10 2 30 4000 500 6 7 8 0 0\ncpu0 1 1 1 1 1\n"), Some(10 + 2 + 30 + 6 + 7 + 8));
        assert_eq!(process_ticks("7 (a ) b) R 1 7 7 0 -1 0 1 2 3 4 55 66 0 0 20 0"), Some(121));
        assert_eq!((machine_ticks(""), process_ticks("")), (None, None));
        let (first, second) = (reading(), reading());
        let ((machine, own), (later, own_later)) = (first.busy.unwrap(), second.busy.unwrap());
        assert!(later >= machine && own_later >= own && second.at >= first.at && first.at > 0.0);
    }

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

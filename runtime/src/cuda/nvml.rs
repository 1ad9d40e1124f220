//! Clocks, heat, throttling and other users of a GPU, by NVIDIA's management library. It is loaded when it is first
//! asked and makes no context; where it is absent, the reading says so.

use flashtune_cache::Reading;
use nvml_wrapper::Nvml;
use nvml_wrapper::bitmasks::device::ThrottleReasons;
use nvml_wrapper::enum_wrappers::device::{Clock, TemperatureSensor};
use std::sync::OnceLock;

/// What slows a device down besides the work it is given and the power cap, which are always there.
const SLOWDOWNS: [(ThrottleReasons, &str); 4] = [
    (ThrottleReasons::HW_THERMAL_SLOWDOWN, "thermal slowdown by the hardware"),
    (ThrottleReasons::SW_THERMAL_SLOWDOWN, "thermal slowdown"),
    (ThrottleReasons::HW_POWER_BRAKE_SLOWDOWN, "power brake"),
    (ThrottleReasons::HW_SLOWDOWN, "slowdown by the hardware"),
];

/// Looks at the device with this PCI address.
pub(super) fn read(pci: &str) -> Reading {
    static NVML: OnceLock<Result<Nvml, String>> = OnceLock::new();
    let nvml = NVML.get_or_init(|| {
        Nvml::init()
            .or_else(|_| Nvml::builder().lib_path("libnvidia-ml.so.1".as_ref()).init())
            .map_err(|e| e.to_string())
    });
    match nvml.as_ref().map_err(String::clone).and_then(|nvml| look(nvml, pci)) {
        Ok(reading) => reading,
        Err(e) => {
            let unread = format!(
                "clocks, throttling and other users of the GPU are not watched (NVML: {e}); in a container make \
                 libnvidia-ml.so.1 visible (NVIDIA_DRIVER_CAPABILITIES=utility,compute)"
            );
            Reading { unread: Some(unread), ..Reading::default() }
        }
    }
}

/// What the library says of a device; an error where it does not know the device. What it does not tell stays out.
fn look(nvml: &Nvml, pci: &str) -> Result<Reading, String> {
    let device = nvml.device_by_pci_bus_id(pci).map_err(|e| e.to_string())?;
    let reasons = device.current_throttle_reasons().unwrap_or(ThrottleReasons::empty());
    let slow = SLOWDOWNS.into_iter().filter(|(reason, _)| reasons.contains(*reason));
    let processes = device.running_compute_processes().ok();
    Ok(Reading {
        sm_mhz: device.clock_info(Clock::SM).ok(),
        memory_mhz: device.clock_info(Clock::Memory).ok(),
        temperature_c: device.temperature(TemperatureSensor::Gpu).ok(),
        throttling: slow.map(|(_, name)| name.to_owned()).collect(),
        foreign_processes: processes.map(|list| foreign(&list.iter().map(|p| p.pid).collect::<Vec<_>>(), &own())),
        ..Reading::default()
    })
}

/// This process and the one that started it, which may be a host with a context of its own.
fn own() -> [u32; 2] {
    [std::process::id(), std::os::unix::process::parent_id()]
}

/// How many of the processes are not ours. Inside of a container ours goes by another number: then it is one of them.
fn foreign(pids: &[u32], own: &[u32]) -> u32 {
    let ours = pids.iter().filter(|pid| own.contains(pid)).count().max(1);
    pids.len().saturating_sub(ours) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_that_are_ours_are_not_foreign() {
        assert_eq!(foreign(&[], &[7, 3]), 0);
        assert_eq!(foreign(&[7], &[7, 3]), 0);
        assert_eq!(foreign(&[3, 7, 9], &[7, 3]), 1);
        assert_eq!(foreign(&[4242, 5], &[7, 3]), 1);
    }

    #[test]
    fn a_device_that_cannot_be_watched_says_why() {
        let reading = read("00000000:FF:FF.0");
        assert!(reading.unread.is_some_and(|why| why.contains("NVML")));
        assert_eq!(reading.foreign_processes, None);
    }

    /// A library with the functions of NVIDIA's that are asked, for a device that is hot, power-capped and shared.
    const LIBRARY: &str = r#"
        #include <string.h>
        #include <unistd.h>
        typedef struct { unsigned pid; unsigned long long memory; unsigned gpu, compute; } Process;
        int nvmlInit_v2(void) { return 0; }
        int nvmlShutdown(void) { return 0; }
        int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device) {
            *device = (void *)bus;
            return strcmp(bus, "00000000:1A:00.0") ? 6 : 0; /* not found */
        }
        int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *reasons) {
            *reasons = 0x4 | 0x20; /* power cap, thermal slowdown */
            return 0;
        }
        int nvmlDeviceGetClockInfo(void *device, int clock, unsigned *mhz) {
            *mhz = clock == 1 ? 1275 : clock == 2 ? 3201 : 0;
            return 0;
        }
        int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *degrees) {
            *degrees = 88;
            return TEMPERATURE;
        }
        int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, Process *all) {
            unsigned there = *count;
            *count = 3;
            if (there < 3) return 7; /* too small */
            memset(all, 0, 3 * sizeof(Process));
            all[0].pid = getpid(), all[1].pid = getpid() + 1000000, all[2].pid = getpid() + 1000001;
            return 0;
        }
    "#;

    #[test]
    fn clocks_heat_throttling_and_others_are_read() {
        let tmp = tempfile::tempdir().unwrap();
        let of = |name: &str, temperature: u32| {
            let (source, library) = (tmp.path().join("nvml.c"), tmp.path().join(name));
            std::fs::write(&source, LIBRARY).unwrap();
            let cc = std::process::Command::new("cc")
                .args(["-shared", "-fPIC", &format!("-DTEMPERATURE={temperature}"), "-o"])
                .args([&library, &source])
                .status();
            assert!(cc.unwrap().success());
            Nvml::builder().lib_path(library.as_os_str()).init().unwrap()
        };
        let whole = of("whole.so", 0);
        let reading = look(&whole, "00000000:1A:00.0").unwrap();
        let expected = Reading {
            sm_mhz: Some(1275),
            memory_mhz: Some(3201),
            temperature_c: Some(88),
            // The power cap is always there.
            throttling: vec!["thermal slowdown".into()],
            foreign_processes: Some(2),
            ..Reading::default()
        };
        assert_eq!(reading, expected);
        assert!(look(&whole, "00000000:1B:00.0").is_err());
        // One that does not know the temperature (3: not supported) tells the rest.
        let reading = look(&of("part.so", 3), "00000000:1A:00.0").unwrap();
        assert_eq!(reading, Reading { temperature_c: None, ..expected });
    }
}

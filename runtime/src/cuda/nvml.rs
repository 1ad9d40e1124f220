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
    let device = match nvml {
        Ok(nvml) => nvml.device_by_pci_bus_id(pci).map_err(|e| e.to_string()),
        Err(e) => Err(e.clone()),
    };
    let device = match device {
        Ok(device) => device,
        Err(e) => {
            let unread = format!(
                "clocks, throttling and other users of the GPU are not watched (NVML: {e}); in a container make \
                 libnvidia-ml.so.1 visible (NVIDIA_DRIVER_CAPABILITIES=utility,compute)"
            );
            return Reading { unread: Some(unread), ..Reading::default() };
        }
    };
    let reasons = device.current_throttle_reasons().unwrap_or(ThrottleReasons::empty());
    let slow = SLOWDOWNS.into_iter().filter(|(reason, _)| reasons.contains(*reason));
    let processes = device.running_compute_processes().ok();
    Reading {
        sm_mhz: device.clock_info(Clock::SM).ok(),
        memory_mhz: device.clock_info(Clock::Memory).ok(),
        temperature_c: device.temperature(TemperatureSensor::Gpu).ok(),
        throttling: slow.map(|(_, name)| name.to_owned()).collect(),
        foreign_processes: processes.map(|list| foreign(&list.iter().map(|p| p.pid).collect::<Vec<_>>(), &own())),
        ..Reading::default()
    }
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
}

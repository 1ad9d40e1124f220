//! What else went on while something was measured: clocks, throttling, heat, other users of the device.

use serde::{Deserialize, Serialize};
use std::fmt;

/// One look at a device.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Reading {
    /// Clock of the multiprocessors in MHz.
    #[serde(default, skip_serializing_if = "flashtune_codegen::omitted::is_default")]
    pub sm_mhz: Option<u32>,
    /// Clock of the memory in MHz.
    #[serde(default, skip_serializing_if = "flashtune_codegen::omitted::is_default")]
    pub memory_mhz: Option<u32>,
    /// Temperature in degrees Celsius.
    #[serde(default, skip_serializing_if = "flashtune_codegen::omitted::is_default")]
    pub temperature_c: Option<u32>,
    /// Reasons for which the device runs slower than it could. The power cap is none of them: it is always there.
    #[serde(default, skip_serializing_if = "flashtune_codegen::omitted::is_default")]
    pub throttling: Vec<String>,
    /// Processes besides the tuner's own that compute on the device.
    #[serde(default, skip_serializing_if = "flashtune_codegen::omitted::is_default")]
    pub foreign_processes: Option<u32>,
    /// Seconds since the start of the machine that its processors were busy, summed over them, and the share of this
    /// process in them.
    #[serde(default, skip_serializing_if = "flashtune_codegen::omitted::is_default")]
    pub busy: Option<(f64, f64)>,
    /// Seconds on the clock to which `busy` belongs.
    #[serde(default, skip_serializing_if = "flashtune_codegen::omitted::is_default")]
    pub at: f64,
    /// The system's load average over a minute.
    #[serde(default, skip_serializing_if = "flashtune_codegen::omitted::is_default")]
    pub load_average: Option<f64>,
    /// Why some of it could not be read, with what to do.
    #[serde(default, skip_serializing_if = "flashtune_codegen::omitted::is_default")]
    pub unread: Option<String>,
}

/// What several looks have in common.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Conditions {
    /// Lowest and highest clock of the multiprocessors in MHz.
    #[serde(default, skip_serializing_if = "flashtune_codegen::omitted::is_default")]
    pub sm_mhz: Option<(u32, u32)>,
    /// Lowest and highest clock of the memory in MHz.
    #[serde(default, skip_serializing_if = "flashtune_codegen::omitted::is_default")]
    pub memory_mhz: Option<(u32, u32)>,
    /// Highest temperature in degrees Celsius.
    #[serde(default, skip_serializing_if = "flashtune_codegen::omitted::is_default")]
    pub temperature_c: Option<u32>,
    /// All reasons for which the device ran slower than it could.
    #[serde(default, skip_serializing_if = "flashtune_codegen::omitted::is_default")]
    pub throttling: Vec<String>,
    /// Most processes besides the tuner's own that computed on the device.
    #[serde(default, skip_serializing_if = "flashtune_codegen::omitted::is_default")]
    pub foreign_processes: Option<u32>,
    /// Cores that others kept busy, on average.
    #[serde(default, skip_serializing_if = "flashtune_codegen::omitted::is_default")]
    pub foreign_cores: Option<f64>,
    /// The highest load average over a minute.
    #[serde(default, skip_serializing_if = "flashtune_codegen::omitted::is_default")]
    pub load_average: Option<f64>,
}

impl Conditions {
    /// A summary of readings, oldest first.
    pub fn of(readings: &[Reading]) -> Self {
        let range = |of: fn(&Reading) -> Option<u32>| {
            let values = || readings.iter().filter_map(of);
            values().min().zip(values().max())
        };
        let mut throttling: Vec<String> = readings.iter().flat_map(|r| r.throttling.clone()).collect();
        throttling.sort();
        throttling.dedup();
        Self {
            sm_mhz: range(|r| r.sm_mhz),
            memory_mhz: range(|r| r.memory_mhz),
            temperature_c: range(|r| r.temperature_c).map(|(_, highest)| highest),
            throttling,
            foreign_processes: range(|r| r.foreign_processes).map(|(_, most)| most),
            foreign_cores: foreign_cores(readings),
            load_average: readings.iter().filter_map(|r| r.load_average).reduce(f64::max),
        }
    }

    /// What makes times differ from those of the device alone, in words.
    pub fn disturbance(&self) -> Option<String> {
        let mut found = self.throttling.clone();
        if let Some(n @ 1..) = self.foreign_processes {
            found.push(format!("{n} other process{} on the device", if n == 1 { "" } else { "es" }));
        }
        (!found.is_empty()).then(|| found.join(", "))
    }
}

/// Busy time that was not ours over the time that passed, between the first and the last reading that have both.
fn foreign_cores(readings: &[Reading]) -> Option<f64> {
    let mut timed = readings.iter().filter_map(|r| Some((r.at, r.busy?)));
    let (first, last) = (timed.next()?, timed.next_back()?);
    let passed = last.0 - first.0;
    let others = (last.1.0 - first.1.0) - (last.1.1 - first.1.1);
    // A new worker starts its own share from nothing: then there is no telling.
    (passed > 0.1 && last.1.1 >= first.1.1).then(|| (others / passed).max(0.0))
}

impl fmt::Display for Conditions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut said = Vec::new();
        let range = |(low, high): (u32, u32)| if low == high { format!("{low}") } else { format!("{low} to {high}") };
        said.extend(self.sm_mhz.map(|r| format!("{} MHz", range(r))));
        said.extend(self.memory_mhz.map(|r| format!("memory {} MHz", range(r))));
        said.extend(self.temperature_c.map(|t| format!("{t} C")));
        said.extend(self.foreign_cores.map(|n| format!("others kept {n:.1} cores busy")));
        said.extend(self.load_average.map(|n| format!("load {n:.1}")));
        said.extend(self.disturbance());
        f.write_str(&if said.is_empty() { "unknown".to_owned() } else { said.join(", ") })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_holds_the_extremes_and_what_others_did() {
        let reading = |sm, at, busy| Reading {
            sm_mhz: Some(sm),
            temperature_c: Some(sm / 30),
            busy: Some(busy),
            at,
            ..Reading::default()
        };
        let mut readings = [reading(1980, 10.0, (100.0, 5.0)), reading(1755, 20.0, (118.0, 15.0))];
        readings[1].throttling = vec!["thermal slowdown".into()];
        readings[1].foreign_processes = Some(2);
        let all = Conditions::of(&readings);
        assert_eq!((all.sm_mhz, all.temperature_c, all.memory_mhz), (Some((1755, 1980)), Some(66), None));
        // Ten seconds, 18 of processor time, ten of them ours.
        assert_eq!(all.foreign_cores, Some(0.8));
        assert_eq!(all.disturbance().unwrap(), "thermal slowdown, 2 other processes on the device");
        assert!(all.to_string().contains("1755 to 1980 MHz") && all.to_string().contains("0.8 cores"), "{all}");
    }

    #[test]
    fn nothing_read_is_nothing_claimed() {
        let none = Conditions::of(&[]);
        assert_eq!((none.disturbance(), none.to_string().as_str()), (None, "unknown"));
        let restarted = [
            Reading { busy: Some((100.0, 50.0)), at: 1.0, ..Reading::default() },
            Reading { busy: Some((110.0, 0.5)), at: 9.0, ..Reading::default() },
        ];
        assert_eq!(Conditions::of(&restarted).foreign_cores, None);
    }
}

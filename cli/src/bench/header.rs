//! What a report says besides its points: the device, the software, the ceilings, and how it was measured.

use super::super::cases::Case;
use super::super::command_line;
use anyhow::Result;
use flashtune::{DType, Engine, Launches};
use flashtune_report::{Ceilings, DeviceFacts, FORMAT, Made, MatmulCeiling, Report};
use flashtune_runtime::ceilings::{Rate, measure};
use flashtune_runtime::{Ceiling, Device, Error};
use std::collections::BTreeMap;
use std::time::SystemTime;

/// The commit that this program was built from.
const COMMIT: &str = env!("FLASHTUNE_COMMIT");

/// A report with no points yet.
pub(crate) fn report(engine: &Engine) -> Report {
    let device = engine.device();
    let f = device.fingerprint();
    let launched = match engine.launches() {
        Launches::Eager => "launched eagerly",
        Launches::Graph => "as the replay of a captured graph of one launch",
    };
    let method = vec![
        format!(
            "Contenders run in turn, every one once per round, {launched}, after the caches were flushed; medians \
             over the rounds."
        ),
        "Operations are counted on live (query, key) pairs, two products each.".to_owned(),
        "Ceilings were measured in the same process, before and after; the higher of both counts.".to_owned(),
    ];
    Report {
        format: FORMAT,
        title: format!("flashtune on {}", f.name),
        made: Made {
            command: command_line::typed(),
            date: humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
            software: software(engine),
        },
        device: DeviceFacts {
            name: f.name.clone(),
            arch: f.arch.to_string(),
            units: f.units,
            memory_bytes: f.memory_bytes,
            cache_bytes: f.cache_bytes,
            driver: f.driver.clone(),
        },
        method,
        ceilings: Ceilings::default(),
        points: Vec::new(),
        checks: Vec::new(),
        lengths: None,
        served: None,
    }
}

fn software(engine: &Engine) -> BTreeMap<String, String> {
    let compiler = match engine.device().compiler() {
        Ok(compiler) => compiler.id().to_string(),
        Err(_) => "none".to_owned(),
    };
    BTreeMap::from([
        ("flashtune".to_owned(), format!("{} ({COMMIT})", env!("CARGO_PKG_VERSION"))),
        ("templates".to_owned(), engine.templates().hash().to_owned()),
        ("compiler".to_owned(), compiler),
    ])
}

/// Measures the copy ceiling, and that of multiplying in every dtype of the cases. One that cannot be measured says
/// why; one that was measured before keeps the higher value, because what holds a ceiling down is other load.
pub(crate) fn measure_ceilings(ceilings: &mut Ceilings, device: &dyn Device, cases: &[Case]) -> Result<()> {
    ceilings.absent.clear();
    if let Some(rate) = rate(device, Ceiling::Copy, &mut ceilings.absent)? {
        let gbytes_per_s = rate.per_second / 1e9;
        if ceilings.copy_gbytes_per_s().is_none_or(|before| before < gbytes_per_s) {
            ceilings.copy = Some(flashtune_report::Ceiling { gbytes_per_s, how: rate.how });
        }
    }
    for dtype in DType::ALL.into_iter().filter(|d| cases.iter().any(|c| c.problem.dtype == *d)) {
        let Some(rate) = rate(device, Ceiling::Matmul(dtype), &mut ceilings.absent)? else { continue };
        let (dtype, tflops) = (dtype.to_string(), rate.per_second / 1e12);
        if ceilings.matmul_tflops(&dtype).is_none_or(|before| before < tflops) {
            ceilings.matmul.retain(|c| c.dtype != dtype);
            ceilings.matmul.push(MatmulCeiling { dtype, tflops, how: rate.how });
        }
    }
    Ok(())
}

/// A measured rate, or a reason more why there is none.
fn rate(device: &dyn Device, ceiling: Ceiling, absent: &mut Vec<String>) -> Result<Option<Rate>> {
    match measure(device, ceiling) {
        Ok(rate) => Ok(Some(rate)),
        Err(e @ Error::Missing { .. }) => {
            absent.push(format!("{ceiling}: {e}"));
            Ok(None)
        }
        // A device that fails is no missing ceiling.
        Err(e) => Err(e.into()),
    }
}

//! `flashtune report` of a cache folder or a bundle: its records as one HTML page.

use super::agenda::cases_of_model;
use super::cases::Case;
use super::context::Context;
use super::files;
use super::report::ServedArgs;
use super::table::table;
use anyhow::Result;
use flashtune::model::{Serving, Use, read_model};
use flashtune::{UNTUNED_VARIABLE, read_manifest};
use flashtune_cache::{Bundle, CacheDir, DeviceFingerprint, Finalist, Key, Layers, Needed, Record, Trust, Validity};
use flashtune_report::{CachePart, CacheReport, CachedRecord, Contender, InFinal, ModelCase, UntunedCalls, cache_html};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

/// Whether this is a folder or a bundle, and no report of `bench`. A damaged bundle is one, too, by its name: its error
/// is not that of a report.
pub(crate) fn is_cache(path: &Path) -> bool {
    let is_named_so = path.is_file() && path.extension().is_some_and(|end| end == "ftb");
    path.is_dir() || is_named_so || Bundle::map(path).is_ok()
}

/// Models that are held against the records, and what for.
pub(crate) struct Models<'a> {
    pub paths: &'a [PathBuf],
    pub served: &'a ServedArgs,
}

/// Writes the page, or says what would stand in it.
pub(crate) fn run(
    cx: &mut Context,
    path: &Path,
    models: &Models,
    untuned: Option<&Path>,
    html: Option<&Path>,
) -> Result<()> {
    let report = gather(cx, path, models, untuned)?;
    if let Some(html) = html {
        files::write(html, cache_html(&report)?.as_bytes())?;
    }
    if cx.json() {
        return cx.print_json(&report);
    }
    if html.is_some() {
        return Ok(());
    }
    let mut rows = table(&["problem", "shape", "device", "vs default", "stale"]);
    for r in &report.records {
        let gain = r.gain().map_or("-".to_owned(), |(gain, _)| format!("{gain:.2}x"));
        rows.add_row([r.problem.clone(), r.shape.clone(), r.device.clone(), gain, r.stale.join("; ")]);
    }
    writeln!(cx.out, "{rows}\n{} records; --html FILE writes a page with all there is", report.records.len())?;
    Ok(())
}

fn gather(cx: &mut Context, path: &Path, models: &Models, untuned: Option<&Path>) -> Result<CacheReport> {
    // Only numbers and texts are read: nobody's signature is asked for.
    let (layers, parts) = if path.is_dir() {
        let dir = CacheDir::at(path);
        let held = dir.usage()?;
        let kinds = [
            ("kernels", held.kernels),
            ("kernels of records", held.named),
            ("damaged", held.damaged),
            ("snapshot", held.snapshot),
            ("journal", held.journal),
            ("jobs", held.jobs),
            ("claims", held.claims),
        ];
        let part = |(name, a): (&str, flashtune_cache::Amount)| CachePart {
            name: name.to_owned(),
            files: a.files,
            bytes: a.bytes,
        };
        (Layers::open(&dir, &[], None)?, kinds.map(part).to_vec())
    } else {
        let bytes = std::fs::metadata(path)?.len();
        let trust = Trust::default().allow_unsigned(true);
        let part = CachePart { name: "bundle".to_owned(), files: 1, bytes };
        (Layers::open_with(None, &[path.to_owned()], None, &trust)?, vec![part])
    };
    let templates = cx.templates()?;
    // Without a device, nothing is said of its driver and compiler.
    let here = cx.device().ok();
    let compiler = here.as_ref().and_then(|d| d.compiler().ok()).map(|c| c.id().to_string());
    let here = here.map(|d| d.fingerprint().clone());
    let found = layers.records();
    let line = |(layer, record, validity): &(String, Arc<Record>, Validity)| {
        let needed = Needed::new(record.key.device.arch, &templates);
        let stale = staleness(record, validity, &needed, here.as_ref(), compiler.as_deref());
        cached(layer, record, stale)
    };
    let records: Vec<_> = found.iter().map(line).collect();

    let variable = || std::env::var_os(UNTUNED_VARIABLE).filter(|v| !v.is_empty()).map(PathBuf::from);
    // The variable names a file that hosts may not have written yet.
    let file = untuned.map(Path::to_owned).or_else(|| variable().filter(|f| f.exists()));
    let calls = file.map_or(Ok(Vec::new()), |file| read_manifest(&file))?;
    let untuned = calls
        .iter()
        .map(|e| UntunedCalls { problem: e.problem.to_string(), shape: e.sizes().to_string(), calls: e.calls })
        .collect();

    let mut devices: Vec<_> = found.iter().map(|(_, r, _)| r.key.device.clone()).collect();
    devices.sort();
    devices.dedup();
    let mut cases = Vec::new();
    for (path, device) in models.paths.iter().flat_map(|m| devices.iter().map(move |d| (m, d))) {
        cases.extend(of_model(path, models.served, device, &found, &records)?);
    }
    let facts = vec![
        ["from".to_owned(), path.display().to_string()],
        ["flashtune".to_owned(), env!("CARGO_PKG_VERSION").to_owned()],
        ["templates".to_owned(), templates.hash().to_owned()],
        ["devices".to_owned(), devices.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")],
        ["compiler here".to_owned(), compiler.unwrap_or_else(|| "none".to_owned())],
    ];
    Ok(CacheReport { title: "What flashtune has tuned".to_owned(), facts, parts, records, untuned, models: cases })
}

/// Why a record is refused, and in what this machine differs from when it was measured.
fn staleness(
    record: &Record,
    validity: &Validity,
    needed: &Needed,
    here: Option<&DeviceFingerprint>,
    compiler: Option<&str>,
) -> Vec<String> {
    let mut stale: Vec<String> = needed.difference(validity).map(|d| format!("not used: {d}")).into_iter().collect();
    // Another device's driver and compiler say nothing.
    let Some(here) = here.filter(|here| here.name == record.key.device.name) else { return stale };
    let mut differs = |what: &str, then: &str, now: &str| {
        if then != now {
            stale.push(format!("{what} was {then}, is {now}"));
        }
    };
    differs("driver", &record.key.device.driver, &here.driver);
    if let Some(now) = compiler {
        differs("compiler", &record.provenance.compiler, now);
    }
    stale
}

fn cached(layer: &str, record: &Record, stale: Vec<String>) -> CachedRecord {
    let contender = |f: &Finalist| Contender {
        median_us: f.median_us,
        rounds_us: f.rounds_ns.iter().map(|ns| *ns as f64 / 1e3).collect(),
        samples: f.samples,
    };
    let in_final = |f: &Finalist| InFinal {
        schedule: f.schedule.to_string(),
        is_winner: f.schedule == record.schedule,
        is_default: f.is_default,
        max_error: f.max_error,
        times: contender(f),
    };
    let rival = |r: &flashtune_cache::Rival| {
        let us = r.finalists.iter().find(|f| f.schedule == r.schedule).map(|f| format!(" {:.1} us", f.median_us));
        format!("{}{}", r.schedule, us.unwrap_or_default())
    };
    // A file may say any number; the year 9999 is as far as dates go.
    let date = UNIX_EPOCH + Duration::from_secs(record.provenance.unix_time.min(253_402_300_799));
    CachedRecord {
        id: Key::of_value("flashtune report row 1", &(layer, &record.key)).hex()[..16].to_owned(),
        layer: layer.to_owned(),
        device: record.key.device.to_string(),
        family: record.schedule.family().to_string(),
        problem: record.key.problem.to_string(),
        shape: record.sizes().to_string(),
        launches: record.key.launches.to_string(),
        winner: record.winner().map(contender),
        schedule: record.schedule.to_string(),
        default: record.finalists.iter().find(|f| f.is_default).map(contender),
        finalists: record.finalists.iter().map(in_final).collect(),
        conditions: record.provenance.conditions.to_string(),
        stale,
        rivals: record.rivals.iter().map(rival).collect(),
        settled: record.settled.len(),
        compiler: record.provenance.compiler.clone(),
        date: humantime::format_rfc3339_seconds(date).to_string()[..10].to_owned(),
    }
}

/// The cases of a model on a device, with the records that are exactly theirs.
fn of_model(
    path: &Path,
    served: &ServedArgs,
    device: &DeviceFingerprint,
    found: &[(String, Arc<Record>, Validity)],
    rows: &[CachedRecord],
) -> Result<Vec<ModelCase>> {
    let model = read_model(path)?;
    let serving = Serving::of(&model, &served.limits(device.arch))?;
    let of_case = |(used_for, case): (Use, Case)| {
        let bucket = case.bucket(device.units);
        let fits = |r: &Record| r.key.device == *device && r.key.problem == case.problem && r.key.bucket == bucket;
        let row = found.iter().position(|(_, r, _)| fits(r)).map(|i| &rows[i]);
        ModelCase {
            model: model.model_type.clone(),
            used_for: used_for.to_string(),
            device: device.to_string(),
            problem: case.problem.to_string(),
            shape: case.sizes().to_string(),
            record: row.map(|r| r.id.clone()),
            gain: row.and_then(CachedRecord::gain).map(|(gain, _)| gain),
        }
    };
    Ok(cases_of_model(&serving, device.arch).into_iter().map(of_case).collect())
}

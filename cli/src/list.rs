//! `flashtune list`: the records of the cache and of the named bundles.

use super::context::Context;
use super::table::table;
use anyhow::Result;
use flashtune_cache::{Record, Validity};
use serde_json::json;
use std::io::Write;

/// Options of `list`.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Only problems whose name contains this text, e.g. bf16-d128
    #[arg(long, value_name = "TEXT")]
    problem: Option<String>,
}

pub(crate) fn run(cx: &mut Context, args: Args) -> Result<()> {
    let layers = cx.layers()?;
    let wanted = |r: &Record| args.problem.as_ref().is_none_or(|text| r.key.problem.to_string().contains(text));
    let records: Vec<_> = layers.records().into_iter().filter(|(_, r, _)| wanted(r)).collect();
    if cx.json() {
        let list: Vec<_> = records.iter().map(|(layer, record, validity)| summary(layer, record, validity)).collect();
        return cx.print_json(&list);
    }
    for layer in layers.info() {
        let path = layer.path.map_or(String::new(), |p| format!(" ({})", p.display()));
        let signed = layer.signer.map_or(String::new(), |key| format!(", signed by {key}"));
        let foreign = match layer.foreign {
            0 => String::new(),
            n => format!(" ({n} more of another build of flashtune)"),
        };
        let (name, records, kernels) = (layer.name, layer.records, layer.artifacts);
        writeln!(cx.out, "{name}{path}: {records} records{foreign}, {kernels} kernels{signed}")?;
    }
    if records.is_empty() {
        writeln!(cx.out, "no records; `flashtune tune` makes some")?;
        return Ok(());
    }
    let mut table = table(&["problem", "shape", "schedule", "us", "launches", "vs default", "device", "layer"]);
    for (layer, r, _) in &records {
        let us = r.winner().map_or("untuned".to_owned(), |w| format!("{:.1}", w.median_us));
        let launches = r.winner().map_or("-".to_owned(), |_| r.key.launches.to_string());
        let gain = r.gain_over_default().map_or("-".to_owned(), |g| format!("{g:.2}x"));
        table.add_row([
            r.key.problem.to_string(),
            r.sizes().to_string(),
            r.schedule.to_string(),
            us,
            launches,
            gain,
            r.key.device.to_string(),
            layer.clone(),
        ]);
    }
    writeln!(cx.out, "{table}")?;
    Ok(())
}

/// A record with the names that people and scripts use; `record` has every field.
fn summary(layer: &str, record: &Record, validity: &Validity) -> serde_json::Value {
    json!({
        "layer": layer,
        "problem": record.key.problem.to_string(),
        "bucket": record.key.bucket.to_string(),
        "shape": record.sizes().to_string(),
        "device": record.key.device.to_string(),
        "launches": record.key.launches,
        "schedule": record.schedule.to_string(),
        "median_us": record.winner().map(|w| w.median_us),
        "gain_over_default": record.gain_over_default(),
        "validity": validity,
        "record": record,
    })
}

//! `flashtune export` and `flashtune import`: bundles out of the cache and into it.

use super::context::{Context, made_at};
use super::exit::usage;
use anyhow::Result;
use flashtune::Problem;
use flashtune_cache::{self as cache, ExchangeSummary, ExportFilter};
use flashtune_codegen::Arch;
use serde_json::json;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Options of `export`.
#[derive(clap::Args, Debug)]
pub(crate) struct ExportArgs {
    /// The bundle file to write
    file: PathBuf,
    /// Only records of this arch; all archs when absent
    #[arg(long, value_name = "ARCH")]
    arch: Option<Arch>,
    /// Also records that were made with other templates than those in force
    #[arg(long)]
    all_templates: bool,
    /// Only this problem, by the name that `list` prints
    #[arg(long, value_name = "NAME")]
    problem: Option<String>,
}

/// Options of `import`.
#[derive(clap::Args, Debug)]
pub(crate) struct ImportArgs {
    /// The bundle file to read
    file: PathBuf,
    /// Replace records that the cache already has
    #[arg(long)]
    replace: bool,
}

pub(crate) fn export(cx: &mut Context, args: ExportArgs) -> Result<()> {
    let layers = cx.layers()?;
    let templates = match args.all_templates {
        true => None,
        false => Some(cx.templates()?),
    };
    let problem = match &args.problem {
        None => None,
        Some(name) => Some(find_problem(&layers, name)?),
    };
    let filter = ExportFilter { arch: args.arch, templates, problem };
    // An empty bundle is nobody's wish, and must not replace an older file.
    let wanted = |r: &cache::Record| {
        filter.arch.is_none_or(|a| r.key.device.arch == a)
            && filter.templates.as_ref().is_none_or(|t| r.provenance.templates == t.hash_of(r.schedule.family()))
            && filter.problem.is_none_or(|p| r.key.problem == p)
    };
    if !layers.records().iter().any(|(_, r, _)| wanted(r)) {
        return Err(usage("there is no record to export; run `flashtune tune` first, or widen the filter"));
    }
    let summary = cache::export(&layers, &filter, &args.file, made_at()?)?;
    report(cx, "wrote", &args.file, &summary)
}

pub(crate) fn import(cx: &mut Context, args: ImportArgs) -> Result<()> {
    let needed = cx.needed()?;
    let dir = cx.cache_dir()?;
    let summary = cache::import(&args.file, &dir, &needed, args.replace, &cx.trust()?)?;
    report(cx, "read", &args.file, &summary)
}

/// The problem of a record whose name is this.
fn find_problem(layers: &cache::Layers, name: &str) -> Result<Problem> {
    let mut records = layers.records().into_iter().map(|(_, r, _)| r.key.problem);
    records
        .find(|p| p.to_string() == name)
        .ok_or_else(|| usage(format!("no record is of the problem `{name}`; `flashtune list` prints the names")))
}

fn report(cx: &mut Context, verb: &str, file: &Path, summary: &ExchangeSummary) -> Result<()> {
    let ExchangeSummary { records, artifacts, skipped } = summary;
    if cx.json() {
        let file = file.display().to_string();
        return cx.print_json(&json!({ "file": file, "records": records, "artifacts": artifacts, "skipped": skipped }));
    }
    writeln!(cx.out, "{verb} {records} records and {artifacts} kernels ({})", file.display())?;
    for reason in skipped {
        writeln!(cx.out, "left out: {reason}")?;
    }
    Ok(())
}

//! `flashtune merge`: bundles of several hosts as one.

use super::context::Context;
use anyhow::Result;
use flashtune_cache::{MergeSummary, merge_bundles};
use serde_json::json;
use std::io::Write;
use std::path::PathBuf;

/// Options of `merge`.
#[derive(clap::Args, Debug)]
#[command(
    after_help = "The order of the files does not matter, nor whether some were merged before. Where hosts disagree by \
                        more than 3 %, all findings are kept: `flashtune import` the result on a device of that kind, \
                        `flashtune tune --contested` there, and export it. The result is unsigned."
)]
pub(crate) struct Args {
    /// The bundles to merge
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// The bundle file to write
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
}

pub(crate) fn run(cx: &mut Context, args: Args) -> Result<()> {
    let MergeSummary { records, artifacts, contested, skipped } = merge_bundles(&args.files, &args.out, &cx.trust()?)?;
    let file = args.out.display().to_string();
    if cx.json() {
        return cx.print_json(&json!({
            "file": file,
            "records": records,
            "artifacts": artifacts,
            "contested": contested,
            "skipped": skipped,
        }));
    }
    writeln!(cx.out, "wrote {records} records and {artifacts} kernels ({file})")?;
    for reason in &skipped {
        writeln!(cx.out, "left out: {reason}")?;
    }
    for one in &contested {
        writeln!(cx.out, "contested: {one}")?;
    }
    if !contested.is_empty() {
        writeln!(cx.out, "import the file on such a device and run `flashtune tune --contested` there")?;
    }
    Ok(())
}

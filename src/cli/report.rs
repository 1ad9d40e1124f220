//! `flashtune report`, and the report files of every command that makes one.

use super::context::Context;
use super::exit::usage;
use super::files;
use anyhow::{Context as _, Result};
use flashtune_report::{Report, html, markdown, svg};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Files to write a report to.
#[derive(clap::Args, Debug, Default)]
pub struct Outputs {
    /// Keep the report as JSON, for `flashtune report`
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// Write the report's tables as Markdown
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,
    /// Write the report as one HTML page with plots
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Write the plots as one SVG
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

impl Outputs {
    fn all(&self) -> impl Iterator<Item = &Path> {
        [&self.report, &self.markdown, &self.html, &self.svg].into_iter().filter_map(|p| p.as_deref())
    }

    /// Fails before anything is measured when a file cannot be written.
    pub fn check(&self) -> Result<()> {
        self.all().try_for_each(files::check_folder)
    }

    /// Writes every file that was asked for.
    pub fn write(&self, report: &Report) -> Result<()> {
        if let Some(path) = &self.report {
            files::write(path, (serde_json::to_string_pretty(report)? + "\n").as_bytes())?;
        }
        if let Some(path) = &self.markdown {
            files::write(path, markdown(report).as_bytes())?;
        }
        if let Some(path) = &self.html {
            files::write(path, html(report)?.as_bytes())?;
        }
        if let Some(path) = &self.svg {
            files::write(path, svg(report)?.as_bytes())?;
        }
        Ok(())
    }
}

/// Options of `report`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// A report as JSON, of `flashtune bench --report` or benches/peers.py
    file: PathBuf,
    #[command(flatten)]
    outputs: Outputs,
}

pub fn run(cx: &mut Context, args: Args) -> Result<()> {
    args.outputs.check()?;
    let at = args.file.display();
    let text = std::fs::read_to_string(&args.file)
        .map_err(|e| usage(format!("cannot read {at}: {e}; name a report that `flashtune bench --report` wrote")))?;
    let report = Report::from_json(&text).map_err(|e| usage(format!("{at}: {e}")))?;
    args.outputs.write(&report).context("the report was read")?;
    if cx.json() {
        return cx.print_json(&report);
    }
    if args.outputs.all().next().is_none() {
        write!(cx.out, "{}", markdown(&report))?;
    }
    Ok(())
}

//! `flashtune report`, and the report files of every command that makes one.

use super::agenda::ServiceArgs;
use super::cases::{RaggedArgs, StoreChoice};
use super::compare::{self, Percent};
use super::context::Context;
use super::exit::usage;
use super::files;
use super::report_cache::{self, Models};
use anyhow::{Context as _, Result};
use flashtune::DType;
use flashtune::model::Limits;
use flashtune_codegen::{Arch, PageClass};
use flashtune_report::{Report, html, markdown, svg};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Files to write a report to.
#[derive(clap::Args, Debug, Default)]
pub(crate) struct Outputs {
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
    pub(crate) fn check(&self) -> Result<()> {
        self.all().try_for_each(files::check_folder)
    }

    /// Writes every file that was asked for.
    pub(crate) fn write(&self, report: &Report) -> Result<()> {
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
pub(crate) struct Args {
    /// A report as JSON, of `flashtune bench --report` or benches/peers.py; a cache folder or a bundle, for --html
    file: PathBuf,
    /// A later one of the same kind, to compare: by cases, with 99 % intervals of the ratios of medians
    #[arg(conflicts_with_all = ["report", "markdown", "html", "svg"])]
    after: Option<PathBuf>,
    /// Exit with 1 when the first contender of a case is slower by more than this, with confidence
    #[arg(long, value_name = "PERCENT", requires = "after")]
    fail_over: Option<Percent>,
    /// Of a cache: which cases of a model are tuned, by its config.json or folder; may be repeated
    #[arg(long, value_name = "PATH", conflicts_with = "after")]
    model: Vec<PathBuf>,
    #[command(flatten)]
    served: ServedArgs,
    /// Of a cache: calls that hosts met untuned [env: FLASHTUNE_UNTUNED]
    #[arg(long, value_name = "FILE", conflicts_with = "after")]
    untuned: Option<PathBuf>,
    #[command(flatten)]
    outputs: Outputs,
}

/// What models are tuned for, as `tune --model` takes it.
#[derive(clap::Args, Debug)]
pub(crate) struct ServedArgs {
    #[command(flatten)]
    service: ServiceArgs,
    /// Element type in place of the models' own
    #[arg(long, value_name = "DTYPE", requires = "model")]
    dtype: Option<DType>,
    /// Numbers of sequences that are decoded together
    #[arg(long, value_delimiter = ',', value_name = "LIST", requires = "model")]
    batch: Vec<u32>,
    /// Tokens of a page of their KV cache, or `packed`; 16 when absent
    #[arg(long, value_delimiter = ',', value_name = "LIST", requires = "model")]
    pages: Vec<PageClass>,
    /// Elements of the KV cache, as `tune` takes them
    #[arg(long, value_delimiter = ',', value_name = "LIST", requires = "model")]
    kv_dtype: Vec<StoreChoice>,
}

impl ServedArgs {
    /// On a device.
    pub(crate) fn limits(&self, arch: Arch) -> Limits {
        let ragged = RaggedArgs { pages: self.pages.clone(), kv_dtype: self.kv_dtype.clone() };
        self.service.limits(arch, self.dtype, &self.batch, &ragged)
    }
}

pub(crate) fn run(cx: &mut Context, args: Args) -> Result<()> {
    if let Some(after) = &args.after {
        let found = compare::files(&args.file, after, args.fail_over.unwrap_or(compare::LIMIT))?;
        match cx.json() {
            true => cx.print_json(&found)?,
            false => compare::print(cx, &found)?,
        }
        return if args.fail_over.is_some() { compare::fail_over(&found) } else { Ok(()) };
    }
    args.outputs.check()?;
    let (file, outputs) = (&args.file, &args.outputs);
    if report_cache::is_cache(file) {
        let Outputs { report: None, markdown: None, svg: None, html } = outputs else {
            return Err(usage(format!("{} holds records of `tune`, whose report is --html or --json", file.display())));
        };
        let models = Models { paths: &args.model, served: &args.served };
        return report_cache::run(cx, file, &models, args.untuned.as_deref(), html.as_deref());
    }
    if !args.model.is_empty() || args.untuned.is_some() {
        return Err(usage(format!(
            "--model and --untuned go with a cache folder or bundle; {} is none",
            file.display()
        )));
    }
    let report = compare::read_report(&args.file)?;
    args.outputs.write(&report).context("the report was read")?;
    if cx.json() {
        return cx.print_json(&report);
    }
    if args.outputs.all().next().is_none() {
        write!(cx.out, "{}", markdown(&report))?;
    }
    Ok(())
}

//! `flashtune explain`: which kernel would run, and why.

use super::cases::{CaseArgs, RaggedArgs, default_case};
use super::context::Context;
use super::files;
use super::story::Story;
use super::tile_map::MapArgs;
use super::timeline::View;
use anyhow::Result;
use flashtune::{Explanation, Launches};
use serde::Serialize;
use serde_json::{Value, json};
use std::io::Write;
use std::path::PathBuf;

/// What is printed of one case.
#[derive(Serialize)]
struct Told {
    #[serde(flatten)]
    explanation: Explanation,
    #[serde(skip_serializing_if = "Option::is_none")]
    story: Option<Story>,
    #[serde(skip_serializing_if = "Option::is_none")]
    timeline: Option<View>,
}

/// Options of `explain`.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    #[command(flatten)]
    cases: CaseArgs,
    #[command(flatten)]
    ragged: RaggedArgs,
    #[command(flatten)]
    map: MapArgs,
    /// Also tell how the record was found: its age and conditions, the measured table, the margin, and what became of
    /// every candidate
    #[arg(long)]
    story: bool,
    /// Also draw what ran when while it was tuned: compilations, checks, rounds
    #[arg(long)]
    timeline: bool,
    /// Write the timelines as a trace that Chromium (about:tracing) and Perfetto draw
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// For calls that are captured in CUDA graphs and replayed: what was tuned so goes first
    #[arg(long)]
    graph: bool,
}

pub(crate) fn run(cx: &mut Context, args: Args) -> Result<()> {
    if args.map.wanted() {
        let case = args.cases.single(&default_case())?;
        let map = args.map.map(&case.problem, &case.shape)?;
        if cx.json() {
            return cx.print_json(&map.json());
        }
        write!(cx.out, "{}", map.text())?;
        return Ok(());
    }
    if let Some(path) = &args.trace {
        files::check_folder(path)?;
    }
    let cases = args.ragged.apply(args.cases.cases(&default_case())?)?;
    let engine = cx.engine_for(args.graph.then_some(Launches::Graph))?;
    let cases = args.cases.on(engine.device().arch(), cases);
    let mut all = Vec::new();
    for case in cases {
        let plan = engine.plan(&case.problem, case.sizes())?;
        let story = plan.record().filter(|_| args.story).map(|record| Story::of(cx, record));
        let wanted = args.timeline || args.trace.is_some();
        let timeline = plan.record().filter(|_| wanted).map(|record| View::of(cx, record));
        let explanation = Explanation { shape: case.sizes().to_string(), ..plan.explain() };
        all.push(Told { explanation, story, timeline });
    }
    if let Some(path) = &args.trace {
        let traces = all.iter().enumerate().filter_map(|(i, told)| Some((i, told.timeline.as_ref()?, told)));
        let events: Vec<Value> = traces.flat_map(|(i, view, told)| view.trace(i, &told.explanation.shape)).collect();
        files::write(path, &serde_json::to_vec(&json!({ "traceEvents": events }))?)?;
    }
    if cx.json() {
        return cx.print_json(&all);
    }
    for (i, Told { explanation, story, timeline }) in all.iter().enumerate() {
        if i > 0 {
            writeln!(cx.out)?;
        }
        write!(cx.out, "{explanation}")?;
        match story {
            Some(story) => write!(cx.out, "{story}")?,
            None if args.story => writeln!(cx.out, "record     none: there is no story")?,
            None => {}
        }
        match timeline.as_ref().filter(|_| args.timeline) {
            Some(timeline) => write!(cx.out, "{timeline}")?,
            None if args.timeline => writeln!(cx.out, "timeline   none: there is no record")?,
            None => {}
        }
    }
    Ok(())
}

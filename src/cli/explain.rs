//! `flashtune explain`: which kernel would run, and why.

use super::cases::{CaseArgs, default_case};
use super::context::Context;
use super::tile_map::MapArgs;
use anyhow::Result;
use std::io::Write;

/// Options of `explain`.
#[derive(clap::Args, Debug)]
pub struct Args {
    #[command(flatten)]
    cases: CaseArgs,
    #[command(flatten)]
    map: MapArgs,
}

pub fn run(cx: &mut Context, args: Args) -> Result<()> {
    if args.map.wanted() {
        let case = args.cases.single(&default_case())?;
        let map = args.map.map(&case.problem, &case.shape)?;
        if cx.json() {
            return cx.print_json(&map.json());
        }
        write!(cx.out, "{}", map.text())?;
        return Ok(());
    }
    let cases = args.cases.cases(&default_case())?;
    let engine = cx.engine()?;
    let mut all = Vec::new();
    for case in cases {
        all.push(engine.explain(&case.problem, &case.shape)?);
    }
    if cx.json() {
        return cx.print_json(&all);
    }
    for (i, explanation) in all.iter().enumerate() {
        if i > 0 {
            writeln!(cx.out)?;
        }
        write!(cx.out, "{explanation}")?;
    }
    Ok(())
}

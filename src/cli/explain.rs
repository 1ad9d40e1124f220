//! `flashtune explain`: which kernel would run, and why.

use super::cases::{CaseArgs, default_case};
use super::context::Context;
use anyhow::Result;
use std::io::Write;

/// Options of `explain`.
#[derive(clap::Args, Debug)]
pub struct Args {
    #[command(flatten)]
    cases: CaseArgs,
}

pub fn run(cx: &mut Context, args: Args) -> Result<()> {
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

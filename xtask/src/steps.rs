//! The steps that a change must pass: one list, for `cargo xtask ci`, and for `cargo xtask lint` and
//! `cargo xtask test`, which `.ci/run` calls.

use super::{beside, browser, candle, cargo, crates, python, root, rust, tidy, wheel};
use anyhow::{Context, Result};
use std::time::{Duration, Instant};

/// A name, and what must succeed.
pub(crate) type Step = (&'static str, fn() -> Result<()>);

/// Steps that CI runs beside others.
pub(crate) const CANDLE: &str = "candle";
const WHEEL: &str = "wheel";

/// Everything; the quickest first.
pub(crate) fn all() -> Vec<Step> {
    [lints(), tests()].concat()
}

/// What needs no kernel and no test.
pub(crate) fn lints() -> Vec<Step> {
    vec![
        ("fmt", || super::run(with(cargo(), "fmt --all --check"))),
        ("fmt of candle", || super::run(with(cargo(), "fmt --all --check --manifest-path bindings/candle/Cargo.toml"))),
        ("tidy", || tidy::main(&root(), &[])),
        ("crates", || crates::check(&root())),
        ("clippy", || super::run(with(cargo(), "clippy --workspace --all-targets -- -D warnings"))),
        // Hosts choose the version of CUDA's bindings, and leave `push` and `pull` out: no test is built so.
        ("features", || {
            let features = "--no-default-features --features flashtune/cuda-12090";
            super::run(with(cargo(), &format!("check --package flashtune --package flashtune-cli {features}")))
        }),
        ("doc", || {
            let mut doc = with(cargo(), "doc --workspace --no-deps");
            doc.env("RUSTDOCFLAGS", "-D warnings");
            super::run(doc)
        }),
    ]
}

/// The tests, and the libraries and languages that they are of.
pub(crate) fn tests() -> Vec<Step> {
    vec![
        ("rust", || rust(&[])),
        ("python", || {
            beside::begin(WHEEL, wheel::test)?;
            python::test(&root(), &[])
        }),
        (WHEEL, || beside::end(WHEEL, wheel::test)),
        (CANDLE, || beside::end(CANDLE, || candle::tests(&[]))),
        ("browser", || browser::test(&root())),
    ]
}

fn with(mut command: std::process::Command, words: &str) -> std::process::Command {
    command.args(words.split(' '));
    command
}

/// Runs steps up to the first that fails, and says how long each took.
pub(crate) fn run(steps: &[Step]) -> Result<()> {
    let mut took = Vec::new();
    let mut outcome = Ok(());
    for (name, step) in steps {
        let start = Instant::now();
        outcome = step().with_context(|| format!("step `{name}`"));
        took.push((*name, start.elapsed()));
        if outcome.is_err() {
            break;
        }
    }
    eprint!("{}", table(&took));
    outcome
}

/// A line for each step, and one for all.
fn table(took: &[(&str, Duration)]) -> String {
    let all = ("all", took.iter().map(|(_, time)| *time).sum());
    let width = took.iter().map(|(name, _)| name.len()).max().unwrap_or(0).max(all.0.len());
    let line = |(name, time): &(&str, Duration)| {
        let tenths = (time.as_secs_f64() * 10.0).round() as u64;
        format!("{name:width$} {:3} min {:2}.{} s\n", tenths / 600, tenths / 10 % 60, tenths % 10)
    };
    took.iter().chain([&all]).map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_in_columns_and_rounded_once() {
        let took = [("fmt", Duration::from_millis(1_240)), ("clippy", Duration::from_millis(119_960))];
        assert_eq!(table(&took), "fmt      0 min  1.2 s\nclippy   2 min  0.0 s\nall      2 min  1.2 s\n");
    }

    #[test]
    fn steps_after_one_that_fails_are_left_out() {
        let fails: Step = ("second", || anyhow::bail!("no"));
        let outcome = run(&[("first", || Ok(())), fails, ("third", || panic!("it is not reached"))]);
        assert_eq!(format!("{:#}", outcome.unwrap_err()), "step `second`: no");
        run(&[("alone", || Ok(()))]).unwrap();
    }
}

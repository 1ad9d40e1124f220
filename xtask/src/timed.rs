//! The tests of the workspace, with a second chance for those that watch a clock.
//!
//! Tests of the tuner start compilers, workers and whole other tuners, and look at what came first, within which time,
//! or whether noise hid a result. On two shared cores one of some 300 such tests now and then fails beside the others
//! and passes alone: three changes in a row were refused for one each. Such tests are repeated alone, one after the
//! other, with what runs beside the steps at a stand, and have to pass twice; the run says which they were. So are
//! others that say that the machine was too busy. Tests of numbers, files, kernels and the emulator are never repeated:
//! what moves there is a race.

use super::beside;
use anyhow::{Context, Result, bail};
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};

/// What the names of tests that watch a clock begin with, in all packages.
const TIMED: [&str; 16] = [
    "bench_serving::",
    "fleet::",
    "killed::",
    "latency::",
    "quick::",
    "ragged_tuning::",
    "random_workers::",
    "report::",
    "sealed::",
    "self_test::a_bench_",
    "serving::a_sealed_",
    "told::",
    "together::",
    "tune::tests::",
    "watching::",
    "worker::",
];
/// What a test says that found the machine too busy for what it is of.
const BUSY: &str = "the machine is too busy";
/// More failures than these are no accident.
const MOST: usize = 3;
/// How often each has to pass alone.
const TIMES: usize = 2;

/// What a run of `cargo test --no-fail-fast` said of its failures.
#[derive(Debug, Default, PartialEq)]
struct Failures {
    /// Names of tests.
    tests: Vec<String>,
    /// Of those that found the machine too busy.
    busy: Vec<String>,
    /// Arguments of cargo that name the programs, such as `-p flashtune-tuner --lib`.
    targets: Vec<String>,
    /// Programs that got as far as a list of their failures.
    listed: usize,
}

impl Failures {
    /// Reads lines of both outputs, in any order between the two.
    fn of<'a>(lines: impl Iterator<Item = &'a str>) -> Self {
        let mut found = Self::default();
        // Whose output is shown.
        let mut shown = None;
        for line in lines {
            let line = line.trim_end();
            if let Some(name) = line.strip_prefix("---- ").and_then(|l| l.strip_suffix(" stdout ----")) {
                shown = Some(name);
            } else if let Some(name) = shown.filter(|_| line.contains(BUSY)) {
                found.busy.push(name.to_owned());
            }
            if let Some(name) = line.strip_prefix("test ").and_then(|l| l.strip_suffix(" ... FAILED")) {
                found.tests.push(name.to_owned());
            } else if line.starts_with("test result: FAILED.") {
                found.listed += 1;
            } else if let Some(target) = line.strip_prefix("    `-p ").and_then(|l| l.strip_suffix('`')) {
                found.targets.push(format!("-p {target}"));
            }
        }
        found
    }

    /// Why these may not be repeated; none where they may.
    fn refused(&self) -> Option<String> {
        if self.tests.is_empty() || self.listed != self.targets.len() {
            return Some(format!("{} programs failed and {} listed their tests", self.targets.len(), self.listed));
        }
        let mut not_busy = self.tests.iter().filter(|name| !self.busy.contains(name));
        let count = not_busy.clone().count();
        if count > MOST {
            return Some(format!("{count} tests failed"));
        }
        let other = not_busy.find(|name| !TIMED.iter().any(|timed| name.starts_with(timed)))?;
        Some(format!("{other} failed"))
    }
}

/// Runs what `test` makes with arguments of cargo, all of the workspace first.
pub(crate) fn run(test: impl Fn(&[&str]) -> Command) -> Result<()> {
    let (success, output) = shown(test(&["--workspace", "--no-fail-fast"]))?;
    if success {
        return Ok(());
    }
    let failures = Failures::of(output.lines());
    if let Some(reason) = failures.refused() {
        bail!("cargo test: {reason}");
    }
    let _quiet = beside::quiet();
    for target in &failures.targets {
        let mut args = again(target);
        args.extend(["--", "--exact", "--test-threads=1"]);
        args.extend(failures.tests.iter().map(String::as_str));
        for _ in 0..TIMES {
            super::run(test(&args)).context("a test that watches a clock failed alone, too")?;
        }
    }
    for name in &failures.tests {
        eprintln!("warning: {name} failed beside other tests and passed {TIMES} times alone");
    }
    Ok(())
}

/// The same programs, of all packages that have one of the name: for one package alone, cargo chooses features anew and
/// builds for a minute.
fn again(target: &str) -> Vec<&str> {
    ["--workspace"].into_iter().chain(target.split(' ').skip(2)).collect()
}

/// Shows what a command prints while it runs; whether it succeeded, and all that it printed.
fn shown(mut command: Command) -> Result<(bool, String)> {
    let (reader, writer) = std::io::pipe()?;
    command.stdout(Stdio::from(writer.try_clone()?)).stderr(Stdio::from(writer));
    let mut child = command.spawn().with_context(|| format!("cannot start {command:?}"))?;
    // Or this end stays open here, and the output has no end.
    drop(command);
    let mut lines = BufReader::new(reader);
    let (mut all, mut line) = (String::new(), Vec::new());
    while lines.read_until(b'\n', &mut line)? > 0 {
        let text = String::from_utf8_lossy(&line);
        print!("{text}");
        all += &text;
        line.clear();
    }
    std::io::stdout().flush()?;
    Ok((child.wait()?.success(), all))
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = "test told::a ... ok\ntest told::b ... FAILED\n\nfailures:\n    told::b\n
test result: FAILED. 1 passed; 1 failed; 0 ignored\n
error: test failed, to rerun pass `-p flashtune-cli --test it`\n
error: 1 target failed:\n    `-p flashtune-cli --test it`\n";

    #[test]
    fn tests_that_watch_a_clock_are_repeated_where_they_are() {
        let failures = Failures::of(OUTPUT.lines());
        let (test, target) = ("told::b".to_owned(), "-p flashtune-cli --test it".to_owned());
        assert_eq!(failures, Failures { tests: vec![test], busy: vec![], targets: vec![target], listed: 1 });
        assert_eq!(failures.refused(), None);
        assert_eq!(again(&failures.targets[0]), ["--workspace", "--test", "it"]);
    }

    #[test]
    fn tests_that_found_the_machine_too_busy_are_repeated_like_them() {
        let panicked =
            "---- dispatch::b stdout ----\n\nthread panicked at a.rs:1:1:\nthe machine is too busy for [\"tune\"]\n";
        let output = OUTPUT.replace("told::", "dispatch::");
        let busy = output.replace("failures:\n", &format!("failures:\n{panicked}"));
        assert_eq!(Failures::of(busy.lines()).refused(), None);
        // Another's word is not its own.
        let other = busy.replace("---- dispatch::b", "---- dispatch::c");
        assert_eq!(Failures::of(other.lines()).refused().as_deref(), Some("dispatch::b failed"));
    }

    #[test]
    fn others_and_many_and_programs_that_fell_are_not() {
        let refused = |output: &str| Failures::of(output.lines()).refused();
        assert_eq!(refused(&OUTPUT.replace("told::", "numerics::")).as_deref(), Some("numerics::b failed"));
        let many: String = (0..4).map(|i| format!("test told::{i} ... FAILED\n")).collect();
        assert_eq!(
            refused(&(many + &OUTPUT.replace("test told::b ... FAILED", ""))).as_deref(),
            Some("4 tests failed")
        );
        let fell = OUTPUT.to_owned() + "    `-p flashtune --lib`\n";
        assert_eq!(refused(&fell).as_deref(), Some("2 programs failed and 1 listed their tests"));
        assert!(refused("error: could not compile\n").is_some());
    }

    #[test]
    fn what_passes_alone_passes_and_what_does_not_does_not() {
        let folder = std::env::temp_dir().join(format!("flashtune-timed-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let script = |alone: &'static str| {
            let file = folder.join("output");
            std::fs::write(&file, OUTPUT).unwrap();
            move |args: &[&str]| {
                let mut command = Command::new("sh");
                match args.contains(&"--exact") {
                    true => command.args(["-c", alone]),
                    false => command.arg("-c").arg(format!("cat {}; false", file.display())),
                };
                command
            }
        };
        run(script("true")).unwrap();
        assert!(run(script("false")).is_err());
        std::fs::remove_dir_all(folder).unwrap();
    }
}

//! What CI runs beside its steps, on the time that they leave: at the lowest priority, and shown when its own step is
//! reached.
//!
//! Crates and tests that others wait for, and what packs and installs, run on one core: of two, a sixth of the time was
//! left over, and next to none is with candle's tests beside them. What is not done by its turn has both cores then: of
//! candle's build and tests 84 s were left behind all others, of the wheel's test 50.

use super::run;
use anyhow::{Context, Result, bail};
use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;

struct Running {
    child: Child,
    /// Of both outputs.
    log: PathBuf,
}

/// By the names of their steps.
static RUNNING: Mutex<BTreeMap<&str, Running>> = Mutex::new(BTreeMap::new());

/// Begins the command of a step, in CI; elsewhere it runs in its turn.
pub(crate) fn begin(step: &'static str, command: impl FnOnce() -> Result<Command>) -> Result<()> {
    if super::in_ci() { start(step, &command()?) } else { Ok(()) }
}

fn start(step: &'static str, command: &Command) -> Result<()> {
    let folder = super::target().join("tmp");
    std::fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let log = folder.join(format!("{step}.log"));
    let file = File::create(&log).with_context(|| format!("cannot write {}", log.display()))?;
    let mut last = Command::new("nice");
    last.args(["-n", "19"]).arg(command.get_program()).args(command.get_args());
    if let Some(place) = command.get_current_dir() {
        last.current_dir(place);
    }
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => last.env(name, value),
            None => last.env_remove(name),
        };
    }
    // What it starts is of its group, and is stopped and ended with it. A Ctrl-C does not reach it, at a CI's terminal.
    last.process_group(0).stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
    let child = last.spawn().with_context(|| format!("cannot start {last:?}"))?;
    running().insert(step, Running { child, log });
    Ok(())
}

/// The outcome of a step's command: of the one that was begun, or of one that runs now.
pub(crate) fn end(step: &str, command: impl FnOnce() -> Result<Command>) -> Result<()> {
    let Some(mut begun) = running().remove(step) else { return run(command()?) };
    let status = begun.child.wait()?;
    eprint!("{}", String::from_utf8_lossy(&std::fs::read(&begun.log)?));
    if status.success() { Ok(()) } else { bail!("what ran beside other steps ended with {status}") }
}

fn running() -> std::sync::MutexGuard<'static, BTreeMap<&'static str, Running>> {
    RUNNING.lock().unwrap_or_else(|e| e.into_inner())
}

/// Ends what was begun and not waited for, when steps have failed before.
pub(crate) struct Guard;

impl Drop for Guard {
    fn drop(&mut self) {
        signal("KILL");
        for begun in running().values_mut() {
            // Also where there is no kill(1).
            let _ = begun.child.kill();
            let _ = begun.child.wait();
        }
    }
}

/// While this lives, what was begun stands still: for those who look at times.
pub(crate) struct Quiet;

pub(crate) fn quiet() -> Quiet {
    // In a folder that all cargos share, one that stands still would hold up the others by its lock.
    if std::env::var_os("CARGO_TARGET_DIR").is_none() {
        signal("STOP");
    }
    Quiet
}

impl Drop for Quiet {
    fn drop(&mut self) {
        signal("CONT");
    }
}

/// To all that was begun and what it started. A number is another's no sooner than the child was waited for.
fn signal(name: &str) {
    for begun in running().values() {
        // It may have ended by itself.
        let _ = Command::new("kill").arg(format!("-{name}")).arg("--").arg(format!("-{}", begun.child.id())).output();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(text: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", text]).env("WORD", "some").env_remove("HOME");
        command
    }

    fn wait_for(state: impl Fn() -> bool) {
        let start = std::time::Instant::now();
        while !state() {
            assert!(start.elapsed().as_secs() < 10, "it does not come to that");
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
    }

    #[test]
    fn what_was_begun_gives_the_outcome_of_its_step_or_is_ended() {
        let never = || -> Result<Command> { panic!("it was begun") };
        start("passes", &shell("[ \"$WORD$HOME\" = some ] && [ $(nice) = 19 ]")).unwrap();
        end("passes", never).unwrap();
        start("fails", &shell("exit 3")).unwrap();
        assert!(end("fails", never).unwrap_err().to_string().contains("exit status: 3"));
        // It was waited for, and is the next one's.
        end("fails", || Ok(shell("true"))).unwrap();
        assert!(end("fails", || Ok(shell("false"))).is_err());

        start("sleeps", &shell("sleep 600 & echo $!; wait")).unwrap();
        let log = running()["sleeps"].log.clone();
        let child = || std::fs::read_to_string(&log).unwrap().trim().parse::<u32>().ok();
        wait_for(|| child().is_some());
        let child = child().unwrap();
        let state =
            || std::fs::read_to_string(format!("/proc/{child}/stat")).unwrap().split(' ').nth(2).unwrap() == "T";
        let quiet = quiet();
        if std::env::var_os("CARGO_TARGET_DIR").is_none() {
            wait_for(state);
        }
        drop(quiet);
        wait_for(|| !state());
        let id = running()["sleeps"].child.id();
        drop(Guard);
        assert!(!PathBuf::from(format!("/proc/{id}")).exists());
        // Whoever takes it over may let it lie for a while.
        let gone = || std::fs::read_to_string(format!("/proc/{child}/stat")).map_or(true, |stat| stat.contains(") Z"));
        wait_for(gone);
    }
}

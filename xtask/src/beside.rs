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
    last.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
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
        for begun in running().values_mut() {
            // It may have ended by itself.
            let _ = begun.child.kill();
            let _ = begun.child.wait();
        }
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

        start("sleeps", &shell("exec sleep 600")).unwrap();
        let id = running()["sleeps"].child.id();
        drop(Guard);
        assert!(!PathBuf::from(format!("/proc/{id}")).exists());
    }
}

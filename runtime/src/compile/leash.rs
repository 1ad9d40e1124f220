//! Commands that end with the process that runs them.
//!
//! A compiler is several processes: its driver, and what that starts. When a host is killed, nobody tells them. So they
//! run in a process group of their own beside a shell that waits for the host's end of a pipe to close, which the
//! kernel does however the host ends, and then kills the group. (The parent-death signal of Linux reaches the first
//! child alone, and is sent when the thread ends that started it.)

use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Output, Stdio};

/// The end of the host is the end of its input.
const WATCH: &str = "read _; kill -9 0";

/// Runs a command to its end, nothing on its stdin, and gives what it printed. Should this process end before, however
/// it does, the command and all that it started in its group are killed. Where there is no `/bin/sh`, they are not.
///
/// # Errors
/// Those of starting the command.
pub(super) fn run(command: &mut Command) -> io::Result<Output> {
    let leash = Leash::new();
    // A group of its own in any case: what somebody types at a terminal is for the host.
    command.process_group(leash.group()).stdin(Stdio::null()).output()
}

/// The watching shell, first of its group.
struct Leash(Option<Child>);

impl Leash {
    fn new() -> Self {
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", WATCH]).process_group(0);
        shell.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        let started = shell.spawn();
        if let Err(e) = &started {
            tracing::debug!(error = %e, "compilers will not end with this process");
        }
        Self(started.ok())
    }

    /// The group to be in; 0 is a new one.
    fn group(&self) -> i32 {
        self.0.as_ref().and_then(|shell| i32::try_from(shell.id()).ok()).unwrap_or(0)
    }
}

impl Drop for Leash {
    fn drop(&mut self) {
        // It must not see its input end.
        if let Some(shell) = &mut self.0 {
            let _ = shell.kill();
            let _ = shell.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    fn what_a_command_prints_comes_back_and_nobody_watches_any_more() {
        let out = run(Command::new("/bin/sh").args(["-c", "echo one; echo two >&2; exit 3"])).unwrap();
        assert_eq!((&out.stdout[..], &out.stderr[..], out.status.code()), (&b"one\n"[..], &b"two\n"[..], Some(3)));
        assert!(run(&mut Command::new("/nonexistent/cc")).is_err());
    }

    #[test]
    fn when_the_pipe_closes_the_whole_group_ends() {
        let mut leash = Leash::new();
        let mut command = Command::new("/bin/sh");
        command.args(["-c", "sleep 60 & sleep 60"]).process_group(leash.group()).stdout(Stdio::piped());
        let child = command.spawn().unwrap();
        let start = Instant::now();
        // As the kernel does when this process ends.
        drop(leash.0.as_mut().unwrap().stdin.take());
        // Its output ends when the last of those who hold it has.
        child.wait_with_output().unwrap();
        assert!(start.elapsed().as_secs() < 20, "{:?}", start.elapsed());
    }
}

//! A process that is stopped before and after each of its system calls, on all of its threads, and killed at one of
//! them.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// What became of it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum End {
    /// It was killed at the stop that was asked for.
    Killed,
    /// It ended before, with this status of `waitpid`.
    Ended(i32),
}

/// How a command ran.
#[derive(Debug)]
pub(crate) struct Traced {
    /// Stops between the marks that it gave ([`mark`]), or until it was killed.
    pub stops: u64,
    pub end: End,
}

/// Given by the process that is traced: from the first one on its stops count, and no longer after the second.
pub(crate) fn mark() {
    // SAFETY: the tracer keeps the signal, so that it does not come.
    unsafe { libc::raise(libc::SIGUSR2) };
}

/// Runs a command and kills it (SIGKILL) at one of its stops, if it comes to that. Processes that it starts are not
/// stopped.
///
/// # Errors
/// Where processes cannot be started, or may not be traced: then it is [`io::ErrorKind::PermissionDenied`].
pub(crate) fn run(command: &mut Command, kill_at: Option<u64>) -> io::Result<Traced> {
    // SAFETY: a system call and a look at its error, which are safe after a fork.
    unsafe {
        command.pre_exec(|| match libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0) {
            -1 => Err(io::Error::last_os_error()),
            _ => Ok(()),
        });
    }
    let main = command.spawn()?.id() as libc::pid_t;
    let resume = |thread: libc::pid_t, signal: libc::c_int| {
        // SAFETY: acts on a thread that is traced from here; one that is gone is an error, and is heard of by
        // `waitpid`.
        unsafe { libc::ptrace(libc::PTRACE_SYSCALL, thread, 0, signal) };
    };
    let (mut stops, mut counts, mut killed, mut begun) = (0, false, false, false);
    loop {
        let mut status = 0;
        // Of this thread's children alone: other tests have some of their own.
        // SAFETY: `status` is a place for it.
        let thread = unsafe { libc::waitpid(-1, &mut status, libc::__WALL | libc::__WNOTHREAD) };
        if thread < 0 {
            let e = io::Error::last_os_error();
            match e.kind() {
                io::ErrorKind::Interrupted => continue,
                _ => return Err(e),
            }
        }
        if !libc::WIFSTOPPED(status) {
            if thread == main {
                let end = if killed { End::Killed } else { End::Ended(status) };
                return Ok(Traced { stops, end });
            }
            continue;
        }
        if !begun {
            begun = true;
            let options = libc::PTRACE_O_TRACESYSGOOD | libc::PTRACE_O_TRACECLONE | libc::PTRACE_O_EXITKILL;
            // SAFETY: acts on the process that has just stopped, at its start.
            unsafe { libc::ptrace(libc::PTRACE_SETOPTIONS, thread, 0, options) };
        }
        const AT_CALL: libc::c_int = libc::SIGTRAP | 0x80;
        match libc::WSTOPSIG(status) {
            AT_CALL => {
                stops += u64::from(counts && !killed);
                if counts && !killed && Some(stops) == kill_at {
                    killed = true;
                    // SAFETY: `main` has not been waited for, so the number is still its own.
                    unsafe { libc::kill(main, libc::SIGKILL) };
                } else {
                    resume(thread, 0);
                }
            }
            libc::SIGUSR2 => {
                counts = !counts;
                resume(thread, 0);
            }
            // The start of the program, that of a thread, and news of threads.
            libc::SIGTRAP | libc::SIGSTOP => resume(thread, 0),
            signal => resume(thread, signal),
        }
    }
}

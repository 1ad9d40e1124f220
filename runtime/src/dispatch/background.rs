//! Compilations on threads of their own.
//!
//! A compiler is a library with data of its own, which a process that ends takes apart, in the order opposite to that
//! in which it was made. So the end of the process waits for compilers that run in the background at that time, and
//! lets no other begin; what they made is kept.

use super::binaries::Binary;
use super::job::Job;
use crate::Result;
use std::panic::catch_unwind;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Once, PoisonError};
use std::thread::{Builder, JoinHandle, ThreadId};
use std::time::Duration;

/// The longest that the end of a process waits: much longer than any compiler takes.
const LONGEST_END: Duration = Duration::from_secs(60);

/// Begins `work` on a thread of its own; none when there is no thread to be had.
pub(super) fn start(work: impl FnOnce() -> Result<Binary> + Send + 'static) -> Option<Arc<Job>> {
    let job = Arc::new(Job::new());
    let mine = job.clone();
    match Builder::new().name("flashtune-compile".to_owned()).spawn(move || mine.run(work)) {
        Ok(thread) => {
            process().remember(thread);
            Some(job)
        }
        Err(e) => {
            tracing::warn!(error = %e, "no thread to compile on in the background");
            None
        }
    }
}

/// What the end of the process has to know.
struct Process {
    /// Compilers that run in the background.
    running: usize,
    /// The threads of jobs that have not ended, and of some that have.
    threads: Vec<JoinHandle<()>>,
    /// Those of them that a compiler has run on.
    used: Vec<ThreadId>,
    ending: bool,
}

static PROCESS: Mutex<Process> =
    Mutex::new(Process { running: 0, threads: Vec::new(), used: Vec::new(), ending: false });
static IDLE: Condvar = Condvar::new();
/// Whose process it is: a child of a fork has none of these threads, and perhaps a lock that one of them held.
static OWNER: AtomicU32 = AtomicU32::new(0);

fn process() -> MutexGuard<'static, Process> {
    PROCESS.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Process {
    fn remember(&mut self, thread: JoinHandle<()>) {
        self.threads.retain(|t| !t.is_finished());
        let Self { threads, used, .. } = self;
        used.retain(|id| threads.iter().any(|t| t.thread().id() == *id));
        self.threads.push(thread);
    }
}

/// Held while a compiler runs on a job's thread: the process does not end before it is dropped.
pub(super) struct Compiling(());

impl Compiling {
    /// None when the process is ending.
    pub(crate) fn begin() -> Option<Self> {
        let mut process = process();
        if process.ending {
            return None;
        }
        process.running += 1;
        process.used.push(std::thread::current().id());
        Some(Self(()))
    }
}

/// From now on the end of the process waits. The compiler is warm by now ([`crate::Compiler::warm_up`]): what it
/// registered for the end comes after what is registered here.
pub(super) fn wait_at_the_end() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        OWNER.store(std::process::id(), Ordering::Relaxed);
        // SAFETY: the handler is a plain function of this library. When it cannot be registered (no memory), an end of
        // the process in the middle of a compilation is not waited for.
        let _ = unsafe { libc::atexit(at_exit) };
    });
}

impl Drop for Compiling {
    fn drop(&mut self) {
        process().running -= 1;
        IDLE.notify_all();
    }
}

extern "C" fn at_exit() {
    // Nothing may unwind from here.
    let _ = catch_unwind(wait_for_compilers);
}

/// Waits for compilers, and then for their threads: those take a library's thread data apart as they end.
fn wait_for_compilers() {
    if OWNER.load(Ordering::Relaxed) != std::process::id() {
        return;
    }
    let mut this = process();
    let me = std::thread::current().id();
    if this.threads.iter().any(|t| t.thread().id() == me) {
        return;
    }
    this.ending = true;
    let (mut this, wait) =
        IDLE.wait_timeout_while(this, LONGEST_END, |p| p.running > 0).unwrap_or_else(PoisonError::into_inner);
    if wait.timed_out() {
        return;
    }
    let (threads, used) = (std::mem::take(&mut this.threads), std::mem::take(&mut this.used));
    drop(this);
    // Others wait for files that other processes write, and nobody waits for them.
    for thread in threads.into_iter().filter(|t| used.contains(&t.thread().id())) {
        let _ = thread.join();
    }
}

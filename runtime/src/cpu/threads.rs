//! Who runs the tiles of a kernel: threads of this library, or those of the host.
//!
//! A host that computes with threads of its own has them wait actively for the next work, as OpenMP's do: other threads
//! then find no core. So it can lend its own. Results do not depend on who comes: tiles are taken from one counter.

use super::openmp::OpenMp;
use crate::{Error, Result};
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Mutex, OnceLock};

/// A parallel loop of a host.
pub trait ParallelLoop: Send + Sync {
    /// Threads that a loop begun here would have, 1 at least.
    fn threads(&self) -> usize;

    /// Calls `member` up to `members` times, at the same time on different threads as far as there are any, and returns
    /// when all these calls have returned. The calling thread may be one of them. Fewer calls than asked for are right,
    /// if slower: what is left is computed by who called `run`. `member` does not unwind.
    fn run(&self, members: usize, member: &(dyn Fn() + Sync));
}

/// Which threads run kernels.
#[derive(Clone, Default)]
pub enum Threads {
    /// Those of the Rayon pool that the caller is a worker of; of other callers the library's own, started once.
    #[default]
    Own,
    /// Those of the OpenMP runtime that is loaded in this process: PyTorch's, where it is there. An error without one.
    OpenMp,
    /// The same if there is one, else the library's own.
    OpenMpIfLoaded,
    /// Those of the host.
    Host(Arc<dyn ParallelLoop>),
}

impl fmt::Debug for Threads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Own => "Own",
            Self::OpenMp => "OpenMp",
            Self::OpenMpIfLoaded => "OpenMpIfLoaded",
            Self::Host(_) => "Host",
        })
    }
}

impl Threads {
    /// The loop that this names, with `count` threads where they are the library's own.
    pub(super) fn parallel_loop(self, count: usize) -> Result<Arc<dyn ParallelLoop>> {
        match self {
            Self::Own => Ok(Arc::new(Own { pool: pool(count)? })),
            Self::OpenMp => Ok(Arc::new(OpenMp::loaded()?)),
            Self::OpenMpIfLoaded => match OpenMp::loaded() {
                Ok(openmp) => Ok(Arc::new(openmp)),
                Err(_) => Self::Own.parallel_loop(count),
            },
            Self::Host(parallel) => Ok(parallel),
        }
    }
}

/// Rayon's threads.
pub(super) struct Own {
    pub(super) pool: &'static ThreadPool,
}

impl ParallelLoop for Own {
    fn threads(&self) -> usize {
        match rayon::current_thread_index() {
            Some(_) => rayon::current_num_threads(),
            None => self.pool.current_num_threads(),
        }
    }

    /// By halves: `join` takes no memory, as a scope does for each of its jobs, and a warm call allocates nothing.
    fn run(&self, members: usize, member: &(dyn Fn() + Sync)) {
        match rayon::current_thread_index() {
            Some(_) => share(members, member),
            None => self.pool.install(|| share(members, member)),
        }
    }
}

fn share(members: usize, member: &(dyn Fn() + Sync)) {
    match members {
        0 | 1 => member(),
        _ => drop(rayon::join(|| share(members - members / 2, member), || share(members / 2, member))),
    }
}

/// The library's own threads, started on first use.
pub(super) fn pool(threads: usize) -> Result<&'static ThreadPool> {
    static POOL: OnceLock<ThreadPool> = OnceLock::new();
    static STARTING: Mutex<()> = Mutex::new(());
    let _starting = STARTING.lock().unwrap_or_else(|e| e.into_inner());
    if let Some(pool) = POOL.get() {
        return Ok(pool);
    }
    let pool =
        ThreadPoolBuilder::new().num_threads(threads).thread_name(|i| format!("flashtune-cpu-{i}")).build().map_err(
            |e| Error::Device {
                call: "starting threads",
                device: "cpu".to_owned(),
                message: e.to_string(),
                remedy: "raise the limit of processes (ulimit -u) or of memory",
            },
        )?;
    Ok(POOL.get_or_init(|| pool))
}

/// Has `work` done by up to `members` threads; it is called once at least. A panic goes on here, and not through the
/// host's loop.
pub(super) fn run(parallel: &dyn ParallelLoop, members: usize, work: &(dyn Fn() + Sync), is_left: impl Fn() -> bool) {
    if members <= 1 {
        return work();
    }
    let panicked: Mutex<Option<Box<dyn Any + Send>>> = Mutex::new(None);
    parallel.run(members, &|| {
        if let Err(payload) = catch_unwind(AssertUnwindSafe(work)) {
            *panicked.lock().unwrap_or_else(|e| e.into_inner()) = Some(payload);
        }
    });
    if let Some(payload) = panicked.into_inner().unwrap_or_else(|e| e.into_inner()) {
        resume_unwind(payload);
    }
    if is_left() {
        work();
    }
}

//! The host's threads, by a function of the host or by OpenMP.

use crate::error::{Failure, Result};
use crate::types::{Options, Threads};
use engine::ParallelLoop;
use std::ffi::c_void;
use std::num::NonZeroUsize;
use std::sync::Arc;

type Run = unsafe extern "C" fn(*mut c_void, u64, Option<unsafe extern "C" fn(*mut c_void)>, *mut c_void);

/// A loop of the caller.
struct HostLoop {
    run: Run,
    context: *mut c_void,
    threads: usize,
}

// SAFETY: the caller promises that the function may be called with the context from every thread (types.rs).
unsafe impl Send for HostLoop {}
// SAFETY: as above.
unsafe impl Sync for HostLoop {}

/// What the host calls: `of` is a pointer to a member.
unsafe extern "C" fn member(of: *mut c_void) {
    // SAFETY: `HostLoop::run` passes the address of its member, which lives until the host's function has returned.
    let member = unsafe { *of.cast::<&(dyn Fn() + Sync)>() };
    member();
}

impl ParallelLoop for HostLoop {
    fn threads(&self) -> usize {
        self.threads
    }

    fn run(&self, members: usize, work: &(dyn Fn() + Sync)) {
        let mut work = work;
        // SAFETY: by the caller's promise; `work` outlives the call and does not unwind.
        unsafe { (self.run)(self.context, members as u64, Some(member), (&raw mut work).cast()) }
    }
}

/// The threads that the options name.
pub(crate) fn threads(options: &Options) -> Result<engine::Threads> {
    const OWN: i32 = Threads::Own as i32;
    const OPEN_MP: i32 = Threads::OpenMp as i32;
    const OPEN_MP_IF_LOADED: i32 = Threads::OpenMpIfLoaded as i32;
    if options.reserved != 0 {
        return Err(Failure::argument(format!("reserved is {}, but it is 0", options.reserved)));
    }
    match (options.threads, options.parallel) {
        (OWN, Some(run)) => {
            let cores = || std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
            let said = usize::try_from(options.parallel_threads).unwrap_or(usize::MAX);
            let threads = if said == 0 { cores() } else { said };
            Ok(engine::Threads::Host(Arc::new(HostLoop { run, context: options.parallel_context, threads })))
        }
        (OWN, None) if options.parallel_threads != 0 || !options.parallel_context.is_null() => {
            Err(Failure::argument("parallel_threads or parallel_context is given, but parallel is NULL"))
        }
        (OWN, None) => Ok(engine::Threads::Own),
        (OPEN_MP | OPEN_MP_IF_LOADED, Some(_)) => {
            Err(Failure::argument("threads and parallel are both given; leave one of them 0"))
        }
        (OPEN_MP, None) => Ok(engine::Threads::OpenMp),
        (OPEN_MP_IF_LOADED, None) => Ok(engine::Threads::OpenMpIfLoaded),
        (n, _) => Err(Failure::argument(format!("threads is {n}, but a flashtune_threads is 0, 1 or 2"))),
    }
}

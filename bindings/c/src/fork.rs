//! Processes that were forked after the library was used.
//!
//! A child of `fork` has the parent's memory but none of its threads and no usable CUDA context: the pool of the cpu
//! device would wait for ever, locks that another thread held stay locked. So a child is told, at the first call.

use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

pub(crate) const MESSAGE: &str = "this process was forked after flashtune was used: threads and GPU contexts do not \
     survive a fork; start workers with spawn or exec, or fork before the first engine is opened";

static FORKED: AtomicBool = AtomicBool::new(false);

extern "C" fn in_the_child() {
    FORKED.store(true, Ordering::Relaxed);
}

/// From now on a fork is noticed.
pub(crate) fn watch() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the handler stores to an atomic, which is allowed between fork and exec. When it cannot be registered
        // (no memory), forks go unnoticed.
        let _ = unsafe { libc::pthread_atfork(None, None, Some(in_the_child)) };
    });
}

/// Whether this process is a child that was forked after [`watch`].
pub(crate) fn happened() -> bool {
    FORKED.load(Ordering::Relaxed)
}

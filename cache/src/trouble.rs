//! What went wrong with stored results and was survived, counted for this process.
//!
//! A host keeps answering when its cache is unreadable, damaged or full. It is told once in the log; how often it
//! happened is counted here, for whoever watches it.

use crate::Error;
use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// How often this process met what kind of trouble. The numbers only grow.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Troubles {
    /// Files that are there and could not be read.
    pub unreadable: u64,
    /// Files, records and kernels that failed a check and were left out.
    pub damaged: u64,
    /// Kernels that could not be kept.
    pub unkept: u64,
    /// Records and kernels that only another build of flashtune understands, a newer one perhaps; left out.
    pub foreign: u64,
}

/// A kind of trouble.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Trouble {
    Unreadable,
    Damaged,
    Unkept,
    Foreign,
}

static COUNTS: [AtomicU64; 4] = [const { AtomicU64::new(0) }; 4];

impl Trouble {
    /// Counts one; whether it was the first of its kind.
    pub(crate) fn count(self) -> bool {
        COUNTS[self as usize].fetch_add(1, Ordering::Relaxed) == 0
    }
}

/// Whether an error is of a link in the place of something of this program's: then it is told, once for each of them.
/// It is an attack or a mistake, and no weakness of a file system that one goes on with in silence.
pub(crate) fn told_of_link(e: &Error) -> bool {
    static TOLD: Mutex<Option<HashSet<PathBuf>>> = Mutex::new(None);
    let Error::Link { path } = e else { return false };
    let mut told = TOLD.lock().unwrap_or_else(PoisonError::into_inner);
    if told.get_or_insert_default().insert(path.clone()) {
        tracing::warn!(error = %e, "it counts as missing");
    }
    true
}

/// The numbers so far.
pub fn troubles() -> Troubles {
    let of = |kind: Trouble| COUNTS[kind as usize].load(Ordering::Relaxed);
    Troubles {
        unreadable: of(Trouble::Unreadable),
        damaged: of(Trouble::Damaged),
        unkept: of(Trouble::Unkept),
        foreign: of(Trouble::Foreign),
    }
}

//! The lock that makes the store exclusive.
//!
//! sled locks one of its own files, which is not enough: while a damaged journal is renamed aside and another one
//! started, a second process must not come in between. So a file beside the journal is locked first.

use crate::{Error, Result, regular};
use rustix::fs::{FlockOperation, flock};
use std::fs::{File, OpenOptions};
use std::path::Path;

/// Held as long as the store is open. The kernel releases it when the process ends, however it ends.
pub struct StoreLock {
    _file: File,
}

impl StoreLock {
    /// Takes the lock or says that another one has it.
    pub fn take(lock: &Path, store: &Path) -> Result<Self> {
        let io = |action, source| Error::Io {
            action,
            path: lock.to_path_buf(),
            source,
            remedy: "make it writable, or set FLASHTUNE_CACHE to a local folder that is",
        };
        let file = regular::open_with(OpenOptions::new().create(true).truncate(false).write(true), lock)
            .map_err(|e| io("open the lock file", e))?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Self { _file: file }),
            Err(rustix::io::Errno::WOULDBLOCK) => Err(Error::Locked { path: store.to_path_buf() }),
            Err(e) => Err(io("lock", e.into())),
        }
    }
}

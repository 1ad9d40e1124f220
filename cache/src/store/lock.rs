//! The lock that makes the store exclusive.
//!
//! sled locks one of its own files, which is not enough: while a damaged journal is renamed aside and another one
//! started, a second process must not come in between. So a file beside the journal is locked first.

use crate::folder::Folder;
use crate::layout::{LOCK, STORE};
use crate::{Error, Result};
use rustix::fs::{FlockOperation, flock};
use std::fs::File;

/// Held as long as the store is open. The kernel releases it when the process ends, however it ends.
pub(crate) struct StoreLock {
    _file: File,
}

impl StoreLock {
    /// Takes the lock or says that another one has it. What is in its place and is no file of this user's alone is set
    /// aside.
    pub(crate) fn take(base: &Folder) -> Result<Self> {
        let file = match base.write(LOCK) {
            Err(e) if e.is_no_file() => {
                if let Some(aside) = base.set_aside(LOCK, |seen| !seen.is_link() && !seen.is_own_file())? {
                    let aside = base.path().join(aside);
                    tracing::warn!(error = e.cause(), aside = %aside.display(), "the lock's file was set aside");
                }
                base.write(LOCK)?
            }
            opened => opened?,
        };
        match flock(&file.0, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Self { _file: file.0 }),
            Err(rustix::io::Errno::WOULDBLOCK) => Err(Error::Locked { path: base.path().join(STORE) }),
            Err(e) => Err(Error::Io {
                action: "lock",
                path: base.path().join(LOCK),
                source: e.into(),
                remedy: "make it writable, or set FLASHTUNE_CACHE to a local folder that is",
            }),
        }
    }
}

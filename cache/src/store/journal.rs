//! How sled gets its folder: looked at entry by entry, by a path that cannot be swapped, and set aside when it is
//! damaged.

use crate::dir::check_owner;
use crate::folder::Folder;
use crate::layout::{STORE, is_blob, of_sled};
use crate::{Error, Result};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long sled may take to let go of its own lock after a store of this process was dropped.
const SLED_PATIENCE: Duration = Duration::from_secs(3);

/// Why sled did not open.
pub(super) enum OpenFailure {
    /// sled's own lock is held.
    Busy,
    /// The folder can be neither read nor written; the content is not at fault.
    Io(std::io::Error),
    /// The content is at fault.
    Unreadable(String),
    /// Nothing is touched: a link, or a folder that others may write to.
    Refused(Error),
}

impl From<Error> for OpenFailure {
    fn from(e: Error) -> Self {
        match e {
            Error::Io { source, .. } => OpenFailure::Io(source),
            e => OpenFailure::Refused(e),
        }
    }
}

/// Opens the journal, or sets it aside and starts another. The caller holds the lock.
pub(super) fn open_or_replace(base: &Folder) -> Result<sled::Db> {
    open_or_replace_by(base, try_open)
}

pub(super) fn open_or_replace_by(
    base: &Folder,
    try_open: impl Fn(&Folder) -> std::result::Result<sled::Db, OpenFailure>,
) -> Result<sled::Db> {
    let path = base.path().join(STORE);
    let io = |source| Error::Io {
        action: "open the store",
        path: path.clone(),
        source,
        remedy: "make it writable and some space free, or set FLASHTUNE_CACHE to another local folder",
    };
    let start = Instant::now();
    loop {
        match try_open(base) {
            Ok(db) => return Ok(db),
            // Our own lock is held, so this is a store of this process whose threads are still ending.
            Err(OpenFailure::Busy) if start.elapsed() < SLED_PATIENCE => std::thread::sleep(Duration::from_millis(20)),
            Err(OpenFailure::Busy) => return Err(Error::Locked { path }),
            Err(OpenFailure::Io(source)) => return Err(io(source)),
            Err(OpenFailure::Refused(e)) => return Err(e),
            Err(OpenFailure::Unreadable(reason)) => {
                let Some(aside) = base.set_aside(STORE, |seen| !seen.is_link())? else { continue };
                let refusal = match try_open(base) {
                    Ok(db) => {
                        tracing::warn!(
                            store = %path.display(), aside = %base.path().join(aside).display(), reason,
                            "the journal cannot be read; it was set aside and a new one is started"
                        );
                        return Ok(db);
                    }
                    Err(refusal) => refusal,
                };
                // An empty one cannot be opened either, for want of threads or memory perhaps: the content was not at
                // fault.
                remove_begun(base);
                if base.look(STORE).is_ok_and(|there| there.is_none()) {
                    let _ = base.rename(&aside, STORE);
                }
                return Err(match refusal {
                    OpenFailure::Busy => Error::Locked { path },
                    OpenFailure::Io(source) => io(source),
                    OpenFailure::Refused(e) => e,
                    OpenFailure::Unreadable(message) => Error::Store {
                        path,
                        message: format!(
                            "{message}, and so would an empty one; see this process's limits of memory and threads"
                        ),
                    },
                });
            }
        }
    }
}

fn try_open(base: &Folder) -> std::result::Result<sled::Db, OpenFailure> {
    let folder = match base.open_or_create(STORE) {
        Ok(folder) => folder,
        Err(e @ Error::Link { .. }) => return Err(OpenFailure::Refused(e)),
        Err(_) if base.look(STORE).is_ok_and(|there| there.is_some_and(|there| !there.is_folder())) => {
            return Err(OpenFailure::Unreadable("it is no folder".to_owned()));
        }
        Err(e) => return Err(e.into()),
    };
    check_owner(folder.path(), &folder.seen()?)?;
    check_content(&folder)?;
    let config = sled::Config::new().path(lasting_path(folder)?).cache_capacity(16 << 20).flush_every_ms(Some(500));
    // sled panics on some damaged files instead of returning an error.
    match std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| config.open())) {
        Ok(Ok(db)) => Ok(db),
        Ok(Err(sled::Error::Io(e))) => Err(match e.kind() {
            _ if e.to_string().contains("could not acquire lock") => OpenFailure::Busy,
            std::io::ErrorKind::UnexpectedEof | std::io::ErrorKind::InvalidData => {
                OpenFailure::Unreadable(e.to_string())
            }
            _ => OpenFailure::Io(e),
        }),
        Ok(Err(e)) => Err(OpenFailure::Unreadable(e.to_string())),
        Err(_) => Err(OpenFailure::Unreadable("sled panicked while opening it".to_owned())),
    }
}

/// Looks at everything that sled may open, write or remove, since it follows links and asks nobody. Removes snapshots
/// that it was writing when its process ended: it refuses to open while they lie there.
fn check_content(folder: &Folder) -> std::result::Result<(), OpenFailure> {
    for name in folder.own_names(|name| of_sled(name).is_some())? {
        let Some(seen) = folder.look(&name)? else { continue };
        if of_sled(&name) == Some(true) {
            if !seen.is_folder() || !seen.is_ours() {
                return Err(OpenFailure::Unreadable(format!("`{name}` in it is no folder of this user's")));
            }
            let blobs = folder.open(&name)?;
            for blob in blobs.own_names(is_blob)? {
                if blobs.look(&blob)?.is_some_and(|seen| !seen.is_own_file()) {
                    return Err(OpenFailure::Unreadable(format!(
                        "`{name}/{blob}` in it is no file of this user's alone"
                    )));
                }
            }
        } else if !seen.is_own_file() {
            return Err(OpenFailure::Unreadable(format!("`{name}` in it is no file of this user's alone")));
        } else if name.ends_with(".generating") {
            folder.remove_seen(&name, &seen);
        }
    }
    Ok(())
}

/// The path by which sled opens its files now and later, which leads to this folder whatever gets its name. The
/// handle stays open as long as the process, one for each journal, because sled's threads go on for a while after a
/// store was dropped, and the handle's number must not come to stand for another folder. What is inside is sled's to
/// open: a link that appears there after it was looked at is followed, but only this user can put it there.
fn lasting_path(folder: Folder) -> Result<PathBuf> {
    static HELD: Mutex<BTreeMap<(u64, u64), Folder>> = Mutex::new(BTreeMap::new());
    let id = folder.seen()?.id;
    let mut held = HELD.lock().unwrap_or_else(PoisonError::into_inner);
    Ok(held.entry(id).or_insert(folder).path_of_handle())
}

/// Removes a journal that was just begun: sled's own files, each of them proven, and the folder if nothing else is in
/// it.
fn remove_begun(base: &Folder) {
    let Ok(folder) = base.open(STORE) else { return };
    if let Ok(blobs) = folder.open("blobs") {
        for (name, _) in blobs.names().unwrap_or_default().iter().filter(|(name, _)| is_blob(name)) {
            blobs.remove(name);
        }
        folder.remove_empty("blobs");
    }
    for (name, _) in folder.names().unwrap_or_default().iter().filter(|(name, _)| of_sled(name) == Some(false)) {
        folder.remove(name);
    }
    base.remove_empty(STORE);
}

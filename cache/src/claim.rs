//! Who does a piece of work that several processes ask for: the one that holds its claim.
//!
//! A claim is a file in `<base>/claims/` under an exclusive lock. The kernel lets go of the lock when its process ends,
//! however it ends, so a dead holder is noticed at once and no stale claim exists. Over NFS the lock reaches other
//! hosts where the server offers locks. Where no lock can be had (a read-only mount, a file system without locks), work
//! is done without: twice, perhaps, but to the same result.

use crate::folder::{Folder, id_of};
use crate::holder::Holder;
use crate::layout::{CLAIMS, is_claim};
use crate::{CacheDir, Error, Key, Result, regular, trouble};
use rustix::fs::{FlockOperation, flock};
use std::fs::File;
use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How soon a waiter looks again, at first and when it has waited for long: many waiters must not disturb the one that
/// measures.
const FIRST_STEP: Duration = Duration::from_millis(10);
const LAST_STEP: Duration = Duration::from_millis(250);

/// The claims of a cache folder.
#[derive(Debug, Clone)]
pub struct Claims {
    dir: CacheDir,
}

/// The right to do a piece of work, until it is dropped.
#[derive(Debug)]
pub struct Claim {
    /// None where no lock can be had.
    held: Option<Held>,
}

/// A locked file, and where it is.
#[derive(Debug)]
struct Held {
    folder: Arc<Folder>,
    name: String,
    file: File,
    id: (u64, u64),
    was_empty: bool,
}

/// The answer to a wait.
#[derive(Debug)]
pub enum Turn<T> {
    /// The work is this process's.
    Mine(Claim),
    /// Another one did it.
    Done(T),
    /// Another one is still at it, for longer than this one would wait.
    Theirs,
}

impl Claims {
    /// Those of a folder. Touches nothing.
    pub fn new(dir: &CacheDir) -> Self {
        Self { dir: dir.clone() }
    }

    /// The claim on a piece of work, unless somebody has it.
    pub fn take(&self, work: &Key) -> Option<Claim> {
        let open = |base: &Folder| base.open_or_create(CLAIMS);
        let taken = self.dir.within_created(open).and_then(|folder| lock(&Arc::new(folder), &work.hex()));
        match taken {
            Ok(Some(held)) => {
                note_holder(&held);
                Some(Claim { held: Some(held) })
            }
            Ok(None) => None,
            Err(e) => {
                if !trouble::told_of_link(&e) {
                    tracing::debug!(error = %e, "no claim can be made; the work is done without");
                }
                Some(Claim { held: None })
            }
        }
    }

    /// Who has the claim on a piece of work, as far as it says so.
    pub fn holder(&self, work: &Key) -> Option<Holder> {
        let noted = self.dir.folder().and_then(|base| base.open(CLAIMS)?.read(&work.hex())).ok()?;
        Holder::parse(&regular::read_all(&noted).ok()?)
    }

    /// Removes the files of claims that nobody holds: of processes that were killed after their work was done, which
    /// nobody asks for again.
    pub(crate) fn clear(&self) {
        let Ok(folder) = self.dir.folder().and_then(|base| base.open(CLAIMS)) else { return };
        let (names, folder) = (folder.names().unwrap_or_default(), Arc::new(folder));
        for (name, is_link) in names {
            if is_claim(&name)
                && !is_link
                && let Ok(Some(held)) = lock(&folder, &name)
            {
                drop(Claim { held: Some(held) });
            }
        }
    }

    /// Waits for the claim or for `done` to say that the work has been done, at most `patience`.
    pub fn wait<T>(&self, work: &Key, patience: Duration, mut done: impl FnMut() -> Option<T>) -> Turn<T> {
        let (start, mut step) = (Instant::now(), FIRST_STEP);
        loop {
            let claim = self.take(work);
            // Looked for after the claim was taken: what the holder before did is seen.
            if let Some(result) = done() {
                return Turn::Done(result);
            }
            match claim {
                Some(claim) => return Turn::Mine(claim),
                None if start.elapsed() >= patience => return Turn::Theirs,
                None => {
                    std::thread::sleep(step.min(patience));
                    step = (step * 3 / 2).min(LAST_STEP);
                }
            }
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if let Some(Held { folder, name, file, id, .. }) = self.held.take() {
            // Removed while it is locked: who opened it before finds that it is no longer there, and begins anew.
            if let Ok(Some(seen)) = folder.look(&name)
                && seen.id == id
            {
                folder.remove_seen(&name, &seen);
            }
            drop(file);
        }
    }
}

/// The locked file of a claim; `None` while somebody else has it.
fn lock(folder: &Arc<Folder>, name: &str) -> Result<Option<Held>> {
    loop {
        let (file, metadata) = folder.write(name)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
            Err(e) => {
                let path = folder.path().join(name);
                return Err(Error::Io { action: "lock", path, source: e.into(), remedy: "use a local folder" });
            }
        }
        // The one before may have removed the file between our opening and our locking it.
        let id = id_of(&metadata);
        if folder.look(name)?.is_some_and(|seen| seen.id == id) {
            let (folder, name, was_empty) = (folder.clone(), name.to_owned(), metadata.len() == 0);
            return Ok(Some(Held { folder, name, file, id, was_empty }));
        }
    }
}

/// For those who wait, and tell whom for.
fn note_holder(Held { file, was_empty, .. }: &Held) {
    let note = Holder::this().note();
    let emptied = if *was_empty { Ok(()) } else { file.set_len(0) };
    let _ = emptied.and_then(|()| (&*file).write_all(note.as_bytes()));
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;
    use std::sync::atomic::{AtomicU32, Ordering};

    fn folder(claims: &Claims) -> PathBuf {
        claims.dir.base().join(CLAIMS)
    }

    fn claims() -> (tempfile::TempDir, Claims) {
        let tmp = tempfile::tempdir().unwrap();
        let claims = Claims::new(&CacheDir::at(tmp.path()));
        (tmp, claims)
    }

    #[test]
    fn one_of_many_does_the_work_and_the_others_see_it_done() {
        let (_tmp, claims) = claims();
        let (key, done) = (Key::of(b"work"), AtomicU32::new(0));
        let mine: Vec<bool> = std::thread::scope(|scope| {
            let ask = || match claims
                .wait(&key, Duration::from_secs(60), || (done.load(Ordering::SeqCst) > 0).then_some(()))
            {
                Turn::Mine(_claim) => {
                    std::thread::sleep(Duration::from_millis(30));
                    done.fetch_add(1, Ordering::SeqCst);
                    true
                }
                Turn::Done(()) => false,
                Turn::Theirs => panic!("it was done within a minute"),
            };
            let threads: Vec<_> = (0..16).map(|_| scope.spawn(ask)).collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        });
        assert_eq!(mine.iter().filter(|m| **m).count(), 1);
        assert_eq!(std::fs::read_dir(folder(&claims)).unwrap().count(), 0, "no file stays");
    }

    #[test]
    fn a_claim_that_changes_hands_is_never_held_twice() {
        let (_tmp, claims) = claims();
        let (key, holders, turns) = (Key::of(b"work"), AtomicU32::new(0), AtomicU32::new(0));
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    while turns.load(Ordering::SeqCst) < 400 {
                        let Some(_claim) = claims.take(&key) else { continue };
                        assert_eq!(holders.fetch_add(1, Ordering::SeqCst), 0);
                        turns.fetch_add(1, Ordering::SeqCst);
                        holders.fetch_sub(1, Ordering::SeqCst);
                    }
                });
            }
        });
    }

    #[test]
    fn who_will_not_wait_is_told_and_other_work_is_free() {
        let (_tmp, claims) = claims();
        let held = claims.take(&Key::of(b"one")).unwrap();
        let wait = |name: &[u8]| claims.wait::<()>(&Key::of(name), Duration::ZERO, || None);
        assert!(matches!(wait(b"one"), Turn::Theirs));
        assert!(matches!(wait(b"two"), Turn::Mine(_)));
        drop(held);
        assert!(matches!(wait(b"one"), Turn::Mine(_)));
    }

    #[test]
    fn who_holds_a_claim_is_told_while_it_is_held() {
        let (_tmp, claims) = claims();
        let work = Key::of(b"one");
        assert_eq!(claims.holder(&work), None);
        let held = claims.take(&work).unwrap();
        let holder = claims.holder(&work).unwrap();
        assert!(holder.is_this() && holder.held() < Duration::from_secs(60), "{holder:?}");
        let told = holder.to_string();
        assert!(told.contains(&std::process::id().to_string()) && told.contains("flashtune_cache"), "{told}");
        drop(held);
        assert_eq!(claims.holder(&work), None);
    }

    #[test]
    fn what_killed_processes_leave_is_cleared_and_what_is_held_stays() {
        let (_tmp, claims) = claims();
        let held = claims.take(&Key::of(b"held")).unwrap();
        std::fs::write(folder(&claims).join(Key::of(b"left").hex()), "12345\n").unwrap();
        std::fs::create_dir(folder(&claims).join("a folder")).unwrap();
        claims.clear();
        let left = |name: &str| folder(&claims).join(name).exists();
        assert!(left(&Key::of(b"held").hex()) && left("a folder") && !left(&Key::of(b"left").hex()));
        assert!(claims.take(&Key::of(b"held")).is_none() && claims.take(&Key::of(b"left")).is_some());
        drop(held);
    }

    #[test]
    fn where_nothing_can_be_locked_the_work_is_done_all_the_same() {
        let tmp = tempfile::tempdir().unwrap();
        std::fs::write(tmp.path().join("file"), b"").unwrap();
        let claims = Claims::new(&CacheDir::at(tmp.path().join("file")));
        let (a, b) = (claims.take(&Key::of(b"x")).unwrap(), claims.take(&Key::of(b"x")).unwrap());
        assert!(a.held.is_none() && b.held.is_none());
    }
}

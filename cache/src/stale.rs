//! Temporary files and folders that killed processes left behind.
//!
//! Their names hold the process: `<kind><pid>-<random>`. A pid alone proves little, since it may come from another host
//! or another container that shares the folder, or be in use again; so age decides with it.

use crate::folder::{Folder, Seen};
use crate::layout::temporary_of;
use crate::temporary;
use std::path::Path;
use std::time::{Duration, SystemTime};

/// Nothing younger is touched: nobody works on a temporary file for this long.
const YOUNG: Duration = Duration::from_secs(3600);
/// What is older goes even if a process of that number runs.
const OLD: Duration = Duration::from_secs(24 * 3600);

/// Removes what is left of a kind in a folder of temporary files, and says how much that was: files and folders of this
/// user named `<kind><pid>-<random>` that are older than an hour and whose process is gone, or older than a day. Of a
/// folder, the plain files of this user whose names begin with `own`; what else is in it stays, and the folder with it.
/// No link is followed or removed.
pub fn reap(folder: &Path, kind: &str, own: &str) -> usize {
    Folder::follow(folder).map_or(0, |folder| reap_in(&folder, kind, Some(own)))
}

/// [`reap`] in an open folder. Where this program makes no folders, none goes.
pub(crate) fn reap_in(folder: &Folder, kind: &str, own: Option<&str>) -> usize {
    let names = folder.names().unwrap_or_default();
    names.iter().filter(|(name, is_link)| !is_link && reap_one(folder, name, kind, own)).count()
}

fn reap_one(folder: &Folder, name: &str, kind: &str, own: Option<&str>) -> bool {
    let Some(pid) = temporary_of(name, kind) else { return false };
    let Ok(Some(seen)) = folder.look(name) else { return false };
    if !seen.is_ours() || !is_stale(&seen, pid) {
        return false;
    }
    let removed = match own.filter(|_| seen.is_folder()) {
        // What was opened is what was seen, or else it is another process's by now.
        Some(own) => {
            let inner = folder.open(name).ok().filter(|inner| inner.seen().is_ok_and(|now| now.id == seen.id));
            inner.is_some_and(|inner| temporary::empty(&inner, own)) && folder.remove_empty(name)
        }
        None => folder.remove_seen(name, &seen),
    };
    if !removed {
        tracing::debug!(path = %folder.path().join(name).display(), "a stale temporary file stays");
    }
    removed
}

fn is_stale(seen: &Seen, pid: i32) -> bool {
    // A time in the future says nothing; such an entry is left alone.
    let age = seen.changed().and_then(|t| SystemTime::now().duration_since(t).ok());
    age.is_some_and(|age| age > OLD || (age > YOUNG && !is_running(pid)))
}

fn is_running(pid: i32) -> bool {
    let Some(pid) = rustix::process::Pid::from_raw(pid) else { return true };
    // A process of another user answers with a refusal, which says that it is there.
    rustix::process::test_kill_process(pid) != Err(rustix::io::Errno::SRCH)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    const KIND: &str = "flashtune-test-";
    const OWN: &str = "kernel.";

    /// A folder with a file in it, last changed so long ago.
    fn left_behind(place: &Path, name: &str, age: Duration) -> PathBuf {
        let path = place.join(name);
        std::fs::create_dir(&path).unwrap();
        std::fs::write(path.join("kernel.c"), "int x;").unwrap();
        let then = std::fs::FileTimes::new().set_modified(SystemTime::now() - age);
        std::fs::File::open(&path).unwrap().set_times(then).unwrap();
        path
    }

    fn dead_pid() -> u32 {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        child.id()
    }

    #[test]
    fn only_what_is_old_and_orphaned_goes() {
        let tmp = tempfile::tempdir().unwrap();
        let (dead, alive) = (dead_pid(), std::process::id());
        let hours = |n: u64| Duration::from_secs(n * 3600);
        let gone = [
            left_behind(tmp.path(), &format!("{KIND}{dead}-a"), hours(2)),
            left_behind(tmp.path(), &format!("{KIND}{alive}-b"), hours(25)),
        ];
        let kept = [
            left_behind(tmp.path(), &format!("{KIND}{dead}-c"), Duration::from_secs(60)),
            left_behind(tmp.path(), &format!("{KIND}{alive}-d"), hours(2)),
            // No name that this program gives, however old.
            left_behind(tmp.path(), &format!("{KIND}nobody"), hours(99)),
            left_behind(tmp.path(), &format!("{KIND}{dead}-a.txt"), hours(99)),
            left_behind(tmp.path(), &format!("another-{dead}-e"), hours(99)),
            // A dead process of a negative number would be a whole group.
            left_behind(tmp.path(), &format!("{KIND}-1-f"), hours(2)),
        ];
        assert_eq!(reap(tmp.path(), KIND, OWN), gone.len());
        assert!(gone.iter().all(|p| !p.exists()) && kept.iter().all(|p| p.exists()));
        assert_eq!(reap(&tmp.path().join("absent"), KIND, OWN), 0);
    }

    #[test]
    fn a_time_in_the_future_protects() {
        let tmp = tempfile::tempdir().unwrap();
        let path = left_behind(tmp.path(), &format!("{KIND}{}-a", dead_pid()), Duration::ZERO);
        let then = std::fs::FileTimes::new().set_modified(SystemTime::now() + OLD * 2);
        std::fs::File::open(&path).unwrap().set_times(then).unwrap();
        assert_eq!(reap(tmp.path(), KIND, OWN), 0);
    }

    #[test]
    fn links_and_what_is_not_ours_stay() {
        let tmp = tempfile::tempdir().unwrap();
        let target = left_behind(tmp.path(), "target", Duration::ZERO);
        let link = tmp.path().join(format!("{KIND}{}-l", dead_pid()));
        std::os::unix::fs::symlink(&target, &link).unwrap();
        let then = rustix::fs::Timespec { tv_sec: 1, tv_nsec: 0 };
        let times = rustix::fs::Timestamps { last_access: then, last_modification: then };
        rustix::fs::utimensat(rustix::fs::CWD, &link, &times, rustix::fs::AtFlags::SYMLINK_NOFOLLOW).unwrap();
        // A folder of ours with something in it that is not.
        let mixed = left_behind(tmp.path(), &format!("{KIND}{}-m", dead_pid()), Duration::ZERO);
        std::fs::write(mixed.join("thesis.tex"), "years of work").unwrap();
        std::os::unix::fs::symlink(&target, mixed.join("kernel.so")).unwrap();
        std::fs::File::open(&mixed).unwrap().set_modified(SystemTime::now() - OLD * 2).unwrap();
        assert_eq!(reap(tmp.path(), KIND, OWN), 0);
        assert!(target.join("kernel.c").is_file() && link.symlink_metadata().is_ok());
        assert!(mixed.join("thesis.tex").is_file() && mixed.join("kernel.so").symlink_metadata().is_ok());
    }
}

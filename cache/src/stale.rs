//! Temporary files and folders that killed processes left behind.
//!
//! Their names hold the process: `<kind><pid>-<random>`. A pid alone proves little, since it may come from another host
//! or another container that shares the folder, or be in use again; so age decides with it.

use std::ffi::OsStr;
use std::fs::Metadata;
use std::path::Path;
use std::time::{Duration, SystemTime};

/// Nothing younger is touched: nobody works on a temporary file for this long.
const YOUNG: Duration = Duration::from_secs(3600);
/// What is older goes even if a process of that number runs.
const OLD: Duration = Duration::from_secs(24 * 3600);

/// The start of this process's temporary names of a kind.
pub fn temporary_prefix(kind: &str) -> String {
    format!("{kind}{}-", std::process::id())
}

/// Removes what is left of a kind in a folder, and says how much that was. Only files and folders of this user that are
/// older than an hour and whose process is gone, or older than a day. Whatever cannot be removed stays.
pub fn reap(folder: &Path, kind: &str) -> usize {
    let Ok(entries) = std::fs::read_dir(folder) else { return 0 };
    let mut removed = 0;
    for entry in entries.flatten() {
        let name = entry.file_name();
        let Some(rest) = rest_of(&name, kind) else { continue };
        // The entry itself: a link is removed, not followed.
        let path = entry.path();
        let Ok(metadata) = std::fs::symlink_metadata(&path) else { continue };
        if !is_ours(&metadata) || !is_stale(&metadata, pid_of(rest)) {
            continue;
        }
        let outcome = if metadata.is_dir() { std::fs::remove_dir_all(&path) } else { std::fs::remove_file(&path) };
        match outcome {
            Ok(()) => removed += 1,
            Err(e) => tracing::debug!(path = %path.display(), error = %e, "a stale temporary file stays"),
        }
    }
    removed
}

fn rest_of<'a>(name: &'a OsStr, kind: &str) -> Option<&'a str> {
    name.to_str()?.strip_prefix(kind)
}

fn pid_of(rest: &str) -> Option<i32> {
    rest.split_once('-')?.0.parse().ok().filter(|pid| *pid > 0)
}

fn is_stale(metadata: &Metadata, pid: Option<i32>) -> bool {
    // A time in the future says nothing; such an entry is left alone.
    let age = metadata.modified().ok().and_then(|t| SystemTime::now().duration_since(t).ok());
    age.is_some_and(|age| age > OLD || (age > YOUNG && pid.is_some_and(|pid| !is_running(pid))))
}

fn is_running(pid: i32) -> bool {
    let Some(pid) = rustix::process::Pid::from_raw(pid) else { return true };
    // A process of another user answers with a refusal, which says that it is there.
    rustix::process::test_kill_process(pid) != Err(rustix::io::Errno::SRCH)
}

fn is_ours(metadata: &Metadata) -> bool {
    std::os::unix::fs::MetadataExt::uid(metadata) == rustix::process::geteuid().as_raw()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    const KIND: &str = "flashtune-test-";

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
            left_behind(tmp.path(), &format!("{KIND}nobody"), hours(25)),
        ];
        let kept = [
            left_behind(tmp.path(), &format!("{KIND}{dead}-c"), Duration::from_secs(60)),
            left_behind(tmp.path(), &format!("{KIND}{alive}-d"), hours(2)),
            left_behind(tmp.path(), &format!("{KIND}nothing"), hours(2)),
            left_behind(tmp.path(), &format!("another-{dead}-e"), hours(99)),
            // A dead process of a negative number would be a whole group.
            left_behind(tmp.path(), &format!("{KIND}-1-f"), hours(2)),
        ];
        assert_eq!(reap(tmp.path(), KIND), gone.len());
        assert!(gone.iter().all(|p| !p.exists()) && kept.iter().all(|p| p.exists()));
        assert_eq!(reap(&tmp.path().join("absent"), KIND), 0);
    }

    #[test]
    fn a_time_in_the_future_protects() {
        let tmp = tempfile::tempdir().unwrap();
        let path = left_behind(tmp.path(), &format!("{KIND}{}-a", dead_pid()), Duration::ZERO);
        let then = std::fs::FileTimes::new().set_modified(SystemTime::now() + OLD * 2);
        std::fs::File::open(&path).unwrap().set_times(then).unwrap();
        assert_eq!(reap(tmp.path(), KIND), 0);
    }

    #[test]
    fn a_link_is_removed_and_not_what_it_leads_to() {
        let tmp = tempfile::tempdir().unwrap();
        let target = left_behind(tmp.path(), "target", Duration::ZERO);
        let link = tmp.path().join(format!("{KIND}{}-l", dead_pid()));
        std::os::unix::fs::symlink(&target, &link).unwrap();
        let then = rustix::fs::Timespec { tv_sec: 1, tv_nsec: 0 };
        let times = rustix::fs::Timestamps { last_access: then, last_modification: then };
        rustix::fs::utimensat(rustix::fs::CWD, &link, &times, rustix::fs::AtFlags::SYMLINK_NOFOLLOW).unwrap();
        assert_eq!(reap(tmp.path(), KIND), 1);
        assert!(target.join("kernel.c").is_file() && link.symlink_metadata().is_err());
    }
}

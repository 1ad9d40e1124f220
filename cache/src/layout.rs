//! The names that this program gives below a cache folder. Nothing of another name is ever removed or renamed there.

/// The bundle that readers map.
pub(crate) const SNAPSHOT: &str = "snapshot.ftb";
/// The folder of compiled kernels.
pub(crate) const ARTIFACTS: &str = "artifacts";
/// The folder of claims.
pub(crate) const CLAIMS: &str = "claims";
/// The folder of jobs that were cut short.
pub(crate) const JOBS: &str = "jobs";
/// The folder of levels that cards have raised.
pub(crate) const LEVELS: &str = "levels";
/// The folder of the tuner's journal.
pub(crate) const STORE: &str = "store";
/// The file whose lock says that a tuner has the journal.
pub(crate) const LOCK: &str = "store.lock";

/// All folders of the layout.
pub(crate) const FOLDERS: [&str; 5] = [ARTIFACTS, CLAIMS, JOBS, LEVELS, STORE];
/// All files directly in the base folder.
pub(crate) const FILES: [&str; 2] = [SNAPSHOT, LOCK];

/// What the names of unfinished files start with.
pub(crate) const TEMPORARY: &str = ".flashtune-";

/// A claim: the key of the work.
pub(crate) fn is_claim(name: &str) -> bool {
    is_hex(name, 64)
}

/// The progress of a job: its key.
pub(crate) fn is_job(name: &str) -> bool {
    name.strip_suffix(".log").is_some_and(|key| is_hex(key, 64))
}

/// The level of a path on an arch: their key.
pub(crate) fn is_level(name: &str) -> bool {
    name.strip_suffix(".level").is_some_and(|key| is_hex(key, 64))
}

/// A folder of kernels: the first digits of their keys.
pub(crate) fn is_part(name: &str) -> bool {
    is_hex(name, 2)
}

/// A kernel in this folder, or a damaged one: its key.
pub(crate) fn is_kernel(name: &str, part: &str) -> bool {
    let key = name.strip_suffix(".art").or_else(|| name.strip_suffix(".damaged"));
    key.is_some_and(|key| is_hex(key, 64) && key.starts_with(part))
}

/// A file or folder of sled's: whether it is a folder.
pub(crate) fn of_sled(name: &str) -> Option<bool> {
    let snapshot = |rest: &str| is_hex_any(rest.strip_suffix(".generating").unwrap_or(rest));
    match name {
        "db" | "conf" => Some(false),
        "blobs" => Some(true),
        _ => name.strip_prefix("snap.").is_some_and(snapshot).then_some(false),
    }
}

/// A large value of sled's: its number in the log.
pub(crate) fn is_blob(name: &str) -> bool {
    let digits = name.strip_prefix('-').unwrap_or(name);
    !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit())
}

/// A temporary file or folder of a kind, `<kind><pid>-<random>`: its process.
pub(crate) fn temporary_of(name: &str, kind: &str) -> Option<i32> {
    let (pid, random) = name.strip_prefix(kind)?.split_once('-')?;
    let is_random = !random.is_empty() && random.bytes().all(|b| b.is_ascii_alphanumeric());
    let is_number = pid.bytes().all(|b| b.is_ascii_digit());
    pid.parse().ok().filter(|pid| is_random && is_number && *pid > 0)
}

fn is_hex(text: &str, digits: usize) -> bool {
    text.len() == digits && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

fn is_hex_any(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_that_this_program_gives_match() {
        let key = crate::Key::of(b"x").hex();
        assert!(is_claim(&key) && is_job(&format!("{key}.log")) && is_part(&key[..2]));
        assert!(is_level(&format!("{key}.level")) && !is_level(&key) && !is_level(&format!("{key}.log")));
        assert!(is_kernel(&format!("{key}.art"), &key[..2]) && is_kernel(&format!("{key}.damaged"), &key[..2]));
        for wrong in [&key[1..], &key.to_uppercase(), &format!("{key}0"), "", "notes.txt", "Makefile"] {
            assert!(!is_claim(wrong) && !is_job(wrong) && !is_job(&format!("{wrong}.log")), "{wrong}");
            assert!(!is_kernel(wrong, "") && !is_kernel(&format!("{wrong}.art"), ""), "{wrong}");
            assert!(of_sled(wrong).is_none() && !is_blob(wrong) && temporary_of(wrong, TEMPORARY).is_none(), "{wrong}");
        }
        assert!(!is_kernel(&format!("{key}.art"), "zz"), "in a folder of other keys");
        assert_eq!(["db", "blobs", "snap.00FF", "snap.0F.generating"].map(of_sled), [0, 1, 0, 0].map(|n| Some(n > 0)));
        assert!(of_sled("snap.txt").is_none() && is_blob("123") && is_blob("-1") && !is_blob("12a"));
        assert_eq!(temporary_of(".flashtune-77-aZ9", TEMPORARY), Some(77));
        for wrong in
            [".flashtune-77-", ".flashtune--7-a", ".flashtune-x-a", ".flashtune-7-a.txt", ".flashtune-7", "7-a"]
        {
            assert_eq!(temporary_of(wrong, TEMPORARY), None, "{wrong}");
        }
    }
}

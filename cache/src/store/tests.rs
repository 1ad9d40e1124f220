//! The journal under orderly and disorderly conditions.

use super::journal::{OpenFailure, open_or_replace_by};
use super::*;
use crate::testing::{artifact, record, trial};
use crate::{Stage, TrialResult};

fn folder() -> (tempfile::TempDir, CacheDir, ArtifactFiles) {
    let tmp = tempfile::tempdir().unwrap();
    let dir = CacheDir::at(tmp.path().join("cache"));
    let files = ArtifactFiles::new(&dir);
    (tmp, dir, files)
}

fn sorted(mut records: Vec<Record>) -> Vec<Record> {
    records.sort_by_key(|r| r.key.bucket);
    records
}

#[test]
fn records_and_trials_survive_a_reopening() {
    let (_tmp, dir, _) = folder();
    let store = Store::open(&dir).unwrap();
    let (one, two) = (record(128, 1), record(512, 2));
    store.put_record(&one).unwrap();
    store.put_record(&two).unwrap();
    store.put_trial(&one.key, &trial(1)).unwrap();
    store.put_trial(&one.key, &trial(2)).unwrap();
    // The same schedule again: the new trial replaces the old.
    let newer =
        Trial { unix_time: 5, result: TrialResult::Failed { stage: Stage::Load, reason: "again".into() }, ..trial(1) };
    store.put_trial(&one.key, &newer).unwrap();
    drop(store);
    let store = Store::open(&dir).unwrap();
    assert_eq!(sorted(store.records().unwrap()), [one.clone(), two.clone()]);
    assert_eq!(store.record(&two.key).unwrap(), Some(two.clone()));
    assert_eq!(store.trials(&one.key).unwrap(), [trial(2), newer]);
    assert!(store.trials(&two.key).unwrap().is_empty());
}

#[test]
fn a_second_store_is_told_that_it_is_locked() {
    let (_tmp, dir, _) = folder();
    let store = Store::open(&dir).unwrap();
    assert!(matches!(Store::open(&dir), Err(Error::Locked { .. })));
    assert!(matches!(Store::open_within(&dir, Duration::from_millis(120)), Err(Error::Locked { .. })));
    let waiting = std::thread::spawn({
        let dir = dir.clone();
        move || Store::open_within(&dir, Duration::from_secs(20)).map(drop)
    });
    std::thread::sleep(Duration::from_millis(100));
    drop(store);
    waiting.join().unwrap().unwrap();
}

#[test]
fn the_snapshot_holds_records_and_their_artifacts() {
    let (_tmp, dir, files) = folder();
    let store = Store::open(&dir).unwrap();
    for n in [1, 2] {
        files.put(&artifact(n)).unwrap();
    }
    store.put_record(&record(128, 1)).unwrap();
    store.put_record(&record(512, 2)).unwrap();
    let path = store.publish(&files).unwrap();
    let b = Bundle::map(&path).unwrap();
    assert_eq!((b.record_count(), b.artifact_count()), (2, 2));
    assert_eq!(b.artifact(&artifact(2).recipe.key()).unwrap(), Some(artifact(2)));
}

#[test]
fn half_written_files_of_dead_processes_go_when_the_store_is_opened() {
    let (_tmp, dir, files) = folder();
    drop(Store::open(&dir).unwrap());
    let key = files.put(&artifact(1)).unwrap();
    let mut child = std::process::Command::new("true").spawn().unwrap();
    child.wait().unwrap();
    let name = format!("{TEMPORARY}{}-x", child.id());
    let left = [dir.base().join(&name), files.path(&key).with_file_name(&name)];
    for path in &left {
        std::fs::write(path, b"half").unwrap();
        let then = SystemTime::now() - Duration::from_secs(7200);
        std::fs::File::open(path).unwrap().set_modified(then).unwrap();
    }
    drop(Store::open(&dir).unwrap());
    assert!(left.iter().all(|p| !p.exists()) && files.get(&key).is_some());
}

#[test]
fn a_folder_that_others_may_write_to_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let (_tmp, dir, _) = folder();
    dir.create().unwrap();
    std::fs::set_permissions(dir.base(), std::fs::Permissions::from_mode(0o770)).unwrap();
    assert!(matches!(Store::open(&dir), Err(Error::Exposed { .. })));
    std::fs::set_permissions(dir.base(), std::fs::Permissions::from_mode(0o755)).unwrap();
    Store::open(&dir).unwrap();
}

#[test]
fn a_publication_keeps_kernels_that_only_the_old_snapshot_has() {
    let (_tmp, dir, files) = folder();
    let store = Store::open(&dir).unwrap();
    files.put(&artifact(1)).unwrap();
    store.put_record(&record(128, 1)).unwrap();
    store.publish(&files).unwrap();
    std::fs::remove_dir_all(dir.artifacts_path()).unwrap();
    store.put_record(&record(512, 1)).unwrap();
    let b = Bundle::map(&store.publish(&files).unwrap()).unwrap();
    assert_eq!(b.artifact(&artifact(1).recipe.key()).unwrap(), Some(artifact(1)));
}

fn published(dir: &CacheDir, files: &ArtifactFiles) -> Vec<Record> {
    let store = Store::open(dir).unwrap();
    let records = vec![record(128, 1), record(512, 2), record(2048, 3)];
    for r in &records {
        store.put_record(r).unwrap();
    }
    store.publish(files).unwrap();
    records
}

/// Damages the journal, opens it again and expects every published record.
fn nothing_published_is_lost(damage: impl FnOnce(&Path), set_aside: bool) {
    let (_tmp, dir, files) = folder();
    let records = published(&dir, &files);
    // sled's threads let go of the files shortly after the drop.
    drop(Store::open(&dir).unwrap());
    damage(&dir.store_path());
    let store = Store::open(&dir).unwrap();
    assert_eq!(sorted(store.records().unwrap()), records);
    store.put_record(&record(4096, 1)).unwrap();
    let aside = std::fs::read_dir(dir.base())
        .unwrap()
        .flatten()
        .any(|e| e.file_name().to_string_lossy().starts_with("store.corrupt-"));
    assert_eq!(aside, set_aside);
}

#[test]
fn a_journal_full_of_garbage_is_set_aside() {
    nothing_published_is_lost(
        |store| {
            for name in ["db", "conf"] {
                let path = store.join(name);
                let length = path.metadata().map(|m| m.len()).unwrap_or(4096).max(4096) as usize;
                std::fs::write(path, vec![0xa5; length]).unwrap();
            }
        },
        true,
    );
}

#[test]
fn a_journal_that_is_not_at_fault_stays_where_it_is() {
    let (_tmp, dir, _) = folder();
    let store = Store::open(&dir).unwrap();
    store.put_record(&record(128, 1)).unwrap();
    drop(store);
    // What sled makes of a process that may start no more threads, whatever it opens.
    let refuse = |base: &Folder| {
        std::fs::create_dir_all(base.path().join("store")).unwrap();
        Err(OpenFailure::Unreadable("sled panicked while opening it".into()))
    };
    let e = open_or_replace_by(&dir.folder().unwrap(), refuse).unwrap_err().to_string();
    assert!(e.contains("limits of memory and threads"), "{e}");
    let aside = std::fs::read_dir(dir.base()).unwrap().flatten().filter(|e| e.file_name() != "store");
    assert!(aside.into_iter().all(|e| !e.file_name().to_string_lossy().contains("corrupt")));
    assert_eq!(Store::open(&dir).unwrap().records().unwrap(), [record(128, 1)]);
}

#[test]
fn a_file_in_the_place_of_the_journal_is_set_aside() {
    nothing_published_is_lost(
        |store| {
            std::fs::remove_dir_all(store).unwrap();
            std::fs::write(store, "no folder").unwrap();
        },
        true,
    );
}

#[test]
fn what_is_no_file_in_the_journal_is_set_aside_with_it() {
    type Plant = fn(&Path);
    let pipe: Plant =
        |path| rustix::fs::mknodat(rustix::fs::CWD, path, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    let folder: Plant = |path| std::fs::create_dir(path).unwrap();
    let hard_link: Plant = |path| {
        let other = path.parent().unwrap().with_file_name("another");
        std::fs::write(&other, "of somebody's").unwrap();
        std::fs::hard_link(&other, path).unwrap();
    };
    for plant in [pipe, folder, hard_link] {
        for name in ["db", "conf", "snap.0000000000000001"] {
            let planted = |store: &Path| {
                let _ = std::fs::remove_file(store.join(name));
                plant(&store.join(name));
            };
            nothing_published_is_lost(planted, true);
        }
    }
    nothing_published_is_lost(
        |store| {
            std::fs::remove_dir_all(store.join("blobs")).unwrap();
            std::fs::write(store.join("blobs"), "no folder").unwrap();
        },
        true,
    );
}

#[test]
fn an_unfinished_sled_snapshot_is_swept_away() {
    nothing_published_is_lost(
        |store| std::fs::write(store.join("snap.00000000000000FF.generating"), b"half").unwrap(),
        false,
    );
}

#[test]
fn a_journal_that_lost_everything_without_a_word_is_filled_from_the_snapshot() {
    nothing_published_is_lost(|store| std::fs::remove_dir_all(store).unwrap(), false);
}

#[test]
fn entries_that_cannot_be_decoded_are_skipped() {
    let (_tmp, dir, _) = folder();
    let store = Store::open(&dir).unwrap();
    let good = record(128, 1);
    store.put_record(&good).unwrap();
    let mut future = seal_value(&record(512, 2));
    future[0] = 200;
    store.journal().records.insert([1u8; 32], future).unwrap();
    let mut flipped = seal_value(&record(512, 2));
    *flipped.last_mut().unwrap() ^= 1;
    store.journal().records.insert([2u8; 32], flipped).unwrap();
    store.journal().records.insert([3u8; 32], b"short").unwrap();
    // Intact, but filed under a key that is not its own.
    store.journal().records.insert([4u8; 32], seal_value(&record(512, 2))).unwrap();
    assert_eq!(store.records().unwrap(), [good]);
}

#[test]
fn an_unwritable_folder_is_an_error_that_names_it() {
    let tmp = tempfile::tempdir().unwrap();
    let file = tmp.path().join("not-a-folder");
    std::fs::write(&file, b"x").unwrap();
    let e = Store::open(&CacheDir::at(&file)).unwrap_err().to_string();
    assert!(e.contains("not-a-folder") && e.contains("FLASHTUNE_CACHE"), "{e}");
}

#[test]
fn a_snapshot_that_cannot_be_read_for_a_while_is_not_replaced_and_loses_nothing() {
    let (_tmp, dir, files) = folder();
    let store = Store::open(&dir).unwrap();
    files.put(&artifact(1)).unwrap();
    store.put_record(&record(128, 1)).unwrap();
    let snapshot = store.publish(&files).unwrap();
    drop(store);
    // The journal is gone and the kernel too, and the file system fails.
    std::fs::remove_dir_all(dir.store_path()).unwrap();
    std::fs::remove_dir_all(dir.artifacts_path()).unwrap();
    crate::testing::make_unreadable(Some(&snapshot));
    let store = Store::open(&dir).unwrap();
    store.put_record(&record(512, 2)).unwrap();
    assert!(matches!(store.publish(&files), Err(Error::Io { .. })));
    // It is back.
    crate::testing::make_unreadable(None);
    store.publish(&files).unwrap();
    let published = Bundle::map(&snapshot).unwrap();
    assert_eq!((published.record_count(), published.artifact_count()), (2, 1));
}

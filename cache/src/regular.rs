//! Opening a file that the user names: it may be anything, and a pipe in its place would hold up whoever opens it for
//! ever. What is below a cache folder is opened through [`crate::folder::Folder`].

use rustix::fs::OFlags;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Opens a file to read, waiting for nobody, and looks at it: a slow file system is not asked twice.
///
/// # Errors
/// Those of the system, and that it is no file.
pub(crate) fn open(path: &Path) -> io::Result<(File, Metadata)> {
    let file = OpenOptions::new().read(true).custom_flags(OFlags::NONBLOCK.bits() as i32).open(path)?;
    let metadata = file.metadata()?;
    match metadata.is_file() {
        true => Ok((file, metadata)),
        false => Err(io::Error::new(io::ErrorKind::InvalidData, "it is no file")),
    }
}

/// All of an open file, in as few reads as there can be: the last one finds the end.
///
/// # Errors
/// Those of the system.
pub(crate) fn read_all((file, metadata): &(File, Metadata)) -> io::Result<Vec<u8>> {
    let expected = usize::try_from(metadata.len()).map_or(0, |n| n.saturating_add(1));
    let mut bytes = Vec::new();
    // What the length says need not be true.
    bytes.try_reserve_exact(expected).map_err(|_| io::ErrorKind::OutOfMemory)?;
    // A limit, or else the file is looked at once more.
    file.take(u64::MAX).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// All of a file.
///
/// # Errors
/// As [`open`].
pub(crate) fn read(path: &Path) -> io::Result<Vec<u8>> {
    read_all(&open(path)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ArtifactFiles, Bundle, CacheDir, Claims, Key, Layers, Progress, Store};
    use std::os::unix::fs::DirBuilderExt;
    use std::time::Duration;

    #[test]
    fn a_pipe_or_a_folder_in_the_place_of_any_file_holds_nobody_up() {
        let key = crate::testing::artifact(1).recipe.key();
        for is_pipe in [true, false] {
            let tmp = tempfile::tempdir().unwrap();
            let dir = CacheDir::at(tmp.path().join("cache"));
            dir.create().unwrap();
            let files = ArtifactFiles::new(&dir);
            let job = dir.base().join("jobs").join(format!("{}.log", Key::of(b"job").hex()));
            let claim = dir.base().join("claims").join(key.hex());
            let lock = dir.base().join("store.lock");
            for path in [&dir.snapshot_path(), &files.path(&key), &job, &claim, &lock] {
                let parent = path.parent().unwrap();
                std::fs::DirBuilder::new().mode(0o700).recursive(true).create(parent).unwrap();
                match is_pipe {
                    true => {
                        rustix::fs::mknodat(rustix::fs::CWD, path, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap()
                    }
                    false => std::fs::create_dir(path).unwrap(),
                }
            }
            assert!(open(&dir.snapshot_path()).is_err() && read(&dir.snapshot_path()).is_err());
            assert!(Bundle::map(&dir.snapshot_path()).is_err());
            assert!(files.get(&key).is_none());
            assert_eq!(Layers::open(&dir, &[], None).unwrap().records().len(), 0);
            assert_eq!(Progress::open(&dir, &Key::of(b"job")).known(), 0);
            // Work is done without a claim where none can be had.
            let turn = Claims::new(&dir).wait::<()>(&key, Duration::ZERO, || None);
            assert!(matches!(turn, crate::Turn::Mine(_)), "pipe: {is_pipe}");
            // The tuner sets aside what is in its way.
            let store = Store::open(&dir).unwrap();
            store.publish(&files).unwrap();
            assert!(dir.snapshot_path().is_file() && lock.is_file());
            let names: Vec<_> = std::fs::read_dir(dir.base()).unwrap().flatten().map(|e| e.file_name()).collect();
            let aside = |name: &str| names.iter().any(|n| n.to_string_lossy().starts_with(&format!("{name}.corrupt-")));
            assert!(aside("snapshot.ftb") && aside("store.lock"), "{names:?}");
        }
    }
}

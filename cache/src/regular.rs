//! Opening what should be a file and may have become anything: a pipe in its place would hold up whoever opens it for ever.

use rustix::fs::OFlags;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Opens a file, waiting for nobody.
///
/// # Errors
/// Those of the system, and that it is no file.
pub(crate) fn open_with(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    looked_at(options, path).map(|(file, _)| file)
}

/// With what was seen of it: a slow file system is not asked twice.
fn looked_at(options: &mut OpenOptions, path: &Path) -> io::Result<(File, Metadata)> {
    let file = options.custom_flags(OFlags::NONBLOCK.bits() as i32).open(path)?;
    let metadata = file.metadata()?;
    match metadata.is_file() {
        true => Ok((file, metadata)),
        false => Err(io::Error::new(io::ErrorKind::InvalidData, "it is no file")),
    }
}

/// Opens a file to read, and looks at it.
///
/// # Errors
/// As [`open_with`].
pub(crate) fn open(path: &Path) -> io::Result<(File, Metadata)> {
    looked_at(OpenOptions::new().read(true), path)
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
/// As [`open_with`].
pub(crate) fn read(path: &Path) -> io::Result<Vec<u8>> {
    read_all(&open(path)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ArtifactFiles, Bundle, CacheDir, Claims, Key, Layers, Progress, Store};
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
            for path in [&dir.snapshot_path(), &files.path(&key), &job, &claim, &dir.lock_path()] {
                std::fs::create_dir_all(path.parent().unwrap()).unwrap();
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
            assert!(matches!(Store::open(&dir), Err(crate::Error::Io { .. })));
        }
    }
}

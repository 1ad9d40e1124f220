//! Writing files so that a reader sees the old one or the new one, whole, whatever happens.

use crate::{Error, Result, temporary_prefix};
use std::io::{BufWriter, Seek, Write};
use std::path::Path;

/// What the names of unfinished files start with.
pub(crate) const TEMPORARY: &str = ".flashtune-";

/// What [`publish_file`] writes to.
pub(crate) trait Sink: Write + Seek {}
impl<T: Write + Seek> Sink for T {}

/// Writes a file beside its final place, in a folder that exists, syncs it, renames it over the old one and syncs the
/// folder. Its readers are whoever may enter the folder.
///
/// `fill` may fail with its own error; then nothing is left behind.
pub(crate) fn publish_file(path: &Path, fill: impl FnOnce(&mut dyn Sink) -> Result<()>) -> Result<()> {
    let io = |action| {
        move |source| Error::Io {
            action,
            path: path.to_path_buf(),
            source,
            remedy: "check permissions and free space, or set FLASHTUNE_CACHE to another folder",
        }
    };
    // As root, a rename would put a file in the place of /dev/null.
    if std::fs::metadata(path).is_ok_and(|there| !there.is_file()) {
        let source = std::io::Error::new(std::io::ErrorKind::InvalidInput, "it is there and is no file");
        return Err(Error::Io { action: "replace", path: path.to_path_buf(), source, remedy: "name a file" });
    }
    // A bare file name has an empty parent, which means the current folder.
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut builder = tempfile::Builder::new();
    let prefix = temporary_prefix(TEMPORARY);
    builder.prefix(&prefix);
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o644));
    let temporary = builder.tempfile_in(folder).map_err(io("create a file beside"))?;
    let mut writer = BufWriter::new(temporary);
    fill(&mut writer)?;
    let temporary = writer.into_inner().map_err(|e| io("write")(e.into_error()))?;
    temporary.as_file().sync_all().map_err(io("sync"))?;
    temporary.persist(path).map_err(|e| io("rename a file to")(e.error))?;
    // The rename itself lasts once the folder is on disk. Some file systems cannot sync folders; the file is whole
    // in any case, so that is no failure.
    if let Ok(folder) = std::fs::File::open(folder) {
        let _ = folder.sync_all();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_write_leaves_the_old_file_and_no_litter() {
        let tmp = tempfile::tempdir().unwrap();
        let path = tmp.path().join("f");
        publish_file(&path, |w| w.write_all(b"old").map_err(|e| panic!("{e}"))).unwrap();
        let failed = publish_file(&path, |w| {
            w.write_all(b"half").unwrap();
            Err(Error::NoFolder)
        });
        assert!(matches!(failed, Err(Error::NoFolder)));
        assert_eq!(std::fs::read(&path).unwrap(), b"old");
        assert_eq!(std::fs::read_dir(tmp.path()).unwrap().count(), 1);
    }
    #[test]
    #[cfg(unix)]
    fn what_is_no_file_is_not_replaced_by_one() {
        use std::os::unix::fs::FileTypeExt;
        let tmp = tempfile::tempdir().unwrap();
        let path = tmp.path().join("socket");
        let _socket = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let e = publish_file(&path, |_| Ok(())).unwrap_err().to_string();
        assert!(e.contains("socket") && e.contains("name a file"), "{e}");
        assert!(path.metadata().unwrap().file_type().is_socket());
    }
}

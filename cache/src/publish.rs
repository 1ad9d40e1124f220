//! Writing files so that a reader sees the old one or the new one, whole, whatever happens.

use crate::folder::Folder;
use crate::layout::TEMPORARY;
use crate::{Error, Result};
use std::fs::File;
use std::io::{BufWriter, Seek, Write};
use std::path::Path;

/// What [`publish_file`] writes to.
pub(crate) trait Sink: Write + Seek {}
impl<T: Write + Seek> Sink for T {}

/// Writes a file of the user's beside its final place, in a folder that exists, syncs it, renames it over the old one
/// and syncs the folder. Its readers are whoever may enter the folder.
///
/// `fill` may fail with its own error; then nothing is left behind.
pub(crate) fn publish_file(path: &Path, fill: impl FnOnce(&mut dyn Sink) -> Result<()>) -> Result<()> {
    // As root, a rename would put a file in the place of /dev/null.
    if std::fs::metadata(path).is_ok_and(|there| !there.is_file()) {
        return Err(no_file(path));
    }
    // A bare file name has an empty parent, which means the current folder.
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let name = path.file_name().ok_or_else(|| no_file(path))?;
    Folder::follow(folder)?.replace(Path::new(name), fill)
}

fn no_file(path: &Path) -> Error {
    let source = std::io::Error::new(std::io::ErrorKind::InvalidInput, "it is there and is no file");
    Error::Io { action: "replace", path: path.to_path_buf(), source, remedy: "name a file" }
}

impl Folder {
    /// Writes a file of this program's: as [`publish_file`], but never over a link.
    ///
    /// # Errors
    /// [`Error::Link`]; [`Error::Io`], also when what has the name is no file.
    pub(crate) fn publish(&self, name: &str, fill: impl FnOnce(&mut dyn Sink) -> Result<()>) -> Result<()> {
        match self.look(name)? {
            Some(seen) if seen.is_link() => Err(Error::Link { path: self.path().join(name) }),
            Some(seen) if !seen.is_file() => Err(no_file(&self.path().join(name))),
            _ => self.replace(Path::new(name), fill),
        }
    }

    fn replace(&self, name: &Path, fill: impl FnOnce(&mut dyn Sink) -> Result<()>) -> Result<()> {
        let io = |action| {
            move |source| Error::Io {
                action,
                path: self.path().join(name),
                source,
                remedy: "check permissions and free space, or set FLASHTUNE_CACHE to another folder",
            }
        };
        let (file, unfinished) = Unfinished::new(self)?;
        let mut writer = BufWriter::new(file);
        fill(&mut writer)?;
        let file = writer.into_inner().map_err(|e| io("write")(e.into_error()))?;
        file.sync_all().map_err(io("sync"))?;
        unfinished.finish(name)?;
        // The rename itself lasts once the folder is on disk.
        self.sync();
        Ok(())
    }
}

/// A file that has no final name yet; it goes unless it gets one.
pub(crate) struct Unfinished<'a> {
    folder: &'a Folder,
    name: Option<String>,
}

impl<'a> Unfinished<'a> {
    pub(crate) fn new(folder: &'a Folder) -> Result<(File, Self)> {
        let mut tries = 0;
        loop {
            let name = crate::temporary::name(TEMPORARY);
            tries += 1;
            match folder.create_new(&name, 0o644) {
                Ok(file) => return Ok((file, Self { folder, name: Some(name) })),
                Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::AlreadyExists && tries < 99 => {}
                Err(e) => return Err(e),
            }
        }
    }

    fn finish(mut self, name: &Path) -> Result<()> {
        self.folder.rename(self.name.as_deref().unwrap_or_default(), name)?;
        self.name = None;
        Ok(())
    }
}

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        if let Some(name) = &self.name {
            self.folder.remove(name);
        }
    }
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

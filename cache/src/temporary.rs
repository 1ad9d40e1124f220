//! Folders for temporary files, below one that everybody may write to.

use crate::folder::Folder;
use crate::{Error, Result};
use std::hash::{BuildHasher, Hasher};
use std::io::{Read, Write};
use std::path::Path;

/// The start of this process's temporary names of a kind.
pub(crate) fn prefix(kind: &str) -> String {
    format!("{kind}{}-", std::process::id())
}

/// A temporary name of a kind that nobody has guessed: `<kind><pid>-<random>`.
pub(crate) fn name(kind: &str) -> String {
    // The standard library keys its hash maps with the system's random numbers, with others each time.
    let random = std::collections::hash_map::RandomState::new().build_hasher().finish();
    format!("{}{random:016x}", prefix(kind))
}

/// A folder of this user's alone that goes with all that is its own in it: plain files of this user with names that
/// begin with one of a few. Whatever else somebody put there stays, and the folder with it.
#[derive(Debug)]
pub struct TemporaryFolder {
    parent: Folder,
    folder: Folder,
    name: String,
    /// What the names in it begin with.
    own: &'static str,
}

impl TemporaryFolder {
    /// Makes one of a kind in a folder: `<kind><pid>-<random>`. In it, names that begin with `own` are this program's.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn new(parent: &Path, kind: &str, own: &'static str) -> Result<Self> {
        let parent = Folder::follow(parent)?;
        let mut tries = 0;
        loop {
            let name = name(kind);
            tries += 1;
            match parent.create_folder(&name) {
                Ok(folder) => return Ok(Self { parent, folder, name, own }),
                Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::AlreadyExists && tries < 99 => {}
                Err(e) => return Err(e),
            }
        }
    }

    /// Where it is, for the commands that run in it.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Writes a new file in it.
    ///
    /// # Errors
    /// [`Error::Io`], also when there is something of that name.
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let mut file = self.folder.create_new(name, 0o600)?;
        file.write_all(bytes).map_err(|source| self.failed("write", name, source))
    }

    /// Reads a file in it.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Link`].
    pub fn read(&self, name: &str) -> Result<Vec<u8>> {
        let (mut file, _) = self.folder.read(name)?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(|source| self.failed("read", name, source))?;
        Ok(bytes)
    }

    fn failed(&self, action: &'static str, name: &str, source: std::io::Error) -> Error {
        let path = self.folder.path().join(name);
        Error::Io { action, path, source, remedy: "set TMPDIR to a folder with space that can be written" }
    }
}

impl Drop for TemporaryFolder {
    fn drop(&mut self) {
        if empty(&self.folder, self.own) {
            self.parent.remove_empty(&self.name);
        }
    }
}

/// Removes the plain files of this user whose names begin so. Whether nothing else is left.
pub(crate) fn empty(folder: &Folder, own: &str) -> bool {
    let Ok(names) = folder.names() else { return false };
    let others = names.iter().filter(|(name, _)| !(name.starts_with(own) && folder.remove(name)));
    others.count() == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn temporary_folders_go_with_their_own_files_alone() {
        let tmp = tempfile::tempdir().unwrap();
        let make = || TemporaryFolder::new(tmp.path(), "kind-", "kernel.").unwrap();
        let folder = make();
        folder.write("kernel.c", b"int x;").unwrap();
        assert!(folder.write("kernel.c", b"again").is_err() && folder.read("kernel.c").unwrap() == b"int x;");
        let path = folder.path().to_owned();
        assert!(path.file_name().unwrap().to_str().unwrap().starts_with(&prefix("kind-")));
        drop(folder);
        assert!(!path.exists());
        let folder = make();
        std::os::unix::fs::symlink(tmp.path(), folder.path().join("kernel.so")).unwrap();
        std::fs::write(folder.path().join("notes"), b"mine").unwrap();
        assert!(matches!(folder.read("kernel.so"), Err(Error::Link { .. })));
        let path = folder.path().to_owned();
        drop(folder);
        assert!(path.join("kernel.so").symlink_metadata().is_ok() && path.join("notes").exists());
    }
}

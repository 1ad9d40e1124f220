//! Where results are kept.
//!
//! ```text
//! <root>/v7/snapshot.ftb        what readers map: an immutable bundle, replaced by rename
//! <root>/v7/artifacts/ab/..art  compiled kernels by recipe key
//! <root>/v7/claims/            who compiles or tunes what at the moment; empty when nobody does
//! <root>/v7/jobs/              what tunings that were cut short had done
//! <root>/v7/store/              the tuner's journal (sled)
//! <root>/v7/store.lock          held while a tuner has the journal
//! ```
//!
//! Resolving a folder touches nothing: reading must work on a read-only mount and without a home. Only
//! [`CacheDir::create`] writes, and only those who store something call it.

use crate::{Error, Result};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

/// The variable that names the root folder.
pub const CACHE_VARIABLE: &str = "FLASHTUNE_CACHE";

/// The layout's version, raised with every format inside: what another version of flashtune has lives beside this, and
/// neither replaces the other's.
const LAYOUT: &str = "v7";

/// The folder of one user's results.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheDir {
    root: PathBuf,
    base: PathBuf,
}

impl CacheDir {
    /// The folder to use: the explicit one, else `FLASHTUNE_CACHE`, else `XDG_CACHE_HOME/flashtune`, else
    /// `HOME/.cache/flashtune`. Creates nothing.
    ///
    /// # Errors
    /// [`Error::NoFolder`] when none of them is set.
    pub fn resolve(explicit: Option<&Path>) -> Result<Self> {
        Self::resolve_with(explicit, |name| std::env::var_os(name).map(PathBuf::from))
    }

    /// [`CacheDir::resolve`] with the environment as a function.
    fn resolve_with(explicit: Option<&Path>, env: impl Fn(&str) -> Option<PathBuf>) -> Result<Self> {
        // An empty variable counts as unset; the XDG rules also ignore relative paths.
        let var = |name: &str| env(name).filter(|p| !p.as_os_str().is_empty());
        explicit
            .map(Path::to_path_buf)
            .or_else(|| var(CACHE_VARIABLE))
            .or_else(|| var("XDG_CACHE_HOME").filter(|p| p.is_absolute()).map(|p| p.join("flashtune")))
            .or_else(|| var("HOME").map(|p| p.join(".cache").join("flashtune")))
            .map(Self::at)
            .ok_or(Error::NoFolder)
    }

    /// The folder with this root. Creates nothing.
    pub fn at(root: impl Into<PathBuf>) -> Self {
        let root = root.into();
        Self { base: root.join(LAYOUT), root }
    }

    /// The root, without the layout's version.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The folder that holds everything of this layout.
    pub fn base(&self) -> &Path {
        &self.base
    }

    /// The bundle that readers map.
    pub fn snapshot_path(&self) -> PathBuf {
        self.base.join("snapshot.ftb")
    }

    /// The folder of compiled kernels.
    pub fn artifacts_path(&self) -> PathBuf {
        self.base.join("artifacts")
    }

    /// The folder of the tuner's journal.
    pub fn store_path(&self) -> PathBuf {
        self.base.join("store")
    }

    /// The file whose lock says that a tuner has the journal.
    pub(crate) fn lock_path(&self) -> PathBuf {
        self.base.join("store.lock")
    }

    /// Makes the folder, readable and writable by its owner alone: what lies in it is loaded and run.
    ///
    /// # Errors
    /// [`Error::Io`] when it cannot be made, [`Error::Exposed`] when it is there and others may write to it.
    pub fn create(&self) -> Result<()> {
        create_private(&self.base)?;
        self.check_private()
    }

    /// Whether only this user, or root, can have put something into the folder. One that is not there is private.
    ///
    /// # Errors
    /// [`Error::Exposed`] says who else could.
    pub fn check_private(&self) -> Result<()> {
        // Whoever may write to a parent can put another folder here, but not one that belongs to this user.
        match std::fs::metadata(&self.base) {
            Ok(metadata) => {
                check_owner(&self.base, metadata.uid(), metadata.mode(), rustix::process::geteuid().as_raw())
            }
            Err(_) => Ok(()),
        }
    }
}

fn check_owner(path: &Path, owner: u32, mode: u32, user: u32) -> Result<()> {
    let problem = if owner != user && owner != 0 {
        format!("belongs to the user {owner}")
    } else if mode & 0o022 != 0 {
        format!("can be written by others (mode {:o})", mode & 0o777)
    } else {
        return Ok(());
    };
    Err(Error::Exposed { path: path.to_path_buf(), problem })
}

/// Makes a folder and its missing parents with mode 0700.
pub(crate) fn create_private(path: &Path) -> Result<()> {
    let mut builder = std::fs::DirBuilder::new();
    builder.recursive(true);
    builder.mode(0o700);
    builder.create(path).map_err(|source| Error::Io {
        action: "create the folder",
        path: path.to_path_buf(),
        source,
        remedy: "make it writable or set FLASHTUNE_CACHE to a folder that is",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(explicit: Option<&str>, vars: &[(&str, &str)]) -> Result<CacheDir> {
        CacheDir::resolve_with(explicit.map(Path::new), |name| {
            vars.iter().find(|(k, _)| *k == name).map(|(_, v)| PathBuf::from(v))
        })
    }

    #[test]
    fn the_layout_is_raised_with_the_formats_inside() {
        let formats = (crate::bundle::FORMAT, crate::store::SCHEMA);
        assert_eq!((LAYOUT, formats), ("v7", (10, 10)), "a new format needs a new layout");
    }

    #[test]
    fn the_first_named_folder_wins() {
        let all = [("FLASHTUNE_CACHE", "/c"), ("XDG_CACHE_HOME", "/x"), ("HOME", "/h")];
        assert_eq!(resolve(Some("/e"), &all).unwrap().root(), Path::new("/e"));
        assert_eq!(resolve(None, &all).unwrap().root(), Path::new("/c"));
        assert_eq!(resolve(None, &all[1..]).unwrap().root(), Path::new("/x/flashtune"));
        assert_eq!(resolve(None, &all[2..]).unwrap().snapshot_path(), Path::new("/h/.cache/flashtune/v7/snapshot.ftb"));
        // Empty variables are unset ones; a relative XDG folder is ignored, as its specification says.
        let odd = [("FLASHTUNE_CACHE", ""), ("XDG_CACHE_HOME", "x"), ("HOME", "/h")];
        assert_eq!(resolve(None, &odd).unwrap().root(), Path::new("/h/.cache/flashtune"));
    }

    #[test]
    fn a_missing_home_is_an_error_that_tells_the_remedy() {
        let e = resolve(None, &[]).unwrap_err().to_string();
        assert!(e.contains("FLASHTUNE_CACHE"), "{e}");
    }

    #[test]
    fn a_folder_of_somebody_else_or_open_to_others_is_exposed() {
        let problem = |owner, mode| match check_owner(Path::new("/c"), owner, mode, 1000) {
            Ok(()) => None,
            Err(Error::Exposed { problem, .. }) => Some(problem),
            Err(e) => panic!("{e}"),
        };
        // One's own, also where others may read; what root set up for all.
        for (owner, mode) in [(1000, 0o700), (1000, 0o755), (0, 0o755)] {
            assert_eq!(problem(owner, mode), None);
        }
        assert!(problem(1001, 0o700).unwrap().contains("1001"));
        assert!(problem(1000, 0o770).unwrap().contains("770") && problem(0, 0o777).unwrap().contains("777"));
    }

    #[test]
    fn folders_are_private_and_made_on_demand_only() {
        use std::os::unix::fs::PermissionsExt;
        let tmp = tempfile::tempdir().unwrap();
        let dir = CacheDir::resolve(Some(&tmp.path().join("a/b"))).unwrap();
        assert!(!dir.root().exists());
        dir.create().unwrap();
        assert_eq!(dir.base().metadata().unwrap().permissions().mode() & 0o777, 0o700);
        // A file where the folder should be: a typed error, with the path.
        let file = tmp.path().join("file");
        std::fs::write(&file, b"x").unwrap();
        let e = CacheDir::at(&file).create().unwrap_err().to_string();
        assert!(e.contains("file") && e.contains("FLASHTUNE_CACHE"), "{e}");
    }
}

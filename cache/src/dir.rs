//! Where results are kept.
//!
//! ```text
//! <root>/v7/snapshot.ftb        what readers map: an immutable bundle, replaced by rename
//! <root>/v7/artifacts/ab/..art  compiled kernels by recipe key
//! <root>/v7/claims/            who compiles or tunes what at the moment; empty when nobody does
//! <root>/v7/jobs/              what tunings that were cut short had done
//! <root>/v7/levels/            which instructions this user's cards have shown to run
//! <root>/v7/store/              the tuner's journal (sled)
//! <root>/v7/store.lock          held while a tuner has the journal
//! ```
//!
//! Resolving a folder touches nothing: reading must work on a read-only mount and without a home. Only
//! [`CacheDir::create`] writes, and only those who store something call it.
//!
//! The root is the user's and may be a link. It is resolved when the folder below it is first needed; from then on
//! everything goes through the open handle, which clones share, and no link below it is followed.

use crate::folder::{Folder, Seen};
use crate::layout::{ARTIFACTS, CLAIMS, FILES, FOLDERS, JOBS, LEVELS, SNAPSHOT, STORE, is_claim, is_job, is_level};
use crate::publish::Unfinished;
use crate::{Bundle, Error, Result};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// The variable that names the root folder.
pub const CACHE_VARIABLE: &str = "FLASHTUNE_CACHE";

/// The layout's version, raised with every format inside: what another version of flashtune has lives beside this, and
/// neither replaces the other's.
const LAYOUT: &str = "v7";

/// The folder of one user's results.
#[derive(Clone)]
pub struct CacheDir {
    root: PathBuf,
    base: PathBuf,
    /// Whether a folder that others may write to is used all the same.
    exposed_too: bool,
    /// The base folder, once it was needed.
    held: Arc<Mutex<Option<Arc<Folder>>>>,
}

/// What tells one published snapshot from another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SnapshotId(Seen);

impl std::fmt::Debug for CacheDir {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CacheDir").field("root", &self.root).finish()
    }
}

impl PartialEq for CacheDir {
    fn eq(&self, other: &Self) -> bool {
        self.root == other.root
    }
}

impl Eq for CacheDir {}

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
        Self { base: root.join(LAYOUT), root, exposed_too: false, held: Arc::default() }
    }

    /// The same folder, used even where others may write to it: their code is as good as unsigned bundles. It
    /// resolves its root anew.
    pub(crate) fn exposed_too(&self) -> Self {
        Self { exposed_too: true, ..Self::at(self.root.clone()) }
    }

    /// The root, without the layout's version.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The folder that holds everything of this layout.
    pub fn base(&self) -> &Path {
        &self.base
    }

    /// Where the bundle that readers map is.
    pub fn snapshot_path(&self) -> PathBuf {
        self.base.join(SNAPSHOT)
    }

    /// Where the folder of compiled kernels is.
    pub fn artifacts_path(&self) -> PathBuf {
        self.base.join(ARTIFACTS)
    }

    /// Where the folder of the tuner's journal is.
    pub fn store_path(&self) -> PathBuf {
        self.base.join(STORE)
    }

    /// Makes the folder, readable and writable by its owner alone: what lies in it is loaded and run.
    ///
    /// # Errors
    /// [`Error::Io`] when it cannot be made, [`Error::Exposed`] when it, or a folder in it, is there and others may
    /// write to it, [`Error::Link`] when a link lies where a folder or file of the layout belongs.
    pub fn create(&self) -> Result<()> {
        self.created().map(drop)
    }

    /// [`CacheDir::create`], and the open folder.
    pub(crate) fn created(&self) -> Result<Arc<Folder>> {
        let base = match self.folder() {
            Ok(base) if !base.is_gone() => base,
            Err(e) if !e.is_missing() => return Err(unusable(e)),
            _ => {
                create_private(&self.base)?;
                self.anew().map_err(unusable)?
            }
        };
        check_owner(base.path(), &base.seen()?)?;
        for (name, is_folder) in FOLDERS.map(|f| (f, true)).into_iter().chain(FILES.map(|f| (f, false))) {
            let path = || base.path().join(name);
            match base.look(name)? {
                Some(seen) if seen.is_link() => return Err(Error::Link { path: path() }),
                Some(seen) if is_folder && seen.is_folder() => check_owner(&path(), &seen)?,
                _ => {}
            }
        }
        for (folder, is_own) in [(CLAIMS, is_claim as fn(&str) -> bool), (JOBS, is_job), (LEVELS, is_level)] {
            // Work is done without claims and progress where there can be none, but not over a link.
            let names = base.open(folder).and_then(|folder| folder.own_names(is_own));
            if let Err(e @ Error::Link { .. }) = names {
                return Err(e);
            }
        }
        Ok(base)
    }

    /// Whether only this user, or root, can have put something into the folder. One that is not there is private.
    ///
    /// # Errors
    /// [`Error::Exposed`] says who else could; [`Error::Link`] that another folder may be in its place.
    pub fn check_private(&self) -> Result<()> {
        let held = self.held.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let looked_at = match held {
            Some(base) => base.seen().and_then(|seen| check_owner(&self.base, &seen)),
            None => match self.folder() {
                Ok(base) if self.exposed_too => base.seen().and_then(|seen| check_owner(&self.base, &seen)),
                opened => opened.map(drop),
            },
        };
        match looked_at {
            Err(e @ (Error::Exposed { .. } | Error::Link { .. })) => Err(e),
            // What cannot be looked at is not read either.
            _ => Ok(()),
        }
    }

    /// Whether a folder can be here: nothing else has its name or that of a parent. One that is not there yet can be.
    pub(crate) fn check_place(&self) -> Result<()> {
        match self.folder() {
            Err(e) if e.is_no_folder() => Err(unusable(e)),
            _ => Ok(()),
        }
    }

    /// The open base folder, private unless that does not matter.
    pub(crate) fn folder(&self) -> Result<Arc<Folder>> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(folder) = &*held {
            return Ok(folder.clone());
        }
        let folder = Folder::open_at(&self.base)?;
        // Whoever may write to a parent can put another folder here, but not one that belongs to this user.
        if !self.exposed_too {
            check_owner(&self.base, &folder.seen()?)?;
        }
        Ok(held.insert(Arc::new(folder)).clone())
    }

    /// The folder that has the name now, where the one before was removed.
    fn anew(&self) -> Result<Arc<Folder>> {
        *self.held.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.folder()
    }

    /// Does something in the base folder, and once more where that turns out to have been removed and made anew.
    pub(crate) fn within<T>(&self, mut what: impl FnMut(&Folder) -> Result<T>) -> Result<T> {
        let folder = self.folder()?;
        match what(&folder) {
            Err(e) if e.is_missing() && folder.is_gone() => what(&*self.anew()?),
            other => other,
        }
    }

    /// [`CacheDir::within`], making the base folder if need be.
    pub(crate) fn within_created<T>(&self, mut what: impl FnMut(&Folder) -> Result<T>) -> Result<T> {
        match self.within(&mut what) {
            Err(e) if e.is_missing() => {
                create_private(&self.base)?;
                what(&*self.anew()?)
            }
            other => other,
        }
    }

    /// Whether a file can be made in the folder, which must be there; nothing stays of it.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Exposed`], [`Error::Link`].
    pub fn check_writable(&self) -> Result<()> {
        self.within(|base| Unfinished::new(base).map(drop))
    }

    /// Whether kernels may have been kept in the folder.
    pub fn has_kernels(&self) -> bool {
        self.within(|base| base.look(ARTIFACTS)).is_ok_and(|there| there.is_some())
    }

    /// Which snapshot is published now; `None` where there is none that can be read.
    pub fn snapshot_id(&self) -> Option<SnapshotId> {
        let seen = self.within(|base| base.look(SNAPSHOT)).ok().flatten()?;
        seen.is_file().then_some(SnapshotId(seen))
    }

    /// The published snapshot, mapped; `None` when there is none.
    ///
    /// # Errors
    /// Those of [`Bundle::map`], and [`Error::Link`].
    pub fn snapshot(&self) -> Result<Option<Bundle>> {
        match self.within(|base| base.read(SNAPSHOT)) {
            Ok(file) => Bundle::map_file(&file, &self.snapshot_path()).map(Some),
            Err(e) if e.is_missing() => Ok(None),
            Err(e) => Err(e),
        }
    }
}

/// What is said where the folder itself cannot be opened for those who want to write in it.
fn unusable(e: Error) -> Error {
    match e {
        Error::Io { path, source, .. } => Error::Io { action: "open the folder", path, source, remedy: UNWRITABLE },
        other => other,
    }
}

/// Whether only this user, or root, can put something into a folder.
pub(crate) fn check_owner(path: &Path, seen: &Seen) -> Result<()> {
    check_owner_is(path, seen.owner, seen.mode, rustix::process::geteuid().as_raw())
}

fn check_owner_is(path: &Path, owner: u32, mode: u32, user: u32) -> Result<()> {
    let (problem, remedy) = if owner != user && owner != 0 {
        (format!("belongs to the user {owner}"), "remove it".to_owned())
    } else if mode & 0o022 != 0 {
        let problem = format!("can be written by others (mode {:o})", mode & 0o777);
        (problem, format!("run `chmod go-w {}` if nobody else put anything there", path.display()))
    } else {
        return Ok(());
    };
    Err(Error::Exposed { path: path.to_path_buf(), problem, remedy })
}

const UNWRITABLE: &str = "make it writable or set FLASHTUNE_CACHE to a folder that is";

/// Makes the base folder and its missing parents with mode 0700.
fn create_private(path: &Path) -> Result<()> {
    let mut builder = std::fs::DirBuilder::new();
    builder.recursive(true);
    builder.mode(0o700);
    match builder.create(path) {
        Ok(()) => Ok(()),
        // Something else has the name, a link for instance: whoever opens it says what.
        Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => Ok(()),
        Err(source) => {
            Err(Error::Io { action: "create the folder", path: path.to_path_buf(), source, remedy: UNWRITABLE })
        }
    }
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
        let problem = |owner, mode| match check_owner_is(Path::new("/c"), owner, mode, 1000) {
            Ok(()) => None,
            Err(e @ Error::Exposed { .. }) => Some(e.to_string()),
            Err(e) => panic!("{e}"),
        };
        // One's own, also where others may read; what root set up for all.
        for (owner, mode) in [(1000, 0o700), (1000, 0o755), (0, 0o755)] {
            assert_eq!(problem(owner, mode), None);
        }
        assert!(problem(1001, 0o700).unwrap().contains("1001"));
        for (owner, mode) in [(1000, 0o770), (1000, 0o775), (0, 0o777)] {
            let told = problem(owner, mode).unwrap();
            assert!(told.contains(&format!("{mode:o}")) && told.contains("`chmod go-w /c`"), "{told}");
        }
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

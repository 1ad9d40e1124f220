//! A folder that is held open, and what is done in it by name: nothing that happens here leaves it.
//!
//! Every name is one component and no link is followed, so what another process puts in the place of a folder or a file
//! between two operations cannot lead elsewhere: the open handle decides, never a path that is looked at twice. A link
//! where something of this program's belongs is refused ([`Error::Link`]). Nothing is written into a file that has
//! another name or another owner, and nothing is removed but plain files of this user.

use crate::{Error, Result};
use rustix::fs::{AtFlags, Dir, FileType, FlockOperation, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;
use std::ffi::CStr;
use std::fs::{File, Metadata};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const REMEDY: &str = "check its permissions and the free space, or set FLASHTUNE_CACHE to another folder";
const PRIVATE: Mode = Mode::RWXU;
const FOLDER: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);
/// A pipe in the place of a file would hold up whoever opens it for ever.
const FILE: OFlags = OFlags::NOFOLLOW.union(OFlags::NONBLOCK).union(OFlags::CLOEXEC);

/// An open folder.
#[derive(Debug)]
pub(crate) struct Folder {
    file: File,
    /// Where it was found, for messages.
    path: PathBuf,
}

/// What is in the place of a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Seen {
    kind: FileType,
    pub owner: u32,
    pub mode: u32,
    pub links: u64,
    pub length: u64,
    /// Seconds and nanoseconds since the epoch.
    pub modified: (i64, u64),
    /// Device and number: what tells files apart.
    pub id: (u64, u64),
}

impl Seen {
    // The widths of the fields differ from system to system.
    #[allow(clippy::unnecessary_cast)]
    fn of(stat: &Stat) -> Self {
        Self {
            kind: FileType::from_raw_mode(stat.st_mode),
            owner: stat.st_uid,
            mode: stat.st_mode as u32 & 0o7777,
            links: stat.st_nlink as u64,
            length: stat.st_size as u64,
            modified: (stat.st_mtime as i64, stat.st_mtime_nsec as u64),
            id: (stat.st_dev as u64, stat.st_ino as u64),
        }
    }

    /// What was seen of an open file.
    pub(crate) fn of_file(metadata: &Metadata) -> Self {
        Self {
            kind: FileType::from_raw_mode(metadata.mode()),
            owner: metadata.uid(),
            mode: metadata.mode() & 0o7777,
            links: metadata.nlink(),
            length: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec() as u64),
            id: id_of(metadata),
        }
    }

    /// When it was changed; `None` where the file system's clock is before the epoch.
    pub(crate) fn changed(&self) -> Option<SystemTime> {
        let (seconds, nanos) = self.modified;
        UNIX_EPOCH.checked_add(Duration::new(u64::try_from(seconds).ok()?, u32::try_from(nanos).ok()?))
    }

    pub(crate) fn is_file(&self) -> bool {
        self.kind == FileType::RegularFile
    }

    pub(crate) fn is_folder(&self) -> bool {
        self.kind == FileType::Directory
    }

    pub(crate) fn is_link(&self) -> bool {
        self.kind == FileType::Symlink
    }

    /// Whether it belongs to this user.
    pub(crate) fn is_ours(&self) -> bool {
        self.owner == rustix::process::geteuid().as_raw()
    }

    /// Whether it is a file of this user that may be written into: no other name of it lies elsewhere.
    pub(crate) fn is_own_file(&self) -> bool {
        self.is_file() && self.is_ours() && self.links <= 1
    }
}

/// Device and number of an open file.
pub(crate) fn id_of(metadata: &Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}

impl Folder {
    /// The folder that a path of the user's leads to, through links where the user wants it so.
    pub(crate) fn follow(path: &Path) -> Result<Self> {
        let opened = rustix::fs::open(path, FOLDER, Mode::empty());
        opened.map(|fd| Self::of(fd, path.to_path_buf())).map_err(|e| failed("open the folder", path.to_path_buf(), e))
    }

    /// The same, where the last name is no link: the folders before it are the user's, this one is the program's.
    pub(crate) fn open_at(path: &Path) -> Result<Self> {
        match rustix::fs::open(path, FOLDER | OFlags::NOFOLLOW, Mode::empty()) {
            Ok(fd) => Ok(Self::of(fd, path.to_path_buf())),
            Err(e) => Err(refused(e, rustix::fs::CWD, path, path.to_path_buf())),
        }
    }

    fn of(fd: OwnedFd, path: PathBuf) -> Self {
        Self { file: File::from(fd), path }
    }

    /// Where it was found: for messages, and never to open anything.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// What the folder itself is.
    pub(crate) fn seen(&self) -> Result<Seen> {
        let stat = rustix::fs::fstat(&self.file).map_err(|e| failed("look at the folder", self.path.clone(), e))?;
        Ok(Seen::of(&stat))
    }

    /// Whether it has been removed since: then nothing can be made in it, and another one may have its name.
    pub(crate) fn is_gone(&self) -> bool {
        self.seen().is_ok_and(|seen| seen.links == 0)
    }

    /// The folder of a name.
    ///
    /// # Errors
    /// [`Error::Link`] when a link has the name, [`Error::Io`].
    pub(crate) fn open(&self, name: &str) -> Result<Self> {
        let path = self.path.join(name);
        match rustix::fs::openat(&self.file, name, FOLDER | OFlags::NOFOLLOW, Mode::empty()) {
            Ok(fd) => Ok(Self::of(fd, path)),
            Err(e) => Err(refused(e, self.file.as_fd(), Path::new(name), path)),
        }
    }

    /// The folder of a name, made with mode 0700 if there is none.
    ///
    /// # Errors
    /// As [`Folder::open`].
    pub(crate) fn open_or_create(&self, name: &str) -> Result<Self> {
        match self.open(name) {
            Err(e) if e.is_missing() => {}
            other => return other,
        }
        match rustix::fs::mkdirat(&self.file, name, PRIVATE) {
            Ok(()) | Err(Errno::EXIST) => self.open(name),
            Err(e) => Err(failed("create the folder", self.path.join(name), e)),
        }
    }

    /// [`Folder::open_or_create`] where there is rarely one yet.
    pub(crate) fn created(&self, name: &str) -> Result<Self> {
        match rustix::fs::mkdirat(&self.file, name, PRIVATE) {
            // On a read-only mount it may be there.
            Ok(()) | Err(Errno::EXIST | Errno::ROFS) => self.open(name),
            Err(e) => Err(failed("create the folder", self.path.join(name), e)),
        }
    }

    /// Makes a folder of a name that is free, with mode 0700.
    pub(crate) fn create_folder(&self, name: &str) -> Result<Self> {
        let made = rustix::fs::mkdirat(&self.file, name, PRIVATE);
        made.map_err(|e| failed("create the folder", self.path.join(name), e)).and_then(|()| self.open(name))
    }

    /// The same folder through a handle of its own, as a lock on it needs.
    pub(crate) fn again(&self) -> Result<Self> {
        self.open(".").map(|folder| Self { path: self.path.clone(), ..folder })
    }

    /// Opens a file to read, and looks at it. No owner is asked for: who may write to the folder is.
    ///
    /// # Errors
    /// [`Error::Link`]; [`Error::Io`] with [`io::ErrorKind::InvalidData`] for what is no file, else the system's.
    pub(crate) fn read(&self, name: &str) -> Result<(File, Metadata)> {
        self.regular(self.open_with(name, OFlags::RDONLY)?, name)
    }

    /// [`Folder::read`] of a file in folders below. One call of the system where it has `openat2`.
    ///
    /// # Errors
    /// As [`Folder::read`].
    pub(crate) fn read_below(&self, folders: &[&str], name: &str) -> Result<(File, Metadata)> {
        /// Older systems lack the call, and some sandboxes forbid what they do not know.
        static LACKING: AtomicBool = AtomicBool::new(false);
        if !LACKING.load(Ordering::Relaxed) {
            let path: PathBuf = folders.iter().chain([&name]).collect();
            let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
            match rustix::fs::openat2(&self.file, &path, FILE | OFlags::RDONLY, Mode::empty(), resolve) {
                Ok(fd) => return self.regular(File::from(fd), &path.to_string_lossy()),
                Err(Errno::NOSYS | Errno::PERM) => LACKING.store(true, Ordering::Relaxed),
                // Step by step it shows which of the names is the link.
                Err(Errno::LOOP | Errno::NOTDIR | Errno::AGAIN | Errno::XDEV) => {}
                Err(e) => return Err(failed("open", self.path.join(path), e)),
            }
        }
        self.read_below_by_steps(folders, name)
    }

    fn read_below_by_steps(&self, folders: &[&str], name: &str) -> Result<(File, Metadata)> {
        match folders {
            [] => self.read(name),
            [first, rest @ ..] => self.open(first)?.read_below_by_steps(rest, name),
        }
    }

    /// Opens a file of this user's to write into, making it if need be. What is in it stays.
    ///
    /// # Errors
    /// As [`Folder::read`]; what has another name elsewhere or another owner is no file to write into.
    pub(crate) fn write(&self, name: &str) -> Result<(File, Metadata)> {
        let (file, metadata) = self.regular(self.open_with(name, OFlags::WRONLY | OFlags::CREATE)?, name)?;
        if metadata.uid() != rustix::process::geteuid().as_raw() {
            return Err(self.unfit(name, format!("it belongs to the user {}", metadata.uid())));
        }
        if metadata.nlink() > 1 {
            return Err(self.unfit(name, "it has another name elsewhere".to_owned()));
        }
        Ok((file, metadata))
    }

    /// Makes a new file of a name that is free.
    pub(crate) fn create_new(&self, name: &str, mode: u32) -> Result<File> {
        let flags = FILE | OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL;
        let opened = rustix::fs::openat(&self.file, name, flags, Mode::from_raw_mode(mode as _));
        opened.map(File::from).map_err(|e| failed("create", self.path.join(name), e))
    }

    fn open_with(&self, name: &str, flags: OFlags) -> Result<File> {
        let path = self.path.join(name);
        #[cfg(test)]
        if crate::testing::is_unreadable(&path) {
            return Err(failed("open", path, Errno::IO));
        }
        let opened = rustix::fs::openat(&self.file, name, FILE | flags, Mode::RUSR | Mode::WUSR);
        match opened {
            Ok(fd) => Ok(File::from(fd)),
            // A folder cannot be written into, and a pipe without a reader neither.
            Err(Errno::ISDIR | Errno::NXIO) => Err(self.unfit(name, "it is no file".to_owned())),
            Err(e) => Err(refused(e, self.file.as_fd(), Path::new(name), path)),
        }
    }

    fn regular(&self, file: File, name: &str) -> Result<(File, Metadata)> {
        let metadata = file.metadata().map_err(|source| Error::Io {
            action: "look at",
            path: self.path.join(name),
            source,
            remedy: REMEDY,
        })?;
        match metadata.is_file() {
            true => Ok((file, metadata)),
            false => Err(self.unfit(name, "it is no file".to_owned())),
        }
    }

    fn unfit(&self, name: &str, why: String) -> Error {
        let source = io::Error::new(io::ErrorKind::InvalidData, why);
        Error::Io { action: "open", path: self.path.join(name), source, remedy: "move it away" }
    }

    /// What has the name, itself and not what it leads to; `None` when nothing has.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub(crate) fn look(&self, name: &str) -> Result<Option<Seen>> {
        match rustix::fs::statat(&self.file, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Ok(Some(Seen::of(&stat))),
            Err(Errno::NOENT) => Ok(None),
            Err(e) => Err(failed("look at", self.path.join(name), e)),
        }
    }

    /// The names in it that are text, as all are that this program gives, and whether each is a link.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub(crate) fn names(&self) -> Result<Vec<(String, bool)>> {
        let io = |e| failed("list the folder", self.path.clone(), e);
        let mut names = Vec::new();
        for entry in Dir::read_from(&self.file).map_err(io)? {
            let entry = entry.map_err(io)?;
            let Some(name) = text(entry.file_name()) else { continue };
            let is_link = match entry.file_type() {
                FileType::Unknown => self.look(&name)?.is_some_and(|seen| seen.is_link()),
                kind => kind == FileType::Symlink,
            };
            names.push((name, is_link));
        }
        names.sort_unstable();
        Ok(names)
    }

    /// [`Folder::names`] of those that this program gives; a link among them is refused.
    ///
    /// # Errors
    /// [`Error::Link`], [`Error::Io`].
    pub(crate) fn own_names(&self, is_own: impl Fn(&str) -> bool) -> Result<Vec<String>> {
        let own = self.names()?.into_iter().filter(|(name, _)| is_own(name));
        own.map(|(name, is_link)| match is_link {
            true => Err(Error::Link { path: self.path.join(name) }),
            false => Ok(name),
        })
        .collect()
    }

    /// Removes a plain file of this user's. What else has the name stays; whether it was removed.
    pub(crate) fn remove(&self, name: &str) -> bool {
        self.look(name).is_ok_and(|seen| seen.is_some_and(|seen| self.remove_seen(name, &seen)))
    }

    /// The same, with what was just seen of it. A name never leads `unlinkat` elsewhere, whatever has it by then.
    pub(crate) fn remove_seen(&self, name: &str, seen: &Seen) -> bool {
        seen.is_file() && seen.is_ours() && rustix::fs::unlinkat(&self.file, name, AtFlags::empty()).is_ok()
    }

    /// Removes a folder of this user's in which nothing is left; whether it was removed.
    pub(crate) fn remove_empty(&self, name: &str) -> bool {
        self.look(name).is_ok_and(|seen| seen.is_some_and(|seen| seen.is_folder() && seen.is_ours()))
            && rustix::fs::unlinkat(&self.file, name, AtFlags::REMOVEDIR).is_ok()
    }

    /// Gives a file or folder another name here.
    pub(crate) fn rename(&self, from: &str, to: impl AsRef<Path>) -> Result<()> {
        let to = to.as_ref();
        let renamed = rustix::fs::renameat(&self.file, from, &self.file, to);
        renamed.map_err(|e| failed("rename a file to", self.path.join(to), e))
    }

    /// Renames what has a name, if it is wrong there, to `<name>.corrupt-<time>`. The new name, unless somebody else
    /// was faster.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub(crate) fn set_aside(&self, name: &str, is_wrong: impl Fn(&Seen) -> bool) -> Result<Option<String>> {
        // Of two that see the same wrong thing, the later would rename what the first has made in its place.
        let turn = self.again()?;
        let _ = rustix::fs::flock(&turn.file, FlockOperation::LockExclusive);
        if !self.look(name)?.is_some_and(|seen| is_wrong(&seen)) {
            return Ok(None);
        }
        let time = crate::store::unix_time();
        for n in 0.. {
            let aside = match n {
                0 => format!("{name}.corrupt-{time}"),
                n => format!("{name}.corrupt-{time}-{n}"),
            };
            if self.look(&aside)?.is_none() {
                return self.rename(name, &aside).map(|()| Some(aside));
            }
        }
        unreachable!("the numbers do not end")
    }

    /// Brings the names in it to the disk. Some file systems cannot, which is no failure: the files are whole in any
    /// case.
    pub(crate) fn sync(&self) {
        let _ = self.file.sync_all();
    }

    /// A path for those who take nothing else, and which leads to this folder whatever gets its name: by the handle,
    /// which must stay open meanwhile. Where the system has none (no /proc), its name has to do: whoever could swap
    /// it may write to the folder before it, which is checked to be this user's alone.
    pub(crate) fn path_of_handle(&self) -> PathBuf {
        let path = PathBuf::from(format!("/proc/self/fd/{}", self.file.as_raw_fd()));
        let same = |other: Metadata| self.seen().is_ok_and(|own| own.id == id_of(&other));
        match std::fs::metadata(&path).is_ok_and(same) {
            true => path,
            false => self.path.clone(),
        }
    }
}

fn text(name: &CStr) -> Option<String> {
    name.to_str().ok().filter(|name| !matches!(*name, "." | "..")).map(str::to_owned)
}

fn failed(action: &'static str, path: PathBuf, e: Errno) -> Error {
    Error::Io { action, path, source: e.into(), remedy: REMEDY }
}

/// Why something could not be opened: a link is told from all else. Systems answer ELOOP for one in the place of a
/// file, and ENOTDIR for one in the place of a folder, as for a file there.
fn refused(e: Errno, folder: impl AsFd, name: &Path, path: PathBuf) -> Error {
    let is_link = matches!(e, Errno::LOOP | Errno::NOTDIR | Errno::MLINK)
        && rustix::fs::statat(folder, name, AtFlags::SYMLINK_NOFOLLOW)
            .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Symlink);
    match is_link {
        true => Error::Link { path },
        false => failed("open", path, e),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::artifact;
    use crate::{ArtifactFiles, CacheDir, Layers, Store};
    use std::os::unix::fs::symlink;

    /// An open folder with a file in it, beside one of somebody's.
    fn folders() -> (tempfile::TempDir, Folder, PathBuf) {
        let tmp = tempfile::tempdir().unwrap();
        for name in ["own", "theirs"] {
            std::fs::create_dir_all(tmp.path().join(name).join("a/b")).unwrap();
            std::fs::write(tmp.path().join(name).join("a/b/file"), name).unwrap();
            std::fs::write(tmp.path().join(name).join("file"), name).unwrap();
        }
        let own = Folder::open_at(&tmp.path().join("own")).unwrap();
        let theirs = tmp.path().join("theirs");
        (tmp, own, theirs)
    }

    fn content((mut file, _): (File, Metadata)) -> String {
        let mut text = String::new();
        std::io::Read::read_to_string(&mut file, &mut text).unwrap();
        text
    }

    #[test]
    fn a_folder_that_is_swapped_for_a_link_is_not_left() {
        let (tmp, own, theirs) = folders();
        std::fs::rename(tmp.path().join("own"), tmp.path().join("moved")).unwrap();
        symlink(&theirs, tmp.path().join("own")).unwrap();
        assert_eq!(content(own.read("file").unwrap()), "own");
        assert_eq!(content(own.read_below(&["a", "b"], "file").unwrap()), "own");
        assert_eq!(content(own.read_below_by_steps(&["a", "b"], "file").unwrap()), "own");
        own.publish("file", |w| w.write_all(b"new").map_err(|e| panic!("{e}"))).unwrap();
        assert!(
            own.set_aside("file", |_| true).unwrap().is_some()
                && own.open("a").unwrap().open("b").unwrap().remove("file")
        );
        assert_eq!(
            own.path_of_handle().join("a").canonicalize().unwrap(),
            tmp.path().join("moved/a").canonicalize().unwrap()
        );
        for name in ["file", "a/b/file"] {
            assert_eq!(std::fs::read_to_string(theirs.join(name)).unwrap(), "theirs");
        }
        assert!(matches!(Folder::open_at(&tmp.path().join("own")), Err(Error::Link { .. })));
    }

    #[test]
    fn a_link_is_refused_by_its_name_and_never_followed() {
        let (_tmp, own, theirs) = folders();
        let link = |name: &str, target: &str| {
            let path = own.path().join(name);
            let _ = (std::fs::remove_file(&path), std::fs::remove_dir_all(&path));
            symlink(theirs.join(target), path).unwrap();
        };
        let refused = |outcome: Result<()>, name: &str| match outcome {
            Err(Error::Link { path }) => assert_eq!(path, own.path().join(name)),
            other => panic!("{name}: {other:?}"),
        };
        link("file", "file");
        refused(own.read("file").map(drop), "file");
        refused(own.write("file").map(drop), "file");
        refused(own.publish("file", |_| Ok(())), "file");
        assert!(!own.remove("file") && own.look("file").unwrap().unwrap().is_link());
        link("a/b", "a/b");
        refused(own.read_below(&["a", "b"], "file").map(drop), "a/b");
        refused(own.open("a").and_then(|a| a.open_or_create("b")).map(drop), "a/b");
        refused(own.open("a").and_then(|a| a.created("b")).map(drop), "a/b");
        link("a", "a");
        refused(own.read_below(&["a", "b"], "file").map(drop), "a");
        link("gone", "nothing");
        refused(own.write("gone").map(drop), "gone");
        assert!(!theirs.join("nothing").exists(), "a file is made through no link");
    }

    #[test]
    fn a_file_with_another_name_is_not_written_into() {
        let (_tmp, own, theirs) = folders();
        std::fs::hard_link(theirs.join("file"), own.path().join("shared")).unwrap();
        assert!(own.write("shared").unwrap_err().is_no_file() && own.write("file").is_ok());
        assert!(own.remove("shared") && theirs.join("file").exists(), "its name here may go");
    }

    #[test]
    fn a_cache_folder_that_was_removed_is_begun_anew() {
        let tmp = tempfile::tempdir().unwrap();
        let dir = CacheDir::at(tmp.path().join("cache"));
        let files = ArtifactFiles::new(&dir);
        let layers = Layers::open(&dir, &[], None).unwrap();
        for _ in 0..2 {
            let key = files.put(&artifact(1)).unwrap();
            let store = Store::open(&dir).unwrap();
            store.put_record(&crate::testing::record(128, 1)).unwrap();
            store.publish(&files).unwrap();
            assert!(layers.refresh() && layers.records().len() == 1 && files.get(&key).is_some());
            drop(store);
            std::fs::remove_dir_all(dir.root()).unwrap();
            assert!(layers.refresh() && layers.records().is_empty() && files.get(&key).is_none());
        }
    }
}

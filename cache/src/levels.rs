//! Levels of instruction paths that cards of this user have raised, by a check or a tuning that passed.
//!
//! One small file for each path and arch: the BLAKE3 hash of the rest, then the level with what it holds for. It counts
//! while the templates of the path's family and the arguments of kernels are what they were, for cards of the same
//! arch. Collecting kernels leaves it alone; emptying the folder does not.

use crate::encoding::{decode, encode};
use crate::folder::Folder;
use crate::layout::{LEVELS, is_level};
use crate::{CacheDir, Error, Key, Needed, Result, Validity, regular};
use flashtune_codegen::{Arch, InstructionPath, Level, Paths, Raised};
use serde::{Deserialize, Serialize};

/// Bytes of the hash in front.
const HASH: usize = 32;
/// None of this program's is larger.
const LARGEST: u64 = 4096;

/// A level, and what it holds for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeptLevel {
    /// Whose level it is.
    pub path: InstructionPath,
    /// Arch, templates and arguments of the kernels that ran.
    pub validity: Validity,
    /// Ran or raced.
    pub level: Level,
    /// The card's name.
    pub device: String,
    /// `check` or `tune`.
    pub by: String,
    /// When, in seconds since 1970.
    pub unix_time: u64,
}

impl KeptLevel {
    /// What a card showed just now.
    pub fn new(path: InstructionPath, needed: &Needed, level: Level, device: &str, by: &str, unix_time: u64) -> Self {
        let validity = needed.validity(path.family);
        Self { path, validity, level, device: device.to_owned(), by: by.to_owned(), unix_time }
    }
}

/// The levels of a cache folder.
#[derive(Debug, Clone)]
pub struct Levels {
    dir: CacheDir,
}

impl Levels {
    /// Those of a folder, which need not be there.
    pub fn new(dir: &CacheDir) -> Self {
        Self { dir: dir.clone() }
    }

    /// Keeps a level, unless as high a one is kept that holds for the same. Whether it was written.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Link`], [`Error::Exposed`].
    pub fn raise(&self, level: &KeptLevel) -> Result<bool> {
        let base = self.dir.created()?;
        let folder = base.open_or_create(LEVELS)?;
        let name = name_of(&level.path, level.validity.arch);
        if read(&folder, &name).is_some_and(|kept| kept.validity == level.validity && kept.level >= level.level) {
            return Ok(false);
        }
        let payload = encode(level);
        folder.publish(&name, |file| {
            let path = || folder.path().join(&name);
            let written = file.write_all(blake3::hash(&payload).as_bytes()).and_then(|()| file.write_all(&payload));
            written.map_err(|source| Error::Io {
                action: "write",
                path: path(),
                source,
                remedy: "check permissions and free space, or set FLASHTUNE_CACHE to another folder",
            })
        })?;
        Ok(true)
    }

    /// Takes a level back, after a check that failed. Whether there was one.
    pub fn lower(&self, path: &InstructionPath, arch: Arch) -> bool {
        let name = name_of(path, arch);
        self.dir.within(|base| base.open(LEVELS)).is_ok_and(|folder| folder.remove(&name))
    }

    /// The levels that hold for what this build needs. Damaged files and those of other builds count as not there.
    pub fn read(&self, needed: &Needed) -> Vec<KeptLevel> {
        let Ok(folder) = self.dir.within(|base| base.open(LEVELS)) else { return Vec::new() };
        let names = folder.names().unwrap_or_default().into_iter();
        let kept = names.filter(|(name, is_link)| is_level(name) && !is_link).filter_map(|(n, _)| read(&folder, &n));
        kept.filter(|kept| needed.difference(&kept.validity).is_none()).collect()
    }

    /// The paths of a process with the levels that are kept here. Of the host processor, whose kernels every test runs,
    /// none is asked for: a dispatch there asks the file system no more than it did.
    pub fn apply(&self, paths: Paths, needed: &Needed) -> Paths {
        if matches!(needed.arch, Arch::Cpu(_)) {
            return paths;
        }
        let raised = self.read(needed).into_iter();
        paths.with_raised(raised.map(|kept| (kept.path, Raised { level: kept.level, device: kept.device })))
    }
}

fn name_of(path: &InstructionPath, arch: Arch) -> String {
    format!("{}.level", Key::of_value("flashtune level 1", &(path, arch)).hex())
}

/// What a file says, if it is whole, means something, and has the name that goes with it.
fn read(folder: &Folder, name: &str) -> Option<KeptLevel> {
    let file = folder.read(name).ok().filter(|(_, metadata)| metadata.len() <= LARGEST)?;
    let bytes = regular::read_all(&file).ok()?;
    let (hash, payload) = bytes.split_at_checked(HASH)?;
    if *hash != *blake3::hash(payload).as_bytes() {
        return None;
    }
    let kept: KeptLevel = decode(payload).ok()?;
    let fits = kept.level >= Level::Ran
        && kept.validity.family == kept.path.family
        && name == name_of(&kept.path, kept.validity.arch);
    fits.then_some(kept)
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashtune_codegen::{DType, Family, TemplateSet};
    use std::collections::BTreeMap;
    use std::os::unix::fs::symlink;
    use std::path::PathBuf;

    fn arch(name: &str) -> Arch {
        name.parse().unwrap()
    }

    fn path(dtype: DType) -> InstructionPath {
        InstructionPath { family: Family::ForwardSm80, dtype, variant: "" }
    }

    fn needed(name: &str) -> Needed {
        Needed::new(arch(name), &TemplateSet::embedded())
    }

    fn level(dtype: DType, name: &str, level: Level) -> KeptLevel {
        KeptLevel::new(path(dtype), &needed(name), level, "NVIDIA L4", "check", 1_700_000_000)
    }

    fn fixture() -> (tempfile::TempDir, Levels, PathBuf) {
        let tmp = tempfile::tempdir().unwrap();
        let dir = CacheDir::at(tmp.path().join("cache"));
        let levels = Levels::new(&dir);
        assert!(levels.read(&needed("sm_89")).is_empty() && !dir.base().exists(), "reading makes nothing");
        assert!(levels.raise(&level(DType::F16, "sm_89", Level::Ran)).unwrap());
        let file = dir.base().join(LEVELS).join(name_of(&path(DType::F16), arch("sm_89")));
        (tmp, levels, file)
    }

    #[test]
    fn a_level_is_kept_for_its_path_and_arch_and_the_higher_one_stays() {
        let (_tmp, levels, _) = fixture();
        let ran = level(DType::F16, "sm_89", Level::Ran);
        // Another process, which opens the folder anew.
        let again = Levels::new(&CacheDir::at(levels.dir.root()));
        assert_eq!(again.read(&needed("sm_89")), std::slice::from_ref(&ran));
        assert!(again.read(&needed("sm_86")).is_empty() && again.read(&needed("sm_90a")).is_empty());
        assert!(!levels.raise(&ran).unwrap(), "nothing new");
        assert!(levels.raise(&level(DType::F16, "sm_89", Level::Raced)).unwrap());
        assert!(!levels.raise(&ran).unwrap());
        assert_eq!(levels.read(&needed("sm_89"))[0].level, Level::Raced);
        assert!(levels.raise(&level(DType::Bf16, "sm_89", Level::Ran)).unwrap());
        assert_eq!(levels.read(&needed("sm_89")).len(), 2);
        assert!(levels.lower(&path(DType::F16), arch("sm_89")) && !levels.lower(&path(DType::F16), arch("sm_89")));
        assert_eq!(levels.read(&needed("sm_89")), [level(DType::Bf16, "sm_89", Level::Ran)]);
    }

    #[test]
    fn a_level_of_other_templates_does_not_count_and_is_raised_anew() {
        let (_tmp, levels, _) = fixture();
        let edit = BTreeMap::from([("forward/sm80.cu".to_owned(), "int other;".to_owned())]);
        let other = Needed::new(arch("sm_89"), &TemplateSet::overlaid(edit).unwrap());
        assert!(levels.read(&other).is_empty());
        let unrelated = BTreeMap::from([("forward/naive.cu".to_owned(), "int other;".to_owned())]);
        assert_eq!(levels.read(&Needed::new(arch("sm_89"), &TemplateSet::overlaid(unrelated).unwrap())).len(), 1);
        let mut arguments = needed("sm_89");
        arguments.abi += 1;
        assert!(levels.read(&arguments).is_empty());
        // Of the edited templates another level is kept in its place.
        let edited = KeptLevel::new(path(DType::F16), &other, Level::Ran, "NVIDIA L4", "check", 1);
        assert!(levels.raise(&edited).unwrap() && levels.read(&needed("sm_89")).is_empty());
        assert_eq!(levels.read(&other), [edited]);
    }

    #[test]
    fn whatever_is_wrong_with_a_file_it_raises_nothing() {
        let (_tmp, levels, file) = fixture();
        let whole = std::fs::read(&file).unwrap();
        let is_read = || !levels.read(&needed("sm_89")).is_empty();
        for at in 0..whole.len() {
            let mut bad = whole.clone();
            bad[at] ^= 1;
            std::fs::write(&file, &bad).unwrap();
            assert!(!is_read(), "byte {at}");
            std::fs::write(&file, &whole[..at]).unwrap();
            assert!(!is_read(), "cut at {at}");
        }
        let written = |kept: &KeptLevel| {
            let payload = encode(kept);
            std::fs::write(&file, [&blake3::hash(&payload).as_bytes()[..], &payload].concat()).unwrap();
        };
        // Whole, but of another path, another family, or no level that a card shows.
        let good = level(DType::F16, "sm_89", Level::Ran);
        let other = Validity { family: Family::ForwardNaive, ..good.validity.clone() };
        for wrong in [
            level(DType::Bf16, "sm_89", Level::Ran),
            level(DType::F16, "sm_89", Level::Emulated),
            KeptLevel { validity: other, ..good.clone() },
            KeptLevel { device: "x".repeat(LARGEST as usize), ..good.clone() },
        ] {
            written(&wrong);
            assert!(!is_read(), "{:?}", wrong.path);
        }
        written(&good);
        assert!(is_read());
        // A link, even to a good file, and a folder of another name.
        std::fs::rename(&file, file.with_extension("elsewhere")).unwrap();
        symlink(file.with_extension("elsewhere"), &file).unwrap();
        assert!(!is_read() && matches!(levels.raise(&good), Err(Error::Link { .. })));
        std::fs::remove_file(&file).unwrap();
        std::fs::create_dir(&file).unwrap();
        assert!(!is_read() && levels.raise(&good).is_err());
    }

    #[test]
    fn collecting_kernels_leaves_levels_alone_and_emptying_does_not() {
        let (_tmp, levels, file) = fixture();
        levels.dir.collect(Some(0), std::time::Duration::ZERO).unwrap();
        assert_eq!(levels.read(&needed("sm_89")).len(), 1);
        let usage = levels.dir.usage().unwrap();
        assert_eq!((usage.levels.files, usage.foreign), (1, 0));
        levels.dir.clear().unwrap();
        assert!(levels.read(&needed("sm_89")).is_empty() && !file.parent().unwrap().exists());
    }

    #[test]
    fn a_folder_that_others_may_write_to_raises_nothing() {
        use std::os::unix::fs::PermissionsExt;
        let (_tmp, levels, _) = fixture();
        let base = levels.dir.base();
        std::fs::set_permissions(base, std::fs::Permissions::from_mode(0o777)).unwrap();
        let opened = Levels::new(&CacheDir::at(levels.dir.root()));
        assert!(opened.read(&needed("sm_89")).is_empty());
        assert!(matches!(opened.raise(&level(DType::F16, "sm_89", Level::Ran)), Err(Error::Exposed { .. })));
    }
}

//! Files of somebody's behind every name of a cache folder: whatever runs on such a cache, they stay byte for byte as
//! they were. In all tests they lie in the test's own temporary folder.

use crate::common::faults::copy;
use crate::common::{self, Place, SMALL};
use flashtune_cache::{CacheDir, Key, Layers};
use std::collections::BTreeMap;
use std::fs::DirBuilder;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::{Duration, SystemTime};

/// A small problem that is not tuned.
const OTHER: [&str; 10] = ["--dtype", "f32", "--head-dim", "16", "--mask", "full", "--heads", "1", "--q-len", "64"];

/// Old enough for all that removes what is old.
const AGE: Duration = Duration::from_secs(40 * 24 * 3600);

/// Everything about what lies below a folder: mode, owner, time, and content or target.
type Everything = BTreeMap<PathBuf, (u32, u32, i64, i64, Vec<u8>)>;

fn everything(folder: &Path) -> Everything {
    let mut all = Everything::new();
    let mut left = vec![folder.to_path_buf()];
    while let Some(path) = left.pop() {
        let m = path.symlink_metadata().unwrap();
        let content = match m.file_type() {
            kind if kind.is_dir() => {
                left.extend(std::fs::read_dir(&path).unwrap().map(|e| e.unwrap().path()));
                Vec::new()
            }
            kind if kind.is_symlink() => std::fs::read_link(&path).unwrap().into_os_string().into_encoded_bytes(),
            kind if kind.is_file() => std::fs::read(&path).unwrap(),
            _ => Vec::new(),
        };
        all.insert(path, (m.mode(), m.uid(), m.mtime(), m.mtime_nsec(), content));
    }
    all
}

fn make_old(path: &Path) {
    let then = SystemTime::now() - AGE;
    std::fs::File::open(path)
        .unwrap()
        .set_times(std::fs::FileTimes::new().set_modified(then).set_accessed(then))
        .unwrap();
}

/// A cache with a record, a bundle with another one, and a folder of decoys.
struct Scene {
    place: Place,
    bundle: PathBuf,
    tuned: PathBuf,
    /// The kernel of the record, by its key.
    kernel: String,
    /// The kernel that is compiled when it is asked for, by its key.
    other: String,
    dead: u32,
}

impl Scene {
    fn new() -> Self {
        let place = Place::new();
        place.tune_small();
        let bundle = place.path("more.ftb");
        let arch = common::host_arch().to_string();
        place.json(&[&["build"], &OTHER[..], &["--arch", &arch, "--out", bundle.to_str().unwrap()]].concat());
        let layers = Layers::open(&CacheDir::at(place.cache()), &[], None).unwrap();
        let kernel = layers.records()[0].1.artifact.hex();
        let tuned = place.path("tuned");
        copy(&place.cache(), &tuned);
        let explain = [&["explain"], &OTHER[..]].concat();
        assert!(place.flashtune(&explain).output().unwrap().status.success());
        let is_new = |path: &PathBuf| !tuned.join(path.strip_prefix(place.cache()).unwrap()).exists();
        let other =
            everything(&place.cache()).into_keys().find(|p| p.extension().is_some_and(|e| e == "art") && is_new(p));
        let other = other.unwrap().file_stem().unwrap().to_str().unwrap().to_owned();
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        Self { place, bundle, tuned, kernel, other, dead: child.id() }
    }

    /// The cache as it was, with the kernels so old that they are evicted, and new decoys. Gives the folder of the
    /// layout.
    fn anew(&self) -> PathBuf {
        for folder in [self.place.cache(), self.decoys()] {
            let _ = std::fs::remove_dir_all(folder);
        }
        copy(&self.tuned, &self.place.cache());
        let mut parts = std::fs::read_dir(self.place.cache()).unwrap();
        let base = parts.next().unwrap().unwrap().path();
        for part in std::fs::read_dir(base.join("artifacts")).unwrap().flatten() {
            for kernel in std::fs::read_dir(part.path()).unwrap().flatten() {
                make_old(&kernel.path());
            }
        }
        for folder in ["claims", "jobs"] {
            DirBuilder::new().recursive(true).mode(0o700).create(base.join(folder)).unwrap();
        }
        self.make_decoys(&self.decoys());
        base
    }

    fn decoys(&self) -> PathBuf {
        self.place.path("decoys")
    }

    /// Files and folders with names like ours and not, all of them old.
    fn make_decoys(&self, folder: &Path) {
        let (key, dead) = (&self.kernel, self.dead);
        let part = &key[..2];
        let files = [
            "Makefile".to_owned(),
            "notes.txt".to_owned(),
            key.clone(),
            Key::of(b"another").hex(),
            format!("{key}.log"),
            format!("{key}.art"),
            format!("{key}.damaged"),
            format!("{part}/{key}.art"),
            format!("{part}/{key}.damaged"),
            format!("{part}/.flashtune-{dead}-x"),
            format!("{part}/thesis.tex"),
            format!(".flashtune-{dead}-x"),
            format!("flashtune-cc-{dead}-x/kernel.c"),
            "db".to_owned(),
            "conf".to_owned(),
            "snap.00000000000000FF".to_owned(),
            "snap.00000000000000FF.generating".to_owned(),
            "blobs/12".to_owned(),
            "snapshot.ftb".to_owned(),
            "store.lock".to_owned(),
            "kernel.c".to_owned(),
            "kernel.so".to_owned(),
            "v7/claims/notes.txt".to_owned(),
        ];
        for (n, name) in files.iter().enumerate() {
            let path = folder.join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, format!("years of work, volume {n}\n")).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode([0o644, 0o600, 0o755][n % 3])).unwrap();
        }
        symlink("notes.txt", folder.join("a link")).unwrap();
        for path in everything(folder).keys().rev().filter(|p| !p.is_symlink()) {
            make_old(path);
        }
    }

    fn run(&self, args: &[&str]) -> Output {
        let mut command = self.place.flashtune(args);
        command.env("FLASHTUNE_CACHE_LIMIT_MIB", "0").output().unwrap()
    }

    fn import(&self) -> Output {
        self.run(&["import", "--replace", self.bundle.to_str().unwrap()])
    }

    fn tune(&self) -> Output {
        self.run(&[&["tune", "--trials", "1", "--budget-s", "6"], &OTHER[..]].concat())
    }

    /// Runs readers and writers on the cache, and says what the tuner said.
    fn use_it(&self) -> Output {
        for args in [[&["explain"], SMALL].concat(), [&["explain"], &OTHER[..]].concat()] {
            let answer = self.run(&args);
            assert!(answer.status.success(), "a call is answered: {}", text(&answer));
        }
        self.import();
        self.run(&["cache", "verify"]);
        self.run(&["cache", "gc"]);
        let told = self.tune();
        self.run(&["cache", "clear", "--yes"]);
        told
    }
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Puts a link in the place of a name.
fn replace_by_link(path: &Path, target: &Path) {
    let _ = std::fs::remove_dir_all(path);
    let _ = std::fs::remove_file(path);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    symlink(target, path).unwrap();
}

#[test]
fn decoys_behind_links_stay_and_the_link_is_named() {
    let scene = Scene::new();
    let (key, dead) = (&scene.kernel, scene.dead);
    let part = format!("artifacts/{}", &key[..2]);
    let folders =
        ["claims", "jobs", "artifacts", &part, "store", "store/blobs"].map(|name| (name.to_owned(), String::new()));
    let files = [
        ("snapshot.ftb".to_owned(), "snapshot.ftb"),
        ("store.lock".to_owned(), "store.lock"),
        ("store/db".to_owned(), "db"),
        ("store/conf".to_owned(), "conf"),
        ("store/snap.00000000000000FF.generating".to_owned(), "snap.00000000000000FF.generating"),
        ("store/blobs/12".to_owned(), "blobs/12"),
        (format!("claims/{key}"), "notes.txt"),
        (format!("jobs/{key}.log"), "notes.txt"),
        (format!("{part}/{key}.art"), "notes.txt"),
        (format!("{part}/{key}.damaged"), "notes.txt"),
    ]
    .map(|(name, target)| (name, target.to_owned()));
    // What nobody asks for by its name is let be.
    let ignored = [format!(".flashtune-{dead}-x"), format!("{part}/.flashtune-{dead}-x"), format!("claims/{key}.txt")]
        .map(|name| (name, "notes.txt".to_owned()));
    for (n, (name, target)) in folders.iter().chain(&files).chain(&ignored).enumerate() {
        let base = scene.anew();
        let (link, target) = (base.join(name), scene.decoys().join(target));
        replace_by_link(&link, &target);
        let before = everything(&scene.decoys());
        let told = scene.use_it();
        assert!(before == everything(&scene.decoys()), "{name}: something behind the link is another: {}", text(&told));
        assert_eq!(std::fs::read_link(&link).ok(), Some(target), "{name}: the link itself stays");
        let is_refused = n < folders.len() + files.len();
        let said = text(&told);
        if is_refused {
            assert_eq!(told.status.code(), Some(2), "{name}: {said}");
            let link = link.to_str().unwrap();
            assert!(
                said.contains(link) && said.contains("is a link") && said.contains("remove the link"),
                "{name}: {said}"
            );
        } else {
            assert!(told.status.success() || said.contains("nothing was stored"), "{name}: {said}");
        }
    }
}

#[test]
fn a_layout_that_is_a_link_is_refused_and_a_root_is_not() {
    let scene = Scene::new();
    let base = scene.anew();
    let version = base.file_name().unwrap().to_str().unwrap().to_owned();
    replace_by_link(&base, &scene.decoys());
    let before = everything(&scene.decoys());
    let told = scene.use_it();
    assert!(before == everything(&scene.decoys()), "{}", text(&told));
    assert!(!told.status.success() && text(&told).contains("is a link"), "{}", text(&told));

    scene.anew();
    let real = scene.place.path("real");
    std::fs::rename(scene.place.cache(), &real).unwrap();
    symlink(&real, scene.place.cache()).unwrap();
    let import = scene.import();
    assert!(import.status.success() && real.join(version).join("snapshot.ftb").is_file(), "{}", text(&import));
}

#[test]
fn decoys_with_a_second_name_in_the_cache_keep_their_bytes() {
    let scene = Scene::new();
    let key = &scene.kernel;
    let part = format!("artifacts/{}", &key[..2]);
    let names = [
        "snapshot.ftb".to_owned(),
        "store.lock".to_owned(),
        "store/db".to_owned(),
        "store/conf".to_owned(),
        format!("claims/{}", scene.other),
        format!("jobs/{key}.log"),
        format!("{part}/{key}.art"),
        format!("{part}/{key}.damaged"),
    ];
    for name in names {
        let base = scene.anew();
        let (path, decoy) = (base.join(&name), scene.decoys().join("notes.txt"));
        let _ = std::fs::remove_file(&path);
        std::fs::hard_link(&decoy, &path).unwrap();
        let before = everything(&scene.decoys());
        let told = scene.use_it();
        assert!(before == everything(&scene.decoys()), "{name}: {}", text(&told));
        let said = text(&told);
        assert!(told.status.success() || said.contains("nothing was stored"), "{name}: the tuner goes on: {said}");
    }
}

#[test]
fn decoys_within_the_cache_stay_unless_they_have_our_names() {
    let scene = Scene::new();
    let base = scene.anew();
    let part = base.join("artifacts").join(&scene.kernel[..2]);
    let mut planted = Vec::new();
    let folders =
        [base.clone(), base.join("claims"), base.join("jobs"), base.join("artifacts"), part, base.join("store")];
    for folder in &folders {
        for name in [
            "notes.txt",
            "Makefile",
            "0123.log",
            "snap.txt",
            ".flashtune-x",
            ".flashtune-1-a.txt",
            "a folder/notes.txt",
        ] {
            let path = folder.join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, "years of work").unwrap();
            make_old(&path);
            planted.push(path);
        }
    }
    // Of another user's, with names like ours: only root can make such a scene.
    let foreign =
        [base.join("claims").join(Key::of(b"x").hex()), base.join("jobs").join(format!("{}.log", Key::of(b"x").hex()))];
    if is_root() {
        for path in foreign {
            std::fs::write(&path, "years of work").unwrap();
            std::os::unix::fs::chown(&path, Some(12345), None).unwrap();
            make_old(&path);
            planted.push(path);
        }
    }
    // sled takes no such name in its own folder, which is set aside then, with all that is in it.
    std::fs::remove_file(base.join("store/snap.txt")).unwrap();
    planted.retain(|path| *path != base.join("store/snap.txt"));
    let seen = |path: &PathBuf| everything(path);
    let before: Vec<_> = planted.iter().map(seen).collect();
    let told = scene.use_it();
    let said = text(&told);
    assert!(told.status.success() || said.contains("nothing was stored"), "{said}");
    for (path, before) in planted.iter().zip(before) {
        assert!(path.exists() && seen(path) == before, "{}: {said}", path.display());
    }
}

fn is_root() -> bool {
    std::fs::metadata("/proc/self").is_ok_and(|m| m.uid() == 0)
}

#[test]
fn decoys_in_the_folder_for_temporary_files_stay() {
    let scene = Scene::new();
    scene.anew();
    let temporary = scene.place.path("tmp");
    let dead = scene.dead;
    std::fs::create_dir(&temporary).unwrap();
    // A link to a folder; folders of ours that hold links and what is not ours; names that are not ours.
    symlink(scene.decoys(), temporary.join(format!("flashtune-cc-{dead}-a"))).unwrap();
    let mixed = temporary.join(format!("flashtune-cc-{dead}-b"));
    std::fs::create_dir(&mixed).unwrap();
    for name in ["thesis.tex", "sub/kernel.c"] {
        std::fs::create_dir_all(mixed.join(name).parent().unwrap()).unwrap();
        std::fs::write(mixed.join(name), "years of work").unwrap();
    }
    symlink(scene.decoys(), mixed.join("kernel.so")).unwrap();
    std::fs::hard_link(scene.decoys().join("notes.txt"), mixed.join("kernel.c")).unwrap();
    for name in ["flashtune-cc-notes", "flashtune-cc-12-a.txt", "flashtune-cc-12"] {
        std::fs::create_dir(temporary.join(name)).unwrap();
        std::fs::write(temporary.join(name).join("kernel.c"), "years of work").unwrap();
        make_old(&temporary.join(name));
    }
    make_old(&mixed);
    std::fs::remove_dir_all(scene.place.cache()).unwrap();
    let before = (everything(&scene.decoys()), everything(&temporary));
    let mut command = scene.place.flashtune(&[&["explain"], SMALL].concat());
    let told = command.env("TMPDIR", &temporary).env("CC", "cc").output().unwrap();
    assert!(told.status.success(), "{}", text(&told));
    let mut after = everything(&temporary);
    // The one name in our own old folder that is ours goes, and with it the folder's time.
    let own = mixed.join("kernel.c");
    assert!(!own.exists(), "it was looked at");
    for path in [&own, &mixed, &temporary] {
        let was = before.1[path].clone();
        after.insert(path.clone(), was);
    }
    assert!(before == (everything(&scene.decoys()), after));
}

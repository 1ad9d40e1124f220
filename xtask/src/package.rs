//! `cargo xtask package`: everything that a machine without Rust needs, in one folder or tar.
//!
//! ```text
//! flashtune-<version>-<target>/
//!   MANIFEST.json      versions, commit, and every file with its size and SHA-256
//!   README.md LICENSE CHANGELOG.md
//!   sbom.cdx.json THIRD-PARTY.txt
//!                      the packages that it is built from, as CycloneDX, and the texts of their licences
//!   bin/flashtune      the command, stripped
//!   lib/libflashtune.so, include/flashtune.h, examples/forward.c
//!                      the C ABI
//!   python/            the Python package, with the library in it: put it on PYTHONPATH or `pip install` it
//!   benches/           scripts that measure it beside its peers
//!   templates/         the kernels' templates, to be changed with --templates
//! ```

use super::{licences, sbom};
use anyhow::{Context, Result, bail};
use serde::Serialize;
use sha2::{Digest, Sha256};
use std::ffi::OsStr;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

const USAGE: &str = "usage: cargo xtask package [--out DIR] [--tar] [--profile NAME]

  --out DIR       where the package goes; target/package when absent
  --tar           one tar file instead of a folder
  --profile NAME  the cargo profile; dist (optimised and stripped) when absent";

/// Files of the workspace's root that go along.
const ROOT_FILES: [&str; 3] = ["README.md", "LICENSE", "CHANGELOG.md"];
/// Folders of the workspace that go along, where in the package, and what in them is of cargo alone.
const FOLDERS: [(&str, &str, &[&str]); 3] = [
    ("benches", "benches", &[]),
    ("templates", "templates", &["Cargo.toml", "LICENSE", "README.md", "src"]),
    ("bindings/python", "python", &[]),
];
/// The C ABI: from the workspace, and where in the package.
const C: [(&str, &str); 2] = [
    ("bindings/c/include/flashtune.h", "include/flashtune.h"),
    ("bindings/c/examples/forward.c", "examples/forward.c"),
];
/// The packages that it is built from.
pub(super) const BILL: &str = "sbom.cdx.json";
/// Their licences.
pub(super) const TEXTS: &str = "THIRD-PARTY.txt";
pub(super) const LIBRARY: &str = "libflashtune.so";
/// Where the library goes: for programs in C, and where the Python package looks first.
const LIBRARY_PLACES: [&str; 2] = ["lib", "python/flashtune/lib"];

/// What to make.
struct Options {
    out: PathBuf,
    tar: bool,
    profile: String,
}

/// What the package says about itself.
#[derive(Serialize)]
struct Manifest {
    name: &'static str,
    version: &'static str,
    /// Of the sources; with a plus sign when there were changes.
    commit: String,
    target: String,
    profile: String,
    rustc: String,
    files: Vec<Packed>,
}

#[derive(Serialize)]
struct Packed {
    path: String,
    bytes: u64,
    sha256: String,
}

/// The command.
pub(crate) fn main(root: &Path, args: impl Iterator<Item = String>) -> ExitCode {
    match Options::parse(root, args) {
        Ok(Some(options)) => super::exit_code(run(root, &options)),
        Ok(None) => {
            println!("{USAGE}");
            ExitCode::SUCCESS
        }
        Err(e) => {
            eprintln!("error: {e:#}\n\n{USAGE}");
            ExitCode::from(2)
        }
    }
}

impl Options {
    /// `None` when help was asked for.
    fn parse(root: &Path, mut args: impl Iterator<Item = String>) -> Result<Option<Self>> {
        let mut options = Self { out: root.join("target/package"), tar: false, profile: "dist".into() };
        while let Some(arg) = args.next() {
            let mut value = || args.next().with_context(|| format!("{arg} needs a value"));
            match arg.as_str() {
                "--out" => options.out = value()?.into(),
                "--profile" => options.profile = value()?,
                "--tar" => options.tar = true,
                "-h" | "--help" => return Ok(None),
                other => bail!("there is no option `{other}`"),
            }
        }
        Ok(Some(options))
    }
}

fn run(root: &Path, options: &Options) -> Result<()> {
    let (target, rustc) = rustc()?;
    let name = format!("flashtune-{}-{target}", env!("CARGO_PKG_VERSION"));
    let folder = options.out.join(&name);
    if folder.exists() {
        bail!("{} is already there; remove it or name another --out", folder.display());
    }
    let built = build(root, &options.profile)?;

    copy(&built.join("flashtune"), &folder.join("bin/flashtune"))?;
    for place in LIBRARY_PLACES {
        copy(&built.join(LIBRARY), &folder.join(place).join(LIBRARY))?;
    }
    for (from, to) in C.into_iter().chain(ROOT_FILES.map(|file| (file, file))) {
        copy(&root.join(from), &folder.join(to))?;
    }
    for (from, to, but) in FOLDERS {
        copy_folder(&root.join(from), &folder.join(to), but)?;
    }
    let (bill, texts) = parts(root, &target)?;
    std::fs::write(folder.join(BILL), bill).with_context(|| format!("cannot write {BILL}"))?;
    std::fs::write(folder.join(TEXTS), texts).with_context(|| format!("cannot write {TEXTS}"))?;
    let manifest = Manifest {
        name: "flashtune",
        version: env!("CARGO_PKG_VERSION"),
        commit: commit(root),
        target,
        profile: options.profile.clone(),
        rustc,
        files: contents(&folder)?,
    };
    let text = serde_json::to_string_pretty(&manifest)? + "\n";
    std::fs::write(folder.join("MANIFEST.json"), text).context("cannot write MANIFEST.json")?;
    if !options.tar {
        println!("{}", folder.display());
        return Ok(());
    }
    let tar = options.out.join(format!("{name}.tar"));
    write_tar(&folder, &name, &tar)?;
    std::fs::remove_dir_all(&folder)?;
    println!("{}", tar.display());
    Ok(())
}

/// What is in the library and the command: the bill of materials, and the licences' texts.
pub(super) fn parts(root: &Path, target: &str) -> Result<(String, String)> {
    let parts = sbom::Parts::of(root, target)?;
    Ok((parts.bill(root)?, licences::texts(&parts.packages()?)?))
}

/// The target triple and version of the compiler.
pub(super) fn rustc() -> Result<(String, String)> {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let out = Command::new(rustc).arg("-vV").output().context("cannot run rustc")?;
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    let field = |name: &str| text.lines().find_map(|l| l.strip_prefix(name)).map(str::to_owned);
    let target = field("host: ").context("rustc does not name its host")?;
    Ok((target, field("release: ").unwrap_or_default()))
}

/// The commit that the sources are at; `unknown` without git.
fn commit(root: &Path) -> String {
    let git = |args: &[&str]| {
        let out = Command::new("git").args(args).current_dir(root).output().ok().filter(|o| o.status.success())?;
        Some(String::from_utf8_lossy(&out.stdout).trim().to_owned())
    };
    match (git(&["rev-parse", "HEAD"]), git(&["status", "--porcelain", "--untracked-files=no"])) {
        (Some(commit), Some(changes)) if changes.is_empty() => commit,
        (Some(commit), _) => commit + "+",
        (None, _) => "unknown".into(),
    }
}

/// Builds what is shipped and gives the folder that it is in.
pub(super) fn build(root: &Path, profile: &str) -> Result<PathBuf> {
    let mut command = super::cargo();
    command.args(["build", "--profile", profile]);
    match profile {
        // What the tests of the whole workspace have built is there, features of development dependencies included:
        // without a test's target cargo compiles every library anew.
        "dev" => command.args(["--workspace", "--lib", "--bins", "--test", "programs"]),
        _ => command.args(["--package", "flashtune-cli", "--package", "flashtune-c"]),
    };
    super::run(command)?;
    // Cargo's own names for the folders of profiles.
    let folder = match profile {
        "dev" | "test" => "debug",
        "bench" => "release",
        other => other,
    };
    Ok(target_folder(root).join(folder))
}

/// Where cargo builds.
pub(super) fn target_folder(root: &Path) -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), |dir| root.join(dir))
}

/// Copies a file, making its folder if need be.
pub(super) fn copy(from: &Path, to: &Path) -> Result<()> {
    let folder = to.parent().context("a file in the package")?;
    std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    std::fs::copy(from, to).map(drop).with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))
}

/// Copies a folder without what tools leave in it, and without some names at its top.
pub(super) fn copy_folder(from: &Path, to: &Path, but: &[&str]) -> Result<()> {
    for entry in std::fs::read_dir(from).with_context(|| format!("cannot read {}", from.display()))? {
        let entry = entry?;
        let name = entry.file_name();
        let path = entry.path();
        let hidden = name.to_string_lossy().starts_with('.');
        let left_out = but.iter().any(|other| name == *other);
        if hidden || left_out || name == "__pycache__" || path.extension() == Some(OsStr::new("pyc")) {
            continue;
        }
        if entry.file_type()?.is_dir() {
            copy_folder(&path, &to.join(&name), &[])?;
        } else {
            copy(&path, &to.join(&name))?;
        }
    }
    Ok(())
}

/// All files of a folder, sorted.
fn files_of(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let mut open = vec![folder.to_owned()];
    while let Some(folder) = open.pop() {
        for entry in std::fs::read_dir(&folder)? {
            let path = entry?.path();
            if path.is_dir() { open.push(path) } else { files.push(path) }
        }
    }
    files.sort();
    Ok(files)
}

fn contents(folder: &Path) -> Result<Vec<Packed>> {
    let mut packed = Vec::new();
    for file in files_of(folder)? {
        let mut hasher = Sha256::new();
        let bytes = std::fs::read(&file)?;
        hasher.update(&bytes);
        let sha256 = hasher.finalize().iter().map(|b| format!("{b:02x}")).collect();
        let path = file.strip_prefix(folder)?.to_string_lossy().into_owned();
        packed.push(Packed { path, bytes: bytes.len() as u64, sha256 });
    }
    Ok(packed)
}

/// Writes the folder to a tar whose bytes depend on its content alone.
fn write_tar(folder: &Path, name: &str, tar: &Path) -> Result<()> {
    let file = File::create(tar).with_context(|| format!("cannot write {}", tar.display()))?;
    let mut builder = tar::Builder::new(std::io::BufWriter::new(file));
    builder.mode(tar::HeaderMode::Deterministic);
    for file in files_of(folder)? {
        let inside = Path::new(name).join(file.strip_prefix(folder)?);
        builder.append_path_with_name(&file, inside)?;
    }
    builder.into_inner()?.into_inner().map_err(|e| e.into_error())?.sync_all()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_tar_holds_the_folder_and_its_bytes_repeat() {
        let tmp = tempfile::tempdir().unwrap();
        let (from, to) = (tmp.path().join("from"), tmp.path().join("to"));
        let python = ["python/a/__pycache__/x.py", "python/a/b.py", "python/a/b.pyc", "python/.hidden"];
        for name in ["bin/tool", "Cargo.toml", "src/lib.rs"].into_iter().chain(python) {
            let path = from.join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, name).unwrap();
        }
        std::fs::set_permissions(from.join("bin/tool"), std::fs::Permissions::from_mode(0o755)).unwrap();
        copy_folder(&from, &to, &["Cargo.toml", "src"]).unwrap();
        let (one, two) = (tmp.path().join("one.tar"), tmp.path().join("two.tar"));
        write_tar(&to, "name", &one).unwrap();
        write_tar(&to, "name", &two).unwrap();
        assert_eq!(std::fs::read(&one).unwrap(), std::fs::read(&two).unwrap());
        let out = tmp.path().join("out");
        tar::Archive::new(File::open(&one).unwrap()).unpack(&out).unwrap();
        let unpacked: Vec<_> = contents(&out).unwrap().into_iter().map(|f| f.path).collect();
        assert_eq!(unpacked, ["name/bin/tool", "name/python/a/b.py"]);
        assert_eq!(out.join("name/bin/tool").metadata().unwrap().permissions().mode() & 0o111, 0o111);
    }
}

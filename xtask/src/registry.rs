//! The registry that tests of `push` and `pull` run against: Debian's package `docker-registry`, unpacked into
//! `.toolchain/` where it is not installed. No root is needed for that.

use anyhow::{Context, Result, bail};
use std::path::Path;
use std::process::{Command, Stdio};

const PACKAGE: &str = "docker-registry";

/// Has the registry where the tests look for it. Where apt cannot give it, says so: the tests then skip themselves,
/// and fail on CI.
pub(crate) fn ensure(root: &Path) {
    if let Err(e) = installed(root) {
        eprintln!("no {PACKAGE} for the tests of push and pull: {e:#}; install it by the system's packages");
    }
}

fn installed(root: &Path) -> Result<()> {
    let target = root.join(".toolchain").join(PACKAGE);
    let there = Command::new(PACKAGE).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok();
    if there || target.join("usr/bin").join(PACKAGE).is_file() {
        return Ok(());
    }
    let folder = target.with_extension("download");
    std::fs::create_dir_all(&folder)?;
    let download = |folder: &Path| quiet(Command::new("apt-get").args(["download", PACKAGE]).current_dir(folder));
    if download(&folder).is_err() {
        // A fresh image has no lists of packages; only root may fetch them.
        quiet(Command::new("apt-get").arg("update"))?;
        download(&folder)?;
    }
    let package = std::fs::read_dir(&folder)?
        .filter_map(|e| Some(e.ok()?.path()))
        .find(|p| p.extension().is_some_and(|e| e == "deb"));
    let package = package.context("apt-get left no package")?;
    quiet(Command::new("dpkg-deb").arg("-x").arg(&package).arg(&target))?;
    std::fs::remove_dir_all(&folder)?;
    Ok(())
}

fn quiet(command: &mut Command) -> Result<()> {
    let output = command.output().with_context(|| format!("cannot start {command:?}"))?;
    if !output.status.success() {
        bail!("{command:?} ended with {}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}

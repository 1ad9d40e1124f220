//! Puts NVIDIA's run-time compiler into `.toolchain/`, through pip.

use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The wheel. The version is pinned because compile results are part of what the tests look at.
const WHEEL: &str = "nvidia-cuda-nvrtc==13.5.37";
/// Folder of the wheel that holds the library.
const LIBRARY_DIR: &str = "nvidia/cu13/lib";
const LIBRARY: &str = "libnvrtc.so.13";

/// The folder with NVRTC: the one that `FLASHTUNE_NVRTC` names, or `.toolchain/`, filled on the first call.
pub fn ensure(root: &Path) -> Result<PathBuf> {
    if let Some(named) = std::env::var_os("FLASHTUNE_NVRTC").filter(|v| !v.is_empty()) {
        return Ok(named.into());
    }
    let target = root.join(".toolchain");
    let lib = target.join(LIBRARY_DIR);
    if lib.join(LIBRARY).is_file() {
        return Ok(lib);
    }
    eprintln!("installing {WHEEL} into {}", target.display());
    install(&target)?;
    if !lib.join(LIBRARY).is_file() {
        bail!("{WHEEL} was installed, but {} is not there", lib.join(LIBRARY).display());
    }
    Ok(lib)
}

/// `pip install --target`, with the pip that is there, or one in a virtual environment of our own.
fn install(target: &Path) -> Result<()> {
    let python = ["python3", "python"].into_iter().find(|p| quiet(Command::new(p).arg("--version"))).context(
        "no python3 on PATH; install Python with pip, or set FLASHTUNE_NVRTC to a folder with libnvrtc.so.13",
    )?;
    let mut python = PathBuf::from(python);
    if !quiet(Command::new(&python).args(["-m", "pip", "--version"])) {
        let venv = target.join("venv");
        eprintln!("this Python has no pip: making a virtual environment in {}", venv.display());
        let made = Command::new(&python).args(["-m", "venv"]).arg(&venv).status();
        if !made.is_ok_and(|s| s.success()) {
            bail!(
                "`python -m venv` failed; install pip or venv (Debian: apt install python3-venv), or set \
                 FLASHTUNE_NVRTC to a folder with libnvrtc.so.13"
            );
        }
        python = venv.join("bin/python");
    }
    let mut pip = Command::new(&python);
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--upgrade", "--target"])
        .arg(target)
        .arg(WHEEL)
        // The target folder is the project's own: what pip says about the system's packages does not apply.
        .env("PIP_ROOT_USER_ACTION", "ignore");
    let status = pip.status().with_context(|| format!("cannot start {pip:?}"))?;
    if !status.success() {
        bail!("{pip:?} ended with {status}; set FLASHTUNE_NVRTC to a folder with libnvrtc.so.13 to do without");
    }
    Ok(())
}

/// Whether a command starts and succeeds; its output is dropped.
fn quiet(command: &mut Command) -> bool {
    command.output().is_ok_and(|o| o.status.success())
}

//! Python packages in `.toolchain/`.

use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

/// The Python that is there.
pub(crate) fn python() -> Option<PathBuf> {
    ["python3", "python"].into_iter().find(|p| quiet(Command::new(p).arg("--version"))).map(PathBuf::from)
}

/// `pip install --target`, with the pip that is there, or one in a virtual environment inside of `toolchain`.
/// `otherwise` says how to do without.
pub(crate) fn install(toolchain: &Path, target: &Path, packages: &[&str], otherwise: &str) -> Result<()> {
    let mut python =
        python().with_context(|| format!("no python3 on PATH; install Python with pip, or {otherwise}"))?;
    if !quiet(Command::new(&python).args(["-m", "pip", "--version"])) {
        // One makes it, whoever else installs meanwhile.
        static MAKING: Mutex<()> = Mutex::new(());
        let _alone = MAKING.lock().unwrap_or_else(|e| e.into_inner());
        let venv = toolchain.join("venv");
        let of_venv = venv.join("bin/python");
        if !quiet(Command::new(&of_venv).args(["-m", "pip", "--version"])) {
            eprintln!("this Python has no pip: making a virtual environment in {}", venv.display());
            let made = Command::new(&python).args(["-m", "venv"]).arg(&venv).status();
            if !made.is_ok_and(|s| s.success()) {
                bail!(
                    "`python -m venv` failed; install pip or venv (Debian: apt install python3-venv), or {otherwise}"
                );
            }
        }
        python = of_venv;
    }
    eprintln!("installing {} into {}", packages.join(", "), target.display());
    let mut pip = Command::new(&python);
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--upgrade", "--target"])
        .arg(target)
        .args(packages)
        // The target folder is the project's own: what pip says about the system's packages does not apply.
        .env("PIP_ROOT_USER_ACTION", "ignore");
    let status = pip.status().with_context(|| format!("cannot start {pip:?}"))?;
    if !status.success() {
        bail!("{pip:?} ended with {status}; {otherwise}");
    }
    Ok(())
}

/// Whether a command starts and succeeds; its output is dropped.
pub(crate) fn quiet(command: &mut Command) -> bool {
    command.output().is_ok_and(|o| o.status.success())
}

//! The tests of the Python package, against the library of this workspace.

use super::{pip, torch};
use anyhow::{Context, Result};
use std::path::Path;
use std::process::Command;

/// What the tests import; ml_dtypes is bfloat16 for NumPy.
const PACKAGES: [&str; 2] = ["numpy>=1.26", "ml_dtypes>=0.4"];
const IMPORT: &str = "import numpy, ml_dtypes";

/// Builds `libflashtune`, installs what the tests import unless this Python has it, and runs them.
pub fn test(root: &Path, args: &[String]) -> Result<()> {
    let mut build = super::cargo();
    // All of the workspace, and the target of a test, which brings the features that its tests have: nothing is
    // compiled twice.
    build.args(["build", "--workspace", "--lib", "--test", "programs"]);
    super::run(build)?;

    let python = pip::python().context("no python3 on PATH; install Python to test its package")?;
    let toolchain = root.join(".toolchain");
    let packages = toolchain.join("python");
    let package = root.join("bindings/python");
    let mut path = vec![package.clone()];
    if !pip::quiet(Command::new(&python).args(["-c", IMPORT])) {
        path.push(packages.clone());
        // Also when what is there was installed for another Python.
        if !pip::quiet(Command::new(&python).args(["-c", IMPORT]).env("PYTHONPATH", &packages)) {
            pip::install(&toolchain, &packages, &PACKAGES, "install numpy and ml_dtypes for this Python")?;
        }
    }
    path.extend(torch::ensure(root, &python)?);
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), |dir| root.join(dir));
    let mut tests = Command::new(python);
    tests
        .args(["-B", "-m", "unittest", "discover", "--start-directory"])
        .arg(package.join("tests"))
        .args(args)
        .env("PYTHONPATH", std::env::join_paths(path)?)
        .env("FLASHTUNE_LIBRARY", target.join("debug/libflashtune.so"))
        .env("FLASHTUNE_CACHE", target.join("tmp/python-cache"));
    super::run(tests)
}

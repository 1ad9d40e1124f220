//! The tests of the Python package, against the library of this workspace.

use super::{cc, pip, torch};
use anyhow::{Context, Result};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

/// What the tests import; ml_dtypes is bfloat16 for NumPy.
const PACKAGES: [&str; 2] = ["numpy>=1.26", "ml_dtypes>=0.4"];
const IMPORT: &str = "import numpy, ml_dtypes";

/// In CI, begins to install what the tests import beside what is built before them: 85 s of one process, in which the
/// other core had nothing to do. What fails here is tried again, and told, when it is wanted.
pub(crate) fn install_ahead(root: PathBuf) {
    if super::in_ci() {
        std::thread::spawn(move || pip::python().map(|python| packages(&root, &python)));
    }
}

/// The folders to put on the path for what the tests import; none for what this Python has.
fn packages(root: &Path, python: &Path) -> Result<Vec<PathBuf>> {
    static INSTALLING: Mutex<()> = Mutex::new(());
    let _alone = INSTALLING.lock().unwrap_or_else(|e| e.into_inner());
    let toolchain = root.join(".toolchain");
    let packages = toolchain.join("python");
    let mut path = Vec::new();
    if !pip::quiet(Command::new(python).args(["-c", IMPORT])) {
        // Also when what is there was installed for another Python.
        if !pip::quiet(Command::new(python).args(["-c", IMPORT]).env("PYTHONPATH", &packages)) {
            pip::install(&toolchain, &packages, &PACKAGES, "install numpy and ml_dtypes for this Python")?;
        }
        path.push(packages);
    }
    path.extend(torch::ensure(root, python)?);
    Ok(path)
}

/// Builds `libflashtune`, installs what the tests import unless this Python has it, and runs them: each module
/// in a process of its own, as many at once as there are cores (run_modules.py), unless ARGS choose some.
pub(crate) fn test(root: &Path, args: &[String]) -> Result<()> {
    let mut build = super::cargo();
    // All of the workspace, and the target of a test, which brings the features that its tests have: nothing is
    // compiled twice.
    build.args(["build", "--workspace", "--lib", "--test", "programs"]);
    super::run(build)?;

    let python = pip::python().context("no python3 on PATH; install Python to test its package")?;
    let package = root.join("bindings/python");
    let mut path = vec![package.clone()];
    path.extend(packages(root, &python)?);
    let target = super::target();
    let tests = package.join("tests");
    path.push(tests.clone());
    let mut process = Command::new(&python);
    process.arg("-B").env("PYTHONPATH", std::env::join_paths(path)?);
    process.env("FLASHTUNE_LIBRARY", target.join("debug/libflashtune.so"));
    // Graphs that PyTorch has kept call operators as they were when it compiled them.
    let compiled = tempfile::tempdir()?;
    process.env("TORCHINDUCTOR_CACHE_DIR", compiled.path());
    process.envs(cc::remembering(&target)?.map(|cc| ("CC", cc)));
    if !args.is_empty() {
        process.env("FLASHTUNE_CACHE", target.join("tmp/python-cache-0"));
        process.args(["-m", "unittest", "discover", "--start-directory"]).arg(&tests).args(args);
        return super::run(process);
    }
    let processes = std::thread::available_parallelism().map_or(1, |n| n.get()).min(4);
    process.arg(tests.join("run_modules.py")).args(["--processes", &processes.to_string(), "--caches"]);
    process.arg(target.join("tmp/python-cache-"));
    process.args(modules(&tests)?.iter().map(|module| match module == MEASURES {
        true => format!("{module}:KERNELS_OPTIMISED=little"),
        false => module.clone(),
    }));
    super::run(process)
}

/// Modules that take longest, which are begun first: they compile dozens of kernels of the CPU (72, 64, 38 and 17 s of
/// two cores; the others 12 at most). By their bytes one of two processes had 584 s and the other 50.
const LONGEST: [&str; 4] = ["test_numpy", "test_benches", "test_repeated_calls", "test_torch_operators"];

/// The module that times and checks ragged kernels, for longer than they compile: of 147 s 95 were theirs where they
/// were not inlined (cc.rs).
const MEASURES: &str = "test_benches";

/// Names of the modules with tests, in the order in which they are begun.
fn modules(tests: &Path) -> Result<Vec<String>> {
    let mut modules = Vec::new();
    for entry in std::fs::read_dir(tests).with_context(|| format!("cannot read {}", tests.display()))? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if let Some(module) = name.strip_suffix(".py").filter(|name| name.starts_with("test_")) {
            modules.push(module.to_owned());
        }
    }
    let place = |module: &str| LONGEST.iter().position(|long| *long == module).unwrap_or(LONGEST.len());
    modules.sort_by(|a, b| place(a).cmp(&place(b)).then_with(|| a.cmp(b)));
    Ok(modules)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_are_files_of_tests_alone_and_the_longest_come_first() {
        let tmp = tempfile::tempdir().unwrap();
        for name in ["test_a.py", "reference.py", &format!("{}.py", LONGEST[0]), "test_b.txt"] {
            std::fs::write(tmp.path().join(name), "1").unwrap();
        }
        assert_eq!(modules(tmp.path()).unwrap(), [LONGEST[0], "test_a"]);
        let there = modules(&super::super::root().join("bindings/python/tests")).unwrap();
        assert_eq!(there[..LONGEST.len()], LONGEST);
    }
}

//! The tests of the Python package, against the library of this workspace.

use super::{pip, torch};
use anyhow::{Context, Result, bail};
use std::ffi::OsString;
use std::path::Path;
use std::process::Command;

/// What the tests import; ml_dtypes is bfloat16 for NumPy.
const PACKAGES: [&str; 2] = ["numpy>=1.26", "ml_dtypes>=0.4"];
const IMPORT: &str = "import numpy, ml_dtypes";

/// Builds `libflashtune`, installs what the tests import unless this Python has it, and runs them, in as many processes
/// as there are cores unless ARGS choose some.
pub(crate) fn test(root: &Path, args: &[String]) -> Result<()> {
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
    let tests = package.join("tests");
    path.push(tests.clone());
    let mut every: Vec<(&str, OsString)> = vec![("PYTHONPATH", std::env::join_paths(path)?)];
    every.push(("FLASHTUNE_LIBRARY", target.join("debug/libflashtune.so").into()));
    // Graphs that PyTorch has kept call operators as they were when it compiled them.
    let compiled = tempfile::tempdir()?;
    every.push(("TORCHINDUCTOR_CACHE_DIR", compiled.path().into()));
    let process = |number: usize| {
        let mut process = Command::new(&python);
        process.args(["-B", "-m", "unittest"]).envs(every.iter().map(|(name, value)| (name, value)));
        // A cache of its own: what one test finds does not hang on what others do at the same time.
        process.env("FLASHTUNE_CACHE", target.join(format!("tmp/python-cache-{number}")));
        process
    };
    if !args.is_empty() {
        let mut discover = process(0);
        discover.args(["discover", "--start-directory"]).arg(&tests).args(args);
        return super::run(discover);
    }
    let processes = std::thread::available_parallelism().map_or(1, |n| n.get()).min(4);
    let mut started = Vec::new();
    for (number, modules) in shares(modules(&tests)?, processes).into_iter().enumerate() {
        let mut process = process(number);
        process.args(&modules);
        started.push(std::thread::spawn(move || (process.output(), modules)));
    }
    let mut failed = Vec::new();
    for process in started {
        let (output, modules) = process.join().expect("it does not panic");
        let output = output.context("cannot start Python")?;
        eprintln!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        if !output.status.success() {
            failed.push(format!("{} ended with {}", modules.join(" "), output.status));
        }
    }
    if failed.is_empty() { Ok(()) } else { bail!("python -m unittest {}", failed.join("; ")) }
}

/// Names of the modules with tests, and the bytes of each, by which its time goes more or less.
fn modules(tests: &Path) -> Result<Vec<(String, u64)>> {
    let mut modules = Vec::new();
    for entry in std::fs::read_dir(tests).with_context(|| format!("cannot read {}", tests.display()))? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if let Some(module) = name.strip_suffix(".py").filter(|name| name.starts_with("test_")) {
            modules.push((module.to_owned(), entry.metadata()?.len()));
        }
    }
    Ok(modules)
}

/// Modules for so many processes, the same in every run: from the largest on, each to the process that has least.
fn shares(mut modules: Vec<(String, u64)>, processes: usize) -> Vec<Vec<String>> {
    modules.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
    let mut shares = vec![(0, Vec::new()); processes.min(modules.len())];
    for (module, bytes) in modules {
        let least = shares.iter_mut().min_by_key(|share| share.0).expect("as many as there are modules, or fewer");
        least.0 += bytes;
        least.1.push(module);
    }
    shares.into_iter().map(|share| share.1).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_module_is_in_one_share_and_the_largest_are_apart() {
        let modules = |names: &[(&str, u64)]| names.iter().map(|(n, b)| ((*n).to_owned(), *b)).collect::<Vec<_>>();
        let four = modules(&[("d", 1), ("a", 9), ("c", 4), ("b", 5)]);
        assert_eq!(shares(four.clone(), 2), [vec!["a", "d"], vec!["b", "c"]]);
        assert_eq!(shares(four, 1), [["a", "b", "c", "d"]]);
        assert_eq!(shares(modules(&[("a", 1)]), 4), [["a"]]);
    }

    #[test]
    fn modules_are_files_of_tests_alone() {
        let tmp = tempfile::tempdir().unwrap();
        for (name, text) in [("test_a.py", "1234"), ("reference.py", "1"), ("test_b.txt", "1")] {
            std::fs::write(tmp.path().join(name), text).unwrap();
        }
        assert_eq!(modules(tmp.path()).unwrap(), [("test_a".to_owned(), 4)]);
    }
}

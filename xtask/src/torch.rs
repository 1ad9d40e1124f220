//! PyTorch and Transformers for the tests of the Python package, on the CPU.
//!
//! The package index has PyTorch for CUDA alone: 530 MB, and gigabytes of CUDA libraries beside it. The wheel by
//! itself, with empty libraries in the places of CUDA's, computes on the CPU and takes half a minute to install.

use super::pip;
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The version that GPU hosts are tested with; with CUDA's runtime and profiling interface, which are small.
const TORCH: [&str; 6] = [
    "--no-deps",
    "torch==2.11.0",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cupti==13.0.85",
    "transformers==5.17.0",
    "huggingface_hub==1.5.0",
];
/// What these import.
const NEEDED: [&str; 15] = [
    "numpy>=1.26",
    "ml_dtypes>=0.4",
    "typing_extensions",
    "filelock",
    "sympy",
    "networkx",
    "jinja2",
    "fsspec",
    "tokenizers==0.23.1",
    "safetensors",
    "regex",
    "pyyaml",
    "packaging",
    "tqdm",
    "httpx",
];
const IMPORT: &str = "import torch, transformers, numpy, ml_dtypes; from transformers import LlamaForCausalLM";

/// The folder to put on the path for PyTorch, or `None` where the tests are to do with what this Python has: that is
/// everywhere but in CI, and where `FLASHTUNE_TEST_TORCH` is 1.
pub(crate) fn ensure(root: &Path, python: &Path) -> Result<Option<PathBuf>> {
    let asked = |name: &str, value: &str| std::env::var(name).is_ok_and(|v| v == value);
    if pip::quiet(Command::new(python).args(["-c", IMPORT])) {
        return Ok(None);
    }
    if !asked("CI", "true") && !asked("FLASHTUNE_TEST_TORCH", "1") {
        eprintln!("tests with PyTorch are left out; FLASHTUNE_TEST_TORCH=1 installs it (530 MB)");
        return Ok(None);
    }
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        eprintln!("tests with PyTorch are left out: they need x86-64 Linux, or a Python that has PyTorch");
        return Ok(None);
    }
    let toolchain = root.join(".toolchain");
    let target = toolchain.join("torch");
    let works = || pip::quiet(Command::new(python).args(["-c", IMPORT]).env("PYTHONPATH", &target));
    if works() {
        return Ok(Some(target));
    }
    let otherwise = "install torch and transformers for this Python";
    pip::install(&toolchain, &target, &NEEDED, otherwise)?;
    pip::install(&toolchain, &target, &TORCH, otherwise)?;
    let script = root.join("xtask/src/cpu_torch.py");
    let status = Command::new(python).arg(&script).arg(&target).status().context("cannot start Python")?;
    if !status.success() || !works() {
        bail!("PyTorch in {} cannot be imported; {otherwise}", target.display());
    }
    Ok(Some(target))
}

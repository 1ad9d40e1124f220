//! Puts NVIDIA's run-time compiler into `.toolchain/`, through pip.

use super::pip;
use anyhow::{Result, bail};
use std::path::{Path, PathBuf};

/// The wheel. The version is pinned because compile results are part of what the tests look at.
const WHEEL: &str = "nvidia-cuda-nvrtc==13.5.37";
/// That of CUDA 13.0, which hosts with PyTorch 2.11 have.
const OLDEST: &str = "nvidia-cuda-nvrtc==13.0.88";
/// Folder of the wheel that holds the library.
const LIBRARY_DIR: &str = "nvidia/cu13/lib";
const LIBRARY: &str = "libnvrtc.so.13";

/// The folder with NVRTC: the one that `FLASHTUNE_NVRTC` names, or `.toolchain/`, filled on the first call.
pub(crate) fn ensure(root: &Path) -> Result<PathBuf> {
    if let Some(named) = std::env::var_os("FLASHTUNE_NVRTC").filter(|v| !v.is_empty()) {
        return Ok(named.into());
    }
    let toolchain = root.join(".toolchain");
    installed(&toolchain, &toolchain, WHEEL, "set FLASHTUNE_NVRTC to a folder with libnvrtc.so.13")
}

/// The folder with the oldest NVRTC that kernels are to compile with: the one that `FLASHTUNE_OLDEST_NVRTC` names, or
/// `.toolchain/oldest/`, filled on the first call.
pub(crate) fn ensure_oldest(root: &Path) -> Result<PathBuf> {
    if let Some(named) = std::env::var_os("FLASHTUNE_OLDEST_NVRTC").filter(|v| !v.is_empty()) {
        return Ok(named.into());
    }
    let toolchain = root.join(".toolchain");
    installed(
        &toolchain,
        &toolchain.join("oldest"),
        OLDEST,
        "set FLASHTUNE_OLDEST_NVRTC to a folder with libnvrtc.so.13",
    )
}

/// The folder of a wheel's library, below `target`.
fn installed(toolchain: &Path, target: &Path, wheel: &str, otherwise: &str) -> Result<PathBuf> {
    let lib = target.join(LIBRARY_DIR);
    if lib.join(LIBRARY).is_file() {
        return Ok(lib);
    }
    pip::install(toolchain, target, &[wheel], otherwise)?;
    if !lib.join(LIBRARY).is_file() {
        bail!("{wheel} was installed, but {} is not there", lib.join(LIBRARY).display());
    }
    Ok(lib)
}

//! Puts NVIDIA's run-time compiler into `.toolchain/`, through pip.

use super::pip;
use anyhow::{Result, bail};
use std::path::{Path, PathBuf};

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
    pip::install(&target, &target, &[WHEEL], "set FLASHTUNE_NVRTC to a folder with libnvrtc.so.13")?;
    if !lib.join(LIBRARY).is_file() {
        bail!("{WHEEL} was installed, but {} is not there", lib.join(LIBRARY).display());
    }
    Ok(lib)
}

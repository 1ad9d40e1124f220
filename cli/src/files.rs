//! Input files as text; output files, whole or not at all.

use super::exit::usage;
use anyhow::Result;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;

/// The text of an input file.
pub(crate) fn read_text(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).map_err(|e| usage(format!("cannot read {}: {e}; check the path", path.display())))
}

/// Writes a file that appears whole or not at all. A device or a pipe is written to and stays what it is.
pub(crate) fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let written = match std::fs::metadata(path) {
        Ok(there) if !there.is_file() => OpenOptions::new().write(true).open(path).and_then(|mut f| f.write_all(bytes)),
        // Behind a link, its target is what is replaced.
        Ok(_) => path.canonicalize().and_then(|path| replace(&path, bytes)),
        Err(_) => replace(path, bytes),
    };
    written.map_err(|e| unwritable(path, &e.to_string()))
}

/// Writes a file beside its place and renames it. Who may read it is up to the umask, as for any new file.
fn replace(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let mut builder = tempfile::Builder::new();
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    let mut temporary = builder.tempfile_in(folder(path))?;
    temporary.write_all(bytes)?;
    temporary.persist(path).map_err(|e| e.error)?;
    Ok(())
}

/// Fails early, before anything is computed, when the folder of an output is not there.
pub(crate) fn check_folder(path: &Path) -> Result<()> {
    match folder(path) {
        f if f.is_dir() => Ok(()),
        f => Err(unwritable(path, &format!("{} is not a folder", f.display()))),
    }
}

/// The folder that a file is in; a bare name is in the current one.
fn folder(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn unwritable(path: &Path, why: &str) -> anyhow::Error {
    usage(format!("cannot write {}: {why}; name a file in a writable folder", path.display()))
}

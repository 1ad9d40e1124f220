//! Errors of the library.

/// Why stored results cannot be read or written.
pub use flashtune_cache::Error as CacheError;
/// Why a problem, a name or a score program is refused.
pub use flashtune_codegen::Error as CodegenError;
/// Why a device, a compiler or a call fails.
pub use flashtune_runtime::Error as RuntimeError;
/// Why tuning has no result.
pub use flashtune_tuner::Error as TunerError;

use flashtune_codegen::score::ProgramError;
use std::path::PathBuf;

/// What can go wrong in a host's hands.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The device, a compiler, a tensor, or the policy.
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
    /// Tuning had no result.
    #[error(transparent)]
    Tuner(TunerError),
    /// A file of problems and sizes holds something else.
    #[error(
        "{}{}: {message}; write one JSON object with `problem` and `shape` per line, as `Engine::write_untuned` \
         does",
        path.display(), at_line(*line)
    )]
    Manifest {
        /// The file.
        path: PathBuf,
        /// The line, from 1; 0 for the file as a whole.
        line: usize,
        /// What is wrong with it.
        message: String,
    },
    /// A file of problems and sizes is not there, or may not be read or written.
    #[error("cannot {action} {}: {source}; {remedy}", path.display())]
    ManifestFile {
        /// `read` or `write`.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
        /// What to do.
        remedy: &'static str,
    },
    /// A file of metrics cannot be written.
    #[error("cannot write the metrics to {}: {source}; name a file in a writable folder", path.display())]
    MetricsFile {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// The folder of template overrides cannot be used.
    #[error("templates {}: {message}; name a folder with files such as forward/cpu.c", path.display())]
    Templates {
        /// The folder or file.
        path: PathBuf,
        /// What is wrong with it.
        message: String,
    },
}

fn at_line(line: usize) -> String {
    if line == 0 { String::new() } else { format!(", line {line}") }
}

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl From<CodegenError> for Error {
    fn from(e: CodegenError) -> Self {
        Error::Runtime(e.into())
    }
}

impl From<ProgramError> for Error {
    fn from(e: ProgramError) -> Self {
        CodegenError::from(e).into()
    }
}

impl From<CacheError> for Error {
    fn from(e: CacheError) -> Self {
        Error::Runtime(e.into())
    }
}

impl From<TunerError> for Error {
    fn from(e: TunerError) -> Self {
        match e {
            // One kind of failure, one variant, wherever it happened.
            TunerError::Runtime(e) => Error::Runtime(e),
            TunerError::Cache(e) => Error::Runtime(e.into()),
            e => Error::Tuner(e),
        }
    }
}

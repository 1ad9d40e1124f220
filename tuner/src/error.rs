//! Why a job has no result. One schedule's failure is data, not an error.

/// What can end a job.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The device, the compiler or the problem is at fault.
    #[error(transparent)]
    Runtime(#[from] flashtune_runtime::Error),
    /// The store cannot be read or written.
    #[error(transparent)]
    Cache(#[from] flashtune_cache::Error),
    /// The job asks for something that cannot be timed.
    #[error("{field} = {value}: {limit}; {remedy}")]
    Job {
        /// The field.
        field: &'static str,
        /// Its value.
        value: String,
        /// The rule.
        limit: &'static str,
        /// What to do.
        remedy: &'static str,
    },
    /// No schedule came through.
    #[error(
        "no schedule for {problem} came through on {device} ({tried} tried):{reasons}\nrun `flashtune doctor` and `flashtune check`"
    )]
    NothingWorks {
        /// The problem.
        problem: String,
        /// The device.
        device: String,
        /// How many were tried.
        tried: usize,
        /// The first few reasons, one on a line.
        reasons: String,
    },
}

impl From<flashtune_codegen::Error> for Error {
    fn from(e: flashtune_codegen::Error) -> Self {
        Error::Runtime(e.into())
    }
}

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

//! Errors of devices and compilers; each one tells the remedy.

/// What can go wrong at run time.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The problem, shape or schedule is not supported, or a template is at fault.
    #[error(transparent)]
    Codegen(#[from] flashtune_codegen::Error),
    /// Stored results could not be read or written.
    #[error(transparent)]
    Cache(#[from] flashtune_cache::Error),
    /// A shared library or tool is not on this machine.
    #[error("{what} was not found ({searched}); {remedy}")]
    Missing {
        /// The library or tool.
        what: &'static str,
        /// Where it was looked for.
        searched: String,
        /// How to get it.
        remedy: &'static str,
    },
    /// The compiler refused the source or crashed.
    #[error("{compiler} cannot compile {kernel}:\n{log}")]
    Compile {
        /// Compiler name and version.
        compiler: String,
        /// Kernel name.
        kernel: String,
        /// The compiler's log.
        log: String,
    },
    /// The device driver reported an error.
    #[error("{call} failed on {device}: {message}; {remedy}")]
    Device {
        /// The operation.
        call: &'static str,
        /// The device.
        device: String,
        /// The driver's message.
        message: String,
        /// What to do.
        remedy: &'static str,
    },
    /// A tensor does not fit the problem or the device.
    #[error("tensor {tensor}: {field} is {found}, but {expected}; {remedy}")]
    Tensor {
        /// `q`, `k`, `v`, `o` or `lse`.
        tensor: &'static str,
        /// What is wrong with it.
        field: &'static str,
        /// The value given.
        found: String,
        /// The rule.
        expected: String,
        /// What to do.
        remedy: &'static str,
    },
    /// A block mask cannot be made, or does not fit the call.
    #[error("block mask: {field} is {found}, but {expected}; {remedy}")]
    BlockMask {
        /// What is wrong, or does not fit.
        field: String,
        /// The value given.
        found: String,
        /// The rule.
        expected: String,
        /// What to do.
        remedy: &'static str,
    },
    /// Nothing tuned and no compiler allowed.
    #[error("no kernel for {problem} under the sealed policy: {reason}; {remedy}")]
    Sealed {
        /// The problem.
        problem: String,
        /// What was looked at and why it did not serve.
        reason: String,
        /// What to do.
        remedy: &'static str,
    },
    /// A file on the host could not be read or written.
    #[error("{action} {path}: {source}; {remedy}")]
    Io {
        /// What was attempted.
        action: &'static str,
        /// Where.
        path: String,
        /// The system's answer.
        source: std::io::Error,
        /// What to do.
        remedy: &'static str,
    },
}

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error with all that lies behind it: some libraries put the system's own message into the source alone.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(source) = next {
        text = format!("{text}: {source}");
        next = source.source();
    }
    text
}

//! Exit codes, and the one line that an error prints.

use flashtune_runtime::Error as RuntimeError;
use std::fmt;
use std::process::ExitCode;
use {flashtune_cache as cache, flashtune_codegen as codegen, flashtune_tuner as tuner};

/// What the process ends with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exit {
    /// A check or a computation failed.
    Failed = 1,
    /// Bad input or usage.
    Usage = 2,
    /// Something that is needed is not on this machine.
    Missing = 3,
}

/// Input that the command cannot use: exit code 2.
#[derive(Debug)]
pub(crate) struct Usage(pub String);

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Usage {}

/// A finished command whose answer is "no": exit code 1. Its report is already printed.
#[derive(Debug)]
pub(crate) struct Failed(pub String);

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Failed {}

/// What no kernel computes: exit code 3.
#[derive(Debug)]
pub(crate) struct Unavailable(pub String);

impl fmt::Display for Unavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Unavailable {}

/// Shorthand for an [`anyhow::Error`] of kind [`Usage`].
pub(crate) fn usage(message: impl Into<String>) -> anyhow::Error {
    Usage(message.into()).into()
}

/// Prints `error: ...` unless the reader of our output went away, and gives the exit code.
pub(crate) fn code(outcome: anyhow::Result<()>) -> ExitCode {
    let Err(error) = outcome else { return ExitCode::SUCCESS };
    if is_broken_pipe(&error) {
        return ExitCode::SUCCESS;
    }
    // One line, unless a compiler's log is part of it.
    eprintln!("error: {}", text(&error));
    ExitCode::from(classify(&error) as u8)
}

/// An error and its causes, without those that the text has told already.
fn text(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text.push_str(": ");
            text.push_str(&cause);
        }
    }
    text
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.chain().any(|e| {
        let io = e.downcast_ref::<std::io::Error>().map(std::io::Error::kind);
        let json = e.downcast_ref::<serde_json::Error>().and_then(serde_json::Error::io_error_kind);
        io.or(json) == Some(std::io::ErrorKind::BrokenPipe)
    })
}

/// The exit code of an error: decided by the first error in its chain that has one.
pub(crate) fn classify(error: &anyhow::Error) -> Exit {
    for e in error.chain() {
        if e.is::<Usage>() || e.is::<codegen::Error>() || e.is::<flashtune::model::Error>() {
            return Exit::Usage;
        }
        if e.is::<Unavailable>() {
            return Exit::Missing;
        }
        #[cfg(feature = "registry")]
        if let Some(e) = e.downcast_ref::<crate::registry::Error>() {
            return of_registry(e);
        }
        if let Some(e) = e.downcast_ref::<cache::Error>() {
            return of_cache(e);
        }
        if let Some(e) = e.downcast_ref::<RuntimeError>() {
            return of_runtime(e);
        }
        match e.downcast_ref::<flashtune::Error>() {
            Some(flashtune::Error::Runtime(e)) => return of_runtime(e),
            Some(
                flashtune::Error::Templates { .. }
                | flashtune::Error::Manifest { .. }
                | flashtune::Error::ManifestFile { .. }
                | flashtune::Error::Tuner(tuner::Error::Job { .. }),
            ) => {
                return Exit::Usage;
            }
            Some(flashtune::Error::Tuner(tuner::Error::InWorker { cause, .. })) => {
                return match cause {
                    tuner::Cause::Input => Exit::Usage,
                    tuner::Cause::Missing => Exit::Missing,
                    tuner::Cause::Other => Exit::Failed,
                };
            }
            _ => {}
        }
    }
    Exit::Failed
}

fn of_runtime(error: &RuntimeError) -> Exit {
    match error {
        RuntimeError::Codegen(_)
        | RuntimeError::Tensor { .. }
        | RuntimeError::BlockMask { .. }
        | RuntimeError::Io { .. } => Exit::Usage,
        RuntimeError::Cache(e) => of_cache(e),
        RuntimeError::Missing { .. } | RuntimeError::Sealed { .. } => Exit::Missing,
        _ => Exit::Failed,
    }
}

#[cfg(feature = "registry")]
fn of_registry(error: &crate::registry::Error) -> Exit {
    use crate::registry::Error;
    match error {
        Error::Unreachable { .. } => Exit::Missing,
        Error::Registry { .. } => Exit::Failed,
        _ => Exit::Usage,
    }
}

fn of_cache(error: &cache::Error) -> Exit {
    match error {
        cache::Error::Locked { .. } | cache::Error::Store { .. } => Exit::Failed,
        _ => Exit::Usage,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_that_is_part_of_the_error_is_told_once() {
        let missing = cache::Bundle::map(std::path::Path::new("/nonexistent/b.ftb")).unwrap_err();
        let told = text(&anyhow::Error::from(missing));
        assert_eq!(told.matches("os error 2").count(), 1, "{told}");
        let other = anyhow::Error::from(std::io::Error::other("the cause")).context("what was done");
        assert_eq!(text(&other), "what was done: the cause");
    }
}

//! Why a job has no result. One schedule's failure is data, not an error.

use crate::WorkerCommand;
use flashtune_codegen::Shape;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// What kind of fault a worker reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Cause {
    /// The input asks for what cannot be.
    Input,
    /// A library or a tool is not on this machine.
    Missing,
    /// Anything else.
    Other,
}

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
    /// No worker process, or one that ends or misbehaves whatever the candidate.
    #[error("the worker {}: {message}; name a `flashtune` program of this version", program.display())]
    Worker {
        /// The program that is the worker.
        program: PathBuf,
        /// What is wrong.
        message: String,
    },
    /// The device or the compiler is at fault, in the worker's words.
    #[error("{message}")]
    InWorker {
        /// What kind of fault it is.
        cause: Cause,
        /// What is wrong, and what to do.
        message: String,
    },
    /// The device no longer runs a kernel that it ran before. Nothing was stored.
    #[error(
        "{device} no longer runs what it ran before ({reason}); nothing was stored: see what the system says of the \
         device (`nvidia-smi`, `dmesg`), then tune again"
    )]
    Lost {
        /// The device.
        device: String,
        /// What the kernel that had passed its check fails with.
        reason: String,
    },
    /// Measuring did not say which schedule is the fastest. Nothing was stored.
    #[error("{problem} {shape}: {reason}; nothing was stored: tune again when the machine is quiet, or with more time")]
    Noise {
        /// The problem.
        problem: String,
        /// The sizes.
        shape: Shape,
        /// What stood in the way, with figures.
        reason: String,
    },
    /// Another process has been tuning the same, or has used the device, for longer than the job would wait.
    #[error("{problem} {shape}: {by}; or wait for it, with more patience")]
    Busy {
        /// The problem.
        problem: String,
        /// The sizes.
        shape: Shape,
        /// What is done by which process, and what to do about that one.
        by: String,
    },
    /// No schedule came through.
    #[error(
        "no schedule for {problem} came through on {device} ({tried} tried):{reasons}\nrun `flashtune doctor` and \
         `flashtune check`"
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

impl Error {
    pub(crate) fn worker(command: &WorkerCommand, message: String) -> Self {
        Error::Worker { program: command.program.clone(), message }
    }
}

impl From<&flashtune_runtime::Error> for Cause {
    fn from(e: &flashtune_runtime::Error) -> Self {
        match e {
            flashtune_runtime::Error::Codegen(_) => Cause::Input,
            flashtune_runtime::Error::Missing { .. } => Cause::Missing,
            _ => Cause::Other,
        }
    }
}

impl From<flashtune_codegen::Error> for Error {
    fn from(e: flashtune_codegen::Error) -> Self {
        Error::Runtime(e.into())
    }
}

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

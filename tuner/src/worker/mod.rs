//! Candidates run in a process of their own, so that the worst of them costs that process and nothing else.
//!
//! ```text
//! tuner (no context of the device)                       worker: the same program, another command
//!   Remote  -- Request: start, load, check, time -------> serve -> Local -> Watched -> Device
//!           <-------- Reply: launched, returned, value --
//!   Compilers -- Request: compile ----------------------> serve -> Compiler       (one process for each core)
//! ```
//!
//! The two talk in frames over a socket that is the worker's standard input ([`protocol`]). A worker that dies or does
//! not answer in time is killed with all that it started ([`process`]); it dies with the process that started it, even
//! when that one is killed. What to make of a death is decided by [`crate::runner`].

mod compilers;
mod process;
mod protocol;
mod serve;
mod watched;

pub(crate) use compilers::{Compilers, TOOK_TOO_LONG};
pub(crate) use process::{Limits, Loss, Process};
pub(crate) use protocol::{Reply, Request};
pub use serve::serve;

use std::ffi::OsString;
use std::path::PathBuf;

/// How a worker process is started: a program that calls [`serve`] and nothing else.
///
/// `flashtune worker` is one. A host can be its own worker: `program` is its own path, `arguments` are what makes its
/// `main` call [`serve`] first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerCommand {
    /// The program.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<OsString>,
}

impl WorkerCommand {
    /// The worker of the `flashtune` command at this path.
    pub fn flashtune(program: impl Into<PathBuf>) -> Self {
        Self { program: program.into(), arguments: vec!["worker".into()] }
    }
}

//! From a job to a record: which of the many schedules of a problem is the fastest correct one on this device.
//!
//! ```text
//! Job -> claim -> space (cost) -> search -> build (parallel, cached) -> prune (spills, duplicates) -> check (oracle)
//!                                    ^                                                         -> glance
//!                                    `------- what was measured, what failed ------------------'
//!     -> race (rounds) -> final (pairs) -> Record -> Store -> snapshot
//! ```
//!
//! On a GPU, what is right of `build` goes on while others compile, and batches are proposed ahead of the results; on
//! the cpu the two take turns (`tune/field.rs`).
//!
//! Candidates compile, load and run in worker processes ([`Runner::worker`]), or by choice in this one.
//!
//! ```no_run
//! use flashtune_cache::CacheDir;
//! use flashtune_codegen::{DType, Mask, Problem, Shape, TemplateSet};
//! use flashtune_runtime::DeviceSpec;
//! use flashtune_tuner::{Job, Runner, tune};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let problem = Problem::forward(DType::Bf16, 128, Mask::Causal.kind())?;
//! let shape = Shape { batch: 1, heads: 32, kv_heads: 8, q_len: 4096, kv_len: 4096, mask: Mask::Causal };
//! // Hosts run candidates in processes of their own: `Runner::worker`.
//! let mut runner = Runner::in_this_process(flashtune_runtime::open(DeviceSpec::Auto)?);
//! let dir = CacheDir::resolve(None)?;
//! let found = tune(&mut runner, &TemplateSet::embedded(), &dir, &Job::new(problem, shape), &())?;
//! println!("{} wins", found.record.schedule);
//! # Ok(())
//! # }
//! ```
//!
//! Architecture invariants: no CUDA call is made here, everything goes through [`flashtune_runtime::Device`], which a
//! tuner with a worker does not even open; `unsafe` is only in front of a launch, in `runner/bench`, whose buffers the
//! same struct owns, and in `worker/watched`, which passes it on. A schedule's failure is data, never the end of the
//! job. No kernel is timed before it gave the right answer. The racing logic knows no device, so it is tested on paper.

mod build;
mod candidate;
mod cost;
mod decide;
mod error;
mod job;
mod observer;
mod prune;
mod race;
mod runner;
mod search;
mod space;
mod stats;
#[cfg(test)]
mod testing;
mod together;
mod tune;
mod worker;

pub use error::{Cause, Error, Result};
pub use job::{Job, Outcome, Search};
pub use observer::{Event, Observer, Phase};
pub use runner::Runner;
pub use together::tune_together;
pub use tune::tune;
pub use worker::{WorkerCommand, serve};

//! From a job to a record: which of the many schedules of a problem is the fastest correct one on this device.
//!
//! ```text
//! Job -> choose (space, model) -> build (parallel, cached) -> prune (spills, duplicates) -> verify (oracle)
//!     -> race (rounds) -> final (pairs) -> Record -> Store -> snapshot
//! ```
//!
//! Architecture invariants: no CUDA call is made here, everything goes through [`flashtune_runtime::Device`]; the one
//! `unsafe` block is the launch in `bench`, whose buffers the same struct owns. A schedule's failure is data, never the
//! end of the job. No kernel is timed before it gave the right answer. The racing logic knows no device, so it is tested
//! on paper.

mod bench;
mod build;
mod candidate;
mod decide;
mod error;
mod job;
mod model;
mod observer;
mod race;
mod space;
mod stats;
#[cfg(test)]
mod testing;
mod tune;
mod verify;

pub use error::{Error, Result};
pub use job::{Job, Outcome};
pub use observer::{Event, Observer, Phase};
pub use tune::tune;

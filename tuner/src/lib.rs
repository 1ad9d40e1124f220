//! From a job to a record: which of the many schedules of a problem is the fastest correct one on this device.
mod error;
mod job;
mod observer;
mod tune;

pub use error::{Error, Result};
pub use job::{Job, Outcome};
pub use observer::{Event, Observer, Phase};
pub use tune::tune;

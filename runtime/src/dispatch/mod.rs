//! From a call to a kernel: what is tuned, what is near, what the default is, and the account of it.
//!
//! ```text
//! memory -> user snapshot -> bundles -> embedded bundle -> nearest sizes -> other device of the arch -> untuned
//!        -> the default schedule, unless the policy is sealed
//! ```
//!
//! A caller in haste takes a quick schedule while the kernel of the choice is being compiled.

mod background;
mod binaries;
mod dispatcher;
mod donors;
mod explain;
mod flight;
#[cfg(test)]
mod interleavings;
mod job;
mod key;
mod load;
mod metrics;
mod plan;
mod policy;
mod seal;
mod sealed;
mod table;
mod tally;

pub use dispatcher::{Dispatcher, DispatcherConfig};
pub use explain::{Explanation, Refusal, Status};
pub use metrics::{COMPILE_BOUNDS, Metrics};
pub use plan::Plan;
pub use policy::Policy;
pub use sealed::{OnMiss, Seal};
pub use tally::{Calls, Counters, Untuned};

//! What threads share, by the names of std; it is std's. In unit tests each operation is also a point where another
//! thread may go on, wherever a model checker decides which (`sync/explored.rs`).

#[cfg(not(test))]
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, RwLock};

#[cfg(test)]
pub(crate) mod explored;
#[cfg(test)]
pub(crate) use explored::{Condvar, Mutex, MutexGuard, OnceLock, RwLock};

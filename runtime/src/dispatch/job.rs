//! A compilation whose result is asked for later.

use super::binaries::Binary;
use crate::Result;
use crate::sync::{Condvar, Mutex, MutexGuard};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::PoisonError;

/// A compilation that was begun, or is about to.
pub(super) struct Job {
    state: Mutex<State>,
    ended: Condvar,
}

enum State {
    Running,
    Ready(Box<Binary>),
    /// With the error, until somebody takes it; none after a panic.
    Failed(Option<crate::Error>),
    Taken,
}

impl Job {
    /// One that somebody will [`Job::run`].
    pub(crate) fn new() -> Self {
        Self { state: Mutex::new(State::Running), ended: Condvar::new() }
    }

    /// Does the work, and wakes those who wait for it.
    pub(crate) fn run(&self, work: impl FnOnce() -> Result<Binary>) {
        // Whoever waits must wake: after a panic it finds nothing, compiles on its own and meets the fault there.
        let state = match catch_unwind(AssertUnwindSafe(work)) {
            Ok(Ok(binary)) => State::Ready(Box::new(binary)),
            Ok(Err(e)) => State::Failed(Some(e)),
            Err(_) => State::Failed(None),
        };
        *self.lock() = state;
        self.ended.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether there is a binary to take, or was: then it is in memory, or will be in a moment.
    pub(crate) fn is_ready(&self) -> bool {
        matches!(*self.lock(), State::Ready(_) | State::Taken)
    }

    /// Whether it ended without a binary.
    pub(crate) fn has_failed(&self) -> bool {
        matches!(*self.lock(), State::Failed(_))
    }

    /// The result, waited for. Only the first who asks gets it.
    pub(crate) fn take(&self) -> Option<Result<Binary>> {
        let state = self.lock();
        let mut state =
            self.ended.wait_while(state, |s| matches!(s, State::Running)).unwrap_or_else(PoisonError::into_inner);
        match std::mem::replace(&mut *state, State::Taken) {
            State::Ready(binary) => Some(Ok(*binary)),
            State::Failed(e) => {
                *state = State::Failed(None);
                e.map(Err)
            }
            State::Running | State::Taken => None,
        }
    }
}

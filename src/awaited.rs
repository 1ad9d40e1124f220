//! What other processes are tuning while this one makes do with the next best choice.

use flashtune_codegen::{Problem, ShapeBucket};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How often it is looked whether the other is done.
const STEP: Duration = Duration::from_secs(1);

/// Classes of sizes with the time of the last look. Costs one load while there are none.
#[derive(Default)]
pub(crate) struct Awaited {
    any: AtomicBool,
    classes: Mutex<HashMap<(Problem, ShapeBucket), Instant>>,
}

impl Awaited {
    /// Somebody else tunes the class.
    pub(crate) fn add(&self, class: (Problem, ShapeBucket)) {
        let mut classes = self.classes.lock().unwrap_or_else(PoisonError::into_inner);
        classes.insert(class, Instant::now());
        self.any.store(true, Ordering::Relaxed);
    }

    /// Whether it is time to look again; then it is no longer awaited, unless it is added again.
    pub(crate) fn is_due(&self, class: impl FnOnce() -> (Problem, ShapeBucket)) -> bool {
        if !self.any.load(Ordering::Relaxed) {
            return false;
        }
        let mut classes = self.classes.lock().unwrap_or_else(PoisonError::into_inner);
        let class = class();
        let due = classes.get(&class).is_some_and(|since| since.elapsed() >= STEP);
        if due {
            classes.remove(&class);
            self.any.store(!classes.is_empty(), Ordering::Relaxed);
        }
        due
    }
}

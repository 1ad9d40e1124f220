//! One thread does the work of a key, the others wait for it.

use crate::sync::Mutex;
use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, PoisonError};

/// A lock per key, kept only while somebody holds or awaits it.
pub(crate) struct Flights<K> {
    keys: Mutex<HashMap<K, Arc<Mutex<()>>>>,
}

impl<K> Default for Flights<K> {
    fn default() -> Self {
        Self { keys: Mutex::new(HashMap::new()) }
    }
}

impl<K: Hash + Eq + Clone> Flights<K> {
    /// Runs `work` while no other thread runs with the same key. `work` looks first whether another thread has already
    /// done it. A panic in another thread's work does not spread.
    pub(crate) fn run<R>(&self, key: &K, work: impl FnOnce() -> R) -> R {
        let lock = {
            let mut keys = self.keys.lock().unwrap_or_else(PoisonError::into_inner);
            keys.entry(key.clone()).or_default().clone()
        };
        let result = {
            let _turn = lock.lock().unwrap_or_else(PoisonError::into_inner);
            work()
        };
        let mut keys = self.keys.lock().unwrap_or_else(PoisonError::into_inner);
        drop(lock);
        // The map's own reference is the last one when nobody waits.
        if keys.get(key).is_some_and(|l| Arc::strong_count(l) == 1) {
            keys.remove(key);
        }
        result
    }
}

#[cfg(test)]
impl<K> Flights<K> {
    /// Whether nobody holds or awaits anything.
    pub(super) fn is_empty(&self) -> bool {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[test]
    fn many_threads_do_the_work_of_a_key_once() {
        let flights = Flights::default();
        let (done, count) = (OnceLock::new(), AtomicU32::new(0));
        std::thread::scope(|s| {
            for _ in 0..16 {
                s.spawn(|| {
                    flights.run(&"key", || {
                        if done.get().is_none() {
                            count.fetch_add(1, Ordering::SeqCst);
                            std::thread::sleep(std::time::Duration::from_millis(5));
                            done.set(()).unwrap();
                        }
                    })
                });
            }
        });
        assert_eq!(count.load(Ordering::SeqCst), 1);
        assert!(flights.is_empty(), "keys are dropped when their work is done");
    }

    #[test]
    fn different_keys_do_not_wait_for_each_other() {
        let flights = Flights::default();
        let inner = flights.run(&1, || flights.run(&2, || 3));
        assert_eq!(inner, 3);
    }
}

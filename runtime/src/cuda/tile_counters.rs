//! Which counter a launch may use, of those that a module holds for persistent thread blocks that take tiles from a
//! counter.
//!
//! A counter serves one launch at a time and is left at zero. Launches of one stream follow each other, so every stream
//! has its own. A launch that is captured may be replayed beside anything: it has one that no other launch gets while
//! the graph, or what was instantiated from it, lives (`graph_objects.rs`). When none is left, -1 tells the kernel to
//! take tiles by stride.

use super::driver::Driver;
use super::graph_objects;
use cudarc::driver::sys::{self, CUstream, CUstreamCaptureStatus};
use flashtune_codegen::abi::TILE_QUEUES;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// The counters that streams share out; the others are for captured launches.
const OF_STREAMS: usize = 128;
/// Places that a stream looks at for its own.
const PROBES: usize = 8;

/// The counters of one module.
pub(super) struct TileCounters {
    /// Identifier of the stream that owns a counter, plus one; 0 while no stream does.
    owners: [AtomicU64; OF_STREAMS],
    captured: Arc<Captured>,
}

/// Those of captured launches. Outlives the module while a graph holds one.
#[derive(Default)]
struct Captured(Mutex<Pool>);

#[derive(Default)]
struct Pool {
    /// How many were ever taken.
    used: usize,
    /// Those that came back.
    free: Vec<usize>,
}

/// A counter of a captured launch, until it is dropped.
struct OfCapture {
    pool: Arc<Captured>,
    index: usize,
}

impl Captured {
    fn take(self: &Arc<Self>) -> Option<OfCapture> {
        let mut pool = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let index = pool.free.pop().or_else(|| {
            let next = OF_STREAMS + pool.used;
            (next < TILE_QUEUES).then(|| {
                pool.used += 1;
                next
            })
        })?;
        Some(OfCapture { pool: self.clone(), index })
    }
}

impl Drop for OfCapture {
    fn drop(&mut self) {
        self.pool.0.lock().unwrap_or_else(PoisonError::into_inner).free.push(self.index);
    }
}

impl TileCounters {
    pub(super) fn new() -> Self {
        Self { owners: [const { AtomicU64::new(0) }; OF_STREAMS], captured: Arc::default() }
    }

    /// The counter of the next launch on a stream, or -1. The context is current.
    pub(super) fn counter(&self, driver: &Driver, stream: CUstream) -> i32 {
        if driver.stream_id.is_none() {
            return -1;
        }
        let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the stream is one of this context by the launch's contract; the driver writes one word.
        if unsafe { sys::cuStreamIsCapturing(stream, &mut status) }.result().is_err() {
            return -1;
        }
        if status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE {
            return self.of_capture(driver, stream);
        }
        driver.id_of(stream).map_or(-1, |id| self.of_stream(id))
    }

    /// One that belongs to the graph that a stream is captured into.
    fn of_capture(&self, driver: &Driver, stream: CUstream) -> i32 {
        let Some(counter) = self.captured.take() else { return -1 };
        let index = counter.index as i32;
        graph_objects::attach(driver, stream, counter);
        index
    }

    /// Identifiers are unique in the life of a process, so a counter that a stream once took stays its own.
    fn of_stream(&self, id: u64) -> i32 {
        let owner = id.wrapping_add(1);
        for probe in 0..PROBES {
            let at = (id as usize).wrapping_add(probe) % OF_STREAMS;
            let seen = self.owners[at].load(Ordering::Relaxed);
            let own = seen == owner
                || seen == 0
                    && match self.owners[at].compare_exchange(0, owner, Ordering::Relaxed, Ordering::Relaxed) {
                        Ok(_) => true,
                        Err(now) => now == owner,
                    };
            if own {
                return at as i32;
            }
        }
        -1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_keeps_its_counter_and_shares_it_with_nobody() {
        let counters = TileCounters::new();
        let first: Vec<i32> = (0..100).map(|id| counters.of_stream(id * 7)).collect();
        let distinct: std::collections::BTreeSet<_> = first.iter().filter(|c| **c >= 0).collect();
        assert_eq!(distinct.len(), first.iter().filter(|c| **c >= 0).count());
        assert!(distinct.len() > 90 && distinct.iter().all(|c| (**c as usize) < OF_STREAMS));
        let again: Vec<i32> = (0..100).map(|id| counters.of_stream(id * 7)).collect();
        assert_eq!(first, again);
    }

    #[test]
    fn threads_that_meet_a_stream_at_once_agree() {
        for round in 0..200 {
            let counters = TileCounters::new();
            let taken: Vec<i32> = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..4).map(|_| scope.spawn(|| counters.of_stream(round))).collect();
                threads.into_iter().map(|t| t.join().unwrap()).collect()
            });
            assert!(taken.iter().all(|c| *c == taken[0] && *c >= 0));
        }
    }

    #[test]
    fn streams_beyond_the_room_take_tiles_by_stride() {
        let counters = TileCounters::new();
        let streams: Vec<i32> = (0..1000).map(|id| counters.of_stream(id)).collect();
        assert_eq!(streams.iter().filter(|c| **c >= 0).count(), OF_STREAMS);
    }

    #[test]
    fn captured_launches_share_counters_with_nobody_and_give_them_back() {
        let counters = TileCounters::new();
        let taken: Vec<OfCapture> = std::iter::from_fn(|| counters.captured.take()).collect();
        assert!(taken.iter().map(|c| c.index).eq(OF_STREAMS..TILE_QUEUES));
        // Enough for ten thousand captured launches of one kernel that live at once.
        assert!(taken.len() > 10_000 && counters.captured.take().is_none());
        let (mut taken, index) = (taken, OF_STREAMS + 5);
        drop(taken.swap_remove(5));
        let again = counters.captured.take().unwrap();
        assert_eq!((again.index, counters.captured.take().is_none()), (index, true));
    }

    #[test]
    fn a_counter_outlives_its_module_with_the_graph() {
        let counters = TileCounters::new();
        let held = counters.captured.take().unwrap();
        let pool = Arc::downgrade(&counters.captured);
        drop(counters);
        assert!(pool.upgrade().is_some());
        drop(held);
        assert!(pool.upgrade().is_none());
    }
}

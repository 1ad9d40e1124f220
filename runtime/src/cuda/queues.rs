//! Which counter a launch may use, of those that a module holds for kernels whose thread blocks take tiles from a queue.
//!
//! A counter serves one launch at a time and is left at zero. Launches of one stream follow each other, so every stream
//! has its own. A launch that is captured may be replayed beside anything: it has one that no other launch ever gets.
//! When none is left, -1 tells the kernel to do without.

use super::driver::Driver;
use cudarc::driver::sys::{self, CUstream, CUstreamCaptureStatus};
use flashtune_codegen::abi::TILE_QUEUES;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// The counters that streams share out; the others are for captured launches.
const OF_STREAMS: usize = TILE_QUEUES / 2;
/// Places that a stream looks at for its own.
const PROBES: usize = 8;

/// The counters of one module.
pub(super) struct Queues {
    /// Identifier of the stream that owns a counter, plus one; 0 while nobody does.
    owners: [AtomicU64; OF_STREAMS],
    captured: AtomicU32,
}

impl Queues {
    pub(super) fn new() -> Self {
        Self { owners: [const { AtomicU64::new(0) }; OF_STREAMS], captured: AtomicU32::new(0) }
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
            return self.of_capture();
        }
        driver.id_of(stream).map_or(-1, |id| self.of_stream(id))
    }

    fn of_capture(&self) -> i32 {
        let taken = self.captured.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| {
            ((n as usize) < TILE_QUEUES - OF_STREAMS).then_some(n + 1)
        });
        taken.map_or(-1, |n| (OF_STREAMS as u32 + n) as i32)
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
        let queues = Queues::new();
        let first: Vec<i32> = (0..100).map(|id| queues.of_stream(id * 7)).collect();
        let distinct: std::collections::BTreeSet<_> = first.iter().filter(|c| **c >= 0).collect();
        assert_eq!(distinct.len(), first.iter().filter(|c| **c >= 0).count());
        assert!(distinct.len() > 90 && distinct.iter().all(|c| (**c as usize) < OF_STREAMS));
        let again: Vec<i32> = (0..100).map(|id| queues.of_stream(id * 7)).collect();
        assert_eq!(first, again);
    }

    #[test]
    fn threads_that_meet_a_stream_at_once_agree() {
        for round in 0..200 {
            let queues = Queues::new();
            let taken: Vec<i32> = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..4).map(|_| scope.spawn(|| queues.of_stream(round))).collect();
                threads.into_iter().map(|t| t.join().unwrap()).collect()
            });
            assert!(taken.iter().all(|c| *c == taken[0] && *c >= 0));
        }
    }

    #[test]
    fn captured_launches_share_with_nobody_and_streams_beyond_the_room_do_without() {
        let queues = Queues::new();
        let captured: Vec<i32> = (0..TILE_QUEUES).map(|_| queues.of_capture()).collect();
        let wanted = (OF_STREAMS..TILE_QUEUES).map(|n| n as i32);
        assert!(captured.iter().copied().take(TILE_QUEUES - OF_STREAMS).eq(wanted));
        assert!(captured[TILE_QUEUES - OF_STREAMS..].iter().all(|c| *c == -1));
        let streams: Vec<i32> = (0..1000).map(|id| queues.of_stream(id)).collect();
        assert_eq!(streams.iter().filter(|c| **c >= 0).count(), OF_STREAMS);
    }
}

//! Which counter a launch may use, of those that a module holds for persistent thread blocks that take tiles from a
//! counter.
//!
//! A counter serves one launch at a time and is left at zero. Launches of one stream follow each other, so every stream
//! has its own. A launch that is captured may be replayed beside anything: it has one that no other launch gets while
//! the graph, or what was instantiated from it, lives. The graph holds a user object whose destructor gives the counter
//! back. When none is left, -1 tells the kernel to take tiles by stride.

use super::driver::Driver;
use cudarc::driver::sys::{self, CUgraph, CUstream, CUstreamCaptureStatus};
use flashtune_codegen::abi::TILE_QUEUES;
use std::ffi::c_void;
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

/// The destructor of a graph's user object. Called by a thread of the driver: calls nothing of CUDA.
unsafe extern "C" fn give_back(counter: *mut c_void) {
    // SAFETY: it came from `Box::into_raw` in `of_capture`, and the driver calls this once.
    drop(unsafe { Box::from_raw(counter.cast::<OfCapture>()) });
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
        match driver.user_objects.as_ref().and_then(|calls| Some((calls, calls.graph_of(stream)?))) {
            Some((calls, graph)) => calls.attach(graph, counter),
            // Nothing can say when the graph is gone: the counter stays taken.
            None => std::mem::forget(counter),
        }
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

/// What the driver has for objects that live as long as a graph, since CUDA 11.3.
pub(super) struct UserObjects {
    pub(super) capture_info: CaptureInfo,
    pub(super) create: CreateUserObject,
    pub(super) retain: RetainUserObject,
}

/// `cuStreamGetCaptureInfo_v2`.
pub(super) type CaptureInfo = unsafe extern "C" fn(
    CUstream,
    *mut CUstreamCaptureStatus,
    *mut u64,
    *mut CUgraph,
    *mut *const c_void,
    *mut usize,
) -> sys::CUresult;
/// `cuUserObjectCreate`.
pub(super) type CreateUserObject =
    unsafe extern "C" fn(*mut *mut c_void, *mut c_void, unsafe extern "C" fn(*mut c_void), u32, u32) -> sys::CUresult;
/// `cuGraphRetainUserObject`.
pub(super) type RetainUserObject = unsafe extern "C" fn(CUgraph, *mut c_void, u32, u32) -> sys::CUresult;

impl UserObjects {
    /// The graph that a stream is captured into. The context is current.
    fn graph_of(&self, stream: CUstream) -> Option<CUgraph> {
        let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        let (mut id, mut graph) = (0, std::ptr::null_mut());
        let (nodes, count) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the stream is alive; the driver writes what the pointers point to, and nothing for null ones.
        let asked = unsafe { (self.capture_info)(stream, &mut status, &mut id, &mut graph, nodes, count) };
        (asked.result().is_ok() && !graph.is_null()).then_some(graph)
    }

    /// Has the graph hold a counter. Where that fails the counter stays taken: the launch uses it.
    fn attach(&self, graph: CUgraph, counter: OfCapture) {
        /// `CU_USER_OBJECT_NO_DESTRUCTOR_SYNC`: the driver may call the destructor at any later time.
        const NO_SYNC: u32 = 1;
        /// `CU_GRAPH_USER_OBJECT_MOVE`: the graph takes over the reference that we have.
        const MOVE: u32 = 1;
        let raw = Box::into_raw(Box::new(counter)).cast::<c_void>();
        let mut object = std::ptr::null_mut();
        // SAFETY: `give_back` takes what `raw` is; the graph is the one that is being captured.
        unsafe {
            if (self.create)(&mut object, raw, give_back, 1, NO_SYNC).result().is_ok() {
                let _ = (self.retain)(graph, object, 1, MOVE);
            }
        }
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
        // As the driver does when a graph is destroyed.
        let raw = Box::into_raw(Box::new(taken.swap_remove(5))).cast();
        // SAFETY: what `give_back` takes, once.
        unsafe { give_back(raw) };
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

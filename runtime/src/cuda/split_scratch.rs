//! Memory through which thread blocks that share keys merge their results ([`Holds::SplitKeys`]): counters that are
//! zero between launches, and partial results.
//!
//! A chunk serves one launch at a time. Launches of one stream follow each other, so every stream has its own, which it
//! keeps; a launch that is captured has one that no other launch gets while the graph, or what was instantiated from
//! it, lives (`graph_objects.rs`). So a warm call allocates nothing and no graph holds a node for it. Streams beyond
//! [`OF_STREAMS`], and all of them where the driver cannot tell streams apart, take memory for each launch, in the
//! stream's order.
//!
//! [`Holds::SplitKeys`]: flashtune_codegen::Holds::SplitKeys

use super::context::{self, BesideCaptures, Context};
use super::driver::Driver;
use super::graph_objects;
use super::scratch::Scratch;
use crate::Result;
use cudarc::driver::result::{self, memset_d8_async, stream};
use cudarc::driver::sys::{CUdeviceptr, CUstream};
use flashtune_codegen::SPLIT_COUNTER_BYTES;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Streams that keep a chunk.
const OF_STREAMS: usize = 128;
/// Chunks are of whole multiples of this, so that kernels of many sizes share one.
const STEP: u64 = 4 << 20;

/// Memory whose counters are zero while no launch uses it.
#[derive(Clone, Copy)]
struct Chunk {
    address: CUdeviceptr,
    bytes: u64,
}

/// All chunks of a device.
pub(super) struct SplitScratch {
    context: Arc<Context>,
    streams: Mutex<HashMap<u64, Chunk>>,
    shared: Arc<Shared>,
}

/// What graphs give their chunks back to. Outlives the device while one of them lives.
#[derive(Default)]
struct Shared {
    free: Mutex<Vec<Chunk>>,
    /// Every chunk that was ever made.
    all: Mutex<Vec<CUdeviceptr>>,
}

/// The chunk of a captured launch, until the graph drops it.
struct OfCapture {
    shared: Arc<Shared>,
    chunk: Chunk,
}

impl Drop for OfCapture {
    fn drop(&mut self) {
        lock(&self.shared.free).push(self.chunk);
    }
}

/// The memory of one launch; to be dropped when it has been enqueued.
pub(super) struct OfLaunch {
    pub(super) address: CUdeviceptr,
    _once: Option<Scratch>,
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl SplitScratch {
    pub(super) fn new(context: &Arc<Context>) -> Self {
        Self { context: context.clone(), streams: Mutex::default(), shared: Arc::default() }
    }

    /// Memory of at least so many bytes for the next launch on a stream. The context is current.
    pub(super) fn of_launch(&self, driver: &Driver, bytes: u64, stream: CUstream) -> Result<OfLaunch> {
        if context::is_capturing(stream) {
            let chunk = self.free_chunk(bytes)?;
            graph_objects::attach(driver, stream, OfCapture { shared: self.shared.clone(), chunk });
            return Ok(OfLaunch { address: chunk.address, _once: None });
        }
        if let Some(id) = driver.id_of(stream) {
            let mut streams = lock(&self.streams);
            if let Some(chunk) = streams.get(&id).filter(|chunk| chunk.bytes >= bytes) {
                return Ok(OfLaunch { address: chunk.address, _once: None });
            }
            if streams.len() < OF_STREAMS || streams.contains_key(&id) {
                // A smaller one may be in use on this stream still: nobody else gets it.
                let chunk = self.free_chunk(bytes)?;
                streams.insert(id, chunk);
                return Ok(OfLaunch { address: chunk.address, _once: None });
            }
        }
        let once = Scratch::new(&self.context, self.context.pool()?, bytes, stream)?;
        // SAFETY: the memory has room for the counters, and the stream is alive.
        unsafe { memset_d8_async(once.address, 0, SPLIT_COUNTER_BYTES as usize, stream) }
            .map_err(|e| self.context.failed("cuMemsetD8Async", e))?;
        Ok(OfLaunch { address: once.address, _once: Some(once) })
    }

    /// One that came back, or a new one. Waits for its counters to be zeroed, on a stream of its own: any other may be
    /// the one that is captured.
    fn free_chunk(&self, bytes: u64) -> Result<Chunk> {
        {
            let mut free = lock(&self.shared.free);
            if let Some(at) = free.iter().position(|chunk| chunk.bytes >= bytes) {
                return Ok(free.swap_remove(at));
            }
        }
        let bytes = bytes.next_multiple_of(STEP);
        let _beside = BesideCaptures::begin();
        // SAFETY: the context is current; nobody reads the memory before it is written but for the counters, which are
        // zero when this returns.
        let address = unsafe {
            let address = result::malloc_sync(bytes as usize).map_err(|e| self.context.failed("cuMemAlloc", e))?;
            lock(&self.shared.all).push(address);
            let own = stream::create(stream::StreamKind::NonBlocking)
                .map_err(|e| self.context.failed("cuStreamCreate", e))?;
            let zeroed = memset_d8_async(address, 0, SPLIT_COUNTER_BYTES as usize, own)
                .map_err(|e| self.context.failed("cuMemsetD8Async", e))
                .and_then(|()| stream::synchronize(own).map_err(|e| self.context.failed("cuStreamSynchronize", e)));
            let _ = stream::destroy(own);
            zeroed.map(|()| address)?
        };
        Ok(Chunk { address, bytes })
    }
}

impl Drop for SplitScratch {
    fn drop(&mut self) {
        let Ok(_bound) = self.context.bind() else { return };
        for address in lock(&self.shared.all).drain(..) {
            // SAFETY: made in `free_chunk`, freed once; the driver waits for what uses it. Graphs are not replayed once
            // the device that they were captured with is gone.
            let _ = unsafe { result::free_sync(address) };
        }
    }
}

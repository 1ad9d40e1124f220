//! Captured launches.

use super::context::Context;
use super::raw;
use crate::{Graph, Result, Stream};
use cudarc::driver::result::{graph, stream};
use cudarc::driver::sys::{CUgraph, CUgraphExec, CUgraphInstantiate_flags, CUstream, CUstreamCaptureMode};
use std::sync::Arc;

/// A graph that is ready to run.
pub(super) struct CudaGraph {
    raw: CUgraphExec,
    context: Arc<Context>,
}

// SAFETY: graph handles may be used from any thread, one at a time, with the context current.
unsafe impl Send for CudaGraph {}

impl CudaGraph {
    /// What `work` enqueues on the stream. The context is current.
    pub(super) fn capture(
        context: &Arc<Context>,
        stream: CUstream,
        work: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Self> {
        // Other threads may allocate meanwhile: only what this one does must not disturb the capture.
        // SAFETY: the stream is one of this context by the caller's word.
        unsafe { stream::begin_capture(stream, CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL) }
            .map_err(|e| context.failed("cuStreamBeginCapture", e))?;
        let done = work();
        // Ended in any case: the stream is of no use before.
        // SAFETY: as above; it is capturing.
        let captured = unsafe { stream::end_capture(stream) };
        let captured: CUgraph = match (done, captured) {
            (Ok(()), captured) => captured.map_err(|e| context.failed("cuStreamEndCapture", e))?,
            (Err(e), captured) => {
                if let Ok(captured) = captured {
                    destroy(captured);
                }
                return Err(e);
            }
        };
        // SAFETY: the graph was just made.
        let made = unsafe { graph::instantiate(captured, CUgraphInstantiate_flags(0)) };
        destroy(captured);
        let raw = made.map_err(|e| context.failed("cuGraphInstantiate", e))?;
        Ok(Self { raw, context: context.clone() })
    }
}

/// Destroys a graph, which what was instantiated from it does not need.
fn destroy(captured: CUgraph) {
    if !captured.is_null() {
        // SAFETY: it came from the end of a capture and is destroyed once.
        let _ = unsafe { graph::destroy(captured) };
    }
}

impl Graph for CudaGraph {
    unsafe fn replay(&self, stream: Stream) -> Result<()> {
        let _bound = self.context.bind()?;
        // SAFETY: the graph is alive; what it launches is so by the caller's promise.
        unsafe { graph::launch(self.raw, raw(stream)) }.map_err(|e| self.context.failed("cuGraphLaunch", e))
    }
}

impl Drop for CudaGraph {
    fn drop(&mut self) {
        let Ok(_bound) = self.context.bind() else { return };
        // SAFETY: made in `capture`, destroyed once; the driver finishes replays that are under way first.
        let _ = unsafe { graph::exec_destroy(self.raw) };
    }
}

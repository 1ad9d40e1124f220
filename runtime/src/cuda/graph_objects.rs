//! Values that live as long as a graph, or what was instantiated from it: the graph holds a user object of the driver
//! whose destructor drops the value.

use super::driver::Driver;
use cudarc::driver::sys::{self, CUgraph, CUstream, CUstreamCaptureStatus};
use std::ffi::c_void;

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
    unsafe extern "C" fn(*mut *mut c_void, *mut c_void, Destructor, u32, u32) -> sys::CUresult;
/// `cuGraphRetainUserObject`.
pub(super) type RetainUserObject = unsafe extern "C" fn(CUgraph, *mut c_void, u32, u32) -> sys::CUresult;
/// Called by a thread of the driver: calls nothing of CUDA.
type Destructor = unsafe extern "C" fn(*mut c_void);

/// Drops what [`attach`] has put into a box.
unsafe extern "C" fn dropped<T>(value: *mut c_void) {
    // SAFETY: it came from `Box::into_raw` in `attach`, and the driver calls this once.
    drop(unsafe { Box::from_raw(value.cast::<T>()) });
}

/// Has the graph that a stream is captured into hold a value, whose drop calls nothing of CUDA. Where nothing can say
/// when the graph is gone the value is never dropped: what was captured uses it. The context is current.
pub(super) fn attach<T: Send + 'static>(driver: &Driver, stream: CUstream, value: T) {
    /// `CU_USER_OBJECT_NO_DESTRUCTOR_SYNC`: the driver may call the destructor at any later time.
    const NO_SYNC: u32 = 1;
    /// `CU_GRAPH_USER_OBJECT_MOVE`: the graph takes over the reference that we have.
    const MOVE: u32 = 1;
    let raw = Box::into_raw(Box::new(value)).cast::<c_void>();
    let calls = driver.user_objects.as_ref().and_then(|calls| Some((calls, calls.graph_of(stream)?)));
    let Some((calls, graph)) = calls else { return };
    let mut object = std::ptr::null_mut();
    // SAFETY: `dropped::<T>` takes what `raw` is; the graph is the one that is being captured.
    unsafe {
        if (calls.create)(&mut object, raw, dropped::<T>, 1, NO_SYNC).result().is_ok() {
            let _ = (calls.retain)(graph, object, 1, MOVE);
        }
    }
}

impl UserObjects {
    /// The graph that a stream is captured into.
    fn graph_of(&self, stream: CUstream) -> Option<CUgraph> {
        let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        let (mut id, mut graph) = (0, std::ptr::null_mut());
        let (nodes, count) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the stream is alive; the driver writes what the pointers point to, and nothing for null ones.
        let asked = unsafe { (self.capture_info)(stream, &mut status, &mut id, &mut graph, nodes, count) };
        (asked.result().is_ok() && !graph.is_null()).then_some(graph)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn the_destructor_drops_the_value_once() {
        let value = Arc::new(5);
        let raw = Box::into_raw(Box::new(value.clone())).cast();
        assert_eq!(Arc::strong_count(&value), 2);
        // SAFETY: as the driver does when a graph is destroyed.
        unsafe { dropped::<Arc<i32>>(raw) };
        assert_eq!(Arc::strong_count(&value), 1);
    }
}

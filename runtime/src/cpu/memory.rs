//! Host memory as device memory, and the scratch of the workers.

use crate::{Buffer, Error, Result};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::any::Any;
use std::cell::RefCell;
use std::ffi::c_void;
use std::sync::Mutex;

/// Alignment of buffers and scratch: one cache line, one AVX-512 register.
const ALIGN: usize = 64;

/// A block of host memory.
pub(super) struct CpuBuffer {
    address: *mut u8,
    layout: Layout,
    bytes: usize,
}

// SAFETY: the buffer owns its memory, and is accessed only by functions that say what may run at the same time.
unsafe impl Send for CpuBuffer {}
// SAFETY: as above.
unsafe impl Sync for CpuBuffer {}

impl CpuBuffer {
    pub(super) fn new(bytes: usize) -> Result<Self> {
        let no_memory = || Error::Device {
            call: "alloc",
            device: "cpu".to_owned(),
            message: format!("no memory for {bytes} bytes"),
            remedy: "use smaller tensors or a machine with more memory",
        };
        let layout = Layout::from_size_align(bytes.max(1), ALIGN).map_err(|_| no_memory())?;
        // SAFETY: the layout has a size above zero. Zeroed, so that reading it is defined.
        let address = unsafe { alloc_zeroed(layout) };
        if address.is_null() {
            return Err(no_memory());
        }
        Ok(Self { address, layout, bytes })
    }

    /// Copies host bytes to the start of the buffer.
    pub(super) fn write(&self, bytes: &[u8]) {
        assert!(bytes.len() <= self.bytes, "checked by the caller");
        // SAFETY: the range is inside of the allocation, and `bytes`, a Rust slice, cannot overlap it.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.address, bytes.len()) }
    }

    /// Copies the start of the buffer to host bytes.
    pub(super) fn read(&self, bytes: &mut [u8]) {
        assert!(bytes.len() <= self.bytes, "checked by the caller");
        // SAFETY: as in `write`.
        unsafe { std::ptr::copy_nonoverlapping(self.address, bytes.as_mut_ptr(), bytes.len()) }
    }

    /// The buffer's bytes, for one who holds it alone.
    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the range is the allocation, which was zeroed, and is borrowed with the buffer.
        unsafe { std::slice::from_raw_parts_mut(self.address, self.bytes) }
    }

    /// The buffer's bytes. No kernel may write to it meanwhile: only for buffers whose address is not given away.
    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: as above; writers through `write` and `fill` are excluded by the caller.
        unsafe { std::slice::from_raw_parts(self.address, self.bytes) }
    }

    /// Sets every byte.
    pub(super) fn fill(&self, byte: u8) {
        // SAFETY: the range is the allocation.
        unsafe { std::ptr::write_bytes(self.address, byte, self.bytes) }
    }
}

impl Drop for CpuBuffer {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { dealloc(self.address, self.layout) }
    }
}

impl Buffer for CpuBuffer {
    fn as_any(&self) -> &dyn Any {
        self
    }
    fn address(&self) -> u64 {
        self.address as u64
    }
    fn len(&self) -> usize {
        self.bytes
    }
}

#[repr(align(64))]
#[derive(Clone, Copy)]
struct Line(#[allow(dead_code, reason = "raw memory for the kernel")] [u8; ALIGN]);

/// Memory that the tiles of one call share, kept for later calls when it is dropped: a warm launch allocates nothing.
/// Calls that run beside each other have one each.
pub(super) struct SharedMemory(Vec<Line>);

/// What no call uses now. Not by thread: one that waits for its tiles may run another launch meanwhile.
static FREE: Mutex<Vec<Vec<Line>>> = Mutex::new(Vec::new());

impl SharedMemory {
    /// The largest that is free; none at first.
    pub(super) fn take() -> Self {
        let mut free = FREE.lock().unwrap_or_else(|e| e.into_inner());
        let largest = (0..free.len()).max_by_key(|&i| free[i].len());
        Self(largest.map(|i| free.swap_remove(i)).unwrap_or_default())
    }

    /// Where it is; 0 where there is none.
    pub(super) fn address(&mut self) -> u64 {
        if self.0.is_empty() { 0 } else { self.0.as_mut_ptr() as u64 }
    }

    pub(super) fn bytes(&self) -> u64 {
        (self.0.len() * ALIGN) as u64
    }

    /// Another block, of at least so many bytes; what was written is lost. `None` when there is no memory.
    pub(super) fn grow(&mut self, bytes: u64) -> Option<()> {
        let lines = usize::try_from(bytes.div_ceil(ALIGN as u64)).ok()?;
        let mut fresh = Vec::new();
        fresh.try_reserve_exact(lines).ok()?;
        fresh.resize(lines, Line([0; ALIGN]));
        self.0 = fresh;
        Some(())
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        if !self.0.is_empty() {
            FREE.lock().unwrap_or_else(|e| e.into_inner()).push(std::mem::take(&mut self.0));
        }
    }
}

/// Calls `work` with this thread's scratch of at least `bytes` bytes, kept from call to call and only ever grown, so
/// that a warm launch allocates nothing. `None` when there is no memory.
pub(super) fn with_scratch<T>(bytes: u64, work: impl FnOnce(*mut c_void) -> T) -> Option<T> {
    thread_local! {
        static SCRATCH: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
    }
    let lines = usize::try_from(bytes.div_ceil(ALIGN as u64)).ok()?;
    SCRATCH.with_borrow_mut(|scratch| {
        if scratch.len() < lines {
            // A fresh block rather than a grown one: nothing needs to be copied.
            let mut fresh = Vec::new();
            fresh.try_reserve_exact(lines).ok()?;
            fresh.resize(lines, Line([0; ALIGN]));
            *scratch = fresh;
        }
        Some(work(scratch.as_mut_ptr().cast()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scratch_is_aligned_kept_and_grown() {
        let first = with_scratch(100, |p| p as usize).unwrap();
        assert_eq!(first % ALIGN, 0);
        assert_eq!(with_scratch(64, |p| p as usize).unwrap(), first);
        with_scratch(1 << 20, |p| {
            // SAFETY: the scratch has this size.
            unsafe { std::ptr::write_bytes(p.cast::<u8>(), 7, 1 << 20) }
        })
        .unwrap();
        assert!(with_scratch(u64::MAX, |_| ()).is_none());
    }

    #[test]
    fn shared_memory_is_kept_grown_and_never_shared_by_two_calls() {
        let mut one = SharedMemory::take();
        one.grow(1 << 22).unwrap();
        let (address, mut other) = (one.address(), SharedMemory::take());
        assert_ne!(other.address(), address);
        assert!(address != 0 && address.is_multiple_of(ALIGN as u64) && one.bytes() >= 1 << 22);
        assert!(one.grow(u64::MAX).is_none());
        assert_eq!(one.address(), address, "what could not be had leaves what there was");
    }

    #[test]
    fn a_buffer_too_large_for_the_machine_is_an_error() {
        let e = CpuBuffer::new(isize::MAX as usize).err().unwrap().to_string();
        assert!(e.contains("memory"), "{e}");
        assert_eq!(CpuBuffer::new(0).unwrap().len(), 0);
    }
}

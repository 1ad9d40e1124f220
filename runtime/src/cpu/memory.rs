//! Host memory as device memory, and the scratch of the workers.

use crate::{Buffer, Error, Result};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::any::Any;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Alignment of buffers and scratch: one cache line, one AVX-512 register.
pub(super) const ALIGN: usize = 64;

/// Memory of this process's devices: where each block begins, and its bytes.
static LIVE: Mutex<BTreeMap<usize, usize>> = Mutex::new(BTreeMap::new());

/// All blocks that there are; none is freed while this is held.
pub(super) fn live() -> MutexGuard<'static, BTreeMap<usize, usize>> {
    LIVE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Memory that was zeroed, at a cache line's beginning, and in [`live`] as long as it is there.
struct Block {
    address: *mut u8,
    layout: Layout,
}

// SAFETY: the block owns its memory; who gives its address away says what may run at the same time.
unsafe impl Send for Block {}
// SAFETY: as above.
unsafe impl Sync for Block {}

impl Block {
    /// Of at least so many bytes; `None` when there is no memory.
    fn new(bytes: usize) -> Option<Self> {
        let layout = Layout::from_size_align(bytes.max(1), ALIGN).ok()?;
        // SAFETY: the layout has a size above zero.
        let address = unsafe { alloc_zeroed(layout) };
        if address.is_null() {
            return None;
        }
        live().insert(address as usize, layout.size());
        Some(Self { address, layout })
    }

    /// Of whole cache lines, of at least so many bytes.
    fn lines(bytes: u64) -> Option<Self> {
        Self::new(usize::try_from(bytes.checked_next_multiple_of(ALIGN as u64)?).ok()?)
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        live().remove(&(self.address as usize));
        // SAFETY: allocated in `new` with this layout.
        unsafe { dealloc(self.address, self.layout) }
    }
}

/// A buffer of the device: a block of host memory.
pub(super) struct CpuBuffer {
    block: Block,
    bytes: usize,
}

impl CpuBuffer {
    pub(super) fn new(bytes: usize) -> Result<Self> {
        let block = Block::new(bytes).ok_or_else(|| Error::Device {
            call: "alloc",
            device: "cpu".to_owned(),
            message: format!("no memory for {bytes} bytes"),
            remedy: "use smaller tensors or a machine with more memory",
        })?;
        Ok(Self { block, bytes })
    }

    /// Copies host bytes to the start of the buffer.
    pub(super) fn write(&self, bytes: &[u8]) {
        assert!(bytes.len() <= self.bytes, "checked by the caller");
        // SAFETY: the range is inside of the allocation, and `bytes`, a Rust slice, cannot overlap it.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.block.address, bytes.len()) }
    }

    /// Copies the start of the buffer to host bytes.
    pub(super) fn read(&self, bytes: &mut [u8]) {
        assert!(bytes.len() <= self.bytes, "checked by the caller");
        // SAFETY: as in `write`.
        unsafe { std::ptr::copy_nonoverlapping(self.block.address, bytes.as_mut_ptr(), bytes.len()) }
    }

    /// The buffer's bytes, for one who holds it alone.
    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the range is the allocation, which was zeroed, and is borrowed with the buffer.
        unsafe { std::slice::from_raw_parts_mut(self.block.address, self.bytes) }
    }

    /// The buffer's bytes. No kernel may write to it meanwhile: only for buffers whose address is not given away.
    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: as above; writers through `write` and `fill` are excluded by the caller.
        unsafe { std::slice::from_raw_parts(self.block.address, self.bytes) }
    }

    /// Sets every byte.
    pub(super) fn fill(&self, byte: u8) {
        // SAFETY: the range is the allocation.
        unsafe { std::ptr::write_bytes(self.block.address, byte, self.bytes) }
    }
}

impl Buffer for CpuBuffer {
    fn as_any(&self) -> &dyn Any {
        self
    }
    fn address(&self) -> u64 {
        self.block.address as u64
    }
    fn len(&self) -> usize {
        self.bytes
    }
}

/// Memory that the tiles of one call share, kept for later calls when it is dropped: a warm launch allocates nothing.
/// Calls that run beside each other have one each.
#[derive(Default)]
pub(super) struct SharedMemory(Option<Block>);

/// What no call uses now. Not by thread: one that waits for its tiles may run another launch meanwhile.
static FREE: Mutex<Vec<Block>> = Mutex::new(Vec::new());

impl SharedMemory {
    /// The largest that is free; none at first.
    pub(super) fn take() -> Self {
        let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
        let largest = (0..free.len()).max_by_key(|&i| free[i].layout.size());
        Self(largest.map(|i| free.swap_remove(i)))
    }

    /// Where it is; 0 where there is none.
    pub(super) fn address(&self) -> u64 {
        self.0.as_ref().map_or(0, |block| block.address as u64)
    }

    pub(super) fn bytes(&self) -> u64 {
        self.0.as_ref().map_or(0, |block| block.layout.size() as u64)
    }

    /// Another block, of at least so many bytes; what was written is lost. `None` when there is no memory.
    pub(super) fn grow(&mut self, bytes: u64) -> Option<()> {
        self.0 = Some(Block::lines(bytes)?);
        Some(())
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        if let Some(block) = self.0.take() {
            FREE.lock().unwrap_or_else(PoisonError::into_inner).push(block);
        }
    }
}

/// Calls `work` with this thread's scratch of at least `bytes` bytes, kept from call to call and only ever grown, so
/// that a warm launch allocates nothing. `None` when there is no memory.
pub(super) fn with_scratch<T>(bytes: u64, work: impl FnOnce(*mut c_void) -> T) -> Option<T> {
    thread_local! {
        static SCRATCH: RefCell<Option<Block>> = const { RefCell::new(None) };
    }
    SCRATCH.with_borrow_mut(|scratch| {
        if scratch.as_ref().is_none_or(|block| (block.layout.size() as u64) < bytes) {
            // A fresh block rather than a grown one: nothing needs to be copied.
            *scratch = Some(Block::lines(bytes)?);
        }
        Some(work(scratch.as_ref().expect("just put there").address.cast()))
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
        let (address, other) = (one.address(), SharedMemory::take());
        assert_ne!(other.address(), address);
        assert!(address != 0 && address.is_multiple_of(ALIGN as u64) && one.bytes() >= 1 << 22);
        assert!(one.grow(u64::MAX).is_none());
        assert_eq!(one.address(), address, "what could not be had leaves what there was");
    }

    #[test]
    fn blocks_are_known_as_long_as_they_are_there() {
        let buffer = CpuBuffer::new(100).unwrap();
        let address = buffer.address() as usize;
        assert_eq!(live().get(&address), Some(&100));
        drop(buffer);
        // Another test's block may be where this one was.
        assert_ne!(live().get(&address), Some(&100));
    }

    #[test]
    fn a_buffer_too_large_for_the_machine_is_an_error() {
        let e = CpuBuffer::new(isize::MAX as usize).err().unwrap().to_string();
        assert!(e.contains("memory"), "{e}");
        assert_eq!(CpuBuffer::new(0).unwrap().len(), 0);
    }
}

//! What the driver knows about an address that a host hands over.

use super::context::Context;
use crate::{Error, Result};
use cudarc::driver::sys::{self, CUpointer_attribute, CUresult};

/// The driver's answer about one address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Kind {
    /// `CU_MEMORYTYPE_*`, or 0 for memory that CUDA does not know.
    memory: u32,
    /// Whether the memory moves between host and devices by itself.
    managed: bool,
    /// The device that the memory is on.
    device: i32,
}

/// Refuses a range of memory that does not begin or does not end in memory of the context's device. Driver calls that
/// wait for nothing and may be made during a stream capture.
///
/// Memory of the host is refused also where the device could read it (pinned, or through the system's page tables): a
/// kernel would run at the speed of the bus, without a word. Both ends are looked up, not the allocation's size: a
/// tensor may span several of those that a virtual memory allocator has mapped side by side.
pub(super) fn check(context: &Context, tensor: &'static str, address: u64, bytes: u64) -> Result<()> {
    judge(look_up(context, address)?, context.device, tensor, Place::Start(address))?;
    // An end beyond 64 bits is told with the other errors of a tensor.
    match address.checked_add(bytes.saturating_sub(1)) {
        Some(last) if last != address => judge(look_up(context, last)?, context.device, tensor, Place::End(last)),
        _ => Ok(()),
    }
}

fn look_up(context: &Context, address: u64) -> Result<Kind> {
    use CUpointer_attribute::*;
    let (mut memory, mut managed, mut device) = (0u32, 0u32, -1i32);
    let mut attributes =
        [CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_IS_MANAGED, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL];
    let mut data = [(&raw mut memory).cast(), (&raw mut managed).cast(), (&raw mut device).cast()];
    // SAFETY: as many attributes as places for them, each place as large as its attribute (the driver writes 32-bit
    // numbers for the first and the last and one byte or 32 bits for the flag). The address is looked up, not read.
    let answer = unsafe { sys::cuPointerGetAttributes(3, attributes.as_mut_ptr(), data.as_mut_ptr(), address) };
    match answer.result() {
        Ok(()) => Ok(Kind { memory, managed: managed != 0, device }),
        // Two more ways in which drivers say that they do not know an address, beside a memory type of 0.
        Err(e) if matches!(e.0, CUresult::CUDA_ERROR_INVALID_VALUE | CUresult::CUDA_ERROR_INVALID_CONTEXT) => {
            Ok(Kind { memory: 0, managed: false, device: -1 })
        }
        Err(e) => Err(context.failed("cuPointerGetAttributes", e)),
    }
}

/// Which byte of a tensor was looked up.
#[derive(Debug, Clone, Copy)]
enum Place {
    Start(u64),
    End(u64),
}

fn judge(kind: Kind, ours: i32, tensor: &'static str, place: Place) -> Result<()> {
    const DEVICE: u32 = sys::CUmemorytype::CU_MEMORYTYPE_DEVICE as u32;
    let on = match kind {
        Kind { managed: true, .. } => return Ok(()),
        Kind { memory: DEVICE, device, .. } if device == ours => return Ok(()),
        Kind { memory: DEVICE, device, .. } => Some(device),
        _ => None,
    };
    let (field, found, remedy) = match (place, on) {
        (Place::Start(_), Some(device)) => ("address", format!("on cuda:{device}"), MOVE),
        (Place::Start(at), None) => ("address", format!("{at:#x}, host memory or freed"), MOVE),
        (Place::End(at), Some(device)) => ("extent", format!("up to {at:#x}, on cuda:{device}"), SHRINK),
        (Place::End(at), None) => ("extent", format!("up to {at:#x}, which is no memory of a GPU"), SHRINK),
    };
    Err(Error::Tensor { tensor, field, found, expected: format!("the engine computes on cuda:{ours}"), remedy })
}

const MOVE: &str = "copy the tensor to the engine's device, or open an engine on the tensor's";
const SHRINK: &str = "give the shape and the strides (in elements) that the tensor was allocated with";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_the_host_and_of_other_devices_is_refused() {
        let judge = |memory, managed, device| judge(Kind { memory, managed, device }, 1, "k", Place::Start(0x1000));
        assert!(judge(2, false, 1).is_ok());
        assert!(judge(1, true, 0).is_ok(), "managed memory goes where it is needed");
        for (memory, device, word) in [(0, -2, "host memory"), (1, 1, "host memory"), (2, 0, "on cuda:0")] {
            let e = judge(memory, false, device).unwrap_err().to_string();
            assert!(e.contains("tensor k") && e.contains(word) && e.contains("cuda:1") && e.contains("copy"), "{e}");
        }
    }

    #[test]
    fn a_tensor_that_ends_elsewhere_is_told_its_extent() {
        for (memory, device, word) in [(0, -2, "no memory of a GPU"), (2, 0, "on cuda:0")] {
            let kind = Kind { memory, managed: false, device };
            let e = judge(kind, 1, "v", Place::End(0x1fff)).unwrap_err().to_string();
            assert!(e.contains("tensor v") && e.contains("0x1fff") && e.contains(word) && e.contains("strides"), "{e}");
        }
    }
}

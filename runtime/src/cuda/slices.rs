//! Tensors in memory that cudarc manages.

use crate::{Error, Result, TensorView};
use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, SyncOnDrop};
use flashtune_codegen::DType;

/// Element types of cudarc slices that attention takes.
pub trait Element: Copy {
    /// The same type in our words.
    const DTYPE: DType;
}

impl Element for half::f16 {
    const DTYPE: DType = DType::F16;
}
impl Element for half::bf16 {
    const DTYPE: DType = DType::Bf16;
}
impl Element for f32 {
    const DTYPE: DType = DType::F32;
}

/// A tensor in a cudarc slice, borrowed for launches on one stream.
///
/// When it is dropped, cudarc notes on the stream that the slice was used up to here: keep it until after the launch.
pub struct SliceTensor<'a> {
    view: TensorView,
    _used: SyncOnDrop<'a>,
}

impl SliceTensor<'_> {
    /// The view to hand over.
    pub fn view(&self) -> TensorView {
        self.view
    }
}

/// A contiguous `[batch, heads, rows, dim]` tensor in a slice that kernels on `stream` read. For another layout, change
/// the view's strides ([`TensorView::with_strides`]).
///
/// # Errors
/// When the slice is shorter than the shape; `name` is the tensor's name in the message.
pub fn read_slice<'a, T: Element, S: DevicePtr<T>>(
    name: &'static str,
    slice: &'a S,
    stream: &'a CudaStream,
    shape: [u64; 4],
) -> Result<SliceTensor<'a>> {
    check_length(name, slice.len(), shape)?;
    let (address, used) = slice.device_ptr(stream);
    Ok(SliceTensor { view: TensorView::bhsd(address, T::DTYPE, shape), _used: used })
}

/// As [`read_slice`], for a tensor that kernels on `stream` write.
///
/// # Errors
/// As [`read_slice`].
pub fn write_slice<'a, T: Element, S: DevicePtrMut<T>>(
    name: &'static str,
    slice: &'a mut S,
    stream: &'a CudaStream,
    shape: [u64; 4],
) -> Result<SliceTensor<'a>> {
    check_length(name, slice.len(), shape)?;
    let (address, used) = slice.device_ptr_mut(stream);
    Ok(SliceTensor { view: TensorView::bhsd(address, T::DTYPE, shape), _used: used })
}

fn check_length(name: &'static str, len: usize, shape: [u64; 4]) -> Result<()> {
    let needed = shape.iter().try_fold(1u64, |n, d| n.checked_mul(*d));
    if needed.is_some_and(|n| n <= len as u64) {
        return Ok(());
    }
    Err(Error::Tensor {
        tensor: name,
        field: "length of its slice",
        found: format!("{len} elements"),
        expected: format!("the shape {shape:?} needs more"),
        remedy: "give the whole tensor's slice, or its true shape",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slice_shorter_than_its_shape_is_refused() {
        assert!(check_length("q", 24, [1, 2, 3, 4]).is_ok());
        let e = check_length("q", 23, [1, 2, 3, 4]).unwrap_err().to_string();
        assert!(e.contains("tensor q") && e.contains("23 elements"), "{e}");
        assert!(check_length("q", usize::MAX, [1 << 40, 1 << 40, 1, 1]).is_err());
    }
}

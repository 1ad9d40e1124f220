//! Memory that the caller names: structs by the size that they state, strings, places for answers.

use crate::append::AppendArgs;
use crate::backward::BackwardArgs;
use crate::block_mask::BlockMaskArgs;
use crate::dlpack::DlTensors;
use crate::error::{Failure, Result};
use crate::quantise::QuantiseArgs;
use crate::ragged::RaggedArgs;
use crate::types::{ForwardArgs, Options, Status};
use std::ffi::{CStr, c_char};
use std::mem::MaybeUninit;
use std::path::PathBuf;

/// A struct of the header that begins with `struct_size`.
///
/// # Safety
/// The type is `repr(C)`, has no padding, begins with a `u32`, and every bit pattern is a valid value.
pub(crate) unsafe trait Sized32: Copy {
    /// The name in the header.
    const NAME: &'static str;
    /// Size of the struct's first version: no caller's is smaller.
    const FIRST: usize;
}

// SAFETY: integers, raw pointers and an address of a function only, laid out without gaps (asserted below).
unsafe impl Sized32 for Options {
    const NAME: &'static str = "flashtune_options";
    const FIRST: usize = 56;
}

// SAFETY: integers, floats and raw pointers only, laid out without gaps (asserted below).
unsafe impl Sized32 for ForwardArgs {
    const NAME: &'static str = "flashtune_forward_args";
    const FIRST: usize = 368;
}

// SAFETY: integers and raw pointers only, laid out without gaps (asserted below).
unsafe impl Sized32 for DlTensors {
    const NAME: &'static str = "flashtune_dl_tensors";
    const FIRST: usize = 48;
}

// SAFETY: integers, floats and raw pointers only, laid out without gaps (asserted below).
unsafe impl Sized32 for RaggedArgs {
    const NAME: &'static str = "flashtune_ragged";
    const FIRST: usize = 576;
}

// SAFETY: integers and raw pointers only, laid out without gaps (asserted below).
unsafe impl Sized32 for BlockMaskArgs {
    const NAME: &'static str = "flashtune_block_mask_args";
    const FIRST: usize = 80;
}

// SAFETY: integers and raw pointers only, laid out without gaps (asserted below).
unsafe impl Sized32 for AppendArgs {
    const NAME: &'static str = "flashtune_append_args";
    const FIRST: usize = 560;
}

// SAFETY: integers, floats and raw pointers only, laid out without gaps (asserted below).
unsafe impl Sized32 for BackwardArgs {
    const NAME: &'static str = "flashtune_backward_args";
    const FIRST: usize = 744;
}

// SAFETY: integers and raw pointers only, laid out without gaps (asserted below).
unsafe impl Sized32 for QuantiseArgs {
    const NAME: &'static str = "flashtune_quantise_args";
    const FIRST: usize = 688;
}

#[cfg(target_pointer_width = "64")]
const _: () = {
    assert!(size_of::<Options>() == 112 && size_of::<ForwardArgs>() == 680);
    assert!(size_of::<BlockMaskArgs>() == 80 && size_of::<RaggedArgs>() == 648 && size_of::<AppendArgs>() == 560);
    assert!(size_of::<QuantiseArgs>() == 736);
    assert!(size_of::<BackwardArgs>() == 944 && size_of::<DlTensors>() == 48);
};

/// No struct of ours grows beyond this; a larger size is a pointer to something else.
const LARGEST: usize = 4096;

/// Copies a struct of the caller. Fields that the caller does not know are zero; fields that this library does not know
/// must be.
///
/// # Safety
/// `from` is null or readable for the size that its first four bytes state.
pub(crate) unsafe fn read<T: Sized32>(from: *const T) -> Result<T> {
    if from.is_null() {
        return Err(Failure::argument(format!("the pointer to {} is null", T::NAME)));
    }
    // SAFETY: readable by the caller's promise; it may lie at any address.
    let size = unsafe { from.cast::<u32>().read_unaligned() } as usize;
    if !(T::FIRST..=LARGEST).contains(&size) {
        return Err(Failure::argument(format!(
            "struct_size of {0} is {size}, but it is at least {1}; set it to sizeof({0})",
            T::NAME,
            T::FIRST
        )));
    }
    let ours = size_of::<T>();
    for i in ours..size {
        // SAFETY: inside of the size that the caller stated.
        if unsafe { from.cast::<u8>().add(i).read() } != 0 {
            return Err(Failure::argument(format!(
                "{} has a field beyond byte {ours} that this library does not know and that is not 0; use a newer \
                 libflashtune or leave it out",
                T::NAME
            )));
        }
    }
    let mut value = MaybeUninit::<T>::zeroed();
    // SAFETY: both are at least this long and do not overlap.
    unsafe { std::ptr::copy_nonoverlapping(from.cast::<u8>(), value.as_mut_ptr().cast::<u8>(), size.min(ours)) };
    // SAFETY: every bit pattern is a value.
    Ok(unsafe { value.assume_init() })
}

/// Writes an answer of the caller's type.
///
/// # Safety
/// `to` is null or writable.
pub(crate) unsafe fn write<T>(to: *mut T, name: &str, value: T) -> Result<()> {
    if to.is_null() {
        return Err(Failure::argument(format!("the pointer to {name} is null, there is no place for the answer")));
    }
    // SAFETY: writable by the caller's promise; it may lie at any address.
    unsafe { to.write_unaligned(value) };
    Ok(())
}

/// Writes a text and a zero byte, and its length also when the buffer is too small.
///
/// # Safety
/// `buffer` is null or writable for `capacity` bytes, `length` is null or writable.
pub(crate) unsafe fn write_text(text: &str, buffer: *mut c_char, capacity: usize, length: *mut usize) -> Result<()> {
    if !length.is_null() {
        // SAFETY: by this function's contract.
        unsafe { write(length, "the length", text.len())? };
    }
    if buffer.is_null() && capacity != 0 {
        return Err(Failure::argument("the buffer is null, but its capacity is not 0"));
    }
    if capacity <= text.len() {
        let message = format!("the text has {} bytes and a zero, the buffer {capacity}", text.len());
        return Err(Failure::new(Status::BufferTooSmall, message));
    }
    // SAFETY: the buffer holds more than `text.len()` bytes by the caller's word.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr(), buffer.cast::<u8>(), text.len());
        buffer.add(text.len()).write(0);
    }
    Ok(())
}

/// The bytes of a string; `None` for a null pointer.
///
/// # Safety
/// `text` is null or the start of a string that ends with a zero byte and stays as it is for `'a`.
pub(crate) unsafe fn bytes<'a>(text: *const c_char) -> Option<&'a [u8]> {
    // SAFETY: by this function's contract.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_bytes())
}

/// A string in UTF-8; `None` for a null pointer.
///
/// # Safety
/// As [`bytes`].
pub(crate) unsafe fn text<'a>(text: *const c_char, name: &str) -> Result<Option<&'a str>> {
    // SAFETY: by this function's contract.
    let Some(bytes) = (unsafe { bytes(text) }) else { return Ok(None) };
    std::str::from_utf8(bytes).map(Some).map_err(|e| Failure::argument(format!("{name} is not UTF-8: {e}")))
}

/// A path, of any bytes; `None` for a null pointer.
///
/// # Safety
/// As [`bytes`].
pub(crate) unsafe fn path(text: *const c_char, name: &str) -> Result<Option<PathBuf>> {
    use std::os::unix::ffi::OsStrExt;
    // SAFETY: by this function's contract.
    match unsafe { bytes(text) } {
        None => Ok(None),
        Some([]) => Err(Failure::argument(format!("{name} is empty; name a path or pass NULL"))),
        Some(bytes) => Ok(Some(std::ffi::OsStr::from_bytes(bytes).into())),
    }
}

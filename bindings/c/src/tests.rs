//! What cannot be seen from C: panics at the boundary, and the layout that other languages rely on.

use crate::block_mask::BlockMaskArgs;
use crate::error::{Failure, guard};
use crate::ragged::RaggedArgs;
use crate::types::{ForwardArgs, Options, Status, Tensor};
use std::ffi::CStr;
use std::mem::offset_of;

fn last_error() -> String {
    // SAFETY: the text is valid until this thread's next call.
    unsafe { CStr::from_ptr(crate::flashtune_last_error()) }.to_str().unwrap().to_owned()
}

#[test]
fn a_panic_becomes_a_status_with_its_text() {
    let n: u32 = "7".parse().unwrap();
    assert_eq!(guard(|| panic!("seven is {n}")), Status::Internal);
    assert!(last_error().contains("seven is 7"), "{}", last_error());
    assert_eq!(guard(|| panic!("plain")), Status::Internal);
    assert!(last_error().contains("plain"));
    assert_eq!(guard(|| std::panic::panic_any(7)), Status::Internal);
    assert!(last_error().contains("without a text"));
}

#[test]
fn a_failure_is_told_to_its_own_thread_with_zero_bytes_made_visible() {
    assert_eq!(guard(|| Err(Failure::argument("a\0b"))), Status::InvalidArgument);
    assert_eq!(last_error(), "a\\0b");
    std::thread::spawn(|| assert_eq!(last_error(), "")).join().unwrap();
    assert_eq!(guard(|| Ok(())), Status::Ok);
    assert_eq!(last_error(), "a\\0b", "success leaves the text alone");
}

#[test]
fn every_status_has_its_name_and_the_header_has_no_other() {
    let header = include_str!("../include/flashtune.h");
    let mut count = 0;
    while let Some(name) = std::ptr::NonNull::new(crate::flashtune_status_name(count).cast_mut()) {
        // SAFETY: a static string.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_str().unwrap();
        assert!(header.contains(&format!("  {name} = {count},")), "{name} is not {count}");
        count += 1;
    }
    assert_eq!(count, header.matches("  FLASHTUNE_STATUS_").count() as i32);
}

/// The Python package and programs built with an older header have these numbers compiled in.
#[test]
fn the_layout_of_abi_1_does_not_move() {
    assert_eq!(crate::ABI_VERSION, 1);
    assert_eq!((size_of::<Tensor>(), offset_of!(Tensor, strides), offset_of!(Tensor, dtype)), (80, 40, 72));
    assert_eq!(
        (offset_of!(Options, device), offset_of!(Options, cuda_context), offset_of!(Options, bundles)),
        (8, 16, 40)
    );
    assert_eq!(
        (offset_of!(Options, scratch_limit), offset_of!(Options, parallel), offset_of!(Options, threads)),
        (64, 72, 96)
    );
    assert_eq!(offset_of!(Options, allow_paths), 104);
    let args = [
        offset_of!(ForwardArgs, q),
        offset_of!(ForwardArgs, o),
        offset_of!(ForwardArgs, lse),
        offset_of!(ForwardArgs, stream),
        offset_of!(ForwardArgs, window_left),
        offset_of!(ForwardArgs, mask),
        offset_of!(ForwardArgs, softmax_scale),
    ];
    assert_eq!(args, [8, 248, 328, 336, 344, 360, 364]);
    assert_eq!((offset_of!(ForwardArgs, mask_program), offset_of!(ForwardArgs, block_mask)), (368, 416));
    assert_eq!((offset_of!(BlockMaskArgs, mask_program), offset_of!(BlockMaskArgs, batch)), (8, 40));
    let ragged = [
        offset_of!(RaggedArgs, q),
        offset_of!(RaggedArgs, q_dtype),
        offset_of!(RaggedArgs, k),
        offset_of!(RaggedArgs, k_scale),
        offset_of!(RaggedArgs, table_type),
        offset_of!(RaggedArgs, kv_lengths),
        offset_of!(RaggedArgs, o),
        offset_of!(RaggedArgs, batch),
        offset_of!(RaggedArgs, mask),
        offset_of!(RaggedArgs, mask_program),
    ];
    assert_eq!(ragged, [8, 40, 96, 208, 280, 344, 392, 456, 520, 528]);
}

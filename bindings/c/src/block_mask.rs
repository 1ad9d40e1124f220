//! Masks that are prepared once for many calls.

use crate::engine_handle::ENGINES;
use crate::error::{Failure, Result, guard};
use crate::prepared::{BLOCK_MASKS, Prepared};
use crate::types::{BlockMaskHandle, EngineHandle, Input, NO_BLOCK_MASK, Status};
use crate::{input, program};
use engine::MaskSizes;
use engine::score::Texts;
use std::ffi::c_char;

/// A mask to prepare for many calls. Fill it with zeros, set `struct_size`, then what is wanted.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct BlockMaskArgs {
    /// sizeof(flashtune_block_mask_args).
    pub struct_size: u32,
    /// 0.
    pub reserved: i32,
    /// The mask, as in `flashtune_forward_args`.
    pub mask_program: *const c_char,
    /// What it reads. Tensors must live, and stay as they are, for as long as the block mask is used; all else is
    /// copied.
    pub inputs: *const Input,
    /// How many; others than the mask reads are ignored.
    pub inputs_len: u64,
    /// sizeof(flashtune_input), unless `inputs_len` is 0.
    pub input_size: u64,
    /// Sequences of the calls; 0 for any number, unless the mask reads `b`.
    pub batch: i64,
    /// Heads of Q; 0 for any number, unless the mask reads `h`.
    pub heads: i64,
    /// Heads of K and V; 0 for any number, unless the mask reads `h_kv`.
    pub kv_heads: i64,
    /// Rows of Q.
    pub q_len: i64,
    /// Rows of K and V.
    pub kv_len: i64,
}

/// Prepares a mask for many calls, such as those of all layers of a model (`block_mask` of `flashtune_forward_args`).
/// Where kernels have something found of a mask first, as of documents and block-sparse masks, it is found by the first
/// call of each kernel, and later calls, on any stream and thread, go by that. A call that is captured in a CUDA graph
/// uses what is there, so let one call come before; otherwise every replay finds it anew. Computes nothing itself.
///
/// What the mask reads must stay as it is for as long as the block mask is used. `block_mask`: receives the handle, 0
/// on failure.
///
/// Fails with INVALID_ARGUMENT (a text or an input that does not fit, a size that the mask needs), INVALID_HANDLE.
///
/// # Safety
/// The pointers are NULL or valid, strings end with a zero byte, and tensors are what their shapes and strides say for
/// as long as the block mask is used.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_block_mask_create(
    engine: EngineHandle,
    args: *const BlockMaskArgs,
    block_mask: *mut BlockMaskHandle,
) -> Status {
    guard(|| {
        // SAFETY: by this function's contract, here and below.
        unsafe { input::write(block_mask, "the block mask's handle", NO_BLOCK_MASK)? };
        let opened = ENGINES.get(engine)?;
        // SAFETY: as above.
        let args = unsafe { input::read(args)? };
        if args.reserved != 0 {
            return Err(Failure::argument(
                "reserved in flashtune_block_mask_args is not 0; fill the struct with zeros first",
            ));
        }
        // SAFETY: as above.
        let text = unsafe { input::text(args.mask_program, "mask_program")? };
        let text = text.ok_or_else(|| Failure::argument("mask_program is null; name a mask"))?;
        // SAFETY: as above.
        let inputs = unsafe { program::inputs(args.inputs, args.inputs_len, args.input_size)? };
        let program = program::program(&Texts { mask: Some(text), ..Texts::default() }, &inputs, None)?;
        let side = inputs.side();
        opened.engine.check_side_addresses(&side)?;
        let block_mask_of = opened.engine.create_block_mask(program, &side, sizes(&args)?)?;
        let handle = BLOCK_MASKS.insert(Prepared { block_mask: block_mask_of, text: text.to_owned() });
        // SAFETY: as above.
        unsafe { input::write(block_mask, "the block mask's handle", handle) }
    })
}

/// Gives a block mask up; the handle is invalid from now on. Its memory is given back behind all calls that were made
/// with it; graphs that were captured with it must not be launched again.
#[unsafe(no_mangle)]
pub extern "C" fn flashtune_block_mask_destroy(block_mask: BlockMaskHandle) -> Status {
    guard(|| BLOCK_MASKS.remove(block_mask).map(drop))
}

/// Bytes of device memory that a block mask holds now: 0 before its first call, and for masks that kernels know by
/// arithmetic.
///
/// # Safety
/// `bytes` is NULL or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_block_mask_bytes(block_mask: BlockMaskHandle, bytes: *mut u64) -> Status {
    guard(|| {
        let held = BLOCK_MASKS.get(block_mask)?.block_mask.bytes();
        // SAFETY: by this function's contract.
        unsafe { input::write(bytes, "the number of bytes", held) }
    })
}

fn sizes(args: &BlockMaskArgs) -> Result<MaskSizes> {
    let size = |name: &str, n: i64| {
        let fits = u32::try_from(n).ok().filter(|n| *n <= i32::MAX as u32);
        fits.ok_or_else(|| Failure::argument(format!("{name} is {n}, but it is from 0 to 2^31 - 1")))
    };
    let open = |name: &str, n: i64| size(name, n).map(|n| (n > 0).then_some(n));
    Ok(MaskSizes {
        batch: open("batch", args.batch)?,
        heads: open("heads", args.heads)?,
        kv_heads: open("kv_heads", args.kv_heads)?,
        q_len: size("q_len", args.q_len)?,
        kv_len: size("kv_len", args.kv_len)?,
    })
}

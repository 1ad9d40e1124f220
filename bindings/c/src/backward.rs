//! The backward pass.

use crate::engine_handle::ENGINES;
use crate::error::{Failure, Result, guard};
use crate::forward::{dropout, mask, residual, stream, view};
use crate::ragged::{address, int_type, size};
use crate::types::{Dropout, EngineHandle, Input, Status, Tensor};
use crate::{input, program};
use engine::ragged::Ints;
use engine::{Backward, Packed, SideInputs};
use std::ffi::{c_char, c_void};

/// `softmax_scale` of `flashtune_backward_args` counts. Without this flag it must be 0, and the scale is
/// 1 / sqrt(head dim of Q).
pub const BACKWARD_SCALE: u32 = 1;

/// The gradients of one forward pass. Fill it with zeros, set `struct_size`, then what is wanted. Mask, scale and
/// program are those of the forward pass.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct BackwardArgs {
    /// sizeof(flashtune_backward_args).
    pub struct_size: u32,
    /// FLASHTUNE_BACKWARD_SCALE or 0.
    pub flags: u32,
    /// The loss's gradient by O, [batch, heads, q_len, head_dim_v].
    pub dout: Tensor,
    /// [batch, heads, q_len, head_dim_qk].
    pub q: Tensor,
    /// [batch, kv_heads, kv_len, head_dim_qk]; heads is a multiple of kv_heads.
    pub k: Tensor,
    /// [batch, kv_heads, kv_len, head_dim_v].
    pub v: Tensor,
    /// O of the forward pass, [batch, heads, q_len, head_dim_v].
    pub o: Tensor,
    /// Of the shape of Q; written. Gradients must not overlap anything else.
    pub dq: Tensor,
    /// Of the shape of K; written: of each KV head the sum over its query heads.
    pub dk: Tensor,
    /// Of the shape of V; written: the same sum.
    pub dv: Tensor,
    /// Log-sum-exp of the forward pass (natural log), contiguous fp32 [batch, heads, q_len].
    pub lse: *const f32,
    /// The loss's gradient by the log-sum-exp, contiguous fp32 [batch, heads, q_len]; NULL: it does not depend on it.
    pub dlse: *const f32,
    /// The CUstream to launch on, of the engine's context; NULL: the default stream. On the CPU NULL.
    pub stream: *mut c_void,
    /// Keys before the query's position that FLASHTUNE_MASK_WINDOW leaves visible; -1: all. Otherwise 0.
    pub window_left: i64,
    /// Keys after the query's position that FLASHTUNE_MASK_WINDOW leaves visible; -1: all. Otherwise 0.
    pub window_right: i64,
    /// A `flashtune_mask`.
    pub mask: i32,
    /// Factor of the scores, with FLASHTUNE_BACKWARD_SCALE in `flags`.
    pub softmax_scale: f32,
    /// As in `flashtune_forward_args`.
    pub mask_program: *const c_char,
    /// The same.
    pub score_program: *const c_char,
    /// The same.
    pub sink_program: *const c_char,
    /// What the programs read. Tensors must live until the work is done; all else is copied.
    pub inputs: *const Input,
    /// How many; others than the programs read are ignored.
    pub inputs_len: u64,
    /// sizeof(flashtune_input), unless `inputs_len` and `gradients_len` are 0.
    pub input_size: u64,
    /// NULL: the tensors' batch says which sequences there are. Else first row of each packed sequence in Q, O and
    /// their gradients, and the end of the last one's, [batch + 1]. All tensors then have a batch of 1, whose rows are
    /// those of all sequences one after the other; lse and dlse are [heads, total rows of Q]. Read where the kernel
    /// runs.
    pub q_begin: *const c_void,
    /// The same of K, V and their gradients.
    pub kv_begin: *const c_void,
    /// Rows of each packed sequence in Q that are used, [batch]; NULL: all. Those behind are neither read nor written.
    pub q_lengths: *const c_void,
    /// The same of K.
    pub kv_lengths: *const c_void,
    /// Packed sequences.
    pub batch: i64,
    /// Rows of Q that a packed sequence has at most; longer ones are cut, and no gradient of the rest is written.
    pub max_q: i64,
    /// The same of K.
    pub max_kv: i64,
    /// What the four arrays are of: a `flashtune_int_type`. 0: FLASHTUNE_INT_I32.
    pub length_type: i32,
    /// 0.
    pub reserved: i32,
    /// Gradients of what the programs read: the name of a float tensor or scalar of `inputs`, and memory for it in
    /// `data`, of the same rank and shape, with storage F32, F16 or BF16 whatever the input's is; written. Of a tensor
    /// that is broadcast each is the sum over all that read an element, in one order.
    pub gradients: *const Input,
    /// How many.
    pub gradients_len: u64,
    /// What O lost when it was rounded, as the forward pass wrote it, bf16 of the shape of O: gradients of rows that
    /// attend mostly to one key then have as many digits as others. NULL `data` for none.
    pub residual: Tensor,
    /// That of the forward pass; zeros for none. Not beside `gradients`.
    pub dropout: Dropout,
}

/// Computes dQ, dK, dV and what `gradients` asks for on `args->stream` and returns at once (on the CPU when done). The
/// same call gives the same bytes. The first call of a kind may compile; later ones launch and wait for nothing,
/// allocate nothing but scratch memory in the stream's order (`scratch_limit` of flashtune_options), and may be
/// captured in a CUDA graph. Does nothing when no gradient has an element.
///
/// Rows that attend to nothing (log-sum-exp -infinity), and keys that no query sees, have gradients of zero. Rows of no
/// packed sequence are left as they are. Derivatives of a score program at a kink are those of PyTorch.
///
/// Addresses are checked as in `flashtune_forward`. Fails as it does.
///
/// # Safety
/// `args` is NULL or valid, its addresses are as said above, its strings end with a zero byte, and its stream is a live
/// one of the engine's context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_backward(engine: EngineHandle, args: *const BackwardArgs) -> Status {
    guard(|| {
        let opened = ENGINES.get(engine)?;
        // SAFETY: by this function's contract.
        let args = unsafe { input::read(args)? };
        // SAFETY: as above; the strings are read before this returns.
        let program = unsafe { program::of_call(&args, None)? };
        let mut call = call(&args)?;
        if let Some((program, inputs)) = &program {
            call = call.with_program(*program, inputs.side());
        }
        // SAFETY: as above.
        let gradients = unsafe { program::gradients(args.gradients, args.gradients_len, args.input_size)? };
        call = call.with_gradients(&gradients);
        let stream = stream(&opened, args.stream)?;
        opened.engine.check_backward_addresses(&call)?;
        // SAFETY: as above; the sizes are checked by the engine.
        opened.remember(unsafe { opened.engine.backward(&call, stream)? });
        Ok(())
    })
}

/// All of `flashtune_backward` but the launch: compiles the kernel if need be and loads it, so that a call with the
/// same arguments is a launch and no more. Reads and writes no tensor; the addresses matter for their alignment.
///
/// # Safety
/// As `flashtune_backward`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_prepare_backward(engine: EngineHandle, args: *const BackwardArgs) -> Status {
    guard(|| {
        let opened = ENGINES.get(engine)?;
        // SAFETY: by this function's contract.
        let args = unsafe { input::read(args)? };
        // SAFETY: as above; the strings are read before this returns.
        let program = unsafe { program::of_call(&args, None)? };
        let mut call = call(&args)?;
        if let Some((program, inputs)) = &program {
            call = call.with_program(*program, inputs.side());
        }
        // SAFETY: as above.
        let gradients = unsafe { program::gradients(args.gradients, args.gradients_len, args.input_size)? };
        call = call.with_gradients(&gradients);
        opened.engine.check_backward_addresses(&call)?;
        opened.remember(opened.engine.prepare_backward(&call)?);
        Ok(())
    })
}

/// The call in the engine's words, without its score program.
fn call(args: &BackwardArgs) -> Result<Backward<'static>> {
    let scale = match args.flags {
        BACKWARD_SCALE => Some(args.softmax_scale),
        0 if args.softmax_scale == 0.0 => None,
        0 => {
            return Err(Failure::argument(format!(
                "softmax_scale is {}, but flags lacks FLASHTUNE_BACKWARD_SCALE; set the flag, or leave the scale 0",
                args.softmax_scale
            )));
        }
        n => return Err(Failure::argument(format!("flags is {n:#x}, but only FLASHTUNE_BACKWARD_SCALE (1) is known"))),
    };
    Ok(Backward {
        dout: view("dout", &args.dout)?,
        q: view("q", &args.q)?,
        k: view("k", &args.k)?,
        v: view("v", &args.v)?,
        o: view("o", &args.o)?,
        lse: args.lse as usize as u64,
        dlse: (!args.dlse.is_null()).then_some(args.dlse as usize as u64),
        residual: residual(&args.residual)?,
        dropout: dropout(&args.dropout),
        dq: view("dq", &args.dq)?,
        dk: view("dk", &args.dk)?,
        dv: view("dv", &args.dv)?,
        mask: mask(args.mask, (args.window_left, args.window_right))?,
        scale,
        program: None,
        side: SideInputs::default(),
        packed: packed(args)?,
        gradients: &[],
    })
}

/// The packed sequences of a call that has some.
fn packed(args: &BackwardArgs) -> Result<Option<Packed>> {
    let BackwardArgs { q_begin, kv_begin, q_lengths, kv_lengths, length_type, .. } = *args;
    let kind = int_type("length_type", length_type)?;
    let ints = |pointer| Ints { address: address(pointer), kind };
    let given = |pointer: *const c_void| (!pointer.is_null()).then(|| ints(pointer));
    let rest = [("kv_begin", kv_begin), ("q_lengths", q_lengths), ("kv_lengths", kv_lengths)];
    if q_begin.is_null() {
        return match rest.iter().find(|(_, pointer)| !pointer.is_null()) {
            Some((name, _)) => Err(Failure::argument(format!(
                "{name} is given, but q_begin is NULL; give the first rows of packed sequences, or leave {name} NULL"
            ))),
            None => Ok(None),
        };
    }
    if args.reserved != 0 {
        return Err(Failure::argument(format!("reserved is {}, but it is 0", args.reserved)));
    }
    Ok(Some(Packed {
        batch: size("batch", args.batch)?,
        q_begin: ints(q_begin),
        kv_begin: ints(kv_begin),
        q_used: given(q_lengths),
        kv_used: given(kv_lengths),
        max_q: size("max_q", args.max_q)?,
        max_kv: size("max_kv", args.max_kv)?,
    }))
}

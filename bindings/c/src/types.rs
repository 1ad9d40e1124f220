//! The structs and constants of the header that several functions share; those of one stand beside it. A struct that is
//! all zeros is valid where its fields allow it, so that fields can be added: those that an older program does not know
//! are zero, and mean what was done before.

use std::ffi::{c_char, c_void};

/// What a function has to say. Everything but `FLASHTUNE_STATUS_OK` is a failure whose text `flashtune_last_error`
/// gives; nothing was launched then.
#[repr(i32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// Done.
    Ok = 0,
    /// A null pointer, a struct of an unknown size, a number or text outside of what is accepted.
    InvalidArgument = 1,
    /// The engine was closed, or the number never was an engine of this library.
    InvalidHandle = 2,
    /// A tensor does not fit the others or the device: dtype, shape, strides, address.
    InvalidTensor = 3,
    /// No kernel computes this problem; the text says what to do instead.
    Unsupported = 4,
    /// A driver, a compiler or a library is not on this machine.
    Missing = 5,
    /// The device or its driver failed.
    Device = 6,
    /// A compiler refused a kernel's source.
    Compile = 7,
    /// No stored kernel serves and the policy forbids compiling.
    Sealed = 8,
    /// A bundle, the cache or the templates cannot be used.
    Storage = 9,
    /// Tuning had no result.
    Tuning = 10,
    /// The buffer for the answer is too small.
    BufferTooSmall = 11,
    /// The process was forked after the library was used: its threads and its GPU context stayed with the parent.
    Forked = 12,
    /// A fault of the library, caught.
    Internal = 13,
}

/// Type of a tensor's elements. 0 is none of them, so that a forgotten field is an error.
#[repr(i32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dtype {
    /// IEEE binary16.
    F16 = 1,
    /// bfloat16.
    Bf16 = 2,
    /// IEEE binary32.
    F32 = 3,
    /// OCP FP8, 4 bits of exponent: Q, K and V of forward passes on sm_90a (sm_89 and newer: `allow_paths`), whose O is
    /// of any dtype.
    E4m3 = 4,
}

/// How the elements of a score program's input lie in memory.
#[repr(i32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Storage {
    /// IEEE binary32.
    F32 = 1,
    /// IEEE binary16.
    F16 = 2,
    /// bfloat16.
    Bf16 = 3,
    /// 32-bit signed integer.
    I32 = 4,
    /// 64-bit signed integer.
    I64 = 5,
    /// One byte; anything but 0 is true.
    Bool = 6,
}

/// Elements of a KV store.
#[repr(i32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoreType {
    /// Those of Q.
    Same = 0,
    /// IEEE binary16.
    F16 = 1,
    /// bfloat16.
    Bf16 = 2,
    /// IEEE binary32.
    F32 = 3,
    /// OCP FP8 E4M3.
    E4m3 = 4,
    /// OCP FP8 E5M2.
    E5m2 = 5,
    /// Two's complement.
    Int8 = 6,
}

/// Integers of arrays on the device.
#[repr(i32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IntType {
    /// 32-bit signed.
    I32 = 0,
    /// 32-bit unsigned; values from 2^31 on are out of every range.
    U32 = 1,
    /// 64-bit signed.
    I64 = 2,
}

/// Which elements of a quantised store share a scale.
#[repr(i32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scales {
    /// All have the scale 1.
    One = 0,
    /// Those of one KV head of one sequence; of all sequences with a stride of 0, and all with two strides of 0.
    Head = 1,
    /// Those of one token of one KV head; scales lie in pages as the tokens do.
    Token = 2,
}

/// Where the keys of a sequence lie in a store. 0 is none of them, so that a forgotten field is an error.
#[repr(i32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Index {
    /// A sequence is a page, that of its own number or of `slots`.
    Dense = 1,
    /// The keys of all sequences lie one after the other in the only page: `kv_begin`.
    Packed = 2,
    /// By rows of a table: `k_table`.
    Table = 3,
    /// By rows of different lengths, one after the other: `pages_begin` and `k_table`.
    Csr = 4,
}

/// What to do when no tuned kernel fits.
#[repr(i32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// Take the default schedule and compile it.
    Default = 0,
    /// Tune now: seconds to minutes for the first call of a class of sizes.
    Tune = 1,
    /// Run no compiler: the nearest stored kernel or FLASHTUNE_STATUS_SEALED.
    Sealed = 2,
}

/// Which keys a query attends to. Query row i stands at position i + kv_len - q_len among the keys.
#[repr(i32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mask {
    /// All of them.
    Full = 0,
    /// Those up to its own position.
    Causal = 1,
    /// Those from `window_left` before its position to `window_right` after it.
    Window = 2,
}

/// Which threads run kernels on the CPU. Results do not depend on it.
#[repr(i32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Threads {
    /// Those of the library, unless `parallel` is given.
    Own = 0,
    /// Those of the OpenMP runtime that is loaded in this process, of PyTorch's where it is there;
    /// FLASHTUNE_STATUS_MISSING without one.
    OpenMp = 1,
    /// The same if there is one, else the library's.
    OpenMpIfLoaded = 2,
}

/// A parallel loop of the host: calls `member` with `of` up to `members` times, at the same time on different threads
/// as far as there are any, and returns when all these calls have returned. Fewer calls than asked for are right, if
/// slower. `context` is what `flashtune_options` has. It is called from every thread that computes, and must not
/// unwind.
pub type Parallel = Option<
    unsafe extern "C" fn(
        context: *mut c_void,
        members: u64,
        member: Option<unsafe extern "C" fn(of: *mut c_void)>,
        of: *mut c_void,
    ),
>;

/// Whether a schedule that compiles quickly answers calls while their own kernel is being compiled.
#[repr(i32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QuickFirst {
    /// What FLASHTUNE_QUICK_FIRST says; yes when it says nothing.
    Unsaid = 0,
    /// It does.
    Yes = 1,
    /// The first call waits for the kernel itself.
    No = 2,
}

/// What a sealed engine does with sizes that no kernel was sealed in for.
#[repr(i32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnMiss {
    /// Runs the problem's kernel of the nearest sizes.
    Nearest = 0,
    /// Fails with FLASHTUNE_STATUS_SEALED.
    Refuse = 1,
}

/// Form of an explanation.
#[repr(i32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// Lines for people.
    Text = 0,
    /// One JSON object.
    Json = 1,
}

/// An open engine. 0 is none. Not an address: a closed or made-up number is an error, never a crash.
pub type EngineHandle = u64;

/// A mask that was prepared for many calls. 0 is none. Not an address, as an engine's is not.
pub type BlockMaskHandle = u64;

/// `softmax_scale` counts. Without this flag it must be 0, and the scale is 1 / sqrt(head dim of Q).
pub const FORWARD_SCALE: u32 = 1;

/// Products of f32 are fp32 ones, without tensor cores, as a pass whose gradients will be asked for wants them. Without
/// any of the three flags of precision, of which at most one is set, dense f32 is computed as with
/// FLASHTUNE_FORWARD_TF32X3 where a GPU has that, and exactly elsewhere and where weights are asked for.
pub const FORWARD_EXACT: u32 = 2;

/// Products of f32 are three TF32 products of tensor cores each, which keep f32's error. Refused for other dtypes, on
/// the CPU and before sm_80.
pub const FORWARD_TF32X3: u32 = 4;

/// Products of f32 are single TF32 products of tensor cores: operands keep 11 bits. Refused as FLASHTUNE_FORWARD_TF32X3
/// is.
pub const FORWARD_TF32: u32 = 8;

/// How to open an engine. Fill it with zeros, set `struct_size`, then what is wanted.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// sizeof(flashtune_options).
    pub struct_size: u32,
    /// A `flashtune_policy`.
    pub policy: i32,
    /// "auto" (a GPU if there is one), "cpu", "cuda" or "cuda:N"; NULL: "auto". With "cuda:N" the engine works in the
    /// device's primary context, as the CUDA runtime and PyTorch do.
    pub device: *const c_char,
    /// A CUcontext to work in; `device` is then NULL. It must outlive the engine.
    pub cuda_context: *mut c_void,
    /// Folder of records and compiled kernels; NULL: FLASHTUNE_CACHE or the user's cache folder.
    pub cache_dir: *const c_char,
    /// Folder whose templates replace the built-in ones; NULL: FLASHTUNE_TEMPLATES or none.
    pub templates_dir: *const c_char,
    /// Bundle files to search after the cache, before those of FLASHTUNE_BUNDLES. They must be signed by a key of
    /// FLASHTUNE_TRUSTED_KEYS, unless FLASHTUNE_ALLOW_UNSIGNED is 1.
    pub bundles: *const *const c_char,
    /// How many.
    pub bundles_len: u64,
    /// A `flashtune_quick_first`. The quick schedule has the same bits and is slower; calls in a capture,
    /// `flashtune_prepare` and `flashtune_preload` wait for the kernel itself. A process that ends meanwhile waits for
    /// the compiler.
    pub quick_first: i32,
    /// 1: `flashtune_forward` refuses O, the log-sum-exp and weights that share an element with another tensor of the
    /// call, as far as addresses tell (INVALID_TENSOR; views with interleaved rows are the caller's word). 0: no look.
    pub checked: i32,
    /// Most bytes of scratch memory that a backward pass takes on a GPU beside the gradients; 0: 1 GiB. One that would
    /// take more runs in waves of KV heads, one head of one sequence at a time at least, with the same bytes as
    /// results.
    pub scratch_limit: u64,
    /// The host's own threads for kernels on the CPU; NULL: those that `threads` says. A GPU takes no note of either.
    pub parallel: Parallel,
    /// What `parallel` is called with. It must outlive the engine.
    pub parallel_context: *mut c_void,
    /// How many threads a loop of the host has; 0: as many as cores.
    pub parallel_threads: u64,
    /// A `flashtune_threads`; 0 beside `parallel`.
    pub threads: i32,
    /// 0.
    pub reserved: i32,
    /// Instruction paths that are taken although no card is known to have executed them, as `flashtune_explain` names
    /// them, with commas between; NULL: those of FLASHTUNE_ALLOW_PATHS alone.
    pub allow_paths: *const c_char,
}

/// A tensor [batch, heads, rows, head_dim] in memory of the engine's device.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Tensor {
    /// Address of element [0, 0, 0, 0]. Q, K and V are only read.
    pub data: *mut c_void,
    /// Batch, heads, rows, elements of a row. [B, S, H, D] memory is expressed by strides.
    pub shape: [i64; 4],
    /// Distance between neighbours along each of these dimensions, in elements; the last is 1.
    pub strides: [i64; 4],
    /// A `flashtune_dtype`.
    pub dtype: i32,
    /// 0.
    pub reserved: i32,
}

/// A scalar or a tensor that a score program reads. Fill it with zeros, then set what it has.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Input {
    /// The name in the program, in UTF-8.
    pub name: *const c_char,
    /// Address of a tensor's first element, in memory of the engine's device.
    pub data: *const c_void,
    /// Length of each of the first `rank` axes.
    pub shape: [i64; 4],
    /// Distance between neighbours along each of them, in elements; not negative.
    pub strides: [i64; 4],
    /// A `flashtune_storage`. For a scalar I32 or I64 (a number in `int_value`) or F32 (one in `float_value`).
    pub storage: i32,
    /// Number of axes, 1 to 4; 0 for a scalar.
    pub rank: i32,
    /// A scalar.
    pub int_value: i64,
    /// A scalar.
    pub float_value: f64,
}

/// Which elements of an e4m3 operand share a scale.
#[repr(i32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DescaleKind {
    /// Those of a KV head of a sequence: scales [batch, kv_heads].
    Head = 0,
    /// Of Q and K those of a row: [batch, heads, rows], with the operand's own heads.
    Token = 1,
    /// Of Q and K those of `rows` rows that follow each other: [batch, heads, rows / `rows`], rounded up.
    Block = 2,
    /// Of V those of a column of a KV head: [batch, kv_heads, head_dim_v].
    Channel = 3,
}

/// What shares a scale in one e4m3 operand; zeros for those of a head.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Descale {
    /// A `flashtune_descale_kind`.
    pub kind: i32,
    /// With FLASHTUNE_DESCALE_KIND_BLOCK the rows that share one, a power of two, of a quantisation up to 128; else 0.
    pub rows: i32,
    /// Elements from a scale to that of the next row, block or channel; of heads 0.
    pub stride: i64,
}

/// Dropout: which scores of a softmax are dropped, by the place of each alone (docs/reference.md has the definition):
/// a backward pass with the same numbers drops the same.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Dropout {
    /// The probability that a score is dropped, from 0, which drops none, to below 1. Kept weights are multiplied by
    /// 1 / (1 - p); the log-sum-exp is that without dropout.
    pub p: f64,
    /// The seed, to which what `seed_at` points to is added.
    pub seed: u64,
    /// The offset, to which what `offset_at` points to is added: another one drops other scores.
    pub offset: u64,
    /// 64 bits in memory of the engine's device, read where the kernel runs, so that a captured graph drops others at
    /// each replay whose memory has changed; or NULL.
    pub seed_at: *const u64,
    /// The same for the offset.
    pub offset_at: *const u64,
}

/// One forward pass: O = softmax(scale * Q K^T + mask) V. Fill it with zeros, set `struct_size`, then what is wanted.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct ForwardArgs {
    /// sizeof(flashtune_forward_args).
    pub struct_size: u32,
    /// FLASHTUNE_FORWARD_SCALE or 0, and a precision (FLASHTUNE_FORWARD_EXACT, _TF32X3, _TF32) or 0.
    pub flags: u32,
    /// [batch, heads, q_len, head_dim_qk].
    pub q: Tensor,
    /// [batch, kv_heads, kv_len, head_dim_qk]; heads is a multiple of kv_heads.
    pub k: Tensor,
    /// [batch, kv_heads, kv_len, head_dim_v].
    pub v: Tensor,
    /// [batch, heads, q_len, head_dim_v]; written. It must not overlap the others.
    pub o: Tensor,
    /// Log-sum-exp of the scaled scores (natural log), contiguous fp32 [batch, heads, q_len]; written unless NULL.
    pub lse: *mut f32,
    /// The CUstream to launch on, of the engine's context; NULL: the default stream. On the CPU NULL.
    pub stream: *mut c_void,
    /// Keys before the query's position that FLASHTUNE_MASK_WINDOW leaves visible; -1: all. Otherwise 0.
    pub window_left: i64,
    /// Keys after the query's position that FLASHTUNE_MASK_WINDOW leaves visible; -1: all. Otherwise 0.
    pub window_right: i64,
    /// A `flashtune_mask`.
    pub mask: i32,
    /// Factor of the scores, with FLASHTUNE_FORWARD_SCALE in `flags`.
    pub softmax_scale: f32,
    /// A score program's mask, which holds beside `mask`: the text of an expression, after declarations and names if it
    /// has any, or the name of a built-in program; NULL for none. What a text reads without declaring it is declared by
    /// the input of that name.
    pub mask_program: *const c_char,
    /// What goes into the softmax in place of the score; NULL for the score.
    pub score_program: *const c_char,
    /// The logit of one more key without a value; NULL for none.
    pub sink_program: *const c_char,
    /// What the programs read. Tensors must live until the work is done; all else is copied.
    pub inputs: *const Input,
    /// How many; others than the programs read are ignored.
    pub inputs_len: u64,
    /// sizeof(flashtune_input), unless `inputs_len` is 0.
    pub input_size: u64,
    /// A mask that was prepared before, in place of `mask_program`, which is then NULL or says the same. What the mask
    /// reads need not be among the inputs. 0 for none.
    pub block_mask: BlockMaskHandle,
    /// The attention weights, contiguous fp32 [batch, heads, q_len, kv_len]; written unless NULL, on CUDA by the plain
    /// kernel: for inspection, not for speed. A sink takes its part, so that rows sum to less than 1.
    pub weights: *mut f32,
    /// What elements of an e4m3 Q are multiplied by: fp32 [batch, kv_heads] on the device, by the head of K; NULL: 1.
    pub q_descale: *const f32,
    /// The same for K.
    pub k_descale: *const f32,
    /// The same for V.
    pub v_descale: *const f32,
    /// Elements from one sequence, and from one KV head, to the next in `q_descale`; may be 0. By row it is heads of Q.
    pub q_descale_stride: [i64; 2],
    /// The same in `k_descale`.
    pub k_descale_stride: [i64; 2],
    /// The same in `v_descale`.
    pub v_descale_stride: [i64; 2],
    /// What O loses when it is rounded to 16 bits, bf16 of the shape of O, for a backward pass over rows that attend
    /// mostly to one key (`residual` of flashtune_backward_args); written unless `data` is NULL. For f16 and bf16.
    pub residual: Tensor,
    /// Which scores are dropped behind the softmax; zeros for none. Not beside `weights`.
    pub dropout: Dropout,
    /// What shares a scale in Q, and the third stride of `q_descale`.
    pub q_descale_by: Descale,
    /// The same for K.
    pub k_descale_by: Descale,
    /// The same for V.
    pub v_descale_by: Descale,
    /// What an e4m3 O is multiplied by before it is rounded, one fp32 on the device; NULL: 1, as for other O.
    pub o_scale: *const f32,
}

/// The handle of [`EngineHandle`] that no engine has.
pub(crate) const NO_ENGINE: EngineHandle = 0;

/// The handle of [`BlockMaskHandle`] that no block mask has.
pub(crate) const NO_BLOCK_MASK: BlockMaskHandle = 0;

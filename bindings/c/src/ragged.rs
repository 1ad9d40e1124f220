//! The forward pass over a ragged batch.

use crate::engine_handle::{ENGINES, Opened};
use crate::error::{Failure, Result, guard};
use crate::forward::{Places, dropout, mask, operand_dtype, stream};
use crate::types::{Dropout, EngineHandle, Index, Input, IntType, Scales as ScaleKind, Status, StoreType};
use crate::{input, program};
use engine::ragged::{
    self, Added, Bounds, Expected, IntKind, Ints, KeyLengths, LogBase, Lse, Output, Queries, QueryRows, Ragged,
    RaggedBatch, Scales, Store, StoreRows,
};
use engine::{DType, Stream};
use std::ffi::{c_char, c_void};

/// `softmax_scale` of `flashtune_ragged` counts. Without this flag it must be 0, and the scale is 1 /
/// sqrt(head_dim_qk).
pub const RAGGED_SCALE: u32 = 1;

/// The log-sum-exp of `flashtune_ragged` is of base 2, and not a natural logarithm.
pub const RAGGED_LSE_LOG2: u32 = 2;

/// Rows that attend to nothing have the log-sum-exp +infinity, and not -infinity.
pub const RAGGED_LSE_EMPTY_POSITIVE: u32 = 4;

/// One forward pass over sequences of different lengths, whose K and V lie in a store that is indexed on the device.
/// Fill it with zeros, set `struct_size`, then what is wanted. Addresses are those of device memory, strides count
/// elements, and lengths and tables are read when the call runs: a captured call is replayed with others, within its
/// bounds.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct RaggedArgs {
    /// sizeof(flashtune_ragged).
    pub struct_size: u32,
    /// FLASHTUNE_RAGGED_SCALE, FLASHTUNE_RAGGED_LSE_LOG2, FLASHTUNE_RAGGED_LSE_EMPTY_POSITIVE, or 0.
    pub flags: u32,

    /// Q: [batch, max_q, heads, head_dim_qk] in any order of memory, or, with `q_begin`, [total_q, heads, head_dim_qk].
    pub q: *const c_void,
    /// Strides of Q: batch, head, row. That of the batch has no meaning beside `q_begin`.
    pub q_stride: [i64; 3],
    /// Elements of Q: a `flashtune_dtype`.
    pub q_dtype: i32,
    /// Elements of O: a `flashtune_dtype`, that of Q; 0 is the same. Beside e4m3 queries any, and 0 is bf16.
    pub o_dtype: i32,
    /// Query heads, a multiple of kv_heads.
    pub heads: i64,
    /// Elements of a row of Q and K.
    pub head_dim_qk: i64,
    /// Elements of a row of V and O.
    pub head_dim_v: i64,
    /// First row of each sequence in Q, O and the log-sum-exp, and the end of the last one's, [batch + 1]; NULL: every
    /// sequence has max_q rows.
    pub q_begin: *const c_void,
    /// Rows of each sequence that are used, [batch]: those behind are not written; NULL: all.
    pub q_lengths: *const c_void,
    /// NULL. Words of ancestors of drafts in a tree, which no kernel takes yet (UNSUPPORTED).
    pub tree: *const c_void,

    /// K. A page is what the index names: tokens of some number, the room of one sequence, or all packed keys.
    pub k: *const c_void,
    /// V.
    pub v: *const c_void,
    /// Elements of K and V: a `flashtune_store_type`.
    pub kv_type: i32,
    /// A `flashtune_index`.
    pub index: i32,
    /// KV heads.
    pub kv_heads: i64,
    /// Pages of the store. Identifiers outside of 0 to this are of no page, and their keys masked.
    pub pages: i64,
    /// Tokens of a page.
    pub page_tokens: i64,
    /// Strides of K: page, token, head, and from 16 bytes of a row to the next 16, 0 where rows are contiguous.
    pub k_stride: [i64; 4],
    /// Strides of V: page, token, head, and column, 0 or 1 where rows are contiguous. With another the token's is 1.
    pub v_stride: [i64; 4],
    /// What elements of a quantised K are multiplied by; NULL without scales.
    pub k_scale: *const f32,
    /// The same for V.
    pub v_scale: *const f32,
    /// Strides of K's scales: sequence, head, 0; or, for FLASHTUNE_SCALES_TOKEN, page, head, token.
    pub k_scale_stride: [i64; 3],
    /// The same for V's.
    pub v_scale_stride: [i64; 3],
    /// A `flashtune_scales`, for K.
    pub k_scales: i32,
    /// The same for V.
    pub v_scales: i32,

    /// The integers of `slots`, `k_table` and `v_table`: a `flashtune_int_type`.
    pub table_type: i32,
    /// Those of all other arrays: a `flashtune_int_type`.
    pub length_type: i32,
    /// FLASHTUNE_INDEX_DENSE: page of each sequence, [batch]; NULL: its own number.
    pub slots: *const c_void,
    /// FLASHTUNE_INDEX_PACKED: first key of each sequence, and the end of the last one's, [batch + 1].
    pub kv_begin: *const c_void,
    /// FLASHTUNE_INDEX_CSR: first entry of each sequence in the tables, and the end of the last one's, [batch + 1].
    pub pages_begin: *const c_void,
    /// Identifiers of K's pages: [batch, table_capacity], or those of all sequences one after the other.
    pub k_table: *const c_void,
    /// Identifiers of V's pages, laid out alike; NULL: those of K.
    pub v_table: *const c_void,
    /// FLASHTUNE_INDEX_TABLE: entries from one sequence to the next.
    pub table_stride: i64,
    /// FLASHTUNE_INDEX_TABLE: entries of a sequence. What lies behind its length is never read.
    pub table_capacity: i64,

    /// Keys of each sequence, [batch]. Of these three at most one; without any, those of `kv_begin`, all pages of
    /// `pages_begin`, or max_kv.
    pub kv_lengths: *const c_void,
    /// The same as sums, [batch + 1]: a sequence has the difference of two neighbours.
    pub kv_sums: *const c_void,
    /// FLASHTUNE_INDEX_CSR: tokens of each sequence's last page, 1 to page_tokens, [batch].
    pub last_page: *const c_void,
    /// Tokens before each sequence's first key, [batch]: part of its length and never read; NULL: none.
    pub left_pad: *const c_void,
    /// Rows that every sequence gained behind `kv_lengths`; 0 where those are lengths after the append.
    pub kv_added: i64,
    /// The same as differences of [batch + 1], in place of `kv_added`; or NULL.
    pub kv_added_begin: *const c_void,

    /// O; written. It must not overlap the others.
    pub o: *mut c_void,
    /// Strides of O: batch, head, row. That of the batch has no meaning beside `q_begin`.
    pub o_stride: [i64; 3],
    /// Log-sum-exp of the scaled scores, fp32; written unless NULL.
    pub lse: *mut f32,
    /// Its strides: batch, head, row. That of the batch has no meaning beside `q_begin`.
    pub lse_stride: [i64; 3],

    /// Sequences.
    pub batch: i64,
    /// Rows of Q, with `q_begin`.
    pub total_q: i64,
    /// Rows of Q that a sequence has at most.
    pub max_q: i64,
    /// Keys that a sequence has at most, padding before them included. Longer ones are cut.
    pub max_kv: i64,
    /// A hint: keys of all sequences together; 0 where unknown. Hints choose a kernel and may be wrong.
    pub expected_keys: i64,
    /// A hint: keys of the longest sequence; 0 where unknown.
    pub expected_longest: i64,

    /// As in `flashtune_forward_args`, aligned at the end of each sequence.
    pub window_left: i64,
    /// As there.
    pub window_right: i64,
    /// A `flashtune_mask`.
    pub mask: i32,
    /// Factor of the scores, with FLASHTUNE_RAGGED_SCALE in `flags`.
    pub softmax_scale: f32,
    /// As in `flashtune_forward_args`; `q` and `kv` count the rows and keys of a sequence.
    pub mask_program: *const c_char,
    /// As there.
    pub score_program: *const c_char,
    /// As there.
    pub sink_program: *const c_char,
    /// What the programs read. Axes along q_len and kv_len have the lengths of max_q and max_kv.
    pub inputs: *const Input,
    /// How many; others than the programs read are ignored.
    pub inputs_len: u64,
    /// sizeof(flashtune_input), unless `inputs_len` is 0.
    pub input_size: u64,
    /// Which scores are dropped behind the softmax, of packed queries and keys; zeros for none.
    pub dropout: Dropout,
    /// What elements of e4m3 queries are multiplied by, fp32, for each sequence and KV head; NULL: 1.
    pub q_scale: *const f32,
    /// Its strides: sequence, KV head; 0 repeats one.
    pub q_scale_stride: [i64; 2],
    /// Where O is FLASHTUNE_E4M3, as it may be beside such queries: device address of one fp32 by which O is multiplied
    /// before it is rounded; NULL: 1.
    pub o_scale: *const f32,
}

/// Computes a ragged batch on `stream` and returns at once (on the CPU when done). The first call of a class of sizes
/// may compile; later ones launch, allocate nothing, wait for nothing and read no length, and may be captured in a
/// CUDA graph, which may be replayed with other lengths, tables and scales. Every row of every sequence is written:
/// those that attend to nothing as zeros. Does nothing when O has no row.
///
/// `stream`: the CUstream to launch on, of the engine's context; NULL: the default stream. On the CPU NULL.
///
/// Addresses are checked as in `flashtune_forward`, of lengths and tables the beginning.
///
/// Fails as `flashtune_forward`; with UNSUPPORTED for head dims above 256, trees, and bounds that kernels do not count
/// to.
///
/// # Safety
/// `args` is NULL or valid, its addresses are as said above, its strings end with a zero byte, and `stream` is a live
/// one of the engine's context. First rows do not decrease and stay inside of what they count.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_forward_ragged(
    engine: EngineHandle,
    args: *const RaggedArgs,
    stream: *mut c_void,
) -> Status {
    // SAFETY: by this function's contract.
    unsafe { forward_ragged(engine, args, stream, Places::LookedUp) }
}

/// [`flashtune_forward_ragged`], with tensors looked up or not.
///
/// # Safety
/// As [`flashtune_forward_ragged`].
pub(crate) unsafe fn forward_ragged(
    engine: EngineHandle,
    args: *const RaggedArgs,
    stream: *mut c_void,
    places: Places,
) -> Status {
    guard(|| {
        // SAFETY: by this function's contract.
        unsafe {
            with_call(engine, args, (stream, places), |opened, call, stream| {
                // SAFETY: as above; what the host can know of the sizes is checked by the engine.
                opened.remember(opened.engine.forward_ragged(call, stream)?);
                Ok(())
            })
        }
    })
}

/// All of `flashtune_forward_ragged` but the launch: finds or compiles the kernel and loads it, so that a call with the
/// same bounds, strides and hint is a launch and no more. Reads and writes no tensor; the addresses matter for their
/// alignment.
///
/// # Safety
/// As `flashtune_forward_ragged`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_prepare_ragged(engine: EngineHandle, args: *const RaggedArgs) -> Status {
    guard(|| {
        // SAFETY: by this function's contract.
        unsafe {
            with_call(engine, args, (std::ptr::null_mut(), Places::LookedUp), |opened, call, _| {
                opened.remember(opened.engine.prepare_ragged(call)?);
                Ok(())
            })
        }
    })
}

/// Reads and checks the call, and passes it on.
///
/// # Safety
/// `args` is null or readable for the size that it states, and what it points to is as [`flashtune_forward_ragged`]
/// says.
unsafe fn with_call(
    handle: EngineHandle,
    args: *const RaggedArgs,
    (on, places): (*mut c_void, Places),
    f: impl FnOnce(&Opened, &Ragged<'_>, Stream) -> Result<()>,
) -> Result<()> {
    let opened = ENGINES.get(handle)?;
    // SAFETY: by this function's contract.
    let args = unsafe { input::read(args)? };
    // SAFETY: as above; the strings are read before this returns.
    let program = unsafe { program::of_call(&args, None)? };
    let scale = scale(&args)?;
    let mask = mask(args.mask, (args.window_left, args.window_right))?;
    let batch = batch(&args)?;
    let q_scale = match address(args.q_scale) {
        0 => Scales::One,
        address => Scales::PerHead { address, strides: args.q_scale_stride },
    };
    let o_scale = (!args.o_scale.is_null()).then(|| address(args.o_scale));
    let mut call = Ragged { mask, scale, q_scale, o_scale, dropout: dropout(&args.dropout), ..Ragged::new(batch) };
    if let Some((program, inputs)) = &program {
        call = call.with_program(*program, inputs.side());
    }
    let stream = stream(&opened, on)?;
    if places == Places::LookedUp {
        opened.engine.check_ragged_addresses(&call)?;
    }
    f(&opened, &call, stream)
}

fn scale(args: &RaggedArgs) -> Result<Option<f32>> {
    const KNOWN: u32 = RAGGED_SCALE | RAGGED_LSE_LOG2 | RAGGED_LSE_EMPTY_POSITIVE;
    let RaggedArgs { flags, softmax_scale, .. } = *args;
    if flags & !KNOWN != 0 {
        return Err(Failure::argument(format!(
            "flags is {flags:#x}, but only FLASHTUNE_RAGGED_SCALE (1), _LSE_LOG2 (2) and _LSE_EMPTY_POSITIVE (4) are \
             known"
        )));
    }
    match flags & RAGGED_SCALE {
        0 if softmax_scale != 0.0 => Err(Failure::argument(format!(
            "softmax_scale is {softmax_scale}, but flags lacks FLASHTUNE_RAGGED_SCALE; set the flag, or leave the \
             scale 0"
        ))),
        0 => Ok(None),
        _ => Ok(Some(softmax_scale)),
    }
}

/// A size: not negative.
pub(crate) fn size(field: &str, n: i64) -> Result<u64> {
    u64::try_from(n).map_err(|_| Failure::argument(format!("{field} is {n}, but sizes are not negative")))
}

pub(crate) fn address<T>(pointer: *const T) -> u64 {
    pointer as usize as u64
}

/// The call in the engine's words, without its mask and score program.
fn batch(args: &RaggedArgs) -> Result<RaggedBatch> {
    let q_dtype = operand_dtype("q", args.q_dtype)?;
    // Of 0 that of Q; beside e4m3 queries, whose O is rounded by a scale, bf16.
    let o_dtype = match (args.o_dtype, q_dtype) {
        (0, DType::E4m3) => DType::Bf16,
        (0, _) => q_dtype,
        (given, _) => operand_dtype("o", given)?,
    };
    let element = store_type(args.kv_type, q_dtype)?;
    let lengths = int_type("length_type", args.length_type)?;
    let ints = |pointer: *const c_void| Ints { address: address(pointer), kind: lengths };
    let given = |pointer: *const c_void| (!pointer.is_null()).then(|| ints(pointer));
    let rows =
        |name, pointer: *const c_void, [page, token, head, inner]: [i64; 4], kind, scale: *const f32, strides| {
            let scales = scales(name, kind, address(scale), strides)?;
            Result::Ok(StoreRows {
                address: address(pointer),
                element,
                strides: [page, token, head],
                inner: (inner != 0).then_some(inner),
                scales,
            })
        };
    let lse = (!args.lse.is_null()).then(|| Lse {
        address: address(args.lse),
        strides: args.lse_stride,
        base: if args.flags & RAGGED_LSE_LOG2 == 0 { LogBase::E } else { LogBase::Two },
        empty: if args.flags & RAGGED_LSE_EMPTY_POSITIVE == 0 { f32::NEG_INFINITY } else { f32::INFINITY },
    });
    Ok(RaggedBatch {
        queries: Queries {
            address: address(args.q),
            dtype: q_dtype,
            heads: size("heads", args.heads)?,
            head_dim: size("head_dim_qk", args.head_dim_qk)?,
            strides: args.q_stride,
            rows: given(args.q_begin).map_or(QueryRows::Uniform, |begin| QueryRows::Packed { begin }),
            used: given(args.q_lengths),
            tree: (!args.tree.is_null()).then(|| address(args.tree)),
        },
        store: Store {
            k: rows("k_scales", args.k, args.k_stride, args.k_scales, args.k_scale, args.k_scale_stride)?,
            v: rows("v_scales", args.v, args.v_stride, args.v_scales, args.v_scale, args.v_scale_stride)?,
            head_dim_v: size("head_dim_v", args.head_dim_v)?,
            kv_heads: size("kv_heads", args.kv_heads)?,
            pages: size("pages", args.pages)?,
            page_tokens: size("page_tokens", args.page_tokens)?,
        },
        index: index(args, ints)?,
        keys: keys(args, ints)?,
        left_pad: given(args.left_pad),
        output: Output { address: address(args.o), dtype: o_dtype, strides: args.o_stride, lse },
        bounds: Bounds {
            batch: size("batch", args.batch)?,
            total_q: size("total_q", args.total_q)?,
            max_q: size("max_q", args.max_q)?,
            max_kv: size("max_kv", args.max_kv)?,
        },
        expected: Expected {
            total_keys: size("expected_keys", args.expected_keys)?,
            longest: size("expected_longest", args.expected_longest)?,
        },
    })
}

/// Arrays that do not belong to the index are refused: they would be ignored.
fn index(args: &RaggedArgs, ints: impl Fn(*const c_void) -> Ints) -> Result<ragged::Index> {
    const DENSE: i32 = Index::Dense as i32;
    const PACKED: i32 = Index::Packed as i32;
    const TABLE: i32 = Index::Table as i32;
    const CSR: i32 = Index::Csr as i32;
    let kind = int_type("table_type", args.table_type)?;
    let of = match args.index {
        DENSE => "slots",
        PACKED => "kv_begin",
        TABLE => "k_table and v_table",
        CSR => "pages_begin, k_table and v_table",
        n => return Err(Failure::argument(format!("index is {n}, but a flashtune_index is 1, 2, 3 or 4"))),
    };
    let arrays = [
        ("slots", args.slots, [DENSE].as_slice()),
        ("kv_begin", args.kv_begin, &[PACKED]),
        ("pages_begin", args.pages_begin, &[CSR]),
        ("k_table", args.k_table, &[TABLE, CSR]),
        ("v_table", args.v_table, &[TABLE, CSR]),
    ];
    for (name, array, indexes) in arrays {
        if !array.is_null() && !indexes.contains(&args.index) {
            let message = format!("{name} is given, but index is {}, which reads {of}; leave it NULL", args.index);
            return Err(Failure::argument(message));
        }
    }
    let table = |pointer: *const c_void| Ints { address: address(pointer), kind };
    let v = (!args.v_table.is_null()).then(|| address(args.v_table));
    Ok(match args.index {
        DENSE => ragged::Index::Dense { slots: (!args.slots.is_null()).then(|| table(args.slots)) },
        PACKED => ragged::Index::Packed { begin: ints(args.kv_begin) },
        TABLE => ragged::Index::Table {
            k: table(args.k_table),
            v,
            stride: args.table_stride,
            capacity: size("table_capacity", args.table_capacity)?,
        },
        _ => ragged::Index::Csr { begin: ints(args.pages_begin), k: table(args.k_table), v },
    })
}

fn keys(args: &RaggedArgs, ints: impl Fn(*const c_void) -> Ints) -> Result<KeyLengths> {
    let added = match (size("kv_added", args.kv_added)?, args.kv_added_begin.is_null()) {
        (0, true) => Added::Nothing,
        (rows, true) => Added::Rows(rows),
        (0, false) => Added::Packed { begin: ints(args.kv_added_begin) },
        (_, false) => return Err(Failure::argument("kv_added and kv_added_begin are both given; give one")),
    };
    let given = [!args.kv_lengths.is_null(), !args.kv_sums.is_null(), !args.last_page.is_null()];
    if added != Added::Nothing && !given[0] {
        let message = "kv_added or kv_added_begin is given, but no kv_lengths that they come behind; give those";
        return Err(Failure::argument(message));
    }
    match given {
        [false, false, false] => Ok(KeyLengths::OfIndex),
        [true, false, false] => Ok(KeyLengths::Each { lengths: ints(args.kv_lengths), added }),
        [false, true, false] => Ok(KeyLengths::Cumulative { sums: ints(args.kv_sums) }),
        [false, false, true] => Ok(KeyLengths::LastPage { tokens: ints(args.last_page) }),
        _ => Err(Failure::argument("kv_lengths, kv_sums and last_page are lengths each; give one of them")),
    }
}

pub(crate) fn int_type(field: &str, number: i32) -> Result<IntKind> {
    const I32: i32 = IntType::I32 as i32;
    const U32: i32 = IntType::U32 as i32;
    const I64: i32 = IntType::I64 as i32;
    match number {
        I32 => Ok(IntKind::I32),
        U32 => Ok(IntKind::U32),
        I64 => Ok(IntKind::I64),
        n => Err(Failure::argument(format!("{field} is {n}, but a flashtune_int_type is 0, 1 or 2"))),
    }
}

pub(crate) fn store_type(number: i32, queries: DType) -> Result<ragged::StoreType> {
    use ragged::StoreType as Of;
    const SAME: i32 = StoreType::Same as i32;
    const F16: i32 = StoreType::F16 as i32;
    const BF16: i32 = StoreType::Bf16 as i32;
    const F32: i32 = StoreType::F32 as i32;
    const E4M3: i32 = StoreType::E4m3 as i32;
    const E5M2: i32 = StoreType::E5m2 as i32;
    const INT8: i32 = StoreType::Int8 as i32;
    Ok(match number {
        SAME => Of::Float(queries),
        F16 => Of::Float(DType::F16),
        BF16 => Of::Float(DType::Bf16),
        F32 => Of::Float(DType::F32),
        E4M3 => Of::E4m3,
        E5M2 => Of::E5m2,
        INT8 => Of::Int8,
        n => return Err(Failure::argument(format!("kv_type is {n}, but a flashtune_store_type is 0 to 6"))),
    })
}

pub(crate) fn scales(field: &str, number: i32, address: u64, strides: [i64; 3]) -> Result<Scales> {
    const ONE: i32 = ScaleKind::One as i32;
    const HEAD: i32 = ScaleKind::Head as i32;
    const TOKEN: i32 = ScaleKind::Token as i32;
    match number {
        ONE if address != 0 => Err(Failure::argument(format!(
            "{field} is FLASHTUNE_SCALES_ONE, but an address of scales is given; say FLASHTUNE_SCALES_HEAD or _TOKEN"
        ))),
        ONE => Ok(Scales::One),
        HEAD => Ok(Scales::PerHead { address, strides: [strides[0], strides[1]] }),
        TOKEN => Ok(Scales::PerToken { address, strides }),
        n => Err(Failure::argument(format!("{field} is {n}, but a flashtune_scales is 0, 1 or 2"))),
    }
}

//! New rows of K and V into a KV store.

use crate::engine_handle::ENGINES;
use crate::error::{Failure, Result, guard};
use crate::forward::{self, dtype};
use crate::input;
use crate::ragged::{address, int_type, scales, size, store_type};
use crate::types::{EngineHandle, Index as IndexType, Status};
use engine::append::{
    Added, Append, AppendQueries, Index, IntKind, Ints, KeyLengths, Positions, Rotary, RowCount, Rows, Store,
    StoreRows, Target,
};
use std::ffi::c_void;

/// Neighbouring elements `2i` and `2i + 1` turn together in `flashtune_append_args`, and not `i` and
/// `i + rotary_dim / 2`.
pub const APPEND_INTERLEAVED: u32 = 1;

/// All rows of Q of a sequence are rotated to its first position, as flash-attention does without a causal mask.
pub const APPEND_Q_ONE_POSITION: u32 = 2;

/// `lengths` of `flashtune_append_args` are those after the call. `length_sums`, `last_page` and whole pages always
/// are.
pub const APPEND_LENGTHS_AFTER: u32 = 4;

/// Scales of tokens are found from the rows and written, and not read.
pub const APPEND_FINDS_SCALES: u32 = 8;

/// New rows of K and V into a store that is indexed on the device, rotated and quantised on the way. Fill it with
/// zeros, set `struct_size`, then what is wanted. Addresses are those of device memory, strides count elements, and
/// slots, lengths and tables are read when the call runs. No two new rows may go to one place.
///
/// A row goes to its slot in `slot_mapping`; or, without one, behind the tokens that its sequence has: new row `i` to
/// token `length + i` of the pages that the index names. Rows with a negative slot, behind `max_kv`, and in no page
/// are left out.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct AppendArgs {
    /// sizeof(flashtune_append_args).
    pub struct_size: u32,
    /// FLASHTUNE_APPEND_INTERLEAVED, _Q_ONE_POSITION, _LENGTHS_AFTER, _FINDS_SCALES, or 0.
    pub flags: u32,
    /// New K: [batch, new_rows, kv_heads, head_dim_qk] in any order of memory; or, with `new_begin` or `slot_mapping`,
    /// [new_rows, kv_heads, head_dim_qk].
    pub k_new: *const c_void,
    /// New V, with rows of head_dim_v elements.
    pub v_new: *const c_void,
    /// Strides of the new K: batch, head, row. That of the batch has no meaning where rows are packed.
    pub k_new_stride: [i64; 3],
    /// The same of the new V.
    pub v_new_stride: [i64; 3],
    /// Elements of the new rows and of Q: a `flashtune_dtype`.
    pub dtype: i32,
    /// Elements of the store: 0 those of the new rows, 1 f16, 2 bf16, 3 f32, 4 e4m3, 5 e5m2, 6 int8. Beyond the
    /// largest finite value elements become that value; NaN stays NaN, and is 0 in int8.
    pub kv_type: i32,
    /// Sequences; of no meaning with `slot_mapping`.
    pub batch: i64,
    /// New rows of each sequence; with `new_begin` or `slot_mapping` of all together.
    pub new_rows: i64,
    /// First new row of each sequence, and the end of the last one's, [batch + 1]; NULL: each has new_rows.
    pub new_begin: *const c_void,
    /// KV heads.
    pub kv_heads: i64,
    /// Elements of a row of Q and K.
    pub head_dim_qk: i64,
    /// Elements of a row of V.
    pub head_dim_v: i64,
    /// K of the store.
    pub k: *mut c_void,
    /// V of the store.
    pub v: *mut c_void,
    /// Strides of K: page, token, head, and from 16 bytes of a row to the next 16; 0 where rows are contiguous.
    pub k_stride: [i64; 4],
    /// Strides of V: page, token, head, and from a column to the next; 0 where rows are contiguous.
    pub v_stride: [i64; 4],
    /// Pages of the store.
    pub pages: i64,
    /// Tokens of a page; the room of a sequence in a cache without a table.
    pub page_tokens: i64,
    /// What elements of K are multiplied by when they are read, fp32, for quantised stores. Under 0 every number is
    /// stored as 0.
    pub k_scale: *mut f32,
    /// The same for V.
    pub v_scale: *mut f32,
    /// Strides of K's scales: sequence, head, 0; for scales of tokens page, head, token.
    pub k_scale_stride: [i64; 3],
    /// The same for V's.
    pub v_scale_stride: [i64; 3],
    /// Which elements share a scale: 0 all have the scale 1, 1 those of a head of a sequence (strides of 0 for more),
    /// 2 those of a head of a token.
    pub k_scales: i32,
    /// The same for V.
    pub v_scales: i32,
    /// The slot of each new row, `page * page_tokens + token`; NULL: places follow from lengths.
    pub slot_mapping: *const c_void,
    /// Integers of `slot_mapping`: 0 i32, 1 u32, 2 i64.
    pub slot_type: i32,
    /// Where the tokens of a sequence lie, unless slots say it: 1 a sequence is a page, that of its own number or of
    /// `slots`, 3 by rows of `k_table`, 4 by `pages_begin` and `k_table` (CSR).
    pub index: i32,
    /// Identifiers of K's pages, [batch, table_capacity], or one sequence after the other (CSR).
    pub k_table: *const c_void,
    /// Those of V's; NULL: K's.
    pub v_table: *const c_void,
    /// First entry of each sequence, and the end of the last one's, [batch + 1], for CSR.
    pub pages_begin: *const c_void,
    /// Page of each sequence, [batch], for a cache without a table; NULL: that of its number.
    pub slots: *const c_void,
    /// Entries of the table from one sequence to the next.
    pub table_stride: i64,
    /// Entries of a sequence in the table.
    pub table_capacity: i64,
    /// Integers of `k_table`, `v_table` and `slots`: 0 i32, 1 u32, 2 i64.
    pub table_type: i32,
    /// Integers of `new_begin`, `q_begin`, `pages_begin`, `lengths`, `length_sums`, `last_page` and `first_position`.
    pub length_type: i32,
    /// Tokens of each sequence, [batch], padding before them included: before the call, or after it by the flag.
    pub lengths: *const c_void,
    /// Tokens after the call as differences of [batch + 1], in place of `lengths`.
    pub length_sums: *const c_void,
    /// Tokens of the last page of each sequence after the call, [batch], in place of `lengths` for CSR; without any of
    /// the three, pages are full.
    pub last_page: *const c_void,
    /// Tokens that a sequence has at most after the call; of no meaning with `slot_mapping`.
    pub max_kv: i64,
    /// Q, to be rotated in the same pass: [batch, q_rows, heads, head_dim_qk] in any order, or packed as the new rows;
    /// NULL for none.
    pub q: *const c_void,
    /// Where it goes; may be `q` with the same strides.
    pub q_out: *mut c_void,
    /// Strides of Q: batch, head, row.
    pub q_stride: [i64; 3],
    /// Strides of `q_out`.
    pub q_out_stride: [i64; 3],
    /// Query heads.
    pub heads: i64,
    /// Rows of Q of each sequence; with `q_begin` or `slot_mapping` of all together.
    pub q_rows: i64,
    /// First row of each sequence in Q, and the end of the last one's, [batch + 1]; NULL: each has q_rows.
    pub q_begin: *const c_void,
    /// Cosines, [rotary_rows, rotary_dim / 2]; NULL: nothing is rotated.
    pub cos: *const c_void,
    /// Sines.
    pub sin: *const c_void,
    /// From one position to the next in both.
    pub rotary_stride: i64,
    /// Positions that they have: rows at others become NaN where they would turn.
    pub rotary_rows: i64,
    /// Leading elements of a row that turn, an even number.
    pub rotary_dim: i64,
    /// Elements of both: a `flashtune_dtype`, F32 or that of the new rows.
    pub rotary_dtype: i32,
    /// Integers of `k_positions` and `q_positions`.
    pub position_type: i32,
    /// Position of each new row; NULL: from `first_position` on. Needed with `slot_mapping`.
    pub k_positions: *const c_void,
    /// Position of each row of Q; NULL: those of `k_positions`.
    pub q_positions: *const c_void,
    /// Position of each sequence's first new row, [batch]; NULL: its length before the call.
    pub first_position: *const c_void,
}

/// Writes new rows of K and V into a store on `stream` and returns at once (on the CPU when done): one launch, which
/// allocates nothing, waits for nothing, and may be captured in a CUDA graph and replayed with other slots, lengths
/// and tables. The first call of a kind of store compiles. Does nothing without rows.
///
/// `stream`: the CUstream to launch on, of the engine's context; NULL: the default stream. On the CPU NULL.
///
/// Addresses are checked as in `flashtune_forward`, of CSR's entries the first. Fails as it does.
///
/// # Safety
/// `args` is NULL or valid, its addresses are as said above, and `stream` is a live one of the engine's context. First
/// rows do not decrease and stay inside of what they count.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_append(
    engine: EngineHandle,
    args: *const AppendArgs,
    stream: *mut c_void,
) -> Status {
    guard(|| {
        let opened = ENGINES.get(engine)?;
        // SAFETY: by this function's contract.
        let append = append_of(&unsafe { input::read(args)? })?;
        let stream = forward::stream(&opened, stream)?;
        opened.engine.check_append_addresses(&append)?;
        // SAFETY: by this function's contract; sizes are checked by the engine.
        opened.remember(unsafe { opened.engine.append(&append, stream)? });
        Ok(())
    })
}

/// All of `flashtune_append` but the launch: compiles the kernel if need be and loads it, so that a call on the same
/// kind of store is a launch and no more. Reads and writes nothing that the arguments point to.
///
/// # Safety
/// As `flashtune_append`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_prepare_append(engine: EngineHandle, args: *const AppendArgs) -> Status {
    guard(|| {
        let opened = ENGINES.get(engine)?;
        // SAFETY: by this function's contract.
        let append = append_of(&unsafe { input::read(args)? })?;
        opened.engine.check_append_addresses(&append)?;
        opened.remember(opened.engine.prepare_append(&append)?);
        Ok(())
    })
}

/// The call in the engine's words.
fn append_of(args: &AppendArgs) -> Result<Append> {
    const KNOWN: u32 = APPEND_INTERLEAVED | APPEND_Q_ONE_POSITION | APPEND_LENGTHS_AFTER | APPEND_FINDS_SCALES;
    let has = |flag: u32| args.flags & flag != 0;
    if has(!KNOWN) {
        let message = format!("flags is {:#x}, but only FLASHTUNE_APPEND_... 1, 2, 4 and 8 are known", args.flags);
        return Err(Failure::argument(message));
    }
    let elements = dtype("k_new", args.dtype)?;
    let element = store_type(args.kv_type, elements)?;
    let length_kind = int_type("length_type", args.length_type)?;
    let table_kind = int_type("table_type", args.table_type)?;
    let given = |pointer: *const c_void, kind| (!pointer.is_null()).then(|| Ints { address: address(pointer), kind });
    let rows_of = |field: &str, begin, n| match (given(begin, length_kind), size(field, n)?) {
        (Some(begin), total) => Ok(RowCount::Packed { begin, total }),
        (None, rows) => Result::Ok(RowCount::Each(rows)),
    };
    let rows = rows_of("new_rows", args.new_begin, args.new_rows)?;
    let store_rows = |pointer: *mut c_void, [page, token, head, inner]: [i64; 4], scales| StoreRows {
        address: address(pointer),
        element,
        strides: [page, token, head],
        inner: (inner != 0).then_some(inner),
        scales,
    };
    let k_scales = scales("k_scales", args.k_scales, address(args.k_scale), args.k_scale_stride)?;
    let v_scales = scales("v_scales", args.v_scales, address(args.v_scale), args.v_scale_stride)?;
    let store = Store {
        k: store_rows(args.k, args.k_stride, k_scales),
        v: store_rows(args.v, args.v_stride, v_scales),
        head_dim_v: size("head_dim_v", args.head_dim_v)?,
        kv_heads: size("kv_heads", args.kv_heads)?,
        pages: size("pages", args.pages)?,
        page_tokens: size("page_tokens", args.page_tokens)?,
    };
    let mapping = given(args.slot_mapping, int_type("slot_type", args.slot_type)?);
    let target = match mapping {
        Some(mapping) => Target::Slots { mapping },
        None => Target::Lengths {
            batch: size("batch", args.batch)?,
            index: index(args, table_kind, given(args.pages_begin, length_kind))?,
            keys: keys(args, rows, length_kind),
            max_kv: size("max_kv", args.max_kv)?,
        },
    };
    let queries = match args.q.is_null() {
        true => None,
        false => Some(AppendQueries {
            from: Rows { address: address(args.q), strides: args.q_stride },
            to: Rows { address: address(args.q_out), strides: args.q_out_stride },
            heads: size("heads", args.heads)?,
            rows: rows_of("q_rows", args.q_begin, args.q_rows)?,
            advance: !has(APPEND_Q_ONE_POSITION),
        }),
    };
    let position_kind = int_type("position_type", args.position_type)?;
    let positions = match (given(args.k_positions, position_kind), given(args.first_position, length_kind)) {
        (Some(k), None) => Positions::Each { k, q: (!args.q_positions.is_null()).then(|| address(args.q_positions)) },
        (None, Some(first)) => Positions::From { first },
        (None, None) => Positions::OfPlaces,
        (Some(_), Some(_)) => {
            return Err(Failure::argument("k_positions and first_position are both given; leave one of them NULL"));
        }
    };
    let rotary = match args.cos.is_null() {
        true => None,
        false => Some(Rotary {
            cos: address(args.cos),
            sin: address(args.sin),
            dtype: dtype("cos", args.rotary_dtype)?,
            stride: args.rotary_stride,
            rows: size("rotary_rows", args.rotary_rows)?,
            dim: size("rotary_dim", args.rotary_dim)?,
            interleaved: has(APPEND_INTERLEAVED),
            positions,
        }),
    };
    Ok(Append {
        dtype: elements,
        head_dim: size("head_dim_qk", args.head_dim_qk)?,
        k: Rows { address: address(args.k_new), strides: args.k_new_stride },
        v: Rows { address: address(args.v_new), strides: args.v_new_stride },
        rows,
        store,
        target,
        queries,
        rotary,
        finds_scales: has(APPEND_FINDS_SCALES),
    })
}

fn index(args: &AppendArgs, kind: IntKind, pages_begin: Option<Ints>) -> Result<Index> {
    const DENSE: i32 = IndexType::Dense as i32;
    const TABLE: i32 = IndexType::Table as i32;
    const CSR: i32 = IndexType::Csr as i32;
    let table = |field: &str, pointer: *const c_void| match pointer.is_null() {
        true => Err(Failure::argument(format!("{field} is null, but the index asks for it"))),
        false => Ok(Ints { address: address(pointer), kind }),
    };
    let v = (!args.v_table.is_null()).then(|| address(args.v_table));
    match args.index {
        DENSE => {
            let slots = (!args.slots.is_null()).then(|| Ints { address: address(args.slots), kind });
            Ok(Index::Dense { slots })
        }
        TABLE => {
            let (k, capacity) = (table("k_table", args.k_table)?, size("table_capacity", args.table_capacity)?);
            Ok(Index::Table { k, v, stride: args.table_stride, capacity })
        }
        CSR => {
            let k = table("k_table", args.k_table)?;
            let begin = pages_begin.ok_or_else(|| Failure::argument("pages_begin is null, but the index is CSR"))?;
            Ok(Index::Csr { begin, k, v })
        }
        n => Err(Failure::argument(format!(
            "index is {n}, but without slot_mapping it is 1 (dense), 3 (a table) or 4 (CSR)"
        ))),
    }
}

/// How many tokens sequences have, with the new rows behind them where lengths are those before.
fn keys(args: &AppendArgs, rows: RowCount, kind: IntKind) -> KeyLengths {
    let ints = |pointer: *const c_void| Ints { address: address(pointer), kind };
    if !args.lengths.is_null() {
        let added = match rows {
            _ if args.flags & APPEND_LENGTHS_AFTER != 0 => Added::Nothing,
            RowCount::Each(rows) => Added::Rows(rows),
            RowCount::Packed { begin, .. } => Added::Packed { begin },
        };
        KeyLengths::Each { lengths: ints(args.lengths), added }
    } else if !args.length_sums.is_null() {
        KeyLengths::Cumulative { sums: ints(args.length_sums) }
    } else if !args.last_page.is_null() {
        KeyLengths::LastPage { tokens: ints(args.last_page) }
    } else {
        KeyLengths::OfIndex
    }
}

//! What a ragged batch must be like, and the arguments that it comes down to.

use super::layout::{Dim, EachRange, LONGEST, MOST, PIECE, common_words, number, span, unsupported};
use super::{
    Added, Bounds, Expected, Index, Ints, KeyLengths, LogBase, QueryRows, RaggedBatch, RaggedCall, Scales, Store,
    StoreRows,
};
use crate::Result;
use crate::tensor::{TensorView, check_output_rows, error, windows};
use bytemuck::Zeroable;
use flashtune_codegen::abi::RaggedArgs;
use flashtune_codegen::{
    DType, Error as CodegenError, HEAD_DIM_MAX, KvElement, KvKind, KvScales, KvStore, Mask, PageClass, Problem, Shape,
};

pub(super) fn call(batch: &RaggedBatch, mask: Mask, scale: Option<f32>) -> Result<RaggedCall> {
    let problem = problem(batch, mask)?;
    let (shape, usual) = sizes(batch, mask)?;
    let widths = Widths::of(batch)?;
    check_index(batch)?;
    let scales = PairOfScales::of(batch)?;
    let KvKind::Ragged(store) = problem.kv else { unreachable!("a ragged problem") };
    let problem = problem.with_kv(KvKind::Ragged(KvStore { scales: scales.kind, ..store }));
    if let Some(lse) = batch.output.lse
        && !lse.empty.is_infinite()
    {
        let expected = "it is negative or positive infinity";
        return Err(error("lse", "mark of empty rows", lse.empty, expected, "give -inf, as most hosts do"));
    }
    ranges(batch, &mut |_, _, _| Ok(()))?;
    if !batch.is_empty() {
        check_output_rows("o", &rows_of(batch, batch.output.address, batch.output.strides, batch.store.head_dim_v))?;
        if let Some(lse) = batch.output.lse {
            check_output_rows("lse", &rows_of(batch, lse.address, lse.strides, 1))?;
        }
    }
    let scale = scale.unwrap_or_else(|| problem.default_scale());
    if !scale.is_finite() {
        let limit = "the softmax scale is a finite number";
        return Err(CodegenError::unsupported("scale", scale, limit, "leave it out for 1 / sqrt(head_dim)").into());
    }
    let args = arguments(batch, &shape, widths, &scales, scale);
    let pages = match batch.index {
        Index::Table { .. } | Index::Csr { .. } => PageClass::of_pages(batch.store.page_tokens as u32),
        Index::Dense { .. } | Index::Packed { .. } => PageClass::Whole,
    };
    Ok(RaggedCall { problem, shape, usual, pages, args, aligned: is_aligned(batch) })
}

fn problem(batch: &RaggedBatch, mask: Mask) -> Result<Problem> {
    let (queries, Store { k, v, head_dim_v, .. }) = (&batch.queries, &batch.store);
    let remedy = "convert Q to the store's type, or quantise the store to e4m3, e5m2 or int8";
    batch.store.check_elements(queries.dtype, "Q is", remedy)?;
    let output = batch.output.dtype;
    if output != queries.dtype && queries.dtype != DType::E4m3 {
        let expected = format!("Q is {}", queries.dtype);
        return Err(error("o", "dtype", output, expected, "give an output of Q's type"));
    }
    let element = k.element.element();
    if element != KvElement::Same && queries.dtype == DType::F32 {
        let expected = format!("K and V are {}, which kernels read beside f16 and bf16 queries", element.name());
        return Err(error("q", "dtype", queries.dtype, expected, "convert Q to f16 or bf16"));
    }
    if queries.tree.is_some() {
        let remedy = "say which drafts a row sees by a score program with a table, as `ancestors[b, q, kv]`";
        return unsupported("tree", "given", "no kernel takes words of ancestors yet", remedy);
    }
    let head_dims = [("head_dim_qk", queries.head_dim), ("head_dim_v", *head_dim_v)].map(|(field, dim)| {
        let remedy = "expand latent rows (MLA) to heads of at most 256, or split the heads";
        number(field, dim, u64::from(HEAD_DIM_MAX), remedy)
    });
    let [head_dim_qk, head_dim_v] = head_dims;
    let problem = Problem::forward_qk_v(queries.dtype, head_dim_qk?, head_dim_v?, mask.kind())?.with_output(output);
    let store = KvStore { element, scales: KvScales::PerHead, v_columns: v.has_columns() };
    Ok(problem.with_kv(KvKind::Ragged(store)))
}

/// The bounds, and the sizes of a usual sequence.
fn sizes(batch: &RaggedBatch, mask: Mask) -> Result<(Shape, Shape)> {
    let Bounds { batch: sequences, total_q, max_q, max_kv } = batch.bounds;
    let (heads, kv_heads) = (batch.queries.heads, batch.store.kv_heads);
    let shape = Shape {
        batch: number("batch", sequences, MOST, "split the batch")?,
        heads: number("heads", heads, MOST, "split the heads")?,
        kv_heads: number("kv_heads", kv_heads, MOST, "split the heads")?,
        q_len: number("max_q", max_q, LONGEST, "split the sequence")?,
        kv_len: number("max_kv", max_kv, LONGEST, "name the longest sequence that occurs")?,
        mask,
    };
    shape.validate()?;
    let packed = matches!(batch.queries.rows, QueryRows::Packed { .. });
    if packed {
        number("total_q", total_q, MOST, "split the pack")?;
    }
    number("pages", batch.store.pages, MOST, "split the store")?;
    number("page_tokens", batch.store.page_tokens, MOST, "split the pages")?;

    let mean = |total: u64| total.div_ceil(sequences.max(1));
    let q_len = if packed { mean(total_q).min(max_q) } else { max_q };
    let of_pack = match batch.index {
        Index::Packed { .. } => mean(batch.store.page_tokens),
        _ => max_kv,
    };
    let Expected { total_keys, longest } = batch.expected;
    let expected = if total_keys == 0 { of_pack } else { mean(total_keys) };
    let longest = if longest == 0 { max_kv } else { longest };
    let kv_len = expected.min(longest).min(max_kv);
    Ok((shape, Shape { q_len: q_len as u32, kv_len: kv_len as u32, ..shape }))
}

/// 32-bit words of lengths and first rows, and of tables.
#[derive(Clone, Copy)]
struct Widths {
    lengths: i32,
    tables: i32,
}

impl Widths {
    fn of(batch: &RaggedBatch) -> Result<Self> {
        let lengths = lengths_of(batch);
        let tables = [batch.index.tables().map(|(k, _)| ("k_table", k)), batch.index.slots().map(|s| ("slots", s))];
        Ok(Self { lengths: common_words(lengths)?, tables: common_words(tables)? })
    }
}

/// Arrays of lengths and of first rows, by the names of the arguments.
fn lengths_of(batch: &RaggedBatch) -> [Option<(&'static str, Ints)>; 6] {
    let q_begin = match batch.queries.rows {
        QueryRows::Uniform => None,
        QueryRows::Packed { begin } => Some(("q_begin", begin)),
    };
    let of_index = match batch.index {
        Index::Packed { begin } => Some(("kv_begin", begin)),
        Index::Csr { begin, .. } => Some(("pages_begin", begin)),
        Index::Dense { .. } | Index::Table { .. } => None,
    };
    let (keys, added) = match batch.keys {
        KeyLengths::OfIndex => (None, None),
        KeyLengths::Each { lengths, added: Added::Packed { begin } } => {
            (Some(("kv_lengths", lengths)), Some(("kv_added_begin", begin)))
        }
        KeyLengths::Each { lengths, .. } => (Some(("kv_lengths", lengths)), None),
        KeyLengths::Cumulative { sums } => (None, Some(("kv_sums", sums))),
        KeyLengths::LastPage { tokens } => (Some(("last_page", tokens)), None),
    };
    let used = batch.queries.used.map(|used| ("q_lengths", used));
    [q_begin, used, of_index, keys, added, batch.left_pad.map(|pad| ("left_pad", pad))]
}

/// What the index, the lengths and the bounds say of each other.
fn check_index(batch: &RaggedBatch) -> Result<()> {
    let Store { pages, page_tokens, .. } = batch.store;
    if matches!(batch.index, Index::Packed { .. }) && pages != 1 {
        let limit = "packed keys are one page, whose tokens are those of all sequences";
        return unsupported("pages", pages, limit, "give 1, and the length of the pack as page_tokens");
    }
    if matches!(batch.index, Index::Table { .. } | Index::Csr { .. }) && page_tokens == 0 {
        return unsupported("page_tokens", 0, "a page has at least one token", "give the tokens of a page");
    }
    batch.index.check_room(&batch.store, batch.bounds.batch, batch.bounds.max_kv)?;
    if matches!(batch.keys, KeyLengths::LastPage { .. }) && !matches!(batch.index, Index::Csr { .. }) {
        let limit = "tokens of the last page are lengths beside pages by CSR, whose number is known";
        return unsupported("last_page", "given", limit, "give the keys of each sequence");
    }
    if let KeyLengths::Each { added: Added::Rows(rows), .. } = batch.keys {
        number("kv_added", rows, LONGEST, "give the rows that each sequence gained in this step")?;
    }
    Ok(())
}

/// Scales of K and V as kernels take them.
struct PairOfScales {
    kind: KvScales,
    address: [u64; 2],
    strides: [[i64; 3]; 2],
}

impl PairOfScales {
    fn of(batch: &RaggedBatch) -> Result<Self> {
        let both = [("k_scale", batch.store.k.scales), ("v_scale", batch.store.v.scales)];
        let per_token = both.iter().any(|(_, s)| matches!(s, Scales::PerToken { .. }));
        let kind = if per_token { KvScales::PerToken } else { KvScales::PerHead };
        let mut pair = Self { kind, address: [0; 2], strides: [[0; 3]; 2] };
        for (i, (name, scales)) in both.into_iter().enumerate() {
            batch.store.check_scale(name, scales)?;
            (pair.address[i], pair.strides[i]) = match scales {
                Scales::One => (0, [0; 3]),
                Scales::PerToken { address, strides } => (address, strides),
                Scales::PerHead { address, strides: [sequence, head] } if !per_token => (address, [sequence, head, 0]),
                Scales::PerHead { address, strides: [sequence, head] } => {
                    if sequence != 0 && batch.bounds.batch > 1 {
                        let expected = "the other's scales are those of tokens, which sequences share";
                        let remedy = "give both scales for tokens, or this one with a stride of 0 along the sequences";
                        return Err(error(name, "sequence stride", sequence, expected, remedy));
                    }
                    (address, [0, head, 0])
                }
            };
        }
        Ok(pair)
    }
}

/// The rows of Q, of O, or of what has a number for each row.
fn row_dims(batch: &RaggedBatch, [of_batch, of_head, of_row]: [i64; 3]) -> [Dim; 3] {
    let (sequences, rows) = match batch.queries.rows {
        QueryRows::Uniform => (batch.bounds.batch, batch.bounds.max_q),
        QueryRows::Packed { .. } => (1, batch.bounds.total_q),
    };
    [(sequences, of_batch, "batch stride"), (batch.queries.heads, of_head, "head stride"), (rows, of_row, "row stride")]
}

fn rows_of(batch: &RaggedBatch, address: u64, strides: [i64; 3], elements: u64) -> TensorView {
    let [(b, sb, _), (h, sh, _), (r, sr, _)] = row_dims(batch, strides);
    TensorView { address, dtype: batch.output.dtype, shape: [b, h, r, elements], strides: [sb, sh, sr, 1] }
}

/// Calls with every range of memory, after checking its layout.
pub(super) fn ranges(batch: &RaggedBatch, f: &mut EachRange<'_>) -> Result<()> {
    if batch.is_empty() {
        return Ok(());
    }
    let RaggedBatch { queries, store, output, bounds, .. } = batch;
    let [element, of_o] = [queries.dtype, output.dtype].map(|dtype| dtype.bytes() as u64);
    let q = row_dims(batch, queries.strides);
    f("q", queries.address, span("q", queries.address, &q, queries.head_dim, element)?)?;
    if bounds.max_kv > 0 {
        if store.v.has_columns() && store.page_tokens > 1 && store.v.strides[1] != 1 {
            let expected = "where columns of V have a stride, its tokens lie side by side (stride 1)";
            let remedy = "transpose V, or make rows contiguous";
            return Err(error("v", "token stride", store.v.strides[1], expected, remedy));
        }
        store.ranges(queries.head_dim, bounds.batch, f)?;
    }
    f("o", output.address, span("o", output.address, &row_dims(batch, output.strides), store.head_dim_v, of_o)?)?;
    if let Some(lse) = output.lse {
        f("lse", lse.address, span("lse", lse.address, &row_dims(batch, lse.strides), 1, 4)?)?;
    }
    int_ranges(batch, f)
}

fn int_ranges(batch: &RaggedBatch, f: &mut EachRange<'_>) -> Result<()> {
    let sequences = batch.bounds.batch;
    for (name, ints) in lengths_of(batch).into_iter().flatten() {
        let ends = matches!(name, "q_begin" | "kv_begin" | "pages_begin" | "kv_added_begin" | "kv_sums");
        let count = sequences + u64::from(ends);
        f(name, ints.address, span(name, ints.address, &[], count, ints.kind.bytes())?)?;
    }
    if let Some(slots) = batch.index.slots() {
        f("slots", slots.address, span("slots", slots.address, &[], sequences, slots.kind.bytes())?)?;
    }
    // How many entries CSR has the device alone knows, and it may have none.
    let (stride, entries) = match batch.index {
        Index::Table { stride, capacity, .. } => (stride, capacity),
        Index::Csr { .. } => (0, 1),
        _ => return Ok(()),
    };
    if batch.bounds.max_kv > 0
        && let Some((k, v)) = batch.index.tables()
    {
        for (name, table) in [("k_table", k), ("v_table", v)] {
            let rows = [(sequences, stride, "stride")];
            f(name, table.address, span(name, table.address, &rows, entries, table.kind.bytes())?)?;
        }
    }
    Ok(())
}

/// Whether kernels may read and write whole pieces of 16 bytes.
fn is_aligned(batch: &RaggedBatch) -> bool {
    if batch.is_empty() {
        return true;
    }
    let RaggedBatch { queries, store, output, .. } = batch;
    let on_grid = |address: u64, dims: &[Dim], element: usize| {
        let whole = |stride: i64| stride.wrapping_mul(element as i64) % PIECE as i64 == 0;
        address.is_multiple_of(PIECE) && dims.iter().all(|&(n, stride, _)| n <= 1 || whole(stride))
    };
    let rows = |address, strides, dtype: DType| on_grid(address, &row_dims(batch, strides), dtype.bytes());
    let (k_dims, k_last) = store.k_dims(queries.head_dim);
    let (mut v_dims, mut v_last) = store.v_dims();
    if store.v.has_columns() {
        // Pieces lie along the tokens.
        v_dims[1].1 = 0;
        v_last = PIECE;
    }
    let whole = |n: u64, which: &StoreRows| (n * which.element.bytes() as u64).is_multiple_of(PIECE);
    rows(queries.address, queries.strides, queries.dtype)
        && rows(output.address, output.strides, output.dtype)
        && on_grid(store.k.address, &k_dims, store.k.element.bytes())
        && on_grid(store.v.address, &v_dims, store.v.element.bytes())
        && whole(k_last, &store.k)
        && whole(v_last, &store.v)
}

fn arguments(batch: &RaggedBatch, shape: &Shape, widths: Widths, scales: &PairOfScales, scale: f32) -> RaggedArgs {
    let RaggedBatch { queries, store, index, keys, output, .. } = batch;
    let address = |ints: Option<Ints>| ints.map_or(0, |ints| ints.address);
    let outer = |strides| row_dims(batch, strides).map(|(n, stride, _)| if n > 1 { stride } else { 0 });
    let [k_stride, v_stride] = store.taken_strides();
    let (pages, page_tokens) = store.taken_pages();
    let table = index.tables();
    let (kv_lengths, kv_added, kv_added_begin, last_page) = match *keys {
        KeyLengths::OfIndex => (0, 0, 0, 0),
        KeyLengths::Each { lengths, added } => match added {
            Added::Nothing => (lengths.address, 0, 0, 0),
            Added::Rows(rows) => (lengths.address, rows as i32, 0, 0),
            Added::Packed { begin } => (lengths.address, 0, begin.address, 0),
        },
        KeyLengths::Cumulative { sums } => (0, 0, sums.address, 0),
        KeyLengths::LastPage { tokens } => (0, 0, 0, tokens.address),
    };
    let (pages_begin, kv_begin, table_stride) = match *index {
        Index::Dense { .. } => (0, 0, 0),
        Index::Packed { begin } => (0, begin.address, 0),
        Index::Table { stride, .. } => (0, 0, if shape.batch > 1 { stride } else { 0 }),
        Index::Csr { begin, .. } => (begin.address, 0, 0),
    };
    let [window_left, window_right] = windows(shape);
    let lse = output.lse;
    let base = lse.map_or(LogBase::E, |lse| lse.base);
    RaggedArgs {
        q: queries.address,
        k: store.k.address,
        v: store.v.address,
        o: output.address,
        lse: lse.map_or(0, |lse| lse.address),
        k_table: address(table.map(|(k, _)| k)),
        v_table: address(table.map(|(_, v)| v)),
        pages_begin,
        slots: address(index.slots()),
        kv_begin,
        kv_lengths,
        last_page,
        left_pad: address(batch.left_pad),
        kv_added_begin,
        q_begin: match queries.rows {
            QueryRows::Uniform => 0,
            QueryRows::Packed { begin } => begin.address,
        },
        q_lengths: address(queries.used),
        k_scale: scales.address[0],
        v_scale: scales.address[1],
        prepared: 0,
        scratch: 0,
        q_stride: outer(queries.strides),
        o_stride: outer(output.strides),
        lse_stride: lse.map_or([0; 3], |lse| outer(lse.strides)),
        k_stride,
        v_stride,
        k_scale_stride: scales.strides[0],
        v_scale_stride: scales.strides[1],
        table_stride,
        pages,
        batch: shape.batch as i32,
        heads: shape.heads as i32,
        kv_heads: shape.kv_heads as i32,
        q_len: shape.q_len as i32,
        kv_len: shape.kv_len as i32,
        page_tokens,
        table_words: widths.tables,
        length_words: widths.lengths,
        kv_added,
        window_left,
        window_right,
        scale,
        lse_unit: match base {
            LogBase::E => 1.0,
            LogBase::Two => std::f32::consts::LOG2_E,
        },
        lse_empty: lse.map_or(f32::NEG_INFINITY, |lse| lse.empty),
        side: 0,
        q_rows: match queries.rows {
            QueryRows::Uniform => i64::from(shape.q_len),
            QueryRows::Packed { .. } => batch.bounds.total_q as i64,
        },
        ..RaggedArgs::zeroed()
    }
}

//! What a ragged batch must be like, and the arguments that it comes down to.

use super::{
    Added, Bounds, Expected, Index, IntKind, Ints, KeyLengths, LogBase, QueryRows, RaggedBatch, RaggedCall, Scales,
    Store, StoreRows, StoreType,
};
use crate::tensor::{TensorView, check_output_rows, error, windows};
use crate::{Error, Result};
use flashtune_codegen::abi::RaggedArgs;
use flashtune_codegen::{
    DType, Error as CodegenError, HEAD_DIM_MAX, KvElement, KvKind, KvScales, KvStore, Mask, Problem, Shape,
};

/// What kernels read in one step, in bytes.
const PIECE: u64 = 16;
/// Rows and keys of a sequence: kernels count them in 32 bits and add a block to the last.
const LONGEST: u64 = 1 << 30;
/// Rows of a pack, pages, tokens of a page, entries: what kernels count in 32 bits with a sign.
const MOST: u64 = i32::MAX as u64;

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
    Ok(RaggedCall { problem, shape, usual, args, aligned: is_aligned(batch) })
}

#[cold]
fn unsupported<T>(field: &'static str, value: impl ToString, limit: impl Into<String>, remedy: &str) -> Result<T> {
    Err(Error::Codegen(CodegenError::unsupported(field, value, limit, remedy)))
}

fn number(field: &'static str, n: u64, most: u64, remedy: &str) -> Result<u32> {
    if n > most {
        return unsupported(field, n, format!("it is at most {most}"), remedy);
    }
    Ok(n as u32)
}

fn problem(batch: &RaggedBatch, mask: Mask) -> Result<Problem> {
    let (queries, Store { k, v, head_dim_v, .. }) = (&batch.queries, &batch.store);
    for (name, element) in [("k", k.element), ("v", v.element)] {
        if let StoreType::Float(dtype) = element
            && dtype != queries.dtype
        {
            let expected = format!("Q is {}", queries.dtype);
            let remedy = "convert Q to the store's type, or quantise the store to e4m3, e5m2 or int8";
            return Err(error(name, "dtype", dtype, expected, remedy));
        }
    }
    if v.element != k.element {
        let expected = format!("K is {}", k.element.name());
        return Err(error("v", "dtype", v.element.name(), expected, "keep K and V in one type"));
    }
    if batch.output.dtype != queries.dtype {
        let expected = format!("Q is {}", queries.dtype);
        return Err(error("o", "dtype", batch.output.dtype, expected, "give an output of Q's type"));
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
    let problem = Problem::forward_qk_v(queries.dtype, head_dim_qk?, head_dim_v?, mask.kind())?;
    let store = KvStore { element, scales: KvScales::PerHead, v_columns: has_columns(v) };
    Ok(problem.with_kv(KvKind::Ragged(store)))
}

/// Whether the tokens of V lie side by side.
fn has_columns(v: &StoreRows) -> bool {
    v.inner.is_some_and(|stride| stride != 1)
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
        let tables =
            [table_of(&batch.index).map(|(k, _)| ("k_table", k)), slots_of(&batch.index).map(|s| ("slots", s))];
        Ok(Self { lengths: common_words(lengths)?, tables: common_words(tables)? })
    }
}

fn common_words<const N: usize>(arrays: [Option<(&'static str, Ints)>; N]) -> Result<i32> {
    let mut first: Option<(&str, IntKind)> = None;
    for (name, ints) in arrays.into_iter().flatten() {
        match first {
            None => first = Some((name, ints.kind)),
            Some((other, kind)) if kind.bytes() != ints.kind.bytes() => {
                let expected = format!("{other} is {}, and all lengths and first rows have one size", kind.name());
                return Err(error(name, "dtype", ints.kind.name(), expected, "convert one of them"));
            }
            Some(_) => {}
        }
    }
    Ok(first.map_or(1, |(_, kind)| (kind.bytes() / 4) as i32))
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

/// K's table and V's.
fn table_of(index: &Index) -> Option<(Ints, Ints)> {
    match *index {
        Index::Table { k, v, .. } | Index::Csr { k, v, .. } => Some((k, Ints { address: v.unwrap_or(k.address), ..k })),
        Index::Dense { .. } | Index::Packed { .. } => None,
    }
}

fn slots_of(index: &Index) -> Option<Ints> {
    match *index {
        Index::Dense { slots } => slots,
        _ => None,
    }
}

/// What the index, the lengths and the bounds say of each other.
fn check_index(batch: &RaggedBatch) -> Result<()> {
    let Store { pages, page_tokens, .. } = batch.store;
    let Bounds { batch: sequences, max_kv, .. } = batch.bounds;
    let too_long = |room: u128, what: &str, remedy| {
        let limit = format!("{what} has room for {room} keys");
        unsupported("max_kv", max_kv, limit, remedy)
    };
    match batch.index {
        Index::Dense { slots } => {
            if max_kv > page_tokens {
                return too_long(page_tokens.into(), "a sequence of the cache", "name a bound that the cache can hold");
            }
            if slots.is_none() && max_kv > 0 && pages < sequences {
                let limit = format!("there are {sequences} sequences, each with a page of its own");
                return unsupported("pages", pages, limit, "give `slots`, which say the page of each sequence");
            }
        }
        Index::Packed { .. } => {
            if pages != 1 {
                let limit = "packed keys are one page, whose tokens are those of all sequences";
                return unsupported("pages", pages, limit, "give 1, and the length of the pack as page_tokens");
            }
        }
        Index::Table { stride, capacity, .. } => {
            if page_tokens > 0 && u128::from(capacity) * u128::from(page_tokens) < u128::from(max_kv) {
                let room = u128::from(capacity) * u128::from(page_tokens);
                return too_long(room, "a row of the table", "give a table with more entries, or a smaller bound");
            }
            if sequences > 1 && stride < 0 {
                let remedy = "make the table contiguous";
                return Err(error("k_table", "stride", stride, "strides are not negative", remedy));
            }
        }
        Index::Csr { .. } => {}
    }
    if matches!(batch.index, Index::Table { .. } | Index::Csr { .. }) && page_tokens == 0 {
        return unsupported("page_tokens", 0, "a page has at least one token", "give the tokens of a page");
    }
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
            if scales != Scales::One && batch.store.k.element.element() == KvElement::Same {
                let expected = format!("the elements of the store are {}", batch.store.k.element.name());
                let remedy = "leave scales out: they belong to e4m3, e5m2 and int8";
                return Err(error(name, "address", "given", expected, remedy));
            }
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

/// A dimension: its length, its stride in elements, and what the stride is called.
type Dim = (u64, i64, &'static str);

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
    TensorView { address, dtype: batch.queries.dtype, shape: [b, h, r, elements], strides: [sb, sh, sr, 1] }
}

/// The dimensions of K or V but the last, which is contiguous, and the length of that.
fn store_dims(store: &Store, which: &StoreRows, row: u64, piece: u64) -> ([Dim; 4], u64) {
    let [page, token, head] = which.strides;
    let (pieces, inner, last) = match which.inner {
        Some(stride) => (row / piece, stride, piece),
        None => (1, 0, row),
    };
    let dims = [
        (store.pages, page, "page stride"),
        (store.page_tokens, token, "token stride"),
        (store.kv_heads, head, "head stride"),
        (pieces, inner, "inner stride"),
    ];
    (dims, last)
}

/// Elements of K in 16 bytes.
fn k_piece(store: &Store) -> u64 {
    PIECE / store.k.element.bytes() as u64
}

/// Calls with every range of memory, after checking its layout.
pub(super) fn ranges(batch: &RaggedBatch, f: &mut dyn FnMut(&'static str, u64, u64) -> Result<()>) -> Result<()> {
    if batch.is_empty() {
        return Ok(());
    }
    let RaggedBatch { queries, store, output, bounds, .. } = batch;
    let element = queries.dtype.bytes() as u64;
    let q = row_dims(batch, queries.strides);
    f("q", queries.address, span("q", queries.address, &q, queries.head_dim, element)?)?;
    if store.pages > 0 && store.page_tokens > 0 && bounds.max_kv > 0 {
        let head_dim = queries.head_dim;
        if store.k.inner.is_some() && !head_dim.is_multiple_of(k_piece(store)) {
            let expected = format!("rows of {head_dim} elements are not made of whole pieces of 16 bytes");
            return Err(error("k", "inner stride", "given", expected, "keep rows of K contiguous"));
        }
        if has_columns(&store.v) && store.page_tokens > 1 && store.v.strides[1] != 1 {
            let expected = "where columns of V have a stride, its tokens lie side by side (stride 1)";
            return Err(error(
                "v",
                "token stride",
                store.v.strides[1],
                expected,
                "transpose V, or make rows contiguous",
            ));
        }
        for (name, which, row, piece) in
            [("k", &store.k, head_dim, k_piece(store)), ("v", &store.v, store.head_dim_v, 1)]
        {
            let (dims, last) = store_dims(store, which, row, piece);
            f(name, which.address, span(name, which.address, &dims, last, which.element.bytes() as u64)?)?;
        }
        for (name, scales) in [("k_scale", store.k.scales), ("v_scale", store.v.scales)] {
            scale_range(batch, name, scales, f)?;
        }
    }
    f("o", output.address, span("o", output.address, &row_dims(batch, output.strides), store.head_dim_v, element)?)?;
    if let Some(lse) = output.lse {
        f("lse", lse.address, span("lse", lse.address, &row_dims(batch, lse.strides), 1, 4)?)?;
    }
    int_ranges(batch, f)
}

fn scale_range(
    batch: &RaggedBatch,
    name: &'static str,
    scales: Scales,
    f: &mut dyn FnMut(&'static str, u64, u64) -> Result<()>,
) -> Result<()> {
    let store = &batch.store;
    let (address, bytes) = match scales {
        Scales::One => return Ok(()),
        Scales::PerHead { address, strides: [sequence, head] } => {
            let dims = [(batch.bounds.batch, sequence, "sequence stride"), (store.kv_heads, head, "head stride")];
            (address, span(name, address, &dims, 1, 4)?)
        }
        Scales::PerToken { address, strides: [page, head, token] } => {
            let dims = [
                (store.pages, page, "page stride"),
                (store.kv_heads, head, "head stride"),
                (store.page_tokens, token, "token stride"),
            ];
            (address, span(name, address, &dims, 1, 4)?)
        }
    };
    f(name, address, bytes)
}

fn int_ranges(batch: &RaggedBatch, f: &mut dyn FnMut(&'static str, u64, u64) -> Result<()>) -> Result<()> {
    let sequences = batch.bounds.batch;
    for (name, ints) in lengths_of(batch).into_iter().flatten() {
        let ends = matches!(name, "q_begin" | "kv_begin" | "pages_begin" | "kv_added_begin" | "kv_sums");
        let count = sequences + u64::from(ends);
        f(name, ints.address, span(name, ints.address, &[], count, ints.kind.bytes())?)?;
    }
    if let Some(slots) = slots_of(&batch.index) {
        f("slots", slots.address, span("slots", slots.address, &[], sequences, slots.kind.bytes())?)?;
    }
    // How many entries CSR has the device alone knows, and it may have none.
    let (stride, entries) = match batch.index {
        Index::Table { stride, capacity, .. } => (stride, capacity),
        Index::Csr { .. } => (0, 1),
        _ => return Ok(()),
    };
    if batch.bounds.max_kv > 0
        && let Some((k, v)) = table_of(&batch.index)
    {
        for (name, table) in [("k_table", k), ("v_table", v)] {
            let rows = [(sequences, stride, "stride")];
            f(name, table.address, span(name, table.address, &rows, entries, table.kind.bytes())?)?;
        }
    }
    Ok(())
}

/// Bytes from the first element to the last one's end, of rows of so many contiguous elements.
fn span(name: &'static str, address: u64, dims: &[Dim], row: u64, element: u64) -> Result<u64> {
    if address == 0 {
        return Err(error(name, "address", "null", "what is read or written has memory", "allocate it first"));
    }
    if !address.is_multiple_of(element) {
        let expected = format!("elements of {element} bytes are read whole");
        let remedy = "slice the tensor at a whole element";
        return Err(error(name, "address", format!("{address:#x}"), expected, remedy));
    }
    let mut last = 0i128;
    for &(n, stride, field) in dims.iter().filter(|(n, ..)| *n > 1) {
        if stride < 0 {
            return Err(error(name, field, stride, "strides are not negative", "make the tensor contiguous"));
        }
        last += i128::from(n - 1) * i128::from(stride);
    }
    // Kernels count elements in 64 bits with a sign.
    let bytes = (last + i128::from(row)) * i128::from(element);
    if bytes > i128::from(i64::MAX) || bytes + i128::from(address) > i128::from(u64::MAX) {
        let found = format!(
            "{:?} by {:?}",
            dims.iter().map(|d| d.0).collect::<Vec<_>>(),
            dims.iter().map(|d| d.1).collect::<Vec<_>>()
        );
        let expected = "the tensor ends within 64-bit addresses";
        return Err(error(name, "extent", found, expected, "check sizes and strides"));
    }
    Ok(bytes as u64)
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
    let rows = |address, strides| on_grid(address, &row_dims(batch, strides), queries.dtype.bytes());
    let (k_dims, k_last) = store_dims(store, &store.k, queries.head_dim, k_piece(store));
    let (mut v_dims, mut v_last) = store_dims(store, &store.v, store.head_dim_v, 1);
    if has_columns(&store.v) {
        // Pieces lie along the tokens.
        v_dims[1].1 = 0;
        v_last = PIECE;
    }
    let whole = |n: u64, which: &StoreRows| (n * which.element.bytes() as u64).is_multiple_of(PIECE);
    rows(queries.address, queries.strides)
        && rows(output.address, output.strides)
        && on_grid(store.k.address, &k_dims, store.k.element.bytes())
        && on_grid(store.v.address, &v_dims, store.v.element.bytes())
        && whole(k_last, &store.k)
        && whole(v_last, &store.v)
}

fn arguments(batch: &RaggedBatch, shape: &Shape, widths: Widths, scales: &PairOfScales, scale: f32) -> RaggedArgs {
    let RaggedBatch { queries, store, index, keys, output, .. } = batch;
    let address = |ints: Option<Ints>| ints.map_or(0, |ints| ints.address);
    let outer = |strides| row_dims(batch, strides).map(|(n, stride, _)| if n > 1 { stride } else { 0 });
    let taken = |which: &StoreRows, inner| {
        let n = [store.pages, store.page_tokens, store.kv_heads];
        let [page, token, head] = std::array::from_fn(|i| if n[i] > 1 { which.strides[i] } else { 0 });
        [page, token, head, which.inner.unwrap_or(inner)]
    };
    let table = table_of(index);
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
        slots: address(slots_of(index)),
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
        k_stride: taken(&store.k, k_piece(store) as i64),
        v_stride: taken(&store.v, 1),
        k_scale_stride: scales.strides[0],
        v_scale_stride: scales.strides[1],
        table_stride,
        // A store without tokens has no page either: nothing is divided by 0, and every identifier is none.
        pages: if store.page_tokens == 0 { 0 } else { store.pages as i64 },
        batch: shape.batch as i32,
        heads: shape.heads as i32,
        kv_heads: shape.kv_heads as i32,
        q_len: shape.q_len as i32,
        kv_len: shape.kv_len as i32,
        page_tokens: store.page_tokens.max(1) as i32,
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
    }
}

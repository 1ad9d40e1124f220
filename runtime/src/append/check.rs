//! What an append must be like, and the arguments that it comes down to.

use super::{Append, AppendCall, AppendQueries, Positions, RowCount, Rows, Target};
use crate::Result;
use crate::ragged::layout::{Dim, EachRange, LONGEST, MOST, common_words, number, span, unsupported};
use crate::ragged::{Added, Index, Ints, KeyLengths, Scales, Store};
use crate::tensor::error;
use flashtune_codegen::abi::AppendArgs;
use flashtune_codegen::{DType, HEAD_DIM_MAX, KvKind, KvScales, KvStore, Mask, MaskKind, Op, Problem, Shape};

pub(super) fn call(append: &Append) -> Result<AppendCall> {
    let scales = PairOfScales::of(append)?;
    let problem = problem(append, scales.kind)?;
    let shape = shape(append)?;
    let target = TargetArgs::of(append)?;
    check_rotary(append)?;
    ranges(append, &mut |_, _, _| Ok(()))?;
    Ok(AppendCall { problem, shape, args: arguments(append, &scales, target)? })
}

fn problem(append: &Append, scales: KvScales) -> Result<Problem> {
    let Store { k, v, head_dim_v, .. } = &append.store;
    append.store.check_elements(append.dtype, "the new rows are", "convert the new rows to the store's type")?;
    let dims = [("head_dim_qk", append.head_dim), ("head_dim_v", *head_dim_v)];
    let [head_dim_qk, head_dim_v] = dims
        .map(|(field, dim)| number(field, dim, HEAD_DIM_MAX.into(), "append the parts of longer rows on their own"));
    let problem = Problem::forward_qk_v(append.dtype, head_dim_qk?, head_dim_v?, MaskKind::FULL)?;
    let store = KvStore { element: k.element.element(), scales, v_columns: v.has_columns() };
    Ok(Problem { op: Op::Append, kv: KvKind::Ragged(store), ..problem })
}

fn shape(append: &Append) -> Result<Shape> {
    let Store { kv_heads, pages, page_tokens, .. } = append.store;
    let (q_heads, q_rows) = append.queries.map_or((0, 0), |q| (q.heads, append.rows_of(q.rows)));
    number("batch", append.batch(), MOST, "split the batch")?;
    number("pages", pages, MOST, "split the store")?;
    number("page_tokens", page_tokens, MOST, "split the pages")?;
    let new_rows = number("new rows", append.new_rows(), MOST, "append in several calls")?;
    let q_rows = number("rows of Q", q_rows, MOST, "append in several calls")?;
    let kv_heads = number("kv_heads", kv_heads, MOST, "split the heads")?;
    let heads = number("heads", q_heads, MOST, "split the heads")?;
    // Kernels count rows of heads in 32 bits.
    let rows = u64::from(new_rows.max(q_rows)) * (2 * u64::from(kv_heads) + u64::from(heads.max(kv_heads)));
    number("rows of all heads", rows, MOST, "append in several calls")?;
    let heads = heads.max(kv_heads);
    Ok(Shape { batch: 1, heads, kv_heads, q_len: new_rows.max(q_rows), kv_len: 0, mask: Mask::Full })
}

/// Scales of K and V as kernels take them.
struct PairOfScales {
    kind: KvScales,
    address: [u64; 2],
    strides: [[i64; 3]; 2],
}

impl PairOfScales {
    fn of(append: &Append) -> Result<Self> {
        let both = [("k_scale", append.store.k.scales), ("v_scale", append.store.v.scales)];
        let per_token = both.iter().any(|(_, s)| matches!(s, Scales::PerToken { .. }));
        let kind = if per_token { KvScales::PerToken } else { KvScales::PerHead };
        let mut pair = Self { kind, address: [0; 2], strides: [[0; 3]; 2] };
        let slots = matches!(append.target, Target::Slots { .. });
        for (i, (name, scales)) in both.into_iter().enumerate() {
            append.store.check_scale(name, scales)?;
            if append.finds_scales && !matches!(scales, Scales::PerToken { .. }) {
                let expected = "scales that are found from rows are those of tokens";
                return Err(error(name, "kind", "not of tokens", expected, "give scales of tokens, or have them read"));
            }
            (pair.address[i], pair.strides[i]) = match scales {
                Scales::One => (0, [0; 3]),
                Scales::PerToken { address, strides } => (address, strides),
                Scales::PerHead { address, strides: [sequence, head] } => {
                    if sequence != 0 && (slots || per_token && append.batch() > 1) {
                        let expected = "a slot, or the scale of a token, says nothing of a sequence";
                        let remedy = "give a stride of 0 along the sequences, or places by lengths";
                        return Err(error(name, "sequence stride", sequence, expected, remedy));
                    }
                    (address, [sequence, head, 0])
                }
            };
            if per_token && matches!(scales, Scales::PerHead { .. }) {
                pair.strides[i][0] = 0;
            }
        }
        Ok(pair)
    }
}

/// What says where rows go.
#[derive(Default)]
struct TargetArgs {
    slot_mapping: u64,
    slot_words: i32,
    tables: [u64; 2],
    table_words: i32,
    table_stride: i64,
    pages_begin: u64,
    slots: u64,
    lengths: u64,
    length_sums: u64,
    last_page: u64,
    lengths_after: bool,
    kv_len: i32,
}

impl TargetArgs {
    fn of(append: &Append) -> Result<Self> {
        let none = Self { slot_words: 1, table_words: 1, ..Self::default() };
        let (batch, index, keys, max_kv) = match append.target {
            Target::Slots { mapping } => {
                for (field, rows) in [("rows", Some(append.rows)), ("rows of Q", append.queries.map(|q| q.rows))] {
                    if matches!(rows, Some(RowCount::Packed { .. })) {
                        let limit = "rows with a slot each are one sequence";
                        return unsupported(field, "packed", limit, "give the number of all rows, without first ones");
                    }
                }
                return Ok(Self { slot_mapping: mapping.address, slot_words: mapping.words(), ..none });
            }
            Target::Lengths { batch, index, keys, max_kv } => (batch, index, keys, max_kv),
        };
        let max_kv = number("max_kv", max_kv, LONGEST, "name the longest sequence that occurs")?;
        let none = Self { kv_len: max_kv as i32, ..none };
        if matches!(index, Index::Packed { .. }) {
            let limit = "keys that lie one after the other have no room for more between them";
            return unsupported("index", "packed", limit, "append to pages, or to a cache with slots");
        }
        index.check_room(&append.store, batch, max_kv.into())?;
        let tables = index.tables().map(|(k, v)| ([k.address, v.address], k.words()));
        let slots = index.slots();
        let placed = Self {
            tables: tables.map_or([0; 2], |(tables, _)| tables),
            slots: slots.map_or(0, |s| s.address),
            table_words: tables.map(|(_, words)| words).or(slots.map(Ints::words)).unwrap_or(1),
            table_stride: match index {
                Index::Table { stride, .. } if batch > 1 => stride,
                _ => 0,
            },
            pages_begin: match index {
                Index::Csr { begin, .. } => begin.address,
                _ => 0,
            },
            ..none
        };
        let after = Self { lengths_after: true, ..placed };
        let csr = matches!(index, Index::Csr { .. });
        Ok(match keys {
            KeyLengths::Each { lengths, added: Added::Nothing } => Self { lengths: lengths.address, ..after },
            KeyLengths::Each { lengths, added } => {
                let same = match (added, append.rows) {
                    (Added::Rows(n), RowCount::Each(rows)) => n == rows,
                    (Added::Packed { begin: ours }, RowCount::Packed { begin, .. }) => ours == begin,
                    _ => false,
                };
                if !same {
                    let limit = "the rows that came behind the lengths are those of this call";
                    return unsupported("kv_added", "others", limit, "give the same rows, or lengths after the call");
                }
                Self { lengths: lengths.address, ..placed }
            }
            KeyLengths::Cumulative { sums } => Self { length_sums: sums.address, ..after },
            KeyLengths::LastPage { tokens } if csr => Self { last_page: tokens.address, ..after },
            KeyLengths::OfIndex if csr => after,
            KeyLengths::LastPage { .. } | KeyLengths::OfIndex => {
                let limit = "only pages by CSR say how many tokens there are";
                return unsupported("lengths", "absent", limit, "give the tokens of each sequence");
            }
        })
    }
}

fn check_rotary(append: &Append) -> Result<()> {
    let Some(rotary) = append.rotary else {
        if append.queries.is_some() {
            let limit = "rows of Q are given to be rotated";
            return unsupported("rotary", "absent", limit, "leave Q out, or give cosines and sines");
        }
        return Ok(());
    };
    if rotary.dim < 2 || !rotary.dim.is_multiple_of(2) || rotary.dim > append.head_dim {
        let limit = format!("an even number from 2 to the head dim, {}", append.head_dim);
        return unsupported("rotary_dim", rotary.dim, limit, "leave the rotary embedding out for none");
    }
    if rotary.dtype != DType::F32 && rotary.dtype != append.dtype {
        let expected = format!("cosines and sines are f32, or {} as the new rows are", append.dtype);
        return Err(error("cos", "dtype", rotary.dtype, expected, "convert them"));
    }
    number("positions", rotary.rows, MOST, "cut the tables")?;
    if rotary.rows > 1 && rotary.stride < 0 {
        return Err(error("cos", "stride", rotary.stride, "strides are not negative", "make the table contiguous"));
    }
    let slots = matches!(append.target, Target::Slots { .. });
    match rotary.positions {
        Positions::OfPlaces | Positions::From { .. } if slots => {
            let limit = "a slot says nothing of a position";
            unsupported("positions", "absent", limit, "give the position of each row")
        }
        Positions::Each { q: None, .. }
            if append.queries.is_some_and(|q| append.rows_of(q.rows) != append.new_rows()) =>
        {
            let limit = "Q has not as many rows as there are new ones";
            unsupported("positions", "those of K alone", limit, "give the positions of Q's rows")
        }
        _ => Ok(()),
    }
}

fn row_dims(append: &Append, rows: RowCount, heads: u64, [of_batch, of_head, of_row]: [i64; 3]) -> [Dim; 3] {
    let (batch, rows) = match rows {
        RowCount::Each(rows) => (append.batch(), rows),
        RowCount::Packed { total, .. } => (1, total),
    };
    [(batch, of_batch, "batch stride"), (heads, of_head, "head stride"), (rows, of_row, "row stride")]
}

/// Calls with every range of memory, after checking its layout.
pub(super) fn ranges(append: &Append, f: &mut EachRange<'_>) -> Result<()> {
    let mut range =
        |name, address, dims: &[Dim], row, element| f(name, address, span(name, address, dims, row, element)?);
    let element = append.dtype.bytes() as u64;
    let Store { head_dim_v, kv_heads, .. } = append.store;
    let (rows, batch) = (append.new_rows(), append.batch());
    if let Some(AppendQueries { from, to, heads, rows, .. }) = append.queries
        && heads > 0
        && append.rows_of(rows) > 0
    {
        if from.address == to.address && from.strides != to.strides {
            let expected = format!("Q is rotated where it lies, by its own strides {:?}", from.strides);
            let remedy = "give other memory, or the strides of Q";
            return Err(error("q_out", "strides", format!("{:?}", to.strides), expected, remedy));
        }
        for (name, at) in [("q", from), ("q_out", to)] {
            range(name, at.address, &row_dims(append, rows, heads, at.strides), append.head_dim, element)?;
        }
        if let RowCount::Packed { begin, .. } = rows {
            range("q_begin", begin.address, &[], batch + 1, begin.kind.bytes())?;
        }
        if let Some(Positions::Each { k, q: Some(q) }) = append.rotary.map(|r| r.positions) {
            range("q_positions", q, &[], append.rows_of(rows), k.kind.bytes())?;
        }
    }
    if let Some(rotary) = append.rotary.filter(|r| r.rows > 0 && !append.is_empty()) {
        let dims = [(rotary.rows, rotary.stride, "stride")];
        for (name, address) in [("cos", rotary.cos), ("sin", rotary.sin)] {
            range(name, address, &dims, rotary.dim / 2, rotary.dtype.bytes() as u64)?;
        }
        match rotary.positions {
            Positions::OfPlaces => {}
            Positions::From { first } => range("first_position", first.address, &[], batch, first.kind.bytes())?,
            Positions::Each { k, .. } => range("k_positions", k.address, &[], rows, k.kind.bytes())?,
        }
    }
    if rows == 0 || kv_heads == 0 {
        return Ok(());
    }
    for (name, at, dim) in [("k_new", append.k, append.head_dim), ("v_new", append.v, head_dim_v)] {
        range(name, at.address, &row_dims(append, append.rows, kv_heads, at.strides), dim, element)?;
    }
    append.store.ranges(append.head_dim, batch, &mut *f)?;
    let mut ints = |name, ints: Ints, dims: &[Dim], count| {
        f(name, ints.address, span(name, ints.address, dims, count, ints.kind.bytes())?)
    };
    if let RowCount::Packed { begin, .. } = append.rows {
        ints("new_begin", begin, &[], batch + 1)?;
    }
    let (index, keys) = match append.target {
        Target::Slots { mapping } => return ints("slot_mapping", mapping, &[], rows),
        Target::Lengths { index, keys, .. } => (index, keys),
    };
    match keys {
        KeyLengths::OfIndex => {}
        KeyLengths::Each { lengths, .. } => ints("lengths", lengths, &[], batch)?,
        KeyLengths::Cumulative { sums } => ints("length_sums", sums, &[], batch + 1)?,
        KeyLengths::LastPage { tokens } => ints("last_page", tokens, &[], batch)?,
    }
    match index {
        Index::Dense { slots: Some(slots) } => ints("slots", slots, &[], batch),
        Index::Dense { slots: None } | Index::Packed { .. } => Ok(()),
        Index::Table { k, v, stride, capacity } => {
            let dims = [(batch, stride, "stride")];
            ints("k_table", k, &dims, capacity)?;
            v.map_or(Ok(()), |v| ints("v_table", Ints { address: v, ..k }, &dims, capacity))
        }
        // How many entries there are the device alone knows.
        Index::Csr { begin, k, v } => {
            ints("pages_begin", begin, &[], batch + 1)?;
            ints("k_table", k, &[], 1)?;
            v.map_or(Ok(()), |v| ints("v_table", Ints { address: v, ..k }, &[], 1))
        }
    }
}

/// 32-bit words of all lengths and first rows, which have one size.
fn length_words(append: &Append) -> Result<i32> {
    let begin = |name, rows: RowCount| match rows {
        RowCount::Each(_) => None,
        RowCount::Packed { begin, .. } => Some((name, begin)),
    };
    let first = match append.rotary.map(|r| r.positions) {
        Some(Positions::From { first }) => Some(("first_position", first)),
        _ => None,
    };
    let (keys, pages) = match append.target {
        Target::Slots { .. } => (None, None),
        Target::Lengths { index, keys, .. } => (
            match keys {
                KeyLengths::OfIndex => None,
                KeyLengths::Each { lengths, .. } => Some(("lengths", lengths)),
                KeyLengths::Cumulative { sums } => Some(("length_sums", sums)),
                KeyLengths::LastPage { tokens } => Some(("last_page", tokens)),
            },
            match index {
                Index::Csr { begin, .. } => Some(("pages_begin", begin)),
                _ => None,
            },
        ),
    };
    let of_q = append.queries.and_then(|q| begin("q_begin", q.rows));
    common_words([begin("new_begin", append.rows), of_q, first, keys, pages])
}

fn arguments(append: &Append, scales: &PairOfScales, target: TargetArgs) -> Result<AppendArgs> {
    let store = &append.store;
    let outer = |at: Rows, rows, heads| {
        row_dims(append, rows, heads, at.strides).map(|(n, stride, _)| if n > 1 { stride } else { 0 })
    };
    let [k_stride, v_stride] = store.taken_strides();
    let (pages, page_tokens) = store.taken_pages();
    let counted = |rows: RowCount| match rows {
        RowCount::Each(rows) => (0, rows as i32),
        RowCount::Packed { begin, .. } => (begin.address, 0),
    };
    let heads = store.kv_heads;
    let (new_begin, new_len) = counted(append.rows);
    let (q_begin, q_len) = append.queries.map_or((0, 0), |q| counted(q.rows));
    let q = append.queries.filter(|q| q.heads > 0);
    let rotary = append.rotary;
    let (k_positions, q_positions, first_position, position_words) = match rotary.map(|r| r.positions) {
        None | Some(Positions::OfPlaces) => (0, 0, 0, 1),
        Some(Positions::From { first }) => (0, 0, first.address, 1),
        Some(Positions::Each { k, q }) => (k.address, q.unwrap_or(k.address), 0, k.words()),
    };
    Ok(AppendArgs {
        k_new: append.k.address,
        v_new: append.v.address,
        q: q.map_or(0, |q| q.from.address),
        q_out: q.map_or(0, |q| q.to.address),
        k: store.k.address,
        v: store.v.address,
        slot_mapping: target.slot_mapping,
        k_table: target.tables[0],
        v_table: target.tables[1],
        pages_begin: target.pages_begin,
        slots: target.slots,
        lengths: target.lengths,
        length_sums: target.length_sums,
        last_page: target.last_page,
        new_begin,
        q_begin,
        k_positions,
        q_positions,
        first_position,
        // A table without positions has no address, but rotates.
        cos: rotary.map_or(0, |r| if r.rows == 0 { u64::MAX } else { r.cos }),
        sin: rotary.map_or(0, |r| r.sin),
        k_scale: scales.address[0],
        v_scale: scales.address[1],
        k_new_stride: outer(append.k, append.rows, heads),
        v_new_stride: outer(append.v, append.rows, heads),
        q_stride: q.map_or([0; 3], |q| outer(q.from, q.rows, q.heads)),
        q_out_stride: q.map_or([0; 3], |q| outer(q.to, q.rows, q.heads)),
        k_stride,
        v_stride,
        k_scale_stride: scales.strides[0],
        v_scale_stride: scales.strides[1],
        table_stride: target.table_stride,
        pages,
        rotary_stride: rotary.filter(|r| r.rows > 1).map_or(0, |r| r.stride),
        batch: append.batch() as i32,
        heads: q.map_or(0, |q| q.heads as i32),
        kv_heads: heads as i32,
        new_rows: append.new_rows() as i32,
        new_len,
        q_rows: q.map_or(0, |q| append.rows_of(q.rows) as i32),
        q_len,
        kv_len: target.kv_len,
        page_tokens,
        rotary_rows: rotary.map_or(0, |r| r.rows as i32),
        rotary_dim: rotary.map_or(0, |r| r.dim as i32),
        rotary_interleaved: rotary.is_some_and(|r| r.interleaved).into(),
        rotary_f32: rotary.is_some_and(|r| r.dtype == DType::F32).into(),
        q_advance: q.is_some_and(|q| q.advance).into(),
        lengths_after: target.lengths_after.into(),
        finds_scales: append.finds_scales.into(),
        table_words: target.table_words,
        length_words: length_words(append)?,
        slot_words: target.slot_words,
        position_words,
    })
}

//! Attention over sequences of different lengths, packed one after the other or in pages.

use crate::dense::{self, Settings, with_rows};
use crate::memory::{Operand, Place, Source, tensor, wrong_rank};
use crate::{Error, engines, error::Result};
use candle_core::{D, DType, Shape, Tensor};
use flashtune::Ragged;
use flashtune::ragged::{
    Bounds, Expected, Index, IntKind, Ints, KeyLengths, LogBase, Lse, Output, Queries, QueryRows, RaggedBatch, Store,
    StoreRows, StoreType,
};

const PACKED: &str = "[total, heads, dim]";
const PAGED: &str = "[pages, tokens of a page, heads, dim]";

/// Where sequences begin and end, and how long they may be.
pub(crate) struct Lengths<'a> {
    /// First row of each sequence and the end of the last one's, `[batch + 1]`.
    pub q: &'a Tensor,
    /// The same of keys; beside pages their differences are the lengths.
    pub k: &'a Tensor,
    pub max_q: usize,
    pub max_k: usize,
}

/// Pages of each sequence, `[batch, pages]`.
pub(crate) struct Pages<'a> {
    pub table: &'a Tensor,
    pub tokens: usize,
    /// `mm_prefix_ranges`.
    pub ranges: Option<&'a Tensor>,
}

/// O `[total_q, heads, dim]`, and the log-sum-exp `[heads, total_q]` if it is wanted.
pub(crate) fn forward(
    [q, k, v]: [&Tensor; 3],
    lengths: &Lengths<'_>,
    pages: Option<&Pages<'_>>,
    settings: Settings,
    wants_lse: bool,
) -> candle_core::Result<(Tensor, Option<Tensor>)> {
    check_ranks([q, k, v], pages)?;
    settings.side.refuse_gradients()?;
    let sequences = check_lengths(q, k, lengths, pages)?;
    if [q, k, v].iter().any(|t| t.track_op()) {
        if pages.is_some() {
            let remedy = "pack K and V, or detach q, k and v";
            return Err(Error::Gradient { of: "through pages".to_owned(), remedy }.into());
        }
        return by_sequences([q, k, v], lengths, &settings, wants_lse);
    }
    let [q, k, v] = match pages {
        None => with_rows([q, k, v])?,
        // A pool of pages is too much to copy.
        Some(_) => [q.clone(), k.clone(), v.clone()],
    };
    launch([&q, &k, &v], sequences, lengths, pages, &settings, wants_lse)
}

fn check_ranks([q, k, v]: [&Tensor; 3], pages: Option<&Pages<'_>>) -> Result<()> {
    let (of_store, expected) = if pages.is_some() { (4, PAGED) } else { (3, PACKED) };
    for (name, tensor, rank, expected) in
        [("q", q, 3, PACKED), ("k", k, of_store, expected), ("v", v, of_store, expected)]
    {
        if tensor.rank() != rank {
            return Err(wrong_rank(name, tensor.dims(), expected));
        }
    }
    // All but the head dim.
    let (of_k, of_v) = (&k.dims()[..k.rank() - 1], &v.dims()[..v.rank() - 1]);
    if of_k != of_v {
        return Err(Error::tensor(
            "v",
            "shape",
            v.dims(),
            format!("k is {:?}", k.dims()),
            "pass a row of V for each of K",
        ));
    }
    let (of_q, of_k) = (q.dims()[2], k.dims()[k.rank() - 1]);
    if of_q != of_k {
        let expected = format!("that of q is {of_q}");
        return Err(Error::tensor("k", "head dim", of_k, expected, "rows of q and k are of one length"));
    }
    if let Some(pages) = pages {
        if k.dims()[1] != pages.tokens {
            let expected = format!("k is {:?}", k.dims());
            return Err(Error::argument(
                "page_block_size",
                pages.tokens,
                expected,
                "pass the length of its second axis",
            ));
        }
        for (name, tensor) in [("q", q), ("k", k), ("v", v)] {
            if tensor.stride().last() != Some(&1) {
                return Err(Error::tensor(name, "stride", tensor.stride(), "rows are contiguous", "transpose it"));
            }
        }
        if pages.table.rank() != 2 {
            return Err(wrong_rank("block_table", pages.table.dims(), "[batch, pages]"));
        }
    }
    Ok(())
}

/// The number of sequences. On the host processor lengths are looked at, too; those on a GPU are the caller's word.
fn check_lengths(q: &Tensor, k: &Tensor, lengths: &Lengths<'_>, pages: Option<&Pages<'_>>) -> candle_core::Result<u64> {
    let packed_k = if pages.is_some() { None } else { Some(k.dims()[0]) };
    let arrays = [
        ("seqlens_q", "max_seqlen_q", lengths.q, Some(q.dims()[0]), lengths.max_q),
        ("seqlens_k", "max_seqlen_k", lengths.k, packed_k, lengths.max_k),
    ];
    let count = lengths.q.elem_count();
    for (name, bound_name, array, end, bound) in arrays {
        if array.rank() != 1 || !array.is_contiguous() || array.elem_count() != count || count == 0 {
            let expected = "it is [batch + 1], contiguous, and as long as seqlens_q";
            return Err(Error::tensor(name, "shape", array.dims(), expected, "pass sums that begin with 0").into());
        }
        int_kind(name, array.dtype())?;
        if !array.device().is_cpu() {
            continue;
        }
        let sums = array.to_dtype(DType::I64)?.to_vec1::<i64>()?;
        let longest = sums.windows(2).map(|ends| ends[1].wrapping_sub(ends[0])).max().unwrap_or(0);
        let falls = sums.windows(2).any(|ends| ends[0] > ends[1]);
        if falls || sums[0] < 0 || end.is_some_and(|end| sums[count - 1] > end as i64) {
            let end = end.map_or_else(String::new, |end| format!(" up to the {end} rows that there are"));
            let expected = format!("first rows do not decrease, and go{end} from 0 on");
            return Err(Error::tensor(name, "values", sums, expected, "pass the sums of the lengths").into());
        }
        if longest > bound as i64 {
            let expected = format!("the longest sequence of {name} has {longest} rows");
            return Err(Error::argument(bound_name, bound, expected, "pass the longest sequence's length").into());
        }
    }
    if let Some(pages) = pages
        && pages.table.dims()[0] != count - 1
    {
        let expected = format!("there are {} sequences", count - 1);
        let table = pages.table.dims();
        return Err(Error::tensor("block_table", "shape", table, expected, "pass a row for each").into());
    }
    Ok(count as u64 - 1)
}

fn int_kind(name: &str, dtype: DType) -> Result<IntKind> {
    match dtype {
        DType::U32 => Ok(IntKind::U32),
        DType::I32 => Ok(IntKind::I32),
        DType::I64 => Ok(IntKind::I64),
        other => Err(Error::tensor(name, "dtype", other, "integers are u32, i32 or i64", "convert it")),
    }
}

fn launch(
    [q, k, v]: [&Tensor; 3],
    sequences: u64,
    lengths: &Lengths<'_>,
    pages: Option<&Pages<'_>>,
    settings: &Settings,
    wants_lse: bool,
) -> candle_core::Result<(Tensor, Option<Tensor>)> {
    let place = Place::of(q.device())?;
    let engine = engines::of_place(&place)?;
    let mut inputs = vec![("q", q), ("k", k), ("v", v), ("seqlens_q", lengths.q), ("seqlens_k", lengths.k)];
    inputs.extend(pages.map(|pages| ("block_table", pages.table)));
    let locked: Vec<_> = inputs.iter().map(|(name, t)| (*name, t.storage_and_layout())).collect();
    let mut operands = Vec::with_capacity(locked.len());
    for (name, (storage, layout)) in &locked {
        operands.push(Operand::read(name, &place, Source::of(storage)?, layout)?);
    }
    let [of_q, of_k, of_v, q_sums, k_sums] = std::array::from_fn(|i| &operands[i]);
    let ints = |name, operand: &Operand<'_>| -> Result<Ints> {
        Ok(Ints { address: operand.address(), kind: int_kind(name, operand.dtype())? })
    };
    let (begin_q, begin_k) = (ints("seqlens_q", q_sums)?, ints("seqlens_k", k_sums)?);
    let (total_q, heads, head_dim) = q.dims3()?;
    let head_dim_v = v.dim(D::Minus1)?;
    let (o_shape, rows) = (Shape::from((total_q, heads, head_dim_v)), Shape::from((heads, total_q)));
    let dtype = of_q.float("q")?;
    let mut o = place.alloc(dtype, o_shape.elem_count())?;
    let mut lse = if wants_lse { Some(place.alloc(flashtune::DType::F32, rows.elem_count())?) } else { None };

    let stride = |operand: &Operand<'_>| operand.stride().iter().map(|&n| n as i64).collect::<Vec<_>>();
    // Page, token and head; packed rows are one page.
    let store_rows = |name, operand: &Operand<'_>| -> Result<StoreRows> {
        let strides = match stride(operand)[..] {
            [page, token, head, _] => [page, token, head],
            [token, head, _] => [0, token, head],
            _ => return Err(wrong_rank(name, operand.dims(), PACKED)),
        };
        Ok(StoreRows::new(operand.address(), StoreType::Float(operand.float(name)?), strides))
    };
    let (page_count, page_tokens, kv_heads) = match *k.dims() {
        [pages, tokens, heads, _] => (pages, tokens, heads),
        [total, heads, _] => (1, total, heads),
        _ => return Err(wrong_rank("k", k.dims(), PACKED).into()),
    };
    let index = match (pages, operands.get(5)) {
        (Some(_), Some(table)) => {
            let &[_, capacity] = table.dims() else {
                return Err(wrong_rank("block_table", table.dims(), "[batch, pages]").into());
            };
            if capacity > 1 && table.stride()[1] != 1 {
                let expected = "entries of a sequence lie side by side";
                return Err(
                    Error::tensor("block_table", "stride", table.stride(), expected, "make it contiguous").into()
                );
            }
            let k = ints("block_table", table)?;
            Index::Table { k, v: None, stride: table.stride()[0] as i64, capacity: capacity as u64 }
        }
        _ => Index::Packed { begin: begin_k },
    };
    let keys = if pages.is_some() { KeyLengths::Cumulative { sums: begin_k } } else { KeyLengths::OfIndex };
    {
        let written = Operand::write("o", &place, &mut o, &o_shape)?;
        let kept = lse.as_mut().map(|lse| Operand::write("lse", &place, lse, &rows)).transpose()?;
        let batch = RaggedBatch {
            queries: Queries {
                address: of_q.address(),
                dtype,
                heads: heads as u64,
                head_dim: head_dim as u64,
                strides: [0, stride(of_q)[1], stride(of_q)[0]],
                rows: QueryRows::Packed { begin: begin_q },
                used: None,
                tree: None,
            },
            store: Store {
                k: store_rows("k", of_k)?,
                v: store_rows("v", of_v)?,
                head_dim_v: head_dim_v as u64,
                kv_heads: kv_heads as u64,
                pages: page_count as u64,
                page_tokens: page_tokens as u64,
            },
            index,
            keys,
            left_pad: None,
            output: Output {
                address: written.address(),
                dtype,
                strides: [0, head_dim_v as i64, (heads * head_dim_v) as i64],
                lse: kept.as_ref().map(|kept| Lse {
                    address: kept.address(),
                    strides: [0, total_q as i64, 1],
                    base: LogBase::E,
                    empty: f32::NEG_INFINITY,
                }),
            },
            bounds: Bounds {
                batch: sequences,
                total_q: total_q as u64,
                max_q: lengths.max_q.min(total_q) as u64,
                max_kv: lengths.max_k.min(if pages.is_some() { usize::MAX } else { page_tokens }) as u64,
            },
            expected: Expected::default(),
        };
        settings.side.with(&place, |side| {
            let call = Ragged { mask: settings.mask, scale: settings.scale, ..Ragged::new(batch) };
            let call = settings.side.program.map_or(call, |program| call.with_program(program, *side));
            // SAFETY: addresses and layouts are those of tensors that are borrowed until the launch is in the stream,
            // behind which candle frees them; results are new memory, so nothing overlaps; the stream is of the
            // engine's context. First rows were checked on the host processor, and are the caller's word on a GPU.
            Ok(unsafe { engine.forward_ragged(&call, place.stream())? })
        })?;
    }
    Ok((tensor(o, o_shape), lse.map(|lse| tensor(lse, rows))))
}

/// The same by one dense call for each sequence, whose gradients candle then puts together. Reads the lengths on the
/// host.
fn by_sequences(
    [q, k, v]: [&Tensor; 3],
    lengths: &Lengths<'_>,
    settings: &Settings,
    wants_lse: bool,
) -> candle_core::Result<(Tensor, Option<Tensor>)> {
    let sums = |t: &Tensor| t.to_dtype(DType::I64)?.to_vec1::<i64>();
    let (of_q, of_k) = (sums(lengths.q)?, sums(lengths.k)?);
    if of_q.first() != Some(&0) || of_q.last() != Some(&(q.dims()[0] as i64)) {
        let expected = "with gradients every row of q belongs to a sequence";
        return Err(
            Error::tensor("seqlens_q", "values", of_q, expected, "begin with 0 and end with the rows of q").into()
        );
    }
    let (mut outputs, mut logs) = (Vec::new(), Vec::new());
    for (i, (q_ends, k_ends)) in of_q.windows(2).zip(of_k.windows(2)).enumerate() {
        let part = |t: &Tensor, ends: &[i64]| t.narrow(0, ends[0] as usize, (ends[1] - ends[0]) as usize)?.unsqueeze(0);
        if q_ends[0] == q_ends[1] {
            continue;
        }
        let mut settings = settings.clone();
        settings.side = settings.side.of_sequence(i)?;
        let parts = [part(q, q_ends)?, part(k, k_ends)?, part(v, k_ends)?];
        let (o, lse) = dense::forward(parts.each_ref(), settings, wants_lse)?;
        outputs.push(o.squeeze(0)?);
        logs.extend(lse.map(|lse| lse.squeeze(0)).transpose()?);
    }
    if outputs.is_empty() {
        let (_, heads, _) = q.dims3()?;
        let o = Tensor::zeros((0, heads, v.dim(2)?), q.dtype(), q.device())?;
        let lse = Tensor::zeros((heads, 0), DType::F32, q.device())?;
        return Ok((o, wants_lse.then_some(lse)));
    }
    let lse = if wants_lse { Some(Tensor::cat(&logs, 1)?) } else { None };
    Ok((Tensor::cat(&outputs, 0)?, lse))
}

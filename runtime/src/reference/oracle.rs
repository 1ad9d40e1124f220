//! Attention in fp64: the definition that every kernel is measured against.

use super::HostTensor;
use flashtune_codegen::score::{At, Bound, Precision, Program, SideData};
use flashtune_codegen::{DropoutMask, Mask, Shape};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rayon::prelude::*;
use std::ops::Range;

/// One row of O.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RowId {
    /// Sequence.
    pub batch: u32,
    /// Query head.
    pub head: u32,
    /// Query row.
    pub row: u32,
}

/// Results of some rows of attention.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Rows {
    /// Which rows, ascending.
    pub ids: Vec<RowId>,
    /// Length of a row of O.
    pub dim: usize,
    /// O, `ids.len()` rows of `dim`.
    pub o: Vec<f64>,
    /// Natural log-sum-exp per row.
    pub lse: Vec<f64>,
    /// What the errors of a row scale with.
    pub scales: Vec<RowScale>,
}

/// Magnitudes of the sums that make up one row, which bound the rounding errors of any way to compute them.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct RowScale {
    /// Keys that the row attends to.
    pub live: u64,
    /// Products that a score sums: the head dim of Q and K.
    pub terms: u64,
    /// Largest `|scale| * sum |q * k|` over the live keys.
    pub score: f64,
    /// Largest `sum p * |v|` over the elements of the row.
    pub output: f64,
    /// Of a gradient, what a rounding of every element of O by epsilon makes of the row: kernels are given O as it is
    /// stored.
    pub by_o: f64,
    /// Of an emulation of e4m3, what sums of the tensor cores may lose of the log-sum-exp.
    pub by_sums: f64,
}

/// Every row of a shape, in `[batch, heads, rows]` order.
pub fn all_rows(shape: &Shape) -> Vec<RowId> {
    let mut ids = Vec::new();
    for batch in 0..shape.batch {
        for head in 0..shape.heads {
            ids.extend((0..shape.q_len).map(|row| RowId { batch, head, row }));
        }
    }
    ids
}

/// At most about `count` rows: all of them when there are no more, otherwise the first and last rows of the first and
/// last head, and runs of neighbouring rows at random places. The same for the same seed.
pub fn sample_rows(shape: &Shape, count: usize, seed: u64) -> Vec<RowId> {
    const RUN: u32 = 4;
    let Shape { batch, heads, q_len, .. } = *shape;
    let total = batch as u64 * heads as u64 * q_len as u64;
    if total <= count as u64 {
        return all_rows(shape);
    }
    let mut rng = StdRng::seed_from_u64(seed);
    let mut ids = std::collections::BTreeSet::new();
    let mut run = |batch, head, first: u32| {
        ids.extend((first..q_len.min(first + RUN)).map(|row| RowId { batch, head, row }));
        ids.len() < count
    };
    let end = q_len.saturating_sub(RUN);
    run(0, 0, 0);
    run(0, 0, end);
    run(batch - 1, heads - 1, 0);
    run(batch - 1, heads - 1, end);
    // Runs overlap, and short heads give short ones: the loop is bounded by attempts, not only by what it found.
    for _ in 0..count {
        let (b, h) = (rng.random_range(0..batch), rng.random_range(0..heads));
        if !run(b, h, rng.random_range(0..q_len)) {
            break;
        }
    }
    ids.into_iter().collect()
}

/// What is computed beside the products: the mask, the scale, and the score program with what it reads.
#[derive(Debug, Clone, Copy)]
pub struct Attention<'a> {
    /// The mask.
    pub mask: Mask,
    /// The softmax scale.
    pub scale: f32,
    /// A score program with its side data, checked against the sizes ([`SideData::check`]).
    pub program: Option<(&'a Program, &'a SideData)>,
    /// What the program takes the tensors' first sequence for: that of a larger batch, of which these are a part.
    pub sequence: u32,
    /// Which scores are dropped, if any.
    pub dropout: Option<DropoutMask>,
}

impl Attention<'_> {
    /// What the weight of a query and a key is multiplied by, of tensors with so many query heads.
    pub(super) fn factor(&self, heads: u32, batch: u32, head: u32, query: u32, key: u32) -> f64 {
        let pair = (self.sequence + batch).wrapping_mul(heads).wrapping_add(head);
        self.dropout.map_or(1.0, |mask| mask.factor(pair, query, key))
    }
}

/// [`oracle_of`] without a score program.
///
/// # Panics
/// As [`oracle_of`].
pub fn oracle(q: &HostTensor, k: &HostTensor, v: &HostTensor, mask: Mask, scale: f32, ids: &[RowId]) -> Rows {
    oracle_of(q, k, v, &Attention { mask, scale, program: None, sequence: 0, dropout: None }, ids)
}

/// The sizes of a call, from its tensors.
pub(super) fn sizes(q: &HostTensor, k: &HostTensor, mask: Mask) -> Shape {
    let ([batch, heads, q_len, _], [_, kv_heads, kv_len, _]) = (q.shape(), k.shape());
    let [batch, heads, kv_heads, q_len, kv_len] = [batch, heads, kv_heads, q_len, kv_len].map(|n| n as u32);
    Shape { batch, heads, kv_heads, q_len, kv_len, mask }
}

/// Attention in fp64 for some rows (ascending). Q is `[batch, heads, q_len, dim]`, K and V have `kv_heads` heads.
///
/// A row with nothing to attend to gives O = 0 and LSE = -inf (or that of its sink). What is masked is never read. A
/// program that makes every score of a row -inf masks the row.
///
/// # Panics
/// When the tensors' shapes do not belong together or an id is out of range.
pub fn oracle_of(q: &HostTensor, k: &HostTensor, v: &HostTensor, attention: &Attention<'_>, ids: &[RowId]) -> Rows {
    let Attention { mask, scale, program, sequence, dropout } = *attention;
    let sizes = sizes(q, k, mask);
    let [_, heads, q_len, dim_qk] = q.shape();
    let [_, kv_heads, kv_len, dim_v] = v.shape();
    let group = heads.checked_div(kv_heads).unwrap_or(1).max(1);
    let mut o = vec![0.0; ids.len() * dim_v];
    let mut lse = vec![f64::NEG_INFINITY; ids.len()];
    let mut scales = vec![RowScale::default(); ids.len()];

    // Rows that share K and V are computed together, so that one head of both is converted at a time.
    for part in runs(ids, |id| (id.batch, id.head as usize / group)) {
        let first = ids[part.start];
        let at = (first.batch as usize, first.head as usize / group);
        let live = |id: &RowId| mask.live(id.row as u64, q_len as u64, kv_len as u64);
        let used = ids[part.clone()].iter().map(live).filter(|l| !l.is_empty());
        // Without any key a row may still have a sink.
        let used = used.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)).unwrap_or(0..0);
        let keys = head_rows(k, at, &used);
        let values = head_rows(v, at, &used);
        (o[part.start * dim_v..part.end * dim_v].par_chunks_exact_mut(dim_v.max(1)))
            .zip(&mut lse[part.clone()])
            .zip(&mut scales[part.clone()])
            .zip(&ids[part.clone()])
            .for_each(|(((o, lse), scales), id)| {
                let live = live(id);
                let mut bound = program.map(|(p, data)| Bound::of_checked(p, &sizes, data, Precision::F64));
                let sink = bound.as_mut().and_then(|b| b.sink(sequence + id.batch, id.head, id.row));
                if live.is_empty() {
                    *lse = sink.unwrap_or(f64::NEG_INFINITY);
                    return;
                }
                let rows = (live.start - used.start) as usize..(live.end - used.start) as usize;
                let mut row = vec![0.0f32; dim_qk];
                q.read_row([id.batch as usize, id.head as usize, id.row as usize], &mut row);
                let row: Vec<f64> = row.into_iter().map(f64::from).collect();
                let keys = &keys[rows.start * dim_qk..rows.end * dim_qk];
                let values = &values[rows.start * dim_v..rows.end * dim_v];
                let mut change = |j: usize, score: f64| match &mut bound {
                    None => Some(score),
                    Some(bound) => {
                        let at = At { b: sequence + id.batch, h: id.head, q: id.row, kv: live.start as u32 + j as u32 };
                        bound.visible(at).then(|| bound.score(at, score))
                    }
                };
                let factor = |j: usize| match dropout {
                    None => 1.0,
                    Some(_) => attention.factor(sizes.heads, id.batch, id.head, id.row, live.start as u32 + j as u32),
                };
                let rest = Rest { sink, masks: program.is_some(), factor: &factor };
                *lse = attend(&row, keys, values, scale as f64, &mut change, rest, o, scales);
            });
    }
    Rows { ids: ids.to_vec(), dim: dim_v, o, lse, scales }
}

/// What becomes of a row beside its scores.
struct Rest<'a> {
    sink: Option<f64>,
    /// Whether scores of -inf all over a row mask it.
    masks: bool,
    /// What dropout multiplies the weight of a key by.
    factor: &'a dyn Fn(usize) -> f64,
}

/// One row: softmax of the scores times V. `change` turns the score of a key into what the softmax takes, or masks it.
/// Returns the log-sum-exp.
#[allow(clippy::too_many_arguments, reason = "one call of one function, split off for its length")]
fn attend(
    q: &[f64],
    keys: &[f64],
    values: &[f64],
    scale: f64,
    change: &mut impl FnMut(usize, f64) -> Option<f64>,
    Rest { sink, masks, factor }: Rest<'_>,
    o: &mut [f64],
    scales: &mut RowScale,
) -> f64 {
    let mut scores: Vec<Option<f64>> = Vec::with_capacity(keys.len() / q.len().max(1));
    for (j, key) in keys.chunks_exact(q.len()).enumerate() {
        let (dot, magnitude) = dot(q, key);
        let score = change(j, dot * scale);
        scores.push(score);
        if let Some(score) = score {
            // Where a program made a score larger, its roundings grew with it. Infinities are not rounded.
            let numbers = [magnitude * scale.abs(), score.abs()].into_iter().filter(|x| x.is_finite());
            scales.score = numbers.fold(scales.score, f64::max);
        }
    }
    // `max` skips NaN; a NaN score then turns the sum and all of the row into NaN, as it must.
    let max = scores.iter().flatten().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
    let visible = || scores.iter().flatten();
    if max == f64::NEG_INFINITY && (visible().next().is_none() || masks && !visible().any(|s| s.is_nan())) {
        return max;
    }
    let mut sum = sink.map_or(0.0, |s| (s - max).exp());
    for s in scores.iter_mut().flatten() {
        *s = (*s - max).exp();
        sum += *s;
    }
    let mut magnitude = vec![0.0; o.len()];
    for (j, (p, value)) in scores.iter().zip(values.chunks_exact(o.len())).enumerate() {
        let Some(p) = p.map(|p| p * factor(j)) else { continue };
        for ((o, m), v) in o.iter_mut().zip(&mut magnitude).zip(value) {
            *o += p * v;
            *m += (p * v).abs();
        }
    }
    o.iter_mut().for_each(|o| *o /= sum);
    scales.live = scores.iter().flatten().count() as u64;
    scales.terms = q.len() as u64;
    scales.output = magnitude.into_iter().fold(0.0, f64::max) / sum;
    max + sum.ln()
}

/// Sum of products and sum of their magnitudes; four independent sums each, which the compiler turns into vectors.
fn dot(a: &[f64], b: &[f64]) -> (f64, f64) {
    let (mut sums, mut magnitudes) = ([0.0; 4], [0.0; 4]);
    let (a4, a) = a.as_chunks::<4>();
    let (b4, b) = b.as_chunks::<4>();
    for (a, b) in a4.iter().zip(b4) {
        for i in 0..4 {
            let product = a[i] * b[i];
            sums[i] += product;
            magnitudes[i] += product.abs();
        }
    }
    for (a, b) in a.iter().zip(b) {
        sums[0] += a * b;
        magnitudes[0] += (a * b).abs();
    }
    (sums.iter().sum(), magnitudes.iter().sum())
}

/// Some rows of one head of K or V, as fp64.
fn head_rows(t: &HostTensor, (batch, head): (usize, usize), rows: &Range<u64>) -> Vec<f64> {
    let dim = t.shape()[3];
    let mut out = vec![0.0f64; (rows.end - rows.start) as usize * dim];
    let mut row = vec![0.0f32; dim];
    for (out, s) in out.chunks_exact_mut(dim.max(1)).zip(rows.clone()) {
        t.read_row([batch, head, s as usize], &mut row);
        for (o, x) in out.iter_mut().zip(&row) {
            *o = *x as f64;
        }
    }
    out
}

/// Ranges of neighbours with the same key.
pub(super) fn runs<K: PartialEq>(ids: &[RowId], key: impl Fn(&RowId) -> K) -> Vec<Range<usize>> {
    let mut out: Vec<Range<usize>> = Vec::new();
    for part in ids.chunk_by(|a, b| key(a) == key(b)) {
        let start = out.last().map_or(0, |r| r.end);
        out.push(start..start + part.len());
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Distribution, Layout};
    use flashtune_codegen::DType;

    fn tensor(shape: [usize; 4], values: &[f32]) -> HostTensor {
        HostTensor::from_values(DType::F32, shape, Layout::Bhsd, values).unwrap()
    }

    fn rows(n: u32) -> Vec<RowId> {
        (0..n).map(|row| RowId { batch: 0, head: 0, row }).collect()
    }

    fn near(a: f64, b: f64) -> bool {
        (a - b).abs() < 1e-12
    }

    #[test]
    fn two_keys_by_hand() {
        // Scores 0 and ln 3: weights 1/4 and 3/4.
        let q = tensor([1, 1, 1, 2], &[1.0, 0.0]);
        let k = tensor([1, 1, 2, 2], &[0.0, 5.0, 2.0, 7.0]);
        let v = tensor([1, 1, 2, 1], &[8.0, 4.0]);
        let scale = 3f64.ln() / 2.0;
        let r = oracle(&q, &k, &v, Mask::Full, scale as f32, &rows(1));
        let p = (2.0 * scale as f32 as f64).exp();
        assert!(near(r.o[0], (8.0 + 4.0 * p) / (1.0 + p)), "{r:?}");
        assert!((r.o[0] - 5.0).abs() < 1e-6 && near(r.lse[0], (1.0 + p).ln()));
        assert_eq!(r.scales[0].live, 2);
        assert!(near(r.scales[0].score, 2.0 * scale as f32 as f64));
    }

    #[test]
    fn causal_rows_see_their_prefix_and_empty_rows_give_zero() {
        // All scores equal: O is the mean of the visible values.
        let q = tensor([1, 1, 4, 1], &[0.0; 4]);
        let k = tensor([1, 1, 2, 1], &[1.0; 2]);
        let v = tensor([1, 1, 2, 1], &[2.0, 6.0]);
        let r = oracle(&q, &k, &v, Mask::Causal, 1.0, &rows(4));
        assert_eq!(r.o, [0.0, 0.0, 2.0, 4.0]);
        assert_eq!(r.lse[..2], [f64::NEG_INFINITY; 2]);
        assert!(r.lse[2] == 0.0 && near(r.lse[3], 2f64.ln()));
    }

    #[test]
    fn masked_nan_and_inf_are_not_read_and_visible_ones_are() {
        let q = tensor([1, 1, 3, 1], &[1.0; 3]);
        let k = tensor([1, 1, 3, 1], &[0.0, 0.0, f32::NAN]);
        let v = tensor([1, 1, 3, 1], &[1.0, f32::INFINITY, 1.0]);
        let r = oracle(&q, &k, &v, Mask::Causal, 1.0, &rows(3));
        assert_eq!(r.o[0], 1.0);
        assert_eq!(r.o[1], f64::INFINITY);
        assert!(r.o[2].is_nan() && r.lse[2].is_nan() && r.lse[1].is_finite());
    }

    #[test]
    fn grouped_heads_layouts_and_row_subsets_agree_with_the_whole() {
        let make =
            |h, s, seed, layout| HostTensor::random(DType::F32, [2, h, s, 8], layout, seed, Distribution::Normal);
        let mask = Mask::Window { left: Some(4), right: Some(1) };
        let shape = Shape { batch: 2, heads: 4, kv_heads: 2, q_len: 9, kv_len: 11, mask };
        let all = all_rows(&shape);
        let q = make(4, 9, 1, Layout::Bshd);
        let (k, v) = (make(2, 11, 2, Layout::Padded), make(2, 11, 3, Layout::Bhsd));
        let whole = oracle(&q, &k, &v, mask, 0.3, &all);
        let some: Vec<RowId> = all.iter().copied().step_by(5).collect();
        let part = oracle(&q, &k, &v, mask, 0.3, &some);
        for (i, id) in some.iter().enumerate() {
            let j = all.iter().position(|a| a == id).unwrap();
            assert_eq!(part.o[i * 8..][..8], whole.o[j * 8..][..8]);
            assert_eq!(part.lse[i], whole.lse[j]);
        }
        // Heads 2 and 3 share KV head 1: with the same Q they give the same rows.
        let mut same = q.clone();
        let mut row = [0.0; 8];
        q.read_row([1, 2, 4], &mut row);
        same.write_row([1, 3, 4], &row);
        let ids = [2, 3].map(|head| RowId { batch: 1, head, row: 4 });
        let r = oracle(&same, &k, &v, mask, 0.3, &ids);
        assert_eq!(r.o[..8], r.o[8..]);
    }

    #[test]
    fn samples_are_ascending_distinct_and_hold_the_corners() {
        let shape = Shape { batch: 3, heads: 5, kv_heads: 5, q_len: 1000, kv_len: 10, mask: Mask::Full };
        let ids = sample_rows(&shape, 100, 7);
        assert!(ids.is_sorted_by(|a, b| a < b) && (90..110).contains(&ids.len()), "{}", ids.len());
        assert_eq!(ids[0], RowId { batch: 0, head: 0, row: 0 });
        assert_eq!(ids[ids.len() - 1], RowId { batch: 2, head: 4, row: 999 });
        assert_eq!(ids, sample_rows(&shape, 100, 7));
        assert_eq!(sample_rows(&Shape { q_len: 2, ..shape }, 100, 7).len(), 30);
        assert!(sample_rows(&Shape { q_len: 0, ..shape }, 100, 7).is_empty());
    }
}

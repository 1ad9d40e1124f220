//! Attention the unfused way, in the problem's dtype: three passes over a matrix of scores in memory, each result
//! rounded to the dtype, as frameworks compute it without a fused kernel.
//!
//! Its error is the yardstick for fused kernels (they may have at most twice of it), and on the CPU its time is what
//! `tune` and `bench` compare with.

use super::host::{encode, round_to};
use super::oracle::{RowScale, runs, sizes};
use super::{Attention, HostTensor, Layout, RowId, Rows};
use crate::cpu::{Packed, matmul, softmax};
use flashtune_codegen::score::{At, Bound, Precision};
use flashtune_codegen::{DType, Mask, Shape};
use rayon::prelude::*;

/// Rows that are multiplied together.
const BLOCK: usize = 48;

/// Unfused attention of everything, on all cores. The result is contiguous `[batch, heads, q_len, head_dim_v]`.
///
/// # Panics
/// When the tensors' shapes do not belong together.
pub fn unfused(q: &HostTensor, k: &HostTensor, v: &HostTensor, mask: Mask, scale: f32) -> HostTensor {
    let dtype = q.dtype();
    let [batch, heads, q_len, dim_qk] = q.shape();
    let [_, kv_heads, _, dim_v] = v.shape();
    let mut o = HostTensor::zeros(dtype, [batch, heads, q_len, dim_v], Layout::Bhsd);
    let group = heads.checked_div(kv_heads).unwrap_or(1).max(1);
    let attention = Attention { mask, scale, program: None, sequence: 0, dropout: None };
    let sizes = sizes(q, k, mask);
    let size = dtype.bytes();
    if batch * heads * q_len * dim_v == 0 {
        return o;
    }
    // One head of K and V is packed once for the query heads that share it.
    let group_bytes = group * q_len * dim_v * size;
    o.bytes_mut().par_chunks_exact_mut(group_bytes).enumerate().for_each(|(i, out)| {
        let at = (i / kv_heads, i % kv_heads);
        let pair = KvPair::pack(k, v, at);
        out.par_chunks_exact_mut(q_len * dim_v * size).enumerate().for_each(|(g, out)| {
            let head = at.1 * group + g;
            out.par_chunks_mut(BLOCK * dim_v * size).enumerate().for_each_init(Vec::new, |weights, (j, out)| {
                let first = j * BLOCK;
                let rows: Vec<usize> = (first..first + out.len() / (dim_v * size)).collect();
                let mut block = vec![0.0; rows.len() * dim_qk];
                gather(q, (at.0, head), &rows, &mut block);
                let id = |row: &usize| RowId { batch: at.0 as u32, head: head as u32, row: *row as u32 };
                let ids: Vec<RowId> = rows.iter().map(id).collect();
                let (values, _) = pair.attend(&block, &ids, &sizes, &attention, dtype, weights);
                encode(dtype, &values, out);
            });
        });
    });
    o
}

/// [`unfused_rows_of`] without a score program.
///
/// # Panics
/// As [`unfused_rows_of`].
pub fn unfused_rows(q: &HostTensor, k: &HostTensor, v: &HostTensor, mask: Mask, scale: f32, ids: &[RowId]) -> Rows {
    unfused_rows_of(q, k, v, &Attention { mask, scale, program: None, sequence: 0, dropout: None }, ids)
}

/// Unfused attention of some rows (ascending), with its log-sum-exp in fp32.
///
/// # Panics
/// When the tensors' shapes do not belong together.
pub fn unfused_rows_of(
    q: &HostTensor,
    k: &HostTensor,
    v: &HostTensor,
    attention: &Attention<'_>,
    ids: &[RowId],
) -> Rows {
    let sizes = sizes(q, k, attention.mask);
    let [_, heads, _, dim_qk] = q.shape();
    let [_, kv_heads, _, dim_v] = v.shape();
    let group = heads.checked_div(kv_heads).unwrap_or(1).max(1);
    let parts: Vec<(Vec<f32>, Vec<f32>)> = runs(ids, |id| (id.batch, id.head as usize / group))
        .into_par_iter()
        .map(|part| {
            let ids = &ids[part];
            let (batch, kv_head) = (ids[0].batch as usize, ids[0].head as usize / group);
            let pair = KvPair::pack(k, v, (batch, kv_head));
            let blocks: Vec<_> = ids
                .par_chunks(BLOCK)
                .map(|ids| {
                    let mut block = vec![0.0; ids.len() * dim_qk];
                    for (id, row) in ids.iter().zip(block.chunks_exact_mut(dim_qk.max(1))) {
                        q.read_row([batch, id.head as usize, id.row as usize], row);
                    }
                    pair.attend(&block, ids, &sizes, attention, q.dtype(), &mut Vec::new())
                })
                .collect();
            blocks.into_iter().fold((Vec::new(), Vec::new()), |(mut o, mut lse), (block_o, block_lse)| {
                o.extend(block_o);
                lse.extend(block_lse);
                (o, lse)
            })
        })
        .collect();
    let mut out = Rows {
        ids: ids.to_vec(),
        dim: dim_v,
        o: Vec::with_capacity(ids.len() * dim_v),
        lse: Vec::with_capacity(ids.len()),
        scales: vec![RowScale::default(); ids.len()],
    };
    for (o, lse) in parts {
        out.o.extend(o.into_iter().map(f64::from));
        out.lse.extend(lse.into_iter().map(f64::from));
    }
    out
}

/// One head of K and V, ready to be multiplied.
struct KvPair {
    keys: Packed,
    values: Packed,
    /// Rows of V, to give masked infinities no say (0 * Inf): unfused attention multiplies them by weight 0.
    finite: bool,
    plain_values: Vec<f32>,
    kv_len: usize,
    dim_v: usize,
}

impl KvPair {
    fn pack(k: &HostTensor, v: &HostTensor, at: (usize, usize)) -> Self {
        let [_, _, kv_len, dim_qk] = k.shape();
        let dim_v = v.shape()[3];
        let rows: Vec<usize> = (0..kv_len).collect();
        let mut keys = vec![0.0; kv_len * dim_qk];
        gather(k, at, &rows, &mut keys);
        let mut values = vec![0.0; kv_len * dim_v];
        gather(v, at, &rows, &mut values);
        Self {
            keys: Packed::transposed(&keys, kv_len, dim_qk),
            values: Packed::rows(&values, kv_len, dim_v),
            finite: values.iter().all(|x| x.is_finite()),
            plain_values: values,
            kv_len,
            dim_v,
        }
    }

    /// Rows of O and their log-sum-exp for rows of Q (fp32, already in the dtype's precision). `weights` is memory to
    /// work in, kept from block to block.
    fn attend(
        &self,
        q: &[f32],
        rows: &[RowId],
        sizes: &Shape,
        attention: &Attention<'_>,
        dtype: DType,
        weights: &mut Vec<f32>,
    ) -> (Vec<f32>, Vec<f32>) {
        let Attention { mask, scale, program, sequence, dropout } = *attention;
        let q_len = sizes.q_len as usize;
        let mut bound = program.map(|(p, data)| Bound::of_checked(p, sizes, data, Precision::F32));
        let n = self.kv_len;
        let mut q: Vec<f32> = q.iter().map(|x| x * scale).collect();
        round_to(dtype, &mut q);
        weights.clear();
        weights.resize(rows.len() * n, 0.0);
        matmul(&q, &self.keys, weights);
        round_to(dtype, weights);
        let mut lse = vec![f32::NEG_INFINITY; rows.len()];
        for ((row, weights), lse) in rows.iter().zip(weights.chunks_exact_mut(n.max(1))).zip(&mut lse) {
            let live = mask.live(row.row as u64, q_len as u64, n as u64);
            let (start, end) = (live.start as usize, live.end as usize);
            weights[..start].fill(0.0);
            weights[end.max(start)..].fill(0.0);
            let sink = bound.as_mut().and_then(|b| b.sink(sequence + row.batch, row.head, row.row));
            let scores = &mut weights[start..end.max(start)];
            if let Some(bound) = &mut bound {
                for (j, score) in scores.iter_mut().enumerate() {
                    let at = At { b: sequence + row.batch, h: row.head, q: row.row, kv: (start + j) as u32 };
                    *score = match bound.visible(at) {
                        true => bound.score(at, *score as f64) as f32,
                        false => f32::NEG_INFINITY,
                    };
                }
                round_to(dtype, scores);
            }
            if scores.is_empty() || bound.is_some() && scores.iter().all(|s| *s == f32::NEG_INFINITY) {
                scores.fill(0.0);
                *lse = sink.map_or(f32::NEG_INFINITY, |s| s as f32);
                continue;
            }
            *lse = softmax(scores);
            if let Some(sink) = sink {
                let all = lse.max(sink as f32) + (-(*lse - sink as f32).abs()).exp().ln_1p();
                let part = (*lse - all).exp();
                scores.iter_mut().for_each(|p| *p *= part);
                *lse = all;
            }
            for (j, p) in scores.iter_mut().enumerate().take_while(|_| dropout.is_some()) {
                *p *= attention.factor(sizes.heads, row.batch, row.head, row.row, (start + j) as u32) as f32;
            }
        }
        round_to(dtype, weights);
        let mut o = vec![0.0; rows.len() * self.dim_v];
        if self.finite {
            matmul(weights, &self.values, &mut o);
        } else {
            self.multiply_live(weights, rows, q_len, mask, program.is_some(), &mut o);
        }
        round_to(dtype, &mut o);
        (o, lse)
    }

    /// As the multiplication by V, but masked rows of V are not touched; with `skip` nor are those of weight 0.
    fn multiply_live(&self, weights: &[f32], rows: &[RowId], q_len: usize, mask: Mask, skip: bool, o: &mut [f32]) {
        let n = self.kv_len;
        for ((row, weights), o) in rows.iter().zip(weights.chunks_exact(n)).zip(o.chunks_exact_mut(self.dim_v)) {
            for j in mask.live(row.row as u64, q_len as u64, n as u64) {
                let j = j as usize;
                if skip && weights[j] == 0.0 {
                    continue;
                }
                for (o, v) in o.iter_mut().zip(&self.plain_values[j * self.dim_v..]) {
                    *o += weights[j] * v;
                }
            }
        }
    }
}

/// Rows of one head as fp32.
fn gather(t: &HostTensor, (batch, head): (usize, usize), rows: &[usize], out: &mut [f32]) {
    let dim = t.shape()[3];
    for (row, out) in rows.iter().zip(out.chunks_exact_mut(dim.max(1))) {
        t.read_row([batch, head, *row], out);
    }
}

#[cfg(test)]
mod tests {
    use super::super::host::decode;
    use super::super::{all_rows, oracle};
    use super::*;
    use crate::Distribution;

    fn error(dtype: DType, mask: Mask, q_len: usize, kv_len: usize) -> f64 {
        let make = |h, s, d, seed| HostTensor::random(dtype, [2, h, s, d], Layout::Bshd, seed, Distribution::Normal);
        let (q, k, v) = (make(4, q_len, 24, 1), make(2, kv_len, 24, 2), make(2, kv_len, 40, 3));
        let shape = Shape { batch: 2, heads: 4, kv_heads: 2, q_len: q_len as u32, kv_len: kv_len as u32, mask };
        let ids = all_rows(&shape);
        let want = oracle(&q, &k, &v, mask, 0.2, &ids);
        let got = unfused_rows(&q, &k, &v, mask, 0.2, &ids);
        let whole: Vec<f64> = unfused(&q, &k, &v, mask, 0.2).values().into_iter().map(f64::from).collect();
        assert_eq!(got.o, whole, "rows and the whole are the same computation");
        for (a, b) in got.lse.iter().zip(&want.lse) {
            assert!(a == b || (a - b).abs() < 16.0 * dtype.epsilon(), "{a} {b}");
        }
        got.o.iter().zip(&want.o).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
    }

    #[test]
    fn its_error_is_that_of_the_dtype() {
        let window = Mask::Window { left: Some(9), right: Some(2) };
        for (mask, q_len, kv_len) in
            [(Mask::Full, 70, 33), (Mask::Causal, 50, 70), (Mask::Causal, 60, 30), (window, 64, 64)]
        {
            for dtype in DType::ALL {
                let e = error(dtype, mask, q_len, kv_len);
                assert!(e < 8.0 * dtype.epsilon() && e > 0.0, "{dtype} {mask}: {e}");
            }
        }
        assert_eq!(error(DType::F32, Mask::Full, 5, 0), 0.0);
    }

    #[test]
    fn masked_infinities_stay_masked() {
        let make = |values: &[f32]| HostTensor::from_values(DType::F32, [1, 1, 3, 1], Layout::Bhsd, values).unwrap();
        let (q, k) = (make(&[1.0; 3]), make(&[0.0; 3]));
        let v = make(&[1.0, 3.0, f32::INFINITY]);
        assert_eq!(unfused(&q, &k, &v, Mask::Causal, 1.0).values(), [1.0, 2.0, f32::INFINITY]);
    }

    #[test]
    fn decode_and_encode_are_inverse() {
        for dtype in DType::ALL {
            let values = [1.5f32, -0.25, f32::INFINITY, 0.0];
            let mut bytes = vec![0; 4 * dtype.bytes()];
            encode(dtype, &values, &mut bytes);
            let mut back = [0.0; 4];
            decode(dtype, &bytes, &mut back);
            assert_eq!(values, back);
        }
    }
}

//! Some rows of the gradients at sizes of which nobody computes all: by what a backward pass is given, O and the
//! log-sum-exp among it, which therefore need not be those of Q, K and V.

use super::gradients::head;
use super::{HostTensor, RowId, sample_rows};
use flashtune_codegen::{DType, DropoutMask, Mask, Shape};
use rayon::prelude::*;

/// What a backward pass reads.
#[derive(Debug, Clone, Copy)]
pub struct GivenGradients<'a> {
    /// Q, `[batch, heads, q_len, dim]`.
    pub q: &'a HostTensor,
    /// K, `[batch, kv_heads, kv_len, dim]`.
    pub k: &'a HostTensor,
    /// V, `[batch, kv_heads, kv_len, dim_v]`.
    pub v: &'a HostTensor,
    /// O, `[batch, heads, q_len, dim_v]`.
    pub o: &'a HostTensor,
    /// The loss's gradient by O, of its shape.
    pub dout: &'a HostTensor,
    /// The log-sum-exp, `[batch, heads, q_len]`.
    pub lse: &'a [f32],
    /// The mask.
    pub mask: Mask,
    /// The factor of the scores.
    pub scale: f32,
    /// What the forward pass dropped.
    pub dropout: Option<DropoutMask>,
}

/// A row of a gradient in fp64.
#[derive(Debug, Clone, PartialEq)]
pub struct GradientRow {
    /// Which.
    pub id: RowId,
    /// Its elements.
    pub values: Vec<f64>,
    /// How far a kernel may be from each: roundings of P, dS and the result, and what fp32 loses. Roundings of the
    /// terms are independent, so they add up as squares.
    pub bounds: Vec<f64>,
}

/// Rows of dQ, dK and dV.
#[derive(Debug, Clone, PartialEq)]
pub struct GradientSample {
    /// Rows of dQ, of dK, and of dV.
    pub rows: [Vec<GradientRow>; 3],
}

/// Multiply-adds that a sample may cost for each gradient.
const WORK: f64 = 1e9;

/// Sums, their squares and their magnitudes.
struct Sum {
    values: Vec<f64>,
    squares: Vec<f64>,
    magnitudes: Vec<f64>,
    score: f64,
}

impl Sum {
    fn new(dim: usize) -> Self {
        Self { values: vec![0.0; dim], squares: vec![0.0; dim], magnitudes: vec![0.0; dim], score: 0.0 }
    }

    /// `x` times a row; `magnitude` is that of the terms of `x`.
    fn add(&mut self, x: f64, magnitude: f64, score: f64, row: &[f64]) {
        self.score = self.score.max(score.abs());
        for (i, y) in row.iter().enumerate() {
            self.values[i] += x * y;
            self.squares[i] += (x * y).powi(2);
            self.magnitudes[i] += (magnitude * y).abs();
        }
    }

    fn row(self, id: RowId, dtype: DType) -> GradientRow {
        let (rounding, fp32) = (dtype.epsilon(), f64::from(f32::EPSILON) * (16.0 + 2.0 * self.score));
        let bound = |i: usize| {
            rounding * (self.values[i].abs() + 4.0 * self.squares[i].sqrt())
                + fp32 * self.magnitudes[i]
                + 1e-6 * rounding
        };
        let bounds = (0..self.values.len()).map(bound).collect();
        GradientRow { id, values: self.values, bounds }
    }
}

/// A query and a key that it sees.
struct Pair {
    score: f64,
    p: f64,
    /// What dropout multiplies the weight by.
    factor: f64,
    ds: f64,
    magnitude: f64,
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn sum_of_magnitudes(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (a * b).abs()).sum()
}

/// Rows of one head.
struct Head {
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    o: Vec<f64>,
    dout: Vec<f64>,
    lse: Vec<f64>,
    dims: [usize; 2],
    scale: f64,
    dropout: Option<DropoutMask>,
    /// Of a sequence and a head, as dropout counts them.
    pair: u32,
}

impl Head {
    fn new(given: &GivenGradients<'_>, batch: u32, h: u32) -> Self {
        let [_, heads, rows, dim] = given.q.shape();
        let group = (heads / given.k.shape()[1].max(1)).max(1) as u32;
        let (of_q, of_kv) = ([batch, h], [batch, h / group]);
        let first = (batch as usize * heads + h as usize) * rows;
        Self {
            q: head(given.q, of_q),
            k: head(given.k, of_kv),
            v: head(given.v, of_kv),
            o: head(given.o, of_q),
            dout: head(given.dout, of_q),
            lse: given.lse[first..first + rows].iter().map(|x| f64::from(*x)).collect(),
            dims: [dim, given.v.shape()[3]],
            scale: given.scale.into(),
            dropout: given.dropout,
            pair: batch * heads as u32 + h,
        }
    }

    fn row<'a>(&self, of: &'a [f64], i: usize, v: bool) -> &'a [f64] {
        let dim = self.dims[usize::from(v)];
        &of[i * dim..][..dim]
    }

    /// D of a query with the magnitude of its terms.
    fn delta(&self, i: usize) -> [f64; 2] {
        let (dout, o) = (self.row(&self.dout, i, true), self.row(&self.o, i, true));
        [dot(dout, o), sum_of_magnitudes(dout, o)]
    }

    fn pair(&self, i: usize, j: usize, [delta, of_delta]: [f64; 2]) -> Pair {
        let score = self.scale * dot(self.row(&self.q, i, false), self.row(&self.k, j, false));
        let p = if self.lse[i] == f64::NEG_INFINITY { 0.0 } else { (score - self.lse[i]).exp() };
        let (dout, v) = (self.row(&self.dout, i, true), self.row(&self.v, j, true));
        let factor = self.dropout.map_or(1.0, |dropout| dropout.factor(self.pair, i as u32, j as u32));
        let ds = p * (factor * dot(dout, v) - delta);
        Pair { score, p, factor, ds, magnitude: p * (factor * sum_of_magnitudes(dout, v) + of_delta) }
    }
}

/// Some rows of each gradient. Score programs are not known here.
///
/// # Panics
/// When the tensors' shapes do not belong together.
pub fn sample_gradients(given: &GivenGradients<'_>, most: usize, seed: u64) -> GradientSample {
    let [batch, heads, q_len, dim] = given.q.shape();
    let [_, kv_heads, kv_len, _] = given.k.shape();
    let [batch, heads, kv_heads, q_len, kv_len] = [batch, heads, kv_heads, q_len, kv_len].map(|n| n as u32);
    let shape = Shape { batch, heads, kv_heads, q_len, kv_len, mask: given.mask };
    let (dtype, dim_v) = (given.q.dtype(), given.v.shape()[3]);
    let live = |i: u32| given.mask.live(i.into(), q_len.into(), kv_len.into());
    let few = |others: f64| ((WORK / (others * (dim + dim_v) as f64).max(1.0)) as usize).clamp(8, most);
    let queries = sample_rows(&shape, few(kv_len.into()), seed);
    // Whole tensors are not turned into fp64, but heads.
    let dq = queries.chunk_by(|a, b| (a.batch, a.head) == (b.batch, b.head)).collect::<Vec<_>>();
    let dq = dq.into_par_iter().flat_map_iter(|ids| {
        let of = Head::new(given, ids[0].batch, ids[0].head);
        let row = |id: &RowId| {
            let (i, mut sum) = (id.row as usize, Sum::new(dim));
            let delta = of.delta(i);
            for j in live(id.row) {
                let Pair { score, ds, magnitude, .. } = of.pair(i, j as usize, delta);
                sum.add(ds * of.scale, magnitude * of.scale, score, of.row(&of.k, j as usize, false));
            }
            sum.row(*id, dtype)
        };
        ids.iter().map(row).collect::<Vec<_>>()
    });
    let dq = dq.collect();
    let group = shape.group();
    let of_keys = Shape { heads: kv_heads, q_len: kv_len, ..shape };
    let keys = sample_rows(&of_keys, few(f64::from(q_len) * f64::from(group)), seed ^ 1);
    let heads_of_keys = keys.chunk_by(|a, b| (a.batch, a.head) == (b.batch, b.head)).collect::<Vec<_>>();
    let pairs: Vec<[GradientRow; 2]> = heads_of_keys
        .into_par_iter()
        .flat_map_iter(|ids| {
            let mut sums: Vec<[Sum; 2]> = ids.iter().map(|_| [Sum::new(dim), Sum::new(dim_v)]).collect();
            for h in ids[0].head * group..(ids[0].head + 1) * group {
                let of = Head::new(given, ids[0].batch, h);
                for i in 0..q_len {
                    let (seen, delta) = (live(i), of.delta(i as usize));
                    for (id, [dk, dv]) in ids.iter().zip(&mut sums) {
                        if !seen.contains(&id.row.into()) {
                            continue;
                        }
                        let Pair { score, p, factor, ds, magnitude } = of.pair(i as usize, id.row as usize, delta);
                        dk.add(ds * of.scale, magnitude * of.scale, score, of.row(&of.q, i as usize, false));
                        dv.add(factor * p, factor * p, score, of.row(&of.dout, i as usize, true));
                    }
                }
            }
            let row = |(id, [dk, dv]): (&RowId, [Sum; 2])| [dk.row(*id, dtype), dv.row(*id, dtype)];
            ids.iter().zip(sums).map(row).collect::<Vec<_>>()
        })
        .collect();
    let (dk, dv) = pairs.into_iter().map(|[dk, dv]| (dk, dv)).unzip();
    GradientSample { rows: [dq, dk, dv] }
}

#[cfg(test)]
mod tests {
    use super::super::{Attention, Distribution, GradientInputs, Layout, all_rows, oracle_gradients, oracle_of};
    use super::*;
    use flashtune_codegen::Dropout;

    /// With O and the log-sum-exp of the forward pass the rows are those of the gradients.
    #[test]
    fn rows_of_a_sample_are_those_of_the_gradients() {
        for dropout in [None, Some(Dropout::new(0.3, 5, 6).mask([0, 0]))] {
            check_rows(dropout);
        }
    }

    fn check_rows(dropout: Option<DropoutMask>) {
        let tensor = |heads, rows, dim, seed| {
            HostTensor::random(DType::F32, [2, heads, rows, dim], Layout::Bhsd, seed, Distribution::Normal)
        };
        let (q, k, v, dout) = (tensor(4, 40, 16, 1), tensor(2, 50, 16, 2), tensor(2, 50, 24, 3), tensor(4, 40, 24, 4));
        let attention = Attention { mask: Mask::Causal, scale: 0.25, program: None, sequence: 0, dropout };
        let want = oracle_gradients(&GradientInputs { q: &q, k: &k, v: &v, dout: &dout, dlse: None }, &attention);
        let shape = Shape { batch: 2, heads: 4, kv_heads: 2, q_len: 40, kv_len: 50, mask: Mask::Causal };
        let forward = oracle_of(&q, &k, &v, &attention, &all_rows(&shape));
        let as_f32 = |x: &[f64]| x.iter().map(|x| *x as f32).collect::<Vec<f32>>();
        let o = HostTensor::from_values(DType::F32, [2, 4, 40, 24], Layout::Bhsd, &as_f32(&want.o.o)).unwrap();
        let lse = as_f32(&forward.lse);
        let (mask, scale) = (Mask::Causal, 0.25);
        let given = GivenGradients { q: &q, k: &k, v: &v, o: &o, dout: &dout, lse: &lse, mask, scale, dropout };
        let sample = sample_gradients(&given, 30, 7);
        for (rows, want) in sample.rows.iter().zip([&want.dq, &want.dk, &want.dv]) {
            assert!(rows.len() >= 20);
            for row in rows {
                let at = want.ids.iter().position(|id| *id == row.id).unwrap();
                for ((x, y), bound) in row.values.iter().zip(want.row(at)).zip(&row.bounds) {
                    assert!((x - y).abs() <= *bound && *bound < 1e-3, "{:?}: {x} {y} {bound}", row.id);
                }
            }
        }
    }
}

//! Gradients of attention: in fp64, the definition that every backward kernel is measured against, and the unfused way
//! in the problem's dtype, whose error is the yardstick.

use super::host::round_to;
use super::oracle::{RowScale, sizes};
use super::{Attention, HostTensor, RowId, Rows};
use flashtune_codegen::Shape;
use flashtune_codegen::score::{At, Bound, Derivative, Evaluator, Id, Precision};
use rayon::prelude::*;

/// What the gradients are those of.
#[derive(Debug, Clone, Copy)]
pub struct GradientInputs<'a> {
    /// Q, `[batch, heads, q_len, dim]`.
    pub q: &'a HostTensor,
    /// K, `[batch, kv_heads, kv_len, dim]`.
    pub k: &'a HostTensor,
    /// V, `[batch, kv_heads, kv_len, dim_v]`.
    pub v: &'a HostTensor,
    /// The loss's gradient by O, `[batch, heads, q_len, dim_v]`.
    pub dout: &'a HostTensor,
    /// The loss's gradient by the log-sum-exp, `[batch, heads, q_len]`; 0 when absent.
    pub dlse: Option<&'a [f32]>,
}

/// dQ of every query, dK and dV of every key, and O, as rows in `[batch, heads, rows]` order.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Gradients {
    /// dQ.
    pub dq: Rows,
    /// dK.
    pub dk: Rows,
    /// dV.
    pub dv: Rows,
    /// O by what takes part in the gradients.
    pub o: Rows,
}

/// How one way of computing the gradients rounds.
pub(super) trait Arithmetic: Copy + Send + Sync {
    /// Of a program's floats.
    const PRECISION: Precision;
    /// Whether the others are measured by it, and it says what their errors scale with.
    const IS_ORACLE: bool;
    /// What a result that goes through memory becomes.
    fn keep(self, x: f64) -> f64;
    /// A sum of products.
    fn dot(self, a: &[f64], b: &[f64]) -> f64;
    /// A term more of a sum.
    fn add(self, sum: f64, x: f64, y: f64) -> f64;
}

#[derive(Clone, Copy)]
pub(super) struct Exact;

impl Arithmetic for Exact {
    const PRECISION: Precision = Precision::F64;
    const IS_ORACLE: bool = true;
    fn keep(self, x: f64) -> f64 {
        x
    }
    fn dot(self, a: &[f64], b: &[f64]) -> f64 {
        a.iter().zip(b).map(|(a, b)| a * b).sum()
    }
    fn add(self, sum: f64, x: f64, y: f64) -> f64 {
        sum + x * y
    }
}

/// Products with fp32 sums, and results rounded to a dtype.
#[derive(Clone, Copy)]
pub(super) struct Unfused(pub(super) flashtune_codegen::DType);

impl Arithmetic for Unfused {
    const PRECISION: Precision = Precision::F32;
    const IS_ORACLE: bool = false;
    fn keep(self, x: f64) -> f64 {
        let mut x = [x as f32];
        round_to(self.0, &mut x);
        x[0].into()
    }
    fn dot(self, a: &[f64], b: &[f64]) -> f64 {
        f64::from(a.iter().zip(b).fold(0f32, |sum, (a, b)| sum + *a as f32 * *b as f32))
    }
    fn add(self, sum: f64, x: f64, y: f64) -> f64 {
        f64::from(sum as f32 + x as f32 * y as f32)
    }
}

/// Gradients in fp64. A pair of a query and a key that is masked, or whose score is -inf, takes no part; a row that
/// attends to nothing gives zeros to all, as does a key that no query sees.
///
/// # Panics
/// When the tensors' shapes do not belong together.
pub fn oracle_gradients(inputs: &GradientInputs<'_>, attention: &Attention<'_>) -> Gradients {
    gradients(inputs, attention, Exact)
}

/// Gradients as frameworks compute them without a fused kernel: every matrix between two operations is in memory, in
/// the tensors' dtype. The query heads of a KV head are rounded before they are summed.
///
/// # Panics
/// When the tensors' shapes do not belong together.
pub fn unfused_gradients(inputs: &GradientInputs<'_>, attention: &Attention<'_>) -> Gradients {
    gradients(inputs, attention, Unfused(inputs.q.dtype()))
}

/// One KV head with its query heads.
struct GradientPart {
    dq: Sums,
    dk: Sums,
    dv: Sums,
    o: Sums,
}

/// Rows of a gradient, and what their errors scale with.
struct Sums {
    dim: usize,
    values: Vec<f64>,
    /// Sums of the magnitudes.
    magnitudes: Vec<f64>,
    scales: Vec<RowScale>,
}

impl Sums {
    fn new(rows: usize, dim: usize) -> Self {
        let zeros = vec![0.0; rows * dim];
        Self { dim, values: zeros.clone(), magnitudes: zeros, scales: vec![RowScale::default(); rows] }
    }

    /// A term more: `x` times a row, with the magnitude of `x`'s own terms.
    fn add(&mut self, how: impl Arithmetic, row: usize, x: f64, magnitude: f64, of: &[f64], score: f64) {
        let at = row * self.dim..(row + 1) * self.dim;
        for ((sum, m), y) in self.values[at.clone()].iter_mut().zip(&mut self.magnitudes[at]).zip(of) {
            *sum = how.add(*sum, x, *y);
            *m += magnitude * y.abs();
        }
        let scale = &mut self.scales[row];
        scale.live += 1;
        if score.is_finite() {
            scale.score = scale.score.max(score);
        }
    }

    /// The sums times a factor, as they go to memory.
    fn scaled(&mut self, how: impl Arithmetic, factor: f64) {
        self.values.iter_mut().for_each(|x| *x = how.keep(how.keep(*x) * factor));
        self.magnitudes.iter_mut().for_each(|x| *x *= factor.abs());
    }
}

fn gradients<A: Arithmetic>(inputs: &GradientInputs<'_>, attention: &Attention<'_>, how: A) -> Gradients {
    let GradientInputs { q, k, v, dout, .. } = *inputs;
    let sizes = sizes(q, k, attention.mask);
    assert_eq!(dout.shape(), [q.shape()[0], q.shape()[1], q.shape()[2], v.shape()[3]], "dO has the shape of O");
    let kv_heads = sizes.kv_heads;
    let parts: Vec<GradientPart> = (0..sizes.batch * kv_heads)
        .into_par_iter()
        .map(|i| part(inputs, attention, how, &sizes, [i / kv_heads, i % kv_heads]))
        .collect();
    let join = |heads: u32, rows: u32, dim: usize, of: fn(&GradientPart) -> &Sums| {
        let mut all = Rows { dim, ..Rows::default() };
        for batch in 0..sizes.batch {
            for head in 0..heads {
                all.ids.extend((0..rows).map(|row| RowId { batch, head, row }));
            }
        }
        for sums in parts.iter().map(of) {
            all.o.extend(&sums.values);
            // Infinities are not rounded.
            let largest = |row: &[f64]| row.iter().copied().filter(|x| x.is_finite()).fold(0.0, f64::max);
            let magnitudes = sums.magnitudes.chunks_exact(dim.max(1));
            all.scales.extend(sums.scales.iter().zip(magnitudes).map(|(s, m)| RowScale { output: largest(m), ..*s }));
        }
        all
    };
    let (dim, dim_v) = (q.shape()[3], v.shape()[3]);
    Gradients {
        dq: join(sizes.heads, sizes.q_len, dim, |p| &p.dq),
        dk: join(kv_heads, sizes.kv_len, dim, |p| &p.dk),
        dv: join(kv_heads, sizes.kv_len, dim_v, |p| &p.dv),
        o: join(sizes.heads, sizes.q_len, dim_v, |p| &p.o),
    }
}

/// Rows of one head as fp64.
pub(super) fn head(t: &HostTensor, [batch, head]: [u32; 2]) -> Vec<f64> {
    let [_, _, rows, dim] = t.shape();
    let mut row = vec![0f32; dim];
    let mut all = Vec::with_capacity(rows * dim);
    for i in 0..rows {
        t.read_row([batch as usize, head as usize, i], &mut row);
        all.extend(row.iter().map(|x| f64::from(*x)));
    }
    all
}

/// What becomes of a score, and the derivative of that.
struct Change<'a> {
    mask: Bound<'a>,
    evaluator: Evaluator<'a>,
    value: Id,
    slope: Option<Id>,
}

impl Change<'_> {
    /// The changed score with its slope; none where it is masked.
    fn of(&mut self, at: At, score: f64) -> Option<(f64, f64)> {
        self.mask.visible(at).then(|| {
            self.evaluator.go(at, [0; 4], score);
            (self.evaluator.float(self.value), self.slope.map_or(0.0, |id| self.evaluator.float(id)))
        })
    }
}

/// A key that a query attends to.
struct Pair {
    key: usize,
    /// The score, its weight, and its slope.
    score: f64,
    p: f64,
    slope: f64,
    /// The gradient by the weight, and the magnitude of its terms.
    dp: f64,
    magnitude: f64,
    /// What dropout multiplies the weight by.
    factor: f64,
}

impl Pair {
    /// The weight of V's row.
    fn kept(&self) -> f64 {
        self.p * self.factor
    }
}

fn part<A: Arithmetic>(
    inputs: &GradientInputs<'_>,
    attention: &Attention<'_>,
    how: A,
    sizes: &Shape,
    [batch, kv_head]: [u32; 2],
) -> GradientPart {
    let Attention { mask, scale, program, sequence, .. } = *attention;
    let (dim, dim_v) = (inputs.q.shape()[3], inputs.v.shape()[3]);
    let (q_len, kv_len, group) = (sizes.q_len as usize, sizes.kv_len as usize, sizes.group());
    let heads = if sizes.heads == 0 { 0 } else { group };
    let (keys, values) = (head(inputs.k, [batch, kv_head]), head(inputs.v, [batch, kv_head]));
    let (mut dq, mut dk, mut dv) = (Sums::new(0, dim), Sums::new(kv_len, dim), Sums::new(kv_len, dim_v));
    let mut o = Sums::new(0, dim_v);
    let derivative = program.map(|(p, _)| Derivative::of_score(p));
    let mut change = program.zip(derivative.as_ref()).map(|((program, data), d)| {
        let roots: Vec<Id> = [d.value].into_iter().chain(d.score).collect();
        Change {
            mask: Bound::of_checked(program, sizes, data, A::PRECISION),
            evaluator: Evaluator::new(&d.graph, &roots, sizes, data, A::PRECISION),
            value: d.value,
            slope: d.score,
        }
    });
    let scale = f64::from(scale);
    for h in kv_head * group..kv_head * group + heads {
        let (queries, douts) = (head(inputs.q, [batch, h]), head(inputs.dout, [batch, h]));
        let mut of_head = [Sums::new(q_len, dim), Sums::new(kv_len, dim), Sums::new(kv_len, dim_v)];
        let mut of_o = Sums::new(q_len, dim_v);
        let mut together = vec![0.0; if A::IS_ORACLE { kv_len * dim } else { 0 }];
        for i in 0..q_len {
            let query: Vec<f64> = queries[i * dim..][..dim].iter().map(|x| how.keep(x * scale)).collect();
            let dout = &douts[i * dim_v..][..dim_v];
            let at = |j: u64| At { b: sequence + batch, h, q: i as u32, kv: j as u32 };
            let mut pairs = Vec::new();
            let mut largest = 0f64;
            for j in mask.live(i as u64, q_len as u64, kv_len as u64) {
                let key = &keys[j as usize * dim..][..dim];
                let score = how.keep(how.dot(&query, key));
                let magnitude: f64 = query.iter().zip(key).map(|(q, k)| (q * k).abs()).sum();
                let changed = match &mut change {
                    Some(change) => change.of(at(j), score).map(|(s, slope)| (how.keep(s), slope)),
                    None => Some((score, 1.0)),
                };
                let Some((score, slope)) = changed.filter(|(s, _)| *s != f64::NEG_INFINITY) else { continue };
                largest = [magnitude, score.abs()].into_iter().filter(|x| x.is_finite()).fold(largest, f64::max);
                let value = &values[j as usize * dim_v..][..dim_v];
                let factor = attention.factor(sizes.heads, batch, h, i as u32, j as u32);
                let magnitude = factor * dout.iter().zip(value).map(|(a, b)| (a * b).abs()).sum::<f64>();
                let dp = how.keep(factor * how.keep(how.dot(dout, value)));
                pairs.push(Pair { key: j as usize, score, p: 0.0, slope, dp, magnitude, factor });
            }
            let sink = change.as_mut().and_then(|c| c.mask.sink(sequence + batch, h, i as u32));
            // Of a row without a key no more is asked.
            if pairs.is_empty() {
                continue;
            }
            let max = pairs.iter().map(|p| p.score).chain(sink).fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = pairs.iter().map(|p| (p.score - max).exp()).chain(sink.map(|s| (s - max).exp())).sum();
            pairs.iter_mut().for_each(|p| p.p = how.keep((p.score - max).exp() / sum));
            let dlse = inputs.dlse.map_or(0.0, |dlse| dlse[((batch * sizes.heads + h) as usize) * q_len + i].into());
            let both = |of: fn(&Pair) -> f64| pairs.iter().map(of).collect::<Vec<f64>>();
            let delta = how.dot(&both(|p| p.p), &both(|p| p.dp)) - dlse;
            let delta_magnitude = pairs.iter().map(|p| p.p * p.magnitude).sum::<f64>() + dlse.abs();
            for pair in &pairs {
                let p = how.keep(pair.kept());
                of_o.add(how, i, p, p, &values[pair.key * dim_v..][..dim_v], largest);
            }
            // What a rounding of each element of O by 1 makes of D, if roundings are independent; and what D loses by
            // those that there are.
            let row_of_o = &of_o.values[i * dim_v..][..dim_v];
            let stored = Unfused(inputs.q.dtype());
            let lost: f64 = dout.iter().zip(row_of_o).map(|(x, o)| x * (stored.keep(*o) - o)).sum();
            let by_o = dout.iter().zip(row_of_o).map(|(x, o)| (x * o).powi(2)).sum::<f64>().sqrt();
            let largest_of = |row: &[f64]| row.iter().map(|x| x.abs()).fold(0.0, f64::max);
            let (largest_q, mut mean_key) = (largest_of(&query), vec![0.0; dim]);
            for pair in pairs {
                let kept = how.keep(pair.kept());
                let Pair { key, p, slope, dp, magnitude, .. } = pair;
                let mut ds = how.keep(p * (dp - delta));
                if change.is_some() {
                    ds = how.keep(ds * slope);
                }
                let magnitude = p * (magnitude + delta_magnitude) * slope.abs();
                let [of_q, of_k, of_v] = &mut of_head;
                of_q.add(how, i, ds, magnitude, &keys[key * dim..][..dim], largest);
                of_k.add(how, key, ds, magnitude, &query, largest);
                of_v.add(how, key, kept, kept, dout, largest);
                if by_o.is_finite() && A::IS_ORACLE {
                    let keys = &keys[key * dim..][..dim];
                    mean_key.iter_mut().zip(keys).for_each(|(sum, k)| *sum += p * slope * k);
                    // Errors of queries are independent, but of those that attend to one key alone: the O of all of
                    // them is the key's row of V, by dropout times a factor, and rounded alike.
                    if p > 0.5 && lost.is_finite() {
                        let shift = &mut together[key * dim..][..dim];
                        shift.iter_mut().zip(&query).for_each(|(sum, q)| *sum += p * slope * lost * q);
                    }
                    of_k.scales[key].by_o = of_k.scales[key].by_o.hypot(p * slope * by_o * largest_q);
                }
            }
            of_head[0].scales[i].by_o = scale.abs() * by_o * largest_of(&mean_key);
        }
        for (scale, shift) in of_head[1].scales.iter_mut().zip(together.chunks(dim)) {
            let largest = shift.iter().map(|x| x.abs()).fold(0.0, f64::max);
            scale.by_o = scale.by_o.max(largest / inputs.q.dtype().epsilon());
        }
        let [mut of_q, mut of_k, mut of_v] = of_head;
        of_q.scaled(how, scale);
        of_k.scaled(how, 1.0);
        of_v.scaled(how, 1.0);
        dq.values.extend(of_q.values);
        dq.magnitudes.extend(of_q.magnitudes);
        dq.scales.extend(of_q.scales);
        o.values.extend(of_o.values);
        o.magnitudes.extend(of_o.magnitudes);
        o.scales.extend(of_o.scales);
        for (all, one) in [(&mut dk, of_k), (&mut dv, of_v)] {
            all.values.iter_mut().zip(&one.values).for_each(|(sum, x)| *sum += x);
            all.magnitudes.iter_mut().zip(&one.magnitudes).for_each(|(sum, x)| *sum += x);
            for (all, one) in all.scales.iter_mut().zip(&one.scales) {
                *all = RowScale {
                    live: all.live + one.live,
                    score: all.score.max(one.score),
                    by_o: all.by_o.hypot(one.by_o),
                    ..*one
                };
            }
        }
    }
    dk.scaled(how, 1.0);
    dv.scaled(how, 1.0);
    for sums in [&mut dq, &mut dk, &mut dv] {
        sums.scales.iter_mut().for_each(|s| s.terms = dim as u64);
    }
    GradientPart { dq, dk, dv, o }
}

#[cfg(test)]
mod tests {
    use super::super::{all_rows, oracle_of};
    use super::*;
    use crate::{Distribution, Layout, typical_side};
    use flashtune_codegen::score::{Program, SideData};
    use flashtune_codegen::{DType, Mask};

    fn tensor(heads: usize, rows: usize, dim: usize, seed: u64) -> HostTensor {
        HostTensor::random(DType::F32, [2, heads, rows, dim], Layout::Bhsd, seed, Distribution::Normal)
    }

    /// `sum(dO * O) + sum(dLSE * LSE)`, of rows that have a log-sum-exp.
    fn loss(inputs: &GradientInputs<'_>, attention: &Attention<'_>) -> f64 {
        let rows = all_rows(&sizes(inputs.q, inputs.k, attention.mask));
        let got = oracle_of(inputs.q, inputs.k, inputs.v, attention, &rows);
        let of_o: f64 = got.o.iter().zip(inputs.dout.values()).map(|(a, b)| a * f64::from(b)).sum();
        let of_lse = got.lse.iter().zip(inputs.dlse.unwrap_or(&[])).filter(|(lse, _)| lse.is_finite());
        of_o + of_lse.map(|(a, b)| a * f64::from(*b)).sum::<f64>()
    }

    /// Largest difference between a gradient and finite differences of the loss, at some elements of each tensor.
    fn difference(mask: Mask, text: Option<&str>, [q_len, kv_len]: [usize; 2]) -> f64 {
        let (q, k, v, dout) =
            (tensor(4, q_len, 16, 1), tensor(2, kv_len, 16, 2), tensor(2, kv_len, 24, 3), tensor(4, q_len, 24, 4));
        let dlse = tensor(4, q_len, 1, 5).values();
        let program = text.map(|text| Program::parse(text).unwrap());
        let sizes = sizes(&q, &k, mask);
        let data = program.as_ref().map_or(SideData::default(), |p| typical_side(p, &sizes, 3));
        let attention =
            Attention { mask, scale: 0.25, program: program.as_ref().map(|p| (p, &data)), sequence: 0, dropout: None };
        let inputs = GradientInputs { q: &q, k: &k, v: &v, dout: &dout, dlse: Some(&dlse) };
        let got = oracle_gradients(&inputs, &attention);
        let mut worst = 0f64;
        for (nth, (t, rows)) in [(&q, &got.dq), (&k, &got.dk), (&v, &got.dv)].into_iter().enumerate() {
            let [_, heads, len, dim] = t.shape();
            for n in 0..24usize {
                let at = [n % 2, n / 2 % heads, n * 7 % len, n * 5 % dim];
                let want = rows.o[((at[0] * heads + at[1]) * len + at[2]) * dim + at[3]];
                let moved = |step: f32| {
                    let mut t = t.clone();
                    // Both steps from what fp32 holds exactly.
                    let middle = (t.get(at) * 1024.0).round() / 1024.0;
                    t.set(at, middle + step);
                    let inputs = match nth {
                        0 => GradientInputs { q: &t, ..inputs },
                        1 => GradientInputs { k: &t, ..inputs },
                        _ => GradientInputs { v: &t, ..inputs },
                    };
                    loss(&inputs, &attention)
                };
                let step = 1.0 / 512.0;
                let slope = (moved(step) - moved(-step)) / (2.0 * f64::from(step));
                worst = worst.max((slope - want).abs() / (1.0 + want.abs()));
            }
        }
        worst
    }

    #[test]
    fn gradients_are_those_of_finite_differences() {
        let window = Mask::Window { left: Some(5), right: Some(2) };
        for (mask, lengths) in
            [(Mask::Full, [9, 13]), (Mask::Causal, [13, 9]), (window, [11, 17]), (Mask::Causal, [7, 12])]
        {
            let worst = difference(mask, None, lengths);
            assert!(worst < 4e-3, "{mask} {lengths:?}: {worst}");
        }
    }

    #[test]
    fn gradients_of_programs_are_those_of_finite_differences() {
        for text in [
            "cap: float in 1..50; score = cap * tanh(score / cap);",
            "slopes: float[heads]; score = score + slopes[h] * (kv - q);",
            "bias: float[heads, q_len, kv_len]; mask = kv % 3 != q % 4; score = score * 1.5 + bias[h, q, kv];",
            "sinks: float[heads]; score = score; sink = sinks[h];",
            "score = exp2(score * 0.5) - abs(score + 0.01);",
            "doc: int[batch, kv_len] nondecreasing; mask = doc[b, kv] == doc[b, q]; score = max(score, 0.1 * score);",
            "score = select(score > 0.013, log2(score + 2.0), 0.5 * score) / (1.0 + score * score);",
        ] {
            let worst = difference(Mask::Full, Some(text), [10, 12]);
            assert!(worst < 6e-3, "{text}: {worst}");
        }
    }

    #[test]
    fn rows_and_keys_that_see_nothing_have_zeros_and_leak_nothing() {
        // 6 queries and 3 keys: the first 3 rows see none.
        let (mut q, k, mut v, mut dout) =
            (tensor(1, 6, 16, 1), tensor(1, 3, 16, 2), tensor(1, 3, 16, 3), tensor(1, 6, 16, 4));
        let nan = [f32::NAN; 16];
        q.write_row([0, 0, 1], &nan);
        dout.write_row([0, 0, 2], &nan);
        // Row 3 sees key 0, row 4 keys 0 and 1.
        dout.write_row([1, 0, 3], &nan);
        v.write_row([0, 0, 2], &nan);
        let attention = Attention { mask: Mask::Causal, scale: 1.0, program: None, sequence: 0, dropout: None };
        let inputs = GradientInputs { q: &q, k: &k, v: &v, dout: &dout, dlse: None };
        for got in [oracle_gradients(&inputs, &attention), unfused_gradients(&inputs, &attention)] {
            assert!(got.dq.o[..3 * 16].iter().all(|x| *x == 0.0));
            let is_nan = |rows: &Rows, batch: usize, len: usize, row: usize| {
                rows.row(batch * len + row).iter().all(|x| x.is_nan())
            };
            let is_number = |rows: &Rows, batch: usize, len: usize, row: usize| {
                rows.row(batch * len + row).iter().all(|x| x.is_finite())
            };
            assert!([3, 4].iter().all(|row| is_number(&got.dq, 0, 6, *row)) && is_nan(&got.dq, 0, 6, 5));
            assert!(is_nan(&got.dv, 1, 3, 0) && is_number(&got.dv, 1, 3, 1) && is_number(&got.dk, 1, 3, 2));
            assert_eq!(got.dk.scales[0].live, 3);
        }
    }

    #[test]
    fn the_unfused_gradients_err_by_the_dtype() {
        for dtype in DType::ALL {
            let make =
                |h, s, d, seed| HostTensor::random(dtype, [1, h, s, d], Layout::Bhsd, seed, Distribution::Normal);
            let (q, k, v, dout) = (make(4, 50, 32, 1), make(2, 70, 32, 2), make(2, 70, 24, 3), make(4, 50, 24, 4));
            let attention = Attention { mask: Mask::Causal, scale: 0.2, program: None, sequence: 0, dropout: None };
            let inputs = GradientInputs { q: &q, k: &k, v: &v, dout: &dout, dlse: None };
            let (want, got) = (oracle_gradients(&inputs, &attention), unfused_gradients(&inputs, &attention));
            for (want, got) in [(&want.dq, &got.dq), (&want.dk, &got.dk), (&want.dv, &got.dv)] {
                let error = want.o.iter().zip(&got.o).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                let largest = want.o.iter().map(|x| x.abs()).fold(0.0, f64::max);
                assert!(error > 0.0 && error < 8.0 * dtype.epsilon() * largest, "{dtype}: {error} of {largest}");
            }
        }
    }
}

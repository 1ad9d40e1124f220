//! The gradient of a tensor or scalar that a score program reads: in fp64, and the unfused way.

use super::gradients::{Arithmetic, Exact, GradientInputs, Unfused, head};
use super::oracle::{RowScale, sizes};
use super::{Attention, RowId, Rows};
use flashtune_codegen::score::{At, Bound, ByTensor, Derivative, Evaluator, Id, SideData};
use flashtune_codegen::{DType, Shape};
use rayon::prelude::*;
use std::collections::HashMap;

/// The gradient in fp64 by what the program declares at a place, as rows of one element each, in the tensor's order; a
/// scalar is one row. A pair that takes no part in attention adds nothing.
///
/// # Panics
/// Without a program, with other data than it declares, or when the tensors' shapes do not belong together.
pub fn oracle_gradient_by(inputs: &GradientInputs<'_>, attention: &Attention<'_>, by: usize) -> Rows {
    gradient_by(inputs, attention, by, Exact, None)
}

/// The same as frameworks compute it without a fused kernel: dS is in memory in the tensors' dtype, as is what it
/// becomes behind the derivative; it is summed without another rounding, and goes to memory in `stored`.
///
/// # Panics
/// As [`oracle_gradient_by`].
pub fn unfused_gradient_by(inputs: &GradientInputs<'_>, attention: &Attention<'_>, by: usize, stored: DType) -> Rows {
    gradient_by(inputs, attention, by, Unfused(inputs.q.dtype()), Some(Unfused(stored)))
}

/// What one place adds to an element.
struct Term {
    element: usize,
    x: f64,
    magnitude: f64,
    /// What a rounding of each element of O by 1 makes of all that its query adds to the element.
    by_o: f64,
    score: f64,
}

/// A result of the program with its derivatives by what is looked at.
struct Derived<'a> {
    evaluator: Evaluator<'a>,
    value: Id,
    terms: &'a [ByTensor],
    name: &'a str,
    data: &'a SideData,
}

impl<'a> Derived<'a> {
    fn new(d: &'a Derivative, by: usize, sizes: &'a Shape, data: &'a SideData, how: impl Arithmetic) -> Self {
        let indices = d.tensors.iter().flat_map(|t| [t.value].into_iter().chain(t.index.clone()));
        let roots: Vec<Id> = [d.value].into_iter().chain(indices).collect();
        let evaluator = Evaluator::new(&d.graph, &roots, sizes, data, precision(how));
        Self { evaluator, value: d.value, terms: &d.tensors, name: &d.graph.declarations()[by].name, data }
    }

    /// The result somewhere, and of each load the element and the derivative.
    fn at(&mut self, at: At, score: f64) -> (f64, Vec<(usize, f64)>) {
        self.evaluator.go(at, [0; 4], score);
        let element = |t: &ByTensor| match self.data.tensors.get(self.name) {
            Some(tensor) => tensor.place(t.index.iter().map(|i| self.evaluator.int(*i))).expect("it has elements"),
            None => 0,
        };
        let terms = self.terms.iter().map(|t| (element(t), self.evaluator.float(t.value))).collect();
        (self.evaluator.float(self.value), terms)
    }
}

fn precision<A: Arithmetic>(_: A) -> flashtune_codegen::score::Precision {
    A::PRECISION
}

fn gradient_by<A: Arithmetic>(
    inputs: &GradientInputs<'_>,
    attention: &Attention<'_>,
    by: usize,
    how: A,
    stored: Option<Unfused>,
) -> Rows {
    let sizes = sizes(inputs.q, inputs.k, attention.mask);
    let (program, data) = attention.program.expect("a program");
    let elements = match data.tensors.get(&program.declarations()[by].name) {
        Some(tensor) => tensor.elements.len(),
        None => 1,
    };
    let [score, sink] =
        [Some(Derivative::of_score(program)), Derivative::of_sink(program)].map(|d| d.map(|d| d.by(by)));
    let score = score.expect("every program has a score");
    let (mut sums, mut scales) = (vec![0f64; elements], vec![RowScale::default(); elements]);
    for batch in 0..sizes.batch {
        let heads: Vec<Vec<Term>> = (0..sizes.heads)
            .into_par_iter()
            .map(|h| {
                let derived = [Some(&score), sink.as_ref()].map(|d| d.map(|d| Derived::new(d, by, &sizes, data, how)));
                of_head(inputs, attention, how, &sizes, [batch, h], derived)
            })
            .collect();
        for Term { element, x, magnitude, by_o, score } in heads.into_iter().flatten() {
            sums[element] += x;
            let scale = &mut scales[element];
            scale.live += 1;
            if score.is_finite() {
                scale.score = scale.score.max(score);
            }
            if magnitude.is_finite() {
                scale.output += magnitude;
            }
            // Errors of queries are independent, and so are the roundings of what one pair adds.
            if A::IS_ORACLE && by_o.is_finite() && x.is_finite() {
                scale.by_o = scale.by_o.hypot(by_o).hypot(x);
            }
        }
    }
    let o = sums.into_iter().map(|x| stored.map_or(x, |stored| stored.keep(x))).collect();
    let ids = (0..elements as u32).map(|row| RowId { batch: 0, head: 0, row }).collect();
    Rows { ids, dim: 1, o, lse: Vec::new(), scales }
}

/// What the queries of a head add.
fn of_head<A: Arithmetic>(
    inputs: &GradientInputs<'_>,
    attention: &Attention<'_>,
    how: A,
    sizes: &Shape,
    [batch, h]: [u32; 2],
    [score, sink]: [Option<Derived<'_>>; 2],
) -> Vec<Term> {
    let Attention { mask, scale, program, sequence, .. } = *attention;
    let (dim, dim_v) = (inputs.q.shape()[3], inputs.v.shape()[3]);
    let (q_len, kv_len) = (u64::from(sizes.q_len), u64::from(sizes.kv_len));
    let kv_head = h / sizes.group();
    let (keys, values) = (head(inputs.k, [batch, kv_head]), head(inputs.v, [batch, kv_head]));
    let (queries, douts) = (head(inputs.q, [batch, h]), head(inputs.dout, [batch, h]));
    let (program, data) = program.expect("a program");
    let mut visible = Bound::of_checked(program, sizes, data, A::PRECISION);
    let (mut score, mut sink) = (score.expect("every program has a score"), sink);
    let mut all = Vec::new();
    for i in 0..sizes.q_len as usize {
        let query: Vec<f64> = queries[i * dim..][..dim].iter().map(|x| how.keep(x * f64::from(scale))).collect();
        let dout = &douts[i * dim_v..][..dim_v];
        // Score, dP, the magnitude of its terms, the key, and what the program reads.
        let mut pairs = Vec::new();
        let mut largest = 0f64;
        for j in mask.live(i as u64, q_len, kv_len) {
            let at = At { b: sequence + batch, h, q: i as u32, kv: j as u32 };
            if !visible.visible(at) {
                continue;
            }
            let key = &keys[j as usize * dim..][..dim];
            let raw = how.keep(how.dot(&query, key));
            let magnitude: f64 = query.iter().zip(key).map(|(q, k)| (q * k).abs()).sum();
            let (changed, terms) = score.at(at, raw);
            let changed = how.keep(changed);
            if changed == f64::NEG_INFINITY {
                continue;
            }
            largest = [magnitude, changed.abs()].into_iter().filter(|x| x.is_finite()).fold(largest, f64::max);
            let value = &values[j as usize * dim_v..][..dim_v];
            let of_dp = dout.iter().zip(value).map(|(a, b)| (a * b).abs()).sum::<f64>();
            pairs.push((changed, how.keep(how.dot(dout, value)), of_dp, j as usize, terms));
        }
        let at = At { b: sequence + batch, h, q: i as u32, kv: 0 };
        let sink = sink.as_mut().map(|s| s.at(at, 0.0)).or_else(|| Some((visible.sink(at.b, h, at.q)?, Vec::new())));
        let max = pairs.iter().map(|p| p.0).chain(sink.iter().map(|s| s.0)).fold(f64::NEG_INFINITY, f64::max);
        if pairs.is_empty() && max == f64::NEG_INFINITY {
            continue;
        }
        let scores = pairs.iter().map(|p| p.0).chain(sink.iter().map(|s| s.0));
        let sum: f64 = scores.map(|s| (s - max).exp()).sum();
        let p: Vec<f64> = pairs.iter().map(|(s, ..)| how.keep((s - max).exp() / sum)).collect();
        let dlse = inputs.dlse.map_or(0.0, |d| d[((batch * sizes.heads + h) as usize) * q_len as usize + i].into());
        let delta = how.dot(&p, &pairs.iter().map(|p| p.1).collect::<Vec<f64>>()) - dlse;
        let of_delta = p.iter().zip(&pairs).map(|(p, pair)| p * pair.2).sum::<f64>() + f64::abs(dlse);
        let mut o = vec![0.0; dim_v];
        for (p, pair) in p.iter().zip(&pairs) {
            o.iter_mut().zip(&values[pair.3 * dim_v..][..dim_v]).for_each(|(o, v)| *o += p * v);
        }
        let by_o = dout.iter().zip(&o).map(|(x, o)| (x * o).powi(2)).sum::<f64>().sqrt();
        let mut row: Vec<Term> = Vec::new();
        let mut coherent: HashMap<usize, f64> = HashMap::new();
        let mut add = |element: usize, ds: f64, magnitude: f64, p: f64, factor: f64| {
            let (x, magnitude) = (how.keep(ds * how.keep(factor)), magnitude * factor.abs());
            *coherent.entry(element).or_default() += p * factor;
            row.push(Term { element, x, magnitude, by_o: 0.0, score: largest });
        };
        for ((_, dp, of_dp, _, terms), p) in pairs.into_iter().zip(p) {
            for (element, factor) in terms {
                add(element, how.keep(p * (dp - delta)), p * (of_dp + of_delta), p, factor);
            }
        }
        if let Some((s, terms)) = sink {
            let p = how.keep((s - max).exp() / sum);
            for (element, factor) in terms {
                add(element, how.keep(p * -delta), p * of_delta, p, factor);
            }
        }
        // Once for each element.
        for term in &mut row {
            term.by_o = coherent.remove(&term.element).map_or(0.0, |x| (x * by_o).abs());
        }
        all.extend(row);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::super::{HostTensor, all_rows, oracle_of};
    use super::*;
    use crate::{Distribution, Layout, typical_side};
    use flashtune_codegen::Mask;
    use flashtune_codegen::score::{Elements, Program, Scalar};

    fn tensor(heads: usize, rows: usize, dim: usize, seed: u64) -> HostTensor {
        HostTensor::random(DType::F32, [2, heads, rows, dim], Layout::Bhsd, seed, Distribution::Normal)
    }

    /// Largest difference between a gradient and finite differences of the loss, at up to 20 elements.
    fn difference(mask: Mask, text: &str, by: &str) -> f64 {
        let (q, k, v, dout) = (tensor(4, 10, 16, 1), tensor(2, 12, 16, 2), tensor(2, 12, 24, 3), tensor(4, 10, 24, 4));
        let dlse = tensor(4, 10, 1, 5).values();
        let program = Program::parse(text).unwrap();
        let sizes = sizes(&q, &k, mask);
        let data = typical_side(&program, &sizes, 3);
        let inputs = GradientInputs { q: &q, k: &k, v: &v, dout: &dout, dlse: Some(&dlse) };
        let loss = |data: &SideData| {
            let attention =
                Attention { mask, scale: 0.25, program: Some((&program, data)), sequence: 0, dropout: None };
            let got = oracle_of(&q, &k, &v, &attention, &all_rows(&sizes));
            let of_o: f64 = got.o.iter().zip(dout.values()).map(|(a, b)| a * f64::from(b)).sum();
            let of_lse = got.lse.iter().zip(&dlse).filter(|(lse, _)| lse.is_finite());
            of_o + of_lse.map(|(a, b)| a * f64::from(*b)).sum::<f64>()
        };
        let attention = Attention { mask, scale: 0.25, program: Some((&program, &data)), sequence: 0, dropout: None };
        let at = program.declarations().iter().position(|d| d.name == by).unwrap();
        let got = oracle_gradient_by(&inputs, &attention, at);
        let mut worst = 0f64;
        for n in 0..20usize.min(got.o.len()) {
            let element = n * 7 % got.o.len();
            let moved = |step: f32| {
                let mut data = data.clone();
                match data.tensors.get_mut(by).map(|t| &mut t.elements) {
                    Some(Elements::Float(values)) => values[element] += step,
                    _ => match data.scalars[by] {
                        Scalar::Float(x) => data = data.scalar(by, Scalar::Float(x + step)),
                        Scalar::Int(_) => panic!("a float"),
                    },
                }
                loss(&data)
            };
            let step = 1.0 / 512.0;
            let slope = (moved(step) - moved(-step)) / (2.0 * f64::from(step));
            worst = worst.max((slope - got.o[element]).abs() / (1.0 + slope.abs()));
        }
        assert!(got.o.iter().any(|x| x.abs() > 1e-3), "{text}: nothing changes");
        worst
    }

    #[test]
    fn gradients_by_what_is_read_are_those_of_finite_differences() {
        for (mask, text, by) in [
            (Mask::Full, "slopes: float[heads]; score = score + slopes[h] * (kv - q);", "slopes"),
            (Mask::Causal, "t: float[batch, heads, q_len, kv_len]; score = score * 1.5 + t[b, h, q, kv];", "t"),
            (Mask::Full, "t: float[q_len, kv_len]; mask = kv % 3 != q % 4; score = tanh(score) + t[q, kv];", "t"),
            (Mask::Full, "t: float[kv_heads, kv_len]; score = score * t[h_kv, kv] + 0.1 * t[h_kv, kv];", "t"),
            (Mask::Causal, "table: float[heads, *]; score = score + table[h, clamp(kv - q, -2, 2) + 2];", "table"),
            (Mask::Full, "s: float[heads]; score = score; sink = s[h];", "s"),
            (Mask::Causal, "s: float[heads]; score = score + s[h]; sink = 2.0 * s[h];", "s"),
            (Mask::Full, "cap: float in 1..50; score = 0.2 * cap * tanh(9.0 * score / cap);", "cap"),
        ] {
            let worst = difference(mask, text, by);
            assert!(worst < 6e-3, "{text}: {worst}");
        }
    }
}

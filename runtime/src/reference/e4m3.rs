//! `e4m3` on the host: its codes, operands as what they mean, and the yardstick of kernels that round P to it.

use super::compare::lse_bound;
use super::{Attention, HostTensor, Layout, RowId, RowScale, Rows, Verdict};
use crate::{Descale, ScaleKind};
use flashtune_codegen::score::{At, Bound, Precision};
use flashtune_codegen::{DType, ScaleUnit};
use rand::Rng;
use rayon::prelude::*;

/// Kernels' error is at most this many times that of an emulation that rounds P alone.
const MOST: f64 = 1.15;
/// P is multiplied by this before it is rounded.
const P_SCALE: f64 = 256.0;
/// What a sum of FP8 products loses of the magnitudes of its terms: 13 bits are kept.
const SUM_ROUNDING: f64 = 1.0 / 8192.0;
/// FP8 products that the tensor cores add at once.
const SUM_STEP: usize = 32;
/// That in units of fp32, where a bound counts in these.
const SUM_UNITS: f64 = 1024.0;
/// From these magnitudes of a score's terms on, what its sum loses comes near to the rounding of P.
const LARGE_SCORE: f64 = 32.0;

/// What a code means.
pub fn value(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let magnitude = match exponent {
        15 if code & 7 == 7 => f32::NAN,
        0 => mantissa / 8.0 * 2f32.powi(-6),
        _ => (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7),
    };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

/// The code next to a value, of two the even one; what is larger than 448 becomes 448, and NaN stays.
pub(crate) fn code(x: f32) -> u8 {
    let sign = (x.to_bits() >> 24) as u8 & 0x80;
    let magnitude = x.abs();
    if magnitude.is_nan() {
        return sign | 0x7f;
    }
    if magnitude >= 448.0 {
        return sign | 0x7e;
    }
    // In units of the last place at the value's exponent, rounded to even; codes of magnitudes are in their order.
    let exponent = magnitude.log2().floor().clamp(-6.0, 8.0) as i32;
    let exponent = if magnitude < 2f32.powi(exponent) { (exponent - 1).max(-6) } else { exponent };
    let ulps = (magnitude * 2f32.powi(3 - exponent)).round_ties_even() as i32;
    sign | (ulps + ((exponent + 6) << 3)) as u8
}

/// Scales of an operand on the host, contiguous.
#[derive(Debug, Clone, PartialEq)]
pub struct Scales {
    /// What shares one.
    pub kind: ScaleKind,
    /// Sizes, as the kind says them.
    pub shape: [u64; 3],
    /// The numbers, `[batch, heads, scale units]`.
    pub values: Vec<f32>,
}

impl Scales {
    /// Numbers around 1, so that those of another head, row or channel are far off, for an operand of a shape. Of rows
    /// a scale has one, or a block of them, and a few are negative; some channels are larger than others, as models
    /// have them.
    pub fn random(unit: ScaleUnit, shape: [usize; 4], kv_heads: usize, rng: &mut impl Rng) -> Self {
        let kind = match unit {
            ScaleUnit::Head => ScaleKind::Head,
            ScaleUnit::Rows => match rng.random_range(0..5) {
                0 => ScaleKind::Block(64),
                1 => ScaleKind::Block(8),
                _ => ScaleKind::Token,
            },
            ScaleUnit::Channel => ScaleKind::Channel,
        };
        let shape = kind.sizes(shape.map(|n| n as u64), kv_heads as u64);
        let mut of = || {
            let large = kind == ScaleKind::Channel && rng.random_bool(0.1);
            let negative = unit == ScaleUnit::Rows && rng.random_bool(0.03);
            rng.random_range(0.5..2.0f32) * if large { 4.0 } else { 1.0 } * if negative { -1.0 } else { 1.0 }
        };
        let values = (0..shape.iter().product::<u64>()).map(|_| of()).collect();
        Self { kind, shape, values }
    }

    /// Of heads.
    pub fn of_heads(values: &[f32], kv_heads: usize) -> Self {
        let shape = [values.len() / kv_heads.max(1), kv_heads, 1].map(|n| n as u64);
        Self { kind: ScaleKind::Head, shape, values: values.to_vec() }
    }

    /// They on a device.
    pub fn at(&self, address: u64) -> Descale {
        let [_, heads, scale_units] = self.shape.map(|n| n as i64);
        Descale { address, kind: self.kind, shape: self.shape, strides: [heads * scale_units, scale_units, 1] }
    }
}

/// The operand as what its codes mean: f32, times its scales; of heads a tensor of more has those of each group's.
///
/// # Panics
/// When there are not as many scales as that.
pub fn dequantised(tensor: &HostTensor, scales: &Scales, kv_heads: usize) -> HostTensor {
    let [_, heads, rows, dim] = tensor.shape();
    let shape = scales.kind.sizes(tensor.shape().map(|n| n as u64), kv_heads as u64);
    assert!(scales.shape == shape, "{}", scales.kind);
    let group = heads.checked_div(kv_heads).unwrap_or(1).max(1);
    let [_, of_heads, scale_units] = shape.map(|n| n as usize);
    let mut values = tensor.values();
    for (at, x) in values.iter_mut().enumerate() {
        let (head, row, column) = (at / dim / rows, at / dim % rows, at % dim);
        let (b, h) = (head / heads, head % heads);
        let (h, unit) = match (scales.kind.rows(), scales.kind) {
            (Some(of), _) => (h, row / of as usize),
            (None, ScaleKind::Channel) => (h / group, column),
            (None, _) => (h / group, 0),
        };
        *x *= scales.values[(b * of_heads + h) * scale_units + unit];
    }
    HostTensor::from_values(DType::F32, tensor.shape(), Layout::Bhsd, &values).expect("as many values as before")
}

/// A sum of products, and what the tensor cores may lose of it.
///
/// Hopper adds 32 products at a time to the sum so far. All of them are aligned to the largest, cut off 13 bits behind
/// its first, and the new sum is cut off behind its own (DeepSeek-V3, arXiv:2412.19437, section 3.5.2; bit by bit
/// MMA-Sim, arXiv:2511.10909). So there are n = dim + 2 dim / 32 cuts, of which each loses less than 2^-13 of the
/// largest product or sum that there is at that step, towards zero. Where terms have both signs, so do their losses,
/// and these add up like a random walk: 2 sqrt(n) of the largest is enough, which is 3.5 times the standard deviation
/// when no term is exact. It is what [`lse_bound`] says, but a cut loses a whole unit where rounding loses half of one.
///
/// The sum of magnitudes, by which fp32 is bounded, is no measure here: it is several times the largest sum where
/// products cancel each other, and next to it where one of them is far larger than the others.
fn summed(q: &[f32], k: &[f32]) -> (f64, f64) {
    let (mut sum, mut largest) = (0.0f64, 0.0f64);
    for (q, k) in q.chunks(SUM_STEP).zip(k.chunks(SUM_STEP)) {
        for (q, k) in q.iter().zip(k) {
            let product = f64::from(*q) * f64::from(*k);
            sum += product;
            largest = largest.max(product.abs());
        }
        largest = largest.max(sum.abs());
    }
    let cuts = q.len() + 2 * q.len().div_ceil(SUM_STEP);
    (sum, 2.0 * (cuts as f64).sqrt() * SUM_ROUNDING * largest)
}

/// Bound of the error of a log-sum-exp: what fp32 rounds, and what the tensor cores lose of the scores.
fn bound_of_lse(oracle: &Rows, emulated: &Rows, row: usize) -> f64 {
    lse_bound(&oracle.scales[row], oracle.lse[row]) + emulated.scales[row].by_sums
}

/// The log-sum-exp of scores.
fn log_sum_exp(scores: impl Iterator<Item = f64> + Clone) -> f64 {
    let max = scores.clone().fold(f64::NEG_INFINITY, f64::max);
    max + scores.map(|s| (s - max).exp()).sum::<f64>().ln()
}

/// The oracle's rows by an emulation in fp64 that rounds P, relative to its row's largest and times 2^8, and O at its
/// end; the sum is that of the unrounded P. Of the dequantised operands.
///
/// # Panics
/// When the tensors' shapes do not belong together.
pub fn emulated([q, k, v]: [&HostTensor; 3], attention: &Attention<'_>, output: DType, oracle: &Rows) -> Rows {
    let [_, heads, q_len, dim_qk] = q.shape();
    let [_, kv_heads, kv_len, dim_v] = v.shape();
    let group = heads.checked_div(kv_heads).unwrap_or(1).max(1);
    let scale = f64::from(attention.scale);
    let sizes = super::oracle::sizes(q, k, attention.mask);
    let rows: Vec<(Vec<f64>, f64)> = oracle
        .ids
        .par_iter()
        .map(|id| {
            let (batch, head) = (id.batch as usize, id.head as usize);
            let live = attention.mask.live(id.row.into(), q_len as u64, kv_len as u64);
            let mut o = vec![0.0f64; dim_v];
            let mut row = vec![0.0f32; dim_qk];
            q.read_row([batch, head, id.row as usize], &mut row);
            let (mut key, mut value_row) = (vec![0.0f32; dim_qk], vec![0.0f32; dim_v]);
            let mut bound = attention.program.map(|(p, data)| Bound::of_checked(p, &sizes, data, Precision::F64));
            let sink = bound.as_mut().and_then(|b| b.sink(attention.sequence + id.batch, id.head, id.row));
            let (mut keys, mut scores, mut losses) = (Vec::new(), Vec::new(), Vec::new());
            for j in live {
                k.read_row([batch, head / group, j as usize], &mut key);
                let (dot, loss) = summed(&row, &key);
                let (score, loss) = (dot * scale, loss * scale.abs());
                let at = At { b: attention.sequence + id.batch, h: id.head, q: id.row, kv: j as u32 };
                let (score, loss) = match &mut bound {
                    None => (score, loss),
                    // What a loss becomes where the program changes scores: the larger of both sides.
                    Some(bound) => {
                        if !bound.visible(at) {
                            continue;
                        }
                        let changed = bound.score(at, score);
                        let sides = [score - loss, score + loss].map(|s| (bound.score(at, s) - changed).abs());
                        (changed, sides.into_iter().filter(|x| x.is_finite()).fold(0.0, f64::max))
                    }
                };
                keys.push(j);
                scores.push(score);
                losses.push(loss);
            }
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            // A row whose scores a program makes -inf is masked.
            if max == f64::NEG_INFINITY && !scores.iter().any(|s| s.is_nan()) {
                scores.clear();
            }
            let mut sum = sink.map_or(0.0, |sink| (sink - max).exp());
            for (j, score) in keys.into_iter().zip(&scores) {
                let p = (score - max).exp();
                sum += p;
                let rounded = f64::from(value(code((p * P_SCALE) as f32))) / P_SCALE;
                v.read_row([batch, head / group, j as usize], &mut value_row);
                o.iter_mut().zip(&value_row).for_each(|(o, v)| *o += rounded * f64::from(*v));
            }
            let mut by_sums = 0.0;
            if !scores.is_empty() {
                // The most that it changes: all scores larger. A key without weight loses nothing of it.
                let larger = scores.iter().zip(&losses).map(|(s, loss)| s + loss);
                by_sums = log_sum_exp(larger.chain(sink)) - log_sum_exp(scores.iter().copied().chain(sink));
                let mut rounded: Vec<f32> = o.iter().map(|o| (o / sum) as f32).collect();
                super::host::round_to(output, &mut rounded);
                o = rounded.into_iter().map(f64::from).collect();
            }
            (o, by_sums)
        })
        .collect();
    let (o, by_sums): (Vec<_>, Vec<_>) = rows.into_iter().unzip();
    let scales = oracle.scales.iter().zip(by_sums).map(|(scale, by_sums)| RowScale { by_sums, ..*scale }).collect();
    Rows { ids: oracle.ids.clone(), dim: dim_v, o: o.concat(), lse: oracle.lse.clone(), scales }
}

/// How a kernel's O, and its log-sum-exp where given, compare with the oracle's rows: within 1.15 times the root of
/// the mean square error of the emulation, besides the bound of each element.
///
/// # Panics
/// When the rows are not those of `o`.
pub fn compare(o: &HostTensor, lse: Option<&[f32]>, oracle: &Rows, emulated: &Rows) -> Verdict {
    let [_, heads, q_len, dim] = o.shape();
    assert!(oracle.dim == dim, "results of different problems");
    let read = |id: &RowId, to: &mut [f32]| o.read_row([id.batch as usize, id.head as usize, id.row as usize], to);
    compare_rows(o.dtype(), &read, lse.map(|lse| (lse, [heads, q_len])), oracle, emulated)
}

/// As [`compare`], of rows that `read` gives as fp32, wherever they are kept. The LSE comes with its heads and rows.
///
/// # Panics
/// When the two results are not of the same rows.
pub fn compare_rows(
    dtype: DType,
    read: &dyn Fn(&RowId, &mut [f32]),
    lse: Option<(&[f32], [usize; 2])>,
    oracle: &Rows,
    emulated: &Rows,
) -> Verdict {
    // Tensor cores lose more than f32 keeps, and about as much as f16 does.
    let dtype = if dtype == DType::F32 { DType::F16 } else { dtype };
    let mut bounds = oracle.clone();
    bounds.scales.iter_mut().filter(|s| s.score > LARGE_SCORE).for_each(|s| s.score *= SUM_UNITS);
    let mut verdict = super::compare_rows(dtype, read, None, &bounds, emulated);
    let (mut ours, mut theirs, mut sums, mut elements) = (0.0, 0.0, 0.0, 0.0f64);
    let mut got = vec![0.0f32; oracle.dim];
    for (i, id) in oracle.ids.iter().enumerate() {
        read(id, &mut got);
        let scale = &oracle.scales[i];
        let of_score = if scale.score > LARGE_SCORE { scale.score } else { 0.0 };
        let sum = SUM_ROUNDING * scale.output * (1.0 + of_score);
        for ((got, want), emulated) in got.iter().zip(oracle.row(i)).zip(emulated.row(i)) {
            if got.is_finite() && want.is_finite() && emulated.is_finite() {
                ours += (f64::from(*got) - want).powi(2);
                theirs += (emulated - want).powi(2);
                sums += sum.powi(2);
                elements += 1.0;
            }
        }
        if let Some((lse, [heads, q_len])) = lse {
            let at = (id.batch as usize * heads + id.head as usize) * q_len + id.row as usize;
            let (got, want) = (f64::from(lse[at]), oracle.lse[i]);
            let right = got == want || !want.is_finite() && !got.is_finite() && want != f64::NEG_INFINITY;
            let (error, bound) = ((got - want).abs(), bound_of_lse(oracle, emulated, i));
            let within = error <= bound;
            if !right && !within {
                let place = format!("LSE[batch {}, head {}, row {}]", id.batch, id.head, id.row);
                let why = format!("{place} is {got:e}, the oracle says {want:e} (bound {bound:.2e})");
                verdict.failure.get_or_insert(why);
            }
            if error.is_finite() {
                verdict.lse_error = verdict.lse_error.max(error);
            }
        }
    }
    // The same roundings fall otherwise where a reference was another one: few elements differ by chance.
    let most = MOST + 4.0 / elements.max(1.0).sqrt();
    let [ours, theirs, sums] = [ours, theirs, sums].map(|squares: f64| (squares / elements.max(1.0)).sqrt());
    if ours > most * theirs + sums {
        let why = format!("the error of O is {ours:.3e} in the mean, that of rounding P alone {theirs:.3e}");
        verdict.failure.get_or_insert(why);
    }
    verdict
}

#[cfg(test)]
mod tests {
    use super::super::{all_rows, oracle_of};
    use super::*;
    use crate::Distribution;
    use flashtune_codegen::{Mask, Shape};

    /// Expected rows of 63 queries in four heads and 129 keys in two, by operands, scale and rows.
    struct Fixture {
        q: HostTensor,
        k: HostTensor,
        scale: f32,
        oracle: Rows,
        emulated: Rows,
    }

    /// Of random operands. With `large` the last key of the first head has an element of 448 before it is scaled.
    fn fixture(large: bool, scale: f32) -> Fixture {
        let shape = Shape { batch: 1, heads: 4, kv_heads: 2, q_len: 63, kv_len: 129, mask: Mask::Full };
        let random = |shape, seed| HostTensor::random(DType::E4m3, shape, Layout::Bhsd, seed, Distribution::Normal);
        let q = random([1, 4, 63, 128], 120);
        let mut k = random([1, 2, 129, 128], 121);
        if large {
            k.set([0, 0, 128, 0], f32::INFINITY);
        }
        let q = dequantised(&q, &Scales::of_heads(&[1.106_967_7, 1.827_424_5], 2), 2);
        let k = dequantised(&k, &Scales::of_heads(&[0.568_047_46, 0.944_248_4], 2), 2);
        let v = HostTensor::zeros(DType::F32, [1, 2, 129, 1], Layout::Bhsd);
        let attention = Attention { mask: Mask::Full, scale, program: None, sequence: 0, dropout: None };
        let oracle = oracle_of(&q, &k, &v, &attention, &all_rows(&shape));
        let emulated = emulated([&q, &k, &v], &attention, DType::F32, &oracle);
        Fixture { q, k, scale, oracle, emulated }
    }

    impl Fixture {
        /// Whether a log-sum-exp of a row passes where all others are exact.
        fn takes(&self, row: usize, lse: f64) -> bool {
            let o = HostTensor::zeros(DType::F32, [1, 4, 63, 1], Layout::Bhsd);
            let mut all: Vec<f32> = self.oracle.lse.iter().map(|x| *x as f32).collect();
            all[row] = lse as f32;
            compare(&o, Some(&all), &self.oracle, &self.emulated).passed()
        }

        fn scores(&self, row: usize) -> Vec<f64> {
            let (mut q, mut k) = ([0.0; 128], [0.0; 128]);
            self.q.read_row([0, row / 63, row % 63], &mut q);
            let score = |key| {
                self.k.read_row([0, row / 126, key], &mut k);
                summed(&q, &k).0 * f64::from(self.scale)
            };
            (0..129).map(score).collect()
        }

        /// The log-sum-exp of a row without a key.
        fn without(&self, row: usize, key: usize) -> f64 {
            let scores = self.scores(row);
            log_sum_exp(scores.iter().enumerate().filter(|(j, _)| *j != key).map(|(_, s)| *s))
        }
    }

    #[test]
    fn what_hopper_makes_of_a_large_key_passes_and_defects_beside_it_do_not() {
        let f = fixture(true, 0.25);
        // Of an H200, and of its sums simulated bit by bit: 579.3125 for 580.28, to which the large key adds 560.
        let (row, measured) = (57, 91.069_404_602_050_78);
        let want = f.oracle.lse[row];
        assert!((want - 91.221_596_968).abs() < 1e-8, "{want}");
        assert!(f.takes(row, want) && f.takes(row, measured));
        // As far again, without either operand's scale, and without the key.
        let wrong = [want - 2.0 * (want - measured), want / 1.106_967_7, want / 0.568_047_46, f.without(row, 128)];
        assert!(wrong.iter().all(|lse| !f.takes(row, *lse)), "{wrong:?}");
    }

    #[test]
    fn a_large_key_loosens_the_lse_of_the_rows_alone_that_attend_to_it() {
        let (with, plain) = (fixture(true, 0.25), fixture(false, 0.25));
        let bound = |f: &Fixture, row| bound_of_lse(&f.oracle, &f.emulated, row);
        let (mut turned_away, mut drawn) = (0, 0);
        for row in 0..126 {
            let (score, ratio) = (with.scores(row)[128], bound(&with, row) / bound(&plain, row));
            if score < -20.0 {
                turned_away += 1;
                assert!(ratio < 1.25, "{row}: {ratio}");
            } else if score > 20.0 {
                drawn += 1;
                assert!(ratio > 1.25, "{row}: {ratio}");
            }
        }
        assert!(turned_away > 20 && drawn > 20, "{turned_away} {drawn}");
    }

    #[test]
    fn an_ordinary_lse_has_a_closer_bound_and_a_lost_key_is_seen() {
        let f = fixture(false, 128f32.sqrt().recip());
        for row in 0..252 {
            let bound = bound_of_lse(&f.oracle, &f.emulated, row);
            let magnitudes = 128f64.sqrt() * SUM_ROUNDING * f.oracle.scales[row].score;
            assert!(bound < magnitudes, "{row}: {bound} {magnitudes}");
            let scores = f.scores(row);
            let largest = (0..129).max_by(|a, b| scores[*a].total_cmp(&scores[*b])).unwrap();
            let lost = f.without(row, largest);
            assert!((lost - f.oracle.lse[row]).abs() > 2.0 * bound, "{row}: {bound}");
            // Rows of the first and of the second KV head, by the whole comparison.
            if row % 63 == 3 {
                assert!(f.takes(row, f.oracle.lse[row]) && !f.takes(row, lost) && !f.takes(row, f64::NAN), "{row}");
                let scale = if row < 126 { 1.106_967_7 } else { 1.827_424_5 };
                let unscaled = log_sum_exp(scores.iter().map(|s| s / scale));
                assert!(!f.takes(row, unscaled), "{row}");
            }
        }
    }

    #[test]
    fn every_code_is_the_one_of_its_value_and_values_between_go_to_the_next() {
        for c in 0..=255u8 {
            let x = value(c);
            if !x.is_nan() {
                assert_eq!(code(x), c, "{x}");
            }
        }
        let finite: Vec<f32> = (0..0x7f).map(value).collect();
        for (c, pair) in finite.windows(2).enumerate() {
            let (low, high) = (pair[0], pair[1]);
            let middle = (low + high) / 2.0;
            let even = if c % 2 == 0 { c } else { c + 1 };
            assert_eq!(code(middle) as usize, even, "{middle}");
            assert_eq!(code(middle.next_down()) as usize, c);
            assert_eq!(code(-middle.next_up()) as usize, 0x80 | (c + 1));
        }
        assert_eq!([500.0, -1e30, f32::INFINITY].map(code), [0x7e, 0xfe, 0x7e]);
        assert!(value(code(f32::NAN)).is_nan());
    }

    #[test]
    fn finer_scales_are_those_of_an_elements_own_row_block_or_channel() {
        let ones = HostTensor::from_values(DType::E4m3, [1, 2, 3, 2], Layout::Bhsd, &[1.0; 12]).unwrap();
        let of = |kind, shape: [u64; 3]| {
            let values = (1..=shape.iter().product::<u64>()).map(|n| n as f32).collect();
            dequantised(&ones, &Scales { kind, shape, values }, 1).values()
        };
        let token = [1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0, 5.0, 5.0, 6.0, 6.0];
        assert_eq!(of(ScaleKind::Token, [1, 2, 3]), token);
        let block = [1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 3.0, 3.0, 4.0, 4.0];
        assert_eq!(of(ScaleKind::Block(2), [1, 2, 2]), block);
        assert_eq!(of(ScaleKind::Channel, [1, 1, 2]), [1.0, 2.0].repeat(6));
    }

    #[test]
    fn scales_are_those_of_a_rows_kv_head() {
        let ones = HostTensor::from_values(DType::E4m3, [2, 4, 1, 1], Layout::Bhsd, &[1.0; 8]).unwrap();
        let values = dequantised(&ones, &Scales::of_heads(&[1.0, 2.0, 3.0, 4.0], 2), 2).values();
        assert_eq!(values, [1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0]);
    }
}

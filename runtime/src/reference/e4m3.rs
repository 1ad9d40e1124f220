//! `e4m3` on the host: its codes, operands as what they mean, and the yardstick of kernels that round P to it.

use super::compare::lse_bound;
use super::{Attention, HostTensor, Layout, RowId, Rows, Verdict, compare_rows};
use flashtune_codegen::DType;
use rayon::prelude::*;

/// Kernels' error is at most this many times that of an emulation that rounds P alone.
const MOST: f64 = 1.15;
/// P is multiplied by this before it is rounded.
const P_SCALE: f64 = 256.0;
/// What a sum of FP8 products loses of the magnitudes of its terms: 13 bits are kept.
const SUM_ROUNDING: f64 = 1.0 / 8192.0;
/// That in units of fp32, where a bound counts in these.
const SUM_UNITS: f64 = 1024.0;
/// From these magnitudes of a score's terms on, what its sum loses comes near to the rounding of P.
const LARGE_SCORE: f64 = 32.0;

/// What a code means.
pub(crate) fn value(code: u8) -> f32 {
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
    let units = (magnitude * 2f32.powi(3 - exponent)).round_ties_even() as i32;
    sign | (units + ((exponent + 6) << 3)) as u8
}

/// The operand as what its codes mean: f32, times the scale of each head, `[batch, kv_heads]`; a tensor of more heads
/// has those of each group's.
///
/// # Panics
/// When there are not as many scales as that.
pub fn dequantised(tensor: &HostTensor, scales: &[f32], kv_heads: usize) -> HostTensor {
    let [batch, heads, rows, dim] = tensor.shape();
    assert!(scales.len() == batch * kv_heads, "a scale for each sequence and KV head");
    let group = heads.checked_div(kv_heads).unwrap_or(1).max(1);
    let mut values = tensor.values();
    for (i, head) in values.chunks_exact_mut((rows * dim).max(1)).enumerate() {
        let scale = scales[i / heads * kv_heads + i % heads / group];
        head.iter_mut().for_each(|x| *x *= scale);
    }
    HostTensor::from_values(DType::F32, tensor.shape(), Layout::Bhsd, &values).expect("as many values as before")
}

/// The oracle's rows by an emulation in fp64 that rounds P, relative to its row's largest and times 2^8, and O at its
/// end; the sum is that of the unrounded P. Of the dequantised operands, without a score program.
///
/// # Panics
/// When the tensors' shapes do not belong together.
pub fn emulated([q, k, v]: [&HostTensor; 3], attention: &Attention<'_>, output: DType, oracle: &Rows) -> Rows {
    let [_, heads, q_len, dim_qk] = q.shape();
    let [_, kv_heads, kv_len, dim_v] = v.shape();
    let group = heads.checked_div(kv_heads).unwrap_or(1).max(1);
    let scale = f64::from(attention.scale);
    let rows: Vec<Vec<f64>> = oracle
        .ids
        .par_iter()
        .map(|id| {
            let (batch, head) = (id.batch as usize, id.head as usize);
            let live = attention.mask.live(id.row.into(), q_len as u64, kv_len as u64);
            let mut o = vec![0.0f64; dim_v];
            let mut row = vec![0.0f32; dim_qk];
            q.read_row([batch, head, id.row as usize], &mut row);
            let (mut key, mut value_row) = (vec![0.0f32; dim_qk], vec![0.0f32; dim_v]);
            let mut scores = Vec::new();
            for j in live.clone() {
                k.read_row([batch, head / group, j as usize], &mut key);
                let dot: f64 = row.iter().zip(&key).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                scores.push(dot * scale);
            }
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let mut sum = 0.0;
            for (j, score) in live.zip(&scores) {
                let p = (score - max).exp();
                sum += p;
                let rounded = f64::from(value(code((p * P_SCALE) as f32))) / P_SCALE;
                v.read_row([batch, head / group, j as usize], &mut value_row);
                o.iter_mut().zip(&value_row).for_each(|(o, v)| *o += rounded * f64::from(*v));
            }
            if !scores.is_empty() {
                let mut rounded: Vec<f32> = o.iter().map(|o| (o / sum) as f32).collect();
                super::host::round_to(output, &mut rounded);
                o = rounded.into_iter().map(f64::from).collect();
            }
            o
        })
        .collect();
    let lse = oracle.lse.clone();
    Rows { ids: oracle.ids.clone(), dim: dim_v, o: rows.concat(), lse, scales: oracle.scales.clone() }
}

/// How a kernel's O, and its log-sum-exp where given, compare with the oracle's rows: within [`MOST`] times the root of
/// the mean square error of the emulation, besides the bound of each element.
///
/// # Panics
/// When the rows are not those of `o`.
pub fn compare(o: &HostTensor, lse: Option<&[f32]>, oracle: &Rows, emulated: &Rows) -> Verdict {
    let [_, heads, q_len, dim] = o.shape();
    let read = |id: &RowId, to: &mut [f32]| o.read_row([id.batch as usize, id.head as usize, id.row as usize], to);
    // Tensor cores lose more than f32 keeps, and about as much as f16 does.
    let dtype = if o.dtype() == DType::F32 { DType::F16 } else { o.dtype() };
    let mut bounds = oracle.clone();
    bounds.scales.iter_mut().filter(|s| s.score > LARGE_SCORE).for_each(|s| s.score *= SUM_UNITS);
    let mut verdict = compare_rows(dtype, &read, None, &bounds, emulated);
    let (mut ours, mut theirs, mut sums, mut elements) = (0.0, 0.0, 0.0, 0.0f64);
    let mut got = vec![0.0f32; dim];
    for (i, id) in oracle.ids.iter().enumerate() {
        let at = [id.batch as usize, id.head as usize, id.row as usize];
        o.read_row(at, &mut got);
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
        if let Some(lse) = lse {
            let (got, want) = (f64::from(lse[(at[0] * heads + at[1]) * q_len + at[2]]), oracle.lse[i]);
            let right = got == want || !want.is_finite() && !got.is_finite() && want != f64::NEG_INFINITY;
            let mut scale = *scale;
            scale.score *= SUM_UNITS;
            let (error, bound) = ((got - want).abs(), lse_bound(&scale, want));
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
    use super::*;

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
    fn scales_are_those_of_a_rows_kv_head() {
        let ones = HostTensor::from_values(DType::E4m3, [2, 4, 1, 1], Layout::Bhsd, &[1.0; 8]).unwrap();
        let values = dequantised(&ones, &[1.0, 2.0, 3.0, 4.0], 2).values();
        assert_eq!(values, [1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0]);
    }
}

//! Is a result right? Its error against the oracle, measured by the error of unfused attention.

use super::host::round_to;
use super::oracle::RowScale;
use super::{Gradients, HostTensor, RowId, Rows};
use flashtune_codegen::DType;
use std::fmt;

/// How a result compares with the oracle.
#[derive(Debug, Clone, PartialEq)]
pub struct Verdict {
    /// Largest absolute error of O, over elements that are finite in both.
    pub max_error: f64,
    /// Largest absolute error of unfused attention in the same dtype on the same rows.
    pub unfused_error: f64,
    /// Largest ratio of error to bound over O and LSE; above 1 is a failure. The bound is twice the error of unfused
    /// attention among rows with about as many keys, plus one rounding of the dtype and some of fp32; in 16 bits a row
    /// with one key has to be its V.
    pub worst_ratio: f64,
    /// Largest absolute error of the LSE; 0 when it was not asked for.
    pub lse_error: f64,
    /// Number of rows compared.
    pub rows: usize,
    /// What is wrong, if anything, in words.
    pub failure: Option<String>,
}

impl Verdict {
    /// Whether the result is right.
    pub fn passed(&self) -> bool {
        self.failure.is_none()
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.failure {
            None => f.write_str("ok")?,
            Some(why) => write!(f, "WRONG: {why}")?,
        }
        write!(
            f,
            "; max error {:.2e} (unfused {:.2e}), LSE {:.2e}, {:.2} of the bound, {} rows",
            self.max_error, self.unfused_error, self.lse_error, self.worst_ratio, self.rows
        )
    }
}

/// What the rows with about as many keys have in common. Errors shrink as more keys are averaged, so a bound over all
/// rows would hide a wrong row with many keys behind the error of a row with few.
#[derive(Debug, Clone, Copy, Default)]
struct Class {
    unfused: f64,
    output: f64,
    scale: RowScale,
}

impl Class {
    fn of(row: &RowScale) -> usize {
        row.live.checked_ilog2().map_or(0, |n| n as usize + 1)
    }

    /// Bound of the error of O.
    fn bound(&self, dtype: DType) -> f64 {
        let fp32 = f32::EPSILON as f64 * self.scale.output * (4.0 + 2.0 * self.scale.score);
        2.0 * self.unfused + dtype.epsilon() * (self.output + self.scale.by_o) + fp32
    }
}

/// Bound of the error of an LSE, which is fp32 for every dtype: sums of products, an exponential and a logarithm.
///
/// Roundings of a sum of n terms add up like a random walk: 2 sqrt(n) u times the sum of magnitudes holds for any order
/// of summation but with a probability that does not matter here (Higham and Mary 2019, theorem 2.4; u is half of
/// epsilon). A few large channels at the front of a row of 248 do come close.
pub(super) fn lse_bound(scale: &RowScale, lse: f64) -> f64 {
    let walk = (scale.terms as f64).sqrt().max(4.0);
    f32::EPSILON as f64 * (8.0 + walk * scale.score + 2.0 * lse.abs())
}

/// Compares O, and the LSE when given (contiguous `[batch, heads, q_len]`), with the oracle's rows. `unfused` are the
/// same rows by [`super::unfused_rows`]. Where the oracle is not finite (visible NaN or Inf), the result must not be
/// either; everywhere else it must be within the bound.
///
/// # Panics
/// When the rows are not those of `o`.
pub fn compare(o: &HostTensor, lse: Option<&[f32]>, oracle: &Rows, unfused: &Rows) -> Verdict {
    let [_, heads, q_len, dim] = o.shape();
    assert!(oracle.dim == dim, "results of different problems");
    let read = |id: &RowId, to: &mut [f32]| o.read_row([id.batch as usize, id.head as usize, id.row as usize], to);
    compare_rows(o.dtype(), &read, lse.map(|lse| (lse, [heads, q_len])), oracle, unfused)
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
    unfused: &Rows,
) -> Verdict {
    compare_named("O", dtype, read, lse, oracle, unfused)
}

/// Compares dQ, dK and dV with the oracle's, all rows of them, by the error of unfused gradients.
///
/// # Panics
/// When the results are not of the same sizes.
pub fn compare_gradients(got: [&HostTensor; 3], oracle: &Gradients, unfused: &Gradients) -> Verdict {
    let of = [("dQ", &oracle.dq, &unfused.dq), ("dK", &oracle.dk, &unfused.dk), ("dV", &oracle.dv, &unfused.dv)];
    let verdicts = got.into_iter().zip(of).map(|(got, (name, oracle, unfused))| {
        let read =
            |id: &RowId, to: &mut [f32]| got.read_row([id.batch as usize, id.head as usize, id.row as usize], to);
        compare_named(name, got.dtype(), &read, None, oracle, unfused)
    });
    verdicts.reduce(Verdict::join).expect("three gradients")
}

/// Compares the gradient of a tensor, its elements in order, with the oracle's. `dtype` is the coarser one of the
/// problem's and of the gradient's own.
///
/// # Panics
/// When the results are not of the same tensor.
pub fn compare_gradient_by(name: &str, got: &[f32], dtype: DType, oracle: &Rows, unfused: &Rows) -> Verdict {
    let read = |id: &RowId, to: &mut [f32]| to[0] = got[id.row as usize];
    compare_named(&format!("d{name}"), dtype, &read, None, oracle, unfused)
}

/// [`compare_rows`] of what has another name than O.
fn compare_named(
    what: &str,
    dtype: DType,
    read: &dyn Fn(&RowId, &mut [f32]),
    lse: Option<(&[f32], [usize; 2])>,
    oracle: &Rows,
    unfused: &Rows,
) -> Verdict {
    assert!(unfused.ids == oracle.ids, "results of different problems");
    let mut classes = [Class::default(); 66];
    for (i, scale) in oracle.scales.iter().enumerate() {
        let class = &mut classes[Class::of(scale)];
        for (want, ours) in oracle.row(i).iter().zip(unfused.row(i)) {
            if want.is_finite() && ours.is_finite() {
                class.unfused = class.unfused.max((want - ours).abs());
                class.output = class.output.max(want.abs());
            }
        }
        if scale.score.is_finite() && scale.output.is_finite() {
            class.scale.score = class.scale.score.max(scale.score);
            class.scale.output = class.scale.output.max(scale.output);
            class.scale.by_o = class.scale.by_o.max(if scale.by_o.is_finite() { scale.by_o } else { 0.0 });
        }
    }

    let unfused_error = classes.iter().map(|c| c.unfused).fold(0.0, f64::max);
    let rows = oracle.ids.len();
    let mut verdict = Verdict { max_error: 0.0, unfused_error, worst_ratio: 0.0, lse_error: 0.0, rows, failure: None };
    let mut got = vec![0.0f32; oracle.dim];
    for (i, (id, scale)) in oracle.ids.iter().zip(&oracle.scales).enumerate() {
        read(id, &mut got);
        let bound = match what == "O" && is_value_of_one_key(dtype, scale, oracle.row(i)) {
            // Anything else is half a unit in the last place away at least.
            true => dtype.epsilon() * f64::EPSILON,
            false => classes[Class::of(scale)].bound(dtype),
        };
        for (d, (got, want)) in got.iter().zip(oracle.row(i)).enumerate() {
            let got = *got as f64;
            let error = if is_right(got, *want) || is_overflow(dtype, got, *want, bound) {
                0.0
            } else {
                verdict.take(got, *want, bound, || place(what, id, Some(d)))
            };
            verdict.max_error = verdict.max_error.max(error);
        }
        if let Some((lse, [heads, q_len])) = lse {
            let at = (id.batch as usize * heads + id.head as usize) * q_len + id.row as usize;
            let want = oracle.lse[i];
            let got = lse[at] as f64;
            // That there is no key is said by -inf and by nothing else.
            let right = is_right(got, want) && (want != f64::NEG_INFINITY || got == want);
            let error =
                if right { 0.0 } else { verdict.take(got, want, lse_bound(scale, want), || place("LSE", id, None)) };
            verdict.lse_error = verdict.lse_error.max(error);
        }
    }
    verdict
}

/// Scores up to which the exponential of a score less its own rounded product is 1 within a unit of every 16-bit dtype.
const EXACT_SCORES: f64 = 256.0;

/// Whether a row of O is V of the only key that it attends to, to the bit: its weight is 1, whatever it is measured
/// from. D of the backward pass is dP there, so that dQ and dK of the row are 0, and otherwise what O is off by. Not
/// beside a sink or a factor that dropout left, of which the product is rounded.
fn is_value_of_one_key(dtype: DType, scale: &RowScale, want: &[f64]) -> bool {
    let is_of_dtype = |x: &f64| {
        let mut rounded = [*x as f32];
        round_to(dtype, &mut rounded);
        f64::from(rounded[0]) == *x
    };
    matches!(dtype, DType::F16 | DType::Bf16)
        && scale.live == 1
        && scale.score < EXACT_SCORES
        && want.iter().all(is_of_dtype)
}

/// Whether a value needs no look at its error. NaN and Inf that the oracle sees too are right whatever their kind,
/// because their order of appearance is not defined.
fn is_right(got: f64, want: f64) -> bool {
    got == want || !want.is_finite() && !got.is_finite()
}

/// Whether a result became infinite as its dtype demands: the exact one, give or take the bound, rounds to infinity.
fn is_overflow(dtype: DType, got: f64, want: f64, bound: f64) -> bool {
    let rounds_to_infinity = dtype.largest() * (1.0 + dtype.epsilon() / 4.0);
    got.is_infinite() && got.signum() == want.signum() && want.abs() + bound >= rounds_to_infinity
}

impl Verdict {
    /// Of both results together; the worse failure stays.
    fn join(self, other: Self) -> Self {
        let failure = if other.worst_ratio > self.worst_ratio {
            other.failure.or(self.failure)
        } else {
            self.failure.or(other.failure)
        };
        Self {
            max_error: self.max_error.max(other.max_error),
            unfused_error: self.unfused_error.max(other.unfused_error),
            worst_ratio: self.worst_ratio.max(other.worst_ratio),
            lse_error: self.lse_error.max(other.lse_error),
            rows: self.rows + other.rows,
            failure,
        }
    }

    /// Takes a value that is not the expected one into account and returns its error. The worst failure stays.
    fn take(&mut self, got: f64, want: f64, bound: f64, place: impl Fn() -> String) -> f64 {
        let error = (got - want).abs();
        let ratio = if error.is_finite() { error / bound.max(f64::MIN_POSITIVE) } else { f64::INFINITY };
        if ratio > 1.0 && (self.failure.is_none() || ratio > self.worst_ratio) {
            self.failure = Some(format!("{} is {got:e}, the oracle says {want:e} (bound {bound:.2e})", place()));
        }
        self.worst_ratio = self.worst_ratio.max(ratio);
        if error.is_finite() { error } else { 0.0 }
    }
}

fn place(what: &str, id: &RowId, element: Option<usize>) -> String {
    let RowId { batch, head, row } = id;
    match element {
        Some(d) => format!("{what}[batch {batch}, head {head}, row {row}, {d}]"),
        None => format!("{what}[batch {batch}, head {head}, row {row}]"),
    }
}

impl Rows {
    /// Row `i` of O.
    pub fn row(&self, i: usize) -> &[f64] {
        &self.o[i * self.dim..][..self.dim]
    }
}

#[cfg(test)]
mod tests {
    use super::super::{all_rows, oracle, unfused, unfused_rows};
    use super::*;
    use crate::{Distribution, Layout};
    use flashtune_codegen::{Mask, Shape};

    struct Fixture {
        o: HostTensor,
        lse: Vec<f32>,
        oracle: Rows,
        unfused: Rows,
    }

    fn fixture(dtype: DType, mask: Mask, poison: bool) -> Fixture {
        let shape = Shape { batch: 1, heads: 2, kv_heads: 1, q_len: 300, kv_len: 300, mask };
        let make = |h, seed| HostTensor::random(dtype, [1, h, 300, 16], Layout::Bhsd, seed, Distribution::Normal);
        let (q, k, mut v) = (make(2, 1), make(1, 2), make(1, 3));
        if poison {
            v.set([0, 0, 299, 3], f32::INFINITY);
        }
        let ids = all_rows(&shape);
        let oracle = oracle(&q, &k, &v, mask, 0.25, &ids);
        let lse = oracle.lse.iter().map(|x| *x as f32).collect();
        let unfused_rows = unfused_rows(&q, &k, &v, mask, 0.25, &ids);
        Fixture { o: unfused(&q, &k, &v, mask, 0.25), lse, oracle, unfused: unfused_rows }
    }

    impl Fixture {
        fn verdict(&self) -> Verdict {
            compare(&self.o, Some(&self.lse), &self.oracle, &self.unfused)
        }
    }

    #[test]
    fn unfused_attention_passes_its_own_criterion() {
        for dtype in DType::ALL {
            for mask in [Mask::Full, Mask::Causal] {
                let v = fixture(dtype, mask, true).verdict();
                assert!(v.passed() && v.worst_ratio <= 0.5 && v.rows == 600, "{dtype} {mask}: {v}");
            }
        }
    }

    #[test]
    fn one_key_too_many_in_a_long_row_is_seen() {
        // The error is far below that of short rows, where few keys are averaged.
        let mut f = fixture(DType::F16, Mask::Causal, false);
        let bump =
            4.0 * f.unfused.row(299).iter().zip(f.oracle.row(299)).map(|(a, b)| (a - b).abs()).fold(1e-3, f64::max);
        let x = f.o.get([0, 0, 299, 0]);
        f.o.set([0, 0, 299, 0], x + bump as f32);
        let v = f.verdict();
        assert!(!v.passed() && v.failure.as_ref().unwrap().contains("row 299"), "{v}");
        assert!(bump < 8.0 * v.unfused_error, "{bump} {v}");
    }

    #[test]
    fn a_row_of_one_key_is_its_value_to_the_bit() {
        for (dtype, exact) in [(DType::F16, true), (DType::Bf16, true), (DType::F32, false)] {
            let mut f = fixture(dtype, Mask::Causal, false);
            let value = f.o.get([0, 1, 0, 5]);
            f.o.set([0, 1, 0, 5], value * (1.0 + 2.0 * dtype.epsilon() as f32));
            assert_ne!(f.o.get([0, 1, 0, 5]), value);
            let v = f.verdict();
            assert_eq!(!v.passed() && v.failure.as_ref().is_some_and(|why| why.contains("row 0, 5")), exact, "{v}");
            // Beside a sink there is a bound.
            let shrink = |x: &mut f64| *x *= 1.0 - dtype.epsilon() / 8.0;
            f.oracle.o.iter_mut().chain(&mut f.unfused.o).for_each(shrink);
            assert!(f.verdict().passed(), "{dtype}: {}", f.verdict());
        }
    }

    #[test]
    fn results_beyond_the_dtype_are_infinite_and_no_others() {
        let mut f = fixture(DType::F16, Mask::Causal, false);
        let row = f.oracle.ids.iter().position(|id| (id.head, id.row) == (0, 299)).unwrap();
        for (want, got, right) in [
            (7e4, f32::INFINITY, true),
            (-7e4, f32::NEG_INFINITY, true),
            (7e4, f32::NEG_INFINITY, false),
            (7e4, 65504.0, false),
            (65400.0, f32::INFINITY, false),
        ] {
            for rows in [&mut f.oracle, &mut f.unfused] {
                rows.o[row * rows.dim] = want;
            }
            f.o.set([0, 0, 299, 0], got);
            assert_eq!(f.verdict().passed(), right, "{want} {got}");
        }
    }

    #[test]
    fn nan_where_there_is_none_and_numbers_where_there_is_nan_are_failures() {
        let mut f = fixture(DType::Bf16, Mask::Causal, true);
        f.o.set([0, 1, 7, 2], f32::NAN);
        assert!(f.verdict().to_string().contains("row 7"));
        let mut f = fixture(DType::Bf16, Mask::Causal, true);
        f.o.set([0, 1, 299, 3], f32::NAN);
        assert!(f.verdict().passed(), "NaN for Inf");
        f.o.set([0, 1, 299, 3], 1.0);
        assert!(!f.verdict().passed());
    }

    #[test]
    fn the_lse_is_compared_to_fp32_and_empty_rows_must_be_minus_infinity() {
        let mut f = fixture(DType::Bf16, Mask::Causal, false);
        f.lse[17] += 1e-3;
        assert!(f.verdict().to_string().contains("LSE[batch 0, head 0, row 17]"));
        let shape = Shape { batch: 1, heads: 1, kv_heads: 1, q_len: 2, kv_len: 0, mask: Mask::Full };
        let make = |s| HostTensor::zeros(DType::F32, [1, 1, s, 16], Layout::Bhsd);
        let ids = all_rows(&shape);
        let want = oracle(&make(2), &make(0), &make(0), Mask::Full, 1.0, &ids);
        let yard = unfused_rows(&make(2), &make(0), &make(0), Mask::Full, 1.0, &ids);
        let right = compare(&make(2), Some(&[f32::NEG_INFINITY; 2]), &want, &yard);
        assert!(right.passed(), "{right}");
        for wrong in [0.0, f32::NAN, f32::INFINITY, -1e38] {
            assert!(!compare(&make(2), Some(&[f32::NEG_INFINITY, wrong]), &want, &yard).passed(), "{wrong}");
        }
    }
}

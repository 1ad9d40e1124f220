//! Every candidate proves itself on small ragged inputs before it may be timed.
//!
//! The inputs are derived from the job: the same problem, KV-group size and mask kind, lengths that end in the middle
//! of every block, once with more keys than queries and once the other way round (which gives empty rows under a causal
//! mask), one query alone, and whole blocks; with activations that carry large outlier channels and with normals, in
//! three layouts, with NaN or infinities where nobody may look, and in a few places where some do. Outputs are poisoned
//! before every launch, launches repeated and compared bit by bit, what lies around the tensors is looked at; the bound
//! on the error is that of the numeric contract, which grows with dtype and length. All that is [`CheckCase`]'s work;
//! here is only the choice of cases.

use super::Inputs;
use super::ragged;
use crate::space::input_seed;
use flashtune_codegen::{Mask, Shape};
use flashtune_runtime::{
    BackwardCase, CheckCase, CheckInputs, CheckReport, Device, Distribution, Error as RuntimeError, Layout, Module,
    Poison, RaggedCase,
};
use std::sync::Arc;

/// Query lengths and key lengths of the cases: more than a block of every schedule, and multiples of none.
const LONG: u32 = 333;
const SHORT: u32 = 151;
/// A multiple of most blocks: the edge that is none.
const EVEN: u32 = 128;

/// Lengths of Q and of K and V, by case.
const SIZES: [(u32, u32); 4] = [(SHORT, LONG), (LONG, SHORT), (1, LONG), (EVEN, EVEN)];

/// Launches of the first case and of the others.
const LAUNCHES: [usize; 2] = [10, 2];

/// The cases of a job, with their expected results.
pub(super) enum Cases {
    Dense(Vec<CheckCase>),
    Backward(Vec<BackwardCase>),
    Ragged(Vec<RaggedCase>),
}

impl Cases {
    /// Makes inputs and computes what is expected.
    pub(crate) fn new(device: &Arc<dyn Device>, job: &Inputs) -> Result<Self, RuntimeError> {
        if job.is_ragged() {
            return ragged::small_cases(device, job).map(Self::Ragged);
        }
        let seed = input_seed(job.seed);
        let (bhsd, bshd, padded) = (Layout::Bhsd, Layout::Bshd, Layout::Padded);
        let (normal, outliers) = (Distribution::Normal, Distribution::NormalWithOutliers);
        let (nan, infinite) = (Poison::Nan, Poison::Infinite);
        let kinds =
            [(bhsd, outliers, nan), (padded, normal, infinite), (bshd, normal, infinite), (bshd, outliers, nan)];
        let cases = SIZES.into_iter().zip(kinds).zip(0..);
        let cases = cases.map(|(((q_len, kv_len), (layout, distribution, poison)), i)| {
            let inputs = CheckInputs { layout, distribution, seed: seed ^ i, lse: true, poison, scale: None };
            (ragged(&job.shape, q_len, kv_len), inputs)
        });
        if job.is_backward() {
            let case = |(shape, inputs)| BackwardCase::new(device.clone(), &job.problem, &shape, &inputs);
            return Ok(Self::Backward(cases.map(case).collect::<Result<_, _>>()?));
        }
        let case = |(shape, inputs)| CheckCase::typical(device.clone(), &job.problem, &shape, &inputs);
        Ok(Self::Dense(cases.map(case).collect::<Result<_, _>>()?))
    }

    /// Checks one kernel; gives its largest absolute error.
    pub(crate) fn check(&self, module: &dyn Module) -> Result<f64, String> {
        type Checked = Result<CheckReport, RuntimeError>;
        let mut max_error = 0.0f64;
        let mut pass = |shape: &Shape, i: usize, check: &dyn Fn(usize) -> Checked| {
            let report = check(LAUNCHES[i.min(1)]).map_err(|e| e.to_string())?;
            if !report.passed() {
                return Err(format!("wrong answer for {shape}: {report}"));
            }
            max_error = max_error.max(report.verdict.max_error);
            Ok(())
        };
        match self {
            Cases::Dense(cases) => {
                for (i, case) in cases.iter().enumerate() {
                    pass(case.shape(), i, &|launches| case.check_launches(module, launches))?;
                }
            }
            Cases::Backward(cases) => {
                for (i, case) in cases.iter().enumerate() {
                    pass(case.shape(), i, &|launches| case.check_launches(module, launches))?;
                }
            }
            Cases::Ragged(cases) => {
                for (i, case) in cases.iter().enumerate() {
                    let passed = pass(case.data().shape(), i, &|launches| case.check_launches(module, launches));
                    if passed.is_err() {
                        // The next candidate is not to meet what this one may have written.
                        case.restore().map_err(|e| e.to_string())?;
                    }
                    passed?;
                }
            }
        }
        Ok(max_error)
    }
}

/// The most work among the cases of a job, whose launch is the longest: multiply-adds of one column of K and V.
pub(super) fn most_flops(job: &Inputs) -> f64 {
    if job.is_ragged() {
        return ragged::most_flops();
    }
    let flops = |(q_len, kv_len)| ragged(&job.shape, q_len, kv_len).forward_flops(1, 1);
    SIZES.map(flops).into_iter().fold(1.0, f64::max)
}

/// A small shape like the job's: same group size and mask kind, one KV head or two.
fn ragged(shape: &Shape, q_len: u32, kv_len: u32) -> Shape {
    let group = shape.group().min(8);
    let kv_heads = if group > 2 { 1 } else { 2 };
    let mask = match shape.mask {
        Mask::Window { left, right } => Mask::Window { left: left.map(|l| l.min(61)), right: right.map(|r| r.min(13)) },
        mask => mask,
    };
    Shape { batch: 1, heads: group * kv_heads, kv_heads, q_len, kv_len, mask }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ragged_shapes_keep_group_and_mask_kind() {
        let big = Shape {
            batch: 8,
            heads: 32,
            kv_heads: 8,
            q_len: 4096,
            kv_len: 4096,
            mask: Mask::Window { left: Some(1024), right: Some(0) },
        };
        let small = ragged(&big, SHORT, LONG);
        assert_eq!((small.group(), small.mask.kind()), (4, big.mask.kind()));
        assert!(small.validate().is_ok());
        assert_eq!(small.mask, Mask::Window { left: Some(61), right: Some(0) });
        // Lengths end inside of every block that a schedule may have.
        let blocks = [16u32, 32, 48, 64, 96, 128];
        assert!(blocks.iter().all(|b| !SHORT.is_multiple_of(*b) && !LONG.is_multiple_of(*b)));
        let mha = ragged(&Shape { heads: 8, ..big }, SHORT, LONG);
        assert_eq!((mha.heads, mha.kv_heads), (2, 2));
    }
}

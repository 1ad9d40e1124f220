//! Values for what a score program reads, where nobody brings any: for checks, tuning and benchmarks.
//!
//! The same program, sizes and seed give the same values. They keep every promise of the declarations and are of a
//! usual kind: documents of an eighth of their axis on average, windows and chunks of an eighth of the keys, slopes
//! that halve from head to head, normal biases, half of a boolean mask.

use flashtune_codegen::Shape;
use flashtune_codegen::score::{
    At, Axis, Bound, Declaration, Elements, Precision, Program, ProgramError, Scalar, SideData, Storage,
};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rand_distr::{Distribution, StandardNormal};

/// Values for a program at these sizes.
pub fn typical_side(program: &Program, sizes: &Shape, seed: u64) -> SideData {
    let mut rng = StdRng::seed_from_u64(seed ^ 0x51de_da7a);
    let mut data = SideData::default();
    for d in program.declarations() {
        let range = d.int_range();
        let eighth = (sizes.kv_len as i64 / 8).clamp(1, 1 << 30).clamp(range.lo, range.hi);
        match &d.axes {
            None if d.storage == Storage::F32 => {
                let usual = d.range.map_or(20.0, |r| 20f32.clamp(r.lo as f32, r.hi as f32));
                data = data.scalar(&d.name, Scalar::Float(usual));
            }
            None => data = data.scalar(&d.name, Scalar::Int(eighth)),
            Some(axes) => {
                let shape: Vec<usize> = axes.iter().map(|a| length(a, sizes)).collect();
                let elements = elements(d, axes, &shape, eighth, &mut rng);
                data = data.tensor(&d.name, &shape, elements);
            }
        }
    }
    data
}

fn length(axis: &Axis, sizes: &Shape) -> usize {
    // What is indexed by a distance has both directions.
    axis.length(sizes).unwrap_or_else(|| (sizes.kv_len / 8).saturating_mul(2) + 1) as usize
}

fn elements(d: &Declaration, axes: &[Axis], shape: &[usize], eighth: i64, rng: &mut StdRng) -> Elements {
    let count: usize = shape.iter().product();
    let last = shape.last().copied().unwrap_or(1).max(1);
    match d.storage {
        Storage::Bool => Elements::Bool((0..count).map(|_| rng.random_bool(0.5)).collect()),
        Storage::I32 | Storage::I64 => {
            let range = d.int_range();
            let mut value = range.lo.max(0);
            Elements::Int(
                (0..count)
                    .map(|i| match d.nondecreasing {
                        true if i % last == 0 => {
                            value = range.lo.max(0);
                            value
                        }
                        true => {
                            let step = rng.random_bool((8.0 / last as f64).min(1.0));
                            value = (value + i64::from(step)).min(range.hi);
                            value
                        }
                        false => rng.random_range(range.lo.max(0).min(eighth)..=eighth),
                    })
                    .collect(),
            )
        }
        _ => {
            let of_heads = axes.iter().all(|a| matches!(a, Axis::Batch | Axis::Heads | Axis::KvHeads));
            let normal = |rng: &mut StdRng| -> f32 { StandardNormal.sample(rng) };
            let value = |i: usize, rng: &mut StdRng| match of_heads {
                true => (-8.0 * (i % last + 1) as f32 / last as f32).exp2(),
                // Of a value that every storage holds.
                false => (normal(rng) * 64.0).round().clamp(-256.0, 256.0) / 64.0,
            };
            Elements::Float((0..count).map(|i| value(i, rng)).collect())
        }
    }
}

/// The part of all scores that a program's mask leaves, by a sample of rows: what rates are counted on.
///
/// # Errors
/// Data that does not fit the program.
pub fn visible_part(program: &Program, sizes: &Shape, data: &SideData) -> Result<f64, ProgramError> {
    const ROWS: u32 = 384;
    if program.mask().is_none() || sizes.is_empty() {
        return Ok(1.0);
    }
    let mut bound = Bound::new(program, sizes, data, Precision::F32)?;
    let (mut visible, mut all) = (0u64, 0u64);
    for i in 0..ROWS.min(sizes.q_len) {
        // Rows at equal distances, each of another head.
        let q = ((2 * i as u64 + 1) * sizes.q_len as u64 / (2 * ROWS.min(sizes.q_len)) as u64) as u32;
        let (b, h) = (i % sizes.batch, i % sizes.heads);
        let live = sizes.mask.live(q as u64, sizes.q_len as u64, sizes.kv_len as u64);
        all += live.end - live.start;
        visible += live.filter(|kv| bound.visible(At { b, h, q, kv: *kv as u32 })).count() as u64;
    }
    Ok(if all == 0 { 1.0 } else { visible as f64 / all as f64 })
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashtune_codegen::Mask;
    use flashtune_codegen::score::BUILTINS;

    #[test]
    fn every_built_in_gets_values_that_fit_it() {
        for (q_len, kv_len) in [(1, 1), (40, 40), (7, 300)] {
            let sizes = Shape { batch: 2, heads: 4, kv_heads: 2, q_len, kv_len, mask: Mask::Full };
            for b in BUILTINS {
                let program = Program::parse(b.text).unwrap();
                let data = typical_side(&program, &sizes, 3);
                data.check(&program, &sizes).unwrap_or_else(|e| panic!("{}: {e}", b.name));
                assert_eq!(data.tensors, typical_side(&program, &sizes, 3).tensors);
            }
        }
    }

    #[test]
    fn the_visible_part_is_that_of_the_mask() {
        let sizes = Shape { batch: 1, heads: 2, kv_heads: 2, q_len: 1000, kv_len: 1000, mask: Mask::Full };
        let part = |text: &str, sizes: &Shape| {
            let program = Program::parse(text).unwrap();
            visible_part(&program, sizes, &typical_side(&program, sizes, 1)).unwrap()
        };
        assert!((part("mask = kv <= q;", &sizes) - 0.5).abs() < 0.002);
        assert!((part("mask = kv % 4 == 0;", &sizes) - 0.25).abs() < 1e-9);
        // Beside a window, of what that leaves.
        let causal = Shape { mask: Mask::Causal, ..sizes };
        assert!((part("mask = kv <= q;", &causal) - 1.0).abs() < 1e-9);
        assert_eq!(part("score = score * 2.0;", &sizes), 1.0);
    }
}

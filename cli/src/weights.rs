//! The attention weights that `forward/naive` and `forward/cpu` can write, against fp64. Part of `flashtune check`.

use super::sweep::Failure;
use anyhow::Result;
use flashtune::{DType, Distribution, Engine, HostForward, HostTensor, Layout, Mask};

/// Largest absolute error of a weight, which is between 0 and 1: fp32 scores of size 10, exponentiated.
const BOUND: f64 = 1e-5;

/// One outcome for every dtype and mask.
pub(crate) fn check(engine: &Engine) -> Result<Vec<Result<(), Failure>>> {
    let mut outcomes = Vec::new();
    for dtype in DType::ALL {
        for mask in [Mask::Full, Mask::Causal, Mask::Window { left: Some(9), right: Some(2) }] {
            let tensor = |heads, rows, seed| {
                HostTensor::random(dtype, [2, heads, rows, 40], Layout::Bshd, seed, Distribution::Normal)
            };
            // More queries than keys: with a bounded right side the first rows are empty.
            let (q, k, v) = (tensor(4, 77, 1), tensor(2, 65, 2), tensor(2, 65, 3));
            let out = engine.forward_host_call(&HostForward {
                layout: Layout::Bshd,
                mask,
                weights: true,
                ..HostForward::new(&q, &k, &v)
            })?;
            let (worst, at) = worst_error(&q, &k, mask, out.weights.as_deref().unwrap_or_default());
            outcomes.push(match worst <= BOUND {
                true => Ok(()),
                false => Err(Failure {
                    kernel: out.plan.map_or_else(|| "none".to_owned(), |p| p.kernel().name()),
                    shape: format!("b2 h4/2 77x65 {mask}"),
                    inputs: "bshd weights".to_owned(),
                    what: format!("weight {at:?} is off by {worst:.2e}, more than {BOUND:.0e}"),
                }),
            });
        }
    }
    Ok(outcomes)
}

/// The largest error of the weights, and where: batch, head, query, key. NaN counts as infinite, as does a wrong
/// length.
fn worst_error(q: &HostTensor, k: &HostTensor, mask: Mask, weights: &[f32]) -> (f64, [usize; 4]) {
    let ([batch, heads, q_len, dim], [_, kv_heads, kv_len, _]) = (q.shape(), k.shape());
    if weights.len() != batch * heads * q_len * kv_len {
        return (f64::INFINITY, [0; 4]);
    }
    let scale = 1.0 / (dim as f64).sqrt();
    let (mut worst, mut at) = (0.0, [0; 4]);
    let (mut query, mut key) = (vec![0.0f32; dim], vec![0.0f32; dim]);
    for (i, row) in weights.chunks_exact(kv_len).enumerate() {
        let (b, h, s) = (i / (heads * q_len), i / q_len % heads, i % q_len);
        q.read_row([b, h, s], &mut query);
        let live = mask.live(s as u64, q_len as u64, kv_len as u64);
        let mut expected = vec![0.0f64; kv_len];
        let mut sum = 0.0;
        for (j, e) in expected.iter_mut().enumerate().filter(|(j, _)| live.contains(&(*j as u64))) {
            k.read_row([b, h / (heads / kv_heads), j], &mut key);
            let score: f64 = query.iter().zip(&key).map(|(x, y)| *x as f64 * *y as f64).sum();
            // Scores of normal values are small: no maximum needs to be taken out in fp64.
            *e = (score * scale).exp();
            sum += *e;
        }
        for (j, (w, e)) in row.iter().zip(&expected).enumerate() {
            let e = if sum > 0.0 { e / sum } else { 0.0 };
            let error = (*w as f64 - e).abs();
            if error.is_nan() || error > worst {
                (worst, at) = (if error.is_nan() { f64::INFINITY } else { error }, [b, h, s, j]);
            }
        }
    }
    (worst, at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_weights_are_found() {
        let tensor =
            |rows, seed| HostTensor::random(DType::F32, [1, 1, rows, 16], Layout::Bhsd, seed, Distribution::Normal);
        let (q, k) = (tensor(3, 1), tensor(1, 2));
        // One key: its weight is 1, and under the causal mask the first two of three queries see nothing.
        assert_eq!(worst_error(&q, &k, Mask::Full, &[1.0, 1.0, 1.0]).0, 0.0);
        assert_eq!(worst_error(&q, &k, Mask::Causal, &[0.0, 0.0, 1.0]).0, 0.0);
        assert_eq!(worst_error(&q, &k, Mask::Causal, &[0.0, 0.5, 1.0]), (0.5, [0, 0, 1, 0]));
        assert_eq!(worst_error(&q, &k, Mask::Full, &[1.0, f32::NAN, 1.0]).0, f64::INFINITY);
        assert_eq!(worst_error(&q, &k, Mask::Full, &[1.0]).0, f64::INFINITY);
    }
}

//! Medians and percentiles of samples.

/// The value below which a share `p` of the samples lies, interpolated; `None` without samples.
pub(crate) fn percentile(samples: &[f64], p: f64) -> Option<f64> {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let last = sorted.len().checked_sub(1)?;
    let at = p.clamp(0.0, 1.0) * last as f64;
    let (low, high) = (at.floor() as usize, at.ceil() as usize);
    Some(sorted[low] + (sorted[high] - sorted[low]) * (at - low as f64))
}

/// The middle of the samples; `None` without samples. Unlike the minimum it withstands single lucky or unlucky ones.
pub(crate) fn median(samples: &[f64]) -> Option<f64> {
    percentile(samples, 0.5)
}

/// The mean of the lower half of the samples; `None` without samples. Disturbances make runs longer, never shorter. Of
/// three samples or fewer the lowest, since the others may all be disturbed.
pub(crate) fn lower_mean(samples: &[f64]) -> Option<f64> {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let count = if sorted.len() > 3 { sorted.len().div_ceil(2) } else { 1 };
    let half = sorted.get(..count)?;
    Some(half.iter().sum::<f64>() / half.len() as f64)
}

/// Standard deviations that a normal variable stays below with 95 %, and with 99.95 %.
pub(crate) const LIKELY: f64 = 1.645;
pub(crate) const CERTAIN: f64 = 3.29;

/// Two values that the true median lies between, each with the confidence of so many standard deviations, by order
/// statistics: no assumption on the distribution. With too few samples nothing can be said (fewer than five of what is
/// [`LIKELY`]), and the values are infinite.
pub(crate) fn median_bounds(samples: &[f64], deviations: f64) -> (f64, f64) {
    let n = samples.len();
    // Normal approximation of the binomial quantile; exact enough from five samples on.
    let rank = ((n as f64 + deviations * (n as f64).sqrt()) / 2.0).ceil() as usize;
    if n < 5 || rank > n {
        return (f64::NEG_INFINITY, f64::INFINITY);
    }
    let mut samples = samples.to_vec();
    let mut at = |rank: usize| *samples.select_nth_unstable_by(rank, f64::total_cmp).1;
    (at(n - rank), at(rank - 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_interpolate() {
        let s = [4.0, 1.0, 3.0, 2.0];
        assert_eq!((percentile(&s, 0.0), median(&s), percentile(&s, 1.0)), (Some(1.0), Some(2.5), Some(4.0)));
        assert_eq!(percentile(&[7.0], 0.9), Some(7.0));
        assert_eq!(median(&[]), None);
    }

    #[test]
    fn the_bound_on_the_median_tightens_with_samples() {
        let ramp = |n: usize| (1..=n).map(|i| i as f64 / (n + 1) as f64).collect::<Vec<_>>();
        let median_bounds = |samples: &[f64]| median_bounds(samples, LIKELY);
        assert_eq!(median_bounds(&ramp(4)), (f64::NEG_INFINITY, f64::INFINITY));
        let (low, high) = median_bounds(&ramp(5));
        assert!((low - 1.0 / 6.0).abs() < 1e-12 && (high - 5.0 / 6.0).abs() < 1e-12, "{low} {high}");
        let ((a, b), (c, d)) = (median_bounds(&ramp(9)), median_bounds(&ramp(99)));
        assert!(a < c && c < 0.5 && 0.5 < d && d < b && d - c < 0.2, "{a} {c} {d} {b}");
        let (e, f) = super::median_bounds(&ramp(99), CERTAIN);
        assert!(a < e && e < c && d < f && f < b, "{e} {f}");
        assert_eq!(super::median_bounds(&ramp(9), CERTAIN), (f64::NEG_INFINITY, f64::INFINITY));
    }

    #[test]
    fn the_mean_of_the_lower_half_does_not_see_disturbances() {
        assert_eq!((lower_mean(&[]), lower_mean(&[3.0]), lower_mean(&[9.0, 2.0])), (None, Some(3.0), Some(2.0)));
        assert_eq!((lower_mean(&[9.0, 2.0, 9.0]), lower_mean(&[9.0, 2.0, 4.0, 50.0])), (Some(2.0), Some(3.0)));
    }
}

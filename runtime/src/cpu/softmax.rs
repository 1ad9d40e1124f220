//! Softmax of a row in fp32, for the unfused attention that fused kernels are compared with.

/// Sums that run side by side: one vector of AVX2.
const LANES: usize = 8;

/// Replaces scores by their softmax weights and returns the natural log-sum-exp. The row is not empty. A NaN anywhere
/// makes all of it NaN, as arithmetic does.
pub(crate) fn softmax(row: &mut [f32]) -> f32 {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma") {
        // SAFETY: the processor has the instructions.
        return unsafe { softmax_avx2(row) };
    }
    softmax_with(row, |x, y, sum| x * y + sum)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn softmax_avx2(row: &mut [f32]) -> f32 {
    softmax_with(row, f32::mul_add)
}

/// Inlined into each version so that it is compiled for that version's instructions.
#[inline(always)]
fn softmax_with(row: &mut [f32], fma: impl Fn(f32, f32, f32) -> f32 + Copy) -> f32 {
    let mut maxima = [f32::NEG_INFINITY; LANES];
    let (vectors, rest) = row.as_chunks::<LANES>();
    for x in vectors {
        for i in 0..LANES {
            maxima[i] = if x[i] > maxima[i] { x[i] } else { maxima[i] };
        }
    }
    let max = maxima.iter().chain(rest).copied().fold(f32::NEG_INFINITY, f32::max);

    let mut sums = [0.0; LANES];
    let (vectors, rest) = row.as_chunks_mut::<LANES>();
    for x in vectors {
        for i in 0..LANES {
            x[i] = exp(x[i] - max, fma);
            sums[i] += x[i];
        }
    }
    let mut sum: f32 = sums.iter().sum();
    for x in rest {
        *x = exp(*x - max, fma);
        sum += *x;
    }
    let inverse = 1.0 / sum;
    row.iter_mut().for_each(|x| *x *= inverse);
    max + sum.ln()
}

/// `exp(x)` for `x <= 0`, to about one unit in the last place; 0 where the result would be subnormal. Free of branches
/// and calls, so that it becomes vector code.
#[inline(always)]
fn exp(x: f32, fma: impl Fn(f32, f32, f32) -> f32) -> f32 {
    // Adding 1.5 * 2^23 rounds to an integer, which then stands in the low bits.
    const ROUND: f32 = 12_582_912.0;
    // ln 2 in two parts: products of the first one with small integers are exact.
    const LN2_HIGH: f32 = 355.0 / 512.0;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let shifted = fma(x, std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = fma(n, -LN2_LOW, fma(n, -LN2_HIGH, x));
    // Taylor's series; |r| <= ln 2 / 2 makes its remainder 5e-9.
    let mut y = 1.0 / 5040.0;
    for c in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        y = fma(y, r, c);
    }
    let power = f32::from_bits((shifted.to_bits().wrapping_add(127)) << 23);
    if x < -87.0 { 0.0 } else { y * power }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exponential_is_right_to_the_last_place_or_two() {
        let mut worst = 0.0f64;
        for i in 0..200_000 {
            let x = -87.0 * i as f32 / 200_000.0;
            let want = (x as f64).exp();
            for got in [exp(x, f32::mul_add), exp(x, |a, b, c| a * b + c)] {
                worst = worst.max((got as f64 - want).abs() / want);
            }
        }
        assert!(worst < 2.0 * f32::EPSILON as f64, "{worst:e}");
        assert_eq!(exp(0.0, f32::mul_add), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY, f32::mul_add), 0.0);
        assert!(exp(f32::NAN, f32::mul_add).is_nan());
    }

    #[test]
    fn weights_sum_to_one_and_follow_the_definition() {
        for n in [1, 7, 8, 9, 100] {
            let scores: Vec<f32> = (0..n).map(|i| ((i * 37) % 19) as f32 * 0.7 - 5.0).collect();
            let sum: f64 = scores.iter().map(|x| (*x as f64).exp()).sum();
            let mut row = scores.clone();
            let lse = softmax(&mut row);
            assert!((lse as f64 - sum.ln()).abs() < 1e-5, "{n}");
            for (w, x) in row.iter().zip(&scores) {
                assert!((*w as f64 - (*x as f64).exp() / sum).abs() < 1e-6, "{n}");
            }
        }
    }

    #[test]
    fn nan_and_infinite_scores_behave_as_arithmetic_does() {
        for bad in [f32::NAN, f32::INFINITY] {
            for at in [0, 9] {
                let mut row = vec![1.0; 10];
                row[at] = bad;
                assert!(softmax(&mut row).is_nan() && row[at].is_nan(), "{bad} {at}");
            }
        }
        let mut row = vec![f32::NEG_INFINITY, 2.0];
        assert_eq!(softmax(&mut row), 2.0);
        assert_eq!(row, [0.0, 1.0]);
        assert!(softmax(&mut [f32::NEG_INFINITY; 3]).is_nan());
    }
}

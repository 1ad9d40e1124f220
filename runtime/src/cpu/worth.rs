//! How many threads a call is worth: to have another one begin costs more than most small calls take.

use flashtune_codegen::abi::{Args, BackwardArgs, ForwardArgs};
use flashtune_codegen::{DType, Problem};

/// Multiply-adds that pay for one more thread, of f32 and of 16-bit elements.
const PER_THREAD: [f64; 2] = [1e6, 2e6];

/// Multiply-adds of a call, about, as if masks left out nothing. Not known of calls whose lengths their tiles read.
fn multiply_adds(problem: &Problem, args: Args<'_>) -> Option<f64> {
    let ([batch, heads, q_len, kv_len], products) = match args {
        Args::Forward(ForwardArgs { batch, heads, q_len, kv_len, .. }) => ([*batch, *heads, *q_len, *kv_len], 1.0),
        // Seven products for two.
        Args::Backward(BackwardArgs { batch, heads, q_len, kv_len, .. }) if problem.kv.is_dense() => {
            ([*batch, *heads, *q_len, *kv_len], 3.5)
        }
        _ => return None,
    };
    let scores: f64 = [batch, heads, q_len, kv_len].into_iter().map(f64::from).product();
    Some(scores * products * f64::from(problem.head_dim_qk + problem.head_dim_v))
}

/// The most threads that are worth it, 1 at least.
pub(super) fn threads(problem: &Problem, args: Args<'_>) -> usize {
    let each = PER_THREAD[usize::from(problem.dtype != DType::F32)];
    multiply_adds(problem, args).map_or(usize::MAX, |n| (n / each) as usize).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytemuck::Zeroable;
    use flashtune_codegen::MaskKind;

    #[test]
    fn small_calls_are_worth_one_thread_and_large_ones_all() {
        let problem = Problem::forward(DType::F32, 64, MaskKind::FULL).unwrap();
        let of = |q_len, heads| {
            let args = ForwardArgs { batch: 1, heads, q_len, kv_len: q_len, ..ForwardArgs::zeroed() };
            threads(&problem, Args::Forward(&args))
        };
        assert_eq!((of(0, 1), of(16, 1), of(64, 1)), (1, 1, 1));
        assert_eq!(of(128, 1), 2);
        assert!(of(512, 8) >= 256);
        assert!(of(i32::MAX, i32::MAX) > 1 << 40);
        let packed = Args::Ragged(&Zeroable::zeroed());
        assert_eq!(threads(&problem, packed), usize::MAX);
    }
}

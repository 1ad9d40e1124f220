//! The yardstick of a precision.

use super::{Attention, HostTensor, Layout, Rows, unfused_rows_of};
use flashtune_codegen::Precision;

/// Half a unit of TF32 over half a unit of fp32.
const TF32_UNITS: f64 = (1 << 13) as f64;

/// [`unfused_rows_of`] the oracle's rows, as a kernel of this precision is held to them. `Exact` and `Tf32x3` are held
/// to the same. Of `Tf32` operands are rounded to TF32 first, and the oracle's magnitudes of scores count in units of
/// it: a score, and with it the log-sum-exp, is that much farther off.
///
/// # Panics When the tensors' shapes do not belong together.
pub fn unfused_rows_in(
    precision: Precision,
    [q, k, v]: [&HostTensor; 3],
    attention: &Attention<'_>,
    oracle: &mut Rows,
) -> Rows {
    if precision != Precision::Tf32 {
        return unfused_rows_of(q, k, v, attention, &oracle.ids);
    }
    oracle.scales.iter_mut().for_each(|scale| scale.score *= TF32_UNITS);
    let [q, k, v] = [q, k, v].map(in_tf32);
    unfused_rows_of(&q, &k, &v, attention, &oracle.ids)
}

/// The tensor with its elements rounded to TF32, to the nearest.
fn in_tf32(tensor: &HostTensor) -> HostTensor {
    let round = |x: f32| if x.is_finite() { f32::from_bits((x.to_bits() + 0x1000) & 0xffff_e000) } else { x };
    let values: Vec<f32> = tensor.values().into_iter().map(round).collect();
    HostTensor::from_values(tensor.dtype(), tensor.shape(), Layout::Bhsd, &values).expect("as many values as before")
}

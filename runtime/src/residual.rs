//! What O loses when it is rounded to 16 bits, beside a forward or a backward call.

use crate::tensor::{check_layout, check_output_rows, error, outer, rows_are_aligned, same_shape};
use crate::{BackwardCall, ForwardCall, Result, TensorView};
use flashtune_codegen::abi::{BackwardArgs, ForwardArgs};
use flashtune_codegen::{DType, Problem, Shape};

/// Checks the tensor of a call of a problem, which has one from now on.
fn check(problem: Problem, shape: &Shape, residual: &TensorView) -> Result<Problem> {
    let problem = problem.with_residual(true);
    problem.validate()?;
    if residual.dtype != DType::Bf16 {
        let expected = "what O lost by rounding is kept in bf16, whatever O is";
        return Err(error("residual", "dtype", residual.dtype, expected, "give it memory of bf16"));
    }
    let sizes = [shape.batch, shape.heads, shape.q_len, problem.head_dim_v].map(u64::from);
    same_shape("residual", residual, sizes, "the shape of O")?;
    check_layout("residual", residual)?;
    Ok(problem)
}

impl ForwardCall {
    /// The same call that also writes what O loses by rounding, bf16 of O's shape.
    ///
    /// # Errors
    /// [`crate::Error::Tensor`] naming what the tensor is not; [`crate::Error::Codegen`] for dtypes of which O loses
    /// nothing that could be kept.
    pub fn with_residual(self, residual: &TensorView) -> Result<Self> {
        let problem = check(self.problem, &self.shape, residual)?;
        check_output_rows("residual", residual)?;
        let args = ForwardArgs { residual: residual.address, residual_stride: outer(residual), ..self.args };
        Ok(Self { problem, args, aligned: self.aligned && rows_are_aligned(residual), ..self })
    }
}

impl BackwardCall {
    /// The same call with what O lost by rounding, as the forward pass wrote it. Of packed sequences before
    /// [`BackwardCall::packed`].
    ///
    /// # Errors
    /// As [`ForwardCall::with_residual`].
    pub fn with_residual(self, residual: &TensorView) -> Result<Self> {
        let problem = check(self.problem, &self.shape, residual)?;
        let args = BackwardArgs { residual: residual.address, residual_stride: outer(residual), ..self.args };
        Ok(Self { problem, args, aligned: self.aligned && rows_are_aligned(residual), ..self })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Error, ForwardTensors, forward_call};
    use flashtune_codegen::{KvKind, Mask};

    fn call(dtype: DType) -> ForwardCall {
        let t = |heads| TensorView::bhsd(64, dtype, [2, heads, 7, 40]);
        let tensors = ForwardTensors { q: t(4), k: t(2), v: t(2), o: t(4), lse: None };
        forward_call(&tensors, Mask::Causal, None).unwrap()
    }

    #[test]
    fn a_residual_is_bf16_of_the_shape_of_o() {
        let good = TensorView::bshd(64, DType::Bf16, [2, 7, 4, 40]);
        let made = call(DType::F16).with_residual(&good).unwrap();
        assert_eq!(made.problem.to_string(), "forward-f16-residual-d40-causal");
        assert_eq!((made.args.residual, made.args.residual_stride, made.aligned), (64, [1120, 40, 160], true));
        assert!(!call(DType::F16).with_residual(&TensorView { address: 66, ..good }).unwrap().aligned);
        for (field, residual) in [
            ("dtype", TensorView { dtype: DType::F16, ..good }),
            ("shape", TensorView { shape: [2, 4, 8, 40], ..good }),
            ("address", TensorView { address: 0, ..good }),
            ("row stride", good.with_strides([1120, 280, 0, 1])),
        ] {
            match call(DType::F16).with_residual(&residual) {
                Err(Error::Tensor { tensor: "residual", field: found, .. }) => assert_eq!(found, field),
                other => panic!("{field}: {other:?}"),
            }
        }
    }

    #[test]
    fn where_o_loses_nothing_or_nobody_writes_it_a_residual_is_refused() {
        let residual = TensorView::bhsd(64, DType::Bf16, [2, 4, 7, 40]);
        let e = call(DType::F32).with_residual(&residual).unwrap_err().to_string();
        assert!(e.contains("residual") && e.contains("f32 loses nothing"), "{e}");
        let ragged = call(DType::Bf16).problem.with_residual(true).with_kv(KvKind::RAGGED);
        assert!(ragged.validate().unwrap_err().to_string().contains("each sequence by itself"));
        assert!(ragged.backward().validate().is_ok());
    }
}

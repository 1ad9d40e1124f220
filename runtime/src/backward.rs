//! The tensors of a backward pass, and their way into kernel arguments.

mod packed;

pub use packed::Packed;

use crate::tensor::{
    check_contiguous, check_layout, check_output_rows, outer, rows_are_aligned, same_dtype, same_shape, small, windows,
};
use crate::{Result, TensorView};
use bytemuck::Zeroable;
use flashtune_codegen::abi::BackwardArgs;
use flashtune_codegen::score::ProgramRef;
use flashtune_codegen::{DType, Mask, Problem, Shape};

/// The tensors of one backward call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BackwardTensors {
    /// The loss's gradient by O, `[batch, heads, q_len, head_dim_v]`.
    pub dout: TensorView,
    /// Q, `[batch, heads, q_len, head_dim_qk]`.
    pub q: TensorView,
    /// K, `[batch, kv_heads, kv_len, head_dim_qk]`.
    pub k: TensorView,
    /// V, `[batch, kv_heads, kv_len, head_dim_v]`.
    pub v: TensorView,
    /// O of the forward pass, `[batch, heads, q_len, head_dim_v]`.
    pub o: TensorView,
    /// Natural log-sum-exp of the forward pass, contiguous fp32 `[batch, heads, q_len, 1]` ([`TensorView::rows`]).
    pub lse: TensorView,
    /// The loss's gradient by the log-sum-exp, of the same kind, where the loss depends on it.
    pub dlse: Option<TensorView>,
    /// dQ, as Q; written.
    pub dq: TensorView,
    /// dK, as K: of each KV head the sum over its query heads; written.
    pub dk: TensorView,
    /// dV, as V; written.
    pub dv: TensorView,
}

impl BackwardTensors {
    /// All of them with their names.
    pub fn named(&self) -> impl Iterator<Item = (&'static str, TensorView)> {
        let Self { dout, q, k, v, o, lse, dlse, dq, dk, dv } = *self;
        let all =
            [("dout", dout), ("q", q), ("k", k), ("v", v), ("o", o), ("lse", lse), ("dq", dq), ("dk", dk), ("dv", dv)];
        all.into_iter().chain(dlse.map(|dlse| ("dlse", dlse)))
    }
}

/// What a backward call comes down to.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BackwardCall {
    /// What the kernel must be specialised to.
    pub problem: Problem,
    /// The sizes.
    pub shape: Shape,
    /// The kernel's arguments.
    pub args: BackwardArgs,
    /// Whether every row starts at a multiple of 16 bytes, as fast CUDA kernels need.
    pub aligned: bool,
}

impl BackwardCall {
    /// The same call with a score program beside its mask, as [`crate::ForwardCall::with_program`].
    #[must_use]
    pub fn with_program(self, program: ProgramRef) -> Self {
        let (problem, shape) = Problem { program: Some(program), ..self.problem }.with_windows(self.shape);
        let [window_left, window_right] = windows(&shape);
        Self { problem, shape, args: BackwardArgs { window_left, window_right, ..self.args }, ..self }
    }
}

/// Checks the tensors against each other and against what kernels take, and builds the arguments.
///
/// `scale` defaults to `1 / sqrt(head_dim_qk)` and is the one of the forward pass, as `mask` is. Sizes of zero are
/// legal.
///
/// # Errors
/// [`crate::Error::Tensor`] naming the tensor, the field and the remedy; [`crate::Error::Codegen`] for head dims, head
/// counts and lengths that no kernel supports.
pub fn backward_call(tensors: &BackwardTensors, mask: Mask, scale: Option<f32>) -> Result<BackwardCall> {
    let BackwardTensors { dout, q, k, v, o, lse, dlse, dq, dk, dv } = tensors;
    let [batch, heads, q_len, head_dim_qk] = q.shape;
    let [_, kv_heads, kv_len, _] = k.shape;
    let head_dim_v = v.shape[3];
    for (name, tensor) in [("k", k), ("v", v), ("o", o), ("dout", dout), ("dq", dq), ("dk", dk), ("dv", dv)] {
        same_dtype(name, tensor, q.dtype)?;
    }
    let of_k = "[batch, kv_heads, kv_len, head_dim_qk] with Q's batch and head dim";
    let of_v = "[batch, kv_heads, kv_len, head_dim_v] with K's batch, heads and length";
    let of_o = "[batch, heads, q_len, head_dim_v] with Q's sizes and V's head dim";
    let like_o = [batch, heads, q_len, head_dim_v];
    same_shape("k", k, [batch, kv_heads, kv_len, head_dim_qk], of_k)?;
    same_shape("v", v, [batch, kv_heads, kv_len, head_dim_v], of_v)?;
    same_shape("o", o, like_o, of_o)?;
    same_shape("dout", dout, like_o, of_o)?;
    same_shape("dq", dq, q.shape, "the shape of Q")?;
    same_shape("dk", dk, k.shape, "the shape of K")?;
    same_shape("dv", dv, v.shape, "the shape of V")?;
    let dims = [small("q", "head dim", head_dim_qk)?, small("v", "head dim", head_dim_v)?];
    let problem = Problem::forward_qk_v(q.dtype, dims[0], dims[1], mask.kind())?.backward();
    let shape = Shape {
        batch: small("q", "batch", batch)?,
        heads: small("q", "heads", heads)?,
        kv_heads: small("k", "heads", kv_heads)?,
        q_len: small("q", "rows", q_len)?,
        kv_len: small("k", "rows", kv_len)?,
        mask,
    };
    shape.validate()?;
    // Without an element to write nothing is launched and no memory is touched.
    let rows = [("dout", dout), ("q", q), ("k", k), ("v", v), ("o", o), ("dq", dq), ("dk", dk), ("dv", dv)];
    if !problem.has_no_output(&shape) {
        for (name, tensor) in rows {
            check_layout(name, tensor)?;
        }
    }
    for (name, tensor) in [("dq", dq), ("dk", dk), ("dv", dv)] {
        check_output_rows(name, tensor)?;
    }
    for (name, tensor) in [("lse", Some(lse)), ("dlse", dlse.as_ref())] {
        let Some(tensor) = tensor else { continue };
        same_dtype(name, tensor, DType::F32)?;
        same_shape(name, tensor, [batch, heads, q_len, 1], "[batch, heads, q_len] with Q's sizes")?;
        check_contiguous(name, tensor)?;
    }
    let scale = crate::tensor::finite_scale(&problem, scale)?;
    let [window_left, window_right] = windows(&shape);
    let args = BackwardArgs {
        dout: dout.address,
        q: q.address,
        k: k.address,
        v: v.address,
        o: o.address,
        lse: lse.address,
        dlse: dlse.map_or(0, |t| t.address),
        dq: dq.address,
        dk: dk.address,
        dv: dv.address,
        scratch: 0,
        dout_stride: outer(dout),
        q_stride: outer(q),
        k_stride: outer(k),
        v_stride: outer(v),
        o_stride: outer(o),
        dq_stride: outer(dq),
        dk_stride: outer(dk),
        dv_stride: outer(dv),
        batch: shape.batch as i32,
        heads: shape.heads as i32,
        kv_heads: shape.kv_heads as i32,
        q_len: shape.q_len as i32,
        kv_len: shape.kv_len as i32,
        window_left,
        window_right,
        scale,
        side: 0,
        q_begin: 0,
        kv_begin: 0,
        q_lengths: 0,
        kv_lengths: 0,
        q_rows: 0,
        kv_rows: 0,
        q_words: 1,
        kv_words: 1,
        residual: 0,
        residual_stride: [0; 3],
        ..BackwardArgs::zeroed()
    };
    let aligned = rows.into_iter().all(|(_, tensor)| rows_are_aligned(tensor));
    Ok(BackwardCall { problem, shape, args, aligned })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;

    fn tensors() -> BackwardTensors {
        let t = |heads, rows, dim| TensorView::bhsd(64, DType::Bf16, [2, heads, rows, dim]);
        let lse = TensorView::rows(64, [2, 4, 7]);
        BackwardTensors {
            dout: t(4, 7, 40),
            q: t(4, 7, 64),
            k: t(2, 9, 64),
            v: t(2, 9, 40),
            o: t(4, 7, 40),
            lse,
            dlse: None,
            dq: t(4, 7, 64),
            dk: t(2, 9, 64),
            dv: t(2, 9, 40),
        }
    }

    #[test]
    fn a_backward_call_has_the_sizes_and_strides_of_its_tensors() {
        let call = backward_call(&tensors(), Mask::Causal, None).unwrap();
        assert_eq!(call.problem.to_string(), "backward-bf16-d64v40-causal");
        assert_eq!((call.shape.q_len, call.shape.kv_len, call.shape.group()), (7, 9, 2));
        let args = call.args;
        assert_eq!((args.dv_stride, args.dq_stride, args.scale), ([720, 360, 40], [1792, 448, 64], 0.125));
        assert_eq!((args.dlse, args.window_right), (0, 0));
        assert!(call.aligned);
    }

    #[test]
    fn what_does_not_fit_is_told_by_the_name_of_the_tensor() {
        let good = tensors();
        let wrong = |t: TensorView| TensorView { shape: [2, 4, 7, 48], ..t };
        let cases = [
            ("dout", BackwardTensors { dout: wrong(good.dout), ..good }),
            ("dq", BackwardTensors { dq: wrong(good.dq), ..good }),
            ("dk", BackwardTensors { dk: wrong(good.dk), ..good }),
            ("dv", BackwardTensors { dv: TensorView { dtype: DType::F16, ..good.dv }, ..good }),
            ("lse", BackwardTensors { lse: TensorView { dtype: DType::Bf16, ..good.lse }, ..good }),
            ("dlse", BackwardTensors { dlse: Some(TensorView::rows(64, [2, 4, 8])), ..good }),
            ("o", BackwardTensors { o: TensorView { address: 0, ..good.o }, ..good }),
            ("dq", BackwardTensors { dq: good.dq.with_strides([1792, 448, 32, 1]), ..good }),
        ];
        for (name, tensors) in cases {
            match backward_call(&tensors, Mask::Full, None) {
                Err(Error::Tensor { tensor, .. }) => assert_eq!(tensor, name),
                other => panic!("{name}: {other:?}"),
            }
        }
        assert!(backward_call(&good, Mask::Full, Some(f32::NAN)).is_err());
    }

    #[test]
    fn without_a_query_there_are_still_keys_to_write_zeros_for() {
        let empty = |t: TensorView| TensorView { shape: [2, 4, 0, t.shape[3]], ..t };
        let t = tensors();
        let (lse, q, dq) = (TensorView::rows(0, [2, 4, 0]), empty(t.q), empty(t.dq));
        let call =
            backward_call(&BackwardTensors { dout: empty(t.dout), q, o: empty(t.o), lse, dq, ..t }, Mask::Full, None);
        let call = call.unwrap();
        assert!(call.shape.is_empty() && !call.problem.has_no_output(&call.shape));
    }
}

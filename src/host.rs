//! Attention over tensors in host memory.

use crate::{Engine, Forward, Result};
use flashtune_codegen::score::{ProgramRef, SideData};
use flashtune_codegen::{DType, Error as CodegenError, Mask, Precision};
use flashtune_runtime::dispatch::Plan;
use flashtune_runtime::{Buffer, HostTensor, Layout, SideBuffers, SideInputs};
use std::sync::Arc;

/// What [`Engine::forward_host`] gives back.
pub struct HostOutput {
    /// O, `[batch, heads, q_len, head_dim_v]`, laid out as Q was, and of its dtype; bf16 beside `e4m3`.
    pub o: HostTensor,
    /// Log-sum-exp, `[batch, heads, q_len]`.
    pub lse: Vec<f32>,
    /// Attention weights, `[batch, heads, q_len, kv_len]`, when they were asked for.
    pub weights: Option<Vec<f32>>,
    /// What ran; nothing did when O has no element.
    pub plan: Option<Arc<Plan>>,
}

/// One forward pass over host memory.
#[derive(Debug, Clone, Copy)]
pub struct HostForward<'a> {
    /// Q, `[batch, heads, q_len, head_dim_qk]`.
    pub q: &'a HostTensor,
    /// K, `[batch, kv_heads, kv_len, head_dim_qk]`.
    pub k: &'a HostTensor,
    /// V, `[batch, kv_heads, kv_len, head_dim_v]`.
    pub v: &'a HostTensor,
    /// Layout of O.
    pub layout: Layout,
    /// Which keys a query attends to.
    pub mask: Mask,
    /// Factor of the scores; `1 / sqrt(head_dim_qk)` when absent.
    pub scale: Option<f32>,
    /// How products of f32 are computed, as [`Forward::precision`].
    pub precision: Option<Precision>,
    /// Whether the attention weights are wanted.
    pub weights: bool,
    /// What else masks and changes the scores, and what it reads.
    pub program: Option<(ProgramRef, &'a SideData)>,
}

impl<'a> HostForward<'a> {
    /// A call without mask and program, with the default scale, and without weights.
    pub fn new(q: &'a HostTensor, k: &'a HostTensor, v: &'a HostTensor) -> Self {
        let (mask, scale, precision, program) = (Mask::Full, None, None, None);
        Self { q, k, v, layout: Layout::Bhsd, mask, scale, precision, weights: false, program }
    }
}

impl Engine {
    /// O and LSE for tensors in host memory: copies them to the device, computes, and copies the results back.
    ///
    /// # Errors
    /// As [`Engine::forward`], and when the device has no room.
    pub fn forward_host(
        &self,
        q: &HostTensor,
        k: &HostTensor,
        v: &HostTensor,
        mask: Mask,
        scale: Option<f32>,
    ) -> Result<HostOutput> {
        self.forward_host_call(&HostForward { mask, scale, ..HostForward::new(q, k, v) })
    }

    /// [`Engine::forward_host`] with all that a call may ask for.
    ///
    /// # Errors
    /// As [`Engine::forward_host`], and when the score program's data does not fit or does not keep what is declared.
    pub fn forward_host_call(&self, host: &HostForward<'_>) -> Result<HostOutput> {
        let HostForward { q, k, v, layout, mask, scale, precision, weights, program } = *host;
        let program = program.map(|(p, data)| (p.admitting(|name| data.scalars.get(name).copied()), data));
        let [batch, heads, q_len, _] = q.shape();
        let (kv_len, head_dim_v) = (k.shape()[2], v.shape()[3]);
        let elements = |shape: &[usize]| {
            shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d)).filter(|&n| n < 1 << 48).ok_or_else(|| {
                CodegenError::unsupported("shape", format!("{shape:?}"), "it has too many elements", "split the batch")
            })
        };
        elements(&[batch, heads, q_len, head_dim_v])?;
        let output = if q.dtype() == DType::E4m3 { DType::Bf16 } else { q.dtype() };
        let mut o = HostTensor::poisoned(output, [batch, heads, q_len, head_dim_v], layout);

        // The tensors are checked at an address that any device could give first, so that bad input costs no memory.
        let unplaced = |t: &HostTensor| t.view_at(1 << 12);
        let call =
            Forward { mask, scale, precision, ..Forward::new(unplaced(q), unplaced(k), unplaced(v), unplaced(&o)) };
        let call = Forward { program: program.map(|(program, _)| program), ..call };
        let resolved = self.resolve(&call)?;

        let device = self.device().as_ref();
        let side = match program {
            Some((program, data)) => Some(SideBuffers::new(device, &program, &resolved.shape, data)?),
            None => None,
        };
        let stream = device.stream();
        let upload = |t: &HostTensor| -> Result<Box<dyn Buffer>> {
            let buffer = device.alloc(t.bytes().len())?;
            device.upload(&*buffer, t.bytes())?;
            Ok(buffer)
        };
        let inputs = [upload(q)?, upload(k)?, upload(v)?];
        let o_buffer = upload(&o)?;
        let lse_buffer = device.alloc(elements(&[batch, heads, q_len])? * size_of::<f32>())?;
        let weights_buffer = match weights {
            true => Some(device.alloc(elements(&[batch, heads, q_len, kv_len])? * size_of::<f32>())?),
            false => None,
        };
        let at = |t: &HostTensor, b: &dyn Buffer| t.view_at(b.address()).address;
        let [q_buffer, k_buffer, v_buffer] = &inputs;
        let addresses = [at(q, &**q_buffer), at(k, &**k_buffer), at(v, &**v_buffer), at(&o, &*o_buffer)];
        let resolved = resolved.at(addresses, Some(lse_buffer.address()));
        let call = Forward { weights: weights_buffer.as_ref().map(|b| b.address()), ..call };
        let launch = |side: &SideInputs<'_>| {
            // SAFETY: every address is that of a buffer above with the view's extent, they live until the downloads
            // below have waited for the stream, and no two overlap.
            unsafe { self.forward_resolved(&Forward { side: *side, ..call }, resolved, stream) }
        };
        let dispatch = match &side {
            Some(side) => side.with(launch)?,
            None => launch(&SideInputs::default())?,
        };
        let plan = dispatch.map(|dispatch| dispatch.plan);

        device.download(&*o_buffer, o.bytes_mut(), stream)?;
        let download = |buffer: &dyn Buffer| -> Result<Vec<f32>> {
            let mut bytes = vec![0; buffer.len()];
            device.download(buffer, &mut bytes, stream)?;
            Ok(bytes.chunks_exact(4).map(|b| f32::from_ne_bytes([b[0], b[1], b[2], b[3]])).collect())
        };
        let lse = download(&*lse_buffer)?;
        let weights = weights_buffer.as_deref().map(download).transpose()?;
        Ok(HostOutput { o, lse, weights, plan })
    }
}

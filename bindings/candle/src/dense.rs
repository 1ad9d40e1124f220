//! Attention over tensors of one length each, `[batch, rows, heads, dim]`: the op that candle records, with its
//! gradients.

use crate::engines;
use crate::memory::{Operand, Place, Source, tensor, wrong_rank};
use crate::side::Side;
use crate::{Error, error::Result};
use candle_core::{CpuStorage, CustomOp3, Layout, Shape, Storage, Tensor};
use flashtune::{Backward, Dispatch, Explanation, Forward, Mask, TensorView};
use std::sync::{Arc, OnceLock};

const LAYOUT: &str = "[batch, rows, heads, dim]";

/// What is computed, beside the tensors.
#[derive(Clone)]
pub(crate) struct Settings {
    pub mask: Mask,
    /// `1 / sqrt(head_dim)` when absent.
    pub scale: Option<f32>,
    pub side: Side,
}

/// One call. It keeps the log-sum-exp, which the gradients need and candle's ops cannot give back.
struct Op {
    settings: Settings,
    /// `[batch, heads, rows]`, if it is wanted.
    lse: Option<Arc<OnceLock<Tensor>>>,
}

/// O, and the log-sum-exp if it is wanted: `[batch, heads, rows]`, without a past.
pub(crate) fn forward(
    [q, k, v]: [&Tensor; 3],
    settings: Settings,
    wants_lse: bool,
) -> candle_core::Result<(Tensor, Option<Tensor>)> {
    check_shapes([q, k, v])?;
    settings.side.refuse_gradients()?;
    let [q, k, v] = with_rows([q, k, v])?;
    let lse = (wants_lse || [&q, &k, &v].iter().any(|t| t.track_op())).then(Arc::<OnceLock<Tensor>>::default);
    let o = q.apply_op3(&k, &v, Op { settings, lse: lse.clone() })?;
    Ok((o, lse.and_then(|lse| lse.get().cloned()).filter(|_| wants_lse)))
}

/// Which kernel computes the call, and why no other does. Reads no element, and compiles what is not there.
pub(crate) fn explain([q, k, v]: [&Tensor; 3], settings: Settings) -> candle_core::Result<Option<Explanation>> {
    check_shapes([q, k, v])?;
    let [q, k, v] = with_rows([q, k, v])?;
    let place = Place::of(q.device())?;
    let [(q, q_layout), (k, k_layout), (v, v_layout)] = [&q, &k, &v].map(|t| t.storage_and_layout());
    let operands = [
        Operand::read("q", &place, Source::of(&q)?, q_layout)?,
        Operand::read("k", &place, Source::of(&k)?, k_layout)?,
        Operand::read("v", &place, Source::of(&v)?, v_layout)?,
    ];
    let call = Call::new(&operands)?;
    // Anywhere, as nothing is written.
    let o = TensorView { address: 1 << 12, ..call.unplaced_o };
    let engine = engines::of_place(&place)?;
    let dispatch = settings.side.with(&place, |side| {
        Ok(engine.prepare(&Forward { mask: settings.mask, scale: settings.scale, ..call.with(&settings, o, side) })?)
    })?;
    Ok(dispatch.map(|dispatch| dispatch.explain()))
}

fn check_shapes(tensors: [&Tensor; 3]) -> Result<()> {
    for (name, tensor) in ["q", "k", "v"].into_iter().zip(tensors) {
        if tensor.rank() != 4 {
            return Err(wrong_rank(name, tensor.dims(), LAYOUT));
        }
    }
    let [of_q, of_k, _] = tensors.map(|t| t.dims()[3]);
    if of_q != of_k {
        let expected = format!("that of q is {of_q}");
        return Err(Error::tensor("k", "head dim", of_k, expected, "rows of q and k are of one length"));
    }
    Ok(())
}

/// The tensors with contiguous rows, by a copy of those that have none.
pub(crate) fn with_rows(tensors: [&Tensor; 3]) -> candle_core::Result<[Tensor; 3]> {
    let rows = |t: &Tensor| if t.stride().last() == Some(&1) { Ok(t.clone()) } else { t.contiguous() };
    let [q, k, v] = tensors;
    Ok([rows(q)?, rows(k)?, rows(v)?])
}

/// Q, K and V of one call, and what O is like.
struct Call {
    q: TensorView,
    k: TensorView,
    v: TensorView,
    unplaced_o: TensorView,
    o_shape: Shape,
}

impl Call {
    fn new([q, k, v]: &[Operand<'_>; 3]) -> Result<Self> {
        let (&[b, rows, heads, _], &[.., dim]) = (q.dims(), v.dims()) else {
            return Err(wrong_rank("q", q.dims(), LAYOUT));
        };
        let (q, k, v) = (q.bshd("q")?, k.bshd("k")?, v.bshd("v")?);
        let shape = [b, rows, heads, dim];
        let unplaced_o = TensorView::bshd(0, q.dtype, shape.map(|n| n as u64));
        Ok(Self { q, k, v, unplaced_o, o_shape: Shape::from_dims(&shape) })
    }

    fn with<'a>(&self, settings: &Settings, o: TensorView, side: &flashtune::SideInputs<'a>) -> Forward<'a> {
        let Settings { mask, scale, .. } = *settings;
        let call = Forward { mask, scale, ..Forward::new(self.q, self.k, self.v, o) };
        settings.side.program.map_or(call, |program| call.with_program(program, *side))
    }
}

impl Op {
    fn run(&self, inputs: [(Source<'_>, &Layout); 3]) -> candle_core::Result<(Storage, Shape)> {
        let [(q, q_layout), (k, k_layout), (v, v_layout)] = inputs;
        let place = q.place()?;
        let engine = engines::of_place(&place)?;
        let operands = [
            Operand::read("q", &place, q, q_layout)?,
            Operand::read("k", &place, k, k_layout)?,
            Operand::read("v", &place, v, v_layout)?,
        ];
        let call = Call::new(&operands)?;
        let mut o = place.alloc(call.q.dtype, call.o_shape.elem_count())?;
        let rows = {
            let [b, h, s, _] = call.q.shape.map(|n| n as usize);
            Shape::from_dims(&[b, h, s])
        };
        let mut lse = match &self.lse {
            Some(_) => Some(place.alloc(flashtune::DType::F32, rows.elem_count())?),
            None => None,
        };
        {
            let written = Operand::write("o", &place, &mut o, &call.o_shape)?;
            let kept = lse.as_mut().map(|lse| Operand::write("lse", &place, lse, &rows)).transpose()?;
            let view = TensorView { address: written.address(), ..call.unplaced_o };
            self.settings.side.with(&place, |side| {
                let lse = kept.as_ref().map(Operand::address);
                let call = Forward { lse, ..call.with(&self.settings, view, side) };
                // SAFETY: addresses and layouts are those of tensors that are borrowed until the launch is in the
                // stream, behind which candle frees them; results are new memory, so nothing overlaps; the stream is of
                // the engine's context.
                Ok(unsafe { engine.forward(&call, place.stream())? })
            })?;
        }
        if let (Some(cell), Some(lse)) = (&self.lse, lse) {
            // An op object serves one call.
            let _ = cell.set(tensor(lse, rows));
        }
        Ok((o, call.o_shape))
    }

    /// dQ, dK and dV.
    fn gradients(&self, [q, k, v, o, dout]: [&Tensor; 5]) -> candle_core::Result<[Tensor; 3]> {
        let Some(lse) = self.lse.as_ref().and_then(|lse| lse.get()) else {
            let remedy = "make q, k or v a variable before the call";
            return Err(Error::Gradient { of: "through a call that tracked none".to_owned(), remedy }.into());
        };
        let place = Place::of(q.device())?;
        let engine = engines::of_place(&place)?;
        let dout = if dout.stride().last() == Some(&1) { dout.clone() } else { dout.contiguous()? };
        let inputs = [("q", q), ("k", k), ("v", v), ("o", o), ("dout", &dout), ("lse", lse)];
        let locked = inputs.map(|(name, t)| (name, t.storage_and_layout()));
        let mut operands = Vec::with_capacity(locked.len());
        for (name, (storage, layout)) in &locked {
            operands.push(Operand::read(name, &place, Source::of(storage)?, layout)?);
        }
        let mut results = Vec::with_capacity(3);
        for t in [q, k, v] {
            results.push((place.alloc(operands[0].float("q")?, t.elem_count())?, t.shape().clone()));
        }
        {
            let mut written = Vec::with_capacity(3);
            for (name, (storage, shape)) in ["dq", "dk", "dv"].into_iter().zip(&mut results) {
                written.push(Operand::write(name, &place, storage, shape)?);
            }
            let view = |i: usize| operands[i].bshd(inputs[i].0);
            let Settings { mask, scale, side, .. } = &self.settings;
            let call = Backward {
                dout: view(4)?,
                q: view(0)?,
                k: view(1)?,
                v: view(2)?,
                o: view(3)?,
                lse: operands[5].address(),
                dlse: None,
                residual: None,
                dropout: Default::default(),
                dq: written[0].bshd("dq")?,
                dk: written[1].bshd("dk")?,
                dv: written[2].bshd("dv")?,
                mask: *mask,
                scale: *scale,
                program: None,
                side: Default::default(),
                packed: None,
                gradients: &[],
            };
            side.with(&place, |inputs| {
                let call = side.program.map_or(call, |program| call.with_program(program, *inputs));
                // SAFETY: as in `run`; the log-sum-exp is the contiguous one that `run` wrote.
                let _: Option<Dispatch> = unsafe { engine.backward(&call, place.stream())? };
                Ok(())
            })?;
        }
        let mut results = results.into_iter().map(|(storage, shape)| tensor(storage, shape));
        Ok(std::array::from_fn(|_| results.next().expect("three gradients")))
    }
}

impl CustomOp3 for Op {
    fn name(&self) -> &'static str {
        "flashtune"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        k: &CpuStorage,
        k_layout: &Layout,
        v: &CpuStorage,
        v_layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let inputs = [(Source::Cpu(q), q_layout), (Source::Cpu(k), k_layout), (Source::Cpu(v), v_layout)];
        match self.run(inputs)? {
            (Storage::Cpu(o), shape) => Ok((o, shape)),
            _ => unreachable!("a result is where q is"),
        }
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        q: &candle_core::CudaStorage,
        q_layout: &Layout,
        k: &candle_core::CudaStorage,
        k_layout: &Layout,
        v: &candle_core::CudaStorage,
        v_layout: &Layout,
    ) -> candle_core::Result<(candle_core::CudaStorage, Shape)> {
        let inputs = [(Source::Cuda(q), q_layout), (Source::Cuda(k), k_layout), (Source::Cuda(v), v_layout)];
        match self.run(inputs)? {
            (Storage::Cuda(o), shape) => Ok((o, shape)),
            _ => unreachable!("a result is where q is"),
        }
    }

    fn bwd(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        o: &Tensor,
        dout: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let [dq, dk, dv] = self.gradients([q, k, v, o, dout])?;
        Ok((Some(dq), Some(dk), Some(dv)))
    }
}

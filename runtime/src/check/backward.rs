//! Does a compiled kernel compute the gradients? As [`super::CheckCase`] asks of a forward pass.

mod packed;

pub use packed::PackedBatch;

use super::{CheckInputs, CheckReport, OnDevice, Poison, dropout, poison, residual};
use crate::guarded::written;
use crate::reference::{
    Attention, GradientInputs, Gradients, RowId, all_rows, compare_gradients, oracle_gradients, oracle_of,
    unfused_gradients,
};
use crate::{
    BackwardCall, BackwardTensors, Device, Error, HostTensor, Layout, Module, Result, SideBuffers, backward_call,
    typical_side,
};
use flashtune_codegen::abi::BackwardArgs;
use flashtune_codegen::score::{At, Bound, Precision, SideData};
use flashtune_codegen::{DType, DropoutMask, Problem, SCRATCH_LIMIT, Shape};
use packed::PackedRows;
use std::sync::Arc;

/// One backward problem, shape and input set on a device, with the expected gradients: computed once, used for many
/// kernels. O and the log-sum-exp are those of fp64, rounded; every row of the gradients is compared.
pub struct BackwardCase {
    pub(super) device: Arc<dyn Device>,
    problem: Problem,
    pub(super) shape: Shape,
    /// The call without its program.
    pub(super) call: BackwardCall,
    args: BackwardArgs,
    /// dO, Q, K, V, O and the log-sum-exp, and where the loss depends on that, its gradient; what O lost, where the
    /// problem has it.
    pub(super) inputs: Vec<OnDevice>,
    outputs: [OnDevice; 3],
    /// Where sequences lie, if they are packed.
    packed: Option<PackedRows>,
    /// What the score program reads; its address is in `args`.
    _side: Option<SideBuffers>,
    /// What scores are dropped by; its addresses are in `args`.
    _dropout: Option<dropout::CaseDropout>,
    oracle: Gradients,
    unfused: Gradients,
    /// Which rows attend mostly to one key ([`residual::peak`]).
    peaked: Vec<Option<usize>>,
}

/// Inputs in the host's memory, and what they give.
struct Drawn {
    /// dO, Q, K, V, O, the log-sum-exp and, where the loss depends on that, its gradient.
    tensors: Vec<HostTensor>,
    oracle: Gradients,
    unfused: Gradients,
    /// What O lost, of problems that have it, and which rows attend mostly to one key.
    residual: Option<HostTensor>,
    peaked: Vec<Option<usize>>,
}

/// The names of [`Drawn::tensors`].
const NAMES: [&str; 7] = ["dout", "q", "k", "v", "o", "lse", "dlse"];

impl Drawn {
    /// Of dense tensors. `sequence` is what the score program takes the first one for; with `peaks`, and without a
    /// program, rows attend mostly to one key.
    fn new(
        problem: &Problem,
        shape: &Shape,
        inputs: &CheckInputs,
        data: &SideData,
        sequence: u32,
        dropout: Option<DropoutMask>,
        peaks: bool,
    ) -> Self {
        let sizes = |heads: u32, rows: u32, dim: u32| [shape.batch, heads, rows, dim].map(|n| n as usize);
        let random = |heads, rows, dim, salt| {
            let seed = inputs.seed.wrapping_mul(8).wrapping_add(salt);
            HostTensor::random(problem.dtype, sizes(heads, rows, dim), inputs.layout, seed, inputs.distribution)
        };
        let (dim, dim_v) = (problem.head_dim_qk, problem.head_dim_v);
        let mut q = random(shape.heads, shape.q_len, dim, 0);
        let mut k = random(shape.kv_heads, shape.kv_len, dim, 1);
        let mut v = random(shape.kv_heads, shape.kv_len, dim_v, 2);
        let mut dout = random(shape.heads, shape.q_len, dim_v, 3);
        poison(inputs.poison, problem, shape, &q, [&mut k, &mut v]);
        let scale = inputs.scale.unwrap_or_else(|| problem.default_scale());
        let program = problem.program.as_deref().map(|p| (p, data));
        let mut peaked = Vec::new();
        // Not where elements stand out: rounding dS is then 0.43 % of a row's dQ by itself (on an H200 the same number
        // from backward/sm80 and backward/sm90 and from every schedule), so that digits of D do not show.
        let stands_out = inputs.distribution == crate::Distribution::NormalWithOutliers;
        if peaks && program.is_none() && !stands_out {
            peaked = residual::peak(&mut q, &k, shape, scale.into());
        }
        let attention = Attention { mask: shape.mask, scale, program, sequence, dropout };
        let rows = sizes(shape.heads, shape.q_len, 1);
        let forward = oracle_of(&q, &k, &v, &attention, &all_rows(shape));
        let as_f32 = |values: &[f64]| values.iter().map(|x| *x as f32).collect::<Vec<f32>>();
        let of = |dtype, shape, layout, values: &[f32]| {
            HostTensor::from_values(dtype, shape, layout, values).expect("as many values as the shape has")
        };
        let lse = of(DType::F32, rows, Layout::Bhsd, &as_f32(&forward.lse));
        let empty = empty_rows(&attention, shape);
        poison_queries(inputs.poison, problem, &empty, [&mut q, &mut dout]);
        let dlse = inputs.lse.then(|| {
            let seed = inputs.seed.wrapping_mul(8).wrapping_add(4);
            HostTensor::random(DType::F32, rows, Layout::Bhsd, seed, crate::Distribution::Normal)
        });
        let dlse_values = dlse.as_ref().map(HostTensor::values);
        let given = GradientInputs { q: &q, k: &k, v: &v, dout: &dout, dlse: dlse_values.as_deref() };
        let (mut oracle, unfused) = (oracle_gradients(&given, &attention), unfused_gradients(&given, &attention));
        // A score of -inf takes no part, whatever O is by a forward pass that multiplies an infinity of V by 0.
        let mut o = of(problem.dtype, sizes(shape.heads, shape.q_len, dim_v), inputs.layout, &as_f32(&oracle.o.o));
        let mut lost = problem.residual.then(|| residual::of(&o, &oracle.o.o));
        if lost.is_some() {
            // D then has all digits, whatever O is rounded to.
            let of_all = [&mut oracle.dq, &mut oracle.dk, &mut oracle.dv];
            of_all.into_iter().flat_map(|rows| &mut rows.scales).for_each(|scale| scale.by_o = 0.0);
        }
        poison_queries(inputs.poison, problem, &empty, [&mut o]);
        if let Some(lost) = &mut lost {
            poison_queries(inputs.poison, problem, &empty, [lost]);
        }
        let tensors = [dout, q, k, v, o, lse].into_iter().chain(dlse).collect();
        Self { tensors, oracle, unfused, residual: lost, peaked }
    }
}

impl BackwardCase {
    /// Makes inputs, with [`typical_side`] for what the problem's score program reads, computes the expected results
    /// and uploads. `inputs.lse` is whether the loss depends on the log-sum-exp.
    ///
    /// # Errors
    /// When the mask of the shape is not of the problem's kind, or the device has no memory.
    pub fn new(device: Arc<dyn Device>, problem: &Problem, shape: &Shape, inputs: &CheckInputs) -> Result<Self> {
        let data = problem.program.map_or(SideData::default(), |p| typical_side(&p, shape, inputs.seed));
        Self::with_side(device, problem, shape, inputs, &data)
    }

    /// [`BackwardCase::new`] with the scalars and tensors that the problem's score program reads.
    ///
    /// # Errors
    /// As [`BackwardCase::new`], and data that does not fit the program.
    pub fn with_side(
        device: Arc<dyn Device>,
        problem: &Problem,
        shape: &Shape,
        inputs: &CheckInputs,
        data: &SideData,
    ) -> Result<Self> {
        super::same_kind(problem, shape)?;
        device.require_room(problem, shape)?;
        let dropout = dropout::mask(problem, inputs.seed);
        // A row whose one key is dropped has no output, and nothing that it could lose.
        let peaks = problem.residual && dropout.is_none();
        let drawn = Drawn::new(problem, shape, inputs, data, 0, dropout, peaks);
        Self::place(device, problem, shape, inputs, data, drawn, None)
    }

    /// [`BackwardCase::new`] of rows that attend mostly to one key, whatever the problem has of what O lost; for
    /// problems without a score program.
    ///
    /// # Errors
    /// As [`BackwardCase::new`].
    pub fn peaked(device: Arc<dyn Device>, problem: &Problem, shape: &Shape, inputs: &CheckInputs) -> Result<Self> {
        super::same_kind(problem, shape)?;
        device.require_room(problem, shape)?;
        let data = SideData::default();
        let drawn = Drawn::new(problem, shape, inputs, &data, 0, None, true);
        Self::place(device, problem, shape, inputs, &data, drawn, None)
    }

    /// The error of dQ beside dQ, of a kernel's one launch and of unfused gradients, over the rows of each of the
    /// weights 0.8, 0.95 and 0.99 that [`BackwardCase::peaked`] gives one key.
    ///
    /// # Errors
    /// As [`BackwardCase::check`].
    pub fn peaked_errors(&self, module: &dyn Module) -> Result<[[f64; 2]; 3]> {
        let (bytes, _) = self.run(module, SCRATCH_LIMIT)?;
        let mut dq = self.outputs[0].host.clone();
        dq.bytes_mut().copy_from_slice(&bytes[0]);
        let own = residual::errors(&residual::rows_of(&dq, &self.oracle.dq), &self.oracle.dq, &self.peaked);
        let unfused = residual::errors(&self.unfused.dq.o, &self.oracle.dq, &self.peaked);
        Ok(std::array::from_fn(|i| [own[i].1, unfused[i].1]))
    }

    /// Uploads. Packed sequences lie in tensors of a batch of one.
    fn place(
        device: Arc<dyn Device>,
        problem: &Problem,
        shape: &Shape,
        inputs: &CheckInputs,
        data: &SideData,
        Drawn { tensors, oracle, unfused, residual, peaked }: Drawn,
        packed: Option<PackedRows>,
    ) -> Result<Self> {
        let d = &*device;
        let side = problem.program.map(|p| SideBuffers::new(d, &p, shape, data)).transpose()?;
        let output = |name, like: &HostTensor| {
            OnDevice::new(d, name, HostTensor::poisoned(problem.dtype, like.shape(), inputs.layout))
        };
        let outputs = [output("dq", &tensors[1])?, output("dk", &tensors[2])?, output("dv", &tensors[3])?];
        let on_device = NAMES.into_iter().zip(tensors).map(|(name, host)| OnDevice::new(d, name, host));
        let mut on_device = on_device.collect::<Result<Vec<OnDevice>>>()?;
        let dlse = on_device.get(6).map(OnDevice::view);
        let residual = residual.map(|host| OnDevice::new(d, "residual", host)).transpose()?;
        let lost = residual.as_ref().map(OnDevice::view);
        on_device.extend(residual);
        let view = |i: usize| on_device[i].view();
        let tensors = BackwardTensors {
            dout: view(0),
            q: view(1),
            k: view(2),
            v: view(3),
            o: view(4),
            lse: view(5),
            dlse,
            dq: outputs[0].view(),
            dk: outputs[1].view(),
            dv: outputs[2].view(),
        };
        let mut call = backward_call(&tensors, shape.mask, inputs.scale)?;
        if let Some(lost) = &lost {
            call = call.with_residual(lost)?;
        }
        let dropout = dropout::place(d, problem, inputs.seed)?;
        if let Some(dropout) = &dropout {
            call = call.with_dropout(&dropout.call)?;
        }
        if let Some(packed) = &packed {
            call = call.packed(&packed.arrays(shape))?;
        }
        let args = BackwardArgs { side: side.as_ref().map_or(0, SideBuffers::address), ..call.args };
        let (problem, shape) = (*problem, call.shape);
        Ok(Self {
            device,
            problem,
            shape,
            call,
            args,
            inputs: on_device,
            outputs,
            packed,
            _side: side,
            _dropout: dropout,
            oracle,
            unfused,
            peaked,
        })
    }

    /// The arguments of the case's launch: valid as long as the case lives. The gradients may be overwritten at will.
    pub fn args(&self) -> &BackwardArgs {
        &self.args
    }

    /// The sizes of the case; of packed sequences their bounds.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Launches a kernel twice into poisoned gradients and compares: once within the usual limit of scratch memory, and
    /// once within the least, which must give the same bytes.
    ///
    /// # Errors
    /// When the kernel is for another problem or a device call fails; a wrong result is not an error but a report.
    pub fn check(&self, module: &dyn Module) -> Result<CheckReport> {
        self.check_launches(module, 2)
    }

    /// [`BackwardCase::check`] with another number of launches (at least one).
    ///
    /// # Errors
    /// As [`BackwardCase::check`].
    pub fn check_launches(&self, module: &dyn Module, launches: usize) -> Result<CheckReport> {
        let (first, mut stray) = self.run(module, SCRATCH_LIMIT)?;
        let mut repeatable = true;
        for nth in 1..launches {
            let (again, also) = self.run(module, if nth % 2 == 0 { SCRATCH_LIMIT } else { 0 })?;
            repeatable &= first == again;
            stray = stray.or(also);
        }
        for input in &self.inputs {
            stray = stray.or(input.memory.changed(&*self.device, input.host.bytes(), self.device.stream())?);
        }
        if let Some(packed) = &self.packed {
            stray = stray.or(packed.changed(&*self.device)?);
        }
        let mut tensors = Vec::new();
        for (output, bytes) in self.outputs.iter().zip(&first) {
            let mut tensor = output.host.clone();
            tensor.bytes_mut().copy_from_slice(bytes);
            let gap = tensor.gaps().into_iter().find(|gap| written(&bytes[gap.clone()]).is_some());
            stray =
                stray.or_else(|| Some(format!("bytes {:?} of {}, between its rows, were written", gap?, output.name)));
            if let Some(packed) = &self.packed {
                let unowned = || packed.unowned(output.name, &tensor);
                stray = stray.or_else(unowned);
                tensor = packed.apart(output.name, &tensor);
            }
            tensors.push(tensor);
        }
        if self.problem.residual {
            stray = stray.or_else(|| residual::gradients_fail(&tensors[0], &self.oracle.dq, &self.peaked));
        }
        let verdict = compare_gradients([&tensors[0], &tensors[1], &tensors[2]], &self.oracle, &self.unfused);
        Ok(CheckReport { verdict, repeatable, stray })
    }

    /// How far the gradients of one launch are from fp64 at most. Not by a bound of rounding, which grows with the
    /// scores: for rows whose scores are far from zero, and for dense calls.
    ///
    /// # Errors
    /// As [`BackwardCase::check`].
    pub fn largest_error(&self, module: &dyn Module) -> Result<f64> {
        let (bytes, _) = self.run(module, SCRATCH_LIMIT)?;
        let mut largest = 0.0f64;
        let of = [&self.oracle.dq, &self.oracle.dk, &self.oracle.dv];
        for ((output, bytes), want) in self.outputs.iter().zip(&bytes).zip(of) {
            let mut tensor = output.host.clone();
            tensor.bytes_mut().copy_from_slice(bytes);
            let errors = tensor.values().into_iter().zip(&want.o).map(|(x, y)| (f64::from(x) - y).abs());
            // NaN is as far as can be.
            largest = errors.fold(largest, |most, x| if x.is_nan() { f64::INFINITY } else { most.max(x) });
        }
        Ok(largest)
    }

    /// One launch into poisoned gradients within a limit of scratch memory: their bytes, and what was written around
    /// them.
    fn run(&self, module: &dyn Module, limit: u64) -> Result<(Vec<Vec<u8>>, Option<String>)> {
        let (device, kernel) = (&*self.device, module.kernel());
        if kernel.problem != self.problem {
            return Err(Error::Device {
                call: "check",
                device: device.fingerprint().to_string(),
                message: format!("the kernel computes {}, the inputs are for {}", kernel.problem, self.problem),
                remedy: "check a kernel with inputs of its own problem",
            });
        }
        let stream = device.stream();
        for output in &self.outputs {
            output.memory.poison(device)?;
        }
        if !self.problem.has_no_output(&self.shape) {
            let plan = kernel.plan(&self.shape)?.within(limit);
            // SAFETY: the arguments were made by `backward_call` from views of buffers that `self` owns.
            unsafe { device.launch(module, &plan, (&self.args).into(), stream)? };
        }
        device.synchronize(stream)?;
        let (mut all, mut stray) = (Vec::new(), None);
        for output in &self.outputs {
            let (bytes, guards) = output.memory.download(device, stream)?;
            stray = stray.or(guards);
            all.push(bytes);
        }
        Ok((all, stray))
    }
}

/// Whether each row attends to no key, by its masks.
fn empty_rows(attention: &Attention<'_>, shape: &Shape) -> Vec<bool> {
    let mut bound = attention.program.map(|(p, data)| Bound::of_checked(p, shape, data, Precision::F32));
    let mut is_empty = |id: &RowId| {
        let mut live = attention.mask.live(id.row.into(), shape.q_len.into(), shape.kv_len.into());
        let at = |kv: u64| At { b: id.batch, h: id.head, q: id.row, kv: kv as u32 };
        !live.any(|kv| bound.as_mut().is_none_or(|b| b.visible(at(kv))))
    };
    all_rows(shape).iter().map(&mut is_empty).collect()
}

/// Poison in the rows of tensors that attend to nothing, and in dO (the last of several) of the first row of the first
/// head where a mask lets it see a few keys alone.
fn poison_queries<const N: usize>(kind: Poison, problem: &Problem, empty: &[bool], mut to: [&mut HostTensor; N]) {
    let bad = match kind {
        Poison::None => return,
        Poison::Nan => f32::NAN,
        Poison::Infinite => f32::INFINITY,
    };
    let [batch, heads, rows, _] = to[0].shape();
    let sinks = problem.program.is_some_and(|p| p.sink().is_some());
    for at in (0..empty.len()).filter(|at| empty[*at] && !sinks) {
        let place = [at / rows / heads, at / rows % heads, at % rows];
        to.iter_mut().for_each(|t| t.write_row(place, &vec![bad; t.shape()[3]]));
    }
    if let [_, dout] = &mut to[..]
        && (problem.mask.right || problem.masks_by_program())
        && rows > 0
        && heads > 0
    {
        (0..batch).for_each(|b| dout.set([b, 0, 0, 0], bad));
    }
}

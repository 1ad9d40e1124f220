//! Does a compiled kernel compute attention? The test that every kernel passes before it may win, and what
//! `flashtune check` runs.
//!
//! Tensors lie between guard zones of NaN, O and LSE start as NaN, the kernel runs twice: its result must match the
//! oracle, be the same bytes both times, and nothing but O and LSE may have changed.

mod backward;
mod dropout;
mod e4m3;
mod gradient;
mod pad;
mod quantise;
mod ragged;
mod residual;

pub use backward::{BackwardCase, PackedBatch};
pub use dropout::{drawn as drawn_dropout, mask as dropout_mask};
pub use gradient::GradientCase;
pub use pad::check_pad;
pub use quantise::check_quantise;
pub use ragged::{
    Index, LengthsBy, LseForm, Most, Part, Queries, RaggedBatch, RaggedCase, RaggedData, RaggedOutputs, ScaleForm,
    StoreLayout,
};
pub use residual::forward_fails as residual_fails;

use crate::guarded::{Guarded, written};
use crate::reference::{Attention, Rows, all_rows, compare, oracle_of, sample_rows, unfused_rows_in};
use crate::{
    Device, Distribution, Error, ForwardTensors, HostTensor, Layout, Module, Result, SideBuffers, TensorView, Verdict,
    forward_call, typical_side,
};
use flashtune_codegen::abi::ForwardArgs;
use flashtune_codegen::score::SideData;
use flashtune_codegen::{DType, Problem, Shape};
use std::fmt;
use std::sync::Arc;

/// Multiply-adds up to which every row is compared; above, a sample of rows.
const FULL_CHECK: f64 = 3e8;

/// Which inputs to check a kernel with.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CheckInputs {
    /// Memory layout of Q, K, V and O.
    pub layout: Layout,
    /// Distribution of the values.
    pub distribution: Distribution,
    /// Seed of the values.
    pub seed: u64,
    /// Ask for the LSE as well.
    pub lse: bool,
    /// What is put where no query, or only some, may look: what is masked must not leak.
    pub poison: Poison,
    /// Softmax scale; `None` is the default.
    pub scale: Option<f32>,
}

/// What lies in K and V beside numbers: in every element of the rows that no query sees, and in some that are seen.
/// Rows that see it are compared, too: they have no number where the oracle has none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Poison {
    /// Nothing.
    #[default]
    None,
    /// NaN. The last row of K in the first head and of V in the last, where only some queries see them; else an element
    /// of V.
    Nan,
    /// Infinities. One element of the last row of K in the first head, so that some queries have a score of inf and
    /// others one of -inf, which takes no part; one of each sign in the row of V before, in the last head.
    Infinite,
}

impl Poison {
    /// The word for it.
    pub const fn name(self) -> &'static str {
        match self {
            Poison::None => "none",
            Poison::Nan => "nan",
            Poison::Infinite => "infinite",
        }
    }
}

impl Default for CheckInputs {
    fn default() -> Self {
        Self {
            layout: Layout::Bhsd,
            distribution: Distribution::Normal,
            seed: 1,
            lse: true,
            poison: Poison::None,
            scale: None,
        }
    }
}

/// One problem, shape and input set on a device, with the expected results: computed once, used for many kernels.
pub struct CheckCase {
    device: Arc<dyn Device>,
    problem: Problem,
    shape: Shape,
    args: ForwardArgs,
    inputs: [OnDevice; 3],
    o: OnDevice,
    lse: Option<OnDevice>,
    /// What O loses by rounding, of problems that have it written.
    residual: Option<OnDevice>,
    /// What the score program reads; its address is in `args`.
    _side: Option<SideBuffers>,
    /// What scores are dropped by, of problems that have it; `args` has its addresses.
    _dropout: Option<dropout::CaseDropout>,
    /// Scales of e4m3 operands, of which `args` has the addresses.
    scales: Option<e4m3::Scales>,
    oracle: Rows,
    unfused: Rows,
}

/// A tensor on the device between guard zones, with the bytes that it was given.
struct OnDevice {
    name: &'static str,
    host: HostTensor,
    memory: Guarded,
}

/// What one launch wrote.
struct Outputs {
    o: Vec<u8>,
    lse: Option<Vec<u8>>,
    residual: Option<Vec<u8>>,
    /// What was written around them.
    stray: Option<String>,
}

/// What a check found.
#[derive(Debug, Clone, PartialEq)]
pub struct CheckReport {
    /// Against the oracle.
    pub verdict: Verdict,
    /// Both launches gave the same bytes.
    pub repeatable: bool,
    /// What was written outside of the outputs, or is wrong in what comes beside them, if anything.
    pub stray: Option<String>,
}

impl CheckReport {
    /// Everything is as it must be.
    pub fn passed(&self) -> bool {
        self.verdict.passed() && self.repeatable && self.stray.is_none()
    }
}

impl fmt::Display for CheckReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(stray) = &self.stray {
            write!(f, "WRONG: {stray}; ")?;
        }
        if !self.repeatable {
            f.write_str("WRONG: two launches gave different bytes; ")?;
        }
        self.verdict.fmt(f)
    }
}

impl OnDevice {
    fn new(device: &dyn Device, name: &'static str, host: HostTensor) -> Result<Self> {
        Ok(Self { name, memory: Guarded::new(device, name, host.bytes())?, host })
    }

    fn view(&self) -> TensorView {
        self.host.view_at(self.memory.address())
    }
}

impl CheckCase {
    /// Makes inputs, computes the expected results and uploads.
    ///
    /// # Errors
    /// When the mask of the shape is not of the problem's kind, the problem's score program reads data, or the device
    /// has no memory.
    pub fn new(device: Arc<dyn Device>, problem: &Problem, shape: &Shape, inputs: &CheckInputs) -> Result<Self> {
        Self::with_side(device, problem, shape, inputs, &SideData::default())
    }

    /// [`CheckCase::new`] with [`typical_side`] for what the problem's score program reads.
    ///
    /// # Errors
    /// As [`CheckCase::new`].
    pub fn typical(device: Arc<dyn Device>, problem: &Problem, shape: &Shape, inputs: &CheckInputs) -> Result<Self> {
        let data = problem.program.map_or(SideData::default(), |p| typical_side(&p, shape, inputs.seed));
        Self::with_side(device, problem, shape, inputs, &data)
    }

    /// [`CheckCase::new`] with the scalars and tensors that the problem's score program reads.
    ///
    /// # Errors
    /// As [`CheckCase::new`], and data that does not fit the program.
    pub fn with_side(
        device: Arc<dyn Device>,
        problem: &Problem,
        shape: &Shape,
        inputs: &CheckInputs,
        data: &SideData,
    ) -> Result<Self> {
        same_kind(problem, shape)?;
        device.require_room(problem, shape)?;
        let side = problem.program.map(|p| SideBuffers::new(&*device, &p, shape, data)).transpose()?;
        let sizes = |heads: u32, rows: u32, dim: u32| [shape.batch, heads, rows, dim].map(|n| n as usize);
        let random = |heads, rows, dim, salt| {
            let seed = inputs.seed.wrapping_mul(4).wrapping_add(salt);
            HostTensor::random(problem.dtype, sizes(heads, rows, dim), inputs.layout, seed, inputs.distribution)
        };
        let q = random(shape.heads, shape.q_len, problem.head_dim_qk, 0);
        let mut k = random(shape.kv_heads, shape.kv_len, problem.head_dim_qk, 1);
        let mut v = random(shape.kv_heads, shape.kv_len, problem.head_dim_v, 2);
        poison(inputs.poison, problem, shape, &q, [&mut k, &mut v]);
        let scale = inputs.scale.unwrap_or_else(|| problem.default_scale());
        let rows = if multiply_adds(problem, shape) <= FULL_CHECK {
            all_rows(shape)
        } else {
            let per_row = shape.kv_len as f64 * (problem.head_dim_qk + problem.head_dim_v) as f64;
            sample_rows(shape, ((FULL_CHECK / per_row) as usize).clamp(64, 4096), inputs.seed)
        };
        let dropout = dropout::mask(problem, inputs.seed);
        let program = problem.program.as_deref().map(|p| (p, data));
        let attention = Attention { mask: shape.mask, scale, program, sequence: 0, dropout };
        let scales = match problem.dtype {
            DType::E4m3 => Some(e4m3::Scales::new(&*device, problem, shape, inputs.seed)?),
            _ => None,
        };
        let (oracle, unfused) = match &scales {
            Some(scales) => scales.expected([&q, &k, &v], &attention, problem.output_dtype(), &rows),
            None => {
                let mut oracle = oracle_of(&q, &k, &v, &attention, &rows);
                let unfused = unfused_rows_in(problem.precision, [&q, &k, &v], &attention, &mut oracle);
                (oracle, unfused)
            }
        };

        let output = problem.output_dtype();
        let o = HostTensor::poisoned(output, sizes(shape.heads, shape.q_len, problem.head_dim_v), inputs.layout);
        let d = &*device;
        let lse = inputs
            .lse
            .then(|| {
                OnDevice::new(
                    d,
                    "lse",
                    HostTensor::poisoned(DType::F32, sizes(shape.heads, shape.q_len, 1), Layout::Bhsd),
                )
            })
            .transpose()?;
        let dropout_seed = inputs.seed;
        let inputs = [OnDevice::new(d, "q", q)?, OnDevice::new(d, "k", k)?, OnDevice::new(d, "v", v)?];
        let o = OnDevice::new(d, "o", o)?;
        let tensors = ForwardTensors {
            q: inputs[0].view(),
            k: inputs[1].view(),
            v: inputs[2].view(),
            o: o.view(),
            lse: lse.as_ref().map(OnDevice::view),
        };
        let residual = problem.residual.then(|| {
            let host = HostTensor::poisoned(DType::Bf16, o.host.shape(), Layout::Bshd);
            OnDevice::new(d, "residual", host)
        });
        let residual = residual.transpose()?;
        let mut call = forward_call(&tensors, shape.mask, Some(scale))?;
        if let Some(residual) = &residual {
            call = call.with_residual(&residual.view())?;
        }
        let dropout = dropout::place(d, problem, dropout_seed)?;
        if let Some(dropout) = &dropout {
            call = call.with_dropout(&dropout.call)?;
        }
        if let Some(scales) = &scales {
            call = call.with_descales(&scales.views())?;
            call = scales.of_output().map_or(Ok(call), |at| call.with_output_scale(at))?;
        }
        let (problem, shape) = (*problem, *shape);
        let args = ForwardArgs { side: side.as_ref().map_or(0, SideBuffers::address), ..call.args };
        Ok(Self {
            device,
            problem,
            shape,
            args,
            inputs,
            o,
            lse,
            residual,
            _side: side,
            _dropout: dropout,
            scales,
            oracle,
            unfused,
        })
    }

    /// The arguments of the case's launch: valid as long as the case lives. O and LSE may be overwritten at will.
    pub fn args(&self) -> &ForwardArgs {
        &self.args
    }

    /// The sizes.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Number of rows that are compared.
    pub fn rows(&self) -> usize {
        self.oracle.ids.len()
    }

    /// Launches a kernel on the device's own stream, for the shape of the case.
    ///
    /// # Errors
    /// When the kernel is for another problem, or the launch fails.
    pub fn launch(&self, module: &dyn Module) -> Result<()> {
        let kernel = module.kernel();
        if kernel.problem != self.problem {
            return Err(Error::Device {
                call: "check",
                device: self.device.fingerprint().to_string(),
                message: format!("the kernel computes {}, the inputs are for {}", kernel.problem, self.problem),
                remedy: "check a kernel with inputs of its own problem",
            });
        }
        // SAFETY: the arguments were made by `forward_call` from views of buffers that `self` owns.
        unsafe { self.device.launch_shape(module, &self.shape, &self.args, self.device.stream()) }
    }

    /// Launches a kernel twice and compares.
    ///
    /// # Errors
    /// When the kernel is for another problem or a device call fails; a wrong result is not an error but a report.
    pub fn check(&self, module: &dyn Module) -> Result<CheckReport> {
        self.check_launches(module, 2)
    }

    /// [`CheckCase::check`] with another number of launches (at least one): what two threads do to each other shows in
    /// some launches only.
    ///
    /// # Errors
    /// As [`CheckCase::check`].
    pub fn check_launches(&self, module: &dyn Module, launches: usize) -> Result<CheckReport> {
        let mut first = self.run(module)?;
        let mut stray = first.stray.take();
        let mut repeatable = true;
        for _ in 1..launches {
            let again = self.run(module)?;
            repeatable &= first.o == again.o && first.lse == again.lse && first.residual == again.residual;
            stray = stray.or(again.stray);
        }

        for input in &self.inputs {
            stray = stray.or(input.memory.changed(&*self.device, input.host.bytes(), self.device.stream())?);
        }
        let mut o = self.o.host.clone();
        o.bytes_mut().copy_from_slice(&first.o);
        if let Some(gap) = o.gaps().into_iter().find(|gap| written(&first.o[gap.clone()]).is_some()) {
            stray = stray.or_else(|| Some(format!("bytes {gap:?} of o, between its rows, were written")));
        }
        if let (Some(residual), Some(bytes)) = (&self.residual, &first.residual) {
            let mut lost = residual.host.clone();
            lost.bytes_mut().copy_from_slice(bytes);
            stray = stray.or_else(|| residual::forward_fails(&o, &lost, &self.oracle));
        }
        let lse: Option<Vec<f32>> = first
            .lse
            .map(|bytes| bytes.chunks_exact(4).map(|b| f32::from_ne_bytes([b[0], b[1], b[2], b[3]])).collect());
        let verdict = match self.scales {
            Some(_) => crate::reference::e4m3::compare(&o, lse.as_deref(), &self.oracle, &self.unfused),
            None => compare(&o, lse.as_deref(), &self.oracle, &self.unfused),
        };
        Ok(CheckReport { verdict, repeatable, stray })
    }

    /// One launch into poisoned outputs.
    fn run(&self, module: &dyn Module) -> Result<Outputs> {
        let device = &*self.device;
        let stream = device.stream();
        self.o.memory.poison(device)?;
        for output in [&self.lse, &self.residual].into_iter().flatten() {
            output.memory.poison(device)?;
        }
        self.launch(module)?;
        device.synchronize(stream)?;
        let (o, mut stray) = self.o.memory.download(device, stream)?;
        let mut outputs = Outputs { o, lse: None, residual: None, stray: None };
        if let Some(lse) = &self.lse {
            let (bytes, guards) = lse.memory.download(device, stream)?;
            stray = stray.or(guards);
            outputs.lse = Some(bytes);
        }
        if let Some(residual) = &self.residual {
            let (bytes, guards) = residual.memory.download(device, stream)?;
            stray = stray.or(guards);
            outputs.residual = Some(bytes);
        }
        Ok(Outputs { stray, ..outputs })
    }
}

/// Refuses sizes whose mask is not of the kind that a problem is specialised to.
fn same_kind(problem: &Problem, shape: &Shape) -> Result<()> {
    if shape.mask.kind() == problem.mask {
        return Ok(());
    }
    let limit = format!("the problem is specialised to the kind `{}`", problem.mask);
    let remedy = "use a shape whose mask bounds the same sides";
    Err(flashtune_codegen::Error::unsupported("mask", shape.mask, limit, remedy).into())
}

/// Puts a kind of poison where [`Poison`] says.
fn poison(kind: Poison, problem: &Problem, shape: &Shape, q: &HostTensor, [k, v]: [&mut HostTensor; 2]) {
    let bad = match kind {
        Poison::None => return,
        Poison::Nan => f32::NAN,
        Poison::Infinite => f32::INFINITY,
    };
    let (q_len, kv_len) = (shape.q_len as u64, shape.kv_len as u64);
    let live = || (0..q_len).map(|i| shape.mask.live(i, q_len, kv_len)).filter(|r| !r.is_empty());
    let seen = live().reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)).unwrap_or(0..0);
    let whole = |t: &mut HostTensor, at: [usize; 3]| t.write_row(at, &vec![bad; t.shape()[3]]);
    let (Some(last), Some(head)) = (kv_len.checked_sub(1), shape.kv_heads.checked_sub(1)) else { return };
    let (last_row, head) = (last as usize, head as usize);
    let only_some = problem.mask.right || problem.masks_by_program();
    for b in 0..shape.batch as usize {
        for (h, j) in (0..=head).flat_map(|h| (0..seen.start).chain(seen.end..kv_len).map(move |j| (h, j as usize))) {
            whole(k, [b, h, j]);
            whole(v, [b, h, j]);
        }
        match kind {
            Poison::Nan if only_some => {
                whole(k, [b, 0, last_row]);
                whole(v, [b, head, last_row]);
            }
            Poison::Nan => v.set([b, head, last_row, 0], bad),
            // Whoever sees nothing but a score of -inf has no weights, by the oracle; kernels take it for a row without
            // keys.
            Poison::Infinite if live().any(|live| live == (last..kv_len)) => {}
            _ => {
                k.set([b, 0, last_row, both_signs(q, b, shape.group() as usize)], bad);
                let row = last_row.saturating_sub(1);
                v.set([b, head, row, 0], bad);
                v.set([b, head, row, 1], -bad);
            }
        }
    }
}

/// An element that is positive in some rows of Q's first heads and negative in others, if there is one.
fn both_signs(q: &HostTensor, batch: usize, heads: usize) -> usize {
    let [_, _, rows, dim] = q.shape();
    let mut values = vec![vec![0.0; dim]; heads * rows];
    for (i, row) in values.iter_mut().enumerate() {
        q.read_row([batch, i / rows, i % rows], row);
    }
    let some = |d: usize, sign: f32| values.iter().filter(|row| row[d] * sign > 0.0).count() * 4 >= values.len();
    (0..dim).find(|d| some(*d, 1.0) && some(*d, -1.0)).unwrap_or(0)
}

fn multiply_adds(problem: &Problem, shape: &Shape) -> f64 {
    shape.batch as f64
        * shape.heads as f64
        * shape.q_len as f64
        * shape.kv_len as f64
        * (problem.head_dim_qk + problem.head_dim_v) as f64
}

/// Checks one kernel on one shape.
pub fn check_kernel(
    device: &Arc<dyn Device>,
    module: &dyn Module,
    shape: &Shape,
    inputs: &CheckInputs,
) -> Result<CheckReport> {
    CheckCase::new(device.clone(), &module.kernel().problem, shape, inputs)?.check(module)
}

#[cfg(test)]
mod backward_tests;
#[cfg(test)]
mod dropout_tests;
#[cfg(test)]
mod e4m3_tests;
#[cfg(test)]
mod gradient_tests;
#[cfg(test)]
mod quantise_tests;
#[cfg(test)]
mod residual_tests;
#[cfg(test)]
mod tests;

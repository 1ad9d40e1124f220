//! The job's own sizes on the device: tensors, one more check of every candidate, and the clock.

use super::launches::{Launcher, confirm};
use super::probe::GridPart;
use super::{Inputs, dropout_of};
use crate::space::input_seed;
use flashtune_codegen::abi::ForwardArgs;
use flashtune_codegen::score::{ProgramRef, SideData};
use flashtune_codegen::{Arch, DType, Dropout, Shape};
use flashtune_runtime::guarded::{Guarded, written};
use flashtune_runtime::reference::{
    Attention, RowId, Rows, compare_rows, e4m3, oracle_of, sample_rows, unfused, unfused_rows_of,
};
use flashtune_runtime::{
    Buffer, Device, Distribution, Error as RuntimeError, ForwardTensors, HostBytes, HostTensor, Module, SideBuffers,
    TensorView, forward_call, typical_side,
};
use half::{bf16, f16};
use rayon::prelude::*;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Rows of O that are compared with the oracle at the job's size; the others are compared between candidates.
const SAMPLED_ROWS: usize = 48;

/// What is asked of the inputs of full size, dense or ragged.
pub(super) trait Measure {
    /// Runs a kernel on a part of the grid, which must be written to the last element, and nothing else.
    fn probe(&mut self, module: &dyn Module) -> Result<(), String>;

    /// Runs candidate `id` at the job's sizes: some rows are compared with the oracle, all of them with the first
    /// kernel that passed, and the whole with a second run, which is launched as it will be when it is timed. It may be
    /// right on small inputs and wrong on large ones. Gives the largest absolute error.
    fn check(&mut self, id: u32, module: &dyn Module) -> Result<f64, String>;

    /// Launches a candidate that was checked several times more, as it is timed, and compares all bytes. A race between
    /// its threads may pass a check or two.
    fn confirm(&mut self, id: u32, module: &dyn Module) -> Result<(), String>;

    /// Time of one run of candidate `id` with cold caches in microseconds: a launch, or the replay of a graph of one.
    fn time(&mut self, id: u32, module: &dyn Module) -> Result<f64, String>;

    /// Median time of unfused attention on the same inputs in microseconds, where it can be had.
    fn unfused_us(&self, fused_us: f64) -> Option<f64>;
}

/// Device tensors of one job, and the expected result of some rows.
pub(super) struct Bench {
    /// Before the buffers that its graphs were captured with.
    launcher: Launcher,
    shape: Shape,
    args: ForwardArgs,
    /// What the problem's score program reads, on the device and here; its address is in `args`.
    side: Option<(SideBuffers, SideData)>,
    host: [HostTensor; 3],
    /// Q, K, V and, between guards, O. The launches below rest on them.
    inputs: [Box<dyn Buffer>; 3],
    output: Guarded,
    /// What O loses by rounding, of problems that have it written.
    _residual: Option<Box<dyn Buffer>>,
    /// What two launches gave, guards included, and place for what the device has of Q, K and V.
    returned: [HostBytes; 2],
    /// Elements of a row of O.
    dim: usize,
    dtype: DType,
    o_dtype: DType,
    program: Option<ProgramRef>,
    dropout: Option<Dropout>,
    seed: u64,
    /// Some rows by the oracle and by unfused attention: computed when the first candidate is checked.
    expected: OnceLock<[Rows; 2]>,
    /// O of the first candidate that passed.
    trusted: Option<Vec<u8>>,
}

impl Bench {
    /// Makes and uploads the inputs.
    ///
    /// # Errors
    /// Those of the device, for want of memory for instance.
    pub(crate) fn new(device: &Arc<dyn Device>, job: &Inputs) -> Result<Self, RuntimeError> {
        let (p, s) = (&job.problem, &job.shape);
        let (batch, heads, kv_heads) = (s.batch as usize, s.heads as usize, s.kv_heads as usize);
        let (q_len, kv_len) = (s.q_len as usize, s.kv_len as usize);
        let (dqk, dv) = (p.head_dim_qk as usize, p.head_dim_v as usize);
        let shapes = [[batch, heads, q_len, dqk], [batch, kv_heads, kv_len, dqk], [batch, kv_heads, kv_len, dv]];
        let mut host = Vec::new();
        let mut inputs: Vec<Box<dyn Buffer>> = Vec::new();
        for (i, shape) in shapes.into_iter().enumerate() {
            let seed = input_seed(job.seed) ^ (i as u64 + 10);
            let tensor = HostTensor::repeated(p.dtype, shape, seed, Distribution::Normal);
            let buffer = device.alloc(tensor.bytes().len())?;
            device.upload(&*buffer, tensor.bytes())?;
            host.push(tensor);
            inputs.push(buffer);
        }
        let o_shape = [batch, heads, q_len, dv];
        let o_bytes = o_shape.iter().product::<usize>() * p.output_dtype().bytes();
        let output = Guarded::of_parts(&**device, [("o", o_bytes)])?;
        let most = inputs.iter().map(|b| b.len()).fold(output.all_bytes(), usize::max);
        let returned = [device.alloc_host(output.all_bytes())?, device.alloc_host(most)?];
        let at = |address: u64, dtype, shape: [usize; 4]| TensorView::bhsd(address, dtype, shape.map(|n| n as u64));
        let view = |buffer: &dyn Buffer, shape| at(buffer.address(), p.dtype, shape);
        let tensors = ForwardTensors {
            q: view(&*inputs[0], shapes[0]),
            k: view(&*inputs[1], shapes[1]),
            v: view(&*inputs[2], shapes[2]),
            o: at(output.address_of(0), p.output_dtype(), o_shape),
            lse: None,
        };
        let mut call = forward_call(&tensors, s.mask, None)?;
        let mut residual = None;
        if p.residual {
            let buffer = residual.insert(device.alloc(o_shape.iter().product::<usize>() * DType::Bf16.bytes())?);
            call = call.with_residual(&at(buffer.address(), DType::Bf16, o_shape))?;
        }
        let dropout = dropout_of(job);
        if let Some(dropout) = &dropout {
            call = call.with_dropout(dropout)?;
        }
        let side = match p.program {
            Some(program) => {
                let data = typical_side(&program, s, job.seed);
                Some((SideBuffers::new(&**device, &program, s, &data)?, data))
            }
            None => None,
        };
        let args = ForwardArgs { side: side.as_ref().map_or(0, |(buffers, _)| buffers.address()), ..call.args };
        Ok(Self {
            launcher: Launcher::new(device, job.launches),
            expected: OnceLock::new(),
            seed: job.seed,
            shape: *s,
            args,
            side,
            program: p.program,
            dropout,
            host: host.try_into().unwrap_or_else(|_| unreachable!("three tensors were made")),
            inputs: inputs.try_into().unwrap_or_else(|_| unreachable!("three buffers were made")),
            output,
            _residual: residual,
            returned,
            dim: dv,
            dtype: p.dtype,
            o_dtype: p.output_dtype(),
            trusted: None,
        })
    }

    /// A launch, as it is timed, that must give the bytes of the first that was returned.
    fn launch_again(&mut self, id: u32, module: &dyn Module) -> Result<(), String> {
        self.run(1, |this| this.launch_as_timed(id, module))?;
        let [first, another] = &self.returned;
        match same_bytes(first, &another[..first.len()]) {
            true => Ok(()),
            false => Err(format!("wrong answer for {}: two launches gave different bytes", self.shape)),
        }
    }

    /// The sampled rows of O, exact and by unfused attention, of e4m3 by an emulation that rounds P.
    fn expected(&self) -> &[Rows; 2] {
        self.expected.get_or_init(|| {
            let ([q, k, v], mask, scale) = (&self.host, self.shape.mask, self.args.scale);
            let rows = sample_rows(&self.shape, SAMPLED_ROWS, self.seed);
            let program = self.side.as_ref().zip(self.program.as_deref()).map(|((_, data), program)| (program, data));
            let dropout = self.dropout.map(|dropout| dropout.mask([0, 0]));
            let attention = Attention { mask, scale, program, sequence: 0, dropout };
            let oracle = oracle_of(q, k, v, &attention, &rows);
            let unfused = match self.dtype {
                // Its operands have no scales here.
                DType::E4m3 => e4m3::emulated([q, k, v], &attention, self.o_dtype, &oracle),
                _ => unfused_rows_of(q, k, v, &attention, &rows),
            };
            [oracle, unfused]
        })
    }

    /// O of one run into poison, with nothing written around it, to `returned`.
    fn run(&mut self, to: usize, launch: impl FnOnce(&Self) -> Result<(), RuntimeError>) -> Result<(), String> {
        let run = || {
            self.output.poison(&*self.launcher.device)?;
            launch(self)?;
            let Launcher { device, stream, .. } = &self.launcher;
            self.output.download_all(&**device, &mut self.returned[to], *stream)
        };
        let stray = run().map_err(|e: RuntimeError| e.to_string())?;
        stray.map_or(Ok(()), |stray| Err(format!("wrong answer for {}: {stray}", self.shape)))
    }

    /// Whether Q, K and V are what they were: whoever comes next is measured on them too.
    fn check_inputs(&mut self) -> Result<(), String> {
        let inputs = self.inputs.iter().zip(&self.host).zip(["q", "k", "v"]);
        let changed = changed_input(&self.launcher, inputs, &mut self.returned[1]);
        changed.map_err(|why| format!("wrong answer for {}: {why}", self.shape))
    }

    fn launch(&self, module: &dyn Module) -> Result<(), RuntimeError> {
        // SAFETY: `args` describes the buffers that `self` owns, which outlive the launch because every caller waits
        // for the stream (by a download or by timing) before it returns.
        unsafe { self.launcher.device.launch_shape(module, &self.shape, &self.args, self.launcher.stream) }
    }

    fn capture(&self, id: u32, module: &dyn Module) -> Result<(), String> {
        self.launcher.capture(id, &|| self.launch(module)).map_err(|e| e.to_string())
    }

    fn launch_as_timed(&self, id: u32, module: &dyn Module) -> Result<(), RuntimeError> {
        self.launcher.launch_as_timed(id, &|| self.launch(module))
    }
}

impl Bench {
    /// How far apart two right outputs may be, in parts of a row's largest element. P is rounded to e4m3 relative to
    /// maxima that come in the order of the schedule, each weight by 1/16 of itself at most: twice that in two outputs,
    /// and twice again where terms cancel in the largest element. An O of e4m3 adds 1/16 for each output.
    fn apart(&self) -> f32 {
        match (self.dtype, self.o_dtype) {
            (DType::E4m3, DType::E4m3) => 0.375,
            (DType::E4m3, _) => 0.25,
            (dtype, _) => roundings(dtype),
        }
    }
}

impl Measure for Bench {
    fn probe(&mut self, module: &dyn Module) -> Result<(), String> {
        let part = GridPart::of(&self.shape);
        let args = part.args(&self.args, self.dtype, self.o_dtype);
        // SAFETY: `args` describes a part of the buffers that `self` owns; `run` waits for the launch.
        self.run(0, |this| unsafe {
            this.launcher.device.launch_shape(module, &part.shape, &args, this.launcher.stream)
        })?;
        let o = &self.returned[0][self.output.place(0)];
        let (heads, q_len) = (self.shape.heads as usize, self.shape.q_len as usize);
        let strays = o.par_chunks(self.dim * self.o_dtype.bytes()).enumerate().find_map_first(|(i, row)| {
            let (batch, head, at) = (i / q_len / heads, i / q_len % heads, i % q_len);
            let why = wrong_row(self.o_dtype, row, part.holds(batch, head, at))?;
            Some(format!("wrong answer for {}: row {at} of head {head} of sequence {batch} {why}", part.shape))
        });
        strays.map_or(Ok(()), Err)
    }

    fn check(&mut self, id: u32, module: &dyn Module) -> Result<f64, String> {
        let s = self.shape;
        self.run(0, |this| this.launch(module))?;
        self.capture(id, module)?;
        self.launch_again(id, module)?;
        self.check_inputs()?;
        let o = &self.returned[0][self.output.place(0)];
        let (heads, q_len, row_bytes) = (s.heads as usize, s.q_len as usize, self.dim * self.o_dtype.bytes());
        let read = |id: &RowId, to: &mut [f32]| {
            let at = ((id.batch as usize * heads + id.head as usize) * q_len + id.row as usize) * row_bytes;
            to.iter_mut().zip(values(self.o_dtype, &o[at..at + row_bytes])).for_each(|(to, x)| *to = x);
        };
        let [expected, unfused] = self.expected();
        let verdict = match self.dtype {
            DType::E4m3 => e4m3::compare_rows(self.o_dtype, &read, None, expected, unfused),
            dtype => compare_rows(dtype, &read, None, expected, unfused),
        };
        if !verdict.passed() {
            return Err(format!("wrong answer for {s}: {verdict}"));
        }
        match &self.trusted {
            Some(trusted) => same_rows(self.o_dtype, self.apart(), self.dim, trusted, o)
                .map_err(|why| format!("wrong answer for {s}: {why}"))?,
            None => {
                same_rows(self.o_dtype, self.apart(), self.dim, o, o)?;
                self.trusted = Some(o.to_vec());
            }
        }
        Ok(verdict.max_error)
    }

    fn confirm(&mut self, id: u32, module: &dyn Module) -> Result<(), String> {
        self.capture(id, module)?;
        self.run(0, |this| this.launch_as_timed(id, module))?;
        confirm(|| self.launch_again(id, module))
    }

    fn time(&mut self, id: u32, module: &dyn Module) -> Result<f64, String> {
        // Whoever is timed has been checked: what all others were measured by is not needed any more.
        self.trusted = None;
        self.launcher.time_us(id, &|| self.launch(module)).map_err(|e| e.to_string())
    }

    /// On the CPU. It is not run when it would take long, going by the time of the fused kernel.
    fn unfused_us(&self, fused_us: f64) -> Option<f64> {
        // It is timed without score programs.
        if !matches!(self.launcher.device.arch(), Arch::Cpu(_)) || fused_us > 1e6 || self.program.is_some() {
            return None;
        }
        let [q, k, v] = &self.host;
        let scale = self.args.scale;
        let mut times = Vec::new();
        let start = Instant::now();
        while times.len() < 3 && (times.is_empty() || start.elapsed() < Duration::from_secs(2)) {
            let run = Instant::now();
            std::hint::black_box(unfused(q, k, v, self.shape.mask, scale));
            times.push(run.elapsed().as_secs_f64() * 1e6);
        }
        crate::stats::median(&times)
    }
}

/// What is wrong with a row of an output after a launch of a part of the grid: one of the part must hold finite
/// numbers, any other the poison that was there.
pub(super) fn wrong_row(dtype: DType, row: &[u8], is_of_part: bool) -> Option<&'static str> {
    match is_of_part {
        true => (!values(dtype, row).all(f32::is_finite)).then_some("was not written, or is not finite"),
        false => written(row).map(|_| "was written"),
    }
}

/// Whether what is read is what it was, by its names; `back` has room for the largest.
pub(super) fn changed_input<'a>(
    launcher: &Launcher,
    inputs: impl Iterator<Item = ((&'a Box<dyn Buffer>, &'a HostTensor), &'static str)>,
    back: &mut [u8],
) -> Result<(), String> {
    for ((buffer, host), name) in inputs {
        let back = &mut back[..buffer.len()];
        launcher.device.download(&**buffer, back, launcher.stream).map_err(|e| e.to_string())?;
        if !same_bytes(back, host.bytes()) {
            return Err(format!("{name} was written"));
        }
    }
    Ok(())
}

/// Whether two blocks of memory are equal, looked at by all cores.
pub(super) fn same_bytes(a: &[u8], b: &[u8]) -> bool {
    const PART: usize = 1 << 20;
    a.len() == b.len() && a.par_chunks(PART).zip(b.par_chunks(PART)).all(|(a, b)| a == b)
}

/// A few roundings, in parts of what is rounded.
pub(super) fn roundings(dtype: DType) -> f32 {
    8.0 * dtype.epsilon() as f32
}

/// Whether two outputs agree, row by row: each element finite, and apart by at most so many parts of the row's largest
/// element, as [`roundings`] says where both come from different orders of the same sums.
pub(super) fn same_rows(dtype: DType, most_apart: f32, dim: usize, trusted: &[u8], other: &[u8]) -> Result<(), String> {
    if trusted.len() != other.len() {
        return Err("the outputs differ in size".into());
    }
    let row_bytes = dim * dtype.bytes();
    // 1/512 is the least number of e4m3 above zero: of many keys an O without a scale is a few times that.
    let least = if dtype == DType::E4m3 { 1.0 / 512.0 } else { 1e-5 };
    let worst =
        trusted.par_chunks(row_bytes).zip(other.par_chunks(row_bytes)).enumerate().find_map_first(|(row, (a, b))| {
            let (mut largest, mut apart) = (0.0f32, 0.0f32);
            for (x, y) in values(dtype, a).zip(values(dtype, b)) {
                if !y.is_finite() {
                    return Some(format!("row {row} holds {y}, which was never written or is not finite"));
                }
                largest = largest.max(x.abs());
                apart = apart.max((x - y).abs());
            }
            let bound = most_apart * largest + least;
            (apart > bound)
                .then(|| format!("row {row} is {apart:e} away from the first candidate's, more than {bound:e}"))
        });
    worst.map_or(Ok(()), Err)
}

/// Elements of a row.
pub(super) fn values(dtype: DType, bytes: &[u8]) -> impl Iterator<Item = f32> + '_ {
    bytes.chunks_exact(dtype.bytes()).map(move |b| match dtype {
        DType::F16 => f16::from_ne_bytes([b[0], b[1]]).to_f32(),
        DType::Bf16 => bf16::from_ne_bytes([b[0], b[1]]).to_f32(),
        DType::F32 => f32::from_ne_bytes([b[0], b[1], b[2], b[3]]),
        DType::E4m3 => e4m3::value(b[0]),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashtune_runtime::Layout;

    fn bytes(dtype: DType, values: &[f32]) -> Vec<u8> {
        HostTensor::from_values(dtype, [1, 1, 1, values.len()], Layout::Bhsd, values).unwrap().bytes().to_vec()
    }

    #[test]
    fn outputs_agree_up_to_a_few_roundings_of_their_row() {
        for dtype in DType::ALL {
            let base: Vec<f32> = (0..64).map(|i| (i as f32 * 0.37).sin()).collect();
            let eps = dtype.epsilon() as f32;
            let near: Vec<f32> = base.iter().map(|x| x + eps).collect();
            let same =
                |other: &[f32]| same_rows(dtype, roundings(dtype), 16, &bytes(dtype, &base), &bytes(dtype, other));
            assert_eq!(same(&base), Ok(()));
            assert_eq!(same(&near), Ok(()), "{dtype}");
            for (bad, word) in [(f32::NAN, "row 2"), (f32::INFINITY, "row 2"), (base[40] + 0.4, "away")] {
                let mut other = base.clone();
                other[40] = bad;
                let why = same(&other).unwrap_err();
                assert!(why.contains(word), "{dtype} {why}");
            }
        }
    }

    #[test]
    fn an_unwritten_row_is_found_even_in_the_first_output() {
        let mut o = bytes(DType::Bf16, &[0.5; 32]);
        assert_eq!(same_rows(DType::Bf16, roundings(DType::Bf16), 16, &o, &o), Ok(()));
        o[40..].fill(0xff);
        assert!(same_rows(DType::Bf16, roundings(DType::Bf16), 16, &o, &o).unwrap_err().contains("row 1"));
    }
}

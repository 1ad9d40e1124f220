//! A backward pass of a job's sizes on the device: gradients between guards, some rows of each held against fp64, all
//! of them against the first candidate's.
//!
//! O and the log-sum-exp are no forward pass's: fp64 would take minutes for them, and a kernel would have to be
//! compiled.
//! Gradients are what they are by any. The log-sum-exp is about that of normal scores, so that weights sum to about 1.

use super::bench::{Measure, changed_input, roundings, same_bytes, same_rows, values, wrong_row};
use super::launches::{Launcher, confirm};
use super::probe::GridPart;
use super::{Inputs, dropout_of};
use crate::space::input_seed;
use flashtune_codegen::abi::BackwardArgs;
use flashtune_codegen::{DType, Dropout, SCRATCH_LIMIT, Shape};
use flashtune_runtime::guarded::Guarded;
use flashtune_runtime::reference::{GivenGradients, GradientSample, sample_gradients};
use flashtune_runtime::{
    BackwardTensors, Buffer, Device, Distribution, Error as RuntimeError, HostBytes, HostTensor, Module, SideBuffers,
    TensorView, backward_call, typical_side,
};
use rayon::prelude::*;
use std::sync::{Arc, OnceLock};

/// Rows of each gradient that are compared with fp64.
const SAMPLED_ROWS: usize = 32;
/// The gradients in the order in which they lie in memory.
const NAMES: [&str; 3] = ["dq", "dk", "dv"];
/// What is read, in the order of [`BackwardBench::host`].
const READ: [&str; 7] = ["q", "k", "v", "o", "dout", "lse", "residual"];

/// Device tensors of one job, and the expected result of some rows.
pub(super) struct BackwardBench {
    /// Before the buffers that its graphs were captured with.
    launcher: Launcher,
    shape: Shape,
    args: BackwardArgs,
    /// What the problem's score program reads; its address is in `args`.
    side: Option<SideBuffers>,
    /// Q, K, V, O, dO, the log-sum-exp and, where the problem has one, the residual of O, here and on the device.
    host: Vec<HostTensor>,
    inputs: Vec<Box<dyn Buffer>>,
    /// The gradients, between guards. The launches below rest on them.
    output: Guarded,
    /// The elements of their rows.
    dims: [usize; 3],
    /// What two launches gave, guards included, and place for what the device has of what is read.
    returned: [HostBytes; 2],
    dtype: DType,
    seed: u64,
    dropout: Option<Dropout>,
    /// Computed when the first candidate is checked.
    expected: OnceLock<GradientSample>,
    /// The gradients of the first candidate that passed.
    trusted: Option<Vec<u8>>,
}

impl BackwardBench {
    /// Makes and uploads the inputs.
    ///
    /// # Errors
    /// Those of the device, for want of memory for instance.
    pub(crate) fn new(device: &Arc<dyn Device>, job: &Inputs) -> Result<Self, RuntimeError> {
        let (p, s) = (&job.problem, &job.shape);
        let of = |heads: u32, rows: u32, dim: u32| [s.batch, heads, rows, dim].map(|n| n as usize);
        let (dim, dim_v) = (p.head_dim_qk, p.head_dim_v);
        let shapes = [of(s.heads, s.q_len, dim), of(s.kv_heads, s.kv_len, dim), of(s.kv_heads, s.kv_len, dim_v)];
        let [q, k, v] = shapes;
        let o = of(s.heads, s.q_len, dim_v);
        let made = |nth: u64, shape| {
            HostTensor::repeated(p.dtype, shape, input_seed(job.seed) ^ (nth + 10), Distribution::Normal)
        };
        let mut host = vec![made(0, q), made(1, k), made(2, v), made(3, o), made(4, o), log_sum_exp(s)];
        if p.residual {
            host.push(HostTensor::zeros(DType::Bf16, o, flashtune_runtime::Layout::Bhsd));
        }
        let mut inputs: Vec<Box<dyn Buffer>> = Vec::new();
        for tensor in &host {
            let buffer = device.alloc(tensor.bytes().len())?;
            device.upload(&*buffer, tensor.bytes())?;
            inputs.push(buffer);
        }
        let sizes = shapes.map(|shape| shape.iter().product::<usize>() * p.dtype.bytes());
        let output = Guarded::of_parts(&**device, NAMES.into_iter().zip(sizes))?;
        let most = inputs.iter().map(|b| b.len()).fold(output.all_bytes(), usize::max);
        let returned = [device.alloc_host(output.all_bytes())?, device.alloc_host(most)?];
        let view = |i: usize| host[i].view_at(inputs[i].address());
        let written = |i: usize| TensorView::bhsd(output.address_of(i), p.dtype, shapes[i].map(|n| n as u64));
        let tensors = BackwardTensors {
            dout: view(4),
            q: view(0),
            k: view(1),
            v: view(2),
            o: view(3),
            lse: view(5),
            dlse: None,
            dq: written(0),
            dk: written(1),
            dv: written(2),
        };
        let mut call = backward_call(&tensors, s.mask, None)?;
        if p.residual {
            call = call.with_residual(&view(6))?;
        }
        let dropout = dropout_of(job);
        if let Some(dropout) = &dropout {
            call = call.with_dropout(dropout)?;
        }
        let side =
            p.program.map(|program| SideBuffers::new(&**device, &program, s, &typical_side(&program, s, job.seed)));
        let side = side.transpose()?;
        let args = BackwardArgs { side: side.as_ref().map_or(0, SideBuffers::address), ..call.args };
        Ok(Self {
            launcher: Launcher::new(device, job.launches),
            shape: *s,
            args,
            side,
            host,
            inputs,
            output,
            dims: shapes.map(|shape| shape[3]),
            returned,
            dtype: p.dtype,
            seed: job.seed,
            dropout,
            expected: OnceLock::new(),
            trusted: None,
        })
    }

    /// Some rows in fp64.
    fn expected(&self) -> &GradientSample {
        self.expected.get_or_init(|| {
            let [q, k, v, o, dout, lse] = &self.host[..6] else { unreachable!("six tensors at least were made") };
            let lse = &lse.values()[..];
            let (mask, scale) = (self.shape.mask, self.args.scale);
            let dropout = self.dropout.map(|dropout| dropout.mask([0, 0]));
            let given = GivenGradients { q, k, v, o, dout, lse, mask, scale, dropout };
            sample_gradients(&given, SAMPLED_ROWS, self.seed)
        })
    }

    fn wrong(&self, why: impl std::fmt::Display) -> String {
        format!("wrong answer for {}: {why}", self.shape)
    }

    /// The gradients of one run into poison, with nothing written around them, to `returned`.
    fn run(&mut self, to: usize, launch: impl FnOnce(&Self) -> Result<(), RuntimeError>) -> Result<(), String> {
        let run = || {
            self.output.poison(&*self.launcher.device)?;
            launch(self)?;
            let Launcher { device, stream, .. } = &self.launcher;
            self.output.download_all(&**device, &mut self.returned[to], *stream)
        };
        let stray = run().map_err(|e: RuntimeError| e.to_string())?;
        stray.map_or(Ok(()), |stray| Err(self.wrong(stray)))
    }

    /// A launch, as it is timed, that must give the bytes of the first that was returned.
    fn launch_again(&mut self, id: u32, module: &dyn Module) -> Result<(), String> {
        self.run(1, |this| this.launch_as_timed(id, module))?;
        let [first, another] = &self.returned;
        match same_bytes(&first[..self.output.all_bytes()], &another[..self.output.all_bytes()]) {
            true => Ok(()),
            false => Err(self.wrong("two launches gave different bytes")),
        }
    }

    /// Whether what is read is what it was: whoever comes next is measured on it too.
    fn check_inputs(&mut self) -> Result<(), String> {
        let inputs = self.inputs.iter().zip(&self.host).zip(READ);
        let changed = changed_input(&self.launcher, inputs, &mut self.returned[1]);
        changed.map_err(|why| self.wrong(why))
    }

    fn launch(&self, module: &dyn Module) -> Result<(), RuntimeError> {
        let plan = module.kernel().plan(&self.shape)?.within(SCRATCH_LIMIT);
        // SAFETY: `args` describes the buffers that `self` owns, which outlive the launch because every caller waits
        // for the stream (by a download or by timing) before it returns.
        unsafe { self.launcher.device.launch(module, &plan, (&self.args).into(), self.launcher.stream) }
    }

    fn capture(&self, id: u32, module: &dyn Module) -> Result<(), String> {
        self.launcher.capture(id, &|| self.launch(module)).map_err(|e| e.to_string())
    }

    fn launch_as_timed(&self, id: u32, module: &dyn Module) -> Result<(), RuntimeError> {
        self.launcher.launch_as_timed(id, &|| self.launch(module))
    }

    /// The largest error of the sampled rows.
    fn compare(&self) -> Result<f64, String> {
        let bytes = &self.returned[0];
        let sample = self.expected();
        let mut largest = 0f64;
        let element = self.dtype.bytes();
        let heads = [self.shape.heads, self.shape.kv_heads, self.shape.kv_heads];
        let lengths = [self.shape.q_len, self.shape.kv_len, self.shape.kv_len];
        for (i, rows) in sample.rows.iter().enumerate() {
            let (place, dim) = (self.output.place(i), self.dims[i]);
            for row in rows {
                let head = row.id.batch as usize * heads[i] as usize + row.id.head as usize;
                let at = place.start + (head * lengths[i] as usize + row.id.row as usize) * dim * element;
                let got = values(self.dtype, &bytes[at..at + dim * element]);
                for (column, ((x, want), bound)) in got.zip(&row.values).zip(&row.bounds).enumerate() {
                    let off = (f64::from(x) - want).abs();
                    // NaN is as far as can be.
                    if off.is_nan() || off > *bound {
                        let (id, name) = (row.id, NAMES[i]);
                        let place = format!("{name}[{}, {}, {}, {column}]", id.batch, id.head, id.row);
                        return Err(format!("{place} is {x:e}, {want:e} by fp64 within {bound:e}"));
                    }
                    largest = largest.max(off);
                }
            }
        }
        Ok(largest)
    }
}

/// About what normal scores have of a deviation of 1: ln(keys) + 1/2.
fn log_sum_exp(s: &Shape) -> HostTensor {
    let row = |i: u32| {
        let live = s.mask.live(i.into(), s.q_len.into(), s.kv_len.into());
        if live.is_empty() { f32::NEG_INFINITY } else { ((live.end - live.start) as f32).ln() + 0.5 }
    };
    let head: Vec<f32> = (0..s.q_len).map(row).collect();
    let all = head.repeat(s.batch as usize * s.heads as usize);
    let shape = [s.batch, s.heads, s.q_len, 1].map(|n| n as usize);
    HostTensor::from_values(DType::F32, shape, flashtune_runtime::Layout::Bhsd, &all).expect("a number for each row")
}

impl Measure for BackwardBench {
    fn probe(&mut self, module: &dyn Module) -> Result<(), String> {
        let part = GridPart::of_heads(&self.shape);
        let Shape { batch, heads, kv_heads, .. } = part.shape;
        let args = BackwardArgs { batch: batch as i32, heads: heads as i32, kv_heads: kv_heads as i32, ..self.args };
        self.run(0, |this| {
            let plan = module.kernel().plan(&part.shape)?.within(SCRATCH_LIMIT);
            // SAFETY: the first sequences and heads of the buffers that `self` owns; heads are left out of one sequence
            // alone, so that rows of the log-sum-exp lie where they did; `run` waits for the launch.
            unsafe { this.launcher.device.launch(module, &plan, (&args).into(), this.launcher.stream) }
        })?;
        let bytes = &self.returned[0];
        let [of_q, of_kv] = [(self.shape.heads, self.shape.q_len), (self.shape.kv_heads, self.shape.kv_len)];
        let sizes = [(of_q, heads), (of_kv, kv_heads), (of_kv, kv_heads)];
        for (i, (name, ((all, rows), own))) in NAMES.into_iter().zip(sizes).enumerate() {
            let (all, rows) = (all as usize, rows as usize);
            let gradient = &bytes[self.output.place(i)];
            let stray =
                gradient.par_chunks(self.dims[i] * self.dtype.bytes()).enumerate().find_map_first(|(i, row)| {
                    let (b, head, at) = (i / rows / all, i / rows % all, i % rows);
                    let why = wrong_row(self.dtype, row, b < batch as usize && head < own as usize)?;
                    Some(format!(
                        "wrong answer for {}: row {at} of {name}, head {head} of sequence {b}, {why}",
                        part.shape
                    ))
                });
            stray.map_or(Ok(()), Err)?;
        }
        Ok(())
    }

    fn check(&mut self, id: u32, module: &dyn Module) -> Result<f64, String> {
        self.run(0, |this| this.launch(module))?;
        self.capture(id, module)?;
        self.launch_again(id, module)?;
        self.check_inputs()?;
        // Of a score program fp64 is asked at the small sizes.
        let largest = match self.side {
            None => self.compare().map_err(|why| self.wrong(why))?,
            Some(_) => 0.0,
        };
        let bytes = &self.returned[0];
        for (i, name) in NAMES.into_iter().enumerate() {
            let (trusted, place) = (self.trusted.as_deref().unwrap_or(bytes), self.output.place(i));
            let same =
                same_rows(self.dtype, roundings(self.dtype), self.dims[i], &trusted[place.clone()], &bytes[place]);
            same.map_err(|why| self.wrong(format!("{name}: {why}")))?;
        }
        if self.trusted.is_none() {
            self.trusted = Some(bytes[..self.output.all_bytes()].to_vec());
        }
        Ok(largest)
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

    /// Nobody computes gradients so.
    fn unfused_us(&self, _: f64) -> Option<f64> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashtune_cache::Launches;
    use flashtune_codegen::{
        Arch, BackwardCpuSchedule, CpuIsa, Kernel, Mask, PageClass, Problem, Schedule, TemplateSet,
    };
    use flashtune_runtime::{DeviceSpec, compile, open};
    use std::collections::BTreeMap;

    /// A kernel with a text of its template replaced.
    fn module(device: &dyn Device, problem: Problem, from: &str, to: &str) -> Arc<dyn Module> {
        let embedded = TemplateSet::embedded();
        let text = embedded.files().find(|(name, _)| *name == "backward/cpu.c").unwrap().1;
        assert!(text.contains(from), "{from}");
        let changed = BTreeMap::from([("backward/cpu.c".to_owned(), text.replacen(from, to, 1))]);
        let schedule = BackwardCpuSchedule { isa: CpuIsa::Generic, block_q: 64, block_kv: 64 };
        let arch = Arch::Cpu(CpuIsa::Generic);
        let kernel = Kernel { problem, schedule: Schedule::BackwardCpu(schedule), arch };
        let compiler = device.compiler().unwrap();
        let artifact = compile::compile_with(&*compiler, &kernel, &TemplateSet::overlaid(changed).unwrap());
        device.load(&artifact.unwrap()).unwrap()
    }

    #[test]
    fn wrong_gradients_are_caught_at_the_sizes_of_a_job() {
        let device = open(DeviceSpec::Cpu).unwrap();
        for (dtype, mask, residual, dropout) in
            [(DType::F32, Mask::Causal, false, true), (DType::Bf16, Mask::Full, true, false)]
        {
            let problem = Problem::forward(dtype, 32, mask.kind()).unwrap().backward();
            let problem = problem.with_residual(residual).with_dropout(dropout);
            let shape = Shape { batch: 3, heads: 4, kv_heads: 2, q_len: 150, kv_len: 200, mask };
            let job = Inputs { problem, shape, pages: PageClass::Dense, seed: 7, launches: Launches::Eager };
            let mut bench = BackwardBench::new(&device, &job).unwrap();
            let right = module(&*device, problem, "#define PANEL", "#define PANEL");
            bench.probe(&*right).unwrap();
            bench.check(1, &*right).unwrap();
            bench.confirm(1, &*right).unwrap();
            for (from, to, word) in [
                ("g < group; g++", "g < group - 1; g++", "dk"),
                ("if (head->dlse) sum -= head->dlse[at];", "sum *= 0.5f;", "dq"),
                (
                    "element *dq = (element *)args->dq",
                    "if (query > 0) return;\n    element *dq = (element *)args->dq",
                    "dq",
                ),
                ("narrow_row(to + i * stride, row, dim)", "narrow_row(to + i * stride, row, dim + 8)", "written"),
                (
                    "to[i * width + d] = 0;",
                    "to[i * width + d] = 0;\n    if (n) ((uint16_t *)from)[0] += 1;",
                    "was written|different bytes",
                ),
            ] {
                let wrong = module(&*device, problem, from, to);
                let said = bench.probe(&*wrong).and_then(|()| bench.check(2, &*wrong).map(|_| ())).unwrap_err();
                let seen = word.split('|').any(|word| said.contains(word));
                assert!(said.contains("wrong answer") && seen, "{to}: {said}");
                // What one has written is not the next one's matter.
                bench = BackwardBench::new(&device, &job).unwrap();
            }
            let restless = module(
                &*device,
                problem,
                "if (n < all)",
                "static float more;\n    to[0] *= 1.0f + (more += 1e-3f);\n    if (n < all)",
            );
            let said = bench.check(3, &*restless).unwrap_err();
            assert!(said.contains("different bytes") || said.contains("wrong answer"), "{said}");
            bench.check(4, &*right).unwrap();
            assert!(bench.time(4, &*right).unwrap() > 0.0);
        }
    }
}

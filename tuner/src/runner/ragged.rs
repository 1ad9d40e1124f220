//! A ragged batch of a job's class on the device: sequences of different lengths with the job's sizes as means,
//! shuffled pages, NaN wherever there is no key.
//!
//! A class is never of one skew, so the lengths are drawn, by a fixed seed: from half to one and a half of the mean.
//! Small batches that every kernel must compute first are of all layouts, since a kernel serves any.

use super::Inputs;
use super::bench::{Measure, roundings, same_rows, wrong_row};
use super::launches::{Launcher, confirm};
use super::probe::GridPart;
use crate::space::input_seed;
use flashtune_codegen::abi::RaggedArgs;
use flashtune_codegen::{Mask, PageClass, Shape};
use flashtune_runtime::check::{
    Index, LengthsBy, LseForm, Most, Queries, RaggedBatch, RaggedOutputs, ScaleForm, StoreLayout,
};
use flashtune_runtime::{Device, Distribution, Error as RuntimeError, Module, RaggedCase};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rayon::prelude::*;
use std::sync::Arc;

/// How large the small batches may be, and how many there are beside the one like the job's.
const SMALL: Most = Most { sequences: 4, rows: 150, keys: 700, heads: 16 };
const OTHERS: usize = 4;
/// Random batches that are looked at for those whose rows are whole vectors of 16 bytes.
const TRIES: u64 = 40;
/// Keys of the sequences of the batch like the job's: more than a block of every schedule, few, one, and none.
const KEYS: [u32; 5] = [333, 151, 1, 64, 0];

/// The batch that is timed, on the device, with what is expected of some rows.
pub(super) struct RaggedBench {
    /// Before the buffers that its graphs were captured with.
    launcher: Launcher,
    case: RaggedCase,
    /// A part of it, and the rows of O that are its own.
    part: GridPart,
    part_rows: usize,
    /// Elements of a row of O.
    dim: usize,
    /// O of the first candidate that passed.
    trusted: Option<Vec<u8>>,
}

impl RaggedBench {
    /// Makes and uploads the inputs.
    ///
    /// # Errors
    /// Those of the device, for want of memory for instance.
    pub(crate) fn new(device: &Arc<dyn Device>, job: &Inputs) -> Result<Self, RuntimeError> {
        let batch = full_batch(job);
        let case = RaggedCase::new(device.clone(), &job.problem, &batch)?;
        let part = GridPart::of_heads(case.data().shape());
        let part_rows = batch.lengths[..part.shape.batch as usize].iter().map(|[rows, _]| *rows as usize).sum();
        Ok(Self {
            launcher: Launcher::new(device, job.launches),
            case,
            part,
            part_rows,
            dim: job.problem.head_dim_v as usize,
            trusted: None,
        })
    }

    /// What a launch wrote, which must be nothing but O.
    fn run(&self, mut launch: impl FnMut() -> Result<(), RuntimeError>) -> Result<RaggedOutputs, String> {
        let written = self.case.run(&mut launch).map_err(|e| e.to_string())?;
        match &written.stray {
            None => Ok(written),
            Some(stray) => Err(self.wrong(stray)),
        }
    }

    /// A launch, as it is timed, that must give the bytes of the first.
    fn launch_again(&self, first: &RaggedOutputs, id: u32, module: &dyn Module) -> Result<(), String> {
        match self.run(|| self.launch_as_timed(id, module))? == *first {
            true => Ok(()),
            false => Err(self.wrong("two launches gave different bytes")),
        }
    }

    fn capture(&self, id: u32, module: &dyn Module) -> Result<(), String> {
        self.launcher.capture(id, &|| self.case.launch(module)).map_err(|e| e.to_string())
    }

    fn launch_as_timed(&self, id: u32, module: &dyn Module) -> Result<(), RuntimeError> {
        self.launcher.launch_as_timed(id, &|| self.case.launch(module))
    }

    /// [`Measure::check`], which may leave inputs changed that it finds to be.
    fn check_written(&mut self, id: u32, module: &dyn Module) -> Result<f64, String> {
        let first = self.run(|| self.case.launch(module))?;
        self.capture(id, module)?;
        self.launch_again(&first, id, module)?;
        if let Some(changed) = self.case.changed_input().map_err(|e| e.to_string())? {
            return Err(self.wrong(changed));
        }
        let (verdict, besides) = self.case.compare(&first);
        if let Some(besides) = besides {
            return Err(self.wrong(besides));
        }
        if !verdict.passed() {
            return Err(self.wrong(verdict));
        }
        let (dtype, o) = (module.kernel().problem.dtype, first.o());
        same_rows(dtype, roundings(dtype), self.dim, self.trusted.as_deref().unwrap_or(o), o)
            .map_err(|why| self.wrong(why))?;
        self.trusted.get_or_insert_with(|| o.to_vec());
        Ok(verdict.max_error)
    }

    fn wrong(&self, why: impl std::fmt::Display) -> String {
        format!("wrong answer for {}: {why}", self.case.data().shape())
    }
}

impl Measure for RaggedBench {
    fn probe(&mut self, module: &dyn Module) -> Result<(), String> {
        let Shape { batch, heads, kv_heads, .. } = self.part.shape;
        let (batch, heads, kv_heads) = (batch as i32, heads as i32, kv_heads as i32);
        let args = RaggedArgs { batch, heads, kv_heads, ..*self.case.args() };
        // SAFETY: the first sequences and heads of the buffers that the case owns; `run` waits for the launch.
        let written = self.run(|| unsafe {
            self.launcher.device.launch_shape(module, &self.part.shape, &args, self.launcher.stream)
        })?;
        // Rows of O lie by row, then by head.
        let problem = module.kernel().problem;
        let all_heads = self.case.data().shape().heads as usize;
        let strays = written.o().par_chunks(self.dim * problem.dtype.bytes()).enumerate().find_map_first(|(i, row)| {
            let (at, head) = (i / all_heads, i % all_heads);
            let why = wrong_row(problem.dtype, row, at < self.part_rows && head < heads as usize)?;
            Some(format!("wrong answer for {}: row {at} of head {head} {why}", self.part.shape))
        });
        strays.map_or(Ok(()), Err)
    }

    fn check(&mut self, id: u32, module: &dyn Module) -> Result<f64, String> {
        let checked = self.check_written(id, module);
        if checked.is_err() {
            // Whoever comes next is measured on the inputs too.
            self.case.restore().map_err(|e| e.to_string())?;
        }
        checked
    }

    fn confirm(&mut self, id: u32, module: &dyn Module) -> Result<(), String> {
        self.capture(id, module)?;
        let first = self.run(|| self.launch_as_timed(id, module))?;
        confirm(|| self.launch_again(&first, id, module))
    }

    fn time(&mut self, id: u32, module: &dyn Module) -> Result<f64, String> {
        // Whoever is timed has been checked: what all others were measured by is not needed any more.
        self.trusted = None;
        self.launcher.time_us(id, &|| self.case.launch(module)).map_err(|e| e.to_string())
    }

    /// There is none over pages.
    fn unfused_us(&self, _: f64) -> Option<f64> {
        None
    }
}

/// The batch that is timed.
fn full_batch(job: &Inputs) -> RaggedBatch {
    let seed = input_seed(job.seed);
    let Shape { heads, kv_heads, mask, .. } = job.shape;
    let (index, page_tokens, lengths_by) = match job.pages {
        PageClass::Tokens(tokens) => (Index::Table, tokens, LengthsBy::Array),
        PageClass::Dense | PageClass::Whole => (Index::Packed, 1, LengthsBy::Index),
    };
    RaggedBatch {
        heads,
        kv_heads,
        mask,
        lengths: lengths(&job.shape, seed),
        queries: Queries::Packed,
        head_major: false,
        index,
        page_tokens,
        // Heads of a token side by side, as most hosts have them; V by columns has its own order.
        layout: if columns(job) { StoreLayout::Hnd } else { StoreLayout::Nhd },
        apart: false,
        shuffled: true,
        own_v_table: false,
        holes: false,
        lengths_by,
        left_pad: false,
        wide: [false; 2],
        scales: ScaleForm::Head,
        lse: None,
        spare: false,
        nan: false,
        values: Distribution::Normal,
        scale: None,
        seed,
    }
}

fn columns(job: &Inputs) -> bool {
    job.problem.kv.store().is_some_and(|store| store.v_columns)
}

/// Rows and keys of the sequences, whose means are the shape's. Prompts have as many rows as keys; where there are
/// fewer rows every sequence has as many, and keys for all of them.
fn lengths(shape: &Shape, seed: u64) -> Vec<[u32; 2]> {
    let Shape { batch, q_len, kv_len, .. } = *shape;
    if batch == 1 {
        return vec![[q_len, kv_len]];
    }
    let rng = &mut StdRng::seed_from_u64(seed ^ 0x1e57);
    let shares: Vec<f64> = (0..batch).map(|_| rng.random_range(0.5..1.5)).collect();
    let total = f64::from(kv_len) * f64::from(batch) / shares.iter().sum::<f64>();
    let length = |share: f64| {
        let keys = ((share * total).round() as u32).max(1);
        match q_len < kv_len {
            true => [q_len, keys.max(q_len)],
            false => [(f64::from(keys) * f64::from(q_len) / f64::from(kv_len)).round().max(1.0) as u32, keys],
        }
    };
    shares.into_iter().map(length).collect()
}

/// Small batches: one like the job's, with sequences of few keys and of none, and random ones of any layout that
/// kernels with whole vectors can take.
pub(super) fn small_cases(device: &Arc<dyn Device>, job: &Inputs) -> Result<Vec<RaggedCase>, RuntimeError> {
    let seed = input_seed(job.seed);
    let group = job.shape.group().min(8);
    let kv_heads = if group > 2 { 1 } else { 2 };
    let mask = match job.shape.mask {
        Mask::Window { left, right } => Mask::Window { left: left.map(|l| l.min(61)), right: right.map(|r| r.min(13)) },
        mask => mask,
    };
    let rows = job.shape.q_len.min(70);
    let like = RaggedBatch {
        heads: group * kv_heads,
        kv_heads,
        mask,
        lengths: KEYS.map(|keys| [rows, keys]).to_vec(),
        lse: Some(LseForm { base_2: false, empty: f32::NEG_INFINITY, by_rows: false }),
        values: Distribution::NormalWithOutliers,
        spare: true,
        nan: true,
        ..full_batch(job)
    };
    let mut cases = vec![RaggedCase::new(device.clone(), &job.problem, &like)?];
    for nth in 0..TRIES {
        if cases.len() > OTHERS {
            break;
        }
        let batch = RaggedBatch::random(&job.problem, SMALL, seed.wrapping_add(nth));
        let case = RaggedCase::new(device.clone(), &job.problem, &batch)?;
        if case.data().is_aligned() {
            cases.push(case);
        }
    }
    Ok(cases)
}

/// The most work that a small batch has: multiply-adds of one column of K and V.
pub(super) fn most_flops() -> f64 {
    let Most { sequences, rows, keys, heads } = SMALL;
    Shape { batch: sequences, heads, kv_heads: 1, q_len: rows, kv_len: keys, mask: Mask::Full }.forward_flops(1, 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashtune_cache::Launches;
    use flashtune_cache::{Artifact, Recipe};
    use flashtune_codegen::abi::{ABI_VERSION, ArgsLayout, declaration};
    use flashtune_codegen::{
        Arch, CpuIsa, DType, Kernel, KvKind, Language, NaiveRaggedSchedule, Problem, Schedule, Source,
    };
    use flashtune_runtime::{DeviceSpec, compiler_for, open};

    /// A correct kernel for f32 and head dim 16 over a store of the same.
    const KERNEL: &str = include_str!("../../testdata/ragged.c");

    fn job(q_len: u32, kv_len: u32, batch: u32, pages: PageClass) -> Inputs {
        let mask = Mask::Causal;
        let problem = Problem::forward(DType::Bf16, 64, mask.kind()).unwrap().with_kv(KvKind::RAGGED);
        let shape = Shape { batch, heads: 8, kv_heads: 2, q_len, kv_len, mask };
        Inputs { problem, shape, pages, seed: 7, launches: Launches::Eager }
    }

    #[test]
    fn lengths_differ_around_the_mean_and_are_the_same_every_time() {
        for (q_len, kv_len) in [(1, 1000), (128, 2000), (600, 600)] {
            let shape = job(q_len, kv_len, 40, PageClass::Whole).shape;
            let drawn = lengths(&shape, 3);
            assert_eq!(drawn, lengths(&shape, 3));
            assert_ne!(drawn, lengths(&shape, 4));
            let keys: Vec<u32> = drawn.iter().map(|[_, keys]| *keys).collect();
            let mean = f64::from(keys.iter().sum::<u32>()) / 40.0;
            assert!((mean / f64::from(kv_len) - 1.0).abs() < 0.01, "{mean}");
            assert!(keys.iter().max() < Some(&(2 * kv_len)) && keys.iter().min() > Some(&(kv_len / 3)));
            assert!(drawn.iter().all(|[rows, keys]| rows <= keys && (*rows == q_len || q_len == kv_len)));
        }
        assert_eq!(lengths(&job(1, 999, 1, PageClass::Whole).shape, 3), [[1, 999]]);
    }

    #[test]
    fn the_timed_batch_is_of_the_class_that_it_is_filed_under() {
        for pages in [PageClass::Whole, PageClass::Tokens(1), PageClass::Tokens(64)] {
            let job = job(1, 300, 4, pages);
            let batch = full_batch(&job);
            assert_eq!(batch.index == Index::Table, pages.tokens().is_some());
            assert!(
                batch.shuffled
                    && !batch.holes
                    && (pages.tokens().is_none() || pages.tokens() == Some(batch.page_tokens))
            );
        }
    }

    /// A kernel of this text.
    fn module(device: &dyn Device, text: &str) -> Arc<dyn Module> {
        let options = ["-O1", "-shared", "-fPIC", "-lm"].map(str::to_owned).to_vec();
        let arch = Arch::Cpu(CpuIsa::Generic);
        let source = Source {
            name: "ragged".into(),
            entry: "ft_tile".into(),
            language: Language::C,
            options: options.clone(),
            text: format!("#include <stdint.h>\n{}\n{text}", declaration::<RaggedArgs>(Language::C)),
        };
        let compiler = compiler_for(arch).unwrap();
        let (bytes, facts) = compiler.compile(&source).unwrap();
        // Of the right arguments and plan; what is launched is the text.
        let schedule = Schedule::NaiveRagged(NaiveRaggedSchedule { block_q: 16, block_kv: 32, threads: 256 });
        let problem = faulty_job().problem;
        let recipe = Recipe {
            kernel: Kernel { problem, schedule, arch },
            templates: "test".into(),
            options,
            compiler: compiler.id().clone(),
            abi: ABI_VERSION,
        };
        let args = ArgsLayout::of(&recipe.kernel);
        device.load(&Artifact { recipe, args, entry: source.entry, facts, bytes }).unwrap()
    }

    fn faulty_job() -> Inputs {
        let job = job(3, 90, 20, PageClass::Tokens(16));
        let problem = Problem::forward(DType::F32, 16, job.problem.mask).unwrap().with_kv(KvKind::RAGGED);
        Inputs { problem, ..job }
    }

    #[test]
    fn faulty_kernels_of_ragged_batches_are_caught_and_a_right_one_is_timed() {
        let device = open(DeviceSpec::Cpu).unwrap();
        let job = faulty_job();
        let cases = super::super::cases::Cases::new(&device, &job).unwrap();
        let mut bench = RaggedBench::new(&device, &job).unwrap();
        let mut verdict = |text: &str| {
            let module = module(&*device, text);
            let small = cases.check(&*module).map(|_| ());
            let full = bench.probe(&*module).and_then(|()| bench.check(1, &*module)).map(|_| ());
            [small, full, bench.confirm(1, &*module)].map(|r| r.err().unwrap_or_default())
        };
        assert_eq!(verdict(KERNEL), [const { String::new() }; 3]);
        let faults = [
            // A key too few, a row too many, an input that is written, and rows that nobody writes.
            ("j < kv_len; j++", "j < kv_len - (kv_len > 70); j++", [true, true]),
            ("/* after */", "o[16] = 1;", [true, true]),
            ("/* after */", "((float *)q)[0] += 1;", [true, true]),
            ("if (i >= q_len) return;", "if (i >= q_len || h == a->heads - 1) return;", [true, true]),
            // Wrong in large batches only.
            ("float *p = scratch;", "float *p = scratch; if (b == 17) q += 16;", [false, true]),
        ];
        for (right, wrong, caught) in faults {
            assert!(KERNEL.contains(right), "{right}");
            let [small, full, _] = verdict(&KERNEL.replace(right, wrong));
            assert_eq!([!small.is_empty(), !full.is_empty()], caught, "{wrong}: {small}; {full}");
        }
        // Other bytes in every launch.
        let counter = "static unsigned launches; float *p = scratch; if (tile == 0) launches++;";
        let restless = KERNEL
            .replace("float *p = scratch;", counter)
            .replace("acc[d] / sum;", "acc[d] / sum * (1 + (launches % 2) * 1.2e-7f);");
        let [small, full, confirmed] = verdict(&restless);
        assert!(
            [&small, &full, &confirmed].iter().all(|why| why.contains("different bytes")),
            "{small} {full} {confirmed}"
        );

        let right = module(&*device, KERNEL);
        bench.check(2, &*right).unwrap();
        assert!(bench.time(2, &*right).unwrap() > 0.0);
    }
}

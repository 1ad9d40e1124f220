//! The steps of a schedule on the device: append and attention of every layer, timed together.

use super::super::cache::{Cache, Inputs, Model};
use super::scheduler::{Kind, Scheduler, Step};
use anyhow::Result;
use flashtune::ragged::{Added, Bounds, Expected, Index, Ints, KeyLengths, Output, Queries, QueryRows, RaggedBatch};
use flashtune::{Dispatch, Engine, Launches, Ragged, Stream};
use flashtune_runtime::{Buffer, Device, Verdict};
use std::collections::{BTreeMap, BTreeSet};

/// Sequences of a step whose rows are compared with fp64.
const CHECKED: usize = 3;

/// A step that ran.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ran {
    pub kind: Kind,
    pub rows: u32,
    pub us: f64,
}

/// Rows that were compared with fp64.
pub(crate) struct Checked {
    pub what: String,
    pub rows: u32,
    pub keys: u32,
    pub verdict: Verdict,
}

/// What came of all steps.
pub(crate) struct Day {
    pub steps: Vec<Ran>,
    pub checks: Vec<Checked>,
    /// Hash of everything that steps were made of.
    pub schedule: String,
    /// Tokens that were generated.
    pub generated: u64,
    /// Launches by kernel.
    pub kernels: BTreeMap<String, u64>,
}

/// What one layer's calls read beside K, V and Q: lengths, tables and slots, in one buffer.
struct Metadata {
    buffer: Box<dyn Buffer>,
    bytes: Vec<u8>,
    /// Entries of a row of the table: the pages of the longest request, as a host has it.
    width: usize,
}

/// The addresses in it.
struct Addresses {
    slots: Ints,
    begin: Ints,
    keys: Ints,
    table: Ints,
    width: u64,
}

impl Metadata {
    /// For steps of at most so many rows and sequences, and pages of a sequence.
    fn new(device: &dyn Device, rows: u32, sequences: u32, pages: u32) -> Result<Self> {
        let width = pages as usize;
        let words = 2 * u64::from(rows) + 2 * u64::from(sequences) + 1 + u64::from(sequences) * u64::from(pages);
        Ok(Self { buffer: device.alloc(4 * words as usize)?, bytes: Vec::new(), width })
    }

    fn ints(&mut self, numbers: impl Iterator<Item = u32>) -> Ints {
        let at = self.buffer.address() + self.bytes.len() as u64;
        self.bytes.extend(numbers.flat_map(|n| (n as i32).to_ne_bytes()));
        Ints::i32(at)
    }

    /// Puts a step's numbers on the device.
    fn take(&mut self, device: &dyn Device, step: &Step, page_tokens: u32) -> Result<Addresses> {
        self.bytes.clear();
        let tokens = u64::from(page_tokens);
        let slots = step.parts.iter().flat_map(|p| {
            let slot =
                move |at: u32| u64::from(p.pages[(at / page_tokens) as usize]) * tokens + u64::from(at % page_tokens);
            (p.before..p.keys()).map(slot)
        });
        let address = self.buffer.address();
        self.bytes.extend(slots.flat_map(|slot| (slot as i64).to_ne_bytes()));
        let mut end = 0;
        let begin = self.ints(std::iter::once(0).chain(step.parts.iter().map(|p| {
            end += p.rows;
            end
        })));
        let keys = self.ints(step.parts.iter().map(|p| p.keys()));
        let width = self.width;
        // What is behind a sequence's pages is never read.
        let row =
            |pages: &[u32]| pages.iter().copied().chain(std::iter::repeat(u32::MAX)).take(width).collect::<Vec<_>>();
        let table = self.ints(step.parts.iter().flat_map(|p| row(&p.pages)));
        device.upload(&*self.buffer, &self.bytes)?;
        Ok(Addresses { slots: Ints::i64(address), begin, keys, table, width: width as u64 })
    }
}

/// Everything that runs a schedule.
pub(crate) struct Server<'a> {
    engine: &'a Engine,
    inputs: Inputs,
    cache: Cache,
    layers: u32,
    /// Keys of the longest request.
    longest: u32,
    metadata: Metadata,
}

impl<'a> Server<'a> {
    /// Memory for a cache of `layers` layers, and for steps of at most `rows` rows and `sequences` sequences of up to
    /// `longest` keys.
    pub(crate) fn new(
        engine: &'a Engine,
        model: Model,
        [layers, pages, page_tokens]: [u32; 3],
        [rows, sequences, longest]: [u32; 3],
        seed: u64,
    ) -> Result<Self> {
        let device = &**engine.device();
        let inputs = Inputs::new(device, model, rows, rows, seed)?;
        let cache = Cache::new(device, &model, layers, pages, page_tokens)?;
        let metadata = Metadata::new(device, rows, sequences, longest.div_ceil(page_tokens))?;
        Ok(Self { engine, inputs, cache, layers, longest, metadata })
    }

    /// Runs all steps; `told` is called after each.
    pub(crate) fn run(&mut self, scheduler: &mut Scheduler, told: &mut dyn FnMut(&Ran)) -> Result<Day> {
        let mut hash = blake3::Hasher::new();
        let mut day = Day {
            steps: Vec::new(),
            checks: Vec::new(),
            schedule: String::new(),
            generated: 0,
            kernels: BTreeMap::new(),
        };
        // Which row of the inputs each key of a request was.
        let mut sources: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        let mut kinds = BTreeSet::new();
        let mut next = scheduler.next_step();
        while let Some(step) = next {
            let mut row = 0;
            for part in &step.parts {
                sources.entry(part.request).or_default().extend(row..row + part.rows);
                row += part.rows;
                for n in [part.request, part.before, part.rows].iter().chain(&part.pages) {
                    hash.update(&n.to_le_bytes());
                }
            }
            let us = self.step(&step, &mut day.kernels)?;
            day.steps.push(Ran { kind: step.kind, rows: step.rows(), us });
            told(day.steps.last().expect("just pushed"));
            day.generated += step.parts.iter().filter(|p| scheduler.gives_a_token(p)).count() as u64;
            next = scheduler.next_step();
            if kinds.insert(step.kind) || next.is_none() {
                self.check(&step, day.steps.len(), &sources, &mut day.checks)?;
            }
            for part in &step.parts {
                if scheduler.is_last_of(part) {
                    sources.remove(&part.request);
                }
            }
        }
        day.schedule = hash.finalize().to_hex()[..16].to_owned();
        Ok(day)
    }

    /// One step of all layers, in microseconds.
    fn step(&mut self, step: &Step, kernels: &mut BTreeMap<String, u64>) -> Result<f64> {
        let device = self.engine.device().clone();
        let stream = device.stream();
        let at = self.metadata.take(&*device, step, self.cache.page_tokens)?;
        // So that a row that nobody writes is seen.
        device.fill(self.inputs.o(), 0xff)?;
        let calls: Vec<_> = (0..self.layers as usize)
            .map(|layer| {
                (self.cache.append(&self.inputs, layer, step.rows(), at.slots.address), self.call(step, layer, &at))
            })
            .collect();
        for (append, call) in &calls {
            // What is compiled is compiled before.
            let of = [self.engine.prepare_append(append)?, self.engine.prepare_ragged(call)?];
            for Dispatch { plan, .. } in of.into_iter().flatten() {
                let kernel = plan.kernel();
                *kernels.entry(format!("{} {}", kernel.schedule.family(), kernel.schedule)).or_default() += 1;
            }
        }
        device.synchronize(stream)?;
        let launch = &mut || self.launch(&calls, stream);
        match self.engine.launches() {
            Launches::Eager => Ok(device.time_us(stream, launch)?),
            Launches::Graph => {
                let graph = device.capture(stream, launch)?;
                // SAFETY: what was captured is alive: buffers of this server, and modules of the engine.
                Ok(device.time_us(stream, &mut || unsafe { graph.replay(stream) })?)
            }
        }
    }

    fn launch(
        &self,
        calls: &[(flashtune::append::Append, Ragged<'_>)],
        stream: Stream,
    ) -> flashtune_runtime::Result<()> {
        for (append, call) in calls {
            // SAFETY: every address is that of a buffer of this server, as large as the limits of steps; tables name
            // pages of the cache, and no two rows have one slot.
            let done =
                unsafe { self.engine.append(append, stream).and_then(|_| self.engine.forward_ragged(call, stream)) };
            done.map_err(|e| match e {
                flashtune::Error::Runtime(e) => e,
                e => unreachable!("a call of the engine fails in the runtime: {e}"),
            })?;
        }
        Ok(())
    }

    fn call(&self, step: &Step, layer: usize, at: &Addresses) -> Ragged<'static> {
        let model = self.inputs.model();
        let strides = self.inputs.q_strides(0);
        let keys = step.parts.iter().map(|p| u64::from(p.keys()));
        let batch = RaggedBatch {
            queries: Queries {
                address: self.inputs.q_address(),
                dtype: model.dtype,
                heads: model.heads.into(),
                head_dim: model.head_dim.into(),
                strides,
                rows: QueryRows::Packed { begin: at.begin },
                used: None,
                tree: None,
            },
            store: self.cache.store(&self.inputs, layer),
            index: Index::Table { k: at.table, v: None, stride: at.width as i64, capacity: at.width },
            keys: KeyLengths::Each { lengths: at.keys, added: Added::Nothing },
            left_pad: None,
            output: Output { address: self.inputs.o().address(), dtype: model.output, strides, lse: None },
            bounds: Bounds {
                batch: step.parts.len() as u64,
                total_q: step.rows().into(),
                max_q: step.parts.iter().map(|p| p.rows).max().unwrap_or(0).into(),
                max_kv: self.longest.into(),
            },
            expected: Expected { total_keys: keys.clone().sum(), longest: keys.max().unwrap_or(0) },
        };
        Ragged { mask: model.mask, ..Ragged::new(batch) }
    }

    /// Some sequences of a step, as the last layer left them.
    fn check(
        &self,
        step: &Step,
        number: usize,
        sources: &BTreeMap<u32, Vec<u32>>,
        checks: &mut Vec<Checked>,
    ) -> Result<()> {
        let device = self.engine.device();
        let o = self.inputs.output(&**device, device.stream())?;
        let longest = (0..step.parts.len()).max_by_key(|i| step.parts[*i].keys()).unwrap_or(0);
        let chosen: BTreeSet<usize> = [0, longest, step.parts.len() - 1].into_iter().take(CHECKED).collect();
        for i in chosen {
            let part = &step.parts[i];
            let first: u32 = step.parts[..i].iter().map(|p| p.rows).sum();
            let head = (number as u32 + i as u32) % self.inputs.model().kv_heads;
            let verdict = self.inputs.check(&o, [first, part.rows], &sources[&part.request], head);
            let what = format!("step {number} ({}), request {}, KV head {head}", step.kind.name(), part.request);
            checks.push(Checked { what, rows: part.rows, keys: part.keys(), verdict });
        }
        Ok(())
    }
}

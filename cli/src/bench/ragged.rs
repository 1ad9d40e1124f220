//! `flashtune bench --kv-lens`: ragged batches over a paged KV cache, one launch of many over caches that no cache of
//! the device holds.

use super::super::cases::{Case, CaseArgs, default_case};
use super::super::context::Context;
use super::super::exit::usage;
use super::super::lists::Sizes;
use super::super::progress;
use super::super::table::table;
use super::cache::{Cache, Inputs, Model, model_of};
use super::header;
use super::measure::{CHOSEN, latency};
use super::named::named;
use super::trace::CacheArgs;
use anyhow::Result;
use flashtune::ragged::{Added, Bounds, Expected, Index, Ints, KeyLengths, Output, Queries, QueryRows, RaggedBatch};
use flashtune::{Engine, Launches, Mask, Ragged, Shape};
use flashtune_report::{self as report, Check, Measured, Point, Report};
use flashtune_runtime::{Buffer, Graph, Module, Stream, ragged_call};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use std::fmt;
use std::io::Write;
use std::str::FromStr;

/// Bytes of the caches that launches take in turn: more than any last-level cache holds.
const COLD_BYTES: u64 = 512 << 20;
/// Rows of K and V that caches are filled with, round and round: a prime, so that no two pages hold the same.
const KV_ROWS: u64 = 4093;
/// Rounds that warm up before times are kept.
const WARM_UP: usize = 2;

/// Options that say the same of dense tensors, or what a launch of them is.
const NOT_BESIDE: [&str; 7] = ["trace", "lengths", "kv_len", "batch", "tokens", "width", "graph"];

/// Options of ragged batches.
#[derive(clap::Args, Debug)]
pub(crate) struct BatchArgs {
    /// Time a ragged batch over a paged KV cache: the keys of its sequences, e.g. 64x4k for 64 sequences of 4096, or
    /// 16k,32k,60x512. May be repeated for other batches. Beside it --q-len is the rows of each sequence, 1 when absent
    #[arg(long, value_name = "LIST", conflicts_with_all = NOT_BESIDE)]
    pub kv_lens: Vec<Batch>,
    /// Promise no more than this of the lengths, as a host does that knows its model alone; kernels are told the
    /// longest, and chosen by all, when absent
    #[arg(long, value_name = "N", requires = "kv_lens")]
    kv_bound: Option<Sizes>,
}

/// The keys of the sequences of a batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Batch {
    text: String,
    lengths: Vec<u32>,
}

impl FromStr for Batch {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        let bad =
            |item: &str| format!("`{item}` is no length; write a number such as 512 or 16k, or 64x4k for 64 of them");
        let mut lengths = Vec::new();
        for item in s.split(',') {
            let (count, length) = item.split_once('x').unwrap_or(("1", item));
            let one = |text: &str| text.parse::<Sizes>().ok().filter(|s| s.0.len() == 1).map(|s| s.0[0]);
            let (count, length) = one(count).zip(one(length)).ok_or_else(|| bad(item))?;
            if count == 0 || length == 0 || lengths.len() + count as usize > 1 << 16 {
                return Err(format!("`{item}` is out of range: lengths are at least 1, and sequences 1 to 65536"));
            }
            lengths.extend(std::iter::repeat_n(length, count as usize));
        }
        Ok(Self { text: s.to_owned(), lengths })
    }
}

impl fmt::Display for Batch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// Times every batch, and puts it into a report.
pub(crate) fn run(
    cx: &mut Context,
    args: &BatchArgs,
    schedules: &[String],
    cache: &CacheArgs,
    cases: &CaseArgs,
    rounds: usize,
    with_ceilings: bool,
) -> Result<Report> {
    cache.check()?;
    let mut cases = cases.clone();
    if cases.q_len.is_empty() {
        cases.q_len = vec![Sizes(vec![1])];
    }
    let case = cases.single(&default_case())?;
    let (model, q_len) = (model_of(&case, cache.kv_dtype)?, case.shape.q_len);
    if q_len == 0 {
        return Err(usage("--q-len is 0, but there is nothing to time without a row"));
    }
    let bound = match args.kv_bound.as_ref().map(|s| s.0.as_slice()) {
        None => None,
        Some([n]) => Some(*n),
        Some(_) => return Err(usage("--kv-bound takes one number")),
    };
    for batch in &args.kv_lens {
        let longest = batch.lengths.iter().max().copied().unwrap_or(0);
        if bound.is_some_and(|bound| bound < longest) {
            return Err(usage(format!("--kv-bound is below {longest}, the longest of {batch}; name at least that")));
        }
    }
    let device = cx.device()?;
    let engine = cx.engine_for(device.has_graphs().then_some(Launches::Graph))?;
    let mut report = header::report(&engine);
    report.method[0] = format!(
        "A time is that of one launch of {}, which take caches of {} MiB and more in turn, {}. Single launches, \
         after the caches \
         were flushed, stand beside. Contenders run in turn; medians over the rounds.",
        cache.layers,
        COLD_BYTES >> 20,
        if device.has_graphs() { "in a captured graph" } else { "one after the other" },
    );
    let of: Vec<Case> = if with_ceilings { vec![case] } else { Vec::new() };
    if with_ceilings {
        header::measure_ceilings(&mut report.ceilings, &*device, &of)?;
    }
    let bar = progress::bar(args.kv_lens.len() as u64, cx.hides_progress());
    for batch in &args.kv_lens {
        bar.set_message(batch.to_string());
        let contest = Contest::new(&engine, model, batch, [q_len, cache.page, cache.layers], bound)?;
        let (point, checks) = contest.run(schedules, rounds)?;
        report.points.push(point);
        report.checks.extend(checks);
        bar.inc(1);
    }
    bar.finish_and_clear();
    if with_ceilings {
        header::measure_ceilings(&mut report.ceilings, &*device, &of)?;
    }
    report.derive();
    Ok(report)
}

/// One batch on the device.
struct Contest<'a> {
    engine: &'a Engine,
    batch: &'a Batch,
    model: Model,
    q_len: u32,
    launches: u32,
    inputs: Inputs,
    cache: Cache,
    /// Stores that launches take in turn.
    stores: u32,
    lengths: Box<dyn Buffer>,
    table: Box<dyn Buffer>,
    width: u32,
    bound: Option<u32>,
}

/// A kernel that runs.
struct Runner<'m> {
    name: String,
    module: &'m dyn Module,
    many: Option<Box<dyn Graph>>,
    one: Option<Box<dyn Graph>>,
    times: Vec<f64>,
    alone: Vec<f64>,
}

impl<'a> Contest<'a> {
    fn new(
        engine: &'a Engine,
        model: Model,
        batch: &'a Batch,
        [q_len, page, launches]: [u32; 3],
        bound: Option<u32>,
    ) -> Result<Self> {
        let device = &**engine.device();
        let pages_of: Vec<u32> = batch.lengths.iter().map(|n| n.div_ceil(page)).collect();
        let all: u64 = pages_of.iter().map(|n| u64::from(*n)).sum();
        let bytes = all * u64::from(page) * model.token_bytes();
        let stores = COLD_BYTES.div_ceil(bytes).clamp(2.min(launches.into()), launches.into()) as u32;
        let memory = device.fingerprint().memory_bytes;
        let fits = memory == 0 || bytes * u64::from(stores) < memory;
        let pages = u32::try_from(all).ok().filter(|_| fits).ok_or_else(|| {
            let gib = |bytes: u64| bytes as f64 / (1u64 << 30) as f64;
            usage(format!(
                "{stores} caches of {batch} take {:.1} GiB, the device has {:.1} GiB; name fewer or shorter sequences",
                gib(bytes * u64::from(stores)),
                gib(memory)
            ))
        })?;
        let tokens: u64 = batch.lengths.iter().map(|n| u64::from(*n)).sum();
        let rows = batch.lengths.len() as u32 * q_len;
        let inputs = Inputs::new(device, model, rows, tokens.min(KV_ROWS) as u32, 1)?;
        let cache = Cache::new(device, &model, stores, pages, page)?;
        // Pages in no order.
        let mut order: Vec<u32> = (0..pages).collect();
        order.shuffle(&mut StdRng::seed_from_u64(1));
        let longest = batch.lengths.iter().max().copied().unwrap_or(0);
        let width = bound.unwrap_or(longest).div_ceil(page);
        let (mut table, mut slots, mut rest) = (Vec::new(), Vec::new(), order.as_slice());
        for (length, pages) in batch.lengths.iter().zip(&pages_of) {
            let (own, later) = rest.split_at(*pages as usize);
            rest = later;
            // What is behind a length is never read.
            table.extend(own.iter().map(|id| *id as i32).chain(std::iter::repeat(-1)).take(width as usize));
            let slot = |t: u32| i64::from(own[(t / page) as usize]) * i64::from(page) + i64::from(t % page);
            slots.extend((0..*length).map(slot));
        }
        for store in 0..stores as usize {
            cache.fill(engine, &inputs, store, &slots, device.stream())?;
        }
        let ints = |all: &[i32]| {
            let bytes: Vec<u8> = all.iter().flat_map(|n| n.to_ne_bytes()).collect();
            let buffer = device.alloc(bytes.len())?;
            device.upload(&*buffer, &bytes)?;
            Ok::<_, flashtune_runtime::Error>(buffer)
        };
        let lengths = ints(&batch.lengths.iter().map(|n| *n as i32).collect::<Vec<_>>())?;
        let table = ints(&table)?;
        Ok(Self { engine, batch, model, q_len, launches, inputs, cache, stores, lengths, table, width, bound })
    }

    fn longest(&self) -> u32 {
        self.batch.lengths.iter().max().copied().unwrap_or(0)
    }

    fn call(&self, launch: u32) -> Ragged<'static> {
        let model = &self.model;
        let strides = self.inputs.q_strides(self.q_len);
        let sequences = self.batch.lengths.len() as u64;
        let batch = RaggedBatch {
            queries: Queries {
                address: self.inputs.q_address(),
                dtype: model.dtype,
                heads: model.heads.into(),
                head_dim: model.head_dim.into(),
                strides,
                rows: QueryRows::Uniform,
                used: None,
                tree: None,
            },
            store: self.cache.store(&self.inputs, (launch % self.stores) as usize),
            index: Index::Table {
                k: Ints::i32(self.table.address()),
                v: None,
                stride: self.width.into(),
                capacity: self.width.into(),
            },
            keys: KeyLengths::Each { lengths: Ints::i32(self.lengths.address()), added: Added::Nothing },
            left_pad: None,
            output: Output { address: self.inputs.o().address(), dtype: model.output, strides, lse: None },
            bounds: Bounds {
                batch: sequences,
                total_q: sequences * u64::from(self.q_len),
                max_q: self.q_len.into(),
                max_kv: self.bound.unwrap_or_else(|| self.longest()).into(),
            },
            expected: match self.bound {
                Some(_) => Expected::default(),
                None => Expected {
                    total_keys: self.batch.lengths.iter().map(|n| u64::from(*n)).sum(),
                    longest: self.longest().into(),
                },
            },
        };
        Ragged { mask: model.mask, ..Ragged::new(batch) }
    }

    /// Checks every kernel's answer, then times them in turn.
    fn run(&self, schedules: &[String], rounds: usize) -> Result<(Point, Vec<Check>)> {
        let device = self.engine.device();
        let call = self.call(0);
        let dispatch = self.engine.prepare_ragged(&call)?.ok_or_else(|| usage("there is nothing to time"))?;
        let problem = ragged_call(&call.batch, call.mask, None)?.problem;
        let named = schedules.iter().map(|name| named(self.engine, name, &problem, dispatch.plan.kernel()));
        let named = named.collect::<Result<Vec<_>>>()?;
        let mut runners = vec![self.runner(CHOSEN.to_owned(), dispatch.plan.module(), &dispatch.shape)?];
        for (name, module) in schedules.iter().zip(&named) {
            runners.push(self.runner(name.clone(), &**module, &dispatch.shape)?);
        }
        let mut checks = Vec::new();
        let mut results = Vec::new();
        for runner in std::mem::take(&mut runners) {
            let found = self.check(&runner, &dispatch.shape)?;
            match found.passed {
                true => runners.push(runner),
                false => results.push(Measured {
                    contender: runner.name.clone(),
                    absent: found.note.as_ref().map(|note| format!("wrong answer: {note}")),
                    ..Default::default()
                }),
            }
            checks.push(found);
        }
        let stream = device.stream();
        for round in 0..rounds + WARM_UP {
            for runner in &mut runners {
                device.flush_cache(stream)?;
                let many = self.time(runner, &dispatch.shape, true, stream)? / f64::from(self.launches);
                device.flush_cache(stream)?;
                let alone = self.time(runner, &dispatch.shape, false, stream)?;
                if round >= WARM_UP {
                    runner.times.push(many);
                    runner.alone.push(alone);
                }
            }
        }
        let status = dispatch.plan.status().to_string();
        let measured = runners.into_iter().map(|r| {
            let kernel = r.module.kernel();
            Measured {
                schedule: Some(format!("{} {}", kernel.schedule.family(), kernel.schedule)),
                note: (r.name == CHOSEN).then(|| status.clone()),
                contender: r.name,
                latency_us: Some(latency(r.times)),
                single_us: Some(latency(r.alone)),
                ..Default::default()
            }
        });
        let results = measured.collect::<Vec<_>>().into_iter().chain(results).collect();
        Ok((self.point(results), checks))
    }

    fn runner<'m>(&self, name: String, module: &'m dyn Module, shape: &Shape) -> Result<Runner<'m>> {
        let device = self.engine.device();
        let stream = device.stream();
        // What is loaded or allocated once is so before anything is captured.
        self.launch(module, shape, 0..1, stream)?;
        device.synchronize(stream)?;
        let (mut many, mut one) = (None, None);
        if device.has_graphs() {
            many = Some(device.capture(stream, &mut || self.launch(module, shape, 0..self.launches, stream))?);
            one = Some(device.capture(stream, &mut || self.launch(module, shape, 0..1, stream))?);
        }
        Ok(Runner { name, module, many, one, times: Vec::new(), alone: Vec::new() })
    }

    fn launch(
        &self,
        module: &dyn Module,
        shape: &Shape,
        launches: std::ops::Range<u32>,
        stream: Stream,
    ) -> flashtune_runtime::Result<()> {
        for launch in launches {
            let call = self.call(launch);
            let args = ragged_call(&call.batch, call.mask, None)?.args;
            // SAFETY: all addresses are those of buffers of this contest, of the sizes that the call says; tables name
            // pages of the caches.
            unsafe { self.engine.device().launch_shape(module, shape, &args, stream)? };
        }
        Ok(())
    }

    fn time(&self, runner: &Runner<'_>, shape: &Shape, all: bool, stream: Stream) -> Result<f64> {
        let graph = if all { &runner.many } else { &runner.one };
        let launches = if all { self.launches } else { 1 };
        Ok(self.engine.device().time_us(stream, &mut || match graph {
            // SAFETY: captured on buffers of this contest and a module that lives; replays wait for each other.
            Some(graph) => unsafe { graph.replay(stream) },
            None => self.launch(runner.module, shape, 0..launches, stream),
        })?)
    }

    /// Some rows of some sequences against fp64.
    fn check(&self, runner: &Runner<'_>, shape: &Shape) -> Result<Check> {
        let device = &**self.engine.device();
        let stream = device.stream();
        device.fill(self.inputs.o(), 0xff)?;
        self.launch(runner.module, shape, 0..1, stream)?;
        device.synchronize(stream)?;
        let o = self.inputs.output(device, stream)?;
        let lengths = &self.batch.lengths;
        let longest = (0..lengths.len()).max_by_key(|b| lengths[*b]).unwrap_or(0);
        let mut found: Option<Check> = None;
        for b in [0, longest, lengths.len() - 1] {
            let first: u64 = lengths[..b].iter().map(|n| u64::from(*n)).sum();
            let rows = u64::from(self.inputs.kv_rows());
            let sources: Vec<u32> = (0..u64::from(lengths[b])).map(|i| ((first + i) % rows) as u32).collect();
            let head = b as u32 % self.model.kv_heads;
            let verdict = self.inputs.check(&o, [b as u32 * self.q_len, self.q_len], &sources, head);
            let worse = |a: Option<f64>, b: f64| Some(a.unwrap_or(0.0).max(b));
            let before = found.take();
            let failed = (!verdict.passed()).then(|| format!("sequence {b}, KV head {head}: {verdict}"));
            found = Some(Check {
                contender: runner.name.clone(),
                case: self.facts(),
                max_error: worse(before.as_ref().and_then(|c| c.max_error), verdict.max_error),
                unfused_error: worse(before.as_ref().and_then(|c| c.unfused_error), verdict.unfused_error),
                passed: verdict.passed() && before.as_ref().is_none_or(|c| c.passed),
                note: before.and_then(|c| c.note).or(failed),
            });
        }
        Ok(found.expect("three sequences were looked at"))
    }

    fn facts(&self) -> report::Case {
        let Model { dtype, element, heads, kv_heads, head_dim, mask, .. } = self.model;
        let bound = self.bound.map_or(String::new(), |n| format!(", bound {n}"));
        let element = if element.name().is_empty() { String::new() } else { format!(", {}", element.name()) };
        report::Case {
            name: Some(format!("{}{bound}", self.batch)),
            store: Some(format!("pages of {}{element}", self.cache.page_tokens)),
            dtype: dtype.to_string(),
            head_dim_qk: head_dim,
            head_dim_v: head_dim,
            mask: mask.to_string(),
            batch: self.batch.lengths.len() as u32,
            heads,
            kv_heads,
            q_len: self.q_len,
            kv_len: self.longest(),
        }
    }

    fn point(&self, results: Vec<Measured>) -> Point {
        let Model { dtype, output, heads, kv_heads, head_dim, mask, .. } = self.model;
        let q_len = self.q_len;
        let each = self.batch.lengths.iter().map(|n| Shape { batch: 1, heads, kv_heads, q_len, kv_len: *n, mask });
        let rows = self.batch.lengths.len() as f64 * f64::from(q_len) * f64::from(heads);
        let keys: u64 = self.batch.lengths.iter().map(|n| u64::from(seen(*n, q_len, mask))).sum();
        Point {
            suite: "ragged".to_owned(),
            case: self.facts(),
            flops: each.clone().map(|s| s.forward_flops(head_dim, head_dim)).sum(),
            ideal_bytes: keys as f64 * self.model.token_bytes() as f64
                + rows * f64::from(head_dim) * (dtype.bytes() + output.bytes()) as f64,
            scores_bytes: each.map(|s| f64::from(s.kv_len)).sum::<f64>()
                * f64::from(q_len * heads)
                * dtype.bytes() as f64,
            aim: None,
            conditions: None,
            results,
        }
    }
}

/// Keys of a sequence that some row sees.
fn seen(keys: u32, rows: u32, mask: Mask) -> u32 {
    mask.window().0.map_or(keys, |left| keys.min(left.saturating_add(rows)))
}

/// What `bench --kv-lens` prints for people.
pub(crate) fn print(cx: &mut Context, report: &Report) -> Result<()> {
    let d = &report.device;
    writeln!(cx.out, "device {} ({}, {} units)", d.name, d.arch, d.units)?;
    if let Some(c) = &report.ceilings.copy {
        writeln!(cx.out, "ceiling of copies: {:.1} GB/s read and written ({})", c.gbytes_per_s, c.how)?;
    }
    let mut printed =
        table(&["batch", "cache", "heads", "contender", "us", "alone us", "p10..p90", "GB/s", "GFLOP/s", "schedule"]);
    for point in &report.points {
        let c = &point.case;
        for r in &point.results {
            let us =
                |l: &Option<report::Latency>| l.as_ref().map_or_else(|| "-".to_owned(), |l| format!("{:.1}", l.median));
            let number = |n: Option<f64>| n.map_or_else(|| "-".to_owned(), |n| format!("{n:.1}"));
            let mask = format!("{} d{} {}, {} rows", c.dtype, c.head_dim_qk, c.mask, c.q_len);
            printed.add_row([
                format!("{}, {mask}", c.name.as_deref().unwrap_or("-")),
                c.store.clone().unwrap_or_default(),
                format!("{}/{}", c.heads, c.kv_heads),
                r.note.as_ref().map_or_else(|| r.contender.clone(), |note| format!("{} ({note})", r.contender)),
                us(&r.latency_us),
                us(&r.single_us),
                r.latency_us.as_ref().map_or_else(|| "-".into(), |l| format!("{:.1}..{:.1}", l.p10, l.p90)),
                number(r.derived.gbytes_per_s),
                number(r.derived.tflops.map(|t| t * 1e3)),
                r.schedule.clone().or_else(|| r.absent.clone()).unwrap_or_else(|| "-".to_owned()),
            ]);
        }
    }
    writeln!(cx.out, "{printed}")?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_are_lists_of_lengths_and_counts() {
        let lengths = |s: &str| s.parse::<Batch>().map(|b| b.lengths);
        assert_eq!(lengths("4k"), Ok(vec![4096]));
        assert_eq!(lengths("2x1k,5"), Ok(vec![1024, 1024, 5]));
        assert_eq!("2x1k,5".parse::<Batch>().unwrap().to_string(), "2x1k,5");
        for bad in ["", "x", "4kx", "2x", "0x5", "5,", "-1", "1..4", "2x0", "70000x1", "3x3x3"] {
            let why = lengths(bad).unwrap_err();
            assert!(why.contains("no length") || why.contains("out of range"), "{bad}: {why}");
        }
    }

    #[test]
    fn windows_see_the_last_keys() {
        let window = |left| Mask::Window { left: Some(left), right: Some(0) };
        assert_eq!([seen(1000, 1, window(127)), seen(1000, 4, window(127)), seen(50, 4, window(127))], [128, 131, 50]);
        assert_eq!(seen(1000, 4, Mask::Causal), 1000);
    }
}

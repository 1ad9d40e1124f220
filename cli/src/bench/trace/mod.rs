//! `flashtune bench --trace`: a served day. Requests with the lengths of a trace are put into steps of prompts and
//! generation as a server does; of each step the appends and the attention of all layers are timed.

mod day;
mod requests;
mod scheduler;

use super::super::cases::{CaseArgs, default_case};
use super::super::context::Context;
use super::super::exit::usage;
use super::super::progress;
use super::super::table::table;
use super::cache::{Element, Model, model_of};
use anyhow::Result;
use day::{Checked, Day, Ran, Server};
use flashtune::Engine;
use flashtune_report::{Case, Check, Quantile, Report, ServedReport, StepTimes};
use requests::{Request, drawn, parse};
use scheduler::{Kind, Limits, Scheduler};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Shares of the steps at which times are reported.
const SHARES: [f64; 6] = [0.0, 0.5, 0.9, 0.95, 0.99, 1.0];
/// Of a device's memory, at most this part goes to the cache unless pages are named.
const CACHE_SHARE: f64 = 0.7;

/// Options of a trace.
#[derive(clap::Args, Debug)]
pub(crate) struct TraceArgs {
    /// File with the requests of a server: steps of prompts in chunks and of generation are timed, with all their
    /// appends and attention. A line is a request: tokens of its prompt, tokens of its output, and if known the second
    /// of its arrival
    #[arg(long, value_name = "FILE", conflicts_with_all = ["lengths", "q_len", "kv_len", "batch", "tokens", "width"])]
    pub trace: Option<PathBuf>,
    /// Requests that are drawn from the trace; each of it once when absent
    #[arg(long, value_name = "N", requires = "trace")]
    requests: Option<u32>,
    /// Seed of that draw, of the order of pages and of all numbers
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub seed: u64,
    /// Rows of a step: one for each sequence that generates, the others for prompts
    #[arg(long, default_value_t = 2048, value_name = "N", requires = "trace")]
    token_budget: u32,
    /// Sequences at a time
    #[arg(long, default_value_t = 64, value_name = "N", requires = "trace")]
    max_sequences: u32,
    /// Pages of a layer's cache; when absent those of as many of the longest requests as there may be at a time, or
    /// what fits 70 % of the device's memory
    #[arg(long, value_name = "N", requires = "trace")]
    cache_pages: Option<u32>,
    /// What a step takes by the clock of arrivals, in milliseconds: schedules do not depend on measured times
    #[arg(long, default_value_t = 25.0, value_name = "MS", requires = "trace")]
    step_ms: f64,
}

/// What traces and ragged batches share.
#[derive(clap::Args, Debug)]
pub(crate) struct CacheArgs {
    /// Tokens of a page of the KV cache, for --trace and --kv-lens
    #[arg(long = "pages", default_value_t = 16, value_name = "N")]
    pub page: u32,
    /// Elements of the KV cache, for --trace and --kv-lens: same (as the queries), e4m3, e5m2 or int8
    #[arg(long, default_value = "same", value_name = "ELEMENT")]
    pub kv_dtype: Element,
    /// Layers, each with a cache of its own, for --trace and --kv-lens
    #[arg(long, default_value_t = 16, value_name = "N")]
    pub layers: u32,
}

impl CacheArgs {
    pub(crate) fn check(&self) -> Result<()> {
        match (self.page, self.layers) {
            (0, _) => Err(usage("--pages is 0, but a page has at least 1 token")),
            (_, 0) => Err(usage("--layers is 0, but a model has at least 1 layer")),
            _ => Ok(()),
        }
    }
}

/// A trace, read and checked, with everything that bounds its steps.
pub(crate) struct Trace {
    source: String,
    requests: Vec<Request>,
    model: Model,
    layers: u32,
    seed: u64,
    limits: Limits,
}

impl Trace {
    /// Reads the file and checks the options.
    ///
    /// # Errors
    /// Names the file and its line, or the option, with the limit and the remedy.
    pub(crate) fn new(
        cx: &mut Context,
        path: &Path,
        args: &TraceArgs,
        cache: &CacheArgs,
        cases: &CaseArgs,
    ) -> Result<Self> {
        cache.check()?;
        if !(args.step_ms.is_finite() && args.step_ms > 0.0) {
            return Err(usage(format!("--step-ms is {}, but a step takes some time; name more than 0", args.step_ms)));
        }
        if args.max_sequences == 0 || args.requests == Some(0) {
            return Err(usage("--max-sequences and --requests must be at least 1"));
        }
        let at = path.display();
        let text = std::fs::read_to_string(path)
            .map_err(|e| usage(format!("cannot read {at}: {e}; name a file with one request per line")))?;
        let all = parse(&text).map_err(|e| usage(format!("{at}, {e}")))?;
        let requests = match args.requests {
            Some(n) => drawn(&all, n as usize, args.seed),
            None => all,
        };
        let model = model_of(&cases.single(&default_case())?, cache.kv_dtype)?;
        let layer_page = u64::from(cache.page) * model.token_bytes();
        let memory = cx.device()?.fingerprint().memory_bytes;
        let room = (memory as f64 * CACHE_SHARE / (layer_page * u64::from(cache.layers)) as f64) as u64;
        let pages = match args.cache_pages {
            Some(pages) if memory > 0 && u64::from(pages) * layer_page * u64::from(cache.layers) > memory => {
                return Err(usage(format!(
                    "--cache-pages is {pages}, but of {} layers the device's memory holds {room} with room for the \
                     rest; name fewer",
                    cache.layers
                )));
            }
            Some(pages) => pages,
            None => {
                let mut needed: Vec<u32> = requests.iter().map(|r| r.keys().div_ceil(cache.page)).collect();
                needed.sort_unstable_by(|a, b| b.cmp(a));
                let most: u64 = needed.iter().take(args.max_sequences as usize).map(|n| u64::from(*n)).sum();
                let room = if memory > 0 { room } else { u64::MAX };
                u32::try_from(most.min(room)).unwrap_or(u32::MAX)
            }
        };
        let limits = Limits {
            token_budget: args.token_budget,
            max_sequences: args.max_sequences,
            page_tokens: cache.page,
            pages,
            step_seconds: args.step_ms / 1e3,
        };
        let source = path.file_name().map_or_else(|| at.to_string(), |n| n.to_string_lossy().into_owned());
        // Refused before a device compiles anything.
        Scheduler::new(requests.clone(), limits, args.seed).map_err(|e| usage(e.to_string()))?;
        Ok(Self { source, requests, model, layers: cache.layers, seed: args.seed, limits })
    }

    /// Serves all requests, and puts what came of it into the report.
    pub(crate) fn serve(self, cx: &mut Context, engine: &Engine, report: &mut Report) -> Result<()> {
        let Limits { token_budget, max_sequences, page_tokens, pages, step_seconds } = self.limits;
        let longest = self.requests.iter().map(Request::keys).max().unwrap_or(0);
        let mut scheduler =
            Scheduler::new(self.requests.clone(), self.limits, self.seed).map_err(|e| usage(e.to_string()))?;
        let sizes = [self.layers, pages, page_tokens];
        let mut server = Server::new(engine, self.model, sizes, [token_budget, max_sequences, longest], self.seed)?;
        let all: u64 = self.requests.iter().map(|r| u64::from(r.keys())).sum();
        let bar = progress::bar(all, cx.hides_progress());
        let day = server.run(&mut scheduler, &mut |ran| bar.inc(ran.rows.into()))?;
        bar.finish_and_clear();
        report.title = format!("A served trace on {}", report.device.name);
        report.method = vec![
            "A step is the append and the attention of every layer, one launch each, timed together: nothing else \
             of a model \
             runs, and its products would only evict what caches hold."
                .to_owned(),
            "Requests come in by arrival and none overtakes another; each sequence that generates has a row of every \
             step, prompts \
             share the rest of the budget in chunks."
                .to_owned(),
            "Rows of the first step of each kind, and of the last step, were compared with fp64.".to_owned(),
        ];
        report.checks.extend(day.checks.iter().map(|c| self.check(c)));
        let model = format!(
            "{}, {} layers, {pages} pages of {page_tokens} tokens, {token_budget} rows a step, {max_sequences} \
             sequences at a time, \
             steps of {} ms by the clock of arrivals, seed {}",
            self.model.told(),
            self.layers,
            step_seconds * 1e3,
            self.seed
        );
        report.served = Some(served(self.source, model, self.requests.len() as u64, day));
        Ok(())
    }

    fn check(&self, checked: &Checked) -> Check {
        let Checked { what, rows, keys, verdict } = checked;
        let model = &self.model;
        Check {
            contender: "chosen".to_owned(),
            case: Case {
                name: Some(what.clone()),
                store: Some(format!("pages of {}", self.limits.page_tokens)),
                dtype: model.dtype.to_string(),
                head_dim_qk: model.head_dim,
                head_dim_v: model.head_dim,
                mask: model.mask.to_string(),
                batch: 1,
                heads: model.heads / model.kv_heads,
                kv_heads: 1,
                q_len: *rows,
                kv_len: *keys,
            },
            max_error: Some(verdict.max_error),
            unfused_error: Some(verdict.unfused_error),
            passed: verdict.passed(),
            note: (!verdict.passed()).then(|| verdict.to_string()),
        }
    }
}

fn served(source: String, model: String, requests: u64, day: Day) -> ServedReport {
    let Day { steps, schedule, generated, kernels, .. } = day;
    let all = std::iter::once(("all", None));
    let kinds = [Kind::Prefill, Kind::Decode, Kind::Mixed].map(|kind| (kind.name(), Some(kind)));
    let times = all.chain(kinds).filter_map(|(name, kind)| {
        let of: Vec<Ran> = steps.iter().filter(|s| kind.is_none_or(|kind| s.kind == kind)).copied().collect();
        (!of.is_empty()).then(|| step_times(name, &of))
    });
    ServedReport {
        source,
        model,
        requests,
        schedule,
        tokens: steps.iter().map(|s| u64::from(s.rows)).sum(),
        generated,
        seconds: steps.iter().map(|s| s.us).sum::<f64>() / 1e6,
        steps: times.collect(),
        kernels,
    }
}

/// The times of steps, of which there is one at least.
fn step_times(kind: &str, steps: &[Ran]) -> StepTimes {
    let mut us: Vec<f64> = steps.iter().map(|s| s.us).collect();
    us.sort_by(f64::total_cmp);
    let at = |p: f64| Quantile { p, value: us[((us.len() - 1) as f64 * p).round() as usize] };
    StepTimes {
        kind: kind.to_owned(),
        steps: us.len() as u64,
        tokens: steps.iter().map(|s| u64::from(s.rows)).sum(),
        mean_us: us.iter().sum::<f64>() / us.len() as f64,
        quantiles_us: SHARES.map(at).to_vec(),
    }
}

/// What `bench --trace` prints for people.
pub(crate) fn print(cx: &mut Context, report: &Report) -> Result<()> {
    let Some(served) = &report.served else { return Ok(()) };
    let d = &report.device;
    writeln!(cx.out, "device {} ({}, {} units)", d.name, d.arch, d.units)?;
    writeln!(cx.out, "{}", served.model)?;
    let mut printed = table(&["steps", "number", "tokens", "mean us", "P50 us", "P95 us", "tokens/s"]);
    for s in &served.steps {
        let us = |p| s.us_at(p).map_or_else(|| "-".to_owned(), |us| format!("{us:.1}"));
        let rate = s.tokens as f64 / (s.mean_us * s.steps as f64) * 1e6;
        let [number, tokens] = [s.steps, s.tokens].map(|n| n.to_string());
        printed.add_row([
            s.kind.clone(),
            number,
            tokens,
            format!("{:.1}", s.mean_us),
            us(0.5),
            us(0.95),
            format!("{rate:.0}"),
        ]);
    }
    writeln!(cx.out, "{printed}")?;
    writeln!(
        cx.out,
        "{} requests of {}: {} tokens, {} of them generated, in {:.3} s: {:.0} tokens/s; schedule {}",
        served.requests,
        served.source,
        served.tokens,
        served.generated,
        served.seconds,
        served.tokens_per_s(),
        served.schedule
    )?;
    for (kernel, launches) in &served.kernels {
        writeln!(cx.out, "{launches} launches of {kernel}")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_those_of_steps_of_a_kind() {
        let ran = |kind, rows, us| Ran { kind, rows, us };
        let mut steps: Vec<Ran> = (1..=19).map(|i| ran(Kind::Decode, 4, f64::from(i))).collect();
        steps.push(ran(Kind::Prefill, 100, 1000.0));
        let day = Day { steps, checks: vec![], schedule: "x".into(), generated: 76, kernels: Default::default() };
        let served = served("t".into(), "m".into(), 3, day);
        let told: Vec<(&str, u64, u64)> = served.steps.iter().map(|s| (s.kind.as_str(), s.steps, s.tokens)).collect();
        assert_eq!(told, [("all", 20, 176), ("prefill", 1, 100), ("decode", 19, 76)]);
        let decode = &served.steps[2];
        assert_eq!((decode.mean_us, decode.us_at(0.5), decode.us_at(0.95)), (10.0, Some(10.0), Some(18.0)));
        assert_eq!(served.steps[0].us_at(1.0), Some(1000.0));
        assert!((served.tokens_per_s() - 176.0 / 1190e-6).abs() < 1e-3);
    }
}

//! `flashtune tune`: the fastest schedules for a set of problems, on the devices of this machine.

mod crew;
mod interrupt;
mod report;
mod watcher;

use super::agenda::{self, Agenda, ModelArgs, OpArgs};
use super::cases::{Case, CaseArgs, RaggedArgs};
use super::context::Context;
use super::exit::{Failed, Unavailable, usage};
use anyhow::Result;
use crew::{Devices, Limits, Task, Work};
use flashtune::{ManifestEntry, Problem, write_manifest};
use flashtune_cache::Launches;
use flashtune_codegen::{Arch, Constraints, Family, Schedule};
use flashtune_runtime::no_graphs;
use flashtune_tuner::{Runner, Search};
use serde_json::json;
use std::io::Write;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use watcher::Watcher;

/// Options of `tune`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Without a model and options that name a problem, a small set of common ones is tuned.")]
pub(crate) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    cases: CaseArgs,
    #[command(flatten)]
    ragged: RaggedArgs,
    #[command(flatten)]
    op: OpArgs,
    /// Say what would be tuned, and tune nothing
    #[arg(long)]
    dry_run: bool,
    /// Also write the problems and sizes to a file that a host can preload, and that --from takes
    #[arg(long, value_name = "FILE")]
    manifest: Option<PathBuf>,
    /// Largest number of schedules to compile for each problem
    #[arg(long, value_name = "N")]
    trials: Option<usize>,
    /// Seconds for the whole command
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true)]
    budget_s: Option<f64>,
    /// Seed of the inputs and of the random picks
    #[arg(long, default_value_t = 0, value_name = "N")]
    seed: u64,
    /// Tune again what is already in the cache
    #[arg(long)]
    force: bool,
    /// Try an even sample of the whole space instead of searching it, all of it when --trials allows: to record what
    /// the space is like (--json has every trial)
    #[arg(long)]
    exhaustive: bool,
    /// Race these schedules and the default again, and no others: names as `tune` and `list` print them
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    #[arg(conflicts_with_all = ["exhaustive", "together", "contested"])]
    only: Vec<String>,
    /// Time candidates as replays of a captured CUDA graph, for hosts that replay theirs: a result of its own, beside
    /// that for eager launches
    #[arg(long)]
    graph: bool,
    /// Tune the sizes of a problem together: the best of each are raced in all of them, and the fewest are kept that
    /// come within 3 % of the best everywhere
    #[arg(long, alias = "family", conflicts_with = "exhaustive")]
    together: bool,
    /// Tune one part of N, from 0 to N-1: every N-th case, the same for all who are asked the same
    #[arg(long, value_name = "I/N")]
    shard: Option<Shard>,
    /// Race again what merged hosts disagree about (see `flashtune merge`), in the cache, on this device
    #[arg(long, conflicts_with_all = ["together", "shard", "exhaustive", "model", "from"])]
    contested: bool,
    /// Devices to share the work: all (every GPU, one worker each), or names with commas between
    #[arg(long, value_name = "LIST", conflicts_with = "in_process")]
    devices: Option<Devices>,
    /// Seconds to wait for another process that is tuning the same, or uses the device; without end when absent
    #[arg(long, value_name = "SECONDS")]
    patience_s: Option<u32>,
    /// Run candidates in this process instead of a worker: one that faults ends the command
    #[arg(long)]
    in_process: bool,
}

/// One part of several.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Shard {
    index: usize,
    count: usize,
}

impl FromStr for Shard {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        let parts = s.split_once('/').and_then(|(i, n)| Some((i.parse().ok()?, n.parse().ok()?)));
        match parts {
            Some((index, count)) if index < count => Ok(Self { index, count }),
            _ => Err(format!("`{s}` is not I/N with I from 0 to N-1, e.g. 0/8")),
        }
    }
}

pub(crate) fn run(cx: &mut Context, args: Args) -> Result<()> {
    let budget = match args.budget_s.map(Duration::try_from_secs_f64) {
        None => None,
        Some(Ok(budget)) if !budget.is_zero() => Some(budget),
        Some(_) => {
            return Err(usage("--budget-s must be a positive number of seconds, and no more than 64 bits of them"));
        }
    };
    if args.trials == Some(0) {
        return Err(usage("--trials must be at least 1: the default schedule is always tried"));
    }
    let runners = match &args.devices {
        Some(devices) => devices.runners()?,
        None => vec![cx.runner(args.in_process)?],
    };
    let launches = if args.graph { Launches::Graph } else { Launches::Eager };
    if args.graph && runners.iter().any(|r| !r.has_graphs()) {
        return Err(usage(format!("--graph: {}", no_graphs())));
    }
    let agenda = Agenda::new(&args.model, &args.cases, &args.ragged, &args.op, runners[0].fingerprint())?;
    let (arch, cores) = (runners[0].fingerprint().arch, runners[0].fingerprint().units);
    if let Some(path) = &args.manifest {
        let entry = |c: &Case| ManifestEntry::new(c.problem, c.sizes());
        write_manifest(path, &agenda.cases.iter().map(entry).collect::<Vec<_>>())?;
    }
    if args.dry_run && !args.contested {
        return agenda::print(cx, &agenda);
    }
    if agenda.cases.is_empty() && !args.contested {
        agenda::print(cx, &agenda)?;
        return Err(
            Unavailable("no kernel that can be tuned computes what the model needs; nothing was tuned".into()).into()
        );
    }
    let templates = cx.templates()?;
    let dir = cx.cache_dir()?;
    let mut works = Vec::new();
    for (fingerprint, crew) in crew::by_kind(runners) {
        let tasks = match args.contested {
            true => crew::contested(&dir, &fingerprint, launches, &templates)?,
            false => tasks(&args, &Agenda::new(&args.model, &args.cases, &args.ragged, &args.op, &fingerprint)?),
        };
        works.push((Work::new(tasks, crew.len()), crew));
    }
    let total: usize = works.iter().map(|(work, _)| work.tasks.len()).sum();
    if args.contested && total > 0 {
        // Six seconds decide between a few; sixty if they have to be compiled.
        tracing::info!(total, "records are contested");
    }
    let default_budget_s = match args.contested {
        true => crew::CONTESTED_BUDGET * total as f64,
        false => agenda.default_budget_s * total as f64 / agenda.cases.len().max(1) as f64,
    };
    let limits = Limits {
        budget: budget.unwrap_or(Duration::from_secs_f64(default_budget_s)),
        trials: args.trials,
        seed: args.seed,
        force: args.force || !args.only.is_empty(),
        search: match args.exhaustive {
            true => Search::Even,
            false if args.only.is_empty() => Search::Guided,
            false => Search::Only(schedules(&args.only, &agenda.cases, arch, cores)?),
        },
        launches,
        allowed: cx.allowed()?,
        patience: args.patience_s.map(|s| Duration::from_secs(s.into())),
    };
    if !cx.json() {
        for (_, crew) in &works {
            for fingerprint in crew.iter().map(Runner::fingerprint) {
                let (cache, templates) = (dir.root().display(), templates.hash());
                writeln!(cx.out, "device {fingerprint}, cache {cache}, templates {templates}")?;
            }
        }
        cx.out.flush()?;
    }
    let layers = cx.layers()?;
    let (cases, devices) = works.iter().fold((0, 0), |(cases, devices), (work, crew)| {
        (cases + work.tasks.iter().map(Task::cases).sum::<usize>(), devices + crew.len())
    });
    let cache = dir.root().display().to_string();
    let watcher = Arc::new(Watcher::new(cases, devices, limits.budget, cache, cx.hides_progress()));
    let (start, told) = (Instant::now(), watcher.clone());
    interrupt::watch(move || told.interrupted())?;
    let done = crew::run(works, &limits, &templates, &dir, &layers, &watcher);
    watcher.finish();
    let crew::Done { outcomes, failures } = done.map_err(flashtune::Error::from)?;

    if cx.json() {
        let tuned: Vec<_> = outcomes.iter().map(report::summary).collect();
        cx.print_json(&json!({
            "model": agenda.model.as_ref().map(|_| agenda.summary()),
            "tuned": tuned,
            "failures": failures,
            "seconds": start.elapsed().as_secs_f64(),
        }))?;
    } else {
        agenda::print_gaps(cx, &agenda)?;
        report::report(cx, &outcomes, start.elapsed())?;
        if !outcomes.is_empty() {
            report::next_steps(cx, outcomes.iter().filter(|o| o.cached).count())?;
        }
    }
    match failures.as_slice() {
        [] => Ok(()),
        some => Err(Failed(format!("{} of {total} cases failed: {}", some.len(), some.join("; "))).into()),
    }
}

/// Schedules by name, out of the spaces of what is tuned on `arch` and its defaults.
fn schedules(names: &[String], cases: &[Case], arch: Arch, units: u32) -> Result<Vec<Schedule>> {
    let mut problems: Vec<Problem> = cases.iter().map(|case| case.problem).collect();
    problems.dedup();
    let families = |p: &Problem| Family::candidates(p, arch).into_iter().map(|family| (*p, family)).collect::<Vec<_>>();
    let mut space: Vec<Schedule> =
        problems.iter().flat_map(families).flat_map(|(p, family)| Schedule::space(family, &p, arch)).collect();
    // A default may be one that no search would propose.
    for case in cases {
        let (problem, bucket) = (&case.problem, case.bucket(units));
        let defaults = Family::candidates(problem, arch).into_iter();
        let default = |family| Schedule::default_within(family, problem, arch, &bucket, Constraints::NONE, units).ok();
        space.extend(defaults.filter_map(default));
    }
    let named = |name: &String| {
        let found = space.iter().find(|s| s.to_string() == *name).copied();
        found
            .ok_or_else(|| usage(format!("--only: there is no schedule `{name}` on {arch}; `emit --space` lists them")))
    };
    names.iter().map(named).collect()
}

/// What there is to do on one kind of device.
fn tasks(args: &Args, agenda: &Agenda) -> Vec<Task> {
    let all: Vec<Task> = match args.together {
        false => agenda.cases.iter().map(|c| Task::Case(*c)).collect(),
        true => {
            let mut sets: Vec<Vec<Case>> = Vec::new();
            for case in &agenda.cases {
                match sets.iter_mut().find(|set| set[0].problem == case.problem) {
                    Some(set) => set.push(*case),
                    None => sets.push(vec![*case]),
                }
            }
            sets.into_iter().map(Task::Together).collect()
        }
    };
    let mine = |i: usize| args.shard.is_none_or(|s| i % s.count == s.index);
    all.into_iter().enumerate().filter(|(i, _)| mine(*i)).map(|(_, task)| task).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_default_can_be_raced_by_its_name() {
        let arch: Arch = "sm_90a".parse().unwrap();
        let mask = flashtune::Mask::Causal;
        let problem = Problem::forward(flashtune::DType::Bf16, 128, mask.kind()).unwrap();
        let shape = |q_len| flashtune::Shape { batch: 4, heads: 32, kv_heads: 8, q_len, kv_len: 128, mask };
        let cases = [1, 128].map(|q_len| Case::new(problem, &shape(q_len)));
        for case @ Case { problem, .. } in &cases {
            for family in Family::candidates(problem, arch) {
                let schedule = Schedule::default_for(family, problem, arch, &case.bucket(132)).unwrap();
                assert_eq!(schedules(&[schedule.to_string()], &cases, arch, 132).unwrap(), [schedule]);
            }
        }
    }

    #[test]
    fn a_shard_is_one_of_several() {
        assert_eq!("2/8".parse(), Ok(Shard { index: 2, count: 8 }));
        for bad in ["8/8", "0/0", "1", "-1/2", "a/b", "1/2/3", ""] {
            assert!(bad.parse::<Shard>().unwrap_err().contains("I/N"), "{bad}");
        }
    }
}

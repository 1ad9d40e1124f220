//! The whole story of a record: how it was found, by how much it won, how sure that is, and what became of every
//! candidate.

use super::context::{Context, unix_time};
use super::table::table;
use anyhow::Result;
use flashtune_cache::{Conditions, Finalist, Launches, Record, Store, Trial, TrialResult};
use flashtune_codegen::Schedule;
use serde::Serialize;
use std::fmt;
use std::time::Duration;

/// How long to wait for a tuner that writes to the journal.
const PATIENCE: Duration = Duration::from_secs(3);

/// A record with the trials that led to it.
#[derive(Debug, Serialize)]
pub(crate) struct Story {
    /// Seconds since it was found.
    pub age_s: u64,
    pub flashtune: String,
    pub compiler: String,
    /// The sizes that were timed.
    pub timed_on: String,
    /// How candidates were launched when they were timed.
    pub launches: Launches,
    /// Schedules in the space, compiled and timed.
    pub space: u32,
    pub compiled: u32,
    pub timed: u32,
    /// Wall time, and the part of it that went into compiling.
    pub seconds: f64,
    pub compile_seconds: f64,
    /// Since the first kernel was there: seconds in which the device had work, and in which it waited for a compiler.
    pub device_seconds: f64,
    pub waited_seconds: f64,
    pub conditions: Conditions,
    /// All that reached the final, fastest first.
    pub finalists: Vec<Line>,
    /// Time of the default over the winner's.
    pub over_default: Option<f64>,
    /// Time of the best other finalist over the winner's.
    pub over_runner_up: Option<f64>,
    /// Nine of ten times of the winner lie within this part of its median.
    pub spread: Option<f64>,
    /// What other hosts found, where they disagree.
    pub contested: Vec<String>,
    /// What became of every candidate; none when the journal is not here.
    pub candidates: Option<Vec<Candidate>>,
    /// Why there are none.
    pub journal: Option<String>,
}

/// One finalist.
#[derive(Debug, Serialize)]
pub(crate) struct Line {
    pub schedule: String,
    pub median_us: f64,
    pub p10_us: f64,
    pub p90_us: f64,
    pub samples: u32,
    /// Its times in the rounds of the final, in nanoseconds.
    pub rounds_ns: Vec<u64>,
    pub over_winner: f64,
    pub max_error: f64,
    pub is_default: bool,
    pub is_winner: bool,
}

/// One candidate: timed, or given up.
#[derive(Debug, Serialize)]
pub(crate) struct Candidate {
    pub schedule: String,
    pub median_us: Option<f64>,
    /// How many times it was timed.
    pub samples: Option<u32>,
    /// Its times in the race, in nanoseconds and in order.
    pub race_ns: Option<Vec<u64>>,
    pub over_winner: Option<f64>,
    pub stage: Option<String>,
    pub reason: Option<String>,
}

impl Story {
    /// Tells it, with the candidates from the journal of the command's cache folder.
    pub(crate) fn of(cx: &mut Context, record: &Record) -> Self {
        let (trials, journal) = match trials(cx, record) {
            Ok(trials) if trials.is_empty() => (None, Some("it was tuned elsewhere: its trials are there".to_owned())),
            Ok(trials) => (Some(trials), None),
            Err(e) => (None, Some(e.to_string())),
        };
        Self::told(record, trials.as_deref(), journal, unix_time())
    }

    fn told(record: &Record, trials: Option<&[Trial]>, journal: Option<String>, now: u64) -> Self {
        let p = &record.provenance;
        let winner = record.winner();
        let over = |us: f64| winner.map_or(f64::NAN, |w| us / w.median_us);
        let line = |f: &Finalist| Line {
            schedule: f.schedule.to_string(),
            median_us: f.median_us,
            p10_us: f.p10_us,
            p90_us: f.p90_us,
            samples: f.samples,
            rounds_ns: f.rounds_ns.clone(),
            over_winner: over(f.median_us),
            max_error: f.max_error,
            is_default: f.is_default,
            is_winner: f.schedule == record.schedule,
        };
        let others = record.finalists.iter().filter(|f| f.schedule != record.schedule);
        let runner_up = others.map(|f| f.median_us).min_by(f64::total_cmp);
        let candidate = |t: &Trial| match &t.result {
            TrialResult::Timed { median_us, samples, race_ns, .. } => Candidate {
                schedule: t.schedule.to_string(),
                median_us: Some(*median_us),
                samples: Some(*samples),
                race_ns: Some(race_ns.clone()),
                over_winner: Some(over(*median_us)),
                stage: None,
                reason: None,
            },
            TrialResult::Failed { stage, reason } => Candidate {
                schedule: t.schedule.to_string(),
                median_us: None,
                samples: None,
                race_ns: None,
                over_winner: None,
                stage: Some(stage.to_string()),
                reason: Some(reason.clone()),
            },
        };
        let mut candidates: Option<Vec<Candidate>> = trials.map(|all| all.iter().map(candidate).collect());
        if let Some(all) = &mut candidates {
            let order = |c: &Candidate| c.median_us.unwrap_or(f64::INFINITY);
            all.sort_by(|a, b| {
                order(a).total_cmp(&order(b)).then_with(|| (&a.stage, &a.reason).cmp(&(&b.stage, &b.reason)))
            });
        }
        Self {
            age_s: now.saturating_sub(p.unix_time),
            flashtune: p.flashtune.clone(),
            compiler: p.compiler.clone(),
            timed_on: record.sizes().to_string(),
            launches: record.key.launches,
            space: p.space,
            compiled: p.compiled,
            timed: p.timed,
            seconds: p.seconds,
            compile_seconds: p.compile_seconds,
            device_seconds: p.device_seconds,
            waited_seconds: p.waited_seconds,
            conditions: p.conditions.clone(),
            finalists: record.finalists.iter().map(line).collect(),
            over_default: record.gain_over_default(),
            over_runner_up: runner_up.map(over),
            spread: winner.map(|w| (w.p90_us - w.p10_us) / w.median_us / 2.0),
            contested: record.contested().map(|r| r.schedule.to_string()).collect(),
            candidates,
            journal,
        }
    }
}

/// The trials of a record: those of its templates and compiler, the last of every schedule.
fn trials(cx: &mut Context, record: &Record) -> Result<Vec<Trial>> {
    let dir = cx.cache_dir()?;
    // A question must not make a journal.
    if !dir.store_path().exists() {
        return Ok(Vec::new());
    }
    let mut trials = Store::open_within(&dir, PATIENCE)?.trials(&record.key)?;
    let (p, templates, family) = (&record.provenance, cx.templates()?, record.schedule.family());
    trials.retain(|t| {
        let made_of = if t.schedule.family() == family { &p.templates } else { templates.hash_of(t.schedule.family()) };
        t.templates == made_of && t.compiler == p.compiler
    });
    let mut seen: Vec<Schedule> = Vec::new();
    trials.reverse();
    trials.retain(|t| {
        let new = !seen.contains(&t.schedule);
        seen.push(t.schedule);
        new
    });
    Ok(trials)
}

impl fmt::Display for Story {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let age = humantime::format_duration(Duration::from_secs(self.age_s - self.age_s % 60)).to_string();
        let age = if self.age_s < 60 { "less than a minute".to_owned() } else { age };
        if self.finalists.is_empty() {
            return writeln!(
                f,
                "record     built {age} ago by flashtune {} with {}, never measured",
                self.flashtune, self.compiler
            );
        }
        writeln!(
            f,
            "record     tuned {age} ago on {} by flashtune {} with {}",
            self.timed_on, self.flashtune, self.compiler
        )?;
        let Self { space, compiled, timed, launches, seconds, .. } = self;
        writeln!(
            f,
            "search     {compiled} of {space} schedules compiled, {timed} timed ({launches} launches), {seconds:.1} s"
        )?;
        let (compiling, device, waited) = (self.compile_seconds, self.device_seconds, self.waited_seconds);
        writeln!(
            f,
            "time       {compiling:.1} s something was compiled; since the first kernel was there the device had work \
             for {device:.1} s and waited {waited:.1} s"
        )?;
        writeln!(f, "conditions {}", self.conditions)?;
        let ratio = |x: Option<f64>| x.map_or("-".to_owned(), |x| format!("{x:.3}x"));
        let spread = self.spread.map_or("-".to_owned(), |s| format!("{:.1} %", 100.0 * s));
        let (default, runner_up) = (ratio(self.over_default), ratio(self.over_runner_up));
        writeln!(f, "margin     {default} the default, {runner_up} the next best; its times spread by {spread}")?;
        for schedule in &self.contested {
            writeln!(f, "contested  another host found {schedule}; `flashtune tune --contested` decides")?;
        }
        let mut finalists = table(&["finalist", "us", "p10", "p90", "samples", "vs winner", "max error", ""]);
        for l in &self.finalists {
            let notes = [l.is_winner.then_some("winner"), l.is_default.then_some("default")];
            finalists.add_row([
                l.schedule.clone(),
                format!("{:.1}", l.median_us),
                format!("{:.1}", l.p10_us),
                format!("{:.1}", l.p90_us),
                l.samples.to_string(),
                format!("{:.3}x", l.over_winner),
                format!("{:.1e}", l.max_error),
                notes.into_iter().flatten().collect::<Vec<_>>().join(", "),
            ]);
        }
        writeln!(f, "{finalists}")?;
        match (&self.candidates, &self.journal) {
            (Some(candidates), _) => {
                let mut all = table(&["candidate", "us", "samples", "vs winner", "out at", "because"]);
                for c in candidates {
                    all.add_row([
                        c.schedule.clone(),
                        c.median_us.map_or(String::new(), |us| format!("{us:.1}")),
                        c.samples.map_or(String::new(), |n| n.to_string()),
                        c.over_winner.map_or(String::new(), |r| format!("{r:.2}x")),
                        c.stage.clone().unwrap_or_default(),
                        c.reason.as_deref().and_then(|r| r.lines().next()).unwrap_or_default().to_owned(),
                    ]);
                }
                writeln!(f, "{all}")
            }
            (None, Some(why)) => writeln!(f, "candidates are not known here: {why}"),
            (None, None) => Ok(()),
        }
    }
}

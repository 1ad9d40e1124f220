//! Race and final of a field, on the device.

use super::Tuning;
use super::field::Field;
use crate::candidate::Candidate;
use crate::decide::{FinalRules, NOISE, Rounds, decide, run_final};
use crate::race::{RaceEvent, Rules, Track, race};
use crate::runner::Runner;
use crate::stats::{median, percentile};
use crate::{Error, Event, Observer, Phase, Result, Search};
use flashtune_cache::{Activity, Conditions, Finalist, Lesson, Progress, Stage};
use flashtune_codegen::Schedule;
use std::time::{Duration, Instant};

/// Schedules that meet in the final, besides the default.
const FINALISTS: usize = 3;
/// Rounds of a final: the fewest where there is time, and the most where it is calm; four times as many tell that noise
/// hides the result, and twenty times as many are run at most so that it does not.
const SURE_ROUNDS: usize = 20;
const MAX_ROUNDS: usize = 75;
const STUBBORN_ROUNDS: usize = 4 * MAX_ROUNDS;
const MOST_ROUNDS: usize = 20 * MAX_ROUNDS;
/// How much longer noise may make a job, by its race and again by its final, as a share of the time before; of the time
/// that is left the race takes no more, so that the final has some.
const FOR_NOISE: f64 = 0.25;

/// What the measurement gave, by candidate index.
pub(super) struct Measured {
    pub winner: usize,
    /// What else went on.
    pub conditions: Conditions,
    /// Why the winner may owe it to noise.
    pub noise: Option<String>,
    pub finalists: Vec<usize>,
    /// Their times in the final.
    rounds: Rounds,
    /// All samples of the race and the final.
    pub samples: Vec<Vec<f64>>,
    /// How many of them are the race's.
    raced: Vec<usize>,
}

impl Measured {
    /// A candidate's times in the race.
    pub(crate) fn race(&self, candidate: usize) -> &[f64] {
        let samples = &self.samples[candidate];
        &samples[..self.raced[candidate].min(samples.len())]
    }
}

/// Times as they are kept.
pub(super) fn nanoseconds<'a>(us: impl IntoIterator<Item = &'a f64>) -> Vec<u64> {
    us.into_iter().map(|us| (1e3 * us).round() as u64).collect()
}

impl Tuning<'_> {
    /// A race of those who are live. Who fails is given up.
    pub(crate) fn race(&mut self, field: &mut Field, rules: &Rules) -> Result<()> {
        let default = field.candidates.iter().position(|c| c.is_default && c.is_live());
        let Field { candidates, standings, .. } = field;
        // A table of the space has at least two runs of each, and no equals are left out.
        let recorded = rules.clone().for_a_record();
        let rules = if self.job.search == Search::Even { &recorded } else { rules };
        self.on_track(Activity::Race, candidates, |track, on| race(track, standings, default, rules, on))
    }

    /// Race and final. `None` when nobody could be timed. Who fails or never gets a turn is given up here.
    pub(crate) fn measure(&mut self, field: &mut Field) -> Result<Option<Measured>> {
        let mut readings = vec![self.runner.reading()];
        self.phase(Phase::Race, None);
        let budget = self.job.budget;
        let began = self.started.elapsed();
        let left = budget.saturating_sub(began);
        let rules = Rules::until(began + left * 3 / 4).patient_until(began + began.min(left).mul_f64(FOR_NOISE));
        self.race(field, &rules)?;
        let default = field.candidates.iter().position(|c| c.is_default && c.is_live());
        let mut ranking = field.standings.ranking();

        let rules = FinalRules {
            min_rounds: 7,
            sure_rounds: SURE_ROUNDS,
            max_rounds: MAX_ROUNDS,
            stubborn_rounds: STUBBORN_ROUNDS,
            most_rounds: MOST_ROUNDS,
            patience: self.started.elapsed().mul_f64(1.0 + FOR_NOISE),
            deadline: budget,
            // A winner that is sure is worth some more time than was asked for, but not without end.
            hard_deadline: budget + budget / 2,
        };
        let (alive, rounds) = loop {
            let mut finalists: Vec<usize> = ranking.iter().copied().take(FINALISTS).collect();
            finalists.extend(default.filter(|d| ranking.contains(d) && !finalists.contains(d)));
            self.phase(Phase::Final, Some(finalists.len()));
            let mut outcome = Default::default();
            self.on_track(Activity::Final, &mut field.candidates, |track, on| {
                outcome = run_final(track, &finalists, default, &rules, on);
            })?;
            self.confirm_winner(field, &mut outcome, default)?;
            // Should all of them fail, the next best have their turn.
            if !outcome.0.is_empty() || finalists.is_empty() {
                break outcome;
            }
            ranking.retain(|c| !finalists.contains(c));
        };
        readings.push(self.runner.reading());
        let mut samples = std::mem::take(&mut field.standings.samples);
        let raced = samples.iter().map(Vec::len).collect();
        for (position, &contender) in alive.iter().enumerate() {
            samples[contender].extend(rounds.times(position));
        }
        for (own, candidate) in samples.iter_mut().zip(&mut field.candidates) {
            if !candidate.is_live() {
                own.clear();
            } else if own.is_empty() {
                candidate.fail(Stage::Budget, "the time ran out before it was timed".into(), self.observer);
            }
        }
        if alive.is_empty() {
            return Ok(None);
        }
        let winner = winner_of(field, &alive, &rounds, default);
        let default = alive.iter().position(|&c| Some(c) == default);
        let conditions = Conditions::of(&readings);
        Ok(Some(Measured {
            winner: alive[winner],
            noise: noise(&rounds, alive.len(), default.unwrap_or(0), winner, &conditions),
            conditions,
            finalists: alive,
            rounds,
            samples,
            raced,
        }))
    }

    /// Takes the winner of a final out of it whose answer is not the same in every launch, and so on, until one can be
    /// trusted. A check looks at two launches of each candidate, which a race between threads may pass; who wins is
    /// served for years.
    fn confirm_winner(
        &mut self,
        field: &mut Field,
        (alive, rounds): &mut (Vec<usize>, Rounds),
        default: Option<usize>,
    ) -> Result<()> {
        while !alive.is_empty() {
            let position = winner_of(field, alive, rounds, default);
            let (winner, began) = (alive[position], Instant::now());
            let confirmed = self.runner.confirm(winner as u32)?;
            self.log.until_now(Activity::CheckFull, Some(winner), began, 0);
            let Err(reason) = confirmed else { return Ok(()) };
            self.give_up(&mut field.candidates[winner], Stage::Check, reason);
            alive.remove(position);
            rounds.leave_out(position);
        }
        Ok(())
    }

    /// Runs a race or a final of the candidates, and gives those up that failed in it.
    fn on_track(
        &mut self,
        activity: Activity,
        candidates: &mut [Candidate],
        run: impl FnOnce(&mut dyn Track, &mut dyn FnMut(RaceEvent<'_>)),
    ) -> Result<()> {
        let schedules: Vec<Schedule> = candidates.iter().map(|c| c.kernel.schedule).collect();
        let observer: &dyn Observer = self.observer;
        let mut failures: Vec<(usize, String)> = Vec::new();
        let (began, mut samples) = (Instant::now(), 0);
        let mut report = |event: RaceEvent<'_>| match event {
            RaceEvent::Timed { contender, round, us } => {
                samples += 1;
                observer.event(&Event::Timed { schedule: &schedules[contender], round, us });
            }
            RaceEvent::Dropped { contender, ratio } => {
                observer.event(&Event::Dropped { schedule: &schedules[contender], ratio });
            }
            // The observer hears of it when the candidate is given up, below.
            RaceEvent::Failed { contender, reason } => failures.push((contender, reason.to_owned())),
        };
        let mut track = RunnerTrack {
            runner: &mut *self.runner,
            progress: &mut self.progress,
            observer,
            schedules: &schedules,
            started: self.started,
            broken: None,
        };
        run(&mut track, &mut report);
        if let Some(e) = track.broken {
            return Err(e);
        }
        if samples > 0 {
            self.log.until_now(activity, None, began, samples);
        }
        for (contender, reason) in failures {
            self.give_up(&mut candidates[contender], Stage::Measure, reason);
        }
        Ok(())
    }
}

/// Who won the final, of those who are alive. Among equals the cost model's order decides, which is the same whatever
/// was tried first.
fn winner_of(field: &Field, alive: &[usize], rounds: &Rounds, default: Option<usize>) -> usize {
    let default = alive.iter().position(|&c| Some(c) == default);
    let order: Vec<usize> = alive.iter().map(|&c| field.candidates[c].rank).collect();
    decide(rounds, alive.len(), default, &order)
}

/// Candidates that race where they run. What a process before this one measured is not measured again.
struct RunnerTrack<'a> {
    runner: &'a mut Runner,
    progress: &'a mut Progress,
    observer: &'a dyn Observer,
    schedules: &'a [Schedule],
    started: Instant,
    /// What ended the race for everybody.
    broken: Option<Error>,
}

impl Track for RunnerTrack<'_> {
    fn sample(&mut self, contender: usize) -> Result<f64, String> {
        if let Some(e) = &self.broken {
            return Err(e.to_string());
        }
        let schedule = &self.schedules[contender];
        if let Some(us) = self.progress.timed(schedule) {
            return Ok(us);
        }
        match self.runner.time(contender as u32) {
            Ok(Ok(us)) => {
                self.progress.add(schedule, &Lesson::Timed { us });
                self.observer.event(&Event::Learnt { lessons: self.progress.kept() });
                Ok(us)
            }
            Ok(Err(reason)) => Err(reason),
            Err(e) => {
                let reason = e.to_string();
                self.broken = Some(e);
                Err(reason)
            }
        }
    }

    fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }
}

/// The final's schedules for the record, fastest first.
pub(super) fn finalists(candidates: &[Candidate], measured: &Measured) -> Vec<Finalist> {
    let mut finalists: Vec<Finalist> = measured
        .finalists
        .iter()
        .enumerate()
        .filter_map(|(position, &i)| {
            let (candidate, samples) = (&candidates[i], &measured.samples[i]);
            Some(Finalist {
                schedule: candidate.kernel.schedule,
                median_us: median(samples)?,
                p10_us: percentile(samples, 0.1)?,
                p90_us: percentile(samples, 0.9)?,
                samples: samples.len() as u32,
                rounds_ns: nanoseconds(&measured.rounds.times(position).collect::<Vec<_>>()),
                max_error: candidate.max_error,
                is_default: candidate.is_default,
            })
        })
        .collect();
    finalists.sort_by(|a, b| a.median_us.total_cmp(&b.median_us));
    finalists
}

/// Why the decision of a final cannot be trusted: its ratios were hidden by noise for as long as the final may last, or
/// something disturbed the device and shows in the winner's times. A final that was cut short is not noisy: then the
/// default wins.
pub(super) fn noise(
    rounds: &Rounds,
    count: usize,
    base: usize,
    winner: usize,
    conditions: &Conditions,
) -> Option<String> {
    let doubt = rounds.doubt(count, base);
    if rounds.0.len() >= MAX_ROUNDS && doubt > NOISE {
        let (rounds, percent) = (rounds.0.len(), 100.0 * doubt);
        return Some(format!(
            "after {rounds} rounds the fastest is known to within {percent:.0} % only ({conditions})"
        ));
    }
    let times: Vec<f64> = rounds.times(winner).collect();
    let spread = (percentile(&times, 0.75)? - percentile(&times, 0.25)?) / median(&times)?;
    let disturbance = conditions.disturbance().filter(|_| spread > NOISE)?;
    Some(format!("{disturbance}, and half of the winner's times are {:.0} % apart", 100.0 * spread))
}

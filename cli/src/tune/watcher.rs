//! What a tuning tells while it runs: winners as they fall, the cases under way, and how long the rest will take.

use super::crew::Task;
use super::report::winner;
use crate::cases::Case;
use flashtune_cache::{Holder, Record, RecordKey};
use flashtune_tuner::{Event, Observer};
use indicatif::ProgressBar;
use std::io::{IsTerminal, Write};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Between the lines that say how far it is, where there is no terminal: the first, and the longest.
const FIRST_STEP: Duration = Duration::from_secs(5);
const LAST_STEP: Duration = Duration::from_secs(30);

/// Where it is told.
enum Show {
    Nowhere,
    /// A bar at the bottom of a terminal, with lines above it.
    Terminal(ProgressBar),
    /// Plain lines on stderr; when the next one is due, and how long after it the one after that.
    Lines(Mutex<(Instant, Duration)>),
}

/// Follows the jobs of all devices.
pub(crate) struct Watcher {
    show: Show,
    state: Mutex<State>,
    budget: Duration,
    start: Instant,
    /// Where results are kept.
    cache: String,
}

/// How far it is.
#[derive(Default)]
struct State {
    total: usize,
    /// Cases that are behind us, and those of them with a record.
    done: usize,
    kept: usize,
    /// Cases that were tuned now, and the seconds that they took.
    tuned: usize,
    seconds: f64,
    /// Time that passed while others were at work: it does not count against the budget.
    waited: Duration,
    is_over: bool,
    seats: Vec<Seat>,
}

/// What one device is at.
#[derive(Default)]
struct Seat {
    /// Nothing between tasks.
    case: Option<String>,
    /// Cases of the task that have not ended.
    left: usize,
    /// What the task has put into the cache so far, which an interrupt keeps: of sizes that are tuned together each is
    /// tuned twice.
    won: Vec<RecordKey>,
    began: Option<Instant>,
    doing: String,
    /// Checks, failures and times that a process after this one would take over.
    lessons: usize,
    /// Who is waited for, with what it does.
    waits_for: Option<(&'static str, Option<Holder>)>,
}

/// One device's observer.
pub(crate) struct SeatWatcher<'a> {
    watcher: &'a Watcher,
    number: usize,
}

impl Watcher {
    /// For so many cases on so many devices.
    pub(crate) fn new(total: usize, devices: usize, budget: Duration, cache: String, hidden: bool) -> Self {
        let show = match (hidden, std::io::stderr().is_terminal()) {
            (true, _) => Show::Nowhere,
            (false, true) => Show::Terminal(crate::progress::bar(total as u64, false)),
            (false, false) => Show::Lines(Mutex::new((Instant::now() + FIRST_STEP, FIRST_STEP))),
        };
        let seats = (0..devices).map(|_| Seat::default()).collect();
        let state = Mutex::new(State { total, seats, ..State::default() });
        Self { show, state, budget, start: Instant::now(), cache }
    }

    /// The observer of a device.
    pub(crate) fn seat(&self, number: usize) -> SeatWatcher<'_> {
        SeatWatcher { watcher: self, number }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Time that passed while others were at work.
    pub(crate) fn waited(&self) -> Duration {
        self.state().waited
    }

    /// A line that stays.
    fn line(&self, text: &str) {
        match &self.show {
            Show::Nowhere => {}
            Show::Terminal(bar) => bar.println(text),
            // Nobody reads it any more, perhaps; the work is worth doing all the same.
            Show::Lines(_) => drop(writeln!(std::io::stderr(), "{text}")),
        }
    }

    /// Tells how far it is, if it is time to: called every now and then.
    pub(crate) fn tick(&self) {
        match &self.show {
            Show::Nowhere => {}
            Show::Terminal(bar) => bar.set_message(self.state().message(self.budget, self.start)),
            Show::Lines(due) => {
                let mut due = due.lock().unwrap_or_else(PoisonError::into_inner);
                let now = Instant::now();
                if now < due.0 {
                    return;
                }
                due.1 = (due.1 * 2).min(LAST_STEP);
                due.0 = now + due.1;
                let state = self.state();
                let told =
                    format!("tune: {} of {} done, {}", state.done, state.total, state.message(self.budget, self.start));
                drop(state);
                self.line(&told);
            }
        }
    }

    /// All is done: the terminal is left to others.
    pub(crate) fn finish(&self) {
        self.state().is_over = true;
        self.clear();
    }

    fn clear(&self) {
        if let Show::Terminal(bar) = &self.show {
            bar.finish_and_clear();
        }
    }

    /// What is kept of what was done, for who interrupts it. Nothing when it was done.
    pub(crate) fn interrupted(&self) -> Option<String> {
        let state = self.state();
        if state.is_over {
            return None;
        }
        self.clear();
        let kept = state.kept + state.won();
        let mut told = format!("interrupted: {kept} of {} cases are kept in {}", state.total, self.cache);
        for seat in state.seats.iter().filter(|seat| seat.lessons > 0) {
            let case = seat.case.as_deref().unwrap_or("the case under way");
            told.push_str(&format!(", and {} checks, failures and times of {case}", seat.lessons));
        }
        told.push_str("; the same command goes on from there");
        Some(told)
    }
}

impl State {
    /// Cases of the tasks under way that have their records.
    fn won(&self) -> usize {
        self.seats.iter().map(|seat| seat.won.len()).sum()
    }

    /// How long the rest takes, as far as it can be told: by what the cases before took, and by the budget at most.
    fn left(&self, budget: Duration, elapsed: Duration) -> String {
        let devices = self.seats.len().max(1) as u32;
        let most = budget.saturating_sub(elapsed.saturating_sub(self.waited / devices)).as_secs_f64();
        if most < 0.5 {
            return "past its time".to_owned();
        }
        let about = |seconds: f64| match seconds {
            s if s < 120.0 => format!("{s:.0} s"),
            s if s < 7200.0 => format!("{:.0} min", s / 60.0),
            s => format!("{:.1} h", s / 3600.0),
        };
        if self.tuned == 0 {
            return format!("at most {} left", about(most));
        }
        let under_way: f64 = self.seats.iter().filter_map(|s| s.began).map(|b| b.elapsed().as_secs_f64()).sum();
        let each = self.seconds / self.tuned as f64;
        let rest = (each * (self.total - self.done) as f64 - under_way).max(0.0) / f64::from(devices);
        format!("about {} left", about(rest.min(most)))
    }

    /// The time left, and what every device is at.
    fn message(&self, budget: Duration, start: Instant) -> String {
        let mut told = self.left(budget, start.elapsed());
        for Seat { case, doing, waits_for, .. } in &self.seats {
            let Some(case) = case else { continue };
            told.push_str("; ");
            match waits_for {
                Some((what, holder)) => told.push_str(&format!("{case} waits: {}", by(what, holder.as_ref()))),
                None => told.push_str(&format!("{case}: {doing}")),
            }
        }
        told
    }
}

/// What another process is at, which one it is, and what to do about that.
fn by(what: &str, holder: Option<&Holder>) -> String {
    match holder {
        Some(holder) => format!("{what} by {holder}; {}", holder.remedy()),
        None => format!("{what} by another process"),
    }
}

/// A case as people tell it from others.
fn name(case: &Case) -> String {
    format!("{} {}", case.problem, case.sizes())
}

impl SeatWatcher<'_> {
    fn with<T>(&self, change: impl FnOnce(&mut State, usize) -> T) -> T {
        change(&mut self.watcher.state(), self.number)
    }

    /// A task begins.
    pub(crate) fn begin(&self, task: &Task) {
        let (case, left) = match task {
            Task::Case(case) | Task::Contested(case, _) => (name(case), 1),
            Task::Together(cases) => match cases.as_slice() {
                [one] => (name(one), 1),
                several => (format!("{} sizes of {}", several.len(), several[0].problem), several.len()),
            },
        };
        let began = Some(Instant::now());
        self.with(|state, i| state.seats[i] = Seat { case: Some(case), left, began, ..Seat::default() });
    }

    /// A task ended, with so many records, so many of which were there before; or with an error.
    pub(crate) fn end(&self, outcome: Result<(usize, usize), String>) {
        let done = self.with(|state, i| {
            let seat = std::mem::take(&mut state.seats[i]);
            state.done += seat.left;
            state.kept += seat.won.len();
            if let Ok((kept, cached)) = outcome {
                state.tuned += kept - cached;
                if kept > cached {
                    state.seconds += seat.began.map_or(0.0, |b| b.elapsed().as_secs_f64());
                }
            }
            state.done
        });
        if let Show::Terminal(bar) = &self.watcher.show {
            bar.set_position(done as u64);
        }
        if let Err(why) = outcome {
            self.watcher.line(&why);
        }
    }

    fn doing(&self, text: String) {
        self.with(|state, i| state.seats[i].doing = text);
        if let Show::Terminal(bar) = &self.watcher.show {
            let state = self.watcher.state();
            bar.set_message(state.message(self.watcher.budget, self.watcher.start));
        }
    }

    /// A case has its record, which is told and is kept whatever comes next.
    fn won(&self, record: &Record, cached: bool) {
        let (number, total) = self.keeps(&record.key);
        self.watcher.line(&format!("[{number}/{total}] {}", winner(record, cached)));
    }

    /// Which one of how many it is that the cache has got.
    fn keeps(&self, key: &RecordKey) -> (usize, usize) {
        self.with(|state, i| {
            let seat = &mut state.seats[i];
            seat.lessons = 0;
            if !seat.won.contains(key) {
                seat.won.push(key.clone());
            }
            (state.done + state.won(), state.total)
        })
    }
}

impl Observer for SeatWatcher<'_> {
    fn event(&self, event: &Event<'_>) {
        match event {
            Event::Phase { phase, .. } => self.doing(phase.name().to_owned()),
            Event::Space { total, legal, chosen } => {
                self.doing(format!("{chosen} of {legal} schedules that fit ({total} in the space)"));
            }
            Event::Compiled { schedule, done, total } => {
                tracing::debug!(%schedule, "compiled");
                self.doing(format!("compile {done}/{total} {schedule}"));
            }
            Event::Checked { schedule, done, total } => {
                tracing::debug!(%schedule, "right");
                self.doing(format!("check {done}/{total} {schedule}"))
            }
            Event::Timed { schedule, round, us } => {
                self.doing(format!("round {round}: {schedule} {us:.0} us"));
            }
            Event::Failed { schedule, stage, reason } => {
                tracing::debug!(%schedule, %stage, reason, "a schedule failed");
            }
            Event::Waiting { what, holder, .. } => {
                let case = self.with(|state, i| {
                    state.seats[i].waits_for = Some((what, holder.cloned()));
                    state.seats[i].case.clone().unwrap_or_default()
                });
                self.watcher.line(&format!("{case} waits: {}", by(what, *holder)));
            }
            Event::Passed { holder } => {
                self.watcher.line(&format!("not waiting any longer for {holder}: it is stopped and measures nothing"));
            }
            Event::Waited { duration } => self.with(|state, i| {
                state.seats[i].waits_for = None;
                state.waited += *duration;
            }),
            Event::Learnt { lessons } => self.with(|state, i| state.seats[i].lessons = *lessons),
            Event::Resumed { lessons } => {
                let case = self.with(|state, i| {
                    state.seats[i].lessons = *lessons;
                    state.seats[i].case.clone().unwrap_or_default()
                });
                let told = "checks, failures and times of a tuner that was cut short are taken over";
                self.watcher.line(&format!("{case}: {lessons} {told}"));
            }
            Event::Cached(record) => self.won(record, true),
            Event::Winner(record) => self.won(record, false),
            Event::Dropped { .. } => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashtune::{Mask, Shape};
    use flashtune_cache::{DeviceFingerprint, Launches};
    use flashtune_codegen::{Arch, ShapeBucket};

    #[test]
    fn time_left_is_bounded_by_the_budget_and_learns_from_cases() {
        let mut state = State { total: 10, seats: vec![Seat::default()], ..State::default() };
        let seconds = Duration::from_secs;
        assert_eq!(state.left(seconds(90), seconds(0)), "at most 90 s left");
        // What others took does not count.
        state.waited = seconds(30);
        assert_eq!(state.left(seconds(90), seconds(40)), "at most 80 s left");
        state.waited = seconds(0);
        (state.done, state.tuned, state.seconds) = (4, 2, 8.0);
        assert_eq!(state.left(seconds(90), seconds(10)), "about 24 s left");
        assert_eq!(state.left(seconds(30), seconds(10)), "about 20 s left");
        state.seats.push(Seat::default());
        assert_eq!(state.left(seconds(90), seconds(10)), "about 12 s left");
        assert_eq!(state.left(seconds(8000), seconds(0)), "about 12 s left");
        assert_eq!(state.left(seconds(10), seconds(11)), "past its time");
        state.seconds = 8e4;
        assert_eq!(state.left(seconds(80_000), seconds(0)), "about 22.2 h left");
    }

    /// The record of a case of so many rows on some device.
    fn key(case: &Case, q_len: u32) -> RecordKey {
        let (name, driver) = ("a device".to_owned(), "1".to_owned());
        let arch: Arch = "sm_90a".parse().unwrap();
        let device = DeviceFingerprint { arch, name, units: 132, memory_bytes: 1 << 37, cache_bytes: 1 << 25, driver };
        let shape = Shape { batch: 1, heads: 8, kv_heads: 8, q_len, kv_len: q_len, mask: Mask::Causal };
        RecordKey { device, problem: case.problem, bucket: ShapeBucket::of(&shape), launches: Launches::Eager }
    }

    #[test]
    fn winners_count_as_kept_before_their_task_ends() {
        let watcher = Watcher::new(4, 2, Duration::from_secs(9), "/cache".to_owned(), true);
        let case = crate::cases::default_case();
        let seats = [watcher.seat(0), watcher.seat(1)];
        seats[0].begin(&Task::Together(vec![case; 3]));
        seats[1].begin(&Task::Case(case));
        let kept = || watcher.interrupted().unwrap().split_once(" cases").unwrap().0.to_owned();
        assert_eq!(seats[0].keeps(&key(&case, 64)), (1, 4));
        assert_eq!(kept(), "interrupted: 1 of 4");
        assert_eq!(seats[1].keeps(&key(&case, 4096)), (2, 4));
        assert_eq!(seats[0].keeps(&key(&case, 1024)), (3, 4));
        // The second pass of sizes that are tuned together keeps nothing that was not kept before.
        assert_eq!(seats[0].keeps(&key(&case, 64)), (3, 4));
        assert_eq!(kept(), "interrupted: 3 of 4");
        // What was kept before an error stays kept.
        seats[0].end(Err("the device was lost".to_owned()));
        seats[1].end(Ok((1, 0)));
        assert_eq!(kept(), "interrupted: 3 of 4");
    }

    #[test]
    fn what_is_interrupted_says_what_is_kept() {
        let watcher = Watcher::new(3, 1, Duration::from_secs(9), "/cache".to_owned(), true);
        assert_eq!(
            watcher.interrupted().unwrap(),
            "interrupted: 0 of 3 cases are kept in /cache; the same command goes on from there"
        );
        let seat = watcher.seat(0);
        let case = crate::cases::default_case();
        seat.begin(&Task::Case(case));
        seat.keeps(&key(&case, 1024));
        seat.end(Ok((1, 0)));
        seat.begin(&Task::Case(case));
        seat.event(&Event::Resumed { lessons: 5 });
        seat.event(&Event::Learnt { lessons: 7 });
        let told = watcher.interrupted().unwrap();
        let expected = format!("1 of 3 cases are kept in /cache, and 7 checks, failures and times of {}", name(&case));
        assert!(told.contains(&expected), "{told}");
        watcher.finish();
        assert_eq!(watcher.interrupted(), None);
    }
}

//! A tuning's events, on a progress bar.

use flashtune::tuner::{Event, Observer};
use indicatif::ProgressBar;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Shows a job's events on a progress bar.
pub struct Watcher {
    pub bar: ProgressBar,
    /// Time that passed while others were at work: it does not count against the budget.
    pub waited: Mutex<Duration>,
}

impl Watcher {
    pub fn waited(&self) -> Duration {
        *self.waited.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Observer for Watcher {
    fn event(&self, event: &Event<'_>) {
        match event {
            Event::Phase { phase, .. } => self.bar.set_message(phase.name()),
            Event::Space { total, legal, chosen } => {
                self.bar.set_message(format!("{chosen} of {legal} schedules that fit ({total} in the space)"));
            }
            Event::Compiled { schedule, done, total } => {
                tracing::debug!(%schedule, "compiled");
                self.bar.set_message(format!("compile {done}/{total} {schedule}"));
            }
            Event::Checked { schedule, done, total } => {
                tracing::debug!(%schedule, "right");
                self.bar.set_message(format!("check {done}/{total} {schedule}"))
            }
            Event::Timed { schedule, round, us } => {
                self.bar.set_message(format!("round {round}: {schedule} {us:.0} us"));
            }
            Event::Failed { schedule, stage, reason } => {
                tracing::debug!(%schedule, %stage, reason, "a schedule failed");
            }
            Event::Waiting { what } => {
                tracing::info!("waiting: {what}");
                self.bar.set_message(format!("waiting: {what}"));
            }
            Event::Waited { duration } => {
                *self.waited.lock().unwrap_or_else(PoisonError::into_inner) += *duration;
            }
            Event::Resumed { lessons } => {
                tracing::info!(lessons, "going on with a job that was cut short");
                self.bar.set_message(format!("going on with a job that was cut short ({lessons} results are known)"));
            }
            Event::Cached(_) | Event::Dropped { .. } | Event::Winner(_) => {}
        }
    }
}

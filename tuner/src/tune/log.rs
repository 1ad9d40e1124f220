//! What ran when in a job, as it happens.

use flashtune_cache::{Activity, Span, Timeline};
use flashtune_codegen::Schedule;
use std::time::{Duration, Instant};

/// Spans are kept up to here, so that jobs of thousands of trials stay small in the journal.
const MOST: usize = 20_000;

/// The spans of a job.
#[derive(Debug)]
pub(super) struct Log {
    started: Instant,
    spans: Vec<Span>,
}

impl Log {
    pub(crate) fn new() -> Self {
        Self { started: Instant::now(), spans: Vec::new() }
    }

    /// Something that began then and ends now, on the device or while waiting for it.
    pub(crate) fn until_now(&mut self, activity: Activity, schedule: Option<usize>, began: Instant, samples: usize) {
        self.add(activity, schedule, 0, (began, Instant::now()), samples);
    }

    pub(crate) fn add(
        &mut self,
        activity: Activity,
        schedule: Option<usize>,
        lane: usize,
        (began, ended): (Instant, Instant),
        samples: usize,
    ) {
        if self.spans.len() < MOST {
            let us = |d: Duration| d.as_micros() as u64;
            self.spans.push(Span {
                activity,
                schedule: schedule.map(|s| s as u32),
                lane: lane as u32,
                start_us: us(began.saturating_duration_since(self.started)),
                duration_us: us(ended.saturating_duration_since(began)),
                samples: samples as u32,
            });
        }
    }

    /// All of it, for the journal.
    pub(crate) fn timeline(&self, unix_time: u64, schedules: Vec<Schedule>) -> Timeline {
        let mut spans = self.spans.clone();
        spans.sort_by_key(|s| (s.start_us, s.lane));
        Timeline { unix_time, schedules, spans }
    }

    /// Seconds in which something was compiled.
    pub(crate) fn compile_seconds(&self) -> f64 {
        let mut spans: Vec<&Span> = self.spans.iter().filter(|s| s.activity == Activity::Compile).collect();
        spans.sort_by_key(|s| s.start_us);
        let (mut total, mut until) = (0, 0);
        for span in spans {
            let end = span.start_us + span.duration_us;
            total += end.saturating_sub(until.max(span.start_us));
            until = until.max(end);
        }
        total as f64 / 1e6
    }

    /// Seconds since the first kernel was there in which the device waited for compilers.
    pub(crate) fn waited_seconds(&self) -> f64 {
        let waits = self.spans.iter().filter(|s| s.activity == Activity::Wait);
        waits.map(|s| s.duration_us).sum::<u64>() as f64 / 1e6
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_overlaps_counts_once_and_only_compilations_count() {
        let mut log = Log::new();
        let at = |ms: u64| log.started + Duration::from_millis(ms);
        let spans = [(1, 0, 100), (2, 50, 120), (1, 200, 250), (2, 210, 220)].map(|(lane, a, b)| (lane, at(a), at(b)));
        let wait = (at(300), at(400));
        for (lane, began, ended) in spans {
            log.add(Activity::Compile, Some(3), lane, (began, ended), 0);
        }
        log.add(Activity::Wait, None, 0, wait, 0);
        assert!((log.compile_seconds() - 0.17).abs() < 1e-9 && (log.waited_seconds() - 0.1).abs() < 1e-9);
        let timeline = log.timeline(7, Vec::new());
        assert!(timeline.spans.is_sorted_by_key(|s| s.start_us) && timeline.spans.len() == 5);
    }
}

//! What earlier tunings of the same problem say about this one: where to look, never what to believe.

use crate::Result;
use crate::worker::TOOK_TOO_LONG;
use flashtune_cache::{Record, RecordKey, Stage, Store, TrialResult};
use flashtune_codegen::Schedule;
use std::collections::HashMap;

/// Earlier winners to try again.
const SEEDS: usize = 6;

/// Results of neighbours: other sizes of the problem, other devices, other templates.
#[derive(Debug, Clone, Default)]
pub(crate) struct Past {
    /// Winners and runners-up, those of the nearest first. Each is compiled, checked and timed like any other.
    pub seeds: Vec<Schedule>,
    /// Schedules that these very templates and this compiler gave no kernel for, with the reason; sizes do not matter to
    /// that.
    pub failed: HashMap<Schedule, (Stage, String)>,
}

impl Past {
    /// Reads the journal.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn read(store: &Store, key: &RecordKey, templates: &str, compiler: &str) -> Result<Self> {
        let mut neighbours: Vec<Record> = store.records()?;
        neighbours.retain(|r| r.key.problem == key.problem && r.key.device.arch == key.device.arch);
        let distance = |r: &Record| {
            let foreign = r.key.device != key.device;
            let away = if foreign { r.key.device.distance(&key.device) } else { 0.0 };
            (foreign, r.key.bucket.distance(&key.bucket) + away)
        };
        neighbours.sort_by(|a, b| {
            let ((a, x), (b, y)) = (distance(a), distance(b));
            a.cmp(&b).then(x.total_cmp(&y))
        });
        let mut past = Self::default();
        // All winners before the first runner-up.
        let winners = neighbours.iter().map(|r| r.schedule);
        let others = neighbours.iter().flat_map(|r| r.finalists.iter().map(|f| f.schedule));
        for schedule in winners.chain(others) {
            if past.seeds.len() < SEEDS && !past.seeds.contains(&schedule) {
                past.seeds.push(schedule);
            }
        }
        for neighbour in neighbours.iter().filter(|r| r.key.device == key.device) {
            for trial in store.trials(&neighbour.key)? {
                if let TrialResult::Failed { stage: stage @ (Stage::Render | Stage::Compile), reason } = trial.result
                    && trial.templates == templates
                    && trial.compiler == compiler
                    // That is said of the machine's load as much as of the schedule.
                    && !reason.contains(TOOK_TOO_LONG)
                {
                    past.failed.insert(trial.schedule, (stage, reason));
                }
            }
        }
        Ok(past)
    }
}

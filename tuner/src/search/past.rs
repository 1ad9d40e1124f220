//! What earlier tunings of the same problem say about this one: where to look, never what to believe.

use crate::Result;
use crate::worker::TOOK_TOO_LONG;
use flashtune_cache::{Record, RecordKey, Stage, Store, TrialResult};
use flashtune_codegen::{Schedule, Shape, TemplateSet};
use std::collections::HashMap;

/// Earlier winners to try again.
const SEEDS: usize = 6;
/// Sizes further away than this tell little of how schedules compare ([`flashtune_codegen::ShapeBucket::distance`]:
/// both lengths four times apart).
const REACH: f64 = 6.0;
/// Fewer measurements than this lead nobody.
const FEW: usize = 6;

/// Results of neighbours: other sizes of the problem, other devices, other templates.
#[derive(Debug, Clone, Default)]
pub(crate) struct Past {
    /// Winners and runners-up, those of the nearest first. Each is compiled, checked and timed like any other.
    pub seeds: Vec<Schedule>,
    /// Schedules that these very templates and this compiler gave no kernel for, with the reason; sizes do not matter
    /// to that.
    pub failed: HashMap<Schedule, (Stage, String)>,
    /// What was measured at the nearest sizes.
    pub neighbour: Option<Neighbour>,
}

/// Measurements of one tuning on this device, with these templates and this compiler: its kernels are the ones that
/// would be compiled here.
#[derive(Debug, Clone)]
pub(crate) struct Neighbour {
    /// The sizes that were timed.
    pub shape: Shape,
    /// Median microseconds of each, the fastest first.
    pub times: Vec<(Schedule, f64)>,
}

impl Past {
    /// All schedules that are of interest here.
    pub(crate) fn schedules(&self) -> impl Iterator<Item = &Schedule> {
        let measured = self.neighbour.iter().flat_map(|n| n.times.iter().map(|(s, _)| s));
        self.seeds.iter().chain(measured)
    }

    /// Reads the journal.
    ///
    /// # Errors
    /// When it cannot be read.
    pub(crate) fn read(store: &Store, key: &RecordKey, templates: &TemplateSet, compiler: &str) -> Result<Self> {
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
            let near = past.neighbour.is_none() && neighbour.key.bucket.distance(&key.bucket) <= REACH;
            let mut times = HashMap::new();
            for trial in store.trials(&neighbour.key)? {
                if trial.templates != templates.hash_of(trial.schedule.family()) || trial.compiler != compiler {
                    continue;
                }
                if let TrialResult::Timed { median_us, .. } = trial.result
                    && median_us > 0.0
                {
                    times.insert(trial.schedule, median_us);
                }
                if let TrialResult::Failed { stage: stage @ (Stage::Render | Stage::Compile), reason } = trial.result
                    // That is said of the machine's load as much as of the schedule.
                    && !reason.contains(TOOK_TOO_LONG)
                {
                    past.failed.insert(trial.schedule, (stage, reason));
                }
            }
            if near && times.len() >= FEW {
                let mut times: Vec<_> = times.into_iter().collect();
                times.sort_by(|a, b| a.1.total_cmp(&b.1).then(a.0.cmp(&b.0)));
                past.neighbour = Some(Neighbour { shape: neighbour.provenance.shape, times });
            }
        }
        Ok(past)
    }
}

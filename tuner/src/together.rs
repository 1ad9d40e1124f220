//! Few kernels for many sizes: one problem is tuned for several classes of sizes at once, the best of each are raced in
//! all of them, and the fewest are kept that come within 3 % of the best everywhere.

use crate::tune::STORE_PATIENCE;
use crate::{Job, Observer, Outcome, Result, Runner, Search, tune};
use flashtune_cache::{ArtifactFiles, CacheDir, Finalist, Store, Trial, TrialResult};
use flashtune_codegen::{Schedule, TemplateSet};

/// What a kernel may lose against the best one of a class.
const LOSS: f64 = 1.03;
/// The least that who left a race early is taken to be behind.
const BEHIND: f64 = 1.01;
/// Of every class, so many of the best are raced in the others.
const BEST_OF_EACH: usize = 2;

/// Tunes jobs of one problem and different sizes, and lets as few kernels as possible win. Kernels are compiled once,
/// whatever the number of classes. Classes whose records are all there already are left as they are.
///
/// # Errors
/// Those of [`tune`], of the first job that fails; records of those before it are kept.
pub fn tune_together(
    runner: &mut Runner,
    templates: &TemplateSet,
    dir: &CacheDir,
    jobs: &[Job],
    observer: &dyn Observer,
) -> Result<Vec<Outcome>> {
    let half = |job: &Job| Job { budget: job.budget / 2, ..job.clone() };
    let mut outcomes = Vec::new();
    for job in jobs {
        outcomes.push(tune(runner, templates, dir, &half(job), observer)?);
    }
    if outcomes.iter().all(|o| o.cached) {
        return Ok(outcomes);
    }
    let mut pool: Vec<Schedule> = Vec::new();
    for finalist in outcomes.iter().flat_map(|o| o.record.finalists.iter().take(BEST_OF_EACH)) {
        if !pool.contains(&finalist.schedule) {
            pool.push(finalist.schedule);
        }
    }
    for (job, outcome) in jobs.iter().zip(&mut outcomes) {
        let again = Job { search: Search::Only(pool.clone()), force: true, ..half(job) };
        *outcome = tune(runner, templates, dir, &again, observer)?;
    }

    let times: Vec<Vec<Option<f64>>> =
        pool.iter().map(|s| outcomes.iter().map(|o| time(&o.record.finalists, &o.trials, s)).collect()).collect();
    let chosen = cover(&times);
    let store = Store::open_within(dir, STORE_PATIENCE)?;
    for (class, outcome) in outcomes.iter_mut().enumerate() {
        let timed = chosen.iter().filter_map(|&k| Some((k, times[k][class]?)));
        let Some((kernel, _)) = timed.min_by(|a, b| a.1.total_cmp(&b.1)) else { continue };
        crown(outcome, &pool[kernel]);
        store.put_record(&outcome.record)?;
    }
    store.publish(&ArtifactFiles::new(dir))?;
    Ok(outcomes)
}

/// What a schedule takes in a class. Who left the race before its final was behind by then, whatever its own median
/// says: the clocks of its few rounds may have been others than those of the final.
fn time(finalists: &[Finalist], trials: &[Trial], s: &Schedule) -> Option<f64> {
    if let Some(f) = finalists.iter().find(|f| f.schedule == *s) {
        return Some(f.median_us);
    }
    let TrialResult::Timed { median_us, .. } = &trials.iter().find(|t| t.schedule == *s)?.result else { return None };
    let best = finalists.iter().map(|f| f.median_us).fold(f64::INFINITY, f64::min);
    Some(if best.is_finite() { median_us.max(best * BEHIND) } else { *median_us })
}

/// Makes a schedule that was timed the winner of its record.
fn crown(outcome: &mut Outcome, schedule: &Schedule) {
    let Outcome { record, trials, .. } = outcome;
    let Some(trial) = trials.iter().find(|t| t.schedule == *schedule) else { return };
    let (Some(artifact), TrialResult::Timed { median_us, p10_us, p90_us, samples, max_error, .. }) =
        (trial.artifact, &trial.result)
    else {
        return;
    };
    if !record.finalists.iter().any(|f| f.schedule == *schedule) {
        record.finalists.push(Finalist {
            schedule: *schedule,
            median_us: *median_us,
            p10_us: *p10_us,
            p90_us: *p90_us,
            samples: *samples,
            // It was in no final.
            rounds_ns: Vec::new(),
            max_error: *max_error,
            is_default: false,
        });
        record.finalists.sort_by(|a, b| a.median_us.total_cmp(&b.median_us));
    }
    (record.schedule, record.artifact) = (*schedule, artifact);
}

/// The fewest kernels of which one is within [`LOSS`] of the best in every class, by `times[kernel][class]`: greedily,
/// the one that serves the most classes first, among equals the one that loses the least.
fn cover(times: &[Vec<Option<f64>>]) -> Vec<usize> {
    let classes = times.first().map_or(0, Vec::len);
    let best = |class: usize| times.iter().filter_map(|t| t[class]).fold(f64::INFINITY, f64::min);
    let loss = |kernel: usize, class: usize| times[kernel][class].map(|us| us / best(class)).filter(|l| *l <= LOSS);
    let mut open: Vec<usize> = (0..classes).filter(|&c| best(c).is_finite()).collect();
    let mut chosen = Vec::new();
    while !open.is_empty() {
        let score = |kernel: usize| {
            let losses: Vec<f64> = open.iter().filter_map(|&c| loss(kernel, c)).collect();
            (losses.len(), -losses.iter().sum::<f64>())
        };
        let next = (0..times.len()).max_by(|&a, &b| {
            let ((n, x), (m, y)) = (score(a), score(b));
            // Among those that are alike the first.
            n.cmp(&m).then(x.total_cmp(&y)).then(b.cmp(&a))
        });
        let Some(next) = next else { break };
        open.retain(|&c| loss(next, c).is_none());
        chosen.push(next);
    }
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_left_a_race_early_is_behind_whatever_its_clocks_were() {
        let schedule = |unroll_kv| {
            Schedule::Cpu(flashtune_codegen::CpuSchedule {
                isa: flashtune_codegen::CpuIsa::Avx2,
                block_q: 64,
                block_kv: 64,
                unroll_q: 2,
                unroll_kv,
                threads: 0,
            })
        };
        let finalist = |s, median_us| Finalist {
            schedule: s,
            median_us,
            p10_us: median_us,
            p90_us: median_us,
            samples: 17,
            rounds_ns: Vec::new(),
            max_error: 0.0,
            is_default: false,
        };
        let timed = |s, median_us| Trial {
            schedule: s,
            templates: String::new(),
            compiler: String::new(),
            artifact: None,
            unix_time: 0,
            result: TrialResult::Timed {
                median_us,
                p10_us: median_us,
                p90_us: median_us,
                samples: 8,
                race_ns: Vec::new(),
                max_error: 0.0,
            },
        };
        let finalists = [finalist(schedule(1), 100.0), finalist(schedule(2), 104.0)];
        let trials = [timed(schedule(1), 97.0), timed(schedule(3), 96.0), timed(schedule(4), 110.0)];
        let time = |s| time(&finalists, &trials, &schedule(s));
        assert_eq!(
            [time(1), time(2), time(3), time(4), time(5)],
            [Some(100.0), Some(104.0), Some(101.0), Some(110.0), None]
        );
    }

    #[test]
    fn the_fewest_kernels_cover_every_class() {
        let t =
            |rows: &[[f64; 3]]| rows.iter().map(|r| r.map(|us| (us > 0.0).then_some(us)).to_vec()).collect::<Vec<_>>();
        // One that is never the best, and never far from it.
        assert_eq!(cover(&t(&[[10.0, 30.0, 30.0], [30.0, 10.0, 30.0], [30.0, 30.0, 10.0], [10.2, 10.2, 10.2]])), [3]);
        // Two are needed; the second class is served by both, and by the better of them.
        assert_eq!(cover(&t(&[[10.0, 10.0, 20.0], [20.0, 10.1, 10.0]])), [0, 1]);
        // One that fails somewhere.
        assert_eq!(cover(&t(&[[10.0, 0.0, 10.0], [10.1, 10.0, 11.0]])), [0, 1]);
        // A class that nothing was timed in asks for nothing.
        assert_eq!(cover(&t(&[[0.0, 10.0, 0.0]])), [0]);
        assert!(cover(&[]).is_empty());
    }
}

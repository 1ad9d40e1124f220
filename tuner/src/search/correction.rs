//! How far the cost model is off, learnt from what was measured: in general, for every value of every field, and in the
//! neighbourhood of each measurement.
//!
//! A cost model that misjudges one choice (an instruction set, the order of tiles) misjudges it everywhere; a few
//! measurements show that, and the ranking of all others follows.

use super::Map;

/// Reach of a measurement in steps.
const REACH: f64 = 2.0;
/// Measurements that a value of a field must have, as it were, against it: what was seen once may be chance.
const INERTIA: f64 = 0.3;
/// Sweeps of the fit over the fields; it has settled long before.
const SWEEPS: usize = 12;

/// What a space's measurements say about the cost model.
pub(super) struct Correction<'a> {
    map: &'a Map,
    overall: f64,
    /// By field and coordinate.
    effects: Vec<Vec<f64>>,
    /// What is left of each measurement.
    rest: Vec<(usize, f64)>,
}

impl<'a> Correction<'a> {
    /// Fits the logarithms of measured time over the cost model's, by schedule.
    pub(crate) fn fit(map: &'a Map, errors: &[(usize, f64)]) -> Self {
        let overall = errors.iter().map(|e| e.1).sum::<f64>() / errors.len().max(1) as f64;
        let mut rest: Vec<(usize, f64)> = errors.iter().map(|(i, e)| (*i, e - overall)).collect();
        let fields = errors.first().map_or(0, |(i, _)| map.point(*i).len());
        let mut effects = vec![vec![0.0; 256]; fields];
        for _ in 0..SWEEPS {
            for (field, effect) in effects.iter_mut().enumerate() {
                let (mut sums, mut counts) = (vec![0.0; 256], vec![0.0; 256]);
                for (i, left) in &rest {
                    let value = usize::from(map.point(*i)[field]);
                    sums[value] += left + effect[value];
                    counts[value] += 1.0;
                }
                for (i, left) in &mut rest {
                    let value = usize::from(map.point(*i)[field]);
                    *left += effect[value] - sums[value] / (counts[value] + INERTIA);
                }
                for value in 0..256 {
                    effect[value] = sums[value] / (counts[value] + INERTIA);
                }
            }
        }
        Self { map, overall, effects, rest }
    }

    /// The expected logarithm of time over cost of a schedule.
    pub(crate) fn at(&self, schedule: usize) -> f64 {
        let effects = self.map.point(schedule).iter().zip(&self.effects);
        let general = self.overall + effects.map(|(value, effect)| effect[usize::from(*value)]).sum::<f64>();
        // Without measurements near by, nothing is left to say.
        let (mut sum, mut weights) = (0.0, 1.0);
        for (i, left) in &self.rest {
            let weight = (-(self.map.steps(schedule, *i) as f64 / REACH).powi(2)).exp();
            sum += weight * left;
            weights += weight;
        }
        general + sum / weights
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashtune_codegen::{Arch, DType, Family, MaskKind, Problem, Schedule, SmArch, TileOrder};

    #[test]
    fn a_choice_that_the_model_misjudges_is_corrected_everywhere() {
        let problem = Problem::forward(DType::F16, 64, MaskKind::CAUSAL).unwrap();
        let arch = Arch::Sm(SmArch { number: 80, specific: false });
        let space: Vec<_> = Schedule::space(Family::ForwardSm80, &problem, arch).into_iter().take(600).collect();
        let map = Map::new(space.iter().copied());
        let slow = |s: &Schedule| matches!(s, Schedule::Sm80(s) if s.order == TileOrder::BlockMajor);
        // Everything takes three times as long as the cost model says, one order twice that.
        let error = |i: usize| 3f64.ln() + if slow(&space[i]) { 2f64.ln() } else { 0.0 };
        let seen: Vec<(usize, f64)> = (0..space.len()).step_by(29).map(|i| (i, error(i))).collect();
        assert!(seen.iter().any(|(i, _)| slow(&space[*i])) && seen.iter().any(|(i, _)| !slow(&space[*i])));
        let correction = Correction::fit(&map, &seen);
        for (i, schedule) in space.iter().enumerate() {
            assert!((correction.at(i) - error(i)).abs() < 0.2, "{schedule}: {} of {}", correction.at(i), error(i));
        }
        assert_eq!(Correction::fit(&map, &[]).at(0), 0.0);
    }
}

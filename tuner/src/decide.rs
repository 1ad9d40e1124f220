//! The final: paired re-measurement of the best few, and the decision.
//!
//! Single medians drift with clocks and neighbours; the ratio of two runs that follow each other does not. So the
//! finalists run in rounds, A B C D, then B C D A, ..., and what counts is the median of the ratios within rounds. A
//! challenger must beat the default by more than [`TIE`], and beyond doubt; otherwise the default wins. Challengers
//! that tie are decided by the cost model's order. So the same machine gives the same winner, run after run.
//!
//! Where the noise hides who is faster, the final goes on, until the ratios are known well enough ([`KNOWN`]) or the
//! patience is at its end; where they are hardly known then ([`Rounds::doubt`] above [`NOISE`]), there is no decision,
//! and nothing is stored.

use crate::race::{RaceEvent, Track, timed};
use crate::stats::{CERTAIN, LIKELY, median, median_bounds};
use std::time::Duration;

/// Ratios closer to 1 than this are ties: half of what repeated tunings may differ by.
pub(crate) const TIE: f64 = 0.005;
/// An advantage is beyond doubt when even the upper bound of the median ratio is this far below 1.
const BEYOND_DOUBT: f64 = TIE / 2.0;

/// A ratio that is known to within this much is known well enough: with what a tie may cost, 1 % is lost at most.
const KNOWN: f64 = TIE;
/// Who is ahead in a ratio that is not known to within this much must be so with more certainty: a final looks many
/// times, and such noise deceives one look in twenty by more than may be lost.
const CLOSE: f64 = 2.0 * TIE;

/// Ratios that are not known to within this much are hidden by noise.
pub(crate) const NOISE: f64 = 0.05;

/// Length of a final.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct FinalRules {
    /// Rounds that are run even past the deadline: fewer cannot beat the default beyond doubt.
    pub min_rounds: usize,
    /// Rounds before which no decision counts as clear, while there is time: they cost little beside the race, and who
    /// sampled all of its contenders as often as a final needs would pay for them with each.
    pub sure_rounds: usize,
    /// Rounds that are enough where it is calm, even if some ratio is so close to a tie that it is still in doubt.
    pub max_rounds: usize,
    /// Rounds that are enough to tell that noise hides who is faster.
    pub stubborn_rounds: usize,
    /// Rounds that are enough, whatever the noise.
    pub most_rounds: usize,
    /// Until when there is time for more than `max_rounds` so that the last percent is known.
    pub patience: Duration,
    /// When the final should end.
    pub deadline: Duration,
    /// When it must end, whatever `min_rounds` says: then the default wins.
    pub hard_deadline: Duration,
}

impl FinalRules {
    /// Whether so many rounds that leave so much in doubt are enough, at that time.
    fn is_enough(&self, rounds: usize, doubt: f64, now: Duration) -> bool {
        match doubt {
            ..=KNOWN => true,
            ..=NOISE => now >= self.patience,
            _ => rounds >= self.stubborn_rounds,
        }
    }
}

/// Times of the finalists, `rounds[r][f]` in microseconds.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct Rounds(pub Vec<Vec<f64>>);

impl Rounds {
    /// All times of finalist `f`.
    pub(crate) fn times(&self, f: usize) -> impl Iterator<Item = f64> + '_ {
        self.0.iter().map(move |round| round[f])
    }

    /// Without the times of finalist `f`.
    pub(crate) fn leave_out(&mut self, f: usize) {
        self.0.iter_mut().for_each(|round| {
            round.remove(f);
        });
    }

    /// Whether `a` is faster than `b` by more than a tie, beyond doubt.
    fn beats(&self, a: usize, b: usize) -> bool {
        let ratios = self.ratios(a, b);
        median(&ratios).is_some_and(|m| m < 1.0 - TIE) && median_bounds(&ratios, LIKELY).1 < 1.0 - BEYOND_DOUBT
    }

    /// Whether more rounds would hardly change if `a` beats `b`.
    fn is_clear(&self, a: usize, b: usize) -> bool {
        let ratios = self.ratios(a, b);
        let (low, high) = median_bounds(&ratios, LIKELY);
        let (low, high) = if (high - low) / 2.0 <= CLOSE { (low, high) } else { median_bounds(&ratios, CERTAIN) };
        high < 1.0 - TIE || low > 1.0 - TIE
    }

    /// The finalist with the lowest median ratio to `base` among those that beat it.
    fn fastest(&self, count: usize, base: usize) -> Option<usize> {
        let beats = (0..count).filter(|&f| f != base && self.beats(f, base));
        let ratio = |f: usize| median(&self.ratios(f, base)).unwrap_or(f64::INFINITY);
        beats.min_by(|&a, &b| ratio(a).total_cmp(&ratio(b)))
    }

    /// Whether more rounds would hardly change the decision.
    fn is_decided(&self, count: usize, base: usize) -> bool {
        let others = |than: usize| (0..count).filter(move |&f| f != than);
        others(base).all(|f| self.is_clear(f, base))
            && self.fastest(count, base).is_none_or(|best| others(best).all(|f| self.is_clear(best, f)))
    }

    /// Half of the interval in which the least known of the ratios lies that the decision rests on; 0 when it is clear.
    pub(crate) fn doubt(&self, count: usize, base: usize) -> f64 {
        let best = self.fastest(count, base);
        let unclear = |a: usize, b: usize| a != b && !self.is_clear(a, b);
        let width = |a: usize, b: usize| {
            let (low, high) = median_bounds(&self.ratios(a, b), LIKELY);
            (high - low) / 2.0
        };
        let against_base = (0..count).filter(|&f| unclear(f, base)).map(|f| width(f, base));
        let against_best =
            best.into_iter().flat_map(|b| (0..count).filter(move |&f| unclear(b, f)).map(move |f| width(b, f)));
        against_base.chain(against_best).fold(0.0, f64::max)
    }

    /// Ratios of finalist `a` to finalist `b` within rounds.
    fn ratios(&self, a: usize, b: usize) -> Vec<f64> {
        self.0.iter().map(|round| round[a] / round[b]).collect()
    }
}

/// Times the finalists (contenders of the track) in paired rounds, until it is clear who beats `default` or the time is
/// up. One that fails is reported and leaves, and so do its times; the survivors are returned.
pub(crate) fn run_final(
    track: &mut dyn Track,
    finalists: &[usize],
    default: Option<usize>,
    rules: &FinalRules,
    on: &mut dyn FnMut(RaceEvent<'_>),
) -> (Vec<usize>, Rounds) {
    let mut alive = finalists.to_vec();
    let mut rounds = Rounds::default();
    let (mut round, mut next_look) = (0, 0);
    while alive.len() > 1 && round < rules.most_rounds {
        let now = track.elapsed();
        if now >= rules.hard_deadline || now >= rules.deadline && round >= rules.min_rounds {
            break;
        }
        let base = alive.iter().position(|&c| Some(c) == default).unwrap_or(0);
        if round >= next_look {
            let is_decided = round >= rules.sure_rounds && rounds.is_decided(alive.len(), base);
            if is_decided || round >= rules.max_rounds && rules.is_enough(round, rounds.doubt(alive.len(), base), now) {
                break;
            }
            // The more there are, the less one more changes.
            next_look = round + if round < rules.max_rounds { 1 } else { round / 8 };
            if round < rules.stubborn_rounds {
                next_look = next_look.min(rules.stubborn_rounds);
            }
        }
        let mut times = vec![0.0; alive.len()];
        let mut failed = Vec::new();
        for step in 0..alive.len() {
            let f = (step + round) % alive.len();
            match timed(track, alive[f]) {
                Ok(us) => {
                    times[f] = us;
                    on(RaceEvent::Timed { contender: alive[f], round, us });
                }
                Err(reason) => {
                    on(RaceEvent::Failed { contender: alive[f], reason: &reason });
                    failed.push(f);
                }
            }
        }
        rounds.0.push(times);
        // Removing by index goes from the back.
        failed.sort_unstable();
        for f in failed.into_iter().rev() {
            alive.remove(f);
            rounds.leave_out(f);
        }
        round += 1;
    }
    (alive, rounds)
}

/// The winner among finalists: an index into the rounds. `default` is the default's index; without one, the first is
/// the measure. `order` says who goes first among equals (lower is better).
pub(crate) fn decide(rounds: &Rounds, count: usize, default: Option<usize>, order: &[usize]) -> usize {
    let base = default.unwrap_or(0);
    let Some(best) = rounds.fastest(count, base) else { return base };
    // All that beat the default and tie with the best are equals. What is in doubt counts as measured: who calls all
    // equals that noise does not tell apart loses as much as it hides.
    let ties = |f: usize| median(&rounds.ratios(best, f)).is_some_and(|ratio| ratio >= 1.0 - TIE);
    let equals = (0..count).filter(|&f| f != base && rounds.beats(f, base) && ties(f));
    equals.min_by_key(|&f| order[f]).unwrap_or(best)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rounds(times: &[[f64; 3]]) -> Rounds {
        Rounds(times.iter().map(|t| t.to_vec()).collect())
    }

    const ORDER: [usize; 3] = [0, 1, 2];

    #[test]
    fn a_tie_within_half_a_percent_goes_to_the_default() {
        let r = rounds(&[[100.0, 99.6, 120.0]; 9]);
        assert_eq!(decide(&r, 3, Some(0), &ORDER), 0);
        assert_eq!(decide(&r, 3, Some(2), &ORDER), 0, "against a slow default the tie goes to the cost model's first");
    }

    #[test]
    fn a_clear_advantage_wins_although_the_machine_drifts() {
        // The clock falls by half over the rounds; within each round the second is 5 % faster.
        let r =
            Rounds((0..11).map(|i| [100.0, 95.0, 99.0].iter().map(|t| t * (1.0 + i as f64 * 0.1)).collect()).collect());
        assert_eq!(decide(&r, 3, Some(0), &ORDER), 1);
    }

    #[test]
    fn an_advantage_in_doubt_goes_to_the_default() {
        // Faster in the median, but slower in four rounds of nine.
        let mut times = vec![[100.0, 90.0, 100.0]; 5];
        times.extend([[100.0, 130.0, 100.0]; 4]);
        assert_eq!(decide(&rounds(&times), 3, Some(0), &ORDER), 0);
        // Too few rounds to be sure of anything.
        assert_eq!(decide(&rounds(&[[100.0, 50.0, 100.0]; 3]), 3, Some(0), &ORDER), 0);
    }

    #[test]
    fn challengers_that_tie_are_decided_by_the_fixed_order() {
        let r = rounds(&[[100.0, 80.0, 79.8]; 9]);
        assert_eq!(decide(&r, 3, Some(0), &ORDER), 1);
        assert_eq!(decide(&r, 3, Some(0), &[0, 2, 1]), 2);
        assert_eq!(decide(&rounds(&[[100.0, 80.0, 70.0]; 9]), 3, Some(0), &ORDER), 2);
    }

    #[test]
    fn noise_that_hides_a_ratio_is_told_from_a_close_race() {
        // 1 % of noise around a tie: not clear, and nothing is hidden.
        let close: Vec<_> = (0..75).map(|i| [100.0, 99.0 + (i * 7 % 5) as f64 * 0.25, 150.0]).collect();
        let close = rounds(&close);
        assert!(close.doubt(3, 0) < 0.01);
        // Either half or double.
        let noisy: Vec<_> = (0..75).map(|i| [100.0, if i % 2 == 0 { 50.0 } else { 200.0 }, 150.0]).collect();
        assert!(rounds(&noisy).doubt(3, 0) > NOISE);
        // As noisy, but slower beyond doubt.
        let slower: Vec<_> = (0..75).map(|i| [100.0, if i % 2 == 0 { 150.0 } else { 400.0 }, 150.0]).collect();
        assert_eq!(rounds(&slower).doubt(3, 0), 0.0);
        assert_eq!(rounds(&noisy).doubt(1, 0), 0.0, "one alone has nobody to be compared with");
    }

    #[test]
    fn without_rounds_the_default_stands() {
        assert_eq!(decide(&Rounds::default(), 2, Some(1), &[0, 1]), 1);
        assert_eq!(decide(&Rounds::default(), 2, None, &[0, 1]), 0);
    }
}

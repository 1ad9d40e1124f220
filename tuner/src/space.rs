//! Which schedules to try.

use crate::Result;
use crate::model::cost;
use flashtune_cache::DeviceFingerprint;
use flashtune_codegen::{Arch, Family, Kernel, Problem, Schedule, Shape, ShapeBucket};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

/// Share of the picks that the model does not make, against its blind spots.
const RANDOM_SHARE: f64 = 0.2;

/// The schedules to try, best guess first.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Space {
    /// Schedules before pruning.
    pub total: usize,
    /// Those that fit the device.
    pub legal: usize,
    /// Those to try: the default first, then by the model, then random ones.
    pub chosen: Vec<Kernel>,
}

/// Chooses at most `max_trials` schedules (at least the default) for a problem and shape.
///
/// # Errors
/// When no family computes the problem on the device; the reason is the last family's.
pub(crate) fn choose(
    problem: &Problem,
    shape: &Shape,
    device: &DeviceFingerprint,
    max_trials: usize,
    seed: u64,
) -> Result<Space> {
    let arch = device.arch;
    let families = families(problem, arch)?;
    let bucket = ShapeBucket::of(shape);
    let kernel = |schedule| Kernel { problem: *problem, schedule, arch };
    let default = kernel(Schedule::default_for(families[0], problem, arch, &bucket)?);

    let mut all: Vec<Kernel> = families.iter().flat_map(|f| Schedule::space(*f, problem, arch)).map(kernel).collect();
    all.retain(|k| k.schedule.is_worth(shape));
    all.push(default);
    all.sort_by_key(|k| k.schedule);
    all.dedup();
    let total = all.len();
    let mut ranked: Vec<(f64, Kernel)> =
        all.into_iter().filter(|k| k.check().is_ok()).map(|k| (cost(&k, shape, device), k)).collect();
    let legal = ranked.len();
    // Equal costs stay in the order of the schedules, which is the same everywhere.
    ranked.sort_by(|a, b| a.0.total_cmp(&b.0));

    let mut chosen = vec![default];
    let mut rest: Vec<Kernel> = ranked.into_iter().map(|(_, k)| k).filter(|k| *k != default).collect();
    let room = max_trials.max(1) - 1;
    if rest.len() > room {
        let by_model = room - (room as f64 * RANDOM_SHARE) as usize;
        let mut others = rest.split_off(by_model);
        let mut rng = StdRng::seed_from_u64(seed ^ 0x5c4e_d01e);
        // Half of the random picks from the better half of what is left, the others from anywhere.
        let from_better = (room - by_model).div_ceil(2);
        let mut better: Vec<Kernel> = others.drain(..others.len().div_ceil(2)).collect();
        better.shuffle(&mut rng);
        others.extend(better.split_off(from_better.min(better.len())));
        others.shuffle(&mut rng);
        rest.extend(better);
        rest.extend(others);
        rest.truncate(room);
    }
    chosen.extend(rest);
    Ok(Space { total, legal, chosen })
}

/// The families to search. The plain CUDA family is an oracle, not a contender: it is used only where no other is.
fn families(problem: &Problem, arch: Arch) -> Result<Vec<Family>> {
    let candidates = Family::candidates(problem, arch);
    let fast: Vec<Family> = candidates.iter().copied().filter(|f| *f != Family::ForwardNaive).collect();
    if !fast.is_empty() {
        return Ok(fast);
    }
    if candidates.is_empty() {
        for family in Family::ALL {
            family.supports(problem, arch)?;
        }
    }
    Ok(candidates)
}

/// A seed for inputs that differs from that of the picks.
pub(crate) fn input_seed(seed: u64) -> u64 {
    StdRng::seed_from_u64(seed).random()
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashtune_codegen::{CpuIsa, DType, Mask, MaskKind, SmArch};

    fn device(arch: Arch) -> DeviceFingerprint {
        DeviceFingerprint {
            arch,
            name: "paper".into(),
            units: 108,
            memory_bytes: 1 << 36,
            cache_bytes: 40 << 20,
            driver: "1".into(),
        }
    }

    fn shape(len: u32) -> Shape {
        Shape { batch: 1, heads: 16, kv_heads: 4, q_len: len, kv_len: len, mask: Mask::Causal }
    }

    fn problem(dtype: DType) -> Problem {
        Problem::forward(dtype, 128, MaskKind::CAUSAL).unwrap()
    }

    const SM80: Arch = Arch::Sm(SmArch { number: 80, specific: false });

    #[test]
    fn the_default_comes_first_and_everything_fits() {
        let space = choose(&problem(DType::Bf16), &shape(4096), &device(SM80), 60, 0).unwrap();
        let bucket = ShapeBucket::of(&shape(4096));
        let default = Schedule::default_for(Family::ForwardSm80, &problem(DType::Bf16), SM80, &bucket).unwrap();
        assert_eq!((space.chosen.len(), space.chosen[0].schedule), (60, default));
        assert!(space.total > space.legal && space.legal > 100, "{} {}", space.total, space.legal);
        assert!(space.chosen.iter().all(|k| k.check().is_ok() && k.schedule.family() == Family::ForwardSm80));
        let distinct: std::collections::BTreeSet<_> = space.chosen.iter().map(|k| k.schedule).collect();
        assert_eq!(distinct.len(), 60);
    }

    #[test]
    fn the_seed_decides_the_random_picks_and_nothing_else() {
        let choose = |seed| choose(&problem(DType::F16), &shape(1024), &device(SM80), 50, seed).unwrap().chosen;
        assert_eq!(choose(1), choose(1));
        let (a, b) = (choose(1), choose(2));
        let by_model = 1 + 49 - 9;
        assert_eq!(a[..by_model], b[..by_model]);
        assert_ne!(a[by_model..], b[by_model..]);
    }

    #[test]
    fn the_plain_family_serves_only_where_nothing_else_does() {
        let f32 = choose(&problem(DType::F32), &shape(1024), &device(SM80), 60, 0).unwrap();
        assert!(f32.chosen.iter().all(|k| k.schedule.family() == Family::ForwardNaive) && f32.chosen.len() == 1);
        let cpu = choose(&problem(DType::F32), &shape(1024), &device(Arch::Cpu(CpuIsa::Avx2)), 60, 0).unwrap();
        assert!(cpu.chosen.len() > 5 && cpu.chosen.iter().all(|k| k.schedule.family() == Family::ForwardCpu));
        let one = choose(&problem(DType::F32), &shape(1024), &device(Arch::Cpu(CpuIsa::Avx2)), 0, 0).unwrap();
        assert_eq!(one.chosen.len(), 1);
        let old = Arch::Sm(SmArch { number: 70, specific: false });
        assert!(choose(&problem(DType::F16), &shape(64), &device(old), 60, 0).is_err());
    }
}

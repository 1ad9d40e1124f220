//! The schedules that a search may try, in the order of the cost model.

use crate::Result;
use crate::cost::cost;
use flashtune_cache::DeviceFingerprint;
use flashtune_codegen::{Arch, CallSizes, Constraints, Family, Kernel, Paths, Problem, Purpose, Schedule, ShapeBucket};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::collections::HashSet;

/// The most schedules that a search looks at: the best by the cost model, and of the others an even sample. A space of
/// Hopper has ten times as many.
const MOST: usize = 6000;
const SAMPLE: usize = 2000;

/// The schedules that may be tried.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Space {
    /// Schedules before pruning.
    pub total: usize,
    /// Those that fit the device.
    pub legal: usize,
    /// Those that the search looks at, best guess first.
    pub kernels: Vec<Kernel>,
    /// The cost model's costs of these.
    pub costs: Vec<f64>,
    /// Which one is the default schedule.
    pub default: usize,
}

impl Space {
    /// The number of a schedule that may be tried.
    pub(crate) fn position(&self, schedule: &Schedule) -> Option<usize> {
        self.kernels.iter().position(|k| k.schedule == *schedule)
    }

    /// `count` schedules at even distances in the cost model's ranking, the default first: what a table is recorded
    /// from that is to show the whole space.
    pub(crate) fn sample(&self, count: usize) -> Vec<usize> {
        let (len, count) = (self.kernels.len(), count.clamp(1, self.kernels.len()));
        let even = (0..count).map(|i| i * len / count).filter(|i| *i != self.default);
        let mut chosen: Vec<usize> = std::iter::once(self.default).chain(even).collect();
        chosen.truncate(count);
        chosen
    }
}

/// The schedules for a problem and shape, `also` among them as far as they fit.
///
/// # Errors
/// When no family computes the problem on the device; the reason is the last family's. When those that do are not
/// allowed.
pub(crate) fn space(
    problem: &Problem,
    sizes: &CallSizes,
    device: &DeviceFingerprint,
    paths: &Paths,
    also: &[Schedule],
) -> Result<Space> {
    let (arch, shape) = (device.arch, &sizes.shape);
    let bucket = ShapeBucket::of_call(problem, sizes, device.units);
    let families = families(problem, arch, &bucket, paths)?;
    let kernel = |schedule| Kernel { problem: *problem, schedule, arch };
    let default = Schedule::default_within(families[0], problem, arch, &bucket, Constraints::NONE, device.units)?;
    let default = kernel(default);

    let mut all: Vec<Kernel> = families.iter().flat_map(|f| Schedule::space(*f, problem, arch)).map(kernel).collect();
    all.retain(|k| k.schedule.is_worth(shape));
    all.push(default);
    all.sort_by_key(|k| k.schedule);
    all.dedup();
    let total = all.len();
    let fits = |k: &Kernel| *k == default || k.check().is_ok();
    let mut ranked: Vec<(f64, Kernel)> = all.into_iter().filter(fits).map(|k| (cost(&k, shape, device), k)).collect();
    let legal = ranked.len();
    // Equal costs stay in the order of the schedules, which is the same everywhere.
    ranked.sort_by(|a, b| a.0.total_cmp(&b.0));
    if legal > MOST + SAMPLE {
        let rest = ranked.split_off(MOST);
        let step = rest.len() as f64 / SAMPLE as f64;
        let sample: HashSet<usize> = (0..SAMPLE).map(|i| (i as f64 * step) as usize).collect();
        let asked = |k: &Kernel| *k == default || also.contains(&k.schedule);
        ranked.extend(rest.into_iter().enumerate().filter(|(i, r)| sample.contains(i) || asked(&r.1)).map(|(_, r)| r));
    }
    let (costs, kernels): (Vec<f64>, Vec<Kernel>) = ranked.into_iter().unzip();
    let default = kernels.iter().position(|k| *k == default).expect("it was put in");
    Ok(Space { total, legal, kernels, costs, default })
}

/// The families to search. A plain one is an oracle, not a contender: it is used only where no fast one is.
fn families(problem: &Problem, arch: Arch, bucket: &ShapeBucket, paths: &Paths) -> Result<Vec<Family>> {
    let mut candidates = Family::candidates_for(problem, arch, bucket);
    candidates.retain(|f| f.unmet(bucket.pages.demands()).is_none());
    let (mut admitted, mut untried) = (Vec::new(), None);
    for family in candidates {
        match paths.admit(family, problem, arch) {
            Ok(()) => admitted.push(family),
            Err(e) => untried = untried.or(Some(e)),
        }
    }
    let candidates = admitted;
    let fast: Vec<Family> = candidates.iter().copied().filter(|f| f.purpose() == Purpose::Fast).collect();
    if !fast.is_empty() {
        return Ok(fast);
    }
    if let (true, Some(e)) = (candidates.is_empty(), untried) {
        return Err(e.into());
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
    use flashtune_codegen::{CpuIsa, DType, Mask, MaskKind, Shape, SmArch};

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
    fn everything_fits_and_the_default_is_there() {
        let space =
            space(&problem(DType::Bf16), &(&shape(4096)).into(), &device(SM80), &Paths::default(), &[]).unwrap();
        let bucket = ShapeBucket::of(&shape(4096));
        let default = Schedule::default_for(Family::ForwardSm80, &problem(DType::Bf16), SM80, &bucket).unwrap();
        assert_eq!(space.kernels[space.default].schedule, default);
        assert!(space.total > space.legal && space.legal > 100, "{} {}", space.total, space.legal);
        assert!(space.kernels.iter().all(|k| k.check().is_ok() && k.schedule.family() == Family::ForwardSm80));
        assert!(space.costs.is_sorted() && space.costs.len() == space.kernels.len());
        assert_eq!(space.position(&default), Some(space.default));
    }

    /// What of a space is dropped before anything is compiled: what does not fit, what is not worth it for the sizes,
    /// and of the rest what the cost model puts behind the first [`MOST`]. A sample of that is looked at all the same,
    /// and so it is in the tables.
    #[test]
    fn what_is_dropped_before_it_is_compiled_is_never_as_good_as_the_best() {
        for (name, table) in crate::search::tables() {
            let space = space(&table.problem, &(&table.shape).into(), &table.device, &Paths::default(), &[]).unwrap();
            let kept: HashSet<Schedule> = space.kernels.iter().take(MOST).map(|k| k.schedule).collect();
            let timed: Vec<(Schedule, f64)> =
                table.in_the_space().into_iter().filter_map(|(s, us)| Some((s, us?))).collect();
            let best = timed.iter().map(|t| t.1).fold(f64::INFINITY, f64::min);
            let (in_it, dropped): (Vec<_>, Vec<_>) = timed.into_iter().partition(|(s, _)| kept.contains(s));
            let ahead = dropped.iter().map(|t| t.1 / best).fold(f64::INFINITY, f64::min);
            let of_all: usize =
                families(&table.problem, table.device.arch, &ShapeBucket::of(&table.shape), &Paths::default())
                    .unwrap()
                    .iter()
                    .map(|f| Schedule::space(*f, &table.problem, table.device.arch).len())
                    .sum();
            println!(
                "{name}: {} of {of_all} kept ({} fit); of the table {} kept, {} dropped, the best of these {ahead:.3}x",
                kept.len(),
                space.legal,
                in_it.len(),
                dropped.len()
            );
            assert!(ahead > 1.02, "{name}: {ahead} of the best was dropped");
            assert!(table.device.arch.to_string() != "sm_90a" || kept.len() * 3 <= of_all, "{name}: {}", kept.len());
            assert!(in_it.iter().any(|t| t.1 == best), "{name}");
        }
    }

    /// `tune --only` of a pair of blocks did nothing, and said nothing: the cost model ranked it too far behind.
    #[test]
    fn what_is_asked_for_is_there_wherever_the_model_puts_it() {
        let hopper = Arch::Sm(SmArch { number: 90, specific: true });
        let all = Schedule::space(Family::ForwardSm90, &problem(DType::Bf16), hopper);
        let legal = |s: &Schedule| Kernel { problem: problem(DType::Bf16), schedule: *s, arch: hopper }.check().is_ok();
        let without =
            space(&problem(DType::Bf16), &(&shape(4096)).into(), &device(hopper), &Paths::default(), &[]).unwrap();
        let far = |s: &Schedule| s.is_worth(&shape(4096)) && legal(s) && without.position(s).is_none();
        let asked = all.into_iter().find(far).unwrap();
        let with =
            space(&problem(DType::Bf16), &(&shape(4096)).into(), &device(hopper), &Paths::default(), &[asked]).unwrap();
        assert!(with.position(&asked).is_some(), "{asked}");
    }

    #[test]
    fn a_sample_is_even_and_begins_with_the_default() {
        let space =
            space(&problem(DType::Bf16), &(&shape(4096)).into(), &device(SM80), &Paths::default(), &[]).unwrap();
        for count in [1, 2, 50, space.legal, usize::MAX] {
            let sample = space.sample(count);
            let distinct: std::collections::BTreeSet<_> = sample.iter().collect();
            assert_eq!((sample[0], distinct.len()), (space.default, sample.len()));
            assert!(
                sample.len() <= space.legal && sample.len() + 1 >= count.min(space.legal),
                "{count}: {}",
                sample.len()
            );
        }
    }

    #[test]
    fn the_plain_family_serves_only_where_nothing_else_does() {
        let f32 = space(&problem(DType::F32), &(&shape(1024)).into(), &device(SM80), &Paths::default(), &[]).unwrap();
        assert!(f32.kernels.iter().all(|k| k.schedule.family() == Family::ForwardNaive) && f32.kernels.len() == 1);
        let cpu = space(
            &problem(DType::F32),
            &(&shape(1024)).into(),
            &device(Arch::Cpu(CpuIsa::Avx2)),
            &Paths::default(),
            &[],
        )
        .unwrap();
        assert!(cpu.kernels.len() > 5 && cpu.kernels.iter().all(|k| k.schedule.family() == Family::ForwardCpu));
        let old = Arch::Sm(SmArch { number: 70, specific: false });
        assert!(space(&problem(DType::F16), &(&shape(64)).into(), &device(old), &Paths::default(), &[]).is_err());
    }
}

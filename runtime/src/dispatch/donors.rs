//! The plans of one problem that classes without a plan of their own are served from: the nearest one is found in less
//! than a microsecond, however many there are.

use super::plan::Plan;
use flashtune_codegen::{BucketPlace, Constraints, Family, ShapeBucket};
use std::sync::Arc;

/// A plan, with what is asked of it in every search.
struct Donor {
    place: BucketPlace,
    family: Family,
    plan: Arc<Plan>,
}

/// Plans for the same lengths.
struct Cell {
    /// The place of the first: all have its lengths.
    place: BucketPlace,
    donors: Vec<Donor>,
}

/// All plans of a problem: those that were measured, and the others, which serve only where none of these can.
pub(super) struct Donors {
    measured: Vec<Cell>,
    others: Vec<Cell>,
}

impl Donors {
    /// In whatever order they come: a search must have the same answer in every process.
    pub(crate) fn new(mut plans: Vec<Arc<Plan>>) -> Self {
        plans.sort_by_key(|p| (p.bucket.q_len, p.bucket.kv_len, p.bucket, p.kernel().schedule));
        let (measured, others) = plans.into_iter().partition(|p| p.status().is_measured());
        Self { measured: cells(measured), others: cells(others) }
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        [&self.measured, &self.others].into_iter().flatten().map(|cell| cell.donors.len()).sum()
    }

    /// Why none of them meets the demands.
    pub(crate) fn unmet(&self, demands: Constraints) -> &'static str {
        let families =
            [&self.measured, &self.others].into_iter().flatten().flat_map(|cell| &cell.donors).map(|d| d.family);
        families.filter_map(|f| f.unmet(demands)).map(|(_, why)| why).next().unwrap_or("they are all too far away")
    }

    /// The plan of the nearest sizes that meets the demands, and how many doublings it is away.
    pub(crate) fn nearest(&self, bucket: ShapeBucket, demands: Constraints) -> Option<(&Arc<Plan>, f64)> {
        let place = bucket.place();
        nearest(&self.measured, &place, demands).or_else(|| nearest(&self.others, &place, demands))
    }
}

/// Neighbours with equal lengths together.
fn cells(plans: Vec<Arc<Plan>>) -> Vec<Cell> {
    let mut cells: Vec<Cell> = Vec::new();
    for plan in plans {
        let (place, family) = (plan.bucket.place(), plan.kernel().schedule.family());
        let donor = Donor { place, family, plan };
        match cells.last_mut() {
            Some(cell) if cell.place.lengths_apart(&place) == 0.0 => cell.donors.push(donor),
            _ => cells.push(Cell { place, donors: vec![donor] }),
        }
    }
    cells
}

/// The cell with the nearest lengths first: nearly all others are too far by their lengths alone then.
fn nearest<'a>(cells: &'a [Cell], place: &BucketPlace, demands: Constraints) -> Option<(&'a Arc<Plan>, f64)> {
    let apart = |cell: &Cell| cell.place.lengths_apart(place);
    let first = cells.iter().min_by(|a, b| apart(a).total_cmp(&apart(b)))?;
    let mut found: Option<(&Arc<Plan>, f64)> = None;
    for cell in std::iter::once(first).chain(cells) {
        if found.is_some_and(|(_, least)| apart(cell) >= least) {
            continue;
        }
        for donor in cell.donors.iter().filter(|d| d.family.unmet(demands).is_none()) {
            let distance = donor.place.distance(place);
            if found.is_none_or(|(_, least)| distance < least) {
                found = Some((&donor.plan, distance));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dispatch::Status;
    use crate::dispatch::key::PlanKey;
    use flashtune_codegen::{Arch, Constraint, DType, Family, Kernel, MaskKind, Problem, Schedule};

    fn plan(bucket: ShapeBucket, status: Status) -> Arc<Plan> {
        let problem = Problem::forward(DType::Bf16, 64, MaskKind::CAUSAL).unwrap();
        let mut plan = Plan::for_tests(&PlanKey { problem, bucket, demands: Constraints::NONE });
        plan.choice.status = status;
        Arc::new(plan)
    }

    /// Buckets of all kinds, as of random sizes.
    fn buckets(count: u32, seed: u32) -> Vec<ShapeBucket> {
        let mut state = seed;
        let mut below = |n: u32| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 16) % n
        };
        let mut bucket = || ShapeBucket {
            parallel: 1 << below(9),
            group: 1 + below(12),
            q_len: 1 << below(15),
            kv_len: 1 << below(15),
            window: if below(3) == 0 { 1 << below(12) } else { 0 },
            ..Default::default()
        };
        (0..count).map(|_| bucket()).collect()
    }

    #[test]
    fn the_nearest_is_that_of_a_search_through_all() {
        for seed in 0..20 {
            let donors: Vec<_> = buckets(60, seed).into_iter().map(|b| plan(b, Status::Tuned)).collect();
            let wanted = buckets(50, 1000 + seed);
            let (set, mut reversed) = (Donors::new(donors.clone()), donors.clone());
            reversed.reverse();
            let reversed = Donors::new(reversed);
            assert_eq!(set.len(), 60);
            for bucket in wanted {
                let least = donors.iter().map(|d| d.bucket.distance(&bucket)).fold(f64::INFINITY, f64::min);
                let (found, distance) = set.nearest(bucket, Constraints::NONE).unwrap();
                assert_eq!((distance, found.bucket.distance(&bucket)), (least, least), "{bucket}");
                // Among equals too the order in which they came does not matter.
                assert_eq!(reversed.nearest(bucket, Constraints::NONE).unwrap().0.bucket, found.bucket, "{bucket}");
            }
        }
    }

    #[test]
    fn what_was_measured_goes_first_however_far() {
        let [far, near] =
            [1, 4096].map(|q_len| ShapeBucket { parallel: 8, group: 1, q_len, kv_len: 4096, ..Default::default() });
        let both = Donors::new(vec![plan(near, Status::Default), plan(far, Status::NearestShape)]);
        assert_eq!(both.nearest(near, Constraints::NONE).map(|(p, _)| p.bucket), Some(far));
        // What only a kernel on tensor cores has is none for rows that lie anywhere.
        let arch: Arch = "sm_80".parse().unwrap();
        let problem = Problem::forward(DType::Bf16, 64, MaskKind::CAUSAL).unwrap();
        let key = PlanKey { problem, bucket: near, demands: Constraints::NONE };
        let schedule = Schedule::default_for(Family::ForwardSm80, &problem, arch, &near).unwrap();
        let fast = Donors::new(vec![Arc::new(Plan::of_kernel(&key, Kernel { problem, schedule, arch }))]);
        assert!(fast.nearest(near, Constraints::NONE).is_some());
        assert!(fast.nearest(near, Constraint::Unaligned.into()).is_none());
        let one = Donors::new(vec![plan(near, Status::Default)]);
        assert_eq!(one.nearest(far, Constraints::NONE).map(|(p, d)| (p.bucket, d)), Some((near, 24.0)));
    }
}

//! Where schedules lie to each other: every field of a schedule is a coordinate.

use flashtune_codegen::{Family, Place, Schedule};
use std::collections::{BTreeMap, BTreeSet};

/// The schedules of a space as points. A coordinate is the rank of a field's value among those that occur, so that a
/// step of 1 is the next larger block, the other order, one stage more.
#[derive(Debug, Clone)]
pub(crate) struct Map {
    fields: usize,
    /// Coordinates, `fields` of them for every schedule.
    points: Vec<u8>,
    /// Whether the values of a field have an order; in the others all values are one step apart.
    ordered: Vec<bool>,
}

/// A field of a family's schedule.
type Field = (Family, &'static str);

impl Map {
    pub(crate) fn new(schedules: impl IntoIterator<Item = Schedule>) -> Self {
        // Fields of two families that share a name are two fields.
        let named = |s: &Schedule| s.places().into_iter().map(|(name, place)| ((s.family(), name), place)).collect();
        let all: Vec<BTreeMap<Field, Place>> = schedules.into_iter().map(|s| named(&s)).collect();
        let mut values: BTreeMap<Field, BTreeSet<&Place>> = BTreeMap::new();
        for (name, place) in all.iter().flatten() {
            values.entry(*name).or_default().insert(place);
        }
        // A field that is the same everywhere tells nothing.
        values.retain(|_, places| places.len() > 1);
        let ordered = values.values().map(|places| places.iter().all(|p| matches!(p, Place::Number(_)))).collect();
        let ranks: Vec<(Field, BTreeMap<&Place, u8>)> = values
            .into_iter()
            .map(|(name, places)| {
                (name, places.into_iter().enumerate().map(|(i, p)| (p, i.min(254) as u8 + 1)).collect())
            })
            .collect();
        // A schedule of another family lacks the field: rank 0.
        let rank = |point: &BTreeMap<Field, Place>, (name, ranks): &(Field, BTreeMap<&Place, u8>)| {
            point.get(name).map_or(0, |place| ranks[place])
        };
        let points = all.iter().flat_map(|point| ranks.iter().map(move |r| rank(point, r))).collect();
        Self { fields: ranks.len(), points, ordered }
    }

    /// The coordinates of a schedule.
    pub(crate) fn point(&self, i: usize) -> &[u8] {
        &self.points[i * self.fields..(i + 1) * self.fields]
    }

    /// Steps between two schedules of the space.
    pub(crate) fn steps(&self, a: usize, b: usize) -> u32 {
        let differ = self.point(a).iter().zip(self.point(b)).zip(&self.ordered);
        differ.map(|((x, y), ordered)| if *ordered { x.abs_diff(*y).into() } else { u32::from(x != y) }).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashtune_codegen::{Arch, CpuIsa, DType, MaskKind, Problem, SmArch};

    fn space(family: Family, arch: Arch) -> Vec<Schedule> {
        let problem = Problem::forward(DType::Bf16, 128, MaskKind::CAUSAL).unwrap();
        Schedule::space(family, &problem, arch)
    }

    #[test]
    fn every_schedule_has_a_place_of_its_own_and_neighbours() {
        let hopper = Arch::Sm(SmArch { number: 90, specific: true });
        for (family, arch) in [
            (Family::ForwardCpu, Arch::Cpu(CpuIsa::Avx2)),
            (Family::ForwardSm80, Arch::Sm(SmArch { number: 80, specific: false })),
            (Family::ForwardSm90, hopper),
        ] {
            let space: Vec<_> = space(family, arch).into_iter().take(600).collect();
            let map = Map::new(space.iter().copied());
            for i in 0..space.len() {
                let steps: Vec<u32> = (0..space.len()).map(|j| map.steps(i, j)).collect();
                assert_eq!(steps.iter().filter(|s| **s == 0).count(), 1, "{}", space[i]);
                assert_eq!(steps[i], 0);
                assert!(steps.iter().filter(|s| (1..=3).contains(*s)).count() > 1, "{}", space[i]);
                assert!(steps.iter().enumerate().all(|(j, s)| *s == map.steps(j, i)));
            }
        }
    }
}

//! Where schedules lie to each other: every field of a schedule is a coordinate.

use flashtune_codegen::Schedule;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// The schedules of a space as points. A coordinate is the rank of a field's value among those that occur, so that a step
/// of 1 is the next larger block, the other order, one stage more.
#[derive(Debug, Clone)]
pub(crate) struct Map {
    fields: usize,
    /// Coordinates, `fields` of them for every schedule.
    points: Vec<u8>,
    /// Whether the values of a field have an order; in the others all values are one step apart.
    ordered: Vec<bool>,
}

/// A value that can be compared with others of its field.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Place {
    /// Left out: no field's default is more than its other values.
    Default,
    Number(i64),
    Word(String),
}

impl Map {
    pub fn new(schedules: impl IntoIterator<Item = Schedule>) -> Self {
        let mut all: Vec<BTreeMap<String, Place>> = schedules.into_iter().map(|s| places(&s)).collect();
        let names: BTreeSet<String> = all.iter().flat_map(|place| place.keys().cloned()).collect();
        for place in &mut all {
            // Names begin with the family's.
            let family = place.keys().next().map_or("", |name| &name[..=name.rfind('.').unwrap_or(0)]).to_owned();
            for name in names.iter().filter(|name| name.starts_with(&family)) {
                place.entry(name.clone()).or_insert(Place::Default);
            }
        }
        let mut values: BTreeMap<&str, BTreeSet<&Place>> = BTreeMap::new();
        for (name, place) in all.iter().flatten() {
            values.entry(name).or_default().insert(place);
        }
        // A field that is the same everywhere tells nothing.
        values.retain(|_, places| places.len() > 1);
        let ordered = values.values().map(|places| places.iter().all(|p| !matches!(p, Place::Word(_)))).collect();
        let ranks: Vec<(&str, BTreeMap<&Place, u8>)> = values
            .into_iter()
            .map(|(name, places)| {
                (name, places.into_iter().enumerate().map(|(i, p)| (p, i.min(254) as u8 + 1)).collect())
            })
            .collect();
        // A schedule of another family lacks the field: rank 0.
        let rank = |point: &BTreeMap<String, Place>, (name, ranks): &(&str, BTreeMap<&Place, u8>)| {
            point.get(*name).map_or(0, |place| ranks[place])
        };
        let points = all.iter().flat_map(|point| ranks.iter().map(move |r| rank(point, r))).collect();
        Self { fields: ranks.len(), points, ordered }
    }

    /// The coordinates of a schedule.
    pub fn point(&self, i: usize) -> &[u8] {
        &self.points[i * self.fields..(i + 1) * self.fields]
    }

    /// Steps between two schedules of the space.
    pub fn steps(&self, a: usize, b: usize) -> u32 {
        let differ = self.point(a).iter().zip(self.point(b)).zip(&self.ordered);
        differ.map(|((x, y), ordered)| if *ordered { x.abs_diff(*y).into() } else { u32::from(x != y) }).sum()
    }
}

/// The fields of a schedule by name.
fn places(schedule: &Schedule) -> BTreeMap<String, Place> {
    let value = serde_json::to_value(schedule).expect("schedules are plain structs");
    let mut places = BTreeMap::new();
    collect("", &value, &mut places);
    places
}

fn collect(name: &str, value: &Value, places: &mut BTreeMap<String, Place>) {
    let place = match value {
        Value::Object(fields) => {
            fields.iter().for_each(|(field, value)| collect(&format!("{name}.{field}"), value, places));
            return;
        }
        Value::Number(n) => Place::Number(n.as_i64().unwrap_or(i64::MAX)),
        Value::Bool(b) => Place::Number((*b).into()),
        Value::String(word) => Place::Word(word.clone()),
        other => Place::Word(other.to_string()),
    };
    places.insert(name.to_owned(), place);
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashtune_codegen::{Arch, CpuIsa, DType, Family, MaskKind, Problem, SmArch};

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

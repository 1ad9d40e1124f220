//! Points that belong into one table and one chart.

use crate::model::{Point, Report};

/// What a group is looked at by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Many queries: TFLOP/s over the length.
    Prefill,
    /// Few queries: bytes per second against the copy ceiling.
    Decode,
    /// Cases with names, in the order in which they were measured: times.
    Named,
}

/// Points of one problem.
pub(crate) struct Group<'a> {
    pub(crate) kind: Kind,
    pub(crate) suite: &'a str,
    /// E.g. `bf16, head dim 128, causal`.
    pub(crate) title: String,
    /// In the order of their lengths.
    pub(crate) points: Vec<&'a Point>,
}

/// All points, each in one group; groups in order of appearance.
pub(crate) fn groups(report: &Report) -> Vec<Group<'_>> {
    let mut groups: Vec<Group> = Vec::new();
    for group in collect(&report.points, problem) {
        // Two points of one length need lines of their own.
        let lengths: std::collections::HashSet<_> = group.points.iter().map(|p| p.case.kv_len).collect();
        if group.kind == Kind::Prefill && lengths.len() < group.points.len() {
            groups.extend(collect(group.points.iter().copied(), |p| format!("{}, {}", problem(p), sizes(p))));
        } else {
            groups.push(group);
        }
    }
    for group in groups.iter_mut().filter(|group| group.kind != Kind::Named) {
        group.points.sort_by_key(|p| (p.case.kv_len, p.case.batch, p.case.heads));
    }
    groups
}

fn collect<'a>(points: impl IntoIterator<Item = &'a Point>, title: impl Fn(&Point) -> String) -> Vec<Group<'a>> {
    let mut groups: Vec<Group> = Vec::new();
    for point in points {
        let (kind, title) = match &point.case.name {
            Some(_) => (Kind::Named, "by name".to_owned()),
            None => (if point.case.is_decode() { Kind::Decode } else { Kind::Prefill }, title(point)),
        };
        let suite = point.suite.as_str();
        match groups.iter_mut().find(|g| (g.kind, g.suite, &g.title) == (kind, suite, &title)) {
            Some(group) => group.points.push(point),
            None => groups.push(Group { kind, suite, title, points: vec![point] }),
        }
    }
    groups
}

fn problem(p: &Point) -> String {
    format!("{}, head dim {}, {}", p.case.dtype, p.case.head_dim(), p.case.mask)
}

fn sizes(p: &Point) -> String {
    let c = &p.case;
    let shift = if c.q_len == c.kv_len { String::new() } else { format!(", {} queries", c.q_len) };
    format!("batch {}, heads {}{shift}", c.batch, c.head_counts())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::read::tests::sample;

    #[test]
    fn problems_and_kinds_are_kept_apart() {
        let report = sample();
        let groups = groups(&report);
        let told: Vec<_> = groups.iter().map(|g| (g.kind, g.suite, g.points.len())).collect();
        assert_eq!(told, [(Kind::Prefill, "forward", 2), (Kind::Decode, "decode", 1), (Kind::Named, "paged", 1)]);
        assert_eq!(groups[0].title, "bf16, head dim 128, causal");
    }

    #[test]
    fn points_of_one_length_get_groups_of_their_own_and_lengths_ascend() {
        let mut report = sample();
        report.points.truncate(2);
        report.points.swap(0, 1);
        let mut other = report.points[0].clone();
        other.case.batch = 1;
        report.points.push(other);
        let groups = groups(&report);
        assert_eq!(groups.iter().map(|g| g.points.len()).collect::<Vec<_>>(), [2, 1]);
        assert_eq!(groups[0].points.iter().map(|p| p.case.kv_len).collect::<Vec<_>>(), [1024, 2048]);
        assert!(groups[1].title.ends_with("batch 1, heads 16"), "{}", groups[1].title);
    }
}

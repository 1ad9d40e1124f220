//! Bringing together what several hosts found.
//!
//! A record holds one finding, and beside it those of other hosts that answer the same question otherwise
//! ([`Record::rivals`]). To merge is to take the union of the findings, less those that a later tuning raced against
//! ([`Record::settled`]): so the order, the grouping and the repetition of merges do not matter. (A finding is known by
//! the hash of its samples and its time, so that none is settled by what came before it.) Nothing is averaged: two
//! findings that disagree stay beside each other until `flashtune tune --contested` races them again on one device.

use crate::{Artifact, Bundle, BundleContents, Error, Key, Record, RecordKey, Result, Rival, Trust};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Medians closer than this are the same result.
const AGREEMENT: f64 = 1.03;

/// What a merge of bundles did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MergeSummary {
    /// Records written.
    pub records: usize,
    /// Artifacts written.
    pub artifacts: usize,
    /// Questions that hosts answer differently, each with the answers.
    pub contested: Vec<String>,
    /// Entries that only another build of flashtune understands: they are not in the result.
    pub skipped: Vec<String>,
}

impl Record {
    /// All findings, by their hash.
    fn findings(&self) -> BTreeMap<Key, Rival> {
        let own = Rival {
            schedule: self.schedule,
            artifact: self.artifact,
            finalists: self.finalists.clone(),
            provenance: self.provenance.clone(),
        };
        self.rivals.iter().cloned().chain([own]).map(|f| (f.hash(), f)).collect()
    }

    /// The record of these findings and those of another record of the same key.
    pub fn merge(self, other: Self) -> Self {
        let mut findings = self.findings();
        findings.extend(other.findings());
        let settled: BTreeSet<Key> = self.settled.into_iter().chain(other.settled).collect();
        Self::of(self.key, findings, settled)
    }

    /// The record that answers the question anew, having raced against what `before` holds.
    pub fn settling(mut self, before: Option<&Record>) -> Self {
        if let Some(before) = before {
            let mut settled: BTreeSet<Key> = before.settled.iter().copied().collect();
            settled.extend(before.findings().into_keys());
            // The same finding again has not settled itself.
            for own in self.findings().keys() {
                settled.remove(own);
            }
            self.settled = settled.into_iter().collect();
        }
        self
    }

    fn of(key: RecordKey, mut findings: BTreeMap<Key, Rival>, settled: BTreeSet<Key>) -> Self {
        // What was damaged on purpose must not leave a record without a finding.
        if findings.keys().any(|k| !settled.contains(k)) {
            findings.retain(|k, _| !settled.contains(k));
        }
        let order = |(hash, f): (&Key, &Rival)| (!f.finalists.is_empty(), f.provenance.unix_time, *hash);
        let first = *findings.iter().max_by_key(|f| order(*f)).expect("a record has a finding").0;
        let Rival { schedule, artifact, finalists, provenance } = findings.remove(&first).expect("it was just found");
        let (rivals, settled) = (findings.into_values().collect(), settled.into_iter().collect());
        Self { key, schedule, artifact, finalists, provenance, rivals, settled }
    }

    /// Findings of other hosts that disagree: another schedule won, and neither host saw the two within 3 % of each
    /// other.
    pub fn contested(&self) -> impl Iterator<Item = &Rival> {
        let close = |finalists: &[crate::Finalist], winner, other| {
            let us = |s| finalists.iter().find(|f| f.schedule == s).map(|f| f.median_us);
            matches!((us(winner), us(other)), (Some(a), Some(b)) if b <= a * AGREEMENT)
        };
        self.rivals.iter().filter(move |r| {
            let measured = !r.finalists.is_empty() && !self.finalists.is_empty();
            measured
                && r.schedule != self.schedule
                && !close(&self.finalists, self.schedule, r.schedule)
                && !close(&r.finalists, r.schedule, self.schedule)
        })
    }
}

/// Merges bundle files into one. The bytes of the result depend on the content of the inputs alone: not on their order,
/// on how they were merged before, or on how often one is named.
///
/// # Errors
/// [`Error::Untrusted`], [`Error::Damaged`] and [`Error::Io`] as elsewhere; [`Error::Mismatch`] when inputs for one
/// arch and family were made with different templates or ABIs, which answer different questions.
pub fn merge_bundles(paths: &[impl AsRef<Path>], to: &Path, trust: &Trust) -> Result<MergeSummary> {
    let mut bundles = Vec::new();
    for path in paths {
        let bundle = Bundle::map(path.as_ref())?;
        trust.check(&bundle)?;
        bundles.push(bundle);
    }
    same_sets(&bundles)?;
    let mut records: BTreeMap<RecordKey, Record> = BTreeMap::new();
    let mut artifacts: BTreeSet<Key> = BTreeSet::new();
    let mut skipped = Vec::new();
    for bundle in &bundles {
        artifacts.extend(bundle.artifact_keys());
        for item in bundle.records() {
            let (record, _) = match item {
                Err(e @ Error::Foreign { .. }) => {
                    skipped.push(e.to_string());
                    continue;
                }
                item => item?,
            };
            let merged = match records.remove(&record.key) {
                Some(known) => known.merge(record),
                None => record,
            };
            records.insert(merged.key.clone(), merged);
        }
    }
    let contested = records.values().filter_map(describe).collect();
    // Every needed artifact is read and verified before the first byte is written.
    let mut loaded: BTreeMap<Key, Artifact> = BTreeMap::new();
    for key in &artifacts {
        let mut found = None;
        for bundle in &bundles {
            match bundle.artifact(key) {
                Err(e @ Error::Foreign { .. }) => skipped.push(e.to_string()),
                artifact => found = artifact?,
            }
            if found.is_some() {
                break;
            }
        }
        loaded.extend(found.map(|artifact| (*key, artifact)));
    }
    let created = bundles.iter().map(|b| b.manifest().created).max().unwrap_or(0);
    let count = records.len();
    let mut load = |key: &Key| loaded.get(key).cloned();
    let records = records.into_values().collect();
    let manifest =
        BundleContents { records, artifacts: artifacts.into_iter().collect(), load: &mut load, created }.write(to)?;
    let artifacts = manifest.sets.iter().map(|s| s.artifacts as usize).sum();
    Ok(MergeSummary { records: count, artifacts, contested, skipped })
}

/// One line for a record whose findings disagree.
fn describe(record: &Record) -> Option<String> {
    let mut answers: Vec<String> = record.contested().map(|r| r.schedule.to_string()).collect();
    if answers.is_empty() {
        return None;
    }
    answers.insert(0, record.schedule.to_string());
    let RecordKey { device, problem, bucket, launches } = &record.key;
    Some(format!("{problem} {bucket} on {device} ({launches}): {}", answers.join(" or ")))
}

fn same_sets(bundles: &[Bundle]) -> Result<()> {
    for (i, bundle) in bundles.iter().enumerate() {
        for set in &bundle.manifest().sets {
            let others = bundles[..=i].iter().flat_map(|b| &b.manifest().sets);
            for other in others.filter(|s| s.arch == set.arch && s.family == set.family) {
                let (field, found, expected) = match (set.templates == other.templates, set.abi == other.abi) {
                    (true, true) => continue,
                    (false, _) => ("templates", set.templates.clone(), other.templates.clone()),
                    (true, false) => ("abi", set.abi.to_string(), other.abi.to_string()),
                };
                return Err(Error::Mismatch {
                    name: bundle.name().to_owned(),
                    field,
                    found,
                    expected: format!("{expected} of another input for {} on {}", set.family, set.arch),
                    remedy: "merge what was tuned with the same templates, or build it anew with --relink",
                });
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{artifact, record, schedule};
    use crate::{Finalist, Provenance};
    use proptest::collection::vec;
    use proptest::prelude::*;
    use proptest::sample::Index;

    /// A finding of host `n`: `winner` beats `other` by this ratio.
    fn finding(n: u32, winner: u32, other: u32, ratio: f64) -> Record {
        let base = record(128, winner);
        let finalist =
            |s: u32, median_us: f64| Finalist { schedule: schedule(s), median_us, ..base.finalists[0].clone() };
        let finalists = vec![finalist(winner, 10.0), finalist(other, 10.0 * ratio)];
        let provenance =
            Provenance { unix_time: 1000 + u64::from(n), seconds: f64::from(n), ..base.provenance.clone() };
        Record { finalists, provenance, ..base }
    }

    /// What three hosts have, of many that have merged what others had, and tuned anew. No two tunings give the same
    /// finding, which holds its samples and its time, so that none is settled by what came before it; clocks may say
    /// what they like.
    fn hosts() -> impl Strategy<Value = [Record; 3]> {
        let first = (0u32..6, 1u32..4, 1u32..4, 1.0f64..1.1).prop_map(|(n, a, b, ratio)| finding(n, a, b, ratio));
        let step = (any::<bool>(), any::<Index>(), any::<Index>(), 1u32..4);
        let picks = [any::<Index>(), any::<Index>(), any::<Index>()];
        (vec(first, 1..6), vec(step, 0..10), picks).prop_map(|(mut states, steps, picks)| {
            for (k, (tunes, i, j, winner)) in (0u32..).zip(steps) {
                let known = i.get(&states).clone();
                states.push(match tunes {
                    true => finding(6 + (k * 7 + 3) % 10, winner, winner + 1, 1.2).settling(Some(&known)),
                    false => known.merge(j.get(&states).clone()),
                });
            }
            picks.map(|pick| pick.get(&states).clone())
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        #[test]
        fn the_order_the_grouping_and_the_repetition_of_merges_do_not_matter([a, b, c] in hosts()) {
            let merge = |x: &Record, y: &Record| x.clone().merge(y.clone());
            prop_assert_eq!(merge(&a, &b), merge(&b, &a));
            prop_assert_eq!(merge(&merge(&a, &b), &c), merge(&a, &merge(&b, &c)));
            prop_assert_eq!(merge(&a, &a), a.clone());
            let ab = merge(&a, &b);
            prop_assert_eq!(merge(&ab, &b), ab);
        }
    }

    #[test]
    fn what_disagrees_is_kept_side_by_side_until_it_is_raced_again() {
        let (a, b) = (finding(1, 1, 2, 1.2), finding(2, 2, 1, 1.1));
        let both = a.clone().merge(b.clone());
        assert_eq!(both.schedule, b.schedule, "the later one serves meanwhile");
        assert_eq!(both.finalists, b.finalists, "and nothing is averaged");
        assert_eq!(both.contested().map(|r| r.schedule).collect::<Vec<_>>(), [a.schedule]);
        let settled = finding(3, 1, 2, 1.15).settling(Some(&both));
        // Whoever still has the old ones brings nothing back.
        for old in [&a, &b, &both] {
            let merged = settled.clone().merge(old.clone());
            assert_eq!((merged.schedule, merged.rivals.len()), (a.schedule, 0));
            assert_eq!(merged, settled);
        }
    }

    #[test]
    fn what_is_within_three_percent_or_the_same_is_no_disagreement() {
        let contested = |a: Record, b: Record| a.merge(b).contested().count();
        assert_eq!(contested(finding(1, 1, 2, 1.02), finding(2, 2, 1, 1.3)), 0, "one host saw them close");
        assert_eq!(contested(finding(1, 1, 2, 1.3), finding(2, 1, 2, 1.2)), 0, "the same winner");
        assert_eq!(contested(finding(1, 1, 3, 1.02), finding(2, 2, 3, 1.02)), 1, "nobody saw both");
        let mut built = finding(5, 3, 1, 1.0);
        built.finalists.clear();
        let merged = finding(1, 1, 2, 1.3).merge(built);
        assert_eq!((merged.schedule, merged.contested().count()), (schedule(1), 0), "what was measured goes first");
    }

    #[test]
    fn merged_bundles_are_the_same_bytes_whatever_the_order() {
        let tmp = tempfile::tempdir().unwrap();
        let write = |name: &str, records: Vec<Record>, artifacts: &[u32], created| {
            let path = tmp.path().join(name);
            let mut load = |key: &Key| (1..9).map(artifact).find(|a| a.recipe.key() == *key);
            let artifacts = artifacts.iter().map(|n| artifact(*n).recipe.key()).collect();
            BundleContents { records, artifacts, load: &mut load, created }.write(&path).unwrap();
            path
        };
        let a = write("a", vec![finding(1, 1, 2, 1.2), record(512, 3)], &[], 5);
        let b = write("b", vec![finding(2, 2, 1, 1.2)], &[7], 9);
        let c = write("c", vec![record(1024, 4), finding(3, 1, 2, 1.2)], &[], 7);
        let trust = Trust::default().allow_unsigned(true);
        let merged = |paths: &[&std::path::PathBuf]| {
            let to = tmp.path().join(format!("out{}", std::fs::read_dir(tmp.path()).unwrap().count()));
            let summary = merge_bundles(paths, &to, &trust).unwrap();
            (std::fs::read(&to).unwrap(), to, summary)
        };
        let (bytes, all, summary) = merged(&[&a, &b, &c]);
        assert_eq!((summary.records, summary.artifacts), (3, 5));
        assert!(summary.contested.len() == 1 && summary.contested[0].contains(" or "), "{summary:?}");
        let (_, ab, _) = merged(&[&a, &b]);
        for paths in [vec![&c, &b, &a], vec![&a, &a, &c, &b], vec![&ab, &c], vec![&c, &ab], vec![&all], vec![&all, &b]]
        {
            assert!(merged(&paths).0 == bytes, "{paths:?}");
        }
        // Other templates answer another question.
        let mut foreign = record(128, 1);
        foreign.provenance.templates = "fedcba9876543210".into();
        let foreign = write("foreign", vec![foreign], &[], 1);
        let e = merge_bundles(&[&a, &foreign], &tmp.path().join("never"), &trust).unwrap_err().to_string();
        assert!(e.contains("templates") && e.contains("fedcba9876543210"), "{e}");
        assert!(!tmp.path().join("never").exists());
    }
}

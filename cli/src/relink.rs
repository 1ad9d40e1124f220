//! `flashtune build --relink`: a bundle made anew for other targets or templates, from the recipes that it carries.
//!
//! A binary fits one arch, one template set and one ABI. What made it fits more: the problem and the class of sizes
//! hold everywhere, and the schedule wherever it fits the arch. Measurements do not carry over, so the new records say
//! that they were never measured.

use super::cases::{Case, family};
use anyhow::Result;
use flashtune::{Problem, Shape};
use flashtune_cache::{Bundle, Error, Record, RecordKey, Trust};
use flashtune_codegen::{Arch, Kernel, Paths, Schedule, ShapeBucket};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;

/// One record of the bundle, for a target.
pub(crate) struct Relinked {
    pub problem: Problem,
    /// The class that it is filed under: that of the record, whatever device it was of.
    pub bucket: ShapeBucket,
    pub shape: Shape,
    pub kernel: Kernel,
}

/// What became of the schedules.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Summary {
    /// Schedules that fit the target as they are.
    pub carried: usize,
    /// Schedules in whose place the target's default stands.
    pub replaced: usize,
    /// Problems that no kernel computes on the target.
    pub left_out: Vec<String>,
}

/// The records of a bundle, of the problems and classes of sizes that it has, the measured ones first.
pub(crate) fn read(path: &Path, trust: &Trust, summary: &mut Summary) -> Result<Vec<Record>> {
    let bundle = Bundle::map(path)?;
    trust.check(&bundle)?;
    let mut chosen: BTreeMap<(flashtune::Problem, ShapeBucket), Record> = BTreeMap::new();
    for item in bundle.records() {
        let (record, _) = match item {
            // Its schedule may be one that this build would not make.
            Err(e @ Error::Foreign { .. }) => {
                summary.left_out.push(e.to_string());
                continue;
            }
            item => item?,
        };
        let RecordKey { problem, bucket, .. } = record.key;
        let better = |old: &Record| old.finalists.is_empty() && !record.finalists.is_empty();
        if chosen.get(&(problem, bucket)).is_none_or(better) {
            chosen.insert((problem, bucket), record);
        }
    }
    Ok(chosen.into_values().collect())
}

/// The kernels for a target.
pub(crate) fn relink(records: &[Record], arch: Arch, paths: &Paths, summary: &mut Summary) -> Vec<Relinked> {
    let mut relinked = Vec::new();
    for record in records {
        let case = Case::new(record.key.problem, record.sizes());
        let relinked_as =
            |kernel| Relinked { problem: case.problem, bucket: record.key.bucket, shape: case.shape, kernel };
        // What can be decoded need not make sense.
        if let Err(e) = case.problem.validate() {
            summary.left_out.push(format!("{}: {e}", case.problem));
            continue;
        }
        let carried = Kernel { problem: case.problem, schedule: record.schedule, arch };
        let family = record.schedule.family();
        let supported = family.supports(&case.problem, arch).and_then(|()| paths.admit(family, &case.problem, arch));
        if supported.is_ok() && carried.check().is_ok() {
            summary.carried += 1;
            relinked.push(relinked_as(carried));
            continue;
        }
        match default_kernel(&case, arch, paths) {
            Ok(kernel) => {
                summary.replaced += 1;
                relinked.push(relinked_as(kernel));
            }
            Err(e) => summary.left_out.push(format!("{} on {arch}: {e}", case.problem)),
        }
    }
    relinked
}

/// The default kernel of the best family for a case.
pub(crate) fn default_kernel(case: &Case, arch: Arch, paths: &Paths) -> Result<Kernel> {
    let bucket = case.bucket(1);
    let family = family(None, &case.problem, arch, &bucket, paths)?;
    let schedule = Schedule::default_for(family, &case.problem, arch, &bucket)?;
    let kernel = Kernel { problem: case.problem, schedule, arch };
    kernel.check()?;
    Ok(kernel)
}

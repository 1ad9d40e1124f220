//! Serving without a compiler: everything that may be needed is loaded once, then the set of kernels is closed.

use super::dispatcher::{Dispatcher, PlanKey};
use super::plan::{Choice, Plan};
use super::table::Table;
use super::{Demand, Status};
use crate::{Error, Result};
use flashtune_cache::Key;
use flashtune_codegen::{Arch, Problem, Schedule, Shape, ShapeBucket};
use serde::{Deserialize, Serialize};
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, PoisonError};

/// What a sealed dispatcher does with a class of sizes that it has no plan for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnMiss {
    /// Runs the problem's kernel of the nearest sizes; one that was measured goes before one that was not.
    #[default]
    Nearest,
    /// Refuses the call ([`Error::Sealed`]).
    Refuse,
}

/// What was sealed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Seal {
    /// Hash of what decides which kernel a call runs on: arch, templates, classes with their schedules and binaries, and
    /// what happens on a miss. Processes whose digests are equal run the same kernel for every call.
    pub digest: Key,
    /// Classes of sizes with a plan.
    pub classes: usize,
    /// Kernels that are loaded for them.
    pub kernels: usize,
    /// Classes with a record whose kernel cannot be used here, each with the reason.
    pub left_out: Vec<String>,
}

/// The closed set of kernels.
pub(super) struct Sealed {
    table: Table,
    /// The plans that misses are answered from.
    by_problem: HashMap<Problem, Vec<Arc<Plan>>>,
    on_miss: OnMiss,
    seal: Seal,
}

/// One line of what a digest is made of.
#[derive(Serialize, PartialEq, Eq, PartialOrd, Ord)]
struct Line {
    problem: Problem,
    bucket: ShapeBucket,
    demand: &'static str,
    schedule: Schedule,
    binary: Key,
}

impl Sealed {
    fn new(
        plans: Vec<(PlanKey, Arc<Plan>)>,
        on_miss: OnMiss,
        arch: Arch,
        templates: &str,
        left_out: Vec<String>,
    ) -> Self {
        let table = Table::new();
        let mut by_problem: HashMap<Problem, Vec<Arc<Plan>>> = HashMap::new();
        let mut kernels = HashSet::new();
        let mut lines = Vec::new();
        for (key, plan) in plans {
            kernels.insert(*plan.kernel());
            lines.push(Line {
                problem: key.problem,
                bucket: key.bucket,
                demand: key.demand.name(),
                schedule: plan.kernel().schedule,
                binary: plan.artifact,
            });
            by_problem.entry(key.problem).or_default().push(plan.clone());
            table.insert(key, plan);
        }
        lines.sort();
        // Misses must have the same answer in every process.
        for plans in by_problem.values_mut() {
            plans.sort_by_key(|p| (p.bucket, p.kernel().schedule));
        }
        let digest = Key::of_value("flashtune seal 1", &(arch, templates, on_miss, &lines));
        let seal = Seal { digest, classes: lines.len(), kernels: kernels.len(), left_out };
        Self { table, by_problem, on_miss, seal }
    }

    pub fn get(&self, key: &PlanKey) -> Option<&Arc<Plan>> {
        self.table.get(key)
    }

    pub fn seal(&self) -> &Seal {
        &self.seal
    }

    /// The kernel for a class that was not foreseen.
    fn nearest(&self, key: &PlanKey, shape: &Shape) -> Result<&Arc<Plan>> {
        let refused = |reason: String| Error::Sealed {
            problem: format!("{} {shape}", key.problem),
            reason,
            remedy: "tune or build it where a compiler is allowed, or preload it before sealing",
        };
        if self.on_miss == OnMiss::Refuse {
            return Err(refused(format!("the class {} was not sealed in", key.bucket)));
        }
        let all = self.by_problem.get(&key.problem).map_or(&[][..], Vec::as_slice);
        let fit = all.iter().filter(|p| key.demand.is_met_by(p.kernel().schedule.family()));
        let rank = |p: &Plan| (!p.status().is_measured(), p.bucket.distance(&key.bucket));
        let nearest = fit.min_by(|a, b| {
            let ((a, x), (b, y)) = (rank(a), rank(b));
            a.cmp(&b).then(x.total_cmp(&y))
        });
        nearest.ok_or_else(|| {
            refused(match all.is_empty() {
                true => "no kernel of the problem was sealed in".to_owned(),
                false => format!("of its {} sealed classes no kernel serves it: {}", all.len(), key.demand.why_not()),
            })
        })
    }
}

impl Dispatcher {
    /// Loads the kernels of all records that may be used here, beside those of the classes that were met or prepared so
    /// far, and closes the set: from now on no compiler runs and no file is read, whatever is asked. Sealing again
    /// changes nothing.
    ///
    /// # Errors
    /// [`Error::Sealed`] when there is no kernel at all; then nothing is closed.
    pub fn seal(&self, on_miss: OnMiss) -> Result<Seal> {
        // Compilations that have begun come to their end; others do not begin.
        let mut open = self.open.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(sealed) = self.sealed.get() {
            return Ok(sealed.seal().clone());
        }
        *open = false;
        drop(open);
        let left_out = self.load_records();
        let plans: Vec<_> =
            self.plans.read().unwrap_or_else(PoisonError::into_inner).iter().map(|(k, p)| (*k, p.clone())).collect();
        if plans.is_empty() {
            *self.open.write().unwrap_or_else(PoisonError::into_inner) = true;
            return Err(Error::Sealed {
                problem: "any call".to_owned(),
                reason: match left_out.first() {
                    None => "no layer has a record that may be used here".to_owned(),
                    Some(first) => format!("of {} records none has a kernel that loads; {first}", left_out.len()),
                },
                remedy: "tune, build or import first, or preload what will be asked for",
            });
        }
        let templates = self.config.templates.hash();
        let sealed = Sealed::new(plans, on_miss, self.fingerprint().arch, templates, left_out);
        let seal = self.sealed.get_or_init(|| sealed).seal().clone();
        tracing::info!(digest = %seal.digest, classes = seal.classes, kernels = seal.kernels, "sealed");
        Ok(seal)
    }

    /// What was sealed, if anything was.
    pub fn sealed(&self) -> Option<&Seal> {
        self.sealed.get().map(Sealed::seal)
    }

    /// A plan for every class that the layers have a usable record of. Gives those that could not be had.
    fn load_records(&self) -> Vec<String> {
        let mut left_out = Vec::new();
        let mut seen = HashSet::new();
        for (layer, record, validity) in self.config.layers.records() {
            let (problem, shape) = (record.key.problem, record.provenance.shape);
            let usable = self.validity().difference(&validity).is_none();
            if !usable || !seen.insert((problem, record.key.bucket)) {
                continue;
            }
            if let Err(e) = self.plan(&problem, &shape, Demand::Usual) {
                left_out.push(format!("{problem} {} of {layer}: {e}", record.key.bucket));
            }
        }
        left_out
    }

    /// Answers a call that no sealed plan was made for, and remembers the answer.
    pub(super) fn sealed_miss(&self, sealed: &Sealed, key: PlanKey, shape: &Shape) -> Result<Arc<Plan>> {
        let from = sealed.nearest(&key, shape)?;
        let Choice { kernel, status, because, layer, record, .. } = &from.choice;
        let distance = from.bucket.distance(&key.bucket);
        let plan = Plan {
            module: from.module.clone(),
            artifact: from.artifact,
            bucket: key.bucket,
            shape: *shape,
            device: from.device.clone(),
            policy: from.policy,
            templates: from.templates.clone(),
            choice: Choice {
                kernel: *kernel,
                status: if *status == Status::Tuned { Status::NearestShape } else { *status },
                because: format!("sealed; of {}, {distance:.1} doublings away: {because}", from.bucket),
                layer: layer.clone(),
                distance,
                record: record.clone(),
            },
            binary: from.binary.clone(),
            refusals: Vec::new(),
            tally: self.tally(&key, shape),
        };
        let plan = self.ready(plan);
        Ok(sealed.table.insert(key, Arc::new(plan)).clone())
    }
}

//! A closed set of plans: what it answers, and the digest that tells it from others.

use super::donors::Donors;
use super::key::{Mix, PlanKey};
use super::plan::Plan;
use super::table::Table;
use crate::{Error, Result};
use flashtune_cache::Key;
use flashtune_codegen::{Arch, Problem, Schedule, Shape, ShapeBucket};
use serde::{Deserialize, Serialize};
use std::collections::{HashMap, HashSet};
use std::hash::BuildHasherDefault;
use std::sync::Arc;

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
    /// Hash of what decides which kernel a call runs on: arch, classes with their schedules and binaries, and
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
    by_problem: HashMap<Problem, Donors, BuildHasherDefault<Mix>>,
    on_miss: OnMiss,
    seal: Seal,
}

/// One line of what a digest is made of.
#[derive(Serialize, PartialEq, Eq, PartialOrd, Ord)]
struct Line {
    problem: Problem,
    bucket: ShapeBucket,
    demand: String,
    schedule: Schedule,
    binary: Key,
}

impl Sealed {
    /// Closes these plans.
    pub(crate) fn new(plans: Vec<(PlanKey, Arc<Plan>)>, on_miss: OnMiss, arch: Arch, left_out: Vec<String>) -> Self {
        let table = Table::new();
        let mut by_problem: HashMap<Problem, Vec<Arc<Plan>>> = HashMap::new();
        let mut kernels = HashSet::new();
        let mut lines = Vec::new();
        for (key, plan) in plans {
            kernels.insert(*plan.kernel());
            lines.push(Line {
                problem: key.problem,
                bucket: key.bucket,
                demand: key.demands.to_string(),
                schedule: plan.kernel().schedule,
                binary: plan.artifact,
            });
            by_problem.entry(key.problem).or_default().push(plan.clone());
            table.insert(key, plan);
        }
        lines.sort();
        let digest = Key::of_value("flashtune seal 3", &(arch, on_miss, &lines));
        let seal = Seal { digest, classes: lines.len(), kernels: kernels.len(), left_out };
        let by_problem = by_problem.into_iter().map(|(problem, plans)| (problem, Donors::new(plans))).collect();
        Self { table, by_problem, on_miss, seal }
    }

    /// The plan of a class.
    pub(crate) fn get(&self, key: &PlanKey) -> Option<&Arc<Plan>> {
        self.table.get(key)
    }

    /// Remembers the plan of a class that was not foreseen, unless another thread was faster: then that one's is the
    /// answer.
    pub(crate) fn remember(&self, key: PlanKey, plan: Arc<Plan>) -> &Arc<Plan> {
        self.table.insert(key, plan)
    }

    /// The account of it.
    pub(crate) fn seal(&self) -> &Seal {
        &self.seal
    }

    /// The plan that serves a class which was not foreseen, and how many doublings it is away.
    pub(crate) fn nearest(&self, key: &PlanKey, shape: &Shape) -> Result<(&Arc<Plan>, f64)> {
        let refused = |reason: String| Error::Sealed {
            problem: format!("{} {shape}", key.problem),
            reason,
            remedy: "tune or build it where a compiler is allowed, or preload it before sealing",
        };
        if self.on_miss == OnMiss::Refuse {
            return Err(refused(format!("the class {} was not sealed in", key.bucket)));
        }
        let donors = self.by_problem.get(&key.problem);
        donors.and_then(|d| d.nearest(key.bucket, key.demands)).ok_or_else(|| {
            refused(match donors {
                None => "no kernel of the problem was sealed in".to_owned(),
                Some(d) => format!("of its {} sealed classes no kernel serves it: {}", d.len(), d.unmet(key.demands)),
            })
        })
    }
}

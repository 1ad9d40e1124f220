//! Serving without a compiler: everything that may be needed is loaded once, then the set of kernels is closed.

use super::Status;
use super::dispatcher::Dispatcher;
use super::key::PlanKey;
use super::plan::{Choice, Plan};
use super::sealed::{OnMiss, Seal, Sealed};
use crate::{Error, Result};
use flashtune_codegen::{Constraints, Shape};
use std::collections::HashSet;
use std::sync::{Arc, PoisonError};

impl Dispatcher {
    /// Loads the kernels of all records that may be used here, beside those of the classes that were met or prepared so
    /// far, and closes the set: from now on no compiler runs and no file is read, whatever is asked. Sealing again
    /// changes nothing.
    ///
    /// # Errors
    /// [`Error::Sealed`] when there is no kernel at all; then nothing is closed.
    pub fn seal(&self, on_miss: OnMiss) -> Result<Seal> {
        let _one_at_a_time = self.sealing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut left_out = Vec::new();
        loop {
            // Compilations that have begun come to their end; others do not begin.
            let mut open = self.binaries.open.write().unwrap_or_else(PoisonError::into_inner);
            if let Some(sealed) = self.sealed.get() {
                return Ok(sealed.seal().clone());
            }
            let Some((key, plan)) = self.unsettled() else {
                *open = false;
                break;
            };
            drop(open);
            // Which of two schedules a class runs on must not depend on the moment.
            if let Err(e) = self.plan(&key.problem, &plan.shape, key.demands) {
                left_out.push(format!("{} {}: {e}", key.problem, key.bucket));
                self.plans.write().unwrap_or_else(PoisonError::into_inner).remove(&key);
            }
        }
        left_out.extend(self.load_records());
        let plans: Vec<_> =
            self.plans.read().unwrap_or_else(PoisonError::into_inner).iter().map(|(k, p)| (*k, p.clone())).collect();
        if plans.is_empty() {
            *self.binaries.open.write().unwrap_or_else(PoisonError::into_inner) = true;
            return Err(Error::Sealed {
                problem: "any call".to_owned(),
                reason: match left_out.first() {
                    None => "no layer has a record that may be used here".to_owned(),
                    Some(first) => format!("of {} records none has a kernel that loads; {first}", left_out.len()),
                },
                remedy: "tune, build or import first, or preload what will be asked for",
            });
        }
        let sealed = Sealed::new(plans, on_miss, self.fingerprint().arch, left_out);
        let seal = self.sealed.get_or_init(|| sealed).seal().clone();
        tracing::info!(digest = %seal.digest, classes = seal.classes, kernels = seal.kernels, "sealed");
        Ok(seal)
    }

    /// What was sealed, if anything was.
    pub fn sealed(&self) -> Option<&Seal> {
        self.sealed.get().map(Sealed::seal)
    }

    /// A class whose plan stands in for another.
    fn unsettled(&self) -> Option<(PlanKey, Arc<Plan>)> {
        let plans = self.plans.read().unwrap_or_else(PoisonError::into_inner);
        plans.iter().find(|(_, plan)| !plan.is_settled()).map(|(key, plan)| (*key, plan.clone()))
    }

    /// A plan for every class that the layers have a usable record of. Gives those that could not be had.
    fn load_records(&self) -> Vec<String> {
        let mut left_out = Vec::new();
        let mut seen = HashSet::new();
        for (layer, record, validity) in self.binaries.layers.records() {
            let (problem, sizes) = (record.key.problem, record.sizes());
            let usable = self.needed().difference(&validity).is_none();
            if !usable || !seen.insert((problem, record.key.bucket)) {
                continue;
            }
            if let Err(e) = self.plan(&problem, sizes, Constraints::NONE) {
                left_out.push(format!("{problem} {} of {layer}: {e}", record.key.bucket));
            }
        }
        left_out
    }

    /// Answers a call that no sealed plan was made for, and remembers the answer.
    pub(super) fn sealed_miss(&self, sealed: &Sealed, key: PlanKey, shape: &Shape) -> Result<Arc<Plan>> {
        let (from, distance) = sealed.nearest(&key, shape)?;
        let Choice { kernel, status, because, layer, record, .. } = &from.choice;
        let plan = Plan {
            module: from.module.clone(),
            artifact: from.artifact,
            bucket: key.bucket,
            shape: *shape,
            device: from.device.clone(),
            policy: from.policy,
            templates: from.templates.clone(),
            paths: from.paths.clone(),
            choice: Choice {
                kernel: *kernel,
                status: if *status == Status::Tuned { Status::NearestShape } else { *status },
                because: because.served_from(from.bucket, distance),
                layer: layer.clone(),
                distance,
                record: record.clone(),
            },
            binary: from.binary.clone(),
            refusals: Vec::new(),
            tally: self.tally(&key, shape),
            awaited: None,
        };
        let plan = self.ready(plan);
        Ok(sealed.remember(key, Arc::new(plan)).clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dispatch::{DispatcherConfig, Policy};
    use crate::{DeviceSpec, open};
    use flashtune_cache::{CacheDir, Launches, Layers};
    use flashtune_codegen::{DType, Mask, Problem, TemplateSet};
    use std::sync::mpsc::channel;
    use std::time::Duration;

    fn class(len: u32) -> (Problem, Shape) {
        let mask = Mask::Full;
        let problem = Problem::forward(DType::F32, 16, mask.kind()).unwrap();
        (problem, Shape { batch: 1, heads: 1, kv_heads: 1, q_len: len, kv_len: len, mask })
    }

    /// Every lock of the dispatcher is held meanwhile, and each work of a key is somebody's.
    #[test]
    fn a_sealed_hit_waits_for_no_lock() {
        let layers = Arc::new(Layers::open(&CacheDir::at("/nonexistent"), &[], None).unwrap());
        let dispatcher = Arc::new(Dispatcher::new(DispatcherConfig {
            device: open(DeviceSpec::Cpu).unwrap(),
            templates: Arc::new(TemplateSet::embedded()),
            policy: Policy::Default,
            launches: Launches::Eager,
            layers,
            paths: Default::default(),
            artifacts: None,
        }));
        let (problem, shape) = class(64);
        let before = dispatcher.plan(&problem, &shape, Constraints::NONE).unwrap();
        dispatcher.seal(OnMiss::Nearest).unwrap();
        // Met after the seal, and then as good as sealed in.
        let (_, other) = class(4096);
        dispatcher.plan(&problem, &other, Constraints::NONE).unwrap();
        let held = (
            (dispatcher.plans.write(), dispatcher.tallies.write(), dispatcher.modules.write()),
            (dispatcher.jobs.lock(), dispatcher.binaries.open.write(), dispatcher.sealing.lock()),
        );
        let [key, _] = [shape, other].map(|shape| PlanKey {
            problem,
            bucket: flashtune_codegen::ShapeBucket::of(&shape),
            demands: Constraints::NONE,
        });
        let hits = || {
            let (answer, answered) = channel();
            let dispatcher = dispatcher.clone();
            std::thread::spawn(move || {
                for shape in [shape, other] {
                    let plan = dispatcher.plan(&problem, &shape, Constraints::NONE).unwrap();
                    plan.count_call();
                    let _ = answer.send(plan);
                }
            });
            [(); 2].map(|()| answered.recv_timeout(Duration::from_secs(20)).expect("a hit waits for a lock"))
        };
        let hits = dispatcher.planning.run(&key, || dispatcher.loading.run(before.kernel(), hits));
        assert!(Arc::ptr_eq(&hits[0], &before) && hits[1].status() == Status::Default);
        drop(held);
    }
}

//! Plans by class for readers that must not wait: a hash table that only grows.
//!
//! Every slot is the head of a chain whose links are set once and never changed, so a lookup is a few loads: no lock,
//! no allocation, and nothing that a thread which adds a plan could hold up.

use super::key::{Mix, PlanKey};
use super::plan::Plan;
use crate::sync::OnceLock;
use std::hash::{BuildHasher, BuildHasherDefault};
use std::sync::Arc;

/// Slots; some hundred classes of sizes are many for one process.
const SLOTS: usize = 1024;

type Link = OnceLock<Box<Node>>;

struct Node {
    key: PlanKey,
    plan: Arc<Plan>,
    next: Link,
}

/// Plans that are never removed.
pub(super) struct Table {
    slots: Box<[Link]>,
}

impl Table {
    pub(crate) fn new() -> Self {
        Self { slots: (0..SLOTS).map(|_| Link::new()).collect() }
    }

    /// The plan of a class.
    pub(crate) fn get(&self, key: &PlanKey) -> Option<&Arc<Plan>> {
        let mut link = self.slot(key);
        while let Some(node) = link.get() {
            if node.key == *key {
                return Some(&node.plan);
            }
            link = &node.next;
        }
        None
    }

    /// Adds a plan, unless another thread was faster: then that one's is the answer.
    pub(crate) fn insert(&self, key: PlanKey, plan: Arc<Plan>) -> &Arc<Plan> {
        let mut node = Box::new(Node { key, plan, next: Link::new() });
        let mut link = self.slot(&key);
        loop {
            if let Err(mine) = link.set(node) {
                node = mine;
                let there = link.get().expect("it could not be set because it is");
                if there.key == key {
                    return &there.plan;
                }
                link = &there.next;
                continue;
            }
            return &link.get().expect("it was just set").plan;
        }
    }

    fn slot(&self, key: &PlanKey) -> &Link {
        let hash = BuildHasherDefault::<Mix>::default().hash_one(key);
        // The upper bits of a product depend on all of its factors' bits.
        &self.slots[(hash >> 32) as usize % SLOTS]
    }
}

#[cfg(test)]
impl Table {
    /// Whether two classes are in one chain.
    pub(super) fn share_a_slot(&self, one: &PlanKey, other: &PlanKey) -> bool {
        std::ptr::eq(self.slot(one), self.slot(other))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashtune_codegen::{Constraint, Constraints, DType, Mask, MaskKind, Problem, Shape, ShapeBucket};
    use std::collections::HashSet;

    fn keys() -> Vec<PlanKey> {
        let mut keys = Vec::new();
        for head_dim in [16, 64, 72, 128, 256] {
            for q in 0..10 {
                for kv in 0..20 {
                    let shape =
                        Shape { batch: 1, heads: 8, kv_heads: 8, q_len: 1 << q, kv_len: 1 << kv, mask: Mask::Causal };
                    let problem = Problem::forward(DType::Bf16, head_dim, MaskKind::CAUSAL).unwrap();
                    keys.push(PlanKey { problem, bucket: ShapeBucket::of(&shape), demands: Constraints::NONE });
                }
            }
        }
        keys
    }

    #[test]
    fn classes_spread_over_the_slots() {
        let table = Table::new();
        let slots: HashSet<_> = keys().iter().map(|k| std::ptr::from_ref(table.slot(k))).collect();
        // A thousand keys thrown at random leave 38 % of the slots empty.
        assert!(slots.len() > SLOTS / 2, "{} slots for {} keys", slots.len(), keys().len());
    }

    #[test]
    fn threads_that_add_the_same_classes_agree_on_their_plans() {
        let (table, keys) = (Table::new(), keys());
        let seen: Vec<Vec<usize>> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4)
                .map(|t| {
                    let (table, keys) = (&table, &keys);
                    scope.spawn(move || {
                        // Every thread begins elsewhere.
                        let order = (0..keys.len()).map(|i| (i + t * 250) % keys.len());
                        let mut plans = vec![0; keys.len()];
                        for i in order {
                            let plan = Arc::new(Plan::for_tests(&keys[i]));
                            plans[i] = Arc::as_ptr(table.insert(keys[i], plan)) as usize;
                        }
                        plans
                    })
                })
                .collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        });
        for plans in &seen {
            assert_eq!(plans, &seen[0]);
        }
        for (key, plan) in keys.iter().zip(&seen[0]) {
            let found = table.get(key).unwrap();
            assert!(Arc::as_ptr(found) as usize == *plan && found.bucket == key.bucket);
        }
        let unknown = PlanKey { demands: Constraint::Strided.into(), ..keys[0] };
        assert!(table.get(&unknown).is_none());
    }
}

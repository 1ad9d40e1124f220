//! What statements cost a compiler.

use super::stmt::Scope;
use super::{Code, lower_fragments};
use crate::score::program::Program;
use std::collections::HashMap;
use std::sync::{LazyLock, Mutex, PoisonError};

/// Programs of fewer nodes cost compilers little: nothing is lowered to count.
const SHORT: usize = 100;

/// The costs of the long programs of this process by their hashes: every family asks, for every plan.
static COSTS: LazyLock<Mutex<HashMap<[u8; 32], [usize; 2]>>> = LazyLock::new(Mutex::default);

impl Code {
    /// What compiling the statements of some scopes costs, in units of one that calls nothing.
    pub(super) fn cost(&self, scopes: &[Scope]) -> usize {
        self.statements.iter().filter(|s| scopes.contains(&s.scope)).map(|s| s.cost as usize).sum()
    }
}

impl Program {
    /// What compiling the mask and the change of the score costs a CUDA kernel for each score that a thread holds, in
    /// statements that call nothing: a call of a function of floats counts as 8. 0 for programs of under 100 nodes.
    pub fn cost_of_a_score(&self) -> [usize; 2] {
        if self.graph().nodes().len() < SHORT {
            return [0; 2];
        }
        let known = || COSTS.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(cost) = known().get(self.hash()) {
            return *cost;
        }
        let cost = |root| lower_fragments(self.graph(), &[root]).cost(&[Scope::Score]);
        let costs = [self.mask(), self.score()].map(|root| root.map_or(0, cost));
        known().insert(*self.hash(), costs);
        costs
    }
}

//! What statements cost a compiler.

use super::stmt::Scope;
use super::{Code, lower_fragments};
use crate::score::program::Program;

/// Programs of fewer nodes cost compilers little: nothing is lowered to count.
const SHORT: usize = 100;

impl Code {
    /// What compiling the statements of some scopes costs, in units of one that calls nothing.
    pub(super) fn cost(&self, scopes: &[Scope]) -> usize {
        self.statements.iter().filter(|s| scopes.contains(&s.scope)).map(|s| s.cost as usize).sum()
    }
}

impl Program {
    /// What compiling the mask and the change of the score costs a CUDA kernel for each score that a thread holds, in
    /// statements that call nothing: a call of `tanh`, `exp2` or `log2` counts as 8. 0 for programs of under 100 nodes.
    pub fn cost_of_a_score(&self) -> [usize; 2] {
        let cost = |root| lower_fragments(self.graph(), &[root]).cost(&[Scope::Score]);
        *self.cost_of_a_score.get_or_init(|| match self.graph().nodes().len() {
            ..SHORT => [0; 2],
            _ => [self.mask(), self.score()].map(|root| root.map_or(0, cost)),
        })
    }
}

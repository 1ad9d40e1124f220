//! The analyses that take a whole program.

use super::Program;
use crate::score::analysis::dense::DenseMask;
use crate::score::analysis::derive::Derivative;
use crate::score::analysis::tile::TileProgram;
use crate::score::graph::Graph;
use crate::score::syntax::words::Var;

impl TileProgram {
    /// The classification of a program's mask.
    pub fn new(program: &Program) -> Self {
        Self::of(&program.graph, program.mask, false)
    }

    /// The same for a kernel that looks at the elements of tensors in each tile: what depends on them lies between
    /// their least and greatest, and is exact where the rows or keys of a tile have one value each.
    pub fn by_elements(program: &Program) -> Self {
        Self::of(&program.graph, program.mask, true)
    }

    /// That of the conditions beside a tensor of bools.
    pub(in crate::score) fn beside(dense: &DenseMask) -> Self {
        Self::of(&dense.graph, dense.rest, true)
    }
}

impl Derivative {
    /// The derivatives of a program's score.
    pub fn of_score(program: &Program) -> Self {
        let mut graph = program.graph.clone();
        let root = program.score.unwrap_or_else(|| graph.var(Var::Score));
        Self::of(graph, root)
    }

    /// That of a score that no program changes.
    pub(crate) fn of_nothing() -> Self {
        let mut graph = Graph::default();
        let root = graph.var(Var::Score);
        Self::of(graph, root)
    }

    /// The derivatives of a program's sink, if it has one.
    pub fn of_sink(program: &Program) -> Option<Self> {
        Some(Self::of(program.graph.clone(), program.sink?))
    }

    /// The same by one tensor or scalar alone, by its place among the declarations.
    #[must_use]
    pub fn by(mut self, tensor: usize) -> Self {
        self.tensors.retain(|t| t.tensor == tensor);
        self
    }
}

//! What calls have in common that run on one plan.

use super::Demand;
use flashtune_codegen::{Problem, ShapeBucket};

/// A class of calls: what is computed, on about which sizes, and what is asked of the kernel beyond.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct PlanKey {
    pub problem: Problem,
    pub bucket: ShapeBucket,
    pub demand: Demand,
}

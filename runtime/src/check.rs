//! Does a compiled kernel compute attention? The test that every kernel passes before it may win, and `flashtune check`.
use crate::{Device, Distribution, Layout, Module, Result, Verdict};
use flashtune_codegen::abi::ForwardArgs;
use flashtune_codegen::{Problem, Shape};
use std::fmt;
use std::sync::Arc;

/// Which inputs to check a kernel with.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CheckInputs {
    /// Memory layout of Q, K, V and O.
    pub layout: Layout,
    /// Distribution of the values.
    pub distribution: Distribution,
    /// Seed of the values.
    pub seed: u64,
    /// Ask for the LSE as well.
    pub lse: bool,
    /// Put NaN and Inf into rows of K and V that some or all queries do not see.
    pub poison: bool,
    /// Softmax scale; `None` is the default.
    pub scale: Option<f32>,
}

/// One problem, shape and input set on a device, with the expected results: computed once, used for many kernels.
pub struct CheckCase {}

/// What a check found.
#[derive(Debug, Clone, PartialEq)]
pub struct CheckReport {
    /// Against the oracle.
    pub verdict: Verdict,
    /// Both launches gave the same bytes.
    pub repeatable: bool,
    /// What was written outside of the outputs, if anything.
    pub stray: Option<String>,
}

impl CheckCase {
    /// Makes inputs, computes the expected results and uploads.
    pub fn new(_device: Arc<dyn Device>, _problem: &Problem, _shape: &Shape, _inputs: &CheckInputs) -> Result<Self> {
        todo!()
    }
    /// Launches a kernel twice and compares.
    pub fn check(&self, _module: &dyn Module) -> Result<CheckReport> {
        todo!()
    }
    /// The arguments of the case's launch: valid as long as the case lives.
    pub fn args(&self) -> &ForwardArgs {
        todo!()
    }
    /// The sizes.
    pub fn shape(&self) -> &Shape {
        todo!()
    }
}

impl CheckReport {
    /// Everything is as it must be.
    pub fn passed(&self) -> bool {
        todo!()
    }
}

impl fmt::Display for CheckReport {
    fn fmt(&self, _f: &mut fmt::Formatter<'_>) -> fmt::Result {
        todo!()
    }
}

/// Checks one kernel on one shape.
pub fn check_kernel(
    device: &Arc<dyn Device>,
    module: &dyn Module,
    shape: &Shape,
    inputs: &CheckInputs,
) -> Result<CheckReport> {
    CheckCase::new(device.clone(), &module.kernel().problem, shape, inputs)?.check(module)
}

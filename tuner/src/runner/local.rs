//! The questions, answered by a device of this process: what a worker does, and what tuning without one does.

use super::backward::BackwardBench;
use super::bench::{Bench, Measure};
use super::cases::Cases;
use super::ragged::RaggedBench;
use super::{Inputs, Size};
use flashtune_cache::{Artifact, DeviceFingerprint, Reading};
use flashtune_runtime::{Device, Error as RuntimeError, Module};
use std::collections::HashMap;
use std::sync::Arc;

/// A device with the inputs and the loaded candidates of one job.
pub(crate) struct Local {
    device: Arc<dyn Device>,
    inputs: Option<Inputs>,
    cases: Option<Cases>,
    /// Before the modules, whose launches it may have captured.
    bench: Option<Box<dyn Measure + Send>>,
    modules: HashMap<u32, Arc<dyn Module>>,
}

impl Local {
    pub(crate) fn new(device: Arc<dyn Device>) -> Self {
        Self { device, inputs: None, cases: None, bench: None, modules: HashMap::new() }
    }

    pub(crate) fn fingerprint(&self) -> &DeviceFingerprint {
        self.device.fingerprint()
    }

    /// Forgets the job before.
    pub(crate) fn start(&mut self, inputs: &Inputs) {
        *self = Self { inputs: Some(*inputs), ..Self::new(self.device.clone()) };
    }

    pub(crate) fn prepare(&mut self, size: Size) -> Result<(), RuntimeError> {
        let Some(inputs) = &self.inputs else { return Ok(()) };
        match size {
            Size::Small => self.cases = Some(Cases::new(&self.device, inputs)?),
            Size::Probe | Size::Full => {
                self.bench = Some(match (inputs.is_ragged(), inputs.is_backward()) {
                    (true, _) => Box::new(RaggedBench::new(&self.device, inputs)?),
                    (false, true) => Box::new(BackwardBench::new(&self.device, inputs)?),
                    (false, false) => Box::new(Bench::new(&self.device, inputs)?),
                });
            }
        }
        Ok(())
    }

    pub(crate) fn load(&mut self, id: u32, artifact: &Artifact) -> Result<(), String> {
        let module = self.device.load(artifact).map_err(|e| e.to_string())?;
        self.modules.insert(id, module);
        Ok(())
    }

    pub(crate) fn check(&mut self, id: u32, size: Size) -> Result<f64, String> {
        let module = self.modules.get(&id).ok_or("it is not loaded")?;
        match size {
            Size::Small => self.cases.as_ref().ok_or(UNPREPARED)?.check(&**module),
            Size::Probe => self.bench.as_mut().ok_or(UNPREPARED)?.probe(&**module).map(|()| 0.0),
            Size::Full => self.bench.as_mut().ok_or(UNPREPARED)?.check(id, &**module),
        }
    }

    pub(crate) fn confirm(&mut self, id: u32) -> Result<(), String> {
        let module = self.modules.get(&id).ok_or("it is not loaded")?;
        self.bench.as_mut().ok_or(UNPREPARED)?.confirm(id, &**module)
    }

    pub(crate) fn time(&mut self, id: u32) -> Result<f64, String> {
        let module = self.modules.get(&id).ok_or("it is not loaded")?;
        self.bench.as_mut().ok_or(UNPREPARED)?.time(id, &**module)
    }

    pub(crate) fn reading(&self) -> Reading {
        self.device.reading()
    }

    pub(crate) fn unfused_us(&self, fused_us: f64) -> Option<f64> {
        self.bench.as_ref()?.unfused_us(fused_us)
    }
}

/// Asked out of order.
const UNPREPARED: &str = "its inputs were not made";

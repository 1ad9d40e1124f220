//! Does a kernel compute a ragged batch? Sequences of different lengths in a store of any layout, with NaN wherever
//! there is no key.

mod batch;
mod data;
mod elements;
mod expected;
mod place;

pub use batch::{Index, LengthsBy, LseForm, Most, Queries, RaggedBatch, ScaleForm, StoreLayout};
use data::Parts;
pub use data::{Part, RaggedData};

use super::{CheckReport, FULL_CHECK};
use crate::guarded::Guarded;
use crate::{Device, Error, Module, Result, SideBuffers, Verdict};
use flashtune_codegen::Problem;
use flashtune_codegen::abi::RaggedArgs;
use std::collections::BTreeMap;
use std::sync::Arc;

/// A ragged batch on a device with the results that are expected: computed once, used for many kernels.
pub struct RaggedCase {
    device: Arc<dyn Device>,
    data: RaggedData,
    memory: BTreeMap<Part, Guarded>,
    /// What the score program reads; its address is in `args`.
    _side: Option<SideBuffers>,
    args: RaggedArgs,
}

impl RaggedCase {
    /// Draws the inputs, computes the expected results and uploads.
    ///
    /// # Errors
    /// When the batch does not fit the problem, or the device has no memory.
    pub fn new(device: Arc<dyn Device>, problem: &Problem, batch: &RaggedBatch) -> Result<Self> {
        let data = RaggedData::of_sampled(problem, batch, FULL_CHECK)?;
        let side = problem.program.map(|p| SideBuffers::new(&*device, &p, data.shape(), data.side())).transpose()?;
        let memory = data.parts().iter().map(|(part, bytes)| Ok((*part, Guarded::new(&*device, part.name(), bytes)?)));
        let memory = memory.collect::<Result<BTreeMap<Part, Guarded>>>()?;
        let args = data.args(|part| memory[&part].address());
        let args = RaggedArgs { side: side.as_ref().map_or(0, SideBuffers::address), ..args };
        Ok(Self { device, data, memory, _side: side, args })
    }

    /// The arguments of the case's launch: valid as long as the case lives. O and the log-sum-exp may be overwritten.
    pub fn args(&self) -> &RaggedArgs {
        &self.args
    }

    /// The inputs and what they give.
    pub fn data(&self) -> &RaggedData {
        &self.data
    }

    /// Uploads the inputs again, which a wrong kernel may have changed.
    ///
    /// # Errors
    /// When a device call fails.
    pub fn restore(&self) -> Result<()> {
        self.memory.iter().try_for_each(|(part, memory)| memory.upload(&*self.device, &self.data.parts()[part]))
    }

    /// Launches a kernel on the device's own stream.
    ///
    /// # Errors
    /// When the kernel is for another problem, or the launch fails.
    pub fn launch(&self, module: &dyn Module) -> Result<()> {
        let kernel = module.kernel();
        if kernel.problem != self.data.problem {
            return Err(Error::Device {
                call: "check",
                device: self.device.fingerprint().to_string(),
                message: format!("the kernel computes {}, the inputs are for {}", kernel.problem, self.data.problem),
                remedy: "check a kernel with inputs of its own problem",
            });
        }
        // SAFETY: the arguments describe buffers that `self` owns.
        unsafe { self.device.launch_shape(module, self.data.shape(), &self.args, self.device.stream()) }
    }

    /// Launches a kernel twice and compares: the result must match the oracle, be the same bytes both times, and
    /// nothing but the rows of sequences may have been written.
    ///
    /// # Errors
    /// When the kernel is for another problem or a device call fails; a wrong result is not an error but a report.
    pub fn check(&self, module: &dyn Module) -> Result<CheckReport> {
        self.check_launches(module, 2)
    }

    /// [`RaggedCase::check`] with another number of launches (at least one).
    ///
    /// # Errors
    /// As [`RaggedCase::check`].
    pub fn check_launches(&self, module: &dyn Module, launches: usize) -> Result<CheckReport> {
        let first = self.run(&mut || self.launch(module))?;
        let (mut stray, mut repeatable) = (first.stray.clone(), true);
        for _ in 1..launches {
            let again = self.run(&mut || self.launch(module))?;
            repeatable &= again.parts == first.parts;
            stray = stray.or(again.stray);
        }
        stray = stray.or(self.changed_input()?);
        let (verdict, besides) = self.compare(&first);
        Ok(CheckReport { verdict, repeatable, stray: stray.or(besides) })
    }

    /// What a launch writes into poison.
    ///
    /// # Errors
    /// When it, or another device call, fails.
    pub fn run(&self, launch: &mut dyn FnMut() -> Result<()>) -> Result<RaggedOutputs> {
        let (device, stream) = (&*self.device, self.device.stream());
        let outputs = || self.memory.iter().filter(|(part, _)| part.is_written());
        outputs().try_for_each(|(_, memory)| memory.poison(device))?;
        launch()?;
        device.synchronize(stream)?;
        let mut written = RaggedOutputs { parts: Parts::new(), stray: None };
        for (part, memory) in outputs() {
            let (bytes, guards) = memory.download(device, stream)?;
            written.stray = written.stray.or(guards);
            written.parts.insert(*part, bytes);
        }
        Ok(written)
    }

    /// What was written of the inputs, or around them.
    ///
    /// # Errors
    /// When a device call fails.
    pub fn changed_input(&self) -> Result<Option<String>> {
        let (device, stream) = (&*self.device, self.device.stream());
        for (part, memory) in self.memory.iter().filter(|(part, _)| !part.is_written()) {
            let changed = memory.changed(device, &self.data.parts()[part], stream)?;
            if changed.is_some() {
                return Ok(changed);
            }
        }
        Ok(None)
    }

    /// Compares what a launch wrote with what is expected, and tells what it wrote besides the rows of sequences.
    pub fn compare(&self, written: &RaggedOutputs) -> (Verdict, Option<String>) {
        self.data.compare(written.o(), written.parts.get(&Part::Lse).map(Vec::as_slice))
    }
}

/// What one launch wrote.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RaggedOutputs {
    parts: Parts,
    /// What was written around the outputs, if anything was.
    pub stray: Option<String>,
}

impl RaggedOutputs {
    /// O, poison where nothing was written.
    pub fn o(&self) -> &[u8] {
        &self.parts[&Part::O]
    }
}

#[cfg(test)]
mod tests;

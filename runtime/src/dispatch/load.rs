//! From a choice to a loaded kernel: out of memory, a layer, a file, or a compiler where one may run.

use super::dispatcher::Dispatcher;
use super::plan::{Choice, Loaded};
use super::policy::SEALED_REMEDY;
use crate::{Compiler, Error, Result, compile};
use flashtune_cache::{Artifact, FILES_LAYER, Key, Origin, Validity};
use flashtune_codegen::Kernel;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

impl Dispatcher {
    /// The loaded kernel of a choice: from memory, a layer, a file, or compiled now where that is allowed.
    pub(super) fn load(&self, choice: &Choice) -> Result<Loaded> {
        let kernel = &choice.kernel;
        let known = || self.modules.read().unwrap_or_else(PoisonError::into_inner).get(kernel).cloned();
        if let Some(loaded) = known() {
            return Ok(loaded);
        }
        self.loading.run(kernel, || {
            if let Some(loaded) = known() {
                return Ok(loaded);
            }
            let (artifact, binary) = self.artifact(choice)?;
            let start = Instant::now();
            let module = self.config.device.load(&artifact)?;
            count(&self.work.loaded, &self.work.load_us, start);
            let loaded = Loaded { module, artifact: artifact.recipe.key(), binary };
            self.modules.write().unwrap_or_else(PoisonError::into_inner).insert(*kernel, loaded.clone());
            Ok(loaded)
        })
    }

    fn artifact(&self, choice: &Choice) -> Result<(Artifact, String)> {
        let missing = match &choice.record {
            Some(record) => match self.stored(&choice.kernel, &record.artifact) {
                Ok(found) => return Ok(found),
                Err(why) => Some(why),
            },
            None => None,
        };
        if !self.may_compile() {
            return Err(Error::Sealed {
                problem: choice.kernel.problem.to_string(),
                reason: missing.unwrap_or_else(|| "its kernel would have to be compiled".to_owned()),
                remedy: SEALED_REMEDY,
            });
        }
        if let Some(why) = missing {
            tracing::info!(kernel = %choice.kernel.name(), why, "the record's kernel is compiled again");
        }
        let compiler = self.config.device.compiler()?;
        let key = compile::recipe(&choice.kernel, &self.config.templates, compiler.id()).key();
        if let Ok(found) = self.stored(&choice.kernel, &key) {
            return Ok(found);
        }
        self.compile(&*compiler, &choice.kernel, &key)
    }

    /// The artifact of a recipe key, if some layer has it and it is what the kernel needs; else why not.
    fn stored(&self, kernel: &Kernel, key: &Key) -> Result<(Artifact, String), String> {
        let (artifact, layer) =
            self.config.layers.artifact(key).ok_or_else(|| format!("no layer has its binary {}", &key.hex()[..12]))?;
        let recipe = &artifact.recipe;
        let found = Validity { arch: recipe.kernel.arch, templates: recipe.templates.clone(), abi: recipe.abi };
        if let Some(difference) = self.validity.difference(&found) {
            return Err(format!("the binary of {layer}: {difference}"));
        }
        if recipe.kernel != *kernel {
            return Err(format!("the binary of {layer}: kernel is {}, not {}", recipe.kernel.name(), kernel.name()));
        }
        if recipe.options != kernel.compile_options() {
            return Err(format!("the binary of {layer}: options are {:?}", recipe.options));
        }
        let from = format!("{layer} ({})", recipe.compiler);
        Ok((artifact, from))
    }

    fn compile(&self, compiler: &dyn Compiler, kernel: &Kernel, key: &Key) -> Result<(Artifact, String)> {
        // Held to the end, so that nothing compiles once the dispatcher is sealed.
        let open = self.open.read().unwrap_or_else(PoisonError::into_inner);
        if !*open {
            let (problem, reason) = (kernel.problem.to_string(), "it was sealed meanwhile".to_owned());
            return Err(Error::Sealed { problem, reason, remedy: SEALED_REMEDY });
        }
        let make = || {
            let start = Instant::now();
            let artifact = compile::compile_with(compiler, kernel, &self.config.templates)?;
            count(&self.work.compiled, &self.work.compile_us, start);
            tracing::info!(kernel = %kernel.name(), ms = artifact.facts.compile_ms, "compiled");
            if artifact.facts.spill_bytes > 0 {
                tracing::warn!(kernel = %kernel.name(), bytes = artifact.facts.spill_bytes, "the kernel spills registers");
            }
            Ok::<_, Error>(artifact)
        };
        let (artifact, origin) = match &self.config.artifacts {
            Some(files) => files.get_or_make(key, make)?,
            None => (make()?, Origin::Made),
        };
        if let Origin::Unkept(e) = &origin
            && !self.said_unwritable.swap(true, Ordering::Relaxed)
        {
            tracing::warn!(error = %e, "compiled kernels cannot be kept; they are compiled again in every process");
        }
        let from = match origin {
            Origin::File => format!("{FILES_LAYER} ({})", artifact.recipe.compiler),
            _ => format!("compiled now by {} in {:.0} ms", compiler.id(), artifact.facts.compile_ms),
        };
        Ok((artifact, from))
    }
}

/// Counts one piece of work and the time since its start.
fn count(number: &AtomicU64, us: &AtomicU64, start: Instant) {
    number.fetch_add(1, Ordering::Relaxed);
    us.fetch_add(start.elapsed().as_micros() as u64, Ordering::Relaxed);
}

//! From a choice to a loaded kernel, and what answers while the kernel of a choice is being compiled.

use super::Status;
use super::background;
use super::binaries::{Binary, count};
use super::dispatcher::Dispatcher;
use super::job::Job;
use super::plan::{Choice, Loaded};
use super::policy::SEALED_REMEDY;
use crate::{Compiler, Error, Result};
use flashtune_cache::Key;
use flashtune_codegen::Kernel;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

/// How long a compilation in the background lets a quick one go ahead: compilers read sources one after the other,
/// which takes 40 to 100 ms, and the reading of the other source would be waited for.
const HEAD_START: Duration = Duration::from_millis(100);

/// What a choice gives to run.
pub(super) struct Served {
    /// The choice, or what stands in for it.
    pub choice: Choice,
    pub loaded: Loaded,
    /// The compilation of the choice's own kernel, where another stands in for it.
    pub awaited: Option<Arc<Job>>,
}

impl Dispatcher {
    /// The loaded kernel of a choice: from memory, a layer, a file, or compiled now where that is allowed. In haste, a
    /// quick schedule stands in for one that would have to be compiled.
    pub(super) fn load(&self, choice: &Choice, haste: bool) -> Result<Served> {
        let kernel = &choice.kernel;
        let served = |loaded| Served { choice: choice.clone(), loaded, awaited: None };
        if let Some(loaded) = self.loaded(kernel) {
            return Ok(served(loaded));
        }
        self.loading.run(kernel, || {
            if let Some(loaded) = self.loaded(kernel) {
                return Ok(served(loaded));
            }
            if let Some(result) = self.awaited(kernel, haste) {
                return Ok(served(self.put_in_memory(kernel, result?)?));
            }
            let binary = match self.source_of(choice)? {
                Source::Binary(binary) => *binary,
                Source::Compiler(compiler, key) => {
                    if haste && let Some(stand_in) = self.stand_in(choice, &compiler, key) {
                        return Ok(stand_in);
                    }
                    // Begun a moment ago, or now on this thread.
                    match self.awaited(kernel, false) {
                        Some(result) => result?,
                        None => self.binaries.compile(&*compiler, kernel, &key, false)?,
                    }
                }
            };
            Ok(served(self.put_in_memory(kernel, binary)?))
        })
    }

    fn loaded(&self, kernel: &Kernel) -> Option<Loaded> {
        self.modules.read().unwrap_or_else(PoisonError::into_inner).get(kernel).cloned()
    }

    fn put_in_memory(&self, kernel: &Kernel, (artifact, binary): Binary) -> Result<Loaded> {
        let span = tracing::info_span!("flashtune.load", kernel = %kernel.name(), bytes = artifact.bytes.len());
        let _in_span = span.enter();
        let start = Instant::now();
        let module = self.config.device.load(&artifact)?;
        count(&self.binaries.work.loaded, &self.binaries.work.load_us, start);
        let loaded = Loaded { module, artifact: artifact.recipe.key(), binary: binary.into() };
        self.modules.write().unwrap_or_else(PoisonError::into_inner).insert(*kernel, loaded.clone());
        Ok(loaded)
    }

    /// The stored binary of a choice, or else the compiler that may make it.
    fn source_of(&self, choice: &Choice) -> Result<Source> {
        let missing = match &choice.record {
            Some(record) => match self.binaries.stored(&choice.kernel, &record.artifact) {
                Ok(found) => return Ok(Source::Binary(Box::new(found))),
                Err(why) => Some(why),
            },
            None => None,
        };
        if !self.binaries.may_compile() {
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
        let key = self.binaries.key(&choice.kernel, &*compiler);
        Ok(match self.binaries.stored(&choice.kernel, &key) {
            Ok(found) => Source::Binary(Box::new(found)),
            Err(_) => Source::Compiler(compiler, key),
        })
    }

    /// What the background made of a kernel. In haste only what is there.
    fn awaited(&self, kernel: &Kernel, haste: bool) -> Option<Result<Binary>> {
        let jobs = || self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        let job = jobs().get(kernel).filter(|job| !haste || job.is_ready()).cloned()?;
        let result = job.take();
        jobs().remove(kernel);
        result
    }

    /// A kernel with the same result that is there sooner, with the compilation of the choice's own kernel in the
    /// background. None where there is no such schedule, or it does not help.
    fn stand_in(&self, choice: &Choice, compiler: &Arc<dyn Compiler>, key: Key) -> Option<Served> {
        let kernel = Kernel { schedule: choice.kernel.schedule.quick()?, ..choice.kernel };
        kernel.check().ok()?;
        // On a single core the quick kernel must not share it.
        let alone = std::thread::available_parallelism().is_ok_and(|n| n.get() == 1);
        let early = if alone { None } else { Some(self.job(&choice.kernel, compiler, key)?) };
        if early.as_ref().is_some_and(|job| job.is_ready()) {
            return None;
        }
        let key_of_quick = self.binaries.key(&kernel, &**compiler);
        let quick = || match self.loaded(&kernel) {
            Some(loaded) => Ok(loaded),
            None => {
                let binary = match self.binaries.stored(&kernel, &key_of_quick) {
                    Ok(found) => found,
                    Err(_) => self.binaries.compile(&**compiler, &kernel, &key_of_quick, false)?,
                };
                self.put_in_memory(&kernel, binary)
            }
        };
        let loaded = match self.loading.run(&kernel, quick) {
            Ok(loaded) => loaded,
            Err(e) => {
                tracing::warn!(
                    kernel = %kernel.name(), error = %e,
                    "the quick schedule cannot be had; the other is waited for"
                );
                return None;
            }
        };
        let awaited = match early {
            Some(job) => job,
            None => self.job(&choice.kernel, compiler, key)?,
        };
        if awaited.is_ready() {
            return None;
        }
        // Before the caller can end the process.
        compiler.warm_up();
        background::wait_at_the_end();
        let because = format!(
            "it compiles quickly, and answers with the same bits until {} is compiled ({}: {})",
            choice.kernel.schedule, choice.status, choice.because
        );
        let choice = Choice { kernel, status: Status::Quick, because: because.into(), ..choice.clone() };
        Some(Served { choice, loaded, awaited: Some(awaited) })
    }

    /// The compilation of a kernel in the background, begun now unless it was before.
    fn job(&self, kernel: &Kernel, compiler: &Arc<dyn Compiler>, key: Key) -> Option<Arc<Job>> {
        let mut jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(job) = jobs.get(kernel) {
            return Some(job.clone());
        }
        let (binaries, compiler, of) = (self.binaries.clone(), compiler.clone(), *kernel);
        let job = background::start(move || {
            std::thread::sleep(HEAD_START);
            binaries.compile(&*compiler, &of, &key, true).inspect_err(|e| {
                tracing::warn!(
                    kernel = %of.name(), error = %e,
                    "the quick schedule stays, since this one cannot be had"
                );
            })
        })?;
        jobs.insert(*kernel, job.clone());
        Some(job)
    }
}

/// Where a binary comes from.
enum Source {
    Binary(Box<Binary>),
    /// From nowhere yet; its key.
    Compiler(Arc<dyn Compiler>, Key),
}

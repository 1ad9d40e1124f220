//! Binaries of kernels: out of a layer, a file, or a compiler where one may run. Knows no device, so that a compilation
//! may outlive the dispatcher that asked for it.

use super::Policy;
use super::background::Compiling;
use super::policy::SEALED_REMEDY;
use super::tally::Work;
use crate::sync::RwLock;
use crate::{Compiler, Error, Result, compile};
use flashtune_cache::{Artifact, ArtifactFiles, FILES_LAYER, Key, Layers, Needed, Origin, Validity};
use flashtune_codegen::{Kernel, TemplateSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Instant;

/// A binary, and where it came from in words.
pub(super) type Binary = (Artifact, String);

/// What a dispatcher gets binaries from.
pub(super) struct Binaries {
    pub(super) templates: Arc<TemplateSet>,
    pub(super) layers: Arc<Layers>,
    pub(super) needed: Needed,
    pub(super) work: Work,
    /// Whether compilers may run, apart from the policy; held while one does.
    pub(super) open: RwLock<bool>,
    policy: Policy,
    /// Where compiled kernels are kept.
    files: Option<ArtifactFiles>,
    /// Whether it was already said that compiled kernels cannot be kept.
    said_unwritable: AtomicBool,
}

impl Binaries {
    pub(crate) fn new(
        templates: Arc<TemplateSet>,
        layers: Arc<Layers>,
        needed: Needed,
        policy: Policy,
        files: Option<ArtifactFiles>,
    ) -> Self {
        let said_unwritable = AtomicBool::new(false);
        Self {
            templates,
            layers,
            needed,
            work: Work::default(),
            open: RwLock::new(true),
            policy,
            files,
            said_unwritable,
        }
    }

    /// Whether a compiler may run.
    pub(crate) fn may_compile(&self) -> bool {
        self.policy.may_compile() && *self.open.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The key under which a compiler's binary of a kernel is kept.
    pub(crate) fn key(&self, kernel: &Kernel, compiler: &dyn Compiler) -> Key {
        compile::recipe(kernel, &self.templates, compiler.id()).key()
    }

    /// The artifact of a recipe key, if some layer has it and it is what the kernel needs; else why not.
    pub(crate) fn stored(&self, kernel: &Kernel, key: &Key) -> Result<Binary, String> {
        let (artifact, layer) =
            self.layers.artifact(key).ok_or_else(|| format!("no layer has its binary {}", &key.hex()[..12]))?;
        let recipe = &artifact.recipe;
        if let Some(difference) = self.needed.difference(&Validity::of(recipe)) {
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

    /// Compiles a kernel, unless another process does it at the moment: then its result is waited for. In the
    /// background no compiler begins once the process is ending.
    pub(crate) fn compile(
        &self,
        compiler: &dyn Compiler,
        kernel: &Kernel,
        key: &Key,
        background: bool,
    ) -> Result<Binary> {
        let refused = |reason: &str| {
            let problem = kernel.problem.to_string();
            Error::Sealed { problem, reason: reason.to_owned(), remedy: SEALED_REMEDY }
        };
        // Held to the end, so that nothing compiles once the dispatcher is sealed.
        let open = self.open.read().unwrap_or_else(PoisonError::into_inner);
        if !*open {
            return Err(refused("it was sealed meanwhile"));
        }
        let make = || {
            let compiling = background.then(Compiling::begin);
            if let Some(None) = compiling {
                return Err(refused("the process is ending"));
            }
            let span = tracing::info_span!("flashtune.compile", kernel = %kernel.name(), background);
            let _in_span = span.enter();
            let start = Instant::now();
            let artifact = compile::compile_with(compiler, kernel, &self.templates)?;
            self.work.compile_times.add(start.elapsed());
            count(&self.work.compiled, &self.work.compile_us, start);
            tracing::info!(kernel = %kernel.name(), ms = artifact.facts.compile_ms, background, "compiled");
            if artifact.facts.spill_bytes > 0 {
                tracing::warn!(
                    kernel = %kernel.name(), bytes = artifact.facts.spill_bytes,
                    "the kernel spills registers"
                );
            }
            Ok::<_, Error>(artifact)
        };
        let (artifact, origin) = match &self.files {
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
pub(super) fn count(number: &AtomicU64, us: &AtomicU64, start: Instant) {
    number.fetch_add(1, Ordering::Relaxed);
    us.fetch_add(start.elapsed().as_micros() as u64, Ordering::Relaxed);
}

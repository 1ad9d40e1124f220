//! From a kernel to a compiled artifact.

mod build_id;
mod cc;
mod leash;
#[cfg(test)]
pub(crate) mod memory;
mod nvrtc;
mod nvrtc_lib;
mod ptxas_log;

pub use cc::Cc;
pub use nvrtc::Nvrtc;

use crate::{Compiler, Result};
use flashtune_cache::{Artifact, CompilerId, Recipe};
use flashtune_codegen::{Arch, Kernel, TemplateSet, abi};
use std::sync::Arc;

/// The compiler for an arch, found once per process. Needs no device: NVRTC also compiles for a GPU that is not here.
///
/// # Errors
/// [`crate::Error::Missing`] with where it was looked for and how to get it.
pub fn compiler_for(arch: Arch) -> Result<Arc<dyn Compiler>> {
    match arch {
        Arch::Cpu(_) => Ok(Cc::find()?),
        Arch::Sm(_) => Ok(Nvrtc::find()?),
    }
}

/// Everything that determines the compiled kernel, for keys.
pub fn recipe(kernel: &Kernel, templates: &TemplateSet, compiler: &CompilerId) -> Recipe {
    Recipe {
        kernel: *kernel,
        templates: templates.hash_of(kernel.schedule.family()).to_owned(),
        options: kernel.compile_options(),
        compiler: compiler.clone(),
        abi: abi::ABI_VERSION,
    }
}

/// Renders and compiles a kernel with the arch's own compiler.
pub fn compile(kernel: &Kernel, templates: &TemplateSet) -> Result<Artifact> {
    compile_with(&*compiler_for(kernel.arch)?, kernel, templates)
}

/// Renders and compiles a kernel with a given compiler.
pub fn compile_with(compiler: &dyn Compiler, kernel: &Kernel, templates: &TemplateSet) -> Result<Artifact> {
    let source = kernel.render(templates)?;
    let (bytes, facts) = compiler.compile(&source)?;
    let (recipe, args) = (recipe(kernel, templates, compiler.id()), abi::ArgsLayout::of(kernel));
    Ok(Artifact { recipe, entry: source.entry, args, facts, bytes })
}

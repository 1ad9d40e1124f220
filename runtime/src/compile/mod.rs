//! From a kernel to a compiled artifact.

mod cc;
mod nvrtc;
mod nvrtc_find;
mod nvrtc_lib;
mod ptxas_log;

pub use cc::Cc;
pub use nvrtc::Nvrtc;

use crate::{Compiler, Result};
use flashtune_cache::{Artifact, CompilerId, Recipe};
use flashtune_codegen::{Arch, Kernel, Language, Source, TemplateSet, abi};
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

/// Loads NVRTC and compiles next to nothing with it: the library is large, and the first compilation of a process pays
/// for paging it in. Worth doing beside something else that takes its time, when a CUDA kernel will have to be compiled.
/// A failure is left for the real compilation to report.
pub fn warm_up_nvrtc() {
    let Ok(nvrtc) = Nvrtc::find() else { return };
    let source = Source {
        name: "warm-up".to_owned(),
        entry: "warm_up".to_owned(),
        language: Language::Cuda,
        options: vec!["--gpu-architecture=sm_80".to_owned()],
        text: "extern \"C\" __global__ void warm_up(float* x) { x[threadIdx.x] *= 2.0f; }\n".to_owned(),
    };
    if let Err(e) = nvrtc.compile(&source) {
        tracing::debug!(error = %e, "the warm-up of NVRTC failed");
    }
}

/// Everything that determines the compiled kernel, for keys.
pub fn recipe(kernel: &Kernel, templates: &TemplateSet, compiler: &CompilerId) -> Recipe {
    Recipe {
        kernel: *kernel,
        templates: templates.hash().to_owned(),
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
    Ok(Artifact { recipe: recipe(kernel, templates, compiler.id()), entry: source.entry, facts, bytes })
}

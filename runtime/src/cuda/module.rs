//! A loaded cubin.

use super::context::{BesideCaptures, Context};
use super::tile_counters::TileCounters;
use crate::{Error, Module, Result, elf};
use cudarc::driver::result::{function, module};
use cudarc::driver::sys::{CUfunction, CUfunction_attribute, CUmodule};
use flashtune_cache::Artifact;
use flashtune_codegen::abi::ArgsLayout;
use flashtune_codegen::{Arch, Kernel, Op, SmArch, StageEntry, StageRole};
use std::any::Any;
use std::ffi::{CStr, CString};
use std::sync::Arc;

/// A loaded cubin and the function to launch.
pub(super) struct CudaModule {
    pub(super) context: Arc<Context>,
    /// The functions of its entry points, in the order in which a launch runs them.
    pub(super) stages: Vec<(StageEntry, CUfunction)>,
    /// The counters from which persistent thread blocks take their tiles.
    pub(super) counters: TileCounters,
    /// The hash of its family's templates.
    pub(super) templates: Arc<str>,
    /// The argument that it takes, where that is not the whole of this build's: of a kernel of an earlier build, or one
    /// that does not know all of the last fields.
    pub(super) shorter_args: Option<ArgsLayout>,
    /// Whether its stages that may start early ([`flashtune_codegen::Stage::starts_early`]) do wait for the launch
    /// before them, and the device can start them so. The image says it by a symbol, which one that was compiled from
    /// other templates may not have.
    pub(super) waits: bool,
    raw: CUmodule,
    kernel: Kernel,
}

// SAFETY: module and function handles may be used from any thread with the context current.
unsafe impl Send for CudaModule {}
// SAFETY: as above; they are not changed after loading.
unsafe impl Sync for CudaModule {}

impl Module for CudaModule {
    fn as_any(&self) -> &dyn Any {
        self
    }
    fn kernel(&self) -> &Kernel {
        &self.kernel
    }
}

impl Drop for CudaModule {
    fn drop(&mut self) {
        let Ok(_bound) = self.context.bind() else { return };
        // SAFETY: loaded in `load`, unloaded once. After a fault the module went with its context.
        let _ = unsafe { module::unload(self.raw) };
    }
}

/// The symbol of kernels that wait for the launch before them (lib/cuda/ptx/dependent_launch.cuh).
const WAITS_FOR_LAUNCH_BEFORE: &CStr = c"ft_waits_for_launch_before";

impl CudaModule {
    /// Loads a cubin for a device of architecture `ours`.
    pub(super) fn load(context: &Arc<Context>, ours: SmArch, artifact: &Artifact) -> Result<Self> {
        let kernel = artifact.recipe.kernel;
        let refused = |message: String, remedy| Error::Device {
            call: "load",
            device: context.name.clone(),
            message: format!("{}: {message}", kernel.name()),
            remedy,
        };
        if !runs_on(kernel.arch, ours) {
            let message = format!("it was compiled for {}, this device is {ours}", kernel.arch);
            return Err(refused(message, "compile it for this device"));
        }
        artifact.args.check(&kernel)?;
        // The driver trusts the headers of an image.
        elf::check(&artifact.bytes).map_err(|why| {
            refused(format!("it is no cubin: {why}"), "remove it from the cache and compile it again")
        })?;

        let _bound = context.bind()?;
        let _beside = BesideCaptures::begin();
        // SAFETY: the bytes are a whole ELF image (checked above; the caller verified their hash), copied by the driver
        // before it returns; the context is current.
        let raw = unsafe { module::load_data(artifact.bytes.as_ptr().cast()) }
            .map_err(|e| context.failed("cuModuleLoadData", e))?;
        // From here on the module is unloaded on every way out.
        let mut this = Self {
            context: context.clone(),
            stages: Vec::new(),
            counters: TileCounters::new(),
            templates: artifact.recipe.templates.as_str().into(),
            shorter_args: Some(artifact.args).filter(|args| *args != kernel.schedule.family().args()),
            waits: false,
            raw,
            kernel,
        };
        let function = |name: CString| {
            // SAFETY: `raw` was just loaded.
            unsafe { module::get_function(raw, name) }.map_err(|e| context.failed("cuModuleGetFunction", e))
        };
        if kernel.problem.op == Op::Gradient {
            // Partial sums lie in memory of the pool, which is made outside of captures.
            context.pool()?;
        }
        for entry in kernel.entries() {
            let name = format!("{}{}", artifact.entry, entry.suffix);
            let name = CString::new(name)
                .map_err(|_| refused("its entry name holds a zero byte".to_owned(), "remove it from the cache"))?;
            let stage = function(name)?;
            match entry.role {
                StageRole::Main => this.allow_shared_memory(stage)?,
                // What they write lies in memory of the pool, which is made outside of captures.
                StageRole::MaskMetadata => _ = context.pool()?,
                StageRole::Wave => {
                    context.pool()?;
                    this.allow_shared_memory(stage)?;
                }
            }
            this.load_code(stage)?;
            this.stages.push((*entry, stage));
        }
        // The launch attribute is Hopper's; other devices refuse it or wait.
        // SAFETY: `raw` was just loaded.
        this.waits =
            ours.number >= 90 && unsafe { module::get_global(raw, WAITS_FOR_LAUNCH_BEFORE.to_owned()) }.is_ok();
        Ok(this)
    }

    /// The function of an entry point.
    pub(super) fn stage(&self, entry: StageEntry) -> Option<CUfunction> {
        self.stages.iter().find(|(of, _)| *of == entry).map(|(_, function)| *function)
    }

    /// Allows the dynamic shared memory of a stage of the operation.
    fn allow_shared_memory(&self, function: CUfunction) -> Result<()> {
        const DYNAMIC: CUfunction_attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let bytes = i32::try_from(self.kernel.resources().smem_bytes).unwrap_or(i32::MAX);
        // SAFETY: the function belongs to a loaded module and the context is current.
        unsafe { function::set_function_attribute(function, DYNAMIC, bytes) }
            .map_err(|e| self.context.failed("cuFuncSetAttribute", e))
    }

    /// Asking for the registers makes a driver with lazy loading load the code now, not at the first launch, which may
    /// be inside of a stream capture.
    fn load_code(&self, function: CUfunction) -> Result<()> {
        const REGISTERS: CUfunction_attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_NUM_REGS;
        // SAFETY: the function belongs to a loaded module and the context is current.
        unsafe { function::get_function_attribute(function, REGISTERS) }
            .map_err(|e| self.context.failed("cuFuncGetAttribute", e))?;
        Ok(())
    }
}

/// Whether a cubin for `theirs` runs on a device of architecture `ours`: the very capability for `sm_90a` and the
/// like, otherwise the same major number and no higher a minor one.
fn runs_on(theirs: Arch, ours: SmArch) -> bool {
    match theirs {
        Arch::Cpu(_) => false,
        Arch::Sm(theirs) if theirs.specific => theirs.number == ours.number,
        Arch::Sm(theirs) => theirs.number / 10 == ours.number / 10 && theirs.number <= ours.number,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cubins_run_on_their_own_major_architecture_only() {
        let runs = |theirs: &str, major, minor| runs_on(theirs.parse().unwrap(), SmArch::of_capability(major, minor));
        assert!(runs("sm_80", 8, 0) && runs("sm_80", 8, 6) && runs("sm_86", 8, 9) && runs("sm_90", 9, 0));
        assert!(runs("sm_90a", 9, 0) && runs("sm_120a", 12, 0));
        assert!(!runs("sm_80", 9, 0) && !runs("sm_86", 8, 0) && !runs("sm_90a", 10, 0) && !runs("sm_120a", 12, 1));
        assert!(!runs("cpu-avx2", 8, 0));
    }
}

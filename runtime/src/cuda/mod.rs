//! CUDA devices, over cudarc's driver bindings.
//!
//! Thin on purpose: launches use the driver's own call on the caller's stream handle, so that no cudarc version appears
//! between a host and its kernels; cudarc's safe layer is met only in `slices`, for hosts that use it, and in
//! [`CudaDevice::of_context`]. Nothing here tracks events or keeps streams waiting for each other.

mod context;
mod cublas;
mod dependent_launch;
mod driver;
mod graph;
mod graph_objects;
mod kept_metadata;
mod mask_metadata;
mod memory;
mod module;
mod nvml;
mod parameter;
mod pointer;
mod probe;
mod scratch;
mod slices;
mod split_scratch;
mod tensor_map;
mod tile_counters;
mod waves;

pub use driver::driver_present;
pub use slices::{Element, SliceTensor, read_slice, write_slice};

use crate::{
    Buffer, Ceiling, Compiler, Device, DeviceSpec, Error, Findings, Graph, HostBytes, Module, Probe, Result, Stream,
    compiler_for,
};
use context::Context;
use cudarc::driver::CudaContext;
use cudarc::driver::result::{self, event, stream};
use cudarc::driver::sys::{self, CUdevice_attribute, CUevent, CUevent_flags, CUstream};
use driver::{Driver, driver};
use flashtune_cache::{Artifact, DeviceFingerprint, Reading};
use flashtune_codegen::abi::{Args, MappedArgs, QuantiseArgs, RaggedArgs, RaggedMappedArgs, SideArgs};
use flashtune_codegen::{Arch, LaunchPlan, SmArch, Stage, StageRole};
use kept_metadata::{CudaFindings, Geometry};
use mask_metadata::MaskMetadata;
use memory::CudaBuffer;
use module::CudaModule;
use parameter::{Base, Parameter};
use split_scratch::SplitScratch;
use std::sync::{Arc, Mutex};

/// A CUDA device.
pub struct CudaDevice {
    driver: &'static Driver,
    fingerprint: DeviceFingerprint,
    arch: SmArch,
    /// A stream of our own, for tuning and copies.
    stream: CUstream,
    /// Pairs of events that no measurement uses at the moment.
    timers: Mutex<Vec<Timer>>,
    /// Written to evict the L2 cache; allocated by the first flush.
    flush: Mutex<Option<CudaBuffer>>,
    /// Through which thread blocks that share keys merge their results.
    split_scratch: SplitScratch,
    // Last: everything above lives in it.
    context: Arc<Context>,
}

// SAFETY: stream handles may be used from any thread with the context current.
unsafe impl Send for CudaDevice {}
// SAFETY: as above; what changes is behind mutexes.
unsafe impl Sync for CudaDevice {}

/// Two events.
struct Timer {
    start: CUevent,
    end: CUevent,
    context: Arc<Context>,
}

// SAFETY: event handles may be used from any thread with the context current.
unsafe impl Send for Timer {}

impl Timer {
    fn new(context: &Arc<Context>) -> Result<Self> {
        let create = || event::create(CUevent_flags::CU_EVENT_DEFAULT).map_err(|e| context.failed("cuEventCreate", e));
        let start = create()?;
        // The first event is destroyed when the second cannot be had.
        let mut timer = Self { start, end: std::ptr::null_mut(), context: context.clone() };
        timer.end = create()?;
        Ok(timer)
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        let Ok(_bound) = self.context.bind() else { return };
        for event in [self.start, self.end] {
            if !event.is_null() {
                // SAFETY: created in `new`, destroyed once.
                let _ = unsafe { event::destroy(event) };
            }
        }
    }
}

/// Number of CUDA devices.
///
/// # Errors
/// Why there is none to count: no driver, or one that does not work.
pub fn device_count() -> Result<usize> {
    driver()?;
    let n = result::device::get_count().map_err(|e| driver::failed("cuDeviceGetCount", "cuda", e))?;
    Ok(usize::try_from(n).unwrap_or(0))
}

fn raw(stream: Stream) -> CUstream {
    stream.0 as usize as CUstream
}

impl CudaDevice {
    /// Opens a device on its primary context: the one that cudarc, candle, PyTorch and the CUDA runtime share.
    ///
    /// # Errors
    /// [`Error::Missing`] without a driver, [`Error::Device`] when there is no such device.
    pub fn open(ordinal: usize) -> Result<Arc<CudaDevice>> {
        let driver = driver()?;
        Self::of(driver, Context::primary(ordinal)?)
    }

    /// The device of a host's cudarc context, in that context.
    pub fn of_context(context: &Arc<CudaContext>) -> Result<Arc<CudaDevice>> {
        Self::of(driver()?, Context::of_cudarc(context))
    }

    /// The device of the context that is current on the calling thread, in that context.
    ///
    /// # Safety
    /// The context is not destroyed before the device, its modules and its buffers are dropped.
    pub unsafe fn adopt_current() -> Result<Arc<CudaDevice>> {
        let driver = driver()?;
        // SAFETY: by this function's contract.
        Self::of(driver, unsafe { Context::current()? })
    }

    /// The device of a context that the caller made (a `CUcontext`), in that context.
    ///
    /// # Safety
    /// `context` is a CUDA context that is not destroyed before the device, its modules and its buffers are dropped.
    ///
    /// # Errors
    /// As [`CudaDevice::open`], and when the driver does not know the context.
    pub unsafe fn adopt(context: *mut std::ffi::c_void) -> Result<Arc<CudaDevice>> {
        let driver = driver()?;
        // SAFETY: by this function's contract.
        Self::of(driver, unsafe { Context::given(context.cast())? })
    }

    fn of(driver: &'static Driver, context: Context) -> Result<Arc<CudaDevice>> {
        use CUdevice_attribute::*;
        let number = |attribute| context.attribute(attribute);
        let arch = SmArch::of_capability(
            number(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)? as u16,
            number(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)? as u16,
        );
        // SAFETY: the device came from the driver.
        let memory = unsafe { result::device::total_mem(context.device) };
        let fingerprint = DeviceFingerprint {
            arch: Arch::Sm(arch),
            name: result::device::get_name(context.device).map_err(|e| context.failed("cuDeviceGetName", e))?,
            units: number(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            memory_bytes: memory.map_err(|e| context.failed("cuDeviceTotalMem", e))? as u64,
            cache_bytes: number(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)? as u64,
            driver: driver::version()?,
        };
        let context = Arc::new(context);
        let _bound = context.bind()?;
        let stream =
            stream::create(stream::StreamKind::NonBlocking).map_err(|e| context.failed("cuStreamCreate", e))?;
        Ok(Arc::new(Self {
            driver,
            fingerprint,
            arch,
            stream,
            timers: Mutex::new(Vec::new()),
            flush: Mutex::new(None),
            split_scratch: SplitScratch::new(&context),
            context: context.clone(),
        }))
    }

    fn error(&self, call: &'static str, message: impl Into<String>, remedy: &'static str) -> Error {
        Error::Device { call, device: self.context.name.clone(), message: message.into(), remedy }
    }

    fn foreign(&self, call: &'static str) -> Error {
        self.error(call, "it was made by another device", "use modules and buffers with the device that made them")
    }

    /// Launches one stage with its one parameter, which the driver copies before it returns. The context is current.
    ///
    /// # Safety
    /// `parameter` is what the module's kernels take; addresses in it, geometry and stream are as
    /// [`Device::launch`] asks.
    unsafe fn enqueue(
        &self,
        module: &CudaModule,
        stage: &Stage,
        parameter: *const std::ffi::c_void,
        stream: Stream,
    ) -> Result<()> {
        if stage.grid == 0 {
            return Ok(());
        }
        let function = module.stage(stage.entry).ok_or_else(|| {
            let message = format!("the module has no entry point `{}`", stage.entry.suffix);
            self.error("launch", message, "launch with a plan of the module's own kernel")
        })?;
        let mut parameters = [parameter.cast_mut()];
        let units = self.fingerprint.units;
        // SAFETY: the function is loaded, in this context; the rest is the caller's promise.
        let launched = unsafe {
            if stage.starts_early && module.waits {
                dependent_launch::launch(function, stage, units, raw(stream), parameters.as_mut_ptr())
            } else {
                sys::cuLaunchKernel(
                    function,
                    stage.blocks(units),
                    1,
                    1,
                    stage.threads,
                    1,
                    1,
                    stage.smem_bytes,
                    raw(stream),
                    parameters.as_mut_ptr(),
                    std::ptr::null_mut(),
                )
            }
        };
        launched.result().map_err(|e| self.context.failed("cuLaunchKernel", e))
    }

    fn buffer<'a>(&self, buffer: &'a dyn Buffer, bytes: usize, call: &'static str) -> Result<&'a CudaBuffer> {
        let own = buffer.as_any().downcast_ref::<CudaBuffer>().filter(|b| b.context.is(&self.context));
        let own = own.ok_or_else(|| self.foreign(call))?;
        if bytes > own.len() {
            let message = format!("{bytes} bytes do not fit the buffer of {}", own.len());
            return Err(self.error(call, message, "allocate a larger buffer"));
        }
        Ok(own)
    }

    /// Waits for a stream; the context is current.
    fn wait(&self, stream: CUstream) -> Result<()> {
        // SAFETY: the stream is ours or, by the caller's word, a stream of this device.
        unsafe { stream::synchronize(stream) }.map_err(|e| self.context.failed("cuStreamSynchronize", e))
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        let Ok(_bound) = self.context.bind() else { return };
        // SAFETY: created in `of`, destroyed once; the driver finishes pending work first.
        let _ = unsafe { stream::destroy(self.stream) };
    }
}

impl Device for CudaDevice {
    fn fingerprint(&self) -> &DeviceFingerprint {
        &self.fingerprint
    }

    fn spec(&self) -> Option<DeviceSpec> {
        // Device handles of the driver are the ordinals.
        usize::try_from(self.context.device).ok().map(DeviceSpec::Cuda)
    }

    fn reading(&self) -> Reading {
        use CUdevice_attribute::*;
        let number = |attribute| self.context.attribute(attribute).unwrap_or(u32::MAX);
        let (domain, bus) = (number(CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID), number(CU_DEVICE_ATTRIBUTE_PCI_BUS_ID));
        nvml::read(&format!("{domain:08X}:{bus:02X}:{:02X}.0", number(CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID)))
    }

    fn compiler(&self) -> Result<Arc<dyn Compiler>> {
        compiler_for(self.fingerprint.arch)
    }

    fn load(&self, artifact: &Artifact) -> Result<Arc<dyn Module>> {
        Ok(Arc::new(CudaModule::load(&self.context, self.arch, artifact)?))
    }

    unsafe fn launch(&self, module: &dyn Module, plan: &LaunchPlan, args: Args<'_>, stream: Stream) -> Result<()> {
        // SAFETY: the caller's promise is this function's own.
        unsafe { self.launch_with(module, plan, args, None, stream) }
    }

    fn findings(&self) -> Option<Box<dyn Findings>> {
        Some(Box::new(CudaFindings::new(&self.context)))
    }

    unsafe fn launch_with(
        &self,
        module: &dyn Module,
        plan: &LaunchPlan,
        args: Args<'_>,
        findings: Option<&dyn Findings>,
        stream: Stream,
    ) -> Result<()> {
        let module = module.as_any().downcast_ref::<CudaModule>().filter(|m| m.context.is(&self.context));
        let module = module.ok_or_else(|| self.foreign("launch"))?;
        if plan.is_empty() {
            return Ok(());
        }
        let problem = &module.kernel().problem;
        if !args.are_of(problem) {
            let message = format!("the kernel computes {problem}, the arguments are those of {}", args.name());
            return Err(self.error("launch", message, "launch a kernel with the arguments of its own kind of problem"));
        }
        let _bound = self.context.bind()?;
        if let (Args::Backward(args), Some(waves)) = (args, &plan.waves) {
            // SAFETY: the caller's promise is that function's own.
            return unsafe { self.launch_waves(module, plan, waves, args, stream) };
        }
        let mut metadata = MaskMetadata::Nothing;
        // The kernel's one parameter, by value: the driver copies it before it returns, and does not write to it.
        let mut mapped = None;
        if let Args::Forward(forward) = args {
            let mut masks = None;
            if let Some((bytes, layout, masks_at)) = plan.mask_metadata() {
                let geometry = Geometry::new((bytes, layout), problem.mask, forward, &module.templates);
                metadata = MaskMetadata::of(self.driver, &self.context, geometry, findings, raw(stream))?;
                masks = masks_at;
            }
            if let Some(tiling) = plan.tiling {
                let counts = plan.counts_tiles();
                let queue = if counts { module.counters.counter(self.driver, raw(stream)) } else { -1 };
                let at = metadata.address();
                let mapped = mapped.insert(MappedArgs {
                    maps: Default::default(),
                    biases: Default::default(),
                    forward: *forward,
                    tiling,
                    queue,
                    biases_mapped: 0,
                    found: at,
                    masks: masks.map_or(0, |offset| at + offset),
                });
                let program = problem.program.filter(|_| forward.side != 0);
                // SAFETY: `side` is the address of the program's tables by the caller's promise.
                let tensors = program.map_or(&[][..], |program| unsafe { parameter::tensors(forward, &program) });
                tensor_map::encode_all(&self.context, module.kernel(), mapped, tensors)?;
            }
        }
        let (scratch, ragged);
        // Given back behind the launch, in the stream's order.
        let partial_sums;
        let (gradient, quantise);
        let mut ragged_mapped = None;
        let base = match (&mapped, args) {
            (Some(mapped), _) => Base::Mapped(mapped),
            (None, Args::Forward(args)) => Base::Forward(args),
            (None, Args::Ragged(args)) => {
                let address = match plan.split_keys(self.fingerprint.units) {
                    Some(bytes) => {
                        scratch = self.split_scratch.of_launch(self.driver, bytes, raw(stream))?;
                        scratch.address
                    }
                    None => 0,
                };
                ragged = RaggedArgs { scratch: address, ..*args };
                match plan.tiling {
                    Some(tiling) => {
                        let counts = plan.counts_tiles();
                        let queue = if counts { module.counters.counter(self.driver, raw(stream)) } else { -1 };
                        let maps = Default::default();
                        let mapped = RaggedMappedArgs { maps, forward: ragged, tiling, queue, box_keys: 0 };
                        let mapped = ragged_mapped.insert(mapped);
                        tensor_map::encode_ragged(&self.context, module.kernel(), mapped)?;
                        Base::RaggedMapped(mapped)
                    }
                    None => Base::Ragged(&ragged),
                }
            }
            (None, Args::Append(args)) => Base::Append(args),
            (None, Args::Pad(args)) => Base::Pad(args),
            (None, Args::Backward(args)) => Base::Backward(args),
            (None, Args::Gradient(args)) => {
                let mut args = *args;
                if let Some(bytes) = plan.partial_sums() {
                    partial_sums = scratch::Scratch::new(&self.context, self.context.pool()?, bytes, raw(stream))?;
                    args.backward.scratch = partial_sums.address;
                }
                gradient = args;
                Base::Gradient(&gradient)
            }
            (None, Args::Quantise(args)) => {
                let bytes = plan.partial_sums().unwrap_or(0);
                partial_sums = scratch::Scratch::new(&self.context, self.context.pool()?, bytes, raw(stream))?;
                quantise = QuantiseArgs { scratch: partial_sums.address, ..*args };
                Base::Quantise(&quantise)
            }
        };
        let parameter;
        let parameter: *const std::ffi::c_void = match problem.program {
            Some(_) if args.side() == 0 => {
                let message = "the kernel has a score program, but is given nothing to read";
                return Err(self.error("launch", message, "launch through the engine, or give the arguments' `side`"));
            }
            // The driver copies no more than the kernel's parameter has.
            None if module.shorter_args.is_none_or(|args| args.is_one_struct()) => base.address(),
            program => {
                // SAFETY: `side` is the address of the program's tables by the caller's promise; the layout was checked
                // when the module was loaded.
                parameter = unsafe {
                    let side = program.as_ref().map(|p| (p.kept(), &*(args.side() as usize as *const SideArgs)));
                    match (&module.shorter_args, side) {
                        (Some(layout), side) => Parameter::packed(layout, base, side),
                        (None, Some((program, side))) => Parameter::new(base, program, side),
                        (None, None) => unreachable!("it is taken as it is"),
                    }
                };
                std::ptr::from_ref(&parameter).cast()
            }
        };
        // SAFETY: the kernel takes the operation's arguments or, with a tiling, one `MappedArgs`, with what its program
        // reads behind it (the recipe holds our ABI version, and what of them it knows is in the artifact); the rest is
        // the caller's promise.
        let mut enqueue = |stage: &Stage| unsafe { self.enqueue(module, stage, parameter, stream) };
        let of_role = |role| plan.stages().filter(move |s| s.entry.role == role);
        if metadata.is_wanted() {
            of_role(StageRole::MaskMetadata).try_for_each(&mut enqueue)?;
        }
        let behind = metadata.done()?;
        of_role(StageRole::Main).try_for_each(&mut enqueue)?;
        behind.launched()
    }

    fn check_address(&self, tensor: &'static str, address: u64, bytes: u64) -> Result<()> {
        let _bound = self.context.bind()?;
        pointer::check(&self.context, tensor, address, bytes)
    }

    fn alloc(&self, bytes: usize) -> Result<Box<dyn Buffer>> {
        Ok(Box::new(CudaBuffer::new(&self.context, bytes)?))
    }

    fn stream_memory(&self, bytes: u64, stream: Stream) -> Result<Box<dyn Buffer>> {
        let _bound = self.context.bind()?;
        Ok(Box::new(scratch::StreamBuffer::new(&self.context, bytes, raw(stream))?))
    }

    fn alloc_host(&self, bytes: usize) -> Result<HostBytes> {
        Ok(Box::new(memory::PinnedBytes::new(&self.context, bytes)?))
    }

    fn upload(&self, to: &dyn Buffer, bytes: &[u8]) -> Result<()> {
        let to = self.buffer(to, bytes.len(), "upload")?;
        let _bound = self.context.bind()?;
        // On our stream and waited for: the driver's synchronous copy returns before pageable memory has arrived.
        // SAFETY: the range is inside of the buffer, and `bytes` lives until the stream has been waited for.
        unsafe { result::memcpy_htod_async(to.address, bytes, self.stream) }
            .map_err(|e| self.context.failed("cuMemcpyHtoDAsync", e))?;
        self.wait(self.stream)
    }

    fn download(&self, from: &dyn Buffer, bytes: &mut [u8], stream: Stream) -> Result<()> {
        let from = self.buffer(from, bytes.len(), "download")?;
        let _bound = self.context.bind()?;
        self.wait(raw(stream))?;
        // SAFETY: as in `upload`.
        let copy = unsafe { result::memcpy_dtoh_async(bytes, from.address, self.stream) };
        let waited = self.wait(self.stream);
        copy.map_err(|e| self.context.failed("cuMemcpyDtoHAsync", e))?;
        waited
    }

    fn fill(&self, buffer: &dyn Buffer, byte: u8) -> Result<()> {
        let buffer = self.buffer(buffer, 0, "fill")?;
        if buffer.is_empty() {
            return Ok(());
        }
        let _bound = self.context.bind()?;
        // SAFETY: the range is the buffer.
        unsafe { result::memset_d8_async(buffer.address, byte, buffer.len(), self.stream) }
            .map_err(|e| self.context.failed("cuMemsetD8Async", e))?;
        self.wait(self.stream)
    }

    fn stream(&self) -> Stream {
        Stream(self.stream as usize as u64)
    }

    fn is_capturing(&self, stream: Stream) -> bool {
        let Ok(_bound) = self.context.bind() else { return true };
        context::is_capturing(raw(stream))
    }

    fn synchronize(&self, stream: Stream) -> Result<()> {
        let _bound = self.context.bind()?;
        self.wait(raw(stream))
    }

    fn flush_cache(&self, stream: Stream) -> Result<()> {
        let mut flush = self.flush.lock().unwrap_or_else(|e| e.into_inner());
        let buffer = match &mut *flush {
            Some(buffer) => buffer,
            empty => {
                let bytes = (2 * self.fingerprint.cache_bytes).max(32 << 20) as usize;
                empty.insert(CudaBuffer::new(&self.context, bytes)?)
            }
        };
        let _bound = self.context.bind()?;
        // SAFETY: the range is the buffer, which lives as long as the device.
        unsafe { result::memset_d8_async(buffer.address, 0, buffer.len(), raw(stream)) }
            .map_err(|e| self.context.failed("cuMemsetD8Async", e))
    }

    fn time_us(&self, stream: Stream, work: &mut dyn FnMut() -> Result<()>) -> Result<f64> {
        let _bound = self.context.bind()?;
        let idle = self.timers.lock().unwrap_or_else(|e| e.into_inner()).pop();
        let timer = match idle {
            Some(timer) => timer,
            None => Timer::new(&self.context)?,
        };
        // SAFETY: the events are alive; the stream is one of this device by the caller's word.
        unsafe { event::record(timer.start, raw(stream)) }.map_err(|e| self.context.failed("cuEventRecord", e))?;
        work()?;
        let mut ms = 0.0;
        // SAFETY: as above; the events were recorded on one stream, and the second one is waited for.
        unsafe {
            event::record(timer.end, raw(stream)).map_err(|e| self.context.failed("cuEventRecord", e))?;
            event::synchronize(timer.end).map_err(|e| self.context.failed("cuEventSynchronize", e))?;
            (self.driver.elapsed_time)(&mut ms, timer.start, timer.end)
                .result()
                .map_err(|e| self.context.failed("cuEventElapsedTime", e))?;
        }
        // Events of a failed measurement are dropped, not used again.
        self.timers.lock().unwrap_or_else(|e| e.into_inner()).push(timer);
        Ok(ms as f64 * 1e3)
    }

    fn has_graphs(&self) -> bool {
        true
    }

    fn capture(&self, stream: Stream, work: &mut dyn FnMut() -> Result<()>) -> Result<Box<dyn Graph>> {
        let _bound = self.context.bind()?;
        Ok(Box::new(graph::CudaGraph::capture(&self.context, raw(stream), work)?))
    }

    fn probe(&self, ceiling: Ceiling) -> Result<Box<dyn Probe>> {
        probe::probe(self, ceiling)
    }
}

#[cfg(test)]
mod tests;

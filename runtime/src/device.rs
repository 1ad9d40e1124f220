//! What a device can do, as the tuner and the engine see it.

use crate::{Ceiling, DeviceSpec, Error, Probe, Result};
use flashtune_cache::{Artifact, CompilerId, DeviceFingerprint, Facts, Reading};
use flashtune_codegen::abi::Args;
use flashtune_codegen::{Arch, Error as CodegenError, Kernel, LaunchPlan, Problem, Shape, Source};
use std::any::Any;
use std::ops::DerefMut;
use std::sync::Arc;

/// An execution queue. On CUDA a `CUstream` handle (0 is the legacy default stream); ignored on the CPU, where work is
/// done when the call returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Stream(pub u64);

/// Device memory, freed on drop.
pub trait Buffer: Send + Sync {
    /// For the device that made it.
    fn as_any(&self) -> &dyn Any;
    /// Address on the device.
    fn address(&self) -> u64;
    /// Size in bytes.
    fn len(&self) -> usize;
    /// Whether the buffer has no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Host memory that a device gave.
pub type HostBytes = Box<dyn DerefMut<Target = [u8]> + Send + Sync>;

/// Mask metadata of one mask, in memory of a device, kept for later launches. Dropped while launches are under way, it
/// gives its memory back behind them.
pub trait Findings: Send + Sync {
    /// For the device that made it.
    fn as_any(&self) -> &dyn Any;
    /// Bytes of device memory that it holds now.
    fn bytes(&self) -> u64;
    /// How many times it was found: once for each geometry of kernels that was launched with it.
    fn count(&self) -> usize;
}

/// A loaded kernel, ready to launch. Unloaded on drop.
pub trait Module: Send + Sync {
    /// For the device that made it.
    fn as_any(&self) -> &dyn Any;
    /// Problem, schedule and arch.
    fn kernel(&self) -> &Kernel;
}

/// Captured launches, ready to be replayed. Freed on drop.
pub trait Graph: Send {
    /// Enqueues all of them on a stream.
    ///
    /// # Safety
    /// What they were captured with must still be as [`Device::launch`] asks: modules loaded, addresses valid. Replays
    /// of one graph must not run beside each other.
    unsafe fn replay(&self, stream: Stream) -> Result<()>;
}

/// Turns sources into binaries. Safe to call from many threads.
pub trait Compiler: Send + Sync {
    /// Name and full version, as part of every key.
    fn id(&self) -> &CompilerId;
    /// Compiles a source for the arch that its options name. No device is needed.
    fn compile(&self, source: &Source) -> Result<(Vec<u8>, Facts)>;
    /// Does what the first compilation of a process does beside compiling; the second call does nothing. Afterwards a
    /// compiler that is a library registers nothing more for the end of the process.
    fn warm_up(&self) {}
}

/// A processor that runs kernels.
pub trait Device: Send + Sync {
    /// Identity and size.
    fn fingerprint(&self) -> &DeviceFingerprint;

    /// The name under which another process of this machine opens the same device; `None` when there is no such name.
    fn spec(&self) -> Option<DeviceSpec> {
        None
    }

    /// A look at what could disturb a measurement: clocks, heat, other users. Empty where nothing can be read.
    fn reading(&self) -> Reading {
        Reading::default()
    }

    /// The compiler for this device's kernels; an error that tells the remedy when there is none.
    fn compiler(&self) -> Result<Arc<dyn Compiler>>;

    /// Loads a compiled kernel. The bytes are used as given: the caller has verified them.
    fn load(&self, artifact: &Artifact) -> Result<Arc<dyn Module>>;

    /// Launches the stages of a plan on the caller's stream. Waits for nothing (on the CPU it returns when done), and
    /// allocates nothing but, for a plan with mask metadata or in waves, memory for that between two points of the
    /// stream.
    ///
    /// # Safety
    /// The addresses in `args` must be valid on this device for the extents that `args` describes until the launch has
    /// completed, `side` must be that of the kernel's score program until this returns, and `plan` must come from
    /// [`Kernel::plan`] for these sizes.
    unsafe fn launch(&self, module: &dyn Module, plan: &LaunchPlan, args: Args<'_>, stream: Stream) -> Result<()>;

    /// Room for what is found of a mask; `None` on devices whose kernels have nothing found before they start.
    fn findings(&self) -> Option<Box<dyn Findings>> {
        None
    }

    /// [`Device::launch`] by what was found of the mask before: it is found by the first launch of each geometry alone,
    /// and another stream waits for that one. A launch that is captured uses what is there; what is not there is found
    /// within the graph, in the graph's own memory, in every replay.
    ///
    /// # Safety
    /// As [`Device::launch`], and all launches with these findings are of one mask and the same sizes, with the same
    /// scalars and tensors that the mask reads, whose elements do not change. Graphs that were captured with them are
    /// not replayed once they are dropped.
    unsafe fn launch_with(
        &self,
        module: &dyn Module,
        plan: &LaunchPlan,
        args: Args<'_>,
        findings: Option<&dyn Findings>,
        stream: Stream,
    ) -> Result<()> {
        let _ = findings;
        // SAFETY: the caller's promise is this function's own.
        unsafe { self.launch(module, plan, args, stream) }
    }

    /// Refuses a range of `bytes` bytes whose first or last byte is certainly not this device's memory. What a device
    /// cannot tell it accepts: the CPU accepts every address. Reads no memory and costs well under a microsecond.
    ///
    /// # Errors
    /// [`Error::Tensor`] with the tensor's name.
    fn check_address(&self, tensor: &'static str, address: u64, bytes: u64) -> Result<()> {
        let _ = (tensor, address, bytes);
        Ok(())
    }

    /// Allocates uninitialised device memory.
    fn alloc(&self, bytes: usize) -> Result<Box<dyn Buffer>>;
    /// Uninitialised memory for what is launched on a stream until it is dropped, which waits for nothing: taken and
    /// given back in the stream's order, and in a capture a part of the graph.
    fn stream_memory(&self, bytes: u64, stream: Stream) -> Result<Box<dyn Buffer>> {
        let _ = stream;
        self.alloc(usize::try_from(bytes).unwrap_or(usize::MAX))
    }
    /// Host memory that the device copies to and from at full speed: more dear to make than other memory, so keep it.
    fn alloc_host(&self, bytes: usize) -> Result<HostBytes> {
        Ok(Box::new(vec![0u8; bytes].into_boxed_slice()))
    }
    /// Copies host bytes to the start of a buffer; returns when done.
    fn upload(&self, to: &dyn Buffer, bytes: &[u8]) -> Result<()>;
    /// Copies the start of a buffer to the host, after all work of the stream has completed.
    fn download(&self, from: &dyn Buffer, bytes: &mut [u8], stream: Stream) -> Result<()>;
    /// Sets every byte of a buffer.
    fn fill(&self, buffer: &dyn Buffer, byte: u8) -> Result<()>;

    /// A stream of its own for tuning and tests (0 on the CPU).
    fn stream(&self) -> Stream;
    /// Whether what is launched on a stream now is recorded for later, as into a CUDA graph. Also said where it cannot
    /// be told.
    fn is_capturing(&self, stream: Stream) -> bool {
        let _ = stream;
        false
    }
    /// Waits for all work of a stream and reports its errors.
    fn synchronize(&self, stream: Stream) -> Result<()>;
    /// Evicts the device's last-level cache, so that the next launch reads from memory.
    fn flush_cache(&self, stream: Stream) -> Result<()>;
    /// Device time of what `work` enqueues on the stream, in microseconds.
    fn time_us(&self, stream: Stream, work: &mut dyn FnMut() -> Result<()>) -> Result<f64>;

    /// Whether launches can be captured into graphs.
    fn has_graphs(&self) -> bool {
        false
    }

    /// Captures what `work` enqueues on a stream; nothing runs.
    ///
    /// # Errors
    /// [`Error::Codegen`] where there are no graphs; `work`'s own, and those of the driver.
    fn capture(&self, stream: Stream, work: &mut dyn FnMut() -> Result<()>) -> Result<Box<dyn Graph>> {
        let _ = (stream, work);
        Err(no_graphs().into())
    }

    /// Work that shows what this device reaches at best; an error that tells what is missing for it.
    fn probe(&self, ceiling: Ceiling) -> Result<Box<dyn Probe>> {
        Err(Error::Device {
            call: "probe",
            device: self.fingerprint().to_string(),
            message: format!("it has nothing that shows its ceiling of {ceiling}"),
            remedy: "measure on a CUDA device or on the CPU",
        })
    }
}

impl dyn Device {
    /// The code-generation target.
    pub fn arch(&self) -> Arch {
        self.fingerprint().arch
    }

    /// [`require_room`] on this device.
    ///
    /// # Errors
    /// [`Error::Device`] with both numbers.
    pub fn require_room(&self, problem: &Problem, shape: &Shape) -> Result<()> {
        require_room(self.fingerprint(), problem, shape)
    }

    /// Launches for a shape with the kernel's own geometry; does nothing where no output has an element.
    ///
    /// # Safety
    /// As [`Device::launch`].
    pub unsafe fn launch_shape<'a>(
        &self,
        module: &dyn Module,
        shape: &Shape,
        args: impl Into<Args<'a>>,
        stream: Stream,
    ) -> Result<()> {
        // SAFETY: the caller's promise is this function's own.
        unsafe { self.launch_shape_with(module, shape, args, None, stream) }
    }

    /// The same by what was found of the mask before.
    ///
    /// # Safety
    /// As [`Device::launch_with`].
    pub unsafe fn launch_shape_with<'a>(
        &self,
        module: &dyn Module,
        shape: &Shape,
        args: impl Into<Args<'a>>,
        findings: Option<&dyn Findings>,
        stream: Stream,
    ) -> Result<()> {
        if module.kernel().problem.has_no_output(shape) {
            return Ok(());
        }
        let plan = module.kernel().plan(shape).map_err(Error::from)?;
        // SAFETY: the caller's promise is this function's own.
        unsafe { self.launch_with(module, &plan, args.into(), findings, stream) }
    }
}

/// Why graphs are refused where there are none.
pub fn no_graphs() -> CodegenError {
    CodegenError::unsupported(
        "launches",
        "graph",
        "a launch on the CPU is a call, and calls are not captured into graphs",
        "leave graphs out, or name a CUDA device",
    )
}

/// Refuses sizes whose tensors exceed a device's memory, before anything is allocated for them on either side: a host
/// that runs out of memory ends the process.
///
/// # Errors
/// [`Error::Device`] with both numbers.
pub fn require_room(device: &DeviceFingerprint, problem: &Problem, shape: &Shape) -> Result<()> {
    let DeviceFingerprint { memory_bytes, name, .. } = device;
    let needed = shape.forward_bytes(problem.head_dim_qk, problem.head_dim_v, problem.element_bytes());
    if *memory_bytes == 0 || needed <= *memory_bytes as f64 {
        return Ok(());
    }
    let gib = |bytes: f64| bytes / (1u64 << 30) as f64;
    Err(Error::Device {
        call: "alloc",
        device: name.clone(),
        message: format!(
            "Q, K, V and O of {shape} take {:.1} GiB, the device has {:.1} GiB",
            gib(needed),
            gib(*memory_bytes as f64)
        ),
        remedy: "name smaller sizes",
    })
}

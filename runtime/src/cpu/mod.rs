//! The host processor as a device: C kernels, loaded with dlopen, run by a pool of threads.
//!
//! A kernel splits its work into tiles; workers take them from one counter, so that uneven tiles (causal rows) balance
//! themselves. Whose threads these are, a host may say (`threads.rs`); each keeps its scratch as long as it lives.

mod evict;
mod host;
mod isa;
mod matmul;
mod memory;
mod module;
mod openmp;
mod probe;
mod softmax;
mod threads;
mod worth;

pub(crate) use matmul::{Packed, matmul};
pub(crate) use softmax::softmax;
pub use threads::{ParallelLoop, Threads};

use crate::{Buffer, Ceiling, Compiler, Device, DeviceSpec, Error, Module, Probe, Result, Stream, compiler_for};
use flashtune_cache::{Artifact, DeviceFingerprint, Reading};
use flashtune_codegen::abi::{Args, QuantiseArgs};
use flashtune_codegen::{Arch, LaunchPlan};
use memory::CpuBuffer;
use module::CpuModule;
use rayon::ThreadPool;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

/// The host processor.
pub struct CpuDevice {
    fingerprint: DeviceFingerprint,
    /// Runs kernels.
    threads: Arc<dyn ParallelLoop>,
    /// Runs probes.
    pool: &'static ThreadPool,
}

impl CpuDevice {
    /// The host processor with all cores that this process may use. Every device of a process shares one set of
    /// threads.
    ///
    /// # Errors
    /// When `FLASHTUNE_CPU_ISA` asks for more than the processor has, or threads cannot be started.
    pub fn open() -> Result<Arc<CpuDevice>> {
        Self::open_with(Threads::Own)
    }

    /// The same with kernels on threads of the host's choice.
    ///
    /// # Errors
    /// As [`CpuDevice::open`], and when there are no such threads.
    pub fn open_with(threads: Threads) -> Result<Arc<CpuDevice>> {
        let fingerprint = host::fingerprint()?;
        let pool = threads::pool(fingerprint.units as usize)?;
        let threads = threads.parallel_loop(fingerprint.units as usize)?;
        Ok(Arc::new(CpuDevice { fingerprint, threads, pool }))
    }

    /// Has the tiles of a kernel computed by as many threads as pay. The message says what is short of memory.
    ///
    /// # Safety
    /// As [`Device::launch`].
    unsafe fn run_tiles(&self, module: &CpuModule, args: Args<'_>) -> std::result::Result<(), String> {
        // SAFETY: the caller's promise is this function's own.
        let (tiles, scratch) = unsafe { module.plan(args) };
        let most = module.kernel().schedule.host_threads().map_or(usize::MAX, |n| n.get() as usize);
        let most =
            most.min(worth::threads(&module.kernel().problem, args)).min(usize::try_from(tiles).unwrap_or(usize::MAX));
        let workers = if most <= 1 { most } else { most.min(self.threads.threads()) };
        let next = AtomicU64::new(0);
        let short = AtomicBool::new(false);
        let work = || {
            // SAFETY: as above.
            if !unsafe { module.work(args, &next, tiles, scratch) } {
                short.store(true, Ordering::Relaxed);
            }
        };
        if tiles > 0 {
            let is_left = || next.load(Ordering::Relaxed) < tiles && !short.load(Ordering::Relaxed);
            threads::run(&*self.threads, workers, &work, is_left);
        }
        if !short.load(Ordering::Relaxed) && next.load(Ordering::Relaxed) >= tiles {
            return Ok(());
        }
        Err(format!("no memory for {scratch} bytes of scratch per thread"))
    }
}

fn foreign(what: &'static str) -> Error {
    Error::Device {
        call: what,
        device: "cpu".to_owned(),
        message: "it was made by another device".to_owned(),
        remedy: "use modules and buffers with the device that made them",
    }
}

fn buffer<'a>(buffer: &'a dyn Buffer, bytes: usize, call: &'static str) -> Result<&'a CpuBuffer> {
    let own = buffer.as_any().downcast_ref::<CpuBuffer>().ok_or_else(|| foreign(call))?;
    if bytes > own.len() {
        return Err(Error::Device {
            call,
            device: "cpu".to_owned(),
            message: format!("{bytes} bytes do not fit the buffer of {}", own.len()),
            remedy: "allocate a larger buffer",
        });
    }
    Ok(own)
}

impl Device for CpuDevice {
    fn fingerprint(&self) -> &DeviceFingerprint {
        &self.fingerprint
    }

    fn spec(&self) -> Option<DeviceSpec> {
        Some(DeviceSpec::Cpu)
    }

    fn reading(&self) -> Reading {
        host::reading()
    }

    fn compiler(&self) -> Result<Arc<dyn Compiler>> {
        compiler_for(self.fingerprint.arch)
    }

    fn load(&self, artifact: &Artifact) -> Result<Arc<dyn Module>> {
        // A kernel for fewer instructions than the host has is welcome; one for more would crash.
        match (artifact.recipe.kernel.arch, self.fingerprint.arch) {
            (Arch::Cpu(theirs), Arch::Cpu(ours)) if theirs <= ours => Ok(Arc::new(CpuModule::load(artifact)?)),
            (theirs, ours) => Err(Error::Device {
                call: "load",
                device: "cpu".to_owned(),
                message: format!("the kernel was compiled for {theirs}, this device is {ours}"),
                remedy: "compile it for this device",
            }),
        }
    }

    unsafe fn launch(&self, module: &dyn Module, launch: &LaunchPlan, args: Args<'_>, _stream: Stream) -> Result<()> {
        let module = module.as_any().downcast_ref::<CpuModule>().ok_or_else(|| foreign("launch"))?;
        let problem = &module.kernel().problem;
        if !args.are_of(problem) {
            return Err(Error::Device {
                call: "launch",
                device: "cpu".to_owned(),
                message: format!("the kernel computes {problem}, the arguments are those of {}", args.name()),
                remedy: "launch a kernel with the arguments of its own kind of problem",
            });
        }
        let no_memory = |message: String| Error::Device {
            call: "launch",
            device: "cpu".to_owned(),
            message,
            remedy: "use a schedule with smaller blocks",
        };
        let prepared = match args {
            Args::Ragged(args) => Some(
                // SAFETY: the caller's promise is this function's own.
                unsafe { module.prepare(args) }
                    .ok_or_else(|| no_memory("no memory for partial results of split keys".to_owned()))?,
            ),
            Args::Forward(_)
            | Args::Append(_)
            | Args::Backward(_)
            | Args::Gradient(_)
            | Args::Pad(_)
            | Args::Quantise(_) => None,
        };
        let args = prepared.as_ref().map_or(args, |(_memory, args)| Args::Ragged(args));
        // What the steps of an operation leave for each other: zeros before the first.
        let shared = |what: &str| -> Result<Vec<f32>> {
            let floats = usize::try_from(launch.partial_sums().unwrap_or(0)).unwrap_or(usize::MAX).div_ceil(4);
            let mut sums: Vec<f32> = Vec::new();
            sums.try_reserve_exact(floats).map_err(|e| no_memory(format!("{what}: {e}")))?;
            sums.resize(floats, 0.0);
            Ok(sums)
        };
        if let Args::Gradient(args) = args {
            let mut sums = shared("partial sums of a gradient")?;
            let mut args = *args;
            args.backward.scratch = sums.as_mut_ptr() as u64;
            for step in 0..2 {
                args.step = step;
                // SAFETY: as above; the partial sums live until both steps are done.
                unsafe { self.run_tiles(module, Args::Gradient(&args)) }.map_err(no_memory)?;
            }
            return Ok(());
        }
        if let Args::Quantise(args) = args {
            let mut sums = shared("scales of a quantisation")?;
            let mut args = QuantiseArgs { scratch: sums.as_mut_ptr() as u64, ..*args };
            for step in 0..4 {
                args.step = step;
                // SAFETY: as above; what the steps share lives until all are done.
                unsafe { self.run_tiles(module, Args::Quantise(&args)) }.map_err(no_memory)?;
            }
            return Ok(());
        }
        // SAFETY: as above.
        unsafe { self.run_tiles(module, args) }.map_err(no_memory)
    }

    fn alloc(&self, bytes: usize) -> Result<Box<dyn Buffer>> {
        Ok(Box::new(CpuBuffer::new(bytes)?))
    }

    fn upload(&self, to: &dyn Buffer, bytes: &[u8]) -> Result<()> {
        buffer(to, bytes.len(), "upload")?.write(bytes);
        Ok(())
    }

    fn download(&self, from: &dyn Buffer, bytes: &mut [u8], _stream: Stream) -> Result<()> {
        buffer(from, bytes.len(), "download")?.read(bytes);
        Ok(())
    }

    fn fill(&self, to: &dyn Buffer, byte: u8) -> Result<()> {
        buffer(to, 0, "fill")?.fill(byte);
        Ok(())
    }

    fn stream(&self) -> Stream {
        Stream(0)
    }

    fn synchronize(&self, _stream: Stream) -> Result<()> {
        Ok(())
    }

    fn flush_cache(&self, _stream: Stream) -> Result<()> {
        evict::flush(self.pool, self.fingerprint.cache_bytes);
        Ok(())
    }

    fn time_us(&self, _stream: Stream, work: &mut dyn FnMut() -> Result<()>) -> Result<f64> {
        let start = Instant::now();
        work()?;
        Ok(start.elapsed().as_secs_f64() * 1e6)
    }

    fn probe(&self, ceiling: Ceiling) -> Result<Box<dyn Probe>> {
        probe::probe(ceiling, &self.fingerprint, self.pool)
    }
}

#[cfg(test)]
mod ragged_mixes;
#[cfg(test)]
mod ragged_tests;
#[cfg(test)]
mod tests;

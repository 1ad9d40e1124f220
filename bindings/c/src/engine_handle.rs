//! Opening and closing engines, and waiting for their work.

use crate::error::{Failure, Result, guard};
use crate::forward::stream;
use crate::handles::Table;
use crate::repeated::Calls;
use crate::types::{EngineHandle, NO_ENGINE, Options, QuickFirst, Status};
use crate::{fork, input, log, parallel};
use engine::device::CudaDevice;
use engine::{DeviceSpec, Dispatch, Engine, InstructionPath, Policy};
use std::ffi::c_void;
use std::sync::Mutex;

/// An engine behind a handle.
pub(crate) struct Opened {
    pub engine: Engine,
    /// Whether outputs that overlap other tensors are refused.
    pub checked: bool,
    /// What [`crate::flashtune_explain`] tells about.
    pub last: Mutex<Option<Dispatch>>,
    /// What [`crate::flashtune_repeat_call`] knows.
    pub calls: Calls,
}

/// The engines of this process.
pub(crate) static ENGINES: Table<Opened> = Table::new("open engine", "flashtune_engine_open");

/// More bundles than this is a length that was never set.
const MOST_BUNDLES: u64 = 1024;

/// Opens an engine. Compiles no kernel and writes nothing. One engine serves all threads of a program.
///
/// `options`: how; NULL is as a struct of zeros. `engine`: receives the handle, 0 on failure.
///
/// Fails with INVALID_ARGUMENT, MISSING (no driver), DEVICE (no such device), STORAGE (a bundle or the templates cannot
/// be read).
///
/// # Safety
/// The pointers are NULL or valid, strings end with a zero byte, `cuda_context` is NULL or a live CUcontext.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_engine_open(options: *const Options, engine: *mut EngineHandle) -> Status {
    guard(|| {
        // Before anything else, so that a null pointer costs nothing and a failure leaves no stale number.
        // SAFETY: by this function's contract.
        unsafe { input::write(engine, "the engine's handle", NO_ENGINE)? };
        // SAFETY: as above.
        let options = if options.is_null() { None } else { Some(unsafe { input::read(options)? }) };
        log::start();
        // SAFETY: as above.
        let built = unsafe { build(options.as_ref())? };
        let checked = options.is_some_and(|options| options.checked == 1);
        fork::watch();
        let handle = ENGINES.insert(Opened { engine: built, checked, last: Mutex::new(None), calls: Calls::default() });
        // SAFETY: as above.
        unsafe { input::write(engine, "the engine's handle", handle) }
    })
}

/// Closes an engine; the handle is invalid from now on. Calls that other threads are in come to their end. On CUDA all
/// that was launched must have completed, and captured graphs must not be launched again: the kernels are unloaded.
#[unsafe(no_mangle)]
pub extern "C" fn flashtune_engine_close(engine: EngineHandle) -> Status {
    guard(|| ENGINES.remove(engine).map(drop))
}

/// Waits for all work that was launched on a stream of the engine's device, and reports its errors. On the CPU it
/// returns at once.
///
/// Fails with INVALID_ARGUMENT for what is no stream, and with DEVICE.
///
/// # Safety
/// `cuda_stream` is NULL or a live CUstream of the engine's context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_synchronize(engine: EngineHandle, cuda_stream: *mut c_void) -> Status {
    guard(|| {
        let opened = ENGINES.get(engine)?;
        Ok(opened.engine.device().synchronize(stream(&opened, cuda_stream)?)?)
    })
}

/// # Safety
/// The pointers in `options` are as [`flashtune_engine_open`] says.
unsafe fn build(options: Option<&Options>) -> Result<Engine> {
    let mut builder = Engine::builder();
    let Some(options) = options else { return Ok(builder.build()?) };
    // SAFETY: by this function's contract, here and below.
    let device = unsafe { input::text(options.device, "device")? };
    builder = match (device, options.cuda_context.is_null()) {
        (Some(_), false) => {
            return Err(Failure::argument("both device and cuda_context are given; the context says the device"));
        }
        // SAFETY: as above.
        (None, false) => builder.on(unsafe { CudaDevice::adopt(options.cuda_context)? }),
        (Some(name), true) => builder.device(name.parse::<DeviceSpec>()?),
        (None, true) => builder,
    };
    builder = builder.policy(policy(options.policy)?);
    if !matches!(options.checked, 0 | 1) {
        return Err(Failure::argument(format!("checked is {}, but it is 0 or 1", options.checked)));
    }
    if let Some(yes) = quick_first(options.quick_first)? {
        builder = builder.quick_first(yes);
    }
    builder = builder.threads(parallel::threads(options)?);
    if options.scratch_limit > 0 {
        builder = builder.scratch_limit(options.scratch_limit);
    }
    // SAFETY: as above.
    if let Some(names) = unsafe { input::text(options.allow_paths, "allow_paths")? } {
        for name in names.split(',').map(str::trim).filter(|name| !name.is_empty()) {
            builder = builder.allow_path(name.parse::<InstructionPath>().map_err(engine::Error::from)?);
        }
    }
    // SAFETY: as above.
    unsafe {
        if let Some(folder) = input::path(options.cache_dir, "cache_dir")? {
            builder = builder.cache_dir(folder);
        }
        if let Some(folder) = input::path(options.templates_dir, "templates_dir")? {
            builder = builder.templates(folder);
        }
        if options.bundles_len > MOST_BUNDLES || (options.bundles_len > 0 && options.bundles.is_null()) {
            return Err(Failure::argument(format!(
                "bundles_len is {}, but bundles is null or the number is above {MOST_BUNDLES}",
                options.bundles_len
            )));
        }
        for i in 0..options.bundles_len as usize {
            let file = input::path(options.bundles.add(i).read_unaligned(), "a bundle's path")?;
            builder = builder.bundle(file.ok_or_else(|| Failure::argument(format!("bundles[{i}] is null")))?);
        }
    }
    Ok(builder.build()?)
}

fn policy(number: i32) -> Result<Policy> {
    const DEFAULT: i32 = crate::Policy::Default as i32;
    const TUNE: i32 = crate::Policy::Tune as i32;
    const SEALED: i32 = crate::Policy::Sealed as i32;
    match number {
        DEFAULT => Ok(Policy::Default),
        TUNE => Ok(Policy::Tune),
        SEALED => Ok(Policy::Sealed),
        n => Err(Failure::argument(format!("policy is {n}, but a flashtune_policy is 0, 1 or 2"))),
    }
}

fn quick_first(number: i32) -> Result<Option<bool>> {
    const UNSAID: i32 = QuickFirst::Unsaid as i32;
    const YES: i32 = QuickFirst::Yes as i32;
    const NO: i32 = QuickFirst::No as i32;
    match number {
        UNSAID => Ok(None),
        YES => Ok(Some(true)),
        NO => Ok(Some(false)),
        n => Err(Failure::argument(format!("quick_first is {n}, but a flashtune_quick_first is 0, 1 or 2"))),
    }
}

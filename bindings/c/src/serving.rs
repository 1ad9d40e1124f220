//! Serving: preloading, sealing, counters, and the shapes that were met untuned.

use crate::engine_handle::ENGINES;
use crate::error::{Failure, Result, guard};
use crate::input;
use crate::types::{EngineHandle, Format, OnMiss, Status};
use engine::read_manifest;
use std::ffi::c_char;

/// Loads the kernels of the problems and sizes that a file lists (as `flashtune_write_untuned` writes it), compiling or
/// tuning by the engine's policy, so that their first calls wait for nothing.
///
/// Fails with STORAGE (the file), and as `flashtune_prepare` for the first that cannot be had; the text has a line for
/// each of them, and the others are loaded.
///
/// # Safety
/// `manifest` is NULL or a string that ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_preload(engine: EngineHandle, manifest: *const c_char) -> Status {
    guard(|| {
        let opened = ENGINES.get(engine)?;
        // SAFETY: by this function's contract.
        let path = unsafe { input::path(manifest, "manifest")? };
        let path = path.ok_or_else(|| Failure::argument("manifest is null; name a file"))?;
        let entries = read_manifest(&path)?;
        let missing = opened.engine.preload(&entries).into_iter();
        let failed: Vec<_> = missing.map(|(entry, error)| (entry.to_string(), Failure::from(error))).collect();
        match failed.first() {
            None => Ok(()),
            Some((_, first)) => {
                let lines: Vec<_> = failed.iter().map(|(entry, e)| format!("{entry}: {}", e.message)).collect();
                let message =
                    format!("{} of {} entries cannot be had\n{}", failed.len(), entries.len(), lines.join("\n"));
                Err(Failure::new(first.status, message))
            }
        }
    })
}

/// Closes the engine's set of kernels: loads those of all records that may be used here; from then on nothing is
/// compiled or tuned and no file is read. Sealing again changes nothing and gives the same digest.
///
/// `on_miss`: a `flashtune_on_miss`, for calls of sizes that no kernel was sealed in for. `digest`: receives 64
/// hexadecimal digits and a zero byte (65 bytes) unless NULL; processes with equal digests run the same kernels.
///
/// Fails with SEALED when there is no kernel at all.
///
/// # Safety
/// `digest` is NULL or writable for 65 bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_seal(engine: EngineHandle, on_miss: i32, digest: *mut c_char) -> Status {
    guard(|| {
        let opened = ENGINES.get(engine)?;
        let seal = opened.engine.seal(miss(on_miss)?)?;
        if !digest.is_null() {
            let hex = seal.digest.hex();
            // SAFETY: by this function's contract; the text has 64 bytes.
            unsafe { input::write_text(&hex, digest, hex.len() + 1, std::ptr::null_mut())? };
        }
        Ok(())
    })
}

/// What the engine counted: calls by what they ran on, refusals, compilations, verification failures.
///
/// `format`: FLASHTUNE_FORMAT_TEXT for what Prometheus scrapes, FLASHTUNE_FORMAT_JSON for one object. The other
/// arguments and the failures are those of `flashtune_explain`.
///
/// # Safety
/// As `flashtune_explain`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_counters(
    engine: EngineHandle,
    format: i32,
    buffer: *mut c_char,
    capacity: usize,
    length: *mut usize,
) -> Status {
    const TEXT: i32 = Format::Text as i32;
    const JSON: i32 = Format::Json as i32;
    guard(|| {
        let opened = ENGINES.get(engine)?;
        let text = match format {
            TEXT => opened.engine.prometheus(),
            JSON => serde_json::to_string(&opened.engine.counters())
                .map_err(|e| Failure::new(Status::Internal, e.to_string()))?,
            n => {
                return Err(Failure::argument(format!(
                    "format is {n}, but a flashtune_format is 0 (text) or 1 (JSON)"
                )));
            }
        };
        // SAFETY: by this function's contract.
        unsafe { input::write_text(&text, buffer, capacity, length) }
    })
}

/// Appends the classes of sizes that were met and that no record of their own serves to a file that
/// `flashtune tune --from` takes. `classes`: receives their number; may be NULL.
///
/// # Safety
/// `file` is NULL or a string that ends with a zero byte, `classes` is NULL or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_write_untuned(
    engine: EngineHandle,
    file: *const c_char,
    classes: *mut u64,
) -> Status {
    guard(|| {
        let opened = ENGINES.get(engine)?;
        // SAFETY: by this function's contract.
        let path = unsafe { input::path(file, "file")? };
        let path = path.ok_or_else(|| Failure::argument("file is null; name one"))?;
        let written = opened.engine.write_untuned(&path)?;
        if !classes.is_null() {
            // SAFETY: by this function's contract.
            unsafe { input::write(classes, "the number of classes", written as u64)? };
        }
        Ok(())
    })
}

/// Writes the counters as Prometheus reads them to a file that is whole whenever somebody reads it: for node_exporter's
/// textfile collector, which takes a folder of `*.prom`. Each line has the label `process` with the file's name
/// (`rank0` of `rank0.prom`). To be called now and then, as often as the collector is scraped.
///
/// Fails with STORAGE; an older file stays then.
///
/// # Safety
/// `file` is NULL or a string that ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_write_metrics(engine: EngineHandle, file: *const c_char) -> Status {
    guard(|| {
        let opened = ENGINES.get(engine)?;
        // SAFETY: by this function's contract.
        let path = unsafe { input::path(file, "file")? };
        let path = path.ok_or_else(|| Failure::argument("file is null; name one"))?;
        Ok(opened.engine.write_metrics(&path)?)
    })
}

fn miss(number: i32) -> Result<engine::OnMiss> {
    const NEAREST: i32 = OnMiss::Nearest as i32;
    const REFUSE: i32 = OnMiss::Refuse as i32;
    match number {
        NEAREST => Ok(engine::OnMiss::Nearest),
        REFUSE => Ok(engine::OnMiss::Refuse),
        n => Err(Failure::argument(format!("on_miss is {n}, but a flashtune_on_miss is 0 (nearest) or 1 (refuse)"))),
    }
}

//! The account of the last dispatch.

use crate::engine_handle::ENGINES;
use crate::error::{Failure, Result, guard};
use crate::input;
use crate::types::{EngineHandle, Format, Status};
use engine::Explanation;
use std::ffi::c_char;
use std::sync::PoisonError;

/// Says which kernel the engine's last `flashtune_forward` or `flashtune_prepare` (of any thread) uses, from where it
/// comes, and why no other does.
///
/// `format`: a `flashtune_format`. `buffer`: receives the text and a zero byte; it may be NULL when `capacity` is 0.
/// `length`: receives the length of the text without the zero byte, also when the buffer is too small; may be NULL.
///
/// Fails with BUFFER_TOO_SMALL unless `capacity` is greater than the length, and with INVALID_ARGUMENT before the first
/// dispatch.
///
/// # Safety
/// `buffer` is NULL or writable for `capacity` bytes, `length` is NULL or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_explain(
    engine: EngineHandle,
    format: i32,
    buffer: *mut c_char,
    capacity: usize,
    length: *mut usize,
) -> Status {
    guard(|| {
        let opened = ENGINES.get(engine)?;
        let last = opened.last.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let last =
            last.ok_or_else(|| Failure::argument("this engine has dispatched nothing yet; call forward first"))?;
        let text = written(&last.explain(), format)?;
        // SAFETY: by this function's contract.
        unsafe { input::write_text(&text, buffer, capacity, length) }
    })
}

fn written(explanation: &Explanation, format: i32) -> Result<String> {
    const TEXT: i32 = Format::Text as i32;
    const JSON: i32 = Format::Json as i32;
    match format {
        TEXT => Ok(explanation.to_string()),
        JSON => serde_json::to_string(explanation).map_err(|e| Failure::new(Status::Internal, e.to_string())),
        n => Err(Failure::argument(format!("format is {n}, but a flashtune_format is 0 (text) or 1 (JSON)"))),
    }
}

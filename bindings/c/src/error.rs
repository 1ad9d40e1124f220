//! From results and panics to status codes and the last error's text.

use crate::Status;
use crate::fork;
use engine::{CacheError, CodegenError, RuntimeError};
use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Why a call failed.
#[derive(Debug)]
pub(crate) struct Failure {
    pub status: Status,
    pub message: String,
}

pub(crate) type Result<T> = std::result::Result<T, Failure>;

impl Failure {
    pub fn new(status: Status, message: impl Into<String>) -> Self {
        Self { status, message: message.into() }
    }

    /// An argument that cannot be used.
    pub fn argument(message: impl Into<String>) -> Self {
        Self::new(Status::InvalidArgument, message)
    }
}

impl From<engine::Error> for Failure {
    fn from(e: engine::Error) -> Self {
        let status = match &e {
            engine::Error::Runtime(e) => of_runtime(e),
            engine::Error::Tuner(_) => Status::Tuning,
            engine::Error::Templates { .. }
            | engine::Error::Manifest { .. }
            | engine::Error::ManifestFile { .. }
            | engine::Error::MetricsFile { .. } => Status::Storage,
        };
        Self::new(status, e.to_string())
    }
}

impl From<RuntimeError> for Failure {
    fn from(e: RuntimeError) -> Self {
        Self::new(of_runtime(&e), e.to_string())
    }
}

fn of_runtime(e: &RuntimeError) -> Status {
    use RuntimeError::*;
    match e {
        Codegen(CodegenError::Unsupported { .. }) => Status::Unsupported,
        Codegen(CodegenError::Parse { .. } | CodegenError::Program(_)) => Status::InvalidArgument,
        Codegen(CodegenError::Template { .. }) | Cache(_) | Io { .. } => Status::Storage,
        Missing { .. } => Status::Missing,
        Compile { .. } => Status::Compile,
        Device { .. } => Status::Device,
        Tensor { .. } => Status::InvalidTensor,
        BlockMask { .. } => Status::InvalidArgument,
        Sealed { .. } => Status::Sealed,
    }
}

impl From<CacheError> for Failure {
    fn from(e: CacheError) -> Self {
        Self::new(Status::Storage, e.to_string())
    }
}

thread_local! {
    /// Text of the calling thread's last failure.
    static LAST: RefCell<CString> = RefCell::default();
}

fn remember(message: &str) {
    // A text with a zero byte (a file name, say) would end there.
    let text = CString::new(message.replace('\0', "\\0")).unwrap_or_default();
    // While a thread ends its locals are gone; nobody is left to ask for the text.
    let _ = LAST.try_with(|last| *last.borrow_mut() = text);
}

/// Runs the body of an entry point: refuses a forked process, catches panics, keeps the failure's text.
pub(crate) fn guard(body: impl FnOnce() -> Result<()>) -> Status {
    if fork::happened() {
        remember(fork::MESSAGE);
        return Status::Forked;
    }
    let failure = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => return Status::Ok,
        Ok(Err(failure)) => failure,
        Err(panic) => {
            let text = panic.downcast_ref::<&str>().copied().or(panic.downcast_ref::<String>().map(String::as_str));
            let text = text.unwrap_or("a panic without a text");
            Failure::new(Status::Internal, format!("a fault of flashtune: {text}; please report it"))
        }
    };
    remember(&failure.message);
    failure.status
}

/// Text of the last failure on the calling thread; empty when there was none. Valid until the thread's next call of a
/// function of this library.
#[unsafe(no_mangle)]
pub extern "C" fn flashtune_last_error() -> *const c_char {
    LAST.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

/// Name of a status, e.g. "FLASHTUNE_STATUS_OK"; NULL for a number that is none.
#[unsafe(no_mangle)]
pub extern "C" fn flashtune_status_name(status: i32) -> *const c_char {
    const NAMES: [&std::ffi::CStr; 14] = [
        c"FLASHTUNE_STATUS_OK",
        c"FLASHTUNE_STATUS_INVALID_ARGUMENT",
        c"FLASHTUNE_STATUS_INVALID_HANDLE",
        c"FLASHTUNE_STATUS_INVALID_TENSOR",
        c"FLASHTUNE_STATUS_UNSUPPORTED",
        c"FLASHTUNE_STATUS_MISSING",
        c"FLASHTUNE_STATUS_DEVICE",
        c"FLASHTUNE_STATUS_COMPILE",
        c"FLASHTUNE_STATUS_SEALED",
        c"FLASHTUNE_STATUS_STORAGE",
        c"FLASHTUNE_STATUS_TUNING",
        c"FLASHTUNE_STATUS_BUFFER_TOO_SMALL",
        c"FLASHTUNE_STATUS_FORKED",
        c"FLASHTUNE_STATUS_INTERNAL",
    ];
    usize::try_from(status).ok().and_then(|i| NAMES.get(i)).map_or(std::ptr::null(), |name| name.as_ptr())
}

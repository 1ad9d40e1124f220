//! Binding of the few C functions of NVRTC that are needed, out of one library file.
//!
//! The functions are looked up in the file that was found, by path: a second NVRTC in the process (of PyTorch, say) is
//! never mixed up with it.

use crate::error::chain;
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};

type Program = *mut c_void;
type Code = c_int;
type SizeOf = unsafe extern "C" fn(Program, *mut usize) -> Code;
type BytesOf = unsafe extern "C" fn(Program, *mut c_char) -> Code;

/// The C functions; they live as long as the library.
pub(super) struct NvrtcLib {
    get_error_string: unsafe extern "C" fn(Code) -> *const c_char,
    create_program: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> Code,
    destroy_program: unsafe extern "C" fn(*mut Program) -> Code,
    compile_program: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> Code,
    get_cubin_size: unsafe extern "C" fn(Program, *mut usize) -> Code,
    get_cubin: unsafe extern "C" fn(Program, *mut c_char) -> Code,
    /// Size and bytes of the PTX; only those who look at it need them.
    get_ptx: Option<(SizeOf, BytesOf)>,
    get_log_size: unsafe extern "C" fn(Program, *mut usize) -> Code,
    get_log: unsafe extern "C" fn(Program, *mut c_char) -> Code,
    version: (u32, u32),
    archs: Vec<u16>,
    _library: Library,
    /// What it loads by name when it first compiles.
    _builtins: Vec<Library>,
}

/// Result of a compilation: the log is there in either case.
pub(super) struct Compiled {
    /// A cubin, or PTX.
    pub(super) output: Result<Vec<u8>, String>,
    pub(super) log: String,
    /// Whether it was refused for an option that this version does not know.
    pub(super) invalid_option: bool,
}

/// What a program is compiled to: a cubin for a real architecture, PTX for a virtual one.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Output {
    Cubin,
    Ptx,
}

/// `NVRTC_ERROR_INVALID_OPTION`.
const INVALID_OPTION: Code = 5;

/// # Safety
/// `T` is the type of the function that `name` is.
unsafe fn symbol<T: Copy>(library: &Library, name: &str) -> Result<T, String> {
    // SAFETY: by this function's contract.
    unsafe { library.get::<T>(name) }.map(|s| *s).map_err(|e| chain(&e))
}

/// The libraries of built-in functions that lie beside NVRTC, loaded before it asks for its own by name when it first
/// compiles: not every wheel (13.0) says where it is to be found. None where NVRTC lies in a folder that the loader
/// knows.
fn builtins_beside(path: &Path) -> Vec<Library> {
    let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) else { return Vec::new() };
    let names = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let is_one = |p: &PathBuf| {
        p.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with("libnvrtc-builtins.so."))
    };
    // SAFETY: the library holds data and functions for NVRTC, and no constructor that does more than set those up.
    names.filter(is_one).filter_map(|p| unsafe { Library::open(Some(p), RTLD_NOW | RTLD_LOCAL) }.ok()).collect()
}

impl NvrtcLib {
    /// Loads a library file; on failure tells why.
    pub(super) fn open(path: &Path) -> Result<Self, String> {
        let builtins = builtins_beside(path);
        // SAFETY: NVRTC's constructors set up its own state only.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.map_err(|e| chain(&e))?;
        // SAFETY: names and types are those of nvrtc.h, unchanged since CUDA 11.
        let mut this = unsafe {
            Self {
                get_error_string: symbol(&library, "nvrtcGetErrorString")?,
                create_program: symbol(&library, "nvrtcCreateProgram")?,
                destroy_program: symbol(&library, "nvrtcDestroyProgram")?,
                compile_program: symbol(&library, "nvrtcCompileProgram")?,
                get_cubin_size: symbol(&library, "nvrtcGetCUBINSize")?,
                get_cubin: symbol(&library, "nvrtcGetCUBIN")?,
                get_ptx: symbol(&library, "nvrtcGetPTXSize").ok().zip(symbol(&library, "nvrtcGetPTX").ok()),
                get_log_size: symbol(&library, "nvrtcGetProgramLogSize")?,
                get_log: symbol(&library, "nvrtcGetProgramLog")?,
                version: (0, 0),
                archs: Vec::new(),
                _library: library,
                _builtins: builtins,
            }
        };
        this.version = this.read_version()?;
        this.archs = this.read_archs()?;
        Ok(this)
    }

    /// Major and minor version.
    pub(super) fn version(&self) -> (u32, u32) {
        self.version
    }

    /// Compute capabilities times ten that the library knows.
    pub(super) fn archs(&self) -> &[u16] {
        &self.archs
    }

    fn read_version(&self) -> Result<(u32, u32), String> {
        // SAFETY: as in `open`.
        let version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> Code =
            unsafe { symbol(&self._library, "nvrtcVersion")? };
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both pointers are to live integers.
        self.ok("nvrtcVersion", unsafe { version(&mut major, &mut minor) })?;
        Ok((major as u32, minor as u32))
    }

    fn read_archs(&self) -> Result<Vec<u16>, String> {
        // SAFETY: as in `open`.
        let (count, list) = unsafe {
            (
                symbol::<unsafe extern "C" fn(*mut c_int) -> Code>(&self._library, "nvrtcGetNumSupportedArchs")?,
                symbol::<unsafe extern "C" fn(*mut c_int) -> Code>(&self._library, "nvrtcGetSupportedArchs")?,
            )
        };
        let mut n = 0;
        // SAFETY: the pointer is to a live integer.
        self.ok("nvrtcGetNumSupportedArchs", unsafe { count(&mut n) })?;
        let mut archs = vec![0; usize::try_from(n).unwrap_or(0)];
        // SAFETY: the array has the size that the library asked for.
        self.ok("nvrtcGetSupportedArchs", unsafe { list(archs.as_mut_ptr()) })?;
        Ok(archs.into_iter().filter_map(|a| u16::try_from(a).ok()).collect())
    }

    fn ok(&self, call: &str, code: Code) -> Result<(), String> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: the function takes any code and returns a constant string.
        let text = unsafe { CStr::from_ptr((self.get_error_string)(code)) };
        Err(format!("{call}: {}", text.to_string_lossy()))
    }

    /// Compiles. May be called from many threads: every call has a program of its own.
    pub(super) fn compile(&self, name: &CStr, source: &CStr, options: &[CString], output: Output) -> Compiled {
        let failed = |message: String| Compiled { output: Err(message), log: String::new(), invalid_option: false };
        let mut program: Program = std::ptr::null_mut();
        // SAFETY: the strings are C strings that outlive the call; there are no headers.
        let code = unsafe {
            (self.create_program)(&mut program, source.as_ptr(), name.as_ptr(), 0, std::ptr::null(), std::ptr::null())
        };
        if let Err(message) = self.ok("nvrtcCreateProgram", code) {
            return failed(message);
        }
        let pointers: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
        let Ok(count) = c_int::try_from(pointers.len()) else { return failed("too many options".to_owned()) };
        // SAFETY: `program` was created above; the array holds `count` C strings that outlive the call.
        let code = unsafe { (self.compile_program)(program, count, pointers.as_ptr()) };
        let compiled = self.ok("nvrtcCompileProgram", code);
        let log = self.bytes(program, "nvrtcGetProgramLog", self.get_log_size, self.get_log);
        let output = compiled.and_then(|()| match output {
            Output::Cubin => self.bytes(program, "nvrtcGetCUBIN", self.get_cubin_size, self.get_cubin),
            Output::Ptx => match self.get_ptx {
                Some((size, get)) => self.bytes(program, "nvrtcGetPTX", size, get),
                None => Err("nvrtcGetPTX: the library has no such function".to_owned()),
            },
        });
        // SAFETY: `program` was created above and is not used again.
        unsafe { (self.destroy_program)(&mut program) };
        let log = log.unwrap_or_else(|message| message.into_bytes());
        let log = String::from_utf8_lossy(&log).trim_end_matches(['\0', '\n']).to_owned();
        Compiled { output, log, invalid_option: code == INVALID_OPTION }
    }

    fn bytes(
        &self,
        program: Program,
        call: &str,
        size: unsafe extern "C" fn(Program, *mut usize) -> Code,
        get: unsafe extern "C" fn(Program, *mut c_char) -> Code,
    ) -> Result<Vec<u8>, String> {
        let mut n = 0;
        // SAFETY: `program` is alive and `n` is a live integer.
        self.ok(call, unsafe { size(program, &mut n) })?;
        let mut bytes = vec![0u8; n];
        // SAFETY: the array has the size that the library asked for.
        self.ok(call, unsafe { get(program, bytes.as_mut_ptr().cast()) })?;
        Ok(bytes)
    }
}

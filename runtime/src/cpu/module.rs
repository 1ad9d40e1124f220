//! A compiled C kernel, loaded into this process.

use super::memory::{SharedMemory, with_scratch};
use crate::error::chain;
use crate::{Error, Module, Result, elf};
use flashtune_cache::Artifact;
use flashtune_codegen::abi::{Args, ArgsLayout, BackwardArgs, RaggedArgs};
use flashtune_codegen::{Kernel, Op};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::any::Any;
use std::ffi::c_void;
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

type Tiles = unsafe extern "C" fn(*const u8) -> u64;
type Prepare = unsafe extern "C" fn(*const u8, u64) -> u64;
type ScratchBytes = unsafe extern "C" fn(*const u8) -> u64;
type Tile = unsafe extern "C" fn(*const u8, u64, *mut c_void);
type Init = unsafe extern "C" fn() -> i32;

/// A loaded C kernel. The function pointers live as long as `_library`.
pub(super) struct CpuModule {
    kernel: Kernel,
    /// Of kernels of ragged batches, whose tiles share memory ([`SharedMemory`]).
    prepare: Option<Prepare>,
    tiles: Tiles,
    scratch_bytes: ScratchBytes,
    tile: Tile,
    /// What the kernel was compiled for.
    layout: ArgsLayout,
    // Fields drop in order: the library goes before the file that it was loaded from. The file stays open as long as
    // the library is loaded, because the loader takes a second `/proc/self/fd/N` of the same N for the same library.
    _library: Library,
    _file: Option<File>,
}

impl Module for CpuModule {
    fn as_any(&self) -> &dyn Any {
        self
    }
    fn kernel(&self) -> &Kernel {
        &self.kernel
    }
}

/// The struct that kernels take by pointer. A shorter one is the first bytes of it, but for gradients of what a program
/// reads, whose struct has the one that grows in front.
enum Argument<'a> {
    Whole(Args<'a>),
    Packed(Vec<u64>),
}

impl Argument<'_> {
    fn at(&self) -> *const u8 {
        match self {
            Argument::Whole(args) => args.bytes().as_ptr(),
            Argument::Packed(words) => words.as_ptr().cast(),
        }
    }
}

impl CpuModule {
    /// Loads an artifact whose arch the host can run.
    pub(super) fn load(artifact: &Artifact) -> Result<Self> {
        let kernel = artifact.recipe.kernel;
        let failed = |call, message: String| Error::Device {
            call,
            device: "cpu".to_owned(),
            message: format!("{}: {message}", kernel.name()),
            remedy: "compile the kernel again on this machine (tune, or remove it from the cache)",
        };
        artifact.args.check(&kernel)?;
        // The loader trusts the headers of a library.
        elf::check(&artifact.bytes).map_err(|why| failed("load", format!("it is no library: {why}")))?;
        let (library, file) = open_bytes(&artifact.bytes).map_err(|m| failed("dlopen", m))?;
        let ragged = kernel.problem.op == Op::Forward && !kernel.problem.kv.is_dense();
        // SAFETY: the artifact's recipe holds our ABI version, which fixes the names and types of these symbols.
        let (prepare, tiles, scratch_bytes, tile, init) = unsafe {
            (
                ragged
                    .then(|| symbol::<Prepare>(&library, "ft_prepare").map_err(|m| failed("dlsym", m)))
                    .transpose()?,
                symbol::<Tiles>(&library, "ft_tiles").map_err(|m| failed("dlsym", m))?,
                symbol::<ScratchBytes>(&library, "ft_scratch_bytes").map_err(|m| failed("dlsym", m))?,
                symbol::<Tile>(&library, "ft_tile").map_err(|m| failed("dlsym", m))?,
                symbol::<Init>(&library, "ft_init").ok(),
            )
        };
        if let Some(init) = init {
            // SAFETY: as above; `ft_init` takes nothing and is called once, before any other function.
            let code = unsafe { init() };
            if code != 0 {
                return Err(failed("ft_init", format!("returned {code}")));
            }
        }
        let layout = artifact.args;
        Ok(Self { kernel, prepare, tiles, scratch_bytes, tile, layout, _library: library, _file: file })
    }

    fn argument<'a>(&self, args: Args<'a>) -> Argument<'a> {
        let Args::Gradient(gradient) = args else { return Argument::Whole(args) };
        let (backward, tail) = bytemuck::bytes_of(gradient).split_at(size_of::<BackwardArgs>());
        let known = |bytes: &[u8], length: u32| bytes.chunks_exact(8).take(length as usize / 8).map(word).collect();
        fn word(bytes: &[u8]) -> u64 {
            u64::from_ne_bytes(bytes.try_into().expect("chunks of eight"))
        }
        let [backward, tail]: [Vec<u64>; 2] = [known(backward, self.layout.forward), known(tail, self.layout.tail)];
        Argument::Packed([backward, tail].concat())
    }

    /// Writes down the work of a ragged batch, in memory that its tiles share. Returns the memory, for as long as they
    /// run, and the arguments that name it; `None` when there is not enough.
    ///
    /// # Safety
    /// As [`crate::Device::launch`].
    pub(super) unsafe fn prepare(&self, args: &RaggedArgs) -> Option<(SharedMemory, RaggedArgs)> {
        let mut memory = SharedMemory::take();
        let Some(prepare) = self.prepare else { return Some((memory, *args)) };
        loop {
            let args = RaggedArgs { scratch: memory.address(), ..*args };
            // SAFETY: the function reads what `args` names, which is valid by the caller's promise, and writes to the
            // memory at `scratch`, which is ours and of the size that is said.
            let needed = unsafe { prepare(Args::Ragged(&args).bytes().as_ptr(), memory.bytes()) };
            if needed <= memory.bytes() {
                return Some((memory, args));
            }
            memory.grow(needed)?;
        }
    }

    /// Work items of a call, and the scratch that each worker needs.
    ///
    /// # Safety
    /// As [`crate::Device::launch`].
    pub(super) unsafe fn plan(&self, args: Args<'_>) -> (u64, u64) {
        let argument = self.argument(args);
        // SAFETY: the functions read sizes from `args` only; the library is loaded.
        unsafe { ((self.tiles)(argument.at()), (self.scratch_bytes)(argument.at())) }
    }

    /// Takes work items from the counter until there are none left. Returns whether the scratch could be had.
    ///
    /// # Safety
    /// As [`crate::Device::launch`]; `tiles` and `scratch_bytes` come from [`Self::plan`].
    pub(super) unsafe fn work(&self, args: Args<'_>, next: &AtomicU64, tiles: u64, scratch_bytes: u64) -> bool {
        let argument = self.argument(args);
        with_scratch(scratch_bytes, |scratch| {
            loop {
                let tile = next.fetch_add(1, Ordering::Relaxed);
                if tile >= tiles {
                    return;
                }
                // SAFETY: the addresses in `args` are valid by the caller's promise, `tile` is in range and is given
                // out once, and `scratch` has the size that the kernel asked for and belongs to this thread.
                unsafe { (self.tile)(argument.at(), tile, scratch) }
            }
        })
        .is_some()
    }
}

/// # Safety
/// `T` is the type of the function that `name` is.
unsafe fn symbol<T: Copy>(library: &Library, name: &str) -> Result<T, String> {
    // SAFETY: by this function's contract.
    unsafe { library.get::<T>(name) }.map(|s| *s).map_err(|e| chain(&e))
}

/// Loads a shared object from memory: through a memory file; where that is not allowed through a file without a name,
/// which nobody can put another one in the place of; and without /proc through a private file that is removed at
/// once.
fn open_bytes(bytes: &[u8]) -> Result<(Library, Option<File>), String> {
    let in_folder = |e: std::io::Error| format!("in {}: {e}", std::env::temp_dir().display());
    open_handle(memory_file(bytes)).or_else(|memory| {
        open_handle(unnamed_file(bytes)).or_else(|_| {
            let mut file = private_folder()
                .and_then(|folder| tempfile::Builder::new().prefix("flashtune-").suffix(".so").tempfile_in(folder))
                .map_err(|e| format!("{memory}; {}", in_folder(e)))?;
            file.write_all(bytes).and_then(|()| file.flush()).map_err(|e| format!("{memory}; {}", in_folder(e)))?;
            let library = open_path(file.path()).map_err(|e| format!("{memory}; {e}"))?;
            Ok((library, None))
        })
    })
}

/// Loads an open file.
fn open_handle(file: std::io::Result<File>) -> Result<(Library, Option<File>), String> {
    let file = file.map_err(|e| e.to_string())?;
    let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    Ok((open_path(&path)?, Some(file)))
}

fn unnamed_file(bytes: &[u8]) -> std::io::Result<File> {
    let mut file = tempfile::tempfile()?;
    file.write_all(bytes).map(|()| file)
}

/// The folder for temporary files, if nobody else can rename what is in it: between the writing and the loading of a
/// library another one would take its name.
fn private_folder() -> std::io::Result<PathBuf> {
    const STICKY: u32 = 0o1000;
    let folder = std::env::temp_dir();
    let mode = folder.metadata()?.mode();
    match mode & 0o022 == 0 || mode & STICKY != 0 {
        true => Ok(folder),
        false => Err(std::io::Error::other("others may rename files there; set TMPDIR to a folder of your own")),
    }
}

fn open_path(path: &Path) -> Result<Library, String> {
    // SAFETY: the library was compiled from our template (the caller verified its hash); it has no constructors beyond
    // the C runtime's.
    unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.map_err(|e| chain(&e))
}

fn memory_file(bytes: &[u8]) -> std::io::Result<File> {
    // SAFETY: the name is a C string; the flags are valid.
    let fd = unsafe { libc::memfd_create(c"flashtune-kernel".as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: `fd` was just opened and belongs to nobody else.
    let mut file = unsafe { File::from_raw_fd(fd) };
    file.write_all(bytes)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Compiler;
    use crate::compile::Cc;
    use flashtune_codegen::{Language, Source};

    #[test]
    fn a_library_is_loaded_from_a_file_without_a_name_too() {
        let source = Source {
            name: "answer".into(),
            entry: "answer".into(),
            language: Language::C,
            options: ["-shared", "-fPIC"].map(str::to_owned).to_vec(),
            text: "int answer(void) { return 42; }".into(),
        };
        let bytes = Cc::find().unwrap().compile(&source).unwrap().0;
        for file in [memory_file(&bytes), unnamed_file(&bytes)] {
            let (library, _file) = open_handle(file).unwrap();
            // SAFETY: the type is that of the function above, which does nothing but return.
            let answer = unsafe { symbol::<unsafe extern "C" fn() -> i32>(&library, "answer").unwrap()() };
            assert_eq!(answer, 42);
        }
    }
}

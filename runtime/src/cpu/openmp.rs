//! The OpenMP runtime that is loaded in this process, as a parallel loop.
//!
//! Its own entry points are called: GOMP_parallel, which code compiled by gcc calls, and which the runtimes of LLVM and
//! Intel have, too. None is loaded for this.

use super::threads::ParallelLoop;
use crate::{Error, Result};
use libloading::os::unix::{Library, RTLD_LAZY, RTLD_LOCAL};
use std::ffi::{OsStr, c_int, c_uint, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

type Parallel = unsafe extern "C" fn(unsafe extern "C" fn(*mut c_void), *mut c_void, c_uint, c_uint);
type Ask = unsafe extern "C" fn() -> c_int;

/// A runtime. The functions live as long as the library.
pub(super) struct OpenMp {
    parallel: Parallel,
    most: Ask,
    in_parallel: Ask,
    _library: Library,
}

/// A parallel region's function: `of` is a pointer to a member.
unsafe extern "C" fn region(of: *mut c_void) {
    // SAFETY: `OpenMp::run` passes the address of its member, which lives until the region has ended.
    let member = unsafe { *of.cast::<&(dyn Fn() + Sync)>() };
    member();
}

impl OpenMp {
    /// The runtime that PyTorch computes with, else the first one that is loaded.
    ///
    /// # Errors
    /// When none is.
    pub(super) fn loaded() -> Result<Self> {
        let maps = std::fs::read("/proc/self/maps").unwrap_or_default();
        candidates(&maps).iter().find_map(|path| Self::of(path)).ok_or_else(|| Error::Missing {
            what: "an OpenMP runtime in this process",
            searched: "libraries of /proc/self/maps: libtorch_cpu's, libgomp, libiomp5, libomp".to_owned(),
            remedy: "load what computes with OpenMP first (import torch), or take the library's own threads",
        })
    }

    /// The runtime that a loaded library is or depends on.
    fn of(path: &Path) -> Option<Self> {
        // SAFETY: with RTLD_NOLOAD nothing is loaded, and nothing of the library is run.
        let library = unsafe { Library::open(Some(path), RTLD_LAZY | RTLD_LOCAL | libc::RTLD_NOLOAD) }.ok()?;
        // SAFETY: the names are those of OpenMP's functions in every runtime, which have these types.
        unsafe {
            let parallel = *library.get::<Parallel>("GOMP_parallel").ok()?;
            let most = *library.get::<Ask>("omp_get_max_threads").ok()?;
            let in_parallel = *library.get::<Ask>("omp_in_parallel").ok()?;
            Some(Self { parallel, most, in_parallel, _library: library })
        }
    }
}

/// Libraries to ask, best first: a symbol is looked for in what they depend on, too.
fn candidates(maps: &[u8]) -> Vec<PathBuf> {
    const NAMES: [&[u8]; 4] = [b"libtorch_cpu.so", b"libgomp", b"libiomp5", b"libomp"];
    let mut found: Vec<(usize, PathBuf)> = Vec::new();
    for line in maps.split(|b| *b == b'\n') {
        let Some(at) = line.iter().position(|b| *b == b'/') else { continue };
        let path = Path::new(OsStr::from_bytes(&line[at..]));
        let Some(name) = path.file_name() else { continue };
        let Some(rank) = NAMES.iter().position(|n| name.as_bytes().starts_with(n)) else { continue };
        if !found.iter().any(|(_, known)| known == path) {
            found.push((rank, path.to_owned()));
        }
    }
    found.sort_by_key(|(rank, _)| *rank);
    found.into_iter().map(|(_, path)| path).collect()
}

impl ParallelLoop for OpenMp {
    fn threads(&self) -> usize {
        // SAFETY: both read what OpenMP knows of this thread.
        let (most, inside) = unsafe { ((self.most)(), (self.in_parallel)()) };
        // Inside of a region a new one has one thread, unless a host asks for more, which then are too many.
        if inside != 0 { 1 } else { usize::try_from(most).unwrap_or(1).max(1) }
    }

    fn run(&self, members: usize, member: &(dyn Fn() + Sync)) {
        let mut member = member;
        let of = (&raw mut member).cast();
        // SAFETY: `region` gets the address of a member that outlives the call, and no member unwinds.
        unsafe { (self.parallel)(region, of, c_uint::try_from(members).unwrap_or(c_uint::MAX), 0) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pytorchs_runtime_is_asked_for_first_and_each_library_once() {
        let maps = b"7f0 r-xp 0 08:01 1   /a b/libgomp.so.1\n7f1 r--p 0 08:01 1   /a b/libgomp.so.1\n\
                     7f2 rw-p 0 00:00 0   [heap]\n7f3 r-xp 0 08:01 2   /x/numpy.libs/libgomp-a.so.1.0.0\n\
                     7f4 r-xp 0 08:01 3   /t/lib/libtorch_cpu.so\n7f5 r-xp 0 08:01 4   /t/lib/libtorch.so\n";
        let found = candidates(maps);
        let paths: Vec<_> = found.iter().map(|p| p.to_str().unwrap()).collect();
        assert_eq!(paths, ["/t/lib/libtorch_cpu.so", "/a b/libgomp.so.1", "/x/numpy.libs/libgomp-a.so.1.0.0"]);
        assert!(candidates(b"").is_empty());
    }
}

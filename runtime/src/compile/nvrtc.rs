//! NVIDIA's run-time compiler: CUDA C++ to a cubin, in this process, with no toolkit and no GPU.

use super::nvrtc_lib::NvrtcLib;
use super::ptxas_log;
use crate::library_search::Surroundings;
use crate::{Compiler, Error, Result};
use flashtune_cache::{CompilerId, Facts, Key};
use flashtune_codegen::{Language, Source};
use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, Once};
use std::time::Instant;

/// NVRTC, loaded from a file that was found by itself.
pub struct Nvrtc {
    id: CompilerId,
    path: PathBuf,
    library: NvrtcLib,
    warm: Once,
}

/// Environment variable that names the library or its folder.
const ENV: &str = "FLASHTUNE_NVRTC";
const LIBRARY: &str = "libnvrtc.so";
const WHAT: &str = "NVRTC (libnvrtc.so, CUDA 12 or newer)";
const REMEDY: &str = "pip install nvidia-cuda-nvrtc (no toolkit or GPU is needed), or set FLASHTUNE_NVRTC to the \
                      library or its folder";

/// The oldest NVRTC that is taken without being named: older ones do not know sm_90a.
const OLDEST: u32 = 12;

impl Nvrtc {
    /// Finds and loads the library. Looked for in: `FLASHTUNE_NVRTC`; CUDA_HOME, CUDA_PATH, /usr/local/cuda*; the
    /// loader's folders; Python environments with the wheel `nvidia-cuda-nvrtc`. The answer is kept for the process.
    ///
    /// # Errors
    /// [`Error::Missing`] when there is none or none can be loaded. It is not kept: the next call looks again.
    pub fn find() -> Result<Arc<Nvrtc>> {
        static FOUND: Mutex<Option<Arc<Nvrtc>>> = Mutex::new(None);
        let mut found = FOUND.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(nvrtc) = &*found {
            return Ok(nvrtc.clone());
        }
        let nvrtc = Arc::new(Self::search(&Surroundings::of_process())?);
        tracing::debug!(path = %nvrtc.path.display(), id = %nvrtc.id, "found NVRTC");
        *found = Some(nvrtc.clone());
        Ok(nvrtc)
    }

    /// The file that was loaded.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Compute capabilities times ten that the library compiles for.
    pub fn supported_archs(&self) -> &[u16] {
        self.library.archs()
    }

    fn search(surroundings: &Surroundings<'_>) -> Result<Nvrtc> {
        let missing = |searched| Error::Missing { what: WHAT, searched, remedy: REMEDY };
        let mut tried = Vec::new();
        let (candidates, named) = match surroundings.named(ENV, LIBRARY) {
            Some(files) => (files, true),
            None => (surroundings.search(LIBRARY), false),
        };
        for path in candidates {
            match Self::open(&path) {
                Ok(nvrtc) if named || nvrtc.library.version().0 >= OLDEST => return Ok(nvrtc),
                Ok(nvrtc) => tried.push(format!("{} is {}", path.display(), nvrtc.id)),
                Err(why) => tried.push(format!("{}: {why}", path.display())),
            }
        }
        let searched = match (tried.is_empty(), named) {
            (true, true) => format!("the folder that {ENV} names holds no libnvrtc.so"),
            (true, false) => {
                format!("{ENV}, CUDA_HOME, CUDA_PATH, /usr/local/cuda*, the loader's path, Python environments")
            }
            (false, true) => format!("{ENV} names {}", tried.join("; ")),
            (false, false) => tried.join("; "),
        };
        Err(missing(searched))
    }

    fn open(path: &Path) -> Result<Nvrtc, String> {
        let library = NvrtcLib::open(path)?;
        let (major, minor) = library.version();
        // nvrtcVersion does not tell patch releases apart, and their outputs differ.
        let build = build_id(path).map_err(|e| e.to_string())?;
        let id = CompilerId { name: "nvrtc".to_owned(), version: format!("{major}.{minor}+{build}") };
        Ok(Nvrtc { id, path: path.to_owned(), library, warm: Once::new() })
    }
}

impl Compiler for Nvrtc {
    fn id(&self) -> &CompilerId {
        &self.id
    }

    fn compile(&self, source: &Source) -> Result<(Vec<u8>, Facts)> {
        let refused = |log: String| Error::Compile { compiler: self.id.to_string(), kernel: source.name.clone(), log };
        if source.language != Language::Cuda {
            return Err(refused("the source is C; the system C compiler compiles it".to_owned()));
        }
        let c_string =
            |text: &str| CString::new(text).map_err(|e| refused(format!("the source holds a zero byte: {e}")));
        let name = c_string(&format!("{}.cu", source.name))?;
        let text = c_string(&source.text)?;
        let options = source.options.iter().map(|o| c_string(o)).collect::<Result<Vec<_>>>()?;
        let start = Instant::now();
        let compiled = self.library.compile(&name, &text, &options);
        self.warm.call_once(|| ());
        let log = compiled.log;
        let cubin = compiled.cubin.map_err(|message| refused(format!("{message}\n{log}")))?;
        if cubin.is_empty() {
            return Err(refused(format!("no cubin: the target must be a real architecture (sm_XX)\n{log}")));
        }
        let facts = Facts { compile_ms: start.elapsed().as_secs_f64() * 1e3, ..ptxas_log::parse(&log) };
        if !facts.warnings.is_empty() {
            tracing::debug!(kernel = source.name, warnings = ?facts.warnings, "performance notes of ptxas");
        }
        Ok((cubin, facts))
    }

    fn warm_up(&self) {
        self.warm.call_once(|| {
            let Some(arch) = self.library.archs().last() else { return };
            let options = CString::new(format!("--gpu-architecture=sm_{arch}")).into_iter().collect::<Vec<_>>();
            if let Err(message) = self.library.compile(c"least.cu", LEAST, &options).cubin {
                tracing::debug!(message, "NVRTC refuses the least source");
            }
        });
    }
}

/// What the least compilation needs.
const LEAST: &CStr = c"extern \"C\" __global__ void k(float *x) { *x += 1; }";

/// A short name of the very build: the linker's build id, or when there is none, a hash over the size and samples of
/// the file (all of it would be 140 MB).
fn build_id(path: &Path) -> io::Result<String> {
    const SAMPLES: u64 = 64;
    let mut file = File::open(path)?;
    let size = file.metadata()?.len();
    let mut head = vec![0; size.min(1 << 16) as usize];
    file.read_exact(&mut head)?;
    if let Some(id) = elf_build_id(&head) {
        return Ok(id.iter().take(4).map(|b| format!("{b:02x}")).collect());
    }
    let mut sampled = size.to_le_bytes().to_vec();
    sampled.extend(&head);
    for i in 1..SAMPLES {
        file.seek(SeekFrom::Start(size / SAMPLES * i))?;
        (&mut file).take(4096).read_to_end(&mut sampled)?;
    }
    Ok(Key::of(&sampled).hex()[..8].to_owned())
}

/// The descriptor of the note NT_GNU_BUILD_ID in the notes at the start of a little-endian 64-bit ELF file.
fn elf_build_id(head: &[u8]) -> Option<&[u8]> {
    const PT_NOTE: u32 = 4;
    const NT_GNU_BUILD_ID: u32 = 3;
    let u16_at = |i: usize| Some(u16::from_le_bytes(head.get(i..i + 2)?.try_into().ok()?) as usize);
    let u32_at = |i: usize| Some(u32::from_le_bytes(head.get(i..i + 4)?.try_into().ok()?));
    let u64_at = |i: usize| usize::try_from(u64::from_le_bytes(head.get(i..i + 8)?.try_into().ok()?)).ok();
    if head.get(..6)? != b"\x7fELF\x02\x01" {
        return None;
    }
    let (table, entry, count) = (u64_at(32)?, u16_at(54)?, u16_at(56)?);
    for i in 0..count {
        let header = table.checked_add(i * entry)?;
        if u32_at(header)? != PT_NOTE {
            continue;
        }
        let (mut at, size) = (u64_at(header + 8)?, u64_at(header + 32)?);
        let end = at.checked_add(size)?;
        while at + 12 <= end {
            let (name, data) = (u32_at(at)? as usize, u32_at(at + 4)? as usize);
            let start = at + 12 + name.next_multiple_of(4);
            if u32_at(at + 8)? == NT_GNU_BUILD_ID && head.get(at + 12..at + 16)? == b"GNU\0" {
                return head.get(start..start.checked_add(data)?);
            }
            at = start.checked_add(data.next_multiple_of(4))?;
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nvrtc() -> Option<Arc<Nvrtc>> {
        let found = Nvrtc::find();
        if let Err(e) = &found {
            // CI installs it and says so; without it there is nothing to test.
            assert!(std::env::var_os("CI").is_none(), "{e}");
            eprintln!("skipped: {e}");
        }
        found.ok()
    }

    fn source(arch: &str, text: &str) -> Source {
        Source {
            name: "test".into(),
            entry: "k".into(),
            language: Language::Cuda,
            options: [format!("--gpu-architecture={arch}"), "--std=c++17".into(), "--ptxas-options=-v".into()].to_vec(),
            text: text.into(),
        }
    }

    const DOUBLE: &str = "extern \"C\" __global__ void k(float *a) { a[threadIdx.x] *= 2; }";

    #[test]
    fn compiles_to_cubins_with_facts_and_the_same_bytes_each_time() {
        let Some(nvrtc) = nvrtc() else { return };
        for arch in ["sm_80", "sm_90a"] {
            let (cubin, facts) = nvrtc.compile(&source(arch, DOUBLE)).unwrap();
            assert!(cubin.starts_with(b"\x7fELF"), "{arch}");
            assert!(facts.registers > 0 && facts.spill_bytes == 0 && facts.compile_ms > 0.0, "{facts:?}");
            assert!(nvrtc.compile(&source(arch, DOUBLE)).unwrap().0 == cubin);
        }
        assert!(nvrtc.supported_archs().contains(&90));
        assert!(nvrtc.id().version.contains('+'), "{}", nvrtc.id());
    }

    #[test]
    fn compiles_on_many_threads_at_once() {
        let Some(nvrtc) = nvrtc() else { return };
        std::thread::scope(|scope| {
            for i in 0..4 {
                let nvrtc = &nvrtc;
                scope.spawn(move || {
                    let text = DOUBLE.replace('2', &(i + 2).to_string());
                    assert!(nvrtc.compile(&source("sm_86", &text)).unwrap().0.starts_with(b"\x7fELF"));
                });
            }
        });
    }

    #[test]
    fn a_broken_source_gives_the_log_and_a_spilling_one_the_spills() {
        let Some(nvrtc) = nvrtc() else { return };
        let e = nvrtc.compile(&source("sm_80", "extern \"C\" __global__ void k() { undeclared; }")).unwrap_err();
        assert!(e.to_string().contains("undeclared") && e.to_string().contains("test.cu(1)"), "{e}");
        let e = nvrtc.compile(&source("sm_12", DOUBLE)).unwrap_err();
        assert!(e.to_string().contains("gpu-architecture"), "{e}");
        let e = nvrtc.compile(&source("compute_80", DOUBLE)).unwrap_err();
        assert!(e.to_string().contains("no cubin"), "{e}");
        let spilling = "extern \"C\" __global__ void __launch_bounds__(1024, 2) k(float *a, int n) {\n\
            float r[64];\n\
            for (int i = 0; i < 64; i++) r[i] = a[i * n + threadIdx.x];\n\
            for (int j = 0; j < n; j++) for (int i = 0; i < 64; i++) r[i] = r[i] * r[(i + 7) % 64] + a[j + i];\n\
            for (int i = 0; i < 64; i++) a[i * n + threadIdx.x] = r[i];\n}";
        let (_, facts) = nvrtc.compile(&source("sm_80", spilling)).unwrap();
        assert!(facts.spill_bytes > 0 && facts.stack_bytes > 0 && facts.registers <= 32, "{facts:?}");
    }

    #[test]
    fn a_library_that_is_not_there_or_none_is_an_error_with_the_remedy() {
        let at = |value: &Path| {
            let value = value.as_os_str().to_owned();
            let var = move |name: &str| (name == ENV).then(|| value.clone());
            let s = Surroundings { var: &var, folder: "/nonexistent".into(), root: "/nonexistent".into() };
            Nvrtc::search(&s).err().unwrap().to_string()
        };
        let dir = tempfile::tempdir().unwrap();
        let e = at(Path::new("/nonexistent/lib"));
        assert!(e.contains("/nonexistent/lib") && e.contains(ENV) && e.contains("pip install"), "{e}");
        assert!(at(dir.path()).contains("holds no libnvrtc"));
        std::fs::write(dir.path().join("libnvrtc.so.13"), "not a library").unwrap();
        assert!(at(dir.path()).contains("libnvrtc.so.13"));
        let nothing = Surroundings { var: &|_| None, folder: "/nonexistent".into(), root: "/nonexistent".into() };
        let e = Nvrtc::search(&nothing).err().unwrap().to_string();
        assert!(e.contains("CUDA_HOME") && e.contains("pip install"), "{e}");
    }

    #[test]
    fn build_ids_are_read_from_elf_files_and_hashed_without_one() {
        // Compilers put a build id into this very program or not; both ways give a stable name.
        let me = std::env::current_exe().unwrap();
        assert_eq!(build_id(&me).unwrap(), build_id(&me).unwrap());
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (dir.path().join("a"), dir.path().join("b"));
        std::fs::write(&a, vec![1; 300_000]).unwrap();
        std::fs::write(&b, vec![1; 300_001]).unwrap();
        assert_ne!(build_id(&a).unwrap(), build_id(&b).unwrap());
        let mut elf = vec![0u8; 200];
        elf[..6].copy_from_slice(b"\x7fELF\x02\x01");
        elf[32] = 64; // program headers
        elf[54] = 56;
        elf[56] = 1;
        elf[64] = 4; // PT_NOTE at 128, 20 bytes
        elf[64 + 8] = 128;
        elf[64 + 32] = 20;
        elf[128..148].copy_from_slice(b"\x04\0\0\0\x04\0\0\0\x03\0\0\0GNU\0\xde\xad\xbe\xef");
        assert_eq!(elf_build_id(&elf), Some(&b"\xde\xad\xbe\xef"[..]));
        elf[136] = 1; // another type of note
        assert_eq!(elf_build_id(&elf), None);
    }
}

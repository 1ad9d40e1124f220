//! NVIDIA's run-time compiler: CUDA C++ to a cubin, in this process, with no toolkit and no GPU.

use super::build_id::build_id;
use super::nvrtc_lib::{Compiled, NvrtcLib, Output};
use super::ptxas_log;
use crate::library_search::Surroundings;
use crate::{Compiler, Error, Result};
use flashtune_cache::{CompilerId, Facts};
use flashtune_codegen::{Language, Source};
use std::ffi::{CStr, CString};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Once};
use std::time::Instant;

/// NVRTC, loaded from a file that was found by itself.
pub struct Nvrtc {
    id: CompilerId,
    path: PathBuf,
    library: NvrtcLib,
    /// Whether it takes [`NO_CACHE`], as far as is known.
    takes_no_cache: AtomicBool,
    warm: Once,
}

/// From CUDA 13 on NVRTC keeps what it compiled in the user's `~/.nv/ComputeCache`, beside a driver, and answers a
/// source that it meets again from there: the same cubin, but without ptxas's log, which alone tells of spills. Older
/// ones have neither the cache nor the option.
const NO_CACHE: &CStr = c"--no-cache";

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
        Ok(Nvrtc { id, path: path.to_owned(), library, takes_no_cache: AtomicBool::new(true), warm: Once::new() })
    }
}

/// Asks ptxas for the log that [`ptxas_log`] reads.
const VERBOSE: &str = "--ptxas-options=-v";

/// What ptxas puts in place of a warpgroup's matrix product whose result it holds to be unused, so that groups are
/// counted as before: `HGMMA.64x8x16.F16 RZ, gdesc[URZ], RZ, !UPT, gsb0` of sm_90a, less its scheduling.
const LEFT_OUT: [u8; 12] = [0xf0, 0x79, 0xff, 0x3f, 0, 0, 0, 0, 0xff, 0, 0, 0x0c];

/// How many products of a cubin ptxas left out. No kernel has one whose result it does not use: ptxas 13.0 and 13.5
/// left two of an experimental one out, whose answers were wrong, and none of 313 kernels of the families.
fn products_left_out(cubin: &[u8]) -> usize {
    cubin.chunks_exact(16).filter(|instruction| instruction.starts_with(&LEFT_OUT)).count()
}

impl Nvrtc {
    /// Compiles past NVRTC's own cache, where it has one.
    fn compile_anew(&self, name: &CStr, text: &CStr, mut options: Vec<CString>, output: Output) -> Compiled {
        if self.takes_no_cache.load(Ordering::Relaxed) {
            options.push(NO_CACHE.to_owned());
            let compiled = self.library.compile(name, text, &options, output);
            if !compiled.invalid_option {
                return compiled;
            }
            options.pop();
        }
        let compiled = self.library.compile(name, text, &options, output);
        // Or another option was the one that it does not know.
        if !compiled.invalid_option {
            self.takes_no_cache.store(false, Ordering::Relaxed);
        }
        compiled
    }

    /// The PTX of a source: what ptxas makes the cubin from.
    ///
    /// # Errors
    /// [`Error::Compile`] with NVRTC's log.
    pub fn ptx(&self, source: &Source) -> Result<String> {
        let refused = |log: String| Error::Compile { compiler: self.id.to_string(), kernel: source.name.clone(), log };
        if source.language != Language::Cuda {
            return Err(refused("the source is C, which has no PTX".to_owned()));
        }
        let c_string =
            |text: &str| CString::new(text).map_err(|e| refused(format!("the source holds a zero byte: {e}")));
        // ptxas has no part in it.
        let options = source.options.iter().filter(|o| !o.starts_with("--ptxas-options"));
        let options = options.map(|o| c_string(&o.replace("--gpu-architecture=sm_", "--gpu-architecture=compute_")));
        let options = options.collect::<Result<Vec<_>>>()?;
        let (name, text) = (c_string(&format!("{}.cu", source.name))?, c_string(&source.text)?);
        let compiled = self.compile_anew(&name, &text, options, Output::Ptx);
        let ptx = compiled.output.map_err(|message| refused(format!("{message}\n{}", compiled.log)))?;
        Ok(String::from_utf8_lossy(&ptx).trim_end_matches('\0').to_owned())
    }

    /// A cubin with what is known of it, and the compiler's log.
    ///
    /// # Errors
    /// [`Error::Compile`] with NVRTC's log.
    pub fn compile_with_log(&self, source: &Source) -> Result<(Vec<u8>, Facts, String)> {
        let refused = |log: String| Error::Compile { compiler: self.id.to_string(), kernel: source.name.clone(), log };
        if source.language != Language::Cuda {
            return Err(refused("the source is C; the system C compiler compiles it".to_owned()));
        }
        let c_string =
            |text: &str| CString::new(text).map_err(|e| refused(format!("the source holds a zero byte: {e}")));
        let name = c_string(&format!("{}.cu", source.name))?;
        let text = c_string(&source.text)?;
        let mut options = source.options.iter().map(|o| c_string(o)).collect::<Result<Vec<_>>>()?;
        // Whoever wrote the source: what it needs is told.
        if !source.options.iter().any(|o| o == VERBOSE) {
            options.push(c_string(VERBOSE)?);
        }
        let start = Instant::now();
        let compiled = self.compile_anew(&name, &text, options, Output::Cubin);
        self.warm.call_once(|| ());
        let log = compiled.log;
        let cubin = compiled.output.map_err(|message| refused(format!("{message}\n{log}")))?;
        if cubin.is_empty() {
            return Err(refused(format!("no cubin: the target must be a real architecture (sm_XX)\n{log}")));
        }
        let left_out = if source.options.iter().any(|o| o.ends_with("sm_90a")) { products_left_out(&cubin) } else { 0 };
        if left_out > 0 {
            return Err(refused(format!(
                "its ptxas left out {left_out} matrix products, without which answers are wrong; take another schedule \
                 (`flashtune tune` finds one), or another NVRTC\n{log}"
            )));
        }
        let compile_ms = start.elapsed().as_secs_f64() * 1e3;
        let facts = ptxas_log::parse(&log).ok_or_else(|| {
            let remedy = "set CUDA_CACHE_DISABLE=1, so that it compiles instead of answering from its own cache";
            refused(format!("its log does not say what registers the kernel has and spills; {remedy}\n{log}"))
        })?;
        let facts = Facts { compile_ms, ..facts };
        if !facts.warnings.is_empty() {
            tracing::debug!(kernel = source.name, warnings = ?facts.warnings, "performance notes of ptxas");
        }
        Ok((cubin, facts, log))
    }
}

impl Compiler for Nvrtc {
    fn id(&self) -> &CompilerId {
        &self.id
    }

    fn compile(&self, source: &Source) -> Result<(Vec<u8>, Facts)> {
        self.compile_with_log(source).map(|(cubin, facts, _)| (cubin, facts))
    }

    fn warm_up(&self) {
        self.warm.call_once(|| {
            let Some(arch) = self.library.archs().last() else { return };
            let options = CString::new(format!("--gpu-architecture=sm_{arch}")).into_iter().collect::<Vec<_>>();
            if let Err(message) = self.compile_anew(c"least.cu", LEAST, options, Output::Cubin).output {
                tracing::debug!(message, "NVRTC refuses the least source");
            }
        });
    }
}

/// What the least compilation needs.
const LEAST: &CStr = c"extern \"C\" __global__ void k(float *x) { *x += 1; }";

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
    fn ptx_is_of_the_virtual_architecture() {
        let Some(nvrtc) = nvrtc() else { return };
        for arch in ["sm_80", "sm_90a"] {
            let ptx = nvrtc.ptx(&source(arch, DOUBLE)).unwrap();
            assert!(ptx.contains(&format!(".target {arch}")) && ptx.contains(".entry k("), "{ptx}");
            assert!(!ptx.contains('\0'));
        }
        let e = nvrtc.ptx(&source("sm_80", "extern \"C\" __global__ void k() { undeclared; }")).unwrap_err();
        assert!(e.to_string().contains("undeclared"), "{e}");
    }

    #[test]
    fn a_source_that_asks_for_no_log_has_facts_too() {
        let Some(nvrtc) = nvrtc() else { return };
        let mut plain = source("sm_90a", DOUBLE);
        plain.options.retain(|o| o != VERBOSE);
        assert_eq!(plain.options.len(), 2);
        assert!(nvrtc.compile(&plain).unwrap().1.registers > 0);
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
    fn a_cubin_without_one_of_its_products_is_refused() {
        let Some(nvrtc) = nvrtc() else { return };
        let product = |result: &str| {
            format!(
                "extern \"C\" __global__ void k(float *a, unsigned long long d) {{\n\
                 float r[4] = {{a[0], a[1], a[2], a[3]}}, none = 0;\n\
                 asm volatile(\"wgmma.fence.sync.aligned;\" ::: \"memory\");\n\
                 asm volatile(\"wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 \"
                 \"{{%0, %1, %2, %3}}, %4, %4, 0, 1, 1, 0, 0;\"\
                 : \"+f\"(r[0]), \"+f\"(r[1]), \"+f\"(r[2]), \"+f\"(r[3]) : \"l\"(d) : \"memory\");\n\
                 asm volatile(\"wgmma.commit_group.sync.aligned;\" ::: \"memory\");\n\
                 asm volatile(\"wgmma.wait_group.sync.aligned 0;\" ::: \"memory\");\n\
                 a[threadIdx.x] = {result};\n}}"
            )
        };
        nvrtc.compile(&source("sm_90a", &product("r[0]"))).unwrap();
        let e = nvrtc.compile(&source("sm_90a", &product("none"))).unwrap_err();
        assert!(e.to_string().contains("left out 1 matrix product"), "{e}");
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
    /// A stand-in for the library, whose source is `testdata/nvrtc.c`.
    fn stand_in(dir: &Path, defines: &[&str]) -> Nvrtc {
        let (source, library) = (dir.join("nvrtc.c"), dir.join("libnvrtc.so.13"));
        std::fs::write(&source, include_str!("../../testdata/nvrtc.c")).unwrap();
        let cc = std::env::var_os("CC").filter(|v| !v.is_empty()).unwrap_or_else(|| "cc".into());
        let built = std::process::Command::new(cc)
            .args(["-shared", "-fPIC", "-o"])
            .args([&library, &source])
            .args(defines.iter().map(|d| format!("-D{d}")))
            .status();
        assert!(built.unwrap().success());
        Nvrtc::open(&library).unwrap()
    }

    #[test]
    fn what_nvrtc_has_cached_is_compiled_again_for_its_log() {
        for version in ["VERSION=12", "VERSION=13"] {
            let dir = tempfile::tempdir().unwrap();
            let nvrtc = stand_in(dir.path(), &[version]);
            nvrtc.warm_up();
            for _ in 0..3 {
                let (_, facts) = nvrtc.compile(&source("sm_90a", DOUBLE)).unwrap();
                assert_eq!((facts.registers, facts.spill_bytes), (40, 12), "{version}");
            }
            // An option that is wrong in any case says nothing about the other.
            let e = nvrtc.compile(&source("sm_12", DOUBLE)).unwrap_err().to_string();
            assert!(e.contains("INVALID_OPTION"), "{e}");
            assert!(nvrtc.compile(&source("sm_90a", DOUBLE)).is_ok());
        }
    }

    #[test]
    fn an_empty_log_is_an_error_and_not_a_kernel_without_spills() {
        let dir = tempfile::tempdir().unwrap();
        let nvrtc = stand_in(dir.path(), &["VERSION=13", "NO_OPTION"]);
        assert_eq!(nvrtc.compile(&source("sm_90a", DOUBLE)).unwrap().1.spill_bytes, 12);
        let e = nvrtc.compile(&source("sm_90a", DOUBLE)).unwrap_err().to_string();
        assert!(e.contains("spills") && e.contains("CUDA_CACHE_DISABLE"), "{e}");
    }
}

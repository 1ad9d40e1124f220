//! Kernels compiled for the host together with the emulated machine, each in a process of its own.

use crate::translate::translate;
use flashtune_cache::Key;
use flashtune_codegen::score::MAX_BIASES;
use flashtune_codegen::{Arch, Kernel, Mask, Schedule, Shape, StageEntry, TemplateSet, TensorMapSpec, Tiling};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::LazyLock;
use tempfile::TempDir;

const FLAGS: &[&str] = &["-std=c++17", "-march=native"];
/// Of kernels, and of the header that each of them starts with.
const KERNEL_FLAGS: &[&str] = &["-O1", "-ftrivial-auto-var-init=pattern", "-w"];
/// Name of a kernel's program in its folder.
const PROGRAM: &str = "kernel";

/// The machine's objects and headers, built once.
static MACHINE: LazyLock<Result<Machine, String>> = LazyLock::new(Machine::build);

struct Machine {
    compiler: String,
    folder: PathBuf,
    objects: Vec<PathBuf>,
    fingerprint: String,
}

impl Machine {
    fn build() -> Result<Self, String> {
        let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/emulator/machine");
        let text = |e: std::io::Error| format!("{}: {e}", sources.display());
        let mut files = BTreeMap::new();
        for entry in std::fs::read_dir(&sources).map_err(text)? {
            let path = entry.map_err(text)?.path();
            let name = path.file_name().expect("a file").to_owned();
            files.insert(name, std::fs::read(path).map_err(text)?);
        }
        // Everything is compiled from a copy: who edits the machine while tests run does not disturb them.
        let fingerprint = fingerprint_of(&files);
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("emulator-{fingerprint}"));
        std::fs::create_dir_all(&folder).map_err(text)?;
        for (name, content) in &files {
            std::fs::write(folder.join(name), content).map_err(text)?;
        }
        let is_source = |name: &&OsString| Path::new(name).extension().is_some_and(|e| e == "cpp");
        let sources: Vec<PathBuf> = files.keys().filter(is_source).map(|name| folder.join(name)).collect();
        let objects: Vec<PathBuf> = sources.iter().map(|source| source.with_extension("o")).collect();
        // All at once: every test waits for them.
        let mut commands: Vec<(Command, &Path)> = Vec::new();
        // The compiler takes the parsed header in place of the text, which is a sixth of its time.
        let (header, parsed) = (folder.join("cuda.h"), folder.join("cuda.h.gch"));
        let mut command = Command::new(&compiler);
        command.args(FLAGS).args(KERNEL_FLAGS).args(["-x", "c++-header"]).arg(header);
        commands.push((command, &parsed));
        for (source, object) in sources.iter().zip(&objects) {
            let mut command = Command::new(&compiler);
            command.args(FLAGS).args(["-O3", "-c"]).arg(source);
            commands.push((command, object));
        }
        std::thread::scope(|scope| {
            let compile_all = |(mut command, output): (Command, _)| scope.spawn(move || compile(&mut command, output));
            let running: Vec<_> = commands.into_iter().map(compile_all).collect();
            running.into_iter().try_for_each(|one| one.join().expect("no panic"))
        })?;
        Ok(Self { compiler, folder, objects, fingerprint })
    }
}

/// Of all of the machine: its own text, how kernels are translated for it, and how they are compiled.
fn fingerprint_of(files: &BTreeMap<OsString, Vec<u8>>) -> String {
    let mut all = [include_str!("translate.rs"), &FLAGS.join(" "), &KERNEL_FLAGS.join(" ")].join("\n").into_bytes();
    for (name, content) in files {
        all.extend(format!("\n{} {}\n", name.display(), content.len()).into_bytes());
        all.extend(content);
    }
    Key::of(&all).to_string()[..16].to_owned()
}

/// What the machine is, as 16 hex digits.
pub fn fingerprint() -> &'static str {
    MACHINE.as_ref().map_or("none", |machine| &machine.fingerprint)
}

fn compile(command: &mut Command, output: &Path) -> Result<(), String> {
    // Another test process may be using the last one.
    let unfinished = output.with_extension(format!("{}.part", std::process::id()));
    let result = command.arg("-o").arg(&unfinished).output().map_err(|e| format!("{command:?}: {e}"))?;
    if !result.status.success() {
        let text = String::from_utf8_lossy(&result.stderr);
        return Err(format!("{command:?}: {}", text.lines().take(30).collect::<Vec<_>>().join("\n")));
    }
    std::fs::rename(unfinished, output).map_err(|e| e.to_string())
}

/// Whether this host has a C++ compiler; a failure where CI must have it.
pub fn has_compiler() -> bool {
    match &*MACHINE {
        Ok(_) => true,
        Err(e) if std::env::var("CI").is_ok_and(|v| v == "true") => panic!("the emulated machine: {e}"),
        Err(e) => {
            println!("skipped: {e}");
            false
        }
    }
}

/// Memory of the device.
pub struct Buffer<'a> {
    pub address: u64,
    pub bytes: &'a mut [u8],
    pub written: bool,
}

/// What one launch needs beyond the buffers.
pub struct Launch {
    pub seed: u64,
    /// Which of the stages that run one after the other: 0 where there is one alone.
    pub stage: u32,
    /// Thread blocks of the kernels that come before it, and where what they find goes.
    pub prelude: ([u32; 2], [u64; 2]),
    pub grid: u32,
    pub threads: u32,
    pub smem_bytes: u32,
    /// The operation's argument struct.
    pub args: Vec<u8>,
    /// Thread blocks come in any order, and not in that of their numbers.
    pub any_order: bool,
    /// Inputs are written by the launch before: until a block has waited for it, it finds something else there.
    pub late: bool,
    /// What kernels of `forward/sm90` take besides.
    pub hopper: Option<Hopper>,
    /// Tables of what a score program reads, as they lie behind the arguments.
    pub side: Vec<u8>,
}

/// Tensor maps, how tiles are numbered, and the counter of the queue or -1.
pub struct Hopper {
    pub maps: [TensorMapSpec; 4],
    pub biases: [Option<TensorMapSpec>; MAX_BIASES],
    pub tiling: Tiling,
    pub queue: i32,
}

/// A kernel on the emulated machine.
pub struct Emulated {
    folder: TempDir,
    process: Option<Child>,
}

impl Emulated {
    pub fn build(kernel: &Kernel, templates: &TemplateSet) -> Result<Self, String> {
        let machine = MACHINE.as_ref().map_err(Clone::clone)?;
        let source = kernel.render(templates).map_err(|e| e.to_string())?;
        // What the source says of itself, and what only the host's model knows.
        let (rename, shared_bytes) = match kernel.schedule {
            Schedule::Sm90(_) | Schedule::Sm90Ragged(_) | Schedule::Sm90Fp8(_) | Schedule::Sm90Fp8Ragged(_) => {
                ("", "Layout::kBytes".to_owned())
            }
            Schedule::BackwardSm90(_) => ("", String::new()),
            Schedule::Naive(_) => ("", kernel.resources().smem_bytes.to_string()),
            _ => ("#define smem shared_memory\n", kernel.resources().smem_bytes.to_string()),
        };
        // The one whose shared memory is of floats.
        let text = source.text.replace("extern __shared__ float smem[];", "float* const smem = (float*)shared_memory;");
        let cuda_arch = match kernel.arch {
            Arch::Sm(sm) => 10 * sm.number,
            Arch::Cpu(_) => return Err("the machine is no host processor".into()),
        };
        let plan = kernel.plan(&ONE).map_err(|e| e.to_string())?;
        let call = |entry: &StageEntry| {
            let threads = plan.stages().find(|s| s.entry == *entry).map_or(0, |s| s.threads);
            format!("EMULATED_FIRST({}{}, arguments, {threads})", source.entry, entry.suffix)
        };
        let before = kernel.entries().iter().filter(|e| **e != StageEntry::MAIN);
        let before = before.map(call).collect::<Vec<_>>().join(", ");
        let stages = match stages(kernel, &source.entry)? {
            Some(stages) => format!("ptx::Kernel ptx::kernels[] = {{{stages}}};"),
            None => format!(
                "#define EMULATED_BEFORE(arguments) {before}\nEMULATED_KERNEL({}, KernelArgs, {shared_bytes}, {})",
                source.entry,
                kernel.schedule.blocks_per_sm(),
            ),
        };
        let text = format!(
            "#include \"cuda.h\"\n#define __CUDA_ARCH__ {cuda_arch}\n{rename}{}\n{stages}\n",
            translate(&text)?,
        );
        let folder = tempfile::tempdir().map_err(|e| e.to_string())?;
        let file = folder.path().join("kernel.cpp");
        std::fs::write(&file, text).map_err(|e| e.to_string())?;
        let mut command = Command::new(&machine.compiler);
        command.args(FLAGS).args(KERNEL_FLAGS).arg("-I").arg(&machine.folder).arg(&file);
        command.args(&machine.objects);
        compile(&mut command, &folder.path().join(PROGRAM))?;
        Ok(Self { folder, process: None })
    }

    /// Runs a launch. Written buffers are changed only if it ends well.
    pub fn run(&mut self, launch: &Launch, buffers: &mut [Buffer]) -> Result<(), String> {
        let outcome = self.talk(launch, buffers);
        outcome.unwrap_or_else(|e| {
            let status = self.process.take().map(|mut child| child.wait());
            Err(format!("the emulated machine broke down: {e}; {status:?}"))
        })
    }

    fn talk(&mut self, launch: &Launch, buffers: &mut [Buffer]) -> std::io::Result<Result<(), String>> {
        if self.process.is_none() {
            let child =
                Command::new(self.folder.path().join(PROGRAM)).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
            self.process = Some(child);
        }
        let child = self.process.as_mut().expect("just started");
        let mut request = Vec::new();
        request.extend(launch.seed.to_ne_bytes());
        let [first, second] = launch.prelude.0;
        let flags = [launch.any_order.into(), launch.late.into()];
        for word in [launch.stage, first, second, flags[0], flags[1], launch.grid, launch.threads, launch.smem_bytes] {
            request.extend(word.to_ne_bytes());
        }
        let args = arguments(launch);
        request.extend((args.len() as u32).to_ne_bytes());
        request.extend(args);
        request.extend((buffers.len() as u32).to_ne_bytes());
        for buffer in buffers.iter() {
            request.extend(buffer.address.to_ne_bytes());
            request.extend((buffer.bytes.len() as u64).to_ne_bytes());
            request.extend(u32::from(buffer.written).to_ne_bytes());
            request.extend_from_slice(buffer.bytes);
        }
        let input = child.stdin.as_mut().expect("piped");
        input.write_all(&request)?;
        input.flush()?;
        let output = child.stdout.as_mut().expect("piped");
        let mut length = [0; 4];
        output.read_exact(&mut length)?;
        let mut text = vec![0; u32::from_ne_bytes(length) as usize];
        output.read_exact(&mut text)?;
        if !text.is_empty() {
            return Ok(Err(String::from_utf8_lossy(&text).into_owned()));
        }
        for buffer in buffers.iter_mut().filter(|b| b.written) {
            output.read_exact(buffer.bytes)?;
        }
        Ok(Ok(()))
    }
}

impl Drop for Emulated {
    fn drop(&mut self) {
        if let Some(mut child) = self.process.take() {
            drop(child.stdin.take());
            let _ = child.wait();
        }
    }
}

/// The least call there is: the stages of a launch have the same threads whatever the sizes are.
const ONE: Shape = Shape { batch: 1, heads: 1, kv_heads: 1, q_len: 1, kv_len: 1, mask: Mask::Full };

/// The stages of a kernel that runs in waves.
fn stages(kernel: &Kernel, entry: &str) -> Result<Option<String>, String> {
    let plan = kernel.plan(&ONE).map_err(|e| e.to_string())?;
    let stage = |s: &flashtune_codegen::Stage| {
        format!("EMULATED_STAGE({entry}{}, KernelArgs, {}, {})", s.entry.suffix, s.threads, s.smem_bytes)
    };
    Ok(plan.waves.is_some().then(|| plan.stages().map(stage).collect()))
}

/// A tensor map as the machine has it.
pub fn map_bytes(map: &TensorMapSpec) -> Vec<u8> {
    let mut bytes = b"tnsormap".to_vec();
    bytes.extend(map.address.to_ne_bytes());
    bytes.extend((map.rank as u64).to_ne_bytes());
    bytes.extend(map.dims.iter().flat_map(|&d| (d as u32).to_ne_bytes()));
    bytes.extend(map.tile.iter().flat_map(|d| d.to_ne_bytes()));
    bytes.extend(map.strides.iter().flat_map(|s| s.to_ne_bytes()));
    bytes.extend((map.dtype.bytes() as u64).to_ne_bytes());
    bytes.extend([0; 24]);
    bytes
}

/// `KernelArgs` of the template, with the machine's own tensor maps.
fn arguments(launch: &Launch) -> Vec<u8> {
    let mut bytes = Vec::new();
    let Some(Hopper { maps, biases, tiling, queue }) = &launch.hopper else {
        bytes.extend_from_slice(&launch.args);
        bytes.extend_from_slice(&launch.side);
        return bytes;
    };
    for map in maps.iter().map(Some).chain(biases.iter().map(Option::as_ref)) {
        let Some(map) = map else {
            bytes.extend([0; 128]);
            continue;
        };
        bytes.extend(map_bytes(map));
    }
    bytes.extend_from_slice(&launch.args);
    let Tiling { group_shift, unit_heads, blocks, leading, section, tiles } = *tiling;
    let mapped = (biases.iter().enumerate()).fold(0, |mapped, (nth, bias)| mapped | i32::from(bias.is_some()) << nth);
    let numbers = [group_shift, unit_heads, blocks, leading, section, tiles, *queue, mapped];
    bytes.extend(numbers.into_iter().flat_map(i32::to_ne_bytes));
    bytes.extend(launch.prelude.1.into_iter().flat_map(u64::to_ne_bytes));
    bytes.resize(bytes.len().next_multiple_of(64), 0);
    bytes.extend_from_slice(&launch.side);
    bytes.resize(bytes.len().next_multiple_of(64), 0);
    bytes
}

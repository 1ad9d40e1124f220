//! `flashtune debug`: everything about one kernel in a folder, for whoever looks into it.

use super::context::Context;
use super::emit::Selected;
use super::exit::usage;
use super::machine;
use anyhow::{Context as _, Result};
use flashtune_codegen::{Arch, Kernel, Language, Source};
use flashtune_runtime::compile::{Nvrtc, compiler_for};
use serde_json::json;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};

/// Options of `debug`.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// The folder to write to; must be empty, or not be there yet
    #[arg(value_name = "DIR")]
    folder: PathBuf,
    #[command(flatten)]
    selected: Selected,
    /// Compile with line numbers, for nvdisasm, ncu and compute-sanitizer; of CUDA kernels
    #[arg(long)]
    lineinfo: bool,
}

pub(crate) fn run(cx: &mut Context, args: Args) -> Result<()> {
    let (kernel, _) = args.selected.kernel(cx)?;
    let cuda = matches!(kernel.arch, Arch::Sm(_));
    if args.lineinfo && !cuda {
        return Err(usage("--lineinfo: kernels of the cpu have none; name a GPU by --arch"));
    }
    let mut kept = Kept::new(&args.folder)?;
    let mut source = kernel.render(&*cx.templates()?)?;
    let file = if source.language == Language::Cuda { "kernel.cu" } else { "kernel.c" };
    kept.write(file, source.text.as_bytes())?;
    if args.lineinfo {
        source.options.push("-lineinfo".to_owned());
        // Tools look for the source where the compiler was told that it is.
        let path = kept.folder.join("kernel");
        source.name = path.to_str().with_context(|| format!("{} is not UTF-8", path.display()))?.to_owned();
    }
    let outcome = compile(&kernel, &source, &mut kept, args.lineinfo);
    if let Err(e) = &outcome {
        kept.write("compiler.log", format!("{e:#}\n").as_bytes())?;
    }
    kept.write("README.txt", about(&kernel, &source, outcome.as_ref().ok().map(String::as_str)).as_bytes())?;
    if cx.json() {
        let failed = outcome.as_ref().err().map(|e| format!("{e:#}"));
        cx.print_json(&json!({
            "kernel": kernel.name(), "entry": source.entry, "folder": kept.folder, "files": kept.files, "error": failed,
        }))?;
    } else {
        writeln!(cx.out, "{}", kernel.name())?;
        for file in &kept.files {
            writeln!(cx.out, "  {}", kept.folder.join(file).display())?;
        }
    }
    outcome.map(drop)
}

/// The folder, and the files that are in it by now.
struct Kept {
    folder: PathBuf,
    files: Vec<String>,
}

impl Kept {
    fn new(folder: &Path) -> Result<Self> {
        std::fs::create_dir_all(folder).with_context(|| format!("cannot make the folder {}", folder.display()))?;
        let mut entries = folder.read_dir().with_context(|| format!("cannot read the folder {}", folder.display()))?;
        if entries.next().is_some() {
            return Err(usage(format!("{} is not empty; name a folder that is not there yet", folder.display())));
        }
        let folder = folder.canonicalize().with_context(|| format!("cannot find {}", folder.display()))?;
        Ok(Self { folder, files: Vec::new() })
    }

    fn write(&mut self, file: &str, bytes: &[u8]) -> Result<()> {
        let path = self.folder.join(file);
        std::fs::write(&path, bytes).with_context(|| format!("cannot write {}", path.display()))?;
        self.files.push(file.to_owned());
        Ok(())
    }
}

/// Compiles, and keeps what comes of it. Returns a note about what could not be had beside.
fn compile(kernel: &Kernel, source: &Source, kept: &mut Kept, lineinfo: bool) -> Result<String> {
    let binary = if let Arch::Sm(_) = kernel.arch {
        let nvrtc = Nvrtc::find()?;
        // The PTX first: it is there also where ptxas refuses it.
        kept.write("kernel.ptx", nvrtc.ptx(source)?.as_bytes())?;
        let (cubin, _, log) = nvrtc.compile_with_log(source)?;
        kept.write("compiler.log", log.as_bytes())?;
        kept.write("kernel.cubin", &cubin)?;
        "kernel.cubin"
    } else {
        let (library, _) = compiler_for(kernel.arch)?.compile(source)?;
        kept.write("kernel.so", &library)?;
        "kernel.so"
    };
    let options: &[&str] = if lineinfo { &["--print-line-info"] } else { &[] };
    match machine::disassembled(kernel.arch, &kept.folder.join(binary), options) {
        Ok(listing) => {
            kept.write(if binary == "kernel.so" { "kernel.s" } else { "kernel.sass" }, &listing)?;
            Ok(String::new())
        }
        Err(e) => Ok(format!("no machine code as text: {e:#}\n")),
    }
}

/// What it is, and how to go on.
fn about(kernel: &Kernel, source: &Source, note: Option<&str>) -> String {
    let mut text = format!("{}\n\n", kernel.name());
    let mut line = |what: &str, value: &str| writeln!(text, "{what:<10} {value}").expect("a string");
    line("problem", &kernel.problem.to_string());
    line("family", kernel.schedule.family().name());
    line("schedule", &kernel.schedule.to_string());
    line("arch", &kernel.arch.to_string());
    line("entry", &source.entry);
    line("options", &source.options.join(" "));
    if let Some(program) = kernel.problem.program {
        line("program", &program.to_string());
    }
    if let Ok(estimate) = serde_json::to_string(&kernel.resources()) {
        line("estimate", &estimate);
    }
    text.push('\n');
    match note {
        Some(note) => text.push_str(note),
        None => text.push_str("It does not compile: compiler.log says why.\n"),
    }
    let (family, problem) = (kernel.schedule.family().name(), kernel.problem);
    text.push_str("To compare it with the reference on a device, and to do so under a sanitizer:\n\n");
    for tool in ["", "compute-sanitizer --tool racecheck "] {
        text.push_str(&format!("  {tool}flashtune check --family {family} --problem {problem}\n"));
    }
    text
}

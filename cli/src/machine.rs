//! What `emit` shows beyond the source: PTX, machine code and what a kernel takes.

use super::context::Context;
use super::exit::usage;
use anyhow::{Context as _, Result, bail};
use flashtune_cache::Artifact;
use flashtune_codegen::{Arch, Kernel, Language, Source};
use flashtune_runtime::Error;
use flashtune_runtime::compile::{Nvrtc, compile};
use serde_json::json;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Prints the PTX of a CUDA kernel.
pub(crate) fn ptx(cx: &mut Context, source: &Source) -> Result<()> {
    if source.language != Language::Cuda {
        return Err(usage("--ptx: kernels of the cpu have none; name a GPU by --arch, or take --sass"));
    }
    let ptx = Nvrtc::find()?.ptx(source)?;
    if cx.json() {
        return cx.print_json(&json!({ "kernel": source.name, "entry": source.entry, "ptx": ptx }));
    }
    cx.out.write_all(ptx.as_bytes())?;
    Ok(())
}

/// Compiles a kernel and prints its machine code, as the toolkit's disassembler or the system's one reads it.
pub(crate) fn sass(cx: &mut Context, kernel: &Kernel) -> Result<()> {
    let (artifact, binary) = (compiled(cx, kernel)?, tempfile::NamedTempFile::new()?);
    std::fs::write(binary.path(), &artifact.bytes)?;
    let listing = disassembled(kernel.arch, binary.path(), &[])?;
    if cx.json() {
        let text = String::from_utf8_lossy(&listing);
        return cx.print_json(&json!({ "kernel": kernel.name(), "entry": artifact.entry, "machine_code": text }));
    }
    cx.out.write_all(&listing)?;
    Ok(())
}

/// The machine code of a compiled kernel as text; `options` are the disassembler's own.
pub(crate) fn disassembled(arch: Arch, binary: &Path, options: &[&str]) -> Result<Vec<u8>> {
    let (mut command, name, searched, remedy) = match arch {
        Arch::Sm(_) => (
            Command::new(toolkit("nvdisasm")),
            "nvdisasm",
            "CUDA_HOME, PATH, beside NVRTC",
            "pip install nvidia-cuda-nvdisasm nvidia-cuda-nvrtc, put the CUDA toolkit's on PATH, or set CUDA_HOME",
        ),
        Arch::Cpu(_) => {
            let mut objdump = Command::new("objdump");
            objdump.args(["--disassemble", "--no-show-raw-insn"]);
            (objdump, "objdump", "PATH", "install binutils")
        }
    };
    let output = match command.args(options).arg(binary).output() {
        Ok(output) => output,
        Err(e) if e.kind() == ErrorKind::NotFound => {
            return Err(Error::Missing { what: name, searched: searched.to_owned(), remedy }.into());
        }
        Err(e) => return Err(e).with_context(|| format!("cannot start {name}")),
    };
    if !output.status.success() {
        bail!("{name} ended with {}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim_end());
    }
    Ok(output.stdout)
}

/// A program of the CUDA toolkit: that of CUDA_HOME, else what PATH has, else that of the toolkit or of the Python
/// environment that NVRTC is of.
fn toolkit(program: &str) -> PathBuf {
    let variable = |name| std::env::var_os(name).unwrap_or_default();
    let home = PathBuf::from(variable("CUDA_HOME")).join("bin");
    let path = variable("PATH");
    let library = Nvrtc::find().map(|nvrtc| nvrtc.path().to_owned()).unwrap_or_default();
    // lib, lib64 or targets/ARCH/lib of a toolkit, lib of a wheel.
    let beside = library.ancestors().skip(2).take(3).map(|folder| folder.join("bin"));
    let folders = std::iter::once(home).chain(std::env::split_paths(&path)).chain(beside);
    let absolute = folders.filter(|folder| folder.is_absolute());
    absolute.map(|folder| folder.join(program)).find(|file| file.is_file()).unwrap_or_else(|| program.into())
}

/// Compiles a kernel and prints what it takes, beside what was estimated of it.
pub(crate) fn resources(cx: &mut Context, kernel: &Kernel) -> Result<()> {
    let Artifact { facts, bytes, entry, .. } = compiled(cx, kernel)?;
    let estimate = kernel.resources();
    if cx.json() {
        return cx.print_json(&json!({
            "kernel": kernel.name(), "entry": entry, "arch": kernel.arch.to_string(), "model": estimate,
            "registers": facts.registers, "spill_bytes": facts.spill_bytes, "stack_bytes": facts.stack_bytes,
            "static_smem_bytes": facts.static_smem_bytes, "binary_bytes": bytes.len(), "compile_ms": facts.compile_ms,
            "warnings": facts.warnings,
        }));
    }
    writeln!(cx.out, "{}", kernel.name())?;
    let mut line = |what: &str, value: String| writeln!(cx.out, "  {what:<22} {value}");
    if matches!(kernel.arch, Arch::Sm(_)) {
        line("threads of a block", estimate.threads.to_string())?;
        line("registers of a thread", format!("{}, {} at least by estimate", facts.registers, estimate.registers))?;
        line("spilled", format!("{} bytes", facts.spill_bytes))?;
        line("stack of a thread", format!("{} bytes", facts.stack_bytes))?;
        line("shared memory", format!("{} bytes dynamic, {} static", estimate.smem_bytes, facts.static_smem_bytes))?;
    }
    line("binary", format!("{} bytes", bytes.len()))?;
    line("compiled in", format!("{:.0} ms", facts.compile_ms))?;
    for warning in &facts.warnings {
        line("note of the compiler", warning.clone())?;
    }
    Ok(())
}

fn compiled(cx: &mut Context, kernel: &Kernel) -> Result<Artifact> {
    Ok(compile(kernel, &*cx.templates()?)?)
}

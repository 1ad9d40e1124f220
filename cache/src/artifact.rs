//! Compiled kernels with the recipe that made them.

use crate::{CompilerId, Key};
use flashtune_codegen::Kernel;
use flashtune_codegen::abi::ArgsLayout;
use serde::{Deserialize, Serialize};

/// Everything that determines a compiled kernel: the validity fields of its key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// Problem, schedule and arch.
    pub kernel: Kernel,
    /// Hash of the family's templates ([`flashtune_codegen::TemplateSet::hash_of`]).
    pub templates: String,
    /// Compiler options.
    #[serde(default, skip_serializing_if = "flashtune_codegen::omitted::is_default")]
    pub options: Vec<String>,
    /// The compiler.
    pub compiler: CompilerId,
    /// [`flashtune_codegen::abi::ABI_VERSION`] at the time.
    pub abi: u32,
}

impl Recipe {
    /// The key: same recipe, same key, same bytes.
    pub fn key(&self) -> Key {
        Key::of_value("flashtune recipe 1", self)
    }
}

/// A compiled kernel: a cubin, or a shared object for `cpu`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Artifact {
    /// What it was made from.
    pub recipe: Recipe,
    /// The symbol to launch.
    pub entry: String,
    /// The argument that it takes: no part of the key, since a build whose argument has grown can still launch it.
    pub args: ArgsLayout,
    /// What the compiler reported.
    pub facts: Facts,
    /// The binary: as one piece, since element by element takes 40 times as long and gives the same encoding.
    #[serde(with = "serde_bytes")]
    pub bytes: Vec<u8>,
}

/// Resource facts read from the compiler's log.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Facts {
    /// Registers of one thread (0 on `cpu`).
    #[serde(default, skip_serializing_if = "flashtune_codegen::omitted::is_default")]
    pub registers: u32,
    /// Bytes of registers spilled to local memory, stores plus loads.
    #[serde(default, skip_serializing_if = "flashtune_codegen::omitted::is_default")]
    pub spill_bytes: u32,
    /// Stack frame of one thread in bytes.
    #[serde(default, skip_serializing_if = "flashtune_codegen::omitted::is_default")]
    pub stack_bytes: u32,
    /// Static shared memory in bytes.
    #[serde(default, skip_serializing_if = "flashtune_codegen::omitted::is_default")]
    pub static_smem_bytes: u32,
    /// Wall time of the compilation in milliseconds, known to the process that compiled: it is not kept, so that equal
    /// recipes give equal bytes.
    #[serde(skip)]
    pub compile_ms: f64,
    /// Performance notes of the compiler that make a kernel unfit (C7508, C7512, ...), verbatim.
    #[serde(default, skip_serializing_if = "flashtune_codegen::omitted::is_default")]
    pub warnings: Vec<String>,
}

impl Eq for Facts {}

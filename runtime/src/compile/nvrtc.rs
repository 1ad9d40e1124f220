//! NVRTC.
use crate::{Compiler, Result};
use flashtune_cache::{CompilerId, Facts};
use flashtune_codegen::Source;
use std::path::Path;
use std::sync::Arc;

/// NVIDIA's run-time compiler.
pub struct Nvrtc {
    id: CompilerId,
}

impl Nvrtc {
    /// Finds and loads the library; the answer is kept for the process.
    pub fn find() -> Result<Arc<Nvrtc>> {
        todo!()
    }
    /// The file that was loaded.
    pub fn path(&self) -> &Path {
        todo!()
    }
    /// Compute capabilities times ten that the library compiles for.
    pub fn supported_archs(&self) -> &[u16] {
        todo!()
    }
}
impl Compiler for Nvrtc {
    fn id(&self) -> &CompilerId {
        &self.id
    }
    fn compile(&self, _source: &Source) -> Result<(Vec<u8>, Facts)> {
        todo!()
    }
}

//! The system C compiler.
use crate::{Compiler, Result};
use flashtune_cache::{CompilerId, Facts};
use flashtune_codegen::Source;
use std::path::Path;
use std::sync::Arc;

/// The system C compiler: `$CC`, or the first of cc, gcc, clang.
pub struct Cc {
    id: CompilerId,
}

impl Cc {
    /// Finds the compiler; the answer is kept for the process as long as `CC` does not change.
    pub fn find() -> Result<Arc<Cc>> {
        todo!()
    }
    /// The command that is run.
    pub fn command(&self) -> &Path {
        todo!()
    }
}
impl Compiler for Cc {
    fn id(&self) -> &CompilerId {
        &self.id
    }
    fn compile(&self, _source: &Source) -> Result<(Vec<u8>, Facts)> {
        todo!()
    }
}

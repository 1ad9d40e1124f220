//! Compilers in processes of their own: one that crashes or never ends costs the schedule that it was given.

use super::{Limits, Loss, Process, Reply, Request, WorkerCommand};
use flashtune_cache::{CompilerId, Facts};
use flashtune_codegen::Source;
use flashtune_runtime::{Compiler, Error, Result};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// No schedule is worth a longer compilation.
const LIMIT: Duration = Duration::from_secs(120);

/// As many processes as threads ask at the same time, started when they are needed and kept.
pub(crate) struct Compilers {
    command: WorkerCommand,
    /// The compiler, found in this process to know its identity; it compiles elsewhere.
    compiler: Arc<dyn Compiler>,
    idle: Mutex<Vec<Process>>,
}

impl Compilers {
    pub fn new(command: &WorkerCommand, compiler: Arc<dyn Compiler>) -> Self {
        Self { command: command.clone(), compiler, idle: Mutex::default() }
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, Vec<Process>> {
        self.idle.lock().unwrap_or_else(|e| e.into_inner())
    }
}

impl Compiler for Compilers {
    fn id(&self) -> &CompilerId {
        self.compiler.id()
    }

    fn compile(&self, source: &Source) -> Result<(Vec<u8>, Facts)> {
        let refused =
            |log: String| Error::Compile { compiler: self.id().to_string(), kernel: source.name.clone(), log };
        let waiting = self.idle().pop();
        let mut process = match waiting {
            Some(process) => process,
            None => Process::start(&self.command).map_err(|e| refused(format!("its process cannot start: {e}")))?,
        };
        let reply = process.ask(&Request::Compile(source.clone()), Limits { launch: LIMIT, host: LIMIT });
        if reply.is_ok() {
            self.idle().push(process);
        }
        match reply {
            Ok(Reply::Compiled { compiler, bytes, facts }) if compiler == *self.id() => Ok((bytes, facts)),
            Ok(Reply::Compiled { compiler, .. }) => {
                Err(refused(format!("the worker has {compiler}; give both processes the same environment")))
            }
            Ok(Reply::Refused(log) | Reply::Unable { message: log, .. }) => Err(refused(log)),
            Ok(other) => Err(refused(format!("the worker answered {other:?}"))),
            Err(Loss::Died(how)) => Err(refused(format!("the compiler did not come back: {how}"))),
            Err(Loss::Hung(limit)) => Err(refused(format!("the compiler took more than {limit:?}"))),
        }
    }
}

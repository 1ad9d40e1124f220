//! Compilers in processes of their own: one that crashes or never ends costs the schedule that it was given.

use super::{Loss, Process, Reply, Request, WorkerCommand};
use flashtune_cache::{CompilerId, Facts};
use flashtune_codegen::Source;
use flashtune_runtime::{Compiler, Error, Result};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// What the first compilation may take: nothing is known yet of this machine and its load.
const FIRST_LIMIT: Duration = Duration::from_secs(60);
/// Later ones may take so many times as long as the slowest that came back, and at least the shortest limit: then they
/// are taken for endless. Sizes of kernels differ by a few times, and so does the load.
const TIMES_SLOWEST: u32 = 6;
const SHORTEST_LIMIT: Duration = Duration::from_secs(5);
/// How often a compilation is begun whose process dies.
const ATTEMPTS: usize = 3;
/// How the reason of one that took too long begins.
pub(crate) const TOOK_TOO_LONG: &str = "the compiler took more than";

/// As many processes as threads ask at the same time, started when they are needed and kept.
pub(crate) struct Compilers {
    command: WorkerCommand,
    /// The compiler, found in this process to know its identity; it compiles elsewhere.
    compiler: Arc<dyn Compiler>,
    idle: Mutex<Vec<Process>>,
    /// The slowest compilation that came back.
    slowest: Mutex<Option<Duration>>,
}

impl Compilers {
    pub fn new(command: &WorkerCommand, compiler: Arc<dyn Compiler>) -> Self {
        Self { command: command.clone(), compiler, idle: Mutex::default(), slowest: Mutex::default() }
    }

    /// How long the next compilation may take.
    fn limit(&self) -> Duration {
        match *self.slowest.lock().unwrap_or_else(|e| e.into_inner()) {
            None => FIRST_LIMIT,
            Some(slowest) => (slowest * TIMES_SLOWEST).clamp(SHORTEST_LIMIT, FIRST_LIMIT),
        }
    }

    fn note(&self, taken: Duration) {
        let mut slowest = self.slowest.lock().unwrap_or_else(|e| e.into_inner());
        *slowest = Some(slowest.map_or(taken, |s| s.max(taken)));
    }

    /// One compilation, in a process that waits for work or in a new one.
    fn ask(&self, source: &Source) -> std::io::Result<Result<Reply, Loss>> {
        let waiting = self.idle().pop();
        let mut process = match waiting {
            Some(process) => process,
            None => Process::start(&self.command)?,
        };
        let (limit, start) = (self.limit(), Instant::now());
        let reply = process.ask_within(&Request::Compile(source.clone()), limit);
        if reply.is_ok() {
            self.idle().push(process);
        }
        if matches!(reply, Ok(Reply::Compiled { .. })) {
            self.note(start.elapsed());
        }
        Ok(reply)
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
        let mut reply = self.ask(source);
        // Somebody may have killed the process for reasons that are not the source's, as a system that is short of memory
        // does. To hang again would cost too much.
        for _ in 1..ATTEMPTS {
            if matches!(reply, Ok(Err(Loss::Died(_)))) {
                reply = self.ask(source);
            }
        }
        match reply.map_err(|e| refused(format!("its process cannot start: {e}")))? {
            Ok(Reply::Compiled { compiler, bytes, facts }) if compiler == *self.id() => Ok((bytes, facts)),
            Ok(Reply::Compiled { compiler, .. }) => {
                Err(refused(format!("the worker has {compiler}; give both processes the same environment")))
            }
            Ok(Reply::Refused(log) | Reply::Unable { message: log, .. }) => Err(refused(log)),
            Ok(other) => Err(refused(format!("the worker answered {other:?}"))),
            Err(Loss::Died(how)) => Err(refused(format!("the compiler did not come back: {how}"))),
            Err(Loss::Hung(limit)) => {
                Err(refused(format!("{TOOK_TOO_LONG} {:.1} s and was stopped", limit.as_secs_f64())))
            }
        }
    }
}

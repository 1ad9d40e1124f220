//! Compilers in processes of their own: one that crashes or never ends costs the schedule that it was given.

use super::{Loss, Process, Reply, Request, WorkerCommand};
use flashtune_cache::{CompilerId, Facts};
use flashtune_codegen::Source;
use flashtune_runtime::{Compiler, Error, Result};
use rustix::process::{Signal, pidfd_send_signal};
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard};
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
    /// Those that compile at the moment, by the numbers of their processes.
    busy: Mutex<HashMap<u32, OwnedFd>>,
    /// For how long all of them were made to stand still, and since when they are now.
    stood_still: Mutex<(Duration, Option<Instant>)>,
}

/// No compiler runs while this is there, and none begins.
pub(crate) struct Stillness<'a> {
    compilers: &'a Compilers,
    busy: MutexGuard<'a, HashMap<u32, OwnedFd>>,
}

/// Those that have ended meanwhile hear of it no more.
fn signal(processes: &HashMap<u32, OwnedFd>, signal: Signal) {
    for process in processes.values() {
        let _ = pidfd_send_signal(process, signal);
    }
}

impl Drop for Stillness<'_> {
    fn drop(&mut self) {
        signal(&self.busy, Signal::CONT);
        let mut stood = self.compilers.stood_still.lock().unwrap_or_else(|e| e.into_inner());
        *stood = (stood.0 + stood.1.map_or(Duration::ZERO, |since| since.elapsed()), None);
    }
}

impl Compilers {
    pub(crate) fn new(command: &WorkerCommand, compiler: Arc<dyn Compiler>) -> Self {
        Self {
            command: command.clone(),
            compiler,
            idle: Mutex::default(),
            slowest: Mutex::default(),
            busy: Mutex::default(),
            stood_still: Mutex::default(),
        }
    }

    /// Makes compilers stand still, for a candidate that must have the host for itself. One that dies with the tuner
    /// dies standing, too.
    pub(crate) fn still(&self) -> Stillness<'_> {
        let busy = self.busy.lock().unwrap_or_else(|e| e.into_inner());
        self.stood_still.lock().unwrap_or_else(|e| e.into_inner()).1 = Some(Instant::now());
        signal(&busy, Signal::STOP);
        Stillness { compilers: self, busy }
    }

    fn stood_still(&self) -> Duration {
        let (before, since) = *self.stood_still.lock().unwrap_or_else(|e| e.into_inner());
        before + since.map_or(Duration::ZERO, |since| since.elapsed())
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
        let (limit, id) = (self.limit(), process.id());
        if let Some(handle) = process.handle() {
            self.busy.lock().unwrap_or_else(|e| e.into_inner()).insert(id, handle);
        }
        let (start, before) = (Instant::now(), self.stood_still());
        let stood_still = || self.stood_still().saturating_sub(before);
        let reply = process.ask_within(&Request::Compile(source.clone()), limit, stood_still);
        let taken = start.elapsed().saturating_sub(stood_still());
        self.busy.lock().unwrap_or_else(|e| e.into_inner()).remove(&id);
        if reply.is_ok() {
            self.idle().push(process);
        }
        if matches!(reply, Ok(Reply::Compiled { .. })) {
            self.note(taken);
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
        // Somebody may have killed the process for reasons that are not the source's, as a system that is short of
        // memory does. To hang again would cost too much.
        for _ in 1..ATTEMPTS {
            if matches!(reply, Ok(Err(Loss::Died(_) | Loss::Killed(_)))) {
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
            Err(Loss::Died(how) | Loss::Killed(how)) => Err(refused(format!("the compiler did not come back: {how}"))),
            Err(Loss::Hung(limit)) => {
                Err(refused(format!("{TOOK_TOO_LONG} {:.1} s and was stopped", limit.as_secs_f64())))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashtune_codegen::Language;
    use std::os::unix::fs::PermissionsExt;

    struct Nobody(CompilerId);

    impl Compiler for Nobody {
        fn id(&self) -> &CompilerId {
            &self.0
        }
        fn compile(&self, _: &Source) -> Result<(Vec<u8>, Facts)> {
            unreachable!("it compiles in other processes")
        }
    }

    #[test]
    fn while_compilers_stand_still_none_runs_and_none_begins() {
        let tmp = tempfile::tempdir().unwrap();
        let (program, ticks) = (tmp.path().join("ticks"), tmp.path().join("count"));
        // It begins when it is asked, counts 40 steps, and ends without an answer.
        let (greeting, count) = (super::super::protocol::greeting(), ticks.display());
        let text = format!(
            "#!/bin/sh\necho '{}' >&0\nhead -c 1 <&0 > /dev/null\n\
             for i in 1 2 3 4 5 6 7 8; do for j in 1 2 3 4 5; do printf . >> {count}; sleep 0.02; done; done\n",
            greeting.trim_end()
        );
        std::fs::write(&program, text).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        let command = WorkerCommand { program, arguments: Vec::new() };
        let id = CompilerId { name: "nobody".into(), version: "1".into() };
        let compilers = Compilers::new(&command, Arc::new(Nobody(id)));
        let source = Source {
            name: "k".into(),
            entry: "k".into(),
            language: Language::C,
            options: Vec::new(),
            text: String::new(),
        };
        let steps = || std::fs::metadata(&ticks).map_or(0, |m| m.len());
        let rest = |ms| std::thread::sleep(Duration::from_millis(ms));
        std::thread::scope(|scope| {
            let one = scope.spawn(|| compilers.ask(&source));
            while steps() < 3 {
                rest(5);
            }
            let still = compilers.still();
            rest(100);
            let (seen, late) = (steps(), scope.spawn(|| compilers.ask(&source)));
            rest(400);
            assert_eq!(steps(), seen);
            drop(still);
            let stood = compilers.stood_still();
            assert!(stood >= Duration::from_millis(500) && stood < Duration::from_secs(5), "{stood:?}");
            for compiler in [one, late] {
                assert!(matches!(compiler.join().unwrap().unwrap(), Err(Loss::Died(_))));
            }
            assert_eq!(steps(), 80);
            assert!(compilers.busy.lock().unwrap().is_empty());
        });
    }
}

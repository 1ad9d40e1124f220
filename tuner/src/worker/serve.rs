//! The worker's side: does what it is asked, until nobody asks any more.

use super::protocol::{Reply, Request, greeting, read_frame};
use super::watched::{Line, Watched, say};
use crate::Cause;
use crate::runner::{Inputs, Local};
use flashtune_codegen::{Arch, Language, Source};
use flashtune_runtime::compile::{Cc, Nvrtc};
use flashtune_runtime::{Compiler, DeviceSpec, Error as RuntimeError};
use rustix::process::{Resource, Rlimit, Signal, getrlimit, set_parent_process_death_signal, setrlimit};
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::sync::{Arc, Mutex};

/// Memory that a candidate on the CPU may take beyond what its inputs take.
const SPARE_MEMORY: u64 = 2 << 30;

/// Serves a tuner on standard input, which must be a socket ([`super::WorkerCommand`] starts it so). Returns when the
/// tuner hangs up.
pub fn serve() -> ExitCode {
    match listen() {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("flashtune worker: {e}; it is started by a tuner, not by hand");
            ExitCode::from(2)
        }
    }
}

fn listen() -> io::Result<()> {
    // Whatever a candidate does, nobody is left behind, and no minute is spent on writing a core file.
    set_parent_process_death_signal(Some(Signal::KILL))?;
    setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) })?;
    let mut from = UnixStream::from(rustix::stdio::stdin().try_clone_to_owned()?);
    from.peer_addr()?;
    rustix::stdio::dup2_stdin(File::open("/dev/null")?)?;
    let mut line = from.try_clone()?;
    line.write_all(greeting().as_bytes())?;
    let line = Arc::new(Mutex::new(line));
    let mut worker = Worker { line: line.clone(), local: None, inputs: None };
    loop {
        let request = match read_frame(&mut from) {
            Ok(request) => request,
            Err(e) if matches!(e.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset) => {
                return Ok(());
            }
            Err(e) => return Err(e),
        };
        let reply = worker
            .execute(request)
            .unwrap_or_else(|e| Reply::Unable { cause: Cause::from(&e), message: e.to_string() });
        say(&line, &reply);
    }
}

struct Worker {
    line: Line,
    local: Option<Local>,
    inputs: Option<Inputs>,
}

impl Worker {
    fn execute(&mut self, request: Request) -> Result<Reply, RuntimeError> {
        if let Request::Open { device } = &request {
            let device = flashtune_runtime::open(device.parse::<DeviceSpec>()?)?;
            let fingerprint = device.fingerprint().clone();
            self.local = Some(Local::new(Arc::new(Watched::new(device, self.line.clone()))));
            return Ok(Reply::Opened(fingerprint));
        }
        if let Request::Compile(source) = &request {
            return compile(source);
        }
        let Some(local) = &mut self.local else {
            return Ok(Reply::Unable { cause: Cause::Other, message: "no device was opened".into() });
        };
        Ok(match request {
            Request::Open { .. } | Request::Compile(_) => unreachable!("answered above"),
            Request::Start(inputs) => {
                local.start(&inputs);
                self.inputs = Some(inputs);
                Reply::Done
            }
            Request::Prepare(size) => {
                let is_cpu = matches!(local.fingerprint().arch, Arch::Cpu(_));
                limit_memory(None);
                local.prepare(size)?;
                // A CUDA context reserves addresses by the terabyte.
                if let Some(inputs) = self.inputs.as_ref().filter(|_| is_cpu) {
                    limit_memory(Some(SPARE_MEMORY + 2 * inputs.bytes()));
                }
                Reply::Done
            }
            Request::Load { id, artifact } => verdict(local.load(id, &artifact).map(|()| 0.0)),
            Request::Check { id, size } => verdict(local.check(id, size)),
            Request::Confirm { id } => verdict(local.confirm(id).map(|()| 0.0)),
            Request::Time { id } => verdict(local.time(id)),
            Request::Read => Reply::Read(local.reading()),
            Request::Unfused { fused_us } => local.unfused_us(fused_us).map_or(Reply::Nothing, Reply::Value),
        })
    }
}

fn verdict(outcome: Result<f64, String>) -> Reply {
    outcome.map_or_else(Reply::Refused, Reply::Value)
}

fn compile(source: &Source) -> Result<Reply, RuntimeError> {
    let compiler: Arc<dyn Compiler> = match source.language {
        Language::C => Cc::find()?,
        Language::Cuda => Nvrtc::find()?,
    };
    Ok(match compiler.compile(source) {
        Ok((bytes, facts)) => Reply::Compiled { compiler: compiler.id().clone(), bytes, facts },
        Err(RuntimeError::Compile { log, .. }) => Reply::Refused(log),
        Err(e) => return Err(e),
    })
}

/// Allows `spare` bytes of addresses more than are in use, or as many as may be.
fn limit_memory(spare: Option<u64>) {
    let maximum = getrlimit(Resource::As).maximum;
    let in_use = std::fs::read_to_string("/proc/self/statm")
        .ok()
        .and_then(|s| s.split(' ').next()?.parse::<u64>().ok())
        .map(|pages| pages * rustix::param::page_size() as u64);
    let current = match (spare, in_use) {
        (Some(spare), Some(in_use)) => Some(in_use + spare),
        _ => None,
    };
    let current = match (current, maximum) {
        (Some(wanted), Some(allowed)) => Some(wanted.min(allowed)),
        (None, allowed) => allowed,
        (wanted, None) => wanted,
    };
    // Where it is not allowed the system's own limit is what there is.
    let _ = setrlimit(Resource::As, Rlimit { current, maximum });
}

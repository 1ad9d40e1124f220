//! The questions, put to a worker process that may not survive them.
//!
//! A verdict against a candidate is passed only by a process that has run no unproven candidate before it, so that
//! nobody is blamed for memory that another one spoilt: the first failure in a used process is asked once more in a
//! fresh one. A short hang is always asked once more, in a fresh process and while no compiler runs, since a host that
//! is busy elsewhere looks the same; a long one would cost too much. After any failure the process is replaced; inputs
//! are made anew, and what had been loaded is loaded again when it is needed.

use super::cases::most_flops;
use super::probe::GridPart;
use super::{Inputs, Size};
use crate::worker::{Compilers, Limits, Loss, Process, Reply, Request, WorkerCommand};
use crate::{Error, Result};
use flashtune_cache::{Artifact, DeviceFingerprint, Reading};
use flashtune_runtime::{Compiler, DeviceSpec, compiler_for};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

/// The least time that a candidate may have the device.
const SHORTEST_LIMIT: Duration = Duration::from_secs(1);
/// Beyond that, it may take so many times as long as the best one.
const TIMES_BEST: u32 = 20;
/// A hang that took no longer than this is asked again: two of them, and two processes, are within 3 s.
const ASKED_AGAIN: Duration = Duration::from_millis(1250);
/// A candidate whose processes somebody killed so many times in a row is at fault after all: it may take all memory.
const KILLS: usize = 3;
/// Processes that may die in a row without a candidate to blame.
const STARTS: usize = 3;
/// Steps that no candidate has a part in.
const HOST_LIMIT: Duration = Duration::from_secs(60);
/// Work on the host between the launches of a candidate: comparing. Both grow by the second for so many bytes.
const COMPARE_LIMIT: Duration = Duration::from_secs(10);
const BYTES_A_SECOND: u64 = 20 << 20;

/// How long a launch may take at a size, by the best at every size so far and the work at each (nothing while there is
/// no job).
fn limit_of(best: &[Option<Duration>; 3], size: Size, flops: impl Fn(Size) -> Option<f64>) -> Duration {
    let known = |smaller: Size| {
        let ratio = flops(size)? / flops(smaller)?.max(1.0);
        Some(best[smaller as usize]?.mul_f64(ratio.clamp(1.0, 1e6)))
    };
    let smaller = match size {
        Size::Small => [Size::Small; 2],
        Size::Probe => [Size::Probe, Size::Small],
        Size::Full => [Size::Full, Size::Probe],
    };
    let best = smaller.into_iter().find_map(known).unwrap_or_default();
    SHORTEST_LIMIT.max(best.saturating_mul(TIMES_BEST))
}

/// A device in a worker process, and what is needed to get a new process where the old one was.
pub(crate) struct Remote {
    command: WorkerCommand,
    device: DeviceSpec,
    fingerprint: DeviceFingerprint,
    /// The process, with its device open and the job started.
    process: Option<Process>,
    inputs: Option<Inputs>,
    prepared: Vec<Size>,
    artifacts: HashMap<u32, Artifact>,
    /// Loaded in the present process.
    loaded: HashSet<u32>,
    /// The first that passed its check at full size: what the others are compared with.
    trusted: Option<u32>,
    /// Whether the present process has its output.
    trusted_here: bool,
    /// The shortest that any candidate had the device for, by [`Size`].
    best: [Option<Duration>; 3],
    /// What compiles beside it.
    compilers: Option<Arc<Compilers>>,
}

/// Why a question has no answer.
enum Failure {
    /// The candidate's.
    Of(String),
    /// The candidate's, which had the device for so long.
    Hang(String, Duration),
    /// Nobody's, it seems: somebody killed the process.
    Killed(String),
    /// Not the candidate's: ends the job.
    Job(Error),
}

impl Remote {
    /// Starts a worker and opens the device in it.
    pub(crate) fn open(command: WorkerCommand, device: DeviceSpec) -> Result<Self> {
        let (process, fingerprint) = start(&command, device)?;
        Ok(Self {
            command,
            device,
            fingerprint,
            process: Some(process),
            inputs: None,
            prepared: Vec::new(),
            artifacts: HashMap::new(),
            loaded: HashSet::new(),
            trusted: None,
            trusted_here: false,
            best: [None; 3],
            compilers: None,
        })
    }

    pub(crate) fn fingerprint(&self) -> &DeviceFingerprint {
        &self.fingerprint
    }

    pub(crate) fn device(&self) -> DeviceSpec {
        self.device
    }

    /// The compiler of the device's kernels, in processes of its own.
    pub(crate) fn compiler(&mut self) -> Result<Arc<dyn Compiler>> {
        // Looked for each time: the environment may have changed.
        let compiler = compiler_for(self.fingerprint.arch)?;
        match &self.compilers {
            Some(known) if known.id() == compiler.id() => Ok(known.clone()),
            _ => Ok(self.compilers.insert(Arc::new(Compilers::new(&self.command, compiler))).clone()),
        }
    }

    pub(crate) fn process_id(&self) -> Option<u32> {
        self.process.as_ref().map(Process::id)
    }

    /// A new job in a new process: what the candidates of the last one did to theirs is over.
    pub(crate) fn start(&mut self, inputs: &Inputs) {
        if !self.loaded.is_empty() {
            self.retire();
        }
        self.inputs = Some(*inputs);
        self.prepared.clear();
        self.artifacts.clear();
        self.trusted = None;
        self.best = [None; 3];
        // A process that is already there does not know the job yet.
        if let Some(process) = &mut self.process
            && process.ask(&Request::Start(*inputs), host(HOST_LIMIT)).is_err()
        {
            self.retire();
        }
    }

    /// Ends the process; the next question starts another.
    pub(crate) fn rest(&mut self) {
        self.retire();
    }

    pub(crate) fn prepare(&mut self, size: Size) -> Result<()> {
        self.ready()?;
        let mut last = None;
        for _ in 0..STARTS {
            match self.make(size) {
                Ok(()) => {
                    self.prepared.push(size);
                    return Ok(());
                }
                Err(Failure::Job(e)) => return Err(e),
                Err(Failure::Of(how) | Failure::Hang(how, _) | Failure::Killed(how)) => last = Some(how),
            }
            self.ready()?;
        }
        Err(self.gave_up(last))
    }

    pub(crate) fn load(&mut self, id: u32, artifact: &Artifact) -> Result<Result<(), String>> {
        self.artifacts.insert(id, artifact.clone());
        let loaded = self.fairly(id, |this| this.load_here(id).map(|()| 0.0));
        if matches!(loaded, Ok(Err(_))) {
            self.artifacts.remove(&id);
        }
        Ok(loaded?.map(|_| ()))
    }

    pub(crate) fn check(&mut self, id: u32, size: Size) -> Result<Result<f64, String>> {
        let checked = self.fairly(id, |this| {
            if size == Size::Full {
                this.recall_trusted(id)?;
            }
            this.run(id, &Request::Check { id, size }, size)
        })?;
        if size == Size::Full && checked.is_ok() {
            self.trusted_here |= self.trusted.is_none() || self.trusted == Some(id);
            self.trusted.get_or_insert(id);
        }
        Ok(checked)
    }

    pub(crate) fn confirm(&mut self, id: u32) -> Result<Result<(), String>> {
        Ok(self.fairly(id, |this| this.run(id, &Request::Confirm { id }, Size::Full))?.map(|_| ()))
    }

    pub(crate) fn time(&mut self, id: u32) -> Result<Result<f64, String>> {
        self.fairly(id, |this| this.run(id, &Request::Time { id }, Size::Full))
    }

    pub(crate) fn reading(&mut self) -> Reading {
        match self.process.as_mut().map(|p| p.ask(&Request::Read, host(HOST_LIMIT))) {
            Some(Ok(Reply::Read(reading))) => reading,
            Some(Err(_)) => {
                self.retire();
                Reading::default()
            }
            _ => Reading::default(),
        }
    }

    pub(crate) fn unfused_us(&mut self, fused_us: f64) -> Option<f64> {
        // Nice to have: not worth a new process.
        match self.process.as_mut()?.ask(&Request::Unfused { fused_us }, host(HOST_LIMIT)) {
            Ok(Reply::Value(us)) => Some(us),
            Ok(_) => None,
            Err(_) => {
                self.retire();
                None
            }
        }
    }

    /// Asks in the present process, and if the answer is against the candidate, in one where nobody else can be at
    /// fault.
    fn fairly(
        &mut self,
        id: u32,
        mut question: impl FnMut(&mut Self) -> Result<f64, Failure>,
    ) -> Result<Result<f64, String>> {
        let compilers = self.compilers.clone();
        let (mut again, mut killed) = (false, 0);
        loop {
            self.ready()?;
            let _still = compilers.as_ref().filter(|_| again).map(|compilers| compilers.still());
            let others = self.loaded.iter().any(|other| *other != id && Some(*other) != self.trusted);
            let answer = question(self);
            if answer.is_err() {
                self.retire();
            }
            match answer {
                Ok(value) => return Ok(Ok(value)),
                Err(Failure::Job(e)) => return Err(e),
                Err(Failure::Hang(reason, limit)) if limit <= ASKED_AGAIN && !again => {
                    tracing::debug!(reason, "asking again in a new process, alone");
                    again = true;
                }
                Err(Failure::Hang(reason, _)) => return Ok(Err(reason)),
                Err(Failure::Killed(reason)) if killed + 1 < KILLS => {
                    killed += 1;
                    tracing::debug!(reason, "asking again in a new process");
                }
                Err(Failure::Killed(reason)) => return Ok(Err(reason)),
                Err(Failure::Of(reason)) if others && !again => {
                    again = true;
                    tracing::debug!(reason, "asking again in a new process");
                }
                Err(Failure::Of(reason)) => return Ok(Err(reason)),
            }
        }
    }

    /// A question about a candidate that has to be loaded.
    fn run(&mut self, id: u32, request: &Request, size: Size) -> Result<f64, Failure> {
        if !self.loaded.contains(&id) {
            self.load_here(id)?;
        }
        let value = self.ask(request, self.launch_limit(size))?;
        let taken = self.process.as_ref().map_or(Duration::ZERO, |p| p.longest_launch);
        let best = &mut self.best[size as usize];
        *best = Some(best.map_or(taken, |b| b.min(taken)));
        Ok(value)
    }

    fn load_here(&mut self, id: u32) -> Result<(), Failure> {
        let Some(artifact) = self.artifacts.get(&id).cloned() else {
            return Err(Failure::Of("it is not loaded".into()));
        };
        // Noted first: from here on the process has run something of it.
        self.loaded.insert(id);
        self.ask(&Request::Load { id, artifact: Box::new(artifact) }, SHORTEST_LIMIT).map(|_| ())
    }

    /// In a new process the trusted candidate runs first, so that its output is there to compare with.
    fn recall_trusted(&mut self, id: u32) -> Result<(), Failure> {
        let Some(trusted) = self.trusted.filter(|t| *t != id && !self.trusted_here) else { return Ok(()) };
        if self.run(trusted, &Request::Check { id: trusted, size: Size::Full }, Size::Full).is_err() {
            // It passed before. Whatever that means, it is nothing to measure others by.
            self.trusted = None;
            self.retire();
            return self.ready().map_err(Failure::Job);
        }
        self.trusted_here = true;
        Ok(())
    }

    /// How long a candidate may have the device: what the best one had, or before there is one, what the work at
    /// smaller sizes says about that at this one. Small launches use the device worse than large ones, so that is an
    /// upper bound.
    fn launch_limit(&self, size: Size) -> Duration {
        let flops = |size: Size| {
            let inputs = self.inputs.as_ref()?;
            Some(match size {
                Size::Small => most_flops(inputs),
                Size::Probe if inputs.is_ragged() || inputs.is_backward() => {
                    GridPart::of_heads(&inputs.shape).shape.forward_flops(1, 1)
                }
                Size::Probe => GridPart::of(&inputs.shape).shape.forward_flops(1, 1),
                Size::Full => inputs.shape.forward_flops(1, 1),
            })
        };
        limit_of(&self.best, size, flops)
    }

    /// A process with the device open, the job started and the inputs made.
    fn ready(&mut self) -> Result<()> {
        let mut last = None;
        for _ in 0..STARTS {
            if self.process.is_some() {
                return Ok(());
            }
            let (process, fingerprint) = start(&self.command, self.device)?;
            if fingerprint != self.fingerprint {
                let message = format!("the device was {}, and is {fingerprint} now", self.fingerprint);
                return Err(Error::worker(&self.command, message));
            }
            self.process = Some(process);
            let made = self.begin();
            match made {
                Ok(()) => return Ok(()),
                Err(Failure::Job(e)) => return Err(e),
                Err(Failure::Of(how) | Failure::Hang(how, _) | Failure::Killed(how)) => {
                    last = Some(how);
                    self.retire();
                }
            }
        }
        Err(self.gave_up(last))
    }

    fn begin(&mut self) -> Result<(), Failure> {
        let Some(inputs) = self.inputs else { return Ok(()) };
        self.ask(&Request::Start(inputs), HOST_LIMIT)?;
        for size in self.prepared.clone() {
            self.make(size)?;
        }
        Ok(())
    }

    fn make(&mut self, size: Size) -> Result<(), Failure> {
        self.ask(&Request::Prepare(size), HOST_LIMIT).map(|_| ())
    }

    /// One request with a limit for the candidate's part of it. After a loss there is no process.
    fn ask(&mut self, request: &Request, launch: Duration) -> Result<f64, Failure> {
        let Some(process) = &mut self.process else { return Err(Failure::Of("there is no worker".into())) };
        let seconds = self.inputs.as_ref().map_or(0, |i| i.bytes() / BYTES_A_SECOND);
        let host = match request {
            Request::Check { .. } | Request::Confirm { .. } | Request::Time { .. } | Request::Load { .. } => {
                COMPARE_LIMIT
            }
            _ => HOST_LIMIT,
        };
        let limits = Limits { launch, host: host + Duration::from_secs(seconds) };
        match process.ask(request, limits) {
            Ok(Reply::Value(value)) if value.is_finite() && value >= 0.0 => Ok(value),
            Ok(Reply::Value(value)) => Err(Failure::Of(format!("its worker reported {value}"))),
            Ok(Reply::Done) => Ok(0.0),
            Ok(Reply::Refused(reason)) => Err(Failure::Of(reason)),
            Ok(Reply::Unable { cause, message }) => Err(Failure::Job(Error::InWorker { cause, message })),
            Ok(other) => Err(Failure::Job(Error::worker(&self.command, format!("it answered {other:?}")))),
            Err(loss) => {
                self.retire();
                Err(match loss {
                    Loss::Died(how) => Failure::Of(how),
                    Loss::Killed(how) => Failure::Killed(how),
                    Loss::Hung(limit) => {
                        let seconds = limit.as_secs_f64();
                        Failure::Hang(format!("it did not come back within {seconds:.1} s and was stopped"), limit)
                    }
                })
            }
        }
    }

    fn retire(&mut self) {
        self.process = None;
        self.loaded.clear();
        self.trusted_here = false;
    }

    fn gave_up(&self, last: Option<String>) -> Error {
        let how = last.unwrap_or_default();
        Error::worker(&self.command, format!("{STARTS} processes in a row ended before a candidate ran: {how}"))
    }
}

/// A new process with the device open. One that dies on the way, by whatever hand, is replaced.
fn start(command: &WorkerCommand, device: DeviceSpec) -> Result<(Process, DeviceFingerprint)> {
    let mut last = String::new();
    for _ in 0..STARTS {
        let mut process = match Process::start(command) {
            Ok(process) => process,
            Err(e) => {
                last = e.to_string();
                continue;
            }
        };
        match process.ask(&Request::Open { device: device.to_string() }, host(HOST_LIMIT)) {
            Ok(Reply::Opened(fingerprint)) => return Ok((process, fingerprint)),
            Ok(Reply::Unable { cause, message }) => return Err(Error::InWorker { cause, message }),
            Ok(other) => last = format!("it answered {other:?}"),
            Err(Loss::Died(how) | Loss::Killed(how)) => last = format!("{device} cannot be opened: {how}"),
            Err(Loss::Hung(limit)) => last = format!("opening {device} took more than {limit:?}"),
        }
    }
    Err(Error::worker(command, last))
}

fn host(limit: Duration) -> Limits {
    Limits { launch: limit, host: limit }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_launch_may_take_a_second_or_twenty_times_the_best() {
        let ms = Duration::from_millis;
        // The part of a job is 10 times its small inputs, the whole 16 times the part.
        let flops = |size: Size| Some([1e6, 1e7, 1.6e8][size as usize]);
        let limit = |best: [Option<Duration>; 3], size| limit_of(&best, size, flops);
        for size in [Size::Small, Size::Probe, Size::Full] {
            assert_eq!(limit([None; 3], size), ms(1000), "nobody came through yet");
        }
        // What is quick may take a second; what is slow is measured by its like.
        assert_eq!(limit([Some(ms(1)), Some(ms(2)), Some(ms(30))], Size::Full), ms(1000));
        assert_eq!(limit([Some(ms(1)), Some(ms(2)), Some(ms(90))], Size::Full), ms(1800));
        // Nobody has done the whole yet: the part says how long it takes at most.
        assert_eq!(limit([Some(ms(1)), Some(ms(10)), None], Size::Full), ms(16 * 10 * 20));
        assert_eq!(limit([Some(ms(20)), None, None], Size::Probe), ms(10 * 20 * 20));
        // A job without work, and times beyond all bounds.
        assert_eq!(limit_of(&[Some(ms(100)); 3], Size::Full, |_| Some(0.0)), ms(2000));
        assert!(limit([Some(Duration::MAX / 20); 3], Size::Small) > ms(1000));
    }
}

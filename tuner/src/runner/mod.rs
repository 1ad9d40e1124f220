//! Where candidates run: in a worker process, or in this one.
//!
//! The boundary lies at what the tuner wants to know of a candidate (does it load, is it right, how long does it take),
//! not at memory and launches: a question that costs a process can be asked again, with the inputs made anew.

mod backward;
mod bench;
mod cases;
mod launches;
mod local;
mod probe;
mod ragged;
mod remote;

pub(crate) use local::Local;

use crate::worker::WorkerCommand;
use crate::{Error, Job, Result};
use flashtune_cache::{Artifact, DeviceFingerprint, Launches, Reading};
use flashtune_codegen::omitted::is_default;
use flashtune_codegen::{Arch, Dropout, Op, PageClass, Problem, Shape};
use flashtune_runtime::{Compiler, Device, DeviceSpec};
use remote::Remote;
use serde::{Deserialize, Serialize};
use std::sync::{Arc, Once};

/// What the inputs of a job are made from.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct Inputs {
    pub problem: Problem,
    pub shape: Shape,
    #[serde(default, skip_serializing_if = "is_default")]
    pub pages: PageClass,
    pub seed: u64,
    pub launches: Launches,
}

impl Inputs {
    pub(crate) fn of(job: &Job) -> Self {
        let Job { problem, shape, pages, seed, launches, .. } = *job;
        Self { problem, shape, pages, seed, launches }
    }

    /// Whether the inputs are those of a ragged batch.
    pub(crate) fn is_ragged(&self) -> bool {
        !self.problem.kv.is_dense()
    }

    /// Whether they are those of gradients.
    pub(crate) fn is_backward(&self) -> bool {
        self.problem.op == Op::Backward
    }

    /// Bytes of Q, K, V and O at full size, of gradients with each one's gradient; of a ragged batch about.
    pub(crate) fn bytes(&self) -> u64 {
        let p = &self.problem;
        // The last page of a sequence may be nearly empty.
        let kv_len = self.shape.kv_len.saturating_add(self.pages.tokens().unwrap_or(0));
        let bytes = Shape { kv_len, ..self.shape }.forward_bytes(p.head_dim_qk, p.head_dim_v, p.element_bytes()) as u64;
        bytes * if self.is_backward() { 2 } else { 1 }
    }
}

/// What the dense inputs of a job with dropout drop: any probability takes as long.
fn dropout_of(job: &Inputs) -> Option<Dropout> {
    job.problem.dropout.then(|| Dropout::new(0.1, job.seed, 1))
}

/// The sizes that a candidate meets, in this order: small ragged ones, a part of the job's grid, the whole. The last
/// two have the same inputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Size {
    Small,
    Probe,
    Full,
}

/// After so many failures in a row it is asked whether they are the candidates' or the device's.
const STREAK: usize = 4;

/// Where candidates run. Keep it from job to job: a worker process stays.
pub struct Runner {
    fingerprint: DeviceFingerprint,
    /// Whether measuring is disturbed by compilers no more than they by it.
    beside: bool,
    /// Cores of the host that this process may use.
    cores: usize,
    /// The first candidate of the job that passed a check, and at which size; how many have failed in a row since one
    /// passed anything.
    proven: Option<(u32, Size)>,
    failed_in_a_row: usize,
    kind: Kind,
}

enum Kind {
    Here { device: Arc<dyn Device>, local: Box<Local> },
    Worker { remote: Box<Remote> },
}

impl Runner {
    /// Candidates compile and run in worker processes: whatever one does costs that candidate alone. No context of the
    /// device is made in this process.
    ///
    /// # Errors
    /// [`crate::Error::Worker`] when the program is no worker of this version, [`crate::Error::InWorker`] when it
    /// cannot open the device.
    pub fn worker(command: WorkerCommand, device: DeviceSpec) -> Result<Self> {
        let remote = Remote::open(command, device)?;
        let fingerprint = remote.fingerprint().clone();
        Ok(Self::with(fingerprint, Kind::Worker { remote: Box::new(remote) }))
    }

    /// Candidates run in this process. One that faults ends it; one that never ends, hangs it.
    pub fn in_this_process(device: Arc<dyn Device>) -> Self {
        let (fingerprint, local) = (device.fingerprint().clone(), Box::new(Local::new(device.clone())));
        Self::with(fingerprint, Kind::Here { device, local })
    }

    fn with(fingerprint: DeviceFingerprint, kind: Kind) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            beside: matches!(fingerprint.arch, Arch::Sm(_)),
            cores,
            proven: None,
            failed_in_a_row: 0,
            fingerprint,
            kind,
        }
    }

    /// The same, as if the device left the host's cores alone, and there were so many of them.
    #[cfg(test)]
    pub fn beside_compilers(self, cores: usize) -> Self {
        Self { beside: true, cores, ..self }
    }

    /// Cores of the host that this process may use.
    pub(crate) fn cores(&self) -> usize {
        self.cores
    }

    /// Whether candidates are measured while others compile: not on the cpu, where the two share the cores.
    pub(crate) fn is_measured_beside_compilers(&self) -> bool {
        self.beside
    }

    /// The device that candidates run on.
    pub fn fingerprint(&self) -> &DeviceFingerprint {
        &self.fingerprint
    }

    /// Where the device is, for those who must not use it at the same time: the host's name and the device's.
    pub(crate) fn place(&self) -> String {
        let spec = match &self.kind {
            Kind::Here { device, .. } => device.spec(),
            Kind::Worker { remote } => Some(remote.device()),
        };
        let device = match (spec, self.fingerprint.arch) {
            (_, Arch::Cpu(_)) => "cpu".to_owned(),
            (Some(DeviceSpec::Cuda(n)), _) => format!("cuda:{n}"),
            _ => "cuda:0".to_owned(),
        };
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        format!("{} {device}", host.trim())
    }

    /// Gives the device back until it is needed again: one that waits must not be a user that disturbs others.
    pub(crate) fn rest(&mut self) {
        if let Kind::Worker { remote } = &mut self.kind {
            remote.rest();
        }
    }

    /// The process that runs candidates at the moment, if it is not this one.
    pub fn worker_id(&self) -> Option<u32> {
        match &self.kind {
            Kind::Here { .. } => None,
            Kind::Worker { remote } => remote.process_id(),
        }
    }

    /// The compiler of the device's kernels.
    pub(crate) fn compiler(&mut self) -> Result<Arc<dyn Compiler>> {
        match &mut self.kind {
            Kind::Here { device, .. } => Ok(device.compiler()?),
            Kind::Worker { remote } => remote.compiler(),
        }
    }

    /// A new job.
    pub(crate) fn start(&mut self, inputs: &Inputs) {
        (self.proven, self.failed_in_a_row) = (None, 0);
        match &mut self.kind {
            Kind::Here { local, .. } => local.start(inputs),
            Kind::Worker { remote } => remote.start(inputs),
        }
    }

    /// Makes the inputs of one size.
    ///
    /// # Errors
    /// Those of the device, for want of memory for instance.
    pub(crate) fn prepare(&mut self, size: Size) -> Result<()> {
        match &mut self.kind {
            Kind::Here { local, .. } => Ok(local.prepare(size)?),
            Kind::Worker { remote } => remote.prepare(size),
        }
    }

    /// Loads candidate `id`. The inner error is the candidate's, here and below; the outer one ends the job.
    pub(crate) fn load(&mut self, id: u32, artifact: &Artifact) -> Result<Result<(), String>> {
        let loaded = match &mut self.kind {
            Kind::Here { local, .. } => local.load(id, artifact),
            Kind::Worker { remote } => remote.load(id, artifact)?,
        };
        self.or_lost(id, loaded)
    }

    /// Whether launches can be captured into graphs on the device.
    pub fn has_graphs(&self) -> bool {
        match &self.kind {
            Kind::Here { device, .. } => device.has_graphs(),
            Kind::Worker { .. } => matches!(self.fingerprint.arch, Arch::Sm(_)),
        }
    }

    /// Checks a candidate on the prepared inputs of a size, on the job's own after a probe. Gives the largest absolute
    /// error against the oracle.
    pub(crate) fn check(&mut self, id: u32, size: Size) -> Result<Result<f64, String>> {
        if size == Size::Full
            && let Err(reason) = self.check_once(id, Size::Probe)?
        {
            return self.or_lost(id, Err(format!("on a part of the grid: {reason}")));
        }
        let checked = self.check_once(id, size)?;
        if checked.is_ok() {
            self.proven.get_or_insert((id, size));
        }
        self.or_lost(id, checked)
    }

    /// The verdict on a candidate. When several fail in a row, the one that had passed is run again, with nobody else's
    /// code around it: where that fails too, twice, the device is at fault, and nobody else need be tried.
    fn or_lost<T>(&mut self, id: u32, verdict: Result<T, String>) -> Result<Result<T, String>> {
        if verdict.is_ok() {
            self.failed_in_a_row = 0;
            return Ok(verdict);
        }
        self.failed_in_a_row += 1;
        let Some((proven, size)) = self.proven.filter(|(proven, _)| *proven != id && self.failed_in_a_row >= STREAK)
        else {
            return Ok(verdict);
        };
        self.failed_in_a_row = 0;
        let mut last = String::new();
        for _ in 0..2 {
            self.rest();
            match self.check_once(proven, size)? {
                Ok(_) => return Ok(verdict),
                Err(reason) => last = reason,
            }
        }
        Err(Error::Lost { device: self.fingerprint.to_string(), reason: last })
    }

    fn check_once(&mut self, id: u32, size: Size) -> Result<Result<f64, String>> {
        match &mut self.kind {
            Kind::Here { local, .. } => Ok(local.check(id, size)),
            Kind::Worker { remote } => remote.check(id, size),
        }
    }

    /// Whether a candidate that was checked gives the same bytes in several launches at full size.
    pub(crate) fn confirm(&mut self, id: u32) -> Result<Result<(), String>> {
        let confirmed = match &mut self.kind {
            Kind::Here { local, .. } => local.confirm(id),
            Kind::Worker { remote } => remote.confirm(id)?,
        };
        self.or_lost(id, confirmed)
    }

    /// Time of one run at full size with cold caches, launched in the job's way, in microseconds.
    pub(crate) fn time(&mut self, id: u32) -> Result<Result<f64, String>> {
        let timed = match &mut self.kind {
            Kind::Here { local, .. } => local.time(id),
            Kind::Worker { remote } => remote.time(id)?,
        };
        self.or_lost(id, timed)
    }

    /// A look at what goes on around the device. What cannot be read is said once.
    pub(crate) fn reading(&mut self) -> Reading {
        let reading = match &mut self.kind {
            Kind::Here { local, .. } => local.reading(),
            Kind::Worker { remote } => remote.reading(),
        };
        static SAID: Once = Once::new();
        if let Some(why) = &reading.unread {
            SAID.call_once(|| tracing::warn!("{why}"));
        }
        reading
    }

    /// Median time of unfused attention on the same inputs in microseconds, where it can be had.
    pub(crate) fn unfused_us(&mut self, fused_us: f64) -> Option<f64> {
        match &mut self.kind {
            Kind::Here { local, .. } => local.unfused_us(fused_us),
            Kind::Worker { remote } => remote.unfused_us(fused_us),
        }
    }
}

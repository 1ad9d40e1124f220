//! A device that says when a candidate has it, so that the other side can tell a hang from work on the host.

use super::protocol::{Reply, write_frame};
use flashtune_cache::{Artifact, DeviceFingerprint, Reading};
use flashtune_codegen::LaunchPlan;
use flashtune_codegen::abi::Args;
use flashtune_runtime::{Buffer, Compiler, Device, Graph, Module, Result, Stream};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// The worker's end of the socket.
pub(super) type Line = Arc<Mutex<UnixStream>>;

/// Says something to the tuner. Without one there is nobody to work for.
pub(super) fn say(line: &Line, reply: &Reply) {
    let mut line = line.lock().unwrap_or_else(|e| e.into_inner());
    if write_frame(&mut *line, reply).is_err() {
        std::process::exit(1);
    }
}

/// A device and the line on which its launches are announced.
pub(super) struct Watched {
    device: Arc<dyn Device>,
    line: Line,
    /// Whether an announced launch has not been waited for yet.
    launched: Arc<AtomicBool>,
}

/// A graph whose replays are announced.
struct WatchedGraph {
    graph: Box<dyn Graph>,
    line: Line,
    launched: Arc<AtomicBool>,
}

impl Graph for WatchedGraph {
    unsafe fn replay(&self, stream: Stream) -> Result<()> {
        announce(&self.launched, &self.line);
        // SAFETY: the caller's promise is this function's own.
        unsafe { self.graph.replay(stream) }
    }
}

/// Says that a candidate has the device, unless that was said.
fn announce(launched: &AtomicBool, line: &Line) {
    if !launched.swap(true, Ordering::Relaxed) {
        say(line, &Reply::Launched);
    }
}

impl Watched {
    pub(crate) fn new(device: Arc<dyn Device>, line: Line) -> Self {
        Self { device, line, launched: Arc::default() }
    }

    fn launched(&self) {
        announce(&self.launched, &self.line);
    }

    fn returned(&self) {
        if self.launched.swap(false, Ordering::Relaxed) {
            say(&self.line, &Reply::Returned);
        }
    }
}

impl Device for Watched {
    fn fingerprint(&self) -> &DeviceFingerprint {
        self.device.fingerprint()
    }
    fn reading(&self) -> Reading {
        self.device.reading()
    }
    fn compiler(&self) -> Result<Arc<dyn Compiler>> {
        self.device.compiler()
    }
    /// Loading runs code of the candidate too: constructors, `ft_init`.
    fn load(&self, artifact: &Artifact) -> Result<Arc<dyn Module>> {
        self.launched();
        let loaded = self.device.load(artifact);
        self.returned();
        loaded
    }
    unsafe fn launch(&self, module: &dyn Module, launch: &LaunchPlan, args: Args<'_>, stream: Stream) -> Result<()> {
        // Inside of `time_us` it was said before the clock started.
        self.launched();
        // SAFETY: the caller's promise is this function's own.
        unsafe { self.device.launch(module, launch, args, stream) }
    }
    fn alloc(&self, bytes: usize) -> Result<Box<dyn Buffer>> {
        self.device.alloc(bytes)
    }
    fn upload(&self, to: &dyn Buffer, bytes: &[u8]) -> Result<()> {
        self.device.upload(to, bytes)
    }
    fn download(&self, from: &dyn Buffer, bytes: &mut [u8], stream: Stream) -> Result<()> {
        // Waited for first: copying a large tensor is not the candidate's time.
        self.synchronize(stream)?;
        self.device.download(from, bytes, stream)
    }
    fn fill(&self, buffer: &dyn Buffer, byte: u8) -> Result<()> {
        self.device.fill(buffer, byte)
    }
    fn stream(&self) -> Stream {
        self.device.stream()
    }
    fn synchronize(&self, stream: Stream) -> Result<()> {
        let done = self.device.synchronize(stream);
        self.returned();
        done
    }
    fn flush_cache(&self, stream: Stream) -> Result<()> {
        self.device.flush_cache(stream)
    }
    fn time_us(&self, stream: Stream, work: &mut dyn FnMut() -> Result<()>) -> Result<f64> {
        self.launched();
        let timed = self.device.time_us(stream, work);
        self.returned();
        timed
    }
    fn has_graphs(&self) -> bool {
        self.device.has_graphs()
    }
    /// Nothing runs while it is captured.
    fn capture(&self, stream: Stream, work: &mut dyn FnMut() -> Result<()>) -> Result<Box<dyn Graph>> {
        let graph = self.device.capture(stream, work)?;
        self.returned();
        Ok(Box::new(WatchedGraph { graph, line: self.line.clone(), launched: self.launched.clone() }))
    }
}

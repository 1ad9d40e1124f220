//! How candidates are launched: called, or replayed as a graph of one launch that is captured once.

use flashtune_cache::Launches;
use flashtune_runtime::{Device, Error as RuntimeError, Graph, Stream};
use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Launches that a winner has to repeat its answer in, and the time after which fewer are enough.
const CONFIRMATIONS: usize = 12;
const CONFIRMING: Duration = Duration::from_millis(300);

/// One launch of a candidate into its bench's buffers, on the bench's stream.
pub(super) type Launch<'a> = dyn Fn() -> Result<(), RuntimeError> + 'a;

/// The launches of a job's candidates, as they are timed.
pub(super) struct Launcher {
    launches: Launches,
    /// The launch of every candidate that was timed or checked, captured.
    graphs: RefCell<HashMap<u32, Box<dyn Graph>>>,
    pub device: Arc<dyn Device>,
    pub stream: Stream,
}

impl Launcher {
    pub(crate) fn new(device: &Arc<dyn Device>, launches: Launches) -> Self {
        Self { launches, graphs: RefCell::default(), stream: device.stream(), device: device.clone() }
    }

    /// Captures a candidate's launch, if that is how it will be timed and it was not done yet.
    pub(crate) fn capture(&self, id: u32, launch: &Launch) -> Result<(), RuntimeError> {
        if self.launches == Launches::Graph && !self.graphs.borrow().contains_key(&id) {
            let graph = self.device.capture(self.stream, &mut || launch())?;
            self.graphs.borrow_mut().insert(id, graph);
        }
        Ok(())
    }

    /// The launch itself, or the replay of what was captured.
    pub(crate) fn launch_as_timed(&self, id: u32, launch: &Launch) -> Result<(), RuntimeError> {
        match self.graphs.borrow().get(&id) {
            // SAFETY: it was captured of `launch`, whose buffers the bench owns beside this launcher and drops after
            // it; every caller waits for the stream before it returns, and modules outlive the bench.
            Some(graph) => unsafe { graph.replay(self.stream) },
            None => launch(),
        }
    }

    /// Time of one launch with cold caches in microseconds.
    pub(crate) fn time_us(&self, id: u32, launch: &Launch) -> Result<f64, RuntimeError> {
        self.capture(id, launch)?;
        self.device.flush_cache(self.stream)?;
        let us = self.device.time_us(self.stream, &mut || self.launch_as_timed(id, launch))?;
        self.device.synchronize(self.stream)?;
        Ok(us)
    }
}

/// Asks again and again whether a launch repeats its answer.
pub(super) fn confirm(mut repeats: impl FnMut() -> Result<(), String>) -> Result<(), String> {
    let began = Instant::now();
    for _ in 0..CONFIRMATIONS {
        repeats()?;
        if began.elapsed() > CONFIRMING {
            break;
        }
    }
    Ok(())
}

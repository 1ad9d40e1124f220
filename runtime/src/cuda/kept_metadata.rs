//! Mask metadata of one mask, kept for later launches in memory of the pool that launches on any streams share.
//!
//! The first launch that needs a geometry computes it on its own stream and records an event behind that. Launches on
//! other streams wait for the event until it has come to pass; the host never waits. Behind every launch an event of
//! its stream is recorded, so that the memory can be given back behind the last of them, whichever streams are still
//! there by then.

use super::context::{BesideCaptures, Context};
use crate::{Findings, Result};
use cudarc::driver::result::{event, free_async, stream};
use cudarc::driver::sys::{CUdeviceptr, CUevent, CUevent_flags, CUevent_wait_flags, CUstream};
use flashtune_codegen::abi::ForwardArgs;
use flashtune_codegen::{MaskKind, MetadataLayout};
use std::any::Any;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Cache key: launches with equal geometry share the metadata of a mask.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Geometry {
    layout: MetadataLayout,
    pub(super) bytes: u64,
    /// The mask beside the program's.
    sides: MaskKind,
    window: [i32; 2],
    /// Kernels of another family or of other templates may write something else.
    templates: Arc<str>,
}

impl Geometry {
    pub(super) fn new(
        (bytes, layout): (u64, MetadataLayout),
        sides: MaskKind,
        args: &ForwardArgs,
        templates: &Arc<str>,
    ) -> Self {
        let window = [args.window_left, args.window_right];
        Self { layout, bytes, sides, window, templates: templates.clone() }
    }
}

/// Where a launch goes to.
#[derive(Debug, Clone, Copy)]
pub(super) struct On {
    pub(super) stream: CUstream,
    /// Its identifier; nothing while it is captured.
    pub(super) id: u64,
    pub(super) captured: bool,
}

/// What is found of one mask.
pub(super) struct CudaFindings {
    pub(super) context: Arc<Context>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    found: Vec<KeptEntry>,
    /// For each stream an event behind its last launch.
    used: Vec<(u64, Event)>,
}

struct KeptEntry {
    geometry: Geometry,
    address: CUdeviceptr,
    /// Behind the kernels that find it, on the stream of this identifier.
    event: Event,
    writer: u64,
    /// The event has come to pass.
    is_there: bool,
}

/// An event, destroyed on drop, with the context current.
struct Event(CUevent);

// SAFETY: event handles may be used from any thread with the context current.
unsafe impl Send for Event {}

impl Event {
    fn recorded(context: &Context, stream: CUstream) -> Result<Self> {
        let flags = CUevent_flags::CU_EVENT_DISABLE_TIMING;
        let this = Self(event::create(flags).map_err(|e| context.failed("cuEventCreate", e))?);
        this.record(context, stream)?;
        Ok(this)
    }

    fn record(&self, context: &Context, stream: CUstream) -> Result<()> {
        // SAFETY: event and stream are alive.
        unsafe { event::record(self.0, stream) }.map_err(|e| context.failed("cuEventRecord", e))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: created in `recorded`, destroyed once; the driver keeps it for those who wait for it.
        let _ = unsafe { event::destroy(self.0) };
    }
}

/// Memory in which a geometry is found by the launches that follow; nobody else looks at the findings meanwhile.
pub(super) struct Finding<'a> {
    findings: &'a CudaFindings,
    state: MutexGuard<'a, State>,
    geometry: Option<Geometry>,
    pub(super) address: CUdeviceptr,
    on: On,
}

impl Finding<'_> {
    /// To be called when the kernels that find it have been enqueued.
    pub(super) fn done(mut self) -> Result<()> {
        let event = Event::recorded(&self.findings.context, self.on.stream)?;
        let (address, writer) = (self.address, self.on.id);
        let geometry = self.geometry.take().expect("it is taken here alone");
        self.state.found.push(KeptEntry { geometry, address, event, writer, is_there: false });
        Ok(())
    }
}

impl Drop for Finding<'_> {
    fn drop(&mut self) {
        if self.geometry.is_some() {
            // SAFETY: taken on this stream, and not kept: a launch has failed.
            let _ = unsafe { free_async(self.address, self.on.stream) };
        }
    }
}

/// What there is of a geometry.
pub(super) enum Look<'a> {
    /// It lies here, for a launch that is enqueued now.
    There(CUdeviceptr),
    /// It is to be found.
    Wanted(Finding<'a>),
    /// It is not there, and a graph cannot keep it.
    Captured,
}

impl CudaFindings {
    pub(super) fn new(context: &Arc<Context>) -> Self {
        Self { context: context.clone(), state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks for a geometry, which the stream waits for if need be. The context is current.
    pub(super) fn look(&self, geometry: Geometry, on: On) -> Result<Look<'_>> {
        let mut state = self.state();
        if let Some(found) = state.found.iter_mut().find(|f| f.geometry == geometry) {
            self.await_it(found, on)?;
            return Ok(Look::There(found.address));
        }
        if on.captured {
            return Ok(Look::Captured);
        }
        let address = self.context.pool()?.take(&self.context, geometry.bytes, on.stream)?;
        Ok(Look::Wanted(Finding { findings: self, state, geometry: Some(geometry), address, on }))
    }

    fn await_it(&self, found: &mut KeptEntry, on: On) -> Result<()> {
        // A graph may be replayed on any stream.
        if found.is_there || (found.writer == on.id && !on.captured) {
            return Ok(());
        }
        let passed = {
            let _beside = BesideCaptures::begin();
            // SAFETY: the event is alive.
            unsafe { event::query(found.event.0) }
        };
        if passed.is_ok() {
            found.is_there = true;
            return Ok(());
        }
        // Into a graph an event from outside comes as a node of its own. If the query has failed for good, this does
        // too.
        let flags = match on.captured {
            true => CUevent_wait_flags::CU_EVENT_WAIT_EXTERNAL,
            false => CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT,
        };
        // SAFETY: event and stream are alive.
        unsafe { stream::wait_event(on.stream, found.event.0, flags) }
            .map_err(|e| self.context.failed("cuStreamWaitEvent", e))
    }

    /// To be called behind a launch that goes by what was found. Replays of graphs are their owner's care.
    pub(super) fn used(&self, on: On) -> Result<()> {
        if on.captured {
            return Ok(());
        }
        let mut state = self.state();
        match state.used.iter().find(|(id, _)| *id == on.id) {
            Some((_, event)) => event.record(&self.context, on.stream),
            None => {
                let event = Event::recorded(&self.context, on.stream)?;
                state.used.push((on.id, event));
                Ok(())
            }
        }
    }
}

impl Findings for CudaFindings {
    fn as_any(&self) -> &dyn Any {
        self
    }
    fn bytes(&self) -> u64 {
        self.state().found.iter().map(|f| f.geometry.bytes).sum()
    }
    fn count(&self) -> usize {
        self.state().found.len()
    }
}

impl Drop for CudaFindings {
    fn drop(&mut self) {
        let state = std::mem::take(&mut *self.state());
        if state.found.is_empty() && state.used.is_empty() {
            return;
        }
        let Ok(_bound) = self.context.bind() else { return };
        let _beside = BesideCaptures::begin();
        if let Ok(pool) = self.context.pool() {
            let events = state.found.iter().map(|f| f.event.0).chain(state.used.iter().map(|(_, event)| event.0));
            // SAFETY: the addresses came from the pool; every use lies behind one of the events, or is a graph's, whose
            // owner has promised not to replay it.
            unsafe { pool.give_back(state.found.iter().map(|f| f.address), events) };
        }
        // The events go with the context still current.
        drop(state);
    }
}

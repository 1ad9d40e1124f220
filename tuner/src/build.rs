//! From schedules to compiled, loadable kernels: on several cores, while others are measured, reusing what the cache
//! has.

use crate::{Event, Observer};
use flashtune_cache::{Artifact, ArtifactFiles, Origin, Stage};
use flashtune_codegen::{Kernel, TemplateSet};
use flashtune_runtime::Compiler;
use flashtune_runtime::compile::{compile_with, recipe};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::Scope;
use std::time::Instant;

/// What compilation needs.
pub(crate) struct Builder<'a> {
    pub compiler: &'a dyn Compiler,
    pub templates: &'a TemplateSet,
    pub files: ArtifactFiles,
    pub observer: &'a dyn Observer,
    /// Cores of the host, which all jobs of this process share.
    cores: usize,
    ordered: AtomicUsize,
    done: AtomicUsize,
}

/// A schedule to be compiled.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Order {
    /// Whose it is.
    pub candidate: usize,
    pub kernel: Kernel,
    /// It is not begun after this.
    pub deadline: Option<Instant>,
}

/// What came of an order.
#[derive(Debug)]
pub(crate) struct Built {
    pub candidate: usize,
    /// The kernel, or where and why there is none.
    pub outcome: Result<Artifact, (Stage, String)>,
    /// Which of the threads it was.
    pub lane: usize,
    pub began: Instant,
    pub ended: Instant,
}

/// What a thread reports: a kernel, or the panic that ended the attempt.
type Report = Result<Built, Box<dyn Any + Send>>;

/// Orders on their way through the threads. Dropped, it forgets those that were not begun.
pub(crate) struct Compilation<'a> {
    builder: &'a Builder<'a>,
    /// Taken when no more will come.
    orders: Option<Sender<Order>>,
    waiting: Arc<Mutex<Receiver<Order>>>,
    built: Receiver<Report>,
    over: Arc<AtomicBool>,
    outstanding: usize,
    threads: usize,
}

impl<'a> Builder<'a> {
    pub(crate) fn new(
        compiler: &'a dyn Compiler,
        templates: &'a TemplateSet,
        files: ArtifactFiles,
        observer: &'a dyn Observer,
        cores: usize,
    ) -> Self {
        Self { compiler, templates, files, observer, cores, ordered: AtomicUsize::new(0), done: AtomicUsize::new(0) }
    }

    /// Begins to take orders, on so many threads. First come, first served: the best guesses are ready when the time is
    /// up.
    pub(crate) fn start<'scope>(&'a self, scope: &'scope Scope<'scope, 'a>, threads: usize) -> Compilation<'a> {
        let (orders, waiting) = channel();
        let (report, built) = channel();
        let (waiting, over) = (Arc::new(Mutex::new(waiting)), Arc::new(AtomicBool::new(false)));
        let mut started = 0;
        for lane in 0..threads {
            let (waiting, over, report) = (waiting.clone(), over.clone(), report.clone());
            let work = move || {
                while let Some(order) = take(&waiting) {
                    if !over.load(Ordering::Relaxed) && report.send(self.attempt(order, lane)).is_err() {
                        break;
                    }
                }
            };
            // Where there are no more threads to be had, fewer do the work.
            match std::thread::Builder::new().name("flashtune-build".into()).spawn_scoped(scope, work) {
                Ok(_) => started += 1,
                Err(e) => tracing::debug!(error = %e, "a thread for compiling could not be started"),
            }
        }
        Compilation { builder: self, orders: Some(orders), waiting, built, over, outstanding: 0, threads: started }
    }

    fn attempt(&self, order: Order, lane: usize) -> Report {
        catch_unwind(AssertUnwindSafe(|| {
            if order.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                let now = Instant::now();
                let outcome = Err((Stage::Budget, "the time for compiling ran out".into()));
                return Built { candidate: order.candidate, outcome, lane, began: now, ended: now };
            }
            let _core = Core::take(self.cores);
            let began = Instant::now();
            let outcome = self.build(&order.kernel);
            let ended = Instant::now();
            let done = self.done.fetch_add(1, Ordering::Relaxed) + 1;
            if outcome.is_ok() {
                let total = self.ordered.load(Ordering::Relaxed);
                self.observer.event(&Event::Compiled { schedule: &order.kernel.schedule, done, total });
            }
            Built { candidate: order.candidate, outcome, lane, began, ended }
        }))
    }

    fn build(&self, kernel: &Kernel) -> Result<Artifact, (Stage, String)> {
        let key = recipe(kernel, self.templates, self.compiler.id()).key();
        match self.files.get_or_make(&key, || compile_with(self.compiler, kernel, self.templates)) {
            Ok((artifact, origin)) => {
                // Losing the file costs a compilation later, not this job.
                if let Origin::Unkept(e) = origin {
                    tracing::warn!(error = %e, "a compiled kernel could not be stored");
                }
                Ok(artifact)
            }
            Err(e @ flashtune_runtime::Error::Codegen(_)) => Err((Stage::Render, e.to_string())),
            Err(e) => Err((Stage::Compile, e.to_string())),
        }
    }
}

impl Compilation<'_> {
    pub(crate) fn order(&mut self, order: Order) {
        let Some(orders) = &self.orders else { return };
        if orders.send(order).is_ok() {
            self.outstanding += 1;
            self.builder.ordered.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Orders of which nothing has come yet.
    pub(crate) fn outstanding(&self) -> usize {
        self.outstanding
    }

    /// What is ready, if something is.
    pub(crate) fn poll(&mut self) -> Option<Built> {
        let report = match self.built.try_recv() {
            Ok(report) => report,
            Err(TryRecvError::Empty) => return None,
            Err(TryRecvError::Disconnected) => return self.by_hand(),
        };
        Some(self.taken(report))
    }

    /// What is ready next; nothing without an order.
    pub(crate) fn wait(&mut self) -> Option<Built> {
        if self.outstanding == 0 {
            return None;
        }
        if self.threads == 0 {
            return self.by_hand();
        }
        let report = self.built.recv().ok()?;
        Some(self.taken(report))
    }

    /// In this thread, for want of others.
    fn by_hand(&mut self) -> Option<Built> {
        let order = self.waiting.lock().unwrap_or_else(PoisonError::into_inner).try_recv().ok()?;
        let report = self.builder.attempt(order, 0);
        Some(self.taken(report))
    }

    fn taken(&mut self, report: Report) -> Built {
        self.outstanding -= 1;
        report.unwrap_or_else(|panic| resume_unwind(panic))
    }
}

impl Drop for Compilation<'_> {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        self.orders = None;
    }
}

/// The next order; none when there will be no more.
fn take(orders: &Mutex<Receiver<Order>>) -> Option<Order> {
    orders.lock().unwrap_or_else(PoisonError::into_inner).recv().ok()
}

/// The right to keep a core busy: several jobs of one process, each on its device, share the cores.
struct Core;

static TAKEN: Mutex<usize> = Mutex::new(0);
static GIVEN_BACK: Condvar = Condvar::new();

impl Core {
    fn take(cores: usize) -> Self {
        let mut taken = TAKEN.lock().unwrap_or_else(PoisonError::into_inner);
        while *taken >= cores.max(1) {
            taken = GIVEN_BACK.wait(taken).unwrap_or_else(PoisonError::into_inner);
        }
        *taken += 1;
        Core
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        *TAKEN.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        GIVEN_BACK.notify_one();
    }
}

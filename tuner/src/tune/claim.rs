//! How a job begins: with an answer that is already there, with another process's, or with the right to do it.

use super::{STORE_PATIENCE, Tuning};
use crate::search::Past;
use crate::{Error, Event, Outcome, Result, Search};
use flashtune_cache::{Claim, Claims, Holder, Key, Progress, Store, Turn};
use flashtune_codegen::{Family, Kernel};
use flashtune_runtime::Compiler;
use flashtune_runtime::compile::compile_with;
use std::sync::Arc;
use std::time::{Duration, Instant};

type FoundCompiler = Result<Arc<dyn Compiler>>;

/// How long a process that has the device must have been stopped until others go on without it.
const STOPPED: Duration = Duration::from_secs(3);

/// What others may be at.
const SAME: &str = "the same is being tuned";
const DEVICE: &str = "the device is used";

/// How it begins.
pub(super) enum Begun {
    Answered(Box<Outcome>),
    /// The work is this process's, until the claims are dropped: on the record, and on the device.
    Mine {
        compiler: Arc<dyn Compiler>,
        past: Box<Past>,
        claims: [Claim; 2],
    },
}

impl Tuning<'_> {
    pub(crate) fn begin(&mut self, compiler: FoundCompiler) -> Result<Begun> {
        if let Some(outcome) = self.published(&compiler) {
            return Ok(Begun::Answered(Box::new(outcome)));
        }
        // Other templates make other kernels, so they are other work.
        let families = Family::candidates(&self.key.problem, self.key.device.arch);
        let templates: Vec<&str> = families.into_iter().map(|family| self.templates.hash_of(family)).collect();
        let work = Key::of_value("flashtune tuning 1", &(&self.key, templates));
        let mut seen = None;
        let found = &compiler;
        let published = |this: &Self, _: Option<&Holder>| {
            // Decoded once for each publication, not at each look.
            let now = this.dir.snapshot_id();
            (now.is_some() && std::mem::replace(&mut seen, now) != now).then(|| this.published(found)).flatten()
        };
        let on_record = match self.wait(&work, SAME, published) {
            Turn::Done(outcome) => return Ok(Begun::Answered(Box::new(outcome))),
            Turn::Mine(claim) => claim,
            Turn::Theirs => return Err(self.busy(SAME, &work)),
        };
        let past = {
            let store = Store::open_within(self.dir, STORE_PATIENCE)?;
            if let Some(outcome) = self.stored(&store, &compiler)? {
                return Ok(Begun::Answered(Box::new(outcome)));
            }
            let known = compiler.as_ref().map_or(String::new(), |c| c.id().to_string());
            Past::read(&store, &self.key, self.templates, &known)?
        };
        let compiler = compiler?;
        let on_device = self.device()?;
        let job = (
            &work,
            compiler.id().to_string(),
            self.job.seed,
            self.job.max_trials as u64,
            match &self.job.search {
                Search::Guided => (0, &[][..]),
                Search::Even => (1, &[][..]),
                Search::Only(schedules) => (2, schedules.as_slice()),
            },
        );
        self.progress = Progress::open(self.dir, &Key::of_value("flashtune job 1", &job));
        if self.progress.known() > 0 {
            self.observer.event(&Event::Resumed { lessons: self.progress.known() });
        }
        Ok(Begun::Mine { compiler, past: Box::new(past), claims: [on_record, on_device] })
    }

    /// The claim on the device: two that measure at once measure each other, and on the cpu even a compiler disturbs.
    /// A process that was stopped measures nothing, so nobody waits for one; when it goes on, what both measure beside
    /// each other is told by its noise.
    fn device(&mut self) -> Result<Claim> {
        let mut device = Key::of_value("flashtune device 1", &self.runner.place());
        loop {
            match self.wait(&device, DEVICE, |_, stopped| stopped.cloned()) {
                Turn::Mine(claim) => return Ok(claim),
                Turn::Theirs => return Err(self.busy(DEVICE, &device)),
                Turn::Done(holder) => {
                    self.observer.event(&Event::Passed { holder: &holder });
                    // Those who go on without it still wait for each other.
                    device = Key::of_value("flashtune device beside one stopped 1", &(device, holder.pid));
                }
            }
        }
    }

    /// Waits for a turn, and says for whom when it does not come at once. `done` is told of a holder that has been
    /// stopped for a while.
    fn wait<T>(
        &mut self,
        work: &Key,
        what: &'static str,
        mut done: impl FnMut(&Self, Option<&Holder>) -> Option<T>,
    ) -> Turn<T> {
        let claims = Claims::new(self.dir);
        let turn = claims.wait(work, Duration::ZERO, || done(self, None));
        if !matches!(turn, Turn::Theirs) || self.job.patience.is_zero() {
            return turn;
        }
        let mut told = None;
        let mut tell = |this: &Self| {
            let holder = claims.holder(work);
            let stopped = holder.as_ref().is_some_and(Holder::is_stopped);
            // A file that is just being written says nothing; nor is anybody told that it waits for itself.
            let news = match &told {
                None => true,
                Some((_, known, was_stopped)) => {
                    holder.as_ref().is_some_and(|h| !h.is_this()) && (known != &holder || *was_stopped != stopped)
                }
            };
            if news {
                this.observer.event(&Event::Waiting { what, holder: holder.as_ref(), stopped });
                told = Some((Instant::now(), holder, stopped));
            }
            let (since, holder, stopped) = told.as_ref()?;
            holder.clone().filter(|_| *stopped && since.elapsed() >= STOPPED)
        };
        tell(&*self);
        self.runner.rest();
        let start = Instant::now();
        let turn = claims.wait(work, self.job.patience, || {
            let stopped = tell(&*self);
            done(self, stopped.as_ref())
        });
        self.observer.event(&Event::Waited { duration: start.elapsed() });
        turn
    }

    fn busy(&self, what: &'static str, work: &Key) -> Error {
        let holder = Claims::new(self.dir).holder(work);
        let by = match &holder {
            Some(holder) => format!("{what} by {holder}; {}", holder.remedy()),
            None => format!("{what} by another process; look for other tuners of this cache folder"),
        };
        Error::Busy { problem: self.job.problem.to_string(), shape: self.job.shape, by }
    }

    /// Whether a stored record answers the job.
    fn answers(&self, record: &flashtune_cache::Record, compiler: &FoundCompiler) -> bool {
        record.key == self.key
            && record.provenance.templates == self.templates.hash_of(record.schedule.family())
            // One that was built and never measured is no answer.
            && !record.finalists.is_empty()
            // Without a compiler nothing could be tuned anyway, so what is stored is the answer.
            && compiler.as_ref().map_or(true, |c| c.id().to_string() == record.provenance.compiler)
    }

    /// The answer that readers see, if it is one for these templates and this compiler, with its kernel at hand. Takes
    /// no lock.
    fn published(&self, compiler: &FoundCompiler) -> Option<Outcome> {
        if self.job.force {
            return None;
        }
        let bundle = self.dir.snapshot().ok()??;
        let record = bundle.records().filter_map(|r| r.ok()).map(|(r, _)| r).find(|r| self.answers(r, compiler))?;
        bundle.artifact(&record.artifact).ok().flatten()?;
        self.observer.event(&Event::Cached(&record));
        Some(Outcome { record, cached: true, trials: Vec::new(), snapshot: self.dir.snapshot_path() })
    }

    /// The answer of the journal. Publishes it, and makes its kernel anew if it was lost.
    fn stored(&self, store: &Store, compiler: &FoundCompiler) -> Result<Option<Outcome>> {
        if self.job.force {
            return Ok(None);
        }
        let Some(record) = store.record(&self.key)?.filter(|r| self.answers(r, compiler)) else { return Ok(None) };
        if self.artifacts.get(&record.artifact).is_none()
            && let Ok(compiler) = compiler
        {
            // The kernel was lost on the way; its schedule was not.
            let kernel = Kernel { problem: self.key.problem, schedule: record.schedule, arch: self.key.device.arch };
            let artifact = compile_with(&**compiler, &kernel, self.templates)?;
            if self.artifacts.put(&artifact)? != record.artifact {
                return Ok(None);
            }
        }
        let snapshot = store.publish(&self.artifacts)?;
        self.observer.event(&Event::Cached(&record));
        Ok(Some(Outcome { record, cached: true, trials: Vec::new(), snapshot }))
    }
}

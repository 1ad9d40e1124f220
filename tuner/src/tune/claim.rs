//! How a job begins: with an answer that is already there, with another process's, or with the right to do it.

use super::{STORE_PATIENCE, Tuning};
use crate::search::Past;
use crate::{Error, Event, Outcome, Result, Search};
use flashtune_cache::{Claim, Claims, Key, Progress, Store, Turn};
use flashtune_codegen::{Family, Kernel};
use flashtune_runtime::Compiler;
use flashtune_runtime::compile::compile_with;
use std::sync::Arc;
use std::time::{Duration, Instant};

type Found = Result<Arc<dyn Compiler>>;

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
    pub fn begin(&mut self, compiler: Found) -> Result<Begun> {
        if let Some(outcome) = self.published(&compiler) {
            return Ok(Begun::Answered(Box::new(outcome)));
        }
        // Other templates make other kernels, so they are other work.
        let families = Family::candidates(&self.key.problem, self.key.device.arch);
        let templates: Vec<&str> = families.into_iter().map(|family| self.templates.hash_of(family)).collect();
        let work = Key::of_value("flashtune tuning 1", &(&self.key, templates));
        let mut seen = None;
        let found = &compiler;
        let published = |this: &Self| {
            // Decoded once for each publication, not at each look.
            let now = this.dir.snapshot_id();
            (now.is_some() && std::mem::replace(&mut seen, now) != now).then(|| this.published(found)).flatten()
        };
        let on_record = match self.wait(&work, "another process tunes the same", published) {
            Turn::Done(outcome) => return Ok(Begun::Answered(Box::new(outcome))),
            Turn::Mine(claim) => claim,
            Turn::Theirs => return Err(self.busy()),
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
        // Two that measure at once measure each other; on the cpu even a compiler disturbs.
        let device = Key::of_value("flashtune device 1", &self.runner.place());
        let on_device = match self.wait::<()>(&device, "another process uses the device", |_| None) {
            Turn::Mine(claim) => claim,
            _ => return Err(self.busy()),
        };
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

    /// Waits for a turn, and says so when it does not come at once.
    fn wait<T>(&mut self, work: &Key, what: &'static str, mut done: impl FnMut(&Self) -> Option<T>) -> Turn<T> {
        let claims = Claims::new(self.dir);
        let turn = claims.wait(work, Duration::ZERO, || done(self));
        if !matches!(turn, Turn::Theirs) || self.job.patience.is_zero() {
            return turn;
        }
        self.observer.event(&Event::Waiting { what });
        self.runner.rest();
        let start = Instant::now();
        let turn = claims.wait(work, self.job.patience, || done(self));
        self.observer.event(&Event::Waited { duration: start.elapsed() });
        turn
    }

    fn busy(&self) -> Error {
        Error::Busy { problem: self.job.problem.to_string(), shape: self.job.shape }
    }

    /// Whether a stored record answers the job.
    fn answers(&self, record: &flashtune_cache::Record, compiler: &Found) -> bool {
        record.key == self.key
            && record.provenance.templates == self.templates.hash_of(record.schedule.family())
            // One that was built and never measured is no answer.
            && !record.finalists.is_empty()
            // Without a compiler nothing could be tuned anyway, so what is stored is the answer.
            && compiler.as_ref().map_or(true, |c| c.id().to_string() == record.provenance.compiler)
    }

    /// The answer that readers see, if it is one for these templates and this compiler, with its kernel at hand. Takes
    /// no lock.
    fn published(&self, compiler: &Found) -> Option<Outcome> {
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
    fn stored(&self, store: &Store, compiler: &Found) -> Result<Option<Outcome>> {
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

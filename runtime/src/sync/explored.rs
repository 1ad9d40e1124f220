//! Locks that let a model checker choose who goes on: within [`explore`] its threads run one at a time, and before each
//! operation any of them may be next. Who cannot have a lock tries again at its next turn, so threads that wait for
//! each other run out of turns, which fails the test. Elsewhere these are std's locks.

use std::cell::Cell;
use std::ops::{Deref, DerefMut};
use std::sync::{LockResult, PoisonError, RwLockReadGuard, RwLockWriteGuard, TryLockError, TryLockResult};

thread_local! {
    /// Whether this thread is the one on which a model checker runs all of its own.
    static EXPLORING: Cell<bool> = const { Cell::new(false) };
}

/// Turns that one scene may take: many times what any needs.
const TURNS: usize = 200_000;
/// Rendering templates takes more than the checker's usual stack.
const STACK: usize = 1 << 21;

/// Plays a scene, whose threads are those of [`shuttle::thread`], with so many orders of events, drawn at random. A
/// failure names the seed that repeats it (`SHUTTLE_RANDOM_SEED`).
pub(crate) fn explore(orders: u64, scene: impl Fn() + Send + Sync + 'static) {
    let orders = std::env::var("FLASHTUNE_INTERLEAVINGS").ok().and_then(|n| n.parse().ok()).unwrap_or(orders);
    let mut config = shuttle::Config::new();
    config.stack_size = STACK;
    config.max_steps = shuttle::MaxSteps::FailAfter(TURNS);
    let scheduler = shuttle::scheduler::RandomScheduler::new(orders as usize);
    EXPLORING.set(true);
    let played = shuttle::Runner::new(scheduler, config).run(scene);
    EXPLORING.set(false);
    assert_eq!(played as u64, orders);
}

/// Where another thread may go on.
pub(crate) fn point() {
    if EXPLORING.get() {
        shuttle::thread::yield_now();
    }
}

/// A lock by trying until it can be had; by waiting where nothing is explored.
fn had<G>(attempt: impl Fn() -> TryLockResult<G>, wait: impl FnOnce() -> LockResult<G>) -> LockResult<G> {
    if !EXPLORING.get() {
        return wait();
    }
    loop {
        point();
        match attempt() {
            Ok(guard) => return Ok(guard),
            Err(TryLockError::Poisoned(e)) => return Err(e),
            Err(TryLockError::WouldBlock) => {}
        }
    }
}

#[derive(Default)]
pub(crate) struct Mutex<T>(std::sync::Mutex<T>);

/// With the lock that it is of, which a wait takes again.
pub(crate) struct MutexGuard<'a, T> {
    guard: Option<std::sync::MutexGuard<'a, T>>,
    of: &'a Mutex<T>,
}

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(std::sync::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> LockResult<MutexGuard<'_, T>> {
        let guard = |guard| MutexGuard { guard: Some(guard), of: self };
        let had = had(|| self.0.try_lock(), || self.0.lock());
        had.map(guard).map_err(|e| PoisonError::new(guard(e.into_inner())))
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        self.guard.as_ref().expect("taken only by a wait")
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.guard.as_mut().expect("taken only by a wait")
    }
}

#[derive(Default)]
pub(crate) struct RwLock<T>(std::sync::RwLock<T>);

impl<T> RwLock<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(std::sync::RwLock::new(value))
    }

    pub(crate) fn read(&self) -> LockResult<RwLockReadGuard<'_, T>> {
        had(|| self.0.try_read(), || self.0.read())
    }

    pub(crate) fn write(&self) -> LockResult<RwLockWriteGuard<'_, T>> {
        had(|| self.0.try_write(), || self.0.write())
    }
}

pub(crate) struct Condvar(std::sync::Condvar);

impl Condvar {
    pub(crate) fn new() -> Self {
        Self(std::sync::Condvar::new())
    }

    pub(crate) fn wait_while<'a, T>(
        &self,
        mut guard: MutexGuard<'a, T>,
        mut condition: impl FnMut(&mut T) -> bool,
    ) -> LockResult<MutexGuard<'a, T>> {
        let of = guard.of;
        if !EXPLORING.get() {
            let inner = guard.guard.take().expect("taken only by a wait");
            let guard = |guard| MutexGuard { guard: Some(guard), of };
            let woken = self.0.wait_while(inner, condition);
            return woken.map(guard).map_err(|e| PoisonError::new(guard(e.into_inner())));
        }
        while condition(&mut guard) {
            drop(guard);
            guard = of.lock()?;
        }
        Ok(guard)
    }

    pub(crate) fn notify_all(&self) {
        point();
        self.0.notify_all();
    }
}

#[derive(Default)]
pub(crate) struct OnceLock<T>(std::sync::OnceLock<T>);

impl<T> OnceLock<T> {
    pub(crate) fn new() -> Self {
        Self(std::sync::OnceLock::new())
    }

    pub(crate) fn get(&self) -> Option<&T> {
        point();
        self.0.get()
    }

    pub(crate) fn set(&self, value: T) -> Result<(), T> {
        point();
        self.0.set(value)
    }

    pub(crate) fn get_or_init(&self, value: impl FnOnce() -> T) -> &T {
        point();
        self.0.get_or_init(value)
    }
}

//! The threads that all kernels share.
//!
//! A loop's items are claimed one by one from a counter, so any thread may run any item: a kernel's result must
//! not depend on it. Workers spin for some tens of microseconds after a loop, because the next kernel
//! of a forward pass is that near, and sleep afterwards.
#![allow(unsafe_code)]

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::hint::spin_loop;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::process;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread;

use crate::topology::physical_cores;

/// Pauses (10 to 40 nanoseconds each) before an idle worker sleeps.
const SPINS_BEFORE_SLEEP: u32 = 2000;
/// Pauses before a caller that waits for its workers gives its time slice away.
const SPINS_BEFORE_YIELD: u32 = 2000;

/// `State::word`: the loop takes new workers.
const OPEN: u64 = 1 << 15;
/// `State::word`: workers inside the loop.
const ACTIVE: u64 = OPEN - 1;
/// `State::word`: the loop's number lies above.
const EPOCH_SHIFT: u32 = 16;

type Body<'a> = dyn Fn(usize) + Sync + 'a;

/// Threads asked for; 0: as many as there are cores.
static NUM_THREADS: AtomicUsize = AtomicUsize::new(0);
/// The pool of the process named in it; never freed, replaced after a fork.
static POOL: AtomicPtr<ProcessPool> = AtomicPtr::new(ptr::null_mut());

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Threads that a loop may use, the caller's included.
#[must_use]
pub fn num_threads() -> usize {
    match NUM_THREADS.load(Ordering::Relaxed) {
        0 => physical_cores(),
        threads => threads,
    }
}

/// Use that many threads from the next loop on, the caller's included; 0 for one a physical core.
pub fn set_num_threads(threads: usize) {
    NUM_THREADS.store(threads.min(ACTIVE as usize), Ordering::Relaxed);
}

/// Run `body(0)` to `body(items - 1)`, each once, on the pool and the calling thread; returns when all are done.
///
/// A loop within a loop runs on its own thread alone, and so does one that meets another thread's loop.
///
/// # Panics
/// With the first panic of the body; items not begun by then are skipped.
pub fn parallel_for(items: usize, body: &Body<'_>) {
    let threads = num_threads().min(items);
    if threads <= 1 || INSIDE.get() {
        return (0..items).for_each(body);
    }
    match process_pool().workers.try_lock() {
        Ok(workers) => run(workers, items, body),
        Err(TryLockError::Poisoned(poisoned)) => run(poisoned.into_inner(), items, body),
        Err(TryLockError::WouldBlock) => (0..items).for_each(body),
    }
}

fn run(mut workers: MutexGuard<'_, Option<Workers>>, items: usize, body: &Body<'_>) {
    let threads = num_threads();
    let workers = match &mut *workers {
        Some(workers) if workers.threads == threads => workers,
        other => other.insert(Workers::start(threads)),
    };
    if let Some(payload) = workers.shared.run(items, body) {
        resume_unwind(payload);
    }
}

struct ProcessPool {
    process_id: u32,
    workers: Mutex<Option<Workers>>,
}

/// This process' pool. A forked child has none of its parent's threads, and its copy of the lock may never be
/// released, so it starts a new pool.
fn process_pool() -> &'static ProcessPool {
    let process_id = process::id();
    loop {
        let current = POOL.load(Ordering::Acquire);
        // SAFETY: null, or leaked below and never freed.
        if let Some(pool) = unsafe { current.as_ref() }
            && pool.process_id == process_id
        {
            return pool;
        }
        let fresh = Box::into_raw(Box::new(ProcessPool { process_id, workers: Mutex::new(None) }));
        if POOL.compare_exchange(current, fresh, Ordering::AcqRel, Ordering::Acquire).is_err() {
            // SAFETY: `fresh` came from `Box::into_raw` and was not published.
            drop(unsafe { Box::from_raw(fresh) });
        }
    }
}

/// Running threads; they end when this is dropped.
struct Workers {
    threads: usize,
    shared: Arc<Shared>,
}

impl Workers {
    /// One thread fewer than asked for: the caller is one. Fewer still where the system refuses.
    fn start(threads: usize) -> Self {
        let shared = Arc::new(Shared::default());
        for index in 1..threads {
            let shared = Arc::clone(&shared);
            let worker = thread::Builder::new().name(format!("octavo-cpu-{index}"));
            if worker.spawn(move || shared.work()).is_err() {
                break;
            }
        }
        Self { threads, shared }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.shared.stopped.store(true, Ordering::SeqCst);
        let _asleep = self.shared.asleep();
        self.shared.wake.notify_all();
    }
}

/// Keeps what different threads write on different cache lines (two: processors fetch them in pairs).
#[derive(Default)]
#[repr(align(128))]
struct Line<T>(T);

#[derive(Clone, Copy)]
struct Job {
    body: *const Body<'static>,
    items: usize,
}

#[derive(Default)]
struct Shared {
    /// The loop's number, whether it is open, and how many workers are inside.
    word: Line<AtomicU64>,
    /// The next item to claim.
    next: Line<AtomicUsize>,
    /// Written only while no worker is inside and the loop is closed.
    job: Line<UnsafeCell<Option<Job>>>,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    stopped: AtomicBool,
    /// Mirrors the guarded count, so that a caller need not take the lock when all are awake.
    sleepers: Line<AtomicUsize>,
    sleep: Mutex<()>,
    wake: Condvar,
}

// SAFETY: `job` is written by the one caller that holds the pool's lock while no worker is inside, and read by workers
// that have entered (acquire) an open loop (released by that caller); the body is `Sync` and outlives the loop, which
// ends only when all workers have left.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    fn asleep(&self) -> MutexGuard<'_, ()> {
        self.sleep.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The caller's side of a loop; the pool's lock is held. Returns the first panic.
    fn run(&self, items: usize, body: &Body<'_>) -> Option<Box<dyn Any + Send>> {
        // SAFETY: only the lifetime changes; the pointer is used until this function returns, within the borrow.
        let body: *const Body<'static> =
            unsafe { std::mem::transmute::<&Body<'_>, &'static Body<'static>>(body) };
        let job = Job { body, items };
        // SAFETY: the loop before is closed and left, so this caller alone touches the cell.
        unsafe { *self.job.0.get() = Some(job) };
        self.next.0.store(0, Ordering::Relaxed);
        let epoch = (self.word.0.load(Ordering::Relaxed) >> EPOCH_SHIFT) + 1;
        self.word.0.store(epoch << EPOCH_SHIFT | OPEN, Ordering::SeqCst);
        self.wake_sleepers(items - 1);

        INSIDE.set(true);
        self.claim(job);
        INSIDE.set(false);

        self.word.0.fetch_and(!OPEN, Ordering::AcqRel);
        let mut spins = 0;
        while self.word.0.load(Ordering::Acquire) & ACTIVE != 0 {
            spins += 1;
            if spins < SPINS_BEFORE_YIELD { spin_loop() } else { thread::yield_now() }
        }
        self.panic.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn wake_sleepers(&self, wanted: usize) {
        fence(Ordering::SeqCst);
        let sleepers = self.sleepers.0.load(Ordering::SeqCst);
        if sleepers == 0 {
            return;
        }
        let _asleep = self.asleep();
        if wanted >= sleepers {
            self.wake.notify_all();
        } else {
            (0..wanted).for_each(|_| self.wake.notify_one());
        }
    }

    /// Run items until none is left. A panic ends the loop for all.
    fn claim(&self, job: Job) {
        // SAFETY: the loop is open or this worker is inside: `run` has not returned, so the body lives.
        let body = unsafe { &*job.body };
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            loop {
                let item = self.next.0.fetch_add(1, Ordering::Relaxed);
                if item >= job.items {
                    break;
                }
                body(item);
            }
        }));
        if let Err(payload) = outcome {
            self.next.0.store(job.items, Ordering::Relaxed);
            let mut first = self.panic.lock().unwrap_or_else(PoisonError::into_inner);
            first.get_or_insert(payload);
        }
    }

    /// The worker's loop.
    fn work(&self) {
        INSIDE.set(true);
        let mut seen = 0;
        while let Some(word) = self.wait(seen) {
            seen = word >> EPOCH_SHIFT;
            if self.enter(seen) {
                // SAFETY: no thread writes the cell while a loop is open.
                if let Some(job) = unsafe { *self.job.0.get() } {
                    self.claim(job);
                }
                self.word.0.fetch_sub(1, Ordering::Release);
            }
        }
    }

    /// Count this worker in, unless the loop was closed or replaced meanwhile.
    fn enter(&self, epoch: u64) -> bool {
        let enter = |word| (word >> EPOCH_SHIFT == epoch && word & OPEN != 0).then_some(word + 1);
        self.word.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, enter).is_ok()
    }

    /// Wait for a loop newer than `seen`; `None` when the pool ends.
    fn wait(&self, seen: u64) -> Option<u64> {
        let newer = |order| {
            let word = self.word.0.load(order);
            (word >> EPOCH_SHIFT != seen).then_some(word)
        };
        for _ in 0..SPINS_BEFORE_SLEEP {
            if let Some(word) = newer(Ordering::Acquire) {
                return Some(word);
            }
            spin_loop();
        }
        let mut asleep = self.asleep();
        self.sleepers.0.fetch_add(1, Ordering::SeqCst);
        let found = loop {
            fence(Ordering::SeqCst);
            if self.stopped.load(Ordering::SeqCst) {
                break None;
            }
            if let Some(word) = newer(Ordering::SeqCst) {
                break Some(word);
            }
            asleep = self.wake.wait(asleep).unwrap_or_else(PoisonError::into_inner);
        };
        self.sleepers.0.fetch_sub(1, Ordering::SeqCst);
        found
    }
}

/// For tests that set the number of threads, which is the process': they take turns.
#[cfg(test)]
pub(crate) mod testing {
    use super::{Mutex, MutexGuard, PoisonError, set_num_threads};

    static TURN: Mutex<()> = Mutex::new(());

    /// While it lives, no other test sets the number; dropping it restores the default.
    pub(crate) struct Turn(#[expect(dead_code, reason = "held")] MutexGuard<'static, ()>);

    impl Turn {
        pub(crate) fn with_threads(threads: usize) -> Self {
            let turn = Self(TURN.lock().unwrap_or_else(PoisonError::into_inner));
            set_num_threads(threads);
            turn
        }
    }

    impl Drop for Turn {
        fn drop(&mut self) {
            set_num_threads(0);
        }
    }
}

#[cfg(test)]
mod tests;

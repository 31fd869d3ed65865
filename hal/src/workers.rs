//! Threads that are bound to one device for their whole life.

use std::{
    cell::Cell,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
    },
    thread,
};

use crossbeam_channel::{Receiver, Sender, bounded, unbounded};
use parking_lot::Mutex;

use crate::{Bound, Deadline, Device, DeviceExt, DeviceUuid, Error, Kind, Result, stream};

thread_local! {
    /// The device whose worker this thread is.
    static WORKER_OF: Cell<Option<DeviceUuid>> = const { Cell::new(None) };
}

/// How many workers may be lost to driver calls that never return before new work is refused.
const LOST_MAX: usize = 32;

/// Runs on a worker; `false` when the caller gave up meanwhile and another worker has the place, so that this one ends.
type Job<D> = Box<dyn for<'a, 'd> FnOnce(&'a Bound<'d, D>) -> bool + Send>;

// How far a job has come. Its caller's deadline makes it abandoned wherever it is.
const QUEUED: u8 = 0;
const RUNNING: u8 = 1;
const FINISHED: u8 = 2;
const ABANDONED: u8 = 3;

/// A pool of threads, each bound to the device that was captured when the pool was made. A worker never asks which
/// device is current: a thread without a context would answer 0.
///
/// A job that does not return by its deadline is left to itself and its worker is replaced, so a hanging driver call
/// holds up nobody else; a job that has not begun by then never runs. Dropping the pool lets idle workers end and does
/// not wait for hanging ones.
#[derive(Debug)]
pub struct Workers<D: Device> {
    device: D,
    jobs: Sender<Job<D>>,
    queue: Receiver<Job<D>>,
    staff: Arc<Mutex<Staff>>,
}

/// How the pool is staffed.
#[derive(Debug, Default)]
struct Staff {
    /// Jobs that run although their callers gave up.
    lost: usize,
    /// Places of workers that are at such a job.
    vacant: usize,
    /// Replacements that are being bound.
    starting: usize,
}

impl Staff {
    /// Whether there is a place for one more worker, who has it then.
    fn take_place(&mut self) -> bool {
        let free = self.vacant > 0;
        self.vacant -= usize::from(free);
        free
    }
}

impl<D: Device> Workers<D> {
    /// Starts `count` workers (at least one) and returns when each is bound.
    ///
    /// *Errors*: what [`Device::bind_owned_thread`] said on the first worker that could not be bound.
    pub fn start(device: D, count: usize) -> Result<Self> {
        let (jobs, queue) = unbounded();
        let workers = Workers { device, jobs, queue, staff: Arc::default() };
        for _ in 0..count.max(1) {
            let (ready, started) = bounded(1);
            workers.spawn(move |outcome| {
                let bound = outcome.is_ok();
                let _ = ready.send(outcome);
                bound
            })?;
            started.recv().unwrap_or_else(|_| Err(workers.error(Kind::Driver, "start_worker")))?;
        }
        Ok(workers)
    }

    /// The device that every worker is bound to.
    pub fn device(&self) -> &D {
        &self.device
    }

    /// Runs `work` on a worker and waits for its result until `deadline`. On a worker of the same device it runs right
    /// there: whoever gave that worker its job watches the deadline.
    ///
    /// *Errors*: [`Kind::Timeout`] when the deadline passes first: `work` may still be running then, so it owns all that
    /// it touches. A panic in `work` is an error too.
    pub fn run<R: Send + 'static>(
        &self,
        deadline: Deadline,
        op: &'static str,
        work: impl FnOnce(&Bound<'_, D>) -> Result<R> + Send + 'static,
    ) -> Result<R> {
        if self.staff.lock().lost >= LOST_MAX {
            return Err(self.error(Kind::Timeout, op).detail(format!(
                "{LOST_MAX} earlier calls into the driver never returned; restart the process"
            )));
        }
        if WORKER_OF.get() == Some(self.device.identity().uuid) {
            return work(&self.device.bind_current()?);
        }
        // Where a replacement failed earlier.
        self.fill();
        let (answer, result) = bounded(1);
        let state = Arc::new(AtomicU8::new(QUEUED));
        let job: Job<D> = Box::new({
            let (state, staff) = (Arc::clone(&state), Arc::clone(&self.staff));
            move |bound| {
                let begun = state.compare_exchange(QUEUED, RUNNING, Ordering::AcqRel, Ordering::Acquire);
                if begun.is_err() {
                    // Given up while still queued: must not run any more.
                    return true;
                }
                // The channel holds one answer, so this cannot block.
                let _ = answer.send(catch_unwind(AssertUnwindSafe(|| work(bound))));
                if state.swap(FINISHED, Ordering::AcqRel) == RUNNING {
                    return true;
                }
                let mut staff = staff.lock();
                staff.lost -= 1;
                staff.take_place()
            }
        });
        let _ = self.jobs.send(job);
        let mut outcome = match deadline.instant() {
            Some(at) => result.recv_deadline(at).ok(),
            None => result.recv().ok(),
        };
        if outcome.is_none() {
            // Locked before the job can see it, so that the job finds itself counted.
            let mut staff = self.staff.lock();
            match state.swap(ABANDONED, Ordering::AcqRel) {
                RUNNING => {
                    staff.lost += 1;
                    staff.vacant += 1;
                    drop(staff);
                    self.fill();
                }
                // It finished at the last moment.
                FINISHED => outcome = result.try_recv().ok(),
                _ => {}
            }
        }
        match outcome {
            Some(Ok(result)) => result,
            Some(Err(_)) => Err(self.error(Kind::Driver, op).detail("the work panicked on its worker")),
            None => Err(self.error(Kind::Timeout, op)),
        }
    }

    /// Runs `work` bound, on the calling thread where that can be given back as it was, else on a worker. The stream
    /// that the caller named goes along.
    ///
    /// *Errors*: as [`Device::bind_current`] and [`run`](Workers::run).
    pub fn bound<R: Send + 'static>(
        &self,
        deadline: Deadline,
        op: &'static str,
        work: impl FnOnce(&Bound<'_, D>) -> Result<R> + Send + 'static,
    ) -> Result<R> {
        match self.device.bind_current() {
            Ok(bound) => work(&bound),
            Err(e) if e.kind() == Kind::CannotRestore => {
                let named = stream::named(&self.device);
                self.run(deadline, op, move |bound| match named {
                    Some(stream) => bound.device().with_stream(stream, || work(bound)),
                    None => work(bound),
                })
            }
            Err(e) => Err(e),
        }
    }

    /// Starts a worker for each vacant place and does not wait for it: where the driver hangs, binding hangs too. A
    /// failure is logged, and the next call tries again.
    fn fill(&self) {
        let missing = {
            let mut staff = self.staff.lock();
            let missing = staff.vacant.saturating_sub(staff.starting);
            staff.starting += missing;
            missing
        };
        for _ in 0..missing {
            let staff = Arc::clone(&self.staff);
            let started = move |outcome: Result<()>| {
                let mut staff = staff.lock();
                staff.starting -= 1;
                match outcome {
                    // Whoever was to be replaced may be back first.
                    Ok(()) => staff.take_place(),
                    Err(e) => {
                        tracing::error!(error = %e, "a worker could not be replaced");
                        false
                    }
                }
            };
            if let Err(e) = self.spawn(started.clone()) {
                started(Err(e));
            }
        }
    }

    /// Starts a worker. It says whether it could be bound, and hears whether it is to work.
    fn spawn(&self, started: impl FnOnce(Result<()>) -> bool + Send + 'static) -> Result<()> {
        let (device, queue) = (self.device.clone(), self.queue.clone());
        let name = format!("haulier-{}", device.identity());
        thread::Builder::new()
            .name(name)
            .spawn(move || match device.bind_owned_thread() {
                Err(e) => {
                    started(Err(e));
                }
                Ok(bound) => {
                    WORKER_OF.set(Some(device.identity().uuid));
                    if !started(Ok(())) {
                        return;
                    }
                    for job in queue {
                        if !job(&bound) {
                            break;
                        }
                    }
                }
            })
            .map(drop)
            .map_err(|e| self.error(Kind::OutOfMemory, "start_worker").with_source(e))
    }

    fn error(&self, kind: Kind, op: &'static str) -> Error {
        let identity = self.device.identity();
        Error::new(kind, identity.backend, op).on(identity.logical)
    }
}

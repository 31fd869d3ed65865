//! Threads that are bound to one device for their whole life.

use std::{
    cell::Cell,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicU8, AtomicUsize, Ordering},
    },
    thread,
};

use crossbeam_channel::{Receiver, Sender, bounded, unbounded};

use crate::{Bound, Deadline, Device, DeviceExt, DeviceUuid, Error, Kind, Result, stream};

thread_local! {
    /// The device whose worker this thread is.
    static WORKER_OF: Cell<Option<DeviceUuid>> = const { Cell::new(None) };
}

/// How many workers may be lost to driver calls that never return before new work is refused.
const LOST_MAX: usize = 32;

/// Runs on a worker; `false` when the caller has given up, so that the worker, already replaced, ends.
type Job<D> = Box<dyn for<'a, 'd> FnOnce(&'a Bound<'d, D>) -> bool + Send>;

// Who was first, the job or its caller's deadline.
const WAITING: u8 = 0;
const FINISHED: u8 = 1;
const ABANDONED: u8 = 2;

/// A pool of threads, each bound to the device that was captured when the pool was made. A worker never asks which
/// device is current: a thread without a context would answer 0.
///
/// A job that does not return by its deadline is left to itself and its worker is replaced, so a hanging driver call
/// holds up nobody else. Dropping the pool lets idle workers end and does not wait for hanging ones.
#[derive(Debug)]
pub struct Workers<D: Device> {
    device: D,
    jobs: Sender<Job<D>>,
    queue: Receiver<Job<D>>,
    lost: Arc<AtomicUsize>,
}

impl<D: Device> Workers<D> {
    /// Starts `count` workers (at least one) and returns when each is bound.
    ///
    /// *Errors*: what [`Device::bind_owned_thread`] said on the first worker that could not be bound.
    pub fn start(device: D, count: usize) -> Result<Self> {
        let (jobs, queue) = unbounded();
        let workers = Workers { device, jobs, queue, lost: Arc::default() };
        for _ in 0..count.max(1) {
            workers.spawn()?;
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
        if self.lost.load(Ordering::Relaxed) >= LOST_MAX {
            return Err(self.error(Kind::Timeout, op).detail(format!(
                "{LOST_MAX} earlier calls into the driver never returned; restart the process"
            )));
        }
        if WORKER_OF.get() == Some(self.device.identity().uuid) {
            return work(&self.device.bind_current()?);
        }
        let (answer, result) = bounded(1);
        let state = Arc::new(AtomicU8::new(WAITING));
        let job: Job<D> = Box::new({
            let (state, lost) = (Arc::clone(&state), Arc::clone(&self.lost));
            move |bound| {
                // Given up while still queued: must not run any more.
                if state.load(Ordering::Acquire) == WAITING {
                    // The channel holds one answer, so this cannot block.
                    let _ = answer.send(catch_unwind(AssertUnwindSafe(|| work(bound))));
                }
                let wanted = state.swap(FINISHED, Ordering::AcqRel) == WAITING;
                if !wanted {
                    lost.fetch_sub(1, Ordering::Relaxed);
                }
                wanted
            }
        });
        let _ = self.jobs.send(job);
        let mut outcome = match deadline.instant() {
            Some(at) => result.recv_deadline(at).ok(),
            None => result.recv().ok(),
        };
        if outcome.is_none() {
            self.lost.fetch_add(1, Ordering::Relaxed);
            if state.swap(ABANDONED, Ordering::AcqRel) == WAITING {
                self.spawn()?;
            } else {
                // It finished at the last moment.
                self.lost.fetch_sub(1, Ordering::Relaxed);
                outcome = result.try_recv().ok();
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

    fn spawn(&self) -> Result<()> {
        let (ready, started) = bounded(1);
        let (device, queue) = (self.device.clone(), self.queue.clone());
        let name = format!("haulier-{}", device.identity());
        thread::Builder::new()
            .name(name)
            .spawn(move || match device.bind_owned_thread() {
                Err(e) => {
                    let _ = ready.send(Err(e));
                }
                Ok(bound) => {
                    WORKER_OF.set(Some(device.identity().uuid));
                    let _ = ready.send(Ok(()));
                    for job in queue {
                        if !job(&bound) {
                            break;
                        }
                    }
                }
            })
            .map_err(|e| self.error(Kind::OutOfMemory, "start_worker").source(e))?;
        started.recv().unwrap_or_else(|_| Err(self.error(Kind::Driver, "start_worker")))
    }

    fn error(&self, kind: Kind, op: &'static str) -> Error {
        let identity = self.device.identity();
        Error::new(kind, identity.backend, op).on(identity.logical)
    }
}

//! Streams: in-order queues of host work, each with a thread of its own.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use hal::{Deadline, Kind, Result};
use parking_lot::RwLock;

use crate::{
    CpuDevice,
    error::error,
    queue::{Mark, NotDone, Queue},
};

/// A stream's handle. Plain data: it does not keep the stream alive, and using it after that is an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CpuStream(u64);

impl CpuStream {
    /// The device's default stream. It has no thread until something is queued on it.
    pub const DEFAULT: CpuStream = CpuStream(0);

    /// The handle with this number, which need not name a stream.
    pub fn from_raw(raw: u64) -> Self {
        CpuStream(raw)
    }

    /// The handle's number.
    pub fn raw(self) -> u64 {
        self.0
    }
}

/// A stream's owner. Dropping it destroys the stream: what is queued still runs, without being waited for, then the
/// thread ends.
#[derive(Debug)]
pub struct CpuStreamOwner {
    device: CpuDevice,
    stream: CpuStream,
}

impl CpuStreamOwner {
    /// The handle.
    pub fn stream(&self) -> CpuStream {
        self.stream
    }
}

impl Drop for CpuStreamOwner {
    fn drop(&mut self) {
        self.device.streams().remove(self.stream);
    }
}

/// A point in a stream: complete when everything queued before it was recorded has run.
#[derive(Debug, Clone)]
pub struct CpuEvent(Mark);

impl CpuEvent {
    /// Whether it is complete. Never blocks.
    pub fn is_complete(&self) -> bool {
        self.0.is_reached()
    }

    /// Waits until it is complete.
    ///
    /// *Errors*: [`Kind::Timeout`]. A failure of the queued work is reported by the stream, not here.
    pub fn wait(&self, deadline: Deadline) -> Result<()> {
        self.0.wait(deadline).map_err(|e| not_done("wait_event", e))
    }
}

impl CpuDevice {
    /// A new stream, with a thread of its own.
    ///
    /// *Errors*: [`Kind::OutOfMemory`] where the host gives no thread.
    pub fn create_stream(&self) -> Result<CpuStreamOwner> {
        Ok(CpuStreamOwner { device: self.clone(), stream: self.streams().create("create_stream")? })
    }

    /// Queues `work` on `stream`. It runs after everything queued there before, on the stream's thread.
    ///
    /// A panic in `work` does not end the stream: it is an error of the stream's next synchronisation.
    ///
    /// *Errors*: [`Kind::InvalidArgument`] for a handle that names no stream.
    pub fn enqueue(&self, stream: CpuStream, work: impl FnOnce() + Send + 'static) -> Result<()> {
        self.streams().queue(stream, "enqueue")?.push(work);
        Ok(())
    }

    /// An event after everything that is queued on `stream` now.
    ///
    /// *Errors*: [`Kind::InvalidArgument`] for a handle that names no stream.
    pub fn record(&self, stream: CpuStream) -> Result<CpuEvent> {
        Ok(CpuEvent(self.streams().queue(stream, "record")?.mark()))
    }
}

/// The streams of a device, by handle.
#[derive(Debug, Default)]
pub(crate) struct Streams {
    queues: RwLock<HashMap<u64, Arc<Queue>>>,
    last: AtomicU64,
}

impl Streams {
    /// Waits for what is queued on `stream`.
    pub(crate) fn sync(&self, stream: CpuStream, deadline: Deadline) -> Result<()> {
        const OP: &str = "sync_stream";
        if stream == CpuStream::DEFAULT && !self.queues.read().contains_key(&stream.0) {
            return Ok(());
        }
        self.queue(stream, OP)?.wait(deadline).map_err(|e| not_done(OP, e))
    }

    fn create(&self, op: &'static str) -> Result<CpuStream> {
        let raw = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        self.start(raw, op)?;
        Ok(CpuStream(raw))
    }

    fn queue(&self, stream: CpuStream, op: &'static str) -> Result<Arc<Queue>> {
        if let Some(queue) = self.queues.read().get(&stream.0) {
            return Ok(Arc::clone(queue));
        }
        if stream == CpuStream::DEFAULT {
            return self.start(stream.0, op);
        }
        Err(error(Kind::InvalidArgument, op).detail(format!("there is no stream {} (any more)", stream.0)))
    }

    fn start(&self, raw: u64, op: &'static str) -> Result<Arc<Queue>> {
        let mut queues = self.queues.write();
        // Two threads may be the first to use the default stream.
        if let Some(queue) = queues.get(&raw) {
            return Ok(Arc::clone(queue));
        }
        let queue = Queue::start(format!("cpu-stream-{raw}"))
            .map_err(|e| error(Kind::OutOfMemory, op).detail("no thread for the stream").with_source(e))?;
        Ok(Arc::clone(queues.entry(raw).or_insert(Arc::new(queue))))
    }

    fn remove(&self, stream: CpuStream) {
        self.queues.write().remove(&stream.0);
    }
}

fn not_done(op: &'static str, why: NotDone) -> hal::Error {
    match why {
        NotDone::Timeout(items) => {
            error(Kind::Timeout, op).detail(format!("{items} items on the stream are not done"))
        }
        NotDone::Failed(text) => error(Kind::Driver, op).detail(text),
        NotDone::Aborted => error(Kind::Driver, op).detail("the stream was aborted"),
        NotDone::OwnThread => {
            error(Kind::InvalidArgument, op).detail("work on a stream cannot wait for its own stream")
        }
    }
}

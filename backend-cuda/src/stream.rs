//! Streams: raw handles with the thread that they are meant on, and waiting for them.

use std::{
    thread::{self, ThreadId},
    time::Duration,
};

use hal::{Deadline, Kind, Result};

use crate::{
    CudaDevice,
    ffi::{Answer, Capturing, Driver},
};

/// `CU_STREAM_PER_THREAD`.
const PER_THREAD: usize = 2;

/// How often an event is asked for without a pause; most waits that end soon end within these.
const SPINS: u32 = 16;
/// The pauses double from the first to the last.
const FIRST_PAUSE: Duration = Duration::from_micros(10);
const LAST_PAUSE: Duration = Duration::from_millis(1);

/// A stream's handle. Plain data: it does not keep the stream alive.
///
/// A handle that means another stream on each thread carries the thread that it was named on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CudaStream {
    raw: usize,
    thread: Option<ThreadId>,
}

impl CudaStream {
    /// Handle 0, the default stream of the device: what PyTorch's `cuda_stream` is unless another one was set.
    pub const DEFAULT: CudaStream = CudaStream { raw: 0, thread: None };

    /// Handle 1, the legacy default stream by its explicit name.
    pub const LEGACY: CudaStream = CudaStream { raw: 1, thread: None };

    /// Handle 2, the calling thread's own default stream. Programs that are compiled for per-thread default streams mean
    /// this one when they say 0.
    pub fn per_thread() -> Self {
        CudaStream { raw: PER_THREAD, thread: Some(thread::current().id()) }
    }

    /// The stream behind a raw handle, such as PyTorch's `cuda_stream`, as the calling thread means it.
    ///
    /// # Safety
    /// `raw` must be 0, 1, 2 or the handle of a stream of this process that is not destroyed before the last call it is
    /// passed to: the driver follows it.
    pub unsafe fn from_raw(raw: usize) -> Self {
        if raw == PER_THREAD { Self::per_thread() } else { CudaStream { raw, thread: None } }
    }

    /// The handle.
    pub fn raw(self) -> usize {
        self.raw
    }

    /// Whether it is the legacy default stream, by either name.
    pub(crate) fn is_legacy(self) -> bool {
        self == Self::DEFAULT || self == Self::LEGACY
    }

    pub(crate) fn is_per_thread(self) -> bool {
        self.thread.is_some()
    }
}

/// Refuses a stream that is being captured, before a call that would spoil the capture.
pub(crate) fn refuse_capture(device: &CudaDevice, op: &'static str, stream: CudaStream) -> Result<()> {
    // SAFETY: who made the handle vouches for it.
    let capturing = unsafe { device.driver().capturing(stream.raw) };
    let state = match capturing.map_err(|refusal| device.refused(op, refusal))? {
        Capturing::No => return Ok(()),
        Capturing::Active => "is being captured",
        Capturing::Spoiled => "has a capture that was spoiled earlier and has not ended",
    };
    Err(device.plain(Kind::StreamCapturing, op).detail(format!("stream {:#x} {state}", stream.raw)))
}

/// Waits for what is queued on `stream` now.
///
/// Not by the stream itself but by an event: a stream that somebody keeps busy would never be found idle.
pub(crate) fn sync(device: &CudaDevice, stream: CudaStream, deadline: Deadline) -> Result<()> {
    const OP: &str = "sync_stream";
    if stream.thread.is_some_and(|named_on| named_on != thread::current().id()) {
        return Err(device.plain(Kind::WrongThread, OP));
    }
    // A question on this thread would otherwise spoil a capture on another one.
    let _relaxed = device.relaxed(OP)?;
    refuse_capture(device, OP, stream)?;
    let driver = device.driver();
    // SAFETY: who made the handle vouches for it.
    let outcome = match unsafe { driver.query(stream.raw) } {
        Ok(false) if deadline.instant().is_none() => {
            // SAFETY: as above.
            unsafe { driver.synchronize(stream.raw) }.map(|()| true)
        }
        Ok(false) if deadline.is_passed() => Ok(false),
        Ok(false) => Event::record(driver, stream).and_then(|event| event.wait(deadline)),
        done => done,
    };
    match outcome {
        Ok(true) => Ok(()),
        Ok(false) => Err(device
            .plain(Kind::Timeout, OP)
            .detail(format!("work that was queued on stream {:#x} is not done", stream.raw))),
        Err(refusal) => Err(device.refused(OP, refusal)),
    }
}

/// A point in a stream. Lives no longer than the thread stays bound.
struct Event<'d> {
    driver: &'d Driver,
    raw: usize,
}

impl<'d> Event<'d> {
    fn record(driver: &'d Driver, stream: CudaStream) -> Answer<Self> {
        let event = Event { driver, raw: driver.create_event()? };
        // SAFETY: the event is live, and who made the stream's handle vouches for it.
        unsafe { driver.record(event.raw, stream.raw)? };
        Ok(event)
    }

    /// Whether it is reached before the deadline.
    fn wait(&self, deadline: Deadline) -> Answer<bool> {
        let mut asked = 0;
        let mut pause = FIRST_PAUSE;
        loop {
            // Looked at before the question, so that the last question is asked after the deadline.
            let over = deadline.is_passed();
            // SAFETY: the event is live.
            if unsafe { self.driver.event_reached(self.raw)? } {
                return Ok(true);
            }
            if over {
                return Ok(false);
            }
            if asked < SPINS {
                asked += 1;
                thread::yield_now();
            } else {
                thread::sleep(deadline.left().map_or(pause, |left| pause.min(left)));
                pause = (pause * 2).min(LAST_PAUSE);
            }
        }
    }
}

impl Drop for Event<'_> {
    fn drop(&mut self) {
        // SAFETY: the event is destroyed once. The driver keeps what a stream still needs of it.
        if let Err(refusal) = unsafe { self.driver.destroy_event(self.raw) } {
            tracing::debug!(?refusal, "event not destroyed");
        }
    }
}

//! Streams: raw handles, and waiting for them.

use std::{thread, time::Duration};

use hal::{Deadline, Kind, Result};

use crate::{
    AscendDevice,
    ffi::{Answer, Capturing, Driver, Unserved},
};

/// How often an old CANN is asked without a pause; most waits that end soon end within these.
const SPINS: u32 = 16;
/// The pauses double from the first to the last.
const FIRST_PAUSE: Duration = Duration::from_micros(10);
const LAST_PAUSE: Duration = Duration::from_millis(1);

/// A stream's handle. Plain data: it does not keep the stream alive.
///
/// ACL knows no stream of a framework's. torch_npu's current stream is its own and has to be named, with
/// [`with_stream`](hal::DeviceExt::with_stream) or beside the payload. **Read `npu_stream` right before the call**:
/// torch_npu queues operators on the host first, and reading the property is what submits them. A handle that was kept
/// from earlier leads to a wait that misses what is not submitted yet.
///
/// ACL does not wait for streams that were made with the flags PERSISTENT, CPU_SCHEDULE or DEVICE_USE_ONLY, and says that
/// it did. They are refused where CANN can be asked for the flags (`aclrtStreamGetFlags`). Elsewhere, and after a refusal,
/// name an ordinary stream that waits for an event of theirs (`aclrtRecordEvent`, `aclrtStreamWaitEvent`).
///
/// A stream that is being captured is refused, where CANN can be asked for it (`aclmdlRICaptureGetInfo`). Elsewhere the
/// wait itself finds it, and spoils the capture.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AscendStream(usize);

impl AscendStream {
    /// The default stream of the device's primary context, which is not torch_npu's current stream.
    pub const DEFAULT: AscendStream = AscendStream(0);

    /// The stream behind a raw handle, such as torch_npu's `npu_stream`.
    ///
    /// # Safety
    /// `raw` must be 0 or the handle of a stream of this process that is not destroyed before the last call it is passed
    /// to: ACL follows it.
    pub unsafe fn from_raw(raw: usize) -> Self {
        AscendStream(raw)
    }

    /// The handle.
    pub fn raw(self) -> usize {
        self.0
    }
}

/// Refuses a stream that is being captured, before a call that would spoil the capture.
pub(crate) fn refuse_capture(device: &AscendDevice, op: &'static str, stream: AscendStream) -> Result<()> {
    // SAFETY: who made the handle vouches for it.
    let state = match unsafe { device.driver().capturing(stream.0) } {
        Ok(Capturing::No) => return Ok(()),
        Ok(Capturing::Active) => "is being captured",
        Ok(Capturing::Spoiled) => "has a capture that was spoiled earlier and has not ended",
        // The default stream cannot be captured, and not every CANN lets it be asked for.
        Err(_) if stream == AscendStream::DEFAULT => return Ok(()),
        Err(refusal) => return Err(device.refused(op, refusal)),
    };
    Err(device.plain(Kind::StreamCapturing, op).detail(format!("stream {:#x} {state}", stream.0)))
}

/// Waits for what is queued on `stream` now.
pub(crate) fn sync(device: &AscendDevice, stream: AscendStream, deadline: Deadline) -> Result<()> {
    const OP: &str = "sync_stream";
    // A question on this thread would otherwise spoil a capture on another one.
    let _relaxed = device.relaxed();
    refuse_capture(device, OP, stream)?;
    // The default stream's flags are CANN's own business.
    if stream != AscendStream::DEFAULT {
        // SAFETY: who made the handle vouches for it.
        unsafe { device.driver().is_waited_for(stream.0) }.map_err(|Unserved(flags)| {
            device.plain(Kind::InvalidArgument, OP).detail(format!(
                "ACL does not wait for stream {:#x}, whose flags are {flags:#x}; name an ordinary stream that waits for \
                 an event of it",
                stream.0
            ))
        })?;
    }
    match wait(device.driver(), stream.0, deadline) {
        Ok(true) => Ok(()),
        Ok(false) => Err(device
            .plain(Kind::Timeout, OP)
            .detail(format!("work that was queued on stream {:#x} is not done", stream.0))),
        Err(refusal) => Err(device.refused(OP, refusal)),
    }
}

/// Whether the stream is done before the deadline. Synchronising has the last word: that a stream is done does not say
/// whether its work failed.
fn wait(driver: &Driver, stream: usize, deadline: Deadline) -> Answer<bool> {
    // SAFETY: who made the handle vouches for it.
    let synchronize = || unsafe { driver.synchronize(stream) }.map(|()| true);
    // SAFETY: as above.
    let query = || unsafe { driver.query(stream) };
    // SAFETY: as above.
    let within = |milliseconds| unsafe { driver.synchronize_within(stream, milliseconds) };
    if deadline.instant().is_none() {
        return synchronize();
    }
    if !driver.has_timeout() {
        return match done(query, deadline)? {
            Some(false) => Ok(false),
            // Where nothing can be asked either, the wait takes as long as it takes.
            Some(true) | None => synchronize(),
        };
    }
    if deadline.is_passed() && query()? == Some(false) {
        return Ok(false);
    }
    // ACL takes whole milliseconds, and at least one.
    loop {
        let left =
            deadline.left().map_or(i32::MAX, |left| i32::try_from(left.as_millis()).unwrap_or(i32::MAX));
        if within(left)? {
            return Ok(true);
        }
        if deadline.is_passed() {
            return Ok(false);
        }
    }
}

/// Asks a CANN that knows no limit until the stream is done or the deadline passes. `None` where it cannot be asked.
fn done(query: impl Fn() -> Answer<Option<bool>>, deadline: Deadline) -> Answer<Option<bool>> {
    let mut asked = 0;
    let mut pause = FIRST_PAUSE;
    loop {
        // Looked at before the question, so that the last question is asked after the deadline.
        let over = deadline.is_passed();
        match query()? {
            Some(false) if !over => {}
            answer => return Ok(answer),
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

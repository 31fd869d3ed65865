//! Streams, and capture.

use std::{
    collections::{HashMap, HashSet},
    ffi::c_void,
    ptr,
    time::Duration,
};

use backend_cpu::strict::{CaptureMode, CaptureStatus, Why};
use hal::Deadline;
use haulier_sim::log::About;
use parking_lot::Mutex;

use crate::{
    abi::{Answer, HostFn, Instead, Out, null, refused, runtime, status},
    gate,
    sim::Sim,
};

/// All flags that there are.
const ALL_FLAGS: u32 = 0x3f;
/// PERSISTENT, CPU_SCHEDULE and DEVICE_USE_ONLY: a synchronize returns at once.
const NEVER_WAITED_FOR: u32 = 0x4 | 0x10 | 0x20;

/// Handles of what captures give start here.
const FIRST_MODEL: u64 = 0x6a00_0000_0000;

/// What a stream was created with.
#[derive(Debug, Clone, Copy)]
struct Made {
    context: u64,
    flags: u32,
}

/// The streams of a process, and what captures gave.
#[derive(Debug, Default)]
pub(crate) struct StreamTable {
    made: Mutex<HashMap<u64, Made>>,
    models: Mutex<(HashSet<u64>, u64)>,
    /// Device and peer.
    peers: Mutex<HashSet<(u32, u32)>>,
}

impl StreamTable {
    pub(crate) fn add(&self, stream: u64, context: u64, flags: u32) {
        self.made.lock().insert(stream, Made { context, flags });
    }

    /// Forgets a context's streams, and answers with them.
    pub(crate) fn take_of(&self, context: u64) -> Vec<u64> {
        let mut made = self.made.lock();
        let of_context = made.iter().filter(|(_, made)| made.context == context);
        let streams: Vec<u64> = of_context.map(|(&stream, _)| stream).collect();
        made.retain(|_, made| made.context != context);
        streams
    }

    pub(crate) fn enable_peer(&self, device: u32, peer: u32) {
        self.peers.lock().insert((device, peer));
    }

    /// Whether work on `device` may use the memory of `peer`.
    pub(crate) fn are_peers(&self, device: u32, peer: u32) -> bool {
        self.peers.lock().contains(&(device, peer))
    }
}

impl Sim {
    /// A stream to wait for or to ask about, of whatever context; some context has to be current.
    pub(crate) fn stream(&self, stream: u64) -> Answer<u64> {
        self.context()?;
        if stream == 0 {
            return self.default_stream();
        }
        self.made(stream)?;
        Ok(stream)
    }

    /// As [`stream`](Sim::stream), for a test, which needs a context only for what a null stream means.
    pub(crate) fn known_stream(&self, stream: u64) -> Answer<u64> {
        if stream == 0 { self.default_stream() } else { self.made(stream).map(|_| stream) }
    }

    /// A stream to queue work on: it has to be of the current context.
    pub(crate) fn usable(&self, stream: u64) -> Answer<u64> {
        let (context, _) = self.context()?;
        let stream = self.stream(stream)?;
        if self.made(stream)?.context != context {
            return refused(
                status::STREAM_CONTEXT,
                format!("stream {stream:#x} is of another context than the current one"),
            );
        }
        Ok(stream)
    }

    fn made(&self, stream: u64) -> Answer<Made> {
        match self.streams.made.lock().get(&stream) {
            Some(&made) => Ok(made),
            None => refused(status::HANDLE, format!("there is no stream {stream:#x}")),
        }
    }

    /// Refuses what captures forbid beside them, and spoils those.
    pub(crate) fn beside_captures(&self) -> Answer {
        self.machine()?.forbidden_beside_captures().instead(Why::CaptureForbids, status::CAPTURE_FORBIDS)
    }

    fn create_stream(&self, out: Out<u64>, flags: u32) -> Answer {
        let (context, _) = self.context()?;
        if out.is_null() {
            return null("a null result pointer");
        }
        if flags & !ALL_FLAGS != 0 {
            return refused(status::PARAMETER, format!("flags {flags:#x}"));
        }
        let stream = self.machine()?.create_stream()?;
        self.streams.add(stream, context, flags);
        out.set(stream)
    }

    fn destroy_stream(&self, stream: u64) -> Answer {
        if stream == 0 {
            return null("a null stream");
        }
        let stream = self.usable(stream)?;
        if self.is_default_stream(stream) {
            return refused(status::PARAMETER, "a default stream goes with its context");
        }
        self.machine()?.destroy_stream(stream)?;
        self.streams.made.lock().remove(&stream);
        Ok(())
    }

    fn sync_stream(&self, stream: u64, deadline: Deadline) -> Answer {
        let stream = self.stream(stream)?;
        let machine = self.machine()?;
        if machine.capture_status(stream)? == CaptureStatus::None {
            // Whether waiting for one stream beside another one's capture is allowed is not known.
            self.beside_captures()?;
            if self.made(stream)?.flags & NEVER_WAITED_FOR != 0 {
                return Ok(());
            }
        }
        machine.sync_stream(stream, deadline).instead(Why::NotReady, status::STREAM_TIMEOUT)
    }
}

/// A time to wait in milliseconds: -1 is for ever; 0 and everything else that is negative is refused.
pub(crate) fn deadline(milliseconds: i32) -> Answer<Deadline> {
    match milliseconds {
        -1 => Ok(Deadline::NEVER),
        1.. => Ok(Deadline::after(Duration::from_millis(milliseconds.unsigned_abs().into()))),
        _ => refused(status::PARAMETER, format!("a timeout of {milliseconds} ms")),
    }
}

fn mode(number: i32) -> Answer<CaptureMode> {
    match number {
        0 => Ok(CaptureMode::Global),
        1 => Ok(CaptureMode::ThreadLocal),
        2 => Ok(CaptureMode::Relaxed),
        _ => refused(status::PARAMETER, format!("no capture mode {number}")),
    }
}

runtime! {
    fn aclrtCreateStream(stream: Out<u64>) [About::Nothing] |sim| sim.create_stream(stream, 0);
    fn aclrtCreateStreamWithConfig(stream: Out<u64>, priority: u32, flags: u32) [About::Nothing] |sim| {
        if priority != 0 {
            return refused(status::PARAMETER, format!("priority {priority} is reserved"));
        }
        sim.create_stream(stream, flags)
    };
    fn aclrtDestroyStream(stream: u64) [About::Stream(stream)] |sim| sim.destroy_stream(stream);
    fn aclrtDestroyStreamForce(stream: u64) [About::Stream(stream)] |sim| sim.destroy_stream(stream);
    fn aclrtSynchronizeStream(stream: u64) [About::Stream(stream)] |sim| sim.sync_stream(stream, Deadline::NEVER);
    fn aclrtSynchronizeStreamWithTimeout(stream: u64, milliseconds: i32) [About::Stream(stream)] |sim| {
        sim.sync_stream(stream, deadline(milliseconds)?)
    };
    fn aclrtStreamQuery(stream: u64, state: Out<i32>) [About::Stream(stream)] |sim| {
        if state.is_null() {
            return null("a null result pointer");
        }
        let stream = sim.stream(stream)?;
        let machine = sim.machine()?;
        if machine.capture_status(stream)? == CaptureStatus::None {
            sim.beside_captures()?;
        }
        // The other way round than an event's status.
        state.set(i32::from(!machine.query_stream(stream)?))
    };
    fn aclrtStreamGetFlags(stream: u64, flags: Out<u32>) [About::Stream(stream)] |sim| {
        flags.set(sim.made(sim.stream(stream)?)?.flags)
    };
    fn aclrtStreamAbort(stream: u64) [About::Stream(stream)] |sim| {
        Ok(sim.machine()?.abort_stream(sim.usable(stream)?)?)
    };
    fn aclrtLaunchHostFunc(stream: u64, function: HostFn, data: *mut c_void) [About::Stream(stream)] |sim| {
        let Some(function) = function else { return null("no function") };
        let stream = sim.usable(stream)?;
        let machine = sim.machine()?;
        if machine.capture_status(stream)? != CaptureStatus::None {
            // Up to CANN 8.3 at least.
            return refused(status::CAPTURE_FORBIDS, "a host function is not captured");
        }
        let data = data.expose_provenance();
        let work = move || gate::host_function(|| function(ptr::with_exposed_provenance_mut(data)));
        Ok(machine.enqueue(stream, work)?)
    };

    fn aclmdlRICaptureBegin(stream: u64, number: i32) [About::Stream(stream)] |sim| {
        if stream == 0 || sim.is_default_stream(stream) {
            return refused(status::PARAMETER, "a default stream cannot be captured");
        }
        Ok(sim.machine()?.begin_capture(sim.usable(stream)?, mode(number)?)?)
    };
    fn aclmdlRICaptureEnd(stream: u64, model: Out<u64>) [About::Stream(stream)] |sim| {
        // A spoiled capture gives nothing, and the caller is told so even where it ignores the status.
        model.set(0)?;
        sim.machine()?.end_capture(sim.stream(stream)?)?;
        let handle = {
            let mut models = sim.streams.models.lock();
            models.1 += 1;
            let handle = FIRST_MODEL + models.1;
            models.0.insert(handle);
            handle
        };
        model.set(handle)
    };
    fn aclmdlRICaptureGetInfo(stream: u64, state: Out<i32>, model: Out<u64>) [About::Stream(stream)] |sim| {
        let stream = sim.stream(stream)?;
        let answer = sim.machine()?.capture_status(stream)?;
        model.offer(if answer == CaptureStatus::None { 0 } else { stream })?;
        state.set(match answer {
            CaptureStatus::None => 0,
            CaptureStatus::Active => 1,
            CaptureStatus::Invalidated => 2,
        })
    };
    fn aclmdlRICaptureThreadExchangeMode(change: Out<i32>) [About::Nothing] |sim| {
        let before = sim.machine()?.exchange_capture_mode(mode(change.get()?)?)?;
        change.set(match before {
            CaptureMode::Global => 0,
            CaptureMode::ThreadLocal => 1,
            CaptureMode::Relaxed => 2,
        })
    };
    fn aclmdlRIDestroy(model: u64) [About::Handle(model)] |sim| {
        if sim.streams.models.lock().0.remove(&model) {
            return Ok(());
        }
        refused(status::HANDLE, format!("there is no model {model:#x}"))
    };
}

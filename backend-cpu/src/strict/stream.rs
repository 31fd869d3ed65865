//! Streams and events. No stream orders with another one, default streams included, unless an event makes it, or the
//! machine was built with [`Builder::legacy_order`](super::Builder::legacy_order).

use std::{
    collections::HashMap,
    sync::Arc,
    thread::{self, ThreadId},
};

use hal::Deadline;
use parking_lot::Mutex;

use super::{
    capture::Capture,
    log::{Argument, Op},
    machine::Machine,
    memory::{Residence, transfer},
    refusal::{Answer, Why},
};
use crate::queue::{Mark, NotDone, Queue};

/// The default stream: the device's, or the calling thread's own if the machine was built so.
pub const NULL_STREAM: u64 = 0;
/// The current device's default stream.
pub const LEGACY_STREAM: u64 = 1;
/// The calling thread's own default stream on the current device: another one on each thread.
pub const PER_THREAD_STREAM: u64 = 2;

/// Handles of created streams and events start here.
const FIRST_HANDLE: u64 = 0x1000;

/// What a handle means.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Key {
    Legacy(u32),
    PerThread(ThreadId, u32),
    Created(u64),
}

/// One stream.
#[derive(Debug)]
pub(super) struct Stream {
    key: Key,
    device: u32,
    /// Whether the default stream orders with it.
    blocking: bool,
    queue: Queue,
    pub(super) capture: Mutex<Capture>,
}

/// What an event stands for.
#[derive(Debug, Clone)]
enum Recorded {
    Never,
    At(Mark),
    /// On this stream, while it was captured.
    Captured(Key),
}

impl Stream {
    pub(super) fn is_default(&self) -> bool {
        !matches!(self.key, Key::Created(_))
    }

    pub(super) fn is_blocking(&self) -> bool {
        self.blocking
    }

    pub(super) fn key(&self) -> Key {
        self.key
    }

    /// Queues `work`, or records it while the stream is captured.
    fn push(&self, work: impl FnOnce() + Send + 'static) {
        let mut capture = self.capture.lock();
        if capture.status == super::CaptureStatus::None {
            self.queue.push(work);
        } else {
            capture.items += 1;
        }
    }
}

/// What a handle means on a thread.
#[derive(Debug)]
pub(super) struct Found {
    key: Key,
    device: u32,
    /// `None` for a default stream that was never used.
    pub(super) stream: Option<Arc<Stream>>,
}

/// All streams and events of a machine.
#[derive(Debug, Default)]
pub(super) struct Streams {
    by_key: HashMap<Key, Arc<Stream>>,
    events: HashMap<u64, Recorded>,
    last: u64,
    hold_new: bool,
}

impl Streams {
    /// The device of a created stream; a default stream is the current device's by definition.
    pub(super) fn owner(&self, stream: u64) -> Option<u32> {
        self.by_key.get(&Key::Created(stream)).map(|stream| stream.device)
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &Arc<Stream>> {
        self.by_key.values()
    }

    /// Ends a device's streams.
    pub(super) fn forget(&mut self, device: u32) {
        self.by_key.retain(|_, stream| {
            let stays = stream.device != device;
            if !stays {
                stream.queue.close();
            }
            stays
        });
    }

    fn handle(&mut self) -> u64 {
        self.last += 1;
        FIRST_HANDLE + self.last
    }
}

impl Machine {
    // ---- calls: streams ----

    /// A call: a new stream of the current device, and its handle.
    pub fn create_stream(&self) -> Answer<u64> {
        self.create(false)
    }

    /// A call: a new stream that orders with the device's default stream, where the machine has such an order.
    pub fn create_blocking_stream(&self) -> Answer<u64> {
        self.create(true)
    }

    fn create(&self, blocking: bool) -> Answer<u64> {
        self.call(Op::CreateStream, Argument::None, || {
            let device = self.context()?;
            let mut streams = self.0.streams.lock();
            let handle = streams.handle();
            self.start(&mut streams, Key::Created(handle), device, blocking)?;
            Ok(handle)
        })
    }

    /// A call: destroys a created stream. What is queued still runs, unless it is held: then it is lost.
    pub fn destroy_stream(&self, stream: u64) -> Answer<()> {
        self.call(Op::DestroyStream, Argument::Stream(stream), || {
            self.context()?;
            let removed = self.0.streams.lock().by_key.remove(&Key::Created(stream));
            removed.ok_or_else(|| self.no_stream(stream))?.queue.close();
            Ok(())
        })
    }

    /// A call: drops what is queued on `stream` and has not begun; who waits for it is told. The stream goes on.
    pub fn abort_stream(&self, stream: u64) -> Answer<()> {
        self.call(Op::AbortStream, Argument::Stream(stream), || {
            self.usable(stream)?.queue.abort();
            Ok(())
        })
    }

    /// A call: waits for what is queued on `stream` now. Any device may be current, but some must.
    ///
    /// A stream under capture refuses, and its capture is spoiled.
    pub fn sync_stream(&self, stream: u64, deadline: Deadline) -> Answer<()> {
        self.call_until(Op::SyncStream, Argument::Stream(stream), deadline, || {
            let (on, before) = self.waitable(stream)?;
            before.iter().try_for_each(|mark| mark.wait(deadline)).map_err(|e| self.not_done(e))?;
            match on {
                Some(on) => on.queue.wait(deadline).map_err(|e| self.not_done(e)),
                None => Ok(()),
            }
        })
    }

    /// A call: whether what is queued on `stream` is done. Spoils a capture just as waiting does.
    pub fn query_stream(&self, stream: u64) -> Answer<bool> {
        self.call(Op::QueryStream, Argument::Stream(stream), || {
            let (on, before) = self.waitable(stream)?;
            if before.iter().any(|mark| !mark.is_reached()) {
                return Ok(false);
            }
            let Some(on) = on else { return Ok(true) };
            match on.queue.wait(Deadline::passed()) {
                Ok(()) => Ok(true),
                Err(NotDone::Timeout(_)) => Ok(false),
                Err(e) => Err(self.not_done(e)),
            }
        })
    }

    /// A call: waits for everything on the current device, and spoils its captures.
    pub fn sync_device(&self) -> Answer<()> {
        self.call(Op::SyncDevice, Argument::None, || {
            let device = self.context()?;
            let streams: Vec<_> =
                self.0.streams.lock().all().filter(|s| s.device == device).cloned().collect();
            // All of them, so that no capture survives by standing behind another one.
            let spoiled: Vec<Why> = streams.iter().filter_map(|s| s.capture.lock().spoil()).collect();
            if let Some(&why) = spoiled.first() {
                return Err(self.refuse(why, "a stream of the device is being captured"));
            }
            streams.iter().try_for_each(|s| s.queue.wait(Deadline::NEVER).map_err(|e| self.not_done(e)))
        })
    }

    /// A call: queues `work`, which runs on the stream's own thread. A panic in it fails the stream.
    pub fn enqueue(&self, stream: u64, work: impl FnOnce() + Send + 'static) -> Answer<()> {
        self.call(Op::Enqueue, Argument::Stream(stream), || {
            let on = self.usable(stream)?;
            self.put(&on, work);
            Ok(())
        })
    }

    /// A call: queues setting `len` bytes of device memory to `byte`.
    pub fn fill(&self, stream: u64, addr: usize, len: usize, byte: u8) -> Answer<()> {
        self.call(Op::Fill, Argument::Stream(stream), || {
            let on = self.usable(stream)?;
            let span = self.reachable(addr, len, on.device)?;
            self.put(&on, move || span.fill(byte));
            Ok(())
        })
    }

    /// A call: queues a copy of `len` bytes.
    ///
    /// # Safety
    /// Host memory must stay allocated until the copy has run, or been discarded with its stream, and nobody may write
    /// the source or touch the target meanwhile.
    pub unsafe fn copy_async(&self, stream: u64, to: usize, from: usize, len: usize) -> Answer<()> {
        self.call(Op::CopyAsync, Argument::Stream(stream), || {
            let on = self.usable(stream)?;
            let (to, from) = (self.side(to, len, on.device)?, self.side(from, len, on.device)?);
            // SAFETY: `side` checked device memory and the blocks are kept; the caller vouches for the host's.
            self.put(&on, move || unsafe { transfer(&to, &from, len) });
            Ok(())
        })
    }

    /// A call: queues writing these bytes to device memory, as a copy from host memory that was read at once.
    pub fn write_async(&self, stream: u64, to: usize, bytes: Vec<u8>) -> Answer<()> {
        self.call(Op::CopyAsync, Argument::Stream(stream), || {
            let on = self.usable(stream)?;
            let span = self.reachable(to, bytes.len(), on.device)?;
            self.put(&on, move || span.write(&bytes));
            Ok(())
        })
    }

    /// A call: queues a copy between any two devices' memory on a stream of the current one.
    pub fn copy_between(&self, stream: u64, to: usize, from: usize, len: usize) -> Answer<()> {
        self.call(Op::CopyAsync, Argument::Stream(stream), || {
            let on = self.usable(stream)?;
            let (to, from) = (self.backing(to, len)?, self.backing(from, len)?);
            self.put(&on, move || {
                let mut bytes = vec![0; len];
                from.read(&mut bytes);
                to.write(&bytes);
            });
            Ok(())
        })
    }

    /// A call: queues freeing the allocation at `addr`.
    pub fn free_async(&self, stream: u64, addr: usize) -> Answer<()> {
        self.call(Op::Free, Argument::Address(addr), || {
            let on = self.usable(stream)?;
            let block = self.block(addr)?;
            let ours = matches!(block.residence, Residence::Device(..)) && block.mapped.is_none();
            if block.base != addr || !ours {
                return Err(self.refuse(Why::InvalidValue, format!("no allocation starts at {addr:#x}")));
            }
            let (machine, buffer) = (self.clone(), block.buffer);
            self.put(&on, move || {
                let mut memory = machine.0.memory.lock();
                // Not what somebody else allocated there since.
                if memory.blocks.get(&addr).is_some_and(|block| block.buffer == buffer) {
                    machine.displace(&mut memory, addr);
                }
            });
            Ok(())
        })
    }

    // ---- calls: events ----

    /// A call: a new event, complete until it is recorded.
    pub fn create_event(&self) -> Answer<u64> {
        self.call(Op::CreateEvent, Argument::None, || {
            self.context()?;
            let mut streams = self.0.streams.lock();
            let handle = streams.handle();
            streams.events.insert(handle, Recorded::Never);
            Ok(handle)
        })
    }

    /// A call: destroys an event. What waits for it goes on waiting.
    pub fn destroy_event(&self, event: u64) -> Answer<()> {
        self.call(Op::DestroyEvent, Argument::Event(event), || {
            let removed = self.0.streams.lock().events.remove(&event);
            removed.map(drop).ok_or_else(|| self.no_event(event))
        })
    }

    /// A call: the event is complete when everything queued on `stream` now has run.
    pub fn record_event(&self, event: u64, stream: u64) -> Answer<()> {
        self.call(Op::RecordEvent, Argument::Stream(stream), || {
            let on = self.usable(stream)?;
            let captured = on.capture.lock().status != super::CaptureStatus::None;
            // An item of its own where there is something to wait for that is not in this queue, or to be recorded.
            if captured || !self.ordered_before(on.key, on.device, on.blocking).is_empty() {
                self.put(&on, || ());
            }
            let recorded = if captured { Recorded::Captured(on.key) } else { Recorded::At(on.queue.mark()) };
            let mut streams = self.0.streams.lock();
            *streams.events.get_mut(&event).ok_or_else(|| self.no_event(event))? = recorded;
            Ok(())
        })
    }

    /// A call: whether the event is complete.
    pub fn query_event(&self, event: u64) -> Answer<bool> {
        self.call(Op::QueryEvent, Argument::Event(event), || {
            self.context()?;
            Ok(self.mark(event)?.is_none_or(|mark| mark.is_reached()))
        })
    }

    /// Whether the event is complete: the test's question, which needs no current device.
    pub fn is_event_complete(&self, event: u64) -> Answer<bool> {
        Ok(self.mark(event)?.is_none_or(|mark| mark.is_reached()))
    }

    /// A call: waits until the event is complete.
    pub fn sync_event(&self, event: u64, deadline: Deadline) -> Answer<()> {
        self.call_until(Op::SyncEvent, Argument::Event(event), deadline, || {
            self.context()?;
            match self.mark(event)? {
                Some(mark) => mark.wait(deadline).map_err(|e| self.not_done(e)),
                None => Ok(()),
            }
        })
    }

    /// A call: what is queued on `stream` from now on runs after the event. An event that was recorded within a capture
    /// draws the stream into it.
    pub fn wait_event(&self, stream: u64, event: u64) -> Answer<()> {
        self.call(Op::WaitEvent, Argument::Stream(stream), || {
            let on = self.usable(stream)?;
            match self.recorded(event)? {
                Recorded::Never => {}
                Recorded::At(mark) => {
                    if let Some(why) = on.capture.lock().spoil() {
                        let why = if why == Why::CaptureForbids { Why::CaptureIsolation } else { why };
                        return Err(self.refuse(why, "the event is of work outside of the capture"));
                    }
                    self.put(&on, move || {
                        // Without a deadline there is nothing that it could fail with.
                        let _ = mark.wait(Deadline::NEVER);
                    });
                }
                Recorded::Captured(key) => {
                    let from = self.0.streams.lock().by_key.get(&key).cloned();
                    let part = from.and_then(|from| {
                        let capture = from.capture.lock();
                        (capture.status == super::CaptureStatus::Active).then(|| capture.joined(key))
                    });
                    let Some(part) = part else {
                        return Err(self.refuse(Why::CapturedEvent, "the event is of a capture that is over"));
                    };
                    {
                        let mut capture = on.capture.lock();
                        if capture.status == super::CaptureStatus::None {
                            *capture = part;
                        }
                    }
                    on.push(|| ());
                }
            }
            Ok(())
        })
    }

    // ---- the test's hold on streams ----

    /// From now on nothing on `stream` runs until it is released. A default stream is the calling thread's view of it.
    pub fn hold(&self, stream: u64) -> Answer<()> {
        self.stream(stream)?.queue.hold();
        Ok(())
    }

    /// Streams created from now on are held from the start.
    pub fn hold_new_streams(&self, hold: bool) {
        self.0.streams.lock().hold_new = hold;
    }

    /// Lets `count` items run on a held stream, or as many as will be queued.
    pub fn release_some(&self, stream: u64, count: u64) -> Answer<()> {
        self.stream(stream)?.queue.allow(count);
        Ok(())
    }

    /// Holds the stream no longer.
    pub fn release(&self, stream: u64) -> Answer<()> {
        self.stream(stream)?.queue.allow(u64::MAX);
        Ok(())
    }

    /// Holds no stream any longer.
    pub fn release_all(&self) {
        let mut streams = self.0.streams.lock();
        streams.hold_new = false;
        streams.all().for_each(|stream| stream.queue.allow(u64::MAX));
    }

    /// How many items on `stream` have not run.
    pub fn pending(&self, stream: u64) -> Answer<u64> {
        Ok(self.stream(stream)?.queue.pending())
    }

    // ---- what a handle means ----

    /// What the handle means on this thread.
    pub(super) fn find(&self, handle: u64) -> Answer<Found> {
        let own = handle == PER_THREAD_STREAM || (handle == NULL_STREAM && self.0.spec.per_thread_default);
        let (key, device) = match handle {
            NULL_STREAM | LEGACY_STREAM | PER_THREAD_STREAM => {
                let device = self.context()?;
                let key =
                    if own { Key::PerThread(thread::current().id(), device) } else { Key::Legacy(device) };
                (key, device)
            }
            created => {
                let stream = self.0.streams.lock().by_key.get(&Key::Created(created)).cloned();
                let stream = stream.ok_or_else(|| self.no_stream(created))?;
                return Ok(Found { key: stream.key, device: stream.device, stream: Some(stream) });
            }
        };
        let stream = self.0.streams.lock().by_key.get(&key).cloned();
        Ok(Found { key, device, stream })
    }

    /// The stream that the handle means on this thread. A default stream comes to life here.
    pub(super) fn stream(&self, handle: u64) -> Answer<Arc<Stream>> {
        let found = self.find(handle)?;
        match found.stream {
            Some(stream) => Ok(stream),
            None => self.start(&mut self.0.streams.lock(), found.key, found.device, false),
        }
    }

    /// A stream to wait for, and what orders before it: any device's, but the thread must have some device. No stream
    /// for a default stream that was never used.
    fn waitable(&self, handle: u64) -> Answer<(Option<Arc<Stream>>, Vec<Mark>)> {
        self.context()?;
        let found = self.find(handle)?;
        self.implicit_capture(&found, true)?;
        match found.stream.as_ref().and_then(|stream| stream.capture.lock().spoil()) {
            Some(why) => Err(self.refuse(why, "the stream is being captured")),
            None => {
                // Waiting for a stream is no work on it, so only the default stream draws others in.
                let before = match found.key {
                    Key::Legacy(_) => self.ordered_before(found.key, found.device, false),
                    _ => Vec::new(),
                };
                Ok((found.stream, before))
            }
        }
    }

    /// A stream to queue on: its device must be current.
    fn usable(&self, handle: u64) -> Answer<Arc<Stream>> {
        let device = self.context()?;
        self.implicit_capture(&self.find(handle)?, true)?;
        let stream = self.stream(handle)?;
        if stream.device != device {
            return Err(self.refuse(
                Why::WrongContext,
                format!("stream {handle:#x} is of device {} and device {device} is current", stream.device),
            ));
        }
        Ok(stream)
    }

    /// Queues work behind whatever orders before it by itself.
    fn put(&self, on: &Stream, work: impl FnOnce() + Send + 'static) {
        let before = self.ordered_before(on.key, on.device, on.blocking);
        if before.is_empty() {
            return on.push(work);
        }
        // The marks are of work that is queued already, so such waits make no circle.
        on.push(move || {
            for mark in before {
                let _ = mark.wait(Deadline::NEVER);
            }
            work();
        });
    }

    /// What work on a stream waits for by itself: on the default stream the blocking ones, on those the default stream.
    fn ordered_before(&self, key: Key, device: u32, blocking: bool) -> Vec<Mark> {
        if !self.0.spec.legacy_order {
            return Vec::new();
        }
        let streams = self.0.streams.lock();
        let orders = |other: &&Arc<Stream>| match key {
            Key::Legacy(_) => other.blocking,
            _ => blocking && matches!(other.key, Key::Legacy(_)),
        };
        let of_device = streams.all().filter(|other| other.device == device);
        of_device.filter(orders).map(|other| other.queue.mark()).filter(|mark| !mark.is_reached()).collect()
    }

    /// Refuses the default stream while a stream that it orders with is captured; a use of it spoils the capture, a
    /// question does not.
    pub(super) fn implicit_capture(&self, found: &Found, spoils: bool) -> Answer<()> {
        if !self.0.spec.legacy_order || !matches!(found.key, Key::Legacy(_)) {
            return Ok(());
        }
        let mut captured = false;
        for other in
            self.0.streams.lock().all().filter(|other| other.device == found.device && other.blocking)
        {
            let mut capture = other.capture.lock();
            captured |= capture.status != super::CaptureStatus::None;
            if spoils {
                capture.spoil();
            }
        }
        if captured {
            return Err(
                self.refuse(Why::CaptureImplicit, "a stream that the default stream orders with is captured")
            );
        }
        Ok(())
    }

    /// The device of a created stream. No call.
    pub fn owner_of_stream(&self, stream: u64) -> Option<u32> {
        self.0.streams.lock().owner(stream)
    }

    fn start(&self, streams: &mut Streams, key: Key, device: u32, blocking: bool) -> Answer<Arc<Stream>> {
        // Two threads may be the first to use a default stream.
        if let Some(stream) = streams.by_key.get(&key) {
            return Ok(Arc::clone(stream));
        }
        let queue = Queue::start(format!("strict-stream-{device}"))
            .map_err(|e| self.refuse(Why::OutOfMemory, format!("no thread for the stream: {e}")))?;
        if streams.hold_new {
            queue.hold();
        }
        // Per-thread streams order with the default stream too.
        let blocking = self.0.spec.legacy_order && (blocking || matches!(key, Key::PerThread(..)));
        let stream = Arc::new(Stream { key, device, blocking, queue, capture: Mutex::default() });
        streams.by_key.insert(key, Arc::clone(&stream));
        Ok(stream)
    }

    fn recorded(&self, event: u64) -> Answer<Recorded> {
        self.0.streams.lock().events.get(&event).cloned().ok_or_else(|| self.no_event(event))
    }

    /// The place that an event waits for, if it has to.
    fn mark(&self, event: u64) -> Answer<Option<Mark>> {
        match self.recorded(event)? {
            Recorded::Never => Ok(None),
            Recorded::At(mark) => Ok(Some(mark)),
            Recorded::Captured(_) => {
                Err(self.refuse(Why::CapturedEvent, "the event was recorded within a capture"))
            }
        }
    }

    fn no_stream(&self, handle: u64) -> super::Refusal {
        self.refuse(Why::InvalidHandle, format!("there is no stream {handle:#x}"))
    }

    fn no_event(&self, handle: u64) -> super::Refusal {
        self.refuse(Why::InvalidHandle, format!("there is no event {handle:#x}"))
    }

    fn not_done(&self, why: NotDone) -> super::Refusal {
        match why {
            NotDone::Timeout(items) => self.refuse(Why::NotReady, format!("{items} items are not done")),
            NotDone::Failed(text) => self.refuse(Why::StreamFailed, text),
            NotDone::Aborted => self.refuse(Why::StreamAborted, "the stream was aborted"),
            NotDone::OwnThread => self.refuse(Why::InvalidValue, "queued work waits for its own stream"),
        }
    }
}

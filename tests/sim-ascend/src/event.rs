//! Events.

use std::{collections::HashMap, sync::Arc, time::Instant};

use backend_cpu::strict::Why;
use hal::Deadline;
use haulier_sim::log::About;
use parking_lot::Mutex;

use crate::{
    abi::{Answer, Instead, Out, OutAny, null, refused, runtime, status},
    sim::Sim,
    stream::deadline,
};

/// SYNC, CAPTURE_STREAM_PROGRESS, TIME_LINE, DEVICE_USE_ONLY, EXTERNAL, IPC.
const ALL_FLAGS: u32 = 0x1 | 0x2 | 0x8 | 0x10 | 0x20 | 0x40;
const TIME_LINE: u32 = 8;

/// What an event was created with, and when the stream came to where it was last recorded.
#[derive(Debug, Clone)]
struct Made {
    context: u64,
    device: u32,
    flags: u32,
    /// Whether it was recorded since it was created or reset.
    recorded: bool,
    reached: Arc<Mutex<Option<Instant>>>,
}

/// The events of a process.
#[derive(Debug, Default)]
pub(crate) struct Events(Mutex<HashMap<u64, Made>>);

impl Events {
    pub(crate) fn device_of(&self, event: u64) -> Option<u32> {
        self.0.lock().get(&event).map(|made| made.device)
    }

    fn made(&self, event: u64) -> Answer<Made> {
        match self.0.lock().get(&event) {
            Some(made) => Ok(made.clone()),
            None if event == 0 => null("a null event"),
            None => refused(status::HANDLE, format!("there is no event {event:#x}")),
        }
    }

    fn set_recorded(&self, event: u64, recorded: bool) {
        if let Some(made) = self.0.lock().get_mut(&event) {
            made.recorded = recorded;
        }
    }
}

fn create(sim: &Sim, out: Out<u64>, flags: u32) -> Answer {
    let (context, device) = sim.context()?;
    if out.is_null() {
        return null("a null result pointer");
    }
    if flags & !ALL_FLAGS != 0 || flags == 0 {
        return refused(status::PARAMETER, format!("flags {flags:#x}"));
    }
    let event = sim.machine()?.create_event()?;
    let made = Made { context, device, flags, recorded: false, reached: Arc::default() };
    sim.events.0.lock().insert(event, made);
    out.set(event)
}

/// 1 once everything that the event was recorded behind is done; never 1 for one that was not recorded.
fn status_of(sim: &Sim, event: u64, out: Out<i32>) -> Answer {
    if out.is_null() {
        return null("a null result pointer");
    }
    sim.context()?;
    let made = sim.events.made(event)?;
    sim.beside_captures()?;
    out.set(i32::from(made.recorded && sim.machine()?.query_event(event)?))
}

fn sync(sim: &Sim, event: u64, deadline: Deadline) -> Answer {
    sim.context()?;
    sim.events.made(event)?;
    sim.beside_captures()?;
    sim.machine()?.sync_event(event, deadline).instead(Why::NotReady, status::EVENT_TIMEOUT)
}

runtime! {
    fn aclrtCreateEvent(event: Out<u64>) [About::Nothing] |sim| create(sim, event, TIME_LINE | 1);
    fn aclrtCreateEventWithFlag(event: Out<u64>, flags: u32) [About::Nothing] |sim| create(sim, event, flags);
    fn aclrtCreateEventExWithFlag(event: Out<u64>, flags: u32) [About::Nothing] |sim| create(sim, event, flags);
    fn aclrtDestroyEvent(event: u64) [About::Event(event)] |sim| {
        sim.context()?;
        sim.events.made(event)?;
        sim.machine()?.destroy_event(event)?;
        sim.events.0.lock().remove(&event);
        Ok(())
    };
    fn aclrtRecordEvent(event: u64, stream: u64) [About::Stream(stream)] |sim| {
        let (context, _) = sim.context()?;
        let stream = sim.usable(stream)?;
        let made = sim.events.made(event)?;
        if made.context != context {
            return refused(status::STREAM_CONTEXT, "the event is of another context than the current one");
        }
        let machine = sim.machine()?;
        if made.flags & TIME_LINE != 0 {
            *made.reached.lock() = None;
            machine.enqueue(stream, move || *made.reached.lock() = Some(Instant::now()))?;
        }
        machine.record_event(event, stream)?;
        sim.events.set_recorded(event, true);
        Ok(())
    };
    fn aclrtQueryEventStatus(event: u64, state: Out<i32>) [About::Event(event)] |sim| status_of(sim, event, state);
    fn aclrtQueryEvent(event: u64, state: Out<i32>) [About::Event(event)] |sim| status_of(sim, event, state);
    fn aclrtQueryEventWaitStatus(event: u64, state: Out<i32>) [About::Event(event)] |sim| {
        status_of(sim, event, state)
    };
    fn aclrtSynchronizeEvent(event: u64) [About::Event(event)] |sim| sync(sim, event, Deadline::NEVER);
    fn aclrtSynchronizeEventWithTimeout(event: u64, milliseconds: i32) [About::Event(event)] |sim| {
        sync(sim, event, deadline(milliseconds)?)
    };
    fn aclrtStreamWaitEvent(stream: u64, event: u64) [About::Stream(stream)] |sim| {
        let stream = sim.usable(stream)?;
        sim.events.made(event)?;
        Ok(sim.machine()?.wait_event(stream, event)?)
    };
    fn aclrtResetEvent(event: u64, stream: u64) [About::Stream(stream)] |sim| {
        sim.usable(stream)?;
        sim.events.made(event)?;
        sim.events.set_recorded(event, false);
        Ok(())
    };
    fn aclrtEventElapsedTime(milliseconds: Out<f32>, start: u64, end: u64) [About::Event(end)] |sim| {
        sim.context()?;
        let time = |event| {
            let made = sim.events.made(event)?;
            let reached = *made.reached.lock();
            match reached {
                Some(at) => Ok(at),
                None => refused(status::PARAMETER, "the event does not measure time, or is not complete"),
            }
        };
        let (start, end) = (time(start)?, time(end)?);
        let later = end.saturating_duration_since(start).as_secs_f32();
        let earlier = start.saturating_duration_since(end).as_secs_f32();
        milliseconds.set((later - earlier) * 1e3)
    };
    fn aclrtIpcGetEventHandle(event: u64, _handle: OutAny) [About::Event(event)] |_| {
        refused(status::NOT_SUPPORTED, "events do not cross processes here")
    };
    fn aclrtIpcOpenEventHandle(_handle: EventHandle, _event: Out<u64>) [About::Nothing] |_| {
        refused(status::NOT_SUPPORTED, "events do not cross processes here")
    };
}

/// `aclrtIpcEventHandle`, passed by value.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct EventHandle([u8; 64]);

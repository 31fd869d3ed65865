//! Events.

use std::{collections::HashMap, process, sync::Arc, time::Instant};

use hal::Deadline;
use parking_lot::Mutex;

use crate::{
    abi::{Answer, Out, driver, refused, status},
    log::About,
    sim::Sim,
};

const DISABLE_TIMING: u32 = 2;
const INTERPROCESS: u32 = 4;
const ALL_FLAGS: u32 = 7;

/// What an event was created with, and when the stream came to where it was last recorded.
#[derive(Debug, Clone)]
struct Made {
    device: u32,
    flags: u32,
    recorded: Arc<Mutex<Option<Instant>>>,
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
            None => refused(status::INVALID_HANDLE, format!("there is no event {event:#x}")),
        }
    }
}

fn record(sim: &Sim, event: u64, stream: u64) -> Answer {
    let (_, device) = sim.context()?;
    sim.usable(stream)?;
    let made = sim.events.made(event)?;
    if made.device != device {
        return refused(status::INVALID_HANDLE, "the event is of another context than the stream");
    }
    let machine = sim.machine()?;
    if made.flags & DISABLE_TIMING == 0 {
        *made.recorded.lock() = None;
        machine.enqueue(stream, move || *made.recorded.lock() = Some(Instant::now()))?;
    }
    Ok(machine.record_event(event, stream)?)
}

fn elapsed(sim: &Sim, out: Out<f32>, start: u64, end: u64) -> Answer {
    sim.context()?;
    let time = |event| {
        let made = sim.events.made(event)?;
        if made.flags & DISABLE_TIMING != 0 {
            return refused(status::INVALID_HANDLE, "the event does not measure time");
        }
        let recorded = *made.recorded.lock();
        match recorded {
            Some(at) => Ok(at),
            None if sim.machine()?.query_event(event)? => refused(status::INVALID_HANDLE, "never recorded"),
            None => refused(status::NOT_READY, "the event is not complete"),
        }
    };
    let (start, end) = (time(start)?, time(end)?);
    let later = end.saturating_duration_since(start).as_secs_f32();
    let earlier = start.saturating_duration_since(end).as_secs_f32();
    out.set((later - earlier) * 1e3)
}

driver! {
    fn cuEventCreate(event: Out<u64>, flags: u32) [About::Nothing] |sim| {
        let (_, device) = sim.context()?;
        let shared_with_time = flags & INTERPROCESS != 0 && flags & DISABLE_TIMING == 0;
        if flags & !ALL_FLAGS != 0 || shared_with_time || event.is_null() {
            return refused(status::INVALID_VALUE, format!("flags {flags:#x}"));
        }
        let handle = sim.machine()?.create_event()?;
        sim.events.0.lock().insert(handle, Made { device, flags, recorded: Arc::default() });
        event.set(handle)
    };
    fn cuEventDestroy_v2(event: u64) [About::Event(event)] |sim| {
        sim.context()?;
        sim.machine()?.destroy_event(event)?;
        sim.events.0.lock().remove(&event);
        Ok(())
    };
    fn cuEventRecord(event: u64, stream: u64) [About::Stream(stream)] |sim| record(sim, event, stream);
    fn cuEventRecordWithFlags(event: u64, stream: u64, flags: u32) [About::Stream(stream)] |sim| {
        if flags > 1 {
            return refused(status::INVALID_VALUE, format!("flags {flags:#x}"));
        }
        record(sim, event, stream)
    };
    fn cuEventQuery(event: u64) [About::Event(event)] |sim| {
        if sim.contexts.top().is_none() && sim.settings.unbound_event_aborts {
            eprintln!("haulier-sim-cuda: cuEventQuery without a context, where the driver was seen to crash");
            process::abort();
        }
        sim.context()?;
        let machine = sim.machine()?;
        machine.forbidden_beside_captures()?;
        if machine.query_event(event)? {
            return Ok(());
        }
        refused(status::NOT_READY, "the event is not complete")
    };
    fn cuEventSynchronize(event: u64) [About::Event(event)] |sim| {
        sim.context()?;
        let machine = sim.machine()?;
        machine.forbidden_beside_captures()?;
        Ok(machine.sync_event(event, Deadline::NEVER)?)
    };
    fn cuEventElapsedTime(milliseconds: Out<f32>, start: u64, end: u64) [About::Event(end)] |sim| {
        elapsed(sim, milliseconds, start, end)
    };
    fn cuEventElapsedTime_v2(milliseconds: Out<f32>, start: u64, end: u64) [About::Event(end)] |sim| {
        elapsed(sim, milliseconds, start, end)
    };
}

//! Streams, host functions, and capture.

use std::{
    collections::HashMap,
    ffi::c_void,
    sync::atomic::{AtomicU64, Ordering},
};

use backend_cpu::strict::{CaptureMode, CaptureStatus, NULL_STREAM, PER_THREAD_STREAM};
use hal::Deadline;
use parking_lot::Mutex;

use crate::{
    abi::{Answer, HostFn, Out, OutAny, driver, refused, status},
    gate,
    log::About,
    sim::Sim,
};

const NON_BLOCKING: u32 = 1;

/// What a created stream was created with.
#[derive(Debug, Clone, Copy)]
struct Made {
    context: u64,
    flags: u32,
    priority: i32,
}

/// The created streams, and the graphs that captures gave.
#[derive(Debug, Default)]
pub(crate) struct StreamTable {
    made: Mutex<HashMap<u64, Made>>,
    /// How many nodes each graph has.
    graphs: Mutex<HashMap<u64, usize>>,
    last_graph: AtomicU64,
}

/// Handles of graphs start here.
const FIRST_GRAPH: u64 = 0x6a00_0000_0000;

impl Sim {
    /// Checks a stream to queue work on: it must exist and be of the current context.
    pub(crate) fn usable(&self, stream: u64) -> Answer {
        let (context, _) = self.context()?;
        match self.made(stream)? {
            Some(made) if made.context != context => {
                refused(status::INVALID_HANDLE, "the stream is of another context than the current one")
            }
            _ => Ok(()),
        }
    }

    /// What a stream was created with; `None` for a default stream.
    fn made(&self, stream: u64) -> Answer<Option<Made>> {
        if stream <= PER_THREAD_STREAM {
            return Ok(None);
        }
        match self.streams.made.lock().get(&stream) {
            Some(&made) => Ok(Some(made)),
            None => refused(status::INVALID_HANDLE, format!("there is no stream {stream:#x}")),
        }
    }

    fn create_stream(&self, out: Out<u64>, flags: u32, priority: i32) -> Answer {
        let (context, _) = self.context()?;
        if flags & !NON_BLOCKING != 0 || out.is_null() {
            return refused(status::INVALID_VALUE, format!("flags {flags:#x}"));
        }
        let machine = self.machine()?;
        let stream = if flags & NON_BLOCKING != 0 {
            machine.create_stream()?
        } else {
            machine.create_blocking_stream()?
        };
        self.streams.made.lock().insert(stream, Made { context, flags, priority });
        out.set(stream)
    }

    fn capture_info(&self, stream: u64, state: Out<u32>, id: Out<u64>) -> Answer {
        self.context()?;
        let answer = self.machine()?.capture_status(stream)?;
        if answer != CaptureStatus::None {
            id.offer(stream)?;
        }
        state.set(number(answer))
    }
}

fn number(answer: CaptureStatus) -> u32 {
    match answer {
        CaptureStatus::None => 0,
        CaptureStatus::Active => 1,
        CaptureStatus::Invalidated => 2,
    }
}

fn mode(number: u32) -> Answer<CaptureMode> {
    match number {
        0 => Ok(CaptureMode::Global),
        1 => Ok(CaptureMode::ThreadLocal),
        2 => Ok(CaptureMode::Relaxed),
        _ => refused(status::INVALID_VALUE, format!("no capture mode {number}")),
    }
}

driver! {
    fn cuStreamCreate(stream: Out<u64>, flags: u32) [About::Nothing] |sim| {
        sim.create_stream(stream, flags, 0)
    };
    fn cuStreamCreateWithPriority(stream: Out<u64>, flags: u32, priority: i32) [About::Nothing] |sim| {
        sim.create_stream(stream, flags, priority.clamp(-5, 0))
    };
    fn cuStreamDestroy_v2(stream: u64) [About::Stream(stream)] |sim| {
        sim.context()?;
        if sim.made(stream)?.is_none() {
            return refused(status::INVALID_HANDLE, "a default stream is not destroyed");
        }
        sim.machine()?.destroy_stream(stream)?;
        sim.streams.made.lock().remove(&stream);
        Ok(())
    };
    fn cuStreamSynchronize(stream: u64) [About::Stream(stream)] |sim| {
        sim.context()?;
        sim.made(stream)?;
        let machine = sim.machine()?;
        // Whether waiting for one stream beside another one's capture is allowed is not documented.
        machine.forbidden_beside_captures()?;
        Ok(machine.sync_stream(stream, Deadline::NEVER)?)
    };
    fn cuStreamQuery(stream: u64) [About::Stream(stream)] |sim| {
        sim.context()?;
        sim.made(stream)?;
        let machine = sim.machine()?;
        machine.forbidden_beside_captures()?;
        if machine.query_stream(stream)? { Ok(()) } else { refused(status::NOT_READY, "work is queued") }
    };
    fn cuStreamWaitEvent(stream: u64, event: u64, flags: u32) [About::Stream(stream)] |sim| {
        if flags > 1 {
            return refused(status::INVALID_VALUE, format!("flags {flags:#x}"));
        }
        sim.usable(stream)?;
        Ok(sim.machine()?.wait_event(stream, event)?)
    };
    fn cuStreamGetCtx(stream: u64, context: Out<u64>) [About::Stream(stream)] |sim| {
        let (current, _) = sim.context()?;
        context.set(sim.made(stream)?.map_or(current, |made| made.context))
    };
    fn cuStreamGetDevice(stream: u64, device: Out<i32>) [About::Stream(stream)] |sim| {
        let (current, _) = sim.context()?;
        let context = sim.made(stream)?.map_or(current, |made| made.context);
        match sim.contexts.device_of(context) {
            Some(number) => device.set(number.cast_signed()),
            None => refused(status::INVALID_CONTEXT, "the stream's context is gone"),
        }
    };
    fn cuStreamGetFlags(stream: u64, flags: Out<u32>) [About::Stream(stream)] |sim| {
        sim.context()?;
        flags.set(sim.made(stream)?.map_or(0, |made| made.flags))
    };
    fn cuStreamGetPriority(stream: u64, priority: Out<i32>) [About::Stream(stream)] |sim| {
        sim.context()?;
        priority.set(sim.made(stream)?.map_or(0, |made| made.priority))
    };
    fn cuStreamGetId(stream: u64, id: Out<u64>) [About::Stream(stream)] |sim| {
        let (_, device) = sim.context()?;
        sim.made(stream)?;
        // A default stream is a stream of the context, or of the thread in the context.
        let thread = rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned();
        id.set(match stream {
            PER_THREAD_STREAM => u64::from(device) << 32 | u64::from(thread) | 1 << 48,
            created if created > PER_THREAD_STREAM => created,
            _ => NULL_STREAM | u64::from(device) << 32 | 1 << 49,
        })
    };
    fn cuLaunchHostFunc(stream: u64, function: HostFn, data: *mut c_void) [About::Stream(stream)] |sim| {
        let Some(function) = function else { return refused(status::INVALID_VALUE, "no function") };
        sim.usable(stream)?;
        let data = data.expose_provenance();
        let work = move || gate::host_function(|| function(std::ptr::with_exposed_provenance_mut(data)));
        Ok(sim.machine()?.enqueue(stream, work)?)
    };

    fn cuStreamBeginCapture_v2(stream: u64, number: u32) [About::Stream(stream)] |sim| {
        sim.usable(stream)?;
        Ok(sim.machine()?.begin_capture(stream, mode(number)?)?)
    };
    fn cuStreamEndCapture(stream: u64, graph: Out<u64>) [About::Stream(stream)] |sim| {
        sim.context()?;
        // A spoiled capture gives no graph, and the caller is told so even where it ignores the status.
        graph.set(0)?;
        let nodes = sim.machine()?.end_capture(stream)?;
        let handle = FIRST_GRAPH + sim.streams.last_graph.fetch_add(1, Ordering::Relaxed);
        sim.streams.graphs.lock().insert(handle, nodes);
        graph.set(handle)
    };
    fn cuStreamIsCapturing(stream: u64, state: Out<u32>) [About::Stream(stream)] |sim| {
        sim.context()?;
        sim.made(stream)?;
        state.set(number(sim.machine()?.capture_status(stream)?))
    };
    fn cuStreamGetCaptureInfo_v2(
        stream: u64, state: Out<u32>, id: Out<u64>, graph: Out<u64>, dependencies: Out<u64>, count: Out<usize>
    ) [About::Stream(stream)] |sim| {
        graph.offer(0)?;
        dependencies.offer(0)?;
        count.offer(0)?;
        sim.capture_info(stream, state, id)
    };
    fn cuStreamGetCaptureInfo_v3(
        stream: u64, state: Out<u32>, id: Out<u64>, graph: Out<u64>, dependencies: Out<u64>, _edges: OutAny,
        count: Out<usize>
    ) [About::Stream(stream)] |sim| {
        graph.offer(0)?;
        dependencies.offer(0)?;
        count.offer(0)?;
        sim.capture_info(stream, state, id)
    };
    fn cuThreadExchangeStreamCaptureMode(change: Out<u32>) [About::Nothing] |sim| {
        let before = sim.machine()?.exchange_capture_mode(mode(change.get()?)?)?;
        change.set(match before {
            CaptureMode::Global => 0,
            CaptureMode::ThreadLocal => 1,
            CaptureMode::Relaxed => 2,
        })
    };
    fn cuGraphGetNodes(graph: u64, nodes: Out<u64>, count: Out<usize>) [About::Handle(graph)] |sim| {
        match sim.streams.graphs.lock().get(&graph) {
            Some(&have) if nodes.is_null() => count.set(have),
            Some(_) => refused(status::NOT_SUPPORTED, "nodes have no handles here"),
            None => refused(status::INVALID_VALUE, format!("there is no graph {graph:#x}")),
        }
    };
    fn cuGraphDestroy(graph: u64) [About::Handle(graph)] |sim| {
        match sim.streams.graphs.lock().remove(&graph) {
            Some(_) => Ok(()),
            None => refused(status::INVALID_VALUE, format!("there is no graph {graph:#x}")),
        }
    };
}

//! Every call that was made, and by whom.

use std::{
    collections::VecDeque,
    sync::Arc,
    thread::{self, ThreadId},
};

use parking_lot::Mutex;

/// The log keeps this many calls; the counters count all.
const KEPT: usize = 100_000;

macro_rules! ops {
    ($($(#[$doc:meta])* $op:ident = $name:literal,)*) => {
        /// The machine's calls.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Op { $($(#[$doc])* $op,)* }

        impl Op {
            /// All of them.
            pub const ALL: &[Op] = &[$(Op::$op,)*];

            /// Its name in the log, also for choosing it in a variable of the environment.
            pub fn name(self) -> &'static str {
                match self { $(Op::$op => $name,)* }
            }

            /// The call of this name.
            pub fn from_name(name: &str) -> Option<Op> {
                Self::ALL.iter().copied().find(|op| op.name() == name)
            }
        }
    };
}

ops! {
    /// Makes a device current on the thread.
    Bind = "bind",
    /// Takes the thread's device away.
    Unbind = "unbind",
    /// Makes a device current above the one before.
    Push = "push",
    /// Goes back to the one before.
    Pop = "pop",
    /// Asks which device is current, if any.
    Current = "current",
    /// Asks for the current device's number; see [`DefaultDevice`](super::DefaultDevice).
    CurrentDevice = "current_device",
    /// Takes a reference to a device.
    Retain = "retain",
    /// Gives one back.
    Release = "release",
    /// Asks for free and total memory.
    MemoryInfo = "memory_info",
    /// Allocates device memory.
    Allocate = "allocate",
    /// Frees it.
    Free = "free",
    /// Asks about an address.
    Locate = "locate",
    /// Copies and waits.
    Copy = "copy",
    /// Creates a stream.
    CreateStream = "create_stream",
    /// Destroys one.
    DestroyStream = "destroy_stream",
    /// Drops a stream's queued work.
    AbortStream = "abort_stream",
    /// Waits for a stream (the blocking form).
    SyncStream = "sync_stream",
    /// Asks whether a stream is done.
    QueryStream = "query_stream",
    /// Waits for everything on the device. Nothing in Haulier may call it.
    SyncDevice = "sync_device",
    /// Queues a host callback.
    Enqueue = "enqueue",
    /// Queues a fill.
    Fill = "fill",
    /// Queues a copy.
    CopyAsync = "copy_async",
    /// Creates an event.
    CreateEvent = "create_event",
    /// Destroys one.
    DestroyEvent = "destroy_event",
    /// Records an event on a stream.
    RecordEvent = "record_event",
    /// Asks whether an event is complete.
    QueryEvent = "query_event",
    /// Waits for an event.
    SyncEvent = "sync_event",
    /// Makes a stream wait for an event.
    WaitEvent = "wait_event",
    /// Begins to capture a stream.
    BeginCapture = "begin_capture",
    /// Ends it.
    EndCapture = "end_capture",
    /// Asks whether a stream is captured. Spoils nothing.
    CaptureStatus = "capture_status",
    /// Changes what the thread may do beside captures.
    ExchangeCaptureMode = "exchange_capture_mode",
    /// Makes a handle for an allocation.
    Export = "export",
    /// Opens one.
    Import = "import",
    /// Closes what was opened.
    CloseImport = "close_import",
    /// Makes physical memory.
    CreatePhysical = "create_physical",
    /// Gives a handle to it back.
    ReleasePhysical = "release_physical",
    /// Takes a handle to what is mapped.
    RetainPhysical = "retain_physical",
    /// Reserves addresses.
    Reserve = "reserve",
    /// Takes a reservation back.
    Unreserve = "unreserve",
    /// Maps physical memory.
    Map = "map",
    /// Takes mappings away.
    Unmap = "unmap",
    /// Says which devices may use what is mapped.
    SetAccess = "set_access",
    /// Registers memory.
    Register = "register",
    /// Takes a registration back.
    Unregister = "unregister",
}

/// What a call was about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Argument {
    /// Nothing in particular.
    None,
    /// A device's number in this process.
    Device(u32),
    /// An address.
    Address(usize),
    /// A stream's handle.
    Stream(u64),
    /// An event's handle.
    Event(u64),
    /// A handle of physical memory.
    Handle(u64),
}

/// How a call ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Not yet.
    Running,
    /// Well.
    Done,
    /// With this vendor code.
    Failed(i64),
}

/// One call.
#[derive(Debug, Clone)]
pub struct Call {
    /// Its place in the order in which calls began.
    pub number: u64,
    /// What was called.
    pub op: Op,
    /// On which thread.
    pub thread: ThreadId,
    /// That thread's name.
    pub thread_name: Option<Arc<str>>,
    /// The device that was current there when the call began.
    pub current: Option<u32>,
    /// The device that the argument's memory or stream is of. A call of a buffer's device while another one is current
    /// shows as `owner` and `current` that differ.
    pub owner: Option<u32>,
    /// What it was about.
    pub argument: Argument,
    /// How it ended.
    pub outcome: Outcome,
}

/// The calls of a machine.
#[derive(Debug, Default)]
pub struct Log(Mutex<Calls>);

#[derive(Debug, Default)]
struct Calls {
    kept: VecDeque<Call>,
    next: u64,
    counts: Vec<u64>,
}

impl Log {
    /// How often `op` was called since the log was cleared, whatever came of it.
    pub fn count(&self, op: Op) -> u64 {
        self.0.lock().counts.get(op as usize).copied().unwrap_or(0)
    }

    /// The calls since the log was cleared, in the order in which they began; of very many, the last ones.
    pub fn calls(&self) -> Vec<Call> {
        self.0.lock().kept.iter().cloned().collect()
    }

    /// The calls of `op`.
    pub fn of(&self, op: Op) -> Vec<Call> {
        self.0.lock().kept.iter().filter(|call| call.op == op).cloned().collect()
    }

    /// Forgets all calls and counts.
    pub fn clear(&self) {
        let mut calls = self.0.lock();
        calls.kept.clear();
        calls.counts.clear();
    }

    pub(super) fn begin(&self, op: Op, argument: Argument, current: Option<u32>, owner: Option<u32>) -> u64 {
        let thread = thread::current();
        let mut calls = self.0.lock();
        let number = calls.next;
        calls.next += 1;
        calls.counts.resize(Op::ALL.len(), 0);
        calls.counts[op as usize] += 1;
        if calls.kept.len() == KEPT {
            calls.kept.pop_front();
        }
        calls.kept.push_back(Call {
            number,
            op,
            thread: thread.id(),
            thread_name: thread.name().map(Arc::from),
            current,
            owner,
            argument,
            outcome: Outcome::Running,
        });
        number
    }

    pub(super) fn end(&self, number: u64, outcome: Outcome) {
        let mut calls = self.0.lock();
        // Numbers are consecutive, so the place follows from the first one; a call may have been cleared meanwhile.
        let Some(first) = calls.kept.front().map(|call| call.number) else { return };
        let Some(at) = number.checked_sub(first) else { return };
        if let Some(call) = calls.kept.get_mut(at as usize) {
            call.outcome = outcome;
        }
    }
}

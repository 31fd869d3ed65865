//! Every call of the driver's functions, and by whom.

use std::{
    collections::{HashMap, VecDeque},
    fs::{File, OpenOptions},
    io::Write,
    path::Path,
    process,
};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

/// The log keeps this many calls; the counters count all.
const KEPT: usize = 200_000;

/// One call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Call {
    /// Its place in the order in which calls began.
    pub number: u64,
    /// The exported function's name.
    pub function: String,
    /// The kernel's number of the thread, as `gettid` gives it.
    pub thread: u32,
    /// The thread's name, of which the kernel keeps 15 bytes.
    pub thread_name: String,
    /// The device whose context was current there when the call began, by its ordinal in this process.
    pub device: Option<u32>,
    /// The device that the argument is of. A call about a buffer of another device than the current one shows as
    /// `owner` and `device` that differ.
    pub owner: Option<u32>,
    /// What the call was about: `device 0`, or `address`, `stream`, `event`, `context` or `handle` and a number such as
    /// `0x1001`, or nothing.
    pub about: String,
    /// What it answered; `None` while it runs.
    pub status: Option<i32>,
    /// For a refusal, what led to it.
    pub why: Option<String>,
}

/// What a call is about.
#[derive(Debug, Clone, Copy)]
pub enum About {
    /// Nothing that has an owner.
    Nothing,
    /// A device, by its ordinal.
    Device(i32),
    /// An address.
    Address(u64),
    /// A stream's handle.
    Stream(u64),
    /// An event's handle.
    Event(u64),
    /// A context's handle.
    Context(u64),
    /// Any other handle.
    Handle(u64),
}

impl About {
    fn text(self) -> String {
        match self {
            About::Nothing => String::new(),
            About::Device(device) => format!("device {device}"),
            About::Address(address) => format!("address {address:#x}"),
            About::Stream(stream) => format!("stream {stream:#x}"),
            About::Event(event) => format!("event {event:#x}"),
            About::Context(context) => format!("context {context:#x}"),
            About::Handle(handle) => format!("handle {handle:#x}"),
        }
    }
}

/// The calls of a process.
#[derive(Debug, Default)]
pub struct Log {
    calls: Mutex<Calls>,
    file: Option<Mutex<File>>,
}

#[derive(Debug, Default)]
struct Calls {
    kept: VecDeque<Call>,
    next: u64,
    counts: HashMap<&'static str, u64>,
}

impl Log {
    /// A log that is also appended to `<vendor>-<pid>.jsonl` in `directory`.
    ///
    /// # Errors
    /// What the system says of the file.
    pub fn new(directory: Option<&Path>, vendor: &str) -> Result<Self, String> {
        let open = |directory: &Path| {
            let path = directory.join(format!("{vendor}-{}.jsonl", process::id()));
            let file = OpenOptions::new().create(true).append(true).open(&path);
            file.map(Mutex::new).map_err(|e| format!("{}: {e}", path.display()))
        };
        Ok(Log { calls: Mutex::default(), file: directory.map(open).transpose()? })
    }

    /// A call begins; answers with its number.
    pub fn begin(
        &self,
        function: &'static str,
        device: Option<u32>,
        about: About,
        owner: Option<u32>,
    ) -> u64 {
        let thread_name = rustix::thread::name().map(|name| name.to_string_lossy().into_owned());
        let mut call = Call {
            number: 0,
            function: function.into(),
            thread: rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned(),
            thread_name: thread_name.unwrap_or_default(),
            device,
            owner,
            about: about.text(),
            status: None,
            why: None,
        };
        let mut calls = self.calls.lock();
        call.number = calls.next;
        calls.next += 1;
        *calls.counts.entry(function).or_default() += 1;
        if calls.kept.len() == KEPT {
            calls.kept.pop_front();
        }
        calls.kept.push_back(call);
        calls.next - 1
    }

    /// It has ended with this status.
    pub fn end(&self, number: u64, status: i32, why: Option<String>) {
        let mut calls = self.calls.lock();
        // It may have been cleared meanwhile.
        if let Some(call) = calls.at(number) {
            call.status = Some(status);
            call.why = why;
            self.append(call);
        }
    }

    /// The call hangs now, and may never end: the file learns of it already.
    pub fn hanging(&self, number: u64) {
        if let Some(call) = self.calls.lock().at(number) {
            self.append(call);
        }
    }

    /// How often a function was called.
    pub fn count(&self, function: &str) -> u64 {
        self.calls.lock().counts.get(function).copied().unwrap_or(0)
    }

    /// Forgets the calls.
    pub fn clear(&self) {
        let mut calls = self.calls.lock();
        calls.kept.clear();
        calls.counts.clear();
    }

    /// One line of JSON for each call.
    pub fn lines(&self) -> String {
        let calls = self.calls.lock();
        calls.kept.iter().filter_map(line).collect()
    }

    fn append(&self, call: &Call) {
        if let Some(file) = &self.file
            && let Some(line) = line(call)
            && let Err(e) = file.lock().write_all(line.as_bytes())
        {
            eprintln!("haulier-sim: the log: {e}");
        }
    }
}

impl Calls {
    /// Numbers are consecutive, so the place follows from the first one.
    fn at(&mut self, number: u64) -> Option<&mut Call> {
        let first = self.kept.front()?.number;
        self.kept.get_mut(usize::try_from(number.checked_sub(first)?).ok()?)
    }
}

fn line(call: &Call) -> Option<String> {
    serde_json::to_string(call).ok().map(|json| json + "\n")
}

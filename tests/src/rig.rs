//! What the device cases run on: a node and its clients on strict machines of the same devices, with call logs apart.

use std::{
    io,
    path::PathBuf,
    sync::{Arc, OnceLock},
    thread,
    time::{Duration, Instant},
};

use backend_cpu::strict::{
    Argument, Builder, Call, Log, Machine, MachineOwner, Op, StrictDevice, StrictStream,
};
use hal::{Buffer, Device, DeviceExt, LogicalId, Region};
use haulier::{
    Options, StoreClient,
    node::{Node, NodeConfig},
    store::{Config, Store},
};
use parking_lot::Mutex;
use tempfile::TempDir;

/// Bytes of each device.
const MEMORY: usize = 1 << 30;
/// Bytes of a store.
pub const POOL: u64 = 64 << 20;
/// How long something that happens by itself may take before its test fails. Nothing here is about speed.
const PATIENCE: Duration = Duration::from_secs(30);

/// A machine with so many devices, which is the same one in every process.
pub fn machine(devices: u32) -> Builder {
    Machine::builder().devices(devices).memory(MEMORY)
}

/// A store for a test.
///
/// # Panics
/// Where the memory cannot be had.
pub fn store() -> Store {
    store_of(POOL)
}

/// A store of so many bytes.
///
/// # Panics
/// Where the memory cannot be had.
pub fn store_of(pool: u64) -> Store {
    Store::open(Config::new(pool), |_, _| {}).expect("a pool's memory can be had")
}

/// The two sides.
pub struct Rig {
    // A node waits for its sessions, so what they hang in is let go first; see `drop`.
    node: Option<Node>,
    devices: Vec<StrictDevice>,
    here: MachineOwner,
    there: MachineOwner,
    dir: TempDir,
}

impl Rig {
    /// Two devices, seen by both sides.
    pub fn new() -> Self {
        Self::with(machine(2), machine(2))
    }

    /// The clients' machine and the node's.
    ///
    /// # Panics
    /// Where one cannot be had.
    pub fn with(clients: Builder, nodes: Builder) -> Self {
        let (here, there) = (clients.build().expect("a machine"), nodes.build().expect("a machine"));
        let devices = there.devices();
        Self::over(here, there, devices)
    }

    /// As [`new`](Self::new), with a node that opens no memory of devices: all goes by staging.
    ///
    /// # Panics
    /// As [`with`](Self::with).
    pub fn staging() -> Self {
        let (here, there) = (machine(2).build().expect("a machine"), machine(2).build().expect("a machine"));
        Self::over(here, there, Vec::new())
    }

    fn over(here: MachineOwner, there: MachineOwner, devices: Vec<StrictDevice>) -> Self {
        let dir = tempfile::tempdir().expect("a private directory");
        let mut rig = Rig { node: None, devices, here, there, dir };
        rig.start_node();
        rig
    }

    /// Starts the node with an empty store.
    ///
    /// # Panics
    /// Where it does not start.
    pub fn start_node(&mut self) {
        let config = NodeConfig {
            socket: self.socket(),
            store: store(),
            devices: self.devices.clone(),
            metrics: None,
            clients_max: 64,
        };
        self.node = Some(Node::start(config).expect("the node starts"));
    }

    /// Ends the node, and all that it stores with it.
    pub fn stop_node(&mut self) {
        self.node = None;
    }

    /// Where the node serves.
    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("private/node.sock")
    }

    /// The clients' machine.
    pub fn here(&self) -> &MachineOwner {
        &self.here
    }

    /// The node's.
    pub fn there(&self) -> &MachineOwner {
        &self.there
    }

    /// A device of the clients' machine.
    ///
    /// # Panics
    /// Where there is none.
    pub fn device(&self, logical: u32) -> StrictDevice {
        self.here.device(LogicalId(logical)).expect("the device is visible")
    }

    /// A client of the node on that device.
    ///
    /// # Panics
    /// Where it cannot be opened.
    pub fn client(&self, logical: u32) -> StoreClient<StrictDevice> {
        StoreClient::connect(self.device(logical), self.socket(), Options::default())
            .expect("the node serves")
    }

    /// A counter of the node: the sum over all whose name is `name` and whose labels have all of `labels`.
    pub fn counter(&self, name: &str, labels: &[&str]) -> u64 {
        counter(&self.node.as_ref().expect("the node serves").metrics(), name, labels)
    }

    /// How many values were stored by this path.
    pub fn stored(&self, path: &str) -> u64 {
        let path = format!("path=\"{path}\"");
        self.counter("haulier_operations_total", &["op=\"put\"", &path, "outcome=\"stored\""])
    }

    /// How many values came by staging for this reason.
    pub fn fell_back(&self, reason: &str) -> u64 {
        self.counter("haulier_fallbacks_total", &[&format!("reason=\"{reason}\"")])
    }

    /// How many allocations of clients the node has open.
    pub fn imports(&self) -> u64 {
        self.counter("haulier_imports", &[])
    }
}

impl Default for Rig {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        for machine in [&self.here, &self.there] {
            machine.faults().clear();
            machine.faults().unblock_all();
        }
        self.node = None;
        if !thread::panicking() {
            assert_eq!(
                (self.here.drop_failures(), self.there.drop_failures()),
                (0, 0),
                "something was not given back"
            );
            for machine in [&self.here, &self.there] {
                assert_eq!(machine.log().count(Op::SyncDevice), 0, "a whole device was waited for");
            }
        }
    }
}

/// Reads a counter out of Prometheus text.
pub fn counter(text: &str, name: &str, labels: &[&str]) -> u64 {
    text.lines()
        .filter_map(|line| {
            let (series, value) = line.rsplit_once(' ')?;
            let (found, of) = series.split_once('{').unwrap_or((series, ""));
            (found == name && labels.iter().all(|label| of.contains(label)))
                .then(|| value.parse::<u64>().ok())?
        })
        .sum()
}

/// Device memory that holds `bytes`.
///
/// # Panics
/// Where the device refuses.
pub fn filled(device: &StrictDevice, bytes: &[u8]) -> Buffer<StrictDevice> {
    let buffer = on_a_bound_thread(device, |device| device.buffer(bytes.len()).expect("device memory"));
    device.machine().poke(buffer.region().addr, bytes).expect("it is allocated");
    buffer
}

/// What a region of device memory holds, past all streams.
///
/// # Panics
/// Where nothing is allocated there.
pub fn peek(machine: &Machine, region: Region) -> Vec<u8> {
    machine.peek(region.addr, region.len).expect("it is allocated")
}

/// A new stream of the device.
///
/// # Panics
/// Where the device refuses.
pub fn stream(device: &StrictDevice) -> StrictStream {
    on_a_bound_thread(device, |device| {
        let bound = device.bind_current().expect("the thread is bound");
        device.create_stream(&bound).expect("a stream")
    })
}

/// Queues setting all of `region` to `byte`.
///
/// # Panics
/// Where the device refuses.
pub fn queue_fill(device: &StrictDevice, stream: StrictStream, region: Region, byte: u8) {
    on_a_bound_thread(device, |device| device.machine().fill(stream.raw(), region.addr, region.len, byte))
        .expect("it is queued");
}

/// Runs `work` on a thread of its own that has the device: the calling thread's device is left alone, also where a
/// machine gives no thread back.
pub fn on_a_bound_thread<R: Send>(device: &StrictDevice, work: impl FnOnce(&StrictDevice) -> R + Send) -> R {
    thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let _bound = device.bind_owned_thread().expect("the machine is up");
            work(device)
        });
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Checks that each call that needs a device had one, and that calls about a device's memory or stream had that device.
///
/// # Panics
/// With the first call that had not.
pub fn every_call_had_its_device(log: &Log) {
    let calls = log.calls();
    assert!(!calls.is_empty(), "nothing was called, so this shows nothing");
    for call in &calls {
        let needs_one = !matches!(
            call.op,
            Op::Bind
                | Op::Unbind
                | Op::Push
                | Op::Pop
                | Op::Current
                | Op::CurrentDevice
                | Op::ExchangeCaptureMode
        );
        assert!(!needs_one || call.current.is_some(), "without a device: {call:?}");
        assert!(call.owner.is_none() || call.owner == call.current, "with another device: {call:?}");
    }
    assert_eq!(log.count(Op::CurrentDevice), 0, "a thread was asked for its device's number");
}

/// The waits for streams, whether they blocked or only asked.
pub fn waits(log: &Log) -> Vec<Call> {
    log.calls().into_iter().filter(|call| matches!(call.op, Op::SyncStream | Op::QueryStream)).collect()
}

/// The streams that were waited for, in order.
pub fn streams_waited_for(log: &Log) -> Vec<u64> {
    let stream = |call: &Call| match call.argument {
        Argument::Stream(stream) => stream,
        other => panic!("a wait for {other:?}"),
    };
    waits(log).iter().map(stream).collect()
}

/// Waits until `what` holds.
///
/// # Panics
/// Where it does not come to hold.
pub fn eventually(what: &str, holds: impl Fn() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < end, "{what}: not within {PATIENCE:?}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// The lines that Haulier has logged in this process since the first call.
pub fn logged() -> Vec<String> {
    static LINES: OnceLock<Lines> = OnceLock::new();
    let lines = LINES.get_or_init(|| {
        let lines = Lines::default();
        let writer = lines.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_ansi(false)
            .with_max_level(tracing::Level::DEBUG)
            .with_writer(move || writer.clone())
            .finish();
        tracing::subscriber::set_global_default(subscriber).expect("nobody else has set one");
        lines
    });
    String::from_utf8_lossy(&lines.0.lock()).lines().map(str::to_owned).collect()
}

#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

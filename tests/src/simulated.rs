//! What the backends on simulated drivers have in common: a test in a process of its own, a node and a client in other
//! processes, and what a call log must not show.
//!
//! The driver of a process is one, with one log and one plan of faults. So tests run in processes of their own, and
//! conformance trials take turns.

use std::{
    env,
    marker::PhantomData,
    path::PathBuf,
    process::{self, Command},
    thread,
    time::Duration,
};

use hal::{Buffer, Device, DeviceExt, DeviceUuid, Region};
use haulier::{
    Options, StoreClient,
    node::{Node, NodeConfig},
};
use haulier_sim::{control::Control, log::Call};
use serde::{Deserialize, Serialize};
use tempfile::TempDir;

use crate::{
    peer::{Link, Peer},
    rig::{self, counter},
};

pub mod readiness;

/// Names the test that a process is there for.
const ALONE: &str = "HAULIER_TEST_ALONE";
/// How long a test may take before it is taken for hung.
const LIFE: Duration = Duration::from_secs(300);

/// A simulated driver and its backend: where it lies, and the names of its calls.
pub trait Simulated: 'static {
    /// The backend's device.
    type Device: Device;

    /// The role of a node's process, for `haulier-peer`.
    const NODE: &'static str;
    /// The role of a client's process.
    const CLIENT: &'static str;
    /// How the names begin of calls that need a current context.
    const FOR_A_CONTEXT: &'static [&'static str];
    /// Calls that a library never makes.
    const NEVER: &'static [&'static str];
    /// What exports an allocation.
    const EXPORT: &'static str;
    /// The number by which it says that it cannot.
    const NOT_SUPPORTED: i32;
    /// A number that means nothing but that something failed.
    const FAULT: i32;
    /// The calls of a wait for a stream that is not done, each of which can fail.
    const WAITS: &'static [&'static str];
    /// The one that is made once in each such wait.
    const WAITING: &'static str;
    /// How often a stream is asked or waited for by a put: where it is done, and where it is not.
    const ASKS: &'static [(&'static str, [u64; 2])];
    /// Waits that know no deadline.
    const UNBOUNDED: &'static [&'static str];

    /// The simulated driver of this process.
    fn sim() -> &'static Control;

    /// Every device of the simulated machine.
    fn devices() -> Vec<Self::Device>;

    /// The one with this id.
    ///
    /// # Panics
    /// Where the machine does not have it.
    fn device(logical: u32) -> Self::Device {
        Self::devices().swap_remove(logical as usize)
    }

    /// A new stream.
    fn stream(device: &Self::Device) -> <Self::Device as Device>::Stream;

    /// Its handle.
    fn raw(stream: <Self::Device as Device>::Stream) -> u64;
}

/// Whether this process is there for the calling test alone; it ends if it hangs.
///
/// # Panics
/// Where it is not called on the test's own thread.
pub fn is_alone() -> bool {
    let alone = env::var(ALONE).as_deref() == Ok(&test());
    if alone {
        thread::spawn(|| {
            thread::sleep(LIFE);
            eprintln!("the test hangs");
            process::abort();
        });
    }
    alone
}

/// Runs the calling test again in a process of its own, which `tweak` has seen. `label` names it where it fails.
///
/// # Panics
/// Where it fails there.
pub fn again(label: &str, tweak: impl FnOnce(&mut Command)) {
    let test = test();
    let mut again = Command::new(env::current_exe().expect("/proc is mounted"));
    again.args([&test, "--exact", "--nocapture", "--test-threads=1"]).env(ALONE, &test);
    tweak(&mut again);
    let output = again.output().expect("the test starts again");
    let said = String::from_utf8_lossy(&output.stdout);
    let passed = output.status.success() && said.contains("1 passed");
    assert!(passed, "{label} {}\n{said}{}", output.status, String::from_utf8_lossy(&output.stderr));
}

fn test() -> String {
    thread::current().name().expect("called on the test's own thread").to_owned()
}

/// Lets nothing that is queued on the stream from now on run.
///
/// # Panics
/// Where there is no such stream.
pub fn hold<S: Simulated>(device: &S::Device, stream: <S::Device as Device>::Stream) {
    device.bound(|_| Ok(S::sim().hold(S::raw(stream)))).expect("it binds").expect("the stream is there");
}

/// Ends [`hold`].
///
/// # Panics
/// Where there is no such stream.
pub fn release<S: Simulated>(device: &S::Device, stream: <S::Device as Device>::Stream) {
    device.bound(|_| Ok(S::sim().release(S::raw(stream)))).expect("it binds").expect("the stream is there");
}

/// Queues setting all of `region` to `byte`, as a kernel would.
///
/// # Panics
/// Where there is no such stream or memory.
pub fn queue_fill<S: Simulated>(
    device: &S::Device,
    stream: <S::Device as Device>::Stream,
    region: Region,
    byte: u8,
) {
    let fill = || S::sim().fill(S::raw(stream), region.addr as u64, region.len, byte);
    device.bound(|_| Ok(fill())).expect("it binds").expect("it is queued");
}

/// How many things on a stream have not run.
///
/// # Panics
/// Where there is no such stream.
pub fn pending<S: Simulated>(device: &S::Device, stream: <S::Device as Device>::Stream) -> u64 {
    device.bound(|_| Ok(S::sim().pending(S::raw(stream)))).expect("it binds").expect("the stream is there")
}

/// Device memory that holds `bytes`.
///
/// # Panics
/// Where the driver refuses.
pub fn filled<S: Simulated>(device: &S::Device, bytes: &[u8]) -> Buffer<S::Device> {
    let buffer = device.buffer(bytes.len()).expect("device memory");
    S::sim().poke(buffer.region().addr as u64, bytes).expect("it is allocated");
    buffer
}

/// What a region of device memory holds, past all streams.
///
/// # Panics
/// Where nothing is allocated there.
pub fn peek<S: Simulated>(region: Region) -> Vec<u8> {
    S::sim().peek(region.addr as u64, region.len).expect("it is allocated")
}

/// The calls that had another device current than the one they were about, or none, where they need one.
///
/// # Panics
/// Where nothing was called, which would show nothing.
pub fn misplaced<S: Simulated>(calls: Vec<Call>) -> Vec<Call> {
    assert!(!calls.is_empty(), "nothing was called, so this shows nothing");
    let needs_a_context =
        |call: &Call| S::FOR_A_CONTEXT.iter().any(|family| call.function.starts_with(family));
    let astray = |call: &Call| call.device.is_none() || call.owner.is_some_and(|o| call.device != Some(o));
    calls.into_iter().filter(|call| needs_a_context(call) && astray(call)).collect()
}

#[derive(Debug, Serialize, Deserialize)]
struct Setup {
    socket: PathBuf,
    /// Whether it opens memory of devices.
    imports: bool,
    pool: u64,
}

#[derive(Debug, Serialize, Deserialize)]
enum Ask {
    Metrics,
    Count(String),
    OpenImports,
    Misplaced,
    Faults(String),
}

#[derive(Debug, Serialize, Deserialize)]
enum Told {
    Ready,
    Text(String),
    Number(u64),
}

/// What a node's process does, until it is killed or the test ends.
///
/// # Panics
/// Where the node does not start.
pub fn serve<S: Simulated>(link: &Link) {
    let Setup { socket, imports, pool } = link.expect();
    let devices = if imports { S::devices() } else { Vec::new() };
    let sim = S::sim;
    let config = NodeConfig { socket, store: rig::store_of(pool), devices, metrics: None, clients_max: 64 };
    let node = Node::start(config).expect("the node starts");
    link.send(&Told::Ready, &[]);
    while let Some((ask, _)) = link.receive::<Ask>() {
        let told = match ask {
            Ask::Metrics => Told::Text(node.metrics()),
            Ask::Count(function) => Told::Number(sim().count(&function)),
            Ask::OpenImports => Told::Number(sim().open_imports().expect("it is counted")),
            Ask::Misplaced => {
                let calls = misplaced::<S>(sim().log());
                Told::Text(calls.iter().take(8).map(|call| format!("{call:?}\n")).collect())
            }
            Ask::Faults(plan) => Told::Number(sim().plan_faults(&plan).expect("it is a plan")),
        };
        link.send(&told, &[]);
    }
}

/// A node in a process of its own, with a simulated driver of its own of the same machine.
pub struct SimNode<S> {
    program: &'static str,
    imports: bool,
    pool: u64,
    environment: Vec<(&'static str, &'static str)>,
    dir: TempDir,
    peer: Option<Peer>,
    _driver: PhantomData<fn() -> S>,
}

impl<S: Simulated> SimNode<S> {
    /// A node that opens memory of devices. `program` is `haulier-peer`.
    pub fn new(program: &'static str) -> Self {
        Self::with(program, true, &[])
    }

    /// A node with another pool than [`rig::POOL`].
    ///
    /// # Panics
    /// Where it does not start.
    pub fn with_pool(program: &'static str, pool: u64) -> Self {
        Self::started(program, true, pool, &[])
    }

    /// A node that opens none: all goes by staging.
    pub fn staging(program: &'static str) -> Self {
        Self::with(program, false, &[])
    }

    /// A node in this environment.
    ///
    /// # Panics
    /// Where it does not start.
    pub fn with(program: &'static str, imports: bool, environment: &[(&'static str, &'static str)]) -> Self {
        Self::started(program, imports, rig::POOL, environment)
    }

    fn started(
        program: &'static str,
        imports: bool,
        pool: u64,
        environment: &[(&'static str, &'static str)],
    ) -> Self {
        let dir = tempfile::tempdir().expect("a private directory");
        let environment = environment.to_vec();
        let mut node = SimNode { program, imports, pool, environment, dir, peer: None, _driver: PhantomData };
        node.start();
        node
    }

    /// Starts it, with an empty store.
    ///
    /// # Panics
    /// Where it does not start.
    pub fn start(&mut self) {
        let peer = Peer::start_with(self.program, S::NODE, |command| {
            command.envs(self.environment.iter().copied());
        });
        peer.link().send(&Setup { socket: self.socket(), imports: self.imports, pool: self.pool }, &[]);
        let Told::Ready = peer.link().expect() else { panic!("the node does not start") };
        self.peer = Some(peer);
    }

    /// Ends it with SIGKILL.
    ///
    /// # Panics
    /// Where it is not running.
    pub fn kill(&mut self) {
        self.peer.take().expect("it runs").kill();
    }

    /// Where it serves.
    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("private/node.sock")
    }

    /// A client of it on this device.
    ///
    /// # Panics
    /// Where it cannot be opened.
    pub fn client(&self, device: &S::Device) -> StoreClient<S::Device> {
        StoreClient::connect(device.clone(), self.socket(), Options::default()).expect("the node serves")
    }

    fn ask(&self, ask: &Ask) -> Told {
        let peer = self.peer.as_ref().expect("it runs");
        peer.link().send(ask, &[]);
        peer.link().expect()
    }

    fn number(&self, ask: &Ask) -> u64 {
        match self.ask(ask) {
            Told::Number(number) => number,
            other => panic!("{other:?}"),
        }
    }

    fn text(&self, ask: &Ask) -> String {
        match self.ask(ask) {
            Told::Text(text) => text,
            other => panic!("{other:?}"),
        }
    }

    /// As [`rig::Rig::counter`].
    pub fn counter(&self, name: &str, labels: &[&str]) -> u64 {
        counter(&self.text(&Ask::Metrics), name, labels)
    }

    /// How many values were stored by this path.
    pub fn stored(&self, path: &str) -> u64 {
        let path = format!("path=\"{path}\"");
        self.counter("haulier_operations_total", &["op=\"put\"", &path, "outcome=\"stored\""])
    }

    /// How many requests to put came.
    pub fn puts(&self) -> u64 {
        self.counter("haulier_operations_total", &["op=\"put\""])
    }

    /// How many values came by staging for this reason.
    pub fn fell_back(&self, reason: &str) -> u64 {
        self.counter("haulier_fallbacks_total", &[&format!("reason=\"{reason}\"")])
    }

    /// How many imports its driver has open.
    pub fn open_imports(&self) -> u64 {
        self.number(&Ask::OpenImports)
    }

    /// How often its driver's function was called.
    pub fn calls(&self, function: &str) -> u64 {
        self.number(&Ask::Count(function.into()))
    }

    /// Plans faults in its driver.
    pub fn faults(&self, plan: &str) {
        self.number(&Ask::Faults(plan.into()));
    }

    /// Checks that each call had the right device current, and that none was of those that are never made.
    ///
    /// # Panics
    /// With the calls that had not.
    pub fn every_call_had_its_device(&self) {
        assert_eq!(self.text(&Ask::Misplaced), "", "in the node");
        for function in S::NEVER {
            assert_eq!(self.calls(function), 0, "the node called {function}");
        }
    }
}

/// What a client's process does.
#[derive(Debug, Serialize, Deserialize)]
struct Puts {
    socket: PathBuf,
    logical: u32,
    /// For each value the byte that it is made of; the key is its index.
    bytes: Vec<u8>,
    len: usize,
}

/// Puts what it is told to, and waits to be killed.
///
/// # Panics
/// Where a put fails.
pub fn client<S: Simulated>(link: &Link) {
    let Puts { socket, logical, bytes, len } = link.expect();
    let device = S::device(logical);
    let client = StoreClient::connect(device.clone(), socket, Options::default()).expect("the node serves");
    let mut kept = Vec::new();
    for (key, byte) in bytes.iter().enumerate() {
        let buffer = filled::<S>(&device, &vec![*byte; len]);
        client.put(&key.to_string(), &buffer).expect("it is stored");
        kept.push(buffer);
    }
    link.send(&device.identity().uuid, &[]);
    // Until the other end is gone.
    let _ = link.receive::<()>();
}

/// A client in another process that has put a value of each byte and holds the memory. `environment` is for its driver.
///
/// # Panics
/// Where it fails.
pub fn client_process<S: Simulated>(
    node: &SimNode<S>,
    logical: u32,
    bytes: &[u8],
    len: usize,
    environment: &[(&'static str, &'static str)],
) -> (Peer, DeviceUuid) {
    let peer = Peer::start_with(node.program, S::CLIENT, |command| {
        command.envs(environment.iter().copied());
    });
    peer.link().send(&Puts { socket: node.socket(), logical, bytes: bytes.to_vec(), len }, &[]);
    let uuid = peer.link().expect();
    (peer, uuid)
}

//! The CUDA backend on a simulated driver: a process that has one, what an application does with it, and a node in
//! another process. No GPU takes part in any of this.
//!
//! The driver of a process is one, with one log and one plan of faults. So tests run in processes of their own
//! ([`alone`]), and conformance trials take turns ([`CudaFixture`]).

use std::{
    env, io,
    path::{Path, PathBuf},
    process::{self, Command},
    sync::OnceLock,
    thread,
    time::Duration,
};

use backend_cuda::{CudaDevice, CudaStream};
use hal::{Buffer, Device, DeviceExt, DeviceUuid, NotExportable, Region};
use haulier::{
    Options, StoreClient,
    node::{Node, NodeConfig},
};
use haulier_sim_cuda::{Call, Control};
use serde::{Deserialize, Serialize};
use tempfile::TempDir;

use crate::{
    fixture::{Fixture, Need, Refuse},
    peer::{self, Link, Peer},
    rig::{self, counter},
};

mod driver;

pub use self::driver::{
    DriverFixture, device, event, expandable, library, on, queue_fill, stream, unshareable, wait_for,
};

/// Where the backend looks for the driver.
const LIBRARY: &str = "HAULIER_LIBCUDA";
/// Names the test that a process is there for.
const ALONE: &str = "HAULIER_TEST_ALONE";
/// How long a test may take before it is taken for hung.
const LIFE: Duration = Duration::from_secs(300);

/// Installs the simulated driver for this process and those that it starts. To be called first of all in a `main`; the
/// folder must be kept. `None` in a peer, which has its parent's.
///
/// # Panics
/// Where the driver is not built or there is no room for it.
pub fn install() -> Option<TempDir> {
    if peer::role().is_some() {
        return None;
    }
    Some(install_simulator().expect("the simulated driver is built"))
}

/// As [`install`], whatever the process is.
///
/// # Errors
/// Where the driver is not built or there is no room for it.
pub fn install_simulator() -> io::Result<TempDir> {
    let folder = tempfile::tempdir()?;
    let library = haulier_sim_cuda::install(folder.path(), &[])?;
    // SAFETY: the process has one thread yet.
    unsafe { env::set_var(LIBRARY, library) };
    Ok(folder)
}

/// Runs the calling test's `body` in a process of its own with the simulated driver and this environment.
///
/// # Panics
/// Where the body does.
pub fn alone(environment: &[(&str, &str)], body: impl FnOnce()) {
    let test = thread::current().name().expect("called on the test's own thread").to_owned();
    if env::var(ALONE).as_deref() == Ok(&test) {
        thread::spawn(|| {
            thread::sleep(LIFE);
            eprintln!("the test hangs");
            process::abort();
        });
        body();
        assert_eq!(sim().count("cuCtxSynchronize"), 0, "a whole device was waited for");
        return;
    }
    let folder = tempfile::tempdir().expect("a private directory");
    let library = haulier_sim_cuda::install(folder.path(), &[]).expect("the simulated driver is built");
    let mut again = Command::new(env::current_exe().expect("/proc is mounted"));
    again.args([&test, "--exact", "--nocapture", "--test-threads=1"]);
    again.env(ALONE, &test).env(LIBRARY, library).envs(environment.iter().copied());
    let output = again.output().expect("the test starts again");
    let said = String::from_utf8_lossy(&output.stdout);
    let passed = output.status.success() && said.contains("1 passed");
    assert!(passed, "{}\n{said}{}", output.status, String::from_utf8_lossy(&output.stderr));
}

/// The simulated driver of this process.
///
/// # Panics
/// Where the process has none.
pub fn sim() -> &'static Control {
    static SIM: OnceLock<Control> = OnceLock::new();
    SIM.get_or_init(|| {
        let library = env::var_os(LIBRARY).expect("the process was started with the simulated driver");
        Control::open(Path::new(&library)).expect("it is the simulated driver")
    })
}

/// Lets nothing that is queued on the stream from now on run.
///
/// # Panics
/// Where there is no such stream.
pub fn hold(device: &CudaDevice, stream: CudaStream) {
    on(device, || sim().hold(stream.raw() as u64)).expect("the stream is there");
}

/// Ends [`hold`].
///
/// # Panics
/// Where there is no such stream.
pub fn release(device: &CudaDevice, stream: CudaStream) {
    on(device, || sim().release(stream.raw() as u64)).expect("the stream is there");
}

/// Whether an event is not complete.
///
/// # Panics
/// Where there is no such event.
pub fn is_pending(event: u64) -> bool {
    sim().is_event_pending(event).expect("the event is there")
}

/// Device memory that holds `bytes`.
///
/// # Panics
/// Where the driver refuses.
pub fn filled(device: &CudaDevice, bytes: &[u8]) -> Buffer<CudaDevice> {
    let buffer = device.buffer(bytes.len()).expect("device memory");
    sim().poke(buffer.region().addr as u64, bytes).expect("it is allocated");
    buffer
}

/// What a region of device memory holds, past all streams.
///
/// # Panics
/// Where nothing is allocated there.
pub fn peek(region: Region) -> Vec<u8> {
    sim().peek(region.addr as u64, region.len).expect("it is allocated")
}

/// The calls of this process that had another device current than the one they were about, or none.
///
/// # Panics
/// Where nothing was called, which would show nothing.
pub fn misplaced() -> Vec<Call> {
    let needs_a_context = |call: &Call| {
        ["cuMem", "cuStream", "cuEvent", "cuIpc", "cuPointer", "cuLaunch"]
            .iter()
            .any(|family| call.function.starts_with(family))
    };
    let calls = sim().log();
    assert!(!calls.is_empty(), "nothing was called, so this shows nothing");
    calls
        .into_iter()
        .filter(|call| {
            let without = needs_a_context(call) && call.device.is_none();
            without || call.owner.is_some_and(|owner| needs_a_context(call) && call.device != Some(owner))
        })
        .collect()
}

/// The role of a node's process, for `haulier-peer`.
pub const NODE: &str = "cuda-node";
/// The role of a client's process.
pub const CLIENT: &str = "cuda-client";

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
pub fn serve(link: &Link) {
    let Setup { socket, imports, pool } = link.expect();
    let devices = if imports { CudaDevice::all().expect("the simulated driver") } else { Vec::new() };
    let config = NodeConfig { socket, store: rig::store_of(pool), devices, metrics: None, clients_max: 64 };
    let node = Node::start(config).expect("the node starts");
    link.send(&Told::Ready, &[]);
    while let Some((ask, _)) = link.receive::<Ask>() {
        let told = match ask {
            Ask::Metrics => Told::Text(node.metrics()),
            Ask::Count(function) => Told::Number(sim().count(&function)),
            Ask::OpenImports => Told::Number(sim().open_imports().expect("it is counted")),
            Ask::Misplaced => {
                let calls = misplaced();
                Told::Text(calls.iter().take(8).map(|call| format!("{call:?}\n")).collect())
            }
            Ask::Faults(plan) => Told::Number(sim().plan_faults(&plan).expect("it is a plan")),
        };
        link.send(&told, &[]);
    }
}

/// A node in a process of its own, with a simulated driver of its own of the same machine.
pub struct CudaNode {
    program: &'static str,
    imports: bool,
    pool: u64,
    environment: Vec<(&'static str, &'static str)>,
    dir: TempDir,
    peer: Option<Peer>,
}

impl CudaNode {
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
        let mut node =
            CudaNode { program, imports, pool, environment: environment.to_vec(), dir, peer: None };
        node.start();
        node
    }

    /// Starts it, with an empty store.
    ///
    /// # Panics
    /// Where it does not start.
    pub fn start(&mut self) {
        let peer = Peer::start_with(self.program, NODE, |command| {
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
    pub fn client(&self, device: &CudaDevice) -> StoreClient<CudaDevice> {
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

    /// Checks that each call had the right device current, and that no device was waited for as a whole.
    ///
    /// # Panics
    /// With the calls that had not.
    pub fn every_call_had_its_device(&self) {
        assert_eq!(self.text(&Ask::Misplaced), "", "in the node");
        assert_eq!(self.calls("cuCtxSynchronize"), 0, "the node waited for a whole device");
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
pub fn client(link: &Link) {
    let Puts { socket, logical, bytes, len } = link.expect();
    let device = device(logical);
    let client = StoreClient::connect(device.clone(), socket, Options::default()).expect("the node serves");
    let mut kept = Vec::new();
    for (key, byte) in bytes.iter().enumerate() {
        let buffer = filled(&device, &vec![*byte; len]);
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
pub fn client_process(
    node: &CudaNode,
    logical: u32,
    bytes: &[u8],
    len: usize,
    environment: &[(&'static str, &'static str)],
) -> (Peer, DeviceUuid) {
    let peer = Peer::start_with(node.program, CLIENT, |command| {
        command.envs(environment.iter().copied());
    });
    peer.link().send(&Puts { socket: node.socket(), logical, bytes: bytes.to_vec(), len }, &[]);
    let uuid = peer.link().expect();
    (peer, uuid)
}

/// A device of the CUDA backend on the simulated driver, for the conformance suite: [`DriverFixture`], and what only a
/// simulator can do.
pub struct CudaFixture {
    driver: DriverFixture,
}

impl CudaFixture {
    /// The device with this id of the two.
    ///
    /// # Panics
    /// Where [`install`] was not called.
    pub fn new(logical: u32) -> Self {
        let driver = DriverFixture::new(logical);
        sim().clear_log().expect("the log can be cleared");
        CudaFixture { driver }
    }
}

impl Drop for CudaFixture {
    fn drop(&mut self) {
        let cleared = sim().release_all().and(sim().clear_faults());
        if !thread::panicking() {
            cleared.expect("the simulator obeys");
            assert_eq!(sim().count("cuCtxSynchronize"), 0, "a whole device was waited for");
        }
    }
}

impl Fixture<CudaDevice> for CudaFixture {
    fn device(&self) -> &CudaDevice {
        self.driver.device()
    }

    fn lacks(&self) -> &'static [(Need, &'static str)] {
        &[
            (Need::OneWay, "this driver gives every thread back"),
            (Need::RegisterLimit, "this driver limits no registration of device memory"),
            (Need::RegisterAlignment, "this driver registers any address"),
            (Need::NoCaps, "a process has one driver, and this one can do everything"),
        ]
    }

    fn too_much(&self) -> usize {
        self.driver.too_much()
    }

    fn stream(&self) -> CudaStream {
        self.driver.stream()
    }

    fn hold(&self, stream: CudaStream) {
        hold(self.device(), stream);
    }

    fn release(&self, stream: CudaStream) {
        release(self.device(), stream);
    }

    fn queue_fill(&self, stream: CudaStream, region: Region, byte: u8) {
        self.driver.queue_fill(stream, region, byte);
    }

    fn queue_failure(&self, _stream: CudaStream) {
        // An illegal address in a kernel: told by whatever asks next.
        sim().plan_faults("cuStreamQuery:1=700").expect("it is a plan");
    }

    fn registered(&self) -> usize {
        self.driver.registered()
    }

    fn second(&self) -> CudaDevice {
        self.driver.second()
    }

    fn current(&self) -> Option<DeviceUuid> {
        self.driver.current()
    }

    fn switches(&self) -> u64 {
        let calls = ["cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuCtxSetCurrent"];
        calls.iter().map(|call| sim().count(call)).sum()
    }

    fn refuse(&self, call: Refuse, nth: u64, code: i64) {
        let functions: &[&str] = match call {
            Refuse::Bind => &["cuCtxPushCurrent_v2", "cuCtxSetCurrent"],
            Refuse::Allocate => &["cuMemAlloc_v2"],
            Refuse::Pin => &["cuMemHostRegister_v2"],
        };
        sim().clear_faults().expect("the simulator obeys");
        for function in functions {
            sim().plan_faults(&format!("{function}:{nth}={code}")).expect("it is a plan");
        }
    }

    fn per_thread_stream(&self) -> CudaStream {
        self.driver.per_thread_stream()
    }

    fn begin_capture(&self, stream: CudaStream) {
        self.driver.begin_capture(stream);
    }

    fn end_capture(&self, stream: CudaStream) -> bool {
        self.driver.end_capture(stream)
    }

    fn unshareable(&self) -> Vec<(Region, NotExportable)> {
        self.driver.unshareable()
    }
}

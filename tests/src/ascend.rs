//! The Ascend backend on a simulated runtime: a process that has one, what an application does with it, and its device
//! for the conformance suite. No NPU takes part in any of this.
//!
//! The runtime of a process is one and of one release, with one log and one plan of faults; so trials take turns.

use std::{
    env, io,
    path::{Path, PathBuf},
    sync::OnceLock,
    thread,
};

use backend_ascend::{AscendDevice, AscendStream};
use hal::{Buffer, DeviceUuid, NotExportable, Region};
use haulier_sim::{control::Control, install, log::Call};
use tempfile::TempDir;

use crate::{
    acl,
    fixture::{Fixture, Need, Refuse},
    peer,
    simulated::{self, SimNode, Simulated},
};

mod driver;

pub use self::driver::{
    DriverFixture, device, event, expandable, is_reached, library, on, queue_fill, stream, wait_for,
};

/// Where the backend looks for the runtime.
pub const LIBRARY: &str = "HAULIER_ASCENDCL";
/// The release that the runtime behaves as.
pub const RELEASE: &str = "HAULIER_SIM_CANN";
/// Those that tests run with, the latest one first.
pub const RELEASES: [&str; 2] = ["9.0.0", "8.5.0"];

/// The simulated runtime as cargo builds it. It is loaded and never linked: its control functions have the names of
/// those of the simulated CUDA driver, which is linked here.
const BUILT: (&str, &str) = ("libhaulier_sim_ascend.so", "haulier-sim-ascend");
/// What no release before 9.0 has.
const SINCE_9: &[&str] = &["aclrtMemGetAddressRange", "aclrtReserveMemAddressNoUCMemory"];

/// Puts a runtime of this release into a folder, which must be kept, and answers with its path.
///
/// # Panics
/// Where the runtime is not built or there is no room for it.
pub fn install_into(folder: &Path, release: &str) -> PathBuf {
    put_into(folder, release).expect("the simulated runtime is built")
}

fn put_into(folder: &Path, release: &str) -> io::Result<PathBuf> {
    let missing = if release < "9" { SINCE_9 } else { &[] };
    let there = folder.join("libascendcl.so");
    install::put(&install::library(BUILT.0, BUILT.1)?, &there, missing)?;
    Ok(there)
}

/// The simulated runtime where cargo built it.
///
/// # Errors
/// Where it is not built.
pub fn built() -> io::Result<PathBuf> {
    install::library(BUILT.0, BUILT.1)
}

/// Installs the simulated runtime for this process and those that it starts. To be called first of all in a `main`; the
/// folder must be kept. `None` in a peer, which has its parent's.
///
/// # Panics
/// As [`install_into`].
pub fn install(release: &str) -> Option<TempDir> {
    if peer::role().is_some() {
        return None;
    }
    Some(install_simulator(release).expect("the simulated runtime is built"))
}

/// As [`install()`], whatever the process is.
///
/// # Errors
/// Where the runtime is not built or there is no room for it.
pub fn install_simulator(release: &str) -> io::Result<TempDir> {
    let folder = tempfile::tempdir()?;
    let library = put_into(folder.path(), release)?;
    // SAFETY: the process has one thread yet.
    unsafe {
        env::set_var(LIBRARY, library);
        env::set_var(RELEASE, release);
    }
    Ok(folder)
}

/// The simulated runtime of this process.
///
/// # Panics
/// Where the process has none.
pub fn sim() -> &'static Control {
    static SIM: OnceLock<Control> = OnceLock::new();
    SIM.get_or_init(|| {
        let library = env::var_os(LIBRARY).expect("the process was started with the simulated runtime");
        Control::open(Path::new(&library)).expect("it is the simulated runtime")
    })
}

/// Runs the calling test's `body` in processes of their own with this environment, and a runtime of each of
/// [`RELEASES`].
///
/// # Panics
/// Where the body does.
pub fn alone(environment: &[(&str, &str)], body: impl FnOnce()) {
    if simulated::is_alone() {
        body();
        for function in Runtime::NEVER {
            assert_eq!(sim().count(function), 0, "{function}: a library has no business there");
        }
        return;
    }
    for release in RELEASES {
        let folder = tempfile::tempdir().expect("a private directory");
        let library = install_into(folder.path(), release);
        simulated::again(&format!("CANN {release}"), |command| {
            command.env(LIBRARY, library).env(RELEASE, release).envs(environment.iter().copied());
        });
    }
}

/// Whether the runtime of this process behaves as of CANN 9 or later.
///
/// # Panics
/// Where it has none.
pub fn is_9() -> bool {
    env::var(RELEASE).expect("the process was started with the simulated runtime").starts_with('9')
}

/// Device memory that holds `bytes`.
///
/// # Panics
/// Where the runtime refuses.
pub fn filled(device: &AscendDevice, bytes: &[u8]) -> Buffer<AscendDevice> {
    simulated::filled::<Runtime>(device, bytes)
}

/// What a region of device memory holds, past all streams.
///
/// # Panics
/// Where nothing is allocated there.
pub fn peek(region: Region) -> Vec<u8> {
    simulated::peek::<Runtime>(region)
}

/// The calls of this process that had another device current than the one they were about, or none.
///
/// # Panics
/// Where nothing was called, which would show nothing.
pub fn misplaced() -> Vec<Call> {
    simulated::misplaced::<Runtime>(sim().log())
}

/// Whether the calling thread has a context.
pub fn has_context() -> bool {
    let mut context = 0usize;
    acl!(aclrtGetCurrentContext(&mut context => *mut usize)) == 0 && context != 0
}

/// The simulated runtime, for the nodes and the tests that all simulators share.
pub enum Runtime {}

impl Simulated for Runtime {
    type Device = AscendDevice;

    const NODE: &'static str = "ascend-node";
    const CLIENT: &'static str = "ascend-client";
    const FOR_A_CONTEXT: &'static [&'static str] = &[
        "aclrtMalloc",
        "aclrtFree",
        "aclrtMemcpy",
        "aclrtMemset",
        "aclrtStream",
        "aclrtSynchronize",
        "aclrtIpc",
        "aclrtHostRegister",
        "aclrtHostUnregister",
        "aclrtLaunch",
        "aclrtCreate",
        "aclrtDestroy",
        "aclrtMapMem",
        "aclrtUnmapMem",
    ];
    const NEVER: &'static [&'static str] =
        &["aclrtSynchronizeDevice", "aclrtResetDevice", "aclrtResetDeviceForce", "aclFinalize"];
    const EXPORT: &'static str = "aclrtIpcMemGetExportKey";
    const NOT_SUPPORTED: i32 = 207000;
    const FAULT: i32 = 507899;
    const WAITS: &'static [&'static str] =
        &["aclmdlRICaptureGetInfo", "aclrtStreamQuery", "aclrtSynchronizeStreamWithTimeout"];
    const WAITING: &'static str = "aclrtSynchronizeStreamWithTimeout";
    // A question to each stream, and one wait, which is over at once where the stream is done.
    const ASKS: &'static [(&'static str, [u64; 2])] =
        &[("aclrtStreamQuery", [1, 1]), ("aclrtSynchronizeStreamWithTimeout", [1, 1])];
    const UNBOUNDED: &'static [&'static str] = &["aclrtSynchronizeStream", "aclrtSynchronizeEvent"];

    fn sim() -> &'static Control {
        sim()
    }

    fn devices() -> Vec<AscendDevice> {
        AscendDevice::all().expect("the simulated runtime")
    }

    fn stream(device: &AscendDevice) -> AscendStream {
        stream(device)
    }

    fn raw(stream: AscendStream) -> u64 {
        stream.raw() as u64
    }
}

/// A node in a process of its own, with a simulated runtime of its own of the same machine.
pub type AscendNode = SimNode<Runtime>;

/// A device of the Ascend backend on the simulated runtime, for the conformance suite: [`DriverFixture`], and what only a
/// simulator can do.
pub struct AscendFixture {
    driver: DriverFixture,
}

impl AscendFixture {
    /// The device with this id of the two.
    ///
    /// # Panics
    /// Where [`install()`] was not called.
    pub fn new(logical: u32) -> Self {
        let driver = DriverFixture::new(logical);
        sim().clear_log().expect("the log can be cleared");
        AscendFixture { driver }
    }
}

impl Drop for AscendFixture {
    fn drop(&mut self) {
        let cleared = sim().release_all().and(sim().clear_faults());
        if !thread::panicking() {
            cleared.expect("the simulator obeys");
            for call in Runtime::NEVER {
                assert_eq!(sim().count(call), 0, "{call}: a library has no business there");
            }
        }
    }
}

impl Fixture<AscendDevice> for AscendFixture {
    fn device(&self) -> &AscendDevice {
        self.driver.device()
    }

    fn lacks(&self) -> &'static [(Need, &'static str)] {
        &[
            (Need::Unbind, "this driver takes no thread's device away"),
            (Need::PerThreadStream, "this driver's streams mean the same on every thread"),
            (Need::RegisterLimit, "this driver limits no registration of device memory"),
            (Need::RegisterAlignment, "this driver registers device memory at any address"),
            (Need::NoCaps, "a process has one runtime, and this one can do everything"),
        ]
    }

    fn enter(&self) {
        self.driver.enter();
    }

    fn too_much(&self) -> usize {
        self.driver.too_much()
    }

    fn stream(&self) -> AscendStream {
        self.driver.stream()
    }

    fn hold(&self, stream: AscendStream) {
        simulated::hold::<Runtime>(self.device(), stream);
    }

    fn release(&self, stream: AscendStream) {
        simulated::release::<Runtime>(self.device(), stream);
    }

    fn queue_fill(&self, stream: AscendStream, region: Region, byte: u8) {
        self.driver.queue_fill(stream, region, byte);
    }

    fn queue_failure(&self, _stream: AscendStream) {
        // A kernel's: told by whatever waits next.
        for call in ["aclrtSynchronizeStreamWithTimeout", "aclrtSynchronizeStream"] {
            sim().plan_faults(&format!("{call}:1=507015")).expect("it is a plan");
        }
    }

    fn registered(&self) -> usize {
        self.driver.registered()
    }

    fn second(&self) -> AscendDevice {
        self.driver.second()
    }

    fn current(&self) -> Option<DeviceUuid> {
        self.driver.current()
    }

    fn switches(&self) -> u64 {
        ["aclrtSetCurrentContext", "aclrtSetDevice"].iter().map(|call| sim().count(call)).sum()
    }

    fn refuse(&self, call: Refuse, nth: u64, code: i64) {
        let function = match call {
            Refuse::Bind => "aclrtSetCurrentContext",
            Refuse::Allocate => "aclrtMalloc",
            Refuse::Pin => "aclrtHostRegister",
        };
        sim().clear_faults().expect("the simulator obeys");
        sim().plan_faults(&format!("{function}:{nth}={code}")).expect("it is a plan");
    }

    fn begin_capture(&self, stream: AscendStream) {
        self.driver.begin_capture(stream);
    }

    fn end_capture(&self, stream: AscendStream) -> bool {
        self.driver.end_capture(stream)
    }

    fn unshareable(&self) -> Vec<(Region, NotExportable)> {
        self.driver.unshareable()
    }
}

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
use hal::{DeviceUuid, NotExportable, Region};
use haulier_sim::{control::Control, install};
use tempfile::TempDir;

use crate::{
    fixture::{Fixture, Need, Refuse},
    peer,
};

mod driver;

pub use self::driver::{DriverFixture, device, event, is_reached, library, on, queue_fill, stream, wait_for};

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

/// As [`install`], whatever the process is.
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

/// Lets nothing that is queued on the stream from now on run.
///
/// # Panics
/// Where there is no such stream.
pub fn hold(device: &AscendDevice, stream: AscendStream) {
    on(device, || sim().hold(stream.raw() as u64)).expect("the stream is there");
}

/// Ends [`hold`].
///
/// # Panics
/// Where there is no such stream.
pub fn release(device: &AscendDevice, stream: AscendStream) {
    on(device, || sim().release(stream.raw() as u64)).expect("the stream is there");
}

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
            for call in ["aclrtSynchronizeDevice", "aclrtResetDevice", "aclrtResetDeviceForce", "aclFinalize"]
            {
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
        hold(self.device(), stream);
    }

    fn release(&self, stream: AscendStream) {
        release(self.device(), stream);
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

//! The CUDA backend on a simulated driver: a process that has one, and what an application does with it. No GPU takes
//! part in any of this.
//!
//! The driver of a process is one, with one log and one plan of faults. So tests run in processes of their own
//! ([`alone`]), and conformance trials take turns ([`CudaFixture`]).

use std::{env, io, path::Path, sync::OnceLock, thread};

use backend_cuda::{CudaDevice, CudaStream};
use hal::{Buffer, DeviceUuid, NotExportable, Region};
use haulier_sim_cuda::{Call, Control};
use tempfile::TempDir;

use crate::{
    fixture::{Fixture, Need, Refuse},
    peer,
    simulated::{self, SimNode, Simulated},
};

mod driver;

pub use self::driver::{
    DriverFixture, device, event, expandable, library, on, queue_fill, stream, unshareable, wait_for,
};

/// Where the backend looks for the driver.
const LIBRARY: &str = "HAULIER_LIBCUDA";

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
    if simulated::is_alone() {
        body();
        assert_eq!(sim().count("cuCtxSynchronize"), 0, "a whole device was waited for");
        return;
    }
    let folder = tempfile::tempdir().expect("a private directory");
    let library = haulier_sim_cuda::install(folder.path(), &[]).expect("the simulated driver is built");
    simulated::again("", |command| {
        command.env(LIBRARY, library).envs(environment.iter().copied());
    });
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
    simulated::hold::<Driver>(device, stream);
}

/// Ends [`hold`].
///
/// # Panics
/// Where there is no such stream.
pub fn release(device: &CudaDevice, stream: CudaStream) {
    simulated::release::<Driver>(device, stream);
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
    simulated::filled::<Driver>(device, bytes)
}

/// What a region of device memory holds, past all streams.
///
/// # Panics
/// Where nothing is allocated there.
pub fn peek(region: Region) -> Vec<u8> {
    simulated::peek::<Driver>(region)
}

/// The calls of this process that had another device current than the one they were about, or none.
///
/// # Panics
/// Where nothing was called, which would show nothing.
pub fn misplaced() -> Vec<Call> {
    simulated::misplaced::<Driver>(sim().log())
}

/// The simulated driver, for the nodes and the tests that all simulators share.
pub enum Driver {}

impl Simulated for Driver {
    type Device = CudaDevice;

    const NODE: &'static str = "cuda-node";
    const CLIENT: &'static str = "cuda-client";
    const FOR_A_CONTEXT: &'static [&'static str] =
        &["cuMem", "cuStream", "cuEvent", "cuIpc", "cuPointer", "cuLaunch"];
    const NEVER: &'static [&'static str] = &["cuCtxSynchronize"];
    const EXPORT: &'static str = "cuIpcGetMemHandle";
    const NOT_SUPPORTED: i32 = 801;
    const FAULT: i32 = 999;
    const WAITS: &'static [&'static str] = &["cuStreamQuery", "cuEventRecord", "cuEventQuery"];
    const WAITING: &'static str = "cuEventRecord";
    // A question to each stream, and where the answer is "not yet" one wait, which begins with a question.
    const ASKS: &'static [(&'static str, [u64; 2])] = &[("cuStreamQuery", [1, 2]), ("cuEventRecord", [0, 1])];
    const UNBOUNDED: &'static [&'static str] = &["cuStreamSynchronize", "cuEventSynchronize"];

    fn sim() -> &'static Control {
        sim()
    }

    fn devices() -> Vec<CudaDevice> {
        CudaDevice::all().expect("the simulated driver")
    }

    fn stream(device: &CudaDevice) -> CudaStream {
        stream(device)
    }

    fn raw(stream: CudaStream) -> u64 {
        stream.raw() as u64
    }
}

/// A node in a process of its own, with a simulated driver of its own of the same machine.
pub type CudaNode = SimNode<Driver>;

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

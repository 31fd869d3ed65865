//! The Ascend backend on a simulated runtime: a process that has one, what an application does with it, and its device
//! for the conformance suite. No NPU takes part in any of this.
//!
//! The runtime of a process is one and of one release, with one log and one plan of faults; so trials take turns.

use std::{
    env, mem,
    path::{Path, PathBuf},
    sync::OnceLock,
    thread,
};

use backend_ascend::{AscendDevice, AscendStream};
use hal::{Device, DeviceExt, DeviceUuid, LogicalId, NotExportable, Region};
use haulier_sim::{control::Control, install};
use parking_lot::{Mutex, MutexGuard};
use tempfile::TempDir;

use crate::{
    fixture::{Fixture, Need, Refuse},
    peer,
};

/// Where the backend looks for the runtime.
pub const LIBRARY: &str = "HAULIER_ASCENDCL";
/// The release that the runtime behaves as.
pub const RELEASE: &str = "HAULIER_SIM_CANN";
/// Bytes of a device of the simulated machine, unless a test says otherwise.
const MEMORY: usize = 4 << 30;
/// What registered host memory begins at a multiple of.
const PAGE: usize = 4096;

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
    let missing = if release < "9" { SINCE_9 } else { &[] };
    let there = folder.join("libascendcl.so");
    let built = install::library(BUILT.0, BUILT.1).expect("the simulated runtime is built");
    install::put(&built, &there, missing).expect("the folder can be written");
    there
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
    let folder = tempfile::tempdir().expect("a private directory");
    let library = install_into(folder.path(), release);
    // SAFETY: the process has one thread yet.
    unsafe {
        env::set_var(LIBRARY, library);
        env::set_var(RELEASE, release);
    }
    Some(folder)
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

/// Calls a function of the runtime as an application would, and gives its status.
#[macro_export]
macro_rules! acl {
    ($name:ident($($value:expr => $ty:ty),* $(,)?)) => {{
        // SAFETY: this is the function's signature.
        let function = unsafe {
            $crate::ascend::sim().library().get::<unsafe extern "C" fn($($ty),*) -> i32>(stringify!($name))
        };
        let function = function.expect("the runtime has it");
        #[allow(clippy::macro_metavars_in_unsafe, reason = "the arguments are expressions of tests")]
        // SAFETY: pointers are to locals of the caller, handles are the runtime's.
        let status = unsafe { function($($value),*) };
        status
    }};
}

/// The device with this id.
///
/// # Panics
/// Where the simulated machine does not have it.
pub fn device(logical: u32) -> AscendDevice {
    AscendDevice::open(LogicalId(logical)).expect("the simulated machine has it")
}

/// Runs an application's calls with the device current.
///
/// # Panics
/// Where the runtime refuses.
pub fn on<R: Send>(device: &AscendDevice, work: impl FnOnce() -> R + Send) -> R {
    device.bound(|_| Ok(work())).expect("the runtime is up")
}

/// A new stream, made as torch_npu makes them.
///
/// # Panics
/// Where the runtime refuses.
pub fn stream(device: &AscendDevice) -> AscendStream {
    const FAST: u32 = 3;
    let raw = on(device, || {
        let mut raw = 0;
        assert_eq!(acl!(aclrtCreateStreamWithConfig(&mut raw => *mut usize, 0 => u32, FAST => u32)), 0);
        raw
    });
    // SAFETY: no test destroys a stream.
    unsafe { AscendStream::from_raw(raw) }
}

/// A device of the Ascend backend on the simulated runtime, for the conformance suite.
pub struct AscendFixture {
    device: AscendDevice,
    other: AscendDevice,
    failed_drops: u64,
    /// What `unshareable` made.
    kept: Mutex<Vec<usize>>,
    /// Log and faults are the process's, so the trials take turns.
    _turn: MutexGuard<'static, ()>,
}

impl AscendFixture {
    /// The device with this id of the two.
    ///
    /// # Panics
    /// Where [`install()`] was not called.
    pub fn new(logical: u32) -> Self {
        static TURN: Mutex<()> = Mutex::new(());
        let turn = TURN.lock();
        sim().clear_log().expect("the log can be cleared");
        let (device, other) = (device(logical), device(1 - logical));
        let failed_drops = device.failed_drops();
        AscendFixture { device, other, failed_drops, kept: Mutex::default(), _turn: turn }
    }

    fn raw(stream: AscendStream) -> u64 {
        stream.raw() as u64
    }
}

impl Drop for AscendFixture {
    fn drop(&mut self) {
        let cleared = sim().release_all().and(sim().clear_faults());
        for pointer in mem::take(&mut *self.kept.lock()) {
            on(&self.device, || acl!(aclrtFree(pointer => usize)));
        }
        if !thread::panicking() {
            cleared.expect("the simulator obeys");
            let failed = self.device.failed_drops();
            assert_eq!(failed, self.failed_drops, "a guard could not give back what it held");
            for call in ["aclrtSynchronizeDevice", "aclrtResetDevice", "aclrtResetDeviceForce", "aclFinalize"]
            {
                assert_eq!(sim().count(call), 0, "{call}: a library has no business there");
            }
        }
    }
}

impl Fixture<AscendDevice> for AscendFixture {
    fn device(&self) -> &AscendDevice {
        &self.device
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

    /// As a thread of an application that works with device 0 for good.
    fn enter(&self) {
        assert_eq!(acl!(aclrtSetDevice(0 => i32)), 0);
    }

    fn too_much(&self) -> usize {
        2 * MEMORY
    }

    fn stream(&self) -> AscendStream {
        stream(&self.device)
    }

    fn hold(&self, stream: AscendStream) {
        on(&self.device, || sim().hold(Self::raw(stream))).expect("the stream is there");
    }

    fn release(&self, stream: AscendStream) {
        on(&self.device, || sim().release(Self::raw(stream))).expect("the stream is there");
    }

    fn queue_fill(&self, stream: AscendStream, region: Region, byte: u8) {
        let fill = || sim().fill(Self::raw(stream), region.addr as u64, region.len, byte);
        on(&self.device, fill).expect("it is queued");
    }

    fn queue_failure(&self, _stream: AscendStream) {
        // A kernel's: told by whatever waits next.
        for call in ["aclrtSynchronizeStreamWithTimeout", "aclrtSynchronizeStream"] {
            sim().plan_faults(&format!("{call}:1=507015")).expect("it is a plan");
        }
    }

    fn registered(&self) -> usize {
        self.device.registrations()
    }

    fn second(&self) -> AscendDevice {
        self.other
    }

    fn current(&self) -> Option<DeviceUuid> {
        let (mut context, mut user) = (0usize, 0u32);
        let asked = acl!(aclrtGetCurrentContext(&mut context => *mut usize));
        if asked != 0 || context == 0 {
            return None;
        }
        assert_eq!(acl!(aclrtGetDevice(&mut user => *mut u32)), 0);
        Some(device(user).identity().uuid)
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
        const GLOBAL: i32 = 0;
        let status = on(&self.device, || acl!(aclmdlRICaptureBegin(Self::raw(stream) => u64, GLOBAL => i32)));
        assert_eq!(status, 0);
    }

    fn end_capture(&self, stream: AscendStream) -> bool {
        on(&self.device, || {
            let mut model = 0;
            acl!(aclmdlRICaptureEnd(Self::raw(stream) => u64, &mut model => *mut u64))
        }) == 0
    }

    /// The application's own memory: from CANN 9 on what is less than a page, since what ACL shares begins with one;
    /// before, all of it, since nobody says where it begins.
    fn unshareable(&self) -> Vec<(Region, NotExportable)> {
        let old = env::var(RELEASE).is_ok_and(|release| release.as_str() < "9");
        let why = if old { NotExportable::UnknownBase } else { NotExportable::Pool };
        let len = if old { PAGE } else { 64 };
        let make = || {
            let mut pointer = 0usize;
            assert_eq!(acl!(aclrtMalloc(&mut pointer => *mut usize, len => usize, 0 => i32)), 0);
            pointer
        };
        // Some begin with a page by chance, where one was free.
        for _ in 0..256 {
            let pointer = on(&self.device, make);
            self.kept.lock().push(pointer);
            if old || !pointer.is_multiple_of(PAGE) {
                return vec![(self.device.region(pointer, len), why)];
            }
        }
        Vec::new()
    }
}

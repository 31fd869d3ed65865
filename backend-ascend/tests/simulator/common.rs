//! A process with the simulated runtime in it.

use std::{
    env,
    path::PathBuf,
    process::{self, Command, Output},
    ptr, thread,
    time::Duration,
};

use backend_ascend::{AscendDevice, AscendStream};
use hal::{Bound, Deadline, LogicalId, Region};
use haulier_sim_ascend::{Control, SINCE_9, install};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

/// Names the test that the process is there for.
const ALONE: &str = "HAULIER_TEST_ALONE";
/// The release that the runtime behaves as.
const CANN: &str = "HAULIER_SIM_CANN";

/// What [`alone`] needs besides the test itself.
#[derive(Default)]
pub(crate) struct Setup {
    /// Environment of the process.
    pub(crate) env: Vec<(&'static str, &'static str)>,
    /// Functions that the runtime lacks.
    pub(crate) without: &'static [&'static str],
}

/// Runs the calling test's `body` in processes of their own with the simulated runtime installed: as CANN 8.5, then as
/// CANN 9.
pub(crate) fn alone(body: impl FnOnce(Control)) {
    alone_with(Setup::default(), body);
}

/// As [`alone`].
pub(crate) fn alone_with(setup: Setup, body: impl FnOnce(Control)) {
    let test = test_name();
    if env::var(ALONE).as_deref() == Ok(&test) {
        thread::spawn(|| {
            thread::sleep(Duration::from_secs(120));
            eprintln!("the test hangs");
            process::abort();
        });
        let open = || Control::open(&library()).expect("the simulated runtime can be loaded");
        let (sim, steered) = (open(), open());
        body(sim);
        never_reset(&steered);
        return;
    }
    for cann in ["8.5.0", "9.0.0"] {
        let folder = tempfile::tempdir().unwrap();
        let missing = if cann < "9" { SINCE_9 } else { &[] };
        let library = install(folder.path(), &[setup.without, missing].concat());
        let library = library.expect("the simulated runtime is built");
        let mut command = again(&test);
        command.env(ALONE, &test).env(CANN, cann).env("HAULIER_ASCENDCL", library);
        command.envs(setup.env.iter().copied());
        succeeded(&command.output().unwrap());
    }
}

/// A library never takes the device from the rest of the process.
fn never_reset(sim: &Control) {
    for call in [
        "aclFinalize",
        "aclFinalizeReference",
        "aclrtResetDevice",
        "aclrtResetDeviceForce",
        "aclrtSynchronizeDevice",
    ] {
        assert_eq!(sim.count(call), 0, "{call}");
    }
}

/// Whether the runtime behaves as CANN 9.
pub(crate) fn is_9() -> bool {
    env::var(CANN).is_ok_and(|cann| cann.starts_with('9'))
}

/// A command that runs one test of this program.
pub(crate) fn again(test: &str) -> Command {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args([test, "--exact", "--nocapture", "--test-threads=1"]);
    command
}

/// Fails with what a test in another process said.
pub(crate) fn succeeded(output: &Output) {
    let said = String::from_utf8_lossy(&output.stdout);
    let failed = !output.status.success() || !said.contains("1 passed");
    assert!(!failed, "{}\n{said}{}", output.status, String::from_utf8_lossy(&output.stderr));
}

/// The harness names a test's thread after the test.
pub(crate) fn test_name() -> String {
    thread::current().name().expect("called on the test's own thread").to_owned()
}

/// The library of this process.
pub(crate) fn library() -> PathBuf {
    env::var_os("HAULIER_ASCENDCL").expect("set by `alone`").into()
}

/// The device with this id.
pub(crate) fn device(logical: u32) -> AscendDevice {
    AscendDevice::open(LogicalId(logical)).unwrap()
}

/// Makes the calling thread one of an application that uses the device with this id.
pub(crate) fn enter(sim: &Control, logical: i32) {
    acl!(sim, aclrtSetDevice(logical => i32));
}

/// The calling thread's context, 0 for none, as the runtime has it.
pub(crate) fn current(sim: &Control) -> usize {
    let mut context = 0usize;
    let status = status!(sim, aclrtGetCurrentContext(&mut context => *mut usize));
    assert!(status == 0 || (status == 107002 && context == 0), "{status}");
    context
}

/// Long enough for anything that ends at all.
pub(crate) fn patient() -> Deadline {
    Deadline::after(Duration::from_secs(30))
}

/// The bytes as a region.
pub(crate) fn host(bytes: &[u8]) -> Region {
    Region::host(bytes.as_ptr().expose_provenance(), bytes.len())
}

/// Whole pages of host memory, never unmapped.
pub(crate) fn pages(len: usize) -> Region {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a fresh mapping where the kernel likes.
    let addr =
        unsafe { mmap_anonymous(ptr::null_mut(), len, access, MapFlags::PRIVATE | MapFlags::NORESERVE) };
    Region::host(addr.unwrap().expose_provenance(), len)
}

/// Bytes that differ from place to place.
pub(crate) fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 31 + i / 251 + i / 65_537) as u8).collect()
}

/// Copies bytes to the device.
pub(crate) fn write(bound: &Bound<'_, AscendDevice>, to: Region, bytes: &[u8]) {
    // SAFETY: both are allocated for the whole call, and the test touches neither meanwhile.
    unsafe { bound.copy(to, host(bytes)) }.unwrap();
}

/// Copies bytes from the device.
pub(crate) fn read(bound: &Bound<'_, AscendDevice>, from: Region) -> Vec<u8> {
    let mut bytes = vec![0u8; from.len];
    let to = Region::host(bytes.as_mut_ptr().expose_provenance(), bytes.len());
    // SAFETY: as in `write`.
    unsafe { bound.copy(to, from) }.unwrap();
    bytes
}

/// Calls a function of the runtime as an application would, and gives its status.
macro_rules! status {
    ($sim:expr, $name:ident($($value:expr => $ty:ty),* $(,)?)) => {{
        // SAFETY: this is the function's signature.
        let function = unsafe {
            $sim.library().get::<unsafe extern "C" fn($($ty),*) -> i32>(stringify!($name))
        };
        // SAFETY: pointers are to locals of the caller, handles are the runtime's.
        unsafe { function.unwrap()($($value),*) }
    }};
}
pub(crate) use status;

/// As [`status`]; it must succeed.
macro_rules! acl {
    ($sim:expr, $name:ident($($value:expr => $ty:ty),* $(,)?)) => {
        assert_eq!(
            $crate::common::status!($sim, $name($($value => $ty),*)),
            0,
            stringify!($name)
        )
    };
}
pub(crate) use acl;

/// A stream of the current context, as torch_npu makes it.
pub(crate) fn stream(sim: &Control) -> AscendStream {
    stream_with(sim, 3)
}

/// A stream with these flags.
pub(crate) fn stream_with(sim: &Control, flags: u32) -> AscendStream {
    let mut stream = 0usize;
    acl!(sim, aclrtCreateStreamWithConfig(&mut stream => *mut usize, 0 => u32, flags => u32));
    // SAFETY: no test destroys a stream.
    unsafe { AscendStream::from_raw(stream) }
}

/// Memory of the application's own.
pub(crate) fn foreign(sim: &Control, device: AscendDevice, len: usize) -> Region {
    let mut addr = 0usize;
    acl!(sim, aclrtMalloc(&mut addr => *mut usize, len => usize, 0 => i32));
    device.region(addr, len)
}

/// Frees it.
pub(crate) fn free(sim: &Control, memory: Region) {
    acl!(sim, aclrtFree(memory.addr => usize));
}

/// Virtual memory of chunks, one reservation with as much room again behind, as torch_npu's expandable segments are.
pub(crate) fn expandable(sim: &Control, logical: u32, chunks: &[usize]) -> Region {
    let len = chunks.iter().sum::<usize>();
    let mut addr = 0usize;
    acl!(sim, aclrtReserveMemAddress(
        &mut addr => *mut usize, 2 * len => usize, 0 => usize, 0 => usize, 1 => u64
    ));
    let mut at = addr;
    for &chunk in chunks {
        map(sim, logical, at, chunk);
        at += chunk;
    }
    device(logical).region(addr, len)
}

/// Maps new physical memory.
pub(crate) fn map(sim: &Control, logical: u32, at: usize, len: usize) {
    /// `aclrtPhysicalMemProp`.
    #[repr(C)]
    struct Properties {
        handle_type: i32,
        allocation_type: i32,
        attribute: i32,
        id: u32,
        kind: i32,
        reserve: u64,
    }
    const HBM_HUGE: i32 = 4;
    const ON_DEVICE: i32 = 1;
    let properties = Properties {
        handle_type: 0,
        allocation_type: 0,
        attribute: HBM_HUGE,
        id: logical,
        kind: ON_DEVICE,
        reserve: 0,
    };
    let mut handle = 0usize;
    acl!(sim, aclrtMallocPhysical(
        &mut handle => *mut usize, len => usize, &properties => *const Properties, 0 => u64
    ));
    acl!(sim, aclrtMapMem(at => usize, len => usize, 0 => usize, handle => usize, 0 => u64));
}

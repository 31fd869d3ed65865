//! A process with the simulated driver in it.

use std::{
    env,
    path::PathBuf,
    process::{self, Command, Output},
    thread,
    time::Duration,
};

use backend_cuda::CudaDevice;
use hal::{Bound, Deadline, LogicalId, Region};
use haulier_sim_cuda::{Control, install};

/// Names the test that the process is there for.
const ALONE: &str = "HAULIER_TEST_ALONE";

/// What [`alone`] needs besides the test itself.
#[derive(Default)]
pub(crate) struct Setup {
    /// Environment of the process.
    pub(crate) env: Vec<(&'static str, &'static str)>,
    /// Functions that the driver lacks.
    pub(crate) without: &'static [&'static str],
}

/// Runs the calling test's `body` in a process of its own, with the simulated driver installed.
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
        body(Control::open(&driver()).expect("the simulated driver can be loaded"));
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let library = install(folder.path(), setup.without).expect("the simulated driver is built");
    let mut command = again(&test);
    command.env(ALONE, &test).env("HAULIER_LIBCUDA", library).env("LD_LIBRARY_PATH", folder.path());
    command.envs(setup.env);
    succeeded(&command.output().unwrap());
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
pub(crate) fn driver() -> PathBuf {
    env::var_os("HAULIER_LIBCUDA").expect("set by `alone`").into()
}

/// The device with this id.
pub(crate) fn device(logical: u32) -> CudaDevice {
    CudaDevice::open(LogicalId(logical)).unwrap()
}

/// Long enough for anything that ends at all.
pub(crate) fn patient() -> Deadline {
    Deadline::after(Duration::from_secs(30))
}

/// The bytes as a region.
pub(crate) fn host(bytes: &[u8]) -> Region {
    Region::host(bytes.as_ptr().expose_provenance(), bytes.len())
}

/// Bytes that differ from place to place.
pub(crate) fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 31 + i / 251 + i / 65_537) as u8).collect()
}

/// Copies bytes to the device.
pub(crate) fn write(bound: &Bound<'_, CudaDevice>, to: Region, bytes: &[u8]) {
    // SAFETY: both are allocated for the whole call, and the test touches neither meanwhile.
    unsafe { bound.copy(to, host(bytes)) }.unwrap();
}

/// Copies bytes from the device.
pub(crate) fn read(bound: &Bound<'_, CudaDevice>, from: Region) -> Vec<u8> {
    let mut bytes = vec![0u8; from.len];
    let to = Region::host(bytes.as_mut_ptr().expose_provenance(), bytes.len());
    // SAFETY: as in `write`.
    unsafe { bound.copy(to, from) }.unwrap();
    bytes
}

/// Calls a function of the driver as an application would; it must succeed.
macro_rules! cu {
    ($sim:expr, $name:ident($($value:expr => $ty:ty),* $(,)?)) => {{
        // SAFETY: this is the function's signature.
        let function = unsafe {
            $sim.library().get::<unsafe extern "C" fn($($ty),*) -> i32>(stringify!($name))
        };
        // SAFETY: pointers are to locals of the caller, handles are the driver's.
        let status = unsafe { function.unwrap()($($value),*) };
        assert_eq!(status, 0, stringify!($name));
    }};
}
pub(crate) use cu;

/// A blocking stream of the current context, as an application makes it.
pub(crate) fn stream(sim: &Control) -> usize {
    let mut stream = 0;
    cu!(sim, cuStreamCreate(&mut stream => *mut usize, 0 => u32));
    stream
}

/// Virtual memory of chunks, one reservation with as much room again behind, as PyTorch's expandable segments are.
pub(crate) fn expandable(sim: &Control, ordinal: i32, chunks: &[usize], shareable: bool) -> Region {
    let len = chunks.iter().sum::<usize>();
    let mut addr = 0;
    cu!(sim, cuMemAddressReserve(&mut addr => *mut u64, 2 * len => usize, 0 => usize, 0 => u64, 0 => u64));
    let mut at = addr;
    for &chunk in chunks {
        map(sim, ordinal, at, chunk, shareable);
        at += chunk as u64;
    }
    device(ordinal as u32).region(addr as usize, len)
}

/// New memory, shareable, where a mapping was.
pub(crate) fn remap(sim: &Control, ordinal: i32, at: Region) {
    map(sim, ordinal, at.addr as u64, at.len, true);
}

fn map(sim: &Control, ordinal: i32, at: u64, len: usize, shareable: bool) {
    /// `CUmemAllocationProp`.
    #[repr(C)]
    struct Properties {
        kind: i32,
        handle_types: i32,
        location: [i32; 2],
        win32: usize,
        flags: [u8; 8],
    }
    let (kind, handle_types, location) = (1, i32::from(shareable), [1, ordinal]);
    let properties = Properties { kind, handle_types, location, win32: 0, flags: [0; 8] };
    let mut handle = 0;
    cu!(sim, cuMemCreate(&mut handle => *mut u64, len => usize, &properties => *const Properties, 0 => u64));
    cu!(sim, cuMemMap(at => u64, len => usize, 0 => usize, handle => u64, 0 => u64));
    // The mapping keeps the memory.
    cu!(sim, cuMemRelease(handle => u64));
    let access = [1, ordinal, 3];
    cu!(sim, cuMemSetAccess(at => u64, len => usize, access.as_ptr() => *const i32, 1 => usize));
}

//! A test in a process of its own, and the driver there.

use std::ptr;

use haulier_sim::process;
pub(crate) use haulier_sim::process::told;
use haulier_sim_cuda::{Control, install};
use tempfile::TempDir;

/// Calls a function of the driver's by name and answers with its status. The arguments' types make the signature.
#[macro_export]
macro_rules! cu {
    (@any $arg:expr) => { _ };
    ($driver:expr, $name:ident($($arg:expr),* $(,)?)) => {{
        let (name, library) = (stringify!($name), $driver.library());
        // SAFETY: the tests give each function the arguments of its C signature, and results that live long enough.
        let function = unsafe { library.get::<extern "C" fn($(cu!(@any $arg)),*) -> i32>(name) };
        (function.unwrap_or_else(|e| panic!("{name}: {e}")))($($arg),*)
    }};
}

/// As [`cu!`], and must succeed.
#[macro_export]
macro_rules! ok {
    ($driver:expr, $name:ident($($arg:expr),* $(,)?)) => {
        assert_eq!(cu!($driver, $name($($arg),*)), 0, stringify!($name))
    };
}

/// Tests, each with the environment of its process and the name of its driver.
macro_rules! driver_tests {
    ($(fn $name:ident[$($key:ident = $value:expr),*]($driver:ident) $body:block)*) => {$(
        #[test]
        fn $name() {
            $crate::process::isolated(
                concat!(module_path!(), "::", stringify!($name)),
                &[$((stringify!($key), $value)),*],
                &[],
                |$driver: &$crate::process::Driver| $body,
            );
        }
    )*};
}

/// The driver of a test's own process.
pub(crate) struct Driver {
    pub(crate) control: Control,
    test: String,
    _folder: TempDir,
}

/// Runs `body` in a process that runs only this test; `without` are functions that its driver has not.
pub(crate) fn isolated(
    test: &str,
    environment: &[(&str, &str)],
    without: &[&str],
    body: impl FnOnce(&Driver),
) {
    process::isolated(test, environment, || body(&Driver::new(test, without)));
}

/// Runs `body` in a process that this signal has to end.
pub(crate) fn dies(test: &str, signal: i32, body: impl FnOnce(&Driver)) {
    process::dies(test, signal, || body(&Driver::new(test, &[])));
}

impl Driver {
    fn new(test: &str, without: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = install(folder.path(), without).unwrap();
        Driver { control: Control::open(&path).unwrap(), test: test.into(), _folder: folder }
    }

    pub(crate) fn library(&self) -> &libloading::Library {
        self.control.library()
    }

    /// Runs the test once more in a second process, which is told something.
    pub(crate) fn peer(&self, what: &str, environment: &[(&str, &str)]) {
        process::peer(&self.test, what, environment);
    }

    /// Initialises the driver and makes a device's primary context current.
    pub(crate) fn on(&self, device: i32) -> u64 {
        ok!(self, cuInit(0u32));
        let mut context = 0u64;
        ok!(self, cuDevicePrimaryCtxRetain(&raw mut context, device));
        ok!(self, cuCtxSetCurrent(context));
        context
    }

    pub(crate) fn allocate(&self, bytes: usize) -> u64 {
        let mut pointer = 0u64;
        ok!(self, cuMemAlloc_v2(&raw mut pointer, bytes));
        pointer
    }

    pub(crate) fn stream(&self, flags: u32) -> u64 {
        let mut stream = 0u64;
        ok!(self, cuStreamCreate(&raw mut stream, flags));
        stream
    }

    pub(crate) fn event(&self) -> u64 {
        let mut event = 0u64;
        ok!(self, cuEventCreate(&raw mut event, 2u32));
        event
    }

    /// Attributes of a pointer, all at once as a backend asks for them.
    pub(crate) fn attributes<const N: usize>(
        &self,
        numbers: [u32; N],
        pointer: u64,
    ) -> Result<[u64; N], i32> {
        let mut values = [0u64; N];
        let outs: Vec<*mut u64> = values.iter_mut().map(ptr::from_mut).collect();
        match cu!(self, cuPointerGetAttributes(N as u32, numbers.as_ptr(), outs.as_ptr(), pointer)) {
            0 => Ok(values),
            code => Err(code),
        }
    }

    /// Whether a stream is captured: 0 not, 1 it is, 2 the capture is spoiled.
    pub(crate) fn capturing(&self, stream: u64) -> u32 {
        let mut state = 9u32;
        ok!(self, cuStreamIsCapturing(stream, &raw mut state));
        state
    }
}

//! A test in a process of its own, and the runtime there.

use std::{
    ffi::{CStr, c_char},
    fs,
    path::Path,
    thread,
    time::Duration,
};

use haulier_sim::process;
pub(crate) use haulier_sim::process::told;
use haulier_sim_ascend::{Control, install};
use tempfile::TempDir;

/// Calls a function of the runtime's by name and answers with its status. The arguments' types make the signature.
#[macro_export]
macro_rules! acl {
    (@any $arg:expr) => { _ };
    ($driver:expr, $name:ident($($arg:expr),* $(,)?)) => {{
        let (name, library) = (stringify!($name), $driver.library());
        // SAFETY: the tests give each function the arguments of its C signature, and results that live long enough.
        let function = unsafe { library.get::<extern "C" fn($(acl!(@any $arg)),*) -> i32>(name) };
        (function.unwrap_or_else(|e| panic!("{name}: {e}")))($($arg),*)
    }};
}

/// As [`acl!`], and must succeed.
#[macro_export]
macro_rules! ok {
    ($driver:expr, $name:ident($($arg:expr),* $(,)?)) => {
        assert_eq!(acl!($driver, $name($($arg),*)), 0, stringify!($name))
    };
}

/// Tests, each with the environment of its process and the name of its runtime.
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

/// What is asked of a pointer: where it lives, on which device, and the size of its pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pointer {
    pub(crate) kind: i32,
    pub(crate) device: u32,
    pub(crate) page: u32,
}

/// The runtime of a test's own process.
pub(crate) struct Driver {
    pub(crate) control: Control,
    test: String,
    folder: TempDir,
}

/// Runs `body` in a process that runs only this test; `without` are functions that its runtime has not.
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
        Driver { control: Control::open(&path).unwrap(), test: test.into(), folder }
    }

    pub(crate) fn library(&self) -> &libloading::Library {
        self.control.library()
    }

    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Runs the test once more in a second process, which is told something.
    pub(crate) fn peer(&self, what: &str, environment: &[(&str, &str)]) {
        process::peer(&self.test, what, environment);
    }

    /// As [`peer`](Driver::peer), with a second process that [asks](Driver::ask) for its pid to be let in.
    pub(crate) fn peer_that_asks(&self, what: &str, allow: impl FnOnce(i32)) {
        let (asked, may) = (self.folder().join("asked"), self.folder().join("may"));
        thread::scope(|s| {
            let peer = s.spawn(|| self.peer(&format!("{what} {}", self.folder().display()), &[]));
            while !asked.exists() && !peer.is_finished() {
                thread::sleep(Duration::from_millis(1));
            }
            allow(fs::read_to_string(asked).unwrap().parse().unwrap());
            fs::write(may, "").unwrap();
        });
    }

    /// Tells the first process this one's pid as others mean it, and waits until it is let in.
    pub(crate) fn ask(&self, folder: &str) {
        let (folder, mut pid) = (Path::new(folder), 0i32);
        ok!(self, aclrtDeviceGetBareTgid(&raw mut pid));
        let written = folder.join("written");
        fs::write(&written, pid.to_string()).unwrap();
        fs::rename(written, folder.join("asked")).unwrap();
        while !folder.join("may").exists() {
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Sets the thread's device, and answers with its primary context.
    pub(crate) fn on(&self, device: i32) -> u64 {
        ok!(self, aclrtSetDevice(device));
        self.current().1
    }

    /// What aclrtGetCurrentContext answers, and the context.
    pub(crate) fn current(&self) -> (i32, u64) {
        let mut context = 7u64;
        (acl!(self, aclrtGetCurrentContext(&raw mut context)), context)
    }

    /// What aclrtGetDevice answers, and the device.
    pub(crate) fn device(&self) -> (i32, i32) {
        let mut device = 7i32;
        (acl!(self, aclrtGetDevice(&raw mut device)), device)
    }

    pub(crate) fn malloc(&self, bytes: usize) -> u64 {
        let mut pointer = 0u64;
        ok!(self, aclrtMalloc(&raw mut pointer, bytes, 0i32));
        pointer
    }

    pub(crate) fn malloc_host(&self, bytes: usize) -> *mut u8 {
        let mut pointer = std::ptr::null_mut::<u8>();
        ok!(self, aclrtMallocHost(&raw mut pointer, bytes));
        pointer
    }

    pub(crate) fn stream(&self) -> u64 {
        let mut stream = 0u64;
        ok!(self, aclrtCreateStreamWithConfig(&raw mut stream, 0u32, 3u32));
        stream
    }

    pub(crate) fn event(&self, flags: u32) -> u64 {
        let mut event = 0u64;
        ok!(self, aclrtCreateEventExWithFlag(&raw mut event, flags));
        event
    }

    /// What aclrtPointerGetAttributes says.
    pub(crate) fn pointer(&self, pointer: u64) -> Result<Pointer, i32> {
        let mut words = [9u32; 7];
        match acl!(self, aclrtPointerGetAttributes(pointer, words.as_mut_ptr())) {
            0 => Ok(Pointer { kind: words[1].cast_signed(), device: words[0], page: words[2] }),
            code => Err(code),
        }
    }

    /// What aclGetRecentErrMsg says.
    pub(crate) fn error_text(&self) -> Option<String> {
        // SAFETY: the function's signature; its text ends with a nul and lives until the next call.
        unsafe {
            let function =
                self.library().get::<extern "C" fn() -> *const c_char>("aclGetRecentErrMsg").unwrap();
            let text = function();
            (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
        }
    }
}

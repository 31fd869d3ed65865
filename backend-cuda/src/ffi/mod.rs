//! The driver library: where it is looked for, and what it must have.
//!
//! Functions are declared here by hand where they are called, returning `i32`: cudarc's `CUresult` is a closed enum, in
//! which a code of a newer driver would be undefined behaviour. Its `culib()` is not used either: it panics where there
//! is no library, and it prefers `libcuda.so`, the name that a toolkit's stub has.

mod library;

use std::{
    ffi::{OsStr, OsString},
    path::Path,
};

use hal::{Error, Kind, Presence};

use self::library::{Library, Refusal, file_of};
use crate::BACKEND;

/// Names the library to use instead of those in [`NAMES`].
pub(crate) const OVERRIDE: &str = "HAULIER_LIBCUDA";

/// In this order: only a driver installs the first name, a toolkit's stub has the second.
const NAMES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];

/// What no device can be served without. Everything else gates a capability.
pub(crate) const MUST_HAVE: [&str; 24] = [
    "cuInit",
    "cuDriverGetVersion",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuDeviceGet",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDeviceGetUuid",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamQuery",
    "cuStreamSynchronize",
    "cuStreamIsCapturing",
    "cuPointerGetAttributes",
    "cuMemGetAddressRange_v2",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemcpyAsync",
    "cuMemGetInfo_v2",
];

/// What to try, in order.
pub(crate) fn candidates(named: Option<OsString>) -> Vec<OsString> {
    match named.filter(|name| !name.is_empty()) {
        Some(name) => vec![name],
        None => NAMES.map(OsString::from).to_vec(),
    }
}

/// What `name` leads to, or `None` where it leads to nothing. Calls no function of the driver.
pub(crate) fn inspect(name: &OsStr) -> Option<Presence> {
    let library = match Library::open(name) {
        Ok(library) => library,
        Err(Refusal::Missing) => return None,
        Err(Refusal::Unloadable(words)) => {
            return Some(broken(name, Kind::NotPresent, format!("the dynamic linker refuses it: {words}")));
        }
    };
    let file = library.address_of(MUST_HAVE[0]).and_then(file_of);
    let path = file.as_deref().unwrap_or(Path::new(name));
    if is_stub(path) {
        let why = "a CUDA toolkit's stub, which only serves linking; install the NVIDIA driver, or take the stubs \
                   directory out of the library search path";
        return Some(broken(path.as_os_str(), Kind::NotPresent, why.to_owned()));
    }
    let missing: Vec<_> =
        MUST_HAVE.into_iter().filter(|symbol| library.address_of(symbol).is_none()).collect();
    if !missing.is_empty() {
        let why =
            format!("too old, or no CUDA driver: it lacks {}; CUDA 11.0 is the least", missing.join(", "));
        return Some(broken(path.as_os_str(), Kind::Unsupported, why));
    }
    Some(Presence::Present { library: Some(path.display().to_string()) })
}

/// A stub exports the driver's functions and is told apart by its directory alone, short of calling `cuInit`.
fn is_stub(path: &Path) -> bool {
    path.parent().is_some_and(|directory| directory.ends_with("stubs"))
}

fn broken(library: &OsStr, kind: Kind, why: String) -> Presence {
    Presence::Broken {
        library: library.display().to_string(),
        error: Error::new(kind, BACKEND, "probe").detail(why),
    }
}

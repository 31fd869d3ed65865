//! The driver library: where it is looked for, what it must have, and its calls.
//!
//! Functions are declared here by hand, returning `i32`: cudarc's `CUresult` is a closed enum, in which a code of a newer
//! driver would be undefined behaviour. Its `culib()` is not used either: it panics where there is no library, and it
//! prefers `libcuda.so`, the name that a toolkit's stub has.

mod driver;
mod functions;
mod library;

use std::{
    env,
    ffi::{OsStr, OsString},
    path::Path,
};

use hal::{Error, Kind, Presence};

#[cfg(test)]
pub(crate) use self::functions::MUST_HAVE;
use self::library::{Library, file_of};
pub(crate) use self::{
    driver::{Answer, Asked, Capturing, Context, Driver, NotStarted, Refusal},
    functions::{Functions, IpcMemHandle},
};
use crate::{BACKEND, error::release};

/// Names the library to use instead of those in [`NAMES`].
pub(crate) const OVERRIDE: &str = "HAULIER_LIBCUDA";

/// In this order: only a driver installs the first name, a toolkit's stub has the second.
const NAMES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];

/// What to try, in order.
pub(crate) fn candidates(named: Option<OsString>) -> Vec<OsString> {
    match named.filter(|name| !name.is_empty()) {
        Some(name) => vec![name],
        None => NAMES.map(OsString::from).to_vec(),
    }
}

/// Why there is no usable library.
#[derive(Debug)]
pub(crate) enum Unusable {
    /// Nothing has any of these names.
    Absent { looked: Vec<String> },
    /// It is there.
    Broken { library: String, kind: Kind, why: String },
}

impl Unusable {
    pub(crate) fn presence(self) -> Presence {
        match self {
            Unusable::Absent { looked } => Presence::Absent { why: Self::absent(), looked },
            Unusable::Broken { library, kind, why } => {
                Presence::Broken { library, error: Error::new(kind, BACKEND, "probe").detail(why) }
            }
        }
    }

    pub(crate) fn error(self, op: &'static str) -> Error {
        match self {
            Unusable::Absent { looked } => Error::new(Kind::NotPresent, BACKEND, op).detail(format!(
                "{} (looked for {})",
                Self::absent(),
                looked.join(", ")
            )),
            Unusable::Broken { library, kind, why } => {
                let serves = version_of(&library)
                    .map_or(String::new(), |version| format!(", which serves CUDA {}", release(version)));
                Error::new(kind, BACKEND, op).detail(format!("{library}{serves}: {why}"))
            }
        }
    }

    fn absent() -> String {
        format!(
            "no CUDA driver library was found; install the NVIDIA driver, or name its library in {OVERRIDE}"
        )
    }
}

/// The functions of the first usable library of `candidates`, and its file; else the first that is broken, else none.
pub(crate) fn find(candidates: &[OsString]) -> Result<(Functions, String), Unusable> {
    let mut broken = None;
    for name in candidates {
        match inspect(name) {
            Some(Ok((functions, library))) => {
                tracing::debug!(%library, "found a CUDA driver");
                return Ok((functions, library));
            }
            Some(Err(unusable)) => {
                tracing::debug!(?unusable, "found a CUDA driver that cannot be used");
                broken = broken.or(Some(unusable));
            }
            None => tracing::debug!(library = ?name, "found no CUDA driver"),
        }
    }
    let looked = || candidates.iter().map(|name| name.display().to_string()).collect();
    Err(broken.unwrap_or_else(|| Unusable::Absent { looked: looked() }))
}

/// What this process is told to use.
pub(crate) fn configured() -> Vec<OsString> {
    candidates(env::var_os(OVERRIDE))
}

/// What `name` leads to, or `None` where it leads to nothing. Calls no function of the driver.
fn inspect(name: &OsStr) -> Option<Result<(Functions, String), Unusable>> {
    let library = match Library::open(name) {
        Ok(library) => library,
        Err(library::Refusal::Missing) => return None,
        Err(library::Refusal::Unloadable(words)) => {
            let why = format!("the dynamic linker refuses it: {words}");
            return Some(Err(broken(name, Kind::NotPresent, why)));
        }
    };
    let file = library.address_of("cuInit").and_then(file_of);
    let path = file.as_deref().unwrap_or(Path::new(name));
    if is_stub(path) {
        let why = "a CUDA toolkit's stub, which only serves linking; install the NVIDIA driver, or take the stubs \
                   directory out of the library search path";
        return Some(Err(broken(path.as_os_str(), Kind::NotPresent, why.to_owned())));
    }
    Some(match Functions::of(&library) {
        Ok(functions) => Ok((functions, path.display().to_string())),
        Err(missing) => {
            let missing = missing.join(", ");
            let why = format!("too old, or no CUDA driver: it lacks {missing}; CUDA 11.0 is the least");
            Err(broken(path.as_os_str(), Kind::Unsupported, why))
        }
    })
}

/// The newest CUDA version that a library serves, where it says so: also one that lacks functions. Does not initialise it.
fn version_of(library: &str) -> Option<i32> {
    let library = Library::open(OsStr::new(library)).ok()?;
    // SAFETY: the type is that of the driver's header.
    let ask: unsafe extern "C" fn(*mut i32) -> i32 = unsafe { library.function("cuDriverGetVersion")? };
    let mut version = 0;
    // SAFETY: the output is a local.
    (unsafe { ask(&mut version) } == 0).then_some(version)
}

/// A stub exports the driver's functions and is told apart by its directory alone, short of calling `cuInit`.
fn is_stub(path: &Path) -> bool {
    path.parent().is_some_and(|directory| directory.ends_with("stubs"))
}

fn broken(library: &OsStr, kind: Kind, why: String) -> Unusable {
    Unusable::Broken { library: library.display().to_string(), kind, why }
}

//! The ACL library: where it is looked for, what it must have, and its calls.
//!
//! The declarations are bindgen's, made from `acl.h`, in the form in which each symbol is looked up on its own. bindgen's
//! methods panic where a symbol is missing and are not used: `driver` takes the functions out of their fields.

#[rustfmt::skip]
#[allow(
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    dead_code,
    unreachable_pub,
    clippy::all,
    clippy::undocumented_unsafe_blocks,
    clippy::missing_safety_doc,
    reason = "made by bindgen"
)]
mod bindings;
mod driver;
mod library;

use std::{
    env,
    ffi::{OsStr, OsString},
    path::Path,
};

use hal::{Error, Kind, Presence};

#[cfg(test)]
pub(crate) use self::driver::MUST_HAVE;
use self::library::{Library, file_of};
pub(crate) use self::{
    bindings::{
        ACL_ERROR_RT_FEATURE_NOT_SUPPORT, ACL_ERROR_RT_HOST_MEMORY_ALREADY_REGISTERED,
        ACL_ERROR_RT_PARAM_INVALID,
    },
    driver::{
        Answer, Capturing, Context, Driver, IpcKey, KEY_LEN, Place, Refusal, Unserved, UserId, Way, release,
    },
};
use crate::BACKEND;

/// Names the library to use instead of those in [`NAMES`].
pub(crate) const OVERRIDE: &str = "HAULIER_ASCENDCL";

/// In this order: every CANN has the first name; newer ones keep the runtime in the second and may drop the first.
const NAMES: [&str; 2] = ["libascendcl.so", "libacl_rt.so"];

/// What to try, in order.
pub(crate) fn candidates(named: Option<OsString>) -> Vec<OsString> {
    match named.filter(|name| !name.is_empty()) {
        Some(name) => vec![name],
        None => NAMES.map(OsString::from).to_vec(),
    }
}

/// What this process is told to use.
pub(crate) fn configured() -> Vec<OsString> {
    candidates(env::var_os(OVERRIDE))
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
                Error::new(kind, BACKEND, op).detail(format!("{library}: {why}"))
            }
        }
    }

    fn absent() -> String {
        format!(
            "CANN's ACL library was not found; install CANN and source its set_env.sh, or name the library in {OVERRIDE}"
        )
    }
}

/// The functions of the first usable library of `candidates`, and its file; else the first that is broken, else none.
pub(crate) fn find(candidates: &[OsString]) -> Result<(Driver, String), Unusable> {
    let mut broken = None;
    for name in candidates {
        match inspect(name) {
            Some(Ok((driver, library))) => {
                tracing::debug!(%library, "found CANN");
                return Ok((driver, library));
            }
            Some(Err(unusable)) => {
                tracing::debug!(?unusable, "found a CANN that cannot be used");
                broken = broken.or(Some(unusable));
            }
            None => tracing::debug!(library = ?name, "found no CANN"),
        }
    }
    let looked = || candidates.iter().map(|name| name.display().to_string()).collect();
    Err(broken.unwrap_or_else(|| Unusable::Absent { looked: looked() }))
}

/// What `name` leads to, or `None` where it leads to nothing. Calls no function of the library.
fn inspect(name: &OsStr) -> Option<Result<(Driver, String), Unusable>> {
    let library = match Library::open(name) {
        Ok(library) => library,
        Err(library::Refusal::Missing) => return None,
        Err(library::Refusal::Unloadable(words)) => {
            let why = format!("the dynamic linker refuses it: {words}; was CANN's set_env.sh sourced?");
            return Some(Err(broken(name, Kind::NotPresent, why)));
        }
    };
    // With libascendcl.so this is the libacl_rt.so behind it, where the functions live.
    let file = library.address_of("aclInit").and_then(file_of);
    let path = file.as_deref().unwrap_or(Path::new(name));
    if is_stub(path) {
        let why = "a CANN toolkit's stub, which only serves linking; source CANN's set_env.sh, or take the stub \
                   directory out of the library search path";
        return Some(Err(broken(path.as_os_str(), Kind::NotPresent, why.to_owned())));
    }
    Some(match Driver::of(library) {
        Ok(driver) => Ok((driver, path.display().to_string())),
        Err(missing) => {
            let missing = missing.join(", ");
            let why = format!("too old, or no ACL library: it lacks {missing}; install a newer CANN");
            Err(broken(path.as_os_str(), Kind::Unsupported, why))
        }
    })
}

/// A stub exports ACL's functions and is told apart by its directory alone, short of calling `aclInit`.
fn is_stub(path: &Path) -> bool {
    path.parent().is_some_and(|directory| directory.ends_with("stub") || directory.ends_with("devlib"))
}

fn broken(library: &OsStr, kind: Kind, why: String) -> Unusable {
    Unusable::Broken { library: library.display().to_string(), kind, why }
}

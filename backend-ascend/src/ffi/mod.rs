//! The ACL library: where it is looked for, and what it must have.

mod library;

use std::{
    ffi::{OsStr, OsString},
    path::Path,
};

use hal::{Error, Kind, Presence};

use self::library::{Library, Refusal, file_of};
use crate::BACKEND;

/// Names the library to use instead of those in [`NAMES`].
pub(crate) const OVERRIDE: &str = "HAULIER_ASCENDCL";

/// In this order: every CANN has the first name; newer ones keep the runtime in the second and may drop the first.
const NAMES: [&str; 2] = ["libascendcl.so", "libacl_rt.so"];

/// What no device can be served without, all of it older than 2023. Everything else gates a capability.
pub(crate) const MUST_HAVE: [&str; 18] = [
    "aclInit",
    "aclGetRecentErrMsg",
    "aclrtGetSocName",
    "aclrtGetDeviceCount",
    "aclrtSetDevice",
    "aclrtResetDevice",
    "aclrtGetCurrentContext",
    "aclrtSetCurrentContext",
    "aclrtCreateStreamWithConfig",
    "aclrtDestroyStream",
    "aclrtSynchronizeStream",
    "aclrtMalloc",
    "aclrtFree",
    "aclrtMallocHost",
    "aclrtFreeHost",
    "aclrtMemcpy",
    "aclrtMemcpyAsync",
    "aclrtGetMemInfo",
];

/// What to try, in order.
pub(crate) fn candidates(named: Option<OsString>) -> Vec<OsString> {
    match named.filter(|name| !name.is_empty()) {
        Some(name) => vec![name],
        None => NAMES.map(OsString::from).to_vec(),
    }
}

/// What `name` leads to, or `None` where it leads to nothing. Calls no function of the library.
pub(crate) fn inspect(name: &OsStr) -> Option<Presence> {
    let library = match Library::open(name) {
        Ok(library) => library,
        Err(Refusal::Missing) => return None,
        Err(Refusal::Unloadable(words)) => {
            let why = format!("the dynamic linker refuses it: {words}; was CANN's set_env.sh sourced?");
            return Some(broken(name, Kind::NotPresent, why));
        }
    };
    // With libascendcl.so this is the libacl_rt.so behind it, where the functions live.
    let file = library.address_of(MUST_HAVE[0]).and_then(file_of);
    let path = file.as_deref().unwrap_or(Path::new(name));
    if is_stub(path) {
        let why = "a CANN toolkit's stub, which only serves linking; source CANN's set_env.sh, or take the stub \
                   directory out of the library search path";
        return Some(broken(path.as_os_str(), Kind::NotPresent, why.to_owned()));
    }
    let missing: Vec<_> =
        MUST_HAVE.into_iter().filter(|symbol| library.address_of(symbol).is_none()).collect();
    if !missing.is_empty() {
        let why =
            format!("too old, or no ACL library: it lacks {}; install a newer CANN", missing.join(", "));
        return Some(broken(path.as_os_str(), Kind::Unsupported, why));
    }
    Some(Presence::Present { library: Some(path.display().to_string()) })
}

/// A stub exports ACL's functions and is told apart by its directory alone, short of calling `aclInit`.
fn is_stub(path: &Path) -> bool {
    path.parent().is_some_and(|directory| directory.ends_with("stub") || directory.ends_with("devlib"))
}

fn broken(library: &OsStr, kind: Kind, why: String) -> Presence {
    Presence::Broken {
        library: library.display().to_string(),
        error: Error::new(kind, BACKEND, "probe").detail(why),
    }
}

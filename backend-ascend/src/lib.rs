//! Haulier's Ascend backend.
//!
//! It is built without CANN and links nothing: the library is looked for at run time, and its absence is an answer. CANN
//! 8.5 to 9.x are served alike; what one of them lacks gates a capability.
//!
//! ACL takes a context away from no thread. So a thread that has none is left alone: binding it answers
//! [`CannotRestore`](hal::Kind::CannotRestore), and the work goes to a thread of the library's own, which
//! [`DeviceExt::bound`](hal::DeviceExt::bound) and [`Workers`](hal::Workers) see to.
//!
//! | module | what it holds |
//! |---|---|
//! | `device` | [`AscendDevice`], its identity, and its side of the contract |
//! | `stream` | [`AscendStream`], and waiting for one |
//! | `memory` | [`AscendAllocation`], and which allocation an address belongs to |
//! | `copy` | copies on streams of the backend's own, and their pinned staging memory |
//! | `ipc` | export, and [`AscendImport`] |
//! | `register` | [`AscendRegistration`] |
//! | [`error`] | what ACL's codes mean |
//! | `exit` | the end of the process, which ACL does not outlive |
//! | `ffi` | the library and its calls |

mod copy;
mod device;
pub mod error;
mod exit;
mod ffi;
mod ipc;
mod memory;
mod register;
mod stream;

use hal::Presence;

pub use device::{AscendDevice, AscendPrevious};
pub use ipc::AscendImport;
pub use memory::AscendAllocation;
pub use register::AscendRegistration;
pub use stream::AscendStream;

/// The backend's name.
pub const BACKEND: &str = "ascend";

/// Whether this machine has CANN, as far as can be told without initialising it: never calls `aclInit`.
///
/// Looks for `libascendcl.so`, then `libacl_rt.so`, or only for what the environment variable `HAULIER_ASCENDCL` names.
pub fn probe() -> Presence {
    match ffi::find(&ffi::configured()) {
        Ok((_, library)) => Presence::Present { library: Some(library) },
        Err(unusable) => unusable.presence(),
    }
}

/// As [`probe`], and initialises ACL where there is one: also tells a CANN without a device, and one that refuses to
/// start. Binds no device.
pub fn devices() -> (Presence, Vec<AscendDevice>) {
    let error = match AscendDevice::all() {
        Ok(devices) => return (probe(), devices),
        Err(error) => error,
    };
    let presence = match probe() {
        Presence::Present { library } => Presence::Broken { library: library.unwrap_or_default(), error },
        Presence::Broken { library, .. } => Presence::Broken { library, error },
        absent => absent,
    };
    (presence, Vec::new())
}

#[cfg(test)]
mod tests {
    use std::{
        ffi::OsString,
        fs,
        path::{Path, PathBuf},
        process::Command,
    };

    use hal::Kind;

    use super::*;

    /// Builds a shared library that exports `symbols`. Each aborts when called, which proves that probing calls none.
    fn fake(directory: &Path, symbols: &[&str]) -> PathBuf {
        fs::create_dir_all(directory).unwrap();
        let (source, library) = (directory.join("fake.c"), directory.join("libacl_rt.so"));
        let bodies = symbols.iter().map(|s| format!("void {s}(void) {{ __builtin_trap(); }}\n"));
        fs::write(&source, bodies.collect::<String>()).unwrap();
        let status = Command::new("cc")
            .args(["-shared", "-fPIC", "-o"])
            .args([&library, &source])
            .status()
            .expect("the tests need a C compiler named cc");
        assert!(status.success(), "cc failed");
        library
    }

    fn probe_for(names: &[OsString]) -> Presence {
        match ffi::find(names) {
            Ok((_, library)) => Presence::Present { library: Some(library) },
            Err(unusable) => unusable.presence(),
        }
    }

    fn probe_path(path: &Path) -> Presence {
        probe_for(&[path.into()])
    }

    #[test]
    fn the_name_that_every_version_has_comes_first() {
        assert_eq!(ffi::candidates(None), ["libascendcl.so", "libacl_rt.so"]);
        assert_eq!(ffi::candidates(Some("".into())), ["libascendcl.so", "libacl_rt.so"]);
        assert_eq!(ffi::candidates(Some("/opt/libascendcl.so".into())), ["/opt/libascendcl.so"]);
    }

    #[test]
    fn nothing_there_is_absent_and_says_where_it_looked() {
        let names = ["libhaulier-none.so.1".into(), "/nowhere/libhaulier-none.so".into()];
        let Presence::Absent { why, looked } = probe_for(&names) else { panic!("not absent") };
        assert_eq!(looked, ["libhaulier-none.so.1", "/nowhere/libhaulier-none.so"]);
        assert!(why.contains("HAULIER_ASCENDCL"), "{why}");
    }

    #[test]
    fn a_file_that_is_no_library_is_broken() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("libascendcl.so");
        fs::write(&path, "not a library").unwrap();
        let Presence::Broken { library, error } = probe_path(&path) else { panic!("not broken") };
        assert_eq!((Path::new(&library), error.kind()), (path.as_path(), Kind::NotPresent));
        assert!(error.to_string().contains("the dynamic linker refuses it: "), "{error}");
    }

    #[test]
    fn a_library_without_the_symbols_is_broken_and_names_them() {
        let directory = tempfile::tempdir().unwrap();
        let library = fake(directory.path(), &["aclInit", "aclrtMalloc"]);
        let Presence::Broken { error, .. } = probe_path(&library) else { panic!("not broken") };
        assert_eq!(error.kind(), Kind::Unsupported);
        let text = error.to_string();
        assert!(text.contains("aclrtSetDevice") && !text.contains("aclrtMalloc,"), "{text}");
    }

    #[test]
    fn a_stub_is_broken_also_through_a_link() {
        let directory = tempfile::tempdir().unwrap();
        let stub = fake(&directory.path().join("stub"), ffi::MUST_HAVE);
        let link = directory.path().join("libascendcl.so");
        std::os::unix::fs::symlink(&stub, &link).unwrap();
        let Presence::Broken { library, error } = probe_path(&link) else { panic!("not broken") };
        assert_eq!(Path::new(&library), stub.canonicalize().unwrap());
        assert!(error.to_string().contains("stub"), "{error}");
    }

    #[test]
    fn a_whole_library_is_present_and_no_function_was_called() {
        let directory = tempfile::tempdir().unwrap();
        let library = fake(directory.path(), ffi::MUST_HAVE);
        let Presence::Present { library: Some(found) } = probe_path(&library) else { panic!("not present") };
        assert_eq!(Path::new(&found), library.canonicalize().unwrap());
    }

    #[test]
    fn a_broken_candidate_does_not_hide_a_usable_one() {
        let directory = tempfile::tempdir().unwrap();
        let old = fake(&directory.path().join("old"), &[]);
        let whole = fake(&directory.path().join("whole"), ffi::MUST_HAVE);
        assert!(matches!(probe_for(&[old.into(), whole.into()]), Presence::Present { .. }));
    }
}

//! Haulier's NVIDIA backend.
//!
//! It is built without a CUDA toolkit and links nothing: the driver's library is looked for at run time, and its absence
//! is an answer. A context is created when a device is first bound, never to answer a question.
//!
//! | module | what it holds |
//! |---|---|
//! | `device` | [`CudaDevice`], its identity, and its side of the contract |
//! | `stream` | [`CudaStream`], and waiting for one |
//! | `memory` | [`CudaAllocation`], and which allocation an address belongs to |
//! | `copy` | copies on streams of the backend's own, and their pinned staging memory |
//! | `ipc` | export, and [`CudaImport`] |
//! | `register` | [`CudaRegistration`] |
//! | `interop` | regions and streams from cudarc's types (cargo feature `cudarc`) |
//! | [`error`] | what the driver's codes mean |
//! | `ffi` | the library and its calls |

mod copy;
mod device;
pub mod error;
mod ffi;
#[cfg(feature = "cudarc")]
mod interop;
mod ipc;
mod memory;
mod register;
mod stream;

use hal::Presence;

pub use device::{CudaDevice, CudaPrevious};
pub use ipc::CudaImport;
pub use memory::CudaAllocation;
pub use register::CudaRegistration;
pub use stream::CudaStream;

/// The backend's name.
pub const BACKEND: &str = "cuda";

/// Whether this machine has a CUDA driver, as far as can be told without initialising it: never calls `cuInit`.
///
/// Looks for `libcuda.so.1`, then `libcuda.so`, or only for what the environment variable `HAULIER_LIBCUDA` names.
pub fn probe() -> Presence {
    match ffi::find(&ffi::configured()) {
        Ok((_, library)) => Presence::Present { library: Some(library) },
        Err(unusable) => unusable.presence(),
    }
}

/// As [`probe`], and initialises the driver where there is one: also tells a driver without a device, a stub that looks
/// like a driver, and a driver that refuses to start. Creates no context.
pub fn devices() -> (Presence, Vec<CudaDevice>) {
    let error = match CudaDevice::all() {
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
        let (source, library) = (directory.join("fake.c"), directory.join("libcuda.so"));
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

    /// As [`fake`], with everything that a driver must have.
    fn whole(directory: &Path) -> PathBuf {
        fake(directory, &[ffi::MUST_HAVE, &["cuDeviceGetUuid"]].concat())
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
    fn the_drivers_own_name_comes_before_the_stubs() {
        assert_eq!(ffi::candidates(None), ["libcuda.so.1", "libcuda.so"]);
        assert_eq!(ffi::candidates(Some("".into())), ["libcuda.so.1", "libcuda.so"]);
        assert_eq!(ffi::candidates(Some("/opt/libcuda.so".into())), ["/opt/libcuda.so"]);
    }

    #[test]
    fn nothing_there_is_absent_and_says_where_it_looked() {
        let names = ["libhaulier-none.so.1".into(), "/nowhere/libhaulier-none.so".into()];
        let Presence::Absent { why, looked } = probe_for(&names) else { panic!("not absent") };
        assert_eq!(looked, ["libhaulier-none.so.1", "/nowhere/libhaulier-none.so"]);
        assert!(why.contains("HAULIER_LIBCUDA"), "{why}");
    }

    #[test]
    fn a_file_that_is_no_library_is_broken() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("libcuda.so.1");
        fs::write(&path, "not a library").unwrap();
        let Presence::Broken { library, error } = probe_path(&path) else { panic!("not broken") };
        assert_eq!((Path::new(&library), error.kind()), (path.as_path(), Kind::NotPresent));
        assert!(error.to_string().contains("the dynamic linker refuses it: "), "{error}");
    }

    #[test]
    fn a_library_without_the_symbols_is_broken_and_names_them() {
        let directory = tempfile::tempdir().unwrap();
        let library = fake(directory.path(), &["cuInit", "cuDeviceGet"]);
        let Presence::Broken { error, .. } = probe_path(&library) else { panic!("not broken") };
        assert_eq!(error.kind(), Kind::Unsupported);
        let text = error.to_string();
        assert!(text.contains("cuStreamSynchronize") && !text.contains("cuDeviceGet,"), "{text}");
    }

    #[test]
    fn a_stub_is_broken_also_through_a_link() {
        let directory = tempfile::tempdir().unwrap();
        let stub = whole(&directory.path().join("stubs"));
        let link = directory.path().join("libcuda.so.1");
        std::os::unix::fs::symlink(&stub, &link).unwrap();
        let Presence::Broken { library, error } = probe_path(&link) else { panic!("not broken") };
        assert_eq!(Path::new(&library), stub.canonicalize().unwrap());
        assert!(error.to_string().contains("stub"), "{error}");
    }

    #[test]
    fn a_whole_library_is_present_and_no_function_was_called() {
        let directory = tempfile::tempdir().unwrap();
        let library = whole(directory.path());
        let Presence::Present { library: Some(found) } = probe_path(&library) else { panic!("not present") };
        assert_eq!(Path::new(&found), library.canonicalize().unwrap());
    }

    #[test]
    fn a_broken_candidate_does_not_hide_a_usable_one() {
        let directory = tempfile::tempdir().unwrap();
        let old = fake(&directory.path().join("old"), &[]);
        let whole = whole(&directory.path().join("whole"));
        assert!(matches!(probe_for(&[old.into(), whole.into()]), Presence::Present { .. }));
    }
}

//! Errors of the host backend. The vendor is the kernel: its errno is the vendor code.

use hal::{Error, Kind};
use rustix::io::Errno;

/// The backend's name.
pub(crate) const BACKEND: &str = "cpu";

/// An error of this backend.
pub(crate) fn error(kind: Kind, op: &'static str) -> Error {
    Error::new(kind, BACKEND, op).on(0)
}

/// An error that the kernel gave.
pub(crate) fn errno(kind: Kind, op: &'static str, e: Errno) -> Error {
    error(kind, op).vendor(e.raw_os_error(), Some(&e.to_string()))
}

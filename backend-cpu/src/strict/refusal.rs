//! How the machine refuses: a neutral reason, and the number that the vendor would give.

use std::fmt;

use hal::{Error, Kind};

use super::machine::BACKEND;

/// A call's answer.
pub type Answer<T> = Result<T, Refusal>;

/// Whose numbers the machine speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Dialect {
    /// The CUDA driver's.
    #[default]
    Cuda,
    /// The Ascend runtime's.
    Acl,
}

/// Why a call was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Why {
    /// An argument breaks a rule, or names memory that is not there.
    InvalidValue,
    /// The calling thread has no current device.
    NoContext,
    /// No such device is visible.
    InvalidDevice,
    /// No such stream or event.
    InvalidHandle,
    /// The memory or stream is of another device than the current one.
    WrongContext,
    /// The range leaves its allocation.
    OutOfRange,
    /// The thread's device cannot be taken away again.
    CannotUnset,
    /// The device has not as much memory left.
    OutOfMemory,
    /// Queued work is not done.
    NotReady,
    /// Forbidden while a stream is captured. The capture is spoiled now.
    CaptureForbids,
    /// The capture was spoiled before.
    CaptureSpoiled,
    /// The default stream would depend on a stream that is captured.
    CaptureImplicit,
    /// A captured stream would depend on work outside of the capture.
    CaptureIsolation,
    /// The event was recorded within a capture, so it never happens.
    CapturedEvent,
    /// A capture ends on the thread that began it.
    CaptureWrongThread,
    /// The stream is not captured.
    NotCapturing,
    /// The bytes are registered already.
    AlreadyRegistered,
    /// No registration starts there.
    NotRegistered,
    /// Memory of this kind has no handle.
    NotShareable,
    /// What the peer sent cannot be opened.
    ImportRefused,
    /// The handle is the process's own.
    OwnProcess,
    /// The handle is open already.
    AlreadyOpen,
    /// Queued work failed.
    StreamFailed,
    /// What was waited for was dropped with its stream's queued work.
    StreamAborted,
    /// The driver is unloaded.
    Unloaded,
    /// A number that a test injected and that has no meaning here.
    Other,
}

/// Every reason with its kind and its number for CUDA and ACL. Where one number has several reasons, the first is what
/// the number is taken to mean.
const REASONS: &[(Why, Kind, i64, i64)] = &[
    (Why::InvalidValue, Kind::InvalidArgument, 1, 107000),
    (Why::NoContext, Kind::NotBound, 201, 107002),
    (Why::InvalidDevice, Kind::InvalidDevice, 101, 107001),
    (Why::InvalidHandle, Kind::InvalidArgument, 400, 107017),
    (Why::WrongContext, Kind::DeviceMismatch, 400, 107003),
    (Why::OutOfRange, Kind::InvalidRange, 1, 107000),
    (Why::CannotUnset, Kind::CannotRestore, 1, 100000),
    (Why::OutOfMemory, Kind::OutOfMemory, 2, 207001),
    (Why::NotReady, Kind::Timeout, 600, 507046),
    (Why::CaptureForbids, Kind::StreamCapturing, 900, 107027),
    (Why::CaptureSpoiled, Kind::StreamCapturing, 901, 507903),
    (Why::CaptureIsolation, Kind::StreamCapturing, 905, 107027),
    (Why::CaptureImplicit, Kind::StreamCapturing, 906, 107027),
    (Why::CapturedEvent, Kind::StreamCapturing, 907, 107027),
    (Why::CaptureWrongThread, Kind::StreamCapturing, 908, 107027),
    (Why::NotCapturing, Kind::InvalidArgument, 401, 107029),
    (Why::AlreadyRegistered, Kind::Overlap, 712, 507910),
    (Why::NotRegistered, Kind::NotRegistered, 713, 507911),
    (Why::NotShareable, Kind::Unsupported, 1, 107000),
    (Why::ImportRefused, Kind::ImportRefused, 205, 507899),
    (Why::OwnProcess, Kind::ImportRefused, 201, 507899),
    (Why::AlreadyOpen, Kind::ImportRefused, 208, 507899),
    (Why::StreamFailed, Kind::Driver, 719, 507000),
    (Why::StreamAborted, Kind::Driver, 719, 107023),
    (Why::Unloaded, Kind::ShutDown, 4, 4),
];

impl Why {
    /// The contract's kind for it.
    pub fn kind(self) -> Kind {
        REASONS.iter().find(|row| row.0 == self).map_or(Kind::Driver, |row| row.1)
    }
}

impl Dialect {
    /// The vendor's number for a reason.
    pub fn code(self, why: Why) -> i64 {
        REASONS.iter().find(|row| row.0 == why).map_or(999, |row| self.pick(row))
    }

    /// What a vendor's number means, as far as the machine knows it.
    pub fn why(self, code: i64) -> Why {
        REASONS.iter().find(|row| self.pick(row) == code).map_or(Why::Other, |row| row.0)
    }

    fn pick(self, row: &(Why, Kind, i64, i64)) -> i64 {
        match self {
            Dialect::Cuda => row.2,
            Dialect::Acl => row.3,
        }
    }
}

/// A call that was refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The reason.
    pub why: Why,
    /// The vendor's number for it, or the injected one.
    pub code: i64,
    /// The values that led to it.
    pub text: String,
}

impl Refusal {
    /// The refusal as the contract's error in operation `op` of device `device`.
    pub fn error(self, op: &'static str, device: u32) -> Error {
        Error::new(self.why.kind(), BACKEND, op).on(device).vendor(self.code, Some(&self.text))
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {} [{}]", self.why, self.text, self.code)
    }
}

impl std::error::Error for Refusal {}

impl From<Refusal> for Error {
    /// For tests that use the machine beside a device; where the device is known, use [`Refusal::error`].
    fn from(refusal: Refusal) -> Error {
        Error::new(refusal.why.kind(), BACKEND, "machine").vendor(refusal.code, Some(&refusal.text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_dialect_has_its_numbers() {
        assert_eq!((Dialect::Cuda.code(Why::NoContext), Dialect::Acl.code(Why::NoContext)), (201, 107002));
        assert_eq!(Dialect::Cuda.why(900), Why::CaptureForbids);
        assert_eq!((Dialect::Cuda.why(1), Dialect::Acl.why(107000)), (Why::InvalidValue, Why::InvalidValue));
        assert_eq!(Dialect::Cuda.why(-77), Why::Other);
    }
}

//! Mooncake's codes in Haulier's words. The code and its meaning travel with the error.

use hal::{Bound, Device, Error, Kind};

/// The name that errors carry.
pub(crate) const BACKEND: &str = "mooncake";

/// There is no object of this name.
pub(crate) const NOT_FOUND: i32 = -704;
/// Somebody's put of this name is under way.
pub(crate) const NOT_READY: i64 = -703;
/// The read took longer than Mooncake keeps a value for its reader, as on a machine that is very busy.
pub(crate) const LEASE_EXPIRED: i64 = -707;
/// Invalid parameters, which is also what a read into too little room is called.
pub(crate) const TOO_SMALL: i64 = -600;
/// No segment has room.
pub(crate) const NO_ROOM: i64 = -200;
/// The master, or the client that holds the bytes, does not answer.
const RPC: i64 = -900;
const RPC_TIMEOUT: i64 = -901;
/// The bytes could not be moved: their holder is gone, or the memory is not what the transport can reach.
const TRANSFER: i64 = -800;

/// What Mooncake means by a code, as its source names it; the C ABI gives no text.
fn text(code: i64) -> &'static str {
    match code {
        -1 => "internal error",
        -10 => "buffer overflow",
        -101 => "no segment",
        -102 => "segment exists",
        NO_ROOM => "no segment has room",
        -300 => "version",
        -400 => "invalid key",
        -500 => "write failed",
        TOO_SMALL => "invalid parameters",
        -601 => "illegal client",
        -700 => "invalid write",
        -701 => "invalid read",
        -702 => "invalid replica",
        NOT_READY => "replica is not ready",
        -704 => "object not found",
        -705 => "object exists",
        -706 => "object has a lease",
        LEASE_EXPIRED => "lease expired",
        -712..=-710 => "replica state",
        -714 => "replica is busy",
        TRANSFER => "transfer failed",
        -801 => "checksum mismatch",
        RPC => "RPC failed",
        RPC_TIMEOUT => "RPC timed out",
        -1012 => "not supported",
        -1106..=-1100 => "file",
        -1700 => "quota",
        _ => "",
    }
}

/// What to branch on.
fn kind(code: i64) -> Kind {
    match code {
        NO_ROOM | -1700 => Kind::OutOfMemory,
        TOO_SMALL => Kind::InvalidArgument,
        -1012 => Kind::Unsupported,
        _ => Kind::Driver,
    }
}

fn remedy(code: i64) -> Option<&'static str> {
    match code {
        NO_ROOM => Some("have more or larger segments mounted, or remove values"),
        RPC | RPC_TIMEOUT => Some("is mooncake_master up? The client joins it again by itself"),
        TRANSFER => Some("the client that holds the value may be gone"),
        _ => None,
    }
}

/// The error for a code that `op` was answered with.
pub(crate) fn refusal<D: Device>(bound: &Bound<'_, D>, op: &'static str, code: i64) -> Error {
    let e = Error::new(kind(code), BACKEND, op).on(bound.device().identity()).vendor(code, Some(text(code)));
    match remedy(code) {
        Some(remedy) => e.detail(remedy),
        None => e,
    }
}

/// The store's word for the error, where it has one.
pub(crate) fn error(e: Error) -> crate::Error {
    match e.vendor_code() {
        // What is being put is not there yet.
        Some(code) if code == i64::from(NOT_FOUND) || code == NOT_READY => crate::Error::NotFound,
        Some(_) if e.backend() == BACKEND => crate::Error::Mooncake(e),
        _ => e.into(),
    }
}

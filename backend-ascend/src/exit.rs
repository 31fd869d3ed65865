//! Whether the process is ending.
//!
//! ACL says of itself that it is gone by no code of its own, unlike CUDA. But it ends by what it had the process's exit
//! call, which is called last in, first out; so what is registered after it was opened is called before it ends.

use std::{
    ffi::c_int,
    sync::atomic::{AtomicBool, Ordering},
};

static BEGUN: AtomicBool = AtomicBool::new(false);

unsafe extern "C" {
    /// The C library's.
    safe fn atexit(call: extern "C" fn()) -> c_int;
}

extern "C" fn begin() {
    BEGUN.store(true, Ordering::Release);
}

/// To be called each time that ACL may have registered something.
pub(crate) fn watch() {
    if atexit(begin) != 0 {
        tracing::debug!("the end of the process goes unnoticed");
    }
}

/// Whether it has begun to end. Then ACL is not called any more: it gives everything back by itself.
pub(crate) fn has_begun() -> bool {
    BEGUN.load(Ordering::Acquire)
}

//! What the runtime says of the last failure: the thread's own text, which is gone once it was read.

use std::{
    cell::RefCell,
    ffi::{CString, c_char},
    process, ptr,
};

use crate::{
    abi::{Refused, status},
    sim::Sim,
};

#[derive(Default)]
struct Texts {
    /// Of the last failure, for whoever asks.
    last: Option<CString>,
    /// What was handed out; the caller may look at it until it asks again.
    handed_out: Option<CString>,
}

thread_local! {
    static TEXTS: RefCell<Texts> = RefCell::default();
}

/// Keeps the text of a failure. The outermost layer's refusals of null pointers record none.
pub(crate) fn record(sim: &Sim, function: &str, refused: &Refused) {
    if !sim.settings.error_text || matches!(refused.code, None | Some(status::INVALID_PARAM)) {
        return;
    }
    let text = format!(
        "EE1001: [PID: {}] The argument is invalid.Reason: {}\n        TraceBack (most recent call last):\n        \
         {function} failed[FUNC:{function}]\n",
        process::id(),
        refused.why
    );
    // A thread that is being torn down keeps none.
    let _ = TEXTS.try_with(|texts| texts.borrow_mut().last = CString::new(text).ok());
}

#[unsafe(no_mangle)]
extern "C" fn aclGetRecentErrMsg() -> *const c_char {
    let text = TEXTS.try_with(|texts| {
        let mut texts = texts.borrow_mut();
        texts.handed_out = texts.last.take();
        texts.handed_out.as_ref().map_or(ptr::null(), |text| text.as_ptr())
    });
    text.unwrap_or(ptr::null())
}

//! The stream that a caller names for its own thread.
//!
//! Frameworks keep their current stream themselves and a backend cannot ask for it, so the caller says it with
//! [`DeviceExt::with_stream`](crate::DeviceExt::with_stream), and
//! [`Device::current_stream`](crate::Device::current_stream) answers with it.

use std::{any::Any, cell::RefCell};

use crate::{Device, DeviceUuid};

thread_local! {
    static NAMED: RefCell<Vec<(DeviceUuid, Box<dyn Any>)>> = const { RefCell::new(Vec::new()) };
}

/// The innermost stream that the calling thread has named for `device`.
pub fn named<D: Device>(device: &D) -> Option<D::Stream> {
    let uuid = device.identity().uuid;
    NAMED.with_borrow(|named| {
        named
            .iter()
            .rev()
            .filter(|(on, _)| *on == uuid)
            .find_map(|(_, s)| s.downcast_ref::<D::Stream>().copied())
    })
}

/// Names `stream` for the calling thread while `work` runs, also when it unwinds.
pub(crate) fn with_stream<D: Device, R>(device: &D, stream: D::Stream, work: impl FnOnce() -> R) -> R {
    struct Pop;
    impl Drop for Pop {
        fn drop(&mut self) {
            NAMED.with_borrow_mut(|named| named.pop());
        }
    }
    NAMED.with_borrow_mut(|named| named.push((device.identity().uuid, Box::new(stream))));
    let _pop = Pop;
    work()
}

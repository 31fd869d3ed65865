//! What a put reads and a get fills: borrowed memory, and the streams that it must wait for.

use std::{fmt::Debug, marker::PhantomData, sync::Arc};

use hal::{Buffer, Device, Keep};

use parking_lot::RwLock;

use crate::error::{Error, Result};

/// Address, length, and what is known about them before the driver is asked.
#[derive(Debug, Clone)]
pub(crate) struct Span<D: Device> {
    pub(crate) addr: usize,
    pub(crate) len: usize,
    pub(crate) origin: Origin<D>,
    pub(crate) order: Order<D>,
}

#[derive(Debug, Clone)]
pub(crate) enum Origin<D: Device> {
    /// A Rust slice: host memory, and the borrow says that nothing else writes it.
    Slice,
    /// Kept alive by the call, also when the call gives up before the driver does.
    Buffer(Keep<D>),
    /// A raw address; the driver tells where it lives.
    Raw,
}

/// For how long the host memory of a call may be touched: until the call returns to its owner.
///
/// Work that was left behind because its caller gave up may go on later, when the memory is freed. So each piece of a copy
/// asks first, and a caller that returns waits for the piece in progress: a `memcpy` of bounded size, or a small request
/// that ends by the caller's own deadline; never a driver call.
#[derive(Debug, Clone, Default)]
pub(crate) struct Lease(Arc<RwLock<bool>>);

impl Lease {
    /// Runs `work`, which touches the memory, unless its owner has it back.
    pub(crate) fn during<R>(&self, work: impl FnOnce() -> Result<R>) -> Result<R> {
        let over = self.0.read();
        if *over {
            return Err(Error::Timeout { op: "a copy whose caller has given up".into() });
        }
        work()
    }

    /// Ends the lease when the guard is dropped, also while unwinding.
    pub(crate) fn ends_here(&self) -> impl Drop + use<> {
        struct End(Lease);
        impl Drop for End {
            fn drop(&mut self) {
                *self.0.0.write() = true;
            }
        }
        End(self.clone())
    }
}

/// Which queued work the call waits for.
#[derive(Debug, Clone)]
pub(crate) enum Order<D: Device> {
    /// What the calling thread's current stream holds.
    Current,
    /// What these streams hold.
    Streams(Vec<D::Stream>),
    /// Nothing: the caller says that it is done.
    Done,
}

macro_rules! span_type {
    ($(#[$doc:meta])* $name:ident, $borrow:ty, $buffer:ty, $verb:literal) => {
        $(#[$doc])*
        #[derive(Debug)]
        pub struct $name<'a, D: Device> {
            pub(crate) span: Span<D>,
            _borrow: PhantomData<$borrow>,
        }

        impl<'a, D: Device> $name<'a, D> {
            /// `len` bytes at a raw address of the host or of any device, such as PyTorch's `data_ptr()`. The driver is
            /// asked where they live.
            ///
            /// # Safety
            #[doc = concat!("The memory must stay allocated, and nobody but queued work on the named streams may ", $verb)]
            /// until the call has returned. After a [`Error::Timeout`] of device memory, or of memory that is registered
            /// with a Mooncake cluster, the driver may still be at it: keep the memory until the client is closed.
            pub unsafe fn raw(addr: usize, len: usize) -> Self {
                Self::new(addr, len, Origin::Raw, Order::Current)
            }

            /// The part of `buffer` that starts `offset` bytes in and has `len` bytes.
            ///
            /// *Errors*: [`Error::Device`] with `InvalidRange` where that leaves the buffer.
            pub fn part(buffer: $buffer, offset: usize, len: usize) -> Result<Self> {
                let region = buffer.region().part(offset, len)?;
                Ok(Self::new(region.addr, region.len, Origin::Buffer(buffer.keep()), Order::Current))
            }

            /// Waits for work queued on these streams, instead of on the calling thread's current one.
            pub fn after(mut self, streams: &[D::Stream]) -> Self {
                self.span.order = Order::Streams(streams.to_vec());
                self
            }

            /// Waits for nothing: the caller has synchronised already (as DLPack's stream -1 says).
            pub fn already_done(mut self) -> Self {
                self.span.order = Order::Done;
                self
            }

            /// Bytes.
            pub fn len(&self) -> usize {
                self.span.len
            }

            /// Whether there are none.
            pub fn is_empty(&self) -> bool {
                self.span.len == 0
            }

            fn new(addr: usize, len: usize, origin: Origin<D>, order: Order<D>) -> Self {
                $name { span: Span { addr, len, origin, order }, _borrow: PhantomData }
            }
        }
    };
}

span_type! {
    /// What a put reads: a slice, device memory, or a raw region.
    ///
    /// It borrows its source until the put has returned, so the source cannot be overwritten meanwhile.
    Payload, &'a [u8], &'a Buffer<D>, "write it"
}
span_type! {
    /// What a get fills: a slice, device memory, or a raw region.
    Target, &'a mut [u8], &'a mut Buffer<D>, "touch it"
}

impl<D: Device> Clone for Payload<'_, D> {
    /// The same borrowed source again.
    fn clone(&self) -> Self {
        Payload { span: self.span.clone(), _borrow: PhantomData }
    }
}

impl<'a, D: Device> From<&'a [u8]> for Payload<'a, D> {
    fn from(bytes: &'a [u8]) -> Self {
        // The borrow rules out that queued work writes a slice, so there is nothing to wait for.
        Payload::new(bytes.as_ptr() as usize, bytes.len(), Origin::Slice, Order::Done)
    }
}

impl<'a, D: Device, const N: usize> From<&'a [u8; N]> for Payload<'a, D> {
    fn from(bytes: &'a [u8; N]) -> Self {
        bytes.as_slice().into()
    }
}

impl<'a, D: Device> From<&'a Vec<u8>> for Payload<'a, D> {
    fn from(bytes: &'a Vec<u8>) -> Self {
        bytes.as_slice().into()
    }
}

impl<'a, D: Device> From<&'a Buffer<D>> for Payload<'a, D> {
    fn from(buffer: &'a Buffer<D>) -> Self {
        let region = buffer.region();
        Payload::new(region.addr, region.len, Origin::Buffer(buffer.keep()), Order::Current)
    }
}

impl<'a, D: Device> From<&'a mut [u8]> for Target<'a, D> {
    fn from(bytes: &'a mut [u8]) -> Self {
        Target::new(bytes.as_mut_ptr() as usize, bytes.len(), Origin::Slice, Order::Done)
    }
}

impl<'a, D: Device> From<&'a mut Vec<u8>> for Target<'a, D> {
    fn from(bytes: &'a mut Vec<u8>) -> Self {
        bytes.as_mut_slice().into()
    }
}

impl<'a, D: Device> From<&'a mut Buffer<D>> for Target<'a, D> {
    fn from(buffer: &'a mut Buffer<D>) -> Self {
        let region = buffer.region();
        Target::new(region.addr, region.len, Origin::Buffer(buffer.keep()), Order::Current)
    }
}

/// The longest key in bytes.
pub use crate::store::KEY_MAX;

/// Refuses keys that no engine stores.
pub(crate) fn check_key(key: &str) -> Result<()> {
    if key.is_empty() || key.len() > KEY_MAX {
        return Err(Error::InvalidKey { len: key.len() as u64, limit: KEY_MAX as u64 });
    }
    Ok(())
}

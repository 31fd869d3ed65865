//! The driver's functions as its header declares them, except that each returns `i32`: a code is a number.
//!
//! Handles (contexts, streams, events) are pointers in C. They are never dereferenced here and are declared as `usize`,
//! which is passed the same way.

use std::ffi::{c_char, c_void};

use super::library::Library;

/// The driver's addresses are 64 bits wide and share one space with the host's.
const _: () = assert!(usize::BITS == 64);

/// `CUipcMemHandle`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct IpcMemHandle(pub(crate) [u8; 64]);

/// `CUmemAccessDesc`, with its `CUmemLocation` inside.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct MemAccess {
    pub(crate) location_type: i32,
    pub(crate) location_id: i32,
    pub(crate) flags: i32,
}

/// Declares the table of functions and how it is filled: each symbol on its own, so that a driver that lacks an optional
/// one serves all the rest.
macro_rules! functions {
    (must { $($must:ident($($arg:ty),*);)* } may { $($may:ident($($opt:ty),*);)* }) => {
        /// What no device can be served without. Everything else gates a capability.
        #[cfg(test)]
        pub(crate) const MUST_HAVE: &[&str] = &[$(stringify!($must)),*];

        /// The functions of one library, under the driver's own names.
        #[allow(non_snake_case)]
        #[derive(Debug, Clone, Copy)]
        pub(crate) struct Functions {
            $(pub(crate) $must: unsafe extern "C" fn($($arg),*) -> i32,)*
            $(pub(crate) $may: Option<unsafe extern "C" fn($($opt),*) -> i32>,)*
        }

        #[allow(non_snake_case)]
        impl Functions {
            /// Looks each of them up, and calls none. *Errors*: the names of all that must be there and are not.
            pub(crate) fn of(library: &Library) -> Result<Self, Vec<&'static str>> {
                let mut missing = Vec::new();
                // SAFETY: the types are those of the driver's header.
                $(let $must = unsafe { library.function(stringify!($must)) };
                if $must.is_none() {
                    missing.push(stringify!($must));
                })*
                if ["cuDeviceGetUuid_v2", "cuDeviceGetUuid"].iter().all(|uuid| library.address_of(uuid).is_none()) {
                    missing.push("cuDeviceGetUuid");
                }
                match ($($must,)*) {
                    ($(Some($must),)*) if missing.is_empty() => Ok(Functions {
                        $($must,)*
                        // SAFETY: as above.
                        $($may: unsafe { library.function(stringify!($may)) },)*
                    }),
                    _ => Err(missing),
                }
            }
        }
    };
}

functions! {
    must {
        cuInit(u32);
        cuDriverGetVersion(*mut i32);
        cuGetErrorName(i32, *mut *const c_char);
        cuGetErrorString(i32, *mut *const c_char);
        cuDeviceGet(*mut i32, i32);
        cuDeviceGetCount(*mut i32);
        cuDeviceGetName(*mut c_char, i32, i32);
        cuDeviceGetAttribute(*mut i32, i32, i32);
        cuDevicePrimaryCtxRetain(*mut usize, i32);
        cuDevicePrimaryCtxRelease_v2(i32);
        cuCtxGetCurrent(*mut usize);
        cuCtxSetCurrent(usize);
        cuCtxPushCurrent_v2(usize);
        cuCtxPopCurrent_v2(*mut usize);
        cuStreamCreate(*mut usize, u32);
        cuStreamDestroy_v2(usize);
        cuStreamQuery(usize);
        cuStreamSynchronize(usize);
        cuStreamIsCapturing(usize, *mut i32);
        cuThreadExchangeStreamCaptureMode(*mut i32);
        cuEventCreate(*mut usize, u32);
        cuEventDestroy_v2(usize);
        cuEventRecord(usize, usize);
        cuEventQuery(usize);
        cuPointerGetAttributes(u32, *const i32, *mut *mut c_void, u64);
        cuMemGetAddressRange_v2(*mut u64, *mut usize, u64);
        cuMemAlloc_v2(*mut u64, usize);
        cuMemFree_v2(u64);
        cuMemGetInfo_v2(*mut usize, *mut usize);
        cuMemcpyAsync(u64, u64, usize, usize);
    }
    may {
        // One of the two has to be there; the newer one tells the slices of a shared card apart.
        cuDeviceGetUuid_v2(*mut [u8; 16], i32);
        cuDeviceGetUuid(*mut [u8; 16], i32);
        cuIpcGetMemHandle(*mut IpcMemHandle, u64);
        cuIpcOpenMemHandle_v2(*mut u64, IpcMemHandle, u32);
        cuIpcCloseMemHandle(u64);
        cuMemRetainAllocationHandle(*mut u64, usize);
        cuMemExportToShareableHandle(*mut i32, u64, i32, u64);
        cuMemImportFromShareableHandle(*mut u64, usize, i32);
        cuMemRelease(u64);
        cuMemAddressReserve(*mut u64, usize, usize, u64, u64);
        cuMemAddressFree(u64, usize);
        cuMemMap(u64, usize, usize, u64, u64);
        cuMemUnmap(u64, usize);
        cuMemSetAccess(u64, usize, *const MemAccess, usize);
        cuMemHostRegister_v2(usize, usize, u32);
        cuMemHostUnregister(usize);
        cuMemHostAlloc(*mut usize, usize, u32);
        cuMemFreeHost(usize);
    }
}

//! The driver's calls as Rust functions: outputs become values, and a code other than 0 becomes a [`Refusal`].
//!
//! Nothing here decides anything. A call that reads or writes memory of the caller's, or takes a handle that the driver
//! follows, is `unsafe`.

use std::{
    ffi::{CStr, c_char},
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    process, ptr,
};

use super::functions::{Functions, IpcMemHandle, MemAccess};

/// The codes that are no failure of the call.
const SUCCESS: i32 = 0;
const NOT_READY: i32 = 600;

const STREAM_NON_BLOCKING: u32 = 1;
const EVENT_DISABLE_TIMING: u32 = 2;
const CAPTURE_MODE_RELAXED: i32 = 2;
const IPC_LAZY_ENABLE_PEER_ACCESS: u32 = 1;
const HANDLE_TYPE_POSIX_FD: i32 = 1;
const LOCATION_DEVICE: i32 = 1;
const ACCESS_READ_WRITE: i32 = 3;
/// The same number for registered and for allocated host memory: pinned for every context.
const HOST_PORTABLE: u32 = 1;

const DEVICE_UNIFIED_ADDRESSING: i32 = 41;
const DEVICE_POSIX_FD: i32 = 103;

/// The driver versions that brought pointer attributes 17 and 20; an older one refuses the whole question.
const HAS_MEMPOOL_HANDLE: i32 = 11_030;
const HAS_MEMORY_BLOCK_ID: i32 = 11_070;

/// A call that did not succeed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Refusal {
    /// The driver's function.
    pub(crate) call: &'static str,
    /// Its answer, or `None` where the driver does not have the function.
    pub(crate) code: Option<i32>,
}

/// What a call gives.
pub(crate) type Answer<T> = Result<T, Refusal>;

/// A context's handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Context(usize);

/// What the driver says of a stream's capture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Capturing {
    No,
    Active,
    /// Spoiled by an earlier call, or a state that only a newer driver knows.
    Spoiled,
}

/// What the driver says of an address. 0 is "does not apply".
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Asked {
    pub(crate) memory_type: u64,
    pub(crate) buffer: u64,
    pub(crate) managed: bool,
    pub(crate) ordinal: i32,
    pub(crate) legacy_ipc: bool,
    pub(crate) base: usize,
    pub(crate) len: usize,
    pub(crate) handle_types: u64,
    pub(crate) pool: bool,
    /// The physical memory behind the address, where the driver tells it.
    pub(crate) block: u64,
}

/// Why a driver could not be initialised: the call, and the driver's words for its code.
#[derive(Debug)]
pub(crate) struct NotStarted {
    pub(crate) refusal: Refusal,
    pub(crate) name: Option<String>,
    pub(crate) text: Option<String>,
}

/// The driver, initialised. Its library stays loaded.
#[derive(Debug)]
pub(crate) struct Driver {
    f: Functions,
    version: i32,
    /// The process that initialised it: a forked child must not use it.
    pid: u32,
}

fn answer(call: &'static str, code: i32) -> Answer<()> {
    if code == SUCCESS { Ok(()) } else { Err(Refusal { call, code: Some(code) }) }
}

/// 600 is an answer to a question, not a failure.
fn ready(call: &'static str, code: i32) -> Answer<bool> {
    if code == NOT_READY { Ok(false) } else { answer(call, code).map(|()| true) }
}

fn optional<F>(call: &'static str, function: Option<F>) -> Answer<F> {
    function.ok_or(Refusal { call, code: None })
}

/// Calls that take and give plain values, and write only to locals of theirs.
macro_rules! call {
    ($self:ident.$name:ident($($arg:expr),*)) => {
        // SAFETY: the outputs are locals, and every handle is one that the driver gave.
        answer(stringify!($name), unsafe { ($self.f.$name)($($arg),*) })
    };
    ($self:ident.$name:ident?($($arg:expr),*)) => {{
        let function = optional(stringify!($name), $self.f.$name)?;
        // SAFETY: as above.
        answer(stringify!($name), unsafe { function($($arg),*) })
    }};
}

impl Driver {
    /// Initialises the driver that has these functions.
    pub(crate) fn start(functions: Functions) -> Result<Self, NotStarted> {
        let mut driver = Driver { f: functions, version: 0, pid: process::id() };
        let started =
            call!(driver.cuInit(0)).and_then(|()| call!(driver.cuDriverGetVersion(&mut driver.version)));
        match started {
            Ok(()) => Ok(driver),
            Err(refusal) => {
                let (name, text) = driver.words(refusal.code.unwrap_or(SUCCESS));
                Err(NotStarted { refusal, name, text })
            }
        }
    }

    /// The newest CUDA version that the driver serves, as 1000 * major + 10 * minor.
    pub(crate) fn version(&self) -> i32 {
        self.version
    }

    /// The process that initialised the driver.
    pub(crate) fn pid(&self) -> u32 {
        self.pid
    }

    pub(crate) fn has_legacy_ipc(&self) -> bool {
        let f = &self.f;
        f.cuIpcGetMemHandle.is_some() && f.cuIpcOpenMemHandle_v2.is_some() && f.cuIpcCloseMemHandle.is_some()
    }

    pub(crate) fn has_vmm_export(&self) -> bool {
        let f = &self.f;
        f.cuMemRetainAllocationHandle.is_some()
            && f.cuMemExportToShareableHandle.is_some()
            && f.cuMemRelease.is_some()
    }

    pub(crate) fn has_vmm_import(&self) -> bool {
        let f = &self.f;
        f.cuMemImportFromShareableHandle.is_some()
            && f.cuMemRelease.is_some()
            && f.cuMemAddressReserve.is_some()
            && f.cuMemAddressFree.is_some()
            && f.cuMemMap.is_some()
            && f.cuMemUnmap.is_some()
            && f.cuMemSetAccess.is_some()
    }

    pub(crate) fn has_host_registration(&self) -> bool {
        self.f.cuMemHostRegister_v2.is_some() && self.f.cuMemHostUnregister.is_some()
    }

    /// The driver's name for `code`, and its sentence. A code that it does not know has neither.
    pub(crate) fn words(&self, code: i32) -> (Option<String>, Option<String>) {
        let ask = |function: unsafe extern "C" fn(i32, *mut *const c_char) -> i32| {
            let mut words = ptr::null();
            // SAFETY: the output is a local.
            if unsafe { function(code, &mut words) } != SUCCESS || words.is_null() {
                return None;
            }
            // SAFETY: the driver gives a string that ends with 0 and is never freed.
            Some(unsafe { CStr::from_ptr(words) }.to_string_lossy().into_owned())
        };
        (ask(self.f.cuGetErrorName), ask(self.f.cuGetErrorString))
    }

    // Devices. None of these needs a context.

    pub(crate) fn device_count(&self) -> Answer<i32> {
        let mut count = 0;
        call!(self.cuDeviceGetCount(&mut count))?;
        Ok(count)
    }

    pub(crate) fn device(&self, ordinal: i32) -> Answer<i32> {
        let mut device = 0;
        call!(self.cuDeviceGet(&mut device, ordinal))?;
        Ok(device)
    }

    pub(crate) fn device_name(&self, device: i32) -> Answer<String> {
        let mut name = [0u8; 256];
        call!(self.cuDeviceGetName(name.as_mut_ptr().cast(), name.len() as i32, device))?;
        let name = CStr::from_bytes_until_nul(&name).map(CStr::to_string_lossy);
        Ok(name.map(|name| name.into_owned()).unwrap_or_default())
    }

    pub(crate) fn device_uuid(&self, device: i32) -> Answer<[u8; 16]> {
        let mut uuid = [0; 16];
        if self.f.cuDeviceGetUuid_v2.is_some() {
            call!(self.cuDeviceGetUuid_v2?(&mut uuid, device))?;
        } else {
            call!(self.cuDeviceGetUuid?(&mut uuid, device))?;
        }
        Ok(uuid)
    }

    pub(crate) fn unified_addressing(&self, device: i32) -> Answer<bool> {
        self.device_attribute(DEVICE_UNIFIED_ADDRESSING, device)
    }

    pub(crate) fn posix_fd_handles(&self, device: i32) -> Answer<bool> {
        self.device_attribute(DEVICE_POSIX_FD, device)
    }

    fn device_attribute(&self, attribute: i32, device: i32) -> Answer<bool> {
        let mut value = 0;
        call!(self.cuDeviceGetAttribute(&mut value, attribute, device))?;
        Ok(value != 0)
    }

    // Contexts.

    pub(crate) fn retain_primary(&self, device: i32) -> Answer<Context> {
        let mut context = 0;
        call!(self.cuDevicePrimaryCtxRetain(&mut context, device))?;
        Ok(Context(context))
    }

    pub(crate) fn release_primary(&self, device: i32) -> Answer<()> {
        call!(self.cuDevicePrimaryCtxRelease_v2(device))
    }

    pub(crate) fn current(&self) -> Answer<Option<Context>> {
        let mut context = 0;
        call!(self.cuCtxGetCurrent(&mut context))?;
        Ok((context != 0).then_some(Context(context)))
    }

    pub(crate) fn set_current(&self, context: Option<Context>) -> Answer<()> {
        call!(self.cuCtxSetCurrent(context.map_or(0, |context| context.0)))
    }

    pub(crate) fn push(&self, context: Context) -> Answer<()> {
        call!(self.cuCtxPushCurrent_v2(context.0))
    }

    pub(crate) fn pop(&self) -> Answer<Context> {
        let mut context = 0;
        call!(self.cuCtxPopCurrent_v2(&mut context))?;
        Ok(Context(context))
    }

    // Streams and events, all with a context current.

    pub(crate) fn create_stream(&self) -> Answer<usize> {
        let mut stream = 0;
        call!(self.cuStreamCreate(&mut stream, STREAM_NON_BLOCKING))?;
        Ok(stream)
    }

    /// # Safety
    /// `stream` must be one of [`create_stream`](Driver::create_stream), and never used again.
    pub(crate) unsafe fn destroy_stream(&self, stream: usize) -> Answer<()> {
        // SAFETY: the caller's promise.
        answer("cuStreamDestroy_v2", unsafe { (self.f.cuStreamDestroy_v2)(stream) })
    }

    /// # Safety
    /// `stream` must be 0, 1, 2 or a live handle.
    pub(crate) unsafe fn query(&self, stream: usize) -> Answer<bool> {
        // SAFETY: the caller's promise.
        ready("cuStreamQuery", unsafe { (self.f.cuStreamQuery)(stream) })
    }

    /// # Safety
    /// As [`query`](Driver::query).
    pub(crate) unsafe fn synchronize(&self, stream: usize) -> Answer<()> {
        // SAFETY: the caller's promise.
        answer("cuStreamSynchronize", unsafe { (self.f.cuStreamSynchronize)(stream) })
    }

    /// # Safety
    /// As [`query`](Driver::query).
    pub(crate) unsafe fn capturing(&self, stream: usize) -> Answer<Capturing> {
        let mut status = 0;
        // SAFETY: the caller's promise, and the output is a local.
        answer("cuStreamIsCapturing", unsafe { (self.f.cuStreamIsCapturing)(stream, &mut status) })?;
        Ok(match status {
            0 => Capturing::No,
            1 => Capturing::Active,
            _ => Capturing::Spoiled,
        })
    }

    /// Makes the calling thread's calls harmless to captures of others. The answer is for
    /// [`restore_capture_mode`](Driver::restore_capture_mode).
    pub(crate) fn relax_capture_mode(&self) -> Answer<i32> {
        let mut mode = CAPTURE_MODE_RELAXED;
        call!(self.cuThreadExchangeStreamCaptureMode(&mut mode))?;
        Ok(mode)
    }

    pub(crate) fn restore_capture_mode(&self, mut mode: i32) -> Answer<()> {
        call!(self.cuThreadExchangeStreamCaptureMode(&mut mode))
    }

    pub(crate) fn create_event(&self) -> Answer<usize> {
        let mut event = 0;
        call!(self.cuEventCreate(&mut event, EVENT_DISABLE_TIMING))?;
        Ok(event)
    }

    /// # Safety
    /// `event` must be one of [`create_event`](Driver::create_event), and never used again.
    pub(crate) unsafe fn destroy_event(&self, event: usize) -> Answer<()> {
        // SAFETY: the caller's promise.
        answer("cuEventDestroy_v2", unsafe { (self.f.cuEventDestroy_v2)(event) })
    }

    /// # Safety
    /// `event` must be live, `stream` as in [`query`](Driver::query).
    pub(crate) unsafe fn record(&self, event: usize, stream: usize) -> Answer<()> {
        // SAFETY: the caller's promise.
        answer("cuEventRecord", unsafe { (self.f.cuEventRecord)(event, stream) })
    }

    /// # Safety
    /// `event` must be live.
    pub(crate) unsafe fn event_reached(&self, event: usize) -> Answer<bool> {
        // SAFETY: the caller's promise.
        ready("cuEventQuery", unsafe { (self.f.cuEventQuery)(event) })
    }

    // Memory.

    /// One question for everything: unlike the singular form it answers for every address, and an address that is not
    /// the driver's has memory type 0.
    pub(crate) fn attributes(&self, addr: usize) -> Answer<Asked> {
        // The last two are asked of drivers that know them.
        const ATTRIBUTES: [i32; 10] = [2, 7, 8, 9, 10, 11, 12, 14, 17, 20];
        let known = match self.version {
            HAS_MEMORY_BLOCK_ID.. => 10,
            HAS_MEMPOOL_HANDLE.. => 9,
            _ => 8,
        };
        // 8 bytes each, whatever their size: the driver writes at most that much, and the rest stays 0.
        let mut values = [0u64; ATTRIBUTES.len()];
        let mut outputs = values.each_mut().map(|value| ptr::from_mut(value).cast());
        call!(self.cuPointerGetAttributes(known, ATTRIBUTES.as_ptr(), outputs.as_mut_ptr(), addr as u64))?;
        let [memory_type, buffer, managed, ordinal, legacy_ipc, base, len, handle_types, pool, block] =
            values;
        Ok(Asked {
            memory_type,
            buffer,
            managed: managed != 0,
            // The driver writes 4 bytes of the 8.
            ordinal: ordinal as u32 as i32,
            legacy_ipc: legacy_ipc != 0,
            base: base as usize,
            len: len as usize,
            handle_types,
            pool: pool != 0,
            block,
        })
    }

    /// The mapping around an address of the current device.
    pub(crate) fn address_range(&self, addr: usize) -> Answer<(usize, usize)> {
        let (mut base, mut len) = (0, 0);
        call!(self.cuMemGetAddressRange_v2(&mut base, &mut len, addr as u64))?;
        Ok((base as usize, len))
    }

    pub(crate) fn allocate(&self, len: usize) -> Answer<usize> {
        let mut addr = 0;
        call!(self.cuMemAlloc_v2(&mut addr, len))?;
        Ok(addr as usize)
    }

    /// # Safety
    /// `addr` must be of [`allocate`](Driver::allocate), and nobody may use the memory any more.
    pub(crate) unsafe fn free(&self, addr: usize) -> Answer<()> {
        // SAFETY: the caller's promise.
        answer("cuMemFree_v2", unsafe { (self.f.cuMemFree_v2)(addr as u64) })
    }

    /// Free and total bytes of the current device.
    pub(crate) fn memory_info(&self) -> Answer<(usize, usize)> {
        let (mut free, mut total) = (0, 0);
        call!(self.cuMemGetInfo_v2(&mut free, &mut total))?;
        Ok((free, total))
    }

    /// Queues a copy.
    ///
    /// # Safety
    /// Both sides must stay allocated, and be left alone, until the stream is done; `stream` as in
    /// [`query`](Driver::query).
    pub(crate) unsafe fn copy(&self, to: usize, from: usize, len: usize, stream: usize) -> Answer<()> {
        // SAFETY: the caller's promise.
        answer("cuMemcpyAsync", unsafe { (self.f.cuMemcpyAsync)(to as u64, from as u64, len, stream) })
    }

    pub(crate) fn register_host(&self, addr: usize, len: usize) -> Answer<()> {
        call!(self.cuMemHostRegister_v2?(addr, len, HOST_PORTABLE))
    }

    pub(crate) fn unregister_host(&self, addr: usize) -> Answer<()> {
        call!(self.cuMemHostUnregister?(addr))
    }

    /// Pinned host memory.
    pub(crate) fn allocate_host(&self, len: usize) -> Answer<usize> {
        let mut addr = 0;
        call!(self.cuMemHostAlloc?(&mut addr, len, HOST_PORTABLE))?;
        Ok(addr)
    }

    /// # Safety
    /// `addr` must be of [`allocate_host`](Driver::allocate_host), and nobody may use the memory any more.
    pub(crate) unsafe fn free_host(&self, addr: usize) -> Answer<()> {
        let function = optional("cuMemFreeHost", self.f.cuMemFreeHost)?;
        // SAFETY: the caller's promise.
        answer("cuMemFreeHost", unsafe { function(addr) })
    }

    // Legacy IPC.

    pub(crate) fn ipc_handle(&self, addr: usize) -> Answer<IpcMemHandle> {
        let mut handle = IpcMemHandle([0; 64]);
        call!(self.cuIpcGetMemHandle?(&mut handle, addr as u64))?;
        Ok(handle)
    }

    pub(crate) fn open_ipc(&self, handle: IpcMemHandle) -> Answer<usize> {
        let mut addr = 0;
        call!(self.cuIpcOpenMemHandle_v2?(&mut addr, handle, IPC_LAZY_ENABLE_PEER_ACCESS))?;
        Ok(addr as usize)
    }

    /// # Safety
    /// `addr` must be of [`open_ipc`](Driver::open_ipc), and nobody may use the memory any more.
    pub(crate) unsafe fn close_ipc(&self, addr: usize) -> Answer<()> {
        let function = optional("cuIpcCloseMemHandle", self.f.cuIpcCloseMemHandle)?;
        // SAFETY: the caller's promise.
        answer("cuIpcCloseMemHandle", unsafe { function(addr as u64) })
    }

    // Virtual memory. A generic handle is counted: what retains or imports one also releases it.

    pub(crate) fn retain_handle(&self, addr: usize) -> Answer<u64> {
        let mut handle = 0;
        call!(self.cuMemRetainAllocationHandle?(&mut handle, addr))?;
        Ok(handle)
    }

    pub(crate) fn release_handle(&self, handle: u64) -> Answer<()> {
        call!(self.cuMemRelease?(handle))
    }

    pub(crate) fn export_handle(&self, handle: u64) -> Answer<OwnedFd> {
        let mut fd = -1;
        call!(self.cuMemExportToShareableHandle?(&mut fd, handle, HANDLE_TYPE_POSIX_FD, 0))?;
        if fd < 0 {
            return Err(Refusal { call: "cuMemExportToShareableHandle", code: Some(SUCCESS) });
        }
        // SAFETY: the driver made the descriptor for this call, and nobody else has it.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    pub(crate) fn import_handle(&self, fd: BorrowedFd<'_>) -> Answer<u64> {
        let mut handle = 0;
        // The header says pointer and means the descriptor itself.
        let fd = fd.as_raw_fd() as usize;
        call!(self.cuMemImportFromShareableHandle?(&mut handle, fd, HANDLE_TYPE_POSIX_FD))?;
        Ok(handle)
    }

    pub(crate) fn reserve(&self, len: usize) -> Answer<usize> {
        let mut addr = 0;
        call!(self.cuMemAddressReserve?(&mut addr, len, 0, 0, 0))?;
        Ok(addr as usize)
    }

    pub(crate) fn free_reserved(&self, addr: usize, len: usize) -> Answer<()> {
        call!(self.cuMemAddressFree?(addr as u64, len))
    }

    pub(crate) fn map(&self, addr: usize, len: usize, handle: u64) -> Answer<()> {
        call!(self.cuMemMap?(addr as u64, len, 0, handle, 0))
    }

    /// # Safety
    /// Nobody may use the memory any more.
    pub(crate) unsafe fn unmap(&self, addr: usize, len: usize) -> Answer<()> {
        let function = optional("cuMemUnmap", self.f.cuMemUnmap)?;
        // SAFETY: the caller's promise.
        answer("cuMemUnmap", unsafe { function(addr as u64, len) })
    }

    /// Lets device `ordinal` read and write what is mapped there.
    pub(crate) fn set_access(&self, addr: usize, len: usize, ordinal: i32) -> Answer<()> {
        let access =
            MemAccess { location_type: LOCATION_DEVICE, location_id: ordinal, flags: ACCESS_READ_WRITE };
        call!(self.cuMemSetAccess?(addr as u64, len, &access, 1))
    }
}

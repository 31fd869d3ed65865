//! ACL's calls as Rust functions: outputs become values, and a code other than 0 becomes a [`Refusal`].
//!
//! Nothing here decides anything. A call that reads or writes memory of the caller's, or takes a handle that ACL follows,
//! is `unsafe`.

use std::{
    ffi::{CStr, c_char, c_int, c_void},
    fmt,
    mem::{ManuallyDrop, MaybeUninit},
    process, ptr,
};

use hal::Kind;

use super::{bindings::*, library::Library};
use crate::error;

/// Addresses are 64 bits wide and share one space with the host's.
const _: () = assert!(usize::BITS == 64);

/// Bytes of an IPC key, with its closing 0.
pub(crate) const KEY_LEN: usize = ACL_RT_IPC_MEM_KEY_LEN as usize;

/// A call that did not succeed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Refusal {
    /// ACL's function.
    pub(crate) call: &'static str,
    /// Its answer, or `None` where this CANN does not have the function.
    pub(crate) code: Option<i32>,
    /// What ACL said right after, on the same thread.
    pub(crate) text: Option<String>,
}

/// What a call gives.
pub(crate) type Answer<T> = Result<T, Refusal>;

/// A context's handle, never 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Context(usize);

/// A device as most calls take it: an index into what `ASCEND_RT_VISIBLE_DEVICES` leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct UserId(pub(crate) i32);

/// A device before `ASCEND_RT_VISIBLE_DEVICES`, in this container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LogicId(i32);

/// What ACL says of a stream's capture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Capturing {
    No,
    Active,
    /// Spoiled by an earlier call, or a state that only a newer CANN knows.
    Spoiled,
}

/// Where ACL says that an address is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// Pinned by ACL, or, with older drivers, any host memory.
    Host,
    /// Not ACL's, so the host's.
    Unregistered,
    Device(UserId),
    /// Managed memory; on CANN 8.5 imported memory as well.
    Other(i32),
}

/// The key of an exported allocation: text that ends with 0.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct IpcKey([u8; KEY_LEN]);

impl IpcKey {
    /// Takes a peer's bytes, if they are of the form that ACL makes: printable, then nothing but 0.
    pub(crate) fn from_peer(bytes: &[u8]) -> Option<Self> {
        let key = <[u8; KEY_LEN]>::try_from(bytes).ok()?;
        let text = key.iter().position(|byte| *byte == 0).filter(|len| *len > 0)?;
        let (name, rest) = key.split_at(text);
        (name.iter().all(u8::is_ascii_graphic) && rest.iter().all(|byte| *byte == 0)).then_some(IpcKey(key))
    }

    pub(crate) fn bytes(&self) -> &[u8; KEY_LEN] {
        &self.0
    }

    fn as_ptr(&self) -> *const c_char {
        self.0.as_ptr().cast()
    }
}

impl fmt::Debug for IpcKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Whoever has the key has the memory.
        f.write_str("IpcKey")
    }
}

/// Which way a copy goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    Within,
    ToDevice,
    ToHost,
}

/// The library of one process. It stays loaded: ACL starts threads, which would be left without their code.
pub(crate) struct Driver {
    acl: ManuallyDrop<Acl>,
    /// The process that loaded it: a forked child must not use it.
    pid: u32,
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver").field("pid", &self.pid).finish_non_exhaustive()
    }
}

/// Why a synchronisation would not wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Unserved(pub(crate) u32);

/// Calls a function, if this CANN has it.
macro_rules! call {
    ($self:ident.$name:ident($($arg:expr),* $(,)?)) => {
        match &$self.acl.$name {
            Ok(function) => {
                // SAFETY: the outputs are locals, and handles and addresses are ACL's or what the caller vouches for.
                let code = unsafe { function($($arg),*) };
                $self.answer(stringify!($name), code)
            }
            Err(_) => Err(absent(stringify!($name))),
        }
    };
}

/// Declares what no device can be served without. Everything else gates a capability.
macro_rules! must_have {
    ($($name:ident)*) => {
        #[cfg(test)]
        pub(crate) const MUST_HAVE: &[&str] = &[$(stringify!($name)),*];

        fn missing(acl: &Acl) -> Vec<&'static str> {
            let mut missing = Vec::new();
            $(if acl.$name.is_err() {
                missing.push(stringify!($name));
            })*
            missing
        }
    };
}

// All of them older than 2023.
must_have! {
    aclInit
    aclGetRecentErrMsg
    aclrtGetSocName
    aclrtGetDeviceCount
    aclrtSetDevice
    aclrtGetCurrentContext
    aclrtSetCurrentContext
    aclrtCreateStreamWithConfig
    aclrtDestroyStream
    aclrtSynchronizeStream
    aclrtMalloc
    aclrtFree
    aclrtMallocHost
    aclrtFreeHost
    aclrtGetMemInfo
    aclrtMemcpyAsync
}

fn absent(call: &'static str) -> Refusal {
    Refusal { call, code: None, text: None }
}

fn pointer(addr: usize) -> *mut c_void {
    ptr::with_exposed_provenance_mut(addr)
}

fn address(pointer: *mut c_void) -> usize {
    pointer.expose_provenance()
}

/// The text behind a pointer that may be null, as one line: ACL's has several, and is part of a sentence here.
///
/// # Safety
/// It must be null or lead to text that ends with 0.
unsafe fn text(words: *const c_char) -> Option<String> {
    // SAFETY: the caller's promise.
    let words = (!words.is_null()).then(|| unsafe { CStr::from_ptr(words) })?;
    let words = words.to_string_lossy();
    let lines: Vec<_> = words.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    (!lines.is_empty()).then(|| lines.join("; "))
}

impl Driver {
    /// Looks every function up, and calls none. *Errors*: the names of all that must be there and are not.
    pub(crate) fn of(library: Library) -> Result<Self, Vec<&'static str>> {
        // SAFETY: the types are those of CANN's headers.
        let Ok(acl) = (unsafe { Acl::from_library(library.into_inner()) }) else {
            return Err(vec!["aclInit"]);
        };
        let acl = ManuallyDrop::new(acl);
        let missing = missing(&acl);
        if missing.is_empty() { Ok(Driver { acl, pid: process::id() }) } else { Err(missing) }
    }

    /// The process that loaded it.
    pub(crate) fn pid(&self) -> u32 {
        self.pid
    }

    pub(crate) fn has_keys(&self) -> bool {
        let acl = &self.acl;
        acl.aclrtIpcMemGetExportKey.is_ok()
            && acl.aclrtIpcMemImportByKey.is_ok()
            && acl.aclrtIpcMemClose.is_ok()
    }

    pub(crate) fn has_shareable_export(&self) -> bool {
        let acl = &self.acl;
        acl.aclrtMemGetAddressRange.is_ok()
            && acl.aclrtMemRetainAllocationHandle.is_ok()
            && acl.aclrtMemExportToShareableHandle.is_ok()
            && acl.aclrtFreePhysical.is_ok()
    }

    pub(crate) fn has_shareable_import(&self) -> bool {
        let acl = &self.acl;
        acl.aclrtMemImportFromShareableHandle.is_ok()
            && acl.aclrtFreePhysical.is_ok()
            && acl.aclrtReserveMemAddress.is_ok()
            && acl.aclrtReleaseMemAddress.is_ok()
            && acl.aclrtMapMem.is_ok()
            && acl.aclrtUnmapMem.is_ok()
    }

    pub(crate) fn has_host_registration(&self) -> bool {
        self.acl.aclrtHostRegister.is_ok() && self.acl.aclrtHostUnregister.is_ok()
    }

    fn answer(&self, call: &'static str, code: aclError) -> Answer<()> {
        if code == ACL_SUCCESS {
            return Ok(());
        }
        // At once and on this thread: ACL keeps the text per thread, and may have none.
        // SAFETY: the function takes nothing, and what it gives is null or text that lives until the next call.
        let text = self.acl.aclGetRecentErrMsg.as_ref().ok().and_then(|ask| unsafe { text(ask()) });
        Err(Refusal { call, code: Some(code), text })
    }

    // Process and devices. None of these needs a context.

    /// Initialises ACL, or finds it initialised.
    pub(crate) fn initialise(&self) -> Answer<()> {
        match call!(self.aclInit(ptr::null())) {
            // A repeat is counted and harmless. Without a configuration nothing of ours can be invalid: that code is for
            // a configuration that another one, the application's, precedes.
            Err(Refusal { code: Some(ACL_ERROR_REPEAT_INITIALIZE | ACL_ERROR_INVALID_PARAM), .. }) => Ok(()),
            started => started,
        }
    }

    /// The runtime's version as ACL counts it; see [`release`].
    pub(crate) fn version(&self) -> Answer<i32> {
        let mut version = 0;
        call!(self.aclsysGetVersionNum(c"runtime".as_ptr(), &mut version))?;
        Ok(version)
    }

    pub(crate) fn soc_name(&self) -> Option<String> {
        let ask = self.acl.aclrtGetSocName.as_ref().ok()?;
        // SAFETY: the function takes nothing, and what it gives is null or text that is never freed.
        unsafe { text(ask()) }
    }

    pub(crate) fn device_count(&self) -> Answer<u32> {
        let mut count = 0;
        call!(self.aclrtGetDeviceCount(&mut count))?;
        Ok(count)
    }

    pub(crate) fn logic_id(&self, UserId(user): UserId) -> Answer<LogicId> {
        let mut logic = 0;
        call!(self.aclrtGetLogicDevIdByUserDevId(user, &mut logic))?;
        Ok(LogicId(logic))
    }

    /// The device's place in the machine.
    pub(crate) fn physical_id(&self, LogicId(logic): LogicId) -> Answer<i32> {
        let mut physical = 0;
        call!(self.aclrtGetPhyDevIdByLogicDevId(logic, &mut physical))?;
        Ok(physical)
    }

    // Contexts.

    /// Makes the device's primary context current here, for good: there is no way back. Each call adds one to a count of
    /// the process's that only resetting would lower.
    pub(crate) fn set_device(&self, UserId(user): UserId) -> Answer<()> {
        call!(self.aclrtSetDevice(user))
    }

    /// The calling thread's context. Only this call tells: `aclrtGetDevice` answers with the default device of a
    /// configuration that has one, and binds nothing.
    pub(crate) fn current(&self) -> Answer<Option<Context>> {
        let mut context = ptr::null_mut();
        match call!(self.aclrtGetCurrentContext(&mut context)) {
            // CANN 8.5 answers with null, 9 with a code.
            Ok(()) => Ok((!context.is_null()).then(|| Context(address(context)))),
            Err(Refusal { code: Some(ACL_ERROR_RT_CONTEXT_NULL), .. }) => Ok(None),
            Err(refusal) => Err(refusal),
        }
    }

    pub(crate) fn set_current(&self, Context(context): Context) -> Answer<()> {
        call!(self.aclrtSetCurrentContext(pointer(context)))
    }

    // Streams, all with a context current.

    pub(crate) fn create_stream(&self) -> Answer<usize> {
        const FLAGS: u32 = (ACL_STREAM_FAST_LAUNCH | ACL_STREAM_FAST_SYNC) as u32;
        let mut stream = ptr::null_mut();
        call!(self.aclrtCreateStreamWithConfig(&mut stream, 0, FLAGS))?;
        Ok(address(stream))
    }

    /// # Safety
    /// `stream` must be one of [`create_stream`](Driver::create_stream), and never used again.
    pub(crate) unsafe fn destroy_stream(&self, stream: usize) -> Answer<()> {
        call!(self.aclrtDestroyStream(pointer(stream)))
    }

    /// # Safety
    /// `stream` must be 0 or a live handle.
    pub(crate) unsafe fn synchronize(&self, stream: usize) -> Answer<()> {
        call!(self.aclrtSynchronizeStream(pointer(stream)))
    }

    pub(crate) fn has_timeout(&self) -> bool {
        self.acl.aclrtSynchronizeStreamWithTimeout.is_ok()
    }

    /// Whether the stream is done within so many milliseconds, of which there is at least one.
    ///
    /// # Safety
    /// As [`synchronize`](Driver::synchronize).
    pub(crate) unsafe fn synchronize_within(&self, stream: usize, milliseconds: i32) -> Answer<bool> {
        match call!(self.aclrtSynchronizeStreamWithTimeout(pointer(stream), milliseconds.max(1))) {
            Ok(()) => Ok(true),
            Err(Refusal { code: Some(ACL_ERROR_RT_STREAM_SYNC_TIMEOUT), .. }) => Ok(false),
            Err(refusal) => Err(refusal),
        }
    }

    /// Whether the stream is done, or `None` where this CANN cannot be asked.
    ///
    /// # Safety
    /// As [`synchronize`](Driver::synchronize).
    pub(crate) unsafe fn query(&self, stream: usize) -> Answer<Option<bool>> {
        let mut status: c_int = ACL_STREAM_STATUS_NOT_READY;
        match call!(self.aclrtStreamQuery(pointer(stream), &mut status)) {
            Ok(()) => Ok(Some(status == ACL_STREAM_STATUS_COMPLETE)),
            Err(Refusal { code: None, .. }) => Ok(None),
            Err(refusal) => Err(refusal),
        }
    }

    /// Refuses a stream that ACL says it has waited for at once, whatever is queued. A CANN without the question says
    /// nothing.
    ///
    /// # Safety
    /// As [`synchronize`](Driver::synchronize).
    pub(crate) unsafe fn is_waited_for(&self, stream: usize) -> Result<(), Unserved> {
        const NEVER: u32 =
            (ACL_STREAM_PERSISTENT | ACL_STREAM_CPU_SCHEDULE | ACL_STREAM_DEVICE_USE_ONLY) as u32;
        let mut flags = 0;
        match call!(self.aclrtStreamGetFlags(pointer(stream), &mut flags)) {
            Ok(()) if flags & NEVER != 0 => Err(Unserved(flags)),
            _ => Ok(()),
        }
    }

    /// Whether the stream is being captured. A CANN without the question has no capture that could be known, and a device
    /// on which it is not supported has none.
    ///
    /// # Safety
    /// As [`synchronize`](Driver::synchronize).
    pub(crate) unsafe fn capturing(&self, stream: usize) -> Answer<Capturing> {
        let (mut status, mut model) = (ACL_MODEL_RI_CAPTURE_STATUS_NONE, ptr::null_mut());
        match call!(self.aclmdlRICaptureGetInfo(pointer(stream), &mut status, &mut model)) {
            Ok(()) => Ok(match status {
                ACL_MODEL_RI_CAPTURE_STATUS_NONE => Capturing::No,
                ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE => Capturing::Active,
                _ => Capturing::Spoiled,
            }),
            Err(refusal) if refusal.code.is_none_or(|code| error::kind(code) == Kind::Unsupported) => {
                Ok(Capturing::No)
            }
            Err(refusal) => Err(refusal),
        }
    }

    /// Makes the calling thread's calls harmless to captures of others. The answer is for
    /// [`restore_capture_mode`](Driver::restore_capture_mode).
    pub(crate) fn relax_capture_mode(&self) -> Answer<c_int> {
        let mut mode = ACL_MODEL_RI_CAPTURE_MODE_RELAXED;
        call!(self.aclmdlRICaptureThreadExchangeMode(&mut mode))?;
        Ok(mode)
    }

    pub(crate) fn restore_capture_mode(&self, mut mode: c_int) -> Answer<()> {
        call!(self.aclmdlRICaptureThreadExchangeMode(&mut mode))
    }

    // Memory.

    pub(crate) fn locate(&self, addr: usize) -> Answer<Place> {
        let mut attributes = MaybeUninit::<aclrtPtrAttributes>::zeroed();
        call!(self.aclrtPointerGetAttributes(pointer(addr), attributes.as_mut_ptr()))?;
        // SAFETY: zeroed before, and integers all of it.
        let aclrtMemLocation { id, type_ } = unsafe { attributes.assume_init() }.location;
        Ok(match type_ {
            ACL_MEM_LOCATION_TYPE_HOST => Place::Host,
            ACL_MEM_LOCATION_TYPE_UNREGISTERED => Place::Unregistered,
            ACL_MEM_LOCATION_TYPE_DEVICE => Place::Device(UserId(id.cast_signed())),
            other => Place::Other(other),
        })
    }

    /// The allocation or the mapping around an address: its first byte and its length.
    pub(crate) fn address_range(&self, addr: usize) -> Answer<(usize, usize)> {
        let (mut base, mut len) = (ptr::null_mut(), 0);
        call!(self.aclrtMemGetAddressRange(pointer(addr), &mut base, &mut len))?;
        Ok((address(base), len))
    }

    pub(crate) fn allocate(&self, len: usize) -> Answer<usize> {
        let mut addr = ptr::null_mut();
        call!(self.aclrtMalloc(&mut addr, len, ACL_MEM_MALLOC_HUGE_FIRST))?;
        Ok(address(addr))
    }

    /// # Safety
    /// `addr` must be of [`allocate`](Driver::allocate), and nobody may use the memory any more.
    pub(crate) unsafe fn free(&self, addr: usize) -> Answer<()> {
        call!(self.aclrtFree(pointer(addr)))
    }

    /// Free and total bytes of the current device.
    pub(crate) fn memory_info(&self) -> Answer<(usize, usize)> {
        let (mut free, mut total) = (0, 0);
        call!(self.aclrtGetMemInfo(ACL_HBM_MEM, &mut free, &mut total))?;
        Ok((free, total))
    }

    /// Pinned host memory.
    pub(crate) fn allocate_host(&self, len: usize) -> Answer<usize> {
        let mut addr = ptr::null_mut();
        call!(self.aclrtMallocHost(&mut addr, len))?;
        Ok(address(addr))
    }

    /// # Safety
    /// `addr` must be of [`allocate_host`](Driver::allocate_host), and nobody may use the memory any more.
    pub(crate) unsafe fn free_host(&self, addr: usize) -> Answer<()> {
        call!(self.aclrtFreeHost(pointer(addr)))
    }

    /// Queues a copy.
    ///
    /// # Safety
    /// Both sides must stay allocated, and be left alone, until the stream is done; `stream` as in
    /// [`synchronize`](Driver::synchronize).
    pub(crate) unsafe fn copy(
        &self,
        way: Way,
        to: usize,
        from: usize,
        len: usize,
        stream: usize,
    ) -> Answer<()> {
        let kind = match way {
            Way::Within => ACL_MEMCPY_DEVICE_TO_DEVICE,
            Way::ToDevice => ACL_MEMCPY_HOST_TO_DEVICE,
            Way::ToHost => ACL_MEMCPY_DEVICE_TO_HOST,
        };
        call!(self.aclrtMemcpyAsync(pointer(to), len, pointer(from), len, kind, pointer(stream)))
    }

    /// Makes host memory reachable for the device. The address that it gets there is good for nothing here: copies take
    /// the host's.
    pub(crate) fn register_host(&self, addr: usize, len: usize) -> Answer<()> {
        let mut there = ptr::null_mut();
        call!(self.aclrtHostRegister(pointer(addr), len as u64, ACL_HOST_REGISTER_MAPPED, &mut there))
    }

    pub(crate) fn unregister_host(&self, addr: usize) -> Answer<()> {
        call!(self.aclrtHostUnregister(pointer(addr)))
    }

    // Sharing by key.

    pub(crate) fn export_key(&self, addr: usize, len: usize) -> Answer<IpcKey> {
        const FLAGS: u64 = ACL_RT_IPC_MEM_EXPORT_FLAG_DISABLE_PID_VALIDATION as u64;
        let mut key = [0; KEY_LEN];
        call!(self.aclrtIpcMemGetExportKey(pointer(addr), len, key.as_mut_ptr().cast(), KEY_LEN, FLAGS))?;
        key[KEY_LEN - 1] = 0;
        Ok(IpcKey(key))
    }

    pub(crate) fn import_key(&self, key: &IpcKey) -> Answer<usize> {
        const FLAGS: u64 = ACL_RT_IPC_MEM_IMPORT_FLAG_ENABLE_PEER_ACCESS as u64;
        let mut addr = ptr::null_mut();
        call!(self.aclrtIpcMemImportByKey(&mut addr, key.as_ptr(), FLAGS))?;
        Ok(address(addr))
    }

    /// Ends one import of the key, or, in the process that exported it, the export.
    ///
    /// # Safety
    /// Nobody may use the memory by this import any more; an export must have been closed by all who imported it.
    pub(crate) unsafe fn close_key(&self, key: &IpcKey) -> Answer<()> {
        call!(self.aclrtIpcMemClose(key.as_ptr()))
    }

    // Virtual memory. A physical handle is counted: what retains or imports one also releases it.

    pub(crate) fn retain_physical(&self, addr: usize) -> Answer<usize> {
        let mut handle = ptr::null_mut();
        call!(self.aclrtMemRetainAllocationHandle(pointer(addr), &mut handle))?;
        Ok(address(handle))
    }

    pub(crate) fn release_physical(&self, handle: usize) -> Answer<()> {
        call!(self.aclrtFreePhysical(pointer(handle)))
    }

    pub(crate) fn export_physical(&self, handle: usize) -> Answer<u64> {
        const FLAGS: u64 = ACL_RT_VMM_EXPORT_FLAG_DISABLE_PID_VALIDATION as u64;
        let mut shareable = 0;
        let handle = pointer(handle);
        call!(self.aclrtMemExportToShareableHandle(handle, ACL_MEM_HANDLE_TYPE_NONE, FLAGS, &mut shareable))?;
        Ok(shareable)
    }

    pub(crate) fn import_physical(&self, shareable: u64, UserId(user): UserId) -> Answer<usize> {
        let mut handle = ptr::null_mut();
        call!(self.aclrtMemImportFromShareableHandle(shareable, user, &mut handle))?;
        Ok(address(handle))
    }

    pub(crate) fn reserve(&self, len: usize) -> Answer<usize> {
        let mut addr = ptr::null_mut();
        call!(self.aclrtReserveMemAddress(
            &mut addr,
            len,
            0,
            ptr::null_mut(),
            ACL_RESERVE_HUGE_PAGES as u64
        ))?;
        Ok(address(addr))
    }

    pub(crate) fn release_reserved(&self, addr: usize) -> Answer<()> {
        call!(self.aclrtReleaseMemAddress(pointer(addr)))
    }

    pub(crate) fn map(&self, addr: usize, len: usize, handle: usize) -> Answer<()> {
        call!(self.aclrtMapMem(pointer(addr), len, 0, pointer(handle), 0))
    }

    /// # Safety
    /// Nobody may use the memory any more.
    pub(crate) unsafe fn unmap(&self, addr: usize) -> Answer<()> {
        call!(self.aclrtUnmapMem(pointer(addr)))
    }

    /// Lets the device read and write what is mapped there. Where this CANN lacks the call, mapping alone does.
    pub(crate) fn set_access(&self, addr: usize, len: usize, UserId(user): UserId) -> Answer<()> {
        let location = aclrtMemLocation { id: user.cast_unsigned(), type_: ACL_MEM_LOCATION_TYPE_DEVICE };
        let flags = ACL_RT_MEM_ACCESS_FLAGS_READWRITE;
        let mut access = aclrtMemAccessDesc { flags, location, reserved: [0; 12] };
        match call!(self.aclrtMemSetAccess(pointer(addr), len, &mut access, 1)) {
            Err(Refusal { code: None, .. }) => Ok(()),
            answer => answer,
        }
    }
}

/// `80501000` is `8.5.1`.
pub(crate) fn release(version: i32) -> String {
    format!("{}.{}.{}", version / 10_000_000, version / 100_000 % 100, version / 1000 % 100)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_reads_as_its_release() {
        assert_eq!((release(90000000), release(80501000)), ("9.0.0".into(), "8.5.1".into()));
    }

    #[test]
    fn a_peers_key_is_text_or_nothing() {
        let mut key = [0; KEY_LEN];
        assert!(IpcKey::from_peer(&key).is_none(), "empty");
        key[..4].copy_from_slice(b"01ab");
        assert_eq!(IpcKey::from_peer(&key).unwrap().bytes(), &key);
        assert!(IpcKey::from_peer(&key[..64]).is_none(), "short");
        key[10] = b'x';
        assert!(IpcKey::from_peer(&key).is_none(), "more behind the end");
        assert!(IpcKey::from_peer(&[b'a'; KEY_LEN]).is_none(), "no end");
        key[1] = b'\n';
        assert!(IpcKey::from_peer(&key).is_none(), "not printable");
    }
}

// Made by bindgen from acl.h; see tests/bindings.rs. Not to be edited.

pub const ACL_SUCCESS: i32 = 0;
pub const ACL_ERROR_INVALID_PARAM: i32 = 100000;
pub const ACL_ERROR_REPEAT_INITIALIZE: i32 = 100002;
pub const ACL_ERROR_RT_PARAM_INVALID: i32 = 107000;
pub const ACL_ERROR_RT_CONTEXT_NULL: i32 = 107002;
pub const ACL_ERROR_RT_FEATURE_NOT_SUPPORT: i32 = 207000;
pub const ACL_ERROR_RT_STREAM_SYNC_TIMEOUT: i32 = 507046;
pub const ACL_ERROR_RT_HOST_MEMORY_ALREADY_REGISTERED: i32 = 507910;
pub const ACL_HBM_MEM: i32 = 1;
pub const ACL_MEM_MALLOC_HUGE_FIRST: i32 = 0;
pub const ACL_MEMCPY_HOST_TO_DEVICE: i32 = 1;
pub const ACL_MEMCPY_DEVICE_TO_HOST: i32 = 2;
pub const ACL_MEMCPY_DEVICE_TO_DEVICE: i32 = 3;
pub const ACL_STREAM_FAST_LAUNCH: i32 = 1;
pub const ACL_STREAM_FAST_SYNC: i32 = 2;
pub const ACL_STREAM_PERSISTENT: i32 = 4;
pub const ACL_STREAM_CPU_SCHEDULE: i32 = 16;
pub const ACL_STREAM_DEVICE_USE_ONLY: i32 = 32;
pub const ACL_STREAM_STATUS_COMPLETE: i32 = 0;
pub const ACL_STREAM_STATUS_NOT_READY: i32 = 1;
pub const ACL_MODEL_RI_CAPTURE_STATUS_NONE: i32 = 0;
pub const ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE: i32 = 1;
pub const ACL_MODEL_RI_CAPTURE_MODE_RELAXED: i32 = 2;
pub const ACL_MEM_LOCATION_TYPE_HOST: i32 = 0;
pub const ACL_MEM_LOCATION_TYPE_DEVICE: i32 = 1;
pub const ACL_MEM_LOCATION_TYPE_UNREGISTERED: i32 = 2;
pub const ACL_HOST_REGISTER_MAPPED: i32 = 0;
pub const ACL_RT_IPC_MEM_KEY_LEN: i32 = 65;
pub const ACL_RT_IPC_MEM_EXPORT_FLAG_DISABLE_PID_VALIDATION: i32 = 1;
pub const ACL_RT_IPC_MEM_IMPORT_FLAG_ENABLE_PEER_ACCESS: i32 = 1;
pub const ACL_RT_VMM_EXPORT_FLAG_DISABLE_PID_VALIDATION: i32 = 1;
pub const ACL_MEM_HANDLE_TYPE_NONE: i32 = 0;
pub const ACL_RESERVE_HUGE_PAGES: i32 = 1;
pub const ACL_RT_MEM_ACCESS_FLAGS_READWRITE: i32 = 3;
pub type aclError = ::std::os::raw::c_int;
pub type aclrtContext = *mut ::std::os::raw::c_void;
pub type aclrtStream = *mut ::std::os::raw::c_void;
pub type aclrtDrvMemHandle = *mut ::std::os::raw::c_void;
pub type aclmdlRI = *mut ::std::os::raw::c_void;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct aclrtMemLocation {
    pub id: u32,
    pub type_: i32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of aclrtMemLocation"][::std::mem::size_of::<aclrtMemLocation>() - 8usize];
    [
        "Alignment of aclrtMemLocation",
    ][::std::mem::align_of::<aclrtMemLocation>() - 4usize];
    [
        "Offset of field: aclrtMemLocation::id",
    ][::std::mem::offset_of!(aclrtMemLocation, id) - 0usize];
    [
        "Offset of field: aclrtMemLocation::type_",
    ][::std::mem::offset_of!(aclrtMemLocation, type_) - 4usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct aclrtPtrAttributes {
    pub location: aclrtMemLocation,
    pub pageSize: u32,
    pub reserved: [u32; 4usize],
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    [
        "Size of aclrtPtrAttributes",
    ][::std::mem::size_of::<aclrtPtrAttributes>() - 28usize];
    [
        "Alignment of aclrtPtrAttributes",
    ][::std::mem::align_of::<aclrtPtrAttributes>() - 4usize];
    [
        "Offset of field: aclrtPtrAttributes::location",
    ][::std::mem::offset_of!(aclrtPtrAttributes, location) - 0usize];
    [
        "Offset of field: aclrtPtrAttributes::pageSize",
    ][::std::mem::offset_of!(aclrtPtrAttributes, pageSize) - 8usize];
    [
        "Offset of field: aclrtPtrAttributes::reserved",
    ][::std::mem::offset_of!(aclrtPtrAttributes, reserved) - 12usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct aclrtMemAccessDesc {
    pub flags: i32,
    pub location: aclrtMemLocation,
    pub reserved: [::std::os::raw::c_uchar; 12usize],
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    [
        "Size of aclrtMemAccessDesc",
    ][::std::mem::size_of::<aclrtMemAccessDesc>() - 24usize];
    [
        "Alignment of aclrtMemAccessDesc",
    ][::std::mem::align_of::<aclrtMemAccessDesc>() - 4usize];
    [
        "Offset of field: aclrtMemAccessDesc::flags",
    ][::std::mem::offset_of!(aclrtMemAccessDesc, flags) - 0usize];
    [
        "Offset of field: aclrtMemAccessDesc::location",
    ][::std::mem::offset_of!(aclrtMemAccessDesc, location) - 4usize];
    [
        "Offset of field: aclrtMemAccessDesc::reserved",
    ][::std::mem::offset_of!(aclrtMemAccessDesc, reserved) - 12usize];
};
pub struct Acl {
    __library: ::libloading::Library,
    pub aclInit: Result<
        unsafe extern "C" fn(configPath: *const ::std::os::raw::c_char) -> aclError,
        ::libloading::Error,
    >,
    pub aclGetRecentErrMsg: Result<
        unsafe extern "C" fn() -> *const ::std::os::raw::c_char,
        ::libloading::Error,
    >,
    pub aclsysGetVersionNum: Result<
        unsafe extern "C" fn(
            package: *const ::std::os::raw::c_char,
            version: *mut i32,
        ) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtGetSocName: Result<
        unsafe extern "C" fn() -> *const ::std::os::raw::c_char,
        ::libloading::Error,
    >,
    pub aclrtGetDeviceCount: Result<
        unsafe extern "C" fn(count: *mut u32) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtGetLogicDevIdByUserDevId: Result<
        unsafe extern "C" fn(user: i32, logic: *mut i32) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtGetPhyDevIdByLogicDevId: Result<
        unsafe extern "C" fn(logic: i32, physical: *mut i32) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtSetDevice: Result<
        unsafe extern "C" fn(user: i32) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtGetCurrentContext: Result<
        unsafe extern "C" fn(context: *mut aclrtContext) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtSetCurrentContext: Result<
        unsafe extern "C" fn(context: aclrtContext) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtCreateStreamWithConfig: Result<
        unsafe extern "C" fn(
            stream: *mut aclrtStream,
            priority: u32,
            flags: u32,
        ) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtDestroyStream: Result<
        unsafe extern "C" fn(stream: aclrtStream) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtSynchronizeStream: Result<
        unsafe extern "C" fn(stream: aclrtStream) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtSynchronizeStreamWithTimeout: Result<
        unsafe extern "C" fn(stream: aclrtStream, milliseconds: i32) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtStreamQuery: Result<
        unsafe extern "C" fn(
            stream: aclrtStream,
            status: *mut ::std::os::raw::c_int,
        ) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtStreamGetFlags: Result<
        unsafe extern "C" fn(stream: aclrtStream, flags: *mut u32) -> aclError,
        ::libloading::Error,
    >,
    pub aclmdlRICaptureGetInfo: Result<
        unsafe extern "C" fn(
            stream: aclrtStream,
            status: *mut ::std::os::raw::c_int,
            model: *mut aclmdlRI,
        ) -> aclError,
        ::libloading::Error,
    >,
    pub aclmdlRICaptureThreadExchangeMode: Result<
        unsafe extern "C" fn(mode: *mut ::std::os::raw::c_int) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtMalloc: Result<
        unsafe extern "C" fn(
            device: *mut *mut ::std::os::raw::c_void,
            size: usize,
            policy: ::std::os::raw::c_int,
        ) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtFree: Result<
        unsafe extern "C" fn(device: *mut ::std::os::raw::c_void) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtMallocHost: Result<
        unsafe extern "C" fn(
            host: *mut *mut ::std::os::raw::c_void,
            size: usize,
        ) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtFreeHost: Result<
        unsafe extern "C" fn(host: *mut ::std::os::raw::c_void) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtGetMemInfo: Result<
        unsafe extern "C" fn(
            attribute: ::std::os::raw::c_int,
            free: *mut usize,
            total: *mut usize,
        ) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtMemcpyAsync: Result<
        unsafe extern "C" fn(
            to: *mut ::std::os::raw::c_void,
            room: usize,
            from: *const ::std::os::raw::c_void,
            count: usize,
            kind: ::std::os::raw::c_int,
            stream: aclrtStream,
        ) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtPointerGetAttributes: Result<
        unsafe extern "C" fn(
            pointer: *const ::std::os::raw::c_void,
            attributes: *mut aclrtPtrAttributes,
        ) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtMemGetAddressRange: Result<
        unsafe extern "C" fn(
            pointer: *mut ::std::os::raw::c_void,
            base: *mut *mut ::std::os::raw::c_void,
            size: *mut usize,
        ) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtHostRegister: Result<
        unsafe extern "C" fn(
            host: *mut ::std::os::raw::c_void,
            size: u64,
            type_: ::std::os::raw::c_int,
            device: *mut *mut ::std::os::raw::c_void,
        ) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtHostUnregister: Result<
        unsafe extern "C" fn(host: *mut ::std::os::raw::c_void) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtIpcMemGetExportKey: Result<
        unsafe extern "C" fn(
            device: *mut ::std::os::raw::c_void,
            size: usize,
            key: *mut ::std::os::raw::c_char,
            length: usize,
            flags: u64,
        ) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtIpcMemImportByKey: Result<
        unsafe extern "C" fn(
            device: *mut *mut ::std::os::raw::c_void,
            key: *const ::std::os::raw::c_char,
            flags: u64,
        ) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtIpcMemClose: Result<
        unsafe extern "C" fn(key: *const ::std::os::raw::c_char) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtMemRetainAllocationHandle: Result<
        unsafe extern "C" fn(
            address: *mut ::std::os::raw::c_void,
            handle: *mut aclrtDrvMemHandle,
        ) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtFreePhysical: Result<
        unsafe extern "C" fn(handle: aclrtDrvMemHandle) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtMemExportToShareableHandle: Result<
        unsafe extern "C" fn(
            handle: aclrtDrvMemHandle,
            type_: ::std::os::raw::c_int,
            flags: u64,
            shareable: *mut u64,
        ) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtMemImportFromShareableHandle: Result<
        unsafe extern "C" fn(
            shareable: u64,
            user: i32,
            handle: *mut aclrtDrvMemHandle,
        ) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtReserveMemAddress: Result<
        unsafe extern "C" fn(
            address: *mut *mut ::std::os::raw::c_void,
            size: usize,
            alignment: usize,
            expected: *mut ::std::os::raw::c_void,
            flags: u64,
        ) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtReleaseMemAddress: Result<
        unsafe extern "C" fn(address: *mut ::std::os::raw::c_void) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtMapMem: Result<
        unsafe extern "C" fn(
            address: *mut ::std::os::raw::c_void,
            size: usize,
            offset: usize,
            handle: aclrtDrvMemHandle,
            flags: u64,
        ) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtUnmapMem: Result<
        unsafe extern "C" fn(address: *mut ::std::os::raw::c_void) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtMemSetAccess: Result<
        unsafe extern "C" fn(
            address: *mut ::std::os::raw::c_void,
            size: usize,
            access: *mut aclrtMemAccessDesc,
            count: usize,
        ) -> aclError,
        ::libloading::Error,
    >,
}
impl Acl {
    pub unsafe fn new<P>(path: P) -> Result<Self, ::libloading::Error>
    where
        P: AsRef<::std::ffi::OsStr>,
    {
        let path = path.as_ref();
        let library = unsafe { ::libloading::Library::new(path) }?;
        unsafe { Self::from_library(library) }
    }
    pub unsafe fn from_library<L>(library: L) -> Result<Self, ::libloading::Error>
    where
        L: Into<::libloading::Library>,
    {
        let __library = library.into();
        let aclInit = unsafe { __library.get(b"aclInit\0") }.map(|sym| *sym);
        let aclGetRecentErrMsg = unsafe { __library.get(b"aclGetRecentErrMsg\0") }
            .map(|sym| *sym);
        let aclsysGetVersionNum = unsafe { __library.get(b"aclsysGetVersionNum\0") }
            .map(|sym| *sym);
        let aclrtGetSocName = unsafe { __library.get(b"aclrtGetSocName\0") }
            .map(|sym| *sym);
        let aclrtGetDeviceCount = unsafe { __library.get(b"aclrtGetDeviceCount\0") }
            .map(|sym| *sym);
        let aclrtGetLogicDevIdByUserDevId = unsafe {
            __library.get(b"aclrtGetLogicDevIdByUserDevId\0")
        }
            .map(|sym| *sym);
        let aclrtGetPhyDevIdByLogicDevId = unsafe {
            __library.get(b"aclrtGetPhyDevIdByLogicDevId\0")
        }
            .map(|sym| *sym);
        let aclrtSetDevice = unsafe { __library.get(b"aclrtSetDevice\0") }
            .map(|sym| *sym);
        let aclrtGetCurrentContext = unsafe {
            __library.get(b"aclrtGetCurrentContext\0")
        }
            .map(|sym| *sym);
        let aclrtSetCurrentContext = unsafe {
            __library.get(b"aclrtSetCurrentContext\0")
        }
            .map(|sym| *sym);
        let aclrtCreateStreamWithConfig = unsafe {
            __library.get(b"aclrtCreateStreamWithConfig\0")
        }
            .map(|sym| *sym);
        let aclrtDestroyStream = unsafe { __library.get(b"aclrtDestroyStream\0") }
            .map(|sym| *sym);
        let aclrtSynchronizeStream = unsafe {
            __library.get(b"aclrtSynchronizeStream\0")
        }
            .map(|sym| *sym);
        let aclrtSynchronizeStreamWithTimeout = unsafe {
            __library.get(b"aclrtSynchronizeStreamWithTimeout\0")
        }
            .map(|sym| *sym);
        let aclrtStreamQuery = unsafe { __library.get(b"aclrtStreamQuery\0") }
            .map(|sym| *sym);
        let aclrtStreamGetFlags = unsafe { __library.get(b"aclrtStreamGetFlags\0") }
            .map(|sym| *sym);
        let aclmdlRICaptureGetInfo = unsafe {
            __library.get(b"aclmdlRICaptureGetInfo\0")
        }
            .map(|sym| *sym);
        let aclmdlRICaptureThreadExchangeMode = unsafe {
            __library.get(b"aclmdlRICaptureThreadExchangeMode\0")
        }
            .map(|sym| *sym);
        let aclrtMalloc = unsafe { __library.get(b"aclrtMalloc\0") }.map(|sym| *sym);
        let aclrtFree = unsafe { __library.get(b"aclrtFree\0") }.map(|sym| *sym);
        let aclrtMallocHost = unsafe { __library.get(b"aclrtMallocHost\0") }
            .map(|sym| *sym);
        let aclrtFreeHost = unsafe { __library.get(b"aclrtFreeHost\0") }.map(|sym| *sym);
        let aclrtGetMemInfo = unsafe { __library.get(b"aclrtGetMemInfo\0") }
            .map(|sym| *sym);
        let aclrtMemcpyAsync = unsafe { __library.get(b"aclrtMemcpyAsync\0") }
            .map(|sym| *sym);
        let aclrtPointerGetAttributes = unsafe {
            __library.get(b"aclrtPointerGetAttributes\0")
        }
            .map(|sym| *sym);
        let aclrtMemGetAddressRange = unsafe {
            __library.get(b"aclrtMemGetAddressRange\0")
        }
            .map(|sym| *sym);
        let aclrtHostRegister = unsafe { __library.get(b"aclrtHostRegister\0") }
            .map(|sym| *sym);
        let aclrtHostUnregister = unsafe { __library.get(b"aclrtHostUnregister\0") }
            .map(|sym| *sym);
        let aclrtIpcMemGetExportKey = unsafe {
            __library.get(b"aclrtIpcMemGetExportKey\0")
        }
            .map(|sym| *sym);
        let aclrtIpcMemImportByKey = unsafe {
            __library.get(b"aclrtIpcMemImportByKey\0")
        }
            .map(|sym| *sym);
        let aclrtIpcMemClose = unsafe { __library.get(b"aclrtIpcMemClose\0") }
            .map(|sym| *sym);
        let aclrtMemRetainAllocationHandle = unsafe {
            __library.get(b"aclrtMemRetainAllocationHandle\0")
        }
            .map(|sym| *sym);
        let aclrtFreePhysical = unsafe { __library.get(b"aclrtFreePhysical\0") }
            .map(|sym| *sym);
        let aclrtMemExportToShareableHandle = unsafe {
            __library.get(b"aclrtMemExportToShareableHandle\0")
        }
            .map(|sym| *sym);
        let aclrtMemImportFromShareableHandle = unsafe {
            __library.get(b"aclrtMemImportFromShareableHandle\0")
        }
            .map(|sym| *sym);
        let aclrtReserveMemAddress = unsafe {
            __library.get(b"aclrtReserveMemAddress\0")
        }
            .map(|sym| *sym);
        let aclrtReleaseMemAddress = unsafe {
            __library.get(b"aclrtReleaseMemAddress\0")
        }
            .map(|sym| *sym);
        let aclrtMapMem = unsafe { __library.get(b"aclrtMapMem\0") }.map(|sym| *sym);
        let aclrtUnmapMem = unsafe { __library.get(b"aclrtUnmapMem\0") }.map(|sym| *sym);
        let aclrtMemSetAccess = unsafe { __library.get(b"aclrtMemSetAccess\0") }
            .map(|sym| *sym);
        Ok(Acl {
            __library,
            aclInit,
            aclGetRecentErrMsg,
            aclsysGetVersionNum,
            aclrtGetSocName,
            aclrtGetDeviceCount,
            aclrtGetLogicDevIdByUserDevId,
            aclrtGetPhyDevIdByLogicDevId,
            aclrtSetDevice,
            aclrtGetCurrentContext,
            aclrtSetCurrentContext,
            aclrtCreateStreamWithConfig,
            aclrtDestroyStream,
            aclrtSynchronizeStream,
            aclrtSynchronizeStreamWithTimeout,
            aclrtStreamQuery,
            aclrtStreamGetFlags,
            aclmdlRICaptureGetInfo,
            aclmdlRICaptureThreadExchangeMode,
            aclrtMalloc,
            aclrtFree,
            aclrtMallocHost,
            aclrtFreeHost,
            aclrtGetMemInfo,
            aclrtMemcpyAsync,
            aclrtPointerGetAttributes,
            aclrtMemGetAddressRange,
            aclrtHostRegister,
            aclrtHostUnregister,
            aclrtIpcMemGetExportKey,
            aclrtIpcMemImportByKey,
            aclrtIpcMemClose,
            aclrtMemRetainAllocationHandle,
            aclrtFreePhysical,
            aclrtMemExportToShareableHandle,
            aclrtMemImportFromShareableHandle,
            aclrtReserveMemAddress,
            aclrtReleaseMemAddress,
            aclrtMapMem,
            aclrtUnmapMem,
            aclrtMemSetAccess,
        })
    }
    pub unsafe fn aclInit(&self, configPath: *const ::std::os::raw::c_char) -> aclError {
        unsafe {
            (self.aclInit.as_ref().expect("Expected function, got error."))(configPath)
        }
    }
    pub unsafe fn aclGetRecentErrMsg(&self) -> *const ::std::os::raw::c_char {
        unsafe {
            (self.aclGetRecentErrMsg.as_ref().expect("Expected function, got error."))()
        }
    }
    pub unsafe fn aclsysGetVersionNum(
        &self,
        package: *const ::std::os::raw::c_char,
        version: *mut i32,
    ) -> aclError {
        unsafe {
            (self
                .aclsysGetVersionNum
                .as_ref()
                .expect("Expected function, got error."))(package, version)
        }
    }
    pub unsafe fn aclrtGetSocName(&self) -> *const ::std::os::raw::c_char {
        unsafe {
            (self.aclrtGetSocName.as_ref().expect("Expected function, got error."))()
        }
    }
    pub unsafe fn aclrtGetDeviceCount(&self, count: *mut u32) -> aclError {
        unsafe {
            (self
                .aclrtGetDeviceCount
                .as_ref()
                .expect("Expected function, got error."))(count)
        }
    }
    pub unsafe fn aclrtGetLogicDevIdByUserDevId(
        &self,
        user: i32,
        logic: *mut i32,
    ) -> aclError {
        unsafe {
            (self
                .aclrtGetLogicDevIdByUserDevId
                .as_ref()
                .expect("Expected function, got error."))(user, logic)
        }
    }
    pub unsafe fn aclrtGetPhyDevIdByLogicDevId(
        &self,
        logic: i32,
        physical: *mut i32,
    ) -> aclError {
        unsafe {
            (self
                .aclrtGetPhyDevIdByLogicDevId
                .as_ref()
                .expect("Expected function, got error."))(logic, physical)
        }
    }
    pub unsafe fn aclrtSetDevice(&self, user: i32) -> aclError {
        unsafe {
            (self.aclrtSetDevice.as_ref().expect("Expected function, got error."))(user)
        }
    }
    pub unsafe fn aclrtGetCurrentContext(&self, context: *mut aclrtContext) -> aclError {
        unsafe {
            (self
                .aclrtGetCurrentContext
                .as_ref()
                .expect("Expected function, got error."))(context)
        }
    }
    pub unsafe fn aclrtSetCurrentContext(&self, context: aclrtContext) -> aclError {
        unsafe {
            (self
                .aclrtSetCurrentContext
                .as_ref()
                .expect("Expected function, got error."))(context)
        }
    }
    pub unsafe fn aclrtCreateStreamWithConfig(
        &self,
        stream: *mut aclrtStream,
        priority: u32,
        flags: u32,
    ) -> aclError {
        unsafe {
            (self
                .aclrtCreateStreamWithConfig
                .as_ref()
                .expect("Expected function, got error."))(stream, priority, flags)
        }
    }
    pub unsafe fn aclrtDestroyStream(&self, stream: aclrtStream) -> aclError {
        unsafe {
            (self
                .aclrtDestroyStream
                .as_ref()
                .expect("Expected function, got error."))(stream)
        }
    }
    pub unsafe fn aclrtSynchronizeStream(&self, stream: aclrtStream) -> aclError {
        unsafe {
            (self
                .aclrtSynchronizeStream
                .as_ref()
                .expect("Expected function, got error."))(stream)
        }
    }
    pub unsafe fn aclrtSynchronizeStreamWithTimeout(
        &self,
        stream: aclrtStream,
        milliseconds: i32,
    ) -> aclError {
        unsafe {
            (self
                .aclrtSynchronizeStreamWithTimeout
                .as_ref()
                .expect("Expected function, got error."))(stream, milliseconds)
        }
    }
    pub unsafe fn aclrtStreamQuery(
        &self,
        stream: aclrtStream,
        status: *mut ::std::os::raw::c_int,
    ) -> aclError {
        unsafe {
            (self
                .aclrtStreamQuery
                .as_ref()
                .expect("Expected function, got error."))(stream, status)
        }
    }
    pub unsafe fn aclrtStreamGetFlags(
        &self,
        stream: aclrtStream,
        flags: *mut u32,
    ) -> aclError {
        unsafe {
            (self
                .aclrtStreamGetFlags
                .as_ref()
                .expect("Expected function, got error."))(stream, flags)
        }
    }
    pub unsafe fn aclmdlRICaptureGetInfo(
        &self,
        stream: aclrtStream,
        status: *mut ::std::os::raw::c_int,
        model: *mut aclmdlRI,
    ) -> aclError {
        unsafe {
            (self
                .aclmdlRICaptureGetInfo
                .as_ref()
                .expect("Expected function, got error."))(stream, status, model)
        }
    }
    pub unsafe fn aclmdlRICaptureThreadExchangeMode(
        &self,
        mode: *mut ::std::os::raw::c_int,
    ) -> aclError {
        unsafe {
            (self
                .aclmdlRICaptureThreadExchangeMode
                .as_ref()
                .expect("Expected function, got error."))(mode)
        }
    }
    pub unsafe fn aclrtMalloc(
        &self,
        device: *mut *mut ::std::os::raw::c_void,
        size: usize,
        policy: ::std::os::raw::c_int,
    ) -> aclError {
        unsafe {
            (self
                .aclrtMalloc
                .as_ref()
                .expect("Expected function, got error."))(device, size, policy)
        }
    }
    pub unsafe fn aclrtFree(&self, device: *mut ::std::os::raw::c_void) -> aclError {
        unsafe {
            (self.aclrtFree.as_ref().expect("Expected function, got error."))(device)
        }
    }
    pub unsafe fn aclrtMallocHost(
        &self,
        host: *mut *mut ::std::os::raw::c_void,
        size: usize,
    ) -> aclError {
        unsafe {
            (self
                .aclrtMallocHost
                .as_ref()
                .expect("Expected function, got error."))(host, size)
        }
    }
    pub unsafe fn aclrtFreeHost(&self, host: *mut ::std::os::raw::c_void) -> aclError {
        unsafe {
            (self.aclrtFreeHost.as_ref().expect("Expected function, got error."))(host)
        }
    }
    pub unsafe fn aclrtGetMemInfo(
        &self,
        attribute: ::std::os::raw::c_int,
        free: *mut usize,
        total: *mut usize,
    ) -> aclError {
        unsafe {
            (self
                .aclrtGetMemInfo
                .as_ref()
                .expect("Expected function, got error."))(attribute, free, total)
        }
    }
    pub unsafe fn aclrtMemcpyAsync(
        &self,
        to: *mut ::std::os::raw::c_void,
        room: usize,
        from: *const ::std::os::raw::c_void,
        count: usize,
        kind: ::std::os::raw::c_int,
        stream: aclrtStream,
    ) -> aclError {
        unsafe {
            (self
                .aclrtMemcpyAsync
                .as_ref()
                .expect(
                    "Expected function, got error.",
                ))(to, room, from, count, kind, stream)
        }
    }
    pub unsafe fn aclrtPointerGetAttributes(
        &self,
        pointer: *const ::std::os::raw::c_void,
        attributes: *mut aclrtPtrAttributes,
    ) -> aclError {
        unsafe {
            (self
                .aclrtPointerGetAttributes
                .as_ref()
                .expect("Expected function, got error."))(pointer, attributes)
        }
    }
    pub unsafe fn aclrtMemGetAddressRange(
        &self,
        pointer: *mut ::std::os::raw::c_void,
        base: *mut *mut ::std::os::raw::c_void,
        size: *mut usize,
    ) -> aclError {
        unsafe {
            (self
                .aclrtMemGetAddressRange
                .as_ref()
                .expect("Expected function, got error."))(pointer, base, size)
        }
    }
    pub unsafe fn aclrtHostRegister(
        &self,
        host: *mut ::std::os::raw::c_void,
        size: u64,
        type_: ::std::os::raw::c_int,
        device: *mut *mut ::std::os::raw::c_void,
    ) -> aclError {
        unsafe {
            (self
                .aclrtHostRegister
                .as_ref()
                .expect("Expected function, got error."))(host, size, type_, device)
        }
    }
    pub unsafe fn aclrtHostUnregister(
        &self,
        host: *mut ::std::os::raw::c_void,
    ) -> aclError {
        unsafe {
            (self
                .aclrtHostUnregister
                .as_ref()
                .expect("Expected function, got error."))(host)
        }
    }
    pub unsafe fn aclrtIpcMemGetExportKey(
        &self,
        device: *mut ::std::os::raw::c_void,
        size: usize,
        key: *mut ::std::os::raw::c_char,
        length: usize,
        flags: u64,
    ) -> aclError {
        unsafe {
            (self
                .aclrtIpcMemGetExportKey
                .as_ref()
                .expect(
                    "Expected function, got error.",
                ))(device, size, key, length, flags)
        }
    }
    pub unsafe fn aclrtIpcMemImportByKey(
        &self,
        device: *mut *mut ::std::os::raw::c_void,
        key: *const ::std::os::raw::c_char,
        flags: u64,
    ) -> aclError {
        unsafe {
            (self
                .aclrtIpcMemImportByKey
                .as_ref()
                .expect("Expected function, got error."))(device, key, flags)
        }
    }
    pub unsafe fn aclrtIpcMemClose(
        &self,
        key: *const ::std::os::raw::c_char,
    ) -> aclError {
        unsafe {
            (self.aclrtIpcMemClose.as_ref().expect("Expected function, got error."))(key)
        }
    }
    pub unsafe fn aclrtMemRetainAllocationHandle(
        &self,
        address: *mut ::std::os::raw::c_void,
        handle: *mut aclrtDrvMemHandle,
    ) -> aclError {
        unsafe {
            (self
                .aclrtMemRetainAllocationHandle
                .as_ref()
                .expect("Expected function, got error."))(address, handle)
        }
    }
    pub unsafe fn aclrtFreePhysical(&self, handle: aclrtDrvMemHandle) -> aclError {
        unsafe {
            (self
                .aclrtFreePhysical
                .as_ref()
                .expect("Expected function, got error."))(handle)
        }
    }
    pub unsafe fn aclrtMemExportToShareableHandle(
        &self,
        handle: aclrtDrvMemHandle,
        type_: ::std::os::raw::c_int,
        flags: u64,
        shareable: *mut u64,
    ) -> aclError {
        unsafe {
            (self
                .aclrtMemExportToShareableHandle
                .as_ref()
                .expect(
                    "Expected function, got error.",
                ))(handle, type_, flags, shareable)
        }
    }
    pub unsafe fn aclrtMemImportFromShareableHandle(
        &self,
        shareable: u64,
        user: i32,
        handle: *mut aclrtDrvMemHandle,
    ) -> aclError {
        unsafe {
            (self
                .aclrtMemImportFromShareableHandle
                .as_ref()
                .expect("Expected function, got error."))(shareable, user, handle)
        }
    }
    pub unsafe fn aclrtReserveMemAddress(
        &self,
        address: *mut *mut ::std::os::raw::c_void,
        size: usize,
        alignment: usize,
        expected: *mut ::std::os::raw::c_void,
        flags: u64,
    ) -> aclError {
        unsafe {
            (self
                .aclrtReserveMemAddress
                .as_ref()
                .expect(
                    "Expected function, got error.",
                ))(address, size, alignment, expected, flags)
        }
    }
    pub unsafe fn aclrtReleaseMemAddress(
        &self,
        address: *mut ::std::os::raw::c_void,
    ) -> aclError {
        unsafe {
            (self
                .aclrtReleaseMemAddress
                .as_ref()
                .expect("Expected function, got error."))(address)
        }
    }
    pub unsafe fn aclrtMapMem(
        &self,
        address: *mut ::std::os::raw::c_void,
        size: usize,
        offset: usize,
        handle: aclrtDrvMemHandle,
        flags: u64,
    ) -> aclError {
        unsafe {
            (self
                .aclrtMapMem
                .as_ref()
                .expect(
                    "Expected function, got error.",
                ))(address, size, offset, handle, flags)
        }
    }
    pub unsafe fn aclrtUnmapMem(
        &self,
        address: *mut ::std::os::raw::c_void,
    ) -> aclError {
        unsafe {
            (self
                .aclrtUnmapMem
                .as_ref()
                .expect("Expected function, got error."))(address)
        }
    }
    pub unsafe fn aclrtMemSetAccess(
        &self,
        address: *mut ::std::os::raw::c_void,
        size: usize,
        access: *mut aclrtMemAccessDesc,
        count: usize,
    ) -> aclError {
        unsafe {
            (self
                .aclrtMemSetAccess
                .as_ref()
                .expect("Expected function, got error."))(address, size, access, count)
        }
    }
}

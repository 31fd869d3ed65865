/*
 * What this backend calls of CANN's ACL runtime, as CANN 8.5 to 9.2 declare it. `bindings.rs` is made from it; see
 * tests/bindings.rs.
 *
 * Enums are plain ints, so that a value of a newer CANN is no undefined behaviour. Handles are void pointers, as there.
 * Nothing is included: the machine that makes the bindings then needs no C library's headers.
 */

typedef unsigned long size_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef unsigned long uint64_t;

typedef int aclError;
typedef void *aclrtContext;
typedef void *aclrtStream;
typedef void *aclrtDrvMemHandle;
typedef void *aclmdlRI;

/* Codes that are branched on; src/error.rs has the meaning of the rest. */
#define ACL_SUCCESS 0
#define ACL_ERROR_INVALID_PARAM 100000
#define ACL_ERROR_REPEAT_INITIALIZE 100002
#define ACL_ERROR_RT_PARAM_INVALID 107000
#define ACL_ERROR_RT_CONTEXT_NULL 107002
#define ACL_ERROR_RT_FEATURE_NOT_SUPPORT 207000
#define ACL_ERROR_RT_STREAM_SYNC_TIMEOUT 507046
#define ACL_ERROR_RT_HOST_MEMORY_ALREADY_REGISTERED 507910

#define ACL_HBM_MEM 1
#define ACL_MEM_MALLOC_HUGE_FIRST 0
#define ACL_MEMCPY_HOST_TO_DEVICE 1
#define ACL_MEMCPY_DEVICE_TO_HOST 2
#define ACL_MEMCPY_DEVICE_TO_DEVICE 3

#define ACL_STREAM_FAST_LAUNCH 0x1
#define ACL_STREAM_FAST_SYNC 0x2
#define ACL_STREAM_PERSISTENT 0x4
#define ACL_STREAM_CPU_SCHEDULE 0x10
#define ACL_STREAM_DEVICE_USE_ONLY 0x20
/* aclrtStreamQuery. An event's status counts the other way round. */
#define ACL_STREAM_STATUS_COMPLETE 0
#define ACL_STREAM_STATUS_NOT_READY 1

#define ACL_MODEL_RI_CAPTURE_STATUS_NONE 0
#define ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE 1
#define ACL_MODEL_RI_CAPTURE_MODE_RELAXED 2

#define ACL_MEM_LOCATION_TYPE_HOST 0
#define ACL_MEM_LOCATION_TYPE_DEVICE 1
#define ACL_MEM_LOCATION_TYPE_UNREGISTERED 2

#define ACL_HOST_REGISTER_MAPPED 0

#define ACL_RT_IPC_MEM_KEY_LEN 65
#define ACL_RT_IPC_MEM_EXPORT_FLAG_DISABLE_PID_VALIDATION 1
#define ACL_RT_IPC_MEM_IMPORT_FLAG_ENABLE_PEER_ACCESS 1
#define ACL_RT_VMM_EXPORT_FLAG_DISABLE_PID_VALIDATION 1
#define ACL_MEM_HANDLE_TYPE_NONE 0
#define ACL_RESERVE_HUGE_PAGES 1
#define ACL_RT_MEM_ACCESS_FLAGS_READWRITE 3

typedef struct aclrtMemLocation {
    uint32_t id;
    int32_t type;
} aclrtMemLocation;
_Static_assert(sizeof(aclrtMemLocation) == 8, "as CANN has it");

typedef struct aclrtPtrAttributes {
    aclrtMemLocation location;
    uint32_t pageSize;
    uint32_t reserved[4];
} aclrtPtrAttributes;
_Static_assert(sizeof(aclrtPtrAttributes) == 28, "as CANN has it");

typedef struct aclrtMemAccessDesc {
    int32_t flags;
    aclrtMemLocation location;
    unsigned char reserved[12];
} aclrtMemAccessDesc;
_Static_assert(sizeof(aclrtMemAccessDesc) == 24, "as CANN has it");

/* Process and devices. */
aclError aclInit(const char *configPath);
const char *aclGetRecentErrMsg(void);
aclError aclsysGetVersionNum(const char *package, int32_t *version);
const char *aclrtGetSocName(void);
aclError aclrtGetDeviceCount(uint32_t *count);
aclError aclrtGetLogicDevIdByUserDevId(int32_t user, int32_t *logic);
aclError aclrtGetPhyDevIdByLogicDevId(int32_t logic, int32_t *physical);

/* Contexts. */
aclError aclrtSetDevice(int32_t user);
aclError aclrtGetCurrentContext(aclrtContext *context);
aclError aclrtSetCurrentContext(aclrtContext context);

/* Streams. */
aclError aclrtCreateStreamWithConfig(aclrtStream *stream, uint32_t priority, uint32_t flags);
aclError aclrtDestroyStream(aclrtStream stream);
aclError aclrtSynchronizeStream(aclrtStream stream);
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t milliseconds);
aclError aclrtStreamQuery(aclrtStream stream, int *status);
aclError aclrtStreamGetFlags(aclrtStream stream, uint32_t *flags);
aclError aclmdlRICaptureGetInfo(aclrtStream stream, int *status, aclmdlRI *model);
aclError aclmdlRICaptureThreadExchangeMode(int *mode);

/* Memory. */
aclError aclrtMalloc(void **device, size_t size, int policy);
aclError aclrtFree(void *device);
aclError aclrtMallocHost(void **host, size_t size);
aclError aclrtFreeHost(void *host);
aclError aclrtGetMemInfo(int attribute, size_t *free, size_t *total);
aclError aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t count, int kind, aclrtStream stream);
aclError aclrtPointerGetAttributes(const void *pointer, aclrtPtrAttributes *attributes);
aclError aclrtMemGetAddressRange(void *pointer, void **base, size_t *size);
aclError aclrtHostRegister(void *host, uint64_t size, int type, void **device);
aclError aclrtHostUnregister(void *host);

/* Sharing by key. */
aclError aclrtIpcMemGetExportKey(void *device, size_t size, char *key, size_t length, uint64_t flags);
aclError aclrtIpcMemImportByKey(void **device, const char *key, uint64_t flags);
aclError aclrtIpcMemClose(const char *key);

/* Virtual memory, and sharing it by handle. */
aclError aclrtMemRetainAllocationHandle(void *address, aclrtDrvMemHandle *handle);
aclError aclrtFreePhysical(aclrtDrvMemHandle handle);
aclError aclrtMemExportToShareableHandle(aclrtDrvMemHandle handle, int type, uint64_t flags, uint64_t *shareable);
aclError aclrtMemImportFromShareableHandle(uint64_t shareable, int32_t user, aclrtDrvMemHandle *handle);
aclError aclrtReserveMemAddress(void **address, size_t size, size_t alignment, void *expected, uint64_t flags);
aclError aclrtReleaseMemAddress(void *address);
aclError aclrtMapMem(void *address, size_t size, size_t offset, aclrtDrvMemHandle handle, uint64_t flags);
aclError aclrtUnmapMem(void *address);
aclError aclrtMemSetAccess(void *address, size_t size, aclrtMemAccessDesc *access, size_t count);

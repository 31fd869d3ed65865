// Made by bindgen from mooncake.h; see tests/mooncake_bindings.rs. Not to be edited.

pub type mooncake_store_t = *mut ::std::os::raw::c_void;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct mooncake_replicate_config_t {
    pub replica_num: usize,
    pub with_soft_pin: ::std::os::raw::c_int,
    pub with_hard_pin: ::std::os::raw::c_int,
    pub preferred_segments: *mut *const ::std::os::raw::c_char,
    pub preferred_segments_count: usize,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    [
        "Size of mooncake_replicate_config_t",
    ][::std::mem::size_of::<mooncake_replicate_config_t>() - 32usize];
    [
        "Alignment of mooncake_replicate_config_t",
    ][::std::mem::align_of::<mooncake_replicate_config_t>() - 8usize];
    [
        "Offset of field: mooncake_replicate_config_t::replica_num",
    ][::std::mem::offset_of!(mooncake_replicate_config_t, replica_num) - 0usize];
    [
        "Offset of field: mooncake_replicate_config_t::with_soft_pin",
    ][::std::mem::offset_of!(mooncake_replicate_config_t, with_soft_pin) - 8usize];
    [
        "Offset of field: mooncake_replicate_config_t::with_hard_pin",
    ][::std::mem::offset_of!(mooncake_replicate_config_t, with_hard_pin) - 12usize];
    [
        "Offset of field: mooncake_replicate_config_t::preferred_segments",
    ][::std::mem::offset_of!(mooncake_replicate_config_t, preferred_segments) - 16usize];
    [
        "Offset of field: mooncake_replicate_config_t::preferred_segments_count",
    ][::std::mem::offset_of!(mooncake_replicate_config_t, preferred_segments_count)
        - 24usize];
};
pub struct Mooncake {
    __library: ::libloading::Library,
    pub mooncake_store_create: unsafe extern "C" fn() -> mooncake_store_t,
    pub mooncake_store_destroy: unsafe extern "C" fn(store: mooncake_store_t),
    pub mooncake_store_setup: unsafe extern "C" fn(
        store: mooncake_store_t,
        local_hostname: *const ::std::os::raw::c_char,
        metadata_server: *const ::std::os::raw::c_char,
        global_segment_size: u64,
        local_buffer_size: u64,
        protocol: *const ::std::os::raw::c_char,
        device_name: *const ::std::os::raw::c_char,
        master_server_addr: *const ::std::os::raw::c_char,
    ) -> ::std::os::raw::c_int,
    pub mooncake_store_init_all: unsafe extern "C" fn(
        store: mooncake_store_t,
        protocol: *const ::std::os::raw::c_char,
        device_name: *const ::std::os::raw::c_char,
        mount_segment_size: u64,
    ) -> ::std::os::raw::c_int,
    pub mooncake_store_health_check: unsafe extern "C" fn(
        store: mooncake_store_t,
    ) -> ::std::os::raw::c_int,
    pub mooncake_store_get_hostname: unsafe extern "C" fn(
        store: mooncake_store_t,
        out: *mut ::std::os::raw::c_char,
        size: usize,
    ) -> ::std::os::raw::c_int,
    pub mooncake_store_put: unsafe extern "C" fn(
        store: mooncake_store_t,
        key: *const ::std::os::raw::c_char,
        value: *const ::std::os::raw::c_void,
        size: usize,
        config: *const mooncake_replicate_config_t,
    ) -> ::std::os::raw::c_int,
    pub mooncake_store_put_from: unsafe extern "C" fn(
        store: mooncake_store_t,
        key: *const ::std::os::raw::c_char,
        buffer: *mut ::std::os::raw::c_void,
        size: usize,
        config: *const mooncake_replicate_config_t,
    ) -> ::std::os::raw::c_int,
    pub mooncake_store_batch_put_from: unsafe extern "C" fn(
        store: mooncake_store_t,
        keys: *mut *const ::std::os::raw::c_char,
        buffers: *mut *mut ::std::os::raw::c_void,
        sizes: *const usize,
        count: usize,
        config: *const mooncake_replicate_config_t,
        results_out: *mut ::std::os::raw::c_int,
    ) -> ::std::os::raw::c_int,
    pub mooncake_store_get_into: unsafe extern "C" fn(
        store: mooncake_store_t,
        key: *const ::std::os::raw::c_char,
        buffer: *mut ::std::os::raw::c_void,
        size: usize,
    ) -> i64,
    pub mooncake_store_batch_get_into: unsafe extern "C" fn(
        store: mooncake_store_t,
        keys: *mut *const ::std::os::raw::c_char,
        buffers: *mut *mut ::std::os::raw::c_void,
        sizes: *const usize,
        count: usize,
        results_out: *mut i64,
    ) -> ::std::os::raw::c_int,
    pub mooncake_store_is_exist: unsafe extern "C" fn(
        store: mooncake_store_t,
        key: *const ::std::os::raw::c_char,
    ) -> ::std::os::raw::c_int,
    pub mooncake_store_batch_is_exist: unsafe extern "C" fn(
        store: mooncake_store_t,
        keys: *mut *const ::std::os::raw::c_char,
        count: usize,
        results_out: *mut ::std::os::raw::c_int,
    ) -> ::std::os::raw::c_int,
    pub mooncake_store_get_size: unsafe extern "C" fn(
        store: mooncake_store_t,
        key: *const ::std::os::raw::c_char,
    ) -> i64,
    pub mooncake_store_remove: unsafe extern "C" fn(
        store: mooncake_store_t,
        key: *const ::std::os::raw::c_char,
        force: ::std::os::raw::c_int,
    ) -> ::std::os::raw::c_int,
    pub mooncake_store_remove_by_regex: unsafe extern "C" fn(
        store: mooncake_store_t,
        pattern: *const ::std::os::raw::c_char,
        force: ::std::os::raw::c_int,
    ) -> i64,
    pub mooncake_store_remove_all: unsafe extern "C" fn(
        store: mooncake_store_t,
        force: ::std::os::raw::c_int,
    ) -> i64,
    pub mooncake_store_register_buffer: unsafe extern "C" fn(
        store: mooncake_store_t,
        buffer: *mut ::std::os::raw::c_void,
        size: usize,
    ) -> ::std::os::raw::c_int,
    pub mooncake_store_unregister_buffer: unsafe extern "C" fn(
        store: mooncake_store_t,
        buffer: *mut ::std::os::raw::c_void,
    ) -> ::std::os::raw::c_int,
}
impl Mooncake {
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
        let mooncake_store_create = unsafe { __library.get(b"mooncake_store_create\0") }
            .map(|sym| *sym)?;
        let mooncake_store_destroy = unsafe {
            __library.get(b"mooncake_store_destroy\0")
        }
            .map(|sym| *sym)?;
        let mooncake_store_setup = unsafe { __library.get(b"mooncake_store_setup\0") }
            .map(|sym| *sym)?;
        let mooncake_store_init_all = unsafe {
            __library.get(b"mooncake_store_init_all\0")
        }
            .map(|sym| *sym)?;
        let mooncake_store_health_check = unsafe {
            __library.get(b"mooncake_store_health_check\0")
        }
            .map(|sym| *sym)?;
        let mooncake_store_get_hostname = unsafe {
            __library.get(b"mooncake_store_get_hostname\0")
        }
            .map(|sym| *sym)?;
        let mooncake_store_put = unsafe { __library.get(b"mooncake_store_put\0") }
            .map(|sym| *sym)?;
        let mooncake_store_put_from = unsafe {
            __library.get(b"mooncake_store_put_from\0")
        }
            .map(|sym| *sym)?;
        let mooncake_store_batch_put_from = unsafe {
            __library.get(b"mooncake_store_batch_put_from\0")
        }
            .map(|sym| *sym)?;
        let mooncake_store_get_into = unsafe {
            __library.get(b"mooncake_store_get_into\0")
        }
            .map(|sym| *sym)?;
        let mooncake_store_batch_get_into = unsafe {
            __library.get(b"mooncake_store_batch_get_into\0")
        }
            .map(|sym| *sym)?;
        let mooncake_store_is_exist = unsafe {
            __library.get(b"mooncake_store_is_exist\0")
        }
            .map(|sym| *sym)?;
        let mooncake_store_batch_is_exist = unsafe {
            __library.get(b"mooncake_store_batch_is_exist\0")
        }
            .map(|sym| *sym)?;
        let mooncake_store_get_size = unsafe {
            __library.get(b"mooncake_store_get_size\0")
        }
            .map(|sym| *sym)?;
        let mooncake_store_remove = unsafe { __library.get(b"mooncake_store_remove\0") }
            .map(|sym| *sym)?;
        let mooncake_store_remove_by_regex = unsafe {
            __library.get(b"mooncake_store_remove_by_regex\0")
        }
            .map(|sym| *sym)?;
        let mooncake_store_remove_all = unsafe {
            __library.get(b"mooncake_store_remove_all\0")
        }
            .map(|sym| *sym)?;
        let mooncake_store_register_buffer = unsafe {
            __library.get(b"mooncake_store_register_buffer\0")
        }
            .map(|sym| *sym)?;
        let mooncake_store_unregister_buffer = unsafe {
            __library.get(b"mooncake_store_unregister_buffer\0")
        }
            .map(|sym| *sym)?;
        Ok(Mooncake {
            __library,
            mooncake_store_create,
            mooncake_store_destroy,
            mooncake_store_setup,
            mooncake_store_init_all,
            mooncake_store_health_check,
            mooncake_store_get_hostname,
            mooncake_store_put,
            mooncake_store_put_from,
            mooncake_store_batch_put_from,
            mooncake_store_get_into,
            mooncake_store_batch_get_into,
            mooncake_store_is_exist,
            mooncake_store_batch_is_exist,
            mooncake_store_get_size,
            mooncake_store_remove,
            mooncake_store_remove_by_regex,
            mooncake_store_remove_all,
            mooncake_store_register_buffer,
            mooncake_store_unregister_buffer,
        })
    }
    pub unsafe fn mooncake_store_create(&self) -> mooncake_store_t {
        unsafe { (self.mooncake_store_create)() }
    }
    pub unsafe fn mooncake_store_destroy(&self, store: mooncake_store_t) {
        unsafe { (self.mooncake_store_destroy)(store) }
    }
    pub unsafe fn mooncake_store_setup(
        &self,
        store: mooncake_store_t,
        local_hostname: *const ::std::os::raw::c_char,
        metadata_server: *const ::std::os::raw::c_char,
        global_segment_size: u64,
        local_buffer_size: u64,
        protocol: *const ::std::os::raw::c_char,
        device_name: *const ::std::os::raw::c_char,
        master_server_addr: *const ::std::os::raw::c_char,
    ) -> ::std::os::raw::c_int {
        unsafe {
            (self
                .mooncake_store_setup)(
                store,
                local_hostname,
                metadata_server,
                global_segment_size,
                local_buffer_size,
                protocol,
                device_name,
                master_server_addr,
            )
        }
    }
    pub unsafe fn mooncake_store_init_all(
        &self,
        store: mooncake_store_t,
        protocol: *const ::std::os::raw::c_char,
        device_name: *const ::std::os::raw::c_char,
        mount_segment_size: u64,
    ) -> ::std::os::raw::c_int {
        unsafe {
            (self
                .mooncake_store_init_all)(
                store,
                protocol,
                device_name,
                mount_segment_size,
            )
        }
    }
    pub unsafe fn mooncake_store_health_check(
        &self,
        store: mooncake_store_t,
    ) -> ::std::os::raw::c_int {
        unsafe { (self.mooncake_store_health_check)(store) }
    }
    pub unsafe fn mooncake_store_get_hostname(
        &self,
        store: mooncake_store_t,
        out: *mut ::std::os::raw::c_char,
        size: usize,
    ) -> ::std::os::raw::c_int {
        unsafe { (self.mooncake_store_get_hostname)(store, out, size) }
    }
    pub unsafe fn mooncake_store_put(
        &self,
        store: mooncake_store_t,
        key: *const ::std::os::raw::c_char,
        value: *const ::std::os::raw::c_void,
        size: usize,
        config: *const mooncake_replicate_config_t,
    ) -> ::std::os::raw::c_int {
        unsafe { (self.mooncake_store_put)(store, key, value, size, config) }
    }
    pub unsafe fn mooncake_store_put_from(
        &self,
        store: mooncake_store_t,
        key: *const ::std::os::raw::c_char,
        buffer: *mut ::std::os::raw::c_void,
        size: usize,
        config: *const mooncake_replicate_config_t,
    ) -> ::std::os::raw::c_int {
        unsafe { (self.mooncake_store_put_from)(store, key, buffer, size, config) }
    }
    pub unsafe fn mooncake_store_batch_put_from(
        &self,
        store: mooncake_store_t,
        keys: *mut *const ::std::os::raw::c_char,
        buffers: *mut *mut ::std::os::raw::c_void,
        sizes: *const usize,
        count: usize,
        config: *const mooncake_replicate_config_t,
        results_out: *mut ::std::os::raw::c_int,
    ) -> ::std::os::raw::c_int {
        unsafe {
            (self
                .mooncake_store_batch_put_from)(
                store,
                keys,
                buffers,
                sizes,
                count,
                config,
                results_out,
            )
        }
    }
    pub unsafe fn mooncake_store_get_into(
        &self,
        store: mooncake_store_t,
        key: *const ::std::os::raw::c_char,
        buffer: *mut ::std::os::raw::c_void,
        size: usize,
    ) -> i64 {
        unsafe { (self.mooncake_store_get_into)(store, key, buffer, size) }
    }
    pub unsafe fn mooncake_store_batch_get_into(
        &self,
        store: mooncake_store_t,
        keys: *mut *const ::std::os::raw::c_char,
        buffers: *mut *mut ::std::os::raw::c_void,
        sizes: *const usize,
        count: usize,
        results_out: *mut i64,
    ) -> ::std::os::raw::c_int {
        unsafe {
            (self
                .mooncake_store_batch_get_into)(
                store,
                keys,
                buffers,
                sizes,
                count,
                results_out,
            )
        }
    }
    pub unsafe fn mooncake_store_is_exist(
        &self,
        store: mooncake_store_t,
        key: *const ::std::os::raw::c_char,
    ) -> ::std::os::raw::c_int {
        unsafe { (self.mooncake_store_is_exist)(store, key) }
    }
    pub unsafe fn mooncake_store_batch_is_exist(
        &self,
        store: mooncake_store_t,
        keys: *mut *const ::std::os::raw::c_char,
        count: usize,
        results_out: *mut ::std::os::raw::c_int,
    ) -> ::std::os::raw::c_int {
        unsafe { (self.mooncake_store_batch_is_exist)(store, keys, count, results_out) }
    }
    pub unsafe fn mooncake_store_get_size(
        &self,
        store: mooncake_store_t,
        key: *const ::std::os::raw::c_char,
    ) -> i64 {
        unsafe { (self.mooncake_store_get_size)(store, key) }
    }
    pub unsafe fn mooncake_store_remove(
        &self,
        store: mooncake_store_t,
        key: *const ::std::os::raw::c_char,
        force: ::std::os::raw::c_int,
    ) -> ::std::os::raw::c_int {
        unsafe { (self.mooncake_store_remove)(store, key, force) }
    }
    pub unsafe fn mooncake_store_remove_by_regex(
        &self,
        store: mooncake_store_t,
        pattern: *const ::std::os::raw::c_char,
        force: ::std::os::raw::c_int,
    ) -> i64 {
        unsafe { (self.mooncake_store_remove_by_regex)(store, pattern, force) }
    }
    pub unsafe fn mooncake_store_remove_all(
        &self,
        store: mooncake_store_t,
        force: ::std::os::raw::c_int,
    ) -> i64 {
        unsafe { (self.mooncake_store_remove_all)(store, force) }
    }
    pub unsafe fn mooncake_store_register_buffer(
        &self,
        store: mooncake_store_t,
        buffer: *mut ::std::os::raw::c_void,
        size: usize,
    ) -> ::std::os::raw::c_int {
        unsafe { (self.mooncake_store_register_buffer)(store, buffer, size) }
    }
    pub unsafe fn mooncake_store_unregister_buffer(
        &self,
        store: mooncake_store_t,
        buffer: *mut ::std::os::raw::c_void,
    ) -> ::std::os::raw::c_int {
        unsafe { (self.mooncake_store_unregister_buffer)(store, buffer) }
    }
}

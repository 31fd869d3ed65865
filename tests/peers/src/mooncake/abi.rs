//! The C ABI of `libmooncake_store.so`, as an application without Haulier calls it.

use std::{
    ffi::{CString, c_char, c_int, c_void},
    path::Path,
    ptr,
};

use libloading::Library;

use crate::failure::{During, Failure, Result};

type Handle = *mut c_void;

/// What an application calls. The library is never unloaded: it has threads.
struct Calls {
    create: unsafe extern "C" fn() -> Handle,
    #[allow(clippy::type_complexity, reason = "it is Mooncake's")]
    setup: unsafe extern "C" fn(
        Handle,
        *const c_char,
        *const c_char,
        u64,
        u64,
        *const c_char,
        *const c_char,
        *const c_char,
    ) -> c_int,
    destroy: unsafe extern "C" fn(Handle),
    register: unsafe extern "C" fn(Handle, *mut c_void, usize) -> c_int,
    unregister: unsafe extern "C" fn(Handle, *mut c_void) -> c_int,
    put: unsafe extern "C" fn(Handle, *const c_char, *mut c_void, usize, *const c_void) -> c_int,
    get: unsafe extern "C" fn(Handle, *const c_char, *mut c_void, usize) -> i64,
    puts: unsafe extern "C" fn(
        Handle,
        *const *const c_char,
        *const *mut c_void,
        *const usize,
        usize,
        *const c_void,
        *mut c_int,
    ) -> c_int,
    gets: unsafe extern "C" fn(
        Handle,
        *const *const c_char,
        *const *mut c_void,
        *const usize,
        usize,
        *mut i64,
    ) -> c_int,
    remove: unsafe extern "C" fn(Handle, *const c_char, c_int) -> c_int,
}

impl Calls {
    fn load(library: &Path) -> Result<Self> {
        // SAFETY: Mooncake's library, with its initialisers.
        let library = unsafe { Library::new(library) }.during(library.display())?;
        let library: &'static Library = Box::leak(Box::new(library));
        /// The function of this name.
        ///
        /// # Safety
        /// `F` must be its type.
        unsafe fn find<F: Copy>(library: &Library, name: &str) -> Result<F> {
            // SAFETY: the caller's promise.
            let found = unsafe { library.get::<F>(format!("mooncake_store_{name}")) };
            found.map(|function| *function).during(name)
        }
        // SAFETY: the types are those of Mooncake's C ABI.
        unsafe {
            Ok(Calls {
                create: find(library, "create")?,
                setup: find(library, "setup")?,
                destroy: find(library, "destroy")?,
                register: find(library, "register_buffer")?,
                unregister: find(library, "unregister_buffer")?,
                put: find(library, "put_from")?,
                get: find(library, "get_into")?,
                puts: find(library, "batch_put_from")?,
                gets: find(library, "batch_get_into")?,
                remove: find(library, "remove")?,
            })
        }
    }
}

/// Some values: their names, and where their bytes are or go, one behind the other.
pub(super) struct Values {
    names: Vec<CString>,
    pointers: Vec<*const c_char>,
    addrs: Vec<*mut c_void>,
    sizes: Vec<usize>,
    codes: Vec<c_int>,
    lens: Vec<i64>,
}

impl Values {
    /// Values of `bytes` each, from `start` on.
    pub(super) fn new(keys: &[String], start: *mut u8, bytes: usize) -> Result<Self> {
        let names: Vec<CString> = keys
            .iter()
            .map(|key| CString::new(key.as_str()))
            .collect::<std::result::Result<_, _>>()
            .during("a key")?;
        let count = names.len();
        Ok(Values {
            pointers: names.iter().map(|name| name.as_ptr()).collect(),
            names,
            addrs: (0..count).map(|n| start.wrapping_add(n * bytes).cast()).collect(),
            sizes: vec![bytes; count],
            codes: vec![-1; count],
            lens: vec![-1; count],
        })
    }
}

/// A client that gives the cluster no memory.
pub(super) struct Store {
    calls: Calls,
    handle: Handle,
}

impl Store {
    pub(super) fn join(library: &Path) -> Result<Self> {
        let calls = Calls::load(library)?;
        // SAFETY: it takes nothing.
        let store = Store { handle: unsafe { (calls.create)() }, calls };
        let [host, metadata, protocol, master] =
            [super::HOST, super::METADATA, super::PROTOCOL, &super::Cluster::master()].map(CString::new);
        let during = "a text for setup";
        let (host, metadata) = (host.during(during)?, metadata.during(during)?);
        let (protocol, master) = (protocol.during(during)?, master.during(during)?);
        // SAFETY: the handle is the library's, and the texts live for the call.
        let code = unsafe {
            (store.calls.setup)(
                store.handle,
                host.as_ptr(),
                metadata.as_ptr(),
                0,
                super::BUFFER,
                protocol.as_ptr(),
                c"".as_ptr(),
                master.as_ptr(),
            )
        };
        must(code.into(), "setup", 0)?;
        Ok(store)
    }

    /// # Safety
    /// The memory stays allocated until it is unregistered or the store is dropped.
    pub(super) unsafe fn register(&self, memory: *mut u8, len: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        let code = unsafe { (self.calls.register)(self.handle, memory.cast(), len) };
        must(code.into(), "register_buffer", 0)
    }

    pub(super) fn unregister(&self, memory: *mut u8) -> Result<()> {
        // SAFETY: memory that is not registered is refused.
        let code = unsafe { (self.calls.unregister)(self.handle, memory.cast()) };
        must(code.into(), "unregister_buffer", 0)
    }

    /// # Safety
    /// The values' memory is allocated, and nobody writes it meanwhile.
    pub(super) unsafe fn put(&self, values: &mut Values) -> Result<()> {
        let Values { names, pointers, addrs, sizes, codes, .. } = values;
        if let [name] = &names[..] {
            // SAFETY: the caller's promise.
            let code =
                unsafe { (self.calls.put)(self.handle, name.as_ptr(), addrs[0], sizes[0], ptr::null()) };
            return must(code.into(), "put_from", 0);
        }
        // SAFETY: the arrays have so many elements; else the caller's promise.
        let code = unsafe {
            (self.calls.puts)(
                self.handle,
                pointers.as_ptr(),
                addrs.as_ptr(),
                sizes.as_ptr(),
                pointers.len(),
                ptr::null(),
                codes.as_mut_ptr(),
            )
        };
        must(code.into(), "batch_put_from", 0)?;
        codes.iter().try_for_each(|&code| must(code.into(), "batch_put_from", 0))
    }

    /// # Safety
    /// The values' memory is allocated and nobody else touches it meanwhile.
    pub(super) unsafe fn get(&self, values: &mut Values) -> Result<()> {
        let Values { names, pointers, addrs, sizes, lens, .. } = values;
        if let [name] = &names[..] {
            // SAFETY: the caller's promise.
            let len = unsafe { (self.calls.get)(self.handle, name.as_ptr(), addrs[0], sizes[0]) };
            return must(len, "get_into", sizes[0] as i64);
        }
        // SAFETY: the arrays have so many elements; else the caller's promise.
        let code = unsafe {
            (self.calls.gets)(
                self.handle,
                pointers.as_ptr(),
                addrs.as_ptr(),
                sizes.as_ptr(),
                pointers.len(),
                lens.as_mut_ptr(),
            )
        };
        must(code.into(), "batch_get_into", 0)?;
        lens.iter().zip(sizes).try_for_each(|(&len, size)| must(len, "batch_get_into", *size as i64))
    }

    /// Whether they were there or not.
    pub(super) fn remove(&self, values: &Values) {
        for name in &values.names {
            // SAFETY: the name ends with 0.
            unsafe { (self.calls.remove)(self.handle, name.as_ptr(), 1) };
        }
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        // SAFETY: nobody uses it any more.
        unsafe { (self.calls.destroy)(self.handle) };
    }
}

fn must(code: i64, what: &str, wanted: i64) -> Result<()> {
    if code == wanted { Ok(()) } else { Err(Failure(format!("{what} answers {code}"))) }
}

//! `libmooncake_store.so`: where it is looked for, and its calls as safe Rust functions.
//!
//! The declarations are bindgen's, made from `mooncake.h`. Every call takes the proof that the calling thread is bound:
//! Mooncake registers memory in the calling thread's context, and copies into device memory bind whatever thread they are
//! made on.

#[rustfmt::skip]
#[allow(
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    dead_code,
    unreachable_pub,
    clippy::all,
    clippy::undocumented_unsafe_blocks,
    clippy::missing_safety_doc,
    reason = "made by bindgen"
)]
mod bindings;

use std::{
    env,
    error::Error as _,
    ffi::{CStr, CString, OsString, c_char, c_int, c_void},
    mem::ManuallyDrop,
    path::Path,
    ptr,
    sync::Arc,
};

use hal::{Bound, Device, Error, Kind, Result};

use self::bindings::Mooncake;
use super::refusal::{BACKEND, refusal};

/// Names the library in place of the loader's search path.
pub(crate) const LIBRARY_VAR: &str = "HAULIER_MOONCAKE";
const NAME: &str = "libmooncake_store.so";

/// The loaded library. It is never unloaded: it has threads, and handlers that run at exit.
#[derive(Clone)]
pub(crate) struct Library(Arc<ManuallyDrop<Mooncake>>);

impl Library {
    /// Loads the library that `named`, else [`LIBRARY_VAR`], else the loader's search path says.
    ///
    /// *Errors*: [`Kind::NotPresent`] with the loader's words, which name the file, or the library beside it, that is
    /// missing; [`Kind::Unsupported`] with the function that it lacks.
    pub(crate) fn load(named: Option<&Path>) -> Result<Self> {
        const OP: &str = "load";
        let set = || env::var_os(LIBRARY_VAR).filter(|name| !name.is_empty());
        let name = named.map(OsString::from).or_else(set).unwrap_or_else(|| NAME.into());
        let words = |e: &libloading::Error| e.source().map_or_else(|| e.to_string(), ToString::to_string);
        // SAFETY: this runs the library's initialisers. The name is Mooncake's own, or what the user set in its place.
        let library = unsafe { libloading::Library::new(&name) }.map_err(|e| {
            Error::new(Kind::NotPresent, BACKEND, OP).detail(format!(
                "{}: {}; name Mooncake's store library with --mooncake-library or {LIBRARY_VAR}, and have the libraries \
                 that it needs on LD_LIBRARY_PATH when the process starts",
                name.display(),
                words(&e)
            ))
        })?;
        // SAFETY: the types are those of Mooncake's C ABI.
        let mooncake = unsafe { Mooncake::from_library(library) }.map_err(|e| {
            Error::new(Kind::Unsupported, BACKEND, OP).detail(format!(
                "{} is not the store library, or not of Mooncake 0.3.13 or newer: {}",
                name.display(),
                words(&e)
            ))
        })?;
        Ok(Library(Arc::new(ManuallyDrop::new(mooncake))))
    }
}

/// What a client tells Mooncake when it joins.
#[derive(Debug, Clone)]
pub(crate) struct Setup {
    pub(crate) host: CString,
    pub(crate) metadata: CString,
    pub(crate) master: CString,
    pub(crate) protocol: CString,
    pub(crate) device: CString,
    pub(crate) segment: u64,
    pub(crate) buffer: u64,
}

/// A value in Mooncake, or to be: its name there, and the memory that is read or filled.
#[derive(Debug, Clone)]
pub(crate) struct Object {
    pub(crate) name: CString,
    pub(crate) addr: usize,
    pub(crate) len: usize,
}

/// One client of a Mooncake cluster. Dropping it leaves the cluster: seconds, where the master is gone.
pub(crate) struct Store {
    library: Library,
    handle: *mut c_void,
}

// SAFETY: Mooncake's client is used by many threads at once, as its Python module does; the handle is only passed on.
unsafe impl Send for Store {}
// SAFETY: as above.
unsafe impl Sync for Store {}

impl Store {
    /// Joins the cluster, and gives it `setup.segment` bytes of this process's memory.
    pub(crate) fn join<D: Device>(library: Library, bound: &Bound<'_, D>, setup: &Setup) -> Result<Self> {
        // SAFETY: the function takes nothing.
        let handle = unsafe { library.0.mooncake_store_create() };
        if handle.is_null() {
            return Err(refusal(bound, "create", -1));
        }
        let store = Store { library, handle };
        // SAFETY: the handle is the library's, and the texts end with 0 and live for the call.
        let code = unsafe {
            store.library.0.mooncake_store_setup(
                handle,
                setup.host.as_ptr(),
                setup.metadata.as_ptr(),
                setup.segment,
                setup.buffer,
                setup.protocol.as_ptr(),
                setup.device.as_ptr(),
                setup.master.as_ptr(),
            )
        };
        match code {
            0 => Ok(store),
            code => Err(refusal(bound, "setup", code.into())),
        }
    }

    pub(crate) fn health<D: Device>(&self, bound: &Bound<'_, D>) -> Result<()> {
        // SAFETY: the handle is the library's.
        answer(bound, "health_check", unsafe { self.library.0.mooncake_store_health_check(self.handle) })
    }

    /// Makes memory known to the transport.
    ///
    /// # Safety
    /// The memory must stay allocated until it is unregistered.
    pub(crate) unsafe fn register<D: Device>(
        &self,
        bound: &Bound<'_, D>,
        addr: usize,
        len: usize,
    ) -> Result<()> {
        // SAFETY: the handle is the library's; the caller promises the rest.
        answer(bound, "register_buffer", unsafe {
            self.library.0.mooncake_store_register_buffer(self.handle, pointer(addr), len)
        })
    }

    pub(crate) fn unregister<D: Device>(&self, bound: &Bound<'_, D>, addr: usize) -> Result<()> {
        // SAFETY: the handle is the library's; an address that is not registered is refused.
        answer(bound, "unregister_buffer", unsafe {
            self.library.0.mooncake_store_unregister_buffer(self.handle, pointer(addr))
        })
    }

    /// Stores each object; a name that exists keeps what it has and is a success all the same.
    ///
    /// # Safety
    /// The objects' memory must be allocated, and nobody may write it, until this returns.
    pub(crate) unsafe fn put<D: Device>(&self, bound: &Bound<'_, D>, objects: &[Object]) -> Vec<Result<()>> {
        let (mut names, mut addrs, sizes) = columns(objects);
        let mut codes: Vec<c_int> = vec![UNANSWERED as c_int; objects.len()];
        if !objects.is_empty() {
            // SAFETY: the arrays have `count` elements each; the caller promises the memory behind them.
            let code = unsafe {
                self.library.0.mooncake_store_batch_put_from(
                    self.handle,
                    names.as_mut_ptr(),
                    addrs.as_mut_ptr(),
                    sizes.as_ptr(),
                    objects.len(),
                    ptr::null(),
                    codes.as_mut_ptr(),
                )
            };
            whole_call_failed(&mut codes, code);
        }
        codes.into_iter().map(|code| answer(bound, "batch_put_from", code)).collect()
    }

    /// Fills each object's memory with the value of its name; the value's bytes, which may be fewer than there was room for.
    ///
    /// # Safety
    /// The objects' memory must be allocated and writable, and nobody else may touch it, until this returns.
    pub(crate) unsafe fn get<D: Device>(
        &self,
        bound: &Bound<'_, D>,
        objects: &[Object],
    ) -> Vec<Result<usize>> {
        let (mut names, mut addrs, sizes) = columns(objects);
        let mut codes: Vec<i64> = vec![UNANSWERED; objects.len()];
        if !objects.is_empty() {
            // SAFETY: the arrays have `count` elements each; the caller promises the memory behind them.
            let code = unsafe {
                self.library.0.mooncake_store_batch_get_into(
                    self.handle,
                    names.as_mut_ptr(),
                    addrs.as_mut_ptr(),
                    sizes.as_ptr(),
                    objects.len(),
                    codes.as_mut_ptr(),
                )
            };
            whole_call_failed(&mut codes, code);
        }
        let lens = codes.into_iter().zip(objects);
        lens.map(|(code, object)| match usize::try_from(code) {
            Ok(len) if len <= object.len => Ok(len),
            Ok(_) => Err(refusal(bound, "batch_get_into", UNANSWERED)),
            Err(_) => Err(refusal(bound, "batch_get_into", code)),
        })
        .collect()
    }

    /// Whether each name exists.
    pub(crate) fn exist<D: Device>(&self, bound: &Bound<'_, D>, names: &[CString]) -> Vec<Result<bool>> {
        let mut pointers: Vec<*const c_char> = names.iter().map(|name| name.as_ptr()).collect();
        let mut codes: Vec<c_int> = vec![UNANSWERED as c_int; names.len()];
        if let [name] = names {
            // A quarter faster than a batch of one.
            // SAFETY: the handle is the library's, and the name ends with 0.
            codes[0] = unsafe { self.library.0.mooncake_store_is_exist(self.handle, name.as_ptr()) };
        } else if !names.is_empty() {
            // SAFETY: the arrays have `count` elements each, and the names end with 0 and live for the call.
            let code = unsafe {
                self.library.0.mooncake_store_batch_is_exist(
                    self.handle,
                    pointers.as_mut_ptr(),
                    names.len(),
                    codes.as_mut_ptr(),
                )
            };
            whole_call_failed(&mut codes, code);
        }
        let found = |code: c_int| match code {
            0 | 1 => Ok(code == 1),
            code => Err(refusal(bound, "batch_is_exist", code.into())),
        };
        codes.into_iter().map(found).collect()
    }

    /// Removes one object, also while somebody holds a lease on it; whether it was there.
    pub(crate) fn remove<D: Device>(&self, bound: &Bound<'_, D>, name: &CStr) -> Result<bool> {
        // SAFETY: the handle is the library's, and the name ends with 0.
        let code = unsafe { self.library.0.mooncake_store_remove(self.handle, name.as_ptr(), 1) };
        match code {
            0 => Ok(true),
            super::refusal::NOT_FOUND => Ok(false),
            code => Err(refusal(bound, "remove", code.into())),
        }
    }

    /// Removes whatever a regular expression finds, also under a lease; how many went.
    pub(crate) fn remove_matching<D: Device>(&self, bound: &Bound<'_, D>, pattern: &CStr) -> Result<u64> {
        // SAFETY: the handle is the library's, and the pattern ends with 0.
        let code = unsafe { self.library.0.mooncake_store_remove_by_regex(self.handle, pattern.as_ptr(), 1) };
        u64::try_from(code).map_err(|_| refusal(bound, "remove_by_regex", code))
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        // SAFETY: the handle is the library's, and nobody has it any more.
        unsafe { self.library.0.mooncake_store_destroy(self.handle) };
    }
}

/// What a slot holds that the library left alone: no code of its own.
const UNANSWERED: i64 = -1;

/// A call that fails as a whole answers each of its slots so, unless it answered the slot itself.
fn whole_call_failed<C: Copy + PartialEq + From<i8> + TryFrom<i64>>(codes: &mut [C], code: c_int) {
    let Ok(code) = C::try_from(i64::from(code)) else { return };
    if code != C::from(0) {
        codes.iter_mut().filter(|slot| **slot == C::from(UNANSWERED as i8)).for_each(|slot| *slot = code);
    }
}

fn answer<D: Device>(bound: &Bound<'_, D>, op: &'static str, code: c_int) -> Result<()> {
    if code == 0 { Ok(()) } else { Err(refusal(bound, op, code.into())) }
}

fn pointer(addr: usize) -> *mut c_void {
    ptr::with_exposed_provenance_mut(addr)
}

fn columns(objects: &[Object]) -> (Vec<*const c_char>, Vec<*mut c_void>, Vec<usize>) {
    let names = objects.iter().map(|object| object.name.as_ptr()).collect();
    let addrs = objects.iter().map(|object| pointer(object.addr)).collect();
    (names, addrs, objects.iter().map(|object| object.len).collect())
}

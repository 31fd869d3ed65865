//! Virtual memory: physical memory with handles, reserved addresses, mappings, and handles that cross processes as
//! descriptors.

use std::{
    ffi::c_void,
    os::fd::{BorrowedFd, IntoRawFd},
};

use backend_cpu::strict::GRANULARITY;

use crate::{
    abi::{Answer, In, Out, OutAny, driver, refused, status},
    log::About,
    sim::{Sim, address},
};

const POSIX_FD: u32 = 1;
const PINNED: u32 = 1;
const DEVICE: u32 = 1;
const READ_WRITE: u64 = 3;

/// `CUmemLocation`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Location {
    kind: u32,
    id: i32,
}

/// `CUmemAllocationProp`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Properties {
    kind: u32,
    handle_types: u32,
    location: Location,
    win32: *mut c_void,
    flags: [u8; 8],
}

/// `CUmemAccessDesc`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Access {
    location: Location,
    flags: u32,
}

impl Location {
    fn device(self, sim: &Sim) -> Answer<u32> {
        if self.kind != DEVICE {
            return refused(status::NOT_SUPPORTED, format!("location type {}", self.kind));
        }
        sim.device(self.id)
    }
}

impl Properties {
    fn check(self, sim: &Sim) -> Answer<u32> {
        if self.kind != PINNED || self.handle_types & !POSIX_FD != 0 {
            let why = format!("allocation type {}, handle types {:#x}", self.kind, self.handle_types);
            return refused(status::INVALID_VALUE, why);
        }
        self.location.device(sim)
    }
}

driver! {
    fn cuMemGetAllocationGranularity(bytes: Out<usize>, properties: In<Properties>, _option: u32)
        [About::Nothing] |sim| {
        properties.get()?.check(sim)?;
        bytes.set(GRANULARITY)
    };
    fn cuMemCreate(handle: Out<u64>, bytes: usize, properties: In<Properties>, flags: u64)
        [About::Nothing] |sim| {
        let properties = properties.get()?;
        let device = properties.check(sim)?;
        if flags != 0 || handle.is_null() {
            return refused(status::INVALID_VALUE, format!("flags {flags:#x}"));
        }
        handle.set(sim.machine()?.create_physical(device, bytes, properties.handle_types == POSIX_FD)?)
    };
    fn cuMemRelease(handle: u64) [About::Handle(handle)] |sim| Ok(sim.machine()?.release_physical(handle)?);
    fn cuMemRetainAllocationHandle(handle: Out<u64>, pointer: u64) [About::Address(pointer)] |sim| {
        if handle.is_null() {
            return refused(status::INVALID_VALUE, "a null result pointer");
        }
        handle.set(sim.machine()?.retain_physical(address(pointer)?)?)
    };
    fn cuMemGetAllocationPropertiesFromHandle(properties: Out<Properties>, handle: u64)
        [About::Handle(handle)] |sim| {
        let physical = sim.machine()?.physical_of(handle)?;
        properties.set(Properties {
            kind: PINNED,
            handle_types: if physical.shareable { POSIX_FD } else { 0 },
            location: Location { kind: DEVICE, id: physical.device.cast_signed() },
            win32: std::ptr::null_mut(),
            flags: [0; 8],
        })
    };
    fn cuMemExportToShareableHandle(out: OutAny, handle: u64, kind: u32, flags: u64)
        [About::Handle(handle)] |sim| {
        if kind != POSIX_FD || flags != 0 || out.of::<i32>().is_null() {
            return refused(status::INVALID_VALUE, format!("handle type {kind}, flags {flags:#x}"));
        }
        out.of().set(sim.machine()?.export_physical(handle)?.into_raw_fd())
    };
    fn cuMemImportFromShareableHandle(handle: Out<u64>, descriptor: usize, kind: u32) [About::Nothing] |sim| {
        let number = i32::try_from(descriptor).ok().filter(|&number| kind == POSIX_FD && number >= 0);
        let (Some(number), false) = (number, handle.is_null()) else {
            return refused(status::INVALID_VALUE, format!("descriptor {descriptor}, handle type {kind}"));
        };
        // SAFETY: the caller lends an open descriptor for the call and closes it afterwards; where it is not open, the
        // kernel says so.
        let lent = unsafe { BorrowedFd::borrow_raw(number) };
        let own = lent.try_clone_to_owned().or_else(|e| refused(status::INVALID_VALUE, e.to_string()))?;
        handle.set(sim.machine()?.import_physical(own)?)
    };
    fn cuMemAddressReserve(pointer: Out<u64>, bytes: usize, alignment: usize, _wish: u64, flags: u64)
        [About::Nothing] |sim| {
        if flags != 0 || pointer.is_null() {
            return refused(status::INVALID_VALUE, format!("flags {flags:#x}"));
        }
        pointer.set(sim.machine()?.reserve(bytes, alignment)? as u64)
    };
    fn cuMemAddressFree(pointer: u64, bytes: usize) [About::Address(pointer)] |sim| {
        Ok(sim.machine()?.unreserve(address(pointer)?, bytes)?)
    };
    fn cuMemMap(pointer: u64, bytes: usize, offset: usize, handle: u64, flags: u64)
        [About::Address(pointer)] |sim| {
        if offset != 0 || flags != 0 {
            return refused(status::INVALID_VALUE, format!("offset {offset}, flags {flags:#x}"));
        }
        Ok(sim.machine()?.map(address(pointer)?, bytes, handle)?)
    };
    fn cuMemUnmap(pointer: u64, bytes: usize) [About::Address(pointer)] |sim| {
        Ok(sim.machine()?.unmap(address(pointer)?, bytes)?)
    };
    fn cuMemSetAccess(pointer: u64, bytes: usize, access: In<Access>, count: usize)
        [About::Address(pointer)] |sim| {
        let pointer = address(pointer)?;
        for access in access.get_all(count)? {
            let device = access.location.device(sim)?;
            // Read-only access is not supported for device memory.
            let allowed = match access.flags {
                0 => false,
                3 => true,
                flags => return refused(status::INVALID_VALUE, format!("access flags {flags}")),
            };
            sim.machine()?.set_access(pointer, bytes, device, allowed)?;
        }
        Ok(())
    };
    fn cuMemGetAccess(flags: Out<u64>, location: In<Location>, pointer: u64) [About::Address(pointer)] |sim| {
        let device = location.get()?.device(sim)?;
        flags.set(if sim.machine()?.has_access(address(pointer)?, device)? { READ_WRITE } else { 0 })
    };
}

//! Virtual memory: physical memory with handles, reserved addresses, mappings, and handles that cross processes as
//! numbers.

use std::{
    collections::{BTreeMap, HashMap},
    os::fd::{AsRawFd, OwnedFd},
};

use backend_cpu::strict::GRANULARITY;
use haulier_sim::log::About;
use parking_lot::Mutex;
use rustix::fs::fstat;

use crate::{
    abi::{Answer, In, Out, OutAny, null, refused, runtime, status},
    pointer::Location,
    record::{CONTENT, Place, Record},
    sim::{Sim, address},
};

/// HBM_HUGE, HBM_NORMAL and their like: what physical memory can be made of.
const MEMORY_ATTRIBUTES: [i32; 4] = [1, 4, 5, 10];
const HUGE_PAGES: u64 = 1;
/// Share types: a number, or 128 bytes for the fabric.
const DEFAULT: i32 = 1;
const FABRIC: i32 = 2;

/// `aclrtPhysicalMemProp`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct Properties {
    handle_type: i32,
    allocation_type: i32,
    attribute: i32,
    location: Location,
    reserve: u64,
}

/// `aclrtMemAccessDesc`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct Access {
    flags: i32,
    location: Location,
    reserved: [u8; 12],
}

/// `aclrtMemFabricHandle`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct FabricHandle([u8; 128]);

const _: () =
    assert!(size_of::<Properties>() == 32 && align_of::<Properties>() == 8 && size_of::<Access>() == 24);

/// What the machine does not keep of virtual memory.
#[derive(Debug, Default)]
pub(crate) struct Space {
    /// Bytes of each reservation, by its start.
    reserved: Mutex<BTreeMap<usize, usize>>,
    /// By handle: it has one export at most, of the one kind or the other.
    exports: Mutex<HashMap<u64, Export>>,
    /// The device on which a handle was imported.
    imported: Mutex<HashMap<u64, u32>>,
}

#[derive(Debug)]
struct Export {
    number: u64,
    record: Record,
    _physical: OwnedFd,
}

impl Properties {
    fn check(self, sim: &Sim) -> Answer<u32> {
        let known = MEMORY_ATTRIBUTES.contains(&self.attribute);
        if self.handle_type != 0 || self.allocation_type != 0 || self.reserve != 0 || !known {
            return refused(status::PARAMETER, format!("{self:?}"));
        }
        self.location.device(sim)
    }
}

/// A record's place in a number. Of the inode there is room for the end only.
fn number_of(place: Place) -> Answer<u64> {
    if place.fd > 0xffff {
        return refused(status::DRIVER, "too many open files for a shareable handle");
    }
    Ok(u64::from(place.pid) << 32 | u64::from(place.fd) << 16 | place.inode & 0xffff)
}

fn place_of(number: u64) -> Place {
    Place { pid: (number >> 32) as u32, fd: (number >> 16) as u32 & 0xffff, inode: number & 0xffff }
}

fn export(sim: &Sim, handle: u64, flags: u64) -> Answer<u64> {
    if flags > 1 {
        return refused(status::PARAMETER, format!("flags {flags:#x}"));
    }
    let machine = sim.machine()?;
    let mut exports = sim.space.exports.lock();
    if exports.contains_key(&handle) {
        return refused(status::PARAMETER, "the handle has a shareable handle already");
    }
    let physical = machine.export_physical(handle)?;
    let device = machine.physical(machine.physical_of(handle)?.device)?;
    let inode = fstat(&physical).or_else(|e| refused(status::DRIVER, e.to_string()))?.st_ino;
    let mut content = [0; CONTENT];
    content[..4].copy_from_slice(&physical.as_raw_fd().to_le_bytes());
    content[4..12].copy_from_slice(&inode.to_le_bytes());
    let record = Record::new(sim.settings.seed, device, flags == 1, &content)?;
    let number = number_of(record.place()?)?;
    exports.insert(handle, Export { number, record, _physical: physical });
    Ok(number)
}

fn import(sim: &Sim, number: u64, device: u32) -> Answer<u64> {
    let place = place_of(number);
    let found = place.read(sim.settings.seed, sim.bare_pid(), |inode| inode & 0xffff == place.inode)?;
    let word = |at: usize, len: usize| {
        found.content[at..at + len].iter().rev().fold(0u64, |number, &byte| number << 8 | u64::from(byte))
    };
    let physical = Place { pid: place.pid, fd: word(0, 4) as u32, inode: word(4, 8) };
    let machine = sim.machine()?;
    if found.physical != machine.physical(device)? && !sim.settings.peer {
        return refused(status::PARAMETER, "the memory is another device's, and the devices are no peers");
    }
    let handle = machine.import_physical(physical.open()?)?;
    sim.space.imported.lock().insert(handle, device);
    Ok(handle)
}

fn fabric(sim: &Sim, share_type: i32) -> Answer<bool> {
    match share_type {
        DEFAULT => Ok(false),
        FABRIC if sim.settings.fabric => Ok(true),
        FABRIC => refused(status::NOT_SUPPORTED, "there is no fabric"),
        other => refused(status::PARAMETER, format!("share type {other}")),
    }
}

fn reserve(sim: &Sim, out: Out<u64>, bytes: usize, alignment: usize, wish: u64, flags: u64) -> Answer {
    sim.context()?;
    if out.is_null() {
        return null("a null result pointer");
    }
    if alignment != 0 || wish != 0 || flags > HUGE_PAGES {
        return refused(
            status::PARAMETER,
            format!("alignment {alignment}, address {wish:#x}, flags {flags:#x}"),
        );
    }
    let start = sim.machine()?.reserve(bytes, GRANULARITY)?;
    sim.space.reserved.lock().insert(start, bytes);
    out.set(start as u64)
}

runtime! {
    fn aclrtMemGetAllocationGranularity(properties: In<Properties>, option: i32, bytes: Out<usize>)
        [About::Nothing] |sim| {
        properties.get()?.check(sim)?;
        if !(0..=1).contains(&option) {
            return refused(status::PARAMETER, format!("option {option}"));
        }
        bytes.set(GRANULARITY)
    };
    fn aclrtMallocPhysical(handle: Out<u64>, bytes: usize, properties: In<Properties>, flags: u64)
        [About::Nothing] |sim| {
        sim.context()?;
        let device = properties.get()?.check(sim)?;
        if handle.is_null() {
            return null("a null result pointer");
        }
        if flags != 0 {
            return refused(status::PARAMETER, format!("flags {flags:#x}"));
        }
        sim.beside_captures()?;
        handle.set(sim.machine()?.create_physical(device, bytes, true)?)
    };
    fn aclrtFreePhysical(handle: u64) [About::Handle(handle)] |sim| {
        sim.beside_captures()?;
        let machine = sim.machine()?;
        machine.release_physical(handle)?;
        if machine.physical_of(handle).is_err() {
            sim.space.exports.lock().remove(&handle);
        }
        Ok(())
    };
    fn aclrtMemRetainAllocationHandle(pointer: u64, handle: Out<u64>) [About::Address(pointer)] |sim| {
        if handle.is_null() {
            return null("a null result pointer");
        }
        handle.set(sim.machine()?.retain_physical(address(pointer)?)?)
    };
    fn aclrtReserveMemAddress(out: Out<u64>, bytes: usize, alignment: usize, wish: u64, flags: u64)
        [About::Nothing] |sim| {
        reserve(sim, out, bytes, alignment, wish, flags)
    };
    /// Since 9.0, and there optional: this runtime says so.
    fn aclrtReserveMemAddressNoUCMemory(_out: Out<u64>, _bytes: usize, _alignment: usize, _wish: u64, _flags: u64)
        [About::Nothing] |_| {
        refused(status::NOT_SUPPORTED, "this device has no such addresses")
    };
    fn aclrtReleaseMemAddress(pointer: u64) [About::Address(pointer)] |sim| {
        let start = address(pointer)?;
        let bytes = sim.space.reserved.lock().get(&start).copied();
        let Some(bytes) = bytes else { return refused(status::PARAMETER, "no reservation starts there") };
        sim.machine()?.unreserve(start, bytes)?;
        sim.space.reserved.lock().remove(&start);
        Ok(())
    };
    fn aclrtMapMem(pointer: u64, bytes: usize, offset: usize, handle: u64, flags: u64)
        [About::Address(pointer)] |sim| {
        sim.context()?;
        if offset != 0 || flags != 0 {
            return refused(status::PARAMETER, format!("offset {offset}, flags {flags:#x}"));
        }
        sim.beside_captures()?;
        let start = address(pointer)?;
        let machine = sim.machine()?;
        let own = machine.physical_of(handle)?.device;
        machine.map(start, bytes, handle)?;
        // The device that it was made or imported for can use it at once.
        let imported = sim.space.imported.lock().get(&handle).copied();
        Ok(machine.set_access(start, bytes, imported.unwrap_or(own), true)?)
    };
    fn aclrtUnmapMem(pointer: u64) [About::Address(pointer)] |sim| {
        sim.beside_captures()?;
        let start = address(pointer)?;
        let machine = sim.machine()?;
        let known = machine.attributes(start)?;
        if known.physical == 0 || known.base != start {
            return refused(status::PARAMETER, "no mapping starts there");
        }
        Ok(machine.unmap(start, known.len)?)
    };
    fn aclrtMemSetAccess(pointer: u64, bytes: usize, access: In<Access>, count: usize)
        [About::Address(pointer)] |sim| {
        let start = address(pointer)?;
        for access in access.get_all(count)? {
            let device = access.location.device(sim)?;
            let allowed = match access.flags {
                0 => false,
                3 => true,
                flags => return refused(status::PARAMETER, format!("access {flags}")),
            };
            sim.machine()?.set_access(start, bytes, device, allowed)?;
        }
        Ok(())
    };
    fn aclrtMemExportToShareableHandle(handle: u64, handle_type: i32, flags: u64, out: Out<u64>)
        [About::Handle(handle)] |sim| {
        if out.is_null() {
            return null("a null result pointer");
        }
        if handle_type != 0 {
            return refused(status::PARAMETER, format!("handle type {handle_type}"));
        }
        out.set(export(sim, handle, flags)?)
    };
    fn aclrtMemExportToShareableHandleV2(handle: u64, flags: u64, share_type: i32, out: OutAny)
        [About::Handle(handle)] |sim| {
        if out.of::<u64>().is_null() {
            return null("a null result pointer");
        }
        if !fabric(sim, share_type)? {
            return out.of().set(export(sim, handle, flags)?);
        }
        let mut bytes = [0; 128];
        bytes[..8].copy_from_slice(&export(sim, handle, flags)?.to_le_bytes());
        out.of().set(FabricHandle(bytes))
    };
    fn aclrtMemImportFromShareableHandle(number: u64, device: i32, handle: Out<u64>) [About::Nothing] |sim| {
        if handle.is_null() {
            return null("a null result pointer");
        }
        handle.set(import(sim, number, sim.device(device)?)?)
    };
    fn aclrtMemImportFromShareableHandleV2(shared: In<u64>, share_type: i32, flags: u64, handle: Out<u64>)
        [About::Nothing] |sim| {
        let (_, device) = sim.context()?;
        if handle.is_null() {
            return null("a null result pointer");
        }
        // The number stands first in a fabric handle too.
        fabric(sim, share_type)?;
        if flags != 0 {
            return refused(status::PARAMETER, format!("flags {flags:#x}"));
        }
        handle.set(import(sim, shared.get()?, device)?)
    };
    fn aclrtMemSetPidToShareableHandle(number: u64, pids: In<i32>, count: usize) [About::Nothing] |sim| {
        match sim.space.exports.lock().values().find(|export| export.number == number) {
            Some(export) if count > 0 => export.record.allow(&pids.get_all(count)?),
            _ => refused(status::PARAMETER, "no pids, or no export of this process's"),
        }
    };
}

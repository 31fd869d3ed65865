//! Pinned host memory: registered, or allocated as such.

use std::{collections::BTreeMap, ffi::c_void, ptr};

use parking_lot::Mutex;
use rustix::{
    mm::{MapFlags, MsyncFlags, ProtFlags, mmap_anonymous, msync, munmap},
    param::page_size,
};

use crate::{
    abi::{Answer, Out, driver, refused, status},
    log::About,
    sim::{Sim, address},
};

const DEVICEMAP: u32 = 2;
const IOMEMORY: u32 = 4;
const ALL_REGISTER_FLAGS: u32 = 0xf;
const ALL_ALLOC_FLAGS: u32 = 0x7;

/// Ids of pinned ranges, apart from the machine's ids of allocations.
const FIRST_BUFFER: u64 = 1 << 40;

/// One pinned range.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Range {
    pub(crate) base: usize,
    pub(crate) len: usize,
    pub(crate) device: u32,
    pub(crate) context: u64,
    pub(crate) buffer: u64,
    flags: u32,
    /// Whether the driver allocated it.
    allocated: bool,
}

/// The pinned ranges of a process. Whether they overlap is the machine's to say.
#[derive(Debug, Default)]
pub(crate) struct Pinned {
    ranges: Mutex<(BTreeMap<usize, Range>, u64)>,
}

impl Pinned {
    /// The range around an address.
    pub(crate) fn around(&self, address: usize) -> Option<Range> {
        let ranges = self.ranges.lock();
        let (_, range) = ranges.0.range(..=address).next_back()?;
        (address - range.base < range.len).then_some(*range)
    }

    /// Whether all of a range is pinned by one registration.
    pub(crate) fn covers(&self, address: usize, len: usize) -> bool {
        self.around(address).is_some_and(|range| len <= range.len - (address - range.base))
    }

    pub(crate) fn device_of(&self, address: usize) -> Option<u32> {
        self.around(address).map(|range| range.device)
    }

    /// A destroyed context takes its registrations along.
    pub(crate) fn forget(&self, device: u32) {
        self.ranges.lock().0.retain(|_, range| range.device != device);
    }

    fn at(&self, base: usize) -> Option<Range> {
        self.ranges.lock().0.get(&base).copied()
    }

    fn remove(&self, base: usize) {
        self.ranges.lock().0.remove(&base);
    }
}

impl Sim {
    fn pin(&self, base: usize, len: usize, flags: u32, allocated: bool) -> Answer {
        let (context, device) = self.context()?;
        let (whole, whole_len) = self.pages(base, len);
        self.machine()?.register(whole, whole_len)?;
        let mut ranges = self.pinned.ranges.lock();
        ranges.1 += 1;
        let buffer = FIRST_BUFFER + ranges.1;
        ranges.0.insert(base, Range { base, len, device, context, buffer, flags, allocated });
        Ok(())
    }

    fn unpin(&self, base: usize) -> Answer {
        let (whole, _) = self.pages(base, 1);
        self.machine()?.unregister(whole)?;
        self.pinned.remove(base);
        Ok(())
    }

    /// What the machine is told of a range: the bytes, or the pages that they are on.
    fn pages(&self, base: usize, len: usize) -> (usize, usize) {
        if !self.settings.register_pages {
            return (base, len);
        }
        let page = page_size();
        let start = base - base % page;
        let end = base.checked_add(len).and_then(|end| end.checked_next_multiple_of(page));
        // A range without an end is refused by the machine in this form too.
        (start, end.map_or(len, |end| end - start))
    }
}

/// Whether every page of a range is mapped: the kernel's answer, which touches nothing.
fn is_mapped(base: usize, len: usize) -> bool {
    let page = page_size();
    let start = base - base % page;
    let Some(len) = len.checked_add(base - start) else { return false };
    // SAFETY: on ordinary memory this flushes nothing and reads nothing; an unmapped page is an error.
    unsafe { msync(ptr::with_exposed_provenance_mut(start), len, MsyncFlags::ASYNC) }.is_ok()
}

fn allocate(sim: &Sim, out: Out<*mut c_void>, bytes: usize, flags: u32) -> Answer {
    sim.context()?;
    if bytes == 0 || flags & !ALL_ALLOC_FLAGS != 0 || out.is_null() {
        return refused(status::INVALID_VALUE, format!("{bytes} bytes with flags {flags:#x}"));
    }
    sim.machine()?.forbidden_beside_captures()?;
    // SAFETY: the kernel chooses an unused range, so nothing that exists is replaced.
    let mapped = unsafe {
        mmap_anonymous(ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
    };
    let mapped = mapped.or_else(|e| refused(status::OUT_OF_MEMORY, e.to_string()))?;
    if let Err(e) = sim.pin(mapped.expose_provenance(), bytes, flags, true) {
        unmap(mapped.expose_provenance(), bytes);
        return Err(e);
    }
    out.set(mapped)
}

fn unmap(base: usize, len: usize) {
    // SAFETY: mapped by `allocate` with this length, and the caller gives it up.
    if let Err(e) = unsafe { munmap(ptr::with_exposed_provenance_mut(base), len) } {
        eprintln!("haulier-sim-cuda: munmap: {e}");
    }
}

driver! {
    fn cuMemHostRegister_v2(pointer: u64, bytes: usize, flags: u32) [About::Address(pointer)] |sim| {
        sim.context()?;
        sim.machine()?.forbidden_beside_captures()?;
        let base = address(pointer)?;
        if base == 0 || bytes == 0 || flags & !ALL_REGISTER_FLAGS != 0 {
            return refused(status::INVALID_VALUE, format!("{bytes} bytes with flags {flags:#x}"));
        }
        if flags & IOMEMORY != 0 {
            return refused(status::NOT_SUPPORTED, "there is no I/O memory");
        }
        if sim.machine()?.is_device_address(base) {
            return refused(status::INVALID_VALUE, "device memory");
        }
        if !is_mapped(base, bytes) {
            return refused(status::INVALID_VALUE, "no memory is mapped there");
        }
        sim.pin(base, bytes, flags, false)
    };
    fn cuMemHostUnregister(pointer: u64) [About::Address(pointer)] |sim| {
        sim.context()?;
        let base = address(pointer)?;
        match sim.pinned.at(base) {
            Some(range) if !range.allocated => sim.unpin(base),
            _ => refused(status::HOST_MEMORY_NOT_REGISTERED, "no registration starts there"),
        }
    };
    fn cuMemHostAlloc(pointer: Out<*mut c_void>, bytes: usize, flags: u32) [About::Nothing] |sim| {
        allocate(sim, pointer, bytes, flags)
    };
    fn cuMemAllocHost_v2(pointer: Out<*mut c_void>, bytes: usize) [About::Nothing] |sim| {
        allocate(sim, pointer, bytes, DEVICEMAP)
    };
    fn cuMemFreeHost(pointer: u64) [About::Address(pointer)] |sim| {
        sim.context()?;
        let base = address(pointer)?;
        match sim.pinned.at(base) {
            Some(range) if range.allocated => {
                sim.unpin(base)?;
                unmap(base, range.len);
                Ok(())
            }
            _ => refused(status::INVALID_VALUE, "not allocated by the driver"),
        }
    };
    fn cuMemHostGetDevicePointer_v2(device: Out<u64>, pointer: u64, flags: u32)
        [About::Address(pointer)] |sim| {
        sim.context()?;
        let base = address(pointer)?;
        if flags != 0 || sim.pinned.around(base).is_none() {
            return refused(status::INVALID_VALUE, "not pinned");
        }
        device.set(pointer)
    };
    fn cuMemHostGetFlags(flags: Out<u32>, pointer: u64) [About::Address(pointer)] |sim| {
        sim.context()?;
        match sim.pinned.around(address(pointer)?) {
            Some(range) => flags.set(range.flags),
            None => refused(status::INVALID_VALUE, "not pinned"),
        }
    };
}

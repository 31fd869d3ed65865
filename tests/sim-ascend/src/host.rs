//! Pinned host memory: registered, or allocated as such.

use std::{collections::BTreeMap, ptr};

use backend_cpu::strict::GRANULARITY;
use haulier_sim::log::About;
use parking_lot::Mutex;
use rustix::mm::{MapFlags, MsyncFlags, ProtFlags, mmap_anonymous, msync, munmap};

use crate::{
    abi::{Answer, Out, OutAny, null, refused, runtime, status},
    memory::PAGE,
    sim::{Sim, address},
};

/// Types of `aclrtHostRegister`.
const TYPE_MAPPED: i32 = 0;
const TYPE_IOMEMORY: i32 = 4;
const TYPE_READONLY: i32 = 8;
/// Flags of `aclrtHostRegisterV2`.
const MAPPED: u32 = 2;
const IOMEMORY: u32 = 4;
const READONLY: u32 = 8;
const PINNED: u32 = 0x1000_0000;

/// One pinned range.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Range {
    base: usize,
    len: usize,
    device: u32,
    made: Made,
}

#[derive(Debug, Clone, Copy)]
enum Made {
    /// By `aclrtMallocHost`; what was mapped for it.
    Allocated { mapped: usize },
    /// By `aclrtHostRegister`; start and length of what it was mapped to on the device, if it was. No copy takes that.
    Registered { device_pointer: Option<(usize, usize)> },
}

/// The pinned ranges of a process.
#[derive(Debug, Default)]
pub(crate) struct Pinned(Mutex<BTreeMap<usize, Range>>);

impl Pinned {
    /// The range around an address.
    pub(crate) fn around(&self, address: usize) -> Option<Range> {
        let ranges = self.0.lock();
        let (_, range) = ranges.range(..=address).next_back()?;
        (address - range.base < range.len).then_some(*range)
    }

    /// Whether all of a range is pinned.
    pub(crate) fn covers(&self, address: usize, len: usize) -> bool {
        self.around(address).is_some_and(|range| len <= range.len - (address - range.base))
    }

    pub(crate) fn device_of(&self, address: usize) -> Option<u32> {
        self.around(address).map(|range| range.device)
    }

    /// A device that is reset takes its registrations along. Allocations stay until they are freed.
    pub(crate) fn forget(&self, device: u32) {
        let stays = |range: &Range| range.device != device || matches!(range.made, Made::Allocated { .. });
        self.0.lock().retain(|_, range| stays(range));
    }

    /// How many ranges are allocated.
    pub(crate) fn allocations(&self) -> usize {
        self.0.lock().values().filter(|range| matches!(range.made, Made::Allocated { .. })).count()
    }

    fn is_allocated(&self, address: usize, len: usize) -> bool {
        let whole = self.covers(address, len);
        whole && self.around(address).is_some_and(|range| matches!(range.made, Made::Allocated { .. }))
    }
}

/// Whether every page of a range is mapped: the kernel's answer, which touches nothing.
fn is_mapped(base: usize, len: usize) -> bool {
    // SAFETY: on ordinary memory this flushes nothing and reads nothing; an unmapped page is an error.
    unsafe { msync(ptr::with_exposed_provenance_mut(base), len, MsyncFlags::ASYNC) }.is_ok()
}

impl Sim {
    fn register(&self, pointer: u64, bytes: usize, mapped: bool) -> Answer<Option<usize>> {
        let (_, device) = self.context()?;
        if pointer == 0 {
            return null("a null address");
        }
        let base = address(pointer)?;
        if bytes == 0 || !base.is_multiple_of(PAGE) {
            return refused(
                status::PARAMETER,
                format!("{bytes} bytes at {base:#x}, which is no page's start"),
            );
        }
        self.beside_captures()?;
        let machine = self.machine()?;
        if machine.is_device_address(base) || !is_mapped(base, bytes) {
            return refused(status::PARAMETER, "no host memory is mapped there");
        }
        match (self.pinned.is_allocated(base, bytes), self.settings.register_pinned_only) {
            (false, true) => {
                return refused(status::NOT_SUPPORTED, "this kernel registers pinned memory only");
            }
            (true, false) => {
                return refused(status::ALREADY_REGISTERED, "the runtime allocated it as pinned");
            }
            // It is known as pinned already, and stays so.
            (true, true) => return Ok(None),
            (false, false) => {}
        }
        machine.register(base, bytes)?;
        let device_pointer = if mapped {
            let len = bytes.next_multiple_of(GRANULARITY);
            Some((machine.reserve(len, GRANULARITY)?, len))
        } else {
            None
        };
        let range = Range { base, len: bytes, device, made: Made::Registered { device_pointer } };
        self.pinned.0.lock().insert(base, range);
        Ok(device_pointer.map(|(start, _)| start))
    }

    fn allocate_host(&self, out: Out<u64>, bytes: usize) -> Answer {
        let (_, device) = self.context()?;
        if out.is_null() || bytes == 0 {
            return null("a null result pointer, or no bytes");
        }
        self.beside_captures()?;
        // Only what fills a page begins at one.
        let skip = if bytes < PAGE { 64 } else { 0 };
        // SAFETY: the kernel chooses an unused range, so nothing that exists is replaced.
        let mapped = unsafe {
            mmap_anonymous(
                ptr::null_mut(),
                bytes + skip,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        };
        let mapped = mapped.or_else(|e| refused(status::OUT_OF_MEMORY, e.to_string()))?.expose_provenance();
        let base = mapped + skip;
        let range = Range { base, len: bytes, device, made: Made::Allocated { mapped } };
        self.pinned.0.lock().insert(base, range);
        out.set(base as u64)
    }
}

runtime! {
    fn aclrtHostRegister(pointer: u64, bytes: u64, kind: i32, device: Out<u64>) [About::Address(pointer)] |sim| {
        match kind {
            TYPE_MAPPED | TYPE_READONLY => {}
            TYPE_IOMEMORY => return refused(status::NOT_SUPPORTED, "there is no I/O memory"),
            other => return refused(status::PARAMETER, format!("type {other}")),
        }
        if device.is_null() {
            return null("a null result pointer");
        }
        let mapped = sim.register(pointer, address(bytes)?, true)?;
        device.set(mapped.unwrap_or(0) as u64)
    };
    fn aclrtHostRegisterV2(pointer: u64, bytes: u64, flags: u32) [About::Address(pointer)] |sim| {
        if flags & IOMEMORY != 0 {
            return refused(status::NOT_SUPPORTED, "there is no I/O memory");
        }
        if flags == 0 || flags & !(MAPPED | READONLY | PINNED) != 0 {
            return refused(status::PARAMETER, format!("flags {flags:#x}"));
        }
        sim.register(pointer, address(bytes)?, flags & MAPPED != 0)?;
        Ok(())
    };
    fn aclrtHostGetDevicePointer(pointer: u64, device: Out<u64>, flags: u32) [About::Address(pointer)] |sim| {
        sim.context()?;
        let address = address(pointer)?;
        match sim.pinned.around(address) {
            Some(Range { base, made: Made::Registered { device_pointer: Some((start, _)) }, .. }) if flags == 0 => {
                device.set((start + (address - base)) as u64)
            }
            _ => refused(status::PARAMETER, "not registered as mapped"),
        }
    };
    fn aclrtHostUnregister(pointer: u64) [About::Address(pointer)] |sim| {
        sim.context()?;
        if pointer == 0 {
            return null("a null address");
        }
        let base = address(pointer)?;
        let range = sim.pinned.0.lock().get(&base).copied();
        match range {
            Some(Range { made: Made::Registered { device_pointer }, .. }) => {
                sim.beside_captures()?;
                let machine = sim.machine()?;
                machine.unregister(base)?;
                sim.pinned.0.lock().remove(&base);
                if let Some((start, len)) = device_pointer {
                    machine.unreserve(start, len)?;
                }
                Ok(())
            }
            Some(_) if sim.settings.register_pinned_only => Ok(()),
            _ => refused(status::NOT_REGISTERED, "no registration starts there"),
        }
    };
    fn aclrtMallocHost(out: Out<u64>, bytes: usize) [About::Nothing] |sim| sim.allocate_host(out, bytes);
    fn aclrtMallocHostWithCfg(out: Out<u64>, bytes: u64, _config: OutAny) [About::Nothing] |sim| {
        sim.allocate_host(out, address(bytes)?)
    };
    fn aclrtFreeHost(pointer: u64) [About::Address(pointer)] |sim| {
        if pointer == 0 {
            return null("a null address");
        }
        let base = address(pointer)?;
        let range = sim.pinned.0.lock().get(&base).copied();
        let Some(Range { len, made: Made::Allocated { mapped }, .. }) = range else {
            return refused(status::PARAMETER, "not allocated by the runtime");
        };
        sim.pinned.0.lock().remove(&base);
        // SAFETY: mapped by `allocate_host` with this length, and the caller gives it up.
        let unmapped = unsafe { munmap(ptr::with_exposed_provenance_mut(mapped), base - mapped + len) };
        unmapped.or_else(|e| refused(status::DRIVER, e.to_string()))
    };
}

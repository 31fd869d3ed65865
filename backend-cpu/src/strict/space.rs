//! Virtual memory management: addresses that are reserved, physical memory that has a handle, and what of the one is
//! mapped to the other.

use std::{
    collections::{BTreeMap, HashMap},
    fs,
    os::fd::{AsFd, AsRawFd, OwnedFd},
    sync::Arc,
};

use hal::BufferId;
use parking_lot::Mutex;
use rustix::io::Errno;

use super::{
    arena::Arena,
    log::{Argument, Op},
    machine::Machine,
    memory::{Block, Memory, MemoryKind, Residence, Store},
    refusal::{Answer, Why},
};
use crate::memfd;

/// Sizes and addresses of virtual memory are multiples of this.
pub const GRANULARITY: usize = 2 << 20;

/// Addresses that a process can reserve, made when it first does.
const ADDRESSES: usize = 256 << 30;

/// What the descriptors of physical memory are called, so that an importer can tell whose they are.
const NAME: &str = "haulier-physical";

/// All virtual memory.
#[derive(Debug, Default)]
pub(super) struct Space {
    arena: Option<Arena>,
    /// Bytes of each reservation, by its start.
    reserved: BTreeMap<usize, usize>,
    /// By handle.
    chunks: HashMap<u64, Chunk>,
    last: u64,
}

/// Physical memory that somebody has a handle to.
#[derive(Debug)]
struct Chunk {
    physical: Physical,
    store: Arc<Store>,
    handles: u64,
}

/// What is known of physical memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Physical {
    /// Its device, by logical id.
    pub device: u32,
    /// Its bytes.
    pub len: usize,
    /// Whether it was made to be exported.
    pub shareable: bool,
    /// Whether another process made it.
    pub imported: bool,
}

/// How a block of virtual memory came to be.
#[derive(Debug)]
pub(super) struct Mapped {
    pub(super) physical: u64,
    /// Start and bytes of the reservation.
    pub(super) range: (usize, usize),
    what: Physical,
    access: Mutex<Vec<u32>>,
}

impl Mapped {
    /// Whether a device was given access.
    pub(super) fn may_use(&self, device: u32) -> bool {
        self.access.lock().contains(&device)
    }
}

impl Space {
    pub(super) fn contains(&self, addr: usize) -> bool {
        self.arena.as_ref().is_some_and(|arena| arena.contains(addr))
    }

    /// The reservation around a range.
    fn around(&self, addr: usize, len: usize) -> Option<(usize, usize)> {
        let (&start, &size) = self.reserved.range(..=addr).next_back()?;
        (addr.checked_add(len)? <= start + size).then_some((start, size))
    }
}

impl Memory {
    /// Every piece of physical memory that has a handle or is mapped, once.
    fn physical(&self) -> HashMap<u64, (Physical, &Arc<Store>)> {
        let held = self.space.chunks.iter().map(|(&id, chunk)| (id, (chunk.physical, &chunk.store)));
        let mapped = self.blocks.values().filter_map(|block| {
            let mapped = block.mapped.as_ref()?;
            Some((mapped.physical, (mapped.what, &block.store)))
        });
        held.chain(mapped).collect()
    }

    /// Bytes of a device's physical memory that is in use.
    pub(super) fn physical_bytes(&self, device: u32) -> usize {
        let own = |(what, _): &(Physical, _)| what.device == device && !what.imported;
        self.physical().into_values().filter(own).map(|(what, _)| what.len).sum()
    }

    /// How much of other processes' physical memory is open.
    pub(super) fn imported_physical(&self) -> usize {
        self.physical().values().filter(|(what, _)| what.imported).count()
    }

    fn keep(&mut self, physical: Physical, store: Store) -> u64 {
        self.space.last += 1;
        let chunk = Chunk { physical, store: Arc::new(store), handles: 1 };
        self.space.chunks.insert(self.space.last, chunk);
        self.space.last
    }
}

impl Machine {
    /// A call: physical memory of a device, and its handle. No device need be current.
    pub fn create_physical(&self, device: u32, len: usize, shareable: bool) -> Answer<u64> {
        self.call(Op::CreatePhysical, Argument::Device(device), || {
            let on = self.seat(device)?.physical;
            self.beside_captures()?;
            self.granular(0, len)?;
            let mut memory = self.0.memory.lock();
            let free = memory.free(device);
            if len > free {
                return Err(self.refuse(Why::OutOfMemory, format!("asked for {len} bytes, {free} are free")));
            }
            let failed = |e: Errno| self.refuse(Why::OutOfMemory, format!("{len} bytes: {e}"));
            let fd = memfd::create_named(&self.name(on), len).map_err(failed)?;
            let store = Store::new(device, fd, len).map_err(failed)?;
            Ok(memory.keep(Physical { device, len, shareable, imported: false }, store))
        })
    }

    /// A call: gives a handle back. The memory stays while it is mapped or has another handle.
    pub fn release_physical(&self, handle: u64) -> Answer<()> {
        self.call(Op::ReleasePhysical, Argument::Handle(handle), || {
            self.beside_captures()?;
            let mut memory = self.0.memory.lock();
            let Some(chunk) = memory.space.chunks.get_mut(&handle) else {
                return Err(self.no_handle(handle));
            };
            chunk.handles -= 1;
            if chunk.handles == 0 {
                memory.space.chunks.remove(&handle);
            }
            Ok(())
        })
    }

    /// A call: a handle to what is mapped at an address, to be given back like any.
    pub fn retain_physical(&self, addr: usize) -> Answer<u64> {
        self.call(Op::RetainPhysical, Argument::Address(addr), || {
            let mut memory = self.0.memory.lock();
            let found = memory.around(addr).and_then(|block| {
                let mapped = block.mapped.as_ref()?;
                Some((mapped.physical, mapped.what, Arc::clone(&block.store)))
            });
            let Some((handle, physical, store)) = found else {
                return Err(self.refuse(Why::InvalidValue, format!("nothing is mapped at {addr:#x}")));
            };
            let chunk = Chunk { physical, store, handles: 0 };
            memory.space.chunks.entry(handle).or_insert(chunk).handles += 1;
            Ok(handle)
        })
    }

    /// What a handle is of. No call.
    pub fn physical_of(&self, handle: u64) -> Answer<Physical> {
        let memory = self.0.memory.lock();
        memory.space.chunks.get(&handle).map(|chunk| chunk.physical).ok_or_else(|| self.no_handle(handle))
    }

    /// A call: a descriptor for physical memory that was made for it. It outlives memory and process.
    pub fn export_physical(&self, handle: u64) -> Answer<OwnedFd> {
        self.call(Op::Export, Argument::Handle(handle), || {
            let memory = self.0.memory.lock();
            let Some(chunk) = memory.space.chunks.get(&handle) else { return Err(self.no_handle(handle)) };
            if !chunk.physical.shareable || chunk.physical.imported {
                return Err(self.refuse(Why::NotShareable, "it was not made to be exported"));
            }
            let copy = chunk.store.memfd.try_clone();
            copy.map_err(|e| self.refuse(Why::Other, format!("no descriptor: {e}")))
        })
    }

    /// A call: a handle to the physical memory behind a descriptor, whose device must be visible here.
    pub fn import_physical(&self, fd: OwnedFd) -> Answer<u64> {
        self.call(Op::Import, Argument::None, || {
            let refused = |text: String| self.refuse(Why::ImportRefused, text);
            let (_, len) = memfd::inspect(fd.as_fd(), 0).map_err(refused)?;
            let link = fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()));
            let link = link.map_err(|e| refused(format!("the descriptor: {e}")))?;
            let device = (0..self.device_count()).find(|&device| {
                let name = self.physical(device).map(|physical| self.name(physical));
                name.is_ok_and(|name| link.to_string_lossy() == format!("/memfd:{name} (deleted)"))
            });
            let Some(device) = device else {
                let text = format!("{} is of no device that is visible here", link.display());
                return Err(self.refuse(Why::InvalidDevice, text));
            };
            let len = usize::try_from(len).ok().filter(|&len| len > 0);
            let len = len.ok_or_else(|| refused("a size that cannot be mapped".into()))?;
            let store = Store::new(device, fd, len).map_err(|e| refused(e.to_string()))?;
            let physical = Physical { device, len, shareable: false, imported: true };
            Ok(self.0.memory.lock().keep(physical, store))
        })
    }

    /// A call: addresses with nothing behind them.
    pub fn reserve(&self, len: usize, align: usize) -> Answer<usize> {
        self.call(Op::Reserve, Argument::None, || {
            self.granular(align, len)?;
            let mut memory = self.0.memory.lock();
            let space = &mut memory.space;
            if space.arena.is_none() {
                let made = Arena::reserve(ADDRESSES);
                space.arena =
                    Some(made.map_err(|e| self.refuse(Why::OutOfMemory, format!("addresses: {e}")))?);
            }
            let taken = space.arena.as_mut().and_then(|arena| arena.take(len, align.max(GRANULARITY)));
            let Some(addr) = taken else {
                return Err(self.refuse(Why::OutOfMemory, format!("no {len} bytes of addresses are free")));
            };
            space.reserved.insert(addr, len);
            Ok(addr)
        })
    }

    /// A call: takes a whole reservation back, in which nothing is mapped any more.
    pub fn unreserve(&self, addr: usize, len: usize) -> Answer<()> {
        self.call(Op::Unreserve, Argument::Address(addr), || {
            let mut memory = self.0.memory.lock();
            let end = addr.saturating_add(len);
            if memory.space.reserved.get(&addr) != Some(&len) {
                return Err(
                    self.refuse(Why::InvalidValue, format!("{len} bytes at {addr:#x} are no reservation"))
                );
            }
            if memory.blocks.range(addr..end).next().is_some() {
                return Err(self.refuse(Why::InvalidValue, "something is still mapped there"));
            }
            memory.space.reserved.remove(&addr);
            if let Some(arena) = &mut memory.space.arena {
                arena.give(addr, len);
            }
            Ok(())
        })
    }

    /// A call: maps all of a piece of physical memory to reserved addresses. Nobody may use it there yet.
    pub fn map(&self, addr: usize, len: usize, handle: u64) -> Answer<()> {
        self.call(Op::Map, Argument::Address(addr), || {
            self.beside_captures()?;
            self.granular(addr, len)?;
            let mut memory = self.0.memory.lock();
            let Some(range) = memory.space.around(addr, len) else {
                return Err(
                    self.refuse(Why::InvalidValue, format!("{len} bytes at {addr:#x} are not reserved"))
                );
            };
            let Some(chunk) = memory.space.chunks.get(&handle) else { return Err(self.no_handle(handle)) };
            let (what, store) = (chunk.physical, Arc::clone(&chunk.store));
            if len != what.len {
                let text = format!("{len} bytes of physical memory that has {}", what.len);
                return Err(self.refuse(Why::InvalidValue, text));
            }
            if memory.blocks.range(addr..addr + len).next().is_some() || memory.around(addr).is_some() {
                return Err(self.refuse(Why::InvalidValue, "something is mapped there already"));
            }
            let buffer: BufferId = memory.next_buffer();
            let residence = match what {
                Physical { device, imported: true, .. } => Residence::Imported(device),
                Physical { device, shareable: true, .. } => {
                    Residence::Device(device, MemoryKind::VmmShareable)
                }
                Physical { device, .. } => Residence::Device(device, MemoryKind::Vmm),
            };
            let mapped = Mapped { physical: handle, range, what, access: Mutex::default() };
            let block = Block {
                device: store.device,
                base: addr,
                len,
                buffer,
                residence,
                store,
                mapped: Some(mapped),
            };
            memory.blocks.insert(addr, Arc::new(block));
            Ok(())
        })
    }

    /// A call: takes mappings away, of which the range must have whole ones only.
    pub fn unmap(&self, addr: usize, len: usize) -> Answer<()> {
        self.call(Op::Unmap, Argument::Address(addr), || {
            self.beside_captures()?;
            let mut memory = self.0.memory.lock();
            for base in self.mappings(&memory, addr, len)? {
                memory.blocks.remove(&base);
            }
            Ok(())
        })
    }

    /// A call: lets a device use what is mapped in a range, or no longer lets it.
    pub fn set_access(&self, addr: usize, len: usize, device: u32, allowed: bool) -> Answer<()> {
        self.call(Op::SetAccess, Argument::Address(addr), || {
            self.seat(device)?;
            self.beside_captures()?;
            let memory = self.0.memory.lock();
            for base in self.mappings(&memory, addr, len)? {
                if let Some(mapped) = memory.blocks.get(&base).and_then(|block| block.mapped.as_ref()) {
                    let mut access = mapped.access.lock();
                    access.retain(|&other| other != device);
                    if allowed {
                        access.push(device);
                    }
                }
            }
            Ok(())
        })
    }

    /// Whether a device may use what is mapped at an address. No call.
    pub fn has_access(&self, addr: usize, device: u32) -> Answer<bool> {
        let block = self.block(addr)?;
        Ok(block.mapped.as_ref().map_or(block.device == device, |mapped| mapped.may_use(device)))
    }

    /// The mappings that make up a range without a gap.
    fn mappings(&self, memory: &Memory, addr: usize, len: usize) -> Answer<Vec<usize>> {
        let end = addr.saturating_add(len);
        let (mut at, mut bases) = (addr, Vec::new());
        while at < end {
            match memory.blocks.get(&at) {
                Some(block) if block.mapped.is_some() && at + block.len <= end => {
                    bases.push(at);
                    at += block.len;
                }
                _ => return Err(self.refuse(Why::InvalidValue, format!("no whole mapping at {at:#x}"))),
            }
        }
        if bases.is_empty() {
            return Err(self.refuse(Why::InvalidValue, "an empty range"));
        }
        Ok(bases)
    }

    fn granular(&self, addr: usize, len: usize) -> Answer<()> {
        let fits = |number: usize| number.is_multiple_of(GRANULARITY);
        if len == 0 || !fits(len) || !fits(addr) {
            return Err(self.refuse(
                Why::InvalidValue,
                format!("{len} bytes at {addr:#x} are no multiples of {GRANULARITY}"),
            ));
        }
        Ok(())
    }

    fn name(&self, physical: u32) -> String {
        format!("{NAME}-{:x}-{physical}", self.0.spec.seed)
    }

    fn no_handle(&self, handle: u64) -> super::Refusal {
        self.refuse(Why::InvalidValue, format!("{handle:#x} is no handle of physical memory"))
    }
}

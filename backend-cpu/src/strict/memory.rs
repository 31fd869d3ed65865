//! Device memory. An allocation has two faces: an address that faults when touched, and a hidden mapping through which
//! the machine itself copies.

use std::{
    collections::{BTreeMap, HashMap},
    os::fd::OwnedFd,
    ptr, slice,
    sync::Arc,
};

use hal::BufferId;
use rustix::io::Errno;

use super::{
    arena::Arena,
    log::{Argument, Op},
    machine::Machine,
    refusal::{Answer, Dialect, Refusal, Why},
    space::{Mapped, Space},
};
use crate::memfd::{self, FileId, Mapping};

/// How an allocation was made, which decides how it can be shared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MemoryKind {
    /// Ordinary device memory; shared by opaque token or descriptor.
    #[default]
    Normal,
    /// Virtual memory made without a shareable handle type; cannot be shared.
    Vmm,
    /// Virtual memory made with one; shared by descriptor only.
    VmmShareable,
    /// From a pool that does not share.
    Pool,
    /// Managed; cannot be shared.
    Managed,
}

/// Where an address lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Residence {
    /// Host memory that the machine does not know.
    Unregistered,
    /// Registered host memory.
    Registered,
    /// Memory of this device, by logical id.
    Device(u32, MemoryKind),
    /// Another process's memory of this device.
    Imported(u32),
}

/// What the machine knows of an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attributes {
    /// Where it lives.
    pub residence: Residence,
    /// The allocation's first byte, or the address itself for host memory.
    pub base: usize,
    /// The allocation's bytes, 0 for host memory.
    pub len: usize,
    /// The allocation's identity, `None` for host memory.
    pub buffer: Option<BufferId>,
    /// Start and bytes of the reservation that the address is in; for what is no virtual memory, those of the
    /// allocation.
    pub range: (usize, usize),
    /// The physical memory behind virtual memory, 0 for everything else.
    pub physical: u64,
}

/// The bytes behind one or more addresses, of this process or another one.
#[derive(Debug)]
pub(super) struct Store {
    pub(super) device: u32,
    pub(super) memfd: OwnedFd,
    pub(super) file: FileId,
    shadow: Mapping,
}

/// One allocation, one import, or one mapping of virtual memory.
#[derive(Debug)]
pub(super) struct Block {
    pub(super) device: u32,
    pub(super) base: usize,
    pub(super) len: usize,
    pub(super) buffer: BufferId,
    pub(super) residence: Residence,
    /// Queued work keeps the block, so memory that is freed too early still has bytes behind it.
    pub(super) store: Arc<Store>,
    /// For virtual memory: where it is mapped, and who may use it.
    pub(super) mapped: Option<Mapped>,
}

/// Bytes of device memory that follow one another, in several blocks where virtual memory is mapped in pieces.
#[derive(Debug, Clone)]
pub(super) struct Span(Vec<(Arc<Block>, usize, usize)>);

/// One side of a copy.
#[derive(Debug, Clone)]
pub(super) enum Side {
    Host(usize),
    Device(Span),
}

/// The memory of all devices.
#[derive(Debug)]
pub(super) struct Memory {
    /// By logical device.
    arenas: Vec<Arena>,
    /// By base address.
    pub(super) blocks: BTreeMap<usize, Arc<Block>>,
    /// How often each of them is open, by file.
    pub(super) imports: HashMap<FileId, (usize, u64)>,
    pub(super) space: Space,
    last_buffer: u64,
    freed_while_registered: u64,
}

impl Memory {
    pub(super) fn reserve(devices: usize, bytes: usize) -> Result<Self, Errno> {
        let arenas = (0..devices).map(|_| Arena::reserve(bytes)).collect::<Result<_, _>>()?;
        Ok(Memory {
            arenas,
            blocks: BTreeMap::new(),
            imports: HashMap::new(),
            space: Space::default(),
            last_buffer: 0,
            freed_while_registered: 0,
        })
    }

    /// The device whose address this is, allocated or not; for virtual memory, that of what is mapped there.
    pub(super) fn owner(&self, addr: usize) -> Option<u32> {
        let fixed = self.arenas.iter().position(|arena| arena.contains(addr)).map(|at| at as u32);
        fixed.or_else(|| self.around(addr).map(|block| block.device))
    }

    /// Whether the address is no host memory, whatever is or is not there.
    pub(super) fn is_device(&self, addr: usize) -> bool {
        self.space.contains(addr) || self.arenas.iter().any(|arena| arena.contains(addr))
    }

    /// A new allocation's identity.
    pub(super) fn next_buffer(&mut self) -> BufferId {
        self.last_buffer += 1;
        BufferId(self.last_buffer)
    }

    /// Bytes of the device that nothing takes.
    pub(super) fn free(&self, device: u32) -> usize {
        let taken = self.physical_bytes(device);
        self.arenas[device as usize].free().saturating_sub(taken)
    }

    pub(super) fn around(&self, addr: usize) -> Option<&Arc<Block>> {
        let (_, block) = self.blocks.range(..=addr).next_back()?;
        (addr < block.base + block.len).then_some(block)
    }

    fn arena(&mut self, device: u32) -> &mut Arena {
        &mut self.arenas[device as usize]
    }
}

impl Machine {
    /// A call: allocates `len` bytes on the current device, and answers with the address.
    pub fn allocate(&self, len: usize, kind: MemoryKind) -> Answer<usize> {
        self.allocate_aligned(len, 1, kind)
    }

    /// A call: as [`allocate`](Machine::allocate), at a multiple of `align`, a power of two, where that is more than the
    /// machine's own alignment.
    pub fn allocate_aligned(&self, len: usize, align: usize, kind: MemoryKind) -> Answer<usize> {
        self.call(Op::Allocate, Argument::None, || {
            let device = self.context()?;
            // A pool's memory comes in stream order, which captures can record.
            if kind != MemoryKind::Pool {
                self.beside_captures()?;
            }
            if len == 0 {
                return Err(self.refuse(Why::InvalidValue, "an allocation of 0 bytes"));
            }
            let memfd = |e: Errno| self.refuse(Why::OutOfMemory, format!("{len} bytes: {e}"));
            let fd = memfd::create(len).map_err(memfd)?;
            self.place(&mut self.0.memory.lock(), device, fd, len, align, Residence::Device(device, kind))
        })
    }

    /// A call: frees the allocation at `addr`. CUDA wants a current device for it, ACL does not.
    pub fn free(&self, addr: usize) -> Answer<()> {
        self.call(Op::Free, Argument::Address(addr), || {
            if self.dialect() == Dialect::Cuda {
                self.context()?;
            }
            self.beside_captures()?;
            let registered = |block: &Block| self.0.pins.lock().overlaps(block.base, block.len);
            let mut memory = self.0.memory.lock();
            match memory.blocks.get(&addr) {
                Some(block) if block.mapped.is_some() => {
                    Err(self.refuse(Why::InvalidValue, format!("{addr:#x} is mapped, unmap it")))
                }
                Some(block) if matches!(block.residence, Residence::Device(..)) => {
                    memory.freed_while_registered += u64::from(registered(block));
                    self.displace(&mut memory, addr);
                    Ok(())
                }
                Some(_) => Err(self.refuse(Why::InvalidValue, format!("{addr:#x} is imported, close it"))),
                None => Err(self.refuse(Why::InvalidValue, format!("no allocation starts at {addr:#x}"))),
            }
        })
    }

    /// A call: free and total bytes of the current device.
    pub fn memory_info(&self) -> Answer<(usize, usize)> {
        self.call(Op::MemoryInfo, Argument::None, || {
            let device = self.context()?;
            let memory = self.0.memory.lock();
            Ok((memory.free(device), memory.arenas[device as usize].total()))
        })
    }

    /// A call: what is known of an address. Needs no current device.
    pub fn attributes(&self, addr: usize) -> Answer<Attributes> {
        self.call(Op::Locate, Argument::Address(addr), || {
            let memory = self.0.memory.lock();
            if let Some(block) = memory.around(addr) {
                return Ok(Attributes {
                    residence: block.residence,
                    base: block.base,
                    len: block.len,
                    buffer: Some(block.buffer),
                    range: block.mapped.as_ref().map_or((block.base, block.len), |mapped| mapped.range),
                    physical: block.mapped.as_ref().map_or(0, |mapped| mapped.physical),
                });
            }
            if memory.is_device(addr) || addr == 0 {
                return Err(self.refuse(Why::InvalidValue, format!("nothing is allocated at {addr:#x}")));
            }
            let host = |residence| Attributes {
                residence,
                base: addr,
                len: 0,
                buffer: None,
                range: (addr, 0),
                physical: 0,
            };
            if self.0.pins.lock().overlaps(addr, 1) {
                return Ok(host(Residence::Registered));
            }
            if self.0.spec.foreign_pointers_fail {
                return Err(self.refuse(Why::InvalidValue, format!("{addr:#x} is not the driver's memory")));
            }
            Ok(host(Residence::Unregistered))
        })
    }

    /// A call: copies `len` bytes, and returns when they are there. Waits for no stream.
    ///
    /// # Safety
    /// Host memory must be allocated for the whole call, and nobody may write the source or touch the target meanwhile.
    pub unsafe fn copy(&self, to: usize, from: usize, len: usize) -> Answer<()> {
        self.call(Op::Copy, Argument::Address(self.device_side(to, from)), || {
            let device = self.context()?;
            self.beside_captures()?;
            let (to, from) = (self.side(to, len, device)?, self.side(from, len, device)?);
            // SAFETY: `side` checked device memory; the caller vouches for the host's.
            unsafe { transfer(&to, &from, len) };
            Ok(())
        })
    }

    /// The test's look at device memory, past streams and contexts.
    pub fn peek(&self, addr: usize, len: usize) -> Answer<Vec<u8>> {
        let mut bytes = vec![0; len];
        self.backing(addr, len)?.read(&mut bytes);
        Ok(bytes)
    }

    /// The test's write to device memory, past streams and contexts.
    pub fn poke(&self, addr: usize, bytes: &[u8]) -> Answer<()> {
        self.backing(addr, bytes.len())?.write(bytes);
        Ok(())
    }

    /// How many allocations there are, imports not counted.
    pub fn live_allocations(&self) -> usize {
        let memory = self.0.memory.lock();
        memory.blocks.values().filter(|block| matches!(block.residence, Residence::Device(..))).count()
    }

    /// How often memory was freed that was still registered.
    pub fn freed_while_registered(&self) -> u64 {
        self.0.memory.lock().freed_while_registered
    }

    /// The address of a copy that the log names: the device's, if it has one.
    pub(super) fn device_side(&self, to: usize, from: usize) -> usize {
        if self.0.memory.lock().is_device(from) { from } else { to }
    }

    /// Checks one side of a copy on `device`.
    pub(super) fn side(&self, addr: usize, len: usize, device: u32) -> Answer<Side> {
        if !self.is_device_address(addr) {
            if addr == 0 && len > 0 {
                return Err(self.refuse(Why::InvalidValue, "a null address"));
            }
            return Ok(Side::Host(addr));
        }
        Ok(Side::Device(self.reachable(addr, len, device)?))
    }

    /// Device memory that work on `device` may use.
    pub(super) fn reachable(&self, addr: usize, len: usize, device: u32) -> Answer<Span> {
        let span = self.backing(addr, len)?;
        for (block, ..) in &span.0 {
            match &block.mapped {
                None if block.device == device => {}
                Some(mapped) if mapped.may_use(device) => {}
                None => return Err(self.elsewhere(addr, block.device, device)),
                Some(_) => {
                    return Err(self.refuse(
                        Why::InvalidValue,
                        format!("device {device} has no access to the memory mapped at {:#x}", block.base),
                    ));
                }
            }
        }
        Ok(span)
    }

    /// `len` bytes of device memory.
    pub(super) fn backing(&self, addr: usize, len: usize) -> Answer<Span> {
        let memory = self.0.memory.lock();
        let mut parts = Vec::new();
        let mut at = addr;
        loop {
            let Some(block) = memory.around(at) else {
                let why = if at == addr { Why::InvalidValue } else { Why::OutOfRange };
                return Err(self.refuse(why, format!("nothing is allocated at {at:#x}")));
            };
            let offset = at - block.base;
            let left = len - (at - addr);
            let part = left.min(block.len - offset);
            parts.push((Arc::clone(block), offset, part));
            if part == left {
                return Ok(Span(parts));
            }
            // Only what is mapped piece by piece goes on behind its end.
            if block.mapped.is_none() {
                return Err(self.refuse(
                    Why::OutOfRange,
                    format!("{len} bytes at {addr:#x} leave the {} bytes at {:#x}", block.len, block.base),
                ));
            }
            at += part;
        }
    }

    /// The block around an address.
    pub(super) fn block(&self, addr: usize) -> Answer<Arc<Block>> {
        let memory = self.0.memory.lock();
        let block = memory.around(addr).map(Arc::clone);
        block.ok_or_else(|| self.refuse(Why::InvalidValue, format!("nothing is allocated at {addr:#x}")))
    }

    /// Whether an address is a device's, allocated or not. No call.
    pub fn is_device_address(&self, addr: usize) -> bool {
        self.0.memory.lock().is_device(addr)
    }

    /// The device that an address is of. No call.
    pub fn owner_of_address(&self, addr: usize) -> Option<u32> {
        self.0.memory.lock().owner(addr)
    }

    pub(super) fn elsewhere(&self, addr: usize, owner: u32, current: u32) -> Refusal {
        self.refuse(
            Why::WrongContext,
            format!("{addr:#x} is of device {owner} and device {current} is current"),
        )
    }

    /// Gives a file's memory an address on `device`.
    pub(super) fn place(
        &self,
        memory: &mut Memory,
        device: u32,
        fd: OwnedFd,
        len: usize,
        align: usize,
        residence: Residence,
    ) -> Answer<usize> {
        let failed = |e: Errno| self.refuse(Why::OutOfMemory, format!("{len} bytes: {e}"));
        let store = Arc::new(Store::new(device, fd, len).map_err(failed)?);
        let unit = self.0.spec.alignment;
        let align = align.max(unit);
        let free = memory.free(device);
        let whole = len.checked_next_multiple_of(unit).filter(|&whole| whole <= free);
        let Some(base) = whole.and_then(|whole| memory.arena(device).take(whole, align)) else {
            return Err(self.refuse(Why::OutOfMemory, format!("asked for {len} bytes, {free} are free")));
        };
        let buffer = memory.next_buffer();
        let block = Block { device, base, len, buffer, residence, store, mapped: None };
        memory.blocks.insert(base, Arc::new(block));
        Ok(base)
    }

    /// Takes the address back.
    pub(super) fn displace(&self, memory: &mut Memory, base: usize) {
        if let Some(block) = memory.blocks.remove(&base) {
            let len = block.len.next_multiple_of(self.0.spec.alignment);
            memory.arena(block.device).give(base, len);
        }
    }
}

impl Store {
    /// The first `len` bytes of a file.
    pub(super) fn new(device: u32, memfd: OwnedFd, len: usize) -> Result<Self, Errno> {
        let shadow = Mapping::new(&memfd, len)?;
        let file = memfd::identity(&memfd)?;
        Ok(Store { device, memfd, file, shadow })
    }
}

impl Span {
    // Offsets are checked by `backing` before a span is handed out, so the accessors' own check cannot fail.

    pub(super) fn read(&self, mut to: &mut [u8]) {
        for (block, offset, len) in &self.0 {
            let (part, rest) = to.split_at_mut(*len);
            let done = block.store.shadow.read(*offset, part);
            debug_assert!(done.is_some());
            to = rest;
        }
    }

    pub(super) fn write(&self, mut from: &[u8]) {
        for (block, offset, len) in &self.0 {
            let (part, rest) = from.split_at(*len);
            let done = block.store.shadow.write(*offset, part);
            debug_assert!(done.is_some());
            from = rest;
        }
    }

    pub(super) fn fill(&self, byte: u8) {
        for (block, offset, len) in &self.0 {
            let done = block.store.shadow.fill(*offset, *len, byte);
            debug_assert!(done.is_some());
        }
    }
}

/// Moves the bytes.
///
/// # Safety
/// As [`Machine::copy`].
pub(super) unsafe fn transfer(to: &Side, from: &Side, len: usize) {
    if len == 0 {
        return;
    }
    match (to, from) {
        (Side::Device(to), Side::Device(from)) => {
            // The two may be one block, whose lock cannot be taken twice.
            let mut bytes = vec![0; len];
            from.read(&mut bytes);
            to.write(&bytes);
        }
        (Side::Device(to), Side::Host(from)) => {
            // SAFETY: the caller vouches for the host memory, and that nobody writes it.
            to.write(unsafe { slice::from_raw_parts(ptr::with_exposed_provenance(*from), len) });
        }
        (Side::Host(to), Side::Device(from)) => {
            let to = ptr::with_exposed_provenance_mut(*to);
            // SAFETY: the caller vouches for the host memory, and that nobody touches it.
            from.read(unsafe { slice::from_raw_parts_mut(to, len) });
        }
        (Side::Host(to), Side::Host(from)) => {
            let (to, from) =
                (ptr::with_exposed_provenance_mut::<u8>(*to), ptr::with_exposed_provenance::<u8>(*from));
            // SAFETY: the caller vouches for both; they may overlap.
            unsafe { ptr::copy(from, to, len) };
        }
    }
}

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
}

/// One allocation, or one import.
#[derive(Debug)]
pub(super) struct Block {
    pub(super) device: u32,
    pub(super) base: usize,
    pub(super) len: usize,
    pub(super) buffer: BufferId,
    pub(super) residence: Residence,
    pub(super) memfd: OwnedFd,
    pub(super) file: FileId,
    /// Queued work keeps the block, so memory that is freed too early still has bytes behind it.
    shadow: Mapping,
}

/// One side of a copy.
#[derive(Debug, Clone)]
pub(super) enum Side {
    Host(usize),
    Device(Arc<Block>, usize),
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
            last_buffer: 0,
            freed_while_registered: 0,
        })
    }

    /// The device whose address this is, allocated or not.
    pub(super) fn owner(&self, addr: usize) -> Option<u32> {
        self.arenas.iter().position(|arena| arena.contains(addr)).map(|at| at as u32)
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
        self.call(Op::Allocate, Argument::None, || {
            let device = self.context()?;
            self.beside_captures()?;
            if len == 0 {
                return Err(self.refuse(Why::InvalidValue, "an allocation of 0 bytes"));
            }
            let memfd = |e: Errno| self.refuse(Why::OutOfMemory, format!("{len} bytes: {e}"));
            let fd = memfd::create(len).map_err(memfd)?;
            self.place(&mut self.0.memory.lock(), device, fd, len, Residence::Device(device, kind))
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
            let mut memory = self.0.memory.lock();
            let arena = memory.arena(device);
            Ok((arena.free(), arena.total()))
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
                });
            }
            if memory.owner(addr).is_some() || addr == 0 {
                return Err(self.refuse(Why::InvalidValue, format!("nothing is allocated at {addr:#x}")));
            }
            let host = |residence| Attributes { residence, base: addr, len: 0, buffer: None };
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
        let (block, offset) = self.backing(addr, len)?;
        block.read(offset, &mut bytes);
        Ok(bytes)
    }

    /// The test's write to device memory, past streams and contexts.
    pub fn poke(&self, addr: usize, bytes: &[u8]) -> Answer<()> {
        let (block, offset) = self.backing(addr, bytes.len())?;
        block.write(offset, bytes);
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
        if self.0.memory.lock().owner(from).is_some() { from } else { to }
    }

    /// Checks one side of a copy on `device`.
    pub(super) fn side(&self, addr: usize, len: usize, device: u32) -> Answer<Side> {
        if self.0.memory.lock().owner(addr).is_none() {
            if addr == 0 && len > 0 {
                return Err(self.refuse(Why::InvalidValue, "a null address"));
            }
            return Ok(Side::Host(addr));
        }
        let (block, offset) = self.backing(addr, len)?;
        if block.device != device {
            return Err(self.elsewhere(addr, block.device, device));
        }
        Ok(Side::Device(block, offset))
    }

    /// The block behind `len` bytes of device memory.
    pub(super) fn backing(&self, addr: usize, len: usize) -> Answer<(Arc<Block>, usize)> {
        let memory = self.0.memory.lock();
        let block = memory
            .around(addr)
            .ok_or_else(|| self.refuse(Why::InvalidValue, format!("nothing is allocated at {addr:#x}")))?;
        let offset = addr - block.base;
        if len > block.len - offset {
            return Err(self.refuse(
                Why::OutOfRange,
                format!("{len} bytes at {addr:#x} leave the {} bytes at {:#x}", block.len, block.base),
            ));
        }
        Ok((Arc::clone(block), offset))
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
        residence: Residence,
    ) -> Answer<usize> {
        let failed = |e: Errno| self.refuse(Why::OutOfMemory, format!("{len} bytes: {e}"));
        let shadow = Mapping::new(&fd, len).map_err(failed)?;
        let file = memfd::identity(&fd).map_err(failed)?;
        let align = self.0.spec.alignment;
        let arena = memory.arena(device);
        let taken = len.checked_next_multiple_of(align).and_then(|len| arena.take(len, align));
        let Some(base) = taken else {
            let free = arena.free();
            return Err(self.refuse(Why::OutOfMemory, format!("asked for {len} bytes, {free} are free")));
        };
        memory.last_buffer += 1;
        let buffer = BufferId(memory.last_buffer);
        let block = Block { device, base, len, buffer, residence, memfd: fd, file, shadow };
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

impl Block {
    // Offsets are checked by `backing` before a block is handed out, so the accessors' own check cannot fail.

    pub(super) fn read(&self, offset: usize, to: &mut [u8]) {
        let done = self.shadow.read(offset, to);
        debug_assert!(done.is_some());
    }

    pub(super) fn write(&self, offset: usize, from: &[u8]) {
        let done = self.shadow.write(offset, from);
        debug_assert!(done.is_some());
    }

    pub(super) fn fill(&self, offset: usize, len: usize, byte: u8) {
        let done = self.shadow.fill(offset, len, byte);
        debug_assert!(done.is_some());
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
        (Side::Device(to, at), Side::Device(from, offset)) => {
            // The two may be one block, whose lock cannot be taken twice.
            let mut bytes = vec![0; len];
            from.read(*offset, &mut bytes);
            to.write(*at, &bytes);
        }
        (Side::Device(to, at), Side::Host(from)) => {
            // SAFETY: the caller vouches for the host memory, and that nobody writes it.
            to.write(*at, unsafe { slice::from_raw_parts(ptr::with_exposed_provenance(*from), len) });
        }
        (Side::Host(to), Side::Device(from, offset)) => {
            let to = ptr::with_exposed_provenance_mut(*to);
            // SAFETY: the caller vouches for the host memory, and that nobody touches it.
            from.read(*offset, unsafe { slice::from_raw_parts_mut(to, len) });
        }
        (Side::Host(to), Side::Host(from)) => {
            let (to, from) =
                (ptr::with_exposed_provenance_mut::<u8>(*to), ptr::with_exposed_provenance::<u8>(*from));
            // SAFETY: the caller vouches for both; they may overlap.
            unsafe { ptr::copy(from, to, len) };
        }
    }
}

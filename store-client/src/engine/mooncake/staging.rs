//! Host memory that Mooncake and the device may both touch, registered once and lent out in blocks.

use std::{fmt, ptr, slice, sync::Arc};

use hal::{Deadline, Device, Region};
use offset_allocator::{Allocation, Allocator};
use parking_lot::{Condvar, Mutex};
use rustix::mm::{MapFlags, ProtFlags};

use super::session::Guard;
use crate::error::{Error, Result};

/// Blocks start at multiples of this many bytes, so that no two share a cache line.
const UNIT: usize = 64;

/// Anonymous memory of whole pages, zero at first.
pub(crate) struct Memory {
    start: *mut u8,
    len: usize,
}

// SAFETY: the memory is this value's alone, like a Vec's.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    pub(crate) fn new(len: usize) -> Result<Self> {
        let refused = || Error::OutOfMemory { asked: len as u64, available: 0 };
        let len = len.max(1).checked_next_multiple_of(rustix::param::page_size()).ok_or_else(refused)?;
        // SAFETY: new memory at an address that the kernel chooses touches none in use.
        let start = unsafe {
            rustix::mm::mmap_anonymous(
                ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        };
        let start = start.map_err(|_| refused())?.cast::<u8>();
        start.expose_provenance();
        Ok(Memory { start, len })
    }

    pub(crate) fn region(&self) -> Region {
        Region::host(self.start.addr(), self.len)
    }

    pub(crate) fn as_ptr(&self) -> *const u8 {
        self.start
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: it was mapped with this length, and nobody uses it any more.
        let _ = unsafe { rustix::mm::munmap(self.start.cast(), self.len) };
    }
}

/// The pool. Registering it, and taking that back, is the session's.
pub(crate) struct Staging {
    memory: Memory,
    allocator: Mutex<Allocator>,
    given_back: Condvar,
}

impl fmt::Debug for Staging {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Staging({} bytes)", self.memory.len)
    }
}

impl Staging {
    pub(crate) fn new(len: usize) -> Result<Self> {
        let memory = Memory::new(len)?;
        let units = u32::try_from(memory.len / UNIT).unwrap_or(u32::MAX);
        Ok(Staging { memory, allocator: Mutex::new(Allocator::new(units)), given_back: Condvar::new() })
    }

    pub(crate) fn region(&self) -> Region {
        self.memory.region()
    }

    /// The largest block that the pool lends; larger ones are made for the occasion.
    pub(crate) fn most(&self) -> usize {
        self.memory.len / 2
    }

    /// A block of `len` bytes, waiting for others to give theirs back until `deadline`.
    ///
    /// *Errors*: [`Error::ResourceExhausted`] once that has passed.
    pub(crate) fn take<D: Device>(self: &Arc<Self>, len: usize, deadline: Deadline) -> Result<Block<D>> {
        let units = u32::try_from(len.div_ceil(UNIT).max(1)).unwrap_or(u32::MAX);
        let mut allocator = self.allocator.lock();
        loop {
            if let Some(place) = allocator.allocate(units) {
                let addr = self.memory.start.addr() + place.offset as usize * UNIT;
                return Ok(Block { addr, len, owner: Owner::Pool(Lent(Arc::clone(self), place)) });
            }
            let passed = match deadline.instant() {
                Some(at) => self.given_back.wait_until(&mut allocator, at).timed_out(),
                None => {
                    self.given_back.wait(&mut allocator);
                    false
                }
            };
            if passed {
                return Err(Error::ResourceExhausted { what: "staging memory".into() });
            }
        }
    }
}

/// Registered host memory, the holder's alone. A job of Mooncake's owns the blocks that it works on, so that one whose
/// caller gave up still has them.
pub(crate) struct Block<D: Device> {
    addr: usize,
    len: usize,
    owner: Owner<D>,
}

enum Owner<D: Device> {
    Pool(#[expect(dead_code, reason = "gives the place back when it is dropped")] Lent),
    /// Deregistered, then freed.
    Own(Arc<Guard<D>>, Memory),
}

struct Lent(Arc<Staging>, Allocation);

impl Drop for Lent {
    fn drop(&mut self) {
        self.0.allocator.lock().free(self.1);
        self.0.given_back.notify_all();
    }
}

impl<D: Device> Block<D> {
    /// Memory that was registered for this block alone.
    pub(crate) fn own(memory: Memory, guard: Arc<Guard<D>>, len: usize) -> Self {
        Block { addr: memory.start.addr(), len, owner: Owner::Own(guard, memory) }
    }

    pub(crate) fn region(&self) -> Region {
        Region::host(self.addr, self.len)
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: the block is this value's alone, initialised from the start, and lives as long as it.
        unsafe { slice::from_raw_parts(ptr::with_exposed_provenance(self.addr), self.len) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` makes the access exclusive.
        unsafe { slice::from_raw_parts_mut(ptr::with_exposed_provenance_mut(self.addr), self.len) }
    }

    /// The memory, deregistered, where it was made for this block.
    pub(crate) fn into_memory(self) -> Result<Memory, Self> {
        match self.owner {
            Owner::Own(_guard, memory) => Ok(memory),
            owner => Err(Block { owner, ..self }),
        }
    }
}

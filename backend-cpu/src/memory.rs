//! Buffers in sealed memfds, and which allocation an address belongs to.

use std::{
    collections::BTreeMap,
    os::fd::OwnedFd,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use hal::{Allocated, BufferId, Kind, Located, Memory, Region, Result};
use parking_lot::RwLock;
use rustix::{
    io::Errno,
    process::{Resource, getrlimit},
};

use crate::{
    CpuDevice,
    error::{errno, error},
    memfd::{self, Mapping},
};

/// From this size on a request is compared with the memory that the host has left; smaller ones are not worth it.
const LARGE: usize = 16 << 20;

/// A buffer in shared memory that another process can open. Freed on drop, on any thread.
///
/// It is host memory: [`Place::Host`](hal::Place::Host), yet with an allocation around it, which heap memory has not.
/// It begins with zeros.
#[derive(Debug)]
pub struct CpuAllocation {
    device: CpuDevice,
    mapping: Mapping,
}

impl CpuAllocation {
    pub(crate) fn new(device: &CpuDevice, len: usize) -> Result<Self> {
        const OP: &str = "allocate";
        if len == 0 {
            return Err(error(Kind::InvalidArgument, OP).detail("an empty tensor has no memory"));
        }
        // The kernel hands the pages out only when they are touched, and would kill somebody then.
        if len >= LARGE && available().is_some_and(|available| available < len as u64) {
            return Err(out_of_memory(OP, len, Errno::NOMEM));
        }
        let refused = |e| match e {
            Errno::NFILE | Errno::MFILE => errno(Kind::Driver, OP, e)
                .detail("each buffer takes a descriptor; raise the limit on open files (ulimit -n)"),
            e => out_of_memory(OP, len, e),
        };
        let fd = memfd::create(len).map_err(refused)?;
        let mapping = Mapping::new(&fd, len).map_err(refused)?;
        device.allocations().insert(&mapping, Origin::Allocated(Arc::new(fd)));
        Ok(CpuAllocation { device: device.clone(), mapping })
    }

    /// The first byte, for reading. Valid for the life of the allocation, for `region().len` bytes.
    pub fn as_ptr(&self) -> *const u8 {
        self.mapping.as_mut_ptr()
    }

    /// The first byte, for writing. Who writes through it sees to it that nobody else touches the bytes meanwhile.
    pub fn as_mut_ptr(&self) -> *mut u8 {
        self.mapping.as_mut_ptr()
    }

    /// Copies bytes out, from `offset` on.
    ///
    /// What another process writes meanwhile gives torn bytes.
    ///
    /// *Errors*: [`Kind::InvalidRange`].
    pub fn read(&self, offset: usize, to: &mut [u8]) -> Result<()> {
        let len = to.len();
        self.mapping.read(offset, to).ok_or_else(|| outside("read", offset, len, self.mapping.len()))
    }

    /// Copies bytes in, from `offset` on.
    ///
    /// *Errors*: [`Kind::InvalidRange`].
    pub fn write(&mut self, offset: usize, from: &[u8]) -> Result<()> {
        self.mapping
            .write(offset, from)
            .ok_or_else(|| outside("write", offset, from.len(), self.mapping.len()))
    }
}

impl Memory for CpuAllocation {
    fn region(&self) -> Region {
        Region::host(self.mapping.addr(), self.mapping.len())
    }
}

impl Drop for CpuAllocation {
    fn drop(&mut self) {
        // Before the kernel may give the address to somebody else.
        self.device.allocations().remove(self.mapping.addr());
    }
}

/// Where memory that this backend knows comes from.
#[derive(Debug, Clone)]
pub(crate) enum Origin {
    /// From here; the memfd is what an export passes on.
    Allocated(Arc<OwnedFd>),
    /// From another process.
    Imported,
}

#[derive(Debug)]
struct Entry {
    len: usize,
    buffer: BufferId,
    origin: Origin,
}

/// The memory that this backend knows, by address.
#[derive(Debug, Default)]
pub(crate) struct Allocations {
    by_base: RwLock<BTreeMap<usize, Entry>>,
    last_id: AtomicU64,
}

impl Allocations {
    pub(crate) fn insert(&self, mapping: &Mapping, origin: Origin) {
        let buffer = BufferId(self.last_id.fetch_add(1, Ordering::Relaxed) + 1);
        self.by_base.write().insert(mapping.addr(), Entry { len: mapping.len(), buffer, origin });
    }

    pub(crate) fn remove(&self, base: usize) {
        self.by_base.write().remove(&base);
    }

    /// The allocation around the `len` bytes at `addr`, `None` for other memory of the host.
    pub(crate) fn find(
        &self,
        op: &'static str,
        addr: usize,
        len: usize,
    ) -> Result<Option<(Allocated, Origin)>> {
        if addr == 0 {
            return Err(error(Kind::InvalidArgument, op).detail("a null address"));
        }
        let end = addr.checked_add(len).ok_or_else(|| {
            error(Kind::InvalidRange, op).detail(format!("{len} bytes at {addr:#x} leave the address space"))
        })?;
        let by_base = self.by_base.read();
        // The last allocation that begins before the region's end, or at the address itself for no bytes.
        let Some((&base, entry)) = by_base.range(..end.max(addr.saturating_add(1))).next_back() else {
            return Ok(None);
        };
        if base + entry.len <= addr {
            return Ok(None);
        }
        if addr < base || base + entry.len < end {
            return Err(error(Kind::InvalidRange, op).detail(format!(
                "{len} bytes at {addr:#x} reach outside the allocation of {} bytes at {base:#x}",
                entry.len
            )));
        }
        let allocated = Allocated { base, len: entry.len, buffer: entry.buffer };
        Ok(Some((allocated, entry.origin.clone())))
    }

    pub(crate) fn locate(&self, addr: usize, len: usize) -> Result<Located> {
        let allocation = self.find("locate", addr, len)?.map(|(allocated, _)| allocated);
        Ok(Located { region: Region::host(addr, len), allocation })
    }
}

pub(crate) fn outside(op: &'static str, offset: usize, len: usize, of: usize) -> hal::Error {
    error(Kind::InvalidRange, op).detail(format!("offset {offset}, length {len} in {of} bytes"))
}

fn out_of_memory(op: &'static str, asked: usize, e: Errno) -> hal::Error {
    let available = available().map_or("an unknown number of".into(), |bytes| bytes.to_string());
    let limit = getrlimit(Resource::As)
        .current
        .map_or(String::new(), |bytes| format!("; the process may map {bytes} bytes in all (ulimit -v)"));
    errno(Kind::OutOfMemory, op, e)
        .detail(format!("asked for {asked} bytes, the host has {available} bytes available{limit}"))
}

/// What the host can hand out without swapping, in bytes, where it tells.
fn available() -> Option<u64> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = info.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

//! Device memory, and which allocation an address belongs to.
//!
//! ACL gives allocations no identity, and before CANN 9 not even a beginning. What this backend allocated or imported it
//! therefore remembers itself. Of memory of others it knows what CANN 9 tells.

use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicU64, Ordering},
};

use hal::{Allocated, Bound, BufferId, DeviceUuid, Kind, Located, Memory, Place, Region, Result};
use parking_lot::Mutex;

use crate::{
    AscendDevice,
    ffi::{self, IpcKey},
};

/// Bytes of ACL's small pages.
pub(crate) const PAGE: usize = 4096;
/// The most mappings of one region that are looked at. One handle cannot name as many.
const CHUNKS_MAX: usize = 64;

/// Device memory that another process can open. Freed on drop, with its device current.
///
/// Its bytes are undefined until they are written.
#[derive(Debug)]
pub struct AscendAllocation {
    device: AscendDevice,
    region: Region,
}

impl AscendAllocation {
    pub(crate) fn new(bound: &Bound<'_, AscendDevice>, len: usize) -> Result<Self> {
        const OP: &str = "allocate";
        let device = bound.device();
        if len == 0 {
            return Err(device.plain(Kind::InvalidArgument, OP).detail("an empty tensor has no memory"));
        }
        let _relaxed = AscendDevice::unspoiled(bound, OP)?;
        // Whole pages: ACL shares nothing less, and no neighbour's bytes are to be on them.
        let addr =
            device.driver().allocate(len.saturating_add(PAGE - 1) / PAGE * PAGE).map_err(|refusal| {
                let error = device.refused(OP, refusal);
                if error.kind() != Kind::OutOfMemory {
                    return error;
                }
                let free = match device.driver().memory_info() {
                    Ok((free, total)) => format!("{free} of {total} bytes are free"),
                    Err(_) => "how many are free ACL does not say".into(),
                };
                error.detail(format!("asked for {len} bytes, {free}"))
            })?;
        device.blocks().allocated(addr, len, device.uuid());
        Ok(AscendAllocation { region: device.region(addr, len), device: *device })
    }

    /// The raw device pointer. The host must not dereference it.
    pub fn device_ptr(&self) -> usize {
        self.region.addr
    }
}

impl Memory for AscendAllocation {
    fn region(&self) -> Region {
        self.region
    }
}

impl Drop for AscendAllocation {
    fn drop(&mut self) {
        const OP: &str = "free";
        let (device, addr) = (&self.device, self.region.addr);
        device.give_back(OP, |driver| {
            // Before ACL may give the address to somebody else.
            let key = device.blocks().freed(addr);
            // SAFETY: importers have closed it when the call that sent the key returns; see `hal::Device::export_ipc`.
            let closed = key.map_or(Ok(()), |key| unsafe { driver.close_key(&key) });
            // SAFETY: freed once; whoever shares the memory holds the allocation.
            let freed = unsafe { driver.free(addr) };
            freed.and(closed).map_err(|refusal| device.refused(OP, refusal))
        });
    }
}

/// What this process allocated here or imported, by address.
#[derive(Debug, Default)]
pub(crate) struct Blocks {
    known: Mutex<BTreeMap<usize, Known>>,
    last: AtomicU64,
}

#[derive(Debug, Clone, Copy)]
struct Known {
    len: usize,
    device: DeviceUuid,
    buffer: BufferId,
    origin: Origin,
    /// How often it is imported.
    imports: usize,
    /// Under which it was exported.
    key: Option<IpcKey>,
}

/// Whose a block of device memory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    /// Allocated by this backend.
    Own,
    /// Another process's, opened by this backend.
    Imported,
    /// The application's or its framework's.
    Foreign,
    /// As before, and ACL does not say how far it reaches.
    Boundless,
}

impl Blocks {
    fn allocated(&self, addr: usize, len: usize, device: DeviceUuid) {
        let known = Known { len, device, buffer: self.fresh(), origin: Origin::Own, imports: 0, key: None };
        self.known.lock().insert(addr, known);
    }

    fn freed(&self, addr: usize) -> Option<IpcKey> {
        self.known.lock().remove(&addr)?.key
    }

    pub(crate) fn imported(&self, addr: usize, len: usize, device: DeviceUuid) {
        let buffer = self.fresh();
        let mut known = self.known.lock();
        let fresh = Known { len, device, buffer, origin: Origin::Imported, imports: 0, key: None };
        let known = known.entry(addr).or_insert(fresh);
        known.len = known.len.max(len);
        known.imports += 1;
    }

    pub(crate) fn import_closed(&self, addr: usize) {
        let mut known = self.known.lock();
        if let Some(import) = known.get_mut(&addr) {
            import.imports = import.imports.saturating_sub(1);
            if import.imports == 0 {
                known.remove(&addr);
            }
        }
    }

    /// The key that a block of ours was exported under.
    pub(crate) fn key(&self, block: &Block) -> Option<IpcKey> {
        self.known.lock().get(&block.base).filter(|own| own.buffer == block.buffer)?.key
    }

    pub(crate) fn set_key(&self, block: &Block, key: IpcKey) {
        if let Some(own) = self.known.lock().get_mut(&block.base).filter(|own| own.buffer == block.buffer) {
            own.key = Some(key);
        }
    }

    /// Where the block of ours is that was exported under this key as this buffer.
    pub(crate) fn exported_as(&self, key: &IpcKey, buffer: BufferId) -> Option<usize> {
        let known = self.known.lock();
        known.iter().find(|(_, own)| own.buffer == buffer && own.key == Some(*key)).map(|(&base, _)| base)
    }

    fn around(&self, addr: usize) -> Option<Block> {
        let known = self.known.lock();
        let (&base, found) = known.range(..=addr).next_back()?;
        (addr - base < found.len).then(|| Block {
            place: Place::Device(found.device),
            base,
            len: found.len,
            buffer: found.buffer,
            origin: found.origin,
            chunks: vec![found.len],
        })
    }

    fn fresh(&self) -> BufferId {
        BufferId(self.last.fetch_add(1, Ordering::Relaxed) + 1)
    }
}

/// The memory around an address.
#[derive(Debug)]
pub(crate) enum Around {
    /// The host's. Whether ACL says that it is pinned, which an older driver says of all host memory.
    Host { pinned: bool },
    /// A device's.
    Device(Block),
}

/// Device memory that is exported and imported as one.
#[derive(Debug)]
pub(crate) struct Block {
    pub(crate) place: Place,
    pub(crate) base: usize,
    pub(crate) len: usize,
    pub(crate) buffer: BufferId,
    pub(crate) origin: Origin,
    /// Lengths of the separate mappings that make it up, in address order.
    pub(crate) chunks: Vec<usize>,
}

/// What is known of the `len` bytes at `addr`. A question that ACL refuses is an error: it says nothing of the host.
pub(crate) fn around(device: &AscendDevice, op: &'static str, addr: usize, len: usize) -> Result<Around> {
    if addr == 0 {
        return Err(device.plain(Kind::InvalidArgument, op).detail("a null address"));
    }
    let block = match device.blocks().around(addr) {
        Some(block) => block,
        None => match asked(device, op, addr)? {
            Asked::Host { pinned } => return Ok(Around::Host { pinned }),
            Asked::Device(uuid) => foreign(device, op, uuid, addr, len)?,
        },
    };
    let room = block.base.saturating_add(block.len).saturating_sub(addr);
    if len > room {
        return Err(device
            .plain(Kind::InvalidRange, op)
            .detail(format!("{len} bytes at {addr:#x} leave the {} bytes at {:#x}", block.len, block.base)));
    }
    Ok(Around::Device(block))
}

enum Asked {
    Host { pinned: bool },
    Device(DeviceUuid),
}

fn asked(device: &AscendDevice, op: &'static str, addr: usize) -> Result<Asked> {
    let unknown =
        |what: String| device.plain(Kind::Driver, op).detail(format!("ACL says {addr:#x} is {what}"));
    match device.driver().locate(addr).map_err(|refusal| device.refused(op, refusal))? {
        ffi::Place::Host => Ok(Asked::Host { pinned: true }),
        ffi::Place::Unregistered => Ok(Asked::Host { pinned: false }),
        ffi::Place::Device(user) => {
            let uuid = device.uuid_of(user).ok_or_else(|| unknown(format!("of device {}", user.0)))?;
            Ok(Asked::Device(uuid))
        }
        // Also imported memory on CANN 8.5; what was imported here is known already.
        ffi::Place::Other(kind) => Err(unknown(format!("memory of kind {kind}, whose place is not known"))),
    }
}

/// Memory of a device that this backend did not make.
fn foreign(
    device: &AscendDevice,
    op: &'static str,
    uuid: DeviceUuid,
    addr: usize,
    len: usize,
) -> Result<Block> {
    let driver = device.driver();
    let place = Place::Device(uuid);
    let around = driver.address_range(addr);
    let Some((base, first)) =
        around.ok().filter(|(base, len)| addr.checked_sub(*base).is_some_and(|at| at < *len))
    else {
        // All that can be said is that the region begins and ends on the device.
        let last = addr.saturating_add(len.saturating_sub(1));
        return match asked(device, op, last) {
            Ok(Asked::Device(there)) if there == uuid => {
                let buffer = identity(&[(addr, len)]);
                Ok(Block { place, base: addr, len, buffer, origin: Origin::Boundless, chunks: vec![len] })
            }
            _ => Err(device
                .plain(Kind::InvalidRange, op)
                .detail(format!("{len} bytes at {addr:#x} do not end on the device that they begin on"))),
        };
    };
    let mut chunks = vec![(base, first)];
    let mut end = base + first;
    // Only mappings, as PyTorch's expandable segments are made of, belong together; neighbours of `aclrtMalloc` do not.
    let wanted = addr.saturating_add(len);
    let joins = end < wanted && is_mapping(driver, base);
    while joins && end < wanted && chunks.len() < CHUNKS_MAX {
        match driver.address_range(end) {
            Ok((next, more)) if next == end && more > 0 && is_mapping(driver, end) => {
                chunks.push((next, more));
                end += more;
            }
            _ => break,
        }
    }
    let buffer = identity(&chunks);
    let chunks = chunks.into_iter().map(|(_, len)| len).collect();
    Ok(Block { place, base, len: end - base, buffer, origin: Origin::Foreign, chunks })
}

/// Whether a mapping of virtual memory begins here: only that has a physical handle.
fn is_mapping(driver: &ffi::Driver, base: usize) -> bool {
    let Ok(handle) = driver.retain_physical(base) else { return false };
    if let Err(refusal) = driver.release_physical(handle) {
        tracing::debug!(?refusal, "a physical handle not released");
    }
    true
}

/// One number for memory whose maker gives it none, by 64-bit FNV-1a over where it is. A block that was freed and one
/// allocated later at the same place with the same length share it; so the handle that it is exported by is asked for
/// anew each time, and tells them apart.
fn identity(chunks: &[(usize, usize)]) -> BufferId {
    let bytes = chunks.iter().flat_map(|&(base, len)| [base, len]).flat_map(usize::to_le_bytes);
    let hash = bytes.fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    // Apart from the ids of our own, which count up from 1.
    BufferId(hash | 1 << 63)
}

pub(crate) fn locate(device: &AscendDevice, op: &'static str, addr: usize, len: usize) -> Result<Located> {
    Ok(match around(device, op, addr, len)? {
        Around::Host { .. } => Located { region: Region::host(addr, len), allocation: None },
        Around::Device(Block { place, base, len: whole, buffer, .. }) => Located {
            region: Region { addr, len, place },
            allocation: Some(Allocated { base, len: whole, buffer }),
        },
    })
}

//! Device memory, and which allocation an address belongs to.

use hal::{Allocated, Bound, BufferId, DESCRIPTORS_MAX, Kind, Located, Memory, Place, Region, Result};

use crate::{
    CudaDevice,
    ffi::{Answer, Asked, Driver},
};

/// `CU_MEMORYTYPE_HOST`. 0 is memory that is not the driver's.
const TYPE_HOST: u64 = 1;

/// Device memory that another process can open. Freed on drop, with its device current.
///
/// Its bytes are undefined until they are written.
#[derive(Debug)]
pub struct CudaAllocation {
    device: CudaDevice,
    region: Region,
}

impl CudaAllocation {
    pub(crate) fn new(bound: &Bound<'_, CudaDevice>, len: usize) -> Result<Self> {
        const OP: &str = "allocate";
        let device = bound.device();
        if len == 0 {
            return Err(device.plain(Kind::InvalidArgument, OP).detail("an empty tensor has no memory"));
        }
        let _relaxed = CudaDevice::unspoiled(bound, OP)?;
        // Not from a pool: memory of a pool has no handle for other processes.
        let addr = device.driver().allocate(len).map_err(|refusal| {
            let error = device.refused(OP, refusal);
            if error.kind() != Kind::OutOfMemory {
                return error;
            }
            let free = match device.driver().memory_info() {
                Ok((free, total)) => format!("{free} of {total} bytes are free"),
                Err(_) => "how many are free the driver does not say".into(),
            };
            error.detail(format!("asked for {len} bytes, {free}"))
        })?;
        Ok(CudaAllocation { region: device.region(addr, len), device: device.clone() })
    }

    /// The raw device pointer. The host must not dereference it.
    pub fn device_ptr(&self) -> u64 {
        self.region.addr as u64
    }
}

impl Memory for CudaAllocation {
    fn region(&self) -> Region {
        self.region
    }
}

impl Drop for CudaAllocation {
    fn drop(&mut self) {
        const OP: &str = "free";
        let (device, addr) = (&self.device, self.region.addr);
        device.give_back(OP, |driver| {
            // SAFETY: freed once; whoever shares the memory holds the allocation.
            unsafe { driver.free(addr) }.map_err(|refusal| device.refused(OP, refusal))
        });
    }
}

/// The memory around an address.
#[derive(Debug)]
pub(crate) enum Around {
    /// The host's. From the address on, so many bytes are pinned for DMA as one, or none.
    Host { pinned: Option<usize> },
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
    /// What the driver says of the first byte that was asked about.
    pub(crate) asked: Asked,
    /// Lengths of the separate mappings that make it up, in address order, where it is virtual memory.
    pub(crate) chunks: Vec<usize>,
}

/// What the driver knows of the `len` bytes at `addr`.
pub(crate) fn around(device: &CudaDevice, op: &'static str, addr: usize, len: usize) -> Result<Around> {
    if addr == 0 {
        return Err(device.plain(Kind::InvalidArgument, op).detail("a null address"));
    }
    let driver = device.driver();
    let asked = driver.attributes(addr).map_err(|refusal| device.refused(op, refusal))?;
    let owner = device.uuid_of(asked.ordinal);
    let host = match asked.memory_type {
        0 => true,
        // Managed memory may be on the host for now; it is of the device that it was made for.
        TYPE_HOST => !asked.managed || owner.is_none(),
        _ => false,
    };
    if host {
        let end = asked.base.saturating_add(asked.len);
        let pinned = asked.memory_type == TYPE_HOST && (asked.base..end).contains(&addr);
        return Ok(Around::Host { pinned: pinned.then(|| end - addr) });
    }
    let uuid = owner.ok_or_else(|| {
        let ordinal = asked.ordinal;
        device.plain(Kind::Driver, op).detail(format!("the driver says {addr:#x} is of device {ordinal}"))
    })?;
    // The range of virtual memory is what was reserved, in which mappings come and go one by one. The driver tells the
    // mappings of the current device alone.
    let mapped_by_parts = asked.ordinal == device.ordinal() && is_virtual(&asked);
    let mut block = Block {
        place: Place::Device(uuid),
        base: asked.base,
        len: asked.len,
        buffer: BufferId(asked.buffer),
        asked,
        chunks: Vec::new(),
    };
    if mapped_by_parts {
        block.narrow(driver, addr, len).map_err(|refusal| device.refused(op, refusal))?;
    }
    let room = block.base.saturating_add(block.len).saturating_sub(addr);
    if len > room {
        return Err(device
            .plain(Kind::InvalidRange, op)
            .detail(format!("{len} bytes at {addr:#x} leave the {} bytes at {:#x}", block.len, block.base)));
    }
    Ok(Around::Device(block))
}

/// Whether the memory was made by `cuMemCreate` and mapped, as PyTorch's expandable segments are.
fn is_virtual(asked: &Asked) -> bool {
    !asked.legacy_ipc && !asked.managed && !asked.pool
}

impl Block {
    /// Narrows a reservation to the mappings that the `len` bytes at `addr` touch. More of them than a handle can name
    /// are left alone: such a region cannot be exported anyway.
    fn narrow(&mut self, driver: &Driver, addr: usize, len: usize) -> Answer<()> {
        let reserved = self.base.saturating_add(self.len);
        let (base, first) = driver.address_range(addr)?;
        let mut end = base + first;
        let mut chunks = vec![first];
        let mut identity = Identity::default();
        identity.add(&[base as u64, first as u64, self.asked.buffer, self.asked.block]);
        while end < addr.saturating_add(len).min(reserved) {
            if chunks.len() == DESCRIPTORS_MAX {
                return Ok(());
            }
            // Nothing mapped there: the region leaves its memory, which the caller finds by the length.
            let Ok((next, more)) = driver.address_range(end) else { break };
            if next != end || more == 0 {
                break;
            }
            let asked = driver.attributes(end)?;
            identity.add(&[next as u64, more as u64, asked.buffer, asked.block]);
            chunks.push(more);
            end += more;
        }
        *self = Block {
            base,
            len: end - base,
            buffer: identity.buffer(),
            chunks,
            place: self.place,
            asked: self.asked,
        };
        Ok(())
    }
}

/// One number for several mappings, by 64-bit FNV-1a. The driver's id may be that of the reservation, so what is mapped
/// where goes in as well: another selection of chunks, or a chunk mapped anew, is another buffer.
struct Identity(u64);

impl Default for Identity {
    fn default() -> Self {
        Identity(0xcbf2_9ce4_8422_2325)
    }
}

impl Identity {
    fn add(&mut self, words: &[u64]) {
        for byte in words.iter().flat_map(|word| word.to_le_bytes()) {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }

    /// Apart from the driver's own ids, which count up from 1.
    fn buffer(&self) -> BufferId {
        BufferId(self.0 | 1 << 63)
    }
}

pub(crate) fn locate(device: &CudaDevice, op: &'static str, addr: usize, len: usize) -> Result<Located> {
    Ok(match around(device, op, addr, len)? {
        Around::Host { .. } => Located { region: Region::host(addr, len), allocation: None },
        Around::Device(Block { place, base, len: whole, buffer, .. }) => Located {
            region: Region { addr, len, place },
            allocation: Some(Allocated { base, len: whole, buffer }),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(chunks: &[[u64; 4]]) -> BufferId {
        let mut identity = Identity::default();
        chunks.iter().for_each(|chunk| identity.add(chunk));
        identity.buffer()
    }

    #[test]
    fn another_selection_of_chunks_or_a_chunk_mapped_anew_is_another_buffer() {
        let (a, b, b_anew) = ([0x1000, 8, 7, 1], [0x1008, 8, 7, 2], [0x1008, 8, 7, 3]);
        let all =
            [identity(&[a]), identity(&[b]), identity(&[b_anew]), identity(&[a, b]), identity(&[a, b_anew])];
        for (i, one) in all.iter().enumerate() {
            assert!(all[i + 1..].iter().all(|other| other != one));
        }
        assert_eq!(identity(&[a, b]), identity(&[a, b]));
    }
}

//! A region: address, length and where it lives.

use serde::{Deserialize, Serialize};

use crate::{DeviceUuid, Error, Kind, Result};

/// The memory that an address belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Place {
    /// Host memory that any thread of this process may read and write.
    Host,
    /// Memory of this device. The host must not dereference it: the backend copies.
    Device(DeviceUuid),
}

/// Address, length in bytes and place. Plain data: it owns nothing and is never dereferenced by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Region {
    /// The first byte.
    pub addr: usize,
    /// Bytes.
    pub len: usize,
    /// Where it lives.
    pub place: Place,
}

impl Region {
    /// Host memory at `addr`.
    pub fn host(addr: usize, len: usize) -> Self {
        Region { addr, len, place: Place::Host }
    }

    /// The part of `len` bytes that starts `offset` bytes in, or [`Kind::InvalidRange`].
    pub fn part(&self, offset: usize, len: usize) -> Result<Region> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len => Ok(Region { addr: self.addr + offset, len, place: self.place }),
            _ => Err(Error::new(Kind::InvalidRange, "hal", "part")
                .detail(format!("offset {offset}, length {len} in a region of {} bytes", self.len))),
        }
    }

    /// One past the last byte; saturates, so that a nonsense region cannot wrap around.
    pub fn end(&self) -> usize {
        self.addr.saturating_add(self.len)
    }
}

/// Names one allocation for the life of a process: freeing memory and getting the same address again gives a new id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct BufferId(pub u64);

/// What the driver knows about a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Located {
    /// The region, with its place.
    pub region: Region,
    /// The allocation around it, where the driver made it. Plain heap memory has none.
    pub allocation: Option<Allocated>,
}

/// The allocation that a region lies in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Allocated {
    /// Its first byte.
    pub base: usize,
    /// Its bytes.
    pub len: usize,
    /// Its identity, which a reused address does not share.
    pub buffer: BufferId,
}

/// Something that owns memory and can say where it is.
pub trait Memory: Send + 'static {
    /// The whole of it.
    fn region(&self) -> Region;
}

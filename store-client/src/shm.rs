//! Shared memory as a client sees it: mappings of the store's arenas, and the one copy into or out of them.

use std::{
    os::fd::BorrowedFd,
    ptr::{self, NonNull},
};

use hal::{Bound, Deadline, Device, Place, Region};
use rustix::mm::{MapFlags, ProtFlags};

use crate::{
    arrow::Slot,
    error::{Error, Result},
    streaming,
};

/// Between two pieces of a copy the deadline is looked at and progress is told.
const PIECE: usize = 16 << 20;

/// As [`PIECE`], for copies by the host. So long that `memcpy` streams past the caches as it does for the whole.
const HOST_PIECE: usize = 256 << 20;

/// What a mapping is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    /// Reading what anybody committed.
    Read,
    /// Writing what was granted to this client.
    Write,
}

/// One arena, mapped whole until it is dropped.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping stays where it is until drop, and nothing here reads or writes through `base`.
unsafe impl Send for Mapping {}
// SAFETY: as above; every method only does arithmetic on the address.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `len` bytes of a descriptor that the daemon has sent.
    ///
    /// *Errors*: [`Error::Protocol`] where the file is shorter or could become so, since touching what it does not have
    /// would be a fault;
    /// [`Error::Os`] where the kernel refuses.
    pub(crate) fn new(file: BorrowedFd<'_>, len: u64, access: Access) -> Result<Self> {
        let stat = rustix::fs::fstat(file).map_err(|e| os("looking at an arena", e))?;
        let size = usize::try_from(len).ok().filter(|&size| size > 0 && isize::try_from(size).is_ok());
        let (Some(size), true) = (size, u64::try_from(stat.st_size).is_ok_and(|has| has >= len)) else {
            let reason = format!("an arena of {len} bytes came as a file of {}", stat.st_size);
            return Err(Error::Protocol { reason });
        };
        // Else the file could be cut under the mapping, which turns a touch into SIGBUS.
        let seals = rustix::fs::fcntl_get_seals(file).map_err(|e| os("looking at an arena", e))?;
        if !seals.contains(rustix::fs::SealFlags::SHRINK) {
            return Err(Error::Protocol { reason: "an arena came that is not sealed".into() });
        }
        let protection = match access {
            Access::Read => ProtFlags::READ,
            Access::Write => ProtFlags::READ | ProtFlags::WRITE,
        };
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address that the kernel chooses touches no memory in use.
        let base = unsafe { rustix::mm::mmap(ptr::null_mut(), size, protection, flags, file, 0) }
            .map_err(|e| os("mapping an arena", e))?;
        let base = NonNull::new(base.cast::<u8>())
            .ok_or_else(|| os("mapping an arena", rustix::io::Errno::INVAL))?;
        // Regions are plain addresses, and what they lead to is accessed through them.
        base.as_ptr().expose_provenance();
        Ok(Mapping { base, len: size })
    }

    /// Where it starts.
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// The `len` bytes at `offset`, two numbers that come from the daemon.
    ///
    /// *Errors*: [`Error::Protocol`] where they leave the mapping.
    pub(crate) fn range(&self, offset: u64, len: u64) -> Result<Region> {
        match offset.checked_add(len) {
            // Both fit `usize`, because the end is within the mapping.
            Some(end) if end <= self.len as u64 => {
                Ok(Region::host(self.base.as_ptr().addr() + offset as usize, len as usize))
            }
            _ => Err(Error::Protocol {
                reason: format!(
                    "offset {offset} with length {len} is outside of an arena of {} bytes",
                    self.len
                ),
            }),
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `new` with this address and length, and whoever uses a range keeps the mapping.
        let outcome = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
        debug_assert!(outcome.is_ok());
    }
}

/// Copies a slot's region to `to`, a place in the store of the same length, by the host where both are host memory, else
/// by the device.
///
/// *Errors*: [`Error::Timeout`] between two pieces, [`Error::Device`] with what the device said.
///
/// # Safety
/// Both regions must be allocated for the whole call, and nobody may write the slot's or touch `to` meanwhile.
pub(crate) unsafe fn copy_in<D: Device>(
    bound: &Bound<'_, D>,
    slot: &Slot<D>,
    to: Region,
    deadline: Deadline,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<()> {
    // SAFETY: the caller promises what `copy` asks for.
    unsafe { copy(bound, slot, to, slot.region(), Direction::In, deadline, progress) }
}

/// Copies `from`, a stored value, to `to`, the first bytes of the slot's region; else as [`copy_in`].
///
/// # Safety
/// Both regions must be allocated for the whole call, and nobody may write `from` or touch `to` meanwhile.
pub(crate) unsafe fn copy_out<D: Device>(
    bound: &Bound<'_, D>,
    slot: &Slot<D>,
    to: Region,
    from: Region,
    deadline: Deadline,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<()> {
    // SAFETY: the caller promises what `copy` asks for.
    unsafe { copy(bound, slot, to, from, Direction::Out, deadline, progress) }
}

/// Towards the store, or out of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Direction {
    In,
    Out,
}

/// # Safety
/// Both regions must be allocated for the whole call, and nobody may write `from` or touch `to` meanwhile.
unsafe fn copy<D: Device>(
    bound: &Bound<'_, D>,
    slot: &Slot<D>,
    to: Region,
    from: Region,
    direction: Direction,
    deadline: Deadline,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<()> {
    let by_host = (to.place, from.place) == (Place::Host, Place::Host);
    let piece = if by_host { HOST_PIECE } else { PIECE };
    in_pieces(piece, to, from, deadline, progress, |to, from| {
        slot.lend(|| {
            if by_host {
                // SAFETY: these are parts of the caller's regions, about which it promises the same.
                unsafe { copy_piece(to, from, direction) };
                return Ok(());
            }
            // SAFETY: as above.
            unsafe { bound.copy(to, from) }.map_err(Error::from)
        })
    })
}

/// As [`copy_in`], for two regions of host memory that belong to no slot.
///
/// # Safety
/// As there, and both must be host memory.
pub(crate) unsafe fn copy_host_in(to: Region, from: Region, deadline: Deadline) -> Result<()> {
    in_pieces(HOST_PIECE, to, from, deadline, &|_| (), |to, from| {
        // SAFETY: as in `copy`.
        unsafe { copy_piece(to, from, Direction::In) };
        Ok(())
    })
}

/// # Safety
/// Both must be host memory of one length, allocated, with nobody else writing `from` or touching `to`.
unsafe fn copy_piece(to: Region, from: Region, direction: Direction) {
    let (target, source) =
        (ptr::with_exposed_provenance_mut(to.addr), ptr::with_exposed_provenance::<u8>(from.addr));
    // SAFETY: the caller promises it; they are apart from each other, since nobody writes `from` meanwhile.
    unsafe {
        match direction {
            Direction::In => streaming::copy(source, target, from.len),
            Direction::Out => ptr::copy_nonoverlapping(source, target, from.len),
        }
    }
}

fn in_pieces(
    most: usize,
    to: Region,
    from: Region,
    deadline: Deadline,
    progress: &(dyn Fn(u64) + Sync),
    copy: impl Fn(Region, Region) -> Result<()>,
) -> Result<()> {
    let mut done = 0;
    while done < from.len {
        if done > 0 && deadline.is_passed() {
            return Err(Error::Timeout { op: "copying the value".into() });
        }
        let piece = most.min(from.len - done);
        copy(to.part(done, piece)?, from.part(done, piece)?)?;
        progress(piece as u64);
        done += piece;
    }
    Ok(())
}

fn os(what: &str, e: rustix::io::Errno) -> Error {
    Error::Os { what: what.into(), reason: e.to_string(), errno: Some(e.raw_os_error()) }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, OwnedFd};

    use super::*;

    fn file(len: u64) -> OwnedFd {
        let flags = rustix::fs::MemfdFlags::CLOEXEC | rustix::fs::MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("shm-test", flags).unwrap();
        rustix::fs::ftruncate(&file, len).unwrap();
        rustix::fs::fcntl_add_seals(&file, rustix::fs::SealFlags::SHRINK).unwrap();
        file
    }

    #[test]
    fn a_file_shorter_than_the_daemon_says_is_refused() {
        let file = file(8192);
        for len in [0, 8193, u64::MAX, 1 << 63] {
            let refused = Mapping::new(file.as_fd(), len, Access::Read);
            assert!(matches!(refused, Err(Error::Protocol { .. })), "{len}");
        }
        assert!(Mapping::new(file.as_fd(), 8192, Access::Read).is_ok());
    }

    #[test]
    fn a_file_that_could_be_cut_is_refused() {
        let file = rustix::fs::memfd_create("shm-test", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&file, 8192).unwrap();
        let refused = Mapping::new(file.as_fd(), 8192, Access::Read);
        assert!(matches!(refused, Err(Error::Protocol { .. })));
    }

    #[test]
    fn a_range_beyond_the_mapping_is_refused() {
        let map = Mapping::new(file(8192).as_fd(), 8192, Access::Read).unwrap();
        for (offset, len) in [(8191, 2), (8193, 0), (0, 8193), (u64::MAX, 1), (1, u64::MAX)] {
            assert!(matches!(map.range(offset, len), Err(Error::Protocol { .. })), "{offset} {len}");
        }
        assert_eq!(map.range(8192, 0).unwrap().len, 0);
        assert_eq!(map.range(4096, 4096).unwrap().len, 4096);
    }

    #[test]
    fn a_copy_stops_between_pieces_at_the_deadline_and_tells_progress() {
        let from = vec![7u8; 2 * PIECE + 1];
        let mut to = vec![0u8; from.len()];
        let source = Region::host(from.as_ptr().expose_provenance(), from.len());
        let target = Region::host(to.as_mut_ptr().expose_provenance(), to.len());
        let told = parking_lot::Mutex::new(Vec::new());
        let progress = |bytes| told.lock().push(bytes);
        let copy = |to, from| {
            // SAFETY: parts of two vectors of this test.
            unsafe { copy_piece(to, from, Direction::In) };
            Ok(())
        };
        let late = in_pieces(PIECE, target, source, Deadline::passed(), &progress, copy);
        assert!(matches!(late, Err(Error::Timeout { .. })));
        assert_eq!((to[PIECE - 1], to[PIECE]), (7, 0));
        in_pieces(PIECE, target, source, Deadline::NEVER, &progress, copy).unwrap();
        assert_eq!(to, from);
        let piece = PIECE as u64;
        assert_eq!(*told.lock(), [piece, piece, piece, 1]);
    }
}

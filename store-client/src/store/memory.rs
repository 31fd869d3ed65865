//! The memory of one arena: a sealed memfd, its two descriptors, and this process' mapping of it.

use std::{
    fs,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
    ptr::{self, NonNull},
};

use rustix::{
    fs::{FallocateFlags, MemfdFlags, Mode, OFlags, SealFlags},
    io::{Errno, retry_on_intr},
    mm::{Advice, MapFlags, ProtFlags},
};

use crate::error::{Error, Result};

/// Bytes of a huge page.
pub(super) const HUGE: u64 = 2 << 20;
/// Memory is populated in pieces of this size: a signal can interrupt one and undo it, not all of the work.
pub(super) const PIECE: u64 = 64 << 20;

/// One memfd, mapped readable and writable as a whole.
#[derive(Debug)]
pub(super) struct Memory {
    writable: OwnedFd,
    readable: OwnedFd,
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping stays where it is until drop, and nothing here reads or writes through `base`.
unsafe impl Send for Memory {}
// SAFETY: as for `Send`; every method only passes the address on or makes system calls, which are atomic.
unsafe impl Sync for Memory {}

impl Memory {
    /// Reserves `len` bytes of addresses, all of them holes.
    pub(super) fn new(len: u64, huge: bool) -> Result<Self> {
        let size = usize::try_from(len)
            .map_err(|_| Error::OutOfMemory { asked: len, available: usize::MAX as u64 })?;
        let mut flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        flags.set(MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB, huge);
        let create = |flags| rustix::fs::memfd_create("haulier-arena", flags);
        // A system may refuse a memfd that could be made executable (vm.memfd_noexec=2).
        let writable = match create(flags | MemfdFlags::NOEXEC_SEAL) {
            // Before Linux 6.3.
            Err(Errno::INVAL) => create(flags),
            other => other,
        }
        .map_err(|e| os("creating an arena", e))?;
        rustix::fs::ftruncate(&writable, len).map_err(|e| os("sizing an arena", e))?;
        // Nobody can cut the file under a mapping, which would turn reads into SIGBUS.
        rustix::fs::fcntl_add_seals(&writable, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            .map_err(|e| os("sealing an arena", e))?;
        // The mode is checked when the file is opened anew; the descriptor at hand stays writable.
        rustix::fs::fchmod(&writable, Mode::RUSR).map_err(|e| os("protecting an arena", e))?;
        let path = format!("/proc/self/fd/{}", rustix::fd::AsRawFd::as_raw_fd(&writable));
        let readable = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
            .map_err(|e| os("opening an arena for reading", e))?;
        // SAFETY: a new mapping at an address that the kernel chooses touches no memory in use.
        let base = unsafe {
            rustix::mm::mmap(
                ptr::null_mut(),
                size,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::NORESERVE,
                &writable,
                0,
            )
        }
        .map_err(|e| os("mapping an arena", e))?;
        let base = NonNull::new(base.cast()).ok_or_else(|| os("mapping an arena", Errno::INVAL))?;
        Ok(Self { writable, readable, base, len: size })
    }

    pub(super) fn writable(&self) -> BorrowedFd<'_> {
        self.writable.as_fd()
    }

    pub(super) fn readable(&self) -> BorrowedFd<'_> {
        self.readable.as_fd()
    }

    pub(super) fn len(&self) -> u64 {
        self.len as u64
    }

    /// Bytes of a page of the file, as the kernel says.
    pub(super) fn page(&self) -> Result<u64> {
        let stat = rustix::fs::fstatfs(&self.writable).map_err(|e| os("looking at an arena", e))?;
        Ok(u64::try_from(stat.f_bsize).unwrap_or(0))
    }

    /// Bytes of memory that the file has.
    pub(super) fn taken(&self) -> Result<u64> {
        let stat = rustix::fs::fstat(&self.writable).map_err(|e| os("looking at an arena", e))?;
        Ok(u64::try_from(stat.st_blocks).unwrap_or(0) * 512)
    }

    /// The address of `offset`, which must lie within.
    pub(super) fn at(&self, offset: u64) -> NonNull<u8> {
        assert!(offset <= self.len());
        // SAFETY: the offset was just checked to lie within the mapping or at its end.
        unsafe { self.base.add(offset as usize) }
    }

    /// Gives these bytes memory, in the file and in this process' page tables.
    ///
    /// `fallocate` comes first because it answers when there is no memory, where a touch alone would be killed.
    pub(super) fn populate(&self, mut offset: u64, len: u64) -> Result<()> {
        let end = offset + len;
        while offset < end {
            let piece = PIECE.min(end - offset);
            let at = self.at(offset).as_ptr();
            retry_on_intr(|| rustix::fs::fallocate(&self.writable, FallocateFlags::empty(), offset, piece))
                .and_then(|()| {
                    // SAFETY: the range lies in this mapping, and the advice leaves its contents alone.
                    match unsafe {
                        rustix::mm::madvise(at.cast(), piece as usize, Advice::LinuxPopulateWrite)
                    } {
                        // Before Linux 5.14: the first touch maps the page, whose memory is there already.
                        Err(Errno::INVAL) => Ok(()),
                        other => other,
                    }
                })
                .map_err(|e| match e {
                    Errno::NOSPC | Errno::NOMEM => {
                        Error::OutOfMemory { asked: len, available: len - (end - offset) }
                    }
                    e => os("populating an arena", e),
                })?;
            offset += piece;
        }
        Ok(())
    }

    /// Gives the memory of these bytes back to the system; they read as zeros from then on.
    pub(super) fn punch(&self, offset: u64, len: u64) -> Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        retry_on_intr(|| rustix::fs::fallocate(&self.writable, flags, offset, len))
            .map_err(|e| os("punching a hole into an arena", e))
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `new`, and whoever uses an address of it keeps this object alive.
        if let Err(e) = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) } {
            tracing::warn!(error = %e, "an arena could not be unmapped");
        }
    }
}

/// What a failed system call becomes.
fn os(what: &str, errno: Errno) -> Error {
    Error::Os { what: what.into(), reason: errno.to_string(), errno: Some(errno.raw_os_error()) }
}

/// Bytes that can be had, as far as the system and the control group of this process tell.
pub(super) fn available(huge: bool) -> u64 {
    if huge {
        let count = |name: &str| {
            let path = format!("/sys/kernel/mm/hugepages/hugepages-{}kB/{name}", HUGE >> 10);
            number(Path::new(&path)).unwrap_or(0)
        };
        return count("free_hugepages").saturating_sub(count("resv_hugepages")) * HUGE;
    }
    let system = fs::read_to_string("/proc/meminfo").ok().and_then(|text| mem_available(&text));
    let group = fs::read_to_string("/proc/self/cgroup").ok().and_then(|text| group_available(&text));
    system.unwrap_or(u64::MAX).min(group.unwrap_or(u64::MAX))
}

fn mem_available(meminfo: &str) -> Option<u64> {
    let kib: u64 = field(meminfo, "MemAvailable:")?.parse().ok()?;
    kib.checked_mul(1 << 10)
}

/// The least room in the control group (version 2) of this process and those above it.
fn group_available(groups: &str) -> Option<u64> {
    let own = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let root = Path::new("/sys/fs/cgroup");
    let above = root.join(own);
    above.ancestors().take_while(|dir| dir.starts_with(root)).filter_map(room).min()
}

fn room(group: &Path) -> Option<u64> {
    let max = number(&group.join("memory.max"))?;
    let used = number(&group.join("memory.current"))?;
    // The kernel drops idle file pages before it refuses memory.
    let stat = fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
    let idle = field(&stat, "inactive_file").and_then(|n| n.parse().ok()).unwrap_or(0);
    Some(max.saturating_sub(used.saturating_sub(idle)))
}

/// The first word after `name` on its line.
fn field<'t>(text: &'t str, name: &str) -> Option<&'t str> {
    let words = text.lines().map(str::split_whitespace);
    words.filter_map(|mut words| (words.next()? == name).then(|| words.next())?).next()
}

/// The number that a file holds; None for `max`, which is no limit.
fn number(file: &Path) -> Option<u64> {
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_read_only_descriptor_gives_no_writable_mapping() {
        let memory = Memory::new(1 << 20, false).unwrap();
        memory.populate(0, 1 << 20).unwrap();
        let map = |fd: BorrowedFd<'_>, prot| {
            // SAFETY: a new mapping at an address that the kernel chooses touches no memory in use.
            unsafe { rustix::mm::mmap(ptr::null_mut(), 1 << 20, prot, MapFlags::SHARED, fd, 0) }
        };
        let both = ProtFlags::READ | ProtFlags::WRITE;
        assert_eq!(map(memory.readable(), both).unwrap_err(), Errno::ACCESS);
        let view = map(memory.readable(), ProtFlags::READ).unwrap();
        // SAFETY: the view was just mapped and nothing refers to it.
        unsafe {
            let write = rustix::mm::MprotectFlags::READ | rustix::mm::MprotectFlags::WRITE;
            assert_eq!(rustix::mm::mprotect(view, 1 << 20, write).unwrap_err(), Errno::ACCESS);
            rustix::mm::munmap(view, 1 << 20).unwrap();
        }
        assert_eq!(rustix::io::write(memory.readable(), b"x").unwrap_err(), Errno::BADF);
        let own = map(memory.writable(), both).unwrap();
        // SAFETY: the mapping was just made and nothing refers to it.
        unsafe { rustix::mm::munmap(own, 1 << 20) }.unwrap();
    }

    #[test]
    fn an_arena_cannot_be_cut_or_sealed_further_and_is_not_writable_by_mode() {
        let memory = Memory::new(1 << 20, false).unwrap();
        assert_eq!(rustix::fs::ftruncate(memory.writable(), 0).unwrap_err(), Errno::PERM);
        assert_eq!(rustix::fs::ftruncate(memory.writable(), 2 << 20).unwrap_err(), Errno::PERM);
        let seal = rustix::fs::fcntl_add_seals(memory.writable(), SealFlags::WRITE);
        assert_eq!(seal.unwrap_err(), Errno::PERM);
        assert_eq!(rustix::fs::fstat(memory.readable()).unwrap().st_mode & 0o777, 0o400);
    }

    #[test]
    fn an_arena_can_never_be_made_executable() {
        let memory = Memory::new(1 << 20, false).unwrap();
        if !rustix::fs::fcntl_get_seals(memory.writable()).unwrap().contains(SealFlags::EXEC) {
            // Before Linux 6.3 there is no such seal.
            let plain = rustix::fs::memfd_create("t", MemfdFlags::NOEXEC_SEAL);
            assert_eq!(plain.unwrap_err(), Errno::INVAL);
            return;
        }
        assert_eq!(rustix::fs::fchmod(memory.writable(), Mode::RWXU).unwrap_err(), Errno::PERM);
    }

    #[test]
    fn the_room_of_a_system_is_read_from_its_text() {
        assert_eq!(mem_available("MemTotal: 9 kB\nMemAvailable:   5 kB\n"), Some(5 << 10));
        assert_eq!(mem_available("MemTotal: 9 kB\n"), None);
        assert_eq!(group_available("12:cpu:/x\n"), None);
        assert!(available(false) > 0);
    }
}

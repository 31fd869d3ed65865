//! Sealed memfds: memory that another process can open by descriptor and that nobody can pull away under a mapping.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    ptr::{self, NonNull},
};

use parking_lot::RwLock;
use rustix::{
    fs::{
        FileType, MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, fstatfs, ftruncate,
        memfd_create,
    },
    io::Errno,
    mm::{MapFlags, ProtFlags, mmap, munmap},
};

/// The file system that memfds of ordinary pages live on. One of huge pages can still fault when a page is missing.
const TMPFS_MAGIC: i64 = 0x0102_1994;

/// A new memfd of `len` bytes, whose size is sealed.
pub(crate) fn create(len: usize) -> Result<OwnedFd, Errno> {
    create_named("haulier", len)
}

/// As [`create`], with a name that whoever gets the descriptor can read.
pub(crate) fn create_named(name: &str, len: usize) -> Result<OwnedFd, Errno> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = match memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL) {
        // Before Linux 6.3.
        Err(Errno::INVAL) => memfd_create(name, flags)?,
        other => other?,
    };
    ftruncate(&fd, len as u64)?;
    fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(fd)
}

/// Which file a descriptor means, whatever its number: device and inode.
pub(crate) type FileId = (u64, u64);

/// The file behind a descriptor.
#[cfg(feature = "strict")]
pub(crate) fn identity(fd: impl AsFd) -> Result<FileId, Errno> {
    let stat = fstat(fd)?;
    Ok((stat.st_dev, stat.st_ino))
}

/// Whether a peer's descriptor can be mapped for `len` bytes without ever faulting: the file and its size, or why
/// not.
pub(crate) fn inspect(fd: BorrowedFd<'_>, len: u64) -> Result<(FileId, u64), String> {
    let said = |what: &'static str| move |e: Errno| format!("{what} of the descriptor failed: {e}");
    let stat = fstat(fd).map_err(said("fstat"))?;
    let on = fstatfs(fd).map_err(said("fstatfs"))?;
    // The type of this field differs between architectures.
    #[allow(clippy::unnecessary_cast)]
    let tmpfs = on.f_type as i64 == TMPFS_MAGIC;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile || !tmpfs {
        return Err("the descriptor is not a memfd of ordinary pages".into());
    }
    // Without the seal the peer could truncate the file, and touching the mapping would raise SIGBUS.
    if !fcntl_get_seals(fd).map_err(said("F_GET_SEALS"))?.contains(SealFlags::SHRINK) {
        return Err("the memfd is not sealed against shrinking (F_SEAL_SHRINK)".into());
    }
    let size = u64::try_from(stat.st_size).unwrap_or(0);
    if size < len {
        return Err(format!("the memfd has {size} bytes and the handle says {len}"));
    }
    Ok(((stat.st_dev, stat.st_ino), size))
}

/// A memfd mapped readable and writable, shared with whoever else maps it. Unmapped on drop.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: NonNull<u8>,
    len: usize,
    /// Makes the accessors below free of data races among themselves. Other processes are beyond its reach: what they
    /// write meanwhile gives torn bytes, which are still bytes.
    access: RwLock<()>,
}

// SAFETY: the mapping belongs to the value until drop, on whatever thread; the accessors exclude each other by `access`.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `len` bytes. The file must be sealed against shrinking and have as many.
    pub(crate) fn new(fd: impl AsFd, len: usize) -> Result<Self, Errno> {
        // SAFETY: the kernel chooses an unused range, so nothing that exists is replaced.
        let start = unsafe {
            mmap(ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, fd, 0)?
        };
        let start = NonNull::new(start.cast()).ok_or(Errno::NOMEM)?;
        Ok(Mapping { start, len, access: RwLock::new(()) })
    }

    pub(crate) fn as_mut_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    pub(crate) fn addr(&self) -> usize {
        // Exposed: callers come back with the number.
        self.start.as_ptr().expose_provenance()
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Copies from `offset` on into `to`; `None` where that reaches past the end.
    pub(crate) fn read(&self, offset: usize, to: &mut [u8]) -> Option<()> {
        let from = self.at(offset, to.len())?;
        let _shared = self.access.read();
        // SAFETY: `at` checked the range; a borrowed slice of Rust memory cannot overlap a mapping that is only ever
        // handed out as a raw pointer; `access` keeps writers out.
        unsafe { ptr::copy_nonoverlapping(from, to.as_mut_ptr(), to.len()) };
        Some(())
    }

    /// Copies `from` to `offset`; `None` where that reaches past the end.
    pub(crate) fn write(&self, offset: usize, from: &[u8]) -> Option<()> {
        let to = self.at(offset, from.len())?;
        let _alone = self.access.write();
        // SAFETY: as in `read`; `access` keeps everybody else out.
        unsafe { ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) };
        Some(())
    }

    /// Sets `len` bytes from `offset` on to `byte`; `None` where that reaches past the end.
    #[cfg(any(feature = "strict", test))]
    pub(crate) fn fill(&self, offset: usize, len: usize, byte: u8) -> Option<()> {
        let to = self.at(offset, len)?;
        let _alone = self.access.write();
        // SAFETY: as in `write`.
        unsafe { ptr::write_bytes(to, byte, len) };
        Some(())
    }

    fn at(&self, offset: usize, len: usize) -> Option<*mut u8> {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.len);
        // SAFETY: within the mapping, or one past its end for no bytes.
        inside.then(|| unsafe { self.as_mut_ptr().add(offset) })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped in `new` with this length and never handed out beyond the life of the value.
        if let Err(e) = unsafe { munmap(self.as_mut_ptr().cast(), self.len) } {
            tracing::error!(error = %e, len = self.len, "munmap");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn why_not(fd: impl AsFd, len: u64) -> String {
        inspect(fd.as_fd(), len).unwrap_err()
    }

    #[test]
    fn our_own_memfd_passes_the_inspection() {
        let fd = create(4097).unwrap();
        assert!(inspect(fd.as_fd(), 4097).is_ok());
        assert!(why_not(&fd, 4098).contains("4097 bytes and the handle says 4098"));
    }

    #[test]
    fn a_memfd_that_the_peer_could_shrink_is_refused() {
        let fd = memfd_create("t", MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&fd, 4096).unwrap();
        assert!(why_not(&fd, 4096).contains("not sealed"));
        fcntl_add_seals(&fd, SealFlags::GROW).unwrap();
        assert!(why_not(&fd, 4096).contains("not sealed"));
    }

    #[test]
    fn a_file_and_a_pipe_are_refused() {
        assert!(why_not(std::fs::File::open("/proc/self/exe").unwrap(), 1).contains("not a memfd"));
        assert!(why_not(std::io::pipe().unwrap().0, 1).contains("not a memfd"));
    }

    #[test]
    fn accessors_stay_inside() {
        let m = Mapping::new(create(8).unwrap(), 8).unwrap();
        m.fill(0, 8, 7).unwrap();
        m.write(6, &[1, 2]).unwrap();
        let mut bytes = [0; 4];
        m.read(4, &mut bytes).unwrap();
        assert_eq!(bytes, [7, 7, 1, 2]);
        assert!(m.write(7, &[0; 2]).is_none() && m.read(usize::MAX, &mut bytes).is_none());
        assert!(m.fill(9, 0, 0).is_none() && m.fill(8, 0, 0).is_some());
    }
}

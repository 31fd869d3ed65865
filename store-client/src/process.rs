//! Which process this is, for what does not survive a fork.

use std::{
    process,
    sync::{
        OnceLock,
        atomic::{AtomicU32, Ordering},
    },
};

use rustix::{
    mm::{Advice, MapFlags, ProtFlags},
    param::page_size,
};

/// [`std::process::id`] without a system call, which would cost as much as the rest of a small get's bookkeeping.
///
/// It is kept in a page that the kernel gives the child of a fork filled with zeros. A process that shares all memory
/// with its parent (`vfork`) gets the parent's, and has that short time only to call `exec`.
pub(crate) fn id() -> u32 {
    static CACHE: OnceLock<Option<&'static AtomicU32>> = OnceLock::new();
    let Some(cache) = CACHE.get_or_init(wiped_on_fork) else { return process::id() };
    match cache.load(Ordering::Relaxed) {
        0 => {
            let id = process::id();
            cache.store(id, Ordering::Relaxed);
            id
        }
        id => id,
    }
}

/// A word that is 0 now and again in each child of a fork; none where the kernel has no such thing.
fn wiped_on_fork() -> Option<&'static AtomicU32> {
    let (len, both) = (page_size(), ProtFlags::READ | ProtFlags::WRITE);
    // SAFETY: a new mapping at an address that the kernel chooses touches no memory in use.
    let page =
        unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), len, both, MapFlags::PRIVATE) }.ok()?;
    // SAFETY: the page is this function's alone, and holds nothing yet.
    if unsafe { rustix::mm::madvise(page, len, Advice::LinuxWipeOnFork) }.is_err() {
        // SAFETY: as above; nothing refers to it.
        let _ = unsafe { rustix::mm::munmap(page, len) };
        return None;
    }
    // SAFETY: the page is aligned, zeroed, and never unmapped; it is only ever accessed as this atomic.
    Some(unsafe { AtomicU32::from_ptr(page.cast()) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_what_the_system_says() {
        assert_eq!((id(), id()), (process::id(), process::id()));
    }
}

//! Which process this is, without a system call: what a forked child inherits must not be used by it.

use std::{
    ptr::{self, NonNull},
    sync::{
        OnceLock,
        atomic::{AtomicU64, Ordering},
    },
};

use rustix::mm::{Advice, MapFlags, ProtFlags};

/// A number that this process has, and none of its ancestors.
pub(crate) fn process() -> u64 {
    static PAGE: OnceLock<Option<Page>> = OnceLock::new();
    match PAGE.get_or_init(Page::new) {
        Some(page) => page.process(),
        None => std::process::id().into(),
    }
}

/// A page that the kernel fills with zeros in every child.
struct Page(NonNull<AtomicU64>);

// SAFETY: what it points to is atomic, and is never unmapped.
unsafe impl Send for Page {}
// SAFETY: as above.
unsafe impl Sync for Page {}

impl Page {
    /// None where the kernel has no such pages (before Linux 4.14).
    fn new() -> Option<Self> {
        let (len, protection) = (rustix::param::page_size(), ProtFlags::READ | ProtFlags::WRITE);
        // SAFETY: a new mapping at an address that the kernel chooses touches no memory in use.
        let page = unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), len, protection, MapFlags::PRIVATE) }
            .ok()?;
        // SAFETY: the mapping was just made, and nothing refers to it.
        unsafe { rustix::mm::madvise(page, len, Advice::LinuxWipeOnFork) }.ok()?;
        NonNull::new(page.cast()).map(Page)
    }

    fn process(&self) -> u64 {
        // SAFETY: the page stays mapped, aligned and atomic.
        let word = unsafe { self.0.as_ref() };
        match word.load(Ordering::Relaxed) {
            0 => Self::name(word),
            number => number,
        }
    }

    /// Takes the next number: one more than any that this process can have inherited.
    #[cold]
    fn name(word: &AtomicU64) -> u64 {
        static LAST: AtomicU64 = AtomicU64::new(0);
        let next = LAST.fetch_add(1, Ordering::Relaxed) + 1;
        match word.compare_exchange(0, next, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => next,
            // Another thread was as fast.
            Err(number) => number,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_has_another_number_and_the_parent_keeps_its_own() {
        let (before, again) = (process(), process());
        assert_eq!(before, again);
        // SAFETY: the child only loads and stores words and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let code = if process() == before || process() != process() { 1 } else { 0 };
            // SAFETY: it ends the child at once, and runs nothing of its parent's.
            unsafe { libc::_exit(code) };
        }
        let mut status = -1;
        // SAFETY: the status is a variable of this function.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "the child takes itself for its parent");
        assert_eq!(process(), before);
    }
}

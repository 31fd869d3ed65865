//! Shared memory as words, each of them atomic: what another process writes meanwhile is at worst an old or a new number.

use std::{
    any::Any,
    fmt,
    ptr::NonNull,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering, fence},
    },
};

/// Atomic words: those of a mapping, or those of a model.
///
/// There is no relaxed write: on the machines that this runs on a release costs the same.
pub(crate) trait Words {
    fn load(&self, at: usize) -> u64;
    fn load_acquire(&self, at: usize) -> u64;
    fn store(&self, at: usize, value: u64);
    fn store_release(&self, at: usize, value: u64);
    /// Acquires and releases where it succeeds; else the value that is there.
    fn replace(&self, at: usize, old: u64, new: u64) -> Result<(), u64>;
    /// Clears bits; releases.
    fn clear_bits(&self, at: usize, bits: u64);
    fn fence_release();
    fn fence_seq_cst();
    /// What a writer does that waits for another one.
    fn pause();
}

/// Words of a mapping.
pub(crate) struct Mapped {
    base: NonNull<AtomicU64>,
    count: usize,
    keep: Arc<dyn Any + Send + Sync>,
}

// SAFETY: the words are atomic, and `keep`, which is Send and Sync itself, keeps them where they are.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

impl Mapped {
    /// `count` words at `base`.
    ///
    /// # Safety
    /// They must be aligned, mapped and only ever accessed atomically until `keep` is dropped. Where they are mapped
    /// read-only, nothing but loads and fences may be used.
    pub(crate) unsafe fn new(base: NonNull<u8>, count: usize, keep: Arc<dyn Any + Send + Sync>) -> Self {
        debug_assert!(base.cast::<AtomicU64>().is_aligned());
        Mapped { base: base.cast(), count, keep }
    }

    #[inline]
    fn word(&self, at: usize) -> &AtomicU64 {
        assert!(at < self.count);
        // SAFETY: it lies within, and the maker promised the rest.
        unsafe { self.base.add(at).as_ref() }
    }
}

impl Words for Mapped {
    #[inline]
    fn load(&self, at: usize) -> u64 {
        self.word(at).load(Ordering::Relaxed)
    }

    #[inline]
    fn load_acquire(&self, at: usize) -> u64 {
        self.word(at).load(Ordering::Acquire)
    }

    #[inline]
    fn store(&self, at: usize, value: u64) {
        self.word(at).store(value, Ordering::Relaxed);
    }

    #[inline]
    fn store_release(&self, at: usize, value: u64) {
        self.word(at).store(value, Ordering::Release);
    }

    #[inline]
    fn replace(&self, at: usize, old: u64, new: u64) -> Result<(), u64> {
        self.word(at).compare_exchange(old, new, Ordering::AcqRel, Ordering::Relaxed).map(drop)
    }

    #[inline]
    fn clear_bits(&self, at: usize, bits: u64) {
        self.word(at).fetch_and(!bits, Ordering::Release);
    }

    #[inline]
    fn fence_release() {
        fence(Ordering::Release);
    }

    #[inline]
    fn fence_seq_cst() {
        fence(Ordering::SeqCst);
    }

    fn pause() {
        std::thread::yield_now();
    }
}

impl fmt::Debug for Mapped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mapped")
            .field("count", &self.count)
            .field("shared", &Arc::strong_count(&self.keep))
            .finish()
    }
}

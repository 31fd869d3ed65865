//! A client's marks: its own memory, which the daemon reads. Both sides see it through this.

use std::{
    any::Any,
    ptr::NonNull,
    sync::{
        Arc,
        atomic::{AtomicU8, AtomicU64, Ordering},
    },
};

use super::{
    Layout,
    holds::{self, Holds},
    words::Mapped,
};

/// Groups of holds: a client takes at most 4096 without a request.
const GROUPS: usize = 64;

// Offsets in bytes; what is written often has a line of its own.
const ENDED: usize = 0;
const VALUES: usize = 64;
const BYTES: usize = 72;
const HOLDS: usize = 128;
const TRACES: usize = HOLDS + 8 * holds::words(GROUPS);

/// Bytes of the marks of a client of an index with this many slots.
pub(super) fn len(slots: u32) -> u64 {
    (TRACES as u64 + u64::from(slots)).next_multiple_of(4096)
}

/// The marks of one client.
#[derive(Debug)]
pub(crate) struct Marks {
    base: NonNull<u8>,
    slots: u32,
    holds: Holds<Mapped>,
    _keep: Arc<dyn Any + Send + Sync>,
}

// SAFETY: all access is atomic, and `_keep`, which is Send and Sync itself, keeps the memory where it is.
unsafe impl Send for Marks {}
// SAFETY: as above.
unsafe impl Sync for Marks {}

/// What a client says that it has read: a claim, for counters only.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Reads {
    pub(crate) values: u64,
    pub(crate) bytes: u64,
}

impl Reads {
    pub(crate) fn plus(self, other: Reads) -> Reads {
        let (values, bytes) = (self.values.wrapping_add(other.values), self.bytes.wrapping_add(other.bytes));
        Reads { values, bytes }
    }

    pub(crate) fn minus(self, other: Reads) -> Reads {
        let (values, bytes) = (self.values.wrapping_sub(other.values), self.bytes.wrapping_sub(other.bytes));
        Reads { values, bytes }
    }
}

impl Marks {
    /// Those at `base`.
    ///
    /// # Safety
    /// [`Layout::marks_len`] bytes there must be mapped for reading and writing, aligned to a page, and only ever accessed
    /// atomically until `keep` is dropped.
    pub(crate) unsafe fn new(base: NonNull<u8>, layout: Layout, keep: Arc<dyn Any + Send + Sync>) -> Self {
        // SAFETY: the words lie within, aligned, and the caller promises the rest.
        let words = unsafe { Mapped::new(base.add(HOLDS), holds::words(GROUPS), Arc::clone(&keep)) };
        Marks { base, slots: layout.slots(), holds: Holds::new(words, GROUPS), _keep: keep }
    }

    pub(crate) fn holds(&self) -> &Holds<Mapped> {
        &self.holds
    }

    /// The daemon looks at these marks no more.
    pub(crate) fn end(&self) {
        self.word(ENDED).store(1, Ordering::SeqCst);
    }

    pub(crate) fn have_ended(&self) -> bool {
        self.word(ENDED).load(Ordering::Acquire) != 0
    }

    /// Says that a value of `len` bytes was read: for the counters, and for eviction.
    pub(crate) fn used(&self, slot: u32, id: u64, len: u64) {
        self.word(VALUES).fetch_add(1, Ordering::Relaxed);
        self.word(BYTES).fetch_add(len, Ordering::Relaxed);
        let byte = self.trace(slot);
        if byte.load(Ordering::Relaxed) != trace_of(id) {
            byte.store(trace_of(id), Ordering::Relaxed);
        }
    }

    /// Whether the value was read since this was last asked.
    pub(crate) fn take_use(&self, slot: u32, id: u64) -> bool {
        let byte = self.trace(slot);
        let used = byte.load(Ordering::Relaxed) == trace_of(id);
        if used {
            byte.store(0, Ordering::Relaxed);
        }
        used
    }

    /// What was read until now.
    pub(crate) fn reads(&self) -> Reads {
        let values = self.word(VALUES).load(Ordering::Relaxed);
        Reads { values, bytes: self.word(BYTES).load(Ordering::Relaxed) }
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: the offset is one of the constants above, within the marks and aligned; the maker promised the rest.
        unsafe { self.base.add(offset).cast().as_ref() }
    }

    fn trace(&self, slot: u32) -> &AtomicU8 {
        assert!(slot < self.slots);
        // SAFETY: there is a byte for each slot; the maker promised the rest.
        unsafe { self.base.add(TRACES + slot as usize).cast().as_ref() }
    }
}

/// What stands for an id in a byte, never 0: the trace of a value that had the slot before is most likely another one.
fn trace_of(id: u64) -> u8 {
    (id % 255) as u8 + 1
}

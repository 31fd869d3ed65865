//! Reads without a question: a client finds a value in a read-only mapped index, and takes a hold on it, without a request.
//!
//! # What is shared
//!
//! | memory | written by | mapped by | holds |
//! |---|---|---|---|
//! | the **shared index**, one for each daemon | the daemon | every client, read-only | the life word; buckets of entries |
//! | **marks**, one for each client | that client | it and the daemon | its holds, what it used, its counters |
//!
//! The shared index is a *cache* of the store's own one. An entry that was displaced, or that does not fit, is only a
//! request more, so the memory never grows and a miss means nothing. An entry is there only while its key has that value:
//! it is withdrawn under the lock under which the key leaves the store's index, before the answer to who removed,
//! replaced or evicted it. So a read through the index is as current as a request.
//!
//! # The protocol
//!
//! Each value that may be published has an **id**, never used twice. A bucket has a sequence word, odd while it is written.
//!
//! ```text
//! client: take a hold                              daemon: give memory back
//!  1  seq := sequence of the bucket                 a  withdraw: sequence odd, entry := 0, sequence even
//!  2  read the entry of the key: id, place, meta    b  (the last reference to the object goes)
//!  3  claim a hold word of mine, and write the id   c  fence(SeqCst)
//!  4  fence(SeqCst)                                 d  any hold word of any client == id?
//!  5  sequence of the bucket == seq, and even?          yes: park the memory, and look again later
//!     and the daemon lives, my session too?             no:  the memory may be used anew
//!     yes: the hold stands. no: clear the word,
//!     and try again, or ask by request
//!  6  read the bytes; clear the word (Release)
//! ```
//!
//! Parked memory is looked at again when memory is wanted or counted, when a session ends, and when much has been parked.
//!
//! # Why it is right
//!
//! *Nobody reads memory that is used anew.* Of two `SeqCst` fences one comes first. If 4 comes before c, then d sees what
//! 3 wrote, and the memory is parked. If c comes before 4, then 5 sees what a wrote, and there is no hold. b makes a
//! happen before c also where another thread withdrew. That d looks only as far as the client says that it ever took
//! holds changes nothing: 3 says so before it takes one further on. Once a hold stands, the memory is not given back until 6, and the
//! `Release` there with the `Acquire` of d puts the reads before whatever is written next. What 2 read is whole, because
//! an unchanged even sequence at 5 means that nobody wrote the bucket in between (`Acquire` at 1, the fence before 5).
//!
//! - **Removal, eviction, replacement**: a withdraws first; then the argument above. Replacing withdraws the old value before
//!   it publishes the new one, under the same lock, so no reader sees old after new.
//! - **Reuse**: an id never comes again, so a hold word that is left from a read that failed at 5 keeps nothing else alive,
//!   and an entry of another value in the same place has another id and another sequence.
//! - **Displacement** by another key of the bucket: to a reader it is as a removal. The object lives on in the store.
//! - **A client's death**, at any instruction: its hold words are looked at for as long as its session lives, which ends
//!   with its socket, which the kernel closes. Nothing in its marks is a lock. What was parked for it is freed then.
//! - **The end of a session** that the client does not know of yet: the daemon writes `ended` into its marks before it
//!   stops looking at them, and 5 looks at that; a hold that stands at that very moment ends with the session, as do
//!   those that were asked for.
//! - **The daemon's death**, kill -9 too: the life word is a robust futex of a thread of the daemon. The kernel marks it
//!   dead before it closes the daemon's descriptors, the socket and the lock among them; a graceful end marks it first
//!   of all. So while the word is alive no other daemon can have taken over, and no newer value than the index' can
//!   exist. The memory of a dead daemon changes no more, and stays mapped for as long as a view needs it.
//! - **A fork**: the child has its parent's mappings. It is told apart without a system call by a page that the kernel wipes
//!   in children (see [`crate::fork`]), and then neither reads through the index nor clears a word of its parent's.
//! - **Scribbling**: a client can write its own marks only. They are ids to compare, bits to test, numbers to add up and one
//!   that is bounded, never addresses, lengths or indices: the worst that it can do is to hold back memory, which a request can do too, and
//!   to count wrongly. It can hurt itself by clearing its own holds. The daemon reads nothing back from the shared index
//!   that it relies on, and nobody else can write it.
//! - **Aborted or stuck writers**: only daemon threads write buckets, and they cannot end in between without the daemon.
//!   A reader waits for none of them: after a few tries it asks by request.
//!
//! The steps above are code over [`Words`], so that `models` runs the very same code under loom, which tries every
//! interleaving and every value that the memory model allows a load to see; the same models fail without the fences, the
//! second look or the search for holds.
//!
//! # Eviction
//!
//! The daemon does not see these reads. A client leaves a trace of the id in the byte of the entry's slot in its marks,
//! and a value that is about to be evicted and has such a trace gets a *second chance*: the trace is cleared and the
//! value counts as used now. A bounded number of chances is given for each victim, so that no client makes eviction
//! endless: the order is that of the last use, as seen at evictions.
//!
//! # Sizes
//!
//! One entry (256 bytes with its share of the bucket's head) for each 16 KiB of pool, between 4096 and 4 Mi entries; memory
//! comes as pages are touched. Keys and descriptions of together more than 192 bytes are read by request.

pub(crate) use self::{
    holds::Holds,
    marks::{Marks, Reads},
    table::{Entry, Seen, Table},
    words::{Mapped, Words},
};

mod holds;
pub(crate) mod life;
mod marks;
#[cfg(test)]
pub(crate) mod models;
mod table;
mod words;

/// Bytes before the first bucket; the life word is the first of them.
const HEAD: u64 = 4096;

/// How often a read is tried before the daemon is asked.
const TRIES: usize = 8;

/// The shape of what is shared, which both sides work out from the number of slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layout {
    slots: u32,
}

impl Layout {
    /// For a pool of this many bytes.
    pub(crate) fn of_pool(pool: u64) -> Self {
        let slots = (pool >> 14).clamp(1 << 12, 1 << 22).next_power_of_two();
        Layout { slots: slots as u32 }
    }

    /// As the daemon says; none where no daemon of ours says so.
    pub(crate) fn of_slots(slots: u32) -> Option<Self> {
        (slots.is_power_of_two() && slots >= table::WAYS as u32).then_some(Layout { slots })
    }

    /// Entries in all.
    pub(crate) fn slots(self) -> u32 {
        self.slots
    }

    /// Bytes of the shared index.
    pub(crate) fn index_len(self) -> u64 {
        HEAD + 8 * self.index_words() as u64
    }

    /// Bytes of a client's marks.
    pub(crate) fn marks_len(self) -> u64 {
        marks::len(self.slots)
    }

    fn index_words(self) -> usize {
        (self.slots as usize / table::WAYS) * table::BUCKET
    }
}

/// The buckets of the index that is mapped here.
///
/// # Safety
/// As for [`Mapped::new`], with [`Layout::index_len`] bytes at `base`.
pub(crate) unsafe fn table(
    base: std::ptr::NonNull<u8>,
    layout: Layout,
    keep: std::sync::Arc<dyn std::any::Any + Send + Sync>,
) -> Table<Mapped> {
    // SAFETY: the caller promises that all of this is mapped; the head is a multiple of 8.
    let words = unsafe { Mapped::new(base.add(HEAD as usize), layout.index_words(), keep) };
    Table::with_buckets(words, layout.slots as usize / table::WAYS)
}

/// The hash of a key, which picks its bucket. XXH3, because it is fast for short keys and its values are specified: a client
/// and a daemon that were built apart agree.
pub(crate) fn hash(seed: u64, space: u64, key: &str) -> u64 {
    twox_hash::XxHash3_64::oneshot_with_seed(seed ^ space, key.as_bytes())
}

/// Steps 1 to 5: finds a key of a namespace and takes a hold on its value. `lives` says whether daemon and session do.
///
/// None says nothing about the key: the daemon is to be asked.
pub(crate) fn hold<T: Words, H: Words>(
    table: &Table<T>,
    holds: &Holds<H>,
    hash: u64,
    space: u64,
    key: &[u8],
    lives: impl Fn() -> bool,
) -> Option<(Seen, usize)> {
    for _ in 0..TRIES {
        let Ok(seen) = table.look(hash, space, key) else {
            std::hint::spin_loop();
            continue;
        };
        let seen = seen?;
        let word = holds.take(seen.id)?;
        T::fence_seq_cst();
        let lives = lives();
        if lives && table.is_as_seen(&seen) {
            return Some((seen, word));
        }
        holds.clear(word);
        if !lives {
            return None;
        }
    }
    None
}

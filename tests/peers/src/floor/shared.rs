//! The memory that server and client share: two mailboxes, the index, the arena. All `unsafe` of the floor is here.

use std::{
    fs::File,
    ptr,
    sync::atomic::{
        AtomicU64,
        Ordering::{AcqRel, Acquire, Relaxed, Release},
        fence,
    },
};

use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{MemfdFlags, memfd_create};

use super::{
    mailbox::Mailbox,
    message::{Entry, Key},
};
use crate::failure::{During, Failure, Result};

/// Rows of the index; some thousand keys at most are ever stored.
const ROWS: usize = 8192;
/// The arena begins at a page.
const PAGE: usize = 4096;

#[repr(C)]
struct Control {
    /// For the client that only sleeps, and for the one that polls.
    futex: Mailbox,
    polled: Mailbox,
    index: [Row; ROWS],
}

/// A row of the index, guarded by a version that is odd while the row is written.
#[repr(C, align(64))]
struct Row {
    version: AtomicU64,
    key: [AtomicU64; 4],
    offset: AtomicU64,
    len: AtomicU64,
}

/// The memory, mapped.
pub(super) struct Shared {
    map: MmapRaw,
}

impl Shared {
    /// Makes memory with an arena of `arena` bytes.
    pub(super) fn create(arena: usize) -> Result<(Self, File)> {
        let file = File::from(memfd_create("haulier-floor", MemfdFlags::CLOEXEC).during("memfd_create")?);
        file.set_len((Self::arena_start() + arena) as u64).during("sizing the floor's memory")?;
        let shared = Self::map(&file)?;
        Ok((shared, file))
    }

    /// Maps memory that was made by `create`, and touches every page.
    pub(super) fn map(file: &File) -> Result<Self> {
        let map = MmapOptions::new().populate().map_raw(file).during("mapping the floor's memory")?;
        if map.len() < Self::arena_start() {
            return Err(Failure("the floor's memory is too small".into()));
        }
        Ok(Shared { map })
    }

    fn arena_start() -> usize {
        size_of::<Control>().next_multiple_of(PAGE)
    }

    pub(super) fn arena_len(&self) -> usize {
        self.map.len() - Self::arena_start()
    }

    fn control(&self) -> &Control {
        // SAFETY: the mapping is page-aligned, at least as large as `Control` (checked in `map`) and lives as long as
        // `self`. `Control` consists of atomics only, for which every bit pattern is valid and which may be shared with
        // another process.
        unsafe { &*self.map.as_ptr().cast::<Control>() }
    }

    pub(super) fn futex(&self) -> &Mailbox {
        &self.control().futex
    }

    pub(super) fn polled(&self) -> &Mailbox {
        &self.control().polled
    }

    /// Where these bytes of the arena lie.
    fn slot(&self, entry: Entry) -> Result<*mut u8> {
        let end = entry.offset.checked_add(entry.len);
        if end.is_none_or(|end| end > self.arena_len() as u64) {
            return Err(Failure(format!("{entry:?} is outside of the floor's arena")));
        }
        Ok(self.map.as_mut_ptr().wrapping_add(Self::arena_start() + entry.offset as usize))
    }

    /// Copies `from` into a slot.
    pub(super) fn write(&self, entry: Entry, from: &[u8]) -> Result<()> {
        if entry.len != from.len() as u64 {
            return Err(Failure(format!("a slot of {} bytes for {}", entry.len, from.len())));
        }
        let slot = self.slot(entry)?;
        // SAFETY: the slot lies inside the mapping and has the source's length. The server granted it to this client alone.
        unsafe { ptr::copy_nonoverlapping(from.as_ptr(), slot, from.len()) };
        Ok(())
    }

    /// Copies a slot into `to`.
    pub(super) fn read(&self, entry: Entry, to: &mut [u8]) -> Result<()> {
        if entry.len != to.len() as u64 {
            return Err(Failure(format!("a value of {} bytes for {}", entry.len, to.len())));
        }
        let slot = self.slot(entry)?;
        // SAFETY: the slot lies inside the mapping and has the target's length. It is sealed: the comparison's one client
        // makes no other call meanwhile.
        unsafe { ptr::copy_nonoverlapping(slot, to.as_mut_ptr(), to.len()) };
        Ok(())
    }

    /// Where the value of `key` lies. Any process may ask, at any time.
    pub(super) fn find(&self, key: &Key) -> Option<Entry> {
        let rows = &self.control().index;
        let start = place(key);
        for row in (0..ROWS).map(|n| &rows[(start + n) % ROWS]) {
            loop {
                let version = row.version.load(Acquire);
                let found = [0, 1, 2, 3].map(|n| row.key[n].load(Relaxed));
                let (offset, len) = (row.offset.load(Relaxed), row.len.load(Relaxed));
                fence(Acquire);
                if version % 2 == 1 || row.version.load(Relaxed) != version {
                    std::hint::spin_loop();
                    continue;
                }
                match found {
                    _ if version == 0 => return None,
                    found if found == *key => return Some(Entry { key: *key, offset, len }),
                    _ => break,
                }
            }
        }
        None
    }

    /// Stores where a value lies; where the one before lay. Only the server calls it, one thread at a time.
    pub(super) fn insert(&self, entry: Entry) -> Result<Option<Entry>> {
        let rows = &self.control().index;
        let start = place(&entry.key);
        for row in (0..ROWS).map(|n| &rows[(start + n) % ROWS]) {
            let free = row.version.load(Relaxed) == 0;
            if !free && [0, 1, 2, 3].map(|n| row.key[n].load(Relaxed)) != entry.key {
                continue;
            }
            let old = Entry { key: entry.key, offset: row.offset.load(Relaxed), len: row.len.load(Relaxed) };
            row.version.fetch_add(1, AcqRel);
            for (word, value) in row.key.iter().zip(entry.key) {
                word.store(value, Relaxed);
            }
            row.offset.store(entry.offset, Relaxed);
            row.len.store(entry.len, Relaxed);
            row.version.fetch_add(1, Release);
            return Ok((!free).then_some(old));
        }
        Err(Failure("the floor's index is full".into()))
    }
}

/// Where a key's row is looked for first.
fn place(key: &Key) -> usize {
    let mix = |state: u64, word: &u64| (state ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    key.iter().fold(0x517c_c1b7_2722_0a95, mix) as usize % ROWS
}

#[cfg(test)]
mod tests {
    use super::{super::message::key, *};

    #[test]
    fn the_index_finds_what_was_stored_last() {
        let (shared, _file) = Shared::create(1 << 16).unwrap();
        for n in 0..1000_u64 {
            let entry = Entry { key: key(&format!("k{n}")), offset: n, len: 1 };
            assert_eq!(shared.insert(entry), Ok(None));
        }
        let newer = Entry { key: key("k7"), offset: 4000, len: 2 };
        assert_eq!(shared.insert(newer).unwrap().map(|old| old.offset), Some(7));
        assert_eq!(shared.find(&key("k7")), Some(newer));
        assert_eq!(shared.find(&key("k999")).map(|found| found.offset), Some(999));
        assert_eq!(shared.find(&key("k1000")), None);
    }

    #[test]
    fn nothing_outside_of_the_arena_is_touched() {
        let (shared, _file) = Shared::create(1 << 16).unwrap();
        let at = |offset, len| Entry { offset, len, ..Entry::default() };
        assert!(shared.write(at((1 << 16) - 4, 4), b"abcd").is_ok());
        assert!(shared.write(at((1 << 16) - 3, 4), b"abcd").is_err());
        assert!(shared.write(at(u64::MAX, 4), b"abcd").is_err());
        assert!(shared.read(at(0, 5), &mut [0; 4]).is_err());
    }
}

//! The buckets of the shared index: written by daemon threads that exclude each other bucket by bucket, read by anybody.

use super::words::Words;

/// Entries of a bucket.
pub(super) const WAYS: usize = 4;
/// Words of an entry for the key and what is stored beside the value, each from a word's start on.
const BODY: usize = 24;
/// The words of an entry before its body.
const FIXED: usize = 6;
/// Words of a bucket's first line: the sequence, then one tag for each way.
const LINE: usize = 8;
/// Words of a bucket.
pub(super) const BUCKET: usize = LINE + WAYS * (FIXED + BODY);

const _: () = assert!(BUCKET == 128 && WAYS < LINE);

// The fixed words of an entry.
const ID: usize = 0;
const SPACE: usize = 1;
const ARENA: usize = 2;
const OFFSET: usize = 3;
const LEN: usize = 4;
/// Bytes of the key, and above them those of the description.
const LENS: usize = 5;

/// What is said of a value.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Entry<'a> {
    /// Never 0, never used twice.
    pub(crate) id: u64,
    pub(crate) space: u64,
    pub(crate) key: &'a [u8],
    pub(crate) meta: &'a [u8],
    pub(crate) arena: u64,
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

/// An entry as it was read. It can be relied on only where [`Table::is_as_seen`] says so afterwards.
#[derive(Debug)]
pub(crate) struct Seen {
    pub(crate) id: u64,
    pub(crate) arena: u64,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    /// Where the entry is.
    pub(crate) slot: u32,
    sequence: u64,
    meta: [u64; BODY],
    meta_len: usize,
}

impl Seen {
    /// What was stored beside the value.
    pub(crate) fn meta(&self) -> Box<[u8]> {
        if self.meta_len == 0 {
            return Box::default();
        }
        self.meta.iter().flat_map(|word| word.to_le_bytes()).take(self.meta_len).collect()
    }
}

/// A bucket is being written.
#[derive(Debug)]
pub(crate) struct Busy;

/// Buckets, as many as there are words for: a power of two.
#[derive(Debug)]
pub(crate) struct Table<W> {
    words: W,
    mask: u64,
}

impl<W: Words> Table<W> {
    pub(super) fn with_buckets(words: W, buckets: usize) -> Self {
        debug_assert!(buckets.is_power_of_two());
        Table { words, mask: buckets as u64 - 1 }
    }

    /// Steps 1 and 2: the entry of a key, if it is there.
    pub(crate) fn look(&self, hash: u64, space: u64, key: &[u8]) -> Result<Option<Seen>, Busy> {
        let bucket = self.bucket(hash);
        let head = bucket * BUCKET;
        let sequence = self.words.load_acquire(head);
        if sequence & 1 != 0 {
            return Err(Busy);
        }
        for way in 0..WAYS {
            if self.words.load(head + 1 + way) != tag(hash) {
                continue;
            }
            let entry = entry(bucket, way);
            let at = |word| self.words.load(entry + word);
            let lens = at(LENS);
            let (key_len, meta_len) = ((lens as u32) as usize, (lens >> 32) as usize);
            let (id, body) = (at(ID), entry + FIXED);
            let meta_at = key_len.div_ceil(8);
            let fits = meta_at + meta_len.div_ceil(8) <= BODY;
            if id == 0 || at(SPACE) != space || key_len != key.len() || !fits {
                continue;
            }
            if !packed(key).enumerate().all(|(i, word)| self.words.load(body + i) == word) {
                continue;
            }
            let mut meta = [0; BODY];
            for (i, word) in meta.iter_mut().take(meta_len.div_ceil(8)).enumerate() {
                *word = self.words.load(body + meta_at + i);
            }
            let (arena, offset, len) = (at(ARENA), at(OFFSET), at(LEN));
            let slot = (bucket * WAYS + way) as u32;
            return Ok(Some(Seen { id, arena, offset, len, slot, sequence, meta, meta_len }));
        }
        Ok(None)
    }

    /// Step 5, after the fence of step 4: whether nobody has written the bucket since the entry was read.
    pub(crate) fn is_as_seen(&self, seen: &Seen) -> bool {
        self.words.load(seen.slot as usize / WAYS * BUCKET) == seen.sequence
    }

    /// Writes an entry, in place of another one where the bucket is full; its slot, or none where it does not fit or
    /// somebody else is writing there.
    pub(crate) fn publish(&self, hash: u64, entry: &Entry<'_>) -> Option<u32> {
        if entry.key.len().div_ceil(8) + entry.meta.len().div_ceil(8) > BODY {
            return None;
        }
        let bucket = self.bucket(hash);
        let sequence = self.try_lock(bucket)?;
        let vacant = (0..WAYS).find(|&way| self.words.load(self::entry(bucket, way) + ID) == 0);
        // Any will do; the sequence goes on with each write.
        let way = vacant.unwrap_or((sequence / 2) as usize % WAYS);
        let at = self::entry(bucket, way);
        let lens = entry.key.len() as u64 | (entry.meta.len() as u64) << 32;
        let fixed = [entry.id, entry.space, entry.arena, entry.offset, entry.len, lens];
        let words = fixed.into_iter().chain(packed(entry.key)).chain(packed(entry.meta));
        words.enumerate().for_each(|(i, word)| self.words.store(at + i, word));
        self.words.store(bucket * BUCKET + 1 + way, tag(hash));
        self.unlock(bucket, sequence + 2);
        Some((bucket * WAYS + way) as u32)
    }

    /// Step a: takes the entry of `id` out of its slot, if it is still there.
    pub(crate) fn withdraw(&self, slot: u32, id: u64) {
        let (bucket, way) = (slot as usize / WAYS, slot as usize % WAYS);
        if !self.has(slot, id) {
            // Ids never come back, so what has been displaced stays so.
            return;
        }
        let sequence = loop {
            match self.try_lock(bucket) {
                Some(sequence) => break sequence,
                None => W::pause(),
            }
        };
        if !self.has(slot, id) {
            self.unlock(bucket, sequence);
            return;
        }
        self.words.store(entry(bucket, way) + ID, 0);
        self.words.store(bucket * BUCKET + 1 + way, 0);
        self.unlock(bucket, sequence + 2);
    }

    /// Whether the entry of `id` is in that slot. To be asked by writers only.
    pub(crate) fn has(&self, slot: u32, id: u64) -> bool {
        self.words.load_acquire(entry(slot as usize / WAYS, slot as usize % WAYS) + ID) == id
    }

    fn bucket(&self, hash: u64) -> usize {
        (hash & self.mask) as usize
    }

    /// Makes the sequence odd; what it was.
    fn try_lock(&self, bucket: usize) -> Option<u64> {
        let sequence = self.words.load(bucket * BUCKET);
        let free = sequence & 1 == 0 && self.words.replace(bucket * BUCKET, sequence, sequence + 1).is_ok();
        // Who reads a word that is written from now on reads an odd sequence afterwards, or a later one.
        W::fence_release();
        free.then_some(sequence)
    }

    fn unlock(&self, bucket: usize, sequence: u64) {
        self.words.store_release(bucket * BUCKET, sequence);
    }
}

/// The first word of an entry.
fn entry(bucket: usize, way: usize) -> usize {
    bucket * BUCKET + LINE + way * (FIXED + BODY)
}

/// What stands for a hash in the bucket's first line; never 0, which stands for none.
fn tag(hash: u64) -> u64 {
    hash | 1 << 63
}

/// Bytes as words, the last one filled up with zeros.
fn packed(bytes: &[u8]) -> impl Iterator<Item = u64> + '_ {
    bytes.chunks(8).map(|chunk| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        u64::from_le_bytes(word)
    })
}

#[cfg(test)]
mod tests {
    use std::{ptr::NonNull, sync::Arc};

    use super::{super::Mapped, *};

    /// Of two buckets.
    fn table() -> Table<Mapped> {
        let memory: Arc<Box<[std::sync::atomic::AtomicU64]>> =
            Arc::new((0..2 * BUCKET).map(|_| 0.into()).collect());
        let base = NonNull::from(&memory[0]).cast();
        // SAFETY: the words live as long as the box, which is kept, and are atomic.
        Table::with_buckets(unsafe { Mapped::new(base, 2 * BUCKET, memory) }, 2)
    }

    fn entry<'a>(id: u64, key: &'a str, meta: &'a [u8]) -> Entry<'a> {
        Entry { id, space: 1, key: key.as_bytes(), meta, arena: 3, offset: 4096 * id, len: 10 * id }
    }

    fn id(table: &Table<Mapped>, hash: u64, key: &str) -> Option<u64> {
        table.look(hash, 1, key.as_bytes()).unwrap().map(|seen| seen.id)
    }

    #[test]
    fn an_entry_is_found_by_its_whole_key_in_its_namespace_until_it_is_withdrawn() {
        let table = table();
        let slot = table.publish(5, &entry(1, "a key", b"what is beside")).unwrap();
        let seen = table.look(5, 1, b"a key").unwrap().unwrap();
        assert_eq!((seen.id, seen.arena, seen.offset, seen.len, seen.slot), (1, 3, 4096, 10, slot));
        assert_eq!(*seen.meta(), *b"what is beside");
        assert!(table.is_as_seen(&seen));
        // Of one hash, as happens.
        for (space, key) in [(1, "a ke"), (1, "a key\0"), (1, "b key"), (2, "a key"), (1, "")] {
            assert!(table.look(5, space, key.as_bytes()).unwrap().is_none(), "{space} {key}");
        }
        assert!(table.look(4, 1, b"a key").unwrap().is_none());
        table.withdraw(slot, 2);
        assert!(table.is_as_seen(&seen), "another id has no entry there");
        table.withdraw(slot, 1);
        assert!(!table.is_as_seen(&seen));
        assert_eq!(id(&table, 5, "a key"), None);
    }

    #[test]
    fn an_entry_holds_what_fits_it_and_no_more() {
        let table = table();
        let longest = "k".repeat(8 * BODY);
        assert!(table.publish(0, &entry(1, &longest, b"")).is_some());
        assert_eq!(id(&table, 0, &longest), Some(1));
        assert!(table.publish(0, &entry(2, &longest, b"m")).is_none());
        assert!(table.publish(0, &entry(2, &"k".repeat(8 * BODY + 1), b"")).is_none());
        let meta = [7; 8 * (BODY - 1)];
        assert!(table.publish(0, &entry(3, "k", &meta)).is_some());
        assert_eq!(*table.look(0, 1, b"k").unwrap().unwrap().meta(), meta);
    }

    #[test]
    fn a_full_bucket_displaces_and_is_no_place_of_what_it_displaced() {
        let table = table();
        let keys: Vec<_> = (1..=40).map(|n| (n, format!("k{n}"))).collect();
        let slots: Vec<_> =
            keys.iter().map(|(n, key)| table.publish(2 * n, &entry(*n, key, b"")).unwrap()).collect();
        let there = |(n, key): &&(u64, String)| id(&table, 2 * n, key) == Some(*n);
        assert_eq!(keys.iter().filter(there).count(), WAYS);
        assert!(there(&keys.last().unwrap()));
        keys.iter().zip(slots).for_each(|((n, _), slot)| table.withdraw(slot, *n));
        assert_eq!(keys.iter().filter(there).count(), 0);
    }
}

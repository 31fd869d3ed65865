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

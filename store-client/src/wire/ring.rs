//! Memory that a client and the daemon share for their messages: one lane for requests, one for answers.
//!
//! ```text
//! | requests: written | read | asleep || answers: written | read | asleep | ... | requests' bytes | answers' bytes |
//! ```
//!
//! A lane is a ring of 64-bit words with one producer and one consumer. `written` and `read` count bytes and only ever
//! grow. Each side keeps its own count to itself and never reads it back; of the other side's words each is read once,
//! checked, and what it leads to is copied out before anybody looks at it. So a peer that writes whatever it likes, whenever
//! it likes, gets its own messages garbled, or an error.
//!
//! A record is a word with the message's length, and the message, padded to whole words; it lies in one piece. Where one
//! would not fit before the end, or where nobody is behind, the producer goes back to the start: the same few pages
//! then carry all messages and stay in the caches.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    ptr::{self, NonNull},
    sync::Arc,
};

use rustix::{
    fs::{FallocateFlags, MemfdFlags, SealFlags},
    io::Errno,
    mm::{MapFlags, ProtFlags},
};

use super::message::MESSAGE_MAX;
use crate::index::{Mapped, Words};

#[cfg(test)]
mod models;
#[cfg(test)]
mod tests;

/// Bytes of a word, the unit of everything here.
const WORD: usize = size_of::<u64>();

/// The head of a record that has none: the next one lies at the start.
const REWIND: u64 = u64::MAX;

/// Set in the head of a record whose descriptors come by the socket.
const BESIDE: u64 = 1 << 32;

/// Bytes of a lane: two of the longest records, so that one always fits in one piece, wherever the last one ended.
const CAPACITY: usize = (2 * (WORD + MESSAGE_MAX)).next_multiple_of(4096);

/// A producer that is this far goes back to the start as soon as the consumer has read everything.
const FAR: usize = 16 << 10;

/// Words that are written by one side and read by the other are this many bytes apart: processors fetch lines in pairs.
const APART: usize = 128;

/// Bytes before the lanes' messages.
const HEAD: usize = 4096;

/// Bytes of the whole.
const LEN: usize = HEAD + 2 * CAPACITY;

/// Whose end it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Client,
    Node,
}

/// A message that was taken out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Record {
    pub(super) len: usize,
    /// Whether descriptors come with it, by the socket.
    pub(super) beside: bool,
}

/// One end of the shared memory, which another process writes to at any time.
#[derive(Debug)]
pub(crate) struct Ring<W = Mapped> {
    words: W,
    out: Lane,
    inward: Lane,
    /// Where the next message goes, where the last one began, and how far the peer was when it was last asked.
    written: u64,
    began: u64,
    peer_read: u64,
    /// Up to where messages were taken.
    read: u64,
}

impl Ring {
    /// The daemon's end, and what the client needs to [`open`](Self::open) its own.
    pub(crate) fn create() -> io::Result<(Self, OwnedFd)> {
        let create = |flags| rustix::fs::memfd_create("haulier-ring", flags);
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        // Kernels before 6.3 do not know the seal against execution.
        let file = create(flags | MemfdFlags::NOEXEC_SEAL).or_else(|e| match e {
            Errno::INVAL => create(flags),
            e => Err(e),
        })?;
        // All of it is there before anybody touches it, since a touch that finds no memory is a fault.
        rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, LEN as u64)?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok((Self::over(map(&file)?, Side::Node), file))
    }

    /// The client's end.
    ///
    /// *Errors*: `InvalidData` for a file that could not be touched safely.
    pub(crate) fn open(file: &OwnedFd) -> io::Result<Self> {
        let size = rustix::fs::fstat(file)?.st_size;
        if size != LEN as i64 || !rustix::fs::fcntl_get_seals(file)?.contains(SealFlags::SHRINK) {
            return Err(invalid("a ring came that is not sealed, or of another size"));
        }
        Ok(Self::over(map(file)?, Side::Client))
    }
}

impl<W: Words> Ring<W> {
    fn over(words: W, side: Side) -> Self {
        let (out, inward) = match side {
            Side::Client => (Lane::REQUESTS, Lane::ANSWERS),
            Side::Node => (Lane::ANSWERS, Lane::REQUESTS),
        };
        Ring { words, out, inward, written: 0, began: 0, peer_read: 0, read: 0 }
    }

    /// Adds a message, of 1 to [`MESSAGE_MAX`] bytes, if there is room; whether it was added.
    ///
    /// *Errors*: `InvalidInput` for a message of another length; `InvalidData` where the peer claims what cannot be.
    pub(super) fn push(&mut self, message: &[u8], beside: bool) -> io::Result<bool> {
        let (at, size) = (offset(self.written), record(message.len()));
        let Some(skip) = self.room(message.len())? else { return Ok(false) };
        let start = if skip > 0 {
            self.words.store(self.out.data + at / WORD, REWIND);
            0
        } else {
            at
        };
        let head = self.out.data + start / WORD;
        self.words.store(head, message.len() as u64 | if beside { BESIDE } else { 0 });
        let (words, rest) = message.as_chunks::<WORD>();
        for (i, &word) in words.iter().enumerate() {
            self.words.store(head + 1 + i, u64::from_ne_bytes(word));
        }
        if !rest.is_empty() {
            let mut word = [0; WORD];
            word[..rest.len()].copy_from_slice(rest);
            self.words.store(head + 1 + words.len(), u64::from_ne_bytes(word));
        }
        self.began = self.written;
        self.written += (skip + size) as u64;
        self.words.store_release(self.out.written, self.written);
        Ok(true)
    }

    /// Whether a message of `len` bytes can be pushed now: then how many bytes are left out before it.
    ///
    /// *Errors*: as [`push`](Self::push).
    pub(super) fn room(&mut self, len: usize) -> io::Result<Option<usize>> {
        if !(1..=MESSAGE_MAX).contains(&len) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let (at, size) = (offset(self.written), record(len));
        let mut skip = 0;
        if at + size > CAPACITY || (at >= FAR && size <= at && self.unread()? == 0) {
            skip = CAPACITY - at;
        }
        let fits = |unread: usize| unread + skip + size <= CAPACITY;
        let room = fits((self.written - self.peer_read) as usize) || fits(self.unread()?);
        Ok(room.then_some(skip))
    }

    /// Takes the next message out into `buf[..len]`, if there is one; `buf` has [`MESSAGE_MAX`] bytes or more.
    ///
    /// *Errors*: `InvalidData` where the peer claims what cannot be.
    pub(super) fn take(&mut self, buf: &mut [u8]) -> io::Result<Option<Record>> {
        let ready = self.words.load_acquire(self.inward.written).wrapping_sub(self.read);
        if ready == 0 {
            return Ok(None);
        }
        if ready > CAPACITY as u64 || !ready.is_multiple_of(WORD as u64) {
            return Err(invalid("a ring has a position that cannot be"));
        }
        let at = offset(self.read);
        let mut skip = 0;
        let mut head = self.words.load(self.inward.data + at / WORD);
        if head == REWIND {
            skip = CAPACITY - at;
            head = self.words.load(self.inward.data);
        }
        let start = if skip > 0 { 0 } else { at };
        let (len, beside) = ((head & !BESIDE) as usize, head & BESIDE != 0);
        if len == 0 || len > MESSAGE_MAX {
            return Err(invalid("a ring has a record of a length that cannot be"));
        }
        let size = record(len);
        if start + size > CAPACITY || (skip + size) as u64 > ready {
            return Err(invalid("a ring has a record that goes beyond its end"));
        }
        let first = self.inward.data + start / WORD + 1;
        let (chunks, _) = buf[..size - WORD].as_chunks_mut::<WORD>();
        for (i, to) in chunks.iter_mut().enumerate() {
            *to = self.words.load(first + i).to_ne_bytes();
        }
        self.read += (skip + size) as u64;
        self.words.store_release(self.inward.read, self.read);
        Ok(Some(Record { len, beside }))
    }

    /// Whether the peer has written anything since.
    pub(super) fn is_ready(&self) -> bool {
        self.words.load(self.inward.written) != self.read
    }

    /// Sleeps by `wait`, which the peer's bell ends; not where a message has come already. From here on the peer rings, since
    /// nobody looks.
    pub(super) fn sleep<R>(&self, wait: impl FnOnce() -> R) -> Option<R> {
        self.words.store(self.inward.asleep, 1);
        // With the one in `must_ring`: either this side sees the message, or the producer sees that it sleeps.
        W::fence_seq_cst();
        let outcome = (!self.is_ready()).then(wait);
        self.words.store(self.inward.asleep, 0);
        outcome
    }

    /// Whether the peer has to be woken for what was written; true once for each time that it sleeps.
    pub(super) fn must_ring(&self) -> bool {
        W::fence_seq_cst();
        let asleep = self.words.load(self.out.asleep);
        asleep != 0 && self.words.replace(self.out.asleep, asleep, 0).is_ok()
    }

    /// Whether the peer has taken the last message out. One that claims what cannot be has.
    pub(super) fn was_taken(&self) -> bool {
        let unread = self.written.checked_sub(self.words.load_acquire(self.out.read));
        unread.is_none_or(|unread| self.written - self.began > unread || unread > CAPACITY as u64)
    }

    /// Bytes that the peer has not taken yet.
    fn unread(&mut self) -> io::Result<usize> {
        // Acquire: what it has taken may be written over.
        let read = self.words.load_acquire(self.out.read);
        let unread = self.written.checked_sub(read).filter(|&unread| unread <= CAPACITY as u64);
        let unread = unread.ok_or_else(|| invalid("a ring has a position that cannot be"))?;
        self.peer_read = read;
        Ok(unread as usize)
    }
}

/// Bytes of the record of a message of `len` bytes.
fn record(len: usize) -> usize {
    WORD + len.next_multiple_of(WORD)
}

/// Where in a lane a position is.
fn offset(position: u64) -> usize {
    (position % CAPACITY as u64) as usize
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// Where the parts of a lane lie, in words of the whole.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Lane {
    pub(crate) written: usize,
    pub(crate) read: usize,
    pub(crate) asleep: usize,
    pub(crate) data: usize,
}

/// Requests and answers, for tests that write what they should not.
#[cfg(test)]
pub(crate) fn words() -> [Lane; 2] {
    [Lane::REQUESTS, Lane::ANSWERS]
}

impl Lane {
    const REQUESTS: Lane = Lane::at(0, HEAD);
    const ANSWERS: Lane = Lane::at(3 * APART, HEAD + CAPACITY);

    const fn at(head: usize, data: usize) -> Self {
        Lane {
            written: head / WORD,
            read: (head + APART) / WORD,
            asleep: (head + 2 * APART) / WORD,
            data: data / WORD,
        }
    }
}

/// The words of a file of [`LEN`] bytes that cannot become shorter.
fn map(file: &OwnedFd) -> io::Result<Mapped> {
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address that the kernel chooses touches no memory in use.
    let base =
        unsafe { rustix::mm::mmap(ptr::null_mut(), LEN, protection, MapFlags::SHARED, file.as_fd(), 0) }?;
    let base = NonNull::new(base.cast::<u8>()).ok_or(Errno::INVAL)?;
    let keep = Arc::new(Mapping { base });
    // SAFETY: page-aligned words, mapped until `keep` is dropped, of a file that cannot shrink under them. Both processes see
    // them through this function alone.
    Ok(unsafe { Mapped::new(base, LEN / WORD, keep) })
}

/// The mapping, until it is dropped.
#[derive(Debug)]
struct Mapping {
    base: NonNull<u8>,
}

// SAFETY: the mapping stays where it is until drop, and nothing here reads or writes through `base`.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `map` with this address and length, and the words that it is for are gone.
        let outcome = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), LEN) };
        debug_assert!(outcome.is_ok());
    }
}

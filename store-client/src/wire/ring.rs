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
    slice,
    sync::atomic::{AtomicU64, Ordering, fence},
};

use rustix::{
    fs::{FallocateFlags, MemfdFlags, SealFlags},
    io::Errno,
    mm::{MapFlags, ProtFlags},
};

use super::message::MESSAGE_MAX;

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

/// One end of the shared memory.
#[derive(Debug)]
pub(crate) struct Ring {
    shared: Shared,
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
        Ok((Self::over(Shared::map(&file)?, Side::Node), file))
    }

    /// The client's end.
    ///
    /// *Errors*: `InvalidData` for a file that could not be touched safely.
    pub(crate) fn open(file: &OwnedFd) -> io::Result<Self> {
        let size = rustix::fs::fstat(file)?.st_size;
        if size != LEN as i64 || !rustix::fs::fcntl_get_seals(file)?.contains(SealFlags::SHRINK) {
            return Err(invalid("a ring came that is not sealed, or of another size"));
        }
        Ok(Self::over(Shared::map(file)?, Side::Client))
    }

    fn over(shared: Shared, side: Side) -> Self {
        let (out, inward) = match side {
            Side::Client => (Lane::REQUESTS, Lane::ANSWERS),
            Side::Node => (Lane::ANSWERS, Lane::REQUESTS),
        };
        Ring { shared, out, inward, written: 0, began: 0, peer_read: 0, read: 0 }
    }

    /// Adds a message, of 1 to [`MESSAGE_MAX`] bytes, if there is room; whether it was added.
    ///
    /// *Errors*: `InvalidData` where the peer claims what cannot be.
    pub(super) fn push(&mut self, message: &[u8], beside: bool) -> io::Result<bool> {
        if message.is_empty() || message.len() > MESSAGE_MAX {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let (at, size) = (offset(self.written), record(message.len()));
        let Some(skip) = self.room(message.len())? else { return Ok(false) };
        let lane = self.shared.lane(self.out);
        let start = if skip > 0 {
            lane[at / WORD].store(REWIND, Ordering::Relaxed);
            0
        } else {
            at
        };
        let record = &lane[start / WORD..][..size / WORD];
        record[0].store(message.len() as u64 | if beside { BESIDE } else { 0 }, Ordering::Relaxed);
        let (words, rest) = message.as_chunks::<WORD>();
        for (to, &word) in record[1..].iter().zip(words) {
            to.store(u64::from_ne_bytes(word), Ordering::Relaxed);
        }
        if let (Some(to), false) = (record.last(), rest.is_empty()) {
            let mut word = [0; WORD];
            word[..rest.len()].copy_from_slice(rest);
            to.store(u64::from_ne_bytes(word), Ordering::Relaxed);
        }
        self.began = self.written;
        self.written += (skip + size) as u64;
        self.shared.word(self.out.written).store(self.written, Ordering::Release);
        Ok(true)
    }

    /// Whether a message of `len` bytes can be pushed now: then how many bytes are left out before it.
    ///
    /// *Errors*: as [`push`](Self::push).
    pub(super) fn room(&mut self, len: usize) -> io::Result<Option<usize>> {
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
        let ready = self.shared.word(self.inward.written).load(Ordering::Acquire).wrapping_sub(self.read);
        if ready == 0 {
            return Ok(None);
        }
        if ready > CAPACITY as u64 || !ready.is_multiple_of(WORD as u64) {
            return Err(invalid("a ring has a position that cannot be"));
        }
        let lane = self.shared.lane(self.inward);
        let at = offset(self.read);
        let mut skip = 0;
        let mut head = lane[at / WORD].load(Ordering::Relaxed);
        if head == REWIND {
            skip = CAPACITY - at;
            head = lane[0].load(Ordering::Relaxed);
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
        let record = &lane[start / WORD + 1..(start + size) / WORD];
        let (chunks, _) = buf[..size - WORD].as_chunks_mut::<WORD>();
        for (to, word) in chunks.iter_mut().zip(record) {
            *to = word.load(Ordering::Relaxed).to_ne_bytes();
        }
        self.read += (skip + size) as u64;
        self.shared.word(self.inward.read).store(self.read, Ordering::Release);
        Ok(Some(Record { len, beside }))
    }

    /// Whether the peer has written anything since.
    pub(super) fn is_ready(&self) -> bool {
        self.shared.word(self.inward.written).load(Ordering::Relaxed) != self.read
    }

    /// Tells the peer to ring from now on, since nobody looks. What was written before is seen by whoever looks again now.
    pub(super) fn fall_asleep(&self) {
        self.shared.word(self.inward.asleep).store(1, Ordering::Relaxed);
        // With the one in `must_ring`: either this side sees the message, or the producer sees that it sleeps.
        fence(Ordering::SeqCst);
    }

    /// Tells the peer that this side looks again.
    pub(super) fn wake_up(&self) {
        self.shared.word(self.inward.asleep).store(0, Ordering::Relaxed);
    }

    /// Whether the peer has to be woken for what was written; true once for each time that it sleeps.
    pub(super) fn must_ring(&self) -> bool {
        fence(Ordering::SeqCst);
        let asleep = self.shared.word(self.out.asleep);
        asleep.load(Ordering::Relaxed) != 0 && asleep.swap(0, Ordering::Relaxed) != 0
    }

    /// Whether the peer has taken the last message out. One that claims what cannot be has.
    pub(super) fn was_taken(&self) -> bool {
        let read = self.shared.word(self.out.read).load(Ordering::Acquire);
        self.written - self.began > self.written.wrapping_sub(read)
            || self.written.wrapping_sub(read) > CAPACITY as u64
    }

    /// Bytes that the peer has not taken yet.
    fn unread(&mut self) -> io::Result<usize> {
        // Acquire: what it has taken may be written over.
        let read = self.shared.word(self.out.read).load(Ordering::Acquire);
        let unread = self.written.wrapping_sub(read);
        if unread > CAPACITY as u64 {
            return Err(invalid("a ring has a position that cannot be"));
        }
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
struct Lane {
    written: usize,
    read: usize,
    asleep: usize,
    data: usize,
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

/// The mapping. Another process writes to it at any time, so it is seen as atomic words only.
#[derive(Debug)]
struct Shared {
    base: NonNull<AtomicU64>,
}

// SAFETY: the mapping stays where it is until drop, and all access is atomic.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    /// Maps a file of [`LEN`] bytes that cannot become shorter.
    fn map(file: &OwnedFd) -> io::Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses touches no memory in use.
        let base =
            unsafe { rustix::mm::mmap(ptr::null_mut(), LEN, protection, MapFlags::SHARED, file.as_fd(), 0) }?;
        NonNull::new(base.cast()).map(|base| Shared { base }).ok_or_else(|| Errno::INVAL.into())
    }

    fn words(&self) -> &[AtomicU64] {
        // SAFETY: `map` made LEN bytes there, page-aligned, which stay until drop; the file cannot shrink under them, and
        // atomic words may be written by others meanwhile.
        unsafe { slice::from_raw_parts(self.base.as_ptr(), LEN / WORD) }
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        &self.words()[at]
    }

    fn lane(&self, lane: Lane) -> &[AtomicU64] {
        &self.words()[lane.data..][..CAPACITY / WORD]
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `map` with this address and length, and no reference outlives `self`.
        let outcome = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), LEN) };
        debug_assert!(outcome.is_ok());
    }
}

#[cfg(test)]
mod tests {
    use std::{
        collections::VecDeque,
        sync::atomic::AtomicBool,
        thread,
        time::{Duration, Instant},
    };

    use proptest::prelude::*;

    use super::*;

    /// The daemon's end and the client's.
    fn pair() -> (Ring, Ring) {
        let (node, file) = Ring::create().unwrap();
        let client = Ring::open(&file).unwrap();
        (node, client)
    }

    fn message(seed: usize, len: usize) -> Vec<u8> {
        (0..len).map(|i| (i * 31 + seed * 7) as u8).collect()
    }

    fn buffer() -> Vec<u8> {
        vec![0; MESSAGE_MAX]
    }

    fn is_invalid<T: std::fmt::Debug>(outcome: io::Result<T>) -> bool {
        matches!(&outcome, Err(e) if e.kind() == io::ErrorKind::InvalidData)
    }

    fn lengths() -> impl Strategy<Value = usize> {
        prop_oneof![
            8 => 1..300usize,
            2 => 1..=MESSAGE_MAX,
            1 => Just(MESSAGE_MAX),
            1 => FAR - 16..FAR + 16,
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn messages_arrive_whole_and_in_order_however_pushes_and_takes_interleave(
            steps in prop::collection::vec((lengths(), any::<bool>(), 0..4usize), 1..200)
        ) {
            let (mut node, mut client) = pair();
            let mut under_way = VecDeque::new();
            let mut buf = buffer();
            for (seed, (len, beside, takes)) in steps.into_iter().enumerate() {
                let fits = client.room(len).unwrap().is_some();
                prop_assert_eq!(client.push(&message(seed, len), beside).unwrap(), fits);
                if fits {
                    under_way.push_back((message(seed, len), beside));
                }
                prop_assert!(fits || !under_way.is_empty(), "an empty ring has room");
                prop_assert_eq!(node.is_ready(), !under_way.is_empty());
                for _ in 0..takes {
                    let record = node.take(&mut buf).unwrap();
                    match (record, under_way.pop_front()) {
                        (None, None) => {}
                        (Some(Record { len, beside }), Some(wanted)) => {
                            prop_assert_eq!((&buf[..len], beside), (&wanted.0[..], wanted.1));
                        }
                        (record, wanted) => prop_assert!(false, "{record:?} for {}", wanted.is_some()),
                    }
                }
            }
        }
    }

    #[test]
    fn what_is_no_message_is_not_pushed() {
        let (mut node, _client) = pair();
        for len in [0, MESSAGE_MAX + 1] {
            assert_eq!(node.push(&vec![1; len], false).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        }
    }

    #[test]
    fn a_message_counts_as_taken_when_it_is() {
        let (mut node, mut client) = pair();
        client.push(b"one", false).unwrap();
        client.push(b"two", false).unwrap();
        let mut buf = buffer();
        for taken in [false, true] {
            assert!(!client.was_taken());
            node.take(&mut buf).unwrap().unwrap();
            assert_eq!(client.was_taken(), taken);
            if taken {
                break;
            }
        }
    }

    #[test]
    fn a_file_that_could_not_be_touched_safely_is_refused() {
        let file = |len: usize, seals| {
            let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
            let file = rustix::fs::memfd_create("haulier-ring-test", flags).unwrap();
            rustix::fs::ftruncate(&file, len as u64).unwrap();
            rustix::fs::fcntl_add_seals(&file, seals).unwrap();
            file
        };
        assert!(is_invalid(Ring::open(&file(LEN, SealFlags::GROW))));
        assert!(is_invalid(Ring::open(&file(LEN - 4096, SealFlags::SHRINK))));
        assert!(Ring::open(&file(LEN, SealFlags::SHRINK)).is_ok());
    }

    #[test]
    fn an_impossible_position_of_the_producer_is_an_error() {
        for written in [u64::MAX, 1, 7, CAPACITY as u64 + 8, 1 << 63] {
            let (mut node, client) = pair();
            client.shared.word(client.out.written).store(written, Ordering::Relaxed);
            assert!(is_invalid(node.take(&mut buffer())), "{written}");
        }
        // One that goes back has written a great deal.
        let (mut node, mut client) = pair();
        client.push(&message(1, 100), false).unwrap();
        node.take(&mut buffer()).unwrap().unwrap();
        client.shared.word(client.out.written).store(0, Ordering::Relaxed);
        assert!(is_invalid(node.take(&mut buffer())));
    }

    #[test]
    fn an_impossible_position_of_the_consumer_is_an_error() {
        // More than was written, by little or much.
        for read in [2 * CAPACITY as u64, 1 << 63, u64::MAX - (1 << 32)] {
            let (node, mut client) = pair();
            while client.push(&message(1, MESSAGE_MAX), false).unwrap() {}
            node.shared.word(node.inward.read).store(read, Ordering::Relaxed);
            assert!(is_invalid(client.push(&message(1, MESSAGE_MAX), false)), "{read}");
        }
    }

    #[test]
    fn an_impossible_record_is_an_error() {
        let longest = MESSAGE_MAX as u64;
        for head in [0, longest + 1, BESIDE, BESIDE | (longest + 1), u64::MAX - 1, 1 << 33, 1 << 63] {
            let (mut node, mut client) = pair();
            client.push(b"honest", false).unwrap();
            client.shared.lane(client.out)[0].store(head, Ordering::Relaxed);
            assert!(is_invalid(node.take(&mut buffer())), "{head:#x}");
        }
        // Longer than what was written, and a way back to the start that leads to another one.
        for head in [200, REWIND] {
            let (mut node, mut client) = pair();
            client.push(b"honest", false).unwrap();
            client.shared.lane(client.out)[0].store(head, Ordering::Relaxed);
            assert!(is_invalid(node.take(&mut buffer())), "{head:#x}");
        }
        // Beyond the end of the lane.
        let (mut node, mut client) = pair();
        for len in [MESSAGE_MAX, MESSAGE_MAX - 4096] {
            client.push(&message(1, len), false).unwrap();
            node.take(&mut buffer()).unwrap().unwrap();
        }
        let at = offset(client.written);
        client.written = client.written + CAPACITY as u64 - at as u64 - 8;
        node.read = client.written;
        client.shared.lane(client.out)[offset(client.written) / WORD].store(64, Ordering::Relaxed);
        client.shared.word(client.out.written).store(client.written + 80, Ordering::Relaxed);
        assert!(is_invalid(node.take(&mut buffer())));
    }

    /// Whatever it reads, the honest side gets garbled messages or an error, and touches nothing else.
    #[test]
    fn a_peer_that_scribbles_all_the_time_does_no_more_than_garble() {
        let (node, file) = Ring::create().unwrap();
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            let scribbler = Ring::open(&file).unwrap();
            let over = &over;
            scope.spawn(move || {
                let mut random = 0x9e37_79b9_7f4a_7c15u64;
                while !over.load(Ordering::Relaxed) {
                    random ^= random << 13;
                    random ^= random >> 7;
                    random ^= random << 17;
                    // The words of the head and the first records, with numbers that are nearly right among others.
                    let at = match random % 3 {
                        0 => (random >> 8) as usize % (6 * APART / WORD),
                        1 => (HEAD + (random >> 8) as usize % 4096) / WORD,
                        _ => (random >> 8) as usize % (LEN / WORD),
                    };
                    let value = if random & 1 << 60 == 0 { random >> 40 & !7 } else { random };
                    scribbler.shared.words()[at].store(value, Ordering::Relaxed);
                }
            });
            let (mut ring, mut buf) = (node, buffer());
            let (mut garbled, mut refused) = (0, 0);
            let end = Instant::now() + Duration::from_millis(300);
            while Instant::now() < end {
                for outcome in [ring.push(&[7; 200], false).map(|_| None), ring.take(&mut buf)] {
                    match outcome {
                        Ok(Some(record)) => {
                            assert!((1..=MESSAGE_MAX).contains(&record.len));
                            garbled += 1;
                        }
                        Ok(None) => {}
                        Err(e) => {
                            assert_eq!(e.kind(), io::ErrorKind::InvalidData);
                            refused += 1;
                        }
                    }
                }
                ring.was_taken();
                ring.must_ring();
            }
            over.store(true, Ordering::Relaxed);
            assert!(garbled + refused > 0, "the scribbler was never met");
        });
    }
}

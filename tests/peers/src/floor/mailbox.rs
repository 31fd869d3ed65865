//! A mailbox in shared memory: one question and one answer, told by a counter that is polled for a while and then waited
//! for with a futex.

use std::{
    sync::atomic::{
        AtomicU32, AtomicU64,
        Ordering::{Acquire, Relaxed, Release, SeqCst},
    },
    thread,
    time::{Duration, Instant},
};

use rustix::{
    io::Errno,
    thread::futex::{self, Flags, Timespec},
};

use super::message::{ANSWERED, ASKED, ENTRIES_MAX, Entry};

/// A counter that one side raises and the other waits for. On a cache line of its own.
#[repr(C, align(64))]
#[derive(Debug)]
pub(super) struct Bell {
    count: AtomicU32,
    asleep: AtomicU32,
}

impl Bell {
    pub(super) fn count(&self) -> u32 {
        self.count.load(Acquire)
    }

    /// Raises the counter, and wakes the other side where it sleeps.
    pub(super) fn ring(&self) {
        self.count.fetch_add(1, SeqCst);
        if self.asleep.swap(0, SeqCst) != 0 {
            // It cannot fail: the address is mapped and aligned.
            let _ = futex::wake(&self.count, Flags::empty(), 1);
        }
    }

    /// Waits until the counter is no more what it was when `seen`: polls for `spin`, giving the core away in between,
    /// since the other side may need this very core, then sleeps. Whether it came about within `patience`.
    pub(super) fn wait(&self, seen: u32, spin: Duration, patience: Duration) -> bool {
        if !spin.is_zero() {
            let start = Instant::now();
            while start.elapsed() < spin {
                if self.count() != seen {
                    return true;
                }
                thread::yield_now();
            }
        }
        let start = Instant::now();
        loop {
            self.asleep.store(1, SeqCst);
            if self.count.load(SeqCst) != seen {
                self.asleep.store(0, Relaxed);
                return true;
            }
            if start.elapsed() > patience {
                return false;
            }
            let nap = Timespec { tv_sec: 1, tv_nsec: 0 };
            match futex::wait(&self.count, Flags::empty(), seen, Some(&nap)) {
                Ok(()) | Err(Errno::AGAIN | Errno::INTR | Errno::TIMEDOUT) => {}
                Err(_) => return false,
            }
        }
    }
}

/// A question and its answer.
#[repr(C)]
#[derive(Debug)]
pub(super) struct Mailbox {
    pub(super) asked: Bell,
    pub(super) answered: Bell,
    ask: AtomicU32,
    count: AtomicU32,
    words: [AtomicU64; ENTRIES_MAX * ASKED],
}

impl Mailbox {
    /// Writes a question. The bell that is rung afterwards makes it visible.
    pub(super) fn write(&self, ask: u32, entries: &[Entry]) {
        self.ask.store(ask, Relaxed);
        self.count.store(entries.len() as u32, Relaxed);
        for (words, entry) in self.words.chunks_exact(ASKED).zip(entries) {
            for (word, value) in words.iter().zip(entry.asked()) {
                word.store(value, Relaxed);
            }
        }
    }

    /// Reads a question.
    pub(super) fn read(&self, entries: &mut Vec<Entry>) -> u32 {
        let count = (self.count.load(Relaxed) as usize).min(ENTRIES_MAX);
        entries.clear();
        entries.extend(self.words.chunks_exact(ASKED).take(count).map(|words| {
            let mut asked = [0; ASKED];
            for (value, word) in asked.iter_mut().zip(words) {
                *value = word.load(Relaxed);
            }
            Entry::from_asked(asked)
        }));
        self.ask.load(Relaxed)
    }

    /// Writes an answer over the question.
    pub(super) fn write_answer(&self, entries: &[Entry]) {
        for (words, entry) in self.words.chunks_exact(ANSWERED).zip(entries) {
            words[0].store(entry.offset, Relaxed);
            words[1].store(entry.len, Release);
        }
    }

    /// Reads an answer to these entries.
    pub(super) fn read_answer(&self, entries: &mut [Entry]) {
        for (words, entry) in self.words.chunks_exact(ANSWERED).zip(entries) {
            entry.offset = words[0].load(Relaxed);
            entry.len = words[1].load(Relaxed);
        }
    }
}

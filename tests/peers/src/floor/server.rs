//! The server of the floor: a process of its own, with a thread for each way to ask it.

use std::{
    collections::HashMap,
    fs::File,
    io::{self, Read, Write, stdin, stdout},
    os::{fd::AsFd, unix::net::UnixStream},
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::Duration,
};

use super::{
    client::SPIN,
    mailbox::Mailbox,
    message::{ANSWERED, ASKED, Ask, ENTRIES_MAX, Entry, NOTHING},
    shared::Shared,
};
use crate::failure::{During, Failure, Result};

/// Serves the memory that stdin is, to the client at the socket that stdout is, until that ends.
pub fn serve() -> Result<()> {
    let memory = File::from(stdin().as_fd().try_clone_to_owned().during("stdin")?);
    let socket = UnixStream::from(stdout().as_fd().try_clone_to_owned().during("stdout")?);
    let floor = Arc::new(Floor { shared: Shared::map(&memory)?, slots: Mutex::default() });
    for polled in [false, true] {
        let floor = Arc::clone(&floor);
        thread::Builder::new()
            .spawn(move || match polled {
                false => floor.at_mailbox(floor.shared.futex(), Duration::ZERO),
                true => floor.at_mailbox(floor.shared.polled(), SPIN),
            })
            .during("a thread of the floor")?;
    }
    floor.at_socket(socket)
}

struct Floor {
    shared: Shared,
    slots: Mutex<Slots>,
}

/// Slots that nobody uses, by length, and where the arena was never used.
#[derive(Default)]
struct Slots {
    free: HashMap<u64, Vec<u64>>,
    unused: u64,
}

impl Slots {
    fn take(&mut self, len: u64, arena: u64) -> Result<u64> {
        if let Some(offset) = self.free.get_mut(&len).and_then(Vec::pop) {
            return Ok(offset);
        }
        let (start, end) = (self.unused, self.unused.saturating_add(len.next_multiple_of(64)));
        if end > arena {
            return Err(Failure(format!("the floor's arena of {arena} bytes is used up")));
        }
        self.unused = end;
        Ok(start)
    }

    fn give_back(&mut self, entry: Entry) {
        self.free.entry(entry.len).or_default().push(entry.offset);
    }
}

impl Floor {
    /// Answers a question in place.
    fn answer(&self, ask: Ask, entries: &mut [Entry]) -> Result<()> {
        let arena = self.shared.arena_len() as u64;
        if ask == Ask::Get {
            for entry in entries {
                let nothing = Entry { len: NOTHING, ..*entry };
                *entry = self.shared.find(&entry.key).unwrap_or(nothing);
            }
            return Ok(());
        }
        // Nothing panics while it is locked.
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        for entry in entries {
            if ask == Ask::Put
                && let Some(old) = self.shared.insert(*entry)?
            {
                slots.give_back(old);
            }
            entry.offset = slots.take(entry.len, arena)?;
        }
        Ok(())
    }

    fn at_mailbox(&self, mailbox: &Mailbox, spin: Duration) {
        let mut entries = Vec::with_capacity(ENTRIES_MAX);
        let mut seen = 0;
        loop {
            if !mailbox.asked.wait(seen, spin, Duration::MAX) {
                return;
            }
            seen = mailbox.asked.count();
            let ask = Ask::from_number(mailbox.read(&mut entries));
            let answered =
                ask.ok_or(Failure("not a question".into())).and_then(|ask| self.answer(ask, &mut entries));
            if let Err(e) = answered {
                // The client sees lengths that it did not ask for.
                eprintln!("{e}");
                entries.iter_mut().for_each(|entry| entry.len = NOTHING);
            }
            mailbox.write_answer(&entries);
            mailbox.answered.ring();
        }
    }

    fn at_socket(&self, mut socket: UnixStream) -> Result<()> {
        let mut buffer = vec![0; ENTRIES_MAX * ASKED * 8];
        let mut entries = Vec::with_capacity(ENTRIES_MAX);
        loop {
            let mut head = [0; 8];
            match socket.read_exact(&mut head) {
                Ok(()) => {}
                Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
                Err(e) => return Err(Failure::new("reading a question", e)),
            }
            let [ask, count] = [&head[..4], &head[4..]]
                .map(|bytes| bytes.iter().rev().fold(0, |number, byte| number << 8 | u32::from(*byte)));
            let ask = Ask::from_number(ask).ok_or(Failure(format!("not a question: {ask}")))?;
            let body =
                buffer.get_mut(..count as usize * ASKED * 8).ok_or(Failure("too many values".into()))?;
            socket.read_exact(body).during("reading a question")?;
            entries.clear();
            entries.extend(body.chunks_exact(ASKED * 8).map(|bytes| {
                let mut asked = [0; ASKED];
                for (word, bytes) in asked.iter_mut().zip(bytes.chunks_exact(8)) {
                    *word = u64::from_le_bytes(bytes.try_into().unwrap_or_default());
                }
                Entry::from_asked(asked)
            }));
            self.answer(ask, &mut entries)?;
            let answer = &mut buffer[..entries.len() * ANSWERED * 8];
            for (bytes, entry) in answer.chunks_exact_mut(16).zip(&entries) {
                bytes[..8].copy_from_slice(&entry.offset.to_le_bytes());
                bytes[8..].copy_from_slice(&entry.len.to_le_bytes());
            }
            socket.write_all(answer).during("answering")?;
        }
    }
}

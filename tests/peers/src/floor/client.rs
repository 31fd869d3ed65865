//! The client of the floor, and each way as a store.

use std::{
    cell::RefCell,
    collections::HashMap,
    env,
    hint::black_box,
    io::{Read, Write},
    os::{fd::OwnedFd, unix::net::UnixStream},
    path::Path,
    process::{Command, Stdio},
    rc::Rc,
    time::Duration,
};

use super::{
    mailbox::Mailbox,
    message::{ANSWERED, ASKED, Ask, ENTRIES_MAX, Entry, key},
    shared::Shared,
};
use crate::{
    child::Server,
    failure::{During, Failure, Result},
    job::{Job, Op, Shape, pairs, pairs_mut},
    store::Store,
};

/// How long the mailbox is polled before it is slept at: longer than a copy of 1 MiB, which lies between two calls.
pub(super) const SPIN: Duration = Duration::from_micros(200);
const PATIENCE: Duration = Duration::from_secs(20);

/// How the server is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// A message over a Unix stream socket.
    Socket,
    /// A mailbox in shared memory; both sides sleep at a futex.
    Futex,
    /// The same; both sides poll it with sched_yield for a while before they sleep.
    Mailbox,
    /// Not at all: the client reads the index, which is shared. For gets.
    Index,
}

/// The server's process, and the one connection to it.
pub struct FloorServer {
    shared: Shared,
    socket: UnixStream,
    bytes: Vec<u8>,
    /// Slots granted ahead, for each shape; one set serves all ways, which are used in turns.
    granted: HashMap<Shape, Vec<Entry>>,
    // Last: the socket's end lets it end.
    _server: Server,
}

impl FloorServer {
    /// Starts the server: this program again, with the argument `floor`.
    pub fn start(dir: &Path, arena: usize) -> Result<Self> {
        let (shared, memory) = Shared::create(arena)?;
        let (socket, theirs) = UnixStream::pair().during("a socket for the floor")?;
        socket.set_read_timeout(Some(PATIENCE)).during("a timeout for the floor")?;
        let mut command = Command::new(env::current_exe().during("this program's own file")?);
        command.arg("floor").stdin(memory).stdout(Stdio::from(OwnedFd::from(theirs)));
        let server = Server::start("floor", dir, &mut command)?;
        Ok(FloorServer { shared, socket, bytes: Vec::new(), granted: HashMap::new(), _server: server })
    }

    fn ask(&mut self, way: Way, ask: Ask, entries: &mut [Entry]) -> Result<()> {
        if entries.len() > ENTRIES_MAX {
            return Err(Failure(format!("{} values in one message; {ENTRIES_MAX} at most", entries.len())));
        }
        match way {
            Way::Socket | Way::Index => self.ask_at_socket(ask, entries),
            Way::Futex => ask_at(self.shared.futex(), Duration::ZERO, ask, entries),
            Way::Mailbox => ask_at(self.shared.polled(), SPIN, ask, entries),
        }
    }

    fn ask_at_socket(&mut self, ask: Ask, entries: &mut [Entry]) -> Result<()> {
        self.bytes.clear();
        self.bytes.extend_from_slice(&(ask as u32).to_le_bytes());
        self.bytes.extend_from_slice(&(entries.len() as u32).to_le_bytes());
        for word in entries.iter().flat_map(|entry| entry.asked()) {
            self.bytes.extend_from_slice(&word.to_le_bytes());
        }
        self.socket.write_all(&self.bytes).during("asking the floor")?;
        let answer = &mut self.bytes[..entries.len() * ANSWERED * 8];
        self.socket.read_exact(answer).during("the floor's answer")?;
        let mut words = answer.chunks_exact(8).map(|b| u64::from_le_bytes(b.try_into().unwrap_or_default()));
        for entry in entries {
            entry.offset = words.next().unwrap_or_default();
            entry.len = words.next().unwrap_or_default();
        }
        Ok(())
    }
}

fn ask_at(mailbox: &Mailbox, spin: Duration, ask: Ask, entries: &mut [Entry]) -> Result<()> {
    let seen = mailbox.answered.count();
    mailbox.write(ask as u32, entries);
    mailbox.asked.ring();
    if !mailbox.answered.wait(seen, spin, PATIENCE) {
        return Err(Failure(format!("the floor's server does not answer within {PATIENCE:?}")));
    }
    mailbox.read_answer(entries);
    Ok(())
}

/// One way to ask the server, as a store.
pub struct Floor {
    server: Rc<RefCell<FloorServer>>,
    way: Way,
    /// The message in hand; kept, so that no call allocates it.
    entries: Vec<Entry>,
}

impl Floor {
    /// Asks `server` this way.
    pub fn new(server: &Rc<RefCell<FloorServer>>, way: Way) -> Self {
        Floor { server: Rc::clone(server), way, entries: Vec::with_capacity(ENTRIES_MAX) }
    }

    fn put(&mut self, job: &Job, copy: bool) -> Result<()> {
        let mut server = self.server.borrow_mut();
        let slots = server.granted.get(&job.shape).ok_or(Failure("no slots were granted".into()))?;
        self.entries.clone_from(slots);
        for (slot, (text, value)) in self.entries.iter_mut().zip(pairs(&job.keys, job.source())) {
            slot.key = key(text);
            if copy {
                server.shared.write(*slot, value)?;
            }
        }
        server.ask(self.way, Ask::Put, &mut self.entries)?;
        server.granted.entry(job.shape).or_default().clone_from(&self.entries);
        Ok(())
    }

    /// Leaves in `entries` where the values lie.
    fn find(&mut self, keys: &[String]) -> Result<()> {
        let mut server = self.server.borrow_mut();
        self.entries.clear();
        if self.way == Way::Index {
            for text in keys {
                let found = server.shared.find(&key(text));
                self.entries.push(found.ok_or(Failure("the value is not in the index".into()))?);
            }
            return Ok(());
        }
        self.entries.extend(keys.iter().map(|text| Entry { key: key(text), ..Entry::default() }));
        server.ask(self.way, Ask::Get, &mut self.entries)
    }
}

impl Store for Floor {
    fn name(&self) -> &'static str {
        match self.way {
            Way::Socket => "floor: socket",
            Way::Futex => "floor: futex",
            Way::Mailbox => "floor: mailbox",
            Way::Index => "floor: shared index",
        }
    }

    fn about(&self) -> &'static str {
        match self.way {
            Way::Socket => "bare store, asked over a Unix stream socket",
            Way::Futex => "bare store, asked in shared memory; both sides sleep at a futex",
            Way::Mailbox => {
                "bare store, asked in shared memory; both sides poll with sched_yield, then sleep"
            }
            Way::Index => "bare store whose index the client reads itself",
        }
    }

    fn offers(&self, op: Op, _: Shape) -> bool {
        self.way != Way::Index || op.reads()
    }

    fn before(&mut self, op: Op, job: &mut Job, fill: bool) -> Result<()> {
        if op.reads() {
            return Ok(());
        }
        let mut server = self.server.borrow_mut();
        if !server.granted.contains_key(&job.shape) {
            let empty = Entry { len: job.shape.bytes as u64, ..Entry::default() };
            let mut slots = vec![empty; job.shape.values];
            server.ask(self.way, Ask::Grant, &mut slots)?;
            server.granted.insert(job.shape, slots);
        }
        if op == Op::PutInPlace && fill {
            for (slot, (_, value)) in server.granted[&job.shape].iter().zip(pairs(&job.keys, job.source())) {
                server.shared.write(*slot, value)?;
            }
        }
        Ok(())
    }

    fn call(&mut self, op: Op, job: &mut Job) -> Result<()> {
        match op {
            Op::Put => self.put(job, true),
            Op::PutInPlace => self.put(job, false),
            Op::GetInto => {
                self.find(&job.keys)?;
                let server = self.server.borrow();
                let (keys, target) = job.target_mut();
                for (entry, (_, target)) in self.entries.iter().zip(pairs_mut(keys, target)) {
                    server.shared.read(*entry, target)?;
                }
                Ok(())
            }
            Op::View => {
                self.find(&job.keys)?;
                black_box(&self.entries);
                Ok(())
            }
        }
    }

    fn steady(&self, _: Op) -> bool {
        // What a put needs, the put before has got.
        true
    }

    fn look(&mut self, job: &mut Job) -> Result<()> {
        self.call(Op::GetInto, job)
    }

    fn forget(&mut self, _: &mut Job) -> Result<()> {
        // The next put replaces them; their slots are the next ones granted.
        Ok(())
    }
}

const _: () = assert!(ANSWERED <= ASKED);

//! One connection to the node daemon: requests that take turns, what they map, and what is owed to the daemon.
//!
//! The daemon is a peer. What it sends is checked against the request and against the mappings before use; an answer that
//! is not acceptable ends the connection for requests. It is closed only when its last view and buffer are gone,
//! because its end is what lets go of the holds and grants on it.

use std::{
    collections::{HashMap, hash_map::Entry},
    fmt, io, mem,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::PathBuf,
    slice,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering, fence},
    },
};

use foldhash::fast::FixedState;
use hal::{Deadline, DeviceUuid, Region};
use parking_lot::{Mutex, MutexGuard, RwLock};
use rustix::io::Errno;

use super::{
    grant::{Grant, spend, suits},
    index::Lookup,
};
use crate::{
    error::{Error, Result},
    fork,
    shm::{Access, Mapping},
    store::{Mode, Put},
    wire::{
        Answer, ArenaInfo, CommitItem, Frame, Granted, Held, Link, MESSAGE_MAX, Reply, Request, Ring, Socket,
        VERSION,
    },
};

/// Identifiers that go back in one message.
const BACK_MAX: usize = 4096;

/// What an engine connects to, time and again. It also tells the buffers of one engine from those of another.
#[derive(Debug)]
pub(super) struct Origin {
    pub(super) socket: PathBuf,
    pub(super) namespace: String,
    pub(super) device: DeviceUuid,
}

/// Why a request has no answer.
#[derive(Debug)]
pub(super) enum Fault {
    /// It was refused as a whole, by the daemon or here. The connection goes on.
    Refused(Error),
    /// The deadline passed. The connection goes on.
    Timeout {
        /// Whether the daemon may have got the request.
        sent: bool,
    },
    /// The socket has ended.
    Lost {
        /// Whether the daemon may have got the request.
        sent: bool,
        /// How it showed.
        reason: String,
    },
    /// The daemon broke the protocol, and the connection is given up.
    Broken(Error),
}

impl Fault {
    /// What the caller of `op` is told.
    pub(super) fn into_error(self, op: &str, origin: &Origin) -> Error {
        match self {
            Fault::Refused(e) | Fault::Broken(e) => e,
            Fault::Timeout { .. } => Error::Timeout { op: op.into() },
            Fault::Lost { reason, .. } => unreachable(origin, reason),
        }
    }

    /// Whether what the request carried may be the daemon's by now.
    pub(super) fn may_have_arrived(&self) -> bool {
        match self {
            Fault::Refused(_) => false,
            Fault::Timeout { sent } | Fault::Lost { sent, .. } => *sent,
            Fault::Broken(_) => true,
        }
    }
}

/// A value that is held, or that came whole.
#[derive(Debug)]
pub(super) enum Taken {
    /// It stays as it is until `hold` is released.
    Shared { hold: u64, arena: u64, offset: u64, len: u64, meta: Box<[u8]> },
    /// A copy.
    Inline { bytes: Box<[u8]>, meta: Box<[u8]> },
}

pub(super) struct Connection {
    origin: Arc<Origin>,
    opened_in: u64,
    instance: u64,
    imports: bool,
    /// Locked from a request to its answer.
    line: Mutex<Line>,
    /// What waits to go back to the daemon, because the line was taken or full. Who has the line sends it.
    owed: Mutex<Owed>,
    /// Whether anything does; changed under the lock of `owed`.
    owes: AtomicBool,
    /// The one grant that was given ahead.
    spare: Mutex<Option<Granted>>,
    /// What it takes to read without requests.
    lookup: Option<Lookup>,
    /// Arenas by number. Nothing leaves these two while the connection lives.
    readable: RwLock<HashMap<u64, Arc<Mapping>, FixedState>>,
    writable: RwLock<HashMap<u64, Arc<Mapping>, FixedState>>,
    /// No more requests.
    ended: AtomicBool,
    /// A request that was given up may still be carried out.
    behind: AtomicBool,
}

/// What a request in progress uses. The buffers are reused.
struct Line {
    link: Link,
    last: u64,
    /// Requests whose answer was not waited for and may still come.
    given_up: Vec<u64>,
    out: Box<[u8]>,
    inbox: Vec<u8>,
    descriptors: Vec<OwnedFd>,
}

#[derive(Default)]
struct Owed {
    holds: Vec<u64>,
    grants: Vec<u64>,
}

impl Connection {
    /// Connects to the daemon.
    ///
    /// *Errors*: [`Error::Unreachable`] where none answers, [`Error::Timeout`] where it is too slow, [`Error::Protocol`]
    /// where it speaks another version.
    pub(super) fn open(origin: &Arc<Origin>, deadline: Deadline) -> Result<Arc<Self>> {
        const OP: &str = "connecting to the node daemon";
        let socket = Socket::connect(&origin.socket, deadline).map_err(|e| match e.kind() {
            io::ErrorKind::TimedOut => Error::Timeout { op: OP.into() },
            io::ErrorKind::InvalidInput => Error::InvalidArgument { what: e.to_string() },
            _ if is_descriptor_limit(&e) => too_many_descriptors(&e),
            _ => unreachable(origin, e.to_string()),
        })?;
        // In a shared directory somebody else could have been first.
        let (server, user) =
            (socket.peer().map_err(|e| unreachable(origin, e.to_string()))?.uid, rustix::process::geteuid());
        if server != user.as_raw() {
            let reason =
                format!("it is served by user {server}, not by {}; use a private directory", user.as_raw());
            return Err(unreachable(origin, reason));
        }
        let connection = Self::over(socket, origin, deadline);
        connection
            .and_then(|connection| connection.ask_for_ring(deadline).map(|()| connection))
            .map_err(|fault| fault.into_error(OP, origin))
    }

    /// From now on messages go by a ring, if the daemon can make one.
    pub(super) fn ask_for_ring(&self, deadline: Deadline) -> Result<(), Fault> {
        let ring =
            self.call(Request::Ring, &[], deadline, |reply, descriptors| match (reply, descriptors.pop()) {
                (Reply::Ring, Some(file)) => {
                    Ring::open(&file).map_err(|e| Error::Protocol { reason: e.to_string() })
                }
                _ => Err(astray()),
            });
        match ring {
            Ok(ring) => {
                self.line.lock().link.use_ring(ring);
                Ok(())
            }
            Err(Fault::Refused(e)) => {
                tracing::warn!(%e, "messages to the node daemon go by the socket, which is slower");
                Ok(())
            }
            Err(fault) => Err(fault),
        }
    }

    /// Introduces itself over a connected socket.
    pub(super) fn over(socket: Socket, origin: &Arc<Origin>, deadline: Deadline) -> Result<Arc<Self>, Fault> {
        let line = Line {
            link: Link::new(Arc::new(socket)),
            last: 0,
            given_up: Vec::new(),
            out: vec![0; MESSAGE_MAX].into_boxed_slice(),
            inbox: Vec::new(),
            descriptors: Vec::new(),
        };
        let mut connection = Connection {
            origin: Arc::clone(origin),
            opened_in: fork::process(),
            instance: 0,
            imports: false,
            line: Mutex::new(line),
            owed: Mutex::default(),
            owes: AtomicBool::new(false),
            spare: Mutex::default(),
            lookup: None,
            readable: RwLock::default(),
            writable: RwLock::default(),
            ended: AtomicBool::new(false),
            behind: AtomicBool::new(false),
        };
        let hello = Request::Hello { version: VERSION, namespace: &origin.namespace, device: origin.device };
        let (instance, imports) = connection.call(hello, &[], deadline, |reply, _| match reply {
            Reply::Welcome { version: VERSION, instance, imports, .. } => Ok((instance, imports)),
            Reply::Welcome { version, .. } => Err(Error::Protocol {
                reason: format!(
                    "the daemon speaks version {version}, this client {VERSION}; update the older one"
                ),
            }),
            _ => Err(astray()),
        })?;
        (connection.instance, connection.imports) = (instance, imports);
        let lookup = connection.call(Request::Index, &[], deadline, |reply, descriptors| match reply {
            Reply::Index(info) => info.map(|info| Lookup::open(info, descriptors)).transpose(),
            _ => Err(astray()),
        });
        connection.lookup = match lookup {
            Err(Fault::Refused(e)) => {
                tracing::warn!(%e, "each value is asked for: the node's index cannot be used");
                None
            }
            lookup => lookup?,
        };
        Ok(Arc::new(connection))
    }

    /// What it was opened for.
    pub(super) fn origin(&self) -> &Arc<Origin> {
        &self.origin
    }

    /// Names the daemon's life: a restarted one, whose old memory is gone, has another.
    pub(super) fn instance(&self) -> u64 {
        self.instance
    }

    /// Whether the daemon opens memory of the client's device.
    pub(super) fn imports(&self) -> bool {
        self.imports
    }

    /// What it takes to read without requests; none where each value must be asked for.
    pub(super) fn lookup(&self) -> Option<&Lookup> {
        self.lookup.as_ref()
    }

    /// Whether a request that was given up has not been answered yet. Reads without a request would overtake it.
    pub(super) fn is_behind(&self) -> bool {
        self.behind.load(Ordering::Acquire)
    }

    /// Whether no more requests can be made.
    pub(super) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Sends a request and gives its answer to `take`, whose error says that the answer is not acceptable. Late answers to
    /// earlier requests are skipped, and what they grant or hold goes back.
    pub(super) fn call<R>(
        &self,
        request: Request<'_>,
        descriptors: &[BorrowedFd<'_>],
        deadline: Deadline,
        take: impl FnOnce(Reply<'_>, &mut Vec<OwnedFd>) -> Result<R>,
    ) -> Result<R, Fault> {
        let mut exchange = self.exchange(1, deadline);
        exchange.ask(request, descriptors)?;
        exchange.answer(take)
    }

    /// Requests that follow each other, of which at most this many are under way at a time.
    pub(super) fn exchange(&self, most: u64, deadline: Deadline) -> Exchange<'_> {
        Exchange { connection: self, line: None, deadline, most, next: 0 }
    }

    fn send(
        &self,
        line: &mut Line,
        frame: &Frame<'_>,
        descriptors: &[BorrowedFd<'_>],
        deadline: Deadline,
    ) -> Result<(), Fault> {
        let bytes = postcard::to_slice(frame, &mut line.out).map_err(|_| {
            let what = format!("the request does not fit a message of {MESSAGE_MAX} bytes");
            Fault::Refused(Error::InvalidArgument { what })
        })?;
        line.link.send(bytes, descriptors, deadline).map_err(|e| match e.kind() {
            io::ErrorKind::TimedOut => Fault::Timeout { sent: false },
            io::ErrorKind::InvalidData => self.broken(Error::Protocol { reason: e.to_string() }),
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset | io::ErrorKind::NotConnected => {
                self.lost(false, e.to_string())
            }
            // The kernel has no memory for the message, or too many descriptors are on their way.
            _ => Fault::Refused(Error::ResourceExhausted {
                what: format!("the socket to the node daemon ({e})"),
            }),
        })
    }

    fn receive<R>(
        &self,
        line: &mut Line,
        id: u64,
        is_last: bool,
        deadline: Deadline,
        take: impl FnOnce(Reply<'_>, &mut Vec<OwnedFd>) -> Result<R>,
    ) -> Result<R, Fault> {
        let Line { link, given_up, inbox, descriptors, .. } = line;
        loop {
            let len = match link.recv(inbox, descriptors, deadline) {
                // Of an earlier one than the last it is not known.
                Ok(0) => {
                    return Err(self.lost(!is_last || link.was_taken(), "the daemon closed it".into()));
                }
                Ok(len) => len,
                Err(e) => {
                    return Err(match e.kind() {
                        io::ErrorKind::TimedOut => Fault::Timeout { sent: true },
                        io::ErrorKind::InvalidData => self.broken(Error::Protocol { reason: e.to_string() }),
                        // What came with the answer is lost, and to ask again on a new connection would lose it again.
                        _ if is_descriptor_limit(&e) => self.broken(too_many_descriptors(&e)),
                        _ => self.lost(true, e.to_string()),
                    });
                }
            };
            let answer: Answer<'_> = postcard::from_bytes(&inbox[..len]).map_err(|e| {
                self.broken(Error::Protocol { reason: format!("an answer cannot be read ({e})") })
            })?;
            // Whether the answer is late or not, these arenas are sent only once.
            if let Reply::Reserved { arenas, .. } = &answer.reply {
                self.admit(arenas, descriptors).map_err(|e| self.broken(e))?;
            }
            if answer.id != id {
                let Some(at) = given_up.iter().position(|&other| other == answer.id) else {
                    let reason = format!("answer {} belongs to no request", answer.id);
                    return Err(self.broken(Error::Protocol { reason }));
                };
                given_up.swap_remove(at);
                self.give_back(answer.reply);
                continue;
            }
            return match answer.reply {
                Reply::Refused(e) => Err(Fault::Refused(e)),
                reply => take(reply, descriptors).map_err(|e| match e {
                    Error::Protocol { .. } => self.broken(e),
                    e => Fault::Refused(e),
                }),
            };
        }
    }

    /// Maps arenas that the daemon lets this client write.
    fn admit(&self, arenas: &[ArenaInfo], descriptors: &mut Vec<OwnedFd>) -> Result<()> {
        if arenas.len() != descriptors.len() {
            let reason = format!("{} arenas came with {} descriptors", arenas.len(), descriptors.len());
            return Err(Error::Protocol { reason });
        }
        for (arena, descriptor) in arenas.iter().zip(descriptors.drain(..)) {
            match self.writable.write().entry(arena.id) {
                Entry::Occupied(_) => {
                    return Err(Error::Protocol { reason: format!("arena {} came twice", arena.id) });
                }
                Entry::Vacant(place) => {
                    place.insert(Arc::new(Mapping::new(descriptor.as_fd(), arena.len, Access::Write)?));
                }
            }
        }
        Ok(())
    }

    /// Gives back what an answer that nobody waits for has brought.
    fn give_back(&self, late: Reply<'_>) {
        match late {
            Reply::Reserved { grants, .. } => {
                self.abandon(grants.iter().flatten().flatten().map(|granted| granted.grant).collect());
            }
            Reply::Committed { ahead: Some(granted), .. } => self.abandon(vec![granted.grant]),
            Reply::Held { slots } => {
                let holds = slots.iter().flatten().filter_map(|held| match held {
                    Held::Shared { hold, .. } => Some(*hold),
                    Held::Inline { .. } => None,
                });
                self.release(holds.collect());
            }
            _ => {}
        }
    }

    /// Lets holds go. Never waits: where a request is in progress, they go after it; where the daemon does not read, with
    /// the next one.
    pub(super) fn release(&self, holds: Vec<u64>) {
        self.put_back(Owed { holds, grants: Vec::new() });
    }

    /// Gives grants back unused, in the same way.
    pub(super) fn abandon(&self, grants: Vec<u64>) {
        self.put_back(Owed { holds: Vec::new(), grants });
    }

    fn put_back(&self, back: Owed) {
        // The connection of a forked child is its parent's, and so are the holds and grants.
        if back.is_empty() || self.has_ended() || fork::process() != self.opened_in {
            return;
        }
        let mut owed = self.owed.lock();
        owed.add(back);
        self.owes.store(true, Ordering::Relaxed);
        drop(owed);
        self.settle();
    }

    /// Sends what is owed if nobody has the line; else who has it does this when it is done.
    fn settle(&self) {
        loop {
            // Either this thread gets the line or the one that has it sees what is owed, which it looks for after that.
            fence(Ordering::SeqCst);
            if !self.owes.load(Ordering::Relaxed) {
                return;
            }
            let Some(mut line) = self.line.try_lock() else { return };
            // What cannot be sent now comes with the next request. That the daemon has gone shows there as well.
            if !matches!(self.pay(&mut line, None), Ok(true)) {
                return;
            }
        }
    }

    /// Sends what is owed, at once or by the deadline; whether all was sent.
    fn pay(&self, line: &mut Line, wait: Option<Deadline>) -> Result<bool, Fault> {
        if !self.owes.load(Ordering::Relaxed) {
            return Ok(true);
        }
        let mut guard = self.owed.lock();
        let mut owed = mem::take(&mut *guard);
        self.owes.store(false, Ordering::Relaxed);
        drop(guard);
        while let Some(request) = owed.next() {
            let frame = Frame { id: 0, request };
            let sent = match wait {
                Some(deadline) => self.send(line, &frame, &[], deadline).map(|()| true),
                None => {
                    let bytes = postcard::to_slice(&frame, &mut line.out);
                    Ok(bytes.is_ok_and(|bytes| matches!(line.link.try_send(bytes), Ok(true))))
                }
            };
            if !matches!(sent, Ok(true)) {
                owed.put_back(frame.request);
                let mut guard = self.owed.lock();
                guard.add(owed);
                self.owes.store(true, Ordering::Relaxed);
                return sent;
            }
        }
        Ok(true)
    }

    /// The arena for reading, where it is mapped: the client's own are, and the copy out of one needs no second mapping.
    pub(super) fn for_copy(&self, arena: u64, deadline: Deadline) -> Result<Arc<Mapping>, Fault> {
        // Not in the match: its guard would be held during the request, whose answer may have to add an arena.
        let own = self.writable.read().get(&arena).cloned();
        match own {
            Some(mapping) => Ok(mapping),
            None => self.for_view(arena, deadline),
        }
    }

    /// The arena, mapped so that nobody in this process can write it.
    pub(super) fn for_view(&self, arena: u64, deadline: Deadline) -> Result<Arc<Mapping>, Fault> {
        if let Some(mapping) = self.readable.read().get(&arena) {
            return Ok(Arc::clone(mapping));
        }
        let mapping =
            self.call(Request::Arena { id: arena }, &[], deadline, |reply, descriptors| {
                match (reply, descriptors.pop()) {
                    (Reply::Arena { len }, Some(file)) => Mapping::new(file.as_fd(), len, Access::Read),
                    _ => Err(astray()),
                }
            })?;
        // Another thread may have been as fast.
        Ok(Arc::clone(self.readable.write().entry(arena).or_insert_with(|| Arc::new(mapping))))
    }

    /// Where the `len` bytes of a hold lie in a mapping.
    pub(super) fn range(&self, mapping: &Mapping, offset: u64, len: u64) -> Result<Region, Fault> {
        mapping.range(offset, len).map_err(|e| self.broken(e))
    }

    /// Where the first `len` bytes of a grant lie, mapped while the connection lives.
    pub(super) fn granted(&self, granted: Granted, len: u64) -> Result<Region> {
        if granted.capacity < len {
            let reason = format!("{} bytes were granted where {len} were asked for", granted.capacity);
            return Err(Error::Protocol { reason });
        }
        if len == 0 {
            return Ok(Region::host(0, 0));
        }
        let writable = self.writable.read();
        let Some(mapping) = writable.get(&granted.arena) else {
            let reason = format!("a grant lies in arena {}, which was never sent", granted.arena);
            return Err(Error::Protocol { reason });
        };
        // All of it, so that no part of a spare grant is found wanting later.
        mapping.range(granted.offset, granted.capacity)?;
        mapping.range(granted.offset, len)
    }

    /// Memory for one value of `len` bytes.
    pub(super) fn reserve_one(self: &Arc<Self>, len: u64, deadline: Deadline) -> Result<Grant, Fault> {
        let request = Request::Reserve { lens: vec![len], unless: Vec::new() };
        let answer = self.call(request, &[], deadline, |reply, _| self.reserved(reply, &[len]))?.pop();
        answer
            .unwrap_or_else(|| Err(astray()))
            .and_then(|grant| grant.ok_or_else(astray))
            .map_err(Fault::Refused)
    }

    /// The answer to a [`Request::Reserve`]: memory for values of these lengths; none for those whose key, if any were named,
    /// is stored already.
    pub(super) fn reserved(
        self: &Arc<Self>,
        reply: Reply<'_>,
        lens: &[u64],
    ) -> Result<Vec<Result<Option<Grant>>>> {
        let Reply::Reserved { grants, .. } = reply else { return Err(astray()) };
        let grants = counted(grants, lens.len())?.into_iter().zip(lens);
        grants
            .map(|(granted, &len)| match granted {
                Ok(Some(granted)) => Grant::new(self, granted, len).map(|grant| Ok(Some(grant))),
                Ok(None) => Ok(Ok(None)),
                Err(e) => Ok(Err(e)),
            })
            .collect()
    }

    /// Makes this grant a value, and asks for `ahead` bytes for the next one. One that may have arrived is spent, whatever
    /// the answer.
    pub(super) fn commit(
        &self,
        grant: &mut Grant,
        item: CommitItem<'_>,
        mode: Mode,
        ahead: u64,
        deadline: Deadline,
    ) -> Result<Result<Put>, Fault> {
        let request = Request::Commit { items: vec![item], mode, ahead };
        let outcome = self.call(request, &[], deadline, |reply, _| self.committed(reply, 1));
        spend(slice::from_mut(grant), &outcome);
        outcome?.pop().ok_or_else(|| self.broken(astray()))
    }

    /// The answer to a [`Request::Commit`] of `count` items. What is granted ahead is kept for the next put.
    pub(super) fn committed(&self, reply: Reply<'_>, count: usize) -> Result<Vec<Result<Put>>> {
        let Reply::Committed { slots, ahead } = reply else { return Err(astray()) };
        if let Some(granted) = ahead {
            self.granted(granted, granted.capacity)?;
            let replaced = self.spare.lock().replace(granted);
            self.abandon(replaced.iter().map(|old| old.grant).collect());
        }
        counted(slots, count)
    }

    /// The spare grant, if it suits a put of `len` bytes. If it does not, it goes back, since it is in the way.
    pub(super) fn take_spare(self: &Arc<Self>, len: u64) -> Option<Grant> {
        let spare = self.spare.lock().take()?;
        if suits(spare.capacity, len)
            && let Ok(grant) = Grant::new(self, spare, len)
        {
            return Some(grant);
        }
        self.abandon(vec![spare.grant]);
        None
    }

    /// Gives the spare grant back; whether there was one.
    pub(super) fn drop_spare(&self) -> bool {
        let spare = self.spare.lock().take();
        self.abandon(spare.iter().map(|spare| spare.grant).collect());
        spare.is_some()
    }

    /// Takes holds on values.
    pub(super) fn hold(
        &self,
        keys: Vec<&str>,
        inline: u64,
        deadline: Deadline,
    ) -> Result<Vec<Result<Taken>>, Fault> {
        let count = keys.len();
        self.call(Request::Hold { keys, inline }, &[], deadline, |reply, _| match reply {
            Reply::Held { slots } => Ok(counted(slots, count)?
                .into_iter()
                .map(|slot| {
                    slot.map(|held| match held {
                        Held::Shared { hold, arena, offset, len, meta } => {
                            Taken::Shared { hold, arena, offset, len, meta: meta.into() }
                        }
                        Held::Inline { bytes, meta } => {
                            Taken::Inline { bytes: bytes.into(), meta: meta.into() }
                        }
                    })
                })
                .collect()),
            _ => Err(astray()),
        })
    }

    fn lost(&self, sent: bool, reason: String) -> Fault {
        self.ended.store(true, Ordering::Release);
        Fault::Lost { sent, reason }
    }

    fn broken(&self, e: Error) -> Fault {
        self.ended.store(true, Ordering::Release);
        Fault::Broken(e)
    }
}

/// Requests that follow each other, answered in the order in which they were sent. While one is under way, the line is
/// taken: no other thread's request comes between.
pub(super) struct Exchange<'c> {
    connection: &'c Connection,
    /// Taken while anything is under way.
    line: Option<MutexGuard<'c, Line>>,
    deadline: Deadline,
    most: u64,
    /// The first request that is not answered. They are numbered in a row.
    next: u64,
}

impl Exchange<'_> {
    /// Whether another request may be sent before the next answer is taken.
    pub(super) fn has_room(&self) -> bool {
        self.under_way() < self.most
    }

    fn under_way(&self) -> u64 {
        self.line.as_ref().map_or(0, |line| line.last + 1 - self.next)
    }

    /// Sends a request, for which there must be room.
    pub(super) fn ask(&mut self, request: Request<'_>, descriptors: &[BorrowedFd<'_>]) -> Result<(), Fault> {
        debug_assert!(self.has_room());
        let Exchange { connection, line, deadline, .. } = self;
        let line = match line {
            Some(line) => line,
            None => {
                let unsent = Fault::Timeout { sent: false };
                if deadline.is_passed() {
                    return Err(unsent);
                }
                let Some(taken) = lock(&connection.line, *deadline) else { return Err(unsent) };
                if connection.has_ended() {
                    let reason = "it ended during another request".into();
                    return Err(Fault::Lost { sent: false, reason });
                }
                let taken = line.insert(taken);
                self.next = taken.last + 1;
                connection.pay(taken, Some(*deadline))?;
                taken
            }
        };
        let id = line.last + 1;
        connection.send(line, &Frame { id, request }, descriptors, *deadline)?;
        line.last = id;
        Ok(())
    }

    /// The answer to the first request that has none yet, given to `take`, whose error says that it is not acceptable.
    pub(super) fn answer<R>(
        &mut self,
        take: impl FnOnce(Reply<'_>, &mut Vec<OwnedFd>) -> Result<R>,
    ) -> Result<R, Fault> {
        let Some(line) = &mut self.line else { return Err(Fault::Refused(astray())) };
        let is_last = self.next == line.last;
        let outcome = self.connection.receive(line, self.next, is_last, self.deadline, take);
        // Closes descriptors that nobody asked for.
        line.descriptors.clear();
        if !matches!(outcome, Err(Fault::Timeout { .. })) {
            self.next += 1;
        }
        if is_last {
            self.end();
        }
        outcome
    }

    /// Leaves the line to others. What is under way is given up.
    fn end(&mut self) {
        let Some(mut line) = self.line.take() else { return };
        let under_way = self.next..=line.last;
        line.given_up.extend(under_way);
        self.connection.behind.store(!line.given_up.is_empty(), Ordering::Release);
        drop(line);
        self.connection.settle();
    }
}

impl Drop for Exchange<'_> {
    fn drop(&mut self) {
        self.end();
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection")
            .field("socket", &self.origin.socket)
            .field("instance", &self.instance)
            .field("ended", &self.has_ended())
            .finish_non_exhaustive()
    }
}

impl Owed {
    /// The next message that gives something back.
    fn next(&mut self) -> Option<Request<'static>> {
        let some = |ids: &mut Vec<u64>| ids.split_off(ids.len().saturating_sub(BACK_MAX));
        match (self.holds.is_empty(), self.grants.is_empty()) {
            (false, _) => Some(Request::Release { holds: some(&mut self.holds) }),
            (_, false) => Some(Request::Abandon { grants: some(&mut self.grants) }),
            _ => None,
        }
    }

    /// Takes back a message that could not be sent.
    fn put_back(&mut self, unsent: Request<'static>) {
        match unsent {
            Request::Release { mut holds } => self.holds.append(&mut holds),
            Request::Abandon { mut grants } => self.grants.append(&mut grants),
            _ => {}
        }
    }

    fn add(&mut self, mut more: Owed) {
        self.holds.append(&mut more.holds);
        self.grants.append(&mut more.grants);
    }

    fn is_empty(&self) -> bool {
        self.holds.is_empty() && self.grants.is_empty()
    }
}

/// The lock, unless the deadline passes first.
pub(super) fn lock<T>(mutex: &Mutex<T>, deadline: Deadline) -> Option<MutexGuard<'_, T>> {
    match deadline.instant() {
        Some(at) => mutex.try_lock_until(at),
        None => Some(mutex.lock()),
    }
}

/// As many answers as questions.
pub(super) fn counted<T>(slots: Vec<T>, count: usize) -> Result<Vec<T>> {
    if slots.len() == count {
        return Ok(slots);
    }
    Err(Error::Protocol { reason: format!("{} verdicts came for {count} items", slots.len()) })
}

/// The answer is to another question.
pub(super) fn astray() -> Error {
    Error::Protocol { reason: "the answer is not of the kind that was asked for".into() }
}

/// Whether this process, or the system, can have no more descriptors.
fn is_descriptor_limit(e: &io::Error) -> bool {
    matches!(Errno::from_io_error(e), Some(Errno::MFILE | Errno::NFILE))
}

fn too_many_descriptors(e: &io::Error) -> Error {
    let what = "taking descriptors from the node daemon; raise this process' limit (ulimit -n)".into();
    Error::Os { what, reason: e.to_string(), errno: e.raw_os_error() }
}

fn unreachable(origin: &Origin, reason: String) -> Error {
    Error::Unreachable { socket: origin.socket.display().to_string(), reason }
}

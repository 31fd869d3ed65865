//! One client: it is greeted, its requests are read one after the other, and what it holds lives here.

use std::{
    collections::HashSet,
    io,
    os::fd::AsFd,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use hal::{Deadline, Device, DeviceUuid};

use super::{
    Shared, ahead::Share, answer::Answer, imports::Imports, os, sessions::Seat, table::Table, values::Values,
};
use crate::{
    error::{Error, Result},
    metrics::Op,
    store::{ArenaId, Grant, Object, Reader, Writer},
    wire::{Frame, Link, Reply, Request, Ring, SLOTS_MAX, Socket, VERSION},
};

/// The most grants of one client; the pool bounds their bytes.
pub(super) const GRANTS_MAX: usize = 4096;
/// The most holds of one client.
pub(super) const HOLDS_MAX: usize = 65_536;

/// How long a client may take to say hello. Until then it has a seat and nothing else.
const HELLO_LIMIT: Duration = Duration::from_secs(5);

/// The pause after a failed receive that is not the client's doing.
const PAUSE: Duration = Duration::from_millis(50);

/// A client that has been greeted.
pub(super) struct Session<'n, D: Device> {
    pub(super) node: &'n Shared<D>,
    pub(super) values: Box<dyn Values>,
    // Dropped in this order: memory is given back before imports are closed, which is up to a driver.
    pub(super) grants: Table<Lent>,
    /// What will be lent ahead next.
    pub(super) prepared: Option<Lent>,
    pub(super) holds: Table<Arc<Object>>,
    /// What it holds without a request; none until it asks.
    pub(super) reader: Option<Reader>,
    pub(super) writer: Writer,
    pub(super) imports: Option<Imports<'n, D>>,
    /// Arenas whose writable descriptor the client has.
    pub(super) writable: HashSet<ArenaId>,
    /// The grant that was lent ahead last.
    pub(super) ahead: Option<u64>,
    /// What the client is reading page by page.
    pub(super) metrics_text: String,
}

/// Memory that the client may write.
#[derive(Debug)]
pub(super) struct Lent {
    pub(super) grant: Grant,
    /// For memory lent before it was asked for.
    pub(super) _share: Option<Share>,
}

/// Serves a client on the calling thread until its socket ends.
pub(super) fn serve<D: Device>(node: &Shared<D>, socket: &Arc<Socket>, seat: &Seat) {
    let client = seat.id();
    let mut session: Option<Session<'_, D>> = None;
    match converse(node, Link::new(Arc::clone(socket)), seat, &mut session) {
        Ok(()) => tracing::debug!(client, "a client has left"),
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => tracing::debug!(client, "a client has died"),
        Err(e) => {
            tracing::warn!(client, %e, "a client was dropped; what it has mapped is kept until it ends")
        }
    }
    if session.is_some() {
        outlast(socket);
    }
}

/// Ends the conversation, and waits until the client has ended its side. Until then it has memory mapped that must not
/// become anybody else's: views of values that it holds, and buffers that it may write. What it still says is thrown away.
fn outlast(socket: &Socket) {
    socket.shutdown_sending();
    let (mut message, mut fds) = (Vec::new(), Vec::new());
    loop {
        match socket.recv(&mut message, &mut fds, Deadline::NEVER) {
            Ok(0) => return,
            Ok(_) => fds.clear(),
            Err(e) if e.kind() == io::ErrorKind::InvalidData => {}
            // The system is short of something; to take this for the end could cost the client its memory.
            Err(_) => thread::sleep(PAUSE),
        }
    }
}

/// Answers a client until its socket ends or, which is an error, nothing good can come of going on.
fn converse<'n, D: Device>(
    node: &'n Shared<D>,
    mut link: Link,
    seat: &Seat,
    session: &mut Option<Session<'n, D>>,
) -> io::Result<()> {
    let (mut message, mut out, mut fds) = (Vec::new(), Vec::new(), Vec::new());
    let hello = Deadline::after(HELLO_LIMIT);
    loop {
        let wait = if session.is_some() { Deadline::NEVER } else { hello };
        let len = link.recv(&mut message, &mut fds, wait)?;
        if len == 0 {
            return Ok(());
        }
        let start = Instant::now();
        let Frame { id, request } = match decode(&message[..len]) {
            Ok(frame) => frame,
            Err(0) => return Err(io::Error::new(io::ErrorKind::InvalidData, "a message cannot be read")),
            Err(id) => {
                let garbled = protocol("the message cannot be read");
                node.metrics.count(Op::Garbled, None, garbled.label(), 1);
                Answer::new(&mut link, id, &mut out).refuse(garbled)?;
                continue;
            }
        };
        let has_ring = link.has_ring();
        let answer = Answer::new(&mut link, id, &mut out);
        let op = Op::of(&request);
        match (&mut *session, request) {
            (Some(_), Request::Hello { .. }) => {
                answer.refuse(protocol("this connection has been greeted already"))?;
            }
            (Some(_), Request::Ring) if has_ring => {
                answer.refuse(protocol("this connection has a ring already"))?;
            }
            (Some(_), Request::Ring) => match Ring::create() {
                Ok((ring, file)) => {
                    answer.give(Reply::Ring, &[file.as_fd()])?;
                    link.use_ring(ring);
                }
                Err(e) => answer.refuse(os("making a ring", &e))?,
            },
            (Some(session), request) if slots(&request) > SLOTS_MAX => {
                session.refuse(op, answer, protocol("the message has too many slots"))?;
            }
            (Some(session), request) => session.handle(request, fds.drain(..), answer)?,
            (none, Request::Hello { version, namespace, device }) => {
                match Session::greet(node, seat, version, namespace, device) {
                    Ok((greeted, welcome)) => {
                        answer.give(welcome, &[])?;
                        *none = Some(greeted);
                    }
                    Err(e) => return answer.refuse(e),
                }
            }
            (None, _) => return answer.refuse(protocol("the first message is a hello")),
        }
        // What no request asked for.
        fds.clear();
        node.metrics.took(op, start.elapsed());
    }
}

impl<'n, D: Device> Session<'n, D> {
    fn greet(
        node: &'n Shared<D>,
        seat: &Seat,
        version: u32,
        namespace: &str,
        device: DeviceUuid,
    ) -> Result<(Self, Reply<'static>)> {
        if let Some(max) = seat.exceeds() {
            return Err(Error::ResourceExhausted { what: format!("the node's {max} client connections") });
        }
        if version != VERSION {
            return Err(Error::Protocol {
                reason: format!(
                    "the client speaks version {version}, this node {VERSION}; use one release for both"
                ),
            });
        }
        let values = node.home.open(node.store.space(namespace)?, namespace)?;
        let imports = open_device(node, seat, device);
        let welcome =
            Reply::Welcome { version: VERSION, instance: node.home.instance(), imports: imports.is_some() };
        let metrics = &node.metrics;
        let session = Session {
            node,
            values,
            grants: Table::new("grants", GRANTS_MAX, metrics.grants.clone()),
            prepared: None,
            holds: Table::new("holds", HOLDS_MAX, metrics.holds.clone()),
            reader: None,
            writer: node.store.writer(),
            imports,
            writable: HashSet::new(),
            ahead: None,
            metrics_text: String::new(),
        };
        Ok((session, welcome))
    }

    pub(super) fn refuse(&self, op: Op, answer: Answer<'_>, e: Error) -> io::Result<()> {
        self.node.metrics.count(op, None, e.label(), 1);
        answer.refuse(e)
    }
}

/// Binds this thread to the client's device for its whole life, if the node can open that device's memory.
fn open_device<'n, D: Device>(node: &'n Shared<D>, seat: &Seat, uuid: DeviceUuid) -> Option<Imports<'n, D>> {
    let client = seat.id();
    let Some(device) = node.devices.iter().find(|device| device.identity().uuid == uuid) else {
        tracing::debug!(client, device = %uuid, "the client's device is not served here: it copies through host memory");
        return None;
    };
    if !device.caps().ipc_import {
        tracing::debug!(client, device = %device.identity(), "this device opens no memory of other processes");
        return None;
    }
    match device.bind_owned_thread() {
        Ok(bound) => {
            tracing::debug!(client, device = %device.identity(), "a client is connected");
            Some(Imports::new(bound, node.metrics.imports.clone()))
        }
        Err(e) => {
            tracing::warn!(client, %e, "the client's device cannot be bound: it copies through host memory");
            None
        }
    }
}

/// Reads a message, or tells the `id` to refuse it under: 0 where none can be had.
fn decode(message: &[u8]) -> Result<Frame<'_>, u64> {
    match postcard::take_from_bytes(message) {
        Ok((frame, [])) => Ok(frame),
        _ => Err(postcard::take_from_bytes(message).map_or(0, |(id, _)| id)),
    }
}

/// How many slots the answer will have.
fn slots(request: &Request<'_>) -> usize {
    match request {
        Request::Reserve { lens, .. } => lens.len(),
        Request::Commit { items, .. } => items.len(),
        Request::PutIpc { items, .. } | Request::GetIpc { items, .. } => items.len(),
        Request::Hold { keys, .. }
        | Request::Describe { keys }
        | Request::Remove { keys }
        | Request::SetPinned { keys, .. } => keys.len(),
        _ => 1,
    }
}

pub(super) fn protocol(reason: &str) -> Error {
    Error::Protocol { reason: reason.into() }
}

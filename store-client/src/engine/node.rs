//! The engine that asks the node daemon.
//!
//! A call uses the current connection. Where the daemon has gone, the next attempt of the same call connects again and
//! repeats what can be repeated; views and buffers of the old connection keep what they refer to.

use std::{collections::HashSet, fmt, path::Path as FilePath, sync::Arc, thread, time::Duration};

use backon::{BackoffBuilder, ExponentialBuilder};
use hal::{Bound, Deadline, Device, DeviceUuid, Kind, Region};
use parking_lot::{Mutex, RwLock};

use self::{
    connection::{Connection, Fault, Origin, astray, counted, lock},
    cut::Cost,
    get::GetCall,
    grant::Grant,
    put::PutCall,
};
use crate::{
    arrow::Ready,
    engine::{Description, Engine, PoolBuffer, View},
    error::{Error, Result},
    shm,
    store::{Mode, Put, Stat},
    wire::{CommitItem, Described, Fallback, Path, Reply, Request},
};

mod connection;
mod cut;
mod get;
mod grant;
mod index;
mod put;
mod stage;
#[cfg(all(test, feature = "cpu"))]
mod tests;

/// How often one call is sent again. A request that ends every daemon must not go on for ever.
const RESENDS: usize = 4;

/// Keys listed by one message at most; the daemon may answer with fewer.
const PAGE_MAX: u64 = 4096;

/// A client of the node daemon.
pub(crate) struct NodeEngine {
    origin: Arc<Origin>,
    /// None once it is closed.
    current: RwLock<Option<Arc<Connection>>>,
    /// Held by the thread that connects again.
    reconnecting: Mutex<()>,
    warned: Mutex<HashSet<Fallback>>,
}

impl NodeEngine {
    /// Connects to the daemon at `socket`, for memory of `device` and keys of `namespace`.
    ///
    /// *Errors*: [`Error::Unreachable`] at once where no daemon listens.
    pub(crate) fn connect(
        socket: &FilePath,
        namespace: &str,
        device: DeviceUuid,
        deadline: Deadline,
    ) -> Result<Self> {
        let origin = Arc::new(Origin { socket: socket.into(), namespace: namespace.into(), device });
        let connection = Connection::open(&origin, deadline)?;
        Ok(NodeEngine {
            origin,
            current: RwLock::new(Some(connection)),
            reconnecting: Mutex::new(()),
            warned: Mutex::default(),
        })
    }

    fn origin(&self) -> &Origin {
        &self.origin
    }

    /// The current connection, or a new one where it has ended.
    fn connection(&self, op: &str, deadline: Deadline) -> Result<Arc<Connection>> {
        if let Some(connection) = self.alive()? {
            return Ok(connection);
        }
        let timeout = || Error::Timeout { op: op.into() };
        let _turn = lock(&self.reconnecting, deadline).ok_or_else(timeout)?;
        let mut patience = pauses();
        loop {
            // Another thread may have connected meanwhile, or closed the client.
            if let Some(connection) = self.alive()? {
                return Ok(connection);
            }
            match Connection::open(&self.origin, deadline) {
                Ok(connection) => {
                    let mut current = self.current.write();
                    let place = current.as_mut().ok_or(Error::Closed)?;
                    *place = Arc::clone(&connection);
                    return Ok(connection);
                }
                Err(Error::Unreachable { .. }) if pause(&mut patience, deadline) => {}
                Err(e) => return Err(e),
            }
        }
    }

    fn alive(&self) -> Result<Option<Arc<Connection>>> {
        let current = self.current.read();
        let connection = current.as_ref().ok_or(Error::Closed)?;
        Ok((!connection.has_ended()).then(|| Arc::clone(connection)))
    }

    /// Runs `attempt`, which may run twice, until a connection outlives it.
    fn again<R>(
        &self,
        op: &str,
        deadline: Deadline,
        mut attempt: impl FnMut(&Arc<Connection>) -> Result<R, Fault>,
    ) -> Result<R> {
        let mut patience = pauses().take(RESENDS);
        loop {
            match attempt(&self.connection(op, deadline)?) {
                Ok(answer) => return Ok(answer),
                Err(Fault::Lost { .. }) if pause(&mut patience, deadline) => {}
                Err(fault) => return Err(fault.into_error(op, &self.origin)),
            }
        }
    }

    /// As [`again`](Self::again) for a request that is answered as it is.
    fn ask<R>(
        &self,
        op: &str,
        deadline: Deadline,
        request: impl Fn() -> Request<'static>,
        take: impl Fn(Reply<'_>) -> Result<R>,
    ) -> Result<R> {
        self.again(op, deadline, |connection| {
            connection.call(request(), &[], deadline, |reply, _| take(reply))
        })
    }

    /// As [`again`](Self::again) for requests that carry keys, in as many messages as they need. What fails a message
    /// fails its keys and those behind.
    fn for_keys<R>(
        &self,
        op: &str,
        keys: &[&str],
        most: usize,
        deadline: Deadline,
        attempt: impl Fn(&Arc<Connection>, &[&str]) -> Result<Vec<Result<R>>, Fault>,
    ) -> Vec<Result<R>> {
        let mut verdicts = Vec::with_capacity(keys.len());
        while verdicts.len() < keys.len() {
            let rest = &keys[verdicts.len()..];
            let chunk = &rest[..cut::first(rest, most, |key| Cost::item(key, &[]))];
            match self.again(op, deadline, |connection| attempt(connection, chunk)) {
                Ok(answers) => verdicts.extend(answers),
                Err(e) => verdicts.extend(rest.iter().map(|_| Err(e.clone()))),
            }
        }
        verdicts
    }

    /// Tells once for each reason that payloads go by staging, and what made them.
    fn warn_once(&self, why: Fallback, cause: &dyn fmt::Display) {
        if self.warned.lock().insert(why) {
            tracing::warn!(reason = why.label(), %cause, "payloads go by staging");
        }
    }

    /// As [`warn_once`](Self::warn_once) for what was known before anything was sent.
    fn warn_planned(&self, why: Fallback) {
        match why {
            Fallback::HOST => {}
            Fallback::NotNegotiated => {
                self.warn_once(why, &"the node does not open memory of this device");
            }
            why => self.warn_once(why, &"the memory cannot be exported"),
        }
    }

    /// Stores bytes of a buffer whose daemon is gone: they are copied to the new one.
    fn put_copy(
        &self,
        connection: &Arc<Connection>,
        from: Region,
        deadline: Deadline,
    ) -> Result<Grant, Fault> {
        let len = from.len as u64;
        let grant = connection.reserve_one(len, deadline)?;
        // SAFETY: both regions are mapped by grants that live; the old one's daemon is gone and this call owns it, and
        // the new one is used by this call alone.
        unsafe { shm::copy_host_in(grant.region(), from, deadline) }.map_err(Fault::Refused)?;
        Ok(grant)
    }
}

impl<D: Device> Engine<D> for NodeEngine {
    fn imports(&self) -> bool {
        self.current.read().as_ref().is_some_and(|connection| connection.imports())
    }

    fn put(
        &self,
        bound: &Bound<'_, D>,
        batch: &Ready<D>,
        mode: Mode,
        deadline: Deadline,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Vec<Result<Put>> {
        PutCall { engine: self, bound, batch, mode, deadline, progress }.run()
    }

    fn get_into(
        &self,
        bound: &Bound<'_, D>,
        batch: &Ready<D>,
        deadline: Deadline,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Vec<Result<Description>> {
        GetCall { engine: self, bound, batch, deadline, progress }.run()
    }

    fn view(&self, keys: &[&str], deadline: Deadline) -> Vec<Result<View>> {
        let connection = self.alive().ok().flatten();
        let at_hand = |key| get::at_hand(connection.as_ref()?, key, Some(deadline));
        let mut missed = Vec::new();
        let mut views: Vec<Result<View>> = keys
            .iter()
            .enumerate()
            .map(|(i, key)| {
                at_hand(key).ok_or_else(|| {
                    missed.push(i);
                    Error::NotFound
                })
            })
            .collect();
        if !missed.is_empty() {
            let keys: Vec<&str> = missed.iter().map(|&i| keys[i]).collect();
            let asked = self.for_keys("view", &keys, cut::DESCRIPTIONS, deadline, |connection, keys| {
                get::view(connection, keys, deadline)
            });
            missed.into_iter().zip(asked).for_each(|(i, answer)| views[i] = answer);
        }
        views
    }

    fn at_hand(&self, key: &str) -> Option<View> {
        get::at_hand(&self.alive().ok()??, key, None)
    }

    fn alloc(&self, len: u64, deadline: Deadline) -> Result<PoolBuffer> {
        let grant =
            self.again("alloc", deadline, |connection| match connection.reserve_one(len, deadline) {
                Err(Fault::Refused(Error::Full { .. })) if connection.drop_spare() => {
                    connection.reserve_one(len, deadline)
                }
                answer => answer,
            })?;
        let region = grant.region();
        let start = match region.len {
            0 => std::ptr::dangling_mut(),
            _ => std::ptr::with_exposed_provenance_mut(region.addr),
        };
        // SAFETY: the grant keeps its memory mapped, and the daemon gave it to nobody else.
        Ok(unsafe { PoolBuffer::new(start, region.len, Box::new(grant)) })
    }

    fn put_allocated(
        &self,
        key: &str,
        meta: &[u8],
        buffer: PoolBuffer,
        mode: Mode,
        deadline: Deadline,
    ) -> Result<Put> {
        const OP: &str = "put";
        let invalid = |what: &str| Error::InvalidArgument { what: what.into() };
        let foreign =
            || invalid("the buffer was allocated by another client; put it there, or put its bytes");
        let mut grant: Box<Grant> = buffer.into_grant().downcast().map_err(|_| foreign())?;
        if !Arc::ptr_eq(grant.connection().origin(), &self.origin) {
            return Err(foreign());
        }
        let item = |grant: &Grant, path| CommitItem {
            grant: grant.id(),
            key,
            meta,
            len: grant.region().len as u64,
            path,
        };
        let mut patience = pauses().take(RESENDS);
        let mut doubt: Option<(u64, String)> = None;
        loop {
            let connection = self.connection(OP, deadline);
            let instance = connection.as_ref().ok().map(|connection| connection.instance());
            if let Some((old, reason)) = doubt.take()
                && instance.is_none_or(|new| new == old)
            {
                return Err(Error::Disconnected { reason });
            }
            let connection = connection?;
            let outcome = if Arc::ptr_eq(&connection, grant.connection()) {
                let item = item(&grant, Path::Alloc);
                connection.commit(&mut grant, item, mode, 0, deadline)
            } else if connection.instance() == grant.connection().instance() {
                // The daemon lives, and a grant is good on its own connection only.
                return Err(invalid("the buffer's memory went with its connection; allocate a new one"));
            } else {
                self.put_copy(&connection, grant.region(), deadline).and_then(|mut copy| {
                    let item = item(&copy, Path::Staging(Fallback::HOST));
                    connection.commit(&mut copy, item, mode, 0, deadline)
                })
            };
            match outcome {
                Ok(verdict) => return verdict,
                Err(Fault::Lost { sent, reason }) if pause(&mut patience, deadline) => {
                    doubt = (sent && mode == Mode::Put).then(|| (connection.instance(), reason));
                }
                Err(Fault::Lost { sent: true, reason }) if mode == Mode::Put => {
                    return Err(Error::Disconnected { reason });
                }
                Err(fault) => return Err(fault.into_error(OP, &self.origin)),
            }
        }
    }

    fn describe(&self, keys: &[&str], deadline: Deadline) -> Vec<Result<Description>> {
        self.for_keys("describe", keys, cut::DESCRIPTIONS, deadline, |connection, keys| {
            connection.call(
                Request::Describe { keys: keys.to_vec() },
                &[],
                deadline,
                |reply, _| match reply {
                    Reply::Described { slots } => {
                        let slots = counted(slots, keys.len())?.into_iter();
                        Ok(slots.map(|slot| slot.map(Description::from)).collect())
                    }
                    _ => Err(astray()),
                },
            )
        })
    }

    fn remove(&self, keys: &[&str], deadline: Deadline) -> Vec<Result<bool>> {
        self.for_keys("remove", keys, cut::VERDICTS, deadline, |connection, keys| {
            let request = Request::Remove { keys: keys.to_vec() };
            connection.call(request, &[], deadline, |reply, _| found(reply, keys.len()))
        })
    }

    fn remove_by_prefix(&self, prefix: &str, deadline: Deadline) -> Result<u64> {
        self.again("remove_by_prefix", deadline, |connection| {
            connection.call(Request::RemovePrefix { prefix }, &[], deadline, |reply, _| match reply {
                Reply::Removed(count) => Ok(count),
                _ => Err(astray()),
            })
        })
    }

    fn set_pinned(&self, keys: &[&str], pinned: bool, deadline: Deadline) -> Vec<Result<bool>> {
        self.for_keys("set_pinned", keys, cut::VERDICTS, deadline, |connection, keys| {
            let request = Request::SetPinned { keys: keys.to_vec(), pinned };
            connection.call(request, &[], deadline, |reply, _| found(reply, keys.len()))
        })
    }

    fn list(
        &self,
        prefix: &str,
        after: Option<&str>,
        limit: u64,
        deadline: Deadline,
    ) -> Result<(Vec<(String, u64)>, bool)> {
        let mut keys: Vec<(String, u64)> = Vec::new();
        let mut more = true;
        // A page holds what fits a message.
        while more && (keys.len() as u64) < limit {
            let asked = (limit - keys.len() as u64).min(PAGE_MAX);
            let after = keys.last().map(|(key, _)| key.as_str()).or(after);
            let page: Vec<(String, u64)>;
            (page, more) = self.again("list", deadline, |connection| {
                let request = Request::List { prefix, after, limit: asked };
                connection.call(request, &[], deadline, |reply, _| match reply {
                    Reply::Listed { page, more }
                        if page.len() as u64 <= asked && !(more && page.is_empty()) =>
                    {
                        Ok((page.into_iter().map(|(key, len)| (key.to_owned(), len)).collect(), more))
                    }
                    Reply::Listed { page, .. } => Err(Error::Protocol {
                        reason: format!("a page of {asked} keys came with {}", page.len()),
                    }),
                    _ => Err(astray()),
                })
            })?;
            keys.extend(page);
        }
        Ok((keys, more))
    }

    fn stat(&self, deadline: Deadline) -> Result<Stat> {
        self.ask(
            "stat",
            deadline,
            || Request::Stat,
            |reply| match reply {
                Reply::Stat(stat) => Ok(*stat),
                _ => Err(astray()),
            },
        )
    }

    fn metrics(&self, deadline: Deadline) -> Result<String> {
        let mut all = String::new();
        loop {
            let offset = all.len() as u64;
            let request = || Request::Metrics { offset };
            let (text, len) = self.ask("metrics", deadline, request, |reply| match reply {
                Reply::Metrics { text, len } => Ok((text.to_owned(), len)),
                _ => Err(astray()),
            })?;
            all.push_str(&text);
            if text.is_empty() || all.len() as u64 >= len {
                return Ok(all);
            }
        }
    }

    fn close(&self) {
        // The socket ends when calls in progress, views and buffers have let go of it.
        self.current.write().take();
    }
}

impl fmt::Debug for NodeEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodeEngine")
            .field("namespace", &self.origin.namespace)
            .field("connection", &*self.current.read())
            .finish_non_exhaustive()
    }
}

impl From<Described<'_>> for Description {
    fn from(found: Described<'_>) -> Self {
        Description { len: found.len, meta: found.meta.into() }
    }
}

/// Pauses before a daemon that is gone is tried again.
fn pauses() -> impl Iterator<Item = Duration> {
    ExponentialBuilder::new()
        .with_min_delay(Duration::from_millis(1))
        .with_max_delay(Duration::from_millis(100))
        .without_max_times()
        .with_jitter()
        .build()
}

/// Takes the next pause; false, at once, where none is left or it would outlast the deadline.
fn pause(patience: &mut impl Iterator<Item = Duration>, deadline: Deadline) -> bool {
    let Some(pause) = patience.next() else { return false };
    if deadline.left().is_some_and(|left| left <= pause) {
        return false;
    }
    thread::sleep(pause);
    true
}

/// Whether a slot that went by IPC can still go by staging: the node cannot open the memory.
fn import_refused(e: &Error) -> bool {
    match e {
        Error::Unsupported { .. } => true,
        Error::Device(e) => matches!(e.kind(), Kind::ImportRefused | Kind::Unsupported),
        _ => false,
    }
}

fn found(reply: Reply<'_>, count: usize) -> Result<Vec<Result<bool>>> {
    match reply {
        Reply::Found(slots) => counted(slots, count),
        _ => Err(astray()),
    }
}

/// Every path gives every slot a verdict; this says so if one does not.
fn unsettled() -> Error {
    Error::Protocol { reason: "a slot was left without a verdict".into() }
}

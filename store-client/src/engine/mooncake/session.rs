//! One membership of a Mooncake cluster: the store, what is registered with it, and the staging memory; and the sessions of
//! those who share it.

use std::{
    collections::{BTreeMap, hash_map::RandomState},
    fmt,
    hash::{BuildHasher, Hasher},
    mem::ManuallyDrop,
    ops::Deref,
    process,
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, AtomicUsize, Ordering},
        mpsc::Sender,
    },
    thread,
    time::Duration,
};

use hal::{Bound, Deadline, Device, Kind, Pin, Region, Registry, Workers};
use parking_lot::Mutex;

use super::{
    ffi::{Library, Setup, Store},
    head::Id,
    refusal::{self, BACKEND},
    staging::{Block, Memory, Staging},
};
use crate::error::{Error, Result};

/// How long a guard that is dropped waits for its memory to be deregistered.
const LET_GO: Duration = Duration::from_secs(30);
/// Registrations of device buffers that are kept with their memory. A buffer beyond goes by staging.
const KEPT_MAX: usize = 4096;

/// What Mooncake did for a client, as [`StoreClient::metrics`](crate::StoreClient::metrics) tells it.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) registered: AtomicU64,
    pub(crate) deregistered: AtomicU64,
    /// By staging, and directly.
    pub(crate) puts: [Went; 2],
    pub(crate) gets: [Went; 2],
}

/// Values that went one way.
#[derive(Debug, Default)]
pub(crate) struct Went {
    pub(crate) values: AtomicU64,
    pub(crate) bytes: AtomicU64,
}

impl Went {
    pub(crate) fn count(&self, bytes: u64) {
        self.values.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }
}

/// One who works in a membership, on workers of its own: a call that hangs holds up nobody else's.
pub(crate) struct Session<D: Device> {
    workers: Arc<Workers<D>>,
    membership: Arc<Membership<D>>,
    /// How many heads it works on at a time, so that others have room as well.
    heads: usize,
}

/// The most heads of one session, alone in its membership or among many.
const HEADS_ALONE: usize = 512;
const HEADS_SHARED: usize = 64;

/// What all sessions share. The cluster is left when the last of them has gone.
pub(crate) struct Membership<D: Device> {
    /// The process that joined: a forked child has neither its threads nor its connections.
    process: u32,
    /// Those of who joined, for what is let go.
    workers: Arc<Workers<D>>,
    /// Taken by `drop` alone.
    store: ManuallyDrop<Store>,
    staging: Arc<Staging>,
    /// The staging memory's, with the device.
    pinned: Mutex<Option<D::Registration>>,
    registry: Registry,
    /// Who keeps which bytes registered, by address.
    live: Mutex<Live<D>>,
    kept: AtomicUsize,
    nonce: u64,
    puts: AtomicU64,
    pub(crate) counters: Counters,
    ended: Sender<()>,
}

/// Length and guard, by address.
type Live<D> = BTreeMap<usize, (usize, Weak<Guard<D>>)>;

impl<D: Device> fmt::Debug for Session<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session").field("staging", &self.staging).finish_non_exhaustive()
    }
}

impl<D: Device> Deref for Session<D> {
    type Target = Membership<D>;

    fn deref(&self) -> &Membership<D> {
        &self.membership
    }
}

impl<D: Device> Session<D> {
    /// Joins, on a bound worker. `ended` hears when the cluster has been left again.
    pub(crate) fn join(
        workers: &Arc<Workers<D>>,
        library: Library,
        setup: Setup,
        staging: usize,
        ended: Sender<()>,
        deadline: Deadline,
    ) -> Result<Arc<Self>> {
        let own = Arc::clone(workers);
        let master = setup.master.to_string_lossy().into_owned();
        let joined = workers.run(deadline, "setup", move |bound| {
            let staging = match Staging::new(staging) {
                Ok(staging) => Arc::new(staging),
                Err(e) => return Ok(Err(e)),
            };
            let region = staging.region();
            let store = Store::join(library, bound, &setup)?;
            let pinned = if bound.device().caps().register_host {
                let refused = |e: &hal::Error| {
                    tracing::warn!(error = %e, "staging memory is not pinned; copies to and from the device are slower");
                };
                bound.register(region).inspect_err(refused).ok()
            } else {
                None
            };
            // SAFETY: the session deregisters it before it lets go of the pool.
            unsafe { store.register(bound, region.addr, region.len) }?;
            let membership = Membership {
                process: process::id(),
                workers: Arc::clone(&own),
                store: ManuallyDrop::new(store),
                staging,
                pinned: Mutex::new(pinned),
                registry: Registry::new(BACKEND, usize::MAX),
                live: Mutex::default(),
                kept: AtomicUsize::new(0),
                nonce: RandomState::new().build_hasher().finish(),
                puts: AtomicU64::new(0),
                counters: Counters { registered: 1.into(), ..Counters::default() },
                ended,
            };
            let heads = membership.heads(HEADS_ALONE);
            Ok(Ok(Arc::new(Session { workers: own, membership: Arc::new(membership), heads })))
        });
        joined.map_err(|e| match e.kind() {
            // Mooncake tries for minutes by itself.
            Kind::Timeout => Error::Timeout {
                op: format!("joining the Mooncake cluster of {master} (does a master listen there?)"),
            },
            _ => refusal::error(e),
        })?
    }

    /// Another session of this membership, on `workers` of the same device.
    pub(crate) fn on(&self, workers: Arc<Workers<D>>) -> Arc<Self> {
        let heads = self.heads(HEADS_SHARED);
        Arc::new(Session { workers, membership: Arc::clone(&self.membership), heads })
    }

    pub(crate) fn device(&self) -> &D {
        self.workers.device()
    }

    pub(crate) fn heads_at_once(&self) -> usize {
        self.heads
    }

    /// Runs `work`, which owns what it touches, where it can be left behind at `deadline`.
    pub(crate) fn run<R: Send + 'static>(
        self: &Arc<Self>,
        op: &'static str,
        deadline: Deadline,
        work: impl FnOnce(&Arc<Self>, &Bound<'_, D>) -> R + Send + 'static,
    ) -> Result<R> {
        let session = Arc::clone(self);
        let done = self.workers.run(deadline, op, move |bound| Ok(work(&session, bound)));
        done.map_err(|e| match e.kind() {
            Kind::Timeout => Error::Timeout {
                op: format!("{op} in Mooncake (is the master, or the client that holds the value, gone?)"),
            },
            _ => e.into(),
        })
    }

    /// Registers memory until the guard is dropped; what is registered already, as a whole or in a larger piece, is shared.
    ///
    /// # Safety
    /// The memory must stay allocated until then.
    pub(crate) unsafe fn register(
        self: &Arc<Self>,
        bound: &Bound<'_, D>,
        region: Region,
    ) -> hal::Result<Arc<Guard<D>>> {
        if let Some(guard) = self.covering(region) {
            return Ok(guard);
        }
        let registered =
            self.registry.register(&Calls { membership: self, bound }, region.addr, region.len, None)?;
        let guard = Arc::new(Guard {
            membership: Arc::downgrade(&self.membership),
            addr: region.addr,
            len: region.len,
            kept: AtomicUsize::new(0),
            registered: Mutex::new(Some(registered)),
        });
        self.live.lock().insert(region.addr, (region.len, Arc::downgrade(&guard)));
        Ok(guard)
    }

    /// Registers a buffer once, until its memory is freed or the session ends. `None` where too many are, or a part of it
    /// is registered by itself.
    pub(crate) fn keep(
        self: &Arc<Self>,
        buffer: &hal::Keep<D>,
        deadline: Deadline,
    ) -> Result<Option<Arc<Guard<D>>>> {
        if self.kept.fetch_add(1, Ordering::Relaxed) >= KEPT_MAX {
            self.kept.fetch_sub(1, Ordering::Relaxed);
            return Ok(None);
        }
        let region = buffer.region();
        let owned = buffer.clone();
        // SAFETY: the job keeps the memory, and then the guard is dropped before it is freed.
        let registered = self.run("register", deadline, move |session, bound| unsafe {
            let guard = session.register(bound, region);
            drop(owned);
            guard
        });
        let guard = match registered.and_then(|guard| guard.map_err(refusal::error)) {
            Ok(guard) => guard,
            Err(refused) => {
                self.kept.fetch_sub(1, Ordering::Relaxed);
                return match refused {
                    Error::Device(e) if e.kind() == Kind::Overlap => Ok(None),
                    e => Err(e),
                };
            }
        };
        if guard.kept.swap(1, Ordering::Relaxed) == 0 {
            buffer.attach(Arc::clone(&guard));
        } else {
            self.kept.fetch_sub(1, Ordering::Relaxed);
        }
        Ok(Some(guard))
    }

    /// Registered memory of `len` bytes: of the pool where it has such blocks, else made for the occasion.
    pub(crate) fn block(self: &Arc<Self>, len: usize, deadline: Deadline) -> Result<Block<D>> {
        if len <= self.staging.most() {
            return self.staging.take(len, deadline);
        }
        let memory = Memory::new(len)?;
        let made = self.run("register", deadline, move |session, bound| {
            // SAFETY: the block drops the guard before the memory.
            let guard = unsafe { session.register(bound, memory.region()) }?;
            Ok(Block::own(memory, guard, len))
        })?;
        made.map_err(refusal::error)
    }

    /// As [`block`](Self::block) where that needs no wait.
    pub(crate) fn block_at_once(self: &Arc<Self>, len: usize) -> Option<Block<D>> {
        (len <= self.staging.most()).then(|| self.staging.take(len, Deadline::passed()).ok())?
    }
}

impl<D: Device> Membership<D> {
    /// Whether this is the process that joined.
    pub(crate) fn is_ours(&self) -> bool {
        self.process == process::id()
    }

    pub(crate) fn store(&self) -> &Store {
        &self.store
    }

    /// Metrics of what was registered: name, help and count of each.
    pub(crate) fn registrations(&self) -> [(&'static str, &'static str, u64); 2] {
        let Counters { registered, deregistered, .. } = &self.counters;
        [
            (
                "mooncake_registrations",
                "Regions registered with Mooncake",
                registered.load(Ordering::Relaxed),
            ),
            ("mooncake_deregistrations", "Regions deregistered again", deregistered.load(Ordering::Relaxed)),
        ]
    }

    pub(crate) fn new_id(&self) -> Id {
        Id(u128::from(self.nonce) << 64 | u128::from(self.puts.fetch_add(1, Ordering::Relaxed)))
    }

    /// Who keeps all of `region` registered.
    pub(crate) fn covering(&self, region: Region) -> Option<Arc<Guard<D>>> {
        let live = self.live.lock();
        let (addr, (len, guard)) = live.range(..=region.addr).next_back()?;
        (region.end() <= addr + len).then(|| guard.upgrade())?
    }

    /// How many heads fit the staging memory, and no more than `most`.
    fn heads(&self, most: usize) -> usize {
        (self.staging.most() / super::head::HEAD_MAX).clamp(1, most)
    }

    fn unregister(&self, bound: &Bound<'_, D>, addr: usize, registered: hal::Registered) {
        {
            let mut live = self.live.lock();
            if live.get(&addr).is_some_and(|(_, guard)| guard.strong_count() == 0) {
                live.remove(&addr);
            }
        }
        if let Err(e) = self.registry.unregister(&Calls { membership: self, bound }, registered) {
            tracing::error!(error = %e, "memory stays registered with Mooncake");
        }
    }
}

impl<D: Device> Drop for Membership<D> {
    /// Leaves the cluster on a bound thread of its own: it may take seconds, and whoever was last must not wait.
    fn drop(&mut self) {
        if !self.is_ours() {
            return;
        }
        // SAFETY: nothing uses it after this.
        let store = unsafe { ManuallyDrop::take(&mut self.store) };
        let device = self.workers.device().clone();
        let staging = Arc::clone(&self.staging);
        let pinned = self.pinned.lock().take();
        let live: Vec<usize> = std::mem::take(&mut *self.live.lock()).into_keys().collect();
        let ended = self.ended.clone();
        let leave = move || {
            match device.bind_owned_thread() {
                Ok(bound) => {
                    for addr in live.into_iter().chain([staging.region().addr]) {
                        if let Err(e) = store.unregister(&bound, addr) {
                            tracing::error!(error = %e, "memory stays registered with Mooncake");
                        }
                    }
                }
                Err(e) => tracing::error!(error = %e, "memory stays registered with Mooncake"),
            }
            drop(pinned);
            drop(store);
            drop(staging);
            let _ = ended.send(());
        };
        if let Err(e) = thread::Builder::new().name("haulier-mooncake-end".into()).spawn(leave) {
            tracing::error!(error = %e, "the Mooncake cluster could not be left");
        }
    }
}

struct Calls<'a, 'd, D: Device> {
    membership: &'a Membership<D>,
    bound: &'a Bound<'d, D>,
}

impl<D: Device> Pin for Calls<'_, '_, D> {
    fn pin(&self, addr: usize, len: usize) -> hal::Result<()> {
        // SAFETY: who registered promised that the memory stays until it is unregistered.
        unsafe { self.membership.store.register(self.bound, addr, len) }?;
        self.membership.counters.registered.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn unpin(&self, addr: usize, _len: usize) -> hal::Result<()> {
        self.membership.store.unregister(self.bound, addr)?;
        self.membership.counters.deregistered.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

/// Memory that is registered with a session until this is dropped; deregistered on a bound worker, whichever thread that
/// is on. Where the membership has ended first, its end deregisters everything.
pub(crate) struct Guard<D: Device> {
    membership: Weak<Membership<D>>,
    addr: usize,
    len: usize,
    /// 1 where it is attached to a buffer.
    kept: AtomicUsize,
    registered: Mutex<Option<hal::Registered>>,
}

impl<D: Device> fmt::Debug for Guard<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Guard({} bytes at {:#x})", self.len, self.addr)
    }
}

impl<D: Device> Drop for Guard<D> {
    fn drop(&mut self) {
        let (Some(membership), Some(registered)) =
            (self.membership.upgrade(), self.registered.get_mut().take())
        else {
            return;
        };
        if !membership.is_ours() {
            return;
        }
        let session = Arc::new(Session { workers: Arc::clone(&membership.workers), membership, heads: 1 });
        session.kept.fetch_sub(*self.kept.get_mut(), Ordering::Relaxed);
        let addr = self.addr;
        let given_back = session.run("unregister", Deadline::after(LET_GO), move |session, bound| {
            session.unregister(bound, addr, registered);
        });
        if let Err(e) = given_back {
            tracing::error!(error = %e, "memory may stay registered with Mooncake");
        }
    }
}

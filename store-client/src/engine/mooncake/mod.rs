//! The engine that stores in a Mooncake cluster, through `libmooncake_store.so`.
//!
//! | module | what it holds |
//! |---|---|
//! | `ffi` | the library, and its calls, which all take a proof that the thread is bound |
//! | `session` | one membership of a cluster: what is registered, staging memory |
//! | `names`, `head` | what a key is called there, and what a value looks like |
//! | `put`, `get` | the two ways of the bytes |
//! | `pooled` | the same for values in the pool of a node, which stores here for its clients |
//! | `refusal` | Mooncake's codes |
//!
//! No call of Mooncake's has a deadline. So each is a job on one of the client's bound workers, which owns or keeps all
//! memory that Mooncake may touch: whoever waits for it gives up at the deadline, and the job goes on without harm.
//!
//! Where Mooncake differs from the other engines is told at [`StoreClient::mooncake`](crate::StoreClient::mooncake).

use std::{
    any::Any,
    ffi::CString,
    path::PathBuf,
    process,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{self, Receiver},
    },
    time::Duration,
};

use hal::{Bound, Deadline, Device, Keep, Place, Region, Workers};
use parking_lot::{Mutex, RwLock};

use self::{
    ffi::{Library, Setup},
    names::Names,
    put::FromSlot,
    session::{Guard, Session},
    staging::Block,
};
use crate::{
    arrow::{Ready, Slot},
    engine::{Description, Engine, PoolBuffer, View},
    error::{Error, Result},
    payload::Origin,
    store::{Mode, Object, Put, Stat},
};

mod ffi;
mod get;
mod head;
mod names;
pub(crate) mod pooled;
mod put;
pub(crate) mod refusal;
mod session;
mod staging;

/// How long the last client waits for the cluster to be left.
const LEAVE: Duration = Duration::from_secs(5);
/// The least staging memory: a few heads.
const STAGING_MIN: u64 = 1 << 20;

/// Which Mooncake cluster a client joins, and how.
#[derive(Debug, Clone)]
pub struct Mooncake {
    /// The store library. `None`: what the environment variable `HAULIER_MOONCAKE` names, else what the loader finds as
    /// `libmooncake_store.so`.
    pub library: Option<PathBuf>,
    /// Where `mooncake_master` listens, `HOST:PORT`.
    pub master: String,
    /// The metadata server; `P2PHANDSHAKE` for none.
    pub metadata: String,
    /// This host, as the other clients reach it.
    pub host: String,
    /// The transport: `tcp` (with `MC_FORCE_TCP=1` in the environment where the library is one for NPUs), `ascend`, `rdma`.
    pub protocol: String,
    /// The transport's network devices; empty for all.
    pub devices: String,
    /// Bytes of this process's memory that the cluster may fill with values; 0 for none.
    pub segment: u64,
    /// Bytes of Mooncake's own buffer.
    pub buffer: u64,
    /// Bytes of registered, and where the device can pinned, host memory that values go through which are not
    /// registered. At least 1 MiB; half of it is the largest value that needs no registration of its own.
    pub staging: u64,
    /// Whether the transport reads and writes memory of the client's device. Else it goes through staging memory.
    pub device_memory: bool,
}

impl Mooncake {
    /// A client of the cluster of this master that speaks `protocol` and gives no memory: on this host, without a
    /// metadata server, 16 MiB of Mooncake's buffer, 128 MiB of staging memory; device memory is the transport's where
    /// the protocol is `ascend`.
    pub fn new(master: impl Into<String>, protocol: impl Into<String>) -> Self {
        let protocol = protocol.into();
        Mooncake {
            library: None,
            master: master.into(),
            metadata: "P2PHANDSHAKE".into(),
            host: "127.0.0.1".into(),
            device_memory: protocol == "ascend",
            protocol,
            devices: String::new(),
            segment: 0,
            buffer: 16 << 20,
            staging: 128 << 20,
        }
    }

    fn setup(&self) -> Result<Setup> {
        let text = |what: &str, text: &str| {
            CString::new(text)
                .map_err(|_| Error::InvalidArgument { what: format!("{what} has a byte that is 0") })
        };
        Ok(Setup {
            host: text("the host", &self.host)?,
            metadata: text("the metadata server", &self.metadata)?,
            master: text("the master", &self.master)?,
            protocol: text("the protocol", &self.protocol)?,
            device: text("the devices", &self.devices)?,
            segment: self.segment,
            buffer: self.buffer,
        })
    }
}

/// A client of a Mooncake cluster.
#[derive(Debug)]
pub(crate) struct MooncakeEngine<D: Device> {
    names: Names,
    device_memory: bool,
    /// Whether it was told that device memory goes by staging.
    warned: AtomicBool,
    /// None once it is closed.
    session: RwLock<Option<Arc<Session<D>>>>,
    /// After the session.
    left: Arc<Left>,
}

/// Waits for the cluster to be left, once nobody is left in it: a process that ends in the middle would leave its memory in the
/// master's books for a while.
#[derive(Debug)]
struct Left {
    process: u32,
    heard: Mutex<Receiver<()>>,
}

impl Drop for Left {
    fn drop(&mut self) {
        // A forked child has nothing to leave.
        if self.process == process::id() {
            let _ = self.heard.get_mut().recv_timeout(LEAVE);
        }
    }
}

/// Where Mooncake reads or writes a body.
enum Way<D: Device> {
    /// The slot's own memory, which is registered, and allocated as long as this lives; raw memory by the caller's
    /// promise.
    Direct {
        addr: usize,
        _guard: Arc<Guard<D>>,
        _keep: Option<Keep<D>>,
    },
    /// A value's own memory in a pool that is registered.
    Pooled(Arc<Object>),
    Staged(Block<D>),
}

impl<D: Device> Way<D> {
    fn addr(&self) -> usize {
        match self {
            Way::Direct { addr, .. } => *addr,
            Way::Pooled(object) => object.as_ptr().expose_provenance(),
            Way::Staged(block) => block.region().addr,
        }
    }

    fn is_direct(&self) -> bool {
        !matches!(self, Way::Staged(_))
    }
}

impl<D: Device> MooncakeEngine<D> {
    /// Loads the library and joins the cluster, on one of the `workers`.
    pub(crate) fn join(
        workers: &Arc<Workers<D>>,
        mooncake: &Mooncake,
        namespace: &str,
        deadline: Deadline,
    ) -> Result<Self> {
        let setup = mooncake.setup()?;
        let library = Library::load(mooncake.library.as_deref())?;
        let staging = usize::try_from(mooncake.staging.max(STAGING_MIN))
            .map_err(|_| Error::OutOfMemory { asked: mooncake.staging, available: 0 })?;
        let (ended, left) = mpsc::channel();
        let session = Session::join(workers, library, setup, staging, ended, deadline)?;
        Ok(MooncakeEngine {
            names: Names::new(namespace),
            device_memory: mooncake.device_memory,
            warned: AtomicBool::new(false),
            session: RwLock::new(Some(session)),
            left: Arc::new(Left { process: process::id(), heard: Mutex::new(left) }),
        })
    }

    /// A client of another namespace that shares this one's membership. Its calls have a worker of their own, so that those of
    /// one that hang hold up no other's.
    pub(crate) fn tenant(&self, namespace: &str) -> Result<Self> {
        let session = self.session()?;
        let workers = Workers::start(session.device().clone(), 1)?;
        Ok(MooncakeEngine {
            names: Names::new(namespace),
            device_memory: self.device_memory,
            warned: AtomicBool::new(false),
            session: RwLock::new(Some(session.on(Arc::new(workers)))),
            left: Arc::clone(&self.left),
        })
    }

    /// As [`Membership::registrations`](session::Membership::registrations), while there is one.
    pub(crate) fn registrations(&self) -> Result<[(&'static str, &'static str, u64); 2]> {
        Ok(self.session()?.registrations())
    }

    fn session(&self) -> Result<Arc<Session<D>>> {
        self.session.read().clone().ok_or(Error::Closed)
    }

    /// How Mooncake gets at the `len` bytes of a slot: directly where they are registered or belong to a buffer, which is
    /// registered once for as long as it lives. A borrowed slice has an owner again when the call has given up, and nobody
    /// says when raw memory is freed: those go by staging. `None` where that has no room and `wait` is not set.
    fn way(
        &self,
        session: &Arc<Session<D>>,
        slot: &Slot<D>,
        len: usize,
        wait: bool,
        deadline: Deadline,
    ) -> Result<Option<Way<D>>> {
        let region = Region { len, ..slot.region() };
        let reachable = match region.place {
            Place::Host => true,
            Place::Device(_) => self.device_memory,
        };
        let keep = match slot.origin() {
            Origin::Buffer(keep) => Some(keep),
            Origin::Raw | Origin::Slice => None,
        };
        if reachable && !matches!(slot.origin(), Origin::Slice) {
            let guard = match (session.covering(region), keep) {
                (Some(guard), _) => Some(guard),
                (None, Some(keep)) => session.keep(keep, deadline)?,
                (None, None) => None,
            };
            if let Some(guard) = guard {
                let way = Way::Direct { addr: region.addr, _guard: guard, _keep: keep.cloned() };
                return Ok(Some(way));
            }
        }
        if region.place != Place::Host && !self.warned.swap(true, Ordering::Relaxed) {
            let reason = if reachable { "it is not registered" } else { "the transport does not reach it" };
            tracing::warn!(reason, "device memory goes by staging");
        }
        Ok(match session.block_at_once(len) {
            Some(block) => Some(Way::Staged(block)),
            None if wait => Some(Way::Staged(session.block(len, deadline)?)),
            None => None,
        })
    }

    /// Runs `some` on as many keys as heads are read at once, until all have their verdicts. What fails as a whole fails
    /// its keys and those behind.
    fn in_turns<T, R>(&self, all: &[T], some: impl Fn(&[T]) -> Result<Vec<Result<R>>>) -> Vec<Result<R>> {
        let mut verdicts: Vec<Result<R>> = Vec::with_capacity(all.len());
        while verdicts.len() < all.len() {
            let rest = &all[verdicts.len()..];
            let most = self.session().map(|session| rest.len().min(session.heads_at_once()));
            match most.and_then(|most| some(&rest[..most])) {
                Ok(answers) if !answers.is_empty() => verdicts.extend(answers),
                Ok(_) => verdicts.extend(rest.iter().map(|_| Err(unanswered()))),
                Err(e) => verdicts.extend(rest.iter().map(|_| Err(e.clone()))),
            }
        }
        verdicts
    }

    fn remove_some(&self, keys: &[&str], deadline: Deadline) -> Result<Vec<Result<bool>>> {
        let session = self.session()?;
        let heads: Vec<CString> = keys.iter().map(|key| self.names.head(key)).collect();
        let found = get::heads(&session, &heads, deadline);
        let mut todo = Vec::new();
        let mut verdicts = Vec::new();
        for ((key, head), found) in keys.iter().zip(heads).zip(found) {
            verdicts.push(match found {
                Err(Error::NotFound) => Ok(false),
                Err(e) if !matches!(e, Error::Protocol { .. }) => Err(e),
                found => {
                    let body =
                        found.ok().filter(get::Found::has_body).map(|found| self.names.body(key, found.id));
                    todo.push((verdicts.len(), head, body));
                    Ok(true)
                }
            });
        }
        let slots: Vec<usize> = todo.iter().map(|(slot, ..)| *slot).collect();
        let gone = session.run("remove", deadline, move |session, bound| {
            let store = session.store();
            let remove = |(_, head, body): (usize, CString, Option<CString>)| {
                let there = store.remove(bound, &head)?;
                body.map(|body| store.remove(bound, &body)).transpose()?;
                Ok(there)
            };
            todo.into_iter().map(remove).collect::<Vec<hal::Result<bool>>>()
        });
        match gone {
            Ok(gone) => {
                for (slot, gone) in slots.into_iter().zip(gone) {
                    verdicts[slot] = gone.map_err(refusal::error);
                }
            }
            Err(e) => slots.into_iter().for_each(|slot| verdicts[slot] = Err(e.clone())),
        }
        Ok(verdicts)
    }
}

impl<D: Device> Engine<D> for MooncakeEngine<D> {
    /// Mooncake's transport reads the memory itself; no other process opens it by a handle of ours.
    fn imports(&self) -> bool {
        false
    }

    fn put(
        &self,
        bound: &Bound<'_, D>,
        batch: &Ready<D>,
        mode: Mode,
        deadline: Deadline,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Vec<Result<Put>> {
        let source = |slot| FromSlot { engine: self, bound, slot, deadline, progress };
        let sources: Vec<_> = batch.slots().iter().map(source).collect();
        self.in_turns(&sources, |sources| self.put_some(sources, mode, deadline))
    }

    fn get_into(
        &self,
        bound: &Bound<'_, D>,
        batch: &Ready<D>,
        deadline: Deadline,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Vec<Result<Description>> {
        self.in_turns(batch.slots(), |slots| self.fill_some(bound, slots, deadline, progress))
    }

    fn view(&self, keys: &[&str], deadline: Deadline) -> Vec<Result<View>> {
        self.in_turns(keys, |keys| self.view_some(keys, deadline))
    }

    fn alloc(&self, _len: u64, _deadline: Deadline) -> Result<PoolBuffer> {
        Err(unsupported(
            "Mooncake's C ABI lends no memory of the store; put from a registered buffer instead",
        ))
    }

    fn put_allocated(
        &self,
        _key: &str,
        _meta: &[u8],
        _buffer: PoolBuffer,
        _mode: Mode,
        _deadline: Deadline,
    ) -> Result<Put> {
        Err(unsupported(
            "Mooncake's C ABI lends no memory of the store; put from a registered buffer instead",
        ))
    }

    fn describe(&self, keys: &[&str], deadline: Deadline) -> Vec<Result<Description>> {
        self.in_turns(keys, |keys| self.describe_some(keys, deadline))
    }

    fn remove(&self, keys: &[&str], deadline: Deadline) -> Vec<Result<bool>> {
        self.in_turns(keys, |keys| self.remove_some(keys, deadline))
    }

    fn remove_by_prefix(&self, prefix: &str, deadline: Deadline) -> Result<u64> {
        let patterns = self.names.matching(prefix);
        let gone = self.session()?.run("remove_by_prefix", deadline, move |session, bound| {
            let [heads, bodies] = &patterns;
            let gone = session.store().remove_matching(bound, heads)?;
            session.store().remove_matching(bound, bodies)?;
            Ok(gone)
        })?;
        gone.map_err(refusal::error)
    }

    fn set_pinned(&self, keys: &[&str], _pinned: bool, _deadline: Deadline) -> Vec<Result<bool>> {
        let what = "Mooncake's C ABI pins a value only while it is put";
        keys.iter().map(|_| Err(unsupported(what))).collect()
    }

    fn list(
        &self,
        _prefix: &str,
        _after: Option<&str>,
        _limit: u64,
        _deadline: Deadline,
    ) -> Result<(Vec<(String, u64)>, bool)> {
        Err(unsupported("Mooncake's C ABI lists no keys; keep the list of them in a value of its own"))
    }

    fn stat(&self, _deadline: Deadline) -> Result<Stat> {
        Err(unsupported(
            "Mooncake's C ABI tells no figures of the cluster; ask the metrics port of mooncake_master",
        ))
    }

    fn health(&self, deadline: Deadline) -> Result<()> {
        // The client's own check does not notice at once that the master is gone, and then gives a code without a meaning; a
        // question does, and says why.
        let name = self.names.head("health");
        let asked = self.session()?.run("health", deadline, move |session, bound| {
            session.store().exist(bound, &[name]).into_iter().try_for_each(|answer| answer.map(drop))?;
            session.store().health(bound)
        })?;
        asked.map_err(refusal::error)
    }

    fn metrics(&self, _deadline: Deadline) -> Result<String> {
        let session = self.session()?;
        let counters = &session.counters;
        let mut text = String::new();
        let mut family = |name: &str, help: &str, samples: &[(String, u64)]| {
            text += &format!("# HELP {name} {help}.\n# TYPE {name} counter\n");
            for (labels, count) in samples {
                text += &format!("{name}_total{labels} {count}\n");
            }
        };
        let ways = || {
            let puts = [
                ("put", "stored", "in", "staging", &counters.puts[0]),
                ("put", "stored", "in", "direct", &counters.puts[1]),
            ];
            let gets = [
                ("get", "found", "out", "staging", &counters.gets[0]),
                ("get", "found", "out", "direct", &counters.gets[1]),
            ];
            puts.into_iter().chain(gets)
        };
        let values = ways().map(|(op, outcome, _, path, went)| {
            (
                format!("{{op=\"{op}\",path=\"{path}\",outcome=\"{outcome}\"}}"),
                went.values.load(Ordering::Relaxed),
            )
        });
        family(
            "haulier_operations",
            "Values of this client, by the way they went",
            &values.collect::<Vec<_>>(),
        );
        let bytes = ways().map(|(_, _, direction, path, went)| {
            (format!("{{direction=\"{direction}\",path=\"{path}\"}}"), went.bytes.load(Ordering::Relaxed))
        });
        family("haulier_values_bytes", "Bytes of those values", &bytes.collect::<Vec<_>>());
        for (name, help, count) in session.registrations() {
            family(&format!("haulier_{name}"), help, &[(String::new(), count)]);
        }
        Ok(text + "# EOF\n")
    }

    unsafe fn register(
        &self,
        bound: &Bound<'_, D>,
        region: Region,
    ) -> Option<Result<Box<dyn Any + Send + Sync>>> {
        let register = || {
            if matches!(region.place, Place::Device(_)) && !self.device_memory {
                let what = "this transport does not reach device memory; it goes through staging memory";
                return Err(unsupported(what));
            }
            // SAFETY: the caller promises that the memory stays.
            let guard = unsafe { self.session()?.register(bound, region) }.map_err(refusal::error)?;
            Ok(Box::new(guard) as Box<dyn Any + Send + Sync>)
        };
        Some(register())
    }

    fn close(&self) {
        // The cluster is left when calls in progress have let go of the session.
        self.session.write().take();
    }
}

fn unsupported(what: &str) -> Error {
    Error::Unsupported { what: what.into() }
}

fn unanswered() -> Error {
    Error::Protocol { reason: "the engine left a slot without a verdict".into() }
}

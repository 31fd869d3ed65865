//! The store core: the bytes and the index. The node daemon uses it with one `Writer` for each client, the
//! in-process engine with one in all. There are no sockets and no devices here.
//!
//! # How it hangs together
//!
//! The store has a budget of memory, the **pool**. It is counted in **frames** of 256 KiB to 2 MiB, and all of it is
//! reserved and touched when the store opens, so that a machine with too little memory says so at once.
//!
//! An **arena** is a memory file with far more addresses than memory: a frame of it either has memory (it is *warm*)
//! or is a hole. One writer at a time owns an arena and gets its writable descriptor; everybody else gets a
//! descriptor that can only ever be mapped for reading. That is why a client can write nothing but its own arenas.
//! Because addresses are plenty, a value is always one contiguous piece, whatever its size. When a writer needs
//! memory and the budget is used up, frames that nothing lives in are punched out of other arenas and as many are
//! populated in its own: memory wanders between arenas, and the warm frames of all arenas never exceed the budget.
//! When a writer ends, its arenas wait, still warm, for the next one. Of those without a value only a few wait, however many
//! writers there were at once: the memory of small ones is moved together and populated anew before it is wanted.
//!
//! In a *standing* pool an arena is no longer than it needs to be, and has memory for all of it or for none: it loses it,
//! whole, only when nothing lives in it. What knows its addresses, such as a transport that it is registered with, is
//! attached to it, and let go before.
//!
//! Inside an arena an **extent** is what one value lies in: a slot of a *slab* for up to 4 KiB, else a block of the
//! arena's allocator. A **`Grant`** owns an extent while it is written; dropping it gives the memory back.
//! `Space::commit` turns it into an **`Object`** under a key, in one step, so that nothing half-written is ever
//! seen. The index and every reader share the object, and the extent is free when the last of them lets go:
//! removing, replacing or evicting a key takes it out of the index and disturbs no reader.
//!
//! Where a node serves the store, its clients read without a request: a **`Catalog`** shows them what is stored, and they
//! say in memory of their own what they hold. An object whose last reference goes while a client reads it leaves its
//! extent and its charge to the catalog, which gives them back when they are wanted and nobody reads them any more.
//! `crate::index` tells how that is done without a lock between processes. A store that only this process uses has no
//! catalog.
//!
//! A **`Space`** is a namespace: keys in the order of their last use. Uses that only a client has seen count when its value's
//! turn has come: it then gets a second chance. With a quota it has that much of the pool to
//! itself; the namespaces without one share what is left and evict each other's oldest values.
//!
//! # Fragmentation
//!
//! Between values there are no gaps in memory, only in addresses, of which there are plenty. What can be lost is the rest of
//! a frame: a value of eight frames and more has its frames alone, at most an eighth of them rounding; smaller ones share
//! frames, and a single one keeps its frame, or the two that it lies across, from every large value. So in the worst case,
//! small values that outlived their neighbours one in each frame, much is free and no large value fits; `largest` says so
//! truly. An empty slab keeps addresses and no memory, so an empty store has all of its pool for one value.
//!
//! # Sizes
//!
//! What counts against the pool and a quota is what a value takes up: rounded up by at most a quarter within a
//! slab and an eighth beyond (at least to 64 bytes, the empty value too), and to whole frames from eight frames on. So the
//! pool bounds the number of values, and with it the index, which has no limit of its own: a value takes some 150 bytes
//! there beside its key. The table behind it doubles when it is full, and the put that makes it grow waits for that, as do all
//! others of the namespace meanwhile: 5 ms from a hundred thousand keys on, 0.1 s from a million, 1 to 2 s from seven million.
//!
//! # Locks
//!
//! Where two are held they are taken in this order: a writer's list of arenas, the unowned budget (`Pool::spare`),
//! the pool's list of arenas, the inside of one arena. The index of a namespace is held alone, or under the lock of the
//! list of namespaces: objects that leave an index are dropped after both. The catalog's are taken last, its parked memory
//! before its readers. Memory is populated without any lock, and
//! punched out under that of the budget alone, which only those wait for who need memory from elsewhere too; frames
//! in such work are marked busy, and who needs one waits for it to settle.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use self::{account::Account, pool::Pool, space::Namespace};
use crate::{
    error::{Error, Result},
    index::life::Life,
};

mod account;
mod arena;
mod catalog;
mod frames;
mod geometry;
mod index;
mod memory;
mod object;
mod pool;
mod slab;
mod space;
#[cfg(test)]
mod tests;
mod writer;

pub use self::space::{Mode, Put};
pub(crate) use self::{
    arena::{Arena, ArenaId},
    catalog::{Catalog, Reader},
    object::{Grant, Object},
    space::{Entry, Space, check_key},
    writer::Writer,
};

/// The longest key, in bytes.
pub const KEY_MAX: usize = 1024;
/// The most bytes that can be stored beside a value.
pub const META_MAX: usize = 512;
/// The longest name of a namespace, in bytes.
pub const SPACE_MAX: usize = 255;

/// Values evicted under one hold of an index' lock.
const BATCH: usize = 256;

/// Which pages the pool is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum Pages {
    /// The system's normal pages.
    #[default]
    Normal,
    /// Huge pages of 2 MiB where the system has enough of them, else normal ones, with a warning.
    HugePreferred,
    /// Huge pages of 2 MiB, or the store does not open.
    HugeRequired,
}

/// How to open a store.
#[derive(Debug, Clone)]
pub struct Config {
    /// Bytes for all values; rounded up to whole frames.
    pub pool: u64,
    /// Whether the oldest values make room for new ones. Else a store without room answers [`Error::Full`].
    pub evict: bool,
    /// Namespaces that have this many bytes of the pool to themselves, and no more.
    pub quotas: Vec<(String, u64)>,
    /// Which pages to use.
    pub pages: Pages,
    /// Whether the memory of an arena stays where it is while any value lies in it, as it must where it is registered with
    /// something that keeps to the pages. It then moves in larger pieces, so that less of it may be had at once.
    pub standing: bool,
}

impl Config {
    /// A pool of this size, with eviction, without quotas, on normal pages.
    pub fn new(pool: u64) -> Self {
        Self { pool, evict: true, quotas: Vec::new(), pages: Pages::Normal, standing: false }
    }
}

/// Figures of a store. They are taken one after the other, so they may disagree a little while others write.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stat {
    /// Bytes of the pool.
    pub pool: u64,
    /// Bytes that values take up, those that were removed and are still held included.
    pub used: u64,
    /// Bytes that grants take up.
    pub granted: u64,
    /// Bytes that nothing takes up.
    pub free: u64,
    /// A value of this size is sure to fit without evicting another. Counts whole frames: smaller values may fit
    /// when this is 0, and then not even the empty one is sure to.
    pub largest: u64,
    /// Bytes of memory that the arenas have; never more than `pool`.
    pub populated: u64,
    /// Keys.
    pub objects: u64,
    /// Values evicted since the store was opened.
    pub evictions: u64,
    /// Arenas.
    pub arenas: u64,
    /// Namespaces.
    pub spaces: u64,
    /// Bytes of a frame.
    pub frame: u64,
    /// Bytes of a page, as the kernel says of the memory at hand. Where normal pages are asked for and the system makes
    /// larger ones of them by itself (`transparent_hugepage/shmem_enabled`), that is not counted on and not told here.
    pub page: u64,
    /// Milliseconds that it took to reserve and touch the pool.
    pub reserve_ms: u64,
}

/// The store. Cheap to clone; the memory goes when the last clone, writer, namespace and object are gone.
#[derive(Debug, Clone)]
pub struct Store {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    pool: Pool,
    evict: bool,
    /// The account of all namespaces without a quota.
    common: Arc<Account>,
    spaces: Mutex<BTreeMap<Arc<str>, Arc<Namespace>>>,
    /// Counts uses, so that the age of values in different namespaces can be compared.
    clock: AtomicU64,
    evictions: AtomicU64,
    /// Where clients read without a request. Stays empty in a store that only this process uses.
    catalog: OnceLock<Arc<Catalog>>,
}

impl Store {
    /// Reserves the pool, or fails at once where the memory cannot be had. `progress` is told how many bytes of how
    /// many are reserved.
    pub fn open(config: Config, progress: impl FnMut(u64, u64)) -> Result<Self> {
        let mut quotas = BTreeMap::new();
        let mut left = config.pool;
        for (name, quota) in &config.quotas {
            let refuse =
                |what: &str| Error::InvalidArgument { what: format!("the quota of `{name}` {what}") };
            check_space(name)?;
            left = left.checked_sub(*quota).ok_or_else(|| refuse("exceeds what is left of the pool"))?;
            let namespace = Namespace::new(name, Some(*quota), Account::new(*quota));
            if quotas.insert(Arc::clone(&namespace.name), namespace).is_some() {
                return Err(refuse("is given twice"));
            }
        }
        let pool = Pool::open(config.pool, config.pages, config.standing, progress)?;
        let common = Account::new(left + (pool.geometry().pool - config.pool));
        let shared = Shared {
            pool,
            evict: config.evict,
            common,
            spaces: Mutex::new(quotas),
            clock: AtomicU64::new(0),
            evictions: AtomicU64::new(0),
            catalog: OnceLock::new(),
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Whether it was opened as [`Config::standing`] says.
    pub(crate) fn is_standing(&self) -> bool {
        self.shared.pool.is_standing()
    }

    /// A new writer, without arenas yet.
    pub(crate) fn writer(&self) -> Writer {
        Writer::new(Arc::clone(&self.shared))
    }

    /// The namespace of this name, which may be empty; it is made where it is not there. One without a quota and
    /// without keys is forgotten with the last of its handles.
    pub(crate) fn space(&self, name: &str) -> Result<Space> {
        check_space(name)?;
        let mut spaces = self.shared.spaces.lock();
        let namespace = match spaces.get(name) {
            Some(namespace) => Arc::clone(namespace),
            None => {
                let namespace = Namespace::new(name, None, Arc::clone(&self.shared.common));
                spaces.insert(Arc::clone(&namespace.name), Arc::clone(&namespace));
                namespace
            }
        };
        namespace.handles.fetch_add(1, Ordering::Relaxed);
        Ok(Space { namespace, shared: Arc::clone(&self.shared) })
    }

    /// The arena of this name. One that holds a value is always there.
    pub(crate) fn arena(&self, id: ArenaId) -> Option<Arc<Arena>> {
        self.shared.pool.arena(id)
    }

    /// Lets clients read what is stored from now on without a request, while what is returned lives; none where the store
    /// was shared before.
    ///
    /// *Errors*: [`Error::Os`] where the system lacks what this takes.
    pub(crate) fn share(&self) -> Result<Option<(Arc<Catalog>, Life)>> {
        let catalog = Catalog::new(self.shared.pool.geometry().pool)?;
        let life = catalog.begin_life().map_err(|e| Error::Os {
            what: "telling clients that the daemon lives".into(),
            reason: e.to_string(),
            errno: e.raw_os_error(),
        })?;
        Ok(self.shared.catalog.set(Arc::clone(&catalog)).is_ok().then_some((catalog, life)))
    }

    /// The store will be dropped soon: from now on no memory is moved about to be ready for later writers.
    pub(crate) fn end(&self) {
        self.shared.pool.end();
    }

    /// Where clients read without a request.
    pub(crate) fn catalog(&self) -> Option<&Arc<Catalog>> {
        self.shared.catalog.get()
    }

    /// Figures of the store.
    pub fn stat(&self) -> Stat {
        let shared = &self.shared;
        shared.sweep();
        let geometry = shared.pool.geometry();
        let spaces = shared.namespaces(|_| true);
        let mut accounts = vec![&shared.common];
        accounts.extend(spaces.iter().filter(|space| space.quota.is_some()).map(|space| &space.account));
        let granted: u64 = accounts.iter().map(|account| account.granted()).sum();
        let charged: u64 = accounts.iter().map(|account| account.charged()).sum();
        let (arenas, warm, spare) = shared.pool.counts();
        let free = geometry.pool.saturating_sub(charged);
        Stat {
            pool: geometry.pool,
            used: charged.saturating_sub(granted),
            granted,
            free,
            largest: geometry.whole_frames(free, spare),
            populated: warm * geometry.frame,
            objects: spaces.iter().map(|space| space.index.lock().len() as u64).sum(),
            evictions: shared.evictions.load(Ordering::Relaxed),
            arenas,
            spaces: spaces.len() as u64,
            frame: geometry.frame,
            page: shared.pool.page(),
            reserve_ms: u64::try_from(shared.pool.reserved_in().as_millis()).unwrap_or(u64::MAX),
        }
    }
}

impl Shared {
    /// Evicts what adds up to `bytes`, or as near as it gets; returns whether anything came free. The oldest values
    /// of `namespace` go first, then, with `others`, the oldest of the namespaces without a quota.
    fn evict(&self, namespace: &Namespace, bytes: u64, others: bool) -> bool {
        // What nobody reads any more costs nobody anything.
        if self.sweep() {
            return true;
        }
        if !self.evict {
            return false;
        }
        let now = self.now();
        let (mut freed, mut evicted) = (0, 0);
        // In batches, so that one large value does not shut the others out of the namespace for long. The values of
        // a batch are dropped after the lock.
        loop {
            let victims = namespace.index.lock().evict(bytes.saturating_sub(freed), BATCH, now);
            freed += victims.iter().map(|victim| victim.footprint()).sum::<u64>();
            evicted += victims.len();
            if victims.len() < BATCH {
                break;
            }
        }
        if others && freed < bytes {
            let others = self.namespaces(|other| other.quota.is_none() && !std::ptr::eq(other, namespace));
            let oldest = || {
                let ages = others.iter().filter_map(|other| Some((other.index.lock().oldest(now)?, other)));
                ages.min_by_key(|(age, _)| *age)
            };
            while freed < bytes
                && let Some((_, other)) = oldest()
            {
                let mut index = other.index.lock();
                let victims = index.evict(1, 1, now);
                let emptied = index.len() == 0;
                drop(index);
                if emptied {
                    forget_idle(&mut self.spaces.lock(), other);
                }
                freed += victims.iter().map(|victim| victim.footprint()).sum::<u64>();
                evicted += victims.len();
            }
        }
        self.evictions.fetch_add(evicted as u64, Ordering::Relaxed);
        evicted > 0
    }

    /// Gives back what clients read when its value went, and read no more; whether there was any.
    fn sweep(&self) -> bool {
        self.catalog.get().is_some_and(|catalog| catalog.sweep())
    }

    /// The time of a use.
    fn now(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::Relaxed)
    }

    /// Why a value of this namespace finds no room.
    fn full(&self, namespace: &Namespace) -> Error {
        let account = &namespace.account;
        let free = account.limit().saturating_sub(account.charged());
        let (_, _, spare) = self.pool.counts();
        Error::Full { free, largest: self.pool.geometry().whole_frames(free, spare) }
    }

    /// Ends one handle of `namespace`.
    fn leave(&self, namespace: &Namespace) {
        let mut spaces = self.spaces.lock();
        namespace.handles.fetch_sub(1, Ordering::Relaxed);
        forget_idle(&mut spaces, namespace);
    }

    fn namespaces(&self, which: impl Fn(&Namespace) -> bool) -> Vec<Arc<Namespace>> {
        self.spaces.lock().values().filter(|namespace| which(namespace)).cloned().collect()
    }
}

/// Takes a namespace off the list if it is idle, so that the list does not grow with every name that was ever used.
fn forget_idle(spaces: &mut BTreeMap<Arc<str>, Arc<Namespace>>, namespace: &Namespace) {
    // It may have been forgotten before, and its name may be another one's by now.
    let listed = spaces.get(&namespace.name).is_some_and(|listed| std::ptr::eq(&**listed, namespace));
    if listed && namespace.is_idle() {
        spaces.remove(&namespace.name);
    }
}

fn check_space(name: &str) -> Result<()> {
    if name.len() <= SPACE_MAX {
        return Ok(());
    }
    let what = format!("the name of a namespace has {} bytes; the limit is {SPACE_MAX}", name.len());
    Err(Error::InvalidArgument { what })
}

//! Writers, and how room is made for what they write.

use std::sync::Arc;

use parking_lot::Mutex;

use super::{
    Shared,
    arena::{Arena, Carved, Start},
    object::{Extent, Grant},
    pool::Refused,
    space::Space,
};
use crate::error::{Error, Result};

/// Places that are looked at, once no more frames are to be had, for one that needs none.
const LOOKS: usize = 4;

/// One that writes: a client of the daemon, or the process itself. Its arenas are its own until it is dropped; they
/// come one by one as they are needed.
#[derive(Debug)]
pub(crate) struct Writer {
    shared: Arc<Shared>,
    arenas: Mutex<Vec<Arc<Arena>>>,
}

impl Writer {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self { shared, arenas: Mutex::default() }
    }

    /// Reserves `len` bytes for a value of `space`. Where there is no room, the oldest values of that namespace are
    /// evicted, then the oldest of the namespaces without a quota; without eviction, or with nothing to evict, the
    /// answer is [`Error::Full`]. What can never fit is [`Error::TooLarge`], and nothing is evicted for it.
    pub(crate) fn reserve(&self, space: &Space, len: u64) -> Result<Grant> {
        let namespace = &space.namespace;
        if !Arc::ptr_eq(&space.shared, &self.shared) {
            return Err(Error::InvalidArgument { what: "the namespace belongs to another store".into() });
        }
        let limit = namespace.account.limit();
        // Beyond the limit there is no shape; within it, rounding may still exceed it.
        let size = if len > limit { len } else { self.shared.pool.geometry().shape(len).footprint() };
        if size > limit {
            return Err(Error::TooLarge { size, limit });
        }
        let charge = loop {
            match namespace.account.charge(size) {
                Ok(charge) => break charge,
                Err(missing) if self.shared.evict(namespace, missing, namespace.quota.is_none()) => {}
                Err(_) => return Err(self.shared.full(namespace)),
            }
        };
        // What is short is known in whole frames, but often less will do: a value of the same size leaves just the
        // right place. So evict little at first, and more each time that it was not enough.
        let mut step = size;
        loop {
            match self.place(len) {
                Ok(extent) => return Ok(Grant::new(extent, charge)),
                Err(Refused::System(error)) => return Err(error),
                Err(Refused::Short(short)) if self.shared.evict(namespace, step.min(short), true) => {
                    step = step.saturating_mul(2);
                }
                Err(Refused::Short(_)) => {
                    drop(charge);
                    return Err(self.shared.full(namespace));
                }
            }
        }
    }

    /// Reserves `len` bytes for a value of `space` where that costs nobody anything: nothing is evicted, and the place has
    /// memory already and lies in an arena that the writer has.
    pub(crate) fn reserve_idle(&self, space: &Space, len: u64) -> Option<Grant> {
        self.idle(space, len, 1).pop()
    }

    /// [`reserve`](Self::reserve) for many values, in order. Values of one length in a row share the bookkeeping.
    pub(crate) fn reserve_many(&self, space: &Space, lens: &[u64]) -> Vec<Result<Grant>> {
        let mut grants = Vec::with_capacity(lens.len());
        for run in lens.chunk_by(u64::eq) {
            let idle = self.idle(space, run[0], run.len());
            let rest = idle.len()..run.len();
            grants.extend(idle.into_iter().map(Ok));
            grants.extend(rest.map(|_| self.reserve(space, run[0])));
        }
        grants
    }

    /// Up to `count` reservations of `len` bytes that cost nobody anything; see [`reserve_idle`](Self::reserve_idle).
    fn idle(&self, space: &Space, len: u64, count: usize) -> Vec<Grant> {
        let account = &space.namespace.account;
        if len > account.limit() || !Arc::ptr_eq(&space.shared, &self.shared) {
            return Vec::new();
        }
        let size = self.shared.pool.geometry().shape(len).footprint();
        let Some(Ok(mut charge)) = size.checked_mul(count as u64).map(|all| account.charge(all)) else {
            return Vec::new();
        };
        let mut grants = Vec::with_capacity(count);
        for arena in &*self.arenas.lock() {
            let carved = arena.carve_warm(len, count - grants.len());
            let extents = carved.iter().map(|carved| Extent::new(Arc::clone(arena), carved, len));
            grants.extend(extents.map(|extent| Grant::new(extent, charge.split(size))));
            if grants.len() == count {
                break;
            }
        }
        grants
    }

    /// Finds a place for `len` bytes and sees to it that it has memory.
    fn place(&self, len: u64) -> Result<Extent, Refused> {
        match self.place_at(len, Start::Anywhere) {
            Err(Refused::Short(_)) => {}
            done => return done,
        }
        if let Some(warm) = self.look_for_warm(len) {
            return Ok(warm);
        }
        self.place_at(len, Start::Frame)
    }

    fn place_at(&self, len: u64, start: Start) -> Result<Extent, Refused> {
        let (extent, warm) = self.carve_or_grow(len, start).map_err(Refused::System)?;
        if !warm {
            self.shared.pool.warm(extent.arena(), extent.offset(), len)?;
        }
        Ok(extent)
    }

    /// A place that needs no more memory. The allocator offers the smallest piece that fits, warm or not; cold ones
    /// are set aside to see others.
    fn look_for_warm(&self, len: u64) -> Option<Extent> {
        let mut cold = Vec::with_capacity(LOOKS);
        while cold.len() < LOOKS {
            match carve(&self.arenas.lock(), len, Start::Anywhere)? {
                (extent, true) => return Some(extent),
                (extent, false) => cold.push(extent),
            }
        }
        None
    }

    fn carve_or_grow(&self, len: u64, start: Start) -> Result<(Extent, bool)> {
        let mut arenas = self.arenas.lock();
        if let Some(found) = carve(&arenas, len, start) {
            return Ok(found);
        }
        let (arena, carved) = self.shared.pool.acquire(len, start, arenas.len())?;
        // The smallest first: a small value does not keep a large arena's memory from moving.
        let at = arenas.partition_point(|other| other.virtual_len() <= arena.virtual_len());
        arenas.insert(at, Arc::clone(&arena));
        Ok(extent(&arena, &carved, len))
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.shared.pool.release(self.arenas.get_mut());
    }
}

/// A place in the first of these arenas that has one, and whether it has memory already.
fn carve(arenas: &[Arc<Arena>], len: u64, start: Start) -> Option<(Extent, bool)> {
    arenas.iter().find_map(|arena| arena.carve(len, start).map(|carved| extent(arena, &carved, len)))
}

fn extent(arena: &Arc<Arena>, carved: &Carved, len: u64) -> (Extent, bool) {
    (Extent::new(Arc::clone(arena), carved, len), carved.warm)
}

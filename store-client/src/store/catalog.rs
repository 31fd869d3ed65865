//! The daemon's side of reads without a question: which values the shared index shows, who reads them, and memory that waits
//! for readers. How this works, and why it is right, is told in [`crate::index`].

use std::{
    collections::HashSet,
    hash::{BuildHasher, Hasher, RandomState},
    io, mem,
    os::fd::BorrowedFd,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering, fence},
    },
};

use parking_lot::{Mutex, RwLock};

use super::{
    account::Charge,
    memory::Memory,
    object::{Extent, Object},
};
use crate::{
    error::Result,
    index::{self, Layout, Mapped, Marks, Reads, Table, life::Life},
};

/// The shared index and those who read it.
#[derive(Debug)]
pub(crate) struct Catalog {
    layout: Layout,
    seed: u64,
    memory: Arc<Memory>,
    table: Table<Mapped>,
    last_id: AtomicU64,
    readers: RwLock<Readers>,
    /// Memory that a client read when its value's last reference went.
    parked: Mutex<Parking>,
}

#[derive(Debug, Default)]
struct Readers {
    marks: Vec<Arc<Marks>>,
    /// What those who have left have read.
    left: Reads,
}

#[derive(Debug, Default)]
struct Parking {
    parked: Vec<Parked>,
    /// So many are looked at although nobody wants memory. They are twice as many as were left the last time, so that a
    /// value costs the same on average, however many are held.
    most: usize,
}

/// The fewest parked values that are looked at although nobody wants memory.
const MOST: usize = 64;

/// Memory that is given back when nobody holds `id` any more.
#[derive(Debug)]
struct Parked {
    id: u64,
    // Dropped in this order, as those of a grant.
    _extent: Extent,
    _charge: Charge,
}

impl Catalog {
    /// An index for a pool of this many bytes.
    pub(super) fn new(pool: u64) -> Result<Arc<Self>> {
        let layout = Layout::of_pool(pool);
        let memory = Arc::new(Memory::new(layout.index_len(), false)?);
        // SAFETY: the memory is mapped as a whole for as long as it lives, and all access to it is through the table and
        // the life word, which are atomic.
        let table = unsafe { index::table(memory.at(0), layout, Arc::clone(&memory) as _) };
        Ok(Arc::new(Catalog {
            layout,
            seed: RandomState::new().build_hasher().finish(),
            memory,
            table,
            last_id: AtomicU64::new(0),
            readers: RwLock::default(),
            parked: Mutex::default(),
        }))
    }

    /// Begins to say that the daemon lives.
    pub(super) fn begin_life(&self) -> io::Result<Life> {
        // SAFETY: the memory is mapped for writing, and has a life word.
        unsafe { Life::begin(self.memory.at(0), Arc::clone(&self.memory) as _) }
    }

    /// A new reader.
    pub(crate) fn admit(self: &Arc<Self>) -> Result<Reader> {
        let memory = Arc::new(Memory::new(self.layout.marks_len(), false)?);
        // SAFETY: the memory is mapped as a whole for as long as it lives, and all access to it is through the marks.
        let marks = Arc::new(unsafe { Marks::new(memory.at(0), self.layout, Arc::clone(&memory) as _) });
        self.readers.write().marks.push(Arc::clone(&marks));
        Ok(Reader { catalog: Arc::clone(self), memory, marks })
    }

    /// What all clients have read until now.
    pub(crate) fn reads(&self) -> Reads {
        let readers = self.readers.read();
        readers.marks.iter().fold(readers.left, |sum, marks| sum.plus(marks.reads()))
    }

    /// How many holds clients have.
    pub(crate) fn holds(&self) -> u64 {
        self.readers.read().marks.iter().map(|marks| marks.holds().count()).sum()
    }

    /// Gives back what was parked and is held no more; whether there was any.
    pub(super) fn sweep(&self) -> bool {
        let mut parking = self.parked.lock();
        if parking.parked.is_empty() {
            return false;
        }
        let ids = self.held();
        let (held, free): (Vec<_>, Vec<_>) =
            mem::take(&mut parking.parked).into_iter().partition(|parked| ids.contains(&parked.id));
        *parking = Parking { most: MOST.max(2 * held.len()), parked: held };
        drop(parking);
        // Dropped after the lock.
        !free.is_empty()
    }

    /// Steps c and d.
    fn is_held(&self, id: u64) -> bool {
        fence(Ordering::SeqCst);
        self.readers.read().marks.iter().any(|marks| marks.holds().contain(id))
    }

    /// The same for all values at once.
    fn held(&self) -> HashSet<u64> {
        fence(Ordering::SeqCst);
        self.readers.read().marks.iter().flat_map(|marks| marks.holds().ids()).collect()
    }

    fn park(&self, parked: Parked) {
        let mut parking = self.parked.lock();
        parking.parked.push(parked);
        let due = parking.parked.len() > parking.most;
        drop(parking);
        if due {
            self.sweep();
        }
    }
}

/// A client that reads through the index, until it is dropped.
#[derive(Debug)]
pub(crate) struct Reader {
    catalog: Arc<Catalog>,
    memory: Arc<Memory>,
    marks: Arc<Marks>,
}

impl Reader {
    /// Of the index.
    pub(crate) fn slots(&self) -> u32 {
        self.catalog.layout.slots()
    }

    /// Of the index' hash.
    pub(crate) fn seed(&self) -> u64 {
        self.catalog.seed
    }

    /// The index, which cannot be mapped writable, and the client's marks.
    pub(crate) fn descriptors(&self) -> [BorrowedFd<'_>; 2] {
        [self.catalog.memory.readable(), self.memory.writable()]
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.marks.end();
        let mut readers = self.catalog.readers.write();
        readers.marks.retain(|marks| !Arc::ptr_eq(marks, &self.marks));
        readers.left = readers.left.plus(self.marks.reads());
        drop(readers);
        self.catalog.sweep();
    }
}

/// What clients hold, for somebody who asks about many values in a row. To go through all holds for each value would take
/// the product of their numbers, so after a few it is done once for all. What is held from then on is not seen.
#[derive(Debug, Default)]
pub(super) struct Held {
    asked: usize,
    ids: Option<HashSet<u64>>,
}

/// So many questions cost about as much as to collect what is held.
const FEW: usize = 16;

impl Held {
    fn contains(&mut self, catalog: &Catalog, id: u64) -> bool {
        if self.asked < FEW {
            self.asked += 1;
            return catalog.is_held(id);
        }
        self.ids.get_or_insert_with(|| catalog.held()).contains(&id)
    }
}

/// A value's part in a catalog.
#[derive(Debug)]
pub(super) struct Listing {
    catalog: Arc<Catalog>,
    id: u64,
    /// Where it was published last.
    slot: AtomicU32,
}

/// Of what was never published, so that nobody can hold it.
const NOWHERE: u32 = u32::MAX;

impl Listing {
    pub(super) fn new(catalog: &Arc<Catalog>) -> Self {
        let id = catalog.last_id.fetch_add(1, Ordering::Relaxed) + 1;
        Listing { catalog: Arc::clone(catalog), id, slot: AtomicU32::new(NOWHERE) }
    }

    /// Shows `object` as the value of a key, if it is not shown. To be called under the lock of the namespace, while it is.
    pub(super) fn publish(&self, space: u64, key: &str, object: &Object) {
        let Listing { catalog, id, .. } = self;
        if self.slot().is_some_and(|slot| catalog.table.has(slot, *id)) {
            return;
        }
        let entry = index::Entry {
            id: *id,
            space,
            key: key.as_bytes(),
            meta: object.meta(),
            arena: object.arena().id().0.into(),
            offset: object.offset(),
            len: object.len(),
        };
        if let Some(slot) = catalog.table.publish(index::hash(catalog.seed, space, key), &entry) {
            self.slot.store(slot, Ordering::Relaxed);
        }
    }

    /// Shows it no more. To be called under the lock of the namespace, when it stops to be the value of its key.
    pub(super) fn withdraw(&self) {
        if let Some(slot) = self.slot() {
            self.catalog.table.withdraw(slot, self.id);
        }
    }

    /// Whether a client holds it without the daemon's knowledge, so that to evict it would free nothing.
    pub(super) fn is_among(&self, held: &mut Held) -> bool {
        self.slot().is_some() && held.contains(&self.catalog, self.id)
    }

    /// Whether a client has read it since this was last asked.
    pub(super) fn take_use(&self) -> bool {
        let Some(slot) = self.slot() else { return false };
        // Each of them, so that the next time tells of later uses only.
        self.catalog
            .readers
            .read()
            .marks
            .iter()
            .fold(false, |used, marks| marks.take_use(slot, self.id) | used)
    }

    /// Keeps the memory of a value whose last reference has gone for as long as a client reads it.
    pub(super) fn outlive(&self, extent: &mut Extent, charge: &mut Charge) {
        // It has been withdrawn by whoever took it out of the store's index; a store that ends takes nothing out.
        self.withdraw();
        if self.slot().is_some() && self.catalog.is_held(self.id) {
            let (extent, charge) = (extent.take(), charge.take());
            self.catalog.park(Parked { id: self.id, _extent: extent, _charge: charge });
        }
    }

    fn slot(&self) -> Option<u32> {
        Some(self.slot.load(Ordering::Relaxed)).filter(|&slot| slot != NOWHERE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_held_is_collected_once_for_many_questions_and_not_looked_for_each_time() {
        let catalog = Catalog::new(64 << 20).unwrap();
        let reader = catalog.admit().unwrap();
        let holds = reader.marks.holds();
        let words: Vec<_> = (1..=100).map(|id| holds.take(id).unwrap()).collect();
        let mut held = Held::default();
        for id in 1..=FEW as u64 {
            assert!(held.contains(&catalog, id) && catalog.is_held(id));
            holds.clear(words[id as usize - 1]);
        }
        assert!((FEW as u64 + 1..=100).all(|id| held.contains(&catalog, id)));
        assert!(!held.contains(&catalog, 1) && !held.contains(&catalog, 101));
        holds.take(101).unwrap();
        assert!(catalog.is_held(101) && !held.contains(&catalog, 101), "it was collected before");
        assert!(Held::default().contains(&catalog, 101));
    }
}

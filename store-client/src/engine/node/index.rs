//! The client's side of reads without a question; see [`crate::index`].

use std::{
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, OnceLock},
};

use hal::{Deadline, Region};

use super::connection::{Connection, Fault};
use crate::{
    error::{Error, Result},
    fork,
    index::{self, Layout, Mapped, Marks, Seen, Table, life},
    shm::{Access, Mapping},
    wire::IndexInfo,
};

/// Arenas that are found without a lock. There are about as many as writers; those beyond cost a little more.
const ARENAS: usize = 64;

/// The shared index and this client's marks, mapped.
#[derive(Debug)]
pub(super) struct Lookup {
    opened_in: u64,
    info: IndexInfo,
    index: Arc<Mapping>,
    table: Table<Mapped>,
    marks: Marks,
    views: Arenas,
    copies: Arenas,
}

impl Lookup {
    /// Maps what the daemon has sent.
    ///
    /// *Errors*: [`Error::Protocol`] where it does not fit together; [`Error::Os`] where the kernel refuses.
    pub(super) fn open(info: IndexInfo, descriptors: &[OwnedFd]) -> Result<Self> {
        let protocol = |reason: &str| Error::Protocol { reason: reason.into() };
        let layout =
            Layout::of_slots(info.slots).ok_or_else(|| protocol("an index of an impossible size came"))?;
        let [index, marks] = descriptors else {
            return Err(protocol("an index came without its descriptors"));
        };
        let index = Arc::new(Mapping::new(index.as_fd(), layout.index_len(), Access::Read)?);
        let memory = Arc::new(Mapping::new(marks.as_fd(), layout.marks_len(), Access::Write)?);
        // SAFETY: both are mapped as a whole, at a page, while their mappings live, and nothing else in this process
        // touches them; the index is only looked at.
        let (table, marks) = unsafe {
            (
                index::table(index.base(), layout, Arc::clone(&index) as _),
                Marks::new(memory.base(), layout, Arc::clone(&memory) as _),
            )
        };
        let (views, copies) = (Arenas::default(), Arenas::default());
        Ok(Lookup { opened_in: fork::process(), info, index, table, marks, views, copies })
    }

    /// Whether the daemon lives, and looks at the marks.
    fn lives(&self) -> bool {
        // SAFETY: the index is mapped there.
        unsafe { life::is_alive(self.index.base()) && !self.marks.have_ended() }
    }

    /// Whether this is still the process that has asked for it, and not a child, to which nothing of it belongs.
    fn is_ours(&self) -> bool {
        fork::process() == self.opened_in
    }
}

/// A value that this client holds without the daemon's knowledge, until it is dropped.
#[derive(Debug)]
pub(super) struct Found {
    /// Keeps what it refers to mapped, and the session alive that the hold belongs to.
    connection: Arc<Connection>,
    word: usize,
    id: u64,
    slot: u32,
    arena: u64,
    offset: u64,
    len: u64,
    meta: Box<[u8]>,
}

impl Found {
    /// Finds a key and takes a hold on its value. None says nothing about the key: the daemon is to be asked.
    pub(super) fn take(connection: &Arc<Connection>, key: &str) -> Option<Self> {
        let lookup = connection.lookup().filter(|lookup| lookup.is_ours() && !connection.is_behind())?;
        let IndexInfo { seed, space, .. } = lookup.info;
        let hash = index::hash(seed, space, key);
        let lives = || lookup.lives() && !connection.has_ended();
        let (seen, word) =
            index::hold(&lookup.table, lookup.marks.holds(), hash, space, key.as_bytes(), lives)?;
        let meta = seen.meta();
        let Seen { id, slot, arena, offset, len, .. } = seen;
        Some(Found { connection: Arc::clone(connection), word, id, slot, arena, offset, len, meta })
    }

    /// Says that the value is used, for eviction and the counters.
    pub(super) fn count(&self) {
        if let Some(lookup) = self.connection.lookup() {
            lookup.marks.used(self.slot, self.id, self.len);
        }
    }

    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// What was stored beside it, which is taken out.
    pub(super) fn take_meta(&mut self) -> Box<[u8]> {
        std::mem::take(&mut self.meta)
    }

    /// The bytes, mapped while this lives so that nobody in this process can write them. Without a deadline nothing is asked
    /// for.
    pub(super) fn for_view(&self, deadline: Option<Deadline>) -> Result<Region, Fault> {
        self.region(
            |lookup| &lookup.views,
            deadline,
            |deadline| self.connection.for_view(self.arena, deadline),
        )
    }

    /// The bytes, mapped while this lives.
    pub(super) fn for_copy(&self, deadline: Option<Deadline>) -> Result<Region, Fault> {
        self.region(
            |lookup| &lookup.copies,
            deadline,
            |deadline| self.connection.for_copy(self.arena, deadline),
        )
    }

    fn region(
        &self,
        known: impl Fn(&Lookup) -> &Arenas,
        deadline: Option<Deadline>,
        map: impl FnOnce(Deadline) -> Result<Arc<Mapping>, Fault>,
    ) -> Result<Region, Fault> {
        if self.len == 0 {
            return Ok(Region::host(0, 0));
        }
        let at = self.connection.lookup().and_then(|lookup| known(lookup).0.get(self.arena as usize));
        if let Some(mapping) = at.and_then(OnceLock::get) {
            return self.connection.range(mapping, self.offset, self.len);
        }
        // The connection keeps it too, for as long as it lives.
        let mapping = map(deadline.ok_or(Fault::Timeout { sent: false })?)?;
        let region = self.connection.range(&mapping, self.offset, self.len)?;
        if let Some(at) = at {
            // Another thread may have been as fast.
            let _ = at.set(mapping);
        }
        Ok(region)
    }
}

impl Drop for Found {
    fn drop(&mut self) {
        if let Some(lookup) = self.connection.lookup().filter(|lookup| lookup.is_ours()) {
            lookup.marks.holds().clear(self.word);
        }
    }
}

/// Mappings of arenas by number, each set once.
#[derive(Debug)]
struct Arenas([OnceLock<Arc<Mapping>>; ARENAS]);

impl Default for Arenas {
    fn default() -> Self {
        Arenas([const { OnceLock::new() }; ARENAS])
    }
}

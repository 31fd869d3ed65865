//! Extents, and the two things that own one: a [`Grant`] while it is written, an [`Object`] from then on.

use std::{
    ptr::NonNull,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use super::{
    account::{Account, Charge},
    arena::{Arena, Carved, Place},
    catalog::{Catalog, Held, Listing},
};
use crate::error::{Error, Result};

/// Bytes of an arena; they are free again when it is dropped.
pub(super) struct Extent {
    arena: Arc<Arena>,
    offset: u64,
    len: u64,
    /// None once another extent has it.
    place: Option<Place>,
}

impl Extent {
    pub(super) fn new(arena: Arc<Arena>, carved: &Carved, len: u64) -> Self {
        Self { arena, offset: carved.offset, len, place: Some(carved.place) }
    }

    pub(super) fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    pub(super) fn offset(&self) -> u64 {
        self.offset
    }

    /// Leaves nothing here to be given back.
    pub(super) fn take(&mut self) -> Self {
        let Self { arena, offset, len, place } = self;
        Self { arena: Arc::clone(arena), offset: *offset, len: *len, place: place.take() }
    }

    fn at(&self) -> NonNull<u8> {
        self.arena.at(self.offset)
    }

    /// The address of `len` bytes from `at` on, when they lie within.
    fn range(&self, at: u64, len: usize) -> Result<NonNull<u8>> {
        let end = at.checked_add(len as u64);
        if end.is_none_or(|end| end > self.len) {
            return Err(Error::InvalidRange { offset: at, len: len as u64, limit: self.len });
        }
        Ok(self.arena.at(self.offset + at))
    }
}

impl Drop for Extent {
    fn drop(&mut self) {
        if let Some(place) = self.place {
            self.arena.give_back(place, self.offset, self.len);
        }
    }
}

impl std::fmt::Debug for Extent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut f = f.debug_struct("Extent");
        f.field("arena", &self.arena.id()).field("offset", &self.offset).field("len", &self.len).finish()
    }
}

/// Memory reserved for a value that is being written. Dropping it gives the memory back.
#[must_use = "a grant that is dropped gives its memory back"]
pub(crate) struct Grant {
    // Dropped in this order: an account never promises memory that is still taken.
    extent: Extent,
    charge: Charge,
}

impl Grant {
    pub(super) fn new(extent: Extent, charge: Charge) -> Self {
        Self { extent, charge }
    }

    /// The arena that the memory lies in.
    pub(crate) fn arena(&self) -> &Arc<Arena> {
        &self.extent.arena
    }

    /// Where the memory starts in its arena.
    pub(crate) fn offset(&self) -> u64 {
        self.extent.offset
    }

    /// Bytes that may be written.
    pub(crate) fn capacity(&self) -> u64 {
        self.extent.len
    }

    /// The memory in this process. It holds whatever was there before.
    ///
    /// A pointer and not a slice, because the process that the grant was made for may write it at any time.
    pub(crate) fn as_mut_ptr(&mut self) -> *mut u8 {
        self.extent.at().as_ptr()
    }

    /// Copies `bytes` to position `at`.
    pub(crate) fn write(&mut self, at: u64, bytes: &[u8]) -> Result<()> {
        let to = self.extent.range(at, bytes.len())?;
        // SAFETY: the target lies within this extent, which nobody else in this process has and which no Rust
        // reference points to, so it cannot overlap `bytes`.
        unsafe { to.copy_from_nonoverlapping(NonNull::from(bytes).cast(), bytes.len()) };
        Ok(())
    }

    pub(super) fn account(&self) -> &Arc<Account> {
        self.charge.account()
    }

    /// Makes the first `len` bytes a value, which may be shown in `catalog`. What exceeds them is given up, as far as that is
    /// whole frames.
    pub(super) fn into_object(self, len: u64, meta: &[u8], catalog: Option<&Arc<Catalog>>) -> Object {
        let Self { mut extent, mut charge } = self;
        charge.settle();
        if let Some(Place::Block(_)) = extent.place {
            let given_up = extent.arena.shorten(extent.offset, extent.len, len);
            charge.lower(charge.bytes().saturating_sub(given_up).max(len));
        }
        extent.len = len;
        let meta = (!meta.is_empty()).then(|| meta.into());
        Object {
            extent,
            charge,
            meta,
            pinned: AtomicBool::new(false),
            touched: AtomicU64::new(0),
            listing: catalog.map(|catalog| Box::new(Listing::new(catalog))),
        }
    }
}

impl std::fmt::Debug for Grant {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut f = f.debug_struct("Grant");
        f.field("arena", &self.arena().id())
            .field("offset", &self.offset())
            .field("capacity", &self.capacity());
        f.finish()
    }
}

/// A stored value. Its bytes stay where they are, unchanged, until the last reference to it is dropped, also when it
/// has been removed, evicted or replaced meanwhile.
pub(crate) struct Object {
    extent: Extent,
    charge: Charge,
    meta: Option<Box<[u8]>>,
    /// When it was last used, by the clock of the store; written under the lock of its namespace.
    touched: AtomicU64,
    pinned: AtomicBool,
    /// Where clients read without a request.
    listing: Option<Box<Listing>>,
}

impl Object {
    /// The arena that the bytes lie in.
    pub(crate) fn arena(&self) -> &Arc<Arena> {
        &self.extent.arena
    }

    /// Where the bytes start in their arena.
    pub(crate) fn offset(&self) -> u64 {
        self.extent.offset
    }

    /// Bytes of the value.
    pub(crate) fn len(&self) -> u64 {
        self.extent.len
    }

    /// Whether it is the empty value.
    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What was stored beside the value.
    pub(crate) fn meta(&self) -> &[u8] {
        self.meta.as_deref().unwrap_or_default()
    }

    /// Whether eviction spares it.
    pub(crate) fn is_pinned(&self) -> bool {
        self.pinned.load(Ordering::Relaxed)
    }

    /// The bytes in this process, for reading.
    pub(crate) fn as_ptr(&self) -> *const u8 {
        self.extent.at().as_ptr()
    }

    /// Copies the bytes from position `at` on into `into`, which must not be longer than what is there.
    pub(crate) fn read(&self, at: u64, into: &mut [u8]) -> Result<()> {
        let from = self.extent.range(at, into.len())?;
        // SAFETY: the source lies within this extent, whose bytes nobody writes while the object lives, views of it
        // included; `into` is exclusive, so it is other memory.
        unsafe { from.copy_to_nonoverlapping(NonNull::from(&mut *into).cast(), into.len()) };
        Ok(())
    }

    /// Bytes of the budget that it takes.
    pub(super) fn footprint(&self) -> u64 {
        self.charge.bytes()
    }

    pub(super) fn touched(&self) -> u64 {
        self.touched.load(Ordering::Relaxed)
    }

    pub(super) fn touch(&self, now: u64) {
        self.touched.store(now, Ordering::Relaxed);
    }

    /// Lets clients read it as the value of `key` without a request. Under the lock of its namespace, as are the next three.
    pub(super) fn publish(&self, space: u64, key: &str) {
        if let Some(listing) = &self.listing {
            listing.publish(space, key, self);
        }
    }

    /// Ends that: it is no longer the value of its key.
    pub(super) fn withdraw(&self) {
        if let Some(listing) = &self.listing {
            listing.withdraw();
        }
    }

    /// Whether a client holds it that took the hold without a request.
    pub(super) fn is_read(&self, held: &mut Held) -> bool {
        self.listing.as_ref().is_some_and(|listing| listing.is_among(held))
    }

    /// Whether a client has read it without a request since this was last asked.
    pub(super) fn take_use(&self) -> bool {
        self.listing.as_ref().is_some_and(|listing| listing.take_use())
    }

    /// Sets whether it is pinned; returns whether it was.
    pub(super) fn set_pinned(&self, pinned: bool) -> bool {
        self.pinned.swap(pinned, Ordering::Relaxed)
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        let Self { extent, charge, listing, .. } = self;
        if let Some(listing) = listing {
            listing.outlive(extent, charge);
        }
    }
}

impl std::fmt::Debug for Object {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut f = f.debug_struct("Object");
        f.field("arena", &self.arena().id()).field("offset", &self.offset()).field("len", &self.len());
        f.finish_non_exhaustive()
    }
}

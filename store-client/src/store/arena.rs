//! One arena: a span of addresses that one writer at a time allocates from.

use std::{
    any::Any,
    ops::RangeInclusive,
    os::fd::BorrowedFd,
    ptr::NonNull,
    sync::atomic::{AtomicBool, Ordering},
};

use offset_allocator::{Allocation, Allocator};
use parking_lot::{Condvar, Mutex};

use super::{
    frames::{self, Frames, Run, State},
    geometry::{Class, Geometry, SLAB, SLOT_MAX, Shape},
    memory::Memory,
    slab::Slabs,
};
use crate::error::Result;

/// Names an arena; never used twice by one store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct ArenaId(pub(crate) u32);

/// A sealed memory file that one writer at a time writes and everybody else can only read.
#[derive(Debug)]
pub(crate) struct Arena {
    id: ArenaId,
    geometry: Geometry,
    /// Virtual bytes, a multiple of the frame.
    span: u64,
    /// Whether all of it has memory or none.
    stands: bool,
    /// Dropped before the memory.
    attached: Mutex<Option<Box<dyn Any + Send>>>,
    memory: Memory,
    inner: Mutex<Inner>,
    /// Told whenever busy frames have settled.
    settled: Condvar,
    /// Whether a writer owns it; changed under the lock of the pool's list.
    owned: AtomicBool,
}

#[derive(Debug)]
struct Inner {
    space: Allocator<u32>,
    slabs: Slabs,
    frames: Frames,
    /// Extents that are alive, the empty ones too.
    extents: u64,
}

/// A block of the allocator.
#[derive(Clone, Copy)]
pub(super) struct Block {
    allocation: Allocation<u32>,
    /// Where its bytes start, after alignment.
    pub(super) offset: u64,
}

impl std::fmt::Debug for Block {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Block").field("offset", &self.offset).finish_non_exhaustive()
    }
}

/// Where an extent may start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Start {
    /// Where it fits best. It may reach into a frame more than its size needs.
    Anywhere,
    /// At the start of a frame, so that it needs no frame more than its size does.
    Frame,
}

impl Start {
    fn align(self, least: u64, geometry: &Geometry) -> u64 {
        match self {
            Start::Anywhere => least,
            Start::Frame => geometry.frame,
        }
    }
}

/// What has to be given back when an extent ends.
#[derive(Clone, Copy)]
pub(super) enum Place {
    Empty,
    /// A slot of the slab with this number.
    Slot(u32),
    Block(Allocation<u32>),
}

/// Addresses set aside for a value.
pub(super) struct Carved {
    pub(super) place: Place,
    pub(super) offset: u64,
    /// Whether all of it has memory already.
    pub(super) warm: bool,
}

impl Arena {
    /// One of `span` bytes, for an owner that has `before` arenas already. Where it `stands`, its memory comes and goes as a
    /// whole.
    pub(super) fn new(
        id: ArenaId,
        geometry: Geometry,
        span: u64,
        stands: bool,
        huge: bool,
        before: usize,
    ) -> Result<Self> {
        let memory = Memory::new(span, huge)?;
        let units = (span / geometry.unit) as u32;
        let inner = Inner {
            space: Allocator::with_max_allocs(units, nodes(&geometry, span, before)),
            slabs: Slabs::default(),
            frames: Frames::new((span / geometry.frame) as usize),
            extents: 0,
        };
        let owned = AtomicBool::new(false);
        let (attached, inner) = (Mutex::default(), Mutex::new(inner));
        let settled = Condvar::new();
        Ok(Self { id, geometry, span, stands, attached, memory, inner, settled, owned })
    }

    /// Its name.
    pub(crate) fn id(&self) -> ArenaId {
        self.id
    }

    /// The descriptor for everybody: cannot be mapped writable.
    pub(crate) fn read_only(&self) -> BorrowedFd<'_> {
        self.memory.readable()
    }

    /// The descriptor for the present owner and nobody else.
    pub(crate) fn read_write(&self) -> BorrowedFd<'_> {
        self.memory.writable()
    }

    /// Bytes to map; most of them are holes.
    pub(crate) fn virtual_len(&self) -> u64 {
        self.memory.len()
    }

    /// Bytes of a page, as the kernel says.
    pub(super) fn page(&self) -> Result<u64> {
        self.memory.page()
    }

    /// Attaches something to all of the memory, in this process, unless something is: it is dropped before the memory goes.
    /// For an arena that stands and holds a value, so that all of it has memory.
    #[cfg(feature = "mooncake")]
    pub(crate) fn attach<E>(
        &self,
        make: impl FnOnce(hal::Region) -> Result<Box<dyn Any + Send>, E>,
    ) -> Result<(), E> {
        let mut attached = self.attached.lock();
        if attached.is_none() {
            let start = self.at(0).as_ptr().expose_provenance();
            *attached = Some(make(hal::Region::host(start, self.memory.len() as usize))?);
        }
        Ok(())
    }

    /// The address of `offset` in this process.
    pub(super) fn at(&self, offset: u64) -> NonNull<u8> {
        self.memory.at(offset)
    }

    /// Sets addresses aside for `len` bytes; None when the span or the table of the allocator is used up.
    pub(super) fn carve(&self, len: u64, start: Start) -> Option<Carved> {
        self.inner.lock().carve(&self.geometry, len, start)
    }

    /// As [`Arena::carve`], up to `most` times, as far as the places have memory already.
    pub(super) fn carve_warm(&self, len: u64, most: usize) -> Vec<Carved> {
        let mut inner = self.inner.lock();
        let mut carved = Vec::with_capacity(most);
        while carved.len() < most
            && let Some(one) = inner.carve(&self.geometry, len, Start::Anywhere)
        {
            if !one.warm {
                inner.give_back(&self.geometry, one.place, one.offset, len);
                break;
            }
            carved.push(one);
        }
        carved
    }

    /// Takes back what [`Arena::carve`] set aside.
    pub(super) fn give_back(&self, place: Place, offset: u64, len: u64) {
        self.inner.lock().give_back(&self.geometry, place, offset, len);
    }

    /// Gives up the frames of a block beyond its first `len` bytes of `was`; returns their bytes.
    pub(super) fn shorten(&self, offset: u64, was: u64, len: u64) -> u64 {
        let (was, keep) = (self.run(offset, was), self.run(offset, len));
        let over = was.start.max(keep.end)..was.end;
        let bytes = over.len() as u64 * self.geometry.frame;
        self.inner.lock().frames.release(over);
        bytes
    }

    /// Marks the holes under these bytes, or where the arena stands all of its holes, as busy for the caller, who must settle
    /// them. Returns none when all has memory; waits for frames that another thread has in hand.
    pub(super) fn take_holes(&self, offset: u64, len: u64) -> Vec<Run> {
        let run = if self.stands { self.run(0, self.span) } else { self.run(offset, len) };
        let mut inner = self.inner.lock();
        loop {
            let holes = inner.frames.take_holes(run.clone());
            if !holes.is_empty() || inner.frames.all_warm(run.clone()) {
                return holes;
            }
            self.settled.wait(&mut inner);
        }
    }

    /// Marks up to `most` holes as busy for the caller, who must settle them.
    pub(super) fn take_lowest_holes(&self, most: usize) -> Vec<Run> {
        self.inner.lock().frames.take_lowest_holes(most)
    }

    /// Marks up to `most` frames that nothing lives in as busy for the caller, who must settle them. An arena that stands
    /// gives all frames, once nothing lives in any, and lets go what is attached.
    pub(super) fn take_spare(&self, most: usize) -> Vec<Run> {
        let mut inner = self.inner.lock();
        if !self.stands {
            return inner.frames.take_spare(most);
        }
        if inner.extents > 0 {
            return Vec::new();
        }
        let all = inner.frames.take_spare(usize::MAX);
        drop(inner);
        // Whoever carves meanwhile waits for the frames, and attaches after that.
        if !all.is_empty() {
            self.attached.lock().take();
        }
        all
    }

    /// Ends the busy state of these frames and wakes who waits for them.
    pub(super) fn settle(&self, runs: &[Run], state: State) {
        self.inner.lock().frames.settle(runs, state);
        self.settled.notify_all();
    }

    /// Gives these frames memory. The frames must be busy for the caller.
    pub(super) fn populate(&self, runs: &[Run]) -> Result<()> {
        self.each(runs, |offset, len| self.memory.populate(offset, len))
    }

    /// Takes the memory of these frames away. The frames must be busy for the caller.
    pub(super) fn punch(&self, runs: &[Run]) -> Result<()> {
        self.each(runs, |offset, len| self.memory.punch(offset, len))
    }

    /// Takes back memory that an owner took by writing where nothing was granted to it, so that the budget holds again.
    pub(super) fn shed_strays(&self) -> Result<()> {
        let warm = self.inner.lock().frames.warm() as u64 * self.geometry.frame;
        if self.memory.taken()? <= warm {
            return Ok(());
        }
        let holes = self.take_holes(0, self.span);
        let outcome = self.punch(&holes);
        self.settle(&holes, State::Hole);
        outcome
    }

    /// Frames with memory, and those of them that could be used elsewhere.
    pub(super) fn counts(&self) -> (usize, usize) {
        let inner = self.inner.lock();
        let stuck = self.stands && inner.extents > 0;
        (inner.frames.warm(), if stuck { 0 } else { inner.frames.spare() })
    }

    /// Whether its memory comes and goes as a whole.
    pub(super) fn stands(&self) -> bool {
        self.stands
    }

    /// Whether it holds no extents.
    pub(super) fn is_empty(&self) -> bool {
        self.inner.lock().extents == 0
    }

    /// Whether it holds neither memory nor extents.
    pub(super) fn is_vacant(&self) -> bool {
        let inner = self.inner.lock();
        inner.extents == 0 && inner.frames.are_holes()
    }

    pub(super) fn is_owned(&self) -> bool {
        self.owned.load(Ordering::Relaxed)
    }

    pub(super) fn set_owned(&self, owned: bool) {
        self.owned.store(owned, Ordering::Relaxed);
    }

    fn each(&self, runs: &[Run], call: impl Fn(u64, u64) -> Result<()>) -> Result<()> {
        let frame = self.geometry.frame;
        runs.iter().try_for_each(|run| call(run.start as u64 * frame, run.len() as u64 * frame))
    }

    /// The frames under these bytes.
    fn run(&self, offset: u64, len: u64) -> Run {
        run(&self.geometry, offset, len)
    }
}

impl Inner {
    fn carve(&mut self, geometry: &Geometry, len: u64, start: Start) -> Option<Carved> {
        let (place, offset) = match geometry.shape(len) {
            Shape::Empty => (Place::Empty, 0),
            Shape::Slot(class) => self.slot(geometry, class, start)?,
            Shape::Block { bytes, align } => {
                let block = self.block(geometry, bytes, start.align(align, geometry), len)?;
                (Place::Block(block.allocation), block.offset)
            }
        };
        self.extents += 1;
        Some(Carved { place, offset, warm: self.frames.all_warm(run(geometry, offset, len)) })
    }

    fn give_back(&mut self, geometry: &Geometry, place: Place, offset: u64, len: u64) {
        self.extents -= 1;
        match place {
            Place::Empty => {}
            Place::Slot(slab) => {
                if let Some((class, block)) = self.slabs.put(slab, offset) {
                    // Addresses are kept, memory is not: it may be what a large value lacks.
                    self.frames.release(run(geometry, block.offset, SLAB));
                    if let Some(surplus) = self.slabs.keep(class, block) {
                        self.space.free(surplus.allocation);
                    }
                }
            }
            Place::Block(allocation) => self.free(geometry, Block { allocation, offset }, len),
        }
    }

    fn slot(&mut self, geometry: &Geometry, class: Class, start: Start) -> Option<(Place, u64)> {
        let open = (start == Start::Anywhere).then(|| self.slabs.take(class)).flatten();
        let slot = open.or_else(|| {
            let kept = (start == Start::Anywhere).then(|| self.kept(geometry, class)).flatten();
            let new = || self.block(geometry, SLAB, start.align(geometry.unit, geometry), SLAB);
            let block = kept.or_else(new)?;
            self.slabs.add(class, block);
            self.slabs.take(class)
        });
        slot.map(|(slab, offset)| (Place::Slot(slab), offset))
    }

    /// The block that was kept for a class, its frames claimed. One whose memory has gone elsewhere is given up: there may
    /// be another place that has some.
    fn kept(&mut self, geometry: &Geometry, class: Class) -> Option<Block> {
        let block = self.slabs.take_kept(class)?;
        let frames = run(geometry, block.offset, SLAB);
        if !self.frames.all_warm(frames.clone()) {
            self.space.free(block.allocation);
            return None;
        }
        self.frames.claim(frames);
        Some(block)
    }

    /// Allocates `bytes` and claims the frames under the first `len` of them: rounding takes no memory.
    fn block(&mut self, geometry: &Geometry, bytes: u64, align: u64, len: u64) -> Option<Block> {
        let units = geometry.units(bytes, align);
        let allocation = self.space.allocate(units).or_else(|| {
            self.slabs.trim().for_each(|kept| self.space.free(kept.allocation));
            self.space.allocate(units)
        })?;
        let offset = (u64::from(allocation.offset) * geometry.unit).next_multiple_of(align);
        self.frames.claim(run(geometry, offset, len));
        Some(Block { allocation, offset })
    }

    fn free(&mut self, geometry: &Geometry, block: Block, len: u64) {
        self.frames.release(run(geometry, block.offset, len));
        self.space.free(block.allocation);
    }
}

fn run(geometry: &Geometry, offset: u64, len: u64) -> Run {
    let end = (offset + len).div_ceil(geometry.frame);
    ((offset / geometry.frame).min(end) as usize)..end as usize
}

/// Entries of an allocator's table, of 32 bytes that are there from the start. A full table only means that the writer gets
/// another arena, with four times as many: most of many clients need few, and who needs many has few arenas all the same.
fn nodes(geometry: &Geometry, span: u64, before: usize) -> u32 {
    const FIRST: u64 = 4 << 10;
    const MOST: RangeInclusive<u64> = 64 << 10..=512 << 10;
    // No more than there can be blocks, which are longer than a slot, and gaps between them.
    let blocks = (span / SLOT_MAX + 1) * 2;
    let most = (geometry.pool >> 18).clamp(*MOST.start(), *MOST.end()).min(blocks);
    let wanted = FIRST.checked_shl(2 * before.min(16) as u32).unwrap_or(most);
    wanted.min(most) as u32
}

/// Frames in all of `runs`.
pub(super) fn frames_in(runs: &[Run]) -> u64 {
    frames::count(runs) as u64
}

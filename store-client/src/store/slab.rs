//! Slabs: blocks carved into equal slots, so that a small value costs one bit and not a node of the allocator.

use super::{
    arena::Block,
    geometry::{Class, SLAB},
};

/// A block carved into slots of one class.
#[derive(Debug)]
struct Slab {
    class: Class,
    block: Block,
    used: usize,
    /// One bit a slot, set when it is in use.
    taken: Box<[u64]>,
    /// Where the slab stands in the list of its class that have a free slot.
    listed: usize,
}

/// The slabs of one arena.
#[derive(Debug, Default)]
pub(super) struct Slabs {
    slabs: Vec<Option<Slab>>,
    /// Entries of `slabs` to use again.
    vacant: Vec<u32>,
    /// Per class, the slabs that have a free slot.
    open: [Vec<u32>; Class::COUNT],
    /// Per class, the addresses of one slab that was given up, so that a value put and removed in turn does not ask the
    /// allocator each time.
    kept: [Option<Block>; Class::COUNT],
}

impl Slabs {
    /// Takes a slot: the number of its slab and its offset in the arena. None when a slab has to be added first.
    pub(super) fn take(&mut self, class: Class) -> Option<(u32, u64)> {
        let id = *self.open[class.index()].last()?;
        let slab = self.slabs[id as usize].as_mut()?;
        let (word, bits) = slab.taken.iter_mut().enumerate().find(|(_, bits)| **bits != u64::MAX)?;
        let slot = word * 64 + bits.trailing_ones() as usize;
        *bits |= 1 << (slot % 64);
        slab.used += 1;
        let offset = slab.block.offset + slot as u64 * class.slot();
        if slab.used == class.slots() {
            self.close(id);
        }
        Some((id, offset))
    }

    /// Adds a block of [`SLAB`] bytes to a class.
    pub(super) fn add(&mut self, class: Class, block: Block) {
        let slots = class.slots();
        let mut taken = vec![0u64; slots.div_ceil(64)].into_boxed_slice();
        // Bits that have no slot count as taken for ever.
        if let (Some(last), over @ 1..) = (taken.last_mut(), slots % 64) {
            *last = u64::MAX << over;
        }
        let slab = Slab { class, block, used: 0, taken, listed: 0 };
        let id = match self.vacant.pop() {
            Some(id) => {
                self.slabs[id as usize] = Some(slab);
                id
            }
            None => {
                self.slabs.push(Some(slab));
                (self.slabs.len() - 1) as u32
            }
        };
        self.open(id);
    }

    /// Gives back the slot at `offset`; where it was the slab's last one, the slab is no more, and its class and block are
    /// returned.
    pub(super) fn put(&mut self, id: u32, offset: u64) -> Option<(Class, Block)> {
        let slab = self.slabs[id as usize].as_mut()?;
        let class = slab.class;
        let slot = ((offset - slab.block.offset) / class.slot()) as usize;
        debug_assert!(slab.block.offset + SLAB > offset && slab.taken[slot / 64] & 1 << (slot % 64) != 0);
        slab.taken[slot / 64] &= !(1 << (slot % 64));
        slab.used -= 1;
        let used = slab.used;
        if used + 1 == class.slots() {
            self.open(id);
        }
        if used > 0 {
            return None;
        }
        self.close(id);
        self.vacant.push(id);
        self.slabs[id as usize].take().map(|slab| (class, slab.block))
    }

    /// Keeps a block for the next slab of a class; returns the one that was kept before.
    pub(super) fn keep(&mut self, class: Class, block: Block) -> Option<Block> {
        self.kept[class.index()].replace(block)
    }

    /// The block that is kept for a class, no longer kept.
    pub(super) fn take_kept(&mut self, class: Class) -> Option<Block> {
        self.kept[class.index()].take()
    }

    /// All blocks that are kept, no longer kept.
    pub(super) fn trim(&mut self) -> impl Iterator<Item = Block> + use<> {
        std::mem::take(&mut self.kept).into_iter().flatten()
    }

    fn open(&mut self, id: u32) {
        if let Some(slab) = &mut self.slabs[id as usize] {
            let open = &mut self.open[slab.class.index()];
            slab.listed = open.len();
            open.push(id);
        }
    }

    fn close(&mut self, id: u32) {
        let Some(slab) = &self.slabs[id as usize] else { return };
        let (class, at) = (slab.class.index(), slab.listed);
        self.open[class].swap_remove(at);
        if let Some(&moved) = self.open[class].get(at)
            && let Some(slab) = &mut self.slabs[moved as usize]
        {
            slab.listed = at;
        }
    }
}

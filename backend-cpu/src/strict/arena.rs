//! A device's addresses: reserved, never accessible, handed out so that a freed address comes back at once.

use std::{collections::BTreeMap, ptr};

use rustix::{
    io::Errno,
    mm::{MapFlags, ProtFlags, mmap_anonymous, munmap},
};

/// How many freed addresses are tried, latest first, before the lowest hole is taken.
const RECENT: usize = 16;

/// A range of addresses that fault when touched, and what of it is free.
#[derive(Debug)]
pub(super) struct Arena {
    base: usize,
    len: usize,
    /// Free ranges by address; no two touch.
    holes: BTreeMap<usize, usize>,
    /// Addresses freed lately, the latest last.
    recent: Vec<usize>,
}

impl Arena {
    pub(super) fn reserve(len: usize) -> Result<Self, Errno> {
        // SAFETY: the kernel chooses an unused range, so nothing that exists is replaced.
        let base = unsafe {
            mmap_anonymous(ptr::null_mut(), len, ProtFlags::empty(), MapFlags::PRIVATE | MapFlags::NORESERVE)?
        };
        let base = base.expose_provenance();
        Ok(Arena { base, len, holes: BTreeMap::from([(base, len)]), recent: Vec::new() })
    }

    pub(super) fn contains(&self, addr: usize) -> bool {
        (self.base..self.base + self.len).contains(&addr)
    }

    pub(super) fn total(&self) -> usize {
        self.len
    }

    pub(super) fn free(&self) -> usize {
        self.holes.values().sum()
    }

    /// An address with `len` free bytes: the latest freed one that has them, else the lowest.
    pub(super) fn take(&mut self, len: usize, align: usize) -> Option<usize> {
        let lately = self
            .recent
            .iter()
            .rev()
            .copied()
            .find(|&addr| addr.is_multiple_of(align) && self.is_free(addr, len));
        let addr = lately.or_else(|| {
            self.holes.iter().find_map(|(&hole, &size)| {
                let addr = hole.checked_next_multiple_of(align)?;
                (addr.checked_add(len)? <= hole + size).then_some(addr)
            })
        })?;
        self.recent.retain(|&recent| recent != addr);
        let (&hole, &size) = self.holes.range(..=addr).next_back()?;
        self.holes.remove(&hole);
        if hole < addr {
            self.holes.insert(hole, addr - hole);
        }
        if addr + len < hole + size {
            self.holes.insert(addr + len, hole + size - addr - len);
        }
        Some(addr)
    }

    /// Takes back what [`take`](Arena::take) gave.
    pub(super) fn give(&mut self, addr: usize, len: usize) {
        self.recent.push(addr);
        if self.recent.len() > RECENT {
            self.recent.remove(0);
        }
        let (mut start, mut end) = (addr, addr + len);
        if let Some((&hole, &size)) = self.holes.range(..addr).next_back()
            && hole + size == addr
        {
            self.holes.remove(&hole);
            start = hole;
        }
        if let Some(size) = self.holes.remove(&end) {
            end += size;
        }
        self.holes.insert(start, end - start);
    }

    fn is_free(&self, addr: usize, len: usize) -> bool {
        self.holes
            .range(..=addr)
            .next_back()
            .is_some_and(|(&hole, &size)| addr.saturating_add(len) <= hole + size)
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: mapped in `reserve` with this length; nothing dereferences these addresses.
        if let Err(e) = unsafe { munmap(ptr::with_exposed_provenance_mut(self.base), self.len) } {
            tracing::error!(error = %e, "munmap");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_freed_address_comes_back_for_the_same_and_for_a_larger_size() {
        let mut arena = Arena::reserve(1 << 20).unwrap();
        let low = arena.take(4096, 512).unwrap();
        let a = arena.take(4096, 512).unwrap();
        arena.give(a, 4096);
        assert_eq!(arena.take(4096, 512), Some(a));
        arena.give(a, 4096);
        assert_eq!(arena.take(16384, 512), Some(a));
        arena.give(a, 16384);
        arena.give(low, 4096);
        assert_eq!((arena.free(), arena.holes.len()), (1 << 20, 1), "holes that touch are one");
    }

    #[test]
    fn the_latest_freed_address_is_first() {
        let mut arena = Arena::reserve(1 << 20).unwrap();
        let blocks: Vec<usize> = (0..4).map(|_| arena.take(4096, 512).unwrap()).collect();
        arena.give(blocks[0], 4096);
        arena.give(blocks[2], 4096);
        assert_eq!(arena.take(4096, 512), Some(blocks[2]));
        assert_eq!(arena.take(4096, 512), Some(blocks[0]));
    }

    #[test]
    fn a_freed_address_comes_back_only_where_it_is_aligned_enough() {
        let mut arena = Arena::reserve(1 << 20).unwrap();
        let low = arena.take(64, 64).unwrap();
        let next = arena.take(64, 64).unwrap();
        arena.give(next, 64);
        assert_eq!(arena.take(4096, 4096), Some(low + 4096));
        assert_eq!(arena.take(64, 64), Some(next));
    }

    #[test]
    fn what_does_not_fit_is_none() {
        let mut arena = Arena::reserve(8192).unwrap();
        assert_eq!(arena.take(8193, 512), None);
        assert_eq!(arena.take(usize::MAX, 512), None);
        assert!(arena.take(8192, 512).is_some() && arena.take(1, 1).is_none());
    }
}

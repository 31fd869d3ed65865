//! The sizes a store counts in, all derived from the pool size and the page size.

use crate::error::{Error, Result};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// Values up to this size come from slabs.
pub(super) const SLOT_MAX: u64 = 4 * KIB;
/// Bytes that one slab carves into slots.
pub(super) const SLAB: u64 = 64 * KIB;

const FRAME_MIN: u64 = 256 * KIB;
const FRAME_MAX: u64 = 2 * MIB;
/// From this many frames on a value owns its frames alone: at most an eighth is rounding, and all of it can move to
/// another arena when the value is gone. Smaller values are packed densely and share frames.
const ALONE: u64 = 8;
/// Extents start on a cache line.
const UNIT_MIN: u64 = 64;
/// Coarser than this, blocks just above [`SLOT_MAX`] would waste half of what they take.
const UNIT_MAX: u64 = SLOT_MAX;

/// How one store divides its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Geometry {
    /// The budget in bytes, a multiple of `frame`.
    pub(super) pool: u64,
    /// What is populated and punched out as one.
    pub(super) frame: u64,
    /// What the allocator of an arena counts in.
    pub(super) unit: u64,
    /// Virtual bytes of an arena, a multiple of `frame`.
    pub(super) span: u64,
}

/// What a value of some length is stored in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shape {
    /// The empty value takes no memory.
    Empty,
    /// A slot of this class.
    Slot(Class),
    /// A block of its own.
    Block {
        /// Bytes taken from the budget.
        bytes: u64,
        /// Where it may start.
        align: u64,
    },
}

impl Shape {
    /// Bytes that the value takes from the budget.
    pub(super) fn footprint(self) -> u64 {
        match self {
            // Of the budget only, so that what bounds the bytes bounds the number of values too.
            Shape::Empty => UNIT_MIN,
            Shape::Slot(class) => class.slot(),
            Shape::Block { bytes, .. } => bytes,
        }
    }
}

impl Geometry {
    /// The geometry for a pool of at least `pool` bytes on pages of `page` bytes.
    pub(super) fn new(pool: u64, page: u64) -> Result<Self> {
        if pool == 0 {
            return Err(Error::InvalidArgument { what: "the pool needs at least one byte".into() });
        }
        let frame = (pool >> 8).clamp(FRAME_MIN, FRAME_MAX).next_power_of_two().max(page);
        // Room to place any value without moving another. A large pool makes do with less of it, because every
        // client maps every arena and addresses have 47 bits.
        let slack = if pool <= 64 * GIB { 4 } else { 2 };
        let sizes =
            pool.checked_next_multiple_of(frame).and_then(|pool| Some((pool, pool.checked_mul(slack)?)));
        let too_large = || Error::InvalidArgument { what: format!("a pool of {pool} bytes is too large") };
        let (pool, span) = sizes.ok_or_else(too_large)?;
        let unit = span.div_ceil(u64::from(u32::MAX)).next_power_of_two().max(UNIT_MIN);
        if unit > UNIT_MAX {
            return Err(too_large());
        }
        Ok(Self { pool, frame, unit, span })
    }

    /// Bytes of an arena that stands, and is to have room for `len` bytes: what they need, and enough for many small values.
    /// With a step for each eighth of a doubling, so that values of all sizes share a few dozen arenas.
    pub(super) fn standing_span(&self, len: u64) -> u64 {
        let least = (self.pool >> 6).clamp(4 * self.frame, 64 * MIB);
        let need = u64::from(self.units(self.shape(len).footprint().max(SLAB), self.frame)) * self.unit;
        need.max(least).next_multiple_of(self.frame)
    }

    /// Frames of the whole budget.
    pub(super) fn budget(&self) -> u64 {
        self.pool / self.frame
    }

    /// Bytes of the whole frames in `free` bytes, of which `spare` frames hold nothing. A value of so many bytes is
    /// sure to fit: rounding adds nothing to whole frames.
    pub(super) fn whole_frames(&self, free: u64, spare: u64) -> u64 {
        (free / self.frame).min(spare) * self.frame
    }

    /// What a value of `len` bytes is stored in; `len` must not exceed the pool.
    pub(super) fn shape(&self, len: u64) -> Shape {
        match len {
            0 => Shape::Empty,
            1..=SLOT_MAX => Shape::Slot(Class::of(len)),
            _ if len < ALONE * self.frame => Shape::Block { bytes: self.bin(len), align: self.unit },
            _ => Shape::Block { bytes: len.next_multiple_of(self.frame), align: self.frame },
        }
    }

    /// Units to ask of the allocator so that `bytes` fit at a multiple of `align`.
    pub(super) fn units(&self, bytes: u64, align: u64) -> u32 {
        (self.bin(bytes + align - self.unit) / self.unit) as u32
    }

    /// `bytes` rounded up to a size that the allocator keeps a bin for. Only then is a freed extent found again by
    /// the next request of its size, and warm memory is used before fresh memory.
    fn bin(&self, bytes: u64) -> u64 {
        let units = bytes.div_ceil(self.unit) as u32;
        u64::from(offset_allocator::ext::min_allocator_size(units)) * self.unit
    }
}

const STEPS: usize = 8;
const CLASSES: usize = STEPS + 4 * 3;

/// Slot sizes: steps of 64 bytes up to 512, then four for every doubling up to [`SLOT_MAX`].
const SLOTS: [u16; CLASSES] = {
    let mut slots = [0; CLASSES];
    let mut i = 0;
    while i < STEPS {
        slots[i] = 64 * (i as u16 + 1);
        i += 1;
    }
    while i < CLASSES {
        let base: u16 = 512 << ((i - STEPS) / 4);
        slots[i] = base + base / 4 * ((i - STEPS) as u16 % 4 + 1);
        i += 1;
    }
    slots
};

/// The class of each number of cache lines.
const CLASS_OF: [u8; (SLOT_MAX / UNIT_MIN) as usize + 1] = {
    let mut of = [0; (SLOT_MAX / UNIT_MIN) as usize + 1];
    let (mut lines, mut class) = (0, 0);
    while lines < of.len() {
        if (SLOTS[class] as usize) < lines * UNIT_MIN as usize {
            class += 1;
        }
        of[lines] = class as u8;
        lines += 1;
    }
    of
};

/// A slot size, by its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Class(u8);

impl Class {
    /// How many there are.
    pub(super) const COUNT: usize = CLASSES;

    /// The smallest class that holds `len` bytes, 1 to [`SLOT_MAX`].
    fn of(len: u64) -> Self {
        Class(CLASS_OF[len.div_ceil(UNIT_MIN) as usize])
    }

    /// Bytes of a slot.
    pub(super) fn slot(self) -> u64 {
        u64::from(SLOTS[usize::from(self.0)])
    }

    /// Slots in a slab.
    pub(super) fn slots(self) -> usize {
        (SLAB / self.slot()) as usize
    }

    /// The class as an index below [`Class::COUNT`].
    pub(super) fn index(self) -> usize {
        usize::from(self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_class_holds_what_it_is_chosen_for() {
        for len in 1..=SLOT_MAX {
            let class = Class::of(len);
            assert!(class.slot() >= len && class.slot() - len < (len / 4).max(64) + 64, "{len}");
        }
        assert_eq!(SLOTS[CLASSES - 1] as u64, SLOT_MAX);
    }

    #[test]
    fn whatever_is_no_longer_than_the_pool_takes_no_more_than_the_pool() {
        for frames in 1..40 {
            let geometry = Geometry::new(frames * FRAME_MIN, 4096).unwrap();
            for short in [0, 1, 63, 64, 4096, FRAME_MIN - 4097] {
                let shape = geometry.shape(geometry.pool - short);
                assert!(shape.footprint() <= geometry.pool, "{frames} frames less {short}");
                let Shape::Block { bytes, align } = shape else { panic!("not a block") };
                assert!(u64::from(geometry.units(bytes, align)) * geometry.unit <= geometry.span);
            }
        }
    }

    #[test]
    fn large_pools_count_in_larger_units_and_huge_ones_are_refused() {
        assert_eq!(Geometry::new(16 * GIB, 4096).unwrap().unit, 64);
        let large = Geometry::new(1024 * GIB, 4096).unwrap();
        assert!(large.unit > 64 && large.span / large.unit <= u64::from(u32::MAX));
        assert!(large.units(large.pool, large.frame) > 0);
        assert!(matches!(Geometry::new(u64::MAX, 4096), Err(Error::InvalidArgument { .. })));
        assert!(matches!(Geometry::new(0, 4096), Err(Error::InvalidArgument { .. })));
    }
}

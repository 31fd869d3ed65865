//! Moving strided bytes: the one copy between a strided tensor in host memory and a contiguous one.

use hal::Device;

use crate::{
    arrow::Slot,
    error::{Error, Result},
};

/// How a strided block of elements lies in its storage, in bytes. Dimensions that lie next to each other are merged, so that the
/// innermost run is as long as it can be.
#[derive(Debug, Clone)]
pub(crate) struct Layout {
    /// Bytes of the storage that the strides were checked against.
    storage: usize,
    /// From the storage's first byte to the first element.
    offset: usize,
    /// Elements and stride in bytes, outermost first; the innermost run is not among them.
    dims: Vec<(usize, isize)>,
    /// Bytes that lie next to each other.
    run: usize,
}

impl Layout {
    /// A block of `shape` elements of `size` bytes whose neighbours along each dimension are `strides` elements apart,
    /// starting `offset` elements into a storage of `storage` bytes.
    ///
    /// *Errors*: [`Error::InvalidTensor`] where an element lies outside of the storage.
    pub(crate) fn new(
        size: usize,
        shape: &[u64],
        strides: &[i64],
        offset: u64,
        storage: usize,
    ) -> Result<Layout> {
        let invalid = |reason: &str| Error::InvalidTensor { reason: reason.into() };
        if shape.len() != strides.len() {
            return Err(invalid("shape and strides have different lengths"));
        }
        if shape.contains(&0) {
            return Ok(Layout { storage, offset: 0, dims: Vec::new(), run: 0 });
        }
        // The lowest and the highest element that the strides reach, in i128 so that nothing overflows.
        let (mut low, mut high) = (i128::from(offset), i128::from(offset));
        for (&n, &stride) in shape.iter().zip(strides) {
            let reach = i128::from(n - 1) * i128::from(stride);
            *if reach < 0 { &mut low } else { &mut high } += reach;
        }
        // The first comparison keeps the second from overflowing.
        if low < 0 || high >= storage as i128 || (high + 1) * size as i128 > storage as i128 {
            return Err(invalid("the strides reach outside of the storage"));
        }
        let mut run = size;
        let mut dims: Vec<(usize, isize)> = Vec::new();
        for (&n, &stride) in shape.iter().zip(strides).rev().filter(|(n, _)| **n > 1) {
            // In range: with more than one element, the stride itself lies within the storage.
            let (n, stride) = (n as usize, stride as isize * size as isize);
            match dims.last_mut() {
                None if stride == run as isize => run *= n,
                Some((inner, inner_stride)) if stride == *inner_stride * *inner as isize => *inner *= n,
                _ => dims.push((n, stride)),
            }
        }
        dims.reverse();
        Ok(Layout { storage, offset: offset as usize * size, dims, run })
    }

    /// Address and bytes of the block in a storage at `storage`, if it is one run.
    pub(crate) fn contiguous(&self, storage: usize) -> Option<(usize, usize)> {
        self.dims.is_empty().then_some((storage + self.offset, self.run))
    }

    /// Bytes of the block.
    pub(crate) fn bytes(&self) -> usize {
        self.dims.iter().map(|&(n, _)| n).product::<usize>() * self.run
    }

    /// Offset in the storage and bytes of each run, in the order of the contiguous form.
    fn runs(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        let runs = self.bytes().checked_div(self.run).unwrap_or(0);
        let mut index = vec![0usize; self.dims.len()];
        let mut at = self.offset as isize;
        (0..runs).map(move |_| {
            let here = at as usize;
            for (position, &(n, stride)) in index.iter_mut().zip(&self.dims).rev() {
                *position += 1;
                at += stride;
                if *position < n {
                    break;
                }
                at -= stride * n as isize;
                *position = 0;
            }
            (here, self.run)
        })
    }

    /// Copies this block of `from` into the block `target` of `to`, element by element in order.
    pub(crate) fn copy_to(&self, from: &[u8], target: &Layout, to: &mut [u8]) {
        let (mut sources, mut targets) = (self.runs(), target.runs());
        let (mut source, mut place) = ((0, 0), (0, 0));
        loop {
            if source.1 == 0 {
                let Some(next) = sources.next() else { return };
                source = next;
            }
            if place.1 == 0 {
                let Some(next) = targets.next() else { return };
                place = next;
            }
            let n = source.1.min(place.1);
            to[place.0..][..n].copy_from_slice(&from[source.0..][..n]);
            source = (source.0 + n, source.1 - n);
            place = (place.0 + n, place.1 - n);
        }
    }

    /// Copies the block out of a ready slot of host memory into contiguous bytes.
    pub(crate) fn gather<D: Device>(&self, storage: &Slot<D>, to: &mut [u8]) {
        assert_eq!(storage.region().len, self.storage);
        // SAFETY: a slot's memory is readable for its length, as the makers of its `Payload` promised; nobody writes it,
        // since the slot is ready; and the layout was checked against that length.
        unsafe { self.gather_raw(storage.region().addr as *const u8, to) }
    }

    /// Copies contiguous bytes into the block in a ready slot of host memory.
    pub(crate) fn scatter<D: Device>(&self, from: &[u8], storage: &Slot<D>) {
        assert_eq!(storage.region().len, self.storage);
        // SAFETY: as in `gather`, with the promise of `Target`: the memory is writable by this call alone.
        unsafe { self.scatter_raw(from, storage.region().addr as *mut u8) }
    }

    /// # Safety
    /// `storage` must be readable for the bytes that the layout was checked against.
    unsafe fn gather_raw(&self, storage: *const u8, to: &mut [u8]) {
        assert_eq!(to.len(), self.bytes());
        let mut to = to.as_mut_ptr();
        for (at, len) in self.runs() {
            // SAFETY: `new` checked that every run lies in the storage, and the assertion that all of them fill `to`.
            unsafe {
                copy(storage.add(at), to, len);
                to = to.add(len);
            }
        }
    }

    /// # Safety
    /// `storage` must be writable, by this call alone, for the bytes that the layout was checked against.
    unsafe fn scatter_raw(&self, from: &[u8], storage: *mut u8) {
        assert_eq!(from.len(), self.bytes());
        let mut from = from.as_ptr();
        for (at, len) in self.runs() {
            // SAFETY: as in `gather_raw`.
            unsafe {
                copy(from, storage.add(at), len);
                from = from.add(len);
            }
        }
    }
}

/// # Safety
/// As `ptr::copy_nonoverlapping`. Short runs of a constant length are what a transpose is made of.
#[inline]
unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the caller's promise, for each arm.
    unsafe {
        match len {
            1 => to.write(from.read()),
            2 => to.cast::<[u8; 2]>().write_unaligned(from.cast::<[u8; 2]>().read_unaligned()),
            4 => to.cast::<[u8; 4]>().write_unaligned(from.cast::<[u8; 4]>().read_unaligned()),
            8 => to.cast::<[u8; 8]>().write_unaligned(from.cast::<[u8; 8]>().read_unaligned()),
            _ => from.copy_to_nonoverlapping(to, len),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gathered(size: usize, shape: &[u64], strides: &[i64], offset: u64, storage: &[u8]) -> Vec<u8> {
        let layout = Layout::new(size, shape, strides, offset, storage.len()).unwrap();
        let mut to = vec![0xEE; layout.bytes()];
        // SAFETY: the layout was checked against this storage.
        unsafe { layout.gather_raw(storage.as_ptr(), &mut to) };
        to
    }

    #[test]
    fn transpose_slices_expansion_and_negative_strides_give_logical_values() {
        let m: Vec<u8> = (0..6).collect(); // 2 x 3
        assert_eq!(gathered(1, &[3, 2], &[1, 3], 0, &m), [0, 3, 1, 4, 2, 5]);
        assert_eq!(gathered(1, &[1, 3], &[6, 1], 3, &m), [3, 4, 5]);
        assert_eq!(gathered(1, &[3], &[2], 0, &m), [0, 2, 4]);
        assert_eq!(gathered(1, &[2, 3], &[0, 1], 3, &m), [3, 4, 5, 3, 4, 5]);
        assert_eq!(gathered(1, &[6], &[-1], 5, &m), [5, 4, 3, 2, 1, 0]);
        assert_eq!(gathered(2, &[2], &[-2], 2, &m), [4, 5, 0, 1]);
        assert_eq!(gathered(1, &[], &[], 4, &m), [4]);
        assert_eq!(gathered(1, &[0, 7], &[7, 1], 0, &m), [0u8; 0]);
    }

    #[test]
    fn neighbouring_dimensions_are_one_run() {
        assert!(Layout::new(4, &[2, 3, 5], &[15, 5, 1], 0, 120).unwrap().contiguous(0).is_some());
        assert!(Layout::new(4, &[1], &[i64::MAX], 0, 4).unwrap().contiguous(0).is_some());
        assert!(Layout::new(4, &[1, 3], &[999, 1], 1, 16).unwrap().contiguous(0) == Some((4, 12)));
        assert_eq!(Layout::new(4, &[4, 3, 5], &[30, 5, 1], 0, 480).unwrap().dims, [(4, 120)]);
    }

    #[test]
    fn strides_that_leave_the_storage_are_refused() {
        for (shape, strides, offset) in [
            (&[2u64, 3][..], &[3i64, 1][..], 1u64),
            (&[2], &[-1], 0),
            (&[u64::MAX], &[i64::MAX], 0),
            (&[1], &[1], u64::MAX),
            (&[2], &[1, 1], 0),
        ] {
            assert!(Layout::new(1, shape, strides, offset, 6).is_err());
        }
    }

    proptest::proptest! {
        #[test]
        fn scatter_undoes_gather(rows in 1u64..9, columns in 1u64..9, size in 1usize..9) {
            let storage: Vec<u8> = (0..rows as usize * columns as usize * size).map(|i| i as u8).collect();
            let layout =
                Layout::new(size, &[columns, rows], &[1, columns as i64], 0, storage.len()).unwrap();
            let (mut flat, mut back) = (vec![0; layout.bytes()], vec![0; storage.len()]);
            // SAFETY: the layout was checked against this length, which both have.
            unsafe {
                layout.gather_raw(storage.as_ptr(), &mut flat);
                layout.scatter_raw(&flat, back.as_mut_ptr());
            }
            proptest::prop_assert_eq!(storage, back);
        }
    }
}

//! The bookkeeping behind [`Device::register`](crate::Device::register), the same for every backend.
//!
//! A driver refuses to register a region twice, does not notice that registered memory was freed, and may limit the
//! size of one registration. [`Registry`] counts, replaces what has gone stale, splits and rolls back, so that a backend
//! only has to make the two driver calls of [`Pin`].

use std::collections::BTreeMap;

use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::{BufferId, Error, Kind, Result};

/// The two driver calls behind a registration. Both run on the thread that registers or unregisters, with no lock held.
pub trait Pin {
    /// Makes the `len` bytes at `addr` usable for DMA.
    fn pin(&self, addr: usize, len: usize) -> Result<()>;

    /// Takes back one earlier [`pin`](Pin::pin) of exactly these bytes.
    fn unpin(&self, addr: usize, len: usize) -> Result<()>;
}

/// Which regions are registered. Lookups take O(log n).
///
/// A driver call that hangs holds up only those who ask for the same bytes: the lock is not held during driver calls.
#[derive(Debug)]
pub struct Registry {
    backend: &'static str,
    max_part: usize,
    state: Mutex<State>,
    /// Somebody has finished a driver call.
    settled: Condvar,
}

/// One registration, to be handed back to [`Registry::unregister`] exactly once.
#[derive(Debug)]
#[must_use = "a registration that is not handed back stays for ever"]
pub struct Registered {
    addr: usize,
    /// Tells it from a later registration of the same address.
    serial: u64,
}

#[derive(Debug, Default)]
struct State {
    /// By address; no two share a byte.
    entries: BTreeMap<usize, Entry>,
    serial: u64,
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    len: usize,
    buffer: Option<BufferId>,
    serial: u64,
    /// How often it is registered; 0 while a driver call on these bytes is under way.
    count: usize,
}

/// How a region stands to what is registered.
enum Standing {
    Free,
    Same(u64),
    /// A driver call on some of these bytes is under way.
    Busy,
    /// Registered for memory that has been freed since.
    Stale(usize, Entry),
    Overlap(usize, Entry),
}

impl State {
    fn standing(&self, addr: usize, len: usize, buffer: Option<BufferId>) -> Standing {
        // Entries are disjoint, so of those that begin before the region's end the last one reaches farthest.
        let Some((&at, &entry)) = self.entries.range(..addr + len).next_back() else { return Standing::Free };
        if at + entry.len <= addr {
            Standing::Free
        } else if entry.count == 0 {
            Standing::Busy
        } else if entry.buffer != buffer {
            // Two live allocations never share a byte: the older one is gone.
            Standing::Stale(at, entry)
        } else if (at, entry.len) == (addr, len) {
            Standing::Same(entry.serial)
        } else {
            Standing::Overlap(at, entry)
        }
    }
}

impl Registry {
    /// An empty registry for `backend`, whose driver registers at most `max_part` bytes at a time (`usize::MAX`: any).
    ///
    /// `max_part` must be a multiple of the driver's alignment, so that each part starts aligned.
    pub fn new(backend: &'static str, max_part: usize) -> Self {
        Registry { backend, max_part: max_part.max(1), state: Mutex::default(), settled: Condvar::new() }
    }

    /// Registers the `len` bytes at `addr`, which lie in allocation `buffer` (`None` for memory that the driver did not
    /// allocate).
    ///
    /// *Guarantees*: the same bytes of the same allocation again only count. What is registered under another buffer
    /// id is stale: it is taken back, quietly, and the new bytes are registered afresh. When a part fails, the parts
    /// before it are taken back, and nothing is registered.
    /// *Caller must*: pass the id that the allocation had before it was registered; a driver that gives registered host
    /// memory an id of its own would make every second registration look new.
    /// *Errors*: [`Kind::Overlap`] for bytes that overlap a live registration without being equal to it,
    /// [`Kind::InvalidArgument`] for no bytes, [`Kind::InvalidRange`] past the address space, else what
    /// [`Pin::pin`] said. Where taking back failed too, the error says so beside the cause.
    pub fn register(
        &self,
        pin: &impl Pin,
        addr: usize,
        len: usize,
        buffer: Option<BufferId>,
    ) -> Result<Registered> {
        if len == 0 {
            return Err(self.error(Kind::InvalidArgument).detail("a region of 0 bytes"));
        }
        if addr.checked_add(len).is_none() {
            return Err(self.error(Kind::InvalidRange).detail(format!("{len} bytes at {addr:#x}")));
        }
        let mut state = self.state.lock();
        let claim = loop {
            match state.standing(addr, len, buffer) {
                Standing::Free => {
                    state.serial += 1;
                    let entry = Entry { len, buffer, serial: state.serial, count: 0 };
                    break self.claim(state, addr, entry);
                }
                Standing::Same(serial) => {
                    if let Some(entry) = state.entries.get_mut(&addr) {
                        entry.count += 1;
                    }
                    return Ok(Registered { addr, serial });
                }
                Standing::Busy => self.settled.wait(&mut state),
                Standing::Stale(at, entry) => {
                    let claim = self.claim(state, at, entry);
                    if let Err(e) = self.unpin_parts(pin, at, entry.len) {
                        tracing::debug!(error = %e, addr = at, len = entry.len, "stale registration");
                    }
                    drop(claim);
                    state = self.state.lock();
                }
                Standing::Overlap(at, entry) => {
                    return Err(self.error(Kind::Overlap).detail(format!(
                        "{len} bytes at {addr:#x} overlap the registered {} bytes at {at:#x}",
                        entry.len
                    )));
                }
            }
        };
        self.pin_parts(pin, addr, len)?;
        Ok(claim.keep())
    }

    /// Hands one registration back; the last one of its bytes is deregistered.
    ///
    /// A registration that was stale and has been replaced is taken back already, which is no error.
    ///
    /// *Errors*: what [`Pin::unpin`] said first; the other parts are taken back nevertheless, and the bytes count as
    /// unregistered.
    pub fn unregister(&self, pin: &impl Pin, registered: Registered) -> Result<()> {
        let Registered { addr, serial } = registered;
        let mut state = self.state.lock();
        match state.entries.get_mut(&addr) {
            Some(entry) if entry.serial == serial && entry.count > 1 => {
                entry.count -= 1;
                Ok(())
            }
            Some(entry) if entry.serial == serial && entry.count == 1 => {
                let entry = *entry;
                let _claim = self.claim(state, addr, entry);
                self.unpin_parts(pin, addr, entry.len)
            }
            _ => Ok(()),
        }
    }

    /// How many distinct regions are registered.
    pub fn len(&self) -> usize {
        self.state.lock().entries.len()
    }

    /// Whether nothing is registered.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Keeps others off these bytes during driver calls.
    fn claim(&self, mut state: MutexGuard<'_, State>, addr: usize, entry: Entry) -> Claim<'_> {
        let serial = entry.serial;
        state.entries.insert(addr, Entry { count: 0, ..entry });
        Claim { registry: self, addr, serial, keep: false }
    }

    fn parts(&self, addr: usize, len: usize) -> impl DoubleEndedIterator<Item = (usize, usize)> {
        let max = self.max_part;
        (0..len.div_ceil(max)).map(move |i| (addr + i * max, max.min(len - i * max)))
    }

    fn pin_parts(&self, pin: &impl Pin, addr: usize, len: usize) -> Result<()> {
        for (failed, part) in self.parts(addr, len) {
            let Err(cause) = pin.pin(failed, part) else { continue };
            let left: Vec<String> = self
                .parts(addr, failed - addr)
                .rev()
                .filter_map(|(at, part)| {
                    let e = pin.unpin(at, part).err()?;
                    Some(format!("{part} bytes at {at:#x} ({e})"))
                })
                .collect();
            if left.is_empty() {
                return Err(cause);
            }
            return Err(self.rollback_failed(cause, &left));
        }
        Ok(())
    }

    fn unpin_parts(&self, pin: &impl Pin, addr: usize, len: usize) -> Result<()> {
        let unpinned = self.parts(addr, len).rev().map(|(at, part)| pin.unpin(at, part));
        // All of them, whatever becomes of the first.
        unpinned.fold(Ok(()), Result::and)
    }

    fn rollback_failed(&self, cause: Error, left: &[String]) -> Error {
        let mut e = self.error(cause.kind()).detail(format!(
            "{cause}; rolling back failed too, still registered with the driver: {}",
            left.join(", ")
        ));
        if let Some(device) = cause.device() {
            e = e.on(device);
        }
        if let Some(code) = cause.vendor_code() {
            e = e.vendor(code, cause.vendor_text());
        }
        e.with_source(cause)
    }

    fn error(&self, kind: Kind) -> Error {
        Error::new(kind, self.backend, "register")
    }
}

/// Bytes on which a driver call is under way. Gone from the registry on drop, also when the call panics, unless kept.
struct Claim<'r> {
    registry: &'r Registry,
    addr: usize,
    serial: u64,
    keep: bool,
}

impl Claim<'_> {
    fn keep(mut self) -> Registered {
        self.keep = true;
        Registered { addr: self.addr, serial: self.serial }
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        let mut state = self.registry.state.lock();
        if self.keep {
            if let Some(entry) = state.entries.get_mut(&self.addr) {
                entry.count = 1;
            }
        } else {
            state.entries.remove(&self.addr);
        }
        self.registry.settled.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::{
        collections::BTreeSet,
        sync::{Barrier, atomic::AtomicUsize, atomic::Ordering},
        thread,
        time::{Duration, Instant},
    };

    use super::*;

    /// A driver that knows nothing of freed memory, refuses what it has already, and fails when told.
    #[derive(Default)]
    struct Driver {
        pinned: Mutex<BTreeSet<(usize, usize)>>,
        calls: AtomicUsize,
        fail_pin: Option<usize>,
        fail_unpin: Option<usize>,
    }

    impl Driver {
        fn pinned(&self) -> Vec<(usize, usize)> {
            self.pinned.lock().iter().copied().collect()
        }
    }

    fn refuse(code: i64) -> Result<()> {
        Err(Error::new(Kind::Driver, "test", "pin").on("3").vendor(code, None))
    }

    impl Pin for Driver {
        fn pin(&self, addr: usize, len: usize) -> Result<()> {
            self.calls.fetch_add(1, Ordering::Relaxed);
            if self.fail_pin == Some(addr) {
                return refuse(1);
            }
            let fresh = self.pinned.lock().insert((addr, len));
            if fresh { Ok(()) } else { refuse(712) }
        }

        fn unpin(&self, addr: usize, len: usize) -> Result<()> {
            if self.fail_unpin == Some(addr) {
                return refuse(2);
            }
            let known = self.pinned.lock().remove(&(addr, len));
            if known { Ok(()) } else { refuse(713) }
        }
    }

    const A: Option<BufferId> = Some(BufferId(1));
    const B: Option<BufferId> = Some(BufferId(2));

    fn registry() -> Registry {
        Registry::new("test", usize::MAX)
    }

    #[test]
    fn the_same_region_again_only_counts() {
        let (r, d) = (registry(), Driver::default());
        let first = r.register(&d, 0x1000, 64, A).unwrap();
        let second = r.register(&d, 0x1000, 64, A).unwrap();
        assert_eq!((d.calls.load(Ordering::Relaxed), r.len()), (1, 1));
        r.unregister(&d, first).unwrap();
        assert_eq!(d.pinned(), [(0x1000, 64)]);
        r.unregister(&d, second).unwrap();
        assert!(d.pinned().is_empty() && r.is_empty());
    }

    #[test]
    fn a_partial_overlap_is_refused_and_neighbours_are_not() {
        let (r, d) = (registry(), Driver::default());
        let _kept = r.register(&d, 0x1000, 0x100, None).unwrap();
        for (addr, len) in [(0x1000, 0x80), (0x1000, 0x200), (0xf80, 0x100), (0x10ff, 1), (0xf00, 0x400)] {
            assert_eq!(r.register(&d, addr, len, None).unwrap_err().kind(), Kind::Overlap, "{addr:#x}+{len}");
        }
        let _before = r.register(&d, 0xf00, 0x100, None).unwrap();
        let _after = r.register(&d, 0x1100, 0x100, None).unwrap();
        assert_eq!(r.len(), 3);
    }

    #[test]
    fn a_reused_address_is_registered_afresh_and_its_old_guard_does_no_harm() {
        let (r, d) = (registry(), Driver::default());
        let old = r.register(&d, 0x1000, 16, A).unwrap();
        let new = r.register(&d, 0x1000, 64, B).unwrap();
        assert_eq!(d.pinned(), [(0x1000, 64)]);
        r.unregister(&d, old).unwrap();
        assert_eq!(d.pinned(), [(0x1000, 64)], "the old guard took back the new registration");
        let same_size = r.register(&d, 0x1000, 64, Some(BufferId(3))).unwrap();
        assert_eq!(d.calls.load(Ordering::Relaxed), 3);
        r.unregister(&d, new).unwrap();
        r.unregister(&d, same_size).unwrap();
        assert!(d.pinned().is_empty() && r.is_empty());
    }

    #[test]
    fn one_allocation_replaces_every_stale_entry_under_it() {
        let (r, d) = (registry(), Driver::default());
        let _stale = [0x1000, 0x1100, 0x1200].map(|addr| r.register(&d, addr, 0x100, A).unwrap());
        let _new = r.register(&d, 0x1080, 0x200, B).unwrap();
        assert_eq!(d.pinned(), [(0x1080, 0x200)]);
        assert_eq!(r.len(), 1);
    }

    #[test]
    fn a_stale_entry_that_the_driver_has_forgotten_is_replaced_all_the_same() {
        let (r, d) = (registry(), Driver::default());
        let _stale = r.register(&d, 0x1000, 16, A).unwrap();
        d.pinned.lock().clear();
        let _new = r.register(&d, 0x1000, 16, B).unwrap();
        assert_eq!(d.pinned(), [(0x1000, 16)]);
    }

    #[test]
    fn a_large_region_is_split() {
        let (r, d) = (Registry::new("test", 4), Driver::default());
        let all = r.register(&d, 100, 10, None).unwrap();
        assert_eq!(d.pinned(), [(100, 4), (104, 4), (108, 2)]);
        r.unregister(&d, all).unwrap();
        assert!(d.pinned().is_empty());
    }

    #[test]
    fn a_failing_part_rolls_the_earlier_ones_back() {
        let (r, d) = (Registry::new("test", 4), Driver { fail_pin: Some(108), ..Driver::default() });
        let e = r.register(&d, 100, 12, None).unwrap_err();
        assert_eq!((e.kind(), e.vendor_code()), (Kind::Driver, Some(1)));
        assert!(d.pinned().is_empty() && r.is_empty());
    }

    #[test]
    fn a_failing_rollback_is_reported_beside_the_cause() {
        let (r, d) = (
            Registry::new("test", 4),
            Driver { fail_pin: Some(108), fail_unpin: Some(100), ..Driver::default() },
        );
        let e = r.register(&d, 100, 12, None).unwrap_err();
        assert_eq!((e.kind(), e.vendor_code(), e.device()), (Kind::Driver, Some(1), Some("3")));
        let text = e.to_string();
        assert!(text.contains("4 bytes at 0x64") && text.contains("vendor code 2"), "{text}");
        assert!(!text.contains("0x68"), "104 was rolled back: {text}");
        assert!(r.is_empty());
    }

    #[test]
    fn a_part_that_cannot_be_taken_back_does_not_keep_the_others() {
        let (r, d) = (Registry::new("test", 4), Driver { fail_unpin: Some(104), ..Driver::default() });
        let all = r.register(&d, 100, 12, None).unwrap();
        assert_eq!(r.unregister(&d, all).unwrap_err().vendor_code(), Some(2));
        assert_eq!(d.pinned(), [(104, 4)]);
        assert!(r.is_empty());
    }

    #[test]
    fn nonsense_is_refused() {
        let (r, d) = (registry(), Driver::default());
        assert_eq!(r.register(&d, 0x1000, 0, None).unwrap_err().kind(), Kind::InvalidArgument);
        assert_eq!(r.register(&d, usize::MAX, 2, None).unwrap_err().kind(), Kind::InvalidRange);
    }

    #[test]
    fn threads_that_register_the_same_region_make_one_driver_call() {
        struct Slow<'a>(&'a Driver);
        impl Pin for Slow<'_> {
            fn pin(&self, addr: usize, len: usize) -> Result<()> {
                thread::sleep(Duration::from_millis(20));
                self.0.pin(addr, len)
            }
            fn unpin(&self, addr: usize, len: usize) -> Result<()> {
                self.0.unpin(addr, len)
            }
        }
        let (r, d, all) = (registry(), Driver::default(), Barrier::new(8));
        thread::scope(|s| {
            for _ in 0..8 {
                s.spawn(|| {
                    let registered = r.register(&Slow(&d), 0x1000, 64, A).unwrap();
                    all.wait();
                    r.unregister(&Slow(&d), registered).unwrap();
                });
            }
        });
        assert_eq!(d.calls.load(Ordering::Relaxed), 1);
        assert!(d.pinned().is_empty() && r.is_empty());
    }

    #[test]
    fn a_driver_call_that_panics_leaves_nothing_behind() {
        struct Panics;
        impl Pin for Panics {
            fn pin(&self, _: usize, _: usize) -> Result<()> {
                panic!("as told")
            }
            fn unpin(&self, _: usize, _: usize) -> Result<()> {
                Ok(())
            }
        }
        let (r, d) = (registry(), Driver::default());
        let outcome = thread::scope(|s| s.spawn(|| r.register(&Panics, 0x1000, 64, A).map(drop)).join());
        assert!(outcome.is_err());
        let _registered = r.register(&d, 0x1000, 64, A).unwrap();
    }

    #[test]
    fn ten_thousand_views_do_not_slow_down_over_the_rounds() {
        let (r, d) = (registry(), Driver::default());
        let round = || {
            let start = Instant::now();
            let views: Vec<_> = (0..10_000).map(|i| r.register(&d, i * 64, 64, A).unwrap()).collect();
            for view in views {
                r.unregister(&d, view).unwrap();
            }
            start.elapsed()
        };
        let first = round();
        let last = (0..20).map(|_| round()).min().unwrap();
        // Far from the quadratic time that a linear lookup would take; loose, since the machine is shared.
        assert!(last < first * 3 + Duration::from_millis(50), "first {first:?}, later at best {last:?}");
    }
}

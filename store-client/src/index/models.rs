//! The protocol under loom, which runs the code of this module in every order that the memory model allows.
//!
//! The memory that a value lies in is a cell that loom watches: who writes it while another one reads it, fails the model.
//! The same models are run with a part left out, to show that they see what that part is for.

use std::sync::atomic::{AtomicU64 as Plain, Ordering as PlainOrdering};

use loom::{
    cell::UnsafeCell,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering, fence},
    },
    thread,
};

use super::{
    hold,
    holds::{self, Holds},
    table::{BUCKET, Entry, Table},
    words::Words,
};

/// Words of a model. Those that the argument is about are loom's; the others, such as the words of a key, cannot be the first
/// to show anything and would only multiply the orders.
pub(crate) struct Model<const FENCES: bool> {
    watched: Vec<(usize, AtomicU64)>,
    plain: Vec<Plain>,
}

impl<const FENCES: bool> Model<FENCES> {
    pub(crate) fn new(count: usize, watched: &[usize]) -> Self {
        Model {
            watched: watched.iter().map(|&at| (at, AtomicU64::new(0))).collect(),
            plain: (0..count).map(|_| Plain::new(0)).collect(),
        }
    }

    fn watched(&self, at: usize) -> Option<&AtomicU64> {
        self.watched.iter().find(|(word, _)| *word == at).map(|(_, word)| word)
    }

    fn load_as(&self, at: usize, order: Ordering) -> u64 {
        self.watched(at).map_or_else(|| self.plain[at].load(PlainOrdering::SeqCst), |word| word.load(order))
    }

    fn store_as(&self, at: usize, value: u64, order: Ordering) {
        match self.watched(at) {
            Some(word) => word.store(value, order),
            None => self.plain[at].store(value, PlainOrdering::SeqCst),
        }
    }
}

impl<const FENCES: bool> Words for Model<FENCES> {
    fn load(&self, at: usize) -> u64 {
        self.load_as(at, Ordering::Relaxed)
    }

    fn load_acquire(&self, at: usize) -> u64 {
        self.load_as(at, Ordering::Acquire)
    }

    fn store(&self, at: usize, value: u64) {
        self.store_as(at, value, Ordering::Relaxed);
    }

    fn store_release(&self, at: usize, value: u64) {
        self.store_as(at, value, Ordering::Release);
    }

    fn replace(&self, at: usize, old: u64, new: u64) -> Result<(), u64> {
        match self.watched(at) {
            Some(word) => word.compare_exchange(old, new, Ordering::AcqRel, Ordering::Relaxed).map(drop),
            None => self.plain[at]
                .compare_exchange(old, new, PlainOrdering::SeqCst, PlainOrdering::SeqCst)
                .map(drop),
        }
    }

    fn clear_bits(&self, at: usize, bits: u64) {
        match self.watched(at) {
            Some(word) => drop(word.fetch_and(!bits, Ordering::Release)),
            None => drop(self.plain[at].fetch_and(!bits, PlainOrdering::SeqCst)),
        }
    }

    fn fence_release() {
        fence(Ordering::Release);
    }

    fn fence_seq_cst() {
        if FENCES {
            fence(Ordering::SeqCst);
        }
    }

    fn pause() {
        thread::yield_now();
    }
}

/// Two ends of one memory.
impl<W: Words> Words for std::sync::Arc<W> {
    fn load(&self, at: usize) -> u64 {
        (**self).load(at)
    }

    fn load_acquire(&self, at: usize) -> u64 {
        (**self).load_acquire(at)
    }

    fn store(&self, at: usize, value: u64) {
        (**self).store(at, value);
    }

    fn store_release(&self, at: usize, value: u64) {
        (**self).store_release(at, value);
    }

    fn replace(&self, at: usize, old: u64, new: u64) -> Result<(), u64> {
        (**self).replace(at, old, new)
    }

    fn clear_bits(&self, at: usize, bits: u64) {
        (**self).clear_bits(at, bits);
    }

    fn fence_release() {
        W::fence_release();
    }

    fn fence_seq_cst() {
        W::fence_seq_cst();
    }

    fn pause() {
        W::pause();
    }
}

/// A bucket, the holds of one client, and the memory of values: a number for each offset.
struct World<const FENCES: bool> {
    table: Table<Model<FENCES>>,
    holds: Holds<Model<FENCES>>,
    memory: [UnsafeCell<u64>; 2],
}

/// The words of the table that are watched: the sequence, and of the first two ways the id and the offset.
const WATCHED: [usize; 5] = [0, 8, 8 + 3, 8 + 30, 8 + 30 + 3];

const SPACE: u64 = 7;

impl<const FENCES: bool> World<FENCES> {
    fn new(watched: &[usize]) -> Arc<Self> {
        Arc::new(World {
            table: Table::with_buckets(Model::new(BUCKET, watched), 1),
            // The two words before them, and as many hold words as are taken at a time.
            holds: Holds::new(Model::new(holds::words(1), &[0, 1, 2, 3]), 1),
            memory: [UnsafeCell::new(0), UnsafeCell::new(0)],
        })
    }

    /// Puts a value, which is its own id, at an offset.
    fn publish(&self, key: &str, id: u64, offset: usize) -> Option<u32> {
        self.memory[offset].with_mut(|at| {
            // SAFETY: loom checks that nobody else uses it meanwhile.
            unsafe { *at = id }
        });
        let (key, meta, offset) = (key.as_bytes(), &[][..], offset as u64);
        self.table.publish(0, &Entry { id, space: SPACE, key, meta, arena: 0, offset, len: 8 })
    }

    /// Reads a key, which has one of these values, as a client does.
    fn read(&self, key: &str, values: &[u64]) {
        let found = hold(&self.table, &self.holds, 0, SPACE, key.as_bytes(), || true);
        if let Some((seen, word)) = found {
            assert!(values.contains(&seen.id), "{} is not a value of {key}", seen.id);
            self.memory[seen.offset as usize].with(|at| {
                // SAFETY: as above.
                assert_eq!(unsafe { *at }, seen.id, "other bytes");
            });
            self.holds.clear(word);
        }
    }

    /// Whether the memory of a withdrawn value can be used anew: steps c and d.
    fn is_free(&self, id: u64) -> bool {
        <Model<FENCES> as Words>::fence_seq_cst();
        !self.holds.contain(id)
    }
}

/// Runs a model in every order with at most so many switches away from a thread that could go on: all orders take minutes.
pub(crate) fn explore(switches: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(switches);
    builder.check(model);
}

/// What the daemon leaves out in a model that must fail.
#[derive(Clone, Copy, PartialEq)]
enum Leave {
    Nothing,
    Search,
    Withdrawal,
}

/// A value is removed while a client reads it, and its memory used anew under the same key.
fn removal_and_reuse<const FENCES: bool>(leave: Leave) {
    explore(2, move || {
        let world = World::<FENCES>::new(&WATCHED[..3]);
        let slot = world.publish("k", 1, 0).unwrap();
        let reader = {
            let world = Arc::clone(&world);
            thread::spawn(move || world.read("k", &[1, 2]))
        };
        if leave != Leave::Withdrawal {
            world.table.withdraw(slot, 1);
        }
        if leave == Leave::Search || world.is_free(1) {
            world.publish("k", 2, 0).unwrap();
        }
        reader.join().unwrap();
        assert!(world.is_free(1) && world.holds.count() == 0, "a hold was left");
    });
}

#[test]
fn no_reader_sees_memory_that_is_used_anew() {
    removal_and_reuse::<true>(Leave::Nothing);
}

#[test]
#[should_panic]
fn without_the_fences_a_reader_does() {
    removal_and_reuse::<false>(Leave::Nothing);
}

#[test]
#[should_panic]
fn without_the_search_for_holds_a_reader_does() {
    removal_and_reuse::<true>(Leave::Search);
}

#[test]
#[should_panic]
fn without_the_withdrawal_a_reader_does() {
    removal_and_reuse::<true>(Leave::Withdrawal);
}

/// A value is replaced by one elsewhere; a reader finds the old one, the new one or none, each whole.
#[test]
fn a_replaced_value_is_read_whole() {
    explore(2, || {
        let world = World::<true>::new(&WATCHED[..3]);
        let slot = world.publish("k", 1, 0).unwrap();
        let reader = {
            let world = Arc::clone(&world);
            thread::spawn(move || world.read("k", &[1, 2]))
        };
        world.table.withdraw(slot, 1);
        world.publish("k", 2, 1).unwrap();
        reader.join().unwrap();
    });
}

/// What a client reads is parked, and its memory is used anew when the hold has gone; the next hold takes the same word.
#[test]
fn parked_memory_is_used_anew_after_the_last_read() {
    explore(2, || {
        let world = World::<true>::new(&WATCHED[..1]);
        let slot = world.publish("k", 1, 0).unwrap();
        let reader = {
            let world = Arc::clone(&world);
            thread::spawn(move || {
                world.read("k", &[1]);
                world.read("k", &[1]);
            })
        };
        world.table.withdraw(slot, 1);
        // Looked at twice, as parked memory is.
        if world.is_free(1) || world.is_free(1) {
            world.publish("j", 2, 0).unwrap();
        }
        reader.join().unwrap();
        assert!(world.is_free(1));
    });
}

/// As above, where two threads of the client take hold words from each other: what the first has read is known to be read
/// when the second has its word.
#[test]
fn threads_that_share_hold_words_hide_nothing_from_the_search() {
    explore(2, || {
        let world = World::<true>::new(&WATCHED[..1]);
        let slot = world.publish("k", 1, 0).unwrap();
        let reader = {
            let world = Arc::clone(&world);
            thread::spawn(move || world.read("k", &[1]))
        };
        let other = {
            let world = Arc::clone(&world);
            // Of another value.
            thread::spawn(move || world.holds.take(9))
        };
        world.table.withdraw(slot, 1);
        if world.is_free(1) {
            world.publish("j", 2, 0).unwrap();
        }
        reader.join().unwrap();
        assert!(other.join().unwrap().is_some() && !world.is_free(9));
    });
}

/// Two namespaces write the same bucket while a client reads it.
#[test]
fn writers_of_one_bucket_exclude_each_other() {
    explore(4, || {
        let world = World::<true>::new(&WATCHED);
        let slot = world.publish("k", 1, 0).unwrap();
        let other = {
            let world = Arc::clone(&world);
            thread::spawn(move || {
                // Nobody reads this one, so its memory needs no search.
                let slot = world.publish("j", 2, 1);
                slot.inspect(|&slot| world.table.withdraw(slot, 2));
            })
        };
        world.read("k", &[1]);
        world.table.withdraw(slot, 1);
        world.read("k", &[]);
        other.join().unwrap();
        assert!(!world.table.has(0, 1) && !world.table.has(0, 2) && !world.table.has(1, 2));
    });
}

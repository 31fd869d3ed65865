//! The budget of memory, and the arenas that share it.

use std::{
    slice,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering},
        mpsc,
    },
    thread,
};

use parking_lot::Mutex;

use super::{
    Pages,
    arena::{Arena, ArenaId, Carved, Start, frames_in},
    frames::{Run, State},
    geometry::Geometry,
    memory::{self, HUGE, PIECE},
};
use crate::error::{Error, Result};

/// Why a value found no place.
#[derive(Debug)]
pub(super) enum Refused {
    /// This many bytes of whole frames are missing.
    Short(u64),
    /// The system refused.
    System(Error),
}

/// Busy frames, by arena.
type Harvest = Vec<(Arc<Arena>, Vec<Run>)>;

/// All memory of a store.
#[derive(Debug)]
pub(super) struct Pool {
    geometry: Geometry,
    huge: bool,
    /// Frames of the budget that no arena has. Held while frames move between arenas, so that of two writers who
    /// want the last frames one gets all it needs, instead of each a part.
    spare: Mutex<u64>,
    arenas: Mutex<Vec<Arc<Arena>>>,
    next: AtomicU32,
}

impl Pool {
    /// Reserves the whole budget. It is all in the first arena, which waits for its first writer.
    pub(super) fn open(size: u64, pages: Pages, progress: impl FnMut(u64, u64)) -> Result<Self> {
        let (geometry, huge) = choose(size, pages)?;
        let pool =
            Self { geometry, huge, spare: Mutex::new(0), arenas: Mutex::default(), next: AtomicU32::new(0) };
        let arena = pool.create()?;
        let all = arena.take_holes(0, geometry.pool);
        fill(&arena, &geometry, progress)?;
        arena.settle(&all, State::Warm);
        pool.arenas.lock().push(arena);
        Ok(pool)
    }

    pub(super) fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Bytes of a page.
    pub(super) fn page(&self) -> u64 {
        if self.huge { HUGE } else { rustix::param::page_size() as u64 }
    }

    pub(super) fn arena(&self, id: ArenaId) -> Option<Arc<Arena>> {
        self.arenas.lock().iter().find(|arena| arena.id() == id).cloned()
    }

    /// How many arenas there are, their frames with memory, and the frames that a new value could have at once.
    pub(super) fn counts(&self) -> (u64, u64, u64) {
        // Under this lock no frame leaves an arena, so none is counted twice.
        let unowned = self.spare.lock();
        let arenas = self.snapshot();
        let (mut warm, mut spare) = (0, *unowned);
        for arena in &arenas {
            let counts = arena.counts();
            warm += counts.0 as u64;
            spare += counts.1 as u64;
        }
        (arenas.len() as u64, warm, spare)
    }

    /// An arena for a new owner that has room for `len` bytes: the idle one with the most warm memory to spare, else
    /// a new one.
    pub(super) fn acquire(&self, len: u64, start: Start) -> Result<(Arc<Arena>, Carved)> {
        let mut arenas = self.arenas.lock();
        let mut idle: Vec<_> = arenas.iter().filter(|arena| !arena.is_owned()).cloned().collect();
        idle.sort_by_cached_key(|arena| std::cmp::Reverse(arena.counts().1));
        for arena in idle {
            if let Some(carved) = arena.carve(len, start) {
                arena.set_owned(true);
                return Ok((arena, carved));
            }
        }
        let arena = self.create()?;
        let carved =
            arena.carve(len, start).ok_or(Error::TooLarge { size: len, limit: self.geometry.pool })?;
        arena.set_owned(true);
        arenas.push(Arc::clone(&arena));
        Ok((arena, carved))
    }

    /// Ends the ownership of these arenas.
    pub(super) fn release(&self, owned: &[Arc<Arena>]) {
        for arena in owned {
            if let Err(error) = arena.shed_strays() {
                tracing::warn!(arena = arena.id().0, %error, "memory that was taken beyond grants stays taken");
            }
            arena.set_owned(false);
        }
        self.prune();
    }

    /// Sees to it that these bytes of an arena have memory; their frames are claimed by the caller.
    pub(super) fn warm(&self, arena: &Arc<Arena>, offset: u64, len: u64) -> Result<(), Refused> {
        loop {
            let holes = arena.take_holes(offset, len);
            if holes.is_empty() {
                return Ok(());
            }
            let want = frames_in(&holes);
            if let Err(refused) = self.draw(arena, want) {
                arena.settle(&holes, State::Hole);
                return Err(refused);
            }
            if let Err(error) = arena.populate(&holes) {
                // Part of it may have been populated before the rest failed.
                let state = self.punched(arena, &holes);
                arena.settle(&holes, state);
                if state == State::Hole {
                    *self.spare.lock() += want;
                }
                return Err(Refused::System(error));
            }
            arena.settle(&holes, State::Warm);
        }
    }

    /// Takes `want` frames from the budget, and from arenas that do not use theirs; all or none.
    fn draw(&self, own: &Arc<Arena>, want: u64) -> Result<(), Refused> {
        let mut spare = self.spare.lock();
        if *spare < want {
            let taken = self.harvest(own, want - *spare)?;
            for (arena, runs) in taken {
                let state = self.punched(&arena, &runs);
                arena.settle(&runs, state);
                if state == State::Hole {
                    *spare += frames_in(&runs);
                }
            }
            self.prune();
        }
        let left = spare.checked_sub(want).ok_or(Refused::Short(self.geometry.frame))?;
        *spare = left;
        Ok(())
    }

    /// Marks `want` frames that nothing lives in as busy: of idle arenas first, then of the asking writer, then of
    /// the others. Marks none where there are not enough, so that no warm memory is lost for nothing.
    fn harvest(&self, own: &Arc<Arena>, want: u64) -> Result<Harvest, Refused> {
        let mut arenas = self.snapshot();
        arenas.sort_by_key(|arena| (arena.is_owned(), !Arc::ptr_eq(arena, own)));
        let mut left = want;
        let mut taken = Vec::new();
        for trim in [false, true] {
            for arena in &arenas {
                if left == 0 {
                    return Ok(taken);
                }
                let runs = arena.take_spare(usize::try_from(left).unwrap_or(usize::MAX), trim);
                if !runs.is_empty() {
                    left -= frames_in(&runs);
                    taken.push((Arc::clone(arena), runs));
                }
            }
        }
        if left == 0 {
            return Ok(taken);
        }
        taken.iter().for_each(|(arena, runs)| arena.settle(runs, State::Warm));
        Err(Refused::Short(left.saturating_mul(self.geometry.frame)))
    }

    /// Punches busy frames out. They stay warm where the system refuses, so that the budget is never exceeded.
    fn punched(&self, arena: &Arena, runs: &[Run]) -> State {
        match arena.punch(runs) {
            Ok(()) => State::Hole,
            Err(error) => {
                tracing::warn!(arena = arena.id().0, %error, "memory could not be moved to another arena");
                State::Warm
            }
        }
    }

    fn create(&self) -> Result<Arc<Arena>> {
        let id = ArenaId(self.next.fetch_add(1, Ordering::Relaxed));
        Arena::new(id, self.geometry, self.huge).map(Arc::new)
    }

    /// Forgets idle arenas that hold nothing.
    fn prune(&self) {
        self.arenas.lock().retain(|arena| arena.is_owned() || !arena.is_vacant());
    }

    fn snapshot(&self) -> Vec<Arc<Arena>> {
        self.arenas.lock().clone()
    }
}

/// The geometry and whether huge pages are used, after a check that the memory can be had.
fn choose(size: u64, pages: Pages) -> Result<(Geometry, bool)> {
    let fits = |huge: bool| {
        let geometry = Geometry::new(size, if huge { HUGE } else { rustix::param::page_size() as u64 })?;
        let available = memory::available(huge);
        if geometry.pool > available {
            return Err(Error::OutOfMemory { asked: geometry.pool, available });
        }
        Ok((geometry, huge))
    };
    match pages {
        Pages::Normal => fits(false),
        Pages::HugeRequired => fits(true).map_err(|error| match error {
            Error::OutOfMemory { asked, available } => Error::ResourceExhausted {
                what: format!(
                    "the supply of huge pages ({asked} bytes asked, {available} free; see vm.nr_hugepages)"
                ),
            },
            other => other,
        }),
        Pages::HugePreferred => fits(true).or_else(|error| {
            tracing::warn!(%error, "not enough huge pages; normal pages are used");
            fits(false)
        }),
    }
}

/// Populates the first `geometry.pool` bytes of an arena on all cores.
fn fill(arena: &Arena, geometry: &Geometry, mut progress: impl FnMut(u64, u64)) -> Result<()> {
    let total = geometry.budget();
    let step = (PIECE / geometry.frame).max(1);
    let next = AtomicU64::new(0);
    let workers = thread::available_parallelism().map_or(1, |n| n.get() as u64).min(total.div_ceil(step));
    progress(0, geometry.pool);
    thread::scope(|scope| {
        let (sender, results) = mpsc::channel();
        for _ in 0..workers {
            let (sender, next) = (sender.clone(), &next);
            scope.spawn(move || {
                loop {
                    let start = next.fetch_add(step, Ordering::Relaxed);
                    if start >= total {
                        break;
                    }
                    let end = total.min(start + step);
                    let run = start as usize..end as usize;
                    let result = arena.populate(slice::from_ref(&run)).map(|()| end - start);
                    let failed = result.is_err();
                    // The receiver goes away at the first failure.
                    if sender.send(result).is_err() || failed {
                        break;
                    }
                }
            });
        }
        drop(sender);
        let mut done = 0;
        for result in results {
            done += result? * geometry.frame;
            progress(done, geometry.pool);
        }
        Ok(())
    })
}

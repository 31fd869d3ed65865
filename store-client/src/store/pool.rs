//! The budget of memory, and the arenas that share it.

use std::{
    slice,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
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

/// Arenas without a value that wait for the next writers, however little memory they have. Each costs two descriptors,
/// addresses, and the tables of its allocator.
const WAITING: usize = 4;
/// The memory of an arena that waits is not moved to another one where it is more than this part of the pool: that
/// would take long, and there can only be so many of them.
const MOVED: u64 = 16;

/// The name of the threads that touch the pool.
pub(super) const TOUCH: &str = "haulier-touch";

/// Busy frames, by arena.
type Harvest = Vec<(Arc<Arena>, Vec<Run>)>;

/// All memory of a store.
#[derive(Debug)]
pub(super) struct Pool {
    geometry: Geometry,
    huge: bool,
    /// Bytes of a page.
    page: u64,
    /// How long it took to reserve and touch the whole budget.
    reserved_in: Duration,
    /// Whether arenas that writers get stand.
    standing: bool,
    /// Frames of the budget that no arena has. Held while frames move between arenas, so that of two writers who
    /// want the last frames one gets all it needs, instead of each a part.
    spare: Mutex<u64>,
    arenas: Mutex<Vec<Arc<Arena>>>,
    next: AtomicU32,
    /// All memory will be gone soon, so that nothing is worth moving.
    ends: AtomicBool,
}

impl Pool {
    /// Reserves the whole budget. It is all in the first arena, which waits for its first writer; in a `standing` pool it is
    /// nobody's, and others get their memory from it.
    pub(super) fn open(
        size: u64,
        pages: Pages,
        standing: bool,
        mut progress: impl FnMut(u64, u64),
    ) -> Result<Self> {
        let start = Instant::now();
        let mut reserve = |huge| reserve(size, huge, standing, &mut progress);
        let (geometry, huge, first) = match pages {
            Pages::Normal => reserve(false)?,
            Pages::HugeRequired => reserve(true).map_err(supply)?,
            Pages::HugePreferred => reserve(true).or_else(|error| {
                tracing::warn!(%error, "not enough huge pages; normal pages are used");
                reserve(false)
            })?,
        };
        Ok(Self {
            geometry,
            huge,
            page: first.page()?,
            reserved_in: start.elapsed(),
            standing,
            spare: Mutex::new(0),
            arenas: Mutex::new(vec![first]),
            next: AtomicU32::new(1),
            ends: AtomicBool::new(false),
        })
    }

    pub(super) fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Whether arenas that writers get stand.
    pub(super) fn is_standing(&self) -> bool {
        self.standing
    }

    /// Bytes of a page.
    pub(super) fn page(&self) -> u64 {
        self.page
    }

    /// How long it took to reserve and touch the whole budget.
    pub(super) fn reserved_in(&self) -> Duration {
        self.reserved_in
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

    /// An arena with room for `len` bytes for an owner that has `before` arenas: the smallest idle one, of those as small the
    /// one with the most warm memory to spare, else a new one.
    pub(super) fn acquire(&self, len: u64, start: Start, before: usize) -> Result<(Arc<Arena>, Carved)> {
        let mut arenas = self.arenas.lock();
        let mut idle: Vec<_> = arenas.iter().filter(|arena| !arena.is_owned()).cloned().collect();
        idle.sort_by_cached_key(|arena| (arena.virtual_len(), std::cmp::Reverse(arena.counts().1)));
        for arena in idle {
            if let Some(carved) = arena.carve(len, start) {
                arena.set_owned(true);
                return Ok((arena, carved));
            }
        }
        let id = ArenaId(self.next.fetch_add(1, Ordering::Relaxed));
        let span = if self.standing { self.geometry.standing_span(len) } else { self.geometry.span };
        let arena = Arc::new(Arena::new(id, self.geometry, span, self.standing, self.huge, before)?);
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
        self.gather();
    }

    /// From now on nothing is moved for later writers.
    pub(super) fn end(&self) {
        self.ends.store(true, Ordering::Relaxed);
    }

    /// Sees to it that these bytes of an arena have memory; their frames are claimed by the caller.
    pub(super) fn warm(&self, arena: &Arc<Arena>, offset: u64, len: u64) -> Result<(), Refused> {
        loop {
            let holes = arena.take_holes(offset, len);
            if holes.is_empty() {
                return Ok(());
            }
            if let Err(refused) = self.draw(arena, frames_in(&holes)) {
                arena.settle(&holes, State::Hole);
                return Err(refused);
            }
            self.populate(arena, &holes).map_err(Refused::System)?;
        }
    }

    /// Gives busy frames the memory that was drawn for them.
    fn populate(&self, arena: &Arena, holes: &[Run]) -> Result<()> {
        let outcome = arena.populate(holes);
        // Part of it may have been populated before the rest failed.
        let state = if outcome.is_ok() { State::Warm } else { self.punched(arena, holes) };
        arena.settle(holes, state);
        if state == State::Hole {
            *self.spare.lock() += frames_in(holes);
        }
        outcome
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
        arenas.sort_by_key(|arena| (arena.stands(), arena.is_owned(), !Arc::ptr_eq(arena, own)));
        let mut left = want;
        let mut taken = Vec::new();
        for arena in &arenas {
            if left == 0 {
                break;
            }
            let runs = arena.take_spare(usize::try_from(left).unwrap_or(usize::MAX));
            if !runs.is_empty() {
                left = left.saturating_sub(frames_in(&runs));
                taken.push((Arc::clone(arena), runs));
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

    /// Moves the memory of small arenas that wait for a writer together, so that no more of them stay than a few, however
    /// many writers there were at once. It is populated anew right away: the next writer finds it ready.
    fn gather(&self) {
        while !self.standing
            && !self.ends.load(Ordering::Relaxed)
            && let Some((from, to)) = self.least_and_most()
        {
            let moved = {
                let mut spare = self.spare.lock();
                let runs = from.take_spare(usize::MAX);
                let state = self.punched(&from, &runs);
                from.settle(&runs, state);
                if state == State::Warm {
                    return;
                }
                *spare += frames_in(&runs);
                frames_in(&runs)
            };
            self.prune();
            if let Err(error) = self.refill(&to, moved) {
                tracing::warn!(%error, "memory that was moved is not populated until it is written");
                return;
            }
        }
    }

    /// Of the arenas that wait without a value, if they are too many, those with the least and the most memory.
    fn least_and_most(&self) -> Option<(Arc<Arena>, Arc<Arena>)> {
        let arenas = self.arenas.lock();
        let waiting = arenas.iter().filter(|arena| !arena.is_owned() && arena.is_empty());
        let warm = waiting.map(|arena| (arena.counts().0 as u64, arena));
        // One without any is just getting some.
        let mut waiting: Vec<_> = warm.filter(|(warm, _)| *warm > 0).collect();
        waiting.sort_by_key(|(warm, _)| *warm);
        let [(least, from), .., (_, to)] = &waiting[..] else { return None };
        let small = *least <= self.geometry.budget().div_ceil(MOVED);
        (waiting.len() > WAITING && small).then(|| (Arc::clone(from), Arc::clone(to)))
    }

    /// Populates so many frames of an arena, as long as nobody else has drawn them, and the arena has not been forgotten
    /// meanwhile: with frames in hand it is not from then on.
    fn refill(&self, arena: &Arena, mut frames: u64) -> Result<()> {
        while frames > 0 {
            let holes = arena.take_lowest_holes(frames.min(step(&self.geometry)) as usize);
            let want = frames_in(&holes);
            let drawn = {
                let mut spare = self.spare.lock();
                let left = spare.checked_sub(want).filter(|_| want > 0 && self.arena(arena.id()).is_some());
                left.map(|left| *spare = left)
            };
            if drawn.is_none() {
                arena.settle(&holes, State::Hole);
                return Ok(());
            }
            self.populate(arena, &holes)?;
            frames -= want;
        }
        Ok(())
    }

    /// Forgets idle arenas that hold nothing.
    fn prune(&self) {
        self.arenas.lock().retain(|arena| arena.is_owned() || !arena.is_vacant());
    }

    fn snapshot(&self) -> Vec<Arc<Arena>> {
        self.arenas.lock().clone()
    }
}

/// The budget in a first arena, all of it with memory, after a check that it can be had; and whether on huge pages.
fn reserve(
    size: u64,
    huge: bool,
    standing: bool,
    progress: &mut impl FnMut(u64, u64),
) -> Result<(Geometry, bool, Arc<Arena>)> {
    let geometry = Geometry::new(size, if huge { HUGE } else { rustix::param::page_size() as u64 })?;
    let available = memory::available(huge);
    if geometry.pool > available {
        return Err(Error::OutOfMemory { asked: geometry.pool, available });
    }
    let span = if standing { geometry.pool } else { geometry.span };
    let arena = Arena::new(ArenaId(0), geometry, span, false, huge, usize::MAX)?;
    arena.set_owned(standing);
    let all = arena.take_holes(0, geometry.pool);
    fill(&arena, &geometry, progress)?;
    arena.settle(&all, State::Warm);
    Ok((geometry, huge, Arc::new(arena)))
}

/// What a lack of memory means where it has to be huge pages.
fn supply(error: Error) -> Error {
    match error {
        Error::OutOfMemory { asked, available } => Error::ResourceExhausted {
            what: format!(
                "the supply of huge pages ({asked} bytes asked, {available} free; see vm.nr_hugepages)"
            ),
        },
        other => other,
    }
}

/// Frames that are populated at once.
fn step(geometry: &Geometry) -> u64 {
    (PIECE / geometry.frame).max(1)
}

/// Populates the first `geometry.pool` bytes of an arena on all cores.
fn fill(arena: &Arena, geometry: &Geometry, progress: &mut impl FnMut(u64, u64)) -> Result<()> {
    let total = geometry.budget();
    let step = step(geometry);
    let next = AtomicU64::new(0);
    let workers = thread::available_parallelism().map_or(1, |n| n.get() as u64).min(total.div_ceil(step));
    progress(0, geometry.pool);
    thread::scope(|scope| {
        let (sender, results) = mpsc::channel();
        for _ in 0..workers {
            let (sender, next) = (sender.clone(), &next);
            let touch = move || {
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
            };
            let builder = thread::Builder::new().name(TOUCH.into());
            builder.spawn_scoped(scope, touch).map_err(|e| Error::Os {
                what: "starting threads that touch the pool".into(),
                reason: e.to_string(),
                errno: e.raw_os_error(),
            })?;
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

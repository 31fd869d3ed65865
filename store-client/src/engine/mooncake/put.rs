//! Writing: the body of a larger value, and its head, which makes it visible and becomes so after it.
//!
//! Mooncake keeps what is there and says that all went well. So each put carries an id of its own, and the head is read
//! back: whose id is in it has stored the value, also where many put the same key at once. That look is the price of an
//! exact answer. What was there before is asked only where moving the bytes in vain would cost more than the question.

use std::{collections::HashSet, ffi::CString, mem, sync::Arc, thread, time::Duration};

use hal::{Bound, Deadline, Device, Region};

use super::{
    MooncakeEngine, Way,
    ffi::{Object, Store},
    get,
    head::{self, INLINE_MAX, Id},
    names::Names,
    refusal,
    session::Session,
    staging::Block,
};
use crate::{
    arrow::Slot,
    error::{Error, Result},
    shm,
    store::{Mode, Put},
};

/// Milliseconds between tries: the master evicts when a put finds no room, and does it after it has refused.
const PATIENCE: [u64; 5] = [5, 20, 80, 200, 400];

/// The longest pause before it is looked again whether another client's put has ended.
const PAUSE_MAX: Duration = Duration::from_millis(100);

/// The longest value that is put without a question before: moving so much in vain costs about as much as a few questions.
const UNASKED_MAX: usize = 1 << 20;

/// A value that is to be put.
pub(super) trait Source<D: Device> {
    fn key(&self) -> &str;

    /// What stands beside it.
    fn meta(&self) -> &[u8];

    /// Its bytes.
    fn len(&self) -> usize;

    /// Copies them to `to`, which is as long.
    fn copy_in(&self, to: Region) -> Result<()>;

    /// Brings them to where Mooncake can read them. `None` where staging has no room and `wait` is not set.
    fn body(&self, session: &Arc<Session<D>>, wait: bool) -> Result<Option<Way<D>>>;

    /// It is dealt with, and was not copied.
    fn passed(&self);
}

/// A slot of a caller's batch.
pub(super) struct FromSlot<'a, D: Device> {
    pub(super) engine: &'a MooncakeEngine<D>,
    pub(super) bound: &'a Bound<'a, D>,
    pub(super) slot: &'a Slot<D>,
    pub(super) deadline: Deadline,
    pub(super) progress: &'a (dyn Fn(u64) + Sync),
}

impl<D: Device> Source<D> for FromSlot<'_, D> {
    fn key(&self) -> &str {
        self.slot.key()
    }

    fn meta(&self) -> &[u8] {
        self.slot.meta()
    }

    fn len(&self) -> usize {
        self.slot.region().len
    }

    fn copy_in(&self, to: Region) -> Result<()> {
        // SAFETY: a ready slot is allocated and nobody writes it until the put has returned; the block is the put's alone.
        unsafe { shm::copy_in(self.bound, self.slot, to, self.deadline, self.progress) }
    }

    fn body(&self, session: &Arc<Session<D>>, wait: bool) -> Result<Option<Way<D>>> {
        let way = self.engine.way(session, self.slot, self.len(), wait, self.deadline)?;
        if let Some(Way::Staged(block)) = &way {
            self.copy_in(block.region())?;
        }
        Ok(way)
    }

    fn passed(&self) {
        (self.progress)(self.len() as u64);
    }
}

/// One value on its way.
struct Item<D: Device> {
    slot: usize,
    key: String,
    head: CString,
    /// The head, and as much again for what is read back.
    block: Block<D>,
    body: Option<(Object, Way<D>)>,
    old: Old,
}

/// What was under the key before.
#[derive(Debug, Clone, Default)]
struct Old {
    /// A head, which has to go first.
    head: bool,
    /// Whether it was a value's.
    alive: bool,
    body: Option<CString>,
}

impl<D: Device> Item<D> {
    fn head_len(&self) -> usize {
        self.block.region().len / 2
    }
}

impl<D: Device> MooncakeEngine<D> {
    /// Stores the first of these values, as many as staging has room for; their verdicts, of which there is at least one.
    pub(super) fn put_some<S: Source<D>>(
        &self,
        sources: &[S],
        mode: Mode,
        deadline: Deadline,
    ) -> Result<Vec<Result<Put>>> {
        let session = self.session()?;
        // A key that comes again is put after this one.
        let mut seen = HashSet::new();
        let most = sources.iter().take(session.heads_at_once());
        let sources: Vec<&S> = most.take_while(|source| seen.insert(source.key())).collect();
        let ask: Vec<usize> =
            (0..sources.len()).filter(|&i| mode == Mode::Upsert || sources[i].len() > UNASKED_MAX).collect();
        let about: Vec<&S> = ask.iter().map(|&i| sources[i]).collect();
        let mut olds: Vec<Result<Old>> = sources.iter().map(|_| Ok(Old::default())).collect();
        for (i, old) in ask.into_iter().zip(self.olds(&session, &about, mode, deadline)) {
            olds[i] = old;
        }
        let verdicts = self.put_once(&session, &sources, olds, mode, deadline);

        // Those whose key has what may be the head of an evicted value: rare enough to begin anew.
        let unknown = sources.iter().zip(&verdicts).filter(|(_, put)| matches!(put, Ok(None)));
        let again: Vec<&S> = unknown.map(|(source, _)| *source).collect();
        let mut second = Vec::new();
        while second.len() < again.len() {
            let rest = &again[second.len()..];
            let olds = self.olds(&session, rest, mode, deadline);
            second.extend(self.put_once(&session, rest, olds, mode, deadline));
        }
        let mut second = second.into_iter();
        let settled = |put: Result<Option<Put>>| match put {
            // Twice another's: that one is alive.
            Ok(None) => {
                second.next().map_or(Ok(None), |put| put).map(|put| put.unwrap_or(Put::AlreadyExists))
            }
            put => put.map(|put| put.unwrap_or(Put::AlreadyExists)),
        };
        Ok(verdicts.into_iter().map(settled).collect())
    }

    /// Stores the first of these values, as many as staging has room for, at least one. `None` where the key has another's
    /// head, and it is not known whether its value is still there.
    fn put_once<S: Source<D>>(
        &self,
        session: &Arc<Session<D>>,
        sources: &[&S],
        olds: Vec<Result<Old>>,
        mode: Mode,
        deadline: Deadline,
    ) -> Vec<Result<Option<Put>>> {
        let mut verdicts: Vec<Result<Option<Put>>> = Vec::with_capacity(sources.len());
        let mut items: Vec<Item<D>> = Vec::new();
        for (i, (source, old)) in sources.iter().zip(olds).enumerate() {
            let old = match old {
                Ok(old) if old.alive && mode == Mode::Put => {
                    source.passed();
                    verdicts.push(Ok(Some(Put::AlreadyExists)));
                    continue;
                }
                Ok(old) => old,
                Err(e) => {
                    verdicts.push(Err(e));
                    continue;
                }
            };
            match self.stage(session, *source, i, old, items.is_empty(), deadline) {
                Ok(Some(item)) => {
                    // Until the job has answered.
                    verdicts.push(Ok(None));
                    items.push(item);
                }
                Ok(None) => break,
                Err(e) => verdicts.push(Err(e)),
            }
        }
        if items.is_empty() {
            return verdicts;
        }
        let indices: Vec<usize> = items.iter().map(|item| item.slot).collect();
        let directs: Vec<bool> =
            items.iter().map(|item| item.body.as_ref().is_some_and(|(_, way)| way.is_direct())).collect();
        let names = self.names.clone();
        let sent = session.run("put", deadline, move |session, bound| {
            send(session.store(), bound, &names, items, mode, deadline)
        });
        let sent = sent.unwrap_or_else(|e| indices.iter().map(|_| Err(e.clone())).collect());
        for ((i, direct), verdict) in indices.into_iter().zip(directs).zip(sent) {
            if matches!(verdict, Ok(Some(Put::Stored | Put::Replaced))) {
                session.counters.puts[usize::from(direct)].count(sources[i].len() as u64);
            }
            if direct && matches!(verdict, Ok(Some(_))) {
                sources[i].passed();
            }
            verdicts[i] = verdict;
        }
        verdicts
    }

    /// What is under the values' keys.
    fn olds<S: Source<D>>(
        &self,
        session: &Arc<Session<D>>,
        sources: &[&S],
        mode: Mode,
        deadline: Deadline,
    ) -> Vec<Result<Old>> {
        let keys: Vec<&str> = sources.iter().map(|source| source.key()).collect();
        let heads = |keys: &[&str]| keys.iter().map(|key| self.names.head(key)).collect::<Vec<_>>();
        let mut olds: Vec<Result<Old>> = get::exist(session, heads(&keys), deadline)
            .into_iter()
            .map(|there| there.map(|head| Old { head, ..Old::default() }))
            .collect();
        let there: Vec<usize> =
            (0..olds.len()).filter(|&i| olds[i].as_ref().is_ok_and(|old| old.head)).collect();
        let keys: Vec<&str> = there.iter().map(|&i| keys[i]).collect();
        // A body that was evicted makes room for a new value.
        let bodies: Vec<Result<get::Found<D>>> = match mode {
            Mode::Put => self.look(session, &keys, deadline),
            Mode::Upsert => get::heads(session, &heads(&keys), deadline),
        };
        for ((i, key), found) in there.into_iter().zip(keys).zip(bodies) {
            olds[i] = match found {
                Ok(found) => {
                    let body = found.has_body().then(|| self.names.body(key, found.id));
                    Ok(Old { head: true, alive: true, body })
                }
                Err(Error::NotFound) => Ok(Old { head: true, ..Old::default() }),
                // Something that is no value of ours: kept by put, replaced by upsert.
                Err(Error::Protocol { .. }) => Ok(Old { head: true, alive: true, body: None }),
                Err(e) => Err(e),
            };
        }
        olds
    }

    /// Brings a value's bytes to where Mooncake can read them. `None` where staging has no room and `wait` is not set.
    fn stage<S: Source<D>>(
        &self,
        session: &Arc<Session<D>>,
        source: &S,
        index: usize,
        old: Old,
        wait: bool,
        deadline: Deadline,
    ) -> Result<Option<Item<D>>> {
        let (len, meta, id) = (source.len(), source.meta(), session.new_id());
        let body = if len > INLINE_MAX {
            let Some(way) = source.body(session, wait)? else { return Ok(None) };
            let object = Object { name: self.names.body(source.key(), id), addr: way.addr(), len };
            Some((object, way))
        } else {
            None
        };
        let head_len = head::size(len, meta);
        // Who has a body's block already does not wait for another: two who did could wait for each other.
        let holds = body.as_ref().is_some_and(|(_, way)| matches!(way, Way::Staged(_)));
        let block = match session.block_at_once(2 * head_len) {
            Some(block) => Some(block),
            None if !holds && wait => Some(session.block(2 * head_len, deadline)?),
            None if wait => return Err(Error::ResourceExhausted { what: "staging memory".into() }),
            None => None,
        };
        let Some(mut block) = block else { return Ok(None) };
        if body.is_none() {
            source.copy_in(block.region().part(head_len - len, len)?)?;
        }
        head::write(&mut block.bytes_mut()[..head_len], id, len, meta);
        let key = source.key().to_owned();
        Ok(Some(Item { slot: index, head: self.names.head(&key), key, block, body, old }))
    }
}

/// Runs on a worker, and owns all that it touches. `None` as in [`MooncakeEngine::put_once`].
fn send<D: Device>(
    store: &Store,
    bound: &Bound<'_, D>,
    names: &Names,
    items: Vec<Item<D>>,
    mode: Mode,
    deadline: Deadline,
) -> Vec<Result<Option<Put>>> {
    let mut verdicts: Vec<Result<Option<Put>>> = items.iter().map(|_| Ok(None)).collect();
    let object = |i: usize, at: usize| {
        let item: &Item<D> = &items[i];
        Object { name: item.head.clone(), addr: item.block.region().addr + at, len: item.head_len() }
    };

    // Each body before its head: in this order Mooncake makes them visible. Where an old head has to go first, it does
    // when the new body is there.
    let mut objects: Vec<(usize, Object)> = Vec::new();
    for (i, item) in items.iter().enumerate() {
        let head = (!item.old.head).then(|| object(i, 0));
        let body = item.body.iter().map(|(object, _)| object.clone());
        objects.extend(body.chain(head).map(|object| (i, object)));
    }
    // Whose heads are to be read back.
    let mut headed = vec![false; items.len()];
    for ((i, object), sent) in objects.iter().zip(put_patiently(store, bound, &objects, deadline)) {
        match sent {
            Ok(()) => headed[*i] |= object.name == items[*i].head,
            Err(e) => verdicts[*i] = Err(refusal::error(e)),
        }
    }

    let mut later: Vec<usize> =
        (0..items.len()).filter(|&i| items[i].old.head && verdicts[i].is_ok()).collect();
    for &i in &later {
        if let Err(e) = store.remove(bound, &items[i].head) {
            verdicts[i] = Err(refusal::error(e));
        }
    }
    later.retain(|&i| verdicts[i].is_ok());
    let mut pause = Duration::from_millis(1);
    loop {
        let heads: Vec<(usize, Object)> = later.iter().map(|&i| (i, object(i, 0))).collect();
        for (i, sent) in later.drain(..).zip(put_patiently(store, bound, &heads, deadline)) {
            match sent {
                Ok(()) => headed[i] = true,
                Err(e) => verdicts[i] = Err(refusal::error(e)),
            }
        }
        let todo: Vec<usize> = (0..items.len()).filter(|&i| mem::take(&mut headed[i])).collect();
        let back: Vec<Object> = todo.iter().map(|&i| object(i, items[i].head_len())).collect();
        // SAFETY: the blocks are this job's, and their second halves nobody else's.
        let back = unsafe { store.get(bound, &back) };
        let mut bodies: Vec<(usize, CString)> = Vec::new();
        for (i, back) in todo.into_iter().zip(back) {
            let item = &items[i];
            let done = if item.old.alive { Put::Replaced } else { Put::Stored };
            let whose = match whose(item, back) {
                Ok(whose) => whose,
                Err(e) => {
                    verdicts[i] = Err(e);
                    continue;
                }
            };
            if verdicts[i].is_err() {
                // Its body could not be stored.
                discard(store, bound, (whose == Whose::Ours).then_some(&item.head));
                continue;
            }
            verdicts[i] = Ok(match (whose, mode) {
                (Whose::Ours, _) => Some(done),
                (Whose::UnderWay, _) => {
                    later.push(i);
                    continue;
                }
                // Another upsert has replaced it already: it was there for a moment.
                (_, Mode::Upsert) => Some(done),
                (Whose::Small, Mode::Put) => Some(Put::AlreadyExists),
                (Whose::Large(id), Mode::Put) => {
                    bodies.push((i, names.body(&item.key, id)));
                    None
                }
                (Whose::Longer, Mode::Put) => None,
            });
            let own = item.body.as_ref().map(|(object, _)| &object.name);
            discard(store, bound, if whose == Whose::Ours { item.old.body.as_ref() } else { own });
        }
        let (owners, bodies): (Vec<usize>, Vec<CString>) = bodies.into_iter().unzip();
        for (i, there) in owners.into_iter().zip(store.exist(bound, &bodies)) {
            if matches!(there, Ok(true)) {
                verdicts[i] = Ok(Some(Put::AlreadyExists));
            }
        }
        if later.is_empty() {
            break;
        }
        if deadline.left().is_some_and(|left| left <= pause) {
            for i in later.drain(..) {
                verdicts[i] =
                    Err(Error::Timeout { op: "waiting for another client's put of this key".into() });
            }
            break;
        }
        thread::sleep(pause);
        pause = (2 * pause).min(PAUSE_MAX);
    }
    for (item, verdict) in items.iter().zip(&verdicts) {
        if verdict.is_err() {
            discard(store, bound, item.body.as_ref().map(|(object, _)| &object.name));
        }
    }
    verdicts
}

/// Whose head a key has after a put.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Whose {
    /// This put's; also where it was removed already.
    Ours,
    /// Another's, with its value, or something that is no value of Haulier's.
    Small,
    /// Another's, of a value whose body may have been evicted.
    Large(Id),
    /// Another's, which is longer than ours.
    Longer,
    /// That of a put that is under way, which Mooncake let ours give way to. It may yet come to nothing.
    UnderWay,
}

/// Whose head was read back into an item's block.
fn whose<D: Device>(item: &Item<D>, back: hal::Result<usize>) -> Result<Whose> {
    let (own, room) = item.block.bytes().split_at(item.head_len());
    match back {
        Ok(len) if room[..len] == *own => Ok(Whose::Ours),
        Ok(len) => Ok(match head::read(&room[..len]) {
            Ok(head) if head.inline.is_none() => Whose::Large(head.id),
            _ => Whose::Small,
        }),
        // Mooncake finds the room too small.
        Err(e) if e.vendor_code() == Some(refusal::TOO_SMALL) => Ok(Whose::Longer),
        Err(e) if e.vendor_code() == Some(refusal::NOT_READY) => Ok(Whose::UnderWay),
        Err(e) => match refusal::error(e) {
            Error::NotFound => Ok(Whose::Ours),
            e => Err(e),
        },
    }
}

/// Stores objects, each of the item of this index, trying items again for which the master has yet to make room. Whole
/// ones: what kept a head from being stored may have been what went to make room for the body.
fn put_patiently<D: Device>(
    store: &Store,
    bound: &Bound<'_, D>,
    objects: &[(usize, Object)],
    deadline: Deadline,
) -> Vec<hal::Result<()>> {
    let put = |some: &[usize]| {
        let some: Vec<Object> = some.iter().map(|&n| objects[n].1.clone()).collect();
        // SAFETY: the objects' memory is their items', which the caller owns and nobody writes; what is read directly is
        // kept registered and allocated by them.
        unsafe { store.put(bound, &some) }
    };
    let mut sent = put(&(0..objects.len()).collect::<Vec<_>>());
    for pause in PATIENCE.map(Duration::from_millis) {
        let full =
            |sent: &hal::Result<()>| sent.as_ref().is_err_and(|e| e.vendor_code() == Some(refusal::NO_ROOM));
        let items: HashSet<usize> =
            (0..sent.len()).filter(|&n| full(&sent[n])).map(|n| objects[n].0).collect();
        if items.is_empty() || deadline.left().is_some_and(|left| left <= pause) {
            break;
        }
        thread::sleep(pause);
        let again: Vec<usize> = (0..objects.len()).filter(|&n| items.contains(&objects[n].0)).collect();
        for (n, answer) in again.iter().zip(put(&again)) {
            sent[*n] = answer;
        }
    }
    sent
}

/// Removes a body that no head names any more. One that stays is evicted in time.
fn discard<D: Device>(store: &Store, bound: &Bound<'_, D>, body: Option<&CString>) {
    if let Some(name) = body
        && let Err(e) = store.remove(bound, name)
    {
        tracing::debug!(error = %e, "a body stays until it is evicted");
    }
}

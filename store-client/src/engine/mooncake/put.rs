//! Writing: the body of a larger value first, then its head, which makes it visible.
//!
//! Mooncake keeps what is there and says that all went well. So each put carries an id of its own, and the head is read
//! back: whose id is in it has stored the value, also where many put the same key at once.

use std::{collections::HashSet, ffi::CString, sync::Arc, thread, time::Duration};

use hal::{Bound, Deadline, Device, Region};

use super::{
    MooncakeEngine, Way,
    ffi::{Object, Store},
    get,
    head::{self, INLINE_MAX, Id},
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
    id: Id,
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
        let sources = &sources[..most.take_while(|source| seen.insert(source.key())).count()];
        let olds = self.olds(&session, sources, mode, deadline);
        let mut verdicts: Vec<Result<Put>> = Vec::with_capacity(sources.len());
        let mut items: Vec<Item<D>> = Vec::new();
        for (i, (source, old)) in sources.iter().zip(olds).enumerate() {
            let old = match old {
                Ok(old) if old.alive && mode == Mode::Put => {
                    source.passed();
                    verdicts.push(Ok(Put::AlreadyExists));
                    continue;
                }
                Ok(old) => old,
                Err(e) => {
                    verdicts.push(Err(e));
                    continue;
                }
            };
            match self.stage(&session, source, i, old, items.is_empty(), deadline) {
                Ok(Some(item)) => {
                    // Until the job has answered.
                    verdicts.push(Ok(Put::Stored));
                    items.push(item);
                }
                Ok(None) => break,
                Err(e) => verdicts.push(Err(e)),
            }
        }
        if items.is_empty() {
            return Ok(verdicts);
        }
        let indices: Vec<usize> = items.iter().map(|item| item.slot).collect();
        let directs: Vec<bool> =
            items.iter().map(|item| item.body.as_ref().is_some_and(|(_, way)| way.is_direct())).collect();
        let sent = session
            .run("put", deadline, move |session, bound| send(session.store(), bound, items, mode, deadline));
        let sent = sent.unwrap_or_else(|e| indices.iter().map(|_| Err(e.clone())).collect());
        for ((i, direct), verdict) in indices.into_iter().zip(directs).zip(sent) {
            if matches!(verdict, Ok(Put::Stored | Put::Replaced)) {
                session.counters.puts[usize::from(direct)].count(sources[i].len() as u64);
            }
            if direct && verdict.is_ok() {
                sources[i].passed();
            }
            verdicts[i] = verdict;
        }
        Ok(verdicts)
    }

    /// What is under the values' keys.
    fn olds<S: Source<D>>(
        &self,
        session: &Arc<Session<D>>,
        sources: &[S],
        mode: Mode,
        deadline: Deadline,
    ) -> Vec<Result<Old>> {
        let keys: Vec<&str> = sources.iter().map(Source::key).collect();
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
        Ok(Some(Item { slot: index, id, head: self.names.head(source.key()), block, body, old }))
    }
}

/// Runs on a worker, and owns all that it touches.
fn send<D: Device>(
    store: &Store,
    bound: &Bound<'_, D>,
    items: Vec<Item<D>>,
    mode: Mode,
    deadline: Deadline,
) -> Vec<Result<Put>> {
    let mut verdicts: Vec<Result<Put>> = items.iter().map(|_| Ok(Put::Stored)).collect();
    let go_on = |verdicts: &[Result<Put>]| {
        (0..verdicts.len()).filter(|&i| verdicts[i].is_ok()).collect::<Vec<usize>>()
    };

    let with_body: Vec<usize> = (0..items.len()).filter(|&i| items[i].body.is_some()).collect();
    let bodies: Vec<Object> =
        items.iter().filter_map(|item| item.body.as_ref()).map(|(object, _)| object.clone()).collect();
    for (i, sent) in with_body.into_iter().zip(put_patiently(store, bound, &bodies, deadline)) {
        if let Err(e) = sent {
            verdicts[i] = Err(refusal::error(e));
        }
    }

    for i in go_on(&verdicts) {
        if items[i].old.head
            && let Err(e) = store.remove(bound, &items[i].head)
        {
            verdicts[i] = Err(refusal::error(e));
        }
    }
    let object = |i: &usize, at: usize| {
        let item: &Item<D> = &items[*i];
        Object { name: item.head.clone(), addr: item.block.region().addr + at, len: item.head_len() }
    };
    let mut todo = go_on(&verdicts);
    let mut pause = Duration::from_millis(1);
    while !todo.is_empty() {
        let heads: Vec<Object> = todo.iter().map(|i| object(i, 0)).collect();
        for (i, sent) in todo.iter().zip(put_patiently(store, bound, &heads, deadline)) {
            if let Err(e) = sent {
                verdicts[*i] = Err(refusal::error(e));
            }
        }
        todo.retain(|&i| verdicts[i].is_ok());
        let back: Vec<Object> = todo.iter().map(|i| object(i, items[*i].head_len())).collect();
        // SAFETY: the blocks are this job's, and their second halves nobody else's.
        let back = unsafe { store.get(bound, &back) };
        let mut again = Vec::new();
        for (i, back) in todo.into_iter().zip(back) {
            let item = &items[i];
            let ours = match back {
                Ok(len) => {
                    let back = &item.block.bytes()[item.head_len()..][..len];
                    head::read(back).is_ok_and(|head| head.id == item.id)
                }
                // Another put's head, which is longer: Mooncake finds the room too small.
                Err(e) if e.vendor_code() == Some(refusal::TOO_SMALL) => false,
                // Another put is under way, which Mooncake let ours give way to. It may yet come to nothing.
                Err(e) if e.vendor_code() == Some(refusal::NOT_READY) => {
                    again.push(i);
                    continue;
                }
                Err(e) => {
                    match refusal::error(e) {
                        // Removed already.
                        Error::NotFound => {}
                        e => verdicts[i] = Err(e),
                    }
                    continue;
                }
            };
            verdicts[i] = Ok(match (mode, ours) {
                (Mode::Put, true) => Put::Stored,
                (Mode::Put, false) => Put::AlreadyExists,
                // Where another upsert has replaced it already, it was there for a moment.
                (Mode::Upsert, _) if item.old.alive => Put::Replaced,
                (Mode::Upsert, _) => Put::Stored,
            });
            let gone = if ours {
                item.old.body.as_ref()
            } else {
                item.body.as_ref().map(|(object, _)| &object.name)
            };
            discard(store, bound, gone);
        }
        todo = again;
        if !todo.is_empty() && deadline.left().is_some_and(|left| left <= pause) {
            for i in todo.drain(..) {
                verdicts[i] =
                    Err(Error::Timeout { op: "waiting for another client's put of this key".into() });
            }
        } else if !todo.is_empty() {
            thread::sleep(pause);
            pause = (2 * pause).min(PAUSE_MAX);
        }
    }
    for (item, verdict) in items.iter().zip(&verdicts) {
        if verdict.is_err() {
            discard(store, bound, item.body.as_ref().map(|(object, _)| &object.name));
        }
    }
    verdicts
}

/// Stores objects, trying those again for which the master has yet to make room.
fn put_patiently<D: Device>(
    store: &Store,
    bound: &Bound<'_, D>,
    objects: &[Object],
    deadline: Deadline,
) -> Vec<hal::Result<()>> {
    // SAFETY: the objects' memory is their items', which the caller owns and nobody writes; what is read directly is kept
    // registered and allocated by them.
    let mut sent = unsafe { store.put(bound, objects) };
    for pause in PATIENCE.map(Duration::from_millis) {
        let full =
            |sent: &hal::Result<()>| sent.as_ref().is_err_and(|e| e.vendor_code() == Some(refusal::NO_ROOM));
        let again: Vec<usize> = (0..sent.len()).filter(|&i| full(&sent[i])).collect();
        if again.is_empty() || deadline.left().is_some_and(|left| left <= pause) {
            break;
        }
        thread::sleep(pause);
        let some: Vec<Object> = again.iter().map(|&i| objects[i].clone()).collect();
        // SAFETY: as above.
        for (i, answer) in again.into_iter().zip(unsafe { store.put(bound, &some) }) {
            sent[i] = answer;
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

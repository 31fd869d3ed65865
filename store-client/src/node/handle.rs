//! What each request does. Every number in a request is a claim of the client's and is checked before use.

use std::{io, iter, os::fd::OwnedFd, sync::Arc};

use hal::Device;

use super::{
    answer::{Answer, BODY_MAX, Room, encoded_len},
    session::{Lent, Session, protocol},
    values::{Told, Written},
};
use crate::{
    error::{Error, Result},
    metrics::{FOUND, Op, Route},
    store::{ArenaId, Grant, Mode, Object, Put, check_key},
    wire::{
        ArenaInfo, CommitItem, Described, Granted, Held, INLINE_MAX, IndexInfo, MESSAGE_DESCRIPTORS_MAX,
        Path, Reply, Request,
    },
};

/// The most keys of one page of a list, so that the index is not locked for long.
const PAGE_MAX: usize = 4096;

impl<D: Device> Session<'_, D> {
    /// Handles one request and answers it. `fds` came beside it.
    pub(super) fn handle(
        &mut self,
        request: Request<'_>,
        fds: impl Iterator<Item = OwnedFd>,
        answer: Answer<'_>,
    ) -> io::Result<()> {
        match request {
            // The session's loop has seen to it.
            Request::Hello { .. } | Request::Ring => answer.refuse(protocol("unexpected hello or ring")),
            Request::Arena { id } => self.arena(id, answer),
            Request::Reserve { lens, unless } if unless.is_empty() || unless.len() == lens.len() => {
                self.reserve(&lens, &unless, answer)
            }
            Request::Reserve { .. } => answer.refuse(protocol("keys and lengths do not pair up")),
            Request::Commit { items, mode, ahead } => self.commit(&items, mode, ahead, answer),
            Request::Abandon { grants } => {
                let gone = grants.into_iter().filter_map(|grant| self.grants.take(grant)).count();
                answer.give(Reply::Removed(gone as u64), &[])
            }
            Request::PutInline { key, meta, bytes, mode, why } => {
                let put = self.put_inline(key, meta, bytes, mode);
                self.node.metrics.put(&put, bytes.len() as u64, Path::Staging(why));
                answer.give(Reply::Put(put), &[])
            }
            Request::PutIpc { handles, items, mode } => self.put_ipc(handles, &items, mode, fds, answer),
            Request::GetIpc { handles, items } => self.get_ipc(handles, &items, fds, answer),
            Request::Hold { keys, inline } => self.hold(&keys, inline, answer),
            Request::Release { holds } => {
                let gone = holds.into_iter().filter_map(|hold| self.holds.take(hold)).count();
                answer.give(Reply::Removed(gone as u64), &[])
            }
            Request::Describe { keys } => self.describe(&keys, answer),
            Request::Remove { keys } => {
                let slots = self.each(Op::Remove, &keys, |keys| self.values.remove(keys));
                answer.give(Reply::Found(slots), &[])
            }
            Request::RemovePrefix { prefix } => {
                let gone = match self.values.remove_prefix(prefix) {
                    Ok(gone) => gone,
                    Err(e) => return self.refuse(Op::Remove, answer, e),
                };
                self.node.metrics.count(Op::Remove, None, FOUND, gone);
                answer.give(Reply::Removed(gone), &[])
            }
            Request::SetPinned { keys, pinned } => {
                let slots = self.each(Op::Pin, &keys, |keys| self.values.set_pinned(keys, pinned));
                answer.give(Reply::Found(slots), &[])
            }
            Request::List { prefix, after, limit } => self.list(prefix, after, limit, answer),
            Request::Stat => match self.values.stat(&self.node.store) {
                Ok(stat) => answer.give(Reply::Stat(Box::new(stat)), &[]),
                Err(e) => self.refuse(Op::Inspect, answer, e),
            },
            Request::Metrics { offset } => self.metrics(offset, answer),
            Request::Index => self.index(answer),
        }
    }

    fn index(&mut self, answer: Answer<'_>) -> io::Result<()> {
        if let (None, Some(catalog)) = (&self.reader, &self.node.catalog) {
            match catalog.admit() {
                Ok(reader) => self.reader = Some(reader),
                Err(e) => tracing::warn!(%e, "a client must ask for each value"),
            }
        }
        let Some(reader) = &self.reader else { return answer.give(Reply::Index(None), &[]) };
        let info =
            IndexInfo { slots: reader.slots(), seed: reader.seed(), space: self.values.space().number() };
        answer.give(Reply::Index(Some(info)), &reader.descriptors())
    }

    fn arena(&self, id: u64, answer: Answer<'_>) -> io::Result<()> {
        let arena = u32::try_from(id).ok().and_then(|id| self.node.store.arena(ArenaId(id)));
        match arena {
            Some(arena) => answer.give(Reply::Arena { len: arena.virtual_len() }, &[arena.read_only()]),
            None => answer.refuse(Error::InvalidArgument { what: format!("there is no arena {id}") }),
        }
    }

    fn reserve(&mut self, lens: &[u64], unless: &[&str], answer: Answer<'_>) -> io::Result<()> {
        // Its memory may be what is missing.
        self.prepared = None;
        let mut room = Room::for_slots(lens.len());
        let mut fresh = Vec::new();
        let keeps = self.values.keeps_which(unless, Mode::Put);
        let wanted = lens.iter().enumerate().filter(|(i, _)| !keeps.get(*i).is_some_and(|kept| *kept));
        let wanted: Vec<u64> = wanted.map(|(_, &len)| len).take(self.grants.room()).collect();
        let mut reserved = self.writer.reserve_many(self.values.space(), &wanted).into_iter();
        let grants = (0..lens.len())
            .map(|i| {
                if keeps.get(i).is_some_and(|kept| *kept) {
                    return room.fit(Ok(None));
                }
                let grant = reserved.next().unwrap_or_else(|| Err(self.grants.used_up()))?;
                let number = self.grants.next()?;
                let known = self.writable.contains(&grant.arena().id())
                    || fresh.iter().any(|arena: &Arc<_>| Arc::ptr_eq(arena, grant.arena()));
                if !known && fresh.len() == MESSAGE_DESCRIPTORS_MAX {
                    return Err(Error::ResourceExhausted { what: "message size".into() });
                }
                let granted = room.fit(Ok(Some(granted(number, &grant))))?;
                if !known {
                    fresh.push(Arc::clone(grant.arena()));
                }
                self.grants.insert(Lent { grant, _share: None });
                Ok(granted)
            })
            .collect::<Vec<Result<_>>>();
        let grants: Vec<_> = grants.into_iter().map(|slot| slot.or_else(|e| room.fit(Err(e)))).collect();
        for e in grants.iter().filter_map(|slot| slot.as_ref().err()) {
            self.node.metrics.count(Op::Reserve, None, e.label(), 1);
        }
        let arenas = fresh
            .iter()
            .map(|arena| ArenaInfo { id: arena.id().0.into(), len: arena.virtual_len() })
            .collect();
        let fds: Vec<_> = fresh.iter().map(|arena| arena.read_write()).collect();
        answer.give(Reply::Reserved { grants, arenas }, &fds)?;
        self.writable.extend(fresh.iter().map(|arena| arena.id()));
        Ok(())
    }

    fn commit(
        &mut self,
        items: &[CommitItem<'_>],
        mode: Mode,
        ahead: u64,
        answer: Answer<'_>,
    ) -> io::Result<()> {
        let mut room = Room::for_slots(items.len());
        let mut written = items.iter().map(|item| match self.grants.take(item.grant) {
            Some(Lent { grant, .. }) => Ok((grant, item.key, item.len, item.meta)),
            None => Err(Error::InvalidArgument {
                what: format!("grant {} is used up, or another connection's", item.grant),
            }),
        });
        let puts = self.values.store(&mut written, mode);
        self.node.metrics.puts(puts.iter().zip(items).map(|(put, item)| (put, item.len, item.path)));
        let slots = puts.into_iter().map(|put| room.fit(put)).collect();
        let lent = self.lend_ahead(ahead);
        let lends = lent.is_some();
        answer.give(Reply::Committed { slots, ahead: lent }, &[])?;
        // While the client goes on, so that it does not wait for this the next time.
        if lends {
            self.prepared = self.reserve_ahead(ahead);
        }
        Ok(())
    }

    /// Lends memory for the next put, unless the client has such a grant already or it would take some from anybody.
    fn lend_ahead(&mut self, len: u64) -> Option<Granted> {
        if len == 0 || self.ahead.is_some_and(|last| self.grants.contains(last)) {
            return None;
        }
        let number = self.grants.next().ok()?;
        let lent = match self.prepared.take() {
            Some(prepared) if prepared.grant.capacity() == len => prepared,
            _ => self.reserve_ahead(len)?,
        };
        let granted = granted(number, &lent.grant);
        self.grants.insert(lent);
        self.ahead = Some(number);
        Some(granted)
    }

    /// Memory that costs nobody anything, in an arena that the client has.
    fn reserve_ahead(&self, len: u64) -> Option<Lent> {
        let share = self.node.ahead.take(len)?;
        let grant = self.writer.reserve_idle(self.values.space(), len)?;
        self.writable.contains(&grant.arena().id()).then_some(Lent { grant, _share: Some(share) })
    }

    fn put_inline(&self, key: &str, meta: &[u8], bytes: &[u8], mode: Mode) -> Result<Put> {
        check_key(key)?;
        if self.keeps(key, mode) {
            return Ok(Put::AlreadyExists);
        }
        let mut grant = self.writer.reserve(self.values.space(), bytes.len() as u64)?;
        grant.write(0, bytes)?;
        self.store((grant, key, bytes.len() as u64, meta), mode)
    }

    /// Whether a put would keep what is there, as far as that is known before room is made.
    pub(super) fn keeps(&self, key: &str, mode: Mode) -> bool {
        self.values.keeps_which(&[key], mode) == [true]
    }

    /// Stores one value.
    pub(super) fn store(&self, written: Written<'_>, mode: Mode) -> Result<Put> {
        let verdict = self.values.store(&mut iter::once(Ok(written)), mode).pop();
        verdict.unwrap_or_else(|| Err(protocol("a put was left without a verdict")))
    }

    fn hold(&mut self, keys: &[&str], inline: u64, answer: Answer<'_>) -> io::Result<()> {
        let mut room = Room::for_slots(keys.len());
        let kept: Vec<_> = self
            .find(keys)
            .into_iter()
            .map(|found| {
                let kept = found.and_then(|object| self.keep(object, inline, &mut room));
                match &kept {
                    Ok(kept) => self.node.metrics.got(kept.route(), kept.object.len()),
                    Err(e) => self.node.metrics.count(Op::Get, None, e.label(), 1),
                }
                kept
            })
            .collect();
        let slots = kept.iter().map(|kept| kept.as_ref().map(Kept::as_held).map_err(Error::clone)).collect();
        answer.give(Reply::Held { slots }, &[])
    }

    fn keep(&mut self, object: Arc<Object>, inline: u64, room: &mut Room) -> Result<Kept> {
        if object.len() <= inline.min(INLINE_MAX as u64) {
            let mut bytes = vec![0; object.len() as usize];
            object.read(0, &mut bytes)?;
            let kept = Kept { object, how: How::Inline(bytes) };
            if room.fit(Ok(kept.as_held())).is_ok() {
                return Ok(kept);
            }
            return self.share(kept.object, room);
        }
        self.share(object, room)
    }

    fn share(&mut self, object: Arc<Object>, room: &mut Room) -> Result<Kept> {
        let kept = Kept { how: How::Shared(self.holds.next()?), object };
        room.fit(Ok(kept.as_held()))?;
        self.holds.insert(Arc::clone(&kept.object));
        Ok(kept)
    }

    /// The values of these keys, which count as used from now on.
    pub(super) fn find(&self, keys: &[&str]) -> Vec<Result<Arc<Object>>> {
        checked(keys, |keys| self.values.find(keys, &self.writer))
    }

    fn describe(&self, keys: &[&str], answer: Answer<'_>) -> io::Result<()> {
        let found = checked(keys, |keys| self.values.describe(keys));
        for found in &found {
            self.node.metrics.found(Op::Describe, found.as_ref().map(|_| true));
        }
        answer.give(Reply::Described { slots: descriptions(&found, Told::described) }, &[])
    }

    /// Does something to each key that is there, and counts how many were.
    fn each(
        &self,
        op: Op,
        keys: &[&str],
        act: impl FnOnce(&[&str]) -> Vec<Result<bool>>,
    ) -> Vec<Result<bool>> {
        let mut room = Room::for_slots(keys.len());
        let found = checked(keys, act).into_iter();
        found
            .map(|found| {
                self.node.metrics.found(op, found.as_ref().copied());
                room.fit(found)
            })
            .collect()
    }

    fn list(&self, prefix: &str, after: Option<&str>, limit: u64, answer: Answer<'_>) -> io::Result<()> {
        let most = usize::try_from(limit).unwrap_or(usize::MAX).min(PAGE_MAX);
        let entries = match self.values.list(prefix, after, most + 1) {
            Ok(entries) => entries,
            Err(e) => return self.refuse(Op::List, answer, e),
        };
        let mut left = BODY_MAX;
        let page: Vec<_> = entries
            .iter()
            .take(most)
            .map(|entry| (entry.key.as_str(), entry.len))
            .take_while(|entry| match left.checked_sub(encoded_len(entry)) {
                Some(rest) => {
                    left = rest;
                    true
                }
                None => false,
            })
            .collect();
        let more = page.len() < entries.len();
        answer.give(Reply::Listed { page, more }, &[])
    }

    fn metrics(&mut self, offset: u64, answer: Answer<'_>) -> io::Result<()> {
        if offset == 0 {
            self.metrics_text = self.node.metrics.render();
        }
        let len = self.metrics_text.len();
        let rest = usize::try_from(offset).ok().and_then(|offset| self.metrics_text.get(offset..));
        match rest {
            Some(rest) => {
                let text = &rest[..rest.floor_char_boundary(BODY_MAX)];
                answer.give(Reply::Metrics { text, len: len as u64 }, &[])
            }
            None => answer.refuse(Error::InvalidRange { offset, len: 0, limit: len as u64 }),
        }
    }
}

/// A value found for a client, and how it is passed on.
struct Kept {
    object: Arc<Object>,
    how: How,
}

enum How {
    Shared(u64),
    Inline(Vec<u8>),
}

impl Kept {
    fn as_held(&self) -> Held<'_> {
        let object = &self.object;
        match &self.how {
            How::Inline(bytes) => Held::Inline { bytes, meta: object.meta() },
            How::Shared(hold) => Held::Shared {
                hold: *hold,
                arena: object.arena().id().0.into(),
                offset: object.offset(),
                len: object.len(),
                meta: object.meta(),
            },
        }
    }

    fn route(&self) -> Route {
        match self.how {
            How::Shared(_) => Route::Shared,
            How::Inline(_) => Route::Inline,
        }
    }
}

fn granted(number: u64, grant: &Grant) -> Granted {
    Granted {
        grant: number,
        arena: grant.arena().id().0.into(),
        offset: grant.offset(),
        capacity: grant.capacity(),
    }
}

/// Descriptions of values, as many as fit an answer.
pub(super) fn descriptions<'f, F>(
    found: &'f [Result<F>],
    described: impl Fn(&'f F) -> Described<'f>,
) -> Vec<Result<Described<'f>>> {
    let mut room = Room::for_slots(found.len());
    found.iter().map(|found| room.fit(found.as_ref().map(&described).map_err(Error::clone))).collect()
}

/// Asks for those keys that are such, and refuses the others.
fn checked<R>(keys: &[&str], ask: impl FnOnce(&[&str]) -> Vec<Result<R>>) -> Vec<Result<R>> {
    if keys.iter().all(|key| check_key(key).is_ok()) {
        return ask(keys);
    }
    let good: Vec<&str> = keys.iter().copied().filter(|key| check_key(key).is_ok()).collect();
    let mut answers = ask(&good).into_iter();
    let unanswered = || Err(protocol("a key was left without an answer"));
    keys.iter().map(|key| check_key(key).and_then(|()| answers.next().unwrap_or_else(unanswered))).collect()
}

//! Reading: heads first, then the bodies of larger values, straight into registered memory or through staging.

use std::{ffi::CString, ops::Range, sync::Arc};

use hal::{Bound, Deadline, Device, Region};

use super::{
    MooncakeEngine, Way,
    ffi::Object,
    head::{self, HEAD_MAX, Id},
    refusal,
    session::Session,
    staging::Block,
};
use crate::{
    arrow::Slot,
    engine::{Description, View},
    error::{Error, Result},
    shm,
};

/// How often a head is read again that was being replaced.
const READS: usize = 3;

/// What a head says, and where a small value's bytes lie.
pub(super) struct Found<D: Device> {
    pub(super) id: Id,
    pub(super) len: u64,
    pub(super) meta: Box<[u8]>,
    pub(super) inline: Option<(Arc<Block<D>>, Range<usize>)>,
}

impl<D: Device> Found<D> {
    fn description(&self) -> Description {
        Description { len: self.len, meta: self.meta.clone() }
    }

    pub(super) fn has_body(&self) -> bool {
        self.inline.is_none()
    }
}

/// Reads the heads of these names, at most [`Session::heads_at_once`].
pub(super) fn heads<D: Device>(
    session: &Arc<Session<D>>,
    names: &[CString],
    deadline: Deadline,
) -> Vec<Result<Found<D>>> {
    let mut found = read_heads(session, names, deadline);
    for _ in 1..READS {
        // Replaced while it was read, or no head at all: a second look tells. What took too long may go faster now.
        let torn = |slot: &Result<Found<D>>| match slot {
            Err(Error::Mooncake(e)) => e.vendor_code() == Some(refusal::LEASE_EXPIRED),
            other => matches!(other, Err(Error::Protocol { .. })),
        };
        let again: Vec<usize> = (0..found.len()).filter(|&i| torn(&found[i])).collect();
        if again.is_empty() {
            break;
        }
        let names: Vec<CString> = again.iter().map(|&i| names[i].clone()).collect();
        for (i, slot) in again.into_iter().zip(read_heads(session, &names, deadline)) {
            found[i] = slot;
        }
    }
    found
}

fn read_heads<D: Device>(
    session: &Arc<Session<D>>,
    names: &[CString],
    deadline: Deadline,
) -> Vec<Result<Found<D>>> {
    if names.is_empty() {
        return Vec::new();
    }
    let read = session.block(names.len() * HEAD_MAX, deadline).and_then(|block| {
        let objects: Vec<Object> = names
            .iter()
            .enumerate()
            .map(|(i, name)| Object {
                name: name.clone(),
                addr: block.region().addr + i * HEAD_MAX,
                len: HEAD_MAX,
            })
            .collect();
        session.run("get", deadline, move |session, bound| {
            // SAFETY: the block is this job's, and each object has its own part of it.
            let lens = unsafe { session.store().get(bound, &objects) };
            (Arc::new(block), lens)
        })
    });
    let (block, lens) = match read {
        Ok(read) => read,
        Err(e) => return names.iter().map(|_| Err(e.clone())).collect(),
    };
    let parse = |(i, len): (usize, hal::Result<usize>)| {
        let (start, len) = (i * HEAD_MAX, len.map_err(refusal::error)?);
        let head = head::read(&block.bytes()[start..start + len])?;
        let inline = head.inline.map(|bytes| (Arc::clone(&block), start + len - bytes.len()..start + len));
        Ok(Found { id: head.id, len: head.len, meta: head.meta.into(), inline })
    };
    lens.into_iter().enumerate().map(parse).collect()
}

/// Which of these names exist.
pub(super) fn exist<D: Device>(
    session: &Arc<Session<D>>,
    names: Vec<CString>,
    deadline: Deadline,
) -> Vec<Result<bool>> {
    if names.is_empty() {
        return Vec::new();
    }
    let count = names.len();
    let asked = session.run("exists", deadline, move |session, bound| session.store().exist(bound, &names));
    match asked {
        Ok(answers) => answers.into_iter().map(|answer| answer.map_err(refusal::error)).collect(),
        Err(e) => (0..count).map(|_| Err(e.clone())).collect(),
    }
}

/// Reads bodies, each whole, into the memory that its keeper keeps; the keepers, and what became of each.
///
/// # Safety
/// A keeper must keep its object's memory allocated and registered, and nobody else may touch that, until it is dropped or
/// returned: the job goes on with it where its caller has given up.
pub(super) unsafe fn bodies<D: Device, K: Send + 'static>(
    session: &Arc<Session<D>>,
    planned: Vec<(Object, K)>,
    deadline: Deadline,
) -> Result<Vec<(K, Result<()>)>> {
    session.run("get", deadline, move |session, bound| {
        let (objects, keepers): (Vec<Object>, Vec<K>) = planned.into_iter().unzip();
        // SAFETY: the job owns the keepers; the caller promises the rest.
        let mut got = unsafe { session.store().get(bound, &objects) };
        for _ in 1..READS {
            let late = |got: &hal::Result<usize>| {
                got.as_ref().is_err_and(|e| e.vendor_code() == Some(refusal::LEASE_EXPIRED))
            };
            let again: Vec<usize> = (0..got.len()).filter(|&i| late(&got[i])).collect();
            let some: Vec<Object> = again.iter().map(|&i| objects[i].clone()).collect();
            // SAFETY: as above.
            for (i, answer) in again.into_iter().zip(unsafe { session.store().get(bound, &some) }) {
                got[i] = answer;
            }
        }
        // Removed meanwhile, its place may have been another value's before the last byte was read.
        let names: Vec<CString> = objects.iter().map(|object| object.name.clone()).collect();
        let there = session.store().exist(bound, &names);
        let outcome = |((object, got), there): ((&Object, hal::Result<usize>), hal::Result<bool>)| match (
            got.map_err(refusal::error)?,
            there.map_err(refusal::error)?,
        ) {
            (_, false) => Err(Error::NotFound),
            (len, true) if len == object.len => Ok(()),
            (len, true) => {
                let reason = format!("a body of {} bytes came with {len}", object.len);
                Err(Error::Protocol { reason })
            }
        };
        let outcomes: Vec<Result<()>> = objects.iter().zip(got).zip(there).map(outcome).collect();
        keepers.into_iter().zip(outcomes).collect()
    })
}

impl<D: Device> MooncakeEngine<D> {
    /// What is stored under these keys, at most as many as heads are read at once. A value whose body was evicted is gone.
    pub(super) fn look(
        &self,
        session: &Arc<Session<D>>,
        keys: &[&str],
        deadline: Deadline,
    ) -> Vec<Result<Found<D>>> {
        let names: Vec<CString> = keys.iter().map(|key| self.names.head(key)).collect();
        let mut found = heads(session, &names, deadline);
        let with_body: Vec<(usize, Id)> = found
            .iter()
            .enumerate()
            .filter_map(|(i, slot)| slot.as_ref().ok().filter(|found| found.has_body()).map(|f| (i, f.id)))
            .collect();
        let bodies = with_body.iter().map(|&(i, id)| self.names.body(keys[i], id)).collect();
        for ((i, _), there) in with_body.into_iter().zip(exist(session, bodies, deadline)) {
            match there {
                Ok(true) => {}
                Ok(false) => found[i] = Err(Error::NotFound),
                Err(e) => found[i] = Err(e),
            }
        }
        found
    }

    pub(super) fn describe_some(
        &self,
        keys: &[&str],
        deadline: Deadline,
    ) -> Result<Vec<Result<Description>>> {
        let session = self.session()?;
        let found = self.look(&session, keys, deadline).into_iter();
        Ok(found.map(|slot| slot.map(|found| found.description())).collect())
    }

    pub(super) fn fill_some(
        &self,
        bound: &Bound<'_, D>,
        slots: &[Slot<D>],
        deadline: Deadline,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<Vec<Result<Description>>> {
        let session = self.session()?;
        let names: Vec<CString> = slots.iter().map(|slot| self.names.head(slot.key())).collect();
        let mut verdicts = Vec::with_capacity(slots.len());
        let mut bodies: Vec<(usize, Id, usize)> = Vec::new();
        for (i, (slot, found)) in slots.iter().zip(heads(&session, &names, deadline)).enumerate() {
            verdicts.push(found.and_then(|found| {
                let room = slot.region().len as u64;
                if room < found.len {
                    return Err(Error::TooSmall { need: found.len });
                }
                match &found.inline {
                    Some((block, range)) => {
                        let from = block.region().part(range.start, range.len())?;
                        copy_out(bound, slot, from, deadline, progress)?;
                        session.counters.gets[0].count(found.len);
                    }
                    // It fits the room, so it fits the address space.
                    None => bodies.push((i, found.id, found.len as usize)),
                }
                Ok(found.description())
            }));
        }
        let mut rest = &bodies[..];
        while !rest.is_empty() {
            let (done, failed) = self.fill_bodies(&session, bound, slots, rest, deadline, progress);
            for (i, e) in failed {
                verdicts[i] = Err(e);
            }
            rest = &rest[done..];
        }
        Ok(verdicts)
    }

    /// Fills as many slots from their bodies as staging has room for, at least one; how many were dealt with, and which
    /// of them failed.
    fn fill_bodies(
        &self,
        session: &Arc<Session<D>>,
        bound: &Bound<'_, D>,
        slots: &[Slot<D>],
        bodies: &[(usize, Id, usize)],
        deadline: Deadline,
        progress: &(dyn Fn(u64) + Sync),
    ) -> (usize, Vec<(usize, Error)>) {
        let (mut done, mut failed, mut taken, mut planned) = (0, Vec::new(), Vec::new(), Vec::new());
        for &(i, id, len) in bodies {
            let way = match self.way(session, &slots[i], len, planned.is_empty(), deadline) {
                Ok(Some(way)) => Ok(way),
                Ok(None) => break,
                Err(e) => Err(e),
            };
            done += 1;
            match way {
                Ok(way) => {
                    let name = self.names.body(slots[i].key(), id);
                    taken.push((i, len));
                    planned.push((Object { name, addr: way.addr(), len }, way));
                }
                Err(e) => failed.push((i, e)),
            }
        }
        // SAFETY: a way keeps its memory registered and allocated; a block is its own, and of what is filled directly the
        // caller promises that nobody else touches it.
        let read = match unsafe { self::bodies(session, planned, deadline) } {
            Ok(read) => read,
            Err(e) => {
                failed.extend(taken.into_iter().map(|(i, _)| (i, e.clone())));
                return (done, failed);
            }
        };
        for ((i, len), (way, outcome)) in taken.into_iter().zip(read) {
            let len = len as u64;
            let outcome = outcome.and_then(|()| {
                session.counters.gets[usize::from(way.is_direct())].count(len);
                match &way {
                    Way::Staged(block) => copy_out(bound, &slots[i], block.region(), deadline, progress)?,
                    _ => progress(len),
                }
                Ok(())
            });
            failed.extend(outcome.err().map(|e| (i, e)));
        }
        (done, failed)
    }

    /// Values in memory of their own: Mooncake lends none of its.
    pub(super) fn view_some(&self, keys: &[&str], deadline: Deadline) -> Result<Vec<Result<View>>> {
        let session = self.session()?;
        let names: Vec<CString> = keys.iter().map(|key| self.names.head(key)).collect();
        let found = heads(&session, &names, deadline);
        let view = |(key, found): (&&str, Result<Found<D>>)| {
            let found = found?;
            if let Some((block, range)) = &found.inline {
                session.counters.gets[0].count(found.len);
                return Ok(owned(block.bytes()[range.clone()].into(), found.meta));
            }
            let len = usize::try_from(found.len)
                .map_err(|_| Error::OutOfMemory { asked: found.len, available: 0 })?;
            let block = session.block(len, deadline)?;
            let object = Object { name: self.names.body(key, found.id), addr: block.region().addr, len };
            // SAFETY: the block is this call's, and registered.
            let read = unsafe { bodies(&session, vec![(object, block)], deadline) }?.pop();
            let (block, outcome) = read.ok_or(Error::NotFound)?;
            outcome?;
            session.counters.gets[0].count(found.len);
            Ok(match block.into_memory() {
                // SAFETY: the memory is private, and the view keeps it.
                Ok(memory) => unsafe { View::new(memory.as_ptr(), len, found.meta, Arc::new(memory)) },
                Err(block) => owned(block.bytes().into(), found.meta),
            })
        };
        Ok(keys.iter().zip(found).map(view).collect())
    }
}

fn owned(bytes: Box<[u8]>, meta: Box<[u8]>) -> View {
    let (start, len) = (bytes.as_ptr(), bytes.len());
    // SAFETY: the bytes stay where they are, unchanged, while the view keeps their box.
    unsafe { View::new(start, len, meta, Arc::new(bytes)) }
}

/// Copies the value at `from`, which is staging memory, to the slot.
fn copy_out<D: Device>(
    bound: &Bound<'_, D>,
    slot: &Slot<D>,
    from: Region,
    deadline: Deadline,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<()> {
    let to = slot.region().part(0, from.len)?;
    // SAFETY: a ready slot is allocated and nobody touches it until the get has returned; the block is this call's.
    unsafe { shm::copy_out(bound, slot, to, from, deadline, progress) }
}

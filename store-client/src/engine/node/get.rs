//! Gets and views: values that are held while they are copied, or looked at.

use std::{mem, sync::Arc};

use hal::{Bound, Deadline, Device, Region};
use parking_lot::Mutex;

use super::{
    NodeEngine,
    connection::{Connection, Fault, Taken, astray, counted},
    cut::{self, Cost, IpcMessage},
    import_refused,
    index::Found,
};
use crate::{
    arrow::{Ready, Route, Slot},
    engine::{Description, View},
    error::{Error, Result},
    shm::{self, Mapping},
    wire::{Fallback, INLINE_MAX, Reply, Request},
};

/// One call of [`Engine::get_into`](crate::Engine::get_into).
pub(super) struct GetCall<'a, D: Device> {
    pub(super) engine: &'a NodeEngine,
    pub(super) bound: &'a Bound<'a, D>,
    pub(super) batch: &'a Ready<D>,
    pub(super) deadline: Deadline,
    pub(super) progress: &'a (dyn Fn(u64) + Sync),
}

/// One for each slot of the batch, once it is known.
type Verdicts = Vec<Option<Result<Description>>>;

impl<D: Device> GetCall<'_, D> {
    /// Fills the batch; one verdict per slot.
    pub(super) fn run(&self) -> Vec<Result<Description>> {
        let mut verdicts: Verdicts = self.batch.slots().iter().map(|_| None).collect();
        self.fill_at_hand(&mut verdicts);
        if let Some(all) = all(&mut verdicts) {
            return all;
        }
        // What was filled before the daemon died stays filled.
        let outcome =
            self.engine.again("get", self.deadline, |connection| self.over(connection, &mut verdicts));
        let fail = || outcome.as_ref().err().cloned().unwrap_or_else(super::unsettled);
        verdicts.into_iter().map(|verdict| verdict.unwrap_or_else(|| Err(fail()))).collect()
    }

    /// Fills what is found without asking in a batch of host memory, for which there is nothing to tell or to wait for.
    fn fill_at_hand(&self, verdicts: &mut Verdicts) {
        if !self.batch.slots().iter().all(|slot| slot.route() == Route::Staging(Fallback::HOST)) {
            return;
        }
        let Ok(Some(connection)) = self.engine.alive() else { return };
        for (slot, verdict) in self.batch.slots().iter().zip(verdicts) {
            *verdict =
                Found::take(&connection, slot.key()).and_then(|found| self.copy_found(slot, found).ok());
        }
    }

    fn over(&self, connection: &Arc<Connection>, verdicts: &mut Verdicts) -> Result<(), Fault> {
        let open = (0..verdicts.len()).filter(|&i| verdicts[i].is_none());
        let by_ipc = |&i: &usize| matches!(self.slot(i).route(), Route::Ipc { .. }) && connection.imports();
        let (ipc, mut staged): (Vec<usize>, Vec<usize>) = open.partition(by_ipc);
        for &i in &staged {
            let why = match self.slot(i).route() {
                Route::Ipc { .. } => Fallback::NotNegotiated,
                Route::Staging(why) => why,
            };
            self.engine.warn_planned(why);
        }
        let mut rest = &ipc[..];
        while !rest.is_empty() {
            let (message, later) = rest.split_at(cut::first_ipc(self.batch, rest));
            self.ipc(connection, verdicts, message, &mut staged)?;
            rest = later;
        }
        let mut rest = &staged[..];
        while !rest.is_empty() {
            let chunk = cut::first(rest, cut::DESCRIPTIONS, |i| Cost::item(self.slot(i).key(), &[]));
            let (chunk, later) = rest.split_at(chunk);
            let mut chunk = chunk.to_vec();
            while !chunk.is_empty() {
                chunk = self.stage(connection, verdicts, &chunk)?;
            }
            rest = later;
        }
        Ok(())
    }

    /// Lets the daemon copy into the client's memory. Where it cannot, the slots are added to `staged`.
    fn ipc(
        &self,
        connection: &Connection,
        verdicts: &mut Verdicts,
        slots: &[usize],
        staged: &mut Vec<usize>,
    ) -> Result<(), Fault> {
        let IpcMessage { handles, items, descriptors } = IpcMessage::of(self.batch, slots);
        let request = Request::GetIpc { handles, items };
        let outcome = connection.call(request, &descriptors, self.deadline, |reply, _| match reply {
            Reply::Gets { slots: answers } => {
                let answers = counted(answers, slots.len())?;
                Ok(answers.into_iter().map(|slot| slot.map(Description::from)).collect())
            }
            _ => Err(astray()),
        });
        let answers: Vec<Result<Description>> = match outcome {
            Ok(answers) => answers,
            Err(Fault::Refused(e)) => slots.iter().map(|_| Err(e.clone())).collect(),
            Err(fault) => return Err(fault),
        };
        for (&i, answer) in slots.iter().zip(answers) {
            match answer {
                Err(e) if import_refused(&e) => {
                    self.engine.warn_once(Fallback::ImportRefused, &e);
                    staged.push(i);
                }
                answer => {
                    if let Ok(found) = &answer {
                        (self.progress)(found.len);
                    }
                    verdicts[i] = Some(answer);
                }
            }
        }
        Ok(())
    }

    /// Copies values out of shared memory; out of the answer where one has to be asked for and is small. Returns those for
    /// which the daemon has no room while others of the batch take it; they come next.
    fn stage(
        &self,
        connection: &Arc<Connection>,
        verdicts: &mut Verdicts,
        slots: &[usize],
    ) -> Result<Vec<usize>, Fault> {
        let mut missed = Vec::new();
        for &i in slots {
            match Found::take(connection, self.slot(i).key()) {
                Some(found) => match self.copy_found(self.slot(i), found) {
                    Ok(verdict) => verdicts[i] = Some(verdict),
                    // There is no mapping to be had; a small value comes in an answer.
                    Err(Fault::Refused(_)) => missed.push(i),
                    Err(fault) => return Err(fault),
                },
                None => missed.push(i),
            }
        }
        let slots = &missed[..];
        if slots.is_empty() {
            return Ok(Vec::new());
        }
        let inline = if slots.len() == 1 { INLINE_MAX as u64 } else { 0 };
        let keys = slots.iter().map(|&i| self.slot(i).key()).collect();
        let taken = match connection.hold(keys, inline, self.deadline) {
            Ok(taken) => taken,
            Err(Fault::Refused(e)) => slots.iter().map(|_| Err(e.clone())).collect(),
            Err(fault) => return Err(fault),
        };
        let holds = taken.iter().flatten().filter_map(|taken| match taken {
            Taken::Shared { hold, .. } => Some(*hold),
            Taken::Inline { .. } => None,
        });
        let _holds = Holds::new(connection, holds.collect());
        let any = taken.iter().any(Result::is_ok);
        let mut full = Vec::new();
        for (&i, taken) in slots.iter().zip(taken) {
            match taken {
                Ok(taken) => verdicts[i] = Some(self.deliver(connection, self.slot(i), taken)?),
                Err(Error::Full { .. }) if any => full.push(i),
                Err(e) => verdicts[i] = Some(Err(e)),
            }
        }
        Ok(full)
    }

    /// As [`deliver`](Self::deliver) for a value that was found without asking.
    fn copy_found(&self, slot: &Slot<D>, mut found: Found) -> Result<Result<Description>, Fault> {
        found.count();
        let len = found.len();
        if len > slot.region().len as u64 {
            return Ok(Err(Error::TooSmall { need: len }));
        }
        let from = found.for_copy(Some(self.deadline))?;
        let meta = found.take_meta();
        // SAFETY: `found` lives to the end of this function, and keeps the value mapped and held.
        Ok(unsafe { self.copy(slot, from, meta) })
    }

    /// Copies one value to where it belongs. What may fault is the connection; the rest is the slot's own verdict.
    fn deliver(
        &self,
        connection: &Connection,
        slot: &Slot<D>,
        taken: Taken,
    ) -> Result<Result<Description>, Fault> {
        let mapping;
        let (from, meta) = match &taken {
            Taken::Inline { bytes, meta } => {
                (Region::host(bytes.as_ptr().expose_provenance(), bytes.len()), meta)
            }
            Taken::Shared { len: 0, meta, .. } => (Region::host(0, 0), meta),
            // The destination is looked at first, so that nothing is mapped for nothing.
            Taken::Shared { len, .. } if *len > slot.region().len as u64 => {
                return Ok(Err(Error::TooSmall { need: *len }));
            }
            Taken::Shared { arena, offset, len, meta, .. } => {
                mapping = connection.for_copy(*arena, self.deadline)?;
                (connection.range(&mapping, *offset, *len)?, meta)
            }
        };
        // SAFETY: the value is ours, or mapped until the end of this function and held, so that nobody writes it.
        Ok(unsafe { self.copy(slot, from, meta.clone()) })
    }

    /// # Safety
    /// `from` must be allocated, and nobody may write it meanwhile.
    unsafe fn copy(&self, slot: &Slot<D>, from: Region, meta: Box<[u8]>) -> Result<Description> {
        let len = from.len as u64;
        let to = slot.region().part(0, from.len).map_err(|_| Error::TooSmall { need: len })?;
        // SAFETY: a ready slot is allocated, and nobody touches it until the get has returned; the caller promises the same
        // of `from`.
        unsafe { shm::copy_out(self.bound, slot, to, from, self.deadline, self.progress) }?;
        Ok(Description { len, meta })
    }

    fn slot(&self, i: usize) -> &Slot<D> {
        &self.batch.slots()[i]
    }
}

/// The verdicts, if there are all.
fn all(verdicts: &mut Verdicts) -> Option<Vec<Result<Description>>> {
    verdicts.iter().all(Option::is_some).then(|| mem::take(verdicts).into_iter().flatten().collect())
}

/// Views of smaller values are released a few at a time where they were taken together.
const LARGE: u64 = 64 << 10;
/// How many of them may wait for that.
const WAITING_MAX: usize = 64;

/// Holds of one answer that go back in one message, at the latest when this is dropped.
struct Holds {
    connection: Arc<Connection>,
    waiting: Mutex<Vec<u64>>,
}

impl Holds {
    fn new(connection: &Arc<Connection>, waiting: Vec<u64>) -> Self {
        Holds { connection: Arc::clone(connection), waiting: Mutex::new(waiting) }
    }
}

impl Drop for Holds {
    fn drop(&mut self) {
        self.connection.release(mem::take(self.waiting.get_mut()));
    }
}

/// What a view keeps: the value by its hold, and the mapping that it is seen through. With the connection it keeps the
/// hold alive whatever becomes of the client.
struct Hold {
    id: u64,
    len: u64,
    mapping: Option<Arc<Mapping>>,
    /// Dropped last, so that the last view of an answer sends what waits.
    answer: Arc<Holds>,
}

impl Drop for Hold {
    fn drop(&mut self) {
        // A message for each of many small values would cost more than they are worth.
        let mut waiting = self.answer.waiting.lock();
        waiting.push(self.id);
        if self.len >= LARGE || waiting.len() >= WAITING_MAX {
            let ready = mem::take(&mut *waiting);
            drop(waiting);
            self.answer.connection.release(ready);
        }
    }
}

/// Looks at the value of a key without asking for it, if that can be; without a deadline also not for its arena. Of what
/// fails the request will tell.
pub(super) fn at_hand(connection: &Arc<Connection>, key: &str, deadline: Option<Deadline>) -> Option<View> {
    let mut found = Found::take(connection, key)?;
    let region = found.for_view(deadline).ok()?;
    found.count();
    let start = match region.len {
        0 => std::ptr::dangling(),
        _ => std::ptr::with_exposed_provenance(region.addr),
    };
    let meta = found.take_meta();
    // SAFETY: the range lies in a mapping that `found` keeps, and the daemon leaves the bytes alone while it lives.
    Some(unsafe { View::new(start, region.len, meta, Arc::new(found)) })
}

/// Looks at the values of these keys, which fit one message.
pub(super) fn view(
    connection: &Arc<Connection>,
    keys: &[&str],
    deadline: Deadline,
) -> Result<Vec<Result<View>>, Fault> {
    let taken = connection.hold(keys.to_vec(), 0, deadline)?;
    let answer = Arc::new(Holds::new(connection, Vec::new()));
    // Before anything can fail, so that each hold goes back.
    let held: Vec<_> = taken
        .into_iter()
        .map(|slot| {
            slot.map(|taken| {
                let hold = match taken {
                    Taken::Shared { hold, len, .. } => {
                        Some(Hold { id: hold, len, mapping: None, answer: Arc::clone(&answer) })
                    }
                    Taken::Inline { .. } => None,
                };
                (taken, hold)
            })
        })
        .collect();
    held.into_iter()
        .map(|slot| match slot {
            Ok((taken, hold)) => look(connection, taken, hold, deadline).map(Ok),
            Err(e) => Ok(Err(e)),
        })
        .collect()
}

fn look(
    connection: &Connection,
    taken: Taken,
    hold: Option<Hold>,
    deadline: Deadline,
) -> Result<View, Fault> {
    Ok(match (taken, hold) {
        (Taken::Shared { arena, offset, len: len @ 1.., meta, .. }, Some(mut hold)) => {
            let mapping = connection.for_view(arena, deadline)?;
            let region = connection.range(&mapping, offset, len)?;
            hold.mapping = Some(mapping);
            let start = std::ptr::with_exposed_provenance(region.addr);
            // SAFETY: the range lies in a mapping that `hold` keeps, and the daemon leaves the bytes alone until `hold`
            // is released.
            unsafe { View::new(start, region.len, meta, Arc::new(hold)) }
        }
        (Taken::Shared { meta, .. }, hold) => {
            // SAFETY: there are no bytes.
            unsafe { View::new(std::ptr::dangling(), 0, meta, Arc::new(hold)) }
        }
        (Taken::Inline { bytes, meta }, _) => {
            let bytes = Arc::new(bytes);
            // SAFETY: the bytes are on the heap, unchanged, and live as long as what owns them.
            unsafe { View::new(bytes.as_ptr(), bytes.len(), meta, bytes) }
        }
    })
}

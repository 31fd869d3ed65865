//! A put along one engine: which slots go how, and what becomes of them when the daemon dies meanwhile.

use std::{borrow::Cow, collections::HashSet, ops::Range, slice, sync::Arc};

use hal::{Bound, Deadline, Device, Place, Region};

use super::{
    NodeEngine,
    connection::{Connection, Fault, astray, counted},
    cut::{self, IpcMessage},
    grant::Grant,
    import_refused, pause, pauses, stage, unsettled,
};
use crate::{
    arrow::{Ready, Route, Slot},
    error::{Error, Result},
    shm,
    store::{Mode, Put},
    wire::{CommitItem, Fallback, Path, Reply, Request},
};

const OP: &str = "put";

/// One call of [`Engine::put`](crate::Engine::put).
pub(super) struct PutCall<'a, D: Device> {
    pub(super) engine: &'a NodeEngine,
    pub(super) bound: &'a Bound<'a, D>,
    pub(super) batch: &'a Ready<D>,
    pub(super) mode: Mode,
    pub(super) deadline: Deadline,
    pub(super) progress: &'a (dyn Fn(u64) + Sync),
}

/// How far a batch has come.
#[derive(Default)]
pub(super) struct State {
    /// One for each slot of the batch, once it is known.
    verdicts: Vec<Option<Result<Put>>>,
    /// Slots whose import the daemon refused: they go by staging from then on.
    refused: HashSet<usize>,
    /// Slots whose request was sent and never answered. They must not be stored twice.
    pub(super) doubtful: Vec<usize>,
}

impl State {
    fn open(&self, slots: Range<usize>) -> Vec<usize> {
        slots.filter(|&i| self.verdicts[i].is_none()).collect()
    }

    pub(super) fn settle(&mut self, slots: &[usize], verdicts: impl IntoIterator<Item = Result<Put>>) {
        for (&i, verdict) in slots.iter().zip(verdicts) {
            self.verdicts[i] = Some(verdict);
        }
    }

    pub(super) fn fail(&mut self, slots: &[usize], e: &Error) {
        self.settle(slots, slots.iter().map(|_| Err(e.clone())));
    }
}

/// Values up to this many bytes are put inside of a message. A longer one is better written straight into granted memory,
/// which is one message too where the last put was of about the same size: measured, 2 KiB cost the same by both ways, and
/// 16 KiB half as much.
const INLINE_PUT_MAX: usize = 2048;

/// The longest value that memory is granted ahead for. Copying a longer one takes much longer than to ask, and takes longer
/// still into memory that is not the one that came free last, which is in the caches.
pub(super) const AHEAD_MAX: usize = 256 << 10;

impl<D: Device> PutCall<'_, D> {
    /// Stores the batch; one verdict per slot.
    pub(super) fn run(&self) -> Vec<Result<Put>> {
        let count = self.batch.slots().len();
        let mut state = State { verdicts: (0..count).map(|_| None).collect(), ..State::default() };
        for run in runs(self.batch) {
            self.run_of_slots(&mut state, run);
        }
        state.verdicts.into_iter().map(|verdict| verdict.unwrap_or_else(|| Err(unsettled()))).collect()
    }

    /// Stores some slots, if need be over several connections.
    fn run_of_slots(&self, state: &mut State, slots: Range<usize>) {
        let mut patience = pauses().take(super::RESENDS);
        let mut before: Option<(Arc<Connection>, String)> = None;
        loop {
            let connection = self.engine.connection(OP, self.deadline);
            if let Some((old, reason)) = before.take() {
                let same = connection.as_ref().map_or(true, |new| new.instance() == old.instance());
                let doubtful = std::mem::take(&mut state.doubtful);
                // The memory of another instance is gone, so what it may have stored is not there any more.
                if same {
                    state.fail(&doubtful, &Error::Disconnected { reason });
                }
            }
            let open = state.open(slots.clone());
            let connection = match connection {
                Ok(connection) => connection,
                Err(e) => return state.fail(&open, &e),
            };
            match self.over(&connection, state, &open) {
                Ok(()) => return,
                Err(Fault::Lost { reason, .. }) if pause(&mut patience, self.deadline) => {
                    before = Some((connection, reason));
                }
                Err(fault) => {
                    let doubtful = std::mem::take(&mut state.doubtful);
                    if let Fault::Lost { reason, .. } = &fault {
                        state.fail(&doubtful, &Error::Disconnected { reason: reason.clone() });
                    }
                    let e = fault.into_error(OP, self.engine.origin());
                    let open = state.open(slots);
                    return state.fail(&open, &e);
                }
            }
        }
    }

    /// Stores slots with distinct keys, or all by staging, over one connection.
    fn over(&self, connection: &Arc<Connection>, state: &mut State, slots: &[usize]) -> Result<(), Fault> {
        let by_ipc = |i: &usize| {
            let route = self.batch.slots()[*i].route();
            matches!(route, Route::Ipc { .. }) && connection.imports() && !state.refused.contains(i)
        };
        let (ipc, mut staged): (Vec<usize>, Vec<usize>) = slots.iter().partition(|i| by_ipc(i));
        let mut rest = &ipc[..];
        while !rest.is_empty() {
            let (message, later) = rest.split_at(cut::first_ipc(self.batch, rest));
            self.ipc(connection, state, message, &mut staged)?;
            rest = later;
        }
        if let [i] = staged[..] {
            let len = self.slot(i).region().len;
            if len <= INLINE_PUT_MAX {
                return self.inline(connection, state, i);
            }
            if len <= AHEAD_MAX
                && let Some(grant) = connection.take_spare(len as u64)
            {
                return self.granted(connection, state, i, grant);
            }
        }
        while !staged.is_empty() {
            staged = stage::stage(self, connection, state, &staged)?;
        }
        Ok(())
    }

    /// Lets the daemon copy these slots out of the client's memory. Where it cannot, they are added to `staged`.
    fn ipc(
        &self,
        connection: &Connection,
        state: &mut State,
        slots: &[usize],
        staged: &mut Vec<usize>,
    ) -> Result<(), Fault> {
        let IpcMessage { handles, items, descriptors } = IpcMessage::of(self.batch, slots);
        let request = Request::PutIpc { handles, items, mode: self.mode };
        let outcome = connection.call(request, &descriptors, self.deadline, |reply, _| match reply {
            Reply::Puts(verdicts) => counted(verdicts, slots.len()),
            _ => Err(astray()),
        });
        let verdicts = match self.answered(state, slots, outcome)? {
            Ok(verdicts) => verdicts,
            Err(e) => slots.iter().map(|_| Err(e.clone())).collect(),
        };
        for (&i, verdict) in slots.iter().zip(verdicts) {
            match verdict {
                Err(e) if import_refused(&e) => {
                    self.engine.warn_once(Fallback::ImportRefused, &e);
                    state.refused.insert(i);
                    staged.push(i);
                }
                verdict => {
                    if verdict.is_ok() {
                        (self.progress)(self.slot(i).region().len as u64);
                    }
                    state.verdicts[i] = Some(verdict);
                }
            }
        }
        Ok(())
    }

    /// Stores one small value in one message.
    fn inline(&self, connection: &Connection, state: &mut State, i: usize) -> Result<(), Fault> {
        let (slot, why) = (self.slot(i), self.fallback(state, i));
        // Lent until the answer is there: the request borrows the bytes, and its deadline is the caller's own.
        let outcome = slot.lend(|| {
            let bytes = self.bytes(slot)?;
            let request = Request::PutInline {
                key: slot.key(),
                meta: slot.meta(),
                bytes: &bytes,
                mode: self.mode,
                why,
            };
            Ok(connection.call(request, &[], self.deadline, |reply, _| match reply {
                Reply::Put(verdict) => Ok(verdict),
                _ => Err(astray()),
            }))
        });
        let verdict = match outcome {
            Ok(outcome) => self.answered(state, &[i], outcome)?.and_then(|verdict| verdict),
            Err(e) => Err(e),
        };
        if verdict.is_ok() {
            (self.progress)(slot.region().len as u64);
        }
        state.verdicts[i] = Some(verdict);
        Ok(())
    }

    /// Stores one value in memory that was granted ahead, in one message, which asks for as much again.
    fn granted(
        &self,
        connection: &Connection,
        state: &mut State,
        i: usize,
        mut grant: Grant,
    ) -> Result<(), Fault> {
        let verdict = match self.copy(i, &grant) {
            Ok(()) => {
                let (item, ahead) = (self.item(state, i, &grant), grant.region().len as u64);
                let outcome = connection.commit(&mut grant, item, self.mode, ahead, self.deadline);
                self.answered(state, &[i], outcome)?.and_then(|verdict| verdict)
            }
            Err(e) => Err(e),
        };
        state.verdicts[i] = Some(verdict);
        Ok(())
    }

    /// What is said of a slot that was copied to granted memory.
    pub(super) fn item(&self, state: &State, i: usize, grant: &Grant) -> CommitItem<'_> {
        let slot = self.slot(i);
        CommitItem {
            grant: grant.id(),
            key: slot.key(),
            meta: slot.meta(),
            len: slot.region().len as u64,
            path: Path::Staging(self.fallback(state, i)),
        }
    }

    /// The bytes of a slot that goes into a message.
    fn bytes(&self, slot: &Slot<D>) -> Result<Cow<'_, [u8]>> {
        let region = slot.region();
        match region.place {
            _ if region.len == 0 => Ok(Cow::Borrowed(&[])),
            Place::Host => {
                let start = std::ptr::with_exposed_provenance(region.addr);
                // SAFETY: a ready slot is allocated, and nobody writes it until the put has returned.
                Ok(Cow::Borrowed(unsafe { slice::from_raw_parts(start, region.len) }))
            }
            Place::Device(_) => {
                let mut bytes = vec![0; region.len];
                let to = Region::host(bytes.as_mut_ptr().expose_provenance(), bytes.len());
                // SAFETY: as above, and `bytes` is ours alone.
                unsafe { self.bound.copy(to, region) }?;
                Ok(Cow::Owned(bytes))
            }
        }
    }

    pub(super) fn copy(&self, i: usize, grant: &Grant) -> Result<()> {
        let slot = self.slot(i);
        // SAFETY: a ready slot is allocated and nobody writes it until the put has returned; the grant's memory is mapped
        // while the grant lives, and this call alone uses it.
        unsafe { shm::copy_in(self.bound, slot, grant.region(), self.deadline, self.progress) }
    }

    /// Takes a refusal for the verdict that it is, and remembers what is not known.
    pub(super) fn answered<R>(
        &self,
        state: &mut State,
        slots: &[usize],
        outcome: Result<R, Fault>,
    ) -> Result<Result<R>, Fault> {
        match outcome {
            Ok(answer) => Ok(Ok(answer)),
            Err(Fault::Refused(e)) => Ok(Err(e)),
            Err(fault) => {
                // Replacing a value twice is as good as once.
                if matches!(fault, Fault::Lost { sent: true, .. }) && self.mode == Mode::Put {
                    state.doubtful.extend(slots);
                }
                Err(fault)
            }
        }
    }

    /// Why a slot goes by staging.
    pub(super) fn fallback(&self, state: &State, i: usize) -> Fallback {
        let why = match self.slot(i).route() {
            Route::Ipc { .. } if state.refused.contains(&i) => return Fallback::ImportRefused,
            Route::Ipc { .. } => Fallback::NotNegotiated,
            Route::Staging(why) => why,
        };
        self.engine.warn_planned(why);
        why
    }

    pub(super) fn slot(&self, i: usize) -> &Slot<D> {
        &self.batch.slots()[i]
    }
}

/// Cuts a batch into runs within which the order does not matter. Slots by IPC and by staging go in different messages, so
/// a key that repeats starts a new run; commits of one message alone are made in order.
fn runs<D: Device>(batch: &Ready<D>) -> Vec<Range<usize>> {
    let slots = batch.slots();
    if slots.iter().all(|slot| matches!(slot.route(), Route::Staging(_))) {
        let all = 0..slots.len();
        return vec![all];
    }
    distinct(slots.iter().map(Slot::key))
}

/// The longest runs without a repeated key.
fn distinct<'k>(keys: impl Iterator<Item = &'k str>) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    let mut seen = HashSet::new();
    for (i, key) in keys.enumerate() {
        match runs.last_mut() {
            Some(run) if seen.insert(key) => run.end = i + 1,
            _ => {
                seen = HashSet::from([key]);
                runs.push(i..i + 1);
            }
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::distinct;

    fn cut(keys: &[&str]) -> Vec<usize> {
        distinct(keys.iter().copied()).iter().map(|run| run.end).collect()
    }

    #[test]
    fn a_repeated_key_starts_a_new_run() {
        assert_eq!(cut(&["a", "b", "c"]), [3]);
        assert_eq!(cut(&["a", "b", "a", "a", "b"]), [2, 3, 5]);
        assert!(cut(&[]).is_empty());
    }
}

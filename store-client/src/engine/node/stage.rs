//! Puts through memory that the daemon grants: it is reserved, written, and committed.
//!
//! A batch of small values goes in parts, several of which are under way: the daemon grants the next part and commits the
//! last one while this one is copied.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use hal::{Device, Place};

use super::{
    connection::{Connection, Exchange, Fault},
    cut::{self, Cost},
    grant::{Grant, spend},
    put::{AHEAD_MAX, PutCall, State},
};
use crate::{
    error::{Error, Result},
    store::{Mode, Put},
    wire::Request,
};

/// Slots of a part of a batch that goes in parts.
const PART: usize = 32;

/// Requests under way then: the grants of two parts, and the commits of two. The answers to all of them fit the ring, so the
/// daemon does not wait for this side to read them.
const UNDER_WAY: u64 = 4;

/// Bytes of a batch that goes in parts, at most. No other thread's request comes between, so that must not take long; and of
/// a longer one, copying is what takes the time.
const OVERLAP_MAX: usize = 4 << 20;

/// Stores slots. Returns those for which there is no room while others of the batch take it; they come next.
pub(super) fn stage<D: Device>(
    call: &PutCall<'_, D>,
    connection: &Arc<Connection>,
    state: &mut State,
    slots: &[usize],
) -> Result<Vec<usize>, Fault> {
    let regions = || slots.iter().map(|&i| call.slot(i).region());
    // A copy by a driver may hang.
    let overlaps = slots.len() > PART
        && regions().all(|region| region.place == Place::Host)
        && regions().map(|region| region.len).sum::<usize>() <= OVERLAP_MAX;
    let (most, part) = if overlaps { (UNDER_WAY, PART) } else { (1, cut::VERDICTS) };
    // What the caller is told is told when the line is free: it may make it ask the daemon something.
    let copied = AtomicU64::new(0);
    let count = |bytes| _ = copied.fetch_add(bytes, Ordering::Relaxed);
    let report = call.progress;
    let call = &PutCall { progress: if overlaps { &count } else { report }, ..*call };
    let exchange = connection.exchange(most, call.deadline);
    let (under_way, full, behind) = (VecDeque::new(), Vec::new(), Vec::new());
    let mut staging = Staging { call, connection, state, exchange, under_way, full, behind, any: false };
    let outcome = staging.run(slots, part);
    let Staging { exchange, under_way, full, behind, any, state, .. } = staging;
    drop(exchange);
    if overlaps {
        report(copied.load(Ordering::Relaxed));
    }
    if let Err(fault) = outcome {
        for step in under_way {
            let Step::Commit { slots, mut grants } = step else { continue };
            // It was sent, and it is not known how far it came.
            spend(&mut grants, &Ok::<_, Fault>(()));
            if matches!(fault, Fault::Lost { .. }) && call.mode == Mode::Put {
                state.doubtful.extend(slots);
            }
        }
        return Err(fault);
    }
    let mut next = behind;
    if any || full.is_empty() || connection.drop_spare() {
        next.extend(full.into_iter().map(|(i, _)| i));
        next.sort_unstable();
    } else {
        for (i, e) in full {
            state.fail(&[i], &e);
        }
    }
    Ok(next)
}

struct Staging<'s, 'a, D: Device> {
    call: &'s PutCall<'a, D>,
    connection: &'s Arc<Connection>,
    state: &'s mut State,
    exchange: Exchange<'s>,
    /// What was asked, in order, and is not answered.
    under_way: VecDeque<Step<'s>>,
    /// Slots without room, and what the daemon said.
    full: Vec<(usize, Error)>,
    /// Slots whose key is that of an earlier one without room.
    behind: Vec<usize>,
    /// Whether any slot made use of the room that there was.
    any: bool,
}

enum Step<'s> {
    Reserve(&'s [usize]),
    Commit { slots: Vec<usize>, grants: Vec<Grant> },
}

impl<'s, D: Device> Staging<'s, '_, D> {
    fn run(&mut self, slots: &'s [usize], part: usize) -> Result<(), Fault> {
        let mut rest = slots;
        loop {
            while !rest.is_empty() && self.exchange.has_room() && self.reserving() < 2 {
                let cost = |i| Cost::item(self.call.slot(i).key(), self.call.slot(i).meta());
                let (next, later) = rest.split_at(cut::first(rest, part, cost));
                self.reserve(next)?;
                rest = later;
            }
            match self.under_way.pop_front() {
                Some(Step::Reserve(part)) => self.reserved(part)?,
                Some(Step::Commit { slots, grants }) => self.committed(&slots, grants)?,
                None => return Ok(()),
            }
        }
    }

    /// Bytes to be granted ahead: a put of one value is probably followed by another one like it.
    fn ahead(&self) -> u64 {
        match self.call.batch.slots() {
            [slot] if slot.region().len <= AHEAD_MAX => slot.region().len as u64,
            _ => 0,
        }
    }

    fn reserving(&self) -> usize {
        self.under_way.iter().filter(|step| matches!(step, Step::Reserve(_))).count()
    }

    fn lens(&self, slots: &[usize]) -> Vec<u64> {
        slots.iter().map(|&i| self.call.slot(i).region().len as u64).collect()
    }

    fn reserve(&mut self, slots: &'s [usize]) -> Result<(), Fault> {
        let unless = match self.call.mode {
            Mode::Put => slots.iter().map(|&i| self.call.slot(i).key()).collect(),
            Mode::Upsert => Vec::new(),
        };
        let request = Request::Reserve { lens: self.lens(slots), unless };
        match self.exchange.ask(request, &[]) {
            Ok(()) => self.under_way.push_back(Step::Reserve(slots)),
            Err(Fault::Refused(e)) => self.state.fail(slots, &e),
            Err(fault) => return Err(fault),
        }
        Ok(())
    }

    fn reserved(&mut self, slots: &[usize]) -> Result<(), Fault> {
        let lens = self.lens(slots);
        match self.exchange.answer(|reply, _| self.connection.reserved(reply, &lens)) {
            Ok(grants) => self.fill(slots, grants),
            Err(Fault::Refused(e)) => {
                self.state.fail(slots, &e);
                Ok(())
            }
            Err(fault) => Err(fault),
        }
    }

    /// Writes what was granted, and sends the commit.
    fn fill(&mut self, slots: &[usize], granted: Vec<Result<Option<Grant>>>) -> Result<(), Fault> {
        let (mut written, mut grants) = (Vec::with_capacity(slots.len()), Vec::with_capacity(slots.len()));
        for (&i, grant) in slots.iter().zip(granted) {
            match grant {
                Err(e @ Error::Full { .. }) => self.full.push((i, e)),
                // That one must be stored first, or fail. Its own room is found again next time.
                Ok(_) if self.is_behind(i) => self.behind.push(i),
                Ok(None) => {
                    self.any = true;
                    self.state.settle(&[i], [Ok(Put::AlreadyExists)]);
                }
                Ok(Some(grant)) => {
                    self.any = true;
                    match self.call.copy(i, &grant) {
                        Ok(()) => {
                            written.push(i);
                            grants.push(grant);
                        }
                        Err(e) => self.state.fail(&[i], &e),
                    }
                }
                Err(e) => self.state.fail(&[i], &e),
            }
        }
        if written.is_empty() {
            return Ok(());
        }
        self.commit(written, grants)
    }

    /// Whether there was no room for an earlier slot of the same key.
    fn is_behind(&self, i: usize) -> bool {
        let key = |i: usize| self.call.slot(i).key();
        self.full.iter().any(|(earlier, _)| key(*earlier) == key(i))
    }

    fn commit(&mut self, slots: Vec<usize>, grants: Vec<Grant>) -> Result<(), Fault> {
        let items = slots.iter().zip(&grants).map(|(&i, grant)| self.call.item(self.state, i, grant));
        let request = Request::Commit { items: items.collect(), mode: self.call.mode, ahead: self.ahead() };
        match self.exchange.ask(request, &[]) {
            Ok(()) => self.under_way.push_back(Step::Commit { slots, grants }),
            Err(Fault::Refused(e)) => self.state.fail(&slots, &e),
            Err(fault) => return Err(fault),
        }
        Ok(())
    }

    fn committed(&mut self, slots: &[usize], mut grants: Vec<Grant>) -> Result<(), Fault> {
        let outcome = self.exchange.answer(|reply, _| self.connection.committed(reply, slots.len()));
        spend(&mut grants, &outcome);
        match self.call.answered(self.state, slots, outcome)? {
            Ok(verdicts) => self.state.settle(slots, verdicts),
            Err(e) => self.state.fail(slots, &e),
        }
        Ok(())
    }
}

//! Answers, and how they are kept within one message.

use std::{io, mem, os::fd::BorrowedFd, time::Duration};

use hal::Deadline;
use serde::Serialize;

use crate::{
    error::{Error, Result},
    wire::{self, Link, MESSAGE_DESCRIPTORS_MAX, MESSAGE_MAX, Reply, SLOTS_MAX},
};

/// A client that does not read its answers for this long is served no more.
const SEND_LIMIT: Duration = Duration::from_secs(5);

/// Bytes of an answer for all that is not a slot: its head, a grant ahead, the arenas beside the grants.
const HEAD: usize = 64 + 20 * MESSAGE_DESCRIPTORS_MAX;

/// Bytes that every slot has; the verdicts that the daemon itself makes are no longer.
const SLOT: usize = 48;

/// Bytes for the slots of one answer, or for its text.
pub(super) const BODY_MAX: usize = MESSAGE_MAX - HEAD;

const _: () = assert!(SLOTS_MAX * SLOT <= BODY_MAX);

/// The one answer that a request gets; none where its `id` is 0.
#[derive(Debug)]
pub(super) struct Answer<'s> {
    link: &'s mut Link,
    id: u64,
    buf: &'s mut Vec<u8>,
}

impl<'s> Answer<'s> {
    pub(super) fn new(link: &'s mut Link, id: u64, buf: &'s mut Vec<u8>) -> Self {
        Answer { link, id, buf }
    }

    /// Sends the answer.
    ///
    /// *Errors*: `TimedOut` where the client did not read it in time; it is to be given up then.
    pub(super) fn give(self, reply: Reply<'_>, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        if self.id == 0 {
            return Ok(());
        }
        self.buf.clear();
        let answer = wire::Answer { id: self.id, reply };
        *self.buf = postcard::to_extend(&answer, mem::take(self.buf)).map_err(io::Error::other)?;
        // Nearly always there is room, and no need to look at the clock.
        if fds.is_empty() && self.link.try_send(self.buf)? {
            return Ok(());
        }
        self.link.send(self.buf, fds, Deadline::after(SEND_LIMIT))
    }

    /// Refuses the request as a whole.
    pub(super) fn refuse(self, e: Error) -> io::Result<()> {
        self.give(Reply::Refused(e), &[])
    }
}

/// The room that an answer has for slots beyond the few bytes that each of them has anyway.
#[derive(Debug)]
pub(super) struct Room {
    left: usize,
}

impl Room {
    /// The room of an answer with this many slots, at most [`SLOTS_MAX`].
    pub(super) fn for_slots(count: usize) -> Self {
        Room { left: BODY_MAX.saturating_sub(count * SLOT) }
    }

    /// Passes a slot on if there is room for it.
    ///
    /// *Errors*: [`Error::ResourceExhausted`], which itself always fits.
    pub(super) fn fit<T: Serialize>(&mut self, slot: Result<T>) -> Result<T> {
        match self.left.checked_sub(encoded_len(&slot).saturating_sub(SLOT)) {
            Some(left) => {
                self.left = left;
                slot
            }
            None => Err(Error::ResourceExhausted { what: "message size".into() }),
        }
    }
}

/// Bytes of `value` in a message.
pub(super) fn encoded_len<T: Serialize>(value: &T) -> usize {
    // What cannot be encoded fits nowhere.
    postcard::serialize_with_flavor(value, postcard::ser_flavors::Size::default()).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_batch_of_the_worst_slots_still_fits_a_message() {
        let mut room = Room::for_slots(SLOTS_MAX);
        let slots: Vec<Result<u64>> = (0..SLOTS_MAX)
            .map(|_| room.fit(Err(Error::InvalidArgument { what: "x".repeat(1000) })))
            .collect();
        assert!(matches!(slots[0], Err(Error::InvalidArgument { .. })));
        assert!(matches!(slots[SLOTS_MAX - 1], Err(Error::ResourceExhausted { .. })));
        assert!(encoded_len(&slots) <= BODY_MAX);
    }
}

//! How messages go over a connection: by the socket at first, by the ring once there is one.
//!
//! With a ring, all messages go by it, in order. The socket is left with what only a socket can do: it is the bell that
//! wakes a peer that sleeps, it carries descriptors, and its end is the death signal. Who waits looks at the ring for a
//! short while, then says so there and sleeps in a receive from the socket, so that nothing runs while nothing is said. A
//! bell is one byte; the descriptors of a message ride beside a bell that is sent before the message.

use std::{
    hint, io,
    os::fd::{BorrowedFd, OwnedFd},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use hal::Deadline;

use super::{
    message::MESSAGE_MAX,
    ring::{Record, Ring},
    socket::Socket,
};

#[cfg(test)]
mod tests;

const BELL: &[u8] = &[1];

/// How long one side looks for the other's next message before it sleeps: about twice what it takes to be woken, so that
/// it meets one that has to be woken first.
///
/// It does not yield meanwhile. On a processor that others keep busy, who yields waits out their slices: 4 ms for a put of
/// 4 KiB were measured on Linux 6.18. Who sleeps is woken at once.
const LOOK_MAX: Duration = Duration::from_micros(50);

/// How long it looks where looking was in vain, as it is where both share one processor.
const LOOK_MIN: Duration = Duration::from_micros(1);

/// So many looks in vain are given the whole time, and then one of so many: things may have changed.
const FAILURES: u32 = 4;
const RETRY: u32 = 32;

/// Looks between two at the clock.
const LOOKS: u32 = 16;

/// Bells that are thrown away in search of one with descriptors. An honest peer leaves one or two.
const BELLS_MAX: usize = 1024;

/// How long a producer sleeps before it looks for room again, which a peer that keeps reading always has.
const FULL: Duration = Duration::from_millis(1);

/// One end of a connection.
#[derive(Debug)]
pub(crate) struct Link {
    socket: Arc<Socket>,
    ring: Option<Ring>,
    /// Looks in vain, since one was not.
    in_vain: u32,
    /// Descriptors whose message has not been seen yet.
    early: Vec<OwnedFd>,
}

impl Link {
    pub(crate) fn new(socket: Arc<Socket>) -> Self {
        Link { socket, ring: None, in_vain: 0, early: Vec::new() }
    }

    /// Whether messages go by a ring.
    pub(crate) fn has_ring(&self) -> bool {
        self.ring.is_some()
    }

    /// From the next message on, this ring is used.
    pub(crate) fn use_ring(&mut self, ring: Ring) {
        self.ring = Some(ring);
    }

    /// Sends one message with descriptors beside it, and waits until `deadline` for the peer to make room.
    ///
    /// *Errors*: `TimedOut` when it made none; `BrokenPipe` when it is gone, where that shows; `InvalidData` where the
    /// peer has garbled the ring.
    pub(crate) fn send(
        &mut self,
        bytes: &[u8],
        fds: &[BorrowedFd<'_>],
        deadline: Deadline,
    ) -> io::Result<()> {
        let Some(ring) = &mut self.ring else { return self.socket.send(bytes, fds, deadline) };
        while ring.room(bytes.len())?.is_none() {
            if self.socket.is_shut() || self.socket.has_peer_ended()? {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            if deadline.is_passed() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            thread::sleep(FULL);
        }
        if !fds.is_empty() {
            self.socket.send(BELL, fds, deadline)?;
        }
        ring.push(bytes, !fds.is_empty())?;
        self.bell();
        Ok(())
    }

    /// Sends one message if the peer has room for it right now; whether it was sent.
    pub(crate) fn try_send(&mut self, bytes: &[u8]) -> io::Result<bool> {
        let Some(ring) = &mut self.ring else { return self.socket.try_send(bytes) };
        let pushed = ring.push(bytes, false)?;
        self.bell();
        Ok(pushed)
    }

    /// Receives one message into `buf[..n]`, and the descriptors beside it into `fds`. `n` is 0 when the peer has ended,
    /// and then only. `buf` is made long enough once; what lies behind `n` in it is left from earlier messages.
    ///
    /// *Errors*: `TimedOut`; `InvalidData` for what no peer of ours sends.
    pub(crate) fn recv(
        &mut self,
        buf: &mut Vec<u8>,
        fds: &mut Vec<OwnedFd>,
        deadline: Deadline,
    ) -> io::Result<usize> {
        if self.ring.is_none() {
            return self.socket.recv(buf, fds, deadline);
        }
        fds.clear();
        if buf.len() < MESSAGE_MAX {
            buf.resize(MESSAGE_MAX, 0);
        }
        match self.next(buf, deadline)? {
            Some(Record { len, beside: false }) => Ok(len),
            Some(Record { len, beside: true }) => self.beside(fds).map(|()| len),
            None => Ok(0),
        }
    }

    /// Whether the peer may have seen the last message that was sent.
    pub(crate) fn was_taken(&self) -> bool {
        self.ring.as_ref().is_none_or(Ring::was_taken)
    }

    /// The next record of the ring; none when the peer has ended.
    fn next(&mut self, buf: &mut [u8], deadline: Deadline) -> io::Result<Option<Record>> {
        let Some(ring) = &mut self.ring else { return Ok(None) };
        // Else a client that never stops asking would never notice.
        if self.socket.is_shut() {
            return Ok(None);
        }
        if let Some(record) = ring.take(buf)? {
            return Ok(Some(record));
        }
        let time = match self.in_vain {
            n if n < FAILURES || n.is_multiple_of(RETRY) => LOOK_MAX,
            _ => LOOK_MIN,
        };
        self.in_vain = if look(ring, time) { 0 } else { self.in_vain.wrapping_add(1) };
        loop {
            if let Some(record) = ring.take(buf)? {
                return Ok(Some(record));
            }
            let Some(rung) = ring.sleep(|| bell(&self.socket, &mut self.early, deadline)) else { continue };
            match rung {
                // What it said before its end counts.
                Ok(false) => return ring.take(buf),
                // Who rings without end must not be heard without end.
                Ok(true) if deadline.is_passed() => {
                    return ring.take(buf)?.map(Some).ok_or_else(|| io::ErrorKind::TimedOut.into());
                }
                Ok(true) => {}
                Err(e) if e.kind() == io::ErrorKind::TimedOut => return ring.take(buf)?.map(Some).ok_or(e),
                Err(e) => return Err(e),
            }
        }
    }

    /// The descriptors of a message, which were sent before it.
    fn beside(&mut self, fds: &mut Vec<OwnedFd>) -> io::Result<()> {
        for _ in 0..BELLS_MAX {
            if !self.early.is_empty() {
                fds.append(&mut self.early);
                return Ok(());
            }
            match bell(&self.socket, &mut self.early, Deadline::passed()) {
                Ok(true) => {}
                Ok(false) => break,
                Err(e) if e.kind() == io::ErrorKind::TimedOut => break,
                Err(e) => return Err(e),
            }
        }
        Err(io::Error::new(io::ErrorKind::InvalidData, "the descriptors of a message did not come"))
    }

    /// Wakes the peer if it sleeps.
    fn bell(&self) {
        if self.ring.as_ref().is_some_and(Ring::must_ring) {
            // A socket that is full of bells wakes it as well; that it has ended shows where its answer is waited for.
            let _ = self.socket.try_send(BELL);
        }
    }
}

/// Waits for the peer's bell, and keeps what descriptors come with it; false when the peer has ended.
///
/// *Errors*: as [`Link::recv`].
fn bell(socket: &Socket, early: &mut Vec<OwnedFd>, deadline: Deadline) -> io::Result<bool> {
    let had = early.len();
    let rung = socket.recv_short(&mut [0; BELL.len()], early, deadline)? > 0;
    if had > 0 && early.len() > had {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "descriptors came without their message"));
    }
    Ok(rung)
}

/// Looks for a message for this long; whether there is one.
///
/// A function of its own when it runs, so that who counts instructions can leave the wait out.
#[inline(never)]
fn look(ring: &Ring, time: Duration) -> bool {
    let start = Instant::now();
    loop {
        for _ in 0..LOOKS {
            if ring.is_ready() {
                return true;
            }
            hint::spin_loop();
        }
        if start.elapsed() >= time {
            return ring.is_ready();
        }
    }
}

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

const BELL: &[u8] = &[1];

/// How long one side looks for the other's next message before it sleeps: a few times as long as it takes to fall asleep on
/// one core and be woken from another, so that a peer that works between two requests is mostly found awake.
const LOOK_MAX: Duration = Duration::from_micros(200);

/// How long it looks where looking was in vain again and again.
const LOOK_MIN: Duration = Duration::from_micros(20);

/// Looks between two offers of the processor to others. Few: where both ends share a core, all of them are in vain.
const LOOKS: u32 = 4;

/// Bells that are thrown away in search of one with descriptors. An honest peer leaves one or two.
const BELLS_MAX: usize = 1024;

/// How long a producer sleeps before it looks for room again, which a peer that keeps reading always has.
const FULL: Duration = Duration::from_millis(1);

/// One end of a connection.
#[derive(Debug)]
pub(crate) struct Link {
    socket: Arc<Socket>,
    ring: Option<Ring>,
    /// How long to look for the next message; it follows how that went.
    look: Duration,
    /// Descriptors whose message has not been seen yet.
    early: Vec<OwnedFd>,
}

impl Link {
    pub(crate) fn new(socket: Arc<Socket>) -> Self {
        Link { socket, ring: None, look: LOOK_MAX, early: Vec::new() }
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
        if look(ring, self.look) {
            self.look = LOOK_MAX;
        } else {
            self.look = (self.look / 2).max(LOOK_MIN);
        }
        loop {
            if let Some(record) = ring.take(buf)? {
                return Ok(Some(record));
            }
            let Some(rung) = ring.sleep(|| bell(&self.socket, &mut self.early, deadline)) else { continue };
            match rung {
                Ok(true) => {}
                // What it said before its end counts.
                Ok(false) => return ring.take(buf),
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

/// Looks for a message for this long; whether there is one. Both ends may share a core, or others need it, so the
/// processor is offered time and again.
fn look(ring: &Ring, time: Duration) -> bool {
    let start = Instant::now();
    loop {
        for _ in 0..LOOKS {
            if ring.is_ready() {
                return true;
            }
            hint::spin_loop();
        }
        thread::yield_now();
        if start.elapsed() >= time {
            return ring.is_ready();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    fn soon() -> Deadline {
        Deadline::after(Duration::from_secs(20))
    }

    fn pair() -> (Link, Link) {
        let (ours, theirs) = Socket::pair().unwrap();
        let (node, file) = Ring::create().unwrap();
        let (mut a, mut b) = (Link::new(Arc::new(ours)), Link::new(Arc::new(theirs)));
        a.use_ring(Ring::open(&file).unwrap());
        b.use_ring(node);
        (a, b)
    }

    fn hear(link: &mut Link) -> io::Result<(Vec<u8>, usize)> {
        let (mut buf, mut fds) = (Vec::new(), Vec::new());
        let len = link.recv(&mut buf, &mut fds, soon())?;
        Ok((buf[..len].to_vec(), fds.len()))
    }

    /// Pauses around the time after which a peer falls asleep.
    #[test]
    fn no_message_waits_for_the_next_one_however_they_are_timed() {
        let (mut client, mut node) = pair();
        thread::scope(|scope| {
            scope.spawn(move || {
                let (mut buf, mut fds) = (Vec::new(), Vec::new());
                loop {
                    let len = node.recv(&mut buf, &mut fds, soon()).unwrap();
                    if len == 0 {
                        return;
                    }
                    thread::sleep(Duration::from_micros(u64::from(buf[1]) % 4 * 20));
                    node.send(&buf[..len], &[], soon()).unwrap();
                }
            });
            for n in 0u32..3000 {
                let random = n.wrapping_mul(2_654_435_761).rotate_left(11).to_le_bytes();
                if random[0] % 2 == 0 {
                    thread::sleep(Duration::from_micros(u64::from(random[2]) % 4 * 20));
                }
                client.send(&random, &[], soon()).unwrap();
                assert_eq!(hear(&mut client).unwrap(), (random.to_vec(), 0));
            }
            drop(client);
        });
    }

    #[test]
    fn descriptors_come_with_the_message_that_they_belong_to() {
        let (mut a, mut b) = pair();
        let (one, _other) = Socket::pair().unwrap();
        for round in 0..50 {
            a.send(&[1], &[], soon()).unwrap();
            a.send(&[2], &[one.as_fd(); 3], soon()).unwrap();
            a.send(&[3], &[], soon()).unwrap();
            assert_eq!(hear(&mut b).unwrap(), (vec![1], 0), "round {round}");
            assert_eq!(hear(&mut b).unwrap(), (vec![2], 3), "round {round}");
            assert_eq!(hear(&mut b).unwrap(), (vec![3], 0), "round {round}");
        }
    }

    #[test]
    fn descriptors_that_were_promised_and_do_not_come_are_an_error() {
        let (mut a, mut b) = pair();
        a.ring.as_mut().unwrap().push(&[1], true).unwrap();
        assert_eq!(hear(&mut b).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn what_was_said_before_the_end_counts() {
        let (mut a, mut b) = pair();
        a.send(&[1, 2], &[], soon()).unwrap();
        drop(a);
        assert_eq!(hear(&mut b).unwrap(), (vec![1, 2], 0));
        assert_eq!(hear(&mut b).unwrap(), (vec![], 0));
    }

    #[test]
    fn a_ring_that_nobody_empties_is_a_timeout_and_goes_on_afterwards() {
        let (mut a, mut b) = pair();
        let long = vec![7; MESSAGE_MAX];
        let mut sent = 0;
        while a.try_send(&long).unwrap() {
            sent += 1;
        }
        let e = a.send(&long, &[], Deadline::after(Duration::from_millis(20))).unwrap_err();
        assert_eq!((e.kind(), sent), (io::ErrorKind::TimedOut, 2));
        for _ in 0..sent {
            assert_eq!(hear(&mut b).unwrap(), (long.clone(), 0));
        }
        a.send(&long, &[], soon()).unwrap();
        while a.try_send(&long).unwrap() {}
        drop(b);
        assert_eq!(a.send(&long, &[], soon()).unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }

    #[test]
    fn a_socket_full_of_bells_hurts_nobody() {
        let (mut a, mut b) = pair();
        while a.socket.try_send(BELL).unwrap() {}
        a.send(&[1], &[], soon()).unwrap();
        assert_eq!(hear(&mut b).unwrap(), (vec![1], 0));
        let (mut buf, mut fds) = (Vec::new(), Vec::new());
        let e = b.recv(&mut buf, &mut fds, Deadline::after(Duration::from_millis(50))).unwrap_err();
        assert_eq!(e.kind(), io::ErrorKind::TimedOut);
    }
}

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
            ring.fall_asleep();
            if ring.is_ready() {
                ring.wake_up();
                continue;
            }
            let rung = bell(&self.socket, &mut self.early, deadline);
            ring.wake_up();
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

/// Looks for a message for this long; whether there is one.
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

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    /// The client's end and the daemon's, with a ring.
    fn pair() -> (Link, Link) {
        let (a, b) = Socket::pair().unwrap();
        let (mut client, mut node) = (Link::new(Arc::new(a)), Link::new(Arc::new(b)));
        let (ring, file) = Ring::create().unwrap();
        client.use_ring(Ring::open(&file).unwrap());
        node.use_ring(ring);
        (client, node)
    }

    fn soon() -> Deadline {
        Deadline::after(Duration::from_secs(20))
    }

    fn received(link: &mut Link, deadline: Deadline) -> io::Result<(Vec<u8>, usize)> {
        let (mut buf, mut fds) = (Vec::new(), Vec::new());
        let len = link.recv(&mut buf, &mut fds, deadline)?;
        Ok((buf[..len].to_vec(), fds.len()))
    }

    #[test]
    fn descriptors_come_with_their_own_message() {
        let (mut client, mut node) = pair();
        let other = Socket::pair().unwrap().0;
        client.send(b"none", &[], soon()).unwrap();
        client.send(b"two", &[other.as_fd(), other.as_fd()], soon()).unwrap();
        client.send(b"none again", &[], soon()).unwrap();
        assert_eq!(received(&mut node, soon()).unwrap(), (b"none".to_vec(), 0));
        assert_eq!(received(&mut node, soon()).unwrap(), (b"two".to_vec(), 2));
        assert_eq!(received(&mut node, soon()).unwrap(), (b"none again".to_vec(), 0));
    }

    #[test]
    fn descriptors_that_were_promised_and_do_not_come_are_an_error() {
        let (mut client, mut node) = pair();
        client.ring.as_mut().unwrap().push(b"with nothing beside", true).unwrap();
        assert_eq!(received(&mut node, soon()).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn descriptors_of_no_message_are_an_error_before_they_pile_up() {
        let (client, mut node) = pair();
        let other = Socket::pair().unwrap().0;
        for _ in 0..3 {
            client.socket.send(BELL, &[other.as_fd()], soon()).unwrap();
        }
        assert_eq!(received(&mut node, soon()).unwrap_err().kind(), io::ErrorKind::InvalidData);
        assert!(node.early.len() <= 2);
    }

    #[test]
    fn a_bell_without_a_message_does_no_harm() {
        let (mut client, mut node) = pair();
        for _ in 0..100 {
            client.socket.send(BELL, &[], soon()).unwrap();
        }
        client.send(b"message", &[], soon()).unwrap();
        assert_eq!(received(&mut node, soon()).unwrap().0, b"message");
        let late = received(&mut node, Deadline::after(Duration::from_millis(20)));
        assert_eq!(late.unwrap_err().kind(), io::ErrorKind::TimedOut);
    }

    #[test]
    fn a_peers_end_wakes_who_sleeps_and_its_last_message_counts() {
        let (client, mut node) = pair();
        thread::scope(|scope| {
            let waiting = scope.spawn(|| received(&mut node, Deadline::NEVER).unwrap());
            thread::sleep(Duration::from_millis(20));
            drop(client);
            assert_eq!(waiting.join().unwrap(), (Vec::new(), 0));
        });
        let (mut client, mut node) = pair();
        client.send(b"farewell", &[], soon()).unwrap();
        drop(client);
        assert_eq!(received(&mut node, soon()).unwrap().0, b"farewell");
        assert_eq!(received(&mut node, soon()).unwrap().0, b"");
    }

    #[test]
    fn who_never_reads_makes_a_send_time_out() {
        let (mut client, _node) = pair();
        let sent =
            (0..10).map(|_| client.send(&[7; MESSAGE_MAX], &[], Deadline::after(Duration::from_millis(20))));
        let refused: Vec<_> = sent.filter_map(Result::err).collect();
        assert!(!refused.is_empty() && refused.iter().all(|e| e.kind() == io::ErrorKind::TimedOut));
    }

    /// Pauses of all lengths around that of a look, so that each side is met awake, falling asleep and asleep.
    #[test]
    fn no_message_is_slept_through() {
        const TURNS: usize = 20_000;
        let pause = |turn: usize| {
            let start = Instant::now();
            let pause = Duration::from_nanos((turn as u64 * 7919) % 120_000);
            while turn.is_multiple_of(3) && start.elapsed() < pause {
                hint::spin_loop();
            }
        };
        let (mut client, mut node) = pair();
        thread::scope(|scope| {
            scope.spawn(|| {
                for turn in 0..TURNS {
                    assert_eq!(received(&mut node, soon()).unwrap().0, turn.to_le_bytes());
                    pause(turn);
                    node.send(&turn.to_be_bytes(), &[], soon()).unwrap();
                }
            });
            for turn in 0..TURNS {
                pause(turn + 1);
                client.send(&turn.to_le_bytes(), &[], soon()).unwrap();
                assert_eq!(received(&mut client, soon()).unwrap().0, turn.to_be_bytes());
            }
        });
    }
}

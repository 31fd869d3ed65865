//! How one row is measured: the operation, a memcpy of the same size and a bare socket round trip in turns, so that
//! whatever else the machine does hits all three.

use std::{
    hint::black_box,
    io::{ErrorKind, Read, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    process::{Child, Stdio},
    time::{Duration, Instant},
};

use crate::cli::{
    child::{Interrupts, this_binary},
    exit::{Failure, Result},
};

/// Bytes that go to the echo process and back.
const MESSAGE: usize = 64;
/// Turns that a row has at least, whatever its time, and those before that are not counted.
const TURNS_MIN: usize = 10;
const WARM_UP: usize = 2;
/// More turns than this say nothing more.
const TURNS_MAX: usize = 50_000;

/// The samples of one row.
#[derive(Debug, Default)]
pub(crate) struct Samples {
    pub(crate) op: Vec<Duration>,
    pub(crate) memcpy: Vec<Duration>,
    pub(crate) round_trip: Vec<Duration>,
}

/// Takes samples for `budget`: each turn one memcpy, one round trip, one operation. `op` says itself how long its timed
/// part took.
pub(crate) fn in_turns(
    budget: Duration,
    echo: &mut Echo,
    interrupts: &Interrupts,
    mut memcpy: impl FnMut(),
    mut op: impl FnMut() -> Result<Duration>,
) -> Result<Samples> {
    let mut samples = Samples::default();
    let mut since = Instant::now();
    for turn in 0.. {
        interrupts.check()?;
        if turn == WARM_UP {
            samples = Samples::default();
            since = Instant::now();
        }
        let counted = samples.op.len();
        if turn >= WARM_UP && (counted >= TURNS_MAX || counted >= TURNS_MIN && since.elapsed() >= budget) {
            break;
        }
        let start = Instant::now();
        memcpy();
        samples.memcpy.push(start.elapsed());
        samples.round_trip.push(echo.round_trip()?);
        samples.op.push(op()?);
    }
    Ok(samples)
}

/// Copies `from` into `to` in pieces of `piece` bytes.
pub(crate) fn copy_pieces(from: &[u8], to: &mut [u8], piece: usize) {
    for (from, to) in from.chunks(piece).zip(to.chunks_mut(piece)) {
        black_box(to).copy_from_slice(black_box(from));
    }
}

/// The time that `part` percent of the samples do not exceed.
pub(crate) fn percentile(samples: &[Duration], part: usize) -> Duration {
    let mut sorted = samples.to_vec();
    sorted.sort_unstable();
    let rank = (sorted.len() * part).div_ceil(100).saturating_sub(1);
    sorted.get(rank).copied().unwrap_or_default()
}

/// A child process that sends back what it gets, over a bare stream socket.
#[derive(Debug)]
pub(crate) struct Echo {
    socket: UnixStream,
    child: Child,
}

impl Echo {
    pub(crate) fn start() -> Result<Self> {
        let refuse = |e| Failure::system("starting the echo process", e);
        let (socket, theirs) = UnixStream::pair().map_err(refuse)?;
        let child = this_binary()?
            .arg("bench-echo")
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .spawn()
            .map_err(refuse)?;
        Ok(Echo { socket, child })
    }

    fn round_trip(&mut self) -> Result<Duration> {
        let mut message = [0; MESSAGE];
        let start = Instant::now();
        let answered = self.socket.write_all(&message).and_then(|()| self.socket.read_exact(&mut message));
        let took = start.elapsed();
        answered.map(|()| took).map_err(|e| Failure::system("a round trip to the echo process", e))
    }
}

impl Drop for Echo {
    fn drop(&mut self) {
        // The end of its socket is the end of the child, which has nothing else to do.
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
        if let Err(e) = self.child.wait() {
            tracing::warn!(error = %e, "the echo process could not be waited for");
        }
    }
}

/// What the echo process does, until its socket ends.
pub(crate) fn echo() -> Result<()> {
    let refuse = |e| Failure::system("echoing", e);
    let mut socket = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned().map_err(refuse)?);
    let mut message = [0; MESSAGE];
    loop {
        match socket.read_exact(&mut message).and_then(|()| socket.write_all(&message)) {
            Ok(()) => {}
            Err(e) if matches!(e.kind(), ErrorKind::UnexpectedEof | ErrorKind::BrokenPipe) => return Ok(()),
            Err(e) => return Err(refuse(e)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_samples() {
        let samples: Vec<Duration> = (1..=100).rev().map(Duration::from_micros).collect();
        assert_eq!(percentile(&samples, 50), Duration::from_micros(50));
        assert_eq!(percentile(&samples, 95), Duration::from_micros(95));
        assert_eq!(percentile(&samples[..1], 95), Duration::from_micros(100));
        assert_eq!(percentile(&[], 50), Duration::ZERO);
    }

    #[test]
    fn pieces_are_copied_whole() {
        let from: Vec<u8> = (0..100).collect();
        let mut to = vec![0; 100];
        copy_pieces(&from, &mut to, 7);
        assert_eq!(from, to);
    }
}

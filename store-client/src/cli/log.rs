//! Where logs go: to stderr by a thread of their own, so that nobody who logs waits for whoever reads them.
//!
//! A daemon must not stop because its stderr is a pipe that nobody drains. What does not fit the queue is dropped and
//! counted. (`tracing_appender` prints to stdout in this very case, and panics where that is closed too.)

use std::{
    io::{self, Write},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use crossbeam_channel::{Receiver, Sender, bounded};

/// How many lines wait for the reader of stderr before more are dropped.
const QUEUE: usize = 1024;
/// How long the end of the process waits for that reader.
const PATIENCE: Duration = Duration::from_millis(500);

enum Message {
    Line(Vec<u8>),
    /// Everything before has been written; says so by being dropped.
    Flush(#[expect(dead_code, reason = "its drop is the answer")] Sender<()>),
}

/// A writer that never waits; each write is a line.
#[derive(Clone)]
pub(crate) struct Lossy {
    lines: Sender<Message>,
    dropped: Arc<AtomicU64>,
}

impl Lossy {
    /// Starts the thread that writes to `out`.
    pub(crate) fn start(out: impl Write + Send + 'static) -> io::Result<Self> {
        let (lines, queue) = bounded(QUEUE);
        let dropped = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&dropped);
        thread::Builder::new().name("log".into()).spawn(move || write_out(&queue, out, &counted))?;
        Ok(Lossy { lines, dropped })
    }

    /// A value whose drop waits, not for long, until what was logged before is written.
    pub(crate) fn flush_at_end(&self) -> impl Drop + use<> {
        struct End(Sender<Message>);
        impl Drop for End {
            fn drop(&mut self) {
                let (done, written) = bounded(0);
                if self.0.send_timeout(Message::Flush(done), PATIENCE).is_ok() {
                    // An error either way: nothing is ever sent, the other end is dropped or the time is up.
                    let _ = written.recv_timeout(PATIENCE);
                }
            }
        }
        End(self.lines.clone())
    }
}

impl Write for Lossy {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if self.lines.try_send(Message::Line(line.to_vec())).is_err() {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn write_out(queue: &Receiver<Message>, mut out: impl Write, dropped: &AtomicU64) {
    for message in queue {
        let dropped = dropped.swap(0, Ordering::Relaxed);
        // Where writing fails there is nobody left to tell.
        if dropped > 0 {
            let _ = writeln!(out, "{dropped} lines of the log were dropped: nobody read them");
        }
        if let Message::Line(line) = message {
            let _ = out.write_all(&line);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{fs::File, io::Read, time::Instant};

    use super::*;

    #[test]
    fn a_reader_that_does_not_read_holds_nobody_up_and_is_told_what_it_missed() {
        let (mut reader, writer) = io::pipe().unwrap();
        let mut log = Lossy::start(File::from(std::os::fd::OwnedFd::from(writer))).unwrap();
        let since = Instant::now();
        for _ in 0..10 * QUEUE {
            log.write_all(&[b'x'; 100]).unwrap();
        }
        drop(log.flush_at_end());
        assert!(since.elapsed() < Duration::from_secs(20), "{:?}", since.elapsed());
        drop(log);
        let mut read = String::new();
        reader.read_to_string(&mut read).unwrap();
        assert!(read.contains("lines of the log were dropped"), "{} bytes", read.len());
    }

    #[test]
    fn what_was_logged_is_written_before_the_end() {
        let (mut reader, writer) = io::pipe().unwrap();
        let mut log = Lossy::start(writer).unwrap();
        let end = log.flush_at_end();
        log.write_all(b"line\n").unwrap();
        drop(end);
        let mut read = [0; 5];
        rustix::io::ioctl_fionread(&reader).map(|n| assert_eq!(n, 5)).unwrap();
        reader.read_exact(&mut read).unwrap();
        assert_eq!(&read, b"line\n");
    }
}

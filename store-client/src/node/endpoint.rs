//! The counters over HTTP, on loopback only: who may read them is whoever is on this host.
//!
//! Any user of the host can connect here, so a reader gets a moment, a few bytes and no body: the general HTTP servers
//! that were tried believe a `Content-Length`, and start a thread for each connection.

use std::{
    io::{self, Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use prometheus_client::encoding::prometheus_text::CONTENT_TYPE;

use super::os;
use crate::{
    error::{Error, Result},
    metrics::Metrics,
};

/// How long one reader may take in all.
const PATIENCE: Duration = Duration::from_secs(1);
/// The longest request line and headers that are read.
const HEAD_MAX: usize = 8 << 10;

/// Serves until dropped.
#[derive(Debug)]
pub(super) struct Endpoint {
    addr: SocketAddr,
    ended: Arc<AtomicBool>,
}

impl Endpoint {
    /// Serves at `addr`; with port 0 at any free one.
    pub(super) fn start(addr: SocketAddr, metrics: Arc<Metrics>) -> Result<Self> {
        if !addr.ip().is_loopback() {
            return Err(Error::InvalidArgument {
                what: format!(
                    "metrics are served to this host only, not at {addr}; use --metrics 127.0.0.1:{}",
                    addr.port()
                ),
            });
        }
        let failed = |e: io::Error| {
            os(format!("serving metrics at {addr} (--metrics; with port 0 any free one is taken)"), &e)
        };
        let listener = TcpListener::bind(addr).map_err(failed)?;
        let addr = listener.local_addr().map_err(failed)?;
        let ended = Arc::new(AtomicBool::new(false));
        thread::Builder::new()
            .name("haulier-metrics".into())
            .spawn({
                let ended = Arc::clone(&ended);
                move || serve(&listener, &metrics, &ended)
            })
            .map_err(failed)?;
        tracing::info!(%addr, "metrics are served at http://{addr}/metrics");
        Ok(Endpoint { addr, ended })
    }

    pub(super) fn addr(&self) -> SocketAddr {
        self.addr
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Release);
        // Wakes the thread, which is not waited for: a slow reader would stall the daemon's end.
        let _ = TcpStream::connect_timeout(&self.addr, PATIENCE);
    }
}

/// One reader after the other, each for a moment.
fn serve(listener: &TcpListener, metrics: &Metrics, ended: &AtomicBool) {
    for stream in listener.incoming() {
        if ended.load(Ordering::Acquire) {
            return;
        }
        match stream.and_then(|stream| answer(stream, metrics)) {
            Ok(()) => {}
            Err(e) => {
                tracing::debug!(%e, "a reader of the metrics went away");
                // Out of descriptors, say: the next attempt would fail at once, and again.
                thread::sleep(Duration::from_millis(10));
            }
        }
    }
}

fn answer(mut stream: TcpStream, metrics: &Metrics) -> io::Result<()> {
    let until = Instant::now() + PATIENCE;
    let mut head = Vec::new();
    while !head.windows(4).any(|end| end == b"\r\n\r\n") {
        let left = until.saturating_duration_since(Instant::now());
        if head.len() >= HEAD_MAX || left.is_zero() {
            return Err(io::ErrorKind::InvalidData.into());
        }
        stream.set_read_timeout(Some(left))?;
        let mut some = [0; 1024];
        match stream.read(&mut some)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            n => head.extend_from_slice(&some[..n]),
        }
    }
    let (status, text) = if head.starts_with(b"GET /metrics ") {
        ("200 OK", metrics.render())
    } else {
        ("404 Not Found", "see /metrics\n".to_owned())
    };
    let answer = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{text}",
        text.len()
    );
    let mut rest = answer.as_bytes();
    while !rest.is_empty() {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_write_timeout(Some(left))?;
        let written = stream.write(rest)?;
        rest = &rest[written..];
    }
    stream.shutdown(Shutdown::Write)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{Config, Store};

    fn ask(addr: SocketAddr, request: &[u8]) -> String {
        let mut stream = TcpStream::connect(addr).unwrap();
        stream.write_all(request).unwrap();
        let mut answer = Vec::new();
        // A peer that gives up resets the connection.
        let _ = stream.read_to_end(&mut answer);
        String::from_utf8(answer).unwrap()
    }

    #[test]
    fn a_reader_that_stalls_floods_or_lies_keeps_nobody_from_the_counters() {
        let store = Store::open(Config::new(1 << 20), |_, _| {}).unwrap();
        let endpoint =
            Endpoint::start("127.0.0.1:0".parse().unwrap(), Arc::new(Metrics::of_node(store))).unwrap();
        let good = || ask(endpoint.addr(), b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n");
        assert!(good().contains("haulier_pool_bytes"));
        ask(endpoint.addr(), b"POST /metrics HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n");
        ask(endpoint.addr(), &[b'a'; 3 * HEAD_MAX]);
        let _stalled = TcpStream::connect(endpoint.addr()).unwrap();
        drop((0..50).map(|_| TcpStream::connect(endpoint.addr())).collect::<Vec<_>>());
        assert!(good().starts_with("HTTP/1.1 200 OK"));
        assert!(ask(endpoint.addr(), b"GET / HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404"));
    }
}

//! Who is connected.

use std::{collections::HashMap, sync::Arc};

use hal::Deadline;
use parking_lot::{Condvar, Mutex};
use prometheus_client::metrics::gauge::Gauge;

use crate::wire::Socket;

/// Connections beyond the most that are possible which are told so; more than these are just dropped.
const REFUSALS_MAX: usize = 16;

/// All connections.
#[derive(Debug)]
pub(super) struct Sessions {
    max: usize,
    gauge: Gauge,
    inner: Mutex<Inner>,
    left: Condvar,
}

#[derive(Debug, Default)]
struct Inner {
    sockets: HashMap<u64, Arc<Socket>>,
    next: u64,
    refuses: bool,
}

impl Sessions {
    pub(super) fn new(max: usize, gauge: Gauge) -> Self {
        Sessions { max, gauge, inner: Mutex::default(), left: Condvar::new() }
    }

    /// How many clients may be connected.
    pub(super) fn max(&self) -> usize {
        self.max
    }

    /// From now on nobody gets a seat.
    pub(super) fn refuse_more(&self) {
        self.inner.lock().refuses = true;
    }

    pub(super) fn are_refused(&self) -> bool {
        self.inner.lock().refuses
    }

    /// Ends every connection and waits until their threads are done with them; how many were not by the deadline.
    pub(super) fn end(&self, deadline: Deadline) -> usize {
        let mut inner = self.inner.lock();
        inner.sockets.values().for_each(|socket| socket.shutdown());
        while !inner.sockets.is_empty() {
            let Some(left) = deadline.left().filter(|left| !left.is_zero()) else { break };
            self.left.wait_for(&mut inner, left);
        }
        inner.sockets.len()
    }
}

/// A connection's place among all; given up when dropped.
#[derive(Debug)]
pub(super) struct Seat {
    sessions: Arc<Sessions>,
    id: u64,
    admitted: bool,
}

impl Seat {
    /// `None` where so many are over the limit that the connection is to be dropped.
    pub(super) fn take(sessions: &Arc<Sessions>, socket: &Arc<Socket>) -> Option<Self> {
        let mut inner = sessions.inner.lock();
        let taken = inner.sockets.len();
        if inner.refuses || taken >= sessions.max + REFUSALS_MAX {
            return None;
        }
        inner.next += 1;
        let id = inner.next;
        inner.sockets.insert(id, Arc::clone(socket));
        sessions.gauge.inc();
        Some(Seat { sessions: Arc::clone(sessions), id, admitted: taken < sessions.max })
    }

    /// A number for logs.
    pub(super) fn id(&self) -> u64 {
        self.id
    }

    /// The limit that this connection exceeds, if it does.
    pub(super) fn exceeds(&self) -> Option<usize> {
        (!self.admitted).then(|| self.sessions.max())
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let socket = self.sessions.inner.lock().sockets.remove(&self.id);
        if let Some(socket) = socket {
            socket.shutdown();
        }
        self.sessions.gauge.dec();
        self.sessions.left.notify_all();
    }
}

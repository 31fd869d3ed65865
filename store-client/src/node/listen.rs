//! Accepts clients.

use std::{io, sync::Arc, thread, time::Duration};

use hal::Device;

use super::{
    Shared, session,
    sessions::{Seat, Sessions},
};
use crate::wire::Socket;

/// The pause after a failed accept: most likely descriptors are used up, and asking at once would only spin.
const PAUSE: Duration = Duration::from_millis(50);

/// Gives each client a thread, until the listener is shut down.
pub(super) fn accept_all<D: Device>(node: &Arc<Shared<D>>, listener: &Socket, sessions: &Arc<Sessions>) {
    let user = rustix::process::geteuid().as_raw();
    while !sessions.are_refused() {
        match listener.accept().and_then(|socket| admit(socket, user)) {
            Ok(Some(socket)) => seat(node, Arc::new(socket), sessions),
            Ok(None) => {}
            Err(_) if sessions.are_refused() => {}
            Err(e) => {
                tracing::warn!(%e, "a client could not be accepted");
                thread::sleep(PAUSE);
            }
        }
    }
}

/// Drops the connection of another user. The directory's and the socket's modes keep them out already; this holds where
/// those were changed under the daemon.
fn admit(socket: Socket, user: u32) -> io::Result<Option<Socket>> {
    let peer = socket.peer()?;
    if may_connect(peer.uid, user) {
        return Ok(Some(socket));
    }
    tracing::warn!(
        peer.uid,
        peer.pid,
        user,
        "a client of another user was refused; each user runs a daemon of its own"
    );
    Ok(None)
}

/// Whether a client that runs as `peer` may use the daemon of `user`.
pub(super) fn may_connect(peer: u32, user: u32) -> bool {
    peer == user
}

fn seat<D: Device>(node: &Arc<Shared<D>>, socket: Arc<Socket>, sessions: &Arc<Sessions>) {
    let Some(seat) = Seat::take(sessions, &socket) else {
        tracing::warn!("a client was dropped: far too many are waiting to be refused");
        return;
    };
    let node = Arc::clone(node);
    let spawned = thread::Builder::new().name(format!("haulier-{}", seat.id())).spawn(move || {
        session::serve(&node, &socket, &seat);
    });
    if let Err(e) = spawned {
        tracing::warn!(%e, "a client was dropped: no thread could be started for it");
    }
}

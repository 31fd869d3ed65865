//! The counters over HTTP, on loopback only: who may read them is whoever is on this host.

use std::{
    io,
    net::{SocketAddr, TcpListener},
    sync::Arc,
    thread,
};

use prometheus_client::encoding::prometheus_text::CONTENT_TYPE;
use tiny_http::{Header, Request, Response, Server};

use super::os;
use crate::{
    error::{Error, Result},
    metrics::Metrics,
};

/// Serves until dropped.
pub(super) struct Endpoint {
    addr: SocketAddr,
    server: Arc<Server>,
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
        let failed = |e: &io::Error| {
            os(format!("serving metrics at {addr} (--metrics; with port 0 any free one is taken)"), e)
        };
        let listener = TcpListener::bind(addr).map_err(|e| failed(&e))?;
        let addr = listener.local_addr().map_err(|e| failed(&e))?;
        let server = Server::from_listener(listener, None)
            .map(Arc::new)
            .map_err(|e| failed(&io::Error::other(e.to_string())))?;
        thread::Builder::new()
            .name("haulier-metrics".into())
            .spawn({
                let server = Arc::clone(&server);
                move || server.incoming_requests().for_each(|request| answer(request, &metrics))
            })
            .map_err(|e| failed(&e))?;
        tracing::info!(%addr, "metrics are served at http://{addr}/metrics");
        Ok(Endpoint { addr, server })
    }

    pub(super) fn addr(&self) -> SocketAddr {
        self.addr
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        // Its thread is not waited for: a reader that stalls in the middle of a request would stall the daemon's end.
        self.server.unblock();
    }
}

impl std::fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Endpoint").field("addr", &self.addr).finish_non_exhaustive()
    }
}

fn answer(request: Request, metrics: &Metrics) {
    let outcome = if request.url() == "/metrics" {
        let response = Response::from_string(metrics.render());
        let kind = Header::from_bytes("Content-Type", CONTENT_TYPE);
        request.respond(kind.into_iter().fold(response, Response::with_header))
    } else {
        request.respond(Response::from_string("see /metrics\n").with_status_code(404))
    };
    if let Err(e) = outcome {
        tracing::debug!(%e, "a reader of the metrics went away");
    }
}

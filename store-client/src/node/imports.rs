//! The client's own allocations that are open here.
//!
//! The client may free one that is open, and nobody tells the node: what is kept open between two requests is not touched
//! until a later request names it again by the same buffer id, which freed memory does not keep. What a driver makes of
//! such a free its backend says where it exports.

use std::os::fd::OwnedFd;

use hal::{Bound, Device, IpcHandle, Memory, Region, Token};
use lru::LruCache;
use prometheus_client::metrics::gauge::Gauge;

use crate::error::Result;

/// How many stay open between two requests.
const OPEN_MAX: usize = 64;

/// Open allocations, each under its whole handle: that holds the buffer id, which a reused address does not share.
#[derive(Debug)]
pub(super) struct Imports<'d, D: Device> {
    // Before `bound`: they are closed while the device is current.
    open: LruCache<IpcHandle, D::Import>,
    gauge: Gauge,
    warned: bool,
    bound: Bound<'d, D>,
}

impl<'d, D: Device> Imports<'d, D> {
    /// None yet, for a thread that is bound for its whole life.
    pub(super) fn new(bound: Bound<'d, D>, gauge: Gauge) -> Self {
        // Bounded by `trim`, so that nothing is closed while a request still uses it.
        Imports { open: LruCache::unbounded(), gauge, warned: false, bound }
    }

    pub(super) fn bound(&self) -> &Bound<'d, D> {
        &self.bound
    }

    /// Where the handle's allocation is in this process; valid until [`trim`](Self::trim). It is opened if it is not yet.
    pub(super) fn open(&mut self, handle: &IpcHandle, fds: Vec<OwnedFd>) -> Result<Region> {
        if let Some(import) = self.open.get(handle) {
            return Ok(import.region());
        }
        self.close_stale(handle);
        let import = self.bound.import_ipc(handle, fds).inspect_err(|e| self.warn_once(handle, e))?;
        let region = import.region();
        self.open.put(handle.clone(), import);
        self.gauge.inc();
        Ok(region)
    }

    /// Closes the least recently used ones beyond the limit; all where the driver wants that before the owner frees.
    pub(super) fn trim(&mut self) {
        let limit = if self.bound.device().imports_may_linger() { OPEN_MAX } else { 0 };
        while self.open.len() > limit && self.open.pop_lru().is_some() {
            self.gauge.dec();
        }
    }

    fn warn_once(&mut self, handle: &IpcHandle, e: &hal::Error) {
        if !std::mem::replace(&mut self.warned, true) {
            tracing::warn!(
                device = %handle.device,
                process = handle.exporter,
                bytes = handle.len,
                %e,
                "a client's memory cannot be opened and is copied through host memory; later ones are only counted"
            );
        }
    }

    /// Closes allocations that are gone: the driver named this one by the same bytes, so it took their address.
    fn close_stale(&mut self, handle: &IpcHandle) {
        if !matches!(handle.token, Token::Opaque(_)) {
            return;
        }
        let before = self.open.len();
        self.open.retain(|open, _| open.token != handle.token || open.exporter != handle.exporter);
        self.gauge.dec_by((before - self.open.len()) as i64);
    }
}

impl<D: Device> Drop for Imports<'_, D> {
    fn drop(&mut self) {
        self.gauge.dec_by(self.open.len() as i64);
    }
}

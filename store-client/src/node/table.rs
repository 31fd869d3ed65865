//! What one client holds of one kind: named by numbers that mean nothing in another session, bounded, counted, and gone
//! with the session.

use std::collections::HashMap;

use foldhash::fast::FixedState;
use prometheus_client::metrics::gauge::Gauge;

use crate::error::{Error, Result};

/// Things by number.
#[derive(Debug)]
pub(super) struct Table<T> {
    // The numbers are the node's own, so no client chooses which of them collide.
    things: HashMap<u64, T, FixedState>,
    last: u64,
    max: usize,
    what: &'static str,
    gauge: Gauge,
}

impl<T> Table<T> {
    /// An empty one for up to `max` things, whose plural is `what`. `gauge` counts those of all sessions.
    pub(super) fn new(what: &'static str, max: usize, gauge: Gauge) -> Self {
        Table { things: HashMap::default(), last: 0, max, what, gauge }
    }

    /// The number that the next thing will get, if there is room for it. Numbers start at 1 and never come again.
    pub(super) fn next(&self) -> Result<u64> {
        if self.room() == 0 {
            return Err(self.used_up());
        }
        Ok(self.last + 1)
    }

    /// How many things there is room for.
    pub(super) fn room(&self) -> usize {
        self.max.saturating_sub(self.things.len())
    }

    /// The answer to who wants more.
    pub(super) fn used_up(&self) -> Error {
        Error::ResourceExhausted { what: format!("the limit of {} {}", self.max, self.what) }
    }

    /// Adds a thing under the number that [`next`](Self::next) told.
    pub(super) fn insert(&mut self, thing: T) {
        self.last += 1;
        self.things.insert(self.last, thing);
        self.gauge.inc();
    }

    pub(super) fn take(&mut self, number: u64) -> Option<T> {
        let thing = self.things.remove(&number)?;
        self.gauge.dec();
        Some(thing)
    }

    pub(super) fn contains(&self, number: u64) -> bool {
        self.things.contains_key(&number)
    }
}

impl<T> Drop for Table<T> {
    fn drop(&mut self) {
        self.gauge.dec_by(self.things.len() as i64);
    }
}

//! What queued work waits at until a test lets it go.

use std::time::Duration;

use parking_lot::{Condvar, Mutex};

/// Closed at first, opened once.
#[derive(Debug, Default)]
pub struct Gate {
    open: Mutex<bool>,
    opened: Condvar,
}

impl Gate {
    /// The longest that anybody waits: freeing memory waits for a whole device on some drivers, and a test that fails
    /// while it holds a stream would otherwise hang at that.
    const LONGEST: Duration = Duration::from_secs(20);

    /// Lets everybody through.
    pub fn open(&self) {
        *self.open.lock() = true;
        self.opened.notify_all();
    }

    /// Whether it is.
    pub fn is_open(&self) -> bool {
        *self.open.lock()
    }

    /// Waits until it is open.
    pub fn pass(&self) {
        let mut open = self.open.lock();
        self.opened.wait_while_for(&mut open, |open| !*open, Self::LONGEST);
    }
}

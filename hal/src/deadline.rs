//! How long a call may take.

use std::time::{Duration, Instant};

/// A point in time after which a call gives up with [`Kind::Timeout`](crate::Kind::Timeout).
///
/// One deadline is passed down through all steps of a call, so that the steps share it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Deadline(Option<Instant>);

impl Deadline {
    /// No limit.
    pub const NEVER: Deadline = Deadline(None);

    /// This long from now.
    pub fn after(limit: Duration) -> Self {
        Deadline(Instant::now().checked_add(limit))
    }

    /// Already passed: the call answers at once, without waiting.
    pub fn passed() -> Self {
        Deadline(Some(Instant::now()))
    }

    /// The point in time, or `None` without a limit.
    pub fn instant(self) -> Option<Instant> {
        self.0
    }

    /// Time left, zero once passed, `None` without a limit.
    pub fn left(self) -> Option<Duration> {
        self.0.map(|at| at.saturating_duration_since(Instant::now()))
    }

    /// Whether no time is left.
    pub fn is_passed(self) -> bool {
        self.left().is_some_and(|left| left.is_zero())
    }
}

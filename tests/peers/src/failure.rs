//! Why something could not be measured.

use std::fmt;

/// Words for a person, with cause and, where there is one, remedy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure(pub String);

/// What may fail.
pub type Result<T> = std::result::Result<T, Failure>;

impl Failure {
    /// `what` was being done when `cause` came up.
    pub fn new(what: impl fmt::Display, cause: impl fmt::Display) -> Self {
        Failure(format!("{what}: {cause}"))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Failure {}

/// Says what was being done.
pub trait During<T> {
    /// Puts `what` before the error's own words.
    fn during(self, what: impl fmt::Display) -> Result<T>;
}

impl<T, E: fmt::Display> During<T> for std::result::Result<T, E> {
    fn during(self, what: impl fmt::Display) -> Result<T> {
        self.map_err(|e| Failure::new(what, e))
    }
}

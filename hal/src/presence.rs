//! What a machine has of a backend: an answer, never a panic.

use std::fmt;

use serde::Serialize;

use crate::Error;

/// The answer of a backend's `probe()`. Probing never initialises a driver.
#[derive(Debug, Clone, Serialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum Presence {
    /// Not there, and where it was looked for.
    Absent {
        /// The reason in a sentence, with the remedy.
        why: String,
        /// The names and paths that were tried, in order.
        looked: Vec<String>,
    },
    /// There, but not usable: a stub library, a missing symbol, an old driver.
    Broken {
        /// The library that was found.
        library: String,
        /// What it said.
        error: Error,
    },
    /// Usable, as far as can be told without initialising the driver.
    Present {
        /// The library, or `None` for a backend that needs none.
        library: Option<String>,
    },
}

impl fmt::Display for Presence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Presence::Absent { why, looked } if looked.is_empty() => write!(f, "not present, because {why}"),
            Presence::Absent { why, looked } => {
                write!(f, "not present, because {why} (looked for {})", looked.join(", "))
            }
            Presence::Broken { library, error } => write!(f, "not usable: {library}: {error}"),
            Presence::Present { library: Some(library) } => write!(f, "present ({library})"),
            Presence::Present { library: None } => f.write_str("present"),
        }
    }
}

//! How the command ends: exit codes that scripts can trust, and what it says when it fails.

use std::{fmt, path::Path};

use haulier::Error;

use super::output;

/// The exit codes. They are part of the interface: [`HELP`] states them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exit {
    Ok = 0,
    Refused = 1,
    Usage = 2,
    Unreachable = 3,
    BadInput = 4,
    Timeout = 5,
    Interrupted = 130,
}

/// Stands at the end of `haulier --help`.
pub(crate) const HELP: &str = "\
Exit codes:
    0  done
    1  refused: a key was not found, exists already, the store is full, bytes differ, ...
    2  the command line is wrong
    3  no node answers at the socket, or no Mooncake master, or it went away before it answered
    4  an input file is missing or not what it should be
    5  the time was up
  130  ended by a signal before it was done

Results go to stdout, everything else to stderr. With --json, stdout holds one JSON value and a failure is one line
{\"error\":{\"kind\":\"...\",\"message\":\"...\"}} on stderr.";

/// Why the command ends without having done all that was asked.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) exit: Exit,
    kind: &'static str,
    message: String,
}

pub(crate) type Result<T, E = Failure> = std::result::Result<T, E>;

impl Failure {
    pub(crate) fn new(exit: Exit, kind: &'static str, message: impl Into<String>) -> Self {
        // It may quote names that anybody chose; only the lines of what clap says stay apart.
        let message: Vec<String> = message.into().split('\n').map(output::plain).collect();
        Failure { exit, kind, message: message.join("\n") }
    }

    /// The store or the node said no, to all or to part of what was asked.
    pub(crate) fn refused(message: impl Into<String>) -> Self {
        Self::new(Exit::Refused, "refused", message)
    }

    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self::new(Exit::Usage, "usage", message)
    }

    /// `file` cannot be used as input.
    pub(crate) fn input(file: &Path, why: impl fmt::Display) -> Self {
        Self::new(Exit::BadInput, "bad_input", format!("{}: {why}", output::path(file)))
    }

    /// The system refused `what`.
    pub(crate) fn system(what: impl fmt::Display, why: impl fmt::Display) -> Self {
        Self::new(Exit::Refused, "os", format!("{what}: {why}"))
    }

    pub(crate) fn interrupted() -> Self {
        Self::new(Exit::Interrupted, "interrupted", "ended by a signal; nothing was left behind")
    }

    /// The reader of stdout has seen enough, as `head` does: no error, and nobody to tell.
    pub(crate) fn nobody_reads() -> Self {
        Self::new(Exit::Ok, "", "")
    }

    /// Says what the failure is about.
    pub(crate) fn about(mut self, what: impl fmt::Display) -> Self {
        self.message = format!("{}: {}", output::plain(&what.to_string()), self.message);
        self
    }

    /// Says what to do about it.
    pub(crate) fn advise(mut self, remedy: impl fmt::Display) -> Self {
        self.message = format!("{}; {remedy}", self.message);
        self
    }

    /// Says it on stderr.
    pub(crate) fn report(&self, json: bool) {
        if self.message.is_empty() {
            return;
        }
        if json {
            let error = serde_json::json!({ "error": { "kind": self.kind, "message": self.message } });
            output::complain(error);
        } else {
            output::complain(format_args!("haulier: {}", self.message));
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl From<Error> for Failure {
    fn from(e: Error) -> Self {
        Failure::new(exit_of(&e), e.label(), e.to_string())
    }
}

impl From<haulier::hal::Error> for Failure {
    fn from(e: haulier::hal::Error) -> Self {
        Error::from(e).into()
    }
}

fn exit_of(e: &Error) -> Exit {
    match e {
        Error::InvalidKey { .. } | Error::InvalidArgument { .. } => Exit::Usage,
        Error::Unreachable { .. } | Error::Disconnected { .. } | Error::Protocol { .. } => Exit::Unreachable,
        Error::Timeout { .. } => Exit::Timeout,
        Error::Mooncake(_) if e.label() == "unreachable" => Exit::Unreachable,
        Error::NotSent { cause } => exit_of(cause),
        _ => Exit::Refused,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_help_states_every_code() {
        use Exit::*;
        for exit in [Ok, Refused, Usage, Unreachable, BadInput, Timeout, Interrupted] {
            let code = format!("{:>5}  ", exit as u8);
            assert!(HELP.lines().any(|line| line.starts_with(&code)), "{exit:?}");
        }
    }

    #[test]
    fn names_of_files_cannot_move_the_cursor() {
        let failure = Failure::input(Path::new("a\x1b[2J\nb"), "absent");
        assert_eq!(failure.to_string(), "a\\u{1b}[2J\\nb: absent");
        assert_eq!(Failure::usage("one\x07\ntwo").to_string(), "one\\u{7}\ntwo");
    }

    #[test]
    fn errors_of_the_store_have_their_codes() {
        let unreachable = Error::Unreachable { socket: "/s".into(), reason: "no such file".into() };
        let disconnected = Error::Disconnected { reason: "reset".into() };
        let timeout = Error::Timeout { op: "put".into() };
        for (e, exit, kind) in [
            (Error::NotFound, Exit::Refused, "not_found"),
            (Error::Full { free: 0, largest: 0 }, Exit::Refused, "full"),
            (Error::AlreadyRunning { pid: 1 }, Exit::Refused, "already_running"),
            (Error::InvalidKey { len: 0, limit: 1024 }, Exit::Usage, "invalid_key"),
            (unreachable, Exit::Unreachable, "unreachable"),
            (disconnected, Exit::Unreachable, "disconnected"),
            (Error::NotSent { cause: Box::new(timeout.clone()) }, Exit::Timeout, "timeout"),
            (timeout, Exit::Timeout, "timeout"),
        ] {
            assert_eq!((exit_of(&e), e.label()), (exit, kind), "{e:?}");
        }
    }
}

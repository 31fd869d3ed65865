//! The options that every command takes.

use std::{env, ffi::OsString, fs::File, io::IsTerminal, os::fd::AsFd, path::PathBuf, time::Duration};

use haulier::{AnyDevice, Options, StoreClient, devices, node};
use rustix::process::{Signal, getppid, set_parent_process_death_signal};
use tracing_subscriber::{EnvFilter, filter::LevelFilter};

use super::{
    engine::{self, Engine},
    exit::{Exit, Failure, Result},
    log::Lossy,
    output::Output,
};

const SOCKET_VAR: &str = "HAULIER_SOCKET";
/// About 30 years: clocks can add it to any time without an overflow.
const TIMEOUT_MAX: f64 = 1e9;

#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Options of every command")]
pub(crate) struct Global {
    /// The node's socket [default: $HAULIER_SOCKET, else a private one of this user]
    #[arg(long, global = true, value_name = "PATH")]
    pub(crate) socket: Option<PathBuf>,

    /// The namespace to work in; keys of other ones are invisible
    #[arg(long, global = true, value_name = "NAME", default_value = "", hide_default_value = true)]
    pub(crate) namespace: String,

    /// Print results and errors as JSON
    #[arg(long, global = true)]
    pub(crate) json: bool,

    /// The longest that one call to the node may take
    #[arg(long, global = true, value_name = "SECONDS", default_value = "30", value_parser = seconds)]
    pub(crate) timeout: Duration,

    /// Log more, on stderr (-vv for all; RUST_LOG=FILTER says which parts)
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    verbose: u8,

    #[command(flatten)]
    pub(crate) engine: engine::Args,

    /// End when this parent process ends
    #[arg(long, global = true, hide = true, value_name = "PID")]
    parent: Option<u32>,
}

impl Global {
    pub(crate) fn output(&self) -> Output {
        Output { json: self.json }
    }

    /// The socket to use.
    pub(crate) fn socket(&self) -> PathBuf {
        let named = self
            .socket
            .clone()
            .or_else(|| env::var_os(SOCKET_VAR).filter(|v| !v.is_empty()).map(PathBuf::from));
        named.unwrap_or_else(node::default_socket)
    }

    /// A client of the engine that was asked for; of the node, for host memory.
    pub(crate) fn connect(&self) -> Result<StoreClient<AnyDevice>> {
        match self.engine.engine {
            Engine::Node => Ok(StoreClient::connect(host()?, self.socket(), self.options())?),
            Engine::Mooncake => self.engine.mooncake(self.options()),
        }
    }

    /// Refuses what only the node does.
    pub(crate) fn node_only(&self, command: &str) -> Result<()> {
        match self.engine.engine {
            Engine::Node => Ok(()),
            Engine::Mooncake => {
                Err(Failure::usage(format!("{command} is about the node; leave out --engine mooncake")))
            }
        }
    }

    /// How clients are opened.
    pub(crate) fn options(&self) -> Options {
        Options { namespace: self.namespace.clone(), deadline: self.timeout, ..Options::default() }
    }

    /// Logs go to stderr: warnings, and what a daemon has to tell. What is returned is to be kept until the end.
    pub(crate) fn start_logging(&self, daemon: bool) -> Result<impl Drop + use<>> {
        let level = match self.verbose + u8::from(daemon) {
            0 => LevelFilter::WARN,
            1 => LevelFilter::INFO,
            2 => LevelFilter::DEBUG,
            _ => LevelFilter::TRACE,
        };
        let filter = EnvFilter::builder()
            .with_default_directive(level.into())
            .from_env()
            .map_err(|e| Failure::usage(format!("RUST_LOG: {e}")))?;
        let refuse = |e| Failure::system("starting the log", e);
        let stderr = std::io::stderr();
        // A descriptor of its own: Rust's stderr has a lock, which a write that waits would keep from everybody else.
        let own = stderr.as_fd().try_clone_to_owned().map_err(refuse)?;
        let log = Lossy::start(File::from(own)).map_err(refuse)?;
        let logs = log.flush_at_end();
        tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_ansi(stderr.is_terminal())
            .with_writer(move || log.clone())
            .init();
        Ok(logs)
    }

    /// Ends this process when its parent ends, however that may happen.
    pub(crate) fn follow_parent(&self) -> Result<()> {
        let Some(parent) = self.parent else { return Ok(()) };
        set_parent_process_death_signal(Some(Signal::TERM))
            .map_err(|e| Failure::system("following the parent", e))?;
        // It may have ended before the kernel was asked.
        let still = getppid().is_some_and(|pid| pid.as_raw_nonzero().get().unsigned_abs() == parent);
        if still {
            Ok(())
        } else {
            Err(Failure::new(Exit::Interrupted, "interrupted", "the parent process is gone"))
        }
    }

    /// What a child process needs to be given, to work with the node at `socket` as this process would.
    pub(crate) fn for_child(&self, socket: PathBuf) -> Vec<OsString> {
        let mut args: Vec<OsString> =
            vec!["--json".into(), "--parent".into(), std::process::id().to_string().into()];
        args.extend(["--engine".into(), "node".into(), "--socket".into(), socket.into()]);
        args.extend(["--timeout".into(), self.timeout.as_secs_f64().to_string().into()]);
        args.extend(["--namespace".into(), self.namespace.clone().into()]);
        args
    }
}

/// The device for host memory; where that backend is not built, any other copies from and to the host as well.
pub(crate) fn host() -> Result<AnyDevice> {
    let mut found = devices::backends().into_iter().flat_map(|backend| backend.devices);
    found.next().ok_or_else(|| {
        Failure::new(Exit::Refused, "not_present", "no backend has a device here; see `haulier devices`")
    })
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number of seconds".to_owned())?;
    match seconds {
        _ if seconds.is_nan() => Err("not a number of seconds".to_owned()),
        _ if seconds > TIMEOUT_MAX => Err(format!("must be at most {TIMEOUT_MAX} seconds")),
        _ => match Duration::try_from_secs_f64(seconds) {
            Ok(limit) if !limit.is_zero() => Ok(limit),
            _ => Err("must be more than 0 seconds".to_owned()),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timeout_is_a_positive_number_of_seconds() {
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        assert_eq!(seconds("1e9"), Ok(Duration::from_secs(1_000_000_000)));
        for (says, texts) in [
            ("more than 0", &["0", "-1", "1e-30", "-inf"][..]),
            ("at most", &["inf", "1e30", "1e300", "1000000001"]),
            ("not a number", &["nan", "soon", ""]),
        ] {
            for text in texts {
                assert!(seconds(text).unwrap_err().contains(says), "{text}");
            }
        }
    }
}

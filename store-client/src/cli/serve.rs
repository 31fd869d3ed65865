//! `haulier serve`: the node daemon in the foreground.

use std::{borrow::Cow, net::SocketAddr};

use clap::{ValueEnum, builder::RangedU64ValueParser};
use haulier::{
    AnyDevice, Error, devices,
    hal::Device,
    node::{self, Node, NodeConfig},
    store::{Config, Pages, Store},
};
use rustix::process::{Resource, getrlimit, setrlimit};
use serde::Serialize;
use signal_hook::{
    consts::{SIGINT, SIGTERM},
    iterator::Signals,
};

use super::{
    engine::HIDDEN,
    exit::{Failure, Result},
    global::Global,
    output,
    size::Size,
};

/// Serve a store to the processes of this host, until SIGTERM or Ctrl-C
///
/// The pool is reserved at start. One line on stdout says when clients can connect; logs go to stderr. Another daemon on
/// the same socket is refused with its process id; the socket of a dead one is taken over.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Memory for all values: bytes, or with a suffix (64MiB, 1.5GiB by 1024; 20GB by 1000)
    #[arg(long, value_name = "SIZE", default_value = "1GiB")]
    pool: Size,

    /// Answer "full" instead of evicting the values that were used longest ago
    #[arg(long)]
    no_evict: bool,

    /// Give a namespace this much of the pool to itself, and no more; may be repeated
    #[arg(long = "quota", value_name = "NAME=SIZE", value_parser = quota)]
    quotas: Vec<(String, Size)>,

    /// Use pages of 2 MiB
    #[arg(long, value_enum, value_name = "WHEN", default_value_t = HugePages::Off)]
    huge_pages: HugePages,

    /// Serve the counters over HTTP, in Prometheus text form, on this loopback address (port 0: any free one)
    #[arg(long, value_name = "ADDR")]
    metrics: Option<SocketAddr>,

    /// Open memory of this backend's devices; may be repeated, or a list with commas [default: all that are present]
    #[arg(long = "backend", value_name = "NAME", value_delimiter = ',')]
    backends: Vec<String>,

    /// Keep the values in the Mooncake cluster whose master listens here, as one client of it for all of this node's. The
    /// pool is then the memory that values pass through, and --timeout the longest that a request may take
    #[arg(long, value_name = "HOST:PORT", hide = HIDDEN, conflicts_with_all = ["quotas", "no_evict"])]
    mooncake: Option<String>,

    /// The most clients at once
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    clients: usize,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum HugePages {
    /// Normal pages
    Off,
    /// If the system has enough of them reserved
    Prefer,
    /// Or do not start
    Require,
}

impl From<HugePages> for Pages {
    fn from(when: HugePages) -> Self {
        match when {
            HugePages::Off => Pages::Normal,
            HugePages::Prefer => Pages::HugePreferred,
            HugePages::Require => Pages::HugeRequired,
        }
    }
}

/// What is said once clients can connect.
#[derive(Debug, Serialize)]
struct Ready<'n> {
    ready: bool,
    /// As text, which JSON needs and a path need not be.
    socket: Cow<'n, str>,
    pid: u32,
    pool: u64,
    page: u64,
    backends: Vec<&'static str>,
    metrics: Option<SocketAddr>,
    /// The master of the cluster that holds the values.
    #[serde(skip_serializing_if = "Option::is_none")]
    mooncake: Option<&'n str>,
}

pub(crate) fn run(global: &Global, args: &Args) -> Result<()> {
    global.node_only("serve")?;
    raise_descriptor_limit();
    let devices = devices(&args.backends)?;
    let backends = names(&devices);
    node::check_socket(&global.socket())?;
    let store = reserve(args)?;
    let stat = store.stat();
    let config = NodeConfig {
        socket: global.socket(),
        store,
        devices,
        metrics: args.metrics,
        clients_max: args.clients,
    };
    let node = match &args.mooncake {
        Some(master) => start_on_mooncake(global, config, master)?,
        None => Node::start(config)?,
    };
    // Before anybody is told that it may be ended.
    let mut signals =
        Signals::new([SIGTERM, SIGINT]).map_err(|e| Failure::system("watching for signals", e))?;
    let ready = Ready {
        ready: true,
        socket: node.socket().to_string_lossy(),
        pid: std::process::id(),
        pool: stat.pool,
        page: stat.page,
        backends,
        metrics: node.metrics_addr(),
        mooncake: args.mooncake.as_deref(),
    };
    if global.output().show(&ready, || ready_line(&ready)).is_err() {
        // Its clients need no stdout.
        tracing::warn!("ready, but the line that says so could not be written to stdout");
    }
    signals.forever().next();
    node.stop();
    Ok(())
}

#[cfg(feature = "mooncake")]
fn start_on_mooncake(global: &Global, config: NodeConfig<AnyDevice>, master: &str) -> Result<Node> {
    let (device, cluster) = global.engine.cluster(master)?;
    Ok(Node::start_on_mooncake(config, &cluster, device, global.timeout)?)
}

#[cfg(not(feature = "mooncake"))]
fn start_on_mooncake(_global: &Global, _config: NodeConfig<AnyDevice>, _master: &str) -> Result<Node> {
    Err(super::engine::not_compiled_in())
}

/// Every client costs descriptors, and the soft limit is low by tradition, for programs that use `select`.
fn raise_descriptor_limit() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(e) = setrlimit(Resource::Nofile, limit) {
        tracing::warn!(error = %e, "the limit of open files could not be raised");
    }
}

fn ready_line(ready: &Ready<'_>) -> String {
    let backends = if ready.backends.is_empty() { "none".to_owned() } else { ready.backends.join(", ") };
    let mut line =
        format!("ready on {}, pool {}, backends {backends}", output::plain(&ready.socket), Size(ready.pool));
    if let Some(master) = ready.mooncake {
        line += &format!(", values in the Mooncake cluster of {}", output::plain(master));
    }
    if let Some(at) = ready.metrics {
        line += &format!(", metrics on http://{at}/metrics");
    }
    line
}

fn reserve(args: &Args) -> Result<Store> {
    let config = Config {
        pool: args.pool.0,
        evict: !args.no_evict,
        quotas: args.quotas.iter().map(|(name, Size(bytes))| (name.clone(), *bytes)).collect(),
        pages: args.huge_pages.into(),
        standing: args.mooncake.is_some(),
    };
    let bar = output::bar("reserving memory", config.pool);
    let store = Store::open(config, |done, total| {
        bar.set_length(total);
        bar.set_position(done);
    });
    bar.finish_and_clear();
    store.map_err(|e| {
        let memory = matches!(e, Error::OutOfMemory { .. });
        let failure = Failure::from(e);
        if memory { failure.advise("ask for less with --pool") } else { failure }
    })
}

fn devices(names: &[String]) -> Result<Vec<AnyDevice>> {
    if names.is_empty() {
        return Ok(devices::backends().into_iter().flat_map(|backend| backend.devices).collect());
    }
    let mut found = Vec::new();
    for (i, name) in names.iter().enumerate() {
        if !names[..i].contains(name) {
            found.extend(devices::open(name).map_err(|e| Failure::usage(format!("--backend {name}: {e}")))?);
        }
    }
    Ok(found)
}

fn names(devices: &[AnyDevice]) -> Vec<&'static str> {
    let mut names: Vec<_> = devices.iter().map(|device| device.identity().backend).collect();
    names.dedup();
    names
}

fn quota(text: &str) -> Result<(String, Size), String> {
    let (name, size) = text.rsplit_once('=').ok_or("write NAME=SIZE, as in training=4GiB")?;
    Ok((name.to_owned(), size.parse()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quota_names_its_namespace() {
        assert_eq!(quota("a=1KiB"), Ok(("a".into(), Size(1024))));
        assert_eq!(quota("a=b=1"), Ok(("a=b".into(), Size(1))));
        assert!(quota("1KiB").is_err() && quota("a=").is_err() && quota("a=lots").is_err());
    }

    #[test]
    fn an_unknown_backend_is_a_usage_failure_that_names_those_that_exist() {
        let failure = devices(&["tpu".into()]).unwrap_err();
        assert!(failure.to_string().contains("usable here"), "{failure}");
        assert_eq!(failure.exit, super::super::exit::Exit::Usage);
    }

    #[test]
    fn the_ready_line_is_stable() {
        let ready = Ready {
            ready: true,
            socket: "/run/n.sock".into(),
            pid: 7,
            pool: 1 << 30,
            page: 4096,
            backends: vec!["cpu"],
            metrics: None,
            mooncake: None,
        };
        assert_eq!(ready_line(&ready), "ready on /run/n.sock, pool 1 GiB, backends cpu");
    }
}

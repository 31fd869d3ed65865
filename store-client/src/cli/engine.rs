//! Which engine the command works on: the node, or a Mooncake cluster.

use std::path::PathBuf;

use haulier::{AnyDevice, Options, StoreClient};

use super::{exit::Result, size::Size};

/// The engines that the command connects to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Engine {
    /// The node daemon of this host
    Node,
    /// A Mooncake cluster of many hosts, with --mooncake-master
    Mooncake,
}

/// The options of what this build does not have are not shown.
pub(crate) const HIDDEN: bool = cfg!(not(feature = "mooncake"));

#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Mooncake, with --engine mooncake or serve --mooncake")]
pub(crate) struct Args {
    /// What holds the values
    #[arg(
        long,
        global = true,
        env = "HAULIER_ENGINE",
        hide_env_values = true,
        value_name = "NAME",
        default_value = "node",
        help_heading = "Options of every command"
    )]
    pub(crate) engine: Engine,

    /// Where mooncake_master listens
    #[arg(
        long,
        global = true,
        hide_short_help = true,
        hide = HIDDEN,
        env = "HAULIER_MOONCAKE_MASTER",
        hide_env_values = true,
        value_name = "HOST:PORT"
    )]
    mooncake_master: Option<String>,

    /// The metadata server
    #[arg(
        long,
        global = true,
        hide_short_help = true,
        hide = HIDDEN,
        value_name = "ADDRESS",
        default_value = "P2PHANDSHAKE"
    )]
    mooncake_metadata: String,

    /// This host, as the others reach it
    #[arg(
        long,
        global = true,
        hide_short_help = true,
        hide = HIDDEN,
        value_name = "HOST",
        default_value = "127.0.0.1"
    )]
    mooncake_host: String,

    /// The transport: tcp, ascend, rdma
    #[arg(
        long,
        global = true,
        hide_short_help = true,
        hide = HIDDEN,
        value_name = "NAME",
        default_value = "tcp"
    )]
    mooncake_protocol: String,

    /// The backend whose first device the client works on, such as ascend [default: host memory]
    #[arg(
        long,
        global = true,
        hide_short_help = true,
        hide = HIDDEN,
        value_name = "NAME"
    )]
    mooncake_backend: Option<String>,

    /// Memory of this process that the cluster may use while it runs
    #[arg(
        long,
        global = true,
        hide_short_help = true,
        hide = HIDDEN,
        value_name = "SIZE",
        default_value = "0"
    )]
    mooncake_segment: Size,

    /// Mooncake's own buffer
    #[arg(
        long,
        global = true,
        hide_short_help = true,
        hide = HIDDEN,
        value_name = "SIZE",
        default_value = "16MiB"
    )]
    mooncake_buffer: Size,

    /// Registered memory that values go through
    #[arg(
        long,
        global = true,
        hide_short_help = true,
        hide = HIDDEN,
        value_name = "SIZE",
        default_value = "128MiB"
    )]
    mooncake_staging: Size,

    /// The library [default: $HAULIER_MOONCAKE, else libmooncake_store.so of the loader's search path]
    #[arg(
        long,
        global = true,
        hide_short_help = true,
        hide = HIDDEN,
        value_name = "PATH"
    )]
    mooncake_library: Option<PathBuf>,
}

impl Args {
    /// A client of the cluster.
    #[cfg(feature = "mooncake")]
    pub(crate) fn mooncake(&self, options: Options) -> Result<StoreClient<AnyDevice>> {
        use super::exit::Failure;

        let master = self.mooncake_master.as_ref().ok_or_else(|| {
            Failure::usage("--engine mooncake needs --mooncake-master HOST:PORT, or $HAULIER_MOONCAKE_MASTER")
        })?;
        let (device, cluster) = self.cluster(master)?;
        Ok(StoreClient::mooncake(device, &cluster, options)?)
    }

    /// The device that Mooncake works on, and how the cluster of `master` is joined.
    #[cfg(feature = "mooncake")]
    pub(crate) fn cluster(&self, master: &str) -> Result<(AnyDevice, haulier::Mooncake)> {
        use haulier::{Mooncake, devices};

        use super::global::host;

        let device = match &self.mooncake_backend {
            Some(name) => devices::open(name)?.remove(0),
            None => host()?,
        };
        let cluster = Mooncake {
            library: self.mooncake_library.clone(),
            metadata: self.mooncake_metadata.clone(),
            host: self.mooncake_host.clone(),
            segment: self.mooncake_segment.0,
            buffer: self.mooncake_buffer.0,
            staging: self.mooncake_staging.0,
            ..Mooncake::new(master, &self.mooncake_protocol)
        };
        Ok((device, cluster))
    }

    /// Says that this build has none.
    #[cfg(not(feature = "mooncake"))]
    pub(crate) fn mooncake(&self, _options: Options) -> Result<StoreClient<AnyDevice>> {
        Err(not_compiled_in())
    }
}

/// What a build without Mooncake says.
#[cfg(not(feature = "mooncake"))]
pub(crate) fn not_compiled_in() -> super::exit::Failure {
    let what = "the Mooncake engine is not compiled in (cargo feature `mooncake`)".into();
    haulier::Error::Unsupported { what }.into()
}

//! The node daemon: one process per host that owns the store's memory and lends it to clients.
//!
//! | module | what it does |
//! |---|---|
//! | `place` | the socket's path: private directory, lock, what an earlier daemon left |
//! | `listen` | accepts connections, of this user only |
//! | `sessions` | who is connected, how many may be, and how all are ended |
//! | `session` | one client on one thread: greets it, reads its requests, owns what it holds |
//! | `handle`, `copy` | what each request does; `copy` those that reach into the client's own memory |
//! | `imports` | the client's allocations that are open here |
//! | `table`, `ahead` | bounds on what one client, and all of them, may keep |
//! | `values` | where the values live: in the pool, or elsewhere |
//! | `cluster` | elsewhere: a Mooncake cluster of many hosts, whose one client the node is for all of its own |
//! | `answer` | answers, and how they are kept within one message |
//! | `endpoint` | how the counters are read over HTTP |
//!
//! A client reads most values without any of these: it finds them in an index that the store shares with it, and holds them by
//! words in memory of its own. `crate::index` tells how. What is here is that its session admits it, and that the node says
//! for how long it lives.
//!
//! What a client does ask for comes by a ring in memory that the two share, and is answered there; `crate::wire` tells how. The
//! session's thread looks there for the next request for a moment after each answer, and then sleeps at the client's socket,
//! so that an idle client costs nothing.
//!
//! Each session has its own thread, bound to the client's device, and shares no lock with another while it waits for its
//! client or for a driver. What a client holds belongs to its session, so all of it is free again when its socket ends,
//! and not before: a client that is given up, because it cannot be understood or does not read, is told nothing more but
//! keeps what it has mapped until it ends itself.

use std::{
    env,
    hash::{BuildHasher, Hasher, RandomState},
    io,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
    thread::{self, JoinHandle},
    time::Duration,
};

use hal::{Deadline, Device};

use self::{
    ahead::Budget,
    endpoint::Endpoint,
    place::Place,
    sessions::Sessions,
    values::{Home, InPool},
};
use crate::{
    error::{Error, Result},
    index::life::Life,
    metrics::Metrics,
    store::{Catalog, Store},
    wire::Socket,
};

mod ahead;
mod answer;
#[cfg(feature = "mooncake")]
mod cluster;
mod copy;
mod endpoint;
mod handle;
mod imports;
mod listen;
mod place;
mod session;
mod sessions;
mod table;
#[cfg(all(test, feature = "cpu"))]
mod tests;
mod values;

/// How long [`Node::stop`] waits for sessions that are still at work, such as in a driver call.
const STOP_LIMIT: Duration = Duration::from_secs(5);

/// What a daemon serves, and where.
#[derive(Debug)]
pub struct NodeConfig<D: Device> {
    /// The socket's path; see [`default_socket`]. Its directory is made private, or must be so.
    pub socket: PathBuf,
    /// The memory and the index.
    pub store: Store,
    /// Devices whose memory the daemon opens. Clients of others copy through host memory.
    pub devices: Vec<D>,
    /// Where to serve the counters over HTTP: a loopback address, with port 0 for any free one. `None` serves none.
    pub metrics: Option<SocketAddr>,
    /// How many clients may be connected at once.
    pub clients_max: usize,
}

/// A running daemon. It works on threads of its own; dropping it ends it.
#[derive(Debug)]
pub struct Node {
    listener: Arc<Socket>,
    acceptor: Option<JoinHandle<()>>,
    sessions: Arc<Sessions>,
    metrics: Arc<Metrics>,
    endpoint: Option<Endpoint>,
    store: Store,
    /// None where clients ask for each value, and once the daemon ends.
    life: Option<Life>,
    // Dropped last: until then no other daemon may take over.
    place: Place,
}

/// What the daemon's threads share.
#[derive(Debug)]
struct Shared<D: Device> {
    store: Store,
    /// Where clients read without a request.
    catalog: Option<Arc<Catalog>>,
    devices: Vec<D>,
    metrics: Arc<Metrics>,
    ahead: Budget,
    home: Box<dyn Home>,
}

impl Node {
    /// Starts a daemon.
    ///
    /// *Errors*: [`Error::AlreadyRunning`] where another one serves this socket; [`Error::InvalidArgument`] for a path
    /// that cannot be served safely and for a metrics address that others could reach; [`Error::Os`], which names the
    /// address where it is in use.
    pub fn start<D: Device>(config: NodeConfig<D>) -> Result<Self> {
        let taken = Place::take(&config.socket)?;
        let metrics = Metrics::of_node(config.store.clone());
        let (catalog, life) = match config.store.share() {
            Ok(shared) => shared.unzip(),
            Err(e) => {
                tracing::warn!(%e, "clients cannot read without a request each");
                (None, None)
            }
        };
        let home = Box::new(InPool { instance: RandomState::new().build_hasher().finish() });
        Self::serve(config, taken, metrics, home, catalog, life)
    }

    /// Starts a daemon that stores in a Mooncake cluster, as one client of it for all of its own. Mooncake works on threads
    /// that are bound to `device`, on one for each client of the daemon.
    ///
    /// The pool, which is to be opened as [`Config::standing`](crate::store::Config::standing) says, keeps no value: it is the
    /// memory that values pass through, and Mooncake reads and writes it. What clients get
    /// is what they would get from an engine on the same cluster, as told at
    /// [`StoreClient::mooncake`](crate::StoreClient::mooncake), and they exchange with such engines; except that
    /// - [`view`](crate::StoreClient::view) and [`alloc`](crate::StoreClient::alloc) lend memory of the pool. Bytes under a
    ///   view stay as they are, whatever becomes of the value. Where views take up all of the pool, a get or a put is
    ///   [`Error::Full`]; nothing is evicted. A value longer than about seven eighths of the pool finds no room.
    /// - [`stat`](crate::StoreClient::stat) tells the figures of the pool, in which there are no keys, while the cluster
    ///   answers.
    /// - A request takes no longer than `limit`; then it is [`Error::Timeout`], unless its client's own limit was shorter. Other
    ///   clients do not wait for it.
    /// - A put whose answer is lost with the daemon is [`Error::Disconnected`]: the cluster may have stored it.
    ///
    /// *Errors*: as [`start`](Self::start), and as `StoreClient::mooncake` where the cluster cannot be joined.
    #[cfg(feature = "mooncake")]
    pub fn start_on_mooncake<D: Device>(
        config: NodeConfig<D>,
        cluster: &crate::Mooncake,
        device: D,
        limit: Duration,
    ) -> Result<Self> {
        if !config.store.is_standing() {
            // A transport that pins what is registered would keep pages that have moved to another arena.
            let what =
                "a node on Mooncake needs a pool whose memory stands; set store::Config::standing".into();
            return Err(Error::InvalidArgument { what });
        }
        let taken = Place::take(&config.socket)?;
        let home = Box::new(cluster::Cluster::join(device, cluster, limit)?);
        let mut metrics = Metrics::of_node(config.store.clone());
        metrics.add(home.counters());
        Self::serve(config, taken, metrics, home, None, None)
    }

    fn serve<D: Device>(
        config: NodeConfig<D>,
        (place, listener): (Place, Socket),
        metrics: Metrics,
        home: Box<dyn Home>,
        catalog: Option<Arc<Catalog>>,
        life: Option<Life>,
    ) -> Result<Self> {
        let NodeConfig { socket, store, devices, metrics: metrics_at, clients_max } = config;
        let (listener, metrics) = (Arc::new(listener), Arc::new(metrics));
        let endpoint = metrics_at.map(|at| Endpoint::start(at, Arc::clone(&metrics))).transpose()?;
        let sessions = Arc::new(Sessions::new(clients_max, metrics.clients.clone()));
        // In a standing pool a grant that waits would keep all of its arena from others.
        let ahead = if store.is_standing() { 0 } else { store.stat().pool };
        let shared = Arc::new(Shared {
            ahead: Budget::of_pool(ahead),
            store: store.clone(),
            catalog,
            devices,
            metrics: Arc::clone(&metrics),
            home,
        });
        let acceptor = thread::Builder::new()
            .name("haulier-accept".into())
            .spawn({
                let (listener, sessions) = (Arc::clone(&listener), Arc::clone(&sessions));
                move || listen::accept_all(&shared, &listener, &sessions)
            })
            .map_err(|e| os("starting the daemon's threads", &e))?;
        tracing::info!(socket = %socket.display(), "the node daemon serves");
        Ok(Node { listener, acceptor: Some(acceptor), sessions, metrics, endpoint, store, life, place })
    }

    /// The socket's path.
    pub fn socket(&self) -> &Path {
        self.place.socket()
    }

    /// Where the counters are served over HTTP, if they are.
    pub fn metrics_addr(&self) -> Option<SocketAddr> {
        self.endpoint.as_ref().map(Endpoint::addr)
    }

    /// The counters in Prometheus text form.
    pub fn metrics(&self) -> String {
        self.metrics.render()
    }

    /// Ends the daemon: no new clients, every connection ended, and their requests at work finished where that takes
    /// no more than a few seconds. What clients have mapped stays valid in them.
    pub fn stop(self) {}
}

impl Drop for Node {
    fn drop(&mut self) {
        // First of all: from now on clients ask, and so learn that this is the end.
        self.life.take();
        self.store.end();
        self.sessions.refuse_more();
        self.listener.shutdown();
        if let Some(acceptor) = self.acceptor.take() {
            // A panic there was reported when it happened.
            let _ = acceptor.join();
        }
        let left = self.sessions.end(Deadline::after(STOP_LIMIT));
        if left > 0 {
            tracing::warn!(left, "sessions are still in a driver call; the daemon ends without them");
        }
        tracing::info!(socket = %self.socket().display(), "the node daemon has ended");
    }
}

/// Whether a daemon could start at `socket` now, so that what is in the way is known before memory is reserved for it.
///
/// *Errors*: as [`Node::start`] for the socket's sake.
pub fn check_socket(socket: &Path) -> Result<()> {
    Place::take(socket).map(drop)
}

/// Where a daemon serves and a client looks unless told otherwise: `$XDG_RUNTIME_DIR/haulier/node.sock`, or
/// `/tmp/haulier-<uid>/node.sock` without that.
pub fn default_socket() -> PathBuf {
    match env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from) {
        Some(dir) if dir.is_absolute() => dir.join("haulier/node.sock"),
        _ => format!("/tmp/haulier-{}/node.sock", rustix::process::geteuid().as_raw()).into(),
    }
}

fn os(what: impl Into<String>, e: &io::Error) -> Error {
    Error::Os { what: what.into(), reason: e.to_string(), errno: e.raw_os_error() }
}

//! Counters of what was asked of a store and what became of it: the daemon's, and those of an engine in this process.

use std::{fmt, sync::OnceLock, time::Duration};

use parking_lot::Mutex;
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric, prometheus_text},
    metrics::{
        counter::{ConstCounter, Counter},
        family::Family,
        gauge::{ConstGauge, Gauge},
        histogram::{Histogram, exponential_buckets},
    },
    registry::{Registry, Unit},
};

use crate::{
    error::{Error, Result},
    index::Reads,
    store::{Put, Store},
    wire::{Fallback, Path, Request},
};

/// The outcome of what finds something under a key.
pub(crate) const FOUND: &str = "found";

const OPS: usize = Op::Garbled as usize + 1;
const ROUTES: usize = Route::Inline as usize + 1;
const PUTS: usize = Put::AlreadyExists as usize + 1;

/// Every counter, and the text that shows them.
#[derive(Debug)]
pub(crate) struct Metrics {
    registry: Registry,
    operations: Family<Operation, Counter>,
    bytes: Family<Transfer, Counter>,
    fallbacks: Family<Reason, Counter>,
    durations: Family<Kind, Histogram, fn() -> Histogram>,
    busy: Busy,
    /// Connections.
    pub(crate) clients: Gauge,
    /// Grants of all clients.
    pub(crate) grants: Gauge,
    /// Holds of all clients that they asked for.
    pub(crate) holds: Gauge,
    /// Where clients read without asking, and what was counted of that.
    unasked: Option<(Store, Mutex<Reads>)>,
    /// Open allocations of all clients.
    pub(crate) imports: Gauge,
}

/// Counters that every put and get needs, taken out of their families at the first use: from then on, counting a value
/// looks nothing up.
#[derive(Debug, Default)]
struct Busy {
    puts: [[OnceLock<Counter>; PUTS]; ROUTES],
    gets: [OnceLock<Counter>; ROUTES],
    came: [OnceLock<Counter>; ROUTES],
    went: [OnceLock<Counter>; ROUTES],
    host: OnceLock<Counter>,
    /// Whether a key was not there, or was.
    found: [[OnceLock<Counter>; 2]; OPS],
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Operation {
    op: &'static str,
    path: &'static str,
    outcome: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Transfer {
    direction: &'static str,
    path: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Reason {
    reason: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Kind {
    op: &'static str,
}

impl Metrics {
    /// Those of an engine in this process: what became of its calls, and the figures of its store.
    pub(crate) fn new(store: Store) -> Self {
        let mut metrics = Metrics {
            registry: Registry::with_prefix("haulier"),
            operations: Family::default(),
            bytes: Family::default(),
            fallbacks: Family::default(),
            // From 4 microseconds to 17 seconds.
            durations: Family::new_with_constructor(|| Histogram::new(exponential_buckets(4e-6, 4.0, 12))),
            busy: Busy::default(),
            clients: Gauge::default(),
            grants: Gauge::default(),
            holds: Gauge::default(),
            unasked: None,
            imports: Gauge::default(),
        };
        let Metrics { registry, operations, bytes, fallbacks, .. } = &mut metrics;
        registry.register("operations", "Slots of requests, by what became of them", operations.clone());
        registry.register_with_unit(
            "values",
            "Bytes of values that came or went",
            Unit::Bytes,
            bytes.clone(),
        );
        registry.register("fallbacks", "Values that came through host memory, and why", fallbacks.clone());
        registry.register_collector(Box::new(Figures(store)));
        metrics
    }

    /// Those of a daemon: also how long requests take, and what its clients hold.
    pub(crate) fn of_node(store: Store) -> Self {
        let mut metrics = Self::new(store.clone());
        let Metrics { registry, durations, clients, grants, holds, imports, .. } = &mut metrics;
        registry.register_with_unit(
            "request_duration",
            "Time from a request's arrival to its answer",
            Unit::Seconds,
            durations.clone(),
        );
        registry.register("clients", "Connected clients", clients.clone());
        registry.register("grants", "Grants of memory not yet committed", grants.clone());
        registry.register_collector(Box::new(Holds { asked: holds.clone(), store: store.clone() }));
        registry.register("imports", "Allocations of clients that are open here", imports.clone());
        metrics.unasked = Some((store, Mutex::default()));
        metrics
    }

    /// Shows these too.
    #[cfg(feature = "mooncake")]
    pub(crate) fn add(&mut self, counters: Box<dyn Collector>) {
        self.registry.register_collector(counters);
    }

    /// The text of all.
    pub(crate) fn render(&self) -> String {
        self.count_unasked();
        let mut text = String::new();
        if let Err(e) = prometheus_text::encode(&mut text, &self.registry) {
            tracing::warn!(%e, "the counters could not be written out");
        }
        text
    }

    /// Counts slots.
    pub(crate) fn count(&self, op: Op, route: Option<Route>, outcome: &'static str, slots: u64) {
        self.operations.get_or_create(&Operation::new(op, route, outcome)).inc_by(slots);
    }

    /// Counts what became of a value of `len` bytes that came by `path`.
    pub(crate) fn put(&self, put: &Result<Put>, len: u64, path: Path) {
        self.puts([(put, len, path)]);
    }

    /// Counts what became of values of so many bytes that came by these paths. Slots that fared alike are added up
    /// first: the counters are everybody's.
    pub(crate) fn puts<'p>(&self, slots: impl IntoIterator<Item = (&'p Result<Put>, u64, Path)>) {
        let mut slots = slots.into_iter().peekable();
        while let Some((put, len, path)) = slots.next() {
            let (mut count, mut bytes) = (1, len);
            while let Ok(put) = put
                && let Some((_, len, _)) =
                    slots.next_if(|(next, _, by)| matches!(next, Ok(next) if next == put) && *by == path)
            {
                count += 1;
                bytes += len;
            }
            self.puts_alike(put, count, bytes, path);
        }
    }

    fn puts_alike(&self, put: &Result<Put>, count: u64, bytes: u64, path: Path) {
        let route = Route::of(path);
        match put {
            Ok(put) => {
                let row = || {
                    self.operations.get_or_create_owned(&Operation::new(Op::Put, Some(route), put.label()))
                };
                self.busy.puts[route as usize][*put as usize].get_or_init(row).inc_by(count);
                if *put != Put::AlreadyExists {
                    let row = || self.bytes.get_or_create_owned(&Transfer::new("in", route));
                    self.busy.came[route as usize].get_or_init(row).inc_by(bytes);
                }
            }
            Err(e) => self.count(Op::Put, Some(route), e.label(), count),
        }
        match path {
            Path::Staging(why @ Fallback::HOST) => {
                let row = || self.fallbacks.get_or_create_owned(&Reason { reason: why.label() });
                self.busy.host.get_or_init(row).inc_by(count);
            }
            Path::Staging(why) => {
                self.fallbacks.get_or_create(&Reason { reason: why.label() }).inc_by(count);
            }
            Path::Ipc | Path::Alloc => {}
        }
    }

    /// Counts what clients have read without asking since this was last done.
    fn count_unasked(&self) {
        let Some((store, counted)) = &self.unasked else { return };
        let Some(catalog) = store.catalog() else { return };
        let mut counted = counted.lock();
        let now = catalog.reads();
        let more = now.minus(*counted);
        *counted = now;
        if more != Reads::default() {
            self.got_many(Route::Shared, more.values, more.bytes);
        }
    }

    /// Counts a value of `len` bytes that was found for a client.
    pub(crate) fn got(&self, route: Route, len: u64) {
        self.got_many(route, 1, len);
    }

    /// Counts `count` values of `bytes` bytes in all that were found for a client.
    pub(crate) fn got_many(&self, route: Route, count: u64, bytes: u64) {
        let row = || self.operations.get_or_create_owned(&Operation::new(Op::Get, Some(route), FOUND));
        self.busy.gets[route as usize].get_or_init(row).inc_by(count);
        let row = || self.bytes.get_or_create_owned(&Transfer::new("out", route));
        self.busy.went[route as usize].get_or_init(row).inc_by(bytes);
    }

    /// Counts whether a key was there.
    pub(crate) fn found(&self, op: Op, found: Result<bool, &Error>) {
        match found {
            Ok(found) => {
                let outcome = if found { FOUND } else { Error::NotFound.label() };
                let row = || self.operations.get_or_create_owned(&Operation::new(op, None, outcome));
                self.busy.found[op as usize][usize::from(found)].get_or_init(row).inc();
            }
            Err(e) => self.count(op, None, e.label(), 1),
        }
    }

    /// Records how long a request took.
    pub(crate) fn took(&self, op: Op, time: Duration) {
        self.durations.get_or_create(&Kind { op: op.label() }).observe(time.as_secs_f64());
    }
}

impl Operation {
    fn new(op: Op, route: Option<Route>, outcome: &'static str) -> Self {
        Operation { op: op.label(), path: route.map_or("none", Route::label), outcome }
    }
}

impl Transfer {
    fn new(direction: &'static str, route: Route) -> Self {
        Transfer { direction, path: route.label() }
    }
}

/// What a request asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Op {
    Hello,
    Reserve,
    Put,
    Get,
    Release,
    Describe,
    Remove,
    Pin,
    List,
    Inspect,
    Garbled,
}

impl Op {
    pub(crate) fn of(request: &Request<'_>) -> Self {
        match request {
            Request::Hello { .. } | Request::Ring => Op::Hello,
            Request::Reserve { .. } => Op::Reserve,
            Request::Commit { .. } | Request::PutInline { .. } | Request::PutIpc { .. } => Op::Put,
            Request::GetIpc { .. } | Request::Hold { .. } => Op::Get,
            Request::Abandon { .. } | Request::Release { .. } => Op::Release,
            Request::Describe { .. } => Op::Describe,
            Request::Remove { .. } | Request::RemovePrefix { .. } => Op::Remove,
            Request::SetPinned { .. } => Op::Pin,
            Request::List { .. } => Op::List,
            Request::Arena { .. } | Request::Stat | Request::Metrics { .. } | Request::Index => Op::Inspect,
        }
    }

    fn label(self) -> &'static str {
        match self {
            Op::Hello => "hello",
            Op::Reserve => "reserve",
            Op::Put => "put",
            Op::Get => "get",
            Op::Release => "release",
            Op::Describe => "describe",
            Op::Remove => "remove",
            Op::Pin => "pin",
            Op::List => "list",
            Op::Inspect => "inspect",
            Op::Garbled => "garbled",
        }
    }
}

/// How a value's bytes came here or left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Route {
    Ipc,
    Staging,
    Alloc,
    /// Read in place by the client.
    Shared,
    /// In the answer itself.
    Inline,
}

impl Route {
    pub(crate) fn of(path: Path) -> Self {
        match path {
            Path::Ipc => Route::Ipc,
            Path::Staging(_) => Route::Staging,
            Path::Alloc => Route::Alloc,
        }
    }

    fn label(self) -> &'static str {
        match self {
            Route::Ipc => "ipc",
            Route::Staging => "staging",
            Route::Alloc => "alloc",
            Route::Shared => "shared",
            Route::Inline => "inline",
        }
    }
}

/// Values that clients hold, whether they asked for the hold or took it.
#[derive(Debug)]
struct Holds {
    asked: Gauge,
    store: Store,
}

impl Collector for Holds {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let taken = self.store.catalog().map_or(0, |catalog| catalog.holds());
        let holds = ConstGauge::new(self.asked.get().saturating_add_unsigned(taken));
        holds.encode(encoder.encode_descriptor(
            "holds",
            "Values that clients hold",
            None,
            holds.metric_type(),
        )?)
    }
}

/// The store's own figures, asked for when the text is made.
struct Figures(Store);

impl fmt::Debug for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Figures")
    }
}

impl Collector for Figures {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let stat = self.0.stat();
        let bytes = [
            ("pool", "Memory for values", stat.pool),
            ("used", "Memory that values take up", stat.used),
            ("granted", "Memory that grants take up", stat.granted),
            ("free", "Memory that nothing takes up", stat.free),
            ("largest", "The largest value that is sure to fit without eviction", stat.largest),
            ("populated", "Memory that the arenas have", stat.populated),
            ("page", "A page of the pool", stat.page),
        ];
        let counts = [
            ("objects", "Keys", stat.objects),
            ("arenas", "Arenas", stat.arenas),
            ("namespaces", "Namespaces", stat.spaces),
        ];
        let bytes = bytes.map(|figure| (figure, Some(&Unit::Bytes)));
        let counts = counts.map(|figure| (figure, None));
        for ((name, help, value), unit) in bytes.into_iter().chain(counts) {
            let gauge = ConstGauge::new(value);
            gauge.encode(encoder.encode_descriptor(name, help, unit, gauge.metric_type())?)?;
        }
        let reserve = ConstGauge::new(Duration::from_millis(stat.reserve_ms).as_secs_f64());
        let help = "How long it took to reserve and touch the pool";
        let unit = Some(&Unit::Seconds);
        reserve.encode(encoder.encode_descriptor("reserve", help, unit, reserve.metric_type())?)?;
        let evictions = ConstCounter::new(stat.evictions);
        let help = "Values evicted to make room";
        evictions.encode(encoder.encode_descriptor("evictions", help, None, evictions.metric_type())?)
    }
}

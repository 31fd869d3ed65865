//! The daemon's counters.

use std::{fmt, time::Duration};

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
    error::Error,
    store::{Put, Store},
    wire::{Fallback, Path, Request},
};

/// Every counter, and the text that shows them.
#[derive(Debug)]
pub(super) struct Metrics {
    registry: Registry,
    operations: Family<Operation, Counter>,
    bytes: Family<Transfer, Counter>,
    fallbacks: Family<Reason, Counter>,
    durations: Family<Kind, Histogram, fn() -> Histogram>,
    /// Connections.
    pub(super) clients: Gauge,
    /// Grants of all clients.
    pub(super) grants: Gauge,
    /// Holds of all clients.
    pub(super) holds: Gauge,
    /// Open allocations of all clients.
    pub(super) imports: Gauge,
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
    pub(super) fn new(store: Store) -> Self {
        let mut metrics = Metrics {
            registry: Registry::with_prefix("haulier"),
            operations: Family::default(),
            bytes: Family::default(),
            fallbacks: Family::default(),
            // From 4 microseconds to 17 seconds.
            durations: Family::new_with_constructor(|| Histogram::new(exponential_buckets(4e-6, 4.0, 12))),
            clients: Gauge::default(),
            grants: Gauge::default(),
            holds: Gauge::default(),
            imports: Gauge::default(),
        };
        let Metrics { registry, operations, bytes, fallbacks, durations, clients, grants, holds, imports } =
            &mut metrics;
        registry.register("operations", "Slots of requests, by what became of them", operations.clone());
        registry.register_with_unit(
            "values",
            "Bytes of values that came or went",
            Unit::Bytes,
            bytes.clone(),
        );
        registry.register("fallbacks", "Values that came through host memory, and why", fallbacks.clone());
        registry.register_with_unit(
            "request_duration",
            "Time from a request's arrival to its answer",
            Unit::Seconds,
            durations.clone(),
        );
        registry.register("clients", "Connected clients", clients.clone());
        registry.register("grants", "Grants of memory not yet committed", grants.clone());
        registry.register("holds", "Values that clients hold", holds.clone());
        registry.register("imports", "Allocations of clients that are open here", imports.clone());
        registry.register_collector(Box::new(Figures(store)));
        metrics
    }

    /// The text of all.
    pub(super) fn render(&self) -> String {
        let mut text = String::new();
        if let Err(e) = prometheus_text::encode(&mut text, &self.registry) {
            tracing::warn!(%e, "the counters could not be written out");
        }
        text
    }

    /// Counts slots.
    pub(super) fn count(&self, op: Op, route: Option<Route>, outcome: &'static str, slots: u64) {
        let path = route.map_or("none", Route::label);
        self.operations.get_or_create(&Operation { op: op.label(), path, outcome }).inc_by(slots);
    }

    /// Counts the bytes of a value that was stored.
    pub(super) fn came(&self, route: Route, len: u64) {
        self.bytes.get_or_create(&Transfer { direction: "in", path: route.label() }).inc_by(len);
    }

    /// Counts a value that was found for a client, and its bytes.
    pub(super) fn got(&self, route: Route, len: u64) {
        self.count(Op::Get, Some(route), "found", 1);
        self.bytes.get_or_create(&Transfer { direction: "out", path: route.label() }).inc_by(len);
    }

    /// Counts a value that came by staging.
    pub(super) fn fell_back(&self, why: Fallback) {
        self.fallbacks.get_or_create(&Reason { reason: why.label() }).inc();
    }

    /// Records how long a request took.
    pub(super) fn took(&self, op: Op, time: Duration) {
        self.durations.get_or_create(&Kind { op: op.label() }).observe(time.as_secs_f64());
    }
}

/// What a request asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Op {
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
    pub(super) fn of(request: &Request<'_>) -> Self {
        match request {
            Request::Hello { .. } => Op::Hello,
            Request::Reserve { .. } => Op::Reserve,
            Request::Commit { .. } | Request::PutInline { .. } | Request::PutIpc { .. } => Op::Put,
            Request::GetIpc { .. } | Request::Hold { .. } => Op::Get,
            Request::Abandon { .. } | Request::Release { .. } => Op::Release,
            Request::Describe { .. } => Op::Describe,
            Request::Remove { .. } | Request::RemovePrefix { .. } => Op::Remove,
            Request::SetPinned { .. } => Op::Pin,
            Request::List { .. } => Op::List,
            Request::Arena { .. } | Request::Stat | Request::Metrics { .. } => Op::Inspect,
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
pub(super) enum Route {
    Ipc,
    Staging,
    Alloc,
    /// Read in place by the client.
    Shared,
    /// In the answer itself.
    Inline,
}

impl Route {
    pub(super) fn of(path: Path) -> Self {
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

/// What became of a put, as a short, stable word.
pub(super) fn put_outcome(put: Put) -> &'static str {
    match put {
        Put::Stored => "stored",
        Put::Replaced => "replaced",
        Put::AlreadyExists => "already_exists",
    }
}

/// An error as a short, stable word.
pub(super) fn outcome(e: &Error) -> &'static str {
    match e {
        Error::NotFound => "not_found",
        Error::TooSmall { .. } => "too_small",
        Error::Full { .. } => "full",
        Error::TooLarge { .. } => "too_large",
        Error::InvalidKey { .. } | Error::InvalidRange { .. } | Error::InvalidArgument { .. } => "invalid",
        Error::ResourceExhausted { .. } => "exhausted",
        Error::OutOfMemory { .. } => "out_of_memory",
        Error::Timeout { .. } => "timeout",
        Error::Unsupported { .. } => "unsupported",
        Error::Protocol { .. } => "protocol",
        Error::Device(e) => e.kind().label(),
        _ => "error",
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
        let evictions = ConstCounter::new(stat.evictions);
        let help = "Values evicted to make room";
        evictions.encode(encoder.encode_descriptor("evictions", help, None, evictions.metric_type())?)
    }
}

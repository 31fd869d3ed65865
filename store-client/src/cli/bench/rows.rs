//! The benchmark's rows and the marks that they are held against.

use std::time::Duration;

use serde::Serialize;

use super::measure::{Samples, percentile};
use crate::cli::{output, size::Size};

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Op {
    Put,
    GetInto,
    View,
    PutAllocated,
    BatchPut,
    BatchGetInto,
}

impl Op {
    pub(crate) const SINGLE: [Op; 4] = [Op::Put, Op::GetInto, Op::View, Op::PutAllocated];
    pub(crate) const BATCH: [Op; 2] = [Op::BatchPut, Op::BatchGetInto];

    fn label(self) -> &'static str {
        match self {
            Op::Put => "put",
            Op::GetInto => "get_into",
            Op::View => "view",
            Op::PutAllocated => "put_allocated",
            Op::BatchPut => "batch_put",
            Op::BatchGetInto => "batch_get_into",
        }
    }
}

/// Which engine holds the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Path {
    InProcess,
    Node,
    Mooncake,
}

impl Path {
    fn label(self) -> &'static str {
        match self {
            Path::InProcess => "in-process",
            Path::Node => "node",
            Path::Mooncake => "mooncake",
        }
    }
}

/// One measured operation.
#[derive(Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) op: Op,
    pub(crate) path: Path,
    /// Bytes of one value.
    pub(crate) bytes: u64,
    /// Values of one call.
    pub(crate) values: u64,
    pub(crate) turns: u64,
    pub(crate) median_us: f64,
    pub(crate) p95_us: f64,
    /// Of all values of the call, into warm memory.
    pub(crate) memcpy_us: f64,
    /// Of 64 bytes over a bare Unix stream socket.
    pub(crate) round_trip_us: f64,
    pub(crate) memcpy_ratio: f64,
    pub(crate) round_trip_ratio: f64,
    pub(crate) mark: Option<Mark>,
}

/// A first mark, and whether it was met.
#[derive(Debug, Serialize)]
pub(crate) struct Mark {
    pub(crate) mark: String,
    pub(crate) limit: f64,
    pub(crate) met: bool,
}

impl Row {
    pub(crate) fn new(op: Op, path: Path, bytes: usize, values: usize, samples: &Samples) -> Self {
        let median = |samples: &[Duration]| micros(percentile(samples, 50));
        let mut row = Row {
            op,
            path,
            bytes: bytes as u64,
            values: values as u64,
            turns: samples.op.len() as u64,
            median_us: median(&samples.op),
            p95_us: micros(percentile(&samples.op, 95)),
            memcpy_us: median(&samples.memcpy),
            round_trip_us: median(&samples.round_trip),
            memcpy_ratio: 0.0,
            round_trip_ratio: 0.0,
            mark: None,
        };
        row.memcpy_ratio = ratio(row.median_us, row.memcpy_us);
        row.round_trip_ratio = ratio(row.median_us, row.round_trip_us);
        row.mark = row.mark();
        row
    }

    /// The first mark of this row; there are marks for the node only.
    fn mark(&self) -> Option<Mark> {
        if self.path != Path::Node {
            return None;
        }
        let round_trips = |times: f64| (format!("{times}x round trip"), times * self.round_trip_us);
        let memcpys = |times: f64| (format!("{times}x memcpy"), times * self.memcpy_us);
        let (mark, limit) = match (self.op, self.bytes, self.values) {
            (Op::View | Op::PutAllocated, ..=LARGEST, 1) => round_trips(1.6),
            (Op::Put | Op::GetInto, SMALLEST, 1) => round_trips(1.6),
            (Op::Put | Op::GetInto, MIB, 1) => memcpys(1.6),
            (Op::Put | Op::GetInto, MIB_16, 1) => memcpys(1.15),
            (Op::Put | Op::GetInto, LARGEST, 1) => memcpys(1.1),
            (Op::BatchPut | Op::BatchGetInto, SMALLEST, values @ 400) => (
                "round trip + memcpy + 400 x 2 us".into(),
                self.round_trip_us + self.memcpy_us + 2.0 * values as f64,
            ),
            _ => return None,
        };
        Some(Mark { mark, limit, met: self.median_us <= limit })
    }
}

const SMALLEST: u64 = 4 << 10;
const MIB: u64 = 1 << 20;
const MIB_16: u64 = 16 << 20;
const LARGEST: u64 = 256 << 20;

fn micros(time: Duration) -> f64 {
    time.as_nanos() as f64 / 1e3
}

fn ratio(of: f64, to: f64) -> f64 {
    if to > 0.0 { of / to } else { 0.0 }
}

/// A figure about memory.
#[derive(Debug, Serialize)]
pub(crate) struct MemoryRow {
    pub(crate) op: &'static str,
    pub(crate) path: Path,
    /// Values that were stored, or put and removed.
    pub(crate) values: u64,
    /// By how much the node's memory grew, all of it or that beside the pool, as `op` says.
    pub(crate) growth_bytes: i64,
    pub(crate) per_value: f64,
    pub(crate) seconds: f64,
    pub(crate) mark: Mark,
}

/// The rows as a person reads them.
pub(crate) fn text(rows: &[Row]) -> String {
    let mut table = output::table(&[
        "OP",
        "PATH",
        ">SIZE",
        ">MEDIAN US",
        ">P95 US",
        ">X MEMCPY",
        ">X ROUND TRIP",
        ">TURNS",
        "FIRST MARK",
        ">LIMIT US",
        "",
    ]);
    for row in rows {
        let size = Size(row.bytes);
        let (mark, limit, met) = verdict(row.mark.as_ref());
        table.add_row([
            row.op.label().to_owned(),
            row.path.label().to_owned(),
            if row.values == 1 { size.to_string() } else { format!("{} x {size}", row.values) },
            format!("{:.2}", row.median_us),
            format!("{:.2}", row.p95_us),
            format!("{:.2}", row.memcpy_ratio),
            format!("{:.2}", row.round_trip_ratio),
            row.turns.to_string(),
            mark,
            limit,
            met.to_owned(),
        ]);
    }
    table.trim_fmt()
}

/// The memory rows as a person reads them.
pub(crate) fn memory_text(rows: &[MemoryRow]) -> String {
    let mut table = output::table(&[
        "OP",
        "PATH",
        ">VALUES",
        ">GROWTH BYTES",
        ">PER VALUE",
        ">SECONDS",
        "FIRST MARK",
        ">LIMIT",
        "",
    ]);
    for row in rows {
        let (mark, limit, met) = verdict(Some(&row.mark));
        table.add_row([
            row.op.to_owned(),
            row.path.label().to_owned(),
            row.values.to_string(),
            row.growth_bytes.to_string(),
            format!("{:.2}", row.per_value),
            format!("{:.2}", row.seconds),
            mark,
            limit,
            met.to_owned(),
        ]);
    }
    table.trim_fmt()
}

fn verdict(mark: Option<&Mark>) -> (String, String, &'static str) {
    match mark {
        None => ("-".into(), "-".into(), "-"),
        Some(mark) => (
            format!("<= {}", mark.mark),
            format!("{:.2}", mark.limit),
            if mark.met { "met" } else { "missed" },
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(op: Op, path: Path, bytes: u64, values: usize, micros: [u64; 3]) -> Row {
        let of = |n| vec![Duration::from_micros(n); 3];
        let samples = Samples { op: of(micros[0]), memcpy: of(micros[1]), round_trip: of(micros[2]) };
        Row::new(op, path, bytes as usize, values, &samples)
    }

    #[test]
    fn marks_are_those_of_the_first_table() {
        for (op, bytes, values, limit) in [
            (Op::Put, SMALLEST, 1, Some(16.0)),
            (Op::Put, 64 << 10, 1, None),
            (Op::GetInto, MIB, 1, Some(160.0)),
            (Op::Put, MIB_16, 1, Some(115.0)),
            (Op::GetInto, LARGEST, 1, Some(110.0)),
            (Op::View, LARGEST, 1, Some(16.0)),
            (Op::PutAllocated, 64 << 10, 1, Some(16.0)),
            (Op::View, LARGEST + 1, 1, None),
            (Op::BatchPut, SMALLEST, 400, Some(910.0)),
            (Op::BatchGetInto, 64 << 10, 64, None),
        ] {
            let row = row(op, Path::Node, bytes, values, [112, 100, 10]);
            let mark = row.mark.as_ref().map(|mark| (mark.limit * 100.0).round() / 100.0);
            assert_eq!(mark, limit, "{op:?} {bytes}");
            assert_eq!((row.memcpy_ratio, row.round_trip_ratio), (1.12, 11.2));
        }
        assert!(row(Op::Put, Path::InProcess, SMALLEST, 1, [1, 1, 1]).mark.is_none());
    }

    #[test]
    fn the_table_says_what_was_met() {
        let rows = [
            row(Op::Put, Path::Node, SMALLEST, 1, [15, 1, 10]),
            row(Op::Put, Path::Node, MIB, 1, [200, 100, 10]),
            row(Op::BatchPut, Path::InProcess, SMALLEST, 400, [1, 1, 1]),
        ];
        let text = text(&rows);
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[1].ends_with("met") && lines[1].contains("<= 1.6x round trip"), "{text}");
        assert!(lines[2].ends_with("missed") && lines[2].contains("<= 1.6x memcpy"), "{text}");
        assert!(lines[3].contains("400 x 4 KiB") && lines[3].ends_with('-'), "{text}");
    }
}

//! What comes out: rows for a machine, tables for a person.

use std::fmt::Write;

use serde::Serialize;

use crate::{
    job::{Op, Shape},
    machine::Machine,
    run::{Cell, Plan},
    store::Peer,
};

/// What a report is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Subject {
    /// Of the whole table.
    pub title: &'static str,
    /// The peer that ratios refer to.
    pub reference: &'static str,
}

/// Everything about a run.
#[derive(Debug, Serialize)]
pub struct Report {
    /// What it is about.
    #[serde(flatten)]
    pub subject: Subject,
    /// Where it ran.
    pub machine: Machine,
    /// Rounds that were planned for each shape.
    pub rounds: usize,
    /// How long a burst of calls was, in ms; large values have a few calls all the same.
    pub burst_ms: u64,
    /// How long it took.
    pub seconds: f64,
    /// Who took part, and who could not.
    pub peers: Vec<About>,
    /// What was measured.
    pub rows: Vec<Row>,
}

/// A peer.
#[derive(Debug, Serialize)]
pub struct About {
    /// In the tables.
    pub name: String,
    /// What it is.
    pub about: String,
    /// Why it did not take part.
    pub missing: Option<String>,
}

impl About {
    /// One that took part.
    pub fn present(peer: &dyn Peer) -> Self {
        About { name: peer.name().into(), about: peer.about().into(), missing: None }
    }
}

/// One peer, operation and shape.
#[derive(Debug, Serialize)]
pub struct Row {
    /// By name.
    pub peer: String,
    /// Which call.
    pub op: Op,
    /// Of how much.
    #[serde(flatten)]
    pub shape: Shape,
    /// µs of a call; `None` where it could not be measured.
    pub figures: Option<Figures>,
    /// Why it could not be measured, or not to the end.
    pub failed: Option<String>,
}

/// Figures over all samples.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Figures {
    /// µs that half of the calls did not exceed.
    pub median_us: f64,
    /// µs that a quarter did not exceed.
    pub p25_us: f64,
    /// µs that three quarters did not exceed.
    pub p75_us: f64,
    /// Calls, or groups of calls too short for the clock.
    pub samples: usize,
    /// Rounds that took place.
    pub rounds: usize,
    /// The peer's median by that of the reference for the same bytes in the same round; of all rounds, the median.
    pub times_reference: Option<f64>,
}

/// The sample that `part` of all do not exceed.
fn quantile(samples: &mut [f64], part: f64) -> f64 {
    samples.sort_unstable_by(f64::total_cmp);
    let rank = (samples.len() as f64 * part).ceil() as usize;
    samples.get(rank.saturating_sub(1)).copied().unwrap_or(f64::NAN)
}

fn median(samples: &[f64]) -> f64 {
    quantile(&mut samples.to_vec(), 0.5)
}

impl Report {
    /// Out of the samples.
    pub fn new(
        subject: Subject,
        machine: Machine,
        plan: &Plan,
        seconds: f64,
        peers: Vec<About>,
        cells: &[Cell],
    ) -> Self {
        let rows = cells.iter().map(|cell| {
            let against = if cell.op.reads() { Op::GetInto } else { Op::Put };
            let reference = cells
                .iter()
                .find(|c| c.peer == subject.reference && c.op == against && c.shape == cell.shape);
            Row {
                peer: cell.peer.into(),
                op: cell.op,
                shape: cell.shape,
                figures: figures(cell, reference),
                failed: cell.failed.as_ref().map(ToString::to_string),
            }
        });
        let burst_ms = plan.limits.budget.as_millis() as u64;
        Report { subject, machine, rounds: plan.rounds, burst_ms, seconds, peers, rows: rows.collect() }
    }

    /// The figures of one cell.
    pub fn figures(&self, peer: &str, op: Op, shape: Shape) -> Option<Figures> {
        self.row(peer, op, shape)?.figures
    }

    fn row(&self, peer: &str, op: Op, shape: Shape) -> Option<&Row> {
        self.rows.iter().find(|row| row.peer == peer && row.op == op && row.shape == shape)
    }

    /// All shapes, single values first.
    pub fn shapes(&self) -> Vec<Shape> {
        let mut shapes: Vec<Shape> = Vec::new();
        for row in &self.rows {
            if !shapes.contains(&row.shape) {
                shapes.push(row.shape);
            }
        }
        shapes.sort_by_key(|shape| (shape.values > 1, shape.bytes));
        shapes
    }

    /// Tables in Markdown.
    pub fn markdown(&self) -> String {
        let mut text = format!(
            "# {}\n\n\
             Ran on a {}. Up to {} rounds for each size, in {:.0} s; in each, every peer made calls for {} ms (large values: a few calls), one \
             after the other, so that whatever else the machine did hit all of them.\n\n\
             Each cell is the median of a call in µs, in brackets its ratio to {} for the same bytes in the same \
             round, then the quartiles. A look at the clock costs {:.0} ns and is in every sample; calls shorter than \
             10 µs that need no preparation were timed in groups. Nothing was timed before its bytes were compared once. \
             Absolute figures do not carry over to another machine; ratios do, roughly.\n",
            self.subject.title,
            self.machine,
            self.rounds,
            self.seconds,
            self.burst_ms,
            self.subject.reference,
            self.machine.clock_ns
        );
        let mut reasons: Vec<String> = Vec::new();
        for op in Op::ALL.into_iter().filter(|op| self.rows.iter().any(|row| row.op == *op)) {
            let shapes = self.shapes();
            let _ = write!(text, "\n## {}\n\n| µs |", op.title());
            shapes.iter().for_each(|shape| text.push_str(&format!(" {shape} |")));
            let _ = write!(text, "\n|---|{}\n", "---:|".repeat(shapes.len()));
            for About { name, .. } in self.peers.iter() {
                let cells: Vec<_> = shapes.iter().map(|&shape| self.row(name, op, shape)).collect();
                if cells.iter().all(Option::is_none) {
                    continue;
                }
                let _ = write!(text, "| {name} |");
                for row in cells {
                    text.push_str(&cell_text(row, &mut reasons));
                }
                text.push('\n');
            }
        }
        if !reasons.is_empty() {
            text.push_str("\nFailed:\n\n");
            reasons.iter().enumerate().for_each(|(n, why)| text.push_str(&format!("- [{}] {why}\n", n + 1)));
        }
        text.push_str("\n## Who took part\n\n| peer | |\n|---|---|\n");
        for About { name, about, missing } in &self.peers {
            let missing = missing.as_ref().map(|why| format!("; **not measured**: {}", in_a_cell(why)));
            let _ = writeln!(text, "| {name} | {about}{} |", missing.unwrap_or_default());
        }
        text
    }
}

fn figures(cell: &Cell, reference: Option<&Cell>) -> Option<Figures> {
    let mut all: Vec<f64> = cell.rounds.iter().flatten().copied().collect();
    if all.is_empty() {
        return None;
    }
    let mut ratios: Vec<f64> = reference
        .map(|reference| cell.rounds.iter().zip(&reference.rounds))
        .into_iter()
        .flatten()
        .map(|(own, other)| median(own) / median(other))
        .filter(|ratio| ratio.is_finite())
        .collect();
    Some(Figures {
        median_us: quantile(&mut all, 0.5),
        p25_us: quantile(&mut all, 0.25),
        p75_us: quantile(&mut all, 0.75),
        samples: all.len(),
        rounds: cell.rounds.len(),
        times_reference: (!ratios.is_empty()).then(|| quantile(&mut ratios, 0.5)),
    })
}

fn cell_text(row: Option<&Row>, reasons: &mut Vec<String>) -> String {
    let Some(row) = row else { return " – |".into() };
    let figures = row.figures.map(|of| {
        let ratio = of.times_reference.map_or_else(String::new, |times| format!(" ({}×)", short(times)));
        format!(" **{}**{ratio} {}–{}", short(of.median_us), short(of.p25_us), short(of.p75_us))
    });
    let failed = row.failed.as_ref().map(|why| {
        reasons.push(format!("{}, {}, {}: {}", row.peer, row.op.label(), row.shape, in_a_cell(why)));
        format!(" failed [{}]", reasons.len())
    });
    format!("{}{} |", figures.unwrap_or_default(), failed.unwrap_or_default())
}

/// Three digits, or all before the point.
pub fn short(number: f64) -> String {
    match number {
        n if n < 0.1 => format!("{n:.3}"),
        n if n < 10.0 => format!("{n:.2}"),
        n if n < 100.0 => format!("{n:.1}"),
        n => format!("{n:.0}"),
    }
}

fn in_a_cell(text: &str) -> String {
    text.replace(['\n', '|'], " ")
}

#[cfg(test)]
pub(crate) use tests::sample;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{failure::Failure, store::Limits};

    /// Two shapes, a peer that failed and one that is missing.
    pub(crate) fn sample() -> Report {
        let limits = Limits { budget: Duration::from_millis(5), least: 2, most: 9 };
        let shapes = vec![Shape::one(4096), Shape::one(1 << 20)];
        let plan = Plan { shapes, rounds: 2, limits, time: Duration::from_secs(1) };
        let cell = |peer, op, bytes, rounds: [[f64; 3]; 2]| {
            let rounds = rounds.map(Vec::from).to_vec();
            Cell { peer, op, shape: Shape::one(bytes), rounds, failed: None }
        };
        let lost = Failure("it | hung\nup".into());
        let failed =
            Cell { rounds: Vec::new(), failed: Some(lost), ..cell("redis", Op::Put, 1 << 20, [[0.0; 3]; 2]) };
        let cells = [
            cell("memcpy", Op::Put, 4096, [[1.0, 2.0, 9.0], [4.0, 4.0, 4.0]]),
            cell("memcpy", Op::Put, 1 << 20, [[50.0; 3]; 2]),
            cell("haulier", Op::Put, 4096, [[6.0, 6.0, 6.0], [20.0, 20.0, 1.0]]),
            cell("haulier", Op::Put, 1 << 20, [[60.0; 3]; 2]),
            cell("haulier", Op::PutInPlace, 4096, [[1.0; 3]; 2]),
            failed,
        ];
        let about = |name: &str, missing: Option<&str>| About {
            name: name.into(),
            about: "a peer".into(),
            missing: missing.map(str::to_owned),
        };
        let peers = vec![
            about("memcpy", None),
            about("haulier", None),
            about("redis", None),
            about("nixl", Some("no wheel for this Python")),
        ];
        let subject = Subject { title: "A table", reference: "memcpy" };
        Report::new(subject, Machine::here(), &plan, 1.0, peers, &cells)
    }

    #[test]
    fn ratios_are_of_the_same_round() {
        let report = sample();
        let of = report.figures("haulier", Op::Put, Shape::one(4096)).unwrap();
        assert_eq!((of.median_us, of.p25_us, of.p75_us, of.samples), (6.0, 6.0, 20.0, 6));
        // 6/2 in the first round and 20/4 in the second: the lower one of two is the median.
        assert_eq!(of.times_reference, Some(3.0));
        // In place is compared with the same put.
        let of = report.figures("haulier", Op::PutInPlace, Shape::one(4096)).unwrap();
        assert_eq!(of.times_reference, Some(0.25));
    }

    #[test]
    fn the_table_names_who_failed_and_who_is_missing() {
        let text = sample().markdown();
        assert!(
            text.contains("| haulier | **6.00** (3.00×) 6.00–20.0 | **60.0** (1.20×) 60.0–60.0 |"),
            "{text}"
        );
        assert!(text.contains("| redis | – | failed [1] |"), "{text}");
        assert!(text.contains("- [1] redis, put, 1 MiB: it   hung up"), "{text}");
        assert!(text.contains("| nixl | a peer; **not measured**: no wheel for this Python |"), "{text}");
        let columns: Vec<usize> =
            text.lines().filter(|line| line.starts_with('|')).map(|line| line.matches('|').count()).collect();
        assert!(columns.iter().all(|&count| count == 4 || count == 3), "{text}");
    }
}

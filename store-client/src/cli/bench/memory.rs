//! What the node's memory costs: per stored value, and over many puts and removes.

use std::{path::Path as FilePath, time::Instant};

use haulier::{AnyDevice, StoreClient};
use indicatif::ProgressBar;

use super::rows::{Mark, MemoryRow, Path};
use crate::cli::{
    child::{Interrupts, PrivateNode},
    exit::{Failure, Result},
    global::{self, Global},
    memory::field,
};

/// Values of one call.
const BATCH: u64 = 1000;
/// Every value takes one slot of a slab, of 64 bytes.
const SLOT: u64 = 64;
/// Memory that comes and goes in any process; growth within it is none.
const NOISE: i64 = 2 << 20;

/// Measures a node of its own.
pub(crate) fn run(
    global: &Global,
    dir: &FilePath,
    quick: bool,
    interrupts: &Interrupts,
    stage: &ProgressBar,
) -> Result<Vec<MemoryRow>> {
    let (stored, churned) = if quick { (100_000, 1_000_000) } else { (1_000_000, 10_000_000) };
    let node = PrivateNode::start(global, dir, 2 * stored * SLOT + (64 << 20), interrupts)?;
    let client = StoreClient::connect(global::host()?, node.socket(), global.options())?;
    // First, while the node has no freed memory of its own in which a leak could hide.
    stage.set_message("memory: putting and removing");
    let churn = churn(&client, &node, churned, interrupts)?;
    stage.set_message("memory: storing values of 1 byte");
    let index = index(&client, &node, stored, interrupts)?;
    node.stop()?;
    Ok(vec![index, churn])
}

/// The memory beside the pool that a stored value takes.
fn index(
    client: &StoreClient<AnyDevice>,
    node: &PrivateNode,
    values: u64,
    interrupts: &Interrupts,
) -> Result<MemoryRow> {
    let before = resident(node, "RssAnon:")?;
    let since = Instant::now();
    for at in (0..values).step_by(BATCH as usize) {
        interrupts.check()?;
        put(client, at..at + BATCH)?;
    }
    let seconds = since.elapsed().as_secs_f64();
    let growth_bytes = resident(node, "RssAnon:")? - before;
    let per_value = growth_bytes as f64 / values as f64;
    let mark = Mark { mark: "256 bytes per value".into(), limit: 256.0, met: per_value <= 256.0 };
    Ok(MemoryRow { op: "index_memory", path: Path::Node, values, growth_bytes, per_value, seconds, mark })
}

/// The growth of all memory while values come and go.
fn churn(
    client: &StoreClient<AnyDevice>,
    node: &PrivateNode,
    values: u64,
    interrupts: &Interrupts,
) -> Result<MemoryRow> {
    let settle = values / 10;
    let mut before = 0;
    let since = Instant::now();
    for at in (0..values).step_by(BATCH as usize) {
        interrupts.check()?;
        if at == settle {
            before = resident(node, "VmRSS:")?;
        }
        put(client, at..at + BATCH)?;
        remove(client, at..at + BATCH)?;
    }
    let seconds = since.elapsed().as_secs_f64();
    let growth_bytes = resident(node, "VmRSS:")? - before;
    let per_value = growth_bytes as f64 / (values - settle) as f64;
    let limit = NOISE as f64;
    let mark = Mark { mark: "flat (within 2 MiB)".into(), limit, met: growth_bytes <= NOISE };
    Ok(MemoryRow {
        op: "rss_over_put_and_remove",
        path: Path::Node,
        values,
        growth_bytes,
        per_value,
        seconds,
        mark,
    })
}

fn keys(range: std::ops::Range<u64>) -> Vec<String> {
    range.map(|n| format!("v{n:08}")).collect()
}

fn put(client: &StoreClient<AnyDevice>, range: std::ops::Range<u64>) -> Result<()> {
    let keys = keys(range);
    let items = keys.iter().map(|key| (key.as_str(), b"x".into())).collect();
    client.batch_put(items).into_iter().try_for_each(|put| put.map(|_| ())).map_err(Failure::from)
}

fn remove(client: &StoreClient<AnyDevice>, range: std::ops::Range<u64>) -> Result<()> {
    let keys = keys(range);
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    client.batch_remove(&keys).into_iter().try_for_each(|gone| gone.map(|_| ())).map_err(Failure::from)
}

/// A figure of the node process, in bytes.
fn resident(node: &PrivateNode, figure: &str) -> Result<i64> {
    let file = format!("/proc/{}/status", node.pid());
    let text = std::fs::read_to_string(&file).map_err(|e| Failure::system(&file, e))?;
    let bytes = field(&text, figure).and_then(|bytes| i64::try_from(bytes).ok());
    bytes.ok_or_else(|| Failure::system(&file, format_args!("no {figure} line")))
}

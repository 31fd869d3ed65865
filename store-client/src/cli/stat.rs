//! `haulier stat`: how the store is doing.

use haulier::{Error, Stat};
use serde::Serialize;

use super::{
    counters::{self, Counter},
    exit::Result,
    global::Global,
    output,
    size::Size,
};

/// Show how the store is doing: memory, values, and which way bytes went
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Print the counters in Prometheus text form
    #[arg(long, conflicts_with = "json")]
    prometheus: bool,
}

#[derive(Debug, Serialize)]
struct Shown {
    /// None where the engine tells no figures.
    #[serde(flatten)]
    stat: Option<Stat>,
    counters: Vec<Counter>,
}

pub(crate) fn run(global: &Global, args: &Args) -> Result<()> {
    let client = global.connect()?;
    if args.prometheus {
        return output::write(client.metrics()?.as_bytes());
    }
    let stat = match client.stat() {
        Ok(stat) => Some(stat),
        // Mooncake: whether the cluster answers is what can be told.
        Err(Error::Unsupported { .. }) => client.health().map(|()| None)?,
        Err(e) => return Err(e.into()),
    };
    let shown = Shown { stat, counters: counters::of(&client)? };
    global.output().show(&shown, || text(&shown))
}

/// How much memory is there already, and whether that is all there will be.
fn populated(stat: &Stat) -> String {
    let of = if stat.populated == stat.pool { "all of the pool" } else { "the rest when it is written" };
    format!("{} ({of})", Size(stat.populated))
}

fn text(shown: &Shown) -> String {
    let Some(stat) = &shown.stat else {
        return "the Mooncake cluster answers; its figures are at the metrics port of mooncake_master".into();
    };
    let mut table = output::table(&["STORE", ">"]);
    for (what, value) in [
        ("pool", Size(stat.pool).to_string()),
        ("used by values", Size(stat.used).to_string()),
        ("being written", Size(stat.granted).to_string()),
        ("free", Size(stat.free).to_string()),
        ("largest sure to fit", Size(stat.largest).to_string()),
        ("memory in arenas", populated(stat)),
        ("page", Size(stat.page).to_string()),
        ("reserved and touched in", format!("{} ms", stat.reserve_ms)),
        ("values", stat.objects.to_string()),
        ("evictions", stat.evictions.to_string()),
        ("arenas", stat.arenas.to_string()),
        ("namespaces", stat.spaces.to_string()),
    ] {
        table.add_row([what.to_owned(), value]);
    }
    let mut counters = output::table(&["COUNTER", "OF", ">"]);
    for counter in shown.counters.iter().filter(|counter| counter.is_tally()) {
        counters.add_row([counter.name.clone(), counter.labels_text(), counter.value.to_string()]);
    }
    if counters.is_empty() {
        return table.trim_fmt();
    }
    format!("{}\n\n{}", table.trim_fmt(), counters.trim_fmt())
}

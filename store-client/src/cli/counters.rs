//! The store's counters, as it writes them: in Prometheus text form.

use std::{collections::BTreeMap, fmt};

use haulier::{AnyDevice, StoreClient};
use serde::{Deserialize, Serialize};

use super::{exit::Result, output, size::Size};

/// One sample.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Counter {
    pub(crate) name: String,
    pub(crate) labels: BTreeMap<String, String>,
    pub(crate) value: f64,
}

impl Counter {
    fn label(&self, name: &str) -> &str {
        self.labels.get(name).map_or("", String::as_str)
    }

    /// Whether it counts, by label, what happened; else it is a figure of the store or part of a histogram.
    pub(crate) fn is_tally(&self) -> bool {
        !self.labels.is_empty() && self.name.ends_with("_total")
    }

    /// Its labels, as `op=put,path=ipc`.
    pub(crate) fn labels_text(&self) -> String {
        let labels: Vec<String> = self.labels.iter().map(|(name, value)| format!("{name}={value}")).collect();
        labels.join(",")
    }
}

/// Values that went one way.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PathCount {
    /// `put` or `get`.
    pub(crate) op: String,
    /// `ipc`, `staging`, `alloc`, `shared` (read in place), `inline` (in the message itself).
    pub(crate) path: String,
    pub(crate) values: u64,
    pub(crate) bytes: u64,
}

impl fmt::Display for PathCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PathCount { op, path, values, bytes } = self;
        write!(f, "{op} by {path}: {}, {}", output::count(*values, "value"), Size(*bytes))
    }
}

/// What went which way between two readings of the counters.
pub(crate) fn paths(before: &[Counter], after: &[Counter]) -> Vec<PathCount> {
    let mut paths: BTreeMap<(&str, &str), (f64, f64)> = BTreeMap::new();
    for (counters, sign) in [(before, -1.0), (after, 1.0)] {
        for counter in counters {
            let path = counter.label("path");
            match (counter.name.as_str(), counter.label("outcome"), counter.label("direction")) {
                ("haulier_operations_total", "stored" | "replaced" | "found", _) if path != "none" => {
                    paths.entry((counter.label("op"), path)).or_default().0 += sign * counter.value;
                }
                ("haulier_values_bytes_total", _, "in") => {
                    paths.entry(("put", path)).or_default().1 += sign * counter.value
                }
                ("haulier_values_bytes_total", _, "out") => {
                    paths.entry(("get", path)).or_default().1 += sign * counter.value
                }
                _ => {}
            }
        }
    }
    let went = paths.into_iter().filter(|(_, (values, _))| *values > 0.0);
    went.map(|((op, path), (values, bytes))| PathCount {
        op: op.to_owned(),
        path: path.to_owned(),
        values: values as u64,
        bytes: bytes as u64,
    })
    .collect()
}

/// The counters of the client's store.
pub(crate) fn of(client: &StoreClient<AnyDevice>) -> Result<Vec<Counter>> {
    Ok(parse(&client.metrics()?))
}

/// The samples of a text. Lines that are none are passed over: another version may write what this one does not know.
pub(crate) fn parse(text: &str) -> Vec<Counter> {
    text.lines().filter(|line| !line.starts_with('#')).filter_map(sample).collect()
}

fn sample(line: &str) -> Option<Counter> {
    let split = line.find(['{', ' '])?;
    let (name, mut rest) = line.split_at(split);
    let mut labels = BTreeMap::new();
    if let Some(inside) = rest.strip_prefix('{') {
        rest = inside;
        while !rest.starts_with('}') {
            let (label, quoted) = rest.trim_start_matches(',').split_once("=\"")?;
            let (value, more) = unquote(quoted)?;
            labels.insert(label.trim().to_owned(), value);
            rest = more;
        }
        rest = &rest[1..];
    }
    let value = rest.split_whitespace().next()?.parse().ok()?;
    Some(Counter { name: name.to_owned(), labels, value })
}

/// The text up to the closing quote, and what follows that.
fn unquote(quoted: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut chars = quoted.char_indices();
    loop {
        match chars.next()? {
            (at, '"') => return Some((value, &quoted[at + 1..])),
            (_, '\\') => match chars.next()?.1 {
                'n' => value.push('\n'),
                c => value.push(c),
            },
            (_, c) => value.push(c),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
# HELP haulier_operations Slots of requests.
# TYPE haulier_operations counter
haulier_operations_total{op=\"put\",path=\"ipc\",outcome=\"stored\"} 3
haulier_operations_total{op=\"put\",path=\"ipc\",outcome=\"full\"} 9
haulier_operations_total{op=\"remove\",path=\"none\",outcome=\"found\"} 4
haulier_values_bytes_total{direction=\"in\",path=\"ipc\"} 300
haulier_clients 2
not a sample
haulier_odd{what=\"a \\\"quoted\\\" } brace\"} 1.5
# EOF
";

    #[test]
    fn samples_are_read_and_the_rest_is_passed_over() {
        let counters = parse(TEXT);
        assert_eq!(counters.len(), 6);
        assert_eq!(counters[0].labels_text(), "op=put,outcome=stored,path=ipc");
        assert_eq!((counters[4].name.as_str(), counters[4].value), ("haulier_clients", 2.0));
        assert_eq!((counters[5].label("what"), counters[5].value), ("a \"quoted\" } brace", 1.5));
        assert_eq!(counters.iter().filter(|counter| counter.is_tally()).count(), 4);
        assert!(parse("x{a=\"unclosed\nx{a\n{}\nx\n").is_empty());
    }

    #[test]
    fn paths_are_what_was_added() {
        let after = parse(TEXT);
        let mut before = after.clone();
        before[0].value = 1.0;
        before[3].value = 100.0;
        let ipc = PathCount { op: "put".into(), path: "ipc".into(), values: 2, bytes: 200 };
        assert_eq!(ipc.to_string(), "put by ipc: 2 values, 200 B");
        assert_eq!(paths(&before, &after), [ipc]);
        assert!(paths(&after, &after).is_empty());
    }
}

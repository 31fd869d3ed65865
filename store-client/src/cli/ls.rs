//! `haulier ls`: what is stored.

use haulier::{Error, TensorSpec};
use serde::Serialize;

use super::{
    exit::{Failure, Result},
    global::Global,
    output,
};

/// List keys, with dtype, shape and bytes
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Only keys that begin with this
    #[arg(default_value = "")]
    prefix: String,
}

#[derive(Debug, Serialize)]
struct Entry {
    key: String,
    bytes: u64,
    /// Unknown for values that are no tensors.
    dtype: Option<String>,
    shape: Option<Vec<u64>>,
}

pub(crate) fn run(global: &Global, args: &Args) -> Result<()> {
    let client = global.connect()?;
    let listed = client.list(&args.prefix)?;
    let keys: Vec<&str> = listed.iter().map(|(key, _)| key.as_str()).collect();
    let specs = client.batch_tensor_spec(&keys);
    let entries = listed.iter().zip(specs).map(|((key, bytes), spec)| entry(key, *bytes, spec));
    let entries: Vec<Entry> = entries.filter_map(Result::transpose).collect::<Result<_>>()?;
    global.output().show(&entries, || text(&entries))
}

/// None for a value that has gone since it was listed.
fn entry(key: &str, bytes: u64, spec: haulier::Result<TensorSpec>) -> Result<Option<Entry>> {
    let (dtype, shape) = match spec {
        Ok(spec) => (Some(spec.dtype.to_string()), Some(spec.shape)),
        Err(Error::InvalidTensor { .. }) => (None, None),
        Err(Error::NotFound) => return Ok(None),
        Err(e) => return Err(Failure::from(e).about(key)),
    };
    Ok(Some(Entry { key: key.to_owned(), bytes, dtype, shape }))
}

fn text(entries: &[Entry]) -> String {
    if entries.is_empty() && !output::is_terminal() {
        return String::new();
    }
    let mut table = output::table(&["KEY", "DTYPE", "SHAPE", ">BYTES"]);
    for entry in entries {
        table.add_row([
            output::plain(&entry.key),
            entry.dtype.clone().unwrap_or_else(|| "-".into()),
            entry.shape.as_deref().map_or_else(|| "-".into(), shape),
            output::size(entry.bytes),
        ]);
    }
    table.trim_fmt()
}

/// Without spaces, so that a table's columns stay fields.
fn shape(shape: &[u64]) -> String {
    let sizes: Vec<String> = shape.iter().map(u64::to_string).collect();
    format!("[{}]", sizes.join(","))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_have_key_dtype_shape_and_bytes() {
        let entries = [
            Entry { key: "m/w".into(), bytes: 12, dtype: Some("BF16".into()), shape: Some(vec![2, 3]) },
            Entry { key: "step".into(), bytes: 8, dtype: Some("I64".into()), shape: Some(vec![]) },
            Entry { key: "raw".into(), bytes: 3, dtype: None, shape: None },
        ];
        let text = text(&entries);
        let rows: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(rows[0], ["KEY", "DTYPE", "SHAPE", "BYTES"]);
        assert_eq!(rows[1][..3], ["m/w", "BF16", "[2,3]"]);
        assert_eq!(rows[2][..3], ["step", "I64", "[]"]);
        assert_eq!(rows[3][..3], ["raw", "-", "-"]);
        let json = serde_json::to_string(&entries[2]).unwrap();
        assert_eq!(json, r#"{"key":"raw","bytes":3,"dtype":null,"shape":null}"#);
    }
}

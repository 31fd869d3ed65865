//! `haulier rm`: values out of the store, for good.

use serde_json::json;

use super::{
    exit::{Failure, Result},
    global::Global,
    output,
};

/// Remove values
///
/// Removing what is not there is no error; the answer says how many values went. Readers keep the bytes that they hold.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("which").required(true).args(["keys", "prefix", "all"]))]
pub(crate) struct Args {
    /// The keys
    #[arg(value_name = "KEY")]
    keys: Vec<String>,

    /// Every key that begins with this
    #[arg(long)]
    prefix: Option<String>,

    /// Everything in the namespace
    #[arg(long)]
    all: bool,
}

pub(crate) fn run(global: &Global, args: &Args) -> Result<()> {
    let client = global.connect()?;
    let removed = match &args.prefix {
        _ if args.all => client.clear()?,
        Some(prefix) if prefix.is_empty() => {
            return Err(Failure::usage("an empty --prefix means all: say --all"));
        }
        Some(prefix) => client.remove_by_prefix(prefix)?,
        None => {
            let keys: Vec<&str> = args.keys.iter().map(String::as_str).collect();
            let mut removed = 0;
            for (key, verdict) in keys.iter().zip(client.batch_remove(&keys)) {
                removed += u64::from(verdict.map_err(|e| Failure::from(e).about(key))?);
            }
            removed
        }
    };
    global
        .output()
        .show(&json!({ "removed": removed }), || format!("{} removed", output::count(removed, "value")))
}

//! `haulier get`: values out of the store, into a safetensors file or as they are.

use std::{
    path::{Path, PathBuf},
    time::Instant,
};

use haulier::{AnyDevice, Error, StoreClient, TensorView, View};
use serde_json::json;

use super::{
    exit::{Failure, Result},
    global::Global,
    model::{self, NewTensor, RESERVED},
    output,
    size::Size,
};

/// How many views one call asks for.
const BATCH: usize = 256;

/// Get tensors into a safetensors file, or one value's bytes
///
/// With --prefix P/ each tensor gets the rest of its key as its name, so that what `put --prefix P` stored comes back as it
/// was. The file appears when it is whole, or not at all; a pipe or device is written to as it is.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("which").required(true).args(["keys", "prefix"]))]
pub(crate) struct Args {
    /// The keys
    #[arg(value_name = "KEY")]
    keys: Vec<String>,

    /// Every key that begins with this
    #[arg(long, conflicts_with = "raw")]
    prefix: Option<String>,

    /// The file to write
    #[arg(short, long, value_name = "FILE", required_unless_present = "raw")]
    output: Option<PathBuf>,

    /// Write the bytes of one value as they are, to stdout without -o
    #[arg(long)]
    raw: bool,
}

pub(crate) fn run(global: &Global, args: &Args) -> Result<()> {
    if args.raw {
        return raw(global, args);
    }
    let Some(file) = &args.output else { return Err(Failure::usage("-o FILE is missing")) };
    let client = global.connect()?;
    let since = Instant::now();
    let (keys, prefix) = match &args.prefix {
        None => {
            refuse_repeated(&args.keys)?;
            (args.keys.clone(), "")
        }
        Some(prefix) => (keys_under(&client, prefix)?, prefix.as_str()),
    };
    let tensors = tensors(&client, &keys)?;
    let bytes: u64 = tensors.iter().map(|tensor| tensor.bytes().len() as u64).sum();
    let names = names(&keys, prefix);
    model::write(file, names.into_iter().zip(tensors.iter().map(entry)).collect())?;
    let seconds = since.elapsed().as_secs_f64();
    let name = file.to_string_lossy();
    let summary = json!({ "tensors": keys.len(), "bytes": bytes, "seconds": seconds, "file": name });
    global.output().show(&summary, || {
        let count = output::count(keys.len() as u64, "tensor");
        format!("{count}, {} in {seconds:.3} s into {}", Size(bytes), output::path(file))
    })
}

fn raw(global: &Global, args: &Args) -> Result<()> {
    let [key] = &args.keys[..] else {
        return Err(Failure::usage("--raw takes one key; without it, -o FILE takes many"));
    };
    if args.output.is_none() && output::is_terminal() {
        return Err(Failure::usage("bytes are not written to a terminal; use -o FILE, or redirect stdout"));
    }
    let client = global.connect()?;
    let view = client.view(key).map_err(|e| Failure::from(e).about(key))?;
    match &args.output {
        None => output::write(&view),
        Some(file) => write_raw(global, file, &view),
    }
}

fn write_raw(global: &Global, file: &Path, view: &View) -> Result<()> {
    model::write_bytes(file, view)?;
    let bytes = view.len() as u64;
    let summary = json!({ "bytes": bytes, "file": file.to_string_lossy() });
    global.output().show(&summary, || format!("{} into {}", Size(bytes), output::path(file)))
}

fn keys_under(client: &StoreClient<AnyDevice>, prefix: &str) -> Result<Vec<String>> {
    let keys: Vec<String> = client.list(prefix)?.into_iter().map(|(key, _)| key).collect();
    match keys.is_empty() {
        true => Err(Failure::from(Error::NotFound).about(format_args!("{prefix}*"))),
        false => Ok(keys),
    }
}

fn tensors(client: &StoreClient<AnyDevice>, keys: &[String]) -> Result<Vec<TensorView>> {
    let mut tensors = Vec::with_capacity(keys.len());
    for batch in keys.chunks(BATCH) {
        let asked: Vec<&str> = batch.iter().map(String::as_str).collect();
        for (key, view) in batch.iter().zip(client.batch_view(&asked)) {
            tensors.push(view.and_then(TensorView::try_from).map_err(|e| not_a_tensor(key, e))?);
        }
    }
    Ok(tensors)
}

fn not_a_tensor(key: &str, e: Error) -> Failure {
    let hint = matches!(e, Error::InvalidTensor { .. });
    let failure = Failure::from(e).about(key);
    if hint { failure.advise("use --raw for its bytes") } else { failure }
}

fn entry(tensor: &TensorView) -> NewTensor<'_> {
    let spec = tensor.spec();
    NewTensor {
        dtype: spec.dtype,
        // A view of it is mapped, so its dimensions fit.
        shape: spec.shape.iter().map(|&n| n as usize).collect(),
        len: tensor.bytes().len(),
        bytes: Box::new(|| tensor.bytes().into()),
    }
}

/// What the tensors are called in the file. Only whole parts of keys are taken away, so that no two names become equal.
fn names(keys: &[String], prefix: &str) -> Vec<String> {
    let prefix = match prefix {
        "" => String::new(),
        prefix => format!("{}/", prefix.trim_end_matches('/')),
    };
    let rests: Option<Vec<String>> = keys
        .iter()
        .map(|key| {
            key.strip_prefix(&prefix).filter(|rest| !rest.is_empty() && *rest != RESERVED).map(str::to_owned)
        })
        .collect();
    rests.unwrap_or_else(|| keys.to_vec())
}

fn refuse_repeated(keys: &[String]) -> Result<()> {
    for (i, key) in keys.iter().enumerate() {
        if keys[..i].contains(key) {
            return Err(Failure::usage(format!("the key {key:?} is given twice; a file has each name once")));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owned(keys: &[&str]) -> Vec<String> {
        keys.iter().map(|key| (*key).to_owned()).collect()
    }

    #[test]
    fn names_lose_the_prefix_as_a_whole_or_not_at_all() {
        let keys = owned(&["m/a", "m/b/c"]);
        assert_eq!(names(&keys, "m"), ["a", "b/c"]);
        assert_eq!(names(&keys, "m/"), ["a", "b/c"]);
        assert_eq!(names(&keys, ""), ["m/a", "m/b/c"]);
        // "m" also begins the keys of another model; their names would fall together.
        let keys = owned(&["m/a", "m2/a"]);
        assert_eq!(names(&keys, "m"), keys);
        assert_eq!(names(&owned(&["m/"]), "m/"), ["m/"]);
        // No file can have a tensor of this name.
        let keys = owned(&["m/__metadata__", "m/a"]);
        assert_eq!(names(&keys, "m/"), keys);
    }

    #[test]
    fn a_key_given_twice_is_refused() {
        assert!(refuse_repeated(&owned(&["a", "b"])).is_ok());
        assert!(refuse_repeated(&owned(&["a", "b", "a"])).is_err());
    }
}

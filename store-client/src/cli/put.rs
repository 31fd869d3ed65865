//! `haulier put`: the tensors of safetensors files into the store.

use std::{
    path::{Path, PathBuf},
    time::Instant,
};

use haulier::{AnyDevice, Put, StoreClient, TensorRef};
use indicatif::ProgressBar;
use serde::Serialize;

use super::{
    counters::{self, PathCount},
    exit::{Failure, Result, kind_of},
    global::Global,
    model::{FileTensor, Model},
    output,
    size::Size,
};

/// What one call to the node carries: a deadline bounds a call, so that a call must not grow with the file.
const BATCH_BYTES: usize = 256 << 20;
const BATCH_TENSORS: usize = 256;

/// Put every tensor of safetensors files into the store
///
/// Each tensor is stored with its dtype and shape under the key PREFIX/NAME. All files are checked before anything is
/// stored. A key that is there already is kept, which is an error without --upsert.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The files
    #[arg(required = true, value_name = "FILE.safetensors")]
    files: Vec<PathBuf>,

    /// What keys begin with, before a slash; "" for tensor names alone [default: the file's name without extension]
    #[arg(long)]
    prefix: Option<String>,

    /// Replace values that are there already
    #[arg(long)]
    upsert: bool,
}

#[derive(Debug, Default, Serialize)]
struct Summary {
    stored: u64,
    replaced: u64,
    already_there: u64,
    failed: Vec<Failed>,
    /// Bytes of what was stored or replaced.
    bytes: u64,
    seconds: f64,
    gb_per_s: f64,
    /// By the node's counters, which count other clients too.
    paths: Vec<PathCount>,
}

#[derive(Debug, Serialize)]
struct Failed {
    key: String,
    kind: &'static str,
    message: String,
}

pub(crate) fn run(global: &Global, args: &Args) -> Result<()> {
    let models: Vec<Model> = args.files.iter().map(|file| Model::open(file)).collect::<Result<_>>()?;
    let mut tensors = Vec::new();
    for model in &models {
        let prefix = args.prefix.clone().unwrap_or_else(|| stem(&model.path));
        tensors.extend(model.tensors()?.into_iter().map(|tensor| (key(&prefix, &tensor.name), tensor)));
    }
    refuse_repeated(&tensors)?;
    let client = global.connect()?;
    let before = counters::of(&client)?;
    let mut summary = store(&client, &tensors, args.upsert)?;
    summary.paths = counters::paths(&before, &counters::of(&client)?);
    summary.paths.retain(|path| path.op == "put");
    global.output().show(&summary, || text(&summary))?;
    verdict(&summary)
}

fn store(
    client: &StoreClient<AnyDevice>,
    tensors: &[(String, FileTensor<'_>)],
    upsert: bool,
) -> Result<Summary> {
    let mut summary = Summary::default();
    let bar = output::bar("putting", tensors.iter().map(|(_, tensor)| tensor.bytes.len() as u64).sum());
    let since = Instant::now();
    let mut done = 0;
    for batch in batches(tensors) {
        let client = reporting(client, &bar, done);
        let items: Vec<(&str, TensorRef<'_, AnyDevice>)> = batch
            .iter()
            .map(|(key, tensor)| {
                Ok((key.as_str(), TensorRef::new(tensor.dtype, &tensor.shape, tensor.bytes)?))
            })
            .collect::<Result<_>>()?;
        let verdicts =
            if upsert { client.batch_upsert_tensor(&items) } else { client.batch_put_tensor(&items) };
        for ((key, tensor), verdict) in batch.iter().zip(verdicts) {
            summary.count(key, tensor.bytes.len() as u64, verdict);
            done += tensor.bytes.len() as u64;
        }
    }
    summary.seconds = since.elapsed().as_secs_f64();
    summary.gb_per_s = output::rate(summary.bytes, summary.seconds);
    bar.finish_and_clear();
    Ok(summary)
}

impl Summary {
    fn count(&mut self, key: &str, bytes: u64, verdict: haulier::Result<Put>) {
        match verdict {
            Ok(Put::AlreadyExists) => self.already_there += 1,
            Ok(Put::Stored) => {
                self.stored += 1;
                self.bytes += bytes;
            }
            Ok(Put::Replaced) => {
                self.replaced += 1;
                self.bytes += bytes;
            }
            Err(e) => {
                self.failed.push(Failed { key: key.to_owned(), kind: kind_of(&e), message: e.to_string() })
            }
        }
    }
}

fn text(summary: &Summary) -> String {
    let mut counts = output::count(summary.stored, "tensor") + " stored";
    if summary.replaced > 0 {
        counts += &format!(", {} replaced", summary.replaced);
    }
    let mut text = format!(
        "{counts}, {} already there, {} failed; {} in {:.3} s ({:.2} GB/s)",
        summary.already_there,
        summary.failed.len(),
        Size(summary.bytes),
        summary.seconds,
        summary.gb_per_s
    );
    for path in &summary.paths {
        text += &format!("\n{path}");
    }
    for failed in &summary.failed {
        text += &format!("\n{}: {}", output::plain(&failed.key), failed.message);
    }
    text
}

fn verdict(summary: &Summary) -> Result<()> {
    match (summary.failed.len() as u64, summary.already_there) {
        (0, 0) => Ok(()),
        (0, kept) => Err(Failure::refused(format!(
            "{} there already and kept; --upsert replaces",
            if kept == 1 { "1 key was".to_owned() } else { format!("{kept} keys were") }
        ))),
        (failed, _) => Err(Failure::refused(format!("{} not stored", output::count(failed, "tensor")))),
    }
}

/// The same client, moving the bar on from `done` bytes.
fn reporting(client: &StoreClient<AnyDevice>, bar: &ProgressBar, done: u64) -> StoreClient<AnyDevice> {
    let bar = bar.clone();
    client.with_progress(move |progress| bar.set_position(done + progress.done))
}

/// Cuts a list of tensors into parts that one call may carry.
fn batches<'t, 'f>(
    tensors: &'t [(String, FileTensor<'f>)],
) -> impl Iterator<Item = &'t [(String, FileTensor<'f>)]> {
    let mut rest = tensors;
    std::iter::from_fn(move || {
        let mut bytes = 0;
        let fits = rest.iter().take(BATCH_TENSORS).take_while(|(_, tensor)| {
            bytes += tensor.bytes.len();
            bytes <= BATCH_BYTES
        });
        // One that is larger goes alone.
        let (batch, more) = rest.split_at(fits.count().max(1).min(rest.len()));
        rest = more;
        (!batch.is_empty()).then_some(batch)
    })
}

fn stem(path: &Path) -> String {
    path.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}

fn key(prefix: &str, name: &str) -> String {
    match prefix.trim_end_matches('/') {
        "" => name.to_owned(),
        prefix => format!("{prefix}/{name}"),
    }
}

/// Two files with a tensor of the same name under the same prefix: one would silently win.
fn refuse_repeated(tensors: &[(String, FileTensor<'_>)]) -> Result<()> {
    let mut keys: Vec<&str> = tensors.iter().map(|(key, _)| key.as_str()).collect();
    keys.sort_unstable();
    match keys.windows(2).find(|pair| pair[0] == pair[1]) {
        None => Ok(()),
        Some(pair) => Err(Failure::usage(format!(
            "two of the files have a tensor for the key {:?}; put them apart",
            pair[0]
        ))),
    }
}

#[cfg(test)]
mod tests {
    use haulier::Dtype;

    use super::*;

    fn tensor(bytes: &[u8]) -> (String, FileTensor<'_>) {
        (
            "k".into(),
            FileTensor { name: "k".into(), dtype: Dtype::U8, shape: vec![bytes.len() as u64], bytes },
        )
    }

    #[test]
    fn keys_are_prefix_slash_name() {
        assert_eq!(key("model", "w"), "model/w");
        assert_eq!(key("model/", "w"), "model/w");
        assert_eq!(key("", "w"), "w");
        assert_eq!(stem(Path::new("/a/model-00001.safetensors")), "model-00001");
    }

    #[test]
    fn batches_are_bounded_and_leave_nothing_out() {
        let large = vec![0; BATCH_BYTES + 1];
        let mut tensors = vec![tensor(&large), tensor(&large[..BATCH_BYTES])];
        tensors.extend((0..BATCH_TENSORS + 1).map(|_| tensor(&[])));
        let lens: Vec<usize> = batches(&tensors).map(<[_]>::len).collect();
        assert_eq!(lens, [1, BATCH_TENSORS, 2]);
        assert_eq!(batches(&[]).count(), 0);
    }

    #[test]
    fn the_verdict_is_a_failure_unless_all_was_stored() {
        let mut summary = Summary::default();
        summary.count("a", 2, Ok(Put::Stored));
        summary.count("b", 3, Ok(Put::Replaced));
        assert!(verdict(&summary).is_ok());
        assert_eq!(summary.bytes, 5);
        summary.count("c", 5, Ok(Put::AlreadyExists));
        assert!(verdict(&summary).unwrap_err().to_string().contains("--upsert"));
        summary.count("d", 7, Err(haulier::Error::Full { free: 1, largest: 1 }));
        assert_eq!(verdict(&summary).unwrap_err().to_string(), "1 tensor not stored");
        assert_eq!((summary.bytes, summary.failed[0].kind), (5, "full"));
        assert!(text(&summary).starts_with("1 tensor stored, 1 replaced, 1 already there, 1 failed; 5 B in"));
    }

    #[test]
    fn repeated_keys_are_refused() {
        assert!(refuse_repeated(&[tensor(&[])]).is_ok());
        assert!(refuse_repeated(&[tensor(&[]), tensor(&[1])]).is_err());
    }
}

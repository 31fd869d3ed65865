//! `haulier put`: the tensors of safetensors files into the store.

use std::{
    path::{Path, PathBuf},
    time::Instant,
};

use haulier::{AnyDevice, Error, KEY_MAX, Put, StoreClient, TensorRef};
use indicatif::ProgressBar;
use serde::Serialize;

use super::{
    counters::{self, Counter, PathCount},
    exit::{Failure, Result},
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
    /// By the node's counters, which count other clients too; null where it no longer answers.
    paths: Option<Vec<PathCount>>,
}

#[derive(Debug, Serialize)]
struct Failed {
    key: String,
    kind: &'static str,
    message: String,
}

pub(crate) fn run(global: &Global, args: &Args) -> Result<()> {
    let models: Vec<Model> = args.files.iter().map(|file| Model::open(file)).collect::<Result<_>>()?;
    let files: Vec<Vec<FileTensor<'_>>> = models.iter().map(Model::tensors).collect::<Result<_>>()?;
    let mut items = Vec::new();
    for (model, tensors) in models.iter().zip(&files) {
        let prefix = args.prefix.clone().unwrap_or_else(|| stem(&model.path));
        for tensor in tensors {
            let item = Item::new(&prefix, tensor).map_err(|e| {
                Failure::input(&model.path, format_args!("tensor {}: {e}", output::plain(&tensor.name)))
            })?;
            items.push(item);
        }
    }
    refuse_repeated(&items)?;
    let client = global.connect()?;
    // What was stored is told in any case, also if the node goes away before it can say which way.
    let before = counters::of(&client).ok();
    let mut summary = store(&client, &items, args.upsert);
    summary.miss(&client, &items);
    summary.paths = before.zip(counters::of(&client).ok()).map(|(before, after)| paths(&before, &after));
    global.output().show(&summary, || text(&summary))?;
    verdict(&summary)
}

/// A tensor that the store can take, and the key that it gets.
struct Item<'f> {
    key: String,
    tensor: TensorRef<'f, AnyDevice>,
    len: usize,
}

impl<'f> Item<'f> {
    fn new(prefix: &str, tensor: &FileTensor<'f>) -> haulier::Result<Self> {
        let key = key(prefix, &tensor.name);
        if key.is_empty() || key.len() > KEY_MAX {
            return Err(Error::InvalidKey { len: key.len() as u64, limit: KEY_MAX as u64 });
        }
        let (bytes, len) = (tensor.bytes, tensor.bytes.len());
        Ok(Item { key, tensor: TensorRef::new(tensor.dtype, &tensor.shape, bytes)?, len })
    }
}

fn store(client: &StoreClient<AnyDevice>, items: &[Item<'_>], upsert: bool) -> Summary {
    let mut summary = Summary::default();
    let bar = output::bar("putting", items.iter().map(|item| item.len as u64).sum());
    let since = Instant::now();
    let mut done = 0;
    for batch in batches(items) {
        let client = reporting(client, &bar, done);
        let asked: Vec<_> = batch.iter().map(|item| (item.key.as_str(), item.tensor.clone())).collect();
        let verdicts =
            if upsert { client.batch_upsert_tensor(&asked) } else { client.batch_put_tensor(&asked) };
        for (item, verdict) in batch.iter().zip(verdicts) {
            summary.count(&item.key, item.len as u64, verdict);
            done += item.len as u64;
        }
    }
    summary.seconds = since.elapsed().as_secs_f64();
    summary.gb_per_s = output::rate(summary.bytes, summary.seconds);
    bar.finish_and_clear();
    summary
}

fn paths(before: &[Counter], after: &[Counter]) -> Vec<PathCount> {
    let mut paths = counters::paths(before, after);
    paths.retain(|path| path.op == "put");
    paths
}

impl Summary {
    /// Counts as failed what was stored and had to make room for the rest: half a model is no success.
    fn miss(&mut self, client: &StoreClient<AnyDevice>, items: &[Item<'_>]) {
        let keys: Vec<&str> = items.iter().map(|item| item.key.as_str()).collect();
        for (item, there) in items.iter().zip(client.batch_exists(&keys)) {
            let told = self.failed.iter().any(|failed| failed.key == item.key);
            if matches!(there, Ok(false)) && !told {
                self.failed.push(Failed {
                    key: item.key.clone(),
                    kind: "evicted",
                    message: "stored, and evicted since: the pool or quota is too small for all".into(),
                });
            }
        }
    }

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
                self.failed.push(Failed { key: key.to_owned(), kind: e.label(), message: e.to_string() })
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
    match summary.paths.as_deref() {
        None => text += "\nthe node no longer says what went which way",
        Some([]) => {}
        Some(paths) => {
            text += "\nthe node counted meanwhile, other clients included";
            for path in paths {
                text += &format!("\n  {path}");
            }
        }
    }
    for failed in &summary.failed {
        text += &format!("\n{}: {}", output::plain(&failed.key), output::plain(&failed.message));
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
fn batches<'t, 'f>(items: &'t [Item<'f>]) -> impl Iterator<Item = &'t [Item<'f>]> {
    let mut rest = items;
    std::iter::from_fn(move || {
        let mut bytes = 0;
        let fits = rest.iter().take(BATCH_TENSORS).take_while(|item| {
            bytes += item.len;
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
fn refuse_repeated(items: &[Item<'_>]) -> Result<()> {
    let mut keys: Vec<&str> = items.iter().map(|item| item.key.as_str()).collect();
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

    fn tensor(bytes: &[u8]) -> FileTensor<'_> {
        FileTensor { name: "k".into(), dtype: Dtype::U8, shape: vec![bytes.len() as u64], bytes }
    }

    fn item(bytes: &[u8]) -> Item<'_> {
        Item::new("", &tensor(bytes)).unwrap()
    }

    #[test]
    fn what_the_store_would_not_take_is_known_before() {
        let mut many = tensor(&[7]);
        many.shape = vec![1; haulier::NDIM_MAX + 1];
        assert!(matches!(Item::new("", &many), Err(Error::InvalidTensor { .. })));
        many.shape.pop();
        assert!(Item::new("", &many).is_ok());
        let mut long = tensor(&[]);
        long.name = "k".repeat(KEY_MAX);
        assert!(Item::new("", &long).is_ok());
        assert!(matches!(Item::new("p", &long), Err(Error::InvalidKey { .. })));
        long.name.clear();
        assert!(matches!(Item::new("", &long), Err(Error::InvalidKey { len: 0, .. })));
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
        let mut items = vec![item(&large), item(&large[..BATCH_BYTES])];
        items.extend((0..BATCH_TENSORS + 1).map(|_| item(&[])));
        let lens: Vec<usize> = batches(&items).map(<[_]>::len).collect();
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
        assert!(text(&summary).contains("no longer says"));
        let ipc = PathCount { op: "put".into(), path: "ipc".into(), values: 2, bytes: 200 };
        summary.paths = Some(vec![ipc]);
        assert!(text(&summary).contains("other clients included\n  put by ipc: 2 values, 200 B"));
    }

    #[test]
    fn repeated_keys_are_refused() {
        assert!(refuse_repeated(&[item(&[])]).is_ok());
        assert!(refuse_repeated(&[item(&[]), item(&[1])]).is_err());
    }
}

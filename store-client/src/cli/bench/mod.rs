//! `haulier bench`: how fast, beside a memcpy and a bare socket round trip of the same moment.

use std::{
    path::Path as FilePath,
    time::{Duration, Instant},
};

use haulier::{
    AnyDevice, StoreClient,
    store::{Config, Store},
};
use indicatif::ProgressBar;

use self::{
    measure::{Echo, copy_pieces, in_turns},
    rows::{Op, Path, Row},
};
use super::{
    child::{Interrupts, PrivateNode, private_dir},
    engine::Engine,
    exit::{Failure, Result},
    global::{self, Global},
    memory as machine, output,
    size::Size,
};

mod measure;
mod memory;
mod rows;

pub(crate) use self::measure::echo;

/// Values of one call, and bytes of each.
const BATCHES: [(usize, usize); 2] = [(400, 4 << 10), (64, 64 << 10)];

/// Measure put, get_into, view and batches, in this process and through a node
///
/// Every turn takes one sample of a memcpy of the same size into warm memory, one of a bare Unix-socket round trip of 64
/// bytes, and one of the operation, so that whatever else the machine does hits all three. Removing a value between two
/// puts, and allocating the buffer that is put, are outside of the time; letting go of a view is inside. The node is a
/// process of its own, started for this, unless --socket names one that runs; then its keys are those of --namespace
/// that begin with "haulier-bench/".
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// About a third of the time for each row, and a tenth of the values for --memory
    #[arg(long)]
    quick: bool,

    /// Sizes of values; the batches have 400 of 4KiB and 64 of 64KiB and run where that size is among them
    #[arg(
        long,
        value_name = "SIZE,...",
        value_delimiter = ',',
        default_value = "4KiB,64KiB,1MiB,16MiB,256MiB"
    )]
    sizes: Vec<Size>,

    /// Measure what the node's memory costs instead: per stored value, and over many puts and removes
    #[arg(long)]
    memory: bool,
}

pub(crate) fn run(global: &Global, args: &Args) -> Result<()> {
    if args.memory {
        global.node_only("--memory")?;
    }
    if args.memory && global.socket.is_some() {
        return Err(Failure::usage("--memory measures a node of its own; leave out --socket"));
    }
    let sizes = sizes(&args.sizes)?;
    let interrupts = Interrupts::watch()?;
    let dir = private_dir("haulier-bench-")?;
    let stage = output::stages();
    if args.memory {
        let measured = memory::run(global, dir.path(), args.quick, &interrupts, &stage);
        stage.finish_and_clear();
        let rows = measured.map_err(|e| interrupts.explain(e))?;
        return global.output().show(&rows, || rows::memory_text(&rows));
    }
    let most = sizes.iter().copied().max().unwrap_or(0) as u64;
    machine::require(pool(&sizes).saturating_add(most.saturating_mul(3)), "the benchmark")?;
    let mut bench = Bench {
        budget: Duration::from_millis(if args.quick { 300 } else { 1000 }),
        echo: Echo::start()?,
        memory: Memory::new(&sizes),
        interrupts: interrupts.clone(),
        stage,
        rows: Vec::new(),
    };
    let measured = measure(global, &mut bench, dir.path(), &sizes);
    bench.stage.finish_and_clear();
    measured.map_err(|e| interrupts.explain(e))?;
    global.output().show(&bench.rows, || rows::text(&bench.rows))
}

/// Every row: first in this process, then through a node; or of a Mooncake cluster.
fn measure(global: &Global, bench: &mut Bench, dir: &FilePath, sizes: &[usize]) -> Result<()> {
    if global.engine.engine == Engine::Mooncake {
        let client = global.connect()?;
        let measured = bench.rows_of(&client, Path::Mooncake, sizes);
        let removed = client.remove_by_prefix(PREFIX);
        return measured.and(Ok(removed.map(drop)?));
    }
    let pool = pool(sizes);
    {
        let store = Store::open(Config { evict: false, ..Config::new(pool) }, |_, _| {})?;
        let client = StoreClient::in_process(global::host()?, store, global.options())?;
        bench.rows_of(&client, Path::InProcess, sizes)?;
    }
    if let Some(socket) = &global.socket {
        let client = StoreClient::connect(global::host()?, socket, global.options())?;
        let measured = bench.rows_of(&client, Path::Node, sizes);
        // Also after a failure: the node is not ours.
        let removed = client.remove_by_prefix(PREFIX);
        return measured.and(Ok(removed.map(drop)?));
    }
    let node = PrivateNode::start(global, dir, pool, &bench.interrupts)?;
    let client = StoreClient::connect(global::host()?, node.socket(), global.options())?;
    bench.rows_of(&client, Path::Node, sizes)?;
    client.close();
    node.stop()
}

const PREFIX: &str = "haulier-bench/";

/// The memory that values are put from and got into, warm.
struct Memory {
    source: Vec<u8>,
    target: Vec<u8>,
    /// Where the memcpy goes.
    scratch: Vec<u8>,
}

impl Memory {
    fn new(sizes: &[usize]) -> Self {
        let batches =
            BATCHES.iter().filter(|(_, size)| sizes.contains(size)).map(|(values, size)| values * size);
        let most = sizes.iter().copied().chain(batches).max().unwrap_or(0);
        // Written, and not only allocated, so that every page is there.
        Memory { source: vec![0x5a; most], target: vec![0x11; most], scratch: vec![0x22; most] }
    }
}

struct Bench {
    budget: Duration,
    echo: Echo,
    memory: Memory,
    interrupts: Interrupts,
    stage: ProgressBar,
    rows: Vec<Row>,
}

impl Bench {
    /// Every row of one path.
    fn rows_of(&mut self, client: &StoreClient<AnyDevice>, path: Path, sizes: &[usize]) -> Result<()> {
        // Mooncake lends no memory.
        let lends = |op: &Op| !(path == Path::Mooncake && *op == Op::PutAllocated);
        for op in Op::SINGLE.into_iter().filter(lends) {
            for &size in sizes {
                self.row(client, op, path, size, 1)?;
            }
        }
        for op in Op::BATCH {
            for (values, size) in BATCHES {
                if sizes.contains(&size) {
                    self.row(client, op, path, size, values)?;
                }
            }
        }
        Ok(())
    }

    fn row(
        &mut self,
        client: &StoreClient<AnyDevice>,
        op: Op,
        path: Path,
        size: usize,
        values: usize,
    ) -> Result<()> {
        self.stage.set_message(format!("{op:?} {path:?} {values} x {}", Size(size as u64)));
        let Memory { source, target, scratch } = &mut self.memory;
        let (source, target, scratch) =
            (&source[..size * values], &mut target[..size * values], &mut scratch[..size * values]);
        let keys: Vec<String> = (0..values).map(|n| format!("{PREFIX}{n}")).collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        remove(client, &keys)?;
        if matches!(op, Op::GetInto | Op::View | Op::BatchGetInto) {
            put(client, &keys, source, size)?;
        }
        let key = keys[0];
        let memcpy = || copy_pieces(source, scratch, size);
        let measured = || match op {
            Op::Put => {
                let took = timed(|| client.put(key, source))?;
                remove(client, &keys)?;
                Ok(took)
            }
            Op::PutAllocated => {
                let buffer = client.alloc(size as u64)?;
                let took = timed(|| client.put_allocated(key, buffer))?;
                remove(client, &keys)?;
                Ok(took)
            }
            Op::BatchPut => {
                let took = put(client, &keys, source, size)?;
                remove(client, &keys)?;
                Ok(took)
            }
            Op::GetInto => timed(|| client.get_into(key, &mut target[..])),
            Op::View => timed(|| client.view(key).map(drop)),
            Op::BatchGetInto => {
                let items = keys.iter().copied().zip(target.chunks_mut(size).map(Into::into)).collect();
                timed(|| all(client.batch_get_into(items)))
            }
        };
        let samples = in_turns(self.budget, &mut self.echo, &self.interrupts, memcpy, measured)?;
        remove(client, &keys)?;
        self.rows.push(Row::new(op, path, size, values, &samples));
        Ok(())
    }
}

/// Puts one value under each key, as one batch.
fn put(client: &StoreClient<AnyDevice>, keys: &[&str], source: &[u8], size: usize) -> Result<Duration> {
    let items = keys.iter().copied().zip(source.chunks(size).map(Into::into)).collect();
    timed(|| all(client.batch_put(items)))
}

fn remove(client: &StoreClient<AnyDevice>, keys: &[&str]) -> Result<()> {
    Ok(all(client.batch_remove(keys)).map(|_| ())?)
}

/// Every slot's answer, or the first error.
fn all<R>(slots: Vec<haulier::Result<R>>) -> haulier::Result<Vec<R>> {
    slots.into_iter().collect()
}

fn timed<T>(call: impl FnOnce() -> haulier::Result<T>) -> Result<Duration> {
    let start = Instant::now();
    let answer = call();
    let took = start.elapsed();
    answer.map(|_| took).map_err(Failure::from)
}

fn sizes(asked: &[Size]) -> Result<Vec<usize>> {
    let size = |Size(bytes): &Size| match usize::try_from(*bytes) {
        Ok(bytes) if bytes > 0 => Ok(bytes),
        _ => Err(Failure::usage(format!("--sizes: {bytes} bytes cannot be measured"))),
    };
    asked.iter().map(size).collect()
}

/// Room for the largest value three times over: stored, just removed, and lent ahead.
fn pool(sizes: &[usize]) -> u64 {
    let largest = sizes.iter().copied().max().unwrap_or(0) as u64;
    largest.saturating_add(largest / 8).saturating_mul(3).saturating_add(128 << 20)
}

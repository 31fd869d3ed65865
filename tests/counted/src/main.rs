//! A small workload whose instructions can be counted: `haulier-counted OPERATION TIMES` does the same thing TIMES times
//! in one process, on one thread, with a store inside the process. See `tests/tests/instructions.rs`.
//!
//! With `--node` the store is a node daemon's, which serves on threads of its own in the same process; the main thread is
//! its client. With `--time` in place of a tool that counts, it says how many nanoseconds each took beside a memcpy.

use std::{
    env,
    fs::Permissions,
    hint::black_box,
    os::unix::fs::PermissionsExt,
    process::ExitCode,
    time::{Duration, Instant},
};

use backend_cpu::CpuDevice;
use haulier::{
    Options, Result, StoreClient,
    node::{Node, NodeConfig},
    store::{Config, Store},
};
use tempfile::TempDir;

/// Bytes of a value.
const VALUE: usize = 4 << 10;
/// Values of a batch.
const BATCH: usize = 400;
/// Keys, and the most times that one is put, so that every value has room.
const MOST: usize = 2048;

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let done = match &arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["--time", operation] => time(operation),
        ["fill", values] => values.parse().ok().map(fill),
        [operation, times] => run(Where::Here, operation, times),
        ["--node", operation, times] => run(Where::Node, operation, times),
        _ => None,
    };
    match done {
        Some(Ok(())) => ExitCode::SUCCESS,
        Some(Err(e)) => {
            eprintln!("{e}");
            ExitCode::FAILURE
        }
        None => {
            eprintln!(
                "usage: haulier-counted [--time|--node] put|get_into|view|batch_put|batch_get_into|memcpy [TIMES]\n       \
                 haulier-counted fill VALUES"
            );
            ExitCode::from(2)
        }
    }
}

/// Who has the store.
#[derive(Clone, Copy)]
enum Where {
    Here,
    Node,
}

/// The workload's client and memory.
struct Work {
    client: StoreClient<CpuDevice>,
    // Ends after its client, and then its directory goes.
    _node: Option<(Node, TempDir)>,
    keys: Vec<String>,
    source: Vec<u8>,
    target: Vec<u8>,
}

impl Work {
    fn new(place: Where) -> Result<Self> {
        // A large pool has a large index, in which hardly any two keys are in each other's way.
        let pool = match place {
            Where::Here => 64 << 20,
            Where::Node => 256 << 20,
        };
        let store = Store::open(Config::new(pool), |_, _| ())?;
        let options = Options { workers: 1, ..Options::default() };
        let device = CpuDevice::open()?;
        let (client, node) = match place {
            Where::Here => (StoreClient::in_process(device, store, options)?, None),
            Where::Node => {
                let dir = private_dir();
                let socket = dir.path().join("node.sock");
                let devices = vec![device.clone()];
                let config =
                    NodeConfig { socket: socket.clone(), store, devices, metrics: None, clients_max: 1 };
                let node = Node::start(config)?;
                (StoreClient::connect(device, socket, options)?, Some((node, dir)))
            }
        };
        let keys = (0..MOST).map(|n| format!("counted/{n:08}")).collect();
        let bytes = BATCH * VALUE;
        Ok(Work { client, _node: node, keys, source: vec![0x5a; bytes], target: vec![0x11; bytes] })
    }

    fn put(&self, n: usize) -> Result<()> {
        self.client.put(&self.keys[n], &self.source[..VALUE]).map(drop)
    }

    fn get_into(&mut self, n: usize) -> Result<()> {
        self.client.get_into(&self.keys[n], &mut self.target[..VALUE]).map(drop)
    }

    fn view(&self, n: usize) -> Result<()> {
        self.client.view(&self.keys[n]).map(|view| drop(black_box(view)))
    }

    fn remove(&self, n: usize) -> Result<()> {
        self.client.remove(&self.keys[n]).map(drop)
    }

    fn batch_put(&self) -> Result<()> {
        let keys = self.keys[..BATCH].iter().map(String::as_str);
        let items = keys.zip(self.source.chunks(VALUE).map(Into::into)).collect();
        self.client.batch_put(items).into_iter().try_for_each(|slot| slot.map(drop))
    }

    fn batch_get_into(&mut self) -> Result<()> {
        let keys = self.keys[..BATCH].iter().map(String::as_str);
        let items = keys.zip(self.target.chunks_mut(VALUE).map(Into::into)).collect();
        self.client.batch_get_into(items).into_iter().try_for_each(|slot| slot.map(drop))
    }

    fn batch_remove(&self) -> Result<()> {
        let keys: Vec<&str> = self.keys[..BATCH].iter().map(String::as_str).collect();
        self.client.batch_remove(&keys).into_iter().try_for_each(|slot| slot.map(drop))
    }
}

/// Puts so many small values into a store that has none.
fn fill(values: u64) -> Result<()> {
    let store = Store::open(Config::new((values * 64).max(1 << 20)), |_, _| ())?;
    let options = Options { workers: 1, ..Options::default() };
    let client = StoreClient::in_process(CpuDevice::open()?, store, options)?;
    (0..values).try_for_each(|n| client.put(&format!("counted/{n:08}"), &[0x5a; 64]).map(drop))
}

fn private_dir() -> TempDir {
    let mut builder = tempfile::Builder::new();
    builder.permissions(Permissions::from_mode(0o700)).tempdir().expect("a private directory")
}

/// Does one operation so many times; `None` where there is no such operation.
fn run(place: Where, operation: &str, times: &str) -> Option<Result<()>> {
    let times = times.parse().ok().filter(|times| *times <= MOST || operation != "put")?;
    counted(place, operation, times).transpose()
}

fn counted(place: Where, operation: &str, times: usize) -> Result<Option<()>> {
    let mut work = Work::new(place)?;
    // Everything once, so that tables have their size and lazy things are there.
    (0..MOST).try_for_each(|n| work.put(n))?;
    match operation {
        "put" => {
            (0..MOST).try_for_each(|n| work.remove(n))?;
            (0..times).try_for_each(|n| work.put(n))?;
        }
        "get_into" => (0..times).try_for_each(|n| work.get_into(n % MOST))?,
        "view" => (0..times).try_for_each(|n| work.view(n % MOST))?,
        "batch_put" => {
            for _ in 0..times {
                work.batch_remove()?;
                work.batch_put()?;
            }
        }
        "batch_get_into" => (0..times).try_for_each(|_| work.batch_get_into())?,
        // What a bare copy of a value takes, to be taken off: it is the C library's, and differs between processors.
        "memcpy" => (0..times).for_each(|n| {
            let from = black_box(&work.source[n % BATCH * VALUE..][..VALUE]);
            black_box(&mut work.target[..VALUE]).copy_from_slice(from);
        }),
        _ => return Ok(None),
    }
    Ok(Some(()))
}

fn time(operation: &str) -> Option<Result<()>> {
    timed(operation).transpose()
}

fn timed(operation: &str) -> Result<Option<()>> {
    let mut work = Work::new(Where::Here)?;
    (0..MOST).try_for_each(|n| work.put(n))?;
    let batch = operation.starts_with("batch");
    let len = if batch { BATCH * VALUE } else { VALUE };
    let mut scratch = vec![0u8; len];
    let (mut ops, mut copies) = (Vec::new(), Vec::new());
    let mut clocks = Vec::new();
    for turn in 0..if batch { 2000 } else { 200_000 } {
        let n = turn % 16;
        let start = Instant::now();
        for (from, to) in work.source[..len].chunks(VALUE).zip(scratch.chunks_mut(VALUE)) {
            black_box(to).copy_from_slice(black_box(from));
        }
        copies.push(start.elapsed());
        match operation {
            "put" => work.remove(n)?,
            "batch_put" => work.batch_remove()?,
            _ => {}
        }
        let start = Instant::now();
        clocks.push(start.elapsed());
        let start = Instant::now();
        match operation {
            "put" => work.put(n)?,
            "get_into" => work.get_into(n)?,
            "view" => work.view(n)?,
            "batch_put" => work.batch_put()?,
            "batch_get_into" => work.batch_get_into()?,
            _ => return Ok(None),
        }
        ops.push(start.elapsed());
    }
    let median = |samples: &mut Vec<Duration>| {
        samples.sort_unstable();
        samples[samples.len() / 2].as_nanos()
    };
    println!(
        "{operation}: {} ns, memcpy {} ns, clock {} ns",
        median(&mut ops),
        median(&mut copies),
        median(&mut clocks)
    );
    Ok(Some(()))
}

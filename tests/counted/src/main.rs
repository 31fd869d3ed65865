//! A small workload whose instructions can be counted: `haulier-counted OPERATION TIMES` does the same thing TIMES times
//! in one process, on one thread, with a store inside the process. See `tests/tests/instructions.rs`.
//!
//! With `--time` in place of a tool that counts, it says how many nanoseconds each took beside a memcpy.

use std::{
    env,
    hint::black_box,
    process::ExitCode,
    time::{Duration, Instant},
};

use backend_cpu::CpuDevice;
use haulier::{
    Options, Result, StoreClient,
    store::{Config, Store},
};

/// Bytes of a value.
const VALUE: usize = 4 << 10;
/// Values of a batch.
const BATCH: usize = 400;
/// The most times, so that every value has room.
const MOST: usize = 2048;

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let done = match &arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["--time", operation] => time(operation),
        ["fill", values] => values.parse().ok().map(fill),
        [operation, times] => match times.parse() {
            Ok(times @ 0..=MOST) => run(operation, times),
            _ => None,
        },
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
                "usage: haulier-counted [--time] put|get_into|view|batch_put|batch_get_into|memcpy [TIMES]\n       \
                 haulier-counted fill VALUES"
            );
            ExitCode::from(2)
        }
    }
}

/// The workload's client and memory.
struct Work {
    client: StoreClient<CpuDevice>,
    keys: Vec<String>,
    source: Vec<u8>,
    target: Vec<u8>,
}

impl Work {
    fn new() -> Result<Self> {
        let store = Store::open(Config::new(64 << 20), |_, _| ())?;
        let options = Options { workers: 1, ..Options::default() };
        let client = StoreClient::in_process(CpuDevice::open()?, store, options)?;
        let keys = (0..MOST).map(|n| format!("counted/{n:08}")).collect();
        let bytes = BATCH * VALUE;
        Ok(Work { client, keys, source: vec![0x5a; bytes], target: vec![0x11; bytes] })
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

/// Does one operation so many times; `None` where there is no such operation.
fn run(operation: &str, times: usize) -> Option<Result<()>> {
    counted(operation, times).transpose()
}

fn counted(operation: &str, times: usize) -> Result<Option<()>> {
    let mut work = Work::new()?;
    // Everything once, so that tables have their size and lazy things are there.
    (0..MOST).try_for_each(|n| work.put(n))?;
    match operation {
        "put" => {
            (0..MOST).try_for_each(|n| work.remove(n))?;
            (0..times).try_for_each(|n| work.put(n))?;
        }
        "get_into" => (0..times).try_for_each(|n| work.get_into(n))?,
        "view" => (0..times).try_for_each(|n| work.view(n))?,
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
    let mut work = Work::new()?;
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

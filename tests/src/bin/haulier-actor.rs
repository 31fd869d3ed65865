//! A client in a process of its own, for tests that kill it, freeze it, or need what only another process shows.
//!
//! `haulier-actor SOCKET` reads one order a line and answers one line to each, `error: ...` where it failed. It ends with
//! its input. Values are made from a seed, so that every process knows what must be in them.

use std::{
    collections::BTreeMap,
    env,
    error::Error,
    io::{self, BufRead, Write},
    path::Path,
    process,
    time::{Duration, Instant},
};

use backend_cpu::CpuDevice;
use haulier::{
    Dtype, Options, PoolBuffer, Shard, StoreClient, TensorRef, View,
    hal::{Buffer, DeviceExt},
    store,
};
use haulier_tests::{
    mix::{Mix, Plan},
    process::{connect, descriptors, mappings},
    world::{bytes, marked, seed_of},
};

type Outcome = Result<String, Box<dyn Error>>;

fn main() -> Result<(), Box<dyn Error>> {
    let socket = env::args_os().nth(1).ok_or("usage: haulier-actor SOCKET")?;
    let mut actor = Actor {
        socket: Path::new(&socket),
        client: None,
        buffers: BTreeMap::new(),
        views: BTreeMap::new(),
        sources: Vec::new(),
    };
    let mut stdout = io::stdout().lock();
    for line in io::stdin().lock().lines() {
        let line = line?;
        let words: Vec<&str> = line.split(' ').collect();
        let answer = actor.obey(&words).unwrap_or_else(|e| format!("error: {e}"));
        writeln!(stdout, "{}", answer.replace('\n', " "))?;
        stdout.flush()?;
    }
    Ok(())
}

struct Actor<'s> {
    socket: &'s Path,
    client: Option<StoreClient<CpuDevice>>,
    buffers: BTreeMap<String, PoolBuffer>,
    views: BTreeMap<String, View>,
    sources: Vec<Buffer<CpuDevice>>,
}

impl Actor<'_> {
    fn client(&mut self) -> Result<&StoreClient<CpuDevice>, Box<dyn Error>> {
        let client = match self.client.take() {
            Some(client) => client,
            None => connect(self.socket, Options::default())?,
        };
        Ok(self.client.insert(client))
    }

    fn obey(&mut self, words: &[&str]) -> Outcome {
        match *words {
            ["connect"] => self.client().map(|_| "connected".into()),
            ["close"] => {
                self.client = None;
                Ok("closed".into())
            }
            ["put", key, seed, len] => {
                let value = marked(seed.parse()?, len.parse()?);
                Ok(format!("{:?}", self.client()?.put(key, &value)?))
            }
            ["upsert", key, seed, len] => {
                let value = marked(seed.parse()?, len.parse()?);
                Ok(format!("{:?}", self.client()?.upsert(key, &value)?))
            }
            // From memory of the device, which the daemon opens; it is kept.
            ["put-device", key, seed, len] => {
                let value = marked(seed.parse()?, len.parse()?);
                let mut buffer = CpuDevice::open()?.buffer(value.len())?;
                buffer.allocation_mut().unwrap().write(0, &value)?;
                let verdict = self.client()?.put(key, &buffer)?;
                self.sources.push(buffer);
                Ok(format!("{verdict:?}"))
            }
            ["seed", key] => Ok(seed_of(&self.client()?.view(key)?)?.to_string()),
            ["seed-into", key, len] => {
                let mut target = vec![0; len.parse()?];
                let len = self.client()?.get_into(key, &mut target)?;
                Ok(seed_of(&target[..len as usize])?.to_string())
            }
            ["remove", key] => Ok(self.client()?.remove(key)?.to_string()),
            // Memory that is reserved, written, and not yet committed.
            ["alloc", name, seed, len] => {
                let mut buffer = self.client()?.alloc(len.parse()?)?;
                buffer.copy_from_slice(&marked(seed.parse()?, len.parse()?));
                self.buffers.insert(name.into(), buffer);
                Ok("reserved".into())
            }
            ["commit", name] => {
                let buffer = self.buffers.remove(name).ok_or("no such buffer")?;
                Ok(format!("{:?}", self.client()?.put_allocated(name, buffer)?))
            }
            ["hold", key] => {
                let view = self.client()?.view(key)?;
                self.views.insert(key.into(), view);
                Ok("held".into())
            }
            ["seed-held", key] => Ok(seed_of(self.views.get(key).ok_or("not held")?)?.to_string()),
            // Puts until it is ended from outside; says so when the first value is there.
            ["storm", prefix, len] => {
                let (len, prefix) = (len.parse()?, prefix.to_owned());
                let client = self.client()?.clone();
                for n in 0u64.. {
                    client.upsert(&format!("{prefix}{}", n % 16), &marked(n, len))?;
                    if n == 0 {
                        println!("raging");
                    }
                }
                Ok(String::new())
            }
            // Reads random keys until it is ended from outside, keeps some views, and checks every byte, of the views once
            // more when it lets go; says so when it begins, and what is wrong if something is.
            ["read-storm", prefix, keys, seed] => self.read_storm(prefix, keys.parse()?, seed.parse()?),
            // A bit of everything until it is ended from outside, or for so many milliseconds. Says so after the first `calls`,
            // then how many calls it made, or what is wrong.
            ["mix", own, seed, shared, keys, most, calls, millis] => {
                let plan = Plan {
                    shared: shared.into(),
                    keys: keys.parse()?,
                    own: own.into(),
                    seed: seed.parse()?,
                    most: most.parse()?,
                };
                self.mix(plan, calls.parse()?, Duration::from_millis(millis.parse()?))
            }
            ["put-shard", key, seed, rank, world] => {
                self.put_shard(key, seed.parse()?, rank.parse()?, world.parse()?)
            }
            ["reopen", times] => self.reopen(times.parse()?),
            ["device-memory", len] => {
                let buffer = CpuDevice::open()?.buffer(len.parse()?)?;
                Ok(format!("{} bytes at {:#x}", buffer.region().len, buffer.region().addr))
            }
            ["store", pool] => {
                store::Store::open(store::Config::new(pool.parse()?), |_, _| {})?;
                Ok("opened".into())
            }
            ["pool-memory", len] => {
                let buffer = self.client()?.alloc(len.parse()?)?;
                Ok(format!("{} bytes at {:p}", buffer.len(), buffer.as_ptr()))
            }
            _ => Err(format!("unknown order {words:?}").into()),
        }
    }

    fn mix(&mut self, plan: Plan, calls: u64, time: Duration) -> Outcome {
        let mut mix = Mix::new(self.client()?.clone(), plan);
        let start = Instant::now();
        for n in 0.. {
            if n == calls {
                println!("raging");
            }
            if start.elapsed() >= time {
                return Ok(n.to_string());
            }
            mix.step()?;
        }
        Ok(String::new())
    }

    fn read_storm(&mut self, prefix: &str, keys: u64, seed: u64) -> Outcome {
        let client = self.client()?.clone();
        let names: Vec<_> = (0..keys).map(|n| format!("{prefix}{n}")).collect();
        let mut kept: Vec<Option<View>> = (0..24).map(|_| None).collect();
        let mut target = vec![0; 1 << 20];
        println!("raging");
        let mut n = seed;
        loop {
            n = n.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let (name, place) = (&names[(n >> 33) as usize % names.len()], (n >> 40) as usize % kept.len());
            let whole =
                |value: &[u8]| seed_of(value).map_err(|e| format!("{name}, {} bytes: {e}", value.len()));
            if (n >> 50).is_multiple_of(4) {
                match client.get_into(name, &mut target) {
                    Ok(len) => drop(whole(&target[..len as usize])?),
                    Err(haulier::Error::NotFound) => {}
                    Err(e) => return Err(e.into()),
                }
                continue;
            }
            match client.view(name) {
                Ok(view) => {
                    whole(&view)?;
                    if let Some(old) = kept[place].replace(view) {
                        seed_of(&old)
                            .map_err(|e| format!("a view that was kept, {} bytes: {e}", old.len()))?;
                    }
                }
                Err(haulier::Error::NotFound) => drop(kept[place].take()),
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// One shard, along dimension 0, of the tensor of 32-bit numbers that `seed` makes: 10 rows of 6.
    fn put_shard(&mut self, key: &str, seed: u64, rank: u32, world: u32) -> Outcome {
        let shard = Shard { dim: 0, rank, world, full: 10 };
        let (start, rows) = shard.range();
        let whole = bytes(seed, 10 * 6 * 4);
        let part = &whole[start as usize * 24..][..rows as usize * 24];
        let tensor = TensorRef::new(Dtype::F32, &[rows, 6], part)?;
        Ok(format!("{:?}", self.client()?.put_shard(key, tensor, shard)?))
    }

    /// Opens a client, puts and views with it, and drops it, again and again; descriptors and mappings of this process
    /// before and after. The first rounds, which set things up that stay, come before both.
    fn reopen(&mut self, times: usize) -> Outcome {
        self.client = None;
        let round = |n: usize| -> Result<(), Box<dyn Error>> {
            // Three sizes that travel three ways: in the message, in a slot, in a block.
            for len in [100, 4000, 300_000] {
                let client = connect(
                    self.socket,
                    Options { deadline: Duration::from_secs(60), ..Options::default() },
                )?;
                let (key, value) = (format!("reopen-{len}"), marked(n as u64, len));
                client.upsert(&key, &value)?;
                let buffer = client.device().buffer(len)?;
                let mut target = vec![0; len];
                client.upsert("from-device-memory", &buffer)?;
                client.get_into(&key, &mut target)?;
                if *client.view(&key)? != value[..] || target != value {
                    return Err(format!("round {n}: other bytes came back").into());
                }
                let _unused = client.alloc(len as u64)?;
            }
            Ok(())
        };
        (0..20).try_for_each(round)?;
        let count = || (descriptors(process::id()), mappings(process::id()));
        let before = count();
        (0..times).try_for_each(round)?;
        let after = count();
        Ok(format!("{} {} {} {}", before.0, after.0, before.1, after.1))
    }
}

//! A client that does a bit of everything, at random, and checks every byte that comes back: for tests that kill some such
//! clients while others go on.
//!
//! A value says of itself which key it belongs to and which version it is, so one that is torn, another key's, or older
//! than what its only writer stored last, is told apart.

use std::fmt::Display;

use backend_cpu::CpuDevice;
use haulier::{Error, PoolBuffer, Put, StoreClient, View, hal::DeviceExt};

use crate::world::{bytes, marked, seed_of};

/// What a client does, and among which keys.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Before the keys that all clients write.
    pub shared: String,
    /// How many of them there are.
    pub keys: u64,
    /// Before the keys that this client alone writes. No two clients may have the same one.
    pub own: String,
    /// Makes the choices.
    pub seed: u64,
    /// The largest value, in bytes.
    pub most: usize,
}

/// Keys of its own.
const OWN: usize = 4;
/// Views that it keeps.
const VIEWS: usize = 6;

/// A client at work.
#[derive(Debug)]
pub struct Mix {
    plan: Plan,
    client: StoreClient<CpuDevice>,
    random: u64,
    version: u32,
    /// The version of each of its own keys that was stored last; none where it was removed.
    stored: [Option<u32>; OWN],
    views: Vec<(String, View)>,
    /// Memory that is written and waits to be stored.
    buffer: Option<PoolBuffer>,
    target: Vec<u8>,
}

impl Mix {
    /// Nothing is done yet.
    pub fn new(client: StoreClient<CpuDevice>, plan: Plan) -> Self {
        let (random, target) = (plan.seed, vec![0; plan.most]);
        Mix { plan, client, random, version: 0, stored: [None; OWN], views: Vec::new(), buffer: None, target }
    }

    /// Makes one call at random.
    ///
    /// # Errors
    /// What is wrong: an answer that none should get, or bytes that are not those that were stored.
    pub fn step(&mut self) -> Result<(), String> {
        let (choice, n) = (self.pick(16), self.pick(self.plan.keys));
        let key = format!("{}{n}", self.plan.shared);
        match choice {
            0 => self.write(&key, |client, key, value| client.put(key, value)).map(drop),
            1 | 2 => self.write(&key, |client, key, value| client.upsert(key, value)).map(drop),
            3 | 4 => self.write_own(),
            5 => self.remove_own(),
            6 | 7 => self.read_own(),
            8 | 9 => self.read_into(&key),
            10 | 11 => self.look(key),
            12 => self.client.remove(&key).map(drop).map_err(|e| told("remove", &key, e)),
            13 => self.allocate(&key),
            14 => self.write_device(&key),
            _ => self.batch(n),
        }
    }

    fn pick(&mut self, below: u64) -> u64 {
        self.random =
            self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 33) % below
    }

    /// Mostly small, of all the ways that values go: in a message, in a slot, in a block.
    fn length(&mut self) -> usize {
        let most = match self.pick(16) {
            0..6 => 1000,
            6..14 => 6000,
            _ => self.plan.most,
        };
        8 + self.pick(most as u64 - 8) as usize
    }

    fn write(
        &mut self,
        key: &str,
        put: impl FnOnce(&StoreClient<CpuDevice>, &str, &[u8]) -> haulier::Result<Put>,
    ) -> Result<Option<u32>, String> {
        self.version += 1;
        let len = self.length();
        stored(key, put(&self.client, key, &value(key, self.version, len)))
            .map(|put| put.filter(|put| *put != Put::AlreadyExists).map(|_| self.version))
    }

    fn write_own(&mut self) -> Result<(), String> {
        let (i, key) = self.own();
        if let Some(version) = self.write(&key, |client, key, value| client.upsert(key, value))? {
            self.stored[i] = Some(version);
        }
        self.check_own(i, &key)
    }

    fn remove_own(&mut self) -> Result<(), String> {
        let (i, key) = self.own();
        self.client.remove(&key).map_err(|e| told("remove", &key, e))?;
        self.stored[i] = None;
        self.check_own(i, &key)
    }

    fn read_own(&mut self) -> Result<(), String> {
        let (i, key) = self.own();
        self.check_own(i, &key)
    }

    fn own(&mut self) -> (usize, String) {
        let i = self.pick(OWN as u64);
        (i as usize, format!("{}{i}", self.plan.own))
    }

    /// Nobody else writes it, so it is what was stored last, or was evicted.
    fn check_own(&mut self, i: usize, key: &str) -> Result<(), String> {
        match (self.client.view(key), self.stored[i]) {
            (Ok(view), Some(stored)) => match version_of(key, &view)? {
                version if version == stored => Ok(()),
                version => Err(format!("{key} has version {version}, and {stored} was stored last")),
            },
            (Ok(_), None) => Err(format!("{key} was removed and is there")),
            (Err(Error::NotFound), _) => {
                self.stored[i] = None;
                Ok(())
            }
            (Err(e), _) => Err(told("view", key, e)),
        }
    }

    fn read_into(&mut self, key: &str) -> Result<(), String> {
        match self.client.get_into(key, &mut self.target[..]) {
            Ok(len) => version_of(key, &self.target[..len as usize]).map(drop),
            Err(Error::NotFound) => Ok(()),
            Err(e) => Err(told("get_into", key, e)),
        }
    }

    /// Looks at a value, and keeps the view in place of an older one, which must not have changed.
    fn look(&mut self, key: String) -> Result<(), String> {
        match self.client.view(&key) {
            Ok(view) => {
                version_of(&key, &view)?;
                self.views.push((key, view));
            }
            Err(Error::NotFound) => {}
            Err(e) => return Err(told("view", &key, e)),
        }
        if self.views.len() > VIEWS {
            let n = self.pick(VIEWS as u64) as usize;
            let (key, old) = self.views.swap_remove(n);
            version_of(&key, &old).map_err(|e| format!("a view that was kept: {e}"))?;
        }
        Ok(())
    }

    /// Stores what was allocated before, if anything was, else allocates: so memory is granted for a while.
    fn allocate(&mut self, key: &str) -> Result<(), String> {
        self.version += 1;
        if let Some(mut buffer) = self.buffer.take() {
            let value = value(key, self.version, buffer.len());
            buffer.copy_from_slice(&value);
            return stored(key, self.client.upsert_allocated(key, buffer)).map(drop);
        }
        let len = self.length();
        match self.client.alloc(len as u64) {
            Ok(buffer) => self.buffer = Some(buffer),
            Err(Error::Full { .. }) => {}
            Err(e) => return Err(told("alloc", key, e)),
        }
        Ok(())
    }

    /// From memory of the device, which the daemon opens.
    fn write_device(&mut self, key: &str) -> Result<(), String> {
        self.write(key, |client, key, value| {
            let mut source = client.device().buffer(value.len())?;
            source.allocation_mut().expect("it was just made").write(0, value)?;
            client.upsert(key, &source)
        })
        .map(drop)
    }

    fn batch(&mut self, first: u64) -> Result<(), String> {
        let keys: Vec<String> =
            (first..first + 5).map(|n| format!("{}{}", self.plan.shared, n % self.plan.keys)).collect();
        self.version += 1;
        let version = self.version;
        let values: Vec<Vec<u8>> = keys.iter().map(|key| value(key, version, self.length())).collect();
        let items = keys.iter().zip(&values).map(|(key, value)| (key.as_str(), value.into())).collect();
        for (key, put) in keys.iter().zip(self.client.batch_upsert(items)) {
            stored(key, put)?;
        }
        let names: Vec<&str> = keys.iter().map(String::as_str).collect();
        for (key, view) in keys.iter().zip(self.client.batch_view(&names)) {
            match view {
                Ok(view) => drop(version_of(key, &view)?),
                Err(Error::NotFound) => {}
                Err(e) => return Err(told("batch_view", key, e)),
            }
        }
        Ok(())
    }
}

/// The value of a key.
fn value(key: &str, version: u32, len: usize) -> Vec<u8> {
    marked(mark(key) | u64::from(version), len)
}

/// In the upper half of the seeds of all values of a key.
fn mark(key: &str) -> u64 {
    let (mut mark, all) = (0, key.bytes().chain([key.len() as u8]));
    all.for_each(|byte| {
        mark = u64::from_le_bytes(bytes(mark ^ u64::from(byte), 8).try_into().expect("8 bytes"))
    });
    mark & !u64::from(u32::MAX)
}

/// Which version of `key` this value is.
///
/// # Errors
/// Where it is not whole, or another key's.
pub fn version_of(key: &str, value: &[u8]) -> Result<u32, String> {
    let seed = seed_of(value).map_err(|e| format!("{key}, {} bytes, is not whole: {e}", value.len()))?;
    if seed & !u64::from(u32::MAX) != mark(key) {
        return Err(format!("{key} has the bytes of another key: seed {seed:#x}"));
    }
    Ok(seed as u32)
}

/// Full of what others hold is an answer too.
fn stored(key: &str, put: haulier::Result<Put>) -> Result<Option<Put>, String> {
    match put {
        Ok(put) => Ok(Some(put)),
        Err(Error::Full { .. }) => Ok(None),
        Err(e) => Err(told("put", key, e)),
    }
}

fn told(op: &str, key: &str, e: impl Display) -> String {
    format!("{op} of {key}: {e}")
}

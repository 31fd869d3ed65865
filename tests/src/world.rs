//! What most tests of the store need: a store in this process or a real daemon, its clients, and bytes to tell apart.

use backend_cpu::CpuDevice;
use haulier::{Options, StoreClient, store};

use crate::process::{Daemon, Serve};

/// One KiB.
pub const KIB: u64 = 1 << 10;
/// One MiB.
pub const MIB: u64 = 1 << 20;
/// One GiB.
pub const GIB: u64 = 1 << 30;

/// What a store is opened with.
#[derive(Debug, Clone)]
pub struct Setup {
    /// Bytes of the pool.
    pub pool: u64,
    /// Whether the oldest values make room.
    pub evict: bool,
    /// Namespaces with a part of the pool of their own.
    pub quotas: Vec<(&'static str, u64)>,
}

impl Setup {
    /// A pool of so many MiB, with eviction.
    pub fn mib(pool: u64) -> Self {
        Setup { pool: pool * MIB, evict: true, quotas: Vec::new() }
    }

    /// Without eviction.
    pub fn no_evict(self) -> Self {
        Setup { evict: false, ..self }
    }

    /// With a part of the pool for `namespace`.
    pub fn quota(mut self, namespace: &'static str, bytes: u64) -> Self {
        self.quotas.push((namespace, bytes));
        self
    }

    /// The daemon that has it.
    pub fn serve(&self) -> Serve {
        let serve = Serve::pool_of(self.pool);
        let serve = if self.evict { serve } else { serve.no_evict() };
        self.quotas.iter().fold(serve, |serve, (namespace, bytes)| serve.quota(namespace, bytes))
    }
}

/// A store that clients of this process work on.
#[derive(Debug)]
pub enum World {
    /// Inside this process.
    InProcess(store::Store),
    /// In a daemon, which is a process of its own.
    Node(Daemon),
}

impl World {
    /// A store inside this process.
    ///
    /// # Panics
    /// Where it cannot be opened.
    pub fn in_process(setup: &Setup) -> Self {
        let mut config = store::Config::new(setup.pool);
        config.evict = setup.evict;
        config.quotas = setup.quotas.iter().map(|(name, bytes)| ((*name).to_owned(), *bytes)).collect();
        World::InProcess(store::Store::open(config, |_, _| {}).expect("a store in this process"))
    }

    /// A store in a daemon.
    ///
    /// # Panics
    /// Where it does not start.
    pub fn node(setup: &Setup) -> Self {
        World::Node(setup.serve().start())
    }

    /// A client in the namespace "".
    pub fn client(&self) -> StoreClient<CpuDevice> {
        self.client_with(Options::default())
    }

    /// A client in this namespace.
    pub fn client_in(&self, namespace: &str) -> StoreClient<CpuDevice> {
        self.client_with(Options { namespace: namespace.to_owned(), ..Options::default() })
    }

    /// A client with these options.
    ///
    /// # Panics
    /// Where it cannot be opened.
    pub fn client_with(&self, options: Options) -> StoreClient<CpuDevice> {
        match self {
            World::InProcess(store) => {
                let device = CpuDevice::open().expect("the host's device");
                StoreClient::in_process(device, store.clone(), options).expect("a client in this process")
            }
            World::Node(daemon) => daemon.client_with(options),
        }
    }
}

/// Each of these functions is a test twice: over a store in this process, and over a daemon.
///
/// ```text
/// on_both_engines! {
///     what_it_shows: Setup::mib(64),
/// }
///
/// fn what_it_shows(world: &World) { ... }
/// ```
#[macro_export]
macro_rules! on_both_engines {
    ($($name:ident: $setup:expr,)*) => {
        mod in_process {
            #[allow(unused_imports)]
            use super::*;
            $(#[test] fn $name() { super::$name(&$crate::world::World::in_process(&$setup)); })*
        }

        mod node {
            #[allow(unused_imports)]
            use super::*;
            $(#[test] fn $name() { super::$name(&$crate::world::World::node(&$setup)); })*
        }
    };
}

/// `len` bytes that no other seed gives, and in which no part equals another.
pub fn bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5851_f42d_4c95_7f2d;
    let mut bytes = Vec::with_capacity(len.next_multiple_of(8));
    while bytes.len() < len {
        // SplitMix64.
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bytes.extend_from_slice(&(z ^ (z >> 31)).to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// A value of `len` bytes, at least 8, that says itself what must be in it: its seed, then the seed's bytes.
pub fn marked(seed: u64, len: usize) -> Vec<u8> {
    [&seed.to_le_bytes()[..], &bytes(seed, len - 8)].concat()
}

/// The seed of a [`marked`] value.
///
/// # Errors
/// Where it is not whole: what is wrong with it.
pub fn seed_of(value: &[u8]) -> Result<u64, String> {
    let (seed, rest) = value.split_first_chunk().ok_or_else(|| format!("only {} bytes", value.len()))?;
    let seed = u64::from_le_bytes(*seed);
    let wanted = bytes(seed, rest.len());
    match rest.iter().zip(&wanted).position(|(a, b)| a != b) {
        None => Ok(seed),
        Some(at) => Err(format!("byte {at} of {} is not that of seed {seed}", rest.len())),
    }
}

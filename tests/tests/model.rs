//! The store against a simple model of it: whatever two clients do, in whatever order, the answers are those of a map.
//!
//! With eviction a value may be gone at any time, but it is never another one. Daemons that are killed or frozen in
//! between are part of it.

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use backend_cpu::CpuDevice;
use haulier::{Error, Payload, PoolBuffer, Put, StoreClient, Target, View, hal::DeviceExt};
use haulier_tests::world::{MIB, Setup, World, bytes};
use proptest::{
    collection::vec,
    prelude::*,
    sample::select,
    test_runner::{Config, FileFailurePersistence, TestRunner},
};

type Client = StoreClient<CpuDevice>;

/// How many sequences each test tries, unless `PROPTEST_CASES` says otherwise.
const CASES: u32 = 48;

/// Prefixes of each other, other scripts, one of the longest; few enough to meet again and again.
fn key(n: usize) -> String {
    ["a", "a/1", "a/2", "b", "b/é", "ключ", "🔑", "z"]
        .get(n)
        .map_or_else(|| "long".repeat(256), |key| (*key).to_owned())
}

const KEYS: usize = 9;
const PREFIXES: [&str; 6] = ["a", "a/", "b", "к", "longlong", "absent"];
/// Around every border that a size has: nothing, slots, messages, blocks.
const LENS: [usize; 12] = [0, 1, 64, 65, 512, 4096, 4097, 16_384, 16_385, 70_000, 262_144, 300_000];

/// What a value is put from.
#[derive(Debug, Clone, Copy)]
enum From {
    Heap,
    Device,
    Pool,
}

#[derive(Debug, Clone)]
struct Value {
    seed: u64,
    len: usize,
}

impl Value {
    fn bytes(&self) -> Vec<u8> {
        bytes(self.seed, self.len)
    }
}

#[derive(Debug, Clone)]
enum Op {
    Store { key: usize, value: Value, from: From, upsert: bool },
    StoreBatch { items: Vec<(usize, Value)>, upsert: bool },
    GetInto { key: usize, capacity: usize, device: bool },
    GetIntoBatch { items: Vec<(usize, usize)> },
    Get { keys: Vec<usize> },
    Hold { key: usize },
    LetGo { which: usize },
    Alloc { value: Value },
    DropAlloc,
    Describe { keys: Vec<usize> },
    Remove { keys: Vec<usize> },
    RemovePrefix { prefix: usize },
    List { prefix: usize },
    Clear,
    Pin { key: usize, pinned: bool },
    Reopen,
    Fault(Fault),
}

#[derive(Debug, Clone)]
enum Fault {
    /// The daemon is killed, and another one starts in its place.
    Restart,
    /// The daemon is frozen while a value is put, which runs out of time.
    Freeze { key: usize, value: Value, upsert: bool },
}

/// An operation, and which of the two clients does it.
#[derive(Debug, Clone)]
struct Step {
    client: usize,
    op: Op,
}

fn value() -> impl Strategy<Value = Value> {
    (0u64..1000, select(&LENS[..])).prop_map(|(seed, len)| Value { seed, len })
}

fn steps(faults: bool) -> impl Strategy<Value = Vec<Step>> {
    let key = || 0..KEYS;
    let keys = || vec(0..KEYS, 0..6);
    let from = select(&[From::Heap, From::Heap, From::Device, From::Pool][..]);
    let capacity = || prop_oneof![select(&LENS[..]), Just(400_000usize)];
    let fault = prop_oneof![
        Just(Fault::Restart),
        (key(), value(), any::<bool>()).prop_map(|(key, value, upsert)| Fault::Freeze { key, value, upsert }),
    ];
    let store = (key(), value(), from, any::<bool>()).prop_map(|(key, value, from, upsert)| Op::Store {
        key,
        value,
        from,
        upsert,
    });
    let store_batch = (vec((key(), value()), 0..8), any::<bool>())
        .prop_map(|(items, upsert)| Op::StoreBatch { items, upsert });
    let get_into = (key(), capacity(), any::<bool>()).prop_map(|(key, capacity, device)| Op::GetInto {
        key,
        capacity,
        device,
    });
    let op = prop_oneof![
        12 => store,
        6 => store_batch,
        6 => get_into,
        4 => vec((key(), capacity()), 0..6).prop_map(|items| Op::GetIntoBatch { items }),
        6 => keys().prop_map(|keys| Op::Get { keys }),
        5 => key().prop_map(|key| Op::Hold { key }),
        3 => (0usize..16).prop_map(|which| Op::LetGo { which }),
        2 => value().prop_map(|value| Op::Alloc { value }),
        1 => Just(Op::DropAlloc),
        4 => keys().prop_map(|keys| Op::Describe { keys }),
        4 => keys().prop_map(|keys| Op::Remove { keys }),
        2 => (0..PREFIXES.len()).prop_map(|prefix| Op::RemovePrefix { prefix }),
        3 => (0..=PREFIXES.len()).prop_map(|prefix| Op::List { prefix }),
        1 => Just(Op::Clear),
        3 => (key(), any::<bool>()).prop_map(|(key, pinned)| Op::Pin { key, pinned }),
        1 => Just(Op::Reopen),
    ];
    let op = if faults { prop_oneof![30 => op, 1 => fault.prop_map(Op::Fault)].boxed() } else { op.boxed() };
    vec((0usize..2, op).prop_map(|(client, op)| Step { client, op }), 1..60)
}

/// What a value may be.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Held {
    value: Vec<u8>,
    pinned: bool,
}

/// The map that the store is to be.
#[derive(Debug, Default)]
struct Model {
    values: BTreeMap<String, Held>,
    /// Whether values that are not pinned may be gone, and puts may find no room.
    evicts: bool,
}

impl Model {
    /// The store says that there is no such key.
    fn is_gone(&mut self, key: &str) {
        if let Some(held) = self.values.remove(key) {
            assert!(self.evicts && !held.pinned, "{key:?} is gone");
        }
    }

    /// The store says that the key is there.
    fn expect(&self, key: &str) -> &[u8] {
        &self.values.get(key).unwrap_or_else(|| panic!("{key:?} is there, and should not be")).value
    }

    fn stored(&mut self, key: &str, value: &[u8], upsert: bool, verdict: &haulier::Result<Put>) {
        match verdict {
            Ok(Put::Stored) => {
                self.is_gone(key);
                self.values.insert(key.to_owned(), Held { value: value.to_vec(), pinned: false });
            }
            Ok(Put::Replaced) => {
                assert!(upsert, "a put has replaced {key:?}");
                self.expect(key);
                self.values.insert(key.to_owned(), Held { value: value.to_vec(), pinned: false });
            }
            Ok(Put::AlreadyExists) => {
                assert!(!upsert, "an upsert has kept {key:?}");
                self.expect(key);
            }
            Err(Error::Full { .. }) => assert!(self.evicts, "there is room"),
            Err(e) => panic!("storing {key:?}: {e}"),
        }
    }

    fn read<'m>(&'m mut self, key: &str, verdict: Result<(), &Error>) -> Option<&'m [u8]> {
        match verdict {
            Ok(()) => Some(self.expect(key)),
            Err(Error::NotFound) => {
                self.is_gone(key);
                None
            }
            Err(e) => panic!("reading {key:?}: {e}"),
        }
    }
}

/// Both clients, what they hold, and the model.
struct Run<'w> {
    world: &'w RefCell<World>,
    setup: &'w Setup,
    clients: [Client; 2],
    views: Vec<(View, Vec<u8>)>,
    buffers: Vec<(usize, PoolBuffer, Vec<u8>)>,
    model: Model,
    restarted: bool,
}

impl<'w> Run<'w> {
    fn new(world: &'w RefCell<World>, setup: &'w Setup) -> Self {
        let clients = [world.borrow().client(), world.borrow().client()];
        clients[0].clear().unwrap();
        let model = Model { evicts: setup.evict, ..Model::default() };
        Run { world, setup, clients, views: Vec::new(), buffers: Vec::new(), model, restarted: false }
    }

    fn step(&mut self, step: &Step) {
        let client = self.clients[step.client].clone();
        match &step.op {
            Op::Store { key: n, value, from, upsert } => {
                self.store(&client, &key(*n), &value.bytes(), *from, *upsert)
            }
            Op::StoreBatch { items, upsert } => self.store_batch(&client, items, *upsert),
            Op::GetInto { key: n, capacity, device } => self.get_into(&client, &key(*n), *capacity, *device),
            Op::GetIntoBatch { items } => self.get_into_batch(&client, items),
            Op::Get { keys } => {
                let keys: Vec<String> = keys.iter().map(|n| key(*n)).collect();
                let asked: Vec<&str> = keys.iter().map(String::as_str).collect();
                let got = client.batch_get(&asked);
                assert_eq!(got.len(), keys.len());
                for (key, got) in asked.iter().zip(&got) {
                    let wanted = self.model.read(key, got.as_ref().map(drop));
                    assert_eq!(got.as_deref().ok(), wanted, "{key:?}");
                }
            }
            Op::Hold { key: n } => {
                let view = client.view(&key(*n));
                let wanted = self.model.read(&key(*n), view.as_ref().map(drop)).map(<[u8]>::to_vec);
                if let (Ok(view), Some(wanted)) = (view, wanted) {
                    assert_eq!(view[..], wanted[..]);
                    self.views.push((view, wanted));
                }
            }
            Op::LetGo { which } => {
                if !self.views.is_empty() {
                    self.views.swap_remove(which % self.views.len());
                }
            }
            Op::Alloc { value } => match client.alloc(value.len as u64) {
                Ok(mut buffer) => {
                    buffer.copy_from_slice(&value.bytes());
                    self.buffers.push((step.client, buffer, value.bytes()));
                }
                Err(Error::Full { .. }) => assert!(self.model.evicts, "there is room"),
                Err(e) => panic!("allocating: {e}"),
            },
            Op::DropAlloc => drop(self.buffers.pop()),
            Op::Describe { keys } => self.describe(&client, keys),
            Op::Remove { keys } => {
                let keys: Vec<String> = keys.iter().map(|n| key(*n)).collect();
                let asked: Vec<&str> = keys.iter().map(String::as_str).collect();
                for (key, was) in asked.iter().zip(client.batch_remove(&asked)) {
                    if was.unwrap() {
                        self.model.expect(key);
                        self.model.values.remove(*key);
                    } else {
                        self.model.is_gone(key);
                    }
                }
            }
            Op::RemovePrefix { prefix } => {
                let prefix = PREFIXES[*prefix];
                self.removed(prefix, client.remove_by_prefix(prefix).unwrap());
            }
            Op::Clear => self.removed("", client.clear().unwrap()),
            Op::List { prefix } => self.list(&client, PREFIXES.get(*prefix).copied().unwrap_or("")),
            Op::Pin { key: n, pinned } => {
                let key = key(*n);
                let was = if *pinned { client.pin(&key) } else { client.unpin(&key) };
                if was.unwrap() {
                    self.model.expect(&key);
                    self.model.values.get_mut(&key).unwrap().pinned = *pinned;
                } else {
                    self.model.is_gone(&key);
                }
            }
            Op::Reopen => {
                // What the old one held stays; what it had reserved is given up with it.
                self.buffers.retain(|(owner, ..)| *owner != step.client);
                self.clients[step.client].close();
                assert!(matches!(self.clients[step.client].exists("a"), Err(Error::Closed)));
                self.clients[step.client] = self.world.borrow().client();
            }
            Op::Fault(fault) => self.fault(&client, fault),
        }
        for (view, wanted) in &self.views {
            assert!(view[..] == wanted[..], "bytes under a view have changed");
        }
        for (_, buffer, wanted) in &self.buffers {
            assert!(buffer[..] == wanted[..], "reserved memory was written by somebody else");
        }
    }

    fn store(&mut self, client: &Client, key: &str, value: &[u8], from: From, upsert: bool) {
        let verdict = match (from, upsert) {
            (From::Heap, false) => client.put(key, value),
            (From::Heap, true) => client.upsert(key, value),
            (From::Device, _) if value.is_empty() => {
                let whole = client.device().buffer(1).unwrap();
                let none = Payload::part(&whole, 1, 0).unwrap();
                if upsert { client.upsert(key, none) } else { client.put(key, none) }
            }
            (From::Device, _) => {
                let mut buffer = client.device().buffer(value.len()).unwrap();
                buffer.allocation_mut().unwrap().write(0, value).unwrap();
                if upsert { client.upsert(key, &buffer) } else { client.put(key, &buffer) }
            }
            (From::Pool, _) => client.alloc(value.len() as u64).and_then(|mut buffer| {
                buffer.copy_from_slice(value);
                if upsert { client.upsert_allocated(key, buffer) } else { client.put_allocated(key, buffer) }
            }),
        };
        self.model.stored(key, value, upsert, &verdict);
    }

    fn store_batch(&mut self, client: &Client, items: &[(usize, Value)], upsert: bool) {
        let items: Vec<(String, Vec<u8>)> = items.iter().map(|(n, value)| (key(*n), value.bytes())).collect();
        let batch = items.iter().map(|(key, value)| (key.as_str(), Payload::from(value))).collect();
        let verdicts = if upsert { client.batch_upsert(batch) } else { client.batch_put(batch) };
        assert_eq!(verdicts.len(), items.len());
        // As if one after the other.
        for ((key, value), verdict) in items.iter().zip(&verdicts) {
            self.model.stored(key, value, upsert, verdict);
        }
    }

    /// Checks what a target of this capacity holds after it was to be filled.
    fn filled(&mut self, key: &str, target: &[u8], verdict: &haulier::Result<u64>) {
        let untouched = |rest: &[u8]| {
            assert!(rest.iter().all(|byte| *byte == 0xEE), "{key:?}: bytes beyond were touched")
        };
        match verdict {
            Ok(len) => {
                let wanted = self.model.expect(key);
                assert_eq!(*len, wanted.len() as u64, "{key:?}");
                assert!(target[..wanted.len()] == *wanted, "{key:?}: other bytes");
                untouched(&target[wanted.len()..]);
            }
            Err(Error::TooSmall { need }) => {
                let wanted = self.model.expect(key).len();
                assert!(*need == wanted as u64 && wanted > target.len(), "{key:?}: {need} of {wanted}");
                untouched(target);
            }
            Err(e) => {
                self.model.read(key, Err(e));
                untouched(target);
            }
        }
    }

    fn get_into(&mut self, client: &Client, key: &str, capacity: usize, device: bool) {
        let mut target = vec![0xEE; capacity];
        let verdict = if device && capacity > 0 {
            let mut buffer = client.device().buffer(capacity).unwrap();
            buffer.allocation_mut().unwrap().write(0, &target).unwrap();
            let verdict = client.get_into(key, &mut buffer);
            buffer.allocation().read(0, &mut target).unwrap();
            verdict
        } else {
            client.get_into(key, &mut target)
        };
        self.filled(key, &target, &verdict);
    }

    fn get_into_batch(&mut self, client: &Client, items: &[(usize, usize)]) {
        let keys: Vec<String> = items.iter().map(|(n, _)| key(*n)).collect();
        let mut targets: Vec<Vec<u8>> = items.iter().map(|(_, capacity)| vec![0xEE; *capacity]).collect();
        let batch =
            keys.iter().zip(&mut targets).map(|(key, target)| (key.as_str(), Target::from(target))).collect();
        let verdicts = client.batch_get_into(batch);
        assert_eq!(verdicts.len(), items.len());
        for ((key, target), verdict) in keys.iter().zip(&targets).zip(&verdicts) {
            self.filled(key, target, verdict);
        }
    }

    fn describe(&mut self, client: &Client, keys: &[usize]) {
        let keys: Vec<String> = keys.iter().map(|n| key(*n)).collect();
        let asked: Vec<&str> = keys.iter().map(String::as_str).collect();
        let (exist, sizes) = (client.batch_exists(&asked), client.batch_size(&asked));
        assert_eq!((exist.len(), sizes.len()), (keys.len(), keys.len()));
        for ((key, exists), size) in asked.iter().zip(exist).zip(sizes) {
            // Nothing stores in between, so nothing goes either.
            assert_eq!(exists.unwrap(), size.is_ok(), "{key:?}");
            let wanted = self.model.read(key, size.as_ref().map(drop)).map(|value| value.len() as u64);
            assert_eq!(size.ok(), wanted, "{key:?}");
        }
    }

    fn removed(&mut self, prefix: &str, count: u64) {
        let under: BTreeSet<String> =
            self.model.values.keys().filter(|key| key.starts_with(prefix)).cloned().collect();
        let pinned = under.iter().filter(|key| self.model.values[*key].pinned).count() as u64;
        if self.model.evicts {
            assert!((pinned..=under.len() as u64).contains(&count), "{count} of {}", under.len());
        } else {
            assert_eq!(count, under.len() as u64);
        }
        self.model.values.retain(|key, _| !under.contains(key));
    }

    fn list(&mut self, client: &Client, prefix: &str) {
        let listed = client.list(prefix).unwrap();
        assert!(listed.is_sorted_by(|a, b| a.0 < b.0), "{listed:?}");
        for (key, len) in &listed {
            assert!(key.starts_with(prefix));
            assert_eq!(*len, self.model.expect(key).len() as u64, "{key:?}");
        }
        let listed: BTreeSet<String> = listed.into_iter().map(|(key, _)| key).collect();
        let missing: Vec<String> = self
            .model
            .values
            .keys()
            .filter(|key| key.starts_with(prefix) && !listed.contains(*key))
            .cloned()
            .collect();
        missing.iter().for_each(|key| self.model.is_gone(key));
    }

    fn fault(&mut self, client: &Client, fault: &Fault) {
        match fault {
            Fault::Restart => {
                self.world.replace_with(|world| {
                    match std::mem::replace(world, World::InProcess(nowhere())) {
                        World::Node(daemon) => World::Node(daemon.restart(self.setup.serve())),
                        World::InProcess(_) => unreachable!("faults are a daemon's"),
                    }
                });
                self.model.values.clear();
                // Memory of a store that is gone is still there, and may be refused.
                self.restarted = true;
            }
            Fault::Freeze { key: n, value, upsert } => {
                let (key, value) = (key(*n), value.bytes());
                let hasty = client.with_deadline(Duration::from_millis(60));
                let world = self.world.borrow();
                let World::Node(daemon) = &*world else { unreachable!("faults are a daemon's") };
                daemon.process.freeze();
                let late = if *upsert { hasty.upsert(&key, &value) } else { hasty.put(&key, &value) };
                let asked = hasty.exists(&key);
                daemon.process.thaw();
                assert!(matches!(late, Err(Error::Timeout { .. })), "{late:?}");
                assert!(matches!(asked, Err(Error::Timeout { .. })), "{asked:?}");
                // Whether it was stored is not known, but it is known when the daemon has got to it: requests of one
                // client are answered in their order.
                let now = client.get(&key);
                match (&now, self.model.values.get(&key)) {
                    (Ok(now), Some(old)) if *now == old.value => {}
                    (Ok(now), old) => {
                        assert!(old.is_none() || *upsert, "a put has replaced {key:?}");
                        assert!(*now == value, "{key:?} is neither the old value nor the new one");
                        self.model.values.insert(key, Held { value, pinned: false });
                    }
                    (Err(Error::NotFound), _) => self.model.is_gone(&key),
                    (Err(e), _) => panic!("after a freeze: {e}"),
                }
            }
        }
    }

    fn finish(mut self) {
        let client = self.clients[1].clone();
        self.list(&client, "");
        self.describe(&client, &(0..KEYS).collect::<Vec<_>>());
        // A buffer becomes a value, also late; that of a daemon that is gone may be refused.
        for (owner, buffer, value) in std::mem::take(&mut self.buffers) {
            match self.clients[owner].upsert_allocated("last", buffer) {
                Ok(_) => assert!(client.get("last").unwrap() == value),
                Err(e) => assert!(self.restarted, "putting reserved memory: {e}"),
            }
        }
    }
}

/// A stand-in for a daemon while it is replaced.
fn nowhere() -> haulier::store::Store {
    haulier::store::Store::open(haulier::store::Config::new(1), |_, _| {}).expect("a store of one frame")
}

fn check(name: &'static str, setup: &Setup, open: impl Fn(&Setup) -> World, faults: bool, cases: u32) {
    let seeds = concat!(env!("CARGO_MANIFEST_DIR"), "/proptest-regressions/model.txt");
    let default = Config::default();
    let cases = std::env::var_os("PROPTEST_CASES").map_or(cases, |_| default.cases);
    let mut runner = TestRunner::new(Config {
        cases,
        failure_persistence: Some(Box::new(FileFailurePersistence::Direct(seeds))),
        test_name: Some(name),
        // Each step of shrinking runs a whole sequence.
        max_shrink_iters: 200,
        ..default
    });
    let world = RefCell::new(open(setup));
    let outcome = runner.run(&steps(faults), |steps| {
        let mut run = Run::new(&world, setup);
        steps.iter().for_each(|step| run.step(step));
        run.finish();
        Ok(())
    });
    outcome.unwrap_or_else(|e| panic!("{e}"));
}

/// Room for whatever a sequence may store and hold.
fn roomy() -> Setup {
    Setup::mib(160).no_evict()
}

/// Less room than the keys have values, so that there is always something to evict.
fn tight() -> Setup {
    Setup { pool: 2 * MIB, ..Setup::mib(2) }
}

#[test]
fn a_store_in_process_is_a_map() {
    check("in process", &roomy(), World::in_process, false, CASES);
}

#[test]
fn a_store_in_process_that_evicts_is_a_map_that_forgets() {
    check("in process, evicting", &tight(), World::in_process, false, CASES);
}

#[test]
fn a_node_is_a_map_for_two_clients() {
    check("node", &roomy(), World::node, false, CASES);
}

#[test]
fn a_node_that_evicts_is_a_map_that_forgets() {
    check("node, evicting", &tight(), World::node, false, CASES);
}

#[test]
fn a_node_that_is_killed_and_frozen_is_a_map_all_the_same() {
    check("node with faults", &Setup::mib(160).no_evict(), World::node, true, CASES / 2);
}

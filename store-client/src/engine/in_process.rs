//! The engine inside this process: a store without a daemon.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use hal::{Bound, Deadline, Device, Region};

use crate::{
    arrow::{Ready, Slot},
    engine::{Description, Engine, PoolBuffer, View},
    error::{Error, Result},
    metrics::{FOUND, Metrics, Op, Route},
    shm,
    store::{Grant, Mode, Object, Put, Space, Stat, Store, Writer},
    wire::Path,
};

/// Bytes after which a call looks at the clock again.
const LOOK: u64 = 256 << 10;
/// Bytes that a slot's bookkeeping counts for.
const SLOT: u64 = 4 << 10;

/// A store of this process, as one of its namespaces sees it.
#[derive(Debug)]
pub(crate) struct InProcessEngine {
    store: Store,
    space: Space,
    writer: Writer,
    /// Counts what this engine does; the store's figures are those of all who use it.
    metrics: Metrics,
    closed: AtomicBool,
}

impl InProcessEngine {
    /// An engine over `store` for keys of `namespace`.
    pub(crate) fn new(store: Store, namespace: &str) -> Result<Self> {
        let (space, writer) = (store.space(namespace)?, store.writer());
        let metrics = Metrics::new(store.clone());
        Ok(InProcessEngine { store, space, writer, metrics, closed: AtomicBool::new(false) })
    }

    /// Refuses what a closed engine, or a call past its deadline, does not do any more.
    fn go_on(&self, op: &str, deadline: Deadline) -> Result<()> {
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::Closed);
        }
        if deadline.is_passed() {
            return Err(Error::Timeout { op: op.into() });
        }
        Ok(())
    }

    /// Calls for each slot until the engine is closed or the deadline passes. How many bytes a call moves is up to
    /// `bytes`: to look at the clock before each would cost as much as a small slot does.
    fn each<'s, T, R>(
        &self,
        op: &str,
        slots: &'s [T],
        bytes: impl Fn(&T) -> u64,
        deadline: Deadline,
        call: impl Fn(&'s T) -> Result<R>,
    ) -> Vec<Result<R>> {
        let mut since = LOOK;
        let mut gone_on = Ok(());
        slots
            .iter()
            .map(|slot| {
                if since >= LOOK && gone_on.is_ok() {
                    gone_on = self.go_on(op, deadline);
                    since = 0;
                }
                since += SLOT + bytes(slot);
                gone_on.clone().and_then(|()| call(slot))
            })
            .collect()
    }

    fn hold(&self, key: &str) -> Result<Arc<Object>> {
        self.space.hold(key).ok_or(Error::NotFound)
    }

    /// Stores one slot.
    fn copy_in<D: Device>(
        &self,
        bound: &Bound<'_, D>,
        slot: &Slot<D>,
        mode: Mode,
        deadline: Deadline,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<Put> {
        let from = slot.region();
        let len = from.len as u64;
        if self.space.keeps(slot.key(), mode) {
            progress(len);
            return Ok(Put::AlreadyExists);
        }
        let mut grant = self.writer.reserve(&self.space, len)?;
        let to = Region::host(grant.as_mut_ptr().expose_provenance(), from.len);
        // SAFETY: a ready slot is allocated and nobody writes it until the put has returned; the grant's memory is this
        // call's alone.
        unsafe { shm::copy_in(bound, slot, to, deadline, progress) }?;
        self.space.commit(grant, slot.key(), len, slot.meta(), mode)
    }

    /// Fills one slot.
    fn copy_out<D: Device>(
        &self,
        bound: &Bound<'_, D>,
        slot: &Slot<D>,
        deadline: Deadline,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<Description> {
        let object = self.hold(slot.key())?;
        let from = Region::host(object.as_ptr().expose_provenance(), object.len() as usize);
        let too_small = |_| Error::TooSmall { need: object.len() };
        let to = slot.region().part(0, from.len).map_err(too_small)?;
        // SAFETY: a ready slot is allocated and nobody touches it until the get has returned; the object is held, so its
        // bytes stay as they are.
        unsafe { shm::copy_out(bound, slot, to, from, deadline, progress) }?;
        Ok(Description { len: object.len(), meta: object.meta().into() })
    }

    /// Counts gets, whose bytes are read where they lie.
    fn count_gets<T>(&self, gets: &[Result<T>], len: impl Fn(&T) -> u64) {
        let (mut count, mut bytes) = (0, 0);
        for got in gets {
            match got {
                Ok(found) => {
                    count += 1;
                    bytes += len(found);
                }
                Err(e) => self.metrics.count(Op::Get, None, e.label(), 1),
            }
        }
        if count > 0 {
            self.metrics.got_many(Route::Shared, count, bytes);
        }
    }

    /// Does something to a key, and counts whether it was there.
    fn count_found(&self, op: Op, found: bool) -> Result<bool> {
        self.metrics.found(op, Ok(found));
        Ok(found)
    }
}

fn bytes<D: Device>(slot: &Slot<D>) -> u64 {
    slot.region().len as u64
}

impl<D: Device> Engine<D> for InProcessEngine {
    /// This process copies its memory itself.
    fn imports(&self) -> bool {
        false
    }

    fn put(
        &self,
        bound: &Bound<'_, D>,
        batch: &Ready<D>,
        mode: Mode,
        deadline: Deadline,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Vec<Result<Put>> {
        let puts = self.each("put", batch.slots(), bytes, deadline, |slot| {
            self.copy_in(bound, slot, mode, deadline, progress)
        });
        let slots = puts.iter().zip(batch.slots());
        self.metrics.puts(slots.map(|(put, slot)| (put, bytes(slot), slot.path())));
        puts
    }

    fn get_into(
        &self,
        bound: &Bound<'_, D>,
        batch: &Ready<D>,
        deadline: Deadline,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Vec<Result<Description>> {
        let gets = self.each("get", batch.slots(), bytes, deadline, |slot| {
            self.copy_out(bound, slot, deadline, progress)
        });
        self.count_gets(&gets, |found| found.len);
        gets
    }

    fn view(&self, keys: &[&str], deadline: Deadline) -> Vec<Result<View>> {
        let views = self.each(
            "view",
            keys,
            |_| 0,
            deadline,
            |key| {
                let object = self.hold(key)?;
                let (start, len, meta) = (object.as_ptr(), object.len() as usize, object.meta().into());
                // SAFETY: the bytes of an object stay as they are until it is dropped.
                Ok(unsafe { View::new(start, len, meta, object) })
            },
        );
        self.count_gets(&views, |view| view.len() as u64);
        views
    }

    fn alloc(&self, len: u64, deadline: Deadline) -> Result<PoolBuffer> {
        self.go_on("alloc", deadline)?;
        let reserved = self.writer.reserve(&self.space, len);
        let mut grant = reserved.inspect_err(|e| self.metrics.count(Op::Reserve, None, e.label(), 1))?;
        // SAFETY: the memory is the grant's alone until it is dropped or committed, and memory of an arena is always
        // initialised.
        Ok(unsafe { PoolBuffer::new(grant.as_mut_ptr(), len as usize, Box::new(grant)) })
    }

    fn put_allocated(
        &self,
        key: &str,
        meta: &[u8],
        buffer: PoolBuffer,
        mode: Mode,
        deadline: Deadline,
    ) -> Result<Put> {
        self.go_on("put", deadline)?;
        let len = buffer.len() as u64;
        let foreign = "the buffer was allocated by another client; put it there, or put its bytes";
        let grant = buffer
            .into_grant()
            .downcast::<Grant>()
            .map_err(|_| Error::InvalidArgument { what: foreign.into() })?;
        let put = self.space.commit(*grant, key, len, meta, mode);
        self.metrics.put(&put, len, Path::Alloc);
        put
    }

    fn describe(&self, keys: &[&str], deadline: Deadline) -> Vec<Result<Description>> {
        self.each(
            "describe",
            keys,
            |_| 0,
            deadline,
            |key| {
                let object = self.space.peek(key).ok_or(Error::NotFound);
                self.metrics.found(Op::Describe, object.as_ref().map(|_| true));
                let object = object?;
                Ok(Description { len: object.len(), meta: object.meta().into() })
            },
        )
    }

    fn remove(&self, keys: &[&str], deadline: Deadline) -> Vec<Result<bool>> {
        self.each("remove", keys, |_| 0, deadline, |key| self.count_found(Op::Remove, self.space.remove(key)))
    }

    fn remove_by_prefix(&self, prefix: &str, deadline: Deadline) -> Result<u64> {
        self.go_on("remove_by_prefix", deadline)?;
        let gone = if prefix.is_empty() { self.space.clear() } else { self.space.remove_prefix(prefix) };
        self.metrics.count(Op::Remove, None, FOUND, gone);
        Ok(gone)
    }

    fn set_pinned(&self, keys: &[&str], pinned: bool, deadline: Deadline) -> Vec<Result<bool>> {
        self.each(
            "set_pinned",
            keys,
            |_| 0,
            deadline,
            |key| self.count_found(Op::Pin, self.space.set_pinned(key, pinned)),
        )
    }

    fn list(
        &self,
        prefix: &str,
        after: Option<&str>,
        limit: u64,
        deadline: Deadline,
    ) -> Result<(Vec<(String, u64)>, bool)> {
        self.go_on("list", deadline)?;
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        // One more than asked for tells whether more follow.
        let mut entries = self.space.list(prefix, after, limit.saturating_add(1));
        let more = entries.len() > limit;
        entries.truncate(limit);
        Ok((entries.into_iter().map(|entry| (entry.key, entry.len)).collect(), more))
    }

    fn stat(&self, deadline: Deadline) -> Result<Stat> {
        self.go_on("stat", deadline)?;
        Ok(self.store.stat())
    }

    fn metrics(&self, deadline: Deadline) -> Result<String> {
        self.go_on("metrics", deadline)?;
        Ok(self.metrics.render())
    }

    fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }
}

#[cfg(all(test, feature = "cpu"))]
mod tests {
    use std::collections::BTreeMap;

    use backend_cpu::CpuDevice;

    use super::*;
    use crate::{
        client::{Options, StoreClient},
        store::Config,
        tensor::{Dtype, NDIM_MAX, Shard, TensorMut, TensorSpec},
    };

    type Client = StoreClient<CpuDevice>;

    const KIB: usize = 1 << 10;

    fn client(store: &Store) -> Client {
        StoreClient::in_process(CpuDevice::open().unwrap(), store.clone(), Options::default()).unwrap()
    }

    fn store(pool: u64) -> Store {
        Store::open(Config::new(pool), |_, _| ()).unwrap()
    }

    #[test]
    fn a_put_that_keeps_what_is_there_evicts_nothing() {
        let store = store(1 << 20);
        let client = client(&store);
        let mut count = 0;
        while store.stat().evictions == 0 {
            client.put(&count.to_string(), &vec![1; 100 * KIB]).unwrap();
            count += 1;
        }
        let before = store.stat();
        // The first is gone; the second is the next to go.
        for key in ["1", &(count - 1).to_string()] {
            assert_eq!(client.put(key, &vec![2; 100 * KIB]).unwrap(), Put::AlreadyExists);
            assert_eq!(client.put(key, &vec![2; 1000 * KIB]).unwrap(), Put::AlreadyExists);
        }
        assert_eq!(store.stat(), before);
        assert_eq!(client.get("1").unwrap(), vec![1; 100 * KIB]);
    }

    /// The figure in the line of the counters that begins so.
    fn counted(client: &Client, line: &str) -> u64 {
        let text = client.metrics().unwrap();
        let value = text.lines().find_map(|l| l.strip_prefix(line)?.trim().parse().ok());
        value.unwrap_or_else(|| panic!("{line} is not in\n{text}"))
    }

    #[test]
    fn what_became_of_each_call_is_counted_as_a_daemon_counts_it() {
        let store = store(1 << 20);
        let client = client(&store);
        client.put("k", &[1; 100]).unwrap();
        client.put("k", &[1; 100]).unwrap();
        client.upsert("k", &[1; 50]).unwrap();
        assert!(client.put("large", &vec![1; 2 << 20]).is_err());
        let buffer = client.alloc(7).unwrap();
        client.put_allocated("allocated", buffer).unwrap();
        assert!(client.alloc(2 << 20).is_err());
        client.get("k").unwrap();
        client.get_into("k", &mut [0; 50][..]).unwrap();
        assert!(client.get_into("k", &mut [0; 49][..]).is_err());
        assert!(client.get("absent").is_err());
        client.exists("k").unwrap();
        client.remove("k").unwrap();
        client.remove("k").unwrap();
        let operations = [
            ("put", "staging", "stored", 1),
            ("put", "staging", "already_exists", 1),
            ("put", "staging", "replaced", 1),
            ("put", "staging", "too_large", 1),
            ("put", "alloc", "stored", 1),
            ("reserve", "none", "too_large", 1),
            ("get", "shared", "found", 2),
            ("get", "none", "too_small", 1),
            ("get", "none", "not_found", 1),
            ("describe", "none", "found", 1),
            ("remove", "none", "found", 1),
            ("remove", "none", "not_found", 1),
        ];
        for (op, path, outcome, times) in operations {
            let line =
                format!("haulier_operations_total{{op=\"{op}\",path=\"{path}\",outcome=\"{outcome}\"}} ");
            assert_eq!(counted(&client, &line), times, "{line}");
        }
        for (direction, path, bytes) in [("in", "staging", 150), ("in", "alloc", 7), ("out", "shared", 100)] {
            let line = format!("haulier_values_bytes_total{{direction=\"{direction}\",path=\"{path}\"}} ");
            assert_eq!(counted(&client, &line), bytes, "{line}");
        }
        assert_eq!(counted(&client, "haulier_fallbacks_total{reason=\"host_memory\"} "), 4);
        assert_eq!(counted(&client, "haulier_objects "), 1);
        assert_eq!(counted(&client, "haulier_pool_bytes "), store.stat().pool);
    }

    /// A description as it is stored, made by hand.
    fn description(magic: u8, version: u8, dtype: &str, shape: &[u64], shard: Option<Shard>) -> Vec<u8> {
        postcard::to_stdvec(&(magic, version, dtype, shape, shard)).unwrap()
    }

    /// Stores a value with anything beside it, which no client lets a caller do.
    fn plant(store: &Store, key: &str, value: &[u8], meta: &[u8]) {
        let (space, writer, len) = (store.space("").unwrap(), store.writer(), value.len() as u64);
        let mut grant = writer.reserve(&space, len).unwrap();
        grant.write(0, value).unwrap();
        space.commit(grant, key, len, meta, Mode::Upsert).unwrap();
    }

    /// P66: whatever stands beside a value, what reads it as a tensor gives a typed error and no panic.
    #[test]
    fn hostile_descriptions_in_the_store_are_told_by_every_call() {
        let store = store(4 << 20);
        let client = client(&store);
        let shard = |dim, rank, world, full| Some(Shard { dim, rank, world, full });
        let good = description(b'T', 1, "F32", &[2, 3], None);
        let mut hostile: BTreeMap<String, Vec<u8>> = BTreeMap::new();
        let mut add = |name: &str, meta: Vec<u8>| assert!(hostile.insert(name.to_owned(), meta).is_none());
        add("more elements than bytes", description(b'T', 1, "F32", &[2, 4], None));
        add("fewer elements than bytes", description(b'T', 1, "F32", &[2, 2], None));
        add("an empty shape", description(b'T', 1, "F32", &[], None));
        add("a zero", description(b'T', 1, "F32", &[0], None));
        add("too many dimensions", description(b'T', 1, "F32", &[1; NDIM_MAX + 1], None));
        add("400 dimensions", description(b'T', 1, "F32", &[1; 400], None));
        add("a product that overflows", description(b'T', 1, "F32", &[u64::MAX, 2], None));
        add("a product that overflows to 24", description(b'T', 1, "U8", &[(1 << 61) + 3, 8], None));
        add("an unknown dtype", description(b'T', 1, "F31", &[6], None));
        add("no dtype", description(b'T', 1, "", &[6], None));
        add("part of a byte", description(b'T', 1, "F4", &[47], None));
        add("another magic", description(b'U', 1, "F32", &[2, 3], None));
        add("another version", description(b'T', 2, "F32", &[2, 3], None));
        add("more behind it", [&good[..], b"x"].concat());
        add("a dtype that is no text", [&b"T\x01\x03\xff\xfe\xfd"[..], &[1, 24, 0]].concat());
        add("a dtype that is longer than all", [&b"T\x01"[..], &[0xff; 9], &[1]].concat());
        add("a shape that is longer than all", [&b"T\x01\x03F32"[..], &[0xff; 9], &[1]].concat());
        add("a number without an end", [&b"T\x01\x03F32\x01"[..], &[0xff; 12]].concat());
        add("a shard of rank 2 of 2", description(b'T', 1, "F32", &[2, 3], shard(0, 2, 2, 4)));
        add("a shard of none", description(b'T', 1, "F32", &[2, 3], shard(0, 0, 0, 4)));
        add("a shard along dimension 2", description(b'T', 1, "F32", &[2, 3], shard(2, 0, 2, 4)));
        add("a shard of another size", description(b'T', 1, "F32", &[2, 3], shard(0, 0, 2, 9)));
        add("zeros", vec![0; 40]);
        for cut in 1..good.len() {
            add(&format!("cut after {cut}"), good[..cut].to_vec());
        }
        let value = [4; 24];
        plant(&store, "good", &value, &good);
        assert_eq!(client.get_tensor("good").unwrap().spec, TensorSpec::new(Dtype::F32, [2, 3]));
        for (name, meta) in &hostile {
            plant(&store, name, &value, meta);
            // As the first shard of a tensor too.
            plant(&store, &format!("{name}@shard0"), &value, meta);
            let mut target = vec![0xEE; 24];
            for verdict in [
                client.tensor_spec(name).map(drop),
                client.get_tensor(name).map(drop),
                client.view_tensor(name).map(drop),
                client.get_tensor_into(name, TensorMut::new(Dtype::F32, &[2, 3], &mut target).unwrap()),
                client.get_sharded(name).map(drop),
                client.get_shard(name, 0, 0, 2).map(drop),
            ] {
                assert!(matches!(verdict, Err(Error::InvalidTensor { .. })), "{name}: {verdict:?}");
            }
            assert_eq!(target, [0xEE; 24], "{name}");
            assert_eq!(client.get(name).unwrap(), value, "the bytes are there, whatever stands beside them");
        }
    }

    /// Nothing in such a description contradicts anything, but the rest of the tensor is not there, and never was.
    #[test]
    fn a_small_shard_that_claims_a_tensor_beyond_all_memory_is_an_error() {
        let store = store(1 << 20);
        let client = client(&store);
        let huge = Shard { dim: 0, rank: 0, world: u32::MAX, full: 1 << 40 };
        let (start, len) = huge.range();
        assert_eq!((start, len), (0, 257));
        plant(&store, "huge@shard0", &[1; 257], &description(b'T', 1, "U8", &[len], Some(huge)));
        assert_eq!(client.view_tensor("huge@shard0").unwrap().spec().shard, Some(huge));
        let whole = client.get_sharded("huge");
        assert!(whole.is_err(), "{:?}", whole.map(|tensor| tensor.spec));
        let half = client.get_shard("huge", 0, 0, 2);
        assert!(half.is_err(), "{:?}", half.map(|tensor| tensor.spec));
    }
}

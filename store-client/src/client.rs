//! `StoreClient`: every call that a user makes.

use std::{
    any::Any,
    fmt,
    marker::PhantomData,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use hal::{Bound, Deadline, Device, DeviceExt, Keep, Place, Region, Workers};

#[cfg(feature = "mooncake")]
use crate::engine::mooncake::MooncakeEngine;
use crate::{
    arrow::{Items, Ready, Slot},
    engine::{Description, Engine, PoolBuffer, View, in_process::InProcessEngine, node::NodeEngine},
    error::{Error, Result},
    fork,
    payload::{Lease, Origin, Payload, Span, Target, check_key},
    retry,
    store::{META_MAX, Mode, Put, Stat, Store},
};

/// How a client is opened.
#[derive(Debug, Clone)]
pub struct Options {
    /// Keys of one namespace are invisible to every other one.
    pub namespace: String,
    /// The longest that a call takes, unless [`StoreClient::with_deadline`] says otherwise.
    pub deadline: Duration,
    /// Threads bound to the client's device, for driver calls that may hang.
    pub workers: usize,
}

impl Default for Options {
    /// The namespace `""`, a deadline of 30 seconds, 4 workers.
    fn default() -> Self {
        Options { namespace: String::new(), deadline: Duration::from_secs(30), workers: 4 }
    }
}

/// How far a call has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Bytes done.
    pub done: u64,
    /// Bytes in all.
    pub total: u64,
}

type OnProgress = Arc<dyn Fn(Progress) + Send + Sync>;

/// A client of a store, working on device `D`.
///
/// Cloning is cheap; clones share the connection. All calls may be made from any thread at the same time. Each works on the
/// device that was captured when the client was opened, whatever is current on the calling thread, and leaves that
/// thread as it was.
///
/// Batch calls answer one verdict per slot, in input order. One bad slot never fails the others; only when the device
/// check or the synchronisation fails, nothing at all is sent, and every slot says [`Error::NotSent`].
///
/// ```
/// use haulier::{Options, Put, StoreClient, store};
///
/// # fn main() -> haulier::Result<()> {
/// let store = store::Store::open(store::Config::new(64 << 20), |_, _| {})?;
/// let client = StoreClient::in_process(haulier::devices::open("cpu")?.remove(0), store, Options::default())?;
///
/// assert_eq!(client.put("weights", b"0123")?, Put::Stored);
/// assert_eq!(client.put("weights", b"4567")?, Put::AlreadyExists); // the value is kept
/// assert_eq!(&client.view("weights")?[..], b"0123");
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct StoreClient<D: Device> {
    inner: Arc<Inner<D>>,
    deadline: Duration,
    progress: Option<OnProgress>,
}

struct Inner<D: Device> {
    engine: Box<dyn Engine<D>>,
    workers: Arc<Workers<D>>,
    opened_in: u32,
    /// The same, as it is asked for at every call.
    home: u64,
    closed: AtomicBool,
}

impl<D: Device> StoreClient<D> {
    /// Opens a client of the node daemon at `socket` for `device`.
    ///
    /// *Errors*: [`Error::Unreachable`] where no daemon answers, [`Error::Device`] where a worker cannot be bound.
    pub fn connect(device: D, socket: impl AsRef<Path>, options: Options) -> Result<Self> {
        let uuid = device.identity().uuid;
        let deadline = Deadline::after(options.deadline);
        let engine = NodeEngine::connect(socket.as_ref(), &options.namespace, uuid, deadline)?;
        Ok(Self::over(workers(device, &options)?, Box::new(engine), options))
    }

    /// Opens a client of a store inside this process.
    ///
    /// *Errors*: [`Error::Device`] where a worker cannot be bound.
    pub fn in_process(device: D, store: Store, options: Options) -> Result<Self> {
        let engine = InProcessEngine::new(store, &options.namespace)?;
        Ok(Self::over(workers(device, &options)?, Box::new(engine), options))
    }

    /// Joins a Mooncake cluster, which distributes values over many hosts. Every call of Mooncake's runs on a worker that is
    /// bound to `device`; the calling threads stay as they are.
    ///
    /// Mooncake is not like the other engines, and this is where it shows:
    /// - A put is write-once and its verdict exact: of many that put a key at once one is told [`Put::Stored`]. It costs a
    ///   read after, and above 1 MiB a question before. Only where they first clear away what is left of a value that was
    ///   evicted can more than one be told so; the last one's value stays.
    /// - An [`upsert`](Self::upsert) is **not atomic**: it removes and puts. A reader in between finds nothing, never half
    ///   of a value; and when the cluster fails in between, the old value is gone.
    /// - A read, and also [`exists`](Self::exists) and [`size`](Self::size), takes Mooncake's lease, which keeps a value from
    ///   eviction for some seconds. Removing goes past leases: else a value could not be removed right after it was
    ///   read. Whoever reads it meanwhile is told [`Error::NotFound`], and the target may have been written to.
    /// - [`view`](Self::view) copies: the bytes are the view's own.
    /// - A large value is two objects of Mooncake's, either of which it may evict, or lose with the host that held it.
    ///   The value is gone then. Bytes that no key leads to any more are evicted in time.
    /// - There are no [`list`](Self::list), [`stat`](Self::stat), [`alloc`](Self::alloc), [`pin`](Self::pin): Mooncake's C ABI has
    ///   nothing for them, and they answer [`Error::Unsupported`].
    /// - Namespaces keep honest tenants apart, as the beginnings of names: Mooncake has no access control.
    /// - After a put that timed out Mooncake may still store the value. A client that dies in the middle of one keeps its key
    ///   from others until the master gives the put up (30 seconds by default).
    /// - When the last clone goes it waits for the cluster to be left, at most 5 seconds.
    ///
    /// *Errors*: [`Error::Device`] where the library, or a function of it, is missing, or a worker cannot be bound;
    /// [`Error::Mooncake`] with the code where the cluster cannot be joined; [`Error::Timeout`].
    #[cfg(feature = "mooncake")]
    pub fn mooncake(device: D, mooncake: &crate::Mooncake, options: Options) -> Result<Self> {
        let (workers, deadline) = (workers(device, &options)?, Deadline::after(options.deadline));
        let engine = MooncakeEngine::join(&workers, mooncake, &options.namespace, deadline)?;
        Ok(Self::over(workers, Box::new(engine), options))
    }

    fn over(workers: Arc<Workers<D>>, engine: Box<dyn Engine<D>>, options: Options) -> Self {
        let inner = Inner {
            engine,
            workers,
            opened_in: std::process::id(),
            home: fork::process(),
            closed: AtomicBool::new(false),
        };
        StoreClient { inner: Arc::new(inner), deadline: options.deadline, progress: None }
    }

    /// The device that the client works on.
    pub fn device(&self) -> &D {
        self.inner.workers.device()
    }

    /// The same client with another limit for each call.
    pub fn with_deadline(&self, deadline: Duration) -> Self {
        StoreClient { deadline, ..self.clone() }
    }

    /// The same client, telling `report` how far each put and get has come. It is called on the thread that copies.
    pub fn with_progress(&self, report: impl Fn(Progress) + Send + Sync + 'static) -> Self {
        StoreClient { progress: Some(Arc::new(report)), ..self.clone() }
    }

    /// Stores a value that is not there yet; one that is there is kept.
    ///
    /// Returns when the value is visible to every client. *Errors*: as [`batch_put`](Self::batch_put).
    pub fn put<'a>(&self, key: &str, payload: impl Into<Payload<'a, D>>) -> Result<Put> {
        only(self.store([(key, &[][..], payload.into().span)], Mode::Put))
    }

    /// Stores a value, atomically replacing one that is there: a reader sees the old bytes or the new ones.
    pub fn upsert<'a>(&self, key: &str, payload: impl Into<Payload<'a, D>>) -> Result<Put> {
        only(self.store([(key, &[][..], payload.into().span)], Mode::Upsert))
    }

    /// [`put`](Self::put) for many values.
    ///
    /// *Errors*, per slot: [`Error::InvalidKey`], [`Error::Full`], [`Error::TooLarge`], [`Error::Timeout`]; and for all
    /// slots together [`Error::NotSent`].
    pub fn batch_put(&self, items: Vec<(&str, Payload<'_, D>)>) -> Vec<Result<Put>> {
        self.store(items.into_iter().map(|(key, payload)| (key, &[][..], payload.span)), Mode::Put)
    }

    /// [`upsert`](Self::upsert) for many values. Each replaces atomically; the batch as a whole does not.
    pub fn batch_upsert(&self, items: Vec<(&str, Payload<'_, D>)>) -> Vec<Result<Put>> {
        self.store(items.into_iter().map(|(key, payload)| (key, &[][..], payload.span)), Mode::Upsert)
    }

    /// Fills `target` with the value and answers its length; the rest of `target` stays as it was.
    ///
    /// Work queued on the calling thread's current stream that still uses `target` is waited for, and work queued after
    /// the call sees the new bytes. *Errors*: [`Error::NotFound`]; [`Error::TooSmall`], which leaves `target` as it was.
    pub fn get_into<'a>(&self, key: &str, target: impl Into<Target<'a, D>>) -> Result<u64> {
        only(self.fill([(key, target.into().span)])).map(|found| found.len)
    }

    /// [`get_into`](Self::get_into) for many values. A repeated key fills each of its targets.
    ///
    /// *Errors*, per slot: as `get_into`, and [`Error::Overlap`] for a raw target that shares bytes with an earlier one.
    pub fn batch_get_into(&self, items: Vec<(&str, Target<'_, D>)>) -> Vec<Result<u64>> {
        self.fill(items.into_iter().map(|(key, target)| (key, target.span)))
            .into_iter()
            .map(|slot| slot.map(|found| found.len))
            .collect()
    }

    /// The value's bytes, owned.
    pub fn get(&self, key: &str) -> Result<Vec<u8>> {
        self.view(key).map(|view| view.to_vec())
    }

    /// [`get`](Self::get) for many values.
    pub fn batch_get(&self, keys: &[&str]) -> Vec<Result<Vec<u8>>> {
        self.batch_view(keys).into_iter().map(|slot| slot.map(|view| view.to_vec())).collect()
    }

    /// A read-only look at the value, without a copy.
    pub fn view(&self, key: &str) -> Result<View> {
        self.open()?;
        check_key(key)?;
        match self.inner.engine.at_hand(key) {
            Some(view) => Ok(view),
            None => only(self.batch_view(&[key])),
        }
    }

    /// [`view`](Self::view) for many values.
    pub fn batch_view(&self, keys: &[&str]) -> Vec<Result<View>> {
        self.for_keys(keys, |engine, keys, deadline| engine.view(keys, deadline))
    }

    /// Writable memory inside the store: fill it, then [`put_allocated`](Self::put_allocated), and nothing is copied.
    ///
    /// *Errors*: [`Error::Full`], [`Error::TooLarge`].
    pub fn alloc(&self, len: u64) -> Result<PoolBuffer> {
        self.open()?;
        let deadline = Deadline::after(self.deadline);
        let attempt = || vec![self.inner.engine.alloc(len, deadline)];
        only(retry::per_slot(deadline, attempt, |_| attempt()))
    }

    /// [`put`](Self::put) of memory inside the store. The buffer is spent, whatever the verdict.
    pub fn put_allocated(&self, key: &str, buffer: PoolBuffer) -> Result<Put> {
        self.store_allocated(key, &[], buffer, Mode::Put)
    }

    /// [`upsert`](Self::upsert) of memory inside the store. The buffer is spent, whatever the verdict.
    pub fn upsert_allocated(&self, key: &str, buffer: PoolBuffer) -> Result<Put> {
        self.store_allocated(key, &[], buffer, Mode::Upsert)
    }

    /// Whether a value is stored. No side effect: it neither renews nor blocks anything.
    pub fn exists(&self, key: &str) -> Result<bool> {
        only(self.batch_exists(&[key]))
    }

    /// [`exists`](Self::exists) for many keys.
    pub fn batch_exists(&self, keys: &[&str]) -> Vec<Result<bool>> {
        self.describe(keys)
            .into_iter()
            .map(|slot| match slot {
                Ok(_) => Ok(true),
                Err(Error::NotFound) => Ok(false),
                Err(e) => Err(e),
            })
            .collect()
    }

    /// The value's length in bytes. No side effect.
    pub fn size(&self, key: &str) -> Result<u64> {
        only(self.batch_size(&[key]))
    }

    /// [`size`](Self::size) for many keys.
    pub fn batch_size(&self, keys: &[&str]) -> Vec<Result<u64>> {
        self.describe(keys).into_iter().map(|slot| slot.map(|found| found.len)).collect()
    }

    /// Removes a value; whether it was there. Removing what is not there is no error. Readers keep the bytes they hold.
    pub fn remove(&self, key: &str) -> Result<bool> {
        only(self.batch_remove(&[key]))
    }

    /// [`remove`](Self::remove) for many keys.
    pub fn batch_remove(&self, keys: &[&str]) -> Vec<Result<bool>> {
        self.for_keys(keys, |engine, keys, deadline| engine.remove(keys, deadline))
    }

    /// Removes every value whose key begins with `prefix`; how many went.
    ///
    /// *Errors*: [`Error::InvalidArgument`] for an empty prefix: that is [`clear`](Self::clear).
    pub fn remove_by_prefix(&self, prefix: &str) -> Result<u64> {
        if prefix.is_empty() {
            return Err(Error::InvalidArgument {
                what: "an empty prefix means everything: use clear".into(),
            });
        }
        self.open()?;
        self.inner.engine.remove_by_prefix(prefix, Deadline::after(self.deadline))
    }

    /// Removes every value of the namespace, pinned ones too; how many went.
    pub fn clear(&self) -> Result<u64> {
        self.open()?;
        self.inner.engine.remove_by_prefix("", Deadline::after(self.deadline))
    }

    /// Exempts a value from eviction; whether it was there.
    pub fn pin(&self, key: &str) -> Result<bool> {
        only(self.for_keys(&[key], |engine, keys, deadline| engine.set_pinned(keys, true, deadline)))
    }

    /// Ends [`pin`](Self::pin); whether the value was there.
    pub fn unpin(&self, key: &str) -> Result<bool> {
        only(self.for_keys(&[key], |engine, keys, deadline| engine.set_pinned(keys, false, deadline)))
    }

    /// Every key that begins with `prefix`, with its value's length, in key order. Values that come or go meanwhile may
    /// be missed or listed.
    pub fn list(&self, prefix: &str) -> Result<Vec<(String, u64)>> {
        self.open()?;
        let deadline = Deadline::after(self.deadline);
        let mut listed: Vec<(String, u64)> = Vec::new();
        loop {
            let after = listed.last().map(|(key, _)| key.as_str());
            let (page, more) = self.inner.engine.list(prefix, after, 1000, deadline)?;
            let progressed = !page.is_empty();
            listed.extend(page);
            if !more || !progressed {
                return Ok(listed);
            }
        }
    }

    /// Registers a region for DMA until the guard is dropped, which borrows it. Calls on registered memory need no
    /// registration of their own; calls on other memory work too.
    ///
    /// *Errors*: [`Error::Device`] with the device's answer, [`Error::StreamCapturing`], [`Error::Timeout`].
    pub fn register_buffer<'a>(&self, region: impl Into<Payload<'a, D>>) -> Result<Registered<'a, D>> {
        self.open()?;
        let span = region.into().span;
        let keep = match &span.origin {
            Origin::Buffer(keep) => Some(keep.clone()),
            Origin::Slice | Origin::Raw => None,
        };
        let named = hal::named_stream(self.device());
        let inner = Arc::clone(&self.inner);
        let register = move |bound: &Bound<'_, D>| {
            let region = match span.origin {
                // Known to be the host's; not every driver says so of memory that it did not allocate.
                Origin::Slice => Region::host(span.addr, span.len),
                Origin::Buffer(_) | Origin::Raw => bound.locate(span.addr, span.len)?.region,
            };
            // SAFETY: the guard borrows or keeps the memory; of raw memory the caller has promised it.
            match unsafe { inner.engine.register(bound, region) } {
                Some(guard) => Ok(guard.map(Guard::Engine)),
                None => bound.register(region).map(|guard| Ok(Guard::Device(guard))),
            }
        };
        // The call may hang, so it runs where it can be left behind; the caller's stream, which may be under capture,
        // goes along.
        let guard =
            self.inner.workers.run(
                Deadline::after(self.deadline),
                "register",
                move |bound| match named {
                    Some(stream) => bound.device().with_stream(stream, || register(bound)),
                    None => register(bound),
                },
            )??;
        Ok(Registered { _guard: guard, _keep: keep, _borrow: PhantomData })
    }

    /// How the store is doing.
    pub fn stat(&self) -> Result<Stat> {
        self.open()?;
        self.inner.engine.stat(Deadline::after(self.deadline))
    }

    /// Whether the store answers.
    pub fn health(&self) -> Result<()> {
        self.open()?;
        self.inner.engine.health(Deadline::after(self.deadline))
    }

    /// The store's counters in Prometheus text form.
    pub fn metrics(&self) -> Result<String> {
        self.open()?;
        self.inner.engine.metrics(Deadline::after(self.deadline))
    }

    /// Ends this client and its clones: later calls answer [`Error::Closed`]. Views and buffers that are still alive keep
    /// what they refer to. Returns at once, also while a driver call hangs.
    pub fn close(&self) {
        if !self.inner.closed.swap(true, Ordering::AcqRel) {
            self.inner.engine.close();
        }
    }

    /// Stores payloads with what belongs beside them.
    pub(crate) fn store<'a>(
        &self,
        items: impl IntoIterator<Item = (&'a str, &'a [u8], Span<D>)>,
        mode: Mode,
    ) -> Vec<Result<Put>> {
        let items = items.into_iter().map(|(key, meta, span)| {
            check_key(key)?;
            check_meta(meta)?;
            Ok((key, meta.to_vec(), span))
        });
        self.send("put", items, move |engine, bound, ready, deadline, progress| {
            engine.put(bound, ready, mode, deadline, progress)
        })
    }

    /// Fills spans with values.
    pub(crate) fn fill<'a>(
        &self,
        items: impl IntoIterator<Item = (&'a str, Span<D>)>,
    ) -> Vec<Result<Description>> {
        let mut taken: Vec<(usize, usize)> = Vec::new();
        let items = items.into_iter().map(|(key, span)| {
            check_key(key)?;
            let (start, end) = (span.addr, span.addr.saturating_add(span.len));
            let at = taken.partition_point(|&(other, _)| other < start);
            let before = at.checked_sub(1).and_then(|i| taken.get(i)).is_some_and(|&(_, e)| e > start);
            let behind = taken.get(at).is_some_and(|&(s, _)| s < end);
            if start < end {
                if before || behind {
                    return Err(Error::Overlap);
                }
                taken.insert(at, (start, end));
            }
            Ok((key, Vec::new(), span))
        });
        self.send("get_into", items, |engine, bound, ready, deadline, progress| {
            engine.get_into(bound, ready, deadline, progress)
        })
    }

    /// Commits memory inside the store.
    pub(crate) fn store_allocated(
        &self,
        key: &str,
        meta: &[u8],
        buffer: PoolBuffer,
        mode: Mode,
    ) -> Result<Put> {
        self.open()?;
        check_key(key)?;
        check_meta(meta)?;
        self.inner.engine.put_allocated(key, meta, buffer, mode, Deadline::after(self.deadline))
    }

    /// Lengths and what is stored beside the bytes.
    pub(crate) fn describe(&self, keys: &[&str]) -> Vec<Result<Description>> {
        self.for_keys(keys, |engine, keys, deadline| engine.describe(keys, deadline))
    }

    /// Takes the good slots of a batch along the arrow, and puts the verdicts together again.
    fn send<'a, R: Send + 'static>(
        &self,
        op: &'static str,
        items: impl Iterator<Item = Result<(&'a str, Vec<u8>, Span<D>)>>,
        call: impl Fn(&dyn Engine<D>, &Bound<'_, D>, &Ready<D>, Deadline, &(dyn Fn(u64) + Sync)) -> Vec<Result<R>>
        + Send
        + Sync
        + 'static,
    ) -> Vec<Result<R>> {
        if let Err(e) = self.open() {
            return items.map(|_| Err(e.clone())).collect();
        }
        let mut good = Items::with_capacity(items.size_hint().0);
        let mut bad = Vec::new();
        for (i, item) in items.enumerate() {
            match item {
                Ok((key, meta, span)) => good.push(key, meta, span),
                Err(e) => bad.push((i, e)),
            }
        }
        let count = good.len();
        if count == 0 {
            return bad.into_iter().map(|(_, e)| Err(e)).collect();
        }
        let mut verdicts = self.along_the_arrow(op, good, call).unwrap_or_else(|cause| {
            let not_sent = Error::NotSent { cause: Box::new(cause) };
            (0..count).map(|_| Err(not_sent.clone())).collect()
        });
        verdicts.resize_with(count, unanswered);
        if bad.is_empty() {
            return verdicts;
        }
        in_order(verdicts, bad)
    }

    /// Steps 1 to 5. An error means that nothing was sent.
    fn along_the_arrow<R: Send + 'static>(
        &self,
        op: &'static str,
        items: Items<D>,
        call: impl Fn(&dyn Engine<D>, &Bound<'_, D>, &Ready<D>, Deadline, &(dyn Fn(u64) + Sync)) -> Vec<Result<R>>
        + Send
        + Sync
        + 'static,
    ) -> Result<Vec<Result<R>>> {
        let deadline = Deadline::after(self.deadline);
        let inner = Arc::clone(&self.inner);
        let report = self.reporter(items.bytes());
        let lease = Lease::default();
        let _end = lease.ends_here();
        self.inner.workers.bound(deadline, op, move |bound| {
            let ready =
                match Ready::make(bound, items, lease, inner.engine.imports(), &inner.workers, deadline) {
                    Ok(ready) => ready,
                    Err(cause) => return Ok(Err(cause)),
                };
            let slots = ready.slots().len();
            let needs_driver = ready.needs_driver();
            let send = move |inner: &Inner<D>, bound: &Bound<'_, D>| {
                let attempt = |batch: &_| call(&*inner.engine, bound, batch, deadline, &report);
                retry::per_slot(
                    deadline,
                    || attempt(&ready),
                    |indices| match ready.select(indices) {
                        Ok(some) => attempt(&some),
                        Err(e) => indices.iter().map(|_| Err(e.clone())).collect(),
                    },
                )
            };
            if !needs_driver {
                return Ok(Ok(send(&inner, bound)));
            }
            // Driver calls may hang, so they run where they can be left behind.
            let own = Arc::clone(&inner);
            let sent = inner.workers.run(deadline, op, move |bound| Ok(send(&own, bound)));
            Ok(Ok(sent.unwrap_or_else(|e| (0..slots).map(|_| Err(Error::from(e.clone()))).collect())))
        })?
    }

    /// Steps 1 to 4 for memory that the host itself reads or writes, then `work` on it.
    ///
    /// *Errors*: [`Error::NonContiguous`] where the memory is not the host's, [`Error::NotSent`] as for any batch.
    pub(crate) fn on_host<R: Send + 'static>(
        &self,
        op: &'static str,
        span: Span<D>,
        work: impl FnOnce(&Slot<D>) -> R + Send + 'static,
    ) -> Result<R> {
        self.open()?;
        let deadline = Deadline::after(self.deadline);
        let inner = Arc::clone(&self.inner);
        let mut items = Items::with_capacity(1);
        items.push("", Vec::new(), span);
        let lease = Lease::default();
        let _end = lease.ends_here();
        let sent = self.inner.workers.bound(deadline, op, move |bound| {
            let ready = Ready::make(bound, items, lease, false, &inner.workers, deadline);
            Ok(ready.and_then(|ready| {
                let slot = ready.slots().first().filter(|slot| slot.region().place == Place::Host);
                slot.map(|slot| slot.lend(|| Ok(work(slot)))).transpose()
            }))
        });
        match sent.map_err(Error::from).flatten() {
            Ok(Some(result)) => Ok(result),
            Ok(None) => Err(Error::NonContiguous),
            Err(cause) => Err(Error::NotSent { cause: Box::new(cause) }),
        }
    }

    /// Calls of the engine that carry keys only.
    fn for_keys<R>(
        &self,
        keys: &[&str],
        call: impl Fn(&dyn Engine<D>, &[&str], Deadline) -> Vec<Result<R>>,
    ) -> Vec<Result<R>> {
        if let Err(e) = self.open() {
            return keys.iter().map(|_| Err(e.clone())).collect();
        }
        let checks = keys.iter().enumerate().map(|(i, key)| (i, check_key(key)));
        let bad: Vec<_> = checks.filter_map(|(i, check)| Some((i, check.err()?))).collect();
        if bad.is_empty() {
            return self.for_good_keys(keys, call);
        }
        let good: Vec<&str> = keys.iter().copied().filter(|key| check_key(key).is_ok()).collect();
        in_order(self.for_good_keys(&good, call), bad)
    }

    fn for_good_keys<R>(
        &self,
        keys: &[&str],
        call: impl Fn(&dyn Engine<D>, &[&str], Deadline) -> Vec<Result<R>>,
    ) -> Vec<Result<R>> {
        let deadline = Deadline::after(self.deadline);
        let attempt = |keys: &[&str]| call(&*self.inner.engine, keys, deadline);
        let mut answers = retry::per_slot(
            deadline,
            || attempt(keys),
            |indices| attempt(&indices.iter().map(|&i| keys[i]).collect::<Vec<_>>()),
        );
        answers.resize_with(keys.len(), unanswered);
        answers
    }

    /// Refuses what a closed client, or one from before a fork, cannot do.
    fn open(&self) -> Result<()> {
        if self.inner.closed.load(Ordering::Acquire) {
            return Err(Error::Closed);
        }
        if self.inner.home != fork::process() {
            return Err(Error::ForkedProcess { opened_in: self.inner.opened_in });
        }
        Ok(())
    }

    /// What the engine calls with each further number of bytes that is done.
    fn reporter(&self, total: u64) -> impl Fn(u64) + Send + Sync + 'static {
        let report = self.progress.clone();
        let done = AtomicU64::new(0);
        move |more| {
            if let Some(report) = &report {
                // What is tried again was told before.
                let done = (done.fetch_add(more, Ordering::Relaxed) + more).min(total);
                report(Progress { done, total });
            }
        }
    }
}

/// A region that is registered for DMA until this is dropped.
#[derive(Debug)]
#[must_use = "dropping it deregisters"]
pub struct Registered<'a, D: Device> {
    // Dropped in this order: deregistered before the memory may be freed.
    _guard: Guard<D>,
    _keep: Option<Keep<D>>,
    _borrow: PhantomData<&'a ()>,
}

/// Who registered it.
#[derive(Debug)]
enum Guard<D: Device> {
    Device(D::Registration),
    Engine(#[expect(dead_code, reason = "deregisters when it is dropped")] Box<dyn Any + Send + Sync>),
}

impl<D: Device> fmt::Debug for StoreClient<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoreClient")
            .field("device", self.device())
            .field("engine", &self.inner.engine)
            .field("deadline", &self.deadline)
            .finish_non_exhaustive()
    }
}

/// The threads of a client.
fn workers<D: Device>(device: D, options: &Options) -> Result<Arc<Workers<D>>> {
    Ok(Arc::new(Workers::start(device, options.workers)?))
}

fn check_meta(meta: &[u8]) -> Result<()> {
    if meta.len() > META_MAX {
        let what = format!("the description has {} bytes, the limit is {META_MAX}", meta.len());
        return Err(Error::InvalidArgument { what });
    }
    Ok(())
}

/// The verdict of a batch of one.
pub(crate) fn only<R>(verdicts: impl IntoIterator<Item = Result<R>>) -> Result<R> {
    verdicts.into_iter().next().unwrap_or_else(unanswered)
}

/// The verdicts of a batch: those of its good slots, in order, with each bad one at its position.
fn in_order<R>(good: Vec<Result<R>>, bad: Vec<(usize, Error)>) -> Vec<Result<R>> {
    let count = good.len() + bad.len();
    let (mut good, mut bad) = (good.into_iter(), bad.into_iter().peekable());
    let verdict = |i| match bad.next_if(|(at, _)| *at == i) {
        Some((_, e)) => Err(e),
        None => good.next().unwrap_or_else(unanswered),
    };
    (0..count).map(verdict).collect()
}

/// What an engine that breaks its contract gets its caller, instead of a panic.
fn unanswered<R>() -> Result<R> {
    Err(Error::Protocol { reason: "the engine left a slot without a verdict".into() })
}

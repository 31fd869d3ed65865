//! The engine inside this process: a store without a daemon.

use std::{
    fmt::Write,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use hal::{Bound, Deadline, Device, Region};

use crate::{
    arrow::{Ready, Slot},
    engine::{Description, Engine, PoolBuffer, View},
    error::{Error, Result},
    shm,
    store::{Grant, Mode, Object, Put, Space, Stat, Store, Writer},
};

/// A store of this process, as one of its namespaces sees it.
#[derive(Debug)]
pub(crate) struct InProcessEngine {
    store: Store,
    space: Space,
    writer: Writer,
    closed: AtomicBool,
}

impl InProcessEngine {
    /// An engine over `store` for keys of `namespace`.
    pub(crate) fn new(store: Store, namespace: &str) -> Result<Self> {
        let (space, writer) = (store.space(namespace)?, store.writer());
        Ok(InProcessEngine { store, space, writer, closed: AtomicBool::new(false) })
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

    fn each<T, R>(
        &self,
        op: &str,
        slots: impl IntoIterator<Item = T>,
        deadline: Deadline,
        call: impl Fn(T) -> Result<R>,
    ) -> Vec<Result<R>> {
        let slots = slots.into_iter();
        slots.map(|slot| self.go_on(op, deadline).and_then(|()| call(slot))).collect()
    }

    fn hold(&self, key: &str) -> Result<Arc<Object>> {
        self.space.hold(key).ok_or(Error::NotFound)
    }
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
        self.each("put", batch.slots(), deadline, |slot: &Slot<D>| {
            let from = slot.region();
            let mut grant = self.writer.reserve(&self.space, from.len as u64)?;
            let to = Region::host(grant.as_mut_ptr().expose_provenance(), from.len);
            // SAFETY: a ready slot is allocated and nobody writes it until the put has returned; the grant's memory is
            // this call's alone.
            unsafe { shm::copy(bound, slot, to, from, deadline, progress) }?;
            self.space.commit(grant, slot.key(), from.len as u64, slot.meta(), mode, false)
        })
    }

    fn get_into(
        &self,
        bound: &Bound<'_, D>,
        batch: &Ready<D>,
        deadline: Deadline,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Vec<Result<Description>> {
        self.each("get", batch.slots(), deadline, |slot: &Slot<D>| {
            let object = self.hold(slot.key())?;
            let from = Region::host(object.as_ptr().expose_provenance(), object.len() as usize);
            let too_small = |_| Error::TooSmall { need: object.len() };
            let to = slot.region().part(0, from.len).map_err(too_small)?;
            // SAFETY: a ready slot is allocated and nobody touches it until the get has returned; the object is held, so
            // its bytes stay as they are.
            unsafe { shm::copy(bound, slot, to, from, deadline, progress) }?;
            Ok(Description { len: object.len(), meta: object.meta().into() })
        })
    }

    fn view(&self, keys: &[&str], deadline: Deadline) -> Vec<Result<View>> {
        self.each("view", keys, deadline, |key| {
            let object = self.hold(key)?;
            let (start, len, meta) = (object.as_ptr(), object.len() as usize, object.meta().into());
            // SAFETY: the bytes of an object stay as they are until it is dropped.
            Ok(unsafe { View::new(start, len, meta, object) })
        })
    }

    fn alloc(&self, len: u64, deadline: Deadline) -> Result<PoolBuffer> {
        self.go_on("alloc", deadline)?;
        let mut grant = self.writer.reserve(&self.space, len)?;
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
        self.space.commit(*grant, key, len, meta, mode, false)
    }

    fn describe(&self, keys: &[&str], deadline: Deadline) -> Vec<Result<Description>> {
        self.each("describe", keys, deadline, |key| {
            let object = self.space.peek(key).ok_or(Error::NotFound)?;
            Ok(Description { len: object.len(), meta: object.meta().into() })
        })
    }

    fn remove(&self, keys: &[&str], deadline: Deadline) -> Vec<Result<bool>> {
        self.each("remove", keys, deadline, |key| Ok(self.space.remove(key)))
    }

    fn remove_by_prefix(&self, prefix: &str, deadline: Deadline) -> Result<u64> {
        self.go_on("remove_by_prefix", deadline)?;
        Ok(if prefix.is_empty() { self.space.clear() } else { self.space.remove_prefix(prefix) })
    }

    fn set_pinned(&self, keys: &[&str], pinned: bool, deadline: Deadline) -> Vec<Result<bool>> {
        self.each("set_pinned", keys, deadline, |key| Ok(self.space.set_pinned(key, pinned)))
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
        Ok(metrics(&self.store.stat()))
    }

    fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }
}

/// The figures in Prometheus text form.
fn metrics(stat: &Stat) -> String {
    let gauges = [
        ("pool_bytes", "Bytes of the pool.", stat.pool),
        ("used_bytes", "Bytes that values take up.", stat.used),
        ("granted_bytes", "Bytes that are being written.", stat.granted),
        ("free_bytes", "Bytes that nothing takes up.", stat.free),
        ("objects", "Values.", stat.objects),
    ];
    let gauges = gauges.map(|(name, help, value)| (name, help, "gauge", value));
    let evictions = ("evictions_total", "Values evicted.", "counter", stat.evictions);
    let mut text = String::new();
    for (name, help, kind, value) in gauges.into_iter().chain([evictions]) {
        // Writing to a string does not fail.
        let _ = write!(
            text,
            "# HELP haulier_{name} {help}\n# TYPE haulier_{name} {kind}\nhaulier_{name} {value}\n"
        );
    }
    text
}

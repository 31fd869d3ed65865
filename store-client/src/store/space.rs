//! Namespaces.

use std::sync::{
    Arc,
    atomic::{AtomicU64, AtomicUsize, Ordering},
};

use parking_lot::{Mutex, MutexGuard};
use serde::{Deserialize, Serialize};

use super::{
    KEY_MAX, META_MAX, Shared,
    account::Account,
    catalog::Catalog,
    index::Index,
    object::{Grant, Object},
};
use crate::error::{Error, Result};

/// What to do when the key is there already.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Mode {
    /// Keep the value that is there.
    Put,
    /// Replace it, in one step.
    Upsert,
}

/// What became of a commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Put {
    /// The key was not there.
    Stored,
    /// The key was there, and its value has been replaced.
    Replaced,
    /// The key was there, and its value has been kept.
    AlreadyExists,
}

impl Put {
    /// The outcome as a short, stable word for programs.
    pub fn label(self) -> &'static str {
        match self {
            Put::Stored => "stored",
            Put::Replaced => "replaced",
            Put::AlreadyExists => "already_exists",
        }
    }
}

/// One key of a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    /// The key.
    pub(crate) key: String,
    /// Bytes of its value.
    pub(crate) len: u64,
}

#[derive(Debug)]
pub(super) struct Namespace {
    pub(super) name: Arc<str>,
    /// Tells it from every other one of this process, also from one of this name that was forgotten.
    pub(super) number: u64,
    pub(super) quota: Option<u64>,
    pub(super) account: Arc<Account>,
    pub(super) index: Mutex<Index>,
    /// Its [`Space`]s; changed under the lock of the list of namespaces.
    pub(super) handles: AtomicUsize,
}

impl Namespace {
    pub(super) fn new(name: &str, quota: Option<u64>, account: Arc<Account>) -> Arc<Self> {
        static LAST: AtomicU64 = AtomicU64::new(0);
        let number = LAST.fetch_add(1, Ordering::Relaxed) + 1;
        let (index, handles) = (Mutex::new(Index::new(number)), AtomicUsize::new(0));
        Arc::new(Self { name: name.into(), number, quota, account, index, handles })
    }

    /// Whether nothing is lost when it is forgotten: it has no quota, no keys, and nobody to put some.
    pub(super) fn is_idle(&self) -> bool {
        self.quota.is_none() && self.handles.load(Ordering::Relaxed) == 0 && self.index.lock().len() == 0
    }
}

/// A namespace: keys that are apart from those of every other one.
#[derive(Debug)]
pub(crate) struct Space {
    pub(super) namespace: Arc<Namespace>,
    pub(super) shared: Arc<Shared>,
}

impl Space {
    /// The namespace' number in the shared index.
    pub(crate) fn number(&self) -> u64 {
        self.namespace.number
    }

    /// Makes the first `len` bytes of `grant` the value of `key`. The key is visible with all of its bytes or not at
    /// all; where this fails, or the value that is there is kept, the grant's memory is free again.
    pub(crate) fn commit(&self, grant: Grant, key: &str, len: u64, meta: &[u8], mode: Mode) -> Result<Put> {
        let object = self.finish(grant, key, len, meta)?;
        let now = self.now();
        // Dropped after the lock.
        let (put, _gone) = self.index().store(key, object, mode, now);
        Ok(put)
    }

    /// [`commit`](Self::commit) for many values, in order. `items` are the grant, the key, the value's length and what
    /// stands beside it; an item that is an error already is its own verdict.
    pub(crate) fn commit_many<'k>(
        &self,
        items: impl Iterator<Item = Result<(Grant, &'k str, u64, &'k [u8])>>,
        mode: Mode,
    ) -> Vec<Result<Put>> {
        let finish =
            |(grant, key, len, meta): (_, &'k str, _, _)| Ok((key, self.finish(grant, key, len, meta)?));
        let objects: Vec<_> = items.map(|item| item.and_then(finish)).collect();
        let now = self.shared.clock.fetch_add(objects.len() as u64, Ordering::Relaxed);
        let mut gone = Vec::new();
        let mut index = self.index();
        let stored = (now..).zip(objects).map(|(now, object)| {
            let (key, object) = object?;
            let (put, old) = index.store(key, object, mode, now);
            gone.extend(old);
            Ok(put)
        });
        let verdicts = stored.collect();
        drop(index);
        verdicts
    }

    /// Makes the first `len` bytes of `grant` a value that has no key: it is found nowhere, and goes with its last reference.
    #[cfg(feature = "mooncake")]
    pub(crate) fn without_key(&self, grant: Grant, len: u64, meta: &[u8]) -> Result<Arc<Object>> {
        self.settle(grant, len, meta, None)
    }

    /// What a grant becomes when it is a value.
    fn finish(&self, grant: Grant, key: &str, len: u64, meta: &[u8]) -> Result<Arc<Object>> {
        check_key(key)?;
        self.settle(grant, len, meta, self.shared.catalog.get())
    }

    fn settle(
        &self,
        grant: Grant,
        len: u64,
        meta: &[u8],
        catalog: Option<&Arc<Catalog>>,
    ) -> Result<Arc<Object>> {
        if meta.len() > META_MAX {
            return Err(Error::InvalidArgument {
                what: format!("{} bytes beside a value are too many; the limit is {META_MAX}", meta.len()),
            });
        }
        if len > grant.capacity() {
            return Err(Error::InvalidRange { offset: 0, len, limit: grant.capacity() });
        }
        if !Arc::ptr_eq(grant.account(), &self.namespace.account) {
            return Err(Error::InvalidArgument { what: "the grant was made for another namespace".into() });
        }
        Ok(Arc::new(grant.into_object(len, meta, catalog)))
    }

    /// The value of `key`, which stays valid for as long as it is held.
    pub(crate) fn hold(&self, key: &str) -> Option<Arc<Object>> {
        let now = self.now();
        self.index().get(key, now).cloned()
    }

    /// The value of `key`, without counting this as a use.
    pub(crate) fn peek(&self, key: &str) -> Option<Arc<Object>> {
        self.index().peek(key).cloned()
    }

    /// Whether a put in this mode would keep the value that is there. To be asked before room is made for the new one,
    /// so that a put which stores nothing evicts nothing. No side effect.
    pub(crate) fn keeps(&self, key: &str, mode: Mode) -> bool {
        mode == Mode::Put && self.exists(key)
    }

    /// [`keeps`](Self::keeps) for many keys.
    pub(crate) fn keeps_which(&self, keys: &[&str], mode: Mode) -> Vec<bool> {
        let index = self.index();
        keys.iter().map(|key| mode == Mode::Put && index.peek(key).is_some()).collect()
    }

    /// Whether `key` is there. No side effect.
    pub(super) fn exists(&self, key: &str) -> bool {
        self.index().peek(key).is_some()
    }

    /// Removes `key`, pinned or not; returns whether it was there.
    pub(crate) fn remove(&self, key: &str) -> bool {
        // Bound to a name, so that the memory is given back after the lock.
        let old = self.index().remove(key);
        old.is_some()
    }

    /// Removes every key with this prefix, at once; returns how many there were.
    pub(crate) fn remove_prefix(&self, prefix: &str) -> u64 {
        let old = self.index().remove_prefix(prefix);
        old.len() as u64
    }

    /// Removes every key, at once; returns how many there were.
    pub(crate) fn clear(&self) -> u64 {
        let old = self.index().clear();
        old.len() as u64
    }

    /// Up to `limit` keys with this prefix, in order. The next page starts `after` the last key of this one, and
    /// misses none that was there all the time.
    pub(crate) fn list(&self, prefix: &str, after: Option<&str>, limit: usize) -> Vec<Entry> {
        self.index().list(prefix, after, limit)
    }

    /// Pins or unpins the value of `key`; returns whether it is there. Eviction spares a pinned value.
    pub(crate) fn set_pinned(&self, key: &str, pinned: bool) -> bool {
        self.index().set_pinned(key, pinned)
    }

    fn index(&self) -> MutexGuard<'_, Index> {
        self.namespace.index.lock()
    }

    fn now(&self) -> u64 {
        self.shared.now()
    }
}

impl Drop for Space {
    fn drop(&mut self) {
        self.shared.leave(&self.namespace);
    }
}

/// Refuses a key that is empty or too long.
pub(crate) fn check_key(key: &str) -> Result<()> {
    match key.len() {
        1..=KEY_MAX => Ok(()),
        len => Err(Error::InvalidKey { len: len as u64, limit: KEY_MAX as u64 }),
    }
}

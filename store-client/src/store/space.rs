//! Namespaces.

use std::sync::{Arc, atomic::Ordering};

use parking_lot::{Mutex, MutexGuard};
use serde::{Deserialize, Serialize};

use super::{
    KEY_MAX, META_MAX, Shared,
    account::Account,
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

/// One key of a list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// The key.
    pub key: String,
    /// Bytes of its value.
    pub len: u64,
}

/// What a namespace holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpaceStat {
    /// Values.
    pub objects: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Bytes that it may use at most, and that no other namespace can take from it.
    pub quota: Option<u64>,
}

#[derive(Debug)]
pub(super) struct Namespace {
    pub(super) quota: Option<u64>,
    pub(super) account: Arc<Account>,
    pub(super) index: Mutex<Index>,
}

impl Namespace {
    pub(super) fn new(quota: Option<u64>, account: Arc<Account>) -> Arc<Self> {
        Arc::new(Self { quota, account, index: Mutex::new(Index::new()) })
    }
}

/// A namespace: keys that are apart from those of every other one. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Space {
    pub(super) namespace: Arc<Namespace>,
    pub(super) shared: Arc<Shared>,
}

impl Space {
    /// Makes the first `len` bytes of `grant` the value of `key`. The key is visible with all of its bytes or not at
    /// all; where this fails, or the value that is there is kept, the grant's memory is free again.
    pub fn commit(
        &self,
        grant: Grant,
        key: &str,
        len: u64,
        meta: &[u8],
        mode: Mode,
        pin: bool,
    ) -> Result<Put> {
        check_key(key)?;
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
        let object = Arc::new(grant.into_object(len, meta, pin));
        let now = self.now();
        let mut index = self.index();
        if mode == Mode::Put && index.peek(key).is_some() {
            drop(index);
            return Ok(Put::AlreadyExists);
        }
        let old = index.put(key, object, now);
        drop(index);
        Ok(if old.is_some() { Put::Replaced } else { Put::Stored })
    }

    /// The value of `key`, which stays valid for as long as it is held.
    pub fn hold(&self, key: &str) -> Option<Arc<Object>> {
        let now = self.now();
        self.index().get(key, now).cloned()
    }

    /// Bytes of the value of `key`. No side effect: the value counts as used by nobody.
    pub fn size(&self, key: &str) -> Option<u64> {
        self.index().peek(key).map(|object| object.len())
    }

    /// What was stored beside the value of `key`. No side effect.
    pub fn meta(&self, key: &str) -> Option<Vec<u8>> {
        self.index().peek(key).map(|object| object.meta().to_vec())
    }

    /// The value of `key`, without counting this as a use.
    pub fn peek(&self, key: &str) -> Option<Arc<Object>> {
        self.index().peek(key).cloned()
    }

    /// Whether `key` is there. No side effect.
    pub fn exists(&self, key: &str) -> bool {
        self.index().peek(key).is_some()
    }

    /// Removes `key`, pinned or not; returns whether it was there.
    pub fn remove(&self, key: &str) -> bool {
        // Bound to a name, so that the memory is given back after the lock.
        let old = self.index().remove(key);
        old.is_some()
    }

    /// Removes every key with this prefix, at once; returns how many there were.
    pub fn remove_prefix(&self, prefix: &str) -> u64 {
        let old = self.index().remove_prefix(prefix);
        old.len() as u64
    }

    /// Removes every key, at once; returns how many there were.
    pub fn clear(&self) -> u64 {
        let old = std::mem::replace(&mut *self.index(), Index::new());
        old.len() as u64
    }

    /// Up to `limit` keys with this prefix, in order. The next page starts `after` the last key of this one, and
    /// misses none that was there all the time.
    pub fn list(&self, prefix: &str, after: Option<&str>, limit: usize) -> Vec<Entry> {
        self.index().list(prefix, after, limit)
    }

    /// Pins or unpins the value of `key`; returns whether it is there. Eviction spares a pinned value.
    pub fn set_pinned(&self, key: &str, pinned: bool) -> bool {
        self.index().set_pinned(key, pinned)
    }

    /// What the namespace holds.
    pub fn stat(&self) -> SpaceStat {
        let index = self.index();
        SpaceStat { objects: index.len() as u64, bytes: index.bytes(), quota: self.namespace.quota }
    }

    fn index(&self) -> MutexGuard<'_, Index> {
        self.namespace.index.lock()
    }

    fn now(&self) -> u64 {
        self.shared.clock.fetch_add(1, Ordering::Relaxed)
    }
}

/// Refuses a key that is empty or too long.
pub fn check_key(key: &str) -> Result<()> {
    match key.len() {
        1..=KEY_MAX => Ok(()),
        len => Err(Error::InvalidKey { len: len as u64, limit: KEY_MAX as u64 }),
    }
}

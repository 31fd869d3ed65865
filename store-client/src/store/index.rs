//! The keys of one namespace, in the order of their last use.

use std::{cmp::Ordering, sync::Arc};

use lru::LruCache;

use super::{
    catalog::Held,
    object::Object,
    space::{Entry, Mode, Put},
};

/// Second chances for each value that is evicted: a client that claims to use everything makes eviction no longer than this.
const CHANCES: usize = 64;

/// The keys of one namespace.
#[derive(Debug)]
pub(super) struct Index {
    /// The namespace' number in the shared index.
    space: u64,
    map: LruCache<Box<str>, Arc<Object>>,
    pinned: usize,
}

impl Index {
    pub(super) fn new(space: u64) -> Self {
        Self { space, map: LruCache::unbounded(), pinned: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.map.len()
    }

    /// The object, without counting this as a use.
    pub(super) fn peek(&self, key: &str) -> Option<&Arc<Object>> {
        self.map.peek(key)
    }

    /// The object, used at `now`.
    pub(super) fn get(&mut self, key: &str, now: u64) -> Option<&Arc<Object>> {
        let object = self.map.get(key)?;
        object.touch(now);
        // It may have been displaced there, or there was no room for it.
        object.publish(self.space, key);
        Some(object)
    }

    /// Stores `object`, which is not pinned, used at `now`, unless `mode` keeps what is there. Beside the outcome it
    /// returns the object that lost, which the caller drops after the lock.
    pub(super) fn store(
        &mut self,
        key: &str,
        object: Arc<Object>,
        mode: Mode,
        now: u64,
    ) -> (Put, Option<Arc<Object>>) {
        if mode == Mode::Put && self.map.contains(key) {
            return (Put::AlreadyExists, Some(object));
        }
        object.touch(now);
        let old = self.map.put(key.into(), Arc::clone(&object));
        let old = self.gone(old);
        object.publish(self.space, key);
        (if old.is_some() { Put::Replaced } else { Put::Stored }, old)
    }

    pub(super) fn remove(&mut self, key: &str) -> Option<Arc<Object>> {
        let old = self.map.pop(key);
        self.gone(old)
    }

    /// Removes each key with this prefix.
    pub(super) fn remove_prefix(&mut self, prefix: &str) -> Vec<Arc<Object>> {
        let keys: Vec<_> =
            self.map.iter().map(|(key, _)| key).filter(|key| key.starts_with(prefix)).cloned().collect();
        keys.iter().filter_map(|key| self.remove(key)).collect()
    }

    /// Removes each key.
    pub(super) fn clear(&mut self) -> Vec<Arc<Object>> {
        let old = std::mem::replace(self, Self::new(self.space));
        old.map.into_iter().map(|(_, object)| object).inspect(|object| object.withdraw()).collect()
    }

    /// Pins or unpins; returns whether the key is there.
    pub(super) fn set_pinned(&mut self, key: &str, pinned: bool) -> bool {
        let Some(object) = self.map.peek(key) else { return false };
        self.pinned -= usize::from(object.set_pinned(pinned));
        self.pinned += usize::from(pinned);
        true
    }

    /// Up to `limit` keys with this prefix that come after `after`, in order.
    pub(super) fn list(&self, prefix: &str, after: Option<&str>, limit: usize) -> Vec<Entry> {
        let after = |key: &str| after.is_none_or(|after| key > after);
        let order = |a: &(&str, u64), b: &(&str, u64)| -> Ordering { a.0.cmp(b.0) };
        let keys = self.map.iter().map(|(key, object)| (&**key, object.len()));
        let mut keys: Vec<_> = keys.filter(|(key, _)| key.starts_with(prefix) && after(key)).collect();
        if limit < keys.len() {
            keys.select_nth_unstable_by(limit, order);
            keys.truncate(limit);
        }
        keys.sort_unstable_by(order);
        keys.into_iter().map(|(key, len)| Entry { key: key.into(), len }).collect()
    }

    /// When the value that would be evicted next was last used.
    ///
    /// A pinned value is never evicted, and neither is one that somebody holds, because that would free nothing.
    /// Such values move to the young end when they are met, so that they are not met again by each eviction.
    /// So does one that a client has used without the daemon's knowledge, as used `now`: its second chance.
    pub(super) fn oldest(&mut self, now: u64) -> Option<u64> {
        self.next_victim(now, &mut Held::default())
    }

    fn next_victim(&mut self, now: u64, held: &mut Held) -> Option<u64> {
        let len = self.map.len();
        let (mut turn, mut turns, mut chances) = (0, len, CHANCES);
        while turn < turns && self.pinned < len {
            turn += 1;
            let (_, object) = self.map.peek_lru()?;
            // New holds need the lock that guards this index, so the count can only fall meanwhile.
            if !object.is_pinned() && Arc::strong_count(object) == 1 && !object.is_read(held) {
                // What has had its chance is met again at most once around.
                if turn > len || chances == 0 || !object.take_use() {
                    return Some(object.touched());
                }
                turns = turn + len;
                chances -= 1;
                object.touch(now);
            }
            let (key, object) = self.map.pop_lru()?;
            self.map.put(key, object);
        }
        None
    }

    /// Removes the oldest values until they add up to `bytes` of the budget, but no more than `most` of them. Those
    /// that would free nothing are spared. The caller drops what it gets after the lock.
    pub(super) fn evict(&mut self, bytes: u64, most: usize, now: u64) -> Vec<Arc<Object>> {
        let mut victims = Vec::new();
        let (mut freed, mut held) = (0, Held::default());
        while freed < bytes && victims.len() < most && self.next_victim(now, &mut held).is_some() {
            let popped = self.map.pop_lru().map(|(_, object)| object);
            let Some(object) = self.gone(popped) else { break };
            freed += object.footprint();
            victims.push(object);
        }
        victims
    }

    fn gone(&mut self, object: Option<Arc<Object>>) -> Option<Arc<Object>> {
        if let Some(object) = &object {
            object.withdraw();
            self.pinned -= usize::from(object.is_pinned());
        }
        object
    }
}

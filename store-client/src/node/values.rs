//! Where a client's values live: in the pool under their keys, or elsewhere, with the pool as the memory that they pass through.

use std::{fmt, sync::Arc};

use crate::{
    engine::Description,
    error::{Error, Result},
    store::{Entry, Grant, Mode, Object, Put, Space, Stat, Store, Writer},
    wire::Described,
};

/// A grant that a client has written, its key, the value's length, and what stands beside it.
pub(super) type Written<'k> = (Grant, &'k str, u64, &'k [u8]);

/// Where a node keeps what its clients put.
pub(super) trait Home: fmt::Debug + Send + Sync {
    /// The values of one client, which works in this namespace and whose memory `space` accounts for.
    fn open(&self, space: Space, namespace: &str) -> Result<Box<dyn Values>>;

    /// Names what is lost when the node ends: puts that were not answered are repeated where that has another name.
    fn instance(&self) -> u64;
}

/// The values of one client. Keys are checked by who asks, those of [`store`](Values::store) there.
pub(super) trait Values {
    /// Who pays for the memory of the pool that they lie in or pass through.
    fn space(&self) -> &Space;

    /// For which of these keys it is known already that a put in this mode would keep what is there.
    fn keeps_which(&self, keys: &[&str], mode: Mode) -> Vec<bool>;

    /// Stores what was written, in order; an item that is an error already is its own verdict.
    fn store(&self, written: &mut dyn Iterator<Item = Result<Written<'_>>>, mode: Mode) -> Vec<Result<Put>>;

    /// Values in the pool, where they stay as they are while they are held. Those that live elsewhere are brought into memory
    /// of `writer`.
    fn find(&self, keys: &[&str], writer: &Writer) -> Vec<Result<Arc<Object>>>;

    fn describe(&self, keys: &[&str]) -> Vec<Result<Told>>;

    /// Whether each was there.
    fn remove(&self, keys: &[&str]) -> Vec<Result<bool>>;

    /// How many went.
    fn remove_prefix(&self, prefix: &str) -> Result<u64>;

    /// Whether each was there.
    fn set_pinned(&self, keys: &[&str], pinned: bool) -> Vec<Result<bool>>;

    fn list(&self, prefix: &str, after: Option<&str>, limit: usize) -> Result<Vec<Entry>>;

    /// The figures of `store`, which is the pool.
    fn stat(&self, store: &Store) -> Result<Stat>;
}

/// What a value is.
#[derive(Debug)]
pub(super) enum Told {
    Object(Arc<Object>),
    #[cfg_attr(not(feature = "mooncake"), allow(dead_code, reason = "of values that live elsewhere"))]
    Description(Description),
}

impl Told {
    pub(super) fn described(&self) -> Described<'_> {
        match self {
            Told::Object(object) => Described { len: object.len(), meta: object.meta() },
            Told::Description(description) => described(description),
        }
    }
}

pub(super) fn described(Description { len, meta }: &Description) -> Described<'_> {
    Described { len: *len, meta }
}

/// They live in the pool, and go with the node.
#[derive(Debug)]
pub(super) struct InPool {
    /// Tells this run of the node from any other.
    pub(super) instance: u64,
}

impl Home for InPool {
    fn open(&self, space: Space, _namespace: &str) -> Result<Box<dyn Values>> {
        Ok(Box::new(space))
    }

    fn instance(&self) -> u64 {
        self.instance
    }
}

impl Values for Space {
    fn space(&self) -> &Space {
        self
    }

    fn keeps_which(&self, keys: &[&str], mode: Mode) -> Vec<bool> {
        Space::keeps_which(self, keys, mode)
    }

    fn store(&self, written: &mut dyn Iterator<Item = Result<Written<'_>>>, mode: Mode) -> Vec<Result<Put>> {
        self.commit_many(written, mode)
    }

    fn find(&self, keys: &[&str], _writer: &Writer) -> Vec<Result<Arc<Object>>> {
        keys.iter().map(|key| self.hold(key).ok_or(Error::NotFound)).collect()
    }

    fn describe(&self, keys: &[&str]) -> Vec<Result<Told>> {
        keys.iter().map(|key| self.peek(key).map(Told::Object).ok_or(Error::NotFound)).collect()
    }

    fn remove(&self, keys: &[&str]) -> Vec<Result<bool>> {
        keys.iter().map(|key| Ok(Space::remove(self, key))).collect()
    }

    fn remove_prefix(&self, prefix: &str) -> Result<u64> {
        Ok(Space::remove_prefix(self, prefix))
    }

    fn set_pinned(&self, keys: &[&str], pinned: bool) -> Vec<Result<bool>> {
        keys.iter().map(|key| Ok(Space::set_pinned(self, key, pinned))).collect()
    }

    fn list(&self, prefix: &str, after: Option<&str>, limit: usize) -> Result<Vec<Entry>> {
        Ok(Space::list(self, prefix, after, limit))
    }

    fn stat(&self, store: &Store) -> Result<Stat> {
        Ok(store.stat())
    }
}

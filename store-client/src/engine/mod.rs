//! What holds the bytes. One trait, three engines: in-process, node, and Mooncake.
//!
//! An engine gets only [`Ready`] batches: nothing that queued work still writes or reads reaches it. It answers one
//! verdict per slot, in input order, and one bad slot never fails the others.

use std::{any::Any, fmt::Debug, sync::Arc};

use hal::{Bound, Deadline, Device, Region};

use crate::{
    arrow::Ready,
    error::Result,
    store::{Mode, Put, Stat},
};

pub(crate) mod in_process;
#[cfg(feature = "mooncake")]
pub(crate) mod mooncake;
pub(crate) mod node;

/// What is known of a value besides its bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Description {
    /// Its bytes.
    pub len: u64,
    /// What was stored beside it: a tensor's dtype and shape, or nothing.
    pub meta: Box<[u8]>,
}

/// A store's engine, for clients of device `D`.
///
/// *Errors*: each call gives [`Error::Timeout`](crate::Error::Timeout) once `deadline` has passed.
/// *Threads*: all calls from any thread, at the same time.
pub trait Engine<D: Device>: Send + Sync + Debug {
    /// Whether payloads of this device may come as IPC handles; agreed on when the engine was opened.
    fn imports(&self) -> bool;

    /// Stores the batch. `progress` is called with each further number of bytes that is done.
    fn put(
        &self,
        bound: &Bound<'_, D>,
        batch: &Ready<D>,
        mode: Mode,
        deadline: Deadline,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Vec<Result<Put>>;

    /// Fills the batch's regions with the values of its keys. A slot whose region is shorter than its value gives
    /// [`Error::TooSmall`](crate::Error::TooSmall) and is left as it was.
    fn get_into(
        &self,
        bound: &Bound<'_, D>,
        batch: &Ready<D>,
        deadline: Deadline,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Vec<Result<Description>>;

    /// Read-only looks at values, without a copy.
    fn view(&self, keys: &[&str], deadline: Deadline) -> Vec<Result<View>>;

    /// As [`view`](Self::view) of one key, where that takes neither a request nor a wait. None says nothing about the key.
    fn at_hand(&self, _key: &str) -> Option<View> {
        None
    }

    /// Memory inside the store.
    fn alloc(&self, len: u64, deadline: Deadline) -> Result<PoolBuffer>;

    /// Stores memory that is inside the store already; nothing is copied.
    fn put_allocated(
        &self,
        key: &str,
        meta: &[u8],
        buffer: PoolBuffer,
        mode: Mode,
        deadline: Deadline,
    ) -> Result<Put>;

    /// Lengths and descriptions, without any side effect.
    fn describe(&self, keys: &[&str], deadline: Deadline) -> Vec<Result<Description>>;

    /// Removes; whether each was there. Readers keep the bytes that they hold.
    fn remove(&self, keys: &[&str], deadline: Deadline) -> Vec<Result<bool>>;

    /// Removes what begins with `prefix` (everything, if empty); how many went.
    fn remove_by_prefix(&self, prefix: &str, deadline: Deadline) -> Result<u64>;

    /// Exempts values from eviction, or ends that; whether each was there.
    fn set_pinned(&self, keys: &[&str], pinned: bool, deadline: Deadline) -> Vec<Result<bool>>;

    /// Up to `limit` keys with their lengths, in key order, after `after`; and whether more follow.
    fn list(
        &self,
        prefix: &str,
        after: Option<&str>,
        limit: u64,
        deadline: Deadline,
    ) -> Result<(Vec<(String, u64)>, bool)>;

    /// How the store is doing.
    fn stat(&self, deadline: Deadline) -> Result<Stat>;

    /// Whether the store answers.
    fn health(&self, deadline: Deadline) -> Result<()> {
        self.stat(deadline).map(drop)
    }

    /// Registers memory with the engine itself, until what is returned is dropped; `None` where it has no use for that, and
    /// the device registers.
    ///
    /// # Safety
    /// The memory must stay allocated until then.
    unsafe fn register(
        &self,
        bound: &Bound<'_, D>,
        region: Region,
    ) -> Option<Result<Box<dyn Any + Send + Sync>>> {
        let _ = (bound, region);
        None
    }

    /// The store's counters in Prometheus text form.
    fn metrics(&self, deadline: Deadline) -> Result<String>;

    /// Ends the connection. Views and buffers that are still alive keep what they refer to.
    fn close(&self);
}

/// A read-only mapping of a stored value. The bytes stay valid and unchanged while it lives: after the value is removed,
/// replaced or evicted, after the client is closed, and after the daemon is gone.
///
/// Through the node it trusts the other processes of this user: whoever wrote the value gave its memory up when it was
/// committed, but the kernel does not keep a hostile process of the same user from writing what it once had mapped.
pub struct View {
    ptr: *const u8,
    len: usize,
    meta: Box<[u8]>,
    _hold: Arc<dyn Any + Send + Sync>,
}

// SAFETY: the bytes are read-only and live as long as `_hold`, which is Send and Sync itself.
unsafe impl Send for View {}
// SAFETY: as above.
unsafe impl Sync for View {}

impl View {
    /// A view of `len` bytes at `ptr`.
    ///
    /// # Safety
    /// The bytes must stay readable and unchanged until `hold` is dropped. For `len` 0 `ptr` may be anything non-null.
    pub(crate) unsafe fn new(
        ptr: *const u8,
        len: usize,
        meta: Box<[u8]>,
        hold: Arc<dyn Any + Send + Sync>,
    ) -> Self {
        View { ptr, len, meta, _hold: hold }
    }

    /// What was stored beside the bytes; see [`TensorView`](crate::TensorView) for tensors.
    pub fn meta(&self) -> &[u8] {
        &self.meta
    }
}

impl std::ops::Deref for View {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the maker promised that these bytes are readable and unchanged while `_hold` lives.
        unsafe { std::slice::from_raw_parts(self.ptr, self.len) }
    }
}

impl Debug for View {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "View({} bytes)", self.len)
    }
}

/// Writable memory inside the store: fill it, then put it, and nothing is copied. Putting takes it by value, so nobody
/// writes a value that others can see. Dropped without a put, it leaves nothing behind.
///
/// Fresh memory of this kind holds zeros or what an earlier value of this store left there.
pub struct PoolBuffer {
    ptr: *mut u8,
    len: usize,
    grant: Box<dyn Any + Send>,
}

// SAFETY: the bytes belong to this buffer alone and live as long as `grant`, which is Send.
unsafe impl Send for PoolBuffer {}
// SAFETY: a shared reference gives read access only, and `grant` is not reachable through it.
unsafe impl Sync for PoolBuffer {}

impl PoolBuffer {
    /// `len` bytes at `ptr`.
    ///
    /// # Safety
    /// The bytes must be writable, and used by nobody else, until `grant` is dropped or taken back.
    pub(crate) unsafe fn new(ptr: *mut u8, len: usize, grant: Box<dyn Any + Send>) -> Self {
        PoolBuffer { ptr, len, grant }
    }

    /// The engine's grant, to be committed.
    pub(crate) fn into_grant(self) -> Box<dyn Any + Send> {
        self.grant
    }
}

impl std::ops::Deref for PoolBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the maker promised exclusive, initialised memory while `grant` lives.
        unsafe { std::slice::from_raw_parts(self.ptr, self.len) }
    }
}

impl std::ops::DerefMut for PoolBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` makes the access exclusive in this process.
        unsafe { std::slice::from_raw_parts_mut(self.ptr, self.len) }
    }
}

impl Debug for PoolBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PoolBuffer({} bytes)", self.len)
    }
}

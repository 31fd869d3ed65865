//! The contract that every backend fulfils.
//!
//! Each method states what it guarantees, what the caller must do, which errors it gives and which threads may call it.
//! The layer above validates; a backend stays thin. Call the methods that take a proof through [`Bound`].

use std::{any::Any, fmt::Debug, hash::Hash, os::fd::OwnedFd, panic::resume_unwind, sync::Arc, thread};

use parking_lot::Mutex;

use crate::{
    Bound, Caps, Deadline, Error, Export, Identity, IpcHandle, Kind, Located, Memory, Region, Result, stream,
};

/// One accelerator (or the host) as this process sees it. Cloning is cheap and gives the same device.
pub trait Device: Clone + Debug + Send + Sync + Sized + 'static {
    /// A raw stream handle. It is compared and passed on, never dereferenced.
    type Stream: Copy + Eq + Hash + Debug + Send + Sync + 'static;
    /// What a thread had before it was bound.
    type Previous: Debug;
    /// Device memory made by [`allocate`](Device::allocate); freed on drop, on any thread.
    type Allocation: Memory + Sync + Debug;
    /// A registered region; dropping it deregisters, on a bound thread.
    type Registration: Send + Debug + 'static;
    /// Another process's memory, opened; dropping it closes it, on a bound thread.
    type Import: Memory + Debug;

    /// Who this is. No driver call, any thread.
    fn identity(&self) -> &Identity;

    /// What it can do. No driver call, any thread.
    fn caps(&self) -> Caps;

    /// Makes this device current on the calling thread.
    ///
    /// *Guarantees*: while the proof lives the device is current; dropping it restores what was current before, also on
    /// error paths and while unwinding. Where the device is current already, no driver call is made.
    /// *Errors*: [`Kind::CannotRestore`](crate::Kind::CannotRestore) where the driver offers no way to give this thread
    /// back as it was (an Ascend thread that had no context), and then nothing was changed: run the work on an owned
    /// worker ([`Workers::bound`](crate::Workers::bound) chooses). [`Kind::ShutDown`](crate::Kind::ShutDown) at process
    /// exit; else what the driver said. A failed bind is never replaced by another device.
    /// *Threads*: any.
    fn bind_current(&self) -> Result<Bound<'_, Self>>;

    /// Makes this device current on a thread that the library owns, for the life of that thread.
    ///
    /// *Guarantees*: as [`bind_current`](Device::bind_current), but nothing is restored, so it works where that answers
    /// `CannotRestore`. *Caller must*: own the thread. *Threads*: the owned one.
    fn bind_owned_thread(&self) -> Result<Bound<'_, Self>>;

    /// Gives the calling thread back as it was. Only [`Bound`] calls it; it cannot fail: what the driver refuses is
    /// logged and counted.
    ///
    /// # Safety
    /// `previous` must be what the proof that is being ended got on this thread, and no younger proof may be valid here:
    /// it would go on working without its device.
    unsafe fn restore(&self, previous: Self::Previous);

    /// The stream on which the calling thread's next work would be queued: the one named by an enclosing
    /// [`with_stream`](DeviceExt::with_stream), else the device's default stream.
    ///
    /// *Guarantees*: never creates a stream, never waits, never fails. *Threads*: the answer holds for this thread only.
    fn current_stream(bound: &Bound<'_, Self>) -> Self::Stream;

    /// Whether `stream` means another stream on each thread, as CUDA's per-thread default stream does. Such a stream is
    /// synchronised on the thread that it was captured on.
    fn is_per_thread(stream: Self::Stream) -> bool;

    /// Returns when all work queued on `stream` before the call is done.
    ///
    /// *Guarantees*: never a device-wide wait. A deadline that has passed already makes it a question that never blocks.
    /// A stream that is being captured is refused *before* the call that would spoil the capture. An earlier
    /// asynchronous failure of the stream is reported here.
    /// *Errors*: [`Kind::Timeout`](crate::Kind::Timeout), [`Kind::StreamCapturing`](crate::Kind::StreamCapturing),
    /// [`Kind::WrongThread`](crate::Kind::WrongThread) for a per-thread stream of another thread, else the driver's.
    /// *Threads*: any bound one, except for per-thread streams.
    fn sync_stream(bound: &Bound<'_, Self>, stream: Self::Stream, deadline: Deadline) -> Result<()>;

    /// Where the `len` bytes at `addr` live, and in which allocation.
    ///
    /// *Guarantees*: an address that the driver does not know is host memory only where the driver says so; a question
    /// that fails is an error and never taken to mean "host". Never dereferences. `len` 0 asks about the address alone.
    /// *Errors*: [`Kind::InvalidRange`](crate::Kind::InvalidRange) where the region leaves its allocation,
    /// [`Kind::InvalidArgument`](crate::Kind::InvalidArgument) for a null address.
    fn locate(bound: &Bound<'_, Self>, addr: usize, len: usize) -> Result<Located>;

    /// New device memory of `len` bytes, exportable where [`Caps::ipc_export`] says so.
    ///
    /// *Errors*: [`Kind::OutOfMemory`](crate::Kind::OutOfMemory) with the size asked for. `len` 0 is
    /// [`Kind::InvalidArgument`](crate::Kind::InvalidArgument): an empty tensor has no memory.
    fn allocate(bound: &Bound<'_, Self>, len: usize) -> Result<Self::Allocation>;

    /// Copies `from.len` bytes, between host and device or within one of them, and returns when they are there.
    ///
    /// *Guarantees*: runs on a stream of the library's own and waits for nothing that the caller queued: that is what
    /// readiness is for. Work queued by the caller afterwards sees the bytes.
    /// *Errors*: [`Kind::InvalidArgument`](crate::Kind::InvalidArgument) where the lengths differ or an address of bytes
    /// is null, [`Kind::DeviceMismatch`](crate::Kind::DeviceMismatch) where a region is on another device.
    ///
    /// # Safety
    /// Both regions must be allocated for the whole call, and nobody may write `from` or touch `to` meanwhile.
    unsafe fn copy(bound: &Bound<'_, Self>, to: Region, from: Region) -> Result<()>;

    /// A handle by which another process can open the allocation that holds `region`.
    ///
    /// *Guarantees*: the handle is for the whole allocation, with the region's offset and length beside it; exporting
    /// two regions of one allocation gives equal handles. "Cannot be exported" is an answer with a reason, not an error.
    /// *Caller must*: keep the allocation until the call that sent the handle has returned. An importer may keep it open
    /// for longer, as a cache does, and must not touch the memory after that call. Where a driver does not say what it
    /// means to free an allocation that is still open elsewhere, the backend's documentation says what is relied on.
    /// *Errors*: [`Kind::DeviceMismatch`](crate::Kind::DeviceMismatch) for memory of another device,
    /// [`Kind::Unsupported`](crate::Kind::Unsupported) where [`Caps::ipc_export`] is clear.
    fn export_ipc(bound: &Bound<'_, Self>, region: Region) -> Result<Export>;

    /// Opens another process's allocation.
    ///
    /// *Guarantees*: the driver checks what comes from the peer; a handle that it refuses is an error, never a fault.
    /// *Errors*: [`Kind::ImportRefused`](crate::Kind::ImportRefused) with the driver's code,
    /// [`Kind::DeviceMismatch`](crate::Kind::DeviceMismatch) where the UUID is another device's.
    fn import_ipc(
        bound: &Bound<'_, Self>,
        handle: &IpcHandle,
        descriptors: Vec<OwnedFd>,
    ) -> Result<Self::Import>;

    /// Whether another process's allocation may stay open after the call that sent its handle has returned, and so
    /// possibly after its owner has freed it. Where not, an importer closes what it opened before it answers.
    fn imports_may_linger(&self) -> bool {
        true
    }

    /// Makes a host or device region usable for DMA.
    ///
    /// *Guarantees*: registering the same region again only counts; a reused address with a new buffer id is a new
    /// region. Split where the driver limits the size, rolled back whole when a part fails. Deregistered on drop, on a
    /// bound thread.
    /// *Caller must*: drop the guard before the memory is freed.
    /// *Errors*: [`Kind::Overlap`](crate::Kind::Overlap) for a region that overlaps a registered one in part,
    /// [`Kind::InvalidArgument`](crate::Kind::InvalidArgument) where the driver's alignment is not met.
    fn register(bound: &Bound<'_, Self>, region: Region) -> Result<Self::Registration>;
}

/// Convenience that every device gets from the contract.
pub trait DeviceExt: Device {
    /// Names `stream` as the calling thread's current stream while `work` runs.
    ///
    /// This is how a framework's own current stream (PyTorch's `cuda_stream`, torch_npu's `npu_stream`) reaches Haulier.
    fn with_stream<R>(&self, stream: Self::Stream, work: impl FnOnce() -> R) -> R {
        stream::with_stream(self, stream, work)
    }

    /// Runs `work` with the device current: on the calling thread where that can be given back as it was, else on a
    /// thread of its own, which the calling one waits for. The stream that the caller named goes along.
    ///
    /// For a call now and then. Whoever calls often, or with a deadline, has [`Workers`](crate::Workers).
    ///
    /// *Errors*: as [`Device::bind_current`], except `CannotRestore`. A panic in `work` goes on in the caller.
    fn bound<R: Send>(&self, work: impl FnOnce(&Bound<'_, Self>) -> Result<R> + Send) -> Result<R> {
        match self.bind_current() {
            Ok(bound) => work(&bound),
            Err(e) if e.kind() == Kind::CannotRestore => {
                let named = stream::named(self);
                let there = move || {
                    let bound = self.bind_owned_thread()?;
                    match named {
                        Some(stream) => self.with_stream(stream, || work(&bound)),
                        None => work(&bound),
                    }
                };
                thread::scope(|scope| match thread::Builder::new().spawn_scoped(scope, there) {
                    Ok(thread) => thread.join().unwrap_or_else(|panic| resume_unwind(panic)),
                    Err(e) => {
                        let identity = self.identity();
                        Err(Error::new(Kind::OutOfMemory, identity.backend, "start_thread")
                            .on(identity.logical)
                            .with_source(e))
                    }
                })
            }
            Err(e) => Err(e),
        }
    }

    /// New device memory as a [`Buffer`], from any thread.
    ///
    /// *Errors*: as [`bound`](DeviceExt::bound) and [`Device::allocate`].
    fn buffer(&self, len: usize) -> Result<Buffer<Self>> {
        self.bound(|bound| bound.allocate(len)).map(Buffer::new)
    }
}

impl<D: Device> DeviceExt for D {}

/// Device memory with one owner, as a `Vec` is of host memory: who has `&mut` to it has it alone.
#[derive(Debug)]
pub struct Buffer<D: Device>(Arc<Held<D>>);

/// Dropped in this order.
#[derive(Debug)]
struct Held<D: Device> {
    attached: Mutex<Vec<Box<dyn Any + Send>>>,
    allocation: D::Allocation,
}

impl<D: Device> Buffer<D> {
    /// Owns `allocation`.
    pub fn new(allocation: D::Allocation) -> Self {
        Buffer(Arc::new(Held { attached: Mutex::default(), allocation }))
    }

    /// The whole of it.
    pub fn region(&self) -> Region {
        self.0.allocation.region()
    }

    /// The allocation itself.
    pub fn allocation(&self) -> &D::Allocation {
        &self.0.allocation
    }

    /// The allocation itself, alone; `None` while a [`Keep`] of it lives: a call that gave up may still be at it.
    pub fn allocation_mut(&mut self) -> Option<&mut D::Allocation> {
        Arc::get_mut(&mut self.0).map(|held| &mut held.allocation)
    }

    /// What keeps the memory allocated, for a call that may outlive its caller's patience.
    pub fn keep(&self) -> Keep<D> {
        Keep(Arc::clone(&self.0))
    }
}

/// Keeps a [`Buffer`]'s memory allocated and gives no access to it.
#[derive(Debug)]
pub struct Keep<D: Device>(Arc<Held<D>>);

impl<D: Device> Keep<D> {
    /// Where the whole of it is.
    pub fn region(&self) -> Region {
        self.0.allocation.region()
    }

    /// Has `guard` dropped right before the memory is freed, on whichever thread that happens: a registration that is
    /// made once and lasts as long as the memory.
    pub fn attach(&self, guard: impl Any + Send) {
        self.0.attached.lock().push(Box::new(guard));
    }
}

impl<D: Device> Clone for Keep<D> {
    fn clone(&self) -> Self {
        Keep(Arc::clone(&self.0))
    }
}

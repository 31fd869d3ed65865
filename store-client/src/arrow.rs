//! The arrow of a put, from the caller's memory to the engine, in five steps that take each other by value.
//!
//! ```text
//! caller's thread                                              any worker thread
//!  1 capture   device, current stream, region per item
//!  2 plan      export IPC handle, or choose staging            a worker is always Bound to the client's device;
//!  3 check     captured device == device of allocation         it never asks what is "current"
//!  4 ready     synchronise each (device, stream) once
//!  5 send      only a Ready batch can be sent        ───────▶  engine: in-process | node daemon
//! ```
//!
//! `get_into` runs the same steps for its destination: the receiver must not overwrite memory that queued work still
//! reads. This is the only place in the workspace where a stream is synchronised for a payload or a payload is exposed.
//! When step 3 or 4 fails, nothing of the batch was sent.

use std::{
    mem,
    ops::{Deref, Range},
    os::fd::OwnedFd,
    slice,
    sync::Arc,
};

use hal::{
    Allocated, Bound, Deadline, Device, DeviceUuid, Export, IpcHandle, Kind, Located, Place, Region, Workers,
};

use crate::{
    error::{Error, Result},
    payload::{Lease, Order, Origin, Span},
    wire::{Fallback, Path},
};

/// The slots of a batch before their first step.
#[derive(Debug)]
pub(crate) struct Items<D: Device> {
    /// All keys, one after the other: a batch costs one allocation for them, and not one for each.
    keys: String,
    list: Vec<Item<D>>,
}

#[derive(Debug)]
struct Item<D: Device> {
    key: Range<usize>,
    meta: Vec<u8>,
    span: Span<D>,
}

impl<D: Device> Items<D> {
    /// None yet, with room for so many.
    pub(crate) fn with_capacity(count: usize) -> Self {
        Items { keys: String::new(), list: Vec::with_capacity(count) }
    }

    pub(crate) fn push(&mut self, key: &str, meta: Vec<u8>, span: Span<D>) {
        let start = self.keys.len();
        if start == 0 {
            // Of just the right size, where it stays alone.
            self.keys = key.to_owned();
        } else {
            self.keys.push_str(key);
        }
        self.list.push(Item { key: start..self.keys.len(), meta, span });
    }

    pub(crate) fn len(&self) -> usize {
        self.list.len()
    }

    /// Bytes of all spans.
    pub(crate) fn bytes(&self) -> u64 {
        self.list.iter().map(|item| item.span.len as u64).sum()
    }
}

/// A slot's key.
#[derive(Debug, Clone)]
enum Key {
    Alone(String),
    /// A part of those of its batch.
    Among(Arc<str>, Range<usize>),
}

impl Deref for Key {
    type Target = str;

    fn deref(&self) -> &str {
        match self {
            Key::Alone(key) => key,
            Key::Among(keys, at) => &keys[at.clone()],
        }
    }
}

/// After step 1: each region is located, and the streams that it waits for are named.
#[derive(Debug)]
pub struct Captured<D: Device> {
    device: DeviceUuid,
    /// Their routes are chosen in step 2.
    slots: Vec<Slot<D>>,
    streams: Vec<D::Stream>,
}

impl<D: Device> Captured<D> {
    /// Step 1, on the thread whose current stream counts.
    pub(crate) fn here(bound: &Bound<'_, D>, items: Items<D>, lease: Lease) -> Result<Self> {
        let device = bound.device().identity().uuid;
        let mut streams: Vec<D::Stream> = Vec::new();
        let mut slots = Vec::with_capacity(items.len());
        let Items { mut keys, list } = items;
        let shared: Option<Arc<str>> = (list.len() > 1).then(|| keys.as_str().into());
        for Item { key: at, meta, span } in list {
            let located = match span.origin {
                Origin::Slice => Located { region: Region::host(span.addr, span.len), allocation: None },
                _ if span.len == 0 => Located { region: Region::host(span.addr, 0), allocation: None },
                _ => bound.locate(span.addr, span.len)?,
            };
            let current;
            let after = match &span.order {
                Order::Current => {
                    current = bound.current_stream();
                    slice::from_ref(&current)
                }
                Order::Streams(streams) => streams,
                Order::Done => &[],
            };
            for stream in after {
                if !streams.contains(stream) {
                    streams.push(*stream);
                }
            }
            let Located { region, allocation } = located;
            let lease = (region.place == Place::Host).then(|| lease.clone());
            let key = match &shared {
                Some(keys) => Key::Among(Arc::clone(keys), at),
                None => Key::Alone(mem::take(&mut keys)),
            };
            let route = Route::Staging(Fallback::HOST);
            slots.push(Slot { key, meta, span, region, allocation, route, lease });
        }
        Ok(Captured { device, slots, streams })
    }

    /// Step 2. `imports` says whether the engine opens memory of this device. Regions of one allocation share a handle.
    pub(crate) fn plan(mut self, bound: &Bound<'_, D>, imports: bool) -> Result<Planned<D>> {
        let caps = bound.device().caps();
        let mut exports: Vec<(hal::BufferId, usize, Handle)> = Vec::new();
        for slot in &mut self.slots {
            let region = slot.region;
            let elsewhere = matches!(region.place, Place::Device(uuid) if uuid != self.device);
            slot.route = match slot.allocation {
                // Step 3 refuses memory of another device; exporting it from here would be wrong already.
                None => Route::Staging(Fallback::HOST),
                _ if elsewhere || region.len == 0 => Route::Staging(Fallback::HOST),
                Some(_) if !caps.ipc_export => {
                    Route::Staging(Fallback::NotExportable(hal::NotExportable::Device))
                }
                Some(_) if !imports => Route::Staging(Fallback::NotNegotiated),
                Some(allocation) => {
                    let known = exports.iter().position(|(buffer, ..)| *buffer == allocation.buffer);
                    match known {
                        Some(handle) => {
                            Route::Ipc { handle, offset: (region.addr - exports[handle].1) as u64 }
                        }
                        None => match bound.export_ipc(region)? {
                            Export::NotExportable(why) => Route::Staging(Fallback::NotExportable(why)),
                            Export::Handle(e) => {
                                let base = region.addr - e.offset as usize;
                                let handle = Handle { handle: e.handle, descriptors: e.descriptors };
                                exports.push((allocation.buffer, base, handle));
                                Route::Ipc { handle: exports.len() - 1, offset: e.offset }
                            }
                        },
                    }
                }
            };
        }
        let handles = exports.into_iter().map(|(.., handle)| handle).collect();
        Ok(Planned { device: self.device, slots: self.slots, handles, streams: self.streams })
    }
}

/// After step 2: each slot has its route.
#[derive(Debug)]
pub struct Planned<D: Device> {
    device: DeviceUuid,
    slots: Vec<Slot<D>>,
    handles: Vec<Handle>,
    streams: Vec<D::Stream>,
}

impl<D: Device> Planned<D> {
    /// Step 3: what was captured on this device must live on this device, or on the host.
    pub(crate) fn check(self, bound: &Bound<'_, D>) -> Result<Checked<D>> {
        for slot in &self.slots {
            if let Place::Device(found) = slot.region.place
                && found != self.device
            {
                return Err(Error::DeviceMismatch {
                    expected: format!("{} ({})", bound.device().identity(), self.device),
                    found: found.to_string(),
                });
            }
        }
        Ok(Checked(self))
    }
}

/// After step 3: the devices agree.
#[derive(Debug)]
pub struct Checked<D: Device>(Planned<D>);

impl<D: Device> Checked<D> {
    /// Step 4: waits for each distinct stream once. A question on this thread comes first and is all that a ready payload
    /// costs; a wait that may never end runs on a worker, except on a per-thread stream, which only this thread can name.
    pub(crate) fn ready(
        self,
        bound: &Bound<'_, D>,
        workers: &Workers<D>,
        deadline: Deadline,
    ) -> Result<Ready<D>> {
        for &stream in &self.0.streams {
            match bound.sync_stream(stream, Deadline::passed()) {
                Err(e) if e.kind() == Kind::Timeout => {}
                Err(e) => return Err(e.into()),
                Ok(()) => continue,
            }
            if D::is_per_thread(stream) {
                bound.sync_stream(stream, deadline)?;
            } else {
                workers.run(deadline, "sync_stream", move |bound| bound.sync_stream(stream, deadline))?;
            }
        }
        Ok(Ready { slots: self.0.slots, handles: self.0.handles })
    }
}

/// After step 4: work queued before the call is done. The only thing that an engine takes.
#[derive(Debug)]
pub struct Ready<D: Device> {
    slots: Vec<Slot<D>>,
    handles: Vec<Handle>,
}

/// One slot on its way.
#[derive(Debug)]
pub struct Slot<D: Device> {
    key: Key,
    meta: Vec<u8>,
    span: Span<D>,
    region: Region,
    /// The allocation around the region, where the driver made it.
    allocation: Option<Allocated>,
    route: Route,
    /// For host memory.
    lease: Option<Lease>,
}

/// How a slot's bytes travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Route {
    /// By the batch's handle of this index, from `offset` on.
    Ipc {
        /// Index into [`Ready::handles`].
        handle: usize,
        /// Where the region starts in the handle's allocation, in bytes.
        offset: u64,
    },
    /// Copied by the client's own device, for this reason.
    Staging(Fallback),
}

/// An exported allocation of the batch.
#[derive(Debug)]
pub struct Handle {
    /// Names it on the wire.
    pub handle: IpcHandle,
    /// Beside it.
    pub descriptors: Vec<OwnedFd>,
}

impl<D: Device> Ready<D> {
    /// Steps 1 to 4.
    pub(crate) fn make(
        bound: &Bound<'_, D>,
        items: Items<D>,
        lease: Lease,
        imports: bool,
        workers: &Workers<D>,
        deadline: Deadline,
    ) -> Result<Self> {
        Captured::here(bound, items, lease)?
            .plan(bound, imports)?
            .check(bound)?
            .ready(bound, workers, deadline)
    }

    /// The batch's slots, in input order.
    pub fn slots(&self) -> &[Slot<D>] {
        &self.slots
    }

    /// The exported allocations that slots refer to.
    pub fn handles(&self) -> &[Handle] {
        &self.handles
    }

    /// Whether sending makes driver calls, which may hang, on memory of the device.
    pub(crate) fn needs_driver(&self) -> bool {
        self.slots.iter().any(|s| matches!((s.region.place, s.route), (Place::Device(_), Route::Staging(_))))
    }

    /// The slots at these indices alone, still ready.
    pub(crate) fn select(&self, indices: &[usize]) -> Result<Ready<D>> {
        let slots = indices
            .iter()
            .map(|&i| {
                let Slot { key, meta, span, region, allocation, route, lease } = &self.slots[i];
                Slot {
                    key: key.clone(),
                    meta: meta.clone(),
                    span: span.clone(),
                    region: *region,
                    allocation: *allocation,
                    route: *route,
                    lease: lease.clone(),
                }
            })
            .collect();
        let mut handles = Vec::with_capacity(self.handles.len());
        for Handle { handle, descriptors } in &self.handles {
            let descriptors = descriptors
                .iter()
                .map(OwnedFd::try_clone)
                .collect::<Result<_, _>>()
                .map_err(|e| Error::ResourceExhausted { what: format!("descriptors ({e})") })?;
            handles.push(Handle { handle: handle.clone(), descriptors });
        }
        Ok(Ready { slots, handles })
    }
}

impl<D: Device> Slot<D> {
    /// The key.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// What is stored beside the bytes.
    pub fn meta(&self) -> &[u8] {
        &self.meta
    }

    /// The memory to read, or to fill.
    pub fn region(&self) -> Region {
        self.region
    }

    /// What keeps the region allocated. Only Mooncake lets the store itself at the memory.
    #[cfg(feature = "mooncake")]
    pub(crate) fn origin(&self) -> &Origin<D> {
        &self.span.origin
    }

    /// Runs `work`, which touches the region's bytes; refused where the call has returned and the memory's owner has it
    /// back. Only host memory is lent: driver calls may hang, and who waits for the lease to end would hang with them.
    pub(crate) fn lend<R>(&self, work: impl FnOnce() -> Result<R>) -> Result<R> {
        match &self.lease {
            Some(lease) => lease.during(work),
            None => work(),
        }
    }

    /// How the bytes travel.
    pub fn route(&self) -> Route {
        self.route
    }

    /// The route as the counters name it.
    pub fn path(&self) -> Path {
        match self.route {
            Route::Ipc { .. } => Path::Ipc,
            Route::Staging(why) => Path::Staging(why),
        }
    }
}

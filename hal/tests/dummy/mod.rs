//! A device with nothing behind it but a thread-local that says which device is current, as a driver keeps it.
//!
//! `TYPE` makes device types that the compiler tells apart.

#![allow(dead_code, reason = "every test and every compile-fail case uses its own part")]

use std::{
    cell::Cell,
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
};

use hal::{
    Allocated, Bound, BufferId, Caps, Deadline, Device, DeviceUuid, Error, Export, Identity, IpcHandle, Kind,
    Located, LogicalId, Memory, NotExportable, Place, Region, Result, named_stream,
};

thread_local! {
    static CURRENT: Cell<Option<DeviceUuid>> = const { Cell::new(None) };
    static FREED: Cell<usize> = const { Cell::new(0) };
}

/// How many allocations were freed on the calling thread.
pub(crate) fn freed() -> usize {
    FREED.get()
}

/// What the "driver" says is current on the calling thread.
pub(crate) fn current() -> Option<DeviceUuid> {
    CURRENT.get()
}

pub(crate) type Red = Dummy<0>;
pub(crate) type Blue = Dummy<1>;

#[derive(Debug, Clone)]
pub(crate) struct Dummy<const TYPE: u8>(Arc<State>);

#[derive(Debug)]
struct State {
    identity: Identity,
    restorable: bool,
    owned: AtomicUsize,
    owned_max: AtomicUsize,
    /// Where set, what is bound past `owned_max` waits here instead of being refused.
    jam: Option<Mutex<mpsc::Receiver<()>>>,
}

impl<const TYPE: u8> Dummy<TYPE> {
    pub(crate) fn new(ordinal: u8) -> Self {
        Self::with(ordinal, true, usize::MAX, None)
    }

    /// Cannot give a thread back that had nothing current.
    pub(crate) fn one_way(ordinal: u8) -> Self {
        Self::with(ordinal, false, usize::MAX, None)
    }

    /// Binds no more than `owned_max` owned threads.
    pub(crate) fn scarce(ordinal: u8, owned_max: usize) -> Self {
        Self::with(ordinal, true, owned_max, None)
    }

    /// Binds `owned_max` owned threads; for any further one binding hangs until the sender is dropped.
    pub(crate) fn jammed(ordinal: u8, owned_max: usize) -> (Self, mpsc::Sender<()>) {
        let (release, jam) = mpsc::channel();
        (Self::with(ordinal, true, owned_max, Some(Mutex::new(jam))), release)
    }

    /// Ends what [`scarce`](Dummy::scarce) began.
    pub(crate) fn plenty(&self) {
        self.0.owned_max.store(usize::MAX, Ordering::SeqCst);
    }

    fn with(ordinal: u8, restorable: bool, owned_max: usize, jam: Option<Mutex<mpsc::Receiver<()>>>) -> Self {
        let identity = Identity {
            backend: "dummy",
            uuid: DeviceUuid([TYPE, ordinal, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
            logical: LogicalId(ordinal.into()),
            physical: None,
            name: "dummy".to_owned(),
        };
        let owned_max = AtomicUsize::new(owned_max);
        Dummy(Arc::new(State { identity, restorable, owned: AtomicUsize::new(0), owned_max, jam }))
    }

    pub(crate) fn uuid(&self) -> DeviceUuid {
        self.0.identity.uuid
    }

    /// How many owned threads have been bound, or tried to be.
    pub(crate) fn owned(&self) -> usize {
        self.0.owned.load(Ordering::SeqCst)
    }

    fn error(&self, kind: Kind, op: &'static str) -> Error {
        Error::new(kind, "dummy", op).on(self.0.identity.logical)
    }
}

/// A stream by number; 0 is the default one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Stream(pub(crate) u32);

#[derive(Debug)]
pub(crate) struct Piece(Region);

impl Drop for Piece {
    fn drop(&mut self) {
        FREED.set(FREED.get() + 1);
    }
}

impl Memory for Piece {
    fn region(&self) -> Region {
        self.0
    }
}

impl<const TYPE: u8> Device for Dummy<TYPE> {
    type Stream = Stream;
    type Previous = Option<DeviceUuid>;
    type Allocation = Piece;
    type Registration = Region;
    type Import = Piece;

    fn identity(&self) -> &Identity {
        &self.0.identity
    }

    fn caps(&self) -> Caps {
        let mut caps = Caps::default();
        caps.ipc_export = true;
        caps.ipc_import = true;
        caps.register_host = true;
        caps.register_device = true;
        caps
    }

    fn bind_current(&self) -> Result<Bound<'_, Self>> {
        let previous = match current() {
            already if already == Some(self.uuid()) => None,
            None if !self.0.restorable => return Err(self.error(Kind::CannotRestore, "bind_current")),
            other => Some(other),
        };
        CURRENT.set(Some(self.uuid()));
        // SAFETY: it is current as of the line above.
        Ok(unsafe { Bound::new(self, previous) })
    }

    fn bind_owned_thread(&self) -> Result<Bound<'_, Self>> {
        if self.0.owned.fetch_add(1, Ordering::SeqCst) >= self.0.owned_max.load(Ordering::SeqCst) {
            match &self.0.jam {
                None => return Err(self.error(Kind::InvalidDevice, "bind_owned_thread")),
                // Nothing is ever sent.
                Some(jam) => {
                    let _ = jam.lock().unwrap().recv();
                }
            }
        }
        CURRENT.set(Some(self.uuid()));
        // SAFETY: it is current as of the line above.
        Ok(unsafe { Bound::new(self, None) })
    }

    unsafe fn restore(&self, previous: Self::Previous) {
        CURRENT.set(previous);
    }

    fn current_stream(bound: &Bound<'_, Self>) -> Stream {
        named_stream(bound.device()).unwrap_or(Stream(0))
    }

    fn is_per_thread(_: Stream) -> bool {
        false
    }

    fn sync_stream(_: &Bound<'_, Self>, _: Stream, _: Deadline) -> Result<()> {
        Ok(())
    }

    fn locate(bound: &Bound<'_, Self>, addr: usize, len: usize) -> Result<Located> {
        let region = Region { addr, len, place: Place::Device(bound.device().uuid()) };
        Ok(Located { region, allocation: Some(Allocated { base: addr, len, buffer: BufferId(0) }) })
    }

    fn allocate(bound: &Bound<'_, Self>, len: usize) -> Result<Piece> {
        Ok(Piece(Region { addr: 0x1000, len, place: Place::Device(bound.device().uuid()) }))
    }

    unsafe fn copy(_: &Bound<'_, Self>, _: Region, _: Region) -> Result<()> {
        Ok(())
    }

    fn export_ipc(_: &Bound<'_, Self>, _: Region) -> Result<Export> {
        Ok(Export::NotExportable(NotExportable::HostMemory))
    }

    fn import_ipc(bound: &Bound<'_, Self>, _: &IpcHandle, _: Vec<OwnedFd>) -> Result<Piece> {
        Self::allocate(bound, 1)
    }

    fn register(_: &Bound<'_, Self>, region: Region) -> Result<Region> {
        Ok(region)
    }
}

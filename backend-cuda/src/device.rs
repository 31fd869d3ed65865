//! The devices of this process, and their side of the contract.

use std::{
    os::fd::OwnedFd,
    process,
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicU64, Ordering},
    },
};

use hal::{
    Bound, Caps, Deadline, Device, DeviceUuid, Error, Export, Identity, IpcHandle, Kind, Located, LogicalId,
    Place, Region, Registry, Result,
};
use parking_lot::Mutex;

use crate::{
    BACKEND, CudaAllocation, CudaImport, CudaRegistration, CudaStream,
    copy::{self, Lanes},
    error::{not_started, refused},
    ffi::{self, Answer, Context, Driver, Refusal},
    ipc::{self, Exports, Imports},
    memory,
    register::{self, HostMemory},
    stream,
};

/// What a thread had before it was bound: another context, or none.
#[derive(Debug)]
pub struct CudaPrevious(Option<Context>);

/// One NVIDIA device as this process sees it. All handles of a device share one retained primary context, which is
/// also the CUDA runtime's and PyTorch's: it is retained when the device is first bound, and released with the last
/// handle, allocation, import and registration.
#[derive(Debug, Clone)]
pub struct CudaDevice(Arc<Opened>);

/// What all handles of one device share.
#[derive(Debug)]
struct Opened {
    system: &'static System,
    card: &'static Card,
    context: OnceLock<Context>,
    /// Held while the context is being retained, so that it is retained once.
    retaining: Mutex<()>,
    device_memory: Registry,
    lanes: Lanes,
    exports: Exports,
    imports: Imports,
}

/// What is known of a device without a context.
#[derive(Debug)]
struct Card {
    device: i32,
    identity: Identity,
    caps: Caps,
    /// Virtual memory of this device can be shared by descriptor.
    shares_descriptors: bool,
}

/// The driver as this process has it. Never torn down: the library stays loaded.
#[derive(Debug)]
struct System {
    driver: Driver,
    cards: Vec<Card>,
    /// By logical id. Weak, so that the context goes with the last handle.
    opened: Vec<Mutex<Weak<Opened>>>,
    /// Host memory is registered for all devices at once.
    host_memory: HostMemory,
    failed_drops: AtomicU64,
}

impl System {
    /// The driver, initialised by the first call.
    fn get(op: &'static str) -> Result<&'static Self> {
        static SYSTEM: OnceLock<System> = OnceLock::new();
        static STARTING: Mutex<()> = Mutex::new(());
        if let Some(system) = SYSTEM.get() {
            return system.of_this_process(op);
        }
        let _starting = STARTING.lock();
        // A failure is not kept: what is missing may be mended while the process runs.
        match SYSTEM.get() {
            Some(system) => system.of_this_process(op),
            None => {
                let system = System::start(op)?;
                Ok(SYSTEM.get_or_init(|| system))
            }
        }
    }

    fn start(op: &'static str) -> Result<Self> {
        let (functions, library) = ffi::find(&ffi::configured()).map_err(|unusable| unusable.error(op))?;
        let driver = Driver::start(functions).map_err(|why| not_started(op, &library, why))?;
        let count = driver.device_count().map_err(|refusal| refused(&driver, op, refusal))?;
        let cards: Vec<_> = (0..count)
            .map(|ordinal| Card::read(&driver, ordinal))
            .collect::<Answer<_>>()
            .map_err(|refusal| refused(&driver, op, refusal))?;
        let opened = cards.iter().map(|_| Mutex::default()).collect();
        Ok(System { driver, cards, opened, host_memory: HostMemory::new(), failed_drops: AtomicU64::new(0) })
    }

    fn of_this_process(&self, op: &'static str) -> Result<&Self> {
        let (initialised, this) = (self.driver.pid(), process::id());
        if initialised == this {
            return Ok(self);
        }
        Err(Error::new(Kind::Unsupported, BACKEND, op).detail(format!(
            "process {this} was forked from process {initialised} after that one had initialised CUDA, and the \
             driver does not survive a fork; start it afresh instead (in Python: the `spawn` start method)"
        )))
    }

    fn open(&'static self, ordinal: usize) -> Option<CudaDevice> {
        let mut slot = self.opened.get(ordinal)?.lock();
        if let Some(opened) = slot.upgrade() {
            return Some(CudaDevice(opened));
        }
        let opened = Arc::new(Opened {
            system: self,
            card: &self.cards[ordinal],
            context: OnceLock::new(),
            retaining: Mutex::default(),
            device_memory: Registry::new(BACKEND, usize::MAX),
            lanes: Lanes::default(),
            exports: Exports::default(),
            imports: Imports::default(),
        });
        *slot = Arc::downgrade(&opened);
        Some(CudaDevice(opened))
    }
}

impl Card {
    fn read(driver: &Driver, ordinal: i32) -> Answer<Self> {
        let device = driver.device(ordinal)?;
        let identity = Identity {
            backend: BACKEND,
            uuid: DeviceUuid(driver.device_uuid(device)?),
            logical: LogicalId(ordinal.cast_unsigned()),
            physical: None,
            name: driver.device_name(device)?,
        };
        // Without one address space an address does not say where it lives, and no handle could be opened.
        let unified = driver.unified_addressing(device)?;
        let by_handle = unified && driver.has_legacy_ipc();
        let by_descriptor = unified && driver.posix_fd_handles(device)?;
        let mut caps = Caps::default();
        caps.ipc_export = by_handle || (by_descriptor && driver.has_vmm_export());
        caps.ipc_import = by_handle || (by_descriptor && driver.has_vmm_import());
        caps.register_host = driver.has_host_registration();
        // The device's own memory is within its reach as it is; registering it is bookkeeping.
        caps.register_device = true;
        Ok(Card { device, identity, caps, shares_descriptors: by_descriptor && driver.has_vmm_export() })
    }
}

impl CudaDevice {
    /// Every device that this process can see, in the driver's order. Initialises the driver, creates no context.
    ///
    /// *Errors*: [`Kind::NotPresent`] without a driver, with a stub in its place, or without a device;
    /// [`Kind::Unsupported`] for a driver that is too old, and in a child that was forked after the driver was
    /// initialised; else what the driver said.
    pub fn all() -> Result<Vec<Self>> {
        let system = System::get("open")?;
        Ok((0..system.cards.len()).filter_map(|ordinal| system.open(ordinal)).collect())
    }

    /// The device with this id, which is an index into the devices that this process can see.
    ///
    /// *Errors*: [`Kind::InvalidDevice`] where there is none, else as [`all`](CudaDevice::all).
    pub fn open(logical: LogicalId) -> Result<Self> {
        const OP: &str = "open";
        let system = System::get(OP)?;
        system.open(logical.0 as usize).ok_or_else(|| {
            let visible = system.cards.len();
            Error::new(Kind::InvalidDevice, BACKEND, OP).on(logical).detail(format!(
                "this process sees {visible} devices, numbered from 0 (CUDA_VISIBLE_DEVICES)"
            ))
        })
    }

    /// The device with this UUID.
    ///
    /// *Errors*: [`Kind::InvalidDevice`] where this process sees none, else as [`all`](CudaDevice::all).
    pub fn with_uuid(uuid: DeviceUuid) -> Result<Self> {
        const OP: &str = "open";
        let system = System::get(OP)?;
        let found = system.cards.iter().position(|card| card.identity.uuid == uuid);
        found.and_then(|ordinal| system.open(ordinal)).ok_or_else(|| {
            Error::new(Kind::InvalidDevice, BACKEND, OP)
                .detail(format!("this process does not see {uuid} (CUDA_VISIBLE_DEVICES)"))
        })
    }

    /// The `len` bytes at a raw device pointer, such as PyTorch's `data_ptr()`, as memory of this device. No driver call:
    /// whoever takes the region checks where it lives.
    pub fn region(&self, pointer: usize, len: usize) -> Region {
        Region { addr: pointer, len, place: Place::Device(self.uuid()) }
    }

    /// How many distinct regions are registered: of this device's memory, and of host memory, which all devices share.
    pub fn registrations(&self) -> usize {
        self.0.device_memory.len() + self.host_memory().len()
    }

    /// How often, in this process, the driver refused to take something back while it was dropped. Each was logged.
    pub fn failed_drops(&self) -> u64 {
        self.0.system.failed_drops.load(Ordering::Relaxed)
    }

    pub(crate) fn driver(&self) -> &'static Driver {
        &self.0.system.driver
    }

    pub(crate) fn uuid(&self) -> DeviceUuid {
        self.0.card.identity.uuid
    }

    /// The number by which the driver knows the device in this process.
    pub(crate) fn ordinal(&self) -> i32 {
        self.0.card.identity.logical.0.cast_signed()
    }

    /// The device whose ordinal the driver named.
    pub(crate) fn uuid_of(&self, ordinal: i32) -> Option<DeviceUuid> {
        let card = self.0.system.cards.get(usize::try_from(ordinal).ok()?)?;
        Some(card.identity.uuid)
    }

    pub(crate) fn shares_descriptors(&self) -> bool {
        self.0.card.shares_descriptors
    }

    pub(crate) fn device_memory(&self) -> &Registry {
        &self.0.device_memory
    }

    pub(crate) fn host_memory(&self) -> &'static HostMemory {
        &self.0.system.host_memory
    }

    pub(crate) fn lanes(&self) -> &Lanes {
        &self.0.lanes
    }

    pub(crate) fn exports(&self) -> &Exports {
        &self.0.exports
    }

    pub(crate) fn imports(&self) -> &Imports {
        &self.0.imports
    }

    /// An error of this device.
    pub(crate) fn plain(&self, kind: Kind, op: &'static str) -> Error {
        Error::new(kind, BACKEND, op).on(self.0.card.identity.logical)
    }

    /// The error of a call that the driver refused.
    pub(crate) fn refused(&self, op: &'static str, refusal: Refusal) -> Error {
        refused(self.driver(), op, refusal).on(self.0.card.identity.logical)
    }

    pub(crate) fn needs(&self, flag: bool, op: &'static str) -> Result<()> {
        if flag { Ok(()) } else { Err(self.plain(Kind::Unsupported, op)) }
    }

    /// Refuses memory of another device.
    pub(crate) fn own(&self, op: &'static str, place: Place) -> Result<()> {
        match place {
            Place::Device(uuid) if uuid != self.uuid() => Err(self
                .plain(Kind::DeviceMismatch, op)
                .detail(format!("the memory is of device {uuid}, this one is {}", self.uuid()))),
            _ => Ok(()),
        }
    }

    /// Refuses before a call that would spoil the capture of the thread's current stream. While the guard lives, the
    /// thread's calls spoil nobody else's.
    pub(crate) fn unspoiled(bound: &Bound<'_, Self>, op: &'static str) -> Result<Relaxed> {
        let device = bound.device();
        let relaxed = device.relaxed(op)?;
        let stream = Self::current_stream(bound);
        // Nobody can capture the legacy stream, and beside the capture of a blocking one even the question is refused.
        if !stream.is_legacy() {
            stream::refuse_capture(device, op, stream)?;
        }
        Ok(relaxed)
    }

    /// While the guard lives, the thread's calls spoil nobody's capture.
    pub(crate) fn relaxed(&self, op: &'static str) -> Result<Relaxed> {
        let driver = self.driver();
        let mode = driver.relax_capture_mode().map_err(|refusal| self.refused(op, refusal))?;
        Ok(Relaxed { driver, mode })
    }

    /// Gives back what a guard held, with the device current. What cannot be given back is logged and counted.
    pub(crate) fn give_back(&self, op: &'static str, call: impl FnOnce(&Driver) -> Result<()>) {
        // A forked child has a copy of the guard, and the parent gives back what it stands for.
        if self.0.system.of_this_process(op).is_err() {
            return;
        }
        let outcome = self.bind_current().and_then(|_bound| {
            let _relaxed = self.relaxed(op)?;
            call(self.driver())
        });
        if let Err(e) = outcome {
            self.0.system.drop_failed(&e);
        }
    }

    /// The primary context, retained by the first call.
    fn context(&self, op: &'static str) -> Result<Context> {
        self.0.system.of_this_process(op)?;
        if let Some(context) = self.0.context.get() {
            return Ok(*context);
        }
        let _retaining = self.0.retaining.lock();
        if let Some(context) = self.0.context.get() {
            return Ok(*context);
        }
        let retained = self.driver().retain_primary(self.0.card.device);
        let context = retained.map_err(|refusal| self.refused(op, refusal))?;
        Ok(*self.0.context.get_or_init(|| context))
    }
}

impl System {
    /// At process exit the driver is gone before the guards are, and has taken everything back by itself.
    fn drop_failed(&self, e: &Error) {
        if e.kind() == Kind::ShutDown {
            tracing::debug!(error = %e, "the driver is unloaded");
        } else {
            self.failed_drops.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(error = %e, "not given back");
        }
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        const OP: &str = "close";
        let Some(&context) = self.context.get() else { return };
        let (driver, system) = (&self.system.driver, self.system);
        if system.of_this_process(OP).is_err() {
            return;
        }
        // Streams and staging memory are of the context, and go first.
        let closed = driver.push(context).and_then(|()| {
            let closed = self.lanes.close(driver);
            driver.pop()?;
            closed
        });
        for outcome in [closed, driver.release_primary(self.card.device)] {
            if let Err(refusal) = outcome {
                system.drop_failed(&refused(driver, OP, refusal).on(self.card.identity.logical));
            }
        }
    }
}

/// The calling thread's calls spoil nobody's capture; dropping it restores the mode.
#[derive(Debug)]
pub(crate) struct Relaxed {
    driver: &'static Driver,
    mode: i32,
}

impl Drop for Relaxed {
    fn drop(&mut self) {
        if let Err(refusal) = self.driver.restore_capture_mode(self.mode) {
            tracing::warn!(error = %refused(self.driver, "restore", refusal), "capture mode not restored");
        }
    }
}

impl Device for CudaDevice {
    type Stream = CudaStream;
    type Previous = CudaPrevious;
    type Allocation = CudaAllocation;
    type Registration = CudaRegistration;
    type Import = CudaImport;

    fn identity(&self) -> &Identity {
        &self.0.card.identity
    }

    fn caps(&self) -> Caps {
        self.0.card.caps
    }

    fn bind_current(&self) -> Result<Bound<'_, Self>> {
        const OP: &str = "bind_current";
        let (driver, context) = (self.driver(), self.context(OP)?);
        let previous = driver.current().map_err(|refusal| self.refused(OP, refusal))?;
        if previous == Some(context) {
            // SAFETY: the driver just said that the context is current here.
            return Ok(unsafe { Bound::new(self, None) });
        }
        driver.push(context).map_err(|refusal| self.refused(OP, refusal))?;
        // SAFETY: just made current.
        Ok(unsafe { Bound::new(self, Some(CudaPrevious(previous))) })
    }

    fn bind_owned_thread(&self) -> Result<Bound<'_, Self>> {
        const OP: &str = "bind_owned_thread";
        let context = self.context(OP)?;
        self.driver().set_current(Some(context)).map_err(|refusal| self.refused(OP, refusal))?;
        // SAFETY: just made current.
        Ok(unsafe { Bound::new(self, None) })
    }

    unsafe fn restore(&self, CudaPrevious(previous): CudaPrevious) {
        let driver = self.driver();
        let restored = driver.pop().and_then(|popped| {
            if Some(&popped) == self.0.context.get() {
                return Ok(());
            }
            // Somebody replaced the context while the device was bound, or pushed one and left it.
            tracing::warn!(device = %self.0.card.identity, "another context was made current meanwhile");
            driver.set_current(previous)
        });
        if let Err(refusal) = restored {
            self.0.system.drop_failed(&self.refused("restore", refusal));
        }
    }

    fn current_stream(bound: &Bound<'_, Self>) -> CudaStream {
        hal::named_stream(bound.device()).unwrap_or(CudaStream::DEFAULT)
    }

    fn is_per_thread(stream: CudaStream) -> bool {
        stream.is_per_thread()
    }

    fn sync_stream(bound: &Bound<'_, Self>, stream: CudaStream, deadline: Deadline) -> Result<()> {
        stream::sync(bound.device(), stream, deadline)
    }

    fn locate(bound: &Bound<'_, Self>, addr: usize, len: usize) -> Result<Located> {
        memory::locate(bound.device(), "locate", addr, len)
    }

    fn allocate(bound: &Bound<'_, Self>, len: usize) -> Result<CudaAllocation> {
        CudaAllocation::new(bound, len)
    }

    unsafe fn copy(bound: &Bound<'_, Self>, to: Region, from: Region) -> Result<()> {
        // SAFETY: the caller promises what the copy asks for.
        unsafe { copy::copy(bound, to, from) }
    }

    fn export_ipc(bound: &Bound<'_, Self>, region: Region) -> Result<Export> {
        ipc::export(bound.device(), region)
    }

    fn import_ipc(
        bound: &Bound<'_, Self>,
        handle: &IpcHandle,
        descriptors: Vec<OwnedFd>,
    ) -> Result<CudaImport> {
        ipc::import(bound.device(), handle, descriptors)
    }

    fn register(bound: &Bound<'_, Self>, region: Region) -> Result<CudaRegistration> {
        register::register(bound, region)
    }
}

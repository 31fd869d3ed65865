//! The machine's devices behind the contract. Thin: what is strict is the machine.

use std::{
    os::fd::OwnedFd,
    thread::{self, ThreadId},
};

use hal::{
    Allocated, Bound, Caps, Deadline, Device, DeviceUuid, Error, Export, Exported, Identity, IpcHandle, Kind,
    Located, Memory, NotExportable, Pin, Place, Region, Registered, Result, Token,
};

use super::{
    builder::TokenForm,
    capture::{CaptureMode, CaptureStatus},
    machine::{BACKEND, Machine, Seat},
    memory::{MemoryKind, Residence},
    refusal::{Answer, Refusal, Why},
    stream::{NULL_STREAM, PER_THREAD_STREAM},
};

/// One device of a [`Machine`].
#[derive(Debug, Clone)]
pub struct StrictDevice {
    machine: Machine,
    logical: u32,
}

/// A stream's handle, with the thread that it was named on where it means another stream on each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StrictStream {
    raw: u64,
    thread: Option<ThreadId>,
}

impl StrictStream {
    /// The handle's number.
    pub fn raw(self) -> u64 {
        self.raw
    }
}

impl StrictDevice {
    pub(super) fn new(machine: Machine, logical: u32) -> Self {
        StrictDevice { machine, logical }
    }

    /// The machine.
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// The stream with this handle, as the calling thread means it.
    pub fn stream(&self, raw: u64) -> StrictStream {
        let own = raw == PER_THREAD_STREAM || (raw == NULL_STREAM && self.machine.0.spec.per_thread_default);
        StrictStream { raw, thread: own.then(|| thread::current().id()) }
    }

    /// A new stream.
    ///
    /// *Errors*: what the machine said.
    pub fn create_stream(&self, _bound: &Bound<'_, Self>) -> Result<StrictStream> {
        let raw = self.machine.create_stream().map_err(|e| self.error("create_stream", e))?;
        Ok(self.stream(raw))
    }

    /// New device memory of this kind.
    ///
    /// *Errors*: as [`Device::allocate`].
    pub fn allocate_kind(bound: &Bound<'_, Self>, len: usize, kind: MemoryKind) -> Result<StrictAllocation> {
        const OP: &str = "allocate";
        let device = bound.device();
        if len == 0 {
            return Err(device.plain(Kind::InvalidArgument, OP).detail("an empty tensor has no memory"));
        }
        let addr = device.unspoiled(bound, OP, |machine| machine.allocate(len, kind))?;
        let region = Region { addr, len, place: Place::Device(device.uuid()) };
        Ok(StrictAllocation { device: device.clone(), region })
    }

    /// How many distinct regions are registered through this device.
    pub fn registrations(&self) -> usize {
        self.seat().registry.len()
    }

    fn seat(&self) -> &Seat {
        // The machine checked the id before it made the device, and its devices never change.
        &self.machine.0.devices[self.logical as usize]
    }

    fn uuid(&self) -> DeviceUuid {
        self.seat().identity.uuid
    }

    fn plain(&self, kind: Kind, op: &'static str) -> Error {
        Error::new(kind, BACKEND, op).on(self.logical)
    }

    fn error(&self, op: &'static str, refusal: Refusal) -> Error {
        refusal.error(op, self.logical)
    }

    fn needs(&self, flag: bool, op: &'static str) -> Result<()> {
        if flag { Ok(()) } else { Err(self.plain(Kind::Unsupported, op)) }
    }

    /// Refuses before a call that would spoil the capture of the thread's current stream, and makes it in a way that
    /// spoils nobody else's.
    fn unspoiled<T>(
        &self,
        bound: &Bound<'_, Self>,
        op: &'static str,
        call: impl FnOnce(&Machine) -> Answer<T>,
    ) -> Result<T> {
        self.refuse_capture(op, Self::current_stream(bound))?;
        self.relaxed(call).map_err(|e| self.error(op, e))
    }

    fn relaxed<T>(&self, call: impl FnOnce(&Machine) -> Answer<T>) -> Answer<T> {
        let before = self.machine.exchange_capture_mode(CaptureMode::Relaxed)?;
        let answer = call(&self.machine);
        if let Err(e) = self.machine.exchange_capture_mode(before) {
            tracing::warn!(error = %e, "capture mode not restored");
        }
        answer
    }

    fn refuse_capture(&self, op: &'static str, stream: StrictStream) -> Result<()> {
        match self.machine.capture_status(stream.raw).map_err(|e| self.error(op, e))? {
            CaptureStatus::None => Ok(()),
            status => Err(self
                .plain(Kind::StreamCapturing, op)
                .detail(format!("stream {:#x} is under capture ({status:?})", stream.raw))),
        }
    }

    fn place(&self, residence: Residence) -> Result<Place> {
        match residence {
            Residence::Unregistered | Residence::Registered => Ok(Place::Host),
            Residence::Device(on, _) | Residence::Imported(on) => {
                Ok(Place::Device(self.machine.uuid(on).map_err(|e| self.error("locate", e))?))
            }
        }
    }

    fn own(&self, op: &'static str, place: Place) -> Result<()> {
        match place {
            Place::Device(uuid) if uuid != self.uuid() => Err(self
                .plain(Kind::DeviceMismatch, op)
                .detail(format!("the memory is of device {uuid}, this one is {}", self.uuid()))),
            _ => Ok(()),
        }
    }

    /// Gives back what a guard held, on a bound thread: this one where it can be restored, else one of its own.
    fn give_back(&self, op: &'static str, call: impl FnOnce() -> Result<()> + Send) {
        if self.machine.is_shut_down() {
            tracing::debug!(op, device = self.logical, "the driver is unloaded");
            return;
        }
        let outcome = match self.bind_current() {
            Ok(_bound) => call(),
            Err(e) if e.kind() == Kind::CannotRestore => thread::scope(|s| {
                let worker = s.spawn(|| {
                    let _bound = self.bind_owned_thread()?;
                    call()
                });
                worker.join().unwrap_or_else(|_| Err(self.plain(Kind::Driver, op)))
            }),
            Err(e) => Err(e),
        };
        if let Err(e) = outcome {
            self.machine.count_drop_failure();
            tracing::warn!(error = %e, "not given back");
        }
    }
}

impl Device for StrictDevice {
    type Stream = StrictStream;
    /// The device that was current.
    type Previous = Option<u32>;
    type Allocation = StrictAllocation;
    type Registration = StrictRegistration;
    type Import = StrictImport;

    fn identity(&self) -> &Identity {
        &self.seat().identity
    }

    fn caps(&self) -> Caps {
        self.machine.0.spec.caps
    }

    fn bind_current(&self) -> Result<Bound<'_, Self>> {
        const OP: &str = "bind_current";
        let previous = self.machine.current().map_err(|e| self.error(OP, e))?;
        if previous == Some(self.logical) {
            // SAFETY: the machine just said that the device is current here.
            return Ok(unsafe { Bound::new(self, None) });
        }
        if previous.is_none() && self.machine.0.spec.no_unbind {
            return Err(self
                .plain(Kind::CannotRestore, OP)
                .detail("the thread has no device, and this driver would not take it away again"));
        }
        self.machine.bind(self.logical).map_err(|e| self.error(OP, e))?;
        // SAFETY: just bound.
        Ok(unsafe { Bound::new(self, Some(previous)) })
    }

    fn bind_owned_thread(&self) -> Result<Bound<'_, Self>> {
        self.machine.bind(self.logical).map_err(|e| self.error("bind_owned_thread", e))?;
        // SAFETY: just bound.
        Ok(unsafe { Bound::new(self, None) })
    }

    unsafe fn restore(&self, previous: Option<u32>) {
        let restored = match previous {
            Some(device) => self.machine.bind(device),
            None => self.machine.unbind(),
        };
        if let Err(e) = restored {
            if self.machine.is_shut_down() {
                tracing::debug!(device = self.logical, "the driver is unloaded");
                return;
            }
            self.machine.count_drop_failure();
            tracing::warn!(error = %e, ?previous, "the thread could not be given back as it was");
        }
    }

    fn current_stream(bound: &Bound<'_, Self>) -> StrictStream {
        let device = bound.device();
        hal::named_stream(device).unwrap_or_else(|| device.stream(NULL_STREAM))
    }

    fn is_per_thread(stream: StrictStream) -> bool {
        stream.thread.is_some()
    }

    fn sync_stream(bound: &Bound<'_, Self>, stream: StrictStream, deadline: Deadline) -> Result<()> {
        const OP: &str = "sync_stream";
        let device = bound.device();
        if stream.thread.is_some_and(|named_on| named_on != thread::current().id()) {
            return Err(device.plain(Kind::WrongThread, OP));
        }
        device.refuse_capture(OP, stream)?;
        if deadline.is_passed() {
            let done = device.machine.query_stream(stream.raw).map_err(|e| device.error(OP, e))?;
            return if done { Ok(()) } else { Err(device.plain(Kind::Timeout, OP)) };
        }
        device.machine.sync_stream(stream.raw, deadline).map_err(|e| device.error(OP, e))
    }

    fn locate(bound: &Bound<'_, Self>, addr: usize, len: usize) -> Result<Located> {
        const OP: &str = "locate";
        let device = bound.device();
        let known = device.machine.attributes(addr).map_err(|e| device.error(OP, e))?;
        let region = Region { addr, len, place: device.place(known.residence)? };
        let allocation = match known.buffer {
            None => None,
            Some(buffer) => {
                if len > known.base + known.len - addr {
                    return Err(device.plain(Kind::InvalidRange, OP).detail(format!(
                        "{len} bytes at {addr:#x} leave the {} bytes at {:#x}",
                        known.len, known.base
                    )));
                }
                Some(Allocated { base: known.base, len: known.len, buffer })
            }
        };
        Ok(Located { region, allocation })
    }

    fn allocate(bound: &Bound<'_, Self>, len: usize) -> Result<StrictAllocation> {
        Self::allocate_kind(bound, len, MemoryKind::Normal)
    }

    unsafe fn copy(bound: &Bound<'_, Self>, to: Region, from: Region) -> Result<()> {
        const OP: &str = "copy";
        let device = bound.device();
        device.own(OP, to.place)?;
        device.own(OP, from.place)?;
        if to.len != from.len {
            return Err(device
                .plain(Kind::InvalidArgument, OP)
                .detail(format!("{} bytes into {} bytes", from.len, to.len)));
        }
        if to.len == 0 {
            return Ok(());
        }
        // SAFETY: the caller promises for both regions what the machine asks for.
        device.unspoiled(bound, OP, |machine| unsafe { machine.copy(to.addr, from.addr, to.len) })
    }

    fn export_ipc(bound: &Bound<'_, Self>, region: Region) -> Result<Export> {
        const OP: &str = "export_ipc";
        let device = bound.device();
        device.needs(device.caps().ipc_export, OP)?;
        device.own(OP, region.place)?;
        let known = device.machine.attributes(region.addr).map_err(|e| device.error(OP, e))?;
        device.own(OP, device.place(known.residence)?)?;
        // Asked before the call, since a driver says no more than "invalid value".
        let reason = match known.residence {
            Residence::Unregistered | Residence::Registered => Some(NotExportable::HostMemory),
            Residence::Imported(_) => Some(NotExportable::Imported),
            Residence::Device(_, MemoryKind::Vmm) => Some(NotExportable::NoHandleType),
            Residence::Device(_, MemoryKind::Pool) => Some(NotExportable::Pool),
            Residence::Device(_, MemoryKind::Managed) => Some(NotExportable::Managed),
            Residence::Device(_, MemoryKind::Normal | MemoryKind::VmmShareable) => None,
        };
        if let Some(reason) = reason {
            return Ok(Export::NotExportable(reason));
        }
        let offset = region.addr - known.base;
        if region.len > known.len - offset {
            return Err(device.plain(Kind::InvalidRange, OP).detail(format!(
                "offset {offset}, length {} in an allocation of {} bytes",
                region.len, known.len
            )));
        }
        let opaque = device.machine.0.spec.token == TokenForm::Opaque
            && known.residence == Residence::Device(device.logical, MemoryKind::Normal);
        let (shared, descriptors) = if opaque {
            let shared = device.machine.export_opaque(region.addr).map_err(|e| device.error(OP, e))?;
            ((shared.buffer, shared.len, Token::Opaque(shared.token.to_vec())), vec![])
        } else {
            let shared = device.machine.export_descriptor(region.addr).map_err(|e| device.error(OP, e))?;
            let token = Token::Descriptors(vec![shared.len as u64]);
            ((shared.buffer, shared.len, token), vec![shared.token])
        };
        let (buffer, len, token) = shared;
        let handle =
            IpcHandle { device: device.uuid(), buffer, exporter: std::process::id(), len: len as u64, token };
        Ok(Export::Handle(Exported { handle, descriptors, offset: offset as u64, len: region.len as u64 }))
    }

    fn import_ipc(
        bound: &Bound<'_, Self>,
        handle: &IpcHandle,
        descriptors: Vec<OwnedFd>,
    ) -> Result<StrictImport> {
        const OP: &str = "import_ipc";
        let device = bound.device();
        device.needs(device.caps().ipc_import, OP)?;
        if handle.device != device.uuid() {
            return Err(device.plain(Kind::DeviceMismatch, OP).detail(format!(
                "the handle is of device {}, this one is {}",
                handle.device,
                device.uuid()
            )));
        }
        let refused = |why: String| {
            device
                .plain(Kind::ImportRefused, OP)
                .detail(format!("{why} (buffer of process {} on device {})", handle.exporter, handle.device))
        };
        if !handle.is_well_formed(descriptors.len()) {
            return Err(refused("the handle is of no form that an exporter makes".into()));
        }
        let mut descriptors = descriptors.into_iter();
        let answer = match (&handle.token, descriptors.next(), descriptors.next()) {
            (Token::Opaque(bytes), None, None) => device.machine.import_opaque(bytes),
            (Token::Descriptors(_), Some(fd), None) => device.machine.import_descriptor(fd, handle.len),
            _ => return Err(refused("an allocation of this machine has one descriptor".into())),
        };
        let addr = answer.map_err(|e| match e.why {
            Why::Unloaded | Why::OutOfMemory => device.error(OP, e),
            // Whatever number the driver gave for it: it would not open the handle.
            _ => refused(e.text).vendor(e.code, None),
        })?;
        let import = StrictImport {
            device: device.clone(),
            region: Region { addr, len: handle.len as usize, place: Place::Device(device.uuid()) },
        };
        // An opaque token carries the length that the memory has; the handle around it may claim another.
        let known = device.machine.attributes(addr).map_err(|e| device.error(OP, e))?;
        if known.len as u64 != handle.len {
            return Err(refused(format!(
                "the handle says {} bytes, the memory has {}",
                handle.len, known.len
            )));
        }
        Ok(import)
    }

    fn register(bound: &Bound<'_, Self>, region: Region) -> Result<StrictRegistration> {
        const OP: &str = "register";
        let device = bound.device();
        let caps = device.caps();
        match region.place {
            Place::Host => device.needs(caps.register_host, OP)?,
            Place::Device(_) => device.needs(caps.register_device, OP)?,
        }
        device.own(OP, region.place)?;
        device.refuse_capture(OP, Self::current_stream(bound))?;
        // Whether host memory is known to the driver depends on whether it is registered, so it has no id to go by.
        let buffer = match region.place {
            Place::Host => None,
            Place::Device(_) => Self::locate(bound, region.addr, region.len)?.allocation.map(|a| a.buffer),
        };
        let registered = device.seat().registry.register(&Pins(device), region.addr, region.len, buffer)?;
        Ok(StrictRegistration { device: device.clone(), registered: Some(registered) })
    }
}

/// The machine's registration calls, for the registry.
struct Pins<'d>(&'d StrictDevice);

impl Pin for Pins<'_> {
    fn pin(&self, addr: usize, len: usize) -> Result<()> {
        self.0.relaxed(|machine| machine.register(addr, len)).map_err(|e| self.0.error("register", e))
    }

    fn unpin(&self, addr: usize, _len: usize) -> Result<()> {
        self.0.relaxed(|machine| machine.unregister(addr)).map_err(|e| self.0.error("unregister", e))
    }
}

/// Device memory. Freed on drop, on a bound thread where the driver asks for one.
#[derive(Debug)]
pub struct StrictAllocation {
    device: StrictDevice,
    region: Region,
}

impl Memory for StrictAllocation {
    fn region(&self) -> Region {
        self.region
    }
}

impl Drop for StrictAllocation {
    fn drop(&mut self) {
        const OP: &str = "free";
        let (device, addr) = (&self.device, self.region.addr);
        let free = || device.relaxed(|machine| machine.free(addr)).map_err(|e| device.error(OP, e));
        device.give_back(OP, free);
    }
}

/// Another process's device memory. Closed on drop, on a bound thread.
#[derive(Debug)]
pub struct StrictImport {
    device: StrictDevice,
    region: Region,
}

impl Memory for StrictImport {
    fn region(&self) -> Region {
        self.region
    }
}

impl Drop for StrictImport {
    fn drop(&mut self) {
        const OP: &str = "close_import";
        let (device, addr) = (&self.device, self.region.addr);
        device.give_back(OP, || device.machine.close_import(addr).map_err(|e| device.error(OP, e)));
    }
}

/// A registered region. Deregistered on drop, on a bound thread.
#[derive(Debug)]
pub struct StrictRegistration {
    device: StrictDevice,
    registered: Option<Registered>,
}

impl Drop for StrictRegistration {
    fn drop(&mut self) {
        let Some(registered) = self.registered.take() else { return };
        let device = &self.device;
        device.give_back("unregister", || device.seat().registry.unregister(&Pins(device), registered));
    }
}

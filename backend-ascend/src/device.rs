//! The devices of this process, and their side of the contract.

use std::{
    fmt, fs,
    os::fd::OwnedFd,
    process,
    sync::{
        OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

use hal::{
    Bound, Caps, Deadline, Device, DeviceExt, DeviceUuid, Error, Export, Identity, IpcHandle, Kind, Located,
    LogicalId, PhysicalId, Place, Region, Registry, Result,
};
use parking_lot::Mutex;

use crate::{
    AscendAllocation, AscendImport, AscendRegistration, AscendStream, BACKEND,
    copy::{self, Lanes},
    error::refused,
    exit,
    ffi::{self, Context, Driver, Refusal, UserId},
    ipc::{self, Exports},
    memory::{self, Blocks},
    register::{self, HostMemory},
    stream,
};

/// The context that a thread had before it was bound.
#[derive(Debug)]
pub struct AscendPrevious(Context);

/// One NPU as this process sees it.
///
/// All handles of a device share its primary context, which is also torch_npu's. It is obtained when the device is first
/// bound, by one `aclrtSetDevice` on a thread of the backend's own, and is never reset: ACL counts the processes' users of
/// a device, and a library cannot know that it is the last.
///
/// A framework that gives `aclInit` a configuration, as torch_npu does, has to be first: import it before a device is first
/// opened. ACL refuses a second initialisation, with 100002 where it is the same and 100000 where the configuration
/// differs. The backend gives no configuration, and goes on where ACL has been initialised already.
#[derive(Clone, Copy)]
pub struct AscendDevice {
    system: &'static System,
    card: &'static Card,
}

impl fmt::Debug for AscendDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("AscendDevice").field(&self.card.identity).finish()
    }
}

/// What all handles of one device share.
#[derive(Debug)]
struct Card {
    user: UserId,
    identity: Identity,
    caps: Caps,
    context: OnceLock<Context>,
    /// Held while the context is being obtained, so that the device is set once.
    setting: Mutex<()>,
    device_memory: Registry,
    lanes: Lanes,
    exports: Exports,
}

/// ACL as this process has it. Never torn down.
#[derive(Debug)]
struct System {
    driver: Driver,
    cards: Vec<Card>,
    blocks: Blocks,
    /// Host memory is registered for all devices together.
    host_memory: HostMemory,
    failed_drops: AtomicU64,
}

impl System {
    /// ACL, initialised by the first call.
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
        let (driver, library) = ffi::find(&ffi::configured()).map_err(|unusable| unusable.error(op))?;
        let count = driver.initialise().and_then(|()| driver.device_count());
        let count = count.map_err(|refusal| refused(&driver, op, refusal))?;
        if count == 0 {
            return Err(Error::new(Kind::NotPresent, BACKEND, op).detail(format!(
                "{library} is there, and this process sees no NPU: see ASCEND_RT_VISIBLE_DEVICES and npu-smi"
            )));
        }
        let host = host_name(op)?;
        let cards = (0..count).map(|user| Card::read(&driver, user, &host)).collect();
        Ok(System {
            driver,
            cards,
            blocks: Blocks::default(),
            host_memory: HostMemory::new(),
            failed_drops: AtomicU64::new(0),
        })
    }

    fn of_this_process(&self, op: &'static str) -> Result<&Self> {
        let (loaded, this) = (self.driver.pid(), process::id());
        if loaded == this && exit::has_begun() {
            return Err(
                Error::new(Kind::ShutDown, BACKEND, op).detail("the process is ending, and ACL with it")
            );
        }
        if loaded == this {
            return Ok(self);
        }
        Err(Error::new(Kind::Unsupported, BACKEND, op).detail(format!(
            "process {this} was forked from process {loaded} after that one had initialised ACL, which does not survive a \
             fork; start it afresh instead (in Python: the `spawn` start method)"
        )))
    }

    fn device(&'static self, user: usize) -> Option<AscendDevice> {
        self.cards.get(user).map(|card| AscendDevice { system: self, card })
    }

    /// The ids that the visible devices have in this machine.
    fn visible(&self) -> String {
        let ids = self.cards.iter().map(|card| match card.identity.physical {
            Some(id) => id.to_string(),
            None => "unknown".into(),
        });
        ids.collect::<Vec<_>>().join(", ")
    }

    fn drop_failed(&self, e: &Error) {
        self.failed_drops.fetch_add(1, Ordering::Relaxed);
        tracing::warn!(error = %e, "not given back");
    }
}

/// What names the host in every container on it, until it is started again.
fn host_name(op: &'static str) -> Result<String> {
    const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
    fs::read_to_string(BOOT_ID).map(|id| id.trim().to_owned()).map_err(|e| {
        Error::new(Kind::Driver, BACKEND, op)
            .detail(format!(
                "{BOOT_ID} cannot be read, so that no device can be told from those of other hosts"
            ))
            .with_source(e)
    })
}

impl Card {
    fn read(driver: &Driver, user: u32, host: &str) -> Self {
        let name = driver.soc_name().unwrap_or_else(|| "Ascend NPU".into());
        let id = UserId(user.cast_signed());
        let physical = driver.logic_id(id).and_then(|logic| driver.physical_id(logic));
        let physical = match physical {
            Ok(physical) => u32::try_from(physical).ok().map(PhysicalId),
            Err(refusal) => {
                tracing::warn!(
                    device = user,
                    ?refusal,
                    "this CANN does not say which NPU of the machine this is; memory is not shared with other processes"
                );
                None
            }
        };
        let uuid = match physical {
            Some(physical) => uuid_of(&[BACKEND, host, &name, &physical.to_string()]),
            // Nobody else's, so that no other process takes its own device for this one.
            None => {
                uuid_of(&[BACKEND, host, &name, &user.to_string(), "in process", &process::id().to_string()])
            }
        };
        let identity = Identity { backend: BACKEND, uuid, logical: LogicalId(user), physical, name };
        let mut caps = Caps::default();
        caps.ipc_export = physical.is_some() && (driver.has_keys() || driver.has_shareable_export());
        caps.ipc_import = physical.is_some() && (driver.has_keys() || driver.has_shareable_import());
        caps.register_host = driver.has_host_registration() && register::takes_unpinned();
        // The device's own memory is within its reach as it is; registering it is bookkeeping.
        caps.register_device = true;
        Card {
            user: id,
            identity,
            caps,
            context: OnceLock::new(),
            setting: Mutex::default(),
            device_memory: Registry::new(BACKEND, usize::MAX),
            lanes: Lanes::default(),
            exports: Exports::default(),
        }
    }
}

/// ACL gives devices no UUID, so one is made of what names a device: 128-bit FNV-1a over the parts, each with its end.
fn uuid_of(parts: &[&str]) -> DeviceUuid {
    const OFFSET: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
    let bytes = parts.iter().flat_map(|part| part.bytes().chain([0]));
    DeviceUuid(bytes.fold(OFFSET, |hash, byte| (hash ^ u128::from(byte)).wrapping_mul(PRIME)).to_be_bytes())
}

impl AscendDevice {
    /// Every device that this process can see, by user id. Initialises ACL, binds nothing.
    ///
    /// *Errors*: [`Kind::NotPresent`] without CANN, with a stub in its place, or without a device;
    /// [`Kind::Unsupported`] for a CANN that is too old, and in a child that was forked after ACL was initialised;
    /// [`Kind::ShutDown`] once the process is ending, as in every later call; else what ACL said.
    pub fn all() -> Result<Vec<Self>> {
        let system = System::get("open")?;
        Ok((0..system.cards.len()).filter_map(|user| system.device(user)).collect())
    }

    /// The device with this id, which is ACL's user id: an index into what `ASCEND_RT_VISIBLE_DEVICES` leaves.
    ///
    /// *Errors*: [`Kind::InvalidDevice`] where there is none, else as [`all`](AscendDevice::all).
    pub fn open(logical: LogicalId) -> Result<Self> {
        const OP: &str = "open";
        let system = System::get(OP)?;
        system.device(logical.0 as usize).ok_or_else(|| {
            Error::new(Kind::InvalidDevice, BACKEND, OP).on(logical).detail(format!(
                "this process sees {} devices, numbered from 0, whose physical ids are {} (ASCEND_RT_VISIBLE_DEVICES)",
                system.cards.len(),
                system.visible()
            ))
        })
    }

    /// The device with this UUID, which is made of the host, the model and the physical id: every process on the host
    /// names the device by the same one, in whatever container and whatever it can see, until the host is started again.
    ///
    /// *Errors*: [`Kind::InvalidDevice`] where this process sees none, else as [`all`](AscendDevice::all).
    pub fn with_uuid(uuid: DeviceUuid) -> Result<Self> {
        const OP: &str = "open";
        let system = System::get(OP)?;
        let user = system.cards.iter().position(|card| card.identity.uuid == uuid);
        user.and_then(|user| system.device(user)).ok_or_else(|| {
            Error::new(Kind::InvalidDevice, BACKEND, OP)
                .detail(format!("this process does not see {uuid} (ASCEND_RT_VISIBLE_DEVICES)"))
        })
    }

    /// The `len` bytes at a raw device pointer, such as torch_npu's `data_ptr()`, as memory of this device. No driver
    /// call: whoever takes the region checks where it lives.
    pub fn region(&self, pointer: usize, len: usize) -> Region {
        Region { addr: pointer, len, place: Place::Device(self.uuid()) }
    }

    /// How many distinct regions are registered: of this device's memory, and of host memory, which all devices share.
    pub fn registrations(&self) -> usize {
        self.card.device_memory.len() + self.host_memory().len()
    }

    /// How often, in this process, ACL refused to take something back while it was dropped. Each was logged.
    pub fn failed_drops(&self) -> u64 {
        self.system.failed_drops.load(Ordering::Relaxed)
    }

    pub(crate) fn driver(&self) -> &'static Driver {
        &self.system.driver
    }

    pub(crate) fn uuid(&self) -> DeviceUuid {
        self.card.identity.uuid
    }

    /// The number by which ACL knows the device in this process.
    pub(crate) fn user(&self) -> UserId {
        self.card.user
    }

    /// The device that ACL named.
    pub(crate) fn uuid_of(&self, user: UserId) -> Option<DeviceUuid> {
        self.system.cards.iter().find(|card| card.user == user).map(|card| card.identity.uuid)
    }

    pub(crate) fn device_memory(&self) -> &'static Registry {
        &self.card.device_memory
    }

    pub(crate) fn host_memory(&self) -> &'static HostMemory {
        &self.system.host_memory
    }

    pub(crate) fn blocks(&self) -> &'static Blocks {
        &self.system.blocks
    }

    pub(crate) fn lanes(&self) -> &'static Lanes {
        &self.card.lanes
    }

    pub(crate) fn exports(&self) -> &'static Exports {
        &self.card.exports
    }

    /// An error of this device.
    pub(crate) fn plain(&self, kind: Kind, op: &'static str) -> Error {
        Error::new(kind, BACKEND, op).on(self.card.identity.logical)
    }

    /// The error of a call that ACL refused.
    pub(crate) fn refused(&self, op: &'static str, refusal: Refusal) -> Error {
        refused(self.driver(), op, refusal).on(self.card.identity.logical)
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
        let relaxed = device.relaxed();
        stream::refuse_capture(device, op, Self::current_stream(bound))?;
        Ok(relaxed)
    }

    /// While the guard lives, the thread's calls spoil nobody's capture. A CANN without the call has no such captures.
    pub(crate) fn relaxed(&self) -> Relaxed {
        let driver = self.driver();
        let mode = driver.relax_capture_mode();
        let mode = mode.inspect_err(|refusal| tracing::debug!(?refusal, "capture mode not relaxed")).ok();
        Relaxed { driver, mode }
    }

    /// Gives back what a guard held, with the device current. What cannot be given back is logged and counted.
    pub(crate) fn give_back(&self, op: &'static str, call: impl FnOnce(&Driver) -> Result<()> + Send) {
        // A forked child has a copy of the guard, and the parent gives back what it stands for. At the end of the process
        // ACL does.
        if self.system.of_this_process(op).is_err() {
            return;
        }
        let outcome = self.bound(|_| {
            let _relaxed = self.relaxed();
            call(self.driver())
        });
        if let Err(e) = outcome {
            self.system.drop_failed(&e);
        }
    }

    /// The primary context, obtained by the first call.
    fn context(&self, op: &'static str) -> Result<Context> {
        self.system.of_this_process(op)?;
        if let Some(context) = self.card.context.get() {
            return Ok(*context);
        }
        let _setting = self.card.setting.lock();
        if let Some(context) = self.card.context.get() {
            return Ok(*context);
        }
        let context = self.set_device(op)?;
        Ok(*self.card.context.get_or_init(|| context))
    }

    /// Sets the device, on a thread that ends at once: it would stay on the caller's.
    fn set_device(&self, op: &'static str) -> Result<Context> {
        let driver = self.driver();
        let set = || {
            driver.set_device(self.user()).map_err(|refusal| self.refused(op, refusal))?;
            let context = driver.current().map_err(|refusal| self.refused(op, refusal))?;
            // What opening the device had the exit call stands in the list now.
            exit::watch();
            context
                .ok_or_else(|| self.plain(Kind::NotBound, op).detail("the device was set and has no context"))
        };
        thread::scope(|scope| {
            let name = format!("haulier-{}", self.card.identity);
            let thread = thread::Builder::new().name(name).spawn_scoped(scope, set);
            let thread = thread.map_err(|e| self.plain(Kind::OutOfMemory, "start_thread").with_source(e))?;
            thread.join().unwrap_or_else(|_| Err(self.plain(Kind::Driver, op).detail("its thread panicked")))
        })
    }
}

/// The calling thread's calls spoil nobody's capture; dropping it restores the mode.
#[derive(Debug)]
pub(crate) struct Relaxed {
    driver: &'static Driver,
    mode: Option<i32>,
}

impl Drop for Relaxed {
    fn drop(&mut self) {
        let Some(mode) = self.mode.filter(|_| !exit::has_begun()) else { return };
        if let Err(refusal) = self.driver.restore_capture_mode(mode) {
            tracing::warn!(error = %refused(self.driver, "restore", refusal), "capture mode not restored");
        }
    }
}

impl Device for AscendDevice {
    type Stream = AscendStream;
    type Previous = AscendPrevious;
    type Allocation = AscendAllocation;
    type Registration = AscendRegistration;
    type Import = AscendImport;

    fn identity(&self) -> &Identity {
        &self.card.identity
    }

    fn caps(&self) -> Caps {
        self.card.caps
    }

    fn bind_current(&self) -> Result<Bound<'_, Self>> {
        const OP: &str = "bind_current";
        let (driver, context) = (self.driver(), self.context(OP)?);
        match driver.current().map_err(|refusal| self.refused(OP, refusal))? {
            // SAFETY: ACL just said that the context is current here.
            Some(current) if current == context => Ok(unsafe { Bound::new(self, None) }),
            Some(previous) => {
                driver.set_current(context).map_err(|refusal| self.refused(OP, refusal))?;
                // SAFETY: just made current.
                Ok(unsafe { Bound::new(self, Some(AscendPrevious(previous))) })
            }
            // ACL takes a context away from no thread.
            None => Err(self
                .plain(Kind::CannotRestore, OP)
                .detail("it has no context, and ACL cannot take one away")),
        }
    }

    fn bind_owned_thread(&self) -> Result<Bound<'_, Self>> {
        const OP: &str = "bind_owned_thread";
        let context = self.context(OP)?;
        self.driver().set_current(context).map_err(|refusal| self.refused(OP, refusal))?;
        // SAFETY: just made current.
        Ok(unsafe { Bound::new(self, None) })
    }

    unsafe fn restore(&self, AscendPrevious(previous): AscendPrevious) {
        // In a forked child, and at the end of the process, there is nothing to restore.
        if self.system.of_this_process("restore").is_err() {
            return;
        }
        if let Err(refusal) = self.driver().set_current(previous) {
            self.system.drop_failed(&self.refused("restore", refusal));
        }
    }

    fn current_stream(bound: &Bound<'_, Self>) -> AscendStream {
        hal::named_stream(bound.device()).unwrap_or(AscendStream::DEFAULT)
    }

    fn is_per_thread(_stream: AscendStream) -> bool {
        false
    }

    fn sync_stream(bound: &Bound<'_, Self>, stream: AscendStream, deadline: Deadline) -> Result<()> {
        stream::sync(bound.device(), stream, deadline)
    }

    fn locate(bound: &Bound<'_, Self>, addr: usize, len: usize) -> Result<Located> {
        memory::locate(bound.device(), "locate", addr, len)
    }

    fn allocate(bound: &Bound<'_, Self>, len: usize) -> Result<AscendAllocation> {
        AscendAllocation::new(bound, len)
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
    ) -> Result<AscendImport> {
        ipc::import(bound.device(), handle, &descriptors)
    }

    /// CANN wants every import closed before the export, and the export before the memory is freed.
    fn imports_may_linger(&self) -> bool {
        false
    }

    fn register(bound: &Bound<'_, Self>, region: Region) -> Result<AscendRegistration> {
        register::register(bound, region)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_tells_hosts_models_and_devices_apart_and_nothing_else() {
        let uuid = |host, name, physical: &str| uuid_of(&[BACKEND, host, name, physical]);
        let all = [
            uuid("a", "Ascend910B3", "1"),
            uuid("a", "Ascend910B3", "2"),
            uuid("b", "Ascend910B3", "1"),
            uuid("a", "Ascend910B31", ""),
            uuid("a", "Ascend910C", "1"),
        ];
        for (i, one) in all.iter().enumerate() {
            assert!(all[i + 1..].iter().all(|other| other != one));
        }
        assert_eq!(all[0], uuid("a", "Ascend910B3", "1"));
    }
}

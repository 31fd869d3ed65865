//! The machine, the way that every call takes, and which device is current on which thread.

use std::{
    cell::RefCell,
    collections::HashMap,
    ops::Deref,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
};

use hal::{Deadline, DeviceUuid, Error, Identity, Kind, LogicalId, PhysicalId, Registry, Result};
use parking_lot::Mutex;

use super::{
    builder::{Builder, DefaultDevice},
    capture::CaptureMode,
    device::StrictDevice,
    faults::{Fate, Faults},
    log::{Argument, Log, Op, Outcome},
    memory::{Block, Memory},
    refusal::{Answer, Dialect, Refusal, Why},
    register::Pins,
    stream::Streams,
};
use crate::device::derive_uuid;

/// The backend's name.
pub(super) const BACKEND: &str = "strict";

/// A simulated machine as one process sees it. Cloning gives the same machine.
///
/// The methods that a driver has too are *calls*: they are logged, obey the fault plan, and refuse as a driver does.
/// The others are the test's: they are neither logged nor refused for want of a current device.
#[derive(Debug, Clone)]
pub struct Machine(pub(super) Arc<Inner>);

/// The machine's owner. Dropping it lets every hanging call and every held stream go on, so that a test that fails ends
/// all the same.
#[derive(Debug)]
pub struct MachineOwner(Machine);

#[derive(Debug)]
pub(super) struct Inner {
    /// Tells the machines of one process apart.
    id: u64,
    pub(super) spec: Builder,
    /// By logical id.
    pub(super) devices: Vec<Seat>,
    pub(super) memory: Mutex<Memory>,
    pub(super) streams: Mutex<Streams>,
    pub(super) pins: Mutex<Pins>,
    log: Log,
    faults: Faults,
    unloaded: AtomicBool,
    drop_failures: AtomicU64,
}

/// A visible device.
#[derive(Debug)]
pub(super) struct Seat {
    pub(super) identity: Identity,
    pub(super) physical: u32,
    retained: AtomicU64,
    /// What [`StrictDevice`] has registered.
    pub(super) registry: Registry,
}

/// What a machine knows of one thread.
#[derive(Default)]
struct Thread {
    /// The current device is the last one.
    devices: Vec<u32>,
    capture_mode: CaptureMode,
}

thread_local! {
    static THREADS: RefCell<HashMap<u64, Thread>> = RefCell::default();
}

impl Machine {
    /// Begins to build a machine.
    pub fn builder() -> Builder {
        Builder::default()
    }

    pub(super) fn assemble(spec: Builder) -> Result<MachineOwner> {
        static LAST: AtomicU64 = AtomicU64::new(0);
        let visible = spec.visible.clone().unwrap_or_else(|| (0..spec.physical).collect());
        let memory = Memory::reserve(visible.len(), spec.memory).map_err(|e| {
            Error::new(Kind::OutOfMemory, BACKEND, "build")
                .vendor(e.raw_os_error(), Some(&e.to_string()))
                .detail(format!("no room for {} times {} bytes of addresses", visible.len(), spec.memory))
        })?;
        let seat = |(logical, &physical): (usize, &u32)| Seat {
            identity: Identity {
                backend: BACKEND,
                uuid: Machine::uuid_of(spec.seed, physical),
                logical: LogicalId(logical as u32),
                physical: Some(PhysicalId(physical)),
                name: format!("simulated device {physical}"),
            },
            physical,
            retained: AtomicU64::new(0),
            registry: Registry::new(BACKEND, spec.register_max),
        };
        Ok(MachineOwner(Machine(Arc::new(Inner {
            id: LAST.fetch_add(1, Ordering::Relaxed),
            devices: visible.iter().enumerate().map(seat).collect(),
            memory: Mutex::new(memory),
            streams: Mutex::default(),
            pins: Mutex::default(),
            log: Log::default(),
            faults: Faults::default(),
            unloaded: AtomicBool::new(false),
            drop_failures: AtomicU64::new(0),
            spec,
        }))))
    }

    /// The device with this logical id.
    ///
    /// *Errors*: [`Kind::InvalidDevice`], naming the visible devices, and saying so where the id is a physical one.
    pub fn device(&self, logical: LogicalId) -> Result<StrictDevice> {
        match self.seat(logical.0) {
            Ok(_) => Ok(StrictDevice::new(self.clone(), logical.0)),
            Err(refusal) => Err(refusal.error("open", logical.0)),
        }
    }

    /// All visible devices.
    pub fn devices(&self) -> Vec<StrictDevice> {
        (0..self.device_count()).map(|logical| StrictDevice::new(self.clone(), logical)).collect()
    }

    /// How many devices are visible.
    pub fn device_count(&self) -> u32 {
        self.0.devices.len() as u32
    }

    /// The UUID of a device of the machine with this seed, also where the process does not see it.
    pub fn uuid_of(seed: u64, physical: u32) -> DeviceUuid {
        derive_uuid(&[b"haulier/strict", &seed.to_le_bytes(), &physical.to_le_bytes()])
    }

    /// A device's identity on the wire.
    pub fn uuid(&self, device: u32) -> Answer<DeviceUuid> {
        Ok(self.seat(device)?.identity.uuid)
    }

    /// A device's physical id.
    pub fn physical(&self, device: u32) -> Answer<u32> {
        Ok(self.seat(device)?.physical)
    }

    /// The logical id of the device with this physical id, where it is visible.
    pub fn logical(&self, physical: u32) -> Option<u32> {
        self.0.devices.iter().position(|seat| seat.physical == physical).map(|at| at as u32)
    }

    /// Whose numbers it speaks.
    pub fn dialect(&self) -> Dialect {
        self.0.spec.dialect
    }

    /// The calls so far.
    pub fn log(&self) -> &Log {
        &self.0.log
    }

    /// The fault plan.
    pub fn faults(&self) -> &Faults {
        &self.0.faults
    }

    /// Unloads the driver, as at process exit: from now on every call is refused.
    pub fn shut_down(&self) {
        self.0.unloaded.store(true, Ordering::SeqCst);
    }

    /// Whether the driver is unloaded.
    pub fn is_shut_down(&self) -> bool {
        self.0.unloaded.load(Ordering::SeqCst)
    }

    /// How often a guard of [`StrictDevice`] could not give back what it held, other than after
    /// [`shut_down`](Machine::shut_down).
    pub fn drop_failures(&self) -> u64 {
        self.0.drop_failures.load(Ordering::Relaxed)
    }

    pub(super) fn count_drop_failure(&self) {
        self.0.drop_failures.fetch_add(1, Ordering::Relaxed);
    }

    // ---- calls: who is current ----

    /// Makes `device` current on the calling thread, in place of the one before.
    pub fn bind(&self, device: u32) -> Answer<()> {
        self.call(Op::Bind, Argument::Device(device), || {
            self.seat(device)?;
            self.set(device);
            Ok(())
        })
    }

    /// Takes the current device away from the calling thread.
    pub fn unbind(&self) -> Answer<()> {
        self.call(Op::Unbind, Argument::None, || {
            if self.0.spec.no_unbind {
                return Err(self.refuse(Why::CannotUnset, "this driver does not take a thread's device away"));
            }
            self.thread(|thread| thread.devices.pop());
            Ok(())
        })
    }

    /// Makes `device` current above the one before.
    pub fn push(&self, device: u32) -> Answer<()> {
        self.call(Op::Push, Argument::Device(device), || {
            self.seat(device)?;
            self.thread(|thread| thread.devices.push(device));
            Ok(())
        })
    }

    /// Goes back to the device before, and answers with the one taken away.
    pub fn pop(&self) -> Answer<u32> {
        self.call(Op::Pop, Argument::None, || {
            self.thread(|thread| thread.devices.pop()).flatten().ok_or_else(|| self.no_context())
        })
    }

    /// The calling thread's device, if it has one. Binds nothing, whatever the modes.
    pub fn current(&self) -> Answer<Option<u32>> {
        self.call(Op::Current, Argument::None, || Ok(self.here()))
    }

    /// The number of the calling thread's device. On a thread without one the answer depends on
    /// [`DefaultDevice`], so it is no test for having one.
    pub fn current_device(&self) -> Answer<u32> {
        self.call(Op::CurrentDevice, Argument::None, || match (self.here(), self.0.spec.default_device) {
            (Some(device), _) => Ok(device),
            (None, DefaultDevice::None) => Err(self.no_context()),
            (None, DefaultDevice::AnswersZero | DefaultDevice::BindsZero) => Ok(0),
        })
    }

    /// Takes one reference to a device. Makes nothing current.
    pub fn retain(&self, device: u32) -> Answer<()> {
        self.call(Op::Retain, Argument::Device(device), || {
            self.seat(device)?.retained.fetch_add(1, Ordering::Relaxed);
            Ok(())
        })
    }

    /// Gives one reference back.
    pub fn release_device(&self, device: u32) -> Answer<()> {
        self.call(Op::Release, Argument::Device(device), || {
            let one_less = |count: u64| count.checked_sub(1);
            self.seat(device)?
                .retained
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less)
                .map_err(|_| self.refuse(Why::InvalidValue, "the device is not retained"))?;
            Ok(())
        })
    }

    /// How many references a device has.
    pub fn retained(&self, device: u32) -> Answer<u64> {
        Ok(self.seat(device)?.retained.load(Ordering::Relaxed))
    }

    /// Takes from a device everything that a context holds: memory, imports, streams, registrations. What is mapped as
    /// virtual memory stays. No call: a driver does it when a context ends.
    pub fn reset_device(&self, device: u32) -> Answer<()> {
        self.seat(device)?;
        self.0.streams.lock().forget(device);
        self.0.pins.lock().forget(device);
        let mut memory = self.0.memory.lock();
        let of_context = |block: &&Arc<Block>| block.device == device && block.mapped.is_none();
        let bases: Vec<usize> = memory.blocks.values().filter(of_context).map(|block| block.base).collect();
        memory.imports.retain(|_, (base, _)| !bases.contains(base));
        bases.into_iter().for_each(|base| self.displace(&mut memory, base));
        Ok(())
    }

    // ---- what every call is made of ----

    /// A call: logged, refused when unloaded, subject to the fault plan.
    pub(super) fn call<T>(&self, op: Op, argument: Argument, body: impl FnOnce() -> Answer<T>) -> Answer<T> {
        self.call_until(op, argument, Deadline::NEVER, body)
    }

    /// A call that has a deadline of its own.
    pub(super) fn call_until<T>(
        &self,
        op: Op,
        argument: Argument,
        deadline: Deadline,
        body: impl FnOnce() -> Answer<T>,
    ) -> Answer<T> {
        let number = self.0.log.begin(op, argument, self.here(), self.owner(argument));
        let answer = if self.is_shut_down() {
            Err(self.refuse(Why::Unloaded, "the driver is unloaded"))
        } else {
            match self.0.faults.meet(op, deadline) {
                Fate::Go => body(),
                Fate::Late => Err(self.refuse(Why::NotReady, "the call hung until its deadline")),
                Fate::Fail(code) => Err(Refusal {
                    why: self.dialect().why(code),
                    code,
                    text: format!("injected failure of {}", op.name()),
                }),
            }
        };
        let outcome = answer.as_ref().map_or_else(|refusal| Outcome::Failed(refusal.code), |_| Outcome::Done);
        self.0.log.end(number, outcome);
        answer
    }

    pub(super) fn refuse(&self, why: Why, text: impl Into<String>) -> Refusal {
        Refusal { why, code: self.dialect().code(why), text: text.into() }
    }

    /// The current device of a call that needs one.
    pub(super) fn context(&self) -> Answer<u32> {
        match self.here() {
            Some(device) => Ok(device),
            None if self.0.spec.default_device == DefaultDevice::BindsZero => {
                self.set(0);
                Ok(0)
            }
            None => Err(self.no_context()),
        }
    }

    /// The calling thread's device. Not a call.
    pub(super) fn here(&self) -> Option<u32> {
        self.thread(|thread| thread.devices.last().copied()).flatten()
    }

    pub(super) fn capture_mode(&self) -> CaptureMode {
        self.thread(|thread| thread.capture_mode).unwrap_or_default()
    }

    pub(super) fn replace_capture_mode(&self, mode: CaptureMode) -> CaptureMode {
        self.thread(|thread| std::mem::replace(&mut thread.capture_mode, mode)).unwrap_or_default()
    }

    pub(super) fn seat(&self, device: u32) -> Answer<&Seat> {
        self.0.devices.get(device as usize).ok_or_else(|| {
            let physical: Vec<u32> = self.0.devices.iter().map(|seat| seat.physical).collect();
            let hint = match self.logical(device) {
                Some(logical) => format!("; {device} is a physical id, its logical id is {logical}"),
                None => String::new(),
            };
            self.refuse(
                Why::InvalidDevice,
                format!(
                    "no device {device}: visible are the logical ids 0 to {}, \
                     which are the physical ids {physical:?}{hint}",
                    physical.len() - 1
                ),
            )
        })
    }

    fn set(&self, device: u32) {
        self.thread(|thread| match thread.devices.last_mut() {
            Some(current) => *current = device,
            None => thread.devices.push(device),
        });
    }

    fn no_context(&self) -> Refusal {
        let thread = thread::current();
        let name = thread.name().unwrap_or("without a name");
        self.refuse(Why::NoContext, format!("thread {name} has no current device"))
    }

    /// `None` while the thread is being torn down; it has no current device then.
    fn thread<R>(&self, look: impl FnOnce(&mut Thread) -> R) -> Option<R> {
        THREADS.try_with(|threads| look(threads.borrow_mut().entry(self.0.id).or_default())).ok()
    }

    fn owner(&self, argument: Argument) -> Option<u32> {
        match argument {
            Argument::Address(addr) => self.0.memory.lock().owner(addr),
            Argument::Stream(stream) => self.0.streams.lock().owner(stream),
            Argument::None | Argument::Device(_) | Argument::Event(_) | Argument::Handle(_) => None,
        }
    }
}

impl MachineOwner {
    /// A handle to the machine.
    pub fn machine(&self) -> Machine {
        self.0.clone()
    }
}

impl Deref for MachineOwner {
    type Target = Machine;

    fn deref(&self) -> &Machine {
        &self.0
    }
}

impl Drop for MachineOwner {
    fn drop(&mut self) {
        self.faults().end();
        self.release_all();
    }
}

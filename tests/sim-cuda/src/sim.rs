//! The one simulated driver of a process.

use std::{
    process,
    sync::{
        OnceLock,
        atomic::{AtomicU32, Ordering},
    },
};

use backend_cpu::strict::{Dialect, Machine, MachineOwner};
use parking_lot::Mutex;

use crate::{
    abi::{Answer, refused, status},
    context::Contexts,
    event::Events,
    faults::Faults,
    host::Pinned,
    log::{About, Log},
    pointer::PointerFlags,
    settings::{Mode, Settings},
    stream::StreamTable,
};

/// Everything that the driver knows.
#[derive(Debug)]
pub(crate) struct Sim {
    pub(crate) settings: Settings,
    /// `None` where no device is visible. Never dropped.
    owner: Option<MachineOwner>,
    mode: Mutex<Mode>,
    /// The process in which `cuInit` succeeded, 0 before: a forked child inherits a driver that does not work.
    pub(crate) initialised_by: AtomicU32,
    pub(crate) log: Log,
    pub(crate) faults: Faults,
    pub(crate) contexts: Contexts,
    pub(crate) streams: StreamTable,
    pub(crate) events: Events,
    pub(crate) pinned: Pinned,
    pub(crate) pointer_flags: PointerFlags,
}

static SIM: OnceLock<Result<Sim, String>> = OnceLock::new();

unsafe extern "C" {
    safe fn atexit(run: extern "C" fn()) -> i32;
}

extern "C" fn unload() {
    if let Ok(sim) = Sim::get() {
        sim.set_mode(Mode::Always(status::DEINITIALIZED));
    }
}

impl Sim {
    /// The driver, which the first call makes; or what is wrong with its environment.
    pub(crate) fn get() -> Result<&'static Sim, &'static str> {
        SIM.get_or_init(Sim::new).as_ref().map_err(String::as_str)
    }

    fn new() -> Result<Sim, String> {
        let settings = Settings::read()?;
        let faults = Faults::new(settings.unblock.clone());
        faults.add(&settings.faults).map_err(|e| format!("HAULIER_SIM_FAULTS: {e}"))?;
        let owner = match settings.visible.len() {
            0 => None,
            _ => Some(
                Machine::builder()
                    .dialect(Dialect::Cuda)
                    .devices(settings.devices)
                    .visible(settings.visible.clone())
                    .seed(settings.seed)
                    .memory(settings.memory)
                    .refuse_own_process_import()
                    .legacy_order()
                    .register_max(settings.register_max)
                    .register_alignment(settings.register_alignment)
                    .build()
                    .map_err(|e| e.to_string())?,
            ),
        };
        Ok(Sim {
            owner,
            mode: Mutex::new(settings.mode),
            initialised_by: AtomicU32::new(0),
            log: Log::new(settings.log.as_deref(), "cuda")?,
            faults,
            contexts: Contexts::new(settings.visible.len()),
            streams: StreamTable::default(),
            events: Events::default(),
            pinned: Pinned::default(),
            pointer_flags: PointerFlags::default(),
            settings,
        })
    }

    /// What `cuInit` does.
    pub(crate) fn initialise(&self) -> Answer {
        if self.owner.is_none() || self.mode() == Mode::NoDevice {
            return refused(status::NO_DEVICE, "no device is visible");
        }
        if self.initialised_by.swap(process::id(), Ordering::SeqCst) == 0 {
            // The driver unloads itself when the process exits; destructors that run later meet that.
            atexit(unload);
        }
        Ok(())
    }

    pub(crate) fn mode(&self) -> Mode {
        *self.mode.lock()
    }

    pub(crate) fn set_mode(&self, mode: Mode) {
        *self.mode.lock() = mode;
    }

    /// The machine behind it.
    pub(crate) fn machine(&self) -> Answer<&Machine> {
        match &self.owner {
            Some(owner) => Ok(owner),
            None => refused(status::NO_DEVICE, "no device is visible"),
        }
    }

    /// The device whose context is current on the thread, for the log.
    pub(crate) fn here(&self) -> Option<u32> {
        self.contexts.top().and_then(|context| self.contexts.device_of(context))
    }

    /// The device that something is of, for the log.
    pub(crate) fn owner(&self, about: About) -> Option<u32> {
        let machine = self.owner.as_ref()?;
        match about {
            About::Address(address) => {
                let address = usize::try_from(address).ok()?;
                machine.owner_of_address(address).or_else(|| self.pinned.device_of(address))
            }
            About::Stream(stream) => machine.owner_of_stream(stream),
            About::Event(event) => self.events.device_of(event),
            About::Context(context) => self.contexts.device_of(context),
            About::Device(device) => u32::try_from(device).ok(),
            About::Nothing | About::Handle(_) => None,
        }
    }
}

/// An address of the machine's from the driver's type for it.
pub(crate) fn address(pointer: u64) -> Answer<usize> {
    usize::try_from(pointer).or_else(|_| refused(status::INVALID_VALUE, "an address too large"))
}

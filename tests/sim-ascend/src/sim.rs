//! The one simulated runtime of a process.

use std::{
    process,
    sync::{
        OnceLock,
        atomic::{AtomicU32, Ordering},
    },
};

use backend_cpu::strict::{Dialect, Machine, MachineOwner};
use haulier_sim::{
    faults::Faults,
    log::{About, Log},
};
use parking_lot::Mutex;

use crate::{
    abi::{Answer, refused, status},
    adxl::Engines,
    context::Contexts,
    event::Events,
    host::Pinned,
    init::Init,
    ipc::Shared,
    settings::{Mode, Settings},
    stream::StreamTable,
    vmm::Space,
};

/// Everything that the runtime knows.
#[derive(Debug)]
pub(crate) struct Sim {
    pub(crate) settings: Settings,
    /// `None` where no device is visible. Never dropped.
    owner: Option<MachineOwner>,
    mode: Mutex<Mode>,
    /// The process that opened a device first, 0 before: a forked child inherits a runtime that does not work.
    pub(crate) opened_by: AtomicU32,
    pub(crate) log: Log,
    pub(crate) faults: Faults,
    pub(crate) init: Init,
    pub(crate) contexts: Contexts,
    pub(crate) streams: StreamTable,
    pub(crate) events: Events,
    pub(crate) pinned: Pinned,
    pub(crate) shared: Shared,
    pub(crate) space: Space,
    pub(crate) engines: Engines,
}

static SIM: OnceLock<Result<Sim, String>> = OnceLock::new();

unsafe extern "C" {
    safe fn atexit(run: extern "C" fn()) -> i32;
}

extern "C" fn unload() {
    if let Ok(sim) = Sim::get() {
        sim.set_mode(Mode::Always(status::INTERNAL));
    }
}

impl Sim {
    /// The runtime, which the first call makes; or what is wrong with its environment.
    pub(crate) fn get() -> Result<&'static Sim, &'static str> {
        SIM.get_or_init(Sim::new).as_ref().map_err(String::as_str)
    }

    fn new() -> Result<Sim, String> {
        let settings = Settings::read()?;
        let faults = Faults::new(settings.unblock.clone());
        faults.add(&settings.faults).map_err(|e| format!("HAULIER_SIM_FAULTS: {e}"))?;
        let physical: Vec<u32> =
            settings.visible.iter().map(|&logical| settings.logical[logical as usize]).collect();
        let owner = match physical.len() {
            0 => None,
            _ => {
                let builder = Machine::builder()
                    .dialect(Dialect::Acl)
                    .devices(settings.devices)
                    .visible(physical)
                    .seed(settings.seed)
                    .memory(settings.memory)
                    .alignment(64)
                    .refuse_own_process_import();
                let builder = if settings.peer { builder.peer_import() } else { builder };
                Some(builder.build().map_err(|e| e.to_string())?)
            }
        };
        Ok(Sim {
            owner,
            mode: Mutex::new(settings.mode),
            opened_by: AtomicU32::new(0),
            log: Log::new(settings.log.as_deref(), "ascend")?,
            faults,
            init: Init::default(),
            contexts: Contexts::new(settings.visible.len()),
            streams: StreamTable::default(),
            events: Events::default(),
            pinned: Pinned::default(),
            shared: Shared::default(),
            space: Space::default(),
            engines: Engines::default(),
            settings,
        })
    }

    /// The process opens a device.
    pub(crate) fn open(&self) {
        if self.opened_by.swap(process::id(), Ordering::SeqCst) == 0 {
            // The runtime ends with the process; destructors that run later meet that.
            atexit(unload);
        }
    }

    /// Whether the process has opened a device.
    pub(crate) fn is_open(&self) -> bool {
        self.opened_by.load(Ordering::SeqCst) != 0
    }

    pub(crate) fn mode(&self) -> Mode {
        *self.mode.lock()
    }

    pub(crate) fn set_mode(&self, mode: Mode) {
        *self.mode.lock() = mode;
    }

    /// Whether it is CANN 9 or newer.
    pub(crate) fn is_9(&self) -> bool {
        self.settings.cann.major >= 9
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
        self.contexts.current().and_then(|context| self.contexts.device_of(context))
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

/// An address of the machine's from the caller's pointer.
pub(crate) fn address(pointer: u64) -> Answer<usize> {
    usize::try_from(pointer).or_else(|_| refused(status::PARAMETER, "an address too large"))
}

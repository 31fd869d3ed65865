//! Contexts: each thread has two slots, one for a context that was set or created and one for a device whose primary
//! context it shares. Filling one empties the other. Primary contexts are counted by `aclrtSetDevice`, call by call.

use std::cell::Cell;

use haulier_sim::log::About;
use parking_lot::Mutex;

use crate::{
    abi::{Answer, Out, null, refused, runtime, status},
    sim::Sim,
};

/// Handles start here: nothing that could be taken for an address.
const FIRST: u64 = 0xacc0_0000_0000;
const STEP: u64 = 0x100;

/// One context. Its handle keeps its meaning when it is destroyed.
#[derive(Debug)]
struct Context {
    device: u32,
    live: bool,
    /// What a null stream means, once somebody used it.
    default_stream: Option<u64>,
}

/// The contexts of a process; the first ones are the devices' primary contexts.
#[derive(Debug)]
pub(crate) struct Contexts {
    table: Mutex<Vec<Context>>,
    devices: usize,
}

/// A thread's slots. At most one is filled.
#[derive(Debug, Clone, Copy, Default)]
struct Slots {
    explicit: Option<u64>,
    primary: Option<u32>,
}

thread_local! {
    static SLOTS: Cell<Slots> = const { Cell::new(Slots { explicit: None, primary: None }) };
}

impl Contexts {
    pub(crate) fn new(devices: usize) -> Self {
        let primary = |device| Context { device, live: false, default_stream: None };
        Contexts { table: Mutex::new((0..devices as u32).map(primary).collect()), devices }
    }

    /// The thread's current context, whether it still exists or not.
    pub(crate) fn current(&self) -> Option<u64> {
        let slots = SLOTS.try_with(Cell::get).unwrap_or_default();
        slots.explicit.or(slots.primary.map(|device| self.primary(device)))
    }

    pub(crate) fn device_of(&self, context: u64) -> Option<u32> {
        self.table.lock().get(self.index(context)?).map(|context| context.device)
    }

    fn primary(&self, device: u32) -> u64 {
        FIRST + u64::from(device) * STEP
    }

    fn index(&self, context: u64) -> Option<usize> {
        let offset = context.checked_sub(FIRST)?;
        offset.is_multiple_of(STEP).then(|| usize::try_from(offset / STEP).ok()).flatten()
    }

    fn is_primary(&self, context: u64) -> bool {
        self.index(context).is_some_and(|at| at < self.devices)
    }

    /// The device of a context that exists.
    fn live(&self, context: u64) -> Answer<u32> {
        let table = self.table.lock();
        match self.index(context).and_then(|at| table.get(at)) {
            Some(context) if context.live => Ok(context.device),
            Some(_) => refused(status::NO_CONTEXT, "the context is destroyed, or its device not set yet"),
            None => refused(status::NO_CONTEXT, format!("{context:#x} is no context")),
        }
    }

    fn with<R>(&self, context: u64, look: impl FnOnce(&mut Context) -> R) -> Option<R> {
        let mut table = self.table.lock();
        self.index(context).and_then(|at| table.get_mut(at)).map(look)
    }

    /// A device's contexts that exist.
    fn of_device(&self, device: u32) -> Vec<u64> {
        let table = self.table.lock();
        let live = (FIRST..).step_by(STEP as usize).zip(table.iter());
        live.filter(|(_, context)| context.live && context.device == device)
            .map(|(handle, _)| handle)
            .collect()
    }
}

impl Sim {
    /// The current context and its device, for a call that needs one. On a thread without one it is refused, or the
    /// default device is silently bound where the process was initialised with one.
    pub(crate) fn context(&self) -> Answer<(u64, u32)> {
        match (self.contexts.current(), self.init.default_device()) {
            (Some(context), _) => {
                let device = self.contexts.live(context)?;
                // Another thread may have destroyed and made it anew since this one looked.
                self.follow()?;
                Ok((context, device))
            }
            (None, Some(device)) => {
                self.set_device(device)?;
                self.context()
            }
            (None, None) => refused(status::NO_CONTEXT, "the thread has no current context"),
        }
    }

    /// What a null stream means in the current context.
    pub(crate) fn default_stream(&self) -> Answer<u64> {
        let (context, _) = self.context()?;
        if let Some(Some(stream)) = self.contexts.with(context, |context| context.default_stream) {
            return Ok(stream);
        }
        let made = self.machine()?.create_stream()?;
        let kept = self.contexts.with(context, |context| *context.default_stream.get_or_insert(made));
        match kept {
            // Another thread was first.
            Some(kept) if kept != made => self.machine()?.destroy_stream(made)?,
            _ => self.streams.add(made, context, 0),
        }
        Ok(kept.unwrap_or(made))
    }

    /// Whether a stream is some context's default stream.
    pub(crate) fn is_default_stream(&self, stream: u64) -> bool {
        self.contexts.table.lock().iter().any(|context| context.default_stream == Some(stream))
    }

    /// Makes the machine's current device that of the current context.
    fn follow(&self) -> Answer {
        let machine = self.machine()?;
        let device = self.contexts.current().and_then(|context| self.contexts.live(context).ok());
        match (machine.current()?, device) {
            (before, after) if before == after => {}
            (_, Some(device)) => machine.bind(device)?,
            (_, None) => machine.unbind()?,
        }
        Ok(())
    }

    fn set_device(&self, device: i32) -> Answer {
        let device = self.device(device)?;
        self.machine()?.retain(device)?;
        self.open();
        self.contexts.with(self.contexts.primary(device), |context| context.live = true);
        SLOTS.set(Slots { primary: Some(device), explicit: None });
        self.follow()
    }

    /// Takes a context away, with its streams; and with a device's last one everything that the device holds.
    fn end(&self, context: u64, device: u32) -> Answer {
        self.contexts.with(context, |context| {
            context.live = false;
            context.default_stream = None;
        });
        let machine = self.machine()?;
        machine.bind(device)?;
        for stream in self.streams.take_of(context) {
            machine.destroy_stream(stream)?;
        }
        if self.contexts.of_device(device).is_empty() {
            machine.reset_device(device)?;
            self.pinned.forget(device);
            self.shared.forget(device);
        }
        self.follow()
    }

    /// Gives all references to a device back, whoever holds them, and ends all its contexts, whoever made them.
    pub(crate) fn reset_by_force(&self, device: u32) -> Answer {
        let machine = self.machine()?;
        while machine.retained(device)? > 0 {
            machine.release_device(device)?;
        }
        self.contexts.of_device(device).into_iter().try_for_each(|context| self.end(context, device))
    }

    /// Takes the device away from the thread that gave it back, however often it was set.
    fn leave(&self, device: u32) -> Answer {
        if self.here() == Some(device) {
            SLOTS.set(Slots::default());
        }
        self.follow()
    }
}

runtime! {
    fn aclrtSetDevice(device: i32) [About::Device(device)] |sim| sim.set_device(device);
    fn aclrtResetDevice(device: i32) [About::Device(device)] |sim| {
        let user = sim.device(device)?;
        let machine = sim.machine()?;
        if machine.retained(user)? == 0 {
            return refused(status::CONTEXT_RELEASE, "the device is not set");
        }
        machine.release_device(user)?;
        sim.leave(user)?;
        if machine.retained(user)? == 0 { sim.end(sim.contexts.primary(user), user) } else { Ok(()) }
    };
    fn aclrtResetDeviceForce(device: i32) [About::Device(device)] |sim| {
        // Nobody else's references survive it, which is why nothing in Haulier may call it.
        let user = sim.device(device)?;
        sim.reset_by_force(user)?;
        sim.leave(user)
    };
    fn aclrtGetDevice(device: Out<i32>) [About::Nothing] |sim| {
        if device.is_null() {
            return null("a null result pointer");
        }
        match (sim.contexts.current(), sim.init.default_device()) {
            (Some(context), _) => device.set(sim.contexts.live(context)?.cast_signed()),
            // An answer, and nothing is bound.
            (None, Some(default)) => device.set(default),
            (None, None) => refused(status::NO_CONTEXT, "the thread has no current context"),
        }
    };
    fn aclrtCreateContext(out: Out<u64>, device: i32) [About::Device(device)] |sim| {
        if out.is_null() {
            return null("a null result pointer");
        }
        let device = sim.device(device)?;
        sim.open();
        let context = {
            let mut table = sim.contexts.table.lock();
            table.push(Context { device, live: true, default_stream: None });
            FIRST + (table.len() as u64 - 1) * STEP
        };
        SLOTS.set(Slots { explicit: Some(context), primary: None });
        sim.follow()?;
        out.set(context)
    };
    fn aclrtDestroyContext(context: u64) [About::Context(context)] |sim| {
        if context == 0 {
            return null("a null context");
        }
        let device = sim.contexts.live(context)?;
        if sim.contexts.is_primary(context) {
            return refused(status::NO_CONTEXT, "a primary context is reset with its device, not destroyed");
        }
        if sim.contexts.current() == Some(context) {
            SLOTS.set(Slots::default());
        }
        sim.end(context, device)
    };
    fn aclrtSetCurrentContext(context: u64) [About::Context(context)] |sim| {
        if context == 0 {
            return null("a null context: a thread's context is replaced, never taken away");
        }
        sim.contexts.live(context)?;
        SLOTS.set(Slots { explicit: Some(context), primary: None });
        sim.follow()
    };
    fn aclrtGetCurrentContext(out: Out<u64>) [About::Nothing] |sim| {
        if out.is_null() {
            return null("a null result pointer");
        }
        match sim.contexts.current() {
            Some(context) => {
                sim.contexts.live(context)?;
                out.set(context)
            }
            // Older ones call this a success.
            None if !sim.is_9() => out.set(0),
            None => refused(status::NO_CONTEXT, "the thread has no current context"),
        }
    };
    fn aclrtCtxGetCurrentDefaultStream(stream: Out<u64>) [About::Nothing] |sim| stream.set(sim.default_stream()?);
    fn aclrtGetPrimaryCtxState(device: i32, flags: Out<u32>, active: Out<i32>) [About::Device(device)] |sim| {
        if !flags.is_null() {
            return refused(status::INVALID_PARAM, "flags are reserved and have to be null");
        }
        let primary = sim.contexts.primary(sim.device(device)?);
        active.set(i32::from(sim.contexts.live(primary).is_ok()))
    };
    fn aclrtSynchronizeDevice() [About::Nothing] |sim| {
        sim.context()?;
        Ok(sim.machine()?.sync_device()?)
    };
    fn aclrtDeviceEnablePeerAccess(peer: i32, flags: u32) [About::Device(peer)] |sim| {
        let (_, device) = sim.context()?;
        let peer = sim.device(peer)?;
        if flags != 0 || peer == device {
            return refused(status::PARAMETER, format!("device {device} and peer {peer}, flags {flags:#x}"));
        }
        if !sim.settings.peer {
            return refused(status::NOT_SUPPORTED, "the devices are no peers");
        }
        sim.streams.enable_peer(device, peer);
        Ok(())
    };
}

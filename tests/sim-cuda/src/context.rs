//! Contexts: each thread has its own stack of them, empty at first, and each device a primary one that is counted.

use std::cell::RefCell;

use parking_lot::Mutex;

use crate::{
    abi::{Answer, Out, OutAny, driver, refused, status},
    log::About,
    sim::Sim,
};

/// Handles start here: nothing that could be taken for an address.
const FIRST: u64 = 0xc0de_0000_0000;
const STEP: u64 = 0x100;

/// One context. Its handle keeps its meaning when it is destroyed, and is told from garbage then.
#[derive(Debug)]
struct Context {
    device: u32,
    live: bool,
    flags: u32,
}

/// The contexts of a process; the first ones are the devices' primary contexts.
#[derive(Debug)]
pub(crate) struct Contexts {
    table: Mutex<Vec<Context>>,
    devices: usize,
}

thread_local! {
    /// The current context is the last one.
    static STACK: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

/// The thread's stack. On a thread that is being torn down this panics, which is status 999 at the boundary.
fn stack<R>(look: impl FnOnce(&mut Vec<u64>) -> R) -> R {
    STACK.with(|stack| look(&mut stack.borrow_mut()))
}

impl Contexts {
    pub(crate) fn new(devices: usize) -> Self {
        let primary = |device| Context { device, live: false, flags: 0 };
        Contexts { table: Mutex::new((0..devices as u32).map(primary).collect()), devices }
    }

    /// The thread's current context, whether it still exists or not.
    pub(crate) fn top(&self) -> Option<u64> {
        STACK.try_with(|stack| stack.borrow().last().copied()).ok().flatten()
    }

    pub(crate) fn device_of(&self, context: u64) -> Option<u32> {
        self.table.lock().get(self.index(context)?).map(|context| context.device)
    }

    pub(crate) fn primary(&self, device: u32) -> u64 {
        FIRST + u64::from(device) * STEP
    }

    fn index(&self, context: u64) -> Option<usize> {
        let offset = context.checked_sub(FIRST)?;
        offset.is_multiple_of(STEP).then(|| usize::try_from(offset / STEP).ok()).flatten()
    }

    /// The device of a context that exists.
    fn live(&self, context: u64) -> Answer<u32> {
        let table = self.table.lock();
        match self.index(context).and_then(|at| table.get(at)) {
            None => refused(status::INVALID_CONTEXT, format!("{context:#x} is no context")),
            Some(context) if !context.live => {
                refused(status::CONTEXT_IS_DESTROYED, "the context is destroyed, or not retained yet")
            }
            Some(context) => Ok(context.device),
        }
    }

    fn set_live(&self, context: u64, live: bool) {
        let mut table = self.table.lock();
        if let Some(context) = self.index(context).and_then(|at| table.get_mut(at)) {
            context.live = live;
        }
    }

    fn create(&self, device: u32, flags: u32) -> u64 {
        let mut table = self.table.lock();
        table.push(Context { device, live: true, flags });
        FIRST + (table.len() as u64 - 1) * STEP
    }

    fn flags(&self, context: u64) -> u32 {
        let table = self.table.lock();
        self.index(context).and_then(|at| table.get(at)).map_or(0, |context| context.flags)
    }

    fn set_flags(&self, context: u64, flags: u32) {
        let mut table = self.table.lock();
        if let Some(context) = self.index(context).and_then(|at| table.get_mut(at)) {
            context.flags = flags;
        }
    }

    fn is_primary(&self, context: u64) -> bool {
        self.index(context).is_some_and(|at| at < self.devices)
    }
}

impl Sim {
    /// The current context and its device, for a call that needs one.
    pub(crate) fn context(&self) -> Answer<(u64, u32)> {
        match self.contexts.top() {
            None => refused(status::INVALID_CONTEXT, "the thread has no current context"),
            Some(context) => {
                let device = self.contexts.live(context)?;
                // Another thread may have destroyed and made it anew since this one looked.
                self.follow()?;
                Ok((context, device))
            }
        }
    }

    /// Makes the machine's current device that of the current context.
    fn follow(&self) -> Answer {
        let machine = self.machine()?;
        let device = self.contexts.top().and_then(|context| self.contexts.live(context).ok());
        match (machine.current()?, device) {
            (before, after) if before == after => {}
            (_, Some(device)) => machine.bind(device)?,
            (_, None) => machine.unbind()?,
        }
        Ok(())
    }

    fn retain(&self, device: u32) -> Answer<u64> {
        self.machine()?.retain(device)?;
        let context = self.contexts.primary(device);
        self.contexts.set_live(context, true);
        Ok(context)
    }

    fn end(&self, context: u64, device: u32) -> Answer {
        self.contexts.set_live(context, false);
        // The machine has memory and streams by device only, so they end with the primary context.
        if self.contexts.is_primary(context) {
            self.machine()?.reset_device(device)?;
            self.pinned.forget(device);
        }
        self.follow()
    }

    fn make_context(&self, out: Out<u64>, flags: u32, device: i32) -> Answer {
        let context = self.contexts.create(self.device(device)?, flags);
        stack(|stack| stack.push(context));
        self.follow()?;
        out.set(context)
    }
}

driver! {
    fn cuDevicePrimaryCtxRetain(context: Out<u64>, device: i32) [About::Device(device)] |sim| {
        if context.is_null() {
            return refused(status::INVALID_VALUE, "a null result pointer");
        }
        context.set(sim.retain(sim.device(device)?)?)
    };
    fn cuDevicePrimaryCtxRelease_v2(device: i32) [About::Device(device)] |sim| {
        let device = sim.device(device)?;
        let machine = sim.machine()?;
        if machine.retained(device)? == 0 {
            return refused(status::INVALID_CONTEXT, "the primary context is not retained");
        }
        machine.release_device(device)?;
        if machine.retained(device)? == 0 { sim.end(sim.contexts.primary(device), device) } else { Ok(()) }
    };
    fn cuDevicePrimaryCtxGetState(device: i32, flags: Out<u32>, active: Out<i32>)
        [About::Device(device)] |sim| {
        let primary = sim.contexts.primary(sim.device(device)?);
        flags.offer(sim.contexts.flags(primary))?;
        active.set(i32::from(sim.contexts.live(primary).is_ok()))
    };
    fn cuDevicePrimaryCtxSetFlags_v2(device: i32, flags: u32) [About::Device(device)] |sim| {
        let primary = sim.contexts.primary(sim.device(device)?);
        if sim.contexts.live(primary).is_ok() && sim.contexts.flags(primary) != flags {
            return refused(status::PRIMARY_CONTEXT_ACTIVE, "the primary context is active");
        }
        sim.contexts.set_flags(primary, flags);
        Ok(())
    };
    fn cuDevicePrimaryCtxReset_v2(device: i32) [About::Device(device)] |sim| {
        // Nobody else's references survive it, which is why nothing in Haulier may call it.
        let device = sim.device(device)?;
        let machine = sim.machine()?;
        while machine.retained(device)? > 0 {
            machine.release_device(device)?;
        }
        sim.end(sim.contexts.primary(device), device)
    };
    fn cuCtxGetCurrent(context: Out<u64>) [About::Nothing] |sim| {
        context.set(sim.contexts.top().unwrap_or(0))
    };
    fn cuCtxSetCurrent(context: u64) [About::Context(context)] |sim| {
        if context == 0 {
            stack(|stack| stack.pop());
            return sim.follow();
        }
        sim.contexts.live(context)?;
        stack(|stack| match stack.last_mut() {
            Some(top) => *top = context,
            None => stack.push(context),
        });
        sim.follow()
    };
    fn cuCtxPushCurrent_v2(context: u64) [About::Context(context)] |sim| {
        sim.contexts.live(context)?;
        stack(|stack| stack.push(context));
        sim.follow()
    };
    fn cuCtxPopCurrent_v2(context: Out<u64>) [About::Nothing] |sim| {
        match stack(|stack| stack.pop()) {
            Some(popped) => {
                sim.follow()?;
                context.offer(popped)
            }
            None => refused(status::INVALID_CONTEXT, "the thread's stack of contexts is empty"),
        }
    };
    fn cuCtxGetDevice(device: Out<i32>) [About::Nothing] |sim| device.set(sim.context()?.1.cast_signed());
    fn cuCtxGetFlags(flags: Out<u32>) [About::Nothing] |sim| flags.set(sim.contexts.flags(sim.context()?.0));
    fn cuCtxGetId(context: u64, id: Out<u64>) [About::Context(context)] |sim| {
        let context = if context == 0 { sim.context()?.0 } else { context };
        sim.contexts.live(context)?;
        id.set(context)
    };
    fn cuCtxGetApiVersion(context: u64, version: Out<u32>) [About::Context(context)] |sim| {
        sim.contexts.live(if context == 0 { sim.context()?.0 } else { context })?;
        version.set(3020)
    };
    fn cuCtxGetStreamPriorityRange(least: Out<i32>, greatest: Out<i32>) [About::Nothing] |sim| {
        sim.context()?;
        least.offer(0)?;
        greatest.offer(-5)
    };
    fn cuCtxSynchronize() [About::Nothing] |sim| {
        sim.context()?;
        Ok(sim.machine()?.sync_device()?)
    };
    fn cuCtxCreate_v2(context: Out<u64>, flags: u32, device: i32) [About::Device(device)] |sim| {
        sim.make_context(context, flags, device)
    };
    fn cuCtxCreate_v3(context: Out<u64>, _affinity: OutAny, _count: i32, flags: u32, device: i32)
        [About::Device(device)] |sim| {
        sim.make_context(context, flags, device)
    };
    fn cuCtxCreate_v4(context: Out<u64>, _params: OutAny, flags: u32, device: i32)
        [About::Device(device)] |sim| {
        sim.make_context(context, flags, device)
    };
    fn cuCtxDestroy_v2(context: u64) [About::Context(context)] |sim| {
        let device = sim.contexts.live(context)?;
        if sim.contexts.is_primary(context) {
            return refused(status::INVALID_CONTEXT, "a primary context is released, not destroyed");
        }
        stack(|stack| {
            if stack.last() == Some(&context) {
                stack.pop();
            }
        });
        sim.end(context, device)
    };
    fn cuCtxEnablePeerAccess(peer: u64, flags: u32) [About::Context(peer)] |sim| {
        let (_, device) = sim.context()?;
        let peer = sim.contexts.live(peer)?;
        if flags != 0 || peer == device {
            return refused(status::INVALID_DEVICE, "a device is no peer of itself");
        }
        if sim.settings.peer {
            return Ok(());
        }
        refused(status::PEER_ACCESS_UNSUPPORTED, "the devices are no peers")
    };
    fn cuCtxDisablePeerAccess(peer: u64) [About::Context(peer)] |sim| {
        sim.context()?;
        sim.contexts.live(peer)?;
        if sim.settings.peer {
            return Ok(());
        }
        refused(status::PEER_ACCESS_NOT_ENABLED, "there was no access")
    };
    fn cuCtxGetLimit(value: Out<usize>, _limit: i32) [About::Nothing] |sim| {
        sim.context()?;
        value.set(0)
    };
    fn cuCtxSetLimit(_limit: i32, _value: usize) [About::Nothing] |sim| {
        sim.context()?;
        Ok(())
    };
}

//! The transfer engines of `libllm_datadist.so`, whose C++ side (`cpp/llm_datadist.cpp`) only unpacks its arguments.
//! They register memory and keep count of it. There is no transport: nothing is pretended to be connected or moved.
//!
//! The calls are in the log as `adxl_RegisterMem` and so on, and take faults by these names.

use std::collections::BTreeMap;

use backend_cpu::strict::Residence;
use haulier_sim::log::About;
use parking_lot::Mutex;

use crate::{
    abi::{Answer, Out, Text, refused},
    gate,
    sim::{Sim, address},
};

const PARAMETER: i32 = 103900;
const NOT_CONNECTED: i32 = 103902;
const FAILED: i32 = 503900;

const DEVICE: i32 = 0;
const HOST: i32 = 1;

/// Handles of registrations start here.
const FIRST_HANDLE: u64 = 0xad00_0000_0000;

/// The engines of a process.
#[derive(Debug, Default)]
pub(crate) struct Engines(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// By number.
    engines: BTreeMap<u64, Engine>,
    last_engine: u64,
    last_handle: u64,
    /// Registrations that were there when their engine ended.
    left: u64,
}

#[derive(Debug, Default)]
struct Engine {
    initialised: bool,
    /// Address and length, by handle.
    registered: BTreeMap<u64, (usize, usize)>,
}

impl Engines {
    /// How many registrations there are.
    pub(crate) fn registrations(&self) -> usize {
        self.0.lock().engines.values().map(|engine| engine.registered.len()).sum()
    }

    /// How many were never taken back before their engine ended.
    pub(crate) fn left(&self) -> u64 {
        self.0.lock().left
    }

    fn with<T>(&self, number: u64, look: impl FnOnce(&mut Engine) -> Answer<T>) -> Answer<T> {
        match self.0.lock().engines.get_mut(&number) {
            Some(engine) if engine.initialised => look(engine),
            _ => refused(PARAMETER, "the engine is not initialised"),
        }
    }

    fn end(&self, number: u64) -> Answer {
        let mut state = self.0.lock();
        let engine = state.engines.get_mut(&number).map(std::mem::take).unwrap_or_default();
        state.left += engine.registered.len() as u64;
        match engine.registered.len() {
            0 => Ok(()),
            left => refused(FAILED, format!("{left} registrations were not taken back")),
        }
    }
}

/// Checks a range against what the runtime knows of it.
fn check(sim: &Sim, start: usize, bytes: usize, kind: i32) -> Answer {
    let (_, current) = sim.context().or_else(|e| refused(PARAMETER, e.why))?;
    let machine = sim.machine()?;
    if start == 0 || bytes == 0 || start.checked_add(bytes).is_none() {
        return refused(PARAMETER, format!("{bytes} bytes at {start:#x}"));
    }
    match (kind, machine.is_device_address(start)) {
        (HOST, false) => Ok(()),
        (DEVICE, true) => {
            let known = machine.attributes(start).or_else(|e| refused(PARAMETER, e.text))?;
            if bytes > known.base + known.len - start {
                return refused(PARAMETER, format!("{bytes} bytes leave the allocation of {}", known.len));
            }
            match known.residence {
                Residence::Device(device, _) if device == current => Ok(()),
                other => refused(PARAMETER, format!("{other:?} with device {current} current")),
            }
        }
        (kind, _) => refused(PARAMETER, format!("{start:#x} is not of memory type {kind}")),
    }
}

fn register(sim: &Sim, number: u64, start: u64, bytes: usize, kind: i32, handle: Out<u64>) -> Answer {
    let start = address(start)?;
    sim.engines.with(number, |_| Ok(()))?;
    check(sim, start, bytes, kind)?;
    let new = {
        let mut state = sim.engines.0.lock();
        state.last_handle += 1;
        FIRST_HANDLE + state.last_handle
    };
    sim.engines.with(number, |engine| {
        // Whether the real one refuses an overlap is not known.
        if engine.registered.values().any(|&(other, len)| other < start + bytes && start < other + len) {
            return refused(
                PARAMETER,
                format!("{bytes} bytes at {start:#x} are registered, in whole or in part"),
            );
        }
        engine.registered.insert(new, (start, bytes));
        Ok(())
    })?;
    handle.set(new)
}

fn enter(function: &'static str, about: About, body: impl FnOnce(&'static Sim) -> Answer) -> u32 {
    gate::enter(function, about, body).cast_unsigned()
}

fn no_transport(text: Answer<String>) -> Answer {
    refused(FAILED, format!("this stand-in moves nothing between engines: {}", text?))
}

#[unsafe(no_mangle)]
extern "C" fn haulier_sim_adxl_create() -> u64 {
    gate::control(0, |sim| {
        let mut state = sim.engines.0.lock();
        state.last_engine += 1;
        let number = state.last_engine;
        state.engines.insert(number, Engine::default());
        number
    })
}

#[unsafe(no_mangle)]
extern "C" fn haulier_sim_adxl_destroy(engine: u64) {
    gate::control((), |sim| {
        // What is left is counted; a destructor has nobody to tell.
        let _ = sim.engines.end(engine);
        sim.engines.0.lock().engines.remove(&engine);
    });
}

#[unsafe(no_mangle)]
extern "C" fn haulier_sim_adxl_initialize(engine: u64, name: Text) -> u32 {
    enter("adxl_Initialize", About::Handle(engine), |sim| {
        sim.context().or_else(|e| refused(PARAMETER, e.why))?;
        let name = name.get()?;
        match sim.engines.0.lock().engines.get_mut(&engine) {
            Some(engine) if !engine.initialised && !name.is_empty() => {
                engine.initialised = true;
                Ok(())
            }
            _ => refused(PARAMETER, format!("initialised before, or as nothing: {name:?}")),
        }
    })
}

#[unsafe(no_mangle)]
extern "C" fn haulier_sim_adxl_finalize(engine: u64) {
    enter("adxl_Finalize", About::Handle(engine), |sim| sim.engines.end(engine));
}

#[unsafe(no_mangle)]
extern "C" fn haulier_sim_adxl_register(
    engine: u64,
    start: u64,
    bytes: usize,
    kind: i32,
    handle: Out<u64>,
) -> u32 {
    enter("adxl_RegisterMem", About::Address(start), |sim| register(sim, engine, start, bytes, kind, handle))
}

#[unsafe(no_mangle)]
extern "C" fn haulier_sim_adxl_deregister(engine: u64, handle: u64) -> u32 {
    enter("adxl_DeregisterMem", About::Handle(handle), |sim| {
        sim.context().or_else(|e| refused(PARAMETER, e.why))?;
        sim.engines.with(engine, |engine| match engine.registered.remove(&handle) {
            Some(_) => Ok(()),
            None => refused(PARAMETER, format!("{handle:#x} is no registration")),
        })
    })
}

#[unsafe(no_mangle)]
extern "C" fn haulier_sim_adxl_connect(engine: u64, name: Text, milliseconds: i32) -> u32 {
    enter("adxl_Connect", About::Handle(engine), |_| {
        no_transport(name.get().map(|name| format!("connect to {name} within {milliseconds} ms")))
    })
}

#[unsafe(no_mangle)]
extern "C" fn haulier_sim_adxl_disconnect(engine: u64, name: Text, milliseconds: i32) -> u32 {
    enter("adxl_Disconnect", About::Handle(engine), |_| {
        refused(NOT_CONNECTED, format!("{} is not connected ({milliseconds} ms)", name.get()?))
    })
}

#[unsafe(no_mangle)]
extern "C" fn haulier_sim_adxl_transfer(engine: u64, name: Text, count: usize) -> u32 {
    enter("adxl_TransferSync", About::Handle(engine), |_| {
        no_transport(name.get().map(|name| format!("transfer {count} parts with {name}")))
    })
}

//! `aclInit`, which is counted, and `aclFinalize`, which is not.

use std::fs;

use haulier_sim::log::About;
use parking_lot::Mutex;

use crate::{
    abi::{Answer, Out, Text, refused, runtime, status},
    sim::Sim,
};

/// What the process was initialised with.
#[derive(Debug, Default)]
pub(crate) struct Init(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    count: u64,
    /// The configuration's text.
    config: Option<String>,
    default_device: Option<i32>,
}

impl Init {
    /// The device that a thread without one gets, where the configuration names one.
    pub(crate) fn default_device(&self) -> Option<i32> {
        self.0.lock().default_device
    }
}

/// The device that a configuration names: `{"defaultDevice": {"default_device": "0"}}`.
fn default_device(config: &str) -> Answer<Option<i32>> {
    let json: serde_json::Value = serde_json::from_str(config)
        .or_else(|e| refused(status::INVALID_PARAM, format!("the configuration: {e}")))?;
    let Some(device) = json.pointer("/defaultDevice/default_device") else { return Ok(None) };
    match device.as_str().and_then(|text| text.parse::<i32>().ok()) {
        Some(device) => Ok(Some(device)),
        None => {
            refused(status::INVALID_PARAM, format!("default_device is {device}, not a number in a string"))
        }
    }
}

/// Nothing that the process holds survives it, whoever else uses the runtime.
fn finalize(sim: &Sim) -> Answer {
    *sim.init.0.lock() = State::default();
    (0..sim.settings.visible.len() as u32).try_for_each(|device| sim.reset_by_force(device))
}

runtime! {
    fn aclInit(path: Text) [About::Nothing] |sim| {
        let config = match path.is_null() {
            true => None,
            false => {
                let path = path.get()?;
                let text = fs::read_to_string(&path);
                Some(text.or_else(|e| refused(status::INVALID_PARAM, format!("{path}: {e}")))?)
            }
        };
        let default = config.as_deref().map_or(Ok(None), default_device)?;
        if let Some(device) = default {
            sim.device(device)?;
        }
        let mut state = sim.init.0.lock();
        if state.count == 0 {
            *state = State { count: 1, config, default_device: default };
            return Ok(());
        }
        if state.config != config {
            return refused(status::INVALID_PARAM, "initialised with another configuration before");
        }
        state.count += 1;
        refused(status::REPEAT_INITIALIZE, "initialised before; counted")
    };
    fn aclFinalize() [About::Nothing] |sim| {
        if sim.init.0.lock().count == 0 {
            return refused(status::REPEAT_FINALIZE, "not initialised, or finalized before");
        }
        finalize(sim)
    };
    fn aclFinalizeReference(remaining: Out<u64>) [About::Nothing] |sim| {
        let left = {
            let mut state = sim.init.0.lock();
            if state.count == 0 {
                return refused(status::REPEAT_FINALIZE, "not initialised, or finalized before");
            }
            state.count -= 1;
            state.count
        };
        remaining.offer(left)?;
        if left == 0 { finalize(sim) } else { Ok(()) }
    };
}

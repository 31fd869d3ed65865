//! The way that every call takes.

use std::{
    cell::Cell,
    panic::{AssertUnwindSafe, catch_unwind},
    process,
    sync::atomic::Ordering,
};

use crate::{
    abi::{Answer, refused, status},
    faults::Fate,
    log::About,
    settings::Mode,
    sim::Sim,
};

thread_local! {
    /// Whether the thread runs a host function that work on a stream called.
    static IN_HOST_FUNCTION: Cell<bool> = const { Cell::new(false) };
}

/// What works before `cuInit`.
const EARLY: [&str; 4] = ["cuInit", "cuDriverGetVersion", "cuGetErrorName", "cuGetErrorString"];

/// Runs a function's body as a call: logged, subject to mode and fault plan, and refused before `cuInit`, after a fork,
/// and in host functions. A panic must not get into C: it is status 999.
pub(crate) fn enter(function: &'static str, about: About, body: impl FnOnce(&'static Sim) -> Answer) -> i32 {
    let call = move || {
        let sim = match Sim::get() {
            Ok(sim) => sim,
            Err(why) => {
                eprintln!("haulier-sim-cuda: {why}");
                return status::UNKNOWN;
            }
        };
        let number = sim.log.begin(function, sim.here(), about, sim.owner(about));
        let answer = decide(sim, function, number, body);
        let (code, why) = match answer {
            Ok(()) => (status::SUCCESS, None),
            Err(refused) => (refused.code.unwrap_or(status::INVALID_VALUE), Some(refused.why)),
        };
        sim.log.end(number, code, why);
        code
    };
    catch_unwind(AssertUnwindSafe(call)).unwrap_or(status::UNKNOWN)
}

fn decide(
    sim: &'static Sim,
    function: &'static str,
    number: u64,
    body: impl FnOnce(&'static Sim) -> Answer,
) -> Answer {
    if let Mode::Always(code) = sim.mode() {
        return refused(code, "the mode of the whole driver");
    }
    let before = sim.initialised_by.load(Ordering::SeqCst);
    if before != 0 && before != process::id() {
        return refused(status::NOT_INITIALIZED, "the process was forked after cuInit");
    }
    if IN_HOST_FUNCTION.get() {
        return refused(status::NOT_PERMITTED, "a host function called the driver");
    }
    match sim.faults.meet(function, || sim.log.hanging(number)) {
        Fate::Go => {}
        Fate::Answer(status::SUCCESS) => return Ok(()),
        Fate::Answer(code) => return refused(code, "a planned fault"),
    }
    if before == 0 && !EARLY.contains(&function) {
        return refused(status::NOT_INITIALIZED, "cuInit was not called or did not succeed");
    }
    body(sim)
}

/// Runs a host function, in which the driver refuses every call.
pub(crate) fn host_function(run: impl FnOnce()) {
    IN_HOST_FUNCTION.set(true);
    run();
    IN_HOST_FUNCTION.set(false);
}

/// Runs a control function, which is no call: neither logged nor refused. A panic answers `otherwise`.
pub(crate) fn control<T>(otherwise: T, body: impl FnOnce(&'static Sim) -> T) -> T {
    let run = || match Sim::get() {
        Ok(sim) => Some(body(sim)),
        Err(why) => {
            eprintln!("haulier-sim-cuda: {why}");
            None
        }
    };
    catch_unwind(AssertUnwindSafe(run)).ok().flatten().unwrap_or(otherwise)
}

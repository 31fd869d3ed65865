//! The way that every call takes.

use std::{
    cell::Cell,
    panic::{AssertUnwindSafe, catch_unwind},
    process,
    sync::atomic::Ordering,
};

use haulier_sim::{faults::Fate, log::About};

use crate::{
    abi::{Answer, refused, status},
    error,
    settings::Mode,
    sim::Sim,
};

thread_local! {
    /// Whether the thread runs a host function that work on a stream called.
    static IN_HOST_FUNCTION: Cell<bool> = const { Cell::new(false) };
}

/// Runs a function's body as a call: logged, subject to mode and fault plan, and refused after a fork and in host
/// functions. A panic must not get into C: it is status 507000.
pub(crate) fn enter(function: &'static str, about: About, body: impl FnOnce(&'static Sim) -> Answer) -> i32 {
    let call = move || {
        let sim = match Sim::get() {
            Ok(sim) => sim,
            Err(why) => {
                eprintln!("haulier-sim-ascend: {why}");
                return status::INTERNAL;
            }
        };
        let number = sim.log.begin(function, sim.here(), about, sim.owner(about));
        let answer = decide(sim, function, number, body);
        let (code, why) = match answer {
            Ok(()) => (status::SUCCESS, None),
            Err(refused) => {
                error::record(sim, function, &refused);
                (refused.code.unwrap_or(status::INVALID_PARAM), Some(refused.why))
            }
        };
        sim.log.end(number, code, why);
        code
    };
    catch_unwind(AssertUnwindSafe(call)).unwrap_or(status::INTERNAL)
}

fn decide(
    sim: &'static Sim,
    function: &'static str,
    number: u64,
    body: impl FnOnce(&'static Sim) -> Answer,
) -> Answer {
    if let Mode::Always(code) = sim.mode() {
        return refused(code, "the mode of the whole runtime");
    }
    let opened = sim.opened_by.load(Ordering::SeqCst);
    if opened != 0 && opened != process::id() {
        return refused(status::DRIVER, "the process was forked after a device was opened");
    }
    if IN_HOST_FUNCTION.get() {
        // CANN's manual: errors or a deadlock.
        return refused(status::INTERNAL, "a host function called the runtime");
    }
    match sim.faults.meet(function, || sim.log.hanging(number)) {
        Fate::Go => {}
        Fate::Answer(status::SUCCESS) => return Ok(()),
        Fate::Answer(code) => return refused(code, "a planned fault"),
    }
    body(sim)
}

/// Runs a host function, in which the runtime refuses every call.
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
            eprintln!("haulier-sim-ascend: {why}");
            None
        }
    };
    catch_unwind(AssertUnwindSafe(run)).ok().flatten().unwrap_or(otherwise)
}

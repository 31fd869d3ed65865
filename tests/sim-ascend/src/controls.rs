//! What a test does to the simulator of its own process: functions that no runtime has. They are neither logged nor
//! refused; a null stream is the current context's default stream.
//!
//! Each answers 0 or what it counts, or a status as a negative number.

use std::ffi::c_char;

use crate::{
    abi::{Answer, In, Out, Text, refused, status},
    gate::control,
    sim::{Sim, address},
};

/// What is wrong is worth a line: a test that steers into nothing would pass for the wrong reason.
fn told(answer: Answer<i64>) -> i64 {
    answer.unwrap_or_else(|refused| {
        let code = refused.code.unwrap_or(status::INVALID_PARAM);
        eprintln!("haulier-sim-ascend: {} [{code}]", refused.why);
        -i64::from(code)
    })
}

fn count(number: impl TryInto<i64>) -> Answer<i64> {
    number.try_into().or_else(|_| refused(status::INTERNAL, "too many"))
}

macro_rules! controls {
    ($($(#[$meta:meta])* fn $name:ident($($arg:ident: $ty:ty),* $(,)?) |$sim:pat_param| $body:expr;)*) => {$(
        $(#[$meta])*
        #[unsafe(no_mangle)]
        extern "C" fn $name($($arg: $ty),*) -> i64 {
            let body = move |$sim: &'static Sim| -> Answer<i64> { $body };
            control(-i64::from(status::INTERNAL), move |sim| told(body(sim)))
        }
    )*};
}

controls! {
    /// Holds a stream: what is queued on it stays there until it is released.
    fn haulier_sim_hold(stream: u64) |sim| {
        sim.machine()?.hold(sim.known_stream(stream)?)?;
        Ok(0)
    };
    /// Holds every stream that comes to life from now on, or no longer does.
    fn haulier_sim_hold_new(on: i32) |sim| {
        sim.machine()?.hold_new_streams(on != 0);
        Ok(0)
    };
    fn haulier_sim_release(stream: u64) |sim| {
        sim.machine()?.release(sim.known_stream(stream)?)?;
        Ok(0)
    };
    /// Lets so many items run on a held stream.
    fn haulier_sim_release_some(stream: u64, items: u64) |sim| {
        sim.machine()?.release_some(sim.known_stream(stream)?, items)?;
        Ok(0)
    };
    fn haulier_sim_release_all() |sim| {
        sim.machine()?.release_all();
        Ok(0)
    };
    /// How many items on a stream have not run.
    fn haulier_sim_pending(stream: u64) |sim| count(sim.machine()?.pending(sim.known_stream(stream)?)?);
    /// 1 while an event is not complete, else 0. Needs no context and spoils no capture.
    fn haulier_sim_event_pending(event: u64) |sim| Ok(i64::from(!sim.machine()?.is_event_complete(event)?));
    /// Queues a fill, as a kernel that produces data would. The stream's context must be current.
    fn haulier_sim_fill(stream: u64, pointer: u64, len: usize, byte: i32) |sim| {
        sim.machine()?.fill(sim.usable(stream)?, address(pointer)?, len, byte as u8)?;
        Ok(0)
    };
    /// Reads device memory, past streams and contexts.
    fn haulier_sim_peek(pointer: u64, out: Out<u8>, len: usize) |sim| {
        out.set_all(&sim.machine()?.peek(address(pointer)?, len)?)?;
        Ok(0)
    };
    /// Writes device memory, past streams and contexts.
    fn haulier_sim_poke(pointer: u64, bytes: In<u8>, len: usize) |sim| {
        sim.machine()?.poke(address(pointer)?, &bytes.get_all(len)?)?;
        Ok(0)
    };
    /// Writes as much of the log as there is room for, and answers with its whole length in bytes.
    fn haulier_sim_log(out: Out<u8>, room: usize) |sim| {
        let lines = sim.log.lines();
        if !out.is_null() {
            out.set_all(&lines.as_bytes()[..room.min(lines.len())])?;
        }
        count(lines.len())
    };
    fn haulier_sim_log_clear() |sim| {
        sim.log.clear();
        Ok(0)
    };
    /// How often a function was called since the log was cleared.
    fn haulier_sim_count(function: Text) |sim| count(sim.log.count(&function.get()?));
    /// Plans faults, in the form of `HAULIER_SIM_FAULTS`, beside those planned before.
    fn haulier_sim_faults(plan: Text) |sim| {
        sim.faults.add(&plan.get()?).or_else(|why| refused(status::PARAMETER, why))?;
        Ok(0)
    };
    fn haulier_sim_faults_clear() |sim| {
        sim.faults.clear();
        Ok(0)
    };
    /// Lets every call that hangs now go on.
    fn haulier_sim_unblock() |sim| {
        sim.faults.unblock();
        Ok(0)
    };
    /// Sets the mode of the whole driver, in the form of `HAULIER_SIM_MODE`.
    fn haulier_sim_mode(mode: Text) |sim| {
        sim.set_mode(mode.get()?.parse().or_else(|why: String| refused(status::PARAMETER, why))?);
        Ok(0)
    };
    /// How many imports of either kind are open, each counted once however often it was opened.
    fn haulier_sim_open_imports() |sim| count(sim.machine()?.open_imports());
    fn haulier_sim_live_allocations() |sim| count(sim.machine()?.live_allocations());
    fn haulier_sim_registrations() |sim| count(sim.machine()?.registrations() + sim.pinned.allocations());
    fn haulier_sim_freed_while_registered() |sim| count(sim.machine()?.freed_while_registered());
    /// How many ranges are registered with transfer engines, of all that there are.
    fn haulier_sim_adxl_registrations() |sim| count(sim.engines.registrations());
    /// How many registrations were never taken back before their transfer engine ended.
    fn haulier_sim_adxl_left() |sim| count(sim.engines.left());
    /// How often a device was set and not reset.
    fn haulier_sim_retained(device: i32) |sim| count(sim.machine()?.retained(sim.device(device)?)?);
}

/// A text by which everybody can tell this from a driver.
#[unsafe(no_mangle)]
extern "C" fn haulier_sim_version() -> *const c_char {
    concat!("haulier-sim-ascend ", env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

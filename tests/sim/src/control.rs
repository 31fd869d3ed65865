//! The control surface for tests in Rust: the functions `haulier_sim_*` of a simulator's library.

use std::{
    ffi::{CStr, CString, c_char},
    path::Path,
    thread,
    time::{Duration, Instant},
};

use libloading::Library;

use crate::log::Call;

/// Steers the simulated driver of this process. Several of one path are the same.
///
/// Handles and addresses are the driver's own. A default stream's handle (0, 1, 2) means what it means on the calling
/// thread, where a context must be current for it.
#[derive(Debug)]
pub struct Control {
    library: Library,
}

macro_rules! call {
    ($control:expr, $name:ident($($value:expr => $ty:ty),*)) => {{
        // SAFETY: the name is one of the simulator's own functions, whose signature this is.
        let function = unsafe {
            $control.library.get::<extern "C" fn($($ty),*) -> i64>(stringify!($name))
        };
        let function = function.unwrap_or_else(|e| panic!("{}: {e}", stringify!($name)));
        answer(function($($value),*))
    }};
}

fn answer(number: i64) -> Result<u64, i32> {
    u64::try_from(number).map_err(|_| i32::try_from(-number).unwrap_or(999))
}

fn text(text: &str) -> CString {
    CString::new(text).expect("no nul in a control text")
}

impl Control {
    /// Opens the library that a simulator's `install` put there, or finds it open.
    ///
    /// # Errors
    /// Where the library cannot be loaded or is no simulated driver.
    pub fn open(path: &Path) -> Result<Self, libloading::Error> {
        // SAFETY: loading it runs no code of its own; it is never unloaded.
        let library = unsafe { Library::new(path) }?;
        // SAFETY: only looked up.
        unsafe { library.get::<extern "C" fn() -> *const c_char>("haulier_sim_version") }?;
        Ok(Control { library })
    }

    /// The library, for calling the driver's functions.
    pub fn library(&self) -> &Library {
        &self.library
    }

    /// The simulator's name and version.
    pub fn version(&self) -> String {
        // SAFETY: `open` checked that it is there; it answers with a static string.
        unsafe {
            let function = self.library.get::<extern "C" fn() -> *const c_char>("haulier_sim_version");
            function
                .map(|version| CStr::from_ptr(version()).to_string_lossy().into_owned())
                .unwrap_or_default()
        }
    }

    /// Holds a stream: what is queued on it stays there until it is released.
    ///
    /// # Errors
    /// The driver's status, here and below.
    pub fn hold(&self, stream: u64) -> Result<u64, i32> {
        call!(self, haulier_sim_hold(stream => u64))
    }

    /// Holds every stream that comes to life from now on, or no longer does.
    pub fn hold_new_streams(&self, on: bool) -> Result<u64, i32> {
        call!(self, haulier_sim_hold_new(i32::from(on) => i32))
    }

    /// Holds a stream no longer.
    pub fn release(&self, stream: u64) -> Result<u64, i32> {
        call!(self, haulier_sim_release(stream => u64))
    }

    /// Lets so many items run on a held stream.
    pub fn release_some(&self, stream: u64, items: u64) -> Result<u64, i32> {
        call!(self, haulier_sim_release_some(stream => u64, items => u64))
    }

    /// Holds no stream any longer.
    pub fn release_all(&self) -> Result<u64, i32> {
        call!(self, haulier_sim_release_all())
    }

    /// How many items on a stream have not run.
    pub fn pending(&self, stream: u64) -> Result<u64, i32> {
        call!(self, haulier_sim_pending(stream => u64))
    }

    /// Whether an event is not complete. Needs no context and spoils no capture.
    pub fn is_event_pending(&self, event: u64) -> Result<bool, i32> {
        call!(self, haulier_sim_event_pending(event => u64)).map(|pending| pending != 0)
    }

    /// Queues a fill, as a kernel that produces data would; the stream's context must be current.
    pub fn fill(&self, stream: u64, pointer: u64, len: usize, byte: u8) -> Result<u64, i32> {
        call!(self, haulier_sim_fill(stream => u64, pointer => u64, len => usize, i32::from(byte) => i32))
    }

    /// Reads device memory, past streams and contexts.
    pub fn peek(&self, pointer: u64, len: usize) -> Result<Vec<u8>, i32> {
        let mut bytes = vec![0; len];
        call!(self, haulier_sim_peek(pointer => u64, bytes.as_mut_ptr() => *mut u8, len => usize))
            .map(|_| bytes)
    }

    /// Writes device memory, past streams and contexts.
    pub fn poke(&self, pointer: u64, bytes: &[u8]) -> Result<u64, i32> {
        call!(self, haulier_sim_poke(pointer => u64, bytes.as_ptr() => *const u8, bytes.len() => usize))
    }

    /// The calls since the log was cleared, in the order in which they began; of very many, the last ones.
    pub fn log(&self) -> Vec<Call> {
        let mut bytes = Vec::new();
        loop {
            let room = bytes.len();
            let len = call!(self, haulier_sim_log(bytes.as_mut_ptr() => *mut u8, room => usize));
            let len = len.map_or(0, |len| len as usize);
            if len <= room {
                bytes.truncate(len);
                let lines = bytes.split(|&byte| byte == b'\n').filter(|line| !line.is_empty());
                return lines.filter_map(|line| serde_json::from_slice(line).ok()).collect();
            }
            // It may grow meanwhile.
            bytes.resize(len + len / 4, 0);
        }
    }

    /// The calls of one function.
    pub fn calls(&self, function: &str) -> Vec<Call> {
        self.log().into_iter().filter(|call| call.function == function).collect()
    }

    /// How often a function was called since the log was cleared.
    pub fn count(&self, function: &str) -> u64 {
        let function = text(function);
        call!(self, haulier_sim_count(function.as_ptr() => *const c_char)).unwrap_or(0)
    }

    /// Forgets the calls so far.
    pub fn clear_log(&self) -> Result<u64, i32> {
        call!(self, haulier_sim_log_clear())
    }

    /// Plans faults, in the form of `HAULIER_SIM_FAULTS`, beside those planned before.
    pub fn plan_faults(&self, plan: &str) -> Result<u64, i32> {
        let plan = text(plan);
        call!(self, haulier_sim_faults(plan.as_ptr() => *const c_char))
    }

    /// Forgets the faults that are planned. Calls that hang go on hanging.
    pub fn clear_faults(&self) -> Result<u64, i32> {
        call!(self, haulier_sim_faults_clear())
    }

    /// Lets every call that hangs now go on.
    pub fn unblock(&self) -> Result<u64, i32> {
        call!(self, haulier_sim_unblock())
    }

    /// Sets the mode of the whole driver, in the form of `HAULIER_SIM_MODE`.
    pub fn set_mode(&self, mode: &str) -> Result<u64, i32> {
        let mode = text(mode);
        call!(self, haulier_sim_mode(mode.as_ptr() => *const c_char))
    }

    /// How many imports of either kind are open, each counted once however often it was opened.
    pub fn open_imports(&self) -> Result<u64, i32> {
        call!(self, haulier_sim_open_imports())
    }

    /// How many allocations and mappings there are, imports not counted.
    pub fn live_allocations(&self) -> Result<u64, i32> {
        call!(self, haulier_sim_live_allocations())
    }

    /// How many ranges of host memory are registered or allocated as pinned.
    pub fn registrations(&self) -> Result<u64, i32> {
        call!(self, haulier_sim_registrations())
    }

    /// A count that a control function without arguments gives; those that only one simulator has.
    ///
    /// # Panics
    /// Where the library has no such function.
    pub fn ask(&self, function: &str) -> Result<u64, i32> {
        // SAFETY: the control functions without arguments all have this signature.
        let function = unsafe { self.library.get::<extern "C" fn() -> i64>(function) };
        answer(function.expect("a control function")())
    }

    /// How often device memory was freed that was still registered.
    pub fn freed_while_registered(&self) -> Result<u64, i32> {
        call!(self, haulier_sim_freed_while_registered())
    }

    /// How many references a device's primary context has.
    pub fn retained(&self, device: i32) -> Result<u64, i32> {
        call!(self, haulier_sim_retained(device => i32))
    }

    /// Waits until a function was called so often, for calls that hang or that another thread makes.
    ///
    /// # Panics
    /// After 30 seconds.
    pub fn wait_for_calls(&self, function: &str, count: u64) {
        let start = Instant::now();
        while self.count(function) < count {
            assert!(start.elapsed() < Duration::from_secs(30), "{function} was not called {count} times");
            thread::sleep(Duration::from_millis(1));
        }
    }
}

//! The control surface for tests in Rust, with what only this simulator has.

use std::{ops::Deref, path::Path};

/// Steers the simulated runtime of this process; see [`haulier_sim::control::Control`], which it is. Several of one path
/// are the same.
#[derive(Debug)]
pub struct Control(haulier_sim::control::Control);

impl Control {
    /// Opens the runtime that [`install`](crate::install()) put there, or finds it open.
    ///
    /// # Errors
    /// Where the library cannot be loaded or is no simulated runtime.
    pub fn open(path: &Path) -> Result<Self, libloading::Error> {
        haulier_sim::control::Control::open(path).map(Control)
    }

    /// How many ranges are registered with transfer engines of `libllm_datadist.so`, all engines of the process
    /// together. By whom, with which device current, and with what answer is in the log: `adxl_RegisterMem`,
    /// `adxl_DeregisterMem`.
    ///
    /// # Errors
    /// A status as a negative number.
    pub fn adxl_registrations(&self) -> Result<u64, i32> {
        self.0.ask("haulier_sim_adxl_registrations")
    }

    /// How many ranges were still registered when their transfer engine ended.
    ///
    /// # Errors
    /// A status as a negative number.
    pub fn adxl_left(&self) -> Result<u64, i32> {
        self.0.ask("haulier_sim_adxl_left")
    }
}

impl Deref for Control {
    type Target = haulier_sim::control::Control;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

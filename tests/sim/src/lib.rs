//! What the simulated vendor libraries (`sim-cuda`, `sim-ascend`) have in common, whichever vendor's C ABI stands in
//! front of the strict machine. For tests only.

pub mod abi;
pub mod control;
pub mod faults;
pub mod install;
pub mod log;
pub mod process;
pub mod settings;

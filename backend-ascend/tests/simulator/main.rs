//! The backend on the simulated runtime of `tests/sim-ascend`. No NPU takes part in any of this.
//!
//! A process loads the library once, so each test runs in a process of its own, once as on CANN 8.5 and once as on
//! CANN 9: see [`common::alone`].

mod common;
mod context;
mod copy;
mod install;
mod ipc;
mod memory;
mod register;
mod stream;

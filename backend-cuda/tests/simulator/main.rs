//! The backend on the simulated driver of `tests/sim-cuda`. No GPU takes part in any of this.
//!
//! A process loads the driver's library once, so each test runs in a process of its own: see [`common::alone`].

mod common;
mod context;
mod copy;
mod install;
#[cfg(feature = "cudarc")]
mod interop;
mod ipc;
mod register;
mod stream;

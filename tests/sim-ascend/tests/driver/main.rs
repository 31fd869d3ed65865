//! The simulated runtime through its C ABI, found by name as a backend finds it. Each test runs in a process of its own,
//! since a process has one runtime, whose settings are read once.

#[macro_use]
mod process;

mod adxl;
mod capture;
mod contexts;
mod copies;
mod devices;
mod faults;
mod host;
mod initialise;
mod ipc;
mod memory;
mod streams;
mod virtual_memory;

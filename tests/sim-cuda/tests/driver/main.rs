//! The simulated driver through its C ABI, found by name as a backend finds it. Each test runs in a process of its own,
//! since a process has one driver, whose settings are read once.

#[macro_use]
mod process;

mod capture;
mod contexts;
mod cudarc;
mod faults;
mod ipc;
mod memory;
mod streams;
mod virtual_memory;

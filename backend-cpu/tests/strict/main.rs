//! The strict machine is as unpleasant as it says.

#[path = "../common/mod.rs"]
mod common;
mod faults;
mod ipc;
mod memory;
mod order;
mod register;
mod space;
mod streams;
mod threads;

use std::time::Duration;

use backend_cpu::strict::{Builder, Machine, MachineOwner, StrictDevice};
use hal::{Deadline, LogicalId};

/// Long enough to tell "waits" from "does not".
const MOMENT: Duration = Duration::from_millis(20);

fn moment() -> Deadline {
    Deadline::after(MOMENT)
}

/// A machine of two devices that asks little of the address space.
fn builder() -> Builder {
    Machine::builder().memory(256 << 20)
}

fn machine() -> (MachineOwner, StrictDevice, StrictDevice) {
    of(builder())
}

fn of(builder: Builder) -> (MachineOwner, StrictDevice, StrictDevice) {
    let machine = builder.build().unwrap();
    let [zero, one] = [0, 1].map(|logical| machine.device(LogicalId(logical)).unwrap());
    (machine, zero, one)
}

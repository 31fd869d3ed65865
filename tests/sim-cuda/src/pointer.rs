//! What is known of an address.

use std::collections::HashSet;

use backend_cpu::strict::{MemoryKind, Residence};
use parking_lot::Mutex;

use crate::{
    abi::{Answer, In, OutAny, driver, refused, status},
    log::About,
    memory::pool_of,
    sim::{Sim, address},
};

const HOST: u32 = 1;
const DEVICE: u32 = 2;
const POSIX_FD: u64 = 1;
/// The ordinal of memory that the driver does not know, in the plural form.
const NO_DEVICE: i32 = -2;
const READ_WRITE: u32 = 3;

/// An address's attributes. All zero, but for the ordinal, is what the driver does not know.
#[derive(Debug, Clone, Copy, Default)]
struct Facts {
    memory_type: u32,
    ordinal: i32,
    context: u64,
    device_pointer: u64,
    host_pointer: u64,
    buffer: u64,
    managed: bool,
    legacy_ipc: bool,
    /// The allocation, or for mapped memory the reservation.
    range: (u64, u64),
    /// What is mapped around the address.
    mapping: (u64, u64),
    handle_types: u64,
    pool: u64,
    block: u64,
}

/// The one attribute that can be set, SYNC_MEMOPS, by buffer id. It has no effect.
#[derive(Debug, Default)]
pub(crate) struct PointerFlags(Mutex<HashSet<u64>>);

impl PointerFlags {
    fn is_set(&self, buffer: u64) -> bool {
        self.0.lock().contains(&buffer)
    }

    fn set(&self, buffer: u64, on: bool) {
        let mut flags = self.0.lock();
        if on {
            flags.insert(buffer)
        } else {
            flags.remove(&buffer)
        };
    }
}

fn facts(sim: &Sim, pointer: u64) -> Answer<Option<Facts>> {
    if !sim.settings.pointer_query_anywhere {
        sim.context()?;
    }
    let address = address(pointer)?;
    let machine = sim.machine()?;
    let Ok(known) = machine.attributes(address) else { return Ok(None) };
    let mapping = (known.base as u64, known.len as u64);
    let range = (known.range.0 as u64, known.range.1 as u64);
    let buffer = known.buffer.map_or(0, |buffer| buffer.0);
    let on = |device: u32| Facts {
        memory_type: DEVICE,
        ordinal: device.cast_signed(),
        device_pointer: pointer,
        buffer,
        range,
        mapping,
        ..Facts::default()
    };
    let context = |device| sim.contexts.primary(device);
    Ok(match known.residence {
        Residence::Unregistered => None,
        Residence::Registered => sim.pinned.around(address).map(|pinned| Facts {
            memory_type: HOST,
            ordinal: pinned.device.cast_signed(),
            context: pinned.context,
            device_pointer: pointer,
            host_pointer: pointer,
            buffer: pinned.buffer,
            range: (pinned.base as u64, pinned.len as u64),
            mapping: (pinned.base as u64, pinned.len as u64),
            ..Facts::default()
        }),
        Residence::Imported(device) if known.physical == 0 => {
            Some(Facts { context: context(device), ..on(device) })
        }
        Residence::Imported(device) => Some(Facts { block: known.physical, ..on(device) }),
        Residence::Device(device, kind) => Some(match kind {
            MemoryKind::Normal => Facts { context: context(device), legacy_ipc: true, ..on(device) },
            MemoryKind::Managed => {
                Facts { context: context(device), managed: true, host_pointer: pointer, ..on(device) }
            }
            MemoryKind::Pool => Facts { pool: pool_of(device), ..on(device) },
            MemoryKind::Vmm => Facts { block: known.physical, ..on(device) },
            MemoryKind::VmmShareable => Facts { handle_types: POSIX_FD, block: known.physical, ..on(device) },
        }),
    })
}

/// Writes one attribute in the size that it has.
fn put(sim: &Sim, out: OutAny, attribute: u32, facts: &Facts) -> Answer {
    match attribute {
        1 => out.of().set(facts.context),
        2 => out.of().set(facts.memory_type),
        3 => out.of().set(facts.device_pointer),
        4 => out.of().set(facts.host_pointer),
        6 => out.of().set(i32::from(sim.pointer_flags.is_set(facts.buffer))),
        7 => out.of().set(facts.buffer),
        8 => out.of().set(i32::from(facts.managed)),
        9 => out.of().set(facts.ordinal),
        10 => out.of().set(i32::from(facts.legacy_ipc)),
        11 => out.of().set(facts.range.0),
        12 => out.of().set(facts.range.1),
        13 => out.of().set(i32::from(facts.memory_type != 0)),
        14 => out.of().set(facts.handle_types),
        15 => out.of().set(i32::from(facts.memory_type == DEVICE)),
        16 => out.of().set(if facts.memory_type == 0 { 0 } else { READ_WRITE }),
        17 => out.of().set(facts.pool),
        18 => out.of().set(facts.mapping.1),
        19 => out.of().set(facts.mapping.0),
        20 => out.of().set(facts.block),
        _ => refused(status::INVALID_VALUE, format!("no attribute {attribute}")),
    }
}

driver! {
    fn cuPointerGetAttribute(out: OutAny, attribute: u32, pointer: u64) [About::Address(pointer)] |sim| {
        match facts(sim, pointer)? {
            // The singular form has no way to say "unknown".
            None => refused(status::INVALID_VALUE, "not the driver's memory"),
            Some(facts) if attribute == 4 && facts.host_pointer == 0 => {
                refused(status::INVALID_VALUE, "no host address")
            }
            Some(facts) => put(sim, out, attribute, &facts),
        }
    };
    fn cuPointerGetAttributes(count: u32, attributes: In<u32>, outs: In<OutAny>, pointer: u64)
        [About::Address(pointer)] |sim| {
        let count = count as usize;
        let facts = facts(sim, pointer)?.unwrap_or(Facts { ordinal: NO_DEVICE, ..Facts::default() });
        if count == 0 {
            return refused(status::INVALID_VALUE, "no attributes");
        }
        attributes
            .get_all(count)?
            .into_iter()
            .zip(outs.get_all(count)?)
            .try_for_each(|(attribute, out)| put(sim, out, attribute, &facts))
    };
    fn cuPointerSetAttribute(value: In<i32>, attribute: u32, pointer: u64) [About::Address(pointer)] |sim| {
        match facts(sim, pointer)? {
            Some(facts) if attribute == 6 => {
                sim.pointer_flags.set(facts.buffer, value.get()? != 0);
                Ok(())
            }
            _ => refused(status::INVALID_VALUE, format!("attribute {attribute} cannot be set there")),
        }
    };
}

//! Registration of host and device memory for DMA, as plain and as forgetful as a driver's.

use std::collections::BTreeMap;

use super::{
    log::{Argument, Op},
    machine::Machine,
    memory::Side,
    refusal::{Answer, Why},
};

/// What is registered. A driver does not notice that memory is freed, so entries may outlive it.
#[derive(Debug, Default)]
pub(super) struct Pins {
    /// Length and device, by address; no two share a byte.
    by_addr: BTreeMap<usize, (usize, u32)>,
}

impl Pins {
    pub(super) fn forget(&mut self, device: u32) {
        self.by_addr.retain(|_, &mut (_, owner)| owner != device);
    }

    pub(super) fn overlaps(&self, addr: usize, len: usize) -> bool {
        let before = self.by_addr.range(..addr.saturating_add(len)).next_back();
        before.is_some_and(|(&at, &(size, _))| addr < at + size)
    }
}

impl Machine {
    /// A call: registers `len` bytes of host memory, or of the current device's.
    pub fn register(&self, addr: usize, len: usize) -> Answer<()> {
        self.call(Op::Register, Argument::Address(addr), || {
            let device = self.context()?;
            self.beside_captures()?;
            let spec = &self.0.spec;
            let rule = if len == 0 || addr.checked_add(len).is_none() {
                Some("no such range".into())
            } else if !addr.is_multiple_of(spec.register_alignment) {
                Some(format!("not a multiple of {}", spec.register_alignment))
            } else if len > spec.register_max {
                Some(format!("more than {} bytes", spec.register_max))
            } else {
                None
            };
            if let Some(rule) = rule {
                return Err(self.refuse(Why::InvalidValue, format!("{len} bytes at {addr:#x}: {rule}")));
            }
            if let Side::Host(0) = self.side(addr, len, device)? {
                return Err(self.refuse(Why::InvalidValue, "a null address"));
            }
            let mut pins = self.0.pins.lock();
            if pins.overlaps(addr, len) {
                return Err(self.refuse(
                    Why::AlreadyRegistered,
                    format!("{len} bytes at {addr:#x}, in whole or in part"),
                ));
            }
            pins.by_addr.insert(addr, (len, device));
            Ok(())
        })
    }

    /// A call: takes back the registration that starts at `addr`, with the device current that made it.
    pub fn unregister(&self, addr: usize) -> Answer<()> {
        self.call(Op::Unregister, Argument::Address(addr), || {
            let device = self.context()?;
            self.beside_captures()?;
            let mut pins = self.0.pins.lock();
            match pins.by_addr.get(&addr) {
                None => Err(self.refuse(Why::NotRegistered, format!("no registration starts at {addr:#x}"))),
                Some(&(_, owner)) if owner != device => Err(self.elsewhere(addr, owner, device)),
                Some(_) => {
                    pins.by_addr.remove(&addr);
                    Ok(())
                }
            }
        })
    }

    /// How many registrations there are, parts counted one by one.
    pub fn registrations(&self) -> usize {
        self.0.pins.lock().by_addr.len()
    }
}

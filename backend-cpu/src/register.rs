//! Registration. The host needs none for a copy, so this is the bookkeeping alone: what is counted, refused and
//! replaced here is counted, refused and replaced on an accelerator.

use hal::{Pin, Place, Region, Registered, Result};

use crate::{CpuDevice, ipc::foreign};

/// A registered region. Dropping it deregisters, on any thread.
#[derive(Debug)]
pub struct CpuRegistration {
    device: CpuDevice,
    registered: Option<Registered>,
}

/// No driver, so nothing is to be pinned.
struct NoPin;

impl Pin for NoPin {
    fn pin(&self, _addr: usize, _len: usize) -> Result<()> {
        Ok(())
    }

    fn unpin(&self, _addr: usize, _len: usize) -> Result<()> {
        Ok(())
    }
}

pub(crate) fn register(device: &CpuDevice, region: Region) -> Result<CpuRegistration> {
    const OP: &str = "register";
    if let Place::Device(_) = region.place {
        return Err(foreign(OP));
    }
    let allocation = device.allocations().find(OP, region.addr, region.len)?;
    let buffer = allocation.map(|(allocated, _)| allocated.buffer);
    let registered = device.registry().register(&NoPin, region.addr, region.len, buffer)?;
    Ok(CpuRegistration { device: device.clone(), registered: Some(registered) })
}

impl Drop for CpuRegistration {
    fn drop(&mut self) {
        let Some(registered) = self.registered.take() else { return };
        if let Err(e) = self.device.registry().unregister(&NoPin, registered) {
            tracing::error!(error = %e, "deregister");
        }
    }
}

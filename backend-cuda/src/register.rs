//! Registration: host memory is pinned by the driver, device memory is counted.

use std::collections::HashMap;

use hal::{Bound, Kind, Pin, Place, Region, Registered, Registry, Result};
use parking_lot::Mutex;

use crate::{
    BACKEND, CudaDevice,
    memory::{self, Around, around},
};

/// The most bytes of one registration. Drivers from r580 on refuse 512 GiB and more, since the kernel gives no table of
/// that many pages; the field registers in pieces of this size.
const PART_MAX: usize = 64 << 30;

/// A registered region. Dropping it deregisters, with a device current.
///
/// Drop it before the memory is freed. For device memory that was freed and allocated anew the backend notices; for host
/// memory nobody can, and the driver would go on using pages that are no longer there.
#[derive(Debug)]
pub struct CudaRegistration {
    device: CudaDevice,
    place: Place,
    registered: Option<Registered>,
}

/// The host memory that is registered, for all devices together: the driver pins it for every context.
#[derive(Debug)]
pub(crate) struct HostMemory {
    registry: Registry,
    /// Who pinned each part, by address.
    pinned_by: Mutex<HashMap<usize, Pinner>>,
}

#[derive(Debug)]
enum Pinner {
    /// A device of ours. Kept, since the registration is gone with the context that made it.
    Device(CudaDevice),
    /// The application or its framework, which also takes it back.
    Other,
}

impl HostMemory {
    pub(crate) fn new() -> Self {
        HostMemory { registry: Registry::new(BACKEND, PART_MAX), pinned_by: Mutex::default() }
    }

    pub(crate) fn len(&self) -> usize {
        self.registry.len()
    }
}

/// The driver's registration calls, for host memory.
struct HostPins<'d>(&'d CudaDevice);

impl Pin for HostPins<'_> {
    fn pin(&self, addr: usize, len: usize) -> Result<()> {
        const OP: &str = "register";
        let device = self.0;
        let pinner = match around(device, OP, addr, 0)? {
            // Pinned already, and not by us, since the registry asks once: memory of `cuMemHostAlloc`, say.
            Around::Host { pinned: Some(pinned) } if len <= pinned => Pinner::Other,
            Around::Host { .. } => {
                let pinned = device.driver().register_host(addr, len);
                pinned.map_err(|refusal| device.refused(OP, refusal))?;
                Pinner::Device(device.clone())
            }
            Around::Device(block) => {
                return Err(device.plain(Kind::DeviceMismatch, OP).detail(format!(
                    "{addr:#x} was given as host memory and is memory of a device ({:?})",
                    block.place
                )));
            }
        };
        device.host_memory().pinned_by.lock().insert(addr, pinner);
        Ok(())
    }

    fn unpin(&self, addr: usize, _len: usize) -> Result<()> {
        const OP: &str = "unregister";
        let pinner = self.0.host_memory().pinned_by.lock().remove(&addr);
        let Some(Pinner::Device(device)) = pinner else { return Ok(()) };
        // The one that pinned it, which need not be the one that is current.
        let _bound = hal::Device::bind_current(&device)?;
        device.driver().unregister_host(addr).map_err(|refusal| device.refused(OP, refusal))
    }
}

/// Device memory needs no pinning.
struct NoPins;

impl Pin for NoPins {
    fn pin(&self, _addr: usize, _len: usize) -> Result<()> {
        Ok(())
    }

    fn unpin(&self, _addr: usize, _len: usize) -> Result<()> {
        Ok(())
    }
}

pub(crate) fn register(bound: &Bound<'_, CudaDevice>, region: Region) -> Result<CudaRegistration> {
    const OP: &str = "register";
    let device = bound.device();
    let Region { addr, len, place } = region;
    device.own(OP, place)?;
    let _relaxed = CudaDevice::unspoiled(bound, OP)?;
    let registered = match place {
        Place::Host => {
            device.needs(hal::Device::caps(device).register_host, OP)?;
            // Host memory has no id that would outlive its registration, so none is passed.
            device.host_memory().registry.register(&HostPins(device), addr, len, None)?
        }
        Place::Device(_) => {
            let located = memory::locate(device, OP, addr, len)?;
            device.own(OP, located.region.place)?;
            let buffer = located.allocation.map(|allocation| allocation.buffer);
            device.device_memory().register(&NoPins, addr, len, buffer)?
        }
    };
    Ok(CudaRegistration { device: device.clone(), place, registered: Some(registered) })
}

impl Drop for CudaRegistration {
    fn drop(&mut self) {
        let Some(registered) = self.registered.take() else { return };
        let device = &self.device;
        match self.place {
            Place::Host => device.give_back("unregister", |_| {
                device.host_memory().registry.unregister(&HostPins(device), registered)
            }),
            // No driver call, so no context either; it cannot fail.
            Place::Device(_) => {
                let _ = device.device_memory().unregister(&NoPins, registered);
            }
        }
    }
}

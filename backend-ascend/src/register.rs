//! Registration: host memory is made reachable for the device by ACL, device memory is counted.

use std::{collections::HashMap, fs};

use hal::{Bound, Error, Kind, Pin, Place, Region, Registered, Registry, Result};
use parking_lot::Mutex;

use crate::{
    AscendDevice, BACKEND,
    ffi::ACL_ERROR_RT_HOST_MEMORY_ALREADY_REGISTERED,
    memory::{self, Around, PAGE, around},
};

/// The most bytes of one registration. ACL states no limit; drivers take a table of pages for each, and the kernel gives
/// none for half a TiB. A multiple of the alignment.
const PART_MAX: usize = 64 << 30;
/// The last Linux on which ACL must not be given memory that is not pinned yet.
const UNPINNED_ABOVE: (u32, u32) = (5, 10);

/// A registered region. Dropping it deregisters, with a device current.
///
/// Drop it before the memory is freed. For device memory of this backend that was freed and allocated anew the backend
/// notices; for host memory nobody can.
#[derive(Debug)]
pub struct AscendRegistration {
    device: AscendDevice,
    place: Place,
    registered: Option<Registered>,
}

/// The host memory that is registered, for all devices together.
#[derive(Debug)]
pub(crate) struct HostMemory {
    registry: Registry,
    /// Who registered each part, by address.
    pinned_by: Mutex<HashMap<usize, Pinner>>,
}

#[derive(Debug)]
enum Pinner {
    Device(AscendDevice),
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

/// ACL's registration calls, for host memory.
struct HostPins<'d>(&'d AscendDevice);

impl Pin for HostPins<'_> {
    fn pin(&self, addr: usize, len: usize) -> Result<()> {
        const OP: &str = "register";
        let device = self.0;
        let pinner = match device.driver().register_host(addr, len) {
            Ok(()) => Pinner::Device(*device),
            // Not by us, since the registry asks once.
            Err(refusal) if refusal.code == Some(ACL_ERROR_RT_HOST_MEMORY_ALREADY_REGISTERED) => {
                if !is_pinned(device, OP, addr, len)? {
                    return Err(device.refused(OP, refusal));
                }
                Pinner::Other
            }
            Err(refusal) => return Err(device.refused(OP, refusal)),
        };
        device.host_memory().pinned_by.lock().insert(addr, pinner);
        Ok(())
    }

    fn unpin(&self, addr: usize, _len: usize) -> Result<()> {
        const OP: &str = "unregister";
        let pinner = self.0.host_memory().pinned_by.lock().remove(&addr);
        let Some(Pinner::Device(device)) = pinner else { return Ok(()) };
        // The one that registered it, which need not be the one that is current.
        let _bound = hal::Device::bind_current(&device)?;
        device.driver().unregister_host(addr).map_err(|refusal| device.refused(OP, refusal))
    }
}

/// Whether ACL says that the bytes are pinned, at their beginning and their end. Memory of a device is refused.
fn is_pinned(device: &AscendDevice, op: &'static str, addr: usize, len: usize) -> Result<bool> {
    for addr in [addr, addr + (len - 1)] {
        match around(device, op, addr, 0)? {
            Around::Host { pinned: true } => {}
            Around::Host { pinned: false } => return Ok(false),
            Around::Device(block) => {
                return Err(device.plain(Kind::DeviceMismatch, op).detail(format!(
                    "{addr:#x} was given as host memory and is memory of a device ({:?})",
                    block.place
                )));
            }
        }
    }
    Ok(true)
}

/// Whether ACL may be given memory that is not pinned yet, on this kernel. Where it may not, there is nothing to
/// register: what is pinned (`aclrtMallocHost`) needs no registration.
pub(crate) fn takes_unpinned() -> bool {
    above(&fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default())
}

fn above(release: &str) -> bool {
    kernel(release).is_none_or(|kernel| kernel > UNPINNED_ABOVE)
}

fn kernel(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
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

pub(crate) fn register(bound: &Bound<'_, AscendDevice>, region: Region) -> Result<AscendRegistration> {
    const OP: &str = "register";
    let device = bound.device();
    let Region { addr, len, place } = region;
    device.own(OP, place)?;
    let _relaxed = AscendDevice::unspoiled(bound, OP)?;
    let registered = match place {
        Place::Host => {
            if !hal::Device::caps(device).register_host {
                return Err(device.plain(Kind::Unsupported, OP).detail(
                    "this CANN has no aclrtHostRegister, or Linux is 5.10 or older, where it takes only memory of \
                     aclrtMallocHost, which needs none; memory that is not registered is copied all the same",
                ));
            }
            if !addr.is_multiple_of(PAGE) {
                return Err(misaligned(device.plain(Kind::InvalidArgument, OP), addr));
            }
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
    Ok(AscendRegistration { device: *device, place, registered: Some(registered) })
}

fn misaligned(error: Error, addr: usize) -> Error {
    error.detail(format!(
        "ACL registers host memory from multiples of {PAGE} bytes on; this begins at {addr:#x}"
    ))
}

impl Drop for AscendRegistration {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernels_release_is_read() {
        assert_eq!(kernel("5.10.0-60.18.0.50.oe2203.aarch64\n"), Some((5, 10)));
        assert_eq!(kernel("6.18.44-fc\n"), Some((6, 18)));
        assert_eq!((kernel(""), kernel("next")), (None, None));
    }

    #[test]
    fn on_old_kernels_no_host_memory_is_registered() {
        for old in ["4.19.90-2003.4.0.0036.oe1.aarch64", "5.10.0-60.18.0.50.oe2203.aarch64"] {
            assert!(!above(old), "{old}");
        }
        for new in ["5.11.0", "6.6.0-28.0.0.34.oe2403.aarch64", "", "next"] {
            assert!(above(new), "{new}");
        }
    }
}

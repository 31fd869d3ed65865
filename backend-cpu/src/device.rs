//! The host as a device.

use std::{
    os::fd::OwnedFd,
    ptr,
    sync::{Arc, OnceLock},
};

use hal::{
    Bound, Caps, Deadline, Device, DeviceUuid, Export, Identity, IpcHandle, Kind, Located, LogicalId, Place,
    Presence, Region, Registry, Result,
};

use crate::{
    CpuAllocation, CpuImport, CpuRegistration, CpuStream,
    error::{BACKEND, error},
    ipc,
    memory::Allocations,
    register,
    stream::Streams,
};

/// Not /etc/machine-id: containers of one host have their own, and images of two hosts may share one.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Whether [`CpuDevice::open`] works here, and if not, why. The host needs no library and no driver.
pub fn probe() -> Presence {
    presence(CpuDevice::open())
}

fn presence(opened: Result<CpuDevice>) -> Presence {
    match opened {
        Ok(_) => Presence::Present { library: None },
        Err(e) => Presence::Absent { why: e.to_string(), looked: vec![BOOT_ID.into()] },
    }
}

/// The host. There is one in a process, and every handle means that one.
#[derive(Debug, Clone)]
pub struct CpuDevice(Arc<Host>);

#[derive(Debug)]
struct Host {
    identity: Identity,
    allocations: Allocations,
    streams: Streams,
    registry: Registry,
}

impl CpuDevice {
    /// The host's device.
    ///
    /// Its UUID is the same in every process until the host boots again, containers included, and differs between
    /// hosts.
    ///
    /// *Errors*: [`Kind::NotPresent`] where the host does not tell its boot id.
    pub fn open() -> Result<Self> {
        static HOST: OnceLock<Result<CpuDevice>> = OnceLock::new();
        HOST.get_or_init(|| {
            let identity = Identity {
                backend: BACKEND,
                uuid: host_uuid(BOOT_ID)?,
                logical: LogicalId(0),
                physical: None,
                name: "host memory".into(),
            };
            Ok(CpuDevice(Arc::new(Host {
                identity,
                allocations: Allocations::default(),
                streams: Streams::default(),
                registry: Registry::new(BACKEND, usize::MAX),
            })))
        })
        .clone()
    }

    /// How many distinct regions are registered in this process.
    pub fn registrations(&self) -> usize {
        self.0.registry.len()
    }

    pub(crate) fn uuid(&self) -> DeviceUuid {
        self.0.identity.uuid
    }

    pub(crate) fn allocations(&self) -> &Allocations {
        &self.0.allocations
    }

    pub(crate) fn streams(&self) -> &Streams {
        &self.0.streams
    }

    pub(crate) fn registry(&self) -> &Registry {
        &self.0.registry
    }
}

impl Device for CpuDevice {
    type Stream = CpuStream;
    type Previous = ();
    type Allocation = CpuAllocation;
    type Registration = CpuRegistration;
    type Import = CpuImport;

    fn identity(&self) -> &Identity {
        &self.0.identity
    }

    fn caps(&self) -> Caps {
        let mut caps = Caps::default();
        caps.ipc_export = true;
        caps.ipc_import = true;
        caps.register_host = true;
        caps.register_device = true;
        caps
    }

    fn bind_current(&self) -> Result<Bound<'_, Self>> {
        // SAFETY: the host has no current device to be set; every thread can use it.
        Ok(unsafe { Bound::new(self, None) })
    }

    fn bind_owned_thread(&self) -> Result<Bound<'_, Self>> {
        self.bind_current()
    }

    unsafe fn restore(&self, (): ()) {}

    fn current_stream(bound: &Bound<'_, Self>) -> CpuStream {
        hal::named_stream(bound.device()).unwrap_or(CpuStream::DEFAULT)
    }

    fn is_per_thread(_stream: CpuStream) -> bool {
        false
    }

    fn sync_stream(bound: &Bound<'_, Self>, stream: CpuStream, deadline: Deadline) -> Result<()> {
        bound.device().streams().sync(stream, deadline)
    }

    fn locate(bound: &Bound<'_, Self>, addr: usize, len: usize) -> Result<Located> {
        bound.device().allocations().locate(addr, len)
    }

    fn allocate(bound: &Bound<'_, Self>, len: usize) -> Result<CpuAllocation> {
        CpuAllocation::new(bound.device(), len)
    }

    unsafe fn copy(_bound: &Bound<'_, Self>, to: Region, from: Region) -> Result<()> {
        const OP: &str = "copy";
        if to.place != Place::Host || from.place != Place::Host {
            return Err(ipc::foreign(OP));
        }
        if to.len != from.len {
            return Err(
                error(Kind::InvalidArgument, OP).detail(format!("{} bytes into {} bytes", from.len, to.len))
            );
        }
        if to.len == 0 {
            return Ok(());
        }
        if to.addr == 0 || from.addr == 0 {
            return Err(error(Kind::InvalidArgument, OP).detail("a null address"));
        }
        let (source, target) =
            (ptr::with_exposed_provenance::<u8>(from.addr), ptr::with_exposed_provenance_mut::<u8>(to.addr));
        // SAFETY: the caller promises that both regions are allocated and left alone; they may overlap.
        unsafe { ptr::copy(source, target, to.len) };
        Ok(())
    }

    fn export_ipc(bound: &Bound<'_, Self>, region: Region) -> Result<Export> {
        ipc::export(bound.device(), region)
    }

    fn import_ipc(
        bound: &Bound<'_, Self>,
        handle: &IpcHandle,
        descriptors: Vec<OwnedFd>,
    ) -> Result<CpuImport> {
        ipc::import(bound.device(), handle, descriptors)
    }

    fn register(bound: &Bound<'_, Self>, region: Region) -> Result<CpuRegistration> {
        register::register(bound.device(), region)
    }
}

fn host_uuid(boot_id: &str) -> Result<DeviceUuid> {
    let boot = std::fs::read(boot_id).map_err(|e| {
        error(Kind::NotPresent, "open")
            .detail(format!("{boot_id} could not be read ({e}); mount /proc"))
            .with_source(e)
    })?;
    Ok(derive_uuid(&[b"haulier/cpu", boot.trim_ascii()]))
}

/// A UUID from what names a device, by 128-bit FNV-1a: nobody is to be kept from forging it, only from hitting it by
/// chance.
pub(crate) fn derive_uuid(parts: &[&[u8]]) -> DeviceUuid {
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
    let mut hash: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    for part in parts {
        // The separator keeps ("ab", "c") apart from ("a", "bc").
        for &byte in part.iter().chain(&[0xff]) {
            hash = (hash ^ u128::from(byte)).wrapping_mul(PRIME);
        }
    }
    DeviceUuid(hash.to_be_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_uuid_is_the_hosts_and_not_the_processs() {
        assert_eq!(host_uuid(BOOT_ID).unwrap(), CpuDevice::open().unwrap().uuid());
        assert_ne!(derive_uuid(&[b"haulier/cpu", b"boot a"]), derive_uuid(&[b"haulier/cpu", b"boot b"]));
        assert_ne!(derive_uuid(&[b"ab", b"c"]), derive_uuid(&[b"a", b"bc"]));
    }

    #[test]
    fn a_host_that_cannot_be_opened_is_not_present_and_says_why() {
        assert!(matches!(probe(), Presence::Present { library: None }));
        let refused = host_uuid("/proc/no/boot_id").unwrap_err();
        assert_eq!(refused.kind(), Kind::NotPresent);
        let told = presence(Err(refused)).to_string();
        assert!(told.starts_with("not present") && told.contains("/proc/no/boot_id"), "{told}");
        assert!(told.contains("No such file") && told.contains("mount /proc"), "{told}");
    }
}

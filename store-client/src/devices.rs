//! The backends that are compiled in, and [`AnyDevice`], which is any of their devices: for the daemon and the command.
//!
//! This is the one place that names backends. [`StoreClient`](crate::StoreClient) is generic and knows none.

use std::os::fd::OwnedFd;

use hal::{
    Bound, Caps, Deadline, Device, DeviceExt, Error, Export, Identity, IpcHandle, Kind, Located, Memory,
    Presence, Region, Result,
};

/// Declares the enum over the devices, and its dispatch: each arm is the same call on the device inside.
macro_rules! any_device {
    ($($(#[$gate:meta])* $name:ident($device:ty)),* $(,)?) => {
        /// A device of any backend that is compiled in.
        #[derive(Debug, Clone)]
        #[non_exhaustive]
        pub enum AnyDevice { $($(#[$gate])* #[allow(missing_docs)] $name($device)),* }

        /// A stream of [`AnyDevice`].
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum AnyStream { $($(#[$gate])* #[allow(missing_docs)] $name(<$device as Device>::Stream)),* }

        /// What a thread had before [`AnyDevice`] was bound.
        #[derive(Debug)]
        #[non_exhaustive]
        pub enum AnyPrevious { $($(#[$gate])* #[allow(missing_docs)] $name(<$device as Device>::Previous)),* }

        /// Memory of [`AnyDevice`].
        #[derive(Debug)]
        #[non_exhaustive]
        pub enum AnyAllocation { $($(#[$gate])* #[allow(missing_docs)] $name(<$device as Device>::Allocation)),* }

        /// A registration of [`AnyDevice`].
        #[derive(Debug)]
        #[non_exhaustive]
        pub enum AnyRegistration { $($(#[$gate])* #[allow(missing_docs)] $name(<$device as Device>::Registration)),* }

        /// An import of [`AnyDevice`].
        #[derive(Debug)]
        #[non_exhaustive]
        pub enum AnyImport { $($(#[$gate])* #[allow(missing_docs)] $name(<$device as Device>::Import)),* }

        impl Memory for AnyAllocation {
            fn region(&self) -> Region {
                match *self { $($(#[$gate])* AnyAllocation::$name(ref inner) => inner.region(),)* }
            }
        }

        impl Memory for AnyImport {
            fn region(&self) -> Region {
                match *self { $($(#[$gate])* AnyImport::$name(ref inner) => inner.region(),)* }
            }
        }

        /// Runs `$call` with the proof of the device inside `$outer`, for which the stream is named that is named for the
        /// outer one: a backend looks at the current stream before it spoils a capture.
        macro_rules! inside {
            ($outer:expr, $inner:ident => $call:expr, $wrap:ident) => {
                match *$outer.device() {
                    $($(#[$gate])* AnyDevice::$name(ref device) => {
                        // SAFETY: the outer proof says that this very device is current on this thread.
                        let $inner = unsafe { Bound::new(device, None) };
                        match hal::named_stream($outer.device()) {
                            Some(AnyStream::$name(stream)) => device.with_stream(stream, || $call),
                            _ => $call,
                        }
                        .map($wrap::$name)
                    })*
                }
            };
            ($outer:expr, $inner:ident => $call:expr) => {
                match *$outer.device() {
                    $($(#[$gate])* AnyDevice::$name(ref device) => {
                        // SAFETY: as above.
                        let $inner = unsafe { Bound::new(device, None) };
                        match hal::named_stream($outer.device()) {
                            Some(AnyStream::$name(stream)) => device.with_stream(stream, || $call),
                            _ => $call,
                        }
                    })*
                }
            };
        }

        #[allow(unreachable_patterns, unused_variables)]
        impl Device for AnyDevice {
            type Stream = AnyStream;
            type Previous = AnyPrevious;
            type Allocation = AnyAllocation;
            type Registration = AnyRegistration;
            type Import = AnyImport;

            fn identity(&self) -> &Identity {
                match *self { $($(#[$gate])* AnyDevice::$name(ref device) => device.identity(),)* }
            }

            fn caps(&self) -> Caps {
                match *self { $($(#[$gate])* AnyDevice::$name(ref device) => device.caps(),)* }
            }

            fn bind_current(&self) -> Result<Bound<'_, Self>> {
                match *self {
                    $($(#[$gate])* AnyDevice::$name(ref device) => {
                        let inner = device.bind_current()?;
                        // SAFETY: nothing was bound after it, and the proof below takes over.
                        let previous = unsafe { inner.into_previous() }.map(AnyPrevious::$name);
                        // SAFETY: the device inside was bound just now, and its duty to restore was taken over.
                        Ok(unsafe { Bound::new(self, previous) })
                    })*
                }
            }

            fn bind_owned_thread(&self) -> Result<Bound<'_, Self>> {
                match *self {
                    $($(#[$gate])* AnyDevice::$name(ref device) => {
                        let inner = device.bind_owned_thread()?;
                        // SAFETY: as in `bind_current`.
                        let previous = unsafe { inner.into_previous() }.map(AnyPrevious::$name);
                        // SAFETY: as in `bind_current`.
                        Ok(unsafe { Bound::new(self, previous) })
                    })*
                }
            }

            unsafe fn restore(&self, previous: AnyPrevious) {
                match (self, previous) {
                    $($(#[$gate])* (AnyDevice::$name(device), AnyPrevious::$name(previous)) => {
                        // SAFETY: the caller promises what the device inside asks for.
                        unsafe { device.restore(previous) }
                    })*
                    _ => {}
                }
            }

            fn current_stream(bound: &Bound<'_, Self>) -> AnyStream {
                if let Some(named) = hal::named_stream(bound.device()) {
                    return named;
                }
                match *bound.device() {
                    $($(#[$gate])* AnyDevice::$name(ref device) => {
                        // SAFETY: the outer proof says that this very device is current on this thread.
                        AnyStream::$name(unsafe { Bound::new(device, None) }.current_stream())
                    })*
                }
            }

            fn is_per_thread(stream: AnyStream) -> bool {
                match stream { $($(#[$gate])* AnyStream::$name(stream) => <$device>::is_per_thread(stream),)* }
            }

            fn sync_stream(bound: &Bound<'_, Self>, stream: AnyStream, deadline: Deadline) -> Result<()> {
                match (bound.device(), stream) {
                    $($(#[$gate])* (AnyDevice::$name(device), AnyStream::$name(stream)) => {
                        // SAFETY: the outer proof says that this very device is current on this thread.
                        unsafe { Bound::new(device, None) }.sync_stream(stream, deadline)
                    })*
                    _ => Err(other_backend(bound, "sync_stream")),
                }
            }

            fn locate(bound: &Bound<'_, Self>, addr: usize, len: usize) -> Result<Located> {
                inside!(bound, inner => inner.locate(addr, len))
            }

            fn allocate(bound: &Bound<'_, Self>, len: usize) -> Result<AnyAllocation> {
                inside!(bound, inner => inner.allocate(len), AnyAllocation)
            }

            unsafe fn copy(bound: &Bound<'_, Self>, to: Region, from: Region) -> Result<()> {
                // SAFETY: the caller promises what the device inside asks for.
                inside!(bound, inner => unsafe { inner.copy(to, from) })
            }

            fn export_ipc(bound: &Bound<'_, Self>, region: Region) -> Result<Export> {
                inside!(bound, inner => inner.export_ipc(region))
            }

            fn import_ipc(
                bound: &Bound<'_, Self>,
                handle: &IpcHandle,
                descriptors: Vec<OwnedFd>,
            ) -> Result<AnyImport> {
                inside!(bound, inner => inner.import_ipc(handle, descriptors), AnyImport)
            }

            fn imports_may_linger(&self) -> bool {
                match *self { $($(#[$gate])* AnyDevice::$name(ref device) => device.imports_may_linger(),)* }
            }

            fn register(bound: &Bound<'_, Self>, region: Region) -> Result<AnyRegistration> {
                inside!(bound, inner => inner.register(region), AnyRegistration)
            }
        }
    };
}

any_device! {
    #[cfg(feature = "cpu")]
    Cpu(backend_cpu::CpuDevice),
    #[cfg(feature = "cuda")]
    Cuda(backend_cuda::CudaDevice),
    #[cfg(feature = "ascend")]
    Ascend(backend_ascend::AscendDevice),
}

#[allow(dead_code)]
fn other_backend(bound: &Bound<'_, AnyDevice>, op: &'static str) -> Error {
    let identity = bound.device().identity();
    Error::new(Kind::InvalidArgument, identity.backend, op)
        .on(identity.logical)
        .detail("the stream is of another backend")
}

/// One backend, as `haulier devices` lists it.
#[derive(Debug)]
pub struct Backend {
    /// Its name.
    pub name: &'static str,
    /// Whether this build has it, and if so what the machine has of it.
    pub presence: Option<Presence>,
    /// Its devices, where it is present.
    pub devices: Vec<AnyDevice>,
}

/// Looks what the machine has of a backend.
type Look = fn() -> Backend;

/// Every backend by name.
const BACKENDS: [(&str, Look); 3] = [("cpu", cpu), ("cuda", cuda), ("ascend", ascend)];

fn cpu() -> Backend {
    cfg_if::cfg_if! {
        if #[cfg(feature = "cpu")] {
            let presence = backend_cpu::probe();
            // Where it cannot be opened, the presence says why.
            let devices = backend_cpu::CpuDevice::open().map(AnyDevice::Cpu).into_iter().collect();
            Backend { name: "cpu", presence: Some(presence), devices }
        } else {
            Backend { name: "cpu", presence: None, devices: Vec::new() }
        }
    }
}

fn cuda() -> Backend {
    cfg_if::cfg_if! {
        if #[cfg(feature = "cuda")] {
            let (presence, devices) = backend_cuda::devices();
            let devices = devices.into_iter().map(AnyDevice::Cuda).collect();
            Backend { name: "cuda", presence: Some(presence), devices }
        } else {
            Backend { name: "cuda", presence: None, devices: Vec::new() }
        }
    }
}

fn ascend() -> Backend {
    cfg_if::cfg_if! {
        if #[cfg(feature = "ascend")] {
            let (presence, devices) = backend_ascend::devices();
            let devices = devices.into_iter().map(AnyDevice::Ascend).collect();
            Backend { name: "ascend", presence: Some(presence), devices }
        } else {
            Backend { name: "ascend", presence: None, devices: Vec::new() }
        }
    }
}

/// Every backend that Haulier knows, compiled in or not, with its devices. Initialises the drivers that are present;
/// creates no context on any device.
pub fn backends() -> Vec<Backend> {
    BACKENDS.iter().map(|(_, look)| look()).collect()
}

/// The devices of the backend called `name`. Leaves the drivers of all others alone.
///
/// *Errors*: [`Unsupported`](crate::Error::Unsupported) for a name that is unknown, not compiled in, or has no device
/// here; it lists the names that would do.
pub fn open(name: &str) -> crate::Result<Vec<AnyDevice>> {
    let found = BACKENDS.iter().find(|(known, _)| *known == name).map(|(_, look)| look());
    let why = match found {
        None => format!("there is no backend {name:?}"),
        Some(Backend { presence: None, .. }) => {
            format!("backend {name:?} is not compiled in (cargo feature `{name}`)")
        }
        Some(Backend { presence: Some(presence), devices, .. }) if devices.is_empty() => {
            format!("backend {name:?} has no device here: {presence}")
        }
        Some(backend) => return Ok(backend.devices),
    };
    let backends = backends();
    let usable: Vec<&str> = backends.iter().filter(|b| !b.devices.is_empty()).map(|b| b.name).collect();
    let usable = if usable.is_empty() { "none".to_owned() } else { usable.join(", ") };
    Err(crate::Error::Unsupported { what: format!("{why}; usable here: {usable}") })
}

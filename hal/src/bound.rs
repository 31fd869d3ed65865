//! The proof that a device is current on this thread.

use std::{cell::Cell, marker::PhantomData};

use crate::{Deadline, Device, DeviceUuid, Error, Export, IpcHandle, Kind, Located, Region, Result};

thread_local! {
    /// The device of the innermost live proof on this thread.
    static INNERMOST: Cell<Option<DeviceUuid>> = const { Cell::new(None) };
}

/// Proof that device `D` is current on the calling thread.
///
/// Made by [`Device::bind_current`]; dropping it restores what was current before. It stays on its thread (it is neither
/// `Send` nor `Sync`), and it carries its device, so a proof of another device cannot be passed. Proofs nest like
/// scopes: while an inner proof of another device is alive, the outer one answers [`Kind::NotBound`] instead of
/// working on the wrong device.
#[must_use = "the device is current only while the proof is alive"]
#[derive(Debug)]
pub struct Bound<'d, D: Device> {
    device: &'d D,
    previous: Option<D::Previous>,
    outer: Option<DeviceUuid>,
    _on_this_thread: PhantomData<*const ()>,
}

impl<'d, D: Device> Bound<'d, D> {
    /// A proof for `device`. For backends only.
    ///
    /// `previous` is what [`Device::restore`] needs when the proof is dropped, `None` where nothing is to be restored.
    ///
    /// # Safety
    /// `device` must be current on the calling thread.
    pub unsafe fn new(device: &'d D, previous: Option<D::Previous>) -> Self {
        let outer = INNERMOST.replace(Some(device.identity().uuid));
        Bound { device, previous, outer, _on_this_thread: PhantomData }
    }

    /// Ends the proof without restoring and hands that duty on. For wrappers of a device, whose own proof takes over.
    pub fn into_previous(mut self) -> Option<D::Previous> {
        self.previous.take()
    }

    /// The device that is current.
    pub fn device(&self) -> &'d D {
        self.device
    }

    /// See [`Device::current_stream`].
    pub fn current_stream(&self) -> D::Stream {
        D::current_stream(self)
    }

    /// See [`Device::sync_stream`].
    pub fn sync_stream(&self, stream: D::Stream, deadline: Deadline) -> Result<()> {
        self.innermost("sync_stream")?;
        D::sync_stream(self, stream, deadline)
    }

    /// See [`Device::locate`].
    pub fn locate(&self, addr: usize, len: usize) -> Result<Located> {
        self.innermost("locate")?;
        D::locate(self, addr, len)
    }

    /// See [`Device::allocate`].
    pub fn allocate(&self, len: usize) -> Result<D::Allocation> {
        self.innermost("allocate")?;
        D::allocate(self, len)
    }

    /// See [`Device::export_ipc`].
    pub fn export_ipc(&self, region: Region) -> Result<Export> {
        self.innermost("export_ipc")?;
        D::export_ipc(self, region)
    }

    /// See [`Device::import_ipc`].
    pub fn import_ipc(
        &self,
        handle: &IpcHandle,
        descriptors: Vec<std::os::fd::OwnedFd>,
    ) -> Result<D::Import> {
        self.innermost("import_ipc")?;
        D::import_ipc(self, handle, descriptors)
    }

    /// See [`Device::register`].
    pub fn register(&self, region: Region) -> Result<D::Registration> {
        self.innermost("register")?;
        D::register(self, region)
    }

    /// See [`Device::copy`].
    ///
    /// # Safety
    /// As there.
    pub unsafe fn copy(&self, to: Region, from: Region) -> Result<()> {
        self.innermost("copy")?;
        // SAFETY: the caller promises what `Device::copy` asks for.
        unsafe { D::copy(self, to, from) }
    }

    fn innermost(&self, op: &'static str) -> Result<()> {
        let identity = self.device.identity();
        if INNERMOST.get() == Some(identity.uuid) {
            return Ok(());
        }
        Err(Error::new(Kind::NotBound, identity.backend, op).on(identity.logical).detail(
            "another device was bound on this thread after this proof was made, and proofs nest like scopes",
        ))
    }
}

impl<D: Device> Drop for Bound<'_, D> {
    fn drop(&mut self) {
        INNERMOST.set(self.outer);
        if let Some(previous) = self.previous.take() {
            self.device.restore(previous);
        }
    }
}

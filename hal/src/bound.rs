//! The proof that a device is current on this thread.

use std::{cell::RefCell, marker::PhantomData};

use crate::{Deadline, Device, DeviceUuid, Error, Export, IpcHandle, Kind, Located, Region, Result};

thread_local! {
    static PROOFS: RefCell<Proofs> = const { RefCell::new(Proofs { valid: Vec::new(), last: 0 }) };
}

/// The valid proofs of one thread, oldest first.
///
/// A forgotten proof stays in here, which is the truth: what it bound stays current.
struct Proofs {
    valid: Vec<Entry>,
    last: u64,
}

struct Entry {
    serial: u64,
    device: DeviceUuid,
}

impl Proofs {
    fn begin(&mut self, device: DeviceUuid) -> u64 {
        self.last += 1;
        self.valid.push(Entry { serial: self.last, device });
        self.last
    }

    fn position(&self, serial: u64) -> Option<usize> {
        // It is nearly always the youngest.
        self.valid.iter().rposition(|entry| entry.serial == serial)
    }

    /// Why the proof's device need not be current any more, if so.
    fn objection(&self, serial: u64) -> Option<&'static str> {
        let Some(at) = self.position(serial) else {
            return Some(
                "an older proof of this thread was dropped before this one, and proofs nest like scopes",
            );
        };
        let covered = self.valid.last().is_some_and(|youngest| youngest.device != self.valid[at].device);
        covered.then_some(
            "another device was bound on this thread after this proof was made, and proofs nest like scopes",
        )
    }

    /// Ends a proof, and whether it was valid until now. One that `restores` takes the younger ones with it: what they
    /// found is not there any more. One that does not leaves current what they made so.
    fn end(&mut self, serial: u64, restores: bool) -> bool {
        let Some(at) = self.position(serial) else { return false };
        if restores {
            self.valid.truncate(at);
        } else {
            self.valid.remove(at);
        }
        true
    }
}

/// Proof that device `D` is current on the calling thread.
///
/// Made by [`Device::bind_current`]; dropping it restores what was current before. It stays on its thread (it is neither
/// `Send` nor `Sync`), and it carries its device, so a proof of another device cannot be passed.
///
/// Proofs nest like scopes. While a younger proof of another device is alive, the older one answers [`Kind::NotBound`]
/// instead of working on the wrong device. Where the older one is dropped first and restores, the younger ones are
/// invalid: they answer [`Kind::NotBound`] from then on and restore nothing, since the thread is as it was before them
/// already.
#[must_use = "the device is current only while the proof is alive"]
#[derive(Debug)]
pub struct Bound<'d, D: Device> {
    device: &'d D,
    previous: Option<D::Previous>,
    /// Names its entry among the thread's [`Proofs`].
    serial: u64,
    _on_this_thread: PhantomData<*const ()>,
}

impl<'d, D: Device> Bound<'d, D> {
    /// A proof for `device`. For backends only.
    ///
    /// `previous` is what [`Device::restore`] needs when the proof is dropped, `None` where nothing is to be restored.
    ///
    /// # Safety
    /// `device` must be current on the calling thread, and `previous`, if any, what [`Device::restore`] gives this
    /// thread back with.
    pub unsafe fn new(device: &'d D, previous: Option<D::Previous>) -> Self {
        let uuid = device.identity().uuid;
        // In the last moments of a thread nobody keeps count any more; serial 0 is never valid.
        let serial = PROOFS.try_with(|proofs| proofs.borrow_mut().begin(uuid)).unwrap_or(0);
        Bound { device, previous, serial, _on_this_thread: PhantomData }
    }

    /// Ends the proof without restoring and hands that duty on. For wrappers of a device, whose own proof takes over.
    ///
    /// # Safety
    /// No younger proof may be alive on this thread. The caller must at once make a proof that means the same device
    /// and restores with what is returned.
    pub unsafe fn into_previous(mut self) -> Option<D::Previous> {
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
        let objection = PROOFS
            .try_with(|proofs| proofs.borrow().objection(self.serial))
            .unwrap_or(Some("this thread is ending"));
        let Some(why) = objection else { return Ok(()) };
        let identity = self.device.identity();
        Err(Error::new(Kind::NotBound, identity.backend, op).on(identity.logical).detail(why))
    }
}

impl<D: Device> Drop for Bound<'_, D> {
    fn drop(&mut self) {
        let previous = self.previous.take();
        let ended = PROOFS.try_with(|proofs| proofs.borrow_mut().end(self.serial, previous.is_some()));
        if let Some(previous) = previous
            && ended.unwrap_or(true)
        {
            // SAFETY: it is what this proof got on this thread, and `end` has just invalidated every younger one (on a
            // thread that is ending none is valid).
            unsafe { self.device.restore(previous) };
        }
    }
}

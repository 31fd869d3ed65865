//! Sharing device memory with other processes: by ACL's keys, or mapping by mapping as shareable handles.
//!
//! Both are made without a list of the processes that may open them: who will is not known here, since a key travels
//! through a socket that only the same user can open. Both are opened on the device that they are of, where ACL allows
//! every copy; another device's memory it would copy to no host.
//!
//! A key is for a whole allocation, so its beginning must be known: for memory of this backend always, for memory of
//! others from CANN 9 on.

mod keys;
mod mappings;

use std::{os::fd::OwnedFd, process};

use hal::{Device, Export, Exported, IpcHandle, Kind, Memory, NotExportable, Region, Result, Token};

use self::{keys::Keys, mappings::Mapping};
use crate::{
    AscendDevice,
    ffi::{
        ACL_ERROR_RT_FEATURE_NOT_SUPPORT, ACL_ERROR_RT_PARAM_INVALID, Answer, Driver, IpcKey, KEY_LEN, Place,
        Refusal,
    },
    memory::{Around, Block, Origin, PAGE, around},
};

/// Another process's device memory, opened. Closed on drop, with its device current.
#[derive(Debug)]
pub struct AscendImport {
    device: AscendDevice,
    region: Region,
    how: How,
}

#[derive(Debug)]
enum How {
    /// This process exported it, so the memory is used as it is.
    OwnMemory,
    Key(IpcKey),
    Mappings(Mapping),
}

/// What a device has exported.
#[derive(Debug, Default)]
pub(crate) struct Exports {
    keys: Keys,
    mappings: mappings::Shared,
}

pub(crate) fn export(device: &AscendDevice, region: Region) -> Result<Export> {
    const OP: &str = "export_ipc";
    device.needs(device.caps().ipc_export, OP)?;
    device.own(OP, region.place)?;
    let _relaxed = device.relaxed();
    let block = match around(device, OP, region.addr, region.len)? {
        Around::Device(block) => block,
        Around::Host { .. } => return Ok(Export::NotExportable(NotExportable::HostMemory)),
    };
    device.own(OP, block.place)?;
    let token = match share(device, &block) {
        Ok(token) => token,
        Err(Unshared::Because(why)) => return Ok(Export::NotExportable(why)),
        Err(Unshared::Refused(Refusal { code: Some(ACL_ERROR_RT_FEATURE_NOT_SUPPORT) | None, .. })) => {
            return Ok(Export::NotExportable(NotExportable::Device));
        }
        Err(Unshared::Refused(refusal)) => return Err(device.refused(OP, refusal)),
    };
    let handle = IpcHandle {
        device: device.uuid(),
        buffer: block.buffer,
        exporter: process::id(),
        len: block.len as u64,
        token: Token::Opaque(token),
    };
    let offset = (region.addr - block.base) as u64;
    Ok(Export::Handle(Exported { handle, descriptors: Vec::new(), offset, len: region.len as u64 }))
}

/// Why a block has no token.
enum Unshared {
    Because(NotExportable),
    Refused(Refusal),
}

impl From<Refusal> for Unshared {
    fn from(refusal: Refusal) -> Self {
        Unshared::Refused(refusal)
    }
}

fn share(device: &AscendDevice, block: &Block) -> Result<Vec<u8>, Unshared> {
    let because = |why| Err(Unshared::Because(why));
    let exports = device.exports();
    match block.origin {
        Origin::Imported => return because(NotExportable::Imported),
        Origin::Boundless => return because(NotExportable::UnknownBase),
        Origin::Own | Origin::Foreign => {}
    }
    // A part of something larger: what ACL shares begins with a page.
    if !block.base.is_multiple_of(PAGE) {
        return because(NotExportable::Pool);
    }
    let mut why = NotExportable::NoHandleType;
    if block.chunks.len() == 1 {
        match exports.keys.key(device, block) {
            Ok(key) => return Ok(key.bytes().to_vec()),
            // What ACL says of a mapping.
            Err(Refusal { code: Some(ACL_ERROR_RT_PARAM_INVALID), .. }) => {}
            Err(refusal) if refusal.code.is_none() => why = NotExportable::Device,
            Err(refusal) => return Err(refusal.into()),
        }
        if block.origin == Origin::Own {
            return because(why);
        }
    }
    match exports.mappings.token(device, block)? {
        Some(token) => Ok(token),
        None => because(why),
    }
}

pub(crate) fn import(
    device: &AscendDevice,
    handle: &IpcHandle,
    descriptors: &[OwnedFd],
) -> Result<AscendImport> {
    const OP: &str = "import_ipc";
    device.needs(device.caps().ipc_import, OP)?;
    if handle.device != device.uuid() {
        return Err(device.plain(Kind::DeviceMismatch, OP).detail(format!(
            "the handle is of device {}, this one is {}",
            handle.device,
            device.uuid()
        )));
    }
    let refuse = |why: String| {
        device
            .plain(Kind::ImportRefused, OP)
            .detail(format!("{why} (memory of process {} on device {})", handle.exporter, handle.device))
    };
    if !handle.is_well_formed(descriptors.len()) {
        return Err(refuse("the handle is of no form that an exporter makes".into()));
    }
    let _relaxed = device.relaxed();
    let opened = match &handle.token {
        Token::Opaque(bytes) if bytes.len() == KEY_LEN => keys::open(device, handle, bytes),
        Token::Opaque(bytes) => mappings::open(device, handle, bytes),
        Token::Descriptors(_) => Err(Closed::Malformed("ACL passes no descriptors")),
    };
    let (addr, how) = opened.map_err(|why| match why {
        Closed::Malformed(why) => refuse(why.into()),
        Closed::Refused(refusal) => {
            let call = refusal.call;
            let error = device.refused(OP, refusal);
            match (error.kind(), error.vendor_code()) {
                // Nothing to do with the handle.
                (Kind::OutOfMemory, _) => error,
                // Whatever number ACL gave for it: it would not open the handle.
                (_, Some(code)) => refuse(call.into()).vendor(code, error.vendor_text()),
                (_, None) => refuse(error.to_string()),
            }
        }
    })?;
    let len = handle.len as usize;
    if !matches!(how, How::OwnMemory) {
        // The length is the peer's word.
        if !reaches(device, addr, len) {
            // SAFETY: nobody has had the address.
            if let Err(leak) = unsafe { close(device.driver(), &how) } {
                tracing::warn!(?leak, "an import that was refused was not taken back");
            }
            return Err(refuse(format!("the handle says {len} bytes, and the memory has fewer")));
        }
        device.blocks().imported(addr, len, device.uuid());
    }
    Ok(AscendImport { device: *device, region: device.region(addr, len), how })
}

/// Takes one import back.
///
/// # Safety
/// Nobody may use the memory by it any more.
unsafe fn close(driver: &Driver, how: &How) -> Answer<()> {
    match how {
        How::OwnMemory => Ok(()),
        // SAFETY: the caller's promise; it was opened once.
        How::Key(key) => unsafe { driver.close_key(key) },
        // SAFETY: as above.
        How::Mappings(mapping) => unsafe { mapping.close(driver) },
    }
}

/// Whether ACL agrees that imported memory is so long: by its range, or, where that is not to be had, by its last byte.
fn reaches(device: &AscendDevice, addr: usize, len: usize) -> bool {
    let Some(last) = addr.checked_add(len.saturating_sub(1)) else { return false };
    let driver = device.driver();
    let mut end = addr;
    while end <= last {
        match driver.address_range(end) {
            Ok((base, more)) if more > 0 && (base..base.saturating_add(more)).contains(&end) => {
                end = base + more
            }
            _ if end > addr => return false,
            _ => {
                return match driver.locate(last) {
                    // CANN 8.5 calls imported memory managed.
                    Ok(Place::Device(_) | Place::Other(_)) => true,
                    Ok(Place::Host | Place::Unregistered) => false,
                    // A CANN without the question.
                    Err(refusal) => refusal.code.is_none(),
                };
            }
        }
    }
    true
}

/// Why nothing was opened.
enum Closed {
    Malformed(&'static str),
    Refused(Refusal),
}

impl From<Refusal> for Closed {
    fn from(refusal: Refusal) -> Self {
        Closed::Refused(refusal)
    }
}

impl AscendImport {
    /// The raw device pointer of the memory's first byte in this process. The host must not dereference it.
    pub fn device_ptr(&self) -> usize {
        self.region.addr
    }
}

impl Memory for AscendImport {
    fn region(&self) -> Region {
        self.region
    }
}

impl Drop for AscendImport {
    fn drop(&mut self) {
        const OP: &str = "close_import";
        if let How::OwnMemory = self.how {
            return;
        }
        let (device, addr, how) = (&self.device, self.region.addr, &self.how);
        device.give_back(OP, |driver| {
            // Before ACL may give the address to somebody else.
            device.blocks().import_closed(addr);
            // SAFETY: whoever uses the memory holds the import.
            let closed = unsafe { close(driver, how) };
            closed.map_err(|refusal| device.refused(OP, refusal))
        });
    }
}

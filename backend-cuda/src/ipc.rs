//! Sharing device memory with other processes: by the driver's handles, or chunk by chunk as descriptors.
//!
//! Memory of `cuMemAlloc` has a handle of 64 bytes. Virtual memory (PyTorch's expandable segments) has none and is
//! passed as one descriptor for each of its mappings, where it was made to be shared. Everything else has a reason.
//!
//! A region of more than [`DESCRIPTORS_MAX`](hal::DESCRIPTORS_MAX) mappings (2.5 GiB of PyTorch's large ones) is not
//! shared: it would take several messages to pass, which must be put together again for a client that may die between
//! them. Staging takes such a region instead.
//!
//! # Freed by the exporter, still open at the importer
//!
//! NVIDIA leaves undefined what it means to free an allocation that another process has open by a legacy handle, and the
//! node keeps up to 64 allocations of a client open between two requests. Haulier does not close them first:
//!
//! - Most of what is put was not allocated here. When PyTorch gives a segment back to the driver, nobody hears of it, so
//!   the importer has to live with it anyway.
//! - For its own buffers the order could be kept only by a free that waits for an answer of every node that has the buffer
//!   open: in a `drop`, for as long as a hanging driver takes there. Closing after each request instead would map the
//!   whole allocation anew for each put.
//! - What is left is small: the importer touches the memory only during a request, for which the client keeps it, and
//!   never afterwards; new memory at the same address has another buffer id and is opened anew, after what was open under
//!   its handle is closed. So no byte is read from freed memory, and only the mapping outlives it.
//!
//! Who must not rely on that runs a node that opens no memory of these devices (`haulier serve --backend cpu`): there all
//! goes by staging.

mod legacy;
mod vmm;

use std::{collections::BTreeMap, os::fd::OwnedFd, process};

use hal::{
    BufferId, Device, Export, Exported, IpcHandle, Kind, Memory, NotExportable, Region, Result, Token,
};
use parking_lot::Mutex;

pub(crate) use self::legacy::Exports;
use self::vmm::Mapping;
use crate::{
    CudaDevice,
    ffi::{Driver, Refusal},
    memory::{Around, Block, around},
};

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`, as a bit of attribute 14.
const POSIX_FD: u64 = 1;
/// The driver's "not supported": this device shares nothing, on WSL or in a guest, say.
const NOT_SUPPORTED: i32 = 801;

/// Another process's device memory, opened. Closed on drop, with its device current.
#[derive(Debug)]
pub struct CudaImport {
    device: CudaDevice,
    region: Region,
    how: How,
}

#[derive(Debug)]
enum How {
    /// This process exported it, so the memory is used as it is: the driver opens no handle of its own process.
    OwnMemory,
    Handle,
    Descriptors(Mapping),
}

/// What is imported on a device and must not be exported again, by address: length, and how often it is open.
#[derive(Debug, Default)]
pub(crate) struct Imports(Mutex<BTreeMap<usize, (usize, usize)>>);

impl Imports {
    fn add(&self, addr: usize, len: usize) {
        let mut imports = self.0.lock();
        let (known, count) = imports.entry(addr).or_default();
        *known = len.max(*known);
        *count += 1;
    }

    fn remove(&self, addr: usize) {
        let mut imports = self.0.lock();
        if let Some((_, count)) = imports.get_mut(&addr) {
            *count -= 1;
            if *count == 0 {
                imports.remove(&addr);
            }
        }
    }

    fn contains(&self, addr: usize) -> bool {
        self.0.lock().range(..=addr).next_back().is_some_and(|(&base, &(len, _))| addr - base < len)
    }
}

pub(crate) fn export(device: &CudaDevice, region: Region) -> Result<Export> {
    const OP: &str = "export_ipc";
    device.needs(device.caps().ipc_export, OP)?;
    device.own(OP, region.place)?;
    let _relaxed = device.relaxed(OP)?;
    let block = match around(device, OP, region.addr, region.len)? {
        Around::Device(block) => block,
        Around::Host { .. } => return Ok(Export::NotExportable(NotExportable::HostMemory)),
    };
    device.own(OP, block.place)?;
    let (token, descriptors) = match share(device, &block, region.addr) {
        Ok(shared) => shared,
        Err(Unshared::Because(why)) => return Ok(Export::NotExportable(why)),
        Err(Unshared::Refused(Refusal { code: Some(NOT_SUPPORTED), .. })) => {
            return Ok(Export::NotExportable(NotExportable::Device));
        }
        Err(Unshared::Refused(refusal)) => return Err(device.refused(OP, refusal)),
    };
    let handle = IpcHandle {
        device: device.uuid(),
        buffer: block.buffer,
        exporter: process::id(),
        len: block.len as u64,
        token,
    };
    let offset = (region.addr - block.base) as u64;
    Ok(Export::Handle(Exported { handle, descriptors, offset, len: region.len as u64 }))
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

/// The token for a block. The reason why there is none is found in the attributes, before the calls: the driver says no
/// more than "invalid value".
fn share(device: &CudaDevice, block: &Block, addr: usize) -> Result<(Token, Vec<OwnedFd>), Unshared> {
    let (driver, asked) = (device.driver(), &block.asked);
    let because = |why| Err(Unshared::Because(why));
    if device.imports().contains(addr) {
        return because(NotExportable::Imported);
    }
    if asked.managed {
        return because(NotExportable::Managed);
    }
    if asked.pool {
        return because(NotExportable::Pool);
    }
    if asked.legacy_ipc {
        if !driver.has_legacy_ipc() {
            return because(NotExportable::Device);
        }
        device.exports().prune(device);
        let token = device.exports().handle(driver, block)?;
        return Ok((Token::Opaque(token.0.to_vec()), Vec::new()));
    }
    if asked.handle_types & POSIX_FD == 0 {
        return because(NotExportable::NoHandleType);
    }
    if !device.shares_descriptors() {
        return because(NotExportable::Device);
    }
    // A region of more mappings than one handle can name comes without them.
    if block.chunks.is_empty() {
        return because(NotExportable::TooManyParts);
    }
    let descriptors = vmm::export(driver, block)?;
    Ok((Token::Descriptors(block.chunks.iter().map(|&len| len as u64).collect()), descriptors))
}

pub(crate) fn import(
    device: &CudaDevice,
    handle: &IpcHandle,
    descriptors: Vec<OwnedFd>,
) -> Result<CudaImport> {
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
    let _relaxed = device.relaxed(OP)?;
    let opened = match &handle.token {
        Token::Opaque(bytes) => legacy::open(device, handle, bytes),
        Token::Descriptors(lens) => vmm::open(device, lens, descriptors),
    };
    let (addr, how) = opened.map_err(|why| match why {
        Closed::Malformed(why) => refuse(why.into()),
        Closed::Refused(refusal) => {
            let error = device.refused(OP, refusal);
            match (error.kind(), error.vendor_code()) {
                // Nothing to do with the handle.
                (Kind::ShutDown | Kind::OutOfMemory, _) => error,
                // Whatever number the driver gave for it: it would not open the handle.
                (_, Some(code)) => refuse(refusal.call.into()).vendor(code, error.vendor_text()),
                (_, None) => refuse(error.to_string()),
            }
        }
    })?;
    let len = handle.len as usize;
    if !matches!(how, How::OwnMemory) {
        device.imports().add(addr, len);
    }
    let import = CudaImport { device: device.clone(), region: device.region(addr, len), how };
    // The length is the peer's word; what was opened has its own. Memory that is too short is closed again.
    match around(device, OP, addr, len) {
        Ok(Around::Device(_)) => Ok(import),
        Ok(Around::Host { .. }) => Err(refuse("the driver does not know what it opened".into())),
        Err(e) if e.kind() == Kind::InvalidRange => {
            Err(refuse(format!("the handle says {len} bytes, and the memory has fewer")))
        }
        Err(e) => Err(e),
    }
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

impl CudaImport {
    /// The raw device pointer of the memory's first byte in this process. The host must not dereference it.
    pub fn device_ptr(&self) -> u64 {
        self.region.addr as u64
    }
}

impl Memory for CudaImport {
    fn region(&self) -> Region {
        self.region
    }
}

impl Drop for CudaImport {
    fn drop(&mut self) {
        const OP: &str = "close_import";
        let (device, addr) = (&self.device, self.region.addr);
        let close = |call: &dyn Fn(&Driver) -> Result<(), Refusal>| {
            // Before the driver may give the address to somebody else.
            device.imports().remove(addr);
            device.give_back(OP, |driver| call(driver).map_err(|refusal| device.refused(OP, refusal)));
        };
        match &self.how {
            How::OwnMemory => {}
            // SAFETY: opened once for this import; whoever uses the memory holds the import.
            How::Handle => close(&|driver| unsafe { driver.close_ipc(addr) }),
            // SAFETY: as above.
            How::Descriptors(mapping) => close(&|driver| unsafe { mapping.close(driver) }),
        }
    }
}

/// The buffer behind an address now, if any.
fn buffer_at(device: &CudaDevice, addr: usize) -> Option<BufferId> {
    match around(device, "export_ipc", addr, 0) {
        Ok(Around::Device(block)) => Some(block.buffer),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The lengths are a peer's word: the first one of two for the same memory may be too short.
    #[test]
    fn what_is_imported_twice_is_known_in_its_greater_length_until_both_are_closed() {
        let imports = Imports::default();
        imports.add(0x1000, 1);
        imports.add(0x1000, 4096);
        assert!(imports.contains(0x1fff) && !imports.contains(0x2000));
        imports.remove(0x1000);
        assert!(imports.contains(0x1fff));
        imports.remove(0x1000);
        assert!(!imports.contains(0x1000));
    }
}

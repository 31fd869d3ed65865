//! Sharing buffers with other processes: the memfd is passed, checked and mapped.

use std::os::fd::{AsFd, OwnedFd};

use hal::{Export, Exported, IpcHandle, Kind, Memory, NotExportable, Place, Region, Result, Token};

use crate::{
    CpuDevice,
    error::{errno, error},
    memfd::{self, Mapping},
    memory::{Origin, outside},
};

/// Another process's buffer, mapped here readable and writable. Unmapped on drop, on any thread.
///
/// It stays valid whatever the exporting process does: the kernel keeps the pages, and the seal keeps the size.
#[derive(Debug)]
pub struct CpuImport {
    device: CpuDevice,
    mapping: Mapping,
}

impl CpuImport {
    /// The first byte. The exporter may write the bytes at any time: form no reference to them.
    pub fn as_mut_ptr(&self) -> *mut u8 {
        self.mapping.as_mut_ptr()
    }

    /// Copies bytes out, from `offset` on. What the exporter writes meanwhile gives torn bytes.
    ///
    /// *Errors*: [`Kind::InvalidRange`].
    pub fn read(&self, offset: usize, to: &mut [u8]) -> Result<()> {
        let len = to.len();
        self.mapping.read(offset, to).ok_or_else(|| outside("read", offset, len, self.mapping.len()))
    }

    /// Copies bytes in, from `offset` on.
    ///
    /// *Errors*: [`Kind::InvalidRange`].
    pub fn write(&self, offset: usize, from: &[u8]) -> Result<()> {
        self.mapping
            .write(offset, from)
            .ok_or_else(|| outside("write", offset, from.len(), self.mapping.len()))
    }
}

impl Memory for CpuImport {
    fn region(&self) -> Region {
        Region::host(self.mapping.addr(), self.mapping.len())
    }
}

impl Drop for CpuImport {
    fn drop(&mut self) {
        self.device.allocations().remove(self.mapping.addr());
    }
}

pub(crate) fn export(device: &CpuDevice, region: Region) -> Result<Export> {
    const OP: &str = "export_ipc";
    if let Place::Device(_) = region.place {
        return Err(foreign(OP));
    }
    let fd = match device.allocations().find(OP, region.addr, region.len)? {
        None => return Ok(Export::NotExportable(NotExportable::HostMemory)),
        Some((_, Origin::Imported)) => return Ok(Export::NotExportable(NotExportable::Imported)),
        Some((allocated, Origin::Allocated(fd))) => (allocated, fd),
    };
    let (allocated, fd) = fd;
    let descriptor = fd.try_clone().map_err(|e| {
        error(Kind::Driver, OP).detail("the descriptor could not be duplicated (ulimit -n)").with_source(e)
    })?;
    let handle = IpcHandle {
        device: device.uuid(),
        buffer: allocated.buffer,
        exporter: std::process::id(),
        len: allocated.len as u64,
        token: Token::Descriptors(vec![allocated.len as u64]),
    };
    Ok(Export::Handle(Exported {
        handle,
        descriptors: vec![descriptor],
        offset: (region.addr - allocated.base) as u64,
        len: region.len as u64,
    }))
}

pub(crate) fn import(device: &CpuDevice, handle: &IpcHandle, descriptors: Vec<OwnedFd>) -> Result<CpuImport> {
    const OP: &str = "import_ipc";
    if handle.device != device.uuid() {
        return Err(error(Kind::DeviceMismatch, OP).detail(format!(
            "the handle is of device {}, this one is {}",
            handle.device,
            device.uuid()
        )));
    }
    let refused = |why: String| {
        error(Kind::ImportRefused, OP).detail(format!("{why} (buffer of process {})", handle.exporter))
    };
    let fd = match (descriptors.as_slice(), &handle.token) {
        ([fd], Token::Descriptors(_)) if handle.is_well_formed(1) => fd,
        _ => return Err(refused("a host buffer has one descriptor, of the buffer's length".into())),
    };
    memfd::inspect(fd.as_fd(), handle.len).map_err(refused)?;
    // The file has that many bytes, so a length that does not fit cannot come here on a 64-bit host.
    let len = usize::try_from(handle.len).map_err(|_| refused("the buffer is too large to map".into()))?;
    let mapping = Mapping::new(fd, len).map_err(|e| {
        errno(Kind::ImportRefused, OP, e)
            .detail(format!("{len} bytes of process {} could not be mapped", handle.exporter))
    })?;
    device.allocations().insert(&mapping, Origin::Imported);
    Ok(CpuImport { device: device.clone(), mapping })
}

pub(crate) fn foreign(op: &'static str) -> hal::Error {
    error(Kind::DeviceMismatch, op)
        .detail("memory of an accelerator; all memory of this device is host memory")
}

//! Virtual memory, as one descriptor for each mapping.

use std::os::fd::{AsFd, OwnedFd};

use super::{Closed, How};
use crate::{
    CudaDevice,
    ffi::{Answer, Driver},
    memory::Block,
};

/// The descriptors of a block's chunks, in address order.
pub(super) fn export(driver: &Driver, block: &Block) -> Answer<Vec<OwnedFd>> {
    let mut addr = block.base;
    block
        .chunks
        .iter()
        .map(|len| {
            let handle = driver.retain_handle(addr)?;
            let exported = driver.export_handle(handle);
            // Given back whatever became of it; the mapping keeps the memory.
            driver.release_handle(handle)?;
            addr += len;
            exported
        })
        .collect()
}

/// Chunks of another process, mapped side by side.
#[derive(Debug)]
pub(super) struct Mapping {
    addr: usize,
    reserved: usize,
    /// Lengths of what is mapped, from the start on.
    mapped: Vec<usize>,
}

impl Mapping {
    fn reserve(driver: &Driver, len: usize) -> Answer<Self> {
        Ok(Mapping { addr: driver.reserve(len)?, reserved: len, mapped: Vec::new() })
    }

    fn add(&mut self, driver: &Driver, len: usize, fd: OwnedFd) -> Answer<()> {
        let handle = driver.import_handle(fd.as_fd())?;
        // The driver has what it needs of the descriptor.
        drop(fd);
        let mapped = driver.map(self.addr + self.mapped.iter().sum::<usize>(), len, handle);
        if mapped.is_ok() {
            self.mapped.push(len);
        }
        // A mapping keeps the memory by itself.
        driver.release_handle(handle).and(mapped)
    }

    /// Takes everything back, also where a part fails.
    ///
    /// # Safety
    /// Nobody may use the memory any more.
    pub(super) unsafe fn close(&self, driver: &Driver) -> Answer<()> {
        let mut addr = self.addr;
        let mut outcome = Ok(());
        for &len in &self.mapped {
            // SAFETY: the caller's promise.
            outcome = outcome.and(unsafe { driver.unmap(addr, len) });
            addr += len;
        }
        outcome.and(driver.free_reserved(self.addr, self.reserved))
    }
}

pub(super) fn open(
    device: &CudaDevice,
    lens: &[u64],
    descriptors: Vec<OwnedFd>,
) -> Result<(usize, How), Closed> {
    let driver = device.driver();
    let lens: Vec<usize> = lens.iter().map(|&len| len as usize).collect();
    let mut mapping = Mapping::reserve(driver, lens.iter().sum())?;
    let opened = lens
        .into_iter()
        .zip(descriptors)
        .try_for_each(|(len, fd)| mapping.add(driver, len, fd))
        .and_then(|()| driver.set_access(mapping.addr, mapping.reserved, device.ordinal()));
    if let Err(refusal) = opened {
        // SAFETY: nobody has had the address.
        if let Err(leak) = unsafe { mapping.close(driver) } {
            tracing::warn!(?leak, "an import that failed was not taken back whole");
        }
        return Err(refusal.into());
    }
    Ok((mapping.addr, How::Descriptors(mapping)))
}

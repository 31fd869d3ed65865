//! Virtual memory, as PyTorch's expandable segments are: one shareable handle for each mapping.
//!
//! A token is the length that the mappings have in common, then their shareable handles, 8 bytes each. So it holds 15,
//! which are 300 MiB of torch_npu's larger chunks; what touches more, or mappings of several lengths, has none.

use std::{collections::HashMap, process};

use hal::IpcHandle;
use parking_lot::Mutex;

use super::{Closed, How};
use crate::{
    AscendDevice,
    ffi::{Answer, Driver},
    memory::Block,
};

/// The most bytes of a token.
const TOKEN_MAX: usize = 128;
const WORD: usize = size_of::<u64>();
const MAPPINGS_MAX: usize = TOKEN_MAX / WORD - 1;

/// The shareable handles that a device's memory has, by address and physical handle: ACL makes each once.
#[derive(Debug, Default)]
pub(crate) struct Shared(Mutex<HashMap<(usize, usize), u64>>);

impl Shared {
    /// The token of a block, or `None` where its mappings have none.
    pub(super) fn token(&self, device: &AscendDevice, block: &Block) -> Answer<Option<Vec<u8>>> {
        let driver = device.driver();
        let len = block.chunks[0];
        let alike = block.chunks.iter().all(|chunk| *chunk == len);
        if !driver.has_shareable_export() || !alike || block.chunks.len() > MAPPINGS_MAX {
            return Ok(None);
        }
        let mut token = (len as u64).to_le_bytes().to_vec();
        for addr in (block.base..block.base + block.len).step_by(len) {
            // No mapping begins here, or its maker has exported it already.
            let Some(shareable) = self.shareable(driver, addr)? else { return Ok(None) };
            token.extend(shareable.to_le_bytes());
        }
        Ok(Some(token))
    }

    fn shareable(&self, driver: &Driver, addr: usize) -> Answer<Option<u64>> {
        let Ok(handle) = driver.retain_physical(addr) else { return Ok(None) };
        // ACL refuses what is exported already. Asked first, since a handle's number may be used again.
        let fresh = driver.export_physical(handle);
        // Given back whatever became of it; the mapping keeps the memory.
        driver.release_physical(handle)?;
        let mut known = self.0.lock();
        match fresh {
            Ok(shareable) => {
                known.retain(|(at, _), _| *at != addr);
                known.insert((addr, handle), shareable);
                Ok(Some(shareable))
            }
            Err(refusal) => {
                tracing::debug!(?refusal, "a physical handle not exported");
                Ok(known.get(&(addr, handle)).copied())
            }
        }
    }

    /// Where the mapping is that was exported as this.
    fn find(&self, shareable: u64) -> Option<usize> {
        self.0.lock().iter().find(|(_, known)| **known == shareable).map(|((addr, _), _)| *addr)
    }
}

/// Mappings of another process's memory, side by side.
#[derive(Debug)]
pub(super) struct Mapping {
    addr: usize,
    len: usize,
    /// Of what is mapped, from the start on.
    handles: Vec<usize>,
}

impl Mapping {
    fn add(&mut self, device: &AscendDevice, shareable: u64) -> Answer<()> {
        let driver = device.driver();
        let handle = driver.import_physical(shareable, device.user())?;
        let mapped = driver.map(self.addr + self.handles.len() * self.len, self.len, handle);
        match mapped {
            Ok(()) => self.handles.push(handle),
            Err(_) => driver.release_physical(handle)?,
        }
        mapped
    }

    /// Takes everything back, also where a part fails.
    ///
    /// # Safety
    /// Nobody may use the memory any more.
    pub(super) unsafe fn close(&self, driver: &Driver) -> Answer<()> {
        let mut outcome = Ok(());
        for (i, &handle) in self.handles.iter().enumerate() {
            // SAFETY: the caller's promise.
            let unmapped = unsafe { driver.unmap(self.addr + i * self.len) };
            outcome = outcome.and(unmapped).and(driver.release_physical(handle));
        }
        outcome.and(driver.release_reserved(self.addr))
    }
}

pub(super) fn open(device: &AscendDevice, handle: &IpcHandle, bytes: &[u8]) -> Result<(usize, How), Closed> {
    let (words, rest) = bytes.as_chunks::<WORD>();
    let mut words = words.iter().map(|word| u64::from_le_bytes(*word));
    let len = words.next().and_then(|len| usize::try_from(len).ok()).filter(|len| *len > 0);
    let shareables: Vec<u64> = words.collect();
    let whole = len.and_then(|len| len.checked_mul(shareables.len()));
    let (Some(len), Some(whole)) = (len, whole.filter(|whole| *whole > 0 && *whole as u64 == handle.len))
    else {
        return Err(Closed::Malformed("its mappings do not add up to its length"));
    };
    if !rest.is_empty() {
        return Err(Closed::Malformed("it is neither an ACL key nor a list of shareable handles"));
    }
    let driver = device.driver();
    if !driver.has_shareable_import() {
        return Err(Closed::Malformed("this CANN opens no shareable handles"));
    }
    // ACL does not open what the process itself exported.
    let shared = &device.exports().mappings;
    if handle.exporter == process::id()
        && let Some(base) = shared.find(shareables[0])
        && shareables.iter().enumerate().all(|(i, word)| shared.find(*word) == Some(base + i * len))
    {
        return Ok((base, How::OwnMemory));
    }
    let mut mapping = Mapping { addr: driver.reserve(whole)?, len, handles: Vec::new() };
    let opened = shareables
        .into_iter()
        .try_for_each(|shareable| mapping.add(device, shareable))
        .and_then(|()| driver.set_access(mapping.addr, whole, device.user()));
    if let Err(refusal) = opened {
        // SAFETY: nobody has had the address.
        if let Err(leak) = unsafe { mapping.close(driver) } {
            tracing::warn!(?leak, "an import that failed was not taken back whole");
        }
        return Err(refusal.into());
    }
    Ok((mapping.addr, How::Mappings(mapping)))
}

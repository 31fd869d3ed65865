//! Keys of 65 bytes, for memory of `aclrtMalloc`.

use std::{collections::VecDeque, process};

use hal::IpcHandle;
use parking_lot::Mutex;

use super::{Closed, How};
use crate::{
    AscendDevice,
    ffi::{Answer, IpcKey},
    memory::{Block, Origin},
};

/// How many keys of memory of others stay valid. ACL does not say when such memory is freed, so they are closed when so
/// many others have been made since; by then whoever imported them has closed them. A call makes all its keys before the
/// first one is sent, so this must be more than the allocations of others that the calls of a moment touch: what is closed
/// too early cannot be opened and goes by staging.
const FOREIGN_MAX: usize = 4096;

/// The keys of a device's memory.
#[derive(Debug, Default)]
pub(crate) struct Keys {
    /// Held while a key of our own memory is made, so that it is made once.
    making: Mutex<()>,
    /// Of memory of others, latest last, each with where the memory is.
    foreign: Mutex<VecDeque<(IpcKey, usize)>>,
}

impl Keys {
    /// A block's key. Memory of our own has one until it is freed. For memory of others ACL is asked each time: it may
    /// have been freed and allocated anew, unnoticed.
    pub(super) fn key(&self, device: &AscendDevice, block: &Block) -> Answer<IpcKey> {
        let make = || device.driver().export_key(block.base, block.len);
        if block.origin != Origin::Own {
            let key = make()?;
            self.remember(device, key, block.base);
            return Ok(key);
        }
        if let Some(key) = device.blocks().key(block) {
            return Ok(key);
        }
        let _making = self.making.lock();
        if let Some(key) = device.blocks().key(block) {
            return Ok(key);
        }
        let key = make()?;
        device.blocks().set_key(block, key);
        Ok(key)
    }

    fn remember(&self, device: &AscendDevice, key: IpcKey, base: usize) {
        let mut foreign = self.foreign.lock();
        foreign.retain(|(known, _)| *known != key);
        foreign.push_back((key, base));
        let oldest = (foreign.len() > FOREIGN_MAX).then(|| foreign.pop_front()).flatten();
        drop(foreign);
        if let Some((key, _)) = oldest {
            // SAFETY: who imported it has closed it, as above.
            if let Err(refusal) = unsafe { device.driver().close_key(&key) } {
                tracing::debug!(?refusal, "the key of memory that may have been freed");
            }
        }
    }

    fn find(&self, key: &IpcKey) -> Option<usize> {
        self.foreign.lock().iter().find(|(known, _)| known == key).map(|(_, base)| *base)
    }
}

pub(super) fn open(device: &AscendDevice, handle: &IpcHandle, bytes: &[u8]) -> Result<(usize, How), Closed> {
    let key = IpcKey::from_peer(bytes).ok_or(Closed::Malformed("an ACL key is text"))?;
    // The pid alone does not tell: another container may have a process of the same number.
    if handle.exporter == process::id() {
        let own = device.blocks().exported_as(&key, handle.buffer);
        if let Some(base) = own.or_else(|| device.exports().keys.find(&key)) {
            return Ok((base, How::OwnMemory));
        }
    }
    Ok((device.driver().import_key(&key)?, How::Key(key)))
}

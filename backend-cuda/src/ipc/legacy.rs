//! Handles of 64 bytes, for memory of `cuMemAlloc`.

use std::{collections::HashMap, process};

use hal::{BufferId, IpcHandle};
use parking_lot::Mutex;

use super::{Closed, How, buffer_at};
use crate::{
    CudaDevice,
    ffi::{Answer, Driver, IpcMemHandle},
    memory::Block,
};

/// How many exports are remembered before those of freed memory are looked for and forgotten.
const ROOM: usize = 1024;

/// What this process has exported, by handle, so that it finds its own memory again.
#[derive(Debug, Default)]
pub(crate) struct Exports(Mutex<Table>);

#[derive(Debug, Default)]
struct Table {
    by_handle: HashMap<IpcMemHandle, (usize, BufferId)>,
    full_at: usize,
}

impl Exports {
    /// The handle of a block, which the driver gives for any address in it.
    pub(super) fn handle(&self, driver: &Driver, block: &Block) -> Answer<IpcMemHandle> {
        let handle = driver.ipc_handle(block.base)?;
        self.0.lock().by_handle.insert(handle, (block.base, block.buffer));
        Ok(handle)
    }

    /// Forgets what has been freed, when there is much. The driver is asked without the lock.
    pub(super) fn prune(&self, device: &CudaDevice) {
        let known: Vec<_> = {
            let mut table = self.0.lock();
            if table.by_handle.len() < table.full_at.max(ROOM) {
                return;
            }
            // Others need not look meanwhile.
            table.full_at = usize::MAX;
            table.by_handle.iter().map(|(&handle, &at)| (handle, at)).collect()
        };
        let freed = known.into_iter().filter(|(_, (base, buffer))| buffer_at(device, *base) != Some(*buffer));
        let freed: Vec<_> = freed.collect();
        let mut table = self.0.lock();
        for (handle, at) in freed {
            if table.by_handle.get(&handle) == Some(&at) {
                table.by_handle.remove(&handle);
            }
        }
        table.full_at = 2 * table.by_handle.len();
    }

    fn find(&self, handle: &IpcMemHandle, buffer: BufferId) -> Option<usize> {
        let (base, known) = *self.0.lock().by_handle.get(handle)?;
        (known == buffer).then_some(base)
    }
}

pub(super) fn open(device: &CudaDevice, handle: &IpcHandle, bytes: &[u8]) -> Result<(usize, How), Closed> {
    let bytes = <[u8; 64]>::try_from(bytes).map_err(|_| Closed::Malformed("a CUDA handle has 64 bytes"))?;
    let token = IpcMemHandle(bytes);
    // The pid alone does not tell: another container may have a process of the same number.
    let own =
        (handle.exporter == process::id()).then(|| device.exports().find(&token, handle.buffer)).flatten();
    match own {
        None => Ok((device.driver().open_ipc(token)?, How::Handle)),
        Some(base) if buffer_at(device, base) == Some(handle.buffer) => Ok((base, How::OwnMemory)),
        Some(_) => Err(Closed::Malformed("the memory has been freed")),
    }
}

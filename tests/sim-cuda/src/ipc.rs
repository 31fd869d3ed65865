//! Legacy handles: ordinary allocations, opened whole by other processes of the same machine.

use backend_cpu::strict::OPAQUE_TOKEN_LEN;

use crate::{
    abi::{Answer, Out, driver, refused, status},
    log::About,
    sim::{Sim, address},
};

/// `CUipcMemHandle` and `CUipcEventHandle`, passed by value.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct IpcHandle([u8; 64]);

const LAZY_ENABLE_PEER_ACCESS: u32 = 1;
const MAGIC: [u8; 8] = *b"HAULSIM1";

impl IpcHandle {
    fn new(token: [u8; OPAQUE_TOKEN_LEN], seed: u64) -> Self {
        let mut bytes = [0; 64];
        bytes[..OPAQUE_TOKEN_LEN].copy_from_slice(&token);
        bytes[OPAQUE_TOKEN_LEN..][..8].copy_from_slice(&seed.to_le_bytes());
        bytes[OPAQUE_TOKEN_LEN + 8..][..8].copy_from_slice(&MAGIC);
        IpcHandle(bytes)
    }

    fn token(&self, seed: u64) -> Answer<&[u8]> {
        let (token, rest) = self.0.split_at(OPAQUE_TOKEN_LEN);
        if rest[8..16] != MAGIC {
            return refused(status::INVALID_VALUE, "not a handle of this driver's");
        }
        if rest[..8] != seed.to_le_bytes() {
            return refused(
                status::MAP_FAILED,
                "the memory is of another machine (HAULIER_SIM_SEED differs)",
            );
        }
        Ok(token)
    }
}

fn events(sim: &Sim) -> Answer {
    sim.context()?;
    refused(status::NOT_SUPPORTED, "events do not cross processes here (attribute 125 says so)")
}

driver! {
    fn cuIpcGetMemHandle(handle: Out<IpcHandle>, pointer: u64) [About::Address(pointer)] |sim| {
        sim.context()?;
        let shared = sim.machine()?.export_opaque(address(pointer)?)?;
        handle.set(IpcHandle::new(shared.token, sim.settings.seed))
    };
    fn cuIpcOpenMemHandle_v2(pointer: Out<u64>, handle: IpcHandle, flags: u32) [About::Nothing] |sim| {
        sim.context()?;
        if flags != LAZY_ENABLE_PEER_ACCESS || pointer.is_null() {
            return refused(status::INVALID_VALUE, "the one flag that there is has to be passed");
        }
        pointer.set(sim.machine()?.import_opaque(handle.token(sim.settings.seed)?)? as u64)
    };
    fn cuIpcCloseMemHandle(pointer: u64) [About::Address(pointer)] |sim| {
        sim.context()?;
        Ok(sim.machine()?.close_import(address(pointer)?)?)
    };
    fn cuIpcGetEventHandle(_handle: Out<IpcHandle>, event: u64) [About::Event(event)] |sim| events(sim);
    fn cuIpcOpenEventHandle(_event: Out<u64>, _handle: IpcHandle) [About::Nothing] |sim| events(sim);
}

//! Device memory that is freed as it was allocated: ordinary, managed, and from the default pool.

use backend_cpu::strict::MemoryKind;

use crate::{
    abi::{Answer, Out, driver, refused, status},
    log::About,
    sim::{Sim, address},
};

/// The handle of each device's default pool: the only ones there are.
const FIRST_POOL: u64 = 0x9001_0000_0000;

/// The default pool of a device.
pub(crate) fn pool_of(device: u32) -> u64 {
    FIRST_POOL + u64::from(device)
}

fn allocate(sim: &Sim, out: Out<u64>, bytes: usize, kind: MemoryKind) -> Answer {
    sim.context()?;
    if out.is_null() {
        return refused(status::INVALID_VALUE, "a null result pointer");
    }
    out.set(sim.machine()?.allocate(bytes, kind)? as u64)
}

driver! {
    fn cuMemAlloc_v2(pointer: Out<u64>, bytes: usize) [About::Nothing] |sim| {
        allocate(sim, pointer, bytes, MemoryKind::Normal)
    };
    fn cuMemAllocManaged(pointer: Out<u64>, bytes: usize, flags: u32) [About::Nothing] |sim| {
        if !matches!(flags, 1 | 2) {
            return refused(status::INVALID_VALUE, "attached to neither the host nor everybody");
        }
        allocate(sim, pointer, bytes, MemoryKind::Managed)
    };
    fn cuMemFree_v2(pointer: u64) [About::Address(pointer)] |sim| {
        sim.context()?;
        Ok(sim.machine()?.free(address(pointer)?)?)
    };
    fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) [About::Nothing] |sim| {
        sim.context()?;
        let (left, all) = sim.machine()?.memory_info()?;
        free.set(left)?;
        total.set(all)
    };
    fn cuMemGetAddressRange_v2(base: Out<u64>, size: Out<usize>, pointer: u64)
        [About::Address(pointer)] |sim| {
        sim.context()?;
        let address = address(pointer)?;
        let machine = sim.machine()?;
        if !machine.is_device_address(address) {
            return refused(status::NOT_FOUND, "no device memory");
        }
        let known = machine.attributes(address).or_else(|e| refused(status::NOT_FOUND, e.text))?;
        base.offer(known.base as u64)?;
        size.offer(known.len)
    };
    fn cuMemAllocAsync(pointer: Out<u64>, bytes: usize, stream: u64) [About::Stream(stream)] |sim| {
        // The address is there at once; that work on other streams must not use it yet is not checked.
        sim.usable(stream)?;
        allocate(sim, pointer, bytes, MemoryKind::Pool)
    };
    fn cuMemFreeAsync(pointer: u64, stream: u64) [About::Address(pointer)] |sim| {
        sim.context()?;
        Ok(sim.machine()?.free_async(stream, address(pointer)?)?)
    };
    fn cuDeviceGetDefaultMemPool(pool: Out<u64>, device: i32) [About::Device(device)] |sim| {
        pool.set(pool_of(sim.device(device)?))
    };
    fn cuDeviceGetMemPool(pool: Out<u64>, device: i32) [About::Device(device)] |sim| {
        pool.set(pool_of(sim.device(device)?))
    };
    fn cuMemPoolTrimTo(_pool: u64, _keep: usize) [About::Nothing] |_| Ok(());
}

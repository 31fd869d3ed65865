//! Device memory that is freed as it was allocated.

use backend_cpu::strict::MemoryKind;
use haulier_sim::log::About;

use crate::{
    abi::{Answer, Out, OutAny, null, refused, runtime, status},
    sim::{Sim, address},
};

/// Above this many bytes an allocation lies on huge pages.
const SMALL: usize = 1 << 20;
pub(crate) const PAGE: usize = 4096;
pub(crate) const HUGE_PAGE: usize = 2 << 20;

/// The bits beside the policy: LOW_BW, HIGH_BW, READONLY.
const POLICY_FLAGS: i32 = 0x100 | 0x1000 | 0x10_0000;
const LAST_POLICY: i32 = 7;

/// What `aclrtGetMemInfo` can be asked for.
const ATTRIBUTES: [i32; 9] = [0, 1, 2, 3, 4, 5, 10, 16, 17];

/// The page size under an allocation of so many bytes.
pub(crate) fn page_of(bytes: usize) -> usize {
    if bytes > SMALL { HUGE_PAGE } else { PAGE }
}

fn allocate(sim: &Sim, out: Out<u64>, bytes: usize, policy: i32, padding: usize) -> Answer {
    sim.context()?;
    if out.is_null() || bytes == 0 {
        return null("a null result pointer, or no bytes");
    }
    if !(0..=LAST_POLICY).contains(&(policy & !POLICY_FLAGS)) {
        return refused(status::PARAMETER, format!("policy {policy:#x}"));
    }
    sim.beside_captures()?;
    let Some(padded) = bytes.checked_add(padding).and_then(|padded| padded.checked_next_multiple_of(32))
    else {
        return refused(status::OUT_OF_MEMORY, format!("{bytes} bytes"));
    };
    // Only what fills a page begins at one.
    let align = if bytes < PAGE { 64 } else { page_of(padded) };
    out.set(sim.machine()?.allocate_aligned(padded, align, MemoryKind::Normal)? as u64)
}

runtime! {
    fn aclrtMalloc(out: Out<u64>, bytes: usize, policy: i32) [About::Nothing] |sim| {
        allocate(sim, out, bytes, policy, 32)
    };
    fn aclrtMallocAlign32(out: Out<u64>, bytes: usize, policy: i32) [About::Nothing] |sim| {
        allocate(sim, out, bytes, policy, 0)
    };
    fn aclrtMallocWithCfg(out: Out<u64>, bytes: usize, policy: i32, _config: OutAny) [About::Nothing] |sim| {
        allocate(sim, out, bytes, policy, 32)
    };
    fn aclrtFree(pointer: u64) [About::Address(pointer)] |sim| {
        if pointer == 0 {
            return null("a null address");
        }
        let base = address(pointer)?;
        sim.beside_captures()?;
        sim.machine()?.free(base)?;
        sim.shared.freed(base);
        Ok(())
    };
    fn aclrtGetMemInfo(attribute: i32, free: Out<usize>, total: Out<usize>) [About::Nothing] |sim| {
        sim.context()?;
        if !ATTRIBUTES.contains(&attribute) {
            return refused(status::PARAMETER, format!("memory attribute {attribute}"));
        }
        let (left, all) = sim.machine()?.memory_info()?;
        free.set(left)?;
        total.set(all)
    };
    /// Since 9.0: see [`SINCE_9`](crate::SINCE_9).
    fn aclrtMemGetAddressRange(pointer: u64, base: Out<u64>, size: Out<usize>) [About::Address(pointer)] |sim| {
        if !sim.is_9() {
            return refused(status::NOT_SUPPORTED, "there is no such function before 9.0");
        }
        let address = address(pointer)?;
        let machine = sim.machine()?;
        if !machine.is_device_address(address) {
            return refused(status::PARAMETER, "no device memory");
        }
        let known = machine.attributes(address)?;
        base.offer(known.base as u64)?;
        size.offer(known.len)
    };
}

//! Device memory.

use std::os::unix::process::ExitStatusExt;

use backend_cpu::strict::{MemoryKind, Op, Why};
use hal::{Deadline, Device, Kind, Memory, Place, Region};

use crate::{builder, common, machine, of};

#[test]
fn a_host_that_touches_device_memory_dies_by_sigsegv() {
    const SIGSEGV: i32 = 11;
    if common::is_child() {
        let (_machine, device, _) = machine();
        let memory = device.bind_current().unwrap().allocate(4096).unwrap();
        let address = std::ptr::with_exposed_provenance::<u8>(memory.region().addr);
        // SAFETY: there is none; the parent asserts that this faults.
        let byte = unsafe { address.read_volatile() };
        panic!("read {byte}");
    }
    let name = "memory::a_host_that_touches_device_memory_dies_by_sigsegv";
    let output = common::child(name).output().unwrap();
    assert_eq!(output.status.signal(), Some(SIGSEGV), "{output:?}");
}

#[test]
fn sanctioned_copies_reach_device_memory_and_only_its_own() {
    let (machine, device, _) = machine();
    let bound = device.bind_current().unwrap();
    let memory = bound.allocate(100).unwrap();
    let region = memory.region();
    assert_eq!(region.place, Place::Device(device.identity().uuid));
    let (from, mut to) = ([7u8; 100], [0u8; 100]);
    let source = Region::host(from.as_ptr().expose_provenance(), 100);
    let target = Region::host(to.as_mut_ptr().expose_provenance(), 100);
    // SAFETY: the arrays live on, and nobody else has them.
    unsafe {
        bound.copy(region, source).unwrap();
        bound.copy(target, region).unwrap();
        assert_eq!(
            bound.copy(target, region.part(0, 99).unwrap()).unwrap_err().kind(),
            Kind::InvalidArgument
        );
        let beyond = Region { addr: region.addr + 1, ..region };
        assert_eq!(bound.copy(target, beyond).unwrap_err().kind(), Kind::InvalidRange);
    }
    assert_eq!(to, [7; 100]);
    assert_eq!(machine.peek(region.addr + 90, 11).unwrap_err().why, Why::OutOfRange);
}

#[test]
fn a_freed_address_comes_back_under_a_new_id_for_the_same_and_for_a_larger_size() {
    let (_machine, device, _) = machine();
    let bound = device.bind_current().unwrap();
    let _below = bound.allocate(4096).unwrap();
    let mut ids = Vec::new();
    let mut addresses = Vec::new();
    for len in [4096, 4096, 1 << 20] {
        let memory = bound.allocate(len).unwrap();
        let located = bound.locate(memory.region().addr, len).unwrap();
        let allocation = located.allocation.unwrap();
        assert_eq!((allocation.base, allocation.len), (memory.region().addr, len));
        ids.push(allocation.buffer);
        addresses.push(allocation.base);
    }
    assert_eq!(addresses, [addresses[0]; 3]);
    ids.dedup();
    assert_eq!(ids.len(), 3);
}

#[test]
fn several_tensors_lie_in_one_allocation() {
    let (_machine, device, _) = machine();
    let bound = device.bind_current().unwrap();
    let memory = bound.allocate(4 << 20).unwrap();
    let Region { addr, .. } = memory.region();
    let at = |offset: usize| bound.locate(addr + offset, 1 << 20).unwrap().allocation.unwrap();
    assert_eq!((at(0), at(0)), (at(1 << 20), at(3 << 20)));
    assert_eq!(bound.locate(addr + (3 << 20) + 1, 1 << 20).unwrap_err().kind(), Kind::InvalidRange);
}

#[test]
fn a_hole_among_device_addresses_is_an_error_and_never_host() {
    let (_machine, device, _) = machine();
    let bound = device.bind_current().unwrap();
    let memory = bound.allocate(4096).unwrap();
    let region = memory.region();
    drop(memory);
    for addr in [region.addr, region.addr + (1 << 20), 0] {
        assert_eq!(bound.locate(addr, 1).unwrap_err().kind(), Kind::InvalidArgument, "{addr:#x}");
    }
}

#[test]
fn foreign_memory_is_host_or_an_error_as_the_machine_was_built() {
    let heap = [0u8; 64];
    let addr = heap.as_ptr() as usize;
    let (_machine, device, _) = machine();
    let located = device.bind_current().unwrap().locate(addr, 64).unwrap();
    assert_eq!((located.region.place, located.allocation), (Place::Host, None));
    let (_machine, device, _) = of(builder().foreign_pointers_fail());
    assert!(device.bind_current().unwrap().locate(addr, 64).is_err());
}

#[test]
fn a_device_runs_out_of_memory_and_says_how_much_there_is() {
    let (machine, device, _) = of(builder().memory(1 << 20));
    let bound = device.bind_current().unwrap();
    let _half = bound.allocate(1 << 19).unwrap();
    let e = bound.allocate((1 << 19) + 1).unwrap_err();
    assert_eq!((e.kind(), e.vendor_code()), (Kind::OutOfMemory, Some(2)));
    assert!(e.to_string().contains("524289") && e.to_string().contains("524288"), "{e}");
    assert_eq!(machine.memory_info(), Ok((1 << 19, 1 << 20)));
    assert_eq!(bound.allocate(0).unwrap_err().kind(), Kind::InvalidArgument);
    assert_eq!(machine.allocate(0, MemoryKind::Normal).unwrap_err().why, Why::InvalidValue);
}

#[test]
fn memory_that_is_freed_under_queued_work_harms_nobody() {
    let (machine, device, _) = machine();
    let bound = device.bind_current().unwrap();
    let stream = device.create_stream(&bound).unwrap();
    let first = bound.allocate(64).unwrap();
    let addr = first.region().addr;
    machine.hold(stream.raw()).unwrap();
    machine.fill(stream.raw(), addr, 64, 0xab).unwrap();
    drop(first);
    let second = bound.allocate(64).unwrap();
    assert_eq!(second.region().addr, addr);
    machine.release(stream.raw()).unwrap();
    bound.sync_stream(stream, Deadline::NEVER).unwrap();
    assert_eq!(machine.peek(addr, 64), Ok(vec![0; 64]), "the late fill went to the memory that is gone");
}

#[test]
fn only_what_was_allocated_is_freed() {
    let (machine, device, _) = machine();
    let bound = device.bind_current().unwrap();
    let memory = bound.allocate(64).unwrap();
    let addr = memory.region().addr;
    for wrong in [addr + 1, 0, addr + 4096] {
        assert_eq!(machine.free(wrong).unwrap_err().why, Why::InvalidValue);
    }
    machine.free(addr).unwrap();
    drop(memory);
    assert_eq!(
        (machine.drop_failures(), machine.log().count(Op::Free)),
        (1, 5),
        "the second free is counted"
    );
}

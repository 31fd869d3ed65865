//! Registration.

use std::thread;

use backend_cpu::strict::{Op, Why};
use hal::{Device, Kind, Memory, Region};

use crate::{builder, machine, of};

#[test]
fn the_same_region_twice_is_one_call_each_way() {
    let (machine, device, _) = machine();
    let bound = device.bind_current().unwrap();
    let memory = bound.allocate(4096).unwrap();
    let first = bound.register(memory.region()).unwrap();
    let second = bound.register(memory.region()).unwrap();
    drop(first);
    assert_eq!(machine.registrations(), 1);
    drop(second);
    let calls = [Op::Register, Op::Unregister].map(|op| machine.log().count(op));
    assert_eq!((calls, machine.registrations(), device.registrations()), ([1, 1], 0, 0));
}

#[test]
fn nine_mebibytes_are_registered_in_five_parts() {
    let (machine, device, _) = of(builder().register_max(2 << 20).register_alignment(4096).alignment(4096));
    let bound = device.bind_current().unwrap();
    let memory = bound.allocate(9 << 20).unwrap();
    let registration = bound.register(memory.region()).unwrap();
    assert_eq!((machine.registrations(), device.registrations()), (5, 1));
    drop(registration);
    assert_eq!(machine.registrations(), 0);
    let refusal = machine.register(memory.region().addr, 9 << 20).unwrap_err();
    assert_eq!(refusal.why, Why::InvalidValue);
    let e = bound.register(memory.region().part(1, 64).unwrap()).unwrap_err();
    assert_eq!((e.kind(), machine.registrations()), (Kind::InvalidArgument, 0));
}

#[test]
fn a_part_that_fails_rolls_the_earlier_ones_back() {
    let (machine, device, _) = of(builder().register_max(4096));
    let bound = device.bind_current().unwrap();
    let memory = bound.allocate(3 * 4096).unwrap();
    machine.faults().fail(Op::Register, 2, 999);
    let e = bound.register(memory.region()).unwrap_err();
    assert_eq!((e.kind(), e.vendor_code()), (Kind::Driver, Some(999)));
    assert_eq!((machine.registrations(), device.registrations()), (0, 0));
    bound.register(memory.region()).unwrap();
}

#[test]
fn a_rollback_that_fails_is_reported_beside_its_cause() {
    let (machine, device, _) = of(builder().register_max(4096));
    let bound = device.bind_current().unwrap();
    let memory = bound.allocate(3 * 4096).unwrap();
    machine.faults().fail(Op::Register, 3, 999);
    machine.faults().fail(Op::Unregister, 1, 713);
    let e = bound.register(memory.region()).unwrap_err();
    assert_eq!(e.vendor_code(), Some(999));
    assert!(e.to_string().contains("vendor code 713"), "{e}");
}

#[test]
fn a_reused_address_is_registered_afresh() {
    let (machine, device, _) = machine();
    let bound = device.bind_current().unwrap();
    let mut stale = Vec::new();
    let mut addresses = Vec::new();
    for len in [16, 64, 64] {
        let memory = bound.allocate(len).unwrap();
        addresses.push(memory.region().addr);
        // Its owner is late: the guard outlives the memory, which the driver does not notice.
        stale.push(bound.register(memory.region()).unwrap());
    }
    assert_eq!(addresses, [addresses[0]; 3]);
    assert_eq!((machine.log().count(Op::Register), machine.registrations()), (3, 1));
    assert_eq!(machine.freed_while_registered(), 3);
    drop(stale);
    assert_eq!((machine.registrations(), machine.drop_failures()), (0, 0));
}

#[test]
fn an_overlap_is_refused_before_any_call() {
    let (machine, device, _) = machine();
    let bound = device.bind_current().unwrap();
    let memory = bound.allocate(4096).unwrap();
    let _whole = bound.register(memory.region()).unwrap();
    let e = bound.register(memory.region().part(64, 64).unwrap()).unwrap_err();
    assert_eq!((e.kind(), machine.log().count(Op::Register)), (Kind::Overlap, 1));
    assert_eq!(machine.register(memory.region().addr + 64, 64).unwrap_err().code, 712);
}

#[test]
fn host_memory_is_registered_too_and_known_from_then_on() {
    let (machine, device, _) = of(builder().foreign_pointers_fail());
    let bound = device.bind_current().unwrap();
    let heap = vec![0u8; 8192];
    let region = Region::host(heap.as_ptr().expose_provenance(), 8192);
    let first = bound.register(region).unwrap();
    assert_eq!(bound.locate(region.addr, 8192).unwrap().region.place, hal::Place::Host);
    let second = bound.register(region).unwrap();
    assert_eq!(machine.log().count(Op::Register), 1);
    drop((first, second));
    assert!(bound.locate(region.addr, 8192).is_err());
}

#[test]
fn a_thousand_registrations_from_unbound_threads_all_succeed_on_the_right_device() {
    let (machine, _, device) = machine();
    let memory = device.bind_current().unwrap().allocate(1 << 20).unwrap();
    thread::scope(|s| {
        for worker in 0..4 {
            let (device, region) = (&device, memory.region());
            s.spawn(move || {
                for view in 0..250 {
                    let part = region.part((worker * 250 + view) * 1024, 1024).unwrap();
                    let bound = device.bind_current().unwrap();
                    let registration = bound.register(part).unwrap();
                    drop(bound);
                    // On a thread that is unbound again.
                    drop(registration);
                }
            });
        }
    });
    assert_eq!((machine.registrations(), machine.drop_failures()), (0, 0));
    for call in [machine.log().of(Op::Register), machine.log().of(Op::Unregister)].concat() {
        assert_eq!((call.current, call.owner), (Some(1), Some(1)));
    }
    assert_eq!(machine.log().count(Op::Unregister), 1000);
}

#[test]
fn a_registration_is_taken_back_by_its_own_device_only() {
    let (machine, zero, one) = machine();
    let memory = one.bind_current().unwrap().allocate(64).unwrap();
    let registration = one.bind_current().unwrap().register(memory.region()).unwrap();
    let bound = zero.bind_current().unwrap();
    assert_eq!(bound.register(memory.region()).unwrap_err().kind(), Kind::DeviceMismatch);
    assert_eq!(machine.register(memory.region().addr, 64).unwrap_err().why, Why::WrongContext);
    assert_eq!(machine.unregister(memory.region().addr).unwrap_err().why, Why::WrongContext);
    assert_eq!(machine.unregister(0x1000).unwrap_err().code, 713);
    drop(registration);
    assert_eq!((machine.registrations(), machine.drop_failures()), (0, 0));
}

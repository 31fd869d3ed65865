//! Faults, and the driver's end.

use std::{thread, time::Instant};

use backend_cpu::strict::{Op, Outcome, Why};
use hal::{Deadline, Device, Kind, Memory, Workers};

use crate::{MOMENT, machine, moment};

#[test]
fn the_nth_call_fails_and_the_others_do_not() {
    let (machine, device, _) = machine();
    let _bound = device.bind_current().unwrap();
    machine.create_stream().unwrap();
    machine.faults().fail(Op::CreateStream, 2, 999);
    let outcomes = [(); 3].map(|()| machine.create_stream().map(drop).map_err(|refusal| refusal.code));
    assert_eq!(outcomes, [Ok(()), Err(999), Ok(())]);
    machine.faults().fail_from(Op::CreateStream, 2, 2);
    let outcomes = [(); 3].map(|()| machine.create_stream().map(drop).map_err(|refusal| refusal.why));
    assert_eq!(outcomes, [Ok(()), Err(Why::OutOfMemory), Err(Why::OutOfMemory)]);
    machine.faults().clear();
    machine.create_stream().unwrap();
}

#[test]
fn every_operation_of_the_contract_can_fail() {
    let (machine, device, _) = machine();
    let bound = device.bind_current().unwrap();
    let memory = bound.allocate(64).unwrap();
    let region = memory.region();
    let mut bytes = [0u8; 64];
    let host = hal::Region::host(bytes.as_mut_ptr().expose_provenance(), 64);
    let failing = |op: Op, call: &dyn Fn() -> hal::Result<()>| {
        machine.faults().fail(op, 1, 999);
        let e = call().unwrap_err();
        assert_eq!((e.vendor_code(), e.device()), (Some(999), Some("0")), "{op:?}");
        call().unwrap_or_else(|e| panic!("{op:?}: {e}"));
    };
    let default = bound.current_stream();
    failing(Op::Current, &|| device.bind_current().map(drop));
    failing(Op::SyncStream, &|| bound.sync_stream(default, Deadline::NEVER));
    failing(Op::QueryStream, &|| bound.sync_stream(default, Deadline::passed()));
    failing(Op::CaptureStatus, &|| bound.sync_stream(default, Deadline::NEVER));
    failing(Op::Locate, &|| bound.locate(region.addr, 1).map(drop));
    failing(Op::Allocate, &|| bound.allocate(64).map(drop));
    failing(Op::Export, &|| bound.export_ipc(region).map(drop));
    failing(Op::Register, &|| bound.register(region).map(drop));
    // SAFETY: the array lives on, and nobody else has it.
    failing(Op::Copy, &|| unsafe { bound.copy(host, region) });
}

#[test]
fn a_guard_that_cannot_give_back_is_counted() {
    let (machine, device, _) = machine();
    let bound = device.bind_current().unwrap();
    let memory = bound.allocate(64).unwrap();
    let registration = bound.register(memory.region()).unwrap();
    machine.faults().fail(Op::Unregister, 1, 999);
    drop(registration);
    machine.faults().fail(Op::Free, 1, 999);
    drop(memory);
    assert_eq!((machine.drop_failures(), device.registrations()), (2, 0));
    machine.faults().fail(Op::Unbind, 1, 999);
    drop(bound);
    assert_eq!(machine.drop_failures(), 3);
}

#[test]
fn a_wait_that_never_returns_gives_up_at_its_deadline() {
    let (machine, device, _) = machine();
    let bound = device.bind_current().unwrap();
    let stream = device.create_stream(&bound).unwrap();
    machine.faults().hang(Op::SyncStream, 1);
    let start = Instant::now();
    assert_eq!(bound.sync_stream(stream, moment()).unwrap_err().kind(), Kind::Timeout);
    assert!(start.elapsed() >= MOMENT);
    bound.sync_stream(stream, moment()).unwrap();
}

#[test]
fn a_call_that_hangs_holds_up_nobody_else_and_goes_on_when_it_may() {
    let (machine, device, _) = machine();
    let workers = Workers::start(device.clone(), 1).unwrap();
    machine.faults().hang(Op::Register, 1);
    let heap = vec![0u8; 64].leak();
    let region = hal::Region::host(heap.as_ptr().expose_provenance(), 64);
    let register = move |bound: &hal::Bound<'_, _>| bound.register(region);
    let e = workers.run(moment(), "register", register).unwrap_err();
    assert_eq!(e.kind(), Kind::Timeout);
    assert_eq!(machine.log().of(Op::Register)[0].outcome, Outcome::Running);
    workers.run(Deadline::NEVER, "allocate", |bound| bound.allocate(64)).unwrap();
    machine.faults().unblock_all();
    while machine.log().of(Op::Register)[0].outcome == Outcome::Running {
        thread::yield_now();
    }
    while machine.registrations() > 0 {
        thread::yield_now();
    }
    assert_eq!(machine.log().count(Op::Unregister), 1, "the late registration was given back");
}

#[test]
fn a_test_that_ends_lets_hanging_calls_and_held_streams_go() {
    let (machine, device, _) = machine();
    let stream = {
        let bound = device.bind_current().unwrap();
        device.create_stream(&bound).unwrap()
    };
    machine.hold(stream.raw()).unwrap();
    machine.faults().hang_from(Op::Allocate, 1);
    thread::scope(|s| {
        s.spawn(|| drop(device.bind_current().unwrap().allocate(64).unwrap()));
        s.spawn(|| {
            let bound = device.bind_current().unwrap();
            device.machine().enqueue(stream.raw(), || ()).unwrap();
            bound.sync_stream(stream, Deadline::NEVER).unwrap();
        });
        thread::sleep(MOMENT);
        drop(machine);
    });
}

#[test]
fn after_the_driver_is_unloaded_every_call_is_refused_and_guards_keep_quiet() {
    let (machine, device, _) = machine();
    let other = device.bind_current().unwrap().allocate(64).unwrap();
    {
        let bound = device.bind_current().unwrap();
        let memory = bound.allocate(64).unwrap();
        let registration = bound.register(memory.region()).unwrap();
        machine.shut_down();
        let e = bound.sync_stream(bound.current_stream(), Deadline::NEVER).unwrap_err();
        assert_eq!((e.kind(), e.vendor_code()), (Kind::ShutDown, Some(4)));
        assert_eq!(bound.allocate(64).unwrap_err().kind(), Kind::ShutDown);
        drop(registration);
        drop(memory);
    }
    drop(other);
    assert_eq!(device.bind_current().unwrap_err().kind(), Kind::ShutDown);
    assert_eq!((machine.drop_failures(), machine.is_shut_down()), (0, true));
}

#[test]
fn the_log_tells_who_called_what_in_which_order() {
    let (machine, device, _) = machine();
    let bound = device.bind_current().unwrap();
    let stream = device.create_stream(&bound).unwrap();
    machine.log().clear();
    bound.sync_stream(stream, Deadline::NEVER).unwrap();
    machine.attributes(0x1000).unwrap();
    let ops: Vec<Op> = machine.log().calls().iter().map(|call| call.op).collect();
    assert_eq!(ops, [Op::CaptureStatus, Op::SyncStream, Op::Locate]);
    let calls = machine.log().calls();
    assert!(calls.iter().all(|call| call.thread == thread::current().id() && call.outcome == Outcome::Done));
    assert!(calls.is_sorted_by_key(|call| call.number));
    assert!(Op::ALL.iter().all(|op| Op::from_name(op.name()) == Some(*op)));
}

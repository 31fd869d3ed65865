//! Which device is current on which thread.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    thread,
};

use backend_cpu::strict::{DefaultDevice, Dialect, MemoryKind, Op, Outcome, Why};
use hal::{Bound, Deadline, Device, DeviceExt, Kind, LogicalId, Memory, PhysicalId, Result, Workers};

use crate::{builder, machine, of};

#[test]
fn a_fresh_thread_has_no_device_and_calls_that_need_one_say_so() {
    let (machine, _, _) = machine();
    machine.bind(1).unwrap();
    thread::Builder::new()
        .name("pool-7".into())
        .spawn({
            let machine = machine.machine();
            move || {
                assert_eq!(machine.current().unwrap(), None);
                let refusal = machine.allocate(64, MemoryKind::Normal).unwrap_err();
                assert_eq!((refusal.why, refusal.code), (Why::NoContext, 201));
                assert!(refusal.text.contains("pool-7"), "{refusal}");
                for refused in [
                    machine.current_device().map(drop),
                    machine.create_stream().map(drop),
                    machine.sync_stream(0, Deadline::NEVER),
                    machine.register(0x1000, 64),
                    machine.unregister(0x1000),
                    machine.free(0x1000),
                    machine.close_import(0x1000),
                ] {
                    assert_eq!(refused.unwrap_err().why, Why::NoContext);
                }
            }
        })
        .unwrap()
        .join()
        .unwrap();
    let call = machine.log().of(Op::Allocate).remove(0);
    assert_eq!((call.thread_name.as_deref(), call.current), (Some("pool-7"), None));
    assert_eq!(call.outcome, Outcome::Failed(201));
    assert_eq!(machine.current().unwrap(), Some(1));
}

#[test]
fn each_dialect_has_its_number_for_a_thread_without_a_device() {
    let (machine, device, _) = of(builder().dialect(Dialect::Acl));
    assert_eq!(machine.create_stream().unwrap_err().code, 107002);
    let e = machine.create_stream().unwrap_err().error("create_stream", 0);
    assert_eq!((e.kind(), e.vendor_code()), (Kind::NotBound, Some(107002)));
    drop(device);
}

#[test]
fn a_default_device_answers_zero_and_binds_nothing() {
    let (machine, _, _) = of(builder().default_device(DefaultDevice::AnswersZero));
    assert_eq!((machine.current_device(), machine.current()), (Ok(0), Ok(None)));
    assert_eq!(machine.create_stream().unwrap_err().why, Why::NoContext);
}

#[test]
fn the_worse_default_device_silently_binds_device_zero() {
    let (machine, _, one) = of(builder().default_device(DefaultDevice::BindsZero));
    assert_eq!((machine.current_device(), machine.current()), (Ok(0), Ok(None)));
    let addr = machine.allocate(64, MemoryKind::Normal).unwrap();
    assert_eq!(machine.current(), Ok(Some(0)));
    machine.free(addr).unwrap();
    // Who binds first is not fooled.
    thread::scope(|s| {
        s.spawn(|| {
            let memory = one.bind_current().unwrap().allocate(64).unwrap();
            assert_eq!(memory.region().place, hal::Place::Device(one.identity().uuid));
        });
    });
}

#[test]
fn a_proof_binds_and_gives_the_thread_back_as_it_was() {
    let (machine, zero, one) = machine();
    {
        let _outer = zero.bind_current().unwrap();
        {
            let _inner = one.bind_current().unwrap();
            assert_eq!(machine.current(), Ok(Some(1)));
        }
        assert_eq!(machine.current(), Ok(Some(0)));
    }
    assert_eq!(machine.current(), Ok(None));
    assert_eq!((machine.log().count(Op::Bind), machine.log().count(Op::Unbind)), (3, 1));
}

#[test]
fn binding_what_is_current_already_makes_no_call_that_changes_anything() {
    let (machine, zero, _) = machine();
    let _outer = zero.bind_current().unwrap();
    machine.log().clear();
    for _ in 0..100 {
        let inner = zero.bind_current().unwrap();
        drop(inner);
    }
    let changes = [Op::Bind, Op::Unbind, Op::Push, Op::Pop].map(|op| machine.log().count(op));
    assert_eq!(changes, [0; 4]);
}

#[test]
fn the_thread_is_given_back_on_an_error_and_while_unwinding() {
    let (machine, zero, _) = machine();
    let fails = || -> Result<()> {
        let bound = zero.bind_current()?;
        bound.allocate(usize::MAX).map(drop)
    };
    fails().unwrap_err();
    assert_eq!(machine.current(), Ok(None));
    catch_unwind(AssertUnwindSafe(|| {
        let _bound = zero.bind_current().unwrap();
        panic!("as told")
    }))
    .unwrap_err();
    assert_eq!(machine.current(), Ok(None));
}

#[test]
fn a_bind_that_fails_is_an_error_and_no_other_device() {
    let (machine, zero, one) = machine();
    let _outer = zero.bind_current().unwrap();
    machine.faults().fail(Op::Bind, 1, 46);
    let e = one.bind_current().unwrap_err();
    assert_eq!((e.kind(), e.vendor_code()), (Kind::Driver, Some(46)));
    assert_eq!(machine.current(), Ok(Some(0)));
}

#[test]
fn a_thread_that_cannot_be_unbound_is_left_alone_and_an_owned_one_does_the_work() {
    let (machine, _, one) = of(builder().no_unbind().dialect(Dialect::Acl));
    assert_eq!(machine.unbind().unwrap_err().code, 100000);
    let e = one.bind_current().unwrap_err();
    assert_eq!((e.kind(), machine.log().count(Op::Bind)), (Kind::CannotRestore, 0));

    let workers = Workers::start(one.clone(), 1).unwrap();
    let current = {
        let machine = machine.machine();
        move |_: &Bound<'_, _>| Ok((machine.current().unwrap(), thread::current().id()))
    };
    let (on, thread) = workers.bound(Deadline::NEVER, "test", current).unwrap();
    assert_eq!(on, Some(1));
    assert_ne!(thread, thread::current().id());
    assert_eq!(machine.current(), Ok(None));
    // A thread that had a device can be given back.
    machine.bind(0).unwrap();
    drop(one.bind_current().unwrap());
    assert_eq!(machine.current(), Ok(Some(0)));
}

#[test]
fn guards_are_given_back_from_any_thread_and_leave_it_as_it_was() {
    for builder in [builder(), builder().no_unbind(), builder().no_unbind().dialect(Dialect::Acl)] {
        let (machine, _, one) = of(builder);
        let (memory, registration) = thread::scope(|s| {
            let made = s.spawn(|| {
                let bound = one.bind_owned_thread().unwrap();
                let memory = bound.allocate(4096).unwrap();
                let registration = bound.register(memory.region()).unwrap();
                (memory, registration)
            });
            made.join().unwrap()
        });
        machine.log().clear();
        drop(registration);
        drop(memory);
        assert_eq!((machine.drop_failures(), machine.registrations(), machine.live_allocations()), (0, 0, 0));
        assert_eq!(machine.current(), Ok(None));
        for call in [machine.log().of(Op::Unregister), machine.log().of(Op::Free)].concat() {
            assert_eq!((call.current, call.owner), (Some(1), Some(1)));
        }
    }
}

#[test]
fn the_stack_of_a_thread_is_pushed_and_popped() {
    let (machine, _, _) = machine();
    assert_eq!(machine.pop().unwrap_err().why, Why::NoContext);
    machine.push(0).unwrap();
    machine.push(1).unwrap();
    machine.bind(0).unwrap();
    assert_eq!((machine.pop(), machine.pop(), machine.current()), (Ok(0), Ok(0), Ok(None)));
}

#[test]
fn references_to_a_device_are_counted() {
    let (machine, _, _) = machine();
    machine.retain(1).unwrap();
    assert_eq!((machine.retained(1), machine.current()), (Ok(1), Ok(None)));
    machine.release_device(1).unwrap();
    assert_eq!(machine.release_device(1).unwrap_err().why, Why::InvalidValue);
}

#[test]
fn logical_and_physical_ids_are_kept_apart() {
    let machine = builder().devices(8).visible([4, 5, 6, 7]).build().unwrap();
    let device = machine.device(LogicalId(1)).unwrap();
    assert_eq!(device.identity().physical, Some(PhysicalId(5)));
    let _bound = device.bind_current().unwrap();
    assert_eq!(machine.current(), Ok(Some(1)));
    let e = machine.device(LogicalId(5)).unwrap_err();
    assert_eq!(e.kind(), Kind::InvalidDevice);
    let text = e.to_string();
    assert!(text.contains("[4, 5, 6, 7]") && text.contains("its logical id is 1"), "{text}");
}

#[test]
fn the_uuid_is_the_physical_devices_whoever_sees_it() {
    let all = builder().devices(8).seed(7).build().unwrap();
    let one = builder().devices(8).seed(7).visible([5]).build().unwrap();
    let other = builder().devices(8).seed(8).visible([5]).build().unwrap();
    assert_eq!(all.uuid(5), one.uuid(0));
    assert_ne!(all.uuid(5), other.uuid(0));
    assert_ne!(all.uuid(5), all.uuid(4));
}

#[test]
fn a_machine_that_makes_no_sense_is_not_built() {
    for builder in [
        builder().devices(0),
        builder().visible([]),
        builder().visible([2]),
        builder().visible([1, 1]),
        builder().alignment(0),
    ] {
        assert_eq!(builder.build().unwrap_err().kind(), Kind::InvalidArgument);
    }
}

#[test]
fn work_lands_on_the_device_that_is_current() {
    let (machine, zero, one) = machine();
    let [first, second] = [&zero, &one].map(|device| device.bind_current().unwrap().allocate(64).unwrap());
    let owners: Vec<_> = machine.log().of(Op::Allocate).iter().map(|call| call.current).collect();
    assert_eq!(owners, [Some(0), Some(1)]);
    let bound = zero.bind_current().unwrap();
    let place = |addr| bound.locate(addr, 64).unwrap().region.place;
    assert_eq!(place(first.region().addr), first.region().place);
    assert_eq!(place(second.region().addr), second.region().place);
    assert_ne!(first.region().place, second.region().place);
    let bytes = [0u8; 64];
    let host = hal::Region::host(bytes.as_ptr().expose_provenance(), 64);
    // SAFETY: refused before anything is touched.
    let e = unsafe { bound.copy(second.region(), host) }.unwrap_err();
    assert_eq!((e.kind(), machine.log().count(Op::Copy)), (Kind::DeviceMismatch, 0));
    // SAFETY: as above.
    let refusal = unsafe { machine.copy(second.region().addr, host.addr, 64) }.unwrap_err();
    assert_eq!(refusal.why, Why::WrongContext);
    let named = one.with_stream(one.stream(0x1001), || bound.current_stream());
    assert_eq!(named, zero.stream(0));
}

//! Streams, events and capture.

use std::thread;

use backend_cpu::strict::{
    CaptureMode, CaptureStatus, LEGACY_STREAM, NULL_STREAM, Op, PER_THREAD_STREAM, Why,
};
use hal::{Deadline, Device, DeviceExt, Kind, Memory};

use crate::{builder, machine, moment, of};

#[test]
fn held_work_runs_when_the_test_says_so() {
    let (machine, device, _) = machine();
    let bound = device.bind_current().unwrap();
    let memory = bound.allocate(64).unwrap();
    let addr = memory.region().addr;
    let stream = device.create_stream(&bound).unwrap();
    machine.hold(stream.raw()).unwrap();
    machine.fill(stream.raw(), addr, 64, 0xab).unwrap();
    machine.fill(stream.raw(), addr, 64, 0xcd).unwrap();
    assert_eq!(bound.sync_stream(stream, moment()).unwrap_err().kind(), Kind::Timeout);
    assert_eq!(bound.sync_stream(stream, Deadline::passed()).unwrap_err().kind(), Kind::Timeout);
    assert_eq!((machine.pending(stream.raw()), machine.peek(addr, 64)), (Ok(2), Ok(vec![0; 64])));

    let half_way = machine.create_event().unwrap();
    machine.release_some(stream.raw(), 1).unwrap();
    while machine.pending(stream.raw()).unwrap() > 1 {
        thread::yield_now();
    }
    assert_eq!(machine.peek(addr, 64), Ok(vec![0xab; 64]));
    machine.record_event(half_way, stream.raw()).unwrap();
    assert_eq!(machine.query_event(half_way), Ok(false));

    machine.release(stream.raw()).unwrap();
    bound.sync_stream(stream, Deadline::NEVER).unwrap();
    assert_eq!((machine.query_event(half_way), machine.peek(addr, 64)), (Ok(true), Ok(vec![0xcd; 64])));
}

#[test]
fn one_wait_is_one_call_on_that_stream_and_never_device_wide() {
    let (machine, device, _) = machine();
    let bound = device.bind_current().unwrap();
    let [a, b] = [0, 1].map(|_| device.create_stream(&bound).unwrap());
    machine.hold(b.raw()).unwrap();
    machine.enqueue(b.raw(), || ()).unwrap();
    bound.sync_stream(a, Deadline::NEVER).unwrap();
    bound.sync_stream(a, moment()).unwrap();
    let waits: Vec<_> = machine.log().of(Op::SyncStream).iter().map(|call| call.argument).collect();
    assert_eq!(waits, [backend_cpu::strict::Argument::Stream(a.raw()); 2]);
    assert_eq!((machine.log().count(Op::SyncDevice), machine.pending(b.raw())), (0, Ok(1)));
}

#[test]
fn a_per_thread_stream_is_another_one_on_each_thread() {
    let (machine, device, _) = machine();
    let bound = device.bind_current().unwrap();
    let own = device.stream(PER_THREAD_STREAM);
    machine.hold(PER_THREAD_STREAM).unwrap();
    machine.enqueue(PER_THREAD_STREAM, || ()).unwrap();
    thread::scope(|s| {
        s.spawn(|| {
            let bound = device.bind_current().unwrap();
            // The machine does what CUDA does: it waits for this thread's own, empty stream.
            machine.sync_stream(PER_THREAD_STREAM, Deadline::NEVER).unwrap();
            machine.log().clear();
            let e = bound.sync_stream(own, Deadline::NEVER).unwrap_err();
            assert_eq!(e.kind(), Kind::WrongThread);
            assert_eq!(machine.log().count(Op::SyncStream) + machine.log().count(Op::QueryStream), 0);
        });
    });
    assert_eq!(machine.pending(PER_THREAD_STREAM), Ok(1));
    machine.release(PER_THREAD_STREAM).unwrap();
    bound.sync_stream(own, Deadline::NEVER).unwrap();
}

#[test]
fn the_default_stream_is_the_devices_or_the_threads() {
    let (machine, device, _) = machine();
    let bound = device.bind_current().unwrap();
    assert_eq!(bound.current_stream(), device.stream(NULL_STREAM));
    machine.hold(NULL_STREAM).unwrap();
    machine.enqueue(NULL_STREAM, || ()).unwrap();
    assert_eq!(machine.pending(LEGACY_STREAM), Ok(1));
    machine.bind(1).unwrap();
    assert_eq!(machine.pending(NULL_STREAM), Ok(0), "each device has its own");

    let (machine, device, _) = of(builder().per_thread_default_stream());
    let bound = device.bind_current().unwrap();
    let current = bound.current_stream();
    assert!(<backend_cpu::strict::StrictDevice as Device>::is_per_thread(current));
    machine.enqueue(NULL_STREAM, || ()).unwrap();
    machine.hold(NULL_STREAM).unwrap();
    machine.enqueue(NULL_STREAM, || ()).unwrap();
    assert_eq!(machine.pending(PER_THREAD_STREAM), machine.pending(NULL_STREAM));
    assert_eq!(machine.pending(LEGACY_STREAM), Ok(0));
}

#[test]
fn the_named_stream_is_the_current_one_on_its_thread_only() {
    let (_machine, device, _) = machine();
    let bound = device.bind_current().unwrap();
    let stream = device.create_stream(&bound).unwrap();
    device.with_stream(stream, || {
        assert_eq!(bound.current_stream(), stream);
        thread::scope(|s| {
            s.spawn(|| {
                let bound = device.bind_current().unwrap();
                assert_eq!(bound.current_stream(), device.stream(NULL_STREAM));
            });
        });
    });
}

#[test]
fn work_needs_the_streams_device_and_waiting_needs_any() {
    let (machine, zero, one) = machine();
    let bound = zero.bind_current().unwrap();
    let stream = zero.create_stream(&bound).unwrap().raw();
    let memory = bound.allocate(64).unwrap();
    let event = machine.create_event().unwrap();
    let addr = memory.region().addr;
    let _elsewhere = one.bind_current().unwrap();
    for refused in [
        machine.enqueue(stream, || ()),
        machine.fill(stream, addr, 64, 1),
        machine.record_event(event, stream),
        machine.wait_event(stream, event),
    ] {
        assert_eq!(refused.unwrap_err().why, Why::WrongContext);
    }
    machine.sync_stream(stream, Deadline::NEVER).unwrap();
    assert_eq!(machine.query_stream(stream), Ok(true));
    let call = machine.log().of(Op::SyncStream).remove(0);
    assert_eq!((call.current, call.owner), (Some(1), Some(0)));
}

#[test]
fn a_stream_waits_for_anothers_event() {
    let (machine, device, _) = machine();
    let bound = device.bind_current().unwrap();
    let [a, b] = [0, 1].map(|_| device.create_stream(&bound).unwrap());
    let memory = bound.allocate(8).unwrap();
    let addr = memory.region().addr;
    machine.hold(a.raw()).unwrap();
    machine.fill(a.raw(), addr, 8, 1).unwrap();
    let event = machine.create_event().unwrap();
    assert_eq!(machine.query_event(event), Ok(true), "not recorded yet");
    machine.record_event(event, a.raw()).unwrap();
    machine.wait_event(b.raw(), event).unwrap();
    machine.fill(b.raw(), addr, 8, 2).unwrap();
    assert_eq!(bound.sync_stream(b, moment()).unwrap_err().kind(), Kind::Timeout);
    assert_eq!(machine.sync_event(event, moment()).unwrap_err().why, Why::NotReady);
    machine.release(a.raw()).unwrap();
    bound.sync_stream(b, Deadline::NEVER).unwrap();
    assert_eq!(machine.peek(addr, 8), Ok(vec![2; 8]));
    machine.destroy_event(event).unwrap();
    assert_eq!(machine.query_event(event).unwrap_err().why, Why::InvalidHandle);
}

#[test]
fn queued_work_that_fails_is_told_at_the_next_wait() {
    let (machine, device, _) = machine();
    let bound = device.bind_current().unwrap();
    let stream = device.create_stream(&bound).unwrap();
    machine.enqueue(stream.raw(), || panic!("kernel fault")).unwrap();
    let e = bound.sync_stream(stream, Deadline::NEVER).unwrap_err();
    assert_eq!((e.kind(), e.vendor_code()), (Kind::Driver, Some(719)));
    bound.sync_stream(stream, Deadline::NEVER).unwrap();
}

#[test]
fn a_destroyed_stream_is_no_stream_and_its_held_work_is_lost() {
    let (machine, device, _) = machine();
    let bound = device.bind_current().unwrap();
    machine.hold_new_streams(true);
    let stream = device.create_stream(&bound).unwrap();
    let event = machine.create_event().unwrap();
    machine.enqueue(stream.raw(), || panic!("must not run")).unwrap();
    machine.record_event(event, stream.raw()).unwrap();
    thread::scope(|s| {
        let waits = s.spawn(|| {
            machine.bind(0).unwrap();
            machine.sync_stream(stream.raw(), Deadline::NEVER).unwrap();
        });
        while machine.log().count(Op::SyncStream) == 0 {
            thread::yield_now();
        }
        thread::sleep(crate::MOMENT);
        machine.destroy_stream(stream.raw()).unwrap();
        waits.join().unwrap();
    });
    machine.sync_event(event, Deadline::NEVER).unwrap();
    let e = bound.sync_stream(stream, Deadline::NEVER).unwrap_err();
    assert_eq!((e.kind(), e.vendor_code()), (Kind::InvalidArgument, Some(400)));
    assert_eq!(machine.destroy_stream(NULL_STREAM).unwrap_err().why, Why::InvalidHandle);
}

#[test]
fn a_copy_on_a_stream_runs_in_its_order() {
    let (machine, device, _) = machine();
    let bound = device.bind_current().unwrap();
    let memory = bound.allocate(16).unwrap();
    let stream = device.create_stream(&bound).unwrap();
    let (from, mut to) = (*b"sixteen bytes ok", [0u8; 16]);
    let (source, target) = (from.as_ptr().expose_provenance(), to.as_mut_ptr().expose_provenance());
    let addr = memory.region().addr;
    machine.hold(stream.raw()).unwrap();
    // SAFETY: both arrays outlive the wait below, and nobody touches them until then.
    unsafe {
        machine.copy_async(stream.raw(), addr, source, 16).unwrap();
        machine.copy_async(stream.raw(), addr + 8, addr, 8).unwrap();
        machine.copy_async(stream.raw(), target, addr, 16).unwrap();
    }
    machine.release(stream.raw()).unwrap();
    bound.sync_stream(stream, Deadline::NEVER).unwrap();
    assert_eq!(&to, b"sixteen sixteen ");
}

#[test]
fn waiting_for_a_captured_stream_spoils_the_capture_in_the_machine() {
    let (machine, device, _) = machine();
    let bound = device.bind_current().unwrap();
    let stream = device.create_stream(&bound).unwrap().raw();
    for spoil in [
        |m: &backend_cpu::strict::Machine, s| m.sync_stream(s, Deadline::NEVER),
        |m: &backend_cpu::strict::Machine, s| m.query_stream(s).map(drop),
        |m: &backend_cpu::strict::Machine, _| m.sync_device(),
    ] {
        machine.begin_capture(stream, CaptureMode::Relaxed).unwrap();
        let codes = [(); 2].map(|()| spoil(&machine, stream).unwrap_err().code);
        assert_eq!(codes, [900, 901]);
        assert_eq!(machine.capture_status(stream), Ok(CaptureStatus::Invalidated));
        assert_eq!(machine.end_capture(stream).unwrap_err().code, 901);
        assert_eq!(machine.capture_status(stream), Ok(CaptureStatus::None));
    }
}

#[test]
fn the_device_refuses_before_the_call_that_would_spoil_a_capture() {
    let (machine, device, _) = machine();
    let bound = device.bind_current().unwrap();
    let memory = bound.allocate(64).unwrap();
    let stream = device.create_stream(&bound).unwrap();
    machine.begin_capture(stream.raw(), CaptureMode::Global).unwrap();
    machine.fill(stream.raw(), memory.region().addr, 64, 1).unwrap();
    machine.log().clear();
    let mut host = [0u8; 64];
    let host = hal::Region::host(host.as_mut_ptr().expose_provenance(), 64);
    device.with_stream(stream, || {
        for refused in [
            bound.sync_stream(stream, Deadline::NEVER),
            bound.sync_stream(stream, Deadline::passed()),
            bound.register(memory.region()).map(drop),
            bound.register(host).map(drop),
            bound.allocate(64).map(drop),
            // SAFETY: refused before anything is touched.
            unsafe { bound.copy(host, memory.region()) },
        ] {
            assert_eq!(refused.unwrap_err().kind(), Kind::StreamCapturing);
        }
    });
    let forbidden = [Op::SyncStream, Op::QueryStream, Op::Register, Op::Allocate, Op::Copy];
    assert_eq!(forbidden.map(|op| machine.log().count(op)), [0; 5]);
    assert_eq!(machine.end_capture(stream.raw()), Ok(1), "the fill was recorded");
    assert_eq!(machine.peek(memory.region().addr, 1), Ok(vec![0]), "and did not run");
}

#[test]
fn allocating_beside_a_global_capture_spoils_it_unless_the_thread_is_relaxed() {
    let (machine, device, _) = machine();
    let bound = device.bind_current().unwrap();
    let stream = device.create_stream(&bound).unwrap().raw();
    let elsewhere = |work: &(dyn Fn() + Sync)| {
        thread::scope(|s| s.spawn(work).join().unwrap());
    };
    machine.begin_capture(stream, CaptureMode::Global).unwrap();
    elsewhere(&|| {
        let bound = device.bind_current().unwrap();
        let memory = bound.allocate(64).unwrap();
        drop(bound.register(memory.region()).unwrap());
    });
    assert_eq!(machine.capture_status(stream), Ok(CaptureStatus::Active), "the device protects its calls");
    elsewhere(&|| {
        machine.bind(0).unwrap();
        assert_eq!(machine.allocate(64, Default::default()).unwrap_err().why, Why::CaptureForbids);
    });
    assert_eq!(machine.end_capture(stream).unwrap_err().why, Why::CaptureSpoiled);

    machine.begin_capture(stream, CaptureMode::ThreadLocal).unwrap();
    elsewhere(&|| {
        machine.bind(0).unwrap();
        let addr = machine.allocate(64, Default::default()).unwrap();
        machine.free(addr).unwrap();
    });
    assert_eq!(machine.capture_status(stream), Ok(CaptureStatus::Active));
    assert_eq!(machine.register(0x1000, 64).unwrap_err().why, Why::CaptureForbids);
    assert_eq!(machine.end_capture(stream).unwrap_err().why, Why::CaptureSpoiled);
    drop(bound);
}

#[test]
fn aborting_a_stream_drops_its_work_and_tells_who_waits() {
    let (machine, device, _) = machine();
    let bound = device.bind_current().unwrap();
    let memory = bound.allocate(64).unwrap();
    let addr = memory.region().addr;
    let stream = device.create_stream(&bound).unwrap().raw();
    machine.hold(stream).unwrap();
    machine.fill(stream, addr, 64, 0xab).unwrap();
    thread::scope(|s| {
        let waiter = s.spawn(|| {
            let _bound = device.bind_owned_thread().unwrap();
            machine.sync_stream(stream, Deadline::NEVER).map_err(|e| e.why)
        });
        while machine.log().count(Op::SyncStream) == 0 {
            thread::yield_now();
        }
        thread::sleep(std::time::Duration::from_millis(20));
        machine.abort_stream(stream).unwrap();
        assert_eq!(waiter.join().unwrap(), Err(Why::StreamAborted));
    });
    machine.release(stream).unwrap();
    machine.fill(stream, addr, 32, 0xcd).unwrap();
    machine.sync_stream(stream, Deadline::NEVER).unwrap();
    assert_eq!(machine.peek(addr, 64), Ok([[0xcd; 32], [0; 32]].concat()));
}

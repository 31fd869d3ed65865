//! The order that CUDA's legacy default stream makes, and how captures meet streams that depend on each other.

use backend_cpu::strict::{
    CaptureMode, CaptureStatus, LEGACY_STREAM, MachineOwner, NULL_STREAM, PER_THREAD_STREAM, Why,
};
use hal::Deadline;

use crate::{builder, moment, of};

fn ordered() -> MachineOwner {
    let (machine, ..) = of(builder().legacy_order());
    machine.bind(0).unwrap();
    machine
}

#[test]
fn the_default_stream_waits_for_blocking_streams_and_they_for_it() {
    let machine = ordered();
    let [blocking, other] = [0, 1].map(|_| machine.create_blocking_stream().unwrap());
    let free = machine.create_stream().unwrap();
    for first in [blocking, PER_THREAD_STREAM, LEGACY_STREAM] {
        machine.hold(first).unwrap();
        machine.enqueue(first, || ()).unwrap();
        machine.enqueue(NULL_STREAM, || ()).unwrap();
        machine.enqueue(other, || ()).unwrap();
        machine.enqueue(free, || ()).unwrap();
        machine.sync_stream(free, Deadline::NEVER).unwrap();
        for waits in [NULL_STREAM, other] {
            assert_eq!(machine.sync_stream(waits, moment()).unwrap_err().why, Why::NotReady);
            assert_eq!(machine.query_stream(waits), Ok(false));
        }
        let event = machine.create_event().unwrap();
        machine.record_event(event, other).unwrap();
        assert_eq!(machine.is_event_complete(event), Ok(false));
        machine.release(first).unwrap();
        machine.sync_stream(other, Deadline::NEVER).unwrap();
        machine.sync_event(event, Deadline::NEVER).unwrap();
    }
}

#[test]
fn waiting_for_the_default_stream_waits_for_blocking_streams_without_work_on_it() {
    let machine = ordered();
    let blocking = machine.create_blocking_stream().unwrap();
    machine.hold(blocking).unwrap();
    machine.enqueue(blocking, || ()).unwrap();
    assert_eq!(machine.query_stream(NULL_STREAM), Ok(false));
    let event = machine.create_event().unwrap();
    machine.record_event(event, NULL_STREAM).unwrap();
    assert_eq!(machine.is_event_complete(event), Ok(false));
    // The other device has a default stream of its own.
    machine.bind(1).unwrap();
    assert_eq!(machine.query_stream(NULL_STREAM), Ok(true));
    machine.release(blocking).unwrap();
}

#[test]
fn many_threads_that_order_both_ways_come_to_an_end() {
    let machine = ordered();
    std::thread::scope(|s| {
        for _ in 0..4 {
            s.spawn(|| {
                machine.bind(0).unwrap();
                let own = machine.create_blocking_stream().unwrap();
                for _ in 0..200 {
                    machine.enqueue(own, || ()).unwrap();
                    machine.enqueue(LEGACY_STREAM, || ()).unwrap();
                }
                machine.sync_stream(own, Deadline::NEVER).unwrap();
            });
        }
    });
    machine.sync_stream(LEGACY_STREAM, Deadline::NEVER).unwrap();
}

#[test]
fn the_default_stream_is_refused_beside_a_captured_blocking_stream() {
    let machine = ordered();
    let free = machine.create_stream().unwrap();
    machine.begin_capture(free, CaptureMode::Relaxed).unwrap();
    machine.enqueue(NULL_STREAM, || ()).unwrap();
    machine.end_capture(free).unwrap();

    let blocking = machine.create_blocking_stream().unwrap();
    machine.begin_capture(blocking, CaptureMode::Relaxed).unwrap();
    assert_eq!(machine.capture_status(NULL_STREAM).unwrap_err().code, 906);
    assert_eq!(machine.capture_status(blocking), Ok(CaptureStatus::Active), "a question spoils nothing");
    assert_eq!(machine.sync_stream(NULL_STREAM, Deadline::NEVER).unwrap_err().why, Why::CaptureImplicit);
    assert_eq!(machine.capture_status(blocking), Ok(CaptureStatus::Invalidated));
    machine.end_capture(blocking).unwrap_err();

    // The per-thread stream can be captured, unlike the one that all share.
    machine.begin_capture(PER_THREAD_STREAM, CaptureMode::Relaxed).unwrap();
    assert_eq!(machine.end_capture(PER_THREAD_STREAM), Ok(0));
    assert_eq!(
        machine.begin_capture(LEGACY_STREAM, CaptureMode::Relaxed).unwrap_err().why,
        Why::CaptureForbids
    );
}

#[test]
fn an_event_of_a_capture_draws_a_stream_in_and_never_happens() {
    let machine = ordered();
    let [origin, joined] = [0, 1].map(|_| machine.create_stream().unwrap());
    let event = machine.create_event().unwrap();
    for spoil in [false, true] {
        machine.begin_capture(origin, CaptureMode::Global).unwrap();
        machine.record_event(event, origin).unwrap();
        machine.wait_event(joined, event).unwrap();
        assert_eq!(machine.capture_status(joined), Ok(CaptureStatus::Active));
        assert_eq!(machine.query_event(event).unwrap_err().code, 907);
        if spoil {
            machine.query_stream(joined).unwrap_err();
        }
        assert_eq!(machine.end_capture(joined).unwrap_err().why, Why::NotCapturing);
        let ended = machine.end_capture(origin).map_err(|e| e.why);
        assert_eq!(ended, if spoil { Err(Why::CaptureSpoiled) } else { Ok(2) });
        assert_eq!(machine.capture_status(joined), Ok(CaptureStatus::None));
        assert_eq!(machine.wait_event(joined, event).unwrap_err().why, Why::CapturedEvent);
    }
}

#[test]
fn a_capture_takes_no_event_from_outside() {
    let machine = ordered();
    let [inside, outside] = [0, 1].map(|_| machine.create_stream().unwrap());
    let [event, never] = [0, 1].map(|_| machine.create_event().unwrap());
    machine.record_event(event, outside).unwrap();
    machine.begin_capture(inside, CaptureMode::Relaxed).unwrap();
    machine.wait_event(inside, never).unwrap();
    assert_eq!(machine.wait_event(inside, event).unwrap_err().code, 905);
    assert_eq!(machine.capture_status(inside), Ok(CaptureStatus::Invalidated));
}

#[test]
fn another_thread_does_not_end_a_capture_unless_it_is_relaxed() {
    let machine = ordered();
    let stream = machine.create_stream().unwrap();
    for (mode, ends) in [(CaptureMode::ThreadLocal, false), (CaptureMode::Relaxed, true)] {
        machine.begin_capture(stream, mode).unwrap();
        let ended = std::thread::scope(|s| s.spawn(|| machine.end_capture(stream)).join().unwrap());
        assert_eq!(ended.map_err(|e| e.code), if ends { Ok(0) } else { Err(908) });
        if !ends {
            machine.end_capture(stream).unwrap();
        }
    }
}

#[test]
fn a_reset_device_has_nothing_left() {
    let machine = ordered();
    let stream = machine.create_stream().unwrap();
    let addr = machine.allocate(64, Default::default()).unwrap();
    machine.register(vec![0u8; 64].leak().as_ptr().addr(), 64).unwrap();
    machine.bind(1).unwrap();
    let other = machine.allocate(64, Default::default()).unwrap();
    machine.reset_device(0).unwrap();
    assert_eq!((machine.live_allocations(), machine.registrations()), (1, 0));
    assert_eq!(machine.sync_stream(stream, Deadline::NEVER).unwrap_err().why, Why::InvalidHandle);
    assert!(machine.peek(addr, 1).is_err() && machine.peek(other, 1).is_ok());
}

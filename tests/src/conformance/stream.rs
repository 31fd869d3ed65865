//! The current stream, and what waiting for a stream means.

use std::{thread, time::Duration};

use hal::{Deadline, Device, DeviceExt, Kind, Memory};

use super::{cases, on_thread, patient, read, write};
use crate::fixture::Fixture;

cases! {
    the_default_stream_is_current_unless_one_is_named,
    a_named_stream_is_current_on_its_thread_while_it_is_named,
    naming_a_held_stream_does_not_wait,
    sync_of_an_idle_stream_returns_at_once,
    sync_waits_for_queued_work,
    sync_with_a_passed_deadline_never_blocks,
    sync_of_held_work_times_out,
    sync_waits_for_no_other_stream,
    an_earlier_failure_surfaces_at_sync [QueuedFailure],
    sync_works_on_any_bound_thread,
    a_stream_under_capture_is_refused_and_stays_valid [Capture],
    registering_under_capture_is_refused_and_the_capture_stays_valid [Capture],
    a_per_thread_stream_is_waited_for_on_its_own_thread [PerThreadStream],
    a_per_thread_stream_is_refused_on_another_thread [PerThreadStream],
}

fn the_default_stream_is_current_unless_one_is_named<D: Device>(f: &dyn Fixture<D>) {
    let bound = f.device().bind_current().unwrap();
    let (default, named) = (bound.current_stream(), f.stream());
    assert_ne!(default, named);
    assert_eq!(bound.current_stream(), default);
    f.device().with_stream(named, || assert_eq!(bound.current_stream(), named));
    assert_eq!(bound.current_stream(), default);
}

fn a_named_stream_is_current_on_its_thread_while_it_is_named<D: Device>(f: &dyn Fixture<D>) {
    let (outer, inner) = (f.stream(), f.stream());
    let current = || f.device().bind_current().unwrap().current_stream();
    f.device().with_stream(outer, || {
        f.device().with_stream(inner, || assert_eq!(current(), inner));
        assert_eq!(current(), outer);
        assert_ne!(on_thread(f, current), outer, "another thread has its own");
    });
}

fn naming_a_held_stream_does_not_wait<D: Device>(f: &dyn Fixture<D>) {
    let (bound, stream) = (f.device().bind_current().unwrap(), f.stream());
    let memory = bound.allocate(64).unwrap();
    f.hold(stream);
    f.queue_fill(stream, memory.region(), 1);
    // Would hang, and be named by the watchdog.
    assert_eq!(f.device().with_stream(stream, || bound.current_stream()), stream);
    f.release(stream);
    bound.sync_stream(stream, patient()).unwrap();
}

fn sync_of_an_idle_stream_returns_at_once<D: Device>(f: &dyn Fixture<D>) {
    let bound = f.device().bind_current().unwrap();
    bound.sync_stream(f.stream(), Deadline::passed()).unwrap();
    bound.sync_stream(bound.current_stream(), Deadline::passed()).unwrap();
}

fn sync_waits_for_queued_work<D: Device>(f: &dyn Fixture<D>) {
    let (bound, stream) = (f.device().bind_current().unwrap(), f.stream());
    let memory = bound.allocate(4096).unwrap();
    write(&bound, memory.region(), &[0x11; 4096]);
    f.hold(stream);
    f.queue_fill(stream, memory.region(), 0xab);
    assert_eq!(bound.sync_stream(stream, Deadline::passed()).unwrap_err().kind(), Kind::Timeout);
    thread::scope(|scope| {
        let (started, waiting) = std::sync::mpsc::channel();
        let waiter = scope.spawn(move || {
            f.enter();
            let bound = f.device().bind_current().unwrap();
            started.send(()).unwrap();
            bound.sync_stream(stream, patient()).unwrap();
            // Whatever else is queued, these bytes are written now.
            bound.sync_stream(stream, Deadline::passed()).unwrap();
        });
        waiting.recv().unwrap();
        assert_eq!(read(&bound, memory.region()), [0x11; 4096], "the work is held");
        assert!(!waiter.is_finished(), "it returned before the work was done");
        f.release(stream);
        waiter.join().unwrap();
    });
    assert_eq!(read(&bound, memory.region()), [0xab; 4096]);
}

fn sync_with_a_passed_deadline_never_blocks<D: Device>(f: &dyn Fixture<D>) {
    let (bound, stream) = (f.device().bind_current().unwrap(), f.stream());
    let memory = bound.allocate(64).unwrap();
    f.hold(stream);
    f.queue_fill(stream, memory.region(), 1);
    for _ in 0..100 {
        // Nobody releases the stream meanwhile: a call that blocks never comes back.
        let error = bound.sync_stream(stream, Deadline::passed()).unwrap_err();
        assert_eq!(error.kind(), Kind::Timeout);
    }
    f.release(stream);
    bound.sync_stream(stream, patient()).unwrap();
}

fn sync_of_held_work_times_out<D: Device>(f: &dyn Fixture<D>) {
    let (bound, stream) = (f.device().bind_current().unwrap(), f.stream());
    let memory = bound.allocate(64).unwrap();
    f.hold(stream);
    f.queue_fill(stream, memory.region(), 1);
    let error = bound.sync_stream(stream, Deadline::after(Duration::from_millis(20))).unwrap_err();
    assert_eq!((error.kind(), error.op()), (Kind::Timeout, "sync_stream"));
    f.release(stream);
    // Giving up has not given up the work.
    bound.sync_stream(stream, patient()).unwrap();
    assert_eq!(read(&bound, memory.region()), [1; 64]);
}

fn sync_waits_for_no_other_stream<D: Device>(f: &dyn Fixture<D>) {
    let (bound, held, free) = (f.device().bind_current().unwrap(), f.stream(), f.stream());
    let memory = bound.allocate(128).unwrap();
    let region = memory.region();
    write(&bound, region, &[0; 128]);
    f.hold(held);
    f.queue_fill(held, region.part(0, 64).unwrap(), 1);
    f.queue_fill(free, region.part(64, 64).unwrap(), 2);
    bound.sync_stream(free, patient()).unwrap();
    assert_eq!(bound.sync_stream(held, Deadline::passed()).unwrap_err().kind(), Kind::Timeout);
    assert_eq!(read(&bound, region), [[0; 64], [2; 64]].concat());
    f.release(held);
    bound.sync_stream(held, patient()).unwrap();
}

fn an_earlier_failure_surfaces_at_sync<D: Device>(f: &dyn Fixture<D>) {
    let (bound, stream) = (f.device().bind_current().unwrap(), f.stream());
    f.queue_failure(stream);
    let error = bound.sync_stream(stream, patient()).unwrap_err();
    assert_eq!(error.kind(), Kind::Driver, "{error}");
}

fn sync_works_on_any_bound_thread<D: Device>(f: &dyn Fixture<D>) {
    let (bound, stream) = (f.device().bind_current().unwrap(), f.stream());
    let memory = bound.allocate(64).unwrap();
    f.queue_fill(stream, memory.region(), 7);
    on_thread(f, || f.device().bind_current().unwrap().sync_stream(stream, patient())).unwrap();
    assert_eq!(read(&bound, memory.region()), [7; 64]);
}

fn a_stream_under_capture_is_refused_and_stays_valid<D: Device>(f: &dyn Fixture<D>) {
    let (bound, stream) = (f.device().bind_current().unwrap(), f.stream());
    for deadline in [Deadline::passed(), patient()] {
        f.begin_capture(stream);
        let error = bound.sync_stream(stream, deadline).unwrap_err();
        assert_eq!(error.kind(), Kind::StreamCapturing);
        assert!(f.end_capture(stream), "the refusal came too late: the capture is spoiled");
    }
    bound.sync_stream(stream, patient()).unwrap();
}

fn registering_under_capture_is_refused_and_the_capture_stays_valid<D: Device>(f: &dyn Fixture<D>) {
    let (bound, stream) = (f.device().bind_current().unwrap(), f.stream());
    let memory = bound.allocate(4096).unwrap();
    f.begin_capture(stream);
    let refused = f.device().with_stream(stream, || bound.register(memory.region()).map(drop));
    assert_eq!(refused.unwrap_err().kind(), Kind::StreamCapturing);
    assert!(f.end_capture(stream), "the refusal came too late: the capture is spoiled");
    bound.register(memory.region()).unwrap();
}

fn a_per_thread_stream_is_waited_for_on_its_own_thread<D: Device>(f: &dyn Fixture<D>) {
    let bound = f.device().bind_current().unwrap();
    let memory = bound.allocate(64).unwrap();
    let stream = f.per_thread_stream();
    assert!(D::is_per_thread(stream) && !D::is_per_thread(f.stream()));
    f.queue_fill(stream, memory.region(), 9);
    bound.sync_stream(stream, patient()).unwrap();
    assert_eq!(read(&bound, memory.region()), [9; 64]);
}

fn a_per_thread_stream_is_refused_on_another_thread<D: Device>(f: &dyn Fixture<D>) {
    let bound = f.device().bind_current().unwrap();
    let stream = f.per_thread_stream();
    let there = on_thread(f, || f.device().bind_current().unwrap().sync_stream(stream, patient()));
    assert_eq!(there.unwrap_err().kind(), Kind::WrongThread);
    bound.sync_stream(stream, patient()).unwrap();
}

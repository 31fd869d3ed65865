//! Streams: what is waited for, and which captures survive it.

use std::{thread, time::Duration};

use backend_ascend::{AscendAllocation, AscendDevice, AscendStream};
use hal::{Bound, Deadline, Device, DeviceExt, Kind, Memory};
use haulier_sim_ascend::Control;

use crate::common::{
    acl, alone, current, device, enter, host, pages, patient, pattern, read, stream, stream_with, write,
};

const GLOBAL: i32 = 0;

fn begin_capture(sim: &Control, stream: AscendStream) {
    acl!(sim, aclmdlRICaptureBegin(stream.raw() => usize, GLOBAL => i32));
}

/// Succeeds only where nothing has spoiled the capture.
fn end_capture(sim: &Control, stream: AscendStream) {
    let mut model = 0usize;
    acl!(sim, aclmdlRICaptureEnd(stream.raw() => usize, &mut model => *mut usize));
}

fn fill(sim: &Control, bound: &Bound<'_, AscendDevice>, stream: AscendStream) -> AscendAllocation {
    let memory = bound.allocate(4096).unwrap();
    sim.fill(stream.raw() as u64, memory.region().addr as u64, 4096, 0xab).unwrap();
    memory
}

#[test]
fn a_ready_stream_is_waited_for_and_a_question_never_blocks() {
    alone(|sim| {
        let device = device(0);
        enter(&sim, 0);
        let bound = device.bind_current().unwrap();
        let stream = stream(&sim);
        bound.sync_stream(stream, Deadline::passed()).unwrap();
        sim.hold(stream.raw() as u64).unwrap();
        let _memory = fill(&sim, &bound, stream);
        sim.clear_log().unwrap();
        let error = bound.sync_stream(stream, Deadline::passed()).unwrap_err();
        assert_eq!(error.kind(), Kind::Timeout);
        assert_eq!(sim.count("aclrtStreamQuery"), 1);
        assert_eq!(
            (sim.count("aclrtSynchronizeStream"), sim.count("aclrtSynchronizeStreamWithTimeout")),
            (0, 0)
        );
        sim.release(stream.raw() as u64).unwrap();
    });
}

#[test]
fn a_wait_has_the_limit_of_its_deadline_or_none() {
    alone(|sim| {
        let device = device(0);
        enter(&sim, 0);
        let bound = device.bind_current().unwrap();
        let stream = stream(&sim);
        let with_limit = "aclrtSynchronizeStreamWithTimeout";
        for (deadline, waits) in [(patient(), with_limit), (Deadline::NEVER, "aclrtSynchronizeStream")] {
            sim.hold(stream.raw() as u64).unwrap();
            let memory = fill(&sim, &bound, stream);
            sim.clear_log().unwrap();
            thread::scope(|scope| {
                let waiter = scope.spawn(|| device.bound(|bound| bound.sync_stream(stream, deadline)));
                sim.wait_for_calls(waits, 1);
                assert!(!waiter.is_finished());
                sim.release(stream.raw() as u64).unwrap();
                waiter.join().unwrap().unwrap();
            });
            assert_eq!(sim.count("aclrtSynchronizeStream"), u64::from(deadline == Deadline::NEVER));
            assert_eq!(read(&bound, memory.region()), [0xab; 4096]);
        }
    });
}

#[test]
fn a_deadline_is_kept_while_work_never_ends() {
    alone(|sim| {
        let device = device(0);
        enter(&sim, 0);
        let bound = device.bind_current().unwrap();
        let stream = stream(&sim);
        sim.hold(stream.raw() as u64).unwrap();
        let _memory = fill(&sim, &bound, stream);
        // Less than the millisecond that ACL takes at least, too.
        for limit in [Duration::from_micros(10), Duration::from_millis(50)] {
            let error = bound.sync_stream(stream, Deadline::after(limit)).unwrap_err();
            assert_eq!(error.kind(), Kind::Timeout, "{error}");
        }
        sim.release(stream.raw() as u64).unwrap();
    });
}

#[test]
fn an_earlier_failure_of_the_stream_is_reported() {
    alone(|sim| {
        let device = device(0);
        enter(&sim, 0);
        let bound = device.bind_current().unwrap();
        let stream = stream(&sim);
        for deadline in [Deadline::passed(), patient(), Deadline::NEVER] {
            // That the stream is done says nothing of its work.
            sim.clear_faults().unwrap();
            sim.plan_faults("aclrtSynchronizeStreamWithTimeout:1=507015").unwrap();
            sim.plan_faults("aclrtSynchronizeStream:1=507015").unwrap();
            let error = bound.sync_stream(stream, deadline).unwrap_err();
            assert_eq!((error.kind(), error.vendor_code()), (Kind::Driver, Some(507015)));
        }
    });
}

#[test]
fn the_default_stream_means_that_of_the_bound_device() {
    alone(|sim| {
        let (first, second) = (device(0), device(1));
        drop(second.buffer(1).unwrap());
        enter(&sim, 0);
        let bound = first.bind_current().unwrap();
        sim.hold(0).unwrap();
        let _memory = fill(&sim, &bound, AscendStream::DEFAULT);
        let late = bound.sync_stream(AscendStream::DEFAULT, Deadline::passed());
        assert_eq!(late.unwrap_err().kind(), Kind::Timeout);
        second.bind_current().unwrap().sync_stream(AscendStream::DEFAULT, Deadline::passed()).unwrap();
        sim.release(0).unwrap();
        bound.sync_stream(AscendStream::DEFAULT, patient()).unwrap();
    });
}

/// An application with a context of its own has its streams there.
#[test]
fn a_stream_of_another_context_is_waited_for() {
    alone(|sim| {
        let device = device(0);
        let mut own = 0usize;
        acl!(sim, aclrtCreateContext(&mut own => *mut usize, 0 => i32));
        let stream = stream(&sim);
        sim.hold(stream.raw() as u64).unwrap();
        let memory = device.buffer(4096).unwrap();
        sim.fill(stream.raw() as u64, memory.region().addr as u64, 4096, 5).unwrap();
        let bound = device.bind_current().unwrap();
        assert_eq!(bound.sync_stream(stream, Deadline::passed()).unwrap_err().kind(), Kind::Timeout);
        sim.release(stream.raw() as u64).unwrap();
        bound.sync_stream(stream, patient()).unwrap();
        assert_eq!(read(&bound, memory.region()), [5; 4096]);
        drop(bound);
        assert_eq!(current(&sim), own);
    });
}

#[test]
fn what_would_spoil_the_current_streams_capture_is_refused_before() {
    alone(|sim| {
        let device = device(0);
        enter(&sim, 0);
        let bound = device.bind_current().unwrap();
        let (bytes, memory) = (pattern(4096), bound.allocate(4096).unwrap());
        let stream = stream(&sim);
        begin_capture(&sim, stream);
        device.with_stream(stream, || {
            let refused = [
                bound.sync_stream(stream, patient()).unwrap_err(),
                bound.sync_stream(stream, Deadline::passed()).unwrap_err(),
                bound.allocate(4096).map(drop).unwrap_err(),
                bound.register(pages(4096)).map(drop).unwrap_err(),
                bound.register(memory.region()).map(drop).unwrap_err(),
                // SAFETY: nothing is copied, since the call is refused.
                unsafe { bound.copy(memory.region(), host(&bytes)) }.unwrap_err(),
            ];
            for error in refused {
                assert_eq!(error.kind(), Kind::StreamCapturing, "{error}");
            }
        });
        end_capture(&sim, stream);
        bound.sync_stream(stream, patient()).unwrap();
    });
}

#[test]
fn a_capture_on_another_thread_is_left_whole() {
    alone(|sim| {
        let device = device(0);
        enter(&sim, 0);
        let (captured, other) = (stream(&sim), stream(&sim));
        let (bytes, region) = (pattern(1 << 20), pages(8192));
        begin_capture(&sim, captured);
        thread::scope(|scope| {
            scope.spawn(|| {
                device.bound(|bound| {
                    let memory = bound.allocate(1 << 20).unwrap();
                    let registration = bound.register(region).unwrap();
                    write(bound, memory.region(), &bytes);
                    bound.sync_stream(AscendStream::DEFAULT, patient()).unwrap();
                    bound.sync_stream(other, patient()).unwrap();
                    bound.sync_stream(other, Deadline::passed()).unwrap();
                    bound.export_ipc(memory.region()).unwrap();
                    drop((registration, memory));
                    Ok(())
                })
            });
        });
        end_capture(&sim, captured);
        assert_eq!(device.failed_drops(), 0);
    });
}

/// ACL says at once that it waited for such streams.
#[test]
fn a_stream_that_is_never_waited_for_is_refused() {
    alone(|sim| {
        let device = device(0);
        enter(&sim, 0);
        let bound = device.bind_current().unwrap();
        for flags in [0x4, 0x10, 0x20] {
            let stream = stream_with(&sim, flags);
            sim.hold(stream.raw() as u64).unwrap();
            let _memory = fill(&sim, &bound, stream);
            let error = bound.sync_stream(stream, patient()).unwrap_err();
            assert_eq!(error.kind(), Kind::InvalidArgument, "{error}");
            assert!(error.to_string().contains("event"), "{error}");
            sim.release(stream.raw() as u64).unwrap();
        }
    });
}

/// As on a device that captures nothing. A question that fails otherwise is no answer.
#[test]
fn a_device_without_captures_is_waited_for() {
    alone(|sim| {
        let device = device(0);
        enter(&sim, 0);
        let bound = device.bind_current().unwrap();
        let stream = stream(&sim);
        for code in [207000, 200001, 200006] {
            sim.plan_faults(&format!("aclmdlRICaptureGetInfo:1={code}")).unwrap();
            bound.sync_stream(stream, patient()).unwrap();
        }
        sim.plan_faults("aclmdlRICaptureGetInfo:1=507899").unwrap();
        assert_eq!(bound.sync_stream(stream, patient()).unwrap_err().vendor_code(), Some(507899));
    });
}

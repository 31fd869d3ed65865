//! Streams: what is waited for, and which captures survive it.

use std::{thread, time::Duration};

use backend_cuda::{CudaDevice, CudaStream};
use hal::{Bound, Deadline, Device, DeviceExt, Kind, Memory};
use haulier_sim_cuda::Control;

use crate::common::{alone, cu, device, host, patient, pattern, read, stream, write};

const GLOBAL: i32 = 0;

fn named(raw: usize) -> CudaStream {
    // SAFETY: no test destroys a stream.
    unsafe { CudaStream::from_raw(raw) }
}

fn begin_capture(sim: &Control, raw: usize) {
    cu!(sim, cuStreamBeginCapture_v2(raw => usize, GLOBAL => i32));
}

/// Succeeds only where nothing has spoiled the capture.
fn end_capture(sim: &Control, raw: usize) {
    let mut graph = 0usize;
    cu!(sim, cuStreamEndCapture(raw => usize, &mut graph => *mut usize));
}

fn fill(sim: &Control, bound: &Bound<'_, CudaDevice>, raw: usize) -> backend_cuda::CudaAllocation {
    let memory = bound.allocate(4096).unwrap();
    sim.fill(raw as u64, memory.device_ptr(), 4096, 0xab).unwrap();
    memory
}

#[test]
fn a_ready_stream_costs_one_question() {
    alone(|sim| {
        let device = device(0);
        let bound = device.bind_current().unwrap();
        let stream = named(stream(&sim));
        sim.clear_log().unwrap();
        bound.sync_stream(stream, patient()).unwrap();
        let calls: Vec<_> = sim.log().into_iter().map(|call| call.function).collect();
        let exchange = "cuThreadExchangeStreamCaptureMode";
        assert_eq!(calls, [exchange, "cuStreamIsCapturing", "cuStreamQuery", exchange]);
    });
}

#[test]
fn waiting_without_a_limit_is_the_drivers_and_with_one_is_polled() {
    alone(|sim| {
        let device = device(0);
        let bound = device.bind_current().unwrap();
        let raw = stream(&sim);
        for (deadline, waits) in [(patient(), "cuEventQuery"), (Deadline::NEVER, "cuStreamSynchronize")] {
            sim.hold(raw as u64).unwrap();
            let memory = fill(&sim, &bound, raw);
            sim.clear_log().unwrap();
            thread::scope(|scope| {
                let waiter = scope.spawn(|| device.bind_current().unwrap().sync_stream(named(raw), deadline));
                sim.wait_for_calls(waits, 1);
                assert!(!waiter.is_finished());
                sim.release(raw as u64).unwrap();
                waiter.join().unwrap().unwrap();
            });
            assert_eq!(sim.count("cuStreamSynchronize"), u64::from(deadline == Deadline::NEVER));
            assert_eq!(sim.count("cuEventCreate"), sim.count("cuEventDestroy_v2"));
            assert_eq!(read(&bound, memory.region()), [0xab; 4096]);
        }
        assert_eq!(sim.count("cuCtxSynchronize"), 0);
    });
}

#[test]
fn a_stream_that_is_kept_busy_is_waited_for_up_to_the_call() {
    alone(|sim| {
        let device = device(0);
        let bound = device.bind_current().unwrap();
        let raw = stream(&sim);
        sim.hold(raw as u64).unwrap();
        let _before = fill(&sim, &bound, raw);
        sim.clear_log().unwrap();
        thread::scope(|scope| {
            let waiter = scope.spawn(|| device.bind_current().unwrap().sync_stream(named(raw), patient()));
            sim.wait_for_calls("cuEventQuery", 1);
            let queued = sim.pending(raw as u64).unwrap();
            let _after = fill(&sim, &bound, raw);
            sim.release_some(raw as u64, queued).unwrap();
            waiter.join().unwrap().unwrap();
            assert!(sim.pending(raw as u64).unwrap() > 0, "the later work was waited for");
            sim.release(raw as u64).unwrap();
        });
    });
}

#[test]
fn a_deadline_is_kept_while_work_never_ends() {
    alone(|sim| {
        let device = device(0);
        let bound = device.bind_current().unwrap();
        let raw = stream(&sim);
        sim.hold(raw as u64).unwrap();
        let _memory = fill(&sim, &bound, raw);
        let limit = Duration::from_millis(50);
        let error = bound.sync_stream(named(raw), Deadline::after(limit)).unwrap_err();
        assert_eq!(error.kind(), Kind::Timeout);
        assert_eq!(sim.count("cuStreamSynchronize"), 0);
        sim.release(raw as u64).unwrap();
    });
}

#[test]
fn the_default_streams_mean_those_of_the_bound_device() {
    alone(|sim| {
        let (first, second) = (device(0), device(1));
        let bound = first.bind_current().unwrap();
        sim.hold(0).unwrap();
        let _memory = fill(&sim, &bound, 0);
        for stream in [CudaStream::DEFAULT, CudaStream::LEGACY] {
            assert_eq!(bound.sync_stream(stream, Deadline::passed()).unwrap_err().kind(), Kind::Timeout);
            second.bind_current().unwrap().sync_stream(stream, Deadline::passed()).unwrap();
        }
        sim.release(0).unwrap();
        bound.sync_stream(CudaStream::DEFAULT, patient()).unwrap();
    });
}

#[test]
fn the_per_thread_stream_belongs_to_the_thread_that_named_it() {
    alone(|sim| {
        let device = device(0);
        let bound = device.bind_current().unwrap();
        let here = CudaStream::per_thread();
        assert_eq!(here, named(2));
        thread::scope(|scope| {
            scope.spawn(|| {
                assert_ne!(CudaStream::per_thread(), here);
                let bound = device.bind_current().unwrap();
                sim.clear_log().unwrap();
                assert_eq!(bound.sync_stream(here, patient()).unwrap_err().kind(), Kind::WrongThread);
                assert_eq!(sim.count("cuStreamQuery"), 0, "it would have asked its own, idle stream");
            });
        });
        bound.sync_stream(here, patient()).unwrap();
    });
}

#[test]
fn what_would_spoil_the_current_streams_capture_is_refused_before() {
    alone(|sim| {
        let device = device(0);
        let bound = device.bind_current().unwrap();
        let (bytes, memory) = (pattern(4096), bound.allocate(4096).unwrap());
        let raw = stream(&sim);
        begin_capture(&sim, raw);
        device.with_stream(named(raw), || {
            let refused = [
                bound.sync_stream(named(raw), patient()).unwrap_err(),
                bound.allocate(4096).map(drop).unwrap_err(),
                bound.register(host(&bytes)).map(drop).unwrap_err(),
                bound.register(memory.region()).map(drop).unwrap_err(),
                // SAFETY: nothing is copied, since the call is refused.
                unsafe { bound.copy(memory.region(), host(&bytes)) }.unwrap_err(),
            ];
            for error in refused {
                assert_eq!(error.kind(), Kind::StreamCapturing, "{error}");
            }
        });
        end_capture(&sim, raw);
    });
}

#[test]
fn the_legacy_stream_beside_a_capturing_blocking_stream_is_refused_and_spoils_nothing() {
    alone(|sim| {
        let device = device(0);
        let bound = device.bind_current().unwrap();
        let raw = stream(&sim);
        begin_capture(&sim, raw);
        let error = bound.sync_stream(CudaStream::DEFAULT, patient()).unwrap_err();
        assert_eq!((error.kind(), error.vendor_code()), (Kind::StreamCapturing, Some(906)));
        end_capture(&sim, raw);
    });
}

#[test]
fn a_capture_on_another_thread_is_left_whole() {
    alone(|sim| {
        let device = device(0);
        let bound = device.bind_current().unwrap();
        let mut raw = 0usize;
        // Non-blocking, so that the default stream is not concerned.
        cu!(sim, cuStreamCreate(&mut raw => *mut usize, 1 => u32));
        begin_capture(&sim, raw);
        thread::scope(|scope| {
            scope.spawn(|| {
                let bound = device.bind_current().unwrap();
                let (bytes, memory) = (pattern(1 << 20), bound.allocate(1 << 20).unwrap());
                let registration = bound.register(host(&bytes)).unwrap();
                write(&bound, memory.region(), &bytes);
                bound.sync_stream(CudaStream::DEFAULT, patient()).unwrap();
                drop((registration, memory));
            });
        });
        end_capture(&sim, raw);
        drop(bound);
        assert_eq!(device.failed_drops(), 0);
    });
}

/// While a blocking stream is captured the driver refuses even questions about the legacy stream, which nobody can
/// capture. A thread that has named no stream copies on streams of the backend's own, and is not concerned.
#[test]
fn a_blocking_streams_capture_stops_no_other_threads_copies() {
    const BLOCKING: u32 = 0;
    alone(|sim| {
        let device = device(0);
        let bound = device.bind_current().unwrap();
        let memory = bound.allocate(4096).unwrap();
        let mut raw = 0usize;
        cu!(sim, cuStreamCreate(&mut raw => *mut usize, BLOCKING => u32));
        begin_capture(&sim, raw);
        thread::scope(|scope| {
            scope.spawn(|| {
                let bound = device.bind_current().unwrap();
                write(&bound, memory.region(), &pattern(4096));
                assert!(read(&bound, memory.region()) == pattern(4096));
                let other = bound.allocate(64).unwrap();
                drop(bound.register(other.region()).unwrap());
            });
        });
        end_capture(&sim, raw);
    });
}

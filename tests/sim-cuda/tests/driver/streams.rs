//! Streams: held work, default streams, who orders with whom.

use std::{
    ffi::c_void,
    sync::atomic::{AtomicBool, AtomicI32, Ordering},
    thread,
    time::Duration,
};

driver_tests! {
    fn held_work_is_pending_until_the_test_lets_it_go[](d) {
        d.on(0);
        let (stream, pointer, event) = (d.stream(1), d.allocate(4096), d.event());
        d.control.hold(stream).unwrap();
        d.control.fill(stream, pointer, 4096, 0xab).unwrap();
        ok!(d, cuEventRecord(event, stream));
        assert_eq!(cu!(d, cuStreamQuery(stream)), 600);
        assert_eq!(cu!(d, cuEventQuery(event)), 600);
        assert_eq!((d.control.pending(stream), d.control.is_event_pending(event)), (Ok(1), Ok(true)));
        assert_eq!(d.control.peek(pointer, 4096), Ok(vec![0; 4096]));
        // Another stream that waits for the event is pending too, though nobody holds it.
        let after = d.stream(1);
        ok!(d, cuStreamWaitEvent(after, event, 0u32));
        assert_eq!(cu!(d, cuStreamQuery(after)), 600);

        let done = AtomicBool::new(false);
        let context = d.on(0);
        thread::scope(|s| {
            let waiter = s.spawn(|| {
                ok!(d, cuCtxSetCurrent(context));
                ok!(d, cuStreamSynchronize(after));
                done.store(true, Ordering::SeqCst);
            });
            d.control.wait_for_calls("cuStreamSynchronize", 1);
            thread::sleep(Duration::from_millis(20));
            assert!(!done.load(Ordering::SeqCst));
            assert_eq!(d.control.calls("cuStreamSynchronize")[0].status, None);
            d.control.release(stream).unwrap();
            waiter.join().unwrap();
        });
        assert_eq!((d.control.peek(pointer, 4096), cu!(d, cuEventQuery(event))), (Ok(vec![0xab; 4096]), 0));
    }

    fn the_per_thread_stream_is_the_calling_threads[](d) {
        let context = d.on(0);
        let pointer = d.allocate(64);
        d.control.hold(2).unwrap();
        d.control.fill(2, pointer, 64, 1).unwrap();
        thread::scope(|s| {
            s.spawn(|| {
                ok!(d, cuCtxSetCurrent(context));
                // Success, and nothing was waited for.
                ok!(d, cuStreamSynchronize(2u64));
            });
        });
        assert_eq!(cu!(d, cuStreamQuery(2u64)), 600);
        d.control.release(2).unwrap();
        ok!(d, cuStreamSynchronize(2u64));
    }

    fn the_legacy_stream_orders_with_blocking_streams_only[](d) {
        d.on(0);
        let (blocking, free, pointer) = (d.stream(0), d.stream(1), d.allocate(64));
        d.control.hold(free).unwrap();
        d.control.fill(free, pointer, 64, 1).unwrap();
        ok!(d, cuStreamSynchronize(0u64));

        d.control.hold(blocking).unwrap();
        d.control.fill(blocking, pointer, 64, 2).unwrap();
        assert_eq!((cu!(d, cuStreamQuery(0u64)), cu!(d, cuStreamQuery(1u64))), (600, 600));
        // Work on the legacy stream comes after, and what is queued on a blocking stream then comes after that.
        d.control.fill(0, pointer, 64, 3).unwrap();
        let other = d.stream(0);
        d.control.fill(other, pointer, 64, 4).unwrap();
        let event = d.event();
        ok!(d, cuEventRecord(event, other));
        assert_eq!(d.control.is_event_pending(event), Ok(true));
        assert_eq!(d.control.peek(pointer, 1), Ok(vec![0]));
        d.control.release(blocking).unwrap();
        ok!(d, cuStreamSynchronize(other));
        assert_eq!(d.control.peek(pointer, 1), Ok(vec![4]));
        d.control.release_all().unwrap();
    }

    fn host_functions_run_in_order_and_may_not_call_the_driver[](d) {
        static STATUS: AtomicI32 = AtomicI32::new(-1);
        extern "C" fn call(query: *mut c_void) {
            // SAFETY: the test passes the address of cuStreamQuery.
            let query: extern "C" fn(u64) -> i32 = unsafe { std::mem::transmute(query) };
            STATUS.store(query(0), Ordering::SeqCst);
        }
        d.on(0);
        let stream = d.stream(1);
        // SAFETY: only its address is taken.
        let query = unsafe { d.library().get::<extern "C" fn(u64) -> i32>("cuStreamQuery") }.unwrap();
        d.control.hold(stream).unwrap();
        ok!(d, cuLaunchHostFunc(stream, call as extern "C" fn(*mut c_void), *query as *mut c_void));
        assert_eq!(STATUS.load(Ordering::SeqCst), -1);
        d.control.release(stream).unwrap();
        ok!(d, cuStreamSynchronize(stream));
        assert_eq!(STATUS.load(Ordering::SeqCst), 800);
    }

    fn work_needs_the_streams_own_device_and_waiting_does_not[](d) {
        d.on(1);
        let pointer = d.allocate(64);
        let stream = d.stream(1);
        d.on(0);
        assert_eq!(cu!(d, cuMemsetD8Async(pointer, 1u8, 64usize, stream)), 400);
        ok!(d, cuStreamSynchronize(stream));
        let last = d.control.calls("cuStreamSynchronize").pop().unwrap();
        assert_eq!((last.device, last.owner), (Some(0), Some(1)));
        assert_eq!(cu!(d, cuStreamSynchronize(0x77u64)), 400);
        let mut device = 9i32;
        ok!(d, cuStreamGetDevice(stream, &raw mut device));
        assert_eq!(device, 1);
    }

    fn streams_can_be_held_from_their_birth[](d) {
        d.on(0);
        let before = d.stream(1);
        d.control.hold_new_streams(true).unwrap();
        let pointer = d.allocate(64);
        let held = d.stream(1);
        for stream in [before, held] {
            ok!(d, cuMemsetD8Async(pointer, 1u8, 64usize, stream));
        }
        ok!(d, cuStreamSynchronize(before));
        assert_eq!(cu!(d, cuStreamQuery(held)), 600);
        d.control.release_some(held, 1).unwrap();
        ok!(d, cuStreamSynchronize(held));
        d.control.release_all().unwrap();
    }

    fn events_measure_time_if_asked_to[](d) {
        d.on(0);
        let stream = d.stream(1);
        let [start, end] = [0u32, 0].map(|flags| {
            let mut event = 0u64;
            ok!(d, cuEventCreate(&raw mut event, flags));
            event
        });
        ok!(d, cuEventRecord(start, stream));
        ok!(d, cuStreamSynchronize(stream));
        thread::sleep(Duration::from_millis(10));
        ok!(d, cuEventRecord(end, stream));
        let mut time = 0f32;
        ok!(d, cuEventSynchronize(end));
        ok!(d, cuEventElapsedTime(&raw mut time, start, end));
        assert!(time >= 10.0, "{time}");
        assert_eq!(cu!(d, cuEventElapsedTime(&raw mut time, start, d.event())), 400);
    }
}

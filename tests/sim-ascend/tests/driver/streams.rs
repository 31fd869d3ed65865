//! Streams and events.

use std::{
    ffi::c_void,
    mem, ptr,
    sync::atomic::{AtomicI32, AtomicU32, Ordering},
    thread,
    time::Duration,
};

driver_tests! {
    fn held_work_waits_and_a_wait_with_a_timeout_ends[](d) {
        d.on(0);
        let (pointer, stream, mut state) = (d.malloc(64), d.stream(), 9i32);
        d.control.hold(stream).unwrap();
        d.control.fill(stream, pointer, 64, 7).unwrap();
        ok!(d, aclrtStreamQuery(stream, &raw mut state));
        assert_eq!((state, d.control.pending(stream)), (1, Ok(1)), "1 is not ready");
        assert_eq!(acl!(d, aclrtSynchronizeStreamWithTimeout(stream, 20i32)), 507046);
        assert_eq!(
            [0, -2].map(|milliseconds: i32| acl!(d, aclrtSynchronizeStreamWithTimeout(stream, milliseconds))),
            [107000; 2]
        );
        assert_eq!(d.control.peek(pointer, 1), Ok(vec![0]));
        d.control.release(stream).unwrap();
        ok!(d, aclrtSynchronizeStreamWithTimeout(stream, -1i32));
        ok!(d, aclrtStreamQuery(stream, &raw mut state));
        assert_eq!((state, d.control.peek(pointer, 64)), (0, Ok(vec![7; 64])), "0 is complete");
    }

    fn a_host_function_runs_in_the_streams_order_and_may_not_call_the_runtime[](d) {
        /// Sets what it is given to 1.
        extern "C" fn touch(there: *mut c_void) {
            // SAFETY: the test gives it an `AtomicU32`.
            unsafe { &*there.cast::<AtomicU32>() }.store(1, Ordering::SeqCst);
        }
        extern "C" fn count(function: *mut c_void) {
            let mut devices = 0u32;
            // SAFETY: the test gives it aclrtGetDeviceCount.
            let function = unsafe { mem::transmute::<*mut c_void, extern "C" fn(*mut u32) -> i32>(function) };
            COUNTED.store(function(&raw mut devices), Ordering::SeqCst);
        }
        static COUNTED: AtomicI32 = AtomicI32::new(-1);
        static TOUCHED: AtomicU32 = AtomicU32::new(0);
        let context = d.on(0);
        let (stream, mut model) = (d.stream(), 0u64);
        let touched = ptr::from_ref(&TOUCHED).cast_mut().cast::<c_void>();
        d.control.hold(stream).unwrap();
        ok!(d, aclrtLaunchHostFunc(stream, touch as extern "C" fn(*mut c_void), touched));
        assert_eq!((d.control.pending(stream), TOUCHED.load(Ordering::SeqCst)), (Ok(1), 0));
        d.control.release(stream).unwrap();
        ok!(d, aclrtSynchronizeStream(stream));
        assert_eq!(TOUCHED.load(Ordering::SeqCst), 1);
        // SAFETY: only looked up.
        let query = unsafe { d.control.library().get::<extern "C" fn(*mut u32) -> i32>("aclrtGetDeviceCount") }.unwrap();
        ok!(d, aclrtLaunchHostFunc(stream, count as extern "C" fn(*mut c_void), *query as *mut c_void));
        ok!(d, aclrtSynchronizeStream(stream));
        assert_eq!(COUNTED.load(Ordering::SeqCst), 507000);

        ok!(d, aclmdlRICaptureBegin(stream, 0i32));
        assert_eq!(acl!(d, aclrtLaunchHostFunc(stream, touch as extern "C" fn(*mut c_void), touched)), 107030);
        ok!(d, aclmdlRICaptureEnd(stream, &raw mut model));
        assert_eq!(acl!(d, aclrtLaunchHostFunc(stream, 0usize, touched)), 100000);
        // Its context is to be current.
        d.on(1);
        assert_eq!(acl!(d, aclrtLaunchHostFunc(stream, touch as extern "C" fn(*mut c_void), touched)), 107003);
        ok!(d, aclrtSetCurrentContext(context));
    }

    fn the_null_stream_is_the_contexts_default_stream[](d) {
        d.on(0);
        let (pointer, mut default) = (d.malloc(64), 0u64);
        ok!(d, aclrtCtxGetCurrentDefaultStream(&raw mut default));
        d.control.hold(0).unwrap();
        d.control.fill(default, pointer, 64, 7).unwrap();
        assert_eq!((d.control.pending(0), acl!(d, aclrtSynchronizeStreamWithTimeout(0u64, 5i32))), (Ok(1), 507046));
        // Another stream does not order with it.
        ok!(d, aclrtSynchronizeStream(d.stream()));
        d.on(1);
        ok!(d, aclrtSynchronizeStream(0u64));
        assert_eq!(acl!(d, aclrtSynchronizeStreamWithTimeout(default, 5i32)), 507046);
        d.control.release_all().unwrap();
        ok!(d, aclrtSynchronizeStream(default));
        assert_eq!(acl!(d, aclrtDestroyStream(default)), 107003);
        d.on(0);
        assert_eq!((acl!(d, aclrtDestroyStream(default)), acl!(d, aclrtDestroyStream(0u64))), (107000, 100000));
    }

    fn a_stream_of_another_context_can_be_waited_for_and_not_used[](d) {
        d.on(0);
        let (pointer, stream, event, mut state) = (d.malloc(64), d.stream(), d.event(1), 9i32);
        let mut own = 0u64;
        // Not even another context of the same device.
        ok!(d, aclrtCreateContext(&raw mut own, 0i32));
        ok!(d, aclrtSynchronizeStream(stream));
        ok!(d, aclrtStreamQuery(stream, &raw mut state));
        let own_stream = d.stream();
        assert_eq!(
            [
                acl!(d, aclrtMemsetAsync(pointer, 64usize, 0i32, 64usize, stream)),
                acl!(d, aclrtRecordEvent(event, stream)),
                acl!(d, aclrtRecordEvent(event, own_stream)),
                acl!(d, aclrtStreamWaitEvent(stream, event)),
                acl!(d, aclrtDestroyStream(stream)),
                acl!(d, aclrtStreamAbort(stream)),
            ],
            [107003; 6]
        );
        // With its context it goes.
        ok!(d, aclrtDestroyContext(own));
        d.on(0);
        assert_eq!(acl!(d, aclrtSynchronizeStream(own_stream)), 107017);
    }

    fn aborting_drops_the_work_and_tells_who_waits[](d) {
        let context = d.on(0);
        let (pointer, stream) = (d.malloc(64), d.stream());
        d.control.hold(stream).unwrap();
        d.control.fill(stream, pointer, 64, 7).unwrap();
        thread::scope(|s| {
            let waiter = s.spawn(|| {
                ok!(d, aclrtSetCurrentContext(context));
                acl!(d, aclrtSynchronizeStream(stream))
            });
            d.control.wait_for_calls("aclrtSynchronizeStream", 1);
            thread::sleep(Duration::from_millis(20));
            ok!(d, aclrtStreamAbort(stream));
            assert_eq!(waiter.join().unwrap(), 107023);
        });
        d.control.release(stream).unwrap();
        ok!(d, aclrtSynchronizeStream(stream));
        assert_eq!(d.control.peek(pointer, 1), Ok(vec![0]));
    }

    fn a_persistent_stream_is_not_waited_for[](d) {
        d.on(0);
        for flag in [4u32, 0x10, 0x20] {
            let (mut stream, pointer) = (0u64, d.malloc(64));
            ok!(d, aclrtCreateStreamWithConfig(&raw mut stream, 0u32, flag));
            let mut flags = 0u32;
            ok!(d, aclrtStreamGetFlags(stream, &raw mut flags));
            assert_eq!(flags, flag);
            d.control.hold(stream).unwrap();
            d.control.fill(stream, pointer, 64, 7).unwrap();
            ok!(d, aclrtSynchronizeStream(stream));
            assert_eq!(d.control.pending(stream), Ok(1));
        }
        let mut stream = 0u64;
        assert_eq!(acl!(d, aclrtCreateStreamWithConfig(&raw mut stream, 1u32, 0u32)), 107000);
        assert_eq!(acl!(d, aclrtCreateStreamWithConfig(&raw mut stream, 0u32, 0x40u32)), 107000);
    }

    fn a_destroyed_stream_loses_what_was_held[](d) {
        d.on(0);
        let (pointer, stream) = (d.malloc(64), d.stream());
        d.control.hold(stream).unwrap();
        d.control.fill(stream, pointer, 64, 7).unwrap();
        ok!(d, aclrtDestroyStreamForce(stream));
        assert_eq!((acl!(d, aclrtSynchronizeStream(stream)), d.control.peek(pointer, 1)), (107017, Ok(vec![0])));
    }

    fn an_events_status_is_numbered_the_other_way_round[](d) {
        d.on(0);
        let (stream, event, mut state) = (d.stream(), d.event(8 | 1), 9i32);
        let mut status = || {
            ok!(d, aclrtQueryEventStatus(event, &raw mut state));
            state
        };
        assert_eq!(status(), 0, "never recorded");
        d.control.hold(stream).unwrap();
        ok!(d, aclrtRecordEvent(event, stream));
        assert_eq!((status(), d.control.is_event_pending(event)), (0, Ok(true)));
        assert_eq!(acl!(d, aclrtSynchronizeEventWithTimeout(event, 20i32)), 507047);
        d.control.release(stream).unwrap();
        ok!(d, aclrtSynchronizeEvent(event));
        assert_eq!(status(), 1);
        ok!(d, aclrtResetEvent(event, stream));
        assert_eq!(status(), 0);
    }

    fn a_stream_waits_for_an_event[](d) {
        d.on(0);
        let (first, second, event, pointer) = (d.stream(), d.stream(), d.event(1), d.malloc(64));
        d.control.hold(first).unwrap();
        d.control.fill(first, pointer, 64, 1).unwrap();
        ok!(d, aclrtRecordEvent(event, first));
        ok!(d, aclrtStreamWaitEvent(second, event));
        d.control.fill(second, pointer, 64, 2).unwrap();
        assert_eq!(acl!(d, aclrtSynchronizeStreamWithTimeout(second, 20i32)), 507046);
        d.control.release(first).unwrap();
        ok!(d, aclrtSynchronizeStream(second));
        assert_eq!(d.control.peek(pointer, 1), Ok(vec![2]));
    }

    fn elapsed_time_needs_events_that_measure_it[](d) {
        d.on(0);
        let (stream, start, end, other) = (d.stream(), d.event(8), d.event(8), d.event(1));
        let mut milliseconds = -1f32;
        for event in [start, end, other] {
            ok!(d, aclrtRecordEvent(event, stream));
        }
        ok!(d, aclrtSynchronizeStream(stream));
        ok!(d, aclrtEventElapsedTime(&raw mut milliseconds, start, end));
        assert!((0.0..10_000.0).contains(&milliseconds), "{milliseconds}");
        assert_eq!(acl!(d, aclrtEventElapsedTime(&raw mut milliseconds, start, other)), 107000);
        assert_eq!(acl!(d, aclrtIpcGetEventHandle(start, (&raw mut milliseconds).cast::<u8>())), 207000);
        ok!(d, aclrtDestroyEvent(other));
        assert_eq!(acl!(d, aclrtRecordEvent(other, stream)), 107017);
    }

    fn a_device_is_done_when_its_streams_are[](d) {
        d.on(0);
        let (stream, pointer) = (d.stream(), d.malloc(64));
        d.control.fill(stream, pointer, 64, 3).unwrap();
        ok!(d, aclrtSynchronizeDevice());
        assert_eq!(d.control.peek(pointer, 1), Ok(vec![3]));
    }
}

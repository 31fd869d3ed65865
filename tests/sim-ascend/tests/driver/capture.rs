//! A capture is spoiled by whoever waits or asks.

use std::thread;

use crate::process::Driver;

/// 0 not captured, 1 captured, 2 spoiled.
fn capturing(d: &Driver, stream: u64) -> i32 {
    let (mut state, mut model) = (9i32, 0u64);
    ok!(d, aclmdlRICaptureGetInfo(stream, &raw mut state, &raw mut model));
    assert_eq!(state == 0, model == 0);
    state
}

fn end(d: &Driver, stream: u64) -> (i32, u64) {
    let mut model = 9u64;
    (acl!(d, aclmdlRICaptureEnd(stream, &raw mut model)), model)
}

driver_tests! {
    fn waiting_for_a_captured_stream_or_asking_spoils_the_capture[](d) {
        d.on(0);
        let (stream, mut state) = (d.stream(), 9i32);
        for call in 0..3 {
            ok!(d, aclmdlRICaptureBegin(stream, 1i32));
            assert_eq!(capturing(d, stream), 1);
            let status = match call {
                0 => acl!(d, aclrtSynchronizeStream(stream)),
                1 => acl!(d, aclrtStreamQuery(stream, &raw mut state)),
                _ => acl!(d, aclrtSynchronizeStreamWithTimeout(stream, 5i32)),
            };
            assert_eq!((status, capturing(d, stream)), (107027, 2));
            assert_eq!((end(d, stream), capturing(d, stream)), ((507903, 0), 0));
        }
    }

    fn what_is_captured_does_not_run[](d) {
        d.on(0);
        let (stream, pointer) = (d.stream(), d.malloc(64));
        ok!(d, aclmdlRICaptureBegin(stream, 1i32));
        ok!(d, aclrtMemsetAsync(pointer, 64usize, 7i32, 64usize, stream));
        let (status, model) = end(d, stream);
        assert_eq!((status, d.control.peek(pointer, 1)), (0, Ok(vec![0])));
        ok!(d, aclmdlRIDestroy(model));
        assert_eq!(acl!(d, aclmdlRIDestroy(model)), 107017);
        assert_eq!(end(d, stream).0, 107029);
        assert_eq!(acl!(d, aclmdlRICaptureBegin(0u64, 1i32)), 107000);
    }

    fn a_global_capture_forbids_synchronous_copies_on_every_thread[](d) {
        let context = d.on(0);
        let (stream, pointer, mut mode) = (d.stream(), d.malloc(64), 2i32);
        let zeroed = || acl!(d, aclrtMemset(pointer, 64usize, 0i32, 64usize));
        ok!(d, aclmdlRICaptureBegin(stream, 0i32));
        thread::scope(|s| {
            s.spawn(|| {
                ok!(d, aclrtSetCurrentContext(context));
                // A thread that asked to be left alone is.
                ok!(d, aclmdlRICaptureThreadExchangeMode(&raw mut mode));
                assert_eq!((mode, zeroed(), capturing(d, stream)), (0, 0, 1));
                ok!(d, aclmdlRICaptureThreadExchangeMode(&raw mut mode));
                assert_eq!((mode, zeroed(), capturing(d, stream)), (2, 107030, 2));
            });
        });
        assert_eq!(end(d, stream).0, 507903);
        assert_eq!(zeroed(), 0);
    }

    fn a_capture_of_the_threads_own_forbids_others_nothing[](d) {
        let context = d.on(0);
        let (stream, pointer) = (d.stream(), d.malloc(64));
        ok!(d, aclmdlRICaptureBegin(stream, 1i32));
        thread::scope(|s| {
            s.spawn(|| {
                ok!(d, aclrtSetCurrentContext(context));
                ok!(d, aclrtMemset(pointer, 64usize, 0i32, 64usize));
                ok!(d, aclrtFree(d.malloc(64)));
            });
        });
        assert_eq!(capturing(d, stream), 1);
        let mut more = 0u64;
        assert_eq!((acl!(d, aclrtMalloc(&raw mut more, 64usize, 0i32)), capturing(d, stream)), (107030, 2));
    }
}

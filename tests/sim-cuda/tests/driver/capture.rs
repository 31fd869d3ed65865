//! Capture, and what spoils it.

use std::thread;

const GLOBAL: u32 = 0;
const THREAD_LOCAL: u32 = 1;
const RELAXED: u32 = 2;

driver_tests! {
    fn waiting_for_a_captured_stream_spoils_the_capture[](d) {
        d.on(0);
        let stream = d.stream(1);
        let mut graph = 9u64;
        ok!(d, cuStreamBeginCapture_v2(stream, THREAD_LOCAL));
        assert_eq!(d.capturing(stream), 1);
        assert_eq!(cu!(d, cuStreamSynchronize(stream)), 900);
        assert_eq!(d.capturing(stream), 2);
        assert_eq!(cu!(d, cuStreamQuery(stream)), 901);
        assert_eq!((cu!(d, cuStreamEndCapture(stream, &raw mut graph)), graph), (901, 0));
        assert_eq!(d.capturing(stream), 0);
    }

    fn captured_work_is_recorded_and_does_not_run[](d) {
        d.on(0);
        let (stream, pointer) = (d.stream(1), d.allocate(64));
        ok!(d, cuStreamBeginCapture_v2(stream, RELAXED));
        ok!(d, cuMemsetD8Async(pointer, 7u8, 64usize, stream));
        let (mut graph, mut nodes) = (0u64, 0usize);
        ok!(d, cuStreamEndCapture(stream, &raw mut graph));
        ok!(d, cuGraphGetNodes(graph, std::ptr::null_mut::<u64>(), &raw mut nodes));
        assert_eq!((nodes, d.control.peek(pointer, 1)), (1, Ok(vec![0])));
        ok!(d, cuGraphDestroy(graph));
    }

    fn a_global_capture_is_spoiled_by_any_thread_that_is_not_relaxed[](d) {
        let context = d.on(0);
        let page = vec![0u8; 8192];
        let stream = d.stream(1);
        for relaxed in [true, false] {
            ok!(d, cuStreamBeginCapture_v2(stream, GLOBAL));
            thread::scope(|s| {
                s.spawn(|| {
                    ok!(d, cuCtxSetCurrent(context));
                    let mut mode = RELAXED;
                    if relaxed {
                        ok!(d, cuThreadExchangeStreamCaptureMode(&raw mut mode));
                        assert_eq!(mode, GLOBAL);
                    }
                    let expected = if relaxed { 0 } else { 900 };
                    let at = page.as_ptr() as u64;
                    assert_eq!(cu!(d, cuMemHostRegister_v2(at, 4096usize, 1u32)), expected);
                    if relaxed {
                        ok!(d, cuMemHostUnregister(at));
                        ok!(d, cuThreadExchangeStreamCaptureMode(&raw mut mode));
                        assert_eq!(mode, RELAXED);
                    }
                });
            });
            let mut graph = 0u64;
            let expected = if relaxed { 0 } else { 901 };
            assert_eq!(cu!(d, cuStreamEndCapture(stream, &raw mut graph)), expected);
        }
    }

    fn the_legacy_stream_is_refused_while_a_blocking_stream_is_captured[](d) {
        d.on(0);
        let (stream, pointer) = (d.stream(0), d.allocate(64));
        ok!(d, cuStreamBeginCapture_v2(stream, RELAXED));
        let mut state = 0u32;
        assert_eq!(cu!(d, cuStreamIsCapturing(0u64, &raw mut state)), 906);
        assert_eq!(d.capturing(stream), 1);
        assert_eq!(cu!(d, cuMemsetD8Async(pointer, 1u8, 64usize, 1u64)), 906);
        assert_eq!(d.capturing(stream), 2);
        let mut graph = 0u64;
        assert_eq!(cu!(d, cuStreamEndCapture(stream, &raw mut graph)), 901);
        assert_eq!(cu!(d, cuStreamBeginCapture_v2(0u64, RELAXED)), 900);
    }

    fn events_draw_streams_into_a_capture_and_keep_others_out[](d) {
        d.on(0);
        let [origin, joined] = [d.stream(1), d.stream(1)];
        let [inside, outside] = [d.event(), d.event()];
        ok!(d, cuEventRecord(outside, joined));
        ok!(d, cuStreamBeginCapture_v2(origin, RELAXED));
        ok!(d, cuEventRecord(inside, origin));
        ok!(d, cuStreamWaitEvent(joined, inside, 0u32));
        assert_eq!(d.capturing(joined), 1);
        assert_eq!(cu!(d, cuEventSynchronize(inside)), 907);
        let mut graph = 0u64;
        assert_eq!(cu!(d, cuStreamEndCapture(joined, &raw mut graph)), 401);
        ok!(d, cuStreamEndCapture(origin, &raw mut graph));
        assert_eq!(d.capturing(joined), 0);

        ok!(d, cuStreamBeginCapture_v2(origin, RELAXED));
        assert_eq!(cu!(d, cuStreamWaitEvent(origin, outside, 0u32)), 905);
        assert_eq!(d.capturing(origin), 2);
    }

    fn a_capture_ends_on_the_thread_that_began_it[](d) {
        let context = d.on(0);
        let stream = d.stream(1);
        ok!(d, cuStreamBeginCapture_v2(stream, GLOBAL));
        let mut graph = 0u64;
        thread::scope(|s| {
            s.spawn(|| {
                ok!(d, cuCtxSetCurrent(context));
                assert_eq!(cu!(d, cuStreamEndCapture(stream, &raw mut graph)), 908);
            });
        });
        ok!(d, cuStreamEndCapture(stream, &raw mut graph));
    }
}

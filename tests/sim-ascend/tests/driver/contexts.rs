//! A thread has one context or none: its own, or a device's primary one that is counted call by call.

use std::thread;

/// What a call answers on a thread that never had a context.
fn bare<T: Send>(call: impl FnOnce() -> T + Send) -> T {
    thread::scope(|s| s.spawn(call).join().unwrap())
}

driver_tests! {
    fn a_new_thread_has_no_context_in_9[](d) {
        d.on(1);
        bare(|| {
            assert_eq!((d.current(), d.device()), ((107002, 7), (107002, 7)));
            let mut pointer = 0u64;
            assert_eq!(acl!(d, aclrtMalloc(&raw mut pointer, 64usize, 0i32)), 107002);
            assert_eq!(d.current().0, 107002, "nothing is bound");
        });
        let last = d.control.calls("aclrtMalloc").pop().unwrap();
        assert_eq!((last.device, last.status), (None, Some(107002)));
        assert_ne!(last.thread, d.control.calls("aclrtSetDevice")[0].thread);
    }

    fn a_new_thread_has_no_context_in_8_and_asking_succeeds[HAULIER_SIM_CANN = "8.5.0"](d) {
        d.on(1);
        bare(|| assert_eq!((d.current(), d.device().0), ((0, 0), 107002)));
    }

    fn what_needs_a_context_is_refused_without_one_and_the_rest_is_not[](d) {
        let context = d.on(0);
        let (pointer, stream) = (d.malloc(64), d.stream());
        let mut host = vec![0u8; 8192];
        let page = host.as_mut_ptr().addr().next_multiple_of(4096) as u64;
        let (at, mut out, mut number) = (host.as_mut_ptr() as u64, 0u64, 0i32);
        let (mut free, mut total) = (0usize, 0usize);
        bare(|| {
            let mut key = [0u8; 65];
            assert_eq!(
                [
                    acl!(d, aclrtMallocHost(&raw mut out, 64usize)),
                    acl!(d, aclrtHostRegister(page, 4096u64, 0i32, &raw mut out)),
                    acl!(d, aclrtHostUnregister(page)),
                    acl!(d, aclrtMemcpy(at, 64usize, pointer, 64usize, 2i32)),
                    acl!(d, aclrtMemcpyAsync(at, 64usize, pointer, 64usize, 2i32, stream)),
                    acl!(d, aclrtMemset(pointer, 64usize, 0i32, 64usize)),
                    acl!(d, aclrtCreateStream(&raw mut out)),
                    acl!(d, aclrtSynchronizeStream(stream)),
                    acl!(d, aclrtStreamQuery(stream, &raw mut number)),
                    acl!(d, aclrtSynchronizeDevice()),
                    acl!(d, aclrtGetMemInfo(1i32, &raw mut free, &raw mut total)),
                    acl!(d, aclrtIpcMemGetExportKey(pointer, 64usize, key.as_mut_ptr(), 65usize, 1u64)),
                    acl!(d, aclrtIpcMemImportByKey(&raw mut out, c"00".as_ptr(), 1u64)),
                    acl!(d, aclrtIpcMemClose(c"00".as_ptr())),
                ],
                [107002; 14]
            );
            let mut count = 0u32;
            ok!(d, aclrtGetDeviceCount(&raw mut count));
            ok!(d, aclrtGetPhyDevIdByLogicDevId(1i32, &raw mut number));
            assert_eq!((count, number), (2, 1));
            assert_eq!(d.pointer(pointer).map(|known| known.kind), Ok(1));
            ok!(d, aclrtFree(pointer));
            // A thread can be given a context, and then another one, but none cannot be given.
            ok!(d, aclrtSetCurrentContext(context));
            assert_eq!(acl!(d, aclrtSetCurrentContext(0u64)), 100000);
            assert_eq!(d.current(), (0, context));
        });
    }

    fn setting_a_device_shares_its_one_primary_context_and_counts_each_call[](d) {
        let primary = d.on(1);
        assert_eq!((d.on(1), bare(|| d.on(1)), d.control.retained(1)), (primary, primary, Ok(3)));
        assert_ne!(d.on(0), primary);
        let mut active = 9i32;
        let nothing = std::ptr::null_mut::<u32>();
        ok!(d, aclrtGetPrimaryCtxState(1i32, nothing, &raw mut active));
        assert_eq!((active, d.control.retained(1)), (1, Ok(3)));
        assert_eq!(acl!(d, aclrtGetPrimaryCtxState(1i32, (&raw mut active).cast::<u32>(), &raw mut active)), 100000);
        for _ in 0..3 {
            ok!(d, aclrtResetDevice(1i32));
        }
        assert_eq!(acl!(d, aclrtResetDevice(1i32)), 507007);
        ok!(d, aclrtGetPrimaryCtxState(1i32, nothing, &raw mut active));
        assert_eq!((active, acl!(d, aclrtSetCurrentContext(primary)), acl!(d, aclrtSetDevice(2i32))), (0, 107002, 107001));
    }

    fn the_last_reset_takes_the_memory_and_the_context_of_others_away[](d) {
        let primary = d.on(0);
        let (pointer, stream) = (d.malloc(4096), d.stream());
        bare(|| {
            ok!(d, aclrtSetCurrentContext(primary));
            thread::scope(|s| s.spawn(|| ok!(d, aclrtResetDevice(0i32))).join().unwrap());
            assert_eq!((d.current().0, acl!(d, aclrtSynchronizeStream(stream))), (107002, 107002));
        });
        assert_eq!((d.current().0, d.control.live_allocations()), (107002, Ok(0)));
        d.on(0);
        assert_eq!((acl!(d, aclrtFree(pointer)), acl!(d, aclrtSynchronizeStream(stream))), (107000, 107017));
    }

    fn a_thread_that_resets_its_device_is_left_without_it[](d) {
        d.on(0);
        d.on(0);
        ok!(d, aclrtResetDevice(0i32));
        assert_eq!((d.current().0, d.control.retained(0)), (107002, Ok(1)));
    }

    fn the_two_slots_of_a_thread_empty_each_other[](d) {
        let primary = d.on(0);
        let mut own = 0u64;
        ok!(d, aclrtCreateContext(&raw mut own, 1i32));
        assert_eq!((d.current(), d.device()), ((0, own), (0, 1)));
        assert_eq!(d.on(0), primary);
        ok!(d, aclrtSetCurrentContext(own));
        assert_eq!(d.current(), (0, own));
        // A context of one's own is counted nowhere, and has a default stream of its own.
        let mut streams = [0u64; 2];
        ok!(d, aclrtCtxGetCurrentDefaultStream(&raw mut streams[0]));
        assert_eq!(d.control.retained(1), Ok(0));
        ok!(d, aclrtDestroyContext(own));
        assert_eq!((d.current().0, acl!(d, aclrtSetCurrentContext(own))), (107002, 107002));
        ok!(d, aclrtSetCurrentContext(primary));
        ok!(d, aclrtCtxGetCurrentDefaultStream(&raw mut streams[1]));
        assert_ne!(streams[0], streams[1]);
        assert_eq!(acl!(d, aclrtDestroyContext(primary)), 107002);
        assert_eq!((acl!(d, aclrtSetCurrentContext(0x1234u64)), acl!(d, aclrtCreateContext(&raw mut own, 2i32))), (107002, 107001));
    }

    fn null_results_are_100000[](d) {
        d.on(0);
        let nothing = std::ptr::null_mut::<u64>();
        assert_eq!(
            [
                acl!(d, aclrtGetCurrentContext(nothing)),
                acl!(d, aclrtGetDevice(nothing)),
                acl!(d, aclrtMalloc(nothing, 64usize, 0i32)),
                acl!(d, aclrtCreateStream(nothing)),
                acl!(d, aclrtPointerGetAttributes(d.malloc(64), nothing)),
                acl!(d, aclrtGetDeviceCount(nothing)),
            ],
            [100000; 6]
        );
    }
}

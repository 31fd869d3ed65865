//! Contexts are the thread's, primary contexts are counted.

use std::thread;

use crate::process::told;

driver_tests! {
    fn nothing_works_before_init_but_the_version_and_the_names[](d) {
        let (mut count, mut version) = (7i32, 0i32);
        assert_eq!(cu!(d, cuDeviceGetCount(&raw mut count)), 3);
        ok!(d, cuDriverGetVersion(&raw mut version));
        assert_eq!((version, count), (12080, 7));
        ok!(d, cuInit(0u32));
        ok!(d, cuDeviceGetCount(&raw mut count));
        assert_eq!(count, 2);
        assert!(d.control.version().starts_with("haulier-sim-cuda"));
    }

    fn a_new_thread_has_no_context_and_gets_201[](d) {
        let context = d.on(1);
        thread::scope(|s| {
            s.spawn(|| {
                let (mut current, mut pointer) = (7u64, 0u64);
                ok!(d, cuCtxGetCurrent(&raw mut current));
                assert_eq!(current, 0);
                assert_eq!(cu!(d, cuMemAlloc_v2(&raw mut pointer, 64usize)), 201);
                assert_eq!(cu!(d, cuStreamSynchronize(0u64)), 201);
                assert_eq!(cu!(d, cuCtxPopCurrent_v2(&raw mut current)), 201);
                ok!(d, cuCtxSetCurrent(context));
                let mut device = 9i32;
                ok!(d, cuCtxGetDevice(&raw mut device));
                assert_eq!(device, 1);
            });
        });
        let last = d.control.calls("cuMemAlloc_v2").pop().unwrap();
        assert_eq!((last.device, last.status), (None, Some(201)));
        assert_ne!(last.thread, d.control.calls("cuInit")[0].thread);
    }

    fn push_and_pop_restore_what_was_current[](d) {
        let zero = d.on(0);
        let mut one = 0u64;
        ok!(d, cuDevicePrimaryCtxRetain(&raw mut one, 1i32));
        ok!(d, cuCtxPushCurrent_v2(one));
        let pointer = d.allocate(64);
        let mut popped = 0u64;
        ok!(d, cuCtxPopCurrent_v2(&raw mut popped));
        assert_eq!(popped, one);
        let mut current = 0u64;
        ok!(d, cuCtxGetCurrent(&raw mut current));
        assert_eq!(current, zero);
        assert_eq!(d.attributes([9], pointer), Ok([1]));
        // Setting nothing pops, too.
        ok!(d, cuCtxSetCurrent(0u64));
        ok!(d, cuCtxGetCurrent(&raw mut current));
        assert_eq!(current, 0);
        assert_eq!(cu!(d, cuCtxSetCurrent(0x1234u64)), 201);
    }

    fn asking_for_a_primary_contexts_state_makes_none[](d) {
        ok!(d, cuInit(0u32));
        let (mut flags, mut active) = (9u32, 9i32);
        ok!(d, cuDevicePrimaryCtxGetState(0i32, &raw mut flags, &raw mut active));
        assert_eq!((active, d.control.retained(0)), (0, Ok(0)));
        let context = d.on(0);
        let mut again = 0u64;
        ok!(d, cuDevicePrimaryCtxRetain(&raw mut again, 0i32));
        assert_eq!((again, d.control.retained(0)), (context, Ok(2)));
        ok!(d, cuDevicePrimaryCtxRelease_v2(0i32));
        let pointer = d.allocate(64);
        ok!(d, cuDevicePrimaryCtxRelease_v2(0i32));
        // The last release takes everything along, whoever still uses it.
        assert_eq!(cu!(d, cuMemFree_v2(pointer)), 709);
        ok!(d, cuDevicePrimaryCtxGetState(0i32, &raw mut flags, &raw mut active));
        assert_eq!((active, d.control.live_allocations()), (0, Ok(0)));
        assert_ne!(cu!(d, cuDevicePrimaryCtxRelease_v2(0i32)), 0);
    }

    fn a_stream_belongs_to_the_context_that_it_was_made_in[](d) {
        let primary = d.on(0);
        let stream = d.stream(1);
        let mut owner = 0u64;
        let mut own = 0u64;
        ok!(d, cuCtxCreate_v2(&raw mut own, 0u32, 0i32));
        ok!(d, cuStreamGetCtx(stream, &raw mut owner));
        assert_eq!(owner, primary);
        for default in 0..3u64 {
            ok!(d, cuStreamGetCtx(default, &raw mut owner));
            assert_eq!(owner, own);
        }
        assert_eq!(cu!(d, cuStreamWaitEvent(stream, d.event(), 0u32)), 400);
        ok!(d, cuStreamSynchronize(stream));
        ok!(d, cuCtxDestroy_v2(own));
        let mut current = 0u64;
        ok!(d, cuCtxGetCurrent(&raw mut current));
        assert_eq!(current, primary);
        assert_eq!(cu!(d, cuCtxPushCurrent_v2(own)), 709);
    }

    fn devices_are_remapped_and_keep_their_uuids
        [HAULIER_SIM_DEVICES = "4", HAULIER_SIM_SEED = "9", CUDA_VISIBLE_DEVICES = "2,0"](d) {
        ok!(d, cuInit(0u32));
        let mut count = 0i32;
        ok!(d, cuDeviceGetCount(&raw mut count));
        assert_eq!(count, 2);
        let name = |device: i32| {
            let (mut uuid, mut name) = ([0u8; 16], [0u8; 64]);
            ok!(d, cuDeviceGetUuid_v2(uuid.as_mut_ptr(), device));
            ok!(d, cuDeviceGetName(name.as_mut_ptr(), 64i32, device));
            (uuid, String::from_utf8_lossy(&name).trim_end_matches('\0').to_owned())
        };
        if let Some(there) = told() {
            assert_eq!(there, format!("{:?}", name(1).0));
            return;
        }
        let (uuid, text) = name(0);
        assert!(text.ends_with("device 2") && text.contains("simulated"), "{text}");
        assert_ne!(uuid, name(1).0);
        let mut device = 0i32;
        assert_eq!(cu!(d, cuDeviceGet(&raw mut device, 2i32)), 101);
        d.peer(&format!("{uuid:?}"), &[("CUDA_VISIBLE_DEVICES", "1,2")]);
    }
}

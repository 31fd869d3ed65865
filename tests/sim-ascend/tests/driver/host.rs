//! Pinned host memory: allocated, or registered.

driver_tests! {
    fn registration_has_its_rules[](d) {
        d.on(0);
        let heap = vec![0u8; 32768];
        let page = heap.as_ptr().addr().next_multiple_of(4096) as u64;
        let mut device = 0u64;
        let mut register = |at: u64, bytes: u64, kind: i32| {
            acl!(d, aclrtHostRegister(at, bytes, kind, &raw mut device))
        };
        assert_eq!(register(page, 8192, 0), 0);
        assert_eq!([register(page, 8192, 0), register(page + 4096, 8192, 0)], [507910; 2]);
        assert_eq!([register(page + 64, 64, 0), register(page, 0, 0), register(page + 8192, 64, 1)], [107000; 3]);
        assert_eq!([register(0, 64, 0), register(page + 8192, 64, 4)], [100000, 207000]);
        assert_eq!([register(0x1000, 4096, 0), register(d.malloc(4096), 4096, 0)], [107000; 2]);
        assert_eq!(register(d.malloc_host(4096) as u64, 4096, 0), 507910);
        assert_eq!(d.control.registrations(), Ok(2));
        // The mapped address goes with the registration.
        let mut inside = 0u64;
        ok!(d, aclrtHostGetDevicePointer(page + 100, &raw mut inside, 0u32));
        assert_eq!(acl!(d, aclrtHostUnregister(page + 4096)), 507911);
        ok!(d, aclrtHostUnregister(page));
        assert_eq!(acl!(d, aclrtHostUnregister(page)), 507911);
        assert_eq!(acl!(d, aclrtHostGetDevicePointer(page + 100, &raw mut inside, 0u32)), 107000);
    }

    fn the_second_form_takes_flags[](d) {
        d.on(0);
        let heap = vec![0u8; 16384];
        let page = heap.as_ptr().addr().next_multiple_of(4096) as u64;
        let register = |flags: u32| acl!(d, aclrtHostRegisterV2(page, 4096u64, flags));
        assert_eq!([register(0), register(1), register(4), register(0x1000_0000), register(2)],
            [107000, 107000, 207000, 0, 507910]);
        let mut device = 0u64;
        assert_eq!(acl!(d, aclrtHostGetDevicePointer(page, &raw mut device, 0u32)), 107000, "not mapped");
        d.on(1);
        assert_eq!(acl!(d, aclrtHostUnregister(page)), 107003, "another device registered it");
        d.on(0);
        ok!(d, aclrtHostUnregister(page));
    }

    fn old_kernels_register_only_what_is_pinned[HAULIER_SIM_REGISTER_PINNED_ONLY = "1"](d) {
        d.on(0);
        let heap = vec![0u8; 16384];
        let page = heap.as_ptr().addr().next_multiple_of(4096) as u64;
        assert_eq!(acl!(d, aclrtHostRegisterV2(page, 4096u64, 2u32)), 207000);
        assert_eq!(acl!(d, aclrtHostRegisterV2(d.malloc_host(8192) as u64, 4096u64, 2u32)), 0);
    }

    fn allocated_memory_is_the_hosts_and_needs_no_context_to_be_freed[](d) {
        d.on(0);
        let (small, large) = (d.malloc_host(64), d.malloc_host(8192));
        assert_eq!((small.addr() % 64, large.addr() % 4096), (0, 0));
        assert_ne!(small.addr() % 4096, 0);
        // SAFETY: the runtime's memory for the host.
        unsafe { small.write_bytes(1, 64) };
        std::thread::scope(|s| {
            let (small, large) = (small as u64, large as u64);
            s.spawn(move || {
                ok!(d, aclrtFreeHost(small));
                ok!(d, aclrtFreeHost(large));
                assert_eq!([acl!(d, aclrtFreeHost(small)), acl!(d, aclrtFreeHost(0u64))], [107000, 100000]);
            });
        });
        let mut none = 0u64;
        assert_eq!(acl!(d, aclrtMallocHost(&raw mut none, 0usize)), 100000);
    }
}

//! Device and pinned memory, copies, and what is known of an address.

use std::ptr;

use crate::process::dies;

const NUMBERS: [u32; 6] = [2, 9, 10, 7, 11, 12];

driver_tests! {
    fn bytes_go_there_and_back_by_every_copy[](d) {
        d.on(0);
        let (a, b, stream) = (d.allocate(64), d.allocate(64), d.stream(1));
        let from: Vec<u8> = (0..64).collect();
        let mut to = vec![0u8; 64];
        ok!(d, cuMemcpyHtoD_v2(a, from.as_ptr(), 64usize));
        ok!(d, cuMemcpyDtoDAsync_v2(b, a, 64usize, stream));
        ok!(d, cuMemcpyDtoHAsync_v2(to.as_mut_ptr(), b, 64usize, stream));
        ok!(d, cuStreamSynchronize(stream));
        assert_eq!(to, from);
        ok!(d, cuMemsetD32_v2(a, 0x0403_0201u32, 16usize));
        // A fill is only queued, and the stream below does not order with the one that it is on.
        ok!(d, cuStreamSynchronize(0u64));
        ok!(d, cuMemcpyAsync(to.as_ptr() as u64, a, 64usize, stream));
        ok!(d, cuStreamSynchronize(stream));
        assert_eq!(to, [1, 2, 3, 4].repeat(16));
        // Arguments of the wrong sort, and ranges that leave their allocation.
        assert_eq!(cu!(d, cuMemcpyHtoD_v2(from.as_ptr() as u64, a, 64usize)), 1);
        assert_eq!(cu!(d, cuMemcpyDtoD_v2(a, b, 65usize)), 1);
        assert_eq!(cu!(d, cuMemcpyAsync(a, 0u64, 1usize, stream)), 1);
    }

    fn pinned_memory_is_read_late_and_pageable_memory_at_once[](d) {
        d.on(0);
        let (device, stream) = (d.allocate(128), d.stream(1));
        let mut pinned = ptr::null_mut::<u8>();
        ok!(d, cuMemHostAlloc(&raw mut pinned, 64usize, 1u32));
        let mut pageable = [1u8; 64];
        d.control.hold(stream).unwrap();
        ok!(d, cuMemcpyHtoDAsync_v2(device, pinned, 64usize, stream));
        ok!(d, cuMemcpyHtoDAsync_v2(device + 64, pageable.as_ptr(), 64usize, stream));
        // SAFETY: the test's own memory; the copy is held.
        unsafe { pinned.write_bytes(9, 64) };
        pageable.fill(9);
        d.control.release(stream).unwrap();
        ok!(d, cuStreamSynchronize(stream));
        assert_eq!(d.control.peek(device, 128), Ok([[9; 64], [1; 64]].concat()));
        ok!(d, cuMemFreeHost(pinned));
    }

    fn a_freed_address_comes_back_with_another_buffer_id[](d) {
        d.on(0);
        let first = d.allocate(4096);
        let before = d.attributes(NUMBERS, first + 100).unwrap();
        assert_eq!(before, [2, 0, 1, before[3], first, 4096]);
        ok!(d, cuMemFree_v2(first));
        assert_eq!(d.attributes([2, 7], first), Ok([0, 0]));
        assert_eq!(cu!(d, cuMemFree_v2(first)), 1);
        let second = d.allocate(8192);
        let after = d.attributes(NUMBERS, second).unwrap();
        assert_eq!((second, after[5]), (first, 8192));
        assert_ne!(after[3], before[3]);
        let (mut base, mut size) = (0u64, 0usize);
        ok!(d, cuMemGetAddressRange_v2(&raw mut base, &raw mut size, second + 5000));
        assert_eq!((base, size), (second, 8192));
    }

    fn host_pointers_are_unknown_in_the_plural_and_an_error_in_the_singular[](d) {
        d.on(0);
        let heap = [0u8; 64];
        let at = heap.as_ptr() as u64;
        let ordinal = u64::from((-2i32).cast_unsigned());
        assert_eq!(d.attributes(NUMBERS, at), Ok([0, ordinal, 0, 0, 0, 0]));
        let mut kind = 9u32;
        assert_eq!(cu!(d, cuPointerGetAttribute(&raw mut kind, 2u32, at)), 1);
        let (mut base, mut size) = (0u64, 0usize);
        assert_eq!(cu!(d, cuMemGetAddressRange_v2(&raw mut base, &raw mut size, at)), 500);
        std::thread::scope(|s| {
            s.spawn(|| assert_eq!(d.attributes([2], at), Err(201)));
        });
    }

    fn registration_has_its_rules[](d) {
        d.on(0);
        let heap = vec![0u8; 16384];
        let at = heap.as_ptr() as u64;
        let register = |at: u64, len: usize| cu!(d, cuMemHostRegister_v2(at, len, 1u32));
        assert_eq!(register(at, 8192), 0);
        assert_eq!((register(at, 8192), register(at + 4096, 8192)), (712, 712));
        assert_eq!(d.attributes([2, 11, 12], at + 100), Ok([1, at, 8192]));
        assert_eq!(cu!(d, cuMemHostUnregister(at + 1)), 713);
        ok!(d, cuMemHostUnregister(at));
        assert_eq!((cu!(d, cuMemHostUnregister(at)), d.control.registrations()), (713, Ok(0)));
        assert_eq!((register(at, 0), register(d.allocate(64), 64), register(0x1000, 64)), (1, 1, 1));
    }

    fn registrations_can_have_limits_and_go_by_the_page
        [HAULIER_SIM_REGISTER_PAGES = "1", HAULIER_SIM_REGISTER_MAX = "8192"](d) {
        d.on(0);
        let heap = vec![0u8; 32768];
        let at = (heap.as_ptr() as u64).next_multiple_of(4096);
        let register = |at: u64, len: usize| cu!(d, cuMemHostRegister_v2(at, len, 1u32));
        assert_eq!((register(at, 100), register(at + 200, 100)), (0, 712));
        assert_eq!((register(at + 4096, 8193), register(at + 4096, 8192)), (1, 0));
        ok!(d, cuMemHostUnregister(at));
        assert_eq!(register(at + 200, 100), 0);
        ok!(d, cuMemHostUnregister(at + 200));
    }

    fn kinds_of_memory_say_how_they_can_be_shared[](d) {
        d.on(0);
        let stream = d.stream(1);
        let (mut managed, mut pool) = (0u64, 0u64);
        ok!(d, cuMemAllocManaged(&raw mut managed, 64usize, 1u32));
        ok!(d, cuMemAllocAsync(&raw mut pool, 64usize, stream));
        let kinds = [2, 8, 10, 14];
        assert_eq!(d.attributes(kinds, d.allocate(64)), Ok([2, 0, 1, 0]));
        assert_eq!(d.attributes(kinds, managed), Ok([2, 1, 0, 0]));
        assert_eq!(d.attributes(kinds, pool), Ok([2, 0, 0, 0]));
        assert_ne!(d.attributes([17], pool), Ok([0]));
        let mut handle = [0u8; 64];
        assert_eq!(cu!(d, cuIpcGetMemHandle(handle.as_mut_ptr(), pool)), 1);
        d.control.hold(stream).unwrap();
        ok!(d, cuMemFreeAsync(pool, stream));
        assert_eq!(d.attributes([2], pool), Ok([2]));
        d.control.release(stream).unwrap();
        ok!(d, cuStreamSynchronize(stream));
        assert_eq!(d.attributes([2], pool), Ok([0]));
    }

    fn free_memory_is_counted_and_ends[HAULIER_SIM_MEMORY = "1048576"](d) {
        d.on(0);
        let (mut free, mut total) = (0usize, 0usize);
        let pointer = d.allocate(1 << 19);
        ok!(d, cuMemGetInfo_v2(&raw mut free, &raw mut total));
        assert_eq!((free, total), (1 << 19, 1 << 20));
        let mut more = 0u64;
        assert_eq!(cu!(d, cuMemAlloc_v2(&raw mut more, (1usize << 19) + 1)), 2);
        ok!(d, cuMemFree_v2(pointer));
        assert_eq!(cu!(d, cuMemAlloc_v2(&raw mut more, 0usize)), 1);
    }
}

#[test]
fn the_host_cannot_touch_device_memory() {
    dies(concat!(module_path!(), "::the_host_cannot_touch_device_memory"), 11, |d| {
        d.on(0);
        let pointer = d.allocate(64) as *const u8;
        // SAFETY: none; the test is that the process ends here.
        unsafe { ptr::read_volatile(pointer) };
    });
}

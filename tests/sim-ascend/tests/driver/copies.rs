//! Copies: the runtime goes by the addresses, waits for no stream, and has no asynchronous one within the host.

use std::{thread, time::Duration};

use crate::process::Driver;

/// The arguments of a batch, of one kind.
struct Batch {
    to: Vec<u64>,
    from: Vec<u64>,
    /// Location of target and source: id, type, id, type, and what is reserved.
    attributes: [u32; 8],
}

const TO_DEVICE: [u32; 8] = [0, 1, 0, 0, 0, 0, 0, 0];
const TO_HOST: [u32; 8] = [0, 0, 0, 1, 0, 0, 0, 0];

fn batch(d: &Driver, batch: &Batch, len: usize) -> (i32, usize) {
    let (lens, starts, mut failed) = (vec![len; batch.to.len()], [0usize], 7usize);
    let status = acl!(
        d,
        aclrtMemcpyBatch(
            batch.to.as_ptr(),
            lens.as_ptr(),
            batch.from.as_ptr(),
            lens.as_ptr(),
            batch.to.len(),
            batch.attributes.as_ptr(),
            starts.as_ptr(),
            1usize,
            &raw mut failed
        )
    );
    (status, failed)
}

driver_tests! {
    fn a_synchronous_copy_goes_by_the_addresses_and_waits_for_no_stream[](d) {
        d.on(0);
        let (pointer, stream) = (d.malloc(64), d.stream());
        let (from, mut to) = ([7u8; 64], [0u8; 64]);
        d.control.hold(stream).unwrap();
        d.control.fill(stream, pointer, 64, 1).unwrap();
        // The direction that is named does not matter.
        ok!(d, aclrtMemcpy(pointer, 64usize, from.as_ptr(), 64usize, 2i32));
        ok!(d, aclrtMemcpy(to.as_mut_ptr(), 64usize, pointer, 64usize, 4i32));
        assert_eq!(to, from);
        let other = d.malloc(64);
        ok!(d, aclrtMemcpy(other, 64usize, pointer, 64usize, 3i32));
        assert_eq!(d.control.peek(other, 64), Ok(vec![7; 64]));
        let mut host = [0u8; 64];
        ok!(d, aclrtMemcpy(host.as_mut_ptr(), 64usize, from.as_ptr(), 64usize, 0i32));
        assert_eq!(host, from);
        ok!(d, aclrtMemset(other, 64usize, 9i32, 32usize));
        assert_eq!(d.control.peek(other, 64), Ok([[9; 32], [7; 32]].concat()));
    }

    fn copies_that_cannot_be_are_refused[](d) {
        d.on(1);
        let elsewhere = d.malloc(64);
        d.on(0);
        let (pointer, mut host) = (d.malloc(64), [0u8; 4096]);
        let at = host.as_mut_ptr() as u64;
        let copy = |to: u64, room: usize, from: u64, len: usize, kind: i32| {
            acl!(d, aclrtMemcpy(to, room, from, len, kind))
        };
        assert_eq!([copy(at, 63, pointer, 64, 2), copy(at, 64, pointer, 0, 2), copy(at, 64, pointer, 64, 8)], [107000; 3]);
        assert_eq!([copy(0, 64, pointer, 64, 2), copy(at, 64, 0, 64, 2)], [100000; 2]);
        // Beyond the allocation, and of the other device.
        assert_eq!([copy(at, 4096, pointer, 4096, 2), copy(at, 64, elsewhere, 64, 2)], [107000, 107003]);
        assert_eq!(acl!(d, aclrtMemset(pointer, 63usize, 0i32, 64usize)), 107000);
    }

    fn pinned_memory_is_copied_when_the_stream_comes_to_it[](d) {
        d.on(0);
        let (pointer, stream, pinned) = (d.malloc(64), d.stream(), d.malloc_host(64));
        d.control.hold(stream).unwrap();
        ok!(d, aclrtMemcpyAsync(pointer, 64usize, pinned, 64usize, 1i32, stream));
        // SAFETY: the test's own memory; the copy is held.
        unsafe { pinned.write_bytes(9, 64) };
        d.control.release(stream).unwrap();
        ok!(d, aclrtSynchronizeStream(stream));
        assert_eq!(d.control.peek(pointer, 64), Ok(vec![9; 64]));
        ok!(d, aclrtFreeHost(pinned));
    }

    fn pageable_memory_keeps_the_caller_until_the_copy_is_done[](d) {
        let context = d.on(0);
        let (pointer, stream, mut pageable) = (d.malloc(64), d.stream(), [0u8; 64]);
        d.control.poke(pointer, &[5; 64]).unwrap();
        d.control.hold(stream).unwrap();
        thread::scope(|s| {
            let copy = s.spawn(|| {
                ok!(d, aclrtSetCurrentContext(context));
                ok!(d, aclrtMemcpyAsync(pageable.as_mut_ptr(), 64usize, pointer, 64usize, 2i32, stream));
            });
            d.control.wait_for_calls("aclrtMemcpyAsync", 1);
            thread::sleep(Duration::from_millis(20));
            assert!(!copy.is_finished());
            d.control.release(stream).unwrap();
        });
        assert_eq!(pageable, [5; 64]);
    }

    fn from_host_to_host_there_is_no_asynchronous_copy[](d) {
        d.on(0);
        let (stream, from, to) = (d.stream(), d.malloc_host(64), d.malloc_host(64));
        assert_eq!(acl!(d, aclrtMemcpyAsync(to, 64usize, from, 64usize, 0i32, stream)), 207000);
    }

    fn devices_copy_from_each_other_once_they_have_access[](d) {
        d.on(1);
        let there = d.malloc(64);
        d.control.poke(there, &[3; 64]).unwrap();
        d.on(0);
        let (here, stream) = (d.malloc(64), d.stream());
        let copy = || acl!(d, aclrtMemcpyAsync(here, 64usize, there, 64usize, 3i32, stream));
        assert_eq!(copy(), 107000);
        ok!(d, aclrtDeviceEnablePeerAccess(1i32, 0u32));
        assert_eq!(copy(), 0);
        ok!(d, aclrtSynchronizeStream(stream));
        assert_eq!(d.control.peek(here, 64), Ok(vec![3; 64]));
    }

    fn a_batch_goes_all_to_the_device_or_all_to_the_host[](d) {
        d.on(0);
        let (first, second, mut host) = (d.malloc(64), d.malloc(64), [[1u8; 64], [2; 64]]);
        let hosts: Vec<u64> = host.iter_mut().map(|part| part.as_mut_ptr() as u64).collect();
        let down = Batch { to: vec![first, second], from: hosts.clone(), attributes: TO_DEVICE };
        assert_eq!(batch(d, &down, 64), (0, usize::MAX));
        assert_eq!(d.control.peek(second, 64), Ok(vec![2; 64]));
        let mixed = Batch { to: vec![first, hosts[1]], from: vec![hosts[0], second], attributes: TO_DEVICE };
        assert_eq!(batch(d, &mixed, 64), (107000, 1));
        let within = Batch { to: vec![first], from: vec![second], attributes: TO_DEVICE };
        assert_eq!(batch(d, &within, 64), (107000, 0));
        // Named otherwise than it is.
        let named = Batch { attributes: TO_HOST, ..down };
        assert_eq!(batch(d, &named, 64), (107000, 0));
        let up = Batch { to: hosts, from: vec![second, first], attributes: TO_HOST };
        assert_eq!((batch(d, &up, 64), host), ((0, usize::MAX), [[2; 64], [1; 64]]));
        assert_eq!(batch(d, &Batch { to: vec![], from: vec![], attributes: TO_HOST }, 64).0, 107000);
    }

    fn a_device_may_copy_no_batches[HAULIER_SIM_MEMCPY_BATCH = "0"](d) {
        d.on(0);
        let host = [1u8; 64];
        let one = Batch { to: vec![d.malloc(64)], from: vec![host.as_ptr() as u64], attributes: TO_DEVICE };
        assert_eq!(batch(d, &one, 64), (207000, 7));
    }

    fn the_mapped_address_of_registered_memory_is_no_good_for_copies[](d) {
        d.on(0);
        let heap = vec![0u8; 16384];
        let page = heap.as_ptr().addr().next_multiple_of(4096) as u64;
        let (mut device, pointer) = (0u64, d.malloc(64));
        ok!(d, aclrtHostRegister(page, 4096u64, 0i32, &raw mut device));
        assert_ne!(device, 0);
        assert_eq!(acl!(d, aclrtMemcpy(pointer, 64usize, device, 64usize, 4i32)), 107000);
        ok!(d, aclrtMemcpy(pointer, 64usize, page, 64usize, 4i32));
    }
}

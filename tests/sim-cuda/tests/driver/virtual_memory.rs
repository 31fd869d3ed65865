//! Virtual memory in several pieces, alone and across two processes.

use std::os::fd::BorrowedFd;

use rustix::io::{FdFlags, fcntl_setfd};

use crate::process::{Driver, told};

const CHUNK: usize = 2 << 20;
const POSIX_FD: u32 = 1;

#[repr(C)]
struct Location {
    kind: u32,
    id: i32,
}

#[repr(C)]
struct Properties {
    kind: u32,
    handle_types: u32,
    location: Location,
    win32: usize,
    flags: [u8; 8],
}

#[repr(C)]
struct Access {
    location: Location,
    flags: u32,
}

fn create(d: &Driver, handle_types: u32) -> u64 {
    let location = Location { kind: 1, id: 0 };
    let properties = Properties { kind: 1, handle_types, location, win32: 0, flags: [0; 8] };
    let mut handle = 0u64;
    ok!(d, cuMemCreate(&raw mut handle, CHUNK, &raw const properties, 0u64));
    handle
}

fn reserve(d: &Driver, chunks: usize) -> u64 {
    let mut range = 0u64;
    ok!(d, cuMemAddressReserve(&raw mut range, chunks * CHUNK, 0usize, 0u64, 0u64));
    range
}

fn map(d: &Driver, range: u64, handles: &[u64]) {
    for (at, &handle) in handles.iter().enumerate() {
        ok!(d, cuMemMap(range + (at * CHUNK) as u64, CHUNK, 0usize, handle, 0u64));
    }
}

fn allow(d: &Driver, range: u64, chunks: usize) {
    let access = Access { location: Location { kind: 1, id: 0 }, flags: 3 };
    ok!(d, cuMemSetAccess(range, chunks * CHUNK, &raw const access, 1usize));
}

driver_tests! {
    fn pieces_make_one_range_with_access_only[](d) {
        d.on(0);
        let range = reserve(d, 3);
        let handles = [create(d, POSIX_FD), create(d, POSIX_FD)];
        map(d, range, &handles);
        let start = range + CHUNK as u64 - 8;
        assert_eq!(cu!(d, cuMemsetD8_v2(start, 5u8, 16usize)), 1);
        allow(d, range, 2);
        // Across the border of the pieces, and not beyond what is mapped.
        ok!(d, cuMemsetD8_v2(start, 5u8, 16usize));
        ok!(d, cuStreamSynchronize(0u64));
        assert_eq!(d.control.peek(start - 1, 18), Ok([&[0][..], &[5; 16], &[0]].concat()));
        assert_eq!(cu!(d, cuMemsetD8_v2(range + 2 * CHUNK as u64 - 8, 5u8, 16usize)), 1);

        // The reservation, the mapping, how it can be shared, and no context.
        let second = range + CHUNK as u64;
        assert_eq!(d.attributes([2, 11, 12], second), Ok([2, range, 3 * CHUNK as u64]));
        assert_eq!(d.attributes([19, 18, 1, 10, 14], second + 9), Ok([second, CHUNK as u64, 0, 0, 1]));
        let (mut base, mut size) = (0u64, 0usize);
        ok!(d, cuMemGetAddressRange_v2(&raw mut base, &raw mut size, second + 9));
        assert_eq!((base, size), (second, CHUNK));
        assert_eq!((d.attributes([2], range + 2 * CHUNK as u64), cu!(d, cuMemFree_v2(range))), (Ok([0]), 1));
        let mut handle = [0u8; 64];
        assert_eq!(cu!(d, cuIpcGetMemHandle(handle.as_mut_ptr(), range)), 1);

        // Physical memory lives as long as it has a handle or is mapped.
        let mut retained = 0u64;
        ok!(d, cuMemRelease(handles[1]));
        assert_eq!(cu!(d, cuMemRelease(handles[1])), 1);
        ok!(d, cuMemRetainAllocationHandle(&raw mut retained, second + 1));
        assert_eq!(retained, handles[1]);
        ok!(d, cuMemUnmap(range, 2 * CHUNK));
        assert_eq!(cu!(d, cuMemAddressFree(range, CHUNK)), 1);
        ok!(d, cuMemAddressFree(range, 3 * CHUNK));
        ok!(d, cuMemRelease(retained));
        ok!(d, cuMemRelease(handles[0]));
        let (mut free, mut total) = (0usize, 0usize);
        ok!(d, cuMemGetInfo_v2(&raw mut free, &raw mut total));
        assert_eq!(free, total);
    }

    fn several_pieces_cross_to_another_process[](d) {
        d.on(0);
        let middle = |range: u64| range + CHUNK as u64;
        if let Some(descriptors) = told() {
            let handles: Vec<u64> = descriptors
                .split(',')
                .map(|descriptor| {
                    let mut handle = 0u64;
                    let descriptor: usize = descriptor.parse().unwrap();
                    ok!(d, cuMemImportFromShareableHandle(&raw mut handle, descriptor, POSIX_FD));
                    handle
                })
                .collect();
            let range = reserve(d, 2);
            map(d, range, &handles);
            allow(d, range, 2);
            assert_eq!(d.control.open_imports(), Ok(2));
            let mut bytes = [0u8; 8];
            ok!(d, cuMemcpyDtoH_v2(bytes.as_mut_ptr(), middle(range) - 4, 8usize));
            assert_eq!(bytes, [1, 1, 1, 1, 2, 2, 2, 2]);
            ok!(d, cuMemcpyHtoD_v2(middle(range) - 2, [9u8; 4].as_ptr(), 4usize));
            let mut out = -1i32;
            assert_eq!(cu!(d, cuMemExportToShareableHandle(&raw mut out, handles[0], POSIX_FD, 0u64)), 1);
            for handle in handles {
                ok!(d, cuMemRelease(handle));
            }
            assert_eq!(d.control.open_imports(), Ok(2));
            ok!(d, cuMemUnmap(range, 2 * CHUNK));
            assert_eq!(d.control.open_imports(), Ok(0));
            return;
        }
        let range = reserve(d, 2);
        let handles = [create(d, POSIX_FD), create(d, POSIX_FD)];
        map(d, range, &handles);
        allow(d, range, 2);
        ok!(d, cuMemsetD8_v2(range, 1u8, CHUNK));
        ok!(d, cuMemsetD8_v2(middle(range), 2u8, CHUNK));
        ok!(d, cuStreamSynchronize(0u64));
        let descriptors = handles.map(|handle| {
            let mut descriptor = -1i32;
            ok!(d, cuMemExportToShareableHandle(&raw mut descriptor, handle, POSIX_FD, 0u64));
            // SAFETY: just made, and never closed.
            fcntl_setfd(unsafe { BorrowedFd::borrow_raw(descriptor) }, FdFlags::empty()).unwrap();
            descriptor.to_string()
        });
        d.peer(&descriptors.join(","), &[]);
        assert_eq!(d.control.peek(middle(range) - 3, 6), Ok(vec![1, 9, 9, 9, 9, 2]));
    }

    fn memory_without_a_handle_type_is_not_exported_and_a_strange_descriptor_not_imported[](d) {
        d.on(0);
        let (mut descriptor, mut handle) = (-1i32, 0u64);
        let export = |handle: u64, out: &mut i32| {
            cu!(d, cuMemExportToShareableHandle(std::ptr::from_mut(out), handle, POSIX_FD, 0u64))
        };
        assert_eq!((export(create(d, 0), &mut descriptor), descriptor), (1, -1));
        for descriptor in [0usize, 9999] {
            assert_ne!(cu!(d, cuMemImportFromShareableHandle(&raw mut handle, descriptor, POSIX_FD)), 0);
        }
        // In the exporter's own process, however, it is.
        assert_eq!(export(create(d, POSIX_FD), &mut descriptor), 0);
        ok!(d, cuMemImportFromShareableHandle(&raw mut handle, descriptor as usize, POSIX_FD));
    }
}

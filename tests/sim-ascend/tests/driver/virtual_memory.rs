//! Reserved addresses, physical memory, and shareable handles.

use crate::process::{Driver, Pointer, told};

const GRANULE: usize = 2 << 20;

/// `aclrtPhysicalMemProp` of huge pages of a device: handle type, allocation type, attribute, location, reserved.
fn properties(device: u32) -> [u32; 8] {
    [0, 0, 4, device, 1, 0, 0, 0]
}

fn physical(d: &Driver, device: u32) -> u64 {
    let mut handle = 0u64;
    ok!(d, aclrtMallocPhysical(&raw mut handle, GRANULE, properties(device).as_ptr(), 0u64));
    handle
}

fn reserve(d: &Driver, bytes: usize) -> u64 {
    let mut start = 0u64;
    ok!(d, aclrtReserveMemAddress(&raw mut start, bytes, 0usize, 0u64, 1u64));
    start
}

fn map(d: &Driver, start: u64, handle: u64) -> i32 {
    acl!(d, aclrtMapMem(start, GRANULE, 0usize, handle, 0u64))
}

fn export(d: &Driver, handle: u64, flags: u64) -> (i32, u64) {
    let mut number = 0u64;
    (acl!(d, aclrtMemExportToShareableHandleV2(handle, flags, 1i32, &raw mut number)), number)
}

fn import(d: &Driver, number: u64, device: i32) -> (i32, u64) {
    let mut handle = 0u64;
    (acl!(d, aclrtMemImportFromShareableHandle(number, device, &raw mut handle)), handle)
}

driver_tests! {
    fn what_is_mapped_is_device_memory_at_once[](d) {
        d.on(1);
        let mut granule = 0usize;
        ok!(d, aclrtMemGetAllocationGranularity(properties(1).as_ptr(), 0i32, &raw mut granule));
        assert_eq!(granule, GRANULE);
        let (start, handle) = (reserve(d, 2 * GRANULE), physical(d, 1));
        assert_eq!(d.pointer(start), Err(507899), "nothing is mapped");
        assert_eq!((map(d, start, handle), map(d, start, handle)), (0, 107000));
        assert_eq!(d.pointer(start + 100), Ok(Pointer { kind: 1, device: 1, page: GRANULE as u32 }));
        ok!(d, aclrtMemset(start, 64usize, 7i32, 64usize));
        assert_eq!(d.control.peek(start, 64), Ok(vec![7; 64]));
        // Both pieces are one range of bytes.
        assert_eq!(map(d, start + GRANULE as u64, physical(d, 1)), 0);
        ok!(d, aclrtMemset(start + GRANULE as u64 - 32, 64usize, 9i32, 64usize));
        let mut key = [0u8; 65];
        assert_eq!(acl!(d, aclrtIpcMemGetExportKey(start, GRANULE, key.as_mut_ptr(), 65usize, 1u64)), 107000);
        assert_eq!([acl!(d, aclrtFree(start)), acl!(d, aclrtReleaseMemAddress(start))], [107000; 2]);
        let mut again = 0u64;
        ok!(d, aclrtMemRetainAllocationHandle(start, &raw mut again));
        assert_eq!(again, handle);
        ok!(d, aclrtUnmapMem(start));
        assert_eq!(acl!(d, aclrtUnmapMem(start)), 107000);
        ok!(d, aclrtUnmapMem(start + GRANULE as u64));
        ok!(d, aclrtReleaseMemAddress(start));
        assert_eq!([acl!(d, aclrtFreePhysical(handle)), acl!(d, aclrtFreePhysical(handle))], [0; 2]);
        assert_eq!(acl!(d, aclrtFreePhysical(handle)), 107000);
    }

    fn another_device_needs_access[](d) {
        d.on(0);
        let (start, handle) = (reserve(d, GRANULE), physical(d, 1));
        assert_eq!(map(d, start, handle), 0);
        let zeroed = || acl!(d, aclrtMemset(start, 64usize, 0i32, 64usize));
        assert_eq!(zeroed(), 107000);
        let access = |flags: u32| [flags, 0, 1, 0, 0, 0];
        let set = |flags: u32| acl!(d, aclrtMemSetAccess(start, GRANULE, access(flags).as_ptr(), 1usize));
        assert_eq!([set(1), set(3), zeroed(), set(0), zeroed()], [107000, 0, 0, 0, 107000]);
    }

    fn nonsense_is_refused[](d) {
        d.on(0);
        let (mut out, mut host) = (0u64, properties(0));
        host[4] = 0;
        assert_eq!(
            [
                acl!(d, aclrtMallocPhysical(&raw mut out, 4096usize, properties(0).as_ptr(), 0u64)),
                acl!(d, aclrtMallocPhysical(&raw mut out, GRANULE, properties(2).as_ptr(), 0u64)),
                acl!(d, aclrtMallocPhysical(&raw mut out, GRANULE, properties(0).as_ptr(), 1u64)),
                acl!(d, aclrtMallocPhysical(&raw mut out, GRANULE, host.as_ptr(), 0u64)),
                acl!(d, aclrtReserveMemAddress(&raw mut out, GRANULE, GRANULE, 0u64, 1u64)),
                acl!(d, aclrtReserveMemAddress(&raw mut out, 4096usize, 0usize, 0u64, 1u64)),
                acl!(d, aclrtReserveMemAddressNoUCMemory(&raw mut out, GRANULE, 0usize, 0u64, 1u64)),
                acl!(d, aclrtReleaseMemAddress(0x1000u64)),
            ],
            [107000, 107001, 107000, 207000, 107000, 107000, 207000, 107000]
        );
    }

    fn a_number_opens_the_memory_in_another_process[](d) {
        d.on(1);
        if let Some(number) = told() {
            let (status, handle) = import(d, number.parse().unwrap(), 1);
            let start = reserve(d, GRANULE);
            assert_eq!((status, map(d, start, handle), d.control.open_imports()), (0, 0, Ok(1)));
            assert_eq!(d.pointer(start), Ok(Pointer { kind: 1, device: 1, page: GRANULE as u32 }));
            let mut host = [0u8; 64];
            ok!(d, aclrtMemcpy(host.as_mut_ptr(), 64usize, start, 64usize, 2i32));
            assert_eq!((host, export(d, handle, 1).0), ([7; 64], 107000));
            ok!(d, aclrtMemset(start, 64usize, 9i32, 64usize));
            return;
        }
        let (start, handle) = (reserve(d, GRANULE), physical(d, 1));
        assert_eq!(map(d, start, handle), 0);
        d.control.poke(start, &[7; 64]).unwrap();
        let (status, number) = export(d, handle, 1);
        assert_eq!(status, 0);
        d.peer(&number.to_string(), &[]);
        assert_eq!(d.control.peek(start, 64), Ok(vec![9; 64]));
        assert_eq!((export(d, handle, 1).0, import(d, number, 1).0), (107000, 507899), "one, and for others");
        assert_eq!(import(d, number, 2).0, 107001);
    }

    fn a_number_for_a_whitelist[](d) {
        d.on(0);
        if let Some(what) = told() {
            let (number, folder) = what.split_once(' ').unwrap();
            let number = number.parse().unwrap();
            assert_eq!(import(d, number, 0).0, 207006);
            d.ask(folder);
            assert_eq!(import(d, number, 0).0, 0);
            return;
        }
        let (_, number) = export(d, physical(d, 0), 0);
        let allow = |number: u64, pids: &[i32]| {
            acl!(d, aclrtMemSetPidToShareableHandle(number, pids.as_ptr(), pids.len()))
        };
        assert_eq!([allow(number + 1, &[1]), allow(number, &[])], [107000; 2]);
        d.peer_that_asks(&number.to_string(), |pid| assert_eq!(allow(number, &[pid]), 0));
    }

    fn another_devices_memory_only_moves_between_devices[](d) {
        d.on(1);
        if let Some(number) = told() {
            let (_, handle) = import(d, number.parse().unwrap(), 1);
            let (start, own, stream, mut host) = (reserve(d, GRANULE), d.malloc(64), d.stream(), [0u8; 64]);
            assert_eq!(map(d, start, handle), 0);
            assert_eq!(acl!(d, aclrtMemcpy(host.as_mut_ptr(), 64usize, start, 64usize, 2i32)), 107000);
            ok!(d, aclrtMemcpyAsync(own, 64usize, start, 64usize, 3i32, stream));
            ok!(d, aclrtSynchronizeStream(stream));
            assert_eq!(d.control.peek(own, 64), Ok(vec![7; 64]));
            return;
        }
        let (start, handle) = (reserve(d, GRANULE), physical(d, 0));
        assert_eq!(map(d, start, handle), 0);
        d.control.poke(start, &[7; 64]).unwrap();
        d.peer(&export(d, handle, 1).1.to_string(), &[]);
    }

    fn there_is_no_fabric[](d) {
        d.on(0);
        let mut bytes = [0u8; 128];
        let handle = physical(d, 0);
        assert_eq!(acl!(d, aclrtMemExportToShareableHandleV2(handle, 1u64, 2i32, bytes.as_mut_ptr())), 207000);
        assert_eq!(acl!(d, aclrtMemExportToShareableHandleV2(handle, 1u64, 3i32, bytes.as_mut_ptr())), 107000);
    }

    fn a_fabric_has_longer_handles[HAULIER_SIM_FABRIC = "1"](d) {
        d.on(0);
        if let Some(text) = told() {
            let (mut bytes, mut handle) = ([0u8; 128], 0u64);
            bytes[..8].copy_from_slice(&text.parse::<u64>().unwrap().to_le_bytes());
            ok!(d, aclrtMemImportFromShareableHandleV2(bytes.as_ptr(), 2i32, 0u64, &raw mut handle));
            assert_eq!(map(d, reserve(d, GRANULE), handle), 0);
            return;
        }
        let mut bytes = [1u8; 128];
        ok!(d, aclrtMemExportToShareableHandleV2(physical(d, 0), 1u64, 2i32, bytes.as_mut_ptr()));
        assert_eq!(bytes[8..], [0; 120]);
        d.peer(&u64::from_le_bytes(bytes[..8].try_into().unwrap()).to_string(), &[]);
    }
}

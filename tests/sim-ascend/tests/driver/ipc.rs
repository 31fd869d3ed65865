//! Memory that other processes open by a key.

use std::ffi::CString;

use crate::process::{Driver, Pointer, told};

/// Exports a block for everybody or by whitelist.
fn export(d: &Driver, pointer: u64, bytes: usize, flags: u64) -> (i32, String) {
    let mut key = [1u8; 65];
    let status = acl!(d, aclrtIpcMemGetExportKey(pointer, bytes, key.as_mut_ptr(), 65usize, flags));
    (status, String::from_utf8_lossy(key.strip_suffix(&[0]).unwrap_or_default()).into_owned())
}

fn import(d: &Driver, key: &str, flags: u64) -> (i32, u64) {
    let (key, mut pointer) = (CString::new(key).unwrap(), 7u64);
    (acl!(d, aclrtIpcMemImportByKey(&raw mut pointer, key.as_ptr(), flags)), pointer)
}

fn close(d: &Driver, key: &str) -> i32 {
    let key = CString::new(key).unwrap();
    acl!(d, aclrtIpcMemClose(key.as_ptr()))
}

fn copy(d: &Driver, to: u64, from: u64) -> i32 {
    acl!(d, aclrtMemcpy(to, 64usize, from, 64usize, 4i32))
}

fn copy_async(d: &Driver, to: u64, from: u64, stream: u64) -> i32 {
    acl!(d, aclrtMemcpyAsync(to, 64usize, from, 64usize, 4i32, stream))
}

/// What importers of memory of their own device see.
fn shared_with_a_peer(d: &Driver, kind: i32) {
    d.on(1);
    if let Some(key) = told() {
        let (status, pointer) = import(d, &key, 1);
        assert_eq!((status, d.pointer(pointer + 100)), (0, Ok(Pointer { kind, device: 1, page: 4096 })));
        // Opened again it is counted, and has the same address.
        assert_eq!((import(d, &key, 0), d.control.open_imports()), ((0, pointer), Ok(1)));
        let mut host = [0u8; 64];
        assert_eq!((copy(d, host.as_mut_ptr() as u64, pointer), host), (0, [7; 64]));
        assert_eq!(copy(d, pointer, d.malloc(64)), 0);
        // It is neither freed nor exported here.
        assert_eq!((acl!(d, aclrtFree(pointer)), export(d, pointer, 64, 1).0), (107000, 107000));
        d.on(0);
        assert_eq!((close(d, &key), import(d, &key, 1).0), (107003, 507899));
        d.on(1);
        assert_eq!([close(d, &key), close(d, &key), close(d, &key)], [0, 0, 107000]);
        assert_eq!(d.control.open_imports(), Ok(0));
        return;
    }
    let pointer = d.malloc(8192);
    d.control.poke(pointer, &[7; 8192]).unwrap();
    let (status, key) = export(d, pointer, 8192, 1);
    assert_eq!((status, key.len(), key.chars().all(|digit| digit.is_ascii_hexdigit())), (0, 64, true));
    d.peer(&key, &[]);
    assert_eq!(d.control.peek(pointer, 65), Ok([vec![0; 64], vec![7]].concat()));
    assert_ne!(import(d, &key, 1).0, 0, "not in the exporter's own process");
    // Closing it here ends the export.
    assert_eq!([close(d, &key), close(d, &key)], [0, 107000]);
}

driver_tests! {
    fn another_process_on_the_device_reads_and_writes_it_in_9[](d) { shared_with_a_peer(d, 1) }

    fn another_process_on_the_device_is_told_managed_in_8[HAULIER_SIM_CANN = "8.5.0"](d) {
        shared_with_a_peer(d, 3)
    }

    fn only_whole_blocks_of_pages_are_exported[](d) {
        d.on(0);
        let (block, _small, small) = (d.malloc(8192), d.malloc(64), d.malloc(64));
        assert_eq!(
            [
                export(d, block + 4096, 4096, 1).0,
                export(d, block, 8192 + 64, 1).0,
                export(d, block, 0, 1).0,
                export(d, block, 8192, 2).0,
                export(d, small, 64, 1).0,
                export(d, d.malloc_host(8192) as u64, 8192, 1).0,
            ],
            [107000; 6]
        );
        let mut key = [0u8; 65];
        assert_eq!(acl!(d, aclrtIpcMemGetExportKey(block, 8192usize, key.as_mut_ptr(), 64usize, 1u64)), 107000);
        let (status, first) = export(d, block, 8192, 1);
        assert_eq!((status, export(d, block, 8192, 1)), (0, (0, first)));
        assert_eq!(export(d, block, 8192, 0).0, 107000, "with other flags");
        d.on(1);
        assert_eq!(export(d, block, 8192, 1).0, 107003, "its device is not current");
    }

    fn without_the_flag_importers_have_to_be_on_the_whitelist[](d) {
        d.on(0);
        if let Some(what) = told() {
            let (key, folder) = what.split_once(' ').unwrap();
            assert_eq!(import(d, key, 0).0, 207006);
            d.ask(folder);
            assert_eq!(import(d, key, 0).0, 0);
            return;
        }
        let pointer = d.malloc(4096);
        let (_, key) = export(d, pointer, 4096, 0);
        let text = CString::new(key.as_str()).unwrap();
        let allow = |pids: &[i32]| acl!(d, aclrtIpcMemSetImportPid(text.as_ptr(), pids.as_ptr(), pids.len()));
        assert_eq!([allow(&[1; 32]), allow(&[]), allow(&[1; 31])], [107000, 107000, 0]);
        d.peer_that_asks(&key, |pid| assert_eq!(allow(&[pid]), 0));
        assert_eq!(acl!(d, aclrtIpcMemSetImportPid(c"00".as_ptr(), [1i32].as_ptr(), 1usize)), 107000);
    }

    fn the_pid_that_a_process_has_of_itself_is_not_on_the_whitelist[](d) {
        d.on(0);
        if let Some(what) = told() {
            let (key, folder) = what.split_once(' ').unwrap();
            d.ask(folder);
            assert_eq!(import(d, key, 0).0, 207006);
            return;
        }
        let (_, key) = export(d, d.malloc(4096), 4096, 0);
        let (text, mut bare) = (CString::new(key.as_str()).unwrap(), 0i32);
        ok!(d, aclrtDeviceGetBareTgid(&raw mut bare));
        let offset = bare - std::process::id().cast_signed();
        d.peer_that_asks(&key, |pid| {
            ok!(d, aclrtIpcMemSetImportPid(text.as_ptr(), [pid - offset].as_ptr(), 1usize));
        });
    }

    fn another_devices_memory_only_moves_between_devices_and_on_a_stream[](d) {
        d.on(if told().is_some() { 1 } else { 0 });
        if let Some(key) = told() {
            assert_eq!(import(d, &key, 0).0, 107000, "access has to be asked for");
            let (status, foreign) = import(d, &key, 1);
            let (own, stream) = (d.malloc(64), d.stream());
            let (mut host, pinned) = ([0u8; 64], d.malloc_host(64) as u64);
            let at = host.as_mut_ptr() as u64;
            assert_eq!(status, 0);
            assert_eq!(
                [
                    copy(d, at, foreign),
                    copy(d, foreign, at),
                    copy(d, own, foreign),
                    copy(d, foreign + 64, foreign),
                    copy_async(d, at, foreign, stream),
                    copy_async(d, pinned, foreign, stream),
                    copy_async(d, foreign, pinned, stream),
                    acl!(d, aclrtMemset(foreign, 64usize, 0i32, 64usize)),
                ],
                [107000; 8]
            );
            assert_eq!(copy_async(d, own, foreign, stream), 0);
            ok!(d, aclrtSynchronizeStream(stream));
            assert_eq!((copy(d, at, own), host), (0, [7; 64]));
            d.control.poke(own, &[9; 64]).unwrap();
            assert_eq!(copy_async(d, foreign, own, stream), 0);
            ok!(d, aclrtSynchronizeStream(stream));
            return;
        }
        let pointer = d.malloc(4096);
        d.control.poke(pointer, &[7; 4096]).unwrap();
        d.peer(&export(d, pointer, 4096, 1).1, &[]);
        assert_eq!(d.control.peek(pointer, 64), Ok(vec![9; 64]));
    }

    fn a_key_of_freed_memory_or_another_machine_or_without_access_does_not_open[](d) {
        d.on(0);
        if let Some(what) = told() {
            let (key, status) = what.split_once(' ').unwrap();
            assert_eq!(import(d, key, 1).0.to_string(), status);
            assert_eq!([import(d, "00", 1).0, import(d, key, 2).0], [107000; 2]);
            return;
        }
        d.on(1);
        let pointer = d.malloc(4096);
        let (_, key) = export(d, pointer, 4096, 1);
        d.peer(&format!("{key} 0"), &[]);
        d.peer(&format!("{key} 507899"), &[("HAULIER_SIM_SEED", "1")]);
        d.peer(&format!("{key} 107000"), &[("HAULIER_SIM_PEER", "0")]);
        // The same card under another number is the same card.
        d.peer(&format!("{key} 0"), &[("HAULIER_SIM_PEER", "0"), ("ASCEND_RT_VISIBLE_DEVICES", "1")]);
        ok!(d, aclrtFree(pointer));
        let _reused = d.malloc(4096);
        d.peer(&format!("{key} 507899"), &[]);
    }

    fn an_export_that_is_closed_opens_no_longer[](d) {
        d.on(0);
        if let Some(key) = told() {
            assert_eq!(import(d, &key, 1).0, 507899);
            return;
        }
        let (_, key) = export(d, d.malloc(4096), 4096, 1);
        assert_eq!(close(d, &key), 0);
        d.peer(&key, &[]);
    }
}

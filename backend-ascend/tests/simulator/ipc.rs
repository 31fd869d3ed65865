//! Sharing memory with another process, both ways.

use std::env;

use backend_ascend::AscendDevice;
use hal::{
    Bound, Device, DeviceUuid, Export, Exported, IpcHandle, Kind, Memory, NotExportable, Region, Token,
};
use haulier_sim_ascend::Control;

use crate::common::{
    acl, again, alone, device, enter, expandable, foreign, free, is_9, map, pattern, read, succeeded,
    test_name, write,
};

const MIB: usize = 1 << 20;

fn export(bound: &Bound<'_, AscendDevice>, region: Region) -> Exported {
    match bound.export_ipc(region).unwrap() {
        Export::Handle(exported) => exported,
        Export::NotExportable(why) => panic!("{why:?}"),
    }
}

fn reason(bound: &Bound<'_, AscendDevice>, region: Region) -> NotExportable {
    match bound.export_ipc(region).unwrap() {
        Export::NotExportable(why) => why,
        Export::Handle(exported) => panic!("{exported:?}"),
    }
}

const HANDLE: &str = "HAULIER_TEST_HANDLE";

/// Runs the calling test once more, in a process that has [`received`] this.
fn send(exported: &Exported) {
    let Exported { handle, offset, len, .. } = exported;
    let mut peer = again(&test_name());
    peer.env(HANDLE, serde_json::to_string(&(handle, offset, len)).unwrap());
    succeeded(&peer.output().unwrap());
}

/// In the peer: what it was sent.
fn received() -> Option<(IpcHandle, usize, usize)> {
    serde_json::from_str(&env::var(HANDLE).ok()?).ok()
}

/// Fills what was imported with `byte`, having compared it with `expected`.
fn check_and_fill(bound: &Bound<'_, AscendDevice>, region: Region, expected: &[u8], byte: u8) {
    assert!(read(bound, region) == expected);
    write(bound, region, &vec![byte; region.len]);
}

/// A thread of an application on the device, and the device.
fn on_device_0(sim: &Control) -> AscendDevice {
    enter(sim, 0);
    device(0)
}

#[test]
fn a_part_of_our_memory_is_opened_by_key_and_offset() {
    alone(|sim| {
        let device = on_device_0(&sim);
        let bound = device.bind_current().unwrap();
        let bytes = pattern(4 * MIB);
        if let Some((handle, offset, len)) = received() {
            let import = bound.import_ipc(&handle, vec![]).unwrap();
            let part = import.region().part(offset, len).unwrap();
            check_and_fill(&bound, part, &bytes[offset..offset + len], 7);
            assert_eq!(bound.locate(part.addr, part.len).unwrap().region, part);
            assert_eq!(reason(&bound, part), NotExportable::Imported);
            // One key once more is the same address, counted.
            let again = bound.import_ipc(&handle, vec![]).unwrap();
            assert_eq!(again.region(), import.region());
            drop(import);
            assert!(read(&bound, part).iter().all(|byte| *byte == 7), "still open");
            drop(again);
            assert_eq!((sim.open_imports(), device.failed_drops()), (Ok(0), 0));
            assert_eq!((sim.count("aclrtIpcMemImportByKey"), sim.count("aclrtIpcMemClose")), (2, 2));
            return;
        }
        let memory = bound.allocate(4 * MIB).unwrap();
        write(&bound, memory.region(), &bytes);
        let exported = export(&bound, memory.region().part(MIB, MIB).unwrap());
        assert!(matches!(&exported.handle.token, Token::Opaque(bytes) if bytes.len() == 65));
        let other = export(&bound, memory.region().part(3 * MIB, 10).unwrap());
        assert_eq!((other.handle, other.offset), (exported.handle.clone(), 3 * MIB as u64));
        assert_eq!(sim.count("aclrtIpcMemGetExportKey"), 1);
        send(&exported);
        let after = read(&bound, memory.region());
        assert!(after[MIB..2 * MIB].iter().all(|byte| *byte == 7));
        assert!(after[..MIB] == bytes[..MIB] && after[2 * MIB..] == bytes[2 * MIB..]);
        drop(memory);
        assert_eq!((sim.count("aclrtIpcMemClose"), device.failed_drops()), (1, 0));
        // Closed before it is freed.
        let order: Vec<_> = sim.log().into_iter().map(|call| call.function).collect();
        let at = |call: &str| order.iter().rposition(|function| function == call);
        assert!(at("aclrtIpcMemClose") < at("aclrtFree"));
    });
}

#[test]
fn memory_of_others_is_shared_from_cann_9_on() {
    alone(|sim| {
        let device = on_device_0(&sim);
        let bound = device.bind_current().unwrap();
        let bytes = pattern(MIB);
        if let Some((handle, offset, len)) = received() {
            let import = bound.import_ipc(&handle, vec![]).unwrap();
            let part = import.region().part(offset, len).unwrap();
            check_and_fill(&bound, part, &bytes[4096..8192], 7);
            return;
        }
        let memory = foreign(&sim, device, MIB);
        write(&bound, memory, &bytes);
        let tensor = memory.part(4096, 4096).unwrap();
        if !is_9() {
            assert_eq!(reason(&bound, tensor), NotExportable::UnknownBase);
            return;
        }
        let exported = export(&bound, tensor);
        assert_eq!(exported.offset, 4096);
        send(&exported);
        assert!(read(&bound, tensor).iter().all(|byte| *byte == 7));
    });
}

/// ACL says nothing of it when memory of others is freed, so the key has to tell.
#[test]
fn memory_of_others_that_took_a_freed_ones_place_has_another_handle() {
    alone(|sim| {
        if !is_9() {
            return;
        }
        let device = on_device_0(&sim);
        let bound = device.bind_current().unwrap();
        let first = foreign(&sim, device, MIB);
        let before = export(&bound, first).handle;
        free(&sim, first);
        let second = foreign(&sim, device, MIB);
        assert_eq!(second, first, "the address is used again");
        assert_ne!(export(&bound, second).handle.token, before.token);
    });
}

#[test]
fn our_memory_that_took_a_freed_ones_place_is_another_buffer() {
    alone(|sim| {
        let device = on_device_0(&sim);
        let bound = device.bind_current().unwrap();
        let first = bound.allocate(MIB).unwrap();
        let (place, before) = (first.region(), export(&bound, first.region()).handle);
        drop(first);
        let second = bound.allocate(MIB).unwrap();
        let after = export(&bound, second.region()).handle;
        assert_eq!(second.region(), place, "the address is used again");
        assert!(before.buffer != after.buffer && before.token != after.token);
        assert_eq!(bound.import_ipc(&before, vec![]).map(drop).unwrap_err().kind(), Kind::ImportRefused);
    });
}

#[test]
fn this_process_uses_its_own_memory_as_it_is() {
    alone(|sim| {
        let device = on_device_0(&sim);
        let bound = device.bind_current().unwrap();
        let memory = bound.allocate(4096).unwrap();
        let handle = export(&bound, memory.region()).handle;
        let import = bound.import_ipc(&handle, vec![]).unwrap();
        assert_eq!(import.region(), memory.region());
        drop(import);
        assert_eq!((sim.count("aclrtIpcMemImportByKey"), sim.count("aclrtIpcMemClose")), (0, 0));
        if is_9() {
            for theirs in [foreign(&sim, device, MIB), expandable(&sim, 0, &[2 * MIB, 2 * MIB])] {
                let exported = export(&bound, theirs);
                let import = bound.import_ipc(&exported.handle, vec![]).unwrap();
                assert_eq!(import.region().addr, theirs.addr);
            }
            assert_eq!(sim.open_imports(), Ok(0));
        }
        assert_eq!(export(&bound, memory.region()).handle, handle);
    });
}

#[test]
fn virtual_memory_of_several_mappings_is_opened_mapping_by_mapping() {
    alone(|sim| {
        if !is_9() {
            return;
        }
        let device = on_device_0(&sim);
        let bound = device.bind_current().unwrap();
        let bytes = pattern(12 * MIB);
        if let Some((handle, offset, len)) = received() {
            let import = bound.import_ipc(&handle, vec![]).unwrap();
            let part = import.region().part(offset, len).unwrap();
            check_and_fill(&bound, part, &bytes[3 * MIB..8 * MIB], 7);
            assert_eq!(reason(&bound, part), NotExportable::Imported);
            drop(import);
            assert_eq!((sim.open_imports(), device.failed_drops()), (Ok(0), 0));
            assert_eq!(sim.count("aclrtMapMem"), sim.count("aclrtUnmapMem"));
            assert_eq!(sim.count("aclrtReserveMemAddress"), sim.count("aclrtReleaseMemAddress"));
            return;
        }
        let memory = expandable(&sim, 0, &[2 * MIB; 6]);
        write(&bound, memory, &bytes);
        // From the middle of the second mapping to the end of the fourth.
        let tensor = memory.part(3 * MIB, 5 * MIB).unwrap();
        let exported = export(&bound, tensor);
        assert!(matches!(&exported.handle.token, Token::Opaque(bytes) if bytes.len() == 8 + 3 * 8));
        assert_eq!((exported.offset, exported.handle.len), (MIB as u64, 6 * MIB as u64));
        // The runtime makes each handle once; they are remembered.
        assert_eq!(export(&bound, tensor).handle, exported.handle);
        send(&exported);
        let after = read(&bound, memory);
        assert!(after[3 * MIB..8 * MIB].iter().all(|byte| *byte == 7));
        assert!(after[..3 * MIB] == bytes[..3 * MIB] && after[8 * MIB..] == bytes[8 * MIB..]);
    });
}

#[test]
fn a_mapping_that_is_made_anew_has_another_handle() {
    alone(|sim| {
        if !is_9() {
            return;
        }
        let device = on_device_0(&sim);
        let bound = device.bind_current().unwrap();
        let memory = expandable(&sim, 0, &[2 * MIB]);
        let before = export(&bound, memory).handle;
        let mut physical = 0usize;
        acl!(sim, aclrtMemRetainAllocationHandle(memory.addr => usize, &mut physical => *mut usize));
        acl!(sim, aclrtUnmapMem(memory.addr => usize));
        for _ in 0..2 {
            acl!(sim, aclrtFreePhysical(physical => usize));
        }
        map(&sim, 0, memory.addr, 2 * MIB);
        assert_ne!(export(&bound, memory).handle.token, before.token);
    });
}

#[test]
fn an_import_of_mappings_that_fails_midway_leaves_nothing() {
    alone(|sim| {
        if !is_9() {
            return;
        }
        let device = on_device_0(&sim);
        let bound = device.bind_current().unwrap();
        if let Some((handle, ..)) = received() {
            for fault in [
                "aclrtMapMem:2=507899",
                "aclrtMemImportFromShareableHandle:2=207006",
                "aclrtMemSetAccess:1=107000",
                "aclrtReserveMemAddress:1=507899",
            ] {
                sim.plan_faults(fault).unwrap();
                let error = bound.import_ipc(&handle, vec![]).map(drop).unwrap_err();
                assert_eq!(error.kind(), Kind::ImportRefused, "{fault}: {error}");
                let text = error.to_string();
                assert!(
                    text.contains(&handle.device.to_string()) && text.contains(&handle.exporter.to_string())
                );
                assert_eq!(sim.open_imports(), Ok(0), "{fault}");
                let reserved =
                    sim.calls("aclrtReserveMemAddress").iter().filter(|c| c.status == Some(0)).count();
                assert_eq!(reserved, sim.calls("aclrtReleaseMemAddress").len(), "{fault}");
                sim.clear_faults().unwrap();
                sim.clear_log().unwrap();
            }
            drop(bound.import_ipc(&handle, vec![]).unwrap());
            return;
        }
        send(&export(&bound, expandable(&sim, 0, &[2 * MIB, 2 * MIB])));
    });
}

#[test]
fn what_acl_refuses_to_open_keeps_its_code() {
    alone(|sim| {
        let device = on_device_0(&sim);
        let bound = device.bind_current().unwrap();
        if let Some((handle, ..)) = received() {
            sim.plan_faults("aclrtIpcMemImportByKey:1=507899").unwrap();
            let error = bound.import_ipc(&handle, vec![]).map(drop).unwrap_err();
            assert_eq!((error.kind(), error.vendor_code()), (Kind::ImportRefused, Some(507899)));
            assert!(error.vendor_text().is_some(), "{error}");
            return;
        }
        let memory = bound.allocate(4096).unwrap();
        send(&export(&bound, memory.region()));
    });
}

/// The length is the peer's word.
#[test]
fn a_handle_that_promises_more_than_there_is_opens_nothing() {
    alone(|sim| {
        let device = on_device_0(&sim);
        let bound = device.bind_current().unwrap();
        if let Some((mut handle, ..)) = received() {
            handle.len = 1 << 30;
            let error = bound.import_ipc(&handle, vec![]).map(drop).unwrap_err();
            assert_eq!(error.kind(), Kind::ImportRefused, "{error}");
            assert_eq!((sim.open_imports(), device.failed_drops()), (Ok(0), 0));
            // Nor does it change what is known of an honest one that is open.
            handle.len = MIB as u64;
            let honest = bound.import_ipc(&handle, vec![]).unwrap();
            handle.len = 1 << 30;
            bound.import_ipc(&handle, vec![]).map(drop).unwrap_err();
            let addr = honest.region().addr;
            assert_eq!(bound.locate(addr, 2 * MIB).unwrap_err().kind(), Kind::InvalidRange);
            assert_eq!(bound.locate(addr, MIB).unwrap().region, honest.region());
            drop(honest);
            assert_eq!((sim.open_imports(), device.failed_drops()), (Ok(0), 0));
            return;
        }
        let memory = bound.allocate(MIB).unwrap();
        send(&export(&bound, memory.region()));
    });
}

#[test]
fn a_hostile_handle_is_refused() {
    alone(|sim| {
        let device = on_device_0(&sim);
        let bound = device.bind_current().unwrap();
        let memory = bound.allocate(4096).unwrap();
        let good = export(&bound, memory.region()).handle;
        let with = |token| IpcHandle { token, exporter: 1, ..good.clone() };
        for token in [
            Token::Opaque(vec![b'a'; 65]),
            Token::Opaque(vec![0; 65]),
            Token::Opaque(vec![1; 64]),
            Token::Opaque(vec![0; 8]),
            Token::Opaque(u64::MAX.to_le_bytes().repeat(3)),
            Token::Opaque([2 * MIB as u64, 5].map(u64::to_le_bytes).concat()),
            Token::Opaque(vec![7; 13]),
        ] {
            let error = bound.import_ipc(&with(token.clone()), vec![]).map(drop).unwrap_err();
            assert_eq!(error.kind(), Kind::ImportRefused, "{token:?}: {error}");
        }
        let elsewhere = IpcHandle { device: DeviceUuid([1; 16]), ..good };
        assert_eq!(bound.import_ipc(&elsewhere, vec![]).map(drop).unwrap_err().kind(), Kind::DeviceMismatch);
        assert_eq!((sim.open_imports(), device.failed_drops()), (Ok(0), 0));
    });
}

#[test]
fn what_cannot_be_exported_says_why() {
    alone(|sim| {
        let device = on_device_0(&sim);
        let bound = device.bind_current().unwrap();
        let heap = pattern(64);
        assert_eq!(reason(&bound, crate::common::host(&heap)), NotExportable::HostMemory);
        if is_9() {
            // Less than a page, so not at the beginning of one.
            let small = [0, 1].map(|_| foreign(&sim, device, 64));
            assert_eq!(reason(&bound, small[1]), NotExportable::Pool);
            let uneven = expandable(&sim, 0, &[2 * MIB, 4 * MIB]);
            assert_eq!(reason(&bound, uneven), NotExportable::NoHandleType);
            let many = expandable(&sim, 0, &[2 * MIB; 16]);
            assert_eq!(reason(&bound, many), NotExportable::NoHandleType);
            assert_eq!(export(&bound, many.part(0, 30 * MIB).unwrap()).handle.len, 30 * MIB as u64);
            // Its maker has exported it already, and ACL does that once.
            let theirs = expandable(&sim, 0, &[2 * MIB]);
            let (mut physical, mut number) = (0usize, 0u64);
            acl!(sim, aclrtMemRetainAllocationHandle(theirs.addr => usize, &mut physical => *mut usize));
            acl!(sim, aclrtMemExportToShareableHandle(
                physical => usize, 0 => i32, 1 => u64, &mut number => *mut u64
            ));
            assert_eq!(reason(&bound, theirs), NotExportable::NoHandleType);
        }
        sim.plan_faults("aclrtIpcMemGetExportKey:1=207000").unwrap();
        let memory = bound.allocate(4096).unwrap();
        assert_eq!(reason(&bound, memory.region()), NotExportable::Device);
    });
}

#[test]
fn keys_of_memory_of_others_do_not_pile_up() {
    alone(|sim| {
        if !is_9() {
            return;
        }
        let device = on_device_0(&sim);
        let bound = device.bind_current().unwrap();
        for _ in 0..4500 {
            let memory = foreign(&sim, device, 4096);
            export(&bound, memory);
            free(&sim, memory);
        }
        assert_eq!(sim.count("aclrtIpcMemClose"), 4500 - 4096);
        assert_eq!((sim.live_allocations(), device.failed_drops()), (Ok(0), 0));
    });
}

/// A container's ids and pids are its own; the key and the UUID are not.
#[test]
fn a_process_that_numbers_the_devices_otherwise_opens_on_the_same_one() {
    let env = vec![("HAULIER_SIM_DEVICES", "4"), ("ASCEND_RT_VISIBLE_DEVICES", "2,3")];
    crate::common::alone_with(crate::common::Setup { env, ..Default::default() }, |sim| {
        if let Some((handle, offset, len)) = received() {
            let there = AscendDevice::with_uuid(handle.device).unwrap();
            assert_eq!(there.identity().logical.0, 1);
            let bound = there.bind_owned_thread().unwrap();
            let import = bound.import_ipc(&handle, vec![]).unwrap();
            assert_eq!(read(&bound, import.region().part(offset, len).unwrap()), [3; 64]);
            return;
        }
        enter(&sim, 0);
        let device = device(0);
        let bound = device.bind_current().unwrap();
        let memory = bound.allocate(4096).unwrap();
        write(&bound, memory.region(), &[3; 4096]);
        let Exported { handle, offset, len, .. } = export(&bound, memory.region().part(64, 64).unwrap());
        let mut peer = again(&test_name());
        peer.env(HANDLE, serde_json::to_string(&(handle, offset, len)).unwrap());
        peer.env("ASCEND_RT_VISIBLE_DEVICES", "1,2,0");
        succeeded(&peer.output().unwrap());
    });
}

//! Sharing memory with another process, both ways.

use std::{
    env,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
};

use backend_cuda::CudaDevice;
use hal::{Bound, Device, Export, Exported, IpcHandle, Kind, Memory, NotExportable, Region, Token};
use haulier_sim_cuda::Control;
use rustix::io::{FdFlags, fcntl_setfd};

use crate::common::{
    Setup, again, alone, alone_with, cu, device, expandable, pattern, read, succeeded, test_name, write,
};

const MIB: usize = 1 << 20;

fn export(bound: &Bound<'_, CudaDevice>, region: Region) -> Exported {
    match bound.export_ipc(region).unwrap() {
        Export::Handle(exported) => exported,
        Export::NotExportable(why) => panic!("{why:?}"),
    }
}

fn reason(bound: &Bound<'_, CudaDevice>, region: Region) -> NotExportable {
    match bound.export_ipc(region).unwrap() {
        Export::NotExportable(why) => why,
        Export::Handle(exported) => panic!("{exported:?}"),
    }
}

const HANDLE: &str = "HAULIER_TEST_HANDLE";
const DESCRIPTORS: &str = "HAULIER_TEST_DESCRIPTORS";

/// Runs the calling test once more, in a process that has [`received`] this.
fn send(exported: &Exported) {
    let Exported { handle, descriptors, offset, len } = exported;
    for fd in descriptors {
        fcntl_setfd(fd, FdFlags::empty()).unwrap();
    }
    let numbers: Vec<_> = descriptors.iter().map(AsRawFd::as_raw_fd).collect();
    let mut peer = again(&test_name());
    peer.env(HANDLE, serde_json::to_string(&(handle, offset, len)).unwrap());
    peer.env(DESCRIPTORS, serde_json::to_string(&numbers).unwrap());
    succeeded(&peer.output().unwrap());
}

/// In the peer: what it was sent.
fn received() -> Option<(IpcHandle, Vec<OwnedFd>, usize, usize)> {
    let handle = env::var(HANDLE).ok()?;
    let numbers: Vec<i32> = serde_json::from_str(&env::var(DESCRIPTORS).ok()?).ok()?;
    let (handle, offset, len): (IpcHandle, usize, usize) = serde_json::from_str(&handle).ok()?;
    // SAFETY: the parent left them open for this process, and nobody else here knows them.
    let descriptors = numbers.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }).collect();
    Some((handle, descriptors, offset, len))
}

/// Fills what was imported with `byte`, having compared it with `expected`.
fn check_and_fill(bound: &Bound<'_, CudaDevice>, region: Region, expected: &[u8], byte: u8) {
    assert!(read(bound, region) == expected);
    write(bound, region, &vec![byte; region.len]);
}

#[test]
fn a_part_of_ordinary_memory_is_opened_by_handle_and_offset() {
    alone(|sim| {
        let device = device(0);
        let bound = device.bind_current().unwrap();
        let bytes = pattern(4 * MIB);
        if let Some((handle, descriptors, offset, len)) = received() {
            let import = bound.import_ipc(&handle, descriptors).unwrap();
            let part = import.region().part(offset, len).unwrap();
            check_and_fill(&bound, part, &bytes[offset..offset + len], 7);
            assert_eq!(reason(&bound, part), NotExportable::Imported);
            drop(import);
            assert_eq!((sim.open_imports(), device.failed_drops()), (Ok(0), 0));
            return;
        }
        let memory = bound.allocate(4 * MIB).unwrap();
        write(&bound, memory.region(), &bytes);
        let exported = export(&bound, memory.region().part(MIB, MIB).unwrap());
        assert!(matches!(&exported.handle.token, Token::Opaque(bytes) if bytes.len() == 64));
        send(&exported);
        let after = read(&bound, memory.region());
        assert!(after[MIB..2 * MIB].iter().all(|byte| *byte == 7));
        assert!(after[..MIB] == bytes[..MIB] && after[2 * MIB..] == bytes[2 * MIB..]);
    });
}

#[test]
fn this_process_uses_its_own_memory_as_it_is_until_it_is_freed() {
    alone(|sim| {
        let device = device(0);
        let bound = device.bind_current().unwrap();
        let memory = bound.allocate(4096).unwrap();
        let handle = export(&bound, memory.region()).handle;
        let import = bound.import_ipc(&handle, vec![]).unwrap();
        assert_eq!(import.region(), memory.region());
        drop(import);
        assert_eq!((sim.count("cuIpcOpenMemHandle_v2"), sim.count("cuIpcCloseMemHandle")), (0, 0));
        assert!(matches!(bound.export_ipc(memory.region()).unwrap(), Export::Handle(_)), "it is no import");
        drop(memory);
        // The address is used again, by other memory.
        let _other = bound.allocate(4096).unwrap();
        assert_eq!(bound.import_ipc(&handle, vec![]).unwrap_err().kind(), Kind::ImportRefused);
    });
}

#[test]
fn virtual_memory_of_several_chunks_is_opened_chunk_by_chunk() {
    alone(|sim| {
        let device = device(0);
        let bound = device.bind_current().unwrap();
        let bytes = pattern(12 * MIB);
        if let Some((handle, descriptors, offset, len)) = received() {
            let import = bound.import_ipc(&handle, descriptors).unwrap();
            let part = import.region().part(offset, len).unwrap();
            check_and_fill(&bound, part, &bytes[3 * MIB..9 * MIB], 7);
            assert_eq!(reason(&bound, part), NotExportable::Imported);
            drop(import);
            assert_eq!((sim.open_imports(), device.failed_drops()), (Ok(0), 0));
            return;
        }
        let memory = expandable(&sim, 0, &[2 * MIB, 2 * MIB, 4 * MIB, 2 * MIB, 2 * MIB], true);
        write(&bound, memory, &bytes);
        // From the middle of the second chunk into the fourth.
        let tensor = memory.part(3 * MIB, 6 * MIB).unwrap();
        let exported = export(&bound, tensor);
        let lens = [2, 4, 2].map(|len| (len * MIB) as u64);
        assert_eq!(exported.handle.token, Token::Descriptors(lens.to_vec()));
        assert_eq!((exported.offset, exported.descriptors.len()), (MIB as u64, 3));
        assert_eq!(sim.count("cuMemRetainAllocationHandle"), 3);
        let located = bound.locate(tensor.addr, tensor.len).unwrap().allocation.unwrap();
        assert_eq!(located.buffer, exported.handle.buffer);
        send(&exported);
        let after = read(&bound, memory);
        assert!(after[3 * MIB..9 * MIB].iter().all(|byte| *byte == 7));
        assert!(after[..3 * MIB] == bytes[..3 * MIB] && after[9 * MIB..] == bytes[9 * MIB..]);
    });
}

#[test]
fn what_touches_other_chunks_has_another_buffer_and_what_leaves_them_is_refused() {
    alone(|sim| {
        let device = device(0);
        let bound = device.bind_current().unwrap();
        let memory = expandable(&sim, 0, &[2 * MIB, 2 * MIB], true);
        let buffer = |offset, len| {
            let part = memory.part(offset, len).unwrap();
            bound.locate(part.addr, part.len).unwrap().allocation.unwrap().buffer
        };
        assert_eq!(buffer(0, 64), buffer(MIB, MIB));
        let all = [buffer(0, 64), buffer(2 * MIB, 64), buffer(0, 4 * MIB)];
        assert!(all[0] != all[1] && all[1] != all[2] && all[0] != all[2]);
        // Reserved and not mapped.
        let beyond = bound.locate(memory.addr, 4 * MIB + 1).unwrap_err();
        assert_eq!(beyond.kind(), Kind::InvalidRange);
    });
}

#[test]
fn a_chunk_that_is_mapped_anew_is_another_buffer() {
    alone(|sim| {
        let device = device(0);
        let bound = device.bind_current().unwrap();
        let memory = expandable(&sim, 0, &[2 * MIB], true);
        let before = export(&bound, memory).handle;
        cu!(sim, cuMemUnmap(memory.addr as u64 => u64, memory.len => usize));
        crate::common::remap(&sim, 0, memory);
        let after = export(&bound, memory).handle;
        assert_ne!(before.buffer, after.buffer);
    });
}

#[test]
fn an_import_of_chunks_that_fails_midway_leaves_nothing() {
    alone(|sim| {
        let device = device(0);
        let bound = device.bind_current().unwrap();
        if let Some((handle, descriptors, ..)) = received() {
            let copies = |fds: &[OwnedFd]| fds.iter().map(|fd| fd.try_clone().unwrap()).collect();
            for fault in ["cuMemMap:2=205", "cuMemImportFromShareableHandle:2=304", "cuMemSetAccess:1=1"] {
                sim.plan_faults(fault).unwrap();
                let error = bound.import_ipc(&handle, copies(&descriptors)).map(drop).unwrap_err();
                assert_eq!(error.kind(), Kind::ImportRefused, "{fault}: {error}");
                let text = error.to_string();
                assert!(
                    text.contains(&handle.device.to_string()) && text.contains(&handle.exporter.to_string())
                );
                assert_eq!(sim.open_imports(), Ok(0), "{fault}");
                assert_eq!(sim.count("cuMemAddressReserve"), sim.count("cuMemAddressFree"), "{fault}");
                sim.clear_faults().unwrap();
                sim.clear_log().unwrap();
            }
            drop(bound.import_ipc(&handle, descriptors).unwrap());
            return;
        }
        let memory = expandable(&sim, 0, &[2 * MIB, 2 * MIB], true);
        send(&export(&bound, memory));
    });
}

#[test]
fn what_the_driver_refuses_to_open_keeps_its_code() {
    alone(|sim| {
        let device = device(0);
        let bound = device.bind_current().unwrap();
        if let Some((handle, descriptors, ..)) = received() {
            sim.plan_faults("cuIpcOpenMemHandle_v2:1=205").unwrap();
            let error = bound.import_ipc(&handle, descriptors).map(drop).unwrap_err();
            assert_eq!((error.kind(), error.vendor_code()), (Kind::ImportRefused, Some(205)));
            assert!(
                error.vendor_text().is_some_and(|text| text.contains("CUDA_ERROR_MAP_FAILED")),
                "{error}"
            );
            return;
        }
        let memory = bound.allocate(4096).unwrap();
        send(&export(&bound, memory.region()));
    });
}

#[test]
fn what_cannot_be_exported_says_why() {
    alone(|sim| reasons_are_told(&sim));
}

/// Such a driver knows fewer pointer attributes.
#[test]
fn an_older_driver_says_why_too() {
    let setup = Setup { env: vec![("HAULIER_SIM_DRIVER_VERSION", "11040")], ..Setup::default() };
    alone_with(setup, |sim| reasons_are_told(&sim));
}

fn reasons_are_told(sim: &Control) {
    let device = device(0);
    let bound = device.bind_current().unwrap();
    let heap = pattern(64);
    assert_eq!(reason(&bound, crate::common::host(&heap)), NotExportable::HostMemory);
    let unshareable = expandable(sim, 0, &[2 * MIB], false);
    assert_eq!(reason(&bound, unshareable), NotExportable::NoHandleType);
    let too_many = expandable(sim, 0, &[2 * MIB; 129], true);
    assert_eq!(reason(&bound, too_many), NotExportable::TooManyParts);
    assert_eq!(export(&bound, too_many.part(0, 256 * MIB).unwrap()).descriptors.len(), 128);
    let (mut pool, mut managed) = (0u64, 0u64);
    cu!(sim, cuMemAllocAsync(&mut pool => *mut u64, 4096 => usize, 0 => usize));
    cu!(sim, cuMemAllocManaged(&mut managed => *mut u64, 4096 => usize, 1 => u32));
    assert_eq!(reason(&bound, device.region(pool as usize, 64)), NotExportable::Pool);
    assert_eq!(reason(&bound, device.region(managed as usize, 64)), NotExportable::Managed);
    sim.plan_faults("cuIpcGetMemHandle:1=801").unwrap();
    let memory = bound.allocate(4096).unwrap();
    assert_eq!(reason(&bound, memory.region()), NotExportable::Device);
}

#[test]
fn exports_of_freed_memory_are_forgotten() {
    alone(|sim| {
        let device = device(0);
        let bound = device.bind_current().unwrap();
        let kept = bound.allocate(4096).unwrap();
        let handle = export(&bound, kept.region()).handle;
        for _ in 0..3000 {
            let memory = bound.allocate(4096).unwrap();
            export(&bound, memory.region());
        }
        assert_eq!(bound.import_ipc(&handle, vec![]).unwrap().region(), kept.region());
        assert_eq!(sim.live_allocations(), Ok(1));
    });
}

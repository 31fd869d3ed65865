//! What becomes of a CANN that is not all there.

use std::{env, thread, time::Duration};

use backend_ascend::AscendDevice;
use hal::{Deadline, Device, DeviceExt, Export, Kind, Memory, NotExportable, Presence};

use crate::common::{
    Setup, acl, alone, alone_with, device, enter, host, pages, patient, pattern, read, stream, write,
};

fn mode(mode: &'static str) -> Setup {
    Setup { env: vec![("HAULIER_SIM_MODE", mode)], ..Setup::default() }
}

/// Opening fails, and the listing says why.
fn refused() -> hal::Error {
    let error = AscendDevice::all().unwrap_err();
    let (presence, devices) = backend_ascend::devices();
    assert!(devices.is_empty());
    let Presence::Broken { error: listed, .. } = presence else { panic!("{presence}") };
    assert_eq!(listed.to_string(), error.to_string());
    error
}

#[test]
fn probing_initialises_nothing() {
    alone(|sim| {
        assert!(matches!(backend_ascend::probe(), Presence::Present { .. }));
        assert_eq!(sim.log().len(), 0);
    });
}

#[test]
fn listing_binds_nothing() {
    alone(|sim| {
        let (presence, devices) = backend_ascend::devices();
        assert!(matches!(presence, Presence::Present { .. }));
        assert_eq!(devices.len(), 2);
        assert_ne!(devices[0].identity().uuid, devices[1].identity().uuid);
        assert_eq!(devices[0].identity().name, "Ascend910B3");
        assert_eq!((sim.count("aclInit"), sim.count("aclrtSetDevice")), (1, 0));
    });
}

#[test]
fn no_device_is_not_present_with_a_remedy() {
    for env in [("HAULIER_SIM_DEVICES", "0"), ("ASCEND_RT_VISIBLE_DEVICES", "")] {
        alone_with(Setup { env: vec![env], ..Setup::default() }, |_| {
            let error = refused();
            assert_eq!(error.kind(), Kind::NotPresent);
            assert!(error.to_string().contains("ASCEND_RT_VISIBLE_DEVICES"), "{error}");
        });
    }
}

#[test]
fn a_status_that_nobody_knows_is_an_error_of_the_driver() {
    alone_with(mode("unknown"), |_| {
        let error = refused();
        assert_eq!((error.kind(), error.vendor_code()), (Kind::Driver, Some(999999)));
    });
}

#[test]
fn an_absent_library_is_an_answer() {
    alone(|_| {
        // SAFETY: the process has one thread that reads its environment, this one.
        unsafe { env::set_var("HAULIER_ASCENDCL", "/nowhere/libascendcl.so") };
        assert!(matches!(backend_ascend::devices().0, Presence::Absent { .. }));
        let error = AscendDevice::all().unwrap_err();
        assert_eq!(error.kind(), Kind::NotPresent);
        assert!(error.to_string().contains("/nowhere/libascendcl.so"), "{error}");
    });
}

#[test]
fn a_missing_function_is_named() {
    let setup = Setup { without: &["aclrtMalloc", "aclrtMallocHost"], ..Setup::default() };
    alone_with(setup, |_| {
        let error = refused();
        assert_eq!(error.kind(), Kind::Unsupported);
        assert!(error.to_string().contains("lacks aclrtMalloc, aclrtMallocHost;"), "{error}");
    });
}

/// All that a device can be served without.
const OPTIONAL: &[&str] = &[
    "aclsysGetVersionNum",
    "aclrtGetLogicDevIdByUserDevId",
    "aclrtGetPhyDevIdByLogicDevId",
    "aclrtStreamQuery",
    "aclrtSynchronizeStreamWithTimeout",
    "aclrtStreamGetFlags",
    "aclmdlRICaptureGetInfo",
    "aclmdlRICaptureThreadExchangeMode",
    "aclrtPointerGetAttributes",
    "aclrtHostRegister",
    "aclrtHostUnregister",
    "aclrtIpcMemGetExportKey",
    "aclrtIpcMemImportByKey",
    "aclrtIpcMemClose",
    "aclrtMemRetainAllocationHandle",
    "aclrtFreePhysical",
    "aclrtMemExportToShareableHandle",
    "aclrtMemImportFromShareableHandle",
    "aclrtReserveMemAddress",
    "aclrtReleaseMemAddress",
    "aclrtMapMem",
    "aclrtUnmapMem",
    "aclrtMemSetAccess",
];

#[test]
fn a_cann_without_the_optional_functions_does_all_the_rest() {
    alone_with(Setup { without: OPTIONAL, ..Setup::default() }, |sim| {
        let device = device(0);
        enter(&sim, 0);
        let bound = device.bind_current().unwrap();
        let caps = device.caps();
        assert!(!caps.ipc_export && !caps.ipc_import && !caps.register_host && caps.register_device);
        let memory = bound.allocate(10 << 20).unwrap();
        let bytes = pattern(10 << 20);
        write(&bound, memory.region(), &bytes);
        assert!(read(&bound, memory.region()) == bytes);
        assert_eq!(bound.export_ipc(memory.region()).unwrap_err().kind(), Kind::Unsupported);
        assert_eq!(bound.register(pages(4096)).unwrap_err().kind(), Kind::Unsupported);
        // What is not ours cannot be told from the host's, and is not.
        let located = bound.locate(memory.region().addr, 64).unwrap();
        assert_eq!(located.allocation.unwrap().base, memory.region().addr);
        let error = bound.locate(host(&bytes).addr, 64).unwrap_err();
        assert_eq!(error.kind(), Kind::Unsupported);
        assert!(error.to_string().contains("aclrtPointerGetAttributes"), "{error}");
        let stream = stream(&sim);
        for deadline in [Deadline::NEVER, patient()] {
            bound.sync_stream(stream, deadline).unwrap();
        }
        assert_eq!(device.failed_drops(), 0);
    });
}

/// Without its place in the machine a device has an identity of the process's alone, and shares nothing by mistake.
#[test]
fn a_device_whose_place_is_unknown_shares_nothing() {
    alone_with(Setup { without: &["aclrtGetPhyDevIdByLogicDevId"], ..Setup::default() }, |_| {
        let (first, second) = (device(0), device(1));
        assert_eq!(first.identity().physical, None);
        assert_ne!(first.identity().uuid, second.identity().uuid);
        assert!(!first.caps().ipc_export && !first.caps().ipc_import);
    });
}

#[test]
fn without_a_limit_of_its_own_a_wait_is_polled() {
    alone_with(Setup { without: &["aclrtSynchronizeStreamWithTimeout"], ..Setup::default() }, |sim| {
        let device = device(0);
        enter(&sim, 0);
        let bound = device.bind_current().unwrap();
        let (stream, memory) = (stream(&sim), bound.allocate(4096).unwrap());
        sim.hold(stream.raw() as u64).unwrap();
        sim.fill(stream.raw() as u64, memory.region().addr as u64, 4096, 9).unwrap();
        for deadline in [Deadline::passed(), Deadline::after(Duration::from_millis(30))] {
            assert_eq!(bound.sync_stream(stream, deadline).unwrap_err().kind(), Kind::Timeout);
        }
        assert_eq!(sim.count("aclrtSynchronizeStream"), 0);
        thread::scope(|scope| {
            let waiter = scope.spawn(|| device.bound(|bound| bound.sync_stream(stream, patient())));
            sim.wait_for_calls("aclrtStreamQuery", 40);
            sim.release(stream.raw() as u64).unwrap();
            waiter.join().unwrap().unwrap();
        });
        assert_eq!(sim.peek(memory.region().addr as u64, 4096), Ok(vec![9; 4096]));
    });
}

#[test]
fn without_keys_ordinary_memory_goes_by_staging() {
    alone_with(Setup { without: &["aclrtIpcMemGetExportKey"], ..Setup::default() }, |_| {
        let device = device(0);
        let memory = device.buffer(4096).unwrap();
        let export = device.bound(|bound| bound.export_ipc(memory.region()));
        // Before CANN 9 mappings cannot be found either, so that nothing is shared at all.
        match export {
            Err(error) => assert!(!crate::common::is_9() && error.kind() == Kind::Unsupported, "{error}"),
            Ok(export) => {
                assert!(matches!(export, Export::NotExportable(NotExportable::Device)), "{export:?}")
            }
        }
    });
}

#[test]
fn a_version_is_told_where_a_function_is_missing_later() {
    alone_with(Setup { without: &["aclrtPointerGetAttributes"], ..Setup::default() }, |sim| {
        acl!(sim, aclrtSetDevice(0 => i32));
        let error = device(0).bind_current().unwrap().locate(0x1000, 1).unwrap_err();
        let release = if crate::common::is_9() { "9.0.0" } else { "8.5.0" };
        assert!(error.to_string().contains(release), "{error}");
    });
}

//! What becomes of a driver that is not all there.

use std::env;

use backend_cuda::CudaDevice;
use hal::{Device, Kind, Memory, NotExportable, Presence};

use crate::common::{Setup, alone, alone_with, device, host, pattern, read, write};

fn mode(mode: &'static str) -> Setup {
    Setup { env: vec![("HAULIER_SIM_MODE", mode)], ..Setup::default() }
}

/// Opening fails, and the listing says why.
fn refused() -> hal::Error {
    let error = CudaDevice::all().unwrap_err();
    let (presence, devices) = backend_cuda::devices();
    assert!(devices.is_empty());
    let Presence::Broken { error: listed, .. } = presence else { panic!("{presence}") };
    assert_eq!(listed.to_string(), error.to_string());
    error
}

#[test]
fn probing_initialises_nothing() {
    alone(|sim| {
        assert!(matches!(backend_cuda::probe(), Presence::Present { .. }));
        assert_eq!(sim.log().len(), 0);
    });
}

#[test]
fn listing_creates_no_context() {
    alone(|sim| {
        let (presence, devices) = backend_cuda::devices();
        assert!(matches!(presence, Presence::Present { .. }));
        assert_eq!(devices.len(), 2);
        assert_ne!(devices[0].identity().uuid, devices[1].identity().uuid);
        assert_eq!((sim.count("cuInit"), sim.count("cuDevicePrimaryCtxRetain")), (1, 0));
    });
}

#[test]
fn no_device_is_not_present_with_a_remedy() {
    alone_with(mode("no-device"), |_| {
        let error = refused();
        assert_eq!((error.kind(), error.vendor_code()), (Kind::NotPresent, Some(100)));
        assert!(error.to_string().contains("CUDA_VISIBLE_DEVICES"), "{error}");
    });
}

#[test]
fn a_stub_that_looks_like_a_driver_is_found_out() {
    alone_with(mode("stub"), |_| {
        let error = refused();
        assert_eq!((error.kind(), error.vendor_code()), (Kind::NotPresent, Some(34)));
        assert!(error.to_string().contains("stub"), "{error}");
    });
}

#[test]
fn a_status_that_nobody_knows_is_an_error_of_the_driver() {
    alone_with(mode("unknown"), |_| {
        let error = refused();
        assert_eq!(
            (error.kind(), error.vendor_code(), error.vendor_text()),
            (Kind::Driver, Some(9999), None)
        );
    });
}

#[test]
fn an_absent_library_is_an_answer() {
    alone(|_| {
        // SAFETY: the process has one thread that reads its environment, this one.
        unsafe { env::set_var("HAULIER_LIBCUDA", "/nowhere/libcuda.so.1") };
        assert!(matches!(backend_cuda::devices().0, Presence::Absent { .. }));
        let error = CudaDevice::all().unwrap_err();
        assert_eq!(error.kind(), Kind::NotPresent);
        assert!(error.to_string().contains("/nowhere/libcuda.so.1"), "{error}");
    });
}

#[test]
fn a_missing_function_is_named_with_the_drivers_version() {
    let setup = Setup { without: &["cuEventQuery"], ..Setup::default() };
    alone_with(setup, |_| {
        let error = refused();
        assert_eq!(error.kind(), Kind::Unsupported);
        let text = error.to_string();
        assert!(text.contains("cuEventQuery") && text.contains("CUDA 12.8"), "{text}");
    });
}

#[test]
fn a_driver_without_the_optional_functions_does_all_the_rest() {
    const WITHOUT: &[&str] = &[
        "cuIpcGetMemHandle",
        "cuMemExportToShareableHandle",
        "cuMemImportFromShareableHandle",
        "cuMemHostRegister_v2",
        "cuMemHostAlloc",
        "cuDeviceGetUuid_v2",
    ];
    alone_with(Setup { without: WITHOUT, ..Setup::default() }, |_| {
        let device = device(0);
        let bound = device.bind_current().unwrap();
        let caps = device.caps();
        assert!(!caps.ipc_export && !caps.ipc_import && !caps.register_host && caps.register_device);
        let memory = bound.allocate(10 << 20).unwrap();
        let bytes = pattern(10 << 20);
        write(&bound, memory.region(), &bytes);
        assert!(read(&bound, memory.region()) == bytes);
        assert_eq!(bound.export_ipc(memory.region()).unwrap_err().kind(), Kind::Unsupported);
        assert_eq!(bound.register(host(&bytes)).unwrap_err().kind(), Kind::Unsupported);
    });
}

#[test]
fn without_legacy_handles_ordinary_memory_goes_by_staging() {
    let setup = Setup { without: &["cuIpcOpenMemHandle_v2"], ..Setup::default() };
    alone_with(setup, |_| {
        let device = device(0);
        let bound = device.bind_current().unwrap();
        assert!(device.caps().ipc_export, "virtual memory still has handles");
        let memory = bound.allocate(4096).unwrap();
        let export = bound.export_ipc(memory.region()).unwrap();
        assert!(matches!(export, hal::Export::NotExportable(NotExportable::Device)), "{export:?}");
    });
}

#[test]
fn devices_are_found_by_uuid_whatever_their_number_here() {
    let setup = Setup { env: vec![("CUDA_VISIBLE_DEVICES", "1,0")], ..Setup::default() };
    alone_with(setup, |_| {
        for found in CudaDevice::all().unwrap() {
            let again = CudaDevice::with_uuid(found.identity().uuid).unwrap();
            assert_eq!(again.identity(), found.identity());
        }
        assert_eq!(CudaDevice::with_uuid(hal::DeviceUuid([7; 16])).unwrap_err().kind(), Kind::InvalidDevice);
        assert_eq!(CudaDevice::open(hal::LogicalId(2)).unwrap_err().kind(), Kind::InvalidDevice);
    });
}

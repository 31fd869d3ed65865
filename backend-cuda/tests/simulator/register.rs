//! Registration: what the driver is told, and what it is not.

use std::ptr;

use hal::{Device, Kind, Memory, Region};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use crate::common::{Setup, alone, alone_with, cu, device, host, pattern, write};

const GIB: usize = 1 << 30;

/// Address space without memory behind it.
fn space(len: usize) -> Region {
    // SAFETY: a fresh mapping where the kernel likes.
    let addr = unsafe {
        mmap_anonymous(ptr::null_mut(), len, ProtFlags::READ, MapFlags::PRIVATE | MapFlags::NORESERVE)
    };
    Region::host(addr.unwrap().expose_provenance(), len)
}

#[test]
fn host_memory_is_registered_in_parts_that_the_driver_takes() {
    alone(|sim| {
        let device = device(0);
        let bound = device.bind_current().unwrap();
        let region = space(150 * GIB);
        let guard = bound.register(region).unwrap();
        assert_eq!(sim.count("cuMemHostRegister_v2"), 3);
        assert_eq!((sim.registrations(), device.registrations()), (Ok(3), 1));
        drop(guard);
        assert_eq!((sim.registrations(), device.registrations()), (Ok(0), 0));
        sim.plan_faults("cuMemHostRegister_v2:3=2").unwrap();
        assert_eq!(bound.register(region).unwrap_err().kind(), Kind::OutOfMemory);
        assert_eq!((sim.registrations(), device.registrations()), (Ok(0), 0), "rolled back whole");
        // SAFETY: the mapping is the test's own and unused.
        unsafe { munmap(ptr::with_exposed_provenance_mut(region.addr), region.len) }.unwrap();
    });
}

#[test]
fn memory_that_the_application_pinned_is_usable_as_it_is() {
    alone(|sim| {
        let device = device(0);
        let bound = device.bind_current().unwrap();
        let mut addr = 0usize;
        cu!(sim, cuMemHostAlloc(&mut addr => *mut usize, 1 << 20 => usize, 1 => u32));
        let guard = bound.register(Region::host(addr + 4096, 8192)).unwrap();
        assert_eq!(sim.count("cuMemHostRegister_v2"), 0);
        drop(guard);
        assert_eq!(sim.count("cuMemHostUnregister"), 0, "it is not ours to take back");
        assert_eq!(sim.registrations(), Ok(1));
        cu!(sim, cuMemFreeHost(addr => usize));
    });
}

#[test]
fn all_devices_share_the_registrations_of_host_memory() {
    alone(|sim| {
        let bytes = pattern(8192);
        let (first, second) = (device(0), device(1));
        let one = first.bind_current().unwrap().register(host(&bytes)).unwrap();
        let two = second.bind_current().unwrap().register(host(&bytes)).unwrap();
        assert_eq!(sim.count("cuMemHostRegister_v2"), 1);
        drop((one, first));
        assert_eq!(
            (sim.registrations(), sim.retained(0)),
            (Ok(1), Ok(1)),
            "its context holds the registration"
        );
        drop(two);
        assert_eq!((sim.registrations(), sim.retained(0)), (Ok(0), Ok(0)));
        let devices: Vec<_> = sim.calls("cuMemHostUnregister").into_iter().map(|call| call.device).collect();
        assert_eq!(devices, [Some(0)], "the one that pinned it");
    });
}

#[test]
fn registrations_that_share_a_page_are_told_apart_from_failures() {
    let setup = Setup { env: vec![("HAULIER_SIM_REGISTER_PAGES", "1")], ..Setup::default() };
    alone_with(setup, |_| {
        let device = device(0);
        let bound = device.bind_current().unwrap();
        let region = space(8192);
        let _guard = bound.register(region.part(0, 1024).unwrap()).unwrap();
        let error = bound.register(region.part(2048, 1024).unwrap()).unwrap_err();
        assert_eq!((error.kind(), error.vendor_code()), (Kind::Overlap, Some(712)));
    });
}

#[test]
fn device_memory_is_counted_without_a_call_to_pin_it() {
    alone(|sim| {
        let device = device(0);
        let bound = device.bind_current().unwrap();
        let memory = bound.allocate(8192).unwrap();
        let guards = [0, 1].map(|_| bound.register(memory.region()).unwrap());
        assert_eq!((device.registrations(), sim.count("cuMemHostRegister_v2")), (1, 0));
        drop(guards);
        assert_eq!(device.registrations(), 0);
        let beyond = Region { len: 8193, ..memory.region() };
        assert_eq!(bound.register(beyond).unwrap_err().kind(), Kind::InvalidRange);
        write(&bound, memory.region(), &pattern(8192));
    });
}

#[test]
fn a_thousand_unbound_threads_register_and_deregister() {
    alone(|sim| {
        let bytes = pattern(4096);
        let device = device(0);
        for _ in 0..1000 {
            std::thread::scope(|scope| {
                scope.spawn(|| drop(device.bind_current().unwrap().register(host(&bytes)).unwrap()));
            });
        }
        assert_eq!((sim.count("cuMemHostRegister_v2"), sim.count("cuMemHostUnregister")), (1000, 1000));
        assert_eq!(sim.count("cuCtxPushCurrent_v2"), sim.count("cuCtxPopCurrent_v2"));
        assert_eq!(device.failed_drops(), 0);
    });
}

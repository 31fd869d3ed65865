//! Registration: what ACL is told, and what it is not.

use hal::{Device, DeviceExt, Kind, Memory, Region};

use crate::common::{Setup, acl, alone, alone_with, device, enter, pages};

#[test]
fn host_memory_is_counted_aligned_and_taken_back() {
    alone(|sim| {
        let device = device(0);
        enter(&sim, 0);
        let bound = device.bind_current().unwrap();
        let region = pages(64 << 10);
        let guards = [0, 1].map(|_| bound.register(region).unwrap());
        assert_eq!((sim.count("aclrtHostRegister"), device.registrations()), (1, 1));
        assert_eq!(bound.register(region.part(4096, 4096).unwrap()).unwrap_err().kind(), Kind::Overlap);
        let odd = bound.register(region.part(64, 64).unwrap()).unwrap_err();
        assert_eq!(odd.kind(), Kind::InvalidArgument);
        assert!(odd.to_string().contains("4096"), "{odd}");
        assert_eq!(sim.count("aclrtHostRegister"), 1, "refused before it was asked");
        drop(guards);
        assert_eq!((sim.count("aclrtHostUnregister"), sim.registrations()), (1, Ok(0)));
        assert_eq!((device.registrations(), device.failed_drops()), (0, 0));
    });
}

#[test]
fn a_large_region_is_split_and_rolled_back_whole() {
    alone(|sim| {
        let device = device(0);
        enter(&sim, 0);
        let bound = device.bind_current().unwrap();
        let region = pages(150 << 30);
        let guard = bound.register(region).unwrap();
        assert_eq!((sim.count("aclrtHostRegister"), sim.registrations()), (3, Ok(3)));
        drop(guard);
        assert_eq!((sim.registrations(), device.registrations()), (Ok(0), 0));
        sim.plan_faults("aclrtHostRegister:3=207001").unwrap();
        assert_eq!(bound.register(region).unwrap_err().kind(), Kind::OutOfMemory);
        assert_eq!((sim.registrations(), device.registrations()), (Ok(0), 0), "rolled back whole");
        assert_eq!(device.failed_drops(), 0);
    });
}

#[test]
fn what_the_application_pinned_is_usable_and_stays_its_own() {
    alone(|sim| {
        let device = device(0);
        enter(&sim, 0);
        let bound = device.bind_current().unwrap();
        let mut pinned = 0usize;
        acl!(sim, aclrtMallocHost(&mut pinned => *mut usize, 1 << 20 => usize));
        let (registered, mut there) = (pages(8192), 0usize);
        acl!(sim, aclrtHostRegister(
            registered.addr => usize, 8192 => u64, 0 => i32, &mut there => *mut usize
        ));
        for region in [Region::host(pinned, 1 << 20), registered] {
            drop(bound.register(region).unwrap());
        }
        assert_eq!((sim.count("aclrtHostUnregister"), sim.registrations()), (0, Ok(2)));
        acl!(sim, aclrtHostUnregister(registered.addr => usize));
        acl!(sim, aclrtFreeHost(pinned => usize));
        assert_eq!(device.failed_drops(), 0);
    });
}

/// A part of what is asked for is registered by somebody else: that is an overlap, not success.
#[test]
fn a_registration_of_others_in_part_is_an_overlap() {
    alone(|sim| {
        let device = device(0);
        enter(&sim, 0);
        let bound = device.bind_current().unwrap();
        let (region, mut there) = (pages(16384), 0usize);
        acl!(sim, aclrtHostRegister(
            region.addr + 4096 => usize, 4096 => u64, 0 => i32, &mut there => *mut usize
        ));
        let error = bound.register(region).unwrap_err();
        assert_eq!((error.kind(), error.vendor_code()), (Kind::Overlap, Some(507910)));
        assert_eq!(device.registrations(), 0);
    });
}

#[test]
fn all_devices_share_the_registrations_of_host_memory() {
    alone(|sim| {
        let region = pages(8192);
        let (first, second) = (device(0), device(1));
        let one = first.bound(|bound| bound.register(region)).unwrap();
        let two = second.bound(|bound| bound.register(region)).unwrap();
        assert_eq!(sim.count("aclrtHostRegister"), 1);
        drop(one);
        assert_eq!(sim.registrations(), Ok(1));
        drop(two);
        assert_eq!(sim.registrations(), Ok(0));
        let devices: Vec<_> = sim.calls("aclrtHostUnregister").into_iter().map(|call| call.device).collect();
        assert_eq!(devices, [Some(0)], "the one that registered it");
        assert_eq!(first.failed_drops(), 0);
    });
}

#[test]
fn a_runtime_that_takes_pinned_memory_only_says_so() {
    let setup = Setup { env: vec![("HAULIER_SIM_REGISTER_PINNED_ONLY", "1")], ..Setup::default() };
    alone_with(setup, |sim| {
        let device = device(0);
        enter(&sim, 0);
        let bound = device.bind_current().unwrap();
        assert_eq!(bound.register(pages(4096)).unwrap_err().kind(), Kind::Unsupported);
        let mut pinned = 0usize;
        acl!(sim, aclrtMallocHost(&mut pinned => *mut usize, 8192 => usize));
        drop(bound.register(Region::host(pinned, 8192)).unwrap());
        assert_eq!(device.failed_drops(), 0);
    });
}

#[test]
fn device_memory_is_counted_without_a_call() {
    alone(|sim| {
        let device = device(0);
        enter(&sim, 0);
        let bound = device.bind_current().unwrap();
        let memory = bound.allocate(8192).unwrap();
        let guards = [0, 1].map(|_| bound.register(memory.region()).unwrap());
        assert_eq!((device.registrations(), sim.count("aclrtHostRegister")), (1, 0));
        drop(guards);
        assert_eq!(device.registrations(), 0);
        let beyond = Region { len: 8193, ..memory.region() };
        assert_eq!(bound.register(beyond).unwrap_err().kind(), Kind::InvalidRange);
    });
}

#[test]
fn threads_without_a_context_register_and_deregister() {
    alone(|sim| {
        let (device, region) = (device(1), pages(4096));
        for _ in 0..300 {
            std::thread::scope(|scope| {
                scope.spawn(|| drop(device.bound(|bound| bound.register(region)).unwrap()));
            });
        }
        for call in ["aclrtHostRegister", "aclrtHostUnregister"] {
            assert_eq!(sim.count(call), 300);
            assert!(sim.calls(call).iter().all(|call| call.device == Some(1) && call.status == Some(0)));
        }
        assert_eq!((sim.count("aclrtSetDevice"), device.failed_drops()), (1, 0));
    });
}

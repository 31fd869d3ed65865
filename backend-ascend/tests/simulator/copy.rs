//! Copies: pinned, staged, and what is refused.

use std::sync::Barrier;

use hal::{Device, DeviceExt, Kind, Memory, Region};

use crate::common::{
    Setup, acl, alone, alone_with, current, device, enter, expandable, host, pages, pattern, read, write,
};

/// More than two staging halves, and no multiple of anything.
const LARGE: usize = (13 << 20) + 77;

#[test]
fn a_large_pageable_copy_goes_through_pinned_memory() {
    alone(|sim| {
        let device = device(0);
        enter(&sim, 0);
        let bound = device.bind_current().unwrap();
        let memory = bound.allocate(LARGE).unwrap();
        let bytes = pattern(LARGE);
        write(&bound, memory.region(), &bytes);
        assert_eq!(sim.count("aclrtMemcpyAsync"), 4, "one for each staging half");
        assert!(read(&bound, memory.region()) == bytes);
        assert_eq!(sim.count("aclrtMallocHost"), 1, "one lane served both");
    });
}

/// Such a driver calls all host memory the host's, and moves what is not pinned before it returns.
#[test]
fn an_older_driver_copies_too() {
    let setup = Setup { env: vec![("HAULIER_SIM_OLD_DRIVER", "1")], ..Setup::default() };
    alone_with(setup, |sim| {
        let device = device(0);
        enter(&sim, 0);
        let bound = device.bind_current().unwrap();
        let memory = bound.allocate(LARGE).unwrap();
        let bytes = pattern(LARGE);
        write(&bound, memory.region(), &bytes);
        assert!(read(&bound, memory.region()) == bytes);
    });
}

#[test]
fn pinned_memory_is_not_staged() {
    alone(|sim| {
        let device = device(0);
        enter(&sim, 0);
        let bound = device.bind_current().unwrap();
        let memory = bound.allocate(1 << 20).unwrap();
        let registered = pages(1 << 20);
        let _guard = bound.register(registered).unwrap();
        let mut pinned = 0usize;
        acl!(sim, aclrtMallocHost(&mut pinned => *mut usize, 1 << 20 => usize));
        sim.clear_log().unwrap();
        for source in [registered, Region::host(pinned, 1 << 20)] {
            // SAFETY: both are allocated and left alone.
            unsafe { bound.copy(memory.region(), source) }.unwrap();
        }
        assert_eq!((sim.count("aclrtMallocHost"), sim.count("aclrtMemcpyAsync")), (0, 2));
    });
}

#[test]
fn memory_that_is_registered_in_part_is_copied_whole() {
    alone(|sim| {
        let device = device(0);
        enter(&sim, 0);
        let bound = device.bind_current().unwrap();
        let (memory, region) = (bound.allocate(8 << 20).unwrap(), pages(8 << 20));
        let _guards = [(0, 1 << 20), (3 << 20, 2 << 20)]
            .map(|(offset, len)| bound.register(region.part(offset, len).unwrap()).unwrap());
        let bytes = pattern(8 << 20);
        write(&bound, memory.region(), &bytes);
        // SAFETY: both are allocated and left alone.
        unsafe { bound.copy(region, memory.region()) }.unwrap();
        bound.allocate(8 << 20).map(drop).unwrap();
        let back = bound.allocate(8 << 20).unwrap();
        // SAFETY: as above.
        unsafe { bound.copy(back.region(), region) }.unwrap();
        assert!(sim.peek(back.region().addr as u64, 8 << 20).unwrap() == bytes);
    });
}

#[test]
fn a_copy_that_fails_midway_is_settled_and_the_next_one_works() {
    alone(|sim| {
        let device = device(0);
        enter(&sim, 0);
        let bound = device.bind_current().unwrap();
        let (memory, bytes) = (bound.allocate(LARGE).unwrap(), pattern(LARGE));
        sim.plan_faults("aclrtMemcpyAsync:2=507899").unwrap();
        // SAFETY: both are allocated and left alone.
        let error = unsafe { bound.copy(memory.region(), host(&bytes)) }.unwrap_err();
        assert_eq!((error.kind(), error.vendor_code()), (Kind::Driver, Some(507899)));
        assert_eq!(sim.count("aclrtDestroyStream"), 2, "a lane that failed is not used again");
        assert_eq!(sim.count("aclrtFreeHost"), 1);
        write(&bound, memory.region(), &bytes);
        assert!(read(&bound, memory.region()) == bytes);
    });
}

#[test]
fn device_memory_given_as_host_memory_is_refused_and_not_touched() {
    alone(|sim| {
        let device = device(0);
        enter(&sim, 0);
        let bound = device.bind_current().unwrap();
        let (own, bytes) = (bound.allocate(4096).unwrap(), pattern(4096));
        let foreign = crate::common::foreign(&sim, device, 4096);
        for memory in [own.region(), foreign] {
            let disguised = Region::host(memory.addr, 4096);
            for (to, from) in [(memory, disguised), (disguised, host(&bytes)), (host(&bytes), disguised)] {
                // SAFETY: both are allocated and left alone.
                let error = unsafe { bound.copy(to, from) }.unwrap_err();
                assert_eq!(error.kind(), Kind::DeviceMismatch, "{error}");
            }
        }
    });
}

/// The question fails on older systems for memory that ACL did not allocate.
#[test]
fn host_memory_that_cannot_be_asked_about_is_copied_all_the_same() {
    alone(|sim| {
        let device = device(0);
        enter(&sim, 0);
        let bound = device.bind_current().unwrap();
        let (memory, bytes) = (bound.allocate(4096).unwrap(), pattern(4096));
        sim.plan_faults("aclrtPointerGetAttributes=507899").unwrap();
        write(&bound, memory.region(), &bytes);
        assert!(read(&bound, memory.region()) == bytes);
        assert_eq!(bound.locate(host(&bytes).addr, 4096).unwrap_err().vendor_code(), Some(507899));
    });
}

#[test]
fn within_the_device_and_virtual_memory_too() {
    alone(|sim| {
        let device = device(0);
        enter(&sim, 0);
        let bound = device.bind_current().unwrap();
        let bytes = pattern(3 << 20);
        let (memory, there) = (bound.allocate(3 << 20).unwrap(), expandable(&sim, 0, &[2 << 20, 2 << 20]));
        write(&bound, memory.region(), &bytes);
        // SAFETY: both are allocated and left alone.
        unsafe { bound.copy(there.part(1 << 20, 3 << 20).unwrap(), memory.region()) }.unwrap();
        assert!(read(&bound, there.part(1 << 20, 3 << 20).unwrap()) == bytes);
    });
}

#[test]
fn copies_of_many_threads_share_a_few_lanes() {
    alone(|sim| {
        let device = device(0);
        let together = Barrier::new(16);
        std::thread::scope(|scope| {
            for i in 0..16u8 {
                let (device, together) = (&device, &together);
                scope.spawn(move || {
                    let memory = device.buffer(4096).unwrap();
                    let bound = device.bind_owned_thread().unwrap();
                    together.wait();
                    for round in 0..20 {
                        let bytes = [i.wrapping_add(round); 4096];
                        write(&bound, memory.region(), &bytes);
                        assert_eq!(read(&bound, memory.region()), bytes);
                    }
                });
            }
        });
        let count = |call| sim.count(call);
        let kept = count("aclrtMallocHost") - count("aclrtFreeHost");
        assert!((1..=8).contains(&kept), "{kept}");
        assert_eq!(count("aclrtCreateStreamWithConfig") - count("aclrtDestroyStream"), 2 * kept);
    });
}

#[test]
fn each_call_runs_with_the_memorys_device_current() {
    alone(|sim| {
        let (first, second) = (device(0), device(1));
        // An application's thread, with a device of its own.
        enter(&sim, 1);
        let theirs = current(&sim);
        for device in [&first, &second] {
            let memory = device.buffer(1 << 20).unwrap();
            let bytes = pattern(1 << 20);
            let bound = device.bind_current().unwrap();
            write(&bound, memory.region(), &bytes);
            bound.export_ipc(memory.region()).unwrap();
        }
        let astray: Vec<_> =
            sim.log().into_iter().filter(|call| call.owner.is_some() && call.owner != call.device).collect();
        // To set a context is how its device becomes current; the ids need none.
        let about_contexts = ["aclrtSetDevice", "aclrtSetCurrentContext", "aclrtGetLogicDevIdByUserDevId"];
        let astray: Vec<_> =
            astray.iter().filter(|call| !about_contexts.contains(&call.function.as_str())).collect();
        assert!(astray.is_empty(), "{astray:#?}");
        assert_eq!(current(&sim), theirs);
    });
}

//! Copies: pinned, staged, and across the borders between the two.

use std::sync::Barrier;

use hal::{Device, DeviceExt, Kind, Memory, Region};

use crate::common::{alone, cu, device, host, pattern, read, write};

/// More than two staging halves, and no multiple of anything.
const LARGE: usize = (13 << 20) + 77;

#[test]
fn a_large_pageable_copy_goes_through_pinned_memory() {
    alone(|sim| {
        let device = device(0);
        let bound = device.bind_current().unwrap();
        let memory = bound.allocate(LARGE).unwrap();
        let bytes = pattern(LARGE);
        write(&bound, memory.region(), &bytes);
        assert!(read(&bound, memory.region()) == bytes);
        assert_eq!(sim.count("cuMemHostAlloc"), 1, "one lane served both");
    });
}

#[test]
fn a_copy_crosses_the_borders_of_registered_memory() {
    alone(|sim| {
        let device = device(0);
        let bound = device.bind_current().unwrap();
        let memory = bound.allocate(LARGE).unwrap();
        let mut bytes = pattern(LARGE);
        let region = host(&bytes);
        // Two neighbours, with pageable memory before and behind.
        let parts = [(1 << 20, 3 << 20), (4 << 20, 5 << 20)];
        let _guards = parts.map(|(offset, len)| bound.register(region.part(offset, len).unwrap()).unwrap());
        // One call for each registered part, and one for each staging half that the pageable rest takes.
        for (offset, len, calls) in [(1 << 20, 8 << 20, 2), (2 << 20, 4 << 20, 2), (8 << 20, 3 << 20, 2)] {
            let (target, source) = (memory.region().part(0, len).unwrap(), region.part(offset, len).unwrap());
            sim.clear_log().unwrap();
            // SAFETY: both are allocated and left alone.
            unsafe { bound.copy(target, source) }.unwrap();
            assert_eq!(sim.count("cuMemcpyAsync"), calls, "{offset}+{len}");
            let there = sim.peek(target.addr as u64, len).unwrap();
            assert!(there == bytes[offset..offset + len], "{offset}+{len}");
        }
        write(&bound, memory.region(), &bytes);
        bytes.fill(0);
        // SAFETY: as above; the registered memory is the target now.
        unsafe { bound.copy(region, memory.region()) }.unwrap();
        assert!(bytes == pattern(LARGE));
    });
}

#[test]
fn registered_memory_is_not_staged() {
    alone(|sim| {
        let device = device(0);
        let bound = device.bind_current().unwrap();
        let (memory, bytes) = (bound.allocate(1 << 20).unwrap(), pattern(1 << 20));
        let _guard = bound.register(host(&bytes)).unwrap();
        write(&bound, memory.region(), &bytes);
        assert_eq!((sim.count("cuMemHostAlloc"), sim.count("cuMemcpyAsync")), (0, 1));
        assert!(read(&bound, memory.region()) == bytes);
    });
}

#[test]
fn a_copy_that_fails_midway_is_settled_and_the_next_one_works() {
    alone(|sim| {
        let device = device(0);
        let bound = device.bind_current().unwrap();
        let (memory, bytes) = (bound.allocate(LARGE).unwrap(), pattern(LARGE));
        sim.plan_faults("cuMemcpyAsync:2=700").unwrap();
        // SAFETY: both are allocated and left alone.
        let error = unsafe { bound.copy(memory.region(), host(&bytes)) }.unwrap_err();
        assert_eq!((error.kind(), error.vendor_code()), (Kind::Driver, Some(700)));
        assert_eq!(sim.count("cuStreamDestroy_v2"), 2, "a lane that failed is not used again");
        write(&bound, memory.region(), &bytes);
        assert!(read(&bound, memory.region()) == bytes);
    });
}

#[test]
fn device_memory_given_as_host_memory_is_refused_and_not_touched() {
    alone(|_| {
        let device = device(0);
        let bound = device.bind_current().unwrap();
        let (memory, bytes) = (bound.allocate(4096).unwrap(), pattern(4096));
        let disguised = Region::host(memory.region().addr, 4096);
        for (to, from) in [(memory.region(), disguised), (disguised, host(&bytes)), (host(&bytes), disguised)]
        {
            // SAFETY: both are allocated and left alone.
            let error = unsafe { bound.copy(to, from) }.unwrap_err();
            assert_eq!(error.kind(), Kind::DeviceMismatch, "{error}");
        }
    });
}

#[test]
fn copies_of_many_threads_share_a_few_lanes_and_all_are_closed() {
    alone(|sim| {
        let device = device(0);
        let together = Barrier::new(16);
        std::thread::scope(|scope| {
            for i in 0..16u8 {
                let (device, together) = (&device, &together);
                scope.spawn(move || {
                    let memory = device.buffer(4096).unwrap();
                    let bound = device.bind_current().unwrap();
                    together.wait();
                    for round in 0..20 {
                        let bytes = [i.wrapping_add(round); 4096];
                        write(&bound, memory.region(), &bytes);
                        assert_eq!(read(&bound, memory.region()), bytes);
                    }
                });
            }
        });
        drop(device);
        for (made, unmade) in [("cuStreamCreate", "cuStreamDestroy_v2"), ("cuMemHostAlloc", "cuMemFreeHost")]
        {
            assert!(sim.count(made) > 0);
            assert_eq!(sim.count(made), sim.count(unmade), "{made}");
        }
        assert_eq!(sim.retained(0), Ok(0));
    });
}

#[test]
fn each_call_runs_with_the_memorys_device_current() {
    alone(|sim| {
        let (first, second) = (device(0), device(1));
        let _application = second.bind_owned_thread().unwrap();
        for device in [&first, &second] {
            let memory = device.buffer(1 << 20).unwrap();
            let bytes = pattern(1 << 20);
            let bound = device.bind_current().unwrap();
            write(&bound, memory.region(), &bytes);
            bound.export_ipc(memory.region()).unwrap();
        }
        let astray: Vec<_> =
            sim.log().into_iter().filter(|call| call.owner.is_some() && call.owner != call.device).collect();
        // To push a context is how its device becomes current.
        let astray: Vec<_> = astray.iter().filter(|call| !call.function.starts_with("cuCtx")).collect();
        let astray: Vec<_> = astray.iter().filter(|call| !call.function.starts_with("cuDevice")).collect();
        assert!(astray.is_empty(), "{astray:#?}");
        let mut context = 0usize;
        cu!(sim, cuCtxGetCurrent(&mut context => *mut usize));
        assert_ne!(context, 0);
    });
}

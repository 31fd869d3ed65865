//! Contexts: retained once, made current and given back, and what becomes of guards without them.

use std::{io, os::unix::process::CommandExt, process::Command, thread, time::Duration};

use backend_cuda::CudaDevice;
use hal::{Device, DeviceExt, Kind, Memory};

use crate::common::{alone, cu, device, pattern};

#[test]
fn the_primary_context_is_retained_once_and_released_with_the_last_handle() {
    alone(|sim| {
        let device = device(0);
        sim.plan_faults("cuDevicePrimaryCtxRetain:1=hang").unwrap();
        let memory = thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(|| device.buffer(4096).unwrap())).collect();
            sim.wait_for_calls("cuDevicePrimaryCtxRetain", 1);
            // Time for the others to retain it too, if they would.
            thread::sleep(Duration::from_millis(50));
            sim.unblock().unwrap();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        });
        assert_eq!((sim.count("cuDevicePrimaryCtxRetain"), sim.retained(0)), (1, Ok(1)));
        // Another way to the same device.
        let again = CudaDevice::with_uuid(device.identity().uuid).unwrap();
        drop(again.bind_current().unwrap());
        drop((device, again));
        assert_eq!(sim.retained(0), Ok(1), "its memory is still there");
        drop(memory);
        assert_eq!((sim.count("cuDevicePrimaryCtxRelease_v2"), sim.retained(0)), (1, Ok(0)));
        assert_eq!(sim.live_allocations(), Ok(0));
    });
}

#[test]
fn binding_what_is_current_only_asks() {
    alone(|sim| {
        let device = device(0);
        let _outer = device.bind_current().unwrap();
        sim.clear_log().unwrap();
        drop(device.bind_current().unwrap());
        let calls: Vec<_> = sim.log().into_iter().map(|call| call.function).collect();
        assert_eq!(calls, ["cuCtxGetCurrent"]);
    });
}

#[test]
fn a_context_of_the_applications_comes_back() {
    alone(|sim| {
        let current = || {
            let mut context = 0usize;
            cu!(sim, cuCtxGetCurrent(&mut context => *mut usize));
            context
        };
        let (first, second) = (device(0), device(1));
        let owned = second.bind_owned_thread().unwrap();
        let theirs = current();
        assert_ne!(theirs, 0);
        let bound = first.bind_current().unwrap();
        assert_ne!(current(), theirs);
        // Whatever is done to the context meanwhile.
        cu!(sim, cuCtxSetCurrent(theirs => usize));
        drop(bound);
        assert_eq!(current(), theirs);
        // A context that somebody leaves on the thread's stack.
        let bound = first.bind_current().unwrap();
        cu!(sim, cuCtxPushCurrent_v2(theirs => usize));
        drop(bound);
        assert_eq!(current(), theirs);
        drop(owned);
        thread::scope(|scope| {
            scope.spawn(|| {
                drop(first.bind_current().unwrap());
                assert_eq!(current(), 0);
            });
        });
    });
}

#[test]
fn guards_are_given_back_with_their_device_current_from_any_thread() {
    alone(|sim| {
        let bytes = pattern(4096);
        for logical in [0, 1] {
            let device = device(logical);
            let bound = device.bind_current().unwrap();
            let memory = bound.allocate(4096).unwrap();
            let registration = bound.register(crate::common::host(&bytes)).unwrap();
            drop(bound);
            thread::scope(|scope| {
                scope.spawn(move || drop((registration, memory)));
            });
        }
        for call in ["cuMemFree_v2", "cuMemHostUnregister"] {
            let devices: Vec<_> = sim.calls(call).into_iter().map(|call| call.device).collect();
            assert_eq!(devices, [Some(0), Some(1)], "{call}");
        }
        assert_eq!(device(0).failed_drops(), 0);
    });
}

#[test]
fn what_cannot_be_given_back_is_counted() {
    alone(|sim| {
        let device = device(0);
        let memory = device.buffer(4096).unwrap();
        sim.plan_faults("cuMemFree_v2:1=999").unwrap();
        drop(memory);
        assert_eq!(device.failed_drops(), 1);
    });
}

#[test]
fn a_driver_that_has_shut_down_disturbs_no_drop() {
    alone(|sim| {
        let device = device(0);
        let bound = device.bind_current().unwrap();
        let memory = bound.allocate(4096).unwrap();
        let registration = bound.register(memory.region()).unwrap();
        sim.set_mode("unloaded").unwrap();
        assert_eq!(bound.allocate(1).unwrap_err().kind(), Kind::ShutDown);
        drop((registration, memory, bound));
        assert_eq!(device.bind_current().unwrap_err().kind(), Kind::ShutDown);
        assert_eq!(device.failed_drops(), 0);
    });
}

#[test]
fn a_forked_child_is_refused_and_the_parent_goes_on() {
    alone(|sim| {
        let device = device(0);
        let mut memory = Some(device.buffer(4096).unwrap());
        let in_child = device.clone();
        let mut command = Command::new("/nowhere");
        // SAFETY: the closure runs in the forked child, whose one thread it is; it allocates, which this libc's fork allows.
        unsafe {
            command.pre_exec(move || {
                let refused = [
                    in_child.bind_current().map(drop).unwrap_err(),
                    CudaDevice::all().map(drop).unwrap_err(),
                ];
                let as_expected = refused
                    .iter()
                    .all(|error| error.kind() == Kind::Unsupported && error.to_string().contains("forked"));
                // The child's copy of a guard does nothing.
                drop(memory.take());
                let as_expected = as_expected && in_child.failed_drops() == 0;
                Err(io::Error::from_raw_os_error(if as_expected { 77 } else { 78 }))
            });
        }
        assert_eq!(command.spawn().unwrap_err().raw_os_error(), Some(77));
        drop(command);
        assert_eq!(sim.live_allocations(), Ok(0));
        device.buffer(4096).unwrap();
    });
}

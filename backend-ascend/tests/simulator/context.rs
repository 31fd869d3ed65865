//! Contexts: obtained once, made current and given back, and threads that have none.

use std::{
    env, fs, io,
    os::unix::process::CommandExt,
    process::{self, Command},
    sync::Mutex,
    thread,
    time::Duration,
};

use backend_ascend::AscendDevice;
use hal::{Device, DeviceExt, Kind, Memory, Workers};

use crate::common::{
    acl, again, alone, alone_with, current, device, enter, host, pages, patient, pattern, stream, test_name,
    write,
};

#[test]
fn the_device_is_set_once_in_the_process_whoever_asks() {
    alone(|sim| {
        let device = device(0);
        assert_eq!(sim.count("aclrtSetDevice"), 0, "nothing is bound to open it");
        sim.plan_faults("aclrtSetDevice:1=hang").unwrap();
        let memory = thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(|| device.buffer(4096).unwrap())).collect();
            sim.wait_for_calls("aclrtSetDevice", 1);
            // Time for the others to set it too, if they would.
            thread::sleep(Duration::from_millis(50));
            sim.unblock().unwrap();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        });
        drop(memory);
        let again = AscendDevice::with_uuid(device.identity().uuid).unwrap();
        again.buffer(4096).unwrap();
        assert_eq!((sim.count("aclrtSetDevice"), sim.retained(0)), (1, Ok(1)));
        assert_eq!((sim.live_allocations(), device.failed_drops()), (Ok(0), 0));
    });
}

#[test]
fn a_thread_without_a_context_is_left_without_one() {
    alone(|sim| {
        let device = device(1);
        let error = device.bind_current().map(drop).unwrap_err();
        assert_eq!((error.kind(), current(&sim)), (Kind::CannotRestore, 0));
        // Everything that the library does for such a thread, it does elsewhere.
        let bytes = pattern(4096);
        let memory = device.buffer(4096).unwrap();
        device
            .bound(|bound| {
                write(bound, memory.region(), &bytes);
                bound.register(memory.region())
            })
            .unwrap();
        assert_eq!(sim.peek(memory.region().addr as u64, 4096), Ok(bytes));
        let guard = device.bound(|bound| bound.register(pages(8192))).unwrap();
        drop((guard, memory));
        assert_eq!((current(&sim), device.failed_drops()), (0, 0));
        assert_eq!((sim.live_allocations(), device.registrations()), (Ok(0), 0));
    });
}

#[test]
fn the_named_stream_goes_along_to_another_thread() {
    alone(|sim| {
        let device = device(0);
        let raw = device.bound(|_| Ok(stream(&sim))).unwrap();
        let seen = device.with_stream(raw, || device.bound(|bound| Ok(bound.current_stream())));
        assert_eq!(seen.unwrap(), raw);
    });
}

#[test]
fn binding_what_is_current_only_asks_and_another_comes_back() {
    alone(|sim| {
        let (first, second) = (device(0), device(1));
        drop(second.buffer(1).unwrap());
        // The framework's thread shares the primary context with us.
        enter(&sim, 0);
        let theirs = current(&sim);
        first.buffer(1).unwrap();
        sim.clear_log().unwrap();
        drop(first.bind_current().unwrap());
        let calls: Vec<_> = sim.log().into_iter().map(|call| call.function).collect();
        assert_eq!(calls, ["aclrtGetCurrentContext"]);
        let bound = second.bind_current().unwrap();
        assert_ne!(current(&sim), theirs);
        drop(bound);
        assert_eq!(current(&sim), theirs);
        // Also where the application has a context of its own on the same device.
        let mut own = 0usize;
        acl!(sim, aclrtCreateContext(&mut own => *mut usize, 0 => i32));
        for device in [&first, &second] {
            drop(device.bind_current().unwrap());
            assert_eq!(current(&sim), own);
        }
        assert_eq!(sim.count("aclrtSetDevice"), 0);
    });
}

#[test]
fn a_context_that_cannot_be_given_back_is_counted() {
    alone(|sim| {
        let device = device(1);
        drop(device.buffer(1).unwrap());
        let mut own = 0usize;
        acl!(sim, aclrtCreateContext(&mut own => *mut usize, 0 => i32));
        let bound = device.bind_current().unwrap();
        acl!(sim, aclrtDestroyContext(own => usize));
        drop(bound);
        assert_eq!(device.failed_drops(), 1);
    });
}

/// torch_npu gives `aclInit` a default device. Then a thread without a context is asked for its device and answers, and
/// most calls bind device 0 to it without a word.
#[test]
fn a_configured_default_device_fools_nobody() {
    alone(|sim| {
        let folder = tempfile::tempdir().unwrap();
        let config = folder.path().join("acl.json");
        fs::write(&config, r#"{"defaultDevice":{"default_device":"0"}}"#).unwrap();
        let path = std::ffi::CString::new(config.to_str().unwrap()).unwrap();
        acl!(sim, aclInit(path.as_ptr() => *const std::ffi::c_char));
        let device = device(1);
        let mut answer = -1;
        acl!(sim, aclrtGetDevice(&mut answer => *mut i32));
        assert_eq!(answer, 0, "the runtime names the default device");
        assert_eq!(device.bind_current().map(drop).unwrap_err().kind(), Kind::CannotRestore);
        let bytes = pattern(4096);
        let memory = device.buffer(4096).unwrap();
        let copy = device.bound(|bound| {
            write(bound, memory.region(), &bytes);
            Ok(())
        });
        copy.unwrap();
        let workers = Workers::start(device, 4).unwrap();
        for _ in 0..16 {
            workers.run(patient(), "test", |bound| bound.allocate(4096).map(drop)).unwrap();
        }
        drop(memory);
        let astray: Vec<_> = sim.log().into_iter().filter(|call| call.device == Some(0)).collect();
        assert!(astray.is_empty(), "{astray:#?}");
        assert_eq!((current(&sim), sim.retained(0)), (0, Ok(0)));
        assert_eq!(device.failed_drops(), 0);
    });
}

#[test]
fn a_repeated_initialisation_is_no_failure() {
    alone(|sim| {
        acl!(sim, aclInit(0 => usize));
        device(0).buffer(1).unwrap();
        assert_eq!(sim.calls("aclInit").last().unwrap().status, Some(100002));
    });
}

#[test]
fn guards_are_given_back_with_their_device_current_from_any_thread() {
    alone(|sim| {
        for logical in [0, 1] {
            let device = device(logical);
            let memory = device.buffer(4096).unwrap();
            let registration = device.bound(|bound| bound.register(pages(4096))).unwrap();
            thread::scope(|scope| {
                scope.spawn(move || drop((registration, memory)));
            });
        }
        for call in ["aclrtFree", "aclrtHostUnregister"] {
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
        sim.plan_faults("aclrtFree:1=507899").unwrap();
        drop(memory);
        assert_eq!(device.failed_drops(), 1);
    });
}

#[test]
fn a_failed_bind_is_an_error_and_no_other_device() {
    alone(|sim| {
        let (first, second) = (device(0), device(1));
        sim.plan_faults("aclrtSetDevice:1=507033").unwrap();
        let error = second.buffer(1).map(drop).unwrap_err();
        assert_eq!((error.kind(), error.vendor_code()), (Kind::Driver, Some(507033)));
        assert!(error.to_string().contains("npu-smi"), "{error}");
        // It is tried again.
        drop(second.buffer(1).unwrap());
        enter(&sim, 0);
        drop(first.buffer(1).unwrap());
        let theirs = current(&sim);
        sim.plan_faults("aclrtSetCurrentContext:1=107002").unwrap();
        let error = second.bind_current().map(drop).unwrap_err();
        assert_eq!((error.kind(), error.vendor_code()), (Kind::NotBound, Some(107002)));
        assert_eq!(current(&sim), theirs);
    });
}

/// Set for a process that only tells what UUIDs it sees.
const TELL: &str = "HAULIER_TEST_TELL";

#[test]
fn ids_count_what_is_visible_and_the_uuid_counts_the_machine() {
    let env = vec![
        ("HAULIER_SIM_DEVICES", "8"),
        ("HAULIER_SIM_MOUNTED", "7,6,5,4"),
        ("ASCEND_RT_VISIBLE_DEVICES", "2,0,3"),
    ];
    alone_with(crate::common::Setup { env, ..Default::default() }, |sim| {
        let all = AscendDevice::all().unwrap();
        if env::var_os(TELL).is_some() {
            let uuids: Vec<_> = all.iter().map(|device| device.identity().uuid.to_string()).collect();
            println!("\nuuids {}", uuids.join(" "));
            return;
        }
        let physical: Vec<_> = all.iter().map(|device| device.identity().physical.unwrap().0).collect();
        assert_eq!(physical, [5, 7, 4]);
        all[1].buffer(1).unwrap();
        let set: Vec<_> = sim.calls("aclrtSetDevice").into_iter().map(|call| call.about).collect();
        assert_eq!(set, ["device 1"]);
        for found in &all {
            assert_eq!(AscendDevice::with_uuid(found.identity().uuid).unwrap().identity(), found.identity());
        }
        let error = AscendDevice::open(hal::LogicalId(5)).unwrap_err();
        assert_eq!(error.kind(), Kind::InvalidDevice);
        let text = error.to_string();
        assert!(text.contains("5, 7, 4") && text.contains("ASCEND_RT_VISIBLE_DEVICES"), "{text}");
        assert_eq!(
            AscendDevice::with_uuid(hal::DeviceUuid([7; 16])).unwrap_err().kind(),
            Kind::InvalidDevice
        );
        // The same NPUs in a process that sees them otherwise.
        let mut other = again(&test_name());
        other.env(TELL, "1").env("ASCEND_RT_VISIBLE_DEVICES", "3,2");
        let said = String::from_utf8(other.output().unwrap().stdout).unwrap();
        let (five, four) = (all[0].identity().uuid, all[2].identity().uuid);
        assert!(said.contains(&format!("uuids {four} {five}\n")), "{said}");
    });
}

#[test]
fn a_driver_that_has_shut_down_gives_errors_and_no_panic() {
    alone(|sim| {
        let device = device(0);
        enter(&sim, 0);
        let bound = device.bind_current().unwrap();
        let memory = bound.allocate(4096).unwrap();
        let registration = bound.register(memory.region()).unwrap();
        sim.set_mode("unloaded").unwrap();
        assert_eq!(bound.allocate(1).unwrap_err().vendor_code(), Some(507000));
        drop((registration, memory, bound));
        assert_eq!(device.bind_current().map(drop).unwrap_err().vendor_code(), Some(507000));
    });
}

unsafe extern "C" {
    safe fn atexit(run: extern "C" fn()) -> i32;
}

/// What an application still holds when its static objects are destroyed.
static LEFT: Mutex<Option<(AscendDevice, Box<dyn Send>)>> = Mutex::new(None);

extern "C" fn drop_what_is_left() {
    let Some((device, guards)) = LEFT.lock().unwrap().take() else { return };
    drop(guards);
    let shut_down = device.bind_current().map(drop).unwrap_err().kind() == Kind::ShutDown
        && device.buffer(1).map(drop).unwrap_err().kind() == Kind::ShutDown
        && AscendDevice::all().map(drop).unwrap_err().kind() == Kind::ShutDown;
    if !shut_down || device.failed_drops() != 0 {
        eprintln!("shut down: {shut_down}, failed drops: {}", device.failed_drops());
        process::abort();
    }
}

/// P78: ACL goes first, as it is opened last.
#[test]
fn what_is_dropped_after_acl_has_ended_with_the_process_disturbs_nothing() {
    alone(|_| {
        assert_eq!(atexit(drop_what_is_left), 0);
        let device = device(1);
        let memory = device.buffer(4096).unwrap();
        let registrations = [memory.region(), pages(4096)]
            .map(|region| device.bound(|bound| bound.register(region)).unwrap());
        *LEFT.lock().unwrap() = Some((device, Box::new((registrations, memory))));
    });
}

#[test]
fn a_forked_child_is_refused_and_the_parent_goes_on() {
    alone(|sim| {
        let device = device(0);
        enter(&sim, 0);
        let mut memory = Some(device.buffer(4096).unwrap());
        let mut command = Command::new("/nowhere");
        // SAFETY: the closure runs in the forked child, whose one thread it is; it allocates, which this libc's fork allows.
        unsafe {
            command.pre_exec(move || {
                let refused = [
                    device.bind_current().map(drop).unwrap_err(),
                    AscendDevice::all().map(drop).unwrap_err(),
                ];
                let as_expected = refused
                    .iter()
                    .all(|error| error.kind() == Kind::Unsupported && error.to_string().contains("forked"));
                // The child's copy of a guard does nothing.
                drop(memory.take());
                let as_expected = as_expected && device.failed_drops() == 0;
                Err(io::Error::from_raw_os_error(if as_expected { 77 } else { 78 }))
            });
        }
        assert_eq!(command.spawn().unwrap_err().raw_os_error(), Some(77));
        drop(command);
        assert_eq!(sim.live_allocations(), Ok(0));
        device.buffer(4096).unwrap();
    });
}

#[test]
fn what_acl_says_of_a_failure_is_in_the_error_and_nothing_said_is_no_harm() {
    for text in ["1", "0"] {
        let setup =
            crate::common::Setup { env: vec![("HAULIER_SIM_ERROR_TEXT", text)], ..Default::default() };
        alone_with(setup, |sim| {
            let device = device(0);
            sim.plan_faults("aclrtMalloc:1=507899").unwrap();
            let error = device.buffer(4096).map(drop).unwrap_err();
            assert_eq!((error.kind(), error.vendor_code()), (Kind::Driver, Some(507899)));
            let said = env::var("HAULIER_SIM_ERROR_TEXT").unwrap() == "1";
            assert_eq!(error.vendor_text().is_some(), said, "{error}");
            assert!(error.to_string().contains("aclrtMalloc"), "{error}");
            let heap = host(&[0; 8]);
            assert_eq!(device.bound(|bound| bound.locate(heap.addr, 8)).unwrap().region, heap);
        });
    }
}

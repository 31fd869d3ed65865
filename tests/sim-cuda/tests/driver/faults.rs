//! Planned faults, whole-driver modes, missing functions, and the log.

use std::{env, fs, path::Path, ptr, sync::OnceLock, thread, time::Duration};

use haulier_sim_cuda::{Call, install};

use crate::process::{dies, isolated, told};

driver_tests! {
    fn calls_fail_as_planned
        [HAULIER_SIM_FAULTS = "cuMemAlloc_v2:2=2,cuStreamQuery:2+=719,cuStreamSynchronize=0"](d) {
        d.on(0);
        let mut pointer = 0u64;
        let mut allocate = || cu!(d, cuMemAlloc_v2(&raw mut pointer, 64usize));
        assert_eq!([allocate(), allocate(), allocate()], [0, 2, 0]);
        let query = || cu!(d, cuStreamQuery(0u64));
        assert_eq!([query(), query(), query()], [0, 719, 719]);
        // A call that lies: it succeeds and waits for nothing.
        let stream = d.stream(1);
        d.control.hold(stream).unwrap();
        d.control.fill(stream, pointer, 64, 1).unwrap();
        ok!(d, cuStreamSynchronize(stream));
        d.control.clear_faults().unwrap();
        assert_eq!(query(), 0);
        assert_eq!(d.control.plan_faults("nonsense"), Err(1));
        d.control.plan_faults("cuMemGetInfo_v2:1=9999").unwrap();
        assert_eq!(cu!(d, cuMemGetInfo_v2(ptr::null_mut::<usize>(), ptr::null_mut::<usize>())), 9999);
        assert_eq!(d.control.calls("cuMemGetInfo_v2")[0].status, Some(9999));
    }

    fn a_call_hangs_until_it_is_let_go[](d) {
        let context = d.on(0);
        d.control.plan_faults("cuStreamSynchronize:1=hang").unwrap();
        thread::scope(|s| {
            let hung = s.spawn(|| {
                ok!(d, cuCtxSetCurrent(context));
                ok!(d, cuStreamSynchronize(0u64));
            });
            d.control.wait_for_calls("cuStreamSynchronize", 1);
            thread::sleep(Duration::from_millis(20));
            assert!(!hung.is_finished());
            // Nobody else is held up.
            ok!(d, cuStreamSynchronize(0u64));
            d.control.unblock().unwrap();
            hung.join().unwrap();
        });
    }

    fn an_event_query_without_a_context_can_be_refused[HAULIER_SIM_UNBOUND_EVENT_ABORTS = "0"](d) {
        d.on(0);
        let event = d.event();
        ok!(d, cuCtxSetCurrent(0u64));
        assert_eq!(cu!(d, cuEventQuery(event)), 201);
    }

    fn a_call_that_hangs_can_be_let_go_from_outside[](d) {
        if let Some(file) = told() {
            d.on(0);
            // The first process makes the file when it sees the call in the log.
            assert!(!Path::new(&file).exists());
            ok!(d, cuStreamSynchronize(0u64));
            assert!(Path::new(&file).exists());
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let [file, log] = ["go", ""].map(|name| folder.path().join(name).to_str().unwrap().to_owned());
        thread::scope(|s| {
            s.spawn(|| {
                let hangs = |line: &str| line.contains(r#""cuStreamSynchronize""#) && line.contains(r#""status":null"#);
                let path = || fs::read_dir(&log).unwrap().flatten().find(|f| f.path().extension().is_some());
                while !path().is_some_and(|f| fs::read_to_string(f.path()).unwrap().lines().any(hangs)) {
                    thread::sleep(Duration::from_millis(2));
                }
                fs::write(&file, "").unwrap();
            });
            let environment = [
                ("HAULIER_SIM_FAULTS", "cuStreamSynchronize:1=hang"),
                ("HAULIER_SIM_UNBLOCK_FILE", &file),
                ("HAULIER_SIM_LOG", &log),
            ];
            d.peer(&file, &environment);
        });
    }

    fn when_the_process_exits_everything_answers_4[](d) {
        static ASK: OnceLock<extern "C" fn(*mut u64) -> i32> = OnceLock::new();
        unsafe extern "C" {
            fn atexit(run: extern "C" fn()) -> i32;
            fn _exit(status: i32) -> !;
        }
        extern "C" fn last() {
            let mut context = 0u64;
            let status = ASK.get().map_or(-1, |ask| ask(&raw mut context));
            if status != 4 {
                // SAFETY: ends the process, as it is about to.
                unsafe { _exit(70) };
            }
        }
        // SAFETY: its signature; it stays loaded.
        let ask = unsafe { d.library().get::<extern "C" fn(*mut u64) -> i32>("cuCtxGetCurrent") };
        ASK.set(*ask.unwrap()).unwrap();
        // Registered before cuInit, so that it runs after the driver is gone, as a static's destructor does.
        // SAFETY: a function that lives as long as the process.
        assert_eq!(unsafe { atexit(last) }, 0);
        d.on(0);
    }

    fn without_a_device_init_is_100[CUDA_VISIBLE_DEVICES = ""](d) {
        let mut count = 0i32;
        assert_eq!(cu!(d, cuInit(0u32)), 100);
        assert_eq!(cu!(d, cuDeviceGetCount(&raw mut count)), 3);
    }

    fn a_mode_without_devices[HAULIER_SIM_MODE = "no-device"](d) {
        assert_eq!(cu!(d, cuInit(0u32)), 100);
    }

    fn a_stub_answers_34_to_everything[HAULIER_SIM_MODE = "stub"](d) {
        let mut version = 0i32;
        assert_eq!((cu!(d, cuInit(0u32)), cu!(d, cuDriverGetVersion(&raw mut version))), (34, 34));
    }

    fn the_driver_can_be_unloaded_and_answer_numbers_that_nobody_knows[](d) {
        d.on(0);
        let pointer = d.allocate(64);
        d.control.set_mode("unloaded").unwrap();
        assert_eq!((cu!(d, cuMemFree_v2(pointer)), cu!(d, cuCtxSetCurrent(0u64))), (4, 4));
        d.control.set_mode("unknown").unwrap();
        assert_eq!(cu!(d, cuMemFree_v2(pointer)), 9999);
        d.control.set_mode("normal").unwrap();
        ok!(d, cuMemFree_v2(pointer));
        let mut text = ptr::null::<u8>();
        assert_eq!((cu!(d, cuGetErrorName(9999i32, &raw mut text)), text.is_null()), (1, true));
        ok!(d, cuGetErrorString(901i32, &raw mut text));
        assert!(!text.is_null());
    }

    fn attributes_can_be_changed[HAULIER_SIM_ATTRIBUTES = "103=0, 115=0"](d) {
        ok!(d, cuInit(0u32));
        let mut value = 9i32;
        for (number, expected) in [(41, 1), (103, 0), (115, 0), (128, 0)] {
            ok!(d, cuDeviceGetAttribute(&raw mut value, number, 0i32));
            assert_eq!(value, expected, "attribute {number}");
        }
        assert_eq!(cu!(d, cuDeviceGetAttribute(&raw mut value, 0i32, 0i32)), 1);
    }

    fn a_forked_child_has_no_driver_any_more[](d) {
        let context = d.on(0);
        unsafe extern "C" {
            fn fork() -> i32;
            fn _exit(status: i32) -> !;
        }
        // SAFETY: the child makes a few calls that take no lock that another thread could hold, and ends.
        let child = unsafe { fork() };
        if child == 0 {
            let refused = cu!(d, cuInit(0u32)) == 3 && cu!(d, cuCtxSetCurrent(context)) == 3;
            // SAFETY: ends the child without running the test's own end.
            unsafe { _exit(i32::from(!refused)) };
        }
        let child = rustix::process::Pid::from_raw(child);
        let (_, status) =
            rustix::process::waitpid(child, rustix::process::WaitOptions::empty()).unwrap().unwrap();
        assert_eq!(status.exit_status(), Some(0));
        ok!(d, cuStreamSynchronize(0u64));
    }
}

#[test]
fn an_event_query_without_a_context_ends_the_process() {
    let test = concat!(module_path!(), "::an_event_query_without_a_context_ends_the_process");
    dies(test, 6, |d| {
        d.on(0);
        let event = d.event();
        ok!(d, cuCtxSetCurrent(0u64));
        cu!(d, cuEventQuery(event));
    });
}

#[test]
fn functions_can_be_missing() {
    let without = ["cuCtxCreate_v4", "cuMemExportToShareableHandle"];
    isolated(concat!(module_path!(), "::functions_can_be_missing"), &[], &without, |d| {
        for name in without {
            // SAFETY: only looked up.
            assert!(unsafe { d.library().get::<extern "C" fn()>(name) }.is_err(), "{name}");
        }
        d.on(0);
        d.allocate(64);
        assert!(install(Path::new(&env::temp_dir()), &["cuNoSuchFunction"]).is_err());
    });
}

#[test]
fn every_call_is_appended_to_a_file_of_its_process() {
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().to_str().unwrap();
    let test = concat!(module_path!(), "::every_call_is_appended_to_a_file_of_its_process");
    isolated(test, &[("HAULIER_SIM_LOG", text)], &[], |d| {
        d.on(1);
        ok!(d, cuMemFree_v2(d.allocate(64)));
        let path = format!("{}/cuda-{}.jsonl", env::var("HAULIER_SIM_LOG").unwrap(), std::process::id());
        let lines = fs::read_to_string(path).unwrap();
        let calls: Vec<Call> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let freed = calls.iter().find(|call| call.function == "cuMemFree_v2").unwrap();
        assert_eq!((freed.device, freed.owner, freed.status), (Some(1), Some(1), Some(0)));
        assert_eq!(calls, d.control.log());
    });
}

//! Planned faults, whole-runtime modes, missing functions, error texts, and the log.

use std::{env, fs, thread, time::Duration};

use haulier_sim_ascend::{Call, install};

use crate::process::{isolated, told};

driver_tests! {
    fn calls_fail_as_planned[HAULIER_SIM_FAULTS = "aclrtMalloc:2=207018,aclrtSynchronizeStream=0"](d) {
        d.on(0);
        let mut pointer = 0u64;
        let mut malloc = || acl!(d, aclrtMalloc(&raw mut pointer, 64usize, 0i32));
        assert_eq!([malloc(), malloc(), malloc()], [0, 207018, 0]);
        // A call that lies: it succeeds and waits for nothing.
        let stream = d.stream();
        d.control.hold(stream).unwrap();
        d.control.fill(stream, pointer, 64, 1).unwrap();
        ok!(d, aclrtSynchronizeStream(stream));
        d.control.clear_faults().unwrap();
        assert_eq!(acl!(d, aclrtSynchronizeStreamWithTimeout(stream, 5i32)), 507046);
        d.control.plan_faults("aclrtSetDevice:1=507033").unwrap();
        assert_eq!([acl!(d, aclrtSetDevice(0i32)), acl!(d, aclrtSetDevice(0i32))], [507033, 0]);
        assert_eq!(d.control.plan_faults("nonsense"), Err(107000));
    }

    fn a_call_hangs_until_it_is_let_go[](d) {
        let context = d.on(0);
        d.control.plan_faults("aclrtSynchronizeStream:1=hang").unwrap();
        thread::scope(|s| {
            let hung = s.spawn(|| {
                ok!(d, aclrtSetCurrentContext(context));
                ok!(d, aclrtSynchronizeStream(0u64));
            });
            d.control.wait_for_calls("aclrtSynchronizeStream", 1);
            thread::sleep(Duration::from_millis(20));
            assert!(!hung.is_finished());
            // Nobody else is held up.
            ok!(d, aclrtSynchronizeStream(0u64));
            d.control.unblock().unwrap();
            hung.join().unwrap();
        });
    }

    fn the_whole_runtime_answers_the_same[HAULIER_SIM_MODE = "unknown"](d) {
        assert_eq!(acl!(d, aclrtSetDevice(0i32)), 999_999);
        d.control.set_mode("507899").unwrap();
        assert_eq!((acl!(d, aclrtSetDevice(0i32)), d.current()), (507899, (507899, 7)));
        d.control.set_mode("normal").unwrap();
        d.on(0);
    }

    fn a_failures_text_is_the_threads_and_read_once[](d) {
        assert_eq!(d.error_text(), None);
        d.on(0);
        let mut pointer = 0u64;
        assert_eq!(acl!(d, aclrtMalloc(&raw mut pointer, 64usize, 8i32)), 107000);
        thread::scope(|s| s.spawn(|| assert_eq!(d.error_text(), None)).join().unwrap());
        let text = d.error_text().unwrap();
        assert!(text.starts_with("EE") && text.contains("policy") && text.contains("aclrtMalloc"), "{text}");
        assert_eq!(d.error_text(), None);
        // The outermost layer records nothing.
        assert_eq!((acl!(d, aclrtFree(0u64)), d.error_text()), (100000, None));
    }

    fn a_runtime_may_have_no_texts[HAULIER_SIM_ERROR_TEXT = "0"](d) {
        assert_eq!((acl!(d, aclrtSetDevice(7i32)), d.error_text()), (107001, None));
    }

    fn the_log_has_the_thread_the_device_and_the_owner[](d) {
        d.on(1);
        let pointer = d.malloc(64);
        d.on(0);
        d.control.clear_log().unwrap();
        let mut host = [0u8; 64];
        thread::Builder::new().name("worker".into()).spawn_scoped_in(|| {
            assert_eq!(acl!(d, aclrtMemcpy(pointer, 64usize, host.as_mut_ptr(), 64usize, 1i32)), 107002);
        });
        assert_eq!(acl!(d, aclrtMemcpy(pointer, 64usize, host.as_mut_ptr(), 64usize, 1i32)), 107003);
        let calls = d.control.calls("aclrtMemcpy");
        let seen: Vec<_> = calls.iter().map(|call| (call.device, call.owner, call.status)).collect();
        assert_eq!(seen, [(None, Some(1), Some(107002)), (Some(0), Some(1), Some(107003))]);
        assert_eq!((calls[0].thread_name.as_str(), calls[1].about.clone()), ("worker", format!("address {pointer:#x}")));
        assert_ne!(calls[0].thread, calls[1].thread);
        assert!(calls[1].why.as_ref().unwrap().contains("device 1"), "{:?}", calls[1].why);
    }

    fn a_forked_child_has_no_runtime[](d) {
        d.on(0);
        unsafe extern "C" {
            fn fork() -> i32;
            fn _exit(status: i32) -> !;
            fn waitpid(pid: i32, status: *mut i32, options: i32) -> i32;
        }
        // SAFETY: the child makes one call that is refused before it takes a lock that another thread may hold, and ends.
        let child = unsafe { fork() };
        if child == 0 {
            let refused = acl!(d, aclrtSetDevice(0i32)) == 507899;
            // SAFETY: ends the child without running what belongs to the parent.
            unsafe { _exit(i32::from(!refused)) };
        }
        let mut status = -1;
        // SAFETY: waits for the child that was just made.
        assert_eq!((unsafe { waitpid(child, &raw mut status, 0) }, status), (child, 0));
        d.on(0);
    }
}

/// Runs a named thread to its end.
trait Named {
    fn spawn_scoped_in(self, body: impl FnOnce() + Send);
}

impl Named for thread::Builder {
    fn spawn_scoped_in(self, body: impl FnOnce() + Send) {
        thread::scope(|s| self.spawn_scoped(s, body).unwrap().join().unwrap());
    }
}

#[test]
fn an_older_runtime_lacks_functions() {
    let test = concat!(module_path!(), "::an_older_runtime_lacks_functions");
    isolated(test, &[], &["aclrtMemcpyBatch", "aclrtPointerGetAttributes"], |d| {
        // SAFETY: only looked up.
        let has = |name: &str| unsafe { d.library().get::<extern "C" fn()>(name) }.is_ok();
        assert_eq!(["aclrtMemcpyBatch", "aclrtMemcpyBatchAsync"].map(has), [false, true]);
        d.on(0);
        d.malloc(64);
    });
}

#[test]
fn a_name_that_is_not_there_cannot_be_taken_away() {
    let folder = tempfile::tempdir().unwrap();
    assert!(install(folder.path(), &["aclrtNonsense"]).is_err());
}

#[test]
fn calls_are_written_to_a_file_too() {
    let folder = tempfile::tempdir().unwrap();
    let there = told().or(env::var("HAULIER_SIM_LOG").ok());
    let path = there.unwrap_or_else(|| folder.path().to_str().unwrap().into());
    let test = concat!(module_path!(), "::calls_are_written_to_a_file_too");
    isolated(test, &[("HAULIER_SIM_LOG", &path)], &[], |d| {
        d.on(1);
        let file = fs::read_dir(&path).unwrap().next().unwrap().unwrap().path();
        assert!(file.file_name().unwrap().to_str().unwrap().starts_with("ascend-"));
        let text = fs::read_to_string(file).unwrap();
        let first: Call = serde_json::from_str(text.lines().next().unwrap()).unwrap();
        assert_eq!(
            (first.function.as_str(), first.about.as_str(), first.status),
            ("aclrtSetDevice", "device 1", Some(0))
        );
    });
}

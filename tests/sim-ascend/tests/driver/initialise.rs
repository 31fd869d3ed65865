//! aclInit, aclFinalize, and the default device.

use std::{ffi::CString, fs, thread};

use crate::process::Driver;

fn init(d: &Driver, config: &str) -> i32 {
    let path = d.folder().join("acl.json");
    fs::write(&path, config).unwrap();
    let path = CString::new(path.to_str().unwrap()).unwrap();
    acl!(d, aclInit(path.as_ptr()))
}

const NOTHING: *const i8 = std::ptr::null();

driver_tests! {
    fn initialising_is_counted_and_finalising_is_not[](d) {
        let mut left = 9u64;
        assert_eq!(acl!(d, aclFinalize()), 100037);
        assert_eq!([acl!(d, aclInit(NOTHING)), acl!(d, aclInit(NOTHING))], [0, 100002]);
        assert_eq!(init(d, "{}"), 100000, "another configuration");
        ok!(d, aclFinalizeReference(&raw mut left));
        assert_eq!(left, 1);
        assert_eq!(acl!(d, aclInit(NOTHING)), 100002);
        let mut own = 0u64;
        ok!(d, aclrtCreateContext(&raw mut own, 1i32));
        let primary = d.on(0);
        let pointer = d.malloc(64);
        ok!(d, aclFinalize());
        assert_eq!(acl!(d, aclFinalize()), 100037);
        // Whoever else used the runtime has lost everything.
        assert_eq!((d.current().0, acl!(d, aclrtFree(pointer))), (107002, 107000));
        assert_eq!([own, primary].map(|context| acl!(d, aclrtSetCurrentContext(context))), [107002; 2]);
    }

    fn nothing_has_to_be_initialised[](d) {
        d.on(0);
        d.malloc(64);
        assert_eq!(acl!(d, aclInit(c"/nowhere/acl.json".as_ptr())), 100000);
        assert_eq!(init(d, "no json"), 100000);
        assert_eq!(init(d, r#"{"defaultDevice":{"default_device":"2"}}"#), 107001);
    }

    fn a_default_device_answers_and_binds_nothing_until_it_silently_does[](d) {
        assert_eq!(init(d, r#"{"defaultDevice":{"default_device":"0"}}"#), 0);
        let context = d.on(1);
        // One thread after the other, since each binds device 0.
        thread::scope(|s| {
            s.spawn(|| {
                // The process is on device 1, and this thread is told that it is on 0.
                assert_eq!((d.device(), d.current().0, d.control.retained(0)), ((0, 0), 107002, Ok(0)));
                let pointer = d.malloc(64);
                assert_eq!((d.pointer(pointer).unwrap().device, d.current().0, d.control.retained(0)), (0, 0, Ok(1)));
                assert_ne!(d.current().1, context);
            });
        });
        thread::scope(|s| {
            s.spawn(|| {
                ok!(d, aclrtSynchronizeStream(0u64));
                assert_eq!((d.current().0, d.device()), (0, (0, 0)));
            });
        });
    }

    fn a_default_device_leaves_8_saying_that_there_is_no_context[HAULIER_SIM_CANN = "8.5.0"](d) {
        assert_eq!(init(d, r#"{"defaultDevice":{"default_device":"1"}}"#), 0);
        assert_eq!((d.current(), d.device()), ((0, 0), (0, 1)));
        d.malloc_host(64);
        assert_ne!(d.current(), (0, 0));
    }
}

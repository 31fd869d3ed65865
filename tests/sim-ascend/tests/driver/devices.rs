//! Devices have three numbers, none of which is an identity on the wire.

use std::ffi::{CStr, c_char};

use crate::process::Driver;

fn soc(d: &Driver) -> Option<String> {
    // SAFETY: the function's signature; its text lives for ever.
    unsafe {
        let function = d.library().get::<extern "C" fn() -> *const c_char>("aclrtGetSocName").unwrap();
        let name = function();
        (!name.is_null()).then(|| CStr::from_ptr(name).to_string_lossy().into_owned())
    }
}

driver_tests! {
    fn user_logical_and_physical_ids_differ
        [HAULIER_SIM_DEVICES = "8", HAULIER_SIM_MOUNTED = "4,5,6,7", ASCEND_RT_VISIBLE_DEVICES = "3,1"](d) {
        let mut count = 0u32;
        ok!(d, aclrtGetDeviceCount(&raw mut count));
        assert_eq!(count, 2);
        let (mut logic, mut physical, mut user) = (9i32, 9i32, 9i32);
        ok!(d, aclrtGetLogicDevIdByUserDevId(0i32, &raw mut logic));
        ok!(d, aclrtGetPhyDevIdByLogicDevId(logic, &raw mut physical));
        assert_eq!((logic, physical), (3, 7));
        ok!(d, aclrtGetLogicDevIdByPhyDevId(5i32, &raw mut logic));
        ok!(d, aclrtGetUserDevIdByLogicDevId(logic, &raw mut user));
        assert_eq!((logic, user), (1, 1));
        assert_eq!(
            [
                acl!(d, aclrtGetLogicDevIdByUserDevId(2i32, &raw mut logic)),
                acl!(d, aclrtGetUserDevIdByLogicDevId(0i32, &raw mut user)),
                acl!(d, aclrtGetPhyDevIdByLogicDevId(-1i32, &raw mut physical)),
                acl!(d, aclrtGetLogicDevIdByPhyDevId(0i32, &raw mut logic)),
                acl!(d, aclrtSetDevice(2i32)),
            ],
            [107001; 5]
        );
        d.on(1);
        assert_eq!((d.device(), d.pointer(d.malloc(64)).unwrap().device), ((0, 1), 1));
    }

    fn a_machine_without_devices_says_so[HAULIER_SIM_DEVICES = "0"](d) {
        let mut count = 7u32;
        assert_eq!(acl!(d, aclrtGetDeviceCount(&raw mut count)), 207004);
        assert_eq!((acl!(d, aclrtSetDevice(0i32)), soc(d), count), (107001, None, 7));
    }

    fn a_device_that_is_named_twice_leaves_none[ASCEND_RT_VISIBLE_DEVICES = "0,0"](d) {
        let mut count = 7u32;
        assert_eq!(acl!(d, aclrtGetDeviceCount(&raw mut count)), 207004);
    }

    fn versions_and_names[](d) {
        let (mut version, mut part) = (0i32, [0i32; 3]);
        ok!(d, aclsysGetVersionNum(c"runtime".as_ptr(), &raw mut version));
        ok!(d, aclrtGetVersion(&raw mut part[0], &raw mut part[1], &raw mut part[2]));
        assert_eq!((version, part, soc(d)), (90_000_000, [1, 17, 0], Some("Ascend910B3".into())));
        assert_ne!(acl!(d, aclsysGetVersionNum(c"driver".as_ptr(), &raw mut version)), 0);
        assert!(d.control.version().starts_with("haulier-sim-ascend"));
    }

    fn version_8[HAULIER_SIM_CANN = "8.5.1", HAULIER_SIM_SOC = "Ascend310P3"](d) {
        let (mut version, mut part) = (0i32, [0i32; 3]);
        ok!(d, aclsysGetVersionNum(c"runtime".as_ptr(), &raw mut version));
        ok!(d, aclrtGetVersion(&raw mut part[0], &raw mut part[1], &raw mut part[2]));
        assert_eq!((version, part, soc(d)), (80_501_000, [1, 16, 0], Some("Ascend310P3".into())));
    }

    fn peers_are_enabled_in_a_context[](d) {
        let mut can = 9i32;
        ok!(d, aclrtDeviceCanAccessPeer(&raw mut can, 0i32, 1i32));
        assert_eq!((can, acl!(d, aclrtDeviceEnablePeerAccess(1i32, 0u32))), (1, 107002));
        d.on(0);
        assert_eq!(acl!(d, aclrtDeviceEnablePeerAccess(0i32, 0u32)), 107000);
        ok!(d, aclrtDeviceEnablePeerAccess(1i32, 0u32));
    }

    fn a_process_in_a_container_does_not_know_the_pid_that_others_mean[](d) {
        let mut pid = 0i32;
        ok!(d, aclrtDeviceGetBareTgid(&raw mut pid));
        assert_ne!(pid.cast_unsigned(), std::process::id());
    }
}

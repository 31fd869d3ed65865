//! Device memory, and what the runtime says of pointers.

use std::ptr;

use haulier_sim_ascend::SINCE_9;

use crate::process::{Pointer, dies, isolated};

const HUGE: u32 = 2 << 20;

driver_tests! {
    fn allocations_are_padded_and_only_large_ones_lie_on_whole_pages[](d) {
        d.on(0);
        let (mut free, mut total, mut before) = (0usize, 0usize, 0usize);
        ok!(d, aclrtGetMemInfo(1i32, &raw mut before, &raw mut total));
        let (small, more, page, large) = (d.malloc(64), d.malloc(64), d.malloc(4096), d.malloc(3 << 20));
        assert_eq!((small % 64, more % 64, page % 4096, large % u64::from(HUGE)), (0, 0, 0, 0));
        assert_ne!(more % 4096, 0);
        ok!(d, aclrtGetMemInfo(1i32, &raw mut free, &raw mut total));
        assert_eq!((total, before - free), (4 << 30, 2 * 128 + 4160 + (3 << 20) + 64));
        let (mut base, mut size) = (0u64, 0usize);
        ok!(d, aclrtMemGetAddressRange(large + 5000, &raw mut base, &raw mut size));
        assert_eq!((base, size), (large, (3 << 20) + 32));
        assert_eq!(acl!(d, aclrtGetMemInfo(9i32, &raw mut free, &raw mut total)), 107000);
    }

    fn memory_ends_and_nonsense_is_refused[HAULIER_SIM_MEMORY = "1048576"](d) {
        d.on(0);
        let mut pointer = 0u64;
        let mut malloc = |bytes: usize, policy: i32| acl!(d, aclrtMalloc(&raw mut pointer, bytes, policy));
        assert_eq!([malloc(1 << 20, 0), malloc(0, 0), malloc(64, 8), malloc(64, 0x1002), malloc(usize::MAX, 0)],
            [207001, 100000, 107000, 0, 207001]);
        assert_eq!([acl!(d, aclrtFree(0u64)), acl!(d, aclrtFree(pointer + 64)), acl!(d, aclrtFree(pointer))],
            [100000, 107000, 0]);
        assert_eq!(acl!(d, aclrtFree(pointer)), 107000);
    }

    fn a_freed_address_comes_back[](d) {
        d.on(0);
        let first = d.malloc(8192);
        ok!(d, aclrtFree(first));
        assert_eq!(d.pointer(first), Err(507899));
        assert_eq!(d.malloc(8192), first);
    }

    fn pointers_are_told_apart[](d) {
        let heap = vec![0u8; 16384];
        let page = heap.as_ptr().addr().next_multiple_of(4096) as u64;
        // Before a device was opened nothing is known, not even of host memory.
        assert_eq!((d.pointer(heap.as_ptr() as u64), d.pointer(0)), (Err(107017), Err(100000)));
        d.on(1);
        let (small, large) = (d.malloc(64), d.malloc(3 << 20));
        let pinned = d.malloc_host(10000) as u64;
        assert_eq!(d.pointer(small + 63), Ok(Pointer { kind: 1, device: 1, page: 4096 }));
        assert_eq!(d.pointer(large + 2_000_000), Ok(Pointer { kind: 1, device: 1, page: HUGE }));
        assert_eq!(d.pointer(pinned + 9999).map(|known| (known.kind, known.device)), Ok((0, 0)));
        assert_eq!(d.pointer(page).map(|known| known.kind), Ok(2));
        assert_eq!(d.pointer(ptr::from_ref(&page) as u64).map(|known| known.kind), Ok(2));
        let mut device = 0u64;
        ok!(d, aclrtHostRegister(page, 4096u64, 0i32, &raw mut device));
        assert_eq!(d.pointer(page + 100).map(|known| (known.kind, known.device)), Ok((0, 0)));
        // A hole between allocations.
        assert_eq!(d.pointer(large - 64), Err(507899));
    }

    fn an_older_driver_takes_unknown_memory_for_the_hosts[HAULIER_SIM_OLD_DRIVER = "1"](d) {
        d.on(0);
        let heap = [0u8; 64];
        assert_eq!(d.pointer(heap.as_ptr() as u64).map(|known| known.kind), Ok(0));
    }

    fn the_driver_of_the_950_answers_before_a_device_is_opened[HAULIER_SIM_SOC = "Ascend950DT"](d) {
        let heap = [0u8; 64];
        assert_eq!(d.pointer(heap.as_ptr() as u64).map(|known| known.kind), Ok(2));
    }

    fn asked_for_all_the_same_8_has_no_address_ranges[HAULIER_SIM_CANN = "8.5.0"](d) {
        d.on(0);
        let (mut base, mut size) = (0u64, 0usize);
        assert_eq!(acl!(d, aclrtMemGetAddressRange(d.malloc(64), &raw mut base, &raw mut size)), 207000);
    }
}

#[test]
fn a_runtime_of_8_does_not_have_the_functions_of_9() {
    let test = concat!(module_path!(), "::a_runtime_of_8_does_not_have_the_functions_of_9");
    isolated(test, &[("HAULIER_SIM_CANN", "8.5.0")], SINCE_9, |d| {
        let has = |name: &str| {
            // SAFETY: only looked up.
            unsafe { d.library().get::<extern "C" fn()>(name) }.is_ok()
        };
        assert!(!SINCE_9.iter().any(|name| has(name)) && has("aclrtMalloc") && has("aclrtReserveMemAddress"));
        d.on(0);
        d.malloc(64);
    });
}

#[test]
fn the_host_cannot_touch_device_memory() {
    dies(concat!(module_path!(), "::the_host_cannot_touch_device_memory"), 11, |d| {
        d.on(0);
        let pointer = d.malloc(64) as *const u8;
        // SAFETY: none; the test is that the process ends here.
        unsafe { ptr::read_volatile(pointer) };
    });
}

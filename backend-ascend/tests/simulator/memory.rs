//! Where memory is, and what is not known of it.

use hal::{Device, DeviceExt, Kind, Memory, Place, Region};

use crate::common::{
    Setup, acl, alone, alone_with, device, enter, expandable, foreign, free, host, is_9, map, pages, pattern,
};

const MIB: usize = 1 << 20;

#[test]
fn memory_of_others_is_located_as_far_as_cann_tells() {
    alone(|sim| {
        let (device, other) = (device(0), device(1));
        enter(&sim, 1);
        let there = foreign(&sim, other, 8192);
        enter(&sim, 0);
        let bound = device.bind_current().unwrap();
        let memory = foreign(&sim, device, MIB);
        let part = memory.part(5000, 100).unwrap();
        let located = bound.locate(part.addr, part.len).unwrap();
        assert_eq!(located.region, part);
        let allocation = located.allocation.unwrap();
        if is_9() {
            assert!(allocation.base == memory.addr && allocation.len >= MIB, "{allocation:?}");
            let again = bound.locate(memory.addr, 1).unwrap().allocation.unwrap();
            assert_eq!(again.buffer, allocation.buffer);
        } else {
            assert_eq!((allocation.base, allocation.len), (part.addr, part.len), "nothing more is known");
        }
        let far = bound.locate(memory.addr, 1 << 40).unwrap_err();
        assert_eq!(far.kind(), Kind::InvalidRange);
        assert_eq!(
            bound.locate(there.addr, 8192).unwrap().region.place,
            Place::Device(other.identity().uuid)
        );
        free(&sim, memory);
    });
}

#[test]
fn host_memory_is_the_hosts_in_every_form() {
    for old in ["0", "1"] {
        let setup = Setup { env: vec![("HAULIER_SIM_OLD_DRIVER", old)], ..Setup::default() };
        alone_with(setup, |sim| {
            let device = device(0);
            enter(&sim, 0);
            let bound = device.bind_current().unwrap();
            let mut pinned = 0usize;
            acl!(sim, aclrtMallocHost(&mut pinned => *mut usize, 8192 => usize));
            let (heap, local, mapped) = (pattern(64), [0u8; 64], pages(4096));
            for region in [host(&heap), host(&local), mapped, Region::host(pinned, 8192)] {
                let located = bound.locate(region.addr, region.len).unwrap();
                assert_eq!((located.region, located.allocation), (region, None));
            }
        });
    }
}

#[test]
fn a_question_that_fails_never_means_host() {
    alone(|sim| {
        let device = device(0);
        enter(&sim, 0);
        let bound = device.bind_current().unwrap();
        let memory = expandable(&sim, 0, &[2 * MIB]);
        // Reserved and not mapped.
        let hole = bound.locate(memory.addr + 2 * MIB, 64).unwrap_err();
        assert_eq!(hole.vendor_code(), Some(507899), "{hole}");
        assert_eq!(bound.locate(0, 64).unwrap_err().kind(), Kind::InvalidArgument);
        let heap = pattern(64);
        sim.plan_faults("aclrtPointerGetAttributes:1=107017").unwrap();
        assert_eq!(bound.locate(host(&heap).addr, 64).unwrap_err().vendor_code(), Some(107017));
    });
}

#[test]
fn what_touches_other_mappings_has_another_buffer_and_what_leaves_them_is_refused() {
    alone(|sim| {
        if !is_9() {
            return;
        }
        let device = device(0);
        enter(&sim, 0);
        let bound = device.bind_current().unwrap();
        let memory = expandable(&sim, 0, &[2 * MIB, 2 * MIB]);
        let buffer = |offset, len| {
            let part = memory.part(offset, len).unwrap();
            bound.locate(part.addr, part.len).unwrap().allocation.unwrap().buffer
        };
        assert_eq!(buffer(0, 64), buffer(MIB, MIB));
        let all = [buffer(0, 64), buffer(2 * MIB, 64), buffer(0, 4 * MIB)];
        assert!(all[0] != all[1] && all[1] != all[2] && all[0] != all[2]);
        assert_eq!(bound.locate(memory.addr, 4 * MIB + 1).unwrap_err().kind(), Kind::InvalidRange);
        // Grown, as expandable segments are.
        map(&sim, 0, memory.addr + 4 * MIB, 2 * MIB);
        bound.locate(memory.addr, 6 * MIB).unwrap();
        // Handles that are asked about are given back.
        assert_eq!(
            sim.calls("aclrtMemRetainAllocationHandle").iter().filter(|call| call.status == Some(0)).count(),
            sim.calls("aclrtFreePhysical").len()
        );
    });
}

#[test]
fn neighbours_are_not_one_allocation() {
    alone(|sim| {
        let device = device(0);
        enter(&sim, 0);
        let bound = device.bind_current().unwrap();
        let memory = bound.allocate(4096).unwrap();
        let beyond = bound.locate(memory.region().addr, 4097).unwrap_err();
        assert_eq!(beyond.kind(), Kind::InvalidRange);
        if is_9() {
            let foreign = foreign(&sim, device, 2 * MIB);
            let len = bound.locate(foreign.addr, 1).unwrap().allocation.unwrap().len;
            assert_eq!(bound.locate(foreign.addr, len + 1).unwrap_err().kind(), Kind::InvalidRange);
        }
    });
}

#[test]
fn running_out_says_what_was_asked_and_what_is_free() {
    alone(|_| {
        let device = device(0);
        let error = device.buffer(1 << 40).unwrap_err();
        assert_eq!(error.kind(), Kind::OutOfMemory);
        let text = error.to_string();
        assert!(text.contains(&(1u64 << 40).to_string()) && text.contains("bytes are free"), "{text}");
        assert_eq!(device.buffer(0).unwrap_err().kind(), Kind::InvalidArgument);
        assert_eq!(device.buffer(usize::MAX).unwrap_err().kind(), Kind::OutOfMemory);
    });
}

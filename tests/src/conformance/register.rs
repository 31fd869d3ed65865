//! Registrations: guards, counted, split, rolled back.

use hal::{Device, Kind, Memory, Region};

use super::{Page, cases};
use crate::fixture::{Fixture, Refuse};

cases! {
    a_region_is_registered_until_its_guard_is_dropped,
    host_memory_is_registered_too [RegisterHost],
    the_same_region_again_only_counts,
    neighbours_are_registered_separately,
    a_partial_overlap_is_refused,
    no_bytes_are_refused,
    a_guard_is_dropped_on_any_thread,
    a_reused_address_is_registered_afresh [AddressReuse],
    a_large_region_is_split [RegisterLimit],
    a_failing_part_rolls_the_earlier_ones_back [RegisterLimit, Faults],
    an_unaligned_region_is_refused [RegisterAlignment],
    a_region_of_another_device_is_refused [SecondDevice],
}

fn a_region_is_registered_until_its_guard_is_dropped<D: Device>(f: &dyn Fixture<D>) {
    let bound = f.device().bind_current().unwrap();
    let before = f.registered();
    let memory = bound.allocate(4096).unwrap();
    let guard = bound.register(memory.region()).unwrap();
    assert_eq!(f.registered(), before + 1);
    drop(guard);
    assert_eq!(f.registered(), before);
}

fn host_memory_is_registered_too<D: Device>(f: &dyn Fixture<D>) {
    let bound = f.device().bind_current().unwrap();
    let before = f.registered();
    let memory = Page::of(8192);
    let guard = bound.register(memory.region()).unwrap();
    assert_eq!(f.registered(), before + 1);
    drop(guard);
    assert_eq!(f.registered(), before);
}

fn the_same_region_again_only_counts<D: Device>(f: &dyn Fixture<D>) {
    let bound = f.device().bind_current().unwrap();
    let before = f.registered();
    let (device, host) = (bound.allocate(4096).unwrap(), Page::of(4096));
    let host = f.device().caps().register_host.then(|| host.region());
    for region in host.into_iter().chain([device.region()]) {
        let first = bound.register(region).unwrap();
        let second = bound.register(region).unwrap();
        assert_eq!(f.registered(), before + 1);
        drop(first);
        assert_eq!(f.registered(), before + 1, "the other guard still holds it");
        drop(second);
        assert_eq!(f.registered(), before);
    }
}

fn neighbours_are_registered_separately<D: Device>(f: &dyn Fixture<D>) {
    let bound = f.device().bind_current().unwrap();
    let before = f.registered();
    let memory = bound.allocate(3 * 4096).unwrap();
    let part = |i: usize| memory.region().part(i * 4096, 4096).unwrap();
    let guards = [1, 0, 2].map(|i| bound.register(part(i)).unwrap());
    assert_eq!(f.registered(), before + 3);
    drop(guards);
    assert_eq!(f.registered(), before);
}

fn a_partial_overlap_is_refused<D: Device>(f: &dyn Fixture<D>) {
    let bound = f.device().bind_current().unwrap();
    let (device, host) = (bound.allocate(4 * 4096).unwrap(), Page::of(4 * 4096));
    let host = f.device().caps().register_host.then(|| host.region());
    for region in host.into_iter().chain([device.region()]) {
        let before = f.registered();
        let _guard = bound.register(region.part(4096, 8192).unwrap()).unwrap();
        for (offset, len) in [(0, 8192), (4096, 4096), (8192, 8192), (0, 16384)] {
            let error = bound.register(region.part(offset, len).unwrap()).unwrap_err();
            assert_eq!(error.kind(), Kind::Overlap, "{offset}+{len}: {error}");
        }
        assert_eq!(f.registered(), before + 1);
    }
}

fn no_bytes_are_refused<D: Device>(f: &dyn Fixture<D>) {
    let bound = f.device().bind_current().unwrap();
    let memory = bound.allocate(4096).unwrap();
    let none = memory.region().part(0, 0).unwrap();
    assert_eq!(bound.register(none).unwrap_err().kind(), Kind::InvalidArgument);
}

fn a_guard_is_dropped_on_any_thread<D: Device>(f: &dyn Fixture<D>) {
    let bound = f.device().bind_current().unwrap();
    let before = f.registered();
    let memory = bound.allocate(4096).unwrap();
    let guard = bound.register(memory.region()).unwrap();
    // The thread is bound to nothing.
    std::thread::scope(|scope| scope.spawn(move || drop(guard)).join()).unwrap();
    assert_eq!(f.registered(), before);
}

fn a_reused_address_is_registered_afresh<D: Device>(f: &dyn Fixture<D>) {
    let bound = f.device().bind_current().unwrap();
    let first = bound.allocate(4096).unwrap();
    let addr = first.region().addr;
    let stale = bound.register(first.region()).unwrap();
    drop(first);
    let longer = bound.allocate(8192).unwrap();
    assert_eq!(longer.region().addr, addr, "the address was not reused, so this shows nothing");
    let fresh = bound.register(longer.region()).unwrap();
    let one = f.registered();
    drop(stale);
    assert_eq!(f.registered(), one, "the stale guard took the new registration back");
    drop(fresh);
    assert_eq!(f.registered(), one - 1);
}

fn a_large_region_is_split<D: Device>(f: &dyn Fixture<D>) {
    let bound = f.device().bind_current().unwrap();
    let before = f.registered();
    let limit = f.register_limit();
    for (len, parts) in [(limit, 1), (limit + 1, 2), (4 * limit + limit / 2, 5)] {
        let memory = bound.allocate(len).unwrap();
        let guard = bound.register(memory.region()).unwrap();
        assert_eq!(f.registered(), before + parts);
        drop(guard);
        assert_eq!(f.registered(), before);
    }
}

fn a_failing_part_rolls_the_earlier_ones_back<D: Device>(f: &dyn Fixture<D>) {
    let bound = f.device().bind_current().unwrap();
    let before = f.registered();
    let memory = bound.allocate(3 * f.register_limit()).unwrap();
    for part in 1..=3 {
        f.refuse(Refuse::Pin, part, 4242);
        let error = bound.register(memory.region()).unwrap_err();
        assert_eq!(error.vendor_code(), Some(4242));
        assert_eq!(f.registered(), before, "part {part} failed and others were left registered");
    }
    // And the whole can be registered afterwards.
    let _guard = bound.register(memory.region()).unwrap();
    assert_eq!(f.registered(), before + 3);
}

fn an_unaligned_region_is_refused<D: Device>(f: &dyn Fixture<D>) {
    let bound = f.device().bind_current().unwrap();
    let before = f.registered();
    let memory = bound.allocate(8192).unwrap();
    let Region { addr, place, .. } = memory.region();
    let off = Region { addr: addr + f.register_alignment() / 2, len: 4096, place };
    assert_eq!(bound.register(off).unwrap_err().kind(), Kind::InvalidArgument);
    assert_eq!(f.registered(), before);
}

fn a_region_of_another_device_is_refused<D: Device>(f: &dyn Fixture<D>) {
    let theirs = hal::DeviceExt::buffer(&f.second(), 4096).unwrap();
    let bound = f.device().bind_current().unwrap();
    assert_eq!(bound.register(theirs.region()).unwrap_err().kind(), Kind::DeviceMismatch);
}

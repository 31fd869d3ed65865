//! Where memory lives, getting it, and moving bytes.

use hal::{Device, DeviceExt, Kind, Memory, Place, Region};

use super::{cases, pattern, read, write};
use crate::fixture::Fixture;

cases! {
    an_allocation_is_located_at_both_ends_and_inside,
    a_region_that_leaves_its_allocation_is_refused,
    the_byte_after_an_allocation_is_not_of_it,
    no_bytes_are_located_by_their_address,
    heap_memory_is_the_hosts_and_has_no_allocation [ForeignPointers],
    two_allocations_have_two_buffer_ids,
    a_reused_address_has_a_new_buffer_id [AddressReuse],
    an_allocation_of_no_bytes_is_refused,
    more_memory_than_there_is_is_refused_with_the_size,
    freed_memory_can_be_had_again,
    memory_is_freed_on_any_thread,
    bytes_come_back_as_they_went_in,
    a_copy_starts_and_ends_where_it_was_told,
    a_copy_within_the_device_moves_the_bytes,
    copies_of_different_lengths_are_refused,
    a_copy_of_no_bytes_does_nothing,
    memory_of_another_device_is_located_there [SecondDevice],
    a_copy_of_another_devices_memory_is_refused [SecondDevice],
    a_copy_waits_for_nothing_the_caller_queued,
    work_queued_after_a_copy_finds_the_bytes,
}

fn an_allocation_is_located_at_both_ends_and_inside<D: Device>(f: &dyn Fixture<D>) {
    let bound = f.device().bind_current().unwrap();
    let memory = bound.allocate(4097).unwrap();
    let Region { addr, len, place } = memory.region();
    assert_eq!(len, 4097);
    let whole = bound.locate(addr, len).unwrap();
    let allocation = whole.allocation.expect("the device allocated it");
    assert_eq!((allocation.base, allocation.len), (addr, len));
    if let Place::Device(uuid) = place {
        assert_eq!(uuid, f.device().identity().uuid);
    }
    for (offset, part) in [(0, 1), (0, len), (1000, 64), (len - 1, 1)] {
        let located = bound.locate(addr + offset, part).unwrap();
        assert_eq!(located.region, Region { addr: addr + offset, len: part, place });
        assert_eq!(located.allocation, Some(allocation));
    }
}

fn a_region_that_leaves_its_allocation_is_refused<D: Device>(f: &dyn Fixture<D>) {
    let bound = f.device().bind_current().unwrap();
    let memory = bound.allocate(4096).unwrap();
    let addr = memory.region().addr;
    for (offset, len) in [(0, 4097), (4095, 2), (1, usize::MAX / 2)] {
        let error = bound.locate(addr + offset, len).unwrap_err();
        assert_eq!(error.kind(), Kind::InvalidRange, "{offset}+{len}: {error}");
    }
}

fn the_byte_after_an_allocation_is_not_of_it<D: Device>(f: &dyn Fixture<D>) {
    let bound = f.device().bind_current().unwrap();
    let memory = bound.allocate(1 << 20).unwrap();
    let region = memory.region();
    let own = bound.locate(region.addr, 1).unwrap().allocation.expect("allocated").buffer;
    // What is there, if anything, is somebody else's.
    if let Ok(after) = bound.locate(region.end(), 1) {
        assert_ne!(after.allocation.map(|a| a.buffer), Some(own));
    }
}

fn no_bytes_are_located_by_their_address<D: Device>(f: &dyn Fixture<D>) {
    let bound = f.device().bind_current().unwrap();
    let memory = bound.allocate(64).unwrap();
    let region = memory.region();
    let located = bound.locate(region.addr + 1, 0).unwrap();
    assert_eq!(located.region, region.part(1, 0).unwrap());
    assert_eq!(located.allocation.map(|a| a.base), Some(region.addr));
}

fn heap_memory_is_the_hosts_and_has_no_allocation<D: Device>(f: &dyn Fixture<D>) {
    let bound = f.device().bind_current().unwrap();
    let (heap, stack) = (vec![0u8; 4096], [0u8; 64]);
    for bytes in [&heap[..], &stack[..], &heap[1..2]] {
        let addr = bytes.as_ptr().expose_provenance();
        let located = bound.locate(addr, bytes.len()).unwrap();
        assert_eq!(located.region, Region::host(addr, bytes.len()));
        assert_eq!(located.allocation, None);
    }
}

fn two_allocations_have_two_buffer_ids<D: Device>(f: &dyn Fixture<D>) {
    let bound = f.device().bind_current().unwrap();
    let (a, b) = (bound.allocate(64).unwrap(), bound.allocate(64).unwrap());
    let buffer = |memory: &D::Allocation| {
        bound.locate(memory.region().addr, 1).unwrap().allocation.expect("allocated").buffer
    };
    assert_ne!(buffer(&a), buffer(&b));
    let (a, b) = (a.region(), b.region());
    assert!(a.end() <= b.addr || b.end() <= a.addr, "{a:?} and {b:?} share bytes");
}

fn a_reused_address_has_a_new_buffer_id<D: Device>(f: &dyn Fixture<D>) {
    let bound = f.device().bind_current().unwrap();
    let at = |memory: D::Allocation| {
        let addr = memory.region().addr;
        (addr, bound.locate(addr, 1).unwrap().allocation.expect("allocated").buffer)
    };
    let (addr, buffer) = at(bound.allocate(4096).unwrap());
    let (again, new) = at(bound.allocate(4096).unwrap());
    assert_eq!(again, addr, "the address was not reused, so this shows nothing");
    assert_ne!(new, buffer);
}

fn an_allocation_of_no_bytes_is_refused<D: Device>(f: &dyn Fixture<D>) {
    let bound = f.device().bind_current().unwrap();
    assert_eq!(bound.allocate(0).unwrap_err().kind(), Kind::InvalidArgument);
}

fn more_memory_than_there_is_is_refused_with_the_size<D: Device>(f: &dyn Fixture<D>) {
    let bound = f.device().bind_current().unwrap();
    let error = bound.allocate(f.too_much()).unwrap_err();
    assert_eq!(error.kind(), Kind::OutOfMemory);
    assert!(error.to_string().contains(&f.too_much().to_string()), "{error}");
    bound.allocate(64).unwrap();
}

fn freed_memory_can_be_had_again<D: Device>(f: &dyn Fixture<D>) {
    let bound = f.device().bind_current().unwrap();
    for _ in 0..64 {
        // Together more than a leaking device would have.
        let len = (f.too_much() / 32).min(64 << 20);
        bound.allocate(len).unwrap();
    }
}

fn memory_is_freed_on_any_thread<D: Device>(f: &dyn Fixture<D>) {
    let len = (f.too_much() / 4).min(64 << 20);
    for _ in 0..8 {
        let memory = f.device().bind_current().unwrap().allocate(len).unwrap();
        // The thread is bound to nothing.
        std::thread::scope(|scope| scope.spawn(move || drop(memory)).join()).unwrap();
    }
}

fn bytes_come_back_as_they_went_in<D: Device>(f: &dyn Fixture<D>) {
    let bound = f.device().bind_current().unwrap();
    for len in [1, 63, 4095, 4096, 4097, (1 << 20) + 1] {
        let memory = bound.allocate(len).unwrap();
        let bytes = pattern(7, len);
        write(&bound, memory.region(), &bytes);
        assert!(read(&bound, memory.region()) == bytes, "{len} bytes differ");
    }
}

fn a_copy_starts_and_ends_where_it_was_told<D: Device>(f: &dyn Fixture<D>) {
    let bound = f.device().bind_current().unwrap();
    let memory = bound.allocate(8192).unwrap();
    write(&bound, memory.region(), &[0xee; 8192]);
    write(&bound, memory.region().part(4095, 3).unwrap(), &[1, 2, 3]);
    let all = read(&bound, memory.region());
    assert_eq!(all[4094..4099], [0xee, 1, 2, 3, 0xee]);
    assert!(all[..4095].iter().chain(&all[4098..]).all(|byte| *byte == 0xee));
    assert_eq!(read(&bound, memory.region().part(4096, 2).unwrap()), [2, 3]);
}

fn a_copy_within_the_device_moves_the_bytes<D: Device>(f: &dyn Fixture<D>) {
    let bound = f.device().bind_current().unwrap();
    let (from, to) = (bound.allocate(4096).unwrap(), bound.allocate(8192).unwrap());
    let bytes = pattern(3, 4096);
    write(&bound, from.region(), &bytes);
    write(&bound, to.region(), &[0; 8192]);
    let middle = to.region().part(100, 4096).unwrap();
    // SAFETY: both are allocated, distinct, and nothing is queued on them.
    unsafe { bound.copy(middle, from.region()) }.unwrap();
    let all = read(&bound, to.region());
    assert!(all[100..4196] == bytes && all[..100] == [0; 100] && all[4196..] == [0; 3996]);
}

fn copies_of_different_lengths_are_refused<D: Device>(f: &dyn Fixture<D>) {
    let bound = f.device().bind_current().unwrap();
    let memory = bound.allocate(64).unwrap();
    write(&bound, memory.region(), &[5; 64]);
    let mut bytes = [0u8; 63];
    let short = Region::host(bytes.as_mut_ptr().expose_provenance(), bytes.len());
    for (to, from) in [(memory.region(), short), (short, memory.region())] {
        // SAFETY: both are allocated and nothing else touches them.
        let error = unsafe { bound.copy(to, from) }.unwrap_err();
        assert_eq!(error.kind(), Kind::InvalidArgument);
    }
    assert_eq!(read(&bound, memory.region()), [5; 64]);
}

fn a_copy_of_no_bytes_does_nothing<D: Device>(f: &dyn Fixture<D>) {
    let bound = f.device().bind_current().unwrap();
    let memory = bound.allocate(64).unwrap();
    write(&bound, memory.region(), &[5; 64]);
    write(&bound, memory.region().part(64, 0).unwrap(), &[]);
    assert_eq!(read(&bound, memory.region()), [5; 64]);
}

fn memory_of_another_device_is_located_there<D: Device>(f: &dyn Fixture<D>) {
    let second = f.second();
    let memory = second.buffer(64).unwrap();
    let bound = f.device().bind_current().unwrap();
    let located = bound.locate(memory.region().addr, 64).unwrap();
    assert_eq!(located.region.place, Place::Device(second.identity().uuid));
}

fn a_copy_of_another_devices_memory_is_refused<D: Device>(f: &dyn Fixture<D>) {
    let theirs = f.second().buffer(64).unwrap();
    let bound = f.device().bind_current().unwrap();
    let ours = bound.allocate(64).unwrap();
    for (to, from) in [(ours.region(), theirs.region()), (theirs.region(), ours.region())] {
        // SAFETY: both are allocated and nothing else touches them.
        let error = unsafe { bound.copy(to, from) }.unwrap_err();
        assert_eq!(error.kind(), Kind::DeviceMismatch);
    }
}

fn a_copy_waits_for_nothing_the_caller_queued<D: Device>(f: &dyn Fixture<D>) {
    let (bound, stream) = (f.device().bind_current().unwrap(), f.stream());
    let (queued, copied) = (bound.allocate(64).unwrap(), bound.allocate(64).unwrap());
    f.hold(stream);
    f.queue_fill(stream, queued.region(), 1);
    f.device().with_stream(stream, || {
        write(&bound, copied.region(), &[2; 64]);
        assert_eq!(read(&bound, copied.region()), [2; 64]);
    });
    assert_eq!(bound.sync_stream(stream, hal::Deadline::passed()).unwrap_err().kind(), Kind::Timeout);
    f.release(stream);
    bound.sync_stream(stream, super::patient()).unwrap();
}

fn work_queued_after_a_copy_finds_the_bytes<D: Device>(f: &dyn Fixture<D>) {
    let (bound, stream) = (f.device().bind_current().unwrap(), f.stream());
    let device = bound.allocate(64).unwrap();
    for byte in 0..50 {
        write(&bound, device.region(), &[byte; 64]);
        // It overwrites half of what was copied; were the copy still under way, the wrong half would win.
        f.queue_fill(stream, device.region().part(0, 32).unwrap(), byte + 100);
        bound.sync_stream(stream, super::patient()).unwrap();
        assert_eq!(read(&bound, device.region()), [[byte + 100; 32], [byte; 32]].concat());
    }
}

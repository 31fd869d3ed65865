//! Virtual memory: reserved addresses, physical memory, and mappings in several pieces.

use backend_cpu::strict::{GRANULARITY, Machine, MemoryKind, Residence, Why};

use crate::{builder, machine};

fn mapped(machine: &Machine, chunks: usize) -> (usize, Vec<u64>) {
    let range = machine.reserve((chunks + 1) * GRANULARITY, 0).unwrap();
    let handles = (0..chunks).map(|at| {
        let handle = machine.create_physical(0, GRANULARITY, true).unwrap();
        machine.map(range + at * GRANULARITY, GRANULARITY, handle).unwrap();
        handle
    });
    let handles = handles.collect();
    machine.set_access(range, chunks * GRANULARITY, 0, true).unwrap();
    (range, handles)
}

#[test]
fn pieces_make_one_range_that_ends_where_nothing_is_mapped() {
    let (machine, ..) = machine();
    let (range, _) = mapped(&machine, 3);
    let start = range + GRANULARITY - 1;
    machine.poke(start, &vec![7; GRANULARITY + 2]).unwrap();
    assert_eq!(machine.peek(start - 1, 2), Ok(vec![0, 7]));
    assert_eq!(machine.peek(range + 2 * GRANULARITY - 1, 3), Ok(vec![7, 7, 0]));
    let beyond = machine.peek(range + 3 * GRANULARITY - 1, 2).unwrap_err();
    assert_eq!(beyond.why, Why::OutOfRange);
    assert!(machine.is_device_address(range + 3 * GRANULARITY) && !machine.is_device_address(0));

    let known = machine.attributes(range + GRANULARITY + 5).unwrap();
    assert_eq!((known.base, known.len), (range + GRANULARITY, GRANULARITY));
    assert_eq!(known.range, (range, 4 * GRANULARITY));
    assert_eq!(known.residence, Residence::Device(0, MemoryKind::VmmShareable));
    assert_ne!(known.physical, machine.attributes(range).unwrap().physical);
}

#[test]
fn work_needs_access_and_access_is_given_per_device() {
    let (machine, ..) = machine();
    let (range, _) = mapped(&machine, 1);
    for device in [0, 1] {
        machine.bind(device).unwrap();
        let filled = machine.fill(backend_cpu::strict::NULL_STREAM, range, 8, 1);
        assert_eq!(filled.map_err(|e| e.why), if device == 0 { Ok(()) } else { Err(Why::InvalidValue) });
        assert_eq!(machine.has_access(range, device), Ok(device == 0));
    }
    machine.set_access(range, GRANULARITY, 1, true).unwrap();
    machine.fill(backend_cpu::strict::NULL_STREAM, range, 8, 1).unwrap();
}

#[test]
fn physical_memory_lives_as_long_as_it_is_held_or_mapped() {
    let (machine, ..) = machine();
    machine.bind(0).unwrap();
    let (free, total) = machine.memory_info().unwrap();
    let (range, handles) = mapped(&machine, 2);
    let left = free - 2 * GRANULARITY;
    assert_eq!(machine.memory_info(), Ok((left, total)));
    handles.iter().for_each(|&handle| machine.release_physical(handle).unwrap());
    assert_eq!(machine.release_physical(handles[0]).unwrap_err().why, Why::InvalidValue);
    assert_eq!((machine.memory_info(), machine.physical_of(handles[0]).is_err()), (Ok((left, total)), true));
    assert_eq!(machine.retain_physical(range + 1), Ok(handles[0]));
    machine.unmap(range, 2 * GRANULARITY).unwrap();
    assert_eq!(machine.memory_info(), Ok((free - GRANULARITY, total)));
    machine.release_physical(handles[0]).unwrap();
    assert_eq!(machine.memory_info(), Ok((free, total)));
    machine.unreserve(range, 3 * GRANULARITY).unwrap();
}

#[test]
fn what_is_not_whole_is_refused() {
    let (machine, ..) = machine();
    let (range, handles) = mapped(&machine, 2);
    let refused = [
        machine.reserve(GRANULARITY + 1, 0).map(drop),
        machine.create_physical(0, 0, false).map(drop),
        machine.map(range, GRANULARITY, handles[0]),
        machine.map(range + 3 * GRANULARITY, GRANULARITY, handles[0]),
        machine.unmap(range, GRANULARITY / 2),
        machine.unmap(range + GRANULARITY, 2 * GRANULARITY),
        machine.unreserve(range, GRANULARITY),
        machine.unreserve(range, 3 * GRANULARITY),
        machine.bind(0).and_then(|()| machine.free(range)),
    ];
    for (at, answer) in refused.into_iter().enumerate() {
        assert_eq!(answer.unwrap_err().why, Why::InvalidValue, "{at}");
    }
    assert_eq!(machine.create_physical(9, GRANULARITY, false).unwrap_err().why, Why::InvalidDevice);
    let all = machine.create_physical(0, 1 << 40, false).unwrap_err();
    assert_eq!(all.why, Why::OutOfMemory);
}

#[test]
fn a_descriptor_opens_on_its_own_device_wherever_that_is_in_the_list() {
    let (machine, ..) = machine();
    let [shared, private] =
        [true, false].map(|share| machine.create_physical(1, GRANULARITY, share).unwrap());
    assert_eq!(machine.export_physical(private).unwrap_err().why, Why::NotShareable);
    let descriptor = || machine.export_physical(shared).unwrap();

    let other = builder().visible([1]).build().unwrap();
    let handle = other.import_physical(descriptor()).unwrap();
    let physical = other.physical_of(handle).unwrap();
    assert_eq!((physical.device, physical.len, physical.imported), (0, GRANULARITY, true));
    assert_eq!(other.export_physical(handle).unwrap_err().why, Why::NotShareable);
    assert_eq!(other.open_imports(), 1);
    let range = other.reserve(GRANULARITY, 0).unwrap();
    other.map(range, GRANULARITY, handle).unwrap();
    other.release_physical(handle).unwrap();
    other.poke(range, &[5]).unwrap();
    assert_eq!((other.open_imports(), other.live_allocations()), (1, 0));
    other.unmap(range, GRANULARITY).unwrap();
    assert_eq!(other.open_imports(), 0);

    let range = machine.reserve(GRANULARITY, 0).unwrap();
    machine.map(range, GRANULARITY, shared).unwrap();
    assert_eq!(machine.peek(range, 1), Ok(vec![5]), "the importer wrote to the same memory");

    for stranger in [builder().visible([0]), builder().seed(3)] {
        let refused = stranger.build().unwrap().import_physical(descriptor()).unwrap_err();
        assert_eq!(refused.why, Why::InvalidDevice);
    }
    let file = std::fs::File::open("/dev/null").unwrap();
    assert_eq!(machine.import_physical(file.into()).unwrap_err().why, Why::ImportRefused);
}

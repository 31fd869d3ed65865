//! The host backend keeps the contract.

mod common;

use std::{
    os::fd::OwnedFd,
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use backend_cpu::{CpuDevice, CpuStream};
use common::{assert_success, child, is_child, pass, passed};
use hal::{
    Deadline, Device, DeviceExt, DeviceUuid, Export, Exported, IpcHandle, Kind, Memory, NotExportable, Place,
    Region, Token,
};
use rustix::{
    fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create},
    process::{Resource, Rlimit, setrlimit},
};

fn host() -> CpuDevice {
    CpuDevice::open().unwrap()
}

fn exported(export: Export) -> Exported {
    match export {
        Export::Handle(exported) => exported,
        Export::NotExportable(reason) => panic!("{reason:?}"),
    }
}

/// A stream with a gate: nothing queued after this runs until the gate is dropped.
fn gate(device: &CpuDevice, stream: CpuStream) -> mpsc::Sender<()> {
    let (gate, closed) = mpsc::channel::<()>();
    device.enqueue(stream, move || assert!(closed.recv().is_err())).unwrap();
    gate
}

#[test]
fn two_tensors_of_one_allocation_export_one_handle_and_their_offsets() {
    let device = host();
    let bound = device.bind_current().unwrap();
    let memory = bound.allocate(10_000).unwrap();
    let whole = memory.region();
    let a = exported(bound.export_ipc(whole.part(0, 100).unwrap()).unwrap());
    let b = exported(bound.export_ipc(whole.part(9_000, 1_000).unwrap()).unwrap());
    assert_eq!(a.handle, b.handle);
    assert_eq!((a.offset, a.len, b.offset, b.len), (0, 100, 9_000, 1_000));
    assert_eq!(a.handle.len, 10_000);
    assert!(a.handle.is_well_formed(a.descriptors.len()));
}

#[test]
fn what_reaches_outside_an_allocation_is_an_invalid_range() {
    let device = host();
    let bound = device.bind_current().unwrap();
    let mut memory = bound.allocate(5_000).unwrap();
    let Region { addr, len, .. } = memory.region();
    for (addr, len) in [(addr, len + 1), (addr + 1, len), (addr - 8, 16), (addr + len - 1, 2)] {
        assert_eq!(bound.locate(addr, len).unwrap_err().kind(), Kind::InvalidRange);
        assert_eq!(bound.export_ipc(Region::host(addr, len)).unwrap_err().kind(), Kind::InvalidRange);
    }
    assert_eq!(bound.locate(usize::MAX, 2).unwrap_err().kind(), Kind::InvalidRange);
    assert_eq!(bound.locate(usize::MAX, 1).unwrap_err().kind(), Kind::InvalidRange);
    assert_eq!(bound.locate(usize::MAX, 0).unwrap().allocation, None);
    assert_eq!(bound.locate(0, 0).unwrap_err().kind(), Kind::InvalidArgument);
    assert_eq!(memory.write(4_999, &[1, 2]).unwrap_err().kind(), Kind::InvalidRange);
    assert_eq!(memory.read(usize::MAX, &mut [0; 2]).unwrap_err().kind(), Kind::InvalidRange);
}

#[test]
fn heap_memory_has_no_allocation_and_cannot_be_exported() {
    let device = host();
    let bound = device.bind_current().unwrap();
    let heap = Box::new([0u8; 64]);
    let located = bound.locate(heap.as_ptr() as usize, 64).unwrap();
    assert_eq!((located.region.place, located.allocation), (Place::Host, None));
    let export = bound.export_ipc(located.region).unwrap();
    assert!(matches!(export, Export::NotExportable(NotExportable::HostMemory)));
}

#[test]
fn a_buffer_is_known_by_its_id_until_it_is_freed() {
    let device = host();
    let bound = device.bind_current().unwrap();
    let locate = |region: Region| bound.locate(region.addr, region.len).unwrap().allocation;
    let first = bound.allocate(4096).unwrap();
    let region = first.region();
    let known = locate(region).unwrap();
    assert_eq!((known.base, known.len), (region.addr, 4096));
    drop(first);
    // Another test may have got the address meanwhile, but not the id.
    assert_ne!(locate(region).map(|allocation| allocation.buffer), Some(known.buffer));
    let second = bound.allocate(4096).unwrap();
    assert_ne!(locate(second.region()).unwrap().buffer, known.buffer);
}

#[test]
fn allocating_nothing_or_a_tebibyte_is_refused_with_the_sizes() {
    let device = host();
    let bound = device.bind_current().unwrap();
    assert_eq!(bound.allocate(0).unwrap_err().kind(), Kind::InvalidArgument);
    for asked in [1usize << 40, usize::MAX] {
        let e = bound.allocate(asked).unwrap_err();
        assert_eq!(e.kind(), Kind::OutOfMemory);
        let text = e.to_string();
        assert!(text.contains(&asked.to_string()) && text.contains("bytes available"), "{text}");
    }
}

#[test]
fn a_limit_on_the_address_space_is_out_of_memory_and_named() {
    let name = "a_limit_on_the_address_space_is_out_of_memory_and_named";
    if !is_child() {
        return assert_success(child(name).output().unwrap());
    }
    let device = host();
    let bound = device.bind_current().unwrap();
    let limit = 512u64 << 20;
    setrlimit(Resource::As, Rlimit { current: Some(limit), maximum: Some(limit) }).unwrap();
    let e = bound.allocate(1 << 30).unwrap_err();
    assert_eq!(e.kind(), Kind::OutOfMemory);
    assert!(e.to_string().contains(&limit.to_string()), "{e}");
    assert_eq!(bound.allocate(1 << 40).unwrap_err().kind(), Kind::OutOfMemory);
}

#[test]
fn another_process_opens_a_buffer_by_its_descriptor() {
    let name = "another_process_opens_a_buffer_by_its_descriptor";
    let device = host();
    let bound = device.bind_current().unwrap();
    if is_child() {
        let (handle, descriptors) = passed();
        let import = bound.import_ipc(&handle, descriptors).unwrap();
        let mut bytes = [0; 4];
        import.read(5_000, &mut bytes).unwrap();
        assert_eq!(bytes, [0xab; 4]);
        import.write(0, b"seen").unwrap();
        let again = bound.export_ipc(import.region()).unwrap();
        assert!(matches!(again, Export::NotExportable(NotExportable::Imported)));
        return;
    }
    let mut memory = bound.allocate(10_000).unwrap();
    memory.write(5_000, &[0xab; 4]).unwrap();
    let export = exported(bound.export_ipc(memory.region()).unwrap());
    let mut child = child(name);
    pass(&mut child, &export);
    assert_success(child.output().unwrap());
    let mut bytes = [0; 4];
    memory.read(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"seen");
}

#[test]
fn an_import_outlives_the_exporters_buffer() {
    let device = host();
    let bound = device.bind_current().unwrap();
    let mut memory = bound.allocate(4096).unwrap();
    memory.write(0, &[7; 4096]).unwrap();
    let export = exported(bound.export_ipc(memory.region()).unwrap());
    let import = bound.import_ipc(&export.handle, export.descriptors).unwrap();
    drop(memory);
    let mut bytes = [0; 4096];
    import.read(0, &mut bytes).unwrap();
    assert_eq!(bytes, [7; 4096]);
}

#[test]
fn an_import_refuses_what_a_peer_could_hurt_us_with() {
    let device = host();
    let bound = device.bind_current().unwrap();
    let handle = |len: u64, lens: Vec<u64>| IpcHandle {
        device: device.identity().uuid,
        buffer: hal::BufferId(1),
        exporter: 1,
        len,
        token: Token::Descriptors(lens),
    };
    let memfd = |len: u64, seals: SealFlags| {
        let fd = memfd_create("peer", MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&fd, len).unwrap();
        fcntl_add_seals(&fd, seals).unwrap();
        fd
    };
    let refused = |handle: &IpcHandle, fds: Vec<OwnedFd>| {
        let e = bound.import_ipc(handle, fds).unwrap_err();
        assert_eq!(e.kind(), Kind::ImportRefused, "{e}");
        e.to_string()
    };
    let one = handle(4096, vec![4096]);
    assert!(refused(&one, vec![memfd(4096, SealFlags::empty())]).contains("not sealed"));
    assert!(refused(&one, vec![memfd(4095, SealFlags::SHRINK)]).contains("4095 bytes"));
    assert!(refused(&one, vec![std::fs::File::open("/dev/null").unwrap().into()]).contains("not a memfd"));
    assert!(refused(&one, vec![]).contains("one descriptor"));
    let two = vec![memfd(4096, SealFlags::SHRINK), memfd(4096, SealFlags::SHRINK)];
    assert!(refused(&handle(8192, vec![4096, 4096]), two).contains("one descriptor"));
    assert!(
        refused(&handle(u64::MAX, vec![u64::MAX]), vec![memfd(1, SealFlags::SHRINK)]).contains("1 bytes")
    );
    let unwritable = refused(&one, vec![memfd(4096, SealFlags::SHRINK | SealFlags::WRITE)]);
    assert!(unwritable.contains("could not be mapped"), "{unwritable}");
    // And the good one, so that the others were refused for the right reason.
    bound.import_ipc(&one, vec![memfd(4096, SealFlags::SHRINK)]).unwrap();
}

#[test]
fn a_handle_of_another_host_is_a_device_mismatch() {
    let device = host();
    let bound = device.bind_current().unwrap();
    let memory = bound.allocate(64).unwrap();
    let mut export = exported(bound.export_ipc(memory.region()).unwrap());
    export.handle.device = DeviceUuid([9; 16]);
    let e = bound.import_ipc(&export.handle, export.descriptors).unwrap_err();
    assert_eq!(e.kind(), Kind::DeviceMismatch);
}

#[test]
fn waiting_returns_when_the_queued_work_is_done_and_not_before() {
    let device = host();
    let bound = device.bind_current().unwrap();
    let memory = device.buffer(4096).unwrap();
    let owner = device.create_stream().unwrap();
    let stream = owner.stream();
    let gate = gate(&device, stream);
    let target = memory.region().addr;
    device
        .enqueue(stream, move || {
            // SAFETY: the buffer outlives the stream's work, and nobody else touches it until that is done.
            unsafe { std::ptr::with_exposed_provenance_mut::<u8>(target).write_bytes(0xab, 4096) }
        })
        .unwrap();
    let event = device.record(stream).unwrap();

    let late = Deadline::after(Duration::from_millis(20));
    assert_eq!(bound.sync_stream(stream, late).unwrap_err().kind(), Kind::Timeout);
    assert_eq!(event.wait(Deadline::passed()).unwrap_err().kind(), Kind::Timeout);
    assert!(!event.is_complete());
    let start = Instant::now();
    assert_eq!(bound.sync_stream(stream, Deadline::passed()).unwrap_err().kind(), Kind::Timeout);
    assert!(start.elapsed() < Duration::from_secs(1), "a question must not block");

    drop(gate);
    bound.sync_stream(stream, Deadline::NEVER).unwrap();
    assert!(event.is_complete());
    bound.sync_stream(stream, Deadline::passed()).unwrap();
    let mut bytes = [0; 4096];
    memory.allocation().read(0, &mut bytes).unwrap();
    assert_eq!(bytes, [0xab; 4096]);
}

#[test]
fn one_stream_does_not_wait_for_another() {
    let device = host();
    let bound = device.bind_current().unwrap();
    let (held, free) = (device.create_stream().unwrap(), device.create_stream().unwrap());
    let _gate = gate(&device, held.stream());
    bound.sync_stream(free.stream(), Deadline::NEVER).unwrap();
    bound.sync_stream(CpuStream::DEFAULT, Deadline::NEVER).unwrap();
}

#[test]
fn a_panic_in_queued_work_is_told_once_and_the_stream_goes_on() {
    let device = host();
    let bound = device.bind_current().unwrap();
    let owner = device.create_stream().unwrap();
    let stream = owner.stream();
    device.enqueue(stream, || panic!("kernel fault")).unwrap();
    let e = bound.sync_stream(stream, Deadline::NEVER).unwrap_err();
    assert_eq!(e.kind(), Kind::Driver);
    assert!(e.to_string().contains("kernel fault"), "{e}");
    let (ran, running) = mpsc::channel();
    device.enqueue(stream, move || ran.send(()).unwrap()).unwrap();
    bound.sync_stream(stream, Deadline::NEVER).unwrap();
    running.try_recv().unwrap();
}

#[test]
fn a_destroyed_stream_finishes_its_work_and_is_unknown_from_then_on() {
    let device = host();
    let bound = device.bind_current().unwrap();
    let owner = device.create_stream().unwrap();
    let stream = owner.stream();
    let gate = gate(&device, stream);
    let event = device.record(stream).unwrap();
    drop(owner);
    for handle in [stream, CpuStream::from_raw(u64::MAX)] {
        let e = bound.sync_stream(handle, Deadline::NEVER).unwrap_err();
        assert_eq!(e.kind(), Kind::InvalidArgument);
        assert!(device.enqueue(handle, || ()).is_err() && device.record(handle).is_err());
    }
    drop(gate);
    event.wait(Deadline::after(Duration::from_secs(10))).unwrap();
}

#[test]
fn a_stream_cannot_wait_for_itself() {
    let device = host();
    let owner = device.create_stream().unwrap();
    let stream = owner.stream();
    let (answer, answered) = mpsc::channel();
    let inside = device.clone();
    device
        .enqueue(stream, move || {
            let outcome = inside.bind_current().unwrap().sync_stream(stream, Deadline::NEVER);
            answer.send(outcome.unwrap_err().kind()).unwrap();
        })
        .unwrap();
    assert_eq!(answered.recv_timeout(Duration::from_secs(10)).unwrap(), Kind::InvalidArgument);
}

#[test]
fn the_current_stream_is_the_named_one_and_the_threads_own() {
    let device = host();
    let bound = device.bind_current().unwrap();
    let owner = device.create_stream().unwrap();
    assert_eq!(bound.current_stream(), CpuStream::DEFAULT);
    device.with_stream(owner.stream(), || {
        assert_eq!(bound.current_stream(), owner.stream());
        thread::scope(|s| {
            s.spawn(|| {
                let bound = device.bind_current().unwrap();
                assert_eq!(bound.current_stream(), CpuStream::DEFAULT);
            });
        });
    });
    assert_eq!(bound.current_stream(), CpuStream::DEFAULT);
}

#[test]
fn a_copy_checks_lengths_and_places_and_allows_overlap() {
    let device = host();
    let bound = device.bind_current().unwrap();
    let mut bytes = [1u8, 2, 3, 4];
    let at = bytes.as_mut_ptr().expose_provenance();
    let elsewhere = Region { addr: at, len: 3, place: Place::Device(DeviceUuid([1; 16])) };
    let copy = |to, from| {
        // SAFETY: the regions are this array, which nobody else has.
        unsafe { bound.copy(to, from) }
    };
    let lens = copy(Region::host(at, 3), Region::host(at, 4)).unwrap_err();
    assert_eq!(lens.kind(), Kind::InvalidArgument);
    assert_eq!(copy(Region::host(at, 3), elsewhere).unwrap_err().kind(), Kind::DeviceMismatch);
    assert_eq!(copy(Region::host(0, 3), Region::host(at, 3)).unwrap_err().kind(), Kind::InvalidArgument);
    copy(Region::host(0, 0), Region::host(0, 0)).unwrap();
    copy(Region::host(at + 1, 3), Region::host(at, 3)).unwrap();
    assert_eq!(bytes, [1, 1, 2, 3]);
}

#[test]
fn a_registration_counts_and_refuses_partial_overlap() {
    let device = host();
    let bound = device.bind_current().unwrap();
    let memory = Arc::new(bound.allocate(4096).unwrap());
    let region = memory.region();
    let first = bound.register(region).unwrap();
    let second = bound.register(region).unwrap();
    assert_eq!(bound.register(region.part(0, 64).unwrap()).unwrap_err().kind(), Kind::Overlap);
    drop(first);
    assert_eq!(bound.register(region.part(0, 64).unwrap()).unwrap_err().kind(), Kind::Overlap);
    thread::spawn(move || drop(second)).join().unwrap();
    bound.register(region.part(0, 64).unwrap()).unwrap();
}

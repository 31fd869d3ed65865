//! Cases of the field's reports on the CUDA backend, through a client and a node in two processes with simulated drivers
//! of one machine. What one process can show is in the backend's own tests. No GPU takes part.

use std::{
    collections::HashSet, io, os::unix::process::CommandExt, process::Command, thread, time::Duration,
};

use backend_cuda::{CudaDevice, CudaStream};
use hal::{Device, DeviceExt, Kind};
use haulier::{Error, Options, Payload, Put, StoreClient};
use haulier_tests::{
    conformance::{pattern, read, write},
    cu,
    cuda::{self, CudaNode, alone, device, filled, misplaced, on, peek, sim},
    process::Serve,
    rig::{counter, eventually},
    simulated::client_process,
};

const PEER: &str = env!("CARGO_BIN_EXE_haulier-peer");
/// More than what may travel inside a message.
const LEN: usize = 64 << 10;
/// How many allocations of a client the node keeps open.
const OPEN_MAX: u64 = 64;
/// The deadline of what is to time out.
const HASTE: Duration = Duration::from_millis(300);

fn stored(puts: &[haulier::Result<Put>]) {
    assert!(puts.iter().all(|put| matches!(put, Ok(Put::Stored))), "{puts:?}");
}

fn nothing_was_misplaced(node: &CudaNode) {
    let wrong = misplaced();
    assert!(wrong.is_empty(), "{wrong:?}");
    node.every_call_had_its_device();
}

/// P28, P30.
#[test]
fn ten_thousand_allocations_at_reused_addresses_are_each_read_anew_and_closed() {
    alone(&[], || {
        let (node, device) = (CudaNode::new(PEER), device(0));
        let client = node.client(&device);
        let mut addresses = HashSet::new();
        for round in 0..10_000u64 {
            let bytes = round.to_le_bytes().repeat(32);
            let buffer = filled(&device, &bytes);
            addresses.insert(buffer.region().addr);
            client.upsert("k", &buffer).unwrap();
            drop(buffer);
            assert!(client.get("k").unwrap() == bytes, "stale bytes in round {round}");
            if round % 100 == 0 {
                let open = node.open_imports();
                assert!(open <= OPEN_MAX, "{open} are open after {round} rounds");
            }
        }
        assert!(addresses.len() < 100, "{} addresses: they were not reused", addresses.len());
        assert_eq!(node.calls("cuIpcOpenMemHandle_v2"), 10_000, "each had a handle of its own");
        drop(client);
        eventually("all is closed", || node.open_imports() == 0);
        assert_eq!(node.calls("cuIpcCloseMemHandle"), 10_000);
        assert_eq!(sim().live_allocations().unwrap(), 0);
    });
}

/// P04, P05, P11, P39.
#[test]
fn sixteen_clients_on_two_devices_have_the_right_one_in_each_call_and_give_the_callers_back() {
    alone(&[], || {
        let node = CudaNode::new(PEER);
        thread::scope(|scope| {
            for i in 0..16u8 {
                let node = &node;
                scope.spawn(move || {
                    let (device, other) = (device(u32::from(i % 2)), device(u32::from(1 - i % 2)));
                    let client = node.client(&device);
                    // An application's thread: without a context, with this device's, or with the other one's.
                    let bound = match i % 3 {
                        0 => None,
                        1 => Some(device.bind_current().unwrap()),
                        _ => Some(other.bind_current().unwrap()),
                    };
                    let context = || {
                        let mut context = 0u64;
                        assert_eq!(cu!(cuCtxGetCurrent(&mut context => *mut u64)), 0);
                        context
                    };
                    let before = context();
                    assert_eq!(before == 0, bound.is_none());
                    for round in 0..10u8 {
                        let key = format!("{i}/{round}");
                        let bytes = pattern(i * 10 + round, LEN);
                        let mut buffer = filled(&device, &bytes);
                        let registered = client.register_buffer(&buffer).unwrap();
                        assert_eq!(client.put(&key, &buffer).unwrap(), Put::Stored);
                        drop(registered);
                        sim().poke(buffer.region().addr as u64, &vec![0; LEN]).unwrap();
                        assert_eq!(client.get_into(&key, &mut buffer).unwrap(), LEN as u64);
                        assert!(peek(buffer.region()) == bytes, "{key}");
                        let host = vec![i; LEN];
                        drop(client.register_buffer(&host).unwrap());
                        assert_eq!(context(), before, "the caller's context was not given back");
                    }
                    drop(client);
                    assert_eq!(context(), before);
                });
            }
        });
        assert_eq!((node.stored("ipc"), node.stored("staging")), (160, 0));
        nothing_was_misplaced(&node);
        for logical in [0, 1] {
            assert_eq!(device(logical).failed_drops(), 0);
        }
    });
}

/// P25, P26.
#[test]
fn memory_without_a_handle_is_staged_and_the_rest_of_the_batch_goes_by_ipc() {
    alone(&[], || {
        let (node, device) = (CudaNode::new(PEER), device(0));
        let client = node.client(&device);
        let (pool, managed) = on(&device, cuda::unshareable);
        sim().poke(pool, &pattern(1, 4096)).unwrap();
        sim().poke(managed, &pattern(2, 4096)).unwrap();
        let (a, c) = (filled(&device, &pattern(3, LEN)), filled(&device, &pattern(4, LEN)));
        // SAFETY: both live as long as the process, and nothing is queued on them.
        let raw = |pointer: u64| unsafe { Payload::raw(pointer as usize, 4096) };
        stored(&client.batch_put(vec![
            ("a", (&a).into()),
            ("pool", raw(pool)),
            ("c", (&c).into()),
            ("managed", raw(managed)),
        ]));
        assert_eq!((node.stored("ipc"), node.stored("staging")), (2, 2));
        assert_eq!((node.fell_back("pool"), node.fell_back("managed")), (1, 1));
        for (key, seed, len) in [("a", 3, LEN), ("pool", 1, 4096), ("c", 4, LEN), ("managed", 2, 4096)] {
            assert!(client.get(key).unwrap() == pattern(seed, len), "{key}");
        }
        nothing_was_misplaced(&node);
    });
}

/// P25: PyTorch's expandable segments, chunk by chunk.
#[test]
fn virtual_memory_of_several_chunks_goes_by_descriptors() {
    alone(&[], || {
        let (node, device) = (CudaNode::new(PEER), device(1));
        let client = node.client(&device);
        const CHUNK: usize = 2 << 20;
        let segment = cuda::expandable(&device, &[CHUNK; 3]);
        let bytes = pattern(7, 3 * CHUNK);
        sim().poke(segment.addr as u64, &bytes).unwrap();
        // Across two borders, and within one chunk.
        let parts = [(CHUNK / 2, 2 * CHUNK), (CHUNK + 4096, LEN), (0, 3 * CHUNK)];
        for (i, (offset, len)) in parts.into_iter().enumerate() {
            // SAFETY: the memory lives as long as the process, and nothing is queued on it.
            let part = unsafe { Payload::raw(segment.addr + offset, len) };
            assert_eq!(client.put(&i.to_string(), part).unwrap(), Put::Stored);
            assert!(client.get(&i.to_string()).unwrap() == bytes[offset..offset + len], "part {i}");
        }
        assert_eq!((node.stored("ipc"), node.stored("staging")), (3, 0));
        assert_eq!(node.calls("cuIpcOpenMemHandle_v2"), 0);
        assert!(node.calls("cuMemImportFromShareableHandle") >= 3);

        // The node may not open them: the same call goes by staging. 1 stands for EPERM.
        node.faults("cuMemImportFromShareableHandle=1");
        let again = cuda::expandable(&device, &[CHUNK; 2]);
        sim().poke(again.addr as u64, &bytes[..2 * CHUNK]).unwrap();
        // SAFETY: as above.
        let part = unsafe { Payload::raw(again.addr, 2 * CHUNK) };
        assert_eq!(client.put("refused", part).unwrap(), Put::Stored);
        assert!(client.get("refused").unwrap() == bytes[..2 * CHUNK]);
        assert_eq!((node.stored("ipc"), node.fell_back("import_refused")), (3, 1));
        nothing_was_misplaced(&node);
    });
}

/// More parts than one handle names: all of it goes by staging and says why, what is small enough of it by IPC.
#[test]
fn virtual_memory_of_very_many_chunks_is_staged_byte_for_byte() {
    alone(&[], || {
        const CHUNK: usize = 2 << 20;
        const CHUNKS: usize = 300;
        let (node, device) = (CudaNode::with_pool(PEER, 700 << 20), device(0));
        let client = node.client(&device);
        let segment = cuda::expandable(&device, &[CHUNK; CHUNKS]);
        // No two chunks alike, so that none can stand for another one.
        let chunk = |i: usize| {
            let mut bytes = vec![i as u8; CHUNK];
            bytes[..8].copy_from_slice(&(i as u64).to_le_bytes());
            bytes
        };
        let bound = device.bind_current().unwrap();
        let there = |i| segment.part(i * CHUNK, CHUNK).unwrap();
        (0..CHUNKS).for_each(|i| write(&bound, there(i), &chunk(i)));
        // SAFETY: the memory lives as long as the process, and nothing is queued on it.
        let raw = |addr, len| unsafe { Payload::raw(addr, len) };
        assert_eq!(client.put("whole", raw(segment.addr, segment.len)).unwrap(), Put::Stored);
        assert_eq!((node.stored("staging"), node.stored("ipc"), node.fell_back("too_many_parts")), (1, 0, 1));
        let whole = client.view("whole").unwrap();
        assert_eq!(whole.len(), segment.len);
        assert!((0..CHUNKS).all(|i| whole[i * CHUNK..][..CHUNK] == chunk(i)));
        drop(whole);
        client.remove("whole").unwrap();

        let some = raw(segment.addr + 299 * CHUNK - 5, CHUNK + 5);
        assert_eq!(client.put("some", some).unwrap(), Put::Stored);
        assert_eq!((node.stored("staging"), node.stored("ipc")), (1, 1));
        assert!(client.get("some").unwrap() == [&chunk(298)[CHUNK - 5..], &chunk(299)].concat());

        // SAFETY: as above.
        let target = unsafe { haulier::Target::raw(segment.addr, segment.len) };
        client.put("back", raw(segment.addr, segment.len)).unwrap();
        (0..CHUNKS).for_each(|i| write(&bound, there(i), &[0; CHUNK]));
        assert_eq!(client.get_into("back", target).unwrap(), segment.len as u64);
        assert!((0..CHUNKS).all(|i| read(&bound, there(i)) == chunk(i)));
        nothing_was_misplaced(&node);
    });
}

/// P27.
#[test]
fn tensors_of_one_allocation_share_one_handle_and_all_go_by_ipc() {
    alone(&[], || {
        let (node, device) = (CudaNode::new(PEER), device(0));
        let client = node.client(&device);
        let bytes = pattern(5, 4 << 20);
        let whole = filled(&device, &bytes);
        let offsets = [0, 1 << 20, 3 << 20];
        let part = |offset| Payload::part(&whole, offset, 1 << 20).unwrap();
        let registered: Vec<_> = offsets.iter().map(|&o| client.register_buffer(part(o)).unwrap()).collect();
        sim().clear_log().unwrap();
        stored(&client.batch_put(vec![("0", part(0)), ("1", part(1 << 20)), ("3", part(3 << 20))]));
        assert_eq!((node.stored("ipc"), node.counter("haulier_fallbacks_total", &[])), (3, 0));
        assert_eq!((sim().count("cuIpcGetMemHandle"), node.calls("cuIpcOpenMemHandle_v2")), (1, 1));
        for (key, offset) in ["0", "1", "3"].into_iter().zip(offsets) {
            assert!(client.get(key).unwrap() == bytes[offset..offset + (1 << 20)], "{key}");
        }
        drop(registered);
        assert_eq!(device.registrations(), 0);
    });
}

/// P31, P35: a client that sees the second card only, and is killed. The kernel closes its socket; no timer is needed.
#[test]
fn a_killed_client_leaves_nothing_open_and_its_device_was_the_one_with_its_uuid() {
    alone(&[], || {
        let node = CudaNode::new(PEER);
        let other = node.client(&device(0));
        for bytes in [&[][..], &[1, 2, 3]] {
            let visible = [("CUDA_VISIBLE_DEVICES", "1")];
            let (mut peer, uuid) = client_process(&node, 0, bytes, LEN, &visible);
            assert_eq!(uuid, device(1).identity().uuid, "its device 0 is the machine's 1");
            assert_eq!(node.open_imports(), bytes.len() as u64);
            peer.kill();
            eventually("everything of the dead client is closed", || {
                node.open_imports() == 0 && node.counter("haulier_clients", &[]) == 1
            });
            assert_eq!(node.counter("haulier_grants", &[]), 0);
            for (key, byte) in bytes.iter().enumerate() {
                assert!(other.get(&key.to_string()).unwrap() == vec![*byte; LEN]);
            }
        }
        assert_eq!((node.stored("ipc"), node.stored("staging")), (3, 0));
        node.every_call_had_its_device();
    });
}

/// P35: the node does not see the client's card.
#[test]
fn memory_of_a_device_that_the_node_does_not_see_is_staged() {
    alone(&[], || {
        let node = CudaNode::with(PEER, true, &[("CUDA_VISIBLE_DEVICES", "0")]);
        let device = device(1);
        let client = node.client(&device);
        let mut buffer = filled(&device, &pattern(1, LEN));
        client.put("k", &buffer).unwrap();
        assert_eq!((node.stored("ipc"), node.fell_back("not_negotiated")), (0, 1));
        sim().poke(buffer.region().addr as u64, &vec![0; LEN]).unwrap();
        client.get_into("k", &mut buffer).unwrap();
        assert!(peek(buffer.region()) == pattern(1, LEN));
        assert_eq!(node.calls("cuIpcOpenMemHandle_v2"), 0, "it was tried all the same");
    });
}

/// P36: a daemon that knows the host only.
#[test]
fn a_daemon_without_cuda_serves_it_by_staging_and_says_why() {
    alone(&[], || {
        let daemon = Serve::pool("64MiB").arg("--backend").arg("cpu").start();
        let device = device(0);
        let client = StoreClient::connect(device.clone(), daemon.socket(), Options::default()).unwrap();
        let mut buffer = filled(&device, &pattern(1, LEN));
        client.put("k", &buffer).unwrap();
        sim().poke(buffer.region().addr as u64, &vec![0; LEN]).unwrap();
        client.get_into("k", &mut buffer).unwrap();
        assert!(peek(buffer.region()) == pattern(1, LEN));
        let metrics = client.metrics().unwrap();
        assert!(counter(&metrics, "haulier_fallbacks_total", &["reason=\"not_negotiated\""]) >= 1);
        assert_eq!(sim().count("cuIpcGetMemHandle"), 0, "a handle was made that nobody can open");
    });
}

/// P37.
#[test]
fn an_import_that_is_refused_is_staged_within_the_same_call() {
    alone(&[], || {
        let (node, device) = (CudaNode::new(PEER), device(1));
        let client = node.client(&device);
        for (i, code) in [205, 208, 9999].into_iter().enumerate() {
            let (first, second) = (filled(&device, &pattern(1, LEN)), filled(&device, &pattern(2, LEN)));
            node.faults(&format!("cuIpcOpenMemHandle_v2:1={code}"));
            let (refused, fine) = (format!("refused-{code}"), format!("fine-{code}"));
            stored(&client.batch_put(vec![(&refused, (&first).into()), (&fine, (&second).into())]));
            let times = i as u64 + 1;
            assert_eq!((node.stored("ipc"), node.fell_back("import_refused")), (times, times));
            assert!(client.get(&refused).unwrap() == pattern(1, LEN));
            assert!(client.get(&fine).unwrap() == pattern(2, LEN));
        }
        nothing_was_misplaced(&node);
    });
}

/// P09: the client finds the new daemon by itself, on a thread that is bound.
#[test]
fn after_a_restart_of_the_node_registrations_and_handles_are_made_anew() {
    alone(&[], || {
        let mut node = CudaNode::new(PEER);
        let device = device(1);
        let client = node.client(&device);
        let mut buffer = filled(&device, &pattern(1, LEN));
        let registered_buffer = filled(&device, &pattern(2, LEN));
        let _registered = client.register_buffer(&registered_buffer).unwrap();
        client.put("k", &buffer).unwrap();
        node.kill();
        node.start();
        assert_eq!(client.put("k", &buffer).unwrap(), Put::Stored);
        assert_eq!(client.put("r", &registered_buffer).unwrap(), Put::Stored);
        sim().poke(buffer.region().addr as u64, &vec![0; LEN]).unwrap();
        client.get_into("k", &mut buffer).unwrap();
        assert!(peek(buffer.region()) == pattern(1, LEN));
        assert_eq!((node.stored("ipc"), node.stored("staging")), (2, 0));
        nothing_was_misplaced(&node);
    });
}

/// P06: one thread, first memory of one device, then of the other; what fails says so at once.
#[test]
fn a_registration_that_fails_on_the_second_device_says_so_and_leaves_the_first() {
    alone(&[], || {
        let node = CudaNode::new(PEER);
        let (first, second) = (node.client(&device(0)), node.client(&device(1)));
        let (mine, theirs) = (vec![1u8; LEN], vec![2u8; LEN]);
        let registered = first.register_buffer(&mine).unwrap();
        sim().plan_faults("cuMemHostRegister_v2:1=2").unwrap();
        match second.register_buffer(&theirs) {
            Err(Error::Device(e)) => assert_eq!(e.vendor_code(), Some(2), "{e}"),
            other => panic!("{other:?}"),
        }
        drop(second.register_buffer(&theirs).unwrap());
        assert_eq!(sim().registrations().unwrap(), 1);
        drop(registered);
        assert_eq!(sim().registrations().unwrap(), 0);
        nothing_was_misplaced(&node);
    });
}

/// P20.
#[test]
fn a_put_under_capture_is_refused_and_spoils_nothing() {
    alone(&[], || {
        let (node, device) = (CudaNode::new(PEER), device(0));
        let client = node.client(&device);
        let (mut buffer, stream) = (filled(&device, &pattern(1, LEN)), cuda::stream(&device));
        client.put("there", &buffer).unwrap();
        // Global, of this thread, relaxed.
        for mode in 0..3u32 {
            let begun = on(&device, || cu!(cuStreamBeginCapture_v2(stream.raw() => usize, mode => u32)));
            assert_eq!(begun, 0);
            device.with_stream(stream, || {
                for refused in
                    [client.put("k", &buffer).map(drop), client.get_into("there", &mut buffer).map(drop)]
                {
                    let Err(Error::NotSent { cause }) = refused else { panic!("{refused:?}") };
                    assert!(matches!(*cause, Error::StreamCapturing), "{cause}");
                }
                assert!(matches!(client.register_buffer(&buffer), Err(Error::StreamCapturing)));
            });
            // Beside the capture, on the default stream of a thread, work goes on where the driver lets it.
            thread::scope(|scope| {
                scope.spawn(|| client.get("there").map(drop).unwrap());
            });
            let mut graph = 0usize;
            let ended =
                on(&device, || cu!(cuStreamEndCapture(stream.raw() => usize, &mut graph => *mut usize)));
            assert_eq!(ended, 0, "the capture was spoiled");
        }
        assert!(!client.exists("k").unwrap());
        assert_eq!(device.with_stream(stream, || client.put("k", &buffer)).unwrap(), Put::Stored);
    });
}

fn gives_up_in_time(
    client: &StoreClient<CudaDevice>,
    put: impl FnOnce(&StoreClient<CudaDevice>) -> haulier::Result<Put>,
) {
    let put = put(&client.with_deadline(HASTE));
    match put {
        Err(Error::Timeout { .. }) => {}
        Err(Error::NotSent { cause }) if matches!(*cause, Error::Timeout { .. }) => {}
        other => panic!("{other:?}"),
    }
}

/// P17: work that never ends, and drivers that hang in the client and in the node.
#[test]
fn what_never_ends_times_out_and_others_go_on() {
    alone(&[], || {
        let node = CudaNode::new(PEER);
        let (mine, theirs) = (device(0), device(1));
        let (client, other) = (node.client(&mine), node.client(&theirs));
        let (buffer, stream) = (filled(&mine, &pattern(1, LEN)), cuda::stream(&mine));
        cuda::hold(&mine, stream);
        cuda::queue_fill(&mine, stream, buffer.region(), 0xab);
        gives_up_in_time(&client, |client| mine.with_stream(stream, || client.put("k", &buffer)));
        assert_eq!(other.put("a", &filled(&theirs, &pattern(2, LEN))).unwrap(), Put::Stored);
        cuda::release(&mine, stream);

        node.faults("cuIpcOpenMemHandle_v2:1=hang");
        gives_up_in_time(&client, |client| client.put("k", &buffer));
        assert_eq!(other.put("b", &filled(&theirs, &pattern(3, LEN))).unwrap(), Put::Stored);
        assert!(!other.exists("k").unwrap(), "a key is there that was given up");
        assert!(other.get("a").unwrap() == pattern(2, LEN));
    });
}

/// P19.
#[test]
fn named_streams_are_waited_for_and_no_other_one() {
    alone(&[], || {
        let (node, device) = (CudaNode::new(PEER), device(0));
        let client = node.client(&device);
        let (wanted, never) = (cuda::stream(&device), cuda::stream(&device));
        let (buffer, other) = (filled(&device, &vec![0; LEN]), filled(&device, &[0; 64]));
        cuda::hold(&device, never);
        cuda::queue_fill(&device, never, other.region(), 1);
        cuda::queue_fill(&device, wanted, buffer.region(), 0xab);
        // The current stream never completes, and is not the one that is named.
        let put = device.with_stream(never, || client.put("k", Payload::from(&buffer).after(&[wanted])));
        assert_eq!(put.unwrap(), Put::Stored);
        assert!(client.get("k").unwrap() == vec![0xab; LEN]);
        cuda::release(&device, never);
    });
}

/// P22: a handle that means another stream on each thread.
#[test]
fn a_per_thread_stream_is_waited_for_on_its_own_thread_and_refused_on_another() {
    alone(&[], || {
        let (node, device) = (CudaNode::new(PEER), device(0));
        let client = node.client(&device);
        let buffer = filled(&device, &vec![0x11; LEN]);
        let theirs = thread::scope(|scope| {
            let producer = scope.spawn(|| {
                let own = CudaStream::per_thread();
                cuda::hold(&device, own);
                cuda::queue_fill(&device, own, buffer.region(), 0xab);
                let put = device.with_stream(own, || client.with_deadline(HASTE).put("k", &buffer));
                assert!(matches!(put, Err(Error::NotSent { .. })), "the work was held: {put:?}");
                cuda::release(&device, own);
                device.with_stream(own, || client.put("k", &buffer)).unwrap();
                own
            });
            producer.join().unwrap()
        });
        assert!(client.get("k").unwrap() == vec![0xab; LEN]);
        sim().clear_log().unwrap();
        let put = client.put("other", Payload::from(&buffer).after(&[theirs]));
        let Err(Error::NotSent { cause }) = put else { panic!("{put:?}") };
        assert!(matches!(&*cause, Error::Device(e) if e.kind() == Kind::WrongThread), "{cause}");
        assert_eq!(sim().count("cuStreamQuery") + sim().count("cuEventRecord"), 0);
        assert!(!client.exists("other").unwrap());
    });
}

/// P23: queued work still reads the destination, and later work sees the new bytes.
#[test]
fn a_get_into_by_ipc_neither_overtakes_queued_work_nor_is_overtaken() {
    alone(&[], || get_into_between_readers(&CudaNode::new(PEER)));
}

/// P23.
#[test]
fn a_get_into_by_staging_neither_overtakes_queued_work_nor_is_overtaken() {
    alone(&[], || get_into_between_readers(&CudaNode::staging(PEER)));
}

fn get_into_between_readers(node: &CudaNode) {
    let device = device(0);
    let client = node.client(&device);
    client.put("k", &vec![0x22; LEN]).unwrap();
    let (mut target, stream) = (filled(&device, &vec![0x11; LEN]), cuda::stream(&device));
    let (before, after) = (filled(&device, &vec![0; LEN]), filled(&device, &vec![0; LEN]));
    let (region, raw) = (target.region(), stream.raw());
    let copy = |to: u64| {
        let from = region.addr as u64;
        let queued =
            on(&device, || cu!(cuMemcpyDtoDAsync_v2(to => u64, from => u64, LEN => usize, raw => usize)));
        assert_eq!(queued, 0);
    };
    cuda::hold(&device, stream);
    copy(before.region().addr as u64);
    let asked = sim().count("cuEventQuery");
    thread::scope(|scope| {
        let getter = scope.spawn(|| device.with_stream(stream, || client.get_into("k", &mut target)));
        eventually("the get waits", || sim().count("cuEventQuery") > asked || getter.is_finished());
        assert!(!getter.is_finished(), "the get did not wait for the reader");
        assert!(peek(region) == vec![0x11; LEN], "the reader's bytes were overwritten");
        cuda::release(&device, stream);
        assert_eq!(getter.join().unwrap().unwrap(), LEN as u64);
    });
    copy(after.region().addr as u64);
    eventually("later work is done", || on(&device, || sim().pending(raw as u64)).unwrap() == 0);
    assert!(peek(before.region()) == vec![0x11; LEN], "the reader saw the new value");
    assert!(peek(after.region()) == vec![0x22; LEN], "later work saw the old value");
}

/// P33. The source goes right after the put.
#[test]
fn a_source_that_is_freed_right_after_its_put_has_no_effect() {
    alone(&[], || {
        let (node, device) = (CudaNode::new(PEER), device(0));
        let client = node.client(&device);
        for i in 0..50u8 {
            let key = i.to_string();
            client.put(&key, &filled(&device, &vec![i; LEN])).unwrap();
            drop(filled(&device, &vec![0xee; LEN]));
            assert!(client.get(&key).unwrap() == vec![i; LEN]);
        }
        assert_eq!(node.stored("ipc"), 50);
    });
}

/// P79: driver, socket and workers are the parent's.
#[test]
fn a_client_in_a_forked_child_is_refused_and_the_parent_goes_on() {
    alone(&[], || {
        let (node, device) = (CudaNode::new(PEER), device(0));
        let client = node.client(&device);
        let buffer = filled(&device, &pattern(1, LEN));
        client.put("k", &buffer).unwrap();
        let (in_child, addr) = (client.clone(), buffer.region().addr);
        let mut command = Command::new("/nowhere");
        let check = move || {
            // SAFETY: refused before the memory is touched.
            let put = in_child.put("child", unsafe { Payload::raw(addr, LEN) });
            let refused = matches!(put, Err(Error::ForkedProcess { .. }))
                && matches!(in_child.get("k"), Err(Error::ForkedProcess { .. }));
            // It reaches the parent as the error of `spawn`.
            Err(io::Error::from_raw_os_error(if refused { 77 } else { 78 }))
        };
        // SAFETY: the child of a fork runs `check` alone; glibc makes its allocator usable there.
        unsafe { command.pre_exec(check) };
        assert_eq!(command.spawn().unwrap_err().raw_os_error(), Some(77));
        drop(command);
        assert!(client.get("k").unwrap() == pattern(1, LEN));
        assert_eq!(client.put("later", &buffer).unwrap(), Put::Stored);
        assert_eq!((node.stored("ipc"), client.exists("child").unwrap()), (2, false));
    });
}

/// The test of these tests: a call with another device current, and one with none, are found.
#[test]
fn a_misplaced_call_is_found() {
    alone(&[], || {
        let (mine, theirs) = (device(0), device(1));
        let (buffer, stream) = (filled(&theirs, &[0; 64]), cuda::stream(&theirs).raw());
        sim().clear_log().unwrap();
        let (pointer, mut handle) = (buffer.region().addr as u64, [0u8; 64]);
        let place = handle.as_mut_ptr();
        on(&theirs, || assert_eq!(cu!(cuIpcGetMemHandle(place => *mut u8, pointer => u64)), 0));
        assert!(misplaced().is_empty());
        on(&mine, || cu!(cuIpcGetMemHandle(place => *mut u8, pointer => u64)));
        assert_eq!(misplaced().len(), 1);
        on(&mine, || cu!(cuStreamQuery(stream => usize)));
        assert_eq!(misplaced().len(), 2);
        cu!(cuStreamQuery(stream => usize));
        assert_eq!(misplaced().len(), 3, "{:?}", misplaced());
    });
}

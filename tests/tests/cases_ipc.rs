//! Cases of memory that is shared with the node, or cannot be, on strict machines. Each names its row of the field's
//! reports.

use std::{fs::File, io::Write as _};

use backend_cpu::{
    CpuDevice,
    strict::{Builder, MemoryKind, Op, StrictDevice, TokenForm},
};
use hal::{Buffer, Device, DeviceUuid, Memory};
use haulier::{
    Dtype, Error, Options, Payload, Put, StoreClient, Target, TensorMut, TensorRef,
    node::{Node, NodeConfig},
};
use haulier_tests::{
    conformance::pattern,
    peer::Peer,
    rig::{
        self, Rig, counter, eventually, every_call_had_its_device, filled, logged, machine,
        on_a_bound_thread, peek,
    },
};
use serde_json::json;

/// More than what may travel inside a message.
const LEN: usize = 64 << 10;
/// How many allocations of a client the node keeps open.
const OPEN_MAX: u64 = 64;

fn of_kind(device: &StrictDevice, kind: MemoryKind, bytes: &[u8]) -> Buffer<StrictDevice> {
    let memory = on_a_bound_thread(device, |device| {
        let bound = device.bind_current().unwrap();
        StrictDevice::allocate_kind(&bound, bytes.len(), kind).unwrap()
    });
    device.machine().poke(memory.region().addr, bytes).unwrap();
    Buffer::new(memory)
}

fn warnings_about(what: &str) -> Vec<String> {
    logged().into_iter().filter(|line| line.contains("WARN") && line.contains(what)).collect()
}

/// P25, P26.
#[test]
fn memory_without_a_handle_is_staged_and_the_rest_of_the_batch_goes_by_ipc() {
    logged();
    let kinds =
        [(MemoryKind::Vmm, "no_handle_type"), (MemoryKind::Pool, "pool"), (MemoryKind::Managed, "managed")];
    for (kind, reason) in kinds {
        let rig = Rig::new();
        let client = rig.client(0);
        let device = client.device();
        let vmm = of_kind(device, kind, &pattern(1, LEN));
        let alone = format!("alone-{reason}");
        assert_eq!(client.put(&alone, &vmm).unwrap(), Put::Stored);
        assert_eq!((rig.stored("ipc"), rig.stored("staging"), rig.fell_back(reason)), (0, 1, 1));

        let normal: Vec<_> = (2..4).map(|i| filled(device, &pattern(i, LEN))).collect();
        let puts = client.batch_put(vec![
            ("a", (&normal[0]).into()),
            ("b", (&vmm).into()),
            ("c", (&normal[1]).into()),
            ("d", (&vmm).into()),
        ]);
        assert!(puts.iter().all(|put| matches!(put, Ok(Put::Stored))), "{puts:?}");
        assert_eq!((rig.stored("ipc"), rig.stored("staging"), rig.fell_back(reason)), (2, 3, 3));
        for (key, seed) in [(alone.as_str(), 1), ("a", 2), ("b", 1), ("c", 3), ("d", 1)] {
            assert!(client.get(key).unwrap() == pattern(seed, LEN), "{key}");
        }
        // One warning for a client and a reason. No other test here has this reason.
        let warnings = warnings_about(&format!("reason=\"{reason}\""));
        assert_eq!(warnings.len(), 1, "{warnings:?}");
        assert!(warnings[0].contains("cannot be exported"), "{}", warnings[0]);
        assert!(logged().iter().all(|line| !line.contains(&alone)), "a key was logged");

        // The way back is the same.
        let mut target = of_kind(device, kind, &vec![0; LEN]);
        assert_eq!(client.get_into("a", &mut target).unwrap(), LEN as u64);
        assert!(peek(rig.here(), target.region()) == pattern(2, LEN));
        every_call_had_its_device(rig.here().log());
    }
}

/// P25, P37. 1 stands for EPERM, 205 and 208 are the driver's own.
#[test]
fn an_import_that_is_refused_is_staged_within_the_same_call() {
    logged();
    for code in [1u32, 205, 208] {
        // A machine of its own, so that the warnings can be told apart by its devices.
        let rules = || machine(2).seed(code.into());
        let rig = Rig::with(rules(), rules());
        let client = rig.client(1);
        let device = client.device();
        let (first, second) = (filled(device, &pattern(1, LEN)), filled(device, &pattern(2, LEN)));
        // The first import of a batch of two allocations.
        rig.there().faults().fail(Op::Import, 1, code.into());
        let refused = format!("refused-{code}");
        let puts = client.batch_put(vec![(&refused, (&first).into()), ("fine", (&second).into())]);
        assert!(puts.iter().all(|put| matches!(put, Ok(Put::Stored))), "{puts:?}");
        assert_eq!((rig.stored("ipc"), rig.fell_back("import_refused")), (1, 1));
        assert!(client.get(&refused).unwrap() == pattern(1, LEN));
        assert!(client.get("fine").unwrap() == pattern(2, LEN));
        // One from each side: the two are processes of their own elsewhere.
        let warnings = warnings_about(&device.identity().uuid.to_string());
        for side in ["haulier::engine", "haulier::node"] {
            let of_side: Vec<_> = warnings.iter().filter(|line| line.contains(side)).collect();
            assert_eq!(of_side.len(), 1, "{warnings:?}");
            for part in [&std::process::id().to_string(), "strict", &format!("code {code}")] {
                assert!(of_side[0].contains(part), "{part:?} is not in {}", of_side[0]);
            }
        }
        assert!(logged().iter().all(|line| !line.contains(&refused)), "a key was logged");
        // It is tried again the next time.
        assert_eq!(client.upsert(&refused, &first).unwrap(), Put::Replaced);
        assert_eq!(rig.counter("haulier_operations_total", &["path=\"ipc\"", "outcome=\"replaced\""]), 1);
    }
}

/// P37, for the way back.
#[test]
fn a_get_whose_import_is_refused_is_staged_within_the_same_call() {
    let rig = Rig::new();
    let client = rig.client(1);
    client.put("k", &pattern(1, LEN)).unwrap();
    let mut target = filled(client.device(), &vec![0; LEN]);
    rig.there().faults().fail(Op::Import, 1, 205);
    assert_eq!(client.get_into("k", &mut target).unwrap(), LEN as u64);
    assert!(peek(rig.here(), target.region()) == pattern(1, LEN));
    assert_eq!(rig.there().log().count(Op::Import), 1);
}

/// P27.
#[test]
fn tensors_of_one_allocation_share_one_handle_and_all_go_by_ipc() {
    for form in [TokenForm::Descriptor, TokenForm::Opaque] {
        let rules = || machine(2).token(form);
        let rig = Rig::with(rules(), rules());
        let client = rig.client(0);
        let bytes = pattern(5, 4 << 20);
        let whole = filled(client.device(), &bytes);
        let offsets = [0, 1 << 20, 3 << 20];
        let part = |offset| Payload::part(&whole, offset, 1 << 20).unwrap();
        let registered: Vec<_> = offsets.iter().map(|&o| client.register_buffer(part(o)).unwrap()).collect();
        rig.here().log().clear();
        let puts = client.batch_put(vec![("0", part(0)), ("1", part(1 << 20)), ("3", part(3 << 20))]);
        assert!(puts.iter().all(|put| matches!(put, Ok(Put::Stored))), "{puts:?}");
        assert_eq!((rig.stored("ipc"), rig.counter("haulier_fallbacks_total", &[])), (3, 0));
        assert_eq!((rig.here().log().count(Op::Export), rig.there().log().count(Op::Import)), (1, 1));
        for (key, offset) in ["0", "1", "3"].into_iter().zip(offsets) {
            assert!(client.get(key).unwrap() == bytes[offset..offset + (1 << 20)], "{key}");
        }
        // One at a time, it stays the one that is open.
        client.upsert("1", part(1 << 20)).unwrap();
        assert_eq!((rig.there().log().count(Op::Import), rig.imports()), (1, 1));
        drop(registered);
        assert_eq!(rig.here().registrations(), 0);
    }
}

/// P28.
#[test]
fn a_reused_address_is_never_read_through_an_old_mapping() {
    for form in [TokenForm::Descriptor, TokenForm::Opaque] {
        let rules = || machine(2).token(form);
        let rig = Rig::with(rules(), rules());
        let client = rig.client(0);
        let first = filled(client.device(), &vec![0x11; LEN]);
        let addr = first.region().addr;
        client.put("first", &first).unwrap();
        drop(first);
        for (byte, len) in [(0x22, LEN), (0x33, 2 * LEN), (0x44, LEN / 2)] {
            let again = filled(client.device(), &vec![byte; len]);
            assert_eq!(again.region().addr, addr, "the address was not reused, so this shows nothing");
            let key = format!("{byte}");
            client.put(&key, &again).unwrap();
            assert!(client.get(&key).unwrap() == vec![byte; len], "{byte:#x}");
            let mut target = again;
            client.get_into("first", Target::part(&mut target, 0, len).unwrap()).map(drop).unwrap_or_else(
                |e| {
                    assert!(matches!(e, Error::TooSmall { .. }) && len < LEN, "{e}");
                },
            );
            let there = if len < LEN { byte } else { 0x11 };
            assert_eq!(peek(rig.here(), target.region())[0], there);
        }
        assert_eq!(rig.stored("ipc"), 4);
        assert!(rig.imports() <= 4 && rig.there().open_imports() as u64 == rig.imports());
    }
}

/// P30.
#[test]
fn what_the_node_keeps_open_stays_bounded_and_goes_with_the_client() {
    let rig = Rig::new();
    let client = rig.client(0);
    for round in 0..10_000u64 {
        let buffer = filled(client.device(), &round.to_le_bytes().repeat(32));
        client.upsert("k", &buffer).unwrap();
        drop(buffer);
        if round % 100 == 0 {
            assert!(rig.imports() <= OPEN_MAX, "{} are open after {round} rounds", rig.imports());
            assert_eq!(rig.there().open_imports() as u64, rig.imports());
        }
    }
    assert_eq!(client.get("k").unwrap(), 9_999u64.to_le_bytes().repeat(32));
    let opened = rig.there().log().count(Op::Import);
    assert_eq!(opened, 10_000, "each had a handle of its own");
    drop(client);
    eventually("all is closed", || rig.imports() == 0 && rig.there().open_imports() == 0);
    assert_eq!(rig.there().log().count(Op::CloseImport), opened);
    assert_eq!(rig.here().live_allocations(), 0);
}

fn peer(rig: &Rig, devices: u32, visible: Option<Vec<u32>>, logical: u32) -> (Peer, DeviceUuid) {
    let peer = Peer::start(env!("CARGO_BIN_EXE_haulier-peer"), "client");
    let setup = json!({ "socket": rig.socket(), "devices": devices, "visible": visible, "logical": logical });
    peer.link().send(&setup, &[]);
    let uuid = peer.link().expect();
    (peer, uuid)
}

fn ask_to_put(peer: &Peer, key: &str, byte: u8, len: usize) {
    peer.link().send(&json!({ "Put": { "key": key, "byte": byte, "len": len } }), &[]);
    let put: Result<(), String> = peer.link().expect();
    put.unwrap();
}

/// P31. The kernel closes the socket; no timer is needed, and another client does not wait.
#[test]
fn a_killed_client_leaves_no_mapping_and_no_grant() {
    let rig = Rig::new();
    let other = rig.client(0);
    for puts in [0, 3] {
        let (mut peer, _) = peer(&rig, 2, None, 1);
        for i in 0..puts {
            ask_to_put(&peer, &format!("{i}"), i, LEN);
        }
        assert_eq!((rig.imports(), rig.there().open_imports()), (u64::from(puts), usize::from(puts)));
        assert_eq!(rig.counter("haulier_clients", &[]), 2);
        peer.kill();
        eventually("everything of the dead client is closed", || {
            rig.imports() == 0 && rig.there().open_imports() == 0 && rig.counter("haulier_clients", &[]) == 1
        });
        assert_eq!((rig.counter("haulier_grants", &[]), rig.counter("haulier_granted_bytes", &[])), (0, 0));
        // What it had stored is whole, and outlives it.
        for i in 0..puts {
            assert!(other.get(&format!("{i}")).unwrap() == vec![i; LEN]);
        }
    }
    every_call_had_its_device(rig.there().log());
}

/// P33. The source goes right after the put.
#[test]
fn a_source_that_is_freed_right_after_its_put_has_no_effect() {
    let rig = Rig::new();
    let client = rig.client(0);
    for i in 0..50u8 {
        let key = i.to_string();
        client.put(&key, &filled(client.device(), &vec![i; LEN])).unwrap();
        drop(filled(client.device(), &vec![0xee; LEN]));
        assert!(client.get(&key).unwrap() == vec![i; LEN]);
    }
    assert_eq!(rig.stored("ipc"), 50);
}

/// P35. The client's device 0 is physical 2; the node's device 0 is another card.
#[test]
fn the_node_opens_memory_on_the_device_with_the_same_uuid_whatever_its_number() {
    let rig = Rig::with(machine(8), machine(8).visible([4, 2, 6]));
    let (peer, uuid) = peer(&rig, 8, Some(vec![2]), 0);
    assert_eq!(rig.there().uuid(1).unwrap(), uuid);
    ask_to_put(&peer, "k", 0x5a, LEN);
    assert_eq!(rig.stored("ipc"), 1);
    for op in [Op::Import, Op::Copy] {
        let on: Vec<_> = rig.there().log().of(op).iter().map(|call| call.current).collect();
        assert_eq!(on, [Some(1)], "{op:?} ran on another card");
    }
    peer.link().send(&json!({ "Get": { "key": "k", "len": LEN } }), &[]);
    let (got, byte): (Result<u64, String>, Option<u8>) = peer.link().expect();
    assert_eq!((got.unwrap(), byte), (LEN as u64, Some(0x5a)));
}

/// P35.
#[test]
fn memory_of_a_device_that_the_node_does_not_see_is_staged() {
    let rig = Rig::with(machine(8), machine(8).visible([4]));
    let (peer, _) = peer(&rig, 8, Some(vec![2]), 0);
    ask_to_put(&peer, "k", 0x5a, LEN);
    assert_eq!((rig.stored("ipc"), rig.fell_back("not_negotiated")), (0, 1));
    assert_eq!(rig.there().log().count(Op::Import), 0, "it was tried all the same");
    peer.link().send(&json!({ "Get": { "key": "k", "len": LEN } }), &[]);
    let (got, byte): (Result<u64, String>, Option<u8>) = peer.link().expect();
    assert_eq!((got.unwrap(), byte), (LEN as u64, Some(0x5a)));
}

/// P36. The node knows the host only.
#[test]
fn a_node_without_the_clients_backend_serves_it_by_staging_and_says_why() {
    let dir = tempfile::tempdir().unwrap();
    let config = NodeConfig {
        socket: dir.path().join("private/node.sock"),
        store: rig::store(),
        devices: vec![CpuDevice::open().unwrap()],
        metrics: None,
        clients_max: 8,
    };
    let node = Node::start(config).unwrap();
    let machine = machine(1).build().unwrap();
    let device = machine.device(hal::LogicalId(0)).unwrap();
    let client = StoreClient::connect(device, node.socket(), Options::default()).unwrap();
    let buffer = filled(client.device(), &pattern(1, LEN));
    client.put("k", &buffer).unwrap();
    let mut target = filled(client.device(), &vec![0; LEN]);
    client.get_into("k", &mut target).unwrap();
    assert!(peek(&machine, target.region()) == pattern(1, LEN));
    let text = client.metrics().unwrap();
    assert_eq!(counter(&text, "haulier_fallbacks_total", &["reason=\"not_negotiated\""]), 1);
    assert_eq!(machine.log().count(Op::Export), 0, "a handle was made that nobody can open");
    drop(client);
}

/// P36, the other way round: a device that cannot export.
#[test]
fn a_device_that_cannot_export_is_staged_without_a_try() {
    let mut caps = hal::Caps::default();
    caps.ipc_import = true;
    let rig = Rig::with(machine(2).caps(caps), machine(2));
    let client = rig.client(0);
    client.put("k", &filled(client.device(), &pattern(1, LEN))).unwrap();
    assert!(client.get("k").unwrap() == pattern(1, LEN));
    assert_eq!((rig.fell_back("device"), rig.here().log().count(Op::Export)), (1, 0));
}

/// P37: a fallback is counted where a user looks for it.
#[test]
fn the_counters_tell_which_way_each_value_went() {
    let rig = Rig::new();
    let client = rig.client(0);
    client.put("ipc", &filled(client.device(), &pattern(1, LEN))).unwrap();
    client.put("host", &pattern(2, LEN)).unwrap();
    client.put("small", b"inline").unwrap();
    let mut buffer = client.alloc(LEN as u64).unwrap();
    buffer.fill(7);
    client.put_allocated("alloc", buffer).unwrap();
    assert_eq!((rig.stored("ipc"), rig.stored("staging"), rig.stored("alloc")), (1, 2, 1));
    assert_eq!(rig.fell_back("host_memory"), 2);
    let text = client.metrics().unwrap();
    let came = |path| counter(&text, "haulier_values_bytes_total", &["direction=\"in\"", path]);
    assert_eq!((came("path=\"ipc\""), came("path=\"alloc\"")), (LEN as u64, LEN as u64));
    assert_eq!(came("path=\"staging\""), LEN as u64 + 6);
}

/// P74. The device's pages fault when the host touches them, so a wrong copy ends this process.
#[test]
fn every_operation_works_on_device_memory_without_touching_it() {
    let in_process = |rules: Builder| {
        let machine = rules.build().unwrap();
        let device = machine.device(hal::LogicalId(1)).unwrap();
        let client = StoreClient::in_process(device, rig::store(), Options::default()).unwrap();
        (machine, client)
    };
    let (machine, client) = in_process(machine(2));
    every_operation(&client);
    every_call_had_its_device(machine.log());
    for rig in [Rig::new(), Rig::staging()] {
        every_operation(&rig.client(1));
        every_call_had_its_device(rig.here().log());
    }
}

fn every_operation(client: &StoreClient<StrictDevice>) {
    let device = client.device();
    let machine = device.machine().clone();
    let on = |bytes: &[u8]| filled(device, bytes);
    for len in [1, 4096, 4097, LEN, (1 << 20) + 1] {
        let bytes = pattern(len as u8, len);
        let source = on(&bytes);
        let mut target = on(&vec![0; len]);
        let _registered = client.register_buffer(&source).unwrap();
        client.upsert("put", &source).unwrap();
        client.upsert("put", &source).unwrap();
        client.get_into("put", &mut target).unwrap();
        assert!(peek(&machine, target.region()) == bytes);
        assert!(client.get("put").unwrap() == bytes && client.view("put").unwrap()[..] == bytes);
        assert_eq!(client.size("put").unwrap(), len as u64);

        let half = len / 2;
        let parts = vec![
            ("low", Payload::part(&source, 0, half).unwrap()),
            ("high", Payload::part(&source, half, len - half).unwrap()),
        ];
        assert!(client.batch_upsert(parts).iter().all(Result::is_ok));
        let (mut low, mut high) = (on(&vec![0; half.max(1)]), on(&vec![0; len - half]));
        let got = client.batch_get_into(vec![("low", (&mut low).into()), ("high", (&mut high).into())]);
        assert!(got.iter().all(Result::is_ok), "{got:?}");
        assert!(peek(&machine, low.region())[..half] == bytes[..half]);
        assert!(peek(&machine, high.region()) == bytes[half..]);

        let region = source.region();
        // SAFETY: the buffer lives, and nothing is queued on it.
        client.upsert("raw", unsafe { Payload::raw(region.addr, region.len) }).unwrap();
        assert!(client.get("raw").unwrap() == bytes);

        let shape = [len as u64];
        client.upsert_tensor("tensor", &TensorRef::new(Dtype::U8, &shape, &source).unwrap()).unwrap();
        let into = TensorMut::new(Dtype::U8, &shape, &mut target).unwrap();
        client.get_tensor_into("tensor", into).unwrap();
        assert!(
            peek(&machine, target.region()) == bytes && client.get_tensor("tensor").unwrap().bytes == bytes
        );

        let mut inside = client.alloc(len as u64).unwrap();
        inside.copy_from_slice(&bytes);
        client.upsert_allocated("inside", inside).unwrap();
        client.get_into("inside", &mut target).unwrap();
        assert!(peek(&machine, target.region()) == bytes);
    }
    // Strides are for memory that the host can gather; a device's is refused, and never copied raw.
    let square = on(&pattern(1, 64));
    let transposed = TensorRef::strided(Dtype::U8, &[8, 8], &[1, 8], 0, &square).unwrap();
    assert!(matches!(client.put_tensor("t", &transposed), Err(Error::NonContiguous)));
    let mut target = on(&[0; 64]);
    client.upsert_tensor("t", &TensorRef::new(Dtype::U8, &[8, 8], &square).unwrap()).unwrap();
    let into = TensorMut::strided(Dtype::U8, &[8, 8], &[1, 8], 0, &mut target).unwrap();
    assert!(matches!(client.get_tensor_into("t", into), Err(Error::NonContiguous)));
    assert!(peek(&machine, target.region()) == [0; 64]);
}

/// P40, for a file that is mapped: its pages are no allocation of anybody's.
#[test]
fn a_mapped_file_is_put_like_any_host_memory() {
    let rig = Rig::new();
    let client = rig.client(0);
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&pattern(1, LEN)).unwrap();
    let mapped = map(&file, LEN);
    // SAFETY: the mapping lives until the end of the process, and nobody writes the file.
    let payload = || unsafe { Payload::raw(mapped, LEN) };
    let _registered = client.register_buffer(payload()).unwrap();
    assert_eq!(client.put("k", payload()).unwrap(), Put::Stored);
    assert!(client.get("k").unwrap() == pattern(1, LEN));
    assert_eq!(rig.fell_back("host_memory"), 1);
}

fn map(file: &File, len: usize) -> usize {
    use rustix::mm::{MapFlags, ProtFlags, mmap};
    // SAFETY: a new mapping at an address that the kernel chooses; it is never unmapped.
    let at = unsafe { mmap(std::ptr::null_mut(), len, ProtFlags::READ, MapFlags::PRIVATE, file, 0) };
    at.unwrap().expose_provenance()
}

/// P78.
#[test]
fn a_client_that_outlives_the_driver_ends_without_a_word() {
    let rig = Rig::new();
    let peer = Peer::start(env!("CARGO_BIN_EXE_haulier-peer"), "exits");
    let setup = json!({ "socket": rig.socket(), "devices": 2, "visible": null, "logical": 1 });
    peer.link().send(&setup, &[]);
    assert_eq!(peer.link().expect::<String>(), "shut down");
    assert_eq!(peer.finish(), Some(0));
    eventually("everything of the client is closed", || {
        rig.imports() == 0 && rig.there().open_imports() == 0
    });
}

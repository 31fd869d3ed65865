//! Cases of threads without, or with another, context on the Ascend backend: a client here and a node in another process,
//! on simulated runtimes of one machine as of CANN 9 and of CANN 8.5. No NPU takes part.

use std::{
    ffi::{CString, c_char},
    fs, io,
    os::unix::process::CommandExt,
    process,
    process::Command,
    sync::Mutex,
    thread,
    time::Duration,
};

use backend_ascend::AscendDevice;
use hal::{Device, DeviceExt, DeviceUuid, Kind, LogicalId, PhysicalId};
use haulier::{Error, Options, Payload, Put, StoreClient};
use haulier_tests::{
    acl,
    ascend::{self, AscendNode, alone, device, filled, has_context, misplaced, peek, sim},
    conformance::pattern,
    rig::{eventually, logged},
    simulated::{client_process, hold, queue_fill, release},
};

const PEER: &str = env!("CARGO_BIN_EXE_haulier-peer");
/// More than what may travel inside a message.
const LEN: usize = 64 << 10;
/// The deadline of what is to time out.
const HASTE: Duration = Duration::from_millis(300);

/// Makes the calling thread one of an application that works with this device.
fn enter(logical: i32) {
    assert_eq!(acl!(aclrtSetDevice(logical => i32)), 0);
}

/// The device that is current on the calling thread.
fn current() -> Option<i32> {
    let mut logical = -1;
    (has_context() && acl!(aclrtGetDevice(&mut logical => *mut i32)) == 0).then_some(logical)
}

fn nothing_was_misplaced(node: &AscendNode) {
    let wrong = misplaced();
    assert!(wrong.is_empty(), "{wrong:#?}");
    node.every_call_had_its_device();
}

/// A device error's device, vendor code and words.
fn told(error: &Error) -> (Option<i64>, String) {
    match error {
        Error::Device(e) => (e.vendor_code(), e.to_string()),
        Error::NotSent { cause } => told(cause),
        other => panic!("{other}"),
    }
}

/// P01, P05: threads of pools, of which none, or every one, or one with the other device has a context.
#[test]
fn sixteen_clients_on_two_devices_have_the_right_one_in_each_call_and_give_the_callers_back() {
    alone(&[], || {
        let node = AscendNode::new(PEER);
        thread::scope(|scope| {
            for i in 0..16u8 {
                let node = &node;
                scope.spawn(move || {
                    let logical = u32::from(i % 2);
                    let device = device(logical);
                    let client = node.client(&device);
                    match i % 3 {
                        0 => {}
                        1 => enter(logical as i32),
                        _ => enter(1 - logical as i32),
                    }
                    let before = current();
                    assert_eq!(before.is_none(), i % 3 == 0);
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
                        assert_eq!(current(), before, "the caller's thread was not given back");
                    }
                    drop(client);
                    assert_eq!(current(), before);
                });
            }
        });
        assert_eq!((node.stored("ipc"), node.stored("staging")), (160, 0));
        nothing_was_misplaced(&node);
        // One reference of ours to each device, and those of the application.
        let application = |logical| {
            (0..16).filter(move |i| i % 3 == 1 && i % 2 == logical || i % 3 == 2 && i % 2 != logical)
        };
        for logical in [0, 1] {
            assert_eq!(sim().retained(logical).unwrap(), 1 + application(logical).count() as u64);
            assert_eq!(device(logical as u32).failed_drops(), 0);
        }
    });
}

/// P02. The application's main thread has device 0; the helper that opens the client within a deadline has none.
#[test]
fn a_client_opens_and_registers_on_a_fresh_thread() {
    alone(&[], || {
        let node = AscendNode::new(PEER);
        enter(0);
        let buffer = filled(&device(1), &pattern(1, LEN));
        thread::scope(|scope| {
            scope.spawn(|| {
                let client = node.client(&device(1));
                let registered = client.register_buffer(&buffer).unwrap();
                assert_eq!(client.put("k", &buffer).unwrap(), Put::Stored);
                drop(registered);
                assert_eq!(current(), None);
            });
        });
        assert_eq!(current(), Some(0), "and the main thread keeps its device");
        assert_eq!((node.stored("ipc"), device(1).registrations()), (1, 0));
        nothing_was_misplaced(&node);
    });
}

/// P02. The device is the one that the client was made with, whatever the calling thread has.
#[test]
fn a_device_that_cannot_be_opened_is_an_error_with_its_name_code_and_text() {
    alone(&[], || {
        let node = AscendNode::new(PEER);
        enter(0);
        sim().plan_faults("aclrtSetDevice=507033").unwrap();
        let opened = StoreClient::connect(device(1), node.socket(), Options::default()).map(drop);
        let (code, text) = told(&opened.unwrap_err());
        assert_eq!(code, Some(507033));
        for part in ["ascend", "device 1", "aclrtSetDevice", "npu-smi", "EE"] {
            assert!(text.contains(part), "{part:?} is not in {text:?}");
        }
        sim().clear_faults().unwrap();
        assert_eq!((current(), sim().retained(1)), (Some(0), Ok(0)));
        // It is tried anew.
        let client = node.client(&device(1));
        assert_eq!(client.put("k", &filled(&device(1), &pattern(1, LEN))).unwrap(), Put::Stored);
        nothing_was_misplaced(&node);
    });
}

/// P06. A thread that cannot be bound makes its own call fail, in each slot; nothing is sent, and nothing falls back.
#[test]
fn a_bind_that_fails_is_an_error_on_each_slot_and_nothing_goes_another_way() {
    alone(&[], || {
        let node = AscendNode::new(PEER);
        let client = node.client(&device(1));
        let buffers = [1, 2].map(|seed| filled(&device(1), &pattern(seed, LEN)));
        enter(0);
        let items = || ["a", "b"].into_iter().zip(buffers.iter().map(Payload::from)).collect();
        sim().clear_log().unwrap();
        sim().plan_faults("aclrtSetCurrentContext=507899").unwrap();
        for put in client.batch_put(items()) {
            let (code, text) = told(&put.unwrap_err());
            assert_eq!(code, Some(507899), "{text}");
            for part in ["device 1", "aclrtSetCurrentContext", "EE"] {
                assert!(text.contains(part), "{part:?} is not in {text:?}");
            }
        }
        for function in ["aclrtMemcpy", "aclrtMemcpyAsync", "aclrtIpcMemGetExportKey", "aclrtHostRegister"] {
            assert_eq!(sim().count(function), 0, "{function}");
        }
        assert_eq!((node.puts(), current()), (0, Some(0)));
        sim().clear_faults().unwrap();
        assert!(client.list("").unwrap().is_empty());
        assert!(client.batch_put(items()).iter().all(|put| matches!(put, Ok(Put::Stored))));
        assert_eq!((node.stored("ipc"), node.stored("staging")), (2, 0));
        nothing_was_misplaced(&node);
    });
}

/// P03, P13. Nobody in the node's process ever set a device; the ids are not those of the machine.
#[test]
fn ids_count_what_is_visible_and_the_node_selects_its_clients_device_itself() {
    let environment = [("HAULIER_SIM_DEVICES", "8"), ("ASCEND_RT_VISIBLE_DEVICES", "4,5,6,7")];
    alone(&environment, || {
        let node = AscendNode::new(PEER);
        let client = node.client(&device(1));
        assert_eq!(client.device().identity().physical, Some(PhysicalId(5)));
        assert_eq!(client.put("k", &filled(&device(1), &pattern(1, LEN))).unwrap(), Put::Stored);
        assert_eq!((node.stored("ipc"), node.calls("aclrtSetDevice")), (1, 1));
        let set: Vec<_> = sim().calls("aclrtSetDevice").into_iter().map(|call| call.about).collect();
        assert_eq!(set, ["device 1"]);
        nothing_was_misplaced(&node);

        // A physical id is of another type; who forces it through is told the ids that would do.
        let error = AscendDevice::open(LogicalId(5)).unwrap_err();
        assert_eq!(error.kind(), Kind::InvalidDevice);
        let text = error.to_string();
        assert!(text.contains("4, 5, 6, 7") && text.contains("ASCEND_RT_VISIBLE_DEVICES"), "{text}");
    });
}

/// P06.
#[test]
fn one_thread_registers_on_two_devices_and_a_failure_is_that_calls_own() {
    alone(&[("HAULIER_SIM_DEVICES", "4")], || {
        let node = AscendNode::new(PEER);
        let clients = [0, 3].map(|logical| node.client(&device(logical)));
        // Pages of their own: what of a page is registered is registered whole.
        let hosts = [1u8, 2].map(pages);
        let [first, second] = [0, 1].map(|i| clients[i].register_buffer(hosts[i]));
        let registered = [first.unwrap(), second.unwrap()];
        let on: Vec<_> = sim().calls("aclrtHostRegister").iter().map(|call| call.device).collect();
        assert_eq!(on, [Some(0), Some(3)]);
        drop(registered);
        let on: Vec<_> = sim().calls("aclrtHostUnregister").iter().map(|call| call.device).collect();
        assert!(on.contains(&Some(0)) && on.contains(&Some(3)) && on.len() == 2, "{on:?}");

        let kept = clients[0].register_buffer(hosts[0]).unwrap();
        sim().plan_faults("aclrtHostRegister:1=507899").unwrap();
        let (code, text) = told(&clients[1].register_buffer(hosts[1]).map(drop).unwrap_err());
        assert_eq!(code, Some(507899));
        assert!(text.contains("device 3") && text.contains("aclrtHostRegister"), "{text}");
        assert_eq!(device(0).registrations(), 1);
        // Calls on memory that is not registered work too, and it is nobody else's fault.
        assert_eq!(clients[1].put("k", hosts[1]).unwrap(), Put::Stored);
        assert!(clients[1].get("k").unwrap() == hosts[1]);
        drop(kept);
        assert_eq!((device(0).registrations(), device(3).failed_drops()), (0, 0));
        nothing_was_misplaced(&node);
    });
}

/// Host memory that begins with a page and lives as long as the process.
fn pages(byte: u8) -> &'static [u8] {
    const PAGE: usize = 4096;
    let bytes = Box::leak(vec![byte; LEN + PAGE].into_boxed_slice());
    let start = bytes.as_ptr().align_offset(PAGE);
    &bytes[start..][..LEN]
}

/// P08: what is asked of a stream that pends is asked where its context is current.
#[test]
fn pending_work_is_asked_about_only_where_the_device_is_current() {
    alone(&[], || {
        let node = AscendNode::new(PEER);
        let client = node.client(&device(1));
        thread::scope(|scope| {
            for i in 0..4u8 {
                let client = &client;
                scope.spawn(move || {
                    let device = device(1);
                    let stream = ascend::stream(&device);
                    for round in 0..20 {
                        let (key, buffer) = (format!("{i}/{round}"), filled(&device, &[0; 256]));
                        hold::<ascend::Runtime>(&device, stream);
                        queue_fill::<ascend::Runtime>(&device, stream, buffer.region(), i + 1);
                        thread::scope(|scope| {
                            let put =
                                scope.spawn(|| device.with_stream(stream, || client.put(&key, &buffer)));
                            release::<ascend::Runtime>(&device, stream);
                            assert_eq!(put.join().unwrap().unwrap(), Put::Stored);
                        });
                        assert_eq!(client.get(&key).unwrap(), [i + 1; 256]);
                    }
                });
            }
        });
        let refused: Vec<_> = sim().log().into_iter().filter(|call| call.status == Some(107002)).collect();
        // CANN 9 answers so where a thread has none, and that is all that such a thread asks.
        assert!(refused.iter().all(|call| call.function == "aclrtGetCurrentContext"), "{refused:#?}");
        nothing_was_misplaced(&node);
    });
}

/// P09: the memory of a client that died is closed where it was opened, by a thread of the node's own.
#[test]
fn a_killed_client_leaves_nothing_open_and_its_device_was_the_one_with_its_uuid() {
    alone(&[("HAULIER_SIM_DEVICES", "3")], || {
        let node = AscendNode::new(PEER);
        let (mut peer, uuid): (_, DeviceUuid) =
            client_process(&node, 0, &[1, 2, 3], LEN, &[("ASCEND_RT_VISIBLE_DEVICES", "2")]);
        assert_eq!(uuid, device(2).identity().uuid);
        assert_eq!((node.stored("ipc"), node.stored("staging")), (3, 0));
        peer.kill();
        eventually("everything of the client is closed", || node.open_imports() == 0);
        let client = node.client(&device(0));
        for (key, byte) in ["0", "1", "2"].into_iter().zip(1u8..) {
            assert!(client.get(key).unwrap() == vec![byte; LEN], "a value outlives whoever put it");
        }
        node.every_call_had_its_device();
    });
}

/// P01, P10. As torch_npu configures ACL: a thread without a context is told that it is on device 0, and most calls bind
/// that to it without a word.
#[test]
fn a_configured_default_device_is_never_taken_for_the_clients() {
    alone(&[], || {
        let folder = tempfile::tempdir().unwrap();
        let config = folder.path().join("acl.json");
        fs::write(&config, r#"{"defaultDevice":{"default_device":"0"}}"#).unwrap();
        let path = CString::new(config.to_str().unwrap()).unwrap();
        assert_eq!(acl!(aclInit(path.as_ptr() => *const c_char)), 0);
        for node in [AscendNode::new(PEER), AscendNode::staging(PEER)] {
            let client = node.client(&device(1));
            thread::scope(|scope| {
                for i in 0..4u8 {
                    let client = &client;
                    scope.spawn(move || {
                        let (key, bytes) = (i.to_string(), pattern(i, LEN));
                        let mut buffer = filled(client.device(), &bytes);
                        drop(client.register_buffer(pages(i)).unwrap());
                        assert_eq!(client.put(&key, &buffer).unwrap(), Put::Stored);
                        sim().poke(buffer.region().addr as u64, &vec![0; LEN]).unwrap();
                        client.get_into(&key, &mut buffer).unwrap();
                        assert!(peek(buffer.region()) == bytes, "{key}");
                        assert!(!has_context(), "the caller's thread was left bound");
                    });
                }
            });
            let astray: Vec<_> = sim().log().into_iter().filter(|call| call.device == Some(0)).collect();
            assert!(astray.is_empty(), "{astray:#?}");
            let wrong = misplaced();
            assert!(wrong.is_empty(), "{wrong:#?}");
        }
        assert_eq!((sim().retained(0), sim().retained(1), device(1).failed_drops()), (Ok(0), Ok(1), 0));
    });
}

/// P41: memory that ACL did not allocate, of which it may say nothing at all.
#[test]
fn host_memory_goes_whatever_acl_says_of_it() {
    alone(&[], || {
        for node in [AscendNode::new(PEER), AscendNode::staging(PEER)] {
            let client = node.client(&device(1));
            let (bytes, mut back) = (pattern(1, LEN), vec![0; LEN]);
            for plan in ["", "aclrtPointerGetAttributes=507899"] {
                sim().plan_faults(plan).unwrap();
                let registered = client.register_buffer(pages(1)).unwrap();
                client.upsert("k", &bytes).unwrap();
                client.upsert("pages", pages(1)).unwrap();
                assert_eq!(client.get_into("k", &mut back).unwrap(), LEN as u64);
                assert!(back == bytes && client.get("pages").unwrap() == pages(1));
                drop(registered);
                // A pointer that the caller vouches for as nothing is not guessed at.
                // SAFETY: the bytes live.
                let raw = unsafe { Payload::raw(bytes.as_ptr().expose_provenance(), LEN) };
                let put = client.upsert("raw", raw);
                assert_eq!(put.is_ok(), plan.is_empty(), "{put:?}");
                sim().clear_faults().unwrap();
            }
            let wrong = misplaced();
            assert!(wrong.is_empty(), "{wrong:#?}");
        }
    });
}

/// P25: torch_npu's expandable segments, alone in a batch with ordinary memory.
#[test]
fn virtual_memory_goes_by_its_mappings_or_by_staging_and_the_rest_by_ipc() {
    alone(&[], || {
        const CHUNK: usize = 2 << 20;
        let (node, device) = (AscendNode::new(PEER), device(1));
        let client = node.client(&device);
        let segment = ascend::expandable(&device, &[CHUNK; 4]);
        // From the middle of one mapping into the next one but one.
        let tensor = segment.part(CHUNK / 2, 2 * CHUNK).unwrap();
        let bytes = pattern(9, tensor.len);
        sim().poke(tensor.addr as u64, &bytes).unwrap();
        let ordinary = [1, 2].map(|seed| filled(&device, &pattern(seed, LEN)));
        // Only CANN 9 says where memory of others begins.
        let mut staged = 0;
        for (stored, refused) in [(3, false), (6, true)] {
            if refused {
                node.faults("aclrtMapMem=507899");
            }
            staged += u64::from(refused || !ascend::is_9());
            client.clear().unwrap();
            let puts = client.batch_put(vec![
                ("a", Payload::from(&ordinary[0])),
                // SAFETY: it lives as long as the process.
                ("v", unsafe { Payload::raw(tensor.addr, tensor.len) }),
                ("b", Payload::from(&ordinary[1])),
            ]);
            assert!(puts.iter().all(|put| matches!(put, Ok(Put::Stored))), "{puts:?}");
            assert_eq!((node.stored("staging"), node.stored("ipc")), (staged, stored - staged), "{refused}");
            assert!(client.get("v").unwrap() == bytes);
            assert!(
                client.get("a").unwrap() == pattern(1, LEN) && client.get("b").unwrap() == pattern(2, LEN)
            );
            assert_eq!(node.open_imports(), 0, "closed before the answer");
        }
        nothing_was_misplaced(&node);
    });
}

/// P27: no key is closed before it was used, however many one call makes.
#[test]
fn a_batch_of_very_many_allocations_of_others_goes_by_ipc() {
    alone(&[], || {
        const MANY: u64 = 300;
        let (node, device) = (AscendNode::new(PEER), device(1));
        let client = node.client(&device);
        let pointers: Vec<usize> = ascend::on(&device, || {
            (0..MANY)
                .map(|_| {
                    let mut pointer = 0usize;
                    assert_eq!(acl!(aclrtMalloc(&mut pointer => *mut usize, LEN => usize, 0 => i32)), 0);
                    pointer
                })
                .collect()
        });
        let keys: Vec<String> = (0..MANY).map(|i| i.to_string()).collect();
        for (i, &pointer) in pointers.iter().enumerate() {
            sim().poke(pointer as u64, &[i as u8; LEN]).unwrap();
        }
        // SAFETY: they are freed after the call.
        let payloads = pointers.iter().map(|&pointer| unsafe { Payload::raw(pointer, LEN) });
        let puts = client.batch_put(keys.iter().map(String::as_str).zip(payloads).collect());
        assert!(puts.iter().all(|put| matches!(put, Ok(Put::Stored))));
        for (i, key) in keys.iter().enumerate() {
            assert!(client.get(key).unwrap() == [i as u8; LEN], "{key}");
        }
        let by_ipc = if ascend::is_9() { MANY } else { 0 };
        assert_eq!((node.stored("staging"), node.stored("ipc")), (MANY - by_ipc, by_ipc));
        ascend::on(&device, || pointers.iter().for_each(|&p| assert_eq!(acl!(aclrtFree(p => usize)), 0)));
        nothing_was_misplaced(&node);
    });
}

/// P11, P39.
#[test]
fn each_call_runs_on_its_own_handles_device_whichever_was_opened_last() {
    alone(&[], || {
        let node = AscendNode::new(PEER);
        let clients = [0, 1].map(|logical| node.client(&device(logical)));
        enter(0);
        for logical in [0usize, 1, 0] {
            let client = &clients[logical];
            let buffer = filled(client.device(), &pattern(logical as u8, LEN));
            client.upsert("k", &buffer).unwrap();
            let mut back = client.device().buffer(LEN).unwrap();
            client.get_into("k", &mut back).unwrap();
            assert!(peek(back.region()) == pattern(logical as u8, LEN));
            assert_eq!(current(), Some(0));
        }
        assert_eq!(node.stored("staging"), 0);
        nothing_was_misplaced(&node);
    });
}

/// Calls that time out, and answer in time.
fn gives_up_in_time<R: std::fmt::Debug>(
    client: &StoreClient<AscendDevice>,
    call: impl FnOnce(&StoreClient<AscendDevice>) -> haulier::Result<R>,
) {
    let start = std::time::Instant::now();
    let answer = call(&client.with_deadline(HASTE));
    let timed_out = match &answer {
        Err(Error::Timeout { .. }) => true,
        Err(Error::NotSent { cause }) => matches!(**cause, Error::Timeout { .. }),
        _ => false,
    };
    assert!(timed_out, "{answer:?}");
    assert!(start.elapsed() < HASTE + Duration::from_secs(2), "{:?}", start.elapsed());
}

/// P17: work that never ends, copies that never end, and runtimes that hang in the client and in the node.
#[test]
fn what_never_ends_times_out_and_others_go_on() {
    alone(&[], || {
        let (mine, theirs) = (device(0), device(1));
        let buffer = filled(&mine, &pattern(1, LEN));
        let goes_on = |node: &AscendNode| {
            let other = node.client(&theirs);
            assert_eq!(other.put("a", &filled(&theirs, &pattern(2, LEN))).unwrap(), Put::Stored);
            assert!(other.get("a").unwrap() == pattern(2, LEN));
            assert!(!other.exists("k").unwrap(), "a key is there that was given up");
        };

        let (node, stream) = (AscendNode::new(PEER), ascend::stream(&mine));
        hold::<ascend::Runtime>(&mine, stream);
        queue_fill::<ascend::Runtime>(&mine, stream, buffer.region(), 0xab);
        let client = node.client(&mine);
        gives_up_in_time(&client, |client| mine.with_stream(stream, || client.put("k", &buffer)));
        goes_on(&node);
        release::<ascend::Runtime>(&mine, stream);

        // In the node: opening memory, and a copy, for which ACL is given no limit.
        for call in ["aclrtIpcMemImportByKey", "aclrtSynchronizeStream"] {
            let node = AscendNode::new(PEER);
            let client = node.client(&mine);
            node.faults(&format!("{call}:1=hang"));
            gives_up_in_time(&client, |client| client.put("k", &buffer));
            assert_eq!(node.calls(call), 1, "{call} does not hang");
            goes_on(&node);
        }

        // In the client: a copy; the worker is left to it.
        let node = AscendNode::staging(PEER);
        let client = node.client(&mine);
        sim().plan_faults("aclrtSynchronizeStream:1=hang").unwrap();
        gives_up_in_time(&client, |client| client.put("k", &buffer));
        goes_on(&node);
        sim().unblock().unwrap();
        assert_eq!(client.put("k", &buffer).unwrap(), Put::Stored);
    });
}

/// P79: runtime, socket and workers are the parent's.
#[test]
fn a_client_in_a_forked_child_is_refused_and_the_parent_goes_on() {
    alone(&[], || {
        let (node, device) = (AscendNode::new(PEER), device(1));
        let client = node.client(&device);
        let buffer = filled(&device, &pattern(1, LEN));
        client.put("k", &buffer).unwrap();
        let (in_child, addr) = (client.clone(), buffer.region().addr);
        let mut command = Command::new("/nowhere");
        let check = move || {
            // SAFETY: refused before the memory is touched.
            let put = in_child.put("child", unsafe { Payload::raw(addr, LEN) });
            let refused = matches!(put, Err(Error::ForkedProcess { .. }))
                && matches!(in_child.get("k"), Err(Error::ForkedProcess { .. }))
                && device.bind_current().is_err_and(|e| e.to_string().contains("forked"));
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

unsafe extern "C" {
    safe fn atexit(run: extern "C" fn()) -> i32;
}

/// What an application still holds when its static objects are destroyed: dropped, and a call that comes too late.
static LEFT: Mutex<Option<Box<dyn FnOnce() -> bool + Send>>> = Mutex::new(None);

extern "C" fn end() {
    let Some(end) = LEFT.lock().unwrap().take() else { return };
    let before = logged().len();
    let as_expected = end();
    let said = logged().split_off(before);
    // More than a line, or a warning, is too much.
    if !as_expected || said.len() > 1 || said.iter().any(|line| !line.contains("DEBUG")) {
        eprintln!("as expected: {as_expected}; {said:#?}");
        process::abort();
    }
}

/// P78.
#[test]
fn a_client_that_outlives_the_runtime_ends_without_a_word() {
    alone(&[], || {
        assert_eq!(atexit(end), 0);
        assert!(logged().is_empty());
        let (node, device) = (AscendNode::new(PEER), device(1));
        let client = node.client(&device);
        let buffer: &'static _ = Box::leak(Box::new(filled(&device, &pattern(1, LEN))));
        let registered = (client.register_buffer(buffer).unwrap(), client.register_buffer(pages(1)).unwrap());
        client.put("k", buffer).unwrap();
        *LEFT.lock().unwrap() = Some(Box::new(move || {
            let late = client.put("late", buffer);
            let unloaded = |e: &Error| matches!(e, Error::Device(e) if e.kind() == Kind::ShutDown);
            let shut_down = match &late {
                Err(Error::NotSent { cause }) => unloaded(cause),
                Err(e) => unloaded(e),
                Ok(_) => false,
            };
            drop((registered, client, node));
            shut_down && device.failed_drops() == 0
        }));
    });
}

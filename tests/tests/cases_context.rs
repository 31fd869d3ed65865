//! Cases of threads without, or with another, current device, on strict machines. Each names its row of the field's
//! reports.

use std::{sync::Barrier, thread};

use backend_cpu::strict::{Argument, Builder, DefaultDevice, Dialect, Op, Outcome};
use hal::{Device, Kind, LogicalId, Memory};
use haulier::{Error, Options, Payload, Put, StoreClient, Target};
use haulier_tests::{
    conformance::pattern,
    rig::{Rig, every_call_had_its_device, filled, machine, on_a_bound_thread, peek, waits},
};

/// A machine with Ascend's manners: a thread keeps the device that it has, and one without says 0 when it is asked.
fn ascend(devices: u32) -> Builder {
    machine(devices).dialect(Dialect::Acl).default_device(DefaultDevice::AnswersZero).no_unbind()
}

/// Clients on alternating devices put and get in turns, on threads that have no device and keep none.
fn interleave(rig: &Rig, clients: usize, rounds: usize) {
    let open: Vec<_> = (0..clients).map(|i| rig.client(i as u32 % 2)).collect();
    rig.here().log().clear();
    rig.there().log().clear();
    let together = Barrier::new(clients);
    thread::scope(|scope| {
        for (i, client) in open.iter().enumerate() {
            let together = &together;
            scope.spawn(move || {
                let mut target = filled(client.device(), &[0; 8192]);
                // From here on all at the same time, so that threads of both devices are at work in the node.
                together.wait();
                for round in 0..rounds {
                    let (key, bytes) = (format!("{i}/{round}"), pattern((i * 31 + round) as u8, 8192));
                    let buffer = filled(client.device(), &bytes);
                    assert_eq!(client.put(&key, &buffer).unwrap(), Put::Stored);
                    assert_eq!(client.get_into(&key, &mut target).unwrap(), 8192);
                    assert!(peek(rig.here(), target.region()) == bytes, "{key}");
                }
                assert_eq!(rig.here().current().unwrap(), None, "the thread was left with a device");
            });
        }
    });
    every_call_had_its_device(rig.here().log());
    every_call_had_its_device(rig.there().log());
    for device in 0..2 {
        let copies = rig.there().log().of(Op::Copy);
        assert!(copies.iter().any(|call| call.owner == Some(device)), "device {device} copied nothing");
    }
}

/// P01.
#[test]
fn two_clients_on_two_devices_interleave_and_no_call_lacks_its_device() {
    interleave(&Rig::new(), 2, 100);
}

/// P01, on threads that cannot be given back: all work goes to workers.
#[test]
fn two_clients_on_two_devices_interleave_where_threads_cannot_be_given_back() {
    let rig = Rig::with(ascend(2), ascend(2));
    interleave(&rig, 2, 100);
    // Nobody bound a thread only to find out that it cannot be given back.
    assert_eq!(rig.here().log().count(Op::Unbind) + rig.there().log().count(Op::Unbind), 0);
}

/// P01, on a driver that silently takes device 0 where a thread has none.
#[test]
fn two_clients_on_two_devices_interleave_where_a_missing_bind_would_pass_for_device_0() {
    let silent = || machine(2).default_device(DefaultDevice::BindsZero);
    interleave(&Rig::with(silent(), silent()), 2, 100);
}

/// P01.
#[test]
fn sixteen_clients_on_two_devices_interleave_and_no_call_lacks_its_device() {
    interleave(&Rig::new(), 16, 12);
}

/// P02. The application's main thread has a device; the helper that opens the client has none.
#[test]
fn a_client_opens_and_registers_on_a_fresh_thread() {
    let rig = Rig::with(ascend(2), ascend(2));
    rig.here().bind(0).unwrap();
    let buffer = filled(&rig.device(1), &[7; 4096]);
    thread::scope(|scope| {
        scope.spawn(|| {
            let client = rig.client(1);
            let _registered = client.register_buffer(&buffer).unwrap();
            assert_eq!(rig.here().registrations(), 1);
            assert_eq!(client.put("k", &buffer).unwrap(), Put::Stored);
            assert_eq!(rig.here().current().unwrap(), None);
        });
    });
    assert_eq!(rig.here().current().unwrap(), Some(0), "and the main thread keeps its device");
    every_call_had_its_device(rig.here().log());
}

/// P02. What cannot work says which call failed on which device, with the vendor's number, and is never empty.
#[test]
fn a_client_that_cannot_be_bound_says_so_in_a_sentence() {
    let rig = Rig::with(ascend(2), ascend(2));
    rig.here().faults().fail_from(Op::Bind, 1, 507_033);
    let opened = StoreClient::connect(rig.device(1), rig.socket(), Options::default());
    let error = opened.map(drop).unwrap_err();
    let text = error.to_string();
    for part in ["strict device 1", "bind_owned_thread", "507033"] {
        assert!(text.contains(part), "{part:?} is not in {text:?}");
    }
    rig.here().faults().clear();
}

/// P03. Nobody in the node's process ever set a device.
#[test]
fn a_node_selects_its_clients_device_itself() {
    let rig = Rig::with(ascend(4), ascend(4));
    let client = rig.client(3);
    let buffer = filled(client.device(), &[9; 4096]);
    assert_eq!(client.put("k", &buffer).unwrap(), Put::Stored);
    assert_eq!(rig.stored("ipc"), 1);
    let calls = rig.there().log().calls();
    assert_eq!((calls[0].op, calls[0].argument), (Op::Bind, Argument::Device(3)));
    every_call_had_its_device(rig.there().log());
}

/// P05.
#[test]
fn registering_from_threads_without_a_device_gives_everything_back() {
    let rig = Rig::new();
    let client = rig.client(1);
    let buffers: Vec<_> = (0..4u8).map(|i| filled(client.device(), &[i; 4096])).collect();
    rig.here().log().clear();
    thread::scope(|scope| {
        for buffer in &buffers {
            let (client, rig) = (&client, &rig);
            scope.spawn(move || {
                for _ in 0..250 {
                    drop(client.register_buffer(buffer).unwrap());
                    assert_eq!(rig.here().current().unwrap(), None, "the thread was left with a device");
                }
            });
        }
    });
    let log = rig.here().log();
    assert_eq!((log.count(Op::Register), log.count(Op::Unregister)), (1000, 1000));
    assert_eq!(rig.here().registrations(), 0);
    assert_eq!(log.count(Op::Bind), log.count(Op::Unbind), "each bind was taken back");
    every_call_had_its_device(log);
}

/// P06.
#[test]
fn one_thread_registers_pointers_of_two_devices_each_on_its_own() {
    let rig = Rig::with(machine(4), machine(4));
    let clients = [rig.client(0), rig.client(3)];
    let buffers = clients.each_ref().map(|client| filled(client.device(), &[1; 4096]));
    rig.here().log().clear();
    let guards: Vec<_> = clients.iter().zip(&buffers).map(|(c, b)| c.register_buffer(b).unwrap()).collect();
    let on: Vec<_> = rig.here().log().of(Op::Register).iter().map(|call| call.current).collect();
    assert_eq!(on, [Some(0), Some(3)]);
    drop(guards);

    // A registration that fails is that call's own error, and is not found out later as somebody else's fault.
    rig.here().faults().fail(Op::Register, 2, 999);
    let _first = clients[0].register_buffer(&buffers[0]).unwrap();
    let error = clients[1].register_buffer(&buffers[1]).unwrap_err();
    assert!(
        matches!(&error, Error::Device(e) if e.op() == "register" && e.vendor_code() == Some(999)),
        "{error}"
    );
    assert!(error.to_string().contains("device 3"), "{error}");
    assert_eq!(rig.here().registrations(), 1);
    assert_eq!(clients[1].put("k", &buffers[1]).unwrap(), Put::Stored);
    every_call_had_its_device(rig.here().log());
}

/// P08. Progress is asked for on threads that the library owns; none of them may lack its device.
#[test]
fn pending_work_is_asked_about_only_where_the_device_is_current() {
    let rig = Rig::with(ascend(2), ascend(2));
    let client = rig.client(1);
    thread::scope(|scope| {
        for i in 0..4u8 {
            let (client, rig) = (&client, &rig);
            scope.spawn(move || {
                let device = client.device();
                let stream = haulier_tests::rig::stream(device);
                for round in 0..20 {
                    let buffer = filled(device, &[0; 256]);
                    rig.here().hold(stream.raw()).unwrap();
                    haulier_tests::rig::queue_fill(device, stream, buffer.region(), i + 1);
                    thread::scope(|scope| {
                        let key = format!("{i}/{round}");
                        let put = scope.spawn({
                            let (key, buffer) = (key.clone(), &buffer);
                            move || hal::DeviceExt::with_stream(device, stream, || client.put(&key, buffer))
                        });
                        rig.here().release(stream.raw()).unwrap();
                        assert_eq!(put.join().unwrap().unwrap(), Put::Stored);
                        assert_eq!(client.get(&key).unwrap(), [i + 1; 256]);
                    });
                }
            });
        }
    });
    let log = rig.here().log();
    assert!(log.count(Op::QueryStream) >= 80, "each put asks");
    every_call_had_its_device(log);
    let refused =
        log.calls().into_iter().filter(|call| matches!(call.outcome, Outcome::Failed(107_002))).count();
    assert_eq!(refused, 0);
}

/// P09. The thread that finds out that the daemon was restarted has no device.
#[test]
fn after_a_restart_a_thread_without_a_device_reconnects_and_goes_by_ipc_again() {
    for (here, there) in [(machine(2), machine(2)), (ascend(2), ascend(2))] {
        let mut rig = Rig::with(here, there);
        let client = rig.client(1);
        let buffer = filled(client.device(), &pattern(1, 8192));
        let registered = client.register_buffer(&buffer).unwrap();
        client.put("before", &buffer).unwrap();
        assert_eq!(rig.stored("ipc"), 1);
        for _ in 0..3 {
            rig.stop_node();
            rig.start_node();
            let restarted =
                thread::scope(|scope| scope.spawn(|| client.put("after", &buffer)).join().unwrap());
            assert_eq!(restarted.unwrap(), Put::Stored);
            assert_eq!(rig.stored("ipc"), 1, "it is counted anew, and went by IPC");
            assert!(client.get("after").unwrap() == pattern(1, 8192));
            assert!(matches!(client.get("before"), Err(Error::NotFound)));
        }
        drop(registered);
        assert_eq!(rig.here().registrations(), 0);
        every_call_had_its_device(rig.here().log());
        every_call_had_its_device(rig.there().log());
    }
}

/// P11.
#[test]
fn each_call_runs_on_its_own_handles_device_whichever_was_opened_last() {
    let rig = Rig::new();
    let (first, second) = (rig.client(0), rig.client(1));
    for (client, device) in [(&first, 0), (&second, 1), (&first, 0)] {
        let buffer = filled(client.device(), &pattern(device as u8, 4096));
        let key = format!("{device}");
        client.upsert(&key, &buffer).unwrap();
        let bound = client.device().bind_current().unwrap();
        assert_eq!(rig.here().current().unwrap(), Some(device));
        let memory = bound.allocate(4096).unwrap();
        // SAFETY: both are allocated, and nothing is queued on them.
        unsafe { bound.copy(memory.region(), buffer.region()) }.unwrap();
        drop(bound);
        assert!(peek(rig.here(), memory.region()) == pattern(device as u8, 4096));
        assert_eq!(rig.here().current().unwrap(), None);
    }
    every_call_had_its_device(rig.here().log());
    every_call_had_its_device(rig.there().log());
}

/// P13.
#[test]
fn logical_ids_are_what_the_driver_is_told_where_the_visible_devices_are_not_the_first() {
    let visible = || ascend(8).visible([4, 5, 6, 7]);
    let rig = Rig::with(visible(), visible());
    let client = rig.client(1);
    let buffer = filled(client.device(), &[3; 4096]);
    client.put("k", &buffer).unwrap();
    assert_eq!(rig.stored("ipc"), 1);
    assert_eq!(client.device().identity().physical, Some(hal::PhysicalId(5)));
    for machine in [rig.here(), rig.there()] {
        let binds = machine.log().of(Op::Bind);
        assert!(
            !binds.is_empty() && binds.iter().all(|call| call.argument == Argument::Device(1)),
            "{binds:?}"
        );
    }

    // A physical id is of another type; who forces it through is told the ids that would do.
    let error = rig.here().device(LogicalId(5)).unwrap_err();
    assert_eq!(error.kind(), Kind::InvalidDevice);
    let text = error.to_string();
    assert!(text.contains("[4, 5, 6, 7]") && text.contains("its logical id is 1"), "{text}");
}

/// P39.
#[test]
fn exporting_and_closing_run_on_the_memorys_device_and_give_the_callers_back() {
    let rig = Rig::new();
    let client = rig.client(1);
    let buffer = filled(client.device(), &[5; 4096]);
    rig.here().log().clear();
    rig.here().bind(0).unwrap();
    client.put("k", &buffer).unwrap();
    assert_eq!(rig.here().current().unwrap(), Some(0));
    let exports = rig.here().log().of(Op::Export);
    assert_eq!(exports.iter().map(|call| call.current).collect::<Vec<_>>(), [Some(1)]);

    drop(client);
    haulier_tests::rig::eventually("the node closes what it opened", || rig.there().open_imports() == 0);
    let closes = rig.there().log().of(Op::CloseImport);
    assert_eq!(closes.iter().map(|call| call.current).collect::<Vec<_>>(), [Some(1)]);
    drop(buffer);
    assert_eq!(rig.here().current().unwrap(), Some(0));
    let frees = rig.here().log().of(Op::Free);
    assert_eq!(frees.iter().map(|call| call.current).collect::<Vec<_>>(), [Some(1)]);
}

/// P06, P39: a buffer that is dropped on a thread with another device, or with none, is freed on its own.
#[test]
fn memory_and_registrations_are_given_back_on_their_own_device() {
    let rig = Rig::new();
    let client = rig.client(1);
    for other in [None, Some(0)] {
        let buffer = filled(client.device(), &[5; 4096]);
        let registered = client.device().bind_current().unwrap().register(buffer.region()).unwrap();
        let drop_both = move || {
            drop(registered);
            drop(buffer);
        };
        match other {
            None => thread::scope(|scope| scope.spawn(drop_both).join()).unwrap(),
            Some(device) => on_a_bound_thread(&rig.device(device), |_| drop_both()),
        }
    }
    assert_eq!((rig.here().registrations(), rig.here().live_allocations()), (0, 0));
    every_call_had_its_device(rig.here().log());
}

/// P39, P06: memory of another device than the client's. Refused before anything is exported, waited for or sent.
#[test]
fn a_payload_of_another_device_stops_the_batch_before_anything_is_exposed() {
    for rig in [Rig::new(), Rig::staging()] {
        let client = rig.client(0);
        let (ours, theirs) = (filled(client.device(), &[1; 4096]), filled(&rig.device(1), &[2; 4096]));
        client.put("there", &ours).unwrap();
        let region = theirs.region();
        rig.here().log().clear();
        let before = rig.counter("haulier_operations_total", &[]);
        // SAFETY: the buffer lives, and nothing is queued on it.
        let (payload, target) =
            unsafe { (Payload::raw(region.addr, region.len), Target::raw(region.addr, region.len)) };
        let puts =
            client.batch_put(vec![("ours", (&ours).into()), ("theirs", payload), ("host", b"x".into())]);
        let got = client.get_into("there", target);
        let refusals = puts.into_iter().map(|put| put.map(drop)).chain([got.map(drop)]);
        for refusal in refusals {
            let Err(Error::NotSent { cause }) = refusal else { panic!("{refusal:?}") };
            let Error::DeviceMismatch { expected, found } = &*cause else { panic!("{cause:?}") };
            assert!(expected.contains(&client.device().identity().uuid.to_string()), "{expected}");
            assert!(found.contains(&rig.device(1).identity().uuid.to_string()), "{found}");
        }
        assert_eq!(rig.counter("haulier_operations_total", &[]), before, "a request was sent");
        let log = rig.here().log();
        assert_eq!(waits(log).len(), 0, "a stream was waited for");
        assert!(
            log.of(Op::Export).iter().all(|call| call.owner == Some(0)),
            "the other device's memory was exported"
        );
        assert_eq!(log.count(Op::Copy), 0);
        assert_eq!(peek(rig.here(), region), [2; 4096]);
    }
}

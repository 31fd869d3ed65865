//! Cases of payloads that are not ready when they are put, or that are still in use when they are filled, on strict
//! machines. Each names its row of the field's reports.

use std::{
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use backend_cpu::strict::{
    CaptureMode, DefaultDevice, Dialect, Machine, MachineOwner, NULL_STREAM, Op, PER_THREAD_STREAM,
    StrictDevice, StrictStream,
};
use hal::{Buffer, Device, DeviceExt, Kind, LogicalId};
use haulier::{Error, Options, Payload, Put, StoreClient, Target};
use haulier_tests::{
    conformance::pattern,
    rig::{
        self, Rig, eventually, every_call_had_its_device, filled, machine, on_a_bound_thread, peek,
        queue_fill, streams_waited_for, waits,
    },
};

/// Bytes of a payload: more than what may travel inside a message.
const LEN: usize = 64 << 10;

/// A stream whose work is held, and how much of it is left.
fn held(device: &StrictDevice) -> StrictStream {
    let stream = rig::stream(device);
    device.machine().hold(stream.raw()).unwrap();
    stream
}

fn pending(device: &StrictDevice, stream: StrictStream) -> u64 {
    device.machine().pending(stream.raw()).unwrap()
}

/// Runs `call` on a thread whose current stream is `stream`, and lets go of the stream when the call waits for it.
///
/// Checks that the work was pending before the call, that nothing happened before the stream was let go, and that the
/// work was complete when the call returned: right bytes alone can be luck.
fn released_meanwhile<R: Send>(
    device: &StrictDevice,
    stream: StrictStream,
    nothing_happened: impl Fn() -> bool,
    call: impl FnOnce() -> R + Send,
) -> R {
    let machine = device.machine();
    assert!(pending(device, stream) > 0, "the work must be pending before the call");
    let before = waits(machine.log()).len();
    thread::scope(|scope| {
        let caller = scope.spawn(|| {
            device.with_stream(stream, || {
                let answer = call();
                (answer, pending(device, stream))
            })
        });
        eventually("the call waits for its stream", || {
            waits(machine.log()).len() > before || caller.is_finished()
        });
        let early = caller.is_finished();
        let quiet = nothing_happened();
        machine.release(stream.raw()).unwrap();
        let (answer, left) = caller.join().unwrap();
        assert!(!early, "the call returned while the work was held");
        assert!(quiet, "something was sent while the work was held");
        assert_eq!(left, 0, "the call returned before the work was complete");
        answer
    })
}

/// A machine's client, and how its puts travel.
enum Way {
    Node(Rig),
    InProcess(MachineOwner, StoreClient<StrictDevice>),
}

impl Way {
    fn in_process() -> Self {
        let machine = machine(2).build().unwrap();
        let device = machine.device(LogicalId(1)).unwrap();
        let client = StoreClient::in_process(device, rig::store(), Options::default()).unwrap();
        Way::InProcess(machine, client)
    }

    fn client(&self) -> StoreClient<StrictDevice> {
        match self {
            Way::Node(rig) => rig.client(1),
            Way::InProcess(_, client) => client.clone(),
        }
    }
}

/// Twenty puts each; every single one must be right.
fn twenty_puts(way: &Way, batch: bool, pends: bool) {
    let client = way.client();
    let device = client.device().clone();
    for trial in 0..20u8 {
        let stream = rig::stream(&device);
        let buffers: Vec<_> =
            (0..if batch { 8 } else { 1 }).map(|_| filled(&device, &vec![0x11; LEN])).collect();
        if pends {
            device.machine().hold(stream.raw()).unwrap();
        }
        for (i, buffer) in buffers.iter().enumerate() {
            queue_fill(&device, stream, buffer.region(), 0x80 + trial + i as u8);
        }
        let keys: Vec<String> = (0..buffers.len()).map(|i| format!("{trial}/{i}")).collect();
        let put = || match &buffers[..] {
            [one] => vec![client.put(&keys[0], one)],
            all => {
                client.batch_put(keys.iter().map(String::as_str).zip(all.iter().map(Payload::from)).collect())
            }
        };
        let nothing_stored = || client.list("").unwrap().len() == usize::from(trial) * buffers.len();
        let puts = if pends {
            released_meanwhile(&device, stream, nothing_stored, put)
        } else {
            eventually("the work is done before the call", || pending(&device, stream) == 0);
            device.with_stream(stream, put)
        };
        assert!(puts.iter().all(|put| matches!(put, Ok(Put::Stored))), "{puts:?}");
        for (i, key) in keys.iter().enumerate() {
            assert!(client.get(key).unwrap() == vec![0x80 + trial + i as u8; LEN], "{key}: stale bytes");
        }
    }
    let (machine, path) = match way {
        Way::Node(rig) if rig.stored("ipc") > 0 => (rig.here(), "ipc"),
        Way::Node(rig) => (rig.here(), "staging"),
        Way::InProcess(machine, _) => (machine, "in process"),
    };
    every_call_had_its_device(machine.log());
    assert_eq!(machine.log().count(Op::SyncDevice), 0, "{path}");
}

macro_rules! matrix {
    ($($name:ident: $way:expr, $batch:expr, $pends:expr, $path:expr;)*) => {
        /// P14, P15: the same rule on each path, for what is pending and for what is ready.
        mod readiness {
            use super::*;
            $(#[test]
            fn $name() {
                let way = $way;
                twenty_puts(&way, $batch, $pends);
                if let Way::Node(rig) = &way {
                    assert_eq!(rig.stored($path), if $batch { 160 } else { 20 }, "they did not go that way");
                }
            })*
        }
    };
}

matrix! {
    single_pending_by_ipc: Way::Node(Rig::new()), false, true, "ipc";
    single_ready_by_ipc: Way::Node(Rig::new()), false, false, "ipc";
    batch_pending_by_ipc: Way::Node(Rig::new()), true, true, "ipc";
    batch_ready_by_ipc: Way::Node(Rig::new()), true, false, "ipc";
    single_pending_by_staging: Way::Node(Rig::staging()), false, true, "staging";
    single_ready_by_staging: Way::Node(Rig::staging()), false, false, "staging";
    batch_pending_by_staging: Way::Node(Rig::staging()), true, true, "staging";
    batch_ready_by_staging: Way::Node(Rig::staging()), true, false, "staging";
    single_pending_in_process: Way::in_process(), false, true, "";
    single_ready_in_process: Way::in_process(), false, false, "";
    batch_pending_in_process: Way::in_process(), true, true, "";
    batch_ready_in_process: Way::in_process(), true, false, "";
}

/// P14.
#[test]
fn nothing_is_exposed_to_the_node_before_the_stream_is_done() {
    let rig = Rig::new();
    let client = rig.client(0);
    let device = client.device();
    let (buffer, stream) = (filled(device, &vec![0x11; LEN]), held(device));
    queue_fill(device, stream, buffer.region(), 0xab);
    let quiet = || {
        let log = rig.there().log();
        log.count(Op::Import) + log.count(Op::Copy) + rig.counter("haulier_operations_total", &["op=\"put\""])
            == 0
    };
    assert_eq!(released_meanwhile(device, stream, quiet, || client.put("k", &buffer)).unwrap(), Put::Stored);
    assert!(client.get("k").unwrap() == vec![0xab; LEN]);
    assert_eq!((rig.there().log().count(Op::Import), rig.stored("ipc")), (1, 1));
    // Handles are made first, so that whatever cannot be put is known before anything is waited for.
    let number = |op| rig.here().log().of(op).first().map(|call| call.number).expect("it was called");
    assert!(number(Op::Export) < number(Op::QueryStream) && number(Op::QueryStream) < number(Op::SyncStream));
}

/// P14.
#[test]
fn a_failed_synchronisation_sends_nothing_and_says_so_in_every_slot() {
    for op in [Op::QueryStream, Op::SyncStream] {
        let rig = Rig::new();
        let client = rig.client(0);
        let device = client.device();
        let (buffer, stream) = (filled(device, &vec![0x11; LEN]), held(device));
        queue_fill(device, stream, buffer.region(), 0xab);
        rig.here().faults().fail(op, 1, 719);
        let puts = device.with_stream(stream, || {
            client.batch_put(vec![("a", (&buffer).into()), ("b", b"host".into()), ("c", (&buffer).into())])
        });
        for put in &puts {
            let Err(Error::NotSent { cause }) = put else { panic!("{put:?}") };
            assert!(matches!(&**cause, Error::Device(e) if e.vendor_code() == Some(719)), "{cause}");
        }
        assert_eq!(rig.counter("haulier_operations_total", &["op=\"put\""]), 0, "a request was sent");
        assert_eq!(
            client.batch_exists(&["a", "b", "c"]).into_iter().filter_map(Result::ok).filter(|x| *x).count(),
            0
        );
        rig.here().release(stream.raw()).unwrap();
    }
}

/// P14. Eight payloads that wait for two streams.
#[test]
fn a_batch_waits_for_each_distinct_stream_once() {
    for pends in [false, true] {
        let rig = Rig::new();
        let client = rig.client(0);
        let device = client.device();
        let streams = [rig::stream(device), rig::stream(device)];
        let buffers: Vec<_> = (0..8u8).map(|i| filled(device, &vec![i; LEN])).collect();
        for stream in streams.iter().filter(|_| pends) {
            rig.here().hold(stream.raw()).unwrap();
        }
        for (i, buffer) in buffers.iter().enumerate() {
            queue_fill(device, streams[i % 2], buffer.region(), 0xa0 + i as u8);
        }
        if !pends {
            for stream in streams {
                eventually("the work is done", || pending(device, stream) == 0);
            }
        }
        rig.here().log().clear();
        let keys: Vec<String> = (0..8).map(|i| i.to_string()).collect();
        let items = || {
            let payloads = buffers.iter().enumerate().map(|(i, b)| Payload::from(b).after(&[streams[i % 2]]));
            keys.iter().map(String::as_str).zip(payloads).collect()
        };
        let puts = thread::scope(|scope| {
            let caller = scope.spawn(|| client.batch_put(items()));
            if pends {
                for stream in streams {
                    eventually("the batch waits for the stream", || {
                        let mut waited = streams_waited_for(rig.here().log()).into_iter();
                        waited.any(|raw| raw == stream.raw())
                    });
                    rig.here().release(stream.raw()).unwrap();
                }
            }
            caller.join().unwrap()
        });
        assert!(puts.iter().all(|put| matches!(put, Ok(Put::Stored))), "{puts:?}");
        for stream in streams {
            let of =
                |op| {
                    rig.here().log().of(op).into_iter().filter(move |call| {
                        call.argument == backend_cpu::strict::Argument::Stream(stream.raw())
                    })
                };
            // A question, and a wait only where the answer was "not yet".
            assert_eq!((of(Op::QueryStream).count(), of(Op::SyncStream).count()), (1, usize::from(pends)));
        }
        assert_eq!(waits(rig.here().log()).len(), if pends { 4 } else { 2 }, "another stream was waited for");
        for (i, key) in keys.iter().enumerate() {
            assert!(client.get(key).unwrap() == vec![0xa0 + i as u8; LEN]);
        }
    }
}

/// P14: reads what it needs of the driver once for many payloads of one allocation.
#[test]
fn a_batch_on_one_stream_waits_once() {
    let rig = Rig::new();
    let client = rig.client(0);
    let device = client.device();
    let (buffers, stream): (Vec<_>, _) =
        ((0..64u8).map(|i| filled(device, &[i; 256])).collect(), rig::stream(device));
    let keys: Vec<String> = (0..64).map(|i| i.to_string()).collect();
    rig.here().log().clear();
    let puts = device.with_stream(stream, || {
        client.batch_put(keys.iter().map(String::as_str).zip(buffers.iter().map(Payload::from)).collect())
    });
    assert!(puts.iter().all(|put| matches!(put, Ok(Put::Stored))), "{puts:?}");
    assert_eq!(streams_waited_for(rig.here().log()), [stream.raw()]);
}

/// P15. The rule holds also where nobody will take the bytes.
#[test]
fn with_the_daemon_gone_a_put_still_waits_for_its_stream_first() {
    let mut rig = Rig::new();
    let client = rig.client(0);
    let device = client.device();
    let (buffer, stream) = (filled(device, &vec![0x11; LEN]), held(device));
    queue_fill(device, stream, buffer.region(), 0xab);
    rig.stop_node();
    let hasty = client.with_deadline(Duration::from_millis(300));
    rig.here().log().clear();
    let put = device.with_stream(stream, || hasty.put("k", &buffer));
    let Err(Error::NotSent { cause }) = put else { panic!("{put:?}") };
    assert!(matches!(*cause, Error::Timeout { .. }), "it waited for the stream, which is held: {cause}");
    assert!(streams_waited_for(rig.here().log()).iter().all(|raw| *raw == stream.raw()));
    rig.here().release(stream.raw()).unwrap();
    let put = device.with_stream(stream, || hasty.put("k", &buffer));
    assert!(matches!(put, Err(Error::Unreachable { .. } | Error::Timeout { .. })), "{put:?}");
    rig.start_node();
    assert_eq!(device.with_stream(stream, || client.put("k", &buffer)).unwrap(), Put::Stored);
    assert!(client.get("k").unwrap() == vec![0xab; LEN]);
}

/// P16. The machine gives no thread back, so a worker does the work; its own stream is not the one to wait for.
#[test]
fn the_callers_stream_is_waited_for_although_a_worker_does_the_work() {
    let ascend = || machine(2).dialect(Dialect::Acl).default_device(DefaultDevice::AnswersZero).no_unbind();
    let rig = Rig::with(ascend(), ascend());
    let client = rig.client(1);
    let device = client.device();
    let (buffer, stream) = (filled(device, &vec![0x11; LEN]), held(device));
    queue_fill(device, stream, buffer.region(), 0xab);
    rig.here().log().clear();
    let caller = released_meanwhile(
        device,
        stream,
        || rig.stored("ipc") == 0,
        || {
            client.put("k", &buffer).unwrap();
            thread::current().id()
        },
    );
    assert!(client.get("k").unwrap() == vec![0xab; LEN]);
    let waits = waits(rig.here().log());
    assert!(!waits.is_empty() && waits.iter().all(|call| call.thread != caller), "no worker was needed");
    assert!(streams_waited_for(rig.here().log()).iter().all(|raw| *raw == stream.raw()), "{waits:?}");
}

/// What must hold while a call into the driver hangs: the caller is given up on time, nothing is stored, and others go
/// on.
fn a_hanging_call_holds_up_nobody_else(
    rig: &Rig,
    hang: impl FnOnce(),
    put: impl FnOnce(&StoreClient<StrictDevice>),
) {
    let (client, other) = (rig.client(0), rig.client(1));
    let theirs = filled(other.device(), &vec![0x22; LEN]);
    other.put("before", &theirs).unwrap();
    hang();
    put(&client.with_deadline(Duration::from_millis(200)));
    assert!(!other.exists("k").unwrap(), "a key is there that was given up");
    assert_eq!(other.put("after", &b"host".to_vec()).unwrap(), Put::Stored);
    assert!(other.get("before").unwrap() == vec![0x22; LEN]);
    // Returns at once: neither joins what hangs.
    client.close();
    drop(client);
}

fn is_timeout(put: haulier::Result<Put>) {
    match put {
        Err(Error::Timeout { .. }) => {}
        Err(Error::NotSent { cause }) if matches!(*cause, Error::Timeout { .. }) => {}
        other => panic!("{other:?}"),
    }
}

/// P17.
#[test]
fn a_stream_that_never_completes_times_the_put_out_and_stores_nothing() {
    let rig = Rig::new();
    let device = rig.device(0);
    let (buffer, stream) = (filled(&device, &vec![0x11; LEN]), held(&device));
    queue_fill(&device, stream, buffer.region(), 0xab);
    a_hanging_call_holds_up_nobody_else(
        &rig,
        || (),
        |client| {
            is_timeout(device.with_stream(stream, || client.put("k", &buffer)));
            is_timeout(
                device.with_stream(stream, || client.batch_put(vec![("k", (&buffer).into())]).remove(0)),
            );
        },
    );
    let later = rig.client(0);
    rig.here().release(stream.raw()).unwrap();
    eventually("the work is done", || pending(&device, stream) == 0);
    assert!(!later.exists("k").unwrap(), "it was stored after it had been given up");
}

/// P17: the wait itself hangs in the driver.
#[test]
fn a_wait_that_hangs_in_the_driver_times_the_put_out() {
    let rig = Rig::new();
    let device = rig.device(0);
    let (buffer, stream) = (filled(&device, &vec![0x11; LEN]), held(&device));
    queue_fill(&device, stream, buffer.region(), 0xab);
    let hang = || rig.here().faults().hang_from(Op::SyncStream, 1);
    a_hanging_call_holds_up_nobody_else(&rig, hang, |client| {
        is_timeout(device.with_stream(stream, || client.put("k", &buffer)));
    });
    rig.here().release(stream.raw()).unwrap();
}

/// P17, for the copy of a payload that goes by staging: the worker that hangs is left behind.
#[test]
fn a_copy_that_never_returns_times_the_put_out() {
    let rig = Rig::staging();
    let buffer = filled(&rig.device(0), &vec![0x11; LEN]);
    let hang = || rig.here().faults().hang(Op::Copy, 1);
    a_hanging_call_holds_up_nobody_else(&rig, hang, |client| is_timeout(client.put("k", &buffer)));
    let later = rig.client(0);
    rig.here().faults().unblock_all();
    eventually("what was left behind has ended", || rig.counter("haulier_grants", &[]) == 0);
    assert!(!later.exists("k").unwrap(), "it was stored after it had been given up");
}

/// P17, P62: host memory that a call only borrowed belongs to its owner again when the call has given up. Here the owner
/// looks whether it is left alone; another one would have freed it.
#[test]
fn host_memory_of_a_get_that_was_given_up_is_not_written_any_more() {
    let rig = Rig::staging();
    let client = rig.client(0);
    client.put("k", &vec![0x22; LEN]).unwrap();
    let (mut on_device, mut on_host) = (filled(client.device(), &vec![0; LEN]), vec![0xee; LEN]);
    rig.here().faults().hang(Op::Copy, 1);
    let hasty = client.with_deadline(Duration::from_millis(200));
    let got = hasty.batch_get_into(vec![("k", (&mut on_device).into()), ("k", (&mut on_host).into())]);
    assert!(got.iter().all(|slot| matches!(slot, Err(Error::Timeout { .. }))), "{got:?}");
    assert!(rig.counter("haulier_holds", &[]) > 0, "the call has ended, so this shows nothing");
    rig.here().faults().unblock_all();
    eventually("what was left behind has ended", || rig.counter("haulier_holds", &[]) == 0);
    assert!(on_host == vec![0xee; LEN], "the call wrote memory that it had given back");
}

/// P17, in the node: only the client whose memory it is waits.
#[test]
fn a_driver_that_hangs_in_the_node_holds_up_only_its_own_client() {
    for op in [Op::Import, Op::Copy] {
        let rig = Rig::new();
        let buffer = filled(&rig.device(0), &vec![0x11; LEN]);
        let hang = || rig.there().faults().hang(op, 1);
        a_hanging_call_holds_up_nobody_else(&rig, hang, |client| is_timeout(client.put("k", &buffer)));
        rig.there().faults().unblock_all();
    }
}

/// P19.
#[test]
fn named_streams_are_waited_for_and_no_other_one() {
    let rig = Rig::new();
    let client = rig.client(0);
    let device = client.device();
    let (wanted, never) = (rig::stream(device), held(device));
    let (buffer, other) = (filled(device, &vec![0; LEN]), filled(device, &[0; 64]));
    queue_fill(device, never, other.region(), 1);
    queue_fill(device, wanted, buffer.region(), 0xab);
    rig.here().log().clear();
    // The current stream never completes, and is not the one that is named.
    let put = device.with_stream(never, || client.put("k", Payload::from(&buffer).after(&[wanted])));
    assert_eq!(put.unwrap(), Put::Stored);
    assert!(client.get("k").unwrap() == vec![0xab; LEN]);
    assert!(streams_waited_for(rig.here().log()).iter().all(|raw| *raw == wanted.raw()));
    assert_eq!(rig.here().log().count(Op::SyncDevice), 0);
    // Who says that it is done already is believed.
    rig.here().log().clear();
    let put = device.with_stream(never, || client.put("done", Payload::from(&buffer).already_done()));
    assert_eq!((put.unwrap(), waits(rig.here().log()).len()), (Put::Stored, 0));
    rig.here().release(never.raw()).unwrap();
}

/// Runs an application's calls on the calling thread, with the device current meanwhile.
fn bound_here<R>(device: &StrictDevice, work: impl FnOnce(&Machine) -> R) -> R {
    let _bound = device.bind_current().unwrap();
    work(device.machine())
}

/// P20.
#[test]
fn a_put_under_capture_is_refused_before_any_call_that_would_spoil_it() {
    let rig = Rig::new();
    let client = rig.client(0);
    let device = client.device();
    let (mut buffer, stream) = (filled(device, &vec![0x11; LEN]), rig::stream(device));
    client.put("there", &buffer).unwrap();
    for mode in [CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed] {
        // Only the thread that began a capture may end it, unless it is a relaxed one.
        bound_here(device, |machine| machine.begin_capture(stream.raw(), mode)).unwrap();
        rig.here().log().clear();
        device.with_stream(stream, || {
            let put = client.put("k", &buffer);
            assert!(
                matches!(&put, Err(Error::NotSent { cause }) if matches!(**cause, Error::StreamCapturing)),
                "{put:?}"
            );
            let got = client.get_into("there", &mut buffer);
            assert!(
                matches!(&got, Err(Error::NotSent { cause }) if matches!(**cause, Error::StreamCapturing)),
                "{got:?}"
            );
            assert!(matches!(client.register_buffer(&buffer), Err(Error::StreamCapturing)));
        });
        let log = rig.here().log();
        for op in [Op::SyncStream, Op::QueryStream, Op::SyncDevice, Op::Register, Op::Allocate, Op::Copy] {
            assert_eq!(log.count(op), 0, "{op:?} was called under capture");
        }
        let ended = bound_here(device, |machine| machine.end_capture(stream.raw()));
        ended.expect("the capture is still valid");
    }
    assert!(!client.exists("k").unwrap());
    assert_eq!(device.with_stream(stream, || client.put("k", &buffer)).unwrap(), Put::Stored);
}

/// P20: a capture elsewhere in the process is not spoiled by what Haulier does beside it.
#[test]
fn a_put_beside_a_capture_spoils_nothing() {
    for rig in [Rig::new(), Rig::staging()] {
        let client = rig.client(0);
        let device = client.device();
        let (mut buffer, captured) = (filled(device, &vec![0x11; LEN]), rig::stream(device));
        let begun = bound_here(device, |machine| machine.begin_capture(captured.raw(), CaptureMode::Global));
        begun.unwrap();
        thread::scope(|scope| {
            let beside = scope.spawn(|| {
                client.put("k", &buffer).unwrap();
                client.get_into("k", &mut buffer).unwrap();
                drop(client.register_buffer(&buffer).unwrap());
            });
            beside.join().unwrap();
        });
        let ended = bound_here(device, |machine| machine.end_capture(captured.raw()));
        ended.expect("the capture is still valid");
    }
}

/// P22. Handle 2 means another stream on each thread; so does 0 where the application was built that way.
#[test]
fn a_per_thread_stream_is_waited_for_on_the_thread_that_named_it() {
    for raw in [PER_THREAD_STREAM, NULL_STREAM] {
        let per_thread = || machine(2).per_thread_default_stream();
        let rig = Rig::with(per_thread(), per_thread());
        let client = rig.client(0);
        let device = client.device();
        let buffer = filled(device, &vec![0x11; LEN]);
        let (tell, told) = mpsc::channel();
        thread::scope(|scope| {
            let caller = scope.spawn(|| {
                // An application's thread: it has a device of its own, and work on its own stream.
                rig.here().bind(0).unwrap();
                rig.here().hold(raw).unwrap();
                rig.here().fill(raw, buffer.region().addr, LEN, 0xab).unwrap();
                assert_eq!(rig.here().pending(raw).unwrap(), 1);
                tell.send(()).unwrap();
                let put = match raw {
                    NULL_STREAM => client.put("k", &buffer),
                    _ => device.with_stream(device.stream(raw), || client.put("k", &buffer)),
                };
                assert_eq!((put.unwrap(), rig.here().pending(raw).unwrap()), (Put::Stored, 0));
            });
            let id = caller.thread().id();
            told.recv().unwrap();
            eventually("the put waits", || {
                rig.here().log().count(Op::SyncStream) > 0 || caller.is_finished()
            });
            rig.here().release_all();
            caller.join().unwrap();
            let waits = waits(rig.here().log());
            assert!(
                waits.iter().all(|call| call.thread == id),
                "another thread's stream was waited for: {waits:?}"
            );
        });
        assert!(client.get("k").unwrap() == vec![0xab; LEN]);
    }
}

/// P22.
#[test]
fn a_per_thread_stream_of_another_thread_is_refused_and_nothing_is_sent() {
    let rig = Rig::new();
    let client = rig.client(0);
    let device = client.device();
    let buffer = filled(device, &vec![0x11; LEN]);
    let theirs = on_a_bound_thread(device, |device| device.stream(PER_THREAD_STREAM));
    rig.here().log().clear();
    let put = client.put("k", Payload::from(&buffer).after(&[theirs]));
    let Err(Error::NotSent { cause }) = put else { panic!("{put:?}") };
    assert!(matches!(&*cause, Error::Device(e) if e.kind() == Kind::WrongThread), "{cause}");
    assert_eq!(waits(rig.here().log()).len(), 0, "somebody's stream was waited for all the same");
    assert!(!client.exists("k").unwrap());
}

/// P23, by IPC: the node's copy is held back. By staging: the client's own.
#[test]
fn a_get_into_returns_only_after_its_copy_and_later_work_finds_the_bytes() {
    for (rig, by_ipc) in [(Rig::new(), true), (Rig::staging(), false)] {
        let client = rig.client(0);
        let device = client.device();
        client.put("k", &pattern(1, LEN)).unwrap();
        let (mut target, stream) = (filled(device, &vec![0xee; LEN]), rig::stream(device));
        let (region, copy) = (target.region(), filled(device, &vec![0; LEN]));
        let copies = if by_ipc { rig.there() } else { rig.here() };
        let before = copies.log().count(Op::Copy);
        copies.faults().hang(Op::Copy, 1);
        thread::scope(|scope| {
            let getter = scope.spawn(|| device.with_stream(stream, || client.get_into("k", &mut target)));
            eventually("the copy is under way", || {
                copies.log().count(Op::Copy) > before || getter.is_finished()
            });
            assert!(!getter.is_finished(), "the get returned before its copy");
            copies.faults().unblock_all();
            assert_eq!(getter.join().unwrap().unwrap(), LEN as u64);
        });
        on_a_bound_thread(device, |device| {
            let machine = device.machine();
            // SAFETY: both are device memory that outlives the stream's work.
            unsafe { machine.copy_async(stream.raw(), copy.region().addr, region.addr, LEN) }.unwrap();
            machine.sync_stream(stream.raw(), hal::Deadline::NEVER).unwrap();
        });
        assert!(peek(rig.here(), copy.region()) == pattern(1, LEN));
    }
}

/// P14, P23: a destination that queued work still uses.
#[test]
fn a_get_into_does_not_overwrite_what_queued_work_still_reads() {
    for rig in [Rig::new(), Rig::staging()] {
        let client = rig.client(0);
        let device = client.device();
        client.put("k", &vec![0x22; LEN]).unwrap();
        let (mut target, stream) = (filled(device, &vec![0x11; LEN]), held(device));
        let (region, reader) = (target.region(), filled(device, &vec![0; LEN]));
        on_a_bound_thread(device, |device| {
            // SAFETY: both are device memory that outlives the stream's work.
            unsafe { device.machine().copy_async(stream.raw(), reader.region().addr, region.addr, LEN) }
        })
        .unwrap();
        let quiet = || peek(rig.here(), region) == vec![0x11; LEN];
        let got = released_meanwhile(device, stream, quiet, || client.get_into("k", &mut target));
        assert_eq!(got.unwrap(), LEN as u64);
        assert!(peek(rig.here(), reader.region()) == vec![0x11; LEN], "the reader saw the new value");
        assert!(peek(rig.here(), region) == vec![0x22; LEN]);
    }
}

/// P15: host memory that queued work still fills, such as a pinned buffer that a copy from the device goes to.
#[test]
fn raw_host_memory_that_queued_work_fills_is_waited_for() {
    let rig = Rig::new();
    let client = rig.client(0);
    let device = client.device();
    let (source, stream) = (filled(device, &vec![0xab; LEN]), held(device));
    let mut pinned = vec![0x11u8; LEN];
    let addr = pinned.as_mut_ptr().expose_provenance();
    on_a_bound_thread(device, |device| {
        // SAFETY: `pinned` outlives the stream's work, and nobody touches it meanwhile.
        unsafe { device.machine().copy_async(stream.raw(), addr, source.region().addr, LEN) }
    })
    .unwrap();
    let put = released_meanwhile(
        device,
        stream,
        || true,
        || {
            // SAFETY: as above.
            client.put("k", unsafe { Payload::raw(addr, LEN) })
        },
    );
    assert_eq!(put.unwrap(), Put::Stored);
    assert!(client.get("k").unwrap() == vec![0xab; LEN], "stale bytes");
    drop(pinned);
}

/// P62, on a device: a put that returned is done with its source.
#[test]
fn overwriting_the_source_after_a_put_leaves_the_value_alone() {
    for rig in [Rig::new(), Rig::staging()] {
        let client = rig.client(0);
        let device = client.device();
        let buffer: Buffer<StrictDevice> = filled(device, &pattern(3, LEN));
        client.put("k", &buffer).unwrap();
        rig.here().poke(buffer.region().addr, &vec![0; LEN]).unwrap();
        assert!(client.get("k").unwrap() == pattern(3, LEN));
        drop(buffer);
        assert!(client.get("k").unwrap() == pattern(3, LEN));
        let mut target = filled(device, &vec![0; LEN]);
        client.get_into("k", Target::from(&mut target)).unwrap();
        assert!(peek(rig.here(), target.region()) == pattern(3, LEN));
    }
}

/// A deadline that is shared by the steps: no step begins a wait of its own.
#[test]
fn a_put_that_waited_too_long_does_not_wait_again_to_be_sent() {
    let rig = Rig::new();
    let client = rig.client(0);
    let device = client.device();
    let (buffer, stream) = (filled(device, &vec![0x11; LEN]), held(device));
    queue_fill(device, stream, buffer.region(), 0xab);
    let limit = Duration::from_millis(200);
    let start = Instant::now();
    is_timeout(device.with_stream(stream, || client.with_deadline(limit).put("k", &buffer)));
    assert!(start.elapsed() >= limit, "it gave up before its deadline");
    assert_eq!(rig.counter("haulier_operations_total", &["op=\"put\""]), 0);
    rig.here().release(stream.raw()).unwrap();
}

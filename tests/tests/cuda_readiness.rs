//! Payloads of the CUDA backend that are not ready when they are put, on simulated drivers: the client in one process,
//! the node in another. No GPU takes part.

use std::{thread, time::Duration};

use backend_cuda::{CudaDevice, CudaStream};
use hal::{Buffer, DeviceExt};
use haulier::{Error, Payload, Put, StoreClient};
use haulier_tests::{
    cu,
    cuda::{self, CudaNode, alone, device, filled, is_pending, misplaced, on, queue_fill, sim},
    rig::eventually,
};

const PEER: &str = env!("CARGO_BIN_EXE_haulier-peer");
/// Bytes of a payload: more than what may travel inside a message.
const LEN: usize = 64 << 10;
const STALE: u8 = 0x11;

/// Runs `call` with the current stream `current`, and lets go of `producer` when the call waits.
///
/// Checks that the work was pending before the call, that nothing was stored before the producer was let go, and that the
/// work was complete when the call returned: right bytes alone can be luck.
fn released_meanwhile<R: Send>(
    device: &CudaDevice,
    (producer, current): (CudaStream, CudaStream),
    produced: u64,
    nothing_happened: impl Fn() -> bool,
    call: impl FnOnce() -> R + Send,
) -> R {
    assert!(is_pending(produced), "the work must be pending before the call");
    let before = sim().count("cuEventQuery");
    thread::scope(|scope| {
        let caller = scope.spawn(|| {
            device.with_stream(current, || {
                let answer = call();
                (answer, is_pending(produced))
            })
        });
        eventually("the call waits for its stream", || {
            sim().count("cuEventQuery") > before || caller.is_finished()
        });
        let early = caller.is_finished();
        let quiet = nothing_happened();
        cuda::release(device, producer);
        let (answer, pends) = caller.join().unwrap();
        assert!(!early, "the call returned while the work was held");
        assert!(quiet, "something was sent while the work was held");
        assert!(!pends, "the call returned before the work was complete");
        answer
    })
}

/// As the call log names a stream.
fn about(stream: CudaStream) -> String {
    format!("stream {:#x}", stream.raw())
}

fn put_all(
    client: &StoreClient<CudaDevice>,
    keys: &[String],
    buffers: &[Buffer<CudaDevice>],
    ready: bool,
) -> Vec<haulier::Result<Put>> {
    let payload = |buffer| {
        let payload = Payload::from(buffer);
        // As a client without the fourth step would: the test of this test.
        if ready { payload } else { payload.already_done() }
    };
    match buffers {
        [one] => vec![client.put(&keys[0], payload(one))],
        all => client.batch_put(keys.iter().map(String::as_str).zip(all.iter().map(payload)).collect()),
    }
}

/// Twenty puts of one payload or of eight. The producer is a stream that the current one waits for. Answers how many of
/// the twenty had the right bytes.
fn twenty_puts(node: &CudaNode, batch: bool, pends: bool, waits: bool) -> usize {
    let device = device(1);
    let client = node.client(&device);
    let (mut right, mut ours) = (0, Vec::new());
    for trial in 0..20u8 {
        let (producer, current) = (cuda::stream(&device), cuda::stream(&device));
        ours.extend([producer, current].map(about));
        let buffers: Vec<_> =
            (0..if batch { 8 } else { 1 }).map(|_| filled(&device, &vec![STALE; LEN])).collect();
        if pends {
            cuda::hold(&device, producer);
        }
        let byte = |i: usize| 0x80 + trial + i as u8;
        for (i, buffer) in buffers.iter().enumerate() {
            queue_fill(&device, producer, buffer.region(), byte(i));
        }
        let produced = cuda::event(&device, producer);
        cuda::wait_for(&device, current, produced);
        let keys: Vec<String> = (0..buffers.len()).map(|i| format!("{trial}/{i}")).collect();
        let put = || put_all(&client, &keys, &buffers, waits);
        let puts = if pends && waits {
            let nothing_stored = || client.list("").unwrap().len() == usize::from(trial) * buffers.len();
            released_meanwhile(&device, (producer, current), produced, nothing_stored, put)
        } else {
            if !pends {
                eventually("the work is done before the call", || !is_pending(produced));
            }
            let puts = device.with_stream(current, put);
            assert_eq!(is_pending(produced), pends);
            puts
        };
        assert!(puts.iter().all(|put| matches!(put, Ok(Put::Stored))), "{puts:?}");
        let is_right = |(i, key): (usize, &String)| client.get(key).unwrap() == vec![byte(i); LEN];
        right += usize::from(keys.iter().enumerate().all(is_right));
        if pends && !waits {
            cuda::release(&device, producer);
            eventually("the work is done", || !is_pending(produced));
        }
    }
    let wrong = misplaced();
    assert!(wrong.is_empty(), "{wrong:?}");
    // Staging waits for the copies on its own streams.
    let blocking = sim().calls("cuStreamSynchronize").into_iter().map(|call| call.about);
    let of_ours: Vec<_> = blocking.filter(|about| ours.contains(about)).collect();
    assert!(of_ours.is_empty(), "waits without a deadline: {of_ours:?}");
    right
}

macro_rules! matrix {
    ($($name:ident: $node:ident, $batch:expr, $pends:expr, $waits:expr, $path:expr, $right:expr;)*) => {$(
        #[test]
        fn $name() {
            alone(&[], || {
                let node = CudaNode::$node(PEER);
                assert_eq!(twenty_puts(&node, $batch, $pends, $waits), $right, "of 20 are right");
                assert_eq!(node.stored($path), if $batch { 160 } else { 20 }, "they did not go that way");
                assert!(node.calls("cuIpcOpenMemHandle_v2") > 0 || $path != "ipc", "nothing was opened");
            });
        }
    )*};
}

/// P14, P15.
mod matrix {
    use super::*;

    matrix! {
        single_pending_by_ipc: new, false, true, true, "ipc", 20;
        single_ready_by_ipc: new, false, false, true, "ipc", 20;
        batch_pending_by_ipc: new, true, true, true, "ipc", 20;
        batch_ready_by_ipc: new, true, false, true, "ipc", 20;
        single_pending_by_staging: staging, false, true, true, "staging", 20;
        single_ready_by_staging: staging, false, false, true, "staging", 20;
        batch_pending_by_staging: staging, true, true, true, "staging", 20;
        batch_ready_by_staging: staging, true, false, true, "staging", 20;
    }
}

/// The test of the test: who does not wait stores stale bytes every time.
mod without_waiting {
    use super::*;

    matrix! {
        single_pending_by_ipc: new, false, true, false, "ipc", 0;
        batch_pending_by_ipc: new, true, true, false, "ipc", 0;
        single_pending_by_staging: staging, false, true, false, "staging", 0;
        batch_pending_by_staging: staging, true, true, false, "staging", 0;
        single_ready_by_ipc: new, false, false, false, "ipc", 20;
        batch_ready_by_staging: staging, true, false, false, "staging", 20;
    }
}

fn why_not_sent(put: &haulier::Result<Put>) -> &Error {
    let Err(Error::NotSent { cause }) = put else { panic!("{put:?}") };
    cause
}

/// P14.
#[test]
fn a_failed_synchronisation_sends_nothing_and_says_so_in_every_slot() {
    alone(&[], || {
        let (node, device) = (CudaNode::new(PEER), device(0));
        let client = node.client(&device);
        for function in ["cuStreamQuery", "cuEventRecord", "cuEventQuery"] {
            let (buffer, stream) = (filled(&device, &vec![STALE; LEN]), cuda::stream(&device));
            cuda::hold(&device, stream);
            queue_fill(&device, stream, buffer.region(), 0xab);
            sim().plan_faults(&format!("{function}:1=719")).unwrap();
            let puts = device.with_stream(stream, || {
                client.batch_put(vec![
                    ("a", (&buffer).into()),
                    ("b", b"host".into()),
                    ("c", (&buffer).into()),
                ])
            });
            assert_eq!(puts.len(), 3);
            for put in &puts {
                let cause = why_not_sent(put);
                let Error::Device(e) = cause else { panic!("{cause}") };
                assert_eq!(e.vendor_code(), Some(719), "{function}: {e}");
            }
            assert_eq!(node.puts(), 0, "{function}: a request was sent");
            cuda::release(&device, stream);
        }
        assert!(client.list("").unwrap().is_empty());
    });
}

/// P14: memory of the other device among that of this one.
#[test]
fn a_failed_check_sends_nothing_and_says_so_in_every_slot() {
    alone(&[], || {
        let node = CudaNode::new(PEER);
        let (ours, theirs) = (device(0), device(1));
        let client = node.client(&ours);
        let (mine, other) = (filled(&ours, &[1; 4096]), filled(&theirs, &[2; 4096]));
        let region = other.region();
        // SAFETY: the buffer lives, and nothing is queued on it.
        let raw = unsafe { Payload::raw(region.addr, region.len) };
        sim().clear_log().unwrap();
        let puts = client.batch_put(vec![("a", (&mine).into()), ("b", raw), ("c", b"host".into())]);
        assert_eq!(puts.len(), 3);
        for put in &puts {
            assert!(matches!(why_not_sent(put), Error::DeviceMismatch { .. }), "{put:?}");
        }
        assert_eq!((node.puts(), sim().count("cuStreamQuery")), (0, 0));
        let exported = sim().calls("cuIpcGetMemHandle");
        assert!(exported.iter().all(|call| call.owner == Some(0)), "{exported:?}");
        assert!(client.list("").unwrap().is_empty());
    });
}

/// P14: an export that fails stops the batch; one that is not supported sends its item by staging.
#[test]
fn an_export_that_fails_for_one_item_sends_nothing_and_says_so_in_every_slot() {
    alone(&[], || {
        let (node, device) = (CudaNode::new(PEER), device(0));
        let client = node.client(&device);
        let buffers: Vec<_> = (0..3).map(|i| filled(&device, &vec![i; LEN])).collect();
        let items = || {
            let keys = ["0", "1", "2"].into_iter();
            keys.zip(buffers.iter().map(Payload::from)).collect()
        };
        sim().plan_faults("cuIpcGetMemHandle:2=999").unwrap();
        let puts = client.batch_put(items());
        assert_eq!(puts.len(), 3);
        for put in &puts {
            let cause = why_not_sent(put);
            assert!(matches!(cause, Error::Device(e) if e.vendor_code() == Some(999)), "{cause}");
        }
        assert_eq!(node.puts(), 0, "a request was sent");
        assert!(client.list("").unwrap().is_empty());

        sim().plan_faults("cuIpcGetMemHandle:1=801").unwrap();
        let puts = client.batch_put(items());
        assert!(puts.iter().all(|put| matches!(put, Ok(Put::Stored))), "{puts:?}");
        assert_eq!((node.stored("staging"), node.stored("ipc"), node.fell_back("device")), (1, 2, 1));
        for i in 0..3u8 {
            assert!(client.get(&i.to_string()).unwrap() == vec![i; LEN]);
        }
    });
}

/// P15: handles are made, then the node dies, then the work is done and the batch is to be sent.
#[test]
fn a_node_that_dies_between_export_and_send_leaves_no_key_and_every_slot_told() {
    alone(&[], || {
        let mut node = CudaNode::new(PEER);
        let device = device(0);
        let client = node.client(&device).with_deadline(Duration::from_secs(3));
        let stream = cuda::stream(&device);
        let buffers: Vec<_> = (0..3).map(|_| filled(&device, &vec![STALE; LEN])).collect();
        cuda::hold(&device, stream);
        for buffer in &buffers {
            queue_fill(&device, stream, buffer.region(), 0xab);
        }
        let keys = ["0", "1", "2"];
        let items = || keys.into_iter().zip(buffers.iter().map(Payload::from)).collect();
        let puts = thread::scope(|scope| {
            let caller = scope.spawn(|| device.with_stream(stream, || client.batch_put(items())));
            eventually("the batch waits", || sim().count("cuEventQuery") > 0 || caller.is_finished());
            assert_eq!(sim().count("cuIpcGetMemHandle"), 3, "the handles are made first");
            node.kill();
            cuda::release(&device, stream);
            caller.join().unwrap()
        });
        assert_eq!(puts.len(), 3);
        for put in &puts {
            assert!(matches!(put, Err(Error::Unreachable { .. } | Error::Timeout { .. })), "{put:?}");
        }
        node.start();
        // P09: the client finds the new node by itself.
        assert!(client.list("").unwrap().is_empty(), "a key of the batch is there");
        let puts = device.with_stream(stream, || client.batch_put(items()));
        assert!(puts.iter().all(|put| matches!(put, Ok(Put::Stored))), "{puts:?}");
        assert!(keys.iter().all(|key| client.get(key).unwrap() == vec![0xab; LEN]));
        assert_eq!(node.stored("ipc"), 3);
    });
}

/// P14. Eight payloads that wait for two streams.
#[test]
fn two_streams_over_eight_payloads_are_waited_for_once_each() {
    alone(&[], || {
        let (node, device) = (CudaNode::new(PEER), device(0));
        let client = node.client(&device);
        for pends in [false, true] {
            let streams = [cuda::stream(&device), cuda::stream(&device)];
            let buffers: Vec<_> = (0..8u8).map(|i| filled(&device, &vec![i; LEN])).collect();
            for stream in streams.iter().filter(|_| pends) {
                cuda::hold(&device, *stream);
            }
            for (i, buffer) in buffers.iter().enumerate() {
                queue_fill(&device, streams[i % 2], buffer.region(), 0xa0 + i as u8);
            }
            if !pends {
                let left = |s: CudaStream| on(&device, || sim().pending(s.raw() as u64)).unwrap();
                eventually("the work is done", || streams.iter().all(|s| left(*s) == 0));
            }
            sim().clear_log().unwrap();
            let keys: Vec<String> = (0..8).map(|i| i.to_string()).collect();
            let items = || {
                let payloads =
                    buffers.iter().enumerate().map(|(i, b)| Payload::from(b).after(&[streams[i % 2]]));
                keys.iter().map(String::as_str).zip(payloads).collect()
            };
            let puts = thread::scope(|scope| {
                let caller = scope.spawn(|| client.batch_upsert(items()));
                for (i, stream) in streams.iter().enumerate().filter(|_| pends) {
                    eventually("the batch waits for the stream", || {
                        sim().count("cuEventRecord") > i as u64 || caller.is_finished()
                    });
                    cuda::release(&device, *stream);
                }
                caller.join().unwrap()
            });
            assert!(puts.iter().all(Result::is_ok), "{puts:?}");
            // A question to each, and one wait for each where the answer was "not yet", which begins with a question.
            let calls = |function: &str| {
                let calls = sim().calls(function).into_iter();
                calls.map(|call| call.about).collect::<Vec<_>>()
            };
            let names = streams.map(about);
            let [first, second] = names;
            let (mut of_first, mut of_second) = (vec![first], vec![second]);
            if pends {
                of_first.extend(of_first.clone());
                of_second.extend(of_second.clone());
            }
            assert_eq!(calls("cuStreamQuery"), [of_first, of_second].concat());
            let waits = sim().count("cuEventRecord");
            assert_eq!(waits, if pends { 2 } else { 0 }, "{:?}", calls("cuEventRecord"));
            for function in ["cuCtxSynchronize", "cuStreamSynchronize", "cuEventSynchronize"] {
                assert_eq!(sim().count(function), 0, "{function}");
            }
            for (i, key) in keys.iter().enumerate() {
                assert!(client.get(key).unwrap() == vec![0xa0 + i as u8; LEN]);
            }
        }
    });
}

/// P24: what DLPack's stream numbers ask for, and what they are here.
#[test]
fn each_stream_number_of_dlpack_is_waited_for_or_not() {
    alone(&[], || {
        let (node, device) = (CudaNode::new(PEER), device(0));
        let client = node.client(&device);
        let buffer = filled(&device, &vec![STALE; LEN]);
        let named = cuda::stream(&device);
        // SAFETY: the stream is not destroyed.
        let raw = |raw| unsafe { CudaStream::from_raw(raw) };
        let waited = |payload: Payload<'_, CudaDevice>| {
            sim().clear_log().unwrap();
            client.upsert("k", payload).unwrap();
            sim().calls("cuStreamQuery").into_iter().map(|call| call.about).collect::<Vec<_>>()
        };
        // None: the legacy default stream, which is what is current where nothing was said.
        assert_eq!(waited(Payload::from(&buffer)), ["stream 0x0"]);
        assert_eq!(waited(Payload::from(&buffer).after(&[CudaStream::LEGACY])), ["stream 0x1"]);
        assert_eq!(waited(Payload::from(&buffer).after(&[raw(2)])), ["stream 0x2"]);
        assert_eq!(waited(Payload::from(&buffer).after(&[named])), [about(named)]);
        // -1: no synchronisation.
        assert!(waited(Payload::from(&buffer).already_done()).is_empty());

        // The legacy stream waits for what a blocking stream does, and so does the put.
        let mut blocking = 0usize;
        on(&device, || assert_eq!(cu!(cuStreamCreate(&mut blocking => *mut usize, 0 => u32)), 0));
        let blocking = raw(blocking);
        for current in [CudaStream::DEFAULT, CudaStream::LEGACY] {
            sim().poke(buffer.region().addr as u64, &vec![STALE; LEN]).unwrap();
            cuda::hold(&device, blocking);
            queue_fill(&device, blocking, buffer.region(), 0xab);
            let produced = cuda::event(&device, blocking);
            let streams = (blocking, current);
            released_meanwhile(&device, streams, produced, || true, || client.upsert("k", &buffer)).unwrap();
            assert!(client.get("k").unwrap() == vec![0xab; LEN]);
        }
    });
}

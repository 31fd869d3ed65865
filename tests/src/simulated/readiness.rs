//! Payloads that are not ready when they are put, on simulated drivers: what is sent when a step before sending fails, and
//! how often a stream is waited for. That the bytes are right is the matrix of [`proof`](crate::proof::readiness).
//!
//! Each function is a test's body, for a process of its own; `program` is `haulier-peer`, where the node is.

use std::{thread, time::Duration};

use hal::{Buffer, Device, DeviceExt};
use haulier::{Error, Payload, Put};

use super::{SimNode, Simulated, filled, hold, misplaced, pending, queue_fill, release};
use crate::rig::eventually;

/// Bytes of a payload: more than what may travel inside a message.
const LEN: usize = 64 << 10;
const STALE: u8 = 0x11;

/// As the call log names a stream.
pub fn about<S: Simulated>(stream: <S::Device as Device>::Stream) -> String {
    format!("stream {:#x}", S::raw(stream))
}

fn why_not_sent(put: &haulier::Result<Put>) -> &Error {
    let Err(Error::NotSent { cause }) = put else { panic!("{put:?}") };
    cause
}

fn vendor_code(error: &Error) -> Option<i64> {
    let Error::Device(e) = error else { panic!("{error}") };
    e.vendor_code()
}

/// P14.
///
/// # Panics
/// Where it fails; here and below.
pub fn a_failed_synchronisation<S: Simulated>(program: &'static str) {
    let (node, device) = (SimNode::<S>::new(program), S::device(0));
    let client = node.client(&device);
    for function in S::WAITS {
        let (buffer, stream) = (filled::<S>(&device, &vec![STALE; LEN]), S::stream(&device));
        hold::<S>(&device, stream);
        queue_fill::<S>(&device, stream, buffer.region(), 0xab);
        S::sim().plan_faults(&format!("{function}:1={}", S::FAULT)).expect("it is a plan");
        let puts = device.with_stream(stream, || {
            client.batch_put(vec![("a", (&buffer).into()), ("b", b"host".into()), ("c", (&buffer).into())])
        });
        assert_eq!(puts.len(), 3);
        for put in &puts {
            let cause = why_not_sent(put);
            assert_eq!(vendor_code(cause), Some(S::FAULT.into()), "{function}: {cause}");
        }
        assert_eq!(node.puts(), 0, "{function}: a request was sent");
        release::<S>(&device, stream);
    }
    assert!(client.list("").expect("the node serves").is_empty());
}

/// P14: memory of the other device among that of this one.
///
/// # Panics
/// As above.
pub fn a_failed_check<S: Simulated>(program: &'static str) {
    let node = SimNode::<S>::new(program);
    let (ours, theirs) = (S::device(0), S::device(1));
    let client = node.client(&ours);
    let (mine, other) = (filled::<S>(&ours, &[1; 4096]), filled::<S>(&theirs, &[2; 4096]));
    let region = other.region();
    // SAFETY: the buffer lives, and nothing is queued on it.
    let raw = unsafe { Payload::raw(region.addr, region.len) };
    S::sim().clear_log().expect("the log can be cleared");
    let puts = client.batch_put(vec![("a", (&mine).into()), ("b", raw), ("c", b"host".into())]);
    assert_eq!(puts.len(), 3);
    for put in &puts {
        assert!(matches!(why_not_sent(put), Error::DeviceMismatch { .. }), "{put:?}");
    }
    assert_eq!(node.puts(), 0);
    for (function, _) in S::ASKS {
        assert_eq!(S::sim().count(function), 0, "{function}");
    }
    let exported = S::sim().calls(S::EXPORT);
    assert!(exported.iter().all(|call| call.owner == Some(0)), "{exported:?}");
    assert!(client.list("").expect("the node serves").is_empty());
}

/// P14: an export that fails stops the batch; one that is not supported sends its item by staging.
///
/// # Panics
/// As above.
pub fn an_export_that_fails_for_one_item<S: Simulated>(program: &'static str) {
    let (node, device) = (SimNode::<S>::new(program), S::device(0));
    let client = node.client(&device);
    let fresh = || (0..3).map(|i| filled::<S>(&device, &vec![i; LEN])).collect::<Vec<_>>();
    let put = |buffers: &[Buffer<S::Device>]| {
        let keys = ["0", "1", "2"].into_iter();
        client.batch_put(keys.zip(buffers.iter().map(Payload::from)).collect())
    };
    S::sim().plan_faults(&format!("{}:2={}", S::EXPORT, S::FAULT)).expect("it is a plan");
    let puts = put(&fresh());
    assert_eq!(puts.len(), 3);
    for put in &puts {
        let cause = why_not_sent(put);
        assert_eq!(vendor_code(cause), Some(S::FAULT.into()), "{cause}");
    }
    assert_eq!(node.puts(), 0, "a request was sent");
    assert!(client.list("").expect("the node serves").is_empty());

    S::sim().plan_faults(&format!("{}:1={}", S::EXPORT, S::NOT_SUPPORTED)).expect("it is a plan");
    let puts = put(&fresh());
    assert!(puts.iter().all(|put| matches!(put, Ok(Put::Stored))), "{puts:?}");
    assert_eq!((node.stored("staging"), node.stored("ipc"), node.fell_back("device")), (1, 2, 1));
    for i in 0..3u8 {
        assert!(client.get(&i.to_string()).expect("it is stored") == vec![i; LEN]);
    }
}

/// P15: handles are made, then the node dies, then the work is done and the batch is to be sent.
///
/// # Panics
/// As above.
pub fn a_node_that_dies_between_export_and_send<S: Simulated>(program: &'static str) {
    let mut node = SimNode::<S>::new(program);
    let device = S::device(0);
    let client = node.client(&device).with_deadline(Duration::from_secs(3));
    let stream = S::stream(&device);
    let buffers: Vec<_> = (0..3).map(|_| filled::<S>(&device, &vec![STALE; LEN])).collect();
    hold::<S>(&device, stream);
    for buffer in &buffers {
        queue_fill::<S>(&device, stream, buffer.region(), 0xab);
    }
    let keys = ["0", "1", "2"];
    let items = || keys.into_iter().zip(buffers.iter().map(Payload::from)).collect();
    let puts = thread::scope(|scope| {
        let caller = scope.spawn(|| device.with_stream(stream, || client.batch_put(items())));
        eventually("the batch waits", || S::sim().count(S::WAITING) > 0 || caller.is_finished());
        assert_eq!(S::sim().count(S::EXPORT), 3, "the handles are made first");
        node.kill();
        release::<S>(&device, stream);
        caller.join().expect("it does not panic")
    });
    assert_eq!(puts.len(), 3);
    for put in &puts {
        assert!(matches!(put, Err(Error::Unreachable { .. } | Error::Timeout { .. })), "{put:?}");
    }
    node.start();
    // P09: the client finds the new node by itself, from whatever thread.
    let restarted = thread::scope(|scope| scope.spawn(|| client.list("")).join().expect("it does not panic"));
    assert!(restarted.expect("the node serves").is_empty(), "a key of the batch is there");
    let puts = device.with_stream(stream, || client.batch_put(items()));
    assert!(puts.iter().all(|put| matches!(put, Ok(Put::Stored))), "{puts:?}");
    assert!(keys.iter().all(|key| client.get(key).expect("it is stored") == vec![0xab; LEN]));
    assert_eq!(node.stored("ipc"), 3);
    let wrong = misplaced::<S>(S::sim().log());
    assert!(wrong.is_empty(), "{wrong:?}");
}

/// P14. Eight payloads that wait for two streams: each of those is waited for once, and within the deadline.
///
/// # Panics
/// As above.
pub fn two_streams_over_eight_payloads<S: Simulated>(program: &'static str) {
    let (node, device) = (SimNode::<S>::new(program), S::device(0));
    let client = node.client(&device);
    for pends in [false, true] {
        let streams = [S::stream(&device), S::stream(&device)];
        let buffers: Vec<_> = (0..8u8).map(|i| filled::<S>(&device, &vec![i; LEN])).collect();
        for &stream in streams.iter().filter(|_| pends) {
            hold::<S>(&device, stream);
        }
        for (i, buffer) in buffers.iter().enumerate() {
            queue_fill::<S>(&device, streams[i % 2], buffer.region(), 0xa0 + i as u8);
        }
        if !pends {
            eventually("the work is done", || {
                streams.iter().all(|&stream| pending::<S>(&device, stream) == 0)
            });
        }
        S::sim().clear_log().expect("the log can be cleared");
        let keys: Vec<String> = (0..8).map(|i| i.to_string()).collect();
        let items = || {
            let payloads = buffers.iter().enumerate().map(|(i, b)| Payload::from(b).after(&[streams[i % 2]]));
            keys.iter().map(String::as_str).zip(payloads).collect()
        };
        let puts = thread::scope(|scope| {
            let caller = scope.spawn(|| client.batch_upsert(items()));
            for (i, &stream) in streams.iter().enumerate().filter(|_| pends) {
                eventually("the batch waits for the stream", || {
                    S::sim().count(S::WAITING) > i as u64 || caller.is_finished()
                });
                release::<S>(&device, stream);
            }
            caller.join().expect("it does not panic")
        });
        assert!(puts.iter().all(Result::is_ok), "{puts:?}");
        for (function, times) in S::ASKS {
            let times = times[usize::from(pends)];
            let calls = S::sim().calls(function);
            for stream in streams {
                let of_this = calls.iter().filter(|call| call.about == about::<S>(stream)).count();
                assert_eq!(of_this as u64, times, "{function}: {calls:#?}");
            }
            assert_eq!(calls.len() as u64, 2 * times, "{function}: {calls:#?}");
        }
        for function in S::UNBOUNDED.iter().chain(S::NEVER) {
            let of_ours =
                |call: &haulier_sim::log::Call| streams.iter().any(|&s| call.about == about::<S>(s));
            let calls = S::sim().calls(function);
            assert!(!calls.iter().any(of_ours), "{function}: {calls:#?}");
        }
        for (i, key) in keys.iter().enumerate() {
            assert!(client.get(key).expect("it is stored") == vec![0xa0 + i as u8; LEN]);
        }
    }
}

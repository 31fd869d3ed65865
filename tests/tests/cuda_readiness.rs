//! Payloads of the CUDA backend that are not ready when they are put, on simulated drivers: the client in one process,
//! the node in another. No GPU takes part.

use std::thread;

use backend_cuda::{CudaDevice, CudaStream};
use hal::DeviceExt;
use haulier::Payload;
use haulier_tests::{
    cu,
    cuda::{self, CudaNode, Driver, alone, device, filled, is_pending, misplaced, on, queue_fill, sim},
    proof::Cuda,
    rig::eventually,
    simulated::readiness,
};

const PEER: &str = env!("CARGO_BIN_EXE_haulier-peer");
/// Bytes of a payload: more than what may travel inside a message.
const LEN: usize = 64 << 10;
const STALE: u8 = 0x11;

haulier_tests::readiness_matrix!(Cuda, alone, || {
    let wrong = misplaced();
    assert!(wrong.is_empty(), "{wrong:?}");
});

#[test]
fn a_failed_synchronisation_sends_nothing_and_says_so_in_every_slot() {
    alone(&[], || readiness::a_failed_synchronisation::<Driver>(PEER));
}

#[test]
fn a_failed_check_sends_nothing_and_says_so_in_every_slot() {
    alone(&[], || readiness::a_failed_check::<Driver>(PEER));
}

#[test]
fn an_export_that_fails_for_one_item_sends_nothing_and_says_so_in_every_slot() {
    alone(&[], || readiness::an_export_that_fails_for_one_item::<Driver>(PEER));
}

#[test]
fn a_node_that_dies_between_export_and_send_leaves_no_key_and_every_slot_told() {
    alone(&[], || readiness::a_node_that_dies_between_export_and_send::<Driver>(PEER));
}

#[test]
fn two_streams_over_eight_payloads_are_waited_for_once_each() {
    alone(&[], || readiness::two_streams_over_eight_payloads::<Driver>(PEER));
}

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

//! A client on the device, over each engine.

use std::{sync::mpsc, thread, time::Duration};

use hal::{Deadline, Device, DeviceExt};
use haulier::{
    Dtype, Error, Options, Payload, Put, StoreClient, Target, TensorMut, TensorRef,
    node::{Node, NodeConfig},
    store::{Config, Store},
};
use tempfile::TempDir;

use super::{Case, patient, pattern, read, write};
use crate::fixture::{Fixture, Need};

/// The sizes at which paths change.
const SIZES: [usize; 6] = [0, 1, 4095, 4096, 4097, (1 << 20) + 1];

/// A store, and a client of it on the device.
struct Shop<D: Device> {
    client: StoreClient<D>,
    _node: Option<(Node, TempDir)>,
}

impl<D: Device> Shop<D> {
    fn store() -> Store {
        Store::open(Config::new(32 << 20), |_, _| {}).expect("32 MiB can be had")
    }

    fn in_process(f: &dyn Fixture<D>) -> Self {
        let client = StoreClient::in_process(f.device().clone(), Self::store(), Options::default());
        Shop { client: client.unwrap(), _node: None }
    }

    fn node(f: &dyn Fixture<D>) -> Self {
        let dir = tempfile::tempdir().expect("a private directory");
        let config = NodeConfig {
            socket: dir.path().join("private/node.sock"),
            store: Self::store(),
            devices: vec![f.device().clone()],
            metrics: None,
            clients_max: 8,
        };
        let node = Node::start(config).unwrap();
        let client = StoreClient::connect(f.device().clone(), node.socket(), Options::default()).unwrap();
        Shop { client, _node: Some((node, dir)) }
    }
}

macro_rules! over_each_engine {
    ($($case:ident $([$($need:ident),*])?),* $(,)?) => {
        /// The cases of this group, over each engine.
        pub fn cases<D: Device>() -> Vec<Case<D>> {
            vec![$(
                Case {
                    name: concat!("store::in_process::", stringify!($case)).into(),
                    needs: &[$($(Need::$need),*)?],
                    run: |f| $case(f, &Shop::in_process(f).client),
                },
                Case {
                    name: concat!("store::node::", stringify!($case)).into(),
                    needs: &[$($(Need::$need),*)?],
                    run: |f| $case(f, &Shop::node(f).client),
                },
            )*]
        }
    };
}

over_each_engine! {
    device_buffers_round_trip_at_every_size,
    host_slices_round_trip_at_every_size,
    a_view_shows_a_device_buffers_bytes,
    a_batch_answers_each_slot_in_order,
    regions_inside_one_allocation_are_told_apart,
    a_tensor_comes_back_with_dtype_and_shape,
    memory_inside_the_store_reaches_the_device,
    a_short_target_is_left_as_it_was,
    a_put_stores_what_queued_work_writes,
    a_get_into_waits_for_queued_work_on_its_target,
    work_queued_after_a_get_into_finds_the_bytes,
    a_failed_synchronisation_sends_nothing [QueuedFailure],
    a_put_that_waits_past_its_deadline_stores_nothing,
    memory_of_another_device_sends_nothing [SecondDevice],
    a_capturing_stream_sends_nothing [Capture],
}

fn put_device<D: Device>(f: &dyn Fixture<D>, client: &StoreClient<D>, key: &str, bytes: &[u8]) {
    let put = match bytes.len() {
        // An empty tensor has no memory.
        0 => client.put(key, bytes),
        len => {
            let buffer = f.device().buffer(len).unwrap();
            write(&f.device().bind_current().unwrap(), buffer.region(), bytes);
            client.put(key, &buffer)
        }
    };
    assert_eq!(put.unwrap(), Put::Stored);
}

fn device_buffers_round_trip_at_every_size<D: Device>(f: &dyn Fixture<D>, client: &StoreClient<D>) {
    for (i, len) in SIZES.into_iter().enumerate() {
        let (key, bytes) = (format!("{len}"), pattern(i as u8, len));
        put_device(f, client, &key, &bytes);
        assert!(client.get(&key).unwrap() == bytes, "{len} bytes differ");
        // One byte more than the value, so that writing past its end shows.
        let mut target = f.device().buffer(len + 1).unwrap();
        let bound = f.device().bind_current().unwrap();
        write(&bound, target.region(), &vec![0xee; len + 1]);
        drop(bound);
        assert_eq!(client.get_into(&key, &mut target).unwrap(), len as u64);
        let bound = f.device().bind_current().unwrap();
        assert!(read(&bound, target.region()) == [&bytes[..], &[0xee]].concat(), "{len} bytes differ");
    }
}

fn host_slices_round_trip_at_every_size<D: Device>(_: &dyn Fixture<D>, client: &StoreClient<D>) {
    for (i, len) in SIZES.into_iter().enumerate() {
        let (key, bytes) = (format!("{len}"), pattern(i as u8, len));
        assert_eq!(client.put(&key, &bytes).unwrap(), Put::Stored);
        let mut target = vec![0xee; len + 1];
        assert_eq!(client.get_into(&key, &mut target).unwrap(), len as u64);
        assert!(target == [&bytes[..], &[0xee]].concat(), "{len} bytes differ");
        assert_eq!(client.size(&key).unwrap(), len as u64);
    }
}

fn a_view_shows_a_device_buffers_bytes<D: Device>(f: &dyn Fixture<D>, client: &StoreClient<D>) {
    for (i, len) in SIZES.into_iter().enumerate() {
        let (key, bytes) = (format!("{len}"), pattern(i as u8, len));
        put_device(f, client, &key, &bytes);
        let view = client.view(&key).unwrap();
        assert!(client.remove(&key).unwrap());
        assert!(view[..] == bytes, "{len} bytes differ");
    }
}

fn a_batch_answers_each_slot_in_order<D: Device>(f: &dyn Fixture<D>, client: &StoreClient<D>) {
    let device = f.device();
    let buffers: Vec<_> = (0..4u8)
        .map(|i| {
            let buffer = device.buffer(4096).unwrap();
            write(&device.bind_current().unwrap(), buffer.region(), &pattern(i, 4096));
            buffer
        })
        .collect();
    client.put("there", b"kept").unwrap();
    let long = "k".repeat(haulier::KEY_MAX + 1);
    let puts = client.batch_put(vec![
        ("a", (&buffers[0]).into()),
        ("there", (&buffers[1]).into()),
        (&long, (&buffers[2]).into()),
        ("b", (&buffers[3]).into()),
        ("empty", b"".into()),
    ]);
    assert!(
        matches!(
            puts[..],
            [
                Ok(Put::Stored),
                Ok(Put::AlreadyExists),
                Err(Error::InvalidKey { .. }),
                Ok(Put::Stored),
                Ok(Put::Stored)
            ]
        ),
        "{puts:?}"
    );
    let mut targets: Vec<_> = (0..5).map(|_| device.buffer(4096).unwrap()).collect();
    let keys = ["a", "b", "absent", "a", "empty"];
    let gets = client.batch_get_into(keys.into_iter().zip(targets.iter_mut().map(Target::from)).collect());
    assert!(matches!(gets[..], [Ok(4096), Ok(4096), Err(Error::NotFound), Ok(4096), Ok(0)]), "{gets:?}");
    let bound = device.bind_current().unwrap();
    for (slot, seed) in [(0, 0), (1, 3), (3, 0)] {
        assert!(read(&bound, targets[slot].region()) == pattern(seed, 4096), "slot {slot}");
    }
    assert_eq!(client.get("there").unwrap(), b"kept");
}

fn regions_inside_one_allocation_are_told_apart<D: Device>(f: &dyn Fixture<D>, client: &StoreClient<D>) {
    let device = f.device();
    let bytes = pattern(9, 3 << 18);
    let whole = device.buffer(bytes.len()).unwrap();
    write(&device.bind_current().unwrap(), whole.region(), &bytes);
    let parts = [(0, 1 << 18), (1 << 18, 4097), ((1 << 18) + 4097, 1), (bytes.len() - 100, 100)];
    let keys: Vec<String> = parts.iter().map(|(offset, _)| offset.to_string()).collect();
    let part = |&(offset, len)| Payload::part(&whole, offset, len).unwrap();
    let puts = client.batch_put(keys.iter().map(String::as_str).zip(parts.iter().map(part)).collect());
    assert!(puts.iter().all(|put| matches!(put, Ok(Put::Stored))), "{puts:?}");
    for (key, (offset, len)) in keys.iter().zip(parts) {
        assert!(client.get(key).unwrap() == bytes[offset..offset + len], "{offset}+{len}");
    }
    let mut target = device.buffer(8192).unwrap();
    write(&device.bind_current().unwrap(), target.region(), &[0xee; 8192]);
    let middle = Target::part(&mut target, 100, 5000).unwrap();
    assert_eq!(client.get_into(&keys[1], middle).unwrap(), 4097);
    let filled = read(&device.bind_current().unwrap(), target.region());
    assert!(filled[100..4197] == bytes[1 << 18..][..4097]);
    assert!(filled[..100].iter().chain(&filled[4197..]).all(|byte| *byte == 0xee));
}

fn a_tensor_comes_back_with_dtype_and_shape<D: Device>(f: &dyn Fixture<D>, client: &StoreClient<D>) {
    let device = f.device();
    let (shape, bytes) = ([3, 5, 7], pattern(4, 210));
    let buffer = device.buffer(210).unwrap();
    write(&device.bind_current().unwrap(), buffer.region(), &bytes);
    let tensor = TensorRef::new(Dtype::BF16, &shape, &buffer).unwrap();
    assert_eq!(client.put_tensor("t", &tensor).unwrap(), Put::Stored);
    let back = client.get_tensor("t").unwrap();
    assert_eq!((back.spec.dtype, &back.spec.shape[..], back.bytes), (Dtype::BF16, &shape[..], bytes.clone()));
    let mut target = device.buffer(210).unwrap();
    client.get_tensor_into("t", TensorMut::new(Dtype::BF16, &shape, &mut target).unwrap()).unwrap();
    assert_eq!(read(&device.bind_current().unwrap(), target.region()), bytes);
    let other = TensorMut::new(Dtype::F16, &shape, &mut target).unwrap();
    assert!(matches!(client.get_tensor_into("t", other), Err(Error::InvalidTensor { .. })));
}

fn memory_inside_the_store_reaches_the_device<D: Device>(f: &dyn Fixture<D>, client: &StoreClient<D>) {
    let bytes = pattern(6, 100_000);
    let mut buffer = client.alloc(100_000).unwrap();
    buffer.copy_from_slice(&bytes);
    assert_eq!(client.put_allocated("a", buffer).unwrap(), Put::Stored);
    let mut target = f.device().buffer(100_000).unwrap();
    client.get_into("a", &mut target).unwrap();
    assert!(read(&f.device().bind_current().unwrap(), target.region()) == bytes);
}

fn a_short_target_is_left_as_it_was<D: Device>(f: &dyn Fixture<D>, client: &StoreClient<D>) {
    client.put("v", &[1; 4096]).unwrap();
    let mut target = f.device().buffer(4095).unwrap();
    write(&f.device().bind_current().unwrap(), target.region(), &[0xee; 4095]);
    assert!(matches!(client.get_into("v", &mut target), Err(Error::TooSmall { need: 4096 })));
    assert_eq!(read(&f.device().bind_current().unwrap(), target.region()), [0xee; 4095]);
}

/// Runs `call` on a thread whose current stream is `stream`, lets go of the stream once the call is under way, and
/// answers with what the call said and whether the stream was done when it returned.
fn while_held<D: Device, R: Send>(
    f: &dyn Fixture<D>,
    stream: D::Stream,
    call: impl FnOnce() -> R + Send,
) -> (R, bool) {
    let is_done = || f.device().bind_current().unwrap().sync_stream(stream, Deadline::passed()).is_ok();
    assert!(!is_done(), "the work must be pending before the call");
    thread::scope(|scope| {
        let (about, begun) = mpsc::channel();
        let caller = scope.spawn(move || {
            f.enter();
            f.device().with_stream(stream, || {
                about.send(()).unwrap();
                let answer = call();
                (answer, is_done())
            })
        });
        begun.recv().unwrap();
        // A call that does not wait has time to return.
        let early = (0..50).any(|_| {
            thread::sleep(Duration::from_millis(1));
            caller.is_finished()
        });
        f.release(stream);
        let answer = caller.join().unwrap();
        assert!(!early, "the call returned while the work was held");
        answer
    })
}

fn a_put_stores_what_queued_work_writes<D: Device>(f: &dyn Fixture<D>, client: &StoreClient<D>) {
    let (buffer, stream) = (f.device().buffer(65_536).unwrap(), f.stream());
    write(&f.device().bind_current().unwrap(), buffer.region(), &[0x11; 65_536]);
    f.hold(stream);
    f.queue_fill(stream, buffer.region(), 0xab);
    let (put, done) = while_held(f, stream, || client.put("k", &buffer));
    assert_eq!(put.unwrap(), Put::Stored);
    assert!(done, "the put returned before the work was done");
    assert!(client.get("k").unwrap() == vec![0xab; 65_536], "stale bytes");
}

fn a_get_into_waits_for_queued_work_on_its_target<D: Device>(f: &dyn Fixture<D>, client: &StoreClient<D>) {
    let (mut buffer, stream) = (f.device().buffer(65_536).unwrap(), f.stream());
    let bytes = pattern(2, 65_536);
    client.put("k", &bytes).unwrap();
    f.hold(stream);
    f.queue_fill(stream, buffer.region(), 0xab);
    let region = buffer.region();
    let (got, done) = while_held(f, stream, || client.get_into("k", &mut buffer));
    assert_eq!(got.unwrap(), 65_536);
    assert!(done, "the get returned before the work was done");
    assert!(read(&f.device().bind_current().unwrap(), region) == bytes, "queued work overwrote the value");
}

fn work_queued_after_a_get_into_finds_the_bytes<D: Device>(f: &dyn Fixture<D>, client: &StoreClient<D>) {
    let (mut buffer, stream) = (f.device().buffer(8192).unwrap(), f.stream());
    client.put("k", &[5; 8192]).unwrap();
    f.device().with_stream(stream, || client.get_into("k", &mut buffer)).unwrap();
    f.queue_fill(stream, buffer.region().part(0, 4096).unwrap(), 6);
    let bound = f.device().bind_current().unwrap();
    bound.sync_stream(stream, patient()).unwrap();
    assert!(read(&bound, buffer.region()) == [[6; 4096], [5; 4096]].concat());
}

fn all_not_sent(puts: &[haulier::Result<Put>], is: impl Fn(&Error) -> bool) {
    for put in puts {
        match put {
            Err(Error::NotSent { cause }) if is(cause) => {}
            other => panic!("{other:?}"),
        }
    }
}

fn a_failed_synchronisation_sends_nothing<D: Device>(f: &dyn Fixture<D>, client: &StoreClient<D>) {
    let (buffer, stream) = (f.device().buffer(64).unwrap(), f.stream());
    f.queue_failure(stream);
    let puts = f
        .device()
        .with_stream(stream, || client.batch_put(vec![("host", b"x".into()), ("device", (&buffer).into())]));
    all_not_sent(&puts, |cause| matches!(cause, Error::Device(e) if e.kind() == hal::Kind::Driver));
    assert!(!client.exists("host").unwrap() && !client.exists("device").unwrap());
}

fn a_put_that_waits_past_its_deadline_stores_nothing<D: Device>(f: &dyn Fixture<D>, client: &StoreClient<D>) {
    let (buffer, stream) = (f.device().buffer(64).unwrap(), f.stream());
    f.hold(stream);
    f.queue_fill(stream, buffer.region(), 1);
    let hasty = client.with_deadline(Duration::from_millis(50));
    let puts = f.device().with_stream(stream, || hasty.batch_put(vec![("k", (&buffer).into())]));
    all_not_sent(&puts, |cause| matches!(cause, Error::Timeout { .. }));
    f.release(stream);
    f.device().bind_current().unwrap().sync_stream(stream, patient()).unwrap();
    assert!(!client.exists("k").unwrap(), "it was stored after all");
    // The client goes on.
    assert_eq!(f.device().with_stream(stream, || client.put("k", &buffer)).unwrap(), Put::Stored);
}

fn memory_of_another_device_sends_nothing<D: Device>(f: &dyn Fixture<D>, client: &StoreClient<D>) {
    let theirs = f.second().buffer(64).unwrap();
    let ours = f.device().buffer(64).unwrap();
    let region = theirs.region();
    // SAFETY: the memory is allocated until the end of the function, and nothing is queued on it.
    let foreign = || unsafe { Payload::raw(region.addr, region.len) };
    let puts = client.batch_put(vec![("ours", (&ours).into()), ("theirs", foreign())]);
    all_not_sent(&puts, |cause| matches!(cause, Error::DeviceMismatch { .. }));
    assert!(!client.exists("ours").unwrap() && !client.exists("theirs").unwrap());
    // SAFETY: as above.
    let target = unsafe { Target::raw(region.addr, region.len) };
    client.put("v", &[1; 64]).unwrap();
    match client.get_into("v", target) {
        Err(Error::NotSent { cause }) => assert!(matches!(*cause, Error::DeviceMismatch { .. })),
        other => panic!("{other:?}"),
    }
}

fn a_capturing_stream_sends_nothing<D: Device>(f: &dyn Fixture<D>, client: &StoreClient<D>) {
    let (mut buffer, stream) = (f.device().buffer(64).unwrap(), f.stream());
    client.put("v", &[1; 64]).unwrap();
    f.begin_capture(stream);
    f.device().with_stream(stream, || {
        let puts = client.batch_put(vec![("host", b"x".into()), ("device", (&buffer).into())]);
        all_not_sent(&puts, |cause| matches!(cause, Error::StreamCapturing));
        match client.get_into("v", &mut buffer) {
            Err(Error::NotSent { cause }) => assert!(matches!(*cause, Error::StreamCapturing)),
            other => panic!("{other:?}"),
        }
    });
    assert!(f.end_capture(stream), "the refusal came too late: the capture is spoiled");
    assert!(!client.exists("host").unwrap() && !client.exists("device").unwrap());
}

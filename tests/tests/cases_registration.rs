//! Cases of registered memory, on strict machines. Each names its row of the field's reports.

use std::{
    collections::HashMap,
    thread,
    time::{Duration, Instant},
};

use backend_cpu::strict::{Op, StrictDevice};
use hal::{Buffer, Kind};
use haulier::{Error, Payload, Put, Registered, StoreClient};
use haulier_tests::{
    conformance::pattern,
    rig::{Rig, eventually, every_call_had_its_device, filled, machine, on_a_bound_thread, peek},
};

/// More than what may travel inside a message.
const LEN: usize = 64 << 10;
/// What a call that is given up after 200 ms certainly does not take.
const PATIENCE: Duration = Duration::from_secs(20);

/// P40. Memory that the store did not make, of every kind that an application has.
#[test]
fn host_memory_from_anywhere_is_registered_put_and_filled() {
    let rig = Rig::new();
    let client = rig.client(0);
    let heap = pattern(1, 3 << 20);
    let stack: [u8; 777] = pattern(2, 777).try_into().unwrap();
    static CONSTANT: [u8; 4096] = [0x3c; 4096];
    for (key, bytes) in
        [("heap", &heap[..]), ("stack", &stack), ("static", &CONSTANT), ("odd", &heap[1..4098])]
    {
        let registered = client.register_buffer(bytes).unwrap();
        assert_eq!(client.put(key, bytes).unwrap(), Put::Stored);
        let mut target = vec![0; bytes.len()];
        assert_eq!(client.get_into(key, &mut target).unwrap(), bytes.len() as u64);
        assert!(target == bytes, "{key}");
        drop(registered);
    }
    assert_eq!(rig.here().registrations(), 0);
    assert_eq!(rig.fell_back("host_memory"), 4);
}

/// P41. The driver answers with an error when it is asked about memory that it did not allocate.
#[test]
fn host_memory_that_the_driver_refuses_to_know_is_registered_and_put() {
    let rig = Rig::with(machine(2).foreign_pointers_fail(), machine(2));
    let client = rig.client(0);
    let bytes = pattern(1, LEN);
    assert_eq!(client.put("before", &bytes).unwrap(), Put::Stored);
    let registered = client.register_buffer(&bytes).unwrap();
    assert_eq!(rig.here().registrations(), 1);
    assert_eq!(client.put("k", &bytes).unwrap(), Put::Stored);
    let mut target = vec![0; LEN];
    client.get_into("k", &mut target).unwrap();
    assert!(target == bytes);
    drop(registered);
    // An address of unknown kind is a question; an answer that fails is an error, and not "host".
    // SAFETY: the vector lives until the end.
    let put = client.put("raw", unsafe { Payload::raw(bytes.as_ptr().expose_provenance(), LEN) });
    assert!(matches!(&put, Err(Error::NotSent { cause }) if matches!(&**cause, Error::Device(_))), "{put:?}");
}

/// P43.
#[test]
fn registering_the_same_buffer_again_only_counts() {
    let rig = Rig::new();
    let client = rig.client(1);
    let buffer = filled(client.device(), &pattern(1, LEN));
    rig.here().log().clear();
    let first = client.register_buffer(&buffer).unwrap();
    let second = client.register_buffer(&buffer).unwrap();
    assert_eq!(client.put("k", &buffer).unwrap(), Put::Stored);
    drop(first);
    assert_eq!(rig.here().registrations(), 1, "one holder is left");
    drop(second);
    let log = rig.here().log();
    assert_eq!((log.count(Op::Register), log.count(Op::Unregister)), (1, 1));

    let _low = client.register_buffer(Payload::part(&buffer, 0, LEN / 2).unwrap()).unwrap();
    let across = client.register_buffer(Payload::part(&buffer, LEN / 4, LEN / 2).unwrap());
    assert!(matches!(&across, Err(Error::Device(e)) if e.kind() == Kind::Overlap), "{across:?}");
    let text = across.unwrap_err().to_string();
    assert!(text.contains(&(LEN / 2).to_string()), "it does not say what it overlaps: {text}");
    let _high = client.register_buffer(Payload::part(&buffer, LEN / 2, LEN / 2).unwrap()).unwrap();
    every_call_had_its_device(rig.here().log());
}

/// Registers memory by its address alone: a guard that knew its buffer would not let it be freed.
fn register_raw<'a>(
    client: &StoreClient<StrictDevice>,
    buffer: &Buffer<StrictDevice>,
) -> Registered<'a, StrictDevice> {
    let region = buffer.region();
    // SAFETY: registering touches no bytes, and freeing the memory under a registration is what the test is about.
    client.register_buffer(unsafe { Payload::raw(region.addr, region.len) }).unwrap()
}

/// P45.
#[test]
fn a_recycled_pointer_is_registered_afresh() {
    let rig = Rig::new();
    let client = rig.client(0);
    let first = filled(client.device(), &[0x11; 16]);
    let addr = first.region().addr;
    let mut guards = vec![register_raw(&client, &first)];
    drop(first);
    for (n, len) in [(1u64, 64usize), (2, 64), (3, 16)] {
        let again = filled(client.device(), &pattern(n as u8, len));
        assert_eq!(again.region().addr, addr, "the address was not reused, so this shows nothing");
        guards.push(register_raw(&client, &again));
        assert_eq!(
            rig.here().log().count(Op::Register),
            n + 1,
            "the old registration was taken for the new one"
        );
        assert_eq!(rig.here().registrations(), 1);
        let key = n.to_string();
        client.put(&key, &again).unwrap();
        assert_eq!(client.get(&key).unwrap(), pattern(n as u8, len));
    }
    // The guards of memory that was replaced take nothing of others back.
    let last = guards.pop();
    drop(guards);
    assert_eq!((rig.here().log().count(Op::Unregister), rig.here().registrations()), (3, 1));
    drop(last);
    assert_eq!((rig.here().log().count(Op::Unregister), rig.here().registrations()), (4, 0));
}

/// P46.
#[test]
fn a_registration_that_fails_in_the_middle_leaves_nothing_registered() {
    let rules = || machine(2).register_max(1 << 20);
    let rig = Rig::with(rules(), rules());
    let client = rig.client(0);
    let buffer = filled(client.device(), &vec![1; 3 << 20]);
    rig.here().faults().fail(Op::Register, 2, 999);
    let error = client.register_buffer(&buffer).unwrap_err();
    assert!(matches!(&error, Error::Device(e) if e.vendor_code() == Some(999)), "{error}");
    assert_eq!((rig.here().registrations(), client.device().registrations()), (0, 0));

    // Where taking the first part back fails too, the caller hears of both.
    rig.here().faults().fail(Op::Register, 2, 999);
    rig.here().faults().fail(Op::Unregister, 1, 888);
    let error = client.register_buffer(&buffer).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("999") && text.contains("888") && text.contains("still registered"), "{text}");
    on_a_bound_thread(client.device(), |device| device.machine().unregister(buffer.region().addr)).unwrap();

    // The buffer is free to go, and to be registered.
    drop(client.register_buffer(&buffer).unwrap());
    drop(buffer);
    assert_eq!((rig.here().live_allocations(), rig.here().freed_while_registered()), (0, 0));
}

/// P46, for a call that never returns: the caller is given up on time, and what comes of it late is taken back.
#[test]
fn a_registration_that_hangs_in_the_driver_times_out_and_is_taken_back_when_it_ends() {
    let rig = Rig::new();
    let client = rig.client(0);
    let buffer = filled(client.device(), &vec![1; LEN]);
    rig.here().faults().hang(Op::Register, 1);
    let hasty = client.with_deadline(Duration::from_millis(200));
    thread::scope(|scope| {
        let caller = scope.spawn(|| hasty.register_buffer(&buffer).map(drop));
        let limit = Instant::now() + PATIENCE;
        while !caller.is_finished() && Instant::now() < limit {
            thread::sleep(Duration::from_millis(1));
        }
        let on_time = caller.is_finished();
        assert_eq!(client.put("meanwhile", &buffer).unwrap(), Put::Stored);
        rig.here().faults().unblock_all();
        let answer = caller.join().unwrap();
        assert!(on_time && matches!(answer, Err(Error::Timeout { .. })), "on time: {on_time}, {answer:?}");
    });
    eventually("the late registration is taken back", || {
        rig.here().log().count(Op::Unregister) == 1 && rig.here().registrations() == 0
    });
}

/// P48.
#[test]
fn a_buffer_beyond_the_drivers_limit_is_registered_in_parts_and_moves_whole() {
    for rig in [
        Rig::with(machine(2).register_max(2 << 20), machine(2)),
        Rig::with(machine(2).register_max(2 << 20), machine(2).visible([0])),
    ] {
        // On device 1 the second node stages, so both ways are gone.
        let client = rig.client(1);
        let bytes = pattern(1, 9 << 20);
        let buffer = filled(client.device(), &bytes);
        let registered = client.register_buffer(&buffer).unwrap();
        assert_eq!(rig.here().registrations(), 5);
        for i in 0..3 {
            let (key, at) = (i.to_string(), i * (3 << 20));
            client.put(&key, Payload::part(&buffer, at, 3 << 20).unwrap()).unwrap();
            assert!(client.get(&key).unwrap() == bytes[at..at + (3 << 20)], "block {i}");
            let mut target = filled(client.device(), &vec![0; 3 << 20]);
            client.get_into(&key, &mut target).unwrap();
            assert!(peek(rig.here(), target.region()) == bytes[at..at + (3 << 20)], "block {i}");
        }
        drop(registered);
        assert_eq!((rig.here().registrations(), rig.here().log().count(Op::Unregister)), (0, 5));
    }
}

/// P48: what breaks the driver's alignment is that call's own error.
#[test]
fn an_unaligned_buffer_is_refused_with_the_rule() {
    let rig = Rig::with(machine(2).register_alignment(4096), machine(2));
    let client = rig.client(0);
    let buffer = filled(client.device(), &vec![1; LEN]);
    let error = client.register_buffer(Payload::part(&buffer, 512, 4096).unwrap()).unwrap_err();
    assert!(matches!(&error, Error::Device(e) if e.kind() == Kind::InvalidArgument), "{error}");
    assert!(error.to_string().contains("4096"), "{error}");
    // A put needs no registration.
    assert_eq!(client.put("k", Payload::part(&buffer, 512, 4096).unwrap()).unwrap(), Put::Stored);
}

/// P49. Counted in driver calls, which a machine's load does not change.
#[test]
fn puts_of_a_registered_tensor_register_nothing_and_cost_the_same_each_time() {
    let rig = Rig::new();
    let client = rig.client(0);
    let buffer = filled(client.device(), &pattern(1, 4096));
    let registered = client.register_buffer(&buffer).unwrap();
    let mut calls = Vec::new();
    for i in 0..1000 {
        let before = calls_so_far(&client);
        client.upsert("k", &buffer).unwrap();
        calls.push(calls_so_far(&client) - before);
        assert_eq!(rig.here().log().count(Op::Register), 1, "put {i} registered");
    }
    assert!(calls[10..].iter().all(|n| *n == calls[10]), "the cost of a put grows: {:?}", histogram(&calls));
    assert_eq!(rig.there().log().count(Op::Import), 1, "the node opened the allocation again");
    drop(registered);
}

/// P49.
#[test]
fn registering_many_views_costs_as_many_driver_calls_in_the_last_round_as_in_the_first() {
    let rig = Rig::new();
    let client = rig.client(0);
    let buffer = filled(client.device(), &vec![1; 1000 * 64]);
    let mut rounds = Vec::new();
    for _ in 0..60 {
        let before = calls_so_far(&client);
        let views: Vec<_> = (0..1000)
            .map(|i| client.register_buffer(Payload::part(&buffer, i * 64, 64).unwrap()).unwrap())
            .collect();
        assert_eq!(rig.here().registrations(), 1000);
        drop(views);
        rounds.push(calls_so_far(&client) - before);
    }
    assert_eq!(rig.here().registrations(), 0);
    assert!(rounds.iter().all(|n| *n == rounds[0]), "{:?}", histogram(&rounds));
}

fn calls_so_far(client: &StoreClient<StrictDevice>) -> u64 {
    let log = client.device().machine().log();
    Op::ALL.iter().map(|op| log.count(*op)).sum()
}

fn histogram(counts: &[u64]) -> HashMap<u64, usize> {
    let mut histogram = HashMap::new();
    for count in counts {
        *histogram.entry(*count).or_default() += 1;
    }
    histogram
}

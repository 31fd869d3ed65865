//! What every call of the store answers, whatever is asked of it, whoever else asks, and in whatever order.

use std::{
    collections::BTreeSet,
    os::unix::process::CommandExt,
    process::Command,
    sync::{
        Barrier,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use backend_cpu::CpuDevice;
use haulier::{
    Dtype, Error, KEY_MAX, Options, Payload, Put, StoreClient, Target, TensorMut, TensorRef, View,
    hal::DeviceExt,
};
use haulier_tests::{
    on_both_engines,
    process::{Watchdog, wait_for},
    world::{KIB, MIB, Setup, World, bytes},
};

type Client = StoreClient<CpuDevice>;

const MEBI: usize = MIB as usize;

/// One length for each way that a value can travel and lie: nothing, inside a message, a slot, a block, frames of its own.
const LENS: [usize; 6] = [0, 100, 4096, 100_000, MEBI, 3 * MEBI + 1];

fn payload<'a>(bytes: &'a [u8]) -> Payload<'a, CpuDevice> {
    bytes.into()
}

fn target<'a>(bytes: &'a mut [u8]) -> Target<'a, CpuDevice> {
    bytes.into()
}

/// Puts values of 1 MiB until one of `watched` is gone; which of them are still there.
fn fill_until_one_goes(client: &Client, watched: &[&str]) -> Vec<bool> {
    let value = bytes(99, MEBI);
    for n in 0..64 {
        client.upsert(&format!("filler-{n}"), &value).unwrap();
        let there: Vec<bool> = client.batch_exists(watched).into_iter().map(Result::unwrap).collect();
        if there.contains(&false) {
            return there;
        }
    }
    panic!("64 MiB evicted nothing");
}

on_both_engines! {
    what_was_put_comes_back_by_every_call: Setup::mib(64),
    a_repeated_key_fills_every_slot_of_a_batch: Setup::mib(16),
    of_racing_writers_one_stores_and_the_others_are_told: Setup::mib(64),
    put_keeps_what_is_there_and_upsert_replaces_it: Setup::mib(16),
    remove_waits_for_no_reader_and_may_be_repeated: Setup::mib(16),
    absent_and_empty_are_different_answers: Setup::mib(16),
    one_bad_slot_fails_no_other: Setup::mib(16),
    a_repeated_key_in_a_batch_put_is_stored_once: Setup::mib(16),
    a_source_overwritten_after_the_put_changes_nothing_stored: Setup::mib(64),
    namespaces_do_not_see_each_other: Setup::mib(16),
    a_full_namespace_evicts_nothing_of_another_one_beyond_its_quota: Setup::mib(16).quota("small", 4 * MIB),
    upsert_is_atomic_for_readers: Setup::mib(8),
    views_survive_remove_upsert_eviction_and_close: Setup::mib(24),
    allocated_memory_is_stored_or_goes_back: Setup::mib(16).no_evict(),
    a_buffer_of_another_client_is_refused_or_stored_whole: Setup::mib(16),
    list_has_every_key_in_order_over_many_pages: Setup::mib(16),
    asking_about_a_value_does_not_keep_it: Setup::mib(8),
    pinned_values_survive_eviction_and_not_removal: Setup::mib(8),
    a_batch_of_many_messages_has_its_verdicts_in_order: Setup::mib(32),
    a_batch_larger_than_the_pool_is_stored_with_eviction: Setup::mib(8),
    a_batch_larger_than_the_pool_is_told_full_without_eviction: Setup::mib(8).no_evict(),
    a_closed_client_says_so: Setup::mib(16),
    a_client_does_not_survive_a_fork_and_the_parent_is_unaffected: Setup::mib(16),
    progress_reaches_its_total: Setup::mib(96),
}

/// Bytes come back as they were, for every length and by every call that reads.
fn what_was_put_comes_back_by_every_call(world: &World) {
    let client = world.client();
    for (n, len) in LENS.into_iter().enumerate() {
        let (key, value) = (format!("k{n}"), bytes(n as u64, len));
        assert_eq!(client.put(&key, &value).unwrap(), Put::Stored);
        assert_eq!(client.size(&key).unwrap(), len as u64);
        assert_eq!(client.get(&key).unwrap(), value);
        assert_eq!(client.view(&key).unwrap()[..], value[..]);
        let mut into = vec![0xEE; len + 3];
        assert_eq!(client.get_into(&key, &mut into).unwrap(), len as u64);
        assert_eq!((&into[..len], &into[len..]), (&value[..], &[0xEE; 3][..]), "length {len}");
    }
}

/// P52.
fn a_repeated_key_fills_every_slot_of_a_batch(world: &World) {
    let client = world.client();
    for len in [10, 5000, 200_000] {
        let value = bytes(7, len);
        client.upsert("k", &value).unwrap();
        let mut slots = vec![vec![0xEE; len]; 3];
        let filled = client.batch_get_into(slots.iter_mut().map(|slot| ("k", target(slot))).collect());
        assert!(filled.iter().all(|n| matches!(n, Ok(n) if *n == len as u64)), "{filled:?}");
        assert!(slots.iter().all(|slot| *slot == value), "length {len}");

        let mut slots = [vec![0xEE; len], vec![0xEE; len - 1], vec![0xEE; len + 1]];
        let filled = client.batch_get_into(slots.iter_mut().map(|slot| ("k", target(slot))).collect());
        let need = len as u64;
        assert!(
            matches!(
                filled[..],
                [Ok(a), Err(Error::TooSmall { need: n }), Ok(b)] if (a, n, b) == (need, need, need)
            ),
            "{filled:?}"
        );
        assert_eq!(slots[0], value);
        assert!(slots[1].iter().all(|&byte| byte == 0xEE), "a slot that is too small was touched");
        assert_eq!((&slots[2][..len], slots[2][len]), (&value[..], 0xEE));

        let views = client.batch_view(&["k", "absent", "k", "k"]);
        assert!(matches!(views[1], Err(Error::NotFound)));
        for n in [0, 2, 3] {
            assert_eq!(views[n].as_ref().unwrap()[..], value[..]);
        }
    }
}

/// P54.
fn of_racing_writers_one_stores_and_the_others_are_told(world: &World) {
    const WRITERS: usize = 8;
    let clients: Vec<Client> = (0..WRITERS).map(|_| world.client()).collect();
    for (n, len) in [100, 100_000, 4096, 40_000, 0, 17_000].into_iter().cycle().take(24).enumerate() {
        let (key, checked) = (format!("raced-{n}"), Barrier::new(WRITERS));
        let put = |writer: usize| {
            assert!(!clients[writer].exists(&key).unwrap());
            let value = bytes(writer as u64, len);
            checked.wait();
            clients[writer].put(&key, &value).unwrap()
        };
        let verdicts: Vec<Put> = thread::scope(|scope| {
            let writers: Vec<_> = (0..WRITERS).map(|writer| scope.spawn(move || put(writer))).collect();
            writers.into_iter().map(|writer| writer.join().unwrap()).collect()
        });
        let winners: Vec<usize> = (0..WRITERS).filter(|&w| verdicts[w] == Put::Stored).collect();
        assert_eq!(winners.len(), 1, "{verdicts:?}");
        assert_eq!(verdicts.iter().filter(|v| **v == Put::AlreadyExists).count(), WRITERS - 1);
        assert_eq!(clients[0].get(&key).unwrap(), bytes(winners[0] as u64, len));
    }
    // The store is alive, and what lost takes no room.
    wait_for_granted(&clients[0], 0, 2 * MIB);
}

/// P55.
fn put_keeps_what_is_there_and_upsert_replaces_it(world: &World) {
    let client = world.client();
    for (n, len) in [0, 100, 200_000].into_iter().enumerate() {
        let (key, a, b) = (format!("k{n}"), bytes(1, len), bytes(2, len + 1));
        assert_eq!(client.put(&key, &a).unwrap(), Put::Stored);
        assert_eq!(client.put(&key, &b).unwrap(), Put::AlreadyExists);
        assert_eq!(client.get(&key).unwrap(), a);
        assert_eq!(client.upsert(&key, &b).unwrap(), Put::Replaced);
        assert_eq!(client.get(&key).unwrap(), b);
        assert_eq!(client.upsert(&format!("new{n}"), &a).unwrap(), Put::Stored);
    }
    if let World::Node(daemon) = world {
        assert!(!daemon.log().contains("ERROR"), "an outcome is no error:\n{}", daemon.log());
    }
}

/// P56.
fn remove_waits_for_no_reader_and_may_be_repeated(world: &World) {
    let (client, reader) = (world.client(), world.client());
    for len in [100, 200_000] {
        let value = bytes(1, len);
        client.put("k", &value).unwrap();
        let view = reader.view("k").unwrap();
        assert_eq!(reader.get("k").unwrap(), value);
        assert!(reader.exists("k").unwrap());
        assert!(client.remove("k").unwrap());
        assert!(!client.exists("k").unwrap() && !reader.exists("k").unwrap());
        assert!(!client.remove("k").unwrap());
        // The key is free at once, while the old value is still read.
        assert_eq!(client.put("k", &bytes(2, len)).unwrap(), Put::Stored);
        assert_eq!(view[..], value[..]);
        client.put("other", b"x").unwrap();
        let removed: Vec<bool> =
            client.batch_remove(&["k", "absent", "other", "k"]).into_iter().map(Result::unwrap).collect();
        assert_eq!(removed, [true, false, true, false]);
    }
}

/// P60.
fn absent_and_empty_are_different_answers(world: &World) {
    let client = world.client();
    assert_eq!(client.put("empty", &[]).unwrap(), Put::Stored);
    assert_eq!((client.get("empty").unwrap().len(), client.size("empty").unwrap()), (0, 0));
    assert_eq!(client.get_into("empty", &mut Vec::new()).unwrap(), 0);
    assert!(client.view("empty").unwrap().is_empty() && client.exists("empty").unwrap());
    assert!(matches!(client.get("absent"), Err(Error::NotFound)));
    assert!(matches!(client.view("absent"), Err(Error::NotFound)));
    assert!(matches!(client.size("absent"), Err(Error::NotFound)));
    assert!(matches!(client.get_into("absent", &mut vec![0; 9]), Err(Error::NotFound)));
    assert!(!client.exists("absent").unwrap());

    let got = client.batch_get(&["absent", "empty", "absent"]);
    assert!(matches!(&got[..], [Err(Error::NotFound), Ok(empty), Err(Error::NotFound)] if empty.is_empty()));
    let (mut a, mut b) = ([0xEE; 4], [0xEE; 4]);
    let got = client.batch_get_into(vec![("empty", target(&mut a)), ("absent", target(&mut b))]);
    assert!(matches!(got[..], [Ok(0), Err(Error::NotFound)]));
    assert_eq!((a, b), ([0xEE; 4], [0xEE; 4]));
    assert_eq!(client.list("").unwrap(), [("empty".to_owned(), 0)]);
    assert_eq!(client.put("empty", b"x").unwrap(), Put::AlreadyExists);
    assert!(client.remove("empty").unwrap() && !client.exists("empty").unwrap());
}

/// P61.
fn one_bad_slot_fails_no_other(world: &World) {
    let client = world.client();
    let (long, values): (String, Vec<Vec<u8>>) =
        ("k".repeat(KEY_MAX + 1), (0..5).map(|n| bytes(n, 20_000 * n as usize + 5)).collect());
    client.put("c", b"older").unwrap();
    let keys = ["a", "b", "c", "d", "e"];
    let put = client.batch_put(keys.iter().zip(&values).map(|(key, v)| (*key, payload(v))).collect());
    assert!(
        matches!(
            put[..],
            [Ok(Put::Stored), Ok(Put::Stored), Ok(Put::AlreadyExists), Ok(Put::Stored), Ok(Put::Stored)]
        ),
        "{put:?}"
    );
    let got = client.batch_get(&["a", "absent", "c", "d", "e"]);
    assert!(matches!(got[1], Err(Error::NotFound)));
    for (slot, wanted) in [(0, &values[0][..]), (2, b"older"), (3, &values[3]), (4, &values[4])] {
        assert_eq!(got[slot].as_ref().unwrap(), wanted);
    }

    let oversize = vec![0; 17 * MEBI];
    let mixed = client.batch_put(vec![
        ("", payload(b"no key")),
        ("f", payload(&values[0])),
        (&long, payload(b"key too long")),
        ("huge", payload(&oversize)),
        ("a", payload(b"there")),
        ("g", payload(&values[4])),
    ]);
    assert!(
        matches!(
            mixed[..],
            [
                Err(Error::InvalidKey { len: 0, .. }),
                Ok(Put::Stored),
                Err(Error::InvalidKey { len: 1025, limit: 1024 }),
                Err(Error::TooLarge { size, limit }),
                Ok(Put::AlreadyExists),
                Ok(Put::Stored)
            ] if size >= 17 * MIB && limit <= 17 * MIB
        ),
        "{mixed:?}"
    );
    assert_eq!(client.get("f").unwrap(), values[0]);
    assert_eq!(client.get("g").unwrap(), values[4]);
    assert!(!client.exists("huge").unwrap());

    let asked = client.batch_exists(&["a", "", "absent", &long, "g"]);
    assert!(matches!(
        asked[..],
        [Ok(true), Err(Error::InvalidKey { .. }), Ok(false), Err(Error::InvalidKey { .. }), Ok(true)]
    ));
    let sizes = client.batch_size(&["absent", "a", ""]);
    assert!(matches!(sizes[..], [Err(Error::NotFound), Ok(5), Err(Error::InvalidKey { .. })]));

    assert!(client.batch_put(Vec::new()).is_empty() && client.batch_get(&[]).is_empty());
    assert!(client.batch_get_into(Vec::new()).is_empty() && client.batch_remove(&[]).is_empty());
    // Key and bytes cannot be given in different numbers; what a tensor says of its bytes can be wrong, and is
    // refused before there is anything to send.
    assert!(matches!(
        TensorRef::<CpuDevice>::new(Dtype::F32, &[2, 3], &[0; 23]),
        Err(Error::InvalidTensor { .. })
    ));
}

/// A batch with one key twice stores the first and tells the second.
fn a_repeated_key_in_a_batch_put_is_stored_once(world: &World) {
    let client = world.client();
    for len in [50, 50_000] {
        let values: Vec<Vec<u8>> = (0..3).map(|n| bytes(n, len)).collect();
        let key = format!("k{len}");
        let items = || values.iter().map(|v| (key.as_str(), payload(v))).collect();
        let put: Vec<Put> = client.batch_put(items()).into_iter().map(Result::unwrap).collect();
        assert_eq!(put, [Put::Stored, Put::AlreadyExists, Put::AlreadyExists]);
        assert_eq!(client.get(&key).unwrap(), values[0]);
        let upserted: Vec<Put> = client.batch_upsert(items()).into_iter().map(Result::unwrap).collect();
        assert_eq!(upserted, [Put::Replaced; 3]);
        assert_eq!(client.get(&key).unwrap(), values[2]);
    }
}

/// P62, at run time: that a source cannot be written while it is put is for the compiler.
fn a_source_overwritten_after_the_put_changes_nothing_stored(world: &World) {
    let client = world.client();
    for (n, len) in LENS.into_iter().enumerate() {
        let mut source = bytes(n as u64, len);
        client.put(&format!("slice-{n}"), &source).unwrap();
        source.fill(0xAA);
        assert_eq!(client.get(&format!("slice-{n}")).unwrap(), bytes(n as u64, len));
        if len == 0 {
            continue;
        }
        let mut buffer = client.device().buffer(len).unwrap();
        buffer.allocation_mut().unwrap().write(0, &bytes(n as u64, len)).unwrap();
        client.put(&format!("buffer-{n}"), &buffer).unwrap();
        buffer.allocation_mut().unwrap().write(0, &vec![0xAA; len]).unwrap();
        drop(buffer);
        assert_eq!(client.get(&format!("buffer-{n}")).unwrap(), bytes(n as u64, len));
    }
}

/// P93.
fn namespaces_do_not_see_each_other(world: &World) {
    let (a, b) = (world.client_in("a"), world.client_in("b"));
    assert_eq!(a.put("k", b"of a").unwrap(), Put::Stored);
    assert_eq!(b.put("k", b"of b, longer").unwrap(), Put::Stored);
    assert_eq!((a.get("k").unwrap(), b.get("k").unwrap()), (b"of a".to_vec(), b"of b, longer".to_vec()));
    a.put("only-a", b"").unwrap();
    assert_eq!(a.list("").unwrap(), [("k".to_owned(), 4), ("only-a".to_owned(), 0)]);
    assert_eq!(b.list("").unwrap(), [("k".to_owned(), 12)]);
    assert!(!b.exists("only-a").unwrap() && !world.client().exists("k").unwrap());
    assert!(a.pin("k").unwrap());
    assert!(a.remove("k").unwrap());
    assert_eq!(b.get("k").unwrap(), b"of b, longer");
    assert_eq!(b.upsert("only-a", b"b's").unwrap(), Put::Stored);
    assert_eq!(a.clear().unwrap(), 1);
    assert_eq!(b.list("").unwrap().len(), 2);
    assert_eq!(b.remove_by_prefix("only").unwrap(), 1);
    assert_eq!(b.get("k").unwrap(), b"of b, longer");
}

/// P93.
fn a_full_namespace_evicts_nothing_of_another_one_beyond_its_quota(world: &World) {
    let (large, small) = (world.client(), world.client_in("small"));
    let value = bytes(1, MEBI);
    for n in 0..3 {
        large.put(&format!("k{n}"), &value).unwrap();
    }
    for n in 0..20 {
        assert_eq!(small.put(&format!("s{n}"), &value).unwrap(), Put::Stored);
    }
    let of_small = small.list("").unwrap();
    assert!((1..=4).contains(&of_small.len()), "{of_small:?}");
    assert!((0..3).all(|n| large.exists(&format!("k{n}")).unwrap()));
    for n in 0..40 {
        large.put(&format!("l{n}"), &value).unwrap();
    }
    assert_eq!(small.list("").unwrap(), of_small);
    assert!(matches!(small.put("too large", &bytes(2, 5 * MEBI)), Err(Error::TooLarge { .. })));
    assert_eq!(small.list("").unwrap(), of_small, "what can never fit must evict nothing");
}

/// A reader sees the old value or the new one, whole. The pool is small, so that what was replaced is soon written over.
fn upsert_is_atomic_for_readers(world: &World) {
    const LENS: [usize; 5] = [700_000, 200, 699_999, 700_001, 5000];
    let values = LENS.map(|len| bytes(len as u64, len));
    let whole = |value: &[u8]| {
        let known = values.iter().find(|known| known.len() == value.len());
        assert!(known.is_some_and(|known| known == value), "{} bytes are mixed", value.len());
    };
    let writer = world.client();
    writer.put("k", &values[0]).unwrap();
    let reading = AtomicUsize::new(2);
    thread::scope(|scope| {
        for _ in 0..2 {
            let client = world.client();
            let (reading, whole) = (&reading, &whole);
            scope.spawn(move || {
                let _done = OnDrop(|| _ = reading.fetch_sub(1, Ordering::Relaxed));
                let mut buffer = vec![0; 700_001];
                for _ in 0..300 {
                    let len = client.get_into("k", &mut buffer).unwrap() as usize;
                    whole(&buffer[..len]);
                    whole(&client.view("k").unwrap());
                    client.batch_view(&["k", "k"]).into_iter().for_each(|view| whole(&view.unwrap()));
                }
            });
        }
        for value in values.iter().cycle() {
            if reading.load(Ordering::Relaxed) == 0 {
                break;
            }
            assert_eq!(writer.upsert("k", value).unwrap(), Put::Replaced);
        }
    });
}

/// Does something when it goes out of scope, by a panic too.
struct OnDrop<F: FnMut()>(F);

impl<F: FnMut()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

/// Readers hold by reference: bytes under a view stay what they were.
fn views_survive_remove_upsert_eviction_and_close(world: &World) {
    let (client, other) = (world.client(), world.client());
    let mut held: Vec<(View, Vec<u8>)> = Vec::new();
    for len in [100, 4096, 20_000, MEBI] {
        for fate in ["removed", "replaced", "evicted", "cleared"] {
            let (key, value) = (format!("{fate}-{len}"), bytes(held.len() as u64, len));
            client.put(&key, &value).unwrap();
            held.push((client.view(&key).unwrap(), value));
        }
        assert!(client.remove(&format!("removed-{len}")).unwrap());
        assert_eq!(client.upsert(&format!("replaced-{len}"), &bytes(77, len)).unwrap(), Put::Replaced);
    }
    // Twice the pool: whatever is free is written over.
    for n in 0..48 {
        other.upsert(&format!("filler-{n}"), &vec![0xEE; MEBI]).unwrap();
    }
    assert!(other.stat().unwrap().evictions > 0, "48 MiB evicted nothing");
    other.clear().unwrap();
    for n in 0..24 {
        // Full where the views leave no room: they hold their memory.
        let _ = other.put(&format!("small-{n}"), &vec![0xDD; 400 * KIB as usize]);
    }
    client.close();
    drop(client);
    for (view, value) in &held {
        assert_eq!(view[..], value[..]);
    }
    let used = other.stat().unwrap().used;
    drop(held);
    other.clear().unwrap();
    wait_for("the memory under the views", || {
        let stat = other.stat().unwrap();
        (stat.used == 0 && stat.used < used).then_some(())
    });
}

/// Memory inside the store becomes a value without a copy, or goes back.
fn allocated_memory_is_stored_or_goes_back(world: &World) {
    let client = world.client();
    for (n, len) in LENS.into_iter().enumerate() {
        let (key, value) = (format!("k{n}"), bytes(n as u64, len));
        let mut buffer = client.alloc(len as u64).unwrap();
        assert_eq!(buffer.len(), len);
        buffer.copy_from_slice(&value);
        assert!(!client.exists(&key).unwrap());
        assert_eq!(client.put_allocated(&key, buffer).unwrap(), Put::Stored);
        assert_eq!(client.get(&key).unwrap(), value);

        let mut buffer = client.alloc(len as u64).unwrap();
        buffer.fill(0xEE);
        assert_eq!(client.put_allocated(&key, buffer).unwrap(), Put::AlreadyExists);
        assert_eq!(client.get(&key).unwrap(), value);
        let mut buffer = client.alloc(len as u64).unwrap();
        buffer.fill(0xDD);
        assert_eq!(client.upsert_allocated(&key, buffer).unwrap(), Put::Replaced);
        assert_eq!(client.get(&key).unwrap(), vec![0xDD; len]);
    }
    client.clear().unwrap();
    // Four times the pool, if it did not come back.
    for _ in 0..64 {
        let buffer = client.alloc(MIB).unwrap();
        drop(buffer);
    }
    let refused = client.alloc(MIB).unwrap();
    assert!(matches!(client.put_allocated("", refused), Err(Error::InvalidKey { .. })));
    let huge = client.alloc(17 * MIB).map(drop);
    assert!(matches!(huge, Err(Error::TooLarge { size, limit }) if size == 17 * MIB && limit == 16 * MIB));
    wait_for_granted(&client, 0, 4 * MIB);
}

/// Two clients' buffers are two buffers: one cannot commit the other's.
fn a_buffer_of_another_client_is_refused_or_stored_whole(world: &World) {
    let (mine, other) = (world.client(), world.client());
    let mut buffer = mine.alloc(5000).unwrap();
    buffer.copy_from_slice(&bytes(3, 5000));
    match other.put_allocated("k", buffer) {
        Ok(Put::Stored) => assert_eq!(mine.get("k").unwrap(), bytes(3, 5000)),
        Err(Error::InvalidArgument { .. }) => assert!(!mine.exists("k").unwrap()),
        verdict => panic!("{verdict:?}"),
    }
}

/// Keys of any Unicode and up to the limit are listed in order, with their lengths, over as many pages as it takes.
fn list_has_every_key_in_order_over_many_pages(world: &World) {
    let client = world.client();
    let mut keys: BTreeSet<String> = (0..2500).map(|n| format!("plain/{n}")).collect();
    keys.extend((0..300).map(|n| format!("{}{n:04}", "k".repeat(KEY_MAX - 4))));
    let odd = [
        "\0",
        "\u{1}",
        "\n",
        " ",
        "/",
        "//",
        "..",
        "é",
        "e\u{301}",
        "ключ",
        "鍵",
        "🔑",
        "🔑🔑",
        "\u{10ffff}",
        "\"quoted\"",
        "%s",
        "a\0b",
    ];
    keys.extend(odd.map(str::to_owned));
    // 1023 bytes and one of two: its last character straddles nothing.
    keys.insert(format!("{}é", "x".repeat(KEY_MAX - 2)));
    let owned: Vec<(String, Vec<u8>)> = keys.iter().map(|k| (k.clone(), bytes(0, k.len() % 7))).collect();
    let put = client.batch_put(owned.iter().map(|(key, value)| (key.as_str(), payload(value))).collect());
    assert!(put.iter().all(|verdict| matches!(verdict, Ok(Put::Stored))));
    let wanted = |prefix: &str| -> Vec<(String, u64)> {
        let under = keys.iter().filter(|key| key.starts_with(prefix));
        under.map(|key| (key.clone(), (key.len() % 7) as u64)).collect()
    };
    for prefix in ["", "plain/", "plain/1", "k", "🔑", "e", "é", "\0", "absent", &"k".repeat(KEY_MAX - 4)]
    {
        assert!(client.list(prefix).unwrap() == wanted(prefix), "prefix {prefix:?}");
    }
    for key in &keys {
        assert_eq!(client.size(key).unwrap(), (key.len() % 7) as u64, "{key:?}");
    }

    assert_eq!(client.remove_by_prefix("plain/1").unwrap(), 1111);
    assert_eq!(client.remove_by_prefix("plain/1").unwrap(), 0);
    assert_eq!(client.remove_by_prefix("🔑").unwrap(), 2);
    assert!(matches!(client.remove_by_prefix(""), Err(Error::InvalidArgument { .. })));
    assert_eq!(client.list("").unwrap().len(), keys.len() - 1113);
    assert!(client.exists("plain/2").unwrap() && !client.exists("🔑").unwrap());
    assert_eq!(client.clear().unwrap(), keys.len() as u64 - 1113);
    assert!(client.list("").unwrap().is_empty());
}

/// Asking is no use of a value: what was only asked about is still evicted first. Reading it is one.
fn asking_about_a_value_does_not_keep_it(world: &World) {
    let client = world.client();
    let put = |keys: &[&str]| {
        keys.iter().for_each(|key| {
            client.put(key, &bytes(1, MEBI)).unwrap();
        })
    };
    put(&["a", "b", "c"]);
    for _ in 0..10 {
        assert!(client.exists("a").unwrap());
        assert_eq!(client.size("a").unwrap(), MIB);
        assert_eq!(client.list("a").unwrap().len(), 1);
        assert!(client.tensor_spec("a").is_err());
        assert_eq!(client.put("a", b"x").unwrap(), Put::AlreadyExists);
    }
    let there = fill_until_one_goes(&client, &["a", "b", "c"]);
    assert_eq!((there[0], there[2]), (false, true), "{there:?}");

    client.clear().unwrap();
    put(&["a", "b", "c"]);
    client.get("a").unwrap();
    let there = fill_until_one_goes(&client, &["a", "b", "c"]);
    assert_eq!((there[0], there[1]), (true, false), "{there:?}");
}

/// A pinned value is never evicted, and is removed like any other.
fn pinned_values_survive_eviction_and_not_removal(world: &World) {
    let client = world.client();
    let value = bytes(5, MEBI);
    client.put("pinned", &value).unwrap();
    client.put("not", &value).unwrap();
    assert!(client.pin("pinned").unwrap() && !client.pin("absent").unwrap());
    for n in 0..40 {
        assert_eq!(client.put(&format!("filler-{n}"), &bytes(n, MEBI)).unwrap(), Put::Stored);
    }
    assert_eq!(client.get("pinned").unwrap(), value);
    assert!(!client.exists("not").unwrap());
    assert!(client.unpin("pinned").unwrap() && !client.unpin("absent").unwrap());
    for n in 40..60 {
        client.put(&format!("filler-{n}"), &bytes(n, MEBI)).unwrap();
    }
    assert!(!client.exists("pinned").unwrap());

    client.put("pinned", &value).unwrap();
    client.pin("pinned").unwrap();
    assert!(client.remove("pinned").unwrap() && !client.exists("pinned").unwrap());
    client.put("pinned", &value).unwrap();
    client.pin("pinned").unwrap();
    assert!(client.clear().unwrap() > 0);
    assert!(!client.exists("pinned").unwrap(), "clear takes pinned values too");
}

/// A batch is cut as its parts need it, and its verdicts come together in input order.
fn a_batch_of_many_messages_has_its_verdicts_in_order(world: &World) {
    let client = world.client();
    // By count, by bytes of keys, and by values that do not travel in messages.
    let value_of = |n: usize| bytes(n as u64, if n.is_multiple_of(97) { 30_000 } else { n % 200 });
    let keys: Vec<String> = (0..5000).map(|n| format!("{n:04}-{}", "k".repeat(n % 300))).collect();
    let values: Vec<Vec<u8>> = (0..5000).map(value_of).collect();
    let there: Vec<bool> = (0..5000).map(|n| n % 3 == 0).collect();
    for n in (0..5000).filter(|&n| there[n]).step_by(50) {
        client.put(&keys[n], b"older").unwrap();
    }
    let older = |n: usize| there[n] && (n / 3).is_multiple_of(50);
    let put = client.batch_put(keys.iter().zip(&values).map(|(k, v)| (k.as_str(), payload(v))).collect());
    assert_eq!(put.len(), 5000);
    for (n, verdict) in put.into_iter().enumerate() {
        assert_eq!(verdict.unwrap(), if older(n) { Put::AlreadyExists } else { Put::Stored }, "slot {n}");
    }
    let wanted = |n: usize| if older(n) { &b"older"[..] } else { &values[n][..] };
    let asked: Vec<&str> = keys.iter().map(String::as_str).collect();
    for (n, view) in client.batch_view(&asked).into_iter().enumerate() {
        assert_eq!(view.unwrap()[..], *wanted(n), "slot {n}");
    }
    let mut slots: Vec<Vec<u8>> = (0..5000).map(|n| vec![0xEE; wanted(n).len()]).collect();
    let into = slots.iter_mut().zip(&asked).map(|(slot, key)| (*key, target(slot))).collect();
    for (n, len) in client.batch_get_into(into).into_iter().enumerate() {
        assert_eq!(len.unwrap(), wanted(n).len() as u64, "slot {n}");
    }
    assert!((0..5000).all(|n| slots[n] == wanted(n)));
    let sizes = client.batch_size(&asked).into_iter().map(Result::unwrap);
    assert!(sizes.enumerate().all(|(n, size)| size == wanted(n).len() as u64));
    // Every second key twice: the second time it is gone.
    let removed = client.batch_remove(&asked.iter().flat_map(|key| [*key, *key]).collect::<Vec<_>>());
    assert!(removed.into_iter().enumerate().all(|(n, was)| was.unwrap() == (n % 2 == 0)));
    assert!(client.list("").unwrap().is_empty());
}

/// A batch of more bytes than the pool has room for evicts its own first values, as puts one by one would.
fn a_batch_larger_than_the_pool_is_stored_with_eviction(world: &World) {
    let client = world.client();
    let values: Vec<Vec<u8>> = (0..40).map(|n| bytes(n, MEBI)).collect();
    let keys: Vec<String> = (0..40).map(|n| format!("k{n:02}")).collect();
    let put = client.batch_put(keys.iter().zip(&values).map(|(k, v)| (k.as_str(), payload(v))).collect());
    assert!(put.iter().all(|verdict| matches!(verdict, Ok(Put::Stored))), "{put:?}");
    let left = client.list("").unwrap();
    assert!((4..=8).contains(&left.len()), "{left:?}");
    assert!(client.exists("k39").unwrap());
    for (key, _) in left {
        let n: usize = key[1..].parse().unwrap();
        assert_eq!(client.get(&key).unwrap(), values[n], "{key}");
    }
}

/// Without eviction what does not fit is told, slot by slot, and what fits is stored.
fn a_batch_larger_than_the_pool_is_told_full_without_eviction(world: &World) {
    let client = world.client();
    let values: Vec<Vec<u8>> = (0..40).map(|n| bytes(n, MEBI)).collect();
    let keys: Vec<String> = (0..40).map(|n| format!("k{n:02}")).collect();
    let put = client.batch_put(keys.iter().zip(&values).map(|(k, v)| (k.as_str(), payload(v))).collect());
    let mut stored = 0;
    for (n, verdict) in put.iter().enumerate() {
        match verdict {
            Ok(Put::Stored) => {
                stored += 1;
                assert_eq!(client.get(&keys[n]).unwrap(), values[n]);
            }
            Err(Error::Full { free, largest }) => {
                assert!(largest <= free && *free < 8 * MIB, "{verdict:?}");
                assert!(!client.exists(&keys[n]).unwrap());
            }
            verdict => panic!("slot {n}: {verdict:?}"),
        }
    }
    assert!((6..=8).contains(&stored), "{stored} of 8 MiB were stored");
}

/// After `close` every call says so, on every clone, and what is held stays.
fn a_closed_client_says_so(world: &World) {
    let client = world.client();
    let value = bytes(1, 50_000);
    client.put("k", &value).unwrap();
    let (view, buffer, clone) = (client.view("k").unwrap(), client.alloc(100).unwrap(), client.clone());
    client.close();
    client.close();
    for client in [client, clone] {
        for (call, verdict) in every_call(&client, "new") {
            assert!(matches!(verdict, Err(Error::Closed)), "{call}: {verdict:?}");
        }
    }
    assert_eq!(view[..], value[..]);
    drop((view, buffer));
    assert_eq!(world.client().get("k").unwrap(), value);
}

/// P79 b, and the parent goes on as if nothing had been.
fn a_client_does_not_survive_a_fork_and_the_parent_is_unaffected(world: &World) {
    let _watchdog = Watchdog::abort_after(Duration::from_secs(60));
    let client = world.client();
    let value = bytes(1, 50_000);
    client.put("k", &value).unwrap();
    let (parent, in_child) = (std::process::id(), client.clone());
    let mut command = Command::new("true");
    let check = move || {
        let refused = |verdict: &haulier::Result<()>| match verdict {
            Err(Error::ForkedProcess { opened_in }) => *opened_in == parent,
            _ => false,
        };
        let calls = every_call(&in_child, "from-the-child");
        // The error of `pre_exec` reaches the parent as that of `spawn`, with its number.
        match calls.iter().position(|(_, verdict)| !refused(verdict)) {
            None => Ok(()),
            Some(call) => Err(std::io::Error::from_raw_os_error(1000 + call as i32)),
        }
    };
    // SAFETY: the child of a fork runs `check` alone; glibc makes its allocator usable there, and the calls under
    // test are refused before they take a lock. The watchdog ends a run in which they do not.
    unsafe { command.pre_exec(check) };
    let mut child = command
        .spawn()
        .unwrap_or_else(|e| panic!("call {:?} in the child of a fork", e.raw_os_error().map(|n| n - 1000)));
    assert!(child.wait().unwrap().success());
    assert_eq!(client.get("k").unwrap(), value);
    assert!(!client.exists("from-the-child").unwrap());
    assert_eq!(client.put("from-the-parent", &value).unwrap(), Put::Stored);
}

/// Progress counts every byte once, in order, up to the total.
fn progress_reaches_its_total(world: &World) {
    let seen = std::sync::Arc::new(parking_lot::Mutex::new(Vec::new()));
    let report = {
        let seen = std::sync::Arc::clone(&seen);
        move |progress| seen.lock().push(progress)
    };
    let client = world.client().with_progress(report);
    let values = [bytes(1, 100), bytes(2, 40 * MEBI), bytes(3, 5000)];
    let items = values.iter().zip(["a", "b", "c"]).map(|(value, key)| (key, payload(value))).collect();
    client.batch_put(items).into_iter().for_each(|verdict| assert_eq!(verdict.unwrap(), Put::Stored));
    let total = values.iter().map(|value| value.len() as u64).sum::<u64>();
    let told = std::mem::take(&mut *seen.lock());
    assert!(told.len() >= 3, "{told:?}");
    assert!(told.windows(2).all(|two| two[0].done < two[1].done), "{told:?}");
    assert!(told.iter().all(|progress| progress.total == total));
    assert_eq!(told.last().unwrap().done, total);
}

/// Waits until grants take up from `low` to `high` bytes: a daemon may keep one ahead for each client.
fn wait_for_granted(client: &Client, low: u64, high: u64) {
    wait_for("memory that goes back", || {
        let granted = client.stat().unwrap().granted;
        (low..=high).contains(&granted).then_some(())
    });
}

/// Every call of a client, each on its own, with `new` for a key that is not there.
fn every_call(client: &Client, new: &str) -> Vec<(&'static str, haulier::Result<()>)> {
    let mut target = vec![0; 50_000];
    let tensor = TensorRef::new(Dtype::U8, &[100], &[7; 100]).unwrap();
    let first = |verdicts: Vec<haulier::Result<Put>>| verdicts.into_iter().next().unwrap().map(drop);
    let mut tensor_target = [0; 100];
    let tensor_target = TensorMut::new(Dtype::U8, &[100], &mut tensor_target[..]).unwrap();
    vec![
        ("put", client.put(new, &[1; 100]).map(drop)),
        ("put of a block", client.put(&format!("{new}-block"), &[1; 100_000]).map(drop)),
        ("upsert", client.upsert(new, &[1; 100]).map(drop)),
        ("batch_put", first(client.batch_put(vec![(new, payload(&[1; 100]))]))),
        ("batch_upsert", first(client.batch_upsert(vec![(new, payload(&[1; 100]))]))),
        ("get_into", client.get_into("k", &mut target).map(drop)),
        ("get", client.get("k").map(drop)),
        ("batch_get", client.batch_get(&["k"]).remove(0).map(drop)),
        ("view", client.view("k").map(drop)),
        ("alloc", client.alloc(100).map(drop)),
        ("exists", client.exists("k").map(drop)),
        ("size", client.size("k").map(drop)),
        ("remove", client.remove(new).map(drop)),
        ("remove_by_prefix", client.remove_by_prefix(new).map(drop)),
        ("pin", client.pin("k").map(drop)),
        ("unpin", client.unpin("k").map(drop)),
        ("list", client.list("").map(drop)),
        ("stat", client.stat().map(drop)),
        ("metrics", client.metrics().map(drop)),
        ("put_tensor", client.put_tensor(new, &tensor).map(drop)),
        ("tensor_spec", client.tensor_spec(new).map(drop)),
        ("get_tensor", client.get_tensor(new).map(drop)),
        ("get_tensor_into", client.get_tensor_into(new, tensor_target)),
        ("get_sharded", client.get_sharded("s").map(drop)),
    ]
}

/// The error of a call that waited too long, whether or not anything was sent.
fn is_timeout(verdict: &haulier::Result<()>) -> bool {
    match verdict {
        Err(Error::Timeout { .. }) => true,
        Err(Error::NotSent { cause }) => matches!(**cause, Error::Timeout { .. }),
        _ => false,
    }
}

/// Every call has a deadline: a daemon that does not answer costs no more than that. What is only read may need no answer.
#[test]
fn every_call_to_a_frozen_daemon_ends_by_its_deadline_and_works_when_it_goes_on() {
    const DEADLINE: Duration = Duration::from_millis(250);
    // For all calls, on a machine that is busy with other things: with the default deadline one alone would take as long.
    const BOUND: Duration = Duration::from_secs(30);
    let daemon = Setup::mib(16).serve().start();
    let client = daemon.client();
    let value = bytes(1, 50_000);
    client.put("k", &value).unwrap();
    let (view, buffer) = (client.view("k").unwrap(), client.alloc(5000).unwrap());
    let hasty = client.with_deadline(DEADLINE);

    daemon.process.freeze();
    let start = Instant::now();
    for (call, verdict) in every_call(&hasty, "while-frozen") {
        let reads = matches!(call, "get" | "get_into" | "batch_get" | "view");
        assert!(is_timeout(&verdict) || reads && verdict.is_ok(), "{call}: {verdict:?}");
    }
    let late = hasty.put_allocated("allocated", buffer);
    assert!(matches!(late, Err(Error::Timeout { .. })), "{late:?}");
    let opened = haulier_tests::process::connect(
        daemon.socket(),
        Options { deadline: DEADLINE, ..Options::default() },
    );
    assert!(matches!(opened, Err(Error::Timeout { .. })), "{opened:?}");
    let slots = hasty.batch_view(&["absent"; 5000]);
    assert!(slots.len() == 5000 && slots.iter().all(|slot| matches!(slot, Err(Error::Timeout { .. }))));
    assert!(start.elapsed() < BOUND, "the calls took {:?}", start.elapsed());
    assert_eq!(view[..], value[..]);

    daemon.process.thaw();
    for (call, verdict) in every_call(&client, "after") {
        // "after" is removed by the call before, so what reads it as a tensor may find none.
        let found = matches!(verdict, Ok(()) | Err(Error::NotFound | Error::InvalidTensor { .. }));
        assert!(found, "{call}: {verdict:?}");
    }
    assert_eq!(client.get("k").unwrap(), value);
    assert_eq!(client.put("fresh", &value).unwrap(), Put::Stored);
    assert_eq!(client.get("fresh").unwrap(), value);
}

/// P60: a resource that is used up is a third answer beside "absent" and "empty".
#[test]
fn exhausted_holds_are_an_answer_of_their_own_and_pass() {
    /// What a client may hold by requests and without.
    const MANY: usize = 65_536 + 4096;
    let daemon = Setup::mib(16).serve().start();
    let client = daemon.client();
    let value = bytes(1, 20_000);
    client.put("k", &value).unwrap();
    client.put("empty", &[]).unwrap();
    let views: Vec<View> = client.batch_view(&vec!["k"; MANY]).into_iter().map(Result::unwrap).collect();

    let hasty = client.with_deadline(Duration::from_millis(200));
    assert!(matches!(hasty.view("k"), Err(Error::ResourceExhausted { .. })));
    let slots = hasty.batch_get(&["absent", "empty", "k"]);
    assert!(
        matches!(
            &slots[..],
            [Err(Error::NotFound), Ok(empty), Err(Error::ResourceExhausted { .. })] if empty.is_empty()
        ),
        "{slots:?}"
    );
    // It holds up nobody else.
    assert_eq!(daemon.client().get("k").unwrap(), value);
    assert_eq!(views[MANY - 1][..], value[..]);
    drop(views);
    assert_eq!(client.get("k").unwrap(), value);
}

/// A client that waits for a resource gets it when another thread gives it back, without asking again.
#[test]
fn a_call_that_finds_a_resource_used_up_waits_for_it() {
    let daemon = Setup::mib(16).serve().start();
    let client = daemon.client();
    let mut buffers: Vec<_> = (0..4096).map(|_| client.alloc(1).unwrap()).collect();
    let hasty = client.with_deadline(Duration::from_millis(200));
    assert!(matches!(hasty.alloc(1), Err(Error::ResourceExhausted { .. })));
    let refused = || -> f64 {
        let text = daemon.client().metrics().unwrap();
        let rows = text.lines().filter(|row| row.contains("outcome=\"resource_exhausted\""));
        rows.map(|row| row.rsplit_once(' ').unwrap().1.parse::<f64>().unwrap()).sum()
    };
    thread::scope(|scope| {
        let before = refused();
        let waiting = scope.spawn(|| client.alloc(1).map(|buffer| buffer.len()));
        wait_for("a refusal that is not passed on", || (refused() > before).then_some(()));
        buffers.pop();
        assert_eq!(waiting.join().unwrap().unwrap(), 1);
    });
}

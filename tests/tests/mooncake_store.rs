//! The Mooncake engine on the real library and the real master: what a store promises, with both transports. The Ascend
//! runtime is simulated; no NPU takes part.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::{CString, c_char, c_int, c_void},
    ptr,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use backend_ascend::AscendDevice;
use backend_cpu::CpuDevice;
use haulier::{
    Dtype, Error, Options, Put, StoreClient, TensorRef,
    hal::{Device, LogicalId},
};
use haulier_tests::{
    mooncake::{Raw, Trial, asked, cluster, role},
    world::{bytes, marked, seed_of},
};

const MIB: u64 = 1 << 20;

fn semantics<D: Device>(device: D) -> StoreClient<D> {
    let client = StoreClient::mooncake(device, &cluster(256 * MIB), Options::default()).unwrap();
    client.health().unwrap();
    for len in [0, 1, 4096, 65_536, 65_537, 1 << 20, 9 << 20] {
        let (key, value, other) = (format!("a/{len}"), bytes(1, len), bytes(2, len + 1));
        assert!(!client.exists(&key).unwrap());
        assert!(matches!(client.get(&key), Err(Error::NotFound)));
        assert!(!client.remove(&key).unwrap());
        assert_eq!(client.put(&key, &value).unwrap(), Put::Stored);
        assert_eq!(client.put(&key, &other).unwrap(), Put::AlreadyExists);
        assert_eq!(client.get(&key).unwrap(), value);
        assert_eq!(client.size(&key).unwrap(), len as u64);
        let mut target = vec![0xEE; len + 7];
        assert_eq!(client.get_into(&key, &mut target).unwrap(), len as u64);
        assert_eq!((&target[..len], &target[len..]), (&value[..], &[0xEE; 7][..]));
        if len > 0 {
            let small = client.get_into(&key, &mut target[..len - 1]);
            assert!(matches!(small, Err(Error::TooSmall { need }) if need == len as u64), "{small:?}");
        }
        assert_eq!(client.upsert(&key, &other).unwrap(), Put::Replaced);
        assert_eq!(client.get(&key).unwrap(), other);
        // At once, although the reads took leases.
        assert!(client.remove(&key).unwrap());
        assert!(!client.exists(&key).unwrap());
        assert_eq!(client.upsert(&key, &value).unwrap(), Put::Stored);
    }

    let verdicts = client.batch_put(vec![
        ("b/1", (&bytes(1, 100)).into()),
        ("a/1", (&bytes(1, 100)).into()),
        ("", (&bytes(1, 100)).into()),
        ("b/1", (&bytes(2, 100)).into()),
        ("b/2", (&bytes(3, 100_000)).into()),
    ]);
    assert!(
        matches!(
            verdicts[..],
            [
                Ok(Put::Stored),
                Ok(Put::AlreadyExists),
                Err(Error::InvalidKey { .. }),
                Ok(Put::AlreadyExists),
                Ok(Put::Stored)
            ]
        ),
        "{verdicts:?}"
    );
    let got = client.batch_get(&["b/2", "absent", "b/1", "b/2"]);
    assert_eq!(got[0].as_ref().unwrap(), &bytes(3, 100_000));
    assert!(matches!(got[1], Err(Error::NotFound)));
    assert_eq!(got[2].as_ref().unwrap(), &bytes(1, 100));
    assert_eq!(got[3].as_ref().unwrap(), &bytes(3, 100_000));

    for (key, rows) in [("t/small", 3), ("t/large", 3000)] {
        let value = bytes(4, rows as usize * 24);
        client.put_tensor(key, &TensorRef::new(Dtype::BF16, &[rows, 12], &value).unwrap()).unwrap();
        let tensor = client.get_tensor(key).unwrap();
        assert_eq!((tensor.spec.dtype, &tensor.spec.shape[..]), (Dtype::BF16, &[rows, 12][..]));
        assert_eq!(tensor.bytes, value);
        assert_eq!(client.view_tensor(key).unwrap().spec(), &tensor.spec);
    }

    for (n, shape) in [&[][..], &[0], &[0, 7], &[3, 0, 2]].into_iter().enumerate() {
        let (key, value) = (format!("b/empty/{n}"), bytes(n as u64, if shape.is_empty() { 4 } else { 0 }));
        client.put_tensor(&key, &TensorRef::new(Dtype::F32, shape, &value).unwrap()).unwrap();
        let tensor = client.get_tensor(&key).unwrap();
        assert_eq!((&tensor.spec.shape[..], &tensor.bytes), (shape, &value));
    }
    assert_eq!(client.remove_by_prefix("b/").unwrap(), 6);
    for refused in [
        client.list("").map(drop),
        client.stat().map(drop),
        client.alloc(1).map(drop),
        client.pin("a/1").map(drop),
    ] {
        assert!(matches!(refused, Err(Error::Unsupported { .. })), "{refused:?}");
    }
    client
}

/// Of two clients with the same keys.
fn tenants(client: StoreClient<CpuDevice>) {
    let other = Options { namespace: "a".into(), ..Options::default() };
    let other = StoreClient::mooncake(client.device().clone(), &cluster(0), other).unwrap();
    assert!(!other.exists("a/1").unwrap());
    other.put("a/1", &bytes(9, 9)).unwrap();
    other.put("a.1", &bytes(9, 9)).unwrap();
    other.put("axb", &bytes(9, 90_000)).unwrap();
    assert_eq!(other.remove_by_prefix("a.").unwrap(), 1);
    assert_eq!(other.get("axb").unwrap(), bytes(9, 90_000));
    // Neither the beginning of a key nor that of a namespace leads into another tenant.
    let nested = Options { namespace: "a/b".into(), ..Options::default() };
    let nested = StoreClient::mooncake(client.device().clone(), &cluster(0), nested).unwrap();
    nested.put("k", &bytes(5, 5)).unwrap();
    other.put("b/k", &bytes(6, 6)).unwrap();
    assert_eq!((nested.get("k").unwrap(), other.get("b/k").unwrap()), (bytes(5, 5), bytes(6, 6)));
    assert_eq!(other.remove_by_prefix("b/").unwrap(), 1);
    assert_eq!(nested.clear().unwrap(), 1);
    assert_eq!(client.clear().unwrap(), 9);
    assert!(!client.exists("a/1").unwrap());
    assert_eq!(other.get("a/1").unwrap(), bytes(9, 9));

    client.close();
    assert!(matches!(client.put("k", b"v"), Err(Error::Closed)));
    assert!(matches!(client.exists("k"), Err(Error::Closed)));
}

#[test]
fn a_store_keeps_its_promises_over_tcp() {
    if role().is_some() {
        return tenants(semantics(CpuDevice::open().unwrap()));
    }
    let Some(trial) = Trial::new("a_store_keeps_its_promises_over_tcp", "9.0.0", "tcp") else { return };
    trial.run("client");
}

#[test]
fn a_store_keeps_its_promises_over_ascend() {
    if role().is_some() {
        // One client: the simulated runtime moves nothing between two.
        semantics(AscendDevice::open(LogicalId(1)).unwrap());
        return;
    }
    let Some(trial) = Trial::new("a_store_keeps_its_promises_over_ascend", "9.0.0", "ascend") else { return };
    trial.run("client");
}

/// P54, P58: Mooncake tells everybody that all went well; the client finds out who stored.
fn races() {
    let client =
        StoreClient::mooncake(CpuDevice::open().unwrap(), &cluster(512 * MIB), Options::default()).unwrap();
    for (round, len) in [0usize, 100, 60_000, 70_000, 300_000].into_iter().cycle().take(30).enumerate() {
        let key = format!("race/{round}");
        let verdicts: Vec<Put> = thread::scope(|scope| {
            let threads: Vec<_> = (0..8)
                .map(|n| {
                    // Of different lengths, so that what is read back of another's may not even fit.
                    let (client, key) = (&client, &key);
                    scope.spawn(move || client.put(key, &marked(n, 64 + len + n as usize)).unwrap())
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let stored: Vec<usize> = (0..8).filter(|&n| verdicts[n] == Put::Stored).collect();
        assert_eq!(stored.len(), 1, "{verdicts:?}");
        assert!(verdicts.iter().all(|put| matches!(put, Put::Stored | Put::AlreadyExists)), "{verdicts:?}");
        assert_eq!(seed_of(&client.get(&key).unwrap()).unwrap(), stored[0] as u64);
    }

    // A value that is replaced again and again is whole, or for a moment not there.
    for len in [50_000, 400_000] {
        let (key, stop, mut seen) = (format!("replaced/{len}"), AtomicBool::new(false), BTreeSet::new());
        thread::scope(|scope| {
            let writer = scope.spawn(|| {
                for n in 0.. {
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    client.upsert(&key, &marked(n, len)).unwrap();
                }
            });
            let mut target = vec![0; len];
            while seen.len() < 40 {
                match client.get_into(&key, &mut target) {
                    Ok(_) => seen.insert(seed_of(&target).unwrap()),
                    Err(Error::NotFound) => continue,
                    Err(e) => panic!("{e}"),
                };
                match client.view(&key) {
                    Ok(view) => seen.insert(seed_of(&view).unwrap()),
                    Err(Error::NotFound) => continue,
                    Err(e) => panic!("{e}"),
                };
            }
            stop.store(true, Ordering::Relaxed);
            writer.join().unwrap();
        });
    }
}

#[test]
fn of_many_that_put_one_key_one_stores_it_and_no_reader_sees_half_a_value() {
    if role().is_some() {
        return races();
    }
    let test = "of_many_that_put_one_key_one_stores_it_and_no_reader_sees_half_a_value";
    let Some(trial) = Trial::new(test, "9.0.0", "tcp") else { return };
    trial.run("client");
}

/// P73: the master makes room after it has refused; what can never fit is an error.
fn full() {
    let options = Options { deadline: Duration::from_secs(20), ..Options::default() };
    let client = StoreClient::mooncake(CpuDevice::open().unwrap(), &cluster(64 * MIB), options).unwrap();
    let value = bytes(1, 1 << 20);
    for n in 0..200 {
        assert_eq!(client.put(&format!("v/{n}"), &value).unwrap(), Put::Stored, "{n}");
    }
    let keys: Vec<String> = (0..200).map(|n| format!("v/{n}")).collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    let there = client.batch_exists(&keys).into_iter().filter(|there| *there.as_ref().unwrap()).count();
    assert!((1..64).contains(&there), "{there} of 64 MiB");
    // Those that lost their body or their head can be put again.
    for key in &keys[..20] {
        // In a full cluster whose leases are this short it may be gone before it is read.
        let read = (0..10).find_map(|_| {
            assert!(matches!(client.put(key, &value).unwrap(), Put::Stored | Put::AlreadyExists));
            match client.get(key) {
                Err(Error::NotFound) => None,
                read => Some(read.unwrap()),
            }
        });
        assert!(read.expect("a value that was just put") == value, "{key}");
    }
    let refused = client.put("large", &bytes(2, 80 << 20)).unwrap_err();
    assert_eq!(refused.label(), "full", "{refused}");
    assert!(refused.to_string().contains("[vendor code -200: no segment has room]"), "{refused}");
    assert!(!client.exists("large").unwrap());
}

#[test]
fn a_cluster_that_is_full_makes_room_and_says_so_where_it_cannot() {
    if role().is_some() {
        return full();
    }
    let test = "a_cluster_that_is_full_makes_room_and_says_so_where_it_cannot";
    let Some(mut trial) = Trial::new(test, "9.0.0", "tcp") else { return };
    // Short leases: what was just put may go.
    trial.restart_master(&["-default_kv_lease_ttl", "100"]);
    trial.run("client");
}

/// How often the master is asked by `call`, by kind.
fn questions(call: impl FnOnce()) -> BTreeMap<String, u64> {
    let before = asked();
    call();
    let mut after = asked();
    for (name, count) in before {
        after.entry(name).and_modify(|after| *after -= count);
    }
    after.retain(|_, count| *count > 0);
    after
}

/// Each question is a round trip to another host.
fn few_questions() {
    let client =
        StoreClient::mooncake(CpuDevice::open().unwrap(), &cluster(64 * MIB), Options::default()).unwrap();
    let of = |kinds: &[&str]| kinds.iter().map(|kind| (kind.to_string(), 1)).collect::<BTreeMap<_, _>>();
    let (start, end, look) = ("batch_put_start", "batch_put_end", "batch_get_replica_list");
    for (key, len, before) in
        [("small", 4096, &[][..]), ("large", 1 << 20, &[]), ("huge", 2 << 20, &["exist_key"])]
    {
        let value = bytes(1, len);
        let put = questions(|| assert_eq!(client.put(key, &value).unwrap(), Put::Stored));
        assert_eq!(put, of(&[before, &[start, end, look]].concat()), "{key}");
    }
    let values: Vec<Vec<u8>> = (0..50).map(|n| bytes(n, if n % 2 == 0 { 100 } else { 100_000 })).collect();
    let keys: Vec<String> = (0..50).map(|n| format!("batch/{n}")).collect();
    let items = keys.iter().zip(&values).map(|(key, value)| (key.as_str(), value.into())).collect();
    let put = questions(|| {
        client.batch_put(items).into_iter().for_each(|put| assert_eq!(put.unwrap(), Put::Stored))
    });
    assert_eq!(put, of(&[start, end, look]));

    let get = |key| questions(|| drop(client.get(key).unwrap()));
    assert_eq!(get("small"), of(&[look]));
    let mut large = of(&["exist_key"]);
    large.insert(look.into(), 2);
    assert_eq!(get("large"), large);
    // Nothing is moved in vain.
    let other = bytes(2, 4096);
    let again = questions(|| assert_eq!(client.put("small", &other).unwrap(), Put::AlreadyExists));
    assert_eq!(again, of(&[start, look]));
    // What is there is longer, and has to be looked at again.
    assert_eq!(client.put("small", &other[..9]).unwrap(), Put::AlreadyExists);
    assert_eq!(client.put("large", &other[..9]).unwrap(), Put::AlreadyExists);
    assert_eq!(client.put("large", &bytes(2, 100_000)).unwrap(), Put::AlreadyExists);
    assert_eq!(client.get("large").unwrap(), bytes(1, 1 << 20));
}

#[test]
fn a_put_asks_the_master_three_times_and_a_get_of_a_small_value_once() {
    if role().is_some() {
        return few_questions();
    }
    let test = "a_put_asks_the_master_three_times_and_a_get_of_a_small_value_once";
    let Some(trial) = Trial::new(test, "9.0.0", "tcp") else { return };
    trial.run("client");
}

/// Removes every body, as an eviction does that finds no head.
fn lose_bodies() {
    type Setup = unsafe extern "C" fn(
        *mut c_void,
        *const c_char,
        *const c_char,
        u64,
        u64,
        *const c_char,
        *const c_char,
        *const c_char,
    ) -> c_int;
    type Remove = unsafe extern "C" fn(*mut c_void, *const c_char, c_int) -> i64;
    let raw = Raw::load();
    // SAFETY: the types are those of the ABI.
    let (create, setup, remove, destroy) = unsafe {
        (
            raw.function::<unsafe extern "C" fn() -> *mut c_void>("mooncake_store_create"),
            raw.function::<Setup>("mooncake_store_setup"),
            raw.function::<Remove>("mooncake_store_remove_by_regex"),
            raw.function::<unsafe extern "C" fn(*mut c_void)>("mooncake_store_destroy"),
        )
    };
    let master = CString::new(cluster(0).master).unwrap();
    let (host, metadata, tcp, none) =
        (c"127.0.0.1".as_ptr(), c"P2PHANDSHAKE".as_ptr(), c"tcp".as_ptr(), c"".as_ptr());
    // SAFETY: as the ABI wants it, and the texts live for the calls.
    unsafe {
        let store = create();
        assert_ne!(store, ptr::null_mut());
        assert_eq!(setup(store, host, metadata, 0, MIB, tcp, none, master.as_ptr()), 0);
        assert!(remove(store, c"^haulier/b/".as_ptr(), 1) > 0, "there was none");
        destroy(store);
    }
    // It is never unloaded: it has threads.
    std::mem::forget(raw);
}

fn lost_bodies() {
    let client =
        StoreClient::mooncake(CpuDevice::open().unwrap(), &cluster(64 * MIB), Options::default()).unwrap();
    // What is put next may have a body or none, a longer head or a shorter one, and be asked about before or not.
    let first = bytes(1, 3 << 20);
    for (n, len) in [100, 0, 100_000, 2 << 20].into_iter().enumerate() {
        let (key, value) = (format!("k/{n}"), bytes(2, len));
        client.put_tensor(&key, &TensorRef::new(Dtype::U8, &[3 << 20], &first).unwrap()).unwrap();
        lose_bodies();
        assert!(!client.exists(&key).unwrap());
        assert!(matches!(client.get(&key), Err(Error::NotFound)));
        assert_eq!(client.put(&key, &value).unwrap(), Put::Stored, "{len}");
        assert_eq!(client.put(&key, &first).unwrap(), Put::AlreadyExists, "{len}");
        assert_eq!(client.get(&key).unwrap(), value);
    }
}

#[test]
fn a_value_that_lost_its_body_is_gone_and_its_key_free() {
    if role().is_some() {
        return lost_bodies();
    }
    let test = "a_value_that_lost_its_body_is_gone_and_its_key_free";
    let Some(trial) = Trial::new(test, "9.0.0", "tcp") else { return };
    trial.run("client");
}

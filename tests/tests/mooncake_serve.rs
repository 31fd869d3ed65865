//! A node that keeps its values in a Mooncake cluster, as one client of it for all of its own: the real library, the real
//! master, over TCP and in host memory, and once for Ascend. The CANN that the library wants to load is simulated; no NPU
//! takes part.
//!
//! The light clients load no Mooncake: they are actors, and the test's own process. "Another host" is a process of the test
//! that joins the cluster by itself, or another daemon.

use std::{
    fs,
    path::Path,
    process::{Command, Output},
    thread,
    time::{Duration, Instant},
};

use backend_ascend::AscendDevice;
use backend_cpu::CpuDevice;
use haulier::{
    Dtype, Error, Options, Put, StoreClient, Target, TensorRef,
    hal::{DeviceExt, LogicalId},
    node::{Node, NodeConfig},
    store::{Config, Store},
};
use haulier_tests::{
    actor,
    mooncake::{SLOW, Trial, cluster, role, sign, wait_for_sign},
    process::{Daemon, Serve, binary, connect, private_dir, wait_for},
    world::{bytes, marked, seed_of},
};

const MIB: u64 = 1 << 20;

/// A counter of the daemon's.
fn counted(client: &StoreClient<CpuDevice>, line: &str) -> u64 {
    let text = client.metrics().unwrap();
    let value = text.lines().find_map(|l| l.strip_prefix(line)?.trim().parse().ok());
    value.unwrap_or_else(|| panic!("{line} is not in\n{text}"))
}

fn free(client: &StoreClient<CpuDevice>) -> u64 {
    client.stat().unwrap().free
}

/// An engine that joins the cluster by itself, in a process that has a role.
fn another_host() -> StoreClient<CpuDevice> {
    StoreClient::mooncake(CpuDevice::open().unwrap(), &cluster(0), Options::default()).unwrap()
}

/// Sizes around what travels in a message, in a head, in a body.
const SIZES: [usize; 9] = [0, 1, 2048, 2049, 65_536, 65_537, 300_000, 1 << 20, 9 << 20];

fn daemon(trial: &Trial) -> Daemon {
    trial.serve("64MiB", "256MiB").start()
}

#[test]
fn light_clients_store_read_and_remove_what_is_in_the_cluster() {
    const TEST: &str = "light_clients_store_read_and_remove_what_is_in_the_cluster";
    let Some(trial) = Trial::new(TEST, "9.0.0", "tcp") else { return };
    let daemon = daemon(&trial);
    assert_eq!(daemon.ready["mooncake"], trial.master.address());
    let client = daemon.client();
    let (mut one, mut other) = (actor!(daemon.socket()), actor!(daemon.socket()));
    let at_rest = free(&client);
    for len in SIZES {
        let (key, value) = (format!("a/{len}"), bytes(1, len));
        assert!(!client.exists(&key).unwrap());
        assert!(matches!(client.get(&key), Err(Error::NotFound)));
        assert!(!client.remove(&key).unwrap());
        assert_eq!(client.put(&key, &value).unwrap(), Put::Stored);
        assert_eq!(client.put(&key, &bytes(2, len + 1)).unwrap(), Put::AlreadyExists);
        assert!(client.exists(&key).unwrap());
        assert_eq!(client.size(&key).unwrap(), len as u64);
        assert_eq!(client.get(&key).unwrap(), value);
        let view = client.view(&key).unwrap();
        let mut target = vec![0xEE; len + 7];
        assert_eq!(client.get_into(&key, &mut target).unwrap(), len as u64);
        assert_eq!((&target[..len], &target[len..]), (&value[..], &[0xEE; 7][..]));
        if len > 0 {
            let small = client.get_into(&key, &mut target[..len - 1]);
            assert!(matches!(small, Err(Error::TooSmall { need }) if need == len as u64), "{small:?}");
        }
        assert_eq!(client.upsert(&key, &bytes(3, len)).unwrap(), Put::Replaced);
        assert_eq!(client.get(&key).unwrap(), bytes(3, len));
        assert!(client.remove(&key).unwrap());
        assert!(!client.exists(&key).unwrap());
        assert_eq!(client.upsert(&key, &value).unwrap(), Put::Stored);
        // The view is of what was there when it was taken.
        assert_eq!(&view[..], value);
    }
    wait_for("all memory to be free again", || (free(&client) == at_rest).then_some(()));

    // Two other processes: each sees what the other stored, and which of them did.
    for (n, len) in [100, 4000, 70_000, 5 << 20].into_iter().enumerate() {
        let key = format!("b/{len}");
        one.expect(format!("put {key} {n} {len}"), "Stored");
        other.expect(format!("put {key} 77 {len}"), "AlreadyExists");
        other.expect(format!("seed {key}"), &n.to_string());
        other.expect(format!("seed-into {key} {len}"), &n.to_string());
        other.expect(format!("hold {key}"), "held");
        one.expect(format!("remove {key}"), "true");
        // No index answers for what is gone, and a new value is seen at once.
        assert!(other.ask(format!("seed {key}")).contains("nothing is stored under this key"));
        one.expect(format!("put {key} 55 {len}"), "Stored");
        other.expect(format!("seed {key}"), "55");
        other.expect(format!("seed-held {key}"), &n.to_string());
    }

    // Batches, with verdicts in order and a key that comes again.
    let (small, large) = (bytes(1, 100), bytes(2, 100_000));
    let verdicts = client.batch_put(vec![
        ("c/1", (&small).into()),
        ("a/1", (&small).into()),
        ("", (&small).into()),
        ("c/1", (&large).into()),
        ("c/2", (&large).into()),
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
    let got = client.batch_get(&["c/2", "absent", "c/1", "", "c/2"]);
    assert_eq!((got[0].as_ref().unwrap(), got[2].as_ref().unwrap()), (&large, &small));
    assert!(matches!(got[1], Err(Error::NotFound)));
    assert!(matches!(got[3], Err(Error::InvalidKey { .. })));
    assert_eq!(got[4].as_ref().unwrap(), &large);
    let there = client.batch_exists(&["c/2", "absent", "c/1"]);
    assert!(matches!(there[..], [Ok(true), Ok(false), Ok(true)]), "{there:?}");

    // More than the pool in one batch goes in turns.
    let many: Vec<(String, Vec<u8>)> = (0..12).map(|n| (format!("d/{n}"), bytes(n, 9 << 20))).collect();
    let items = many.iter().map(|(key, value)| (key.as_str(), value.into()));
    assert!(client.batch_put(items.collect()).into_iter().all(|put| put.unwrap() == Put::Stored));
    let mut targets: Vec<Vec<u8>> = many.iter().map(|(_, value)| vec![0; value.len()]).collect();
    let items = many.iter().zip(&mut targets).map(|((key, _), target)| (key.as_str(), Target::from(target)));
    assert!(client.batch_get_into(items.collect()).into_iter().all(|got| got.unwrap() == 9 << 20));
    assert!(many.iter().zip(&targets).all(|((_, value), target)| value == target));
    let mut buffers: Vec<_> =
        many.iter().map(|(_, value)| client.device().buffer(value.len()).unwrap()).collect();
    let items = many.iter().zip(&mut buffers).map(|((key, _), buffer)| (key.as_str(), Target::from(buffer)));
    let got = client.batch_get_into(items.collect());
    assert!(got.iter().all(|got| matches!(got, Ok(len) if *len == 9 << 20)), "{got:?}");

    // Tensors, memory of the store, memory of a device.
    let value = bytes(4, 3000 * 24);
    client.put_tensor("t", &TensorRef::new(Dtype::BF16, &[3000, 12], &value).unwrap()).unwrap();
    let tensor = client.get_tensor("t").unwrap();
    assert_eq!((tensor.spec.dtype, &tensor.spec.shape[..]), (Dtype::BF16, &[3000, 12][..]));
    assert_eq!(tensor.bytes, value);
    one.expect("alloc e 9 200000", "reserved");
    one.expect("commit e", "Stored");
    other.expect("seed e", "9");
    one.expect("put-device f 10 300000", "Stored");
    other.expect("seed f", "10");
    let mut buffer = client.device().buffer(300_000).unwrap();
    assert_eq!(client.get_into("f", &mut buffer).unwrap(), 300_000);
    let mut target = vec![0; 300_000];
    buffer.allocation().read(0, &mut target).unwrap();
    assert_eq!(seed_of(&target).unwrap(), 10);
    assert!(counted(&client, "haulier_operations_total{op=\"get\",path=\"ipc\",outcome=\"found\"} ") == 13);
    assert!(counted(&client, "haulier_operations_total{op=\"put\",path=\"ipc\",outcome=\"stored\"} ") == 1);

    // What Mooncake does not have.
    for refused in [client.list("").map(drop), client.pin("e").map(drop)] {
        assert!(matches!(refused, Err(Error::Unsupported { .. })), "{refused:?}");
    }
    assert_eq!(client.remove_by_prefix("d/").unwrap(), 12);
    let elsewhere = daemon.client_with(Options { namespace: "n/1".into(), ..Options::default() });
    assert!(!elsewhere.exists("e").unwrap());
    elsewhere.put("e", &small).unwrap();
    assert_eq!(elsewhere.clear().unwrap(), 1);
    assert!(client.clear().unwrap() > 10);
    assert!(!client.exists("e").unwrap());
}

#[test]
fn nodes_and_engines_of_one_cluster_read_each_others_values_and_see_each_others_removals_at_once() {
    const TEST: &str =
        "nodes_and_engines_of_one_cluster_read_each_others_values_and_see_each_others_removals_at_once";
    if role().is_some() {
        let client = another_host();
        for len in SIZES {
            assert_eq!(client.get(&format!("node/{len}")).unwrap(), bytes(1, len));
            assert_eq!(client.put(&format!("node/{len}"), &bytes(2, len)).unwrap(), Put::AlreadyExists);
            assert_eq!(client.put(&format!("engine/{len}"), &bytes(3, len)).unwrap(), Put::Stored);
        }
        let shape = [3u64, 50];
        client.put_tensor("tensor", &TensorRef::new(Dtype::F32, &shape, &bytes(4, 600)).unwrap()).unwrap();
        sign("stored");
        wait_for_sign("read");
        for len in SIZES {
            assert!(client.remove(&format!("node/{len}")).unwrap());
            assert_eq!(client.upsert(&format!("engine/{len}"), &bytes(5, len)).unwrap(), Put::Replaced);
        }
        sign("removed");
        wait_for_sign("seen");
        for len in SIZES {
            assert!(matches!(client.get(&format!("engine/{len}")), Err(Error::NotFound)));
        }
        let tenant = Options { namespace: "of/many".into(), ..Options::default() };
        let tenant = StoreClient::mooncake(client.device().clone(), &cluster(0), tenant).unwrap();
        assert_eq!(tenant.get("k").unwrap(), b"v");
        return;
    }
    let Some(trial) = Trial::new(TEST, "9.0.0", "tcp") else { return };
    let (first, second) = (daemon(&trial), trial.serve("64MiB", "0").start());
    let (one, two) = (first.client(), second.client());
    for len in SIZES {
        assert_eq!(one.put(&format!("node/{len}"), &bytes(1, len)).unwrap(), Put::Stored);
        assert_eq!(two.put(&format!("node/{len}"), &bytes(9, len)).unwrap(), Put::AlreadyExists);
        assert_eq!(two.get(&format!("node/{len}")).unwrap(), bytes(1, len));
    }
    let tenant = first.client_with(Options { namespace: "of/many".into(), ..Options::default() });
    tenant.put("k", b"v").unwrap();

    let engine = trial.start("engine");
    trial.wait_for("stored");
    for client in [&one, &two] {
        for len in SIZES {
            assert_eq!(client.get(&format!("engine/{len}")).unwrap(), bytes(3, len));
            assert_eq!(*client.view(&format!("engine/{len}")).unwrap(), bytes(3, len)[..]);
        }
        let tensor = client.get_tensor("tensor").unwrap();
        assert_eq!((tensor.spec.dtype, &tensor.spec.shape[..]), (Dtype::F32, &[3, 50][..]));
        assert_eq!(tensor.bytes, bytes(4, 600));
    }
    trial.sign("read");
    trial.wait_for("removed");
    for client in [&one, &two] {
        for len in SIZES {
            let key = format!("node/{len}");
            assert!(!client.exists(&key).unwrap());
            assert!(matches!(client.get(&key), Err(Error::NotFound)));
            assert!(matches!(client.view(&key), Err(Error::NotFound)));
            assert_eq!(client.get(&format!("engine/{len}")).unwrap(), bytes(5, len));
        }
    }
    for len in SIZES {
        assert!(two.remove(&format!("engine/{len}")).unwrap());
        assert!(!one.remove(&format!("engine/{len}")).unwrap());
    }
    trial.sign("seen");
    trial.finish("engine", engine);
}

#[test]
fn of_many_clients_of_two_nodes_that_put_one_key_one_stores_it() {
    const TEST: &str = "of_many_clients_of_two_nodes_that_put_one_key_one_stores_it";
    let Some(trial) = Trial::new(TEST, "9.0.0", "tcp") else { return };
    let (first, second) = (daemon(&trial), trial.serve("64MiB", "0").start());
    let clients: Vec<_> = (0..6).map(|n| if n % 2 == 0 { first.client() } else { second.client() }).collect();
    for round in 0..20 {
        // One that travels in the message, one in a head, one in a body.
        let len = [500, 30_000, 200_000][round % 3];
        let key = format!("k/{round}");
        let verdicts: Vec<Put> = thread::scope(|scope| {
            let put = |(n, client)| {
                let key = &key;
                scope.spawn(move || StoreClient::put(client, key, &marked(n as u64, len)).unwrap())
            };
            let puts: Vec<_> = clients.iter().enumerate().map(put).collect();
            puts.into_iter().map(|put| put.join().unwrap()).collect()
        });
        let winners: Vec<_> = (0..verdicts.len()).filter(|&n| verdicts[n] == Put::Stored).collect();
        assert_eq!(winners.len(), 1, "{verdicts:?}");
        for client in &clients {
            assert_eq!(seed_of(&client.view(&key).unwrap()).unwrap(), winners[0] as u64);
        }
    }
}

#[test]
fn many_light_clients_are_one_client_of_mooncakes_and_memory_is_registered_once() {
    const TEST: &str = "many_light_clients_are_one_client_of_mooncakes_and_memory_is_registered_once";
    let Some(trial) = Trial::new(TEST, "9.0.0", "tcp") else { return };
    let daemon = daemon(&trial);
    let mut actors: Vec<_> = (0..12).map(|_| actor!(daemon.socket())).collect();
    let mut round = |round: u64| {
        for (n, actor) in actors.iter_mut().enumerate() {
            for len in [4000, 70_000, 1 << 20] {
                actor.expect(format!("put {round}/{n}/{len} {n} {len}"), "Stored");
                actor.expect(format!("seed {round}/{n}/{len}"), &n.to_string());
            }
        }
    };
    round(0);
    let client = daemon.client();
    let registered = counted(&client, "haulier_mooncake_registrations_total ");
    let arenas = client.stat().unwrap().arenas;
    // Each client writes memory of its own, and there is the staging memory.
    assert!(registered > 12, "{registered} registrations");
    assert!(registered <= 1 + arenas, "{registered} registrations of {arenas} arenas and the staging memory");
    let sockets = daemon.process.listens_at();
    (1..6).for_each(&mut round);
    assert_eq!(counted(&client, "haulier_mooncake_registrations_total "), registered);
    assert_eq!(daemon.process.listens_at(), sockets);
    // The master hears of each client by itself, every second.
    let active =
        wait_for("the master", || Some(trial.master.figure("master_active_clients ")).filter(|n| *n > 0));
    assert_eq!(active, 1);
}

#[test]
fn a_light_client_that_is_killed_gives_its_memory_back_and_hurts_nobody() {
    const TEST: &str = "a_light_client_that_is_killed_gives_its_memory_back_and_hurts_nobody";
    let Some(trial) = Trial::new(TEST, "9.0.0", "tcp") else { return };
    let daemon = daemon(&trial);
    let client = daemon.client();
    for n in 0..4 {
        client.put(&format!("k/{n}"), &marked(n, 4 << 20)).unwrap();
    }
    let at_rest = || free(&client);
    let before = at_rest();
    let mut victim = actor!(daemon.socket());
    for n in 0..4 {
        victim.expect(format!("hold k/{n}"), "held");
    }
    victim.expect("alloc never 5 6000000", "reserved");
    assert!(at_rest() + (21 << 20) < before);
    let mut stormy = actor!(daemon.socket());
    stormy.tell("storm s/ 3000000");
    assert_eq!(stormy.answer().unwrap(), "raging");
    let mut reader = actor!(daemon.socket());
    for n in 0..20 {
        reader.expect(format!("seed k/{}", n % 4), &(n % 4).to_string());
        if n == 10 {
            victim.process.kill();
            stormy.process.kill();
        }
    }
    wait_for("the memory of the dead", || (at_rest() == before).then_some(()));
    assert!(matches!(client.get("never"), Err(Error::NotFound)));
    for n in 0..16 {
        // Whole or not there at all.
        match client.view(&format!("s/{n}")) {
            Ok(view) => assert!(seed_of(&view).is_ok()),
            Err(e) => assert!(matches!(e, Error::NotFound), "{e}"),
        }
    }
    assert_eq!(client.put("never", &marked(1, 6_000_000)).unwrap(), Put::Stored);
}

#[test]
fn views_that_take_up_the_pool_make_gets_full_until_they_are_let_go() {
    const TEST: &str = "views_that_take_up_the_pool_make_gets_full_until_they_are_let_go";
    let Some(trial) = Trial::new(TEST, "9.0.0", "tcp") else { return };
    let daemon = trial.serve("16MiB", "256MiB").start();
    let (client, other) = (daemon.client(), daemon.client());
    for n in 0..6 {
        client.put(&format!("k/{n}"), &marked(n, 4 << 20)).unwrap();
    }
    let mut views = Vec::new();
    let full = loop {
        match client.view(&format!("k/{}", views.len())) {
            Ok(view) => views.push(view),
            Err(e) => break e,
        }
    };
    assert!((2..=4).contains(&views.len()), "{} views", views.len());
    assert!(matches!(full, Error::Full { .. }), "{full:?}");
    assert!(matches!(other.get("k/5"), Err(Error::Full { .. })));
    let put = other.put("l", &marked(1, 4 << 20));
    assert!(matches!(put, Err(Error::Full { .. })), "{put:?}");
    let large = client.put("m", &vec![1; 17 << 20]);
    assert!(matches!(large, Err(Error::TooLarge { .. })), "{large:?}");
    // What needs no room goes on.
    assert!(other.exists("k/5").unwrap() && !other.exists("l").unwrap());
    for (n, view) in views.iter().enumerate() {
        assert_eq!(seed_of(view).unwrap(), n as u64);
    }
    drop(views);
    wait_for("room", || other.get("k/5").ok().map(|got| assert_eq!(seed_of(&got).unwrap(), 5)));
    assert_eq!(other.put("l", &marked(1, 4 << 20)).unwrap(), Put::Stored);
}

#[test]
fn a_node_that_is_killed_is_replaced_and_no_put_is_told_wrongly() {
    const TEST: &str = "a_node_that_is_killed_is_replaced_and_no_put_is_told_wrongly";
    let Some(trial) = Trial::new(TEST, "9.0.0", "tcp") else { return };
    // The values lie elsewhere, so that they outlive the node.
    let _holder = trial.start_holder("512 MB");
    let serve = || trial.serve("64MiB", "0");
    let mut daemon = Some(serve().start());
    let client = daemon.as_ref().unwrap().client();
    wait_for("the holder", || client.upsert("before", &marked(1, 1 << 20)).ok());
    let view = client.view("before").unwrap();
    for round in 0..3 {
        let written = thread::scope(|scope| {
            let writer = scope.spawn(|| {
                let start = Instant::now();
                let mut verdicts = Vec::new();
                while start.elapsed() < Duration::from_secs(3) {
                    let (n, key) = (verdicts.len(), format!("{round}/{}", verdicts.len()));
                    verdicts.push((n, client.put(&key, &marked(n as u64, [300, 5000, 200_000][n % 3]))));
                }
                verdicts
            });
            thread::sleep(Duration::from_millis(500 + 137 * round));
            daemon = daemon.take().map(|daemon| daemon.restart(serve()));
            writer.join().unwrap()
        });
        assert!(written.len() > 10, "{} puts", written.len());
        for (n, verdict) in written {
            let there = client.get(&format!("{round}/{n}"));
            match verdict {
                Ok(Put::Stored) => assert_eq!(seed_of(&there.unwrap()).unwrap(), n as u64),
                // It may have been stored, and then is whole; it is not said that somebody else's value was there.
                Err(Error::Disconnected { .. }) => {
                    assert!(there.map_or(true, |got| seed_of(&got).unwrap() == n as u64));
                }
                other => panic!("put {n}: {other:?}"),
            }
        }
        assert_eq!(seed_of(&client.get("before").unwrap()).unwrap(), 1);
    }
    // Taken from the first node.
    assert_eq!(seed_of(&view).unwrap(), 1);
}

/// Asks until it is answered with an error; each answer comes within the deadline.
fn until_it_fails<R: std::fmt::Debug>(deadline: Duration, ask: impl Fn() -> haulier::Result<R>) -> Error {
    let start = Instant::now();
    loop {
        let asked = Instant::now();
        let answer = ask();
        let took = asked.elapsed();
        assert!(took < deadline + Duration::from_secs(1), "{answer:?} after {took:?}");
        match answer {
            Err(e) => return e,
            Ok(_) => assert!(start.elapsed() < SLOW, "it does not fail"),
        }
        thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn while_the_master_is_gone_calls_fail_in_time_and_say_why_and_after_its_restart_all_goes_on() {
    const TEST: &str =
        "while_the_master_is_gone_calls_fail_in_time_and_say_why_and_after_its_restart_all_goes_on";
    let Some(mut trial) = Trial::new(TEST, "9.0.0", "tcp") else { return };
    let limit = Duration::from_secs(3);
    let daemon = trial.serve("64MiB", "256MiB").args(["--timeout", "3"]).start();
    let client = daemon.client();
    let value = bytes(1, 100_000);
    client.put("before", &value).unwrap();
    trial.master.kill();
    for (what, e) in [
        ("get", until_it_fails(limit, || client.get("before"))),
        ("put", until_it_fails(limit, || client.put("other", &value))),
        ("size", until_it_fails(limit, || client.size("before"))),
        ("remove", until_it_fails(limit, || client.remove("before"))),
        ("clear", until_it_fails(limit, || client.clear())),
        ("health", until_it_fails(limit, || client.health())),
    ] {
        assert!(matches!(e, Error::Timeout { .. } | Error::Mooncake(_)), "{what}: {e:?}");
        let said = e.to_string();
        assert!(said.to_lowercase().contains("mooncake"), "{what}: {said}");
        if let Error::Mooncake(_) = e {
            assert_eq!(e.label(), "unreachable", "{what}: {said}");
        }
    }
    // The client's own limit counts where it is shorter.
    let impatient = client.with_deadline(Duration::from_millis(300));
    until_it_fails(Duration::from_millis(300), || impatient.get("before"));
    trial.master.restart();
    wait_for("the cluster", || client.upsert("after", &value).ok());
    assert_eq!(client.get("after").unwrap(), value);
    // What the old master knew the new one does not.
    assert!(matches!(client.get("before"), Err(Error::NotFound)));
    assert_eq!(client.put("before", &value).unwrap(), Put::Stored);
    client.health().unwrap();
}

/// Mooncake waits for a holder that does not answer, and has no deadline of its own.
#[test]
fn a_call_of_mooncakes_that_hangs_holds_up_no_other_client() {
    const TEST: &str = "a_call_of_mooncakes_that_hangs_holds_up_no_other_client";
    if role().is_some() {
        let _client =
            StoreClient::mooncake(CpuDevice::open().unwrap(), &cluster(64 * MIB), Options::default())
                .unwrap();
        sign("holds");
        wait_for_sign("done");
        return;
    }
    let Some(trial) = Trial::new(TEST, "9.0.0", "tcp") else { return };
    let holder = trial.start("holder");
    trial.wait_for("holds");
    let daemon = trial.serve("64MiB", "0").args(["--timeout", "4"]).start();
    let client = daemon.client();
    let before = free(&client);
    client.put("k", &marked(7, 8 << 20)).unwrap();
    holder.freeze();
    // More of them than any number of threads that they could share.
    let stuck: Vec<_> = (0..6).map(|_| daemon.client()).collect();
    thread::scope(|scope| {
        let waiting: Vec<_> = stuck
            .iter()
            .map(|client| {
                scope.spawn(move || {
                    let start = Instant::now();
                    let got = client.get("k");
                    assert!(matches!(got, Err(Error::Timeout { .. })), "{got:?}");
                    assert!(start.elapsed() < Duration::from_secs(7), "{:?}", start.elapsed());
                })
            })
            .collect();
        thread::sleep(Duration::from_millis(200));
        assert!(!client.exists("absent").unwrap());
        assert!(matches!(client.get("absent"), Err(Error::NotFound)));
        assert!(!client.remove("absent").unwrap());
        assert!(waiting.iter().all(|get| !get.is_finished()));
    });
    holder.thaw();
    wait_for("the holder", || client.get("k").ok().map(|got| assert_eq!(seed_of(&got).unwrap(), 7)));
    for client in &stuck {
        // One after another: the calls that hung may still be at work.
        wait_for("a view", || client.view("k").ok().map(|view| assert_eq!(seed_of(&view).unwrap(), 7)));
    }
    // Also what was left to the calls that hung.
    wait_for("all memory to be free again", || (free(&client) == before).then_some(()));
    trial.sign("done");
    trial.finish("holder", holder);
}

/// On a transport that needs each of its calls on a thread with the device's context, and all memory registered there. The
/// node is in the test's process, because the command is built without Ascend.
#[test]
fn over_ascend_a_node_registers_on_its_device_and_serves_hosts_and_devices() {
    const TEST: &str = "over_ascend_a_node_registers_on_its_device_and_serves_hosts_and_devices";
    if role().is_some() {
        let place = private_dir();
        let device = AscendDevice::open(LogicalId(1)).unwrap();
        let config = NodeConfig {
            socket: place.path().join("node.sock"),
            store: Store::open(Config { standing: true, ..Config::new(64 * MIB) }, |_, _| {}).unwrap(),
            devices: vec![device],
            metrics: None,
            clients_max: 8,
        };
        let node =
            Node::start_on_mooncake(config, &cluster(256 * MIB), device, Duration::from_secs(30)).unwrap();
        let host = connect(node.socket(), Options::default()).unwrap();
        let npu = StoreClient::connect(device, node.socket(), Options::default()).unwrap();
        for round in 0..3 {
            for len in SIZES {
                let (key, value) = (format!("{round}/{len}"), bytes(round, len));
                assert_eq!(host.put(&key, &value).unwrap(), Put::Stored);
                assert_eq!(host.put(&key, &value).unwrap(), Put::AlreadyExists);
                assert_eq!(*host.view(&key).unwrap(), value[..]);
                if len > 0 {
                    let mut buffer = device.buffer(len).unwrap();
                    assert_eq!(npu.get_into(&key, &mut buffer).unwrap(), len as u64);
                    assert!(npu.remove(&key).unwrap());
                    assert_eq!(npu.put(&key, &buffer).unwrap(), Put::Stored);
                    assert_eq!(host.get(&key).unwrap(), value);
                }
            }
        }
        drop((host, npu));
        node.stop();
        return;
    }
    let Some(trial) = Trial::new(TEST, "9.0.0", "ascend") else { return };
    let calls = trial.run("node").calls;
    let transport = || calls.iter().filter(|call| call.function.starts_with("adxl_"));
    assert!(transport().any(|call| call.function == "adxl_RegisterMem"));
    let elsewhere: Vec<_> =
        transport().filter(|call| call.device.is_some_and(|device| device != 1)).collect();
    assert!(elsewhere.is_empty(), "{elsewhere:?}");
}

/// A safetensors file with one tensor of each of these lengths.
fn safetensors(path: &Path, lens: &[usize]) {
    let (mut about, mut data) = (serde_json::Map::new(), Vec::new());
    for (n, &len) in lens.iter().enumerate() {
        let tensor = serde_json::json!({
            "dtype": "U8", "shape": [len], "data_offsets": [data.len(), data.len() + len]
        });
        about.insert(format!("t{n}"), tensor);
        data.extend(bytes(n as u64, len));
    }
    let header = serde_json::to_vec(&about).unwrap();
    let parts = [&(header.len() as u64).to_le_bytes()[..], &header, &data];
    fs::write(path, parts.concat()).unwrap();
}

#[test]
fn the_command_serves_a_cluster_and_its_clients_need_no_mooncake() {
    const TEST: &str = "the_command_serves_a_cluster_and_its_clients_need_no_mooncake";
    let Some(mut trial) = Trial::new(TEST, "9.0.0", "tcp") else { return };
    let daemon = daemon(&trial);
    let haulier = |args: &[&str], code: i32| -> (String, String) {
        let mut command = Command::new(binary());
        let output: Output = command.arg("--socket").arg(daemon.socket()).args(args).output().unwrap();
        let [said, complained] =
            [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        assert_eq!(output.status.code(), Some(code), "haulier {args:?}\n{said}\n{complained}");
        (said, complained)
    };
    let place = tempfile::tempdir().unwrap();
    let path = |name: &str| place.path().join(name).to_str().unwrap().to_owned();
    let lens = [1, 3000, 65_537, 2_000_000];
    safetensors(place.path().join("in.safetensors").as_path(), &lens);
    let (said, _) = haulier(&["--json", "put", "--prefix", "m", &path("in.safetensors")], 0);
    let said: serde_json::Value = serde_json::from_str(&said).unwrap();
    assert_eq!(said["stored"], 4, "{said}");
    let (said, _) = haulier(&["--json", "put", "--prefix", "m", &path("in.safetensors")], 1);
    let said: serde_json::Value = serde_json::from_str(&said).unwrap();
    assert_eq!((&said["stored"], &said["already_there"]), (&0.into(), &4.into()));
    for (n, &len) in lens.iter().enumerate() {
        haulier(&["get", "--raw", &format!("m/t{n}"), "-o", &path("raw")], 0);
        assert_eq!(fs::read(path("raw")).unwrap(), bytes(n as u64, len));
    }
    haulier(&["get", "m/t3", "m/t0", "-o", &path("out.safetensors")], 0);
    assert!(fs::metadata(path("out.safetensors")).unwrap().len() > 2_000_000);
    let (said, _) = haulier(&["stat"], 0);
    assert!(said.contains("pool"), "{said}");
    let (_, said) = haulier(&["ls"], 1);
    assert!(said.contains("Mooncake's C ABI lists no keys"), "{said}");
    let (said, _) = haulier(&["rm", "m/t0", "absent"], 0);
    assert!(said.contains("1 value removed"), "{said}");
    let (said, _) = haulier(&["rm", "--prefix", "m/"], 0);
    assert!(said.contains("3 values removed"), "{said}");
    let (_, said) = haulier(&["get", "--raw", "m/t1", "-o", &path("raw")], 1);
    assert!(said.contains("nothing is stored under this key"), "{said}");

    // What does not go together, and what is not there, is said.
    let said = |serve: Serve| {
        let ended = serve.try_start().expect_err("it does not serve");
        (ended.status.unwrap().code(), ended.said)
    };
    let (code, text) = said(trial.serve("64MiB", "0").quota("a", "1MiB"));
    assert!(code == Some(2) && text.contains("--mooncake"), "{text}");
    trial.master.kill();
    let (code, text) = said(trial.serve("1MiB", "0").args(["--timeout", "2"]));
    assert!(code == Some(5) && text.contains("does a master listen there?"), "{text}");
}

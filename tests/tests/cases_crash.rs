//! Death with real processes: whoever dies, at whatever point, nothing half-written is seen, nothing is lost for good, and
//! nobody else is held up.

use std::{
    fs,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use backend_cpu::CpuDevice;
use haulier::{Error, Options, Put, StoreClient, hal::DeviceExt};
use haulier_tests::{
    actor,
    process::{Daemon, PATIENCE, Serve, wait_for},
    world::{KIB, MIB, bytes, marked, seed_of},
};
use rustix::process::Signal;

type Client = StoreClient<CpuDevice>;

const MEBI: usize = MIB as usize;

/// A point in time that differs from round to round, and is the same in every run.
fn moment(round: u64) -> Duration {
    let random = u64::from_le_bytes(bytes(round, 8).try_into().unwrap());
    Duration::from_micros(random % 4000)
}

/// Every visible value under `prefix` is whole; how many there were.
fn all_whole(client: &Client, prefix: &str) -> usize {
    let keys = client.list(prefix).unwrap();
    let asked: Vec<&str> = keys.iter().map(|(key, _)| key.as_str()).collect();
    let mut seen = 0;
    for (key, view) in asked.iter().zip(client.batch_view(&asked)) {
        match view {
            Ok(view) => {
                seed_of(&view).unwrap_or_else(|e| panic!("{key} is not whole: {e}"));
                seen += 1;
            }
            // Evicted since it was listed.
            Err(Error::NotFound) => {}
            Err(e) => panic!("{key}: {e}"),
        }
    }
    seen
}

/// The whole pool is there to be had again: one value of nearly all of it finds room.
fn expect_all_of_the_pool(client: &Client, pool: u64) {
    client.clear().unwrap();
    let value = vec![7; (pool - MIB) as usize];
    wait_for("the memory of who died", || match client.put("nearly the whole pool", &value) {
        Ok(Put::Stored) => Some(()),
        Ok(verdict) => panic!("{verdict:?}"),
        Err(Error::Full { .. }) => None,
        Err(e) => panic!("{e}"),
    });
    assert!(client.remove("nearly the whole pool").unwrap());
}

/// P58, P31.
#[test]
fn a_writer_killed_between_reserve_and_commit_leaves_nothing() {
    let daemon = Serve::pool("16MiB").no_evict().start();
    let client = daemon.client();
    for len in [100, 4096, 50_000, 2 * MEBI, 12 * MEBI] {
        let mut writer = actor!(daemon.socket());
        writer.expect(format_args!("alloc k 1 {len}"), "reserved");
        let granted = client.stat().unwrap().granted;
        assert!(granted >= len as u64, "{granted} bytes are granted");
        assert!(!client.exists("k").unwrap() && client.list("").unwrap().is_empty());
        writer.process.kill();
        // Whatever the daemon knows of that death by now, the key is free.
        assert_eq!(client.put("k", b"of another one").unwrap(), Put::Stored);
        assert_eq!(client.get("k").unwrap(), b"of another one");
        expect_all_of_the_pool(&client, 16 * MIB);
    }
}

/// P31: a client that dies is let go of whole, before its first put and after puts of every kind.
#[test]
fn the_daemon_lets_go_of_a_dead_client_whatever_it_had() {
    let daemon = Serve::pool("32MiB").start();
    let client = daemon.client();
    client.put("warm", &bytes(1, 100_000)).unwrap();
    let round = |orders: &[&str], answers: &[&str]| {
        let mut dying = actor!(daemon.socket());
        for (order, answer) in orders.iter().zip(answers) {
            dying.expect(order, answer);
        }
        dying.process.kill();
    };
    let all = || {
        round(&["connect"], &["connected"]);
        round(&["put a 1 100"], &["Stored"]);
        round(
            &["put-device b 2 3000000", "put-device c 3 70000", "hold b", "alloc d 4 50000", "put e 5 50000"],
            &["Stored", "Stored", "held", "reserved", "Stored"],
        );
        client.batch_remove(&["a", "b", "c", "e"]);
    };
    let has = || (daemon.process.descriptors(), daemon.process.mappings());
    all();
    // The first round may set things up that stay, such as arenas; what the others leave adds up, to one for each of
    // them at least.
    let first = settled(has);
    (0..40).for_each(|_| all());
    expect_no_more(&daemon, first, 40);
    assert_eq!(client.get("warm").unwrap(), bytes(1, 100_000));
}

/// What the daemon keeps does not depend on how many clients it had, one after the other or at once: a few arenas that wait
/// for the next ones, with all of the pool's memory ready in them.
#[test]
fn the_daemon_gives_back_what_hundreds_of_clients_at_once_made_it_take() {
    const AT_ONCE: u64 = 64;
    let daemon = Serve::pool("64MiB").start();
    let watcher = daemon.client();
    let wave = |wave: u64| {
        let clients: Vec<_> = (0..AT_ONCE).map(|_| daemon.client()).collect();
        for (n, client) in (wave * AT_ONCE..).zip(&clients) {
            for len in [100, 5000, 100_000, 300_000] {
                assert_eq!(client.put(&format!("{n}/{len}"), &bytes(n, len)).unwrap(), Put::Stored);
            }
        }
        assert!(watcher.stat().unwrap().arenas >= AT_ONCE);
        watcher.clear().unwrap();
        drop(clients);
    };
    let has = || (daemon.process.descriptors(), private_memory(daemon.process.id()) / MIB);
    let before = settled(has);
    for n in 0..6 {
        wave(n);
        let after = settled(has);
        let stat = watcher.stat().unwrap();
        println!("wave {n}: (descriptors, MiB) were {before:?}, are {after:?}; {} arenas", stat.arenas);
        assert!(after.0 <= before.0 + 8 && stat.arenas <= 4, "{before:?} {after:?} {stat:?}");
        assert!(after.1 <= before.1 + 24, "{before:?} {after:?}");
        assert_eq!((stat.populated, stat.largest), (stat.pool, stat.pool), "{stat:?}");
    }
}

/// Bytes that a process has to itself.
fn private_memory(id: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{id}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * KIB
}

/// The allocator maps a few areas more as threads come and go, and the daemon keeps a few arenas for the next clients. What
/// leaks has one a client, and so more than one for each of so many.
const STRAY: usize = 2;

/// Waits until a daemon has hardly more descriptors and mappings than before, for so many clients that are gone.
fn expect_no_more(daemon: &Daemon, before: (usize, usize), clients: usize) {
    let start = Instant::now();
    loop {
        let now = (daemon.process.descriptors(), daemon.process.mappings());
        let few = clients / STRAY;
        if now.0 <= before.0 + few && now.1 <= before.1 + few {
            return;
        }
        assert!(start.elapsed() < PATIENCE, "(descriptors, mappings) were {before:?}, are {now:?}");
        thread::sleep(Duration::from_millis(2));
    }
}

/// What `ask` answers when it answers the same for a while.
fn settled<T: PartialEq>(ask: impl Fn() -> T) -> T {
    let (mut last, mut same) = (ask(), 0);
    wait_for("a steady answer", || {
        let now = ask();
        same = if now == last { same + 1 } else { 0 };
        last = now;
        (same >= 50).then_some(())
    });
    last
}

/// P58: at random points of a put.
#[test]
fn a_writer_killed_at_any_point_of_its_puts_leaves_only_whole_values() {
    const POOL: u64 = 32 * MIB;
    let daemon = Serve::pool_of(POOL).start();
    let client = daemon.client();
    let done = AtomicBool::new(false);
    let seen = thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let client = daemon.client();
            let mut seen = 0;
            while !done.load(Ordering::Relaxed) {
                seen += all_whole(&client, "storm-");
            }
            seen
        });
        for round in 0..50 {
            let len = [100, 4000, 40_000, MEBI, 300_000][round as usize % 5];
            let mut writer = actor!(daemon.socket());
            writer.expect(format_args!("storm storm-{} {len}", round % 7), "raging");
            // Not to wait for anything: to be somewhere else in a put each time.
            thread::sleep(moment(round));
            writer.process.kill();
        }
        done.store(true, Ordering::Relaxed);
        reader.join().unwrap()
    });
    assert!(seen > 0, "the reader saw nothing");
    assert!(all_whole(&client, "storm-") > 0);
    expect_all_of_the_pool(&client, POOL);
}

/// P81.
#[test]
fn a_client_that_dies_disturbs_no_other_one() {
    let daemon = Serve::pool("64MiB").start();
    let client = daemon.client();
    for round in 0..6u64 {
        let mut dying = actor!(daemon.socket());
        dying.expect("put theirs 5 200000", if round == 0 { "Stored" } else { "AlreadyExists" });
        dying.expect("hold theirs", "held");
        dying.expect(format_args!("storm storm-{round} 100000"), "raging");
        for n in 0..60u64 {
            if n == 20 {
                dying.process.kill();
            }
            let (key, value) =
                (format!("mine-{n}"), marked(round * 100 + n, 10 + (n as usize * 7919) % 300_000));
            client.upsert(&key, &value).unwrap();
            assert_eq!(client.view(&key).unwrap()[..], value[..]);
            let mut into = vec![0; value.len()];
            assert_eq!(client.get_into(&key, &mut into).unwrap(), value.len() as u64);
            assert_eq!(into, value);
        }
        assert_eq!(seed_of(&client.view("theirs").unwrap()).unwrap(), 5);
    }
}

/// A frozen client holds up nobody, keeps what it holds, and goes on where it was.
#[test]
fn a_frozen_client_holds_up_nobody_and_goes_on() {
    let daemon = Serve::pool("16MiB").start();
    let client = daemon.client();
    let (mut frozen, mut raging) = (actor!(daemon.socket()), actor!(daemon.socket()));
    frozen.expect("put held 11 3000000", "Stored");
    frozen.expect("hold held", "held");
    frozen.expect("alloc reserved 12 100000", "reserved");
    raging.expect("storm storm- 50000", "raging");
    frozen.process.freeze();
    raging.process.freeze();
    // Orders, and so requests, that it gets to only later.
    frozen.tell("seed held");

    // All that one may want to do with the same keys, and eviction of everything, twice over.
    assert!(client.exists("held").unwrap());
    assert_eq!(client.upsert("held", &marked(99, 100)).unwrap(), Put::Replaced);
    assert!(client.remove("held").unwrap());
    assert_eq!(client.put("held", &marked(13, 500)).unwrap(), Put::Stored);
    client.pin("held").unwrap();
    for n in 0..32 {
        assert_eq!(client.put(&format!("mine-{n}"), &bytes(n, MEBI)).unwrap(), Put::Stored);
    }
    all_whole(&client, "storm-");
    assert_eq!(daemon.client().get("mine-31").unwrap(), bytes(31, MEBI));

    frozen.process.thaw();
    raging.process.thaw();
    assert_eq!(frozen.answer().as_deref(), Some("13"), "it reads what is there now");
    frozen.expect("seed-held held", "11");
    frozen.expect("commit reserved", "Stored");
    assert_eq!(seed_of(&client.view("reserved").unwrap()).unwrap(), 12);
}

/// P77.
#[test]
fn a_thousand_clients_one_after_the_other_leave_nothing_on_either_side() {
    let daemon = Serve::pool("32MiB").start();
    let mut actor = actor!(daemon.socket());
    let few = actor.ask("reopen 10");
    assert!(!few.starts_with("error"), "{few}");
    let has = || (daemon.process.descriptors(), daemon.process.mappings());
    let before = settled(has);
    // Three clients a round.
    let many = actor.ask("reopen 334");
    let counts: Vec<usize> =
        many.split(' ').map(|n| n.parse().unwrap_or_else(|_| panic!("{many}"))).collect();
    let [fds_before, fds_after, maps_before, maps_after] = counts[..] else { panic!("{many}") };
    assert_eq!(fds_after, fds_before, "descriptors of the client's process");
    let limit = maps_before + 1000 / STRAY;
    assert!(maps_after <= limit, "mappings of the client's process: {maps_before}, then {maps_after}");
    expect_no_more(&daemon, before, 1000);
}

/// The daemon's death is not the client's: views stay, and the next call finds the next daemon by itself.
#[test]
fn a_client_outlives_its_daemon_and_finds_the_next_one() {
    let serve = || Serve::pool("32MiB");
    let mut daemon = serve().start();
    let client = daemon.client();
    let mut held = Vec::new();
    for round in 0..3u64 {
        for (n, len) in [100usize, 4096, 200_000, 3 * MEBI].into_iter().enumerate() {
            let (key, value) = (format!("k{n}"), bytes(round * 10 + n as u64, len));
            assert_eq!(
                client.put(&key, &value).unwrap(),
                Put::Stored,
                "the values of the last daemon are gone"
            );
            held.push((client.view(&key).unwrap(), value));
        }
        let orphan = client.alloc(5000).unwrap();
        daemon.process.kill();
        for (view, value) in &held {
            assert_eq!(view[..], value[..], "under a view, without a daemon");
        }
        let alone = client.with_deadline(Duration::from_millis(300));
        for verdict in [
            alone.get("k0").map(drop),
            alone.exists("k0").map(drop),
            alone.put("new", &[1; 100]).map(drop),
            alone.put("new", &[1; 100_000]).map(drop),
            alone.list("").map(drop),
            alone.alloc(10).map(drop),
        ] {
            assert!(matches!(verdict, Err(Error::Unreachable { .. } | Error::Timeout { .. })), "{verdict:?}");
        }
        daemon = daemon.restart(serve());
        assert!(matches!(client.get("k0"), Err(Error::NotFound)));
        assert!(!client.exists("k3").unwrap());
        // Memory of a store that is gone: its bytes are stored or it is refused, and nothing else becomes of it.
        let mut orphan = orphan;
        orphan.fill(0xAB);
        match client.put_allocated("orphan", orphan) {
            Ok(verdict) => {
                assert_eq!(verdict, Put::Stored);
                assert_eq!(client.get("orphan").unwrap(), [0xAB; 5000]);
            }
            Err(e) => assert!(!client.exists("orphan").unwrap(), "{e}"),
        }
        let mut source = client.device().buffer(70_000).unwrap();
        source.allocation_mut().unwrap().write(0, &bytes(round, 70_000)).unwrap();
        assert_eq!(client.put("from device memory", &source).unwrap(), Put::Stored);
        assert_eq!(client.get("from device memory").unwrap(), bytes(round, 70_000));
    }
    for (view, value) in &held {
        assert_eq!(view[..], value[..]);
    }
}

/// A daemon killed while a client puts: each put ends, says what it can, and later ones work.
#[test]
fn a_daemon_killed_at_any_point_of_a_put_leaves_clients_that_work() {
    let serve = || Serve::pool("32MiB");
    let mut daemon = serve().start();
    let clients: Vec<Client> = (0..2).map(|_| daemon.client()).collect();
    let (done, puts) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        for (writer, client) in clients.iter().enumerate() {
            let (done, puts) = (&done, &puts);
            scope.spawn(move || {
                for n in 0u64.. {
                    if done.load(Ordering::Relaxed) {
                        break;
                    }
                    let value = marked(n, [100, 50_000, MEBI][n as usize % 3]);
                    match client.upsert(&format!("w{writer}-{}", n % 8), &value) {
                        Ok(_) => puts.fetch_add(1, Ordering::Relaxed),
                        Err(Error::Unreachable { .. } | Error::Timeout { .. }) => 0,
                        Err(e) => panic!("put {n} of writer {writer}: {e}"),
                    };
                }
            });
        }
        for round in 0..10 {
            let so_far = puts.load(Ordering::Relaxed);
            wait_for("puts to the new daemon", || (puts.load(Ordering::Relaxed) > so_far + 4).then_some(()));
            thread::sleep(moment(round));
            daemon.process.kill();
            daemon = Serve::pool("32MiB").at(daemon.place()).start();
            all_whole(&daemon.client(), "w");
        }
        done.store(true, Ordering::Relaxed);
    });
    for client in &clients {
        assert!(client.upsert("last", &marked(1, 1000)).is_ok());
        all_whole(client, "");
    }
}

#[test]
fn a_daemon_that_is_told_to_end_exits_with_0_and_takes_its_socket_along() {
    for signal in [Signal::TERM, Signal::INT] {
        let mut daemon = Serve::pool("16MiB").start();
        let client = daemon.client();
        client.put("k", &bytes(1, 100_000)).unwrap();
        let view = client.view("k").unwrap();
        assert!(daemon.socket().exists());
        daemon.process.signal(signal);
        let status = daemon.process.wait();
        assert_eq!(status.code(), Some(0), "{signal:?}: {status}\n{}", daemon.log());
        assert!(!daemon.socket().exists(), "{signal:?} left the socket");
        assert_eq!(view[..], bytes(1, 100_000)[..]);
        let verdict = client.with_deadline(Duration::from_millis(200)).get("k");
        assert!(matches!(verdict, Err(Error::Unreachable { .. } | Error::Timeout { .. })), "{verdict:?}");
    }
}

/// Clients that are frozen in the middle of things do not keep a daemon from ending.
#[test]
fn a_daemon_ends_although_a_client_is_frozen() {
    let mut daemon = Serve::pool("16MiB").start();
    let mut frozen = actor!(daemon.socket());
    frozen.expect("storm storm- 50000", "raging");
    frozen.process.freeze();
    daemon.process.signal(Signal::TERM);
    let status = wait_for("the daemon's end", || daemon.process.ended());
    assert_eq!(status.code(), Some(0), "{}", daemon.log());
}

#[test]
fn a_second_daemon_is_refused_with_the_pid_of_the_first() {
    let daemon = Serve::pool("16MiB").start();
    let client = daemon.client();
    client.put("k", b"kept").unwrap();
    let second =
        Serve::pool("16MiB").at(daemon.place()).try_start().expect_err("a second daemon on one socket");
    assert_eq!(second.status.and_then(|status| status.code()), Some(1), "{second}");
    let pid = format!("pid {}", daemon.process.id());
    assert!(second.said.contains(&pid) && second.said.contains("already_running"), "{second}");
    assert_eq!(client.get("k").unwrap(), b"kept");
    assert_eq!(daemon.client().get("k").unwrap(), b"kept");
}

#[test]
fn the_socket_of_a_dead_daemon_is_taken_over() {
    let mut daemon = Serve::pool("16MiB").start();
    for _ in 0..3 {
        daemon.process.kill();
        assert!(fs::symlink_metadata(daemon.socket()).is_ok(), "kill -9 leaves the socket's file");
        daemon = Serve::pool("16MiB").at(daemon.place()).start();
        assert_eq!(daemon.client().put("k", b"x").unwrap(), Put::Stored);
    }
}

/// A full store says so, keeps what it has, and goes on when there is room.
#[test]
fn a_full_store_is_told_and_goes_on_when_there_is_room() {
    let daemon = Serve::pool("8MiB").no_evict().start();
    let client = daemon.client();
    let mut stored = 0;
    let full = loop {
        match client.put(&format!("k{stored}"), &bytes(stored, 500_000)) {
            Ok(Put::Stored) => stored += 1,
            Err(e) => break e,
            Ok(verdict) => panic!("{verdict:?}"),
        }
        assert!(stored < 100);
    };
    assert!(matches!(full, Error::Full { free, largest } if free < MIB && largest <= free), "{full:?}");
    assert!(stored >= 12, "only {stored} values of 500 kB in 8 MiB");
    for n in 0..stored {
        assert_eq!(client.get(&format!("k{n}")).unwrap(), bytes(n, 500_000));
    }
    assert!(matches!(client.alloc(MIB), Err(Error::Full { .. })));
    assert!(matches!(client.upsert("k0", &bytes(7, MEBI)), Err(Error::Full { .. })));
    assert_eq!(client.get("k0").unwrap(), bytes(0, 500_000), "a failed upsert keeps the old value");
    assert!(client.remove("k0").unwrap());
    assert_eq!(client.put("k0", &bytes(9, 500_000)).unwrap(), Put::Stored);
    assert_eq!(client.stat().unwrap().evictions, 0);
}

/// With eviction, but every value held by a reader: full, and not somebody's bytes.
#[test]
fn a_store_whose_every_value_is_held_is_full() {
    let daemon = Serve::pool("8MiB").start();
    let client = daemon.client();
    let mut views = Vec::new();
    let full = loop {
        let n = views.len() as u64;
        match client.put(&format!("k{n}"), &bytes(n, 500_000)) {
            Ok(_) => views.push(client.view(&format!("k{n}")).unwrap()),
            Err(e) => break e,
        }
        assert!(views.len() < 100, "more is held than there is memory");
    };
    assert!(matches!(full, Error::Full { .. }), "{full:?}");
    for (n, view) in views.iter().enumerate() {
        assert_eq!(view[..], bytes(n as u64, 500_000)[..]);
    }
    drop(views);
    wait_for("room", || client.upsert("again", &bytes(1, 500_000)).ok());
}

/// Two daemons on two sockets know nothing of each other.
#[test]
fn a_killed_daemon_leaves_another_one_alone() {
    let (mut one, two): (Daemon, Daemon) = (Serve::pool("16MiB").start(), Serve::pool("16MiB").start());
    let (of_one, of_two) = (one.client(), two.client_with(Options::default()));
    of_one.put("k", b"one").unwrap();
    of_two.put("k", b"two").unwrap();
    one.process.kill();
    assert_eq!(of_two.get("k").unwrap(), b"two");
    assert_eq!(of_two.put("more", &vec![1; 100 * KIB as usize]).unwrap(), Put::Stored);
}

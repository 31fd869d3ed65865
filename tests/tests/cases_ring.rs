//! Messages by the ring, between real processes: whoever is killed, frozen or forked in the middle of a request hurts
//! nobody, and where nothing is said nothing runs.

use std::{
    env, fs,
    os::unix::process::CommandExt,
    process::Command,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use backend_cpu::CpuDevice;
use haulier::{Error, StoreClient};
use haulier_tests::{
    actor,
    node::{AtTheEnd, counter, expect_nothing_is_lost},
    process::{Serve, wait_for},
    world::{MIB, bytes, marked, seed_of},
};

type Client = StoreClient<CpuDevice>;

fn requests(client: &Client, op: &str) -> u64 {
    counter(client, "haulier_request_duration_seconds_count", &[&format!("op=\"{op}\"")])
}

/// Clients in the middle of puts of every kind, inline and by grants; `HAULIER_KILLS` says how many are killed.
#[test]
fn clients_killed_in_the_middle_of_requests_lose_nothing_and_hold_up_nobody() {
    const POOL: u64 = 32 * MIB;
    let kills: u64 = env::var("HAULIER_KILLS").map_or(24, |kills| kills.parse().expect("a number of kills"));
    let daemon = Serve::pool_of(POOL).start();
    let (other, done) = (daemon.client(), AtomicBool::new(false));
    thread::scope(|scope| {
        let _end = AtTheEnd(|| done.store(true, Ordering::Relaxed));
        let other = scope.spawn(|| {
            let mut calls = 0u64;
            while !done.load(Ordering::Relaxed) {
                let value = marked(calls, [100, 3000, 70_000][calls as usize % 3]);
                let start = Instant::now();
                other.upsert("other", &value).unwrap();
                assert_eq!(other.get("other").unwrap(), value);
                assert!(start.elapsed() < Duration::from_secs(5), "held up for {:?}", start.elapsed());
                calls += 1;
            }
            calls
        });
        for round in 0..kills.div_ceil(3) {
            let mut dying: Vec<_> = [100, 5000, 50_000].map(|len| (len, actor!(daemon.socket()))).into();
            for (len, actor) in &mut dying {
                actor.expect(format_args!("storm storm{len}- {len}"), "raging");
            }
            for (len, mut actor) in dying {
                let random = u64::from_le_bytes(bytes(round ^ len, 8).try_into().unwrap());
                thread::sleep(Duration::from_micros(random % 3000));
                actor.process.kill();
                assert_eq!(actor.answer(), None, "it ended by itself");
            }
        }
        done.store(true, Ordering::Relaxed);
        let calls = other.join().unwrap();
        assert!(calls > kills, "the other client did next to nothing: {calls}");
    });
    let client = daemon.client();
    for len in [100, 5000, 50_000] {
        // How many depends on how busy the machine is.
        let keys = client.list(&format!("storm{len}-")).unwrap();
        assert!(!keys.is_empty(), "no value of {len} bytes was stored");
        for (key, _) in keys {
            seed_of(&client.get(&key).unwrap()).unwrap_or_else(|e| panic!("{key} is not whole: {e}"));
        }
    }
    drop((client, other));
    expect_nothing_is_lost(&daemon, POOL);
}

#[test]
fn clients_frozen_in_the_middle_of_requests_hold_up_nobody() {
    const POOL: u64 = 32 * MIB;
    let daemon = Serve::pool_of(POOL).start();
    let client = daemon.client();
    for round in 0..4 {
        let mut frozen: Vec<_> = [100, 50_000].map(|len| (len, actor!(daemon.socket()))).into();
        for (len, actor) in &mut frozen {
            actor.expect(format_args!("storm storm{len}- {len}"), "raging");
            thread::sleep(Duration::from_micros(700 * round));
            actor.process.freeze();
        }
        let start = Instant::now();
        for n in 0..100u64 {
            let (key, value) = (format!("k{}", n % 7), marked(n, [100, 3000, 70_000][n as usize % 3]));
            client.upsert(&key, &value).unwrap();
            assert_eq!(client.get(&key).unwrap(), value);
        }
        assert!(start.elapsed() < Duration::from_secs(10), "held up for {:?}", start.elapsed());
        for (_, actor) in &frozen {
            actor.process.thaw();
        }
        // They go on where they were.
        let storms = || counter(&client, "haulier_operations_total", &["op=\"put\""]);
        let before = storms();
        wait_for("puts of who was frozen", || (storms() > before + 20).then_some(()));
    }
    drop(client);
    expect_nothing_is_lost(&daemon, POOL);
}

/// Time on a processor, and how often its threads went to sleep.
fn activity(id: u32) -> (u64, u64) {
    let stat = fs::read_to_string(format!("/proc/{id}/stat")).unwrap();
    // The name, in brackets, may have blanks.
    let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    let ticks = fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
    let switches = fs::read_dir(format!("/proc/{id}/task")).unwrap().map(|task| {
        let status = fs::read_to_string(task.unwrap().path().join("status")).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        line.unwrap().trim().parse::<u64>().unwrap()
    });
    (ticks, switches.sum())
}

#[test]
fn where_nothing_is_said_nothing_runs() {
    let daemon = Serve::pool("16MiB").start();
    let mut clients: Vec<_> = (0..3).map(|_| actor!(daemon.socket())).collect();
    for (n, client) in clients.iter_mut().enumerate() {
        client.expect(format_args!("put small{n} 1 100"), "Stored");
        client.expect(format_args!("put large{n} 2 100000"), "Stored");
        client.expect(format_args!("hold large{n}"), "held");
    }
    let all: Vec<u32> =
        clients.iter().map(|client| client.process.id()).chain([daemon.process.id()]).collect();
    let now = || all.iter().map(|&id| activity(id)).collect::<Vec<_>>();
    thread::sleep(Duration::from_millis(300));
    let before = now();
    thread::sleep(Duration::from_secs(1));
    assert_eq!(now(), before, "(ticks, switches) of three clients and the daemon");
    // And they wake up again.
    clients[0].expect("put more 3 50000", "Stored");
    clients[1].expect("seed more", "3");
}

#[test]
fn a_put_of_the_same_size_as_the_last_one_is_one_message() {
    let daemon = Serve::pool("16MiB").start();
    let (client, watcher) = (daemon.client(), daemon.client());
    for len in [200, 4096, 50_000] {
        client.upsert("warm", &bytes(0, len)).unwrap();
        let messages = || ["reserve", "put", "abandon", "commit"].map(|op| requests(&watcher, op));
        let before = messages().iter().sum::<u64>();
        (0..50).for_each(|n| assert!(client.upsert(&format!("k{n}"), &bytes(n, len)).is_ok()));
        let after = messages().iter().sum::<u64>();
        assert_eq!(after - before, 50, "messages for 50 puts of {len} bytes: {:?}", messages());
    }
}

/// Its parent's socket and memory are there in the child, but not its to use.
#[test]
fn a_forked_child_says_nothing_by_its_parents_ring() {
    let daemon = Serve::pool("16MiB").start();
    let (client, watcher) = (daemon.client(), daemon.client());
    client.put("k", &bytes(1, 50_000)).unwrap();
    let mut buffer = Some(client.alloc(50_000).unwrap());
    let granted = watcher.stat().unwrap().granted;
    let mut command = Command::new("true");
    let inherited = client.clone();
    let forked = move || {
        drop(buffer.take());
        for outcome in [inherited.put("child", &[1; 100]).map(drop), inherited.stat().map(drop)] {
            if !matches!(outcome, Err(Error::ForkedProcess { .. })) {
                return Err(std::io::Error::other("the child used it"));
            }
        }
        Ok(())
    };
    // SAFETY: the child runs `forked` alone, which uses no lock that another thread of this test may have.
    unsafe { command.pre_exec(forked) };
    assert!(command.status().unwrap().success());
    assert_eq!(watcher.stat().unwrap().granted, granted);
    for n in 0..100u64 {
        assert!(client.upsert("k", &bytes(n, 50_000)).is_ok());
        assert_eq!(client.get("k").unwrap(), bytes(n, 50_000));
    }
    assert!(!client.exists("child").unwrap());
    drop(command);
}

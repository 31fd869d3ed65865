//! Reads without a question: a client that finds a value in the node's shared index asks nobody, and whatever becomes of
//! the value, of the client, or of the daemon meanwhile, no wrong byte is read and no memory is lost.

use std::{
    env,
    os::unix::process::CommandExt,
    process::Command,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use haulier::{Error, Put};
use haulier_tests::{
    actor,
    node::{AtTheEnd, counter, expect_nothing_is_lost},
    process::{Serve, wait_for},
    world::{KIB, MIB, bytes, marked, seed_of},
};

const MEBI: usize = MIB as usize;
const KIBI: usize = KIB as usize;

/// The one who would have to answer is stopped.
#[test]
fn a_value_is_read_while_the_daemon_cannot_answer() {
    let daemon = Serve::pool("64MiB").start();
    let client = daemon.client();
    let values: Vec<_> = [0, 1, 100, 4096, 300_000, 9 * MEBI].into_iter().enumerate().collect();
    let key = |n: usize| format!("k{n}");
    for &(n, len) in &values {
        client.put(&key(n), &bytes(n as u64, len)).unwrap();
    }
    // Its arena is mapped by the first look.
    values.iter().for_each(|&(n, _)| drop(client.view(&key(n)).unwrap()));
    let mut target = vec![0; 9 * MEBI];
    client.get_into("k5", &mut target).unwrap();
    daemon.process.freeze();
    let hasty = client.with_deadline(Duration::from_secs(5));
    for &(n, len) in &values {
        assert_eq!(hasty.view(&key(n)).unwrap()[..], bytes(n as u64, len)[..]);
        assert_eq!(hasty.get_into(&key(n), &mut target).unwrap(), len as u64);
        assert_eq!(target[..len], bytes(n as u64, len));
    }
    let absent = client.with_deadline(Duration::from_millis(50));
    assert!(matches!(absent.view("absent"), Err(Error::Timeout { .. })), "that must be asked for");
    daemon.process.thaw();
    assert!(matches!(client.view("absent"), Err(Error::NotFound)));
}

/// Its put may still be carried out, and one client's calls are answered in their order.
#[test]
fn a_read_does_not_overtake_a_put_of_the_same_client_that_timed_out() {
    let daemon = Serve::pool("64MiB").start();
    let client = daemon.client();
    for round in 0..20 {
        client.upsert("key", b"old").unwrap();
        assert_eq!(client.view("key").unwrap()[..], *b"old");
        daemon.process.freeze();
        let late = client.with_deadline(Duration::from_millis(20)).upsert("key", b"new");
        assert!(matches!(late, Err(Error::Timeout { .. })), "{late:?}");
        daemon.process.thaw();
        assert_eq!(client.view("key").unwrap()[..], *b"new", "round {round}");
    }
}

/// What is read without a question is counted all the same, also that of a client that has left.
#[test]
fn reads_without_a_question_are_counted() {
    let daemon = Serve::pool("16MiB").start();
    let (client, watcher) = (daemon.client(), daemon.client());
    client.put("k", &bytes(1, 1000)).unwrap();
    let found = ["op=\"get\"", "path=\"shared\"", "outcome=\"found\""];
    let asked = || counter(&watcher, "haulier_request_duration_seconds_count", &["op=\"get\""]);
    (0..10).for_each(|_| drop(client.get("k").unwrap()));
    assert_eq!(counter(&watcher, "haulier_operations_total", &found), 10);
    assert_eq!(
        counter(&watcher, "haulier_values_bytes_total", &["direction=\"out\"", "path=\"shared\""]),
        10_000
    );
    let held = client.view("k").unwrap();
    assert_eq!(counter(&watcher, "haulier_holds", &[]), 1);
    drop(held);
    assert_eq!(asked(), 0);
    client.close();
    drop(client);
    wait_for("the end of a session", || (counter(&watcher, "haulier_clients", &[]) == 1).then_some(()));
    assert_eq!(counter(&watcher, "haulier_operations_total", &found), 11);
}

/// Removed, replaced, evicted: the bytes under a view stay, and their memory comes back after it.
#[test]
fn a_hold_that_nobody_was_asked_for_outlives_the_key() {
    const POOL: u64 = 16 * MIB;
    let daemon = Serve::pool_of(POOL).start();
    let (client, other) = (daemon.client(), daemon.client());
    let sizes = [100, 4 * KIBI, 100 * KIBI, MEBI];
    for (n, len) in sizes.into_iter().enumerate() {
        for end in ["removed", "replaced", "evicted"] {
            client.put(&format!("{end}{n}"), &bytes(n as u64, len)).unwrap();
        }
    }
    let views: Vec<_> = (0..sizes.len())
        .flat_map(|n| {
            ["removed", "replaced", "evicted"].map(|end| (n, client.view(&format!("{end}{n}")).unwrap()))
        })
        .collect();
    for n in 0..sizes.len() {
        assert!(other.remove(&format!("removed{n}")).unwrap());
        assert_eq!(other.upsert(&format!("replaced{n}"), &[1; 5000]).unwrap(), Put::Replaced);
    }
    let intact = || {
        for (n, view) in &views {
            assert_eq!(view[..], bytes(*n as u64, sizes[*n])[..]);
        }
    };
    // More than the pool, so that all free memory is used anew.
    for n in 0..40 {
        other.put(&format!("flood{n}"), &bytes(100 + n, MEBI)).unwrap();
        intact();
    }
    assert_eq!(counter(&other, "haulier_holds", &[]), views.len() as u64);
    other.clear().unwrap();
    assert!(other.stat().unwrap().used >= 3 * (MIB + 100 * KIB), "what is read is still counted");
    intact();
    drop(views);
    drop((client, other));
    expect_nothing_is_lost(&daemon, POOL);
}

/// By several threads of one client, and more than it can hold by itself, so that it asks for the last ones.
#[test]
fn thousands_of_values_held_at_once_are_all_left_alone() {
    const POOL: u64 = 16 * MIB;
    const THREADS: u64 = 4;
    const EACH: u64 = 1250;
    let daemon = Serve::pool_of(POOL).start();
    let (client, other) = (daemon.client(), daemon.client());
    let fill = |round: u64| {
        let values: Vec<_> = (0..THREADS * EACH).map(|n| (format!("k{n}"), marked(round + n, 100))).collect();
        let items = values.iter().map(|(key, value)| (key.as_str(), value[..].into())).collect();
        other.batch_put(items).into_iter().for_each(|slot| assert_eq!(slot.unwrap(), Put::Stored));
    };
    fill(0);
    let views: Vec<_> = thread::scope(|scope| {
        let view = |n| (n, client.view(&format!("k{n}")).unwrap());
        let threads: Vec<_> = (0..THREADS)
            .map(|thread| {
                scope.spawn(move || (thread * EACH..(thread + 1) * EACH).map(view).collect::<Vec<_>>())
            })
            .collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(counter(&other, "haulier_holds", &[]), THREADS * EACH);
    for round in 1..=3 {
        other.clear().unwrap();
        fill(round * THREADS * EACH);
        for (n, view) in &views {
            assert_eq!(seed_of(view).unwrap(), *n, "in round {round}");
        }
    }
    drop(views);
    drop((client, other));
    expect_nothing_is_lost(&daemon, POOL);
}

/// A value that is removed and stored anew, again and again, by somebody else: no reader sees an old one after a new one.
#[test]
fn what_is_read_is_never_older_than_what_was_stored_before() {
    let daemon = Serve::pool("16MiB").start();
    let (client, writer) = (daemon.client(), daemon.client());
    for round in 0..3000u64 {
        let value = round.to_le_bytes();
        match round % 3 {
            0 => assert!(writer.upsert("k", &value).is_ok()),
            1 => {
                writer.remove("k").unwrap();
                assert!(matches!(client.view("k"), Err(Error::NotFound)), "removed in round {round}");
                assert_eq!(writer.put("k", &value).unwrap(), Put::Stored);
            }
            _ => {
                writer.clear().unwrap();
                assert!(matches!(client.view("k"), Err(Error::NotFound)), "cleared in round {round}");
                assert_eq!(writer.put("k", &value).unwrap(), Put::Stored);
            }
        }
        assert_eq!(client.view("k").unwrap()[..], value, "round {round}");
    }
}

/// The daemon is killed and another one takes its place; the client has no other sign of it than the life word.
#[test]
fn no_value_of_a_dead_daemon_is_read_once_another_one_serves() {
    let serve = || Serve::pool("16MiB");
    let mut daemon = serve().start();
    let client = daemon.client();
    for round in 0..20u64 {
        assert_eq!(daemon.client().put("k", &round.to_le_bytes()).unwrap(), Put::Stored);
        let view = client.view("k").unwrap();
        assert_eq!(view[..], round.to_le_bytes());
        daemon.process.kill();
        daemon = daemon.restart(serve());
        if round % 2 == 0 {
            assert_eq!(daemon.client().put("k", b"of the next one").unwrap(), Put::Stored);
            assert_eq!(client.view("k").unwrap()[..], *b"of the next one");
            daemon.client().clear().unwrap();
        } else {
            assert!(matches!(client.view("k"), Err(Error::NotFound)), "round {round}");
        }
        assert_eq!(view[..], round.to_le_bytes());
    }
}

/// Readers that keep views and check every byte are killed at any point, while others put, replace and remove in a pool
/// that is too small for all. `HAULIER_KILLS` says how many.
#[test]
fn readers_killed_at_any_point_under_load_leave_no_lost_space_no_stuck_key_and_no_wrong_byte() {
    const POOL: u64 = 4 * MIB;
    const KEYS: u64 = 160;
    let kills: u64 = env::var("HAULIER_KILLS").map_or(40, |kills| kills.parse().expect("a number of kills"));
    let daemon = Serve::pool_of(POOL).start();
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        // However this ends, the writers do not go on for ever.
        let _end = AtTheEnd(|| done.store(true, Ordering::Relaxed));
        let writers: Vec<_> = (0..2u64)
            .map(|writer| {
                let (client, done) = (daemon.client(), &done);
                scope.spawn(move || {
                    let values: Vec<_> =
                        [64, 500, 4000, 20_000, 60_000, 120_000].into_iter().enumerate().collect();
                    let values: Vec<_> =
                        values.into_iter().map(|(n, len)| marked(n as u64 * 2 + writer, len)).collect();
                    let mut n = writer;
                    let mut written = 0u64;
                    while !done.load(Ordering::Relaxed) {
                        n = n.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                        let (key, value) =
                            (format!("k{}", (n >> 33) % KEYS), &values[(n >> 40) as usize % values.len()]);
                        let outcome = match (n >> 50) % 4 {
                            0 => client.put(&key, value).map(drop),
                            1 => client.remove(&key).map(drop),
                            _ => client.upsert(&key, value).map(drop),
                        };
                        match outcome {
                            // Full of what readers hold.
                            Ok(()) | Err(Error::Full { .. }) => written += 1,
                            Err(e) => panic!("{e}"),
                        }
                    }
                    written
                })
            })
            .collect();
        let mut others = actor!(daemon.socket());
        others.tell(format_args!("read-storm k {KEYS} 7"));
        assert_eq!(others.answer().as_deref(), Some("raging"));
        let mut round = 0;
        while round < kills {
            let mut readers: Vec<_> = (0..4.min(kills - round)).map(|_| actor!(daemon.socket())).collect();
            for (n, reader) in readers.iter_mut().enumerate() {
                reader.tell(format_args!("read-storm k {KEYS} {}", round + n as u64));
            }
            for reader in &mut readers {
                assert_eq!(reader.answer().as_deref(), Some("raging"));
            }
            for (n, mut reader) in readers.into_iter().enumerate() {
                let random = u64::from_le_bytes(bytes(round + n as u64, 8).try_into().unwrap());
                thread::sleep(Duration::from_micros(random % 10_000));
                reader.process.kill();
                if let Some(answer) = reader.answer() {
                    panic!("reader {}: {answer}", round + n as u64);
                }
                round += 1;
            }
        }
        done.store(true, Ordering::Relaxed);
        let written: u64 = writers.into_iter().map(|writer| writer.join().unwrap()).sum();
        // It would have said what was wrong.
        others.process.kill();
        assert_eq!(others.answer(), None);
        assert!(written > kills, "the writers did next to nothing: {written}");
    });
    let client = daemon.client();
    // The reads were of the kind that this is about.
    let (read, asked) = (
        counter(&client, "haulier_operations_total", &["op=\"get\"", "path=\"shared\"", "outcome=\"found\""]),
        counter(&client, "haulier_request_duration_seconds_count", &["op=\"get\""]),
    );
    assert!(read > kills, "{read} reads found something, {asked} were asked for");
    assert!(client.stat().unwrap().evictions > 0, "there was room for everything");
    for key in (0..KEYS).map(|n| format!("k{n}")) {
        match client.get(&key) {
            Ok(value) => drop(seed_of(&value).unwrap_or_else(|e| panic!("{key}: {e}"))),
            Err(Error::NotFound) => {}
            Err(e) => panic!("{key}: {e}"),
        }
        client.remove(&key).unwrap();
        assert_eq!(client.put(&key, &[1; 100]).unwrap(), Put::Stored, "{key} is stuck");
    }
    drop(client);
    expect_nothing_is_lost(&daemon, POOL);
}

/// A child of a fork has its parent's views, and letting go of them there lets go of nothing.
#[test]
fn a_forked_child_lets_go_of_nothing_of_its_parents() {
    let daemon = Serve::pool("16MiB").start();
    let (client, watcher) = (daemon.client(), daemon.client());
    client.put("k", &bytes(1, 50_000)).unwrap();
    let mut inherited = Some(client.view("k").unwrap());
    let mut command = Command::new("true");
    let forked = move || {
        drop(inherited.take());
        Ok(())
    };
    // SAFETY: the child runs `forked` alone, which stores nothing but what is its own, and glibc makes its allocator usable.
    unsafe { command.pre_exec(forked) };
    assert!(command.status().unwrap().success());
    assert_eq!(counter(&watcher, "haulier_holds", &[]), 1);
    drop(command);
    assert_eq!(counter(&watcher, "haulier_holds", &[]), 0);
    assert_eq!(client.get("k").unwrap(), bytes(1, 50_000));
}

/// The daemon does not see the reads, but eviction does.
#[test]
fn what_is_read_without_a_question_is_evicted_after_what_is_not() {
    let daemon = Serve::pool("8MiB").start();
    let (client, writer) = (daemon.client(), daemon.client());
    writer.put("read", &bytes(1, 100_000)).unwrap();
    writer.put("unread", &bytes(2, 100_000)).unwrap();
    drop(client.view("read").unwrap());
    for n in 0..200u64 {
        writer.put(&format!("flood{n}"), &bytes(n, 500_000)).unwrap();
        assert_eq!(client.view("read").unwrap()[..], bytes(1, 100_000)[..], "after {n}");
    }
    assert!(!writer.exists("unread").unwrap());
    // Its one read since the last eviction is good for one round more.
    for n in 200..240u64 {
        writer.put(&format!("flood{n}"), &bytes(n, 500_000)).unwrap();
    }
    assert!(!writer.exists("read").unwrap(), "what nobody reads any more stays");
}

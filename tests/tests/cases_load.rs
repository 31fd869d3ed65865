//! Many clients at once: whoever of them is killed or frozen, and whatever it was doing, the others go on with the right
//! bytes, and nothing of it is left.

use std::{
    env, fs,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use haulier::{Error, Put};
use haulier_tests::{
    actor,
    mix::{Mix, Plan, version_of},
    node::{AtTheEnd, alone},
    process::{Actor, Daemon, Process, Serve, private_dir, processes_that_name, wait_for},
    world::{MIB, bytes, marked, seed_of},
};

fn random(seed: u64) -> u64 {
    u64::from_le_bytes(bytes(seed, 8).try_into().unwrap())
}

fn threads(process: &Process) -> usize {
    fs::read_dir(format!("/proc/{}/task", process.id())).unwrap().count()
}

/// What a daemon has of the system's: descriptors, mappings, threads.
fn belongings(daemon: &Daemon) -> [usize; 3] {
    [daemon.process.descriptors(), daemon.process.mappings(), threads(&daemon.process)]
}

/// Bytes that are used, granted and free, and the largest value that there is room for, when everybody has left and all
/// keys are removed.
fn empty(daemon: &Daemon) -> [u64; 4] {
    let client = alone(daemon);
    client.clear().unwrap();
    let stat = client.stat().unwrap();
    [stat.used, stat.granted, stat.free, stat.largest]
}

const KEYS: u64 = 48;
const SHARED: &str = "shared-";

fn plan(own: u64) -> Plan {
    Plan { shared: SHARED.into(), keys: KEYS, own: format!("own{own}-"), seed: random(own), most: 60_000 }
}

/// Lets an actor do as a [`Mix`] does, and say so after so many calls.
fn tell(actor: &mut Actor, plan: &Plan, calls: u64, time: Duration) {
    let Plan { shared, keys, own, seed, most } = plan;
    actor.tell(format_args!("mix {own} {seed} {shared} {keys} {most} {calls} {}", time.as_millis()));
}

/// Longer than any test.
const FOR_EVER: Duration = Duration::from_secs(3600);

/// So many clients are killed at once.
const WAVE: u64 = 8;
/// The number of the first of them.
const DYING: u64 = 1000;

/// Kills clients that store, replace, read, keep views, allocate and remove, each at another point of that; every other
/// wave maybe before it is connected. How many of them have left values of their own, which are whole.
fn kill(daemon: &Daemon, first: u64, count: u64) -> usize {
    let mut dying: Vec<_> = (first..first + count).map(|n| (n, actor!(daemon.socket()))).collect();
    for (n, actor) in &mut dying {
        tell(actor, &plan(DYING + *n), random(*n) % 24, FOR_EVER);
    }
    if first.is_multiple_of(2 * WAVE) {
        for (n, actor) in &mut dying {
            assert_eq!(actor.answer().as_deref(), Some("raging"), "client {n}");
        }
    }
    for (n, mut actor) in dying {
        // Not to wait for anything: to be somewhere else each time.
        thread::sleep(Duration::from_micros(random(n) % 3000));
        actor.process.kill();
        while let Some(answer) = actor.answer() {
            assert_eq!(answer, "raging", "client {n}");
        }
    }
    let client = daemon.client();
    let left = (first..first + count).filter(|n| {
        let keys = client.list(&plan(DYING + n).own).unwrap();
        for (key, _) in &keys {
            match client.view(key) {
                Ok(view) => drop(version_of(key, &view).unwrap()),
                Err(Error::NotFound) => {}
                Err(e) => panic!("{key}: {e}"),
            }
        }
        !keys.is_empty()
    });
    left.count()
}

/// Writers, readers and removers, some of whose memory the daemon opens, in a pool that is too small for all of their
/// values. `HAULIER_KILLS` says how many are killed.
#[test]
fn clients_killed_at_any_point_under_load_leave_no_lost_space_no_stuck_key_and_no_wrong_byte() {
    const POOL: u64 = 10 * MIB;
    let kills: u64 =
        env::var("HAULIER_KILLS").map_or(1000, |kills| kills.parse().expect("a number of kills"));
    let daemon = Serve::pool_of(POOL).start();
    let fresh = empty(&daemon);
    // What is set up once and stays.
    kill(&daemon, 2 * kills, 2 * WAVE);
    let before = (alone(&daemon), belongings(&daemon)).1;

    let done = AtomicBool::new(false);
    let mut other = actor!(daemon.socket());
    tell(&mut other, &plan(0), 0, FOR_EVER);
    let start = Instant::now();
    thread::scope(|scope| {
        // However this ends, the others do not go on for ever.
        let _end = AtTheEnd(|| done.store(true, Ordering::Relaxed));
        let living = [1, 2].map(|own| {
            let (mut mix, done) = (Mix::new(daemon.client(), plan(own)), &done);
            scope.spawn(move || {
                let mut steps = 0u64;
                while !done.load(Ordering::Relaxed) {
                    let start = Instant::now();
                    mix.step().unwrap_or_else(|e| panic!("client {own}, call {steps}: {e}"));
                    let time = start.elapsed();
                    assert!(time < Duration::from_secs(10), "client {own} was held up for {time:?}");
                    steps += 1;
                }
                steps
            })
        });
        let (mut killed, mut wrote) = (0, 0);
        while killed < kills && living.iter().all(|thread| !thread.is_finished()) {
            let count = WAVE.min(kills - killed);
            wrote += kill(&daemon, killed, count);
            killed += count;
        }
        done.store(true, Ordering::Relaxed);
        for thread in living {
            let steps = thread.join().unwrap();
            assert!(steps > kills, "somebody who lived did next to nothing: {steps} calls");
        }
        assert!(wrote > kills as usize / 8, "of {kills} clients only {wrote} came to write");
        println!("killed {kills} clients in {:?}; {wrote} of them had stored values", start.elapsed());
    });
    other.process.kill();
    assert_eq!(other.answer().as_deref(), Some("raging"));
    assert_eq!(other.answer(), None, "what another process found");

    let checker = alone(&daemon);
    assert!(checker.stat().unwrap().evictions > 0, "there was room for everything");
    for key in (0..KEYS).map(|n| format!("{SHARED}{n}")) {
        match checker.get(&key) {
            Ok(value) => drop(version_of(&key, &value).unwrap()),
            Err(Error::NotFound) => {}
            Err(e) => panic!("{key}: {e}"),
        }
        checker.remove(&key).unwrap();
        assert_eq!(checker.put(&key, &bytes(1, 5000)).unwrap(), Put::Stored, "{key} is stuck");
        assert_eq!(checker.view(&key).unwrap()[..], bytes(1, 5000)[..]);
        assert!(checker.remove(&key).unwrap(), "{key} is stuck");
    }
    drop(checker);
    assert_eq!(empty(&daemon), fresh, "used, granted, free, largest");
    let whole = vec![7; (POOL - MIB / 2) as usize];
    assert_eq!(daemon.client().put("nearly the whole pool", &whole).unwrap(), Put::Stored);
    // Whatever a client leaves for good is there a thousand times.
    let few = kills as usize / 20;
    wait_for("the end of what the dead had", || {
        let now = belongings(&daemon);
        now.iter().zip(&before).all(|(now, before)| *now <= before + few).then_some(())
    });
    assert!(!daemon.log().contains("panicked"), "{}", daemon.log());
}

/// No clock is looked at: each gets some of what there is, and nobody gets another one's bytes.
#[test]
fn of_32_clients_at_once_each_gets_its_share_and_the_right_bytes() {
    const CLIENTS: u64 = 32;
    let daemon = Serve::pool("64MiB").start();
    let mut clients: Vec<_> = (0..CLIENTS).map(|_| actor!(daemon.socket())).collect();
    clients.iter_mut().for_each(|client| client.expect("connect", "connected"));
    let all = Duration::from_secs(4);
    for (n, client) in clients.iter_mut().enumerate() {
        tell(client, &Plan { most: 6000, ..plan(n as u64) }, 0, all);
    }
    let calls: Vec<u64> = clients
        .iter_mut()
        .map(|client| {
            assert_eq!(client.answer().as_deref(), Some("raging"));
            let answer = client.answer().expect("an answer");
            answer.parse().unwrap_or_else(|_| panic!("{answer}"))
        })
        .collect();
    let (least, fair) = (*calls.iter().min().unwrap(), calls.iter().sum::<u64>() / CLIENTS);
    assert!(fair > 0 && least >= fair / 6, "{fair} calls are a fair share, and these were made: {calls:?}");
}

/// Views that nobody asked for and views that were, and a copy that is going on, while everything else is evicted.
#[test]
fn what_a_frozen_client_reads_stays_while_all_else_is_evicted() {
    const POOL: u64 = 8 * MIB;
    const HELD: usize = 6;
    let daemon = Serve::pool_of(POOL).start();
    let fresh = empty(&daemon);
    let client = daemon.client();
    let (mut holder, mut reader) = (actor!(daemon.socket()), actor!(daemon.socket()));
    let lens = [100, 3000, 4096, 40_000, 300_000, 500_000];
    for (n, len) in lens.into_iter().enumerate() {
        holder.expect(format_args!("put held{n} {n} {len}"), "Stored");
        holder.expect(format_args!("hold held{n}"), "held");
    }
    for n in 0..20u64 {
        client.put(&format!("k{n}"), &marked(n, 20_000)).unwrap();
    }
    reader.tell("read-storm k 20 1");
    assert_eq!(reader.answer().as_deref(), Some("raging"));
    for round in 0..6u64 {
        thread::sleep(Duration::from_micros(random(round) % 3000));
        holder.process.freeze();
        reader.process.freeze();
        if round == 3 {
            (0..HELD).for_each(|n| assert!(client.remove(&format!("held{n}")).unwrap()));
        }
        // The pool, three times over; every place that may be used anew is.
        for n in 0..60u64 {
            let (key, value) = (format!("k{}", n % 20), marked(round * 100 + n, 400_000));
            client.upsert(&key, &value).unwrap();
            assert_eq!(client.view(&key).unwrap()[..], value[..]);
        }
        holder.process.thaw();
        reader.process.thaw();
        for n in 0..HELD {
            holder.expect(format_args!("seed-held held{n}"), &n.to_string());
        }
    }
    assert!(client.stat().unwrap().evictions > 0);
    reader.process.kill();
    assert_eq!(reader.answer(), None, "what was read is not what was stored");
    holder.process.freeze();
    client.clear().unwrap();
    assert!(
        client.stat().unwrap().used >= lens.iter().sum::<usize>() as u64,
        "what it holds is still counted"
    );
    holder.process.kill();
    drop(client);
    assert_eq!(empty(&daemon), fresh, "used, granted, free, largest");
}

/// Who comes a moment too late is told so, and nothing of it is left.
#[test]
fn of_two_daemons_started_at_once_exactly_one_serves() {
    for round in 0..24u64 {
        let place = private_dir();
        let [first, second] = [0, 1].map(|n| {
            if n == 1 {
                thread::sleep(Duration::from_micros(random(round) % 3000 * (round % 3)));
            }
            Serve::pool("64MiB").at(&place).launch().unwrap_or_else(|e| panic!("{e}"))
        });
        let (mut daemon, ended) = match (first.ready(), second.ready()) {
            (Ok(daemon), Err(ended)) | (Err(ended), Ok(daemon)) => (daemon, ended),
            (Ok(_), Ok(_)) => panic!("round {round}: both serve"),
            (Err(one), Err(other)) => panic!("round {round}: none serves: {one}; {other}"),
        };
        assert_eq!(ended.status.and_then(|status| status.code()), Some(1), "{ended}");
        assert!(ended.said.contains("already_running"), "{ended}");
        let client = daemon.client();
        assert_eq!(client.put("k", &marked(round, 50_000)).unwrap(), Put::Stored);
        assert_eq!(seed_of(&daemon.client().get("k").unwrap()), Ok(round));
        // Its memory has no name, and so went with its process.
        let named = processes_that_name(daemon.socket().as_os_str());
        assert_eq!(named.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [daemon.process.id()], "{named:?}");
        daemon.process.signal(rustix::process::Signal::TERM);
        assert_eq!(daemon.process.wait().code(), Some(0), "{}", daemon.log());
        let mut left: Vec<_> =
            fs::read_dir(place.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, ["node.log", "node.sock.lock"]);
        drop(Arc::into_inner(place));
    }
}

//! What happens at the edge of what a machine, a pool, a path or a port has to give.

use std::{
    ffi::OsString,
    fs,
    net::TcpListener,
    os::{
        fd::{AsFd, OwnedFd},
        unix::process::CommandExt,
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{Arc, Mutex},
    time::Duration,
};

use backend_cpu::CpuDevice;
use haulier::{Dtype, Error, Options, Put, Shard, StoreClient, TensorRef, store};
use haulier_tests::{
    actor, on_both_engines,
    process::{Ended, Process, Serve, binary, connect, private_dir, skip, wait_for},
    world::{GIB, KIB, MIB, Setup, World, bytes, seed_of},
};
use rustix::{
    mount::{MountFlags, MountPropagationFlags, mount, mount_change},
    process::{Resource, Rlimit, setrlimit},
    thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe},
};

type Client = StoreClient<CpuDevice>;

const MEBI: usize = MIB as usize;

fn refused(serve: Serve) -> Ended {
    serve.try_start().expect_err("a daemon that must not serve")
}

fn code(ended: &Ended) -> Option<i32> {
    ended.status.and_then(|status| status.code())
}

/// Every number in `text`.
fn numbers(text: &str) -> Vec<u64> {
    text.split(|c: char| !c.is_ascii_digit()).filter_map(|digits| digits.parse().ok()).collect()
}

/// Lets `command` have so many bytes of addresses.
fn limit_addresses(command: &mut Command, bytes: u64) {
    let limit = Rlimit { current: Some(bytes), maximum: Some(bytes) };
    // SAFETY: one system call, which allocates nothing.
    unsafe { command.pre_exec(move || Ok(setrlimit(Resource::As, limit)?)) };
}

/// P50: device memory.
#[test]
fn device_memory_that_cannot_be_had_is_an_error_with_both_numbers() {
    let place = private_dir();
    let mut small = actor!(&place.path().join("none"), |command| limit_addresses(command, GIB)).unwrap();
    // More than the machine has, and more than the process may have.
    for asked in [1 << 40, 2 * GIB] {
        let answer = small.ask(format_args!("device-memory {asked}"));
        assert!(answer.starts_with("error: ") && answer.contains("out of memory"), "{answer}");
        let named = numbers(&answer);
        assert!(named.contains(&asked) && named.len() >= 2, "asked and available are to be named: {answer}");
    }
    let answer = small.ask("device-memory 4096");
    assert!(answer.starts_with("4096 bytes at 0x") && !answer.ends_with(" 0x0"), "{answer}");
}

/// P50: the pool.
#[test]
fn a_pool_that_cannot_be_had_is_an_error_with_both_numbers() {
    const ASKED: u64 = 1 << 40;
    let refusal = store::Store::open(store::Config::new(ASKED), |_, _| {});
    let Err(Error::OutOfMemory { asked, available }) = refusal else { panic!("{refusal:?}") };
    assert!(asked >= ASKED && available < asked, "{asked} {available}");

    let ended = refused(Serve::pool("1TiB"));
    assert_eq!(code(&ended), Some(1), "{ended}");
    assert!(ended.said.contains("out_of_memory") && numbers(&ended.said).contains(&ASKED), "{ended}");
    let limited = refused(Serve::pool("512MiB").tweak(|command| limit_addresses(command, GIB)));
    assert_eq!(code(&limited), Some(1), "{limited}");
    for nonsense in ["0", "-1", "big", "99EiB"] {
        let ended = refused(Serve::pool(nonsense));
        assert_eq!(code(&ended), Some(2), "--pool {nonsense}: {ended}");
    }
}

/// P50: a client without room to map the pool is told, and goes on with what fits into messages.
#[test]
fn a_client_without_addresses_for_the_pool_is_told() {
    let daemon = Serve::pool("256MiB").start();
    let mut small = actor!(daemon.socket(), |command| limit_addresses(command, 600 * MIB)).unwrap();
    small.expect("put small 1 1000", "Stored");
    small.expect("seed-into small 1000", "1");
    // A view is a mapping, and there is no room for one.
    let answer = small.ask("seed small");
    assert!(answer.starts_with("error: ") && answer.contains("mapping"), "{answer}");
    let answer = small.ask("pool-memory 1000000");
    assert!(answer.starts_with("error: ") && answer.contains("mapping"), "{answer}");
    let answer = small.ask("put large 2 1000000");
    assert!(answer.starts_with("error: "), "{answer}");
    small.expect("put small2 3 1000", "Stored");
    let client = daemon.client();
    assert!(!client.exists("large").unwrap());
    assert_eq!(client.put("large", &bytes(1, MEBI)).unwrap(), Put::Stored);
    wait_for("grants that come back", || (client.stat().unwrap().granted <= 4 * MIB).then_some(()));
}

/// A client that may have no more descriptors is told so, and not that the node is gone or breaks the protocol.
#[test]
fn a_client_without_descriptors_is_told_which_limit_to_raise() {
    let daemon = Serve::pool("16MiB").start();
    let limited = |descriptors: u64| {
        let limit = Rlimit { current: Some(descriptors), maximum: Some(descriptors) };
        // SAFETY: one system call, which allocates nothing.
        let tweak = |command: &mut Command| unsafe {
            command.pre_exec(move || Ok(setrlimit(Resource::Nofile, limit)?));
        };
        let mut client = actor!(daemon.socket(), tweak).unwrap();
        let answers = [client.ask(format!("upsert k {descriptors} 300000")), client.ask("seed k")];
        let refused: Vec<_> = answers.into_iter().filter(|answer| answer.starts_with("error: ")).collect();
        for answer in &refused {
            assert!(answer.contains("open files") && answer.contains("ulimit -n"), "{descriptors}: {answer}");
        }
        refused.len()
    };
    // Its three streams and the socket, but nothing that comes by it; then one part of what comes.
    assert_eq!((limited(4), limited(5)), (2, 2));
    assert_eq!(limited(16), 0);
}

on_both_engines! {
    a_value_larger_than_the_pool_is_too_large_and_evicts_nothing: Setup::mib(64),
    a_store_at_its_limit_takes_every_put_by_eviction: Setup::mib(64),
    a_full_store_tells_how_much_room_there_is: Setup::mib(64).no_evict(),
    a_store_full_of_pinned_values_is_full: Setup::mib(8),
}

/// P50, P69, P73: what can never fit is told at once, with 64-bit sizes, and nothing is evicted for it.
fn a_value_larger_than_the_pool_is_too_large_and_evicts_nothing(world: &World) {
    let client = world.client();
    for n in 0..20 {
        client.put(&format!("k{n}"), &bytes(n, MEBI)).unwrap();
    }
    // Never touched, so it takes no memory.
    let source = vec![0u8; 4 * GIB as usize + 4097];
    for len in [65 * MIB, 2 * GIB - 1, 2 * GIB, 4 * GIB - 1, 4 * GIB, 4 * GIB + 4097] {
        for verdict in [
            client.alloc(len).map(drop),
            client.put("huge", &source[..len as usize]).map(drop),
            client.upsert("k0", &source[..len as usize]).map(drop),
        ] {
            assert!(
                matches!(verdict, Err(Error::TooLarge { size, limit }) if size == len && limit == 64 * MIB),
                "{len}: {verdict:?}"
            );
        }
    }
    assert!(matches!(client.alloc(u64::MAX), Err(Error::TooLarge { size: u64::MAX, .. })));
    assert!(matches!(client.alloc(1 << 40), Err(Error::TooLarge { .. })));
    assert_eq!(client.stat().unwrap().evictions, 0);
    for n in 0..20 {
        assert_eq!(client.get(&format!("k{n}")).unwrap(), bytes(n, MEBI));
    }
}

/// P73: with eviction there is always room for the newest.
fn a_store_at_its_limit_takes_every_put_by_eviction(world: &World) {
    let client = world.client();
    for n in 0..100 {
        assert_eq!(client.put(&format!("k{n:03}"), &bytes(n, MEBI)).unwrap(), Put::Stored);
        if n < 3 {
            assert!(client.pin(&format!("k{n:03}")).unwrap());
        }
    }
    let left: Vec<u64> = client.list("").unwrap().iter().map(|(key, _)| key[1..].parse().unwrap()).collect();
    // The pinned ones, and of the rest the newest without a gap.
    assert_eq!(left[..3], [0, 1, 2]);
    let first = left[3];
    assert_eq!(left[3..], (first..100).collect::<Vec<_>>()[..]);
    assert!(left.len() >= 56, "only {} MiB of 64 are used", left.len());
    for n in left {
        assert_eq!(client.get(&format!("k{n:03}")).unwrap(), bytes(n, MEBI));
    }
    let stat = client.stat().unwrap();
    assert!(stat.evictions >= 36 && stat.populated <= stat.pool, "{stat:?}");
}

/// P73: without eviction it says how much room there is, and that much is there.
fn a_full_store_tells_how_much_room_there_is(world: &World) {
    let client = world.client();
    let mut stored = 0;
    let (free, largest) = loop {
        match client.put(&format!("k{stored}"), &bytes(stored, 3 * MEBI)) {
            Ok(Put::Stored) => stored += 1,
            Err(Error::Full { free, largest }) => break (free, largest),
            verdict => panic!("{verdict:?}"),
        }
    };
    assert!((18..=21).contains(&stored), "{stored} of 3 MiB in 64 MiB");
    assert!(largest <= free && free <= 64 * MIB - stored * 3 * MIB, "{free} {largest}");
    if largest > 0 {
        assert_eq!(client.put("the largest", &bytes(7, largest as usize)).unwrap(), Put::Stored);
    }
    for n in 0..stored {
        assert_eq!(client.get(&format!("k{n}")).unwrap(), bytes(n, 3 * MEBI));
    }
    assert!(client.remove("k0").unwrap());
    assert_eq!(client.put("k0", &bytes(99, 3 * MEBI)).unwrap(), Put::Stored);
    assert_eq!(client.stat().unwrap().evictions, 0);
}

/// P73: pinned values are no room, and are told apart from it.
fn a_store_full_of_pinned_values_is_full(world: &World) {
    let client = world.client();
    let mut pinned = 0;
    let full = loop {
        let key = format!("k{pinned}");
        match client.put(&key, &bytes(pinned, MEBI)) {
            Ok(_) => pinned += u64::from(client.pin(&key).unwrap()),
            Err(e) => break e,
        }
        assert!(pinned < 20, "a pinned value was evicted");
    };
    assert!(matches!(full, Error::Full { .. }), "{full:?}");
    assert!((0..pinned).all(|n| client.get(&format!("k{n}")).unwrap() == bytes(n, MEBI)));
    assert!(client.unpin("k0").unwrap());
    assert_eq!(client.put("new", &bytes(50, MEBI)).unwrap(), Put::Stored);
    assert!(!client.exists("k0").unwrap() && client.exists("k1").unwrap());
}

/// Bytes that the machine can hand out.
fn available() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap();
    let line = text.lines().find(|line| line.starts_with("MemAvailable:")).unwrap();
    numbers(line)[0] * KIB
}

/// P69.
#[test]
fn values_around_and_beyond_4_gib_come_back_whole() {
    const TEST: &str = "values_around_and_beyond_4_gib_come_back_whole";
    const NEEDED: u64 = 12 * GIB;
    let has = available();
    if has < NEEDED {
        return skip(TEST, format_args!("it takes {NEEDED} bytes of memory, {has} are available"));
    }
    let daemon = Serve::pool("5600MiB").no_evict().start();
    let client = daemon.client().with_deadline(Duration::from_secs(120));
    // Zeros that are never touched take no memory: the source is sparse, but for a byte here and there.
    let mut source = vec![0u8; 4 * GIB as usize + 4097];
    for (n, at) in (0..source.len())
        .step_by(64 * MEBI + 4093)
        .chain([2 * GIB as usize - 1, 4 * GIB as usize - 1])
        .enumerate()
    {
        source[at] = n as u8 | 1;
    }
    for len in [2 * GIB - 1, 2 * GIB, 4 * GIB - 1, 4 * GIB, 4 * GIB + 4097] {
        let part = &mut source[..len as usize];
        let last = bytes(len, 4097);
        part[len as usize - 4097..].copy_from_slice(&last);
        assert_eq!(client.put("k", &part[..]).unwrap(), Put::Stored);
        assert_eq!((client.size("k").unwrap(), client.list("").unwrap()[0].1), (len, len));
        let view = client.view("k").unwrap();
        assert_eq!(view.len() as u64, len);
        assert!(view[..] == part[..], "{len} bytes came back other than they were");
        let small = client.get_into("k", &mut vec![0; 100]);
        assert!(matches!(small, Err(Error::TooSmall { need }) if need == len), "{small:?}");
        drop(view);
        assert!(client.remove("k").unwrap());
        // What the last length left there is not what the next one is about.
        source[len as usize - 4097..].fill(0);
    }
    in_two_slices(&client, &source[..3 * GIB as usize]);
}

/// 5 GiB as 3 + 2.
fn in_two_slices(client: &Client, source: &[u8]) {
    let shard = |rank| Shard { dim: 0, rank, world: 2, full: 5 };
    for (rank, rows) in [(0, 3), (1, 2)] {
        let part = &source[source.len() - (rows * GIB) as usize..];
        let tensor = TensorRef::new(Dtype::U8, &[rows, GIB], part).unwrap();
        assert_eq!(client.put_shard("w", tensor, shard(rank)).unwrap(), Put::Stored);
    }
    // A column through both of them, whose parts lie up to 4 GiB and more apart.
    let column = client.get_shard("w", 1, 700, 1024).unwrap();
    assert_eq!(column.spec.shape, [5, MIB]);
    for row in 0..5u64 {
        let (rows, row_in_part) = if row < 3 { (3, row) } else { (2, row - 3) };
        let part = &source[source.len() - (rows * GIB) as usize..];
        let at = (row_in_part * GIB + 700 * MIB) as usize;
        let got = &column.bytes[(row * MIB) as usize..][..MEBI];
        assert!(got == &part[at..at + MEBI], "row {row} of the column");
    }
    assert_eq!(client.remove_sharded("w").unwrap(), 2);
}

/// A process that has a small /dev/shm of its own for as long as it lives.
struct SmallShm {
    process: Process,
    namespace: Arc<OwnedFd>,
}

impl SmallShm {
    fn new() -> Result<Self, String> {
        let mut command = Command::new("cat");
        command.stdin(Stdio::piped()).stdout(Stdio::null());
        // SAFETY: system calls in a process of one thread, which shares no descriptors with another one.
        unsafe {
            command.pre_exec(|| {
                unshare_unsafe(UnshareFlags::NEWNS)?;
                mount_change(c"/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
                Ok(mount(c"none", c"/dev/shm", c"tmpfs", MountFlags::empty(), c"size=64m")?)
            });
        }
        let process = Process::spawn(&mut command)
            .map_err(|e| format!("a mount namespace cannot be made here: {e}"))?;
        let namespace =
            fs::File::open(format!("/proc/{}/ns/mnt", process.id())).map_err(|e| e.to_string())?;
        Ok(SmallShm { process, namespace: Arc::new(namespace.into()) })
    }

    /// Lets a command run in there.
    fn enter(&self) -> impl FnOnce(&mut Command) + 'static {
        let namespace = Arc::clone(&self.namespace);
        move |command| {
            // SAFETY: one system call in a process of one thread.
            unsafe {
                command.pre_exec(move || {
                    Ok(move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Mount))?)
                });
            }
        }
    }

    /// What is in its /dev/shm.
    fn holds(&self) -> Vec<OsString> {
        let path = format!("/proc/{}/root/dev/shm", self.process.id());
        fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name()).collect()
    }
}

/// P70.
#[test]
fn daemons_and_clients_that_are_killed_leave_nothing_that_fills_up() {
    const TEST: &str = "daemons_and_clients_that_are_killed_leave_nothing_that_fills_up";
    let shm = match SmallShm::new() {
        Ok(shm) => shm,
        Err(e) => return skip(TEST, e),
    };
    let start = |place: Option<&Arc<tempfile::TempDir>>| {
        let serve = Serve::pool("32MiB").tweak(shm.enter());
        place.into_iter().fold(serve, Serve::at).start()
    };
    let mut daemon = start(None);
    for round in 0..10 {
        let mut client = actor!(daemon.socket(), shm.enter()).unwrap();
        client.expect("put-device held 1 2000000", "Stored");
        client.expect("hold held", "held");
        client.expect("storm storm- 300000", "raging");
        if round % 2 == 0 {
            client.process.kill();
        }
        daemon.process.kill();
        let left = shm.holds();
        assert!(left.is_empty(), "round {round}: {left:?}");
        daemon = start(Some(daemon.place()));
    }
    let client = daemon.client();
    client.put("k", &bytes(1, 20 * MEBI)).unwrap();
    assert_eq!(client.get("k").unwrap(), bytes(1, 20 * MEBI));
    let mut names: Vec<OsString> =
        fs::read_dir(daemon.place().path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["node.log", "node.sock", "node.sock.lock"]);
}

/// P72: huge pages are had, or stated not to be.
#[test]
fn huge_pages_are_had_or_said_not_to_be() {
    let free: u64 = fs::read_to_string("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
        .ok()
        .and_then(|text| text.trim().parse().ok())
        .unwrap_or(0);
    let pool = 33 * MIB + 1;
    // More than are free in any case.
    let too_many = (free + 16) * 2 * MIB;
    let ended = refused(Serve::pool_of(too_many).arg("--huge-pages").arg("require"));
    assert_eq!(code(&ended), Some(1), "{ended}");
    assert!(ended.said.contains("huge pages") && ended.said.contains("vm.nr_hugepages"), "{ended}");

    let daemon = Serve::pool_of(too_many.max(pool)).arg("--huge-pages").arg("prefer").start();
    let client = daemon.client();
    let stat = client.stat().unwrap();
    assert_eq!(stat.page, rustix::param::page_size() as u64, "the page size as it really is");
    assert_eq!(daemon.ready["page"], stat.page);
    assert!(daemon.log().contains("normal pages are used"), "{}", daemon.log());
    client.put("k", &bytes(1, MEBI)).unwrap();
    assert_eq!(client.get("k").unwrap(), bytes(1, MEBI));

    if free >= 17 {
        let daemon = Serve::pool_of(pool).arg("--huge-pages").arg("require").start();
        let stat = daemon.client().stat().unwrap();
        assert_eq!((stat.page, stat.pool), (2 * MIB, 34 * MIB));
    }
}

/// P72: a pool of an odd size is rounded up to what can be had, and says so.
#[test]
fn an_odd_pool_size_is_rounded_up() {
    for asked in [1, 4095, MIB + 1, 33 * MIB + 7] {
        let daemon = Serve::pool_of(asked).start();
        let stat = daemon.client().stat().unwrap();
        assert!(stat.pool >= asked && stat.pool.is_multiple_of(stat.frame), "{stat:?}");
        assert!(stat.pool - asked < stat.frame, "{stat:?}");
        assert_eq!(daemon.ready["pool"], stat.pool);
        assert_eq!(stat.page, rustix::param::page_size() as u64);
    }
}

/// P90: a taken port is named, with the option that chooses another.
#[test]
fn a_metrics_port_that_is_taken_is_named_with_its_option() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = taken.local_addr().unwrap().to_string();
    let ended = refused(Serve::pool("16MiB").arg("--metrics").arg(&at));
    assert_eq!(code(&ended), Some(1), "{ended}");
    assert!(ended.said.contains(&at) && ended.said.contains("--metrics"), "{ended}");
    assert!(ended.said.contains("port 0"), "it is to say that 0 takes any free one: {ended}");

    for address in ["nonsense", "127.0.0.1", "127.0.0.1:99999", "9000", "/tmp/node.sock"] {
        let ended = refused(Serve::pool("16MiB").arg("--metrics").arg(address));
        assert_eq!(code(&ended), Some(2), "{address}: {ended}");
        assert!(ended.said.contains("--metrics"), "{address}: {ended}");
    }

    // Any free one, twice at once.
    let daemons: Vec<_> =
        (0..2).map(|_| Serve::pool("16MiB").arg("--metrics").arg("127.0.0.1:0").start()).collect();
    let ports: Vec<&str> = daemons.iter().map(|daemon| daemon.ready["metrics"].as_str().unwrap()).collect();
    assert!(ports[0] != ports[1] && ports.iter().all(|port| !port.ends_with(":0")), "{ports:?}");
}

/// P90: a path that no socket can have is told by both sides, with the limit.
#[test]
fn a_socket_path_that_is_too_long_is_told_with_the_limit() {
    let place = private_dir();
    let long = |len: usize| -> PathBuf {
        let dir = place.path().as_os_str().len() + 1;
        place.path().join("s".repeat(len - dir))
    };
    assert_eq!(long(108).as_os_str().len(), 108);
    let serve = |socket: &Path| {
        let mut command = Command::new(binary());
        command.args(["serve", "--pool", "1MiB", "--json", "--socket"]).arg(socket);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        Process::spawn(&mut command).unwrap()
    };
    for len in [108, 150] {
        let output = serve(&long(len)).output();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(&format!("{len} bytes")) && said.contains("107"), "{said}");
        let told = connect(&long(len), Options::default()).unwrap_err();
        let text = told.to_string();
        assert!(text.contains(&format!("{len} bytes")) && text.contains("107"), "{text}");
    }
    // The longest possible one works.
    let _daemon = serve(&long(107));
    let client = wait_for("the daemon", || connect(&long(107), Options::default()).ok());
    assert_eq!(client.put("k", b"v").unwrap(), Put::Stored);
}

/// A client too many is told so, and gets in when there is room.
#[test]
fn a_client_too_many_is_told_and_gets_in_later() {
    let daemon = Serve::pool("16MiB").arg("--clients").arg("2").start();
    let (one, two) = (daemon.client(), daemon.client());
    one.put("k", b"v").unwrap();
    let third =
        || connect(daemon.socket(), Options { deadline: Duration::from_secs(2), ..Options::default() });
    let told = third().unwrap_err();
    assert!(matches!(told, Error::ResourceExhausted { .. }), "{told:?}");
    assert_eq!(two.get("k").unwrap(), b"v");
    drop(one);
    let client = wait_for("a seat", || third().ok());
    assert_eq!(client.get("k").unwrap(), b"v");
}

/// Many clients at once: each gets its own, and the daemon has room for all of them again.
#[test]
fn a_hundred_clients_at_once_are_served() {
    let daemon = Serve::pool("64MiB").start();
    let failures = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for n in 0..100u64 {
            let (daemon, failures) = (&daemon, &failures);
            scope.spawn(move || {
                let attempt = || -> haulier::Result<()> {
                    let client = connect(daemon.socket(), Options { workers: 1, ..Options::default() })?;
                    let (key, value) =
                        (format!("k{n}"), haulier_tests::world::marked(n, 1000 * (n as usize + 1)));
                    client.put(&key, &value)?;
                    let got = seed_of(&client.view(&key)?);
                    assert_eq!(got, Ok(n));
                    Ok(())
                };
                if let Err(e) = attempt() {
                    failures.lock().unwrap().push((n, e));
                }
            });
        }
    });
    assert!(failures.lock().unwrap().is_empty(), "{failures:?}");
    let client = daemon.client();
    assert_eq!(client.list("").unwrap().len(), 100);
    wait_for("the clients' leave", || {
        let metrics = client.metrics().unwrap();
        metrics.lines().any(|row| row == "haulier_clients 1").then_some(())
    });
}

//! Who may come near the daemon, and by which way. What a hostile peer may say once it is connected is tried beside the
//! daemon's own code.

use std::{
    fs,
    io::{self, Read, Write},
    net::TcpStream,
    os::unix::{
        fs::{MetadataExt, PermissionsExt, symlink},
        process::CommandExt,
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::Arc,
    time::Duration,
};

use haulier::{Error, Options, Put};
use haulier_tests::{
    actor,
    process::{Actor, Daemon, Ended, Process, Serve, connect, private_dir, skip, wait_for},
    world::{bytes, seed_of},
};
use rustix::thread::UnshareFlags;
use tempfile::TempDir;

/// A user that is not the one who runs the tests.
const NOBODY: u32 = 65534;

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Lets `command` run in namespaces of its own for mounts, the network and IPC.
fn isolate(command: &mut Command) {
    // Without root these take a user namespace; the user is the same one outside of it.
    let user = if is_root() { UnshareFlags::empty() } else { UnshareFlags::NEWUSER };
    let flags = UnshareFlags::NEWNS | UnshareFlags::NEWNET | UnshareFlags::NEWIPC | user;
    // SAFETY: one system call in a process of one thread, which shares no descriptors with another one.
    unsafe { command.pre_exec(move || Ok(rustix::thread::unshare_unsafe(flags)?)) };
}

/// P34.
#[test]
fn daemon_and_client_in_containers_of_their_own_need_only_the_sockets_directory() {
    const TEST: &str = "daemon_and_client_in_containers_of_their_own_need_only_the_sockets_directory";
    let mut probe = Command::new("true");
    isolate(&mut probe);
    if let Err(e) = Process::spawn(&mut probe) {
        return skip(TEST, format_args!("namespaces cannot be made here: {e}"));
    }
    let daemon = Serve::pool("32MiB").tweak(isolate).start();
    let mut inside = actor!(daemon.socket(), isolate).unwrap();
    for namespace in ["mnt", "net", "ipc"] {
        let of = |id: u32| fs::read_link(format!("/proc/{id}/ns/{namespace}")).unwrap();
        let (a, b, c) = (of(daemon.process.id()), of(inside.process.id()), of(std::process::id()));
        assert!(a != b && b != c && a != c, "{namespace}: {a:?} {b:?} {c:?}");
    }
    // In the message, through shared memory, and by a descriptor of the client's own memory.
    inside.expect("put a 1 100", "Stored");
    inside.expect("put b 2 3000000", "Stored");
    inside.expect("put-device c 3 3000000", "Stored");
    for (key, seed) in [("a", "1"), ("b", "2"), ("c", "3")] {
        inside.expect(format_args!("seed {key}"), seed);
    }
    let outside = daemon.client();
    for (key, seed) in [("a", 1), ("b", 2), ("c", 3)] {
        assert_eq!(seed_of(&outside.view(key).unwrap()).unwrap(), seed);
    }
    assert_eq!(outside.put("d", &bytes(4, 100_000)).unwrap(), Put::Stored);
    let by_ipc = outside.metrics().unwrap().lines().any(|row| {
        row.starts_with("haulier_operations_total{")
            && row.contains("path=\"ipc\"")
            && row.contains("op=\"put\"")
    });
    assert!(by_ipc, "device memory was to go by descriptor, from one container into the other");
}

/// P91.
#[test]
fn the_daemon_listens_at_no_port_and_at_no_abstract_socket() {
    let daemon = Serve::pool("16MiB").start();
    let client = daemon.client();
    client.put("k", &bytes(1, 100_000)).unwrap();
    let ports = daemon.process.listens_at();
    assert!(ports.is_empty(), "{ports:?}");
    // The only Unix socket with a name is the one in the private directory, and it is no abstract one.
    assert_eq!(unix_names(&daemon), [daemon.socket().to_str().unwrap()]);

    // What was just asked does see a port where there is one, which is for this host only and gives counters only.
    let daemon = Serve::pool("16MiB").arg("--metrics").arg("127.0.0.1:0").start();
    let ports = daemon.process.listens_at();
    assert!(ports.len() == 1 && ports[0].starts_with("tcp 0100007F:"), "{ports:?}");
    let at = daemon.ready["metrics"].as_str().unwrap().to_owned();
    daemon.client().put("secret-key", b"secret-value").unwrap();
    assert!(http(&at, "GET /metrics").contains("haulier_"));
    for request in ["GET /metrics", "GET /", "GET /secret-key", "DELETE /metrics", "POST /metrics"] {
        let answer = http(&at, request);
        assert!(answer.starts_with("HTTP/1.1 ") && !answer.contains("secret"), "{request}: {answer}");
    }
    assert_eq!(daemon.client().get("secret-key").unwrap(), b"secret-value");
}

/// The names of the Unix sockets of a daemon that have one.
fn unix_names(daemon: &Daemon) -> Vec<String> {
    let table = fs::read_to_string(format!("/proc/{}/net/unix", daemon.process.id())).unwrap();
    let own: Vec<String> = fs::read_dir(format!("/proc/{}/fd", daemon.process.id()))
        .unwrap()
        .filter_map(|fd| fs::read_link(fd.ok()?.path()).ok()?.to_str().map(str::to_owned))
        .collect();
    let rows = table.lines().skip(1).map(|row| row.split_whitespace().collect::<Vec<_>>());
    let named = rows.filter(|row| row.len() > 7 && own.contains(&format!("socket:[{}]", row[6])));
    let mut names: Vec<String> = named.map(|row| row[7].to_owned()).collect();
    // One for the listener and one for each connection.
    names.dedup();
    names
}

fn http(at: &str, request: &str) -> String {
    let mut stream = TcpStream::connect(at).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    write!(stream, "{request} HTTP/1.1\r\nHost: {at}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

/// P91: metrics for everybody on the network are refused.
#[test]
fn metrics_are_served_on_loopback_only() {
    for address in ["0.0.0.0:0", "[::]:0", "192.0.2.1:9000"] {
        let ended = refused(Serve::pool("16MiB").arg("--metrics").arg(address));
        assert_eq!(code(&ended), Some(2), "{ended}");
        assert!(ended.said.contains("--metrics 127.0.0.1:"), "{ended}");
    }
}

/// P92.
#[test]
fn the_socket_is_for_its_user_alone_and_so_is_a_directory_made_for_it() {
    let place = private_dir();
    let socket = place.path().join("new/deeper/node.sock");
    let mut command = Command::new(haulier_tests::process::binary());
    command.args(["serve", "--json", "--pool", "16MiB", "--socket"]).arg(&socket);
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let _daemon = Process::spawn(&mut command).unwrap();
    let client = wait_for("the daemon", || connect(&socket, Options::default()).ok());
    assert_eq!(client.put("k", b"v").unwrap(), Put::Stored);
    let mode = |path: &Path| fs::symlink_metadata(path).unwrap().mode() & 0o777;
    assert_eq!(mode(&socket), 0o600);
    assert_eq!(mode(socket.parent().unwrap()), 0o700);
    assert_eq!(mode(&socket.with_file_name("node.sock.lock")) & 0o077, 0);
    assert_eq!(fs::metadata(&socket).unwrap().uid(), rustix::process::geteuid().as_raw());
}

fn refused(serve: Serve) -> Ended {
    serve.try_start().expect_err("a daemon that must not serve")
}

fn code(ended: &Ended) -> Option<i32> {
    ended.status.and_then(|status| status.code())
}

/// P92: where others could put something in the way, the daemon does not serve, and says what to do.
#[test]
fn a_directory_that_others_may_enter_is_refused() {
    for mode in [0o755, 0o710, 0o701, 0o777, 0o1777] {
        let place = private_dir();
        fs::set_permissions(place.path(), fs::Permissions::from_mode(mode)).unwrap();
        let ended = refused(Serve::pool("16MiB").at(&place));
        assert_eq!(code(&ended), Some(2), "{mode:o}: {ended}");
        assert!(ended.said.contains("chmod 700") && ended.said.contains("--socket"), "{mode:o}: {ended}");
        assert!(!place.path().join("node.sock").exists());
    }
}

/// P92.
#[test]
fn a_symbolic_link_or_anything_else_in_the_sockets_place_is_refused_and_left_alone() {
    // At the path itself: a link to a file, to nothing, to another daemon's socket; a file, a directory.
    let (place, other) = (private_dir(), Serve::pool("16MiB").start());
    let socket = place.path().join("node.sock");
    let precious = place.path().join("precious");
    fs::write(&precious, "untouched").unwrap();
    let ways: [&dyn Fn(); 5] = [
        &|| symlink(&precious, &socket).unwrap(),
        &|| symlink(place.path().join("not there"), &socket).unwrap(),
        &|| symlink(other.socket(), &socket).unwrap(),
        &|| fs::write(&socket, "somebody's file").unwrap(),
        &|| fs::create_dir(&socket).unwrap(),
    ];
    for (n, put_in_the_way) in ways.iter().enumerate() {
        put_in_the_way();
        let before = fs::symlink_metadata(&socket).unwrap();
        let ended = refused(Serve::pool("16MiB").at(&place));
        assert_eq!(code(&ended), Some(2), "way {n}: {ended}");
        let after = fs::symlink_metadata(&socket).unwrap();
        assert_eq!((before.ino(), before.mode()), (after.ino(), after.mode()), "way {n}");
        if before.is_dir() { fs::remove_dir(&socket) } else { fs::remove_file(&socket) }.unwrap();
    }
    assert_eq!(fs::read_to_string(&precious).unwrap(), "untouched");
    assert!(!place.path().join("not there").exists());
    assert_eq!(other.client().put("k", b"v").unwrap(), Put::Stored, "the other daemon is as it was");

    // In place of the lock.
    let lock = place.path().join("node.sock.lock");
    fs::remove_file(&lock).unwrap();
    symlink(&precious, &lock).unwrap();
    refused(Serve::pool("16MiB").at(&place));
    assert_eq!(fs::read_to_string(&precious).unwrap(), "untouched");
    fs::remove_file(&lock).unwrap();
    assert_eq!(Serve::pool("16MiB").at(&place).start().client().put("k", b"v").unwrap(), Put::Stored);

    // In place of the directory.
    let (real, holder) = (private_dir(), private_dir());
    let linked = holder.path().join("linked");
    symlink(real.path(), &linked).unwrap();
    let mut command = Command::new(haulier_tests::process::binary());
    command.args(["serve", "--pool", "16MiB", "--socket"]).arg(linked.join("node.sock"));
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let output = Process::spawn(&mut command).unwrap().output();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("symbolic link"), "{said}");
    assert_eq!(fs::read_dir(real.path()).unwrap().count(), 0);
}

/// A binary where every user can run it.
fn for_everybody(binary: &Path) -> (Arc<TempDir>, PathBuf) {
    let dir = private_dir();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let copy = dir.path().join("program");
    fs::copy(binary, &copy).unwrap();
    fs::set_permissions(&copy, fs::Permissions::from_mode(0o755)).unwrap();
    (dir, copy)
}

/// P92: modes keep another user out, and where they were changed, the daemon asks the kernel who it is.
#[test]
fn another_user_is_refused_even_where_the_modes_let_it_in() {
    const TEST: &str = "another_user_is_refused_even_where_the_modes_let_it_in";
    if !is_root() {
        return skip(TEST, "only root can run processes of another user");
    }
    let (_dir, program) = for_everybody(Path::new(env!("CARGO_BIN_EXE_haulier-actor")));
    let daemon = Serve::pool("16MiB").start();
    let mine = daemon.client();
    mine.put("secret", b"mine").unwrap();
    let ask = |order: &str| {
        let as_nobody = |command: &mut Command| {
            command.uid(NOBODY).gid(NOBODY);
        };
        let mut actor = Actor::spawn_with(program.to_str().unwrap(), daemon.socket(), as_nobody).unwrap();
        actor.ask(order)
    };
    let answer = ask("seed secret");
    assert!(answer.starts_with("error: no node daemon answers"), "{answer}");
    assert!(!daemon.log().contains("another user"), "the modes alone were to keep it out");

    let open = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    open(daemon.place().path(), 0o755);
    open(daemon.socket(), 0o666);
    for order in ["connect", "put new 1 100", "seed secret", "remove secret"] {
        let answer = ask(order);
        assert!(answer.starts_with("error: "), "{order}: {answer}");
    }
    wait_for("the daemon's word on it", || daemon.log().contains("another user was refused").then_some(()));
    assert_eq!(mine.get("secret").unwrap(), b"mine");
    assert!(!mine.exists("new").unwrap());
    open(daemon.place().path(), 0o700);
}

/// P92: a daemon of one user does not serve another one, not even root.
#[test]
fn a_daemon_of_another_user_does_not_serve_root() {
    const TEST: &str = "a_daemon_of_another_user_does_not_serve_root";
    if !is_root() {
        return skip(TEST, "only root can run processes of another user");
    }
    let daemon = Serve::pool("16MiB").user(NOBODY).start();
    assert_eq!(fs::metadata(daemon.socket()).unwrap().uid(), NOBODY);
    let refused =
        connect(daemon.socket(), Options { deadline: Duration::from_secs(5), ..Options::default() });
    assert!(
        matches!(&refused, Err(Error::Unreachable { .. } | Error::Protocol { .. } | Error::Timeout { .. })),
        "{refused:?}"
    );
    wait_for("the daemon's word on it", || daemon.log().contains("another user was refused").then_some(()));

    // Its own user it serves.
    let (_dir, program) = for_everybody(Path::new(env!("CARGO_BIN_EXE_haulier-actor")));
    let as_nobody = |command: &mut Command| {
        command.uid(NOBODY).gid(NOBODY);
    };
    let mut own = Actor::spawn_with(program.to_str().unwrap(), daemon.socket(), as_nobody).unwrap();
    own.expect("put k 3 100000", "Stored");
    own.expect("seed k", "3");
}

/// P92: somebody else's directory is no private one, whoever runs the daemon.
#[test]
fn a_directory_of_another_user_is_refused() {
    const TEST: &str = "a_directory_of_another_user_is_refused";
    if !is_root() {
        return skip(TEST, "only root can make directories of another user");
    }
    let place = private_dir();
    std::os::unix::fs::chown(place.path(), Some(NOBODY), Some(NOBODY)).unwrap();
    let ended = refused(Serve::pool("16MiB").at(&place));
    assert_eq!(code(&ended), Some(2), "{ended}");
    assert!(ended.said.contains("belongs to user 65534"), "{ended}");
}

/// Keys and values are other people's business: they are in no log, not even the most talkative one.
#[test]
fn logs_hold_neither_keys_nor_values() {
    let daemon = Serve::pool("16MiB").no_evict().arg("-vv").start();
    let client = daemon.client();
    for len in [20, 100_000] {
        let mut value = vec![0; len];
        value[..14].copy_from_slice(b"a-secret-value");
        client.put("a-secret-key", &value).unwrap();
        client.upsert("a-secret-key", &value).unwrap();
        client.get("a-secret-key").unwrap();
        client.pin("a-secret-key").unwrap();
        client.remove("a-secret-key").unwrap();
    }
    let _ = client.put("a-secret-key", &vec![0; 17 << 20]);
    let _ = client.get_tensor("a-secret-key");
    let _ = client.remove_by_prefix("a-secret-k");
    let metrics = client.metrics().unwrap();
    drop(client);
    wait_for("the client's leave", || daemon.log().contains("a client has left").then_some(()));
    for text in [daemon.log(), metrics] {
        assert!(!text.contains("secret"), "{text}");
    }
}

/// A peer that is no daemon gets nothing from a client but a greeting, and costs it no more than the deadline.
#[test]
fn a_client_of_something_else_than_a_daemon_gives_up() -> io::Result<()> {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with};
    let place = private_dir();
    let path = place.path().join("node.sock");
    let options = || Options { deadline: Duration::from_millis(200), ..Options::default() };
    let missing = connect(&path, options());
    assert!(
        matches!(&missing, Err(Error::Unreachable { socket, .. }) if socket == path.to_str().unwrap()),
        "{missing:?}"
    );
    let text = missing.unwrap_err().to_string();
    assert!(text.contains("haulier serve"), "{text}");

    fs::write(&path, "no socket")?;
    assert!(matches!(connect(&path, options()), Err(Error::Unreachable { .. })));
    fs::remove_file(&path)?;
    let stream = std::os::unix::net::UnixListener::bind(&path)?;
    assert!(matches!(connect(&path, options()), Err(Error::Unreachable { .. })));
    drop(stream);
    fs::remove_file(&path)?;

    let silent = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    bind(&silent, &SocketAddrUnix::new(&path)?)?;
    listen(&silent, 8)?;
    let timed_out = connect(&path, options());
    assert!(matches!(timed_out, Err(Error::Timeout { .. })), "{timed_out:?}");
    Ok(())
}

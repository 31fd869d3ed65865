//! The daemon against peers that keep to the protocol and peers that do not, over the bare socket.

use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::{PermissionsExt, symlink},
    },
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use backend_cpu::CpuDevice;
use hal::{BufferId, DeviceExt, DeviceUuid, Export, Exported, IpcHandle, Token};
use rustix::event::{PollFd, PollFlags, poll};
use tempfile::TempDir;

use super::*;
use crate::{
    alone::alone,
    store::{Config, Mode, Put, Store},
    wire::{
        Answer, CommitItem, Described, Fallback, Frame, Granted, Held, IndexInfo, IpcItem, Link, Path as Way,
        Reply, Request, Ring, SLOTS_MAX, VERSION, ring_words,
    },
};

const MIB: u64 = 1 << 20;

struct Daemon {
    node: Option<Node>,
    store: Store,
    dir: TempDir,
}

impl Daemon {
    fn start() -> Self {
        Self::with(16 * MIB, 8)
    }

    fn with(pool: u64, clients_max: usize) -> Self {
        Self::over(Config::new(pool), clients_max)
    }

    fn over(store: Config, clients_max: usize) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(store, |_, _| ()).unwrap();
        let config = config(dir.path(), store.clone(), clients_max);
        Daemon { node: Some(Node::start(config).unwrap()), store, dir }
    }

    fn peer(&self) -> Peer {
        let socket = Socket::connect(&socket_in(self.dir.path()), soon()).unwrap();
        Peer { socket, last: 0, buf: Vec::new(), fds: Vec::new() }
    }

    fn client(&self) -> Peer {
        self.client_of(CpuDevice::open().unwrap().identity().uuid)
    }

    fn client_of(&self, device: DeviceUuid) -> Peer {
        let mut peer = self.peer();
        let welcome = peer.ask(Request::Hello { version: VERSION, namespace: "", device });
        assert!(matches!(welcome, Reply::Welcome { version: VERSION, .. }), "{welcome:?}");
        peer
    }

    fn metric(&self, line: &str) -> u64 {
        let text = self.node.as_ref().unwrap().metrics();
        let value = text.lines().find_map(|l| l.strip_prefix(line)?.trim().parse().ok());
        value.unwrap_or_else(|| panic!("{line} is not in\n{text}"))
    }
}

fn config(dir: &Path, store: Store, clients_max: usize) -> NodeConfig<CpuDevice> {
    let devices = vec![CpuDevice::open().unwrap()];
    NodeConfig { socket: socket_in(dir), store, devices, metrics: None, clients_max }
}

/// In a directory that the daemon makes: `dir` itself is open to all.
fn socket_in(dir: &Path) -> PathBuf {
    dir.join("haulier/node.sock")
}

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(20))
}

fn within_a_second(what: &str, holds: impl Fn() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < Duration::from_secs(1), "not within a second: {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// A client without any sense of its own.
struct Peer {
    socket: Socket,
    last: u64,
    buf: Vec<u8>,
    fds: Vec<OwnedFd>,
}

impl Peer {
    fn ask(&mut self, request: Request<'_>) -> Reply<'_> {
        self.ask_with(request, &[])
    }

    fn ask_with(&mut self, request: Request<'_>, fds: &[BorrowedFd<'_>]) -> Reply<'_> {
        self.last += 1;
        self.send(self.last, request, fds);
        self.answer(self.last)
    }

    fn send(&self, id: u64, request: Request<'_>, fds: &[BorrowedFd<'_>]) {
        let frame = postcard::to_stdvec(&Frame { id, request }).unwrap();
        self.socket.send(&frame, fds, soon()).unwrap();
    }

    fn answer(&mut self, to: u64) -> Reply<'_> {
        let len = self.socket.recv(&mut self.buf, &mut self.fds, soon()).unwrap();
        assert!(len > 0, "the connection was ended instead of an answer");
        let (Answer { id, reply }, rest) = postcard::take_from_bytes(&self.buf[..len]).unwrap();
        assert_eq!((id, rest.len()), (to, 0));
        reply
    }

    fn is_ended(&mut self) -> bool {
        matches!(self.socket.recv(&mut self.buf, &mut self.fds, soon()), Ok(0))
    }

    fn put(&mut self, key: &str, bytes: &[u8]) -> Result<Put> {
        let (mode, why) = (Mode::Put, Fallback::HOST);
        match self.ask(Request::PutInline { key, meta: b"m", bytes, mode, why }) {
            Reply::Put(put) => put,
            other => panic!("{other:?}"),
        }
    }

    fn reserve(&mut self, lens: &[u64]) -> Vec<Result<Granted>> {
        match self.ask(Request::Reserve { lens: lens.to_vec(), unless: vec![] }) {
            Reply::Reserved { grants, .. } => {
                grants.into_iter().map(|grant| grant.map(|grant| grant.expect("no key was named"))).collect()
            }
            other => panic!("{other:?}"),
        }
    }

    fn grant(&mut self, len: u64) -> u64 {
        self.reserve(&[len]).remove(0).unwrap().grant
    }

    fn commit(&mut self, grant: u64, key: &str, len: u64) -> Result<Put> {
        let items = vec![CommitItem { grant, key, meta: &[], len, path: Way::Alloc }];
        match self.ask(Request::Commit { items, mode: Mode::Put, ahead: 0 }) {
            Reply::Committed { mut slots, ahead: None } => slots.remove(0),
            other => panic!("{other:?}"),
        }
    }

    fn commit_ahead(&mut self, items: Vec<CommitItem<'_>>, ahead: u64) -> Option<Granted> {
        match self.ask(Request::Commit { items, mode: Mode::Put, ahead }) {
            Reply::Committed { ahead, .. } => ahead,
            other => panic!("{other:?}"),
        }
    }

    /// The hold of a value that is too large to come inline.
    fn hold(&mut self, key: &str) -> (u64, u64, u64) {
        match self.ask(Request::Hold { keys: vec![key], inline: 0 }) {
            Reply::Held { slots } => match slots[0] {
                Ok(Held::Shared { hold, arena, offset, .. }) => (hold, arena, offset),
                ref other => panic!("{other:?}"),
            },
            other => panic!("{other:?}"),
        }
    }

    fn inline(&mut self, key: &str) -> Result<Vec<u8>> {
        match self.ask(Request::Hold { keys: vec![key], inline: u64::MAX }) {
            Reply::Held { mut slots } => match slots.remove(0)? {
                Held::Inline { bytes, .. } => Ok(bytes.to_vec()),
                other => panic!("{other:?}"),
            },
            other => panic!("{other:?}"),
        }
    }

    fn put_ipc(&mut self, source: &Exported, offset: u64, len: u64) -> Result<Put> {
        let handles = vec![source.handle.clone()];
        let items = vec![IpcItem { key: "ipc", meta: b"m", handle: 0, offset, len }];
        let request = Request::PutIpc { handles, items, mode: Mode::Upsert };
        match self.ask_with(request, &descriptors(source)) {
            Reply::Puts(mut slots) => slots.remove(0),
            Reply::Refused(e) => Err(e),
            other => panic!("{other:?}"),
        }
    }

    fn get_ipc(&mut self, target: &Exported, offset: u64, len: u64) -> Result<u64> {
        let handles = vec![target.handle.clone()];
        let items = vec![IpcItem { key: "ipc", meta: &[], handle: 0, offset, len }];
        match self.ask_with(Request::GetIpc { handles, items }, &descriptors(target)) {
            Reply::Gets { mut slots } => slots.remove(0).map(|Described { len, .. }| len),
            other => panic!("{other:?}"),
        }
    }
}

fn descriptors(exported: &Exported) -> Vec<BorrowedFd<'_>> {
    exported.descriptors.iter().map(|fd| fd.as_fd()).collect()
}

fn export(device: &CpuDevice, buffer: &hal::Buffer<CpuDevice>) -> Exported {
    match device.bind_current().unwrap().export_ipc(buffer.region()).unwrap() {
        Export::Handle(exported) => exported,
        Export::NotExportable(why) => panic!("{why:?}"),
    }
}

#[test]
fn a_value_written_into_granted_memory_is_read_by_another_client_until_it_lets_go() {
    let daemon = Daemon::start();
    let (mut writer, mut reader) = (daemon.client(), daemon.client());
    let Granted { grant, offset, capacity, .. } = writer.reserve(&[100_000]).remove(0).unwrap();
    assert_eq!(capacity, 100_000);
    assert_eq!(writer.fds.len(), 1, "the first grant brings the arena's descriptor");
    rustix::io::pwrite(&writer.fds[0], &[7; 100_000], offset).unwrap();
    assert!(matches!(writer.commit(grant, "k", 100_000), Ok(Put::Stored)));
    writer.grant(1);
    assert!(writer.fds.is_empty(), "the client has that descriptor already");

    let (hold, arena, offset) = reader.hold("k");
    assert!(matches!(reader.ask(Request::Arena { id: arena }), Reply::Arena { .. }));
    let arena = reader.fds.remove(0);
    assert!(matches!(writer.ask(Request::Remove { keys: vec!["k", "k"] }),
        Reply::Found(slots) if matches!(slots[..], [Ok(true), Ok(false)])));
    let mut bytes = vec![0; 100_000];
    rustix::io::pread(&arena, &mut bytes, offset).unwrap();
    assert_eq!(bytes, [7; 100_000]);
    assert!(rustix::io::pwrite(&arena, &[1], offset).is_err(), "others cannot write it");

    assert!(daemon.store.stat().used >= 100_000, "held although removed");
    reader.send(0, Request::Release { holds: vec![hold, hold, u64::MAX] }, &[]);
    within_a_second("the memory is free", || daemon.store.stat().used == 0);
}

#[test]
fn absent_empty_and_refused_values_are_told_apart() {
    let daemon = Daemon::start();
    let mut client = daemon.client();
    assert!(matches!(client.put("empty", &[]), Ok(Put::Stored)));
    assert!(matches!(client.put("empty", b"x"), Ok(Put::AlreadyExists)));
    assert_eq!(client.inline("empty").unwrap(), b"");
    assert!(matches!(client.inline("absent"), Err(Error::NotFound)));
    assert!(matches!(client.inline(""), Err(Error::InvalidKey { len: 0, .. })));
    match client.ask(Request::Describe { keys: vec!["absent", "empty", ""] }) {
        Reply::Described { slots } => assert!(matches!(
            slots[..],
            [Err(Error::NotFound), Ok(Described { len: 0, meta: b"m" }), Err(Error::InvalidKey { .. })]
        )),
        other => panic!("{other:?}"),
    }
    let lens = [u64::MAX, 17 * MIB, 1];
    assert!(matches!(
        client.reserve(&lens)[..],
        [Err(Error::TooLarge { .. }), Err(Error::TooLarge { .. }), Ok(_)]
    ));
}

#[test]
fn a_client_that_lies_about_grants_gets_an_error_and_harms_nobody() {
    let daemon = Daemon::start();
    let (mut honest, mut liar) = (daemon.client(), daemon.client());
    let grant = honest.grant(64);
    for len in [65, u64::MAX] {
        let own = liar.grant(64);
        assert!(matches!(liar.commit(own, "k", len), Err(Error::InvalidRange { limit: 64, .. })));
        assert!(matches!(liar.commit(own, "k", 64), Err(Error::InvalidArgument { .. })), "used up");
    }
    for foreign in [0, grant + 100, u64::MAX] {
        assert!(matches!(liar.commit(foreign, "k", 1), Err(Error::InvalidArgument { .. })));
    }
    let twice = liar.grant(64);
    assert!(matches!(liar.commit(twice, "twice", 64), Ok(Put::Stored)));
    assert!(matches!(liar.commit(twice, "twice", 64), Err(Error::InvalidArgument { .. })));
    let abandoned = liar.grant(64);
    assert!(matches!(liar.ask(Request::Abandon { grants: vec![abandoned, abandoned] }), Reply::Removed(1)));
    assert!(matches!(liar.commit(abandoned, "k", 64), Err(Error::InvalidArgument { .. })));
    assert!(matches!(
        liar.ask(Request::Arena { id: u64::MAX }),
        Reply::Refused(Error::InvalidArgument { .. })
    ));
    assert!(matches!(honest.commit(grant, "honest", 64), Ok(Put::Stored)));
}

#[test]
fn one_client_holds_no_more_than_its_limits() {
    let daemon = Daemon::start();
    let mut client = daemon.client();
    client.put("k", b"x").unwrap();
    let lens = vec![1; SLOTS_MAX];
    while daemon.metric("haulier_grants ") < session::GRANTS_MAX as u64 {
        assert!(client.reserve(&lens).iter().all(|slot| slot.is_ok()));
    }
    assert!(matches!(client.reserve(&[1])[0], Err(Error::ResourceExhausted { .. })));
    let keys = vec!["k"; SLOTS_MAX];
    while daemon.metric("haulier_holds ") < session::HOLDS_MAX as u64 {
        client.ask(Request::Hold { keys: keys.clone(), inline: 0 });
    }
    match client.ask(Request::Hold { keys: vec!["k"], inline: 0 }) {
        Reply::Held { slots } => assert!(matches!(slots[0], Err(Error::ResourceExhausted { .. }))),
        other => panic!("{other:?}"),
    }
    assert_eq!(client.inline("k").unwrap(), b"x", "a value inline takes no hold");
}

#[test]
fn a_grant_ahead_comes_once_and_only_where_the_client_has_the_arena() {
    let daemon = Daemon::start();
    let mut client = daemon.client();
    assert!(client.commit_ahead(vec![], 4096).is_none(), "the client has no arena yet");
    let grant = client.grant(4096);
    let item = |grant, key| CommitItem { grant, key, meta: &[], len: 4096, path: Way::Alloc };
    let first = client.commit_ahead(vec![item(grant, "a")], 4096).expect("lent ahead");
    assert_eq!(first.capacity, 4096);
    assert!(client.commit_ahead(vec![], 4096).is_none(), "one at a time");
    assert!(client.commit_ahead(vec![item(first.grant, "b")], MIB).is_none(), "more than a client's share");
    assert!(client.commit_ahead(vec![], 4096).is_some());
}

#[test]
fn in_a_standing_pool_clients_that_are_idle_keep_no_arena_from_others() {
    let daemon = Daemon::over(Config { standing: true, ..Config::new(8 * MIB) }, 32);
    let put = |client: &mut Peer, key: &str| {
        let grant = client.grant(4096);
        let item = CommitItem { grant, key, meta: &[], len: 4096, path: Way::Alloc };
        client.commit_ahead(vec![item], 4096);
        assert!(matches!(client.ask(Request::Remove { keys: vec![key] }), Reply::Found(_)));
    };
    let mut clients: Vec<Peer> = (0..20).map(|_| daemon.client()).collect();
    clients.iter_mut().for_each(|client| put(client, "k"));
    clients[0].put("last", b"x").unwrap();
    assert_eq!(daemon.store.stat().granted, 0);
}

#[test]
fn what_a_dead_client_held_is_free_at_once() {
    let daemon = Daemon::start();
    let device = CpuDevice::open().unwrap();
    let mut other = daemon.client();
    other.put("kept", &[1; 5000]).unwrap();
    let before = daemon.store.stat();
    let mut client = daemon.client();
    for len in [0, 1, 5000, MIB] {
        client.grant(len);
    }
    client.hold("kept");
    let buffer = device.buffer(1 << 20).unwrap();
    client.put_ipc(&export(&device, &buffer), 0, MIB).unwrap();
    client.hold("ipc");
    other.ask(Request::Remove { keys: vec!["ipc"] });
    let during = daemon.store.stat();
    assert!(during.granted >= MIB && during.used >= before.used + MIB);
    let gauges = ["haulier_holds ", "haulier_grants ", "haulier_imports "];
    assert_eq!(gauges.map(|gauge| daemon.metric(gauge)), [2, 4, 1]);
    drop(client);
    within_a_second("all of it is free", || {
        let now = daemon.store.stat();
        now.used == before.used && now.granted == 0
    });
    within_a_second("nothing is counted", || gauges.iter().all(|gauge| daemon.metric(gauge) == 0));
    assert!(matches!(other.put("k", b"x"), Ok(Put::Stored)));
}

#[test]
fn a_buffer_is_copied_out_of_and_into_the_clients_own_memory() {
    let daemon = Daemon::start();
    let device = CpuDevice::open().unwrap();
    let mut client = daemon.client();
    let (source, target) = (device.buffer(10_000).unwrap(), device.buffer(10_000).unwrap());
    let (from, to) = (export(&device, &source), export(&device, &target));
    rustix::io::pwrite(&from.descriptors[0], &[0xab; 5000], 1000).unwrap();
    assert!(matches!(client.put_ipc(&from, 1000, 5000), Ok(Put::Stored)));
    assert!(matches!(client.get_ipc(&to, 100, 9000), Ok(5000)));
    let mut bytes = vec![0; 10_000];
    rustix::io::pread(&to.descriptors[0], &mut bytes, 0).unwrap();
    let expected = [vec![0; 100], vec![0xab; 5000], vec![0; 4900]].concat();
    assert!(bytes == expected);

    assert!(matches!(client.get_ipc(&to, 0, 4999), Err(Error::TooSmall { need: 5000 })));
    assert!(matches!(client.put_ipc(&from, 10_000, 0), Ok(Put::Replaced)), "an empty value");
    assert!(matches!(client.get_ipc(&to, 0, 0), Ok(0)));
    assert_eq!(daemon.metric("haulier_imports "), 2);
    assert_eq!(daemon.metric("haulier_values_bytes_total{direction=\"in\",path=\"ipc\"} "), 5000);
}

#[test]
fn open_allocations_stay_few_however_many_a_client_has() {
    let daemon = Daemon::start();
    let device = CpuDevice::open().unwrap();
    let mut client = daemon.client();
    for i in 0..200u8 {
        let buffer = device.buffer(4096).unwrap();
        let exported = export(&device, &buffer);
        rustix::io::pwrite(&exported.descriptors[0], &[i; 4096], 0).unwrap();
        client.put_ipc(&exported, 0, 4096).unwrap();
        assert_eq!(client.inline("ipc").unwrap(), [i; 4096], "never through an older buffer's mapping");
        assert!(daemon.metric("haulier_imports ") <= 64);
    }
}

#[test]
fn a_client_that_lies_about_its_own_memory_gets_an_error() {
    let daemon = Daemon::start();
    let device = CpuDevice::open().unwrap();
    let mut client = daemon.client();
    let buffer = device.buffer(8192).unwrap();
    let len = export(&device, &buffer).handle.len;
    let mut ranges =
        vec![(len - 1, 4096), (0, len + 1), (len, 1), (u64::MAX, 1), (1, u64::MAX), (u64::MAX, u64::MAX)];
    for (offset, size) in ranges.drain(..) {
        let put = client.put_ipc(&export(&device, &buffer), offset, size);
        assert!(matches!(put, Err(Error::InvalidRange { .. })), "{offset} {size}: {put:?}");
    }
    let lie = |change: &dyn Fn(&mut Exported)| {
        let mut exported = export(&device, &buffer);
        change(&mut exported);
        exported
    };
    let lies: [&dyn Fn(&mut Exported); 5] = [
        &|e| e.descriptors.clear(),
        &|e| e.handle.token = Token::Opaque(vec![]),
        &|e| e.handle.token = Token::Descriptors(vec![u64::MAX, 1]),
        &|e| e.handle.token = Token::Opaque(vec![1; 64]),
        &|e| e.handle.len = 1,
    ];
    for change in lies {
        assert!(matches!(client.put_ipc(&lie(change), 0, 1), Err(Error::Protocol { .. })));
    }
    // Of the right form, but not what the descriptor is.
    let longer = lie(&|e| {
        e.handle.len *= 2;
        e.handle.token = Token::Descriptors(vec![e.handle.len]);
    });
    assert!(matches!(client.put_ipc(&longer, len, len), Err(Error::Device(_))));
    let elsewhere = lie(&|e| e.handle.device = DeviceUuid([9; 16]));
    assert!(matches!(client.put_ipc(&elsewhere, 0, 1), Err(Error::Device(_))));

    let handles = vec![export(&device, &buffer).handle];
    let items = || vec![IpcItem { key: "k", meta: &[], handle: u64::MAX, offset: 0, len: 1 }];
    let exported = export(&device, &buffer);
    let request = Request::PutIpc { handles, items: items(), mode: Mode::Put };
    match client.ask_with(request, &descriptors(&exported)) {
        Reply::Puts(slots) => assert!(matches!(slots[0], Err(Error::InvalidArgument { .. }))),
        other => panic!("{other:?}"),
    }
    assert!(matches!(client.inline("k"), Err(Error::NotFound)));
}

#[test]
fn a_device_that_the_node_does_not_serve_goes_by_staging() {
    let daemon = Daemon::start();
    let mut peer = daemon.peer();
    let hello = Request::Hello { version: VERSION, namespace: "", device: DeviceUuid([9; 16]) };
    assert!(matches!(peer.ask(hello), Reply::Welcome { imports: false, .. }));
    let token = Token::Opaque(vec![1; 64]);
    let handle = IpcHandle { device: DeviceUuid([9; 16]), buffer: BufferId(1), exporter: 1, len: 8, token };
    let exported = Exported { handle, descriptors: vec![], offset: 0, len: 8 };
    assert!(matches!(peer.put_ipc(&exported, 0, 8), Err(Error::Unsupported { .. })));
    assert!(matches!(peer.put("k", b"staged"), Ok(Put::Stored)));
    assert_eq!(daemon.metric("haulier_fallbacks_total{reason=\"host_memory\"} "), 1);
}

#[test]
fn a_peer_that_does_not_greet_properly_is_refused_and_ended() {
    let daemon = Daemon::start();
    let mut peer = daemon.peer();
    assert!(matches!(peer.ask(Request::Stat), Reply::Refused(Error::Protocol { .. })));
    assert!(peer.is_ended());
    let mut peer = daemon.peer();
    let hello = Request::Hello { version: VERSION + 1, namespace: "", device: DeviceUuid([0; 16]) };
    match peer.ask(hello) {
        Reply::Refused(Error::Protocol { reason }) => {
            let versions = format!("version {}, this node {VERSION}", VERSION + 1);
            assert!(reason.contains(&versions), "{reason}");
        }
        other => panic!("{other:?}"),
    }
    assert!(peer.is_ended());
    let mut client = daemon.client();
    let hello = Request::Hello { version: VERSION, namespace: "other", device: DeviceUuid([0; 16]) };
    assert!(matches!(client.ask(hello), Reply::Refused(Error::Protocol { .. })));
}

#[test]
fn what_cannot_be_read_is_refused_or_ends_the_connection() {
    let daemon = Daemon::start();
    let mut client = daemon.client();
    for garbled in [&[7, 0xff, 1, 2][..], &[7], &[7, 15, 0]] {
        client.socket.send(garbled, &[client.socket.as_fd()], soon()).unwrap();
        assert!(matches!(client.answer(7), Reply::Refused(Error::Protocol { .. })), "{garbled:?}");
    }
    let keys = vec!["k"; SLOTS_MAX + 1];
    assert!(matches!(client.ask(Request::Remove { keys }), Reply::Refused(Error::Protocol { .. })));
    assert!(matches!(client.ask(Request::Stat), Reply::Stat(_)));
    client.socket.send(&[0, 0xff], &[], soon()).unwrap();
    assert!(client.is_ended());
}

#[test]
fn no_frame_does_more_than_give_an_error() {
    alone(module_path!(), "no_frame_does_more_than_give_an_error", || {
        const FRAMES: u64 = 100_000;
        let daemon = Daemon::start();
        let device = CpuDevice::open().unwrap();
        let buffer = device.buffer(8192).unwrap();
        let exported = export(&device, &buffer);
        let models = models(&exported);
        let mut random = Random(0x9e37_79b9_7f4a_7c15);
        let mut client = daemon.client();
        let mut resident = 0;
        for n in 0..FRAMES {
            if n == FRAMES / 4 {
                resident = resident_kib();
            }
            let mut frame = models[random.below(models.len())].clone();
            match random.below(4) {
                0 => frame = (0..random.below(200)).map(|_| random.byte()).collect(),
                1 => frame.truncate(random.below(frame.len())),
                _ => {
                    for _ in 0..=random.below(4) {
                        let at = random.below(frame.len());
                        frame[at] = random.byte();
                    }
                }
            }
            let fds = &[exported.descriptors[0].as_fd(), client.socket.as_fd()][..random.below(3)];
            let sent = client.socket.send(&frame, fds, soon());
            // Answers are read in passing; which frame has one is not known.
            let ended = loop {
                match client.socket.recv(&mut client.buf, &mut client.fds, Deadline::passed()) {
                    Ok(0) => break true,
                    Ok(_) => {}
                    Err(e) => break e.kind() != io::ErrorKind::TimedOut,
                }
            };
            if sent.is_err() || ended {
                client = daemon.client();
            }
        }
        let grown = resident_kib().saturating_sub(resident);
        assert!(grown < 32 * 1024, "memory grew by {grown} KiB");
        drop(client);
        let mut client = daemon.client();
        assert!(matches!(client.put("after", b"all"), Ok(Put::Stored)));
        assert_eq!(client.inline("after").unwrap(), b"all");
        within_a_second("nothing is left", || {
            daemon.metric("haulier_clients ") == 1 && daemon.store.stat().granted == 0
        });
    });
}

/// One frame of each kind, to be spoilt.
fn models(exported: &Exported) -> Vec<Vec<u8>> {
    let handles = || vec![exported.handle.clone()];
    let items = || vec![IpcItem { key: "k", meta: b"m", handle: 0, offset: 0, len: 4096 }];
    let commit = |grant| CommitItem { grant, key: "k", meta: b"m", len: 64, path: Way::Alloc };
    let requests = [
        Request::Hello { version: VERSION, namespace: "", device: exported.handle.device },
        Request::Arena { id: 0 },
        Request::Reserve { lens: vec![0, 64, 5000], unless: vec!["k", "", "l"] },
        Request::Commit { items: vec![commit(1), commit(2)], mode: Mode::Upsert, ahead: 64 },
        Request::Abandon { grants: vec![1, 2, 3] },
        Request::PutInline {
            key: "k",
            meta: b"m",
            bytes: &[1; 100],
            mode: Mode::Upsert,
            why: Fallback::NotNegotiated,
        },
        Request::PutIpc { handles: handles(), items: items(), mode: Mode::Upsert },
        Request::GetIpc { handles: handles(), items: items() },
        Request::Hold { keys: vec!["k", "absent"], inline: 50 },
        Request::Release { holds: vec![1, 2, 3] },
        Request::Describe { keys: vec!["k", "absent"] },
        Request::Remove { keys: vec!["k"] },
        Request::RemovePrefix { prefix: "k" },
        Request::SetPinned { keys: vec!["k"], pinned: false },
        Request::List { prefix: "", after: Some("a"), limit: 100 },
        Request::Stat,
        Request::Metrics { offset: 0 },
    ];
    requests.into_iter().map(|request| postcard::to_stdvec(&Frame { id: 1, request }).unwrap()).collect()
}

fn resident_kib() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4
}

/// Xorshift: the frames are the same in every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit.max(1) as u64) as usize
    }

    fn byte(&mut self) -> u8 {
        self.next() as u8
    }
}

#[test]
fn long_lists_and_texts_come_in_pages_that_fit_a_message() {
    let daemon = Daemon::start();
    let mut client = daemon.client();
    let keys: Vec<_> = (0..300).map(|i| format!("{i:03}{}", "x".repeat(997))).collect();
    for key in &keys {
        client.put(key, b"v").unwrap();
    }
    let mut listed: Vec<String> = Vec::new();
    let mut pages = 0;
    loop {
        let after = listed.last().cloned();
        match client.ask(Request::List { prefix: "", after: after.as_deref(), limit: u64::MAX }) {
            Reply::Listed { page, more } => {
                pages += 1;
                listed.extend(page.iter().map(|(key, _)| key.to_string()));
                if !more {
                    break;
                }
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(listed == keys && pages > 1);
    match client.ask(Request::List { prefix: "00", after: None, limit: 3 }) {
        Reply::Listed { page, more } => assert!(page.len() == 3 && more),
        other => panic!("{other:?}"),
    }
    match client.ask(Request::Metrics { offset: 0 }) {
        Reply::Metrics { text, len } => {
            assert!(text.len() as u64 == len && text.contains("haulier_pool_bytes"))
        }
        other => panic!("{other:?}"),
    }
    let beyond = client.ask(Request::Metrics { offset: u64::MAX });
    assert!(matches!(beyond, Reply::Refused(Error::InvalidRange { .. })));

    // What does not fit a batch says so and is asked for again.
    let meta = [1; 512];
    let (mode, why) = (Mode::Upsert, Fallback::HOST);
    client.ask(Request::PutInline { key: "k", meta: &meta, bytes: &[], mode, why });
    match client.ask(Request::Describe { keys: vec!["k"; SLOTS_MAX] }) {
        Reply::Described { slots } => {
            let fit = slots.iter().take_while(|slot| slot.is_ok()).count();
            assert!(fit > 100 && matches!(slots[fit], Err(Error::ResourceExhausted { .. })));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn one_client_too_many_is_told_so() {
    let daemon = Daemon::with(MIB, 2);
    let (_a, b) = (daemon.client(), daemon.client());
    let device = DeviceUuid([0; 16]);
    let mut third = daemon.peer();
    match third.ask(Request::Hello { version: VERSION, namespace: "", device }) {
        Reply::Refused(e @ Error::ResourceExhausted { .. }) => {
            assert!(e.to_string().contains("2 client"), "{e}")
        }
        other => panic!("{other:?}"),
    }
    assert!(third.is_ended());
    drop((b, third));
    within_a_second("a seat is free", || daemon.metric("haulier_clients ") == 1);
    daemon.client();
}

#[test]
fn a_put_that_keeps_what_is_there_evicts_nothing() {
    let daemon = Daemon::with(MIB, 8);
    let mut client = daemon.client();
    let mut count = 0;
    while daemon.store.stat().evictions == 0 {
        client.put(&count.to_string(), &[1; 16 * 1024]).unwrap();
        count += 1;
    }
    let before = daemon.store.stat();
    // The first is gone; the second is the next to go.
    for key in ["1", &(count - 1).to_string()] {
        assert!(matches!(client.put(key, &[2; 16 * 1024]), Ok(Put::AlreadyExists)));
    }
    assert_eq!(daemon.store.stat(), before);
    assert_eq!(client.inline("1").unwrap(), [1; 16 * 1024]);
}

/// Whoever breaks the protocol is still alive, and what it has mapped is no one else's.
#[test]
fn a_client_that_is_given_up_keeps_what_it_has_mapped_until_it_ends() {
    const LEN: usize = 100_000;
    for garbage in [&[0, 0xff][..], &[]] {
        let daemon = Daemon::with(MIB, 8);
        let (mut lost, mut other) = (daemon.client(), daemon.client());
        // A value that it views, and a buffer that it fills.
        let value = lost.reserve(&[LEN as u64]).remove(0).unwrap();
        let own = lost.fds.remove(0);
        rustix::io::pwrite(&own, &[7; LEN], value.offset).unwrap();
        lost.commit(value.grant, "held", LEN as u64).unwrap();
        let (_, _, held) = lost.hold("held");
        let buffer = lost.reserve(&[LEN as u64]).remove(0).unwrap().offset;
        rustix::io::pwrite(&own, &[8; LEN], buffer).unwrap();

        lost.socket.send(garbage, &[], soon()).unwrap();
        assert!(lost.is_ended());
        other.ask(Request::Remove { keys: vec!["held"] });
        for i in 0..200 {
            other.put(&i.to_string(), &[9; 16 * 1024]).unwrap();
            // It may go on for as long as it likes: nobody listens.
            lost.socket.send(&[1; 1000], &[own.as_fd()], soon()).unwrap();
        }
        assert!(daemon.store.stat().evictions > 0, "the pool was filled more than once");
        let bytes_at = |offset| {
            let mut bytes = vec![0; LEN];
            rustix::io::pread(&own, &mut bytes, offset).unwrap();
            bytes
        };
        assert!(bytes_at(held) == [7; LEN] && bytes_at(buffer) == [8; LEN]);
        assert_eq!(daemon.metric("haulier_clients "), 2, "it still has its seat");

        drop(lost);
        within_a_second("its memory is free", || {
            daemon.metric("haulier_clients ") == 1 && daemon.store.stat().granted == 0
        });
        other.ask(Request::RemovePrefix { prefix: "" });
        other.grant(MIB);
    }
}

/// The word at 0 says how far the requests have come.
#[test]
fn a_client_that_scribbles_over_its_ring_is_given_up_and_harms_nobody() {
    for (at, word) in [(0, u64::MAX), (0, 1), (0, 1 << 40), (0, 8)] {
        let daemon = Daemon::start();
        let (mut lost, mut other) = (daemon.client(), daemon.client());
        lost.grant(4096);
        lost.ask(Request::Ring);
        let ring = lost.fds.remove(0);
        rustix::io::pwrite(&ring, &word.to_le_bytes(), at).unwrap();
        // The bell, for the daemon sleeps.
        lost.socket.send(&[1], &[], soon()).unwrap();
        assert!(lost.is_ended(), "{word:#x} at {at}");
        other.put("k", b"value").unwrap();
        assert_eq!(other.inline("k").unwrap(), b"value");
        assert_eq!(daemon.metric("haulier_clients "), 2, "it still has its seat");
        drop(lost);
        within_a_second("its memory is free", || daemon.store.stat().granted == 0);
    }
}

#[test]
fn a_client_that_was_given_up_does_not_keep_the_daemon_from_ending() {
    let mut daemon = Daemon::start();
    let mut lost = daemon.client();
    lost.grant(4096);
    lost.socket.send(&[0, 0xff], &[], soon()).unwrap();
    assert!(lost.is_ended());
    let start = Instant::now();
    daemon.node.take().unwrap().stop();
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
    assert_eq!(daemon.store.stat().granted, 0);
}

#[test]
fn a_client_that_does_not_read_holds_up_nobody_and_is_given_up() {
    let daemon = Daemon::start();
    let mut frozen = daemon.client();
    let mut busy = daemon.client();
    let value = vec![3; 16 * 1024];
    busy.put("k", &value).unwrap();
    // Answers of 16 KiB each that are never read: their sender waits soon.
    for id in 2..100 {
        frozen.send(id, Request::Hold { keys: vec!["k"], inline: u64::MAX }, &[]);
    }
    let start = Instant::now();
    for _ in 0..100 {
        assert_eq!(busy.inline("k").unwrap(), value);
    }
    assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
    let mut end = [PollFd::new(&frozen.socket, PollFlags::RDHUP)];
    let limit = Duration::from_secs(15).try_into().unwrap();
    assert_eq!(poll(&mut end, Some(&limit)).unwrap(), 1, "the frozen client is still served");
    while !frozen.is_ended() {}
    frozen.socket.send(&[1], &[], soon()).expect("it is not answered, but heard");
    assert_eq!(daemon.metric("haulier_clients "), 2, "for it may be alive");
    drop(frozen);
    within_a_second("it is gone", || daemon.metric("haulier_clients ") == 1);
}

#[test]
fn stopping_ends_every_connection_and_leaves_the_place_to_the_next_daemon() {
    let mut daemon = Daemon::start();
    let mut client = daemon.client();
    client.put("k", b"v").unwrap();
    let socket = socket_in(daemon.dir.path());
    let start = Instant::now();
    daemon.node.take().unwrap().stop();
    assert!(start.elapsed() < Duration::from_secs(2));
    assert!(client.is_ended() && !socket.exists());
    assert!(Socket::connect(&socket, soon()).is_err());
    daemon.node = Some(Node::start(config(daemon.dir.path(), daemon.store.clone(), 1)).unwrap());
    assert_eq!(daemon.client().inline("k").unwrap(), b"v", "the store outlived the daemon");
}

#[test]
fn a_second_daemon_is_told_the_process_of_the_first() {
    let daemon = Daemon::start();
    let second = Node::start(config(daemon.dir.path(), daemon.store.clone(), 1));
    assert!(matches!(second, Err(Error::AlreadyRunning { pid }) if pid == std::process::id()), "{second:?}");
    assert!(matches!(daemon.client().ask(Request::Stat), Reply::Stat(_)), "the first one is not disturbed");
}

#[test]
fn what_a_killed_daemon_left_does_not_stop_the_next() {
    let dir = tempfile::tempdir().unwrap();
    let path = socket_in(dir.path());
    let private = path.parent().unwrap();
    std::fs::create_dir(private).unwrap();
    std::fs::set_permissions(private, std::fs::Permissions::from_mode(0o700)).unwrap();
    drop(Socket::listen(&Socket::address(&path).unwrap()).unwrap());
    std::fs::write(private.join("node.sock.lock"), "12345678901\n").unwrap();
    assert!(path.exists());
    let store = Store::open(Config::new(MIB), |_, _| ()).unwrap();
    let node = Node::start(config(dir.path(), store, 1)).unwrap();
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&path), mode(private)), (0o600, 0o700));
    node.stop();
    assert!(!path.exists());
}

#[test]
fn a_place_that_others_could_tamper_with_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(Config::new(MIB), |_, _| ()).unwrap();
    let refused = |socket: PathBuf| {
        let config = NodeConfig { socket, ..config(dir.path(), store.clone(), 1) };
        match Node::start(config) {
            Err(Error::InvalidArgument { what }) => what,
            other => panic!("{other:?}"),
        }
    };
    let open = dir.path().join("open");
    std::fs::create_dir(&open).unwrap();
    std::fs::set_permissions(&open, std::fs::Permissions::from_mode(0o755)).unwrap();
    assert!(refused(open.join("s")).contains("mode 755"));

    let private = dir.path().join("private");
    std::fs::create_dir(&private).unwrap();
    std::fs::set_permissions(&private, std::fs::Permissions::from_mode(0o700)).unwrap();
    symlink(&private, dir.path().join("link")).unwrap();
    assert!(refused(dir.path().join("link/s")).contains("symbolic link"));

    symlink("/tmp/elsewhere", private.join("s")).unwrap();
    assert!(refused(private.join("s")).contains("Symlink"));
    std::fs::write(private.join("f"), "precious").unwrap();
    assert!(refused(private.join("f")).contains("in the way"));
    assert_eq!(std::fs::read(private.join("f")).unwrap(), b"precious");

    assert!(refused(private.join("x".repeat(100))).contains("at most 107"));
}

#[test]
fn a_missing_directory_is_made_private() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(Config::new(MIB), |_, _| ()).unwrap();
    let socket = dir.path().join("a/b/node.sock");
    let _node = Node::start(NodeConfig { socket, ..config(dir.path(), store, 1) }).unwrap();
    let mode = std::fs::metadata(dir.path().join("a/b")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o700);
}

#[test]
fn only_the_daemons_own_user_may_connect() {
    assert!(listen::may_connect(1000, 1000));
    assert!(!listen::may_connect(1001, 1000));
    assert!(!listen::may_connect(0, 1000));
}

#[test]
fn an_occupied_metrics_port_is_named_with_its_option() {
    let occupied = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let holder = TcpListener::bind(occupied).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(Config::new(MIB), |_, _| ()).unwrap();
    let start = |metrics: &str| {
        let metrics = Some(metrics.parse().unwrap());
        Node::start(NodeConfig { metrics, ..config(dir.path(), store.clone(), 1) })
    };
    let e = start(&holder.local_addr().unwrap().to_string()).unwrap_err().to_string();
    assert!(e.contains(&occupied.to_string()) && e.contains("--metrics"), "{e}");
    let e = start("0.0.0.0:0").unwrap_err().to_string();
    assert!(e.contains("this host only"), "{e}");

    let node = start("127.0.0.1:0").unwrap();
    let mut http = TcpStream::connect(node.metrics_addr().unwrap()).unwrap();
    http.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").unwrap();
    let mut text = String::new();
    http.read_to_string(&mut text).unwrap();
    assert!(text.starts_with("HTTP/1.1 200") && text.contains("\nhaulier_clients 0\n"), "{text}");
}

/// The shared index and the marks of a client without any sense of its own.
fn index_of(peer: &mut Peer) -> (IndexInfo, OwnedFd, OwnedFd) {
    let info = match peer.ask(Request::Index) {
        Reply::Index(Some(info)) => info,
        other => panic!("{other:?}"),
    };
    let marks = peer.fds.pop().unwrap();
    (info, peer.fds.pop().unwrap(), marks)
}

fn map_writable(file: &OwnedFd) -> std::result::Result<(*mut u8, usize), rustix::io::Errno> {
    let len = rustix::fs::fstat(file).unwrap().st_size as usize;
    let protection = rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE;
    // SAFETY: a new mapping at an address that the kernel chooses touches no memory in use.
    let at = unsafe {
        rustix::mm::mmap(std::ptr::null_mut(), len, protection, rustix::mm::MapFlags::SHARED, file, 0)
    }?;
    Ok((at.cast(), len))
}

#[test]
fn the_shared_index_can_be_written_by_no_client() {
    let daemon = Daemon::start();
    let (_, index, marks) = index_of(&mut daemon.client());
    assert_eq!(map_writable(&index).unwrap_err(), rustix::io::Errno::ACCESS);
    assert_eq!(rustix::io::write(&index, b"x").unwrap_err(), rustix::io::Errno::BADF);
    // Its own marks it may write, but not cut under the daemon's feet.
    assert!(map_writable(&marks).is_ok());
    assert_eq!(rustix::fs::ftruncate(&marks, 0).unwrap_err(), rustix::io::Errno::PERM);
    assert_eq!(
        rustix::fs::fcntl_add_seals(&marks, rustix::fs::SealFlags::WRITE).unwrap_err(),
        rustix::io::Errno::PERM
    );
}

#[test]
fn marks_that_are_nonsense_hold_back_memory_at_most_until_their_client_ends() {
    let daemon = Daemon::with(4 * MIB, 8);
    let mut good = daemon.client();
    let value = vec![1; 16 << 10];
    let fill = |good: &mut Peer, from: usize| {
        (from..from + 600).for_each(|n| assert_eq!(good.put(&format!("k{n}"), &value).unwrap(), Put::Stored));
    };
    let mut bad = daemon.client();
    let (_, _, marks) = index_of(&mut bad);
    let (at, len) = map_writable(&marks).unwrap();
    // Everything that was ever used, was so just now, by its trace.
    for trace in [0xFF, 0x01, 0x80] {
        // SAFETY: the mapping is this test's, and the daemon accesses it atomically.
        unsafe { at.write_bytes(trace, len) };
        fill(&mut good, 0);
    }
    // It holds every value that can be: hold words are ids, and these are the first ones.
    for n in 0..len / 8 {
        // SAFETY: as above.
        unsafe { at.cast::<u64>().add(n).write_unaligned(if n < 80 { u64::MAX } else { n as u64 }) };
    }
    for n in 0..600 {
        let put = good.put(&format!("j{n}"), &value);
        assert!(matches!(put, Ok(_) | Err(Error::Full { .. })), "{put:?}");
    }
    let text = daemon.node.as_ref().unwrap().metrics();
    assert!(text.contains("haulier_holds "), "{text}");
    drop(bad);
    within_a_second("the client's end", || daemon.metric("haulier_clients") == 1);
    within_a_second("the end of its holds", || daemon.metric("haulier_holds") == 0);
    fill(&mut good, 1000);
    good.ask(Request::RemovePrefix { prefix: "" });
    assert_eq!(daemon.store.stat().used, 0);
}

#[test]
fn the_end_of_a_session_is_written_into_its_marks() {
    let mut daemon = Daemon::start();
    let (_, index, marks) = index_of(&mut daemon.client());
    let (at, _) = map_writable(&marks).unwrap();
    // SAFETY: the word is within the mapping, and is accessed atomically by the daemon.
    let ended = || unsafe { at.cast::<u64>().read_volatile() };
    within_a_second("the session's end", || ended() == 1);
    let mut life = [0; 4];
    let mut life = || {
        rustix::io::pread(&index, &mut life, 0).unwrap();
        u32::from_ne_bytes(life)
    };
    let alive = life();
    assert!(alive != 0 && alive & 0x4000_0000 == 0, "{alive:#x}");
    daemon.node.take().unwrap().stop();
    assert_eq!(life() & 0x4000_0000, 0x4000_0000);
}

#[test]
fn a_store_that_is_served_anew_is_read_by_request() {
    let mut daemon = Daemon::start();
    daemon.client().put("k", b"v").unwrap();
    daemon.node.take();
    let config = config(daemon.dir.path(), daemon.store.clone(), 8);
    daemon.node = Some(Node::start(config).unwrap());
    let mut client = daemon.client();
    assert!(matches!(client.ask(Request::Index), Reply::Index(None)));
    assert_eq!(client.inline("k").unwrap(), b"v");
}

#[test]
fn a_key_that_is_gone_is_not_read_although_somebody_holds_its_value() {
    let daemon = Daemon::start();
    let mut peer = daemon.client();
    let socket = socket_in(daemon.dir.path());
    let reader =
        crate::StoreClient::connect(CpuDevice::open().unwrap(), socket, crate::Options::default()).unwrap();
    let ends: [fn(&mut Peer); 3] = [
        |peer| assert!(matches!(peer.ask(Request::Remove { keys: vec!["k"] }), Reply::Found(_))),
        |peer| assert!(matches!(peer.ask(Request::RemovePrefix { prefix: "k" }), Reply::Removed(1))),
        |peer| assert!(matches!(peer.ask(Request::RemovePrefix { prefix: "" }), Reply::Removed(1))),
    ];
    for (n, end) in ends.into_iter().enumerate() {
        let value = vec![n as u8; 5000];
        peer.put("k", &value).unwrap();
        // By request, so that the object lives on in the daemon.
        peer.hold("k");
        let view = reader.view("k").unwrap();
        assert_eq!(view[..], value[..]);
        end(&mut peer);
        assert!(matches!(reader.view("k"), Err(Error::NotFound)), "{n}");
        assert_eq!(view[..], value[..]);
    }
}

/// A client whose messages go by a ring, and the ring's memory.
struct Ringed {
    socket: Arc<Socket>,
    link: Link,
    file: OwnedFd,
    last: u64,
}

impl Ringed {
    fn new(mut peer: Peer) -> Self {
        assert!(matches!(peer.ask(Request::Ring), Reply::Ring));
        let file = peer.fds.pop().expect("the ring's descriptor");
        let socket = Arc::new(peer.socket);
        let mut link = Link::new(Arc::clone(&socket));
        link.use_ring(Ring::open(&file).unwrap());
        Ringed { socket, link, file, last: peer.last }
    }

    /// Whether it was answered as it should be.
    fn put(&mut self, key: &str, bytes: &[u8], deadline: Deadline) -> bool {
        self.last += 1;
        let (mode, why) = (Mode::Upsert, Fallback::HOST);
        let request = Request::PutInline { key, meta: b"m", bytes, mode, why };
        let frame = postcard::to_stdvec(&Frame { id: self.last, request }).unwrap();
        let (mut buf, mut fds) = (Vec::new(), Vec::new());
        let answer =
            self.link.send(&frame, &[], deadline).and_then(|()| self.link.recv(&mut buf, &mut fds, deadline));
        let Ok(len @ 1..) = answer else { return false };
        matches!(postcard::from_bytes(&buf[..len]), Ok(Answer { id, reply: Reply::Put(Ok(_)) }) if id == self.last)
    }
}

fn scribble(file: &OwnedFd, word: usize, value: u64) {
    rustix::io::pwrite(file, &value.to_ne_bytes(), word as u64 * 8).unwrap();
}

#[test]
fn a_client_is_given_one_ring() {
    let daemon = Daemon::start();
    let mut peer = daemon.peer();
    assert!(matches!(peer.ask(Request::Ring), Reply::Refused(Error::Protocol { .. })), "before the hello");
    assert!(peer.is_ended());
    let mut ringed = Ringed::new(daemon.client());
    assert!(ringed.put("k", b"v", soon()));
    let frame = postcard::to_stdvec(&Frame { id: 77, request: Request::Ring }).unwrap();
    ringed.link.send(&frame, &[], soon()).unwrap();
    let (mut buf, mut fds) = (Vec::new(), Vec::new());
    let len = ringed.link.recv(&mut buf, &mut fds, soon()).unwrap();
    let answer: Answer<'_> = postcard::from_bytes(&buf[..len]).unwrap();
    assert!(matches!(answer, Answer { id: 77, reply: Reply::Refused(Error::Protocol { .. }) }), "{answer:?}");
    assert!(ringed.put("k", b"w", soon()));
}

#[test]
fn a_ring_with_an_impossible_claim_ends_its_client_and_nobody_else() {
    let daemon = Daemon::start();
    let mut good = Ringed::new(daemon.client());
    let [requests, answers] = ring_words();
    let claims = [
        ("written beyond the end", vec![(requests.written, u64::MAX)]),
        ("half a word written", vec![(requests.written, 4)]),
        ("a record of no length", vec![(requests.data, 0), (requests.written, 64)]),
        ("a record longer than all", vec![(requests.data, u64::MAX >> 1), (requests.written, 64)]),
        ("a way back to nowhere", vec![(requests.data, u64::MAX), (requests.written, 64)]),
        // Noticed at the answer, for which there is then no room.
        ("answers read that were not written", vec![(answers.read, 1 << 40)]),
    ];
    for (what, words) in claims {
        let mut bad = Ringed::new(daemon.client());
        if what.starts_with("answers") {
            // What was read matters where the answers no longer fit before the end.
            let last = (0..20_000).find(|_| {
                scribble(&bad.file, words[0].0, words[0].1);
                !bad.put("k", &[1; 100], Deadline::after(Duration::from_secs(2)))
            });
            assert!(last.is_some(), "{what}");
        } else {
            words.iter().for_each(|&(at, value)| scribble(&bad.file, at, value));
            // Bytes on the socket wake whoever sleeps there.
            bad.socket.send(&[1], &[], soon()).unwrap();
        }
        let (mut buf, mut fds) = (Vec::new(), Vec::new());
        while bad.socket.recv(&mut buf, &mut fds, soon()).expect(what) > 0 {}
        assert!(good.put("k", b"good", soon()), "{what}");
        drop(bad);
        within_a_second(what, || daemon.metric("haulier_clients") == 1);
    }
}

#[test]
fn a_client_that_scribbles_over_its_ring_meanwhile_hurts_nobody_else() {
    let daemon = Daemon::start();
    let mut good = Ringed::new(daemon.client());
    let lanes = ring_words();
    let heads: Vec<usize> =
        lanes.iter().flat_map(|lane| [lane.written, lane.read, lane.asleep, lane.data]).collect();
    for seed in 0..20u64 {
        let mut bad = Ringed::new(daemon.client());
        let file = bad.file.try_clone().unwrap();
        let (mut answered, done) = (0, AtomicBool::new(false));
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut random = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
                while !done.load(Ordering::Relaxed) {
                    random ^= random << 13;
                    random ^= random >> 7;
                    random ^= random << 17;
                    let at = heads[(random >> 8) as usize % heads.len()];
                    // Near what is there, or anything.
                    let value = match random % 4 {
                        0 => random,
                        1 => u64::MAX,
                        2 => (random >> 16) % 64 * 8,
                        _ => (random >> 16) % 4,
                    };
                    scribble(&file, at + (random >> 40) as usize % 3 * usize::from(at > 4096 / 8), value);
                    thread::sleep(Duration::from_micros(random % 50));
                }
            });
            let all_well = (0..50).all(|n| {
                answered += u32::from(bad.put("bad", &[2; 500], Deadline::after(Duration::from_millis(2))));
                good.put(&format!("good{n}"), &[3; 500], soon())
            });
            done.store(true, Ordering::Relaxed);
            assert!(all_well, "seed {seed}");
        });
        assert!(answered < 50, "the scribbles were not noticed at all");
        drop(bad);
        within_a_second("the end of who scribbled", || daemon.metric("haulier_clients") == 1);
    }
    let mut reader = daemon.client();
    for n in 0..50 {
        assert_eq!(reader.inline(&format!("good{n}")).unwrap(), [3; 500]);
    }
}

//! The client's side of the protocol against a peer that says whatever a test wants it to say.

use std::{
    ops::Range,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use backend_cpu::CpuDevice;
use hal::{DeviceUuid, Workers};

use super::*;
use crate::{
    arrow::{Captured, Items},
    payload::{Lease, Payload, Target},
    wire::{Answer, ArenaInfo, Described, Frame, Granted, Held, Ring, Socket, VERSION, ring_words},
};

const ARENA: u64 = 64 << 10;

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(10))
}

fn shortly() -> Deadline {
    Deadline::after(Duration::from_millis(50))
}

fn origin() -> Arc<Origin> {
    Arc::new(Origin { socket: "/nowhere".into(), namespace: "test".into(), device: DeviceUuid([1; 16]) })
}

fn arena() -> OwnedFd {
    let flags = rustix::fs::MemfdFlags::CLOEXEC | rustix::fs::MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create("engine-test", flags).unwrap();
    rustix::fs::ftruncate(&file, ARENA).unwrap();
    rustix::fs::fcntl_add_seals(&file, rustix::fs::SealFlags::SHRINK).unwrap();
    file
}

fn granted(grant: u64, arena: u64, range: Range<u64>) -> Granted {
    Granted { grant, arena, offset: range.start, capacity: range.end - range.start }
}

fn shared(hold: u64, offset: u64, len: u64) -> Held<'static> {
    Held::Shared { hold, arena: 1, offset, len, meta: b"m" }
}

fn full() -> Error {
    Error::Full { free: 0, largest: 0 }
}

/// The daemon's end of a connection.
struct Peer {
    socket: Socket,
    inbox: Vec<u8>,
    descriptors: Vec<OwnedFd>,
}

impl Peer {
    fn new(socket: Socket) -> Self {
        Peer { socket, inbox: Vec::new(), descriptors: Vec::new() }
    }

    /// Receives the next request, lets `check` look at it, and tells its id.
    fn expect(&mut self, check: impl FnOnce(Request<'_>)) -> u64 {
        let len = self.socket.recv(&mut self.inbox, &mut self.descriptors, soon()).unwrap();
        assert!(len > 0, "the client has gone");
        let Frame { id, request } = postcard::from_bytes(&self.inbox[..len]).unwrap();
        check(request);
        id
    }

    fn answer(&self, id: u64, reply: Reply<'_>) {
        self.answer_with(id, reply, &[]);
    }

    fn answer_with(&self, id: u64, reply: Reply<'_>, descriptors: &[BorrowedFd<'_>]) {
        let bytes = postcard::to_stdvec(&Answer { id, reply }).unwrap();
        self.socket.send(&bytes, descriptors, soon()).unwrap();
    }

    fn greet(&mut self, instance: u64, imports: bool) {
        let id = self.expect(|request| assert!(matches!(request, Request::Hello { version: VERSION, .. })));
        self.answer(id, Reply::Welcome { version: VERSION, instance, imports });
        let id = self.expect(|request| assert!(matches!(request, Request::Index)));
        self.answer(id, Reply::Index(None));
    }

    /// Grants the first time, with arena 1 beside.
    fn reserve(&mut self, lens: &[u64], grants: Vec<Result<Granted>>, first: Option<&OwnedFd>) {
        let id = self.expect(|request| match request {
            Request::Reserve { lens: asked, .. } => assert_eq!(asked, lens),
            other => panic!("{other:?}"),
        });
        let arenas = first.map(|_| ArenaInfo { id: 1, len: ARENA }).into_iter().collect();
        let descriptors: Vec<_> = first.map(AsFd::as_fd).into_iter().collect();
        let grants = grants.into_iter().map(|grant| grant.map(Some)).collect();
        self.answer_with(id, Reply::Reserved { grants, arenas }, &descriptors);
    }

    fn commit(&mut self, keys: &[&str], verdict: Put, ahead: Option<Granted>) {
        let id = self.expect(|request| match request {
            Request::Commit { items, .. } => {
                assert_eq!(items.iter().map(|item| item.key).collect::<Vec<_>>(), keys);
            }
            other => panic!("{other:?}"),
        });
        self.answer(id, Reply::Committed { slots: keys.iter().map(|_| Ok(verdict)).collect(), ahead });
    }

    fn put_inline(&mut self, expected: &str) -> u64 {
        self.expect(|request| match request {
            Request::PutInline { key, .. } => assert_eq!(key, expected),
            other => panic!("{other:?}"),
        })
    }

    fn abandoned(&mut self, expected: &[u64]) {
        let id = self.expect(|request| match request {
            Request::Abandon { grants } => assert_eq!(grants, expected),
            other => panic!("{other:?}"),
        });
        assert_eq!(id, 0);
    }

    fn released(&mut self, expected: &[u64]) {
        let id = self.expect(|request| match request {
            Request::Release { holds } => assert_eq!(holds, expected),
            other => panic!("{other:?}"),
        });
        assert_eq!(id, 0);
    }

    /// Answers the request for arena 1.
    fn arena(&mut self, file: &OwnedFd, len: u64) {
        let id = self.expect(|request| assert!(matches!(request, Request::Arena { id: 1 }), "{request:?}"));
        self.answer_with(id, Reply::Arena { len }, &[file.as_fd()]);
    }

    fn hold(&mut self, slots: Vec<Result<Held<'_>>>) {
        let id = self.expect(|request| assert!(matches!(request, Request::Hold { .. }), "{request:?}"));
        self.answer(id, Reply::Held { slots });
    }
}

/// Runs a client over one connection against `peer`, on a thread of its own.
fn over_a_pair(peer: impl FnOnce(Peer) + Send, client: impl FnOnce(Arc<Connection>)) {
    let (ours, theirs) = Socket::pair().unwrap();
    thread::scope(|scope| {
        scope.spawn(move || {
            let mut it = Peer::new(theirs);
            it.greet(1, true);
            peer(it);
        });
        let connection = Connection::over(ours, &origin(), soon()).unwrap();
        client(connection);
    });
}

/// The same with an engine, which cannot connect again.
fn with_engine(peer: impl FnOnce(Peer) + Send, client: impl FnOnce(&NodeEngine)) {
    over_a_pair(peer, |connection| {
        // The engine alone decides how long the connection lives.
        let engine = NodeEngine {
            origin: Arc::clone(connection.origin()),
            current: RwLock::new(Some(connection)),
            reconnecting: Mutex::new(()),
            warned: Mutex::default(),
        };
        client(&engine);
    });
}

fn engine(engine: &NodeEngine) -> &dyn Engine<CpuDevice> {
    engine
}

fn send<R>(
    items: Items<CpuDevice>,
    imports: bool,
    call: impl FnOnce(&Bound<'_, CpuDevice>, &Ready<CpuDevice>) -> R,
) -> R {
    let device = CpuDevice::open().unwrap();
    let workers = Workers::start(device.clone(), 1).unwrap();
    let bound = device.bind_current().unwrap();
    let planned = Captured::here(&bound, items, Lease::default()).unwrap().plan(&bound, imports).unwrap();
    let ready = planned.check(&bound).unwrap().ready(&bound, &workers, soon()).unwrap();
    call(&bound, &ready)
}

fn put(engine: &NodeEngine, values: &[(&str, &[u8])], deadline: Deadline) -> Vec<Result<Put>> {
    let mut items = Items::with_capacity(values.len());
    values.iter().for_each(|&(key, bytes)| items.push(key, Vec::new(), Payload::from(bytes).span));
    send(items, true, |bound, ready| engine.put(bound, ready, Mode::Put, deadline, &|_| ()))
}

fn get(engine: &NodeEngine, key: &str, into: &mut [u8]) -> Result<Description> {
    let mut items = Items::with_capacity(1);
    items.push(key, Vec::new(), Target::from(into).span);
    send(items, true, |bound, ready| engine.get_into(bound, ready, soon(), &|_| ()).pop().unwrap())
}

fn exists(connection: &Arc<Connection>) -> Result<(), Fault> {
    let request = Request::Remove { keys: vec!["k"] };
    connection.call(request, &[], soon(), |reply, _| found(reply, 1)).map(|_| ())
}

#[test]
fn late_grants_and_holds_go_back_and_the_connection_stays_good() {
    let (ask, go) = crossbeam_channel::bounded(0);
    over_a_pair(
        move |mut peer| {
            let file = arena();
            let reserve = peer.expect(|_| ());
            let hold = peer.expect(|_| ());
            let commit = peer.expect(|_| ());
            go.recv().unwrap();
            let grants = vec![Ok(Some(granted(7, 1, 0..4096))), Err(full())];
            let arenas = vec![ArenaInfo { id: 1, len: ARENA }];
            peer.answer_with(reserve, Reply::Reserved { grants, arenas }, &[file.as_fd()]);
            peer.answer(hold, Reply::Held { slots: vec![Ok(shared(8, 0, 1)), Err(Error::NotFound)] });
            let ahead = Some(granted(9, 1, 0..4096));
            peer.answer(commit, Reply::Committed { slots: vec![], ahead });
            // The arena that came with a late answer is known.
            let next = peer.expect(|_| ());
            peer.answer(
                next,
                Reply::Reserved { grants: vec![Ok(Some(granted(10, 1, 0..16)))], arenas: vec![] },
            );
            // After the answer that was waited for, all together.
            peer.released(&[8]);
            peer.abandoned(&[7, 9]);
            peer.abandoned(&[10]);
        },
        |connection| {
            let reserve = Request::Reserve { lens: vec![4096, 4096], unless: vec![] };
            let late = connection.call(reserve, &[], shortly(), |_, _| Ok(()));
            assert!(matches!(late, Err(Fault::Timeout { sent: true })));
            assert!(matches!(
                connection.hold(vec!["a", "b"], 0, shortly()),
                Err(Fault::Timeout { sent: true })
            ));
            let commit = Request::Commit { items: vec![], mode: Mode::Put, ahead: 0 };
            let late = connection.call(commit, &[], shortly(), |_, _| Ok(()));
            assert!(matches!(late, Err(Fault::Timeout { sent: true })));
            ask.send(()).unwrap();
            let grants = [connection.reserve_one(16, soon()).map_err(|_| ())];
            assert_eq!(grants[0].as_ref().unwrap().region().len, 16);
        },
    );
}

#[test]
fn an_answer_that_is_not_acceptable_ends_the_connection_and_touches_nothing() {
    type Lie = fn(&mut Peer);
    type Ask = fn(&Arc<Connection>) -> Result<(), Fault>;
    let view: Ask = |connection| get::view(connection, &["k"], soon()).map(|_| ());
    let reserve: Ask = |connection| connection.reserve_one(100, soon()).map(|_| ());
    let lies: [(&str, Ask, Lie); 12] = [
        ("another kind of answer", exists, |peer| {
            let id = peer.expect(|_| ());
            peer.answer(id, Reply::Removed(1));
        }),
        ("too many verdicts", exists, |peer| {
            let id = peer.expect(|_| ());
            peer.answer(id, Reply::Found(vec![Ok(true), Ok(true)]));
        }),
        ("an answer to no request", exists, |peer| {
            let id = peer.expect(|_| ());
            peer.answer(id + 1, Reply::Found(vec![Ok(true)]));
        }),
        ("noise", exists, |peer| {
            peer.expect(|_| ());
            peer.socket.send(&[0xff; 100], &[], soon()).unwrap();
        }),
        ("a value beyond its arena", view, |peer| {
            peer.hold(vec![Ok(shared(1, ARENA - 1, 2))]);
            peer.arena(&arena(), ARENA);
        }),
        ("a value whose end wraps around", view, |peer| {
            peer.hold(vec![Ok(shared(1, u64::MAX, 2))]);
            peer.arena(&arena(), ARENA);
        }),
        ("an arena longer than its file", view, |peer| {
            peer.hold(vec![Ok(shared(1, ARENA, 1))]);
            peer.arena(&arena(), 2 * ARENA);
        }),
        ("an arena without a descriptor", view, |peer| {
            peer.hold(vec![Ok(shared(1, 0, 1))]);
            let id = peer.expect(|_| ());
            peer.answer(id, Reply::Arena { len: ARENA });
        }),
        ("a grant beyond its arena", reserve, |peer| {
            peer.reserve(&[100], vec![Ok(granted(1, 1, ARENA - 99..ARENA + 1))], Some(&arena()));
        }),
        ("a grant in an arena that never came", reserve, |peer| {
            peer.reserve(&[100], vec![Ok(granted(1, 2, 0..100))], Some(&arena()));
        }),
        ("a grant that is too short", reserve, |peer| {
            peer.reserve(&[100], vec![Ok(granted(1, 1, 0..99))], Some(&arena()));
        }),
        ("arenas without descriptors", reserve, |peer| {
            let id = peer.expect(|_| ());
            let arenas = vec![ArenaInfo { id: 1, len: ARENA }];
            peer.answer(id, Reply::Reserved { grants: vec![Ok(Some(granted(1, 1, 0..100)))], arenas });
        }),
    ];
    for (what, ask, lie) in lies {
        over_a_pair(
            move |mut peer| {
                lie(&mut peer);
            },
            |connection| {
                let outcome = ask(&connection);
                assert!(matches!(outcome, Err(Fault::Broken(Error::Protocol { .. }))), "{what}: {outcome:?}");
                assert!(connection.has_ended(), "{what}");
            },
        );
    }
}

#[test]
fn a_put_like_the_last_one_is_one_message() {
    let value = vec![5; 20_000];
    with_engine(
        |mut peer| {
            let file = arena();
            peer.reserve(&[20_000], vec![Ok(granted(1, 1, 0..20_480))], Some(&file));
            peer.commit(&["a"], Put::Stored, Some(granted(2, 1, 20_480..40_960)));
            peer.commit(&["b"], Put::AlreadyExists, Some(granted(3, 1, 40_960..61_440)));
            let mut written = [0; 3];
            rustix::io::pread(&file, &mut written, 40_479).unwrap();
            assert_eq!(written, [5, 0, 0]);
            // One that does not suit goes back before its memory is asked for again.
            peer.abandoned(&[3]);
            peer.reserve(&[60_000], vec![Ok(granted(4, 1, 0..60_000))], None);
            peer.commit(&["c"], Put::Stored, None);
        },
        |engine| {
            assert!(matches!(put(engine, &[("a", &value)], soon())[..], [Ok(Put::Stored)]));
            assert!(matches!(put(engine, &[("b", &value)], soon())[..], [Ok(Put::AlreadyExists)]));
            assert!(matches!(put(engine, &[("c", &[6; 60_000])], soon())[..], [Ok(Put::Stored)]));
        },
    );
}

#[test]
fn a_batch_larger_than_the_pool_goes_on_in_parts_and_in_order() {
    with_engine(
        |mut peer| {
            let file = arena();
            let there = |grant| Ok(granted(grant, 1, 0..100));
            let too_large = || Err(Error::TooLarge { size: 100, limit: 10 });
            peer.reserve(
                &[100; 5],
                vec![there(1), Err(full()), too_large(), there(2), Err(full())],
                Some(&file),
            );
            // The second of two equal keys waits for the first one.
            peer.abandoned(&[2]);
            peer.commit(&["a"], Put::Stored, None);
            peer.reserve(&[100; 3], vec![there(3), there(4), Err(full())], None);
            peer.commit(&["b", "b"], Put::Stored, None);
            peer.reserve(&[100], vec![Err(full())], None);
        },
        |engine| {
            let value = &[1; 100][..];
            let keys = ["a", "b", "c", "b", "d"];
            let verdicts = put(engine, &keys.map(|key| (key, value)), soon());
            assert!(
                matches!(
                    verdicts[..],
                    [
                        Ok(Put::Stored),
                        Ok(Put::Stored),
                        Err(Error::TooLarge { .. }),
                        Ok(Put::Stored),
                        Err(Error::Full { .. })
                    ]
                ),
                "{verdicts:?}"
            );
        },
    );
}

#[test]
fn a_slot_behind_one_of_its_key_that_finds_no_room_is_stored_when_that_one_has_failed() {
    with_engine(
        |mut peer| {
            let file = arena();
            peer.reserve(&[200, 100], vec![Err(full()), Ok(granted(1, 1, 0..100))], Some(&file));
            peer.abandoned(&[1]);
            peer.reserve(&[100], vec![Ok(granted(2, 1, 0..100))], None);
            peer.commit(&["a"], Put::Stored, None);
        },
        |engine| {
            let verdicts = put(engine, &[("a", &[1; 200]), ("a", &[2; 100])], soon());
            assert!(matches!(verdicts[..], [Err(Error::Full { .. }), Ok(Put::Stored)]), "{verdicts:?}");
        },
    );
}

/// Keys of a batch that goes in three parts.
fn keys_of_parts() -> Vec<String> {
    (0..70).map(|n| format!("k{n}")).collect()
}

/// Grants for the keys from `from` on, 100 bytes each, as [`keys_of_parts`] are put.
fn grants_of_part(from: u64, count: u64) -> Vec<Result<Granted>> {
    (from..from + count).map(|n| Ok(granted(n + 1, 1, 100 * n..100 * (n + 1)))).collect()
}

fn put_parts(engine: &NodeEngine, deadline: Deadline) -> Vec<Result<Put>> {
    let keys = keys_of_parts();
    let values: Vec<_> = (0..70u8).map(|n| [n; 100]).collect();
    let batch: Vec<_> = keys.iter().zip(&values).map(|(key, value)| (key.as_str(), &value[..])).collect();
    put(engine, &batch, deadline)
}

#[test]
fn the_next_part_of_a_batch_is_asked_for_before_the_last_one_is_granted_or_stored() {
    let keys = keys_of_parts();
    let keys: Vec<_> = keys.iter().map(String::as_str).collect();
    with_engine(
        |mut peer| {
            let file = arena();
            let reserve = |request: Request<'_>| match request {
                Request::Reserve { lens, unless } => {
                    assert_eq!(lens, vec![100; unless.len()]);
                    assert_eq!(unless[0], keys[if unless.len() == 6 { 64 } else { 0 }]);
                }
                other => panic!("{other:?}"),
            };
            let first = peer.expect(reserve);
            let second = peer.expect(|request| assert!(matches!(request, Request::Reserve { .. })));
            let arenas = vec![ArenaInfo { id: 1, len: ARENA }];
            let some =
                |grants: Vec<Result<Granted>>| grants.into_iter().map(|grant| grant.map(Some)).collect();
            let grants = some(grants_of_part(0, 32));
            peer.answer_with(first, Reply::Reserved { grants, arenas }, &[file.as_fd()]);
            // Its commit comes, and the third part is asked for, though the second is not even granted.
            let commit = |from: usize, to: usize| {
                let keys = &keys[from..to];
                move |request: Request<'_>| match request {
                    Request::Commit { items, ahead: 0, .. } => {
                        assert_eq!(items.iter().map(|item| item.key).collect::<Vec<_>>(), keys);
                    }
                    other => panic!("{other:?}"),
                }
            };
            let stored = |count| Reply::Committed { slots: vec![Ok(Put::Stored); count], ahead: None };
            let first = peer.expect(commit(0, 32));
            let third = peer.expect(reserve);
            peer.answer(second, Reply::Reserved { grants: some(grants_of_part(32, 32)), arenas: vec![] });
            peer.answer(first, stored(32));
            let second = peer.expect(commit(32, 64));
            peer.answer(third, Reply::Reserved { grants: some(grants_of_part(64, 6)), arenas: vec![] });
            peer.answer(second, stored(32));
            let third = peer.expect(commit(64, 70));
            peer.answer(third, stored(6));
            let mut bytes = vec![0; 7000];
            rustix::io::pread(&file, &mut bytes, 0).unwrap();
            assert!(bytes.iter().enumerate().all(|(i, &byte)| byte as usize == i / 100));
        },
        |engine| {
            let verdicts = put_parts(engine, soon());
            assert!(
                verdicts.len() == 70 && verdicts.iter().all(|verdict| matches!(verdict, Ok(Put::Stored)))
            );
        },
    );
}

#[test]
fn who_is_told_how_far_parts_have_come_may_ask_the_daemon_something() {
    with_engine(
        |mut peer| {
            let file = arena();
            let first = peer.expect(|request| assert!(matches!(request, Request::Reserve { .. })));
            let second = peer.expect(|request| assert!(matches!(request, Request::Reserve { .. })));
            let arenas = vec![ArenaInfo { id: 1, len: ARENA }];
            let grants = grants_of_part(0, 32).into_iter().map(|grant| grant.map(Some)).collect();
            peer.answer_with(first, Reply::Reserved { grants, arenas }, &[file.as_fd()]);
            let first = peer.expect(|request| assert!(matches!(request, Request::Commit { .. })));
            peer.answer(second, Reply::Refused(Error::Closed));
            peer.answer(first, Reply::Committed { slots: vec![Ok(Put::Stored); 32], ahead: None });
            let asked = peer.expect(|request| assert!(matches!(request, Request::Remove { .. })));
            peer.answer(asked, Reply::Found(vec![Ok(true)]));
        },
        |node| {
            let (value, mut items) = ([1; 100], Items::with_capacity(33));
            (0..33).for_each(|n| items.push(&format!("k{n}"), Vec::new(), Payload::from(&value[..]).span));
            let told = AtomicU64::new(0);
            let report = |bytes| {
                told.fetch_add(bytes, Ordering::Relaxed);
                assert!(matches!(engine(node).remove(&["k0"], shortly())[..], [Ok(true)]));
            };
            send(items, true, |bound, ready| node.put(bound, ready, Mode::Put, soon(), &report));
            assert_eq!(told.into_inner(), 3200);
        },
    );
}

#[test]
fn parts_under_way_at_the_deadline_are_given_up_and_what_they_bring_goes_back() {
    let (late, is_late) = mpsc::channel();
    with_engine(
        move |mut peer| {
            let file = arena();
            peer.reserve(&[100; 32], grants_of_part(0, 32), Some(&file));
            let second = peer.expect(|request| assert!(matches!(request, Request::Reserve { .. })));
            let commit = peer.expect(|request| assert!(matches!(request, Request::Commit { .. })));
            let third = peer.expect(|request| assert!(matches!(request, Request::Reserve { .. })));
            is_late.recv().unwrap();
            let grants = grants_of_part(32, 32).into_iter().map(|grant| grant.map(Some)).collect();
            peer.answer(second, Reply::Reserved { grants, arenas: vec![] });
            peer.answer(commit, Reply::Committed { slots: vec![Ok(Put::Stored); 32], ahead: None });
            peer.answer(third, Reply::Refused(full()));
            let stat = peer.expect(|request| assert!(matches!(request, Request::SetPinned { .. })));
            peer.answer(stat, Reply::Found(vec![Ok(true)]));
            // Those of the commit are the daemon's.
            peer.abandoned(&(33..=64).collect::<Vec<_>>());
        },
        |engine| {
            let verdicts = put_parts(engine, shortly());
            assert!(verdicts.iter().all(|verdict| matches!(verdict, Err(Error::Timeout { .. }))));
            assert!(engine_connection(engine).is_behind());
            late.send(()).unwrap();
            let pinned = self::engine(engine).set_pinned(&["k"], true, soon());
            assert!(matches!(pinned[..], [Ok(true)]), "{pinned:?}");
            assert!(!engine_connection(engine).is_behind());
        },
    );
}

#[test]
fn parts_whose_fate_is_unknown_are_not_sent_again_and_the_others_are() {
    listening(
        |listener| {
            let file = arena();
            let mut peer = accept(listener, 1);
            peer.reserve(&[100; 32], grants_of_part(0, 32), Some(&file));
            peer.expect(|request| assert!(matches!(request, Request::Reserve { .. })));
            peer.expect(|request| assert!(matches!(request, Request::Commit { .. })));
            drop(peer);
            let mut peer = accept(listener, 1);
            let keys = keys_of_parts();
            let keys: Vec<_> = keys[32..].iter().map(String::as_str).collect();
            peer.reserve(&[100; 32], grants_of_part(0, 32), Some(&file));
            peer.reserve(&[100; 6], grants_of_part(32, 6), None);
            peer.commit(&keys[..32], Put::Stored, None);
            peer.commit(&keys[32..], Put::Stored, None);
        },
        |engine| {
            let verdicts = put_parts(engine, soon());
            assert!(verdicts[..32].iter().all(|verdict| matches!(verdict, Err(Error::Disconnected { .. }))));
            assert!(verdicts[32..].iter().all(|verdict| matches!(verdict, Ok(Put::Stored))), "{verdicts:?}");
        },
    );
}

#[test]
fn what_the_node_cannot_open_goes_by_staging_in_the_same_call() {
    let device = CpuDevice::open().unwrap();
    let buffer = hal::DeviceExt::buffer(&device, 4096).unwrap();
    let refused = || Error::Device(hal::Error::new(Kind::ImportRefused, "cpu", "import_ipc"));
    with_engine(
        |mut peer| {
            let id = peer.expect(|request| match request {
                Request::PutIpc { handles, items, .. } => {
                    assert_eq!((handles.len(), items.len()), (1, 2));
                    assert_eq!((items[1].handle, items[1].offset, items[1].len), (0, 1024, 1000));
                }
                other => panic!("{other:?}"),
            });
            assert_eq!(peer.descriptors.len(), 1);
            peer.answer(id, Reply::Puts(vec![Ok(Put::Stored), Err(refused())]));
            let id = peer.expect(|request| match request {
                Request::PutInline { key, bytes, why, .. } => {
                    assert_eq!((key, bytes.len(), why), ("b", 1000, Fallback::ImportRefused));
                }
                other => panic!("{other:?}"),
            });
            peer.answer(id, Reply::Put(Ok(Put::Stored)));
        },
        |engine| {
            let mut items = Items::with_capacity(2);
            for (key, offset, len) in [("a", 0, 1024), ("b", 1024, 1000)] {
                let part = Payload::part(&buffer, offset, len).unwrap().already_done();
                items.push(key, Vec::new(), part.span);
            }
            let verdicts =
                send(items, true, |bound, ready| engine.put(bound, ready, Mode::Put, soon(), &|_| ()));
            assert!(matches!(verdicts[..], [Ok(Put::Stored), Ok(Put::Stored)]), "{verdicts:?}");
        },
    );
}

#[test]
fn a_get_fills_from_the_answer_or_from_shared_memory_or_leaves_all_as_it_was() {
    with_engine(
        |mut peer| {
            let file = arena();
            rustix::io::pwrite(&file, b"shared", 100).unwrap();
            peer.hold(vec![Ok(Held::Inline { bytes: b"inline", meta: b"" })]);
            peer.hold(vec![Ok(shared(1, 100, 6))]);
            peer.arena(&file, ARENA);
            peer.released(&[1]);
            peer.hold(vec![Ok(shared(2, 100, 9))]);
            peer.released(&[2]);
            peer.hold(vec![Ok(shared(3, 0, 0))]);
            peer.released(&[3]);
        },
        |engine| {
            let mut into = [0; 8];
            assert_eq!(get(engine, "a", &mut into).unwrap().len, 6);
            assert_eq!(&into, b"inline\0\0");
            let found = get(engine, "b", &mut into).unwrap();
            assert_eq!((found.len, &found.meta[..], &into), (6, &b"m"[..], b"shared\0\0"));
            assert!(matches!(get(engine, "c", &mut into), Err(Error::TooSmall { need: 9 })));
            assert_eq!(get(engine, "d", &mut into).unwrap().len, 0);
            assert_eq!(&into, b"shared\0\0");
        },
    );
}

#[test]
fn a_view_outlives_the_client_and_the_daemon() {
    let (ended, end) = crossbeam_channel::bounded(0);
    with_engine(
        |mut peer| {
            let file = arena();
            rustix::io::pwrite(&file, b"bytes", 0).unwrap();
            peer.hold(vec![Ok(shared(1, 0, 5)), Err(Error::NotFound)]);
            peer.arena(&file, ARENA);
            drop(peer);
            ended.send(()).unwrap();
        },
        |node| {
            let mut views = engine(node).view(&["a", "b"], soon());
            assert!(matches!(views.pop(), Some(Err(Error::NotFound))));
            let view = views.pop().unwrap().unwrap();
            engine(node).close();
            assert!(matches!(engine(node).stat(soon()), Err(Error::Closed)));
            end.recv().unwrap();
            assert_eq!((&view[..], view.meta()), (&b"bytes"[..], &b"m"[..]));
        },
    );
}

#[test]
fn a_dropped_view_is_released_at_once_if_it_is_large_or_the_last_of_its_batch() {
    with_engine(
        |mut peer| {
            let file = arena();
            peer.hold(vec![Ok(shared(1, 0, 5)), Ok(shared(2, 0, 0)), Ok(shared(3, 0, ARENA))]);
            peer.arena(&file, ARENA);
            peer.released(&[3]);
            peer.released(&[2, 1]);
            // Also after the client was closed, until nothing is left to keep the socket.
            assert_eq!(peer.socket.recv(&mut peer.inbox, &mut peer.descriptors, soon()).unwrap(), 0);
        },
        |node| {
            let mut views = engine(node).view(&["a", "b", "c"], soon());
            engine(node).close();
            while views.pop().is_some() {}
        },
    );
}

#[test]
fn a_frozen_daemon_holds_nobody_beyond_the_deadline() {
    let (done, wait) = crossbeam_channel::bounded::<()>(0);
    with_engine(
        |mut peer| {
            let file = arena();
            peer.hold(vec![Ok(shared(1, 0, 5))]);
            peer.arena(&file, ARENA);
            let _ = wait.recv();
            // What could not be sent comes with the next request.
            let mut back = 0;
            while back < 1 {
                peer.expect(|request| {
                    if let Request::Release { holds } = request {
                        assert_eq!(holds, [1]);
                        back += 1;
                    }
                });
            }
        },
        |node| {
            let views = engine(node).view(&["a"], soon());
            let big = vec![1; 16 << 10];
            let begun = Instant::now();
            let mut unsent = 0;
            // Until not even the socket takes more.
            while unsent < 2 {
                let (mode, why) = (Mode::Put, Fallback::HOST);
                let request = Request::PutInline { key: "k", meta: &[], bytes: &big, mode, why };
                let connection = engine_connection(node);
                let put =
                    connection.call(request, &[], Deadline::after(Duration::from_millis(5)), |_, _| Ok(()));
                assert!(matches!(put, Err(Fault::Timeout { .. })), "{put:?}");
                let probe = connection.call(Request::Stat, &[], shortly(), |_, _| Ok(()));
                unsent += usize::from(matches!(probe, Err(Fault::Timeout { sent: false })));
            }
            drop(views);
            assert!(begun.elapsed() < Duration::from_secs(20));
            drop(done);
            let late = engine(node).stat(Deadline::after(Duration::from_millis(500)));
            assert!(late.is_err());
        },
    );
}

fn engine_connection(node: &NodeEngine) -> Arc<Connection> {
    node.connection("test", soon()).unwrap()
}

/// A socket that clients connect to, and the engine of one.
fn listening(peers: impl FnOnce(&Socket) + Send, client: impl FnOnce(&NodeEngine)) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("node.sock");
    let listener = Socket::listen(&Socket::address(&path).unwrap()).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| peers(&listener));
        let engine = NodeEngine::connect(&path, "test", DeviceUuid([1; 16]), soon()).unwrap();
        client(&engine);
    });
}

fn accept(listener: &Socket, instance: u64) -> Peer {
    let mut peer = Peer::new(listener.accept().unwrap());
    peer.greet(instance, true);
    let id = peer.expect(|request| assert!(matches!(request, Request::Ring)));
    peer.answer(id, Reply::Refused(Error::ResourceExhausted { what: "memory".into() }));
    peer
}

#[test]
fn a_put_whose_fate_is_unknown_is_sent_again_only_to_a_restarted_daemon() {
    listening(
        |listener| {
            accept(listener, 1).put_inline("same");
            let mut peer = accept(listener, 1);
            peer.put_inline("restarted");
            drop(peer);
            let mut peer = accept(listener, 2);
            let id = peer.put_inline("restarted");
            peer.answer(id, Reply::Put(Ok(Put::Stored)));
        },
        |engine| {
            let verdicts = put(engine, &[("same", b"1")], soon());
            assert!(matches!(verdicts[..], [Err(Error::Disconnected { .. })]), "{verdicts:?}");
            assert!(matches!(put(engine, &[("restarted", b"1")], soon())[..], [Ok(Put::Stored)]));
        },
    );
}

#[test]
fn what_can_be_asked_twice_is_sent_again_but_not_for_ever() {
    listening(
        |listener| {
            accept(listener, 1).expect(|_| ());
            let mut peer = accept(listener, 1);
            let id = peer.expect(|request| assert!(matches!(request, Request::Describe { .. })));
            peer.answer(id, Reply::Described { slots: vec![Ok(Described { len: 3, meta: b"m" })] });
            drop(peer);
            // The first attempt finds the last connection ended.
            for _ in 0..RESENDS {
                accept(listener, 1).expect(|request| assert!(matches!(request, Request::Stat)));
            }
        },
        |node| {
            let described = engine(node).describe(&["k"], soon());
            assert!(matches!(&described[..], [Ok(Description { len: 3, .. })]), "{described:?}");
            let poison = engine(node).stat(soon());
            assert!(matches!(poison, Err(Error::Unreachable { .. })), "{poison:?}");
        },
    );
}

#[test]
fn a_buffer_goes_in_place_or_is_copied_to_a_restarted_daemon_and_never_elsewhere() {
    let file = arena();
    listening(
        |listener| {
            let mut peer = accept(listener, 1);
            peer.reserve(&[8], vec![Ok(granted(1, 1, 0..8))], Some(&file));
            peer.commit(&["a"], Put::Stored, None);
            peer.reserve(&[8], vec![Ok(granted(2, 1, 8..16))], None);
            peer.reserve(&[8], vec![Ok(granted(3, 1, 16..24))], None);
            drop(peer);
            let mut peer = accept(listener, 2);
            let id = peer.expect(|_| ());
            peer.answer(id, Reply::Removed(0));
            let new = arena();
            peer.reserve(&[8], vec![Ok(granted(1, 1, 64..72))], Some(&new));
            peer.commit(&["b"], Put::Stored, None);
            let mut written = [0; 8];
            rustix::io::pread(&new, &mut written, 64).unwrap();
            assert_eq!(written, [9; 8]);
        },
        |node| {
            let node = engine(node);
            let mut buffer = node.alloc(8, soon()).unwrap();
            buffer.fill(1);
            assert!(matches!(node.put_allocated("a", b"", buffer, Mode::Put, soon()), Ok(Put::Stored)));
            let mut buffer = node.alloc(8, soon()).unwrap();
            let foreign = node.alloc(8, soon()).unwrap();
            buffer.fill(9);
            while node.remove_by_prefix("x", soon()).is_err() {}
            assert!(matches!(node.put_allocated("b", b"", buffer, Mode::Put, soon()), Ok(Put::Stored)));
            with_engine(drop, |other| {
                let refused = engine(other).put_allocated("c", b"", foreign, Mode::Put, soon());
                assert!(matches!(refused, Err(Error::InvalidArgument { .. })), "{refused:?}");
            });
        },
    );
}

#[test]
fn where_nobody_listens_the_answer_comes_at_once_and_names_the_socket() {
    let begun = Instant::now();
    let refused = NodeEngine::connect(FilePath::new("/nowhere/node.sock"), "", DeviceUuid([0; 16]), soon());
    let text = refused.unwrap_err().to_string();
    assert!(text.contains("/nowhere/node.sock") && text.contains("haulier serve"), "{text}");
    assert!(begun.elapsed() < Duration::from_secs(5));
}

/// Runs a client by a ring against `daemon`, which has the socket and the ring's memory.
fn over_a_ring(daemon: impl FnOnce(&Socket, Ring, OwnedFd) + Send, client: impl FnOnce(&Connection)) {
    over_a_pair(
        |mut peer| {
            let id = peer.expect(|request| assert!(matches!(request, Request::Ring)));
            let (ring, file) = Ring::create().unwrap();
            peer.answer_with(id, Reply::Ring, &[file.as_fd()]);
            daemon(&peer.socket, ring, file);
        },
        |connection| {
            connection.ask_for_ring(soon()).unwrap();
            client(&connection);
        },
    );
}

fn scribble(file: &OwnedFd, word: usize, value: u64) {
    rustix::io::pwrite(file, &value.to_ne_bytes(), word as u64 * 8).unwrap();
}

fn stat(connection: &Connection, deadline: Deadline) -> Result<(), Fault> {
    connection.call(Request::Stat, &[], deadline, |reply, _| match reply {
        Reply::Stat(_) => Ok(()),
        _ => Err(astray()),
    })
}

#[test]
fn a_ring_with_an_impossible_claim_of_the_daemon_is_told_and_ends_the_connection() {
    let [_, answers] = ring_words();
    let claims = [
        vec![(answers.written, u64::MAX)],
        vec![(answers.written, 4)],
        vec![(answers.data, 0), (answers.written, 64)],
        vec![(answers.data, u64::MAX >> 1), (answers.written, 64)],
        vec![(answers.data, u64::MAX), (answers.written, 64)],
        // A record that is whole and is no answer.
        vec![(answers.data, 8), (answers.data + 1, u64::MAX), (answers.written, 16)],
        // Descriptors are promised, and none comes.
        vec![(answers.data, 1 << 32 | 8), (answers.written, 16)],
    ];
    for words in claims {
        over_a_ring(
            |socket, _ring, file| {
                // The client may look at the ring or sleep at its socket.
                words.iter().for_each(|&(at, value)| scribble(&file, at, value));
                socket.send(&[1], &[], soon()).unwrap();
                while socket.recv(&mut Vec::new(), &mut Vec::new(), soon()).unwrap() > 0 {}
            },
            |connection| {
                let fault = stat(connection, soon()).expect_err("an answer of nonsense");
                let Fault::Broken(Error::Protocol { reason }) = fault else {
                    panic!("{words:?}: {fault:?}");
                };
                assert!(
                    reason.contains("ring") || reason.contains("answer") || reason.contains("descr"),
                    "{reason}"
                );
                assert!(connection.has_ended());
            },
        );
    }
}

#[test]
fn a_daemon_that_scribbles_over_the_ring_is_an_error_and_no_more() {
    let heads: Vec<usize> =
        ring_words().iter().flat_map(|lane| [lane.written, lane.read, lane.asleep, lane.data]).collect();
    for seed in 1..20u64 {
        over_a_ring(
            |socket, _ring, file| {
                let mut random = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
                while !socket.has_peer_ended().unwrap() {
                    random ^= random << 13;
                    random ^= random >> 7;
                    random ^= random << 17;
                    let value = [random, u64::MAX, (random >> 16) % 64 * 8, (random >> 16) % 4];
                    scribble(&file, heads[(random >> 8) as usize % heads.len()], value[random as usize % 4]);
                    let _ = socket.try_send(&[1]);
                }
            },
            |connection| {
                for _ in 0..200 {
                    let fault = stat(connection, shortly()).expect_err("nobody answers");
                    assert!(!matches!(fault, Fault::Refused(_)), "{fault:?}");
                    if connection.has_ended() {
                        return;
                    }
                }
            },
        );
    }
}

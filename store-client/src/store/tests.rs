//! What the store promises, one test each.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Barrier,
    thread,
    time::{Duration, Instant},
};

use proptest::prelude::*;

use super::{arena::Start, geometry::Geometry, space::Entry, *};
use crate::alone::alone;

const FRAME: u64 = 256 << 10;

fn open(frames: u64, evict: bool) -> Store {
    Store::open(Config { evict, ..Config::new(frames * FRAME) }, |_, _| ()).unwrap()
}

fn open_with_quotas(frames: u64, quotas: &[(&str, u64)]) -> Result<Store> {
    let quotas = quotas.iter().map(|(name, quota)| (name.to_string(), *quota)).collect();
    Store::open(Config { quotas, ..Config::new(frames * FRAME) }, |_, _| ())
}

/// Bytes that differ from value to value and within one.
fn pattern(seed: u64, len: u64) -> Vec<u8> {
    (0..len).map(|i| (seed.wrapping_mul(31).wrapping_add(i).wrapping_mul(0x9e37_79b9) >> 13) as u8).collect()
}

fn commit(writer: &Writer, space: &Space, key: &str, bytes: &[u8], mode: Mode) -> Result<Put> {
    let mut grant = writer.reserve(space, bytes.len() as u64)?;
    grant.write(0, bytes)?;
    space.commit(grant, key, bytes.len() as u64, &[], mode)
}

fn put(writer: &Writer, space: &Space, key: &str, len: u64) -> Result<Put> {
    commit(writer, space, key, &pattern(len, len), Mode::Put)
}

fn size(space: &Space, key: &str) -> Option<u64> {
    space.peek(key).map(|object| object.len())
}

/// Where the value of `key` lies.
fn arena_of(space: &Space, key: &str) -> ArenaId {
    space.peek(key).unwrap().arena().id()
}

fn bytes_of(object: &Object) -> Vec<u8> {
    let mut bytes = vec![0; object.len() as usize];
    object.read(0, &mut bytes).unwrap();
    bytes
}

fn keys(space: &Space) -> Vec<String> {
    space.list("", None, usize::MAX).into_iter().map(|entry| entry.key).collect()
}

#[test]
fn values_of_every_size_come_back_whole() {
    let store = open(16, false);
    let sizes =
        [0, 1, 63, 64, 65, 4095, 4096, 4097, FRAME - 1, FRAME, FRAME + 1, 8 * FRAME - 1, 8 * FRAME + 1];
    let (writer, space) = (store.writer(), store.space("").unwrap());
    for size in sizes {
        assert_eq!(put(&writer, &space, &size.to_string(), size).unwrap(), Put::Stored, "{size}");
        let object = space.hold(&size.to_string()).unwrap();
        assert_eq!(bytes_of(&object), pattern(size, size), "{size}");
        assert_eq!(object.len(), size);
        if size > 4097 {
            assert!(space.remove(&size.to_string()));
        }
    }
    for size in &sizes[..8] {
        assert_eq!(bytes_of(&space.hold(&size.to_string()).unwrap()), pattern(*size, *size), "{size}");
    }
    space.clear();
    assert_eq!((store.stat().used, store.stat().granted), (0, 0));
}

#[test]
fn the_whole_pool_can_be_one_value() {
    for frames in [1, 4, 7, 8, 9, 33] {
        let store = open(frames, true);
        let (writer, space) = (store.writer(), store.space("").unwrap());
        for size in [1, 5000, 100_000] {
            put(&writer, &space, &size.to_string(), size).unwrap();
        }
        put(&writer, &space, "all", frames * FRAME).unwrap();
        assert_eq!(keys(&space), ["all"]);
        assert_eq!(store.stat().free, 0);
    }
}

#[test]
fn a_dropped_grant_gives_its_space_back() {
    let store = open(4, false);
    let (writer, space) = (store.writer(), store.space("").unwrap());
    let before = store.stat();
    for _ in 0..100 {
        let grant = writer.reserve(&space, 4 * FRAME).unwrap();
        assert_eq!((store.stat().granted, store.stat().free), (4 * FRAME, 0));
        drop(grant);
    }
    assert_eq!(store.stat(), before);
}

#[test]
fn a_grant_may_be_larger_than_the_value_and_not_smaller() {
    let store = open(16, false);
    let (writer, space) = (store.writer(), store.space("").unwrap());
    let mut grant = writer.reserve(&space, 10 * FRAME).unwrap();
    grant.write(0, b"short").unwrap();
    assert!(matches!(grant.write(10 * FRAME, b"x"), Err(Error::InvalidRange { .. })));
    assert!(matches!(grant.write(u64::MAX, b"x"), Err(Error::InvalidRange { .. })));
    space.commit(grant, "k", 5, b"meta", Mode::Put).unwrap();
    let object = space.hold("k").unwrap();
    assert_eq!((bytes_of(&object), object.meta()), (b"short".to_vec(), &b"meta"[..]));
    assert_eq!(store.stat().used, FRAME);
    let rest = writer.reserve(&space, 15 * FRAME).expect("what was not needed is free");
    drop(rest);
    let small = writer.reserve(&space, 100).unwrap();
    let error = space.commit(small, "k2", 101, &[], Mode::Put).unwrap_err();
    assert!(matches!(error, Error::InvalidRange { len: 101, limit: 100, .. }));
    assert_eq!((store.stat().objects, store.stat().granted), (1, 0));
}

#[test]
fn a_reader_keeps_its_bytes_through_remove_replace_and_eviction() {
    let store = open(8, true);
    let (writer, space) = (store.writer(), store.space("").unwrap());
    for key in ["removed", "replaced"] {
        put(&writer, &space, key, 3 * FRAME).unwrap();
    }
    let held: Vec<_> = ["removed", "replaced"].map(|key| space.hold(key).unwrap()).into();
    assert!(space.remove("removed"));
    assert!(!space.remove("removed"));
    let newer = commit(&writer, &space, "replaced", b"new", Mode::Upsert).unwrap();
    assert_eq!(newer, Put::Replaced);
    // Two frames are left; the pressure must not reach what is held.
    for i in 0..50 {
        put(&writer, &space, &format!("pressure{i}"), FRAME / 2).unwrap();
    }
    assert!(store.stat().evictions > 40);
    assert!(held.iter().all(|object| bytes_of(object) == pattern(3 * FRAME, 3 * FRAME)));
    assert!(matches!(writer.reserve(&space, 3 * FRAME), Err(Error::Full { .. })));
    drop(held);
    let _all = writer.reserve(&space, 6 * FRAME).expect("the bytes are free when the last reader is gone");
}

#[test]
fn what_is_held_is_not_evicted_because_that_frees_nothing() {
    let store = open(4, true);
    let (writer, space) = (store.writer(), store.space("").unwrap());
    for key in ["a", "b", "c", "d"] {
        put(&writer, &space, key, FRAME).unwrap();
    }
    let held = space.hold("a").unwrap();
    // "b" is older than "a" now; make "a" the oldest again.
    for key in ["b", "c", "d"] {
        drop(space.hold(key));
    }
    put(&writer, &space, "e", FRAME).unwrap();
    assert_eq!(keys(&space), ["a", "c", "d", "e"]);
    drop(held);
}

#[test]
fn eviction_takes_exactly_the_oldest_and_spares_the_pinned() {
    let store = open(4, true);
    let (writer, space) = (store.writer(), store.space("").unwrap());
    for key in ["a", "b", "c", "d"] {
        put(&writer, &space, key, FRAME).unwrap();
    }
    assert!(space.set_pinned("b", true));
    drop(space.hold("a"));
    assert!(space.exists("c") && size(&space, "c") == Some(FRAME), "to look is not to use");
    put(&writer, &space, "e", FRAME).unwrap();
    assert_eq!(keys(&space), ["a", "b", "d", "e"]);
    put(&writer, &space, "f", 2 * FRAME).unwrap();
    assert_eq!(keys(&space), ["b", "e", "f"]);
    assert_eq!(store.stat().evictions, 3);
    assert!(space.set_pinned("e", true) && space.set_pinned("f", true) && !space.set_pinned("a", true));
    assert!(matches!(writer.reserve(&space, 1), Err(Error::Full { .. })));
    assert!(space.set_pinned("b", false));
    put(&writer, &space, "g", FRAME).unwrap();
    assert_eq!(keys(&space), ["e", "f", "g"]);
}

#[test]
fn small_values_make_room_one_by_one() {
    let store = open(1, true);
    let (writer, space) = (store.writer(), store.space("").unwrap());
    for i in 0..4 * 1024 {
        put(&writer, &space, &format!("{i:04}"), 1).unwrap();
    }
    assert_eq!((store.stat().evictions, store.stat().free), (0, 0));
    for i in 0..100 {
        put(&writer, &space, &format!("new{i}"), 1).unwrap();
        assert_eq!(store.stat().evictions, i + 1);
    }
    assert!(!space.exists("0099") && space.exists("0100"));
}

/// However short values are: the index has no limit of its own, and none is needed.
#[test]
fn the_pool_bounds_the_number_of_values() {
    for len in [0, 1, 64] {
        for evict in [false, true] {
            let store = open(1, evict);
            let (writer, space) = (store.writer(), store.space("").unwrap());
            for n in 0..FRAME / 64 {
                assert_eq!(
                    put(&writer, &space, &format!("{n:04}"), len).unwrap(),
                    Put::Stored,
                    "{n} of {len}"
                );
            }
            let one_more = put(&writer, &space, "one more", len);
            match evict {
                false => {
                    assert!(matches!(one_more, Err(Error::Full { free: 0, largest: 0 })), "{one_more:?}")
                }
                true => assert_eq!((one_more.unwrap(), space.exists("0000")), (Put::Stored, false)),
            }
            let stat = store.stat();
            assert_eq!((stat.objects, stat.evictions), (FRAME / 64, u64::from(evict)));
            space.clear();
            assert_eq!(store.stat().free, FRAME);
        }
    }
}

#[test]
fn full_without_eviction_tells_what_is_free() {
    let store = open(4, false);
    let (writer, space) = (store.writer(), store.space("").unwrap());
    put(&writer, &space, "a", FRAME).unwrap();
    put(&writer, &space, "b", 2 * FRAME).unwrap();
    let error = writer.reserve(&space, 2 * FRAME).unwrap_err();
    assert!(matches!(error, Error::Full { free: FRAME, largest: FRAME }), "{error}");
    put(&writer, &space, "c", FRAME).unwrap();
    let error = writer.reserve(&space, 1).unwrap_err();
    assert!(matches!(error, Error::Full { free: 0, largest: 0 }), "{error}");
    assert_eq!((store.stat().objects, store.stat().evictions), (3, 0));
}

#[test]
fn what_is_larger_than_the_pool_is_refused_before_anything_is_evicted() {
    let store = open(4, true);
    let (writer, space) = (store.writer(), store.space("").unwrap());
    put(&writer, &space, "a", FRAME).unwrap();
    for size in [4 * FRAME + 1, 1 << 40, u64::MAX] {
        let error = writer.reserve(&space, size).unwrap_err();
        assert!(matches!(error, Error::TooLarge { limit, .. } if limit == 4 * FRAME), "{error}");
    }
    assert_eq!(keys(&space), ["a"]);
}

#[test]
fn memory_wanders_between_two_writers_within_the_budget() {
    let store = open(8, true);
    let (one, two, space) = (store.writer(), store.writer(), store.space("").unwrap());
    let mut arenas = BTreeSet::new();
    for round in 0..20 {
        for (name, writer) in [("one", &one), ("two", &two)] {
            for i in 0..8 {
                put(writer, &space, &format!("{name}{round}.{i}"), FRAME).unwrap();
                assert!(store.stat().populated <= 8 * FRAME);
            }
            // All of the memory is in this writer's arena now.
            let of_keys: BTreeSet<_> = keys(&space).iter().map(|key| arena_of(&space, key).0).collect();
            assert_eq!(of_keys.len(), 1);
            arenas.extend(of_keys);
        }
    }
    assert_eq!(arenas.len(), 2);
    let stat = store.stat();
    assert_eq!((stat.populated, stat.arenas, stat.objects), (8 * FRAME, 2, 8));
}

#[test]
fn a_new_writer_takes_over_the_idle_arena_with_the_most_memory() {
    let store = open(8, false);
    let space = store.space("").unwrap();
    let (one, two) = (store.writer(), store.writer());
    put(&one, &space, "a", FRAME).unwrap();
    put(&two, &space, "b", FRAME).unwrap();
    let warm = arena_of(&space, "a");
    drop(one);
    drop(two);
    let next = store.writer();
    put(&next, &space, "c", FRAME).unwrap();
    assert_eq!(arena_of(&space, "c"), warm);
    assert_eq!(bytes_of(&space.hold("a").unwrap()), pattern(FRAME, FRAME));
    assert_eq!(store.stat().arenas, 2, "the other one still holds a value");
}

#[test]
fn an_idle_arena_without_memory_is_dropped() {
    let store = open(4, true);
    let space = store.space("").unwrap();
    let one = store.writer();
    put(&one, &space, "a", 4 * FRAME).unwrap();
    let id = arena_of(&space, "a");
    let two = store.writer();
    drop(two.reserve(&space, 0));
    drop(one);
    put(&two, &space, "b", 4 * FRAME).unwrap();
    assert!(store.arena(id).is_none());
    assert_eq!(store.stat().arenas, 1);
}

#[test]
fn freed_memory_is_used_before_fresh_addresses() {
    let store = open(64, false);
    let (writer, space) = (store.writer(), store.space("").unwrap());
    for size in [100, 5000, 70_001, FRAME + 12_345, 9 * FRAME + 1] {
        put(&writer, &space, "keep", 1).unwrap();
        put(&writer, &space, "a", size).unwrap();
        put(&writer, &space, "fence", 4097).unwrap();
        let offset = space.hold("a").unwrap().offset();
        space.remove("a");
        put(&writer, &space, "b", size).unwrap();
        assert_eq!(space.hold("b").unwrap().offset(), offset, "{size}");
        space.clear();
    }
}

#[test]
fn a_put_keeps_the_value_that_is_there_and_an_upsert_replaces_it() {
    let store = open(4, false);
    let (writer, space) = (store.writer(), store.space("").unwrap());
    assert_eq!(commit(&writer, &space, "k", b"one", Mode::Put).unwrap(), Put::Stored);
    assert_eq!(commit(&writer, &space, "k", b"two", Mode::Put).unwrap(), Put::AlreadyExists);
    assert_eq!(bytes_of(&space.hold("k").unwrap()), b"one");
    assert_eq!(commit(&writer, &space, "k", b"", Mode::Upsert).unwrap(), Put::Replaced);
    assert!(space.hold("k").unwrap().is_empty());
    assert_eq!(commit(&writer, &space, "new", b"three", Mode::Upsert).unwrap(), Put::Stored);
}

#[test]
fn eight_threads_that_put_one_key_store_it_once() {
    let store = open(8, false);
    let space = store.space("").unwrap();
    for round in 0..50 {
        let (key, start) = (format!("k{round}"), Barrier::new(8));
        let outcomes: Vec<_> = thread::scope(|scope| {
            let threads: Vec<_> = (0..8)
                .map(|i| {
                    let (store, space, key, start) = (&store, &space, &key, &start);
                    scope.spawn(move || {
                        let writer = store.writer();
                        start.wait();
                        commit(&writer, space, key, &[i; 100], Mode::Put).unwrap()
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(outcomes.iter().filter(|&&put| put == Put::Stored).count(), 1);
        assert_eq!(outcomes.iter().filter(|&&put| put == Put::AlreadyExists).count(), 7);
        let bytes = bytes_of(&space.hold(&key).unwrap());
        assert!(bytes.iter().all(|&byte| byte == bytes[0]));
    }
}

#[test]
fn threads_of_one_writer_and_of_several_share_a_pool_under_pressure() {
    share_under_pressure(open(16, true), 16, 6 * 300 * 9 / 10);
}

/// With more memory, because less of it moves at once.
#[test]
fn threads_of_one_writer_and_of_several_share_a_standing_pool_under_pressure() {
    share_under_pressure(open_standing(40), 40, 6 * 300 / 2);
}

fn share_under_pressure(store: Store, frames: u64, enough: u64) {
    let (shared, space, stored) = (store.writer(), store.space("").unwrap(), AtomicU64::new(0));
    thread::scope(|scope| {
        for t in 0..6u64 {
            let (store, shared, space, stored) = (&store, &shared, &space, &stored);
            scope.spawn(move || {
                let own = store.writer();
                let writer = if t % 2 == 0 { shared } else { &own };
                for i in 0..300u64 {
                    let len = [1, 300, 5000, 70_000, FRAME, 2 * FRAME][((t + i * 7) % 6) as usize];
                    let (key, bytes) = (format!("{t}.{}", i % 20), pattern(t * 1000 + i, len));
                    match commit(writer, space, &key, &bytes, Mode::Upsert) {
                        Ok(_) => stored.fetch_add(1, Ordering::Relaxed),
                        // For a moment everything may be granted to the others or held by them.
                        Err(Error::Full { .. }) => continue,
                        Err(error) => panic!("{error}"),
                    };
                    if let Some(object) = space.hold(&key) {
                        assert_eq!(bytes_of(&object), bytes);
                    }
                    assert!(store.stat().populated <= frames * FRAME);
                }
            });
        }
    });
    let stored = stored.into_inner();
    assert!(stored > enough, "{stored} of {}", 6 * 300);
    space.clear();
    let stat = store.stat();
    assert_eq!((stat.used, stat.granted, stat.free), (0, 0, stat.pool));
}

#[test]
fn keys_and_what_is_beside_a_value_have_limits() {
    let store = open(1, false);
    let (writer, space) = (store.writer(), store.space("").unwrap());
    for (key, meta) in [("", 0), (&*"k".repeat(KEY_MAX + 1), 0), ("k", META_MAX + 1)] {
        let grant = writer.reserve(&space, 1).unwrap();
        let error = space.commit(grant, key, 1, &vec![7; meta], Mode::Put).unwrap_err();
        assert!(matches!(error, Error::InvalidKey { .. } | Error::InvalidArgument { .. }), "{error}");
    }
    let longest = "k".repeat(KEY_MAX);
    let grant = writer.reserve(&space, 1).unwrap();
    space.commit(grant, &longest, 1, &[7; META_MAX], Mode::Put).unwrap();
    assert_eq!(space.peek(&longest).unwrap().meta(), [7; META_MAX]);
    assert!(store.space(&"s".repeat(SPACE_MAX + 1)).is_err());
}

#[test]
fn lists_come_in_order_and_in_stable_pages() {
    let store = open(4, false);
    let (writer, space) = (store.writer(), store.space("").unwrap());
    for i in (0..100).rev() {
        put(&writer, &space, &format!("a/{i:03}"), i).unwrap();
        put(&writer, &space, &format!("b/{i:03}"), i).unwrap();
    }
    let (mut seen, mut after) = (Vec::new(), None);
    loop {
        let page = space.list("a/", after.as_deref(), 7);
        let Some(last) = page.last() else { break };
        after = Some(last.key.clone());
        seen.extend(page);
        // Keys that come and go meanwhile do not disturb the others.
        put(&writer, &space, "a/000a", 1).unwrap();
    }
    let expected: Vec<_> = (0..100).map(|i| Entry { key: format!("a/{i:03}"), len: i }).collect();
    assert_eq!(seen, expected);
    assert!(space.list("a/", None, 0).is_empty());
    assert_eq!((space.remove_prefix("a/"), space.remove_prefix("a/"), space.clear()), (101, 0, 100));
    assert_eq!(store.stat().used, 0);
}

#[test]
fn namespaces_are_independent_and_quotas_hold() {
    let store = open_with_quotas(8, &[("kept", 2 * FRAME)]).unwrap();
    let writer = store.writer();
    let (kept, a, b) = (store.space("kept").unwrap(), store.space("a").unwrap(), store.space("b").unwrap());
    put(&writer, &kept, "k", FRAME).unwrap();
    put(&writer, &a, "k", 2 * FRAME).unwrap();
    put(&writer, &b, "k", 3 * FRAME).unwrap();
    assert_eq!(
        (size(&kept, "k"), size(&a, "k"), size(&b, "k")),
        (Some(FRAME), Some(2 * FRAME), Some(3 * FRAME))
    );
    put(&writer, &a, "l", FRAME).unwrap();
    assert!(a.remove("k") && b.exists("k"));
    // The rest is six frames, whatever the quota leaves unused; the oldest of the others goes.
    put(&writer, &a, "big", 5 * FRAME).unwrap();
    assert_eq!((keys(&a), keys(&b), keys(&kept)), (vec!["big".into()], vec![], vec!["k".to_string()]));
    assert!(
        matches!(writer.reserve(&a, 7 * FRAME), Err(Error::TooLarge { limit, .. }) if limit == 6 * FRAME)
    );
    assert!(
        matches!(writer.reserve(&kept, 3 * FRAME), Err(Error::TooLarge { limit, .. }) if limit == 2 * FRAME)
    );
    // Within its quota it evicts its own only.
    put(&writer, &kept, "l", FRAME).unwrap();
    put(&writer, &kept, "m", FRAME).unwrap();
    assert_eq!((keys(&kept), keys(&a)), (vec!["l".into(), "m".to_string()], vec!["big".to_string()]));
    let grant = writer.reserve(&a, 1).unwrap();
    assert!(kept.commit(grant, "x", 1, &[], Mode::Put).is_err(), "another namespace's grant");
}

#[test]
fn among_namespaces_without_a_quota_the_oldest_goes_first() {
    let store = open(4, true);
    let writer = store.writer();
    let (a, b, c) = (store.space("a").unwrap(), store.space("b").unwrap(), store.space("c").unwrap());
    for (space, key) in [(&a, "1"), (&b, "2"), (&a, "3"), (&b, "4")] {
        put(&writer, space, key, FRAME).unwrap();
    }
    drop(a.hold("1"));
    put(&writer, &c, "5", FRAME).unwrap();
    assert_eq!((keys(&a), keys(&b)), (vec!["1".to_string(), "3".into()], vec!["4".to_string()]));
    put(&writer, &c, "6", 2 * FRAME).unwrap();
    assert_eq!(
        (keys(&a), keys(&b), keys(&c)),
        (vec!["1".into()], vec!["4".to_string()], vec!["6".to_string()])
    );
}

#[test]
fn a_namespace_that_nobody_uses_and_nothing_is_in_is_forgotten() {
    let store = open_with_quotas(4, &[("kept", FRAME)]).unwrap();
    let writer = store.writer();
    for i in 0..100 {
        store.space(&format!("visitor{i}")).unwrap();
        store.space("kept").unwrap();
    }
    assert_eq!(store.stat().spaces, 1, "a quota keeps a namespace");

    let (one, two) = (store.space("a").unwrap(), store.space("a").unwrap());
    drop(one);
    put(&writer, &two, "k", FRAME).unwrap();
    drop(two);
    assert_eq!(keys(&store.space("a").unwrap()), ["k"], "a value keeps one too");
    let other = store.space("b").unwrap();
    put(&writer, &other, "all", 3 * FRAME).unwrap();
    assert_eq!((store.stat().evictions, store.stat().spaces), (1, 2), "until it is evicted");
    assert!(keys(&store.space("a").unwrap()).is_empty());
    other.clear();
    assert_eq!(store.stat().spaces, 2, "whoever may still put something keeps it");
}

#[test]
fn a_contradictory_configuration_is_refused() {
    for quotas in [&[("a", 5 * FRAME)][..], &[("a", 3 * FRAME), ("b", 2 * FRAME)], &[("a", 1), ("a", 1)]] {
        assert!(matches!(open_with_quotas(4, quotas), Err(Error::InvalidArgument { .. })), "{quotas:?}");
    }
}

#[test]
fn a_pool_that_cannot_be_had_is_refused_at_open() {
    let error = Store::open(Config::new(1 << 42), |_, _| ()).unwrap_err();
    assert!(
        matches!(error, Error::OutOfMemory { asked, available } if asked == 1 << 42 && available > 0),
        "{error}"
    );
}

#[test]
fn huge_pages_are_used_or_their_lack_is_told() {
    let open = |pages| Store::open(Config { pages, ..Config::new(8 << 20) }, |_, _| ());
    let preferred = open(Pages::HugePreferred).unwrap();
    match open(Pages::HugeRequired) {
        Ok(store) => assert_eq!(store.stat().page, 2 << 20),
        Err(error) => assert!(error.to_string().contains("huge pages"), "{error}"),
    }
    let writer = preferred.writer();
    put(&writer, &preferred.space("").unwrap(), "k", 1).unwrap();
    assert_eq!(open(Pages::Normal).unwrap().stat().page, rustix::param::page_size() as u64);
    assert!([4096, 16384, 65536, 2 << 20].contains(&preferred.stat().page));
}

#[test]
fn the_progress_of_opening_is_told_up_to_the_end() {
    let mut told = Vec::new();
    let store = Store::open(Config::new(200 << 20), |done, total| told.push((done, total))).unwrap();
    assert_eq!((told[0], *told.last().unwrap()), ((0, 200 << 20), (200 << 20, 200 << 20)));
    assert!(told.is_sorted() && told.len() > 2);
    assert_eq!(store.stat().populated, store.stat().pool);
}

/// Numbers without a pattern, the same in every run.
fn noise(seed: u64) -> impl FnMut() -> u64 {
    let mut state = seed;
    move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb) >> 16
    }
}

/// Values of a frame and more own their frames, so churn among them leaves no splinters; smaller ones share frames, and
/// one of them may keep a frame from a large value. This says how much that costs in practice.
#[test]
fn churn_at_seven_tenths_leaves_room_and_nothing_is_lost_in_the_end() {
    const FRAMES: u64 = 256;
    let store = open(FRAMES, false);
    let (writer, space) = (store.writer(), store.space("").unwrap());
    let pool = store.stat().pool;
    let mut random = noise(7);
    let mut stored: Vec<String> = Vec::new();
    let mut least = pool;
    for n in 0..40_000 {
        // As many of 64 bytes as of 2 MiB, and of every power of two between.
        let len = (64 << (random() % 15)) + random() % 64;
        let full = store.stat().used + len > pool / 10 * 7;
        if full {
            let gone = stored.swap_remove((random() % stored.len() as u64) as usize);
            assert!(space.remove(&gone));
            continue;
        }
        let grant = writer.reserve(&space, len).unwrap_or_else(|e| panic!("{len} bytes in turn {n}: {e}"));
        let key = n.to_string();
        assert_eq!(space.commit(grant, &key, len, &[], Mode::Put).unwrap(), Put::Stored);
        stored.push(key);
        let largest = store.stat().largest;
        least = least.min(largest);
        drop(writer.reserve(&space, largest).expect("the largest is sure to fit"));
    }
    println!("{least} bytes of {pool} always fitted");
    assert!(least >= pool / 10, "only {least} bytes of {pool} fitted at some time");
    assert_eq!(space.clear(), stored.len() as u64);
    assert_eq!(store.stat().largest, pool);
    drop(writer.reserve(&space, pool).unwrap());
}

#[test]
fn an_empty_store_has_all_of_its_pool_for_one_value_whatever_it_held() {
    let store = open(48, false);
    let space = store.space("").unwrap();
    let writers: Vec<_> = (0..4).map(|_| store.writer()).collect();
    for round in 0..3 {
        // Of every slot size, and some that share frames.
        for (n, writer) in writers.iter().enumerate() {
            for len in (64..=4096).step_by(64).chain([5000, 20_000, 70_000, FRAME + 1]) {
                put(writer, &space, &format!("{round}.{n}.{len}"), len).unwrap();
            }
        }
        assert!(store.stat().largest < store.stat().pool);
        space.clear();
        let stat = store.stat();
        assert_eq!((stat.free, stat.largest, stat.populated), (stat.pool, stat.pool, stat.pool), "{stat:?}");
        drop(writers[round].reserve(&space, stat.pool).unwrap());
    }
}

/// The worst that can be done: values that share frames go, but for one of each frame. All other bytes are free, and yet
/// no large value fits. What is sure to fit is told as what it is.
#[test]
fn one_small_value_keeps_its_frame_and_no_more() {
    const FRAMES: u64 = 32;
    let store = open(FRAMES, false);
    let (writer, space) = (store.writer(), store.space("").unwrap());
    let mut by_frame = BTreeMap::<u64, Vec<String>>::new();
    for n in 0..FRAMES * (FRAME / 4096) {
        let key = n.to_string();
        put(&writer, &space, &key, 4096).unwrap();
        by_frame.entry(space.peek(&key).unwrap().offset() / FRAME).or_default().push(key);
    }
    assert_eq!((by_frame.len() as u64, store.stat().free), (FRAMES, 0));
    for keys in by_frame.values() {
        keys[1..].iter().for_each(|key| assert!(space.remove(key)));
    }
    let stat = store.stat();
    assert_eq!((stat.used, stat.largest), (FRAMES * 4096, 0), "{stat:?}");
    let full = writer.reserve(&space, FRAME).unwrap_err();
    assert!(matches!(full, Error::Full { largest: 0, free } if free == stat.free), "{full}");
    // Each one that goes gives its frame back.
    for (gone, keys) in (1..).zip(by_frame.values()) {
        assert!(space.remove(&keys[0]));
        assert_eq!(store.stat().largest, gone * FRAME);
    }
}

#[test]
fn arenas_of_many_writers_are_given_back_and_their_memory_stays_ready() {
    const FRAMES: u64 = 128;
    let store = open(FRAMES, false);
    let space = store.space("").unwrap();
    let ready = || {
        let stat = store.stat();
        assert_eq!((stat.populated, stat.largest), (stat.pool, stat.pool), "{stat:?}");
        stat.arenas
    };
    for wave in 0..5 {
        let writers: Vec<_> = (0..40).map(|_| store.writer()).collect();
        for (n, writer) in writers.iter().enumerate() {
            put(writer, &space, &format!("{wave}.{n}"), 3 * FRAME).unwrap();
        }
        assert_eq!(store.stat().arenas, 40);
        // Values first in one wave, writers first in the next: what still holds a value when its writer goes is given
        // back once another writer goes.
        if wave % 2 == 0 {
            space.clear();
            drop(writers);
        } else {
            drop(writers);
            assert_eq!(store.stat().arenas, 40, "a value stays where it is");
            space.clear();
            drop(store.writer());
        }
        assert_eq!(ready(), 4, "wave {wave}");
    }
    // All at once, from threads of their own, as sessions end.
    let writers: Vec<_> = (0..40).map(|_| store.writer()).collect();
    for (n, writer) in writers.iter().enumerate() {
        put(writer, &space, &n.to_string(), 3 * FRAME).unwrap();
    }
    space.clear();
    thread::scope(|scope| writers.into_iter().for_each(|writer| drop(scope.spawn(|| drop(writer)))));
    drop(store.writer());
    assert_eq!(ready(), 4);
    // What ends moves nothing.
    let writers: Vec<_> = (0..40).map(|_| store.writer()).collect();
    for (n, writer) in writers.iter().enumerate() {
        put(writer, &space, &n.to_string(), 3 * FRAME).unwrap();
    }
    space.clear();
    store.end();
    drop(writers);
    assert_eq!(store.stat().arenas, 40);
}

/// Many blocks of one writer need more arenas, but few.
#[test]
fn a_writer_of_many_blocks_has_few_arenas() {
    let store = open(4096, false);
    let (writers, space) = ((0..4).map(|_| store.writer()).collect::<Vec<_>>(), store.space("").unwrap());
    // All memory is in the first arena, whose table is large; the others begin with small ones.
    for (n, writer) in writers.iter().enumerate() {
        for i in 0..30_000 {
            let grant = writer.reserve(&space, 4097).unwrap();
            space.commit(grant, &format!("{n}.{i}"), 4097, &[], Mode::Put).unwrap();
        }
    }
    let stat = store.stat();
    assert_eq!(
        (stat.objects, stat.arenas),
        (120_000, 1 + 3 * 3),
        "4 Ki, 16 Ki and 64 Ki blocks for three of them"
    );
}

/// Page faults of this process, those of making memory ready included.
fn faults() -> u64 {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap();
    // After the name, which may hold anything: minflt is the tenth field, and the third of them is the first there.
    text.rsplit_once(") ").unwrap().1.split(' ').nth(7).unwrap().parse().unwrap()
}

#[test]
fn memory_that_came_free_is_used_again_without_a_fault() {
    alone(module_path!(), "memory_that_came_free_is_used_again_without_a_fault", || {
        let page = rustix::param::page_size() as u64;
        let before = faults();
        let store = open(256, false);
        let (writer, space) = (store.writer(), store.space("").unwrap());
        let stat = store.stat();
        let arena = Arc::clone(writer.reserve(&space, 1).unwrap().arena());
        let taken = || rustix::fs::fstat(arena.read_write()).unwrap().st_blocks as u64 * 512;
        assert_eq!((stat.populated, taken()), (stat.pool, stat.pool), "ready when it opens");
        let opening = faults() - before;
        assert!(stat.page > page || opening >= stat.pool / page, "{opening} faults are no measure here");

        let mut random = noise(3);
        let source = pattern(1, 4 << 20);
        let mut stored: Vec<(u64, u64)> = Vec::new();
        let (mut used, mut written, mut start) = (0, 0, 0);
        for n in 0..30_000 {
            if n == 10_000 {
                // The heap has its size, and values lie where they happened to.
                (start, written) = (faults(), 0);
            }
            let len = (64 << (random() % 15)) + random() % 64;
            while used + len > stat.pool / 10 * 7 {
                let (key, len) = stored.swap_remove((random() % stored.len() as u64) as usize);
                assert!(space.remove(&key.to_string()));
                used -= len;
            }
            commit(&writer, &space, &n.to_string(), &source[..len as usize], Mode::Put).unwrap();
            stored.push((n, len));
            (used, written) = (used + len, written + len);
        }
        let (faults, pages) = (faults() - start, written / page);
        println!("{faults} faults for {pages} pages written");
        assert!(faults <= pages / 100, "{faults} faults for {pages} pages written");
        assert_eq!((store.stat().populated, taken()), (stat.pool, stat.pool));
        space.clear();
        assert_eq!((store.stat().populated, taken()), (stat.pool, stat.pool));
    });
}

#[test]
fn the_pool_is_touched_by_as_many_threads_as_there_are_cores() {
    alone(module_path!(), "the_pool_is_touched_by_as_many_threads_as_there_are_cores", || {
        let touching = || {
            let threads = std::fs::read_dir("/proc/self/task").unwrap();
            let names =
                threads.filter_map(|thread| std::fs::read_to_string(thread.ok()?.path().join("comm")).ok());
            names.filter(|name| name.trim_end() == pool::TOUCH).count()
        };
        let mut most = 0;
        let store = Store::open(Config::new(512 << 20), |_, _| most = most.max(touching())).unwrap();
        let cores = thread::available_parallelism().unwrap().get();
        assert_eq!(most, cores.min(8), "of the {cores} cores");
        let stat = store.stat();
        println!("{} MiB in {} ms by {most} threads", stat.pool >> 20, stat.reserve_ms);
        assert!(stat.reserve_ms > 0);
    });
}

/// What one process of 64 GiB would do, in addresses alone: nothing is populated.
#[test]
fn an_arena_of_a_pool_of_64_gib_is_divided_without_gaps_or_overlaps() {
    const GIB: u64 = 1 << 30;
    let geometry = Geometry::new(64 * GIB, 4096).unwrap();
    assert_eq!((geometry.pool, geometry.span), (64 * GIB, 256 * GIB));
    let arena = Arena::new(ArenaId(0), geometry, geometry.span, false, false, usize::MAX).unwrap();
    let mut random = noise(64);
    let (mut taken, mut extents) = (0, BTreeMap::new());
    // Up to 2 GiB, mostly small, until the budget would be used up.
    while taken < geometry.pool {
        let len = (1 << (random() % 32)) + random() % 4096;
        let carved = arena.carve(len, Start::Anywhere).unwrap_or_else(|| panic!("{len} bytes after {taken}"));
        assert!(!carved.warm && carved.offset + len <= geometry.span);
        taken += geometry.shape(len).footprint();
        extents.insert(carved.offset, (len, carved.place));
    }
    assert!(extents.last_key_value().is_some_and(|(&offset, _)| offset > 32 * GIB), "all of it was used");
    let ends = extents.iter().map(|(offset, (len, _))| offset + len);
    assert!(extents.keys().skip(1).zip(ends).all(|(next, end)| end <= *next), "no two overlap");
    for (offset, (len, place)) in extents {
        arena.give_back(place, offset, len);
    }
    // What is left is one piece again.
    let whole = arena.carve(geometry.pool, Start::Frame).unwrap();
    arena.give_back(whole.place, whole.offset, geometry.pool);
    assert!(arena.is_vacant());
}

/// Bytes of private memory in use by this process; shared memory, so the pool, is not among them.
fn private_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

/// `HAULIER_TEST_OBJECTS=10000000 cargo test --release -p haulier an_object_costs -- --nocapture` does it with more; ten
/// million take 4 GiB. What it prints is for people: nothing depends on a clock.
#[test]
fn an_object_costs_little_beside_its_value_and_cycles_cost_nothing() {
    alone(module_path!(), "an_object_costs_little_beside_its_value_and_cycles_cost_nothing", || {
        let asked = std::env::var("HAULIER_TEST_OBJECTS");
        let count: u64 = asked.map_or(1_000_000, |count| count.parse().expect("a number of objects"));
        let store =
            Store::open(Config { evict: false, ..Config::new(count * 64 + FRAME) }, |_, _| ()).unwrap();
        let (writer, space) = (store.writer(), store.space("").unwrap());
        put(&writer, &space, "first", 1).unwrap();
        let before = private_bytes();
        let (mut from, mut slowest) = (0, Duration::ZERO);
        for up_to in (0..).map(|n| 100_000 * 10u64.pow(n)).take_while(|up_to| *up_to < count).chain([count]) {
            let start = Instant::now();
            let mut last = start;
            for i in from..up_to {
                put(&writer, &space, &format!("layer.{i:012}"), 1).unwrap();
                let now = Instant::now();
                slowest = slowest.max(now - last);
                last = now;
            }
            let (time, put) = (last - start, up_to - from);
            let start = Instant::now();
            for i in 0..100_000 {
                assert!(space.hold(&format!("layer.{:012}", i * 7919 % up_to)).is_some());
            }
            println!(
                "{up_to} objects: {} bytes each, put {} ns, at most {slowest:?}, hold {} ns",
                (private_bytes() - before) / up_to,
                time.as_nanos() / u128::from(put),
                start.elapsed().as_nanos() / 100_000
            );
            from = up_to;
        }
        let full = private_bytes();
        let each = (full - before) / count;
        assert!(each <= 256, "{each} bytes for each object");
        for _ in 0..5 {
            for i in 0..count / 5 {
                let key = format!("layer.{i:012}");
                assert!(space.remove(&key));
                put(&writer, &space, &key, 1).unwrap();
            }
        }
        let grown = private_bytes().saturating_sub(full);
        assert!(grown < 4 << 20, "{grown} bytes more after {count} removes and puts");
    });
}

#[derive(Debug, Clone)]
enum Op {
    Reserve { writer: usize, len: u64 },
    Commit { key: u8, upsert: bool, pin: bool },
    Abandon,
    Remove(u8),
    RemovePrefix(u8),
    Pin(u8, bool),
    Hold(u8),
    Release,
    Restart(usize),
    Largest(usize),
}

fn ops() -> impl Strategy<Value = Op> {
    let len =
        prop_oneof![0..200u64, 3000..6000u64, 0..FRAME, (0..4u64).prop_map(|n| n * FRAME), 0..9 * FRAME];
    let key = 0..12u8;
    prop_oneof![
        6 => (0..3usize, len).prop_map(|(writer, len)| Op::Reserve { writer, len }),
        6 => (key.clone(), any::<bool>(), prop::bool::weighted(0.1)).prop_map(|(key, upsert, pin)| Op::Commit { key, upsert, pin }),
        1 => Just(Op::Abandon),
        2 => key.clone().prop_map(Op::Remove),
        1 => key.clone().prop_map(Op::RemovePrefix),
        1 => (key.clone(), any::<bool>()).prop_map(|(key, pin)| Op::Pin(key, pin)),
        3 => key.prop_map(Op::Hold),
        2 => Just(Op::Release),
        1 => (0..3usize).prop_map(Op::Restart),
        1 => (0..3usize).prop_map(Op::Largest),
    ]
}

/// Runs `ops` on a store and on a map, and compares them after each.
fn follow(ops: &[Op], evict: bool) {
    let store = open(9, evict);
    let space = store.space("").unwrap();
    let mut writers: Vec<_> = (0..3).map(|_| store.writer()).collect();
    let mut model = BTreeMap::<String, Vec<u8>>::new();
    let (mut grants, mut held) = (Vec::new(), Vec::new());
    // A prefix of keys 1, 10 and 11.
    let name = |key: u8| format!("k{key}");
    for (seed, op) in ops.iter().enumerate() {
        match op {
            Op::Reserve { writer, len } => match writers[*writer].reserve(&space, *len) {
                Ok(mut grant) => {
                    let bytes = pattern(seed as u64, *len);
                    grant.write(0, &bytes).unwrap();
                    grants.push((grant, bytes));
                }
                Err(error) => assert!(matches!(error, Error::Full { .. }), "{error}"),
            },
            Op::Commit { key, upsert, pin } => {
                if let Some((grant, bytes)) = grants.pop() {
                    let (key, mode) = (name(*key), if *upsert { Mode::Upsert } else { Mode::Put });
                    let was = space.exists(&key);
                    let put = space.commit(grant, &key, bytes.len() as u64, &[], mode).unwrap();
                    let expected = match (was, upsert) {
                        (false, _) => Put::Stored,
                        (true, true) => Put::Replaced,
                        (true, false) => Put::AlreadyExists,
                    };
                    assert_eq!(put, expected);
                    if put != Put::AlreadyExists {
                        assert!(!*pin || space.set_pinned(&key, true));
                        model.insert(key, bytes);
                    }
                }
            }
            Op::Abandon => drop(grants.pop()),
            Op::Remove(key) => assert_eq!(space.remove(&name(*key)), model.remove(&name(*key)).is_some()),
            Op::RemovePrefix(key) => {
                let before = model.len();
                model.retain(|other, _| !other.starts_with(&name(*key)));
                assert_eq!(space.remove_prefix(&name(*key)), (before - model.len()) as u64);
            }
            Op::Pin(key, pin) => {
                assert_eq!(space.set_pinned(&name(*key), *pin), model.contains_key(&name(*key)))
            }
            Op::Hold(key) => {
                let object = space.hold(&name(*key));
                assert_eq!(object.is_some(), model.contains_key(&name(*key)));
                held.extend(object.map(|object| (object, model[&name(*key)].clone())));
            }
            Op::Release => drop(held.pop()),
            Op::Restart(writer) => writers[*writer] = store.writer(),
            Op::Largest(writer) => {
                let before = store.stat();
                if before.largest == 0 {
                    // Not even the empty value is sure to fit.
                    continue;
                }
                let grant = writers[*writer].reserve(&space, before.largest).unwrap();
                assert_eq!((grant.capacity(), store.stat().evictions), (before.largest, before.evictions));
            }
        }
        if evict {
            model.retain(|key, _| space.exists(key));
        }
        assert!(held.iter().all(|(object, bytes)| bytes_of(object) == *bytes));
        assert_eq!(keys(&space), model.keys().cloned().collect::<Vec<_>>());
        for (key, bytes) in &model {
            assert_eq!(size(&space, key), Some(bytes.len() as u64));
        }
        let stat = store.stat();
        assert!(stat.populated <= stat.pool && stat.used + stat.granted + stat.free == stat.pool, "{stat:?}");
    }
    for (key, bytes) in &model {
        assert_eq!(bytes_of(&space.hold(key).unwrap()), *bytes);
    }
    drop((grants, held));
    assert_eq!(space.clear(), model.len() as u64);
    let stat = store.stat();
    assert_eq!((stat.used, stat.granted, stat.objects), (0, 0, 0));
    let all = writers[0].reserve(&space, stat.pool).map(|grant| grant.capacity());
    assert_eq!(all.ok(), Some(stat.pool), "all memory is to be had again");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_store_does_what_a_map_does(ops in prop::collection::vec(ops(), 1..80), evict: bool) {
        follow(&ops, evict);
    }
}

#[test]
fn memory_that_a_writer_took_beyond_its_grants_is_taken_back_when_it_ends() {
    let store = Store::open(Config::new(8 << 20), |_, _| {}).unwrap();
    let space = store.space("").unwrap();
    let writer = store.writer();
    let grant = writer.reserve(&space, 1).unwrap();
    let arena = Arc::clone(grant.arena());
    let taken = || rustix::fs::fstat(arena.read_write()).unwrap().st_blocks as u64 * 512;
    let before = taken();
    rustix::io::pwrite(arena.read_write(), &[7; 3 << 20], arena.virtual_len() - (4 << 20)).unwrap();
    assert_eq!(taken(), before + (3 << 20));
    drop(grant);
    drop(writer);
    assert_eq!(taken(), before);
}

fn open_standing(frames: u64) -> Store {
    Store::open(Config { standing: true, ..Config::new(frames * FRAME) }, |_, _| ()).unwrap()
}

#[cfg(feature = "mooncake")]
#[test]
fn in_a_standing_pool_memory_moves_as_a_whole_and_only_after_what_is_attached_to_it_is_let_go() {
    struct LetGo(Arc<AtomicU64>);
    impl Drop for LetGo {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }
    let store = open_standing(64);
    let (one, two, space) = (store.writer(), store.writer(), store.space("").unwrap());
    let value = |writer: &Writer, len: u64| -> Result<(Arc<Object>, Arc<AtomicU64>)> {
        let mut grant = writer.reserve(&space, len)?;
        grant.write(0, &pattern(len, len))?;
        let object = space.without_key(grant, len, &[])?;
        let gone = Arc::new(AtomicU64::new(0));
        object.arena().attach(|region| {
            assert_eq!(region.len as u64, object.arena().virtual_len());
            // As a transport does that pins it.
            assert!(object.arena().take_holes(0, 1).is_empty(), "all of it has memory");
            Ok::<_, Error>(Box::new(LetGo(Arc::clone(&gone))) as _)
        })?;
        Ok((object, gone))
    };
    let gone = |gone: &AtomicU64| gone.load(Ordering::Relaxed);
    let (small, small_gone) = value(&one, 100).unwrap();
    let (large, large_gone) = value(&one, 32 * FRAME).unwrap();
    assert_ne!(small.arena().id(), large.arena().id());
    assert!(matches!(value(&two, 32 * FRAME), Err(Error::Full { .. })));
    assert_eq!((gone(&small_gone), gone(&large_gone)), (0, 0), "while a value lies there");
    assert_eq!(bytes_of(&large), pattern(32 * FRAME, 32 * FRAME));
    drop(large);
    assert_eq!(gone(&large_gone), 0, "nobody wants the memory");
    let (other, other_gone) = value(&two, 32 * FRAME).unwrap();
    assert_eq!((gone(&small_gone), gone(&large_gone), gone(&other_gone)), (0, 1, 0));
    assert!(store.stat().populated <= store.stat().pool);
    drop(other);
    // And back again, to an arena that its owner has kept.
    let (again, again_gone) = value(&one, 32 * FRAME).unwrap();
    assert_eq!((gone(&other_gone), gone(&again_gone)), (1, 0));
    assert_eq!(bytes_of(&small), pattern(100, 100));
    // With the writers the arenas are idle, and still what they were.
    drop((one, two, again));
    assert_eq!(gone(&again_gone), 0);
    drop((small, space, store));
    assert_eq!((gone(&small_gone), gone(&again_gone)), (1, 1));
}

#[test]
fn in_a_standing_pool_seven_eighths_of_it_can_be_one_value_and_many_writers_have_room() {
    for frames in [64, 71, 100, 1000] {
        let store = open_standing(frames);
        let (writer, space) = (store.writer(), store.space("").unwrap());
        put(&writer, &space, "large", frames * FRAME * 7 / 8 - FRAME).unwrap();
        space.clear();
        let Stat { pool, frame, .. } = store.stat();
        let writers: Vec<Writer> = (0..pool / frame / 8).map(|_| store.writer()).collect();
        let grants: Vec<_> = writers.iter().map(|writer| writer.reserve(&space, 70_000)).collect();
        assert!(grants.iter().all(Result::is_ok), "{frames} frames, {} writers", writers.len());
    }
}

//! The ring alone: what is pushed is taken, whole and in order; and whatever a peer writes, the other end gets a message or
//! an error.

use std::{collections::VecDeque, mem};

use proptest::prelude::*;

use super::*;

fn pair() -> (Ring, Ring) {
    let (node, file) = Ring::create().unwrap();
    (Ring::open(&file).unwrap(), node)
}

/// A message that tells its length and `seed` in every byte.
fn message(seed: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| (seed.wrapping_mul(31) ^ len.wrapping_mul(7) ^ i) as u8).collect()
}

fn take(ring: &mut Ring) -> Option<(Vec<u8>, bool)> {
    let mut buf = vec![0xEE; MESSAGE_MAX];
    ring.take(&mut buf).unwrap().map(|Record { len, beside }| (buf[..len].to_vec(), beside))
}

fn length() -> impl Strategy<Value = usize> {
    prop_oneof![
        8 => 1..200usize,
        4 => 1..FAR,
        1 => MESSAGE_MAX - 20..=MESSAGE_MAX,
    ]
}

#[derive(Debug, Clone)]
enum Step {
    Push(usize, bool),
    Take,
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Around the end, back to the start, until it is full and until it is empty, in both directions at once.
    #[test]
    fn what_is_pushed_is_taken_whole_and_in_order(
        steps in prop::collection::vec((
            any::<bool>(),
            prop_oneof![
                3 => (length(), any::<bool>()).prop_map(|(len, beside)| Step::Push(len, beside)),
                2 => Just(Step::Take),
            ],
        ), 1..300),
    ) {
        let (mut client, mut node) = pair();
        let mut waiting = [VecDeque::new(), VecDeque::new()];
        for (seed, (by_client, step)) in steps.into_iter().enumerate() {
            let (here, there) = if by_client { (0, 1) } else { (1, 0) };
            let ring = if by_client { &mut client } else { &mut node };
            match step {
                Step::Push(len, beside) => {
                    let room = ring.room(len).unwrap().is_some();
                    prop_assert_eq!(ring.push(&message(seed, len), beside).unwrap(), room);
                    // Where nothing waits there is always room, for the longest message too.
                    prop_assert!(room || !waiting[here].is_empty());
                    if room {
                        waiting[here].push_back((message(seed, len), beside));
                    }
                }
                Step::Take => {
                    prop_assert_eq!(ring.is_ready(), !waiting[there].is_empty());
                    prop_assert_eq!(take(ring), waiting[there].pop_front());
                }
            }
            prop_assert!(waiting[0].is_empty() || !client.was_taken());
            prop_assert!(!waiting[0].is_empty() || client.written == 0 || client.was_taken());
        }
        for (ring, mut rest) in [(&mut node, mem::take(&mut waiting[0])), (&mut client, mem::take(&mut waiting[1]))] {
            while let Some(expected) = rest.pop_front() {
                prop_assert_eq!(take(ring), Some(expected));
            }
            prop_assert_eq!(take(ring), None);
        }
    }

    /// Any words anywhere: messages, refusals, errors, but no panic and nothing out of bounds.
    #[test]
    fn whatever_a_peer_writes_is_a_message_or_an_error(
        scribbles in prop::collection::vec((
            prop_oneof![
                3 => prop::sample::select(
                    [Lane::REQUESTS, Lane::ANSWERS]
                        .iter()
                        .flat_map(|lane| [lane.written, lane.read, lane.asleep, lane.data])
                        .collect::<Vec<_>>()
                ),
                1 => 0..LEN / WORD,
            ],
            prop_oneof![
                any::<u64>(), 0..300u64, Just(u64::MAX), Just(BESIDE),
                (0..CAPACITY as u64 / 8 + 2).prop_map(|n| n * 8), (u64::MAX - 4096)..,
            ],
        ), 1..40),
    ) {
        let (client, mut node) = pair();
        // From there on it asks how far the peer is.
        node.written = FAR as u64;
        let mut buf = vec![0; MESSAGE_MAX];
        for (at, value) in scribbles {
            client.words.store(at, value);
            let _ = node.is_ready();
            match node.take(&mut buf) {
                Ok(record) => prop_assert!(record.is_none_or(|record| (1..=MESSAGE_MAX).contains(&record.len))),
                Err(e) => prop_assert_eq!(e.kind(), io::ErrorKind::InvalidData),
            }
            if let Err(e) = node.push(&[7; 100], false) {
                prop_assert_eq!(e.kind(), io::ErrorKind::InvalidData);
            }
            let _ = (node.must_ring(), node.was_taken());
        }
    }
}

#[test]
fn messages_of_every_length_pass() {
    let (mut client, mut node) = pair();
    let lens = (1..700).chain((700..MESSAGE_MAX - 40).step_by(1013)).chain(MESSAGE_MAX - 40..=MESSAGE_MAX);
    for len in lens {
        assert!(client.push(&message(1, len), false).unwrap());
        assert!(node.push(&message(2, len), true).unwrap());
        assert_eq!(take(&mut node), Some((message(1, len), false)));
        assert_eq!(take(&mut client), Some((message(2, len), true)));
    }
    for message in [&[][..], &vec![0; MESSAGE_MAX + 1]] {
        assert_eq!(client.push(message, false).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }
}

/// One after the other they stay within the first pages, which so stay in the caches.
#[test]
fn messages_that_are_taken_at_once_go_back_to_the_start() {
    let (mut client, mut node) = pair();
    let mut farthest = 0;
    for n in 0..10_000 {
        assert!(client.push(&message(n, 100), false).unwrap());
        farthest = farthest.max(offset(client.written));
        assert_eq!(take(&mut node), Some((message(n, 100), false)));
    }
    assert!(farthest <= FAR + record(100), "{farthest}");
}

#[test]
fn a_claim_that_cannot_be_is_an_error() {
    let lane = Lane::REQUESTS;
    let cases: &[(&str, &[(usize, u64)])] = &[
        ("more than fits", &[(lane.written, CAPACITY as u64 + 8)]),
        ("before the start", &[(lane.written, u64::MAX - 7)]),
        ("half a word", &[(lane.written, 12)]),
        ("an empty record", &[(lane.written, 16), (lane.data, 0)]),
        ("too long", &[(lane.written, CAPACITY as u64), (lane.data, MESSAGE_MAX as u64 + 1)]),
        ("unknown bits", &[(lane.written, 16), (lane.data, 1 << 40 | 1)]),
        ("longer than was written", &[(lane.written, 16), (lane.data, 9)]),
        ("back to the start from there", &[(lane.written, CAPACITY as u64), (lane.data, REWIND)]),
    ];
    for (what, words) in cases {
        let (client, mut node) = pair();
        words.iter().for_each(|&(at, value)| client.words.store(at, value));
        let e = node.take(&mut vec![0; MESSAGE_MAX]).expect_err(what);
        assert_eq!(e.kind(), io::ErrorKind::InvalidData, "{what}");
    }
    // Beyond the end of the lane, at its last word.
    let (client, mut node) = pair();
    node.read = (CAPACITY - WORD) as u64;
    client.words.store(lane.written, node.read + 16);
    client.words.store(lane.data + CAPACITY / WORD - 1, 8);
    assert_eq!(node.take(&mut vec![0; MESSAGE_MAX]).unwrap_err().kind(), io::ErrorKind::InvalidData);

    for read in [1, 8, 1 << 63, u64::MAX - FAR as u64 - 15] {
        let (client, mut node) = pair();
        // It asks how far the peer is only where it has to.
        node.written = (FAR + 8) as u64;
        client.words.store(Lane::ANSWERS.read, node.written.wrapping_add(read));
        assert_eq!(node.push(&[1; 8], false).unwrap_err().kind(), io::ErrorKind::InvalidData, "{read}");
        assert!(node.was_taken(), "what is not known may have happened");
    }
}

#[test]
fn a_peer_that_claims_to_sleep_is_rung_once() {
    let (client, node) = pair();
    assert!(!node.must_ring());
    client.words.store(Lane::ANSWERS.asleep, u64::MAX);
    assert!(node.must_ring() && !node.must_ring());
}

#[test]
fn memory_that_could_fault_is_no_ring() {
    let (_, whole) = Ring::create().unwrap();
    assert!(Ring::open(&whole).is_ok());
    assert!(
        rustix::fs::ftruncate(&whole, 0).is_err() && rustix::fs::ftruncate(&whole, 2 * LEN as u64).is_err()
    );
    let unsealed = rustix::fs::memfd_create("ring-test", MemfdFlags::CLOEXEC).unwrap();
    for len in [0, 4096, LEN as u64, LEN as u64 + 1] {
        rustix::fs::ftruncate(&unsealed, len).unwrap();
        assert_eq!(Ring::open(&unsealed).unwrap_err().kind(), io::ErrorKind::InvalidData, "{len}");
    }
}

//! Sleeping and waking under loom: this code, in every order that the memory model allows. A wake-up that is lost leaves
//! everybody asleep, which fails the model. The same is run without the fences, to show that it sees what they are for.

use std::sync::Arc;

use loom::{sync::Notify, thread};

use super::*;
use crate::index::models::{Model, explore};

type End<const FENCES: bool> = Ring<Arc<Model<FENCES>>>;

/// Both ends of a ring. The words that are watched: all positions, who sleeps, and the first records of the lanes.
fn ends<const FENCES: bool>() -> (End<FENCES>, End<FENCES>) {
    let lanes = [Lane::REQUESTS, Lane::ANSWERS];
    let watched: Vec<_> = lanes
        .iter()
        .flat_map(|lane| [lane.written, lane.read, lane.asleep, lane.data, lane.data + 1])
        .collect();
    let words = Arc::new(Model::new(LEN / WORD, &watched));
    (Ring::over(Arc::clone(&words), Side::Client), Ring::over(words, Side::Node))
}

fn say<const FENCES: bool>(ring: &mut End<FENCES>, message: &[u8], bell: &Notify) {
    assert!(ring.push(message, false).unwrap());
    if ring.must_ring() {
        bell.notify();
    }
}

fn hear<const FENCES: bool>(ring: &mut End<FENCES>, expected: &[u8], bell: &Notify) {
    let mut buf = vec![0; MESSAGE_MAX];
    loop {
        if let Some(record) = ring.take(&mut buf).unwrap() {
            assert_eq!(&buf[..record.len], expected);
            return;
        }
        ring.sleep(|| bell.wait());
    }
}

fn messages<const FENCES: bool>() {
    explore(2, || {
        let (mut client, mut node) = ends::<FENCES>();
        let bell = loom::sync::Arc::new(Notify::new());
        let rung = loom::sync::Arc::clone(&bell);
        let sender = thread::spawn(move || {
            say(&mut client, b"one", &rung);
            say(&mut client, b"and another", &rung);
        });
        hear(&mut node, b"one", &bell);
        hear(&mut node, b"and another", &bell);
        sender.join().unwrap();
    });
}

#[test]
fn whoever_sleeps_is_woken_for_every_message() {
    messages::<true>();
}

#[test]
#[should_panic]
fn without_the_fences_somebody_sleeps_on() {
    messages::<false>();
}

#[test]
fn a_request_and_its_answer_wake_both_ends() {
    explore(2, || {
        let (mut client, mut node) = ends::<true>();
        let bells = loom::sync::Arc::new([Notify::new(), Notify::new()]);
        let theirs = loom::sync::Arc::clone(&bells);
        let daemon = thread::spawn(move || {
            hear(&mut node, b"ask", &theirs[0]);
            say(&mut node, b"answer", &theirs[1]);
        });
        say(&mut client, b"ask", &bells[0]);
        hear(&mut client, b"answer", &bells[1]);
        assert!(client.was_taken());
        daemon.join().unwrap();
    });
}

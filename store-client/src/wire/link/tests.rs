use std::{os::fd::AsFd, sync::mpsc};

use rustix::fs::MemfdFlags;

use super::*;

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(10))
}

fn millis(limit: u64) -> Deadline {
    Deadline::after(Duration::from_millis(limit))
}

/// A client's and the daemon's end.
fn pair() -> (Link, Link) {
    let (a, b) = Socket::pair().unwrap();
    let (mut client, mut node) = (Link::new(Arc::new(a)), Link::new(Arc::new(b)));
    let (ring, file) = Ring::create().unwrap();
    client.use_ring(Ring::open(&file).unwrap());
    node.use_ring(ring);
    (client, node)
}

/// A descriptor that can be told from others by the length of its file.
fn file(len: u64) -> OwnedFd {
    let file = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, len).unwrap();
    file
}

fn length(fd: &OwnedFd) -> u64 {
    rustix::fs::fstat(fd).unwrap().st_size as u64
}

/// One message, and the lengths of the files that came with it.
fn recv(link: &mut Link, deadline: Deadline) -> io::Result<(Vec<u8>, Vec<u64>)> {
    let (mut buf, mut fds) = (Vec::new(), Vec::new());
    let len = link.recv(&mut buf, &mut fds, deadline)?;
    Ok((buf[..len].to_vec(), fds.iter().map(length).collect()))
}

fn kind<T: std::fmt::Debug>(outcome: io::Result<T>) -> io::ErrorKind {
    outcome.unwrap_err().kind()
}

#[test]
fn descriptors_come_with_their_own_message() {
    const COUNT: u64 = 400;
    for pause in [0, 20, 200] {
        let (mut client, mut node) = pair();
        thread::scope(|scope| {
            scope.spawn(move || {
                for n in 1..=COUNT {
                    // None, one or two, so that a message without them follows one with them and the other way round.
                    let files: Vec<_> = (0..n % 3).map(|extra| file(10 * n + extra)).collect();
                    let fds: Vec<_> = files.iter().map(AsFd::as_fd).collect();
                    client.send(&n.to_ne_bytes(), &fds, soon()).unwrap();
                    if n % 7 == 0 {
                        thread::sleep(Duration::from_micros(pause));
                    }
                }
                // Else what is left in the socket is thrown away with it.
                assert_eq!(recv(&mut client, soon()).unwrap().0, b"done");
            });
            for n in 1..=COUNT {
                let files = (0..n % 3).map(|extra| 10 * n + extra).collect();
                assert_eq!(recv(&mut node, soon()).unwrap(), (n.to_ne_bytes().to_vec(), files));
            }
            node.send(b"done", &[], soon()).unwrap();
        });
    }
}

#[test]
fn a_bell_without_a_message_is_harmless() {
    let (mut client, mut node) = pair();
    for count in [1, 10, 100] {
        (0..count).for_each(|_| assert!(client.socket.try_send(BELL).unwrap()));
        assert_eq!(kind(recv(&mut node, millis(20))), io::ErrorKind::TimedOut);
        (0..count).for_each(|_| assert!(client.socket.try_send(BELL).unwrap()));
        let fd = file(count);
        client.send(b"with", &[fd.as_fd()], soon()).unwrap();
        client.send(b"without", &[], soon()).unwrap();
        assert_eq!(recv(&mut node, soon()).unwrap(), (b"with".to_vec(), vec![count]));
        assert_eq!(recv(&mut node, soon()).unwrap(), (b"without".to_vec(), vec![]));
    }
}

#[test]
fn a_socket_that_is_full_of_bells_holds_up_no_message() {
    let (mut client, mut node) = pair();
    while client.socket.try_send(BELL).unwrap() {}
    thread::scope(|scope| {
        let taken = scope.spawn(|| (0..100).map(|_| recv(&mut node, soon()).unwrap().0.len()).sum::<usize>());
        (0..100).for_each(|_| client.send(&[1; 10], &[], soon()).unwrap());
        assert_eq!(taken.join().unwrap(), 1000);
    });
}

#[test]
fn who_rings_without_end_keeps_nobody_beyond_the_deadline() {
    let (client, mut node) = pair();
    let ring = || (0..).take_while(|_| client.socket.try_send(BELL).unwrap()).count();
    let bells = ring();
    assert_eq!(kind(recv(&mut node, Deadline::passed())), io::ErrorKind::TimedOut);
    let heard = ring();
    assert!(heard <= 2, "{heard} of {bells} were answered");
}

#[test]
fn descriptors_without_a_message_and_the_other_way_round_are_refused() {
    let fd = file(1);
    let fds = [fd.as_fd()];
    let (client, mut node) = pair();
    (0..2).for_each(|_| client.socket.send(BELL, &fds, soon()).unwrap());
    assert_eq!(kind(recv(&mut node, soon())), io::ErrorKind::InvalidData);

    let (mut client, mut node) = pair();
    client.ring.as_mut().unwrap().push(b"message", true).unwrap();
    assert_eq!(kind(recv(&mut node, soon())), io::ErrorKind::InvalidData);

    // However many bells are searched for them.
    let (mut client, mut node) = pair();
    while client.socket.try_send(BELL).unwrap() {}
    client.ring.as_mut().unwrap().push(b"message", true).unwrap();
    assert_eq!(kind(recv(&mut node, soon())), io::ErrorKind::InvalidData);
}

#[test]
fn the_peers_end_wakes_a_sleeper_after_all_that_the_peer_has_said() {
    for ends_itself in [false, true] {
        let (client, mut node) = pair();
        let own = Arc::clone(&node.socket);
        let (sleeps, is_asleep) = mpsc::channel();
        thread::scope(|scope| {
            let sleeper = scope.spawn(move || {
                sleeps.send(()).unwrap();
                recv(&mut node, Deadline::NEVER).unwrap()
            });
            is_asleep.recv().unwrap();
            thread::sleep(Duration::from_millis(20));
            assert!(!sleeper.is_finished());
            if ends_itself {
                own.shutdown()
            } else {
                drop(client)
            }
            assert_eq!(sleeper.join().unwrap(), (vec![], vec![]));
        });
    }
    let (mut client, mut node) = pair();
    client.send(b"last", &[], soon()).unwrap();
    client.send(b"words", &[], soon()).unwrap();
    drop(client);
    for said in [&b"last"[..], b"words", b"", b""] {
        assert_eq!(recv(&mut node, soon()).unwrap().0, said);
    }
}

#[test]
fn who_has_ended_the_connection_itself_hears_no_more() {
    let (mut client, mut node) = pair();
    client.send(b"too late", &[], soon()).unwrap();
    node.socket.shutdown();
    assert_eq!(recv(&mut node, soon()).unwrap().0, b"");
}

#[test]
fn a_deadline_is_kept() {
    let (mut client, mut node) = pair();
    for limit in [0, 1, 20, 300] {
        let start = Instant::now();
        assert_eq!(kind(recv(&mut node, millis(limit))), io::ErrorKind::TimedOut);
        let (took, limit) = (start.elapsed(), Duration::from_millis(limit));
        assert!(took >= limit && took < limit + Duration::from_secs(2), "{took:?}");
    }
    client.send(b"there", &[], soon()).unwrap();
    assert_eq!(recv(&mut node, Deadline::passed()).unwrap().0, b"there");
}

#[test]
fn a_peer_that_reads_nothing_makes_a_send_time_out_and_gets_all_that_was_sent_before() {
    let (mut client, mut node) = pair();
    let message = |n: usize| vec![n as u8; 20_000];
    let mut sent = 0;
    while client.try_send(&message(sent)).unwrap() {
        sent += 1;
    }
    assert!(sent > 10);
    let start = Instant::now();
    assert_eq!(kind(client.send(&message(sent), &[], millis(50))), io::ErrorKind::TimedOut);
    let took = start.elapsed();
    assert!(took >= Duration::from_millis(50) && took < Duration::from_secs(2), "{took:?}");
    assert!(!client.was_taken());
    (0..sent).for_each(|n| assert!(recv(&mut node, soon()).unwrap().0 == message(n)));
    assert!(client.was_taken());
    client.send(&message(sent), &[], Deadline::passed()).unwrap();
    assert!(recv(&mut node, soon()).unwrap().0 == message(sent));

    while client.try_send(&message(0)).unwrap() {}
    drop(node);
    assert_eq!(kind(client.send(&message(0), &[], Deadline::NEVER)), io::ErrorKind::BrokenPipe);
}

#[test]
fn a_message_of_a_length_that_cannot_be_is_refused_at_once() {
    let (mut client, mut node) = pair();
    let fd = file(1);
    for len in [0, MESSAGE_MAX + 1, 3 * MESSAGE_MAX] {
        let start = Instant::now();
        let sent = client.send(&vec![0; len], &[fd.as_fd()], soon());
        assert_eq!(kind(sent), io::ErrorKind::InvalidInput, "{len}");
        assert!(start.elapsed() < Duration::from_secs(5));
    }
    // Nor are its descriptors left for the next one.
    client.send(b"next", &[], soon()).unwrap();
    assert_eq!(recv(&mut node, soon()).unwrap(), (b"next".to_vec(), vec![]));
    let other = file(2);
    client.send(b"with", &[other.as_fd()], soon()).unwrap();
    assert_eq!(recv(&mut node, soon()).unwrap(), (b"with".to_vec(), vec![2]));
}

#[test]
fn no_wake_up_is_lost() {
    const ROUNDS: u64 = 20_000;
    let limit = Duration::from_secs(10);
    let (mut client, mut node) = pair();
    let start = Instant::now();
    let deadline = Deadline::after(limit);
    let expect = |link: &mut Link, n: u64, buf: &mut Vec<u8>| {
        let len = link.recv(buf, &mut Vec::new(), deadline).unwrap();
        assert_eq!(buf[..len], n.to_ne_bytes(), "{:?}", start.elapsed());
    };
    // Pauses around the time at which the other one falls asleep.
    let pause = |n: u64| {
        let random = n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        if random.is_multiple_of(4) {
            let until = Instant::now() + Duration::from_micros(random / 4 % 100);
            while Instant::now() < until {
                hint::spin_loop();
            }
        }
    };
    thread::scope(|scope| {
        scope.spawn(move || {
            let mut buf = Vec::new();
            for n in 0..ROUNDS {
                expect(&mut node, n, &mut buf);
                pause(2 * n);
                node.send(&n.to_ne_bytes(), &[], deadline).unwrap();
            }
        });
        let mut buf = Vec::new();
        for n in 0..ROUNDS {
            pause(2 * n + 1);
            client.send(&n.to_ne_bytes(), &[], deadline).unwrap();
            expect(&mut client, n, &mut buf);
        }
    });
    assert!(start.elapsed() < limit, "{:?}", start.elapsed());
}

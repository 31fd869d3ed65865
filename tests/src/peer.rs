//! A second process, for what one process cannot show: the test's own program is started again and gets a socket.
//!
//! Messages are JSON with descriptors beside them. A peer is killed when its handle is dropped, and ends by itself when
//! the test's end of the socket goes.

use std::{
    env,
    ffi::OsStr,
    io::{IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    process::{Child, Command, Stdio},
};

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use serde::{Serialize, de::DeserializeOwned};

/// Names the role that a process plays.
const ROLE: &str = "HAULIER_TESTS_PEER";
/// More than any message here has.
const MESSAGE_MAX: usize = 64 << 10;
/// More than any handle here has.
const DESCRIPTORS_MAX: usize = 16;

/// One end of the socket between a test and its peer.
#[derive(Debug)]
pub struct Link(OwnedFd);

impl Link {
    /// Sends a message, with descriptors beside it.
    pub fn send(&self, message: &impl Serialize, descriptors: &[BorrowedFd<'_>]) {
        let bytes = serde_json::to_vec(message).expect("a message is plain data");
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut beside = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            assert!(beside.push(SendAncillaryMessage::ScmRights(descriptors)), "too many descriptors");
        }
        sendmsg(&self.0, &[IoSlice::new(&bytes)], &mut beside, SendFlags::NOSIGNAL)
            .expect("the other process is there");
    }

    /// Waits for a message, and the descriptors beside it. `None` once the other process is gone.
    pub fn receive<T: DeserializeOwned>(&self) -> Option<(T, Vec<OwnedFd>)> {
        let mut bytes = vec![0; MESSAGE_MAX];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut beside = RecvAncillaryBuffer::new(&mut space);
        let slices = &mut [IoSliceMut::new(&mut bytes)];
        let got = recvmsg(&self.0, slices, &mut beside, RecvFlags::CMSG_CLOEXEC).ok()?.bytes;
        if got == 0 {
            return None;
        }
        let descriptors = beside
            .drain()
            .filter_map(|message| match message {
                RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
                _ => None,
            })
            .flatten()
            .collect();
        Some((serde_json::from_slice(&bytes[..got]).expect("both ends are of one build"), descriptors))
    }

    /// [`receive`](Link::receive), where the other process must not end first.
    pub fn expect<T: DeserializeOwned>(&self) -> T {
        self.receive().expect("the other process ended without an answer").0
    }
}

/// A running peer.
#[derive(Debug)]
pub struct Peer {
    link: Link,
    child: Child,
}

impl Peer {
    /// Starts `program` as `role`. Its `main` must come to [`role`] first.
    pub fn start(program: impl AsRef<OsStr>, role: &str) -> Self {
        Self::start_with(program, role, |_| {})
    }

    /// As [`start`](Self::start), with a command that `tweak` has seen.
    pub fn start_with(program: impl AsRef<OsStr>, role: &str, tweak: impl FnOnce(&mut Command)) -> Self {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .expect("a socket pair");
        let mut command = Command::new(program);
        tweak(&mut command);
        let child = command
            .env(ROLE, role)
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            .spawn()
            .expect("the peer starts");
        Peer { link: Link(ours), child }
    }

    /// The running program again, as `role`.
    pub fn again(role: &str) -> Self {
        Self::start(env::current_exe().expect("/proc is mounted"), role)
    }

    /// The socket to it.
    pub fn link(&self) -> &Link {
        &self.link
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Ends it with SIGKILL, as the kernel's memory killer does, and waits until it is gone.
    pub fn kill(&mut self) {
        self.child.kill().expect("it is our child");
        self.child.wait().expect("it is our child");
    }

    /// Closes the socket and waits until the process ends by itself; its exit code.
    pub fn finish(mut self) -> Option<i32> {
        let (unused, _) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .expect("a socket pair");
        drop(std::mem::replace(&mut self.link, Link(unused)));
        self.child.wait().expect("it is our child").code()
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The role that this process was started for, with its end of the socket; `None` in the test itself.
pub fn role() -> Option<(String, Link)> {
    let role = env::var(ROLE).ok()?;
    let link = std::io::stdin().as_fd().try_clone_to_owned().expect("the socket is standard input");
    Some((role, Link(link)))
}

//! A Unix socket of type SEQPACKET: messages arrive whole, descriptors ride beside them, and a peer that dies is noticed
//! at once.

use std::{
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use hal::Deadline;
use rustix::{
    cmsg_space,
    event::{PollFd, PollFlags, Timespec, poll},
    io::{Errno, retry_on_intr},
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
        SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown, SocketAddrUnix, SocketFlags,
        SocketType, recvmsg, send, sendmsg, sockopt,
    },
};

use super::message::{MESSAGE_DESCRIPTORS_MAX, MESSAGE_MAX};

/// A receive with more time than this left sleeps in the kernel in slices of this length. One with less asks `poll`
/// first, which costs a call more but is exact.
const SLICE: Duration = Duration::from_millis(250);

/// Room for two of the longest messages, so that the next one can be queued while the peer still reads.
const BUFFER: usize = 2 * MESSAGE_MAX;

/// The longest path of a socket; the kernel's address has room for it and a zero.
const PATH_MAX: usize = 107;

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 128;

const CONTROL: usize = cmsg_space!(ScmRights(MESSAGE_DESCRIPTORS_MAX));

/// One end of a connection. All methods work from any thread; one at a time receives.
#[derive(Debug)]
pub(crate) struct Socket {
    fd: OwnedFd,
    /// Whether receives sleep in slices now.
    sliced: AtomicBool,
    /// Whether this side has ended it.
    shut: AtomicBool,
}

impl Socket {
    /// The address of a socket in the file system.
    ///
    /// *Errors*: `InvalidInput` for a path that is too long for one.
    pub(crate) fn address(path: &Path) -> io::Result<SocketAddrUnix> {
        let len = path.as_os_str().len();
        if len > PATH_MAX {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!(
                    "the socket path has {len} bytes, at most {PATH_MAX} are possible: {}",
                    path.display()
                ),
            ));
        }
        Ok(SocketAddrUnix::new(path)?)
    }

    /// A socket that others connect to, with a file that only its owner may open.
    pub(crate) fn listen(address: &SocketAddrUnix) -> io::Result<Self> {
        let fd = unconnected()?;
        // The file gets the descriptor's mode when it is made, so there is no moment at which it is open to others.
        rustix::fs::fchmod(&fd, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR)?;
        rustix::net::bind(&fd, address)?;
        rustix::net::listen(&fd, BACKLOG)?;
        Ok(Self::new(fd))
    }

    /// Waits for the next one that connects to this listening socket. [`shutdown`](Self::shutdown) ends the wait with an
    /// error.
    pub(crate) fn accept(&self) -> io::Result<Self> {
        Self::from_connected(retry_on_intr(|| rustix::net::accept_with(&self.fd, SocketFlags::CLOEXEC))?)
    }

    /// Connects to the socket at `path`.
    ///
    /// *Errors*: `TimedOut` where nobody accepts; else as [`address`](Self::address) and `connect(2)`.
    pub(crate) fn connect(path: &Path, deadline: Deadline) -> io::Result<Self> {
        let address = Self::address(path)?;
        let fd = unconnected()?;
        if let Some(left) = deadline.left() {
            // Bounds the wait for a daemon that does not accept; later sends never block in the kernel.
            let left = left.max(Duration::from_millis(1));
            sockopt::set_socket_timeout(&fd, sockopt::Timeout::Send, Some(left))?;
        }
        match retry_on_intr(|| rustix::net::connect(&fd, &address)) {
            Ok(()) => Self::from_connected(fd),
            Err(Errno::AGAIN) => Err(io::ErrorKind::TimedOut.into()),
            Err(e) => Err(e.into()),
        }
    }

    /// Two ends that are connected to each other.
    #[cfg(test)]
    pub(crate) fn pair() -> io::Result<(Self, Self)> {
        let (a, b) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        Ok((Self::from_connected(a)?, Self::from_connected(b)?))
    }

    /// Sends one message with descriptors beside it, and waits until `deadline` for the peer to make room.
    ///
    /// *Errors*: `TimedOut` when it made none; `BrokenPipe` when it is gone.
    pub(crate) fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>], deadline: Deadline) -> io::Result<()> {
        while !self.offer(bytes, fds)? {
            self.wait(PollFlags::OUT, deadline.left())?;
        }
        Ok(())
    }

    /// Sends one message if the peer has room for it right now; whether it was sent.
    pub(crate) fn try_send(&self, bytes: &[u8]) -> io::Result<bool> {
        self.offer(bytes, &[])
    }

    /// Receives one message into `buf[..n]`, and the descriptors beside it into `fds`. `n` is 0 when the peer has ended,
    /// and then only.
    ///
    /// `buf` is made long enough once and then reused; what lies behind `n` in it is left from earlier messages.
    /// *Errors*: `TimedOut`; `InvalidData` for a message or a number of descriptors that no peer of ours sends; `EMFILE`
    /// where this process may not have as many descriptors as came, which are lost.
    pub(crate) fn recv(
        &self,
        buf: &mut Vec<u8>,
        fds: &mut Vec<OwnedFd>,
        deadline: Deadline,
    ) -> io::Result<usize> {
        fds.clear();
        if buf.len() < MESSAGE_MAX {
            buf.resize(MESSAGE_MAX, 0);
        }
        self.recv_short(&mut buf[..MESSAGE_MAX], fds, deadline)
    }

    /// As [`recv`](Self::recv) for messages that fit `buf`, whose descriptors are added to `fds`.
    pub(crate) fn recv_short(
        &self,
        buf: &mut [u8],
        fds: &mut Vec<OwnedFd>,
        deadline: Deadline,
    ) -> io::Result<usize> {
        loop {
            let flags = match deadline.left() {
                None => {
                    self.sleep_in_slices(false)?;
                    RecvFlags::CMSG_CLOEXEC
                }
                Some(left) if left >= SLICE => {
                    self.sleep_in_slices(true)?;
                    RecvFlags::CMSG_CLOEXEC
                }
                Some(left) => {
                    self.wait(PollFlags::IN, Some(left))?;
                    RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT
                }
            };
            match self.take(buf, fds, flags) {
                // A slice is over, or another thread was faster.
                Err(Errno::AGAIN | Errno::INTR) => {}
                // The peer ended without reading all that it was sent.
                Err(Errno::CONNRESET) => return Ok(0),
                Err(e) => return Err(e.into()),
                // There is room for all that may be sent, so it is this process that can have no more.
                Ok((_, flags))
                    if flags.contains(ReturnFlags::CTRUNC) && fds.len() < MESSAGE_DESCRIPTORS_MAX =>
                {
                    fds.clear();
                    return Err(Errno::MFILE.into());
                }
                Ok((len, flags)) if flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) => {
                    let with = fds.len();
                    fds.clear();
                    return Err(io::Error::new(
                        io::ErrorKind::InvalidData,
                        format!("a message was cut at {len} bytes and {with} descriptors"),
                    ));
                }
                // It reads like the end, and no message of ours is empty.
                Ok((0, _)) if !self.has_peer_ended()? => {
                    fds.clear();
                    return Err(io::Error::new(io::ErrorKind::InvalidData, "a message was empty"));
                }
                Ok((len, _)) => return Ok(len),
            }
        }
    }

    /// Who is at the other end, as the kernel saw it when the connection was made.
    pub(crate) fn peer(&self) -> io::Result<Peer> {
        credentials::of(self.fd.as_fd())
    }

    /// Ends the connection for both sides, also for a thread that waits in [`recv`](Self::recv).
    pub(crate) fn shutdown(&self) {
        self.shut.store(true, Ordering::Relaxed);
        // It fails only where the connection is gone already.
        let _ = rustix::net::shutdown(&self.fd, Shutdown::Both);
    }

    /// Whether this side has ended the connection.
    pub(crate) fn is_shut(&self) -> bool {
        self.shut.load(Ordering::Relaxed)
    }

    /// Tells the peer that nothing more comes: it reads what it was sent, and then the end. It can still be heard.
    pub(crate) fn shutdown_sending(&self) {
        // As above.
        let _ = rustix::net::shutdown(&self.fd, Shutdown::Write);
    }

    /// Whether nothing more can come from the peer, once what has come is read.
    pub(crate) fn has_peer_ended(&self) -> io::Result<bool> {
        let mut fd = [PollFd::new(&self.fd, PollFlags::RDHUP)];
        retry_on_intr(|| poll(&mut fd, Some(&Timespec::default())))?;
        Ok(fd[0].revents().intersects(PollFlags::RDHUP | PollFlags::HUP))
    }

    fn new(fd: OwnedFd) -> Self {
        Socket { fd, sliced: AtomicBool::new(false), shut: AtomicBool::new(false) }
    }

    fn from_connected(fd: OwnedFd) -> io::Result<Self> {
        // The kernel cuts it to what the administrator allows.
        sockopt::set_socket_send_buffer_size(&fd, BUFFER)?;
        Ok(Self::new(fd))
    }

    /// One attempt, without waiting.
    fn offer(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<bool> {
        if bytes.len() > MESSAGE_MAX || fds.len() > MESSAGE_DESCRIPTORS_MAX {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let sent = retry_on_intr(|| {
            if fds.is_empty() {
                return send(&self.fd, bytes, flags);
            }
            let mut space = [MaybeUninit::uninit(); CONTROL];
            let mut control = SendAncillaryBuffer::new(&mut space);
            control.push(SendAncillaryMessage::ScmRights(fds));
            sendmsg(&self.fd, &[IoSlice::new(bytes)], &mut control, flags)
        });
        match sent {
            Ok(_) => Ok(true),
            Err(Errno::AGAIN) => Ok(false),
            Err(e) => Err(e.into()),
        }
    }

    /// One receive; descriptors are closed by their owner `fds` whatever comes of the message.
    fn take(
        &self,
        buf: &mut [u8],
        fds: &mut Vec<OwnedFd>,
        flags: RecvFlags,
    ) -> Result<(usize, ReturnFlags), Errno> {
        let mut space = [MaybeUninit::uninit(); CONTROL];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let got = recvmsg(&self.fd, &mut [IoSliceMut::new(buf)], &mut control, flags)?;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(received) = message {
                fds.extend(received);
            }
        }
        Ok((got.bytes, got.flags))
    }

    /// Whoever has no deadline sleeps until something comes: an idle daemon does not run.
    fn sleep_in_slices(&self, sliced: bool) -> io::Result<()> {
        if self.sliced.load(Ordering::Relaxed) != sliced {
            sockopt::set_socket_timeout(&self.fd, sockopt::Timeout::Recv, sliced.then_some(SLICE))?;
            self.sliced.store(sliced, Ordering::Relaxed);
        }
        Ok(())
    }

    fn wait(&self, event: PollFlags, limit: Option<Duration>) -> io::Result<()> {
        // A limit beyond what the kernel can count is none.
        let limit = limit.and_then(|limit| limit.try_into().ok());
        match poll(&mut [PollFd::new(&self.fd, event)], limit.as_ref()) {
            Ok(0) => Err(io::ErrorKind::TimedOut.into()),
            // The caller looks at its deadline again.
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }
}

/// The process at the other end of a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Peer {
    /// `None` where it lives in a process namespace that cannot be seen from here, as in another container.
    pub(crate) pid: Option<u32>,
    /// The user it ran as when it connected or listened.
    pub(crate) uid: u32,
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn unconnected() -> io::Result<OwnedFd> {
    let family = AddressFamily::UNIX;
    Ok(rustix::net::socket_with(family, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}

/// The one question that rustix (1.1) answers wrongly: its process id cannot be 0, which is what the kernel says of a peer
/// in a foreign process namespace, and the whole answer then reads as an error.
mod credentials {
    use std::{
        ffi::{c_int, c_uint},
        io,
        os::fd::{AsRawFd, BorrowedFd},
    };

    use super::Peer;

    const SOL_SOCKET: c_int = 1;
    const SO_PEERCRED: c_int =
        if cfg!(any(target_arch = "powerpc", target_arch = "powerpc64")) { 21 } else { 17 };

    #[repr(C)]
    #[derive(Default)]
    struct Ucred {
        pid: c_int,
        uid: c_uint,
        gid: c_uint,
    }

    unsafe extern "C" {
        fn getsockopt(fd: c_int, level: c_int, name: c_int, value: *mut Ucred, len: *mut c_uint) -> c_int;
    }

    pub(super) fn of(socket: BorrowedFd<'_>) -> io::Result<Peer> {
        let mut value = Ucred::default();
        let mut len = size_of::<Ucred>() as c_uint;
        // SAFETY: both pointers are to live values of ours, and the kernel writes at most `len` bytes to the first.
        let outcome =
            unsafe { getsockopt(socket.as_raw_fd(), SOL_SOCKET, SO_PEERCRED, &mut value, &mut len) };
        if outcome != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Peer { pid: u32::try_from(value.pid).ok().filter(|&pid| pid != 0), uid: value.uid })
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    fn soon() -> Deadline {
        Deadline::after(Duration::from_secs(5))
    }

    #[test]
    fn the_longest_message_passes_whole_with_all_its_descriptors() {
        let (a, b) = Socket::pair().unwrap();
        let message = vec![7; MESSAGE_MAX];
        let fds = vec![a.as_fd(); MESSAGE_DESCRIPTORS_MAX];
        a.send(&message, &fds, soon()).unwrap();
        let (mut buf, mut fds) = (Vec::new(), Vec::new());
        assert_eq!(b.recv(&mut buf, &mut fds, soon()).unwrap(), MESSAGE_MAX);
        assert!(buf == message && fds.len() == MESSAGE_DESCRIPTORS_MAX);
        assert!(a.send(&[0; MESSAGE_MAX + 1], &[], soon()).is_err());
    }

    #[test]
    fn a_cut_message_is_an_error_and_its_descriptors_are_closed() {
        let (a, b) = Socket::pair().unwrap();
        let (mut buf, mut fds) = (Vec::new(), Vec::new());
        let (inner, watched) = Socket::pair().unwrap();
        let space = &mut [MaybeUninit::uninit(); cmsg_space!(ScmRights(253))];
        let mut control = SendAncillaryBuffer::new(space);
        let many = [inner.as_fd(); 253];
        control.push(SendAncillaryMessage::ScmRights(&many));
        sendmsg(&a.fd, &[IoSlice::new(&[1])], &mut control, SendFlags::empty()).unwrap();
        send(&a.fd, &vec![0; MESSAGE_MAX + 1], SendFlags::empty()).unwrap();
        for _ in 0..2 {
            let e = b.recv(&mut buf, &mut fds, soon()).unwrap_err();
            assert_eq!((e.kind(), fds.len()), (io::ErrorKind::InvalidData, 0));
        }
        // The last copy of `inner` is gone, so its peer sees the end.
        drop(inner);
        assert_eq!(watched.recv(&mut buf, &mut fds, soon()).unwrap(), 0);
    }

    #[test]
    fn a_deadline_is_kept_whether_short_or_longer_than_a_slice() {
        let (a, b) = Socket::pair().unwrap();
        let (mut buf, mut fds) = (Vec::new(), Vec::new());
        for limit in [0, 20, 300] {
            let limit = Duration::from_millis(limit);
            let start = std::time::Instant::now();
            let e = b.recv(&mut buf, &mut fds, Deadline::after(limit)).unwrap_err();
            let took = start.elapsed();
            assert_eq!(e.kind(), io::ErrorKind::TimedOut);
            assert!(took >= limit && took < limit + Duration::from_secs(2), "{took:?}");
        }
        a.send(&[1, 2, 3], &[], soon()).unwrap();
        assert_eq!(b.recv(&mut buf, &mut fds, Deadline::passed()).unwrap(), 3);
        while a.try_send(&[0; 4096]).unwrap() {}
        let e = a.send(&[0; 4096], &[], Deadline::after(Duration::from_millis(20))).unwrap_err();
        assert_eq!(e.kind(), io::ErrorKind::TimedOut);
    }

    #[test]
    fn the_end_shows_as_zero_bytes_and_wakes_a_waiting_thread() {
        let (mut buf, mut fds) = (Vec::new(), Vec::new());
        let (a, b) = Socket::pair().unwrap();
        b.send(&[1], &[], soon()).unwrap();
        drop(b);
        a.recv(&mut buf, &mut fds, soon()).unwrap();
        assert_eq!(a.recv(&mut buf, &mut fds, Deadline::NEVER).unwrap(), 0);
        assert_eq!(a.send(&[1], &[], soon()).unwrap_err().kind(), io::ErrorKind::BrokenPipe);

        let (a, _b) = Socket::pair().unwrap();
        thread::scope(|scope| {
            let waiting = scope.spawn(|| a.recv(&mut Vec::new(), &mut Vec::new(), Deadline::NEVER).unwrap());
            a.shutdown();
            assert_eq!(waiting.join().unwrap(), 0);
        });
    }

    #[test]
    fn an_empty_message_is_not_the_end() {
        let (a, b) = Socket::pair().unwrap();
        let (mut buf, mut fds) = (Vec::new(), Vec::new());
        a.send(&[], &[], soon()).unwrap();
        a.send(&[1], &[], soon()).unwrap();
        let e = b.recv(&mut buf, &mut fds, soon()).unwrap_err();
        assert_eq!(e.kind(), io::ErrorKind::InvalidData);
        assert_eq!(b.recv(&mut buf, &mut fds, soon()).unwrap(), 1);
    }

    #[test]
    fn who_sends_no_more_can_still_hear() {
        let (a, b) = Socket::pair().unwrap();
        let (mut buf, mut fds) = (Vec::new(), Vec::new());
        a.send(&[1], &[], soon()).unwrap();
        a.shutdown_sending();
        assert_eq!(a.send(&[1], &[], soon()).unwrap_err().kind(), io::ErrorKind::BrokenPipe);
        assert_eq!(b.recv(&mut buf, &mut fds, soon()).unwrap(), 1);
        assert_eq!(b.recv(&mut buf, &mut fds, soon()).unwrap(), 0);
        b.send(&[1, 2], &[], soon()).unwrap();
        assert_eq!(a.recv(&mut buf, &mut fds, soon()).unwrap(), 2);
        drop(b);
        assert_eq!(a.recv(&mut buf, &mut fds, soon()).unwrap(), 0);
    }

    #[test]
    fn a_path_that_no_socket_can_have_is_refused_with_its_length() {
        let e = Socket::connect(Path::new(&format!("/tmp/{}", "x".repeat(103))), soon()).unwrap_err();
        assert!(e.to_string().contains("108 bytes, at most 107"), "{e}");
    }

    #[test]
    fn the_kernel_tells_who_the_peer_is() {
        let (a, _b) = Socket::pair().unwrap();
        let uid = rustix::process::getuid().as_raw();
        assert_eq!(a.peer().unwrap(), Peer { pid: Some(std::process::id()), uid });
    }
}

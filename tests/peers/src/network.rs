//! A network of this process alone: some of what is compared listens on all addresses and cannot be told otherwise.

use std::{io, mem};

use crate::failure::{During, Result};

/// Leaves the host's network for one that has nothing but loopback. What this process starts later is there too.
///
/// To be called while this process has one thread. *Errors*: where the kernel does not allow it.
pub fn leave() -> Result<()> {
    // Without root, in a user namespace of its own.
    let user = if rustix::process::geteuid().is_root() { 0 } else { libc::CLONE_NEWUSER };
    // SAFETY: descriptors and memory stay as they are.
    done(unsafe { libc::unshare(libc::CLONE_NEWNET | user) }).during("a network namespace")?;
    // SAFETY: a system call that takes no pointer.
    let socket = unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
    done(socket).during("a socket")?;
    // SAFETY: zeros are a request.
    let mut request: libc::ifreq = unsafe { mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(b"lo") {
        *to = *from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
    // SAFETY: the request is whole, and the socket is this function's.
    let up = unsafe { libc::ioctl(socket, libc::SIOCSIFFLAGS, &request) };
    let up = done(up).during("loopback");
    // SAFETY: as above, and nobody uses it any more.
    unsafe { libc::close(socket) };
    up
}

fn done(code: libc::c_int) -> io::Result<()> {
    if code < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

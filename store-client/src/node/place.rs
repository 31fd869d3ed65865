//! The place of a daemon: a directory that only its user can enter, a lock, and the socket.
//!
//! The lock is held through an open file, so the kernel gives it up when the daemon dies, however it dies. Who has the
//! lock knows that a socket found there is stale.

use std::{
    ffi::OsString,
    fs::{self, DirBuilder, File},
    io::{self, Read, Seek, Write},
    os::unix::fs::{DirBuilderExt, FileTypeExt},
    path::{Path, PathBuf},
    time::Duration,
};

use hal::Deadline;
use rustix::{
    fs::{FileType, FlockOperation, Mode, OFlags, flock, fstat, open},
    io::Errno,
};

use super::os;
use crate::{
    error::{Error, Result},
    wire::Socket,
};

/// Taken until dropped, which removes the socket.
#[derive(Debug)]
pub(super) struct Place {
    socket: PathBuf,
    // The file stays when the lock is given up: to remove it would race with the next daemon that opens it.
    _lock: File,
}

impl Place {
    /// Makes or checks the directory, takes the lock, and listens.
    pub(super) fn take(socket: &Path) -> Result<(Self, Socket)> {
        let address = Socket::address(socket).map_err(|e| Error::InvalidArgument { what: e.to_string() })?;
        make_private(directory(socket))?;
        let lock = lock(socket)?;
        remove_stale(socket)?;
        let listener =
            Socket::listen(&address).map_err(|e| os(format!("listening at {}", socket.display()), &e))?;
        Ok((Place { socket: socket.to_owned(), _lock: lock }, listener))
    }

    pub(super) fn socket(&self) -> &Path {
        &self.socket
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Err(e) = fs::remove_file(&self.socket) {
            tracing::debug!(socket = %self.socket.display(), %e, "the socket's file was gone already");
        }
    }
}

fn directory(socket: &Path) -> &Path {
    match socket.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => dir,
        _ => Path::new("."),
    }
}

/// Sees to it that nobody else can put something else where the socket is.
fn make_private(dir: &Path) -> Result<()> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(dir)
        .map_err(|e| os(format!("making the directory {}", dir.display()), &e))?;
    let refuse = |why: String| Error::InvalidArgument {
        what: format!("the socket's directory {} {why}", dir.display()),
    };
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let stat = match open(dir, flags, Mode::empty()).and_then(fstat) {
        Ok(stat) => stat,
        Err(Errno::LOOP | Errno::NOTDIR) => {
            return Err(refuse("is a symbolic link or no directory; name the real one".into()));
        }
        Err(e) => return Err(os(format!("looking at the directory {}", dir.display()), &e.into())),
    };
    let user = rustix::process::geteuid().as_raw();
    if stat.st_uid != user {
        return Err(refuse(format!("belongs to user {}, the daemon runs as {user}", stat.st_uid)));
    }
    let mode = stat.st_mode & 0o777;
    if mode & 0o077 != 0 {
        return Err(refuse(format!(
            "is open to other users (mode {mode:03o}); use one of its own (--socket), or chmod 700"
        )));
    }
    Ok(())
}

fn lock(socket: &Path) -> Result<File> {
    let path = PathBuf::from(OsString::from_iter([socket.as_os_str(), ".lock".as_ref()]));
    let failed = |e: io::Error| os(format!("locking {}", path.display()), &e);
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = open(&path, flags, Mode::RUSR | Mode::WUSR).map_err(|e| failed(e.into()))?;
    let mut file = File::from(file);
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(Errno::WOULDBLOCK) => {
            let mut pid = String::new();
            file.take(16).read_to_string(&mut pid).map_err(failed)?;
            // Empty for a moment while the other one starts.
            return Err(Error::AlreadyRunning { pid: pid.trim().parse().unwrap_or(0) });
        }
        Err(e) => return Err(failed(e.into())),
    }
    file.set_len(0)
        .and_then(|()| file.rewind())
        .and_then(|()| writeln!(file, "{}", std::process::id()))
        .map_err(failed)?;
    Ok(file)
}

fn remove_stale(socket: &Path) -> Result<()> {
    match fs::symlink_metadata(socket) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Ok(found) if found.file_type().is_socket() => {}
        Ok(found) => {
            let kind = FileType::from_raw_mode(std::os::unix::fs::MetadataExt::mode(&found));
            return Err(Error::InvalidArgument {
                what: format!("{} is in the way: a {kind:?}, not a socket; remove it", socket.display()),
            });
        }
        Err(e) => return Err(os(format!("looking at {}", socket.display()), &e)),
    }
    // The lock says that nobody serves it; but its file may have been removed by hand under a daemon that lives.
    let soon = Deadline::after(Duration::from_millis(500));
    if let Ok(daemon) = Socket::connect(socket, soon) {
        return Err(Error::AlreadyRunning { pid: daemon.peer().ok().and_then(|peer| peer.pid).unwrap_or(0) });
    }
    tracing::info!(socket = %socket.display(), "an earlier daemon ended without removing its socket");
    fs::remove_file(socket).map_err(|e| os(format!("removing the stale {}", socket.display()), &e))
}
